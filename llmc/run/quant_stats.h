/*
Quantization statistics of a step: of every linear layer and operand, and their sums over ranks, as
the log has them.
*/
#pragma once

#include "llmc/model/gpt.h"
#include "logger.h"

// What was quantized: one operand of one linear layer.
typedef struct {
    int64_t step, layer;
    const char *linear;  // "qkv"
    const char *operand; // "fprop-x"; "gain"
    bool has_spread;     // of a gain:
    double log_spread;   // the standard deviation of the gains' logarithms
} QuantEvent;

// Allocates (layers + 1, LINEARS_PER_BLOCK, NUM_GEMM_OPERANDS); the last layer is the LM head. To
// be freed.
QuantStats *quant_stats_allocate(const GPTConfig *config);

// Lets the model's linear layers add to `stats` from here on, which is zeroed first; NULL: to none.
void quant_stats_collect(GPT *model, QuantStats *stats);

// Sums what has been collected over ranks, and logs it: the event "quant" of each operand that was
// quantized, and of the gains of each norm; on the console the operands most clamped and most
// flushed, gains among them where they are quantized.
void quant_stats_log(GPT *model, QuantStats *stats, Logger *logger, int64_t step);

// Logs the event "quant" of a norm's gains as they are now, with the spread (standard deviation) of
// their logarithms. Gains that the recipe doesn't quantize are counted as if they were, in the
// weights' format; of a recipe without such a format, or a norm without gains, nothing is logged.
// Returns what was counted.
QuantStats quant_stats_log_gains(const Norm *norm, const Recipe *recipe, const Backend *backend, QuantEvent event,
                                 Logger *logger);

// Log the event "quant" of one tensor, {.operand} of {.linear}, and of all operands of a linear
// layer; nothing of those without elements. `event` has the step, the layer, and the names.
void quant_stats_log_tensor(const QuantStats *stats, QuantEvent event, Format format, Scaling scaling,
                            ScaleRounding rounding, Logger *logger);
void quant_stats_log_linear(const Linear *linear, QuantEvent event, Logger *logger);
