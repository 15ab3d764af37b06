/*
llmc/numerics/mx.h against ml_dtypes' tables, NVIDIA's host conversions (where a CUDA toolkit is)
and the definitions in exact arithmetic: see mx_reference.h. Samples are dense; test_mx_exhaustive.c
makes the same comparisons on every input.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <float.h>
#include "mx_reference.h"
#include "llmc/numerics/scaling.h"

// A stride through all bit patterns, prime so that the low bits vary.
enum { ELEMENT_STRIDE = 61, SCALE_STRIDE = 1009, ULPS = 4 };

#define FOR_EACH_FORMAT(format) for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++)
#define FOR_EACH_ROUNDING(rounding) \
    for (ScaleRounding rounding = SCALE_RCEIL; rounding < NUM_SCALE_ROUNDINGS; rounding++)

static uint32_t float_bits(double x) { return mx_float_bits((float)x); }

static void check_encode(Format format, uint32_t bits) {
    uint8_t expected = reference_code(format, bits), code = mx_encode(format, mx_bits_float(bits));
    if (code != expected) {
        fail_msg("%s: encode(0x%08X) is 0x%02X, not 0x%02X", reference_table(format)->name, bits, code, expected);
    }
#if HAVE_CUDA_FP8
    uint8_t cuda = cuda_code(format, mx_bits_float(bits));
    if (code != cuda) {
        fail_msg("%s: encode(0x%08X) is 0x%02X, CUDA's 0x%02X", reference_table(format)->name, bits, code, cuda);
    }
#endif
}

// What a value is rounded to is the table's value of its code.
static void check_round(Format format, uint32_t bits) {
    float expected = mx_bits_float(reference_table(format)->values[reference_code(format, bits)]);
    float rounded = mx_round(format, mx_bits_float(bits));
    bool same = isnan(expected) ? isnan(rounded) : mx_float_bits(rounded) == mx_float_bits(expected);
    if (!same) fail_msg("%s: round(0x%08X) is %g, not %g", reference_table(format)->name, bits, rounded, expected);
}

// The bit patterns within a few ulp of `bits`, with either sign.
static void check_encode_around(Format format, uint32_t bits) {
    for (uint32_t ulp = 0; ulp <= 2 * ULPS; ulp++) {
        uint32_t magnitude = bits + ulp < ULPS ? 0 : bits + ulp - ULPS;
        check_encode(format, magnitude);
        check_encode(format, magnitude | 0x80000000u);
        check_round(format, magnitude);
        check_round(format, magnitude | 0x80000000u);
    }
}

static void test_every_code_decodes(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        const MxTable *table = reference_table(format);
        for (int code = 0; code < 256; code++) { // the bits above a narrow format are ignored
            uint32_t bits = mx_float_bits(mx_decode(format, (uint8_t)code));
            if (bits != table->values[code % table->num_codes]) {
                fail_msg("%s: decode(0x%02X) is 0x%08X, not 0x%08X", table->name, code, bits,
                         table->values[code % table->num_codes]);
            }
        }
    }
}

static void test_every_code_encodes_to_itself(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        const MxTable *table = reference_table(format);
        for (int code = 0; code < table->num_codes; code++) {
            float value = mx_bits_float(table->values[code]);
            int sign = code & table->num_codes / 2;
            int expected = isnan(value) ? 0x7F : isinf(value) ? table->max_code | sign : code;
            assert_int_equal(mx_encode(format, value), expected);
        }
    }
}

static void test_ties_go_to_even(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        const MxTable *table = reference_table(format);
        for (int code = 1; code <= table->max_code; code++) {
            float below = mx_bits_float(table->values[code - 1]), above = mx_bits_float(table->values[code]);
            float middle = (below + above) / 2; // exact
            int even = code % 2 == 0 ? code : code - 1;
            assert_int_equal(mx_encode(format, middle), even);
            assert_int_equal(mx_encode(format, -middle), even | table->num_codes / 2);
            assert_int_equal(mx_encode(format, nextafterf(middle, 0)), code - 1);
            assert_int_equal(mx_encode(format, nextafterf(middle, INFINITY)), code);
        }
    }
}

static void test_encode_special_values(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        const MxTable *table = reference_table(format);
        int max = table->max_code, sign = table->num_codes / 2;
        int nan = table->num_codes == 256 ? 0x7F : max;
        assert_int_equal(mx_encode(format, 0.0f), 0);
        assert_int_equal(mx_encode(format, -0.0f), sign);
        assert_int_equal(mx_encode(format, FLT_TRUE_MIN), 0);
        assert_int_equal(mx_encode(format, -FLT_TRUE_MIN), sign);
        assert_int_equal(mx_encode(format, FLT_MAX), max);
        assert_int_equal(mx_encode(format, -FLT_MAX), max | sign);
        assert_int_equal(mx_encode(format, INFINITY), max);
        assert_int_equal(mx_encode(format, -INFINITY), max | sign);
        assert_int_equal(mx_encode(format, mx_bits_float(0x7FC00000)), nan);
        assert_int_equal(mx_encode(format, mx_bits_float(0xFFFFFFFF)), nan);
        assert_int_equal(mx_encode(format, mx_bits_float(0x7F800001)), nan); // signalling
        static const uint32_t SPECIAL[] = {0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001};
        for (size_t i = 0; i < sizeof(SPECIAL) / sizeof(SPECIAL[0]); i++) {
            check_round(format, SPECIAL[i]);
        }
    }
}

static void test_encode_near_values_and_midpoints(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        const MxTable *table = reference_table(format);
        for (int code = 0; code <= table->max_code; code++) {
            check_encode_around(format, table->values[code]);
            if (code > 0) check_encode_around(format, table->thresholds[code - 1]);
        }
        check_encode_around(format, 0x00800000); // FP32's smallest normal
        check_encode_around(format, INFINITY_BITS);
    }
}

static int64_t count_encode_mismatches(Format format) {
    int64_t mismatches = 0;
#pragma omp parallel for reduction(+ : mismatches)
    for (int64_t bits = 0; bits < INT64_C(1) << 32; bits += ELEMENT_STRIDE) {
        uint8_t code = mx_encode(format, mx_bits_float((uint32_t)bits));
        mismatches += code != reference_code(format, (uint32_t)bits);
#if HAVE_CUDA_FP8
        mismatches += code != cuda_code(format, mx_bits_float((uint32_t)bits));
#endif
    }
    return mismatches;
}

static void test_encode_dense_sample(void **state) {
    (void)state;
    print_message("every %d-th FP32 bit pattern against ml_dtypes%s\n", ELEMENT_STRIDE,
                  HAVE_CUDA_FP8 ? " and CUDA's host conversions" : " (no CUDA headers here)");
    FOR_EACH_FORMAT(format) { assert_int_equal(count_encode_mismatches(format), 0); }
}

static void test_scale_values_and_reciprocals(void **state) {
    (void)state;
    for (int code = 0; code < 256; code++) {
        assert_int_equal(mx_float_bits(mx_scale_value((uint8_t)code)), e8m0_values[code]);
        assert_true(mx_scale_reciprocal((uint8_t)code) == ldexp(1, 127 - code));
    }
}

// The definitions, from the value: amax = 2^A m_a with 1 <= m_a < 2, max = 2^E m_e.
static int scale_code_by_definition(Format format, ScaleRounding rounding, float amax) {
    if (!isfinite(amax)) return MX_SCALE_NAN;
    if (amax == 0) return 0;
    double max = reference_max(format);
    int A = ilogb(amax), E = ilogb(max);
    double m_a = ldexp(amax, -A), m_e = ldexp(max, -E);
    int code = A - E + 127;
    if (rounding == SCALE_RCEIL) code += m_a > m_e;
    // NVIDIA's quotient is an FP32 number: the amax that follows max * 2^-127 gives 2^-127 itself.
    if (rounding == SCALE_RCEIL && amax == nextafterf((float)ldexp(max, -127), 1)) code = 0;
    if (rounding == SCALE_CEIL) code += m_a > 1;
    if (rounding == SCALE_EVEN) {
        double steps = ldexp(1, reference_table(format)->mantissa_bits);
        code += floor(m_a * steps + 0.5) / steps >= 2;
    }
    return code < 0 ? 0 : code;
}

static void check_scale_code(Format format, ScaleRounding rounding, uint32_t amax_bits) {
    float amax = mx_bits_float(amax_bits);
    int code = mx_scale_code(format, rounding, amax_bits);
    int expected = scale_code_by_definition(format, rounding, amax);
    if (code != expected) {
        fail_msg("%s, rounding %d: the scale code of amax 0x%08X is %d, not %d", reference_table(format)->name,
                 (int)rounding, amax_bits, code, expected);
    }
#if HAVE_CUDA_FP8
    if (rounding != SCALE_EVEN && amax_bits < INFINITY_BITS) {
        assert_int_equal(code, cuda_scale_code(format, rounding, amax));
    }
#endif
}

static void test_scale_codes_at_thresholds(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        FOR_EACH_ROUNDING(rounding) {
            for (int code = 1; code < 255; code++) {
                uint32_t threshold = reference_scale_threshold(format, rounding, code);
                if (threshold == INFINITY_BITS) break;
                assert_int_equal(mx_scale_code(format, rounding, threshold - 1), code - 1);
                assert_int_equal(mx_scale_code(format, rounding, threshold), code);
                check_scale_code(format, rounding, threshold - 1);
                check_scale_code(format, rounding, threshold);
                check_scale_code(format, rounding, threshold + 1);
            }
        }
    }
}

static void test_scale_codes_of_special_amax(void **state) {
    (void)state;
    const uint32_t amax_bits[] = {0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF};
    FOR_EACH_FORMAT(format) {
        FOR_EACH_ROUNDING(rounding) {
            for (size_t i = 0; i < sizeof(amax_bits) / sizeof(amax_bits[0]); i++) {
                check_scale_code(format, rounding, amax_bits[i]);
            }
        }
    }
}

static void test_scale_codes_dense_sample(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        FOR_EACH_ROUNDING(rounding) {
            for (uint32_t bits = 0; bits < 0x80000000u; bits += SCALE_STRIDE) {
                check_scale_code(format, rounding, bits);
            }
        }
    }
}

// The power of two at or above an FP32 quotient, as the implementations in use compute rceil.
static int code_of_quotient(float quotient) {
    int exponent;
    double fraction = frexp(quotient, &exponent); // in [0.5, 1)
    int code = exponent + 127 - (fraction == 0.5);
    return quotient == 0 || code < 0 ? 0 : code;
}

// amax / max and amax * (1 / max) in FP32 give rceil's code, also for max * 2^-127 + 1 ulp, where
// both lose the ulp.
static void test_rceil_is_the_fp32_quotient_rounded_up(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        float max = (float)reference_max(format);
        float reciprocal = (float)(1.0 / reference_max(format));
        uint32_t exception = float_bits(ldexp(max, -127)) + 1;
        assert_int_equal(mx_scale_code(format, SCALE_RCEIL, exception), 0);
        assert_int_equal(mx_scale_code(format, SCALE_RCEIL, exception + 1), 1);
        assert_int_equal(mx_scale_code(format, SCALE_FLOOR, exception), 0);
        assert_int_equal(mx_scale_code(format, SCALE_CEIL, exception), 1);
        assert_int_equal(code_of_quotient(mx_bits_float(exception) / max), 0);
        assert_int_equal(code_of_quotient(mx_bits_float(exception) * reciprocal), 0);

        for (uint32_t bits = 0; bits < INFINITY_BITS; bits += SCALE_STRIDE) {
            int code = mx_scale_code(format, SCALE_RCEIL, bits);
            assert_int_equal(code_of_quotient(mx_bits_float(bits) / max), code);
            assert_int_equal(code_of_quotient(mx_bits_float(bits) * reciprocal), code);
        }
        for (int code = 1; code < 255; code++) {
            uint32_t threshold = reference_scale_threshold(format, SCALE_RCEIL, code);
            if (threshold == INFINITY_BITS) break;
            for (uint32_t bits = threshold - 1; bits <= threshold + 1; bits++) {
                int rceil = mx_scale_code(format, SCALE_RCEIL, bits);
                assert_int_equal(code_of_quotient(mx_bits_float(bits) / max), rceil);
                assert_int_equal(code_of_quotient(mx_bits_float(bits) * reciprocal), rceil);
            }
        }
    }
}

static void check_never_clamps(Format format, uint32_t amax_bits) {
    double amax = mx_bits_float(amax_bits), max = reference_max(format);
    int rceil = mx_scale_code(format, SCALE_RCEIL, amax_bits), floored = mx_scale_code(format, SCALE_FLOOR, amax_bits);
    bool is_exception = amax == nextafterf((float)ldexp(max, -127), 1); // an ulp over max * scale
    assert_true(amax <= ldexp(max, rceil - 127) || is_exception);
    int bumped = floored + (amax > ldexp(max, floored - 127) && !is_exception);
    assert_int_equal(bumped, rceil);
}

// And the mechanistic-analysis paper's "bump exponent", floor's code + 1 where amax is over max *
// scale, is rceil.
static void test_rceil_never_clamps_and_is_bump_exponent(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        for (uint32_t bits = 0; bits < INFINITY_BITS; bits += SCALE_STRIDE) {
            check_never_clamps(format, bits);
        }
        for (int code = 1; code < 255; code++) {
            uint32_t threshold = reference_scale_threshold(format, SCALE_RCEIL, code);
            if (threshold == INFINITY_BITS) break;
            check_never_clamps(format, threshold - 1);
            check_never_clamps(format, threshold);
        }
        check_never_clamps(format, INFINITY_BITS - 1);
    }
}

static float quantized(Format format, ScaleRounding rounding, float amax, float value) {
    uint8_t scale = mx_scale_code(format, rounding, mx_magnitude_bits(amax));
    return mx_decode(format, mx_encode(format, value * mx_scale_reciprocal(scale))) * mx_scale_value(scale);
}

// arXiv 2506.20752: layernorm weights close together under 1 all fall on E4M3's largest value with
// OCP's scale.
static void test_example_layernorm_weights(void **state) {
    (void)state;
    const float weights[] = {0.89740956f, 0.89628334f, 0.88358812f, 0.88474816f, 0.90372837f};
    uint32_t amax_bits = mx_magnitude_bits(weights[4]);
    assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_FLOOR, amax_bits), 127 - 9);
    assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_RCEIL, amax_bits), 127 - 8);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(mx_encode(FORMAT_E4M3, weights[i] * 512), 0x7E);
        assert_true(quantized(FORMAT_E4M3, SCALE_FLOOR, weights[4], weights[i]) == 0.875f);
        // 0.883... to 0.903... lie between E4M3's 224/256 and 240/256; with a scale of 2^-8 the
        // nearest is found.
        float nearest = weights[i] < 232.0f / 256 ? 0.875f : 0.9375f;
        assert_true(quantized(FORMAT_E4M3, SCALE_RCEIL, weights[4], weights[i]) == nearest);
        assert_true(mx_encode(FORMAT_E4M3, weights[i] * 256) < 0x7E);
    }
}

// OCP's X is floor(log2 amax) - emax: with an amax of 500 the scale is 1 and 500 becomes 448;
// rceil's is 2 and it becomes 512 (E4M3's step at 250 is 16: 250 -> 256).
static void test_example_floor_against_rceil(void **state) {
    (void)state;
    uint32_t amax_bits = float_bits(500);
    assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_FLOOR, amax_bits), 127);
    assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_EVEN, amax_bits), 128); // 1.953 * 2^8 rounds to 2^9
    assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_RCEIL, amax_bits), 128);
    assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_CEIL, amax_bits), 128);
    assert_true(quantized(FORMAT_E4M3, SCALE_FLOOR, 500, 500) == 448);
    assert_true(quantized(FORMAT_E4M3, SCALE_RCEIL, 500, 500) == 512);
    // At max itself only `ceil` goes up.
    assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_RCEIL, float_bits(448)), 127);
    assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_CEIL, float_bits(448)), 128);
}

// Under floor a value is clamped when |v| > (1.75 / m_a) amax, which needs m_a > 1.75.
static void test_example_clamping_threshold(void **state) {
    (void)state;
    for (int i = 0; i < 256; i++) {
        float amax = 1 + (float)i / 256; // m_a itself
        double scaled_max = ldexp(448, mx_scale_code(FORMAT_E4M3, SCALE_FLOOR, float_bits(amax)) - 127);
        double threshold = 1.75 / amax * amax;
        assert_true(fabs(scaled_max - threshold) <= 2 * DBL_EPSILON * threshold); // two roundings
        assert_int_equal(amax > scaled_max, amax > 1.75f);
    }
}

// Of log-uniform amax, log2(2 / m_e) differ. The sum of the log-widths of the differing FP32
// intervals of a binade telescopes to that, up to one interval (2^-23 log2 e) and the sum's
// rounding (2^23 DBL_EPSILON).
static void test_fraction_of_blocks_where_floor_differs(void **state) {
    (void)state;
    const double published[] = {0.1926, 0.1926, 0.0931, 0.1926, 0.415};
    FOR_EACH_FORMAT(format) {
        double fraction = 0;
        for (uint32_t mantissa = 0; mantissa < 1u << 23; mantissa++) {
            uint32_t bits = float_bits(1) + mantissa;
            if (mx_scale_code(format, SCALE_FLOOR, bits) != mx_scale_code(format, SCALE_RCEIL, bits)) {
                fraction += log1p(1.0 / (double)((1u << 23) + mantissa)) * M_LOG2E;
            }
        }
        double max = reference_max(format);
        double exact = 1 - log2(ldexp(max, -ilogb(max)));
        double tolerance = ldexp(M_LOG2E, -23) + ldexp(DBL_EPSILON, 23);
        print_message("%s: floor and rceil differ in %.4f %% of blocks (error %.1e, tolerance %.1e)\n",
                      reference_table(format)->name, 100 * fraction, fabs(fraction - exact), tolerance);
        assert_true(fabs(fraction - exact) <= tolerance);
        assert_true(fabs(fraction - published[format - FIRST_MX_FORMAT]) < 0.0001); // printed to 2 decimals
    }
}

// rceil of an amax of at least 248 * 2^120 decodes to Inf, since E4M3 rounds it to 256 * 2^120;
// floor stays finite.
static void test_largest_amax(void **state) {
    (void)state;
    float limit = (float)ldexp(248, 120);
    assert_true(isinf(quantized(FORMAT_E4M3, SCALE_RCEIL, limit, limit)));
    assert_true(isinf(quantized(FORMAT_E4M3, SCALE_RCEIL, FLT_MAX, FLT_MAX)));
    float below = nextafterf(limit, 0);
    assert_true(quantized(FORMAT_E4M3, SCALE_RCEIL, below, below) == ldexp(240, 120));
    assert_true(quantized(FORMAT_E4M3, SCALE_FLOOR, FLT_MAX, FLT_MAX) == ldexp(448, 119));
}

// The scale codes with which every element decodes to a BF16 value: what makes an emulated GEMM's
// addends exact.
static void test_decoded_values_are_bf16(void **state) {
    (void)state;
    const int first[] = {3, 10, 0, 0, 0}, last[] = {246, 239, 252, 250, 252};
    FOR_EACH_FORMAT(format) {
        const MxTable *table = reference_table(format);
        for (int scale = 0; scale < 255; scale++) {
            bool exact = true;
            for (int code = 0; code <= table->max_code; code++) {
                double value = ldexp(mx_bits_float(table->values[code]), scale - 127);
                float decoded = mx_decode(format, (uint8_t)code) * mx_scale_value((uint8_t)scale);
                exact = exact && (double)mx_from_bf16(mx_to_bf16(decoded)) == value;
            }
            int row = (int)(format - FIRST_MX_FORMAT);
            assert_int_equal(exact, scale >= first[row] && scale <= last[row]);
        }
    }
}

// FP32 -> BF16 -> E4M3 differs from FP32 -> E4M3 for 1 mantissa in 32: 1 in 16 rounds to a tie,
// half of these wrongly. In each of a binade's 8 steps the ties' ends and the tie itself make up to
// 2 patterns' difference.
static void test_double_rounding_through_bf16(void **state) {
    (void)state;
    int differ = 0;
    for (uint32_t bits = float_bits(1); bits < float_bits(2); bits++) {
        float x = mx_bits_float(bits);
        differ += mx_encode(FORMAT_E4M3, x) != mx_encode(FORMAT_E4M3, mx_from_bf16(mx_to_bf16(x)));
    }
    int expected = (1 << 23) / 32;
    print_message("double rounding: %d of 2^23 differ, expected %d +- 16\n", differ, expected);
    assert_in_range(differ, expected - 16, expected + 16);
}

// Checks every element, of both signs, that a block whose largest is `largest` can have.
static void check_kept_through_bf16(ScaleRounding rounding, uint8_t scale, uint8_t largest) {
    float amax = mx_decode(FORMAT_E4M3, largest) * mx_scale_value(scale);
    for (int code = 0; code <= largest; code++) {
        for (int sign = -1; sign <= 1; sign += 2) {
            float decoded = (float)sign * mx_decode(FORMAT_E4M3, (uint8_t)code) * mx_scale_value(scale);
            float value = mx_from_bf16(mx_to_bf16(decoded)), again = quantized(FORMAT_E4M3, rounding, amax, value);
            if (value == decoded && again == decoded) continue;
            fail_msg("rounding %d, amax %g: %g becomes %g in BF16 and then %g", (int)rounding, (double)amax,
                     (double)decoded, (double)value, (double)again);
        }
    }
}

// Quantizing again what BF16 holds of MXFP8 keeps every value of a block, whatever its scale. Under
// rceil the scale of a block moves by one where its largest element became one of at most max / 2:
// those whose amax lies between max / 2 and what rounds up to the element above it, log2((max / 2 +
// half a step) / (max / 2)) of log-uniform amaxes. Under floor no scale moves.
static void test_mxfp8_again_through_bf16(void **state) {
    (void)state;
    enum { BLOCKS = 1 << 16 };
    int moved[NUM_SCALE_ROUNDINGS] = {0}, kinds = 0;
    FOR_EACH_ROUNDING(rounding) {
        uint8_t last_scale = 0, last_element = 0;
        for (int i = 0; i < BLOCKS; i++) {
            float amax = (float)exp2((i + 0.5) / BLOCKS);
            uint8_t scale = mx_scale_code(FORMAT_E4M3, rounding, float_bits(amax));
            uint8_t element = mx_encode(FORMAT_E4M3, amax * mx_scale_reciprocal(scale));
            float decoded = mx_decode(FORMAT_E4M3, element) * mx_scale_value(scale);
            uint8_t again = mx_scale_code(FORMAT_E4M3, rounding, float_bits(mx_from_bf16(mx_to_bf16(decoded))));
            if (scale != last_scale || element != last_element) check_kept_through_bf16(rounding, scale, element);
            kinds += scale != last_scale || element != last_element;
            last_scale = scale;
            last_element = element;
            moved[rounding] += again != scale;
            assert_true(rounding != SCALE_RCEIL || again == scale || again == scale - 1);
        }
    }
    print_message("MXFP8 twice: every element of %d kinds of blocks keeps its value\n", kinds);
    assert_in_range(kinds, NUM_SCALE_ROUNDINGS * 8, NUM_SCALE_ROUNDINGS * 18); // amaxes of a binade, by element
    double fraction = (double)moved[SCALE_RCEIL] / BLOCKS, expected = log2(232.0 / 224);
    double tolerance = 2.0 / BLOCKS; // an amax at either end of the interval
    print_message("MXFP8 twice: rceil moves %.4f %% of scales, expected %.4f %% +- %.4f\n", 100 * fraction,
                  100 * expected, 100 * tolerance);
    assert_true(fabs(fraction - expected) <= tolerance);
    assert_int_equal(moved[SCALE_FLOOR], 0);
}

// Returns the BF16 value nearest to `exact`, which lies below the largest one or far above it.
static float nearest_bf16(double exact) {
    int exponent;
    frexp(exact, &exponent);
    double step = ldexp(1, (exponent < -125 ? -125 : exponent) - 8); // subnormals share theirs
    double rounded = rint(exact / step) * step;
    return fabs(rounded) < 0x1p128 ? (float)rounded : (float)copysign(INFINITY, exact);
}

// What a GPU's quantizer relies on, which scales pairs of BF16 in BF16: every BF16 value times the
// reciprocal of every scale has the code of the exact product once it is rounded to BF16, too, and
// the reciprocals and the scales are BF16.
static void test_scaling_in_bf16(void **state) {
    (void)state;
    int differ = 0, rounded = 0;
    for (int scale = 0; scale < 256; scale++) {
        float reciprocal = mx_scale_reciprocal((uint8_t)scale);
        assert_int_equal(float_bits(reciprocal) & 0xFFFF, 0);
        assert_int_equal(float_bits(mx_scale_value((uint8_t)scale)) & 0xFFFF, 0);
        for (uint32_t bits = 0; bits < 0x10000; bits++) {
            float x = mx_from_bf16((uint16_t)bits), scaled = x * reciprocal;
            double exact = (double)x * reciprocal;
            if (isnan(x) || ((double)scaled == exact && (float_bits(scaled) & 0xFFFF) == 0)) continue;
            rounded++;
            float in_bf16 = nearest_bf16(exact);
            FOR_EACH_FORMAT(format) { differ += mx_encode(format, scaled) != mx_encode(format, in_bf16); }
        }
    }
    print_message("scaled in BF16: %d of 2^24 products are rounded, %d codes differ\n", rounded, differ);
    assert_true(rounded > 0);
    assert_int_equal(differ, 0);
}

// The same of decoding: an element's value times its scale, rounded once to BF16.
static void test_decoding_in_bf16(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        const MxTable *table = reference_table(format);
        for (int scale = 0; scale < 255; scale++) {
            for (int code = 0; code <= table->max_code; code++) {
                float element = mx_decode(format, (uint8_t)code), value = mx_scale_value((uint8_t)scale);
                float in_fp32 = mx_from_bf16(mx_to_bf16(element * value));
                assert_int_equal(float_bits(element) & 0xFFFF, 0);
                assert_int_equal(float_bits(in_fp32), float_bits(nearest_bf16((double)element * value)));
            }
        }
    }
}

// Every upper half of an FP32, with the lower halves where rounding turns: the nearest of the two
// neighbours, by distance in double; halfway, the even one.
static void test_bf16_conversion(void **state) {
    (void)state;
    const uint32_t lower_halves[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    for (uint32_t high = 0; high < 0x10000; high++) {
        assert_int_equal(mx_float_bits(mx_from_bf16((uint16_t)high)), high << 16);
        for (int i = 0; i < 6; i++) {
            float x = mx_bits_float(high << 16 | lower_halves[i]);
            uint16_t rounded = mx_to_bf16(x);
            if (isnan(x)) {
                assert_true(isnan(mx_from_bf16(rounded)) && (rounded & 0x40)); // quiet
                continue;
            }
            assert_int_equal(rounded >> 15, high >> 15);
            if (isinf(x)) {
                assert_int_equal(rounded, high);
                continue;
            }
            // Beyond the largest finite BF16 value comes 2^128, of which to round to it makes Inf.
            double below = fabs((double)mx_bits_float((high & 0x7FFF) << 16));
            double above = (high & 0x7FFF) == 0x7F7F ? 0x1p128 : (double)mx_bits_float(((high & 0x7FFF) + 1) << 16);
            double magnitude = fabs((double)x), to_below = magnitude - below, to_above = above - magnitude;
            bool up = to_above < to_below || (to_above == to_below && high % 2 == 1);
            assert_int_equal(rounded, high + up);
        }
    }
}

static void test_scale_counts(void **state) {
    (void)state;
    assert_int_equal(mx_num_blocks(0), 0);
    assert_int_equal(mx_num_blocks(1), 1);
    assert_int_equal(mx_num_blocks(32), 1);
    assert_int_equal(mx_num_blocks(33), 2);
    assert_int_equal(mx_num_scales(AXIS_ROWWISE, 5, 65), 15);
    assert_int_equal(mx_num_scales(AXIS_COLUMNWISE, 65, 5), 15);
    assert_int_equal(mx_num_scales(AXIS_SQUARE, 1, 1), 1);
    assert_int_equal(mx_num_scales(AXIS_SQUARE, 64, 96), 6);
    assert_int_equal(mx_num_scales(AXIS_SQUARE, 65, 97), 12);
    assert_int_equal(mx_num_scales(AXIS_SQUARE, 0, 97), 0);
}

// Blocks in row-major order, elements of each: their scale is the number of the block.
static void check_scale_offsets(Axis axis, int64_t rows, int64_t cols) {
    int64_t height = axis == AXIS_ROWWISE ? 1 : 32, width = axis == AXIS_COLUMNWISE ? 1 : 32, block = 0;
    for (int64_t row = 0; row < rows; row += height) {
        for (int64_t col = 0; col < cols; col += width, block++) {
            for (int64_t i = 0; i < height * width; i++) {
                int64_t r = row + i / width, c = col + i % width;
                if (r < rows && c < cols) assert_int_equal(mx_scale_offset(axis, r, c, cols), block);
            }
        }
    }
    assert_int_equal(mx_num_scales(axis, rows, cols), block);
}

static void test_scale_offsets(void **state) {
    (void)state;
    static const int64_t SHAPES[][2] = {{1, 1}, {1, 65}, {31, 33}, {32, 32}, {33, 64}, {95, 96}, {257, 48}, {64, 1}};
    for (size_t i = 0; i < sizeof(SHAPES) / sizeof(SHAPES[0]); i++) {
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
            check_scale_offsets(axis, SHAPES[i][0], SHAPES[i][1]);
        }
    }
}

// The layout as nested loops over its bytes: tiles of 128 x 4, tiles along K next to each other; in
// a tile 32 rows of 16 bytes, each of 4 groups (rows 32 apart) of 4 blocks. Counting the bytes
// shows that no two scales share one.
static void check_swizzled_layout(int64_t outer_count, int64_t k) {
    int64_t blocks = (k + 31) / 32, bytes = 0;
    for (int64_t tile_row = 0; tile_row * 128 < outer_count; tile_row++) {
        for (int64_t tile_col = 0; tile_col * 4 < blocks; tile_col++) {
            for (int64_t row = 0; row < 32; row++) {
                for (int64_t group = 0; group < 4; group++) {
                    for (int64_t col = 0; col < 4; col++, bytes++) {
                        int64_t outer = tile_row * 128 + group * 32 + row, block = tile_col * 4 + col;
                        assert_int_equal(mx_swizzled_scale_offset(outer, block, k), bytes);
                    }
                }
            }
        }
    }
    assert_int_equal(mx_swizzled_scale_bytes(outer_count, k), bytes);
}

static void test_swizzled_layout(void **state) {
    (void)state;
    const int64_t outer_counts[] = {1, 32, 127, 128, 129, 768}, ks[] = {1, 32, 96, 127, 128, 129, 160, 2304};
    for (int i = 0; i < 6; i++) {
        for (int j = 0; j < 8; j++) {
            check_swizzled_layout(outer_counts[i], ks[j]);
        }
    }
}

// Four over six divides by 6 * 256: the quotient that a GPU makes without a division is the
// division's, of every mantissa, at the ends of the range that it is for and in between.
static void test_quotient_of_four_over_six(void **state) {
    (void)state;
    static const int EXPONENTS[] = {-99, -98, -1, 0, 1, 2, 111};
    for (size_t i = 0; i < sizeof(EXPONENTS) / sizeof(EXPONENTS[0]); i++) {
        for (uint32_t mantissa = 0; mantissa < 1u << 23; mantissa++) {
            float x = mx_bits_float((uint32_t)(127 + EXPONENTS[i]) << 23 | mantissa);
            if (scaling_46_quotient(x) == x / 1536.0f) continue;
            fail_msg("%a / 1536 is %a, not %a", x, x / 1536.0f, scaling_46_quotient(x));
        }
    }
    assert_true(scaling_46_quotient(0) == 0);
    // The other is the division's of every small number, subnormal ones and subnormal quotients
    // among them, of every mantissa at 1, and of the largest.
    static const uint32_t RANGES[][2] = {{0, 14u << 23}, {127u << 23, 128u << 23}, {253u << 23, (255u << 23) + 1}};
    for (size_t i = 0; i < sizeof(RANGES) / sizeof(RANGES[0]); i++) {
        for (uint32_t bits = RANGES[i][0]; bits < RANGES[i][1]; bits++) {
            float x = mx_bits_float(bits), quotient = scaling_46_quotient_of_any(x);
            if (mx_float_bits(quotient) == mx_float_bits(x / 1536.0f)) continue;
            fail_msg("%a / 1536 is %a, not %a", x, x / 1536.0f, quotient);
        }
    }
    assert_true(isnan(scaling_46_quotient_of_any(NAN)));
    // The least that is divided in a moderate tensor is half of E4M3's least scale times its amax.
    assert_false(scaling_46_is_moderate(mx_float_bits(0x1p-81f)) || scaling_46_is_moderate(mx_float_bits(0x1p100f)));
    assert_true(scaling_46_is_moderate(mx_float_bits(0x1p-80f)) && 0x1p-80 * 0x1p-10 >= 0x1p-99);
    assert_true(scaling_46_is_moderate(mx_float_bits(0x1.fffffep99f)) && 0x1p100 * 6 * 448 <= 0x1p112);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_code_decodes),
        cmocka_unit_test(test_every_code_encodes_to_itself),
        cmocka_unit_test(test_ties_go_to_even),
        cmocka_unit_test(test_encode_special_values),
        cmocka_unit_test(test_encode_near_values_and_midpoints),
        cmocka_unit_test(test_encode_dense_sample),
        cmocka_unit_test(test_scale_values_and_reciprocals),
        cmocka_unit_test(test_scale_codes_at_thresholds),
        cmocka_unit_test(test_scale_codes_of_special_amax),
        cmocka_unit_test(test_scale_codes_dense_sample),
        cmocka_unit_test(test_rceil_is_the_fp32_quotient_rounded_up),
        cmocka_unit_test(test_rceil_never_clamps_and_is_bump_exponent),
        cmocka_unit_test(test_example_layernorm_weights),
        cmocka_unit_test(test_example_floor_against_rceil),
        cmocka_unit_test(test_example_clamping_threshold),
        cmocka_unit_test(test_fraction_of_blocks_where_floor_differs),
        cmocka_unit_test(test_largest_amax),
        cmocka_unit_test(test_decoded_values_are_bf16),
        cmocka_unit_test(test_double_rounding_through_bf16),
        cmocka_unit_test(test_mxfp8_again_through_bf16),
        cmocka_unit_test(test_scaling_in_bf16),
        cmocka_unit_test(test_decoding_in_bf16),
        cmocka_unit_test(test_bf16_conversion),
        cmocka_unit_test(test_scale_counts),
        cmocka_unit_test(test_scale_offsets),
        cmocka_unit_test(test_swizzled_layout),
        cmocka_unit_test(test_quotient_of_four_over_six),
    };
    return cmocka_run_group_tests_name("mx", tests, NULL, NULL);
}
