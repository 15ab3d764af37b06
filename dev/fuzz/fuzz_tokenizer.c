// The tokenizer file: every token is decoded, and text made of tokens encoded and decoded again.
#include "fuzz.h"
#include "llmc/data/tokenizer.h"

enum { MAX_TEXT = 512 };

static void check_text(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    int32_t ids[MAX_TEXT];
    char again[MAX_TEXT];
    int count = tokenizer_encode(tokenizer, text, bytes, ids), length;
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        const char *token = tokenizer_decode(tokenizer, ids[i], &length);
        MUST(token && ids[i] != tokenizer->end_of_text && used + (size_t)length <= bytes);
        memcpy(again + used, token, (size_t)length);
        used += (size_t)length;
    }
    MUST(count < 0 || (used == bytes && memcmp(text, again, bytes) == 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static FILE *sink;
    if (!sink) sink = fopen("/dev/null", "w");
    Error error = {""};
    Tokenizer tokenizer;
    char *path = fuzz_write("tokenizer.bin", data, size), text[MAX_TEXT];
    if (tokenizer_open(&tokenizer, path, &error)) {
        size_t bytes = 0;
        int length;
        MUST(tokenizer.end_of_text >= 0 && tokenizer.end_of_text < tokenizer.vocab_size);
        for (int id = 0; id < tokenizer.vocab_size; id++) {
            const char *token = tokenizer_decode(&tokenizer, id, &length);
            MUST(token && length > 0);
            if (id == tokenizer.end_of_text || bytes + (size_t)length > MAX_TEXT) continue;
            memcpy(text + bytes, token, (size_t)length);
            bytes += (size_t)length;
        }
        MUST(!tokenizer_decode(&tokenizer, tokenizer.vocab_size, &length) && length == 0);
        check_text(&tokenizer, text, bytes);
        token_print_safe(sink, text, bytes);
        tokenizer_close(&tokenizer);
    } else {
        fuzz_check_sentence(error.message, sizeof(error.message));
    }
    free(path);
    return 0;
}
