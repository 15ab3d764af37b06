/*
Sampling: from the logits of one position to the next token.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

// Draws a token id in [0, vocab_size) from softmax(logits / temperature), in double precision,
// among the `top_k` largest logits (0: all; of equal ones the lower ids). `uniform` in [0, 1)
// decides: the same arguments give the same token. With temperature 0 it is the largest logit, of
// equal ones the lowest id. A logit of -Inf is never drawn. Returns -1 where a logit is NaN or
// +Inf, or all are -Inf.
int sample_token(const float *logits, int vocab_size, float temperature, int top_k, float uniform);

#endif
