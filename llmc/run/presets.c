#include "presets.h"

#include "llmc/base/util.h"

#include <string.h>

// An option's name and value.
typedef struct {
    const char *name, *value;
} Training;

typedef struct {
    const char *name;
    GPTConfig config;
    const Training *training; // ends with an empty row; NULL: the program's defaults
} Preset;

// Of all sizes of the sweep: 512 sequences of 512 tokens a step, a fifth of the steps warm-up.
static const Training OLMO_SWEEP[] = {{"total-batch-size", "262144"},
                                      {"learning-rate", "2e-4"},
                                      {"warmup-fraction", "0.2"},
                                      {"warmup-from", "2e-5"},
                                      {"schedule", "cosine"},
                                      {"final-lr-fraction", "0.1"},
                                      {"weight-decay", "0"},
                                      {"beta1", "0.9"},
                                      {"beta2", "0.95"},
                                      {"eps", "1e-15"},
                                      {"grad-clip", "1"},
                                      {"init", "mitchell"},
                                      {NULL, NULL}};

#define GPT2(L, NH, C) .layers = L, .heads = NH, .channels = C, .max_seq_len = 1024, .vocab_size = 50257
// The models of the sweeps of arXiv:2506.20752 (github.com/Hither1/systems-scaling), with Llama 2's
// tokenizer.
#define OLMO(n)                                                                                              \
    .layers = n, .heads = n, .channels = 64 * n, .max_seq_len = 512, .vocab_size = 32000, .no_biases = true, \
    .positions = POSITIONS_ROPE, .qk_norm = true, .untied_head = true, .activation = ACTIVATION_GELU_EXACT
// The models of arXiv:2506.08027, with Nemotron-4's vocabulary.
#define NEMOTRON(L, NH, NKV, C)                                                                          \
    .layers = L, .heads = NH, .channels = C, .max_seq_len = 4096, .vocab_size = 256000, .kv_heads = NKV, \
    .activation = ACTIVATION_RELU2, .no_biases = true, .positions = POSITIONS_ROPE, .untied_head = true

static const Preset PRESETS[] = {
    {"gpt2-124M", {GPT2(12, 12, 768)}, NULL},
    {"gpt2-355M", {GPT2(24, 16, 1024)}, NULL},
    {"gpt2-774M", {GPT2(36, 20, 1280)}, NULL},
    {"gpt2-1558M", {GPT2(48, 25, 1600)}, NULL},
    {"olmo-n6", {OLMO(6)}, OLMO_SWEEP},
    {"olmo-n7", {OLMO(7)}, OLMO_SWEEP},
    {"olmo-n8", {OLMO(8)}, OLMO_SWEEP},
    {"olmo-n9", {OLMO(9)}, OLMO_SWEEP},
    {"olmo-n10", {OLMO(10)}, OLMO_SWEEP},
    {"olmo-n11", {OLMO(11)}, OLMO_SWEEP},
    {"olmo-n12", {OLMO(12)}, OLMO_SWEEP},
    {"olmo-n13", {OLMO(13)}, OLMO_SWEEP},
    {"olmo-n14", {OLMO(14)}, OLMO_SWEEP},
    {"olmo-n15", {OLMO(15)}, OLMO_SWEEP},
    {"olmo-n16", {OLMO(16)}, OLMO_SWEEP},
    {"olmo-n17", {OLMO(17)}, OLMO_SWEEP},
    {"olmo-n18", {OLMO(18)}, OLMO_SWEEP},
    {"olmo-n19", {OLMO(19)}, OLMO_SWEEP},
    {"olmo-n20", {OLMO(20)}, OLMO_SWEEP},
    {"olmo-n21", {OLMO(21)}, OLMO_SWEEP},
    {"olmo-n22", {OLMO(22)}, OLMO_SWEEP},
    {"olmo-n23", {OLMO(23)}, OLMO_SWEEP},
    {"olmo-n24", {OLMO(24)}, OLMO_SWEEP},
    {"nemotron-843M", {NEMOTRON(24, 16, 16, 1024)}, NULL},
    {"nemotron-2B", {NEMOTRON(24, 16, 16, 2048)}, NULL},
    {"nemotron-8B", {NEMOTRON(32, 32, 8, 4096)}, NULL},
};
enum { NUM_PRESETS = COUNT(PRESETS) };

const char *const *preset_names(void) {
    static const char *names[NUM_PRESETS + 1];
    for (int i = 0; i < NUM_PRESETS; i++) {
        names[i] = PRESETS[i].name;
    }
    return names;
}

const GPTConfig *preset_config(const char *name) {
    int found = find_word(name, preset_names());
    return found < 0 ? NULL : &PRESETS[found].config;
}

bool preset_set_training(const char *name, Option *options, int count, Error *error) {
    int found = find_word(name, preset_names());
    const Training *row = found < 0 ? NULL : PRESETS[found].training;
    for (; row && row->name; row++) {
        Option *option = options_find(options, count, row->name, strlen(row->name));
        if (!option->was_set && !option_set(option, row->value, error)) return false;
    }
    return true;
}
