/*
What ranks exchange of a ParamList: sums of gradients, and updated weights. A rank alone exchanges
nothing.

Over several ranks a matrix is sharded by rows (ZeRO, Rajbhandari et al. 2020): each rank has the
masters and moments of its own, and after an update all of the copies that the forward and backward
passes use. Shards begin at multiples of Sharding.unit rows, so that no block, rowwise, columnwise
or square, and no group that is transformed together, is of two ranks. Vectors, and matrices that
are used in FP32, are replicated.
*/
#pragma once

#include "param.h"

// Sets, before anything is placed, which parameters are sharded and which rows are this rank's.
void exchange_choose_rows(ParamList *list, bool training);

// Returns whether a parameter's gradients are reduced after its layer's backward pass, in every
// micro-batch (stage 2).
bool exchange_reduces_by_layer(const ParamList *list, const Param *param);

// Places the gradients that are reduced so: the sums of this rank's rows, and one layer's whole
// gradients, which lie where every other layer's do.
void exchange_layout_by_layer(ParamList *list, MemoryPlan *plan);

// Reduces a layer's gradients after its backward pass. Stage 2: adds the sum over ranks to
// own_gradient. Stage 1, in the last micro-batch: begins to make own_gradient that sum, beside the
// backward passes to come.
void exchange_reduce_layer(const ParamList *list, const Backend *backend, int64_t layer);

// Makes, after a step's micro-batches, every other gradient, or this rank's rows of one that is
// sharded, the sum over ranks; waits for what exchange_reduce_layer began.
void exchange_reduce(const ParamList *list);

// Gathers all ranks' rows of memory that has `row_bytes` for every `rows_per_unit` rows of a
// sharded parameter.
void exchange_gather_rows(const ParamList *list, const Param *param, void *memory, size_t row_bytes,
                          int64_t rows_per_unit);

// Makes amaxes of this rank's rows (ParamList.amaxes) those of all ranks' rows, in one exchange.
void exchange_amaxes(const ParamList *list, const Backend *backend);

// Gathers all ranks' rows of updated weights: quantized copies in the order in which the next step
// uses them, beside it.
void exchange_gather(const ParamList *list, const Backend *backend);

// Waits, before the forward pass of a layer, for its rowwise copies, and before the backward pass
// for its columnwise ones. layer -1: those of no layer.
void exchange_await(const ParamList *list, Axis axis, int64_t layer);

// Bytes that this rank sends in a step of `micro_batches`: of gradients, and of updated weights by
// each way to gather, with what Muon gathers before it can update them; and how often, with
// GATHER_MX, amaxes of weights are exchanged, which are among those bytes.
typedef struct {
    double gradients, weights[GATHER_FP32 + 1];
    int amax_exchanges;
    double muon; // the part of each of weights[] that Muon gathers
} WireBytes;
WireBytes exchange_wire_bytes(const ParamList *list, int64_t micro_batches);
