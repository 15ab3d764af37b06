#include "config_json.h"

#include <math.h>
#include <stddef.h> // offsetof
#include <stdlib.h>
#include <string.h>

static const char OWN_TYPE[] = "train_gpt_mxfp8";

static bool has_rotary_swiglu(const GPTConfig *c) {
    return c->positions == POSITIONS_ROPE && c->activation == ACTIVATION_SWIGLU && !c->qk_norm;
}

static bool is_llama(const GPTConfig *c) {
    return has_rotary_swiglu(c) && c->norm == NORM_RMSNORM && !c->no_norm_affine;
}

static bool is_olmo(const GPTConfig *c) {
    return has_rotary_swiglu(c) && c->norm == NORM_LAYERNORM && c->no_norm_affine && c->no_biases;
}

// The members that are whole numbers of the configuration, and that every file has.
typedef struct {
    const char *name;
    size_t offset; // in GPTConfig
} Member;
static const Member GPT2_SHAPE[] = {
    {"vocab_size", offsetof(GPTConfig, vocab_size)}, {"n_positions", offsetof(GPTConfig, max_seq_len)},
    {"n_embd", offsetof(GPTConfig, channels)},       {"n_layer", offsetof(GPTConfig, layers)},
    {"n_head", offsetof(GPTConfig, heads)},          {NULL, 0}};
static const Member LLAMA_SHAPE[] = {{"vocab_size", offsetof(GPTConfig, vocab_size)},
                                     {"hidden_size", offsetof(GPTConfig, channels)},
                                     {"intermediate_size", offsetof(GPTConfig, ffn)},
                                     {"max_position_embeddings", offsetof(GPTConfig, max_seq_len)},
                                     {"num_hidden_layers", offsetof(GPTConfig, layers)},
                                     {"num_attention_heads", offsetof(GPTConfig, heads)},
                                     {NULL, 0}};

static int64_t *member_of(GPTConfig *c, const Member *member) { return (int64_t *)((char *)c + member->offset); }

// Writing

// Begins with the architecture and the shape, without zeros in the place of defaults.
static void begin(JsonWriter *w, GPTConfig c, const char *architecture, const char *model_type, const Member *shape) {
    c.ffn = gpt_ffn(&c);
    json_begin_object(w, NULL);
    json_begin_array(w, "architectures");
    json_write_string(w, NULL, architecture);
    json_end_array(w);
    json_write_string(w, "model_type", model_type);
    for (; shape->name; shape++) {
        json_write_int64(w, shape->name, *member_of(&c, shape));
    }
    json_write_double(w, "initializer_range", 0.02);
}

static void end(JsonWriter *w, const GPTConfig *c, int64_t end_of_text) {
    json_write_bool(w, "tie_word_embeddings", !c->untied_head);
    json_write_int64(w, "bos_token_id", end_of_text);
    json_write_int64(w, "eos_token_id", end_of_text);
    json_write_string(w, "torch_dtype", "float32");
    json_end_object(w);
}

static void write_gpt2(JsonWriter *w, const GPTConfig *c) {
    begin(w, *c, "GPT2LMHeadModel", "gpt2", GPT2_SHAPE);
    json_write_int64(w, "n_ctx", c->max_seq_len);
    if (gpt_ffn(c) != 4 * c->channels) json_write_int64(w, "n_inner", gpt_ffn(c));
    json_write_string(w, "activation_function", ACTIVATION_NAMES_IN_GPT2[c->activation]);
    json_write_double(w, "layer_norm_epsilon", NORM_EPS);
    json_write_double(w, "attn_pdrop", 0);
    json_write_double(w, "embd_pdrop", 0);
    json_write_double(w, "resid_pdrop", 0);
}

// Writes the rotary base twice: transformers read rope_theta up to version 4, and read
// rope_parameters from version 5 on.
static void write_rope(JsonWriter *w, const GPTConfig *c) {
    json_write_double(w, "rope_theta", gpt_rope_theta(c));
    json_begin_object(w, "rope_parameters");
    json_write_string(w, "rope_type", "default");
    json_write_double(w, "rope_theta", gpt_rope_theta(c));
    json_end_object(w);
}

static void write_llama(JsonWriter *w, const GPTConfig *c) {
    bool has_gains = is_llama(c);
    begin(w, *c, has_gains ? "LlamaForCausalLM" : "OlmoForCausalLM", has_gains ? "llama" : "olmo", LLAMA_SHAPE);
    json_write_int64(w, "num_key_value_heads", gpt_kv_heads(c));
    json_write_string(w, "hidden_act", "silu");
    if (has_gains) json_write_double(w, "rms_norm_eps", NORM_EPS);
    write_rope(w, c);
    json_write_bool(w, "attention_bias", !c->no_biases);
    if (has_gains) json_write_bool(w, "mlp_bias", !c->no_biases);
}

static void write_own(JsonWriter *w, const GPTConfig *c) {
    begin(w, *c, "TrainGPTMXFP8ForCausalLM", OWN_TYPE, LLAMA_SHAPE);
    json_write_int64(w, "num_key_value_heads", gpt_kv_heads(c));
    json_write_string(w, "activation", ACTIVATION_NAMES[c->activation]);
    json_write_string(w, "norm", NORM_NAMES[c->norm]);
    json_write_double(w, "norm_eps", NORM_EPS);
    json_write_bool(w, "norm_affine", !c->no_norm_affine);
    json_write_bool(w, "qk_norm", c->qk_norm);
    json_write_bool(w, "biases", !c->no_biases);
    json_write_string(w, "positions", POSITION_NAMES[c->positions]);
    if (c->positions == POSITIONS_ROPE) json_write_double(w, "rope_theta", gpt_rope_theta(c));
}

void config_json_write(JsonWriter *w, const GPTConfig *c, int64_t end_of_text) {
    if (gpt_is_gpt2(c)) {
        write_gpt2(w, c);
    } else if (is_llama(c) || is_olmo(c)) {
        write_llama(w, c);
    } else {
        write_own(w, c);
    }
    end(w, c, end_of_text);
}

// Reading

// Reads the index of the member's text among `names`, which end with NULL.
static bool read_name(int *index, const JsonValue *json, const char *key, const char *const *names, const char *path,
                      Error *error) {
    const char *text = json_string(json, key);
    *index = text ? find_word(text, names) : -1;
    if (*index >= 0) return true;
    char *list = list_words(names);
    error_set(error, "%s: %s is '%s'; this program takes %s", path, key, text ? text : "missing", list);
    free(list);
    return false;
}

static bool flag_or(const JsonValue *json, const char *key, bool where_missing) {
    bool flag = where_missing;
    json_bool(json, key, &flag);
    return flag;
}

// Refuses a flag that changes what is computed and isn't as this program computes it.
static bool check_flag(const JsonValue *json, const char *key, bool wanted, const char *path, Error *error) {
    if (flag_or(json, key, wanted) == wanted) return true;
    return error_set(error, "%s: %s is %s; this program takes models where it is %s", path, key,
                     wanted ? "false" : "true", wanted ? "true" : "false");
}

static bool check_eps(const JsonValue *json, const char *key, double where_missing, const char *path, Error *error) {
    double eps = where_missing;
    json_number(json, key, &eps);
    if (fabs(eps - NORM_EPS) <= 1e-12) return true;
    return error_set(error, "%s: %s is %g; this program's norms take 1e-5", path, key, eps);
}

static bool read_members(GPTConfig *c, const JsonValue *json, const Member *shape, const char *path, Error *error) {
    for (; shape->name; shape++) {
        if (!json_int64(json, shape->name, member_of(c, shape))) {
            return error_set(error, "%s lacks %s, or it isn't a whole number", path, shape->name);
        }
    }
    return true;
}

static bool read_gpt2(GPTConfig *c, const JsonValue *json, const char *path, Error *error) {
    if (!read_members(c, json, GPT2_SHAPE, path, error)) return false;
    const char *activation = json_string(json, "activation_function");
    if (activation && strcmp(activation, "gelu_pytorch_tanh") != 0) { // gelu_new by another name
        int index;
        if (!read_name(&index, json, "activation_function", ACTIVATION_NAMES_IN_GPT2, path, error)) return false;
        c->activation = (Activation)index;
    }
    c->untied_head = !flag_or(json, "tie_word_embeddings", true);
    json_int64(json, "n_inner", &c->ffn); // null: the default
    return check_eps(json, "layer_norm_epsilon", 1e-5, path, error) &&
           check_flag(json, "scale_attn_weights", true, path, error) &&
           check_flag(json, "add_cross_attention", false, path, error) &&
           check_flag(json, "scale_attn_by_inverse_layer_idx", false, path, error);
}

static bool read_shape(GPTConfig *c, const JsonValue *json, const char *path, Error *error) {
    if (!read_members(c, json, LLAMA_SHAPE, path, error)) return false;
    json_int64(json, "num_key_value_heads", &c->kv_heads); // missing or null: as many as heads
    int64_t head_size;
    if (json_int64(json, "head_dim", &head_size) && (c->heads < 1 || head_size != c->channels / c->heads)) {
        return error_set(error, "%s: head_dim is %ld; this program takes hidden_size / num_attention_heads", path,
                         head_size);
    }
    c->untied_head = !flag_or(json, "tie_word_embeddings", false);
    return true;
}

static bool read_rope(GPTConfig *c, const JsonValue *json, const char *path, Error *error) {
    static const char *const TYPES[] = {"default", NULL};
    int type;
    const JsonValue *parameters = json_get(json, "rope_parameters");
    if (parameters && !json_is_object(parameters)) parameters = NULL;
    const JsonValue *scaling = json_get(json, "rope_scaling");
    if (scaling && json_is_object(scaling)) {
        return error_set(error, "%s: rope_scaling is set; this program's rotary positions aren't scaled", path);
    }
    if (parameters && !read_name(&type, parameters, "rope_type", TYPES, path, error)) return false;
    double turned = 1;
    json_number(parameters ? parameters : json, "partial_rotary_factor", &turned);
    if (turned != 1) {
        return error_set(error, "%s: partial_rotary_factor is %g; this program turns all of a head", path, turned);
    }
    c->positions = POSITIONS_ROPE;
    c->rope_theta = gpt_rope_theta(&(GPTConfig){0});
    json_number(parameters ? parameters : json, "rope_theta", &c->rope_theta);
    if (c->rope_theta > 0) return true;
    return error_set(error, "%s: rope_theta is %g; it must be positive", path, c->rope_theta);
}

static bool read_llama(GPTConfig *c, const JsonValue *json, bool is_olmo, const char *path, Error *error) {
    static const char *const ACTIVATIONS[] = {"silu", NULL};
    bool attention_bias = flag_or(json, "attention_bias", false), mlp_bias = flag_or(json, "mlp_bias", false);
    double clip;
    int activation;
    c->activation = ACTIVATION_SWIGLU;
    c->norm = is_olmo ? NORM_LAYERNORM : NORM_RMSNORM;
    c->no_norm_affine = is_olmo;
    c->no_biases = !attention_bias;
    if (attention_bias != mlp_bias) {
        return error_set(error,
                         "%s: attention_bias is %s and mlp_bias %s; this program takes biases in all linear "
                         "layers or in none",
                         path, attention_bias ? "true" : "false", mlp_bias ? "true" : "false");
    }
    if (json_number(json, "clip_qkv", &clip)) {
        return error_set(error, "%s: clip_qkv is %g; this program doesn't clip queries, keys and values", path, clip);
    }
    return read_shape(c, json, path, error) && read_rope(c, json, path, error) &&
           read_name(&activation, json, "hidden_act", ACTIVATIONS, path, error) &&
           (is_olmo || check_eps(json, "rms_norm_eps", 1e-6, path, error));
}

static bool read_own(GPTConfig *c, const JsonValue *json, const char *path, Error *error) {
    int activation, norm, positions;
    bool affine, biases;
    if (!read_shape(c, json, path, error) ||
        !read_name(&activation, json, "activation", ACTIVATION_NAMES, path, error) ||
        !read_name(&norm, json, "norm", NORM_NAMES, path, error) ||
        !read_name(&positions, json, "positions", POSITION_NAMES, path, error)) {
        return false;
    }
    if (!json_bool(json, "norm_affine", &affine) || !json_bool(json, "biases", &biases) ||
        !json_bool(json, "qk_norm", &c->qk_norm)) {
        return error_set(error, "%s lacks one of norm_affine, biases, qk_norm", path);
    }
    c->activation = (Activation)activation;
    c->norm = (NormKind)norm;
    c->no_norm_affine = !affine;
    c->no_biases = !biases;
    return (positions == POSITIONS_LEARNED || read_rope(c, json, path, error)) &&
           check_eps(json, "norm_eps", 1e-5, path, error);
}

static bool read_of_type(GPTConfig *c, const JsonValue *json, const char *path, Error *error) {
    const char *type = json_string(json, "model_type");
    if (!type) return error_set(error, "%s has no model_type: it isn't the config.json of a model", path);
    if (strcmp(type, "gpt2") == 0) return read_gpt2(c, json, path, error);
    if (strcmp(type, "llama") == 0 || strcmp(type, "olmo") == 0) {
        return read_llama(c, json, type[0] == 'o', path, error);
    }
    if (strcmp(type, OWN_TYPE) == 0) return read_own(c, json, path, error);
    return error_set(error, "%s: model_type is '%s'; this program takes gpt2, llama, olmo, and %s, its own", path, type,
                     OWN_TYPE);
}

bool config_json_read(GPTConfig *config, const JsonValue *json, const char *path, Error *error) {
    Error detail;
    GPTConfig c = {0};
    if (!read_of_type(&c, json, path, error)) return false;
    if (!gpt_config_check(&c, &detail)) return error_set(error, "%s: %.900s", path, detail.message);
    c.kv_heads = gpt_kv_heads(&c);
    c.ffn = gpt_ffn(&c);
    *config = c;
    return true;
}

void config_json_log(JsonWriter *w, const GPTConfig *c) {
    json_begin_object(w, "model");
    json_write_int64(w, "layers", c->layers);
    json_write_int64(w, "heads", c->heads);
    json_write_int64(w, "channels", c->channels);
    json_write_int64(w, "max_seq_len", c->max_seq_len);
    json_write_int64(w, "vocab_size", c->vocab_size);
    json_write_int64(w, "parameters", gpt_count_parameters(c).all);
    json_write_int64(w, "kv_heads", gpt_kv_heads(c));
    json_write_int64(w, "ffn", gpt_ffn(c));
    json_write_string(w, "activation", ACTIVATION_NAMES[c->activation]);
    json_write_string(w, "norm", NORM_NAMES[c->norm]);
    json_write_bool(w, "ln_affine", !c->no_norm_affine);
    json_write_bool(w, "biases", !c->no_biases);
    json_write_string(w, "positions", POSITION_NAMES[c->positions]);
    if (c->positions == POSITIONS_ROPE) json_write_double(w, "rope_theta", gpt_rope_theta(c));
    json_write_bool(w, "qk_norm", c->qk_norm);
    json_write_bool(w, "untied_head", c->untied_head);
    json_end_object(w);
}
