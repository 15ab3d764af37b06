/*
Quantizer: BF16 or FP32 in, rowwise and/or columnwise MX copies out, in one pass over the input.

The input is taken in tiles of 32 rows x 128 columns, held as FP32 in the first-level cache: a tile holds whole blocks
of either axis. Tiles at the edges are filled up with zeros, which change no block's amax and are not written out.
*/
#include "cpu.h"

#include <math.h>

enum { TILE_ROWS = MX_BLOCK, TILE_COLS = 4 * MX_BLOCK };

typedef struct {
    float x[TILE_ROWS][TILE_COLS];
    int64_t row, col;   // of the tile's first element
    int64_t rows, cols; // that are in the tensor
} Tile;

static void tile_load(Tile *tile, Tensor in, int64_t row, int64_t col) {
    tile->row = row;
    tile->col = col;
    tile->rows = in.rows - row < TILE_ROWS ? in.rows - row : TILE_ROWS;
    tile->cols = in.cols - col < TILE_COLS ? in.cols - col : TILE_COLS;
    if (tile->rows < TILE_ROWS || tile->cols < TILE_COLS) memset(tile->x, 0, sizeof(tile->x));
    for (int64_t r = 0; r < tile->rows; r++) {
        cpu_load(tile->x[r], cpu_at(in, row + r, col), in.dtype, tile->cols);
    }
}

static inline uint8_t row_block_scale(const float *x, Format format, ScaleRounding rounding) {
    uint32_t amax = 0;
    for (int i = 0; i < MX_BLOCK; i++) {
        uint32_t magnitude = mx_magnitude_bits(x[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return mx_scale_code(format, rounding, amax);
}

static inline void column_block_scales(uint8_t *codes, const Tile *tile, Format format, ScaleRounding rounding) {
    uint32_t amax[TILE_COLS] = {0};
    for (int r = 0; r < TILE_ROWS; r++) {
        for (int c = 0; c < TILE_COLS; c++) {
            uint32_t magnitude = mx_magnitude_bits(tile->x[r][c]);
            amax[c] = magnitude > amax[c] ? magnitude : amax[c];
        }
    }
    for (int c = 0; c < TILE_COLS; c++) {
        codes[c] = mx_scale_code(format, rounding, amax[c]);
    }
}

MX_FUNCTION void tile_rowwise(const QuantizedTensor *out, const Tile *tile, Format format, ScaleRounding rounding) {
    int64_t blocks_in_row = mx_num_blocks(out->cols);
    for (int64_t r = 0; r < tile->rows; r++) {
        uint8_t elements[TILE_COLS];
        uint8_t *scales = out->scales + (tile->row + r) * blocks_in_row + tile->col / MX_BLOCK;
        for (int64_t block = 0; block < mx_num_blocks(tile->cols); block++) {
            const float *x = tile->x[r] + block * MX_BLOCK;
            scales[block] = row_block_scale(x, format, rounding);
            float reciprocal = mx_scale_reciprocal(scales[block]);
            for (int i = 0; i < MX_BLOCK; i++) {
                elements[block * MX_BLOCK + i] = mx_encode(format, x[i] * reciprocal);
            }
        }
        memcpy(out->elements + (tile->row + r) * out->cols + tile->col, elements, (size_t)tile->cols);
    }
}

MX_FUNCTION void tile_columnwise(const QuantizedTensor *out, const Tile *tile, Format format, ScaleRounding rounding) {
    uint8_t codes[TILE_COLS];
    float reciprocal[TILE_COLS];
    column_block_scales(codes, tile, format, rounding);
    for (int c = 0; c < TILE_COLS; c++) {
        reciprocal[c] = mx_scale_reciprocal(codes[c]);
    }
    memcpy(out->scales + tile->row / MX_BLOCK * out->cols + tile->col, codes, (size_t)tile->cols);
    for (int64_t r = 0; r < tile->rows; r++) {
        uint8_t elements[TILE_COLS];
        for (int c = 0; c < TILE_COLS; c++) {
            elements[c] = mx_encode(format, tile->x[r][c] * reciprocal[c]);
        }
        memcpy(out->elements + (tile->row + r) * out->cols + tile->col, elements, (size_t)tile->cols);
    }
}

// One copy of the loops for each format, in which the format is a constant.
#define FOR_EACH_MX_FORMAT(format, call) \
    switch (format) {                    \
    case FORMAT_E5M2:                    \
        call(FORMAT_E5M2);               \
        break;                           \
    case FORMAT_E2M3:                    \
        call(FORMAT_E2M3);               \
        break;                           \
    case FORMAT_E3M2:                    \
        call(FORMAT_E3M2);               \
        break;                           \
    case FORMAT_E2M1:                    \
        call(FORMAT_E2M1);               \
        break;                           \
    default:                             \
        call(FORMAT_E4M3);               \
        break;                           \
    }

static void tile_quantize(const QuantizedTensor *out, const Tile *tile, ScaleRounding rounding) {
#define ROWWISE(constant) tile_rowwise(out, tile, constant, rounding)
#define COLUMNWISE(constant) tile_columnwise(out, tile, constant, rounding)
    if (out->axis == AXIS_ROWWISE) {
        FOR_EACH_MX_FORMAT(out->format, ROWWISE)
    } else {
        FOR_EACH_MX_FORMAT(out->format, COLUMNWISE)
    }
#undef ROWWISE
#undef COLUMNWISE
}

void cpu_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Tensor in,
                  ScaleRounding rounding) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in.rows; row += TILE_ROWS) {
        for (int64_t col = 0; col < in.cols; col += TILE_COLS) {
            Tile tile;
            tile_load(&tile, in, row, col);
            if (rowwise) tile_quantize(rowwise, &tile, rounding);
            if (columnwise) tile_quantize(columnwise, &tile, rounding);
        }
    }
}

MX_FUNCTION void decode_row_block(float *out, const uint8_t *elements, float scale, Format format, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = mx_decode(format, elements[i]) * scale;
    }
}

// Columns [first, first + count) of a row; `first` is a multiple of MX_BLOCK.
MX_FUNCTION void decode_row(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count,
                            Format format) {
    const uint8_t *elements = in->elements + row * in->cols + first;
    if (in->axis == AXIS_ROWWISE) {
        const uint8_t *scales = in->scales + row * mx_num_blocks(in->cols) + first / MX_BLOCK;
        int64_t whole = count / MX_BLOCK * MX_BLOCK;
        for (int64_t c = 0; c < whole; c += MX_BLOCK) {
            decode_row_block(out + c, elements + c, mx_scale_value(scales[c / MX_BLOCK]), format, MX_BLOCK);
        }
        if (whole < count) {
            float scale = mx_scale_value(scales[whole / MX_BLOCK]);
            decode_row_block(out + whole, elements + whole, scale, format, count - whole);
        }
    } else {
        const uint8_t *scales = in->scales + row / MX_BLOCK * in->cols + first;
        for (int64_t c = 0; c < count; c++) {
            out[c] = mx_decode(format, elements[c]) * mx_scale_value(scales[c]);
        }
    }
}

// Columns that are converted at a time: they fit the first-level cache.
enum { CONVERT_COLS = 2048 };

static void round_to_bf16(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        x[i] = mx_from_bf16(mx_to_bf16(x[i]));
    }
}

void cpu_dequantize(Tensor out, const QuantizedTensor *in, Format values) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in->rows; row++) {
        for (int64_t first = 0; first < in->cols; first += CONVERT_COLS) {
            float x[CONVERT_COLS];
            int64_t count = in->cols - first < CONVERT_COLS ? in->cols - first : CONVERT_COLS;
#define DECODE(constant) decode_row(x, in, row, first, count, constant)
            FOR_EACH_MX_FORMAT(in->format, DECODE)
#undef DECODE
            if (values == FORMAT_BF16 && out.dtype == FORMAT_FP32) round_to_bf16(x, count);
            cpu_store(cpu_at(out, row, first), out.dtype, x, count);
        }
    }
}

void cpu_convert(Tensor out, Tensor in) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in.rows; row++) {
        for (int64_t first = 0; first < in.cols; first += CONVERT_COLS) {
            float x[CONVERT_COLS];
            int64_t count = in.cols - first < CONVERT_COLS ? in.cols - first : CONVERT_COLS;
            cpu_load(x, cpu_at(in, row, first), in.dtype, count);
            cpu_store(cpu_at(out, row, first), out.dtype, x, count);
        }
    }
}

// One block: `count` elements `stride` apart.
static void block_stats(QuantStats *stats, const float *x, int64_t stride, int64_t count, Format format,
                        ScaleRounding rounding) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = mx_magnitude_bits(x[i * stride]);
        amax = magnitude > amax ? magnitude : amax;
    }
    uint8_t code = mx_scale_code(format, rounding, amax);
    float scale = mx_scale_value(code), reciprocal = mx_scale_reciprocal(code);
    uint32_t max_code = mx_element(format).max_code;
    uint32_t magnitude_mask = (1u << mx_element(format).sign_bit) - 1;
    float max = mx_decode(format, (uint8_t)max_code);
    for (int64_t i = 0; i < count; i++) {
        float value = x[i * stride];
        uint8_t element = mx_encode(format, value * reciprocal);
        double error = (double)(mx_decode(format, element) * scale) - value;
        uint32_t magnitude = element & magnitude_mask;
        stats->signal += (double)value * value;
        stats->noise += error * error;
        stats->clamped += fabsf(value * reciprocal) > max;
        stats->at_max += magnitude == max_code;
        stats->flushed += magnitude == 0 && value != 0;
    }
    stats->elements += count;
    stats->blocks++;
    stats->blocks_unlike_rceil += code != mx_scale_code(format, SCALE_RCEIL, amax);
    if (amax > mx_magnitude_bits((float)stats->amax)) stats->amax = mx_bits_float(amax);
}

static void tile_stats(QuantStats *stats, const Tile *tile, Axis axis, Format format, ScaleRounding rounding) {
    if (axis == AXIS_COLUMNWISE) {
        for (int64_t c = 0; c < tile->cols; c++) {
            block_stats(stats, &tile->x[0][c], TILE_COLS, tile->rows, format, rounding);
        }
        return;
    }
    for (int64_t r = 0; r < tile->rows; r++) {
        for (int64_t c = 0; c < tile->cols; c += MX_BLOCK) {
            int64_t count = tile->cols - c < MX_BLOCK ? tile->cols - c : MX_BLOCK;
            block_stats(stats, &tile->x[r][c], 1, count, format, rounding);
        }
    }
}

static void add_stats(QuantStats *sum, const QuantStats *part) {
    if (mx_magnitude_bits((float)part->amax) > mx_magnitude_bits((float)sum->amax)) sum->amax = part->amax;
    sum->signal += part->signal;
    sum->noise += part->noise;
    sum->elements += part->elements;
    sum->clamped += part->clamped;
    sum->at_max += part->at_max;
    sum->flushed += part->flushed;
    sum->blocks += part->blocks;
    sum->blocks_unlike_rceil += part->blocks_unlike_rceil;
}

void cpu_quantize_stats(QuantStats *stats, Tensor in, Axis axis, Format format, ScaleRounding rounding) {
    // Rows are cut into parts whose number doesn't depend on the number of threads, and neither do the sums.
    enum { PARTS = 64 };
    QuantStats parts[PARTS] = {0};
    int64_t tiles = (in.rows + TILE_ROWS - 1) / TILE_ROWS, part_rows = (tiles + PARTS - 1) / PARTS * TILE_ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < PARTS; part++) {
        int64_t end = (part + 1) * part_rows < in.rows ? (part + 1) * part_rows : in.rows;
        for (int64_t row = part * part_rows; row < end; row += TILE_ROWS) {
            for (int64_t col = 0; col < in.cols; col += TILE_COLS) {
                Tile tile;
                tile_load(&tile, in, row, col);
                tile_stats(&parts[part], &tile, axis, format, rounding);
            }
        }
    }
    for (int part = 0; part < PARTS; part++) {
        add_stats(stats, &parts[part]);
    }
}
