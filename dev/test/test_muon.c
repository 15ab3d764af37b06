/*
Muon over a ParamList: four steps of matrices of every kind against PyTorch's Muon and the same in
FP64, by dev/test/fixtures/muon.safetensors (dev/reference/make_muon_fixture.py); which parameters
it takes, the copies that it makes, what is left of the gradients' scale.

Newton-Schulz in BF16 multiplies small singular values, and their rounding, by up to 3.4 in each of
its steps, so that nothing tighter than another BF16 implementation says how far from FP64 it may
be. PyTorch's, the reference, is 0.009 to 0.017 away, by the norm of what the steps changed; we may
be 1.5 times as far as it.
*/
#include "check.h"
#include "by_name.h"
#include "llmc/files/safetensors.h"
#include "llmc/model/linear.h"
#include "llmc/model/optimizer.h"

#define FIXTURE "dev/test/fixtures/muon.safetensors"

enum { STEPS = 4 };
static const char *const CASES[] = {"wide", "tall", "square", "stacked", "row"};
enum { NUM_CASES = sizeof(CASES) / sizeof(CASES[0]) };

static SafetensorsFile file;

static const SafetensorsEntry *entry_of(const char *name, const char *key) {
    char full[64];
    snprintf(full, sizeof(full), "%s%s%s", name, key ? "." : "", key ? key : "");
    const SafetensorsEntry *entry = safetensors_find(&file, full);
    if (!entry) fail_msg("the fixture has no %s", full);
    return entry;
}

static float *read_floats(const char *name, const char *key) {
    Error error;
    const SafetensorsEntry *entry = entry_of(name, key);
    float *values = take_floats(entry->num_elements);
    if (!safetensors_read_fp32(&file, entry, values, &error)) fail_msg("%s", error.message);
    return values;
}

static void read_bytes(const char *name, const char *key, void *out, size_t bytes) {
    Error error;
    const SafetensorsEntry *entry = entry_of(name, key);
    assert_true(entry->bytes <= bytes);
    if (!safetensors_read(&file, entry, out, &error)) fail_msg("%s", error.message);
}

// Places a list with Muon's state, zeros everywhere.
static void place(ParamList *list) {
    MemoryPlan plan = {0};
    param_list_layout(list, &plan, backend_cpu(), true);
    plan = (MemoryPlan){.base = memset(pool_take(plan.used), 0, plan.used)};
    param_list_layout(list, &plan, backend_cpu(), true);
}

static Param param_of_case(const char *name) {
    Param p = {.layer = 0};
    int32_t rows[MAX_PARAM_PARTS] = {0};
    read_bytes(name, "rows", rows, sizeof(rows));
    const SafetensorsEntry *initial = entry_of(name, "initial");
    p.rows = initial->shape[0], p.cols = initial->shape[1];
    for (int k = 0; k < MAX_PARAM_PARTS && rows[1]; k++) {
        p.stacked[k] = rows[k];
    }
    return p;
}

// All cases in one list, as matrices of a layer.
static ParamList make_list(void) {
    ParamList list = {.sharding = sharding_single()};
    list.sharding.muon = true;
    param_list_reserve(&list, NUM_CASES);
    for (int i = 0; i < NUM_CASES; i++) {
        param_list_add(&list, param_of_case(CASES[i]));
    }
    place(&list);
    for (int i = 0; i < NUM_CASES; i++) {
        const Param *p = &list.params[i];
        memcpy(p->master, read_floats(CASES[i], "initial"), (size_t)param_count(p) * sizeof(float));
    }
    return list;
}

static OptimizerOptions read_options(void) {
    double values[3];
    read_bytes("options", NULL, values, sizeof(values));
    return (OptimizerOptions){.beta1 = 0.9,
                              .beta2 = 0.95,
                              .eps = 1e-8,
                              .step = 1,
                              .muon = {.learning_rate = values[0], .momentum = values[1], .weight_decay = values[2]}};
}

// |a - b| by the norm of what changed from `initial` to b.
static double distance(const float *a, const float *b, const float *initial, int64_t count) {
    double difference = 0, change = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        change += ((double)b[i] - initial[i]) * ((double)b[i] - initial[i]);
    }
    return sqrt(difference / change);
}

// Runs the steps with gradients times `scale` and a norm that clips them by as much.
static ParamList run_steps(float scale) {
    ParamList list = make_list();
    OptimizerOptions options = read_options();
    options.grad_clip = 1;
    for (int64_t step = 0; step < STEPS; step++) {
        for (int i = 0; i < NUM_CASES; i++) {
            const Param *p = &list.params[i];
            const float *gradients = read_floats(CASES[i], "gradients") + step * param_count(p);
            for (int64_t j = 0; j < param_count(p); j++) {
                p->gradient[j] = scale * gradients[j];
            }
        }
        optimizer_step(&list, backend_cpu(), options, scale);
    }
    return list;
}

static void test_against_pytorch(void **state) {
    (void)state;
    ParamList list = run_steps(1), clipped = run_steps(64);
    for (int i = 0; i < NUM_CASES; i++) {
        const Param *p = &list.params[i];
        const float *initial = read_floats(CASES[i], "initial"), *exact = read_floats(CASES[i], "exact");
        const float *pytorch = read_floats(CASES[i], "pytorch");
        double ours = distance(p->master, exact, initial, param_count(p));
        double bound = 1.5 * distance(pytorch, exact, initial, param_count(p));
        printf("    %-8s distance from FP64 %.4f, bound %.4f, margin %.2f\n", CASES[i], ours, bound, bound / ours);
        assert_true(ours <= bound);
        // By a power of two: the same bits. A scale that is left shows in the moment alone.
        assert_memory_equal(p->master, clipped.params[i].master, (size_t)param_count(p) * sizeof(float));
        assert_memory_equal(p->moment1, clipped.params[i].moment1, (size_t)param_count(p) * sizeof(float));
    }
    param_list_free(&list);
    param_list_free(&clipped);
    pool_release();
}

// Muon takes matrices of layers; embeddings, heads and vectors have AdamW's two moments and step.
static void test_what_it_takes(void **state) {
    (void)state;
    static const Param PARAMS[] = {{.rows = 8, .cols = 8, .layer = 0},
                                   {.rows = 8, .cols = 8, .layer = -1},
                                   {.rows = 1, .cols = 8, .layer = 0, .is_vector = true}};
    ParamList list = {.sharding = sharding_single()};
    list.sharding.muon = true;
    param_list_reserve(&list, 3);
    for (int i = 0; i < 3; i++) {
        param_list_add(&list, PARAMS[i]);
    }
    place(&list);
    for (int i = 0; i < 3; i++) {
        const Param *p = &list.params[i];
        assert_true(muon_takes(&list, p) == (i == 0));
        assert_true((p->moment2 == NULL) == (i == 0));
        for (int64_t j = 0; j < param_count(p); j++) {
            p->gradient[j] = j % 3 == 0 ? 1 : -1;
        }
    }
    OptimizerOptions options = read_options();
    options.learning_rate = 0.5;
    optimizer_step(&list, backend_cpu(), options, 1);
    for (int i = 1; i < 3; i++) { // AdamW's first step is the rate in each gradient's direction
        assert_true(fabs((double)list.params[i].master[0] + 0.5) < 1e-6);
        assert_true(fabs((double)list.params[i].master[1] - 0.5) < 1e-6);
    }
    // Newton-Schulz counts 10 n^2 k + 5 2 n^3 + 10 n^2 k.
    assert_true(muon_flops(&list) == 30 * 8 * 8 * 8);
    list.sharding.muon = false;
    assert_true(!muon_takes(&list, &list.params[0]) && muon_flops(&list) == 0);
    param_list_free(&list);
    pool_release();
}

// A gradient of zeros moves nothing but by decay.
static void test_zero_gradient(void **state) {
    (void)state;
    ParamList list = make_list();
    OptimizerOptions options = read_options();
    optimizer_step(&list, backend_cpu(), options, 0);
    float decay = (float)(1 - options.muon.learning_rate * options.muon.weight_decay);
    for (int i = 0; i < NUM_CASES; i++) {
        const float *initial = read_floats(CASES[i], "initial");
        for (int64_t j = 0; j < param_count(&list.params[i]); j++) {
            assert_true(list.params[i].master[j] == decay * initial[j]);
        }
    }
    param_list_free(&list);
    pool_release();
}

// The MX and BF16 copies are those of the new masters, byte for byte.
static void test_copies(void **state) {
    (void)state;
    Recipe recipe = recipe_of("mxfp8");
    ParamList list = {.sharding = sharding_single()};
    list.sharding.muon = true;
    Param p = {.rows = 70, .cols = 45, .layer = 0, .init_stddev = 0.1f};
    linear_declare_weight(&p, &recipe);
    p.has_bf16_value = true;
    param_list_reserve(&list, 1);
    param_list_add(&list, p);
    place(&list);
    param_list_init(&list, backend_cpu(), 3);
    const Param *q = &list.params[0];
    fill_floats(q->gradient, param_count(q), 1);
    optimizer_step(&list, backend_cpu(), read_options(), 1);
    size_t elements = (size_t)param_count(q), scales = (size_t)mx_num_scales(AXIS_ROWWISE, q->rows, q->cols);
    uint8_t *rowwise = memcpy(pool_take(elements), q->rowwise.elements, elements);
    uint8_t *columnwise = memcpy(pool_take(elements), q->columnwise.elements, elements);
    uint8_t *rowwise_scales = memcpy(pool_take(scales), q->rowwise.scales, scales);
    uint16_t *bf16 = memcpy(pool_take(2 * elements), q->value.data, 2 * elements);
    param_list_refresh(&list, backend_cpu());
    assert_memory_equal(rowwise, q->rowwise.elements, elements);
    assert_memory_equal(columnwise, q->columnwise.elements, elements);
    assert_memory_equal(rowwise_scales, q->rowwise.scales, scales);
    assert_memory_equal(bf16, q->value.data, 2 * elements);
    param_list_free(&list);
    pool_release();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_pytorch),
        cmocka_unit_test(test_what_it_takes),
        cmocka_unit_test(test_zero_gradient),
        cmocka_unit_test(test_copies),
    };
    Error error;
    if (!safetensors_open(&file, FIXTURE, &error)) fail_msg("%s", error.message);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    safetensors_close(&file);
    return failed;
}
