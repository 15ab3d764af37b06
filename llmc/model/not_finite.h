/*
Where a step that isn't finite began: a backend around another that looks at what each GEMM writes.
*/
#pragma once

#include "gpt.h"

// The first GEMM whose output wasn't finite.
typedef struct {
    bool found;
    int64_t before; // GEMMs before it in its micro-batch
    int64_t layer;  // config.layers: the LM head
    int linear;     // LINEAR_QKV and the like
    Gemm gemm;
    int rank; // whose batch it was
} NotFinite;

// Takes a micro-batch again, forward and backward, with a look at every GEMM. Leaves its gradients,
// times `scale`. Returns what was first in any rank's micro-batch, on all: every rank must call it.
NotFinite not_finite_find(GPT *model, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T,
                          double scale);
