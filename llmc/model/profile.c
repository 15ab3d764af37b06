#include "profile.h"
#include "work.h"
#include "llmc/base/util.h" // allocate, die

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LINES = 64 };

typedef ProfileCell Cell;

static const Backend *timed;
static int64_t num_layers, layer_now = -1;
static bool is_muon_now;
static int64_t times;                // that an operation is counted
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
    Work work;
    double start;
} Clock;

static Clock start_clock(const char *line, Work work) { return (Clock){line, work, timed->now()}; }

static void add_cell(Cell *sum, Cell cell) {
    sum->seconds += cell.seconds;
    sum->calls += cell.calls;
    sum->read += cell.read;
    sum->written += cell.written;
}

// Waits for the operation to end and adds its time and bytes to the clock's line.
static void stop_clock(const Clock *clock) {
    timed->synchronize();
    double seconds = timed->now() - clock->start;
    if (times == 0) return;
    double n = (double)times;
    Cell cell = {n * seconds, times, n * clock->work.read, n * clock->work.written};
    add_cell(cell_at(layer_now, line_of(clock->line)), cell);
}

// Times the rest of the function that it stands in: as that returns, the compiler calls stop_clock.
#define CLOCK(line, work) __attribute__((cleanup(stop_clock), unused)) const Clock clock = start_clock(line, work)

// Defines timed_NAME for each operation: NAME of `timed`, under a clock.
#define OPERATION(result, name, parameters, arguments) \
    static result timed_##name parameters {            \
        CLOCK(#name, work_##name arguments);           \
        return timed->name arguments;                  \
    }
#define QUERY(result, name, parameters)
#include "llmc/operations.h"

// Three operations have a line for each of their uses.

static void gemm_by_pass(Tensor d, Operand a, Operand b, GemmOptions options) {
    Work work = work_gemm(d, a, b, options);
    if (timed->gemm_decodes(d, a, b, options)) work = work_add(work, work_of_decoding(a, b));
    const char *pass = options.transpose_a ? "gemm wgrad" : options.transpose_b ? "gemm fprop" : "gemm dgrad";
    CLOCK(is_muon_now ? "gemm muon" : pass, work);
    timed->gemm(d, a, b, options);
}

static void quantize_by_source(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                               ScaleRounding rounding) {
    static const char *const LINES[] = {[SOURCE_TENSOR] = "quantize",
                                        [SOURCE_LAYERNORM] = "quantize layernorm",
                                        [SOURCE_ACTIVATION] = "quantize activation",
                                        [SOURCE_ACTIVATION_BACKWARD] = "quantize activation_backward"};
    CLOCK(LINES[in.kind], work_quantize(rowwise, columnwise, in, rounding));
    timed->quantize(rowwise, columnwise, in, rounding);
}

static void adamw_by_copies(AdamWUpdate update) {
    CLOCK(update.rowwise.elements || update.columnwise.elements ? "quantize adamw" : "adamw", work_adamw(update));
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

int64_t profile_layer(void) { return layer_now; }

void profile_set_muon(bool is_muon) { is_muon_now = is_muon; }

void profile_count(int64_t count) { times = count; }

static Cell sum_of_line(int line) {
    Cell sum = {0};
    for (int64_t layer = 0; layer <= num_layers; layer++) {
        add_cell(&sum, *cell_at(layer, line));
    }
    return sum;
}

static Cell sum_of_layer(int64_t layer) {
    Cell sum = {0};
    for (int line = 0; line < num_lines; line++) {
        add_cell(&sum, *cell_at(layer, line));
    }
    return sum;
}

ProfileCell profile_line(const char *name) { return sum_of_line(line_of(name)); }

static void print_line(const char *name, Cell cell, double all, int64_t steps) {
    double n = (double)steps;
    printf("%-34s %9.2f %7.1f", name, 1e3 * cell.seconds / n, 100 * cell.seconds / all);
    if (cell.read + cell.written > 0) {
        printf(" %11.1f %11.1f %8.1f", cell.read / n / 1e6, cell.written / n / 1e6,
               (cell.read + cell.written) / cell.seconds / 1e9);
    }
    if (cell.calls > 0) printf(" %9.1f %11.3f", (double)cell.calls / n, 1e3 * cell.seconds / (double)cell.calls);
    printf("\n");
}

static void print_head(const char *what, const char *more) {
    printf("%-34s %9s %7s %11s %11s %8s%s\n", what, "ms/step", "%", "MB read", "MB written", "GB/s", more);
}

// Prints the lines of operations, and returns their sum.
static Cell print_lines(int64_t steps, double seconds) {
    Cell all = {0};
    print_head("operation", "     calls     ms/call");
    for (int line = 0; line < num_lines; line++) {
        Cell sum = sum_of_line(line);
        add_cell(&all, sum);
        if (sum.calls > 0) print_line(lines[line], sum, seconds, steps);
    }
    all.calls = 0;
    return all;
}

void profile_print_operations(int64_t steps) {
    double seconds = 0;
    for (int line = 0; line < num_lines; line++) {
        seconds += sum_of_line(line).seconds;
    }
    Cell all = print_lines(steps, seconds);
    print_line("all operations", all, seconds, steps);
}

void profile_print(int64_t steps, double seconds) {
    Cell all = print_lines(steps, seconds);
    print_line("between operations", (Cell){.seconds = seconds - all.seconds}, seconds, steps);
    all.seconds = seconds;
    print_line("a step", all, seconds, steps);
    printf("\n");
    print_head("layer", "");
    for (int64_t layer = 0; layer <= num_layers; layer++) {
        char name[32];
        Cell sum = sum_of_layer(layer);
        sum.calls = 0;
        snprintf(name, sizeof(name), "block %" PRId64, layer);
        print_line(layer < num_layers ? name : "embeddings, head, optimizer", sum, seconds, steps);
    }
}

// Writes each line's seconds or bytes a step, which stand at `offset` in its cell.
static void write_lines(JsonWriter *writer, const char *name, size_t offset, int64_t steps) {
    json_begin_object(writer, name);
    for (int line = 0; line < num_lines; line++) {
        Cell sum = sum_of_line(line);
        double of_all = *(const double *)((const char *)&sum + offset);
        if (sum.calls > 0) json_write_double(writer, lines[line], of_all / (double)steps);
    }
    json_end_object(writer);
}

void profile_write(JsonWriter *writer, int64_t steps, double seconds) {
    json_write_double(writer, "seconds", seconds / (double)steps);
    write_lines(writer, "operations", offsetof(Cell, seconds), steps);
    write_lines(writer, "read", offsetof(Cell, read), steps);
    write_lines(writer, "written", offsetof(Cell, written), steps);
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
