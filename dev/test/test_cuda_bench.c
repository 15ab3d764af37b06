// Every operation that the bench times on a card, at small sizes: that one writes where it must
// not, or can't be launched, is found here and not in the minutes of a GPU.
#include "check.h"

#ifndef HAVE_CUDA // a build without CUDA runs it too
#define HAVE_CUDA
#endif
#define BENCH_SMALL
#define main bench_main
#include "../bench/bench_ops.c"
#undef main
#include "llmc/cuda/gemm.h"

#include <unistd.h>

// Runs the bench with operands in the forms that a card with this policy takes.
static void check_bench(MxGemm policy) {
    char path[] = "/tmp/bench_ops_XXXXXX", *line = NULL;
    char *arguments[] = {"bench_ops", "--device", "cuda", "--quick", "--json", path, NULL};
    size_t capacity = 0;
    int lines = 0, gemms = 0;
    int file = mkstemp(path);
    assert_true(file >= 0);
    close(file);
    cuda_gemm_use_device((GemmDevice){.capability = 100, .cublaslt = 130100, .policy = policy});
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
        gemms += strncmp(json_string(row, "name"), "mxfp8 ", 6) == 0;
        lines++;
        json_free(row);
    }
    printf("    %d operations, %d of them GEMMs of MX operands\n", lines, gemms);
    assert_int_equal(lines, num_cases + 1); // the last one: all GEMMs of a step
    assert_int_equal(gemms, 12);
    free(line);
    fclose(json);
    unlink(path);
}

static void test_emulated(void **state) {
    (void)state;
    check_bench(MX_GEMM_EMULATED);
}

static void test_native(void **state) {
    (void)state;
    check_bench(MX_GEMM_NATIVE);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_emulated), cmocka_unit_test(test_native)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
