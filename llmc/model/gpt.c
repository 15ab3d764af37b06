#include "gpt.h"
#include "muon.h" // muon_flops
#include "place.h"
#include "profile.h" // profile_set_layer
#include "llmc/base/util.h"

#include <stdlib.h>
#include <string.h>

enum { VOCAB_PADDING = 128 }; // of rows of logits in memory

Branch *gpt_branch(GPT *m, int64_t layer, int which) {
    return &m->branches.branches[layer * BRANCHES_PER_BLOCK + which];
}

Linear *gpt_linear(GPT *m, int64_t layer, int which) {
    bool is_attention = which == LINEAR_QKV || which == LINEAR_PROJECTION;
    Branch *b = gpt_branch(m, layer, is_attention ? BRANCH_ATTENTION : BRANCH_MLP);
    return which == LINEAR_QKV || which == LINEAR_UP ? &b->first : &b->second;
}

Linear *gpt_linear_at(GPT *m, int64_t number) {
    int64_t layer = number / LINEARS_PER_BLOCK;
    return layer == m->config.layers ? &m->head : gpt_linear(m, layer, (int)(number % LINEARS_PER_BLOCK));
}

// Memory

// Returns how many tokens' logits are made at a time, in a micro-batch of `rows`: in as few pieces
// as fit, and these as equal as may be.
static int64_t head_rows(const GPT *m, int64_t rows) {
    int64_t multiple = m->backend->head_rows_multiple, Vp = round_up_int64(m->config.vocab_size, VOCAB_PADDING);
    int64_t row_bytes = Vp * (int64_t)(sizeof(float) + dtype_size(m->recipe.activation_dtype));
    int64_t fitting = max_int64((int64_t)m->backend->head_scratch_bytes / row_bytes / multiple, 1) * multiple;
    int64_t pieces = (rows + fitting - 1) / fitting;
    return round_up_int64((rows + pieces - 1) / pieces, multiple);
}

static void layout_head(GPT *m, MemoryPlan *plan) {
    int64_t N = param_gemm_rows(m->head.weight), Vp = round_up_int64(N, VOCAB_PADDING);
    Format dtype = m->recipe.activation_dtype;
    m->head_rows = head_rows(m, m->B * m->T);
    m->logits = tensor_cols(take_tensor(plan, MEMORY_SCRATCH, FORMAT_FP32, m->head_rows, Vp), 0, N);
    if (m->training) m->dlogits = tensor_cols(take_tensor(plan, MEMORY_SCRATCH, dtype, m->head_rows, Vp), 0, N);
}

static void layout_batches(GPT *m, MemoryPlan *plan) {
    int64_t rows = m->B * m->T;
    int64_t of_a_token = m->config.mask_documents ? 3 : 2;
    for (int i = 0; i < 2; i++) {
        m->batches[i] = memory_take(plan, MEMORY_SCRATCH, (size_t)(of_a_token * rows) * sizeof(int32_t));
    }
    m->losses = take_floats(plan, MEMORY_SCRATCH, MAX_PENDING_LOSSES * rows);
    m->amax = memory_take(plan, MEMORY_SCRATCH, sizeof(*m->amax));
}

// Places the cosines and sines of rotary positions, which all blocks read.
static void layout_rotations(GPT *m, MemoryPlan *plan) {
    if (m->config.positions != POSITIONS_ROPE) return;
    m->rotations = take_floats(plan, MEMORY_SCRATCH, m->T * gpt_head_size(&m->config));
    for (int64_t l = 0; l < m->config.layers; l++) {
        gpt_branch(m, l, BRANCH_ATTENTION)->attention.rotations = m->rotations;
    }
}

static void layout(GPT *m, MemoryPlan *plan) {
    int64_t C = m->config.channels, rows = m->B * m->T;
    Format dtype = m->recipe.activation_dtype;
    int64_t linears = gpt_num_linears(&m->config);
    delayed_scales_layout(&m->scales, &m->recipe, linears, plan);
    for (int64_t i = 0; i < linears; i++) {
        linear_layout_scales(gpt_linear_at(m, i), &m->scales, i);
    }
    param_list_layout(&m->params, plan, m->backend, m->training);
    layout_batches(m, plan);
    layout_rotations(m, plan);
    branch_list_layout(&m->branches, plan, m->backend, dtype, rows, m->training);
    m->final_input = take_tensor(plan, MEMORY_KEPT, dtype, rows, C);
    m->final_output = take_tensor(plan, MEMORY_KEPT, dtype, rows, C);
    norm_layout(&m->final_norm, plan, rows);
    layout_head(m, plan);
    linear_layout(&m->head, plan, m->backend, m->head_rows, m->training, &m->branches.most);
    branch_list_layout_scratch(&m->branches, plan);
    m->head.scratch = m->branches.operands;
}

// Makes everything but memory.
static void declare(GPT *m, GPTConfig config, const Recipe *recipe, const Backend *backend, int64_t B, int64_t T,
                    bool training, const Sharding *sharding) {
    *m = (GPT){.config = config, .recipe = *recipe, .backend = backend, .B = B, .T = T, .training = training};
    m->params.sharding = sharding ? *sharding : sharding_single();
    branch_list_make(&m->branches, config.layers, BRANCHES_PER_BLOCK);
    gpt_declare_params(m);
}

void gpt_memory(size_t by_kind[NUM_MEMORY_KINDS], GPTConfig config, const Recipe *recipe, const Backend *backend,
                int64_t B, int64_t T, bool training, const Sharding *sharding) {
    GPT model;
    MemoryPlan plan = {0};
    declare(&model, config, recipe, backend, B, T, training, sharding);
    layout(&model, &plan);
    memcpy(by_kind, plan.by_kind, sizeof(plan.by_kind));
    gpt_free(&model);
}

ParamCounts gpt_count_parameters(const GPTConfig *config) {
    GPT model = {.config = *config};
    ParamCounts counts = {0};
    branch_list_make(&model.branches, config->layers, BRANCHES_PER_BLOCK);
    gpt_declare_params(&model);
    for (int i = 0; i < model.params.count; i++) {
        const Param *p = &model.params.params[i];
        counts.all += param_count(p);
        counts.matrices += p->is_vector ? 0 : param_count(p);
        counts.hidden += p->is_vector || p->layer < 0 ? 0 : param_count(p);
    }
    model.params.sharding.muon = true;
    counts.muon_flops = muon_flops(&model.params);
    gpt_free(&model);
    return counts;
}

// Lays out the parameters alone: without the rest nothing is asked of a GPU's libraries.
static void layout_parameters(GPT *m, GPTConfig config, const Recipe *recipe, const Backend *backend,
                              const Sharding *sharding) {
    MemoryPlan plan = {0};
    declare(m, config, recipe, backend, 1, 1, true, sharding);
    param_list_layout(&m->params, &plan, backend, true);
}

WireBytes gpt_wire_bytes(GPTConfig config, const Recipe *recipe, const Backend *backend, const Sharding *sharding,
                         int64_t micro_batches) {
    GPT model;
    layout_parameters(&model, config, recipe, backend, sharding);
    WireBytes bytes = exchange_wire_bytes(&model.params, micro_batches);
    gpt_free(&model);
    return bytes;
}

bool gpt_shards_alike(GPTConfig config, const Recipe *a, const Recipe *b, const Backend *backend,
                      const Sharding *sharding) {
    const Recipe *recipes[] = {a, b};
    GPT models[2];
    for (int i = 0; i < 2; i++) {
        layout_parameters(&models[i], config, recipes[i], backend, sharding);
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

// Allocates the memory that the layout counts, and places the model in it.
static void place(GPT *m) {
    MemoryPlan plan = {0};
    layout(m, &plan);
    m->memory = m->backend->allocate(plan.used);
    plan = (MemoryPlan){.base = m->memory};
    layout(m, &plan);
    const GPTConfig *c = &m->config;
    for (int64_t i = 0; i < gpt_num_linears(c); i++) {
        Linear *l = gpt_linear_at(m, i);
        amax_history_begin(&l->amaxes, &l->recipe);
    }
    gpt_make_scales(m);
    if (c->mask_documents) m->positions = allocate((size_t)(m->B * m->T) * sizeof(int32_t));
    if (m->rotations) m->backend->rope_rotations(m->rotations, m->T, gpt_head_size(c), gpt_rope_theta(c));
}

void gpt_create(GPT *m, GPTConfig config, const Recipe *recipe, const Backend *backend, int64_t B, int64_t T,
                bool training, const Sharding *sharding) {
    declare(m, config, recipe, backend, B, T, training, sharding);
    place(m);
}

static void declare_exact(GPT *m, GPTConfig config, const Backend *backend, int64_t B, int64_t T) {
    const Recipe recipe = recipe_exact();
    declare(m, config, &recipe, backend, B, T, true, NULL);
    m->params.borrows_masters = true;
}

size_t gpt_exact_memory(GPTConfig config, const Backend *backend, int64_t B, int64_t T) {
    GPT model;
    MemoryPlan plan = {0};
    declare_exact(&model, config, backend, B, T);
    layout(&model, &plan);
    gpt_free(&model);
    return plan.used;
}

void gpt_create_exact(GPT *exact, const GPT *m) {
    declare_exact(exact, m->config, m->backend, m->B, m->T);
    param_list_borrow_masters(&exact->params, &m->params);
    place(exact);
}

void gpt_free(GPT *m) {
    for (int64_t i = 0; m->branches.branches && i < gpt_num_linears(&m->config); i++) {
        amax_history_free(&gpt_linear_at(m, i)->amaxes);
    }
    if (m->memory) m->backend->release(m->memory);
    free(m->positions);
    param_list_free(&m->params);
    branch_list_free(&m->branches);
    *m = (GPT){0};
}

const char *const GPT_INIT_NAMES[] = {"gpt2", "mitchell", NULL};

void gpt_init(GPT *m, GPTInit init, uint64_t seed) {
    if (init == INIT_MITCHELL) gpt_declare_mitchell(m);
    param_list_init(&m->params, m->backend, seed);
}

void gpt_refresh(GPT *m) { param_list_refresh(&m->params, m->backend); }

void gpt_clear_gradients(GPT *m) {
    param_list_clear_gradients(&m->params, m->backend);
    delayed_scales_begin_step(&m->scales, m->backend);
}

void gpt_add_amaxes(GPT *m) {
    int64_t count = m->scales.layers;
    if (!m->scales.scales) return;
    double *amaxes = delayed_scales_read(&m->scales, m->backend);
    comm_max_doubles(m->params.sharding.comm, amaxes, count * NUM_ROLES);
    for (int64_t i = 0; i < count; i++) {
        Linear *l = gpt_linear_at(m, i);
        if (l->amaxes.steps) amax_history_add(&l->amaxes, &l->recipe, amaxes + i * NUM_ROLES);
    }
    free(amaxes);
}

void gpt_make_scales(GPT *m) {
    int64_t count = m->scales.layers;
    if (!m->scales.scales) return;
    float *scales = allocate((size_t)(count * NUM_GEMM_OPERANDS) * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        const Linear *l = gpt_linear_at(m, i);
        if (l->amaxes.steps) amax_history_make_scales(scales + i * NUM_GEMM_OPERANDS, &l->amaxes, &l->recipe);
    }
    delayed_scales_write(&m->scales, m->backend, scales);
    free(scales);
}

// A switch of recipes

// Waits for weights that other ranks still send: their memory is about to be freed.
static void await_all(const GPT *m) {
    for (int64_t layer = -1; layer < m->config.layers; layer++) {
        exchange_await(&m->params, AXIS_ROWWISE, layer);
        exchange_await(&m->params, AXIS_COLUMNWISE, layer);
    }
    m->backend->synchronize();
}

// Copies masters and moments from the model to `state`, or back from there. Returns how many values
// they are; with NULL it only counts.
static size_t copy_state(const GPT *m, float *state, bool back) {
    size_t total = 0;
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        float *const parts[] = {p->master, p->moment1, p->moment2}; // Muon has no second moment
        size_t count = (size_t)(p->num_rows * p->cols), bytes = count * sizeof(float);
        for (int part = 0; part < 3 && parts[part]; part++, total += count) {
            if (state && back) m->backend->copy_to_device(parts[part], state + total, bytes);
            if (state && !back) m->backend->copy_to_host(state + total, parts[part], bytes);
        }
    }
    return total;
}

void gpt_switch_recipe(GPT *m, const Recipe *recipe) {
    GPT old = *m;
    Sharding sharding = m->params.sharding;
    size_t count = copy_state(m, NULL, false);
    float *state = allocate(count * sizeof(float));
    await_all(m);
    copy_state(m, state, false);
    gpt_free(m);
    gpt_create(m, old.config, recipe, old.backend, old.B, old.T, true, &sharding);
    param_list_set_draws(&m->params, old.params.seed, old.params.updates);
    if (copy_state(m, NULL, true) != count) die("internal error: recipes that shard parameters differently");
    copy_state(m, state, true);
    gpt_refresh(m);
    free(state);
}

// Forward and backward

static float *gradient_of(const Param *p) { return p ? p->gradient : NULL; }

void gpt_set_draws(GPT *m, uint64_t seed, int64_t step, int64_t first_sample) {
    m->draws = (DrawPlace){seed, step, first_sample * m->T};
    branch_list_set_draws(&m->branches, m->draws);
}

// Makes the head draw for the rows of the micro-batch from this one on.
static void set_draws_of_head(GPT *m, int64_t first_row) {
    m->head.draws = m->draws;
    m->head.draws.first_row += first_row;
}

// Begins a pass over a micro-batch: checks that it fits, and gives the backend this model's
// workspace.
static void begin(const GPT *m, int64_t B, int64_t T) {
    if (B * T > m->B * m->T || T > m->T) die("internal error: a micro-batch larger than the model was made for");
    m->backend->use_workspace(m->branches.workspace, m->branches.most.workspace);
}

// Finds the positions (B, T) of tokens in their documents, where these are masked. A plan has no
// tokens.
static void find_positions(GPT *m, const int32_t *tokens, int64_t B, int64_t T) {
    for (int64_t i = 0; m->positions && tokens && i < B * T; i++) {
        bool begins = i % T == 0 || tokens[i] == m->config.end_of_text;
        m->positions[i] = begins ? 0 : m->positions[i - 1] + 1;
    }
}

// A micro-batch on the device.
typedef struct {
    const int32_t *tokens, *targets; // (B, T)
    int64_t rows;                    // B*T
    Sequences sequences;
} Batch;

// Copies a micro-batch to the device. The one before it stays: the device may still be at it.
static Batch next_batch(GPT *m, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T) {
    int64_t rows = B * T;
    m->turn = !m->turn;
    int32_t *batch = m->batches[m->turn];
    find_positions(m, tokens, B, T);
    m->backend->copy_batch(batch, tokens, targets, m->positions, rows);
    return (Batch){batch, batch + rows, rows, {T, m->positions ? batch + 2 * rows : NULL}};
}

// Makes final_output (B*T, C) of a batch.
static void forward(GPT *m, const Batch *batch, bool training) {
    const Backend *backend = m->backend;
    int64_t rows = batch->rows;
    const Tensor no_positions = {0};
    // The first branch's input is the embedding; each later one's, the stream and delta before it.
    Tensor stream = rows_of(m->branches.branches[0].input, rows), delta = {0}, out = rows_of(m->branches.delta, rows);
    exchange_await(&m->params, AXIS_ROWWISE, -1);
    backend->embedding_forward(stream, batch->tokens, m->wte->value, m->wpe ? m->wpe->value : no_positions,
                               batch->sequences);
    for (int64_t l = 0; l < m->config.layers; l++) {
        profile_set_layer(l);
        exchange_await(&m->params, AXIS_ROWWISE, l);
        for (int i = 0; i < BRANCHES_PER_BLOCK; i++) {
            Branch *b = gpt_branch(m, l, i);
            branch_forward(b, backend, out, stream, delta, batch->sequences, training);
            stream = rows_of(b->input, rows);
            delta = out;
        }
    }
    profile_set_layer(-1);
    norm_forward(&m->final_norm, backend, rows_of(m->final_output, rows), rows_of(m->final_input, rows), stream, delta);
}

// Turns dstream, zeros, into the gradient of the embeddings, from that of final_output.
static void backward(GPT *m, Tensor dstream, Sequences sequences) {
    const Backend *backend = m->backend;
    int64_t rows = dstream.rows;
    norm_backward(&m->final_norm, backend, dstream, rows_of(m->branches.dnormed, rows), rows_of(m->final_input, rows));
    for (int64_t l = m->config.layers - 1; l >= 0; l--) {
        profile_set_layer(l);
        exchange_await(&m->params, AXIS_COLUMNWISE, l);
        for (int i = BRANCHES_PER_BLOCK - 1; i >= 0; i--) {
            branch_backward(gpt_branch(m, l, i), backend, &m->branches, dstream, sequences);
        }
        exchange_reduce_layer(&m->params, backend, l);
    }
    profile_set_layer(-1);
}

// Returns logits without the columns that are padding; what these have of dlogits stays 0. {0}:
// that.
static Tensor of_vocabulary(const GPT *m, Tensor logits) {
    return logits.data ? tensor_cols(logits, 0, m->config.vocab_size) : logits;
}

// Makes logits of final_output and from them the losses (rows) of targets (rows) on the device, for
// head_rows tokens at a time, so that logits are never stored whole. With `training` also goes back
// through the head, and leaves the gradient of final_output in dnormed.
static void head(GPT *m, float *losses, const int32_t *targets, int64_t rows, float dloss, bool training) {
    const Backend *backend = m->backend;
    for (int64_t first = 0; first < rows; first += m->head_rows) {
        int64_t count = min_int64(rows - first, m->head_rows);
        Tensor logits = rows_of(m->logits, count), dlogits = training ? rows_of(m->dlogits, count) : (Tensor){0};
        set_draws_of_head(m, first);
        linear_forward(&m->head, backend, logits, source_tensor(tensor_rows(m->final_output, first, count)), training);
        backend->classifier(losses + first, of_vocabulary(m, dlogits), of_vocabulary(m, logits), targets + first,
                            dloss);
        if (training)
            linear_backward(&m->head, backend, tensor_rows(m->branches.dnormed, first, count), source_tensor(dlogits));
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

// Returns where the losses of a micro-batch go.
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
    begin(m, B, T);
    Batch batch = next_batch(m, tokens, targets, B, T);
    float *losses = next_losses(m);
    forward(m, &batch, false);
    head(m, losses, batch.targets, batch.rows, 0, false);
    return mean_loss(m, losses, batch.rows);
}

void gpt_loss_and_gradients(GPT *m, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T, double scale) {
    const Backend *backend = m->backend;
    int64_t rows = B * T;
    begin(m, B, T);
    Batch batch = next_batch(m, tokens, targets, B, T);
    forward(m, &batch, true);
    exchange_await(&m->params, AXIS_COLUMNWISE, -1);
    head(m, next_losses(m), batch.targets, rows, (float)(scale / (double)rows), true);
    m->pending_rows[m->pending_losses++] = rows;

    Tensor dstream = rows_of(m->branches.dstream, rows);
    backend->zero(dstream.data, (size_t)(rows * dstream.cols) * dtype_size(dstream.dtype));
    backward(m, dstream, batch.sequences);
    backend->embedding_backward(gradient_of(m->wte), gradient_of(m->wpe), batch.tokens, dstream, batch.sequences);
}

void gpt_logits(GPT *m, float *logits, const int32_t *tokens, int64_t B, int64_t T, int64_t first, int64_t count) {
    begin(m, B, T);
    Batch batch = next_batch(m, tokens, tokens, B, T); // nobody asks for targets
    forward(m, &batch, false);
    gpt_logits_again(m, logits, first, count);
}

void gpt_logits_again(GPT *m, float *logits, int64_t first, int64_t count) {
    const Backend *backend = m->backend;
    int64_t V = m->config.vocab_size;
    for (int64_t done = 0; done < count; done += m->head_rows) {
        int64_t rows = min_int64(count - done, m->head_rows);
        Tensor chunk = rows_of(m->logits, rows);
        set_draws_of_head(m, first + done);
        linear_forward(&m->head, backend, chunk, source_tensor(tensor_rows(m->final_output, first + done, rows)),
                       false);
        for (int64_t row = 0; row < rows; row++) {
            backend->copy_to_host(logits + (done + row) * V, tensor_rows(chunk, row, 1).data,
                                  (size_t)V * sizeof(float));
        }
    }
}
