/*
What the proxy learns from: standard normal values, a function of seed, stream and index alone, so
that any step can be made again and twins see the same data. Philox (llmc/base/random.h) and Box and
Muller's transform, in FP32, written so that compilers vectorise it: a value takes one or two ns of
a core, against some 50 ns of random_normal.
*/
#pragma once

#include <stdint.h>

// Streams of a run's seed: of parameter p's initial values stream p (as in llmc/model/param.c), of
// step s's data these.
#define INPUT_STREAMS ((uint64_t)1 << 60)
#define NOISE_STREAMS ((uint64_t)1 << 61)

// out (count): standard normal times `scale`. Values reach out to 6.7; in [-2^-31, 2^-31] there is
// none.
void data_normal(float *out, int64_t count, float scale, uint64_t seed, uint64_t stream);
