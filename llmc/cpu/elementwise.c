/*
GELU, residual additions, gradients of biases.
*/
#include "cpu.h"
#include "vector_math.h" // vector_exp

// GELU's tanh approximation is x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), and (1 + tanh(u)) / 2 is
// the logistic function of 2 u, which has no cancellation where u is large and negative.
#define GELU_SCALE 1.5957691216057308f // 2 sqrt(2 / pi)
#define GELU_CUBIC 0.044715f

// Elements that a thread converts, computes and stores at a time: they fit the first-level cache.
enum { CHUNK = 1024 };

static int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

MX_FUNCTION float gelu_gate(float x) { return 1.0f / (1.0f + vector_exp(-GELU_SCALE * (x + GELU_CUBIC * x * x * x))); }

void cpu_gelu_forward(Tensor out, Tensor input) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < input.rows; row++) {
        for (int64_t col = 0; col < input.cols; col += CHUNK) {
            float x[CHUNK];
            int64_t count = min_int64(CHUNK, input.cols - col);
            cpu_load(x, cpu_at(input, row, col), input.dtype, count);
            for (int64_t i = 0; i < count; i++) {
                x[i] *= gelu_gate(x[i]);
            }
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
            for (int64_t i = 0; i < count; i++) {
                float gate = gelu_gate(x[i]);
                float slope = GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x[i] * x[i]);
                d[i] *= gate + x[i] * gate * (1.0f - gate) * slope;
            }
            cpu_store(cpu_at(dinput, row, col), dinput.dtype, d, count);
        }
    }
}

void cpu_residual_forward(Tensor out, Tensor a, Tensor b) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < out.rows; row++) {
        for (int64_t col = 0; col < out.cols; col += CHUNK) {
            float x[CHUNK], y[CHUNK];
            int64_t count = min_int64(CHUNK, out.cols - col);
            cpu_load(x, cpu_at(a, row, col), a.dtype, count);
            cpu_load(y, cpu_at(b, row, col), b.dtype, count);
            for (int64_t i = 0; i < count; i++) {
                x[i] += y[i];
            }
            cpu_store(cpu_at(out, row, col), out.dtype, x, count);
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
