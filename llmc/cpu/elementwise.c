/*
GELU, gradients of biases.
*/
#include "cpu.h"
#include "rows.h"

// Elements that a thread converts, computes and stores at a time: they fit the first-level cache.
enum { CHUNK = 1024 };

static int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

void cpu_gelu_forward(Tensor out, Tensor input) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < input.rows; row++) {
        for (int64_t col = 0; col < input.cols; col += CHUNK) {
            float x[CHUNK];
            int64_t count = min_int64(CHUNK, input.cols - col);
            cpu_load(x, cpu_at(input, row, col), input.dtype, count);
            row_gelu(x, count);
            cpu_store(cpu_at(out, row, col), out.dtype, x, count);
        }
    }
}

void cpu_gelu_backward(Tensor dinput, Tensor dout, Tensor input) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < input.rows; row++) {
        for (int64_t col = 0; col < input.cols; col += CHUNK) {
            float x[CHUNK], d[CHUNK];
            int64_t count = min_int64(CHUNK, input.cols - col);
            cpu_load(x, cpu_at(input, row, col), input.dtype, count);
            cpu_load(d, cpu_at(dout, row, col), dout.dtype, count);
            row_gelu_backward(d, x, count);
            cpu_store(cpu_at(dinput, row, col), dinput.dtype, d, count);
        }
    }
}

void cpu_bias_backward(float *dbias, Tensor dout) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < dout.cols; first += CPU_SLAB) {
        int64_t count = min_int64(CPU_SLAB, dout.cols - first);
        float sum[CPU_SLAB] = {0}, d[CPU_SLAB];
        for (int64_t row = 0; row < dout.rows; row++) {
            cpu_load(d, cpu_at(dout, row, first), dout.dtype, count);
            for (int64_t c = 0; c < count; c++) {
                sum[c] += d[c];
            }
        }
        for (int64_t c = 0; c < count; c++) {
            dbias[first + c] += sum[c];
        }
    }
}
