/*
AdamW, SGD and sums over parameters.
*/
#include "cpu.h"
#include "rows.h"

// Elements that a thread updates at a time.
enum { ADAMW_CHUNK = 4096 };

void cpu_adamw(float *master, float *moment1, float *moment2, const float *gradient, int64_t count, AdamWOptions o) {
    AdamWConstants constants = adamw_constants(&o);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i += ADAMW_CHUNK) {
        int64_t chunk = count - i < ADAMW_CHUNK ? count - i : ADAMW_CHUNK;
        row_adamw(master + i, moment1 + i, moment2 + i, gradient + i, chunk, &constants);
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

double cpu_sum_of_squares(const float *values, int64_t count) { CHUNKED_SUM(count, (double)values[i] * values[i]) }

double cpu_squared_distance(const float *a, const float *b, int64_t count) {
    CHUNKED_SUM(count, ((double)a[i] - b[i]) * ((double)a[i] - b[i]))
}

double cpu_sum(const float *values, int64_t count) { CHUNKED_SUM(count, (double)values[i]) }
