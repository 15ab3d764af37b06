/*
A linear layer under a Recipe: Y = X W^T + b, and its backward pass. The one place that knows what is quantized.

X (rows, K), W (N, K), b (N), Y and dY (rows, N). For wgrad, X is kept as its columnwise MX copy where the recipe
quantizes it; else the caller keeps X itself until linear_backward. An X that is cheaply made again need not be kept in
either form: with `input_is_remade` the caller makes it again, in the same place, before linear_backward.
*/
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H

#include "param.h"
#include "recipe.h"

typedef struct {
    Recipe recipe;                                     // of this layer
    const Param *weight, *bias;                        // bias may be NULL
    QuantizedTensor weight_rowwise, weight_columnwise; // for fprop and dgrad, where the recipe quantizes them
    QuantizedTensor input_columnwise;                  // X for wgrad, where the recipe quantizes it
    Tensor input;                                      // else X itself
    bool input_is_remade;                              // set before linear_layout; only where the recipe quantizes X
    char *scratch;                                     // linear_scratch_bytes, shared by all layers
    QuantStats *stats; // (NUM_GEMM_OPERANDS), added to by forward and backward where not NULL
} Linear;

// True if `recipe` wants a BF16 copy of the weight in its Param.
bool linear_needs_bf16_weight(const Recipe *recipe);

// True if the caller must keep X for the backward pass.
bool linear_keeps_input(const Recipe *recipe);

// Places the copies of the weight and, for training, of X (up to `rows` rows).
void linear_layout(Linear *linear, MemoryPlan *plan, int64_t rows, bool training);

// Bytes of scratch that forward and backward need for `rows` rows, and of the backend's GEMM workspace.
size_t linear_scratch_bytes(const Linear *linear, int64_t rows, bool training);
size_t linear_workspace_bytes(const Linear *linear, const Backend *backend, int64_t rows, bool training);

// Makes the MX copies of the weight from its FP32 master: once per optimizer step.
void linear_refresh(const Linear *linear, const Backend *backend);

// y (rows, N) = x W^T + b. y may be FP32 where x is BF16. `training`: a backward pass will follow.
void linear_forward(Linear *linear, const Backend *backend, Tensor y, Tensor x, bool training);

// dx (rows, K) = dy W; adds to the gradients of W and b.
void linear_backward(Linear *linear, const Backend *backend, Tensor dx, Tensor dy);

#endif
