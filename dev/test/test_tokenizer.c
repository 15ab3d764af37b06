// llmc/data/tokenizer.h: encoding against the `tokenizers` library and by hand; the file format;
// files that lie refused.

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "llmc/data/tokenizer.h"
#include "files.h"
#include "fixtures/tokenizer_cases.h" // cases: texts and their ids

static char path[256]; // the file that the tests write

static int make_directory_and_path(void **state) {
    if (make_directory(state) != 0) return -1;
    snprintf(path, sizeof(path), "%s/tokenizer.bin", directory);
    return 0;
}

static void check_decodes_to(const Tokenizer *tokenizer, const int32_t *ids, int count, const char *text,
                             size_t bytes) {
    size_t offset = 0;
    for (int i = 0; i < count; i++) {
        int length;
        const char *token = tokenizer_decode(tokenizer, ids[i], &length);
        assert_non_null(token);
        assert_true(offset + (size_t)length <= bytes);
        assert_memory_equal(token, text + offset, (size_t)length);
        offset += (size_t)length;
    }
    assert_int_equal(offset, bytes);
}

static void test_against_tokenizers_library(void **state) {
    (void)state;
    int count = sizeof(cases) / sizeof(cases[0]);
    assert_true(count > 30);
    for (int i = 0; i < count; i++) {
        char file[128];
        snprintf(file, sizeof(file), "dev/test/fixtures/%s", cases[i].file);
        Tokenizer tokenizer;
        Error error;
        if (!tokenizer_open(&tokenizer, file, &error)) fail_msg("%s", error.message);
        assert_true(tokenizer.vocab_size > 400);
        assert_int_equal(tokenizer.end_of_text, 0);
        int32_t ids[2000];
        size_t bytes = strlen(cases[i].text);
        int num_ids = tokenizer_encode(&tokenizer, cases[i].text, bytes, ids);
        assert_int_equal(num_ids, cases[i].count);
        assert_memory_equal(ids, cases[i].ids, (size_t)num_ids * sizeof(*ids));
        check_decodes_to(&tokenizer, ids, num_ids, cases[i].text, bytes);
        tokenizer_close(&tokenizer);
    }
}

// A tokenizer file of these tokens; header words as given. Returns its size.
static size_t write_file(uint32_t magic, uint32_t version, uint32_t vocab_size, uint32_t end_of_text,
                         const char *const *tokens, int count) {
    static char file[1 << 20];
    uint32_t header[256] = {magic, version, vocab_size, end_of_text};
    memcpy(file, header, sizeof(header));
    size_t bytes = sizeof(header);
    for (int i = 0; i < count; i++) {
        size_t length = strlen(tokens[i]);
        file[bytes++] = (char)length;
        memcpy(file + bytes, tokens[i], length);
        bytes += length;
    }
    Error error;
    assert_true(write_file_atomic(path, file, bytes, &error));
    return bytes;
}

static void check_encodes(const Tokenizer *tokenizer, const char *text, int count, const int32_t *expected) {
    int32_t ids[64];
    assert_int_equal(tokenizer_encode(tokenizer, text, strlen(text), ids), count);
    if (count > 0) assert_memory_equal(ids, expected, (size_t)count * sizeof(*ids));
}

#define IDS(...) \
    (const int32_t[]) { __VA_ARGS__ }

static void test_by_hand(void **state) {
    (void)state;
    static const char *const tokens[] = {"a", "b", "c", "d", "bc", "ab", "abc", "cd", "aa", "<|endoftext|>", "ab"};
    write_file(20240328, 2, 11, 9, tokens, 11);
    Tokenizer tokenizer;
    Error error;
    assert_true(tokenizer_open(&tokenizer, path, &error));
    assert_int_equal(tokenizer.end_of_text, 9);
    check_encodes(&tokenizer, "", 0, NULL);
    check_encodes(&tokenizer, "d", 1, IDS(3));
    check_encodes(&tokenizer, "ab", 1, IDS(5));      // of two tokens with the same bytes the lower
    check_encodes(&tokenizer, "abc", 1, IDS(6));     // bc first (4), then a + bc
    check_encodes(&tokenizer, "abcd", 2, IDS(6, 3)); // bc (4) before ab (5) and cd (7)
    check_encodes(&tokenizer, "bcd", 2, IDS(4, 3));
    check_encodes(&tokenizer, "acd", 2, IDS(0, 7));
    check_encodes(&tokenizer, "aaa", 2, IDS(8, 0)); // the leftmost of equals
    check_encodes(&tokenizer, "aaaaa", 3, IDS(8, 8, 0));
    check_encodes(&tokenizer, "aab", 2, IDS(0, 5)); // ab (5) before aa (8)
    check_encodes(&tokenizer, "abx", -1, NULL);     // no token has an x
    check_encodes(&tokenizer, "<", -1, NULL);       // nor does end-of-text come of text
    int length;
    assert_memory_equal(tokenizer_decode(&tokenizer, 9, &length), "<|endoftext|>", 13);
    assert_int_equal(length, 13);
    assert_null(tokenizer_decode(&tokenizer, -1, &length));
    assert_int_equal(length, 0);
    assert_null(tokenizer_decode(&tokenizer, 11, &length));
    tokenizer_close(&tokenizer);
}

// Opens the tokenizer of 257 tokens, the 256 bytes and end-of-text as 256, as data/prepare.py
// writes it.
static void open_byte_tokenizer(Tokenizer *tokenizer) {
    static const char NAME[] = "\x0d<|endoftext|>";
    uint32_t header[256] = {20240328, 2, 257, 256};
    char file[sizeof(header) + 2 * 256 + sizeof(NAME) - 1];
    Error error;
    memcpy(file, header, sizeof(header));
    for (int byte = 0; byte < 256; byte++) {
        file[sizeof(header) + 2 * (size_t)byte] = 1;
        file[sizeof(header) + 2 * (size_t)byte + 1] = (char)byte;
    }
    memcpy(file + sizeof(header) + 512, NAME, sizeof(NAME) - 1);
    assert_true(write_file_atomic(path, file, sizeof(file), &error));
    assert_true(tokenizer_open(tokenizer, path, &error));
}

static void test_byte_tokenizer(void **state) {
    (void)state;
    Tokenizer tokenizer;
    open_byte_tokenizer(&tokenizer);
    assert_int_equal(tokenizer.vocab_size, 257);
    assert_int_equal(tokenizer.end_of_text, 256);
    char text[256];
    int32_t ids[256];
    for (int i = 0; i < 256; i++) {
        text[i] = (char)i;
    }
    assert_int_equal(tokenizer_encode(&tokenizer, text, 256, ids), 256);
    for (int i = 0; i < 256; i++) {
        assert_int_equal(ids[i], i);
    }
    check_decodes_to(&tokenizer, ids, 256, text, 256);
    int32_t name_ids[13];
    assert_int_equal(tokenizer_encode(&tokenizer, "<|endoftext|>", 13, name_ids), 13);

    // What is saved opens again, and saving that is byte-identical.
    Error error;
    assert_true(tokenizer_save(&tokenizer, path, &error));
    Tokenizer again;
    assert_true(tokenizer_open(&again, path, &error));
    assert_int_equal(again.vocab_size, 257);
    assert_int_equal(again.file_bytes, 1024 + 512 + 14);
    assert_int_equal(again.file_bytes, tokenizer.file_bytes);
    assert_memory_equal(again.file, tokenizer.file, tokenizer.file_bytes);
    tokenizer_close(&again);
    tokenizer_close(&tokenizer);
}

static void write_text(const char *name, const char *text) {
    Error error;
    assert_true(write_file_atomic(name, text, strlen(text), &error));
}

static void check_text(const char *name, const char *text) {
    Error error;
    size_t bytes;
    char *found = read_file(name, 1 << 20, &bytes, &error);
    assert_non_null(found);
    assert_string_equal(found, text);
    free(found);
}

// What lies beside a tokenizer under its name is saved with it; what is missing stays missing.
static void test_jsons(void **state) {
    (void)state;
    static const char *const tokens[] = {"a", "<|endoftext|>"};
    char json[300], config[300], copy[300], copied_json[300], copied_config[300];
    snprintf(json, sizeof(json), "%s/tokenizer.json", directory);
    snprintf(config, sizeof(config), "%s/tokenizer_config.json", directory);
    snprintf(copy, sizeof(copy), "%s/gpt2.bin", directory);
    snprintf(copied_json, sizeof(copied_json), "%s/gpt2.json", directory);
    snprintf(copied_config, sizeof(copied_config), "%s/gpt2_config.json", directory);
    write_file(20240328, 2, 2, 1, tokens, 2);
    write_text(json, "{1}");
    Tokenizer tokenizer;
    Error error;
    assert_true(tokenizer_open(&tokenizer, path, &error));
    assert_false(tokenizer_has_jsons(&tokenizer));
    assert_true(tokenizer_save(&tokenizer, copy, &error));
    check_text(copied_json, "{1}");
    assert_false(path_exists(copied_config));
    tokenizer_close(&tokenizer);

    write_text(config, "{2}");
    assert_true(tokenizer_open(&tokenizer, path, &error));
    assert_true(tokenizer_has_jsons(&tokenizer));
    assert_int_equal(remove(json), 0); // they have been read
    assert_int_equal(remove(config), 0);
    assert_true(tokenizer_save(&tokenizer, copy, &error));
    check_text(copied_json, "{1}");
    check_text(copied_config, "{2}");
    tokenizer_close(&tokenizer);

    assert_true(make_directories(json, &error)); // no file
    assert_false(tokenizer_open(&tokenizer, path, &error));
    check_says(&error, json);
    assert_true(remove_tree(json));
}

// GPT-2's files of version 1 don't say their end-of-text id.
static void test_version_1(void **state) {
    (void)state;
    enum { VOCABULARY = 50257 };
    static const char *tokens[VOCABULARY];
    static char names[VOCABULARY][8];
    for (int i = 0; i < VOCABULARY; i++) {
        snprintf(names[i], sizeof(names[i]), i < 26 ? "%c" : "#%d", i < 26 ? 'a' + i : i);
        tokens[i] = names[i];
    }
    tokens[VOCABULARY - 1] = "<|endoftext|>";
    write_file(20240328, 1, VOCABULARY, 0, tokens, VOCABULARY);
    Tokenizer tokenizer;
    Error error;
    assert_true(tokenizer_open(&tokenizer, path, &error));
    assert_int_equal(tokenizer.end_of_text, 50256);
    check_encodes(&tokenizer, "cab", 3, IDS(2, 0, 1));
    tokenizer_close(&tokenizer);

    write_file(20240328, 1, VOCABULARY - 1, 0, tokens, VOCABULARY - 1);
    assert_false(tokenizer_open(&tokenizer, path, &error));
    check_says(&error, "end-of-text 50256");
}

// A long text takes n log n: seconds would mean that it doesn't.
static void test_long_text(void **state) {
    (void)state;
    static const char *const tokens[] = {"<|endoftext|>", "a", "b", "aa", "aaaa", "ab", "abab"};
    write_file(20240328, 2, 7, 0, tokens, 7);
    Tokenizer tokenizer;
    Error error;
    assert_true(tokenizer_open(&tokenizer, path, &error));
    enum { BYTES = 1 << 20 };
    char *text = allocate(BYTES);
    int32_t *ids = allocate(BYTES * sizeof(*ids));
    memset(text, 'a', BYTES);
    double start = seconds_now();
    assert_int_equal(tokenizer_encode(&tokenizer, text, BYTES, ids), BYTES / 4);
    double elapsed = seconds_now() - start;
    printf("    1 MiB encoded in %.2f s of 10 allowed\n", elapsed);
    assert_true(elapsed < 10);
    for (int i = 0; i < BYTES / 4; i++) {
        assert_int_equal(ids[i], 4);
    }
    free(ids);
    free(text);
    tokenizer_close(&tokenizer);
}

static void check_refused(const char *sentence) {
    Tokenizer tokenizer;
    Error error = {{0}};
    assert_false(tokenizer_open(&tokenizer, path, &error));
    check_says(&error, path);
    check_says(&error, sentence);
}

static void cut_file(size_t bytes) {
    Error error;
    size_t whole;
    char *data = read_file(path, 1 << 20, &whole, &error);
    assert_true(write_file_atomic(path, data, bytes, &error));
    free(data);
}

static void test_hostile_files(void **state) {
    (void)state;
    static const char *const tokens[] = {"a", "b", "ab", "<|endoftext|>"};
    static const char *const empty[] = {"a", "", "ab", "<|endoftext|>"};
    Error error;
    assert_true(write_file_atomic(path, "", 0, &error));
    check_refused("not a tokenizer file");
    assert_true(write_file_atomic(path, "text, not tokens", 16, &error));
    check_refused("not a tokenizer file");
    write_file(20240520, 1, 4, 3, tokens, 4);
    check_refused("not a tokenizer file of version 1 to 3");
    write_file(20240328, 4, 4, 3, tokens, 4);
    check_refused("not a tokenizer file of version 1 to 3");
    write_file(20240328, 3, 4, 3, tokens, 4); // whose lengths would have two bytes
    check_refused("token 0 of 4 is cut short");
    write_file(20240328, 2, 0, 0, tokens, 4);
    check_refused("claims 0 tokens");
    write_file(20240328, 2, 4, 4, tokens, 4);
    check_refused("claims 4 tokens and end-of-text 4");
    write_file(20240328, 2, 4000000000u, 3, tokens, 4);
    check_refused("claims 4000000000 tokens");
    write_file(20240328, 2, 5, 3, tokens, 4);
    check_refused("token 4 of 5 is cut short");
    write_file(20240328, 2, 3, 2, tokens, 4);
    check_refused("14 bytes after its last token");
    write_file(20240328, 2, 4, 3, empty, 4);
    check_refused("token 1 of 4 is empty");
    size_t bytes = write_file(20240328, 2, 4, 3, tokens, 4);
    cut_file(bytes - 1);
    check_refused("token 3 of 4 is cut short");
    cut_file(1024);
    check_refused("claims 4 tokens");
    cut_file(1023);
    check_refused("not a tokenizer file");
    Tokenizer tokenizer;
    assert_false(tokenizer_open(&tokenizer, "/no/such/tokenizer.bin", &error));
    check_says(&error, "/no/such/tokenizer.bin can't be read: No such file");
}

static void check_printed(const char *text, size_t bytes, const char *expected) {
    char *printed;
    size_t length;
    FILE *stream = open_memstream(&printed, &length);
    token_print_safe(stream, text, bytes);
    fclose(stream);
    assert_string_equal(printed, expected);
    free(printed);
}

static void test_print_safe(void **state) {
    (void)state;
    check_printed("plain\n\ttext", 11, "plain\n\ttext");
    check_printed("caf\xc3\xa9 \xe4\xbd\xa0 \xf0\x9f\x98\x80", 14, "caf\xc3\xa9 \xe4\xbd\xa0 \xf0\x9f\x98\x80");
    check_printed("\x1b[2J\r\b\x07\x7f\0", 9, "\\x1B[2J\\x0D\\x08\\x07\\x7F\\x00");
    check_printed("\xc2\x9b"
                  "2J\xc2\xa0",
                  6, "\\xC2\\x9B2J\xc2\xa0"); // CSI in one character
    check_printed("\xff\xc3", 2, "\\xFF\\xC3");
    check_printed("\xe4\xbd", 2, "\\xE4\\xBD");
    check_printed("", 0, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_tokenizers_library),
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_byte_tokenizer),
        cmocka_unit_test(test_jsons),
        cmocka_unit_test(test_version_1),
        cmocka_unit_test(test_long_text),
        cmocka_unit_test(test_hostile_files),
        cmocka_unit_test(test_print_safe),
    };
    return cmocka_run_group_tests(tests, make_directory_and_path, remove_directory);
}
