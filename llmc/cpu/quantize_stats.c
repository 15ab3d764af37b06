/*
What quantizing a tensor would do to it, counted instead of stored.
*/
#include "quantize.h"

// Counts one block: `rows` x `cols` elements of a tile.
static void count_block(QuantStats *stats, const float *x, int64_t rows, int64_t cols, Format format,
                        ScaleRounding rounding) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t magnitude = mx_magnitude_bits(x[i / cols * TILE_COLS + i % cols]);
        amax = magnitude > amax ? magnitude : amax;
    }
    BlockScale block = stats_add_block(stats, amax, rows * cols, format, rounding);
    for (int64_t i = 0; i < rows * cols; i++) {
        stats_add_element(stats, &block, x[i / cols * TILE_COLS + i % cols]);
    }
}

static void tile_stats(QuantStats *stats, const Tile *tile, Axis axis, Format format, ScaleRounding rounding) {
    int64_t height = axis == AXIS_ROWWISE ? 1 : tile->at.rows, width = axis == AXIS_COLUMNWISE ? 1 : MX_BLOCK;
    for (int64_t r = 0; r < tile->at.rows; r += height) {
        for (int64_t c = 0; c < tile->at.cols; c += width) {
            int64_t cols = tile->at.cols - c < width ? tile->at.cols - c : width;
            count_block(stats, &tile->x[r][c], height, cols, format, rounding);
        }
    }
}

static void tile_load(Tile *tile, Tensor in, TilePlace at) {
    tile_begin(tile, at);
    for (int64_t r = 0; r < at.rows; r++) {
        cpu_load(tile->x[r], cpu_at(in, at.row + r, at.col), in.dtype, at.cols);
    }
}

void cpu_quantize_stats(QuantStats *stats, Tensor in, Axis axis, Format format, ScaleRounding rounding) {
    // Rows are cut into parts whose number doesn't depend on the number of threads, and neither do
    // the sums.
    enum { PARTS = 64 };
    QuantStats parts[PARTS] = {0};
    int64_t tiles = (in.rows + TILE_ROWS - 1) / TILE_ROWS, part_rows = (tiles + PARTS - 1) / PARTS * TILE_ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < PARTS; part++) {
        int64_t end = (part + 1) * part_rows < in.rows ? (part + 1) * part_rows : in.rows;
        for (int64_t row = part * part_rows; row < end; row += TILE_ROWS) {
            for (int64_t col = 0; col < in.cols; col += TILE_COLS) {
                Tile tile;
                tile_load(&tile, in, tile_place(in.rows, in.cols, row, col));
                tile_stats(&parts[part], &tile, axis, format, rounding);
            }
        }
    }
    for (int part = 0; part < PARTS; part++) {
        stats_add(stats, &parts[part]);
    }
}
