/*
How the CUDA backend multiplies: which path a GEMM takes, and the cuBLASLt call it becomes. Both are
plain data made by functions without side effects, so that they can be looked at on a machine with
no GPU.

cuBLASLt is column-major: our row-major d = op(a) op(b) is its d^T = op(b)^T op(a)^T, so its A is
our b.
*/
#ifndef LLMC_CUDA_GEMM_H
#define LLMC_CUDA_GEMM_H

#include "cuda.h"

#include <cublasLt.h>

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

// cublasLtGetVersion(), or 0 where it isn't on this machine.
size_t cuda_gemm_cublaslt_version(void);

// True if such a device multiplies MXFP8 operands natively. `why`: a clause that says why not, or
// what of it; NULL: all.
bool cuda_gemm_has_native(int capability, size_t cublaslt, const char **why);

// The path of a GEMM. `why`: why two quantized operands are not multiplied natively; else NULL.
// Looks at shapes, formats, strides and the alignment of pointers, not at data.
GemmPath cuda_gemm_path(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options, const char **why);

// The form of an operand made for one GEMM, or kept, on such a device. Where native GEMMs are
// demanded it is theirs on every device, so that the GEMM can refuse.
QuantizedForm cuda_gemm_quantized_form(GemmDevice device, bool for_one_gemm);

void cuda_gemm_set_policy(MxGemm policy);

// False, with an error that begins with the device's name, where the current device can't multiply
// MXFP8 natively.
bool cuda_gemm_check_native(const char *name, Error *error);

// A clause for people: which library, and how MXFP8 is multiplied on the current device.
void cuda_gemm_describe(char *text, size_t bytes);

// Multiplies a few seeded shapes natively and emulated, with tails, in all three layouts, and
// compares both with exact dot products. `text` gets a line. False: they differ by more than
// accumulation can; the policy is then MX_GEMM_EMULATED. True, with a line that says so, where the
// device has no native path or it isn't wanted.
bool cuda_gemm_self_check(char *text, size_t bytes);

// The GEMM on a given path, which must be one that takes it, with `workspace` of
// cuda_gemm_workspace(a, b) bytes. NULL, or why cuBLASLt doesn't multiply it natively, one of few
// constants; d is then as it was.
const char *cuda_gemm_run(GemmPath path, Tensor d, Operand a, Operand b, GemmOptions options, void *workspace);

// -------------------------------------------------------------------------------------------------
// The cuBLASLt call, in its terms: A, B and D are its matrices. Only int64_t, so that there are no
// bytes between fields and calls can be compared as memory. Alignments are powers of two, in bytes,
// at most 256.
typedef struct {
    int64_t m, n, k;
    int64_t transpose_a, transpose_b;
    int64_t a_type, b_type, d_type; // cudaDataType_t
    int64_t bias_type;              // cudaDataType_t, or -1: no bias
    int64_t lda, ldb, ldd;
    int64_t a_alignment, b_alignment, d_alignment, bias_alignment;
} GemmCall;

// An operand as it is multiplied: our rows and columns.
typedef struct {
    const void *data;
    const void *scales; // swizzled; NULL unless the path is native
    cudaDataType_t type;
    int64_t rows, cols, stride;
} GemmMatrix;

// The bias as it is added, or data NULL.
typedef struct {
    const void *data;
    cudaDataType_t type;
} GemmBias;

GemmCall cuda_gemm_call(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options);

typedef struct {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t preference;
} GemmDescriptors;

// All that a call holds. Needs no driver.
GemmDescriptors cuda_gemm_descriptors(const GemmCall *call);
void cuda_gemm_descriptors_destroy(GemmDescriptors *descriptors);

// What changes from call to call: pointers to the scales of cuBLASLt's A and B, and to the bias.
// NULL: has none.
void cuda_gemm_set_pointers(const GemmDescriptors *descriptors, const void *a_scales, const void *b_scales,
                            const void *bias);

#endif
