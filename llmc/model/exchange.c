#include "exchange.h"
#include "muon.h"
#include "place.h"
#include "llmc/base/util.h"

#include <stdlib.h>
#include <string.h>

static int64_t shard_unit(const ParamList *list) { return max_int64(MX_BLOCK, list->sharding.unit); }

// Returns each rank's rows, in units of which a row has `per_row`. The caller frees them.
static CommRange *row_ranges(const ParamList *list, const Param *p, int64_t per_row) {
    int size = list->sharding.comm->size;
    CommRange *ranges = allocate((size_t)size * sizeof(*ranges));
    comm_split(ranges, size, p->rows, shard_unit(list));
    comm_scale(ranges, size, per_row);
    return ranges;
}

// Placement

// Sets whether a parameter is sharded, and which rows are this rank's.
static void choose_rows(const ParamList *list, Param *p, bool training) {
    const Comm *comm = list->sharding.comm;
    bool takes_value = p->is_embedding || !mx_is_mx(p->rowwise.format);
    bool used_in_fp32 = p->is_vector || p->needs_fp32 || (takes_value && !p->has_bf16_value);
    p->is_sharded = training && list->sharding.zero > 0 && comm->size > 1 && !used_in_fp32;
    p->first_row = 0;
    p->num_rows = p->rows;
    if (!p->is_sharded) return;
    CommRange own = comm_part(comm->rank, comm->size, p->rows, shard_unit(list));
    p->first_row = own.offset;
    p->num_rows = own.count;
}

void exchange_choose_rows(ParamList *list, bool training) {
    for (int i = 0; i < list->count; i++) {
        choose_rows(list, &list->params[i], training);
    }
}

bool exchange_reduces_by_layer(const ParamList *list, const Param *p) {
    return p->is_sharded && list->sharding.zero == 2 && p->layer >= 0;
}

void exchange_layout_by_layer(ParamList *list, MemoryPlan *plan) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (exchange_reduces_by_layer(list, p))
            p->own_gradient = take_floats(plan, MEMORY_GRADIENTS, p->num_rows * p->cols);
    }
    // Each layer's whole gradients begin where those of the first do; the largest layer's count.
    const MemoryPlan before = *plan;
    MemoryPlan largest = before;
    int64_t layer = -1;
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (!exchange_reduces_by_layer(list, p)) continue;
        if (p->layer != layer) *plan = before;
        layer = p->layer;
        p->gradient = take_floats(plan, MEMORY_GRADIENTS, param_count(p));
        if (plan->used > largest.used) largest = *plan;
    }
    *plan = largest;
}

// Gradients

// Makes all `values` their sums over ranks, sent in the precision that was asked for.
static void reduce_all(const ParamList *list, float *values, int64_t count) {
    Comm *comm = list->sharding.comm;
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    comm_split(ranges, comm->size, count, 1);
    comm->reduce_scatter(comm, values, ranges, list->sharding.reduce);
    comm_scale(ranges, comm->size, sizeof(float));
    comm->all_gather(comm, values, ranges);
    free(ranges);
}

// Makes this rank's rows of a gradient their sums over ranks.
static void reduce_scatter(const ParamList *list, const Param *p) {
    Comm *comm = list->sharding.comm;
    CommRange *ranges = row_ranges(list, p, p->cols);
    comm->reduce_scatter(comm, p->gradient, ranges, list->sharding.reduce);
    free(ranges);
}

// Where a layer's gathers and reductions are waited for.
typedef enum { SLOT_ROWWISE, SLOT_COLUMNWISE, SLOT_REDUCE, SLOTS_PER_LAYER } LayerSlot;

static int slot_of(int64_t layer, LayerSlot slot) { return (int)(layer + 1) * SLOTS_PER_LAYER + slot; }

// Returns whether a parameter's gradients are reduced beside the last micro-batch's backward pass
// (stage 1).
static bool reduces_beside(const ParamList *list, const Param *p) {
    return p->is_sharded && list->sharding.zero == 1 && p->layer >= 0;
}

void exchange_await(const ParamList *list, Axis axis, int64_t layer) {
    Comm *comm = list->sharding.comm;
    comm->wait(comm, slot_of(layer, axis == AXIS_ROWWISE ? SLOT_ROWWISE : SLOT_COLUMNWISE));
}

void exchange_reduce(const ParamList *list) {
    Comm *comm = list->sharding.comm;
    if (comm->size == 1) return;
    if (list->sharding.reduce == FORMAT_FP32) {
        comm->all_reduce_sum(comm, list->gradients, list->replicated_count);
    } else {
        reduce_all(list, list->gradients, list->replicated_count);
    }
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (!p->is_sharded || exchange_reduces_by_layer(list, p)) continue;
        if (reduces_beside(list, p)) {
            comm->wait(comm, slot_of(p->layer, SLOT_REDUCE));
        } else {
            reduce_scatter(list, p);
        }
    }
}

// Begins to reduce a layer's gradients.
static void reduce_beside(const ParamList *list, int64_t layer) {
    Comm *comm = list->sharding.comm;
    comm->fork(comm);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (p->layer == layer && reduces_beside(list, p)) reduce_scatter(list, p);
    }
    comm->join(comm, slot_of(layer, SLOT_REDUCE));
}

void exchange_reduce_layer(const ParamList *list, const Backend *backend, int64_t layer) {
    if (list->sharding.comm->size == 1) return;
    if (list->is_last_micro_batch) reduce_beside(list, layer);
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (p->layer != layer || !exchange_reduces_by_layer(list, p)) continue;
        reduce_scatter(list, p);
        backend->accumulate(p->own_gradient, p->gradient + p->first_row * p->cols, p->num_rows * p->cols);
        param_clear_gradient(p, backend);
    }
}

// Weights

void exchange_amaxes(const ParamList *list, const Backend *backend) {
    size_t count = (size_t)list->num_amaxes, bytes = count * sizeof(uint32_t);
    uint32_t *bits = allocate(bytes);
    double *values = allocate(count * sizeof(double)); // which hold them exactly
    backend->copy_to_host(bits, list->amaxes, bytes);
    for (size_t i = 0; i < count; i++) {
        values[i] = bits[i];
    }
    comm_max_doubles(list->sharding.comm, values, list->num_amaxes);
    for (size_t i = 0; i < count; i++) {
        bits[i] = (uint32_t)values[i];
    }
    backend->copy_to_device(list->amaxes, bits, bytes);
    free(bits);
    free(values);
}

void exchange_gather_rows(const ParamList *list, const Param *p, void *memory, size_t row_bytes,
                          int64_t rows_per_unit) {
    Comm *comm = list->sharding.comm;
    CommRange *ranges = row_ranges(list, p, 1);
    for (int rank = 0; rank < comm->size; rank++) {
        // Both up: a rank without rows begins where the matrix ends, which may be within a unit.
        int64_t first = ranges[rank].offset, end = first + ranges[rank].count;
        int64_t first_unit = (first + rows_per_unit - 1) / rows_per_unit;
        int64_t end_unit = (end + rows_per_unit - 1) / rows_per_unit;
        ranges[rank] = (CommRange){first_unit * (int64_t)row_bytes, (end_unit - first_unit) * (int64_t)row_bytes};
    }
    comm->all_gather(comm, memory, ranges);
    free(ranges);
}

static void gather_copy(const ParamList *list, const Param *p, const QuantizedTensor *copy) {
    if (!copy->elements) return;
    size_t row_of_scales = scaled_scale_bytes(copy->scaling, FORM_PLAIN, copy->axis, 1, p->cols);
    exchange_gather_rows(list, p, copy->elements, (size_t)p->cols, 1);
    if (row_of_scales == 0) return; // of a tensor with one scale
    exchange_gather_rows(list, p, copy->scales, row_of_scales, scaling_block_rows(copy->scaling, copy->axis));
}

static void quantize_whole(const ParamList *list, const Param *p, const Backend *backend, Tensor from) {
    ParamCopies copies = param_mx_copies(p);
    param_quantize_copies(list, p, backend, &copies, from);
}

// Gathers all ranks' values, and makes the copies from them.
static void gather_values(const ParamList *list, const Param *p, const Backend *backend) {
    if (list->sharding.gather == GATHER_BF16) {
        exchange_gather_rows(list, p, p->value.data, (size_t)p->cols * 2, 1);
        quantize_whole(list, p, backend, p->value);
        return;
    }
    Tensor gathered = tensor_make(p->gathered, FORMAT_FP32, p->rows, p->cols);
    backend->convert(tensor_rows(gathered, p->first_row, p->num_rows), param_masters(p));
    exchange_gather_rows(list, p, p->gathered, (size_t)p->cols * sizeof(float), 1);
    if (p->value.dtype == FORMAT_BF16) backend->convert(p->value, gathered);
    quantize_whole(list, p, backend, gathered);
}

// Gathers the copies that a layer's forward or backward pass uses. A BF16 value is used by either.
static void gather_copies(const ParamList *list, Axis axis, int64_t layer) {
    Comm *comm = list->sharding.comm;
    comm->fork(comm);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (!p->is_sharded || p->layer != layer) continue;
        ParamCopies copies = param_mx_copies(p);
        gather_copy(list, p, axis == AXIS_ROWWISE ? &copies.rowwise : &copies.columnwise);
        if (axis == AXIS_ROWWISE && p->value.dtype == FORMAT_BF16) {
            exchange_gather_rows(list, p, p->value.data, (size_t)p->cols * 2, 1);
        }
    }
    comm->join(comm, slot_of(layer, axis == AXIS_ROWWISE ? SLOT_ROWWISE : SLOT_COLUMNWISE));
}

void exchange_gather(const ParamList *list, const Backend *backend) {
    if (list->sharding.comm->size == 1) return;
    int64_t layers = 0;
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        layers = p->layer >= layers ? p->layer + 1 : layers;
        if (p->is_sharded && list->sharding.gather != GATHER_MX) gather_values(list, p, backend);
    }
    if (list->sharding.gather != GATHER_MX) return;
    for (int64_t layer = -1; layer < layers; layer++) {
        gather_copies(list, AXIS_ROWWISE, layer);
    }
    // The backward pass begins with the head, which is of no layer.
    gather_copies(list, AXIS_COLUMNWISE, -1);
    for (int64_t layer = layers; layer-- > 0;) {
        gather_copies(list, AXIS_COLUMNWISE, layer);
    }
}

// Returns how often amaxes are exchanged after an update.
static int amax_exchanges(const ParamList *list) {
    bool rowwise = false, columnwise = false;
    for (int i = 0; i < list->count; i++) {
        rowwise = rowwise || param_shares_amax(list, &list->params[i], AXIS_ROWWISE);
        columnwise = columnwise || param_shares_amax(list, &list->params[i], AXIS_COLUMNWISE);
    }
    return rowwise + columnwise;
}

WireBytes exchange_wire_bytes(const ParamList *list, int64_t micro_batches) {
    const Sharding *sharding = &list->sharding;
    double others = sharding->comm->size - 1, ranks = sharding->comm->size;
    double gradient_bytes = sharding->reduce == FORMAT_FP32 ? 4 : 2;
    // With MPI every rank sends its own rows to all; a ring, as NCCL's, passes all rows on, as many
    // for each rank.
    bool is_ring = strcmp(sharding->comm->name, "mpi") != 0;
    // Every rank sends each other one its part of the sum, then gathers the sums, in FP32.
    WireBytes bytes = {.gradients = (double)list->replicated_count * (gradient_bytes + 4) * others / ranks};
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (!p->is_sharded) continue;
        int64_t rows = is_ring ? p->rows : p->num_rows;
        double part = is_ring ? 1 / ranks : 1;
        double all = (double)param_count(p), own = part * (double)(rows * p->cols), mx = 0;
        double times = exchange_reduces_by_layer(list, p) ? (double)micro_batches : 1;
        bytes.gradients += (all - own) * gradient_bytes * times;
        bool is_one = p->square_copies && mx_is_mx(p->rowwise.format);
        const QuantizedTensor *copies[] = {&p->rowwise, is_one ? NULL : &p->columnwise};
        for (int c = 0; c < 2; c++) {
            if (!copies[c] || !mx_is_mx(copies[c]->format)) continue;
            mx +=
                own + part * (double)scaled_scale_bytes(copies[c]->scaling, FORM_PLAIN, copies[c]->axis, rows, p->cols);
        }
        if (muon_takes(list, p)) bytes.muon += others * 2 * own;
        bytes.weights[GATHER_MX] += others * (mx + (p->has_bf16_value ? 2 * own : 0));
        bytes.weights[GATHER_BF16] += others * 2 * own;
        bytes.weights[GATHER_FP32] += others * 4 * own;
    }
    for (int gather = 0; gather <= GATHER_FP32; gather++) {
        bytes.weights[gather] += bytes.muon;
    }
    bytes.amax_exchanges = amax_exchanges(list);
    bytes.weights[GATHER_MX] += others * (double)sizeof(double) * bytes.amax_exchanges * list->num_amaxes;
    return bytes;
}
