/*
Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC'11).

There is no state: value number `index` of stream `stream` under `seed` is a pure function of the
three. So what is drawn depends neither on the order of drawing nor on how many threads or ranks
draw.
*/
#pragma once

#include <math.h>
#include <stdint.h>

// Streams of a run's seed. Parameter p's initial values are stream p; the signs of the Hadamard
// transform of its GEMM g are HADAMARD_STREAMS plus 3 p + g; the sample of step s and the shuffle
// of epoch e are SAMPLE_STREAMS plus s and SHUFFLE_STREAMS plus e; stochastic rounding's are
// ROUNDING_STREAMS plus the step and the tensor (numerics/encoding.h).
#define HADAMARD_STREAMS ((uint64_t)3 << 60)
#define SAMPLE_STREAMS ((uint64_t)1 << 62)
#define SHUFFLE_STREAMS ((uint64_t)1 << 63)
#define ROUNDING_STREAMS ((uint64_t)3 << 62)

#ifdef __CUDACC__
#define RANDOM_FUNCTION static __host__ __device__ __forceinline__
#else
#define RANDOM_FUNCTION static inline
#endif

enum { PHILOX_ROUNDS = 10 };
#define PHILOX_MULTIPLIER_0 0xD2511F53u
#define PHILOX_MULTIPLIER_1 0xCD9E8D57u

// Makes the two words of a round's key. `key` is that of round 0.
RANDOM_FUNCTION void philox_round_key(uint32_t out[2], uint64_t key, int round) {
    out[0] = (uint32_t)key + (uint32_t)round * 0x9E3779B9u;         // golden ratio
    out[1] = (uint32_t)(key >> 32) + (uint32_t)round * 0xBB67AE85u; // sqrt(3) - 1
}

// Makes a round of the words in place.
RANDOM_FUNCTION void philox_round(uint32_t word[4], uint64_t key, int round) {
    uint32_t keys[2];
    philox_round_key(keys, key, round);
    uint64_t product_0 = (uint64_t)PHILOX_MULTIPLIER_0 * word[0];
    uint64_t product_1 = (uint64_t)PHILOX_MULTIPLIER_1 * word[2];
    word[0] = (uint32_t)(product_1 >> 32) ^ word[1] ^ keys[0];
    word[2] = (uint32_t)(product_0 >> 32) ^ word[3] ^ keys[1];
    word[1] = (uint32_t)product_1;
    word[3] = (uint32_t)product_0;
}

// Writes 128 random bits, from a 128-bit counter under a 64-bit key. Words are numbered from the
// least significant, as in the paper's implementation (Random123).
RANDOM_FUNCTION void philox(uint32_t out[4], uint64_t key, uint64_t counter_hi, uint64_t counter_lo) {
    out[0] = (uint32_t)counter_lo;
    out[1] = (uint32_t)(counter_lo >> 32);
    out[2] = (uint32_t)counter_hi;
    out[3] = (uint32_t)(counter_hi >> 32);
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        philox_round(out, key, round);
    }
}

// Draws from the uniform distribution on [0, 1): a multiple of 2^-24, which is exact in FP32.
static inline float random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t word[4];
    philox(word, seed, stream, index);
    return (float)(word[0] >> 8) * 0x1p-24f;
}

// Draws from the standard normal distribution, by Box and Muller. It computes in double precision,
// so that math libraries that differ in a last bit there give the same FP32 value but for about one
// in 2^28.
static inline float random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t word[4];
    philox(word, seed, stream, index);
    uint64_t bits_0 = (uint64_t)word[0] << 32 | word[1], bits_1 = (uint64_t)word[2] << 32 | word[3];
    double radius_uniform = (double)((bits_0 >> 11) + 1) * 0x1p-53; // in (0, 1]: its logarithm is finite
    double angle_uniform = (double)(bits_1 >> 11) * 0x1p-53;
    return (float)(sqrt(-2 * log(radius_uniform)) * cos(6.283185307179586477 * angle_uniform));
}

// Returns where `index` goes in a shuffle of [0, n), in O(1) memory: a bijection of [0, n) for each
// (seed, stream). n >= 1, index < n, n <= 2^62. A Feistel network permutes [0, 4^half_bits), the
// smallest such range that holds [0, n) and has halves of at least 4 bits (with halves of 2, not
// every order can come up equally often). A value outside [0, n) is permuted again until it falls
// inside, which keeps the bijection and, from n = 256 on, takes under four rounds on average.
static inline uint64_t random_permute(uint64_t seed, uint64_t stream, uint64_t index, uint64_t n) {
    unsigned half_bits = 4;
    while ((n - 1) >> (2 * half_bits) != 0) {
        half_bits++;
    }
    uint64_t mask = ((uint64_t)1 << half_bits) - 1;
    do {
        uint64_t left = index >> half_bits, right = index & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint32_t word[4];
            philox(word, seed, stream, round << 32 | right);
            uint64_t swapped = right;
            right = left ^ (word[0] & mask);
            left = swapped;
        }
        index = left << half_bits | right;
    } while (index >= n);
    return index;
}
