/*
What the files of the CUDA backend share: the operations (see ../operations.h), the workspace, the
stream that everything runs on, and checks. Usable from C, for the files that only call libraries,
and from CUDA C++.
*/
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

#include "llmc/backend.h"
#include "sizes.h"          // workspaces
#include "llmc/base/util.h" // die

#include <cuda_runtime_api.h>

// Dies with a sentence unless `status` is success: `doing` says what was being done, as in "copying
// to the GPU".
void cuda_check_at(cudaError_t status, const char *doing, const char *file, int line);
#define cuda_check(status, doing) cuda_check_at(status, doing, __FILE__, __LINE__)

// Makes the one stream of all operations, on the current device: they run in the order of their
// calls.
void cuda_start(void);

// Returns that stream; NULL before cuda_start.
cudaStream_t cuda_stream(void);

// Gives operations their scratch; returns it, and dies if it holds fewer than `bytes`.
void cuda_use_workspace(void *workspace, size_t bytes);
void *cuda_workspace(size_t bytes);

// Waits for all that was called.
void cuda_synchronize(void);

// Copy, and wait for it: the host's memory may be changed, or read, as soon as they return. (A GPU
// that reads pageable memory itself needn't have read it before the stream comes to it.)
void cuda_copy_to_device(void *to, const void *from, size_t bytes);
void cuda_copy_to_host(void *to, const void *from, size_t bytes);

// A prototype for each operation: void cuda_convert(Tensor out, Tensor in);
#define OPERATION(result, name, parameters, arguments) result cuda_##name parameters;
#define QUERY(result, name, parameters) result cuda_##name parameters;
#include "llmc/operations.h"

// Decodes: out = the values of `in`, rounded to `values` (BF16 or FP32) whatever out's dtype. `in`
// isn't FORM_DECODED.
void cuda_dequantize(Tensor out, const QuantizedTensor *in, Format values);
// Puts the plain scales of an MX or NVFP4 operand into the layout of block-scaled GEMMs
// (mx_swizzled_scale_offset), its padding 0x00. `along` says whether in the GEMM its blocks run
// along its rows or columns; square ones run along either.
void cuda_swizzle_scales(uint8_t *swizzled, const QuantizedTensor *in, Axis along);
// Puts the scales of an operand of blocks of 128 where cuBLASLt wants them
// (scaling_num_gemm_scales), what pads them 0. `along` as in cuda_swizzle_scales.
void cuda_arrange_scales(float *arranged, const QuantizedTensor *in, Axis along);
// Adds `product`, of a and b's elements in one block of K, from k on, and in rows of d from `row`
// on, to `sum`: each value times the scales of both operands' blocks, of those that
// operand_is_summed_by_block names. Both are FP32, of one shape, their rows without gaps. `options`
// say how a and b are transposed.
void cuda_add_block_product(Tensor sum, Tensor product, Operand a, Operand b, GemmOptions options, int64_t row,
                            int64_t k);
// Returns a number that tensors of other bits, or of the same ones elsewhere, hardly share. Zeros
// and what isn't finite don't count: 0 for a tensor of these alone. Waits for the stream.
uint64_t cuda_digest(Tensor tensor);
// Inverts some of the lowest nine bits of BF16 values, by their places: the mantissa's and two of
// the exponent's. Values below 2^-123 or from 2^125 on, and what isn't finite, stay. A second call
// brings back what there was.
void cuda_scramble(Tensor tensor);
// Does so with codes of E4M3 or E5M2, a byte each, `stride` from row to row: with all bits but the
// sign's, also of zeros. What isn't finite, or would become so, stays.
void cuda_scramble_codes(uint8_t *codes, int64_t rows, int64_t cols, int64_t stride, Format format);
// Makes a GEMM's alpha, the product of its operands' factors, each 1 where NULL, over `divisor`,
// and its beta: out (2).
void cuda_multiply_factors(float *out, const float *a, const float *b, float divisor, float beta);
// Transposes codes (rows, cols), a byte each, into out (cols, rows).
void cuda_transpose_codes(uint8_t *out, const uint8_t *codes, int64_t rows, int64_t cols);
// Packs an operand's codes of four bits two to a byte, the first in its lower half, in rows along
// the GEMM's K: (rows, cols / 2), or where K is its rows (cols, rows / 2). K is a multiple of 32,
// the other dimension of 16, and memory aligned to 16 bytes.
void cuda_pack_codes(uint8_t *out, const QuantizedTensor *in, Axis along);

#ifdef __cplusplus
}
#endif
