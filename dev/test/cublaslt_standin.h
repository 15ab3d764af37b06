/*
For tests of the CUDA backend's GEMM without a GPU. In the place of cuBLASLt's multiplication there
is a column-major GEMM that obeys the descriptors and refuses what NVIDIA's manual says cuBLASLt
refuses; making descriptors and setting their attributes is the library's own business, which needs
no driver. The GPU's memory is the host's.
*/
#pragma once

#include "llmc/cuda/gemm_cublaslt.h"

enum { MAX_STANDIN_KERNELS = 7 };

typedef struct {
    float time; // that it takes
    // It rounds d to less than its dtype, always or where it adds to it; rounds the sums of both
    // halves of K to FP32; rounds sums to FP32 before it multiplies them by alpha and scales of
    // tensors other than 1; rounds products of values to BF16 before it adds to BF16; writes
    // nothing; fails; or fails and leaves a GPU that can't go on.
    enum { GOOD, COARSE, ADDS_COARSELY, SPLITS, SCALES_LAST, BIAS_LAST, IDLE, FAILS, LOSES_GPU } way;
    int runs;
} StandinKernel;

// How the stand-in behaves, and how often it was called since a count was set to 0.
typedef struct {
    bool declines_native, declines_e5m2, declines_fp4_bias;
    bool takes_only_tn;       // FP8 of any scaling only with the rows of both operands along K
    bool takes_no_mx;         // nor NVFP4
    bool takes_blocks_of_128; // as Hopper alone
    bool keeps_13_bits;       // of native sums, as cards other than 10.x are taken to
    int fast_runs;
    enum { TAKES_ODD, NO_ODD_BIAS, NO_ODD } odd; // of values: matrices that aren't in steps of 16 bytes
    bool promises_odd;                           // heuristics take them all the same
    cublasStatus_t native_status;                // of native GEMMs when they are run
    // Of native GEMMs; LOST_SUM: of emulated ones, which don't add to what there is.
    enum { NO_FAULT, WRONG_SCALE, LOST_BIAS, COARSE_SUM, LOST_SUM } fault;
    StandinKernel kernels[MAX_STANDIN_KERNELS]; // that heuristics propose, up to what is wanted
    int num_kernels;                            // 0: one
    float time;                                 // of all that ran, in milliseconds
    bool lost_gpu;                              // by a kernel
    const float *factors;                       // alpha and beta that were last made on the device
    int heuristics_asked, native_runs, swizzles, arrangements, dequantizations, block_products, transposes, packs,
        allocations, frees;
} Standin;

extern Standin standin;

// What an operation's descriptor holds.
typedef struct {
    int32_t transpose_a, transpose_b, epilogue, bias_type, a_mode, b_mode, pointer_mode, fast_accumulation;
    const void *a_scales, *b_scales, *bias;
} Operation;

typedef struct {
    uint32_t type;
    uint64_t rows, cols;
    int64_t stride;
} Layout;

// Read descriptors back, and check what is the same in all of them.
Operation read_operation(cublasLtMatmulDesc_t descriptor);
Layout read_layout(cublasLtMatrixLayout_t layout);
uint32_t read_preference(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute);

bool is_fp8_type(uint32_t type);
