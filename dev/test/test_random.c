// llmc/base/random.h: Philox against its authors' vectors; what is made of it against what it
// claims to be.

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "llmc/base/random.h"

// Random123 1.14, tests/kat_vectors, "philox4x32 10".
static void test_known_answers(void **state) {
    (void)state;
    static const struct {
        uint64_t key, counter_hi, counter_lo;
        uint32_t out[4];
    } vectors[] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < 3; i++) {
        uint32_t out[4];
        philox(out, vectors[i].key, vectors[i].counter_hi, vectors[i].counter_lo);
        assert_memory_equal(out, vectors[i].out, sizeof(out));
    }
}

// |value - expected| within `deviations` of its standard error, printed with its margin.
static void check_moment(const char *name, double value, double expected, double standard_error) {
    const double deviations = 4.5; // about 1 in 150,000, and the numbers never change
    double z = (value - expected) / standard_error;
    printf("    %-28s %.6f, expected %.6f: %.2f standard errors of %.1f allowed\n", name, value, expected, z,
           deviations);
    assert_true(fabs(z) < deviations);
}

enum { SAMPLES = 1000000, BINS = 256 };

static void test_uniform(void **state) {
    (void)state;
    int counts[BINS] = {0};
    double sum = 0, sum_squares = 0, sum_products = 0, previous = 0.5;
    for (uint64_t i = 0; i < SAMPLES; i++) {
        float x = random_uniform(42, 3, i);
        assert_true(x >= 0 && x < 1);
        assert_true(x * 0x1p24f == floorf(x * 0x1p24f));
        counts[(int)(x * BINS)]++;
        sum += x;
        sum_squares += (double)x * x;
        sum_products += (x - 0.5) * (previous - 0.5);
        previous = x;
    }
    double chi_square = 0, expected = (double)SAMPLES / BINS;
    for (int i = 0; i < BINS; i++) {
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    check_moment("uniform: mean", sum / SAMPLES, 0.5, sqrt(1.0 / 12 / SAMPLES));
    check_moment("uniform: mean square", sum_squares / SAMPLES, 1.0 / 3, sqrt((1.0 / 5 - 1.0 / 9) / SAMPLES));
    check_moment("uniform: serial correlation", 12 * sum_products / SAMPLES, 0, 1 / sqrt(SAMPLES));
    check_moment("uniform: chi square, 256 bins", chi_square, BINS - 1, sqrt(2.0 * (BINS - 1)));
}

static void test_normal(void **state) {
    (void)state;
    double sums[5] = {0};
    int beyond_two = 0;
    for (uint64_t i = 0; i < SAMPLES; i++) {
        double x = random_normal(42, 3, i), power = 1;
        assert_true(isfinite(x));
        for (int k = 1; k <= 4; k++) {
            power *= x;
            sums[k] += power;
        }
        beyond_two += fabs(x) > 2;
    }
    // The variance of x^k is the difference of the moments E x^2k - (E x^k)^2, with E x^2k = (2k -
    // 1)!!.
    check_moment("normal: mean", sums[1] / SAMPLES, 0, sqrt(1.0 / SAMPLES));
    check_moment("normal: second moment", sums[2] / SAMPLES, 1, sqrt((3.0 - 1) / SAMPLES));
    check_moment("normal: third moment", sums[3] / SAMPLES, 0, sqrt(15.0 / SAMPLES));
    check_moment("normal: fourth moment", sums[4] / SAMPLES, 3, sqrt((105.0 - 9) / SAMPLES));
    double tail = erfc(2 / sqrt(2));
    check_moment("normal: P(|x| > 2)", (double)beyond_two / SAMPLES, tail, sqrt(tail * (1 - tail) / SAMPLES));
}

// Seeds, streams and indices each matter, and a value is the same however often and in whatever
// order it is asked for.
static void test_pure_function(void **state) {
    (void)state;
    float x = random_normal(1, 2, 3);
    assert_true(x == random_normal(1, 2, 3));
    assert_true(x != random_normal(2, 2, 3) && x != random_normal(1, 3, 3) && x != random_normal(1, 2, 4));
    assert_true(x != random_normal(1 + (1ull << 32), 2, 3) && x != random_normal(1, 2 + (1ull << 32), 3));
    assert_true(x != random_normal(1, 2, 3 + (1ull << 32)));
}

// The definition written out with this file's own constants: u = (53 bits + 1) / 2^53, angle 53
// bits / 2^53.
static void test_normal_by_hand(void **state) {
    (void)state;
    // Key 0, counter 0: the first known answer's words.
    long double u = ((((uint64_t)0x6627e8d5 << 32 | 0xe169c58d) >> 11) + 1) / 9007199254740992.0L;
    long double angle = (((uint64_t)0xbc57ac4c << 32 | 0x9b00dbd8) >> 11) / 9007199254740992.0L;
    long double expected = sqrtl(-2 * logl(u)) * cosl(2 * acosl(-1) * angle);
    assert_true(random_normal(0, 0, 0) == (float)expected);
    assert_true(random_uniform(0, 0, 0) == 0x6627e8 / 16777216.0f);
}

static void check_bijection(uint64_t seed, uint64_t stream, uint64_t n) {
    static unsigned char seen[100000];
    memset(seen, 0, n);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t to = random_permute(seed, stream, i, n);
        assert_true(to < n);
        assert_int_equal(seen[to]++, 0);
    }
}

static void test_permute_is_a_bijection(void **state) {
    (void)state;
    for (uint64_t n = 1; n <= 300; n++) {
        check_bijection(n, 7, n);
    }
    static const uint64_t sizes[] = {1023, 1024, 1025, 4095, 4096, 4097, 65536, 65537, 99991};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        check_bijection(42, i, sizes[i]);
    }
    uint64_t large = (uint64_t)1 << 62;
    assert_true(random_permute(1, 0, large - 1, large) < large);
    assert_true(random_permute(1, 0, large - 2, large - 1) < large - 1);
}

// Over many streams each of 5! orders of five things comes up as often as the others.
static void test_permute_is_uniform(void **state) {
    (void)state;
    enum { N = 5, ORDERS = 120, STREAMS = 60000 };
    int counts[N * N * N * N * N] = {0};
    for (uint64_t stream = 0; stream < STREAMS; stream++) {
        int order = 0;
        for (uint64_t i = 0; i < N; i++) {
            order = order * N + (int)random_permute(42, stream, i, N);
        }
        counts[order]++;
    }
    double chi_square = 0, expected = (double)STREAMS / ORDERS;
    int orders = 0;
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        if (counts[i] == 0) continue;
        orders++;
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    assert_int_equal(orders, ORDERS);
    check_moment("permute: chi square, 5! orders", chi_square, ORDERS - 1, sqrt(2.0 * (ORDERS - 1)));
}

// A shuffle keeps no trace of the order it began with: the correlation of index and image is as of
// chance.
static void test_permute_forgets_order(void **state) {
    (void)state;
    enum { N = 99991 };
    double sum = 0, mean = (N - 1) / 2.0, variance = ((double)N * N - 1) / 12;
    int neighbours = 0;
    for (uint64_t i = 0; i < N; i++) {
        uint64_t to = random_permute(9, 1, i, N);
        sum += ((double)i - mean) * ((double)to - mean);
        neighbours += i > 0 && to == random_permute(9, 1, i - 1, N) + 1;
    }
    check_moment("permute: correlation", sum / N / variance, 0, 1 / sqrt(N));
    check_moment("permute: kept neighbours", neighbours, 1, 1); // Poisson of mean 1
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answers),
        cmocka_unit_test(test_uniform),
        cmocka_unit_test(test_normal),
        cmocka_unit_test(test_normal_by_hand),
        cmocka_unit_test(test_pure_function),
        cmocka_unit_test(test_permute_is_a_bijection),
        cmocka_unit_test(test_permute_is_uniform),
        cmocka_unit_test(test_permute_forgets_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
