/*
AdamW, SGD and sums over parameters.
*/
#include "llmc/base/util.h" // min_int64
#include "quantize.h"

#include <math.h>

// Updates `count` elements from `at` on.
MX_FUNCTION void update_elements(const AdamWUpdate *u, int64_t at, int64_t count) {
    const AdamWFactors f = u->factors;
    float *master = u->master + at, *moment1 = u->moment1 + at, *moment2 = u->moment2 + at;
    const float *gradient = u->gradient + at;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float g = gradient[i] * f.gradient_scale;
        float m = f.beta1 * moment1[i] + (1.0f - f.beta1) * g;
        float v = f.beta2 * moment2[i] + (1.0f - f.beta2) * g * g;
        moment1[i] = m;
        moment2[i] = v;
        master[i] = master[i] * f.decay - f.step_size * m / (sqrtf(v) * f.root2 + f.eps);
    }
    if (u->bf16) cpu_store(u->bf16 + at, FORMAT_BF16, master, count);
}

// Quantizes a tile of updated masters.
static void quantize_updated(const AdamWUpdate *u, TilePlace at) {
    Tile tile;
    tile_begin(&tile, at);
    for (int64_t r = 0; r < at.rows; r++) {
        memcpy(tile.x[r], u->master + (at.row + r) * u->cols + at.col, (size_t)at.cols * sizeof(float));
    }
    const QuantizedTensor *rowwise = u->rowwise.elements ? &u->rowwise : NULL;
    tile_quantize(rowwise, u->columnwise.elements ? &u->columnwise : NULL, &tile, u->rounding);
}

// Columns that are updated before they are quantized. In rows of this length, or whole ones,
// masters, moments and gradients are read in an order that the processor's prefetcher foresees; the
// masters that the quantizer then reads again are still in a cache.
enum { PANEL_COLS = 4096 };

// Updates 32 rows of a panel, then quantizes them by tiles.
static void update_panel(const AdamWUpdate *u, TilePlace panel) {
    for (int64_t r = panel.row; r < panel.row + panel.rows; r++) {
        update_elements(u, r * u->cols + panel.col, panel.cols);
    }
    for (int64_t c = 0; c < panel.cols; c += TILE_COLS) {
        quantize_updated(u, tile_place(u->rows, u->cols, panel.row, panel.col + c));
    }
}

static void update_panels(const AdamWUpdate *u) {
#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t row = 0; row < u->rows; row += TILE_ROWS) {
            for (int64_t col = 0; col < u->cols; col += PANEL_COLS) {
                int64_t rows = min_int64(TILE_ROWS, u->rows - row), cols = min_int64(PANEL_COLS, u->cols - col);
                update_panel(u, (TilePlace){row, col, rows, cols});
            }
        }
        quantize_end_streams();
    }
}

// Updates all as one row, in pieces that the first-level cache holds.
static void update_in_order(const AdamWUpdate *u) {
    enum { PIECE = 1024 };
    int64_t count = u->rows * u->cols;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i += PIECE) {
        update_elements(u, i, min_int64(count - i, PIECE));
    }
}

void cpu_adamw(AdamWUpdate update) {
    check_form(&update.rowwise);
    check_form(&update.columnwise);
    if (update.rowwise.elements || update.columnwise.elements) {
        update_panels(&update);
    } else {
        update_in_order(&update);
    }
}

void cpu_sgd(float *master, float *moment, const float *gradient, int64_t count, SGDOptions o) {
    if (moment) {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < count; i++) {
            moment[i] = o.momentum * moment[i] + o.gradient_scale * gradient[i];
            master[i] -= o.learning_rate * moment[i];
        }
    } else {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < count; i++) {
            master[i] -= o.learning_rate * (o.gradient_scale * gradient[i]);
        }
    }
}

void cpu_accumulate(float *sum, const float *values, int64_t count) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        sum[i] += values[i];
    }
}

// Sums in chunks whose number depends on `count` alone, then over the chunks in order: the same
// bits with any number of threads.
enum { MAX_CHUNKS = 1024, MIN_CHUNK = 16384 };

static int64_t chunk_size(int64_t count) {
    int64_t size = (count + MAX_CHUNKS - 1) / MAX_CHUNKS;
    return size < MIN_CHUNK ? MIN_CHUNK : size;
}

#define CHUNKED_SUM(count, term)                                                                         \
    double partial[MAX_CHUNKS] = {0};                                                                    \
    int64_t size = chunk_size(count);                                                                    \
    _Pragma("omp parallel for schedule(static)") for (int64_t first = 0; first < count; first += size) { \
        int64_t end = min_int64(first + size, count);                                                    \
        double sum = 0;                                                                                  \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = first; i < end; i++) { sum += term; }    \
        partial[first / size] = sum;                                                                     \
    }                                                                                                    \
    double total = 0;                                                                                    \
    for (int i = 0; i < MAX_CHUNKS; i++) {                                                               \
        total += partial[i];                                                                             \
    }                                                                                                    \
    return total;

double cpu_sum_of_squares(const float *values, int64_t count) { CHUNKED_SUM(count, (double)values[i] * values[i]) }

double cpu_squared_distance(const float *a, const float *b, int64_t count) {
    CHUNKED_SUM(count, ((double)a[i] - b[i]) * ((double)a[i] - b[i]))
}

double cpu_sum(const float *values, int64_t count) { CHUNKED_SUM(count, (double)values[i]) }
