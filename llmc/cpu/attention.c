/*
Self-attention by blocks of query rows: a thread takes one head of keys of one sequence, with all
heads of queries that attend to it, and for each block of BLOCK queries multiplies it with the keys
it sees, so that scores live in the thread's scratch and never as a T x T matrix. The backward pass
recomputes probabilities from the scores and logsumexp (Dao et al., FlashAttention-2).
*/
#include "cpu.h"
#include "vector_math.h"

#include <math.h>
#include <omp.h>

enum { BLOCK = 128 };

typedef struct {
    Format dtype;          // of the operands of the GEMMs
    Format values;         // what they are rounded to, also where the machine then multiplies them in FP32
    int64_t T, HS, stride; // stride: between tokens of qkv
    const void *q, *k, *v; // of one head of one sequence, first token
    float scale;           // 1 / sqrt(HS)
    bool causal;
} Head;

// A thread's scratch. Sizes in comments: (BLOCK, T) unless said.
typedef struct {
    float *scores, *dprobs;
    void *probs, *dscores; // in the GEMMs' dtype
    float *dk, *dv;        // (T, HS)
    void *widened;         // (T, 4*HS): q, k, v and dout in FP32 where the machine has no BF16 GEMM
} Scratch;

static Format matmul_dtype(Format dtype) { return cpu_matmul_takes_bf16() ? dtype : FORMAT_FP32; }

static size_t scratch_take(size_t *used, size_t bytes) {
    size_t at = *used;
    *used += (bytes + 63) / 64 * 64;
    return at;
}

// Lays a thread's scratch out from `base`, which may be NULL to get its size.
static size_t scratch_layout(Scratch *s, char *base, Format dtype, int64_t T, int64_t HS) {
    size_t used = 0, scores = (size_t)BLOCK * (size_t)T, head = (size_t)T * (size_t)HS;
    Format operand = matmul_dtype(dtype);
    size_t at_scores = scratch_take(&used, scores * sizeof(float));
    size_t at_dprobs = scratch_take(&used, scores * sizeof(float));
    size_t at_probs = scratch_take(&used, scores * dtype_size(operand));
    size_t at_dscores = scratch_take(&used, scores * dtype_size(operand));
    size_t at_dk = scratch_take(&used, head * sizeof(float));
    size_t at_dv = scratch_take(&used, head * sizeof(float));
    size_t at_widened = scratch_take(&used, operand != dtype ? 4 * head * sizeof(float) : 0);
    if (base) {
        *s = (Scratch){(float *)(base + at_scores), (float *)(base + at_dprobs), base + at_probs,  base + at_dscores,
                       (float *)(base + at_dk),     (float *)(base + at_dv),     base + at_widened};
    }
    return used;
}

size_t cpu_attention_workspace(Format dtype, AttentionShape shape) {
    return (size_t)omp_get_max_threads() * scratch_layout(NULL, NULL, dtype, shape.T, shape.HS);
}

static Scratch scratch_of_thread(Format dtype, AttentionShape shape, char *workspace) {
    Scratch s;
    size_t bytes = scratch_layout(NULL, NULL, dtype, shape.T, shape.HS);
    scratch_layout(&s, workspace + (size_t)omp_get_thread_num() * bytes, dtype, shape.T, shape.HS);
    return s;
}

static const void *token_at(const void *x, Format dtype, int64_t token, int64_t stride) {
    return (const char *)x + (size_t)(token * stride) * dtype_size(dtype);
}

// Copies (T, HS) at `in` to FP32.
static const void *widen(float *out, const void *in, Format dtype, int64_t T, int64_t HS, int64_t stride) {
    for (int64_t t = 0; t < T; t++) {
        cpu_load(out + t * HS, token_at(in, dtype, t, stride), dtype, HS);
    }
    return out;
}

// Query head `h` of sequence `b`, and the head of keys and values that it attends to.
static Head head_at(Tensor qkv, int64_t b, int64_t h, AttentionShape shape, Scratch *scratch) {
    int64_t T = shape.T, HS = shape.HS, kv = h / (shape.NH / shape.NKV);
    Head head = {.dtype = qkv.dtype,
                 .values = qkv.dtype,
                 .T = T,
                 .HS = HS,
                 .stride = qkv.stride,
                 .q = cpu_at(qkv, b * T, h * HS),
                 .k = cpu_at(qkv, b * T, (shape.NH + kv) * HS),
                 .v = cpu_at(qkv, b * T, (shape.NH + shape.NKV + kv) * HS),
                 .scale = 1.0f / sqrtf((float)HS),
                 .causal = shape.causal};
    if (matmul_dtype(qkv.dtype) != qkv.dtype) {
        float *widened = scratch->widened;
        head.q = widen(widened, head.q, qkv.dtype, T, HS, qkv.stride);
        head.k = widen(widened + T * HS, head.k, qkv.dtype, T, HS, qkv.stride);
        head.v = widen(widened + 2 * T * HS, head.v, qkv.dtype, T, HS, qkv.stride);
        head.dtype = FORMAT_FP32;
        head.stride = HS;
    }
    return head;
}

// Keys that query `i` sees.
static int64_t num_visible(const Head *head, int64_t i) { return head->causal ? i + 1 : head->T; }

// How many keys queries [first, first + rows) are multiplied with: at least those they see, in
// steps that leave few shapes of GEMMs however long the sequence is. What is beyond a query's sight
// becomes 0.
static int64_t num_keys(const Head *head, int64_t first, int64_t rows) {
    enum { MAX_STEPS = 64 };
    int64_t step = (head->T + MAX_STEPS * BLOCK - 1) / (MAX_STEPS * BLOCK) * BLOCK;
    int64_t keys = (num_visible(head, first + rows - 1) + step - 1) / step * step;
    return keys < head->T ? keys : head->T;
}

// scores (rows, keys) = q k^T for queries [first, first + rows) and keys [0, keys), not yet scaled;
// dprobs = dout v^T is the same product of other operands.
static void rows_times_tokens(float *out, const Head *head, const void *rows_at, int64_t rows_stride,
                              const void *tokens, int64_t rows, int64_t keys) {
    cpu_matmul(out, rows_at, tokens, NULL,
               (CpuMatmul){.M = rows,
                           .N = keys,
                           .K = head->HS,
                           .lda = rows_stride,
                           .ldb = head->stride,
                           .ldd = head->T,
                           .transpose_b = true,
                           .dtype = head->dtype,
                           .d_dtype = FORMAT_FP32});
}

// Probabilities or their gradients as an operand of a GEMM.
static void store_operand(void *out, const Head *head, float *row, int64_t keys) {
    for (int64_t j = 0; head->values != head->dtype && j < keys; j++) {
        row[j] = mx_from_bf16(mx_to_bf16(row[j]));
    }
    cpu_store(out, head->dtype, row, keys);
}

// A row of a block's scores attends to keys [0, visible); the rest of `keys` become 0.
static void softmax_row(void *probs, const Head *head, float *logsumexp, float *scores, int64_t visible, int64_t keys) {
    float scale = head->scale;
    float max = -INFINITY;
#pragma omp simd reduction(max : max)
    for (int64_t j = 0; j < visible; j++) {
        max = scores[j] > max ? scores[j] : max;
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < visible; j++) {
        scores[j] = vector_exp((scores[j] - max) * scale);
        sum += scores[j];
    }
    float inverse = 1 / sum;
    for (int64_t j = 0; j < visible; j++) {
        scores[j] *= inverse;
    }
    memset(scores + visible, 0, (size_t)(keys - visible) * sizeof(float));
    store_operand(probs, head, scores, keys);
    *logsumexp = max * scale + logf(sum);
}

static void head_forward(Tensor out, float *logsumexp, const Head *head, const Scratch *scratch, int64_t token,
                         int64_t col) {
    for (int64_t first = 0; first < head->T; first += BLOCK) {
        int64_t rows = head->T - first < BLOCK ? head->T - first : BLOCK, keys = num_keys(head, first, rows);
        rows_times_tokens(scratch->scores, head, token_at(head->q, head->dtype, first, head->stride), head->stride,
                          head->k, rows, keys);
        for (int64_t i = 0; i < rows; i++) {
            void *probs = (char *)scratch->probs + (size_t)(i * head->T) * dtype_size(head->dtype);
            softmax_row(probs, head, &logsumexp[first + i], scratch->scores + i * head->T, num_visible(head, first + i),
                        keys);
        }
        cpu_matmul(cpu_at(out, token + first, col), scratch->probs, head->v, NULL,
                   (CpuMatmul){.M = rows,
                               .N = head->HS,
                               .K = keys,
                               .lda = head->T,
                               .ldb = head->stride,
                               .ldd = out.stride,
                               .dtype = head->dtype,
                               .d_dtype = out.dtype});
    }
}

void cpu_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape) {
    int64_t T = shape.T;
    char *workspace = cpu_workspace(cpu_attention_workspace(qkv.dtype, shape));
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < shape.B; b++) {
        for (int64_t h = 0; h < shape.NH; h++) {
            Scratch scratch = scratch_of_thread(qkv.dtype, shape, workspace);
            Head head = head_at(qkv, b, h, shape, &scratch);
            head_forward(out, logsumexp + (b * shape.NH + h) * T, &head, &scratch, b * T, h * shape.HS);
        }
    }
}

// scores -> probs, and dprobs -> dscores = P * (dP - sum(P * dP)) * scale, one row.
static void softmax_backward_row(void *probs, void *dscores, const Head *head, float *scores, float *dprobs,
                                 float logsumexp, int64_t visible, int64_t keys) {
    float scale = head->scale;
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < visible; j++) {
        scores[j] = vector_exp(scores[j] * scale - logsumexp);
        dot += scores[j] * dprobs[j];
    }
    memset(scores + visible, 0, (size_t)(keys - visible) * sizeof(float));
    for (int64_t j = 0; j < visible; j++) {
        dprobs[j] = scores[j] * (dprobs[j] - dot) * scale;
    }
    memset(dprobs + visible, 0, (size_t)(keys - visible) * sizeof(float));
    store_operand(probs, head, scores, keys);
    store_operand(dscores, head, dprobs, keys);
}

// (keys, HS) += block^T rows, where block is (rows, keys).
static void accumulate_tokens(float *out, const Head *head, const void *block, const void *rows_at, int64_t rows_stride,
                              int64_t rows, int64_t keys) {
    cpu_matmul(out, block, rows_at, NULL,
               (CpuMatmul){.M = keys,
                           .N = head->HS,
                           .K = rows,
                           .lda = head->T,
                           .ldb = rows_stride,
                           .ldd = head->HS,
                           .transpose_a = true,
                           .accumulate = true,
                           .dtype = head->dtype,
                           .d_dtype = FORMAT_FP32});
}

// Writes dq at `token` and `col` of dqkv; adds to the scratch's dk and dv.
static void head_backward(Tensor dqkv, const void *dout, int64_t dout_stride, const float *logsumexp, const Head *head,
                          const Scratch *scratch, int64_t token, int64_t col) {
    int64_t T = head->T, HS = head->HS;
    for (int64_t first = 0; first < T; first += BLOCK) {
        int64_t rows = T - first < BLOCK ? T - first : BLOCK, keys = num_keys(head, first, rows);
        const void *q_rows = token_at(head->q, head->dtype, first, head->stride);
        const void *dout_rows = token_at(dout, head->dtype, first, dout_stride);
        rows_times_tokens(scratch->scores, head, q_rows, head->stride, head->k, rows, keys);
        rows_times_tokens(scratch->dprobs, head, dout_rows, dout_stride, head->v, rows, keys);
        for (int64_t i = 0; i < rows; i++) {
            size_t at = (size_t)(i * T) * dtype_size(head->dtype);
            softmax_backward_row((char *)scratch->probs + at, (char *)scratch->dscores + at, head,
                                 scratch->scores + i * T, scratch->dprobs + i * T, logsumexp[first + i],
                                 num_visible(head, first + i), keys);
        }
        accumulate_tokens(scratch->dv, head, scratch->probs, dout_rows, dout_stride, rows, keys);
        accumulate_tokens(scratch->dk, head, scratch->dscores, q_rows, head->stride, rows, keys);
        cpu_matmul(cpu_at(dqkv, token + first, col), scratch->dscores, head->k, NULL,
                   (CpuMatmul){.M = rows,
                               .N = HS,
                               .K = keys,
                               .lda = T,
                               .ldb = head->stride,
                               .ldd = dqkv.stride,
                               .dtype = head->dtype,
                               .d_dtype = dqkv.dtype});
    }
}

// Of sequence `b`, the gradients of the keys and values of head `kv` and of the queries that attend
// to them.
static void group_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, int64_t b, int64_t kv,
                           AttentionShape shape, Scratch *scratch) {
    int64_t T = shape.T, HS = shape.HS, group = shape.NH / shape.NKV;
    memset(scratch->dk, 0, (size_t)(T * HS) * sizeof(float));
    memset(scratch->dv, 0, (size_t)(T * HS) * sizeof(float));
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        Head head = head_at(qkv, b, h, shape, scratch);
        const void *dout_head = cpu_at(dout, b * T, h * HS);
        int64_t dout_stride = dout.stride;
        if (head.dtype != dout.dtype) {
            dout_head = widen((float *)scratch->widened + 3 * T * HS, dout_head, dout.dtype, T, HS, dout.stride);
            dout_stride = HS;
        }
        head_backward(dqkv, dout_head, dout_stride, logsumexp + (b * shape.NH + h) * T, &head, scratch, b * T, h * HS);
    }
    for (int64_t t = 0; t < T; t++) {
        void *dk = cpu_at(dqkv, b * T + t, (shape.NH + kv) * HS);
        void *dv = cpu_at(dqkv, b * T + t, (shape.NH + shape.NKV + kv) * HS);
        cpu_store(dk, dqkv.dtype, scratch->dk + t * HS, HS);
        cpu_store(dv, dqkv.dtype, scratch->dv + t * HS, HS);
    }
}

void cpu_attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, AttentionShape shape) {
    char *workspace = cpu_workspace(cpu_attention_workspace(qkv.dtype, shape));
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t b = 0; b < shape.B; b++) {
        for (int64_t kv = 0; kv < shape.NKV; kv++) {
            Scratch scratch = scratch_of_thread(qkv.dtype, shape, workspace);
            group_backward(dqkv, dout, qkv, logsumexp, b, kv, shape, &scratch);
        }
    }
}
