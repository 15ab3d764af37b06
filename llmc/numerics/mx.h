/*
MX numerics: element formats, scale rounding, encode, decode, scale layout.

This is the one place that says what a format and a rounding mode mean. It can be used from C and
from CUDA C++, on the host and on the device, and includes nothing of ours. It has no branches on
data, so that compilers vectorise the loops that call it. It needs IEEE subnormals: no -ffast-math,
no flush-to-zero.

Sources: OCP Microscaling Formats 1.0 (formats, `floor`); arXiv 2506.08027 (`rceil`); torchao
(`ceil`, `even`).
*/
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h> // memcpy, the portable bit cast

#ifdef __CUDACC__
#define MX_FUNCTION static __host__ __device__ __forceinline__
#else
#define MX_FUNCTION static inline __attribute__((always_inline))
#endif

// Elements that share one scale, consecutive along the axis of the dot product.
#define MX_BLOCK 32

#define MX_SCALE_NAN 0xFF

// The MX formats, a row each. All else follows from these, for a sign, an exponent, and at most
// three bits of mantissa. The columns: FORMAT_ without its prefix; the name in options and logs;
// and in the order of MxElement, which explains them, mantissa_bits, bias, emax, max_code,
// nan_code, sign_bit.
// clang-format off
#define MX_FORMATS(row, context)                         \
    row(context, E4M3, "e4m3", 3,  7,  8, 0x7E, 0x7F, 7) \
    row(context, E5M2, "e5m2", 2, 15, 15, 0x7B, 0x7F, 7) \
    row(context, E2M3, "e2m3", 3,  1,  2, 0x1F, 0x1F, 5) \
    row(context, E3M2, "e3m2", 2,  3,  4, 0x1F, 0x1F, 5) \
    row(context, E2M1, "e2m1", 1,  1,  2, 0x07, 0x07, 3)
// clang-format on

#define MX_FORMAT_VALUE(context, name, ...) FORMAT_##name,
typedef enum {
    FORMAT_FP32,
    FORMAT_BF16,
    MX_FORMATS(MX_FORMAT_VALUE, ) NUM_FORMATS,
    FIRST_MX_FORMAT = FORMAT_E4M3
} Format;

// How a block's amax becomes its scale, a power of two.
typedef enum {
    SCALE_RCEIL, // amax / max, up: no element is clamped
    SCALE_FLOOR, // OCP: amax down, over 2^emax; elements above max * scale are clamped
    SCALE_CEIL,  // amax up, over 2^emax
    SCALE_EVEN,  // amax rounded to the element's mantissa width, then as SCALE_FLOOR
    NUM_SCALE_ROUNDINGS
} ScaleRounding;

// Along which axis of a row-major matrix the blocks of 32 run: rowwise 1x32, columnwise 32x1.
// Square ones, 32x32 with one scale, are blocks of either axis.
typedef enum { AXIS_ROWWISE, AXIS_COLUMNWISE, AXIS_SQUARE } Axis;

typedef struct {
    uint32_t mantissa_bits;
    uint32_t bias;
    uint32_t emax;     // exponent of the largest normal
    uint32_t max_code; // code of the largest normal, without its sign
    uint32_t nan_code; // what a NaN becomes; FP6 and FP4 have none and take the largest normal
    uint32_t sign_bit; // its position
} MxElement;

MX_FUNCTION bool mx_is_mx(Format format) { return format >= FIRST_MX_FORMAT && format < NUM_FORMATS; }

#define MX_ELEMENT(context, name, text, ...) const MxElement element_##name = {__VA_ARGS__};
#define MX_IF_ELEMENT(context, name, ...) format == FORMAT_##name ? element_##name:
MX_FUNCTION MxElement mx_element(Format format) {
    MX_FORMATS(MX_ELEMENT, )
    return MX_FORMATS(MX_IF_ELEMENT, ) element_E4M3;
}

// Makes the call with the constant that `format` is: one copy of a loop or a kernel for each MX
// format. Where there is no MX tensor, and so none of these, the call is made all the same, with
// the first.
#define MX_CASE(call, name, ...) \
    case FORMAT_##name:          \
        call(FORMAT_##name);     \
        break;
#define MX_WITH_CONSTANT_FORMAT(format, call) \
    switch (format) {                         \
        MX_FORMATS(MX_CASE, call)             \
    default:                                  \
        call(FORMAT_E4M3);                    \
        break;                                \
    }

MX_FUNCTION uint32_t mx_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

MX_FUNCTION float mx_bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// Returns the bits of |x|. As integers they order like magnitudes, with Inf and then every NaN
// above all finite values: their maximum over a block is its amax and can't lose a NaN.
MX_FUNCTION uint32_t mx_magnitude_bits(float x) { return mx_float_bits(x) & 0x7FFFFFFFu; }

// Convert BF16 to FP32 and back: to BF16 to nearest, ties to even; a NaN stays a (quiet) NaN.
MX_FUNCTION float mx_from_bf16(uint16_t x) { return mx_bits_float((uint32_t)x << 16); }

MX_FUNCTION uint16_t mx_to_bf16(float x) {
    uint32_t bits = mx_float_bits(x), rounded = bits + 0x7FFFu + ((bits >> 16) & 1u), quiet_nan = bits | 0x400000u;
    uint32_t is_nan = 0u - (uint32_t)(x != x); // gcc's vectors choose faster by a mask
    return (uint16_t)(((rounded & ~is_nan) | (quiet_nan & is_nan)) >> 16);
}

// Returns the value of an element's code, exactly. Bits above the format's width are ignored.
MX_FUNCTION float mx_decode(Format format, uint8_t code) {
    MxElement e = mx_element(format);
    uint32_t sign = ((uint32_t)code >> e.sign_bit & 1u) << 31;
    uint32_t magnitude = code & ((1u << e.sign_bit) - 1);
    // Read as FP32's the bits have too small a bias (and may be a subnormal); one exact
    // multiplication puts that right.
    float value = mx_bits_float(magnitude << (23 - e.mantissa_bits)) * mx_bits_float((127 + 127 - e.bias) << 23);
    uint32_t bits = mx_float_bits(value);
    if (format == FORMAT_E4M3) bits = magnitude == 0x7F ? 0x7FC00000u : bits;
    if (format == FORMAT_E5M2) bits = magnitude > 0x7C ? 0x7FC00000u : magnitude == 0x7C ? 0x7F800000u : bits;
    return mx_bits_float(bits | sign);
}

// A number on its way to an element: adding the addend, a power of two whose last mantissa bit is
// worth the element's, rounds it once, to nearest, ties to even.
typedef struct {
    float clamped, addend;
    uint32_t exponent; // of the element's binade, in its place; a subnormal has the smallest normal's
    uint32_t sign;     // in its place
} MxRounding;

// Returns how x is rounded to an element. A NaN is clamped as an infinity is.
MX_FUNCTION MxRounding mx_rounding(Format format, float x) {
    MxElement e = mx_element(format);
    uint32_t magnitude = mx_magnitude_bits(x), least_normal = (127 + 1 - e.bias) << 23;
    uint32_t largest = mx_float_bits(mx_decode(format, (uint8_t)e.max_code));
    uint32_t clamped = magnitude < largest ? magnitude : largest;
    uint32_t exponent = clamped & 0x7F800000u;
    exponent = exponent > least_normal ? exponent : least_normal;
    MxRounding rounding = {mx_bits_float(clamped), mx_bits_float(exponent + ((23 - e.mantissa_bits) << 23)), exponent,
                           mx_float_bits(x) & 0x80000000u};
    return rounding;
}

// Returns the code of an FP32 value (in the low bits of a byte): rounded once, to nearest, ties to
// even, saturating; +-Inf to +-max, NaN to nan_code, zero keeps its sign.
MX_FUNCTION uint8_t mx_encode(Format format, float x) {
    MxElement e = mx_element(format);
    MxRounding r = mx_rounding(format, x);
    // The codes of subnormals and of the first normal binade count steps of one size. Those of a
    // binade above count its own steps, to which each binade below adds as many again.
    uint32_t least_normal = (127 + 1 - e.bias) << 23;
    uint32_t binades_above = (r.exponent - least_normal) >> (23 - e.mantissa_bits);
    uint32_t steps = mx_float_bits(r.clamped + r.addend) - mx_float_bits(r.addend);
    uint32_t code = (binades_above + steps) | r.sign >> (31 - e.sign_bit);
    return (uint8_t)(mx_magnitude_bits(x) > 0x7F800000u ? e.nan_code : code);
}

// Returns the value of the element that a number becomes, mx_decode(mx_encode(x)), in fewer
// operations. A NaN becomes the largest element, with its sign.
MX_FUNCTION float mx_round_number(Format format, float x) {
    MxRounding r = mx_rounding(format, x);
    return mx_bits_float(mx_float_bits(r.clamped + r.addend - r.addend) | r.sign);
}

// Returns the value of the element that an FP32 value becomes, mx_decode(mx_encode(x)).
MX_FUNCTION float mx_round(Format format, float x) {
    uint32_t rounded = mx_float_bits(mx_round_number(format, x));
    uint32_t nan = mx_float_bits(mx_decode(format, (uint8_t)mx_element(format).nan_code));
    return mx_bits_float(mx_magnitude_bits(x) > 0x7F800000u ? nan : rounded);
}

// Returns the bits of the one amax whose code under `rceil` is NVIDIA's, 0, and not that of the
// exact quotient, 1: amax / max is just over 2^-127, and as an FP32 number, fl(amax * fl(1 / max)),
// it is 2^-127.
MX_FUNCTION uint32_t mx_rceil_exception(MxElement e) {
    return (e.emax << 23 | ((e.max_code << (23 - e.mantissa_bits)) & 0x7FFFFFu)) + 1;
}

// Returns the E8M0 code of a block's scale, from the bits of its amax (mx_magnitude_bits). A
// non-finite amax gives MX_SCALE_NAN. A subnormal amax needs no normalising: every format's and
// mode's code for it is clamped to 0.
MX_FUNCTION uint8_t mx_scale_code(Format format, ScaleRounding rounding, uint32_t amax_bits) {
    MxElement e = mx_element(format);
    uint32_t max_mantissa = (e.max_code << (23 - e.mantissa_bits)) & 0x7FFFFFu;
    uint32_t bits = amax_bits;
    if (rounding == SCALE_EVEN) bits += 1u << (22 - e.mantissa_bits);
    uint32_t threshold = rounding == SCALE_RCEIL ? max_mantissa : rounding == SCALE_CEIL ? 0 : 0x7FFFFFu;
    uint32_t round_up = (bits & 0x7FFFFFu) > threshold;
    round_up &= rounding != SCALE_RCEIL || bits != mx_rceil_exception(e);
    int32_t code = (int32_t)((bits >> 23) + round_up) - (int32_t)e.emax;
    code = code < 0 ? 0 : code;
    return (uint8_t)(amax_bits >= 0x7F800000u ? MX_SCALE_NAN : code);
}

// Returns what a scale code decodes with: 2^(code - 127); MX_SCALE_NAN is NaN.
MX_FUNCTION float mx_scale_value(uint8_t code) {
    uint32_t bits = code == 0 ? 0x00400000u : (uint32_t)code << 23;
    return mx_bits_float(code == MX_SCALE_NAN ? 0x7FC00000u : bits);
}

// Returns what elements are multiplied by before they are encoded: 2^(127 - code), also for
// MX_SCALE_NAN, whose block decodes to NaN whatever its elements are.
MX_FUNCTION float mx_scale_reciprocal(uint8_t code) {
    uint32_t bits = code >= 254 ? 0x00400000u >> (code - 254) : (254u - code) << 23;
    return mx_bits_float(bits);
}

// Returns the number of blocks along an axis of `n` elements; the last may be shorter and is
// quantized from the elements it has.
MX_FUNCTION int64_t mx_num_blocks(int64_t n) { return (n + MX_BLOCK - 1) / MX_BLOCK; }

// Returns the number of scales in the plain layout: rowwise [rows, ceil(cols/32)], columnwise
// [ceil(rows/32), cols], square [ceil(rows/32), ceil(cols/32)], row-major bytes.
MX_FUNCTION int64_t mx_num_scales(Axis axis, int64_t rows, int64_t cols) {
    int64_t across = axis == AXIS_COLUMNWISE ? cols : mx_num_blocks(cols);
    return (axis == AXIS_ROWWISE ? rows : mx_num_blocks(rows)) * across;
}

// Returns where the scale of an element lies in the plain layout.
MX_FUNCTION int64_t mx_scale_offset(Axis axis, int64_t row, int64_t col, int64_t cols) {
    int64_t across = axis == AXIS_COLUMNWISE ? cols : mx_num_blocks(cols);
    return (axis == AXIS_ROWWISE ? row : row / MX_BLOCK) * across + (axis == AXIS_COLUMNWISE ? col : col / MX_BLOCK);
}

// Returns where a scale lies in the layout that block-scaled GEMMs want (cuBLASLt's VEC32_UE8M0):
// tiles of 128 outer indices x 4 blocks. `outer` is the operand's M or N index, `block` its K index
// / 32, `k` the length of the dot product. The buffer holds mx_swizzled_scale_bytes, 16-byte
// aligned; its padding is 0x00.
MX_FUNCTION int64_t mx_swizzled_scale_offset(int64_t outer, int64_t block, int64_t k) {
    int64_t tiles = (k + 4 * MX_BLOCK - 1) / (4 * MX_BLOCK);
    return (outer / 128 * tiles + block / 4) * 512 + outer % 32 * 16 + outer % 128 / 32 * 4 + block % 4;
}

MX_FUNCTION int64_t mx_swizzled_scale_bytes(int64_t outer_count, int64_t k) {
    return (outer_count + 127) / 128 * 128 * ((mx_num_blocks(k) + 3) / 4 * 4);
}
