/*
Self-attention by blocks of query rows: a thread takes one head of keys of one sequence, with all
heads of queries that attend to it, and multiplies each block of queries with the keys it sees, so
that scores live in the thread's scratch and never as a T x T matrix. The backward pass recomputes
probabilities from the scores and logsumexp (Dao et al., FlashAttention-2). BF16 has another way
where there is AMX, attention_amx.c.
*/
#include "attention.h"
#include "onednn.h"
#include "vector_math.h"
#include "llmc/base/memory.h"

#include <omp.h>

// Returns whether attention_amx.c multiplies. What keeps oneDNN from AMX, its environment variable,
// keeps this from it too.
static bool by_tiles(Format dtype) { return dtype == FORMAT_BF16 && onednn_multiplies(dtype) && amx_is_there(); }

int64_t cpu_attention_rows(Format dtype) { return onednn_multiplies(dtype) ? 128 : MATMUL_ROWS; }

// A thread's scratch, in FP32. Where T is a power of two the rows of scores and dprobs aren't one
// apart: caches have few places for those.
typedef struct {
    Tensor scores, dprobs; // (cpu_attention_rows(dtype), T and a cache line)
    Tensor dk, dv;         // (T, HS)
} Scratch;

static Tensor take(MemoryPlan *plan, int64_t rows, int64_t cols) {
    void *memory = memory_take(plan, MEMORY_SCRATCH, (size_t)(rows * cols) * sizeof(float));
    return tensor_make(memory, FORMAT_FP32, rows, cols);
}

// Lays a thread's scratch out from `base`, which may be NULL to get its size.
static size_t scratch_layout(Scratch *s, char *base, Format dtype, AttentionShape shape) {
    int64_t cols = shape.T + CACHE_LINE / (int64_t)sizeof(float);
    MemoryPlan plan = {.base = base};
    s->scores = take(&plan, cpu_attention_rows(dtype), cols);
    s->dprobs = take(&plan, cpu_attention_rows(dtype), cols);
    s->dk = take(&plan, shape.T, shape.HS);
    s->dv = take(&plan, shape.T, shape.HS);
    return plan.used;
}

static size_t bytes_of_thread(Format dtype, AttentionShape shape) {
    Scratch s;
    return by_tiles(dtype) ? attention_amx_scratch(shape) : scratch_layout(&s, NULL, dtype, shape);
}

size_t cpu_attention_workspace(Format dtype, AttentionShape shape) {
    return (size_t)omp_get_max_threads() * bytes_of_thread(dtype, shape);
}

// Returns the calling thread's part of the workspace.
static void *scratch_of_thread(Format dtype, AttentionShape shape, char *workspace) {
    return workspace + (size_t)omp_get_thread_num() * bytes_of_thread(dtype, shape);
}

// Returns the first rows and columns of scratch.
static Tensor part(Tensor scratch, int64_t rows, int64_t cols) {
    return tensor_cols(tensor_rows(scratch, 0, rows), 0, cols);
}

// Returns the tensor that a block becomes when each of its rows is rounded to `dtype` in its place.
static Tensor rounded_in_place(Tensor block, Format dtype) {
    Tensor rounded = tensor_make(block.data, dtype, block.rows, block.cols);
    rounded.stride = block.stride * (int64_t)(sizeof(float) / dtype_size(dtype));
    return rounded;
}

// Which keys queries [first, first + rows) are multiplied with: at least those they see, in steps
// that leave few shapes of GEMMs however long the sequence is. What is beyond a query's sight
// becomes 0.
static Keys keys_of_block(const Head *head, int64_t first, int64_t rows) {
    enum { MAX_STEPS = 64 };
    int64_t T = head->k.rows, at_once = cpu_attention_rows(head->k.dtype);
    int64_t step = (T + MAX_STEPS * at_once - 1) / (MAX_STEPS * at_once) * at_once;
    int64_t begin = keys_seen(head, first).begin / step * step;
    int64_t end = (keys_seen(head, first + rows - 1).end + step - 1) / step * step;
    return (Keys){begin, min_int64(end, T)};
}

// Returns which of a block's columns, those of `keys`, a query sees.
static Keys columns_seen(const Head *head, int64_t query, Keys keys) {
    Keys seen = keys_seen(head, query);
    return (Keys){seen.begin - keys.begin, seen.end - keys.begin};
}

// Returns beyond which diagonal of a block of scores, whose columns are `keys`, its queries see
// nothing.
static int64_t diagonal_of(const Head *head, int64_t first, Keys keys) {
    return head->causal ? first - keys.begin : MATMUL_ALL;
}

static Tensor tokens_of(Tensor tokens, Keys keys) { return tensor_rows(tokens, keys.begin, keys.end - keys.begin); }

// Makes row `i` of a block, in its place, `factor` times itself in `dtype` where a query sees, and
// 0 elsewhere.
static void round_row(Tensor block, int64_t i, float factor, Keys seen, Format dtype) {
    const float *row = cpu_at(block, i, 0);
    Tensor rounded = rounded_in_place(block, dtype);
    for (int64_t j = seen.begin; j < seen.end; j += CPU_SLAB) {
        int64_t count = min_int64(seen.end - j, CPU_SLAB);
        float scaled[CPU_SLAB];
        for (int64_t k = 0; k < count; k++) {
            scaled[k] = row[j + k] * factor;
        }
        cpu_store(cpu_at(rounded, i, j), dtype, scaled, count);
    }
    memset(cpu_at(rounded, i, 0), 0, (size_t)seen.begin * dtype_size(dtype));
    memset(cpu_at(rounded, i, seen.end), 0, (size_t)(block.cols - seen.end) * dtype_size(dtype));
}

// Makes scores (rows, keys) = rows tokens^T, not yet scaled: of queries and keys, and likewise
// dprobs of dout and values.
static void rows_times_tokens(Tensor scores, Tensor rows, Tensor tokens, int64_t diagonal) {
    cpu_matmul_causal(scores, rows, tokens, (GemmOptions){.transpose_b = true}, diagonal);
}

// Makes row `i` of a block's scores probabilities in `dtype`: of the columns `seen`, and 0
// elsewhere.
static void softmax_row(Tensor block, int64_t i, float scale, float *logsumexp, Keys seen, Format dtype) {
    float *scores = cpu_at(block, i, seen.begin), sum = 0;
    int64_t visible = seen.end - seen.begin;
    float max = vector_max(scores, visible);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < visible; j++) {
        scores[j] = vector_exp((scores[j] - max) * scale);
        sum += scores[j];
    }
    round_row(block, i, 1 / sum, seen, dtype);
    *logsumexp = max * scale + logf(sum);
}

static void head_forward(Tensor out, float *logsumexp, const Head *head, AttentionShape shape, void *memory) {
    Scratch scratch;
    scratch_layout(&scratch, memory, out.dtype, shape);
    int64_t at_once = cpu_attention_rows(out.dtype);
    for (int64_t first = 0; first < out.rows; first += at_once) {
        int64_t rows = min_int64(out.rows - first, at_once);
        Keys keys = keys_of_block(head, first, rows);
        Tensor k = tokens_of(head->k, keys), v = tokens_of(head->v, keys);
        Tensor scores = part(scratch.scores, rows, k.rows);
        int64_t diagonal = diagonal_of(head, first, keys);
        rows_times_tokens(scores, tensor_rows(head->q, first, rows), k, diagonal);
        for (int64_t i = 0; i < rows; i++) {
            Keys seen = columns_seen(head, first + i, keys);
            softmax_row(scores, i, head->scale, &logsumexp[first + i], seen, out.dtype);
        }
        cpu_matmul_causal(tensor_rows(out, first, rows), rounded_in_place(scores, out.dtype), v, (GemmOptions){0},
                          diagonal);
    }
}

void cpu_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape) {
    char *workspace = cpu_workspace(cpu_attention_workspace(qkv.dtype, shape));
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < shape.B; b++) {
        for (int64_t h = 0; h < shape.NH; h++) {
            void *scratch = scratch_of_thread(qkv.dtype, shape, workspace);
            Head head = head_at(qkv, b, h, shape);
            (by_tiles(qkv.dtype) ? attention_amx_forward : head_forward)(
                head_of(out, shape, b, h), logsumexp + (b * shape.NH + h) * shape.T, &head, shape, scratch);
        }
    }
}

// Makes row `i` of scores P and that of dprobs dscores = P * (dP - sum(P * dP)) * scale, both in
// `dtype`.
static void softmax_backward_row(Tensor scores_block, Tensor dprobs_block, int64_t i, float scale, float logsumexp,
                                 Keys seen, Format dtype) {
    float *scores = cpu_at(scores_block, i, seen.begin), *dprobs = cpu_at(dprobs_block, i, seen.begin), dot = 0;
    int64_t visible = seen.end - seen.begin;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < visible; j++) {
        scores[j] = vector_exp(scores[j] * scale - logsumexp);
        dot += scores[j] * dprobs[j];
    }
    for (int64_t j = 0; j < visible; j++) {
        dprobs[j] = scores[j] * (dprobs[j] - dot);
    }
    round_row(scores_block, i, 1, seen, dtype);
    round_row(dprobs_block, i, scale, seen, dtype);
}

// Adds block^T rows, where block is (rows, keys), to `tokens`.
static void accumulate_tokens(Tensor tokens, Tensor block, Tensor rows, int64_t diagonal) {
    cpu_matmul_causal(tokens, block, rows, (GemmOptions){.transpose_a = true, .accumulate = true}, diagonal);
}

// Writes dq; adds to the scratch's dk and dv.
static void head_backward(Tensor dq, Tensor dout, const float *logsumexp, const Head *head, const Scratch *scratch) {
    int64_t at_once = cpu_attention_rows(dq.dtype);
    for (int64_t first = 0; first < dq.rows; first += at_once) {
        int64_t rows = min_int64(dq.rows - first, at_once);
        Keys keys = keys_of_block(head, first, rows);
        Tensor k = tokens_of(head->k, keys), v = tokens_of(head->v, keys);
        Tensor scores = part(scratch->scores, rows, k.rows), dprobs = part(scratch->dprobs, rows, k.rows);
        Tensor probs = rounded_in_place(scores, dq.dtype), dscores = rounded_in_place(dprobs, dq.dtype);
        Tensor q_rows = tensor_rows(head->q, first, rows), dout_rows = tensor_rows(dout, first, rows);
        int64_t diagonal = diagonal_of(head, first, keys);
        rows_times_tokens(scores, q_rows, k, diagonal);
        rows_times_tokens(dprobs, dout_rows, v, diagonal);
        for (int64_t i = 0; i < rows; i++) {
            Keys seen = columns_seen(head, first + i, keys);
            softmax_backward_row(scores, dprobs, i, head->scale, logsumexp[first + i], seen, dq.dtype);
        }
        accumulate_tokens(tokens_of(scratch->dv, keys), probs, dout_rows, diagonal);
        accumulate_tokens(tokens_of(scratch->dk, keys), dscores, q_rows, diagonal);
        cpu_matmul_causal(tensor_rows(dq, first, rows), dscores, k, (GemmOptions){0}, diagonal);
    }
}

// Writes, for sequence `b`, the gradients of the keys and values of head `kv` and of the queries
// that attend to them.
static void group_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, int64_t b, int64_t kv,
                           AttentionShape shape, void *memory) {
    Scratch scratch;
    scratch_layout(&scratch, memory, qkv.dtype, shape);
    int64_t T = shape.T, HS = shape.HS, group = shape.NH / shape.NKV;
    memset(scratch.dk.data, 0, (size_t)(T * HS) * sizeof(float));
    memset(scratch.dv.data, 0, (size_t)(T * HS) * sizeof(float));
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        Head head = head_at(qkv, b, h, shape);
        head_backward(head_of(dqkv, shape, b, h), head_of(dout, shape, b, h), logsumexp + (b * shape.NH + h) * T, &head,
                      &scratch);
    }
    Tensor dk = head_of(dqkv, shape, b, shape.NH + kv), dv = head_of(dqkv, shape, b, shape.NH + shape.NKV + kv);
    for (int64_t t = 0; t < T; t++) {
        cpu_store_row(dk, t, cpu_at(scratch.dk, t, 0));
        cpu_store_row(dv, t, cpu_at(scratch.dv, t, 0));
    }
}

void cpu_attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                            AttentionShape shape) {
    (void)out; // each row's sum of dO O is one of P dP, which are at hand
    char *workspace = cpu_workspace(cpu_attention_workspace(qkv.dtype, shape));
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < shape.B; b++) {
        for (int64_t kv = 0; kv < shape.NKV; kv++) {
            void *scratch = scratch_of_thread(qkv.dtype, shape, workspace);
            (by_tiles(qkv.dtype) ? attention_amx_backward : group_backward)(dqkv, dout, qkv, logsumexp, b, kv, shape,
                                                                            scratch);
        }
    }
}
