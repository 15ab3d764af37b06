#include "sample.h"
#include "llmc/base/random.h"
#include "sampler.h"

#include <stdlib.h>
#include <string.h>

// Returns how many bytes of `text` are whole characters of UTF-8: a token may hold part of one.
static size_t whole_characters(const char *text, size_t bytes) {
    for (size_t back = 1; back <= 3 && back <= bytes; back++) {
        unsigned char byte = (unsigned char)text[bytes - back];
        if ((byte & 0xC0) == 0x80) continue;
        size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
        return length > back ? bytes - back : bytes;
    }
    return bytes;
}

char *sample_text(const Plan *p, GPT *model, uint64_t step, FILE *stream, const volatile sig_atomic_t *stop,
                  size_t *bytes) {
    const Settings *s = &p->line.settings;
    int64_t V = p->config.vocab_size, T = p->T, length = p->num_prompt_tokens < T ? p->num_prompt_tokens : T;
    int32_t *tokens = allocate((size_t)T * sizeof(int32_t));
    float *logits = allocate((size_t)V * sizeof(float));
    enum { LENGTH_STEP = 64, LONGEST_TOKEN = 255 };
    char *text = allocate(strlen(s->prompt) + (size_t)s->sample_tokens * LONGEST_TOKEN + 1);
    size_t printed = 0;
    *bytes = strlen(s->prompt);
    memcpy(text, s->prompt, *bytes);
    memcpy(tokens, p->prompt + p->num_prompt_tokens - length, (size_t)length * sizeof(int32_t));
    for (int64_t i = 0; i < s->sample_tokens && !*stop; i++) {
        // In steps, so that GEMMs have few shapes; tokens after `length` can't be seen by those
        // before.
        int64_t forwarded = (length + LENGTH_STEP - 1) / LENGTH_STEP * LENGTH_STEP;
        gpt_logits(model, logits, tokens, 1, forwarded < T ? forwarded : T, length - 1, 1);
        float uniform = random_uniform((uint64_t)s->seed, SAMPLE_STREAMS + step, (uint64_t)i);
        int token = sample_token(logits, (int)V, (float)s->temperature, (int)s->top_k, uniform);
        if (token < 0 || token == p->tokenizer.end_of_text) break;
        if (length == T) { // the second half is the context of what follows
            length = T / 2;
            memmove(tokens, tokens + T - length, (size_t)length * sizeof(int32_t));
        }
        tokens[length++] = token;
        int token_bytes;
        const char *piece = tokenizer_decode(&p->tokenizer, token, &token_bytes);
        if (token_bytes) memcpy(text + *bytes, piece, (size_t)token_bytes);
        *bytes += (size_t)token_bytes;
        size_t whole = whole_characters(text, *bytes);
        if (stream && whole > printed) {
            token_print_safe(stream, text + printed, whole - printed);
            fflush(stream);
            printed = whole;
        }
    }
    if (stream) token_print_safe(stream, text + printed, *bytes - printed);
    free(tokens);
    free(logits);
    return text;
}
