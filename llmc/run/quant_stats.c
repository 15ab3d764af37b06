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

static bool log_linear(Logger *logger, int64_t step, int64_t layer, const char *name, const Linear *linear,
                       Error *error) {
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        const QuantStats *s = &linear->stats[operand];
        if (s->elements == 0) continue;
        double count = (double)s->elements;
        QuantEvent event = {.step = step,
                            .layer = layer,
                            .linear = name,
                            .operand = operand_name((GemmOperand)operand),
                            .format = format_name(linear->recipe.format[operand]),
                            .scale_rounding =
                                scale_rounding_name(linear->recipe.rounding[operand_role((GemmOperand)operand)]),
                            .amax = s->amax,
                            .clamped = (double)s->clamped / count,
                            .at_max = (double)s->at_max / count,
                            .flushed = (double)s->flushed / count,
                            .sqnr_db = 10 * log10(s->signal / s->noise)};
        if (!logger_quant(logger, &event, error)) return false;
    }
    return true;
}

// The sums over all ranks. Weights are of each rank's own rows, so they too are counted once, or
// where they aren't sharded once for each rank.
static void sum_over_ranks(QuantStats *stats, size_t count, Comm *comm) {
    enum { FIELDS = 8 };
    double *sums = allocate(count * FIELDS * sizeof(*sums)), *largest = allocate(count * sizeof(*largest));
    for (size_t i = 0; i < count; i++) {
        const QuantStats *s = &stats[i];
        const double fields[FIELDS] = {
            s->signal,         s->noise,           (double)s->elements, (double)s->clamped,
            (double)s->at_max, (double)s->flushed, (double)s->blocks,   (double)s->blocks_unlike_rceil};
        memcpy(sums + i * FIELDS, fields, sizeof(fields));
        largest[i] = s->amax;
    }
    comm_sum_doubles(comm, sums, (int64_t)(count * FIELDS));
    comm_max_doubles(comm, largest, (int64_t)count);
    for (size_t i = 0; i < count; i++) {
        const double *fields = sums + i * FIELDS;
        stats[i] = (QuantStats){.amax = largest[i],
                                .signal = fields[0],
                                .noise = fields[1],
                                .elements = (int64_t)fields[2],
                                .clamped = (int64_t)fields[3],
                                .at_max = (int64_t)fields[4],
                                .flushed = (int64_t)fields[5],
                                .blocks = (int64_t)fields[6],
                                .blocks_unlike_rceil = (int64_t)fields[7]};
    }
    free(sums);
    free(largest);
}

bool quant_stats_log(GPT *model, QuantStats *stats, Logger *logger, int64_t step, Error *error) {
    Comm *comm = model->params.sharding.comm;
    int64_t layers = model->config.layers;
    if (comm->size > 1) sum_over_ranks(stats, stats_count(&model->config), comm);
    for (int64_t l = 0; l < layers; l++) {
        for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
            if (!log_linear(logger, step, l, gpt_linear_name(i), gpt_linear(model, l, i), error)) return false;
        }
    }
    return log_linear(logger, step, layers, "lm_head", &model->head, error);
}
