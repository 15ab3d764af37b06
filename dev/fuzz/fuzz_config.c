// config.json of a checkpoint: the model that a hostile one may describe, and the memory it is said
// to take.
#include "fuzz.h"
#include "llmc/run/checkpoint.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Error error = {""};
    GPTConfig config = {0};
    char *path = fuzz_write("config.json", data, size);
    if (checkpoint_read_config(&config, fuzz_directory(), &error)) {
        MUST(gpt_config_check(&config, &error));
    } else {
        fuzz_check_sentence(error.message, sizeof(error.message));
    }
    free(path);
    return 0;
}
