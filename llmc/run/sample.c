#include "sample.h"
#include "llmc/base/random.h"
#include "llmc/numerics/mx.h" // bit casts

#include <math.h>
#include <stdlib.h>
#include <string.h>

// The next token

// Returns the id of the largest logit; -1 where one is NaN or +Inf, or none is finite.
static int find_largest(const float *logits, int vocab_size) {
    int largest = -1;
    for (int id = 0; id < vocab_size; id++) {
        if (isnan(logits[id]) || logits[id] == INFINITY) return -1;
        if (logits[id] > (largest < 0 ? -INFINITY : logits[largest])) largest = id;
    }
    return largest;
}

// Returns the place of a number in the order of all floats; float_at is the inverse.
static uint32_t place_of(float x) {
    uint32_t bits = mx_float_bits(x);
    return bits ^ (bits >> 31 ? UINT32_MAX : 1u << 31);
}

static float float_at(uint32_t place) { return mx_bits_float(place ^ (place >> 31 ? 1u << 31 : UINT32_MAX)); }

// Returns the value of the top_k-th largest logit, and counts those equal to it that are among the
// top_k. It is found bit by bit: the last place that top_k logits reach.
static float find_threshold(const float *logits, int vocab_size, int top_k, int *num_equal) {
    uint32_t place = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        int reach = 0;
        for (int id = 0; id < vocab_size; id++) {
            reach += place_of(logits[id]) >= (place | bit);
        }
        if (reach >= top_k) place |= bit;
    }
    float threshold = float_at(place);
    *num_equal = top_k;
    for (int id = 0; id < vocab_size; id++) {
        *num_equal -= logits[id] > threshold;
    }
    return threshold;
}

// Returns the id at which the sum of the weights so far goes beyond `left`; `otherwise` where
// rounding takes the last one.
static int draw_by_weight(const double *weights, int vocab_size, double left, int otherwise) {
    for (int id = 0; id < vocab_size; id++) {
        if (left < weights[id]) return id;
        left -= weights[id];
    }
    return otherwise;
}

int sample_token(const float *logits, int vocab_size, float temperature, int top_k, float uniform) {
    int largest = find_largest(logits, vocab_size);
    if (largest < 0 || !(temperature > 0)) return largest;
    float threshold = -INFINITY;
    int num_equal = 0;
    if (top_k > 0 && top_k < vocab_size) threshold = find_threshold(logits, vocab_size, top_k, &num_equal);

    double *weights = allocate((size_t)vocab_size * sizeof(*weights)); // 0: never drawn
    double sum = 0;
    for (int id = 0; id < vocab_size; id++) {
        bool drawn = logits[id] > threshold || (logits[id] == threshold && num_equal-- > 0);
        if (!drawn || logits[id] == -INFINITY) continue;
        weights[id] = exp(((double)logits[id] - (double)logits[largest]) / (double)temperature);
        sum += weights[id];
    }
    int token = draw_by_weight(weights, vocab_size, (double)uniform * sum, largest);
    free(weights);
    return token;
}

// Text

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

enum { LENGTH_STEP = 64 };

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
    sample.length = min_int64(p->num_prompt_tokens, p->T);
    sample.tokens = allocate((size_t)p->T * sizeof(int32_t));
    sample.logits = allocate((size_t)p->config.vocab_size * sizeof(float));
    sample.text = allocate(sample.bytes + (size_t)s->sample_tokens * p->tokenizer.longest + 1);
    memcpy(sample.text, s->prompt, sample.bytes);
    memcpy(sample.tokens, p->prompt + p->num_prompt_tokens - sample.length, (size_t)sample.length * sizeof(int32_t));
    return sample;
}

// Returns the token that `uniform` draws after those there are, as sample_token does. The model
// sees a multiple of LENGTH_STEP tokens, so that GEMMs have few shapes: those before can't see the
// rest, but a scale of the whole tensor can.
static int draw_token(Sample *sample, float uniform) {
    const Settings *s = &sample->plan->line.settings;
    int64_t T = sample->plan->T, seen = (sample->length + LENGTH_STEP - 1) / LENGTH_STEP * LENGTH_STEP;
    gpt_logits(sample->model, sample->logits, sample->tokens, 1, min_int64(seen, T), sample->length - 1, 1);
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
                  Comm *others, size_t *bytes) {
    const Settings *s = &p->line.settings;
    Sample sample = begin_sample(p, model);
    gpt_set_draws(model, (uint64_t)s->seed, (int64_t)step, 0);
    for (int64_t i = 0; i < s->sample_tokens && !*stop; i++) {
        int token = draw_token(&sample, random_uniform((uint64_t)s->seed, SAMPLE_STREAMS + step, (uint64_t)i));
        if (token < 0 || token == p->tokenizer.end_of_text) break;
        add_token(&sample, token);
        print_up_to(&sample, whole_characters(sample.text, sample.bytes), stream);
        if (others) comm_any(others, true);
    }
    if (others) comm_any(others, false);
    print_up_to(&sample, sample.bytes, stream);
    free(sample.tokens);
    free(sample.logits);
    *bytes = sample.bytes;
    return sample.text;
}

void sample_wait(Comm *comm) {
    while (comm_any(comm, false))
        continue;
}
