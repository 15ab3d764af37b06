/*
What the operations of the CUDA backend take beside their tensors. This is the one source of these
sizes, for the backend itself and for plans of cards that aren't here (run/roofline.c): arithmetic
without CUDA's headers, built with and without the toolkit.
*/
#pragma once

#include "llmc/backend.h"

enum {
    // Backend's members of these names: tiles of GEMMs, and rows that begin at 16 bytes.
    CUDA_HEAD_ROWS_MULTIPLE = 256,
    CUDA_VOCAB_MULTIPLE = 128,
    // Kept free for libraries, which load code and take scratch in the first step.
    CUDA_LIBRARIES_BYTES = 512 * 1000000,
    // cuBLASLt's own workspace: what NVIDIA recommends for Hopper and Blackwell.
    CUDA_CUBLASLT_BYTES = 32 << 20,
    // Behind it, where operands have factors: alpha and beta of their product.
    CUDA_GEMM_FACTOR_BYTES = 2 * sizeof(float),
    // Rows that one thread block sums in the first stage of a sum over rows. Their partial sums are
    // added in order, so that neither the card nor the number of its multiprocessors changes a bit.
    CUDA_ROWS_PER_PART = 256,
    // Rows that one warp counts and places where rows are sorted by token, by so many values of a
    // digit.
    CUDA_SORT_ROWS = 256,
    CUDA_SORT_DIGITS = 256
};

// Returns how many parts of `part` it takes to hold `count`.
static inline int64_t num_parts(int64_t count, int64_t part) { return (count + part - 1) / part; }

// Returns Backend's head_scratch_bytes on a card of so much memory, all of it: what is free differs
// from run to run, and the number of pieces changes bits.
size_t cuda_head_scratch_bytes(double memory_bytes);

// Return what Backend's functions of these names do; the first is in gemm_workspace.c.
size_t cuda_gemm_workspace(Operand a, Operand b);
size_t cuda_reduction_workspace(int64_t rows, int64_t cols);

// Returns the floats of scratch that a sum of (rows, cols) over rows takes: those of every stage
// but the last.
int64_t cuda_sum_columns_scratch(int64_t rows, int64_t cols);

// Returns the rows that the layernorm's backward pass sums at a time.
int64_t cuda_layernorm_rows_per_part(int64_t rows);

// Returns the bytes of workspace of attention by our own kernels: a sum for each row of a head.
size_t cuda_attention_plain_bytes(AttentionShape shape);

// Returns the part of a shape that one run of cuDNN's backward pass is for: the most sequences, or
// heads of keys of one sequence with their queries, whose gradients of the scores, dS, are within
// 512 MB; at least one head.
AttentionShape cuda_attention_backward_part(AttentionShape shape);

// Returns whether that part's dS is small enough, within 8 GiB, for cuDNN's backward pass to be
// taken: our own, slower kernels need none.
bool cuda_attention_has_room_for_dscores(AttentionShape shape);

// Returns the bytes of dS, which cuDNN's backward plan keeps in its workspace.
int64_t cuda_attention_dscores_bytes(AttentionShape shape);

// Where things lie in the workspace of attention by cuDNN: offsets in bytes.
typedef struct {
    size_t o;           // attention's output, made again for the backward pass
    size_t softmax_sum; // a sum for each row of a head
    size_t logsumexp;   // which that output comes with
    size_t plan;        // the own workspace of cuDNN's plans
    size_t total;
} CudnnWorkspace;

// Places what cuDNN's passes take before plan_bytes of its plans' own.
CudnnWorkspace cuda_attention_cudnn_workspace(AttentionShape shape, size_t plan_bytes);
