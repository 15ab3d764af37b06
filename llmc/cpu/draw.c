/*
Draws the random numbers that a row's elements are rounded with: encoding_draw's, for a whole part
of a row at once. A counter's four words are in a 64-bit lane each, so that a product of two words
is one instruction's.
*/
#include "quantize.h"
#include "quantize_vectors.h"

#ifdef VECTOR_BYTES

// As philox_round, of a counter in each lane. Upper halves of lanes aren't words' and count for
// nothing.
MX_FUNCTION void longs_philox_round(Longs word[4], uint64_t key, int round) {
    uint32_t keys[2];
    philox_round_key(keys, key, round);
    Longs product_0 = longs_multiply(word[0], PHILOX_MULTIPLIER_0);
    Longs product_1 = longs_multiply(word[2], PHILOX_MULTIPLIER_1);
    word[0] = (product_1 >> 32) ^ word[1] ^ keys[0];
    word[2] = (product_0 >> 32) ^ word[3] ^ keys[1];
    word[1] = product_1;
    word[3] = product_0;
}

// Draws for as many elements as two vectors of counters stand for, since one after the other waits
// for its products.
MX_FUNCTION void draw_together(uint16_t *random, uint64_t key, uint64_t stream, uint64_t counter) {
    enum { VECTORS = 2 };
    Longs word[VECTORS][4], first = {0};
    for (int i = 0; i < LONGS; i++) {
        first[i] = counter + (uint64_t)i;
    }
    for (int v = 0; v < VECTORS; v++) {
        word[v][0] = first + (uint64_t)(v * LONGS);
        word[v][1] = first >> 32;
        word[v][2] = (Longs){0} + stream;
        word[v][3] = (Longs){0} + (stream >> 32);
    }
#pragma GCC unroll 10
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            longs_philox_round(word[v], key, round);
        }
    }
    Longs in_turn[2]; // of two vectors' lanes
    for (int i = 0; i < LONGS; i++) {
        in_turn[0][i] = (uint64_t)(i / 2 + i % 2 * LONGS);
        in_turn[1][i] = in_turn[0][i] + LONGS / 2;
    }
    for (int v = 0; v < VECTORS; v++) {
        Longs lower = (word[v][0] & UINT32_MAX) | word[v][1] << 32,
              upper = (word[v][2] & UINT32_MAX) | word[v][3] << 32;
        for (int i = 0; i < 2; i++) {
            Longs drawn = CPU_SHUFFLE(lower, upper, in_turn[i]);
            memcpy(random + (2 * v + i) * VECTOR_BYTES / 2, &drawn, sizeof(drawn));
        }
    }
}

const uint16_t *draw_row(uint16_t random[TILE_COLS], const Encoding *e, int64_t row, int64_t col) {
    enum { TOGETHER = 2 * LONGS * DRAWN_TOGETHER };
    if (e->rounding != ROUND_STOCHASTIC) return NULL;
    for (int i = 0; i < TILE_COLS; i += TOGETHER) {
        draw_together(random + i, e->at.seed, encoding_stream(e), encoding_counter(e, row, (col + i) / DRAWN_TOGETHER));
    }
    return random;
}

#else

const uint16_t *draw_row(uint16_t random[TILE_COLS], const Encoding *e, int64_t row, int64_t col) {
    if (e->rounding != ROUND_STOCHASTIC) return NULL;
    for (int i = 0; i < TILE_COLS; i += DRAWN_TOGETHER) {
        encoding_draw(random + i, e, row, (col + i) / DRAWN_TOGETHER);
    }
    return random;
}

#endif
