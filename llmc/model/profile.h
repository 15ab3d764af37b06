/*
Profile: where a step's time goes. A Backend whose operations are another's, each timed, by
operation (the names of llmc/operations.h) and by layer.

Operations run one after the other in the calling thread, so that their times add up to no more than
the step's.
*/
#pragma once

#include "llmc/backend.h"
#include "llmc/files/json.h"

// Returns the table to use in `backend`'s place, for a model of `layers` blocks. There is one
// profile in a process.
const Backend *profile_backend(const Backend *backend, int64_t layers);

// Says to which block the operations that follow belong; -1: to none (embeddings, head, optimizer).
// Costs a store.
void profile_set_layer(int64_t layer);

// Says whether operations are counted from now on: false at first, so that a first step, which also
// makes what later ones reuse, and validations can be left out.
void profile_count(bool counting);

// Prints a table for `steps` steps that took `seconds` in all: each operation's share, each block's
// time.
void profile_print(int64_t steps, double seconds);

// Writes the same as members of the JSON object that is being written: "operations" and "layers",
// in seconds a step.
void profile_write(JsonWriter *writer, int64_t steps, double seconds);
