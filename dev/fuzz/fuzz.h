/*
What the fuzz targets share: each writes libFuzzer's bytes into a file and opens it as a user's file
is opened.
*/
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// libFuzzer's entry point: runs one input, returns 0.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// What must hold whatever the input: where it doesn't, libFuzzer keeps the input.
#define MUST(condition)                                                                \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: must hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                   \
        }                                                                              \
    } while (0)

// A directory of this process's own, in memory where TMPDIR doesn't say otherwise. scripts and
// people remove it.
static inline const char *fuzz_directory(void) {
    static char path[512];
    if (!path[0]) {
        const char *parent = getenv("TMPDIR");
        snprintf(path, sizeof(path), "%s/fuzz-XXXXXX", parent ? parent : "/dev/shm");
        MUST(mkdtemp(path));
    }
    return path;
}

// Writes the file `name` into that directory and returns its path, to be freed.
static inline char *fuzz_write(const char *name, const uint8_t *data, size_t size) {
    char *path;
    MUST(asprintf(&path, "%s/%s", fuzz_directory(), name) > 0);
    FILE *stream = fopen(path, "wb");
    MUST(stream && fwrite(data, 1, size, stream) == size);
    MUST(fclose(stream) == 0);
    return path;
}

// A reader that returned false must have said why in one sentence.
static inline void fuzz_check_sentence(const char *message, size_t capacity) {
    size_t length = strnlen(message, capacity);
    MUST(length > 0 && length < capacity && !strchr(message, '\n'));
}
