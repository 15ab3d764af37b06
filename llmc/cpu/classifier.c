/*
Losses and their gradients in one pass over a row that is in cache: softmax cross-entropy, the
squared error, and the divergence between two softmaxes.
*/
#include "cpu.h"
#include "vector_math.h"

#include <math.h>

void cpu_classifier(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss) {
    int64_t V = logits.cols;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < logits.rows; row++) {
        float *x = cpu_at(logits, row, 0);
        float max = vector_max(x, V), sum = 0;
        float target = x[targets[row]];
#pragma omp simd reduction(+ : sum)
        for (int64_t v = 0; v < V; v++) {
            x[v] = vector_exp(x[v] - max);
            sum += x[v];
        }
        losses[row] = logf(sum) - (target - max);
        if (!dlogits.data) continue;
        float factor = dloss / sum;
        for (int64_t v = 0; v < V; v++) {
            x[v] *= factor;
        }
        x[targets[row]] -= dloss;
        cpu_store_row(dlogits, row, x);
    }
}

void cpu_squared_error(float *losses, Tensor dout, Tensor out, Tensor target, float scale) {
    int64_t C = out.cols;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < out.rows; row++) {
        float x[C], y[C], sum = 0;
        cpu_load_row(x, out, row);
        cpu_load_row(y, target, row);
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) {
            x[c] -= y[c];
            sum += x[c] * x[c];
        }
        losses[row] = sum;
        if (!dout.data) continue;
        for (int64_t c = 0; c < C; c++) {
            x[c] *= 2 * scale;
        }
        cpu_store_row(dout, row, x);
    }
}

// Turns x into the logarithms of its softmax.
static void log_softmax(float *x, int64_t count) {
    float max = vector_max(x, count), sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        sum += vector_exp(x[i] - max);
    }
    float log_sum = max + logf(sum);
    for (int64_t i = 0; i < count; i++) {
        x[i] -= log_sum;
    }
}

void cpu_kl_divergence(float *losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) {
    int64_t C = logits.cols;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < logits.rows; row++) {
        float q[C], p[C], sum = 0;
        cpu_load_row(q, logits, row);
        cpu_load_row(p, targets, row);
        log_softmax(q, C);
        log_softmax(p, C);
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) {
            float probability = vector_exp(p[c]);
            sum += probability * (p[c] - q[c]);
            q[c] = scale * (vector_exp(q[c]) - probability);
        }
        losses[row] = sum;
        if (dlogits.data) cpu_store_row(dlogits, row, q);
    }
}
