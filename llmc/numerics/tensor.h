/*
Tensor: a row-major matrix of FP32 or BF16. QuantizedTensor: one of elements of few bits and the
scales of their blocks. Operand: either, as a GEMM takes it. None of them owns its memory.
*/
#pragma once

#include <stddef.h>
#include "encoding.h" // Encoding
#include "mx.h"       // Format, Axis
#include "scaling.h"  // Scaling

typedef struct {
    void *data;
    Format dtype; // FORMAT_FP32 or FORMAT_BF16
    int64_t rows, cols;
    int64_t stride; // elements from one row to the next, >= cols
} Tensor;

// How a QuantizedTensor is stored.
typedef enum {
    FORM_PLAIN,     // codes, and scales in the plain layout: what is kept, sent or saved
    FORM_SWIZZLED,  // codes, and scales in the layout of block-scaled GEMMs (mx_swizzled_scale_offset), padded with 0
    FORM_DECODED,   // the decoded values as BF16, no scales: for a GEMM that would decode them at once
    FORM_TRANSPOSED // of a columnwise copy: plain, but its codes are (cols, rows), for a GEMM that wants K along rows
} QuantizedForm;

// A tensor's scale that is made of earlier tensors' amaxes, and what is raised to the amax of each
// that is quantized with it. NULLs where the scale is of the tensor's own amax.
typedef struct {
    const float *scale;
    uint32_t *amax; // mx_magnitude_bits
} DelayedScale;

typedef struct {
    uint8_t *elements; // one byte each (FORM_DECODED: two), in the source's layout whatever the axis, but for
                       // FORM_TRANSPOSED
    uint8_t *scales;   // scaled_scale_bytes
    Format format;     // an MX format
    Axis axis;
    int64_t rows, cols;
    QuantizedForm form;
    Scaling scaling;      // not MX: in any form but FORM_SWIZZLED, without the tensor's factor,
    float *factor;        // which is here where the scaling has one: 1 FP32
    DelayedScale delayed; // of SCALING_TENSOR
    uint32_t *amax;       // mx_magnitude_bits of a whole of which these are rows; NULL: they are all, and it is found
    Encoding encoding;
} QuantizedTensor;

// An operand of a GEMM. `quantized.format` is not an MX format where it is a Tensor.
typedef struct {
    Tensor tensor;
    QuantizedTensor quantized;
} Operand;

static inline size_t dtype_size(Format dtype) { return dtype == FORMAT_FP32 ? 4 : 2; }

static inline Tensor tensor_make(void *data, Format dtype, int64_t rows, int64_t cols) {
    Tensor tensor = {data, dtype, rows, cols, cols};
    return tensor;
}

// Returns the bytes of the blocks' scales, which are swizzled in MX alone.
static inline size_t scaled_scale_bytes(Scaling scaling, QuantizedForm form, Axis axis, int64_t rows, int64_t cols) {
    if (form == FORM_DECODED) return 0;
    bool rowwise = axis == AXIS_ROWWISE;
    if (form == FORM_SWIZZLED) return (size_t)mx_swizzled_scale_bytes(rowwise ? rows : cols, rowwise ? cols : rows);
    return (size_t)scaling_num_blocks(scaling, axis, rows, cols) * scaling_scale_bytes(scaling);
}

// Returns where the scales begin behind the elements: aligned as block-scaled GEMMs want them.
static inline size_t quantized_scales_offset(QuantizedForm form, int64_t rows, int64_t cols) {
    return ((size_t)(rows * cols) * (form == FORM_DECODED ? 2 : 1) + 255) / 256 * 256;
}

// Returns the bytes of elements and scales; the factor lies elsewhere.
static inline size_t scaled_bytes(Scaling scaling, QuantizedForm form, Axis axis, int64_t rows, int64_t cols) {
    return quantized_scales_offset(form, rows, cols) + scaled_scale_bytes(scaling, form, axis, rows, cols);
}

// Makes a quantized tensor in MX over scaled_bytes of memory; over NULL, its shape alone.
static inline QuantizedTensor quantized_make(void *memory, Format format, Axis axis, int64_t rows, int64_t cols,
                                             QuantizedForm form) {
    uint8_t *elements = (uint8_t *)memory;
    uint8_t *scales = elements && form != FORM_DECODED ? elements + quantized_scales_offset(form, rows, cols) : NULL;
    Encoding plain = {ROUND_NEAREST, 0, 0, {0, 0, 0}};
    QuantizedTensor quantized = {elements, scales,     format, axis,         rows, cols,
                                 form,     SCALING_MX, NULL,   {NULL, NULL}, NULL, plain};
    return quantized;
}

// Returns the quantized tensor that the same memory holds of another number of rows.
static inline QuantizedTensor quantized_of_rows(QuantizedTensor q, int64_t rows) {
    QuantizedTensor other = quantized_make(q.elements, q.format, q.axis, rows, q.cols, q.form);
    other.scaling = q.scaling;
    other.factor = q.factor;
    other.delayed = q.delayed;
    other.amax = q.amax;
    other.encoding = q.encoding;
    return other;
}

// Returns the plain or decoded tensor's rows [first, first + rows); `first` is a block's.
static inline QuantizedTensor quantized_rows(QuantizedTensor q, int64_t first, int64_t rows) {
    q.rows = rows;
    q.elements += first * q.cols * (q.form == FORM_DECODED ? 2 : 1);
    if (q.scales) q.scales += scaled_scale_bytes(q.scaling, q.form, q.axis, first, q.cols);
    q.encoding.at.first_row += first;
    return q;
}

// Returns columns [first, first + cols) of `tensor`.
static inline Tensor tensor_cols(Tensor tensor, int64_t first, int64_t cols) {
    tensor.data = (char *)tensor.data + (size_t)first * dtype_size(tensor.dtype);
    tensor.cols = cols;
    return tensor;
}

// Returns rows [first, first + rows) of `tensor`.
static inline Tensor tensor_rows(Tensor tensor, int64_t first, int64_t rows) {
    tensor.data = (char *)tensor.data + (size_t)(first * tensor.stride) * dtype_size(tensor.dtype);
    tensor.rows = rows;
    return tensor;
}

static inline Operand operand_tensor(Tensor tensor) {
    Operand operand = {tensor, quantized_make(NULL, FORMAT_FP32, AXIS_ROWWISE, 0, 0, FORM_PLAIN)};
    return operand;
}

static inline Operand operand_quantized(QuantizedTensor quantized) {
    Operand operand = {{NULL, FORMAT_FP32, 0, 0, 0}, quantized};
    return operand;
}

// Returns an operand as it is stored: a decoded one is a tensor of BF16.
static inline Operand operand_as_stored(Operand operand) {
    QuantizedTensor q = operand.quantized;
    if (!mx_is_mx(q.format) || q.form != FORM_DECODED) return operand;
    return operand_tensor(tensor_make(q.elements, FORMAT_BF16, q.rows, q.cols));
}

static inline bool operand_is_quantized(Operand operand) { return mx_is_mx(operand.quantized.format); }

static inline bool operand_is_fp32(Operand operand) {
    return !operand_is_quantized(operand) && operand.tensor.dtype == FORMAT_FP32;
}

// Returns what a GEMM multiplies values in: FP32 if one of its operands is, else BF16, which
// quantized ones are decoded to also where a machine then multiplies in FP32.
static inline Format operands_value_dtype(Operand a, Operand b) {
    return operand_is_fp32(a) || operand_is_fp32(b) ? FORMAT_FP32 : FORMAT_BF16;
}

// Returns whether an operand's product is multiplied by a number: its factor, over its prescale.
static inline bool operand_has_factor(Operand operand) {
    const QuantizedTensor q = operand.quantized;
    return operand_is_quantized(operand) && (scaling_has_factor(q.scaling) || encoding_prescale(&q.encoding) != 1);
}

// Returns whether a product is summed by blocks of K, each times its scales, since this operand's
// aren't exact in BF16.
static inline bool operand_is_summed_by_block(Operand operand) {
    return operand_is_quantized(operand) && operand.quantized.scaling == SCALING_BLOCK128_FP32;
}

static inline bool operands_are_summed_by_block(Operand a, Operand b) {
    return operand_is_summed_by_block(a) || operand_is_summed_by_block(b);
}

// Returns an operand's elements alone where a product is summed by block, which multiplies by its
// blocks' scales later; else the operand.
static inline Operand operand_without_block_scales(Operand operand) {
    if (operand_is_summed_by_block(operand)) operand.quantized.scaling = SCALING_TENSOR;
    return operand;
}

// Returns whether an operand's blocks, if it has any, run along `axis`: square ones run along both.
static inline bool operand_runs_along(Operand o, Axis axis) {
    return !operand_is_quantized(o) || o.quantized.axis == axis || o.quantized.axis == AXIS_SQUARE;
}

static inline int64_t operand_rows(Operand o) { return operand_is_quantized(o) ? o.quantized.rows : o.tensor.rows; }
static inline int64_t operand_cols(Operand o) { return operand_is_quantized(o) ? o.quantized.cols : o.tensor.cols; }
