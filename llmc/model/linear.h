/*
A linear layer under a Recipe: Y = X W^T + b, and its backward pass. The one place that knows what
is quantized.

X (rows, K), W (N, K), b (N), Y and dY (rows, N). X and dY are Sources: what the recipe quantizes in
both its GEMMs need not be stored. For wgrad, X is kept as its columnwise MX copy where the recipe
quantizes it; else the caller keeps X itself until linear_backward. An X that is cheaply made again
need not be kept in either form: see `input_is_remade`.
*/
#pragma once

#include "amax_history.h"
#include "param.h"
#include "recipe.h"

typedef struct {
    Recipe recipe; // of this layer
    Param *weight;
    const Param *bias;                // or NULL
    QuantizedTensor input_columnwise; // X for wgrad, where the recipe quantizes it
    Source input;                     // else what X is made from, or X itself
    bool input_is_remade;             // from `input`; set before linear_layout; only where linear_can_remake_input
    bool keeps_values;                // of input_columnwise, where GEMMs would decode it; set before linear_layout
    DrawPlace draws;                  // where the next rows are, of operands that are rounded stochastically
    const void *transformed_weight;   // the weight that a GEMM is reading where that isn't one of `weight`'s; or NULL
    char *scratch;                    // LinearScratch.bytes, shared by all layers
    AmaxHistory amaxes;               // that scales are made of, where they are delayed
    QuantStats *stats;                // (NUM_GEMM_OPERANDS), added to by forward and backward where not NULL
} Linear;

// Which copies of its weight, which is in its list, a layer of this recipe wants: before
// param_list_layout.
void linear_declare_weight(Param *weight, const Recipe *recipe);

// True if the caller must keep X for the backward pass.
bool linear_keeps_input(const Recipe *recipe);

// True if X may be made again in the backward pass, and its copy for wgrad from it.
bool linear_can_remake_input(const Recipe *recipe);

// True if X, or dY, is quantized as it is made; where not, the caller stores it and gives it as
// SOURCE_TENSOR.
bool linear_makes_input(const Linear *linear, bool training);
bool linear_makes_gradient(const Linear *linear);

// Returns the bias's gradient where the backward pass doesn't quantize dY, whose maker may then add
// to it (Source.is_summed); elsewhere NULL.
float *linear_bias_gradient(const Linear *linear);

// Says where the scales of the layer of this number are that are made of earlier amaxes, also to
// the weight's copies: before param_list_layout.
void linear_layout_scales(Linear *linear, const DelayedScales *scales, int64_t number);

// What the layers of a model use in passing: as much as the layer that needs most.
typedef struct {
    size_t bytes;     // of Linear.scratch
    size_t workspace; // of the backend's, for GEMMs
} LinearScratch;

// Places, for training, the copy of X, of up to `rows` rows, and raises `most` to what forward and
// backward need. After param_list_layout.
void linear_layout(Linear *linear, MemoryPlan *plan, const Backend *backend, int64_t rows, bool training,
                   LinearScratch *most);

// Errors: a GEMM of a layer of that recipe, over X (rows, K) and a weight (N, K), that the device
// refuses (gemm_refuses): the forward pass' and, for training, the two others. `name` is the
// layer's, `y` the dtype of its output.
bool linear_check_gemms(const Recipe *recipe, const char *name, const Backend *backend, int64_t rows, int64_t N,
                        int64_t K, Format y, bool training, Error *error);

// y (rows, N) = x W^T + b. y may be FP32 where x is BF16. Where W is padded (Param.padded_rows) N
// is, and what y has of it is 0, as must be what dy has. `training`: a backward pass will follow.
void linear_forward(Linear *linear, const Backend *backend, Tensor y, Source x, bool training);

// dx (rows, K) = dy W; adds to the gradients of W and b, or writes W's where that is stale. A dy
// that is made may be written over its dout.
void linear_backward(Linear *linear, const Backend *backend, Tensor dx, Source dy);
