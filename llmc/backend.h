/*
Backend: the operations a device must offer, as one table of functions. It knows nothing of models,
recipes, files or ranks. The files of cpu/ fill one table; the same operations under the same names
make another device.

Outputs first, then inputs, then sizes. Tensors of activations are BF16 or FP32, the same dtype
throughout a call; rows are the B*T tokens. Vectors of a layer (gains, biases) and all gradients of
weights are FP32; gradients of weights are accumulated into (+=), gradients of activations written
(=), but where said. Same inputs and same number of threads: the same bits.
*/
#ifndef LLMC_BACKEND_H
#define LLMC_BACKEND_H

#include "llmc/numerics/tensor.h"
#include "llmc/base/util.h" // Error

#include <string.h>

typedef struct {
    bool transpose_a, transpose_b;
    bool accumulate;   // d += instead of d =
    const float *bias; // (N), added to each row of d; or NULL
} GemmOptions;

typedef struct {
    float learning_rate, beta1, beta2, eps, weight_decay;
    float gradient_scale; // what gradients are multiplied by: clipping
    int64_t step;         // 1-based, for the bias corrections
} AdamWOptions;

// Stochastic gradient descent, as PyTorch's: moment = momentum * moment + gradient, master -=
// learning_rate * moment.
typedef struct {
    float learning_rate, momentum;
    float gradient_scale; // what gradients are multiplied by: clipping
} SGDOptions;

// What stands between an MLP's two linear layers. All but SwiGLU take (rows, F) to (rows, F).
typedef enum {
    ACTIVATION_GELU,  // with the tanh approximation
    ACTIVATION_RELU,  // max(x, 0)
    ACTIVATION_RELU2, // max(x, 0)^2
    ACTIVATION_SWIGLU // (rows, 2*F) to (rows, F): silu of the first F columns times the others
} Activation;

// F of `cols` columns of an activation's input.
static inline int64_t activation_cols(Activation activation, int64_t cols) {
    return activation == ACTIVATION_SWIGLU ? cols / 2 : cols;
}

// Self-attention of B sequences of T tokens. Query head h attends to the keys and values of head h
// / (NH / NKV).
typedef struct {
    int64_t B, T, NH, NKV, HS; // NKV divides NH
    bool causal;               // a query sees the keys up to its own; else all
} AttentionShape;

// What quantizing a tensor did to it.
typedef struct {
    double amax;
    double signal, noise;                       // sums of x^2 and (decoded - x)^2
    int64_t elements, clamped, at_max, flushed; // clamped: |x| > max * scale; flushed: x != 0 and code 0
    int64_t blocks, blocks_unlike_rceil;        // whose scale differs from the one of rceil
} QuantStats;

// What `quantize` reads: a tensor, or what another operation would make, which is made as it is
// read and needn't be stored. The same bits, in x's dtype, as if that operation had stored it.
typedef enum {
    SOURCE_TENSOR,              // x
    SOURCE_LAYERNORM,           // layernorm_forward of x, whose mean and rstd are known
    SOURCE_ACTIVATION,          // activation_forward of x
    SOURCE_ACTIVATION_BACKWARD, // activation_backward of dout and x, not of SwiGLU
    SOURCE_ADAMW                // x, an FP32 master, after `adamw`, which is then done, moments too
} SourceKind;

typedef struct {
    SourceKind kind;
    Tensor x;
    Activation activation;                    // SOURCE_ACTIVATION, SOURCE_ACTIVATION_BACKWARD
    Tensor dout;                              // SOURCE_ACTIVATION_BACKWARD
    const float *mean, *rstd, *weight, *bias; // SOURCE_LAYERNORM: (rows), (rows), (cols), (cols); or NULL, as there
    float *moment1, *moment2;                 // SOURCE_ADAMW: (rows, cols), as is the gradient
    const float *gradient;
    AdamWOptions adamw;
    // Where what is made is stored besides, in x's dtype or, of an FP32 x, in BF16; {0}: nowhere.
    // May be dout's memory. SOURCE_TENSOR has none.
    Tensor stored;
} Source;

static inline Source source_tensor(Tensor x) {
    Source source;
    memset(&source, 0, sizeof(source));
    source.kind = SOURCE_TENSOR;
    source.x = x;
    return source;
}

// Columns of what a source is or makes.
static inline int64_t source_cols(const Source *source) {
    return source->kind == SOURCE_ACTIVATION ? activation_cols(source->activation, source->x.cols) : source->x.cols;
}

// How two MXFP8 operands are multiplied: as they are, where the device can, or decoded to BF16
// first.
typedef enum {
    MX_GEMM_AUTO,    // native where it can be
    MX_GEMM_NATIVE,  // dies where two MX operands can't be multiplied natively
    MX_GEMM_EMULATED // never native
} MxGemm;

typedef struct Backend {
    const char *name;
    // Logits and their gradients are made in pieces of so many bytes: few enough to stay in a CPU's
    // caches, on a GPU so many that accumulating the head's gradient once a piece costs little
    // beside multiplying.
    size_t head_scratch_bytes;

    // One sentence on what this device is and how it multiplies: "cpu: 2 threads, oneDNN 2.6.3
    // (avx512_core_bf16)".
    void (*describe)(char *text, size_t bytes);
    // Compares what this device multiplies natively with its emulation, before memory is planned:
    // quantized_form depends on it. `text`: a line on what was seen, or "". False: they differ by
    // more than accumulation can, and the emulation is used from here on.
    bool (*self_check)(char *text, size_t bytes);

    // Bytes of the device's memory that can still be allocated, but for what the program itself and
    // libraries take.
    double (*available_memory)(void);
    // Memory of the device, zeroed. Nothing else is allocated but inside the first step (libraries'
    // own objects).
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory);
    void (*zero)(void *memory, size_t bytes);
    void (*copy_to_device)(void *device, const void *host, size_t bytes);
    void (*copy_to_host)(void *host, const void *device, size_t bytes);
    void (*copy)(void *to, const void *from, size_t bytes); // within the device's memory
    // Tokens and targets of a micro-batch, `count` each, to device (2, count). The device copies
    // while it is at the operations called since the last copy_batch, which therefore must not use
    // this `device`; operations called later see what was copied. The host's memory may be changed
    // as soon as this returns.
    void (*copy_batch)(int32_t *device, const int32_t *tokens, const int32_t *targets, int64_t count);
    void (*synchronize)(void); // returns when all calls before have ended: a device may still be at them

    // Scratch that operations use inside a call: what the largest of the calls to come needs, given
    // once before them.
    size_t (*gemm_workspace)(Operand a, Operand b);
    size_t (*attention_workspace)(Format dtype, AttentionShape shape);
    // What layernorm_backward, bias_backward and embedding_backward need for dout (rows, cols).
    size_t (*reduction_workspace)(int64_t rows, int64_t cols);
    void (*use_workspace)(void *workspace, size_t bytes);

    // d[M,N] = op(a)[M,K] op(b)[K,N] (+ bias). In FP32 if a or b is an FP32 tensor, else both are
    // taken as BF16 and products accumulate in FP32. A quantized operand's blocks run along K. d is
    // BF16 or FP32.
    void (*gemm)(Tensor d, Operand a, Operand b, GemmOptions options);

    // `in` into MX copies, either or both of which may be NULL, in one pass. Formats and forms may
    // differ.
    void (*quantize)(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                     ScaleRounding rounding);
    // The form in which this device's GEMM takes a quantized operand best: one that is made for a
    // single GEMM, or one that is kept, which is never FORM_DECODED.
    QuantizedForm (*quantized_form)(bool for_one_gemm);
    // The same arithmetic, counted instead of stored: adds to `stats`.
    void (*quantize_stats)(QuantStats *stats, Tensor in, Axis axis, Format format, ScaleRounding rounding);
    // Between dtypes, to nearest even.
    void (*convert)(Tensor out, Tensor in);

    // out[b*T+t] = wte[tokens[b*T+t]] + wpe[t].  wte (V,C), wpe (maxT,C), or {0} and NULL: no
    // positions
    void (*embedding_forward)(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T);
    void (*embedding_backward)(float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, int64_t T);

    // Of input + residual, rounded to `sum`'s dtype and stored there; or, where residual is {0}, of
    // input, and then `sum` isn't written. mean, rstd (rows); weight, bias (C). out may be {0}:
    // statistics alone. mean NULL: RMSNorm (Zhang & Sennrich 2019), which subtracts none; rstd is
    // then one over the root mean square. weight NULL: gains of 1; bias NULL: none.
    void (*layernorm_forward)(Tensor out, Tensor sum, float *mean, float *rstd, Tensor input, Tensor residual,
                              const float *weight, const float *bias);
    // Adds to dinput: the residual stream passes by. dweight, dbias NULL: not wanted.
    void (*layernorm_backward)(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input,
                               const float *weight, const float *mean, const float *rstd);

    // Rotary positions (Su et al. 2021), in place: x (B*T, heads*HS), HS even; token t of a
    // sequence turns elements i and i + HS/2 of each head, as Hugging Face pairs them, by the angle
    // t * theta^(-2i/HS). inverse: back, as the gradient does. rotations, made by rope_rotations
    // for T positions or more: (T, HS) FP32, the cosines of a position's HS/2 angles, then their
    // sines.
    void (*rope_rotations)(float *rotations, int64_t T, int64_t HS, double theta);
    void (*rope)(Tensor x, const float *rotations, int64_t T, int64_t HS, bool inverse);

    // qkv (B*T, (NH + 2*NKV)*HS): queries, keys, values; out (B*T, NH*HS). logsumexp (B, NH, T) of
    // the scaled scores is kept for the backward pass, which recomputes the rest by blocks.
    void (*attention_forward)(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape);
    void (*attention_backward)(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, AttentionShape shape);

    // Backward may write over dout, but for SwiGLU, whose dinput is wider.
    void (*activation_forward)(Tensor out, Tensor input, Activation activation);
    void (*activation_backward)(Tensor dinput, Tensor dout, Tensor input, Activation activation);

    void (*bias_backward)(float *dbias, Tensor dout); // dbias += column sums

    // Softmax cross-entropy of logits (rows, V; FP32). losses (rows). dlogits (rows, V; may be {0}:
    // not wanted) = (softmax - onehot) * dloss. Writes over logits.
    void (*classifier)(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss);

    // losses (rows) = sums of (out - target)^2 over columns; dout, unless {0}, = 2 scale (out -
    // target).
    void (*squared_error)(float *losses, Tensor dout, Tensor out, Tensor target, float scale);
    // losses (rows) = KL(softmax(targets) || softmax(logits)); dlogits, unless {0}, = scale
    // (softmax(logits) - softmax(targets)).
    void (*kl_divergence)(float *losses, Tensor dlogits, Tensor logits, Tensor targets, float scale);

    // sum += values, (count).
    void (*accumulate)(float *sum, const float *values, int64_t count);
    // In double: the sum of squares; of squared differences; of the values.
    double (*sum_of_squares)(const float *values, int64_t count);
    double (*squared_distance)(const float *a, const float *b, int64_t count);
    double (*sum)(const float *values, int64_t count);

    // AdamW (Loshchilov & Hutter 2019), decoupled weight decay, all (count) FP32.
    void (*adamw)(float *master, float *moment1, float *moment2, const float *gradient, int64_t count,
                  AdamWOptions options);
    // moment NULL: without momentum.
    void (*sgd)(float *master, float *moment, const float *gradient, int64_t count, SGDOptions options);
} Backend;

// The CPU's table.
const Backend *backend_cpu(void);

// An NVIDIA GPU's. NULL with an error in a build without CUDA, where there is none that can be
// used, or that multiplies natively where that is demanded. A later call may say another `mx_gemm`,
// before memory is planned.
const Backend *backend_cuda(MxGemm mx_gemm, Error *error);
bool backend_cuda_has_driver(void);
// The table of `train_gpt_mxfp8 --device-info`.
void backend_cuda_print_info(FILE *file);

#endif
