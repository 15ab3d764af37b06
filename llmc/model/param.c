#include "param.h"
#include "exchange.h"
#include "muon.h"
#include "place.h"
#include "llmc/base/random.h" // Philox
#include "llmc/base/util.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t param_list_count(const ParamList *list) {
    int64_t count = 0;
    for (int i = 0; i < list->count; i++) {
        count += param_count(&list->params[i]);
    }
    return count;
}

void param_list_reserve(ParamList *list, int count) {
    list->capacity = count;
    list->params = allocate((size_t)count * sizeof(Param));
}

int param_list_add(ParamList *list, Param param) {
    if (list->count == list->capacity) die("internal error: more parameters than were reserved");
    param.number = list->count;
    list->params[list->count] = param;
    return list->count++;
}

void param_list_borrow_masters(ParamList *list, const ParamList *from) {
    list->borrows_masters = true;
    for (int i = 0; i < list->count; i++) {
        list->params[i].master = from->params[i].master;
    }
}

void param_list_free(ParamList *list) {
    free(list->params);
    *list = (ParamList){0};
}

// Placement

// Returns the form of a weight's copy. What ranks exchange is plain, and what is used along both
// axes; and what has rows behind it that aren't made, where columns would be of two lengths.
static QuantizedForm copy_form(const ParamList *list, const Param *p, const Backend *backend, Scaling scaling,
                               Axis axis) {
    if (p->is_sharded) return FORM_PLAIN;
    if (list->sharding.decoded && backend->quantized_form(scaling, axis, true) == FORM_DECODED) return FORM_DECODED;
    QuantizedForm form = axis == AXIS_SQUARE ? FORM_PLAIN : backend->quantized_form(scaling, axis, false);
    return form == FORM_TRANSPOSED && p->rows != param_gemm_rows(p) ? FORM_PLAIN : form;
}

static void place_copy(QuantizedTensor *copy, const ParamList *list, const Param *p, MemoryPlan *plan,
                       const Backend *backend, Axis axis) {
    if (!mx_is_mx(copy->format)) return;
    QuantizedForm form = copy_form(list, p, backend, copy->scaling, axis);
    const DelayedScale delayed = copy->delayed;
    const Encoding encoding = copy->encoding;
    *copy = take_scaled(plan, MEMORY_QUANTIZED, copy->format, copy->scaling, axis, param_gemm_rows(p), p->cols, form);
    copy->rows = p->rows; // what is made; the rest stays 0
    copy->delayed = delayed;
    copy->encoding = encoding;
}

static void place_copies(const ParamList *list, Param *p, MemoryPlan *plan, const Backend *backend, bool training) {
    if (!p->square_copies) {
        place_copy(&p->rowwise, list, p, plan, backend, AXIS_ROWWISE);
        if (training) place_copy(&p->columnwise, list, p, plan, backend, AXIS_COLUMNWISE);
        return;
    }
    bool is_forward = mx_is_mx(p->rowwise.format), is_backward = mx_is_mx(p->columnwise.format);
    QuantizedTensor copy = is_forward ? p->rowwise : p->columnwise;
    if (is_forward || training) place_copy(&copy, list, p, plan, backend, AXIS_SQUARE);
    if (is_forward) p->rowwise = copy;
    if (is_backward) p->columnwise = copy;
}

// Returns whether a copy is made of what the master is transformed to.
static bool is_transformed(const Param *p) {
    return (mx_is_mx(p->rowwise.format) && p->hadamard[GEMM_FPROP].size) ||
           (mx_is_mx(p->columnwise.format) && p->hadamard[GEMM_DGRAD].size);
}

// Returns whether both copies are made at once: one of square blocks, or two of the same values.
static bool are_made_at_once(const Param *p) { return p->square_copies || (!is_transformed(p) && !p->from_forward); }

// Returns whether a copy has a factor and is made by several ranks, each of its rows.
static bool has_shared_factor(const ParamList *list, const Param *p, const QuantizedTensor *copy) {
    bool is_shared = p->is_sharded && list->sharding.gather == GATHER_MX;
    return is_shared && mx_is_mx(copy->format) && scaling_has_factor(copy->scaling);
}

bool param_shares_amax(const ParamList *list, const Param *p, Axis axis) {
    bool rowwise = has_shared_factor(list, p, &p->rowwise), columnwise = has_shared_factor(list, p, &p->columnwise);
    if (are_made_at_once(p)) return axis == AXIS_ROWWISE && (rowwise || columnwise);
    return axis == AXIS_ROWWISE ? rowwise : columnwise;
}

// Places the amaxes that ranks share: of a parameter one for each time that copies are made.
static void layout_amaxes(ParamList *list, MemoryPlan *plan) {
    list->num_amaxes = 0;
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        list->num_amaxes += param_shares_amax(list, p, AXIS_ROWWISE) + param_shares_amax(list, p, AXIS_COLUMNWISE);
    }
    list->amaxes = memory_take(plan, MEMORY_QUANTIZED, (size_t)list->num_amaxes * sizeof(uint32_t));
    uint32_t *next = list->amaxes;
    for (int i = 0; next && i < list->count; i++) {
        Param *p = &list->params[i];
        uint32_t *first = next;
        next += param_shares_amax(list, p, AXIS_ROWWISE);
        bool is_apart = param_shares_amax(list, p, AXIS_COLUMNWISE);
        if (has_shared_factor(list, p, &p->rowwise)) p->rowwise.amax = first;
        if (has_shared_factor(list, p, &p->columnwise)) p->columnwise.amax = is_apart ? next : first;
        next += is_apart;
    }
}

// Places what copies are made from that aren't made from masters themselves.
static void layout_copies(ParamList *list, MemoryPlan *plan) {
    int64_t values = 0, transformed = 0;
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        int64_t rows = list->sharding.gather == GATHER_MX ? p->num_rows : p->rows;
        if (p->from_forward) values = max_int64(values, rows * p->cols);
        if (is_transformed(p)) transformed = max_int64(transformed, rows * p->cols);
    }
    list->copies = (CopyScratch){0};
    if (values) list->copies.values = memory_take(plan, MEMORY_SCRATCH, (size_t)values * sizeof(uint16_t));
    if (transformed) list->copies.transformed = take_floats(plan, MEMORY_SCRATCH, transformed);
}

// Places a value that goes through an MX format: decoded as BF16, which holds it exactly, and that
// as FP32.
static void place_decoded(Param *p, MemoryPlan *plan) {
    const Encoding encoding = p->decoded.encoding;
    p->value = take_tensor(plan, MEMORY_QUANTIZED, FORMAT_FP32, p->rows, p->cols);
    p->decoded =
        take_scaled(plan, MEMORY_QUANTIZED, p->value_format, SCALING_MX, AXIS_ROWWISE, p->rows, p->cols, FORM_DECODED);
    p->decoded.encoding = encoding;
}

// Places the full gradients of vectors, or of the matrices that are sharded, or are not.
static void layout_full(ParamList *list, MemoryPlan *plan, bool vectors, bool sharded) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (p->is_vector != vectors || p->is_sharded != sharded || exchange_reduces_by_layer(list, p)) continue;
        p->gradient = take_floats(plan, MEMORY_GRADIENTS, param_gemm_rows(p) * p->cols);
        p->own_gradient = p->gradient ? p->gradient + p->first_row * p->cols : NULL;
    }
}

static float *floats_at(const MemoryPlan *plan, size_t offset) {
    return plan->base ? (float *)(plan->base + offset) : NULL;
}

// Places gradients in one piece, so that they are summed and exchanged in one call: vectors' first.
static void layout_gradients(ParamList *list, MemoryPlan *plan) {
    size_t start = plan->used;
    list->gradients = list->vectors.gradient = floats_at(plan, start);
    layout_full(list, plan, true, false);
    list->vectors.count = (int64_t)((plan->used - start) / sizeof(float));
    layout_full(list, plan, false, false);
    list->replicated_count = (int64_t)((plan->used - start) / sizeof(float));
    layout_full(list, plan, false, true);
    exchange_layout_by_layer(list, plan);
    list->gradients_count = (int64_t)((plan->used - start) / sizeof(float));
}

typedef enum { MASTER, MOMENT1, MOMENT2 } State;

// Places one array of the parameters' state, vectors' part of it first, and returns where that is.
static float *layout_state(ParamList *list, MemoryPlan *plan, State state) {
    float *first = floats_at(plan, plan->used);
    for (int matrices = 0; matrices < 2; matrices++) {
        for (int i = 0; i < list->count; i++) {
            Param *p = &list->params[i];
            if (p->is_vector == (matrices == 1) || (state == MOMENT2 && muon_takes(list, p))) continue;
            float *values = take_floats(plan, state == MASTER ? MEMORY_MASTERS : MEMORY_MOMENTS, p->num_rows * p->cols);
            if (state == MASTER) p->master = values;
            if (state == MOMENT1) p->moment1 = values;
            if (state == MOMENT2) p->moment2 = values;
        }
    }
    return first;
}

void param_list_layout(ParamList *list, MemoryPlan *plan, const Backend *backend, bool training) {
    exchange_choose_rows(list, training);
    if (training) layout_gradients(list, plan);
    if (!list->borrows_masters) list->vectors.master = layout_state(list, plan, MASTER);
    if (!list->borrows_masters && training) {
        list->vectors.moment1 = layout_state(list, plan, MOMENT1);
        list->vectors.moment2 = layout_state(list, plan, MOMENT2);
    }
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        p->is_gathered = p->is_sharded && list->sharding.gather != GATHER_MX;
        bool bf16_is_gathered = p->is_gathered && list->sharding.gather == GATHER_BF16;
        p->value = tensor_make(p->master, FORMAT_FP32, p->rows, p->cols);
        if (p->has_bf16_value || bf16_is_gathered) {
            p->value = take_tensor(plan, MEMORY_WEIGHTS, FORMAT_BF16, param_gemm_rows(p), p->cols);
            p->value.rows = p->rows;
        }
        if (mx_is_mx(p->value_format)) place_decoded(p, plan);
        p->gathered = NULL;
        if (p->is_gathered && list->sharding.gather == GATHER_FP32) {
            p->gathered = take_floats(plan, MEMORY_WEIGHTS, param_count(p));
        }
        place_copies(list, p, plan, backend, training);
    }
    layout_copies(list, plan);
    layout_amaxes(list, plan);
    if (training && !list->borrows_masters) muon_layout(list, plan, backend);
}

// Gradients

void param_clear_gradient(Param *p, const Backend *backend) {
    p->gradient_is_stale = p->gemm_writes_gradient;
    if (!p->gemm_writes_gradient) backend->zero(p->gradient, (size_t)param_count(p) * sizeof(float));
}

void param_list_clear_gradients(ParamList *list, const Backend *backend) {
    backend->zero(list->vectors.gradient, (size_t)list->vectors.count * sizeof(float));
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (p->is_vector) continue;
        param_clear_gradient(p, backend);
        if (!exchange_reduces_by_layer(list, p)) continue;
        backend->zero(p->own_gradient, (size_t)(p->num_rows * p->cols) * sizeof(float));
    }
}

// Initial values

// Returns a normal value. One beyond the cutoff is drawn again, from indices that no element has.
static float normal_within(float cutoff, uint64_t seed, uint64_t stream, uint64_t at) {
    float value = random_normal(seed, stream, at);
    for (uint64_t again = 1; cutoff > 0 && fabsf(value) > cutoff; again++) {
        value = random_normal(seed, stream, at + (again << 48));
    }
    return value;
}

void param_list_init(ParamList *list, const Backend *backend, uint64_t seed) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        int64_t first = p->first_row * p->cols, count = p->num_rows * p->cols;
        float *values = allocate((size_t)count * sizeof(float));
#pragma omp parallel for schedule(static)
        for (int64_t j = 0; j < count; j++) {
            uint64_t at = (uint64_t)(first + j);
            values[j] = p->init_stddev > 0  ? p->init_stddev * normal_within(p->init_cutoff, seed, (uint64_t)i, at)
                        : p->init_bound > 0 ? p->init_bound * (2 * random_uniform(seed, (uint64_t)i, at) - 1)
                                            : p->init_value;
        }
        backend->copy_to_device(p->master, values, (size_t)count * sizeof(float));
        free(values);
    }
}

// Copies

void param_list_set_draws(ParamList *list, uint64_t seed, int64_t updates) {
    list->seed = seed;
    list->updates = updates;
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
            uint64_t stream = HADAMARD_STREAMS + NUM_GEMMS * (uint64_t)i + (uint64_t)gemm;
            if (p->has_random_signs[gemm]) philox(p->hadamard[gemm].minus, seed, stream, (uint64_t)updates);
        }
        p->rowwise.encoding.at = p->columnwise.encoding.at = p->decoded.encoding.at = (DrawPlace){seed, updates, 0};
    }
}

ParamCopies param_mx_copies(const Param *p) {
    ParamCopies copies = {.rowwise = p->rowwise, .columnwise = p->columnwise};
    if (!p->square_copies) return copies;
    if (!copies.rowwise.elements) copies.rowwise = copies.columnwise;
    copies.columnwise = (QuantizedTensor){0};
    return copies;
}

bool param_copies_are_plain(const Param *p) {
    bool is_mx = p->rowwise.scaling == SCALING_MX && p->columnwise.scaling == SCALING_MX;
    return is_mx && !is_transformed(p) && !p->from_forward;
}

// Returns what a parameter's copies along an axis, or all of those that are made at once, are made
// from: `from`, or what the rowwise copy decodes to, or the transform of either.
static Tensor copies_source(const ParamList *list, const Param *p, const Backend *backend, const ParamCopies *copies,
                            Tensor from, Axis axis) {
    if (!is_transformed(p) && !p->from_forward) return from;
    bool is_square_dgrads = p->square_copies && !mx_is_mx(p->rowwise.format); // that fprop doesn't take
    bool is_dgrads = axis == AXIS_COLUMNWISE || is_square_dgrads;
    Hadamard hadamard = p->hadamard[is_dgrads ? GEMM_DGRAD : GEMM_FPROP];
    if (p->from_forward && axis == AXIS_COLUMNWISE) {
        from = tensor_make(list->copies.values, FORMAT_BF16, from.rows, from.cols);
        backend->decode(from, &copies->rowwise);
    }
    if (hadamard.size == 0) return from;
    Tensor transformed = tensor_make(list->copies.transformed, from.dtype, from.rows, from.cols);
    backend->hadamard(transformed, from, is_dgrads ? AXIS_COLUMNWISE : AXIS_ROWWISE, hadamard);
    return transformed;
}

// Makes of `from` the rowwise copy, or the columnwise one. Where they are made at once, the rowwise
// axis means both.
static void quantize_along(const ParamList *list, const Param *p, const Backend *backend, const ParamCopies *copies,
                           Tensor from, Axis axis) {
    bool has_columnwise = are_made_at_once(p) == (axis == AXIS_ROWWISE);
    const QuantizedTensor *rowwise = axis == AXIS_ROWWISE && copies->rowwise.elements ? &copies->rowwise : NULL;
    const QuantizedTensor *columnwise = has_columnwise && copies->columnwise.elements ? &copies->columnwise : NULL;
    if (!rowwise && !columnwise) return;
    Tensor source = copies_source(list, p, backend, copies, from, axis);
    backend->quantize(rowwise, columnwise, source_tensor(source), p->rounding);
}

void param_quantize_copies(const ParamList *list, const Param *p, const Backend *backend, const ParamCopies *copies,
                           Tensor from) {
    quantize_along(list, p, backend, copies, from, AXIS_ROWWISE);
    quantize_along(list, p, backend, copies, from, AXIS_COLUMNWISE);
}

// Makes the value of a vector that goes through an MX format.
static void make_decoded_value(const Param *p, const Backend *backend) {
    if (!p->decoded.elements) return;
    backend->quantize(&p->decoded, NULL, source_tensor(param_masters(p)), p->rounding);
    backend->convert(p->value, tensor_make(p->decoded.elements, FORMAT_BF16, p->rows, p->cols));
}

// Returns this rank's rows of a copy: all of it, unless the parameter is sharded, whose copies are
// plain.
static QuantizedTensor own_rows(QuantizedTensor copy, const Param *p) {
    if (!copy.elements) return copy;
    return quantized_rows(copy, p->first_row, p->num_rows);
}

// Returns the rows of a parameter's quantized copies that are this rank's.
static ParamCopies own_mx_copies(const Param *p) {
    ParamCopies copies = param_mx_copies(p);
    copies.rowwise = own_rows(copies.rowwise, p);
    copies.columnwise = own_rows(copies.columnwise, p);
    return copies;
}

// Returns whether a parameter's copies wait for the amaxes of other ranks' rows.
static bool waits_for_amax(const ParamList *list, const Param *p) {
    return param_shares_amax(list, p, AXIS_ROWWISE) || param_shares_amax(list, p, AXIS_COLUMNWISE);
}

ParamCopies param_own_copies(const ParamList *list, const Param *p) {
    ParamCopies copies = {0};
    bool is_made_here = !p->is_sharded || list->sharding.gather == GATHER_MX;
    if (is_made_here && !waits_for_amax(list, p)) copies = own_mx_copies(p);
    bool is_bf16 = p->value.dtype == FORMAT_BF16 && !p->gathered;
    if (is_bf16) copies.bf16 = (uint16_t *)p->value.data + p->first_row * p->cols;
    return copies;
}

// Finds the amax of this rank's rows of what copies along an axis are made from.
static void find_amax(const ParamList *list, const Param *p, const Backend *backend, Axis axis) {
    ParamCopies copies = own_mx_copies(p);
    bool is_rowwise = axis == AXIS_ROWWISE && copies.rowwise.amax;
    backend->amax(is_rowwise ? copies.rowwise.amax : copies.columnwise.amax,
                  copies_source(list, p, backend, &copies, param_masters(p), axis));
}

// Makes along an axis this rank's rows of the copies whose factors are of all ranks' rows.
static void make_with_shared_amaxes(const ParamList *list, const Backend *backend, Axis axis) {
    bool any = false;
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (!param_shares_amax(list, p, axis)) continue;
        find_amax(list, p, backend, axis);
        any = true;
    }
    if (any) exchange_amaxes(list, backend);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        ParamCopies copies = own_mx_copies(p);
        if (waits_for_amax(list, p)) quantize_along(list, p, backend, &copies, param_masters(p), axis);
    }
}

void param_list_complete(const ParamList *list, const Backend *backend) {
    for (int i = 0; i < list->count; i++) {
        make_decoded_value(&list->params[i], backend);
    }
    make_with_shared_amaxes(list, backend, AXIS_ROWWISE);
    make_with_shared_amaxes(list, backend, AXIS_COLUMNWISE);
    exchange_gather(list, backend);
}

void param_make_own_copies(const ParamList *list, const Param *p, const Backend *backend) {
    ParamCopies copies = param_own_copies(list, p);
    Tensor bf16 = tensor_make(copies.bf16, FORMAT_BF16, p->num_rows, p->cols);
    if (copies.bf16) backend->convert(bf16, param_masters(p));
    param_quantize_copies(list, p, backend, &copies, param_masters(p));
}

void param_list_refresh(const ParamList *list, const Backend *backend) {
    for (int i = 0; i < list->count; i++) {
        param_make_own_copies(list, &list->params[i], backend);
    }
    param_list_complete(list, backend);
}
