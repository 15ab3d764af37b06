/*
dump_logits CHECKPOINT_DIR TOKENS.i32 OUT.f32: writes the logits that this program's model gives,
under the `fp32` recipe, for one sequence of token ids (little-endian int32), as (tokens,
vocabulary) little-endian FP32, row-major. dev/reference/check_transformers.py compares them.
*/
#include "llmc/run/checkpoint.h"

#include <stdlib.h>

static int32_t *read_tokens(const char *path, const GPTConfig *config, int64_t *count, Error *error) {
    size_t bytes;
    int32_t *tokens = (int32_t *)read_file(path, (size_t)config->max_seq_len * sizeof(int32_t), &bytes, error);
    if (!tokens) return NULL;
    *count = (int64_t)(bytes / sizeof(int32_t));
    bool ok = true;
    if (*count == 0 || bytes % sizeof(int32_t) != 0) {
        ok = error_set(error, "%s has %zu bytes; it must hold int32 token ids, at least one", path, bytes);
    }
    for (int64_t i = 0; ok && i < *count; i++) {
        if (tokens[i] < 0 || tokens[i] >= config->vocab_size) {
            ok = error_set(error, "%s: token %ld is %d, which isn't in the model's vocabulary of %ld", path, i,
                           tokens[i], config->vocab_size);
        }
    }
    if (ok) return tokens;
    free(tokens);
    return NULL;
}

static bool dump_logits(const char *directory, const char *tokens_path, const char *out_path, Error *error) {
    GPTConfig config;
    Recipe recipe;
    int64_t T;
    if (!checkpoint_read_config(&config, directory, error) || !recipe_named(&recipe, "fp32", error)) return false;
    int32_t *tokens = read_tokens(tokens_path, &config, &T, error);
    if (!tokens) return false;

    GPT model;
    gpt_create(&model, config, &recipe, backend_cpu(), 1, T, false, NULL);
    bool ok = checkpoint_load_weights(&model, directory, error);
    if (ok) {
        gpt_refresh(&model);
        size_t bytes = (size_t)(T * config.vocab_size) * sizeof(float);
        float *logits = allocate(bytes);
        gpt_logits(&model, logits, tokens, 1, T, 0, T);
        ok = write_file_atomic(out_path, logits, bytes, error);
        free(logits);
    }
    gpt_free(&model);
    free(tokens);
    return ok;
}

int main(int argc, char **argv) {
    Error error;
    if (argc != 4) die("usage: dump_logits CHECKPOINT_DIR TOKENS.i32 OUT.f32");
    if (!dump_logits(argv[1], argv[2], argv[3], &error)) die("%s", error.message);
    return 0;
}
