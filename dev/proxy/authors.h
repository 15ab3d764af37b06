/*
The arithmetic of the authors' program (github.com/KempnerInstitute/systems-scaling, which computes
with microxcaling), as a backend around another one: each part of it by itself, or all together.
Every intermediate result that they round to BF16 is rounded to nearest, away from zero at ties.
*/
#pragma once

#include "llmc/backend.h"

typedef struct {
    bool layernorm;      // in BF16, operation by operation: mean, variance, quotient, products, sums
    bool activation;     // GELU and ReLU likewise, GELU by the logistic function with BF16's constants
    bool linear;         // operands to BF16 before they are quantized, outputs and both gradients after
    bool no_norm_biases; // layernorms' biases get no gradient
} AuthorsArithmetic;

// What a device computes of it. Tensors are (rows, cols), BF16 or FP32, their rows without gaps; an
// output may lie over an input of its dtype.
typedef struct {
    // Rounds to BF16; where `odd`, makes the last bit of FP32 1 besides, so that a rounding to even
    // that follows goes away from zero at ties.
    void (*round)(Tensor out, Tensor in, bool odd);
    // Normalizes rows; scratch is (rows, cols) FP32.
    void (*norm_forward)(Tensor out, float *scratch, Tensor x, NormParams norm);
    // Adds to dinput; makes `products`, (rows, cols) FP32, the normalized rows times dout.
    void (*norm_backward)(Tensor dinput, float *products, Tensor dout, Tensor input, NormParams norm);
    // Adds the rounded sums of the columns of `values`, FP32, to sums (cols).
    void (*add_columns)(float *sums, Tensor values);
    // Apply GELU or ReLU, and their slope at `input` to dout.
    void (*activation_forward)(Tensor out, Tensor input, Activation activation);
    void (*activation_backward)(Tensor dinput, Tensor dout, Tensor input, Activation activation);
} AuthorsOps;

#ifdef __cplusplus
extern "C" {
#endif

extern const AuthorsOps authors_on_cpu, authors_on_cuda; // the latter in a build with CUDA

// Returns the table, which the next call changes. `ops` are those of the backend's device.
const Backend *authors_backend(const Backend *backend, const AuthorsOps *ops, AuthorsArithmetic arithmetic);

#ifdef __cplusplus
}
#endif
