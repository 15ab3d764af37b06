/*
What quantizing a tensor would do to it, counted instead of stored.
*/
#include "quantize.h"

enum { SIDE = TILE_COLS }; // of what is held at a time: whole blocks of every scaling, of MX ones TILE_ROWS rows

typedef struct {
    TilePlace at;
    float x[SIDE][SIDE];
} Square;

// Counts one block: `rows` x `cols` elements of a square, from its element (row, col) on.
static void count_block(QuantStats *stats, const Counted *how, const Square *square, int64_t row, int64_t col,
                        int64_t rows, int64_t cols) {
    const float *x = &square->x[row][col];
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t magnitude = mx_magnitude_bits(x[i / cols * SIDE + i % cols]);
        amax = magnitude > amax ? magnitude : amax;
    }
    BlockScale block;
    if (how->scaling == SCALING_MX) {
        block = stats_add_mx_block(stats, amax, rows * cols, how);
    } else {
        ScaledBlock scaled =
            scaling_of_block(how->scaling, how->axis, how->format, x, rows, cols, SIDE, how->amax, how->scale);
        block = stats_add_scaled_block(stats, amax, rows * cols, &scaled, how);
    }
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t r = i / cols, c = i % cols;
        stats_add_element(stats, &block, &how->encoding, x[r * SIDE + c], square->at.row + row + r,
                          square->at.col + col + c);
    }
}

static void count_square(QuantStats *stats, const Counted *how, const Square *square) {
    int64_t height = scaling_block_rows(how->scaling, how->axis), width = scaling_block_cols(how->scaling, how->axis);
    for (int64_t r = 0; r < square->at.rows; r += height) {
        for (int64_t c = 0; c < square->at.cols; c += width) {
            count_block(stats, how, square, r, c, min_int64(height, square->at.rows - r),
                        min_int64(width, square->at.cols - c));
        }
    }
}

static void square_load(Square *square, Tensor in, TilePlace at) {
    square->at = at;
    for (int64_t r = 0; r < at.rows; r++) {
        cpu_load(square->x[r], cpu_at(in, at.row + r, at.col), in.dtype, at.cols);
    }
}

// Returns how a copy of `in` would be quantized.
static Counted counted(Tensor in, const QuantizedTensor *copy, ScaleRounding rounding) {
    Counted how = {.scaling = copy->scaling,
                   .format = copy->format,
                   .axis = copy->axis,
                   .rounding = rounding,
                   .encoding = copy->encoding};
    if (copy->amax) how.amax = *copy->amax;
    if (!copy->amax && !copy->delayed.scale && scaling_has_factor(copy->scaling)) cpu_amax(&how.amax, in);
    how.scale =
        copy->delayed.scale ? *copy->delayed.scale : scaling_tensor_scale(copy->scaling, copy->format, how.amax);
    return how;
}

void cpu_quantize_stats(QuantStats *stats, Tensor in, const QuantizedTensor *copy, ScaleRounding rounding) {
    // Rows are cut into parts whose number doesn't depend on the number of threads, and neither do
    // the sums.
    enum { PARTS = 64 };
    QuantStats parts[PARTS] = {0};
    const Counted how = counted(in, copy, rounding);
    int64_t height = how.scaling == SCALING_MX ? TILE_ROWS : SIDE;
    int64_t bands = (in.rows + height - 1) / height, part_rows = (bands + PARTS - 1) / PARTS * height;
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < PARTS; part++) {
        int64_t end = min_int64((part + 1) * part_rows, in.rows);
        for (int64_t row = part * part_rows; row < end; row += height) {
            for (int64_t col = 0; col < in.cols; col += SIDE) {
                Square square;
                square_load(&square, in,
                            (TilePlace){row, col, min_int64(height, end - row), min_int64(SIDE, in.cols - col)});
                count_square(&parts[part], &how, &square);
            }
        }
    }
    for (int part = 0; part < PARTS; part++) {
        stats_add(stats, &parts[part]);
    }
}
