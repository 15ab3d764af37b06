/*
What the files of the CUDA backend share: the operations (one prototype each; see ../backend.h), the
workspace, the stream that everything runs on, and checks. Usable from C, for the files that only
call libraries, and from CUDA C++.
*/
#ifndef LLMC_CUDA_H
#define LLMC_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

#include "llmc/backend.h"
#include "llmc/base/util.h" // die

#include <cuda_runtime_api.h>

// Dies with a sentence: `doing` says what was being done, as in "copying to the GPU".
void cuda_check_at(cudaError_t status, const char *doing, const char *file, int line);
#define cuda_check(status, doing) cuda_check_at(status, doing, __FILE__, __LINE__)

// The one stream of all operations: they run in the order of their calls.
cudaStream_t cuda_stream(void);

// The scratch given by use_workspace. Dies if it holds fewer than `bytes`.
void *cuda_workspace(size_t bytes);

// Rows that one thread block sums in the first stage of a sum over rows. Their partial sums are
// added in order, so that neither the card nor the number of its multiprocessors changes a bit.
enum { CUDA_ROWS_PER_PART = 256 };

size_t cuda_gemm_workspace(Operand a, Operand b);
size_t cuda_attention_workspace(Format dtype, AttentionShape shape);
size_t cuda_reduction_workspace(int64_t rows, int64_t cols);
void cuda_gemm(Tensor d, Operand a, Operand b, GemmOptions options);
void cuda_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                   ScaleRounding rounding);
QuantizedForm cuda_quantized_form(bool for_one_gemm);
void cuda_quantize_stats(QuantStats *stats, Tensor in, Axis axis, Format format, ScaleRounding rounding);
// out = decoded values, rounded to `values` (BF16 or FP32) whatever out's dtype. `in` isn't
// FORM_DECODED.
void cuda_dequantize(Tensor out, const QuantizedTensor *in, Format values);
// Plain scales of an operand into the layout of block-scaled GEMMs (mx_swizzled_scale_offset), its
// padding 0x00. `along`: in the GEMM its blocks run along its rows or columns; square ones, along
// either.
void cuda_swizzle_scales(uint8_t *swizzled, const QuantizedTensor *in, Axis along);
// out (cols, rows) = the transpose of codes (rows, cols), a byte each.
void cuda_transpose_codes(uint8_t *out, const uint8_t *codes, int64_t rows, int64_t cols);
void cuda_convert(Tensor out, Tensor in);
void cuda_embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T);
void cuda_embedding_backward(float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, int64_t T);
void cuda_layernorm_forward(Tensor out, Tensor sum, float *mean, float *rstd, Tensor input, Tensor residual,
                            const float *weight, const float *bias);
void cuda_layernorm_backward(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input,
                             const float *weight, const float *mean, const float *rstd);
void cuda_rope_rotations(float *rotations, int64_t T, int64_t HS, double theta);
void cuda_rope(Tensor x, const float *rotations, int64_t T, int64_t HS, bool inverse);
void cuda_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape);
void cuda_attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, AttentionShape shape);
void cuda_activation_forward(Tensor out, Tensor input, Activation activation);
void cuda_activation_backward(Tensor dinput, Tensor dout, Tensor input, Activation activation);
void cuda_bias_backward(float *dbias, Tensor dout);
void cuda_classifier(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss);
void cuda_squared_error(float *losses, Tensor dout, Tensor out, Tensor target, float scale);
void cuda_kl_divergence(float *losses, Tensor dlogits, Tensor logits, Tensor targets, float scale);
void cuda_accumulate(float *sum, const float *values, int64_t count);
double cuda_sum_of_squares(const float *values, int64_t count);
double cuda_squared_distance(const float *a, const float *b, int64_t count);
double cuda_sum(const float *values, int64_t count);
void cuda_adamw(float *master, float *moment1, float *moment2, const float *gradient, int64_t count,
                AdamWOptions options);
void cuda_sgd(float *master, float *moment, const float *gradient, int64_t count, SGDOptions options);

#ifdef __cplusplus
}
#endif
#endif
