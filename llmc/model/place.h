/*
Tensors in a MemoryPlan: what memory.h's takers return, typed. Over a plan that only counts they
have their shape and no data.
*/
#pragma once

#include "llmc/base/memory.h"
#include "llmc/numerics/tensor.h"

static inline Tensor take_tensor(MemoryPlan *plan, MemoryKind kind, Format dtype, int64_t rows, int64_t cols) {
    return tensor_make(memory_take(plan, kind, (size_t)(rows * cols) * dtype_size(dtype)), dtype, rows, cols);
}

// Takes a copy. A scaling that isn't MX has no swizzled form, and with FP32 scales no BF16 values:
// it is plain then.
static inline QuantizedTensor take_scaled(MemoryPlan *plan, MemoryKind kind, Format format, Scaling scaling, Axis axis,
                                          int64_t rows, int64_t cols, QuantizedForm form) {
    bool has_no_values = scaling == SCALING_BLOCK128_FP32 && form == FORM_DECODED;
    if (has_no_values || (scaling != SCALING_MX && form == FORM_SWIZZLED)) form = FORM_PLAIN;
    void *memory = memory_take(plan, kind, scaled_bytes(scaling, form, axis, rows, cols));
    QuantizedTensor q = quantized_make(memory, format, axis, rows, cols, form);
    q.scaling = scaling;
    if (scaling_has_factor(scaling)) q.factor = (float *)memory_take(plan, kind, sizeof(float));
    return q;
}

static inline float *take_floats(MemoryPlan *plan, MemoryKind kind, int64_t count) {
    return (float *)memory_take(plan, kind, (size_t)count * sizeof(float));
}

// Returns the first rows of a tensor, for a micro-batch smaller than the largest.
static inline Tensor rows_of(Tensor tensor, int64_t rows) { return tensor_rows(tensor, 0, rows); }
