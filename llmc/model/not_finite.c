#include "not_finite.h"

#include <math.h>
#include <stdlib.h>

static const Backend *looked_at;
static GPT *model_of;
static NotFinite first;

static bool is_finite(Tensor t) {
    int64_t count = (t.rows - 1) * t.stride + t.cols;
    size_t bytes = (size_t)count * dtype_size(t.dtype);
    void *host = allocate(bytes);
    looked_at->copy_to_host(host, t.data, bytes);
    bool finite = true;
    for (int64_t i = 0; i < count && finite; i++) {
        float x = t.dtype == FORMAT_FP32 ? ((const float *)host)[i] : mx_from_bf16(((const uint16_t *)host)[i]);
        finite = isfinite(x) || i % t.stride >= t.cols;
    }
    free(host);
    return finite;
}

// Returns whether a GEMM is one of this linear layer's: it writes its weight's gradient, or reads
// it.
static bool is_of(const Linear *linear, Tensor d, Operand b, bool is_wgrad) {
    const Param *w = linear->weight;
    if (is_wgrad) return d.data == w->gradient;
    if (operand_is_quantized(b)) {
        const void *elements = b.quantized.elements;
        return elements && (elements == w->rowwise.elements || elements == w->columnwise.elements);
    }
    return b.tensor.data == w->value.data || b.tensor.data == w->master || b.tensor.data == linear->transformed_weight;
}

static void note(Tensor d, Operand b, GemmOptions options) {
    int64_t layers = model_of->config.layers;
    first = (NotFinite){true, layers, "lm_head",
                        options.transpose_a   ? "wgrad"
                        : options.transpose_b ? "fprop"
                                              : "dgrad"};
    for (int64_t i = 0; i < layers * LINEARS_PER_BLOCK; i++) {
        int which = (int)(i % LINEARS_PER_BLOCK);
        const Linear *linear = gpt_linear(model_of, i / LINEARS_PER_BLOCK, which);
        if (!is_of(linear, d, b, options.transpose_a)) continue;
        first.layer = i / LINEARS_PER_BLOCK;
        first.linear = LINEAR_NAMES[which];
    }
}

static void gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    looked_at->gemm(d, a, b, options);
    if (!first.found && !is_finite(d)) note(d, b, options);
}

NotFinite not_finite_find(GPT *model, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T,
                          double scale) {
    static Backend table;
    looked_at = model->backend;
    model_of = model;
    first = (NotFinite){0};
    table = *looked_at;
    table.gemm = gemm;
    model->backend = &table;
    gpt_clear_gradients(model);
    gpt_loss_and_gradients(model, tokens, targets, B, T, scale);
    gpt_take_loss(model);
    model->backend = looked_at;
    return first;
}
