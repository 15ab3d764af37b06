/*
The logger: every event's line to the letter, a new and a resumed log, a disk that is full, and the
console as a file and as a (pseudo-)terminal sees it.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "llmc/run/logger.h"
#include "llmc/run/quant_stats.h"
#include "files.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <poll.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

static char log_path[64];

static const TrainEvent TRAIN = {.step = 12,
                                 .total_steps = 1000,
                                 .tokens = 49152,
                                 .loss = 5.125,
                                 .grad_norm = 1.25,
                                 .learning_rate = 1e-3,
                                 .tokens_per_second = 12345.5,
                                 .seconds = 3.25,
                                 .gemm_fraction = 0.447,
                                 .seconds_left = 3200.4};

#define TRAIN_LINE                                                                                \
    "{\"event\":\"train\",\"step\":12,\"loss\":5.125,\"grad_norm\":1.25,\"learning_rate\":0.001," \
    "\"tokens_per_second\":12345.5,\"seconds\":3.25,\"tokens\":49152}\n"

static char *console_text;
static size_t console_bytes;

// Opens the log with a console that is a text in memory, and no terminal.
static void open_logger(Logger *logger, bool resumed) {
    Error error;
    if (!logger_open(logger, directory, resumed, &error)) fail_msg("%s", error.message);
    logger->console = open_memstream(&console_text, &console_bytes);
    logger->in_place = false;
}

// Closes it; the console's text stays in console_text, to be freed.
static void close_logger(Logger *logger) {
    FILE *console = logger->console;
    logger_close(logger);
    fclose(console);
}

static void assert_log(const char *expected) {
    Error error;
    size_t bytes;
    char *text = read_file(log_path, 1 << 20, &bytes, &error);
    assert_non_null(text);
    assert_string_equal(text, expected);
    free(text);
}

static void write_log(const char *text) {
    FILE *file = fopen(log_path, "wb");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int remove_log(void **state) {
    (void)state;
    unlink(log_path);
    return 0;
}

static void test_events(void **state) {
    (void)state;
    Logger logger;
    open_logger(&logger, false);
    assert_int_equal(logger_position(&logger), 0);
    JsonWriter *writer = logger_begin_event(&logger, "config", 0);
    json_write_int64(writer, "layers", 12);
    logger_end_event(&logger);
    logger_train(&logger, &TRAIN);
    TrainEvent bad = TRAIN;
    bad.loss = -NAN; // printed without its sign
    bad.grad_norm = INFINITY;
    bad.skipped = "the loss is not finite";
    bad.gemm_fraction = bad.seconds_left = NAN;
    bad.total_steps = 0;
    logger_train(&logger, &bad);
    logger_val(&logger, 12, 5.5, 0.5);
    logger_val(&logger, 12, -INFINITY, 0.5);
    QuantStats stats = {.amax = 6.5, .signal = 1, .elements = 8, .at_max = 2, .flushed = 1};
    stats.blocks = 4;
    stats.blocks_unlike_rceil = 1;
    stats.scales[23] = 1; // 2^-10 and 2^-9: from 2^-56 on, two to a bin
    stats.scales[24] = 3;
    QuantEvent quant = {.step = 100, .layer = 3, .linear = "qkv", .operand = "fprop-x"};
    quant_stats_log_tensor(&stats, quant, FORMAT_E4M3, SCALING_MX, SCALE_RCEIL, &logger);
    logger_sample(&logger, 12, "To be\x1b\"\n\xff?", 10);
    logger_checkpoint(&logger, 100, "out/step_000100", 0.75);
    logger_gemms(&logger, 1000, (GemmCounts){0});
    logger_gemms(&logger, 1000, (GemmCounts){.native = 720, .emulated = 24});
    logger_gemms(&logger, 1000, (GemmCounts){.emulated = 1});
    logger_finish(&logger, 1000, "max-steps", NAN, 3725);
    logger_finish(&logger, 1000, "max-steps", 4.5, 372512.25);
    assert_false(logger.failed);
    int64_t position = logger_position(&logger);
    close_logger(&logger);
    const char *expected =
        "{\"event\":\"config\",\"step\":0,\"layers\":12}\n" TRAIN_LINE
        "{\"event\":\"train\",\"step\":12,\"loss\":null,\"grad_norm\":null,\"finite\":false,\"learning_rate\":0.001,"
        "\"tokens_per_second\":12345.5,\"seconds\":3.25,\"tokens\":49152,\"skipped\":\"the loss is not finite\"}\n"
        "{\"event\":\"val\",\"step\":12,\"loss\":5.5,\"seconds\":0.5}\n"
        "{\"event\":\"val\",\"step\":12,\"loss\":null,\"finite\":false,\"seconds\":0.5}\n"
        "{\"event\":\"quant\",\"step\":100,\"layer\":3,\"linear\":\"qkv\",\"operand\":\"fprop-x\",\"format\":\"e4m3\","
        "\"scale_rounding\":\"rceil\",\"amax\":6.5,\"clamped\":0,\"at_max\":0.25,\"flushed\":0.125,\"sqnr_db\":null,"
        "\"unlike_rceil\":0.25,\"scale_exponents\":[[-10,0.25],[-8,0.75]]}\n"
        "{\"event\":\"sample\",\"step\":12,\"text\":\"To be\\u001b\\\"\\n\\ufffd?\"}\n"
        "{\"event\":\"checkpoint\",\"step\":100,\"path\":\"out/step_000100\",\"seconds\":0.75}\n"
        "{\"event\":\"gemms\",\"step\":1000,\"native\":720,\"emulated\":24}\n"
        "{\"event\":\"gemms\",\"step\":1000,\"native\":0,\"emulated\":1}\n"
        "{\"event\":\"end\",\"step\":1000,\"reason\":\"max-steps\",\"best_val_loss\":null,\"seconds\":3725}\n"
        "{\"event\":\"end\",\"step\":1000,\"reason\":\"max-steps\",\"best_val_loss\":4.5,\"seconds\":372512.25}\n";
    assert_log(expected);
    assert_int_equal(position, strlen(expected));
    assert_string_equal(console_text,
                        "step   12/1000  loss 5.1250  norm 1.250  lr 1.00e-03  12.3k tok/s  45% GEMM  53m20s left\n"
                        "step 12  loss nan  norm inf  lr 1.00e-03  12.3k tok/s\n"
                        "step 12 is skipped: the loss is not finite\n"
                        "step 12: validation loss 5.5000 (0.5 s)\n"
                        "step 12: validation loss -inf (0.5 s)\n"
                        "step 12: sample\nTo be\\x1B\"\n\\xFF?\n"
                        "step 100: checkpoint in out/step_000100 (0.8 s)\n"
                        "GEMMs of two quantized operands: 720 natively, 24 emulated in BF16\n"
                        "GEMMs of two quantized operands: 0 natively, 1 emulated in BF16\n"
                        "step 1000: end (max-steps) after 1h02m\n"
                        "step 1000: end (max-steps) after 4d07h; best validation loss 4.5000\n");
    free(console_text);
}

static void test_no_overwriting(void **state) {
    (void)state;
    Logger logger;
    Error error;
    char expected[256];
    write_log("{}\n");
    assert_false(logger_open(&logger, directory, false, &error));
    snprintf(expected, sizeof(expected),
             "'%s' holds a run already: go on with it by --resume, or choose another --out-dir for a new one",
             directory);
    assert_string_equal(error.message, expected);
    assert_log("{}\n");
    // A run that died before its first line leaves nothing to lose.
    write_log("");
    open_logger(&logger, false);
    close_logger(&logger);
    free(console_text);
}

static void test_one_writer(void **state) {
    (void)state;
    Logger first, second;
    Error error;
    open_logger(&first, false);
    logger_train(&first, &TRAIN);
    assert_false(logger_open(&second, directory, true, &error));
    assert_non_null(strstr(error.message, "another run is writing"));
    close_logger(&first);
    free(console_text);
    assert_log(TRAIN_LINE);
    open_logger(&second, true);
    assert_true(logger_cut(&second, 0, &error));
    close_logger(&second);
    free(console_text);
}

// The log as a stop may leave it, the position of the checkpoint, and what is left after a resume.
static void test_resume(void **state) {
    (void)state;
    const struct {
        const char *log;
        int64_t bytes;
        const char *kept;
    } cases[] = {
        {"{1}\n{2}\n", 8, "{1}\n{2}\n"},        // nothing after the checkpoint
        {"{1}\n{2}\n{3}\n{4", 8, "{1}\n{2}\n"}, // steps after it, the last line cut short
        {"{1}\n{2", 8, "{1}\n"},                // lines lost in a power failure
        {"{1}\n{2}\n", 6, "{1}\n"},             // not the log of that checkpoint: still whole lines
        {"{1", 4, ""},
        {"", 8, ""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Logger logger;
        Error error;
        char expected[512];
        write_log(cases[i].log);
        open_logger(&logger, true);
        assert_true(logger_cut(&logger, cases[i].bytes, &error));
        assert_int_equal(logger_position(&logger), strlen(cases[i].kept));
        logger_train(&logger, &TRAIN);
        snprintf(expected, sizeof(expected), "%s%s", cases[i].kept, TRAIN_LINE);
        assert_int_equal(logger_position(&logger), strlen(expected));
        close_logger(&logger);
        free(console_text);
        assert_log(expected);
    }
}

// A run whose log is removed keeps its directory. Where another file is in the log's place it goes
// on, unless the directory is another one.
static void test_moved_log(void **state) {
    (void)state;
    Logger logger, second;
    Error error;
    open_logger(&logger, false);
    assert_false(logger_is_displaced(&logger, &error));
    assert_int_equal(unlink(log_path), 0);
    assert_false(logger_open(&second, directory, false, &error));
    assert_non_null(strstr(error.message, "another run is writing"));
    assert_int_equal(access(log_path, F_OK), -1);
    assert_false(logger_is_displaced(&logger, &error));
    write_log("{1}\n");
    assert_false(logger_is_displaced(&logger, &error));
    char moved[] = "/tmp/test_logger.moved.XXXXXX";
    assert_non_null(mkdtemp(moved));
    assert_int_equal(rename(directory, moved), 0);
    assert_false(logger_is_displaced(&logger, &error)); // nothing is there
    assert_int_equal(mkdir(directory, 0700), 0);
    write_log("{1}\n");
    assert_true(logger_is_displaced(&logger, &error));
    assert_non_null(strstr(error.message, "is in another directory by now"));
    assert_true(remove_tree(moved));
    close_logger(&logger);
    assert_non_null(strstr(console_text, "was removed or replaced"));
    free(console_text);
}

// Lets stderr go to a file, which is returned, until assert_stderr().
static int usual_stderr;
static FILE *begin_stderr(void) {
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stderr);
    usual_stderr = dup(STDERR_FILENO);
    assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
    return file;
}

// Asserts that stderr got one line since, with this end.
static void assert_stderr(FILE *file, const char *end) {
    char text[512] = "";
    fflush(stderr);
    assert_true(dup2(usual_stderr, STDERR_FILENO) >= 0);
    close(usual_stderr);
    rewind(file);
    size_t bytes = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    assert_true(bytes > strlen(end));
    assert_string_equal(text + bytes - strlen(end), end);
    assert_ptr_equal(strchr(text, '\n'), text + bytes - 1);
}

// A file that can't grow past 250 bytes: one line fits, of the next a part, which is taken back.
static void test_full_disk(void **state) {
    (void)state;
    Logger logger;
    struct rlimit before, limited;
    open_logger(&logger, false);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    limited = before;
    limited.rlim_cur = 250;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limited), 0);
    logger_train(&logger, &TRAIN);
    bool first_failed = logger.failed;
    FILE *complaint = begin_stderr();
    logger_train(&logger, &TRAIN);
    logger_train(&logger, &TRAIN); // is said once
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_false(first_failed);
    assert_true(logger.failed);
    assert_stderr(complaint, "log.jsonl': File too large; check the free space and the disk\n");
    assert_log(TRAIN_LINE);
    logger_train(&logger, &TRAIN); // there is space again
    assert_log(TRAIN_LINE TRAIN_LINE);
    close_logger(&logger);
    free(console_text);
    unlink(log_path);
    assert_int_equal(symlink("/dev/full", log_path), 0);
    open_logger(&logger, false);
    complaint = begin_stderr();
    logger_train(&logger, &TRAIN);
    assert_true(logger.failed);
    assert_stderr(complaint, "log.jsonl': No space left on device; check the free space and the disk\n");
    assert_int_equal(logger_position(&logger), 0);
    close_logger(&logger);
    free(console_text);
}

static void test_bad_directory(void **state) {
    (void)state;
    Logger logger;
    Error error;
    char path[128];
    write_log("a file");
    snprintf(path, sizeof(path), "%s/sub", log_path);
    assert_false(logger_open(&logger, path, false, &error));
    assert_non_null(strstr(error.message, "log.jsonl"));
    assert_int_equal(unlink(log_path), 0);
    snprintf(path, sizeof(path), "%s/new/deep", directory);
    if (!logger_open(&logger, path, false, &error)) fail_msg("%s", error.message);
    logger_close(&logger);
    strcat(path, "/log.jsonl");
    assert_true(path_exists(path));
}

// What a terminal got, which may come in several pieces; until nothing has come for a fifth of a
// second.
static void read_terminal(int master, char *output, size_t capacity) {
    size_t used = 0;
    struct pollfd ready = {.fd = master, .events = POLLIN};
    while (used + 1 < capacity && poll(&ready, 1, 200) == 1) {
        ssize_t bytes = read(master, output + used, capacity - 1 - used);
        if (bytes <= 0) break;
        used += (size_t)bytes;
    }
    output[used] = 0;
}

// Opens the log with a terminal of that width as its console. Returns the terminal's other side; -1
// in a container without /dev/pts.
static int open_terminal(Logger *logger, int columns) {
    Error error;
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0) return -1;
    assert_true(grantpt(master) == 0 && unlockpt(master) == 0);
    struct winsize size = {.ws_row = 10, .ws_col = (unsigned short)columns};
    if (!logger_open(logger, directory, false, &error)) fail_msg("%s", error.message);
    logger->console = fopen(ptsname(master), "w");
    assert_non_null(logger->console);
    assert_int_equal(ioctl(master, TIOCSWINSZ, &size), 0);
    logger->in_place = true;
    return master;
}

static void close_terminal(Logger *logger, int master, char *output, size_t capacity) {
    FILE *terminal = logger->console;
    logger_close(logger);
    read_terminal(master, output, capacity);
    fclose(terminal);
    close(master);
}

// On a terminal the line is written over and comes back under a message; when the run ends, it
// stays where it is, and doesn't show again between what is printed then.
static void test_terminal(void **state) {
    (void)state;
    Logger logger;
    char output[2048];
    int master = open_terminal(&logger, 100);
    if (master < 0) skip();
    TrainEvent next = TRAIN;
    next.step = 13;
    logger_train(&logger, &TRAIN);
    logger_val(&logger, 12, 5.5, 0.5);
    logger_train(&logger, &next);
    logger_end_line(&logger);
    logger_val(&logger, 14, 5.25, 0.5);
    logger_finish(&logger, 14, "stop", NAN, 5);
    close_terminal(&logger, master, output, sizeof(output));
#define REST "/1000  loss 5.1250  norm 1.250  lr 1.00e-03  12.3k tok/s  45% GEMM  53m20s left"
    assert_string_equal(output, "\rstep   12" REST "\033[K\r\033[Kstep 12: validation loss 5.5000 (0.5 s)\r\n"
                                "\rstep   12" REST "\033[K\rstep   13" REST "\033[K\r\n"
                                "\r\033[Kstep 14: validation loss 5.2500 (0.5 s)\r\n\r\033[K"
                                "\r\033[Kstep 14: end (stop) after 5s\r\n\r\033[K");
}

// A narrow terminal goes without what matters least; the time that is left always shows, whole.
static void test_narrow_terminal(void **state) {
    (void)state;
    const struct {
        int columns;
        const char *line;
    } cases[] = {{80, "step   12/1000  loss 5.1250  norm 1.250  12.3k tok/s  45% GEMM  53m20s left"},
                 {60, "step   12/1000  loss 5.1250  12.3k tok/s  53m20s left"},
                 {42, "step   12/1000  loss 5.1250  53m20s left"},
                 {20, "step   12/1000"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Logger logger;
        char output[1024], shown[256];
        int master = open_terminal(&logger, cases[i].columns);
        if (master < 0) skip();
        logger_train(&logger, &TRAIN);
        close_terminal(&logger, master, output, sizeof(output));
        snprintf(shown, sizeof(shown), "\r%s\033[K\r\n", cases[i].line);
        assert_true((int)strlen(cases[i].line) < cases[i].columns);
        assert_string_equal(output, shown);
        assert_int_equal(unlink(log_path), 0);
    }
}

// Returns how many lines of 1000 steps a console that is no terminal gets: of the first, the last,
// and the multiples of `every`, or of what gives LINES_A_RUN where it is 0.
static int count_lines(int64_t every) {
    Logger logger;
    open_logger(&logger, false);
    logger.every = every;
    for (int64_t step = 0; step < 1000; step++) {
        TrainEvent event = TRAIN;
        event.step = step;
        logger_train(&logger, &event);
    }
    close_logger(&logger);
    assert_true(strncmp(console_text, "step    0/1000", 14) == 0 && strstr(console_text, "step  999/1000"));
    int lines = 0, spread = every ? (int)every : 1000 / LINES_A_RUN;
    for (const char *line = console_text; *line; line = strchr(line, '\n') + 1) {
        int step = atoi(line + strlen("step"));
        assert_true(step % spread == 0 || step == 999);
        lines++;
    }
    free(console_text);
    assert_int_equal(unlink(log_path), 0);
    return lines;
}

static void test_lines_without_a_terminal(void **state) {
    (void)state;
    assert_int_equal(count_lines(0), LINES_A_RUN + 1);
    assert_int_equal(count_lines(1), 1000);
    assert_int_equal(count_lines(300), 5); // 0, 300, 600, 900, 999
}

static int make_directory_and_path(void **state) {
    if (make_directory(state) != 0) return -1;
    snprintf(log_path, sizeof(log_path), "%s/log.jsonl", directory);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_events, remove_log),
        cmocka_unit_test_teardown(test_no_overwriting, remove_log),
        cmocka_unit_test_teardown(test_one_writer, remove_log),
        cmocka_unit_test_teardown(test_resume, remove_log),
        cmocka_unit_test_teardown(test_moved_log, remove_log),
        cmocka_unit_test_teardown(test_full_disk, remove_log),
        cmocka_unit_test_teardown(test_bad_directory, remove_log),
        cmocka_unit_test_teardown(test_terminal, remove_log),
        cmocka_unit_test(test_narrow_terminal),
        cmocka_unit_test(test_lines_without_a_terminal),
    };
    return cmocka_run_group_tests(tests, make_directory_and_path, remove_directory);
}
