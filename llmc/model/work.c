#include "work.h"

// Each function has all parameters of its operation, of which it may need one.
#pragma GCC diagnostic ignored "-Wunused-parameter"

static const double FLOAT = sizeof(float), TOKEN = sizeof(int32_t);

static double elements_of(Tensor tensor) { return (double)tensor.rows * (double)tensor.cols; }

// Returns the bytes of a tensor; of {0} none.
static double bytes_of(Tensor tensor) {
    return tensor.data ? elements_of(tensor) * (double)dtype_size(tensor.dtype) : 0;
}

static double quantized_bytes_of(const QuantizedTensor *q) {
    if (!q || !q->elements) return 0;
    double elements = (double)q->rows * (double)q->cols;
    if (q->form == FORM_DECODED) return 2 * elements;
    return elements + (double)scaled_scale_bytes(q->scaling, q->form, q->axis, q->rows, q->cols);
}

static double operand_bytes(Operand operand) {
    return operand_is_quantized(operand) ? quantized_bytes_of(&operand.quantized) : bytes_of(operand.tensor);
}

// Returns the bytes of `count` values that are there unless `values` is NULL.
static double floats(const float *values, int64_t count) { return values ? FLOAT * (double)count : 0; }

Work work_add(Work a, Work b) { return (Work){a.read + b.read, a.written + b.written, a.operations + b.operations}; }

// Memory and dtypes

Work work_zero(void *memory, size_t bytes) { return (Work){.written = (double)bytes}; }
Work work_convert(Tensor out, Tensor in) { return (Work){.read = bytes_of(in), .written = bytes_of(out)}; }
Work work_copy(void *to, const void *from, size_t bytes) { return (Work){(double)bytes, (double)bytes, 0}; }

// Quantized linear layers

Work work_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    double K = (double)(options.transpose_a ? operand_rows(a) : operand_cols(a));
    return (Work){.read = operand_bytes(a) + operand_bytes(b) + floats(options.bias, d.cols) +
                          (options.accumulate ? bytes_of(d) : 0),
                  .written = bytes_of(d),
                  .operations = 2 * K * elements_of(d)};
}

Work work_of_decoding(Operand a, Operand b) {
    Work work = {0};
    Format dtype = operands_value_dtype(operand_as_stored(a), operand_as_stored(b));
    const Operand operands[] = {operand_as_stored(a), operand_as_stored(b)};
    for (int i = 0; i < 2; i++) {
        Operand o = operands[i];
        if (!operand_is_quantized(o) && o.tensor.dtype == dtype) continue;
        double values = (double)operand_rows(o) * (double)operand_cols(o) * (double)dtype_size(dtype);
        // Values are written, and read in place of what the GEMM was given, which is read to make
        // them.
        work.read += values;
        work.written += values;
    }
    return work;
}

// Returns whether a copy, unless NULL, has a factor that is made of the whole source before any
// element.
static bool wants_amax(const QuantizedTensor *q) {
    return q && scaling_has_factor(q->scaling) && !q->delayed.scale && !q->amax;
}

Work work_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                   ScaleRounding rounding) {
    Work work = {.read = bytes_of(in.x),
                 .written = quantized_bytes_of(rowwise) + quantized_bytes_of(columnwise) + bytes_of(in.stored)};
    double sums = floats(in.sums, source_cols(&in));
    work = work_add(work, (Work){.read = sums, .written = sums});
    if (in.kind == SOURCE_ACTIVATION_BACKWARD) work.read += bytes_of(in.dout);
    if (in.kind == SOURCE_LAYERNORM) {
        work.read += floats(in.norm.mean, in.x.rows) + floats(in.norm.rstd, in.x.rows) +
                     floats(in.norm.weight, in.x.cols) + floats(in.norm.bias, in.x.cols);
    }
    if (wants_amax(rowwise) || wants_amax(columnwise)) work.read += work.read - sums;
    return work;
}

Work work_amax(uint32_t *amax, Tensor in) { return (Work){.read = bytes_of(in), .written = sizeof(*amax)}; }

Work work_quantize_stats(QuantStats *stats, Tensor in, const QuantizedTensor *copy, ScaleRounding rounding) {
    return (Work){.read = (wants_amax(copy) ? 2 : 1) * bytes_of(in)};
}

Work work_decode(Tensor out, const QuantizedTensor *in) {
    return (Work){.read = quantized_bytes_of(in), .written = bytes_of(out)};
}

Work work_hadamard(Tensor out, Tensor in, Axis axis, Hadamard hadamard) { return work_convert(out, in); }

Work work_bias_backward(float *dbias, Tensor dout) {
    return (Work){.read = bytes_of(dout) + floats(dbias, dout.cols), .written = floats(dbias, dout.cols)};
}

// The model's other layers

// A row of wte for each token, those of wpe once.
Work work_embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, Sequences sequences) {
    double row = (double)(wte.cols * (int64_t)dtype_size(wte.dtype));
    return (Work){.read = (double)out.rows * (TOKEN + row) + (wpe.data ? (double)sequences.T * row : 0),
                  .written = bytes_of(out)};
}

// A row of dwte for each token: no more are added to.
Work work_embedding_backward(float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, Sequences sequences) {
    double added = FLOAT * elements_of(dout) + floats(dwpe, sequences.T * dout.cols);
    return (Work){.read = TOKEN * (double)dout.rows + bytes_of(dout) + added, .written = added};
}

Work work_layernorm_forward(Tensor out, Tensor sum, Tensor input, Tensor residual, NormParams norm) {
    double statistics = floats(norm.mean, input.rows) + floats(norm.rstd, input.rows);
    Work work = {.read = bytes_of(input) + bytes_of(residual), .written = bytes_of(out) + statistics};
    if (residual.data) work.written += bytes_of(sum);
    if (out.data) work.read += floats(norm.weight, input.cols) + floats(norm.bias, input.cols);
    return work;
}

Work work_layernorm_backward(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input, NormParams norm) {
    double added = bytes_of(dinput) + floats(dweight, input.cols) + floats(dbias, input.cols);
    double statistics = floats(norm.mean, input.rows) + floats(norm.rstd, input.rows);
    return (Work){.read = bytes_of(dout) + bytes_of(input) + statistics + floats(norm.weight, input.cols) + added,
                  .written = added};
}

Work work_rope_rotations(float *rotations, int64_t T, int64_t HS, double theta) {
    return (Work){.written = floats(rotations, T * HS)};
}

Work work_rope(Tensor x, const float *rotations, Sequences sequences, int64_t HS, bool inverse) {
    return (Work){.read = bytes_of(x) + floats(rotations, sequences.T * HS), .written = bytes_of(x)};
}

// Returns the operations of one product of T x T with T x HS for each head, of a causal one half.
static double product_of(AttentionShape s) {
    return (s.causal ? 1 : 2) * (double)s.B * (double)s.T * (double)s.T * (double)s.NH * (double)s.HS;
}

Work work_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape) {
    return (Work){.read = bytes_of(qkv),
                  .written = bytes_of(out) + floats(logsumexp, shape.B * shape.NH * shape.T),
                  .operations = 2 * product_of(shape)};
}

// Scores again, and the gradients of scores, queries, keys and values.
Work work_attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                             AttentionShape shape) {
    return (Work){.read =
                      bytes_of(dout) + bytes_of(out) + bytes_of(qkv) + floats(logsumexp, shape.B * shape.NH * shape.T),
                  .written = bytes_of(dqkv),
                  .operations = 5 * product_of(shape)};
}

Work work_activation_forward(Tensor out, Tensor input, Activation activation) { return work_convert(out, input); }

Work work_activation_backward(Tensor dinput, float *dbias, Tensor dout, Tensor input, Activation activation) {
    double sums = floats(dbias, dinput.cols);
    return (Work){.read = bytes_of(dout) + bytes_of(input) + sums, .written = bytes_of(dinput) + sums};
}

Work work_classifier(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss) {
    return (Work){.read = bytes_of(logits) + TOKEN * (double)logits.rows,
                  .written = bytes_of(dlogits) + floats(losses, logits.rows)};
}

// Sums and the optimizer

Work work_accumulate(float *sum, const float *values, int64_t count) {
    return (Work){.read = 2 * FLOAT * (double)count, .written = FLOAT * (double)count};
}

Work work_sum(const float *values, int64_t count) { return (Work){.read = floats(values, count)}; }

Work work_sum_of_squares(const float *values, int64_t count) { return (Work){.read = floats(values, count)}; }

Work work_squared_distance(const float *a, const float *b, int64_t count) {
    return (Work){.read = 2 * floats(a, count)};
}

Work work_combine(Tensor out, float a, Tensor x, float b, Tensor y) {
    return (Work){.read = bytes_of(x) + bytes_of(y), .written = bytes_of(out)};
}

Work work_adamw(AdamWUpdate u) {
    double count = (double)u.rows * (double)u.cols;
    return (Work){.read = 4 * FLOAT * count,
                  .written = 3 * FLOAT * count + quantized_bytes_of(&u.rowwise) + quantized_bytes_of(&u.columnwise) +
                             (u.bf16 ? 2 * count : 0)};
}

Work work_sgd(float *master, float *moment, const float *gradient, int64_t count, SGDOptions options) {
    double updated = floats(master, count) + floats(moment, count);
    return (Work){.read = updated + floats(gradient, count), .written = updated};
}

// Only dev/proxy uses these

Work work_squared_error(float *losses, Tensor dout, Tensor out, Tensor target, float scale) {
    return (Work){.read = bytes_of(out) + bytes_of(target), .written = bytes_of(dout) + floats(losses, out.rows)};
}

Work work_kl_divergence(float *losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) {
    return work_squared_error(losses, dlogits, logits, targets, scale);
}
