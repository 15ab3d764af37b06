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

void param_list_layout(ParamList *list, MemoryPlan *plan, bool training) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        size_t bytes = (size_t)param_count(p) * sizeof(float);
        p->master = memory_take(plan, MEMORY_MASTERS, bytes);
        if (training) {
            p->gradient = memory_take(plan, MEMORY_GRADIENTS, bytes);
            p->moment1 = memory_take(plan, MEMORY_MOMENTS, bytes);
            p->moment2 = memory_take(plan, MEMORY_MOMENTS, bytes);
        }
        p->value = tensor_make(p->master, FORMAT_FP32, p->rows, p->cols);
        if (p->has_bf16_value) {
            p->value = tensor_make(memory_take(plan, MEMORY_WEIGHTS, bytes / 2), FORMAT_BF16, p->rows, p->cols);
        }
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

void param_list_refresh(const ParamList *list, const Backend *backend) {
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (p->has_bf16_value) backend->convert(p->value, tensor_make(p->master, FORMAT_FP32, p->rows, p->cols));
    }
}
