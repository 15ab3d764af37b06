/*
AmaxHistory: the largest magnitudes of a linear layer's weight, X and dY in the steps before, and the
scales that are made of them: delayed scaling, as Transformer Engine does it. A tensor's scale is known
before its values are, so that it is quantized in one pass; what is larger than ever is clamped.

An amax that isn't finite counts for nothing. As long as there is none a scale is 1.
*/
#pragma once

#include "recipe.h"
#include "llmc/backend.h"
#include "llmc/base/memory.h"

typedef struct {
    DelayedScale *scales;  // (NUM_GEMM_OPERANDS), the device's; NULL: this layer's scales aren't delayed
    float *steps;          // (length, NUM_ROLES), a ring: a step's amaxes, or 0
    int64_t oldest;        // of these, the next to be replaced
    float amax[NUM_ROLES]; // that the scales are made of; 0: none yet
} AmaxHistory;

// Places the scales of a layer of this recipe, where they are delayed.
void amax_history_layout(AmaxHistory *history, const Recipe *recipe, MemoryPlan *plan);

// Returns the scale of an operand, or NULL.
DelayedScale *amax_history_scale(const AmaxHistory *history, GemmOperand operand);

// Makes the history one without steps, after amax_history_layout.
void amax_history_begin(AmaxHistory *history, const Recipe *recipe, const Backend *backend);
void amax_history_free(AmaxHistory *history);

// Forgets what was seen of X and dY since the last step: an evaluation's.
void amax_history_begin_step(AmaxHistory *history, const Backend *backend);

// Reads the amaxes of the step under way.
void amax_history_read(double amax[NUM_ROLES], const AmaxHistory *history, const Backend *backend);

// Adds those of a step, and makes the scales of the next one, of which nothing was seen yet.
void amax_history_add(AmaxHistory *history, const Recipe *recipe, const Backend *backend, const double amax[NUM_ROLES]);

// Makes the scales of `amax`, which a checkpoint has brought back.
void amax_history_make_scales(const AmaxHistory *history, const Recipe *recipe, const Backend *backend);
