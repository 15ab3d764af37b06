/*
A norm of a model: LayerNorm or RMSNorm of rows of C channels, after the addition of what a branch
adds to the residual stream.
*/
#pragma once

#include "param.h"
#include "recipe.h"

typedef struct {
    NormKind kind;
    const Param *weight, *bias; // (C) gains and biases; NULL: none
    float *mean, *rstd;         // (rows) kept for the backward pass; RMSNorm has no mean
} Norm;

// Sets the format that gains pass through: before param_list_layout.
void norm_declare_gains(Param *gains, const Recipe *recipe);

// Places the statistics.
void norm_layout(Norm *norm, MemoryPlan *plan, int64_t rows);

// Writes stream + delta to `sum`, which may be either, and the norm of that to `out`. Where delta
// is {0}, normalises `stream` and doesn't write to `sum`; where out is {0}, makes statistics alone.
void norm_forward(const Norm *norm, const Backend *backend, Tensor out, Tensor sum, Tensor stream, Tensor delta);

// Returns the norm of x, whose statistics norm_forward made, as a source that the quantizer makes
// itself.
Source norm_source(const Norm *norm, Tensor x);

// Adds to dx, the gradient of the norm's input x, that by way of its output's, and to the gradients
// of gains and biases.
void norm_backward(const Norm *norm, const Backend *backend, Tensor dx, Tensor dout, Tensor x);

// Writes stream + delta to `sum`, which may be either. `unused` (rows) is written over.
void stream_add(const Backend *backend, Tensor sum, Tensor stream, Tensor delta, float *unused);
