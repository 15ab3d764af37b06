/*
What the memory-bound operations share: an access of one element beside kernel.cuh's Packs, vectors
of FP32, sums over rows, and the arithmetic of what the quantizer also makes as it reads (Source in
../backend.h).
*/
#pragma once

#include "kernel.cuh"

#include <float.h>

// One element, where Packs can't be had.
template <typename T> struct Single {
    static const int SIZE = 1;
    T x[1];
};

// Makes a call with A the type of an access to elements of `dtype`: a Pack or a Single.
#define FOR_ACCESS(dtype, packs, ...) \
    FOR_DTYPE(                        \
        dtype,                        \
        if (packs) {                  \
            typedef Pack<T> A;        \
            __VA_ARGS__;              \
        } else {                      \
            typedef Single<T> A;      \
            __VA_ARGS__;              \
        })

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

// A thread's gains or biases, from `at` on; all `otherwise` where there are none.
template <int SIZE>
static __device__ __forceinline__ void load_parameters(float *out, const float *parameters, int64_t at,
                                                       float otherwise) {
    for (int k = 0; k < SIZE; k++) {
        out[k] = otherwise;
    }
    if (parameters) load_floats<SIZE>(out, parameters + at);
}

static __device__ __forceinline__ float element_of(Tensor tensor, int64_t row, int64_t col) {
    int64_t at = row * tensor.stride + col;
    return tensor.dtype == FORMAT_FP32 ? ((const float *)tensor.data)[at] : to_float(((const Bf16 *)tensor.data)[at]);
}

static __device__ __forceinline__ void set_element(Tensor tensor, int64_t row, int64_t col, float x) {
    int64_t at = row * tensor.stride + col;
    if (tensor.dtype == FORMAT_FP32) {
        from_float((float *)tensor.data + at, x);
    } else {
        from_float((Bf16 *)tensor.data + at, x);
    }
}

// Of two FP32s Blackwell adds, multiplies or does both by one instruction, with the bits of each
// alone.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDACC_VER_MAJOR__ >= 13
MX_FUNCTION float2 fmaf(float2 a, float2 b, float2 c) { return __ffma2_rn(a, b, c); }
MX_FUNCTION float2 operator*(float2 a, float2 b) { return __fmul2_rn(a, b); }
MX_FUNCTION float2 operator+(float2 a, float2 b) { return __fadd2_rn(a, b); }
MX_FUNCTION float2 operator-(float2 a, float2 b) { return __ffma2_rn(b, float2{-1, -1}, a); }
#else
MX_FUNCTION float2 fmaf(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
MX_FUNCTION float2 operator*(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
MX_FUNCTION float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
MX_FUNCTION float2 operator-(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
#endif
MX_FUNCTION float2 fminf(float2 a, float2 b) { return {fminf(a.x, b.x), fminf(a.y, b.y)}; }

// A constant as a float, or as both of two.
template <typename T> MX_FUNCTION T constant(float x) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return x;
    } else {
        return {x, x};
    }
}

// Arithmetic, the same bits wherever it is used: where a compiler could fuse either of two products
// with their sum, fmaf says which. T is float or float2.

// Returns what a norm subtracts from a row.
static __device__ __forceinline__ float norm_mean(const NormParams &norm, int64_t row) {
    return norm.kind == NORM_LAYERNORM ? norm.mean[row] : 0.0f;
}

// Returns a normalised value; a norm without a mean, gains or biases has 0, 1 or 0 for it.
template <typename T> static __device__ __forceinline__ T layernorm_value(T x, T mean, T rstd, T weight, T bias) {
    return fmaf((x - mean) * rstd, weight, bias);
}

// 2^x and 1 / x. One instruction each, within 2 and 1 ulp, and so as good in logistic2 as the
// library's functions, which round better only results below 2^-126 (beside 1 they vanish) and
// division: with those GELU in BF16 is bound by instructions rather than memory.
MX_FUNCTION float power_of_two(float x) {
#ifdef __CUDA_ARCH__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#else
    return exp2f(x);
#endif
}

MX_FUNCTION float reciprocal(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

// 1 / (1 + 2^-z).
MX_FUNCTION float logistic2(float z) { return reciprocal(1.0f + power_of_two(-z)); }

MX_FUNCTION float2 logistic2(float2 z) {
    float2 sum = constant<float2>(1) + float2{power_of_two(-z.x), power_of_two(-z.y)};
    return {reciprocal(sum.x), reciprocal(sum.y)};
}

template <typename T> MX_FUNCTION T gelu_gate(T x) {
    return logistic2(x * fmaf(constant<T>(GELU_SCALE * LOG2_E * GELU_CUBIC), x * x, constant<T>(GELU_SCALE * LOG2_E)));
}

template <typename T> MX_FUNCTION T gelu(T x) { return x * gelu_gate(x); }

// Where x^2 overflows, gate (1 - gate) is 0, which times an infinite slope would be NaN.
template <typename T> MX_FUNCTION T gelu_gradient(T dout, T x) {
    T gate = gelu_gate(x);
    T slope = fmaf(constant<T>(3.0f * GELU_SCALE * GELU_CUBIC), x * x, constant<T>(GELU_SCALE));
    return dout * fmaf(x * gate * (constant<T>(1) - gate), fminf(slope, constant<T>(FLT_MAX)), gate);
}

// The exact one's gate is the normal distribution function.
MX_FUNCTION float normal_gate(float x) { return 0.5f * erfcf(-0.70710678f * x); }

// Where x is so large that its density vanishes it is held, since an infinite square times 0 would
// be NaN.
MX_FUNCTION float gelu_exact_gradient(float dout, float x) {
    float held = x < -1e10f ? -1e10f : x > 1e10f ? 1e10f : x;
    return dout * fmaf(held, 0.39894228f * expf(-0.5f * held * held), normal_gate(x));
}

// Of two elements, for kernels that take one as a template argument.
typedef float (*Function)(float a, float b);

// The logistic function: SiLU is x times it.
template <typename T> MX_FUNCTION T silu_gate(T x) { return logistic2(constant<T>(LOG2_E) * x); }
template <typename T> MX_FUNCTION T swiglu(T gate, T up) { return gate * silu_gate(gate) * up; }

// All activations of one input: 0 of 0, and their gradients times 0 are 0.
template <Activation ACTIVATION> MX_FUNCTION float activate(float x) {
    static_assert(ACTIVATION <= ACTIVATION_GELU_EXACT, "an activation of one input needs its lines here");
    if (ACTIVATION == ACTIVATION_GELU) return gelu(x);
    if (ACTIVATION == ACTIVATION_GELU_EXACT) return x * normal_gate(x);
    float positive = x < 0 ? 0 : x; // NaN stays
    return ACTIVATION == ACTIVATION_RELU2 ? positive * positive : positive;
}

template <Activation ACTIVATION> MX_FUNCTION float activation_gradient(float dout, float x) {
    static_assert(ACTIVATION <= ACTIVATION_GELU_EXACT, "an activation of one input needs its lines here");
    if (ACTIVATION == ACTIVATION_GELU) return gelu_gradient(dout, x);
    if (ACTIVATION == ACTIVATION_GELU_EXACT) return gelu_exact_gradient(dout, x);
    if (ACTIVATION == ACTIVATION_RELU2) dout *= 2 * x;
    return x <= 0 ? 0 : dout;
}

// Both for two elements.
template <Activation ACTIVATION> MX_FUNCTION float2 activate(float2 x) {
    if (ACTIVATION == ACTIVATION_GELU) return gelu(x);
    return {activate<ACTIVATION>(x.x), activate<ACTIVATION>(x.y)};
}

template <Activation ACTIVATION> MX_FUNCTION float2 activation_gradient(float2 dout, float2 x) {
    if (ACTIVATION == ACTIVATION_GELU) return gelu_gradient(dout, x);
    return {activation_gradient<ACTIVATION>(dout.x, x.x), activation_gradient<ACTIVATION>(dout.y, x.y)};
}

// Makes a call with ACTIVATION a constant, of those of one input: all values before SwiGLU's.
static_assert(NUM_ACTIVATIONS == 5, "an activation of one input needs its case here");
#define FOR_ACTIVATION(activation, ...)                          \
    do {                                                         \
        if (activation == ACTIVATION_GELU) {                     \
            const Activation ACTIVATION = ACTIVATION_GELU;       \
            __VA_ARGS__;                                         \
        } else if (activation == ACTIVATION_RELU) {              \
            const Activation ACTIVATION = ACTIVATION_RELU;       \
            __VA_ARGS__;                                         \
        } else if (activation == ACTIVATION_RELU2) {             \
            const Activation ACTIVATION = ACTIVATION_RELU2;      \
            __VA_ARGS__;                                         \
        } else {                                                 \
            const Activation ACTIVATION = ACTIVATION_GELU_EXACT; \
            __VA_ARGS__;                                         \
        }                                                        \
    } while (0)

// A block that sums rows: its warps take rows in turn, a lane of each has the same SIZE columns. A
// lane loads ROWS_IN_FLIGHT of its rows before it adds the first: left to itself nvcc loads one or
// two.
enum { SUM_WARPS = 8, SUM_BLOCK = SUM_WARPS * WARP, ROWS_IN_FLIGHT = 8 };

// A lane's sums to those of the block, warps in order: thread i < WARP * SIZE gets that of the
// block's column i.
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

// Adds the sums of the columns of `in` to `first`, those of columns from `split` on to `second`.
// Rows are summed CUDA_ROWS_PER_PART at a time, then these sums in the same way, until one row is
// left. `scratch` holds cuda_sum_columns_scratch floats.
void cuda_sum_columns(float *first, float *second, int64_t split, Tensor in, float *scratch);
