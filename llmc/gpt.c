#include "gpt.h"
#include "profile.h" // profile_set_layer
#include "util.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB_PADDING = 128 };

static int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

bool gpt_config_check(const GPTConfig *c, Error *error) {
    if (c->layers < 1 || c->heads < 1 || c->channels < 1 || c->max_seq_len < 1 || c->vocab_size < 1) {
        return error_set(error, "a model needs at least one layer, head, channel, position and token; give --layers, "
                                "--heads, --channels, --max-seq-len and --vocab-size");
    }
    if (c->channels % c->heads != 0) {
        return error_set(error,
                         "--channels %lld can't be divided among --heads %lld: choose heads that divide channels",
                         (long long)c->channels, (long long)c->heads);
    }
    if (c->layers > 1000 || c->channels > 65536 || c->max_seq_len > (1 << 20) || c->vocab_size > (1 << 24)) {
        return error_set(error, "this model is beyond what the program takes: at most 1000 layers, 65536 channels, "
                                "1048576 positions, 16777216 tokens in the vocabulary");
    }
    return true;
}

// Parameters

static int add_matrix(GPT *m, const char *name, int64_t rows, int64_t cols, bool file_transposed, double stddev,
                      bool bf16) {
    Param p = {.rows = rows,
               .cols = cols,
               .layer = -1,
               .decayed = true,
               .file_transposed = file_transposed,
               .init_stddev = (float)stddev,
               .has_bf16_value = bf16};
    snprintf(p.name, sizeof(p.name), "transformer.%s", name);
    return param_list_add(&m->params, p);
}

static int add_vector(GPT *m, const char *name, int64_t count, float value) {
    Param p = {.rows = 1, .cols = count, .is_vector = true, .init_value = value};
    snprintf(p.name, sizeof(p.name), "transformer.%s", name);
    return param_list_add(&m->params, p);
}

static LayerNorm add_layernorm(GPT *m, const char *name) {
    char weight[48], bias[48];
    snprintf(weight, sizeof(weight), "%s.weight", name);
    snprintf(bias, sizeof(bias), "%s.bias", name);
    return (LayerNorm){.weight = add_vector(m, weight, m->config.channels, 1),
                       .bias = add_vector(m, bias, m->config.channels, 0)};
}

// The list's final place isn't known yet: parameters are noted by index and linked by link_linear.
typedef struct {
    int weight, bias;
} LinearParams;

static LinearParams add_linear(GPT *m, const char *name, int64_t layer, int64_t N, int64_t K, double stddev) {
    char weight[48], bias[48];
    snprintf(weight, sizeof(weight), "h.%lld.%s.weight", (long long)layer, name);
    snprintf(bias, sizeof(bias), "h.%lld.%s.bias", (long long)layer, name);
    Recipe recipe = recipe_for_layer(&m->recipe, layer, m->config.layers);
    LinearParams result;
    result.weight = add_matrix(m, weight, N, K, true, stddev, false);
    linear_declare_weight(&m->params.params[result.weight], &recipe);
    m->params.params[result.weight].layer = layer;
    result.bias = add_vector(m, bias, N, 0);
    return result;
}

static Linear link_linear(const GPT *m, LinearParams params, int64_t layer) {
    return (Linear){.recipe = recipe_for_layer(&m->recipe, layer, m->config.layers),
                    .weight = &m->params.params[params.weight],
                    .bias = params.bias >= 0 ? &m->params.params[params.bias] : NULL};
}

static void add_parameters(GPT *m) {
    const GPTConfig *c = &m->config;
    int64_t L = c->layers, C = c->channels;
    const double stddev = 0.02, residual_stddev = 0.02 / sqrt(2.0 * (double)L);
    Recipe head_recipe = recipe_for_layer(&m->recipe, L, L);
    bool bf16 = m->recipe.activation_dtype == FORMAT_BF16;
    LinearParams(*linears)[LINEARS_PER_BLOCK] = allocate((size_t)L * sizeof(*linears));

    m->wte = add_matrix(m, "wte.weight", c->vocab_size, C, false, stddev, bf16);
    linear_declare_weight(&m->params.params[m->wte], &head_recipe);
    m->wpe = add_matrix(m, "wpe.weight", c->max_seq_len, C, false, stddev, bf16);
    for (int64_t l = 0; l < L; l++) {
        char name[32];
        snprintf(name, sizeof(name), "h.%lld.ln_1", (long long)l);
        m->blocks[l].norm1 = add_layernorm(m, name);
        linears[l][0] = add_linear(m, "attn.c_attn", l, 3 * C, C, stddev);
        linears[l][1] = add_linear(m, "attn.c_proj", l, C, C, residual_stddev);
        snprintf(name, sizeof(name), "h.%lld.ln_2", (long long)l);
        m->blocks[l].norm2 = add_layernorm(m, name);
        linears[l][2] = add_linear(m, "mlp.c_fc", l, 4 * C, C, stddev);
        linears[l][3] = add_linear(m, "mlp.c_proj", l, C, 4 * C, residual_stddev);
    }
    m->final_norm = add_layernorm(m, "ln_f");
    for (int64_t l = 0; l < L; l++) {
        for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
            *gpt_linear(m, l, i) = link_linear(m, linears[l][i], l);
        }
        // GELU's output is the largest of what would be kept, and one pass over what is kept anyway makes it again.
        Linear *down = &m->blocks[l].down;
        down->input_is_remade = !linear_keeps_input(&down->recipe);
    }
    m->head = link_linear(m, (LinearParams){m->wte, -1}, L);
    free(linears);
}

Linear *gpt_linear(GPT *m, int64_t layer, int which) {
    Block *b = &m->blocks[layer];
    Linear *const linears[] = {&b->qkv, &b->projection, &b->up, &b->down};
    return linears[which];
}

const char *gpt_linear_name(int which) {
    static const char *const NAMES[] = {"qkv", "projection", "up", "down"};
    return NAMES[which];
}

// Memory

static Tensor take_tensor(GPT *m, MemoryPlan *plan, MemoryKind kind, int64_t cols) {
    Format dtype = m->recipe.activation_dtype;
    int64_t rows = m->B * m->T;
    return tensor_make(memory_take(plan, kind, (size_t)(rows * cols) * dtype_size(dtype)), dtype, rows, cols);
}

// A linear layer's input: kept for the backward pass, or `shared` by all layers where nobody needs it after the forward
// pass.
static Tensor take_linear_input(GPT *m, MemoryPlan *plan, const Linear *linear, Tensor shared, int64_t cols) {
    if (m->training && linear_keeps_input(&linear->recipe)) return take_tensor(m, plan, MEMORY_KEPT, cols);
    return tensor_make(shared.data, shared.dtype, shared.rows, cols);
}

static void layout_layernorm(GPT *m, MemoryPlan *plan, LayerNorm *norm) {
    size_t bytes = (size_t)(m->B * m->T) * sizeof(float);
    norm->mean = memory_take(plan, MEMORY_KEPT, bytes);
    norm->rstd = memory_take(plan, MEMORY_KEPT, bytes);
}

static void layout_activations(GPT *m, MemoryPlan *plan, Block *b, Tensor shared) {
    int64_t C = m->config.channels;
    layout_layernorm(m, plan, &b->norm1);
    layout_layernorm(m, plan, &b->norm2);
    b->qkv_input = take_linear_input(m, plan, &b->qkv, shared, C);
    b->qkv_output = take_tensor(m, plan, MEMORY_KEPT, 3 * C);
    b->logsumexp = memory_take(plan, MEMORY_KEPT, (size_t)(m->B * m->T * m->config.heads) * sizeof(float));
    b->projection_input = take_linear_input(m, plan, &b->projection, shared, C);
    b->middle = take_tensor(m, plan, MEMORY_KEPT, C);
    b->up_input = take_linear_input(m, plan, &b->up, shared, C);
    b->up_output = take_tensor(m, plan, MEMORY_KEPT, 4 * C);
    b->down_input = take_linear_input(m, plan, &b->down, shared, 4 * C);
}

// Without a backward pass all blocks use the first one's activations, but for the residual stream they read and write.
static void share_activations(Block *b, const Block *first) {
    b->norm1.mean = first->norm1.mean;
    b->norm1.rstd = first->norm1.rstd;
    b->norm2.mean = first->norm2.mean;
    b->norm2.rstd = first->norm2.rstd;
    b->qkv_input = first->qkv_input;
    b->qkv_output = first->qkv_output;
    b->logsumexp = first->logsumexp;
    b->projection_input = first->projection_input;
    b->middle = first->middle;
    b->up_input = first->up_input;
    b->up_output = first->up_output;
    b->down_input = first->down_input;
}

int64_t gpt_head_rows(const GPTConfig *c, const Recipe *recipe, size_t scratch_bytes, int64_t rows) {
    int64_t row_bytes =
        round_up(c->vocab_size, VOCAB_PADDING) * (int64_t)(sizeof(float) + dtype_size(recipe->activation_dtype));
    int64_t fitting = (int64_t)scratch_bytes / row_bytes / MX_BLOCK * MX_BLOCK, most = round_up(rows, MX_BLOCK);
    return fitting < MX_BLOCK ? MX_BLOCK : fitting > most ? most : fitting;
}

static void layout_head(GPT *m, MemoryPlan *plan) {
    int64_t V = m->config.vocab_size, Vp = round_up(V, VOCAB_PADDING);
    Format dtype = m->recipe.activation_dtype;
    m->head_rows = gpt_head_rows(&m->config, &m->recipe, m->backend->head_scratch_bytes, m->B * m->T);
    size_t elements = (size_t)(m->head_rows * Vp);
    m->logits = tensor_make(memory_take(plan, MEMORY_SCRATCH, elements * sizeof(float)), FORMAT_FP32, m->head_rows, V);
    m->logits.stride = Vp;
    if (m->training) {
        m->dlogits =
            tensor_make(memory_take(plan, MEMORY_SCRATCH, elements * dtype_size(dtype)), dtype, m->head_rows, V);
        m->dlogits.stride = Vp;
    }
}

static AttentionShape attention_shape(const GPT *m, int64_t B, int64_t T) {
    const GPTConfig *c = &m->config;
    return (AttentionShape){
        .B = B, .T = T, .NH = c->heads, .NKV = c->heads, .HS = c->channels / c->heads, .causal = true};
}

static void layout_linears(GPT *m, MemoryPlan *plan) {
    const Backend *backend = m->backend;
    const GPTConfig *c = &m->config;
    int64_t rows = m->B * m->T;
    size_t scratch = linear_scratch_bytes(&m->head, backend, m->head_rows, m->training);
    size_t workspace = linear_workspace_bytes(&m->head, backend, m->head_rows, m->training);
    linear_layout(&m->head, plan, backend, m->head_rows, m->training);
    for (int64_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
            Linear *linear = gpt_linear(m, l, i);
            linear_layout(linear, plan, backend, rows, m->training);
            scratch = max_size(scratch, linear_scratch_bytes(linear, backend, rows, m->training));
            workspace = max_size(workspace, linear_workspace_bytes(linear, backend, rows, m->training));
        }
    }
    workspace =
        max_size(workspace, backend->attention_workspace(m->recipe.activation_dtype, attention_shape(m, m->B, m->T)));
    workspace = max_size(workspace, backend->reduction_workspace(rows, 4 * c->channels));
    char *shared = memory_take(plan, MEMORY_SCRATCH, scratch);
    m->head.scratch = shared;
    for (int64_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
            gpt_linear(m, l, i)->scratch = shared;
        }
    }
    m->workspace = memory_take(plan, MEMORY_SCRATCH, workspace);
    m->workspace_bytes = workspace;
    if (plan->base) gpt_use_workspace(m);
}

static void layout(GPT *m, MemoryPlan *plan) {
    int64_t C = m->config.channels, L = m->config.layers, rows = m->B * m->T;
    param_list_layout(&m->params, plan, m->backend, m->training);
    for (int i = 0; i < 2; i++) {
        m->batches[i] = memory_take(plan, MEMORY_SCRATCH, (size_t)(2 * rows) * sizeof(int32_t));
    }
    m->losses = memory_take(plan, MEMORY_SCRATCH, (size_t)(MAX_PENDING_LOSSES * rows) * sizeof(float));
    m->x = take_tensor(m, plan, MEMORY_SCRATCH, C);
    Tensor shared = take_tensor(m, plan, MEMORY_SCRATCH, 4 * C);
    for (int64_t l = 0; l < L; l++) {
        Block *b = &m->blocks[l];
        b->input = take_tensor(m, plan, MEMORY_KEPT, C);
        if (m->training || l == 0) {
            layout_activations(m, plan, b, shared);
        } else {
            share_activations(b, &m->blocks[0]);
        }
    }
    m->final_input = take_tensor(m, plan, MEMORY_KEPT, C);
    m->final_output = take_tensor(m, plan, MEMORY_KEPT, C);
    layout_layernorm(m, plan, &m->final_norm);
    if (m->training) {
        m->dresidual = take_tensor(m, plan, MEMORY_SCRATCH, C);
        m->dnorm = take_tensor(m, plan, MEMORY_SCRATCH, C);
        m->dwide = take_tensor(m, plan, MEMORY_SCRATCH, 4 * C);
    }
    layout_head(m, plan);
    layout_linears(m, plan);
}

// Everything but memory.
static void describe(GPT *m, GPTConfig config, const Recipe *recipe, const Backend *backend, int64_t B, int64_t T,
                     bool training, const Sharding *sharding) {
    *m = (GPT){.config = config, .recipe = *recipe, .backend = backend, .B = B, .T = T, .training = training};
    m->params.sharding = sharding ? *sharding : sharding_single();
    m->blocks = allocate((size_t)config.layers * sizeof(Block));
    add_parameters(m);
}

void gpt_memory(size_t by_kind[NUM_MEMORY_KINDS], GPTConfig config, const Recipe *recipe, const Backend *backend,
                int64_t B, int64_t T, bool training, const Sharding *sharding) {
    GPT model;
    MemoryPlan plan = {0};
    describe(&model, config, recipe, backend, B, T, training, sharding);
    layout(&model, &plan);
    memcpy(by_kind, plan.by_kind, sizeof(plan.by_kind));
    gpt_free(&model);
}

WireBytes gpt_wire_bytes(GPTConfig config, const Recipe *recipe, const Backend *backend, const Sharding *sharding,
                         int64_t micro_batches) {
    GPT model;
    MemoryPlan plan = {0};
    describe(&model, config, recipe, backend, 1, 1, true, sharding);
    layout(&model, &plan);
    WireBytes bytes = param_list_wire_bytes(&model.params, micro_batches);
    gpt_free(&model);
    return bytes;
}

bool gpt_shards_alike(GPTConfig config, const Recipe *a, const Recipe *b, const Backend *backend,
                      const Sharding *sharding) {
    const Recipe *recipes[] = {a, b};
    GPT models[2];
    for (int i = 0; i < 2; i++) {
        MemoryPlan plan = {0};
        describe(&models[i], config, recipes[i], backend, 1, 1, true, sharding);
        layout(&models[i], &plan);
    }
    bool alike = true;
    for (int i = 0; i < models[0].params.count; i++) {
        const Param *p = &models[0].params.params[i], *q = &models[1].params.params[i];
        alike = alike && p->first_row == q->first_row && p->num_rows == q->num_rows;
    }
    gpt_free(&models[0]);
    gpt_free(&models[1]);
    return alike;
}

static void place(GPT *m) {
    MemoryPlan plan = {0};
    layout(m, &plan);
    m->memory = m->backend->allocate(plan.used);
    plan = (MemoryPlan){.base = m->memory};
    layout(m, &plan);
}

void gpt_create(GPT *m, GPTConfig config, const Recipe *recipe, const Backend *backend, int64_t B, int64_t T,
                bool training, const Sharding *sharding) {
    describe(m, config, recipe, backend, B, T, training, sharding);
    place(m);
}

static void describe_exact(GPT *m, GPTConfig config, const Backend *backend, int64_t B, int64_t T) {
    Recipe recipe;
    Error error;
    if (!recipe_named(&recipe, "fp32", &error)) die("%s", error.message);
    describe(m, config, &recipe, backend, B, T, true, NULL);
    m->params.borrows_masters = true;
}

size_t gpt_exact_memory(GPTConfig config, const Backend *backend, int64_t B, int64_t T) {
    GPT model;
    MemoryPlan plan = {0};
    describe_exact(&model, config, backend, B, T);
    layout(&model, &plan);
    gpt_free(&model);
    return plan.used;
}

void gpt_create_exact(GPT *exact, const GPT *m) {
    describe_exact(exact, m->config, m->backend, m->B, m->T);
    for (int i = 0; i < m->params.count; i++) {
        exact->params.params[i].master = m->params.params[i].master;
    }
    place(exact);
}

void gpt_use_workspace(const GPT *m) { m->backend->use_workspace(m->workspace, m->workspace_bytes); }

void gpt_free(GPT *m) {
    if (m->memory) m->backend->release(m->memory);
    param_list_free(&m->params);
    free(m->blocks);
    *m = (GPT){0};
}

void gpt_init(GPT *m, uint64_t seed) { param_list_init(&m->params, m->backend, seed); }

void gpt_refresh(GPT *m) { param_list_refresh(&m->params, m->backend); }

void gpt_zero_gradients(GPT *m) {
    m->backend->zero(m->params.gradients, (size_t)m->params.gradients_count * sizeof(float));
}

// Forward and backward

static const float *vector_of(const GPT *m, int index) { return m->params.params[index].master; }
static float *gradient_of(const GPT *m, int index) { return m->params.params[index].gradient; }

// The first rows of each tensor, for a micro-batch smaller than the largest.
static Tensor rows_of(Tensor tensor, int64_t rows) { return tensor_rows(tensor, 0, rows); }

// Of input + residual, which is written to `sum`; of input alone where residual is {0}.
static void norm_forward(GPT *m, Tensor out, Tensor sum, const LayerNorm *norm, Tensor input, Tensor residual) {
    m->backend->layernorm_forward(out, sum, norm->mean, norm->rstd, input, residual, vector_of(m, norm->weight),
                                  vector_of(m, norm->bias));
}

// The same as what `linear` takes: stored in `out`, or made when it is quantized.
static Source norm_input(GPT *m, const Linear *linear, Tensor out, Tensor sum, const LayerNorm *norm, Tensor input,
                         Tensor residual, bool training) {
    const Tensor nowhere = {0};
    bool is_made = linear_makes_input(linear, training);
    norm_forward(m, is_made ? nowhere : out, sum, norm, input, residual);
    if (!is_made) return source_tensor(out);
    return (Source){.kind = SOURCE_LAYERNORM,
                    .x = residual.data ? sum : input,
                    .mean = norm->mean,
                    .rstd = norm->rstd,
                    .weight = vector_of(m, norm->weight),
                    .bias = vector_of(m, norm->bias)};
}

static Source activation_input(GPT *m, const Linear *linear, Tensor out, Tensor input, bool training) {
    if (linear_makes_input(linear, training))
        return (Source){.kind = SOURCE_ACTIVATION, .x = input, .activation = ACTIVATION_GELU};
    m->backend->activation_forward(out, input, ACTIVATION_GELU);
    return source_tensor(out);
}

// The gradient of GELU's input, in place of dout.
static Source activation_gradient(GPT *m, const Linear *linear, Tensor dout, Tensor input) {
    if (linear_makes_gradient(linear)) {
        return (Source){.kind = SOURCE_ACTIVATION_BACKWARD,
                        .x = input,
                        .activation = ACTIVATION_GELU,
                        .dout = dout,
                        .stored = dout};
    }
    m->backend->activation_backward(dout, dout, input, ACTIVATION_GELU);
    return source_tensor(dout);
}

static void norm_backward(GPT *m, Tensor dinput, const LayerNorm *norm, Tensor dout, Tensor input) {
    m->backend->layernorm_backward(dinput, gradient_of(m, norm->weight), gradient_of(m, norm->bias), dout, input,
                                   vector_of(m, norm->weight), norm->mean, norm->rstd);
}

// The block's input is input + residual, or input alone where residual is {0}. `residual` also gets the output, to
// which the block's `middle` is still to be added.
static void block_forward(GPT *m, Block *b, Tensor input, Tensor residual, int64_t B, int64_t T, bool training) {
    const Backend *backend = m->backend;
    int64_t rows = B * T;
    Tensor sum = rows_of(b->input, rows), qkv_input = rows_of(b->qkv_input, rows),
           qkv_output = rows_of(b->qkv_output, rows), projection_input = rows_of(b->projection_input, rows),
           middle = rows_of(b->middle, rows), up_input = rows_of(b->up_input, rows),
           up_output = rows_of(b->up_output, rows), down_input = rows_of(b->down_input, rows), x = rows_of(m->x, rows);

    Source source = norm_input(m, &b->qkv, qkv_input, sum, &b->norm1, input, residual, training);
    linear_forward(&b->qkv, backend, qkv_output, source, training);
    backend->attention_forward(projection_input, b->logsumexp, qkv_output, attention_shape(m, B, T));
    linear_forward(&b->projection, backend, x, source_tensor(projection_input), training);

    source = norm_input(m, &b->up, up_input, middle, &b->norm2, sum, x, training);
    linear_forward(&b->up, backend, up_output, source, training);
    source = activation_input(m, &b->down, down_input, up_output, training);
    linear_forward(&b->down, backend, x, source, training);
}

// dresidual: on entry the gradient of the block's output, on return of its input.
static void block_backward(GPT *m, Block *b, int64_t B, int64_t T) {
    const Backend *backend = m->backend;
    int64_t rows = B * T, C = m->config.channels;
    Tensor dresidual = rows_of(m->dresidual, rows), dnorm = rows_of(m->dnorm, rows), dwide = rows_of(m->dwide, rows);
    Tensor dqkv = tensor_make(dwide.data, dwide.dtype, rows, 3 * C);

    bool is_stored = b->down.input.kind == SOURCE_TENSOR;
    if (b->down.input_is_remade && is_stored)
        backend->activation_forward(b->down.input.x, rows_of(b->up_output, rows), ACTIVATION_GELU);
    linear_backward(&b->down, backend, dwide, source_tensor(dresidual));
    linear_backward(&b->up, backend, dnorm, activation_gradient(m, &b->up, dwide, rows_of(b->up_output, rows)));
    norm_backward(m, dresidual, &b->norm2, dnorm, rows_of(b->middle, rows));

    linear_backward(&b->projection, backend, dnorm, source_tensor(dresidual));
    backend->attention_backward(dqkv, dnorm, rows_of(b->qkv_output, rows), b->logsumexp, attention_shape(m, B, T));
    linear_backward(&b->qkv, backend, dnorm, source_tensor(dqkv));
    norm_backward(m, dresidual, &b->norm1, dnorm, rows_of(b->input, rows));
}

static void check_fits(const GPT *m, int64_t B, int64_t T) {
    if (B * T > m->B * m->T || T > m->T) die("internal error: a micro-batch larger than the model was made for");
}

// The micro-batch on the device: tokens (B, T), then targets. The one before it stays: the device may still be at it.
static const int32_t *next_batch(GPT *m, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T) {
    check_fits(m, B, T);
    m->turn = !m->turn;
    m->backend->copy_batch(m->batches[m->turn], tokens, targets, B * T);
    return m->batches[m->turn];
}

// tokens (B, T) on the device to final_output (B*T, C).
static void forward(GPT *m, const int32_t *tokens, int64_t B, int64_t T, bool training) {
    const Backend *backend = m->backend;
    int64_t rows = B * T;
    param_list_await(&m->params, AXIS_ROWWISE, -1);
    backend->embedding_forward(rows_of(m->blocks[0].input, rows), tokens, m->params.params[m->wte].value,
                               m->params.params[m->wpe].value, T);
    // The first block's input is the embedding, each later one's the sum of the block before it.
    Tensor input = rows_of(m->blocks[0].input, rows), residual = {0};
    for (int64_t l = 0; l < m->config.layers; l++) {
        profile_set_layer(l);
        param_list_await(&m->params, AXIS_ROWWISE, l);
        block_forward(m, &m->blocks[l], input, residual, B, T, training);
        input = rows_of(m->blocks[l].middle, rows);
        residual = rows_of(m->x, rows);
    }
    profile_set_layer(-1);
    norm_forward(m, rows_of(m->final_output, rows), rows_of(m->final_input, rows), &m->final_norm, input, residual);
}

// The LM head and the losses (rows) of targets (rows) on the device, for head_rows tokens at a time, so that logits are
// never stored whole. With `training` also the head's backward pass, which leaves the gradient of final_output in
// dnorm.
static void head(GPT *m, float *losses, const int32_t *targets, int64_t rows, float dloss, bool training) {
    const Backend *backend = m->backend;
    for (int64_t first = 0; first < rows; first += m->head_rows) {
        int64_t count = rows - first < m->head_rows ? rows - first : m->head_rows;
        Tensor logits = rows_of(m->logits, count), dlogits = training ? rows_of(m->dlogits, count) : (Tensor){0};
        linear_forward(&m->head, backend, logits, source_tensor(tensor_rows(m->final_output, first, count)), training);
        backend->classifier(losses + first, dlogits, logits, targets + first, dloss);
        if (training) linear_backward(&m->head, backend, tensor_rows(m->dnorm, first, count), source_tensor(dlogits));
    }
}

static double mean_loss(const GPT *m, const float *losses, int64_t rows) {
    return m->backend->sum(losses, rows) / (double)rows;
}

static float *losses_of(const GPT *m, int pending) { return m->losses + (int64_t)pending * m->B * m->T; }

static void sum_pending_losses(GPT *m) {
    for (int i = 0; i < m->pending_losses; i++) {
        m->loss_sum += mean_loss(m, losses_of(m, i), m->pending_rows[i]);
    }
    m->pending_losses = 0;
}

// Where the losses of a micro-batch go.
static float *next_losses(GPT *m) {
    if (m->pending_losses == MAX_PENDING_LOSSES) sum_pending_losses(m);
    return losses_of(m, m->pending_losses);
}

double gpt_take_loss(GPT *m) {
    sum_pending_losses(m);
    double loss = m->loss_sum;
    m->loss_sum = 0;
    return loss;
}

double gpt_loss(GPT *m, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T) {
    int64_t rows = B * T;
    const int32_t *batch = next_batch(m, tokens, targets, B, T);
    float *losses = next_losses(m);
    forward(m, batch, B, T, false);
    head(m, losses, batch + rows, rows, 0, false);
    return mean_loss(m, losses, rows);
}

void gpt_loss_and_gradients(GPT *m, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T, double scale) {
    const Backend *backend = m->backend;
    int64_t rows = B * T;
    const int32_t *batch = next_batch(m, tokens, targets, B, T);
    forward(m, batch, B, T, true);
    param_list_await(&m->params, AXIS_COLUMNWISE, -1);
    head(m, next_losses(m), batch + rows, rows, (float)(scale / (double)rows), true);
    m->pending_rows[m->pending_losses++] = rows;

    Tensor dresidual = rows_of(m->dresidual, rows);
    backend->zero(dresidual.data, (size_t)(rows * dresidual.cols) * dtype_size(dresidual.dtype));
    norm_backward(m, dresidual, &m->final_norm, rows_of(m->dnorm, rows), rows_of(m->final_input, rows));
    for (int64_t l = m->config.layers - 1; l >= 0; l--) {
        profile_set_layer(l);
        param_list_await(&m->params, AXIS_COLUMNWISE, l);
        block_backward(m, &m->blocks[l], B, T);
        param_list_reduce_layer(&m->params, backend, l);
    }
    profile_set_layer(-1);
    backend->embedding_backward(gradient_of(m, m->wte), gradient_of(m, m->wpe), batch, dresidual, T);
}

void gpt_logits(GPT *m, float *logits, const int32_t *tokens, int64_t B, int64_t T, int64_t first, int64_t count) {
    const Backend *backend = m->backend;
    int64_t V = m->config.vocab_size;
    check_fits(m, B, T);
    backend->copy_to_device(m->batches[m->turn], tokens, (size_t)(B * T) * sizeof(int32_t));
    forward(m, m->batches[m->turn], B, T, false);
    for (int64_t done = 0; done < count; done += m->head_rows) {
        int64_t rows = count - done < m->head_rows ? count - done : m->head_rows;
        Tensor chunk = rows_of(m->logits, rows);
        linear_forward(&m->head, backend, chunk, source_tensor(tensor_rows(m->final_output, first + done, rows)),
                       false);
        for (int64_t row = 0; row < rows; row++) {
            backend->copy_to_host(logits + (done + row) * V, tensor_rows(chunk, row, 1).data,
                                  (size_t)V * sizeof(float));
        }
    }
}

double gpt_flops_per_token(const GPTConfig *c, int64_t T) {
    double C = (double)c->channels, L = (double)c->layers;
    return 6 * (12 * L * C * C + (double)c->vocab_size * C) + 6 * L * C * (double)T;
}
