/*
Where a step that isn't finite began: a backend around another that looks at what each GEMM writes.
*/
#pragma once

#include "gpt.h"

// The first GEMM whose output wasn't finite.
typedef struct {
    bool found;
    int64_t layer;      // config.layers: the LM head
    const char *linear; // "qkv"; "lm_head"
    const char *gemm;   // "fprop", "dgrad", "wgrad"
} NotFinite;

// Takes a micro-batch again, forward and backward, with a look at every GEMM. Leaves its gradients,
// times `scale`. For a single rank: several would have to agree.
NotFinite not_finite_find(GPT *model, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T,
                          double scale);
