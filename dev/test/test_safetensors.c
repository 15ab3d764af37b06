// llmc/files/safetensors.h: a file of the format's own library read, files written read again and
// compared byte by byte with the format, and files that lie refused.

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "llmc/files/safetensors.h"
#include "files.h"

static char path[256]; // the file that the tests write

static int make_directory_and_path(void **state) {
    if (make_directory(state) != 0) return -1;
    snprintf(path, sizeof(path), "%s/model.safetensors", directory);
    return 0;
}

// Opens, or skips the test in a build that can't read JSON.
static void open_or_skip(SafetensorsFile *file, const char *name) {
    Error error;
    if (safetensors_open(file, name, &error)) return;
    if (strstr(error.message, "this build can't read JSON")) skip();
    fail_msg("%s", error.message);
}

static void check_floats(const SafetensorsFile *file, const char *name, const float *expected, int count) {
    const SafetensorsEntry *entry = safetensors_find(file, name);
    assert_non_null(entry);
    assert_int_equal(entry->num_elements, count);
    float out[16];
    Error error;
    assert_true(safetensors_read_fp32(file, entry, out, &error));
    for (int i = 0; i < count; i++) {
        if (isnan(expected[i])) {
            assert_true(isnan(out[i]));
        } else {
            assert_memory_equal(&out[i], &expected[i], sizeof(float));
        }
    }
}

// The fixture and its values are dev/reference/safetensors_fixture.py's.
static void test_official_file(void **state) {
    (void)state;
    SafetensorsFile file;
    open_or_skip(&file, "dev/test/fixtures/official.safetensors");
    assert_int_equal(file.num_entries, 7);
    assert_string_equal(safetensors_metadata(&file, "format"), "pt");
    assert_string_equal(safetensors_metadata(&file, "note"), "caf\xc3\xa9 \"quoted\"\n");
    assert_null(safetensors_metadata(&file, "missing"));
    assert_null(safetensors_find(&file, "missing"));
    assert_null(safetensors_find(&file, "__metadata__"));

    check_floats(&file, "f32", (const float[]){0.1f, -2.5f, 3e38f, 1e-45f, -0.0f, 7}, 6);
    check_floats(&file, "f64", (const float[]){0.1f, -INFINITY, 0x1p-149f}, 3);
    check_floats(&file, "f16",
                 (const float[]){0, -0.0f, 1, -65504, 0x1p-24f, 0x1p-14f, -INFINITY, NAN, 0.333251953125f}, 9);
    check_floats(&file, "bf16", (const float[]){1, -2.5f, 0x1p-133f, INFINITY, 0.333984375f}, 5);
    check_floats(&file, "scalar", (const float[]){42}, 1);
    check_floats(&file, "empty", NULL, 0);

    const SafetensorsEntry *entry = safetensors_find(&file, "f32");
    assert_string_equal(entry->dtype, "F32");
    assert_int_equal(entry->ndim, 2);
    assert_true(entry->shape[0] == 2 && entry->shape[1] == 3);
    assert_int_equal(safetensors_find(&file, "scalar")->ndim, 0);

    Error error;
    int64_t whole[2];
    entry = safetensors_find(&file, "i64");
    assert_true(safetensors_read(&file, entry, whole, &error));
    assert_true(whole[0] == -1 && whole[1] == (int64_t)1 << 62);
    assert_false(safetensors_read_fp32(&file, entry, (float *)whole, &error));
    check_says(&error, "\"i64\" is I64, where F64, F32, F16 or BF16 is needed");
    safetensors_close(&file);
}

// All finite half-precision values, by the definition: (-1)^s 2^(e - 15) 1.m, and 2^-14 0.m for e =
// 0.
static void test_every_half(void **state) {
    (void)state;
    Error error;
    SafetensorsWriter *writer = safetensors_create(path, NULL, &error);
    safetensors_add(writer, "half", "F16", 1, (const int64_t[]){65536});
    assert_true(safetensors_begin_data(writer));
    for (uint32_t code = 0; code < 65536; code++) {
        uint16_t half = (uint16_t)code;
        assert_true(safetensors_write(writer, &half, sizeof(half)));
    }
    assert_true(safetensors_finish(writer, &error));
    SafetensorsFile file;
    open_or_skip(&file, path);
    float *out = allocate(65536 * sizeof(*out));
    assert_true(safetensors_read_fp32(&file, safetensors_find(&file, "half"), out, &error));
    for (uint32_t code = 0; code < 65536; code++) {
        int exponent = code >> 10 & 31, mantissa = code & 1023;
        double magnitude = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
        if (exponent == 31) magnitude = mantissa ? NAN : INFINITY;
        assert_true(isnan(magnitude) ? isnan(out[code]) : fabs(out[code]) == magnitude);
        assert_int_equal(signbit(out[code]) != 0, code >> 15);
    }
    free(out);
    safetensors_close(&file);
}

static void test_written_bytes(void **state) {
    (void)state;
    Error error;
    const float a[] = {1, 2, 3, 4, 5, 6}, b = -1;
    unlink(path);
    SafetensorsWriter *writer = safetensors_create(path, (const char *const[]){"format", "pt", NULL}, &error);
    assert_non_null(writer);
    safetensors_add(writer, "transformer.wte.weight", "F32", 2, (const int64_t[]){2, 3});
    safetensors_add(writer, "b", "F32", 0, NULL);
    assert_true(safetensors_begin_data(writer));
    assert_true(safetensors_write(writer, a, 8));
    assert_true(safetensors_write(writer, a + 2, 16));
    assert_true(safetensors_write(writer, &b, 4));
    assert_false(path_exists(path));
    assert_true(safetensors_finish(writer, &error));

    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"transformer.wte.weight\":{\"dtype\":\"F32\","
                                 "\"shape\":[2,3],\"data_offsets\":[0,24]},\"b\":{\"dtype\":\"F32\",\"shape\":[],"
                                 "\"data_offsets\":[24,28]}}";
    size_t bytes;
    char *data = read_file(path, 1 << 20, &bytes, &error);
    assert_non_null(data);
    uint64_t header_bytes;
    memcpy(&header_bytes, data, 8);
    assert_int_equal((8 + header_bytes) % 64, 0);
    assert_int_equal(bytes, 8 + header_bytes + 28);
    assert_memory_equal(data + 8, header, sizeof(header) - 1);
    for (size_t i = 8 + sizeof(header) - 1; i < 8 + header_bytes; i++) {
        assert_int_equal(data[i], ' ');
    }
    assert_memory_equal(data + 8 + header_bytes, a, 24);
    assert_memory_equal(data + 8 + header_bytes + 24, &b, 4);
    free(data);

    SafetensorsFile file;
    open_or_skip(&file, path);
    check_floats(&file, "transformer.wte.weight", a, 6);
    check_floats(&file, "b", &b, 1);
    safetensors_close(&file);
}

static void test_wrong_amount_of_data(void **state) {
    (void)state;
    unlink(path);
    for (int count = 2; count <= 4; count += 2) {
        Error error, last;
        const float data[4] = {0};
        SafetensorsWriter *writer = safetensors_create(path, NULL, &error);
        safetensors_add(writer, "a", "F32", 1, (const int64_t[]){3});
        assert_true(safetensors_begin_data(writer));
        assert_int_equal(safetensors_write(writer, data, (size_t)count * 4), count < 3);
        if (count > 3) assert_false(safetensors_write(writer, data, 4)); // the first error sticks
        assert_false(safetensors_finish(writer, &last));
        check_says(&last, count < 3 ? "less data than declared" : "more data than declared");
        assert_false(path_exists(path));
        char *temporary = format_string("%s.tmp", path);
        assert_false(path_exists(temporary));
        free(temporary);
    }
}

static void test_unwritable(void **state) {
    (void)state;
    Error error;
    assert_null(safetensors_create("/no/such/directory/model.safetensors", NULL, &error));
    check_says(&error, "/no/such/directory/model.safetensors.tmp can't be made: No such file");
    assert_null(safetensors_create(directory, NULL, &error));
    check_says(&error, "not a regular file");
}

// In a child process: the limit on file sizes stands for a full disk. Errors stick until finish.
static bool full_disk_is_reported(void) {
    static char data[1 << 20];
    struct rlimit limit = {10000, 10000};
    signal(SIGXFSZ, SIG_IGN);
    Error error = {{0}}, last = {{0}};
    SafetensorsWriter *writer = safetensors_create(path, NULL, &error);
    if (!writer || setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    safetensors_add(writer, "a", "U8", 1, (const int64_t[]){2 * sizeof(data)});
    bool ok = !safetensors_begin_data(writer) && !safetensors_write(writer, data, sizeof(data)) &&
              !safetensors_write(writer, data, sizeof(data)) && !safetensors_sync(writer, &error);
    return !safetensors_finish(writer, &last) && ok && strstr(last.message, "File too large") &&
           strcmp(error.message, last.message) == 0;
}

static void test_full_disk(void **state) {
    (void)state;
    Error error;
    assert_true(write_file_atomic(path, "before", 6, &error));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) _exit(full_disk_is_reported() ? 0 : 1);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    size_t bytes;
    char *data = read_file(path, 100, &bytes, &error);
    assert_non_null(data);
    assert_string_equal(data, "before");
    free(data);
    char *temporary = format_string("%s.tmp", path);
    assert_false(path_exists(temporary));
    free(temporary);
}

// Writes a file with this header and that many bytes of data.
static void write_raw(const char *header, size_t header_bytes, uint64_t claimed_bytes, size_t data_bytes) {
    size_t bytes = 8 + header_bytes + data_bytes;
    char *data = allocate(bytes);
    memcpy(data, &claimed_bytes, 8);
    memcpy(data + 8, header, header_bytes);
    Error error;
    assert_true(write_file_atomic(path, data, bytes, &error));
    free(data);
}

static void check_refused(const char *sentence) {
    SafetensorsFile file;
    Error error = {{0}};
    assert_false(safetensors_open(&file, path, &error));
    if (strstr(error.message, "this build can't read JSON")) skip();
    check_says(&error, path);
    check_says(&error, sentence);
}

#define F32(shape, offsets) "{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_hostile_headers(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *sentence;
    } cases[] = {
        {"", 0, "doesn't begin with '{'"},
        {" {}", 0, "doesn't begin with '{'"},
        {"[]", 0, "doesn't begin with '{'"},
        {"{", 0, "not valid JSON"},
        {"{}x", 0, "something follows"},
        {"{\"\xff\":1}", 0, "not UTF-8"},
        {"{\"a\\u0000b\":1}", 0, "\\u0000"},
        {"{\"a\":1}", 0, "\"a\" has no known dtype (missing)"},
        {"{\"a\":{}}", 0, "\"a\" has no known dtype (missing)"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "no known dtype (F31)"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "\"a\" has no shape"},
        {"{\"a\":" F32("4", "[0,4]") "}", 4, "\"a\" has no shape"},
        {"{\"a\":" F32("[-1]", "[0,4]") "}", 4, "\"a\" has no shape"},
        {"{\"a\":" F32("[-1,-1]", "[0,4]") "}", 4, "\"a\" has no shape"},
        {"{\"a\":" F32("[1.5]", "[0,6]") "}", 6, "\"a\" has no shape"},
        {"{\"a\":" F32("[\"1\"]", "[0,4]") "}", 4, "\"a\" has no shape"},
        {"{\"a\":" F32("[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "\"a\" has no shape"},
        {"{\"a\":" F32("[1e300]", "[0,4]") "}", 4, "\"a\" has no shape"},
        {"{\"a\":" F32("[4294967296,4294967296]", "[0,0]") "}", 0, "shape and dtype that don't make its 0 bytes"},
        {"{\"a\":" F32("[4611686018427387905]", "[0,4]") "}", 4, "\"a\" has no shape"},
        {"{\"a\":" F32("[1152921504606846976,16]", "[0,0]") "}", 0, "\"a\" has no shape"},
        {"{\"a\":" F32("[1]", "[0,8]") "}", 8, "shape and dtype that don't make its 8 bytes"},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, "shape and dtype that don't make"},
        {"{\"a\":" F32("[1]", "[0]") "}", 4, "\"a\" has no data_offsets"},
        {"{\"a\":" F32("[1]", "[0,4,8]") "}", 4, "\"a\" has no data_offsets"},
        {"{\"a\":" F32("[1]", "[0.5,4.5]") "}", 4, "\"a\" has no data_offsets"},
        {"{\"a\":" F32("[1]", "[-4,0]") "}", 4, "\"a\" has no data_offsets"},
        {"{\"a\":" F32("[1]", "[4,0]") "}", 4, "\"a\" has no data_offsets"},
        {"{\"a\":" F32("[1]", "[18446744073709551612,18446744073709551616]") "}", 4, "\"a\" has no data_offsets"},
        {"{\"a\":" F32("[1]", "[4,8]") "}", 8, "begins at byte 4 of the data, where 0 was due"},
        {"{\"a\":" F32("[1]", "[0,4]") ",\"b\":" F32("[1]", "[8,12]") "}", 12, "\"b\" begins at byte 8"},
        {"{\"a\":" F32("[2]", "[0,8]") ",\"b\":" F32("[2]", "[4,12]") "}", 12, "\"b\" begins at byte 4"},
        {"{\"a\":" F32("[1]", "[0,4]") ",\"b\":" F32("[1]", "[0,4]") "}", 4, "begins at byte 0 of the data, where 4"},
        {"{\"a\":" F32("[1]", "[0,4]") ",\"a\":" F32("[1]", "[4,8]") "}", 8, "names \"a\" twice"},
        {"{\"a\":" F32("[1]", "[0,4]") "}", 3, "3 bytes of data where its header promises 4"},
        {"{\"a\":" F32("[1]", "[0,4]") "}", 5, "5 bytes of data where its header promises 4"},
        {"{\"a\":" F32("[1000000000000]", "[0,4000000000000]") "}", 4, "promises 4000000000000"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object of strings"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ is not an object of strings"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "names \"__metadata__\" twice"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t bytes = strlen(cases[i].header);
        write_raw(cases[i].header, bytes, bytes, cases[i].data_bytes);
        check_refused(cases[i].sentence);
    }
}

static void test_hostile_lengths(void **state) {
    (void)state;
    static const uint64_t claims[] = {3, 100000001, (uint64_t)1 << 40, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof(claims) / sizeof(claims[0]); i++) {
        write_raw("{}", 2, claims[i], 0);
        check_refused("claims a header of");
    }
    Error error;
    assert_true(write_file_atomic(path, "1234567", 7, &error));
    check_refused("has only 7 bytes");
    assert_true(write_file_atomic(path, "", 0, &error));
    check_refused("has only 0 bytes");

    enum { DEEP = 1000000 };
    char *deep = allocate(DEEP);
    memset(deep, '[', DEEP);
    memcpy(deep, "{\"a\":", 5);
    write_raw(deep, DEEP, DEEP, 0);
    check_refused("more than 100 nested brackets");
    free(deep);
}

static void test_not_a_file(void **state) {
    (void)state;
    SafetensorsFile file;
    Error error;
    assert_false(safetensors_open(&file, directory, &error));
    check_says(&error, "is not a file");
    char *pipe_path = format_string("%s/pipe.safetensors", directory);
    assert_int_equal(mkfifo(pipe_path, 0666), 0);
    assert_false(safetensors_open(&file, pipe_path, &error)); // rather than wait for somebody to write
    check_says(&error, "is not a file");
    unlink(pipe_path);
    free(pipe_path);
    assert_false(safetensors_open(&file, "/no/such.safetensors", &error));
    check_says(&error, "can't be opened: No such file");
}

// A file cut short after it was opened: an error, never stale bytes.
static void test_cut_while_open(void **state) {
    (void)state;
    const char header[] = "{\"a\":" F32("[2]", "[0,8]") "}";
    write_raw(header, sizeof(header) - 1, sizeof(header) - 1, 8);
    SafetensorsFile file;
    open_or_skip(&file, path);
    assert_int_equal(truncate(path, (off_t)(8 + sizeof(header) - 1 + 4)), 0);
    float out[2];
    Error error;
    assert_false(safetensors_read_fp32(&file, &file.entries[0], out, &error));
    check_says(&error, "ends before its data does");
    safetensors_close(&file);
}

static void test_no_tensors(void **state) {
    (void)state;
    write_raw("{}", 2, 2, 0);
    SafetensorsFile file;
    open_or_skip(&file, path);
    assert_int_equal(file.num_entries, 0);
    assert_null(safetensors_metadata(&file, "format"));
    safetensors_close(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_official_file),   cmocka_unit_test(test_every_half),
        cmocka_unit_test(test_written_bytes),   cmocka_unit_test(test_wrong_amount_of_data),
        cmocka_unit_test(test_unwritable),      cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_hostile_headers), cmocka_unit_test(test_hostile_lengths),
        cmocka_unit_test(test_not_a_file),      cmocka_unit_test(test_cut_while_open),
        cmocka_unit_test(test_no_tensors),
    };
    return cmocka_run_group_tests(tests, make_directory_and_path, remove_directory);
}
