/*
AmaxHistory: the largest magnitudes of a linear layer's weight, X and dY in the steps before, and
the scales that are made of them: delayed scaling, as Transformer Engine does it. A tensor's scale
is known before its values are, so that it is quantized in one pass; what is larger than ever is
clamped.

An amax that isn't finite counts for nothing. As long as there is none a scale is 1.
*/
#pragma once

#include "recipe.h"
#include "llmc/backend.h"
#include "llmc/base/memory.h"

// What the device has of all linear layers of a model, so that a step reads and writes it once.
typedef struct {
    int64_t layers;
    float *scales;    // (layers, NUM_GEMM_OPERANDS); NULL: none are delayed
    uint32_t *amaxes; // (NUM_ROLES, layers), the weights' first: of what was quantized with these scales
} DelayedScales;

// Places them, where a model of this recipe has any.
void delayed_scales_layout(DelayedScales *scales, const Recipe *recipe, int64_t layers, MemoryPlan *plan);

// Sets the scales to (layers, NUM_GEMM_OPERANDS), of which nothing was seen yet.
void delayed_scales_write(const DelayedScales *scales, const Backend *backend, const float *values);

// Forgets what was seen of X and dY since the last step: an evaluation's.
void delayed_scales_begin_step(const DelayedScales *scales, const Backend *backend);

// Returns the amaxes of the step under way, (layers, NUM_ROLES), to be freed.
double *delayed_scales_read(const DelayedScales *scales, const Backend *backend);

typedef struct {
    DelayedScale scales[NUM_GEMM_OPERANDS]; // on the device; NULLs: this layer's aren't delayed
    float *steps;                           // (length, NUM_ROLES), a ring: a step's amaxes, or 0; or NULL, likewise
    int64_t oldest;                         // of these, the next to be replaced
    float amax[NUM_ROLES];                  // that the scales are made of; 0: none yet
} AmaxHistory;

// Says where the scales of a layer of this recipe and number are, where they are delayed.
void amax_history_layout(AmaxHistory *history, const Recipe *recipe, const DelayedScales *scales, int64_t layer);

// Makes the history one without steps, after amax_history_layout.
void amax_history_begin(AmaxHistory *history, const Recipe *recipe);
void amax_history_free(AmaxHistory *history);

// Adds the amaxes of a step. One that isn't finite leaves the role's scales as they are, and counts
// as 0 afterwards.
void amax_history_add(AmaxHistory *history, const Recipe *recipe, const double amax[NUM_ROLES]);

// Makes the scales of the next step, (NUM_GEMM_OPERANDS), of `amax`.
void amax_history_make_scales(float *scales, const AmaxHistory *history, const Recipe *recipe);
