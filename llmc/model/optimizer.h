/*
AdamW over a ParamList (Loshchilov & Hutter 2019): decoupled weight decay, on matrices alone. With
Muon for what it takes, where the list has its state. Also plain SGD, for experiments.
*/
#pragma once

#include "muon.h"

typedef struct {
    double learning_rate; // of this step
    double beta1, beta2, eps, weight_decay;
    double grad_clip; // largest global norm; 0: no clipping
    int64_t step;     // 1-based
    MuonOptions muon;
} OptimizerOptions;

// Returns the global L2 norm of all gradients.
double optimizer_gradient_norm(const ParamList *list, const Backend *backend);

// Returns what a step's options come to for every element that weight decay applies to; gradients
// whose norm is `gradient_norm` are clipped.
AdamWFactors optimizer_factors(OptimizerOptions options, double gradient_norm);

// Updates masters and moments, and makes all copies of the new masters. `gradient_norm` is
// optimizer_gradient_norm's, for clipping.
void optimizer_step(ParamList *list, const Backend *backend, OptimizerOptions options, double gradient_norm);

// Does so by stochastic gradient descent with PyTorch's momentum, kept in moment1; 0: without. One
// rank's alone.
void optimizer_sgd_step(ParamList *list, const Backend *backend, double learning_rate, double momentum);
