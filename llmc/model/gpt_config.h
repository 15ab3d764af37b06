/*
What sets one GPT apart from another, and what follows from that: sizes, shapes, names.
*/
#pragma once

#include "llmc/backend.h" // Activation, NormKind

typedef enum { POSITIONS_LEARNED, POSITIONS_ROPE } PositionKind; // added to embeddings; or turning queries and keys

typedef struct {
    int64_t layers, heads, channels, max_seq_len, vocab_size;
    // All zeros from here on: a GPT-2.
    int64_t kv_heads; // heads of keys and values, each shared by heads / kv_heads of queries; 0: as many as heads
    int64_t ffn;      // hidden size of the MLP; 0: 4 * channels, with SwiGLU 8/3 of them, rounded up to 64
    Activation activation;
    NormKind norm;       // of all norms; RMSNorm has gains, no biases
    bool no_norm_affine; // norms without gains and biases
    bool no_biases;      // linear layers and norms without biases
    PositionKind positions;
    double rope_theta; // 0: 10000
    bool qk_norm;      // queries and keys, all heads together, are normalised before positions turn them, as in OLMo
    bool untied_head;  // the LM head has a weight of its own
    // Attention stays within a document, which begins with the token end_of_text, and positions
    // restart there. Weights are the same: files of a model don't say it.
    bool mask_documents;
    int32_t end_of_text;
} GPTConfig;

// The largest model that is taken.
enum {
    MAX_LAYERS = 1000,
    MAX_CHANNELS = 1 << 16, // heads too
    MAX_FFN = 1 << 20,
    MAX_POSITIONS = 1 << 20,
    MAX_VOCAB_SIZE = 1 << 24
};

// A block's linear layers, in order, and the LM head.
enum { LINEAR_QKV, LINEAR_PROJECTION, LINEAR_UP, LINEAR_DOWN, LINEARS_PER_BLOCK, LINEAR_HEAD = LINEARS_PER_BLOCK };

// Returns false, with the sentence that the configuration is refused with.
bool gpt_config_check(const GPTConfig *config, Error *error);

// Return what zeros in the configuration stand for.
int64_t gpt_kv_heads(const GPTConfig *config);
int64_t gpt_ffn(const GPTConfig *config);
double gpt_rope_theta(const GPTConfig *config);
int64_t gpt_head_size(const GPTConfig *config);

// Returns the shape of the weight of one of a block's linear layers.
typedef struct {
    int64_t N, K; // rows, columns
} LinearShape;
LinearShape gpt_linear_shape(const GPTConfig *config, int which);

// Names by the enumerations of these values. Those of options end with NULL.
extern const char *const ACTIVATION_NAMES[];  // "gelu"
extern const char *const ACTIVATION_TITLES[]; // "GELU", for a person
extern const char
    *const ACTIVATION_NAMES_IN_GPT2[];     // "gelu_new", as transformers has it; from the first it hasn't on NULL
extern const char *const NORM_NAMES[];     // "layernorm"
extern const char *const POSITION_NAMES[]; // "learned"
extern const char *const LINEAR_NAMES[];   // "qkv"; the last is "lm_head"

// Returns the name of a linear layer for a recipe's filters and in files of amaxes, whatever its
// weight is called: "h.0.qkv", "lm_head". Its number is gpt_linear_at's.
typedef struct {
    char text[48];
} LinearName;
LinearName gpt_linear_name(const GPTConfig *config, int64_t number);

// Writes what sets the model apart from a GPT-2, as a list: "rotary positions (theta 10000),
// RMSNorm, ..."; "" where nothing does.
void gpt_describe(char *text, size_t bytes, const GPTConfig *config);

// Returns true where Hugging Face's GPT-2 can be this model: parameters then have its names and
// layout, else Llama's.
bool gpt_is_gpt2(const GPTConfig *config);

// Returns the floating-point operations of a training step for each token of sequences of T: 6 for
// each weight of a matrix that multiplies, and the causal half of attention's two products, forward
// and twice that backward.
double gpt_flops_per_token(const GPTConfig *config, int64_t T);
