/*
The data loader on token files made here: both widths, shards, order, files over 2 GiB, and every
file it must refuse.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "llmc/data/dataloader.h"
#include "files.h"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char *in_directory(const char *name) {
    static char path[2][256];
    static int next;
    next = !next;
    snprintf(path[next], sizeof(path[next]), "%s/%s", directory, name);
    return path[next];
}

static void write_bytes(const char *name, const void *data, size_t bytes, bool append) {
    FILE *file = fopen(in_directory(name), append ? "ab" : "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static void write_header(const char *name, int magic, int version, uint32_t tokens) {
    int32_t header[256] = {magic, version, (int32_t)tokens};
    write_bytes(name, header, sizeof(header), false);
}

// A shard of `count` tokens first, first + 1, ...
static void write_shard16(const char *name, int first, int count) {
    write_header(name, 20240520, 1, (uint32_t)count);
    for (int i = 0; i < count; i++) {
        uint16_t token = (uint16_t)(first + i);
        write_bytes(name, &token, sizeof(token), true);
    }
}

static void write_shard32(const char *name, uint32_t first, int count) {
    write_header(name, 20240801, 7, (uint32_t)count);
    for (int i = 0; i < count; i++) {
        uint32_t token = first + (uint32_t)i;
        write_bytes(name, &token, sizeof(token), true);
    }
}

static void open_loader(DataLoader *loader, const char *pattern, int64_t seq_len, uint64_t seed, bool shuffle) {
    Error error;
    if (!dataloader_open(loader, in_directory(pattern), seq_len, seed, shuffle, 1 << 20, &error)) {
        fail_msg("%s", error.message);
    }
}

static void read_batch(const DataLoader *loader, int64_t first, int64_t count, int32_t *tokens, int32_t *targets) {
    Error error;
    if (!dataloader_batch(loader, first, count, tokens, targets, &error)) fail_msg("%s", error.message);
}

// Opens `pattern` with sequences of 8 and a vocabulary of 100. `sentence` has @ for the directory.
static void refuse(const char *pattern, const char *sentence) {
    DataLoader loader;
    Error error;
    char expected[1024] = "";
    if (dataloader_open(&loader, in_directory(pattern), 8, 1, true, 100, &error)) fail_msg("%s is accepted", pattern);
    for (const char *p = sentence; *p; p++) {
        size_t used = strlen(expected);
        snprintf(expected + used, sizeof(expected) - used, "%s", *p == '@' ? directory : (char[]){*p, 0});
    }
    assert_string_equal(error.message, expected);
    assert_null(loader.shards);
}

// Three shards of 40, 1 and 60 tokens, named against the order of writing: the numbers 0 to 100.
static void write_three_shards(void) {
    write_shard16("three_2.bin", 41, 60);
    write_shard16("three_0.bin", 0, 40);
    write_shard16("three_1.bin", 40, 1);
}

// In the stream's order every window begins where the one before ends, across all shard ends.
static void test_sequential(void **state) {
    (void)state;
    write_three_shards();
    DataLoader loader;
    open_loader(&loader, "three_*.bin", 7, 1, false);
    assert_int_equal(loader.num_shards, 3);
    assert_int_equal(loader.num_tokens, 101);
    assert_int_equal(loader.num_windows, 14); // 14 * 7 + 1 = 99 tokens; 15 windows would need 106
    int32_t tokens[28 * 7], targets[28 * 7];
    read_batch(&loader, 0, 28, tokens, targets);
    for (int i = 0; i < 28 * 7; i++) {
        assert_int_equal(tokens[i], i % 98);
        assert_int_equal(targets[i], i % 98 + 1);
    }
    dataloader_close(&loader);
    open_loader(&loader, "three_*.bin", 100, 1, false);
    assert_int_equal(loader.num_windows, 1); // exactly 100 + 1 tokens
    dataloader_close(&loader);
}

static void test_uint32(void **state) {
    (void)state;
    write_shard32("wide.bin", 70000, 30);
    DataLoader loader;
    open_loader(&loader, "wide.bin", 8, 1, false);
    int32_t tokens[8], targets[8];
    read_batch(&loader, 2, 1, tokens, targets);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(tokens[i], 70016 + i);
        assert_int_equal(targets[i], 70017 + i);
    }
    dataloader_close(&loader);
    open_loader(&loader, "wide.bin", 10, 1, false);
    assert_int_equal(loader.num_windows, 2); // 30 tokens: the third window would lack its last target
    dataloader_close(&loader);
}

// The windows of epoch `epoch`, by the token they begin with (a multiple of 7).
static void epoch_order(const DataLoader *loader, int64_t epoch, int order[14]) {
    int32_t tokens[14 * 7], targets[14 * 7];
    read_batch(loader, epoch * 14, 14, tokens, targets);
    for (int i = 0; i < 14; i++) {
        order[i] = tokens[i * 7] / 7;
        for (int t = 0; t < 7; t++) {
            assert_int_equal(tokens[i * 7 + t], order[i] * 7 + t);
            assert_int_equal(targets[i * 7 + t], order[i] * 7 + t + 1);
        }
    }
}

// Every epoch has every window once, in an order of its own, which another seed changes and the
// same seed repeats.
static void test_shuffled(void **state) {
    (void)state;
    write_three_shards();
    DataLoader loader, same, other;
    open_loader(&loader, "three_*.bin", 7, 1, true);
    open_loader(&same, "three_*.bin", 7, 1, true);
    open_loader(&other, "three_*.bin", 7, 2, true);
    int previous[14] = {0}, order[14], again[14];
    for (int epoch = 0; epoch < 20; epoch++) {
        int seen[14] = {0};
        bool sorted = true;
        epoch_order(&loader, epoch, order);
        for (int i = 0; i < 14; i++) {
            assert_int_equal(seen[order[i]]++, 0);
            sorted = sorted && order[i] == i;
        }
        assert_false(sorted);
        assert_memory_not_equal(order, previous, sizeof(order));
        memcpy(previous, order, sizeof(order));
        epoch_order(&same, epoch, again);
        assert_memory_equal(order, again, sizeof(order));
        epoch_order(&other, epoch, again);
        assert_memory_not_equal(order, again, sizeof(order));
    }
    dataloader_close(&loader);
    dataloader_close(&same);
    dataloader_close(&other);
}

// Two epochs in one batch, in batches of 3, one by one from the end: the same samples.
static void test_batch_split(void **state) {
    (void)state;
    write_three_shards();
    DataLoader loader;
    open_loader(&loader, "three_*.bin", 7, 3, true);
    int32_t tokens[30 * 7], targets[30 * 7], part[3 * 7], part_targets[3 * 7];
    read_batch(&loader, 0, 30, tokens, targets);
    for (int first = 0; first < 30; first += 3) {
        read_batch(&loader, first, 3, part, part_targets);
        assert_memory_equal(part, tokens + first * 7, sizeof(part));
        assert_memory_equal(part_targets, targets + first * 7, sizeof(part));
    }
    for (int sample = 29; sample >= 0; sample--) {
        read_batch(&loader, sample, 1, part, part_targets);
        assert_memory_equal(part, tokens + sample * 7, 7 * sizeof(*part));
    }
    dataloader_close(&loader);
}

// A sparse file of `count` tokens, 0 but for `last`, the last one.
static void write_sparse(const char *name, int magic, int version, int64_t count, int width, uint32_t last) {
    write_header(name, magic, version, (uint32_t)count);
    assert_int_equal(truncate(in_directory(name), 1024 + count * width), 0);
    int file = open(in_directory(name), O_WRONLY);
    assert_true(file >= 0);
    assert_int_equal(pwrite(file, &last, (size_t)width, 1024 + (count - 1) * width), width);
    close(file);
}

static void check_large(const char *name, int64_t count, uint32_t last) {
    DataLoader loader;
    open_loader(&loader, name, 4, 1, false);
    assert_int_equal(loader.num_tokens, count);
    assert_int_equal(loader.num_windows, (count - 1) / 4);
    int32_t tokens[4], targets[4];
    read_batch(&loader, loader.num_windows - 1, 1, tokens, targets);
    const int32_t zeros[4] = {0}, expected[4] = {0, 0, 0, (int32_t)last};
    assert_memory_equal(tokens, zeros, sizeof(zeros));
    assert_memory_equal(targets, expected, sizeof(expected));
    dataloader_close(&loader);
    assert_int_equal(unlink(in_directory(name)), 0);
}

// 2.4 GB, 8.6 GB and the most tokens a header can claim, a multiple of 4 and one more: sparse, so
// they take no disk.
static void test_large_files(void **state) {
    (void)state;
    write_sparse("large.bin", 20240520, 1, 1200000001, 2, 777);
    check_large("large.bin", 1200000001, 777);
    write_sparse("large.bin", 20240801, 7, 2147483649, 4, 77777);
    check_large("large.bin", 2147483649, 77777);
    write_sparse("large.bin", 20240520, 1, 4294967293, 2, 777);
    check_large("large.bin", 4294967293, 777);
}

// Where there are more tokens than are checked at the start, an id that is too large is found when
// it is read.
static void test_late_vocabulary_error(void **state) {
    (void)state;
    write_sparse("late.bin", 20240520, 1, 70000001, 2, 100);
    DataLoader loader;
    Error error;
    int32_t tokens[8], targets[8];
    if (!dataloader_open(&loader, in_directory("late.bin"), 8, 1, false, 100, &error)) fail_msg("%s", error.message);
    assert_true(dataloader_batch(&loader, 0, 1, tokens, targets, &error));
    assert_false(dataloader_batch(&loader, loader.num_windows - 1, 1, tokens, targets, &error));
    assert_non_null(strstr(error.message, "late.bin': token number 70000000 has id 100, but the model's vocabulary has "
                                          "100 ids; use --vocab-size 101 or more"));
    loader.vocab_size = 0;
    assert_true(dataloader_hash(&loader) != HASH_START); // it takes tokens as they are
    dataloader_close(&loader);
}

// Returns the hash of 1000 windows of two tokens, which are `late` from window 500 on and `early`
// before.
static uint64_t hash_of_halves(uint16_t early, uint16_t late) {
    enum { COUNT = 1000 * 2 + 1 };
    uint16_t tokens[COUNT];
    for (int i = 0; i < COUNT; i++) {
        tokens[i] = i < 500 * 2 ? early : late;
    }
    write_header("halves.bin", 20240520, 1, COUNT);
    write_bytes("halves.bin", tokens, sizeof(tokens), true);
    DataLoader loader;
    open_loader(&loader, "halves.bin", 2, 1, false);
    assert_int_equal(loader.num_windows, 1000);
    uint64_t hash = dataloader_hash(&loader);
    dataloader_close(&loader);
    return hash;
}

// The hash looks at windows of either half of the data.
static void test_hash(void **state) {
    (void)state;
    uint64_t hash = hash_of_halves(7, 7);
    assert_true(hash == hash_of_halves(7, 7) && hash != hash_of_halves(7, 8) && hash != hash_of_halves(8, 7));
}

static void test_refused_files(void **state) {
    (void)state;
    write_shard16("good_0.bin", 0, 20);
    assert_int_equal(mkdir(in_directory("empty"), 0777), 0);
    refuse(
        "empty/*.bin",
        "no file matches '@/empty/*.bin', and '@/empty/' has no .bin file at all; data/README.md says how to make one");
    refuse("empty/nothing/*.bin", "no file matches '@/empty/nothing/*.bin', and '@/empty/nothing/' has no .bin file at "
                                  "all; data/README.md says how to make one");
    assert_int_equal(mkdir(in_directory("v[2]"), 0777), 0);
    write_shard16("v[2]/data.bin", 0, 20);
    refuse("v[2]/*.bin",
           "no file matches '@/v[2]/*.bin', though '@/v[2]/' is there: [, * and ? have a meaning in a pattern, "
           "write \\[, \\* and \\? for the characters");
    refuse("god_0.bin", "no file matches '@/god_0.bin'; did you mean '@/good_0.bin'?");
    assert_int_equal(mkdir(in_directory("one"), 0777), 0);
    write_shard16("one/data.bin", 0, 20);
    refuse("one/xyz_*.bin", "no file matches '@/one/xyz_*.bin'; what '@/one/' has is 'data.bin'");
    write_shard16("one/more.bin", 0, 20);
    refuse("one/xyz_*.bin", "no file matches '@/one/xyz_*.bin'; what '@/one/' has is 'data.bin' and others");
    refuse("empty", "'@/empty' is a directory: name the token files in it, as in '@/empty/train_*.bin'");
    assert_int_equal(symlink("nowhere", in_directory("dangling.bin")), 0);
    refuse("dangling.bin", "can't open '@/dangling.bin': No such file or directory; check the path and its "
                           "permissions");
    assert_int_equal(mkfifo(in_directory("pipe.bin"), 0666), 0);
    refuse("pipe.bin", "'@/pipe.bin' is not a regular file: name files that data/prepare.py made");
    write_bytes("short.bin", "hello", 5, false);
    refuse("short.bin", "'@/short.bin' is not a token file: it has 5 bytes, fewer than the header's 1024");
    write_header("words.bin", 20240328, 2, 0);
    refuse("words.bin",
           "'@/words.bin' is a tokenizer, not a token file: name those alone, as in 'my-data/train_*.bin'");
    const char *foreign = "'@/foreign.bin' is not a token file: its first numbers are %d and %d, not 20240520 and 1 "
                          "(uint16 tokens) or 20240801 and 7 (uint32); data/prepare.py makes token files from text";
    const int headers[][2] = {{20240520, 7}, {20240801, 1}, {0, 0}, {-1, 1}};
    for (int i = 0; i < 4; i++) {
        char sentence[512];
        snprintf(sentence, sizeof(sentence), foreign, headers[i][0], headers[i][1]);
        write_header("foreign.bin", headers[i][0], headers[i][1], 0);
        refuse("foreign.bin", sentence);
    }
}

static void test_wrong_sizes(void **state) {
    (void)state;
    write_shard16("cut.bin", 0, 20);
    assert_int_equal(truncate(in_directory("cut.bin"), 1024 + 39), 0);
    refuse("cut.bin", "'@/cut.bin' is truncated: its header claims 20 tokens, 1064 bytes in all, and it has 1063 "
                      "bytes; prepare it again, or copy it whole");
    assert_int_equal(truncate(in_directory("cut.bin"), 1024 + 42), 0);
    refuse("cut.bin", "'@/cut.bin' is too long: its header claims 20 tokens, 1064 bytes in all, and it has 1066 bytes; "
                      "prepare it again, or copy it whole");
    write_header("huge.bin", 20240801, 7, UINT32_MAX);
    refuse("huge.bin", "'@/huge.bin' is truncated: its header claims 4294967295 tokens, 17179870204 bytes in all, and "
                       "it has 1024 bytes; prepare it again, or copy it whole");
    write_shard16("few_0.bin", 0, 5);
    write_shard16("few_1.bin", 0, 0);
    write_shard16("few_2.bin", 0, 3);
    refuse("few_*.bin", "'@/few_*.bin' has 8 tokens in all, but one sequence takes 9 (--seq-len and one to predict); "
                        "give more data or a shorter --seq-len");
    refuse("few_1.bin", "'@/few_1.bin' has 0 tokens in all, but one sequence takes 9 (--seq-len and one to predict); "
                        "give more data or a shorter --seq-len");
}

static void test_wrong_tokens(void **state) {
    (void)state;
    write_shard16("vocabulary_0.bin", 0, 50);
    write_shard16("vocabulary_1.bin", 50, 60);
    refuse("vocabulary_*.bin", "'@/vocabulary_1.bin': token number 50 has id 100, but the model's vocabulary has 100 "
                               "ids; use --vocab-size 101 or more, or the tokenizer that the model was made for");
    write_shard32("negative.bin", UINT32_MAX, 20);
    refuse("negative.bin", "'@/negative.bin': token number 0 has id 4294967295, but the model's vocabulary has 100 "
                           "ids; use --vocab-size 4294967296 or more, or the tokenizer that the model was made for");
    write_shard16("mixed_0.bin", 0, 20);
    write_shard32("mixed_1.bin", 0, 20);
    refuse("mixed_*.bin", "'@/mixed_0.bin' has 2-byte tokens and '@/mixed_1.bin' 4-byte ones: they come from different "
                          "tokenizers; name only files of one data set");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sequential),    cmocka_unit_test(test_uint32),
        cmocka_unit_test(test_shuffled),      cmocka_unit_test(test_batch_split),
        cmocka_unit_test(test_large_files),   cmocka_unit_test(test_late_vocabulary_error),
        cmocka_unit_test(test_refused_files), cmocka_unit_test(test_wrong_sizes),
        cmocka_unit_test(test_wrong_tokens),  cmocka_unit_test(test_hash),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
