/*
Memory plan: one allocation, laid out by kind. The same layout code runs twice, first over a plan
without memory, which only counts, then over the allocated one: what is printed before is what is
taken.
*/
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef enum {
    MEMORY_MASTERS,   // FP32 master weights
    MEMORY_GRADIENTS, // FP32 gradients of weights
    MEMORY_MOMENTS,   // the optimizer's, in FP32: AdamW's two, Muon's one
    MEMORY_WEIGHTS,   // BF16 copies of weights
    MEMORY_QUANTIZED, // MX copies of weights, rowwise and columnwise
    MEMORY_KEPT,      // activations kept for the backward pass
    MEMORY_SCRATCH,   // activations and gradients that live for one layer; workspaces; rotary positions
    MEMORY_EXACT,     // a second model's, for exact gradients: all of it but the masters, which it shares
    NUM_MEMORY_KINDS
} MemoryKind;

typedef struct {
    char *base; // NULL: only count
    size_t used;
    size_t by_kind[NUM_MEMORY_KINDS];
} MemoryPlan;

enum { MEMORY_ALIGNMENT = 256 }; // what cuBLAS and cache lines want

// Adds, and stays at the largest size rather than wrapping: an absurd model must look too large,
// not small.
static inline size_t memory_add(size_t a, size_t b) { return a > SIZE_MAX - b ? SIZE_MAX : a + b; }

static inline void *memory_take(MemoryPlan *plan, MemoryKind kind, size_t bytes) {
    size_t rounded = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
    void *memory = plan->base ? plan->base + plan->used : NULL;
    plan->used = memory_add(plan->used, rounded);
    plan->by_kind[kind] = memory_add(plan->by_kind[kind], rounded);
    return memory;
}

static inline const char *memory_kind_name(MemoryKind kind) {
    static const char *const NAMES[] = {"master weights (fp32)",  "gradients of weights (fp32)", "moments (fp32)",
                                        "weights, bf16 copies",   "weights, quantized copies",   "kept for backward",
                                        "scratch and workspaces", "for exact gradients (fp32)"};
    return NAMES[kind];
}
