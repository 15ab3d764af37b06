#include "gpt_config.h"
#include "branch.h" // mlp_hidden
#include "llmc/base/util.h"

#include <stdlib.h>

int64_t gpt_kv_heads(const GPTConfig *c) { return c->kv_heads ? c->kv_heads : c->heads; }
double gpt_rope_theta(const GPTConfig *c) { return c->rope_theta > 0 ? c->rope_theta : 10000; }
int64_t gpt_head_size(const GPTConfig *c) { return c->channels / c->heads; }

int64_t gpt_ffn(const GPTConfig *c) { return c->ffn ? c->ffn : mlp_hidden(c->activation, 4 * c->channels); }

LinearShape gpt_linear_shape(const GPTConfig *c, int which) {
    int64_t C = c->channels, F = gpt_ffn(c);
    switch (which) {
    case LINEAR_QKV:
        return (LinearShape){(c->heads + 2 * gpt_kv_heads(c)) * gpt_head_size(c), C};
    case LINEAR_PROJECTION:
        return (LinearShape){C, C};
    case LINEAR_UP:
        return (LinearShape){c->activation == ACTIVATION_SWIGLU ? 2 * F : F, C};
    default:
        return (LinearShape){C, F};
    }
}

const char *const ACTIVATION_NAMES[] = {"gelu", "relu", "relu2", "gelu-exact", "swiglu", NULL};
const char *const ACTIVATION_TITLES[] = {"GELU", "ReLU", "squared ReLU", "exact GELU", "SwiGLU"};
const char *const ACTIVATION_NAMES_IN_GPT2[] = {"gelu_new", "relu", "relu2", "gelu", NULL};
const char *const NORM_NAMES[] = {"layernorm", "rmsnorm", NULL};
const char *const POSITION_NAMES[] = {"learned", "rope", NULL};
const char *const LINEAR_NAMES[] = {"qkv", "projection", "up", "down", "lm_head"};
_Static_assert(COUNT(ACTIVATION_NAMES) == NUM_ACTIVATIONS + 1 && COUNT(ACTIVATION_TITLES) == NUM_ACTIVATIONS &&
                   COUNT(ACTIVATION_NAMES_IN_GPT2) == NUM_ACTIVATIONS,
               "a new activation needs its three names");

LinearName gpt_linear_name(const GPTConfig *c, int64_t number) {
    int64_t layer = number / LINEARS_PER_BLOCK;
    LinearName name;
    if (layer == c->layers) {
        snprintf(name.text, sizeof(name.text), "%s", LINEAR_NAMES[LINEAR_HEAD]);
    } else {
        snprintf(name.text, sizeof(name.text), "h.%ld.%s", layer, LINEAR_NAMES[number % LINEARS_PER_BLOCK]);
    }
    return name;
}

bool gpt_is_gpt2(const GPTConfig *c) {
    return gpt_kv_heads(c) == c->heads && ACTIVATION_NAMES_IN_GPT2[c->activation] && c->norm == NORM_LAYERNORM &&
           !c->no_norm_affine && !c->no_biases && c->positions == POSITIONS_LEARNED && !c->qk_norm;
}

void gpt_describe(char *text, size_t bytes, const GPTConfig *c) {
    char *list;
    size_t length;
    FILE *stream = open_memstream(&list, &length);
    if (!stream) die("open_memstream failed");
    if (c->positions == POSITIONS_ROPE) fprintf(stream, ", rotary positions (theta %g)", gpt_rope_theta(c));
    if (gpt_kv_heads(c) != c->heads)
        fprintf(stream, ", %ld head%s of keys and values", gpt_kv_heads(c), plural(gpt_kv_heads(c)));
    if (c->qk_norm) fprintf(stream, ", normalised queries and keys");
    if (c->activation || gpt_ffn(c) != 4 * c->channels) {
        fprintf(stream, ", %s of %ld", ACTIVATION_TITLES[c->activation], gpt_ffn(c));
    }
    if (c->norm == NORM_RMSNORM) fprintf(stream, ", RMSNorm");
    if (c->no_norm_affine) fprintf(stream, ", norms without gains");
    if (c->no_biases) fprintf(stream, ", no biases");
    if (c->untied_head) fprintf(stream, ", untied head");
    fclose(stream);
    snprintf(text, bytes, "%s", length > 2 ? list + 2 : "");
    free(list);
}

bool gpt_config_check(const GPTConfig *c, Error *error) {
    if (c->layers < 1 || c->heads < 1 || c->channels < 1 || c->max_seq_len < 1 || c->vocab_size < 1) {
        return error_set(error, "a model needs at least one layer, head, channel, position and token; give --layers, "
                                "--heads, --channels, --max-seq-len and --vocab-size");
    }
    if (c->channels % c->heads != 0) {
        return error_set(error, "--channels %ld can't be divided among --heads %ld: choose heads that divide channels",
                         c->channels, c->heads);
    }
    if (c->kv_heads < 0 || c->kv_heads > c->heads || c->heads % gpt_kv_heads(c) != 0) {
        return error_set(error, "--kv-heads %ld can't be shared evenly by --heads %ld: choose a number that divides it",
                         c->kv_heads, c->heads);
    }
    if (c->positions == POSITIONS_ROPE && gpt_head_size(c) % 2 != 0) {
        return error_set(error,
                         "--positions rope turns pairs of a head's channels, and --channels %ld in --heads %ld are "
                         "%ld for each, which is odd: choose others",
                         c->channels, c->heads, gpt_head_size(c));
    }
    if (c->rope_theta > 0 && c->positions != POSITIONS_ROPE) {
        return error_set(error, "--rope-theta is for rotary positions: give --positions rope too");
    }
    if (c->layers > MAX_LAYERS || c->channels > MAX_CHANNELS || c->max_seq_len > MAX_POSITIONS ||
        c->vocab_size > MAX_VOCAB_SIZE || c->ffn < 0 || c->ffn > MAX_FFN) {
        return error_set(error,
                         "this model is beyond what the program takes: at most %d layers, %d channels, an MLP of %d, "
                         "%d positions, %d tokens in the vocabulary",
                         MAX_LAYERS, MAX_CHANNELS, MAX_FFN, MAX_POSITIONS, MAX_VOCAB_SIZE);
    }
    return true;
}

double gpt_flops_per_token(const GPTConfig *c, int64_t T) {
    double C = (double)c->channels, L = (double)c->layers, weights = 0;
    for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
        LinearShape shape = gpt_linear_shape(c, i);
        weights += (double)shape.N * (double)shape.K;
    }
    return 6 * (L * weights + (double)c->vocab_size * C) + 6 * L * C * (double)T;
}
