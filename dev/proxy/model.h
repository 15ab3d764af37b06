/*
The proxy's model: a residual MLP (arXiv:2506.20752, section 5), d features wide.

    h_k = W1_k LN(A_{k-1}),  A_k = A_{k-1} + W2_k phi(h_k),  A_0 = x

With attention a block has another branch before this one, A + Wo attention(Wqkv LN(A)), whose
sequences are seq_len rows of the batch, without a mask. The student is one with LN under any
Recipe, the teacher one without, in FP32. Linear layers have no biases, norms have gains and biases.
The authors' program (github.com/KempnerInstitute/systems-scaling) has another teacher, without the
residual stream, A_k = W2_k phi(W1_k A_{k-1}), and with hidden layers as wide as x.
*/
#pragma once

#include "llmc/model/branch.h"

typedef struct {
    int64_t layers, width; // d
    Activation activation;
    bool layernorm, attention;
    int64_t heads, seq_len; // of attention
    bool is_plain;          // without the residual stream, hidden layers of d: forward alone
} ProxyConfig;

typedef enum {
    INIT_KAIMING_UNIFORM, // PyTorch's nn.Linear: U(-1/sqrt(K), 1/sqrt(K))
    INIT_XAVIER_NORMAL    // N(0, 0.25 * 2 / (N + K)): gain 0.5
} ProxyInit;

typedef enum { LOSS_MSE, LOSS_KL } ProxyLoss;

typedef struct {
    ProxyConfig config;
    Recipe recipe;
    const Backend *backend;
    int64_t rows; // of a batch
    bool training;
    ParamList params;
    BranchList branches; // (L, 1), or with attention (L, 2)
    Tensor output;       // (rows, d): A_L

    // scratch
    float *losses; // (rows); before there are any, what nobody reads
    void *memory;
} ProxyModel;

// Returns false, with the sentence that the configuration is refused with.
bool proxy_config_check(const ProxyConfig *config, int64_t rows, Error *error);

// Errors: a recipe with adjustments that are of no effect here, or with scales of earlier steps.
bool proxy_check_recipe(const ProxyConfig *config, const Recipe *recipe, Error *error);

// Returns what all its layers make of a recipe.
RecipeEffects proxy_recipe_effects(const ProxyConfig *config, const Recipe *recipe);

// Errors: a GEMM over so many rows that the backend can't multiply.
bool proxy_check_gemms(const ProxyConfig *config, const Recipe *recipe, const Backend *backend, int64_t rows,
                       Error *error);

// Returns F: 4 d; with SwiGLU 8/3 d, rounded up to 64. A plain model's: d and 2/3 d.
int64_t proxy_hidden(const ProxyConfig *config);

// Returns the bytes that proxy_create would take.
size_t proxy_memory(const ProxyConfig *config, const Recipe *recipe, const Backend *backend, int64_t rows,
                    bool training);

// Makes the model, masters uninitialised: follow with proxy_init or a state, and proxy_refresh.
void proxy_create(ProxyModel *model, const ProxyConfig *config, const Recipe *recipe, const Backend *backend,
                  int64_t rows, bool training);
void proxy_free(ProxyModel *model);

// Makes a second model whose gradients are exact: recipe fp32 on the masters of `model`, which it
// shares and which must stay where they are; without moments. On `backend`, the device's own.
void proxy_create_exact(ProxyModel *exact, const ProxyModel *model, const Backend *backend);
size_t proxy_exact_memory(const ProxyConfig *config, const Backend *backend, int64_t rows);

void proxy_init(ProxyModel *model, ProxyInit init, uint64_t seed);

// Says which random numbers the passes to come round stochastically with.
void proxy_set_draws(ProxyModel *model, uint64_t seed, int64_t step);

void proxy_refresh(ProxyModel *model); // after every change of the masters

// Returns the names of a branch's linear layers and norm.
typedef struct {
    const char *first, *second, *norm;
} BranchNames;
BranchNames proxy_branch_names(const Branch *branch);

// Returns A_L of x (rows, d; FP32), which is there until the next call.
Tensor proxy_forward(ProxyModel *model, Tensor x);

// Makes the parameters' gradients those of the mean loss of x against target (rows, d; FP32 both).
// Returns that loss: the mean over rows and features of squared errors, or over rows of
// KL(softmax(target) || softmax(A_L)).
double proxy_loss_and_gradients(ProxyModel *model, ProxyLoss loss, Tensor x, Tensor target);

// Returns the floating-point operations of the GEMMs that a batch takes, forward alone or forward
// and backward.
double proxy_gemm_flops(const ProxyModel *model);
