/*
Delayed scaling: scales after each step against NumPy's of Transformer Engine's formula
(fixtures/delayed_scales.h), bit for bit, with amaxes of 0, of numbers that aren't finite, and so
small that a scale would overflow; and what is forgotten between steps.
*/
#include "check.h"
#include "by_name.h"
#include "fixtures/delayed_scales.h"
#include "llmc/model/amax_history.h"

static Recipe delayed_recipe(int64_t length, const char *algorithm, int64_t margin, Format format) {
    Recipe recipe = recipe_of("fp8-delayed");
    Error error;
    assert_true(recipe_set_delayed(&recipe, length, algorithm, margin, &error));
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        recipe.format[i] = format;
    }
    return recipe;
}

enum { LAYERS = 3, LAYER = 1 }; // of the layers' scales, those of one between others

static AmaxHistory make_history(DelayedScales *scales, const Recipe *recipe) {
    AmaxHistory history = {0};
    MemoryPlan plan = {.base = pool_take(4096)};
    delayed_scales_layout(scales, recipe, LAYERS, &plan);
    amax_history_layout(&history, recipe, scales, LAYER);
    amax_history_begin(&history, recipe);
    return history;
}

// What a step sees of a tensor, it may see as either operand.
static void see(const AmaxHistory *history, const uint32_t amax[NUM_ROLES], int64_t step) {
    static const GemmOperand OPERANDS[2][NUM_ROLES] = {{FPROP_W, FPROP_X, DGRAD_DY}, {DGRAD_W, WGRAD_X, WGRAD_DY}};
    for (int role = 0; role < NUM_ROLES; role++) {
        *history->scales[OPERANDS[step % 2][role]].amax = amax[role];
    }
}

// Returns the layer's amaxes, to be freed with all that are returned.
static double *read_amaxes(const DelayedScales *scales, double **all) {
    *all = delayed_scales_read(scales, backend_cpu());
    return *all + LAYER * NUM_ROLES;
}

static void make_scales(const DelayedScales *scales, const AmaxHistory *history, const Recipe *recipe) {
    float values[LAYERS][NUM_GEMM_OPERANDS] = {{0}};
    amax_history_make_scales(values[LAYER], history, recipe);
    delayed_scales_write(scales, backend_cpu(), values[0]);
}

static void check_scales(const AmaxHistory *history, const uint32_t expected[NUM_ROLES]) {
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        assert_int_equal(mx_float_bits(*history->scales[i].scale), expected[operand_role((GemmOperand)i)]);
        assert_int_equal(*history->scales[i].amax, 0);
    }
}

static void test_scales(void **state) {
    (void)state;
    static const uint32_t ONES[NUM_ROLES] = {0x3F800000, 0x3F800000, 0x3F800000};
    for (size_t i = 0; i < 2 * COUNT(DELAYED_CASES); i++) {
        int64_t length = DELAYED_CASES[i / 2].length, margin = DELAYED_CASES[i / 2].margin;
        Recipe recipe =
            delayed_recipe(length, DELAYED_CASES[i / 2].algorithm, margin, i % 2 ? FORMAT_E5M2 : FORMAT_E4M3);
        DelayedScales scales;
        AmaxHistory history = make_history(&scales, &recipe);
        make_scales(&scales, &history, &recipe);
        check_scales(&history, ONES);
        for (int64_t step = 0; step < DELAYED_STEPS; step++) {
            double *all;
            see(&history, DELAYED_CASES[i / 2].amax[step], step);
            amax_history_add(&history, &recipe, read_amaxes(&scales, &all));
            free(all);
            make_scales(&scales, &history, &recipe);
            check_scales(&history, i % 2 ? DELAYED_CASES[i / 2].e5m2[step] : DELAYED_CASES[i / 2].e4m3[step]);
        }
        amax_history_free(&history);
        pool_release();
    }
}

// The weight's copies are made between steps, and evaluations too see X.
static void test_a_step_begins(void **state) {
    (void)state;
    Recipe recipe = delayed_recipe(2, "max", 0, FORMAT_E4M3);
    DelayedScales scales;
    AmaxHistory history = make_history(&scales, &recipe);
    const uint32_t seen[NUM_ROLES] = {0x3F000000, 0x40000000, 0x41000000};
    double *all;
    see(&history, seen, 0);
    see(&history, seen, 1);
    delayed_scales_begin_step(&scales, backend_cpu());
    const double *amax = read_amaxes(&scales, &all);
    assert_true(amax[ROLE_WEIGHTS] == 0.5 && amax[ROLE_ACTIVATIONS] == 0 && amax[ROLE_GRADIENTS] == 0);
    free(all);
    amax_history_free(&history);
    pool_release();
}

// Layers that quantize nothing so have no scales.
static void test_other_recipes(void **state) {
    (void)state;
    Recipe recipe = delayed_recipe(2, "max", 0, FORMAT_BF16), current = recipe_of("fp8-current");
    Error error;
    DelayedScales scales;
    AmaxHistory history = make_history(&scales, &recipe);
    assert_true(scales.scales && !history.steps && !history.scales[FPROP_X].scale);
    history = make_history(&scales, &current);
    assert_true(!scales.scales && !history.steps && !history.scales[FPROP_X].scale);
    assert_false(recipe_set_delayed(&current, 0, NULL, 1, &error));
    assert_non_null(strstr(error.message, "fp8-delayed"));
    pool_release();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scales),
        cmocka_unit_test(test_a_step_begins),
        cmocka_unit_test(test_other_recipes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
