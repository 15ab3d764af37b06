/*
What kernels share: how they are launched, 16-byte accesses of either dtype as FP32, and sums over a
warp and a block.
*/
#pragma once

#include "cuda.h"

// The kernel may be in parentheses, with template arguments. In CI dev/hostcuda runs the same
// kernels on the CPU.
#ifdef HOSTCUDA
#define CUDA_LAUNCH(kernel, grid, block, shared_bytes, ...)              \
    do {                                                                 \
        hostcuda_launch(kernel, grid, block, shared_bytes, __VA_ARGS__); \
        cuda_check(cudaGetLastError(), "launching " #kernel);            \
    } while (0)
#define CUDA_DYNAMIC_SHARED(type, name) type *name = (type *)hostcuda_dynamic_shared()
#else
#define CUDA_LAUNCH(kernel, grid, block, shared_bytes, ...)                        \
    do {                                                                           \
        (kernel)<<<(grid), (block), (shared_bytes), cuda_stream()>>>(__VA_ARGS__); \
        cuda_check(cudaGetLastError(), "launching " #kernel);                      \
    } while (0)
#define CUDA_DYNAMIC_SHARED(type, name)                   \
    extern __shared__ __align__(16) char shared_bytes_[]; \
    type *name = (type *)shared_bytes_
#endif

enum { WARP = 32 };

// Elements of activations are float or BF16 bits. A Pack is 16 bytes of them.
typedef uint16_t Bf16;

template <typename T> struct __align__(16) Pack {
    static const int SIZE = 16 / sizeof(T);
    T x[SIZE];
};

MX_FUNCTION float to_float(float x) { return x; }
MX_FUNCTION float to_float(Bf16 x) { return mx_from_bf16(x); }
MX_FUNCTION void from_float(float *out, float x) { *out = x; }

// On a device one instruction, which differs from mx_to_bf16 in the bits of a NaN alone.
MX_FUNCTION void from_float(Bf16 *out, float x) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(*out) : "f"(x));
#else
    *out = mx_to_bf16(x);
#endif
}

// True where rows of `tensor` can be read as whole Packs.
static inline bool takes_packs(Tensor tensor) {
    size_t size = dtype_size(tensor.dtype), row = (size_t)tensor.stride * size, used = (size_t)tensor.cols * size;
    return ((size_t)tensor.data | row | used) % 16 == 0;
}

// Makes a call with T the C type of a tensor's elements.
#define FOR_DTYPE(dtype, ...)       \
    do {                            \
        if (dtype == FORMAT_FP32) { \
            typedef float T;        \
            __VA_ARGS__;            \
        } else {                    \
            typedef Bf16 T;         \
            __VA_ARGS__;            \
        }                           \
    } while (0)

// Returns the position of a row's token. No tensor that a GPU can hold has 2^32 rows.
static __device__ __forceinline__ int64_t position_of(Sequences sequences, int64_t row) {
    return sequences.positions ? sequences.positions[row] : (unsigned)row % (unsigned)sequences.T;
}

enum Reduction { SUM, MAX };

template <Reduction REDUCTION> MX_FUNCTION float combine(float a, float b) {
    return REDUCTION == SUM ? a + b : fmaxf(a, b);
}

// Every lane gets the sum or maximum over LANES neighbours: all 32 lanes of the warp take part.
template <Reduction REDUCTION, int LANES = WARP> static __device__ __forceinline__ float warp_reduce(float x) {
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        x = combine<REDUCTION>(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
    }
    return x;
}

// Every thread gets the sum or maximum of the block's values. The block is whole warps, all of
// whose threads call this; `scratch` is WARP floats of shared memory that are free again after the
// next barrier.
template <Reduction REDUCTION> static __device__ __forceinline__ float block_reduce(float x, float *scratch) {
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = warp_reduce<REDUCTION>(x);
    __syncthreads(); // an earlier use of scratch is over
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    float nothing = REDUCTION == SUM ? 0.0f : -INFINITY;
    return warp_reduce<REDUCTION>(lane < warps ? scratch[lane] : nothing);
}
