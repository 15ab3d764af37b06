#include "param.h"
#include "random.h" // Philox
#include "util.h"

#include <stdlib.h>
#include <string.h>

int64_t param_list_count(const ParamList *list) {
    int64_t count = 0;
    for (int i = 0; i < list->count; i++) {
        count += param_count(&list->params[i]);
    }
    return count;
}

int param_list_add(ParamList *list, Param param) {
    if (list->count == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 64;
        list->params = realloc(list->params, (size_t)list->capacity * sizeof(Param));
        if (!list->params) die("out of memory");
    }
    list->params[list->count] = param;
    return list->count++;
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

// Where `copy` has an MX format.
static void take_copy(QuantizedTensor *copy, const Param *p, MemoryPlan *plan, const Backend *backend, Axis axis) {
    if (!mx_is_mx(copy->format)) return;
    QuantizedForm form = backend->quantized_form(false);
    void *memory = memory_take(plan, MEMORY_QUANTIZED, quantized_bytes(form, axis, p->rows, p->cols));
    *copy = quantized_make(memory, copy->format, axis, p->rows, p->cols, form);
}

// In one piece, so that they are zeroed and summed in one call.
static void layout_gradients(ParamList *list, MemoryPlan *plan) {
    size_t before = plan->by_kind[MEMORY_GRADIENTS];
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        p->gradient = memory_take(plan, MEMORY_GRADIENTS, (size_t)param_count(p) * sizeof(float));
    }
    list->gradients = list->count > 0 ? list->params[0].gradient : NULL;
    list->gradients_count = (int64_t)((plan->by_kind[MEMORY_GRADIENTS] - before) / sizeof(float));
}

void param_list_layout(ParamList *list, MemoryPlan *plan, const Backend *backend, bool training) {
    if (training) layout_gradients(list, plan);
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        size_t bytes = (size_t)param_count(p) * sizeof(float);
        p->master = memory_take(plan, MEMORY_MASTERS, bytes);
        if (training) {
            p->moment1 = memory_take(plan, MEMORY_MOMENTS, bytes);
            p->moment2 = memory_take(plan, MEMORY_MOMENTS, bytes);
        }
        p->value = tensor_make(p->master, FORMAT_FP32, p->rows, p->cols);
        if (p->has_bf16_value) {
            p->value = tensor_make(memory_take(plan, MEMORY_WEIGHTS, bytes / 2), FORMAT_BF16, p->rows, p->cols);
        }
        take_copy(&p->rowwise, p, plan, backend, AXIS_ROWWISE);
        if (training) take_copy(&p->columnwise, p, plan, backend, AXIS_COLUMNWISE);
    }
}

void param_list_init(ParamList *list, const Backend *backend, uint64_t seed) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        int64_t count = param_count(p);
        float *values = allocate((size_t)count * sizeof(float));
#pragma omp parallel for schedule(static)
        for (int64_t j = 0; j < count; j++) {
            values[j] =
                p->init_stddev > 0 ? p->init_stddev * random_normal(seed, (uint64_t)i, (uint64_t)j) : p->init_value;
        }
        backend->copy_to_device(p->master, values, (size_t)count * sizeof(float));
        free(values);
    }
}

static const QuantizedTensor *copy_or_null(const QuantizedTensor *copy) { return copy->elements ? copy : NULL; }

static bool has_mx_copy(const Param *p) { return p->rowwise.elements || p->columnwise.elements; }

void param_list_refresh(const ParamList *list, const Backend *backend) {
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        Tensor master = tensor_make(p->master, FORMAT_FP32, p->rows, p->cols);
        if (p->has_bf16_value) backend->convert(p->value, master);
        if (has_mx_copy(p)) {
            backend->quantize(copy_or_null(&p->rowwise), copy_or_null(&p->columnwise), source_tensor(master),
                              p->rounding);
        }
    }
}

void param_update(const Param *p, const Backend *backend, AdamWOptions options) {
    if (!p->decayed) options.weight_decay = 0;
    if (!p->has_bf16_value && !has_mx_copy(p)) {
        backend->adamw(p->master, p->moment1, p->moment2, p->gradient, param_count(p), options);
        return;
    }
    Source updated = source_tensor(tensor_make(p->master, FORMAT_FP32, p->rows, p->cols));
    updated.kind = SOURCE_ADAMW;
    updated.moment1 = p->moment1;
    updated.moment2 = p->moment2;
    updated.gradient = p->gradient;
    updated.adamw = options;
    if (p->has_bf16_value) updated.stored = p->value;
    backend->quantize(copy_or_null(&p->rowwise), copy_or_null(&p->columnwise), updated, p->rounding);
}
