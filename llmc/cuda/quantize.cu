/*
The quantizer: a tensor, or what an operation makes of one, in; rowwise and/or columnwise MX copies
out, in one pass. The kernels are in quantize.cuh; what is made is made in their registers, in BF16
from BF16.
*/
#include "quantize.cuh"

// Sources
// -------------------------------------------------------------------------------------------------------------

template <typename T> struct FromTensor {
    typedef T Element;
    static const bool IS_MADE = false;
    const T *in;
    int64_t stride;

    __device__ __forceinline__ void load(Eight<T> *x, int64_t row, int64_t col, int64_t rows, bool inside) const {
        load_rows(x, in, stride, row, col, rows, inside);
    }
};

struct FromLayernorm {
    typedef Bf16 Element;
    static const bool IS_MADE = true;
    const Bf16 *in;
    int64_t stride;
    NormParams norm;

    __device__ __forceinline__ void load(Eight<Bf16> *x, int64_t row, int64_t col, int64_t rows, bool inside) const {
        load_rows(x, in, stride, row, col, rows, inside);
        if (!inside) return;
        float w[LANE_COLS], b[LANE_COLS];
        load_parameters<LANE_COLS>(w, norm.weight, col, 1);
        load_parameters<LANE_COLS>(b, norm.bias, col, 0);
        float m[STEPS], s[STEPS]; // all under way before the first is used
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int64_t r = row + i * STEP_ROWS < rows ? row + i * STEP_ROWS : rows - 1;
            m[i] = norm_mean(norm, r), s[i] = norm.rstd[r];
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (row + i * STEP_ROWS >= rows) continue;
#pragma unroll
            for (int c = 0; c < LANE_COLS; c += 2) {
                x[i].x[c / 2] = bf16_pair(layernorm_value(value_at(x[i], c), m[i], s[i], w[c], b[c]),
                                          layernorm_value(value_at(x[i], c + 1), m[i], s[i], w[c + 1], b[c + 1]));
            }
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

    __device__ __forceinline__ void load(Eight<Bf16> *x, int64_t row, int64_t col, int64_t rows, bool inside) const {
        load_rows(x, in, stride, row, col, rows, inside);
        FOR_ACTIVATION(activation, make<ACTIVATION>(x));
    }

    template <Activation ACTIVATION> static __device__ __forceinline__ void make(Eight<Bf16> *x) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
#pragma unroll
            for (int c = 0; c < LANE_COLS; c += 2) {
                x[i].x[c / 2] =
                    bf16_pair(activate<ACTIVATION>(value_at(x[i], c)), activate<ACTIVATION>(value_at(x[i], c + 1)));
            }
        }
    }
};

// `up`: the second half of the columns.
struct FromSwiglu {
    typedef Bf16 Element;
    static const bool IS_MADE = true;
    const Bf16 *gate, *up;
    int64_t stride;

    __device__ __forceinline__ void load(Eight<Bf16> *x, int64_t row, int64_t col, int64_t rows, bool inside) const {
        load_rows(x, gate, stride, row, col, rows, inside);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int64_t r = row + i * STEP_ROWS;
            Eight<Bf16> u = load_eight(up + r * stride + col, inside && r < rows);
#pragma unroll
            for (int c = 0; c < LANE_COLS; c += 2) {
                x[i].x[c / 2] = bf16_pair(swiglu(value_at(x[i], c), value_at(u, c)),
                                          swiglu(value_at(x[i], c + 1), value_at(u, c + 1)));
            }
        }
    }
};

template <Activation ACTIVATION> struct FromActivationBackward {
    typedef Bf16 Element;
    static const bool IS_MADE = true;
    const Bf16 *in, *dout;
    int64_t stride, dout_stride;

    __device__ __forceinline__ void load(Eight<Bf16> *x, int64_t row, int64_t col, int64_t rows, bool inside) const {
        load_rows(x, in, stride, row, col, rows, inside);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int64_t r = row + i * STEP_ROWS;
            Eight<Bf16> d = load_eight(dout + r * dout_stride + col, inside && r < rows);
#pragma unroll
            for (int c = 0; c < LANE_COLS; c += 2) {
                x[i].x[c / 2] = bf16_pair(activation_gradient<ACTIVATION>(value_at(d, c), value_at(x[i], c)),
                                          activation_gradient<ACTIVATION>(value_at(d, c + 1), value_at(x[i], c + 1)));
            }
        }
    }
};

// Returns an element of what the source makes, `cols` of them in a row, in x's dtype.
static __device__ __forceinline__ float make_element(const Source &s, int64_t row, int64_t col, int64_t cols) {
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

// Any source, of any dtype and alignment.
struct FromAny {
    Source source;
    int64_t cols;

    __device__ __forceinline__ float element(int64_t row, int64_t col) const {
        return make_element(source, row, col, cols);
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

void cuda_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                   ScaleRounding rounding) {
    int64_t rows = in.x.rows, cols = source_cols(&in);
    if (rows == 0 || cols == 0) return;
    if (!rowwise && !columnwise && !in.stored.data) return;
    QuantizedTensor none = {NULL, NULL, FORMAT_E4M3, AXIS_ROWWISE, 0, 0, FORM_PLAIN};
    QuantizedTensor row = rowwise ? *rowwise : none, column = columnwise ? *columnwise : none;
    bool by_tiles = source_takes_eights(&in) && copy_takes_eights(&row) && copy_takes_eights(&column);
    if (!by_tiles || (!have_one_format(&row, &column) && in.kind != SOURCE_TENSOR)) {
        quantize_columns(row, column, FromAny{in, cols}, in.stored, rows, cols, rounding);
        return;
    }
    if (!have_one_format(&row, &column)) {
        cuda_quantize(rowwise, NULL, in, rounding);
        cuda_quantize(NULL, columnwise, in, rounding);
        return;
    }
    const Bf16 *x = (const Bf16 *)in.x.data;
    switch (in.kind) {
    case SOURCE_LAYERNORM:
        quantize_tiles(row, column, FromLayernorm{x, in.x.stride, in.norm}, in.stored, rows, cols, rounding);
        break;
    case SOURCE_ACTIVATION:
        if (in.activation == ACTIVATION_SWIGLU) {
            FromSwiglu from = {x, x + cols, in.x.stride};
            quantize_tiles(row, column, from, in.stored, rows, cols, rounding);
            break;
        }
        quantize_tiles(row, column, FromActivation{x, in.x.stride, in.activation}, in.stored, rows, cols, rounding);
        break;
    case SOURCE_ACTIVATION_BACKWARD:
        FOR_ACTIVATION(in.activation, FromActivationBackward<ACTIVATION> from = {x, (const Bf16 *)in.dout.data,
                                                                                 in.x.stride, in.dout.stride};
                       quantize_tiles(row, column, from, in.stored, rows, cols, rounding));
        break;
    default:
        FOR_DTYPE(in.x.dtype, FromTensor<T> from = {(const T *)in.x.data, in.x.stride};
                  quantize_tiles(row, column, from, in.stored, rows, cols, rounding));
        break;
    }
}
