/*
Muon (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024): momentum
whose matrix is replaced by one with the same singular vectors, and singular values near 1. It takes
the matrices of the blocks' linear layers; AdamW takes the others.

  moment = momentum * moment + (1 - momentum) * gradient
  X      = (1 - momentum) * gradient + momentum * moment         Nesterov's
  X      = X / (|X| + 1e-7), then five times, in BF16 (Newton-Schulz):
  X      = a X + (b A + c A A) X  with A = X X^T                  or, of more rows than columns, X^T X
  master = (1 - rate * decay) * master - rate * sqrt(max(1, rows / columns)) * X

A parameter in which matrices stand one below the other, such as queries', keys' and values', is
taken apart. Where a matrix is sharded, ranks gather X before the five steps, and each takes them
all: the same bits, for the same work on every rank.
*/
#pragma once

#include "param.h"

typedef struct {
    double learning_rate; // of this step
    double momentum, weight_decay;
} MuonOptions;

// Returns whether Muon updates a parameter.
bool muon_takes(const ParamList *list, const Param *param);

// Places what the steps of Newton-Schulz need, where Muon updates any parameter: after
// exchange_choose_rows.
void muon_layout(ParamList *list, MemoryPlan *plan, const Backend *backend);

// Updates masters and moments of the parameters that muon_takes, and makes their copies; writes
// over their gradients, which are first multiplied with `gradient_scale`. Takes the backend's
// workspace.
void muon_step(const ParamList *list, const Backend *backend, MuonOptions options, float gradient_scale);

// Returns the floating-point operations of a step, on each rank.
double muon_flops(const ParamList *list);
