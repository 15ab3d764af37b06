#include "profile.h"
#include "llmc/base/util.h" // allocate, seconds_now

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

typedef enum {
    OP_FPROP,
    OP_DGRAD,
    OP_WGRAD,
    OP_QUANTIZE,
    OP_QUANTIZE_LAYERNORM,
    OP_QUANTIZE_ACTIVATION,
    OP_QUANTIZE_ACTIVATION_BACKWARD,
    OP_ADAMW_QUANTIZE,
    OP_QUANTIZE_STATS,
    OP_CONVERT,
    OP_EMBEDDING_FORWARD,
    OP_EMBEDDING_BACKWARD,
    OP_LAYERNORM_FORWARD,
    OP_LAYERNORM_BACKWARD,
    OP_ROPE,
    OP_ATTENTION_FORWARD,
    OP_ATTENTION_BACKWARD,
    OP_ACTIVATION_FORWARD,
    OP_ACTIVATION_BACKWARD,
    OP_BIAS_BACKWARD,
    OP_CLASSIFIER,
    OP_SUMS,
    OP_ADAMW,
    OP_ZERO,
    NUM_OPS
} Op;

static const char *const NAMES[NUM_OPS] = {
    [OP_FPROP] = "gemm fprop",
    [OP_DGRAD] = "gemm dgrad",
    [OP_WGRAD] = "gemm wgrad",
    [OP_QUANTIZE] = "quantize",
    [OP_QUANTIZE_LAYERNORM] = "quantize layernorm's output",
    [OP_QUANTIZE_ACTIVATION] = "activation, quantize",
    [OP_QUANTIZE_ACTIVATION_BACKWARD] = "activation backward, quantize",
    [OP_ADAMW_QUANTIZE] = "adamw, quantize weights",
    [OP_QUANTIZE_STATS] = "quantization statistics",
    [OP_CONVERT] = "convert",
    [OP_EMBEDDING_FORWARD] = "embedding forward",
    [OP_EMBEDDING_BACKWARD] = "embedding backward",
    [OP_LAYERNORM_FORWARD] = "residual, layernorm forward",
    [OP_LAYERNORM_BACKWARD] = "layernorm backward",
    [OP_ROPE] = "rotary positions",
    [OP_ATTENTION_FORWARD] = "attention forward",
    [OP_ATTENTION_BACKWARD] = "attention backward",
    [OP_ACTIVATION_FORWARD] = "activation forward",
    [OP_ACTIVATION_BACKWARD] = "activation backward",
    [OP_BIAS_BACKWARD] = "bias backward",
    [OP_CLASSIFIER] = "classifier",
    [OP_SUMS] = "gradient norm, sum of losses",
    [OP_ADAMW] = "adamw",
    [OP_ZERO] = "zero gradients",
};

typedef struct {
    double seconds;
    int64_t calls;
} Cell;

static const Backend *timed;
static Backend table;
static int64_t num_layers, layer_now = -1;
static bool counting;
static Cell *cells; // (num_layers + 1, NUM_OPS); the last row: of no block

static Cell *cell_at(int64_t layer, int op) { return &cells[(layer < 0 ? num_layers : layer) * NUM_OPS + op]; }

static void add(Op op, double start) {
    if (!counting) return;
    Cell *cell = cell_at(layer_now, op);
    cell->seconds += seconds_now() - start;
    cell->calls++;
}

// Defines timed_NAME, which calls `timed`'s NAME and adds its time to `op`.
#define TIMED(name, op, parameters, arguments) \
    static void timed_##name parameters {      \
        double start = seconds_now();          \
        timed->name arguments;                 \
        timed->synchronize();                  \
        add(op, start);                        \
    }
#define TIMED_SUM(name)                                                 \
    static double timed_##name(const float *values, int64_t count) {    \
        double start = seconds_now(), sum = timed->name(values, count); \
        add(OP_SUMS, start);                                            \
        return sum;                                                     \
    }

static Op quantize_op(Source in) {
    static const Op OPS[] = {[SOURCE_TENSOR] = OP_QUANTIZE,
                             [SOURCE_LAYERNORM] = OP_QUANTIZE_LAYERNORM,
                             [SOURCE_ACTIVATION] = OP_QUANTIZE_ACTIVATION,
                             [SOURCE_ACTIVATION_BACKWARD] = OP_QUANTIZE_ACTIVATION_BACKWARD,
                             [SOURCE_ADAMW] = OP_ADAMW_QUANTIZE};
    return OPS[in.kind];
}

TIMED(gemm,
      options.transpose_a   ? OP_WGRAD
      : options.transpose_b ? OP_FPROP
                            : OP_DGRAD,
      (Tensor d, Operand a, Operand b, GemmOptions options), (d, a, b, options))
TIMED(quantize, quantize_op(in),
      (const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in, ScaleRounding rounding),
      (rowwise, columnwise, in, rounding))
TIMED(quantize_stats, OP_QUANTIZE_STATS,
      (QuantStats * stats, Tensor in, Axis axis, Format format, ScaleRounding rounding),
      (stats, in, axis, format, rounding))
TIMED(convert, OP_CONVERT, (Tensor out, Tensor in), (out, in))
TIMED(embedding_forward, OP_EMBEDDING_FORWARD, (Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t T),
      (out, tokens, wte, wpe, T))
TIMED(embedding_backward, OP_EMBEDDING_BACKWARD,
      (float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, int64_t T), (dwte, dwpe, tokens, dout, T))
TIMED(layernorm_forward, OP_LAYERNORM_FORWARD,
      (Tensor out, Tensor sum, float *mean, float *rstd, Tensor input, Tensor residual, const float *weight,
       const float *bias),
      (out, sum, mean, rstd, input, residual, weight, bias))
TIMED(layernorm_backward, OP_LAYERNORM_BACKWARD,
      (Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input, const float *weight, const float *mean,
       const float *rstd),
      (dinput, dweight, dbias, dout, input, weight, mean, rstd))
TIMED(rope, OP_ROPE, (Tensor x, const float *rotations, int64_t T, int64_t HS, bool inverse),
      (x, rotations, T, HS, inverse))
TIMED(attention_forward, OP_ATTENTION_FORWARD, (Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape),
      (out, logsumexp, qkv, shape))
TIMED(attention_backward, OP_ATTENTION_BACKWARD,
      (Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, AttentionShape shape),
      (dqkv, dout, qkv, logsumexp, shape))
TIMED(activation_forward, OP_ACTIVATION_FORWARD, (Tensor out, Tensor input, Activation activation),
      (out, input, activation))
TIMED(activation_backward, OP_ACTIVATION_BACKWARD, (Tensor dinput, Tensor dout, Tensor input, Activation activation),
      (dinput, dout, input, activation))
TIMED(bias_backward, OP_BIAS_BACKWARD, (float *dbias, Tensor dout), (dbias, dout))
TIMED(classifier, OP_CLASSIFIER, (float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss),
      (losses, dlogits, logits, targets, dloss))
TIMED(adamw, OP_ADAMW,
      (float *master, float *moment1, float *moment2, const float *gradient, int64_t count, AdamWOptions options),
      (master, moment1, moment2, gradient, count, options))
TIMED(accumulate, OP_SUMS, (float *sum, const float *values, int64_t count), (sum, values, count))
TIMED(zero, OP_ZERO, (void *memory, size_t bytes), (memory, bytes))
TIMED_SUM(sum_of_squares)
TIMED_SUM(sum)

const Backend *profile_backend(const Backend *backend, int64_t layers) {
    timed = backend;
    num_layers = layers;
    free(cells);
    cells = allocate((size_t)((layers + 1) * NUM_OPS) * sizeof(*cells));
    table = *backend;
    table.gemm = timed_gemm;
    table.quantize = timed_quantize;
    table.quantize_stats = timed_quantize_stats;
    table.convert = timed_convert;
    table.embedding_forward = timed_embedding_forward;
    table.embedding_backward = timed_embedding_backward;
    table.layernorm_forward = timed_layernorm_forward;
    table.layernorm_backward = timed_layernorm_backward;
    table.rope = timed_rope;
    table.attention_forward = timed_attention_forward;
    table.attention_backward = timed_attention_backward;
    table.activation_forward = timed_activation_forward;
    table.activation_backward = timed_activation_backward;
    table.bias_backward = timed_bias_backward;
    table.classifier = timed_classifier;
    table.adamw = timed_adamw;
    table.accumulate = timed_accumulate;
    table.zero = timed_zero;
    table.sum_of_squares = timed_sum_of_squares;
    table.sum = timed_sum;
    return &table;
}

void profile_set_layer(int64_t layer) { layer_now = layer; }

void profile_count(bool now) { counting = now; }

static Cell sum_of_operation(int op) {
    Cell sum = {0};
    for (int64_t layer = 0; layer <= num_layers; layer++) {
        sum.seconds += cells[layer * NUM_OPS + op].seconds;
        sum.calls += cells[layer * NUM_OPS + op].calls;
    }
    return sum;
}

static double seconds_of_layer(int64_t layer) {
    double sum = 0;
    for (int op = 0; op < NUM_OPS; op++) {
        sum += cell_at(layer, op)->seconds;
    }
    return sum;
}

static void print_line(const char *name, double seconds, double all, int64_t calls, int64_t steps) {
    printf("%-34s %9.2f %7.1f", name, 1e3 * seconds / (double)steps, 100 * seconds / all);
    if (calls > 0) printf(" %9.1f %11.3f", (double)calls / (double)steps, 1e3 * seconds / (double)calls);
    printf("\n");
}

void profile_print(int64_t steps, double seconds) {
    double rest = seconds;
    printf("%-34s %9s %7s %9s %11s\n", "operation", "ms/step", "%", "calls", "ms/call");
    for (int op = 0; op < NUM_OPS; op++) {
        Cell sum = sum_of_operation(op);
        rest -= sum.seconds;
        if (sum.calls > 0) print_line(NAMES[op], sum.seconds, seconds, sum.calls, steps);
    }
    print_line("between operations", rest, seconds, 0, steps);
    print_line("a step", seconds, seconds, 0, steps);
    printf("\n%-34s %9s %7s\n", "layer", "ms/step", "%");
    for (int64_t layer = 0; layer < num_layers; layer++) {
        char name[32];
        snprintf(name, sizeof(name), "block %" PRId64, layer);
        print_line(name, seconds_of_layer(layer), seconds, 0, steps);
    }
    print_line("embeddings, head, optimizer", seconds_of_layer(-1), seconds, 0, steps);
}

void profile_write(JsonWriter *writer, int64_t steps, double seconds) {
    json_write_double(writer, "seconds", seconds / (double)steps);
    json_begin_object(writer, "operations");
    for (int op = 0; op < NUM_OPS; op++) {
        Cell sum = sum_of_operation(op);
        if (sum.calls > 0) json_write_double(writer, NAMES[op], sum.seconds / (double)steps);
    }
    json_end_object(writer);
    json_begin_object(writer, "layers");
    for (int64_t layer = 0; layer <= num_layers; layer++) {
        char name[32];
        snprintf(name, sizeof(name), "block %" PRId64, layer);
        json_begin_object(writer, layer < num_layers ? name : "embeddings, head, optimizer");
        for (int op = 0; op < NUM_OPS; op++) {
            const Cell *cell = &cells[layer * NUM_OPS + op];
            if (cell->calls > 0) json_write_double(writer, NAMES[op], cell->seconds / (double)steps);
        }
        json_end_object(writer);
    }
    json_end_object(writer);
}
