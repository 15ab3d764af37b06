/*
The quantizer's inner loops for BF16 and AVX-512BW: 32 elements, a block or 32 columns, to a vector of 16-bit lanes. The
same bits as mx.h: test_quantize compares them on every BF16 value. Blocks whose scale lies at either end of E8M0's
range, where BF16's own subnormals, Inf and NaN come in, aren't for these loops: see scale_is_usual.
*/
#ifndef LLMC_CPU_QUANTIZE_AVX512_H
#define LLMC_CPU_QUANTIZE_AVX512_H

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAVE_AVX512_QUANTIZE 1

#include "../mx.h"

#include <immintrin.h>

// Above it no BF16 subnormal reaches half an element's smallest value, below its end there is no Inf and no NaN.
enum { FIRST_USUAL_SCALE = 32, LAST_USUAL_SCALE = 254 };

MX_FUNCTION bool scale_is_usual(uint8_t code, uint32_t amax) {
    return amax == 0 || (code >= FIRST_USUAL_SCALE && code <= LAST_USUAL_SCALE);
}

// What to take from BF16 bits so that their exponent field becomes the element's. A block of zeros gets the largest
// scale's, with which all becomes 0.
MX_FUNCTION uint16_t rebias_of(Format format, uint8_t code, uint32_t amax) {
    uint32_t scale = amax == 0 ? LAST_USUAL_SCALE : code;
    return (uint16_t)((scale - mx_element(format).bias) << 7);
}

MX_FUNCTION __m512i bf16_magnitudes(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF)); }

// Halves of `a` against each other and of `b` too, beside each other: the names say how long the halves' pieces are
// that alternate in the result.
MX_FUNCTION __m512i fold_16(__m512i a, __m512i b) {
    return _mm512_max_epu16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
}
MX_FUNCTION __m512i fold_32(__m512i a, __m512i b) {
    return _mm512_max_epu16(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
MX_FUNCTION __m512i fold_64(__m512i a, __m512i b) {
    return _mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
MX_FUNCTION __m512i fold_128(__m512i a, __m512i b) {
    return _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
}

// The largest lane of each of 32 vectors, in order: a tree of folds, three instructions each, in place of 32
// reductions.
MX_FUNCTION __m512i largest_of_each(const __m512i x[MX_BLOCK]) {
    __m512i eight[4];
    for (int i = 0; i < 4; i++) {
        const __m512i *v = x + 8 * i;
        eight[i] = fold_64(fold_32(fold_16(v[0], v[1]), fold_16(v[2], v[3])),
                           fold_32(fold_16(v[4], v[5]), fold_16(v[6], v[7])));
    }
    return fold_128(fold_128(eight[0], eight[1]), fold_128(eight[2], eight[3]));
}

// What encode_bf16 needs of a format, in registers for the length of a loop: gcc would make each again from an integer
// register at each use.
typedef struct {
    __m512i one, sixteen, mantissa, implicit_bit, below_half;
    __m512i shift, subnormal_shift, max_code, sign_bit;
    uint32_t sign_shift;
} EncodeBf16;

MX_FUNCTION __m512i in_register(int value) {
    __m512i vector = _mm512_set1_epi16((short)value);
    __asm__("" : "+v"(vector));
    return vector;
}

MX_FUNCTION EncodeBf16 encode_bf16_of(Format format) {
    MxElement e = mx_element(format);
    return (EncodeBf16){.one = in_register(1),
                        .sixteen = in_register(16),
                        .mantissa = in_register(0x7F),
                        .implicit_bit = in_register(0x80),
                        .below_half = in_register(0x7FFF),
                        .shift = in_register(7 - (int)e.mantissa_bits),
                        .subnormal_shift = in_register(8 - (int)e.mantissa_bits),
                        .max_code = in_register((int)e.max_code),
                        .sign_bit = in_register(1 << e.sign_bit),
                        .sign_shift = 15 - e.sign_bit};
}

// Codes of BF16 values, a byte each. One rounding to nearest even: of the value's upper bits where the element is
// normal, else of its significand, shifted by as much as the exponent falls short.
MX_FUNCTION __m256i encode_bf16(const EncodeBf16 *c, __m512i x, __m512i rebias) {
    __m512i magnitude = bf16_magnitudes(x);
    __m512i value = _mm512_sub_epi16(magnitude, rebias);
    __m512i exponent = _mm512_srai_epi16(value, 7);
    __m512i shift = _mm512_max_epi16(_mm512_sub_epi16(c->subnormal_shift, exponent), c->shift);
    __mmask32 subnormal = _mm512_cmpgt_epi16_mask(c->one, exponent);
    // (magnitude & mantissa) | implicit_bit
    __m512i significand = _mm512_ternarylogic_epi32(magnitude, c->mantissa, c->implicit_bit, 0xEA);
    value = _mm512_mask_mov_epi16(value, subnormal, significand);

    __m512i is_odd = _mm512_and_si512(_mm512_srlv_epi16(value, shift), c->one);
    __m512i below_half = _mm512_srlv_epi16(c->below_half, _mm512_sub_epi16(c->sixteen, shift));
    value = _mm512_add_epi16(_mm512_add_epi16(value, below_half), is_odd);
    __m512i code = _mm512_min_epu16(_mm512_srlv_epi16(value, shift), c->max_code);
    // code | (sign & sign_bit)
    code = _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(x, c->sign_shift), c->sign_bit, 0xF8);
    return _mm512_cvtepi16_epi8(code);
}

#endif
#endif
