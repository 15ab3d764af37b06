/*
Statistics of quantizing, counted a block at a time. Usable from C and from CUDA C++, on the host
and on the device: every backend finds a block's amax and loops over its elements in its own way,
and counts them with these.
*/
#pragma once

#include "encoding.h"
#include "scaling.h"

// Scales are counted by their exponents, SCALE_BIN_OCTAVES to a bin, from SCALE_BINS_FROM on; the
// first and the last bin have what lies beyond, too.
enum { SCALE_BINS = 32, SCALE_BIN_OCTAVES = 2, SCALE_BINS_FROM = -56 };

// What quantizing a tensor did to it. A tensor with one scale counts as blocks of 128.
typedef struct {
    double amax;
    double signal, noise;                       // sums of x^2 and (decoded - x)^2
    int64_t elements, clamped, at_max, flushed; // clamped: |x| > max * scale; flushed: x != 0, decoded 0
    int64_t blocks, blocks_unlike_rceil;        // whose scale differs from the one of rceil, in MX
    int64_t scales[SCALE_BINS];                 // blocks by exponent, but for scales that aren't finite
} QuantStats;

// How a tensor is quantized.
typedef struct {
    Scaling scaling;
    Format format;
    Axis axis;
    ScaleRounding rounding; // MX
    Encoding encoding;
    uint32_t amax; // mx_magnitude_bits, where the scaling has a factor
    float scale;   // which is 1 over this
} Counted;

// What a block's elements have in common.
typedef struct {
    Format format;
    float scale, reciprocal, max;
    uint32_t max_code, magnitude_mask;
} BlockScale;

// Returns the bin of a scale, by its exponent as FP32 or E8M0 codes have it.
MX_FUNCTION int32_t stats_scale_bin(uint8_t code) {
    int32_t above = (int32_t)code - 127 - SCALE_BINS_FROM, bin = above < 0 ? 0 : above / SCALE_BIN_OCTAVES;
    return bin < SCALE_BINS ? bin : SCALE_BINS - 1;
}

// Counts a block's elements, amax and scale, and returns what its elements have in common.
MX_FUNCTION BlockScale stats_begin_block(QuantStats *stats, uint32_t amax, int64_t elements, uint8_t exponent,
                                         Format format) {
    uint32_t max_code = mx_element(format).max_code;
    stats->elements += elements;
    stats->blocks++;
    stats->scales[stats_scale_bin(exponent)] += exponent != MX_SCALE_NAN;
    if (amax > mx_magnitude_bits((float)stats->amax)) stats->amax = mx_bits_float(amax);
    BlockScale block = {
        format, 1, 1, mx_decode(format, (uint8_t)max_code), max_code, (1u << mx_element(format).sign_bit) - 1};
    return block;
}

// Counts an MX block whose largest magnitude has the bits `amax`, and returns what counting its
// elements takes.
MX_FUNCTION BlockScale stats_add_mx_block(QuantStats *stats, uint32_t amax, int64_t elements, const Counted *how) {
    uint8_t code = mx_scale_code(how->format, how->rounding, amax);
    float prescale = encoding_prescale(&how->encoding);
    BlockScale block = stats_begin_block(stats, amax, elements, code, how->format);
    stats->blocks_unlike_rceil += code != mx_scale_code(how->format, SCALE_RCEIL, amax);
    block.scale = mx_scale_value(code) / prescale;
    block.reciprocal = mx_scale_reciprocal(code) * prescale;
    return block;
}

// The same of a block of another scaling. An element that exceeds the largest by what rounding a
// scale may add isn't clamped, and none is where the scale is 0, which flushes them.
MX_FUNCTION BlockScale stats_add_scaled_block(QuantStats *stats, uint32_t amax, int64_t elements,
                                              const ScaledBlock *scaled, const Counted *how) {
    float scale = scaled->value * (1.0f / how->scale), prescale = encoding_prescale(&how->encoding);
    if (!scaling_has_factor(how->scaling)) scale = scaled->value;
    uint8_t exponent = (uint8_t)(mx_magnitude_bits(scale) >> 23);
    BlockScale block = stats_begin_block(stats, amax, elements, exponent, how->format);
    block.scale = scale / prescale;
    block.reciprocal = scaled->multiplier * prescale;
    block.max = scale == 0 ? mx_bits_float(0x7F800000u) : block.max * (1 + 0x1p-21f);
    return block;
}

// Returns the code of an element, scaled, that is at this place.
MX_FUNCTION uint8_t stats_code(const Encoding *encoding, Format format, float scaled, int64_t row, int64_t col) {
    uint16_t random[DRAWN_TOGETHER];
    if (encoding->rounding == ROUND_NEAREST) return mx_encode(format, scaled);
    encoding_draw(random, encoding, row, col / DRAWN_TOGETHER);
    return mx_encode_stochastic(format, scaled, random[col % DRAWN_TOGETHER]);
}

// Counts an element of a block, at this place in the tensor.
MX_FUNCTION void stats_add_element(QuantStats *stats, const BlockScale *block, const Encoding *encoding, float value,
                                   int64_t row, int64_t col) {
    float scaled = value * block->reciprocal;
    uint8_t element = stats_code(encoding, block->format, scaled, row, col);
    float decoded = mx_decode(block->format, element) * block->scale;
    double error = (double)decoded - value;
    stats->signal += (double)value * value;
    stats->noise += error * error;
    stats->clamped += mx_bits_float(mx_magnitude_bits(scaled)) > block->max;
    stats->at_max += (element & block->magnitude_mask) == block->max_code && decoded != 0;
    stats->flushed += decoded == 0 && value != 0;
}

// Adds what was counted of another part of a tensor. An amax of Inf or NaN stays.
MX_FUNCTION void stats_add(QuantStats *sum, const QuantStats *part) {
    if (mx_magnitude_bits((float)part->amax) > mx_magnitude_bits((float)sum->amax)) sum->amax = part->amax;
    sum->signal += part->signal;
    sum->noise += part->noise;
    sum->elements += part->elements;
    sum->clamped += part->clamped;
    sum->at_max += part->at_max;
    sum->flushed += part->flushed;
    sum->blocks += part->blocks;
    sum->blocks_unlike_rceil += part->blocks_unlike_rceil;
    for (int bin = 0; bin < SCALE_BINS; bin++) {
        sum->scales[bin] += part->scales[bin];
    }
}
