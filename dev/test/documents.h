/*
A model whose attention stays within documents, against itself with each document in a sequence of
its own: losses and gradients are the same, but for the order of sums. For a backend's tests.
*/
#pragma once

#include "check.h"
#include "by_name.h"
#include "llmc/model/gpt.h"

enum { DOCUMENT_TOKENS = 2 * 150, END_OF_TEXT = 7 };

// Two sequences of 150 tokens. The second begins within a document and has one that begins with its
// last token; others are of one token and of more than a block of queries.
static const int64_t DOCUMENT_LENGTHS[] = {5, 1, 133, 11, 70, 79, 1};
static const bool HAS_BEGINNING[] = {true, true, true, true, false, true, true};
enum { NUM_DOCUMENTS = sizeof(DOCUMENT_LENGTHS) / sizeof(DOCUMENT_LENGTHS[0]) };

typedef struct {
    double loss;
    float *gradients; // of all parameters, one after the other
    int64_t count;
} DocumentResult;

static inline DocumentResult take_document_result(GPT *m) {
    DocumentResult r = {.loss = gpt_take_loss(m), .count = param_list_count(&m->params)};
    float *next = r.gradients = take_floats(r.count);
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        m->backend->copy_to_host(next, p->gradient, (size_t)param_count(p) * sizeof(float));
        next += param_count(p);
    }
    return r;
}

static inline GPT make_document_model(const Backend *backend, GPTConfig config, const char *recipe_name) {
    Recipe recipe = recipe_of(recipe_name);
    GPT model;
    gpt_create(&model, config, &recipe, backend, 2, DOCUMENT_TOKENS / 2, true, NULL);
    gpt_init(&model, INIT_GPT2, 42);
    gpt_refresh(&model);
    gpt_clear_gradients(&model);
    return model;
}

static inline void fill_document_tokens(int32_t *tokens, int32_t *targets, int64_t vocab_size) {
    fill_below(tokens, DOCUMENT_TOKENS, (int32_t)vocab_size);
    fill_below(targets, DOCUMENT_TOKENS, (int32_t)vocab_size);
    for (int64_t i = 0; i < DOCUMENT_TOKENS; i++) {
        if (tokens[i] == END_OF_TEXT) tokens[i]++;
    }
    for (int64_t i = 0, first = 0; i < NUM_DOCUMENTS; first += DOCUMENT_LENGTHS[i++]) {
        if (HAS_BEGINNING[i]) tokens[first] = END_OF_TEXT;
    }
}

// |a - b| / |b|, as vectors.
static inline double vector_distance(const float *a, const float *b, int64_t count) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    return sqrt(difference / size);
}

// Checks that documents in one batch give the mean loss and gradients of documents apart, within
// `bound`, and that without a mask they don't.
static inline void check_documents(const Backend *backend, GPTConfig config, const char *recipe, double bound) {
    int32_t tokens[DOCUMENT_TOKENS], targets[DOCUMENT_TOKENS];
    fill_document_tokens(tokens, targets, config.vocab_size);
    GPT apart = make_document_model(backend, config, recipe), unmasked = make_document_model(backend, config, recipe);
    config.mask_documents = true;
    config.end_of_text = END_OF_TEXT;
    GPT packed = make_document_model(backend, config, recipe);
    double loss = 0;
    for (int64_t i = 0, first = 0; i < NUM_DOCUMENTS; first += DOCUMENT_LENGTHS[i++]) {
        double weight = (double)DOCUMENT_LENGTHS[i] / DOCUMENT_TOKENS;
        gpt_loss_and_gradients(&apart, tokens + first, targets + first, 1, DOCUMENT_LENGTHS[i], weight);
        loss += weight * gpt_take_loss(&apart);
    }
    gpt_loss_and_gradients(&packed, tokens, targets, 2, DOCUMENT_TOKENS / 2, 1);
    gpt_loss_and_gradients(&unmasked, tokens, targets, 2, DOCUMENT_TOKENS / 2, 1);
    DocumentResult a = take_document_result(&packed), b = take_document_result(&apart),
                   other = take_document_result(&unmasked);
    double of_loss = fabs(a.loss / loss - 1), of_gradients = vector_distance(a.gradients, b.gradients, a.count);
    printf("    %s: packed against apart: loss %.1e, gradients %.1e, bound %.1e, margin %.1f; unmasked: %.1e\n", recipe,
           of_loss, of_gradients, bound, bound / fmax(of_loss, of_gradients),
           vector_distance(other.gradients, b.gradients, a.count));
    assert_true(of_loss <= bound && of_gradients <= bound);
    assert_true(vector_distance(other.gradients, b.gradients, a.count) > 10 * bound);
    assert_true(fabs(gpt_loss(&packed, tokens, targets, 2, DOCUMENT_TOKENS / 2) / a.loss - 1) <= bound);
    gpt_free(&apart);
    gpt_free(&packed);
    gpt_free(&unmasked);
    pool_release();
}
