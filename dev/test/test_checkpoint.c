/*
Checkpoints field by field: what is saved of a model and of its training comes back in another model
and another state, every value to the bit. The files as a run leaves them, and what is refused, are
in test_trainer.py and test_faults.py.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "llmc/files/safetensors.h"
#include "llmc/run/checkpoint.h"
#include "by_name.h"
#include "files.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Files have GPT-2's matrices transposed, and a Llama's queries, keys and values apart.
static const GPTConfig GPT2 = {.layers = 2, .heads = 2, .channels = 16, .max_seq_len = 8, .vocab_size = 33};
static const GPTConfig LLAMA = {.layers = 2,
                                .heads = 4,
                                .channels = 16,
                                .max_seq_len = 8,
                                .vocab_size = 33,
                                .kv_heads = 2,
                                .ffn = 24,
                                .activation = ACTIVATION_SWIGLU,
                                .norm = NORM_RMSNORM,
                                .no_biases = true,
                                .positions = POSITIONS_ROPE,
                                .untied_head = true};

// Masters, moments: every value another one.
enum { MASTER, MOMENT1, MOMENT2, NUM_KINDS };
static const char *const KINDS[] = {"master", "moment1", "moment2"};

static float *values_of(const Param *p, int kind) {
    return kind == MASTER ? p->master : kind == MOMENT1 ? p->moment1 : p->moment2;
}

static float value_at(int param, int kind, int64_t index) {
    float value = (float)(param * 10000 + index) + 0.25f * (float)kind;
    return index % 2 && kind != MOMENT2 ? -value : value; // a mean of squares isn't negative
}

static GPT make_model(const GPTConfig *config) {
    GPT model;
    Recipe recipe = recipe_of("mxfp8");
    gpt_create(&model, *config, &recipe, backend_cpu(), 1, 8, true, NULL);
    return model;
}

static char *save(GPT *model, const TrainerState *state) {
    char *path;
    Error error;
    if (!checkpoint_save(&path, directory, model, state, NULL, 0, NULL, 0, &error)) fail_msg("%s", error.message);
    return path;
}

static void check_values(const GPT *model) {
    for (int i = 0; i < model->params.count; i++) {
        const Param *p = &model->params.params[i];
        for (int kind = 0; kind < NUM_KINDS; kind++) {
            for (int64_t j = 0; j < param_count(p); j++) {
                float found = values_of(p, kind)[j], expected = value_at(i, kind, j);
                if (found != expected) {
                    fail_msg("%s: %s %d is %g, not %g", p->name, KINDS[kind], (int)j, (double)found, (double)expected);
                }
            }
        }
    }
}

// As the file has it, under the name that others read it by.
static void check_in_file(const char *path, const char *file_name, const char *name, const Param *p, int param,
                          int kind) {
    SafetensorsFile file;
    Error error;
    char *whole = format_string("%s/%s", path, file_name);
    if (!safetensors_open(&file, whole, &error)) fail_msg("%s", error.message);
    const SafetensorsEntry *entry = safetensors_find(&file, name);
    if (!entry) fail_msg("%s has no %s", whole, name);
    assert_int_equal(entry->num_elements, param_count(p));
    float *values = allocate((size_t)param_count(p) * sizeof(float));
    assert_true(safetensors_read_fp32(&file, entry, values, &error));
    for (int64_t j = 0; j < param_count(p); j++) {
        assert_true(values[j] == value_at(param, kind, j));
    }
    free(values);
    free(whole);
    safetensors_close(&file);
}

static void check_model(const GPTConfig *config, const char *norm) {
    GPT model = make_model(config), other = make_model(config);
    for (int i = 0; i < model.params.count; i++) {
        const Param *p = &model.params.params[i];
        for (int kind = 0; kind < NUM_KINDS; kind++) {
            for (int64_t j = 0; j < param_count(p); j++) {
                values_of(p, kind)[j] = value_at(i, kind, j);
                values_of(&other.params.params[i], kind)[j] = NAN;
            }
        }
    }
    TrainerState state = {.step = 1};
    Error error;
    char *path = save(&model, &state);
    if (!checkpoint_load_weights(&other, path, &error)) fail_msg("%s", error.message);
    if (!checkpoint_load_moments(&other, path, &error)) fail_msg("%s", error.message);
    check_values(&other);
    check_values(&model); // saving changes nothing

    const Param *p = param_of(&model.params, norm);
    int index = (int)(p - model.params.params);
    char *first = format_string("%s.exp_avg", norm), *second = format_string("%s.exp_avg_sq", norm);
    check_in_file(path, "model.safetensors", norm, p, index, MASTER);
    check_in_file(path, "optimizer.safetensors", first, p, index, MOMENT1);
    check_in_file(path, "optimizer.safetensors", second, p, index, MOMENT2);
    free(first);
    free(second);
    free(path);
    gpt_free(&model);
    gpt_free(&other);
}

static void test_weights_and_moments(void **state) {
    (void)state;
    check_model(&GPT2, "transformer.h.1.ln_2.weight");
    check_model(&LLAMA, "model.layers.1.post_attention_layernorm.weight");
}

static GPT make_model_of_zeros(void) {
    GPT model = make_model(&GPT2);
    for (int i = 0; i < model.params.count; i++) {
        const Param *p = &model.params.params[i];
        memset(p->master, 0, (size_t)param_count(p) * sizeof(float));
        memset(p->moment1, 0, (size_t)param_count(p) * sizeof(float));
        memset(p->moment2, 0, (size_t)param_count(p) * sizeof(float));
    }
    return model;
}

// One infinity is found, the last value of a parameter, in masters and in either moment.
static void test_is_finite(void **state) {
    (void)state;
    GPT model = make_model_of_zeros();
    assert_true(checkpoint_is_finite(&model));
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        const Param *p = &model.params.params[1];
        float *value = &values_of(p, kind)[param_count(p) - 1];
        *value = INFINITY;
        assert_false(checkpoint_is_finite(&model));
        *value = 0;
    }
    gpt_free(&model);
}

// The window after `added` values, which are no short decimal fractions.
static OutlierWindow window_of(int added, double first) {
    OutlierWindow window = {0};
    for (int i = 0; i < added; i++) {
        outlier_add(&window, first + (double)i / 3);
    }
    return window;
}

static void check_window(const OutlierWindow *found, const OutlierWindow *expected) {
    assert_int_equal(found->count, expected->count);
    assert_int_equal(found->position, expected->position);
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        assert_true(found->values[i] == expected->values[i]);
    }
}

static TrainerState loaded(const TrainerState *saved) {
    GPT model = make_model_of_zeros();
    TrainerState state;
    Error error;
    char *path = save(&model, saved);
    memset(&state, 0x55, sizeof(state));
    if (!checkpoint_load_state(&state, path, NULL, 0, &error)) fail_msg("%s", error.message);
    free(path);
    gpt_free(&model);
    return state;
}

static void check_state(const TrainerState *saved) {
    TrainerState state = loaded(saved);
    assert_int_equal(state.step, saved->step);
    assert_int_equal(state.next_sample, saved->next_sample);
    assert_int_equal(state.train_tokens, saved->train_tokens);
    assert_int_equal(state.seq_len, saved->seq_len);
    assert_int_equal(state.seed, saved->seed);
    assert_int_equal(state.data_fingerprint, saved->data_fingerprint);
    assert_int_equal(state.data_hash, saved->data_hash);
    assert_int_equal(state.val_hash, saved->val_hash);
    assert_int_equal(state.log_position, saved->log_position);
    assert_int_equal(state.skipped, saved->skipped);
    assert_int_equal(state.nonfinite_in_a_row, saved->nonfinite_in_a_row);
    assert_int_equal(state.evaluated, saved->evaluated);
    assert_int_equal(state.evaluated_at_end, saved->evaluated_at_end);
    assert_true(state.best_val_loss == saved->best_val_loss ||
                (isnan(state.best_val_loss) && isnan(saved->best_val_loss)));
    assert_true(state.seconds == saved->seconds);
    assert_int_equal(state.muon_state, saved->muon_state);
    assert_int_equal(state.spike.count, saved->spike.count);
    assert_int_equal(state.spike.steps, saved->spike.steps);
    assert_true(state.spike.level == saved->spike.level && state.spike.peak == saved->spike.peak);
    check_window(&state.losses, &saved->losses);
    check_window(&state.grad_norms, &saved->grad_norms);
}

// Numbers have as many bits as a state may have: its samples are 2^61 tokens, and 2^62 are refused.
// A window may be empty, part full, just full, or a ring whose oldest value is anywhere.
static void test_state(void **state) {
    (void)state;
    TrainerState saved = {.step = 123456,
                          .next_sample = ((int64_t)1 << 52) + 1,
                          .train_tokens = 1000003,
                          .seq_len = 512,
                          .seed = 1337,
                          .data_fingerprint = ((int64_t)1 << 51) + 5,
                          .data_hash = ((int64_t)1 << 51) + 7,
                          .val_hash = ((int64_t)1 << 50) + 5,
                          .log_position = 98765,
                          .skipped = 7,
                          .nonfinite_in_a_row = 3,
                          .evaluated = 123000,
                          .evaluated_at_end = 122000,
                          .best_val_loss = 10.0 / 3,
                          .spike = {.count = 3, .steps = 17, .level = 10.0 / 7, .peak = 1e3 / 3},
                          .muon_state = MUON_STATE,
                          .seconds = 1e5 / 7};
    static const int ADDED[][2] = {{0, 1}, {5, 200}, {OUTLIER_WINDOW, 0}, {OUTLIER_WINDOW + 1, OUTLIER_WINDOW - 1}};
    for (size_t i = 0; i < sizeof(ADDED) / sizeof(ADDED[0]); i++) {
        saved.losses = window_of(ADDED[i][0], 2);
        saved.grad_norms = window_of(ADDED[i][1], 1e-3);
        check_state(&saved);
    }
    saved.best_val_loss = NAN; // there was no validation yet
    saved.evaluated = -1;
    saved.data_fingerprint = 0;
    check_state(&saved);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights_and_moments),
        cmocka_unit_test(test_is_finite),
        cmocka_unit_test(test_state),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
