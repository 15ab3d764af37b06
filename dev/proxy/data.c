#include "data.h"
#include "llmc/numerics/mx.h" // bit casts
#include "llmc/base/random.h" // Philox

#include <string.h>

enum { CHUNK = 256, PER_DRAW = 4 }; // a draw of Philox, four words, makes two pairs of values

// sqrt(-2 ln((word + 1/2) / 2^32)). With u = m 2^e, m in [sqrt(1/2), sqrt(2)), and s = (m - 1) / (m
// + 1), |s| < 0.172, ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...).
static inline float radius(uint32_t word) {
    float u = ((float)word + 0.5f) * 0x1p-32f;
    uint32_t bits = mx_float_bits(u) - 0x3F3504F3u; // less sqrt(1/2): the exponent field is e, what is below is m's
    int32_t e = (int32_t)bits >> 23;
    float m = mx_bits_float((bits & 0x7FFFFFu) + 0x3F3504F3u);
    float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float ln_m = 2.0f * s * (1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9)))));
    float ln_u = (float)e * 0.693147181f + ln_m;
    return sqrtf(ln_u < 0 ? -2.0f * ln_u : 0.0f);
}

// A point of the unit circle: two bits of the word choose a quadrant, the others an angle within
// [-pi/4, pi/4), whose sine and cosine are Taylor's series.
static inline void direction(uint32_t word, float *x, float *y) {
    float t = ((float)(int32_t)(word & 0x3FFFFFFFu) - 0x1p29f) * (0x1p-30f * 1.57079633f), z = t * t;
    float sine = t * (1.0f - z * (1.0f / 6 - z * (1.0f / 120 - z * (1.0f / 5040))));
    float cosine = 1.0f - z * (0.5f - z * (1.0f / 24 - z * (1.0f / 720 - z * (1.0f / 40320))));
    float sign = word & 0x80000000u ? -1.0f : 1.0f;
    bool turned = word & 0x40000000u;
    *x = sign * (turned ? -sine : cosine);
    *y = sign * (turned ? cosine : sine);
}

// Values [4 first, 4 first + 4 CHUNK) of the stream.
static void make_chunk(float out[PER_DRAW * CHUNK], float scale, uint64_t seed, uint64_t stream, uint64_t first) {
    uint32_t words[PER_DRAW][CHUNK];
    float values[PER_DRAW][CHUNK];
    for (int i = 0; i < CHUNK; i++) {
        uint32_t draw[4];
        philox(draw, seed, stream, first + (uint64_t)i);
        for (int w = 0; w < PER_DRAW; w++) {
            words[w][i] = draw[w];
        }
    }
    for (int pair = 0; pair < PER_DRAW; pair += 2) {
#pragma omp simd
        for (int i = 0; i < CHUNK; i++) {
            float r = scale * radius(words[pair][i]), x, y;
            direction(words[pair + 1][i], &x, &y);
            values[pair][i] = r * x;
            values[pair + 1][i] = r * y;
        }
    }
    for (int i = 0; i < CHUNK; i++) {
        for (int w = 0; w < PER_DRAW; w++) {
            out[PER_DRAW * i + w] = values[w][i];
        }
    }
}

void data_normal(float *out, int64_t count, float scale, uint64_t seed, uint64_t stream) {
#pragma omp parallel for schedule(static)
    for (int64_t done = 0; done < count; done += PER_DRAW * CHUNK) {
        float chunk[PER_DRAW * CHUNK];
        int64_t rest = count - done < PER_DRAW * CHUNK ? count - done : PER_DRAW * CHUNK;
        make_chunk(chunk, scale, seed, stream, (uint64_t)(done / PER_DRAW));
        memcpy(out + done, chunk, (size_t)rest * sizeof(float));
    }
}
