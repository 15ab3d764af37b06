#include "attention.h"
#include "place.h"

// Columns of queries and keys, which come before those of values.
static int64_t query_key_cols(const AttentionShape *s) { return (s->NH + s->NKV) * s->HS; }

void attention_layout(Attention *a, MemoryPlan *plan, Format dtype) {
    int64_t rows = a->shape.B * a->shape.T;
    if (a->has_qk_norm) {
        norm_layout(&a->q_norm, plan, rows);
        norm_layout(&a->k_norm, plan, rows);
        a->qk_input = take_tensor(plan, MEMORY_KEPT, dtype, rows, query_key_cols(&a->shape));
    }
    a->logsumexp = take_floats(plan, MEMORY_KEPT, rows * a->shape.NH);
}

typedef struct {
    Tensor queries, keys, both;
} QueriesAndKeys;

// Returns views of the columns of `qkv`, which may lack the values.
static QueriesAndKeys queries_and_keys(const AttentionShape *s, Tensor qkv) {
    int64_t queries = s->NH * s->HS, both = query_key_cols(s);
    return (QueriesAndKeys){tensor_cols(qkv, 0, queries), tensor_cols(qkv, queries, both - queries),
                            tensor_cols(qkv, 0, both)};
}

// Normalises queries and keys, in place: their values before that are kept.
static void normalize(const Attention *a, const Backend *backend, QueriesAndKeys out) {
    const Tensor none = {0};
    QueriesAndKeys in = queries_and_keys(&a->shape, tensor_rows(a->qk_input, 0, out.both.rows));
    backend->convert(in.both, out.both);
    norm_forward(&a->q_norm, backend, out.queries, none, in.queries, none);
    norm_forward(&a->k_norm, backend, out.keys, none, in.keys, none);
}

// Turns the gradient of a norm's output into that of its input, in place.
static void norm_backward_in_place(const Norm *norm, const Backend *backend, Tensor dout, Tensor input,
                                   Tensor scratch) {
    Tensor dinput = tensor_make(scratch.data, scratch.dtype, dout.rows, dout.cols);
    backend->zero(dinput.data, (size_t)(dinput.rows * dinput.cols) * dtype_size(dinput.dtype));
    norm_backward(norm, backend, dinput, dout, input);
    backend->convert(dout, dinput);
}

static AttentionShape shape_of(const Attention *a, int64_t rows, Sequences sequences) {
    AttentionShape shape = a->shape;
    shape.B = rows / sequences.T;
    shape.T = sequences.T;
    shape.positions = sequences.positions;
    return shape;
}

void attention_forward(const Attention *a, const Backend *backend, Tensor out, Tensor qkv, Sequences sequences) {
    QueriesAndKeys qk = queries_and_keys(&a->shape, qkv);
    if (a->has_qk_norm) normalize(a, backend, qk);
    if (a->rotations) backend->rope(qk.both, a->rotations, sequences, a->shape.HS, false);
    backend->attention_forward(out, a->logsumexp, qkv, shape_of(a, qkv.rows, sequences));
}

void attention_backward(const Attention *a, const Backend *backend, Tensor dqkv, Tensor dout, Tensor out, Tensor qkv,
                        Sequences sequences, Tensor scratch) {
    backend->attention_backward(dqkv, dout, out, qkv, a->logsumexp, shape_of(a, qkv.rows, sequences));
    QueriesAndKeys dqk = queries_and_keys(&a->shape, dqkv);
    if (a->rotations) backend->rope(dqk.both, a->rotations, sequences, a->shape.HS, true);
    if (!a->has_qk_norm) return;
    QueriesAndKeys in = queries_and_keys(&a->shape, tensor_rows(a->qk_input, 0, dqkv.rows));
    norm_backward_in_place(&a->q_norm, backend, dqk.queries, in.queries, scratch);
    norm_backward_in_place(&a->k_norm, backend, dqk.keys, in.keys, scratch);
}
