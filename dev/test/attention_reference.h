/*
Attention in double precision, with a derived bound for every value of an implementation in FP32.
*/
#pragma once

#include "check.h"

// One head in double: (T, HS) each. Gradients and their bounds are filled by attention_reference.
typedef struct {
    int64_t T, HS;
    bool causal;
    const int32_t *positions; // (T) in documents, or NULL
    bool sum_of_out;          // a row's sum of P dP is taken as that of dO O, with O rounded to BF16
    double additions;         // terms in the sums that gradients of keys and values are
    double scale;
    double *q, *k, *v, *dout;
    double *out, *out_bound, *lse, *lse_bound;
    double *gradient[3], *bound[3]; // of q, k, v
    double *perturbed;              // where attention_loss puts its argument
} HeadReference;

static inline double dot(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

static inline double dot_magnitude(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += fabs(a[i] * b[i]);
    }
    return sum;
}

// Return the first key that query i sees, and the one after the last.
static inline int64_t reference_begin(const HeadReference *h, int64_t i) {
    return h->positions ? i - h->positions[i] : 0;
}
static inline int64_t reference_end(const HeadReference *h, int64_t i) { return h->causal ? i + 1 : h->T; }

// Writes the probabilities of query i; returns logsumexp.
static inline double reference_row(const HeadReference *h, int64_t i, double *p) {
    double max = -INFINITY, sum = 0;
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
        p[j] = h->scale * dot(h->q + i * h->HS, h->k + j * h->HS, h->HS);
        max = fmax(max, p[j]);
    }
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
        sum += p[j] = exp(p[j] - max);
    }
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
        p[j] /= sum;
    }
    return max + log(sum);
}

static inline double attention_loss(void *context, double value) {
    HeadReference *h = context;
    double kept = *h->perturbed, loss = 0, p[h->T];
    *h->perturbed = value;
    for (int64_t i = 0; i < h->T; i++) {
        reference_row(h, i, p);
        for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
            loss += p[j] * dot(h->dout + i * h->HS, h->v + j * h->HS, h->HS);
        }
    }
    *h->perturbed = kept;
    return loss;
}

// Writes the error of each exponent (score - max) * scale and of logsumexp, for row i. A score is a
// sum of HS products; a probability's relative error is that of its exponent and, through the sum,
// of all others.
static inline void reference_forward_row(HeadReference *h, int64_t i, Format stored, const double *p,
                                         double *score_error) {
    int64_t HS = h->HS;
    double max = -INFINITY, error_of_sum = 0, largest = 0;
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
        max = fmax(max, h->lse[i] + log(p[j]));
    }
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
        double z = fabs(h->lse[i] + log(p[j]) - max);
        score_error[j] = h->scale * (double)(HS + 2) * U_FP32 * dot_magnitude(h->q + i * HS, h->k + j * HS, HS);
        error_of_sum += p[j] == 0 ? 0 : p[j] * expm1(score_error[j] + 3 * U_FP32 * z);
        largest = fmax(largest, score_error[j]);
    }
    double additions = (double)(h->T + 8) * U_FP32;
    h->lse_bound[i] = error_of_sum + additions + 3 * U_FP32 * (fabs(max) + fabs(h->lse[i] - max));
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
        if (p[j] == 0) continue;
        double z = fabs(h->lse[i] + log(p[j]) - max);
        double relative = expm1(score_error[j] + 3 * U_FP32 * z + error_of_sum) + 2 * additions;
        if (stored == FORMAT_BF16) relative += U_BF16;
        for (int64_t d = 0; d < HS; d++) {
            h->out[i * HS + d] += p[j] * h->v[j * HS + d];
            h->out_bound[i * HS + d] += p[j] * fabs(h->v[j * HS + d]) * relative;
        }
    }
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) { // exp never gives less than this
        h->out_bound[i * HS] += 0x1p-125 * fabs(h->v[j * HS]);
    }
}

// Computes dS = P (dP - sum(P dP)) scale; dq = dS k, dk = dS^T q, dv = P^T dout, each with what it
// can be off by.
static inline void reference_backward_row(HeadReference *h, int64_t i, Format stored, const double *p,
                                          const double *score_error) {
    int64_t HS = h->HS;
    double additions = (h->additions + 2) * U_FP32, one_rounding = stored == FORMAT_BF16 ? U_BF16 : 0;
    double relative[h->T], dp[h->T], dp_error[h->T], sum = 0, sum_error = 0;
    const double *q = h->q + i * HS, *dout = h->dout + i * HS;
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
        double score = p[j] == 0 ? 0 : h->lse[i] + log(p[j]);
        relative[j] =
            expm1(score_error[j] + h->lse_bound[i] + 3 * U_FP32 * (fabs(score) + fabs(h->lse[i]))) + 8 * U_FP32;
        dp[j] = dot(dout, h->v + j * HS, HS);
        dp_error[j] = (double)(HS + 2) * U_FP32 * dot_magnitude(dout, h->v + j * HS, HS);
        sum += p[j] * dp[j];
        sum_error += p[j] * (fabs(dp[j]) * (relative[j] + additions) + dp_error[j]);
    }
    if (h->sum_of_out) {
        sum_error = (double)(HS + 2) * U_FP32 * dot_magnitude(dout, h->out + i * HS, HS);
        for (int64_t d = 0; d < HS; d++) {
            double out_bound = h->out_bound[i * HS + d], largest = fabs(h->out[i * HS + d]) + out_bound;
            sum_error += fabs(dout[d]) * (out_bound + U_BF16 * largest);
        }
    }
    for (int64_t j = reference_begin(h, i); j < reference_end(h, i); j++) {
        double ds = p[j] * (dp[j] - sum) * h->scale;
        double unrounded = h->scale * p[j] *
                           (relative[j] * fabs(dp[j] - sum) +
                            (1 + relative[j]) * (dp_error[j] + sum_error + 4 * U_FP32 * (fabs(dp[j]) + fabs(sum))));
        double ds_error =
            unrounded + (one_rounding + additions) * (fabs(ds) + unrounded) + 0x1p-125 * (fabs(dp[j]) + fabs(sum));
        double p_error = p[j] * (relative[j] + one_rounding + additions) + 0x1p-125;
        for (int64_t d = 0; d < HS; d++) {
            double k = h->k[j * HS + d];
            h->gradient[0][i * HS + d] += ds * k, h->bound[0][i * HS + d] += ds_error * fabs(k);
            h->gradient[1][j * HS + d] += ds * q[d], h->bound[1][j * HS + d] += ds_error * fabs(q[d]);
            h->gradient[2][j * HS + d] += p[j] * dout[d], h->bound[2][j * HS + d] += p_error * fabs(dout[d]);
        }
    }
}

static inline double *take_zeros(int64_t count) {
    return memset(take_doubles(count), 0, (size_t)count * sizeof(double));
}

static inline double *take_block(Tensor t, int64_t first_row, int64_t first_col, int64_t rows, int64_t cols) {
    double *values = take_doubles(rows * cols);
    for (int64_t i = 0; i < rows * cols; i++) {
        values[i] = tensor_get(t, first_row + i / cols, first_col + i % cols);
    }
    return values;
}

// Computes what one query head of one sequence gives and what each value may be off by, before it
// is rounded at its store; of the gradients of keys and values, its own share. `stored` is what
// probabilities and their gradients are rounded to before they are multiplied with tokens;
// `sum_of_out` as in HeadReference.
static inline HeadReference attention_reference(Tensor qkv, Tensor dout, int64_t b, int64_t head, AttentionShape shape,
                                                Format stored, bool sum_of_out) {
    int64_t T = shape.T, HS = shape.HS, group = shape.NH / shape.NKV, kv = head / group;
    HeadReference h = {.T = T,
                       .HS = HS,
                       .causal = shape.causal,
                       .positions = shape.by_document ? shape.positions + b * T : NULL,
                       .sum_of_out = sum_of_out,
                       .additions = (double)(group * T),
                       .scale = 1 / sqrt((double)HS)};
    h.q = take_block(qkv, b * T, head * HS, T, HS);
    h.k = take_block(qkv, b * T, (shape.NH + kv) * HS, T, HS);
    h.v = take_block(qkv, b * T, (shape.NH + shape.NKV + kv) * HS, T, HS);
    h.dout = take_block(dout, b * T, head * HS, T, HS);
    h.out = take_zeros(T * HS), h.out_bound = take_zeros(T * HS), h.lse = take_zeros(T), h.lse_bound = take_zeros(T);
    for (int i = 0; i < 3; i++) {
        h.gradient[i] = take_zeros(T * HS), h.bound[i] = take_zeros(T * HS);
    }
    double p[T], score_error[T];
    for (int64_t i = 0; i < T; i++) {
        h.lse[i] = reference_row(&h, i, p);
        reference_forward_row(&h, i, stored, p, score_error);
        reference_backward_row(&h, i, stored, p, score_error);
    }
    return h;
}

static inline AttentionShape as_many_keys(int64_t B, int64_t T, int64_t NH, int64_t HS) {
    return (AttentionShape){.B = B, .T = T, .NH = NH, .NKV = NH, .HS = HS, .causal = true};
}

// Adds the gradient of a head's queries, keys or values, (T, HS), where it belongs in (B*T, cols).
static inline void add_head(double *sum, int64_t cols, const double *head, AttentionShape shape, int64_t b,
                            int64_t first) {
    for (int64_t i = 0; i < shape.T * shape.HS; i++) {
        sum[(b * shape.T + i / shape.HS) * cols + first + i % shape.HS] += head[i];
    }
}
