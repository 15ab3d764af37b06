#include "logger.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include "llmc/data/tokenizer.h" // token_print_safe

#define CLOSED ((Logger){.file = -1, .directory = -1, .console = stdout})

// The log

// Returns whether another process holds the file. Not every file system has locks.
static bool is_taken(int file) { return flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; }

static bool open_log(Logger *logger, const char *out_dir, bool resumed, Error *error) {
    // The directory's lock outlives a log that is removed. The log's is for network file systems,
    // some of which lock only what can be written.
    logger->directory = open(out_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool taken = logger->directory >= 0 && is_taken(logger->directory);
    if (!taken) logger->file = open(logger->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (!taken && logger->file < 0) {
        return error_set(error, "can't write '%s': %s; choose another --out-dir, or see to its permissions",
                         logger->path, strerror(errno));
    }
    if (taken || is_taken(logger->file)) {
        return error_set(error, "another run is writing '%s': wait for it, stop it, or choose another --out-dir",
                         logger->path);
    }
    struct stat status;
    if (fstat(logger->file, &status) != 0) {
        return error_set(error, "can't read '%s': %s", logger->path, strerror(errno));
    }
    if (S_ISFIFO(status.st_mode)) {
        return error_set(error, "'%s' is a pipe: remove it, or choose another --out-dir", logger->path);
    }
    if (!resumed && status.st_size > 0) {
        return error_set(
            error, "'%s' holds a run already: go on with it by --resume, or choose another --out-dir for a new one",
            out_dir);
    }
    return true;
}

bool logger_open(Logger *logger, const char *out_dir, bool resumed, Error *error) {
    const char *terminal = getenv("TERM");
    *logger = CLOSED;
    logger->in_place = isatty(STDOUT_FILENO) && terminal && strcmp(terminal, "dumb") != 0;
    if (!make_directories(out_dir, error)) return false;
    logger->path = format_string("%s/log.jsonl", out_dir);
    if (open_log(logger, out_dir, resumed, error)) return true;
    logger_close(logger);
    return false;
}

bool logger_open_nowhere(Logger *logger, Error *error) {
    *logger = CLOSED;
    logger->path = format_string("/dev/null");
    logger->file = open(logger->path, O_WRONLY | O_CLOEXEC);
    return logger->file >= 0 || error_set(error, "can't open '%s': %s", logger->path, strerror(errno));
}

bool logger_cut(Logger *logger, int64_t position, Error *error) {
    int64_t bytes = logger_position(logger), keep = min_int64(bytes, position);
    for (char last = 0; keep > 0; keep--) {
        if (pread(logger->file, &last, 1, keep - 1) != 1) {
            return error_set(error, "can't read '%s': %s", logger->path, strerror(errno));
        }
        if (last == '\n') break;
    }
    if (ftruncate(logger->file, keep) != 0) {
        return error_set(error, "can't cut '%s' to %ld bytes: %s", logger->path, keep, strerror(errno));
    }
    if (keep < position) {
        logger_message(logger, "'%s' has lost lines since the checkpoint: %ld of %ld bytes are there", logger->path,
                       keep, position);
    }
    return true;
}

int64_t logger_position(const Logger *logger) {
    struct stat status;
    return fstat(logger->file, &status) == 0 ? status.st_size : -1;
}

static bool is_same_file(int file, const char *path) {
    struct stat ours, there;
    return fstat(file, &ours) == 0 && stat(path, &there) == 0 && ours.st_dev == there.st_dev &&
           ours.st_ino == there.st_ino;
}

bool logger_is_displaced(Logger *logger, Error *error) {
    if (is_same_file(logger->file, logger->path)) return false;
    char *directory = format_string("%.*s", (int)(strrchr(logger->path, '/') - logger->path), logger->path);
    bool moved = logger->directory >= 0 && !is_same_file(logger->directory, directory);
    free(directory);
    if (moved && path_exists(logger->path)) {
        error_set(error,
                  "'%s' is in another directory by now, and this run's weights can't be saved there: give each run an "
                  "--out-dir of its own, and move none while it is written",
                  logger->path);
        return true;
    }
    logger_message(logger, "'%s' was removed or replaced: what the run logs is lost", logger->path);
    return false;
}

JsonWriter *logger_begin_event(Logger *logger, const char *event, int64_t step) {
    json_begin_object(&logger->writer, NULL);
    json_write_string(&logger->writer, "event", event);
    json_write_int64(&logger->writer, "step", step);
    return &logger->writer;
}

// Appends the text and a line end, in one call where the disk takes it: who reads along sees whole
// lines. Returns the bytes written; where they are fewer, errno says why.
static size_t write_line(int file, const char *text, size_t length) {
    size_t done = 0;
    while (done <= length) {
        struct iovec rest[] = {{(char *)text + done, length - done}, {"\n", 1}};
        ssize_t written = writev(file, rest, 2);
        if (written < 0 && errno != EINTR) break;
        if (written > 0) done += (size_t)written;
    }
    return done;
}

void logger_end_event(Logger *logger) {
    Error error;
    JsonWriter *writer = &logger->writer;
    json_end_object(writer);
    int64_t position = logger_position(logger);
    size_t bytes = writer->length + 1, written = write_line(logger->file, writer->text, writer->length);
    int failure = errno;
    json_writer_free(writer);
    *writer = (JsonWriter){0};
    if (written == bytes) return;
    error_set(&error, "can't write '%s': %s; check the free space and the disk", logger->path, strerror(failure));
    if (written > 0 && (position < 0 || ftruncate(logger->file, position) != 0)) {
        error_set(&error, "%s (its last line is cut short)", error.message);
    }
    logger_fail(logger, &error);
}

void logger_fail(Logger *logger, const Error *why) {
    if (logger->failed) return;
    logger->failed = true;
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, why->message);
}

// The console

// Returns the columns that a line may take. The last one stays free: a character in it would make
// some terminals wrap, and be erased by others.
static int console_columns(const Logger *logger) {
    struct winsize size = {0};
    if (!logger->in_place) return CONSOLE_LINE_BYTES - 1;
    return ioctl(fileno(logger->console), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col - 1 : 79;
}

// Writes the open line over the one before.
static void draw_line(Logger *logger) {
    fprintf(logger->console, "\r%.*s\033[K", console_columns(logger), logger->console_line);
}

// Make room for a message, which is printed between these two, above the open line.
static void begin_message(Logger *logger) {
    if (logger->in_place) fputs("\r\033[K", logger->console);
}

static void end_message(Logger *logger) {
    fputc('\n', logger->console);
    if (logger->in_place) draw_line(logger);
    fflush(logger->console);
}

void logger_message(Logger *logger, const char *format, ...) {
    begin_message(logger);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(logger->console, format, arguments);
    va_end(arguments);
    end_message(logger);
}

void logger_end_line(Logger *logger) {
    if (logger->console_line[0]) fputc('\n', logger->console);
    logger->console_line[0] = 0;
}

void logger_close(Logger *logger) {
    logger_end_line(logger);
    fflush(logger->console);
    if (logger->file >= 0) close(logger->file);
    if (logger->directory >= 0) close(logger->directory);
    json_writer_free(&logger->writer);
    free(logger->path);
    *logger = CLOSED;
}

// Writes "45s", "3m20s", "2h05m" or "3d04h". `text` holds at least 32 bytes.
static const char *duration_text(char *text, double seconds) {
    long s = lround(seconds);
    if (s < 60) {
        snprintf(text, 32, "%lds", s);
    } else if (s < 3600) {
        snprintf(text, 32, "%ldm%02lds", s / 60, s % 60);
    } else if (s < 86400) {
        snprintf(text, 32, "%ldh%02ldm", s / 3600, s / 60 % 60);
    } else {
        snprintf(text, 32, "%ldd%02ldh", s / 86400, s / 3600 % 24);
    }
    return text;
}

// The parts of a step's line, from what a narrow terminal can spare least to what it can spare
// most.
enum { PART_STEP, PART_LEFT, PART_LOSS, PART_SPEED, PART_GEMM, PART_NORM, PART_RATE, NUM_PARTS };
static const int PART_ORDER[NUM_PARTS] = {PART_STEP, PART_LOSS, PART_NORM, PART_RATE, PART_SPEED, PART_GEMM, PART_LEFT};

static void print_parts(char parts[NUM_PARTS][64], const TrainEvent *e) {
    char text[32], total[32] = "";
    if (e->total_steps > 0) snprintf(total, sizeof(total), "%ld", e->total_steps);
    snprintf(parts[PART_STEP], 64, "step %*ld%s%s", (int)strlen(total), e->step, total[0] ? "/" : "", total);
    snprintf(parts[PART_LOSS], 64, "  loss %.4f", printable(e->loss));
    snprintf(parts[PART_NORM], 64, "  norm %.3f", printable(e->grad_norm));
    snprintf(parts[PART_RATE], 64, "  lr %.2e", e->learning_rate);
    snprintf(parts[PART_SPEED], 64, "  %s tok/s", human_count(text, e->tokens_per_second));
    if (isfinite(e->gemm_fraction)) snprintf(parts[PART_GEMM], 64, "  %.0f%% GEMM", 100 * e->gemm_fraction);
    if (isfinite(e->seconds_left)) {
        snprintf(parts[PART_LEFT], 64, "  %s left", duration_text(text, fmax(0, e->seconds_left)));
    }
}

// Writes the parts that fit into `columns`, in their order, to logger->console_line.
static void join_parts(Logger *logger, char parts[NUM_PARTS][64], int columns) {
    int last = 0, length = (int)strlen(parts[PART_STEP]);
    while (last + 1 < NUM_PARTS && length + (int)strlen(parts[last + 1]) <= columns) {
        length += (int)strlen(parts[++last]);
    }
    logger->console_line[0] = 0;
    for (int i = 0; i < NUM_PARTS; i++) {
        if (PART_ORDER[i] <= last) strcat(logger->console_line, parts[PART_ORDER[i]]);
    }
}

// Returns whether a console that is no terminal gets a line for this step: the first, the last, and
// some between.
static bool is_line_due(const Logger *logger, const TrainEvent *e) {
    int64_t spread = e->total_steps > 0 ? (e->total_steps + LINES_A_RUN - 1) / LINES_A_RUN : LINES_EVERY;
    int64_t every = logger->every ? logger->every : spread;
    return logger->lines == 0 || e->step % every == 0 || e->step + 1 == e->total_steps || e->skipped;
}

static void print_step(Logger *logger, const TrainEvent *e) {
    char parts[NUM_PARTS][64] = {{0}};
    if (!logger->in_place && !is_line_due(logger, e)) return;
    print_parts(parts, e);
    join_parts(logger, parts, console_columns(logger));
    logger->lines++;
    if (logger->in_place) {
        draw_line(logger);
    } else {
        fprintf(logger->console, "%s\n", logger->console_line);
        logger->console_line[0] = 0;
    }
    fflush(logger->console);
}

// Events

// Who reads the console finds in the log what it says.
void logger_train(Logger *logger, const TrainEvent *event) {
    JsonWriter *writer = logger_begin_event(logger, "train", event->step);
    json_write_double(writer, "loss", event->loss);
    json_write_double(writer, "grad_norm", event->grad_norm);
    if (!isfinite(event->loss) || !isfinite(event->grad_norm)) json_write_bool(writer, "finite", false);
    json_write_double(writer, "learning_rate", event->learning_rate);
    json_write_double(writer, "tokens_per_second", event->tokens_per_second);
    json_write_double(writer, "seconds", event->seconds);
    json_write_int64(writer, "tokens", event->tokens);
    if (event->bytes_sent > 0) json_write_int64(writer, "bytes_sent", event->bytes_sent);
    if (event->skipped) json_write_string(writer, "skipped", event->skipped);
    logger_end_event(logger);
    print_step(logger, event);
    if (event->skipped) logger_message(logger, "step %ld is skipped: %s", event->step, event->skipped);
}

void logger_val(Logger *logger, int64_t step, double loss, double seconds) {
    logger_message(logger, "step %ld: validation loss %.4f (%.1f s)", step, printable(loss), seconds);
    JsonWriter *writer = logger_begin_event(logger, "val", step);
    json_write_double(writer, "loss", loss);
    if (!isfinite(loss)) json_write_bool(writer, "finite", false);
    json_write_double(writer, "seconds", seconds);
    logger_end_event(logger);
}

void logger_sample(Logger *logger, int64_t step, const char *text, size_t bytes) {
    begin_message(logger);
    fprintf(logger->console, "step %ld: sample\n", step);
    token_print_safe(logger->console, text, bytes);
    end_message(logger);
    JsonWriter *writer = logger_begin_event(logger, "sample", step);
    json_write_text(writer, "text", text, bytes);
    logger_end_event(logger);
}

void logger_checkpoint(Logger *logger, int64_t step, const char *path, double seconds) {
    logger_message(logger, "step %ld: checkpoint in %s (%.1f s)", step, path, seconds);
    JsonWriter *writer = logger_begin_event(logger, "checkpoint", step);
    json_write_string(writer, "path", path);
    json_write_double(writer, "seconds", seconds);
    logger_end_event(logger);
}

void logger_gemms(Logger *logger, int64_t step, GemmCounts counts) {
    if (counts.native + counts.emulated == 0) return;
    logger_message(logger, "GEMMs of two quantized operands: %ld natively, %ld emulated in BF16", counts.native,
                   counts.emulated);
    JsonWriter *writer = logger_begin_event(logger, "gemms", step);
    json_write_int64(writer, "native", counts.native);
    json_write_int64(writer, "emulated", counts.emulated);
    logger_end_event(logger);
}

void logger_finish(Logger *logger, int64_t step, const char *reason, double best_val_loss, double seconds) {
    char text[32], best[64] = "";
    if (isfinite(best_val_loss)) snprintf(best, sizeof(best), "; best validation loss %.4f", best_val_loss);
    logger_end_line(logger);
    logger_message(logger, "step %ld: end (%s) after %s%s", step, reason, duration_text(text, seconds), best);
    JsonWriter *writer = logger_begin_event(logger, "end", step);
    json_write_string(writer, "reason", reason);
    json_write_double(writer, "best_val_loss", best_val_loss);
    json_write_double(writer, "seconds", seconds);
    logger_end_event(logger);
}
