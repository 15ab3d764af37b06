/*
Learning-rate schedules against values worked out by hand.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "llmc/run/scheduler.h"
#include <math.h>
#include <stdio.h>

typedef struct {
    int64_t step;
    double expected;
} Row;

// The values are of a peak of 1 and a few operations in double precision: a few units of 2^-53.
static const double TOLERANCE = 1e-15;

static void check(const char *name, Schedule schedule, const Row *rows, int count) {
    double worst = 0;
    for (int i = 0; i < count; i++) {
        double error = fabs(learning_rate_at(&schedule, rows[i].step) - rows[i].expected);
        if (!(error <= TOLERANCE)) {
            fail_msg("%s: step %lld is %.17g, not %.17g", name, (long long)rows[i].step,
                     learning_rate_at(&schedule, rows[i].step), rows[i].expected);
        }
        if (error > worst) worst = error;
    }
    printf("%-8s largest error %.1e, tolerance %.1e\n", name, worst, TOLERANCE);
}

#define CHECK(name, schedule, rows) check(name, schedule, rows, (int)(sizeof(rows) / sizeof(rows[0])))

static void test_warmup(void **state) {
    (void)state;
    const Row rows[] = {{0, 0.25}, {1, 0.5}, {2, 0.75}, {3, 1}};
    for (ScheduleKind kind = SCHEDULE_COSINE; kind <= SCHEDULE_WSD; kind++) {
        CHECK(SCHEDULE_NAMES[kind], ((Schedule){kind, 1, 4, 100, 0, 0.2, 0}), rows);
    }
}

static void test_warmup_from(void **state) {
    (void)state;
    // As OLMo's code has it: a tenth of the peak first, the peak after the last step of warm-up.
    const Row rows[] = {{0, 0.1}, {1, 0.325}, {2, 0.55}, {3, 0.775}, {4, 1}, {10, 0.55}, {16, 0.1}};
    CHECK("from 0.1", ((Schedule){SCHEDULE_COSINE, 1, 4, 16, 0.1, 0, 0.1}), rows);
}

static void test_cosine(void **state) {
    (void)state;
    // Twelve steps after four of warm-up: thirds, quarters and sixths of pi, whose cosines are
    // known.
    const double s2 = 0.70710678118654752440, s3 = 0.86602540378443864676; // sqrt(1/2), sqrt(3)/2
    const Row to_zero[] = {{4, 1},     {6, (1 + s3) / 2},  {7, (1 + s2) / 2},  {8, 0.75}, {10, 0.5},
                           {12, 0.25}, {13, (1 - s2) / 2}, {14, (1 - s3) / 2}, {16, 0},   {1000, 0}};
    const Row to_tenth[] = {{4, 1}, {8, 0.775}, {10, 0.55}, {12, 0.325}, {16, 0.1}, {17, 0.1}};
    CHECK("cosine", ((Schedule){SCHEDULE_COSINE, 1, 4, 16, 0, 0, 0}), to_zero);
    CHECK("cosine", ((Schedule){SCHEDULE_COSINE, 1, 4, 16, 0.1, 0, 0}), to_tenth);
}

static void test_linear(void **state) {
    (void)state;
    const Row rows[] = {{0, 0.5}, {1, 1}, {2, 1}, {4, 0.8}, {6, 0.6}, {9, 0.3}, {10, 0.2}, {11, 0.2}};
    CHECK("linear", ((Schedule){SCHEDULE_LINEAR, 1, 2, 10, 0.2, 0, 0}), rows);
}

static void test_constant(void **state) {
    (void)state;
    const Row rows[] = {{0, 0.5}, {1, 1}, {9, 1}, {10, 1}, {1 << 30, 1}};
    CHECK("constant", ((Schedule){SCHEDULE_CONSTANT, 1, 2, 10, 0.2, 0, 0}), rows);
    CHECK("constant", ((Schedule){SCHEDULE_CONSTANT, 1, 2, 0, 0, 0, 0}), rows); // without an end
}

static void test_wsd(void **state) {
    (void)state;
    // 20 steps: the last fifth is steps 16 to 19.
    const Row rows[] = {{0, 0.5}, {1, 1}, {15, 1}, {16, 1}, {17, 0.75}, {18, 0.5}, {19, 0.25}, {20, 0}, {30, 0}};
    const Row warmup_into_decay[] = {{17, 1}, {18, 1}, {19, 0.5}, {20, 0}};
    CHECK("wsd", ((Schedule){SCHEDULE_WSD, 1, 2, 20, 0, 0.2, 0}), rows);
    CHECK("wsd", ((Schedule){SCHEDULE_WSD, 1, 18, 20, 0, 0.2, 0}), warmup_into_decay);
    const Row half[] = {{9, 1}, {10, 1}, {11, 0.9}, {15, 0.5}, {20, 0}};
    const Row none[] = {{9, 1}, {19, 1}, {20, 0.1}};
    const Row rounded[] = {{71, 1}, {72, 28.0 / 29}, {100, 0}}; // 0.29 * 100 is a little under 29
    CHECK("wsd", ((Schedule){SCHEDULE_WSD, 1, 0, 100, 0, 0.29, 0}), rounded);
    const Row all[] = {{0, 0.5}, {1, 1}, {2, 1}, {11, 0.5}, {20, 0}};
    CHECK("wsd", ((Schedule){SCHEDULE_WSD, 1, 2, 20, 0, 0.5, 0}), half);
    CHECK("wsd", ((Schedule){SCHEDULE_WSD, 1, 2, 20, 0.1, 0, 0}), none);
    CHECK("wsd", ((Schedule){SCHEDULE_WSD, 1, 2, 20, 0, 1, 0}), all); // the line begins where warm-up ends
}

// A fifth in double precision is a fifth in whole numbers, whatever the number of steps.
static void test_wsd_fifth(void **state) {
    (void)state;
    for (int64_t steps = 5; steps < 1 << 20; steps += 5) {
        Schedule schedule = {SCHEDULE_WSD, 1, 0, steps, 0, 0.2, 0};
        assert_true(learning_rate_at(&schedule, steps - steps / 5) == 1);
        assert_true(learning_rate_at(&schedule, steps - steps / 5 + 1) < 1);
    }
}

// No step count makes a rate that is negative, above the peak or not finite.
static void test_degenerate(void **state) {
    (void)state;
    for (ScheduleKind kind = SCHEDULE_COSINE; kind <= SCHEDULE_WSD; kind++) {
        for (int64_t total = 0; total < 8; total++) {
            for (int64_t warmup = 0; warmup < 10; warmup++) {
                Schedule schedule = {kind, 0.5, warmup, total, 0.1, 0.2, 0};
                for (int64_t step = 0; step < 12; step++) {
                    double rate = learning_rate_at(&schedule, step);
                    assert_true(rate > 0 && rate <= 0.5);
                }
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_warmup),    cmocka_unit_test(test_warmup_from), cmocka_unit_test(test_cosine),
        cmocka_unit_test(test_linear),    cmocka_unit_test(test_constant),    cmocka_unit_test(test_wsd),
        cmocka_unit_test(test_wsd_fifth), cmocka_unit_test(test_degenerate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
