/*
Sample: from logits to the next token, and text that the model writes, token by token.
*/
#pragma once

#include "plan.h"

#include <signal.h>

// Draws a token id in [0, vocab_size) from softmax(logits / temperature), in double precision,
// among the `top_k` largest logits (0: all; of equal ones the lower ids). `uniform` in [0, 1)
// decides: the same arguments give the same token. With temperature 0 it is the largest logit, of
// equal ones the lowest id. A logit of -Inf is never drawn. Returns -1 where a logit is NaN or
// +Inf, or all are -Inf.
int sample_token(const float *logits, int vocab_size, float temperature, int top_k, float uniform);

// Draws --sample-tokens tokens after the prompt, or fewer where `*stop` is no longer 0, under
// random numbers of their own for each `step`; with `stream`, prints them as they come. Returns
// prompt and continuation, (*bytes), to be freed. `others`: ranks that wait in sample_wait, and are
// told after each token that this one is still there; NULL: none.
char *sample_text(const Plan *plan, GPT *model, uint64_t step, FILE *stream, const volatile sig_atomic_t *stop,
                  Comm *others, size_t *bytes);

// Returns on the ranks that don't sample when the one that does has ended: a text can take longer
// than a rank may stay silent.
void sample_wait(Comm *comm);
