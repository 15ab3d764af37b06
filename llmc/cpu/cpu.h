/*
What the files of the CPU backend share: the operations (one prototype each; see ../backend.h), the
workspace, and rows of either dtype as FP32.
*/
#ifndef LLMC_CPU_H
#define LLMC_CPU_H

#include "llmc/backend.h"

// Columns that one thread sums over all rows: four cache lines of BF16. Reductions over rows go by
// slabs of columns, so that their order doesn't depend on the number of threads.
enum { CPU_SLAB = 128 };

// The scratch given by use_workspace. Dies if it holds fewer than `bytes`.
void *cpu_workspace(size_t bytes);

// d = op(a) op(b) on plain pointers, the building block of gemm and attention. Called inside a
// parallel region it runs on the calling thread alone, else on all.
typedef struct {
    int64_t M, N, K;
    int64_t lda, ldb, ldd; // strides between rows as stored
    bool transpose_a, transpose_b, accumulate;
    Format dtype;   // of a and b
    Format d_dtype; // BF16 or FP32
    bool has_bias;
} CpuMatmul;

void cpu_matmul(void *d, const void *a, const void *b, const float *bias, CpuMatmul shape);

// Whether cpu_matmul takes BF16 operands; where not, gemm and attention give it FP32.
bool cpu_matmul_takes_bf16(void);
void cpu_matmul_describe(char *text, size_t bytes);

static inline void cpu_load(float *out, const void *in, Format dtype, int64_t count) {
    if (dtype == FORMAT_FP32) {
        memcpy(out, in, (size_t)count * sizeof(float));
    } else {
        const uint16_t *bf16 = in;
        for (int64_t i = 0; i < count; i++) {
            out[i] = mx_from_bf16(bf16[i]);
        }
    }
}

static inline void cpu_store(void *out, Format dtype, const float *in, int64_t count) {
    if (dtype == FORMAT_FP32) {
        memcpy(out, in, (size_t)count * sizeof(float));
    } else {
        uint16_t *bf16 = out;
        for (int64_t i = 0; i < count; i++) {
            bf16[i] = mx_to_bf16(in[i]);
        }
    }
}

static inline void *cpu_at(Tensor tensor, int64_t row, int64_t col) {
    return (char *)tensor.data + (size_t)(row * tensor.stride + col) * dtype_size(tensor.dtype);
}

static inline void cpu_load_row(float *out, Tensor tensor, int64_t row) {
    cpu_load(out, cpu_at(tensor, row, 0), tensor.dtype, tensor.cols);
}

static inline void cpu_store_row(Tensor tensor, int64_t row, const float *in) {
    cpu_store(cpu_at(tensor, row, 0), tensor.dtype, in, tensor.cols);
}

size_t cpu_gemm_workspace(Operand a, Operand b);
size_t cpu_attention_workspace(Format dtype, AttentionShape shape);
void cpu_gemm(Tensor d, Operand a, Operand b, GemmOptions options);
void cpu_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in, ScaleRounding rounding);
QuantizedForm cpu_quantized_form(bool for_one_gemm);
void cpu_quantize_stats(QuantStats *stats, Tensor in, Axis axis, Format format, ScaleRounding rounding);
// out = decoded values, rounded to `values` (BF16 or FP32) whatever out's dtype.
void cpu_dequantize(Tensor out, const QuantizedTensor *in, Format values);
void cpu_convert(Tensor out, Tensor in);
void cpu_embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T);
void cpu_embedding_backward(float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, int64_t T);
void cpu_layernorm_forward(Tensor out, Tensor sum, float *mean, float *rstd, Tensor input, Tensor residual,
                           const float *weight, const float *bias);
void cpu_layernorm_backward(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input, const float *weight,
                            const float *mean, const float *rstd);
void cpu_rope_rotations(float *rotations, int64_t T, int64_t HS, double theta);
void cpu_rope(Tensor x, const float *rotations, int64_t T, int64_t HS, bool inverse);
void cpu_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape);
void cpu_attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, AttentionShape shape);
void cpu_activation_forward(Tensor out, Tensor input, Activation activation);
void cpu_activation_backward(Tensor dinput, Tensor dout, Tensor input, Activation activation);
void cpu_bias_backward(float *dbias, Tensor dout);
void cpu_classifier(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss);
void cpu_squared_error(float *losses, Tensor dout, Tensor out, Tensor target, float scale);
void cpu_kl_divergence(float *losses, Tensor dlogits, Tensor logits, Tensor targets, float scale);
void cpu_accumulate(float *sum, const float *values, int64_t count);
double cpu_sum_of_squares(const float *values, int64_t count);
double cpu_squared_distance(const float *a, const float *b, int64_t count);
double cpu_sum(const float *values, int64_t count);
void cpu_adamw(float *master, float *moment1, float *moment2, const float *gradient, int64_t count,
               AdamWOptions options);
void cpu_sgd(float *master, float *moment, const float *gradient, int64_t count, SGDOptions options);

#endif
