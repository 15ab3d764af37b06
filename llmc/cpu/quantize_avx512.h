/*
The quantizer's inner loops for BF16 and AVX-512BW: 32 elements, a block or 32 columns, to a vector
of 16-bit lanes. The same bits as mx.h: test_quantize compares them on every BF16 value. Blocks
whose scale lies at either end of E8M0's range, where BF16's own subnormals, Inf and NaN come in,
aren't for these loops: see scale_is_usual.
*/
#ifndef LLMC_CPU_QUANTIZE_AVX512_H
#define LLMC_CPU_QUANTIZE_AVX512_H

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAVE_AVX512_QUANTIZE 1

#include "llmc/numerics/mx.h"

#include <immintrin.h>

// Above it no BF16 subnormal reaches half an element's smallest value, below its end there is no
// Inf and no NaN.
enum { FIRST_USUAL_SCALE = 32, LAST_USUAL_SCALE = 254 };

MX_FUNCTION bool scale_is_usual(uint8_t code, uint32_t amax) {
    return amax == 0 || (code >= FIRST_USUAL_SCALE && code <= LAST_USUAL_SCALE);
}

// What to take from BF16 bits so that their exponent field becomes the element's. A block of zeros
// gets the largest scale's, with which all becomes 0.
MX_FUNCTION uint16_t rebias_of(Format format, uint8_t code, uint32_t amax) {
    uint32_t scale = amax == 0 ? LAST_USUAL_SCALE : code;
    return (uint16_t)((scale - mx_element(format).bias) << 7);
}

MX_FUNCTION __m512i bf16_magnitudes(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF)); }

// Halves of `a` against each other and of `b` too, beside each other: the names say how long the
// halves' pieces are that alternate in the result.
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

// The largest lane of each of 32 vectors, in order: a tree of folds, three instructions each, in
// place of 32 reductions.
MX_FUNCTION __m512i largest_of_each(const __m512i x[MX_BLOCK]) {
    __m512i eight[4];
    for (int i = 0; i < 4; i++) {
        const __m512i *v = x + 8 * i;
        eight[i] = fold_64(fold_32(fold_16(v[0], v[1]), fold_16(v[2], v[3])),
                           fold_32(fold_16(v[4], v[5]), fold_16(v[6], v[7])));
    }
    return fold_128(fold_128(eight[0], eight[1]), fold_128(eight[2], eight[3]));
}

// What encode_bf16 needs of a format, in registers for the length of a loop: gcc would make each
// again from an integer register at each use.
typedef struct {
    __m512i mantissa, implicit_bit, one, mantissa_bits, one_byte, half, max_code, sign_bit;
} EncodeBf16;

MX_FUNCTION __m512i in_register(__m512i vector) {
    __asm__("" : "+v"(vector));
    return vector;
}

MX_FUNCTION EncodeBf16 encode_bf16_of(Format format) {
    MxElement e = mx_element(format);
    return (EncodeBf16){.mantissa = in_register(_mm512_set1_epi16(0x7F)),
                        .implicit_bit = in_register(_mm512_set1_epi16(0x80)),
                        .one = in_register(_mm512_set1_epi16(1)),
                        .mantissa_bits = in_register(_mm512_set1_epi16((short)e.mantissa_bits)),
                        .one_byte = in_register(_mm512_set1_epi8(1)),
                        .half = in_register(_mm512_set1_epi8((char)0x80)),
                        .max_code = in_register(_mm512_set1_epi8((char)e.max_code)),
                        .sign_bit = in_register(_mm512_set1_epi8((char)(1 << e.sign_bit)))};
}

// 64 BF16 values as encode_bf16 takes them, whatever their scales are.
typedef struct {
    __m512i magnitudes[2], significands[2];
    __mmask64 negative;
} Bf16Values;

MX_FUNCTION Bf16Values bf16_values(const EncodeBf16 *c, __m512i first, __m512i second) {
    Bf16Values v = {.magnitudes = {bf16_magnitudes(first), bf16_magnitudes(second)},
                    .negative = _mm512_kunpackd(_mm512_movepi16_mask(second), _mm512_movepi16_mask(first))};
    for (int j = 0; j < 2; j++) {
        // (magnitude & mantissa) | implicit_bit
        v.significands[j] = _mm512_ternarylogic_epi32(v.magnitudes[j], c->mantissa, c->implicit_bit, 0xEA);
    }
    return v;
}

// The upper or the lower byte of each 16-bit lane of `a`, then of `b`.
MX_FUNCTION __m512i bytes_of(__m512i a, __m512i b, bool upper) {
#ifdef __AVX512VBMI__
    __m512i index =
        _mm512_set_epi8(126, 124, 122, 120, 118, 116, 114, 112, 110, 108, 106, 104, 102, 100, 98, 96, 94, 92, 90, 88,
                        86, 84, 82, 80, 78, 76, 74, 72, 70, 68, 66, 64, 62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40,
                        38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_epi8(a, upper ? _mm512_add_epi8(index, _mm512_set1_epi8(1)) : index, b);
#else
    __m512i low = _mm512_set1_epi16(0xFF);
    __m512i first = upper ? _mm512_srli_epi16(a, 8) : _mm512_and_si512(a, low);
    __m512i second = upper ? _mm512_srli_epi16(b, 8) : _mm512_and_si512(b, low);
    return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), _mm512_packus_epi16(first, second));
#endif
}

// Codes in the upper bytes of 16-bit lanes, neither rounded nor clamped, what is cut off in the
// lower ones. A normal element is the upper bits of the value's exponent and mantissa, a subnormal
// one those of its significand, whichever is larger, shifted left by as much less as the exponent
// falls short; below half the smallest element nothing is left.
MX_FUNCTION __m512i shift_bf16(const EncodeBf16 *c, __m512i magnitude, __m512i significand, __m512i rebias) {
    __m512i value = _mm512_sub_epi16(magnitude, rebias);
    __m512i exponent = _mm512_min_epi16(_mm512_srai_epi16(value, 7), c->one);
    return _mm512_sllv_epi16(_mm512_max_epi16(value, significand), _mm512_add_epi16(exponent, c->mantissa_bits));
}

// Rounded once to nearest even: up where what is cut off is over half, or half and the code odd.
// Where the code can be odd the shift was by one or more, so that the lowest bit of what is cut off
// is free for the code's.
MX_FUNCTION __m512i encode_bf16(const EncodeBf16 *c, const Bf16Values *v, __m512i rebias, __m512i second_rebias) {
    __m512i first = shift_bf16(c, v->magnitudes[0], v->significands[0], rebias);
    __m512i second = shift_bf16(c, v->magnitudes[1], v->significands[1], second_rebias);
    __m512i codes = bytes_of(first, second, true);
    // rest | (codes & 1)
    __m512i rest = _mm512_ternarylogic_epi32(bytes_of(first, second, false), codes, c->one_byte, 0xF8);
    codes = _mm512_mask_add_epi8(codes, _mm512_cmpgt_epu8_mask(rest, c->half), codes, c->one_byte);
    codes = _mm512_min_epu8(codes, c->max_code);
    return _mm512_mask_add_epi8(codes, v->negative, codes, c->sign_bit);
}

// What decode_bf16 needs of a format. BF16 bits of a code's magnitude before its scale is counted
// in: a normal one's are the code's own, moved; a subnormal one's, which BF16 has as normal
// numbers, are in a table.
typedef struct {
    __m512i magnitude, subnormals, first_normal, sign;
    unsigned shift, sign_shift;
} DecodeBf16;

MX_FUNCTION DecodeBf16 decode_bf16_of(Format format) {
    MxElement e = mx_element(format);
    int16_t subnormals[MX_BLOCK] = {0};
    for (int code = 1; code < 1 << e.mantissa_bits; code++) {
        int log2 = code >= 4 ? 2 : code >= 2 ? 1 : 0; // at most three bits
        subnormals[code] = (int16_t)((1 - (int)e.mantissa_bits + log2) * 128 + ((code << (7 - log2)) & 0x7F));
    }
    return (DecodeBf16){.magnitude = _mm512_set1_epi16((short)((1 << e.sign_bit) - 1)),
                        .subnormals = _mm512_loadu_si512(subnormals),
                        .first_normal = _mm512_set1_epi16((short)(1 << e.mantissa_bits)),
                        .sign = _mm512_set1_epi16((short)0x8000),
                        .shift = 7 - (unsigned)e.mantissa_bits,
                        .sign_shift = 15 - (unsigned)e.sign_bit};
}

// 32 codes, as encode_bf16 made them with the same `rebias`, to the BF16 values that they and their
// scale stand for.
MX_FUNCTION __m512i decode_bf16(const DecodeBf16 *c, __m256i codes, __m512i rebias) {
    __m512i wide = _mm512_cvtepu8_epi16(codes), magnitude = _mm512_and_si512(wide, c->magnitude);
    __mmask32 subnormal = _mm512_cmplt_epu16_mask(magnitude, c->first_normal);
    __m512i value = _mm512_slli_epi16(magnitude, c->shift);
    value = _mm512_mask_permutexvar_epi16(value, subnormal, magnitude, c->subnormals);
    value = _mm512_maskz_add_epi16(_mm512_test_epi16_mask(magnitude, magnitude), value, rebias);
    // value | (wide << sign_shift & sign)
    return _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(wide, c->sign_shift), c->sign, 0xF8);
}

#endif
#endif
