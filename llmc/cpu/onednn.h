/*
oneDNN as the CPU's GEMMs call it: where the processor has instructions by which it is faster than
matmul.c. A build without the library has nothing of this.
*/
#pragma once

#include "llmc/backend.h"

#ifdef HAVE_ONEDNN
// Returns whether oneDNN is the faster with this processor's instructions, of operands in BF16 or
// FP32.
bool onednn_multiplies(Format operands);

// Multiplies as cpu_matmul does, operands and a d that onednn_takes; the products by *alpha, unless
// it is NULL, before anything is added to them.
void onednn_matmul(Tensor d, Tensor a, Tensor b, const float *alpha, GemmOptions options);

// Writes "GEMMs by oneDNN 2.6.3 with AVX-512 BF16, BF16 operands".
void onednn_describe(char *text, size_t bytes);
#else
static inline bool onednn_multiplies(Format operands) {
    (void)operands;
    return false;
}
static inline void onednn_matmul(Tensor d, Tensor a, Tensor b, const float *alpha, GemmOptions options) {
    (void)d, (void)a, (void)b, (void)alpha, (void)options;
}
static inline void onednn_describe(char *text, size_t bytes) { (void)text, (void)bytes; }
#endif

// It makes no BF16 of FP32 operands.
static inline bool onednn_takes(Format operands, Format d) {
    return onednn_multiplies(operands) && (operands == d || d == FORMAT_FP32);
}
