// The roundings of kernels (rounding.cuh), compared with those of mx.h and encoding.h.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
extern "C" {
#include <cmocka.h>
}
#include "llmc/cuda/rounding.cuh"
#include "llmc/numerics/encoding.h"

static bool is_nan(float x) { return mx_magnitude_bits(x) > 0x7F800000u; }

// Calls with numbers of every exponent and both signs, infinities and NaN among them: each mantissa
// of eight bits, and what lies around it and around halves of 2^-16 of an element's last bit.
template <typename Call> static void for_numbers(Call call) {
    static const uint32_t BELOW[] = {0,    1,    2,      0x10,   0x1F,   0x20,   0x21,
                                     0x3F, 0x40, 0x2AAA, 0x3FFF, 0x4000, 0x4001, 0x7FFF};
    for (uint32_t top = 0; top < 1u << 17; top++) {
        for (uint32_t below : BELOW) {
            call(mx_bits_float(top << 15 | below));
        }
    }
}

static void test_round_magnitude(void **state) {
    (void)state;
    for (int f = FIRST_MX_FORMAT; f < NUM_FORMATS; f++) {
        Format format = (Format)f;
        for_numbers([&](float x) {
            float expected = mx_round_number(format, x), rounded = round_magnitude(format, x);
            if (is_nan(x) || mx_float_bits(rounded) == mx_magnitude_bits(expected)) return;
            fail_msg("format %d: %a is rounded to %a, not %a", f, x, rounded, expected);
        });
    }
}

static void test_stochastic(void **state) {
    (void)state;
    static const uint32_t RANDOM[] = {0, 1, 2, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF};
    for (int f = FIRST_MX_FORMAT; f < NUM_FORMATS; f++) {
        Format format = (Format)f;
        for_numbers([&](float x) {
            for (uint32_t random : RANDOM) {
                float expected = mx_round_stochastic(format, x, random), value = round_stochastic(format, x, random);
                uint32_t code = mx_encode_stochastic(format, x, random);
                if (encode_stochastic(format, x, random) != code) {
                    fail_msg("format %d, random %X: %a doesn't become code %X", f, random, x, code);
                }
                if (is_nan(x) || mx_float_bits(value) == mx_float_bits(expected)) continue;
                fail_msg("format %d, random %X: %a becomes %a, not %a", f, random, x, value, expected);
            }
        });
    }
}

int main() {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_round_magnitude), cmocka_unit_test(test_stochastic)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
