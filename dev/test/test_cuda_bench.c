// Every operation that the bench times on a card, at small sizes: that one writes where it must
// not, or can't be launched, is found here and not in the minutes of a GPU.
#include "check.h"
#include "cuda_standins.h"

#ifndef HAVE_CUDA // a build without CUDA runs it too
#define HAVE_CUDA
#endif
#define BENCH_SMALL
#define main bench_main
#include "../bench/bench_ops.c"
#undef main

#include <unistd.h>

// Runs the bench as on a card of this compute capability, which multiplies FP8 with one scale a
// tensor, and by blocks of 128, in as many of its GEMMs.
static void check_bench(int capability, int by_tensor, int by_128) {
    char path[] = "/tmp/bench_ops_XXXXXX", *line = NULL;
    char *arguments[] = {"bench_ops", "--device", "cuda", "--quick", "--json", path, NULL};
    size_t capacity = 0;
    int lines = 0, gemms[3] = {0};
    int file = mkstemp(path);
    assert_true(file >= 0);
    close(file);
    cuda_standin_capability = capability;
    num_cases = 0;
    assert_int_equal(bench_main(6, arguments), 0);
    FILE *json = fopen(path, "r");
    assert_non_null(json);
    while (getline(&line, &capacity, json) > 0) {
        Error error;
        double seconds = 0, ratio = 0;
        JsonValue *row = json_parse(line, strlen(line), &error);
        assert_non_null(row);
        assert_true(json_number(row, "seconds", &seconds) && seconds > 0);
        assert_true(json_number(row, "ratio", &ratio) && ratio > 0);
        const char *name = json_string(row, "name");
        gemms[0] += strncmp(name, "mxfp8 ", 6) == 0;
        gemms[1] += strncmp(name, "tensor ", 7) == 0;
        gemms[2] += strncmp(name, "block128 ", 9) == 0;
        lines++;
        json_free(row);
    }
    printf("    %d operations, of them GEMMs of MX operands %d, by tensor %d, by blocks of 128 %d\n", lines, gemms[0],
           gemms[1], gemms[2]);
    assert_int_equal(lines, num_cases + 1); // the last one: all GEMMs of a step
    assert_int_equal(gemms[0], 12);
    assert_int_equal(gemms[1], by_tensor);
    assert_int_equal(gemms[2], by_128);
    free(line);
    fclose(json);
    unlink(path);
}

static void test_ampere(void **state) {
    (void)state;
    check_bench(80, 0, 0);
}

static void test_hopper(void **state) {
    (void)state;
    check_bench(90, 12, 12);
}

static void test_blackwell(void **state) {
    (void)state;
    check_bench(100, 12, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ampere), cmocka_unit_test(test_hopper),
                                       cmocka_unit_test(test_blackwell)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
