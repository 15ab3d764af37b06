#include "linear.h"
#include "util.h" // die

// A tensor's two operands: one whose blocks run along its columns (1x32), one along its rows (32x1).
typedef struct {
    Operand rowwise, columnwise;
} OperandPair;

static size_t quantized_bytes(Axis axis, int64_t rows, int64_t cols) {
    return (size_t)(rows * cols + mx_num_scales(axis, rows, cols));
}

// Rounded up, so that what follows is aligned.
static size_t operand_scratch(Format format, Axis axis, Format dtype, int64_t rows, int64_t cols) {
    size_t bytes = mx_is_mx(format)                                ? quantized_bytes(axis, rows, cols)
                   : format == FORMAT_BF16 && dtype == FORMAT_FP32 ? (size_t)(rows * cols) * 2
                                                                   : 0;
    return (bytes + 63) / 64 * 64;
}

static QuantizedTensor quantized_at(void *memory, Format format, Axis axis, int64_t rows, int64_t cols) {
    uint8_t *elements = memory;
    return (QuantizedTensor){elements, elements ? elements + rows * cols : NULL, format, axis, rows, cols};
}

static QuantizedTensor quantized_take(MemoryPlan *plan, MemoryKind kind, Format format, Axis axis, int64_t rows,
                                      int64_t cols) {
    return quantized_at(memory_take(plan, kind, quantized_bytes(axis, rows, cols)), format, axis, rows, cols);
}

bool linear_needs_bf16_weight(const Recipe *recipe) {
    return recipe->format[FPROP_W] == FORMAT_BF16 || recipe->format[DGRAD_W] == FORMAT_BF16;
}

bool linear_keeps_input(const Recipe *recipe) { return !mx_is_mx(recipe->format[WGRAD_X]); }

static bool keeps_mx_input(const Linear *l) { return !linear_keeps_input(&l->recipe) && !l->input_is_remade; }

void linear_layout(Linear *l, MemoryPlan *plan, int64_t rows, bool training) {
    int64_t N = l->weight->rows, K = l->weight->cols;
    const Format *format = l->recipe.format;
    if (mx_is_mx(format[FPROP_W])) {
        l->weight_rowwise = quantized_take(plan, MEMORY_QUANTIZED, format[FPROP_W], AXIS_ROWWISE, N, K);
    }
    if (!training) return;
    if (mx_is_mx(format[DGRAD_W])) {
        l->weight_columnwise = quantized_take(plan, MEMORY_QUANTIZED, format[DGRAD_W], AXIS_COLUMNWISE, N, K);
    }
    if (keeps_mx_input(l)) {
        l->input_columnwise = quantized_take(plan, MEMORY_KEPT, format[WGRAD_X], AXIS_COLUMNWISE, rows, K);
    }
}

size_t linear_scratch_bytes(const Linear *l, int64_t rows, bool training) {
    int64_t N = l->weight->rows, K = l->weight->cols;
    const Format *format = l->recipe.format;
    Format dtype = l->recipe.activation_dtype;
    size_t forward = operand_scratch(format[FPROP_X], AXIS_ROWWISE, dtype, rows, K);
    if (!training) return forward;
    size_t backward = operand_scratch(format[DGRAD_DY], AXIS_ROWWISE, dtype, rows, N) +
                      operand_scratch(format[WGRAD_DY], AXIS_COLUMNWISE, dtype, rows, N);
    if (!keeps_mx_input(l)) backward += operand_scratch(format[WGRAD_X], AXIS_COLUMNWISE, dtype, rows, K);
    return forward > backward ? forward : backward;
}

// An operand as a GEMM will see it, without its data.
static Operand operand_shape(Format format, Axis axis, Format dtype, int64_t rows, int64_t cols) {
    if (mx_is_mx(format)) return operand_quantized((QuantizedTensor){NULL, NULL, format, axis, rows, cols});
    Format as = format == FORMAT_BF16 ? FORMAT_BF16 : dtype;
    return operand_tensor(tensor_make(NULL, as, rows, cols));
}

size_t linear_workspace_bytes(const Linear *l, const Backend *backend, int64_t rows, bool training) {
    int64_t N = l->weight->rows, K = l->weight->cols;
    const Format *format = l->recipe.format;
    Format dtype = l->recipe.activation_dtype;
    Operand x = operand_shape(format[FPROP_X], AXIS_ROWWISE, dtype, rows, K);
    Operand w = operand_shape(format[FPROP_W], AXIS_ROWWISE, FORMAT_FP32, N, K);
    size_t bytes = backend->gemm_workspace(x, w);
    if (!training) return bytes;
    Operand dy = operand_shape(format[DGRAD_DY], AXIS_ROWWISE, dtype, rows, N);
    w = operand_shape(format[DGRAD_W], AXIS_COLUMNWISE, FORMAT_FP32, N, K);
    size_t dgrad = backend->gemm_workspace(dy, w);
    dy = operand_shape(format[WGRAD_DY], AXIS_COLUMNWISE, dtype, rows, N);
    x = operand_shape(format[WGRAD_X], AXIS_COLUMNWISE, dtype, rows, K);
    size_t wgrad = backend->gemm_workspace(dy, x);
    bytes = dgrad > bytes ? dgrad : bytes;
    return wgrad > bytes ? wgrad : bytes;
}

static Tensor master_tensor(const Param *weight) {
    return tensor_make(weight->master, FORMAT_FP32, weight->rows, weight->cols);
}

void linear_refresh(const Linear *l, const Backend *backend) {
    const QuantizedTensor *rowwise = mx_is_mx(l->weight_rowwise.format) ? &l->weight_rowwise : NULL;
    const QuantizedTensor *columnwise = mx_is_mx(l->weight_columnwise.format) ? &l->weight_columnwise : NULL;
    if (!rowwise && !columnwise) return;
    backend->quantize(rowwise, columnwise, master_tensor(l->weight), l->recipe.rounding[ROLE_WEIGHTS]);
}

static Operand weight_operand(const Linear *l, GemmOperand which) {
    if (mx_is_mx(l->recipe.format[which])) {
        return operand_quantized(which == FPROP_W ? l->weight_rowwise : l->weight_columnwise);
    }
    bool bf16 = l->recipe.format[which] == FORMAT_BF16;
    return operand_tensor(bf16 ? l->weight->value : master_tensor(l->weight));
}

// An operand that isn't MX: the tensor itself, or narrowed to BF16 into `scratch`. Widening BF16 to FP32 changes
// nothing, so isn't done.
static Operand plain_operand(const Backend *backend, Tensor tensor, Format format, char **scratch) {
    if (format != FORMAT_BF16 || tensor.dtype == FORMAT_BF16) return operand_tensor(tensor);
    Tensor narrow = tensor_make(*scratch, FORMAT_BF16, tensor.rows, tensor.cols);
    *scratch += operand_scratch(format, AXIS_ROWWISE, tensor.dtype, tensor.rows, tensor.cols);
    backend->convert(narrow, tensor);
    return operand_tensor(narrow);
}

// A shape of the same tensor with memory from `scratch`, or from `kept` where there is one.
static QuantizedTensor quantized_for(Tensor tensor, Format format, Axis axis, char **scratch,
                                     const QuantizedTensor *kept) {
    if (kept) {
        QuantizedTensor result = *kept;
        return quantized_at(result.elements, format, axis, tensor.rows, tensor.cols);
    }
    QuantizedTensor result = quantized_at(*scratch, format, axis, tensor.rows, tensor.cols);
    *scratch += operand_scratch(format, axis, tensor.dtype, tensor.rows, tensor.cols);
    return result;
}

// Both operands of a tensor, quantized in one pass where both are MX. `want_columnwise` false leaves that one out.
static OperandPair make_operands(const Backend *backend, Tensor tensor, Format rowwise, Format columnwise,
                                 ScaleRounding rounding, bool want_columnwise, const QuantizedTensor *kept,
                                 char **scratch) {
    OperandPair pair = {0};
    bool quantize_rowwise = mx_is_mx(rowwise), quantize_columnwise = want_columnwise && mx_is_mx(columnwise);
    if (quantize_rowwise) {
        pair.rowwise = operand_quantized(quantized_for(tensor, rowwise, AXIS_ROWWISE, scratch, NULL));
    } else {
        pair.rowwise = plain_operand(backend, tensor, rowwise, scratch);
    }
    if (quantize_columnwise) {
        pair.columnwise = operand_quantized(quantized_for(tensor, columnwise, AXIS_COLUMNWISE, scratch, kept));
    } else if (want_columnwise) {
        pair.columnwise = plain_operand(backend, tensor, columnwise, scratch);
    }
    if (quantize_rowwise || quantize_columnwise) {
        backend->quantize(quantize_rowwise ? &pair.rowwise.quantized : NULL,
                          quantize_columnwise ? &pair.columnwise.quantized : NULL, tensor, rounding);
    }
    return pair;
}

static void collect_stats(const Linear *l, const Backend *backend, GemmOperand operand, Tensor tensor, Axis axis) {
    if (!l->stats || !mx_is_mx(l->recipe.format[operand])) return;
    backend->quantize_stats(&l->stats[operand], tensor, axis, l->recipe.format[operand],
                            l->recipe.rounding[operand_role(operand)]);
}

void linear_forward(Linear *l, const Backend *backend, Tensor y, Tensor x, bool training) {
    const Recipe *r = &l->recipe;
    bool quantize_for_wgrad = training && keeps_mx_input(l);
    char *scratch = l->scratch;
    OperandPair pair = make_operands(backend, x, r->format[FPROP_X], r->format[WGRAD_X], r->rounding[ROLE_ACTIVATIONS],
                                     quantize_for_wgrad, &l->input_columnwise, &scratch);
    if (quantize_for_wgrad) {
        l->input_columnwise = pair.columnwise.quantized;
    } else {
        l->input = x;
    }
    backend->gemm(y, pair.rowwise, weight_operand(l, FPROP_W),
                  (GemmOptions){.transpose_b = true, .bias = l->bias ? l->bias->master : NULL});
    collect_stats(l, backend, FPROP_X, x, AXIS_ROWWISE);
    collect_stats(l, backend, FPROP_W, master_tensor(l->weight), AXIS_ROWWISE);
    if (training) collect_stats(l, backend, WGRAD_X, x, AXIS_COLUMNWISE);
}

static Operand wgrad_input(const Linear *l, const Backend *backend, char **scratch) {
    const Recipe *r = &l->recipe;
    if (keeps_mx_input(l)) return operand_quantized(l->input_columnwise);
    if (linear_keeps_input(r)) return plain_operand(backend, l->input, r->format[WGRAD_X], scratch);
    QuantizedTensor columnwise = quantized_for(l->input, r->format[WGRAD_X], AXIS_COLUMNWISE, scratch, NULL);
    backend->quantize(NULL, &columnwise, l->input, r->rounding[ROLE_ACTIVATIONS]);
    return operand_quantized(columnwise);
}

void linear_backward(Linear *l, const Backend *backend, Tensor dx, Tensor dy) {
    const Recipe *r = &l->recipe;
    char *scratch = l->scratch;
    OperandPair pair = make_operands(backend, dy, r->format[DGRAD_DY], r->format[WGRAD_DY], r->rounding[ROLE_GRADIENTS],
                                     true, NULL, &scratch);
    backend->gemm(dx, pair.rowwise, weight_operand(l, DGRAD_W), (GemmOptions){0});

    Operand x = wgrad_input(l, backend, &scratch);
    Tensor dweight = tensor_make(l->weight->gradient, FORMAT_FP32, l->weight->rows, l->weight->cols);
    backend->gemm(dweight, pair.columnwise, x, (GemmOptions){.transpose_a = true, .accumulate = true});
    if (l->bias) backend->bias_backward(l->bias->gradient, dy);
    collect_stats(l, backend, DGRAD_DY, dy, AXIS_ROWWISE);
    collect_stats(l, backend, DGRAD_W, master_tensor(l->weight), AXIS_COLUMNWISE);
    collect_stats(l, backend, WGRAD_DY, dy, AXIS_COLUMNWISE);
}
