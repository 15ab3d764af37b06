/*
What a residual network is made of: branches, each of which takes the residual stream, through a
norm, a linear layer, an activation or attention, and another linear layer, to what is added to the
stream.

    stream = stream + delta                          what the branch before it made
    delta  = second(activation(first(norm(stream)))) or attention in the activation's place

A transformer's block is two of them, attention and MLP. The GPT and dev/proxy's model are lists of
branches, which share the memory that each uses in passing.
*/
#pragma once

#include "attention.h"
#include "linear.h"

typedef struct {
    bool has_norm;
    Norm norm;
    Linear first, second;
    bool is_attention;
    Attention attention;     // between the linear layers; or
    Activation activation;   // of an MLP
    bool keeps_second_input; // for the backward pass

    // (rows, ...) kept for the backward pass. The inputs of the linear layers are kept here only
    // where the recipe doesn't keep them as MX copies (attention's output where it is wanted all
    // the same); else all share one tensor.
    Tensor input;        // (C) the stream
    Tensor normed;       // (C)
    Tensor first_output; // ((NH+2*NKV)*HS) as attention takes it; (F); with SwiGLU (2*F): gate, up
    Tensor second_input; // (C); (F)
} Branch;

typedef struct {
    Branch *branches; // (count); with those of every layer alike
    int count, per_layer;

    // Scratch: (rows, ...)
    Tensor shared_input; // of a linear layer
    Tensor delta;        // (C) what a branch makes
    Tensor dstream;      // (C)
    Tensor dnormed;      // (C), and of attention's output
    Tensor dwide;        // (F), and of attention's input
    Tensor dgated;       // (2*F), with SwiGLU
    LinearScratch most;  // that any of the linear layers needs; of the workspace, any operation
    void *operands;      // most.bytes, for the linear layers
    void *workspace;     // most.workspace, for the backend
} BranchList;

// Returns the hidden size of an MLP that has as many weights as one of `hidden` without a gate:
// with SwiGLU it has three matrices for two.
int64_t mlp_hidden(Activation activation, int64_t hidden);

// Makes room for the branches of `layers`, `per_layer` in each, which the caller fills in.
void branch_list_make(BranchList *list, int64_t layers, int per_layer);
void branch_list_free(BranchList *list);

// Says what a branch keeps of its second linear layer's input, where its recipe quantizes that:
// with keeps_inner attention's output beside its quantized copy, or the quantized copy of an
// activation's output, which else is made again. Before branch_list_layout.
void branch_declare(Branch *branch, bool keeps_inner);

// Places what the branches keep, or without a backward pass one layer's for all, and what they
// share, but for what branch_list_layout_scratch places.
void branch_list_layout(BranchList *list, MemoryPlan *plan, const Backend *backend, Format dtype, int64_t rows,
                        bool training);

// Places `operands` and `workspace`, after `most` is known of all linear layers, and gives the
// branches theirs.
void branch_list_layout_scratch(BranchList *list, MemoryPlan *plan);

// Says which random numbers the linear layers round stochastically with in the passes to come.
void branch_list_set_draws(BranchList *list, DrawPlace draws);

// Makes stream + delta the branch's input, or where delta is {0} finds it there, and writes what
// the branch makes of it to `out` (rows, C), which may be delta.
void branch_forward(Branch *branch, const Backend *backend, Tensor out, Tensor stream, Tensor delta,
                    Sequences sequences, bool training);

// Adds to dstream, the gradient of the stream behind the branch, that by way of the branch: it is
// then the one before it. Adds to the gradients of the parameters.
void branch_backward(Branch *branch, const Backend *backend, const BranchList *list, Tensor dstream,
                     Sequences sequences);
