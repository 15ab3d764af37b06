#include "model.h"
#include "llmc/model/place.h"

#include <math.h>

bool proxy_config_check(const ProxyConfig *c, int64_t rows, Error *error) {
    if (!c->attention) return true;
    if (c->width % c->heads != 0) {
        return error_set(error, "--width %ld can't be divided among --heads %ld: choose heads that divide it", c->width,
                         c->heads);
    }
    if (rows % c->seq_len != 0) {
        return error_set(error, "--batch-size %ld is no multiple of --seq-len %ld: choose one that is", rows,
                         c->seq_len);
    }
    return true;
}

int64_t proxy_hidden(const ProxyConfig *c) { return mlp_hidden(c->activation, c->is_plain ? c->width : 4 * c->width); }

// Parameters

BranchNames proxy_branch_names(const Branch *b) {
    if (b->is_attention) return (BranchNames){"qkv", "projection", "ln_1"};
    return (BranchNames){"up", "down", "ln_2"};
}

static Param *add_param(ProxyModel *m, Param p, int layer, const char *name, const char *suffix) {
    p.layer = layer;
    snprintf(p.name, sizeof(p.name), "%d.%s.%s", layer, name, suffix);
    return &m->params.params[param_list_add(&m->params, p)];
}

static Norm add_norm(ProxyModel *m, int layer, const char *name, const Recipe *recipe) {
    Param vector = {.rows = 1, .cols = m->config.width, .is_vector = true, .init_value = 1};
    Param *gains = add_param(m, vector, layer, name, "weight");
    norm_declare_gains(gains, recipe);
    vector.init_value = 0;
    return (Norm){.weight = gains, .bias = add_param(m, vector, layer, name, "bias")};
}

static Linear add_linear(ProxyModel *m, int layer, const char *name, int64_t N, int64_t K, const Recipe *recipe) {
    Param *weight = add_param(m, (Param){.rows = N, .cols = K}, layer, name, "weight");
    linear_declare_weight(weight, recipe);
    return (Linear){.recipe = *recipe, .weight = weight};
}

// Rows and columns of a branch's two weights.
typedef struct {
    int64_t first_rows, first_cols, second_rows, second_cols;
} BranchShape;

static BranchShape branch_shape(const ProxyConfig *c, bool is_attention) {
    int64_t d = c->width, F = proxy_hidden(c), gated = c->activation == ACTIVATION_SWIGLU ? 2 : 1;
    if (is_attention) return (BranchShape){3 * d, d, d, d};
    return (BranchShape){gated * F, d, d, F};
}

// Returns what the linear layers of a layer do; none of a recipe's filters is for the proxy.
static Recipe recipe_of_layer(const ProxyConfig *c, const Recipe *recipe, int64_t layer) {
    return recipe_for_linear(recipe, layer, c->layers, "");
}

RecipeEffects proxy_recipe_effects(const ProxyConfig *c, const Recipe *recipe) {
    RecipeEffects effects = {0};
    for (int64_t layer = 0; layer < c->layers; layer++) {
        Recipe of_layer = recipe_of_layer(c, recipe, layer);
        recipe_add_effects(&effects, &of_layer);
    }
    return effects;
}

bool proxy_check_recipe(const ProxyConfig *c, const Recipe *recipe, Error *error) {
    if (recipe->delayed.length > 0) {
        return error_set(
            error, "the proxy keeps no amaxes of earlier steps, which recipe %s makes its scales of: take fp8-current",
            recipe->name);
    }
    if (!recipe_check_layers(recipe, c->layers, error)) return false;
    RecipeEffects effects = proxy_recipe_effects(c, recipe);
    return recipe_check_effects(recipe, &effects, error);
}

static bool check_gemms_of_branch(const Recipe *recipe, const char *name, BranchShape s, const Backend *backend,
                                  int64_t rows, Error *error) {
    Format dtype = recipe->activation_dtype;
    return linear_check_gemms(recipe, name, backend, rows, s.first_rows, s.first_cols, dtype, true, error) &&
           linear_check_gemms(recipe, name, backend, rows, s.second_rows, s.second_cols, dtype, true, error);
}

bool proxy_check_gemms(const ProxyConfig *c, const Recipe *recipe, const Backend *backend, int64_t rows, Error *error) {
    BranchShape attention = branch_shape(c, true), mlp = branch_shape(c, false);
    for (int64_t layer = 0; layer < c->layers; layer++) {
        Recipe of_layer = recipe_of_layer(c, recipe, layer);
        if (c->attention && !check_gemms_of_branch(&of_layer, "attention", attention, backend, rows, error))
            return false;
        if (!check_gemms_of_branch(&of_layer, "the MLP", mlp, backend, rows, error)) return false;
    }
    return true;
}

static void add_branch(ProxyModel *m, Branch *b, int layer, bool is_attention) {
    const ProxyConfig *c = &m->config;
    BranchShape shape = branch_shape(c, is_attention);
    Recipe recipe = recipe_of_layer(c, &m->recipe, layer);
    *b = (Branch){.has_norm = c->layernorm, .is_attention = is_attention, .activation = c->activation};
    BranchNames names = proxy_branch_names(b);
    if (is_attention) {
        b->attention.shape = (AttentionShape){
            .B = m->rows / c->seq_len, .T = c->seq_len, .NH = c->heads, .NKV = c->heads, .HS = c->width / c->heads};
    }
    if (b->has_norm) b->norm = add_norm(m, layer, names.norm, &recipe);
    b->first = add_linear(m, layer, names.first, shape.first_rows, shape.first_cols, &recipe);
    b->second = add_linear(m, layer, names.second, shape.second_rows, shape.second_cols, &recipe);
    branch_declare(b, false);
}

// Adds the branches with their parameters, of which each has four at most.
static void add_branches(ProxyModel *m) {
    enum { PARAMS_OF_BRANCH = 4 };
    int per_layer = m->config.attention ? 2 : 1;
    branch_list_make(&m->branches, m->config.layers, per_layer);
    param_list_reserve(&m->params, m->branches.count * PARAMS_OF_BRANCH);
    for (int i = 0; i < m->branches.count; i++) {
        add_branch(m, &m->branches.branches[i], i / per_layer, m->config.attention && i % 2 == 0);
    }
}

void proxy_init(ProxyModel *m, ProxyInit init, uint64_t seed) {
    for (int i = 0; i < m->params.count; i++) {
        Param *p = &m->params.params[i];
        if (p->is_vector) continue;
        if (init == INIT_KAIMING_UNIFORM) p->init_bound = (float)(1 / sqrt((double)p->cols));
        if (init == INIT_XAVIER_NORMAL) p->init_stddev = (float)(0.5 * sqrt(2.0 / (double)(p->rows + p->cols)));
    }
    param_list_init(&m->params, m->backend, seed);
}

// Memory

static void layout(ProxyModel *m, MemoryPlan *plan) {
    Format dtype = m->recipe.activation_dtype;
    param_list_layout(&m->params, plan, m->backend, m->training);
    branch_list_layout(&m->branches, plan, m->backend, dtype, m->rows, m->training);
    m->output = take_tensor(plan, MEMORY_KEPT, dtype, m->rows, m->config.width);
    m->losses = take_floats(plan, MEMORY_SCRATCH, m->rows);
    branch_list_layout_scratch(&m->branches, plan);
}

// Makes everything but memory.
static void declare(ProxyModel *m, const ProxyConfig *config, const Recipe *recipe, const Backend *backend,
                    int64_t rows, bool training) {
    *m = (ProxyModel){.config = *config, .recipe = *recipe, .backend = backend, .rows = rows, .training = training};
    m->params.sharding = sharding_single();
    add_branches(m);
}

static void declare_exact(ProxyModel *m, const ProxyConfig *config, const Backend *backend, int64_t rows) {
    const Recipe recipe = recipe_exact();
    declare(m, config, &recipe, backend, rows, true);
    m->params.borrows_masters = true;
}

// Returns the bytes of a model that is declared, and frees it.
static size_t count_memory(ProxyModel *m) {
    MemoryPlan plan = {0};
    layout(m, &plan);
    proxy_free(m);
    return plan.used;
}

size_t proxy_memory(const ProxyConfig *config, const Recipe *recipe, const Backend *backend, int64_t rows,
                    bool training) {
    ProxyModel model;
    declare(&model, config, recipe, backend, rows, training);
    return count_memory(&model);
}

size_t proxy_exact_memory(const ProxyConfig *config, const Backend *backend, int64_t rows) {
    ProxyModel model;
    declare_exact(&model, config, backend, rows);
    return count_memory(&model);
}

static void place(ProxyModel *m) {
    MemoryPlan plan = {0};
    layout(m, &plan);
    m->memory = m->backend->allocate(plan.used);
    plan = (MemoryPlan){.base = m->memory};
    layout(m, &plan);
}

void proxy_create(ProxyModel *m, const ProxyConfig *config, const Recipe *recipe, const Backend *backend, int64_t rows,
                  bool training) {
    declare(m, config, recipe, backend, rows, training);
    place(m);
}

void proxy_create_exact(ProxyModel *exact, const ProxyModel *m, const Backend *backend) {
    declare_exact(exact, &m->config, backend, m->rows);
    param_list_borrow_masters(&exact->params, &m->params);
    place(exact);
}

void proxy_free(ProxyModel *m) {
    if (m->memory) m->backend->release(m->memory);
    param_list_free(&m->params);
    branch_list_free(&m->branches);
    *m = (ProxyModel){0};
}

void proxy_set_draws(ProxyModel *m, uint64_t seed, int64_t step) {
    branch_list_set_draws(&m->branches, (DrawPlace){seed, step, 0});
}

void proxy_refresh(ProxyModel *m) { param_list_refresh(&m->params, m->backend); }

double proxy_gemm_flops(const ProxyModel *m) {
    double flops = 0;
    for (int i = 0; i < m->branches.count; i++) {
        const Branch *b = &m->branches.branches[i];
        double weights = (double)(param_count(b->first.weight) + param_count(b->second.weight));
        flops += 2 * weights * (double)m->rows * (m->training ? 3 : 1);
    }
    return flops;
}

// Forward and backward

Tensor proxy_forward(ProxyModel *m, Tensor x) {
    const Backend *backend = m->backend;
    BranchList *list = &m->branches;
    const Sequences sequences = {.T = m->config.seq_len};
    Tensor stream = list->branches[0].input, delta = {0};
    backend->use_workspace(list->workspace, list->most.workspace);
    backend->convert(stream, x);
    for (int i = 0; i < list->count; i++) {
        // What a plain model's branch makes is the stream itself.
        Tensor next = i + 1 < list->count ? list->branches[i + 1].input : m->output;
        Tensor out = m->config.is_plain ? next : list->delta;
        branch_forward(&list->branches[i], backend, out, stream, delta, sequences, m->training);
        stream = m->config.is_plain ? next : list->branches[i].input;
        if (!m->config.is_plain) delta = out;
    }
    if (!m->config.is_plain) stream_add(backend, m->output, stream, delta, m->losses);
    return m->output;
}

double proxy_loss_and_gradients(ProxyModel *m, ProxyLoss loss, Tensor x, Tensor target) {
    const Backend *backend = m->backend;
    BranchList *list = &m->branches;
    const Sequences sequences = {.T = m->config.seq_len};
    Tensor output = proxy_forward(m, x);
    double count = (double)(loss == LOSS_MSE ? m->rows * m->config.width : m->rows);
    (loss == LOSS_MSE ? backend->squared_error : backend->kl_divergence)(m->losses, list->dstream, output, target,
                                                                         (float)(1 / count));
    param_list_clear_gradients(&m->params, backend);
    for (int i = list->count - 1; i >= 0; i--) {
        branch_backward(&list->branches[i], backend, list, list->dstream, sequences);
    }
    return backend->sum(m->losses, m->rows) / count;
}
