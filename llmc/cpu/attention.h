/*
What attention's two ways on a CPU share: a head of one sequence, and which keys its queries see.
*/
#pragma once

#include "amx.h"
#include "cpu.h"

#include <math.h> // sqrtf

// Of one sequence, a head of queries and the head of keys and values that it attends to.
typedef struct {
    Tensor q, k, v; // (T, HS)
    float scale;    // 1 / sqrt(HS)
    bool causal;
    const int32_t *positions; // (T) in documents, or NULL
} Head;

// Keys [begin, end).
typedef struct {
    int64_t begin, end;
} Keys;

// Returns a view of sequence `b` and of head `h` of all whose columns x has.
static inline Tensor head_of(Tensor x, AttentionShape shape, int64_t b, int64_t h) {
    return tensor_cols(tensor_rows(x, b * shape.T, shape.T), h * shape.HS, shape.HS);
}

// Returns query head `h` of sequence `b`, and the head of keys and values that it attends to.
static inline Head head_at(Tensor qkv, int64_t b, int64_t h, AttentionShape shape) {
    int64_t kv = h / (shape.NH / shape.NKV);
    return (Head){.q = head_of(qkv, shape, b, h),
                  .k = head_of(qkv, shape, b, shape.NH + kv),
                  .v = head_of(qkv, shape, b, shape.NH + shape.NKV + kv),
                  .scale = 1.0f / sqrtf((float)shape.HS),
                  .causal = shape.causal,
                  .positions = shape.by_document ? shape.positions + b * shape.T : NULL};
}

static inline Keys keys_seen(const Head *head, int64_t query) {
    return (Keys){head->positions ? query - head->positions[query] : 0, head->causal ? query + 1 : head->k.rows};
}

#ifdef HAVE_AMX
// Attention by AMX's tiles, attention_amx.c: of BF16, where amx_is_there.

// Returns the bytes of scratch that a thread needs.
size_t attention_amx_scratch(AttentionShape shape);

// Makes out (T, HS) and logsumexp (T) of one head.
void attention_amx_forward(Tensor out, float *logsumexp, const Head *head, AttentionShape shape, void *scratch);

// Writes, for sequence `b`, the gradients of the keys and values of head `kv` and of the queries
// that attend to them.
void attention_amx_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, int64_t b, int64_t kv,
                            AttentionShape shape, void *scratch);
#else
static inline size_t attention_amx_scratch(AttentionShape shape) { return (void)shape, 0; }
static inline void attention_amx_forward(Tensor out, float *logsumexp, const Head *head, AttentionShape shape,
                                         void *scratch) {
    (void)out, (void)logsumexp, (void)head, (void)shape, (void)scratch;
}
static inline void attention_amx_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, int64_t b,
                                          int64_t kv, AttentionShape shape, void *scratch) {
    (void)dqkv, (void)dout, (void)qkv, (void)logsumexp, (void)b, (void)kv, (void)shape, (void)scratch;
}
#endif
