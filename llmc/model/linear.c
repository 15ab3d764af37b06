#include "linear.h"
#include "llmc/base/util.h" // die

// A tensor's two operands: one whose blocks run along its columns (1x32), one along its rows
// (32x1).
typedef struct {
    Operand rowwise, columnwise;
} OperandPair;

static const QuantizedTensor *mx_or_null(const Operand *operand) {
    return operand_is_quantized(*operand) ? &operand->quantized : NULL;
}

// The form of operands that are made for one GEMM. Decoded ones are BF16, which a GEMM of FP32
// doesn't take.
static QuantizedForm scratch_form(const Linear *l, const Backend *backend) {
    QuantizedForm form = backend->quantized_form(true);
    return form == FORM_DECODED && l->recipe.activation_dtype != FORMAT_BF16 ? FORM_PLAIN : form;
}

// Rounded up, so that what follows is aligned.
static size_t operand_scratch(const Linear *l, const Backend *backend, GemmOperand which, Axis axis, int64_t rows,
                              int64_t cols) {
    Format format = l->recipe.format[which];
    bool narrowed = format == FORMAT_BF16 && l->recipe.activation_dtype == FORMAT_FP32;
    size_t bytes = mx_is_mx(format) ? quantized_bytes(scratch_form(l, backend), axis, rows, cols)
                   : narrowed       ? (size_t)(rows * cols) * 2
                                    : 0;
    return (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
}

void linear_declare_weight(Param *weight, const Recipe *recipe) {
    const Format *format = recipe->format;
    if (format[FPROP_W] == FORMAT_BF16 || format[DGRAD_W] == FORMAT_BF16) weight->has_bf16_value = true;
    weight->rowwise.format = format[FPROP_W];
    weight->columnwise.format = format[DGRAD_W];
    weight->needs_fp32 = format[FPROP_W] == FORMAT_FP32 || format[DGRAD_W] == FORMAT_FP32;
    weight->square_copies = recipe->square_weights;
    weight->rounding = recipe->rounding[ROLE_WEIGHTS];
}

bool linear_keeps_input(const Recipe *recipe) { return !mx_is_mx(recipe->format[WGRAD_X]); }

static bool keeps_mx_input(const Linear *l) { return !linear_keeps_input(&l->recipe) && !l->input_is_remade; }

bool linear_makes_input(const Linear *l, bool training) {
    return mx_is_mx(l->recipe.format[FPROP_X]) && !(training && linear_keeps_input(&l->recipe)) && !l->stats;
}

bool linear_makes_gradient(const Linear *l) {
    return mx_is_mx(l->recipe.format[DGRAD_DY]) && mx_is_mx(l->recipe.format[WGRAD_DY]) && !l->stats;
}

void linear_layout(Linear *l, MemoryPlan *plan, const Backend *backend, int64_t rows, bool training) {
    if (!training || !keeps_mx_input(l)) return;
    int64_t K = l->weight->cols;
    QuantizedForm form = backend->quantized_form(false);
    void *memory = memory_take(plan, MEMORY_KEPT, quantized_bytes(form, AXIS_COLUMNWISE, rows, K));
    l->input_columnwise = quantized_make(memory, l->recipe.format[WGRAD_X], AXIS_COLUMNWISE, rows, K, form);
}

size_t linear_scratch_bytes(const Linear *l, const Backend *backend, int64_t rows, bool training) {
    int64_t N = l->weight->rows, K = l->weight->cols;
    size_t forward = operand_scratch(l, backend, FPROP_X, AXIS_ROWWISE, rows, K);
    if (!training) return forward;
    size_t backward = operand_scratch(l, backend, DGRAD_DY, AXIS_ROWWISE, rows, N) +
                      operand_scratch(l, backend, WGRAD_DY, AXIS_COLUMNWISE, rows, N);
    if (!keeps_mx_input(l)) backward += operand_scratch(l, backend, WGRAD_X, AXIS_COLUMNWISE, rows, K);
    return forward > backward ? forward : backward;
}

static Axis weight_axis(const Linear *l, Axis axis) { return l->recipe.square_weights ? AXIS_SQUARE : axis; }

// An operand as a GEMM will see it, without its data.
static Operand operand_shape(Format format, Axis axis, QuantizedForm form, Format dtype, int64_t rows, int64_t cols) {
    if (mx_is_mx(format)) return operand_quantized(quantized_make(NULL, format, axis, rows, cols, form));
    Format as = format == FORMAT_BF16 ? FORMAT_BF16 : dtype;
    return operand_tensor(tensor_make(NULL, as, rows, cols));
}

// As param_list_layout has placed it.
static Operand weight_shape(const Linear *l, GemmOperand which) {
    const Param *weight = l->weight;
    Format format = l->recipe.format[which];
    if (mx_is_mx(format)) return operand_quantized(which == FPROP_W ? weight->rowwise : weight->columnwise);
    return operand_tensor(tensor_make(NULL, format, weight->rows, weight->cols));
}

size_t linear_workspace_bytes(const Linear *l, const Backend *backend, int64_t rows, bool training) {
    int64_t N = l->weight->rows, K = l->weight->cols;
    const Format *format = l->recipe.format;
    Format dtype = l->recipe.activation_dtype;
    QuantizedForm once = scratch_form(l, backend), kept = backend->quantized_form(false);
    Operand x = operand_shape(format[FPROP_X], AXIS_ROWWISE, once, dtype, rows, K);
    Operand w = weight_shape(l, FPROP_W);
    size_t bytes = backend->gemm_workspace(x, w);
    if (!training) return bytes;
    Operand dy = operand_shape(format[DGRAD_DY], AXIS_ROWWISE, once, dtype, rows, N);
    w = weight_shape(l, DGRAD_W);
    size_t dgrad = backend->gemm_workspace(dy, w);
    dy = operand_shape(format[WGRAD_DY], AXIS_COLUMNWISE, once, dtype, rows, N);
    x = operand_shape(format[WGRAD_X], AXIS_COLUMNWISE, keeps_mx_input(l) ? kept : once, dtype, rows, K);
    size_t wgrad = backend->gemm_workspace(dy, x);
    bytes = dgrad > bytes ? dgrad : bytes;
    return wgrad > bytes ? wgrad : bytes;
}

// This rank's rows: all where a GEMM takes it.
static Tensor master_tensor(const Param *weight) {
    return tensor_make(weight->master, FORMAT_FP32, weight->num_rows, weight->cols);
}

static Operand weight_operand(const Linear *l, GemmOperand which) {
    const Param *weight = l->weight;
    if (mx_is_mx(l->recipe.format[which])) {
        return operand_quantized(which == FPROP_W ? weight->rowwise : weight->columnwise);
    }
    bool bf16 = l->recipe.format[which] == FORMAT_BF16;
    return operand_tensor(bf16 ? weight->value : master_tensor(weight));
}

// An operand without data that goes into `scratch`: MX, or BF16 narrowed from FP32.
static Operand scratch_operand(const Linear *l, const Backend *backend, GemmOperand which, Axis axis, int64_t rows,
                               int64_t cols, char **scratch) {
    Operand operand =
        operand_shape(l->recipe.format[which], axis, scratch_form(l, backend), l->recipe.activation_dtype, rows, cols);
    size_t bytes = operand_scratch(l, backend, which, axis, rows, cols);
    if (operand_is_quantized(operand)) {
        QuantizedTensor q = operand.quantized;
        operand = operand_quantized(quantized_make(*scratch, q.format, q.axis, q.rows, q.cols, q.form));
    } else {
        operand.tensor.data = *scratch;
    }
    *scratch += bytes;
    return operand;
}

// An operand of a source: to be quantized into `scratch`, or the tensor itself, or that narrowed to
// BF16. Widening BF16 to FP32 changes nothing, so isn't done.
static Operand place_operand(const Linear *l, const Backend *backend, GemmOperand which, Axis axis, Source source,
                             char **scratch) {
    Format format = l->recipe.format[which];
    Tensor x = source.x;
    if (!mx_is_mx(format) && (format != FORMAT_BF16 || x.dtype == FORMAT_BF16)) return operand_tensor(x);
    Operand operand = scratch_operand(l, backend, which, axis, x.rows, source_cols(&source), scratch);
    if (!mx_is_mx(format)) backend->convert(operand.tensor, x);
    return operand;
}

static void quantize(const Backend *backend, const OperandPair *pair, Source source, ScaleRounding rounding) {
    const QuantizedTensor *rowwise = mx_or_null(&pair->rowwise), *columnwise = mx_or_null(&pair->columnwise);
    if (rowwise || columnwise) backend->quantize(rowwise, columnwise, source, rounding);
}

static void collect_stats(const Linear *l, const Backend *backend, GemmOperand operand, Tensor tensor, Axis axis) {
    if (!l->stats || !mx_is_mx(l->recipe.format[operand])) return;
    backend->quantize_stats(&l->stats[operand], tensor, axis, l->recipe.format[operand],
                            l->recipe.rounding[operand_role(operand)]);
}

void linear_forward(Linear *l, const Backend *backend, Tensor y, Source x, bool training) {
    const Recipe *r = &l->recipe;
    char *scratch = l->scratch;
    OperandPair pair = {.rowwise = place_operand(l, backend, FPROP_X, AXIS_ROWWISE, x, &scratch)};
    if (training && keeps_mx_input(l)) {
        QuantizedTensor kept = l->input_columnwise;
        l->input_columnwise =
            quantized_make(kept.elements, kept.format, kept.axis, x.x.rows, source_cols(&x), kept.form);
        pair.columnwise = operand_quantized(l->input_columnwise);
    } else {
        l->input = x;
    }
    quantize(backend, &pair, x, r->rounding[ROLE_ACTIVATIONS]);
    backend->gemm(y, pair.rowwise, weight_operand(l, FPROP_W),
                  (GemmOptions){.transpose_b = true, .bias = l->bias ? l->bias->master : NULL});
    collect_stats(l, backend, FPROP_X, x.x, AXIS_ROWWISE);
    collect_stats(l, backend, FPROP_W, master_tensor(l->weight), weight_axis(l, AXIS_ROWWISE));
    if (training) collect_stats(l, backend, WGRAD_X, x.x, AXIS_COLUMNWISE);
}

static Operand wgrad_input(const Linear *l, const Backend *backend, char **scratch) {
    if (keeps_mx_input(l)) return operand_quantized(l->input_columnwise);
    OperandPair pair = {.columnwise = place_operand(l, backend, WGRAD_X, AXIS_COLUMNWISE, l->input, scratch)};
    quantize(backend, &pair, l->input, l->recipe.rounding[ROLE_ACTIVATIONS]);
    return pair.columnwise;
}

void linear_backward(Linear *l, const Backend *backend, Tensor dx, Source dy) {
    char *scratch = l->scratch;
    OperandPair pair = {.rowwise = place_operand(l, backend, DGRAD_DY, AXIS_ROWWISE, dy, &scratch),
                        .columnwise = place_operand(l, backend, WGRAD_DY, AXIS_COLUMNWISE, dy, &scratch)};
    quantize(backend, &pair, dy, l->recipe.rounding[ROLE_GRADIENTS]);
    backend->gemm(dx, pair.rowwise, weight_operand(l, DGRAD_W), (GemmOptions){0});

    Operand x = wgrad_input(l, backend, &scratch);
    Tensor dweight = tensor_make(l->weight->gradient, FORMAT_FP32, l->weight->rows, l->weight->cols);
    backend->gemm(dweight, pair.columnwise, x, (GemmOptions){.transpose_a = true, .accumulate = true});
    if (l->bias) backend->bias_backward(l->bias->gradient, dy.kind == SOURCE_TENSOR ? dy.x : dy.stored);
    collect_stats(l, backend, DGRAD_DY, dy.x, AXIS_ROWWISE);
    collect_stats(l, backend, DGRAD_W, master_tensor(l->weight), weight_axis(l, AXIS_COLUMNWISE));
    collect_stats(l, backend, WGRAD_DY, dy.x, AXIS_COLUMNWISE);
}
