/*
The quantizer for scalings that aren't MX: into the BF16 values that a tensor decodes to, but for its
own factor. E4M3 and E2M1 elements times a power of two or an E4M3 scale are exact in BF16 (but at the
ends of its range), so that the product's addends are the hardware's.
*/
#include "quantize.h"
#include "llmc/base/util.h" // die

enum { SIDE = 128 }; // of the squares that a tensor is taken in: whole blocks of every scaling

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

// Finds what a band of rows, as high as a block, is multiplied by before and after it is encoded, for
// each of its columns.
static void find_blocks(float multiplier[SIDE], float value[SIDE], const QuantizedTensor *out, const Square *square,
                        int64_t row, int64_t rows, TensorScale s) {
    int64_t width = scaling_block_cols(out->scaling, out->axis);
    for (int64_t col = 0; col < square->at.cols; col += width) {
        int64_t cols = least(width, square->at.cols - col);
        ScaledBlock block = scaling_of_block(out->scaling, out->axis, out->format, &square->x[row][col], rows, cols,
                                             SIDE, s.amax, s.scale);
        for (int64_t c = col; c < col + cols; c++) {
            multiplier[c] = block.multiplier;
            value[c] = block.value;
        }
    }
}

MX_FUNCTION void quantize_row(uint16_t *out, const float *x, const float *multiplier, const float *value, int64_t count,
                              Format format) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = mx_to_bf16(mx_decode(format, mx_encode(format, x[i] * multiplier[i])) * value[i]);
    }
}

static void quantize_square(const QuantizedTensor *out, const Square *square, TensorScale s) {
    float multiplier[SIDE], value[SIDE];
    TilePlace at = square->at;
    int64_t height = scaling_block_rows(out->scaling, out->axis);
    for (int64_t row = 0; row < at.rows; row++) {
        if (row % height == 0) find_blocks(multiplier, value, out, square, row, least(height, at.rows - row), s);
        uint16_t *to = (uint16_t *)out->elements + (at.row + row) * out->cols + at.col;
#define QUANTIZE(constant) quantize_row(to, square->x[row], multiplier, value, at.cols, constant)
        MX_WITH_CONSTANT_FORMAT(out->format, QUANTIZE)
#undef QUANTIZE
    }
}

void quantize_scaled(const QuantizedTensor *out, Source in) {
    if (out->form != FORM_DECODED) die("internal error: a scaling that isn't MX was to be kept as codes");
    TensorScale s = {.amax = scaling_has_factor(out->scaling) ? source_amax(&in) : 0};
    s.scale = scaling_tensor_scale(out->scaling, out->format, s.amax);
    if (out->factor) *out->factor = 1.0f / s.scale;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < out->rows; row += SIDE) {
        for (int64_t col = 0; col < out->cols; col += SIDE) {
            Square square;
            square.at = (TilePlace){row, col, least(SIDE, out->rows - row), least(SIDE, out->cols - col)};
            for (int64_t r = 0; r < square.at.rows; r++) {
                source_row(square.x[r], &in, row + r, col, square.at.cols);
            }
            quantize_square(out, &square, s);
        }
    }
}
