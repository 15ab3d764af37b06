#include "profile.h"
#include "llmc/base/util.h" // allocate, die, seconds_now

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LINES = 64 };

typedef struct {
    double seconds;
    int64_t calls;
} Cell;

static const Backend *timed;
static int64_t num_layers, layer_now = -1;
static bool counting;
static const char *lines[MAX_LINES]; // names of operations, or of one use of them, in the order of their first calls
static int num_lines;
static Cell *cells; // (num_layers + 1, MAX_LINES); the last row: of no block

static Cell *cell_at(int64_t layer, int line) { return &cells[(layer < 0 ? num_layers : layer) * MAX_LINES + line]; }

// Returns the index of the line of that name, which is a new one at its first call.
static int line_of(const char *name) {
    for (int line = 0; line < num_lines; line++) {
        if (strcmp(lines[line], name) == 0) return line;
    }
    if (num_lines == MAX_LINES) die("internal error: a profile of more than %d lines", MAX_LINES);
    lines[num_lines] = name;
    return num_lines++;
}

typedef struct {
    const char *line;
    double start;
} Clock;

static Clock start_clock(const char *line) { return (Clock){line, seconds_now()}; }

// Waits for the operation to end and adds its time to the clock's line.
static void stop_clock(const Clock *clock) {
    timed->synchronize();
    double seconds = seconds_now() - clock->start;
    if (!counting) return;
    Cell *cell = cell_at(layer_now, line_of(clock->line));
    cell->seconds += seconds;
    cell->calls++;
}

// Times the rest of the function that it stands in: as that returns, the compiler calls stop_clock.
#define CLOCK(line) __attribute__((cleanup(stop_clock), unused)) const Clock clock = start_clock(line)

// Defines timed_NAME for each operation: NAME of `timed`, under a clock.
#define OPERATION(result, name, parameters, arguments) \
    static result timed_##name parameters {            \
        CLOCK(#name);                                  \
        return timed->name arguments;                  \
    }
#define QUERY(result, name, parameters)
#include "llmc/operations.h"

// Three operations have a line for each of their uses.

static void gemm_by_pass(Tensor d, Operand a, Operand b, GemmOptions options) {
    CLOCK(options.transpose_a ? "gemm wgrad" : options.transpose_b ? "gemm fprop" : "gemm dgrad");
    timed->gemm(d, a, b, options);
}

static void quantize_by_source(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                               ScaleRounding rounding) {
    static const char *const LINES[] = {[SOURCE_TENSOR] = "quantize",
                                        [SOURCE_LAYERNORM] = "quantize layernorm",
                                        [SOURCE_ACTIVATION] = "quantize activation",
                                        [SOURCE_ACTIVATION_BACKWARD] = "quantize activation_backward"};
    CLOCK(LINES[in.kind]);
    timed->quantize(rowwise, columnwise, in, rounding);
}

static void adamw_by_copies(AdamWUpdate update) {
    CLOCK(update.rowwise.elements || update.columnwise.elements ? "quantize adamw" : "adamw");
    timed->adamw(update);
}

const Backend *profile_backend(const Backend *backend, int64_t layers) {
    static Backend table;
    timed = backend;
    num_layers = layers;
    num_lines = 0;
    free(cells);
    cells = allocate((size_t)((layers + 1) * MAX_LINES) * sizeof(*cells));
    table = *backend;
#define OPERATION(result, name, parameters, arguments) table.name = timed_##name;
#define QUERY(result, name, parameters)
#include "llmc/operations.h"
    table.gemm = gemm_by_pass;
    table.quantize = quantize_by_source;
    table.adamw = adamw_by_copies;
    return &table;
}

void profile_set_layer(int64_t layer) { layer_now = layer; }

void profile_count(bool now) { counting = now; }

static Cell sum_of_line(int line) {
    Cell sum = {0};
    for (int64_t layer = 0; layer <= num_layers; layer++) {
        sum.seconds += cell_at(layer, line)->seconds;
        sum.calls += cell_at(layer, line)->calls;
    }
    return sum;
}

static double seconds_of_layer(int64_t layer) {
    double sum = 0;
    for (int line = 0; line < num_lines; line++) {
        sum += cell_at(layer, line)->seconds;
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
    for (int line = 0; line < num_lines; line++) {
        Cell sum = sum_of_line(line);
        rest -= sum.seconds;
        if (sum.calls > 0) print_line(lines[line], sum.seconds, seconds, sum.calls, steps);
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
    for (int line = 0; line < num_lines; line++) {
        Cell sum = sum_of_line(line);
        if (sum.calls > 0) json_write_double(writer, lines[line], sum.seconds / (double)steps);
    }
    json_end_object(writer);
    json_begin_object(writer, "layers");
    for (int64_t layer = 0; layer <= num_layers; layer++) {
        char name[32];
        snprintf(name, sizeof(name), "block %" PRId64, layer);
        json_begin_object(writer, layer < num_layers ? name : "embeddings, head, optimizer");
        for (int line = 0; line < num_lines; line++) {
            const Cell *cell = cell_at(layer, line);
            if (cell->calls > 0) json_write_double(writer, lines[line], cell->seconds / (double)steps);
        }
        json_end_object(writer);
    }
    json_end_object(writer);
}
