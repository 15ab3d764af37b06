/*
Profile: where a step's time goes, and its bytes. A Backend whose operations are another's, each
timed, by operation (the names of llmc/operations.h) and by layer, with the bytes that its contract
has a call read and write (work.h).

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
// Returns what was said last.
int64_t profile_layer(void);

// Says whether the GEMMs that follow are Newton-Schulz's, which belong to no pass.
void profile_set_muon(bool is_muon);

// Says how many times operations are counted from now on: 0 at first, so that a first step, which
// also makes what later ones reuse, and validations can be left out; more than once, in a plan,
// where they stand for others that are alike.
void profile_count(int64_t times);

// What the counted calls of an operation, or of one use of it, took.
typedef struct {
    double seconds;
    int64_t calls;
    double read, written; // bytes
} ProfileCell;

// Returns the sum of a line of the table: "gemm fprop".
ProfileCell profile_line(const char *name);

// Prints a table for `steps` steps that took `seconds` in all: each operation's share and bytes,
// each block's.
void profile_print(int64_t steps, double seconds);

// Prints the operations' lines of that table alone, for steps that took nothing between operations.
void profile_print_operations(int64_t steps);

// Writes the same as members of the JSON object that is being written: "seconds" of a step,
// "operations" and "layers", in seconds a step, "read" and "written" in bytes a step.
void profile_write(JsonWriter *writer, int64_t steps, double seconds);
