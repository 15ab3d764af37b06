#include "quant_stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t stats_count(const GPTConfig *config) {
    return (size_t)(config->layers + 1) * LINEARS_PER_BLOCK * NUM_GEMM_OPERANDS;
}

QuantStats *quant_stats_allocate(const GPTConfig *config) { return allocate(stats_count(config) * sizeof(QuantStats)); }

static QuantStats *stats_of(QuantStats *stats, int64_t layer, int linear) {
    return stats ? stats + (layer * LINEARS_PER_BLOCK + linear) * NUM_GEMM_OPERANDS : NULL;
}

void quant_stats_collect(GPT *model, QuantStats *stats) {
    if (stats) memset(stats, 0, stats_count(&model->config) * sizeof(*stats));
    for (int64_t l = 0; l < model->config.layers; l++) {
        for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
            gpt_linear(model, l, i)->stats = stats_of(stats, l, i);
        }
    }
    model->head.stats = stats_of(stats, model->config.layers, 0);
}

bool quant_stats_log_tensor(const QuantStats *s, QuantEvent event, Format format, ScaleRounding rounding,
                            Logger *logger, Error *error) {
    if (s->elements == 0) return true;
    double count = (double)s->elements;
    JsonWriter *w = logger_begin_event(logger, "quant", event.step);
    json_write_int64(w, "layer", event.layer);
    json_write_string(w, "linear", event.linear);
    json_write_string(w, "operand", event.operand);
    json_write_string(w, "format", FORMAT_NAMES[format]);
    json_write_string(w, "scale_rounding", SCALE_ROUNDING_NAMES[rounding]);
    // An SQNR without end is that of exact values.
    if (!isfinite(s->amax)) json_write_bool(w, "finite", false);
    json_write_double(w, "amax", s->amax);
    // Fractions of the elements: beyond the largest value, at the largest code, not 0 and become 0.
    json_write_double(w, "clamped", (double)s->clamped / count);
    json_write_double(w, "at_max", (double)s->at_max / count);
    json_write_double(w, "flushed", (double)s->flushed / count);
    json_write_double(w, "sqnr_db", 10 * log10(s->signal / s->noise));
    return logger_end_event(logger, error);
}

bool quant_stats_log_linear(const Linear *linear, QuantEvent event, Logger *logger, Error *error) {
    const Recipe *recipe = &linear->recipe;
    for (GemmOperand i = 0; i < NUM_GEMM_OPERANDS; i++) {
        event.operand = OPERAND_NAMES[i];
        ScaleRounding rounding = recipe->rounding[operand_role(i)];
        if (!quant_stats_log_tensor(&linear->stats[i], event, recipe->format[i], rounding, logger, error)) return false;
    }
    return true;
}

// Sums the statistics over all ranks. Weights are of each rank's own rows, so they too are counted
// once, or where they aren't sharded once for each rank.
static void sum_over_ranks(QuantStats *stats, size_t count, Comm *comm) {
    QuantStats *all = comm_gather(comm, stats, (int64_t)(count * sizeof(*stats)));
    memcpy(stats, all, count * sizeof(*stats));
    for (size_t i = count; i < (size_t)comm->size * count; i++) {
        stats_add(&stats[i % count], &all[i]);
    }
    free(all);
}

bool quant_stats_log(GPT *model, QuantStats *stats, Logger *logger, int64_t step, Error *error) {
    Comm *comm = model->params.sharding.comm;
    int64_t layers = model->config.layers;
    if (comm->size > 1) sum_over_ranks(stats, stats_count(&model->config), comm);
    for (int64_t l = 0; l < layers; l++) {
        for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
            QuantEvent event = {.step = step, .layer = l, .linear = LINEAR_NAMES[i]};
            if (!quant_stats_log_linear(gpt_linear(model, l, i), event, logger, error)) return false;
        }
    }
    QuantEvent event = {.step = step, .layer = layers, .linear = "lm_head"};
    return quant_stats_log_linear(&model->head, event, logger, error);
}
