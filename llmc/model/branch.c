#include "branch.h"
#include "place.h"
#include "llmc/base/util.h" // allocate

#include <stdlib.h>

// Returns scratch as (rows, cols).
static Tensor shaped(Tensor scratch, int64_t rows, int64_t cols) {
    return tensor_make(scratch.data, scratch.dtype, rows, cols);
}

int64_t mlp_hidden(Activation activation, int64_t hidden) {
    enum { MULTIPLE = 64 };
    if (activation != ACTIVATION_SWIGLU) return hidden;
    return ((2 * hidden + 2) / 3 + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
}

void branch_list_make(BranchList *list, int64_t layers, int per_layer) {
    int count = (int)layers * per_layer;
    *list = (BranchList){.branches = allocate((size_t)count * sizeof(Branch)), .count = count, .per_layer = per_layer};
}

void branch_list_free(BranchList *list) {
    free(list->branches);
    *list = (BranchList){0};
}

// An activation's output is the largest of what would be kept, and a pass over what is kept anyway
// makes it again.
void branch_declare(Branch *b, bool keeps_inner) {
    b->keeps_second_input = linear_keeps_input(&b->second.recipe) || (b->is_attention && keeps_inner);
    b->second.input_is_remade = !b->is_attention && !keeps_inner && linear_can_remake_input(&b->second.recipe);
}

// Memory

typedef struct {
    MemoryPlan *plan;
    const Backend *backend;
    Format dtype;
    int64_t rows;
    bool training;
} Layout;

static Tensor take(const Layout *to, MemoryKind kind, int64_t cols) {
    return take_tensor(to->plan, kind, to->dtype, to->rows, cols);
}

// Places a linear layer's input: kept, or `shared` where nobody needs it after the forward pass.
static Tensor take_linear_input(const Layout *to, const Linear *linear, bool kept, Tensor shared) {
    int64_t cols = linear->weight->cols;
    return to->training && kept ? take(to, MEMORY_KEPT, cols) : shaped(shared, to->rows, cols);
}

static void layout_kept(Branch *b, const Layout *to, Tensor shared) {
    b->input = take(to, MEMORY_KEPT, b->first.weight->cols);
    norm_layout(&b->norm, to->plan, to->rows);
    b->normed = take_linear_input(to, &b->first, linear_keeps_input(&b->first.recipe), shared);
    b->first_output = take(to, MEMORY_KEPT, b->first.weight->rows);
    if (b->is_attention) attention_layout(&b->attention, to->plan, to->dtype);
    b->second_input = take_linear_input(to, &b->second, b->keeps_second_input, shared);
}

static void share_statistics(Norm *norm, const Norm *other) {
    norm->mean = other->mean;
    norm->rstd = other->rstd;
}

// Gives a branch the memory of one that is like it.
static void share_kept(Branch *b, const Branch *other) {
    b->input = other->input;
    share_statistics(&b->norm, &other->norm);
    b->normed = other->normed;
    b->first_output = other->first_output;
    share_statistics(&b->attention.q_norm, &other->attention.q_norm);
    share_statistics(&b->attention.k_norm, &other->attention.k_norm);
    b->attention.qk_input = other->attention.qk_input;
    b->attention.logsumexp = other->attention.logsumexp;
    b->second_input = other->second_input;
}

static void raise_workspace(BranchList *list, size_t bytes) {
    if (bytes > list->most.workspace) list->most.workspace = bytes;
}

// Places what branches use in passing, as large as the largest of a layer's wants it.
static void layout_shared(BranchList *list, const Layout *to) {
    int64_t C = list->branches[0].first.weight->cols, widest_input = C, wide = 0, gated = 0, widest_output = C;
    for (int i = 0; i < list->per_layer; i++) {
        const Branch *b = &list->branches[i];
        int64_t inner = b->first.weight->rows, second_input = b->second.weight->cols;
        bool is_gated = !b->is_attention && b->activation == ACTIVATION_SWIGLU;
        widest_input = max_int64(widest_input, second_input);
        wide = max_int64(wide, b->is_attention ? inner : second_input);
        if (is_gated) gated = max_int64(gated, inner);
        widest_output = max_int64(widest_output, inner);
        if (b->is_attention) raise_workspace(list, to->backend->attention_workspace(to->dtype, b->attention.shape));
    }
    list->shared_input = take(to, MEMORY_SCRATCH, widest_input);
    list->delta = take(to, MEMORY_SCRATCH, C);
    if (!to->training) return;
    list->dstream = take(to, MEMORY_SCRATCH, C);
    list->dnormed = take(to, MEMORY_SCRATCH, C);
    list->dwide = take(to, MEMORY_SCRATCH, wide);
    if (gated > 0) list->dgated = take(to, MEMORY_SCRATCH, gated);
    raise_workspace(list, to->backend->reduction_workspace(to->rows, widest_output));
}

void branch_list_layout(BranchList *list, MemoryPlan *plan, const Backend *backend, Format dtype, int64_t rows,
                        bool training) {
    const Layout to = {plan, backend, dtype, rows, training};
    layout_shared(list, &to);
    for (int i = 0; i < list->count; i++) {
        Branch *b = &list->branches[i];
        if (training || i < list->per_layer) {
            layout_kept(b, &to, list->shared_input);
        } else {
            share_kept(b, &list->branches[i % list->per_layer]);
        }
        linear_layout(&b->first, plan, backend, rows, training, &list->most);
        linear_layout(&b->second, plan, backend, rows, training, &list->most);
    }
}

void branch_list_layout_scratch(BranchList *list, MemoryPlan *plan) {
    list->operands = memory_take(plan, MEMORY_SCRATCH, list->most.bytes);
    list->workspace = memory_take(plan, MEMORY_SCRATCH, list->most.workspace);
    for (int i = 0; i < list->count; i++) {
        list->branches[i].first.scratch = list->branches[i].second.scratch = list->operands;
    }
}

// Forward

void branch_list_set_draws(BranchList *list, DrawPlace draws) {
    for (int i = 0; i < list->count; i++) {
        list->branches[i].first.draws = list->branches[i].second.draws = draws;
    }
}

// Returns what the first linear layer takes: stored, or made when it is quantized.
static Source first_input(const Branch *b, const Backend *backend, Tensor stream, Tensor delta, bool training) {
    const Tensor nowhere = {0};
    Tensor input = rows_of(b->input, stream.rows), normed = rows_of(b->normed, stream.rows);
    if (!b->has_norm) {
        if (delta.data) stream_add(backend, input, stream, delta, b->norm.rstd);
        return source_tensor(input);
    }
    bool is_made = linear_makes_input(&b->first, training);
    norm_forward(&b->norm, backend, is_made ? nowhere : normed, input, stream, delta);
    return is_made ? norm_source(&b->norm, input) : source_tensor(normed);
}

// Returns what the second linear layer takes, likewise.
static Source second_input(const Branch *b, const Backend *backend, int64_t rows, Sequences sequences, bool training) {
    Tensor in = rows_of(b->first_output, rows), out = rows_of(b->second_input, rows);
    if (b->is_attention) {
        attention_forward(&b->attention, backend, out, in, sequences);
    } else if (linear_makes_input(&b->second, training)) {
        return (Source){.kind = SOURCE_ACTIVATION, .x = in, .activation = b->activation};
    } else {
        backend->activation_forward(out, in, b->activation);
    }
    return source_tensor(out);
}

void branch_forward(Branch *b, const Backend *backend, Tensor out, Tensor stream, Tensor delta, Sequences sequences,
                    bool training) {
    int64_t rows = stream.rows;
    Source source = first_input(b, backend, stream, delta, training);
    linear_forward(&b->first, backend, rows_of(b->first_output, rows), source, training);
    source = second_input(b, backend, rows, sequences, training);
    linear_forward(&b->second, backend, out, source, training);
}

// Backward

// Returns the gradient of the activation's input, from dout, that of its output: made when it is
// quantized, or stored, in place of dout but for SwiGLU, whose input is wider.
static Source activation_gradient(const Branch *b, const Backend *backend, Tensor dout, Tensor dgated) {
    Tensor input = rows_of(b->first_output, dout.rows);
    bool is_gated = b->activation == ACTIVATION_SWIGLU;
    if (!is_gated && linear_makes_gradient(&b->first)) {
        return (Source){.kind = SOURCE_ACTIVATION_BACKWARD, .x = input, .activation = b->activation, .dout = dout};
    }
    Source dinput = source_tensor(is_gated ? shaped(dgated, dout.rows, input.cols) : dout);
    float *dbias = linear_bias_gradient(&b->first);
    backend->activation_backward(dinput.x, dbias, dout, input, b->activation);
    dinput.is_summed = dbias != NULL;
    return dinput;
}

// Makes the second linear layer's input again, where that is stored to be quantized.
static void remake_second_input(const Branch *b, const Backend *backend, int64_t rows) {
    const Linear *second = &b->second;
    if (!second->input_is_remade || second->input.kind != SOURCE_TENSOR) return;
    backend->activation_forward(second->input.x, rows_of(b->first_output, rows), b->activation);
}

// Returns the second linear layer's input as it was kept; {0} where what is kept is its MX copy
// alone.
static Tensor kept_second_input(const Branch *b, int64_t rows) {
    return b->keeps_second_input ? rows_of(b->second_input, rows) : (Tensor){0};
}

void branch_backward(Branch *b, const Backend *backend, const BranchList *list, Tensor dstream, Sequences sequences) {
    int64_t rows = dstream.rows, inner = b->second.weight->cols;
    Tensor dnormed = rows_of(list->dnormed, rows), qkv = rows_of(b->first_output, rows);
    remake_second_input(b, backend, rows);
    if (b->is_attention) {
        Tensor dout = shaped(list->dnormed, rows, inner), dqkv = shaped(list->dwide, rows, qkv.cols);
        linear_backward(&b->second, backend, dout, source_tensor(dstream));
        attention_backward(&b->attention, backend, dqkv, dout, kept_second_input(b, rows), qkv, sequences, dnormed);
        linear_backward(&b->first, backend, dnormed, source_tensor(dqkv));
    } else {
        Tensor dactivation = shaped(list->dwide, rows, inner);
        linear_backward(&b->second, backend, dactivation, source_tensor(dstream));
        linear_backward(&b->first, backend, dnormed, activation_gradient(b, backend, dactivation, list->dgated));
    }
    if (b->has_norm) {
        norm_backward(&b->norm, backend, dstream, dnormed, rows_of(b->input, rows));
    } else {
        stream_add(backend, dstream, dstream, dnormed, b->norm.rstd);
    }
}
