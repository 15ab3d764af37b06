/*
The model: a decoder-only transformer, its forward and backward passes. A GPT-2 (learned positions,
LayerNorm, GELU-tanh, biases, tied head) where nothing else is asked for; rotary positions, grouped
queries, RMSNorm, SwiGLU and the like make it a Llama, or one of the models of the papers. B
sequences of T tokens; C channels, L layers, NH heads of HS = C / NH, NKV heads of keys and values,
F the hidden size of the MLP, V vocabulary, Vp V padded to 128.
*/
#pragma once

#include "branch.h"
#include "exchange.h" // WireBytes
#include "gpt_config.h"

enum { BRANCH_ATTENTION, BRANCH_MLP, BRANCHES_PER_BLOCK };
enum { MAX_PENDING_LOSSES = 16 }; // micro-batches whose losses are summed at a time: each time waits for the device

typedef struct {
    GPTConfig config;
    Recipe recipe;
    const Backend *backend;
    int64_t B, T; // the largest micro-batch
    DrawPlace draws;
    bool training;
    ParamList params;
    Param *wte, *wpe;    // (V, C); (max_seq_len, C), or NULL
    BranchList branches; // (L, BRANCHES_PER_BLOCK)
    Norm final_norm;
    Linear head;                      // V logits; its weight is wte, or (V, C) of its own
    Tensor final_input, final_output; // (B*T, C)
    DelayedScales scales;             // of the linear layers, by gpt_linear_at's numbers

    // scratch
    int32_t *batches[2]; // (2, B*T) tokens and targets of a micro-batch and of the one before it, in turn; of
                         // documents (3, B*T), with positions
    int turn;            // the newer one
    int32_t *positions;  // (B*T) on the host, of documents; else NULL
    float *losses;       // (MAX_PENDING_LOSSES, B*T) of the micro-batches that are not in loss_sum yet
    int pending_losses;
    int64_t pending_rows[MAX_PENDING_LOSSES];
    uint32_t *amax;    // not_finite_find's, of one tensor at a time
    float *rotations;  // (T, HS) of rotary positions, as the backend's rope takes them; else NULL
    double loss_sum;   // of the mean losses that gpt_take_loss returns
    Tensor logits;     // (head_rows, V, or Vp where the backend's GEMMs want that), rows Vp apart, FP32
    Tensor dlogits;    // the same in the activations' dtype
    int64_t head_rows; // tokens whose logits are made at a time, a multiple of MX_BLOCK
    void *memory;
} GPT;

// Counts all parameters, of these the matrices', and of these the layers'; and the operations of a
// step of Muon over those.
typedef struct {
    int64_t all, matrices, hidden;
    double muon_flops;
} ParamCounts;
ParamCounts gpt_count_parameters(const GPTConfig *config);

// Says the bytes of each kind that gpt_create would take.
void gpt_memory(size_t by_kind[NUM_MEMORY_KINDS], GPTConfig config, const Recipe *recipe, const Backend *backend,
                int64_t B, int64_t T, bool training, const Sharding *sharding);

// Returns what a step of `micro_batches` sends from this rank.
WireBytes gpt_wire_bytes(GPTConfig config, const Recipe *recipe, const Backend *backend, const Sharding *sharding,
                         int64_t micro_batches);

// Returns true if this rank has the same rows of every parameter under both recipes: the masters
// and moments of one are then those of the other.
bool gpt_shards_alike(GPTConfig config, const Recipe *a, const Recipe *b, const Backend *backend,
                      const Sharding *sharding);

// Makes the model, masters uninitialised: follow with gpt_init or a checkpoint, and gpt_refresh.
// Without `training` only gpt_loss and gpt_logits may be called. `sharding`: how parameters are
// spread over ranks, all of which make the same model; NULL: over one.
void gpt_create(GPT *model, GPTConfig config, const Recipe *recipe, const Backend *backend, int64_t B, int64_t T,
                bool training, const Sharding *sharding);
void gpt_free(GPT *model);

// Puts the model under another recipe, in the middle of a run: only the arithmetic changes. Takes
// masters and moments to the host, frees all memory, makes the model anew and brings them back, so
// that there is never more than one model and a copy of its state on the host. Shards must be
// alike.
void gpt_switch_recipe(GPT *model, const Recipe *recipe);

// Makes a second model whose gradients are exact: recipe fp32 on the masters of `model`, which it
// shares and which must stay where they are; without moments, so that only gpt_loss_and_gradients
// and the like may be called. On one rank.
void gpt_create_exact(GPT *exact, const GPT *model);
size_t gpt_exact_memory(GPTConfig config, const Backend *backend, int64_t B, int64_t T);

// Initial weights of matrices; biases are 0, gains 1.
typedef enum {
    INIT_GPT2,    // normal, 0.02; 0.02 / sqrt(2 L) where a layer writes to the residual stream
    INIT_MITCHELL // as in OLMo's code: normal, 1 / sqrt(inputs), cut off at three times that; of the l-th layer's (from
                  // 1) that write to the residual stream 1 / sqrt(2 l inputs)
} GPTInit;
extern const char *const GPT_INIT_NAMES[]; // "gpt2", by GPTInit; NULL-terminated

void gpt_init(GPT *model, GPTInit init, uint64_t seed);

// Makes BF16 and MX copies of the weights: after every change of the masters.
void gpt_refresh(GPT *model);

// Says which random numbers the passes to come round stochastically with: those of the run's seed
// and of the step, for the rows of a micro-batch that begins with this sample of the step.
void gpt_set_draws(GPT *model, uint64_t seed, int64_t step, int64_t first_sample);

// Returns the mean loss (nats per token) of tokens (B, T) against targets (B, T), on the host.
double gpt_loss(GPT *model, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T);

// Adds `scale` times that loss's gradients to the gradients of the parameters, and the loss to what
// gpt_take_loss returns. Doesn't wait for the device, so that the host can prepare the next
// micro-batch.
void gpt_loss_and_gradients(GPT *model, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T,
                            double scale);

// Returns the sum of the mean losses of gpt_loss_and_gradients' calls since the last gpt_take_loss.
double gpt_take_loss(GPT *model);

// Writes the logits of the tokens at rows [first, first + count) of (B*T): (count, V) FP32, on the
// host.
void gpt_logits(GPT *model, float *logits, const int32_t *tokens, int64_t B, int64_t T, int64_t first, int64_t count);
// Writes those of other rows of the same tokens, right after gpt_logits.
void gpt_logits_again(GPT *model, float *logits, int64_t first, int64_t count);

// Begins a step: the next gpt_loss_and_gradients adds to nothing. Until then gradients of linear
// layers' weights are those of the step before.
void gpt_clear_gradients(GPT *model);

// Adds a step's amaxes to the histories of delayed scaling, on all ranks, after its gradients.
void gpt_add_amaxes(GPT *model);

// Makes the next step's scales of the histories. The weights' copies are to be made anew, by an
// optimizer or gpt_refresh.
void gpt_make_scales(GPT *model);

// Returns the linear layers of all blocks in order, and behind them the head, by their numbers.
Linear *gpt_linear_at(GPT *model, int64_t number);
static inline int64_t gpt_num_linears(const GPTConfig *config) { return config->layers * LINEARS_PER_BLOCK + 1; }

// Returns one of a block's branches, and one of its linear layers (LINEAR_QKV, ...).
Branch *gpt_branch(GPT *model, int64_t layer, int which);
Linear *gpt_linear(GPT *model, int64_t layer, int which);

// Errors: a recipe that keeps more blocks in BF16 than the model has, has a filter that matches
// none of its linear layers (gpt_linear_name), asks of one what recipe_check refuses, or has what
// is of effect in none (recipe_check_effects).
bool gpt_check_recipe(const GPTConfig *config, const Recipe *recipe, Error *error);

// Returns what all its linear layers and its norms make of a recipe.
RecipeEffects gpt_recipe_effects(const GPTConfig *config, const Recipe *recipe);

// Errors: a linear layer whose GEMMs the device refuses (gemm_refuses), over so many tokens
// at once, of which the head takes `head_rows`.
bool gpt_check_gemms(const GPTConfig *config, const Recipe *recipe, const Backend *backend, int64_t rows,
                     int64_t head_rows, bool training, Error *error);

// Adds all parameters of the model's configuration and recipe to model->params, by the names that
// Hugging Face gives them, and links the branches, the final norm and the head to theirs: of
// gpt_params.c, for gpt.c alone.
void gpt_declare_params(GPT *model);

// Sets the initial values to INIT_MITCHELL's.
void gpt_declare_mitchell(GPT *model);
