/*
What operands and bias are turned into before cuBLASLt multiplies them. For a native GEMM they are
placed first, so that cuBLASLt can decline the call before anything is made for it.
*/
#pragma once

#include "gemm_cublaslt.h"
#include "gemm_workspace.h"

// Returns the matrix that a native GEMM is given once cuda_gemm_make_native has made what has to be
// made of it. `along`: whether dot products run along the operand's rows or columns. rows_along_k:
// as cuda_gemm_wants_rows_along_k.
GemmMatrix cuda_gemm_place_native(const QuantizedTensor *q, Axis along, bool rows_along_k, OperandScratch scratch);

// Swizzles the operand's scales and transposes its codes, where it was placed so.
void cuda_gemm_make_native(GemmMatrix matrix, const QuantizedTensor *q, Axis along);

// Returns the operand as a matrix of `dtype`: itself, or its values decoded into `scratch`.
GemmMatrix cuda_gemm_decode(Operand operand, Format dtype, OperandScratch scratch);

// Returns the bias as it is added to d: itself, or as BF16 in `scratch` once cuda_gemm_make_bias
// has rounded it.
GemmBias cuda_gemm_place_bias(const float *bias, Tensor d, void *scratch);
void cuda_gemm_make_bias(GemmBias placed, const float *bias, Tensor d);
