/*
oneDNN as the CPU's GEMMs call it: where it has the processor's own instructions for BF16, which are
faster than what matmul.c does in FP32. A build without the library has nothing of this.
*/
#pragma once

#include "llmc/backend.h"

#ifdef HAVE_ONEDNN
// Returns whether the processor has instructions for BF16 that oneDNN uses.
bool onednn_multiplies(void);

// Multiplies as cpu_matmul does, operands and a d that onednn_takes.
void onednn_matmul(Tensor d, Tensor a, Tensor b, GemmOptions options);

// Writes "GEMMs by oneDNN 2.6.3 with AVX-512 BF16, BF16 operands".
void onednn_describe(char *text, size_t bytes);
#else
static inline bool onednn_multiplies(void) { return false; }
static inline void onednn_matmul(Tensor d, Tensor a, Tensor b, GemmOptions options) {
    (void)d, (void)a, (void)b, (void)options;
}
static inline void onednn_describe(char *text, size_t bytes) { (void)text, (void)bytes; }
#endif

// It makes no BF16 of FP32 operands.
static inline bool onednn_takes(Format operands, Format d) {
    return onednn_multiplies() && (operands == d || d == FORMAT_FP32);
}
