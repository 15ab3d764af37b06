/*
Statistics of quantizing, counted a block at a time. Usable from C and from CUDA C++, on the host
and on the device: every backend finds a block's amax and loops over its elements in its own way,
and counts them with these.
*/
#pragma once

#include "mx.h"

// Scales are counted by their exponents, SCALE_BIN_OCTAVES to a bin, from SCALE_BINS_FROM on; the
// first and the last bin have what lies beyond, too.
enum { SCALE_BINS = 32, SCALE_BIN_OCTAVES = 2, SCALE_BINS_FROM = -56 };

// What quantizing a tensor did to it.
typedef struct {
    double amax;
    double signal, noise;                       // sums of x^2 and (decoded - x)^2
    int64_t elements, clamped, at_max, flushed; // clamped: |x| > max * scale; flushed: x != 0 and code 0
    int64_t blocks, blocks_unlike_rceil;        // whose scale differs from the one of rceil
    uint32_t scales[SCALE_BINS];                // blocks by exponent, but for scales that are NaN
} QuantStats;

// What a block's elements have in common.
typedef struct {
    Format format;
    float scale, reciprocal, max;
    uint32_t max_code, magnitude_mask;
} BlockScale;

// Returns the bin of a scale's code.
MX_FUNCTION int32_t stats_scale_bin(uint8_t code) {
    int32_t above = (int32_t)code - 127 - SCALE_BINS_FROM, bin = above < 0 ? 0 : above / SCALE_BIN_OCTAVES;
    return bin < SCALE_BINS ? bin : SCALE_BINS - 1;
}

// Counts a block whose largest magnitude has the bits `amax`, and returns what counting its
// elements takes.
MX_FUNCTION BlockScale stats_add_block(QuantStats *stats, uint32_t amax, int64_t elements, Format format,
                                       ScaleRounding rounding) {
    uint8_t code = mx_scale_code(format, rounding, amax);
    uint32_t max_code = mx_element(format).max_code;
    stats->elements += elements;
    stats->blocks++;
    stats->blocks_unlike_rceil += code != mx_scale_code(format, SCALE_RCEIL, amax);
    stats->scales[stats_scale_bin(code)] += code != MX_SCALE_NAN;
    if (amax > mx_magnitude_bits((float)stats->amax)) stats->amax = mx_bits_float(amax);
    BlockScale block = {format,
                        mx_scale_value(code),
                        mx_scale_reciprocal(code),
                        mx_decode(format, (uint8_t)max_code),
                        max_code,
                        (1u << mx_element(format).sign_bit) - 1};
    return block;
}

// Counts an element of the block that stats_add_block returned.
MX_FUNCTION void stats_add_element(QuantStats *stats, const BlockScale *block, float value) {
    uint8_t element = mx_encode(block->format, value * block->reciprocal);
    double error = (double)(mx_decode(block->format, element) * block->scale) - value;
    uint32_t magnitude = element & block->magnitude_mask;
    stats->signal += (double)value * value;
    stats->noise += error * error;
    stats->clamped += mx_bits_float(mx_magnitude_bits(value * block->reciprocal)) > block->max;
    stats->at_max += magnitude == block->max_code;
    stats->flushed += magnitude == 0 && value != 0;
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
