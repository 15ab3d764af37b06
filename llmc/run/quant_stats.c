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

// Writes the shares of scales by their exponents.
static void write_scales(const QuantStats *s, JsonWriter *w) {
    json_begin_array(w, "scale_exponents");
    for (int bin = 0; bin < SCALE_BINS; bin++) {
        if (s->scales[bin] == 0) continue;
        json_begin_array(w, NULL);
        json_write_int64(w, NULL, SCALE_BINS_FROM + bin * SCALE_BIN_OCTAVES);
        json_write_double(w, NULL, (double)s->scales[bin] / (double)s->blocks);
        json_end_array(w);
    }
    json_end_array(w);
}

void quant_stats_log_tensor(const QuantStats *s, QuantEvent event, Format format, Scaling scaling,
                            ScaleRounding rounding, Logger *logger) {
    if (s->elements == 0) return;
    double count = (double)s->elements;
    JsonWriter *w = logger_begin_event(logger, "quant", event.step);
    json_write_int64(w, "layer", event.layer);
    json_write_string(w, "linear", event.linear);
    json_write_string(w, "operand", event.operand);
    json_write_string(w, "format", FORMAT_NAMES[format]);
    if (scaling == SCALING_MX) json_write_string(w, "scale_rounding", SCALE_ROUNDING_NAMES[rounding]);
    if (scaling != SCALING_MX) json_write_string(w, "scaling", SCALING_NAMES[scaling]);
    // An SQNR without end is that of exact values.
    if (!isfinite(s->amax)) json_write_bool(w, "finite", false);
    json_write_double(w, "amax", s->amax);
    // Fractions of the elements: beyond the largest value, at the largest code, not 0 and become 0.
    json_write_double(w, "clamped", (double)s->clamped / count);
    json_write_double(w, "at_max", (double)s->at_max / count);
    json_write_double(w, "flushed", (double)s->flushed / count);
    json_write_double(w, "sqnr_db", 10 * log10(s->signal / s->noise));
    // The share of scales that aren't rceil's.
    if (scaling == SCALING_MX) json_write_double(w, "unlike_rceil", (double)s->blocks_unlike_rceil / (double)s->blocks);
    write_scales(s, w);
    if (event.has_spread) json_write_double(w, "log_spread", event.log_spread);
    logger_end_event(logger);
}

void quant_stats_log_linear(const Linear *linear, QuantEvent event, Logger *logger) {
    const Recipe *recipe = &linear->recipe;
    for (GemmOperand i = 0; i < NUM_GEMM_OPERANDS; i++) {
        event.operand = OPERAND_NAMES[i];
        ScaleRounding rounding = recipe->rounding[operand_role(i)];
        quant_stats_log_tensor(&linear->stats[i], event, recipe->format[i], recipe->scaling[i], rounding, logger);
    }
}

// Sums the statistics over all ranks. Of weights each rank counted its own rows, so that they too
// are counted once, or all rows, so that they are counted once for each rank.
static void sum_over_ranks(QuantStats *stats, size_t count, Comm *comm) {
    QuantStats *all = comm_gather(comm, stats, (int64_t)(count * sizeof(*stats)));
    memcpy(stats, all, count * sizeof(*stats));
    for (size_t i = count; i < (size_t)comm->size * count; i++) {
        stats_add(&stats[i % count], &all[i]);
    }
    free(all);
}

// Returns the standard deviation of the logarithms of a vector's magnitudes; zeros are left out.
static double log_spread(const Param *p, const Backend *backend) {
    float *values = allocate((size_t)p->cols * sizeof(float));
    double count = 0, sum = 0, squares = 0;
    backend->copy_to_host(values, p->master, (size_t)p->cols * sizeof(float));
    for (int64_t i = 0; i < p->cols; i++) {
        double logarithm = values[i] != 0 ? log(fabs((double)values[i])) : 0;
        count += values[i] != 0;
        sum += logarithm;
        squares += logarithm * logarithm;
    }
    free(values);
    double mean = sum / count, variance = squares / count - mean * mean;
    return variance > 0 ? sqrt(variance) : 0;
}

QuantStats quant_stats_log_gains(const Norm *norm, const Recipe *recipe, const Backend *backend, QuantEvent event,
                                 Logger *logger) {
    const Param *p = norm->weight;
    Format format = mx_is_mx(recipe->norm_gains) ? recipe->norm_gains : recipe->format[FPROP_W];
    ScaleRounding rounding = recipe->rounding[ROLE_WEIGHTS];
    QuantStats stats = {0};
    bool is_scaled = !mx_is_mx(recipe->norm_gains) && recipe->scaling[FPROP_W] != SCALING_MX;
    if (!p || !mx_is_mx(format) || is_scaled) return stats;
    QuantizedTensor copy = quantized_make(NULL, format, AXIS_ROWWISE, 1, p->cols, FORM_PLAIN);
    if (mx_is_mx(recipe->norm_gains)) copy.encoding = p->decoded.encoding;
    backend->quantize_stats(&stats, tensor_make(p->master, FORMAT_FP32, 1, p->cols), &copy, rounding);
    event.operand = "gain";
    event.has_spread = true;
    event.log_spread = log_spread(p, backend);
    quant_stats_log_tensor(&stats, event, format, SCALING_MX, rounding, logger);
    return stats;
}

// The largest share of an operand's elements, and whose it is.
typedef struct {
    bool is_counted; // of any operand there are statistics
    double share;
    QuantEvent event;
} WorstShare;

// The operands of which the largest share was clamped, and flushed.
typedef struct {
    WorstShare clamped, flushed;
} Worst;

static void raise_share(WorstShare *worst, int64_t count, const QuantStats *s, QuantEvent event) {
    double share = s->elements ? (double)count / (double)s->elements : 0;
    worst->is_counted = worst->is_counted || s->elements > 0;
    if (share > worst->share) *worst = (WorstShare){true, share, event};
}

static void raise_worst(Worst *worst, const QuantStats *s, QuantEvent event) {
    raise_share(&worst->clamped, s->clamped, s, event);
    raise_share(&worst->flushed, s->flushed, s, event);
}

static void name_worst(char text[128], const WorstShare *worst, const char *what) {
    if (worst->share == 0) {
        snprintf(text, 128, "nothing %s", what);
        return;
    }
    snprintf(text, 128, "at most %.3g %% %s (layer %ld %s %s)", 100 * worst->share, what, worst->event.layer,
             worst->event.linear, worst->event.operand);
}

static void print_worst(Logger *logger, int64_t step, const Worst *worst) {
    char most_clamped[128], most_flushed[128];
    name_worst(most_clamped, &worst->clamped, "clamped");
    name_worst(most_flushed, &worst->flushed, "flushed");
    logger_message(logger, "step %ld: quantized: %s; %s", step, most_clamped, most_flushed);
}

// Logs a linear layer's operands, and finds the worst.
static void log_linear(const Linear *linear, QuantEvent event, Worst *worst, Logger *logger) {
    for (GemmOperand i = 0; i < NUM_GEMM_OPERANDS; i++) {
        event.operand = OPERAND_NAMES[i];
        raise_worst(worst, &linear->stats[i], event);
    }
    quant_stats_log_linear(linear, event, logger);
}

// Logs a norm's gains, which may be the worst where they are quantized.
static void log_norm(const Norm *norm, const Recipe *recipe, const Backend *backend, QuantEvent event, Worst *worst,
                     Logger *logger) {
    QuantStats stats = quant_stats_log_gains(norm, recipe, backend, event, logger);
    event.operand = "gain";
    if (mx_is_mx(recipe->norm_gains)) raise_worst(worst, &stats, event);
}

// Logs the gains of a block's norms: of attention, of queries and keys, of the MLP. No filter
// changes these.
static void log_gains(GPT *model, QuantEvent event, Worst *worst, Logger *logger) {
    const Recipe recipe = recipe_for_layer(&model->recipe, event.layer, model->config.layers);
    const Branch *attention = gpt_branch(model, event.layer, BRANCH_ATTENTION);
    const Branch *mlp = gpt_branch(model, event.layer, BRANCH_MLP);
    const Norm *const norms[] = {&attention->norm, &attention->attention.q_norm, &attention->attention.k_norm,
                                 &mlp->norm};
    static const char *const NAMES[] = {"norm_attention", "norm_q", "norm_k", "norm_mlp"};
    for (int i = 0; i < COUNT(NAMES); i++) {
        event.linear = NAMES[i];
        log_norm(norms[i], &recipe, model->backend, event, worst, logger);
    }
}

void quant_stats_log(GPT *model, QuantStats *stats, Logger *logger, int64_t step) {
    Comm *comm = model->params.sharding.comm;
    int64_t layers = model->config.layers;
    Worst worst = {0};
    if (comm->size > 1) sum_over_ranks(stats, stats_count(&model->config), comm);
    for (int64_t l = 0; l <= layers; l++) {
        for (int i = 0; i < (l < layers ? LINEARS_PER_BLOCK : 1); i++) {
            bool is_head = l == layers;
            QuantEvent event = {.step = step, .layer = l, .linear = LINEAR_NAMES[is_head ? LINEAR_HEAD : i]};
            const Linear *linear = is_head ? &model->head : gpt_linear(model, l, i);
            log_linear(linear, event, &worst, logger);
        }
        QuantEvent event = {.step = step, .layer = l};
        if (l < layers) log_gains(model, event, &worst, logger);
    }
    QuantEvent event = {.step = step, .layer = layers, .linear = "norm_final"};
    log_norm(&model->final_norm, &model->recipe, model->backend, event, &worst, logger);
    if (worst.clamped.is_counted) print_worst(logger, step, &worst);
}
