/*
Self-attention by blocks of query rows: a thread takes one head of keys of one sequence, with all
heads of queries that attend to it, and for each block of BLOCK queries multiplies it with the keys
it sees, so that scores live in the thread's scratch and never as a T x T matrix. The backward pass
recomputes probabilities from the scores and logsumexp (Dao et al., FlashAttention-2).
*/
#include "cpu.h"
#include "vector_math.h"
#include "llmc/base/memory.h"

#include <math.h>
#include <omp.h>

enum { BLOCK = 128 };

// Of one sequence, a head of queries and the head of keys and values that it attends to.
typedef struct {
    Tensor q, k, v; // (T, HS)
    float scale;    // 1 / sqrt(HS)
    bool causal;
    const int32_t *positions; // (T) in documents, or NULL
} Head;

// A thread's scratch.
typedef struct {
    Tensor scores, dprobs; // (BLOCK, T)
    Tensor probs, dscores; // (BLOCK, T) in qkv's dtype
    Tensor dk, dv;         // (T, HS)
} Scratch;

static Tensor take(MemoryPlan *plan, Format dtype, int64_t rows, int64_t cols) {
    void *memory = memory_take(plan, MEMORY_SCRATCH, (size_t)(rows * cols) * dtype_size(dtype));
    return tensor_make(memory, dtype, rows, cols);
}

// Lays a thread's scratch out from `base`, which may be NULL to get its size.
static size_t scratch_layout(Scratch *s, char *base, Format dtype, AttentionShape shape) {
    MemoryPlan plan = {.base = base};
    s->scores = take(&plan, FORMAT_FP32, BLOCK, shape.T);
    s->dprobs = take(&plan, FORMAT_FP32, BLOCK, shape.T);
    s->probs = take(&plan, dtype, BLOCK, shape.T);
    s->dscores = take(&plan, dtype, BLOCK, shape.T);
    s->dk = take(&plan, FORMAT_FP32, shape.T, shape.HS);
    s->dv = take(&plan, FORMAT_FP32, shape.T, shape.HS);
    return plan.used;
}

size_t cpu_attention_workspace(Format dtype, AttentionShape shape) {
    Scratch s;
    return (size_t)omp_get_max_threads() * scratch_layout(&s, NULL, dtype, shape);
}

static Scratch scratch_of_thread(Format dtype, AttentionShape shape, char *workspace) {
    Scratch s;
    size_t bytes = scratch_layout(&s, NULL, dtype, shape);
    scratch_layout(&s, workspace + (size_t)omp_get_thread_num() * bytes, dtype, shape);
    return s;
}

// Returns the first rows and columns of scratch.
static Tensor part(Tensor scratch, int64_t rows, int64_t cols) {
    return tensor_cols(tensor_rows(scratch, 0, rows), 0, cols);
}

// Returns a view of sequence `b` and of head `h` of all whose columns x has.
static Tensor head_of(Tensor x, AttentionShape shape, int64_t b, int64_t h) {
    return tensor_cols(tensor_rows(x, b * shape.T, shape.T), h * shape.HS, shape.HS);
}

// Query head `h` of sequence `b`, and the head of keys and values that it attends to.
static Head head_at(Tensor qkv, int64_t b, int64_t h, AttentionShape shape) {
    int64_t kv = h / (shape.NH / shape.NKV);
    return (Head){.q = head_of(qkv, shape, b, h),
                  .k = head_of(qkv, shape, b, shape.NH + kv),
                  .v = head_of(qkv, shape, b, shape.NH + shape.NKV + kv),
                  .scale = 1.0f / sqrtf((float)shape.HS),
                  .causal = shape.causal,
                  .positions = shape.by_document ? shape.positions + b * shape.T : NULL};
}

// Keys [begin, end).
typedef struct {
    int64_t begin, end;
} Keys;

static Keys keys_seen(const Head *head, int64_t query) {
    return (Keys){head->positions ? query - head->positions[query] : 0, head->causal ? query + 1 : head->k.rows};
}

// Which keys queries [first, first + rows) are multiplied with: at least those they see, in steps
// that leave few shapes of GEMMs however long the sequence is. What is beyond a query's sight
// becomes 0.
static Keys keys_of_block(const Head *head, int64_t first, int64_t rows) {
    enum { MAX_STEPS = 64 };
    int64_t T = head->k.rows, step = (T + MAX_STEPS * BLOCK - 1) / (MAX_STEPS * BLOCK) * BLOCK;
    int64_t begin = keys_seen(head, first).begin / step * step;
    int64_t end = (keys_seen(head, first + rows - 1).end + step - 1) / step * step;
    return (Keys){begin, end < T ? end : T};
}

// Returns which of a block's columns, those of `keys`, a query sees.
static Keys columns_seen(const Head *head, int64_t query, Keys keys) {
    Keys seen = keys_seen(head, query);
    return (Keys){seen.begin - keys.begin, seen.end - keys.begin};
}

static Tensor tokens_of(Tensor tokens, Keys keys) { return tensor_rows(tokens, keys.begin, keys.end - keys.begin); }

static void clear_unseen(float *row, int64_t cols, Keys seen) {
    memset(row, 0, (size_t)seen.begin * sizeof(float));
    memset(row + seen.end, 0, (size_t)(cols - seen.end) * sizeof(float));
}

// Makes scores (rows, keys) = rows tokens^T, not yet scaled: of queries and keys, and likewise
// dprobs of dout and values.
static void rows_times_tokens(Tensor scores, Tensor rows, Tensor tokens) {
    cpu_matmul(scores, rows, tokens, (GemmOptions){.transpose_b = true});
}

// Makes row `i` of a block's scores attend to the columns `seen`; the rest of the row become 0.
static void softmax_row(Tensor probs, Tensor block, int64_t i, const Head *head, float *logsumexp, Keys seen) {
    float *row = cpu_at(block, i, 0), *scores = row + seen.begin, scale = head->scale;
    int64_t visible = seen.end - seen.begin;
    float max = vector_max(scores, visible), sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < visible; j++) {
        scores[j] = vector_exp((scores[j] - max) * scale);
        sum += scores[j];
    }
    float inverse = 1 / sum;
    for (int64_t j = 0; j < visible; j++) {
        scores[j] *= inverse;
    }
    clear_unseen(row, block.cols, seen);
    cpu_store_row(probs, i, row);
    *logsumexp = max * scale + logf(sum);
}

static void head_forward(Tensor out, float *logsumexp, const Head *head, const Scratch *scratch) {
    for (int64_t first = 0; first < out.rows; first += BLOCK) {
        int64_t rows = out.rows - first < BLOCK ? out.rows - first : BLOCK;
        Keys keys = keys_of_block(head, first, rows);
        Tensor k = tokens_of(head->k, keys), v = tokens_of(head->v, keys);
        Tensor scores = part(scratch->scores, rows, k.rows), probs = part(scratch->probs, rows, k.rows);
        rows_times_tokens(scores, tensor_rows(head->q, first, rows), k);
        for (int64_t i = 0; i < rows; i++) {
            softmax_row(probs, scores, i, head, &logsumexp[first + i], columns_seen(head, first + i, keys));
        }
        cpu_matmul(tensor_rows(out, first, rows), probs, v, (GemmOptions){0});
    }
}

void cpu_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape) {
    char *workspace = cpu_workspace(cpu_attention_workspace(qkv.dtype, shape));
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < shape.B; b++) {
        for (int64_t h = 0; h < shape.NH; h++) {
            Scratch scratch = scratch_of_thread(qkv.dtype, shape, workspace);
            Head head = head_at(qkv, b, h, shape);
            head_forward(head_of(out, shape, b, h), logsumexp + (b * shape.NH + h) * shape.T, &head, &scratch);
        }
    }
}

// scores -> probs, and dprobs -> dscores = P * (dP - sum(P * dP)) * scale, one row.
static void softmax_backward_row(float *scores_row, float *dprobs_row, float scale, float logsumexp, int64_t cols,
                                 Keys seen) {
    float *scores = scores_row + seen.begin, *dprobs = dprobs_row + seen.begin, dot = 0;
    int64_t visible = seen.end - seen.begin;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < visible; j++) {
        scores[j] = vector_exp(scores[j] * scale - logsumexp);
        dot += scores[j] * dprobs[j];
    }
    for (int64_t j = 0; j < visible; j++) {
        dprobs[j] = scores[j] * (dprobs[j] - dot) * scale;
    }
    clear_unseen(scores_row, cols, seen);
    clear_unseen(dprobs_row, cols, seen);
}

// Adds block^T rows, where block is (rows, keys), to `tokens`.
static void accumulate_tokens(Tensor tokens, Tensor block, Tensor rows) {
    cpu_matmul(tokens, block, rows, (GemmOptions){.transpose_a = true, .accumulate = true});
}

// Writes dq; adds to the scratch's dk and dv.
static void head_backward(Tensor dq, Tensor dout, const float *logsumexp, const Head *head, const Scratch *scratch) {
    for (int64_t first = 0; first < dq.rows; first += BLOCK) {
        int64_t rows = dq.rows - first < BLOCK ? dq.rows - first : BLOCK;
        Keys keys = keys_of_block(head, first, rows);
        Tensor k = tokens_of(head->k, keys), v = tokens_of(head->v, keys);
        Tensor scores = part(scratch->scores, rows, k.rows), dprobs = part(scratch->dprobs, rows, k.rows);
        Tensor probs = part(scratch->probs, rows, k.rows), dscores = part(scratch->dscores, rows, k.rows);
        Tensor q_rows = tensor_rows(head->q, first, rows), dout_rows = tensor_rows(dout, first, rows);
        rows_times_tokens(scores, q_rows, k);
        rows_times_tokens(dprobs, dout_rows, v);
        for (int64_t i = 0; i < rows; i++) {
            float *p = cpu_at(scores, i, 0), *dp = cpu_at(dprobs, i, 0);
            softmax_backward_row(p, dp, head->scale, logsumexp[first + i], k.rows, columns_seen(head, first + i, keys));
            cpu_store_row(probs, i, p);
            cpu_store_row(dscores, i, dp);
        }
        accumulate_tokens(tokens_of(scratch->dv, keys), probs, dout_rows);
        accumulate_tokens(tokens_of(scratch->dk, keys), dscores, q_rows);
        cpu_matmul(tensor_rows(dq, first, rows), dscores, k, (GemmOptions){0});
    }
}

// Writes, for sequence `b`, the gradients of the keys and values of head `kv` and of the queries
// that attend to them.
static void group_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, int64_t b, int64_t kv,
                           AttentionShape shape, const Scratch *scratch) {
    int64_t T = shape.T, HS = shape.HS, group = shape.NH / shape.NKV;
    memset(scratch->dk.data, 0, (size_t)(T * HS) * sizeof(float));
    memset(scratch->dv.data, 0, (size_t)(T * HS) * sizeof(float));
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        Head head = head_at(qkv, b, h, shape);
        head_backward(head_of(dqkv, shape, b, h), head_of(dout, shape, b, h), logsumexp + (b * shape.NH + h) * T, &head,
                      scratch);
    }
    Tensor dk = head_of(dqkv, shape, b, shape.NH + kv), dv = head_of(dqkv, shape, b, shape.NH + shape.NKV + kv);
    for (int64_t t = 0; t < T; t++) {
        cpu_store_row(dk, t, cpu_at(scratch->dk, t, 0));
        cpu_store_row(dv, t, cpu_at(scratch->dv, t, 0));
    }
}

void cpu_attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                            AttentionShape shape) {
    (void)out; // each row's sum of dO O is one of P dP, which are at hand
    char *workspace = cpu_workspace(cpu_attention_workspace(qkv.dtype, shape));
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < shape.B; b++) {
        for (int64_t kv = 0; kv < shape.NKV; kv++) {
            Scratch scratch = scratch_of_thread(qkv.dtype, shape, workspace);
            group_backward(dqkv, dout, qkv, logsumexp, b, kv, shape, &scratch);
        }
    }
}
