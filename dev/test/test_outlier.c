/*
The outlier window against hand-computed z-scores.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "llmc/run/outlier.h"
#include <math.h>
#include <stdio.h>

// Mean 5, standard deviation 2: the textbook's {2, 4, 4, 4, 5, 5, 7, 9}, sixteen times.
static void fill(OutlierWindow *window, double offset) {
    static const double values[] = {2, 4, 4, 4, 5, 5, 7, 9};
    for (int i = 0; i < OUTLIER_WINDOW; i++)
        outlier_add(window, offset + values[i % 8]);
}

static void assert_near(double value, double expected, double tolerance) {
    printf("%.17g, expected %g: error %.1e, tolerance %.1e\n", value, expected, fabs(value - expected), tolerance);
    assert_true(fabs(value - expected) <= tolerance);
}

static void test_not_full(void **state) {
    (void)state;
    OutlierWindow window = {0};
    for (int i = 0; i < OUTLIER_WINDOW - 1; i++) {
        assert_true(outlier_zscore(&window, 1e9) == 0);
        outlier_add(&window, i);
    }
    assert_true(outlier_zscore(&window, 1e9) == 0);
    outlier_add(&window, 0);
    assert_true(outlier_zscore(&window, 1e9) > 1e6);
}

static void test_zscore(void **state) {
    (void)state;
    OutlierWindow window = {0};
    fill(&window, 0);
    assert_near(outlier_zscore(&window, 5), 0, 1e-14);
    assert_near(outlier_zscore(&window, 11), 3, 1e-14);
    assert_near(outlier_zscore(&window, -5), -5, 1e-14);
}

// After a million values around 1e6 the window says of the last 128 what a new one says: nothing
// drifts.
static void test_ring_without_drift(void **state) {
    (void)state;
    OutlierWindow window = {0};
    for (int i = 0; i < 1000000; i++)
        outlier_add(&window, 1e6 + 1e-3 * (i % 977));
    fill(&window, 0);
    assert_near(outlier_zscore(&window, 11), 3, 1e-14);
    fill(&window, 1e6);
    // The mean has an error of up to 128 units of 1e6 * 2^-53: 1.4e-8, against a standard deviation
    // of 2.
    assert_near(outlier_zscore(&window, 1e6 + 11), 3, 1e-8);
}

static void test_not_finite(void **state) {
    (void)state;
    OutlierWindow window = {0};
    const double bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        assert_true(outlier_zscore(&window, bad[i]) == INFINITY);
        outlier_add(&window, bad[i]);
        assert_int_equal(window.count, 0);
    }
    fill(&window, 0);
    for (int i = 0; i < 3; i++) {
        outlier_add(&window, bad[i]);
        assert_true(outlier_zscore(&window, bad[i]) == INFINITY);
        assert_near(outlier_zscore(&window, 11), 3, 1e-14);
    }
}

// 0.1 + 0.1 + ... is not 128 * 0.1: its rounding is no spread.
static void test_equal_values(void **state) {
    (void)state;
    OutlierWindow window = {0};
    for (int i = 0; i < OUTLIER_WINDOW; i++)
        outlier_add(&window, 0.1);
    assert_true(outlier_zscore(&window, 0.1) == 0);
    assert_true(outlier_zscore(&window, 7) == 0);
}

// Losses of 5 +- 2: a spike is over 17, and over where it is 7 or less.
static void test_spikes(void **state) {
    (void)state;
    OutlierWindow window = {0};
    Spike spike = {0};
    assert_int_equal(spike_follow(&spike, &window, 1e9), SPIKE_GOES_ON);
    for (int i = 0; i < OUTLIER_WINDOW; i++)
        outlier_add(&window, i % 2 ? 3 : 7);
    const struct {
        double loss;
        SpikeChange change;
        int64_t count, steps;
    } rows[] = {{16.9, SPIKE_GOES_ON, 0, 0}, {17.1, SPIKE_BEGINS, 1, 1}, {40, SPIKE_GOES_ON, 1, 2},
                {NAN, SPIKE_GOES_ON, 1, 2},  {7.1, SPIKE_GOES_ON, 1, 3}, {7, SPIKE_ENDS, 1, 3}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(spike_follow(&spike, &window, rows[i].loss), rows[i].change);
        assert_int_equal(spike.count, rows[i].count);
        assert_int_equal(spike.steps, rows[i].steps);
    }
    assert_true(spike.peak == 40 && spike.level == 7);
    spike.steps = 0;
    assert_int_equal(spike_follow(&spike, &window, 18), SPIKE_BEGINS);
    assert_int_equal(spike.count, 2);
}

static void test_growth(void **state) {
    (void)state;
    OutlierWindow window = {0};
    for (int i = 0; i < OUTLIER_WINDOW + 40; i++) {
        assert_true(isnan(outlier_growth(&window)) == (i < OUTLIER_WINDOW));
        outlier_add(&window, i < OUTLIER_WINDOW + 24 ? 1 : 3);
    }
    assert_near(outlier_growth(&window), 3 / ((112 + 16 * 3) / 128.0), 1e-14);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_not_full),
        cmocka_unit_test(test_zscore),
        cmocka_unit_test(test_ring_without_drift),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_equal_values),
        cmocka_unit_test(test_spikes),
        cmocka_unit_test(test_growth),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
