/*
The memory of a plan: what it takes, what is there, and what a GPU keeps where there is more.
*/
#pragma once

#include "plan.h"

// Writes the run's bytes with micro-batches of B: those of the largest of the recipes that it has
// before it. Returns their sum.
size_t plan_memory(size_t by_kind[NUM_MEMORY_KINDS], const Plan *plan, int64_t B);

// Returns the bytes of memory that a rank has.
double plan_available_bytes(const Plan *plan);

// Returns the largest micro-batch, of at most the plan's, that fits into so many bytes and divides
// a step's; 0: none.
int64_t plan_micro_batch_that_fits(const Plan *plan, double available);

// Returns whether a plan of several ranks at a lower stage would fit at --zero 2.
bool plan_fits_at_zero_2(const Plan *plan);

// Returns the bytes that a run takes of them beside plan_memory's `by_kind`, at times: on a CPU; on
// a GPU they are the host's.
double plan_staging_bytes(const Plan *plan, const size_t by_kind[NUM_MEMORY_KINDS]);

// Has a GPU keep what it would make again otherwise, where there is memory for it, first what
// spares most for its bytes: attention's output, which cuDNN's backward pass reads, and what GEMMs
// would decode, of linear layers' inputs, then of weights; last what the layer after an activation
// is given. No bit depends on it.
void plan_spare_memory(Plan *plan);

// Refuses a plan that a rank's memory can't hold, on all ranks together, so that nobody takes that
// one for lost.
void plan_check_memory(const Plan *plan);
