/*
A whole model on the CUDA backend against the CPU's: losses, gradients, an optimizer step. Without a
GPU the kernels run on the CPU (dev/hostcuda), with the CPU's GEMM standing in for cuBLASLt, and its
BF16 attention for cuDNN.
*/
#include "documents.h"
#include "llmc/model/optimizer.h"

// Nothing is a multiple of 32, 16 bytes or anything else.
static const GPTConfig ODD = {.layers = 2, .heads = 3, .channels = 51, .max_seq_len = 37, .vocab_size = 131};
static const GPTConfig EVEN = {.layers = 2, .heads = 2, .channels = 64, .max_seq_len = 32, .vocab_size = 256};

// A Llama; and what else there is, again with nothing a multiple of anything.
static const GPTConfig LLAMA = {.layers = 2,
                                .heads = 4,
                                .channels = 64,
                                .max_seq_len = 32,
                                .vocab_size = 256,
                                .kv_heads = 2,
                                .activation = ACTIVATION_SWIGLU,
                                .norm = NORM_RMSNORM,
                                .no_biases = true,
                                .positions = POSITIONS_ROPE,
                                .untied_head = true};
static const GPTConfig OTHER = {.layers = 2,
                                .heads = 6,
                                .channels = 60,
                                .max_seq_len = 37,
                                .vocab_size = 131,
                                .kv_heads = 3,
                                .ffn = 77,
                                .activation = ACTIVATION_RELU2,
                                .norm = NORM_RMSNORM,
                                .positions = POSITIONS_ROPE,
                                .qk_norm = true};
static const GPTConfig RELU = {.layers = 1,
                               .heads = 2,
                               .channels = 64,
                               .max_seq_len = 32,
                               .vocab_size = 256,
                               .activation = ACTIVATION_RELU,
                               .no_norm_affine = true,
                               .no_biases = true};

static const Backend *cuda;

static const OptimizerOptions OPTIONS = {.learning_rate = 1e-2,
                                         .beta1 = 0.9,
                                         .beta2 = 0.95,
                                         .eps = 1e-8,
                                         .weight_decay = 0.1,
                                         .grad_clip = 1,
                                         .step = 1,
                                         .muon = {.learning_rate = 2e-2, .momentum = 0.95, .weight_decay = 0.1}};

typedef struct {
    double loss, next_loss;
    float *gradients, *masters; // of all parameters, in order
    int64_t count;
} Result;

static float *copy_parameters(const GPT *m, bool gradients) {
    float *all = malloc((size_t)param_list_count(&m->params) * sizeof(float)), *next = all;
    assert_non_null(all);
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        m->backend->copy_to_host(next, gradients ? p->gradient : p->master, (size_t)param_count(p) * sizeof(float));
        next += param_count(p);
    }
    return all;
}

enum { B = 2, MOST_T = 64 };

typedef struct {
    int32_t tokens[2 * B * MOST_T], targets[2 * B * MOST_T];
} Batches;

// Makes two micro-batches; others from another first token on.
static Batches make_batches(const GPTConfig *config, int64_t first) {
    Batches batches;
    uint64_t V = (uint64_t)config->vocab_size;
    for (int64_t i = 0; i < 2 * B * config->max_seq_len; i++) {
        batches.tokens[i] = (int32_t)((uint64_t)(first + i) * 2654435761u % 4294967296u * V >> 32);
        batches.targets[i] = (int32_t)((uint64_t)(first + i + 7) * 2654435761u % 4294967296u * V >> 32);
    }
    return batches;
}

static void make_gradients(GPT *model, const Batches *batches, double scale) {
    int64_t T = model->config.max_seq_len;
    gpt_clear_gradients(model);
    for (int micro = 0; micro < 2; micro++) {
        gpt_loss_and_gradients(model, batches->tokens + micro * B * T, batches->targets + micro * B * T, B, T, scale);
    }
}

// Two micro-batches, a step of AdamW, and the loss after it.
static Result train_a_step(const Backend *backend, const Recipe *recipe, GPTConfig config, Sharding sharding) {
    int64_t T = config.max_seq_len;
    GPT model;
    Result result = {0};
    Batches batches = make_batches(&config, 0);
    gpt_create(&model, config, recipe, backend, B, T, true, &sharding);
    gpt_init(&model, INIT_GPT2, 42);
    gpt_refresh(&model);
    make_gradients(&model, &batches, 0.5);
    result.loss = gpt_take_loss(&model) / 2;
    result.count = param_list_count(&model.params);
    result.gradients = copy_parameters(&model, true);
    double norm = optimizer_gradient_norm(&model.params, backend);
    optimizer_step(&model.params, backend, OPTIONS, norm);
    gpt_refresh(&model);
    result.masters = copy_parameters(&model, false);
    result.next_loss = gpt_loss(&model, batches.tokens, batches.targets, B, T);
    gpt_free(&model);
    return result;
}

static void free_result(Result *r) {
    free(r->gradients);
    free(r->masters);
}

static void check_same_result(const Result *a, const Result *b) {
    assert_true(a->loss == b->loss && a->next_loss == b->next_loss);
    assert_memory_equal(a->gradients, b->gradients, (size_t)a->count * sizeof(float));
    assert_memory_equal(a->masters, b->masters, (size_t)a->count * sizeof(float));
}

static void check_distance(const char *recipe, const char *what, double distance, double bound) {
    print_message("%-16s %-12s distance %.2e  bound %.2e  margin %.1f\n", recipe, what, distance, bound,
                  bound / distance);
    assert_true(distance <= bound);
}

static bool is_without_gpu(void) {
    char text[512];
    cuda->describe(text, sizeof(text));
    return strncmp(text, "hostcuda", strlen("hostcuda")) == 0;
}

// Estimates the square of what other codes move an operand's norm by, which has none where it isn't
// MX. Of values that are 2^-8 apart one in 16 has another code in E4M3, 2^-4 apart: 2^-4 2^-8; in
// E5M2 one in 32, 2^-3 apart: 2^-5 2^-6; in E2M1 one in 64, 2^-2 apart: 2^-6 2^-4. NVFP4's blocks
// have E4M3 scales, of which one in 16 is another one, too: all its elements are rounded anew then,
// and two roundings to values 2^-2 apart differ by a sixth of that square: 2^-4 2^-4 / 6.
static double square_of_codes(Format format) {
    return mx_is_mx(format) ? ldexp(1, -9 - (int)mx_element(format).mantissa_bits) : 0;
}

static double square_of_scales(Scaling scaling) { return scaling_is_nvfp4(scaling) ? 0x1p-8 / 6 : 0; }

// Returns how far gradients may be apart where some codes are others. On the path through two
// blocks there are 16 operands, 8 of them gradients, whose squares add up.
static double square_of_path(const Recipe *recipe) {
    return 8 * square_of_codes(recipe->format[FPROP_X]) + 8 * square_of_codes(recipe->format[DGRAD_DY]);
}

static double bound_of_codes(const Recipe *recipe) {
    double of_scales = square_of_scales(recipe->scaling[FPROP_X]) + square_of_scales(recipe->scaling[DGRAD_DY]);
    return sqrt(square_of_path(recipe) + 8 * of_scales);
}

// Returns the same where only a few values are another BF16, as they are without a GPU, and have
// other codes. It is an eighth where they are of one token in 64; attention takes it to other
// tokens, forward and backward. Scales are the same.
static double bound_of_few_codes(const Recipe *recipe) { return 3 * sqrt(square_of_path(recipe)) / 8; }

// Returns how far losses may be apart where gradients may be by `bound`. A logit, at first some
// 0.02 sqrt(C) <= 0.16, is off by no more than that part of it, and a loss is the mean of 100
// tokens and more of some ln V >= 4.8: that is bound / 300, in the root mean square. Uniform logits
// are 2^-9 off.
static double bound_of_loss(double bound) { return bound / 64; }

// How far the backends may be apart. FP32: they take sums in another order and have another exp,
// and some hundred such roundings lie on a path through two blocks. Else, without a GPU, where
// attention is the same: one rounding to BF16 of every value, which only a few get. On a card
// attention is another one, so P, dP and dS are rounded elsewhere. BF16: three roundings in each of
// two blocks.
static double bound_of(const Recipe *recipe) {
    if (recipe->activation_dtype == FORMAT_FP32) return 400 * U_FP32;
    if (is_without_gpu()) return U_BF16;
    return fmax(bound_of_codes(recipe), 6 * U_BF16);
}

// Compares a step of both backends, whose gradients may be apart by `of_gradients`.
static void compare_within(const Recipe *recipe, GPTConfig config, bool muon, double of_gradients) {
    const char *name = recipe->name;
    Sharding sharding = sharding_single();
    sharding.muon = muon;
    Result ours = train_a_step(cuda, recipe, config, sharding), again = train_a_step(cuda, recipe, config, sharding),
           expected = train_a_step(backend_cpu(), recipe, config, sharding);
    double bound = bound_of(recipe);
    check_distance(name, "loss", fabs(ours.loss / expected.loss - 1), bound_of_loss(bound));
    check_distance(name, "gradients", vector_distance(ours.gradients, expected.gradients, ours.count), of_gradients);
    check_distance(name, "next loss", fabs(ours.next_loss / expected.next_loss - 1), 4 * bound);
    check_same_result(&ours, &again);
    free_result(&ours);
    free_result(&again);
    free_result(&expected);
}

static void compare_recipe(const Recipe *recipe, GPTConfig config, bool muon) {
    compare_within(recipe, config, muon, bound_of(recipe));
}

static void compare(const char *name, GPTConfig config) {
    Recipe recipe = recipe_of(name);
    compare_recipe(&recipe, config, false);
}

static void test_muon(void **state) {
    (void)state;
    const Recipe bf16 = recipe_of("bf16"), mxfp8 = recipe_of("mxfp8");
    compare_recipe(&bf16, EVEN, true);
    compare_recipe(&mxfp8, LLAMA, true);
    compare_recipe(&mxfp8, ODD, true);
}

static void test_fp32(void **state) {
    (void)state;
    compare("fp32", EVEN);
}

static void test_bf16(void **state) {
    (void)state;
    compare("bf16", EVEN);
}

static void test_mx(void **state) {
    (void)state;
    compare("mxfp8", EVEN);
    compare("mxfp8-ocp", EVEN);
    compare("mxfp8-e5m2-gradients", EVEN);
}

// What is kept where there is memory for it is what would be made again, to the bit.
static void test_spare_memory(void **state) {
    (void)state;
    static const char *const RECIPES[] = {"bf16",          "mxfp8",    "mxfp8-e5m2-gradients", "fp8-current",
                                          "fp8-blockwise", "mxfp4-sr", "nvfp4-nvidia",         "fp8-delayed"};
    const Backend *const backends[] = {cuda, backend_cpu()};
    for (size_t i = 0; i < 2 * COUNT(RECIPES); i++) {
        Recipe recipe = recipe_of(RECIPES[i / 2]);
        recipe.bf16_last_layers = 0; // of nvfp4-nvidia, which else leaves none of so few
        const GPTConfig config = i / 2 % 2 ? LLAMA : ODD;
        Sharding sharding = sharding_single();
        Result nothing = train_a_step(backends[i % 2], &recipe, config, sharding);
        bool *const more[] = {&sharding.keeps_values, &sharding.decoded, &sharding.keeps_activations};
        for (size_t j = 0; j < COUNT(more); j++) {
            *more[j] = true;
            Result kept = train_a_step(backends[i % 2], &recipe, config, sharding);
            check_same_result(&kept, &nothing);
            free_result(&kept);
        }
        free_result(&nothing);
    }
}

// The recipes whose scalings aren't MX, on models of whole 16-byte rows and of none.
static void test_scaled(void **state) {
    (void)state;
    static const char *const SCALED[] = {"fp8-current", "fp8-blockwise", "nvfp4",      "nvfp4-46",
                                         "mxfp8-nvfp4", "nvfp4-mxfp8",   "fp8-delayed"};
    for (size_t i = 0; i < sizeof(SCALED) / sizeof(SCALED[0]); i++) {
        compare(SCALED[i], EVEN);
        compare(SCALED[i], i % 2 ? ODD : LLAMA);
    }
}

// Delayed scales, over steps whose losses are scaled so that one's gradients aren't finite, and a
// later one's are larger than the scale before foresaw.
static const double LOSS_SCALES[] = {0.5, 0.5, INFINITY, 0.5, 32, 0.5};
enum { STEPS = COUNT(LOSS_SCALES), NOT_FINITE = 2, CLAMPED = 4 };

static void create_delayed(GPT *model, const Backend *backend, GPTConfig config) {
    Recipe recipe = recipe_of("fp8-delayed");
    Error error;
    assert_true(recipe_set_delayed(&recipe, 2, NULL, 0, &error));
    gpt_create(model, config, &recipe, backend, B, config.max_seq_len, true, NULL);
    gpt_init(model, INIT_GPT2, 42);
    gpt_refresh(model);
}

static double begin_delayed_step(GPT *model, int step) {
    Batches batches = make_batches(&model->config, 1000 * step);
    make_gradients(model, &batches, LOSS_SCALES[step]);
    gpt_add_amaxes(model);
    return gpt_take_loss(model) / 2;
}

// Applies a step's gradients, where they are finite.
static void end_delayed_step(GPT *model, int step) {
    double norm = optimizer_gradient_norm(&model->params, model->backend);
    assert_true(isfinite(norm) == (step != NOT_FINITE));
    gpt_make_scales(model);
    if (isfinite(norm)) optimizer_step(&model->params, model->backend, OPTIONS, norm);
    if (!isfinite(norm)) gpt_refresh(model);
}

// Returns the amaxes of all layers of the last step, or those that the scales are made of.
static float *copy_amaxes(GPT *model, bool chosen) {
    int64_t count = gpt_num_linears(&model->config);
    float *all = malloc((size_t)(count * NUM_ROLES) * sizeof(float));
    assert_non_null(all);
    for (int64_t i = 0; i < count; i++) {
        const AmaxHistory *h = &gpt_linear_at(model, i)->amaxes;
        const float none[NUM_ROLES] = {0}, *from = !h->steps ? none
                                                   : chosen  ? h->amax
                                                             : h->steps + !h->oldest * NUM_ROLES;
        memcpy(all + i * NUM_ROLES, from, NUM_ROLES * sizeof(float));
    }
    return all;
}

// Copies what a checkpoint has.
static void copy_state(GPT *to, GPT *from) {
    for (int i = 0; i < from->params.count; i++) {
        const Param *p = &from->params.params[i], *q = &to->params.params[i];
        size_t bytes = (size_t)param_count(p) * sizeof(float);
        float *values = malloc(bytes), *const parts[3][2] = {
                                           {p->master, q->master}, {p->moment1, q->moment1}, {p->moment2, q->moment2}};
        assert_non_null(values);
        for (int part = 0; part < 3; part++) {
            from->backend->copy_to_host(values, parts[part][0], bytes);
            to->backend->copy_to_device(parts[part][1], values, bytes);
        }
        free(values);
    }
    for (int64_t i = 0; i < gpt_num_linears(&from->config); i++) {
        const AmaxHistory *h = &gpt_linear_at(from, i)->amaxes;
        AmaxHistory *copy = &gpt_linear_at(to, i)->amaxes;
        if (!h->steps) continue;
        memcpy(copy->steps, h->steps, 2 * NUM_ROLES * sizeof(float));
        memcpy(copy->amax, h->amax, sizeof(h->amax));
        copy->oldest = h->oldest;
    }
    gpt_make_scales(to);
    gpt_refresh(to);
}

static float *copy_scales(const GPT *model) {
    size_t bytes = (size_t)(model->scales.layers * NUM_GEMM_OPERANDS) * sizeof(float);
    float *scales = malloc(bytes);
    assert_non_null(scales);
    model->backend->copy_to_host(scales, model->scales.scales, bytes);
    return scales;
}

// Returns the largest |ours / expected - 1| of amaxes that differ.
static double worst_amax(const float *ours, const float *expected, int64_t count) {
    double worst = 0;
    for (int64_t i = 0; i < count; i++) {
        if (memcmp(&ours[i], &expected[i], sizeof(float)) == 0) continue;
        double apart = fabs((double)ours[i] / expected[i] - 1);
        worst = apart <= worst ? worst : isnan(apart) ? INFINITY : apart;
    }
    return worst;
}

// Compares a step of two models that began alike, whose gradients may be apart by `usual`, or once
// by `most`. Returns whether they are by more than `usual`. Amaxes are single values: the next BF16
// is 2 U_BF16 away.
static bool compare_delayed_step(GPT *ours, GPT *expected, int step, double usual, double most) {
    int64_t linears = gpt_num_linears(&ours->config), count = param_list_count(&ours->params);
    float *chosen = copy_amaxes(expected, true), *scales[] = {copy_scales(ours), copy_scales(expected)};
    assert_memory_equal(scales[0], scales[1], (size_t)(linears * NUM_GEMM_OPERANDS) * sizeof(float));
    double loss = begin_delayed_step(ours, step), expected_loss = begin_delayed_step(expected, step);
    float *amaxes[] = {copy_amaxes(ours, false), copy_amaxes(expected, false)};
    float *gradients[] = {copy_parameters(ours, true), copy_parameters(expected, true)};
    double apart = step == NOT_FINITE ? 0 : vector_distance(gradients[0], gradients[1], count);
    double bound = apart > usual ? most : usual;
    check_distance("fp8-delayed", "loss", fabs(loss / expected_loss - 1), bound_of_loss(bound));
    if (step != NOT_FINITE) check_distance("fp8-delayed", "gradients", apart, bound);
    check_distance("fp8-delayed", "amaxes", worst_amax(amaxes[0], amaxes[1], linears * NUM_ROLES), 2 * bound);
    for (int64_t i = 0; i < linears - 1; i++) { // all but the head
        const float *amax = amaxes[0] + i * NUM_ROLES;
        assert_true(amax[ROLE_WEIGHTS] == amaxes[1][i * NUM_ROLES + ROLE_WEIGHTS]);
        assert_true(amax[ROLE_ACTIVATIONS] > 0 && (amax[ROLE_GRADIENTS] > 0) == (step != NOT_FINITE));
    }
    int64_t last = (linears - 2) * NUM_ROLES + ROLE_GRADIENTS; // whose dY comes from what isn't clamped
    assert_true((amaxes[0][last] > 8 * chosen[last]) == (step == CLAMPED || step == 0));
    for (int i = 0; i < 2; i++) {
        free(scales[i]);
        free(amaxes[i]);
        free(gradients[i]);
    }
    free(chosen);
    return apart > usual;
}

// Each step beside the CPU's, from the same weights and histories; and all of them twice, once
// resumed in the middle. Without a GPU, too, a few values are another BF16, and in one of so many
// steps then have other codes.
static void check_delayed(GPTConfig config) {
    Recipe recipe = recipe_of("fp8-delayed");
    double usual = bound_of(&recipe), most = is_without_gpu() ? bound_of_few_codes(&recipe) : usual;
    int beyond = 0;
    GPT ours, expected, again;
    create_delayed(&ours, cuda, config);
    create_delayed(&expected, backend_cpu(), config);
    for (int step = 0; step < STEPS; step++) {
        beyond += compare_delayed_step(&ours, &expected, step, usual, most);
        end_delayed_step(&expected, step);
        copy_state(&ours, &expected);
    }
    assert_true(beyond <= 1);
    gpt_free(&ours);
    gpt_free(&expected);
    create_delayed(&ours, cuda, config);
    create_delayed(&again, cuda, config);
    for (int step = 0; step < STEPS; step++) {
        double loss = begin_delayed_step(&ours, step);
        end_delayed_step(&ours, step);
        if (step == 3) copy_state(&again, &ours);
        if (step <= 3) continue;
        assert_true(begin_delayed_step(&again, step) == loss);
        end_delayed_step(&again, step);
    }
    float *masters[] = {copy_parameters(&ours, false), copy_parameters(&again, false)};
    assert_memory_equal(masters[0], masters[1], (size_t)param_list_count(&ours.params) * sizeof(float));
    free(masters[0]);
    free(masters[1]);
    gpt_free(&ours);
    gpt_free(&again);
}

static void test_delayed(void **state) {
    (void)state;
    check_delayed(EVEN);
    check_delayed(LLAMA);
    check_delayed(ODD);
}

static void test_blocks_with_fp32_scales(void **state) {
    (void)state;
    compare("fp8-blockwise-fp32", EVEN);
}

// Compares models whose elements are rounded stochastically, with the same random numbers, some
// with a prescale. Without a GPU ODD's forward pass under nvfp4-nvidia has one other value on a Zen
// 3, the next BF16 in the final norm's output, whose token has other E2M1 codes backward. EVEN has
// such values everywhere (test_bf16 shows that), and isn't among them.
static void test_stochastic(void **state) {
    (void)state;
    compare("mxfp4-sr", LLAMA);
    compare("mxfp4-sr", ODD);
    compare("nvfp4-nvidia", LLAMA);
    Recipe nvfp4 = recipe_of("nvfp4-nvidia");
    compare_within(&nvfp4, ODD, false, is_without_gpu() ? bound_of_few_codes(&nvfp4) : bound_of(&nvfp4));
}

static const char *const RECIPES[] = {"fp32", "bf16", "mxfp8"};

static void test_other_models(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        compare(RECIPES[i], LLAMA);
        compare(RECIPES[i], RELU);
    }
}

// After all others, whose results are then there whatever a card's libraries make of such shapes.
static void test_odd_models(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        compare(RECIPES[i], ODD);
        compare(RECIPES[i], OTHER);
    }
}

static void test_documents(void **state) {
    (void)state;
    GPTConfig gpt2 = ODD, llama = LLAMA;
    gpt2.max_seq_len = llama.max_seq_len = DOCUMENT_TOKENS / 2;
    for (int i = 0; i < 2; i++) {
        Recipe recipe = recipe_of(RECIPES[i]);
        check_documents(cuda, gpt2, RECIPES[i], bound_of(&recipe));
        check_documents(cuda, llama, RECIPES[i], bound_of(&recipe));
    }
}

// Without a GPU: operands in the form of native GEMMs, whose values are the same.
static void test_native_forms(void **state) {
    (void)state;
    if (!is_without_gpu()) skip();
    Error error;
    assert_ptr_equal(backend_cuda(MX_GEMM_NATIVE, &error), cuda);
    compare("mxfp8", EVEN);
    compare("mxfp8", ODD);
    compare("fp8-current", EVEN);
    compare("fp8-current", ODD);
    check_delayed(EVEN);
    check_delayed(ODD);
    compare("fp8-blockwise-fp32", LLAMA);
    Recipe with_head = recipe_of("fp8-current"); // whose weight has more rows in GEMMs than are made
    with_head.quantize_lm_head = true;
    with_head.square_weights = false;
    compare_recipe(&with_head, ODD, false);
    compare("nvfp4", EVEN);
    compare("mxfp8-nvfp4", ODD);
    compare("nvfp4-nvidia", LLAMA);
    assert_ptr_equal(backend_cuda(MX_GEMM_AUTO, &error), cuda);
}

// Batches of any size, one after the other and into two memories in turn, arrive as the host had
// them when it called.
static void test_batches(void **state) {
    (void)state;
    enum { MOST = 5000 };
    static int32_t tokens[MOST], targets[MOST], seen[2 * MOST];
    static const int64_t COUNTS[] = {1, 33, 32, 700, 5000, 5000, 4999, 2};
    const size_t bytes = 2 * MOST * sizeof(int32_t);
    int32_t *device[2] = {cuda->allocate(bytes), cuda->allocate(bytes)}, *copied = cuda->allocate(bytes);
    for (int call = 0; call < 8; call++) {
        int64_t count = COUNTS[call];
        for (int64_t i = 0; i < count; i++) {
            tokens[i] = (int32_t)(1000000 * call + i);
            targets[i] = -tokens[i] - 1;
        }
        cuda->copy_batch(device[call % 2], tokens, targets, NULL, count);
        memset(tokens, 0, sizeof(tokens));
        memset(targets, 0, sizeof(targets));
        cuda->copy(copied, device[call % 2], 2 * (size_t)count * sizeof(int32_t));
        cuda->copy_to_host(seen, copied, 2 * (size_t)count * sizeof(int32_t));
        for (int64_t i = 0; i < count; i++) {
            assert_int_equal(seen[i], 1000000 * call + i);
            assert_int_equal(seen[count + i], -seen[i] - 1);
        }
    }
    cuda->release(device[0]);
    cuda->release(device[1]);
    cuda->release(copied);
}

int main(void) {
    Error error;
    cuda = backend_cuda(MX_GEMM_AUTO, &error);
    if (!cuda) {
        print_message("%s\n", error.message);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batches),      cmocka_unit_test(test_fp32),
        cmocka_unit_test(test_bf16),         cmocka_unit_test(test_mx),
        cmocka_unit_test(test_native_forms), cmocka_unit_test(test_spare_memory),
        cmocka_unit_test(test_scaled),       cmocka_unit_test(test_blocks_with_fp32_scales),
        cmocka_unit_test(test_other_models), cmocka_unit_test(test_odd_models),
        cmocka_unit_test(test_documents),    cmocka_unit_test(test_muon),
        cmocka_unit_test(test_stochastic),   cmocka_unit_test(test_delayed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
