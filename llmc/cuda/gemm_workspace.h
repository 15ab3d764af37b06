/*
Where a GEMM of the CUDA backend finds what it takes beside its operands: cuBLASLt's own workspace,
what the operands are turned into, the bias as BF16 and, for FP32 operands, the result as FP32.
Operands that were quantized as the GEMM takes them (quantized_form) are turned into nothing. The
same code counts and places. It needs no CUDA headers: plans for cards ask for its bytes.
*/
#pragma once

#include "sizes.h"

// What an operand is turned into: its values, or in the same place, for a native GEMM, its scales
// where cuBLASLt wants them and behind them its codes transposed or packed.
typedef struct {
    void *values; // rows cuda_gemm_decoded_stride apart
    uint8_t *scales, *codes;
} OperandScratch;

typedef struct {
    void *library; // CUDA_CUBLASLT_BYTES, and CUDA_GEMM_FACTOR_BYTES where an operand has a factor
    OperandScratch a, b;
    void *bias;          // BF16
    void *wide_result;   // FP32
    void *product, *sum; // FP32, cuda_gemm_rows_by_block rows of each, where a product is summed by block
    size_t bytes;        // of all of it
} GemmWorkspace;

// Places a workspace in `memory`, which is aligned to 256 bytes; NULL: only counts. There is enough
// for either path and for every device: cuBLASLt can decline when it is asked, and the self-check
// can say no. `values`: those of d. A plan doesn't know d, and takes the largest that it can be
// (cuda_gemm_workspace); a GEMM takes its own, which a plan for as many rows or more holds.
// `is_wide`: whether there is a wide_result, which a d that isn't FP32 takes where the operands
// are.
GemmWorkspace cuda_gemm_place(void *memory, Operand a, Operand b, int64_t values, bool is_wide);

// Returns how many rows of N columns are summed by block at a time, a multiple of 128: some 32 MiB
// of FP32, which keep a card busy.
int64_t cuda_gemm_rows_by_block(int64_t N);

// Returns the elements from one decoded row to the next.
int64_t cuda_gemm_decoded_stride(Operand operand);

// Returns true unless the operand is multiplied as values of `dtype` where it lies.
bool cuda_gemm_needs_decoding(Operand operand, Format dtype);
