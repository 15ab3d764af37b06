#include "score.h"
#include "llmc/cpu/vector_math.h"
#include "llmc/files/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FILE_BYTES = 1 << 30, LENGTH_STEP = 16 };

// Requests

// Returns the bytes of `text` before the white space at its end: what Python's rstrip() leaves,
// which also takes four separators that are no white space in Unicode.
static size_t without_trailing_space(const char *text, size_t bytes) {
    size_t end = 0;
    for (size_t at = 0, length; at < bytes; at += length) {
        bool is_space = tokenizer_is_space(text + at, bytes - at, &length);
        if (!is_space && (text[at] < 0x1C || text[at] > 0x1F)) end = at + length;
    }
    return end;
}

// Makes the tokens of a request: the context's own, and of those that both have together what comes
// after as many, as lm-eval does. Where none would be left, since both melt into fewer tokens, the
// continuation's own. Returns false where a text can't be encoded.
static bool encode(ScoreRequest *request, const Tokenizer *tokenizer, const char *context, const char *continuation) {
    size_t context_bytes = without_trailing_space(context, strlen(context));
    char *text = format_string("%s%s", context, continuation);
    size_t bytes = strlen(text);
    int32_t *tokens = allocate((1 + tokenizer_most_ids(bytes) + tokenizer_most_ids(0)) * sizeof(*tokens));
    tokens[0] = tokenizer->end_of_text;
    int first = context_bytes == 0; // end-of-text stays as an empty context's token
    int together = tokenizer_encode(tokenizer, text, bytes, tokens + first);
    int alone = tokenizer_encode(tokenizer, text, context_bytes, tokens + first);
    if (together >= 0 && together <= alone) {
        alone = tokenizer_encode(tokenizer, text, context_bytes, tokens);
        together = alone + tokenizer_encode(tokenizer, text + context_bytes, bytes - context_bytes, tokens + alone);
    }
    free(text);
    request->tokens = tokens;
    request->context = first + alone;
    request->length = first + together;
    return together >= 0;
}

// Keeps an id as the JSON that it is given back as: a string, or a number that a double holds.
static bool read_id(ScoreRequest *request, const JsonValue *line, Error *error) {
    JsonWriter w = {0};
    double number;
    int64_t whole;
    const char *text = json_string(line, "id");
    bool is_whole = json_int64(line, "id", &whole), is_number = json_number(line, "id", &number);
    if (text) json_write_string(&w, NULL, text);
    if (is_whole) json_write_int64(&w, NULL, whole);
    if (is_number && !is_whole && fabs(number) < 0x1p53) json_write_double(&w, NULL, number);
    request->id = w.text;
    return w.text || error_set(error, "\"id\" must be a string, or a number below 2^53: give the request one");
}

// Counts the characters of a text in UTF-8.
static int64_t count_characters(const char *text) {
    int64_t count = 0;
    for (; *text; text++) {
        count += (*text & 0xC0) != 0x80;
    }
    return count;
}

// Takes what a line says of a task.
static bool read_question(ScoreRequest *request, const JsonValue *line, Error *error) {
    const char *task = json_string(line, "task");
    if (!task && json_get(line, "task")) {
        return error_set(error, "\"task\" must be a string: write \"task\": \"name\"");
    }
    request->task = format_string("%s", task ? task : "");
    request->gold = true;
    bool is_whole = json_int64(line, "question", &request->question);
    if (json_get(line, "question") && (!is_whole || request->question < 0)) {
        return error_set(error,
                         "\"question\" must be a whole number, 0 or more, the same for all answers of a question");
    }
    if (!json_bool(line, "gold", &request->gold) && json_get(line, "gold")) {
        return error_set(error, "\"gold\" must be true, of the right answer, or false");
    }
    return true;
}

static bool read_request(ScoreRequest *request, const JsonValue *line, const Tokenizer *tokenizer, bool of_tasks,
                         Error *error) {
    const char *context = json_string(line, "context"), *continuation = json_string(line, "continuation");
    if (!json_is_object(line) || !context || !continuation) {
        return error_set(error, "a request is {\"id\": 1, \"context\": \"text\", \"continuation\": \" text\"}, and "
                                "this line lacks one of them: write it so");
    }
    if (!continuation[0]) return error_set(error, "\"continuation\" is empty: there is nothing to score in it");
    if (!read_id(request, line, error)) return false;
    request->bytes = (int64_t)strlen(continuation);
    request->characters = count_characters(continuation + (continuation[0] == ' '));
    if (of_tasks && !read_question(request, line, error)) return false;
    return encode(request, tokenizer, context, continuation) ||
           error_set(error, "it can't be encoded: %s", tokenizer_why_not(tokenizer));
}

// Reads the request of a line of `bytes` bytes.
static bool read_line(ScoreRequest *request, const char *line, size_t bytes, const Tokenizer *tokenizer, bool of_tasks,
                      Error *error) {
    JsonValue *json = json_parse(line, bytes, error);
    bool ok = json && read_request(request, json, tokenizer, of_tasks, error);
    json_free(json);
    return ok;
}

static int64_t count_lines(const char *text, size_t bytes) {
    int64_t lines = bytes > 0 && text[bytes - 1] != '\n';
    for (size_t i = 0; i < bytes; i++) {
        lines += text[i] == '\n';
    }
    return lines;
}

bool score_read(ScoreRequests *all, const char *path, const Tokenizer *tokenizer, bool of_tasks, Error *error) {
    size_t bytes;
    Error detail;
    char *text = read_file(path, MAX_FILE_BYTES, &bytes, error);
    *all = (ScoreRequests){0};
    if (!text) return false;
    int64_t lines = count_lines(text, bytes);
    bool ok = lines > 0 || error_set(error, "%s is empty: it must hold a request a line", path);
    all->requests = allocate((size_t)lines * sizeof(*all->requests));
    for (const char *line = text; ok && all->count < lines; all->count++) {
        size_t left = bytes - (size_t)(line - text);
        const char *end = memchr(line, '\n', left);
        size_t length = end ? (size_t)(end - line) : left;
        all->requests[all->count].question = -(all->count + 1);
        ok = read_line(&all->requests[all->count], line, length, tokenizer, of_tasks, &detail) ||
             error_set(error, "%.300s, line %ld: %.600s", path, all->count + 1, detail.message);
        line += length + 1;
    }
    free(text);
    if (!ok) score_free(all);
    return ok;
}

void score_free(ScoreRequests *all) {
    for (int64_t i = 0; i < all->count; i++) {
        free(all->requests[i].id);
        free(all->requests[i].tokens);
        free(all->requests[i].task);
    }
    free(all->requests);
    *all = (ScoreRequests){0};
}

// Scores

// Returns the sum of e^(logit - largest), at most PIECE of them at a time in FP32.
static double sum_of_powers(const float *logits, int64_t vocab_size, float largest) {
    enum { PIECE = 64 };
    double sum = 0;
    for (int64_t first = 0; first < vocab_size; first += PIECE) {
        int64_t end = min_int64(first + PIECE, vocab_size);
        float piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int64_t id = first; id < end; id++) {
            piece += vector_exp(logits[id] - largest);
        }
        sum += (double)piece;
    }
    return sum;
}

// Returns the logarithm of the softmax of `target`, and whether its logit is the first of the
// largest; where a logit isn't a number, NaN and that it isn't. A multiple of 2^-24, as
// fine as FP32's logits from 1/2 to 1: sums of such have the same bits in any order, on any number
// of ranks.
static double log_softmax(const float *logits, int64_t vocab_size, int32_t target, bool *is_largest) {
    float largest = vector_max(logits, vocab_size);
    double logprob = (double)logits[target] - (double)largest - log(sum_of_powers(logits, vocab_size, largest));
    *is_largest = !isnan(logprob) && logits[target] == largest;
    for (int64_t id = 0; *is_largest && id < target; id++) {
        *is_largest = logits[id] < largest;
    }
    return rint(logprob * 0x1p24) * 0x1p-24;
}

// A part of a continuation that the model scores at a time, and what it sees for that.
typedef struct {
    ScoreRequest *request;
    const int32_t *tokens; // (length + 1): what is seen, and the last token, which isn't
    int64_t length, count; // tokens that are seen; tokens of the part, the last ones
} Window;

// Returns the part of a request's continuation that begins at `first`, seen through T positions.
static Window window_at(ScoreRequest *request, int64_t first, int64_t T) {
    int64_t end = min_int64(first + T, request->length), begin = max_int64(0, end - 1 - T);
    return (Window){request, request->tokens + begin, end - 1 - begin, end - first};
}

// Makes the windows of all requests, to be freed. Returns their number.
static int64_t make_windows(Window **windows, const ScoreRequests *all, int64_t T) {
    int64_t count = 0;
    for (int64_t i = 0; i < all->count; i++) {
        count += (all->requests[i].length - all->requests[i].context + T - 1) / T;
    }
    Window *next = *windows = allocate((size_t)count * sizeof(**windows));
    for (int64_t i = 0; i < all->count; i++) {
        for (int64_t first = all->requests[i].context; first < all->requests[i].length; first += T) {
            *next++ = window_at(&all->requests[i], first, T);
        }
    }
    return count;
}

// Adds a window to its request's score, by the logits (count, vocab_size) before its tokens.
static void add_score(const Window *window, const float *logits, int64_t vocab_size) {
    const int32_t *targets = window->tokens + window->length + 1 - window->count;
    double *logprobs = allocate((size_t)window->count * sizeof(*logprobs));
    bool greedy = true;
#pragma omp parallel for reduction(&& : greedy)
    for (int64_t i = 0; i < window->count; i++) {
        bool is_largest;
        logprobs[i] = log_softmax(logits + i * vocab_size, vocab_size, targets[i], &is_largest);
        greedy = greedy && is_largest;
    }
    for (int64_t i = 0; i < window->count; i++) {
        window->request->score.logprob += logprobs[i];
    }
    window->request->score.greedy &= greedy;
    free(logprobs);
}

// Scores B windows, which lie in rows of T tokens; what follows a window in its row isn't seen.
static void score_batch(const Window *windows, int64_t B, int64_t T, GPT *model) {
    int64_t V = model->config.vocab_size;
    int32_t *tokens = allocate((size_t)(B * T) * sizeof(*tokens));
    for (int64_t b = 0; b < B; b++) {
        memcpy(tokens + b * T, windows[b].tokens, (size_t)windows[b].length * sizeof(*tokens));
    }
    gpt_logits(model, NULL, tokens, B, T, 0, 0);
    for (int64_t b = 0; b < B; b++) {
        float *logits = allocate((size_t)(windows[b].count * V) * sizeof(*logits));
        gpt_logits_again(model, logits, b * T + windows[b].length - windows[b].count, windows[b].count);
        add_score(&windows[b], logits, V);
        free(logits);
    }
    free(tokens);
}

// The longest first, so that the first batches say whether memory suffices. Of equal ones those of
// the first request, so that batches are the same on every rank.
static int compare_lengths(const void *a, const void *b) {
    const Window *x = a, *y = b;
    if (x->length != y->length) return x->length > y->length ? -1 : 1;
    if (x->request != y->request) return x->request < y->request ? -1 : 1;
    return (x->tokens > y->tokens) - (x->tokens < y->tokens);
}

// Gives every rank the sum of what all have found.
static void share_scores(ScoreRequests *all, Comm *comm) {
    double *values = allocate((size_t)(2 * all->count) * sizeof(*values));
    for (int64_t i = 0; i < all->count; i++) {
        values[2 * i] = all->requests[i].score.logprob;
        values[2 * i + 1] = !all->requests[i].score.greedy;
    }
    comm_sum_doubles(comm, values, 2 * all->count);
    for (int64_t i = 0; i < all->count; i++) {
        all->requests[i].score = (Score){values[2 * i], values[2 * i + 1] == 0};
    }
    free(values);
}

void score_run(ScoreRequests *all, GPT *model, Comm *comm, const volatile sig_atomic_t *stop) {
    Window *windows;
    int64_t count = make_windows(&windows, all, model->T), turn = 0;
    for (int64_t i = 0; i < all->count; i++) {
        all->requests[i].score = (Score){.greedy = true};
    }
    qsort(windows, (size_t)count, sizeof(Window), compare_lengths);
    for (int64_t i = 0, B; i < count && !*stop; i += B, turn++) {
        // Few different lengths, so that GEMMs have few shapes.
        int64_t T = (windows[i].length + LENGTH_STEP - 1) / LENGTH_STEP * LENGTH_STEP;
        T = min_int64(T, model->T);
        B = min_int64(model->B * model->T / T, count - i);
        gpt_set_draws(model, model->draws.seed, model->draws.step, i);
        if (turn % comm->size == comm->rank) score_batch(windows + i, B, T, model);
    }
    free(windows);
    share_scores(all, comm);
}

void score_write(const ScoreRequests *all, FILE *stream) {
    for (int64_t i = 0; i < all->count; i++) {
        const ScoreRequest *request = &all->requests[i];
        JsonWriter w = {0};
        json_begin_object(&w, NULL);
        json_write_literal(&w, "id", request->id);
        json_write_double(&w, "logprob", request->score.logprob);
        json_write_int64(&w, "tokens", request->length - request->context);
        json_write_int64(&w, "bytes", request->bytes);
        json_write_bool(&w, "greedy", request->score.greedy);
        json_end_object(&w);
        fprintf(stream, "%s\n", w.text);
        json_writer_free(&w);
    }
}

void score_report(const ScoreRequests *all, int64_t T, double seconds, FILE *stream) {
    int64_t tokens = 0, long_ones = 0;
    for (int64_t i = 0; i < all->count; i++) {
        tokens += all->requests[i].length;
        long_ones += all->requests[i].length - 1 > T;
    }
    fprintf(stream, "scored %ld request%s, %ld tokens, in %.1f s", all->count, plural(all->count), tokens, seconds);
    if (long_ones) fprintf(stream, "; %ld of them longer than the %ld positions that the model sees", long_ones, T);
    fprintf(stream, "\n");
}
