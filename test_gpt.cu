/*
The whole model against values that PyTorch computed in double precision
(dev/reference/make_fixtures.py and make_models.py), and against itself: in other micro-batches,
chunks and numbers of threads, and under every recipe. Host code only. Run it from the repository's
root. TEST_BACKEND=cuda compares a GPU with PyTorch's values, and no more.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "dev/test/by_name.h"
#include "llmc/model/gpt.h"
#include "llmc/model/optimizer.h"
#include "llmc/base/random.h"
#include "llmc/files/safetensors.h"
#include "llmc/run/quant_stats.h"
#include "llmc/run/scheduler.h"
#include "llmc/base/util.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Unit roundoffs: half the distance from 1 to the next number.
static const double FP32_ROUNDOFF = 0x1p-24, BF16_ROUNDOFF = 0x1p-9;

enum { MAX_TENSOR_NAME = 96 };

static const Backend *tested;

// Printing and comparing

static void report(const char *what, double error, double bound) {
    printf("  %-52s error %.2e  bound %.2e  margin %.1f\n", what, error, bound, bound / error);
    if (!(error <= bound)) fail_msg("%s: error %g is over its bound %g", what, error, bound);
}

// Returns the larger of two errors; NaN is larger than any.
static double worse(double a, double b) { return isnan(a) || a >= b ? a : b; }

// The error nearest to its bound. Start with {0, 1}.
typedef struct {
    double error, bound;
} Worst;

static void worst_add(Worst *worst, double error, double bound) {
    if (isnan(error) || error * worst->bound >= worst->error * bound) *worst = (Worst){error, bound};
}

static double largest(const float *values, int64_t count) {
    double result = 0;
    for (int64_t i = 0; i < count; i++) {
        result = worse(result, fabs(values[i]));
    }
    return result;
}

static double largest_difference(const float *a, const float *b, int64_t count) {
    double result = 0;
    for (int64_t i = 0; i < count; i++) {
        result = worse(result, fabs((double)a[i] - b[i]));
    }
    return result;
}

static double cosine_similarity(const float *a, const float *b, int64_t count) {
    double aa = 0, bb = 0, ab = 0;
    for (int64_t i = 0; i < count; i++) {
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
        ab += (double)a[i] * b[i];
    }
    return ab / sqrt(aa * bb);
}

static bool all_finite(const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(values[i])) return false;
    }
    return true;
}

// Models

static const GPTConfig ODD = {.layers = 2, .heads = 3, .channels = 96, .max_seq_len = 50, .vocab_size = 131};

// A model with all that isn't GPT-2's.
static const GPTConfig MODERN = {.layers = 2,
                                 .heads = 6,
                                 .channels = 96,
                                 .max_seq_len = 50,
                                 .vocab_size = 131,
                                 .kv_heads = 3,
                                 .ffn = 88,
                                 .activation = ACTIVATION_SWIGLU,
                                 .norm = NORM_RMSNORM,
                                 .no_biases = true,
                                 .positions = POSITIONS_ROPE,
                                 .qk_norm = true,
                                 .untied_head = true};
static const GPTConfig *const KINDS[] = {&ODD, &MODERN};
enum { NUM_KINDS = sizeof(KINDS) / sizeof(KINDS[0]) };

static GPT make_model(GPTConfig config, const Recipe *recipe, int64_t B, int64_t T) {
    GPT model;
    gpt_create(&model, config, recipe, tested, B, T, true, NULL);
    gpt_init(&model, INIT_GPT2, 7);
    gpt_refresh(&model);
    return model;
}

// Returns a copy of what the backend has; to be freed.
static float *on_host(const GPT *model, const float *values, int64_t count) {
    float *copy = (float *)allocate((size_t)count * sizeof(float));
    model->backend->copy_to_host(copy, values, (size_t)count * sizeof(float));
    return copy;
}

// Returns every gradient, one after the other; to be freed.
static float *copy_gradients(const GPT *model) {
    float *copy = (float *)allocate((size_t)param_list_count(&model->params) * sizeof(float)), *at = copy;
    for (int i = 0; i < model->params.count; i++) {
        const Param *p = &model->params.params[i];
        model->backend->copy_to_host(at, p->gradient, (size_t)param_count(p) * sizeof(float));
        at += param_count(p);
    }
    return copy;
}

static size_t gradient_bytes(const GPT *model) { return (size_t)param_list_count(&model->params) * sizeof(float); }

// Returns the gradients of one micro-batch alone; to be freed.
static float *gradients_of(GPT *model, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T,
                           double *loss) {
    gpt_clear_gradients(model);
    gpt_loss_and_gradients(model, tokens, targets, B, T, 1);
    double result = gpt_take_loss(model);
    if (loss) *loss = result;
    return copy_gradients(model);
}

// Compares two sets of gradients by parameter; the bound is `relative` of each parameter's largest
// value.
static void compare_gradients(const char *what, const GPT *model, const float *a, const float *b, double relative) {
    double worst = 0;
    for (int i = 0; i < model->params.count; i++) {
        int64_t count = param_count(&model->params.params[i]);
        worst = worse(worst, largest_difference(a, b, count) / largest(b, count));
        a += count;
        b += count;
    }
    report(what, worst, relative);
}

enum { MAX_TOKENS = 512 };

typedef struct {
    int32_t tokens[MAX_TOKENS], targets[MAX_TOKENS];
} Batch;

static Batch make_batch(int64_t vocab_size, uint64_t seed) {
    Batch batch;
    for (int i = 0; i < MAX_TOKENS; i++) {
        batch.tokens[i] = (int32_t)((double)vocab_size * random_uniform(seed, 0, (uint64_t)i));
        batch.targets[i] = (int32_t)((double)vocab_size * random_uniform(seed, 1, (uint64_t)i));
    }
    return batch;
}

// Fixtures

typedef struct {
    SafetensorsFile files[2];
    int num_files;
    GPTConfig config;
    int64_t steps, B, T;
    int32_t *tokens, *targets; // (steps, B, T)
} Fixture;

static const SafetensorsEntry *fixture_find(const Fixture *f, const char *name, const SafetensorsFile **file) {
    for (int i = 0; i < f->num_files; i++) {
        *file = &f->files[i];
        const SafetensorsEntry *entry = safetensors_find(*file, name);
        if (entry) return entry;
    }
    return NULL;
}

static const SafetensorsEntry *fixture_entry(const Fixture *f, const char *name, const SafetensorsFile **file) {
    const SafetensorsEntry *entry = fixture_find(f, name, file);
    if (!entry) fail_msg("the fixture has no tensor '%s'", name);
    return entry;
}

// Read a tensor as FP32, or as it is in the file; to be freed.
static float *fixture_read_fp32(const Fixture *f, const char *name) {
    Error error;
    const SafetensorsFile *file;
    const SafetensorsEntry *entry = fixture_entry(f, name, &file);
    float *values = (float *)allocate((size_t)entry->num_elements * sizeof(float));
    if (!safetensors_read_fp32(file, entry, values, &error)) fail_msg("%s", error.message);
    return values;
}

static void *fixture_read(const Fixture *f, const char *name, const char *dtype) {
    Error error;
    const SafetensorsFile *file;
    const SafetensorsEntry *entry = fixture_entry(f, name, &file);
    assert_string_equal(entry->dtype, dtype);
    void *values = allocate(entry->bytes);
    if (!safetensors_read(file, entry, values, &error)) fail_msg("%s", error.message);
    return values;
}

// Reads a parameter that files hold in parts, one below the other.
static float *fixture_read_parts(const Fixture *f, const char *prefix, const Param *p) {
    float *values = (float *)allocate((size_t)param_count(p) * sizeof(float)), *at = values;
    int64_t cols = p->is_vector ? 1 : p->cols;
    for (int i = 0; i < p->num_parts; i++) {
        char name[MAX_TENSOR_NAME];
        const SafetensorsFile *file;
        snprintf(name, sizeof(name), "%s%s", prefix, p->parts[i].name);
        const SafetensorsEntry *entry = fixture_entry(f, name, &file);
        assert_int_equal(entry->shape[0], p->parts[i].rows);
        assert_int_equal(entry->num_elements, p->parts[i].rows * cols);
        float *part = fixture_read_fp32(f, name);
        memcpy(at, part, (size_t)entry->num_elements * sizeof(float));
        at += entry->num_elements;
        free(part);
    }
    assert_int_equal(at - values, param_count(p));
    return values;
}

// Reads "<prefix><name>" of a parameter, in the parameter's own layout; to be freed.
static float *fixture_read_param(const Fixture *f, const char *prefix, const Param *p) {
    if (p->num_parts) return fixture_read_parts(f, prefix, p);
    char name[MAX_TENSOR_NAME];
    snprintf(name, sizeof(name), "%s%s", prefix, p->name);
    float *in_file = fixture_read_fp32(f, name);
    const SafetensorsFile *file;
    const SafetensorsEntry *entry = fixture_entry(f, name, &file);
    assert_int_equal(entry->ndim, p->is_vector ? 1 : 2);
    assert_int_equal(entry->shape[0], p->is_vector || p->file_transposed ? p->cols : p->rows);
    assert_int_equal(entry->num_elements, param_count(p));
    if (!p->file_transposed) return in_file;
    float *values = (float *)allocate((size_t)param_count(p) * sizeof(float));
    for (int64_t row = 0; row < p->rows; row++) {
        for (int64_t col = 0; col < p->cols; col++) {
            values[row * p->cols + col] = in_file[col * p->rows + row];
        }
    }
    free(in_file);
    return values;
}

static Fixture fixture_open_files(const char *const *paths) {
    Fixture f = {0};
    Error error;
    const SafetensorsFile *file;
    for (; paths[f.num_files]; f.num_files++) {
        if (!safetensors_open(&f.files[f.num_files], paths[f.num_files], &error)) fail_msg("%s", error.message);
    }
    const SafetensorsEntry *tokens = fixture_entry(&f, "tokens", &file);
    f.steps = tokens->shape[0];
    f.B = tokens->shape[1];
    f.T = tokens->shape[2];
    f.tokens = (int32_t *)fixture_read(&f, "tokens", "I32");
    f.targets = (int32_t *)fixture_read(&f, "targets", "I32");
    return f;
}

static Fixture fixture_open(const char *const *paths) {
    Fixture f = fixture_open_files(paths);
    const SafetensorsFile *file;
    int32_t *layers_heads = (int32_t *)fixture_read(&f, "layers_heads", "I32");
    const SafetensorsEntry *wte = fixture_entry(&f, "transformer.wte.weight", &file);
    const SafetensorsEntry *wpe = fixture_entry(&f, "transformer.wpe.weight", &file);
    f.config = (GPTConfig){.layers = layers_heads[0],
                           .heads = layers_heads[1],
                           .channels = wte->shape[1],
                           .max_seq_len = wpe->shape[0],
                           .vocab_size = wte->shape[0]};
    free(layers_heads);
    return f;
}

// Returns what make_models.py says of a model.
static const char *said(const Fixture *f, const char *key) {
    const char *text = safetensors_metadata(&f->files[0], key);
    if (!text) fail_msg("the fixture doesn't say '%s'", key);
    return text;
}

static int said_name(const Fixture *f, const char *key, const char *const *names) {
    for (int i = 0; names[i]; i++) {
        if (strcmp(names[i], said(f, key)) == 0) return i;
    }
    fail_msg("%s is '%s'", key, said(f, key));
    return -1;
}

static bool said_true(const Fixture *f, const char *key) { return strcmp(said(f, key), "True") == 0; }

static const char *const MODELS[] = {"llama", "olmo", "nemotron", "no_affine", "mixed"};
enum { NUM_MODELS = sizeof(MODELS) / sizeof(MODELS[0]) };

static Fixture fixture_open_model(const char *name) {
    char path[128];
    snprintf(path, sizeof(path), "dev/test/fixtures/model_%s.safetensors", name);
    Fixture f = fixture_open_files((const char *const[]){path, NULL});
    PositionKind positions = (PositionKind)said_name(&f, "positions", POSITION_NAMES);
    f.config = (GPTConfig){.layers = atoi(said(&f, "layers")),
                           .heads = atoi(said(&f, "heads")),
                           .channels = atoi(said(&f, "channels")),
                           .max_seq_len = atoi(said(&f, "max_seq_len")),
                           .vocab_size = atoi(said(&f, "vocab_size")),
                           .kv_heads = atoi(said(&f, "kv_heads")),
                           .ffn = atoi(said(&f, "ffn")),
                           .activation = (Activation)said_name(&f, "activation", ACTIVATION_NAMES),
                           .norm = (NormKind)said_name(&f, "norm", NORM_NAMES),
                           .no_norm_affine = said_true(&f, "no_norm_affine"),
                           .no_biases = said_true(&f, "no_biases"),
                           .positions = positions,
                           .rope_theta = positions == POSITIONS_ROPE ? atof(said(&f, "rope_theta")) : 0,
                           .qk_norm = said_true(&f, "qk_norm"),
                           .untied_head = said_true(&f, "untied_head")};
    Error error;
    if (!gpt_config_check(&f.config, &error)) fail_msg("%s: %s", name, error.message);
    return f;
}

static const char *const WIDE[] = {"dev/test/fixtures/gpt_wide.safetensors",
                                   "dev/test/fixtures/gpt_wide_gradients.safetensors", NULL};
static const char *const LONG[] = {"dev/test/fixtures/gpt_long.safetensors", NULL};

static void fixture_close(Fixture *f) {
    for (int i = 0; i < f->num_files; i++) {
        safetensors_close(&f->files[i]);
    }
    free(f->tokens);
    free(f->targets);
}

// Makes a model with the fixture's weights.
static GPT fixture_model(const Fixture *f, const char *recipe_name) {
    Recipe recipe = recipe_of(recipe_name);
    GPT model;
    gpt_create(&model, f->config, &recipe, tested, f->B, f->T, true, NULL);
    for (int i = 0; i < model.params.count; i++) {
        Param *p = &model.params.params[i];
        float *values = fixture_read_param(f, "", p);
        tested->copy_to_device(p->master, values, (size_t)param_count(p) * sizeof(float));
        free(values);
    }
    gpt_refresh(&model);
    return model;
}

/*
Bounds. Each stage of the network (GEMM, norm, attention, activation, addition) sums at most K
products in FP32, whose roundings add up like a random walk: an error of sqrt(K) roundoffs of its
output's scale. A stage passes the errors of those before it on at about their own scale, so the
errors of S stages add up like a random walk too. Bounds take 4 such standard deviations: 4 sqrt(S
K) roundoffs of the tensor's largest value.
*/
static double stages_forward(const GPTConfig *c) {
    int more = c->qk_norm + (c->positions == POSITIONS_ROPE) + (c->activation == ACTIVATION_SWIGLU);
    return (8 + more) * (double)c->layers + 3;
}

static double longest_sum(const Fixture *f) {
    double wide = fmax(4 * (double)f->config.channels, (double)gpt_ffn(&f->config)), rows = (double)(f->B * f->T),
           vocab = (double)f->config.vocab_size;
    return fmax(fmax(wide, rows), vocab);
}

static double forward_bound(const Fixture *f) {
    return 4 * sqrt(stages_forward(&f->config) * longest_sum(f)) * FP32_ROUNDOFF;
}

// Returns the bound of gradients: their stages are forward's, then as many back.
static double gradient_bound(const Fixture *f) { return sqrt(2) * forward_bound(f); }

// Returns the bound of the mean loss. A row's loss is off by its target's logit's error less the
// softmax's mean of them, and by its own rounding; the mean loss is the mean of as many independent
// errors as there are rows.
static double loss_bound(const Fixture *f, double logits_scale, double loss) {
    return (sqrt(2) * forward_bound(f) * logits_scale + 4 * FP32_ROUNDOFF * loss) / sqrt((double)(f->B * f->T));
}

static void check_forward_and_gradients(Fixture f) {
    GPT model = fixture_model(&f, "fp32");
    double *losses = (double *)fixture_read(&f, "losses", "F64");
    int64_t V = f.config.vocab_size, count = f.B * f.T * V;

    float *expected = fixture_read_fp32(&f, "logits");
    float *logits = (float *)allocate((size_t)count * sizeof(float));
    double scale = largest(expected, count);
    gpt_logits(&model, logits, f.tokens, f.B, f.T, 0, f.B * f.T);
    report("logits", largest_difference(logits, expected, count), forward_bound(&f) * scale);

    double loss;
    float *gradients = gradients_of(&model, f.tokens, f.targets, f.B, f.T, &loss), *at = gradients;
    report("loss", fabs(loss - losses[0]), loss_bound(&f, scale, losses[0]));

    for (int i = 0; i < model.params.count; i++) {
        const Param *p = &model.params.params[i];
        float *reference = fixture_read_param(&f, "grad.", p);
        char what[MAX_TENSOR_NAME];
        snprintf(what, sizeof(what), "gradient of %s", p->name);
        report(what, largest_difference(at, reference, param_count(p)),
               gradient_bound(&f) * largest(reference, param_count(p)));
        at += param_count(p);
        free(reference);
    }
    free(gradients);
    free(logits);
    free(expected);
    free(losses);
    gpt_free(&model);
    fixture_close(&f);
}

static void test_wide_against_pytorch(void **state) {
    (void)state;
    check_forward_and_gradients(fixture_open(WIDE));
}

static void test_long_against_pytorch(void **state) {
    (void)state;
    check_forward_and_gradients(fixture_open(LONG));
}

static void test_models_against_pytorch(void **state) {
    (void)state;
    for (int i = 0; i < NUM_MODELS; i++) {
        printf("%s\n", MODELS[i]);
        check_forward_and_gradients(fixture_open_model(MODELS[i]));
    }
}

// Ten AdamW steps

// As make_fixtures.py has them.
static const OptimizerOptions ADAMW = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_clip = 1.0};

/*
AdamW moves a weight by learning_rate * u, u = m / (sqrt(v) + eps), where m = sum a_i g_i and v =
sum b_i g_i^2 with weights that add up to 1. What an error of at most d in every g_i can do to u:
- m is off by at most d and sqrt(v), a norm, by at most d, so u by at most
  d (1 + |u|) / (sqrt(v) + eps - d);
- |u| is at most U = sqrt(sum a_i^2 / b_i) (Cauchy and Schwarz), so u is off by at most 2 U, also
  where the gradient is nothing but rounding: the biases of keys, which softmax can't see, have
  gradients of zero.
*/
static double largest_update(int64_t step) {
    double sum = 0;
    for (int64_t age = 0; age < step; age++) {
        double a = (1 - ADAMW.beta1) * pow(ADAMW.beta1, (double)age) / (1 - pow(ADAMW.beta1, (double)step));
        double b = (1 - ADAMW.beta2) * pow(ADAMW.beta2, (double)age) / (1 - pow(ADAMW.beta2, (double)step));
        sum += a * a / b;
    }
    return sqrt(sum);
}

static double update_bound(double v, double gradient_error, double limit) {
    double root = sqrt(v) + ADAMW.eps;
    if (root <= gradient_error) return 2 * limit;
    return fmin(2 * limit, gradient_error * (1 + limit) / (root - gradient_error));
}

// Adds to `bounds` (one for each weight of all parameters) what a step may add to the weights'
// errors; `largest_seen` is each parameter's largest gradient so far.
static void add_weight_bounds(double *bounds, double *largest_seen, const GPT *model, double relative,
                              double gradient_scale, double learning_rate, int64_t step) {
    double limit = largest_update(step), correction = 1 - pow(ADAMW.beta2, (double)step);
    for (int i = 0; i < model->params.count; i++) {
        const Param *p = &model->params.params[i];
        float *gradient = on_host(model, p->gradient, param_count(p)),
              *master = on_host(model, p->master, param_count(p));
        float *moment2 = on_host(model, p->moment2, param_count(p));
        largest_seen[i] = fmax(largest_seen[i], gradient_scale * largest(gradient, param_count(p)));
        for (int64_t j = 0; j < param_count(p); j++, bounds++) {
            double roundings = 4 * FP32_ROUNDOFF * (fabs(master[j]) + learning_rate * limit);
            *bounds +=
                roundings + learning_rate * update_bound(moment2[j] / correction, relative * largest_seen[i], limit);
        }
        free(gradient);
        free(master);
        free(moment2);
    }
}

// Returns what weights whose independent errors are as large as their bounds can do to the loss, to
// first order.
static double loss_change(const double *bounds, const float *gradients, int64_t count) {
    double squares = 0;
    for (int64_t i = 0; i < count; i++) {
        squares += gradients[i] * bounds[i] * gradients[i] * bounds[i];
    }
    return 4 * sqrt(squares);
}

static void compare_final_weights(const Fixture *f, const GPT *model, const double *bounds) {
    int compared = 0;
    for (int i = 0; i < model->params.count; i++) {
        const Param *p = &model->params.params[i];
        char what[MAX_TENSOR_NAME];
        const SafetensorsFile *file;
        snprintf(what, sizeof(what), "final.%s", p->name);
        if (fixture_find(f, what, &file)) {
            float *reference = fixture_read_param(f, "final.", p), *master = on_host(model, p->master, param_count(p));
            Worst worst = {0, 1};
            for (int64_t j = 0; j < param_count(p); j++) {
                double error = fabs((double)master[j] - reference[j]);
                worst_add(&worst, error, bounds[j] + FP32_ROUNDOFF * fabs(reference[j]));
            }
            report(what, worst.error, worst.bound);
            free(reference);
            free(master);
            compared++;
        }
        bounds += param_count(p);
    }
    assert_true(compared > 10);
}

static void check_ten_steps(const char *const *paths) {
    Fixture f = fixture_open(paths);
    GPT model = fixture_model(&f, "fp32");
    double *rates = (double *)fixture_read(&f, "learning_rates", "F64");
    double *losses = (double *)fixture_read(&f, "losses", "F64");
    double *norms = (double *)fixture_read(&f, "gradient_norms", "F64");
    double *bounds = (double *)allocate((size_t)param_list_count(&model.params) * sizeof(double));
    double *largest_seen = (double *)allocate((size_t)model.params.count * sizeof(double));
    Schedule schedule = {SCHEDULE_COSINE, 3e-3, 3, f.steps, 0.1, 0, 0};
    float *logits = fixture_read_fp32(&f, "logits");
    double logits_scale = largest(logits, f.B * f.T * f.config.vocab_size);
    double norm_error = 0;
    Worst worst_loss = {0, 1};

    for (int64_t step = 0; step < f.steps; step++) {
        const int32_t *tokens = f.tokens + step * f.B * f.T, *targets = f.targets + step * f.B * f.T;
        double rate = learning_rate_at(&schedule, step), loss;
        assert_true(fabs(rate - rates[step]) <= 1e-15);

        float *gradients = gradients_of(&model, tokens, targets, f.B, f.T, &loss);
        double error = fabs(loss - losses[step]);
        double bound = loss_bound(&f, logits_scale, losses[step]) +
                       loss_change(bounds, gradients, param_list_count(&model.params));
        free(gradients);
        worst_add(&worst_loss, error, bound);
        double norm = optimizer_gradient_norm(&model.params, model.backend);
        norm_error = worse(norm_error, fabs(norm / norms[step] - 1));

        OptimizerOptions options = ADAMW;
        options.learning_rate = rate;
        options.step = step + 1;
        optimizer_step(&model.params, model.backend, options, norm);
        gpt_refresh(&model);
        add_weight_bounds(bounds, largest_seen, &model, gradient_bound(&f), fmin(1, 1 / norm), rate, step + 1);
    }
    report("losses of ten steps", worst_loss.error, worst_loss.bound);
    report("gradient norms of ten steps, relative", norm_error, gradient_bound(&f));
    compare_final_weights(&f, &model, bounds);
    free(logits);
    free(bounds);
    free(largest_seen);
    free(rates);
    free(losses);
    free(norms);
    gpt_free(&model);
    fixture_close(&f);
}

static void test_wide_ten_steps(void **state) {
    (void)state;
    check_ten_steps(WIDE);
}

static void test_long_ten_steps(void **state) {
    (void)state;
    check_ten_steps(LONG);
}

// Micro-batches

// Sums over at most MAX_TOKENS rows in another order, as in "Bounds" above.
static const double REORDERED = 4 * 22.7 * 0x1p-24;

// Checks that a scale of 0 adds nothing, also where another batch has left its gradients in the
// scratch.
static void test_scale_of_zero(void **state) {
    (void)state;
    Recipe recipe = recipe_of("fp32");
    GPT model = make_model(ODD, &recipe, 2, 37);
    Batch batch = make_batch(ODD.vocab_size, 12);
    double loss;
    float *before = gradients_of(&model, batch.tokens, batch.targets, 2, 37, &loss);
    gpt_loss_and_gradients(&model, batch.tokens, batch.targets, 2, 37, 0);
    float *after = copy_gradients(&model);
    assert_true(gpt_take_loss(&model) == loss);
    assert_true(largest_difference(before, after, param_list_count(&model.params)) == 0);
    free(before);
    free(after);
    gpt_free(&model);
}

static void test_gradient_accumulation(void **state) {
    (void)state;
    Recipe recipe = recipe_of("fp32");
    enum { B = 4, T = 37 };
    GPT model = make_model(ODD, &recipe, B, T);
    Batch batch = make_batch(ODD.vocab_size, 1);
    double whole_loss;
    float *whole = gradients_of(&model, batch.tokens, batch.targets, B, T, &whole_loss);

    gpt_clear_gradients(&model);
    for (int64_t half = 0; half < 2; half++) {
        int64_t first = half * B / 2 * T;
        gpt_loss_and_gradients(&model, batch.tokens + first, batch.targets + first, B / 2, T, 0.5);
    }
    double loss = gpt_take_loss(&model) / 2;
    float *halves = copy_gradients(&model);
    compare_gradients("2 micro-batches against 1, gradients", &model, halves, whole, REORDERED);
    report("2 micro-batches against 1, loss", fabs(loss - whole_loss), REORDERED * whole_loss);
    free(whole);
    free(halves);
    gpt_free(&model);
}

// Checks that a model that was made for more, and has run more, gives the same bits as one made for
// just this micro-batch.
static void check_smaller_micro_batch(GPTConfig config, const char *recipe_name, int64_t B, int64_t T) {
    Recipe recipe = recipe_of(recipe_name);
    Batch batch = make_batch(config.vocab_size, 2);
    double exact_loss, loss;
    GPT exact = make_model(config, &recipe, B, T);
    float *expected = gradients_of(&exact, batch.tokens, batch.targets, B, T, &exact_loss);
    gpt_free(&exact);

    GPT larger = make_model(config, &recipe, 3, 50);
    free(gradients_of(&larger, batch.tokens, batch.targets, 3, 50, NULL));
    float *gradients = gradients_of(&larger, batch.tokens, batch.targets, B, T, &loss);
    assert_true(loss == exact_loss);
    assert_memory_equal(gradients, expected, gradient_bytes(&larger));
    free(gradients);
    free(expected);
    gpt_free(&larger);
}

static void test_smaller_micro_batch(void **state) {
    (void)state;
    const char *const names[] = {"fp32", "bf16", "mxfp8"};
    for (int i = 0; i < 3 * NUM_KINDS; i++) {
        check_smaller_micro_batch(*KINDS[i / 3], names[i % 3], 2, 37);
        check_smaller_micro_batch(*KINDS[i / 3], names[i % 3], 3, 9);
        check_smaller_micro_batch(*KINDS[i / 3], names[i % 3], 1, 1);
    }
}

// Runs one sequence of one token. Attention looks at itself alone, so queries and keys have no
// gradient; and its logits are those of a longer sequence's first token, which sees no other.
static void test_one_token(void **state) {
    (void)state;
    Recipe recipe = recipe_of("fp32");
    int64_t V = ODD.vocab_size, C = ODD.channels;
    GPT model = make_model(ODD, &recipe, 1, 50);
    Batch batch = make_batch(V, 3);
    double loss;
    float one[131], first[131];
    free(gradients_of(&model, batch.tokens, batch.targets, 1, 1, &loss));
    assert_true(isfinite(loss));
    const Param *qkv = param_of(&model.params, "transformer.h.0.attn.c_attn.weight");
    // With p = 1, p (dp - p dp) is nothing but the rounding of p, one or two roundoffs of what
    // values get.
    report("T = 1: gradients of queries and keys against values'", largest(qkv->gradient, 2 * C * C),
           4 * FP32_ROUNDOFF * largest(qkv->gradient + 2 * C * C, C * C));

    gpt_logits(&model, one, batch.tokens, 1, 1, 0, 1);
    gpt_logits(&model, first, batch.tokens, 1, 50, 0, 1);
    report("logits of the first token alone", largest_difference(one, first, V), REORDERED * largest(first, V));
    gpt_free(&model);
}

// Checks that gpt_logits of some rows are those rows of all.
static void test_logits_of_some_rows(void **state) {
    (void)state;
    Recipe recipe = recipe_of("fp32");
    int64_t V = ODD.vocab_size;
    GPT model = make_model(ODD, &recipe, 2, 37);
    Batch batch = make_batch(V, 4);
    float *all = (float *)allocate((size_t)(2 * 37 * V) * sizeof(float));
    float *some = (float *)allocate((size_t)(2 * 37 * V) * sizeof(float));
    gpt_logits(&model, all, batch.tokens, 2, 37, 0, 2 * 37);
    gpt_logits(&model, some, batch.tokens, 2, 37, 36, 3);
    report("logits of rows 36 to 38", largest_difference(some, all + 36 * V, 3 * V), REORDERED * largest(all, V));
    free(all);
    free(some);
    gpt_free(&model);
}

// Goes over the head a chunk at a time: every chunk reads its own rows, the last one fewer.
static void test_logits_in_chunks(void **state) {
    (void)state;
    Recipe recipe = recipe_of("fp32");
    int64_t V = ODD.vocab_size, rows = 2 * 37;
    GPT model = make_model(ODD, &recipe, 2, 37);
    Batch batch = make_batch(V, 18);
    float *whole = (float *)allocate((size_t)(rows * V) * sizeof(float));
    float *chunked = (float *)allocate((size_t)(rows * V) * sizeof(float));
    assert_true(model.head_rows >= rows);
    gpt_logits(&model, whole, batch.tokens, 2, 37, 0, rows);
    model.head_rows = 32;
    gpt_logits(&model, chunked, batch.tokens, 2, 37, 0, rows);
    report("logits in chunks of 32 rows", largest_difference(chunked, whole, rows * V),
           REORDERED * largest(whole, rows * V));
    gpt_logits(&model, chunked, batch.tokens, 2, 37, 5, 40);
    report("logits of rows 5 to 44 in chunks of 32", largest_difference(chunked, whole + 5 * V, 40 * V),
           REORDERED * largest(whole, rows * V));
    free(whole);
    free(chunked);
    gpt_free(&model);
}

// The LM head

// Checks that whatever columns V to Vp of a chunk's logits hold, which are nobody's, no bit of a
// gradient changes. Where GEMMs take them, those of dlogits are zeros that nobody writes.
static void test_vocabulary_padding(void **state) {
    (void)state;
    const char *const names[] = {"fp32", "bf16", "mxfp8"};
    Batch batch = make_batch(ODD.vocab_size, 5);
    for (int i = 0; i < 3; i++) {
        Recipe recipe = recipe_of(names[i]);
        recipe.quantize_lm_head = true;
        GPT model = make_model(ODD, &recipe, 2, 37);
        assert_int_equal(model.logits.stride, 256);
        float *clean = gradients_of(&model, batch.tokens, batch.targets, 2, 37, NULL);
        size_t elements = (size_t)(model.head_rows * model.logits.stride);
        memset(model.logits.data, 0xFF, elements * dtype_size(model.logits.dtype));
        if (model.dlogits.cols == ODD.vocab_size) {
            memset(model.dlogits.data, 0xFF, elements * dtype_size(model.dlogits.dtype));
        }
        float *poisoned = gradients_of(&model, batch.tokens, batch.targets, 2, 37, NULL);
        assert_memory_equal(clean, poisoned, gradient_bytes(&model));
        free(clean);
        free(poisoned);
        gpt_free(&model);
    }
}

// What a backend makes of a model with an odd vocabulary: the loss, then that after a step of
// AdamW, the embedding's gradient (V, C) and three tokens' logits (3, V).
typedef struct {
    double loss, loss_after;
    float *gradient, *logits;
} OddVocabulary;

static OddVocabulary with_odd_vocabulary(const Backend *backend, const Recipe *recipe, int64_t padded) {
    Batch batch = make_batch(ODD.vocab_size, 21);
    int64_t V = ODD.vocab_size, C = ODD.channels;
    size_t bytes = (size_t)(V * C) * sizeof(float);
    OddVocabulary made = {.gradient = (float *)allocate(bytes), .logits = (float *)allocate(bytes)};
    GPT model;
    gpt_create(&model, ODD, recipe, backend, 2, 37, true, NULL);
    assert_int_equal(model.logits.cols, padded);
    gpt_init(&model, INIT_GPT2, 7);
    gpt_refresh(&model);
    gpt_loss_and_gradients(&model, batch.tokens, batch.targets, 2, 37, 1);
    made.loss = gpt_take_loss(&model);
    memcpy(made.gradient, model.wte->gradient, bytes);
    for (int64_t i = V * C; i < padded * C; i++) {
        assert_true(model.wte->gradient[i] == 0);
    }
    OptimizerOptions options = {.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 1};
    optimizer_step(&model.params, backend, options, 1);
    made.loss_after = gpt_loss(&model, batch.tokens, batch.targets, 2, 37);
    gpt_logits(&model, made.logits, batch.tokens, 2, 37, 5, 3);
    gpt_free(&model);
    return made;
}

// Weights that are kept as the values that their copies stand for change no bit.
static void test_decoded_weights(void **state) {
    (void)state;
    Batch batch = make_batch(ODD.vocab_size, 22);
    for (int square = 0; square < 2; square++) {
        Recipe recipe = recipe_of("mxfp8");
        recipe.square_weights = square;
        uint32_t *bits[2];
        for (int decoded = 0; decoded < 2; decoded++) {
            GPT model;
            Sharding sharding = sharding_single();
            sharding.decoded = decoded;
            gpt_create(&model, ODD, &recipe, backend_cpu(), 2, 37, true, &sharding);
            gpt_init(&model, INIT_GPT2, 7);
            gpt_refresh(&model);
            assert_int_equal(gpt_linear(&model, 0, LINEAR_UP)->weight->rowwise.form,
                             decoded ? FORM_DECODED : FORM_PLAIN);
            OptimizerOptions options = {.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
            for (options.step = 1; options.step < 3; options.step++) {
                gpt_clear_gradients(&model);
                gpt_loss_and_gradients(&model, batch.tokens, batch.targets, 2, 37, 1);
                optimizer_step(&model.params, backend_cpu(), options, 1);
            }
            bits[decoded] = (uint32_t *)copy_gradients(&model);
            if (decoded) assert_memory_equal(bits[0], bits[1], gradient_bytes(&model));
            gpt_free(&model);
        }
        free(bits[0]);
        free(bits[1]);
    }
}

// Compares a backend whose GEMMs take the vocabulary padded to 256 with one whose GEMMs take it as
// it is. Nothing that is saved, summed or drawn from is padded but with zeros.
static void test_padded_vocabulary(void **state) {
    (void)state;
    int64_t V = ODD.vocab_size, C = ODD.channels;
    for (int i = 0; i < 3; i++) {
        Recipe recipe = recipe_of(i == 0 ? "bf16" : "mxfp8");
        recipe.quantize_lm_head = i == 2;
        Backend padding = *backend_cpu();
        padding.vocab_multiple = 128;
        OddVocabulary plain = with_odd_vocabulary(backend_cpu(), &recipe, V);
        OddVocabulary padded = with_odd_vocabulary(&padding, &recipe, 256);
        printf("%s%s\n", recipe.name, recipe.quantize_lm_head ? ", its head too" : "");
        report("vocabulary padded, loss", fabs(plain.loss - padded.loss), REORDERED * plain.loss);
        report("  gradient of the embedding", largest_difference(plain.gradient, padded.gradient, V * C),
               2 * 0x1p-8 * largest(plain.gradient, V * C)); // by way of BF16 gradients in another order of sums
        // The first step of AdamW goes by signs of gradients: those that are rounding alone may
        // differ.
        report("  loss after a step", fabs(plain.loss_after - padded.loss_after), 1e-3 * plain.loss_after);
        report("  logits after a step", largest_difference(plain.logits, padded.logits, 3 * V),
               5e-2 * largest(plain.logits, 3 * V));
        free(plain.gradient);
        free(plain.logits);
        free(padded.gradient);
        free(padded.logits);
    }
}

// Compares five chunks of 32 tokens with one, in the same memory.
static void test_head_in_chunks(void **state) {
    (void)state;
    const char *const names[] = {"fp32", "bf16", "mxfp8"};
    // The BF16 gradients of the head's inputs don't change with the chunks; sums over tokens do, in
    // FP32.
    for (int i = 0; i < 3; i++) {
        Recipe recipe = recipe_of(names[i]);
        recipe.quantize_lm_head = i == 2;
        Batch batch = make_batch(ODD.vocab_size, 6);
        GPT model = make_model(ODD, &recipe, 3, 50);
        double whole_loss, loss;
        assert_true(model.head_rows >= 150);
        float *whole = gradients_of(&model, batch.tokens, batch.targets, 3, 50, &whole_loss);
        model.head_rows = 32;
        float *chunked = gradients_of(&model, batch.tokens, batch.targets, 3, 50, &loss);
        char what[64];
        snprintf(what, sizeof(what), "%s: 5 chunks of the head against 1, loss", names[i]);
        report(what, fabs(loss - whole_loss), REORDERED * whole_loss);
        const Param *wte = model.wte;
        snprintf(what, sizeof(what), "%s: gradient of wte", names[i]);
        report(what, largest_difference(chunked, whole, param_count(wte)),
               REORDERED * largest(whole, param_count(wte)));
        if (i == 0) compare_gradients("fp32: every gradient", &model, chunked, whole, REORDERED);
        free(whole);
        free(chunked);
        gpt_free(&model);
    }
}

// Takes a vocabulary so large that a micro-batch of two sequences takes two chunks, and one
// sequence takes one. Losses are read once for many micro-batches of any size, whatever is
// evaluated between them.
static void test_take_loss(void **state) {
    (void)state;
    Recipe recipe = recipe_of("fp32");
    GPT model = make_model(ODD, &recipe, 2, 37);
    Batch batch = make_batch(ODD.vocab_size, 15);
    double sum = 0;
    assert_true(gpt_take_loss(&model) == 0);
    for (int64_t i = 0; i < 2 * MAX_PENDING_LOSSES + 3; i++) {
        int64_t B = 1 + i % 2, T = 37 - i % 5;
        gpt_loss_and_gradients(&model, batch.tokens + i, batch.targets + i, B, T, 1);
        sum += gpt_loss(&model, batch.tokens + i, batch.targets + i, B, T);
    }
    assert_true(gpt_take_loss(&model) == sum);
    assert_true(gpt_take_loss(&model) == 0);
    gpt_free(&model);
}

static int batches_copied;

// Checks that a batch is never copied to the memory of the one before, since a device may copy it
// while it is at the operations that use that one.
static void copy_batch_elsewhere(int32_t *device, const int32_t *tokens, const int32_t *targets,
                                 const int32_t *positions, int64_t count) {
    static const int32_t *last;
    backend_cpu()->copy_batch(device, tokens, targets, positions, count);
    if (batches_copied++ > 0) assert_true(device + 2 * count <= last || device >= last + 2 * count);
    last = device;
}

static void test_batches_alternate(void **state) {
    (void)state;
    Recipe recipe = recipe_of("fp32");
    Batch batch = make_batch(ODD.vocab_size, 16);
    GPT model;
    Backend backend = *backend_cpu();
    backend.copy_batch = copy_batch_elsewhere;
    gpt_create(&model, ODD, &recipe, &backend, 2, 37, true, NULL);
    gpt_init(&model, INIT_GPT2, 7);
    gpt_refresh(&model);
    float *logits = (float *)allocate((size_t)ODD.vocab_size * sizeof(float));
    for (int i = 0; i < 3; i++) {
        gpt_loss_and_gradients(&model, batch.tokens, batch.targets, 2, 37, 1);
        gpt_loss(&model, batch.tokens, batch.targets, 2, 37);
        gpt_logits(&model, logits, batch.tokens, 1, 37, 5, 1);
    }
    assert_int_equal(batches_copied, 9);
    free(logits);
    gpt_free(&model);
}

static void test_large_vocabulary(void **state) {
    (void)state;
    const Backend *whole = tested;
    Backend in_pieces = *tested;
    in_pieces.head_scratch_bytes = 48 << 20;
    tested = &in_pieces;
    Recipe recipe = recipe_of("fp32");
    GPTConfig config = {.layers = 1, .heads = 2, .channels = 16, .max_seq_len = 70, .vocab_size = 50000};
    enum { B = 2, T = 70 };
    GPT model = make_model(config, &recipe, B, T);
    Batch batch = make_batch(config.vocab_size, 7);
    assert_true(model.head_rows >= T && model.head_rows < B * T);
    double loss;
    float *both = gradients_of(&model, batch.tokens, batch.targets, B, T, &loss);
    gpt_clear_gradients(&model);
    gpt_loss_and_gradients(&model, batch.tokens, batch.targets, 1, T, 0.5);
    gpt_loss_and_gradients(&model, batch.tokens + T, batch.targets + T, 1, T, 0.5);
    double sum = gpt_take_loss(&model) / 2;
    float *halves = copy_gradients(&model);
    report("vocabulary of 50000 in 2 chunks, loss", fabs(loss - sum), REORDERED * loss);
    compare_gradients("vocabulary of 50000 in 2 chunks, gradients", &model, both, halves, REORDERED);
    free(both);
    free(halves);
    gpt_free(&model);
    tested = whole;
}

// Quantization statistics

// Checks that statistics change no bit: where they are due, operands are stored before they are
// quantized, and an activation that isn't kept is made again.
static void check_statistics(GPTConfig config, const char *recipe_name) {
    Recipe recipe = recipe_of(recipe_name);
    Batch batch = make_batch(config.vocab_size, 19);
    GPT model = make_model(config, &recipe, 2, 37);
    QuantStats *stats = quant_stats_allocate(&config);
    double loss, counted_loss;
    float *gradients = gradients_of(&model, batch.tokens, batch.targets, 2, 37, &loss);
    quant_stats_collect(&model, stats);
    float *counted = gradients_of(&model, batch.tokens, batch.targets, 2, 37, &counted_loss);
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        int64_t elements = gpt_linear(&model, config.layers - 1, LINEAR_DOWN)->stats[operand].elements;
        bool is_made = operand_role(operand) == ROLE_WEIGHTS && recipe.transform[operand_gemm(operand)];
        assert_true((elements > 0) == (mx_is_mx(recipe.format[operand]) && !is_made));
    }
    assert_true(loss == counted_loss);
    if (memcmp(gradients, counted, gradient_bytes(&model)) != 0) fail_msg("%s: other gradients", recipe_name);
    free(gradients);
    free(counted);
    free(stats);
    gpt_free(&model);
}

static void test_statistics_change_no_bit(void **state) {
    (void)state;
    for (const char *const *name = recipe_names(); *name; name++) {
        for (int kind = 0; kind < NUM_KINDS; kind++) {
            check_statistics(*KINDS[kind], *name);
        }
    }
}

// Validation

static void check_loss_leaves_no_trace(GPTConfig config) {
    Batch batch = make_batch(config.vocab_size, 8);
    for (const char *const *name = recipe_names(); *name; name++) {
        Recipe recipe = recipe_of(*name);
        GPT model = make_model(config, &recipe, 2, 37);
        double loss;
        float *gradients = gradients_of(&model, batch.tokens, batch.targets, 2, 37, &loss);

        // After a validation between two micro-batches the gradients stay, and those of the next
        // are the same.
        assert_true(gpt_loss(&model, batch.tokens, batch.targets, 2, 37) == loss);
        gpt_loss(&model, batch.tokens + 3, batch.targets + 1, 1, 29);
        float *after = copy_gradients(&model);
        assert_memory_equal(after, gradients, gradient_bytes(&model));
        free(after);
        after = gradients_of(&model, batch.tokens, batch.targets, 2, 37, NULL);
        assert_memory_equal(after, gradients, gradient_bytes(&model));
        free(after);
        free(gradients);
        gpt_free(&model);

        GPT untrained; // without memory for a backward pass
        gpt_create(&untrained, config, &recipe, backend_cpu(), 2, 37, false, NULL);
        gpt_init(&untrained, INIT_GPT2, 7);
        gpt_refresh(&untrained);
        assert_true(gpt_loss(&untrained, batch.tokens, batch.targets, 2, 37) == loss);
        gpt_free(&untrained);
    }
}

static void test_loss_leaves_no_trace(void **state) {
    (void)state;
    for (int i = 0; i < NUM_KINDS; i++) {
        check_loss_leaves_no_trace(*KINDS[i]);
    }
}

// Memory

static size_t allocated_bytes;

static void *allocate_counted(size_t bytes) {
    allocated_bytes = bytes;
    return backend_cpu()->allocate(bytes);
}

static void check_memory_adds_up(GPTConfig config) {
    Backend backend = *backend_cpu();
    backend.allocate = allocate_counted;
    for (const char *const *name = recipe_names(); *name; name++) {
        Recipe recipe = recipe_of(*name);
        for (int training = 0; training < 2; training++) {
            size_t by_kind[NUM_MEMORY_KINDS], sum = 0;
            gpt_memory(by_kind, config, &recipe, &backend, 2, 37, training, NULL);
            for (int kind = 0; kind < NUM_MEMORY_KINDS; kind++) {
                sum += by_kind[kind];
            }
            GPT model;
            gpt_create(&model, config, &recipe, &backend, 2, 37, training, NULL);
            assert_int_equal(sum, allocated_bytes);
            size_t masters = (size_t)param_list_count(&model.params) * sizeof(float);
            assert_true(by_kind[MEMORY_MASTERS] >= masters);
            assert_true(by_kind[MEMORY_MASTERS] < masters + (size_t)model.params.count * MEMORY_ALIGNMENT);
            assert_int_equal(by_kind[MEMORY_GRADIENTS], training ? by_kind[MEMORY_MASTERS] : 0);
            assert_int_equal(by_kind[MEMORY_MOMENTS], training ? 2 * by_kind[MEMORY_MASTERS] : 0);
            gpt_free(&model);
        }
    }
}

static void test_memory_adds_up(void **state) {
    (void)state;
    for (int i = 0; i < NUM_KINDS; i++) {
        check_memory_adds_up(*KINDS[i]);
    }
}

static const GPTConfig EVEN = {.layers = 3, .heads = 2, .channels = 64, .max_seq_len = 32, .vocab_size = 100};

// Returns gpt_memory's bytes of `kind` under `recipe` less those under plain mxfp8, for B = 2 and T
// = 32.
static int64_t bytes_over_mxfp8(const Recipe *recipe, MemoryKind kind) {
    size_t by_kind[NUM_MEMORY_KINDS], plain[NUM_MEMORY_KINDS];
    Recipe mxfp8 = recipe_of("mxfp8");
    gpt_memory(by_kind, EVEN, recipe, backend_cpu(), 2, 32, true, NULL);
    gpt_memory(plain, EVEN, &mxfp8, backend_cpu(), 2, 32, true, NULL);
    return (int64_t)by_kind[kind] - (int64_t)plain[kind];
}

/*
By hand, for 64 rows and C = 64, every tensor rounded up to 256 bytes:
- inputs kept in mxfp8, three of 64 x 64 + 2 x 64 scales = 4224 -> 4352 (GELU's output is made
  again); in BF16 three of 8192 and one of 32768: 3 * 3840 + 32768 = 44288 more;
- weights in MX, for each axis 192 x 64 -> 12672 -> 12800, 64 x 64 -> 4352, twice 16896:
  2 * 50944 = 101888;
- the same in BF16: 24576 + 8192 + 2 * 32768 = 98304.
*/
static void test_bf16_layers_take_memory(void **state) {
    (void)state;
    for (int first = 0; first < 3; first++) {
        Recipe recipe = recipe_of("mxfp8");
        int64_t layers = 2;
        recipe.bf16_first_layers = first;
        recipe.bf16_last_layers = layers - first;
        assert_int_equal(bytes_over_mxfp8(&recipe, MEMORY_KEPT), layers * 44288);
        assert_int_equal(bytes_over_mxfp8(&recipe, MEMORY_QUANTIZED), -layers * 101888);
        assert_int_equal(bytes_over_mxfp8(&recipe, MEMORY_WEIGHTS), layers * 98304);
    }
}

// Returns what a block of GPT-2 124M keeps for the backward pass: two models' difference.
static double kept_by_block(const char *recipe_name) {
    Recipe recipe = recipe_of(recipe_name);
    size_t one[NUM_MEMORY_KINDS], two[NUM_MEMORY_KINDS];
    GPTConfig config = {.layers = 1, .heads = 12, .channels = 768, .max_seq_len = 1024, .vocab_size = 50257};
    gpt_memory(one, config, &recipe, backend_cpu(), 4, 1024, true, NULL);
    config.layers = 2;
    gpt_memory(two, config, &recipe, backend_cpu(), 4, 1024, true, NULL);
    return (double)(two[MEMORY_KEPT] - one[MEMORY_KEPT]);
}

static void test_mxfp8_keeps_less(void **state) {
    (void)state;
    double ratio = kept_by_block("mxfp8") / kept_by_block("bf16");
    print_message("    kept for backward: mxfp8 %.3f of bf16, at most 0.7\n", ratio);
    assert_true(ratio <= 0.7);
}

// wte is 100 x 64: rowwise 6400 + 200 scales, columnwise 6400 + 4 x 64, both -> 6656; its input
// 4352 as above.
static void test_quantized_lm_head_takes_memory(void **state) {
    (void)state;
    Recipe recipe = recipe_of("mxfp8");
    recipe.quantize_lm_head = true;
    assert_int_equal(bytes_over_mxfp8(&recipe, MEMORY_KEPT), 4352);
    assert_int_equal(bytes_over_mxfp8(&recipe, MEMORY_QUANTIZED), 2 * 6656);
    assert_int_equal(bytes_over_mxfp8(&recipe, MEMORY_WEIGHTS), 0);
}

// Square weights are stored once instead of for each axis, with a scale for 32 x 32: 192 x 64 ->
// 12288 + 12 -> 12544, 64 x 64 -> 4352, twice 16640.
static void test_square_weights_take_half(void **state) {
    (void)state;
    Recipe recipe = recipe_of("mxfp8");
    recipe.square_weights = true;
    assert_int_equal(bytes_over_mxfp8(&recipe, MEMORY_QUANTIZED), EVEN.layers * (50176 - 101888));
    for (int kind = 0; kind < NUM_MEMORY_KINDS; kind++) {
        if (kind != MEMORY_QUANTIZED) assert_int_equal(bytes_over_mxfp8(&recipe, (MemoryKind)kind), 0);
    }
}

// Recipes

// Takes weights that every scale of theirs represents: blocks of 32 x 32 then give the same bits as
// blocks of 32.
static void test_square_weights_that_lose_nothing(void **state) {
    (void)state;
    double losses[2];
    float *gradients[2];
    size_t bytes = 0;
    for (int square = 0; square < 2; square++) {
        Recipe recipe = recipe_of("mxfp8");
        recipe.square_weights = square;
        GPT model = make_model(ODD, &recipe, 2, 37);
        for (int i = 0; i < model.params.count; i++) {
            const Param *p = &model.params.params[i];
            for (int64_t j = 0; !p->is_vector && j < param_count(p); j++) {
                p->master[j] = copysignf(0x1p-5f, p->master[j]);
            }
        }
        gpt_refresh(&model);
        Batch batch = make_batch(ODD.vocab_size, 13);
        gradients[square] = gradients_of(&model, batch.tokens, batch.targets, 2, 37, &losses[square]);
        bytes = gradient_bytes(&model);
        gpt_free(&model);
    }
    assert_true(losses[0] == losses[1]);
    assert_memory_equal(gradients[0], gradients[1], bytes);
    free(gradients[0]);
    free(gradients[1]);
}

// Computes the loss and gradients of one batch under a recipe.
static float *run_recipe(const Recipe *recipe, double *loss) {
    GPT model = make_model(EVEN, recipe, 2, 32);
    Batch batch = make_batch(EVEN.vocab_size, 9);
    float *gradients = gradients_of(&model, batch.tokens, batch.targets, 2, 32, loss);
    gpt_free(&model);
    return gradients;
}

static void test_adjusted_recipes_take_effect(void **state) {
    (void)state;
    GPT model;
    Recipe bf16 = recipe_of("bf16"), mxfp8 = recipe_of("mxfp8"), adjusted = mxfp8;
    gpt_create(&model, EVEN, &bf16, backend_cpu(), 2, 32, true, NULL);
    size_t bytes = gradient_bytes(&model);
    gpt_free(&model);
    double bf16_loss, mxfp8_loss, loss;
    float *in_bf16 = run_recipe(&bf16, &bf16_loss), *in_mxfp8 = run_recipe(&mxfp8, &mxfp8_loss);
    assert_true(bf16_loss != mxfp8_loss);

    adjusted.bf16_first_layers = EVEN.layers;
    float *gradients = run_recipe(&adjusted, &loss);
    assert_true(loss == bf16_loss);
    assert_memory_equal(gradients, in_bf16, bytes);
    free(gradients);

    adjusted.bf16_first_layers = 1;
    gradients = run_recipe(&adjusted, &loss);
    assert_true(loss != bf16_loss && loss != mxfp8_loss);
    free(gradients);

    adjusted = mxfp8;
    adjusted.quantize_lm_head = true;
    gradients = run_recipe(&adjusted, &loss);
    assert_true(isfinite(loss) && loss != mxfp8_loss);
    assert_true(memcmp(gradients, in_mxfp8, bytes) != 0);
    free(gradients);
    free(in_bf16);
    free(in_mxfp8);
}

/*
A logit of the bf16 recipe has passed S stages of one rounding to BF16 each: sqrt(S) roundoffs of
its scale as a random walk. A row's loss is off by a logit's error, less the softmax's mean of them:
sqrt(2) times that. Rows are N samples of it, so that the mean loss is off by sqrt(2 S / N)
roundoffs of the logits' scale; 4 such standard deviations are allowed.
*/
static void check_bf16_near_fp32(Fixture f) {
    int64_t V = f.config.vocab_size, N = f.B * f.T;
    double losses[2];
    float *gradients[2], *logits = fixture_read_fp32(&f, "logits");
    const char *const names[] = {"fp32", "bf16"};
    for (int i = 0; i < 2; i++) {
        GPT model = fixture_model(&f, names[i]);
        gradients[i] = gradients_of(&model, f.tokens, f.targets, f.B, f.T, &losses[i]);
        if (i == 1) {
            const float *a = gradients[0], *b = gradients[1];
            for (int p = 0; p < model.params.count; p++) {
                int64_t count = param_count(&model.params.params[p]);
                double cosine = cosine_similarity(a, b, count);
                printf("  %-52s cosine of fp32 and bf16 %.6f\n", model.params.params[p].name, cosine);
                assert_true(cosine > 0.99);
                a += count;
                b += count;
            }
        }
        gpt_free(&model);
    }
    report("loss of bf16 against fp32", fabs(losses[1] - losses[0]),
           4 * sqrt(2 * stages_forward(&f.config) / (double)N) * BF16_ROUNDOFF * largest(logits, N * V));
    assert_true(losses[0] != losses[1]);
    free(gradients[0]);
    free(gradients[1]);
    free(logits);
    fixture_close(&f);
}

static void test_bf16_near_fp32(void **state) {
    (void)state;
    check_bf16_near_fp32(fixture_open(WIDE));
    for (int i = 0; i < NUM_MODELS; i++) {
        printf("%s\n", MODELS[i]);
        check_bf16_near_fp32(fixture_open_model(MODELS[i]));
    }
}

// Does the same with roundings to E4M3, whose unit roundoff is 2^-4, in the GEMMs: half of the
// stages.
static void test_models_in_mxfp8(void **state) {
    (void)state;
    for (int i = 0; i < NUM_MODELS; i++) {
        Fixture f = fixture_open_model(MODELS[i]);
        GPT model = fixture_model(&f, "mxfp8");
        int64_t N = f.B * f.T;
        double loss, *losses = (double *)fixture_read(&f, "losses", "F64");
        float *logits = fixture_read_fp32(&f, "logits");
        float *gradients = gradients_of(&model, f.tokens, f.targets, f.B, f.T, &loss);
        assert_true(all_finite(gradients, param_list_count(&model.params)));
        printf("%s\n", MODELS[i]);
        report("loss of mxfp8", fabs(loss - losses[0]),
               4 * sqrt(stages_forward(&f.config) / (double)N) * 0x1p-4 * largest(logits, N * f.config.vocab_size));
        assert_true(loss != losses[0]);
        free(losses);
        free(logits);
        free(gradients);
        gpt_free(&model);
        fixture_close(&f);
    }
}

// Norms' gains through MX

static float gain_at(int64_t i) { return 0.5f + 0.013f * (float)(i % 89); }

// Sets the gains; with `decoded`, to what E4M3 makes of each.
static void set_gains(GPT *model, bool decoded) {
    for (int i = 0; i < model->params.count; i++) {
        const Param *p = &model->params.params[i];
        if (!p->is_vector || !strstr(p->name, "norm")) continue;
        for (int64_t first = 0; first < p->cols; first += MX_BLOCK) {
            int64_t count = p->cols - first < MX_BLOCK ? p->cols - first : MX_BLOCK;
            float amax = 0;
            for (int64_t j = first; j < first + count; j++) {
                p->master[j] = gain_at(j);
                amax = fmaxf(amax, p->master[j]);
            }
            float scale = mx_scale_value(mx_scale_code(FORMAT_E4M3, SCALE_RCEIL, mx_float_bits(amax)));
            for (int64_t j = first; j < first + count && decoded; j++) {
                p->master[j] = mx_decode(FORMAT_E4M3, mx_encode(FORMAT_E4M3, p->master[j] / scale)) * scale;
            }
        }
    }
    gpt_refresh(model);
}

// Checks for the same bits as with gains that are what MX makes of them, gradients too; and for
// other bits than without.
static void test_quantized_norm_gains(void **state) {
    (void)state;
    Batch batch = make_batch(MODERN.vocab_size, 17);
    double losses[3];
    float *gradients[3];
    size_t bytes = 0;
    for (int i = 0; i < 3; i++) {
        Recipe recipe = recipe_of("mxfp8");
        if (i == 0) recipe.norm_gains = FORMAT_E4M3;
        GPT model = make_model(MODERN, &recipe, 2, 37);
        set_gains(&model, i == 1);
        gradients[i] = gradients_of(&model, batch.tokens, batch.targets, 2, 37, &losses[i]);
        bytes = gradient_bytes(&model);
        if (i == 0) {
            // The master itself isn't rounded.
            assert_true(param_of(&model.params, "model.norm.weight")->master[1] == gain_at(1));
        }
        gpt_free(&model);
    }
    assert_true(losses[0] == losses[1] && losses[0] != losses[2]);
    assert_memory_equal(gradients[0], gradients[1], bytes);
    for (int i = 0; i < 3; i++) {
        free(gradients[i]);
    }
}

// Configurations

static void check_refused(GPTConfig config, const char *part) {
    Error error;
    assert_false(gpt_config_check(&config, &error));
    if (!strstr(error.message, part)) fail_msg("'%s' isn't in: %s", part, error.message);
}

static void test_configurations_are_refused(void **state) {
    (void)state;
    GPTConfig config = MODERN;
    Error error;
    assert_true(gpt_config_check(&config, &error));
    config.kv_heads = 4;
    check_refused(config, "--kv-heads 4 can't be shared evenly by --heads 6");
    config.kv_heads = 12;
    check_refused(config, "--kv-heads 12");
    config = MODERN;
    config.channels = 90;
    check_refused(config, "which is odd");
    config = ODD;
    config.rope_theta = 500000;
    check_refused(config, "give --positions rope too");
    config = ODD;
    config.ffn = 1 << 21;
    check_refused(config, "at most");
}

/*
By hand. MODERN: heads of 16; qkv (6 + 2*3)*16 x 96 = 18432, projection 96 x 96 = 9216, gate and up
2*88 x 96 = 16896, down 96 x 88 = 8448: 52992 a block. Beside them gains of two norms of 96,
queries' of 96 and keys' of 48; 131 x 96 = 12576 embedded, as many in the head, and the last norm.
ODD is a GPT-2: 12 C C + 13 C a block, (V + positions) C, 2 C.
*/
static void test_counts(void **state) {
    (void)state;
    ParamCounts modern = gpt_count_parameters(&MODERN), odd = gpt_count_parameters(&ODD);
    assert_int_equal(modern.matrices, 2 * 52992 + 2 * 12576);
    assert_int_equal(modern.all, modern.matrices + 2 * (2 * 96 + 96 + 48) + 96);
    assert_int_equal(odd.matrices, 2 * 12 * 96 * 96 + (131 + 50) * 96);
    assert_int_equal(odd.all, odd.matrices + 2 * 13 * 96 + 2 * 96);
    assert_true(gpt_flops_per_token(&MODERN, 50) == 6.0 * (2 * 52992 + 12576) + 6.0 * 2 * 96 * 50);
    assert_true(gpt_flops_per_token(&ODD, 50) == 6.0 * (2 * 12 * 96 * 96 + 12576) + 6.0 * 2 * 96 * 50);
    GPTConfig swiglu = {.channels = 4096, .activation = ACTIVATION_SWIGLU};
    assert_int_equal(gpt_ffn(&swiglu), 10944); // 8/3 * 4096 = 10922.67, up to a multiple of 64
    char text[256];
    gpt_describe(text, sizeof(text), &ODD);
    assert_string_equal(text, "");
    gpt_describe(text, sizeof(text), &MODERN);
    assert_string_equal(text,
                        "rotary positions (theta 10000), 3 heads of keys and values, normalised queries and keys, "
                        "SwiGLU of 88, RMSNorm, no biases, untied head");
}

static double train_step(GPT *model, const Batch *batch, int64_t B, int64_t T, int64_t step) {
    OptimizerOptions options = ADAMW;
    options.learning_rate = 1e-3;
    options.step = step;
    gpt_clear_gradients(model);
    gpt_loss_and_gradients(model, batch->tokens, batch->targets, B, T, 1);
    double loss = gpt_take_loss(model);
    optimizer_step(&model->params, model->backend, options, optimizer_gradient_norm(&model->params, model->backend));
    gpt_refresh(model);
    return loss;
}

static void check_training(GPTConfig config, bool square_weights) {
    enum { STEPS = 20 };
    Batch batch = make_batch(config.vocab_size, 10);
    for (const char *const *name = recipe_names(); *name; name++) {
        Recipe recipe = recipe_of(*name);
        recipe.square_weights = square_weights;
        GPT model = make_model(config, &recipe, 2, 37);
        double first = 0, loss = 0;
        for (int64_t step = 1; step <= STEPS; step++) {
            loss = train_step(&model, &batch, 2, 37, step);
            assert_true(isfinite(loss));
            if (step == 1) first = loss;
        }
        for (int i = 0; i < model.params.count; i++) {
            const Param *p = &model.params.params[i];
            if (!all_finite(p->gradient, param_count(p))) fail_msg("%s: gradient of %s", *name, p->name);
            if (!all_finite(p->master, param_count(p))) fail_msg("%s: master of %s", *name, p->name);
        }
        printf("  %-22s loss %.4f -> %.4f in %d steps on one batch\n", *name, first, loss, STEPS);
        // Random initial weights know nothing: ln V. One batch of random tokens can be learnt by
        // heart.
        assert_true(fabs(first - log((double)config.vocab_size)) < 0.2);
        assert_true(loss < first - 0.5);
        gpt_free(&model);
    }
}

static void test_every_recipe_trains(void **state) {
    (void)state;
    check_training(ODD, false);
    check_training(MODERN, false);
}

static void test_every_recipe_trains_with_square_weights(void **state) {
    (void)state;
    check_training(ODD, true);
}

// The same bits

// Adds bytes to a hash, by FNV-1a.
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001B3u;
    }
    return hash;
}

// Adds the losses, gradients and masters of three steps to a hash.
static uint64_t training_hash(uint64_t hash, GPTConfig config, const char *recipe_name) {
    Recipe recipe = recipe_of(recipe_name);
    Batch batch = make_batch(config.vocab_size, 11);
    GPT model = make_model(config, &recipe, 3, 50);
    for (int64_t step = 1; step <= 3; step++) {
        double loss = train_step(&model, &batch, 3, 50, step);
        hash = hash_bytes(hash, &loss, sizeof(loss));
    }
    for (int i = 0; i < model.params.count; i++) {
        const Param *p = &model.params.params[i];
        hash = hash_bytes(hash, p->gradient, (size_t)param_count(p) * sizeof(float));
        hash = hash_bytes(hash, p->master, (size_t)param_count(p) * sizeof(float));
    }
    gpt_free(&model);
    return hash;
}

static const char HASH_OPTION[] = "--training-hash";

// Hashes in a process of its own: oneDNN keeps what it has made for one number of threads.
static void child_hash(char line[64], const char *recipe, int threads) {
    char program[512];
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    assert_true(length > 0);
    program[length] = 0;
    char *command = format_string("OMP_NUM_THREADS=%d '%s' %s %s", threads, program, HASH_OPTION, recipe);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_non_null(fgets(line, 64, pipe));
    assert_int_equal(pclose(pipe), 0);
    free(command);
}

static void test_same_bits(void **state) {
    (void)state;
    const char *const names[] = {"fp32", "bf16", "mxfp8"};
    for (int i = 0; i < 3; i++) {
        char first[64], again[64], one_thread[64];
        child_hash(first, names[i], 2);
        child_hash(again, names[i], 2);
        child_hash(one_thread, names[i], 1);
        assert_string_equal(first, again);
        assert_string_equal(first, one_thread);
    }
}

static bool choose_backend(void) {
    tested = backend_cpu();
    if (!getenv("TEST_BACKEND")) return true;
    Error error = {"there is only cuda"};
    tested = NULL;
    if (strcmp(getenv("TEST_BACKEND"), "cuda") == 0) tested = backend_cuda(MX_GEMM_AUTO, &error);
    if (!tested) print_message("TEST_BACKEND: %s\n", error.message);
    return tested;
}

int main(int argc, char **argv) {
    if (!choose_backend()) return 1;
    if (argc == 3 && strcmp(argv[1], HASH_OPTION) == 0) {
        uint64_t hash = 0xCBF29CE484222325u;
        for (int i = 0; i < NUM_KINDS; i++) {
            hash = training_hash(hash, *KINDS[i], argv[2]);
        }
        printf("%016llx\n", (unsigned long long)hash);
        return 0;
    }
    const struct CMUnitTest against_pytorch[] = {
        cmocka_unit_test(test_wide_against_pytorch),   cmocka_unit_test(test_long_against_pytorch),
        cmocka_unit_test(test_models_against_pytorch), cmocka_unit_test(test_wide_ten_steps),
        cmocka_unit_test(test_long_ten_steps),
    };
    int failed = cmocka_run_group_tests(against_pytorch, NULL, NULL);
    if (tested != backend_cpu()) return failed;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradient_accumulation),
        cmocka_unit_test(test_scale_of_zero),
        cmocka_unit_test(test_take_loss),
        cmocka_unit_test(test_batches_alternate),
        cmocka_unit_test(test_smaller_micro_batch),
        cmocka_unit_test(test_one_token),
        cmocka_unit_test(test_logits_of_some_rows),
        cmocka_unit_test(test_logits_in_chunks),
        cmocka_unit_test(test_statistics_change_no_bit),
        cmocka_unit_test(test_vocabulary_padding),
        cmocka_unit_test(test_padded_vocabulary),
        cmocka_unit_test(test_decoded_weights),
        cmocka_unit_test(test_head_in_chunks),
        cmocka_unit_test(test_large_vocabulary),
        cmocka_unit_test(test_loss_leaves_no_trace),
        cmocka_unit_test(test_memory_adds_up),
        cmocka_unit_test(test_bf16_layers_take_memory),
        cmocka_unit_test(test_mxfp8_keeps_less),
        cmocka_unit_test(test_quantized_lm_head_takes_memory),
        cmocka_unit_test(test_square_weights_take_half),
        cmocka_unit_test(test_square_weights_that_lose_nothing),
        cmocka_unit_test(test_adjusted_recipes_take_effect),
        cmocka_unit_test(test_bf16_near_fp32),
        cmocka_unit_test(test_models_in_mxfp8),
        cmocka_unit_test(test_quantized_norm_gains),
        cmocka_unit_test(test_configurations_are_refused),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_every_recipe_trains),
        cmocka_unit_test(test_every_recipe_trains_with_square_weights),
        cmocka_unit_test(test_same_bits),
    };
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
