#include "linear.h"
#include "place.h"

void linear_declare_weight(Param *weight, const Recipe *recipe) {
    const Format *format = recipe->format;
    if (format[FPROP_W] == FORMAT_BF16 || format[DGRAD_W] == FORMAT_BF16) weight->has_bf16_value = true;
    weight->rowwise.format = format[FPROP_W];
    weight->columnwise.format = format[DGRAD_W];
    weight->rowwise.scaling = recipe->scaling[FPROP_W];
    weight->columnwise.scaling = recipe->scaling[DGRAD_W];
    weight->rowwise.encoding = recipe_encoding(recipe, FPROP_W, weight->number);
    weight->columnwise.encoding = recipe_encoding(recipe, DGRAD_W, weight->number);
    weight->needs_fp32 = format[FPROP_W] == FORMAT_FP32 || format[DGRAD_W] == FORMAT_FP32;
    weight->square_copies = recipe->square_weights;
    weight->gemm_writes_gradient = true;
    weight->rounding = recipe->rounding[ROLE_WEIGHTS];
    weight->from_forward = recipe_is_from_forward(recipe, DGRAD_W);
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        Transform transform = recipe->transform[gemm];
        weight->hadamard[gemm] = transform ? hadamard_fixed(recipe->hadamard_size) : (Hadamard){0};
        weight->has_random_signs[gemm] = transform == TRANSFORM_RANDOM;
    }
}

// Returns whether an operand is transformed before it is quantized.
static bool is_transformed(const Linear *l, GemmOperand which) { return l->recipe.transform[operand_gemm(which)]; }

void linear_layout_scales(Linear *l, const DelayedScales *scales, int64_t number) {
    amax_history_layout(&l->amaxes, &l->recipe, scales, number);
    l->weight->rowwise.delayed = l->amaxes.scales[FPROP_W];
    l->weight->columnwise.delayed = l->amaxes.scales[DGRAD_W];
}

bool linear_keeps_input(const Recipe *recipe) { return !mx_is_mx(recipe->format[WGRAD_X]); }

bool linear_can_remake_input(const Recipe *recipe) {
    return !linear_keeps_input(recipe) && !recipe_is_from_forward(recipe, WGRAD_X);
}

static bool keeps_mx_input(const Linear *l) { return !linear_keeps_input(&l->recipe) && !l->input_is_remade; }

// Returns whether the quantizer reads what the operand is made from, and not a transform of it.
static bool quantizes_as_it_is(const Linear *l, GemmOperand which) {
    return mx_is_mx(l->recipe.format[which]) && !is_transformed(l, which);
}

bool linear_makes_input(const Linear *l, bool training) {
    bool wgrad_takes_it = linear_keeps_input(&l->recipe) || is_transformed(l, WGRAD_X);
    return quantizes_as_it_is(l, FPROP_X) && !(training && wgrad_takes_it) && !l->stats;
}

bool linear_makes_gradient(const Linear *l) {
    return quantizes_as_it_is(l, DGRAD_DY) && quantizes_as_it_is(l, WGRAD_DY) && !l->stats;
}

static bool quantizes_gradient(const Linear *l) {
    return quantizes_as_it_is(l, DGRAD_DY) || quantizes_as_it_is(l, WGRAD_DY);
}

float *linear_bias_gradient(const Linear *l) { return l->bias && !quantizes_gradient(l) ? l->bias->gradient : NULL; }

// Where an operand goes

// Returns the form of X or dY. Elements that aren't rounded to nearest or have a prescale are
// written one by one, which across rows would be slow: they aren't transposed as they are made.
static QuantizedForm operand_form(const Linear *l, const Backend *backend, GemmOperand which, bool for_one_gemm) {
    QuantizedForm form = backend->quantized_form(l->recipe.scaling[which], operand_axis(which), for_one_gemm);
    const Encoding encoding = recipe_encoding(&l->recipe, which, l->weight->number);
    return form == FORM_TRANSPOSED && !encoding_is_plain(&encoding) ? FORM_PLAIN : form;
}

// Returns the form of operands that are made for one GEMM. Decoded ones are BF16, which a GEMM of
// FP32 doesn't take.
static QuantizedForm scratch_form(const Linear *l, const Backend *backend, GemmOperand which) {
    QuantizedForm form = operand_form(l, backend, which, true);
    return form == FORM_DECODED && l->recipe.activation_dtype != FORMAT_BF16 ? FORM_PLAIN : form;
}

// Returns X or dY, quantized, with how its elements are made.
static QuantizedTensor encoded(const Linear *l, GemmOperand which, QuantizedTensor q) {
    q.encoding = recipe_encoding(&l->recipe, which, l->weight->number);
    q.encoding.at = l->draws;
    return q;
}

// Returns what a GEMM takes of X or dY: the tensor itself, or memory in `scratch` for what
// make_operands then makes of it, an MX copy or BF16 from FP32. Widening BF16 to FP32 changes
// nothing, so isn't done.
static Operand place_operand(const Linear *l, const Backend *backend, GemmOperand which, Source source,
                             MemoryPlan *scratch) {
    Format format = l->recipe.format[which];
    int64_t rows = source.x.rows, cols = source_cols(&source);
    if (mx_is_mx(format)) {
        QuantizedForm form = scratch_form(l, backend, which);
        QuantizedTensor q = take_scaled(scratch, MEMORY_SCRATCH, format, l->recipe.scaling[which], operand_axis(which),
                                        rows, cols, form);
        q.delayed = l->amaxes.scales[which];
        return operand_quantized(encoded(l, which, q));
    }
    if (format != FORMAT_BF16 || source.x.dtype == FORMAT_BF16) return operand_tensor(source.x);
    return operand_tensor(take_tensor(scratch, MEMORY_SCRATCH, FORMAT_BF16, rows, cols));
}

// Transforms an operand along its GEMM's sum, of which W's padding is no part: it becomes zeros.
static void transform(const Linear *l, const Backend *backend, GemmOperand which, Tensor out, Tensor in) {
    int64_t N = l->weight->rows;
    bool sums_padding = operand_gemm(which) == GEMM_DGRAD && N < param_gemm_rows(l->weight);
    if (sums_padding) backend->zero(out.data, (size_t)(out.rows * out.cols) * dtype_size(out.dtype));
    if (which == DGRAD_DY) out = tensor_cols(out, 0, N), in = tensor_cols(in, 0, N);
    if (which == DGRAD_W) out = tensor_rows(out, 0, N), in = tensor_rows(in, 0, N);
    backend->hadamard(out, in, operand_axis(which), l->weight->hadamard[operand_gemm(which)]);
}

// Returns what an operand is made from: the source, or its transform, which is made in `scratch`. A
// plan without memory counts it.
static Source source_of(const Linear *l, const Backend *backend, GemmOperand which, Source source,
                        MemoryPlan *scratch) {
    if (!is_transformed(l, which)) return source;
    Tensor out = take_tensor(scratch, MEMORY_SCRATCH, source.x.dtype, source.x.rows, source.x.cols);
    if (out.data) transform(l, backend, which, out, source.x);
    return source_tensor(out);
}

// Returns what X is quantized from again for wgrad, likewise: X, or what fprop multiplied.
static Source wgrad_source(const Linear *l, const Backend *backend, Source x, Operand fprop_x, MemoryPlan *scratch) {
    if (!recipe_is_from_forward(&l->recipe, WGRAD_X)) return source_of(l, backend, WGRAD_X, x, scratch);
    Tensor values = take_tensor(scratch, MEMORY_SCRATCH, FORMAT_BF16, x.x.rows, source_cols(&x));
    if (values.data) backend->decode(values, &fprop_x.quantized);
    return source_of(l, backend, WGRAD_X, source_tensor(values), scratch);
}

// The operands of the backward pass but for W, and what they are made from.
typedef struct {
    Operand dgrad_dy, wgrad_dy, wgrad_x;
    Source as_dgrad, as_wgrad, x;
} BackwardOperands;

static BackwardOperands place_backward(const Linear *l, const Backend *backend, Source dy, Source x,
                                       MemoryPlan *scratch) {
    BackwardOperands o = {.as_dgrad = source_of(l, backend, DGRAD_DY, dy, scratch),
                          .as_wgrad = source_of(l, backend, WGRAD_DY, dy, scratch)};
    o.dgrad_dy = place_operand(l, backend, DGRAD_DY, o.as_dgrad, scratch);
    o.wgrad_dy = place_operand(l, backend, WGRAD_DY, o.as_wgrad, scratch);
    o.wgrad_x = operand_quantized(l->input_columnwise);
    if (keeps_mx_input(l)) return o;
    o.x = source_of(l, backend, WGRAD_X, x, scratch);
    o.wgrad_x = place_operand(l, backend, WGRAD_X, o.x, scratch);
    return o;
}

// Returns the weight with its padding, which is part of what memory was taken for. One that isn't
// quantized, of a GEMM that is transformed, is transformed into `scratch`.
static Operand weight_operand(Linear *l, const Backend *backend, GemmOperand which, MemoryPlan *scratch) {
    const Param *weight = l->weight;
    Format format = l->recipe.format[which];
    if (mx_is_mx(format)) {
        QuantizedTensor copy = which == FPROP_W ? weight->rowwise : weight->columnwise;
        copy.rows = param_gemm_rows(weight);
        return operand_quantized(copy);
    }
    Tensor value = format == FORMAT_BF16 ? weight->value : param_masters(weight);
    value.rows = param_gemm_rows(weight);
    value = source_of(l, backend, which, source_tensor(value), scratch).x;
    l->transformed_weight = is_transformed(l, which) ? value.data : NULL;
    return operand_tensor(value);
}

static void raise_to(size_t *most, size_t bytes) { *most = bytes > *most ? bytes : *most; }

void linear_layout(Linear *l, MemoryPlan *plan, const Backend *backend, int64_t rows, bool training,
                   LinearScratch *most) {
    int64_t N = param_gemm_rows(l->weight), K = l->weight->cols;
    Source x = source_tensor(tensor_make(NULL, l->recipe.activation_dtype, rows, K));
    MemoryPlan forward = {0}, backward = {0};
    Source as_fprop = source_of(l, backend, FPROP_X, x, &forward);
    Operand fprop_x = place_operand(l, backend, FPROP_X, as_fprop, &forward);
    raise_to(&most->workspace, backend->gemm_workspace(fprop_x, weight_operand(l, backend, FPROP_W, &forward)));
    if (training && keeps_mx_input(l)) wgrad_source(l, backend, x, fprop_x, &forward);
    raise_to(&most->bytes, forward.used);
    if (!training) return;

    if (keeps_mx_input(l)) {
        Scaling scaling = l->recipe.scaling[WGRAD_X];
        QuantizedForm form =
            l->keeps_values ? scratch_form(l, backend, WGRAD_X) : operand_form(l, backend, WGRAD_X, false);
        l->input_columnwise =
            take_scaled(plan, MEMORY_KEPT, l->recipe.format[WGRAD_X], scaling, AXIS_COLUMNWISE, rows, K, form);
        l->input_columnwise.delayed = l->amaxes.scales[WGRAD_X];
        l->input_columnwise = encoded(l, WGRAD_X, l->input_columnwise);
    }
    Source dy = source_tensor(tensor_make(NULL, l->recipe.activation_dtype, rows, N));
    BackwardOperands operands = place_backward(l, backend, dy, x, &backward);
    Operand weight = weight_operand(l, backend, DGRAD_W, &backward);
    raise_to(&most->bytes, backward.used);
    raise_to(&most->workspace, backend->gemm_workspace(operands.dgrad_dy, weight));
    raise_to(&most->workspace, backend->gemm_workspace(operands.wgrad_dy, operands.wgrad_x));
}

// Returns an operand that is a shape alone, as its GEMM takes it.
static Operand shape_of(const Recipe *recipe, GemmOperand which, int64_t rows, int64_t cols) {
    Format format = recipe->format[which];
    if (!mx_is_mx(format)) return operand_tensor(tensor_make(NULL, format, rows, cols));
    QuantizedTensor q = quantized_make(NULL, format, recipe_axis(recipe, which), rows, cols, FORM_PLAIN);
    q.scaling = recipe->scaling[which];
    q.encoding = recipe_encoding(recipe, which, 0);
    return operand_quantized(q);
}

bool linear_check_gemms(const Recipe *recipe, const char *name, const Backend *backend, int64_t rows, int64_t N,
                        int64_t K, Format y, bool training, Error *error) {
    const struct {
        Operand a, b;
        Tensor d;
        GemmOptions options;
    } gemms[NUM_GEMMS] = {[GEMM_FPROP] = {shape_of(recipe, FPROP_X, rows, K),
                                          shape_of(recipe, FPROP_W, N, K),
                                          tensor_make(NULL, y, rows, N),
                                          {.transpose_b = true}},
                          [GEMM_DGRAD] = {shape_of(recipe, DGRAD_DY, rows, N),
                                          shape_of(recipe, DGRAD_W, N, K),
                                          tensor_make(NULL, recipe->activation_dtype, rows, K),
                                          {0}},
                          [GEMM_WGRAD] = {shape_of(recipe, WGRAD_DY, rows, N),
                                          shape_of(recipe, WGRAD_X, rows, K),
                                          tensor_make(NULL, FORMAT_FP32, N, K),
                                          {.transpose_a = true}}};
    for (int i = 0; i < (training ? NUM_GEMMS : 1); i++) {
        const char *why = backend->gemm_refuses(gemms[i].d, gemms[i].a, gemms[i].b, gemms[i].options);
        if (why) {
            return error_set(error, "--mx-gemm native: %s's %s isn't multiplied natively: %s; use --mx-gemm auto", name,
                             GEMM_NAMES[i], why);
        }
    }
    return true;
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

// Adds to the operand's statistics what quantizing into such a copy does, where they are wanted.
static void collect_copy_stats(const Linear *l, const Backend *backend, GemmOperand which, Tensor tensor,
                               QuantizedTensor copy) {
    if (!l->stats || !mx_is_mx(l->recipe.format[which])) return;
    copy.axis = recipe_axis(&l->recipe, which);
    copy.format = l->recipe.format[which];
    copy.scaling = l->recipe.scaling[which];
    copy.delayed = l->amaxes.scales[which];
    backend->quantize_stats(&l->stats[which], tensor, &copy, l->recipe.rounding[operand_role(which)]);
}

// The same of X or dY.
static void collect_stats(const Linear *l, const Backend *backend, GemmOperand which, Tensor tensor) {
    collect_copy_stats(l, backend, which, tensor, encoded(l, which, (QuantizedTensor){0}));
}

// Adds a weight's, of which a copy that isn't made from the weight itself has none. Where ranks
// quantize what all have gathered, a factor is of all rows, and so each rank counts them all; else
// each counts its own.
static void collect_weight_stats(const Linear *l, const Backend *backend, GemmOperand which) {
    const Param *w = l->weight;
    QuantizedTensor copy = which == FPROP_W ? w->rowwise : w->columnwise;
    if (is_transformed(l, which) || (which == DGRAD_W && w->from_forward)) return;
    Tensor gathered = w->gathered ? tensor_make(w->gathered, FORMAT_FP32, w->rows, w->cols) : w->value;
    if (w->is_gathered && scaling_has_factor(copy.scaling)) {
        collect_copy_stats(l, backend, which, gathered, copy);
        return;
    }
    Tensor own = w->is_gathered ? tensor_rows(gathered, w->first_row, w->num_rows) : param_masters(w);
    copy.encoding.at.first_row += w->first_row;
    collect_copy_stats(l, backend, which, own, copy);
}

// Keeps X for wgrad.
static void keep_input(Linear *l, const Backend *backend, Source x, Operand fprop_x, MemoryPlan *scratch) {
    Source source = wgrad_source(l, backend, x, fprop_x, scratch);
    Operand kept = operand_quantized(l->input_columnwise);
    make_operands(backend, NULL, &kept, source, l->recipe.rounding[ROLE_ACTIVATIONS]);
    collect_stats(l, backend, WGRAD_X, source.x);
}

void linear_forward(Linear *l, const Backend *backend, Tensor y, Source x, bool training) {
    MemoryPlan scratch = {.base = l->scratch};
    ScaleRounding rounding = l->recipe.rounding[ROLE_ACTIVATIONS];
    bool keeps = training && keeps_mx_input(l);
    Source as_fprop = source_of(l, backend, FPROP_X, x, &scratch);
    Operand fprop_x = place_operand(l, backend, FPROP_X, as_fprop, &scratch);
    if (keeps) l->input_columnwise = encoded(l, WGRAD_X, quantized_of_rows(l->input_columnwise, x.x.rows));
    if (!keeps) l->input = x;
    // In one pass where both copies are of X itself.
    Operand kept = operand_quantized(l->input_columnwise);
    bool is_one_pass = keeps && !is_transformed(l, FPROP_X) && !is_transformed(l, WGRAD_X) &&
                       !recipe_is_from_forward(&l->recipe, WGRAD_X);
    make_operands(backend, &fprop_x, is_one_pass ? &kept : NULL, as_fprop, rounding);
    backend->gemm(y, fprop_x, weight_operand(l, backend, FPROP_W, &scratch),
                  (GemmOptions){.transpose_b = true, .bias = l->bias ? l->bias->master : NULL, .fast_sum = true});
    l->transformed_weight = NULL;
    collect_stats(l, backend, FPROP_X, as_fprop.x);
    collect_weight_stats(l, backend, FPROP_W);
    if (is_one_pass) collect_stats(l, backend, WGRAD_X, x.x);
    if (keeps && !is_one_pass) keep_input(l, backend, x, fprop_x, &scratch);
}

// Makes both operands of dY, in one pass where both are of dY itself.
static void make_gradients(const Linear *l, const Backend *backend, const BackwardOperands *o) {
    ScaleRounding rounding = l->recipe.rounding[ROLE_GRADIENTS];
    bool is_one_pass = !is_transformed(l, DGRAD_DY) && !is_transformed(l, WGRAD_DY);
    make_operands(backend, &o->dgrad_dy, is_one_pass ? &o->wgrad_dy : NULL, o->as_dgrad, rounding);
    if (!is_one_pass) make_operands(backend, NULL, &o->wgrad_dy, o->as_wgrad, rounding);
}

void linear_backward(Linear *l, const Backend *backend, Tensor dx, Source dy) {
    MemoryPlan scratch = {.base = l->scratch};
    // The quantizer reads dY anyway.
    if (l->bias && quantizes_gradient(l)) dy.sums = l->bias->gradient;
    BackwardOperands operands = place_backward(l, backend, dy, l->input, &scratch);
    make_gradients(l, backend, &operands);
    backend->gemm(dx, operands.dgrad_dy, weight_operand(l, backend, DGRAD_W, &scratch), (GemmOptions){0});
    l->transformed_weight = NULL;

    if (!keeps_mx_input(l)) {
        make_operands(backend, NULL, &operands.wgrad_x, operands.x, l->recipe.rounding[ROLE_ACTIVATIONS]);
        collect_stats(l, backend, WGRAD_X, operands.x.x);
    }
    Param *weight = l->weight;
    Tensor dweight = tensor_make(weight->gradient, FORMAT_FP32, param_gemm_rows(weight), weight->cols);
    backend->gemm(dweight, operands.wgrad_dy, operands.wgrad_x,
                  (GemmOptions){.transpose_a = true, .accumulate = !weight->gradient_is_stale});
    weight->gradient_is_stale = false;
    float *dbias = linear_bias_gradient(l);
    if (dbias && !dy.is_summed) backend->bias_backward(dbias, dy.x);
    int64_t N = l->weight->rows; // without padding
    collect_stats(l, backend, DGRAD_DY, tensor_cols(operands.as_dgrad.x, 0, N));
    collect_weight_stats(l, backend, DGRAD_W);
    collect_stats(l, backend, WGRAD_DY, tensor_cols(operands.as_wgrad.x, 0, N));
}
