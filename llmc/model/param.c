#include "param.h"
#include "llmc/base/random.h" // Philox
#include "llmc/base/util.h"

#include <stdlib.h>
#include <string.h>

int64_t param_list_count(const ParamList *list) {
    int64_t count = 0;
    for (int i = 0; i < list->count; i++) {
        count += param_count(&list->params[i]);
    }
    return count;
}

static void set_capacity(ParamList *list, int capacity) {
    list->capacity = capacity;
    list->params = realloc(list->params, (size_t)capacity * sizeof(Param));
    if (!list->params) die("out of memory");
}

void param_list_reserve(ParamList *list, int count) {
    set_capacity(list, count);
    list->is_reserved = true;
}

int param_list_add(ParamList *list, Param param) {
    if (list->count == list->capacity) {
        if (list->is_reserved) die("internal error: more parameters than were reserved");
        set_capacity(list, list->capacity ? 2 * list->capacity : 64);
    }
    list->params[list->count] = param;
    return list->count++;
}

void param_list_borrow_masters(ParamList *list, const ParamList *from) {
    list->borrows_masters = true;
    for (int i = 0; i < list->count; i++) {
        list->params[i].master = from->params[i].master;
    }
}

Param *param_list_find(const ParamList *list, const char *name) {
    for (int i = 0; i < list->count; i++) {
        if (strcmp(list->params[i].name, name) == 0) return &list->params[i];
    }
    return NULL;
}

void param_list_free(ParamList *list) {
    free(list->params);
    *list = (ParamList){0};
}

// Each rank's rows, in units of which a row has `per_row`. To be freed.
static CommRange *row_ranges(const ParamList *list, const Param *p, int64_t per_row) {
    int size = list->sharding.comm->size;
    CommRange *ranges = allocate((size_t)size * sizeof(*ranges));
    comm_split(ranges, size, p->rows, MX_BLOCK);
    for (int rank = 0; rank < size; rank++) {
        ranges[rank].offset *= per_row;
        ranges[rank].count *= per_row;
    }
    return ranges;
}

// Placement

static void place_copy(QuantizedTensor *copy, const Param *p, MemoryPlan *plan, const Backend *backend, Axis axis) {
    if (!mx_is_mx(copy->format)) return;
    bool is_plain = p->is_sharded || axis == AXIS_SQUARE; // ranks exchange it; one that is used along both axes
    QuantizedForm form = is_plain ? FORM_PLAIN : backend->quantized_form(false);
    void *memory = memory_take(plan, MEMORY_QUANTIZED, quantized_bytes(form, axis, p->rows, p->cols));
    *copy = quantized_make(memory, copy->format, axis, p->rows, p->cols, form);
}

static void place_copies(Param *p, MemoryPlan *plan, const Backend *backend, bool training) {
    if (!p->square_copies) {
        place_copy(&p->rowwise, p, plan, backend, AXIS_ROWWISE);
        if (training) place_copy(&p->columnwise, p, plan, backend, AXIS_COLUMNWISE);
        return;
    }
    bool is_forward = mx_is_mx(p->rowwise.format), is_backward = mx_is_mx(p->columnwise.format);
    QuantizedTensor copy = is_forward ? p->rowwise : p->columnwise;
    if (is_forward || training) place_copy(&copy, p, plan, backend, AXIS_SQUARE);
    if (is_forward) p->rowwise = copy;
    if (is_backward) p->columnwise = copy;
}

// A value that went through an MX format: decoded as BF16, which holds it exactly, and that as
// FP32.
static void place_decoded(Param *p, MemoryPlan *plan) {
    p->value.data = memory_take(plan, MEMORY_QUANTIZED, (size_t)param_count(p) * sizeof(float));
    void *memory = memory_take(plan, MEMORY_QUANTIZED, quantized_bytes(FORM_DECODED, AXIS_ROWWISE, p->rows, p->cols));
    p->decoded = quantized_make(memory, p->value_format, AXIS_ROWWISE, p->rows, p->cols, FORM_DECODED);
}

// Returns the MX copies that have memory of their own: two, or one, in `rowwise`, where they are
// square. Those that there aren't have no elements.
static ParamCopies mx_copies(const Param *p) {
    ParamCopies copies = {.rowwise = p->rowwise, .columnwise = p->columnwise};
    if (!p->square_copies) return copies;
    if (!copies.rowwise.elements) copies.rowwise = copies.columnwise;
    copies.columnwise = (QuantizedTensor){0};
    return copies;
}

static void choose_rows(const ParamList *list, Param *p, bool training) {
    const Comm *comm = list->sharding.comm;
    bool used_in_fp32 = p->is_vector || p->needs_fp32 || (!p->has_bf16_value && !mx_is_mx(p->rowwise.format));
    p->is_sharded = training && list->sharding.zero > 0 && comm->size > 1 && !used_in_fp32;
    p->first_row = 0;
    p->num_rows = p->rows;
    if (!p->is_sharded) return;
    CommRange *ranges = row_ranges(list, p, 1);
    p->first_row = ranges[comm->rank].offset;
    p->num_rows = ranges[comm->rank].count;
    free(ranges);
}

static bool reduces_by_layer(const ParamList *list, const Param *p) {
    return p->is_sharded && list->sharding.zero == 2 && p->layer >= 0;
}

// The parameter that has this one's place in the first layer that reduces its own: layers have the
// same parameters.
static const Param *param_of_first_layer(const ParamList *list, const Param *param) {
    int place = 0, other_place = 0;
    int64_t first = -1;
    for (const Param *p = list->params; p < param; p++) {
        place += reduces_by_layer(list, p) && p->layer == param->layer;
    }
    for (const Param *p = list->params;; p++) {
        if (!reduces_by_layer(list, p)) continue;
        if (first < 0) first = p->layer;
        if (p->layer == first && other_place++ == place) return p;
    }
}

static float *take_gradient(const Param *p, MemoryPlan *plan, int64_t rows) {
    return memory_take(plan, MEMORY_GRADIENTS, (size_t)(rows * p->cols) * sizeof(float));
}

// Full gradients of the parameters that are `sharded`, or are not.
static void layout_full(ParamList *list, MemoryPlan *plan, bool sharded) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (p->is_sharded != sharded || reduces_by_layer(list, p)) continue;
        p->gradient = take_gradient(p, plan, p->rows);
        p->own_gradient = p->gradient ? p->gradient + p->first_row * p->cols : NULL;
    }
}

// Stage 2: the sums of this rank's rows, and one layer's gradients, which lie where every other
// layer's do.
static void layout_by_layer(ParamList *list, MemoryPlan *plan) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (reduces_by_layer(list, p)) p->own_gradient = take_gradient(p, plan, p->num_rows);
    }
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (!reduces_by_layer(list, p)) continue;
        const Param *same = param_of_first_layer(list, p);
        p->gradient = same == p ? take_gradient(p, plan, p->rows) : same->gradient;
    }
}

// In one piece, so that they are zeroed, summed and exchanged in one call.
static void layout_gradients(ParamList *list, MemoryPlan *plan) {
    size_t start = plan->used;
    void *first = plan->base ? plan->base + start : NULL;
    list->gradients = first;
    layout_full(list, plan, false);
    list->replicated_count = (int64_t)((plan->used - start) / sizeof(float));
    layout_full(list, plan, true);
    layout_by_layer(list, plan);
    list->gradients_count = (int64_t)((plan->used - start) / sizeof(float));
}

void param_list_layout(ParamList *list, MemoryPlan *plan, const Backend *backend, bool training) {
    for (int i = 0; i < list->count; i++) {
        choose_rows(list, &list->params[i], training);
    }
    if (training) layout_gradients(list, plan);
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        size_t bytes = (size_t)param_count(p) * sizeof(float), own = (size_t)(p->num_rows * p->cols) * sizeof(float);
        if (!list->borrows_masters) p->master = memory_take(plan, MEMORY_MASTERS, own);
        if (training && !list->borrows_masters) {
            p->moment1 = memory_take(plan, MEMORY_MOMENTS, own);
            p->moment2 = memory_take(plan, MEMORY_MOMENTS, own);
        }
        bool bf16_is_gathered = p->is_sharded && list->sharding.gather == GATHER_BF16;
        p->value = tensor_make(p->master, FORMAT_FP32, p->rows, p->cols);
        if (p->has_bf16_value || bf16_is_gathered) {
            p->value = tensor_make(memory_take(plan, MEMORY_WEIGHTS, bytes / 2), FORMAT_BF16, p->rows, p->cols);
        }
        if (mx_is_mx(p->value_format)) place_decoded(p, plan);
        p->gathered = NULL;
        if (p->is_sharded && list->sharding.gather == GATHER_FP32) {
            p->gathered = memory_take(plan, MEMORY_WEIGHTS, bytes);
        }
        place_copies(p, plan, backend, training);
    }
}

void param_list_init(ParamList *list, const Backend *backend, uint64_t seed) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        int64_t first = p->first_row * p->cols, count = p->num_rows * p->cols;
        float *values = allocate((size_t)count * sizeof(float));
#pragma omp parallel for schedule(static)
        for (int64_t j = 0; j < count; j++) {
            values[j] = p->init_stddev > 0 ? p->init_stddev * random_normal(seed, (uint64_t)i, (uint64_t)(first + j))
                                           : p->init_value;
        }
        backend->copy_to_device(p->master, values, (size_t)count * sizeof(float));
        free(values);
    }
}

static Tensor masters_of(const Param *p) { return tensor_make(p->master, FORMAT_FP32, p->num_rows, p->cols); }

// Between ranks

// The sum over ranks of all `values`, sent in the precision that was asked for.
static void reduce_all(const ParamList *list, float *values, int64_t count) {
    Comm *comm = list->sharding.comm;
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    comm_split(ranges, comm->size, count, 1);
    comm->reduce_scatter(comm, values, ranges, list->sharding.reduce);
    for (int rank = 0; rank < comm->size; rank++) {
        ranges[rank].offset *= (int64_t)sizeof(float);
        ranges[rank].count *= (int64_t)sizeof(float);
    }
    comm->all_gather(comm, values, ranges);
    free(ranges);
}

static void reduce_scatter(const ParamList *list, const Param *p) {
    Comm *comm = list->sharding.comm;
    CommRange *ranges = row_ranges(list, p, p->cols);
    comm->reduce_scatter(comm, p->gradient, ranges, list->sharding.reduce);
    free(ranges);
}

// Where a layer's gathers and reductions are waited for.
typedef enum { SLOT_ROWWISE, SLOT_COLUMNWISE, SLOT_REDUCE, SLOTS_PER_LAYER } LayerSlot;

static int slot_of(int64_t layer, LayerSlot slot) { return (int)(layer + 1) * SLOTS_PER_LAYER + slot; }

static bool reduces_beside(const ParamList *list, const Param *p) {
    return p->is_sharded && list->sharding.zero == 1 && p->layer >= 0;
}

void param_list_await(const ParamList *list, Axis axis, int64_t layer) {
    Comm *comm = list->sharding.comm;
    comm->wait(comm, slot_of(layer, axis == AXIS_ROWWISE ? SLOT_ROWWISE : SLOT_COLUMNWISE));
}

void param_list_reduce(ParamList *list) {
    Comm *comm = list->sharding.comm;
    bool begun = list->is_last_micro_batch;
    list->is_last_micro_batch = false;
    if (comm->size == 1) return;
    if (list->sharding.reduce == FORMAT_FP32) {
        comm->all_reduce_sum(comm, list->gradients, list->replicated_count);
    } else {
        reduce_all(list, list->gradients, list->replicated_count);
    }
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (!p->is_sharded || reduces_by_layer(list, p)) continue;
        if (begun && reduces_beside(list, p)) {
            comm->wait(comm, slot_of(p->layer, SLOT_REDUCE));
        } else {
            reduce_scatter(list, p);
        }
    }
}

static void reduce_beside(const ParamList *list, int64_t layer) {
    Comm *comm = list->sharding.comm;
    comm->fork(comm);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (p->layer == layer && reduces_beside(list, p)) reduce_scatter(list, p);
    }
    comm->join(comm, slot_of(layer, SLOT_REDUCE));
}

void param_list_reduce_layer(const ParamList *list, const Backend *backend, int64_t layer) {
    if (list->sharding.comm->size == 1) return;
    if (list->is_last_micro_batch) reduce_beside(list, layer);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (p->layer != layer || !reduces_by_layer(list, p)) continue;
        reduce_scatter(list, p);
        backend->accumulate(p->own_gradient, p->gradient + p->first_row * p->cols, p->num_rows * p->cols);
        backend->zero(p->gradient, (size_t)param_count(p) * sizeof(float));
    }
}

// All ranks' rows of memory that has `row_bytes` for every `rows_per_unit` rows.
static void gather_rows(const ParamList *list, const Param *p, void *memory, size_t row_bytes, int64_t rows_per_unit) {
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
    int64_t scale_rows = copy->axis == AXIS_ROWWISE ? 1 : MX_BLOCK; // that share scales
    gather_rows(list, p, copy->elements, (size_t)p->cols, 1);
    gather_rows(list, p, copy->scales, (size_t)mx_num_scales(copy->axis, 1, p->cols), scale_rows);
}

WireBytes param_list_wire_bytes(const ParamList *list, int64_t micro_batches) {
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
        double times = reduces_by_layer(list, p) ? (double)micro_batches : 1;
        bytes.gradients += (all - own) * gradient_bytes * times;
        bool is_one = p->square_copies && mx_is_mx(p->rowwise.format);
        const QuantizedTensor *copies[] = {&p->rowwise, is_one ? NULL : &p->columnwise};
        for (int c = 0; c < 2; c++) {
            if (!copies[c] || !mx_is_mx(copies[c]->format)) continue;
            mx += own + part * (double)mx_num_scales(copies[c]->axis, rows, p->cols);
        }
        bytes.weights[GATHER_MX] += others * (mx + (p->has_bf16_value ? 2 * own : 0));
        bytes.weights[GATHER_BF16] += others * 2 * own;
        bytes.weights[GATHER_FP32] += others * 4 * own;
    }
    return bytes;
}

// Copies

static void quantize_copies(const Backend *backend, const ParamCopies *copies, Tensor from, ScaleRounding rounding) {
    const QuantizedTensor *rowwise = copies->rowwise.elements ? &copies->rowwise : NULL;
    const QuantizedTensor *columnwise = copies->columnwise.elements ? &copies->columnwise : NULL;
    if (rowwise || columnwise) backend->quantize(rowwise, columnwise, source_tensor(from), rounding);
}

static void quantize_whole(const Param *p, const Backend *backend, Tensor from) {
    ParamCopies copies = mx_copies(p);
    quantize_copies(backend, &copies, from, p->rounding);
}

// The values of all ranks, and the copies from them.
static void gather_values(const ParamList *list, const Param *p, const Backend *backend) {
    if (list->sharding.gather == GATHER_BF16) {
        gather_rows(list, p, p->value.data, (size_t)p->cols * 2, 1);
        quantize_whole(p, backend, p->value);
        return;
    }
    Tensor gathered = tensor_make(p->gathered, FORMAT_FP32, p->rows, p->cols);
    backend->convert(tensor_rows(gathered, p->first_row, p->num_rows), masters_of(p));
    gather_rows(list, p, p->gathered, (size_t)p->cols * sizeof(float), 1);
    if (p->value.dtype == FORMAT_BF16) backend->convert(p->value, gathered);
    quantize_whole(p, backend, gathered);
}

// The copies that a layer's forward or backward pass uses. A BF16 value is used by either.
static void gather_copies(const ParamList *list, Axis axis, int64_t layer) {
    Comm *comm = list->sharding.comm;
    comm->fork(comm);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (!p->is_sharded || p->layer != layer) continue;
        ParamCopies copies = mx_copies(p);
        gather_copy(list, p, axis == AXIS_ROWWISE ? &copies.rowwise : &copies.columnwise);
        if (axis == AXIS_ROWWISE && p->value.dtype == FORMAT_BF16) {
            gather_rows(list, p, p->value.data, (size_t)p->cols * 2, 1);
        }
    }
    comm->join(comm, slot_of(layer, axis == AXIS_ROWWISE ? SLOT_ROWWISE : SLOT_COLUMNWISE));
}

// MX copies in the order in which the next step uses them, beside it.
static void gather_all(const ParamList *list, const Backend *backend) {
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
    for (int64_t layer = layers; layer-- > -1;) {
        gather_copies(list, AXIS_COLUMNWISE, layer);
    }
}

// Makes the value of a vector that goes through an MX format.
static void make_decoded_value(const Param *p, const Backend *backend) {
    if (!p->decoded.elements) return;
    backend->quantize(&p->decoded, NULL, source_tensor(masters_of(p)), p->rounding);
    backend->convert(p->value, tensor_make(p->decoded.elements, FORMAT_BF16, p->rows, p->cols));
}

// Returns the rows of a copy that are this rank's.
static QuantizedTensor own_rows(QuantizedTensor copy, const Param *p) {
    if (!copy.elements) return copy;
    copy.rows = p->num_rows;
    copy.elements += p->first_row * p->cols;
    copy.scales += mx_scale_offset(copy.axis, p->first_row, 0, p->cols);
    return copy;
}

ParamCopies param_own_copies(const ParamList *list, const Param *p) {
    ParamCopies copies = {0};
    if (!p->is_sharded || list->sharding.gather == GATHER_MX) {
        copies = mx_copies(p);
        copies.rowwise = own_rows(copies.rowwise, p);
        copies.columnwise = own_rows(copies.columnwise, p);
    }
    bool is_bf16 = p->value.dtype == FORMAT_BF16 && !p->gathered;
    if (is_bf16) copies.bf16 = (uint16_t *)p->value.data + p->first_row * p->cols;
    return copies;
}

void param_list_complete(const ParamList *list, const Backend *backend) {
    for (int i = 0; i < list->count; i++) {
        make_decoded_value(&list->params[i], backend);
    }
    gather_all(list, backend);
}

void param_list_refresh(const ParamList *list, const Backend *backend) {
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        ParamCopies copies = param_own_copies(list, p);
        Tensor bf16 = tensor_make(copies.bf16, FORMAT_BF16, p->num_rows, p->cols);
        if (copies.bf16) backend->convert(bf16, masters_of(p));
        quantize_copies(backend, &copies, masters_of(p), p->rounding);
    }
    param_list_complete(list, backend);
}
