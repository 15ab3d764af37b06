/*
Work: what one call of an operation moves and computes by its contract, whatever the device: each
input read once, each output written once, and read before where the operation adds to it. For each
operation of llmc/operations.h there is work_NAME, with the same parameters; it looks at shapes,
dtypes and which pointers are NULL, never at data. It is what --profile shows beside the time, and
what plans for cards are made of (run/roofline.c). What is left out, an operation's own scratch, is
written down in doc/traffic.md.
*/
#pragma once

#include "llmc/backend.h"

typedef struct {
    double read, written; // bytes
    double operations;    // floating-point, of GEMMs and attention alone
} Work;

#define OPERATION(result, name, parameters, arguments) Work work_##name parameters;
#define QUERY(result, name, parameters)
#include "llmc/operations.h"

// Returns the work of turning a GEMM's operands into values before it multiplies them: those that
// are quantized, and tensors of another dtype than it multiplies. To be added where the backend's
// gemm_decodes says so.
Work work_of_decoding(Operand a, Operand b);

Work work_add(Work a, Work b);
