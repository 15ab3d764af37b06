/*
What tests of stochastic rounding compare it with, without llmc/numerics/encoding.h and
llmc/base/random.h: Philox4x32-10 from the paper, the random bits of an element, and the neighbours
that these choose between.
*/
#pragma once

#include <math.h>
#include <stdint.h>

static inline void reference_philox(uint32_t x[4], uint32_t key_0, uint32_t key_1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = 3528531795u * (uint64_t)x[0], b = 3449720151u * (uint64_t)x[2];
        uint32_t next[] = {(uint32_t)(b >> 32) ^ x[1] ^ key_0, (uint32_t)b, (uint32_t)(a >> 32) ^ x[3] ^ key_1,
                           (uint32_t)a};
        for (int i = 0; i < 4; i++) {
            x[i] = next[i];
        }
        key_0 += 2654435769u;
        key_1 += 3144134277u;
    }
}

// Returns the 16 bits of an element of a tensor, of which a step has up to 2^22: eight columns
// share a call.
static inline uint32_t reference_random(uint64_t seed, uint64_t step, uint64_t tensor, uint32_t row, uint32_t col) {
    uint64_t stream = 3ull << 62 | step << 22 | tensor;
    uint32_t x[4] = {col / 8, row, (uint32_t)stream, (uint32_t)(stream >> 32)};
    reference_philox(x, (uint32_t)seed, (uint32_t)(seed >> 32));
    return col % 2 ? x[col % 8 / 2] >> 16 : x[col % 8 / 2] & 0xFFFF;
}

// Returns x rounded to one of `count` ascending values from 0 on: up in magnitude where the
// fraction of the way, in 2^-16 to nearest, and `random` make 2^16.
static inline double reference_stochastic(const double *values, int count, double x, uint32_t random) {
    double magnitude = fabs(x);
    int below = 0;
    if (magnitude >= values[count - 1]) return copysign(values[count - 1], x);
    while (values[below + 1] <= magnitude) {
        below++;
    }
    double fraction = (magnitude - values[below]) / (values[below + 1] - values[below]);
    bool up = floor(fraction * 65536 + 0.5) + random >= 65536;
    return copysign(values[below + up], x);
}
