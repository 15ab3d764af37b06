/*
Self-attention between two linear layers, from queries, keys and values to what the projection
takes. Queries and keys may be normalised, and turned by rotary positions, before they meet.
*/
#pragma once

#include "norm.h"

typedef struct {
    AttentionShape shape;   // B and T of the largest micro-batch
    bool has_qk_norm;       // as in OLMo: over all heads together
    Norm q_norm, k_norm;    // (NH*HS), (NKV*HS)
    const float *rotations; // (T, HS) of rotary positions, as the backend's rope takes them; NULL: none
    Tensor qk_input;        // (rows, (NH+NKV)*HS) queries and keys before their norms
    float *logsumexp;       // (B, NH, T)
} Attention;

// Places what is kept for the backward pass.
void attention_layout(Attention *attention, MemoryPlan *plan, Format dtype);

// Writes to `out` (rows, NH*HS) from qkv (rows, (NH+2*NKV)*HS), in whose place queries and keys are
// prepared.
void attention_forward(const Attention *attention, const Backend *backend, Tensor out, Tensor qkv, Sequences sequences);

// Writes dqkv from dout, given `out` where it was kept, {0} elsewhere, and qkv, as
// attention_forward left them. `scratch`, which may be dout, has room for all queries, and is
// written over.
void attention_backward(const Attention *attention, const Backend *backend, Tensor dqkv, Tensor dout, Tensor out,
                        Tensor qkv, Sequences sequences, Tensor scratch);
