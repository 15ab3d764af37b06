/*
Sample: text that the model writes, token by token.
*/
#ifndef LLMC_SAMPLE_H
#define LLMC_SAMPLE_H

#include "plan.h"

#include <signal.h>

// Draws --sample-tokens tokens after the prompt, or fewer where `*stop` is no longer 0, under
// random numbers of their own for each `step`; with `stream`, prints them as they come. Returns
// prompt and continuation, (*bytes), to be freed.
char *sample_text(const Plan *plan, GPT *model, uint64_t step, FILE *stream, const volatile sig_atomic_t *stop,
                  size_t *bytes);

#endif
