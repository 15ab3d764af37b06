/*
Which path a GEMM of the CUDA backend takes, and why. These are functions of plain data, without
side effects and without CUDA's headers: they can be asked on a machine that has neither a GPU nor
the toolkit.
*/
#pragma once

#include "llmc/backend.h"

typedef enum {
    GEMM_FP32,     // an operand is FP32: FP32 throughout, no TF32
    GEMM_BF16,     // both operands are BF16
    GEMM_EMULATED, // quantized operands are decoded to BF16, then as GEMM_BF16
    GEMM_NATIVE    // both operands are quantized and multiplied as they are
} GemmPath;

// What the path depends on, besides the GEMM.
typedef struct {
    int capability;  // 90 for compute capability 9.0
    size_t cublaslt; // cublasLtGetVersion(): 130100 for 13.1.0
    MxGemm policy;
} GemmDevice;

// d (M, N) = op(a) (M, K) op(b) (K, N).
typedef struct {
    int64_t M, N, K;
} GemmShape;

GemmShape cuda_gemm_shape(Operand a, Operand b, GemmOptions options);

// Returns true if such a device multiplies operands of a scaling natively: MXFP8, NVFP4, FP8 with
// one scale per tensor, or FP8 by blocks of 128. Sets `why` to a clause that says why not, or what
// it does with some operands first; to NULL if it takes all as they are.
bool cuda_gemm_has_native(int capability, size_t cublaslt, Scaling scaling, const char **why);

// Returns true if a native GEMM takes both operands only with their rows along K, NVFP4's two codes
// to a byte. Codes that aren't stored so (FORM_TRANSPOSED) are transposed first: their blocks run
// along K then too, and the swizzled scales of the transpose are the same bytes.
bool cuda_gemm_wants_rows_along_k(int capability, Scaling scaling);

// Returns the path of a GEMM. Sets `why` to a clause where two quantized operands are not
// multiplied natively, else to NULL. Looks at shapes, formats, strides and the alignment of
// pointers, not at data.
GemmPath cuda_gemm_path(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options, const char **why);

// Returns what Backend's gemm_decodes does: whether that path turns operands into values first.
bool cuda_gemm_path_decodes(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options);

// Returns what Backend's gemm_refuses does: a clause where operands are to be multiplied natively
// and can't be.
const char *cuda_gemm_path_refuses(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options);

// Returns the form of an operand that is made for one GEMM, or kept, where those of its scaling are
// multiplied natively or emulated. rows_along_k: as cuda_gemm_wants_rows_along_k.
QuantizedForm cuda_gemm_form(Scaling scaling, Axis axis, bool native, bool rows_along_k, bool for_one_gemm);

// Returns the same for a device. Where native GEMMs are demanded it is their form on every device,
// so that the GEMM can refuse.
QuantizedForm cuda_gemm_quantized_form(GemmDevice device, Scaling scaling, Axis axis, bool for_one_gemm);

// Returns false, with an error that begins with the device's name, if it can multiply FP8 of no
// scaling natively.
bool cuda_gemm_check_native(GemmDevice device, const char *name, Error *error);

// Writes a clause for people: which library multiplies, and how it multiplies FP8 and NVFP4.
void cuda_gemm_describe(GemmDevice device, char *text, size_t bytes);
