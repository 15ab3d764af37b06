/*
The sources of quantizers' kernels: a tensor, or what an operation makes of one in registers, in
BF16 from BF16.
*/
#pragma once

#include "quantize.cuh"

template <typename T> struct FromTensor {
    typedef T Element;
    static const bool IS_MADE = false;
    const T *in;
    int64_t stride;

    __device__ __forceinline__ void load(Eight<T> *x, int64_t row, int64_t col, int height) const {
        load_rows(x, in, stride, row, col, height);
    }
};

// Makes a lane's elements of a row in BF16: elements c and c + 1 are pair(c).
template <typename Pair> static __device__ __forceinline__ Eight<Bf16> make_eight(Pair pair) {
    Eight<Bf16> made;
#pragma unroll
    for (int c = 0; c < LANE_COLS; c += 2) {
        float2 values = pair(c);
        made.x[c / 2] = bf16_pair(values.x, values.y);
    }
    return made;
}

static __device__ __forceinline__ float2 pair_at(const Eight<Bf16> &x, int c) {
    return {value_at(x, c), value_at(x, c + 1)};
}

struct FromLayernorm {
    typedef Bf16 Element;
    static const bool IS_MADE = true;
    const Bf16 *in;
    int64_t stride;
    NormParams norm;

    __device__ __forceinline__ void load(Eight<Bf16> *x, int64_t row, int64_t col, int height) const {
        load_rows(x, in, stride, row, col, height);
        if (height <= 0) return;
        float w[LANE_COLS], b[LANE_COLS];
        load_parameters<LANE_COLS>(w, norm.weight, col, 1);
        load_parameters<LANE_COLS>(b, norm.bias, col, 0);
        float m[STEPS], s[STEPS]; // all under way before the first is used
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int64_t r = row + (i * STEP_ROWS < height ? i * STEP_ROWS : height - 1);
            m[i] = norm_mean(norm, r), s[i] = norm.rstd[r];
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (i * STEP_ROWS >= height) continue;
            x[i] = make_eight([&](int c) {
                return layernorm_value(pair_at(x[i], c), constant<float2>(m[i]), constant<float2>(s[i]),
                                       float2{w[c], w[c + 1]}, float2{b[c], b[c + 1]});
            });
        }
    }
};

// Which activation is asked once a tile: a kernel for each takes long to compile. (In the gradient
// that spills registers.)
struct FromActivation {
    typedef Bf16 Element;
    static const bool IS_MADE = true;
    const Bf16 *in;
    int64_t stride;
    Activation activation;

    __device__ __forceinline__ void load(Eight<Bf16> *x, int64_t row, int64_t col, int height) const {
        load_rows(x, in, stride, row, col, height);
        FOR_ACTIVATION(activation, make<ACTIVATION>(x));
    }

    template <Activation ACTIVATION> static __device__ __forceinline__ void make(Eight<Bf16> *x) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            x[i] = make_eight([&](int c) { return activate<ACTIVATION>(pair_at(x[i], c)); });
        }
    }
};

// FUNCTION of corresponding elements of two tensors: SwiGLU of the gate and of `up`, the second
// half of the columns; an activation's gradient of dout and the input.
template <float2 (*FUNCTION)(float2, float2)> struct FromPair {
    typedef Bf16 Element;
    static const bool IS_MADE = true;
    const Bf16 *first, *second;
    int64_t first_stride, second_stride;

    __device__ __forceinline__ void load(Eight<Bf16> *x, int64_t row, int64_t col, int height) const {
        load_rows(x, first, first_stride, row, col, height);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            Eight<Bf16> y = load_eight(second + (row + i * STEP_ROWS) * second_stride + col, i * STEP_ROWS < height);
            x[i] = make_eight([&](int c) { return FUNCTION(pair_at(x[i], c), pair_at(y, c)); });
        }
    }
};

// Any source, of any dtype and alignment: `cols` elements in a row, made in x's dtype.
struct FromAny {
    Source s;
    int64_t cols;

    __device__ __forceinline__ float element(int64_t row, int64_t col) const {
        float x = element_of(s.x, row, col);
        if (s.kind == SOURCE_LAYERNORM) {
            x = layernorm_value(x, norm_mean(s.norm, row), s.norm.rstd[row], s.norm.weight ? s.norm.weight[col] : 1.0f,
                                s.norm.bias ? s.norm.bias[col] : 0.0f);
        } else if (s.kind == SOURCE_ACTIVATION && s.activation == ACTIVATION_SWIGLU) {
            x = swiglu(x, element_of(s.x, row, cols + col));
        } else if (s.kind == SOURCE_ACTIVATION) {
            FOR_ACTIVATION(s.activation, x = activate<ACTIVATION>(x));
        } else if (s.kind == SOURCE_ACTIVATION_BACKWARD) {
            FOR_ACTIVATION(s.activation, x = activation_gradient<ACTIVATION>(element_of(s.dout, row, col), x));
        }
        if (s.x.dtype == FORMAT_FP32) return x;
        Bf16 rounded;
        from_float(&rounded, x);
        return to_float(rounded);
    }
};

static bool source_takes_eights(const Source *s) {
    if (!takes_eights(s->x) || (s->stored.data && !takes_eights(s->stored))) return false;
    switch (s->kind) {
    case SOURCE_TENSOR:
        return true;
    case SOURCE_LAYERNORM:
        return s->x.dtype == FORMAT_BF16 && is_aligned(s->norm.weight) && is_aligned(s->norm.bias);
    case SOURCE_ACTIVATION_BACKWARD:
        return s->x.dtype == FORMAT_BF16 && takes_eights(s->dout);
    default:
        return s->x.dtype == FORMAT_BF16 && source_cols(s) % LANE_COLS == 0;
    }
}

// Calls `call` with a source whose x is BF16, as kernels by tiles take it, (rows, cols). `cols` is
// source_cols's.
#ifdef __NVCC__
#pragma nv_exec_check_disable // `call` is the host's, or the device's where this is called there
#endif
template <typename Call> MX_FUNCTION void with_bf16_source(const Source &in, int64_t cols, Call call) {
    const Bf16 *x = (const Bf16 *)in.x.data, *dout = (const Bf16 *)in.dout.data;
    int64_t stride = in.x.stride;
    if (in.kind == SOURCE_LAYERNORM) {
        call(FromLayernorm{x, stride, in.norm});
    } else if (in.kind == SOURCE_ACTIVATION && in.activation == ACTIVATION_SWIGLU) {
        call(FromPair<swiglu>{x, x + cols, stride, stride});
    } else if (in.kind == SOURCE_ACTIVATION) {
        call(FromActivation{x, stride, in.activation});
    } else if (in.kind == SOURCE_ACTIVATION_BACKWARD) {
        FOR_ACTIVATION(in.activation, call(FromPair<activation_gradient<ACTIVATION>>{dout, x, in.dout.stride, stride}));
    } else {
        call(FromTensor<Bf16>{x, stride});
    }
}

// Does so of any dtype: what isn't BF16 is a tensor.
template <typename Call> static void with_source(const Source &in, Call call) {
    if (in.x.dtype == FORMAT_FP32) {
        call(FromTensor<float>{(const float *)in.x.data, in.x.stride});
    } else {
        with_bf16_source(in, source_cols(&in), call);
    }
}

// A source whose x is BF16, which is asked once a tile what it is: for kernels that shall have few
// instances.
struct FromBf16 {
    typedef Bf16 Element;
    static const bool IS_MADE = true;
    Source s;
    int64_t cols;

    __device__ __forceinline__ void load(Eight<Bf16> *x, int64_t row, int64_t col, int height) const {
        with_bf16_source(s, cols, [&](auto from) { from.load(x, row, col, height); });
    }
};

// Calls `call` with an FP32 tensor, or with one source for all that is BF16.
template <typename Call> static void with_source_as_one(const Source &in, Call call) {
    if (in.x.dtype == FORMAT_FP32) {
        call(FromTensor<float>{(const float *)in.x.data, in.x.stride});
    } else {
        call(FromBf16{in, source_cols(&in)});
    }
}

// Calls `call` with a BF16 tensor as it is, or with any other source as with_source_as_one does.
template <typename Call> static void with_tensor_or_made(const Source &in, Call call) {
    if (in.kind == SOURCE_TENSOR && in.x.dtype == FORMAT_BF16) {
        call(FromTensor<Bf16>{(const Bf16 *)in.x.data, in.x.stride});
    } else {
        with_source_as_one(in, call);
    }
}
