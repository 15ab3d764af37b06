// trainer_state.json of a checkpoint, with the program's own options.
#include "fuzz.h"
#include "llmc/run/checkpoint.h"
#include "llmc/run/settings.h"

// What the options keep of the file's texts.
static void free_texts(Option *options, int count, const Option *defaults) {
    for (int i = 0; i < count; i++) {
        if (options[i].type == OPTION_REPEATED) {
            StringList *list = options[i].value;
            for (int item = 0; item < list->count; item++) {
                free((void *)list->items[item]);
            }
        } else if (options[i].type == OPTION_STRING) {
            const char *text = *(const char **)options[i].value;
            if (text != *(const char **)defaults[i].value) free((void *)text);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Error error = {""};
    static CommandLine line, untouched;
    settings_init(&line);
    settings_init(&untouched);
    Option *options = line.options, *defaults = untouched.options;
    int count = line.num_options;
    TrainerState state;
    char *path = fuzz_write("trainer_state.json", data, size);
    if (checkpoint_load_state(&state, fuzz_directory(), options, count, &error)) {
        MUST(state.step >= 0 && state.next_sample >= 0 && state.log_position >= 0);
        outlier_add(&state.losses, 1);
        outlier_add(&state.grad_norms, 1);
        outlier_zscore(&state.losses, 1);
        outlier_zscore(&state.grad_norms, 1);
    } else {
        fuzz_check_sentence(error.message, sizeof(error.message));
    }
    free_texts(options, count, defaults);
    free(path);
    return 0;
}
