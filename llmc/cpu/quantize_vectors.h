/*
The quantizer's inner loops for BF16, in vectors of 16-bit lanes: AVX-512's, AVX2's or NEON's, in
one source; and what products need of 32-bit lanes, draw.c of 64-bit ones. The same bits as mx.h:
test_quantize compares them on every BF16 value. Blocks whose scale lies at either end of E8M0's
range, where BF16's own subnormals, Inf and NaN come in, aren't for these loops: see scale_is_usual.
*/
#pragma once

#include "llmc/numerics/mx.h"

#if defined(__AVX512BW__)
#include <immintrin.h>
#define VECTOR_BYTES 64
#define VECTOR_OF(name) _mm512_##name
typedef __m512i Register;
#elif defined(__AVX2__)
#include <immintrin.h>
#define VECTOR_BYTES 32
#define VECTOR_OF(name) _mm256_##name
typedef __m256i Register;
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define VECTOR_BYTES 16
#endif

#ifdef VECTOR_BYTES

enum { WORDS = VECTOR_BYTES / 2, SINGLES = VECTOR_BYTES / 4, LONGS = VECTOR_BYTES / 8 };
typedef uint16_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Singles __attribute__((vector_size(VECTOR_BYTES)));
typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Longs __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES)));
typedef int8_t SignedBytes __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t Table __attribute__((vector_size(16)));

// What C has no operator for. repeat: a table as lookup takes it; lookup: of each byte of `index`,
// which is below 16, the table's entry; upper, lower: those bytes, or words, of the lanes of `a`,
// then of `b`;
// fold: halves of `a` against each other and of `b` too, beside each other, the larger lanes:
// the names say how long the halves' pieces are that alternate in the result; longs_multiply: the
// lower halves of lanes times a number, whole.

#ifdef __ARM_NEON
MX_FUNCTION Words words_max(Words a, Words b) { return vmaxq_u16(a, b); }
MX_FUNCTION Words words_min(Words a, Words b) { return vminq_u16(a, b); }
MX_FUNCTION Words words_subtract_saturating(Words a, Words b) { return vqsubq_u16(a, b); }
MX_FUNCTION Bytes repeat(Table table) { return table; }
MX_FUNCTION Words words_lookup(Bytes table, Words index) { return (Words)vqtbl1q_u8(table, (Bytes)index); }
MX_FUNCTION Bytes bytes_min(Bytes a, Bytes b) { return vminq_u8(a, b); }
MX_FUNCTION Bytes bytes_upper(Words a, Words b) { return vuzp2q_u8((Bytes)a, (Bytes)b); }
MX_FUNCTION Bytes bytes_lower(Words a, Words b) { return vuzp1q_u8((Bytes)a, (Bytes)b); }
MX_FUNCTION Words bytes_widen(Bytes a, int half) { return half ? vmovl_high_u8(a) : vmovl_u8(vget_low_u8(a)); }
MX_FUNCTION Words words_upper(Singles a, Singles b) { return vuzp2q_u16((Words)a, (Words)b); }
MX_FUNCTION Words fold_16(Words a, Words b) { return vpmaxq_u16(a, b); }
#define fold_32 fold_16
#define fold_64 fold_16
#define fold_128 fold_16
MX_FUNCTION Longs longs_multiply(Longs a, uint32_t b) { return vmull_u32(vmovn_u64(a), vdup_n_u32(b)); }
MX_FUNCTION void stream(void *out, Bytes a) { memcpy(out, &a, sizeof(a)); }
MX_FUNCTION void end_streams(void) {}
#else
MX_FUNCTION Words words_max(Words a, Words b) { return (Words)VECTOR_OF(max_epu16)((Register)a, (Register)b); }
MX_FUNCTION Words words_min(Words a, Words b) { return (Words)VECTOR_OF(min_epu16)((Register)a, (Register)b); }
MX_FUNCTION Words words_subtract_saturating(Words a, Words b) {
    return (Words)VECTOR_OF(subs_epu16)((Register)a, (Register)b);
}
MX_FUNCTION Longs longs_multiply(Longs a, uint32_t b) {
    return (Longs)VECTOR_OF(mul_epu32)((Register)a, (Register)((Longs){0} + b));
}
MX_FUNCTION Bytes repeat(Table table) {
#ifdef __AVX512BW__
    return (Bytes)_mm512_broadcast_i32x4((__m128i)table);
#else
    return (Bytes)_mm256_broadcastsi128_si256((__m128i)table);
#endif
}
MX_FUNCTION Words words_lookup(Bytes table, Words index) {
    return (Words)VECTOR_OF(shuffle_epi8)((Register)table, (Register)index);
}
MX_FUNCTION Bytes bytes_min(Bytes a, Bytes b) { return (Bytes)VECTOR_OF(min_epu8)((Register)a, (Register)b); }
#ifdef __AVX512VBMI__
MX_FUNCTION Bytes bytes_from(Words a, Words b, uint8_t first) {
    Register index =
        _mm512_set_epi8(126, 124, 122, 120, 118, 116, 114, 112, 110, 108, 106, 104, 102, 100, 98, 96, 94, 92, 90, 88,
                        86, 84, 82, 80, 78, 76, 74, 72, 70, 68, 66, 64, 62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40,
                        38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return (Bytes)_mm512_permutex2var_epi8((Register)a, (Register)((Bytes)index + first), (Register)b);
}
MX_FUNCTION Bytes bytes_upper(Words a, Words b) { return bytes_from(a, b, 1); }
MX_FUNCTION Bytes bytes_lower(Words a, Words b) { return bytes_from(a, b, 0); }
#else
MX_FUNCTION Bytes bytes_pack(Words a, Words b) {
    Register pieces = VECTOR_OF(packus_epi16)((Register)a, (Register)b); // of 64 bits, from a and b in turn
#ifdef __AVX512BW__
    return (Bytes)_mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), pieces);
#else
    return (Bytes)_mm256_permute4x64_epi64(pieces, 0xD8);
#endif
}
MX_FUNCTION Bytes bytes_upper(Words a, Words b) { return bytes_pack(a >> 8, b >> 8); }
MX_FUNCTION Bytes bytes_lower(Words a, Words b) { return bytes_pack(a & 0xFF, b & 0xFF); }
#endif
MX_FUNCTION Words bytes_widen(Bytes a, int half) {
#ifdef __AVX512BW__
    return (Words)_mm512_cvtepu8_epi16(half ? _mm512_extracti64x4_epi64((Register)a, 1)
                                            : _mm512_castsi512_si256((Register)a));
#else
    return (Words)_mm256_cvtepu8_epi16(half ? _mm256_extracti128_si256((Register)a, 1)
                                            : _mm256_castsi256_si128((Register)a));
#endif
}
MX_FUNCTION Words words_upper(Singles a, Singles b) {
#ifdef __AVX512BW__
    Register index = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                      23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (Words)_mm512_permutex2var_epi16((Register)a, index, (Register)b);
#else
    Register pieces = _mm256_packus_epi32((Register)(a >> 16), (Register)(b >> 16)); // of 64 bits, in turn
    return (Words)_mm256_permute4x64_epi64(pieces, 0xD8);
#endif
}
#define FOLD(name, low, high)                               \
    MX_FUNCTION Words name(Words first, Words second) {     \
        Register a = (Register)first, b = (Register)second; \
        return words_max((Words)(low), (Words)(high));      \
    }
FOLD(fold_16, VECTOR_OF(unpacklo_epi16)(a, b), VECTOR_OF(unpackhi_epi16)(a, b))
FOLD(fold_32, VECTOR_OF(unpacklo_epi32)(a, b), VECTOR_OF(unpackhi_epi32)(a, b))
FOLD(fold_64, VECTOR_OF(unpacklo_epi64)(a, b), VECTOR_OF(unpackhi_epi64)(a, b))
#ifdef __AVX512BW__
FOLD(fold_128, _mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD))
#else
FOLD(fold_128, _mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31))
#endif
MX_FUNCTION void stream(void *out, Bytes a) {
#ifdef __AVX512BW__
    _mm512_stream_si512(out, (Register)a);
#else
    _mm256_stream_si256(out, (Register)a);
#endif
}
MX_FUNCTION void end_streams(void) { _mm_sfence(); }
#endif

MX_FUNCTION Words words_load(const uint16_t *x) {
    Words words;
    memcpy(&words, x, sizeof(words));
    return words;
}

// Finds the largest lane of each of 32 vectors: a tree of folds, three instructions each, in place
// of 32 reductions.
MX_FUNCTION void largest_of_each(uint16_t out[MX_BLOCK], const Words x[MX_BLOCK]) {
    Words folded[4];
    for (int i = 0; i < 4; i++) {
        const Words *v = x + 8 * i;
        folded[i] = fold_64(fold_32(fold_16(v[0], v[1]), fold_16(v[2], v[3])),
                            fold_32(fold_16(v[4], v[5]), fold_16(v[6], v[7])));
    }
    for (int count = MX_BLOCK / WORDS; count < 4; count *= 2) {
        for (int i = 0; i < 2; i++) {
            folded[i] = fold_128(folded[2 * i], folded[2 * i + 1]);
        }
    }
    memcpy(out, folded, MX_BLOCK * sizeof(*out));
}

// Above it no BF16 subnormal reaches half an element's smallest value, below its end there is no
// Inf and no NaN.
enum { FIRST_USUAL_SCALE = 32, LAST_USUAL_SCALE = 254 };

MX_FUNCTION bool scale_is_usual(uint8_t code, uint32_t amax) {
    return amax == 0 || (code >= FIRST_USUAL_SCALE && code <= LAST_USUAL_SCALE);
}

// Binades of subnormal elements, and the one below them, from which values are rounded up to the
// smallest.
MX_FUNCTION uint32_t small_binades(Format format) { return mx_element(format).mantissa_bits + 1; }

// What to take from BF16 bits so that their exponent field becomes the element's and small_binades
// more. A block of zeros gets the largest scale's, with which all becomes 0.
MX_FUNCTION uint16_t rebias_of(Format format, uint8_t code, uint32_t amax) {
    uint32_t scale = amax == 0 ? LAST_USUAL_SCALE : code;
    return (uint16_t)((scale - mx_element(format).bias - small_binades(format)) << 7);
}

// In a register for the length of a loop: gcc would make a constant again at each use.
MX_FUNCTION Words kept(Words constant) {
#ifdef __ARM_NEON
    __asm__("" : "+w"(constant));
#else
    __asm__("" : "+v"(constant));
#endif
    return constant;
}

// What the loops need of a format.
typedef struct {
    Bytes powers;     // of two, by exponent: what a significand is multiplied by
    Bytes subnormals; // by code: what to add to it so that its upper bits are an exponent
    Words first_normal, max_power;
    Bytes max_code;
} FormatVectors;

MX_FUNCTION FormatVectors format_vectors(Format format) {
    const MxElement e = mx_element(format);
    const int m = (int)e.mantissa_bits, small = (int)small_binades(format);
    Table powers = {0}, subnormals = {0};
    for (int exponent = 1; exponent <= m + 2; exponent++) {
        powers[exponent] = (uint8_t)(1 << (exponent - 1));
    }
    for (int code = 1; code <= 1 << m; code++) {
        int log2 = code >= 8 ? 3 : code >= 4 ? 2 : code >= 2 ? 1 : 0;
        int normal = ((small - m + log2) << m) + (code << (m - log2)); // its implicit bit counts as a binade
        subnormals[code] = (uint8_t)(normal - code);
    }
    return (FormatVectors){.powers = repeat(powers),
                           .subnormals = repeat(subnormals),
                           .first_normal = kept((Words){0} + (uint16_t)(1 << m)),
                           .max_power = kept((Words){0} + (uint16_t)(small + 1)),
                           .max_code = (Bytes)kept((Words){0} + (uint16_t)(e.max_code * 0x101))};
}

// Two vectors of BF16 values as encode_bf16 takes them, whatever their scales are.
typedef struct {
    Words magnitude[2], significand[2];
    Bytes sign;
} Bf16Values;

MX_FUNCTION Bf16Values bf16_values(Format format, const Words x[2]) {
    const uint16_t implicit_bit = (uint16_t)(0x80 + (small_binades(format) << 7));
    return (Bf16Values){.magnitude = {x[0] & 0x7FFF, x[1] & 0x7FFF},
                        .significand = {(x[0] & 0x7F) + implicit_bit, (x[1] & 0x7F) + implicit_bit},
                        .sign = (bytes_upper(x[0], x[1]) & 0x80) >> (7 - mx_element(format).sign_bit)};
}

// A code, without its sign, in the upper byte, neither rounded nor clamped, and in the lower one
// what is cut off. A normal element is the upper bits of the value's exponent and mantissa, a
// subnormal one those of its significand, whichever is larger, shifted left by as much less as the
// exponent falls short; below half the smallest element nothing is left.
MX_FUNCTION Words shift_bf16(Format format, const FormatVectors *f, Words magnitude, Words significand, Words rebias) {
    Words value = words_subtract_saturating(magnitude, rebias);
    Words power = words_lookup(f->powers, words_min(value >> 7, f->max_power));
    return (words_max(value, significand) - (uint16_t)(small_binades(format) << 7)) * power;
}

// Codes without their signs, rounded once to nearest even: up where what is cut off is over half,
// or half and the code odd. Where the code can be odd the shift was by one or more, so that the
// lowest bit of what is cut off is free for the code's.
MX_FUNCTION Bytes encode_bf16(Format format, const FormatVectors *f, const Bf16Values *v, const Words rebias[2]) {
    Words first = shift_bf16(format, f, v->magnitude[0], v->significand[0], rebias[0]);
    Words second = shift_bf16(format, f, v->magnitude[1], v->significand[1], rebias[1]);
    Bytes codes = bytes_upper(first, second), rest = bytes_lower(first, second) | (codes & 1);
    Bytes is_up = (Bytes)((SignedBytes)(rest ^ 0x80) > 0); // -1 where it is
    return bytes_min(codes - is_up, f->max_code);
}

// The BF16 bits of what codes without signs, made with the same `rebias`, and their scale stand
// for. A subnormal element is a normal BF16 number.
MX_FUNCTION Words decode_bf16(Format format, const FormatVectors *f, Words codes, Words rebias) {
    Words normal = codes + words_lookup(f->subnormals, words_min(codes, f->first_normal));
    return ((normal << (7 - mx_element(format).mantissa_bits)) + rebias) & (Words)(codes != 0);
}

#endif
