/*
Gradient bias: against ratios and cosines of gradients that two models of their own made, in plain
sums; and that the exact model sees the other's masters, whatever becomes of them, and disturbs
nothing.
*/
#include "check.h"
#include "by_name.h"

#include "llmc/model/gpt.h"
#include "llmc/model/gradient_bias.h"
#include "llmc/model/optimizer.h"
#include "llmc/run/recipe_options.h"
#include "llmc/base/util.h" // allocate

enum { B = 2, T = 32, MICRO_BATCHES = 2, LAYERS = 3, PARTS = LAYERS + 2 }; // parts: each layer, the rest, the total
static const GPTConfig CONFIG = {.layers = LAYERS, .heads = 2, .channels = 64, .max_seq_len = T, .vocab_size = 131};

static GPT make_model(const char *name) {
    Recipe recipe;
    Error error;
    GPT model;
    if (!recipe_parse(&recipe, name, &error)) fail_msg("%s", error.message);
    gpt_create(&model, CONFIG, &recipe, backend_cpu(), B, T, true, NULL);
    gpt_init(&model, INIT_GPT2, 7);
    gpt_refresh(&model);
    return model;
}

// A step's gradients. Everything else that works with the backend's workspace may have come
// between.
static double add_gradients(GPT *model) {
    int32_t tokens[B * T], targets[B * T];
    gpt_clear_gradients(model);
    for (int micro = 0; micro < MICRO_BATCHES; micro++) {
        for (int i = 0; i < B * T; i++) {
            tokens[i] = (int32_t)(random_uniform(3, 5, (uint64_t)(micro * 1000 + i)) * (float)CONFIG.vocab_size);
            targets[i] = (tokens[i] * 7 + 1) % (int32_t)CONFIG.vocab_size;
        }
        gpt_loss_and_gradients(model, tokens, targets, B, T, 1.0 / MICRO_BATCHES);
    }
    return gpt_take_loss(model);
}

static int part_of(const Param *p) {
    int layer;
    return sscanf(p->name, "transformer.h.%d.", &layer) == 1 ? layer : LAYERS;
}

// The definition, in plain sums over all values of each part.
static void expect(GradientBias expected[PARTS], const GPT *model, const GPT *exact) {
    double error[PARTS] = {0}, squares[PARTS] = {0}, exact_squares[PARTS] = {0}, products[PARTS] = {0};
    for (int i = 0; i < model->params.count; i++) {
        const Param *p = &model->params.params[i];
        const float *gradient = p->gradient, *g = exact->params.params[i].gradient;
        const int parts[] = {part_of(p), LAYERS + 1};
        for (int k = 0; k < 2; k++) {
            for (int64_t j = 0; j < param_count(p); j++) {
                double difference = (double)gradient[j] - g[j];
                error[parts[k]] += difference * difference;
                squares[parts[k]] += (double)gradient[j] * gradient[j];
                exact_squares[parts[k]] += (double)g[j] * g[j];
                products[parts[k]] += (double)gradient[j] * g[j];
            }
        }
    }
    for (int k = 0; k < PARTS; k++) {
        expected[k] =
            (GradientBias){sqrt(error[k] / exact_squares[k]), products[k] / sqrt(squares[k]) / sqrt(exact_squares[k])};
    }
}

static void check_biases(const char *name, const GradientBiases *biases, const GradientBias expected[PARTS]) {
    // Sums of at most 2^17 squares in double, in another order: relative errors of some 2^-53 each,
    // 2^-36 at the very most.
    const double tolerance = 0x1p-36;
    double worst = 0;
    for (int k = 0; k < PARTS; k++) {
        const GradientBias *found = k < LAYERS ? &biases->layers[k] : k == LAYERS ? &biases->rest : &biases->total;
        double ratio_error = fabs(found->error_ratio - expected[k].error_ratio) / fmax(expected[k].error_ratio, 1e-9);
        worst = fmax(worst, fmax(ratio_error, fabs(found->cosine - expected[k].cosine)));
    }
    printf("%-10s ||e||/||g|| %.3e, cosine 1 - %.3e; off by %.1e, tolerance %.1e\n", name, biases->total.error_ratio,
           1 - biases->total.cosine, worst, tolerance);
    assert_true(worst <= tolerance);
}

static double measure(const char *name) {
    GradientBias layers[LAYERS], expected[PARTS];
    GradientBiases biases = {.layers = layers};
    GPT model = make_model(name), own = make_model("fp32"), exact;
    gpt_create_exact(&exact, &model);
    add_gradients(&model);
    double loss = add_gradients(&exact);
    assert_true(loss == add_gradients(&own));
    // The exact model's gradients are those of a model of its own, bit for bit.
    for (int i = 0; i < own.params.count; i++) {
        assert_memory_equal(exact.params.params[i].gradient, own.params.params[i].gradient,
                            (size_t)param_count(&own.params.params[i]) * sizeof(float));
    }
    gradient_bias_measure(&biases, &model.params, &exact.params, model.backend, LAYERS);
    expect(expected, &model, &own);
    check_biases(name, &biases, expected);
    double ratio = biases.total.error_ratio;
    if (strcmp(name, "fp32") == 0) {
        assert_true(biases.total.error_ratio == 0 && biases.total.cosine == 1);
        assert_true(biases.rest.error_ratio == 0 && biases.rest.cosine == 1);
        for (int l = 0; l < LAYERS; l++) {
            assert_true(layers[l].error_ratio == 0 && layers[l].cosine == 1);
        }
    }
    gpt_free(&exact);
    gpt_free(&own);
    gpt_free(&model);
    return ratio;
}

static void test_ratios(void **state) {
    (void)state;
    double fp32 = measure("fp32"), bf16 = measure("bf16"), mxfp8 = measure("mxfp8"), mxfp4 = measure("mxfp4");
    assert_true(fp32 == 0);
    assert_true(bf16 > 0 && bf16 < 0.03); // BF16 rounds to 2^-8; a gradient has seen some dozens of roundings
    assert_true(mxfp8 > 2 * bf16);        // E4M3 rounds to 2^-4
    assert_true(mxfp4 > 2 * mxfp8);       // E2M1 to 2^-2
}

// After a step the exact model has the new masters, without being told.
static void test_masters_are_shared(void **state) {
    (void)state;
    GPT model = make_model("mxfp8"), exact, own = make_model("fp32");
    gpt_create_exact(&exact, &model);
    double before = add_gradients(&exact);
    add_gradients(&model);
    double norm = optimizer_gradient_norm(&model.params, model.backend);
    OptimizerOptions options = {.learning_rate = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 1};
    optimizer_step(&model.params, model.backend, options, norm);
    double after = add_gradients(&exact);
    for (int i = 0; i < own.params.count; i++) {
        Param *p = &own.params.params[i];
        memcpy(p->master, model.params.params[i].master, (size_t)param_count(p) * sizeof(float));
    }
    gpt_refresh(&own);
    printf("exact loss before %.6f, after %.6f\n", before, after);
    assert_true(after < before - 0.1 && after == add_gradients(&own));
    gpt_free(&own);
    gpt_free(&exact);
    gpt_free(&model);
}

// What gpt_exact_memory says is taken, and holds neither masters nor moments.
static void test_memory(void **state) {
    (void)state;
    size_t by_kind[NUM_MEMORY_KINDS], whole = 0;
    Recipe recipe = recipe_of("fp32");
    gpt_memory(by_kind, CONFIG, &recipe, backend_cpu(), B, T, true, NULL);
    for (int kind = 0; kind < NUM_MEMORY_KINDS; kind++) {
        whole += by_kind[kind];
    }
    size_t exact = gpt_exact_memory(CONFIG, backend_cpu(), B, T);
    assert_int_equal(exact, whole - by_kind[MEMORY_MASTERS] - by_kind[MEMORY_MOMENTS]);
    assert_int_equal(by_kind[MEMORY_EXACT], 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ratios),
        cmocka_unit_test(test_masters_are_shared),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
