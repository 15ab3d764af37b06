#include "not_finite.h"
#include "profile.h" // profile_layer

#include <math.h>
#include <stdlib.h>

static const Backend *looked_at;
static GPT *model_of;
static NotFinite first;

static bool is_finite(Tensor t) {
    uint32_t magnitude;
    looked_at->amax(model_of->amax, t);
    looked_at->copy_to_host(&magnitude, model_of->amax, sizeof(magnitude));
    return magnitude < mx_magnitude_bits(INFINITY);
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

// Returns which linear layer of the block at hand, or the LM head where none is, a GEMM is of.
static int linear_of(int64_t layer, Tensor d, Operand b, bool is_wgrad) {
    int linear = 0;
    while (layer >= 0 && linear < LINEARS_PER_BLOCK && !is_of(gpt_linear(model_of, layer, linear), d, b, is_wgrad)) {
        linear++;
    }
    return layer >= 0 ? linear : LINEAR_HEAD;
}

static void gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    looked_at->gemm(d, a, b, options);
    if (first.found) return;
    first.found = !is_finite(d);
    first.before += !first.found;
    if (!first.found) return;
    int64_t layer = profile_layer();
    first.layer = layer >= 0 ? layer : model_of->config.layers;
    first.linear = linear_of(layer, d, b, options.transpose_a);
    first.gemm = options.transpose_a ? GEMM_WGRAD : options.transpose_b ? GEMM_FPROP : GEMM_DGRAD;
}

// Returns what the ranks found first, the first rank's of equals.
static NotFinite first_of_ranks(Comm *comm, NotFinite own) {
    own.rank = comm->rank;
    NotFinite *all = comm_gather(comm, &own, sizeof(own)), earliest = all[0];
    for (int rank = 1; rank < comm->size; rank++) {
        bool is_earlier = !earliest.found || all[rank].before < earliest.before;
        if (all[rank].found && is_earlier) earliest = all[rank];
    }
    free(all);
    return earliest;
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
    model->params.is_last_micro_batch = false; // so that these gradients aren't reduced as a step's
    gpt_clear_gradients(model);
    gpt_loss_and_gradients(model, tokens, targets, B, T, scale);
    gpt_take_loss(model);
    model->backend = looked_at;
    return first_of_ranks(model->params.sharding.comm, first);
}
