/*
Parts of rows, in place and in FP32: what the elementwise operations do, for themselves and for the
quantizer, which makes its input on the way (see Source in ../backend.h).
*/
#pragma once

#include "llmc/backend.h"
#include "vector_math.h"

#include <math.h>

// Returns x within -10 and 10, of which GELU's gate is computed: that of -10 is just over 2^-126,
// that of 10 is 1.
MX_FUNCTION float gelu_clamp(float x) { return vector_clamp(x, -10.0f, 10.0f); }

// Returns GELU's gate, 1 / (1 + exp(-z)) with z = GELU_SCALE (x + GELU_CUBIC x^3), of an x that is
// clamped.
MX_FUNCTION float gelu_gate(float clamped) {
    return vector_logistic2(clamped * (LOG2_E * GELU_SCALE + LOG2_E * GELU_SCALE * GELU_CUBIC * (clamped * clamped)));
}

// Multiplies dout by GELU's slope at x.
MX_FUNCTION void row_gelu_backward(float *dout, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float clamped = gelu_clamp(x[i]), gate = gelu_gate(clamped);
        float slope = GELU_SCALE + 3.0f * GELU_SCALE * GELU_CUBIC * (clamped * clamped);
        float gradient = gate + clamped * gate * (1.0f - gate) * slope;
        dout[i] *= x[i] != x[i] ? x[i] : gradient;
    }
}

// Returns the normal distribution function of x: half of erfc(z), z = |x| / sqrt(2), or 1 less
// that. With t = 1 / (1 + z / 2), ln(erfc(z)) + z^2 - ln(t) is within 1e-7 a polynomial of t, which
// was fitted on Chebyshev's nodes for z up to 31.
MX_FUNCTION float normal_gate(float x) {
    float z = fabsf(x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
    float p = 0.179014198f;
    p = p * t - 0.861461823f;
    p = p * t + 1.56874157f;
    p = p * t - 1.22522887f;
    p = p * t + 0.339376728f;
    p = p * t - 0.211165814f;
    p = p * t + 0.102911633f;
    p = p * t + 0.373245223f;
    p = p * t + 1.00008082f;
    p = p * t - 1.26551358f;
    float tail = 0.5f * t * vector_exp(p - z * z);
    return x < 0 ? tail : 1.0f - tail;
}

// Where x is so large that its density vanishes it is held.
MX_FUNCTION void row_gelu_exact_backward(float *dout, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float held = vector_clamp(x[i], -1e10f, 1e10f);
        dout[i] *= normal_gate(x[i]) + held * (0.39894228f * vector_exp(-0.5f * held * held));
    }
}

// Returns the logistic function of x; of NaN a number.
MX_FUNCTION float silu_gate(float x) { return 1.0f / (1.0f + vector_exp_within(vector_clamp(-x, -87.3f, 88.3f))); }

// `up`: the second factors of SwiGLU; else NULL.
MX_FUNCTION void row_activation(float *x, const float *up, int64_t count, Activation activation) {
    switch (activation) {
    case ACTIVATION_GELU:
        for (int64_t i = 0; i < count; i++) {
            x[i] *= gelu_gate(gelu_clamp(x[i]));
        }
        break;
    case ACTIVATION_GELU_EXACT:
        for (int64_t i = 0; i < count; i++) {
            x[i] *= normal_gate(x[i]);
        }
        break;
    case ACTIVATION_RELU:
        for (int64_t i = 0; i < count; i++) {
            x[i] = x[i] < 0 ? 0 : x[i]; // NaN stays
        }
        break;
    case ACTIVATION_RELU2:
        for (int64_t i = 0; i < count; i++) {
            x[i] = x[i] < 0 ? 0 : x[i] * x[i];
        }
        break;
    case ACTIVATION_SWIGLU:
        for (int64_t i = 0; i < count; i++) {
            x[i] *= silu_gate(x[i]) * up[i];
        }
        break;
    }
}

// The gradient of all activations of one input, in place of dout.
MX_FUNCTION void row_activation_backward(float *dout, const float *x, int64_t count, Activation activation) {
    switch (activation) {
    case ACTIVATION_RELU:
        for (int64_t i = 0; i < count; i++) {
            dout[i] = x[i] <= 0 ? 0 : dout[i];
        }
        break;
    case ACTIVATION_RELU2:
        for (int64_t i = 0; i < count; i++) {
            dout[i] = x[i] <= 0 ? 0 : 2 * x[i] * dout[i];
        }
        break;
    case ACTIVATION_GELU:
        row_gelu_backward(dout, x, count);
        break;
    case ACTIVATION_GELU_EXACT:
        row_gelu_exact_backward(dout, x, count);
        break;
    case ACTIVATION_SWIGLU: // has two inputs: row_swiglu_backward
        break;
    }
}

// The gradients of both halves of SwiGLU's input, in their places; dout is of its output.
MX_FUNCTION void row_swiglu_backward(float *x, float *up, const float *dout, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float gate = silu_gate(x[i]), silu = x[i] * gate;
        x[i] = dout[i] * up[i] * (gate + silu * (1.0f - gate));
        up[i] = dout[i] * silu;
    }
}

// Returns what is subtracted from a row.
MX_FUNCTION float norm_mean(const NormParams *norm, int64_t row) {
    return norm->kind == NORM_LAYERNORM ? norm->mean[row] : 0;
}

// Normalizes `count` columns of a row, from `col` on.
MX_FUNCTION void row_normalize(float *x, const NormParams *norm, int64_t row, int64_t col, int64_t count) {
    const float *weight = norm->weight ? norm->weight + col : NULL, *bias = norm->bias ? norm->bias + col : NULL;
    float mean = norm_mean(norm, row), rstd = norm->rstd[row];
    if (weight && bias) {
        for (int64_t i = 0; i < count; i++) {
            x[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        x[i] = (x[i] - mean) * rstd;
    }
    for (int64_t i = 0; i < count && weight; i++) {
        x[i] *= weight[i];
    }
    for (int64_t i = 0; i < count && bias; i++) {
        x[i] += bias[i];
    }
}
