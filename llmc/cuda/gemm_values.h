/*
Multiplies matrices of values, BF16 or FP32, whatever kernels cuBLASLt has for them.
*/
#pragma once

#include "gemm_cublaslt.h"

// Multiplies, with CUDA_CUBLASLT_BYTES of workspace: as the matrices lie; where cuBLASLt has no
// kernel for that, with the bias written into d first, and then from copies with even dimensions.
// Dies where it doesn't multiply those either.
void cuda_gemm_multiply_values(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options,
                               void *workspace);
