/*
exp and the logistic function of FP32 without branches or tables, so that loops over them vectorise,
and with the same bits whatever the C library.
*/
#pragma once

#include "llmc/backend.h"     // LOG2_E
#include "llmc/numerics/mx.h" // bit casts

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <math.h> // INFINITY

// Returns x, or the limit that it is beyond, a negative or a positive one; of NaN either, by its
// sign. Compared as bits, since of two floats gcc makes three copies of all that follows. As signed
// integers positive floats order like numbers, as unsigned ones negative ones do, above all
// positive.
MX_FUNCTION float vector_clamp(float x, float low, float high) {
    int32_t highest = (int32_t)mx_float_bits(high), below = (int32_t)mx_float_bits(x);
    uint32_t lowest = mx_float_bits(low), above = (uint32_t)(below < highest ? below : highest);
    return mx_bits_float(above < lowest ? above : lowest);
}

// Added to a number below 2^22, and taken off, it leaves the next integer, which the sum's low bits
// hold: 1.5 * 2^23.
#define ROUNDING_SHIFT 12582912.0f

// Returns p 2^n, where `shifted` is n + ROUNDING_SHIFT. The result has to be a normal number.
MX_FUNCTION float vector_scale(float p, float shifted) {
    return mx_bits_float(mx_float_bits(p) + (mx_float_bits(shifted) << 23));
}

// Returns e^x for x from -87.3 to 88.3: 2^n e^r with |r| <= ln(2)/2. The polynomial that stands for
// e^r was fitted for the least relative error, 4e-9, with 1 + r as its first terms. By test_ops
// within 1.2 ulp (0.9 where the machine has fused multiply-add).
MX_FUNCTION float vector_exp_within(float x) {
    float shifted = x * LOG2_E + ROUNDING_SHIFT;
    float n = shifted - ROUNDING_SHIFT;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f; // ln 2 in two parts, the first exact in n's range
    float p = 1.38146128e-03f;
    p = p * r + 8.36871006e-03f;
    p = p * r + 4.16683890e-02f;
    p = p * r + 1.66665211e-01f;
    p = p * r + 4.99999940e-01f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return vector_scale(p, shifted);
}

// Returns e^x of any x: below -87.3 about 1e-38, not a subnormal; above 88.3 about 2e38. NaN gives
// NaN.
MX_FUNCTION float vector_exp(float x) {
    float power = vector_exp_within(vector_clamp(x, -87.3f, 88.3f));
    return x != x ? x : power;
}

// Returns 1 / (1 + 2^-x) for |x| <= 126. With -x = n + r, |r| <= 1/2, a polynomial stands for 2^r,
// which was fitted for the least relative error. By test_ops within 2.5 ulp.
MX_FUNCTION float vector_logistic2(float x) {
    float shifted = ROUNDING_SHIFT - x, minus_r = x + (shifted - ROUNDING_SHIFT);
    float p = 1.535335510e-04f;
    p = p * minus_r - 1.339887536e-03f;
    p = p * minus_r + 9.618437385e-03f;
    p = p * minus_r - 5.550332469e-02f;
    p = p * minus_r + 2.402264791e-01f;
    p = p * minus_r - 6.931472029e-01f;
    p = p * minus_r + 1.0f;
    return 1.0f / (1.0f + vector_scale(p, shifted));
}

#ifdef __AVX512F__
// Returns 2^x of 16 numbers: by test_ops within 1 ulp, and 0 instead of a subnormal number. NaN
// gives NaN.
MX_FUNCTION __m512 vector_exp2(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.535335510e-04f); // fitted to 2^r for the least relative error, |r| <= 1/2
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.339887536e-03f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.618437385e-03f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550332469e-02f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402264791e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931472029e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
    __mmask16 not_small = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(not_small, p, n);
}
#endif

// Returns the largest of x (count), or -Inf of none. NaN is passed over.
MX_FUNCTION float vector_max(const float *x, int64_t count) {
    float max = -INFINITY;
#pragma omp simd reduction(max : max)
    for (int64_t i = 0; i < count; i++) {
        max = x[i] > max ? x[i] : max;
    }
    return max;
}
