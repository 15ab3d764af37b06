/*
dump_tokens TOKENIZER.bin: reads texts, each ended by a 0 byte, and prints the ids that this program
encodes each to, a line for a text; "! " and why, where it can't. dev/test/test_tokenizers.py
compares them with the tokenizers library's.
*/
#include "llmc/data/tokenizer.h"

#include <stdlib.h>
#include <string.h>

static void print_ids(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    int32_t *ids = allocate(tokenizer_most_ids(bytes) * sizeof(*ids));
    int count = tokenizer_encode(tokenizer, text, bytes, ids);
    if (count < 0) printf("! %s", tokenizer_why_not(tokenizer));
    for (int i = 0; i < count; i++) {
        printf("%d ", ids[i]);
    }
    printf("\n");
    free(ids);
}

int main(int argc, char **argv) {
    Tokenizer tokenizer;
    Error error;
    char *text = NULL;
    size_t capacity = 0;
    if (argc != 2) die("usage: dump_tokens TOKENIZER.bin < TEXTS");
    if (!tokenizer_open(&tokenizer, argv[1], &error)) bad_input(&error);
    while (getdelim(&text, &capacity, 0, stdin) > 0) {
        print_ids(&tokenizer, text, strlen(text));
    }
    free(text);
    tokenizer_close(&tokenizer);
    return 0;
}
