#include "presets.h"

#include "llmc/base/util.h"

typedef struct {
    const char *name;
    GPTConfig config;
} Preset;

#define GPT2(L, NH, C) .layers = L, .heads = NH, .channels = C, .max_seq_len = 1024, .vocab_size = 50257
// The models of the sweeps of arXiv:2506.20752 (github.com/Hither1/systems-scaling), with Llama 2's
// tokenizer.
#define OLMO(n)                                                                                              \
    .layers = n, .heads = n, .channels = 64 * n, .max_seq_len = 512, .vocab_size = 32000, .no_biases = true, \
    .positions = POSITIONS_ROPE, .qk_norm = true, .untied_head = true
// The models of arXiv:2506.08027, with Nemotron-4's vocabulary.
#define NEMOTRON(L, NH, NKV, C)                                                                          \
    .layers = L, .heads = NH, .channels = C, .max_seq_len = 4096, .vocab_size = 256000, .kv_heads = NKV, \
    .activation = ACTIVATION_RELU2, .no_biases = true, .positions = POSITIONS_ROPE, .untied_head = true

static const Preset PRESETS[] = {
    {"gpt2-124M", {GPT2(12, 12, 768)}},
    {"gpt2-355M", {GPT2(24, 16, 1024)}},
    {"gpt2-774M", {GPT2(36, 20, 1280)}},
    {"gpt2-1558M", {GPT2(48, 25, 1600)}},
    {"olmo-n6", {OLMO(6)}},
    {"olmo-n7", {OLMO(7)}},
    {"olmo-n8", {OLMO(8)}},
    {"olmo-n9", {OLMO(9)}},
    {"olmo-n10", {OLMO(10)}},
    {"olmo-n11", {OLMO(11)}},
    {"olmo-n12", {OLMO(12)}},
    {"olmo-n13", {OLMO(13)}},
    {"olmo-n14", {OLMO(14)}},
    {"olmo-n15", {OLMO(15)}},
    {"olmo-n16", {OLMO(16)}},
    {"olmo-n17", {OLMO(17)}},
    {"olmo-n18", {OLMO(18)}},
    {"olmo-n19", {OLMO(19)}},
    {"olmo-n20", {OLMO(20)}},
    {"olmo-n21", {OLMO(21)}},
    {"olmo-n22", {OLMO(22)}},
    {"olmo-n23", {OLMO(23)}},
    {"olmo-n24", {OLMO(24)}},
    {"nemotron-843M", {NEMOTRON(24, 16, 16, 1024)}},
    {"nemotron-2B", {NEMOTRON(24, 16, 16, 2048)}},
    {"nemotron-8B", {NEMOTRON(32, 32, 8, 4096)}},
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
