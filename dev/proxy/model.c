#include "model.h"
#include "llmc/base/random.h" // Philox
#include "llmc/model/place.h"

#include <math.h>
#include <stdlib.h>

enum { HIDDEN_MULTIPLE = 64 };

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
static int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }

bool proxy_config_check(const ProxyConfig *c, int64_t rows, Error *error) {
    if (!c->attention) return true;
    if (c->width % c->heads != 0) {
        return error_set(error, "--width %lld can't be divided among --heads %lld: choose heads that divide it",
                         (long long)c->width, (long long)c->heads);
    }
    if (rows % c->seq_len != 0) {
        return error_set(error, "--batch-size %lld is no multiple of --seq-len %lld: choose one that is",
                         (long long)rows, (long long)c->seq_len);
    }
    return true;
}

int64_t proxy_hidden(const ProxyConfig *c) {
    int64_t hidden = c->is_plain ? c->width : 4 * c->width;
    if (c->activation != ACTIVATION_SWIGLU) return hidden;
    hidden = (2 * hidden + 2) / 3;
    return (hidden + HIDDEN_MULTIPLE - 1) / HIDDEN_MULTIPLE * HIDDEN_MULTIPLE;
}

// Parameters

static int add_vector(ProxyModel *m, int layer, const char *name, float value) {
    Param p = {.rows = 1, .cols = m->config.width, .is_vector = true, .layer = -1, .init_value = value};
    snprintf(p.name, sizeof(p.name), "%d.%s", layer, name);
    return param_list_add(&m->params, p);
}

static int add_matrix(ProxyModel *m, int layer, const char *name, int64_t N, int64_t K, const Recipe *recipe) {
    Param p = {.rows = N, .cols = K, .layer = layer};
    snprintf(p.name, sizeof(p.name), "%d.%s.weight", layer, name);
    linear_declare_weight(&p, recipe);
    return param_list_add(&m->params, p);
}

static int64_t first_cols(const ProxyModel *m, bool is_attention) {
    if (is_attention) return 3 * m->config.width;
    return (m->config.activation == ACTIVATION_SWIGLU ? 2 : 1) * proxy_hidden(&m->config);
}

static int64_t second_cols(const ProxyModel *m, bool is_attention) {
    return is_attention ? m->config.width : proxy_hidden(&m->config);
}

// Of a branch's first linear layer.
static int64_t widest_output(const ProxyModel *m) { return max_int64(first_cols(m, false), first_cols(m, true)); }

// The weights' indices: the list's final place isn't known yet.
typedef struct {
    int first, second;
} BranchWeights;

static BranchWeights add_branch(ProxyModel *m, Branch *b, int layer) {
    int64_t d = m->config.width;
    Recipe recipe = recipe_for_layer(&m->recipe, layer, m->config.layers);
    b->norm_weight = b->norm_bias = -1;
    if (m->config.layernorm) {
        b->norm_weight = add_vector(m, layer, b->is_attention ? "ln_1.weight" : "ln_2.weight", 1);
        b->norm_bias = add_vector(m, layer, b->is_attention ? "ln_1.bias" : "ln_2.bias", 0);
        m->params.params[b->norm_weight].value_format = recipe.norm_gains;
        m->params.params[b->norm_weight].rounding = recipe.rounding[ROLE_WEIGHTS];
    }
    BranchWeights weights = {
        .first = add_matrix(m, layer, b->is_attention ? "qkv" : "up", first_cols(m, b->is_attention), d, &recipe),
        .second =
            add_matrix(m, layer, b->is_attention ? "projection" : "down", d, second_cols(m, b->is_attention), &recipe)};
    b->first = (Linear){.recipe = recipe};
    b->second = (Linear){.recipe = recipe, .input_is_remade = !b->is_attention && !linear_keeps_input(&recipe)};
    return weights;
}

static void add_parameters(ProxyModel *m) {
    int per_layer = m->config.attention ? 2 : 1;
    m->num_branches = (int)m->config.layers * per_layer;
    m->branches = allocate((size_t)m->num_branches * sizeof(Branch));
    BranchWeights *weights = allocate((size_t)m->num_branches * sizeof(*weights));
    for (int i = 0; i < m->num_branches; i++) {
        m->branches[i].is_attention = m->config.attention && i % 2 == 0;
        weights[i] = add_branch(m, &m->branches[i], i / per_layer);
    }
    for (int i = 0; i < m->num_branches; i++) {
        m->branches[i].first.weight = &m->params.params[weights[i].first];
        m->branches[i].second.weight = &m->params.params[weights[i].second];
    }
    free(weights);
}

void proxy_init(ProxyModel *m, ProxyInit init, uint64_t seed) {
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        int64_t count = param_count(p);
        float *values = allocate((size_t)count * sizeof(float));
        float bound = (float)(1 / sqrt((double)p->cols)),
              stddev = (float)(0.5 * sqrt(2.0 / (double)(p->rows + p->cols)));
#pragma omp parallel for schedule(static)
        for (int64_t j = 0; j < count; j++) {
            values[j] = p->is_vector ? p->init_value
                        : init == INIT_KAIMING_UNIFORM
                            ? bound * (2 * random_uniform(seed, (uint64_t)i, (uint64_t)j) - 1)
                            : stddev * random_normal(seed, (uint64_t)i, (uint64_t)j);
        }
        m->backend->copy_to_device(p->master, values, (size_t)count * sizeof(float));
        free(values);
    }
}

// Memory

static Tensor take_rows(const ProxyModel *m, MemoryPlan *plan, MemoryKind kind, int64_t cols) {
    return take_tensor(plan, kind, m->recipe.activation_dtype, m->rows, cols);
}

static AttentionShape attention_shape(const ProxyModel *m) {
    const ProxyConfig *c = &m->config;
    return (AttentionShape){
        .B = m->rows / c->seq_len, .T = c->seq_len, .NH = c->heads, .NKV = c->heads, .HS = c->width / c->heads};
}

// A linear layer's input, of which later layers' overwrite what nobody reads in the backward pass.
static Tensor take_input(const ProxyModel *m, MemoryPlan *plan, const Linear *linear, Tensor shared, int64_t cols) {
    if (m->training && linear_keeps_input(&linear->recipe)) return take_rows(m, plan, MEMORY_KEPT, cols);
    return tensor_make(shared.data, shared.dtype, shared.rows, cols);
}

static void layout_branch(ProxyModel *m, MemoryPlan *plan, Branch *b, Tensor shared, Tensor shared_output) {
    int64_t d = m->config.width, outputs = first_cols(m, b->is_attention);
    b->mean = take_floats(plan, MEMORY_KEPT, m->rows);
    b->rstd = take_floats(plan, MEMORY_KEPT, m->rows);
    b->input = take_rows(m, plan, MEMORY_KEPT, d);
    b->normed = take_input(m, plan, &b->first, shared, d);
    b->first_output = m->training ? take_rows(m, plan, MEMORY_KEPT, outputs)
                                  : tensor_make(shared_output.data, shared_output.dtype, m->rows, outputs);
    b->second_input = take_input(m, plan, &b->second, shared, second_cols(m, b->is_attention));
    if (b->is_attention) b->logsumexp = take_floats(plan, MEMORY_KEPT, m->rows * m->config.heads);
}

static void layout_linears(ProxyModel *m, MemoryPlan *plan) {
    const Backend *backend = m->backend;
    LinearScratch most = {.workspace = backend->reduction_workspace(m->rows, widest_output(m))};
    for (int i = 0; i < 2 * m->num_branches; i++) {
        Linear *linear = i % 2 ? &m->branches[i / 2].second : &m->branches[i / 2].first;
        linear_layout(linear, plan, backend, m->rows, m->training, &most);
    }
    size_t workspace = most.workspace;
    if (m->config.attention) {
        workspace = max_size(workspace, backend->attention_workspace(m->recipe.activation_dtype, attention_shape(m)));
    }
    char *shared = memory_take(plan, MEMORY_SCRATCH, most.bytes);
    for (int i = 0; i < m->num_branches; i++) {
        m->branches[i].first.scratch = m->branches[i].second.scratch = shared;
    }
    m->workspace = memory_take(plan, MEMORY_SCRATCH, workspace);
    m->workspace_bytes = workspace;
}

static void layout(ProxyModel *m, MemoryPlan *plan) {
    int64_t d = m->config.width, widest = widest_output(m), widest_input = max_int64(d, proxy_hidden(&m->config));
    param_list_layout(&m->params, plan, m->backend, m->training);
    Tensor shared = take_rows(m, plan, MEMORY_SCRATCH, widest_input);
    Tensor shared_output = {0};
    if (!m->training) shared_output = take_rows(m, plan, MEMORY_SCRATCH, widest);
    for (int i = 0; i < m->num_branches; i++) {
        layout_branch(m, plan, &m->branches[i], shared, shared_output);
    }
    m->output = take_rows(m, plan, MEMORY_KEPT, d);
    m->x = take_rows(m, plan, MEMORY_SCRATCH, d);
    m->losses = take_floats(plan, MEMORY_SCRATCH, m->rows);
    m->mean = take_floats(plan, MEMORY_SCRATCH, m->rows);
    m->rstd = take_floats(plan, MEMORY_SCRATCH, m->rows);
    if (m->training) {
        m->dresidual[0] = take_rows(m, plan, MEMORY_SCRATCH, d);
        m->dresidual[1] = take_rows(m, plan, MEMORY_SCRATCH, d);
        m->dbranch = take_rows(m, plan, MEMORY_SCRATCH, d);
        m->dsecond = take_rows(m, plan, MEMORY_SCRATCH, widest_input);
        m->dfirst = take_rows(m, plan, MEMORY_SCRATCH, widest);
    }
    layout_linears(m, plan);
}

static void describe(ProxyModel *m, const ProxyConfig *config, const Recipe *recipe, const Backend *backend,
                     int64_t rows, bool training) {
    *m = (ProxyModel){.config = *config, .recipe = *recipe, .backend = backend, .rows = rows, .training = training};
    m->params.sharding = sharding_single();
    add_parameters(m);
}

size_t proxy_memory(const ProxyConfig *config, const Recipe *recipe, const Backend *backend, int64_t rows,
                    bool training) {
    ProxyModel model;
    MemoryPlan plan = {0};
    describe(&model, config, recipe, backend, rows, training);
    layout(&model, &plan);
    proxy_free(&model);
    return plan.used;
}

void proxy_create(ProxyModel *m, const ProxyConfig *config, const Recipe *recipe, const Backend *backend, int64_t rows,
                  bool training) {
    describe(m, config, recipe, backend, rows, training);
    MemoryPlan plan = {0};
    layout(m, &plan);
    m->memory = backend->allocate(plan.used);
    plan = (MemoryPlan){.base = m->memory};
    layout(m, &plan);
}

void proxy_free(ProxyModel *m) {
    if (m->memory) m->backend->release(m->memory);
    param_list_free(&m->params);
    free(m->branches);
    *m = (ProxyModel){0};
}

void proxy_refresh(ProxyModel *m) { param_list_refresh(&m->params, m->backend); }

void proxy_zero_gradients(ProxyModel *m) {
    m->backend->zero(m->params.gradients, (size_t)m->params.gradients_count * sizeof(float));
}

double proxy_gemm_flops(const ProxyModel *m) {
    double flops = 0;
    for (int i = 0; i < m->num_branches; i++) {
        double weights = (double)(param_count(m->branches[i].first.weight) + param_count(m->branches[i].second.weight));
        flops += 2 * weights * (double)m->rows * (m->training ? 3 : 1);
    }
    return flops;
}

// Forward and backward

static NormParams norm_params(const ProxyModel *m, const Branch *b) {
    return (NormParams){.kind = NORM_LAYERNORM,
                        .eps = NORM_EPS,
                        .mean = b->mean,
                        .rstd = b->rstd,
                        .weight = m->params.params[b->norm_weight].value.data,
                        .bias = m->params.params[b->norm_bias].master};
}

// sum = a + b. The backend's addition is the one before a norm, whose statistics aren't wanted
// here.
static void add(const ProxyModel *m, Tensor sum, Tensor a, Tensor b) {
    NormParams unread = {.kind = NORM_LAYERNORM, .eps = NORM_EPS, .mean = m->mean, .rstd = m->rstd};
    m->backend->layernorm_forward((Tensor){0}, sum, a, b, unread);
}

// The branch's input is input + residual, which is written to b->input, or input alone, which is
// there, where residual is {0}. Returns what the first linear layer takes: stored, or made when it
// is quantized.
static Source norm_input(const ProxyModel *m, Branch *b, Tensor input, Tensor residual) {
    if (b->norm_weight < 0) {
        if (residual.data) add(m, b->input, input, residual);
        return source_tensor(b->input);
    }
    const Tensor nowhere = {0};
    bool is_made = linear_makes_input(&b->first, m->training);
    NormParams norm = norm_params(m, b);
    m->backend->layernorm_forward(is_made ? nowhere : b->normed, b->input, input, residual, norm);
    if (!is_made) return source_tensor(b->normed);
    return (Source){.kind = SOURCE_LAYERNORM, .x = b->input, .norm = norm};
}

// What the second linear layer takes.
static Source middle(const ProxyModel *m, Branch *b) {
    if (b->is_attention) {
        m->backend->attention_forward(b->second_input, b->logsumexp, b->first_output, attention_shape(m));
        return source_tensor(b->second_input);
    }
    if (linear_makes_input(&b->second, m->training)) {
        return (Source){.kind = SOURCE_ACTIVATION, .x = b->first_output, .activation = m->config.activation};
    }
    m->backend->activation_forward(b->second_input, b->first_output, m->config.activation);
    return source_tensor(b->second_input);
}

Tensor proxy_forward(ProxyModel *m, Tensor x) {
    const Backend *backend = m->backend;
    backend->use_workspace(m->workspace, m->workspace_bytes);
    Tensor input = m->branches[0].input, residual = {0};
    backend->convert(input, x);
    for (int i = 0; i < m->num_branches; i++) {
        Branch *b = &m->branches[i];
        linear_forward(&b->first, backend, b->first_output, norm_input(m, b, input, residual), m->training);
        Tensor next = i + 1 < m->num_branches ? m->branches[i + 1].input : m->output;
        linear_forward(&b->second, backend, m->config.is_plain ? next : m->x, middle(m, b), m->training);
        input = b->input;
        if (!m->config.is_plain) residual = m->x;
    }
    if (!m->config.is_plain) add(m, m->output, input, residual);
    return m->output;
}

// The gradient of the first linear layer's output, from dsecond, that of the second one's input.
static Source middle_backward(const ProxyModel *m, Branch *b, Tensor dsecond) {
    const Backend *backend = m->backend;
    Activation activation = m->config.activation;
    Tensor dfirst = tensor_make(m->dfirst.data, m->dfirst.dtype, m->rows, b->first_output.cols);
    if (b->is_attention) {
        backend->attention_backward(dfirst, dsecond, b->first_output, b->logsumexp, attention_shape(m));
    } else if (activation != ACTIVATION_SWIGLU && linear_makes_gradient(&b->first)) {
        return (Source){
            .kind = SOURCE_ACTIVATION_BACKWARD, .x = b->first_output, .dout = dsecond, .activation = activation};
    } else {
        backend->activation_backward(dfirst, dsecond, b->first_output, activation);
    }
    return source_tensor(dfirst);
}

// The stream's gradient before the branch, from that after it; returns where it is.
static Tensor branch_backward(const ProxyModel *m, Branch *b, Tensor dresidual, Tensor other) {
    const Backend *backend = m->backend;
    Tensor dsecond = tensor_make(m->dsecond.data, m->dsecond.dtype, m->rows, b->second_input.cols);
    bool is_stored = b->second.input.kind == SOURCE_TENSOR;
    if (b->second.input_is_remade && is_stored) {
        backend->activation_forward(b->second_input, b->first_output, m->config.activation);
    }
    linear_backward(&b->second, backend, dsecond, source_tensor(dresidual));
    linear_backward(&b->first, backend, m->dbranch, middle_backward(m, b, dsecond));
    if (b->norm_weight < 0) {
        add(m, other, dresidual, m->dbranch);
        return other;
    }
    backend->layernorm_backward(dresidual, m->params.params[b->norm_weight].gradient,
                                m->params.params[b->norm_bias].gradient, m->dbranch, b->input, norm_params(m, b));
    return dresidual;
}

double proxy_loss_and_gradients(ProxyModel *m, ProxyLoss loss, Tensor x, Tensor target) {
    const Backend *backend = m->backend;
    Tensor output = proxy_forward(m, x), dresidual = m->dresidual[0];
    double count = (double)(loss == LOSS_MSE ? m->rows * m->config.width : m->rows);
    (loss == LOSS_MSE ? backend->squared_error : backend->kl_divergence)(m->losses, dresidual, output, target,
                                                                         (float)(1 / count));
    for (int i = m->num_branches - 1; i >= 0; i--) {
        Tensor other = m->dresidual[dresidual.data == m->dresidual[0].data];
        dresidual = branch_backward(m, &m->branches[i], dresidual, other);
    }
    return backend->sum(m->losses, m->rows) / count;
}
