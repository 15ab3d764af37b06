/*
A GEMM as a call of cuBLASLt: plain data first, then the library's descriptors, then the calls
themselves, whose descriptors and heuristics are made once for each and kept.

cuBLASLt is column-major: our row-major d = op(a) op(b) is its d^T = op(b)^T op(a)^T, so its A is
our b.
*/
#pragma once

#include "cuda.h"

#include <cublasLt.h>

// CUDA_R_4F_E2M1, two to a byte, the first in its lower half: a name that headers before CUDA 12.8
// lack.
#define CUDA_E2M1_TYPE ((cudaDataType_t)33)

// Returns cublasLtGetVersion(), or 0 where cuBLASLt isn't on this machine.
size_t cuda_gemm_cublaslt_version(void);

// What a scale of a quantized matrix is of, and where scales lie.
typedef enum {
    SCALES_OF_MX,     // E8M0, swizzled
    SCALES_OF_NVFP4,  // E4M3, of 16 along K, swizzled likewise
    SCALES_OF_TENSOR, // one FP32, of the whole matrix
    SCALES_OF_BLOCKS, // FP32, of 128 along K: scaling_num_gemm_scales
    SCALES_OF_SQUARES // FP32, of 128 x 128: likewise
} GemmScales;

// An operand as it is multiplied: our rows and columns.
typedef struct {
    const void *data;
    const void *scales;   // NULL unless the path is native
    GemmScales scales_of; // FP8's and FP4's
    const float *factor;  // that the product is multiplied by, on the device; NULL: 1
    float prescale;       // that it is divided by; 0: by none
    cudaDataType_t type;
    int64_t rows, cols, stride;
} GemmMatrix;

// The bias as it is added, or data NULL.
typedef struct {
    const void *data;
    cudaDataType_t type;
} GemmBias;

// Calls as data

// A call in cuBLASLt's terms: A, B and D are its matrices. Only int64_t, so that there are no bytes
// between fields and calls can be compared as memory. Alignments are powers of two, in bytes, at
// most 256.
typedef struct {
    int64_t m, n, k;
    int64_t transpose_a, transpose_b;
    int64_t a_type, b_type, d_type; // cudaDataType_t
    int64_t bias_type;              // cudaDataType_t, or -1: no bias
    int64_t a_scaling, b_scaling;   // FP8, FP4: GemmScales
    int64_t fast_sum;               // FP8: GemmOptions
    int64_t has_factor;             // alpha and beta are on the device
    int64_t lda, ldb, ldd;
    int64_t a_alignment, b_alignment, d_alignment, bias_alignment;
} GemmCall;

GemmCall cuda_gemm_call(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options);

typedef struct {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t preference;
} GemmDescriptors;

// Makes all that a call holds. Needs no driver.
GemmDescriptors cuda_gemm_descriptors(const GemmCall *call);
void cuda_gemm_descriptors_destroy(GemmDescriptors *descriptors);

// Sets what changes from call to call: pointers to the scales of cuBLASLt's A and B, and to the
// bias. NULL: has none.
void cuda_gemm_set_pointers(const GemmDescriptors *descriptors, const void *a_scales, const void *b_scales,
                            const void *bias);

// Calls made

enum { CUDA_GEMM_TABLE_SIZE = 256 }; // of calls that are kept
// Calls of fewer floating-point operations aren't tuned: 15 us of an H100, unless a test says less.
extern double cuda_gemm_tuned_flops;

// Asks cuBLASLt's heuristics for kernels, once for each call; looks at no data. Returns NULL, or
// why cuBLASLt doesn't multiply it, one of few constants.
const char *cuda_gemm_declined(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options);

// Multiplies, with CUDA_CUBLASLT_BYTES of workspace, and where a matrix has a factor or a prescale
// CUDA_GEMM_FACTOR_BYTES behind them. A kernel that heuristics propose and that isn't supported, or
// fails in its execution, all the same is left for the next one. Returns as cuda_gemm_declined;
// unless NULL, all failed, a d that is added to is as it was, and the call isn't tried again. Dies
// where all kernels of a GEMM that isn't native fail, the last for another reason than that
// cuBLASLt doesn't support it. The first time that a call of cuda_gemm_tuned_flops or more writes d
// (accumulates nothing), all kernels that heuristics propose are timed, and the fastest is taken of
// those whose d has the same bits as that of the first that runs, in FP32 also when they add to it,
// in a product of scrambled matrices where these are in BF16 or FP8, with another bias and other
// scales of tensors: which it is depends on the card and the moment, and no result does. To BF16
// the first of these adds. A and b are changed and changed back: nothing else may read them
// meanwhile. Of native FP4, and with a bias of more than 2^17 values, the first is taken. Frees
// nothing, which would wait for other ranks.
const char *cuda_gemm_multiply(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options,
                               void *workspace);

// Forgets all calls, those that were declined too.
void cuda_gemm_forget_calls(void);
