/*
The authors' arithmetic of elements and rows, the same on the host and on a device. A row has one
thread on the host and a warp on a device, of which each thread takes every step'th column from its
first one on.
*/
#pragma once

#include "llmc/backend.h"

#include <math.h>

typedef struct {
    int64_t first, step;
} Columns; // of a thread

// Returns the sum over the threads that share a row.
#if defined(__CUDACC__) || defined(HOSTCUDA)
static __device__ __forceinline__ double row_total(double part) {
    for (int distance = 16; distance > 0; distance /= 2) {
        part += __shfl_xor_sync(0xFFFFFFFFu, part, distance);
    }
    return part;
}
#define ROW_FUNCTION static __device__ __forceinline__
#else
static inline double row_total(double part) { return part; }
#define ROW_FUNCTION static inline
#endif

// Elements

// Rounds to BF16, away from zero at ties.
MX_FUNCTION float q(float x) {
    uint32_t bits = mx_float_bits(x);
    if ((bits & 0x7FFFFFFFu) >= 0x7F800000u) return x;
    return mx_bits_float((bits + 0x8000u) & 0xFFFF0000u);
}

// Rounds what will be quantized by a rounding to even. `odd` sets the last bit of FP32, far below
// BF16's, with which that rounding too goes away from zero at ties.
MX_FUNCTION float q_operand(float x, bool odd) {
    float rounded = q(x);
    bool is_finite = (mx_float_bits(rounded) & 0x7FFFFFFFu) < 0x7F800000u;
    return odd && rounded != 0 && is_finite ? mx_bits_float(mx_float_bits(rounded) | 1) : rounded;
}

MX_FUNCTION float get(Tensor t, int64_t i) {
    return t.dtype == FORMAT_FP32 ? ((const float *)t.data)[i] : mx_from_bf16(((const uint16_t *)t.data)[i]);
}

MX_FUNCTION void put(Tensor t, int64_t i, float x) {
    if (t.dtype == FORMAT_FP32) {
        ((float *)t.data)[i] = x;
    } else {
        ((uint16_t *)t.data)[i] = mx_to_bf16(x);
    }
}

// Activations

// The logistic function of 1.59375 (x + 0.044677734 x^3), by which they have GELU.
MX_FUNCTION float gelu_gate(float x) {
    float inner = q(1.59375f * q(q(0.044677734f * q(q(x * x) * x)) + x));
    return q(1 / q(q(expf(-inner)) + 1));
}

MX_FUNCTION float activate(float x, Activation activation) {
    x = q(x);
    return activation == ACTIVATION_RELU ? fmaxf(x, 0) : q(x * gelu_gate(x));
}

MX_FUNCTION float activation_slope(float x, Activation activation) {
    x = q(x);
    if (activation == ACTIVATION_RELU) return x > 0 ? 1 : 0;
    float gate = gelu_gate(x), spread = q(gate * q(1 - gate));
    float inner_slope = q(1.59375f + q(0.21386719f * q(x * x)));
    return q(gate + q(x * q(inner_slope * spread)));
}

// Layernorm

// What both passes know of a row: (x - mean) / root, root^2 the variance with eps.
typedef struct {
    float variance, root, inverse;
} RowStatistics;

ROW_FUNCTION float rounded_mean(double part, int64_t count) { return q(q((float)row_total(part)) / (float)count); }

// Writes the normalized row to n (C).
ROW_FUNCTION RowStatistics normalize_row(float *n, Tensor x, int64_t row, float eps, Columns columns) {
    int64_t C = x.cols, first = row * C;
    double sum = 0, squares = 0;
    for (int64_t c = columns.first; c < C; c += columns.step) {
        sum += n[c] = q(get(x, first + c));
    }
    float mean = rounded_mean(sum, C);
    for (int64_t c = columns.first; c < C; c += columns.step) {
        n[c] = q(n[c] - mean);
        squares += q(n[c] * n[c]);
    }
    RowStatistics s;
    s.variance = q(rounded_mean(squares, C) + eps);
    s.root = q(sqrtf(s.variance));
    s.inverse = q(1 / s.root);
    for (int64_t c = columns.first; c < C; c += columns.step) {
        n[c] = q(n[c] * s.inverse);
    }
    return s;
}

// Writes a row's output, by way of n (C), the normalized row.
ROW_FUNCTION void row_forward(Tensor out, float *n, Tensor x, int64_t row, NormParams norm, Columns columns) {
    int64_t C = x.cols;
    normalize_row(n, x, row, norm.eps, columns);
    for (int64_t c = columns.first; c < C; c += columns.step) {
        float scaled = norm.weight ? q(q(norm.weight[c]) * n[c]) : n[c];
        put(out, row * C + c, norm.bias ? q(scaled + q(norm.bias[c])) : scaled);
    }
}

// The gradient of a normalized value.
MX_FUNCTION float normalized_gradient(Tensor dout, int64_t i, const float *weight, int64_t c) {
    return q(q(get(dout, i)) * q(weight ? weight[c] : 1));
}

// The gradient of a value, less the row's mean of these. `back`: along the normalized row n.
MX_FUNCTION float shifted_gradient(float dn, float inverse, float back, float n) {
    return q(q(dn * inverse) + q(-back * n));
}

// Adds a row's gradient to dinput, and leaves the normalized row's products with dout in n (C).
ROW_FUNCTION void row_backward(Tensor dinput, float *n, Tensor dout, Tensor input, int64_t row, NormParams norm,
                               Columns columns) {
    int64_t C = dout.cols, first = row * C;
    RowStatistics s = normalize_row(n, input, row, norm.eps, columns);
    double along = 0, sum = 0;
    for (int64_t c = columns.first; c < C; c += columns.step) {
        along += q(q(normalized_gradient(dout, first + c, norm.weight, c) * n[c]) * s.root);
    }
    float back = q(rounded_mean(along, C) * q(1 / s.variance));
    for (int64_t c = columns.first; c < C; c += columns.step) {
        sum += shifted_gradient(normalized_gradient(dout, first + c, norm.weight, c), s.inverse, back, n[c]);
    }
    float mean = rounded_mean(sum, C);
    for (int64_t c = columns.first; c < C; c += columns.step) {
        float dn = normalized_gradient(dout, first + c, norm.weight, c);
        float dx = q(shifted_gradient(dn, s.inverse, back, n[c]) - mean);
        put(dinput, first + c, get(dinput, first + c) + dx);
        n[c] = q(q(get(dout, first + c)) * n[c]);
    }
}

// Adds the rounded sum of a column of `values`, FP32.
MX_FUNCTION void add_column(float *sums, Tensor values, int64_t col) {
    double sum = 0;
    for (int64_t row = 0; row < values.rows; row++) {
        sum += get(values, row * values.cols + col);
    }
    sums[col] += q((float)sum);
}
