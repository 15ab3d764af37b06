/*
The quantizer for scalings that aren't MX: into codes and scales, or into the BF16 values that a
tensor decodes to, but for its own factor. E4M3 and E2M1 elements times a power of two or an E4M3
scale are exact in BF16 (but at the ends of its range), so that the product's addends are the
hardware's. Times an FP32 scale they aren't: such blocks are codes.
*/
#include "quantize.h"
#include "llmc/base/util.h" // die

enum { SIDE = TILE_COLS }; // of the squares that a tensor is taken in: whole blocks of every scaling

typedef struct {
    TilePlace at;
    float x[SIDE][SIDE];
} Square;

// What a tensor's blocks have in common.
typedef struct {
    uint32_t amax;
    float scale;
} TensorScale;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static uint32_t source_amax(const Source *in) {
    uint32_t amax = 0;
    int64_t cols = source_cols(in);
#pragma omp parallel for collapse(2) schedule(static) reduction(max : amax)
    for (int64_t row = 0; row < in->x.rows; row++) {
        for (int64_t col = 0; col < cols; col += SIDE) {
            float x[SIDE];
            int64_t count = least(SIDE, cols - col);
            source_row(x, in, row, col, count);
            for (int64_t i = 0; i < count; i++) {
                uint32_t magnitude = mx_magnitude_bits(x[i]);
                amax = magnitude > amax ? magnitude : amax;
            }
        }
    }
    return amax;
}

void cpu_amax(uint32_t *amax, Tensor in) {
    Source source = source_tensor(in);
    *amax = source_amax(&source);
}

// What elements of a band of rows, as high as a block, are multiplied by before they are encoded
// and after they are decoded, for each of its columns.
typedef struct {
    float multiplier[SIDE], value[SIDE];
} Band;

// Finds the largest magnitudes of a band's blocks, which are `width` columns wide.
MX_FUNCTION void find_amaxes(uint32_t amax[SIDE], const Square *square, int64_t row, int64_t rows, int64_t width) {
    uint32_t columns[SIDE] = {0};
    for (int64_t r = row; r < row + rows; r++) {
        for (int64_t c = 0; c < SIDE; c++) {
            uint32_t magnitude = mx_magnitude_bits(square->x[r][c]);
            columns[c] = magnitude > columns[c] ? magnitude : columns[c];
        }
    }
    for (int64_t block = 0; block < SIDE / width; block++) {
        amax[block] = 0;
        for (int64_t c = block * width; c < (block + 1) * width; c++) {
            amax[block] = columns[c] > amax[block] ? columns[c] : amax[block];
        }
    }
}

// Finds the blocks of a band, `width` columns wide.
MX_FUNCTION void blocks_of_band(Band *band, const Square *square, int64_t row, int64_t rows, int64_t width, float s,
                                Scaling scaling, Format format) {
    uint32_t amax[SIDE];
    float multiplier[SIDE], value[SIDE];
    find_amaxes(amax, square, row, rows, width);
    for (int64_t i = 0; i < SIDE / width; i++) {
        ScaledBlock block = scaling_block_of_amax(scaling, format, amax[i], s, false);
        multiplier[i] = block.multiplier;
        value[i] = block.value;
    }
    for (int64_t c = 0; c < SIDE; c++) {
        band->multiplier[c] = multiplier[c / width];
        band->value[c] = value[c / width];
    }
}

// Finds the blocks of four over six, which depend on more than the amax.
static void find_best_blocks(Band *band, const QuantizedTensor *out, const Square *square, int64_t row, int64_t rows,
                             TensorScale s) {
    int64_t width = scaling_block_cols(out->scaling, out->axis);
    for (int64_t col = 0; col < square->at.cols; col += width) {
        int64_t cols = least(width, square->at.cols - col);
        ScaledBlock block = scaling_of_block(SCALING_NVFP4_46, out->axis, FORMAT_E2M1, &square->x[row][col], rows, cols,
                                             SIDE, s.amax, s.scale);
        for (int64_t c = col; c < col + cols; c++) {
            band->multiplier[c] = block.multiplier;
            band->value[c] = block.value;
        }
    }
}

static void find_blocks(Band *band, const QuantizedTensor *out, const Square *square, int64_t row, int64_t rows,
                        TensorScale s) {
    bool by_column = out->axis == AXIS_COLUMNWISE; // a constant in each call, as all but rows: the loops are vectors
#define NVFP4(width) blocks_of_band(band, square, row, rows, width, s.scale, SCALING_NVFP4, FORMAT_E2M1)
#define BLOCK128(width, scaling, format) blocks_of_band(band, square, row, rows, width, s.scale, scaling, format)
#define NARROW(format) BLOCK128(1, SCALING_BLOCK128, format)
#define WIDE(format) BLOCK128(SIDE, SCALING_BLOCK128, format)
#define NARROW_FP32(format) BLOCK128(1, SCALING_BLOCK128_FP32, format)
#define WIDE_FP32(format) BLOCK128(SIDE, SCALING_BLOCK128_FP32, format)
    bool is_fp32 = out->scaling == SCALING_BLOCK128_FP32;
    if (out->scaling == SCALING_NVFP4_46) {
        find_best_blocks(band, out, square, row, rows, s);
    } else if (out->scaling == SCALING_NVFP4 && by_column) {
        NVFP4(1);
    } else if (out->scaling == SCALING_NVFP4) {
        NVFP4(16);
    } else if (is_fp32 && by_column) {
        MX_WITH_CONSTANT_FORMAT(out->format, NARROW_FP32)
    } else if (is_fp32) {
        MX_WITH_CONSTANT_FORMAT(out->format, WIDE_FP32)
    } else if (by_column) {
        MX_WITH_CONSTANT_FORMAT(out->format, NARROW)
    } else {
        MX_WITH_CONSTANT_FORMAT(out->format, WIDE)
    }
#undef NVFP4
#undef BLOCK128
#undef NARROW
#undef WIDE
#undef NARROW_FP32
#undef WIDE_FP32
    for (int64_t c = 0; c < SIDE; c++) {
        band->multiplier[c] *= encoding_prescale(&out->encoding);
    }
}

// Keeps the scales of a band's blocks.
static void keep_scales(const QuantizedTensor *out, const Band *band, TilePlace at, int64_t row) {
    int64_t width = scaling_block_cols(out->scaling, out->axis);
    int64_t first = (at.row + row) / scaling_block_rows(out->scaling, out->axis) *
                        scaling_blocks_across(out->scaling, out->axis, out->cols) +
                    at.col / width;
    for (int64_t c = 0; c < at.cols; c += width) {
        scaling_keep_value(out->scaling, out->scales, first + c / width, band->value[c]);
    }
}

MX_FUNCTION void decode_row(uint16_t *out, const uint8_t *codes, const Band *band, int64_t count, Format format) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = mx_to_bf16(mx_decode(format, codes[i]) * band->value[i]);
    }
}

static void quantize_row(const QuantizedTensor *out, const Square *square, int64_t row, const Band *band) {
    TilePlace at = square->at;
    uint8_t codes[SIDE];
    int64_t first = (at.row + row) * out->cols + at.col;
    encode_row(codes, square->x[row], band->multiplier, &out->encoding, at.row + row, at.col, out->format);
    if (out->form == FORM_PLAIN) {
        memcpy(out->elements + first, codes, (size_t)at.cols);
        return;
    }
#define DECODE(constant) decode_row((uint16_t *)out->elements + first, codes, band, at.cols, constant)
    MX_WITH_CONSTANT_FORMAT(out->format, DECODE)
#undef DECODE
}

static void quantize_square(const QuantizedTensor *out, const Square *square, TensorScale s) {
    Band band;
    TilePlace at = square->at;
    int64_t height = scaling_block_rows(out->scaling, out->axis);
    for (int64_t c = 0; c < SIDE; c++) { // of a tensor with one scale
        band.multiplier[c] = s.scale * encoding_prescale(&out->encoding);
        band.value[c] = 1;
    }
    for (int64_t row = 0; row < at.rows; row++) {
        if (row % height == 0 && out->scaling != SCALING_TENSOR) {
            find_blocks(&band, out, square, row, least(height, at.rows - row), s);
            if (out->form == FORM_PLAIN) keep_scales(out, &band, at, row);
        }
        quantize_row(out, square, row, &band);
    }
}

// Returns what a tensor's blocks have in common, and sets its factor.
static TensorScale scale_tensor(const QuantizedTensor *out, const Source *in) {
    TensorScale s = {.scale = 1};
    if (out->delayed.scale) {
        s.scale = *out->delayed.scale;
    } else {
        s.amax = !scaling_has_factor(out->scaling) ? 0 : out->amax ? *out->amax : source_amax(in);
        s.scale = scaling_tensor_scale(out->scaling, out->format, s.amax);
    }
    if (out->factor) *out->factor = 1.0f / s.scale;
    return s;
}

// Keeps the amax of a tensor whose scale was known before. One that isn't finite must not be
// hidden.
static void keep_amax(const QuantizedTensor *out, uint32_t amax) {
    if (amax > *out->delayed.amax) *out->delayed.amax = amax;
    if (amax >= 0x7F800000u) *out->factor = mx_bits_float(0x7FC00000u);
}

static uint32_t square_amax(const Square *square) {
    uint32_t amax[SIDE];
    find_amaxes(amax, square, 0, SIDE, SIDE);
    return amax[0];
}

void quantize_scaled(const QuantizedTensor *out, Source in) {
    check_form(out);
    if (out->scaling == SCALING_BLOCK128_FP32 && out->form == FORM_DECODED) {
        die("internal error: blocks with FP32 scales aren't exact in BF16");
    }
    TensorScale s = scale_tensor(out, &in);
    uint32_t amax = 0;
#pragma omp parallel for collapse(2) schedule(static) reduction(max : amax)
    for (int64_t row = 0; row < out->rows; row += SIDE) {
        for (int64_t col = 0; col < out->cols; col += SIDE) {
            Square square;
            if (out->rows - row < SIDE || out->cols - col < SIDE) memset(square.x, 0, sizeof(square.x));
            square.at = (TilePlace){row, col, least(SIDE, out->rows - row), least(SIDE, out->cols - col)};
            for (int64_t r = 0; r < square.at.rows; r++) {
                source_row(square.x[r], &in, row + r, col, square.at.cols);
            }
            uint32_t largest = out->delayed.scale ? square_amax(&square) : 0;
            amax = largest > amax ? largest : amax;
            quantize_square(out, &square, s);
        }
    }
    if (out->delayed.scale) keep_amax(out, out->amax ? *out->amax : amax);
}
