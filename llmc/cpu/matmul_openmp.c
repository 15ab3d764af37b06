/*
cpu_matmul without a library: a blocked loop. d is cut into tiles; for each, panels of op(a) and
op(b) are packed as FP32 into a thread's own buffers, and a kernel of 8 x 32 accumulators runs along
K. Any strides, any tails: panels are filled up with zeros.
*/
#include "cpu.h"
#include "llmc/base/util.h" // aligned allocation

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

enum { TILE_M = 96, TILE_N = 256, TILE_K = 256, KERNEL_M = 8, KERNEL_N = 32 };

typedef struct {
    _Alignas(64) float a[TILE_K * TILE_M]; // panels of KERNEL_M rows, K-major
    float b[TILE_K * TILE_N];              // panels of KERNEL_N columns, K-major
    float d[TILE_M][TILE_N];
} Scratch;

static _Thread_local Scratch scratch;

bool cpu_matmul_takes_bf16(void) { return true; }

void cpu_matmul_describe(char *text, size_t bytes) {
    snprintf(text, bytes,
             "GEMMs by a plain OpenMP loop, several times slower than oneDNN (apt-get install libdnnl-dev, then make)");
}

static inline float element(const void *x, Format dtype, int64_t index) {
    return dtype == FORMAT_FP32 ? ((const float *)x)[index] : mx_from_bf16(((const uint16_t *)x)[index]);
}

// Packs a (count, depth) part of a matrix into panels of `width` rows, each K-major, zero-padded.
static inline void pack(float *out, const void *x, Format dtype, int64_t row_stride, int64_t depth_stride,
                        int64_t count, int64_t depth, int64_t width) {
    for (int64_t first = 0; first < count; first += width) {
        for (int64_t k = 0; k < depth; k++) {
            for (int64_t i = 0; i < width; i++) {
                bool inside = first + i < count;
                *out++ = inside ? element(x, dtype, (first + i) * row_stride + k * depth_stride) : 0.0f;
            }
        }
    }
}

static inline void kernel(float *d, const float *a, const float *b, int64_t depth) {
    float sum[KERNEL_M][KERNEL_N] = {{0}};
    for (int64_t k = 0; k < depth; k++) {
        for (int i = 0; i < KERNEL_M; i++) {
            for (int j = 0; j < KERNEL_N; j++) {
                sum[i][j] += a[k * KERNEL_M + i] * b[k * KERNEL_N + j];
            }
        }
    }
    for (int i = 0; i < KERNEL_M; i++) {
        for (int j = 0; j < KERNEL_N; j++) {
            d[i * TILE_N + j] += sum[i][j];
        }
    }
}

static void store_tile(Tensor d, const float *bias, bool accumulate) {
    for (int64_t i = 0; i < d.rows; i++) {
        float row[TILE_N] = {0};
        if (accumulate) cpu_load_row(row, d, i);
        for (int64_t j = 0; j < d.cols; j++) {
            row[j] += scratch.d[i][j] + (bias ? bias[j] : 0.0f);
        }
        cpu_store_row(d, i, row);
    }
}

void cpu_matmul(Tensor d, Tensor a, Tensor b, GemmOptions options) {
    int64_t K = options.transpose_a ? a.rows : a.cols;
    int64_t a_row = options.transpose_a ? 1 : a.stride, a_k = options.transpose_a ? a.stride : 1;
    int64_t b_col = options.transpose_b ? b.stride : 1, b_k = options.transpose_b ? 1 : b.stride;
#pragma omp parallel for collapse(2) schedule(static) if (!omp_in_parallel())
    for (int64_t m = 0; m < d.rows; m += TILE_M) {
        for (int64_t n = 0; n < d.cols; n += TILE_N) {
            int64_t rows = d.rows - m < TILE_M ? d.rows - m : TILE_M, cols = d.cols - n < TILE_N ? d.cols - n : TILE_N;
            memset(scratch.d, 0, sizeof(scratch.d));
            for (int64_t k = 0; k < K; k += TILE_K) {
                int64_t depth = K - k < TILE_K ? K - k : TILE_K;
                const void *a_at = options.transpose_a ? cpu_at(a, k, m) : cpu_at(a, m, k);
                const void *b_at = options.transpose_b ? cpu_at(b, n, k) : cpu_at(b, k, n);
                pack(scratch.a, a_at, a.dtype, a_row, a_k, rows, depth, KERNEL_M);
                pack(scratch.b, b_at, b.dtype, b_col, b_k, cols, depth, KERNEL_N);
                for (int64_t i = 0; i < rows; i += KERNEL_M) {
                    for (int64_t j = 0; j < cols; j += KERNEL_N) {
                        kernel(&scratch.d[i][j], scratch.a + i * depth, scratch.b + j * depth, depth);
                    }
                }
            }
            Tensor tile = tensor_cols(tensor_rows(d, m, rows), n, cols);
            store_tile(tile, options.bias ? options.bias + n : NULL, options.accumulate);
        }
    }
}
