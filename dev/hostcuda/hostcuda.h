/*
What nvcc knows and g++ doesn't, so that a .cu file compiles as C++ and its kernels run on the CPU:
qualifiers, built-in variables, barriers, warp operations, intrinsics. Included first by the command
line (-include), over CUDA's own headers. How it works and what it can't do: README.md.
*/
#pragma once

#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>

// Under g++ CUDA's headers define the other qualifiers as nothing.
#define __launch_bounds__(...)
// One copy for each block that is running, hence for each OS thread. hostcuda.cpp finds these
// variables in the symbol table, to poison them before each block.
#define __shared__ static __thread
#include <cuda_runtime.h>

// -------------------------------------------------------------------------------------------------
// For tests

enum { HOSTCUDA_EXIT = 86 }; // exit status after a report

// Sets the order in which the threads of a block run: 0, in order; others, a permutation for each
// block; HOSTCUDA_MIXED, a draw for each block of 0 or 7. The environment variable HOSTCUDA_SEED
// sets it, too, to a number or to `mixed`.
extern "C" void hostcuda_set_seed(uint64_t seed);
#define HOSTCUDA_MIXED UINT64_MAX
// The compute capability of the pretended device; 9.0 unless set.
extern "C" void hostcuda_set_capability(int major, int minor);

// -------------------------------------------------------------------------------------------------
// Launches

// Runs `body(closure)` once for each thread of the grid; `name` and `kernel` are for messages and
// attributes. Returns, and leaves for cudaGetLastError, cudaErrorInvalidConfiguration for what
// hardware would refuse.
cudaError_t hostcuda_run(const char *name, const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
                         void (*body)(const void *), const void *closure);

template <typename... Params, typename... Args>
cudaError_t hostcuda_launch_named(const char *name, void (*kernel)(Params...), dim3 grid, dim3 block,
                                  size_t shared_bytes, const Args &...args) {
    auto call = [&] { kernel(args...); };
    auto body = [](const void *closure) { (*(const decltype(call) *)closure)(); };
    return hostcuda_run(name, (const void *)kernel, grid, block, shared_bytes, body, &call);
}

// hostcuda_launch(kernel, grid, block, shared_bytes, args...)
#define hostcuda_launch(kernel, ...) hostcuda_launch_named(#kernel, kernel, __VA_ARGS__)

// CUDA's overloads for kernels exist only under nvcc.
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}
template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*kernel)(Params...)) {
    return cudaFuncGetAttributes(attributes, (const void *)kernel);
}

// -------------------------------------------------------------------------------------------------
// Inside kernels

extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
extern __thread void *hostcuda_shared_memory;
static const int warpSize = 32;

static inline void *hostcuda_dynamic_shared() { return hostcuda_shared_memory; }

static const uint64_t HOSTCUDA_BLOCK = UINT64_MAX;

// Where threads wait for one another; all of them must come to the same one.
typedef struct {
    const char *name, *file;
    int line;
    uint64_t mask; // of lanes, or HOSTCUDA_BLOCK
} HostcudaSite;

// Waits until every thread that takes part has come. Returns the values of all folded by `combine`,
// in any order, or, where that is NULL, the value of lane `source` (all ones for a lane that takes
// no part). Not inlined, so that a kernel keeps nothing of thread-local memory over it.
typedef uint64_t HostcudaCombine(uint64_t a, uint64_t b);
uint64_t hostcuda_wait(HostcudaSite site, uint64_t value, int source, HostcudaCombine *combine);

// The caller's line, in default arguments.
#define HOSTCUDA_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

static inline int hostcuda_lane() {
    return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}
static inline uint64_t hostcuda_sum(uint64_t a, uint64_t b) { return a + b; }
static inline uint64_t hostcuda_and(uint64_t a, uint64_t b) { return a & b; }
static inline uint64_t hostcuda_or(uint64_t a, uint64_t b) { return a | b; }

static inline void __syncthreads(HOSTCUDA_HERE) {
    hostcuda_wait({"__syncthreads", file, line, HOSTCUDA_BLOCK}, 0, 0, NULL);
}
static inline int __syncthreads_or(int predicate, HOSTCUDA_HERE) {
    return (int)hostcuda_wait({"__syncthreads_or", file, line, HOSTCUDA_BLOCK}, predicate != 0, 0, hostcuda_or);
}
static inline int __syncthreads_and(int predicate, HOSTCUDA_HERE) {
    return (int)hostcuda_wait({"__syncthreads_and", file, line, HOSTCUDA_BLOCK}, predicate != 0, 0, hostcuda_and);
}
static inline int __syncthreads_count(int predicate, HOSTCUDA_HERE) {
    return (int)hostcuda_wait({"__syncthreads_count", file, line, HOSTCUDA_BLOCK}, predicate != 0, 0, hostcuda_sum);
}
static inline void __syncwarp(unsigned mask = 0xFFFFFFFF, HOSTCUDA_HERE) {
    hostcuda_wait({"__syncwarp", file, line, mask}, 0, 0, NULL);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, HOSTCUDA_HERE) {
    uint64_t bit = (uint64_t)(predicate != 0) << hostcuda_lane();
    return (unsigned)hostcuda_wait({"__ballot_sync", file, line, mask}, bit, 0, hostcuda_or);
}
static inline int __any_sync(unsigned mask, int predicate, HOSTCUDA_HERE) {
    return (int)hostcuda_wait({"__any_sync", file, line, mask}, predicate != 0, 0, hostcuda_or);
}
static inline int __all_sync(unsigned mask, int predicate, HOSTCUDA_HERE) {
    return (int)hostcuda_wait({"__all_sync", file, line, mask}, predicate != 0, 0, hostcuda_and);
}

template <typename T> static inline T hostcuda_shuffle(HostcudaSite site, T value, int source) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "shuffles move up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = hostcuda_wait(site, bits, source, NULL);
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, HOSTCUDA_HERE) {
    int first = hostcuda_lane() & -width;
    return hostcuda_shuffle({"__shfl_sync", file, line, mask}, value, first + (source & (width - 1)));
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, HOSTCUDA_HERE) {
    int lane = hostcuda_lane(), source = lane - (int)delta;
    return hostcuda_shuffle({"__shfl_up_sync", file, line, mask}, value, source < (lane & -width) ? lane : source);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, HOSTCUDA_HERE) {
    int lane = hostcuda_lane(), source = lane + (int)delta;
    return hostcuda_shuffle({"__shfl_down_sync", file, line, mask}, value,
                            source >= (lane & -width) + width ? lane : source);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, HOSTCUDA_HERE) {
    int lane = hostcuda_lane(), source = lane ^ (lanes & 31);
    return hostcuda_shuffle({"__shfl_xor_sync", file, line, mask}, value,
                            source >= (lane & -width) + width ? lane : source);
}

#undef HOSTCUDA_HERE

template <typename T> static inline T __ldg(const T *address) { return *address; }
template <typename T> static inline T __ldcs(const T *address) { return *address; }
template <typename T> static inline void __stcs(T *address, T value) { *address = value; }

template <typename To, typename From> static inline To hostcuda_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same number of bits");
    To bits;
    memcpy(&bits, &value, sizeof(To));
    return bits;
}
static inline unsigned __float_as_uint(float x) { return hostcuda_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return hostcuda_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return hostcuda_bits<float>(x); }
static inline float __int_as_float(int x) { return hostcuda_bits<float>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }

// Blocks run on several OS threads.
static inline unsigned atomicMax(unsigned *address, unsigned value) {
    unsigned seen = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (seen < value &&
           !__atomic_compare_exchange_n(address, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return seen;
}

// Out of range the conversion saturates, and NaN gives 0.
static inline int __float2int_rn(float x) {
    return x != x ? 0 : x >= 0x1p31f ? INT_MAX : x < -0x1p31f ? INT_MIN : (int)rintf(x);
}
static inline float __fdividef(float a, float b) { return a / b; }

// Macros, since C libraries declare functions with some of these names.
static inline float hostcuda_rsqrtf(float x) { return 1 / sqrtf(x); }
#define rsqrtf(x) hostcuda_rsqrtf(x)
#define __expf(x) expf(x)

// As CUDA's, of two floats that which isn't NaN.
template <typename A, typename B> static inline std::common_type_t<A, B> min(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return y < x || x != x ? y : x;
}
template <typename A, typename B> static inline std::common_type_t<A, B> max(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return x < y || x != x ? y : x;
}
