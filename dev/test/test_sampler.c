// llmc/run/sample.h: the token that a uniform number picks, by hand, and at the edges.

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h> // qsort
#include <string.h>
#include <cmocka.h>
#include "llmc/run/sample.h"

static void test_temperature_zero_is_argmax(void **state) {
    (void)state;
    const float logits[] = {1, 5, -2, 5, 4};
    assert_int_equal(sample_token(logits, 5, 0, 0, 0.99f), 1); // the lowest id of equals
    assert_int_equal(sample_token(logits, 5, 0, 2, 0.0f), 1);
    assert_int_equal(sample_token(logits, 5, -1, 0, 0.5f), 1);
    assert_int_equal(sample_token(logits, 1, 1, 0, 0.5f), 0);
}

// Probabilities 1/8, 5/8, 2/8: the uniform number's intervals are [0, .125), [.125, .75), [.75, 1).
static void test_inverse_cumulative(void **state) {
    (void)state;
    const float logits[] = {logf(1) + 100, logf(5) + 100, logf(2) + 100};
    const struct {
        float uniform;
        int token;
    } cases[] = {{0, 0}, {0.1249f, 0}, {0.1251f, 1}, {0.7499f, 1}, {0.7501f, 2}, {0.99999994f, 2}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(sample_token(logits, 3, 1, 0, cases[i].uniform), cases[i].token);
    }
}

// At temperature 1/2 the weights are squared (1, 25, 4 of 30), at 2 their roots are taken.
static void test_temperature(void **state) {
    (void)state;
    const float logits[] = {logf(1), logf(5), logf(2)};
    assert_int_equal(sample_token(logits, 3, 0.5f, 0, 0.0333f), 0);
    assert_int_equal(sample_token(logits, 3, 0.5f, 0, 0.0334f), 1);
    assert_int_equal(sample_token(logits, 3, 0.5f, 0, 0.8666f), 1);
    assert_int_equal(sample_token(logits, 3, 0.5f, 0, 0.8667f), 2);
    double sum = 1 + sqrt(5) + sqrt(2);
    assert_int_equal(sample_token(logits, 3, 2, 0, (float)(1 / sum - 1e-4)), 0);
    assert_int_equal(sample_token(logits, 3, 2, 0, (float)(1 / sum + 1e-4)), 1);
    assert_int_equal(sample_token(logits, 3, 1e-30f, 0, 0.999f), 1); // no overflow
    assert_int_equal(sample_token(logits, 3, INFINITY, 0, 0.34f), 1);
}

static int compare_descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// A temperature of infinity draws alike what is drawn at all: of many logits the top_k largest, by
// sorting them. They differ in sign and by many powers of two; all are apart.
static void test_top_k_of_many(void **state) {
    (void)state;
    enum { COUNT_OF_LOGITS = 300, DRAWS = 4000 };
    float logits[COUNT_OF_LOGITS], sorted[COUNT_OF_LOGITS];
    for (int id = 0; id < COUNT_OF_LOGITS; id++) {
        logits[id] = ldexpf((float)(id * 97 % COUNT_OF_LOGITS - 150) + 0.25f, id % 40 - 30);
    }
    memcpy(sorted, logits, sizeof(sorted));
    qsort(sorted, COUNT_OF_LOGITS, sizeof(*sorted), compare_descending);
    for (int top_k = 1; top_k < COUNT_OF_LOGITS; top_k += 23) {
        bool drawn[COUNT_OF_LOGITS] = {false};
        for (int i = 0; i < DRAWS; i++) {
            drawn[sample_token(logits, COUNT_OF_LOGITS, INFINITY, top_k, (float)i / DRAWS)] = true;
        }
        for (int id = 0; id < COUNT_OF_LOGITS; id++) {
            assert_true(drawn[id] == (logits[id] >= sorted[top_k - 1]));
        }
    }
}

static void test_top_k(void **state) {
    (void)state;
    const float logits[] = {0, 3, 3, 1, 3, -5};
    for (int i = 0; i < 1000; i++) {
        float uniform = (float)i / 1000;
        assert_int_equal(sample_token(logits, 6, 1, 1, uniform), 1);
        // Two of three equals: the lower ids, a half each.
        assert_int_equal(sample_token(logits, 6, 1, 2, uniform), uniform < 0.5f ? 1 : 2);
        // Four: weights 1, 1, e^-2, 1 in the order of ids.
        int token = sample_token(logits, 6, 1, 4, uniform);
        assert_true(token == 1 || token == 2 || token == 3 || token == 4);
        assert_int_equal(sample_token(logits, 6, 1, 6, uniform), sample_token(logits, 6, 1, 0, uniform));
        assert_int_equal(sample_token(logits, 6, 1, 100, uniform), sample_token(logits, 6, 1, 0, uniform));
    }
}

static void test_not_finite(void **state) {
    (void)state;
    const float nan_first[] = {NAN, 1, 2}, nan_last[] = {1, 2, NAN}, infinite[] = {1, INFINITY, 2};
    const float masked[] = {-INFINITY, 0, -INFINITY, 0}, nothing[] = {-INFINITY, -INFINITY};
    for (int top_k = 0; top_k < 3; top_k++) {
        for (int temperature = 0; temperature < 2; temperature++) {
            assert_int_equal(sample_token(nan_first, 3, (float)temperature, top_k, 0.5f), -1);
            assert_int_equal(sample_token(nan_last, 3, (float)temperature, top_k, 0.5f), -1);
            assert_int_equal(sample_token(infinite, 3, (float)temperature, top_k, 0.5f), -1);
            assert_int_equal(sample_token(nothing, 2, (float)temperature, top_k, 0.5f), -1);
        }
    }
    assert_int_equal(sample_token(masked, 4, 1, 0, 0), 1);
    assert_int_equal(sample_token(masked, 4, 1, 0, 0.51f), 3);
    assert_int_equal(sample_token(masked, 4, INFINITY, 3, 0.999f), 3);
}

// Frequencies over evenly spaced uniforms are the softmax's probabilities, to the spacing.
static void test_frequencies(void **state) {
    (void)state;
    enum { VOCABULARY = 50, DRAWS = 20000 };
    float logits[VOCABULARY];
    double sum = 0;
    int counts[VOCABULARY] = {0};
    for (int i = 0; i < VOCABULARY; i++) {
        logits[i] = (float)(i * 37 % 50) / 10;
        sum += exp(logits[i] / 0.7);
    }
    for (int i = 0; i < DRAWS; i++) {
        counts[sample_token(logits, VOCABULARY, 0.7f, 0, ((float)i + 0.5f) / DRAWS)]++;
    }
    for (int i = 0; i < VOCABULARY; i++) {
        assert_true(fabs(counts[i] - DRAWS * exp(logits[i] / 0.7) / sum) < 1.1); // an interval's ends: one draw
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_temperature_zero_is_argmax),
        cmocka_unit_test(test_inverse_cumulative),
        cmocka_unit_test(test_temperature),
        cmocka_unit_test(test_top_k),
        cmocka_unit_test(test_top_k_of_many),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_frequencies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
