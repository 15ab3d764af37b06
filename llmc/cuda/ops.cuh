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

// Arithmetic, the same bits wherever it is used: where a compiler could fuse either of two products
// with their sum, fmaf says which.

// Returns what a norm subtracts from a row.
static __device__ __forceinline__ float norm_mean(const NormParams &norm, int64_t row) {
    return norm.kind == NORM_LAYERNORM ? norm.mean[row] : 0.0f;
}

// Returns a normalised value; a norm without a mean, gains or biases has 0, 1 or 0 for it.
static __device__ __forceinline__ float layernorm_value(float x, float mean, float rstd, float weight, float bias) {
    return fmaf((x - mean) * rstd, weight, bias);
}

#define LOG2_E 1.4426950408889634f

// 1 / (1 + 2^-z). One instruction each for 2^x and 1 / x, within 2 and 1 ulp, and so as good here
// as the library's functions, which round better only results below 2^-126 (beside 1 they vanish)
// and division: with those GELU in BF16 is bound by instructions rather than memory.
MX_FUNCTION float logistic2(float z) {
#ifdef __CUDA_ARCH__
    float power, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-z));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + power));
    return reciprocal;
#else
    return 1.0f / (1.0f + exp2f(-z));
#endif
}

MX_FUNCTION float gelu_gate(float x) {
    return logistic2(x * fmaf(GELU_SCALE * LOG2_E * GELU_CUBIC, x * x, GELU_SCALE * LOG2_E));
}

MX_FUNCTION float gelu(float x) { return x * gelu_gate(x); }

// Where x^2 overflows, gate (1 - gate) is 0, which times an infinite slope would be NaN.
MX_FUNCTION float gelu_gradient(float dout, float x) {
    float gate = gelu_gate(x), slope = fmaf(3.0f * GELU_SCALE * GELU_CUBIC, x * x, GELU_SCALE);
    return dout * fmaf(x * gate * (1.0f - gate), fminf(slope, FLT_MAX), gate);
}

// The exact one's gate is the normal distribution function.
MX_FUNCTION float normal_gate(float x) { return 0.5f * erfcf(-0.70710678f * x); }

// Where x is so large that its density vanishes it is held, since an infinite square times 0 would be NaN.
MX_FUNCTION float gelu_exact_gradient(float dout, float x) {
    float held = x < -1e10f ? -1e10f : x > 1e10f ? 1e10f : x;
    return dout * fmaf(held, 0.39894228f * expf(-0.5f * held * held), normal_gate(x));
}

// Of two elements, for kernels that take one as a template argument.
typedef float (*Function)(float a, float b);

// The logistic function: SiLU is x times it.
MX_FUNCTION float silu_gate(float x) { return logistic2(LOG2_E * x); }
MX_FUNCTION float swiglu(float gate, float up) { return gate * silu_gate(gate) * up; }

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
