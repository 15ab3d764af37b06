/*
The arithmetic of the authors' program (github.com/KempnerInstitute/systems-scaling, which computes
with microxcaling), as a backend around the CPU's: each part of it by itself, or all together. Every
intermediate result that they round to BF16 is rounded to nearest, away from zero at ties.
*/
#pragma once

#include "llmc/backend.h"

typedef struct {
    bool layernorm;      // in BF16, operation by operation: mean, variance, quotient, products, sums
    bool activation;     // GELU and ReLU likewise, GELU by the logistic function with BF16's constants
    bool linear;         // operands to BF16 before they are quantized, outputs and both gradients after
    bool no_norm_biases; // layernorms' biases get no gradient
} AuthorsArithmetic;

// Returns the table, which the next call changes; it works on the host's memory.
const Backend *authors_backend(const Backend *cpu, AuthorsArithmetic arithmetic);
