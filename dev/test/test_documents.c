/*
A model whose attention stays within documents, on the CPU: documents.h has the comparison.
*/
#include "documents.h"

static const GPTConfig GPT2 = {.layers = 2, .heads = 3, .channels = 51, .max_seq_len = 160, .vocab_size = 131};
static const GPTConfig MODERN = {.layers = 2,
                                 .heads = 6,
                                 .channels = 60,
                                 .max_seq_len = 150,
                                 .vocab_size = 131,
                                 .kv_heads = 3,
                                 .activation = ACTIVATION_SWIGLU,
                                 .norm = NORM_RMSNORM,
                                 .no_biases = true,
                                 .positions = POSITIONS_ROPE,
                                 .qk_norm = true,
                                 .untied_head = true};

// FP32: some hundred sums in another order lie on a path through two blocks. BF16: beside that one
// rounding of every value to BF16, where sums fall on two sides of a tie.
static void test_packed_against_apart(void **state) {
    (void)state;
    check_documents(backend_cpu(), GPT2, "fp32", 400 * U_FP32);
    check_documents(backend_cpu(), MODERN, "fp32", 400 * U_FP32);
    check_documents(backend_cpu(), GPT2, "bf16", U_BF16);
    check_documents(backend_cpu(), MODERN, "bf16", U_BF16);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_packed_against_apart)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
