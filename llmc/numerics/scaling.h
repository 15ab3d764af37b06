/*
Scalings beside MX: what a block's scale is, for tensors that don't have a power of two for every 32
elements. As mx.h: the one place that says it, usable from C and from CUDA C++, with the same bits.

    scaling        a block                        its scale               the tensor's factor
    mx             32                             E8M0: mx.h              -
    tensor         the whole tensor               -                       1 / s, of its own amax or of earlier ones
    block128       128                            FP32, a power of two    -
    block128-fp32  128                            FP32                    -
    nvfp4          16                             E4M3                    1 / s
    nvfp4-46       16                             E4M3                    1 / s

Blocks run along the dot product, or are squares of that many rows and columns (DeepSeek's 128x128,
NVFP4's 16x16 for weights). At the edges of a matrix they have the elements that there are. A value
is decode(element) * block scale * factor. All of it is FP32 arithmetic, each operation rounded to
nearest even, and elements are encoded by mx_encode: to nearest even, saturating.

A NaN or an infinity never hides: its block, and where there is a factor its tensor, decodes to NaN.

Sources: Transformer Engine's kernels and references, which these follow bit for bit but for values
that aren't finite; DeepSeek-V3 (arXiv 2412.19437) for blocks of 128; arXiv 2509.25149 for NVFP4;
arXiv 2512.02010 for four over six.
*/
#pragma once

#include "mx.h"

#include <math.h> // fma, fmaf

typedef enum {
    SCALING_MX,
    SCALING_TENSOR,
    SCALING_BLOCK128,
    SCALING_BLOCK128_FP32,
    SCALING_NVFP4,
    SCALING_NVFP4_46,
    NUM_SCALINGS
} Scaling;

enum { NVFP4_SIDE = 16 }; // of NVFP4's blocks

// Of `s`, with which NVFP4 stretches a tensor, so that its largest block scale is this; four over
// six leaves room for the scale that is half as large again.
#define NVFP4_LARGEST_SCALE 448.0f
#define NVFP4_46_LARGEST_SCALE 256.0f
#define E2M1_LARGEST 6.0f

MX_FUNCTION bool scaling_is_nvfp4(Scaling scaling) { return scaling == SCALING_NVFP4 || scaling == SCALING_NVFP4_46; }

// Returns whether the tensor has a factor, which its own amax decides.
MX_FUNCTION bool scaling_has_factor(Scaling scaling) { return scaling == SCALING_TENSOR || scaling_is_nvfp4(scaling); }

// Returns the length of a block's side. A tensor that has one scale can be cut anywhere.
MX_FUNCTION int64_t scaling_block(Scaling scaling) {
    return scaling == SCALING_MX ? MX_BLOCK : scaling_is_nvfp4(scaling) ? NVFP4_SIDE : 128;
}

// Returns the rows and the columns of a block along an axis.
MX_FUNCTION int64_t scaling_block_rows(Scaling scaling, Axis axis) {
    return axis == AXIS_ROWWISE ? 1 : scaling_block(scaling);
}
MX_FUNCTION int64_t scaling_block_cols(Scaling scaling, Axis axis) {
    return axis == AXIS_COLUMNWISE ? 1 : scaling_block(scaling);
}

// Returns x, the largest FP32 number where it is infinite.
MX_FUNCTION float scaling_finite(float x) { return mx_float_bits(x) == 0x7F800000u ? mx_bits_float(0x7F7FFFFFu) : x; }

// Returns s, which the elements or the block scales of a tensor of this amax (mx_magnitude_bits)
// are multiplied by: 1 where there is no factor, NaN where the amax isn't finite.
MX_FUNCTION float scaling_tensor_scale(Scaling scaling, Format format, uint32_t amax_bits) {
    float amax = mx_bits_float(amax_bits);
    float max = mx_decode(format, (uint8_t)mx_element(format).max_code);
    float largest = scaling == SCALING_NVFP4      ? E2M1_LARGEST * NVFP4_LARGEST_SCALE
                    : scaling == SCALING_NVFP4_46 ? E2M1_LARGEST * NVFP4_46_LARGEST_SCALE
                                                  : max;
    if (!scaling_has_factor(scaling)) return 1;
    if (amax_bits >= 0x7F800000u) return mx_bits_float(0x7FC00000u);
    if (scaling == SCALING_TENSOR && amax_bits == 0) return 1;
    return scaling_finite(largest / amax);
}

// Returns s of a tensor whose predecessors had this amax (0: there was none): what takes it to the
// largest value, less 2^margin.
MX_FUNCTION float scaling_delayed_scale(Format format, int margin, float amax) {
    float max = mx_decode(format, (uint8_t)mx_element(format).max_code);
    return amax > 0 ? scaling_finite(max * mx_bits_float((uint32_t)(127 - margin) << 23) / amax) : 1;
}

// What a block's elements have in common.
typedef struct {
    float multiplier; // of elements before they are encoded
    float value;      // of elements after they are decoded, but for the tensor's factor
    uint8_t code;     // E4M3's of that value, in NVFP4
} ScaledBlock;

// Returns an NVFP4 block whose scale is `scale`, rounded to E4M3, of a tensor with scale s.
MX_FUNCTION ScaledBlock scaling_nvfp4_block(float scale, float s) {
    ScaledBlock block;
    block.code = mx_encode(FORMAT_E4M3, scale);
    // Not mx_decode(block.code), so that where nobody takes the code none is made.
    block.value = mx_round(FORMAT_E4M3, scale);
    block.multiplier = scaling_finite(1.0f / (block.value * (1.0f / s)));
    return block;
}

// Returns the block whose amax (mx_magnitude_bits) is this, in a tensor with scale s. `second`:
// four over six's second candidate, whose scale takes amax to 4 instead of 6.
MX_FUNCTION ScaledBlock scaling_block_of_amax(Scaling scaling, Format format, uint32_t amax_bits, float s,
                                              bool second) {
    float amax = mx_bits_float(amax_bits);
    if (scaling == SCALING_NVFP4) return scaling_nvfp4_block(amax * (s * (1.0f / E2M1_LARGEST)), s);
    if (scaling == SCALING_NVFP4_46) {
        float scale = amax / E2M1_LARGEST * s;
        return scaling_nvfp4_block(second ? scale * 1.5f : scale, s);
    }
    ScaledBlock block = {s, 1, 0};
    if (scaling == SCALING_TENSOR) return block;
    float max = mx_decode(format, (uint8_t)mx_element(format).max_code);
    float scale = amax_bits == 0 ? 1 : scaling_finite(max / amax);
    if (scaling == SCALING_BLOCK128) scale = mx_bits_float(mx_float_bits(scale) & 0x7F800000u);
    if (amax_bits >= 0x7F800000u) scale = mx_bits_float(0x7FC00000u);
    block.multiplier = scale;
    block.value = 1.0f / scale;
    return block;
}

// Returns whether scaling_46_quotient is exact for all that scaling_46_error divides in a tensor of
// this amax (mx_magnitude_bits): values times amax, which are 0 or have 2^-10 to 2^12 times its
// magnitude.
MX_FUNCTION bool scaling_46_is_moderate(uint32_t amax_bits) {
    return amax_bits >= (127u - 80) << 23 && amax_bits < (127u + 100) << 23;
}

// Returns x / (6 * 256), rounded to nearest, of an x that is 0, whose sign may be lost, or has a
// magnitude from 2^-99 to 2^112: a quotient by the reciprocal, and its remainder's (Markstein
// 1990), the same of every mantissa (test_mx).
MX_FUNCTION float scaling_46_quotient(float x) {
    const float divisor = E2M1_LARGEST * NVFP4_46_LARGEST_SCALE;
    float quotient = x * (1.0f / divisor);
    return fmaf(fmaf(-divisor, quotient, x), 1.0f / divisor, quotient);
}

// Returns the same of any x: the steps in double, whose result rounds to what FP32's division
// makes.
MX_FUNCTION float scaling_46_quotient_of_any(float x) {
    const double divisor = E2M1_LARGEST * NVFP4_46_LARGEST_SCALE;
    double quotient = x * (1 / divisor);
    float rounded = (float)fma(fma(-divisor, quotient, (double)x), 1 / divisor, quotient);
    return mx_magnitude_bits(x) == 0x7F800000u ? x : rounded;
}

// Returns how far a value is from what four over six decodes it to, with the tensor's amax.
// `is_moderate`: what scaling_46_is_moderate says of that; false is always allowed, and has the
// same result by a division. Of a tensor that isn't finite every block's value is NaN, and so is
// this, whatever x is rounded to.
MX_FUNCTION float scaling_46_error(const ScaledBlock *block, float amax, float x, bool is_moderate) {
    float value = mx_round_number(FORMAT_E2M1, x * block->multiplier) * block->value;
    float divided =
        is_moderate ? scaling_46_quotient(value * amax) : value * amax / (E2M1_LARGEST * NVFP4_46_LARGEST_SCALE);
    return mx_bits_float(mx_magnitude_bits(divided - x));
}

// Adds up the sums of NVFP4_SIDE rows into the first: those that are half, a quarter, ... of the
// block apart.
MX_FUNCTION void scaling_46_sum_rows(float *sums) {
    for (int half = NVFP4_SIDE / 2; half > 0; half /= 2) {
        for (int r = 0; r < half; r++) {
            sums[r] += sums[r + half];
        }
    }
}

// Returns the sum of a block's errors: in order along the dot product; of a square, of each row in
// order, and then of the rows.
MX_FUNCTION float scaling_46_errors(const ScaledBlock *block, Axis axis, const float *x, int64_t rows, int64_t cols,
                                    int64_t stride, float amax) {
    float sums[NVFP4_SIDE] = {0};
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            sums[axis == AXIS_SQUARE ? r : 0] += scaling_46_error(block, amax, x[r * stride + c], false);
        }
    }
    scaling_46_sum_rows(sums);
    return sums[0];
}

// Returns the block of `rows` x `cols` values along `axis`, `stride` from row to row, of a tensor
// with this amax (mx_magnitude_bits) and scale. Four over six takes its second candidate where that
// errs less.
MX_FUNCTION ScaledBlock scaling_of_block(Scaling scaling, Axis axis, Format format, const float *x, int64_t rows,
                                         int64_t cols, int64_t stride, uint32_t tensor_amax, float s) {
    uint32_t amax = 0;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            uint32_t magnitude = mx_magnitude_bits(x[r * stride + c]);
            amax = magnitude > amax ? magnitude : amax;
        }
    }
    ScaledBlock first = scaling_block_of_amax(scaling, format, amax, s, false);
    if (scaling != SCALING_NVFP4_46) return first;
    ScaledBlock second = scaling_block_of_amax(scaling, format, amax, s, true);
    float whole = mx_bits_float(tensor_amax);
    float first_error = scaling_46_errors(&first, axis, x, rows, cols, stride, whole);
    float second_error = scaling_46_errors(&second, axis, x, rows, cols, stride, whole);
    return second_error < first_error ? second : first;
}

// Return the number of blocks of a matrix, row-major [ceil(rows / block's rows), ceil(cols /
// block's columns)], in a row of blocks and in all.
MX_FUNCTION int64_t scaling_blocks_across(Scaling scaling, Axis axis, int64_t cols) {
    int64_t width = scaling_block_cols(scaling, axis);
    return (cols + width - 1) / width;
}
MX_FUNCTION int64_t scaling_num_blocks(Scaling scaling, Axis axis, int64_t rows, int64_t cols) {
    int64_t height = scaling_block_rows(scaling, axis);
    return (rows + height - 1) / height * scaling_blocks_across(scaling, axis, cols);
}

// Returns the bytes of a block's scale as it is kept: FP32, or E4M3's or E8M0's byte. A tensor with
// one scale has that in its factor alone.
MX_FUNCTION size_t scaling_scale_bytes(Scaling scaling) {
    return scaling == SCALING_TENSOR ? 0 : scaling == SCALING_MX || scaling_is_nvfp4(scaling) ? 1 : sizeof(float);
}

// Returns in which of its blocks an element of a matrix of so many columns lies.
MX_FUNCTION int64_t scaling_block_at(Scaling scaling, Axis axis, int64_t row, int64_t col, int64_t cols) {
    return row / scaling_block_rows(scaling, axis) * scaling_blocks_across(scaling, axis, cols) +
           col / scaling_block_cols(scaling, axis);
}

// Returns the bytes of an operand's block scales, a byte each, in the layout of block-scaled GEMMs.
// It is mx_swizzled_scale_offset's whatever the length of blocks, here that of MX's of as many
// blocks.
MX_FUNCTION int64_t scaling_swizzled_bytes(Scaling scaling, int64_t outer_count, int64_t k) {
    return mx_swizzled_scale_bytes(outer_count, k * MX_BLOCK / scaling_block(scaling));
}

// Returns whether blocks are of 128 elements, with FP32 scales.
MX_FUNCTION bool scaling_is_block128(Scaling scaling) {
    return scaling == SCALING_BLOCK128 || scaling == SCALING_BLOCK128_FP32;
}

// Where cuBLASLt wants an operand's scales for blocks of 128, all FP32 (its manual, "128-element 1D
// and 128x128 2D Block Scaling For FP8 Data Types"). A GEMM's sum runs over K, the operand's other
// dimension is `outer`. Blocks along K: those of all rows or columns for the first 128 of K, then
// for the next. Square ones: those along K of the first 128 rows or columns, padded to a multiple
// of 4, then of the next.
MX_FUNCTION int64_t scaling_gemm_blocks(int64_t K, bool is_square) {
    int64_t blocks = (K + 127) / 128;
    return is_square ? (blocks + 3) / 4 * 4 : blocks;
}

// Returns the number of these scales.
MX_FUNCTION int64_t scaling_num_gemm_scales(int64_t outer, int64_t K, bool is_square) {
    return (is_square ? (outer + 127) / 128 : outer) * scaling_gemm_blocks(K, is_square);
}

// Returns what a block's elements, of a scaling that isn't MX, are multiplied by after they are
// decoded.
MX_FUNCTION float scaling_kept_value(Scaling scaling, const uint8_t *scales, int64_t block) {
    if (scaling == SCALING_TENSOR) return 1;
    return scaling_is_nvfp4(scaling) ? mx_decode(FORMAT_E4M3, scales[block]) : ((const float *)scales)[block];
}

// Keeps it.
MX_FUNCTION void scaling_keep_value(Scaling scaling, uint8_t *scales, int64_t block, float value) {
    if (scaling == SCALING_TENSOR) return;
    if (scaling_is_nvfp4(scaling)) {
        scales[block] = mx_encode(FORMAT_E4M3, value); // which is one of its values
    } else {
        ((float *)scales)[block] = value;
    }
}
