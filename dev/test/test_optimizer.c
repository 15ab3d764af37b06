/*
AdamW over a ParamList against double precision: ten steps with clipping on some of them, decay on
matrices alone, the global norm over all.
*/
#include <omp.h>
#include "check.h"
#include "llmc/model/optimizer.h"

enum { STEPS = 10, THREAD_COUNTS = 2 };

static const double BETA1 = 0.9, BETA2 = 0.999, EPS = 1e-8, WEIGHT_DECAY = 0.1, GRAD_CLIP = 1.0;

// A matrix, a vector, and a parameter of one element; the matrix has an element whose gradient is
// always 0.
static const Param SHAPES[] = {{.name = "matrix", .rows = 33, .cols = 65},
                               {.name = "vector", .rows = 1, .cols = 257, .is_vector = true},
                               {.name = "one", .rows = 1, .cols = 1}};
enum { NUM_PARAMS = sizeof(SHAPES) / sizeof(SHAPES[0]) };

static double learning_rate_of(int64_t step) { return 1e-3 * (double)(step < 5 ? step : 5); }

// Steps 1 to 3 and 7 have gradients that must be clipped, the others' norm is below GRAD_CLIP.
static double gradient_stddev(int64_t step) { return step <= 3 || step == 7 ? 3 : 0.01; }

static ParamList make_list(void) {
    ParamList list = {.sharding = sharding_single()};
    param_list_reserve(&list, NUM_PARAMS);
    for (int i = 0; i < NUM_PARAMS; i++) {
        assert_int_equal(param_list_add(&list, SHAPES[i]), i);
    }
    MemoryPlan plan = {0};
    param_list_layout(&list, &plan, backend_cpu(), true);
    plan = (MemoryPlan){.base = memset(pool_take(plan.used), 0, plan.used)};
    param_list_layout(&list, &plan, backend_cpu(), true);
    for (int i = 0; i < NUM_PARAMS; i++) {
        const Param *p = &list.params[i];
        for (int64_t j = 0; j < param_count(p); j++) {
            p->master[j] = random_normal(7, (uint64_t)i, (uint64_t)j);
        }
    }
    return list;
}

static void fill_gradients(const ParamList *list, int64_t step) {
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        for (int64_t j = 0; j < param_count(p); j++) {
            double z = random_normal(8, (uint64_t)(step * NUM_PARAMS + i), (uint64_t)j);
            p->gradient[j] = i == 0 && j == 5 ? 0 : (float)(gradient_stddev(step) * z);
        }
    }
}

// One parameter in double, with what its value in FP32 can be off by.
typedef struct {
    double *w, *m, *v, *largest, *bound;
} Reference;

static Reference make_reference(const Param *p) {
    int64_t count = param_count(p);
    Reference r = {take_doubles(count), take_doubles(count), take_doubles(count), take_doubles(count),
                   take_doubles(count)};
    for (int64_t j = 0; j < count; j++) {
        r.w[j] = p->master[j];
        r.m[j] = r.v[j] = r.largest[j] = r.bound[j] = 0;
    }
    return r;
}

// The paper's algorithm 2. By step t the moments are sums of t terms, each off by a few roundings
// relative to the largest gradient so far, and that is divided by sqrt(v): (4 t + 8) roundings,
// scaled like the update itself. 1 - beta2 as FP32 has it is off by far more, but by the same in v
// and in its bias correction.
static void reference_step(Reference *r, const Param *p, int64_t step, double scale) {
    double rate = learning_rate_of(step), decay = p->is_vector ? 0 : rate * WEIGHT_DECAY;
    for (int64_t j = 0; j < param_count(p); j++) {
        double g = p->gradient[j] * scale;
        r->m[j] = BETA1 * r->m[j] + (1 - BETA1) * g;
        r->v[j] = BETA2 * r->v[j] + (1 - BETA2) * g * g;
        r->largest[j] = fmax(r->largest[j], fabs(g));
        double root = sqrt(r->v[j] / (1 - pow(BETA2, (double)step))) + EPS;
        double update = rate * r->m[j] / (1 - pow(BETA1, (double)step)) / root;
        r->bound[j] += (double)(4 * step + 8) * U_FP32 * rate * r->largest[j] / root;
        r->w[j] = r->w[j] * (1 - decay) - update;
        r->bound[j] += 3 * U_FP32 * (fabs(r->w[j]) + fabs(update));
    }
}

static double reference_norm(const ParamList *list) {
    double squares = 0;
    for (int i = 0; i < list->count; i++) {
        for (int64_t j = 0; j < param_count(&list->params[i]); j++) {
            squares += pow(list->params[i].gradient[j], 2);
        }
    }
    return sqrt(squares);
}

static OptimizerOptions options_of(int64_t step) {
    return (OptimizerOptions){.learning_rate = learning_rate_of(step),
                              .beta1 = BETA1,
                              .beta2 = BETA2,
                              .eps = EPS,
                              .weight_decay = WEIGHT_DECAY,
                              .grad_clip = GRAD_CLIP,
                              .step = step};
}

static void test_ten_steps(void **state) {
    (void)state;
    const Backend *backend = backend_cpu();
    ParamList lists[THREAD_COUNTS] = {make_list(), make_list()};
    Reference references[NUM_PARAMS];
    for (int i = 0; i < NUM_PARAMS; i++) {
        references[i] = make_reference(&lists[0].params[i]);
    }
    int clipped = 0;
    for (int64_t step = 1; step <= STEPS; step++) {
        double expected_norm = 0;
        for (int t = 0; t < THREAD_COUNTS; t++) {
            omp_set_num_threads(t + 1);
            fill_gradients(&lists[t], step);
            expected_norm = reference_norm(&lists[t]);
            double norm = optimizer_gradient_norm(&lists[t], backend);
            assert_true(fabs(norm - expected_norm) <= 1e-12 * expected_norm);
            optimizer_step(&lists[t], backend, options_of(step), norm);
        }
        bool clip = expected_norm > GRAD_CLIP;
        clipped += clip;
        Check check = {0};
        for (int i = 0; i < NUM_PARAMS; i++) {
            const Param *p = &lists[0].params[i];
            reference_step(&references[i], p, step, clip ? GRAD_CLIP / expected_norm : 1);
            for (int64_t j = 0; j < param_count(p); j++) {
                check_value(&check, p->master[j], references[i].w[j], references[i].bound[j]);
            }
            check_same_floats(p->master, lists[1].params[i].master, param_count(p));
            check_same_floats(p->moment1, lists[1].params[i].moment1, param_count(p));
            check_same_floats(p->moment2, lists[1].params[i].moment2, param_count(p));
        }
        check_end(&check, "adamw, step %lld, norm %.3f%s", (long long)step, expected_norm, clip ? ", clipped" : "");
    }
    assert_true(clipped > 0 && clipped < STEPS);
    for (int t = 0; t < THREAD_COUNTS; t++) {
        param_list_free(&lists[t]);
    }
    pool_release();
}

// With no gradient at all a matrix decays and a vector stays.
static void test_decay_on_matrices_alone(void **state) {
    (void)state;
    const Backend *backend = backend_cpu();
    ParamList list = make_list();
    float *matrix = copy_floats(list.params[0].master, 33 * 65), *vector = copy_floats(list.params[1].master, 257);
    OptimizerOptions options = options_of(1);
    options.learning_rate = 0.25;
    options.weight_decay = 0.5; // 1 - 0.125 and its products' rounding are FP32's own
    assert_true(optimizer_gradient_norm(&list, backend) == 0);
    optimizer_step(&list, backend, options, 0);
    for (int j = 0; j < 33 * 65; j++) {
        assert_true(list.params[0].master[j] == matrix[j] * 0.875f);
    }
    check_same_floats(list.params[1].master, vector, 257);
    param_list_free(&list);
    pool_release();
}

// grad_clip 0 clips nothing, however large the norm.
static void test_no_clipping(void **state) {
    (void)state;
    const Backend *backend = backend_cpu();
    ParamList list = make_list();
    fill_gradients(&list, 1);
    OptimizerOptions options = options_of(1);
    options.grad_clip = 0;
    optimizer_step(&list, backend, options, optimizer_gradient_norm(&list, backend));
    for (int j = 0; j < 257; j++) {
        float expected = 0.1f * list.params[1].gradient[j];
        assert_true(fabsf(list.params[1].moment1[j] - expected) <= 4e-7f * fabsf(expected));
    }
    param_list_free(&list);
    pool_release();
}

// The first moment after a first step, (1 - beta1) g factor, says what the gradient was multiplied
// by. As FP32 has it 1 - beta1 is off by 2.4e-7; the factor and two products are rounded, 6e-8
// each.
static void check_clip_factor(double stddev, double clip_of_norm, double factor) {
    ParamList list = make_list();
    const Param *vector = &list.params[1];
    for (int64_t j = 0; j < list.gradients_count; j++) {
        list.gradients[j] = (float)stddev * random_normal(9, 0, (uint64_t)j);
    }
    double norm = optimizer_gradient_norm(&list, backend_cpu());
    OptimizerOptions options = options_of(1);
    options.grad_clip = clip_of_norm * norm;
    optimizer_step(&list, backend_cpu(), options, norm);
    Check check = {0};
    for (int64_t j = 0; j < vector->cols; j++) {
        double expected = (1 - BETA1) * vector->gradient[j] * factor;
        check_value(&check, vector->moment1[j], expected, 4.5e-7 * fabs(expected));
    }
    check_end(&check, "norm %.2g, clipped at %.2g", norm, options.grad_clip);
    param_list_free(&list);
    pool_release();
}

// A norm is clipped to the bound itself, however small both are, and one below the bound is left.
static void test_clip_factor(void **state) {
    (void)state;
    static const double STDDEVS[] = {2e-7, 1e-4, 1, 1e4}; // of 2403 values: norms of 1e-5 to 5e5
    for (size_t i = 0; i < sizeof(STDDEVS) / sizeof(STDDEVS[0]); i++) {
        check_clip_factor(STDDEVS[i], 0.3, 0.3);
        check_clip_factor(STDDEVS[i], 0.99, 0.99);
        check_clip_factor(STDDEVS[i], 1.01, 1);
        check_clip_factor(STDDEVS[i], 1e5, 1);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ten_steps),
        cmocka_unit_test(test_decay_on_matrices_alone),
        cmocka_unit_test(test_no_clipping),
        cmocka_unit_test(test_clip_factor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
