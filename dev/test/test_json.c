// llmc/files/json.h: what is written, byte by byte; what is read, and what is refused; UTF-8.

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "llmc/files/json.h"

static void test_one_line(void **state) {
    (void)state;
    JsonWriter writer = {0};
    json_begin_object(&writer, NULL);
    json_write_string(&writer, "event", "train");
    json_write_int64(&writer, "step", -12);
    json_write_double(&writer, "loss", 5.25);
    json_write_double(&writer, "grad_norm", NAN);
    json_write_double(&writer, "z", -INFINITY);
    json_write_bool(&writer, "finite", false);
    json_write_string(&writer, "nothing", NULL);
    json_begin_array(&writer, "shape");
    json_write_int64(&writer, NULL, INT64_MAX);
    json_write_int64(&writer, NULL, INT64_MIN);
    json_begin_object(&writer, NULL);
    json_end_object(&writer);
    json_end_array(&writer);
    json_begin_array(&writer, "empty");
    json_end_array(&writer);
    json_end_object(&writer);
    assert_string_equal(writer.text, "{\"event\":\"train\",\"step\":-12,\"loss\":5.25,\"grad_norm\":null,\"z\":null,"
                                     "\"finite\":false,\"nothing\":null,"
                                     "\"shape\":[9223372036854775807,-9223372036854775808,{}],\"empty\":[]}");
    assert_int_equal(writer.length, strlen(writer.text));
    json_writer_free(&writer);
    assert_null(writer.text);
}

static void test_indented(void **state) {
    (void)state;
    JsonWriter writer = {.indented = true};
    json_begin_object(&writer, NULL);
    json_write_int64(&writer, "a", 1);
    json_begin_array(&writer, "b");
    json_write_int64(&writer, NULL, 2);
    json_write_int64(&writer, NULL, 3);
    json_end_array(&writer);
    json_begin_object(&writer, "c");
    json_end_object(&writer);
    json_end_object(&writer);
    assert_string_equal(writer.text, "{\n  \"a\": 1,\n  \"b\": [\n    2,\n    3\n  ],\n  \"c\": {}\n}");
    json_writer_free(&writer);
}

static void check_written_double(double value, const char *expected) {
    JsonWriter writer = {0};
    json_write_double(&writer, NULL, value);
    if (expected) assert_string_equal(writer.text, expected);
    double again = strtod(writer.text, NULL);
    assert_memory_equal(&again, &value, sizeof(value));
    json_writer_free(&writer);
}

static void test_doubles(void **state) {
    (void)state;
    check_written_double(0.1, "0.1");
    check_written_double(0, "0");
    check_written_double(-0.0, "-0");
    check_written_double(1.0 / 3, "0.3333333333333333");
    check_written_double(6e-4, "0.0006");
    check_written_double(1e-5, "1e-05");
    check_written_double(123456789, "123456789");
    check_written_double(5e-324, "5e-324");
    check_written_double(DBL_MAX, "1.7976931348623157e+308");
    uint64_t bits = 1;
    for (int i = 0; i < 20000; i++) {
        bits = bits * 6364136223846793005u + 1442695040888963407u;
        double value;
        memcpy(&value, &bits, sizeof(value));
        if (isfinite(value)) check_written_double(value, NULL);
    }
}

static void test_escapes(void **state) {
    (void)state;
    JsonWriter writer = {0};
    const char text[] = "\"\\/\b\f\n\r\t\x1b\x7f caf\xc3\xa9 \xf0\x9f\x98\x80 \xff\xc3 \xed\xa0\x80\0!";
    json_write_text(&writer, NULL, text, sizeof(text) - 1);
    assert_string_equal(writer.text, "\"\\\"\\\\/\\u0008\\u000c\\n\\u000d\\t\\u001b\x7f caf\xc3\xa9 \xf0\x9f\x98\x80 "
                                     "\\ufffd\\ufffd \\ufffd\\ufffd\\ufffd\\u0000!\"");
    json_writer_free(&writer);
}

// Table 3-7 of the Unicode standard: well-formed UTF-8, at and just outside its bounds.
static void test_utf8(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int length;
    } cases[] = {
        {"a", 1},
        {"\x7f", 1},
        {"\x80", 0},
        {"\xc1\xbf", 0},
        {"\xc2\x80", 2},
        {"\xdf\xbf", 2},
        {"\xc2\x7f", 0},
        {"\xc2\xc0", 0},
        {"\xe0\x9f\xbf", 0},
        {"\xe0\xa0\x80", 3},
        {"\xed\x9f\xbf", 3},
        {"\xed\xa0\x80", 0},
        {"\xee\x80\x80", 3},
        {"\xef\xbf\xbf", 3},
        {"\xe1\x80\x7f", 0},
        {"\xf0\x8f\xbf\xbf", 0},
        {"\xf0\x90\x80\x80", 4},
        {"\xf4\x8f\xbf\xbf", 4},
        {"\xf4\x90\x80\x80", 0},
        {"\xf5\x80\x80\x80", 0},
        {"\xff", 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t bytes = strlen(cases[i].text);
        assert_int_equal(utf8_sequence(cases[i].text, bytes), cases[i].length);
        for (size_t cut = 0; cut < bytes; cut++) {
            assert_int_equal(utf8_sequence(cases[i].text, cut), 0);
        }
    }
}

// NULL where this build can't read JSON, which must say so; then there is nothing more to test.
static JsonValue *parse(const char *text) {
    Error error;
    JsonValue *value = json_parse(text, strlen(text), &error);
    if (!value && strstr(error.message, "this build can't read JSON")) {
        assert_non_null(strstr(error.message, "apt-get install libcjson-dev"));
        skip();
    }
    return value;
}

static void test_reading(void **state) {
    (void)state;
    JsonValue *value = parse(" {\"a\":1,\"A\":2,\"half\":0.5,\"large\":9007199254740992,\"most\":-9007199254740991,"
                             "\"huge\":1e999,\"yes\":true,\"text\":\"caf\\u00e9 \\ud83d\\ude00\",\"list\":[3,[4]],"
                             "\"none\":null}\n");
    assert_non_null(value);
    int64_t whole = 0;
    double number = 0;
    bool flag = false;
    assert_true(json_int64(value, "a", &whole) && whole == 1);
    assert_true(json_int64(value, "A", &whole) && whole == 2);
    assert_true(json_int64(value, "most", &whole) && whole == -9007199254740991);
    assert_false(json_int64(value, "large", &whole));
    assert_false(json_int64(value, "half", &whole));
    assert_false(json_int64(value, "huge", &whole));
    assert_false(json_int64(value, "text", &whole));
    assert_false(json_int64(value, "missing", &whole));
    assert_true(whole == -9007199254740991); // untouched
    assert_true(json_number(value, "half", &number) && number == 0.5);
    assert_false(json_number(value, "huge", &number));
    assert_false(json_number(value, "none", &number));
    assert_true(json_bool(value, "yes", &flag) && flag);
    assert_false(json_bool(value, "a", &flag));
    assert_string_equal(json_string(value, "text"), "caf\xc3\xa9 \xf0\x9f\x98\x80");
    assert_null(json_string(value, "a"));
    assert_null(json_string(value, "missing"));

    const JsonValue *list = json_get(value, "list");
    assert_true(json_is_array(list) && !json_is_object(list) && json_is_object(value));
    assert_true(json_int64(json_first(list), NULL, &whole) && whole == 3);
    assert_true(json_is_array(json_next(json_first(list))));
    assert_null(json_next(json_next(json_first(list))));
    assert_null(json_get(list, "a"));
    assert_null(json_first(json_first(list)));
    assert_string_equal(json_key(json_first(value)), "a");
    json_free(value);
    json_free(NULL);
}

static void check_refused(const char *text, size_t bytes, const char *sentence) {
    Error error = {{0}};
    JsonValue *value = json_parse(text, bytes, &error);
    assert_null(value);
    if (!strstr(error.message, sentence)) fail_msg("\"%s\" lacks \"%s\"", error.message, sentence);
}

static void test_refused(void **state) {
    (void)state;
    json_free(parse("{}"));
    static const char *const broken[] = {"",         "{",     "}",          "[1,]",       "{\"a\"}",
                                         "{\"a\":}", "nul",   "{'a':1}",    "[1 2]",      "\"open",
                                         "\"\\q\"",  "[NaN]", "[Infinity]", "\"\\ud800\""};
    for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
        check_refused(broken[i], strlen(broken[i]), "not valid JSON");
    }
    static const char *const twice[] = {"{\"a\":1,\"b\":2,\"a\":1}", "[{\"x\":[{\"a\":1,\"\\u0061\":2}]}]"};
    for (size_t i = 0; i < sizeof(twice) / sizeof(twice[0]); i++) {
        Error error;
        JsonValue *value = parse(twice[i]);
        assert_false(json_names_once(value, &error));
        assert_non_null(strstr(error.message, "an object names \"a\" twice"));
        json_free(value);
    }
    Error none;
    JsonValue *once = parse("[{\"a\":{\"a\":1},\"A\":1},{\"a\":1}]");
    assert_true(json_names_once(once, &none));
    json_free(once);
    check_refused("{} x", 4, "something follows, at byte 3 (line 1)");
    check_refused("{}{}", 4, "something follows");
    check_refused("{}\0", 3, "control character at byte 2");
    check_refused("{\"a\0b\":1}", 9, "control character");
    check_refused("[\"a\nb\"]", 7, "control character");
    check_refused("[\n\"\\u0000\"]", 11, "\\u0000 at byte 3 (line 2)");
    check_refused("[\"\xff\"]", 5, "not UTF-8 at byte 2");
    check_refused("[\"\xc3\"]", 5, "not UTF-8");

    // An escaped backslash before "u0000" is only a backslash.
    JsonValue *value = parse("\"\\\\u0000\"");
    assert_string_equal(json_string(value, NULL), "\\u0000");
    json_free(value);
}

static void test_nesting(void **state) {
    (void)state;
    enum { DEEP = 100000 };
    char *text = allocate(DEEP);
    memset(text, '[', DEEP);
    json_free(parse("{}"));
    check_refused(text, DEEP, "more than 100 nested brackets");
    memset(text + 100, ']', 100);
    Error error;
    JsonValue *value = json_parse(text, 200, &error);
    assert_non_null(value);
    json_free(value);
    // Brackets in strings nest nothing.
    memset(text, '[', 1000);
    text[0] = text[999] = '"';
    value = json_parse(text, 1000, &error);
    assert_non_null(value);
    json_free(value);
    free(text);
}

static void test_round_trip(void **state) {
    (void)state;
    json_free(parse("{}"));
    JsonWriter writer = {.indented = true};
    char every_byte[127];
    for (int i = 0; i < 127; i++) {
        every_byte[i] = (char)(i + 1);
    }
    json_begin_object(&writer, NULL);
    json_write_text(&writer, "te\"xt", every_byte, sizeof(every_byte));
    json_write_double(&writer, "number", 2.0 / 3);
    json_end_object(&writer);
    JsonValue *value = parse(writer.text);
    assert_non_null(value);
    double number;
    assert_true(json_number(value, "number", &number) && number == 2.0 / 3);
    assert_memory_equal(json_string(value, "te\"xt"), every_byte, sizeof(every_byte));
    json_free(value);
    json_writer_free(&writer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_line), cmocka_unit_test(test_indented), cmocka_unit_test(test_doubles),
        cmocka_unit_test(test_escapes),  cmocka_unit_test(test_utf8),     cmocka_unit_test(test_reading),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_nesting),  cmocka_unit_test(test_round_trip),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
