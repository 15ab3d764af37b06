/*
What the memory-bound operations share: an access of one element beside kernel.cuh's Packs, vectors of FP32, and sums
over rows.
*/
#ifndef LLMC_CUDA_OPS_CUH
#define LLMC_CUDA_OPS_CUH

#include "kernel.cuh"

// One element, where Packs can't be had.
template <typename T> struct Single {
    static const int SIZE = 1;
    T x[1];
};

// Makes a call with A the type of an access to elements of `dtype`: a Pack or a Single.
#define FOR_ACCESS(dtype, packs, ...)        \
    do {                                     \
        if (dtype == FORMAT_FP32 && packs) { \
            typedef Pack<float> A;           \
            __VA_ARGS__;                     \
        } else if (dtype == FORMAT_FP32) {   \
            typedef Single<float> A;         \
            __VA_ARGS__;                     \
        } else if (packs) {                  \
            typedef Pack<Bf16> A;            \
            __VA_ARGS__;                     \
        } else {                             \
            typedef Single<Bf16> A;          \
            __VA_ARGS__;                     \
        }                                    \
    } while (0)

static inline bool is_aligned(const void *pointer) { return (size_t)pointer % 16 == 0; }

// Accesses of a row; `A` divides it.
template <typename A> static __device__ __forceinline__ A *row_of(Tensor tensor, int64_t row) {
    return (A *)tensor.data + row * (tensor.stride / A::SIZE);
}

// SIZE floats: one, or as many 16-byte accesses as it takes.
template <int SIZE> static __device__ __forceinline__ void load_floats(float *out, const float *in) {
    if constexpr (SIZE == 1) {
        out[0] = in[0];
    } else {
        for (int i = 0; i < SIZE / 4; i++) {
            Pack<float> pack = ((const Pack<float> *)in)[i];
            for (int k = 0; k < 4; k++) {
                out[4 * i + k] = pack.x[k];
            }
        }
    }
}

template <int SIZE> static __device__ __forceinline__ void store_floats(float *out, const float *in) {
    if constexpr (SIZE == 1) {
        out[0] = in[0];
    } else {
        for (int i = 0; i < SIZE / 4; i++) {
            Pack<float> pack;
            for (int k = 0; k < 4; k++) {
                pack.x[k] = in[4 * i + k];
            }
            ((Pack<float> *)out)[i] = pack;
        }
    }
}

// A block that sums rows: its warps take rows in turn, a lane of each has the same SIZE columns.
enum { SUM_WARPS = 8, SUM_BLOCK = SUM_WARPS * WARP };

// A lane's sums to those of the block, warps in order: thread i < WARP * SIZE gets that of the block's column i.
template <int SIZE>
static __device__ __forceinline__ float sum_over_warps(float (*partial)[WARP * SIZE], const float *sum) {
    __syncthreads(); // an earlier use of `partial` is over
    store_floats<SIZE>(&partial[threadIdx.x / WARP][threadIdx.x % WARP * SIZE], sum);
    __syncthreads();
    float total = 0;
    if (threadIdx.x < WARP * SIZE) {
        for (int warp = 0; warp < SUM_WARPS; warp++) {
            total += partial[warp][threadIdx.x];
        }
    }
    return total;
}

// Adds the sums of the columns of `in` to `first`, those of columns from `split` on to `second`. Rows are summed
// CUDA_ROWS_PER_PART at a time, then these sums in the same way, until one row is left. `scratch` holds
// cuda_sum_columns_scratch floats.
void cuda_sum_columns(float *first, float *second, int64_t split, Tensor in, float *scratch);
int64_t cuda_sum_columns_scratch(int64_t rows, int64_t cols);

// Floats that the layernorm's backward pass needs of the workspace; never less for more rows or columns.
int64_t cuda_layernorm_scratch(int64_t rows, int64_t cols);

#endif
