/*
The model: a decoder-only transformer, its forward and backward passes. A GPT-2 (learned positions,
LayerNorm, GELU-tanh, biases, tied head) where nothing else is asked for; rotary positions, grouped
queries, RMSNorm, SwiGLU and the like make it a Llama, or one of the models of the papers. B
sequences of T tokens; C channels, L layers, NH heads of HS = C / NH, NKV heads of keys and values,
F the hidden size of the MLP, V vocabulary, Vp V padded to 128.
*/
#ifndef LLMC_GPT_H
#define LLMC_GPT_H

#include "linear.h"

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
} GPTConfig;

typedef struct {
    int weight, bias;   // indices into the ParamList; -1: none
    float *mean, *rstd; // (B*T); mean NULL: RMSNorm
} Norm;

// A block's activations kept for the backward pass. The inputs of the linear layers are kept here
// only where the recipe doesn't keep them as MX copies; else they share one scratch tensor.
typedef struct {
    Norm norm1, norm2, q_norm, k_norm;
    Linear qkv, projection, up, down;
    Tensor input;            // (B*T, C)
    Tensor qkv_input;        // (B*T, C) norm1's output
    Tensor qkv_output;       // (B*T, (NH+2*NKV)*HS) as attention takes it: normalised, turned
    Tensor qk_input;         // (B*T, (NH+NKV)*HS) queries and keys before their norms, where they have any
    float *logsumexp;        // (B, NH, T)
    Tensor projection_input; // (B*T, C) attention's output
    Tensor middle;           // (B*T, C) input + attention
    Tensor up_input;         // (B*T, C) norm2's output
    Tensor up_output;        // (B*T, F); with SwiGLU (B*T, 2*F): gate, up
    Tensor down_input;       // (B*T, F) the activation's output
} Block;

enum { LINEAR_QKV, LINEAR_PROJECTION, LINEAR_UP, LINEAR_DOWN, LINEARS_PER_BLOCK };
enum { MAX_PENDING_LOSSES = 16 }; // micro-batches whose losses are summed at a time: each time waits for the device

typedef struct {
    GPTConfig config;
    Recipe recipe;
    const Backend *backend;
    int64_t B, T; // the largest micro-batch
    bool training;
    ParamList params;
    int wte, wpe;  // indices: (V, C); (max_seq_len, C), or -1
    Block *blocks; // (L)
    Norm final_norm;
    Linear head;                      // V logits; its weight is wte, or (V, C) of its own
    Tensor final_input, final_output; // (B*T, C)

    // scratch
    int32_t *batches[2]; // (2, B*T) tokens and targets of a micro-batch and of the one before it, in turn
    int turn;            // the newer one
    float *losses;       // (MAX_PENDING_LOSSES, B*T) of the micro-batches that are not in loss_sum yet
    int pending_losses;
    int64_t pending_rows[MAX_PENDING_LOSSES];
    float *rotations;        // (T, HS) of rotary positions, as the backend's rope takes them; else NULL
    double loss_sum;         // of the mean losses that gpt_take_loss returns
    Tensor x;                // (B*T, C) output of a linear layer before it is added to the residual stream
    Tensor dresidual, dnorm; // (B*T, C)
    Tensor dwide;            // (B*T, the larger of F and qkv's columns)
    Tensor dgate_up;         // (B*T, 2*F), with SwiGLU
    Tensor logits;           // (head_rows, V), rows Vp apart, FP32
    Tensor dlogits;          // the same in the activations' dtype
    int64_t head_rows;       // tokens whose logits are made at a time, a multiple of MX_BLOCK
    void *memory;
    // The backend's scratch, within the memory.
    void *workspace;
    size_t workspace_bytes;
} GPT;

// The sentence that a configuration is refused with, or true.
bool gpt_config_check(const GPTConfig *config, Error *error);

// What zeros in the configuration stand for.
int64_t gpt_kv_heads(const GPTConfig *config);
int64_t gpt_ffn(const GPTConfig *config);
double gpt_rope_theta(const GPTConfig *config);
int64_t gpt_head_size(const GPTConfig *config);

// Rows and columns of the weight of a block's linear layer.
typedef struct {
    int64_t N, K;
} LinearShape;
LinearShape gpt_linear_shape(const GPTConfig *config, int which);

// Parameters in all, and of these the matrices'.
typedef struct {
    int64_t all, matrices;
} ParamCounts;
ParamCounts gpt_count_parameters(const GPTConfig *config);

// Names, NULL-terminated, in the order of the enumerations.
const char *const *gpt_activation_names(void); // "gelu", "relu", "relu2", "swiglu"
const char *const *gpt_norm_names(void);       // "layernorm", "rmsnorm"
const char *const *gpt_position_names(void);   // "learned", "rope"

// What sets the model apart from a GPT-2, as a list: "rotary positions (theta 10000), RMSNorm,
// ..."; "" where nothing.
void gpt_describe(char *text, size_t bytes, const GPTConfig *config);

// True where Hugging Face's GPT-2 can be this model: parameters then have its names and layout,
// else Llama's.
bool gpt_is_gpt2(const GPTConfig *config);

// Bytes of each kind that gpt_create would take.
void gpt_memory(size_t by_kind[NUM_MEMORY_KINDS], GPTConfig config, const Recipe *recipe, const Backend *backend,
                int64_t B, int64_t T, bool training, const Sharding *sharding);

// What a step of `micro_batches` sends from this rank.
WireBytes gpt_wire_bytes(GPTConfig config, const Recipe *recipe, const Backend *backend, const Sharding *sharding,
                         int64_t micro_batches);

// Whether this rank has the same rows of every parameter under both recipes: the masters and
// moments of one are then those of the other.
bool gpt_shards_alike(GPTConfig config, const Recipe *a, const Recipe *b, const Backend *backend,
                      const Sharding *sharding);

// Makes the model, masters uninitialised: follow with gpt_init or a checkpoint, and gpt_refresh.
// Without `training` only gpt_loss and gpt_logits may be called. The backend's workspace is then
// this model's. `sharding`: how parameters are spread over ranks, all of which make the same model;
// NULL: over one.
void gpt_create(GPT *model, GPTConfig config, const Recipe *recipe, const Backend *backend, int64_t B, int64_t T,
                bool training, const Sharding *sharding);
void gpt_free(GPT *model);

// A second model whose gradients are exact: recipe fp32 on the masters of `model`, which it shares
// and which must stay where they are; without moments, so that only gpt_loss_and_gradients and the
// like may be called. On one rank. The backend's workspace is then this model's: gpt_use_workspace
// makes it a model's again.
void gpt_create_exact(GPT *exact, const GPT *model);
size_t gpt_exact_memory(GPTConfig config, const Backend *backend, int64_t B, int64_t T);
void gpt_use_workspace(const GPT *model);

// Initial weights as in GPT-2: normal, 0.02; 0.02 / sqrt(2 L) where a layer writes to the residual
// stream.
void gpt_init(GPT *model, uint64_t seed);

// Makes BF16 and MX copies of the weights: after every change of the masters.
void gpt_refresh(GPT *model);

// The mean loss (nats per token) of tokens (B, T) against targets (B, T), on the host.
double gpt_loss(GPT *model, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T);

// Adds `scale` times that loss's gradients to the gradients of the parameters, and the loss to what
// gpt_take_loss returns. Doesn't wait for the device, so that the host can prepare the next
// micro-batch.
void gpt_loss_and_gradients(GPT *model, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T,
                            double scale);

// The sum of the mean losses of gpt_loss_and_gradients' calls since the last gpt_take_loss.
double gpt_take_loss(GPT *model);

// Logits of the tokens at rows [first, first + count) of (B*T): (count, V) FP32, on the host.
void gpt_logits(GPT *model, float *logits, const int32_t *tokens, int64_t B, int64_t T, int64_t first, int64_t count);

void gpt_zero_gradients(GPT *model);

// A block's linear layers in order (LINEAR_QKV, ...), and their names.
Linear *gpt_linear(GPT *model, int64_t layer, int which);
const char *gpt_linear_name(int which);

// Tokens whose logits are made at a time, in a micro-batch of `rows`, on a device with such
// head_scratch_bytes.
int64_t gpt_head_rows(const GPTConfig *config, const Recipe *recipe, size_t scratch_bytes, int64_t rows);

// Floating-point operations of a training step for each token of sequences of T: 6 for each weight
// of a matrix that multiplies, and the causal half of attention's two products, forward and twice
// that backward.
double gpt_flops_per_token(const GPTConfig *config, int64_t T);

#endif
