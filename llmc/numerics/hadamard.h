/*
Hadamard transforms of a GEMM's operands before they are quantized: an outlier's magnitude is spread
over its neighbours. As mx.h: the one place that says what they are, usable from C and from CUDA
C++.

Along the dot product, in groups of `size` elements x, rows as vectors:

    x' = x diag(sigma) H / sqrt(size)

H is Sylvester's matrix (H_1 = 1; H_2n is H_n H_n over H_n -H_n) and sigma a vector of signs, the
same for all groups. diag(sigma) H / sqrt(size) is orthogonal, so that the product of two operands
that are both transformed is that of the operands: nothing is transformed back.

All of it is FP32 arithmetic: signs, butterflies of 1, 2, 4, ... apart, each addition rounded to
nearest even, one multiplication by hadamard_factor; then what is stored is rounded to its dtype. A
NaN or an infinity never hides: its group becomes NaN.

What is left of the dot product behind whole groups is cut into powers of two, the largest first,
each a group of its own length that begins with sigma's first sign: of 100 elements in groups of 64
these are 64, 32 and 4.

Sources: arXiv 2509.25149 (NVFP4), whose Transformer Engine takes size 16 and the signs below; arXiv
2502.20586 (MXFP4), which takes size 64 and draws the signs.
*/
#pragma once

#include "mx.h"

enum { HADAMARD_LARGEST = 128 };

typedef struct {
    int64_t size; // of a group, a power of two from 16 to HADAMARD_LARGEST; 0: no transform
    // Bit i % 32 of word i / 32: sigma's element i is -1.
    uint32_t minus[HADAMARD_LARGEST / 32];
} Hadamard;

// Returns the transform with Transformer Engine's signs + + + - + - - - - - - + - + - -, which
// larger groups repeat.
static inline Hadamard hadamard_fixed(int64_t size) {
    const uint32_t twice = 0xD7E8D7E8u;
    Hadamard h = {size, {twice, twice, twice, twice}};
    return h;
}

// Returns the bit that flips the sign of a group's element i, where sigma says so.
MX_FUNCTION uint32_t hadamard_sign(const Hadamard *h, int64_t i) { return (h->minus[i / 32] >> (i % 32)) << 31; }

// Returns the length of the group that begins where `left` elements are left, at least one.
MX_FUNCTION int64_t hadamard_length(int64_t size, int64_t left) {
    int64_t length = size;
    while (length > left) {
        length /= 2;
    }
    return length;
}

// Returns 1 / sqrt(length) for powers of two up to HADAMARD_LARGEST.
MX_FUNCTION float hadamard_factor(int64_t length) {
    float factor = 1;
    for (; length >= 4; length /= 4) {
        factor *= 0.5f;
    }
    return length == 2 ? factor * 0.70710678f : factor;
}

// Transforms a group, `stride` apart, in place.
MX_FUNCTION void hadamard_group(float *x, int64_t length, int64_t stride, const Hadamard *h) {
    float factor = hadamard_factor(length);
    for (int64_t i = 0; i < length; i++) {
        x[i * stride] = mx_bits_float(mx_float_bits(x[i * stride]) ^ hadamard_sign(h, i));
    }
    for (int64_t apart = 1; apart < length; apart *= 2) {
        for (int64_t i = 0; i < length; i++) {
            float *a = x + i * stride, *b = a + apart * stride, low = *a;
            if (i & apart) continue;
            *a = low + *b;
            *b = low - *b;
        }
    }
    for (int64_t i = 0; i < length; i++) {
        x[i * stride] *= factor;
    }
}
