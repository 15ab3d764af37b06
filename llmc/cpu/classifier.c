/*
Softmax cross-entropy: loss and gradient of the logits in one pass over a row that is in cache.
*/
#include "cpu.h"
#include "vector_math.h"

#include <math.h>

void cpu_classifier(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss) {
    int64_t V = logits.cols;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < logits.rows; row++) {
        float *x = cpu_at(logits, row, 0);
        float max = -INFINITY, sum = 0;
#pragma omp simd reduction(max : max)
        for (int64_t v = 0; v < V; v++) {
            max = x[v] > max ? x[v] : max;
        }
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
