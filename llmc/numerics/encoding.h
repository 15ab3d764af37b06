/*
How the scaled values of a tensor become elements: rounded to nearest, which is mx_encode, or
stochastically. As mx.h: the one place that says it, usable from C and from CUDA C++, with the same
bits.

Rounded stochastically, a scaled value x between neighbours lo < x < hi becomes hi with probability
(x - lo) / (hi - lo): its mean is x. What is an element's value stays; beyond +-max it becomes
+-max, as to nearest, and so do zeros, infinities and NaN. The probability is a multiple of 2^-16,
the one nearest to the true one, so that a mean errs by at most 2^-17 of the distance between
neighbours. Of BF16 values that are scaled by a power of two it is the true one, but for those that
are less than 2^-9 of the smallest element.

An element's random number is Philox's of the run's seed, the step, the tensor, and the element's
row and column in the tensor of the whole step: the same however tensors are cut among threads,
ranks and micro-batches, and after a resume.
*/
#pragma once

#include "llmc/base/random.h" // Philox
#include "mx.h"

typedef enum { ROUND_NEAREST, ROUND_STOCHASTIC } ElementRounding;

// Which random numbers a tensor is rounded with.
typedef struct {
    uint64_t seed;
    int64_t step;
    int64_t first_row; // where the tensor begins in that of the whole step
} DrawPlace;

typedef struct {
    ElementRounding rounding;
    float prescale; // what elements are multiplied by beside their scale, and products with them divided by; 0: nothing
    int64_t tensor; // its number in a step, below 2^22
    DrawPlace at;
} Encoding;

MX_FUNCTION float encoding_prescale(const Encoding *e) { return e->prescale != 0 ? e->prescale : 1.0f; }

// Returns whether elements are mx_encode's of scaled values.
MX_FUNCTION bool encoding_is_plain(const Encoding *e) {
    return e->rounding == ROUND_NEAREST && encoding_prescale(e) == 1.0f;
}

// Elements of a row whose random numbers are drawn together.
#define DRAWN_TOGETHER 8

// Return the upper and the lower 64 bits of the counter from which Philox draws the random numbers
// of eight elements of a row, with `eight` times eight of the row's before them.
MX_FUNCTION uint64_t encoding_stream(const Encoding *e) {
    return ROUNDING_STREAMS + ((uint64_t)e->at.step << 22) + (uint64_t)e->tensor;
}
MX_FUNCTION uint64_t encoding_counter(const Encoding *e, int64_t row, int64_t eight) {
    return (uint64_t)(e->at.first_row + row) << 32 | (uint64_t)eight;
}

// Draws 16 random bits for each of eight elements, which are given as above.
MX_FUNCTION void encoding_draw(uint16_t random[DRAWN_TOGETHER], const Encoding *e, int64_t row, int64_t eight) {
    uint32_t words[4];
    philox(words, e->at.seed, encoding_stream(e), encoding_counter(e, row, eight));
    for (int i = 0; i < DRAWN_TOGETHER; i++) {
        random[i] = (uint16_t)(words[i / 2] >> (i % 2 * 16));
    }
}

// A magnitude that was rounded stochastically.
typedef struct {
    bool is_subnormal;  // as an element
    uint32_t subnormal; // then: in smallest elements
    uint32_t normal;    // else: FP32's bits, but for those that are cut off
} MxStochastic;

// Rounds the magnitude of x up where its fraction of the way to the next element, in 2^-16 and
// rounded to nearest, and `random`, below 2^16, make 2^16 or more. It may be beyond the largest.
MX_FUNCTION MxStochastic mx_stochastic(Format format, float x, uint32_t random) {
    MxElement e = mx_element(format);
    MxStochastic rounded;
    uint32_t magnitude = mx_magnitude_bits(x);

    uint32_t shift = 23 - e.mantissa_bits; // 2^-16 of an element's last bit is shift - 16 bits up
    rounded.normal = (magnitude + (random << (shift - 16)) + (1u << (shift - 17))) >> shift;

    // Below the smallest normal: in 2^-17 of the smallest subnormal, a whole number.
    rounded.is_subnormal = magnitude < ((127 + 1 - e.bias) << 23);
    float small = mx_bits_float(rounded.is_subnormal ? magnitude : 0);
    uint32_t parts = (uint32_t)(int32_t)(small * mx_bits_float((127 + e.bias - 1 + e.mantissa_bits + 17) << 23));
    rounded.subnormal = (((parts + 1) >> 1) + random) >> 16;
    return rounded;
}

// Returns the code of an FP32 value that is rounded so.
MX_FUNCTION uint8_t mx_encode_stochastic(Format format, float x, uint32_t random) {
    MxElement e = mx_element(format);
    MxStochastic rounded = mx_stochastic(format, x, random);
    uint32_t normal = rounded.normal - ((127 - e.bias) << e.mantissa_bits);
    uint32_t code = rounded.is_subnormal ? rounded.subnormal : normal;
    code = code > e.max_code ? e.max_code : code;
    code |= (mx_float_bits(x) >> 31) << e.sign_bit;
    return (uint8_t)(mx_magnitude_bits(x) > 0x7F800000u ? e.nan_code : code);
}

// Returns the value of that code, mx_decode(mx_encode_stochastic(x)), in fewer operations.
MX_FUNCTION float mx_round_stochastic(Format format, float x, uint32_t random) {
    MxElement e = mx_element(format);
    MxStochastic rounded = mx_stochastic(format, x, random);
    uint32_t largest = mx_float_bits(mx_decode(format, (uint8_t)e.max_code));
    uint32_t nan = mx_float_bits(mx_decode(format, (uint8_t)e.nan_code));
    float subnormal = (float)(int32_t)rounded.subnormal * mx_bits_float((127 + 1 - e.bias - e.mantissa_bits) << 23);
    uint32_t value = rounded.is_subnormal ? mx_float_bits(subnormal) : rounded.normal << (23 - e.mantissa_bits);
    value = (value < largest ? value : largest) | (mx_float_bits(x) & 0x80000000u);
    return mx_bits_float(mx_magnitude_bits(x) > 0x7F800000u ? nan : value);
}
