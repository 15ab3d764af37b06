/*
Rounds to elements of formats that a card has no instruction for, with the bits of mx.h and
encoding.h. They are floats here, where those have integers: a multiprocessor of Hopper adds and
multiplies 128 floats a cycle, and does half as many sums and logic of integers.
*/
#pragma once

#include "kernel.cuh"

// A number on its way to an element, as mx_rounding has it.
struct Binade {
    float magnitude; // the largest element's at most
    uint32_t power;  // bits of the power of two that it begins with; a subnormal's is the smallest normal's
};

// Returns the binade in which x is rounded.
static __device__ __forceinline__ Binade find_binade(Format format, float x) {
    MxElement e = mx_element(format);
    float magnitude = fminf(fabsf(x), mx_decode(format, (uint8_t)e.max_code));
    float normal = fmaxf(magnitude, mx_bits_float((127 + 1 - e.bias) << 23));
    return {magnitude, mx_float_bits(normal) & 0x7F800000u};
}

// Returns the magnitude of mx_round_number's value, of a NaN anything.
static __device__ __forceinline__ float round_magnitude(Format format, float x) {
    Binade binade = find_binade(format, x);
    float power = mx_bits_float(binade.power);
    float scale = mx_bits_float((127 + 23 - mx_element(format).mantissa_bits) << 23);
    return fmaf(-power, scale, fmaf(power, scale, binade.magnitude));
}

// Stochastically a magnitude becomes so many steps, of its element's last bit in its binade:
//     (floor(magnitude / step * 2^17) + 2 * random + 1) >> 17
// with 16 random bits. The sum is below 2^23, the mantissa of an FP32 number from 2^23 on, which is
// how it is made and kept.
enum { STEP_BITS = 17 };

struct Stochastic {
    uint32_t power; // of the binade
    uint32_t sum;   // bits of 2^23 plus the sum
};

// Returns a * b + 2^23, rounded down. The product is exact.
static __device__ __forceinline__ float multiply_down(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmaf_rd(a, b, 1u << 23);
#else
    return (float)floor((double)a * (double)b) + (1u << 23);
#endif
}

// Returns what x becomes.
static __device__ __forceinline__ Stochastic round_by_chance(Format format, float x, uint32_t random) {
    Binade binade = find_binade(format, x);
    uint32_t bits = mx_element(format).mantissa_bits + STEP_BITS;
    float parts_of_one = mx_bits_float(((2 * 127 + bits) << 23) - binade.power);
    return {binade.power, mx_float_bits(multiply_down(binade.magnitude, parts_of_one)) + 2 * random + 1};
}

// Returns mx_round_stochastic's value, of a NaN anything.
static __device__ __forceinline__ float round_stochastic(Format format, float x, uint32_t random) {
    Stochastic rounded = round_by_chance(format, x, random);
    float steps = mx_bits_float(rounded.sum >> STEP_BITS << STEP_BITS) - (1u << 23); // in 2^-17
    uint32_t one = rounded.power - ((mx_element(format).mantissa_bits + STEP_BITS) << 23);
    return copysignf(steps * mx_bits_float(one), x);
}

// Returns mx_encode_stochastic's code.
static __device__ __forceinline__ uint32_t encode_stochastic(Format format, float x, uint32_t random) {
    MxElement e = mx_element(format);
    Stochastic rounded = round_by_chance(format, x, random);
    uint32_t steps = (rounded.sum - ((127u + 23) << 23)) >> STEP_BITS;
    uint32_t binades_above = (rounded.power - ((127 + 1 - e.bias) << 23)) >> (23 - e.mantissa_bits);
    uint32_t code = (binades_above + steps) | (mx_float_bits(x) >> 31) << e.sign_bit;
    return mx_magnitude_bits(x) > 0x7F800000u ? e.nan_code : code;
}
