#include "linear.h"
#include "place.h"

void linear_declare_weight(Param *weight, const Recipe *recipe) {
    const Format *format = recipe->format;
    if (format[FPROP_W] == FORMAT_BF16 || format[DGRAD_W] == FORMAT_BF16) weight->has_bf16_value = true;
    weight->rowwise.format = format[FPROP_W];
    weight->columnwise.format = format[DGRAD_W];
    weight->rowwise.scaling = recipe->scaling[FPROP_W];
    weight->columnwise.scaling = recipe->scaling[DGRAD_W];
    weight->needs_fp32 = format[FPROP_W] == FORMAT_FP32 || format[DGRAD_W] == FORMAT_FP32;
    weight->square_copies = recipe->square_weights;
    weight->gemm_writes_gradient = true;
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

static bool quantizes_gradient(const Linear *l) {
    return mx_is_mx(l->recipe.format[DGRAD_DY]) || mx_is_mx(l->recipe.format[WGRAD_DY]);
}

float *linear_bias_gradient(const Linear *l) {
    return l->bias && !quantizes_gradient(l) ? l->bias->gradient : NULL;
}

// Where an operand goes

// Returns the form of operands that are made for one GEMM. Decoded ones are BF16, which a GEMM of
// FP32 doesn't take.
static QuantizedForm scratch_form(const Linear *l, const Backend *backend) {
    QuantizedForm form = backend->quantized_form(true);
    return form == FORM_DECODED && l->recipe.activation_dtype != FORMAT_BF16 ? FORM_PLAIN : form;
}

// Returns what a GEMM takes of X or dY: the tensor itself, or memory in `scratch` for what
// make_operands then makes of it, an MX copy or BF16 from FP32. Widening BF16 to FP32 changes
// nothing, so isn't done.
static Operand place_operand(const Linear *l, const Backend *backend, GemmOperand which, Source source,
                             MemoryPlan *scratch) {
    Format format = l->recipe.format[which];
    int64_t rows = source.x.rows, cols = source_cols(&source);
    if (mx_is_mx(format)) {
        QuantizedForm form = scratch_form(l, backend);
        return operand_quantized(take_scaled(scratch, MEMORY_SCRATCH, format, l->recipe.scaling[which],
                                             operand_axis(which), rows, cols, form));
    }
    if (format != FORMAT_BF16 || source.x.dtype == FORMAT_BF16) return operand_tensor(source.x);
    return operand_tensor(take_tensor(scratch, MEMORY_SCRATCH, FORMAT_BF16, rows, cols));
}

// The operands of the backward pass but for W.
typedef struct {
    Operand dgrad_dy, wgrad_dy, wgrad_x;
} BackwardOperands;

static BackwardOperands place_backward(const Linear *l, const Backend *backend, Source dy, Source x,
                                       MemoryPlan *scratch) {
    BackwardOperands operands = {.dgrad_dy = place_operand(l, backend, DGRAD_DY, dy, scratch),
                                 .wgrad_dy = place_operand(l, backend, WGRAD_DY, dy, scratch)};
    operands.wgrad_x =
        keeps_mx_input(l) ? operand_quantized(l->input_columnwise) : place_operand(l, backend, WGRAD_X, x, scratch);
    return operands;
}

// Returns the weight with its padding, which is part of what memory was taken for.
static Operand weight_operand(const Linear *l, GemmOperand which) {
    const Param *weight = l->weight;
    Format format = l->recipe.format[which];
    if (mx_is_mx(format)) {
        QuantizedTensor copy = which == FPROP_W ? weight->rowwise : weight->columnwise;
        copy.rows = param_gemm_rows(weight);
        return operand_quantized(copy);
    }
    Tensor value = format == FORMAT_BF16 ? weight->value : param_masters(weight);
    value.rows = param_gemm_rows(weight);
    return operand_tensor(value);
}

static void raise_to(size_t *most, size_t bytes) { *most = bytes > *most ? bytes : *most; }

void linear_layout(Linear *l, MemoryPlan *plan, const Backend *backend, int64_t rows, bool training,
                   LinearScratch *most) {
    int64_t N = param_gemm_rows(l->weight), K = l->weight->cols;
    Source x = source_tensor(tensor_make(NULL, l->recipe.activation_dtype, rows, K));
    MemoryPlan forward = {0}, backward = {0};
    Operand fprop_x = place_operand(l, backend, FPROP_X, x, &forward);
    raise_to(&most->bytes, forward.used);
    raise_to(&most->workspace, backend->gemm_workspace(fprop_x, weight_operand(l, FPROP_W)));
    if (!training) return;

    if (keeps_mx_input(l)) {
        QuantizedForm form = l->keeps_values ? scratch_form(l, backend) : backend->quantized_form(false);
        l->input_columnwise = take_scaled(plan, MEMORY_KEPT, l->recipe.format[WGRAD_X], l->recipe.scaling[WGRAD_X],
                                          AXIS_COLUMNWISE, rows, K, form);
    }
    Source dy = source_tensor(tensor_make(NULL, l->recipe.activation_dtype, rows, N));
    BackwardOperands operands = place_backward(l, backend, dy, x, &backward);
    raise_to(&most->bytes, backward.used);
    raise_to(&most->workspace, backend->gemm_workspace(operands.dgrad_dy, weight_operand(l, DGRAD_W)));
    raise_to(&most->workspace, backend->gemm_workspace(operands.wgrad_dy, operands.wgrad_x));
}

// Forward and backward

// Makes the operands of `source` that place_operand gave memory: MX ones in one pass. NULL: there
// is no such operand.
static void make_operands(const Backend *backend, const Operand *rowwise, const Operand *columnwise, Source source,
                          ScaleRounding rounding) {
    const QuantizedTensor *quantized[2] = {NULL, NULL};
    const Operand *operands[] = {rowwise, columnwise};
    for (int i = 0; i < 2; i++) {
        if (!operands[i]) continue;
        Tensor tensor = operands[i]->tensor;
        if (operand_is_quantized(*operands[i])) {
            quantized[i] = &operands[i]->quantized;
        } else if (tensor.data != source.x.data) {
            backend->convert(tensor, source.x);
        }
    }
    if (quantized[0] || quantized[1]) backend->quantize(quantized[0], quantized[1], source, rounding);
}

// Adds to the operand's statistics, where they are wanted and it is quantized in MX blocks.
static void collect_stats(const Linear *l, const Backend *backend, GemmOperand which, Tensor tensor) {
    if (!l->stats || !mx_is_mx(l->recipe.format[which]) || l->recipe.scaling[which] != SCALING_MX) return;
    backend->quantize_stats(&l->stats[which], tensor, recipe_axis(&l->recipe, which), l->recipe.format[which],
                            l->recipe.rounding[operand_role(which)]);
}

void linear_forward(Linear *l, const Backend *backend, Tensor y, Source x, bool training) {
    MemoryPlan scratch = {.base = l->scratch};
    Operand fprop_x = place_operand(l, backend, FPROP_X, x, &scratch), kept, *wgrad_x = NULL;
    if (training && keeps_mx_input(l)) {
        l->input_columnwise = quantized_of_rows(l->input_columnwise, x.x.rows);
        kept = operand_quantized(l->input_columnwise);
        wgrad_x = &kept;
    } else {
        l->input = x;
    }
    make_operands(backend, &fprop_x, wgrad_x, x, l->recipe.rounding[ROLE_ACTIVATIONS]);
    backend->gemm(y, fprop_x, weight_operand(l, FPROP_W),
                  (GemmOptions){.transpose_b = true, .bias = l->bias ? l->bias->master : NULL});
    collect_stats(l, backend, FPROP_X, x.x);
    collect_stats(l, backend, FPROP_W, param_masters(l->weight));
    if (training) collect_stats(l, backend, WGRAD_X, x.x);
}

void linear_backward(Linear *l, const Backend *backend, Tensor dx, Source dy) {
    MemoryPlan scratch = {.base = l->scratch};
    BackwardOperands operands = place_backward(l, backend, dy, l->input, &scratch);
    // The quantizer reads dY anyway.
    if (l->bias && quantizes_gradient(l)) dy.sums = l->bias->gradient;
    make_operands(backend, &operands.dgrad_dy, &operands.wgrad_dy, dy, l->recipe.rounding[ROLE_GRADIENTS]);
    backend->gemm(dx, operands.dgrad_dy, weight_operand(l, DGRAD_W), (GemmOptions){0});

    if (!keeps_mx_input(l)) {
        make_operands(backend, NULL, &operands.wgrad_x, l->input, l->recipe.rounding[ROLE_ACTIVATIONS]);
    }
    Param *weight = l->weight;
    Tensor dweight = tensor_make(weight->gradient, FORMAT_FP32, param_gemm_rows(weight), weight->cols);
    backend->gemm(dweight, operands.wgrad_dy, operands.wgrad_x,
                  (GemmOptions){.transpose_a = true, .accumulate = !weight->gradient_is_stale});
    weight->gradient_is_stale = false;
    float *dbias = linear_bias_gradient(l);
    if (dbias && !dy.is_summed) backend->bias_backward(dbias, dy.x);
    Tensor gradient = tensor_cols(dy.x, 0, l->weight->rows); // without padding
    collect_stats(l, backend, DGRAD_DY, gradient);
    collect_stats(l, backend, DGRAD_W, param_masters(l->weight));
    collect_stats(l, backend, WGRAD_DY, gradient);
}
