/*
Backend: what a device must offer, as one table of functions. It knows nothing of models, recipes,
files or ranks. The files of cpu/ fill one table; the same operations under the same names make
another device.
*/
#pragma once

#include "llmc/numerics/tensor.h"
#include "llmc/numerics/block_stats.h" // QuantStats
#include "llmc/numerics/hadamard.h"    // Hadamard
#include "llmc/base/util.h"            // Error

#include <string.h>

typedef struct {
    bool transpose_a, transpose_b;
    bool accumulate;   // d += instead of d =
    const float *bias; // (N), added to each row of d; or NULL
    bool fast_sum;     // of FP8 operands: may keep fewer bits, where that makes it faster
} GemmOptions;

// Returns whether quantized operands' blocks run along K, as gemm wants them.
static inline bool gemm_blocks_run_along_k(Operand a, Operand b, GemmOptions options) {
    return operand_runs_along(a, options.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE) &&
           operand_runs_along(b, options.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE);
}

// What a step of AdamW (Loshchilov & Hutter 2019) takes for every element, bias corrections
// computed once. With g = gradient_scale * gradient:
//   moment1 = beta1 * moment1 + (1 - beta1) * g
//   moment2 = beta2 * moment2 + (1 - beta2) * g^2
//   master  = decay * master - step_size * moment1 / (root2 * sqrt(moment2) + eps)
typedef struct {
    float beta1, beta2, eps;
    float gradient_scale; // clipping
    float decay;          // 1 - learning rate * weight decay
    float step_size;      // the learning rate over 1 - beta1^step
    float root2;          // 1 / sqrt(1 - beta2^step)
} AdamWFactors;

// A parameter's update, and the copies to make of its new masters in the same pass.
typedef struct {
    float *master, *moment1, *moment2; // (rows, cols), as is the gradient
    const float *gradient;
    int64_t rows, cols;
    AdamWFactors factors;
    QuantizedTensor rowwise, columnwise; // MX copies, the bits of `quantize`; without elements: not wanted
    ScaleRounding rounding;              // of these
    uint16_t *bf16;                      // (rows, cols), a BF16 copy; or NULL
} AdamWUpdate;

typedef struct {
    float learning_rate, momentum;
    float gradient_scale; // what gradients are multiplied by: clipping
} SGDOptions;

// n = (x - mean) * rstd for each row x of C, and of that n * weight + bias. rstd is one over the
// standard deviation.
typedef enum {
    NORM_LAYERNORM, // Ba et al. 2016
    NORM_RMSNORM    // Zhang & Sennrich 2019: the mean is taken as 0, rstd from the mean square
} NormKind;

typedef struct {
    NormKind kind;
    float eps;                  // added to the variance, or to the mean square
    float *mean, *rstd;         // (rows), what layernorm_forward found; RMSNorm has no mean
    const float *weight, *bias; // (C), or NULL: gains of 1; no biases
} NormParams;

#define NORM_EPS 1e-5 // of all norms in this program

// What stands between an MLP's two linear layers. All but SwiGLU, the last, take (rows, F) to
// (rows, F). A new one has its formulas in cpu/rows.h and cuda/ops.cuh, its names in
// model/gpt_config.c; the compiler asks for each.
typedef enum {
    ACTIVATION_GELU,       // with the tanh approximation
    ACTIVATION_RELU,       // max(x, 0)
    ACTIVATION_RELU2,      // max(x, 0)^2
    ACTIVATION_GELU_EXACT, // x times the normal distribution function (Hendrycks & Gimpel 2016)
    ACTIVATION_SWIGLU      // (rows, 2*F) to (rows, F): silu of the first F columns times the others
} Activation;
enum { NUM_ACTIVATIONS = ACTIVATION_SWIGLU + 1 };

// GELU's tanh approximation is x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), and
// (1 + tanh(u)) / 2 is the logistic function of 2 u, which has no cancellation where u is large and
// negative.
#define GELU_SCALE 1.5957691216057308f // 2 sqrt(2 / pi)
#define GELU_CUBIC 0.044715f
#define LOG2_E 1.4426950408889634f // log2(e)

// Returns F for `cols` columns of an activation's input.
static inline int64_t activation_cols(Activation activation, int64_t cols) {
    return activation == ACTIVATION_SWIGLU ? cols / 2 : cols;
}

// Rows of tokens as sequences of T. `positions`, where it isn't NULL, is (B, T): each token's place
// in its document, from 0 on and one more at each token until the next document begins. What a
// sequence begins with begins a document for it, whatever came before it in the data. NULL: a
// sequence is one document.
typedef struct {
    int64_t T;
    const int32_t *positions;
} Sequences;

// Self-attention of B sequences of T tokens. Query head h attends to the keys and values of head h
// / (NH / NKV).
typedef struct {
    int64_t B, T, NH, NKV, HS; // NKV divides NH
    bool causal;               // a query sees the keys up to its own; false, in dev/proxy alone: all
    bool by_document;          // and of these its own document's; only where causal
    const int32_t *positions;  // of Sequences, where by_document; not needed to ask for a workspace
    bool forward_only;         // no backward pass follows, or needs room for dS
} AttentionShape;

// What `quantize` reads: a tensor, or what another operation would make, which is made as it is
// read and needn't be stored. The same bits, in x's dtype, as if that operation had stored it.
typedef enum {
    SOURCE_TENSOR,             // x
    SOURCE_LAYERNORM,          // layernorm_forward of x, whose statistics are known
    SOURCE_ACTIVATION,         // activation_forward of x
    SOURCE_ACTIVATION_BACKWARD // activation_backward of dout and x, not of SwiGLU
} SourceKind;

typedef struct {
    SourceKind kind;
    Tensor x;
    NormParams norm;       // SOURCE_LAYERNORM
    Activation activation; // SOURCE_ACTIVATION, SOURCE_ACTIVATION_BACKWARD
    Tensor dout;           // SOURCE_ACTIVATION_BACKWARD
    // Where what is made is stored besides, in x's dtype or, of an FP32 x, in BF16; {0}: nowhere.
    // May be dout's memory. SOURCE_TENSOR has none.
    Tensor stored;
    // What the sums of columns (source_cols) are added to, a bias's gradient; or NULL. Of a tensor,
    // or of an activation's gradient, which may then be written over dout, and which is stored in
    // x's dtype if at all.
    float *sums;
    bool is_summed; // of a gradient: they were made with it
} Source;

static inline Source source_tensor(Tensor x) {
    Source source;
    memset(&source, 0, sizeof(source));
    source.kind = SOURCE_TENSOR;
    source.x = x;
    return source;
}

// Returns the columns of what a source is or makes.
static inline int64_t source_cols(const Source *source) {
    return source->kind == SOURCE_ACTIVATION ? activation_cols(source->activation, source->x.cols) : source->x.cols;
}

// What of a device's GEMMs of quantized operands can be trusted.
typedef enum {
    SELF_CHECK_PASSED,   // all, or there was nothing to check
    SELF_CHECK_EMULATES, // those that are emulated
    SELF_CHECK_FAILED    // none
} SelfCheck;

// How two quantized operands are multiplied: as they are (of NVFP4: packed), where the device can,
// or decoded to BF16 first.
typedef enum {
    MX_GEMM_AUTO,    // native where it can be
    MX_GEMM_NATIVE,  // dies where two quantized operands can't be multiplied natively
    MX_GEMM_EMULATED // never native
} MxGemm;

// GEMMs of two quantized operands whose scaling the device has native GEMMs for.
typedef struct {
    int64_t native, emulated;
} GemmCounts;

typedef struct Backend {
    const char *name;
    // Logits and their gradients are made in pieces of so many bytes: so many that reading the
    // head's weight and accumulating its gradient once a piece costs little beside multiplying. A
    // piece has a multiple of head_rows_multiple tokens.
    size_t head_scratch_bytes;
    int64_t head_rows_multiple; // of MX_BLOCK
    // What the vocabulary is padded to in GEMMs, which take it as M, N or K: 1 or a multiple of
    // 128.
    int64_t vocab_multiple;

    // Writes one sentence on what this device is and how it multiplies: "cpu: 2 threads, oneDNN
    // 2.6.3 (avx512_core_bf16)".
    void (*describe)(char *text, size_t bytes);
    // Compares what this device multiplies natively of some scalings (bits 1 << Scaling), and the
    // same emulated, with exact sums, before memory is planned: quantized_form depends on it.
    // Writes a line on what was seen, or "". Returns what can be trusted; where that is the
    // emulation alone, it is used from then on.
    SelfCheck (*self_check)(unsigned scalings, char *text, size_t bytes);
    // Returns how many GEMMs of such operands have been multiplied natively since the program
    // began, and how many emulated; the self-check's own aside. Zeros where none is to be native,
    // as after a self-check that failed.
    GemmCounts (*gemm_counts)(void);

    // Returns the bytes of the device's memory that can still be allocated, less what the program
    // itself and libraries take.
    double (*available_memory)(void);
    // Returns memory of the device, zeroed. Nothing else is allocated but inside the first step
    // (libraries' own objects).
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory);
    void (*copy_to_device)(void *device, const void *host, size_t bytes);
    void (*copy_to_host)(void *host, const void *device, size_t bytes);
    // Copies tokens and targets of a micro-batch, `count` each, to device (2, count), and, unless
    // they are NULL, positions behind them (3, count), while the device is at the operations called
    // since the last copy_batch, which therefore must not use this `device`; operations called
    // later see what was copied. The host's memory may be changed as soon as this returns.
    void (*copy_batch)(int32_t *device, const int32_t *tokens, const int32_t *targets, const int32_t *positions,
                       int64_t count);
    // Returns when all calls before have ended: a device may still be at them.
    void (*synchronize)(void);
    // Returns the seconds since some moment, by the clock that this device's calls take time by:
    // for a device that is only planned, what they would have taken.
    double (*now)(void);
    // Gives operations their scratch: what the largest of the calls to come needs, once before
    // them.
    void (*use_workspace)(void *workspace, size_t bytes);

// A member for each operation: void (*gemm)(Tensor d, Operand a, Operand b, GemmOptions options);
#define OPERATION(result, name, parameters, arguments) result(*name) parameters;
#define QUERY(result, name, parameters) result(*name) parameters;
#include "operations.h"
} Backend;

// Returns the CPU's table.
const Backend *backend_cpu(void);

// Returns an NVIDIA GPU's table; or NULL with an error in a build without CUDA, where there is no
// GPU that can be used, or none that multiplies natively where that is demanded. A later call may
// say another `mx_gemm`, before memory is planned.
const Backend *backend_cuda(MxGemm mx_gemm, Error *error);
bool backend_cuda_has_driver(void);
// Prints the table of `train_gpt_mxfp8 --device-info`.
void backend_cuda_print_info(FILE *file);
