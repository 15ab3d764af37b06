// llmc/base/util.h: errors, texts, files whole or not at all.

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "llmc/base/system.h"
#include "llmc/base/util.h"
#include "files.h"

static char path[256]; // what `in` made last

static const char *in(const char *name) {
    snprintf(path, sizeof(path), "%s/%s", directory, name);
    return path;
}

static void write_text(const char *name, const char *text) {
    Error error;
    if (!write_file_atomic(in(name), text, strlen(text), &error)) fail_msg("%s", error.message);
}

// A group's limit counts, and those of groups around it, less what they use but for cached files.
static void test_group_memory(void **state) {
    (void)state;
    Error error;
    char *root = format_string("%s/cgroup", directory), *membership = format_string("%s/membership", directory);
    assert_true(make_directories(in("cgroup/jobs/mine"), &error) &&
                make_directories(in("cgroup/memory/slurm/job"), &error));
    write_text("membership", "1:name=systemd:/elsewhere\n0::/jobs/mine\n");
    assert_true(system_group_memory(membership, root) == 1e18);
    write_text("cgroup/jobs/mine/memory.max", "max\n");
    assert_true(system_group_memory(membership, root) == 1e18);
    write_text("cgroup/jobs/memory.max", "8000000\n");
    write_text("cgroup/jobs/memory.current", "3000000\n");
    write_text("cgroup/jobs/memory.stat", "anon 1\ninactive_file 500000\nactive_file 500000\n");
    assert_true(system_group_memory(membership, root) == 6e6);
    write_text("cgroup/jobs/mine/memory.max", "5000000\n");
    assert_true(system_group_memory(membership, root) == 5e6);
    write_text("membership", "4:cpuset:/\n7:cpuacct,memory:/slurm/job\n0::/\n");
    write_text("cgroup/memory/slurm/job/memory.limit_in_bytes", "4000000\n");
    write_text("cgroup/memory/slurm/job/memory.usage_in_bytes", "1000000\n");
    write_text("cgroup/memory/slurm/job/memory.stat", "total_inactive_file 100000\n");
    assert_true(system_group_memory(membership, root) == 3.1e6);
    write_text("cgroup/memory.max", "2000000\n"); // of a container
    assert_true(system_group_memory(membership, root) == 2e6);
    free(root);
    free(membership);
}

static void test_error_set(void **state) {
    (void)state;
    Error error;
    assert_false(error_set(&error, "%s is %d", "it", 7));
    assert_string_equal(error.message, "it is 7");
    error_set(&error, "file: %s", error.message);
    assert_string_equal(error.message, "file: it is 7");
    // What a terminal would obey, in ASCII and in UTF-8, is not passed on; other characters are.
    error_set(&error, "\x1b[2J\r\n\x7f \xc2\x9b"
                      "2J \xc3\xa9 \xc2");
    assert_string_equal(error.message, "?[2J??? ??2J \xc3\xa9 \xc2");
    error_set(&error, "%5000d", 1);
    assert_int_equal(strlen(error.message), sizeof(error.message) - 1);
}

// Calls what ends the program, in a child, and checks its exit code and its one sentence.
static void assert_dies(void (*call)(void)) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        call();
        _exit(0);
    }
    close(ends[1]);
    char text[256] = {0};
    ssize_t count = read(ends[0], text, sizeof(text) - 1);
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EXIT_BAD_INPUT);
    assert_true(count > 0);
    char expected[256];
    snprintf(expected, sizeof(expected), "%s: no memory\n", program_invocation_short_name);
    assert_string_equal(text, expected);
}

static void call_die(void) { die("no %s", "memory"); }
static void set_error_or_die(void) { error_set(OR_DIE, "no %s", "memory"); }

static void test_die(void **state) {
    (void)state;
    assert_dies(call_die);
    assert_dies(set_error_or_die);
}

static void test_allocate(void **state) {
    (void)state;
    char *memory = allocate(1000);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(memory[i], 0);
    }
    free(memory);
    memory = allocate(0);
    assert_non_null(memory);
    free(memory);
    char *text = format_string("%s-%05d", "step", 42);
    assert_string_equal(text, "step-00042");
    free(text);
}

static void test_nearest_word(void **state) {
    (void)state;
    static const char *const options[] = {"learning-rate", "layers", "heads", "seed", "seq-len", "val-every"};
    const int count = sizeof(options) / sizeof(options[0]);
    assert_string_equal(nearest_word("learning-rate", options, count), "learning-rate");
    assert_string_equal(nearest_word("leaning-rate", options, count), "learning-rate");
    assert_string_equal(nearest_word("learning_rate", options, count), "learning-rate");
    assert_string_equal(nearest_word("layer", options, count), "layers");
    assert_string_equal(nearest_word("haeds", options, count), "heads");
    assert_string_equal(nearest_word("seqlen", options, count), "seq-len");
    assert_string_equal(nearest_word("ayers", options, count), "layers");
    const char *const devices[] = {"cpu", "cuda"};
    assert_string_equal(nearest_word("cpi", devices, 2), "cpu");
    assert_null(nearest_word("gpu", devices, 2));
    assert_null(nearest_word("recipe", options, count));
    assert_null(nearest_word("x", options, count));
    assert_null(nearest_word("", options, count));
    assert_null(nearest_word("seed", options, 0));
    char long_word[5000];
    memset(long_word, 'l', sizeof(long_word) - 1);
    long_word[sizeof(long_word) - 1] = 0;
    assert_null(nearest_word(long_word, options, count));
    const char *const too_long[] = {long_word};
    assert_null(nearest_word("l", too_long, 1));
}

static void test_human(void **state) {
    (void)state;
    static const struct {
        double value;
        const char *bytes, *count;
    } cases[] = {
        {0, "0 B", "0"},
        {999, "999 B", "999"},
        {999.7, "1.0 kB", "1.0k"},
        {1000, "1.0 kB", "1.0k"},
        {1.5e9, "1.5 GB", "1.5G"},
        {312.4e6, "312.4 MB", "312.4M"},
        {999949, "999.9 kB", "999.9k"},
        {999951, "1.0 MB", "1.0M"},
        {-2e6, "-2.0 MB", "-2.0M"},
        {1e21, "1000.0 EB", "1000.0E"},
    };
    char text[32];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_string_equal(human_bytes(text, cases[i].value), cases[i].bytes);
        assert_string_equal(human_count(text, cases[i].value), cases[i].count);
    }
    human_bytes(text, 1e308); // fits, whatever it is
    assert_true(strlen(text) < sizeof(text));
}

static void test_seconds_now(void **state) {
    (void)state;
    double start = seconds_now();
    usleep(20000);
    double elapsed = seconds_now() - start;
    assert_true(elapsed >= 0.02 && elapsed < 10);
}

static void test_write_and_read(void **state) {
    (void)state;
    Error error;
    char *data = allocate(100000);
    for (int i = 0; i < 100000; i++) {
        data[i] = (char)(i * 31 >> 3);
    }
    size_t bytes;
    static const size_t sizes[] = {0, 1, 4094, 4095, 4096, 8191, 100000};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        assert_true(write_file_atomic(in("data"), data, sizes[i], &error));
        char *again = read_file(path, sizes[i], &bytes, &error);
        assert_non_null(again);
        assert_int_equal(bytes, sizes[i]);
        assert_memory_equal(again, data, bytes);
        assert_int_equal(again[bytes], 0);
        free(again);
        if (sizes[i] > 0) {
            assert_null(read_file(path, sizes[i] - 1, &bytes, &error));
            assert_non_null(strstr(error.message, "too large"));
        }
    }
    assert_false(path_exists(in("data.tmp")));
    free(data);
    struct stat status;
    assert_int_equal(stat(in("data"), &status), 0);
    mode_t mask = umask(022);
    umask(mask);
    assert_int_equal(status.st_mode & 0777, 0666 & ~mask);
}

static void test_read_refused(void **state) {
    (void)state;
    Error error;
    size_t bytes;
    assert_null(read_file(in("missing"), 100, &bytes, &error));
    check_says(&error, "missing can't be read: No such file");
    assert_null(read_file(directory, 100, &bytes, &error));
    check_says(&error, "Is a directory");
}

static void test_write_refused(void **state) {
    (void)state;
    Error error;
    assert_false(write_file_atomic(in("no/such/file"), "x", 1, &error));
    check_says(&error, "can't be written: No such file");
    assert_false(write_file_atomic(directory, "x", 1, &error));
    check_says(&error, "not a regular file");
    assert_false(write_file_atomic("/dev/null", "x", 1, &error));
    check_says(&error, "not a regular file");
    assert_false(path_exists("/dev/null.tmp"));
}

// A disk that is full in the middle: the limit on file sizes stands for it. What was there before
// stays.
static void test_full_disk(void **state) {
    (void)state;
    Error error;
    assert_true(write_file_atomic(in("kept"), "before", 6, &error));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        // A size over the limit is then an error of write(), not a signal.
        struct rlimit limit = {1000, 1000};
        signal(SIGXFSZ, SIG_IGN);
        static char data[1 << 20];
        bool refused = setrlimit(RLIMIT_FSIZE, &limit) == 0 && !write_file_atomic(path, data, sizeof(data), &error);
        _exit(refused && strstr(error.message, "File too large") ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    size_t bytes;
    char *data = read_file(path, 100, &bytes, &error);
    assert_non_null(data);
    assert_string_equal(data, "before");
    free(data);
    assert_false(path_exists(in("kept.tmp")));
}

static void test_directories(void **state) {
    (void)state;
    Error error;
    assert_true(make_directories(in("a/b//c/"), &error));
    assert_true(path_exists(in("a/b/c")));
    assert_true(make_directories(in("a/b/c"), &error));
    assert_true(make_directories("/", &error));
    assert_false(make_directories("", &error));
    assert_true(write_file_atomic(in("a/file"), "x", 1, &error));
    assert_false(make_directories(in("a/file/d"), &error));
    check_says(&error, "a/file can't be made: File exists");
    assert_true(sync_path(in("a"), &error));
    assert_false(sync_path(in("b"), &error));

    // A link in the tree goes, what it points to stays.
    assert_true(write_file_atomic(in("outside"), "x", 1, &error));
    char target[256];
    snprintf(target, sizeof(target), "%s", path);
    assert_int_equal(symlink(target, in("a/b/link")), 0);
    assert_true(remove_tree(in("a")));
    assert_false(path_exists(in("a")));
    assert_true(path_exists(target));
    assert_true(remove_tree(in("a")));
}

// Checks what is suggested for `word`.
static void check_similar(const char *word, const char *sentence) {
    const char *const options[] = {"max-steps",     "warmup-steps",      "val-steps", "layers", "batch-size",
                                   "learning-rate", "final-lr-fraction", "epochs",    "cosine"};
    char *text = similar_words(word, options, 9, "--");
    assert_string_equal(text, sentence);
    free(text);
}

static void test_similar_words(void **state) {
    (void)state;
    check_similar("steps", "; did you mean --max-steps, --warmup-steps or --val-steps?");
    check_similar("lr", "; did you mean --learning-rate or --final-lr-fraction?");
    check_similar("cos", "; did you mean --cosine?");
    check_similar("epoch", "; did you mean --epochs?");
    check_similar("batch", "; did you mean --batch-size?");
    check_similar("LAYERS", "; did you mean --layers?");
    check_similar("layres", "; did you mean --layers?");
    check_similar("c", "");
    check_similar("", "");
    check_similar("zzzzzz", "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_group_memory),
        cmocka_unit_test(test_error_set),
        cmocka_unit_test(test_die),
        cmocka_unit_test(test_allocate),
        cmocka_unit_test(test_nearest_word),
        cmocka_unit_test(test_similar_words),
        cmocka_unit_test(test_human),
        cmocka_unit_test(test_seconds_now),
        cmocka_unit_test(test_write_and_read),
        cmocka_unit_test(test_read_refused),
        cmocka_unit_test(test_write_refused),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_directories),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
