/*
After the first step nothing is made: no memory by our code, no primitive by oneDNN, none but a
call's own bookkeeping by the libraries. This program puts functions of its own before malloc and
its like, open, and dnnl_primitive_create, which count and pass on.
*/
#include "check.h"

#ifdef __SANITIZE_ADDRESS__ // which has a malloc of its own

static void test_left_out(void **state) {
    (void)state;
    skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_left_out)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

#include "by_name.h"
#include "llmc/model/not_finite.h"
#include "llmc/model/optimizer.h"
#include "llmc/base/util.h" // allocate

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern char __executable_start, etext;

static struct { int ours, primitives, files; } made;

static void count_allocation(const void *caller) {
    bool ours = (const char *)caller >= &__executable_start && (const char *)caller < &etext;
#pragma omp atomic
    made.ours += ours;
}

__attribute__((noinline)) void *malloc(size_t bytes) {
    count_allocation(__builtin_return_address(0));
    return __libc_malloc(bytes);
}

__attribute__((noinline)) void *calloc(size_t count, size_t bytes) {
    count_allocation(__builtin_return_address(0));
    return __libc_calloc(count, bytes);
}

__attribute__((noinline)) void *realloc(void *memory, size_t bytes) {
    count_allocation(__builtin_return_address(0));
    return __libc_realloc(memory, bytes);
}

__attribute__((noinline)) int posix_memalign(void **memory, size_t alignment, size_t bytes) {
    count_allocation(__builtin_return_address(0));
    *memory = __libc_memalign(alignment, bytes);
    return *memory ? 0 : ENOMEM;
}

__attribute__((noinline)) int open(const char *path, int flags, ...) {
    made.files++;
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return openat(AT_FDCWD, path, flags, mode);
}

// Whatever its types: two pointers and a status.
int dnnl_primitive_create(void *primitive, const void *description) {
    made.primitives++;
    int (*next)(void *, const void *) = (int (*)(void *, const void *))dlsym(RTLD_NEXT, "dnnl_primitive_create");
    assert_non_null(next);
    return next(primitive, description);
}

static const GPTConfig CONFIG = {.layers = 2, .heads = 2, .channels = 128, .max_seq_len = 96, .vocab_size = 300};

static void step(GPT *model, int64_t number) {
    int32_t tokens[2 * 96], targets[2 * 96];
    for (int i = 0; i < 2 * 96; i++) {
        tokens[i] = (int32_t)((i * 7 + number) % 300);
        targets[i] = (int32_t)((i * 11 + number) % 300);
    }
    gpt_clear_gradients(model);
    gpt_loss_and_gradients(model, tokens, targets, 2, 96, 1);
    assert_true(isfinite(gpt_take_loss(model)));
    double norm = optimizer_gradient_norm(&model->params, model->backend);
    OptimizerOptions options = {
        .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .grad_clip = 1, .step = number};
    optimizer_step(&model->params, model->backend, options, norm);
    gpt_refresh(model);
}

// `by_onednn`: what the device's description has where oneDNN makes primitives for the recipe's
// GEMMs that no recipe before had; NULL: one before may have made them.
static void check_steady(const char *recipe_name, const char *by_onednn) {
    Recipe recipe = recipe_of(recipe_name);
    GPT model;
    gpt_create(&model, CONFIG, &recipe, backend_cpu(), 2, 96, true, NULL);
    gpt_init(&model, INIT_GPT2, 1);
    gpt_refresh(&model);
    memset(&made, 0, sizeof(made));
    step(&model, 1);
    print_message("    %-8s first step: %d allocations of ours, %d primitives", recipe_name, made.ours,
                  made.primitives);
    char device[512];
    backend_cpu()->describe(device, sizeof(device));
    if (by_onednn && strstr(device, by_onednn)) assert_true(made.primitives > 0); // or they aren't counted
    memset(&made, 0, sizeof(made));
    step(&model, 2);
    step(&model, 3);
    print_message("; two more: %d, %d\n", made.ours, made.primitives);
    assert_int_equal(made.ours, 0);
    assert_int_equal(made.primitives, 0);
    assert_int_equal(made.files, 0);
    gpt_free(&model);
}

static void test_nothing_is_made_after_the_first_step(void **state) {
    (void)state;
    check_steady("mxfp8", "GEMMs by oneDNN");
    check_steady("bf16", NULL);
    check_steady("fp32", "oneDNN");
    check_steady("mxfp8-e5m2-gradients", NULL);
}

// Nor does the search for what isn't finite take memory of the device.
static void test_search_allocates_nothing(void **state) {
    (void)state;
    Recipe recipe = recipe_of("mxfp8");
    GPT model;
    gpt_create(&model, CONFIG, &recipe, backend_cpu(), 2, 96, true, NULL);
    gpt_init(&model, INIT_GPT2, 1);
    gpt_refresh(&model);
    Backend without_memory = *model.backend;
    without_memory.allocate = NULL;
    without_memory.release = NULL;
    model.backend = &without_memory;
    int32_t tokens[2 * 96] = {0};
    assert_false(not_finite_find(&model, tokens, tokens, 2, 96, 1).found);
    model.backend = backend_cpu();
    gpt_free(&model);
}

// That the counters count: an allocation here is one of ours.
static void test_counters(void **state) {
    (void)state;
    memset(&made, 0, sizeof(made));
    free(allocate(10));
    assert_int_equal(made.ours, 1);
    int file = open("/dev/null", O_RDONLY);
    assert_true(file >= 0);
    close(file);
    assert_int_equal(made.files, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counters),
        cmocka_unit_test(test_nothing_is_made_after_the_first_step),
        cmocka_unit_test(test_search_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
