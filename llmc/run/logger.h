/*
Logger: what a run tells. OUT_DIR/log.jsonl is for programs, one JSON object a line; the console is
for people, one line a step, which on a terminal is written over the line before.
*/
#pragma once

#include "llmc/backend.h"    // GemmCounts
#include "llmc/files/json.h" // JsonWriter
#include "llmc/base/util.h"  // Error

enum { CONSOLE_LINE_BYTES = 256, LINES_A_RUN = 100, LINES_EVERY = 10 };

typedef struct {
    char *path;          // OUT_DIR/log.jsonl
    int file, directory; // both locked
    JsonWriter writer;
    FILE *console;
    bool in_place; // the console is a terminal: a step's line stays open and is written over
    int64_t every; // where it isn't one, steps from one line to the next; 0: LINES_A_RUN lines in all
    int64_t lines; // of steps so far
    char console_line[CONSOLE_LINE_BYTES]; // the one that is open, or ""
    bool failed;                           // a sentence on stderr has said why the run can't go on
} Logger;

typedef struct {
    int64_t step;
    int64_t total_steps; // 0: not known
    int64_t tokens;      // seen since the start of training
    double loss;
    double grad_norm;
    double learning_rate;
    double tokens_per_second;
    double seconds;       // that the step took
    double gemm_fraction; // of the machine's measured GEMM speed; NaN: not known
    double seconds_left;  // NaN: not known
    int64_t bytes_sent;   // by this rank to others
    const char *skipped;  // why the step was not applied, or NULL
} TrainEvent;

// Opens OUT_DIR/log.jsonl, with OUT_DIR made where it is missing, and the console, which is stdout.
// The directory is this process's until logger_close(): a run that is resumed opens its log before
// it reads the checkpoint, which another run could be replacing. Errors: a new run where there is a
// log; a log that another process has open; a directory or file that can't be written.
bool logger_open(Logger *logger, const char *out_dir, bool resumed, Error *error);

// Opens a log that goes nowhere, for ranks other than the first.
bool logger_open_nowhere(Logger *logger, Error *error);

// Cuts a resumed run's log to the logger_position() that its checkpoint saved, or where it is
// shorter or not the same any more, to the last line end before: lines after it are of steps that
// will be run again. Errors: a log that can't be read or cut.
bool logger_cut(Logger *logger, int64_t position, Error *error);
void logger_close(Logger *logger);

// Returns the bytes in the log so far; -1 where they can't be told.
int64_t logger_position(const Logger *logger);

// Returns whether the log's path is a log in another directory by now, another run's, with a
// sentence that says so. Where the log was removed, or replaced in its directory, a message tells
// of it.
bool logger_is_displaced(Logger *logger, Error *error);

// Begin and end an event with fields of the caller's own, such as "config": write them with the
// JsonWriter between the two calls.
JsonWriter *logger_begin_event(Logger *logger, const char *event, int64_t step);
void logger_end_event(Logger *logger);

// Write one event each, in the log and on the console. A number that is not finite
// is null in the log; where it is a loss or a gradient norm, the line also has "finite": false.
// A log that can't be written to fails the run, and ends with the last whole line.
void logger_train(Logger *logger, const TrainEvent *event);
void logger_val(Logger *logger, int64_t step, double loss, double seconds);
void logger_sample(Logger *logger, int64_t step, const char *text, size_t bytes);
void logger_checkpoint(Logger *logger, int64_t step, const char *path, double seconds);
// Writes how many GEMMs were native; nothing where none was to be.
void logger_gemms(Logger *logger, int64_t step, GemmCounts counts);
// Writes the last event: `reason` as in "max-steps"; best_val_loss NaN where there was no
// validation.
void logger_finish(Logger *logger, int64_t step, const char *reason, double best_val_loss, double seconds);

// Says on stderr why the run fails, unless it has failed already.
void logger_fail(Logger *logger, const Error *why);

// Leaves the open line as it is, for good: what is printed later isn't about its step.
void logger_end_line(Logger *logger);

// Prints a line on the console alone, above the one that is open.
void logger_message(Logger *logger, const char *format, ...) PRINTF_LIKE(2, 3);
