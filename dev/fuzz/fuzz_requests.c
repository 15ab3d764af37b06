// tokenizer.json beside a fixed tokenizer.bin, and requests that are encoded by it, of --score and
// of tasks. An input is the one, a zero byte and the other.
#include "fuzz.h"
#include "llmc/base/util.h"
#include "llmc/data/tokenizer.h"
#include "llmc/run/score.h"
#include "llmc/run/task_score.h"

enum { MAX_TEXT = 512 };

static const char *const WORDS[] = {"th", "he", "the", " t", " the", "\xE2\x96\x81", "\xE2\x96\x81t", "<|end|>"};

// Writes a tokenizer of all bytes and some words, the last of which ends texts. Returns its path.
static char *write_tokenizer(void) {
    static uint8_t file[4096];
    const uint32_t header[] = {20240328, 3, 256 + COUNT(WORDS), 255 + COUNT(WORDS)};
    size_t at = 1024;
    memcpy(file, header, sizeof(header));
    for (int id = 0; id < 256 + COUNT(WORDS); id++) {
        char byte = (char)id;
        const char *text = id < 256 ? &byte : WORDS[id - 256];
        uint16_t length = (uint16_t)(id < 256 ? 1 : strlen(text));
        memcpy(file + at, &length, sizeof(length));
        memcpy(file + at + sizeof(length), text, length);
        at += sizeof(length) + length;
    }
    return fuzz_write("tokenizer.bin", file, at);
}

static void check_encoding(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    int32_t *ids = allocate(tokenizer_most_ids(bytes) * sizeof(*ids));
    int count = tokenizer_encode(tokenizer, text, bytes, ids);
    MUST(count < 0 ? strlen(tokenizer_why_not(tokenizer)) > 0 : (size_t)count <= tokenizer_most_ids(bytes));
    for (int i = 0; i < count; i++) {
        MUST(ids[i] >= 0 && ids[i] < tokenizer->vocab_size);
    }
    free(ids);
}

static void check_requests(ScoreRequests *all, const Tokenizer *tokenizer) {
    for (int64_t i = 0; i < all->count; i++) {
        ScoreRequest *request = &all->requests[i];
        MUST(request->context >= 1 && request->length > request->context);
        for (int64_t k = 0; k < request->length; k++) {
            MUST(request->tokens[k] >= 0 && request->tokens[k] < tokenizer->vocab_size);
        }
        request->score.logprob = -1;
    }
}

static void check_tasks(const ScoreRequests *all, const char *path) {
    Error error = {""};
    if (!task_check(all, path, &error)) {
        fuzz_check_sentence(error.message, sizeof(error.message));
        return;
    }
    TaskScore *scores = allocate((size_t)all->count * sizeof(*scores));
    MUST(task_scores(scores, all) >= 1);
    free(scores);
}

static void check_file(const char *path, const Tokenizer *tokenizer, bool of_tasks, FILE *sink) {
    Error error = {""};
    ScoreRequests all;
    if (!score_read(&all, path, tokenizer, of_tasks, &error)) {
        fuzz_check_sentence(error.message, sizeof(error.message));
        return;
    }
    check_requests(&all, tokenizer);
    if (of_tasks) check_tasks(&all, path);
    score_write(&all, sink);
    score_free(&all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char *tokenizer_path;
    static FILE *sink;
    if (!tokenizer_path) tokenizer_path = write_tokenizer();
    if (!sink) sink = fopen("/dev/null", "w");
    const uint8_t *zero = size > 0 ? memchr(data, 0, size) : NULL, *text = zero ? zero + 1 : data + size;
    size_t bytes = (size_t)(data + size - text);
    char *rules_path = fuzz_write("tokenizer.json", data, zero ? (size_t)(zero - data) : size);
    char *requests_path = fuzz_write("requests.jsonl", text, bytes);
    Error error = {""};
    Tokenizer tokenizer;
    MUST(tokenizer_open(&tokenizer, tokenizer_path, &error));
    check_encoding(&tokenizer, (const char *)text, bytes < MAX_TEXT ? bytes : MAX_TEXT);
    check_file(requests_path, &tokenizer, false, sink);
    check_file(requests_path, &tokenizer, true, sink);
    tokenizer_close(&tokenizer);
    free(rules_path);
    free(requests_path);
    return 0;
}
