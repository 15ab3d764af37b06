/*
The proxy's model (dev/proxy/model) against PyTorch: outputs, losses, gradients and optimizer steps
under `fp32`, from dev/test/fixtures/proxy.safetensors, which dev/reference/make_proxy_fixture.py
writes in FP64. Under MX recipes: the same bits whether operands are made as they are quantized or
stored before, and gains that pass through MX. And the samples.
*/
#include "check.h"
#include "llmc/model/optimizer.h"
#include "llmc/run/recipe_options.h"
#include "llmc/files/safetensors.h"
#include "../proxy/data.h"
#include "../proxy/model.h"

#define FIXTURE "dev/test/fixtures/proxy.safetensors"
enum { CASES = 8 };

static const Backend *backend;
static SafetensorsFile file;

typedef struct {
    int index;
    ProxyConfig config;
    int64_t rows, steps;
    ProxyLoss loss;
    bool sgd;
    double rate, momentum;
    double losses[8];
} Case;

static const SafetensorsEntry *entry_of(int index, const char *prefix, const char *name) {
    char full[128];
    snprintf(full, sizeof(full), "%d.%s%s", index, prefix, name);
    const SafetensorsEntry *entry = safetensors_find(&file, full);
    if (!entry) fail_msg("the fixture has no %s", full);
    return entry;
}

static float *read_floats(int index, const char *prefix, const char *name) {
    Error error;
    const SafetensorsEntry *entry = entry_of(index, prefix, name);
    float *values = take_floats(entry->num_elements);
    if (!safetensors_read_fp32(&file, entry, values, &error)) fail_msg("%s", error.message);
    return values;
}

static void read_bytes(int index, const char *name, void *out, size_t bytes) {
    Error error;
    const SafetensorsEntry *entry = entry_of(index, "", name);
    assert_true(entry->bytes <= bytes);
    if (!safetensors_read(&file, entry, out, &error)) fail_msg("%s", error.message);
}

static Case read_case(int index) {
    // As make_proxy_fixture.py numbers them.
    static const Activation ACTIVATIONS[] = {ACTIVATION_GELU, ACTIVATION_RELU, ACTIVATION_RELU2, ACTIVATION_SWIGLU};
    int32_t n[11];
    double rates[2];
    Case c = {.index = index};
    read_bytes(index, "case", n, sizeof(n));
    read_bytes(index, "rates", rates, sizeof(rates));
    read_bytes(index, "losses", c.losses, sizeof(c.losses));
    c.config = (ProxyConfig){.layers = n[0],
                             .width = n[1],
                             .activation = ACTIVATIONS[n[6]],
                             .layernorm = n[7],
                             .attention = n[8],
                             .heads = n[3],
                             .seq_len = n[4]};
    c.rows = n[2];
    c.steps = n[5];
    c.loss = (ProxyLoss)n[9];
    c.sgd = n[10];
    c.rate = rates[0];
    c.momentum = rates[1];
    return c;
}

static Recipe recipe_of(const char *text) {
    Recipe recipe;
    Error error;
    if (!recipe_parse(&recipe, text, &error)) fail_msg("%s", error.message);
    return recipe;
}

static void create(ProxyModel *model, const Case *c, const Recipe *recipe) {
    proxy_create(model, &c->config, recipe, backend, c->rows, true);
    for (int i = 0; i < model->params.count; i++) {
        const Param *p = &model->params.params[i];
        memcpy(p->master, read_floats(c->index, "initial.", p->name), (size_t)param_count(p) * sizeof(float));
    }
    proxy_refresh(model);
}

// The largest difference, relative to the largest value.
static double difference(const float *a, const float *b, int64_t count) {
    double largest = 0, worst = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs(b[i]));
        worst = fmax(worst, isnan(a[i]) ? INFINITY : fabs((double)a[i] - b[i]));
    }
    return worst / largest;
}

static double check_within(const char *what, const Case *c, double value, double bound) {
    if (!(value <= bound)) fail_msg("case %d, %s: %g is over %g", c->index, what, value, bound);
    return value;
}

// A branch's forward and backward passes are six products of up to 64 terms, whose roundings are
// random; attention's scores, of up to 30, are off by as many roundings and are exponents. 256
// roundings, relative to the largest value, are ample. Optimizer steps of such gradients are off by
// a hundredth of what they change: Adam divides by its own moments.
static void check_case(const Case *c) {
    const double bound = 256 * U_FP32;
    ProxyModel model;
    Recipe recipe = recipe_of("fp32");
    create(&model, c, &recipe);
    int64_t count = c->rows * c->config.width;
    float *xs = read_floats(c->index, "", "x"), *targets = read_floats(c->index, "", "target");
    double gradients = 0, finals = 0, losses = 0;
    for (int64_t step = 0; step < c->steps; step++) {
        Tensor x = tensor_make(xs + step * count, FORMAT_FP32, c->rows, c->config.width), target = x;
        target.data = targets + step * count;
        double loss = proxy_loss_and_gradients(&model, c->loss, x, target);
        losses = fmax(losses, fabs(loss / c->losses[step] - 1));
        for (int i = 0; i < model.params.count && step == 0; i++) {
            const Param *p = &model.params.params[i];
            gradients =
                fmax(gradients, difference(p->gradient, read_floats(c->index, "grad.", p->name), param_count(p)));
        }
        if (step == 0) {
            double output = difference(model.output.data, read_floats(c->index, "", "output"), count);
            check_within("output", c, output, bound);
        }
        if (c->sgd) {
            optimizer_sgd_step(&model.params, backend, c->rate, c->momentum);
        } else {
            OptimizerOptions options = {
                .learning_rate = c->rate, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = step + 1};
            optimizer_step(&model.params, backend, options, 0);
        }
    }
    for (int i = 0; i < model.params.count; i++) {
        const Param *p = &model.params.params[i];
        finals = fmax(finals, difference(p->master, read_floats(c->index, "final.", p->name), param_count(p)));
    }
    printf("# case %d: losses off by %.2g, gradients %.2g (bound %.2g), final weights %.2g (bound 1e-4)\n", c->index,
           losses, gradients, bound, finals);
    check_within("losses", c, losses, 1e-4);
    check_within("gradients", c, gradients, bound);
    check_within("final weights", c, finals, 1e-4);
    proxy_free(&model);
    pool_release();
}

static void test_pytorch(void **state) {
    (void)state;
    for (int i = 0; i < CASES; i++) {
        Case c = read_case(i);
        check_case(&c);
    }
}

// Bytes of the gradients, with or without statistics, which have operands stored before they are
// quantized.
static float *gradients_of(const Case *c, const Recipe *recipe, bool stats, int64_t *count, double *loss) {
    ProxyModel model;
    create(&model, c, recipe);
    QuantStats counted[NUM_GEMM_OPERANDS] = {{0}};
    for (int i = 0; i < model.branches.count && stats; i++) {
        model.branches.branches[i].first.stats = model.branches.branches[i].second.stats = counted;
    }
    Tensor x = tensor_make(read_floats(c->index, "", "x"), FORMAT_FP32, c->rows, c->config.width), target = x;
    target.data = read_floats(c->index, "", "target");
    *loss = proxy_loss_and_gradients(&model, c->loss, x, target);
    *count = model.params.gradients_count;
    float *gradients = take_floats(*count);
    memcpy(gradients, model.params.gradients, (size_t)*count * sizeof(float));
    proxy_free(&model);
    return gradients;
}

static void test_made_or_stored(void **state) {
    (void)state;
    static const char *const NAMES[] = {
        "fp32", "bf16", "mxfp8", "mxfp8-ocp", "mxfp8-forward-only", "mxfp8-weights-only"};
    for (int i = 0; i < CASES * 6; i++) {
        Case c = read_case(i / 6);
        Recipe recipe = recipe_of(NAMES[i % 6]);
        int64_t count;
        double loss, stored_loss;
        const float *made = gradients_of(&c, &recipe, false, &count, &loss);
        const float *stored = gradients_of(&c, &recipe, true, &count, &stored_loss);
        assert_true(loss == stored_loss && isfinite(loss));
        if (memcmp(made, stored, (size_t)count * sizeof(float)) != 0) fail_msg("case %d under %s", i / 6, NAMES[i % 6]);
        pool_release();
    }
}

// Gains just under 1, as training makes them: floor's scale clamps them all to 448 * 2^-9, rceil's
// rounds them to 1 (arXiv:2506.20752, section 6.1). The master stays, so does its gradient.
static void test_gains(void **state) {
    (void)state;
    static const struct {
        const char *recipe;
        float value;
    } EXPECTED[] = {
        {"mxfp8-ocp,quantize-ln-affine", 0.875f},
        {"mxfp8,quantize-ln-affine", 1.0f},
        {"mxfp8-ocp", 0.993f},
        {"fp32,quantize-ln-affine", 0.993f},
        {"fp32,format-gains=e4m3,scale-rounding=floor", 0.875f},
    };
    Case c = read_case(0);
    for (size_t i = 0; i < sizeof(EXPECTED) / sizeof(EXPECTED[0]); i++) {
        ProxyModel model;
        Recipe recipe = recipe_of(EXPECTED[i].recipe);
        proxy_create(&model, &c.config, &recipe, backend, c.rows, true);
        proxy_init(&model, INIT_KAIMING_UNIFORM, 1);
        const Param *gain = model.branches.branches[0].norm.weight;
        for (int64_t j = 0; j < gain->cols; j++) {
            gain->master[j] = 0.993f;
        }
        proxy_refresh(&model);
        for (int64_t j = 0; j < gain->cols; j++) {
            assert_true(((const float *)gain->value.data)[j] == EXPECTED[i].value && gain->master[j] == 0.993f);
        }
        // And after an update that changes nothing.
        optimizer_step(&model.params, backend, (OptimizerOptions){.eps = 1e-8, .step = 1}, 0);
        assert_true(((const float *)gain->value.data)[0] == EXPECTED[i].value);
        proxy_free(&model);
    }
}

// Attention's output is wider than the plain model's hidden layer here. What is computed in shared
// scratch, as the teacher's is, has the bits of what is computed in tensors of its own.
static void test_shared_scratch(void **state) {
    (void)state;
    enum { ROWS = 64, WIDTH = 96 };
    ProxyConfig config = {.layers = 2,
                          .width = WIDTH,
                          .activation = ACTIVATION_SWIGLU,
                          .attention = true,
                          .heads = 4,
                          .seq_len = 32,
                          .is_plain = true};
    assert_true(proxy_hidden(&config) < WIDTH);
    Recipe recipe = recipe_of("fp32");
    Tensor x = take_tensor(FORMAT_FP32, ROWS, WIDTH), outputs[2];
    data_normal(x.data, ROWS * WIDTH, 1, 7, INPUT_STREAMS);
    for (int training = 0; training < 2; training++) {
        ProxyModel model;
        proxy_create(&model, &config, &recipe, backend, ROWS, training);
        proxy_init(&model, INIT_KAIMING_UNIFORM, 3);
        proxy_refresh(&model);
        outputs[training] = copy_tensor(proxy_forward(&model, x));
        proxy_free(&model);
    }
    check_same_tensor(outputs[0], outputs[1]);
    pool_release();
}

// Uniform weights stay within 1/sqrt(K) and reach near it; normal ones have gain 0.5's variance.
// The mean of either is within five standard errors of 0.
static void test_init(void **state) {
    (void)state;
    ProxyConfig config = {.layers = 1, .width = 64, .layernorm = true};
    Recipe recipe = recipe_of("fp32");
    ProxyModel model;
    proxy_create(&model, &config, &recipe, backend, 32, true);
    for (int init = 0; init < 2; init++) {
        proxy_init(&model, (ProxyInit)init, 5);
        for (int i = 0; i < model.params.count; i++) {
            const Param *p = &model.params.params[i];
            if (p->is_vector) continue;
            double count = (double)param_count(p), squares = 0, sum = 0, largest = 0;
            for (int64_t j = 0; j < param_count(p); j++) {
                sum += p->master[j];
                squares += (double)p->master[j] * p->master[j];
                largest = fmax(largest, fabs(p->master[j]));
            }
            double bound = 1 / sqrt((double)p->cols);
            double variance = init == INIT_KAIMING_UNIFORM ? bound * bound / 3 : 0.5 / (double)(p->rows + p->cols);
            assert_true(fabs(squares / count / variance - 1) < 0.05);
            assert_true(fabs(sum / count) < 5 * sqrt(variance / count));
            if (init == INIT_KAIMING_UNIFORM) assert_true(largest <= bound && largest > 0.99 * bound);
        }
    }
    proxy_free(&model);
}

// Moments within five standard errors, pairs uncorrelated, and each value a function of seed,
// stream and index alone.
static void test_samples(void **state) {
    (void)state;
    enum { COUNT = 1 << 20 };
    float *x = take_floats(COUNT), *part = take_floats(3001), *other = take_floats(3001);
    data_normal(x, COUNT, 1, 7, INPUT_STREAMS + 3);
    double mean = 0, square = 0, cube = 0, fourth = 0, neighbours = 0, beyond = 0;
    for (int i = 0; i < COUNT; i++) {
        double v = x[i];
        mean += v;
        square += v * v;
        cube += v * v * v;
        fourth += v * v * v * v;
        neighbours += i ? v * x[i - 1] : 0;
        beyond += fabs(v) > 3;
    }
    double error = 1 / sqrt(COUNT);
    printf("# mean %.1e, variance %.5f, third %.1e, fourth %.4f, beyond 3: %.5f\n", mean / COUNT, square / COUNT,
           cube / COUNT, fourth / COUNT, beyond / COUNT);
    assert_true(fabs(mean / COUNT) < 5 * error && fabs(square / COUNT - 1) < 5 * sqrt(2) * error);
    assert_true(fabs(cube / COUNT) < 5 * sqrt(15) * error && fabs(fourth / COUNT - 3) < 5 * sqrt(96) * error);
    assert_true(fabs(neighbours / COUNT) < 5 * error && fabs(beyond / COUNT - 0.0026998) < 5 * sqrt(0.0027) * error);
    data_normal(part, 3001, 1, 7, INPUT_STREAMS + 3);
    assert_memory_equal(part, x, 3001 * sizeof(float));
    data_normal(other, 3001, 1, 7, INPUT_STREAMS + 4);
    assert_true(memcmp(part, other, 3001 * sizeof(float)) != 0);
    pool_release();
}

static int open_fixture(void **state) {
    (void)state;
    Error error;
    backend = backend_cpu();
    if (!safetensors_open(&file, FIXTURE, &error)) fail_msg("%s", error.message);
    return 0;
}

static int close_fixture(void **state) {
    (void)state;
    safetensors_close(&file);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pytorch), cmocka_unit_test(test_made_or_stored), cmocka_unit_test(test_gains),
        cmocka_unit_test(test_init),    cmocka_unit_test(test_samples),        cmocka_unit_test(test_shared_scratch),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
