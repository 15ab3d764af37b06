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

enum { LENGTH_STEP = 64, LONGEST_TOKEN = 255 };

// A text that grows, and the tokens of it that the model sees.
typedef struct {
    const Plan *plan;
    GPT *model;
    float *logits;   // (vocab_size)
    int32_t *tokens; // (T), of which `length` are there
    int64_t length;
    char *text;
    size_t bytes, printed; // of text
} Sample;

// Begins with the prompt, of whose tokens the last T are seen.
static Sample begin_sample(const Plan *p, GPT *model) {
    const Settings *s = &p->line.settings;
    Sample sample = {.plan = p, .model = model, .bytes = strlen(s->prompt)};
    sample.length = p->num_prompt_tokens < p->T ? p->num_prompt_tokens : p->T;
    sample.tokens = allocate((size_t)p->T * sizeof(int32_t));
    sample.logits = allocate((size_t)p->config.vocab_size * sizeof(float));
    sample.text = allocate(sample.bytes + (size_t)s->sample_tokens * LONGEST_TOKEN + 1);
    memcpy(sample.text, s->prompt, sample.bytes);
    memcpy(sample.tokens, p->prompt + p->num_prompt_tokens - sample.length, (size_t)sample.length * sizeof(int32_t));
    return sample;
}

// Returns the token that `uniform` draws after those there are, as sample_token does. The model sees
// a multiple of LENGTH_STEP tokens, so that GEMMs have few shapes: those before can't see the rest.
static int draw_token(Sample *sample, float uniform) {
    const Settings *s = &sample->plan->line.settings;
    int64_t T = sample->plan->T, seen = (sample->length + LENGTH_STEP - 1) / LENGTH_STEP * LENGTH_STEP;
    gpt_logits(sample->model, sample->logits, sample->tokens, 1, seen < T ? seen : T, sample->length - 1, 1);
    return sample_token(sample->logits, (int)sample->plan->config.vocab_size, (float)s->temperature, (int)s->top_k,
                        uniform);
}

// Adds a token and its text. Where T tokens are there, the second half stays as the context.
static void add_token(Sample *sample, int token) {
    int64_t T = sample->plan->T;
    if (sample->length == T) {
        sample->length = T / 2;
        memmove(sample->tokens, sample->tokens + T - sample->length, (size_t)sample->length * sizeof(int32_t));
    }
    sample->tokens[sample->length++] = token;
    int bytes;
    const char *piece = tokenizer_decode(&sample->plan->tokenizer, token, &bytes);
    if (bytes) memcpy(sample->text + sample->bytes, piece, (size_t)bytes);
    sample->bytes += (size_t)bytes;
}

// Prints the text up to byte `end`, where that isn't printed yet.
static void print_up_to(Sample *sample, size_t end, FILE *stream) {
    if (!stream || end <= sample->printed) return;
    token_print_safe(stream, sample->text + sample->printed, end - sample->printed);
    fflush(stream);
    sample->printed = end;
}

char *sample_text(const Plan *p, GPT *model, uint64_t step, FILE *stream, const volatile sig_atomic_t *stop,
                  size_t *bytes) {
    const Settings *s = &p->line.settings;
    Sample sample = begin_sample(p, model);
    for (int64_t i = 0; i < s->sample_tokens && !*stop; i++) {
        int token = draw_token(&sample, random_uniform((uint64_t)s->seed, SAMPLE_STREAMS + step, (uint64_t)i));
        if (token < 0 || token == p->tokenizer.end_of_text) break;
        add_token(&sample, token);
        print_up_to(&sample, whole_characters(sample.text, sample.bytes), stream);
    }
    print_up_to(&sample, sample.bytes, stream);
    free(sample.tokens);
    free(sample.logits);
    *bytes = sample.bytes;
    return sample.text;
}
