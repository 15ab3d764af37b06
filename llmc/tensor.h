/*
Tensor: a row-major matrix of FP32 or BF16. QuantizedTensor: one in an MX format. Operand: either, as a GEMM takes it.
None of them owns its memory.
*/
#ifndef LLMC_TENSOR_H
#define LLMC_TENSOR_H

#include <stddef.h>
#include "mx.h" // Format, Axis

typedef struct {
    void *data;
    Format dtype; // FORMAT_FP32 or FORMAT_BF16
    int64_t rows, cols;
    int64_t stride; // elements from one row to the next, >= cols
} Tensor;

typedef struct {
    uint8_t *elements; // (rows, cols), one byte each, in the source's layout whatever the axis
    uint8_t *scales;   // plain layout, mx_num_scales(axis, rows, cols) bytes
    Format format;     // an MX format
    Axis axis;
    int64_t rows, cols;
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

// Rows [first, first + rows) of `tensor`.
static inline Tensor tensor_rows(Tensor tensor, int64_t first, int64_t rows) {
    tensor.data = (char *)tensor.data + (size_t)(first * tensor.stride) * dtype_size(tensor.dtype);
    tensor.rows = rows;
    return tensor;
}

static inline Operand operand_tensor(Tensor tensor) {
    Operand operand = {tensor, {NULL, NULL, FORMAT_FP32, AXIS_ROWWISE, 0, 0}};
    return operand;
}

static inline Operand operand_quantized(QuantizedTensor quantized) {
    Operand operand = {{NULL, FORMAT_FP32, 0, 0, 0}, quantized};
    return operand;
}

static inline bool operand_is_quantized(Operand operand) { return mx_is_mx(operand.quantized.format); }
static inline int64_t operand_rows(Operand o) { return operand_is_quantized(o) ? o.quantized.rows : o.tensor.rows; }
static inline int64_t operand_cols(Operand o) { return operand_is_quantized(o) ? o.quantized.cols : o.tensor.cols; }

#endif
