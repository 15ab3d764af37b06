/*
llmc/numerics/encoding.h: stochastic rounding against neighbours by ml_dtypes' tables and a Philox
of the test's own (rounding_reference.h). What each value becomes, for which of all 2^16 random
numbers, and that means over many steps are the values.
*/
#include "check.h"
#include "mx_reference.h"
#include "rounding_reference.h"
#include "llmc/cpu/cpu.h"
#include "llmc/model/recipe.h"

#define FOR_EACH_FORMAT(format) for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++)

static double value_of(Format format, int code) { return (double)mx_bits_float(reference_table(format)->values[code]); }

static int count_of(Format format) { return reference_table(format)->max_code + 1; }

// Fills `values` with the format's, ascending from 0.
static void fill_values(double values[128], Format format) {
    for (int code = 0; code < count_of(format); code++) {
        values[code] = value_of(format, code);
    }
}

// Encodes, and checks that the value which is rounded to without a code is the code's, bit for bit.
static uint8_t code_and_value(Format format, float x, uint32_t random) {
    uint8_t code = mx_encode_stochastic(format, x, random);
    assert_int_equal(mx_float_bits(mx_round_stochastic(format, x, random)), mx_float_bits(mx_decode(format, code)));
    return code;
}

// Checks a value with every random number: the expected neighbour, and the share of those up.
static void check_value_of(Format format, float x) {
    double values[128];
    int ups = 0;
    fill_values(values, format);
    for (uint32_t random = 0; random < 65536; random++) {
        double expected = reference_stochastic(values, count_of(format), (double)x, random);
        double found = (double)mx_decode(format, code_and_value(format, x, random));
        if (found != expected || !signbit(found) != !signbit(expected)) {
            fail_msg("%s: %g with %u becomes %g, not %g", reference_table(format)->name, (double)x, random, found,
                     expected);
        }
        ups += fabs(found) > fabs(reference_stochastic(values, count_of(format), (double)x, 0));
    }
    double low = fabs(reference_stochastic(values, count_of(format), (double)x, 0)), high = low;
    for (int code = count_of(format); code-- > 0;) {
        if (values[code] > low) high = values[code];
    }
    bool between = fabs((double)x) >= low && fabs((double)x) < values[count_of(format) - 1];
    if (between) assert_true(fabs(ups - 65536 * (fabs((double)x) - low) / (high - low)) <= 0.5);
}

static void test_every_random_number(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        for (int code = 0; code + 1 < count_of(format); code += 1 + count_of(format) / 12) {
            double low = value_of(format, code), high = value_of(format, code + 1);
            const double fractions[] = {0, 0x1p-18, 0x1p-17, 0.25, 1.0 / 3, 0.75, 1 - 0x1p-18, 1 - 0x1p-17};
            for (size_t i = 0; i < sizeof(fractions) / sizeof(fractions[0]); i++) {
                check_value_of(format, (float)(low + fractions[i] * (high - low)));
                check_value_of(format, (float)-(low + fractions[i] * (high - low)));
            }
        }
    }
}

// Exact values stay, larger ones saturate; NaN, infinities and zeros are as to nearest.
static void test_what_never_moves(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        const float max = (float)value_of(format, count_of(format) - 1);
        const float special[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 1.01f * max, -1.01f * max, 1e38f, -max, max};
        for (uint32_t random = 0; random < 65536; random += 1285) { // up to 65535
            for (int code = 0; code < count_of(format); code++) {
                assert_int_equal(code_and_value(format, (float)value_of(format, code), random), code);
            }
            for (size_t i = 0; i < sizeof(special) / sizeof(special[0]); i++) {
                assert_int_equal(code_and_value(format, special[i], random),
                                 reference_code(format, mx_float_bits(special[i])));
            }
        }
    }
}

// The random bits are the reference's, and no two of seeds, steps, tensors, rows and columns' are
// the same numbers.
static void test_draws(void **state) {
    (void)state;
    const Encoding encodings[] = {{ROUND_STOCHASTIC, 0, 0, {0, 0, 0}},
                                  {ROUND_STOCHASTIC, 0, 4194303, {1337, 3, 0}},
                                  {ROUND_STOCHASTIC, 0, 17, {1ull << 63 | 5, 1l << 39, 4294967000}}};
    for (size_t i = 0; i < sizeof(encodings) / sizeof(encodings[0]); i++) {
        const Encoding *e = &encodings[i];
        for (int64_t row = 0; row < 40; row += 13) {
            for (int64_t eight = 0; eight < 3000; eight += 271) {
                uint16_t random[DRAWN_TOGETHER];
                encoding_draw(random, e, row, eight);
                for (int c = 0; c < DRAWN_TOGETHER; c++) {
                    assert_int_equal(random[c],
                                     reference_random(e->at.seed, (uint64_t)e->at.step, (uint64_t)e->tensor,
                                                      (uint32_t)(e->at.first_row + row), (uint32_t)(eight * 8 + c)));
                }
            }
        }
    }
}

// Means over steps of what is decoded, in every scaling. Each of n draws is within one distance
// between neighbours of the value; by Hoeffding's bound a mean of them is off by more than t
// distances with a chance of 2 exp(-2 n t^2): below 1e-9 for all elements together. After a
// prescale of 3/4 none is clamped; without one, 0, scales are rounded up, and NVFP4's, which are
// E4M3 numbers rounded to nearest, clamp what is larger than 6 of them. Clamped elements, which are
// the same every time and too small, are counted and left out. Returns their number.
static int check_means(Format format, Scaling scaling, bool rowwise, float prescale, Check *check) {
    enum { ROWS = 32, COLS = 48, STEPS = 512 };
    bool clamps = prescale == 0 && scaling_is_nvfp4(scaling);
    int clamped = 0;
    Tensor x = random_tensor(FORMAT_FP32, ROWS, COLS, 1);
    QuantizedTensor q = quantized_make(pool_take(ROWS * COLS * 2), format, rowwise ? AXIS_ROWWISE : AXIS_COLUMNWISE,
                                       ROWS, COLS, FORM_DECODED);
    float factor = 1;
    double *sums = take_doubles(ROWS * COLS), *low = take_doubles(ROWS * COLS), *high = take_doubles(ROWS * COLS);
    q.scaling = scaling;
    q.factor = &factor;
    q.encoding = (Encoding){ROUND_STOCHASTIC, prescale, 2, {9, 0, 0}};
    for (q.encoding.at.step = 0; q.encoding.at.step < STEPS; q.encoding.at.step++) {
        cpu_quantize(rowwise ? &q : NULL, rowwise ? NULL : &q, source_tensor(x),
                     prescale == 0 ? SCALE_RCEIL : SCALE_FLOOR);
        for (int i = 0; i < ROWS * COLS; i++) {
            double value = (double)mx_from_bf16(((uint16_t *)q.elements)[i]) * (double)factor /
                           (double)encoding_prescale(&q.encoding);
            sums[i] = q.encoding.at.step == 0 ? value : sums[i] + value;
            low[i] = q.encoding.at.step == 0 ? value : fmin(low[i], value);
            high[i] = q.encoding.at.step == 0 ? value : fmax(high[i], value);
        }
    }
    double t = sqrt(log(2e9 * ROWS * COLS) / (2 * STEPS)), largest = 0;
    for (int i = 0; i < ROWS * COLS; i++) {
        largest = fmax(largest, high[i] - low[i]);
    }
    for (int i = 0; i < ROWS * COLS; i++) {
        double value = tensor_get(x, i / COLS, i % COLS), mean = sums[i] / STEPS;
        if (clamps && high[i] == low[i] && fabs(mean) < fabs(value)) {
            clamped++;
            continue;
        }
        double distance = high[i] > low[i] ? high[i] - low[i] : largest; // drawn the same way every time
        check_value(check, mean, value, t * distance + 1e-6 * fabs(value));
    }
    pool_release();
    return clamped;
}

static void test_means(void **state) {
    (void)state;
    FOR_EACH_FORMAT(format) {
        for (int i = 0; i < 4; i++) {
            Check check = {0};
            check_means(format, SCALING_MX, i % 2, i < 2 ? 0.75f : 0, &check);
            check_end(&check, "%s, MX, prescale %g", reference_table(format)->name, i < 2 ? 0.75 : 0);
        }
    }
    const Scaling scalings[] = {SCALING_NVFP4, SCALING_NVFP4_46, SCALING_BLOCK128, SCALING_TENSOR};
    for (size_t i = 0; i < 2 * sizeof(scalings) / sizeof(scalings[0]); i++) {
        Check check = {0};
        Scaling scaling = scalings[i / 2];
        float prescale = i % 2 ? 0.75f : 0;
        Format format = scaling_is_nvfp4(scaling) ? FORMAT_E2M1 : FORMAT_E4M3;
        int clamped = check_means(format, scaling, i / 2 % 2, prescale, &check);
        check_end(&check, "%s, prescale %g, %d of 1536 elements clamped", SCALING_NAMES[scaling], (double)prescale,
                  clamped);
        if (scaling_is_nvfp4(scaling) && prescale == 0) assert_in_range(clamped, 1, 1536 / 16);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_random_number),
        cmocka_unit_test(test_what_never_moves),
        cmocka_unit_test(test_draws),
        cmocka_unit_test(test_means),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
