/*
The parameters of a GPT, by the names that Hugging Face gives them, and the branches and norms that
use them.
*/
#include "gpt.h"

#include <math.h>

// Names

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

static void add_part(Param *p, const GPTConfig *c, const char *name, const char *suffix) {
    int64_t rows = p->stacked[p->num_parts];
    ParamPart *part = &p->parts[p->num_parts++];
    snprintf(part->name, sizeof(part->name), "%s.%ld.%s.%s", names_of(c)->blocks, p->layer, name, suffix);
    part->rows = rows;
}

// Tells what a linear layer's weight or bias consists of, where it isn't one matrix or vector:
// queries, keys and values, or SwiGLU's gate and up parts. In Llama's files they are tensors of
// their own.
static void add_parts(Param *p, const GPTConfig *c, int which, const char *suffix) {
    bool is_gated = which == LINEAR_UP && c->activation == ACTIVATION_SWIGLU;
    if (which == LINEAR_QKV) {
        p->stacked[0] = c->channels;
        p->stacked[1] = p->stacked[2] = gpt_kv_heads(c) * gpt_head_size(c);
    }
    if (is_gated) p->stacked[0] = p->stacked[1] = gpt_ffn(c);
    if (gpt_is_gpt2(c)) return;
    if (which == LINEAR_QKV) {
        add_part(p, c, "self_attn.q_proj", suffix);
        add_part(p, c, "self_attn.k_proj", suffix);
        add_part(p, c, "self_attn.v_proj", suffix);
    }
    if (is_gated) {
        add_part(p, c, "mlp.gate_proj", suffix);
        add_part(p, c, "mlp.up_proj", suffix);
    }
}

// Parameters

enum { PARAMS_OF_BRANCH = 2 + 2 * 2 + 2 * 2, PARAMS_OF_NO_LAYER = 5 }; // at most

static Param *add_param(GPT *m, Param p) { return &m->params.params[param_list_add(&m->params, p)]; }

static Param *add_matrix(GPT *m, const char *name, int64_t layer, int64_t rows, int64_t cols, double stddev) {
    Param p = {.rows = rows, .cols = cols, .layer = layer, .init_stddev = (float)stddev};
    snprintf(p.name, sizeof(p.name), "%s.weight", name);
    return add_param(m, p);
}

static Param *add_vector(GPT *m, const char *name, const char *suffix, int64_t layer, int64_t count, float value) {
    Param p = {.rows = 1, .cols = count, .layer = layer, .is_vector = true, .init_value = value};
    snprintf(p.name, sizeof(p.name), "%s.%s", name, suffix);
    return add_param(m, p);
}

static Norm add_norm(GPT *m, const char *name, int64_t layer, int64_t cols, const Recipe *recipe) {
    const GPTConfig *c = &m->config;
    Norm norm = {.kind = c->norm};
    if (c->no_norm_affine) return norm;
    Param *gains = add_vector(m, name, "weight", layer, cols, 1);
    norm_declare_gains(gains, recipe);
    norm.weight = gains;
    if (c->norm == NORM_LAYERNORM && !c->no_biases) norm.bias = add_vector(m, name, "bias", layer, cols, 0);
    return norm;
}

typedef struct {
    char text[48];
} Name;

static Name name_in_block(const GPT *m, int64_t layer, const char *name) {
    Name full;
    snprintf(full.text, sizeof(full.text), "%s.%ld.%s", names_of(&m->config)->blocks, layer, name);
    return full;
}

static Norm add_block_norm(GPT *m, int64_t layer, const char *name, int64_t cols) {
    Recipe recipe = recipe_for_layer(&m->recipe, layer, m->config.layers);
    return add_norm(m, name_in_block(m, layer, name).text, layer, cols, &recipe);
}

static bool filter_matches_any(const RecipeFilter *filter, const GPTConfig *c) {
    for (int64_t i = 0; i < gpt_num_linears(c); i++) {
        if (recipe_filter_matches(filter, gpt_linear_name(c, i).text)) return true;
    }
    return false;
}

// Returns the recipe of a linear layer by its number, as gpt_linear_at.
static Recipe recipe_of_linear(const Recipe *recipe, const GPTConfig *c, int64_t number) {
    return recipe_for_linear(recipe, number / LINEARS_PER_BLOCK, c->layers, gpt_linear_name(c, number).text);
}

RecipeEffects gpt_recipe_effects(const GPTConfig *config, const Recipe *recipe) {
    RecipeEffects effects = {0};
    for (int64_t i = 0; i < gpt_num_linears(config); i++) {
        Recipe of_linear = recipe_of_linear(recipe, config, i);
        recipe_add_effects(&effects, &of_linear);
    }
    return effects;
}

bool gpt_check_recipe(const GPTConfig *config, const Recipe *recipe, Error *error) {
    int64_t L = config->layers;
    if (!recipe_check_layers(recipe, L, error)) return false;
    for (int i = 0; i < recipe->num_filters; i++) {
        if (filter_matches_any(&recipe->filters[i], config)) continue;
        return error_set(
            error,
            "--operand-in %s matches no linear layer: they are h.0.qkv, h.0.projection, h.0.up, h.0.down, and so "
            "on to h.%ld.down, and lm_head",
            recipe->filters[i].linears, L - 1);
    }
    for (int64_t i = 0; i < gpt_num_linears(config); i++) {
        Recipe of_linear = recipe_of_linear(recipe, config, i);
        if (!recipe_check(&of_linear, error)) return false;
    }
    RecipeEffects effects = gpt_recipe_effects(config, recipe);
    return recipe_check_effects(recipe, &effects, error);
}

bool gpt_check_gemms(const GPTConfig *config, const Recipe *recipe, const Backend *backend, int64_t rows,
                     int64_t head_rows, bool training, Error *error) {
    const LinearShape head = {round_up_int64(config->vocab_size, backend->vocab_multiple), config->channels};
    for (int64_t i = 0; i < gpt_num_linears(config); i++) {
        bool is_head = i == config->layers * LINEARS_PER_BLOCK;
        LinearShape shape = is_head ? head : gpt_linear_shape(config, (int)(i % LINEARS_PER_BLOCK));
        Recipe of_linear = recipe_of_linear(recipe, config, i);
        Format out = is_head ? FORMAT_FP32 : of_linear.activation_dtype;
        if (!linear_check_gemms(&of_linear, gpt_linear_name(config, i).text, backend, is_head ? head_rows : rows,
                                shape.N, shape.K, out, training, error)) {
            return false;
        }
    }
    return true;
}

static Linear add_linear(GPT *m, int which, int64_t layer, double stddev) {
    const Names *names = names_of(&m->config);
    LinearShape shape = gpt_linear_shape(&m->config, which);
    Linear linear = {.recipe = recipe_of_linear(&m->recipe, &m->config, layer * LINEARS_PER_BLOCK + which),
                     .keeps_values = m->params.sharding.keeps_values};
    Name name = name_in_block(m, layer, names->linears[which]);
    Param *weight = add_matrix(m, name.text, layer, shape.N, shape.K, stddev);
    weight->file_transposed = names->transposed;
    linear_declare_weight(weight, &linear.recipe);
    add_parts(weight, &m->config, which, "weight");
    linear.weight = weight;
    if (m->config.no_biases) return linear;
    Param *bias = add_vector(m, name.text, "bias", layer, shape.N, 0);
    add_parts(bias, &m->config, which, "bias");
    linear.bias = bias;
    return linear;
}

static Attention add_attention(GPT *m, int64_t layer) {
    const GPTConfig *c = &m->config;
    Attention attention = {.shape = {.B = m->B,
                                     .T = m->T,
                                     .NH = c->heads,
                                     .NKV = gpt_kv_heads(c),
                                     .HS = gpt_head_size(c),
                                     .causal = true,
                                     .by_document = c->mask_documents,
                                     .forward_only = !m->training},
                           .has_qk_norm = c->qk_norm};
    if (!c->qk_norm) return attention;
    attention.q_norm = add_block_norm(m, layer, "self_attn.q_norm", c->channels);
    attention.k_norm = add_block_norm(m, layer, "self_attn.k_norm", gpt_kv_heads(c) * gpt_head_size(c));
    return attention;
}

// Initial values depend on the order in which parameters are added.
static void add_block(GPT *m, int64_t layer) {
    const GPTConfig *c = &m->config;
    const Names *names = names_of(c);
    // What writes to the residual stream, twice a block, starts smaller.
    const double stddev = 0.02, last_stddev = 0.02 / sqrt(2.0 * (double)c->layers);
    Branch *attention = gpt_branch(m, layer, BRANCH_ATTENTION), *mlp = gpt_branch(m, layer, BRANCH_MLP);

    *attention = (Branch){.has_norm = true, .is_attention = true};
    attention->norm = add_block_norm(m, layer, names->norm1, c->channels);
    attention->first = add_linear(m, LINEAR_QKV, layer, stddev);
    attention->attention = add_attention(m, layer);
    attention->second = add_linear(m, LINEAR_PROJECTION, layer, last_stddev);
    branch_declare(attention, m->params.sharding.keeps_values);

    *mlp = (Branch){.has_norm = true, .activation = c->activation};
    mlp->norm = add_block_norm(m, layer, names->norm2, c->channels);
    mlp->first = add_linear(m, LINEAR_UP, layer, stddev);
    mlp->second = add_linear(m, LINEAR_DOWN, layer, last_stddev);
    branch_declare(mlp, m->params.sharding.keeps_activations);
}

void gpt_declare_params(GPT *m) {
    const GPTConfig *c = &m->config;
    const Names *names = names_of(c);
    int64_t L = c->layers, C = c->channels, none = -1;
    const double stddev = 0.02;
    param_list_reserve(&m->params, (int)L * BRANCHES_PER_BLOCK * PARAMS_OF_BRANCH + PARAMS_OF_NO_LAYER);

    m->wte = add_matrix(m, names->tokens, none, c->vocab_size, C, stddev);
    m->wte->has_bf16_value = m->recipe.activation_dtype == FORMAT_BF16;
    m->wte->is_embedding = true;
    if (c->positions == POSITIONS_LEARNED) {
        m->wpe = add_matrix(m, names->positions, none, c->max_seq_len, C, stddev);
        m->wpe->has_bf16_value = m->wte->has_bf16_value;
        m->wpe->is_embedding = true;
    }
    for (int64_t l = 0; l < L; l++) {
        add_block(m, l);
    }
    m->final_norm = add_norm(m, names->final_norm, none, C, &m->recipe);
    Param *head = c->untied_head ? add_matrix(m, "lm_head", none, c->vocab_size, C, stddev) : m->wte;
    m->head = (Linear){.recipe = recipe_of_linear(&m->recipe, c, L * LINEARS_PER_BLOCK), .weight = head};
    linear_declare_weight(head, &m->head.recipe);
    // Masters aren't padded, and so isn't what a GEMM takes of them.
    bool is_padded = m->backend && !head->needs_fp32;
    head->padded_rows = is_padded ? round_up_int64(c->vocab_size, m->backend->vocab_multiple) : 0;
}

static bool writes_to_stream(GPT *m, const Param *p) {
    if (p->layer < 0) return false;
    return p == gpt_branch(m, p->layer, BRANCH_ATTENTION)->second.weight ||
           p == gpt_branch(m, p->layer, BRANCH_MLP)->second.weight;
}

void gpt_declare_mitchell(GPT *m) {
    const float standard_deviations = 3;
    for (int i = 0; i < m->params.count; i++) {
        Param *p = &m->params.params[i];
        if (p->is_vector) continue;
        double shrunk = writes_to_stream(m, p) ? 2 * (double)(p->layer + 1) : 1;
        p->init_stddev = (float)(1 / sqrt((double)p->cols * shrunk));
        p->init_cutoff = standard_deviations;
    }
}
