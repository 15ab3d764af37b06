/*
AdamW and sums over parameters.
*/
#include "cpu.h"

#include <math.h>

void cpu_adamw(float *master, float *moment1, float *moment2, const float *gradient, int64_t count, AdamWOptions o) {
    float correction1 = (float)(1.0 - pow(o.beta1, (double)o.step)); // in double: near 1 the difference cancels
    float correction2 = (float)(1.0 - pow(o.beta2, (double)o.step));
    float step_size = o.learning_rate / correction1, root2 = 1.0f / sqrtf(correction2);
    float decay = 1.0f - o.learning_rate * o.weight_decay;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        float g = gradient[i] * o.gradient_scale;
        float m = o.beta1 * moment1[i] + (1.0f - o.beta1) * g;
        float v = o.beta2 * moment2[i] + (1.0f - o.beta2) * g * g;
        moment1[i] = m;
        moment2[i] = v;
        master[i] = master[i] * decay - step_size * m / (sqrtf(v) * root2 + o.eps);
    }
}

// Sums in chunks whose number depends on `count` alone, then over the chunks in order: the same bits with any number of
// threads.
enum { MAX_CHUNKS = 1024, MIN_CHUNK = 16384 };

static int64_t chunk_size(int64_t count) {
    int64_t size = (count + MAX_CHUNKS - 1) / MAX_CHUNKS;
    return size < MIN_CHUNK ? MIN_CHUNK : size;
}

#define CHUNKED_SUM(values, count, term)                                                                 \
    double partial[MAX_CHUNKS] = {0};                                                                    \
    int64_t size = chunk_size(count);                                                                    \
    _Pragma("omp parallel for schedule(static)") for (int64_t first = 0; first < count; first += size) { \
        int64_t end = first + size < count ? first + size : count;                                       \
        double sum = 0;                                                                                  \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = first; i < end; i++) { sum += term; }    \
        partial[first / size] = sum;                                                                     \
    }                                                                                                    \
    double total = 0;                                                                                    \
    for (int i = 0; i < MAX_CHUNKS; i++) {                                                               \
        total += partial[i];                                                                             \
    }                                                                                                    \
    return total;

double cpu_sum_of_squares(const float *values, int64_t count) {
    CHUNKED_SUM(values, count, (double)values[i] * values[i])
}

double cpu_sum(const float *values, int64_t count) { CHUNKED_SUM(values, count, (double)values[i]) }
