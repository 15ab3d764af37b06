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

static const void *offset(const void *x, Format dtype, int64_t elements) {
    return (const char *)x + elements * (int64_t)dtype_size(dtype);
}

static void store_tile(void *d, const float *bias, const CpuMatmul *s, int64_t m, int64_t n, int64_t rows,
                       int64_t cols) {
    for (int64_t i = 0; i < rows; i++) {
        float row[TILE_N];
        void *out = (char *)d + (size_t)((m + i) * s->ldd + n) * dtype_size(s->d_dtype);
        if (s->accumulate) {
            cpu_load(row, out, s->d_dtype, cols);
        } else {
            memset(row, 0, sizeof(row));
        }
        for (int64_t j = 0; j < cols; j++) {
            row[j] += scratch.d[i][j] + (s->has_bias ? bias[n + j] : 0.0f);
        }
        cpu_store(out, s->d_dtype, row, cols);
    }
}

void cpu_matmul(void *d, const void *a, const void *b, const float *bias, CpuMatmul shape) {
    const CpuMatmul *s = &shape;
    int64_t a_row = s->transpose_a ? 1 : s->lda, a_k = s->transpose_a ? s->lda : 1;
    int64_t b_col = s->transpose_b ? s->ldb : 1, b_k = s->transpose_b ? 1 : s->ldb;
#pragma omp parallel for collapse(2) schedule(static) if (!omp_in_parallel())
    for (int64_t m = 0; m < s->M; m += TILE_M) {
        for (int64_t n = 0; n < s->N; n += TILE_N) {
            int64_t rows = s->M - m < TILE_M ? s->M - m : TILE_M, cols = s->N - n < TILE_N ? s->N - n : TILE_N;
            memset(scratch.d, 0, sizeof(scratch.d));
            for (int64_t k = 0; k < s->K; k += TILE_K) {
                int64_t depth = s->K - k < TILE_K ? s->K - k : TILE_K;
                pack(scratch.a, offset(a, s->dtype, m * a_row + k * a_k), s->dtype, a_row, a_k, rows, depth, KERNEL_M);
                pack(scratch.b, offset(b, s->dtype, n * b_col + k * b_k), s->dtype, b_col, b_k, cols, depth, KERNEL_N);
                for (int64_t i = 0; i < rows; i += KERNEL_M) {
                    for (int64_t j = 0; j < cols; j += KERNEL_N) {
                        kernel(&scratch.d[i][j], scratch.a + i * depth, scratch.b + j * depth, depth);
                    }
                }
            }
            store_tile(d, bias, s, m, n, rows, cols);
        }
    }
}
