/*
The operations that a device must offer. Each stands here once, with its signature, and who includes
this file says what becomes of the rows: backend.h makes them the members of a table, cpu.h and
cuda.h declare the twins cpu_NAME and cuda_NAME, both backend.c fill their tables with them, and
profile.c wraps each in a clock.

    OPERATION(result, name, parameters, arguments)  works on the device; the arguments are the
                                                    parameters' names, for who passes them on
    QUERY(result, name, parameters)                 answers at once, before memory is planned

Outputs come first, then inputs, then sizes. Tensors of activations are BF16 or FP32, the same dtype
throughout a call; rows are the B*T tokens. Vectors of a layer (gains, biases) and all gradients of
weights are FP32. Gradients of weights are accumulated into (+=) and gradients of activations
written (=), unless an operation says otherwise. The same inputs and number of threads give the same
bits.
*/

// Workspaces: scratch that operations use inside a call

// Returns the bytes that gemm needs for these operands, whose data may be NULL.
QUERY(size_t, gemm_workspace, (Operand a, Operand b))
// Returns whether gemm first writes operands' values to memory: of quantized ones that it doesn't
// multiply as they are, and of tensors of another dtype than the other's. Looks at no data.
QUERY(bool, gemm_decodes, (Tensor d, Operand a, Operand b, GemmOptions options))
// Returns why gemm can't multiply these, a clause, or NULL: where a GPU would have to emulate what
// it is to multiply natively. Looks at no data.
QUERY(const char *, gemm_refuses, (Tensor d, Operand a, Operand b, GemmOptions options))
// Returns the bytes that attention_forward and attention_backward need.
QUERY(size_t, attention_workspace, (Format dtype, AttentionShape shape))
// Returns the bytes that layernorm_backward, bias_backward, activation_backward, embedding_backward
// and sums of what is quantized need for dout, or dinput (rows, cols).
QUERY(size_t, reduction_workspace, (int64_t rows, int64_t cols))

// Memory and dtypes

// Sets the device's memory to zero.
OPERATION(void, zero, (void *memory, size_t bytes), (memory, bytes))
// Converts between dtypes, to nearest even.
OPERATION(void, convert, (Tensor out, Tensor in), (out, in))

// Quantized linear layers

// Multiplies: d[M,N] = op(a)[M,K] op(b)[K,N] (+ bias). Computes in FP32 if a or b is an FP32
// tensor; else both are taken as BF16 and products accumulate in FP32. A quantized operand's blocks
// run along K. d is BF16 or FP32.
OPERATION(void, gemm, (Tensor d, Operand a, Operand b, GemmOptions options), (d, a, b, options))

// Quantizes `in` into a rowwise and a columnwise copy, either or both of which may be NULL. Their
// formats, scalings and forms may differ. `rounding` is of MX scales.
OPERATION(void, quantize,
          (const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in, ScaleRounding rounding),
          (rowwise, columnwise, in, rounding))
// Sets `amax` to the largest magnitude of `in`, as mx_magnitude_bits: 0 of no elements.
OPERATION(void, amax, (uint32_t * amax, Tensor in), (amax, in))
// Counts what quantizing into a copy would do, by the same arithmetic, and adds it to `stats`. The
// copy needs no memory; `rounding` is of MX scales.
OPERATION(void, quantize_stats, (QuantStats * stats, Tensor in, const QuantizedTensor *copy, ScaleRounding rounding),
          (stats, in, copy, rounding))
// Decodes: out = the values of `in`, of whatever form, with its tensor's factor, rounded to out's
// dtype.
OPERATION(void, decode, (Tensor out, const QuantizedTensor *in), (out, in))
// Transforms along an axis, rowwise or columnwise, in groups from its beginning on: see
// numerics/hadamard.h. out has in's shape and dtype.
OPERATION(void, hadamard, (Tensor out, Tensor in, Axis axis, Hadamard hadamard), (out, in, axis, hadamard))
// Returns the form in which gemm takes a quantized operand of a scaling and an axis best: one that
// is made for a single GEMM, or one that is kept, which is never FORM_DECODED.
QUERY(QuantizedForm, quantized_form, (Scaling scaling, Axis axis, bool for_one_gemm))

// Adds the sums of dout's columns to dbias.
OPERATION(void, bias_backward, (float *dbias, Tensor dout), (dbias, dout))

// The model's other layers

// Looks up: out[b*T+t] = wte[tokens[b*T+t]] + wpe[t], or of documents wpe[positions[b*T+t]]. wte is
// (V,C), wpe (maxT,C); without learned positions wpe is {0} and dwpe NULL.
OPERATION(void, embedding_forward, (Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, Sequences sequences),
          (out, tokens, wte, wpe, sequences))
OPERATION(void, embedding_backward, (float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, Sequences sequences),
          (dwte, dwpe, tokens, dout, sequences))

// Normalizes input + residual, which is rounded to `sum`'s dtype and stored there, maybe over
// either of the two; or, where residual is {0}, input, and then `sum` isn't written. Writes the
// norm's statistics. out may be {0}: statistics alone.
OPERATION(void, layernorm_forward, (Tensor out, Tensor sum, Tensor input, Tensor residual, NormParams norm),
          (out, sum, input, residual, norm))
// Adds to dinput: the residual stream passes by. dweight and dbias may be NULL: not wanted. `input`
// is what was normalized.
OPERATION(void, layernorm_backward,
          (Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input, NormParams norm),
          (dinput, dweight, dbias, dout, input, norm))

// Makes the rotations that `rope` takes, for up to T positions: (T, HS) FP32, the cosines of a
// position's HS/2 angles, then their sines.
OPERATION(void, rope_rotations, (float *rotations, int64_t T, int64_t HS, double theta), (rotations, T, HS, theta))
// Turns x (B*T, heads*HS), HS even, by rotary positions (Su et al. 2021), in place: token t of a
// sequence turns elements i and i + HS/2 of each head, as Hugging Face pairs them, by the angle
// t * theta^(-2i/HS), of documents with its position in t's place; back by it where `inverse`, as
// the gradient does.
OPERATION(void, rope, (Tensor x, const float *rotations, Sequences sequences, int64_t HS, bool inverse),
          (x, rotations, sequences, HS, inverse))

// Attends: qkv (B*T, (NH + 2*NKV)*HS) holds queries, keys, values; out is (B*T, NH*HS). Keeps the
// logsumexp (B, NH, T) of the scaled scores for the backward pass, which recomputes the rest by
// blocks. It is given `out` where that was kept, {0} elsewhere: a backend that wants it makes it
// again then.
OPERATION(void, attention_forward, (Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape),
          (out, logsumexp, qkv, shape))
OPERATION(void, attention_backward,
          (Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp, AttentionShape shape),
          (dqkv, dout, out, qkv, logsumexp, shape))

// Applies an activation. The backward pass may write over dout, but for SwiGLU, whose dinput is
// wider. It adds the sums of dinput's columns, the gradient of the bias that the input was made
// with, to dbias, which may be NULL: the same bits as bias_backward's.
OPERATION(void, activation_forward, (Tensor out, Tensor input, Activation activation), (out, input, activation))
OPERATION(void, activation_backward, (Tensor dinput, float *dbias, Tensor dout, Tensor input, Activation activation),
          (dinput, dbias, dout, input, activation))

// Computes the softmax cross-entropy of logits (rows, V; FP32): losses (rows), and dlogits (rows,
// V; or {0}: not wanted) = (softmax - onehot) * dloss. Writes over logits.
OPERATION(void, classifier, (float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss),
          (losses, dlogits, logits, targets, dloss))

// Sums and the optimizer

// Adds values (count) to sum (count).
OPERATION(void, accumulate, (float *sum, const float *values, int64_t count), (sum, values, count))
// Return, added in double, the sum of the values, of their squares, of the squares of differences.
OPERATION(double, sum, (const float *values, int64_t count), (values, count))
OPERATION(double, sum_of_squares, (const float *values, int64_t count), (values, count))
OPERATION(double, squared_distance, (const float *a, const float *b, int64_t count), (a, b, count))

// Adds multiples: out = a x + b y in FP32, rounded at the store; y may be {0}: a x. Dtypes may
// differ; out may be x or y.
OPERATION(void, combine, (Tensor out, float a, Tensor x, float b, Tensor y), (out, a, x, b, y))

// Takes a step of AdamW (Loshchilov & Hutter 2019), with decoupled weight decay: updates a
// parameter's master and moments, and makes the copies of the new master in the same pass.
OPERATION(void, adamw, (AdamWUpdate update), (update))

// Only dev/proxy uses these

// Copies within the device's memory.
OPERATION(void, copy, (void *to, const void *from, size_t bytes), (to, from, bytes))
// Computes losses (rows), the sums of (out - target)^2 over columns, and dout = 2 scale (out -
// target) unless it is {0}.
OPERATION(void, squared_error, (float *losses, Tensor dout, Tensor out, Tensor target, float scale),
          (losses, dout, out, target, scale))
// Computes losses (rows) = KL(softmax(targets) || softmax(logits)), and dlogits = scale
// (softmax(logits) - softmax(targets)) unless it is {0}.
OPERATION(void, kl_divergence, (float *losses, Tensor dlogits, Tensor logits, Tensor targets, float scale),
          (losses, dlogits, logits, targets, scale))
// Takes a step of SGD as PyTorch does: moment = momentum * moment + gradient, master -=
// learning_rate * moment. moment may be NULL: without momentum.
OPERATION(void, sgd, (float *master, float *moment, const float *gradient, int64_t count, SGDOptions options),
          (master, moment, gradient, count, options))

#undef OPERATION
#undef QUERY
