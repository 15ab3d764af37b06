#include "gpt.h"
#include "place.h"
#include "profile.h" // profile_set_layer
#include "llmc/base/util.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB_PADDING = 128 };

static int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
static int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }

// Configuration

int64_t gpt_kv_heads(const GPTConfig *c) { return c->kv_heads ? c->kv_heads : c->heads; }
double gpt_rope_theta(const GPTConfig *c) { return c->rope_theta > 0 ? c->rope_theta : 10000; }
int64_t gpt_head_size(const GPTConfig *c) { return c->channels / c->heads; }

int64_t gpt_ffn(const GPTConfig *c) {
    enum { GATED_FFN_MULTIPLE = 64 };
    if (c->ffn) return c->ffn;
    bool is_gated = c->activation == ACTIVATION_SWIGLU; // three matrices then have as many weights as two
    return is_gated ? round_up((8 * c->channels + 2) / 3, GATED_FFN_MULTIPLE) : 4 * c->channels;
}

LinearShape gpt_linear_shape(const GPTConfig *c, int which) {
    int64_t C = c->channels, F = gpt_ffn(c);
    switch (which) {
    case LINEAR_QKV:
        return (LinearShape){(c->heads + 2 * gpt_kv_heads(c)) * gpt_head_size(c), C};
    case LINEAR_PROJECTION:
        return (LinearShape){C, C};
    case LINEAR_UP:
        return (LinearShape){c->activation == ACTIVATION_SWIGLU ? 2 * F : F, C};
    default:
        return (LinearShape){C, F};
    }
}

const char *const *gpt_activation_names(void) {
    static const char *const NAMES[] = {"gelu", "relu", "relu2", "swiglu", NULL};
    return NAMES;
}

const char *const *gpt_norm_names(void) {
    static const char *const NAMES[] = {"layernorm", "rmsnorm", NULL};
    return NAMES;
}

const char *const *gpt_position_names(void) {
    static const char *const NAMES[] = {"learned", "rope", NULL};
    return NAMES;
}

bool gpt_is_gpt2(const GPTConfig *c) {
    return gpt_kv_heads(c) == c->heads && c->activation != ACTIVATION_SWIGLU && c->norm == NORM_LAYERNORM &&
           !c->no_norm_affine && !c->no_biases && c->positions == POSITIONS_LEARNED && !c->qk_norm;
}

void gpt_describe(char *text, size_t bytes, const GPTConfig *c) {
    static const char *const ACTIVATIONS[] = {"GELU", "ReLU", "squared ReLU", "SwiGLU"};
    char *list;
    size_t length;
    FILE *stream = open_memstream(&list, &length);
    if (!stream) die("open_memstream failed");
    if (c->positions == POSITIONS_ROPE) fprintf(stream, ", rotary positions (theta %g)", gpt_rope_theta(c));
    if (gpt_kv_heads(c) != c->heads) fprintf(stream, ", %lld heads of keys and values", (long long)gpt_kv_heads(c));
    if (c->qk_norm) fprintf(stream, ", normalised queries and keys");
    if (c->activation || gpt_ffn(c) != 4 * c->channels) {
        fprintf(stream, ", %s of %lld", ACTIVATIONS[c->activation], (long long)gpt_ffn(c));
    }
    if (c->norm == NORM_RMSNORM) fprintf(stream, ", RMSNorm");
    if (c->no_norm_affine) fprintf(stream, ", norms without gains");
    if (c->no_biases) fprintf(stream, ", no biases");
    if (c->untied_head) fprintf(stream, ", untied head");
    fclose(stream);
    snprintf(text, bytes, "%s", length > 2 ? list + 2 : "");
    free(list);
}

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
    if (c->kv_heads < 0 || c->kv_heads > c->heads || c->heads % gpt_kv_heads(c) != 0) {
        return error_set(error,
                         "--kv-heads %lld can't be shared evenly by --heads %lld: choose a number that divides it",
                         (long long)c->kv_heads, (long long)c->heads);
    }
    if (c->positions == POSITIONS_ROPE && gpt_head_size(c) % 2 != 0) {
        return error_set(error,
                         "--positions rope turns pairs of a head's channels, and --channels %lld in --heads %lld are "
                         "%lld for each, which is odd: choose others",
                         (long long)c->channels, (long long)c->heads, (long long)gpt_head_size(c));
    }
    if (c->rope_theta > 0 && c->positions != POSITIONS_ROPE) {
        return error_set(error, "--rope-theta is for rotary positions: give --positions rope too");
    }
    if (c->layers > 1000 || c->channels > 65536 || c->max_seq_len > (1 << 20) || c->vocab_size > (1 << 24) ||
        c->ffn < 0 || c->ffn > (1 << 20)) {
        return error_set(error, "this model is beyond what the program takes: at most 1000 layers, 65536 channels, an "
                                "MLP of 1048576, 1048576 positions, 16777216 tokens in the vocabulary");
    }
    return true;
}

// Parameters

// As Hugging Face names them in its GPT-2, and in its Llama; what neither has is named as Llama
// would.
typedef struct {
    bool transposed; // linear layers' weights in files: Conv1D
    const char *tokens, *positions, *blocks, *norm1, *norm2, *final_norm;
    const char *linears[LINEARS_PER_BLOCK];
} Names;

static const Names GPT2_NAMES = {.transposed = true,
                                 .tokens = "transformer.wte",
                                 .positions = "transformer.wpe",
                                 .blocks = "transformer.h",
                                 .norm1 = "ln_1",
                                 .norm2 = "ln_2",
                                 .final_norm = "transformer.ln_f",
                                 .linears = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}};
static const Names LLAMA_NAMES = {
    .tokens = "model.embed_tokens",
    .positions = "model.embed_positions",
    .blocks = "model.layers",
    .norm1 = "input_layernorm",
    .norm2 = "post_attention_layernorm",
    .final_norm = "model.norm",
    .linears = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"}};

static const Names *names_of(const GPTConfig *c) { return gpt_is_gpt2(c) ? &GPT2_NAMES : &LLAMA_NAMES; }

// In Llama's files queries, keys and values are tensors of their own, and so are SwiGLU's gate and
// up parts.
static int linear_parts(const char *names[MAX_PARAM_PARTS], int64_t rows[MAX_PARAM_PARTS], const GPTConfig *c,
                        int which) {
    if (gpt_is_gpt2(c)) return 0;
    int64_t kv = gpt_kv_heads(c) * gpt_head_size(c);
    if (which == LINEAR_QKV) {
        memcpy(names, (const char *[]){"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, 3 * sizeof(*names));
        memcpy(rows, (int64_t[]){c->channels, kv, kv}, 3 * sizeof(*rows));
        return 3;
    }
    if (which == LINEAR_UP && c->activation == ACTIVATION_SWIGLU) {
        memcpy(names, (const char *[]){"mlp.gate_proj", "mlp.up_proj"}, 2 * sizeof(*names));
        memcpy(rows, (int64_t[]){gpt_ffn(c), gpt_ffn(c)}, 2 * sizeof(*rows));
        return 2;
    }
    return 0;
}

static int add_matrix(GPT *m, const char *name, int64_t rows, int64_t cols, double stddev, bool bf16) {
    Param p = {
        .rows = rows, .cols = cols, .layer = -1, .decayed = true, .init_stddev = (float)stddev, .has_bf16_value = bf16};
    snprintf(p.name, sizeof(p.name), "%s.weight", name);
    return param_list_add(&m->params, p);
}

static int add_vector(GPT *m, const char *name, const char *suffix, int64_t count, float value) {
    Param p = {.rows = 1, .cols = count, .is_vector = true, .init_value = value};
    snprintf(p.name, sizeof(p.name), "%s.%s", name, suffix);
    return param_list_add(&m->params, p);
}

static Norm add_norm(GPT *m, const char *name, int64_t cols, const Recipe *recipe) {
    const GPTConfig *c = &m->config;
    Norm norm = {.weight = -1, .bias = -1};
    if (c->no_norm_affine) return norm;
    norm.weight = add_vector(m, name, "weight", cols, 1);
    m->params.params[norm.weight].value_format = recipe->norm_gains;
    m->params.params[norm.weight].rounding = recipe->rounding[ROLE_WEIGHTS];
    if (c->norm == NORM_LAYERNORM && !c->no_biases) norm.bias = add_vector(m, name, "bias", cols, 0);
    return norm;
}

// The list's final place isn't known yet: parameters are noted by index and linked by link_linear.
typedef struct {
    int weight, bias; // bias -1: none
} LinearParams;

static void name_parts(GPT *m, int index, int which, int64_t layer, const char *suffix) {
    const char *names[MAX_PARAM_PARTS];
    int64_t rows[MAX_PARAM_PARTS];
    Param *p = &m->params.params[index];
    p->num_parts = linear_parts(names, rows, &m->config, which);
    for (int i = 0; i < p->num_parts; i++) {
        snprintf(p->parts[i].name, sizeof(p->parts[i].name), "%s.%lld.%s.%s", names_of(&m->config)->blocks,
                 (long long)layer, names[i], suffix);
        p->parts[i].rows = rows[i];
    }
}

static LinearParams add_linear(GPT *m, int which, int64_t layer, double stddev) {
    const Names *names = names_of(&m->config);
    LinearShape shape = gpt_linear_shape(&m->config, which);
    Recipe recipe = recipe_for_layer(&m->recipe, layer, m->config.layers);
    char name[48];
    snprintf(name, sizeof(name), "%s.%lld.%s", names->blocks, (long long)layer, names->linears[which]);
    LinearParams result = {add_matrix(m, name, shape.N, shape.K, stddev, false), -1};
    Param *weight = &m->params.params[result.weight];
    weight->file_transposed = names->transposed;
    weight->layer = layer;
    linear_declare_weight(weight, &recipe);
    name_parts(m, result.weight, which, layer, "weight");
    if (m->config.no_biases) return result;
    result.bias = add_vector(m, name, "bias", shape.N, 0);
    name_parts(m, result.bias, which, layer, "bias");
    return result;
}

static Linear link_linear(const GPT *m, LinearParams params, int64_t layer) {
    return (Linear){.recipe = recipe_for_layer(&m->recipe, layer, m->config.layers),
                    .weight = &m->params.params[params.weight],
                    .bias = params.bias >= 0 ? &m->params.params[params.bias] : NULL};
}

static Norm add_block_norm(GPT *m, int64_t layer, const char *norm, int64_t cols) {
    char name[48];
    Recipe recipe = recipe_for_layer(&m->recipe, layer, m->config.layers);
    snprintf(name, sizeof(name), "%s.%lld.%s", names_of(&m->config)->blocks, (long long)layer, norm);
    return add_norm(m, name, cols, &recipe);
}

static void add_block(GPT *m, int64_t layer, LinearParams linears[LINEARS_PER_BLOCK]) {
    const GPTConfig *c = &m->config;
    const Names *names = names_of(c);
    Block *b = &m->blocks[layer];
    // What writes to the residual stream, twice a block, starts smaller.
    const double stddev = 0.02, residual_stddev = 0.02 / sqrt(2.0 * (double)c->layers);
    b->norm1 = add_block_norm(m, layer, names->norm1, c->channels);
    linears[LINEAR_QKV] = add_linear(m, LINEAR_QKV, layer, stddev);
    if (c->qk_norm) {
        b->q_norm = add_block_norm(m, layer, "self_attn.q_norm", c->channels);
        b->k_norm = add_block_norm(m, layer, "self_attn.k_norm", gpt_kv_heads(c) * gpt_head_size(c));
    }
    linears[LINEAR_PROJECTION] = add_linear(m, LINEAR_PROJECTION, layer, residual_stddev);
    b->norm2 = add_block_norm(m, layer, names->norm2, c->channels);
    linears[LINEAR_UP] = add_linear(m, LINEAR_UP, layer, stddev);
    linears[LINEAR_DOWN] = add_linear(m, LINEAR_DOWN, layer, residual_stddev);
}

static void add_parameters(GPT *m) {
    const GPTConfig *c = &m->config;
    const Names *names = names_of(c);
    int64_t L = c->layers, C = c->channels;
    const double stddev = 0.02;
    Recipe head_recipe = recipe_for_layer(&m->recipe, L, L);
    bool bf16 = m->recipe.activation_dtype == FORMAT_BF16;
    LinearParams(*linears)[LINEARS_PER_BLOCK] = allocate((size_t)L * sizeof(*linears));

    m->wte = add_matrix(m, names->tokens, c->vocab_size, C, stddev, bf16);
    bool is_learned = c->positions == POSITIONS_LEARNED;
    m->wpe = is_learned ? add_matrix(m, names->positions, c->max_seq_len, C, stddev, bf16) : -1;
    for (int64_t l = 0; l < L; l++) {
        add_block(m, l, linears[l]);
    }
    m->final_norm = add_norm(m, names->final_norm, C, &m->recipe);
    int head = c->untied_head ? add_matrix(m, "lm_head", c->vocab_size, C, stddev, false) : m->wte;
    linear_declare_weight(&m->params.params[head], &head_recipe);
    for (int64_t l = 0; l < L; l++) {
        for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
            *gpt_linear(m, l, i) = link_linear(m, linears[l][i], l);
        }
        // The activation's output is the largest of what would be kept, and one pass over what is
        // kept anyway makes it again.
        Linear *down = &m->blocks[l].down;
        down->input_is_remade = !linear_keeps_input(&down->recipe);
    }
    m->head = link_linear(m, (LinearParams){head, -1}, L);
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

static Tensor take_rows(GPT *m, MemoryPlan *plan, MemoryKind kind, int64_t cols) {
    return take_tensor(plan, kind, m->recipe.activation_dtype, m->B * m->T, cols);
}

// A linear layer's input: kept for the backward pass, or `shared` by all layers where nobody needs
// it after the forward pass.
static Tensor take_linear_input(GPT *m, MemoryPlan *plan, const Linear *linear, Tensor shared, int64_t cols) {
    if (m->training && linear_keeps_input(&linear->recipe)) return take_rows(m, plan, MEMORY_KEPT, cols);
    return tensor_make(shared.data, shared.dtype, shared.rows, cols);
}

static void layout_norm(GPT *m, MemoryPlan *plan, Norm *norm) {
    size_t bytes = (size_t)(m->B * m->T) * sizeof(float);
    if (m->config.norm == NORM_LAYERNORM) norm->mean = memory_take(plan, MEMORY_KEPT, bytes);
    norm->rstd = memory_take(plan, MEMORY_KEPT, bytes);
}

// Columns of queries and keys, which come first in qkv's output.
static int64_t query_key_cols(const GPTConfig *c) { return (c->heads + gpt_kv_heads(c)) * gpt_head_size(c); }

static void layout_activations(GPT *m, MemoryPlan *plan, Block *b, Tensor shared) {
    const GPTConfig *c = &m->config;
    int64_t C = c->channels;
    layout_norm(m, plan, &b->norm1);
    layout_norm(m, plan, &b->norm2);
    b->qkv_input = take_linear_input(m, plan, &b->qkv, shared, C);
    b->qkv_output = take_rows(m, plan, MEMORY_KEPT, gpt_linear_shape(c, LINEAR_QKV).N);
    if (c->qk_norm) {
        layout_norm(m, plan, &b->q_norm);
        layout_norm(m, plan, &b->k_norm);
        b->qk_input = take_rows(m, plan, MEMORY_KEPT, query_key_cols(c));
    }
    b->logsumexp = memory_take(plan, MEMORY_KEPT, (size_t)(m->B * m->T * c->heads) * sizeof(float));
    b->projection_input = take_linear_input(m, plan, &b->projection, shared, C);
    b->middle = take_rows(m, plan, MEMORY_KEPT, C);
    b->up_input = take_linear_input(m, plan, &b->up, shared, C);
    b->up_output = take_rows(m, plan, MEMORY_KEPT, gpt_linear_shape(c, LINEAR_UP).N);
    b->down_input = take_linear_input(m, plan, &b->down, shared, gpt_ffn(c));
}

static void share_statistics(Norm *norm, const Norm *first) {
    norm->mean = first->mean;
    norm->rstd = first->rstd;
}

// Without a backward pass all blocks use the first one's activations, but for the residual stream
// they read and write.
static void share_activations(Block *b, const Block *first) {
    share_statistics(&b->norm1, &first->norm1);
    share_statistics(&b->norm2, &first->norm2);
    share_statistics(&b->q_norm, &first->q_norm);
    share_statistics(&b->k_norm, &first->k_norm);
    b->qkv_input = first->qkv_input;
    b->qkv_output = first->qkv_output;
    b->qk_input = first->qk_input;
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
        .B = B, .T = T, .NH = c->heads, .NKV = gpt_kv_heads(c), .HS = gpt_head_size(c), .causal = true};
}

static void layout_linears(GPT *m, MemoryPlan *plan) {
    const Backend *backend = m->backend;
    const GPTConfig *c = &m->config;
    int64_t rows = m->B * m->T, widest = c->channels;
    LinearScratch most = {0};
    linear_layout(&m->head, plan, backend, m->head_rows, m->training, &most);
    for (int64_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
            Linear *linear = gpt_linear(m, l, i);
            widest = max_int64(widest, linear->weight->rows);
            linear_layout(linear, plan, backend, rows, m->training, &most);
        }
    }
    size_t workspace = max_size(
        most.workspace, backend->attention_workspace(m->recipe.activation_dtype, attention_shape(m, m->B, m->T)));
    workspace = max_size(workspace, backend->reduction_workspace(rows, widest));
    char *shared = memory_take(plan, MEMORY_SCRATCH, most.bytes);
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
    int64_t C = m->config.channels, L = m->config.layers, F = gpt_ffn(&m->config), rows = m->B * m->T;
    param_list_layout(&m->params, plan, m->backend, m->training);
    for (int i = 0; i < 2; i++) {
        m->batches[i] = memory_take(plan, MEMORY_SCRATCH, (size_t)(2 * rows) * sizeof(int32_t));
    }
    m->losses = memory_take(plan, MEMORY_SCRATCH, (size_t)(MAX_PENDING_LOSSES * rows) * sizeof(float));
    if (m->config.positions == POSITIONS_ROPE) {
        m->rotations = memory_take(plan, MEMORY_SCRATCH, (size_t)(m->T * gpt_head_size(&m->config)) * sizeof(float));
    }
    m->x = take_rows(m, plan, MEMORY_SCRATCH, C);
    Tensor shared = take_rows(m, plan, MEMORY_SCRATCH, max_int64(C, F));
    for (int64_t l = 0; l < L; l++) {
        Block *b = &m->blocks[l];
        b->input = take_rows(m, plan, MEMORY_KEPT, C);
        if (m->training || l == 0) {
            layout_activations(m, plan, b, shared);
        } else {
            share_activations(b, &m->blocks[0]);
        }
    }
    m->final_input = take_rows(m, plan, MEMORY_KEPT, C);
    m->final_output = take_rows(m, plan, MEMORY_KEPT, C);
    layout_norm(m, plan, &m->final_norm);
    if (m->training) {
        m->dresidual = take_rows(m, plan, MEMORY_SCRATCH, C);
        m->dnorm = take_rows(m, plan, MEMORY_SCRATCH, C);
        int64_t qkv = gpt_linear_shape(&m->config, LINEAR_QKV).N;
        m->dwide = take_rows(m, plan, MEMORY_SCRATCH, max_int64(F, qkv));
        if (m->config.activation == ACTIVATION_SWIGLU) m->dgate_up = take_rows(m, plan, MEMORY_SCRATCH, 2 * F);
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

ParamCounts gpt_count_parameters(const GPTConfig *config) {
    GPT model = {.config = *config, .blocks = allocate((size_t)config->layers * sizeof(Block))};
    ParamCounts counts = {0};
    add_parameters(&model);
    for (int i = 0; i < model.params.count; i++) {
        const Param *p = &model.params.params[i];
        counts.all += param_count(p);
        counts.matrices += p->is_vector ? 0 : param_count(p);
    }
    gpt_free(&model);
    return counts;
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
    const GPTConfig *c = &m->config;
    if (m->rotations) m->backend->rope_rotations(m->rotations, m->T, gpt_head_size(c), gpt_rope_theta(c));
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

// Index -1: there is none.
static const float *vector_of(const GPT *m, int index) { return index < 0 ? NULL : m->params.params[index].value.data; }
static float *gradient_of(const GPT *m, int index) { return index < 0 ? NULL : m->params.params[index].gradient; }

// The first rows of each tensor, for a micro-batch smaller than the largest.
static Tensor rows_of(Tensor tensor, int64_t rows) { return tensor_rows(tensor, 0, rows); }

static NormParams norm_params(const GPT *m, const Norm *norm) {
    return (NormParams){.kind = m->config.norm,
                        .eps = NORM_EPS,
                        .mean = norm->mean,
                        .rstd = norm->rstd,
                        .weight = vector_of(m, norm->weight),
                        .bias = vector_of(m, norm->bias)};
}

// Normalizes input + residual, which is written to `sum`; input alone where residual is {0}.
static void norm_forward(GPT *m, Tensor out, Tensor sum, const Norm *norm, Tensor input, Tensor residual) {
    m->backend->layernorm_forward(out, sum, input, residual, norm_params(m, norm));
}

// The same as what `linear` takes: stored in `out`, or made when it is quantized.
static Source norm_input(GPT *m, const Linear *linear, Tensor out, Tensor sum, const Norm *norm, Tensor input,
                         Tensor residual, bool training) {
    const Tensor nowhere = {0};
    bool is_made = linear_makes_input(linear, training);
    norm_forward(m, is_made ? nowhere : out, sum, norm, input, residual);
    if (!is_made) return source_tensor(out);
    return (Source){.kind = SOURCE_LAYERNORM, .x = residual.data ? sum : input, .norm = norm_params(m, norm)};
}

static Source activation_input(GPT *m, const Linear *linear, Tensor out, Tensor input, bool training) {
    Activation activation = m->config.activation;
    if (linear_makes_input(linear, training))
        return (Source){.kind = SOURCE_ACTIVATION, .x = input, .activation = activation};
    m->backend->activation_forward(out, input, activation);
    return source_tensor(out);
}

// The gradient of the activation's input: in place of dout but for SwiGLU, whose input is wider.
static Source activation_gradient(GPT *m, const Linear *linear, Tensor dout, Tensor input) {
    Activation activation = m->config.activation;
    bool is_gated = activation == ACTIVATION_SWIGLU;
    if (linear_makes_gradient(linear) && !is_gated) {
        return (Source){
            .kind = SOURCE_ACTIVATION_BACKWARD, .x = input, .activation = activation, .dout = dout, .stored = dout};
    }
    Tensor dinput = is_gated ? rows_of(m->dgate_up, dout.rows) : dout;
    m->backend->activation_backward(dinput, dout, input, activation);
    return source_tensor(dinput);
}

static void norm_backward(GPT *m, Tensor dinput, const Norm *norm, Tensor dout, Tensor input) {
    m->backend->layernorm_backward(dinput, gradient_of(m, norm->weight), gradient_of(m, norm->bias), dout, input,
                                   norm_params(m, norm));
}

typedef struct {
    Tensor queries, keys, both;
} QueriesAndKeys;

// Of qkv, or of queries and keys alone: views.
static QueriesAndKeys queries_and_keys(const GPT *m, Tensor qkv) {
    int64_t C = m->config.channels, both = query_key_cols(&m->config);
    return (QueriesAndKeys){tensor_cols(qkv, 0, C), tensor_cols(qkv, C, both - C), tensor_cols(qkv, 0, both)};
}

// Queries and keys as attention takes them, in place: normalised, then turned by their positions.
static void prepare_queries_and_keys(GPT *m, const Block *b, Tensor qkv, int64_t T) {
    const GPTConfig *c = &m->config;
    const Backend *backend = m->backend;
    QueriesAndKeys out = queries_and_keys(m, qkv);
    if (c->qk_norm) {
        const Tensor none = {0};
        QueriesAndKeys in = queries_and_keys(m, rows_of(b->qk_input, qkv.rows));
        backend->convert(in.both, out.both);
        norm_forward(m, out.queries, none, &b->q_norm, in.queries, none);
        norm_forward(m, out.keys, none, &b->k_norm, in.keys, none);
    }
    if (c->positions == POSITIONS_ROPE) backend->rope(out.both, m->rotations, T, gpt_head_size(c), false);
}

// Of `out` to that of its input, by way of scratch that is large enough.
static void norm_backward_in_place(GPT *m, Tensor dout, const Norm *norm, Tensor input, Tensor scratch) {
    Tensor dinput = tensor_make(scratch.data, scratch.dtype, dout.rows, dout.cols);
    m->backend->zero(dinput.data, (size_t)(dinput.rows * dinput.cols) * dtype_size(dinput.dtype));
    norm_backward(m, dinput, norm, dout, input);
    m->backend->convert(dout, dinput);
}

static void queries_and_keys_backward(GPT *m, const Block *b, Tensor dqkv, int64_t T, Tensor scratch) {
    const GPTConfig *c = &m->config;
    QueriesAndKeys dout = queries_and_keys(m, dqkv);
    if (c->positions == POSITIONS_ROPE) m->backend->rope(dout.both, m->rotations, T, gpt_head_size(c), true);
    if (!c->qk_norm) return;
    QueriesAndKeys in = queries_and_keys(m, rows_of(b->qk_input, dqkv.rows));
    norm_backward_in_place(m, dout.queries, &b->q_norm, in.queries, scratch);
    norm_backward_in_place(m, dout.keys, &b->k_norm, in.keys, scratch);
}

// The block's input is input + residual, or input alone where residual is {0}. `residual` also gets
// the output, to which the block's `middle` is still to be added.
static void block_forward(GPT *m, Block *b, Tensor input, Tensor residual, int64_t B, int64_t T, bool training) {
    const Backend *backend = m->backend;
    int64_t rows = B * T;
    Tensor sum = rows_of(b->input, rows), qkv_input = rows_of(b->qkv_input, rows),
           qkv_output = rows_of(b->qkv_output, rows), projection_input = rows_of(b->projection_input, rows),
           middle = rows_of(b->middle, rows), up_input = rows_of(b->up_input, rows),
           up_output = rows_of(b->up_output, rows), down_input = rows_of(b->down_input, rows), x = rows_of(m->x, rows);

    Source source = norm_input(m, &b->qkv, qkv_input, sum, &b->norm1, input, residual, training);
    linear_forward(&b->qkv, backend, qkv_output, source, training);
    prepare_queries_and_keys(m, b, qkv_output, T);
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
    const GPTConfig *c = &m->config;
    int64_t rows = B * T;
    Tensor dresidual = rows_of(m->dresidual, rows), dnorm = rows_of(m->dnorm, rows), dwide = rows_of(m->dwide, rows);
    Tensor dactivation = tensor_make(dwide.data, dwide.dtype, rows, gpt_ffn(c));
    Tensor dqkv = tensor_make(dwide.data, dwide.dtype, rows, gpt_linear_shape(c, LINEAR_QKV).N);

    bool is_stored = b->down.input.kind == SOURCE_TENSOR;
    if (b->down.input_is_remade && is_stored)
        backend->activation_forward(b->down.input.x, rows_of(b->up_output, rows), c->activation);
    linear_backward(&b->down, backend, dactivation, source_tensor(dresidual));
    linear_backward(&b->up, backend, dnorm, activation_gradient(m, &b->up, dactivation, rows_of(b->up_output, rows)));
    norm_backward(m, dresidual, &b->norm2, dnorm, rows_of(b->middle, rows));

    linear_backward(&b->projection, backend, dnorm, source_tensor(dresidual));
    backend->attention_backward(dqkv, dnorm, rows_of(b->qkv_output, rows), b->logsumexp, attention_shape(m, B, T));
    queries_and_keys_backward(m, b, dqkv, T, dnorm);
    linear_backward(&b->qkv, backend, dnorm, source_tensor(dqkv));
    norm_backward(m, dresidual, &b->norm1, dnorm, rows_of(b->input, rows));
}

static void check_fits(const GPT *m, int64_t B, int64_t T) {
    if (B * T > m->B * m->T || T > m->T) die("internal error: a micro-batch larger than the model was made for");
}

// The micro-batch on the device: tokens (B, T), then targets. The one before it stays: the device
// may still be at it.
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
    Tensor wpe = {0};
    if (m->wpe >= 0) wpe = m->params.params[m->wpe].value;
    backend->embedding_forward(rows_of(m->blocks[0].input, rows), tokens, m->params.params[m->wte].value, wpe, T);
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

// The LM head and the losses (rows) of targets (rows) on the device, for head_rows tokens at a
// time, so that logits are never stored whole. With `training` also the head's backward pass, which
// leaves the gradient of final_output in dnorm.
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
    double C = (double)c->channels, L = (double)c->layers, weights = 0;
    for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
        LinearShape shape = gpt_linear_shape(c, i);
        weights += (double)shape.N * (double)shape.K;
    }
    return 6 * (L * weights + (double)c->vocab_size * C) + 6 * L * C * (double)T;
}
