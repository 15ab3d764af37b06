/*
Activations, rotary positions, gradients of biases, sums of multiples.
*/
#include "cpu.h"
#include "rows.h"

// Elements that a thread converts, computes and stores at a time: they fit the first-level cache.
enum { CHUNK = 1024 };

void cpu_activation_forward(Tensor out, Tensor input, Activation activation) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < out.rows; row++) {
        for (int64_t col = 0; col < out.cols; col += CHUNK) {
            float x[CHUNK], up[CHUNK];
            bool is_gated = activation == ACTIVATION_SWIGLU;
            int64_t count = min_int64(CHUNK, out.cols - col);
            cpu_load(x, cpu_at(input, row, col), input.dtype, count);
            if (is_gated) cpu_load(up, cpu_at(input, row, out.cols + col), input.dtype, count);
            row_activation(x, is_gated ? up : NULL, count, activation);
            cpu_store(cpu_at(out, row, col), out.dtype, x, count);
        }
    }
}

void cpu_activation_backward(Tensor dinput, float *dbias, Tensor dout, Tensor input, Activation activation) {
    int64_t F = dout.cols;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < dout.rows; row++) {
        for (int64_t col = 0; col < F; col += CHUNK) {
            float x[CHUNK], d[CHUNK], up[CHUNK];
            int64_t count = min_int64(CHUNK, F - col);
            cpu_load(x, cpu_at(input, row, col), input.dtype, count);
            cpu_load(d, cpu_at(dout, row, col), dout.dtype, count);
            if (activation == ACTIVATION_SWIGLU) {
                cpu_load(up, cpu_at(input, row, F + col), input.dtype, count);
                row_swiglu_backward(x, up, d, count);
                cpu_store(cpu_at(dinput, row, col), dinput.dtype, x, count);
                cpu_store(cpu_at(dinput, row, F + col), dinput.dtype, up, count);
            } else {
                row_activation_backward(d, x, count, activation);
                cpu_store(cpu_at(dinput, row, col), dinput.dtype, d, count);
            }
        }
    }
    if (dbias) cpu_bias_backward(dbias, dinput);
}

void cpu_combine(Tensor out, float a, Tensor x, float b, Tensor y) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < out.rows; row++) {
        for (int64_t col = 0; col < out.cols; col += CHUNK) {
            float sum[CHUNK], other[CHUNK] = {0};
            int64_t count = min_int64(CHUNK, out.cols - col);
            cpu_load(sum, cpu_at(x, row, col), x.dtype, count);
            if (y.data) cpu_load(other, cpu_at(y, row, col), y.dtype, count);
            for (int64_t i = 0; i < count; i++) {
                sum[i] = a * sum[i] + b * other[i];
            }
            cpu_store(cpu_at(out, row, col), out.dtype, sum, count);
        }
    }
}

// Angles are reduced in double: t * theta^(-2i/HS) has no digits left in FP32 where t is large.
void cpu_rope_rotations(float *rotations, int64_t T, int64_t HS, double theta) {
    int64_t half = HS / 2;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)t * pow(theta, -2.0 * (double)i / (double)HS);
            rotations[t * HS + i] = (float)cos(angle);
            rotations[t * HS + half + i] = (float)sin(angle);
        }
    }
}

static void rotate_head(float *x, const float *cosines, const float *sines, int64_t half, float sign) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], sine = sign * sines[i];
        x[i] = a * cosines[i] - b * sine;
        x[i + half] = b * cosines[i] + a * sine;
    }
}

void cpu_rope(Tensor x, const float *rotations, Sequences sequences, int64_t HS, bool inverse) {
    int64_t half = HS / 2;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.rows; row++) {
        const float *cosines = rotations + cpu_position(sequences, row) * HS;
        float values[x.cols];
        cpu_load_row(values, x, row);
        for (int64_t col = 0; col < x.cols; col += HS) {
            rotate_head(values + col, cosines, cosines + half, half, inverse ? -1 : 1);
        }
        cpu_store_row(x, row, values);
    }
}

void cpu_bias_backward(float *dbias, Tensor dout) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < dout.cols; first += CPU_SLAB) {
        int64_t count = min_int64(CPU_SLAB, dout.cols - first);
        float sum[CPU_SLAB] = {0}, d[CPU_SLAB];
        for (int64_t row = 0; row < dout.rows; row++) {
            cpu_load_column(d, dout, row, first, count);
            for (int64_t c = 0; c < count; c++) {
                sum[c] += d[c];
            }
        }
        for (int64_t c = 0; c < count; c++) {
            dbias[first + c] += sum[c];
        }
    }
}
