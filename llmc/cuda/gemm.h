/*
How the CUDA backend multiplies, a file for each step: gemm_path.c says which path a GEMM takes,
gemm_workspace.c where it finds its scratch, gemm_cublaslt.c calls cuBLASLt, gemm_values.c calls it
in other ways where it has no kernel, gemm.c prepares what is multiplied and goes from one to the
next, and gemm_self_check.c compares the paths on the card.
*/
#pragma once

#include "cuda.h"
#include "gemm_path.h"

// Says what GEMMs are multiplied on from here on, and how quantized operands are. Called before any
// of them.
void cuda_gemm_use_device(GemmDevice device);

// Returns what was last said, or what the self-check has made of it.
GemmDevice cuda_gemm_device(void);

// Returns what Backend's gemm_counts does, since a device was last given.
GemmCounts cuda_gemm_counts(void);

// Multiplies on a given path, which must be one that takes the GEMM, with `workspace` of
// cuda_gemm_workspace(a, b) bytes. Returns NULL, or why cuBLASLt doesn't multiply it natively, one
// of few constants; d is then as it was.
const char *cuda_gemm_run(GemmPath path, Tensor d, Operand a, Operand b, GemmOptions options, void *workspace);

// Multiplies a few seeded shapes of those scalings (bits 1 << Scaling; ~0u: of all) natively and
// emulated, with tails, in all three layouts, and compares both with exact dot products. Writes a
// line to `text`. Returns what is off by no more than accumulation can be; unless that is both, the
// policy is MX_GEMM_EMULATED from then on. Returns SELF_CHECK_PASSED, with a line that says so,
// where the device has no native path for them or it isn't wanted.
SelfCheck cuda_gemm_self_check(unsigned scalings, char *text, size_t bytes);

// Does the same with shapes as large as a model's, for a test on a card: it takes seconds. Changes
// no policy; returns false also where one of them isn't multiplied natively.
bool cuda_gemm_check_large(char *text, size_t bytes);
