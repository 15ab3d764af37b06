// The token-file reader: opens the input as two shards of a training set and reads two epochs of
// windows.
#include "fuzz.h"
#include <unistd.h>
#include "llmc/data/dataloader.h"

enum { MAX_SEQ_LEN = 64 };

static void read_windows(const DataLoader *loader) {
    int32_t tokens[MAX_SEQ_LEN], targets[MAX_SEQ_LEN];
    Error error;
    for (int64_t sample = 0; sample < 2 * loader->num_windows; sample++) {
        // Sets this small are checked when they are opened.
        MUST(dataloader_batch(loader, sample, 1, tokens, targets, &error));
        for (int64_t i = 0; i < loader->seq_len; i++) {
            MUST(tokens[i] >= 0 && tokens[i] < loader->vocab_size);
            MUST(targets[i] >= 0 && targets[i] < loader->vocab_size);
            MUST(i == 0 || tokens[i] == targets[i - 1]);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int64_t seq_lens[] = {1, 2, 7, MAX_SEQ_LEN};
    Error error = {""};
    char *path = fuzz_write("a.bin", data, size), pattern[600], second[600];
    snprintf(pattern, sizeof(pattern), "%s/*.bin", fuzz_directory());
    snprintf(second, sizeof(second), "%s/b.bin", fuzz_directory());
    if (access(second, F_OK) != 0) MUST(symlink("a.bin", second) == 0);
    for (int i = 0; i < 4; i++) {
        DataLoader loader;
        if (dataloader_open(&loader, pattern, seq_lens[i], 42, i % 2, 65536, &error)) {
            MUST(loader.num_shards == 2);
            read_windows(&loader);
            dataloader_close(&loader);
        } else {
            fuzz_check_sentence(error.message, sizeof(error.message));
        }
    }
    free(path);
    return 0;
}
