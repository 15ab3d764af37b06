/*
Blends: the text and what it must refuse, how many samples of each source any stretch of a run has,
that each source's samples come in order and none twice, and that reading in other pieces reads the
same.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "llmc/data/blend.h"
#include "files.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// A shard of tokens first, first + 1, ...
static void write_shard(const char *name, int first, int count) {
    char *path = format_string("%s/%s", directory, name);
    int32_t header[256] = {20240520, 1, count};
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(header, sizeof(header), 1, file), 1);
    for (int i = 0; i < count; i++) {
        uint16_t token = (uint16_t)(first + i);
        assert_int_equal(fwrite(&token, sizeof(token), 1, file), 1);
    }
    assert_int_equal(fclose(file), 0);
    free(path);
}

// `text` has # for the directory. To be freed.
static char *in_directory(const char *text) {
    char *result = format_string("%s", "");
    for (; *text; text++) {
        char *longer = *text == '#' ? format_string("%s%s", result, directory) : format_string("%s%c", result, *text);
        free(result);
        result = longer;
    }
    return result;
}

static Blend parsed(const char *text) {
    Blend blend;
    Error error;
    char *whole = in_directory(text);
    if (!blend_parse(&blend, whole, &error)) fail_msg("%s", error.message);
    free(whole);
    return blend;
}

static void check_pattern(const char *text) {
    Blend blend = parsed(text);
    char *whole = in_directory(text);
    assert_true(blend.is_pattern && blend.num_sources == 1 && blend.num_phases == 1);
    assert_string_equal(blend.sources[0].pattern, whole);
    blend_place(&blend, 100, 8);
    for (int64_t s = 0; s < 1000; s++) {
        assert_int_equal(blend_sample(&blend, s).sample, s);
    }
    assert_int_equal(blend_fingerprint(&blend, 100), 0);
    free(whole);
    blend_close(&blend);
}

// What is one pattern without weights stays one; and so does what matches a file, whatever its
// name.
static void test_patterns(void **state) {
    (void)state;
    check_pattern("data/*.bin");
    check_pattern("");
    check_pattern("a,b");
    check_pattern("user@host:dir/train_*.bin");
    check_pattern("12:34:56/train.bin");
    check_pattern("a@b%,c");
    write_shard("odd:0.5", 0, 10);
    write_shard("odd:0.7,odd:0.3@0%", 0, 10);
    check_pattern("#/odd:0.5");
    check_pattern("#/odd:0.*");
    check_pattern("#/odd:0.7,odd:0.3@0%");
}

static void test_parse(void **state) {
    (void)state;
    Blend blend = parsed("a:0.7,b:0.3@0%,b:1@60%");
    assert_true(!blend.is_pattern && blend.num_sources == 2 && blend.num_phases == 2);
    assert_string_equal(blend.sources[0].pattern, "a");
    assert_string_equal(blend.sources[1].pattern, "b");
    assert_true(blend.phases[0].start == 0 && blend.phases[1].start == 0.6);
    assert_true(blend.phases[0].weight[0] == 0.7 && blend.phases[0].weight[1] == 0.3);
    assert_true(blend.phases[1].weight[0] == 0 && blend.phases[1].weight[1] == 1);
    blend_close(&blend);
    blend = parsed("x@y:z/*.bin:1"); // without a phase; a pattern with ':' and '@'
    assert_string_equal(blend.sources[0].pattern, "x@y:z/*.bin");
    assert_int_equal(blend.num_phases, 1);
    blend_close(&blend);
    blend = parsed("a:0.333,b:0.333,c:0.333@0%"); // thirds
    for (int i = 0; i < 3; i++) {
        assert_true(fabs(blend.phases[0].weight[i] - 1.0 / 3) < 1e-15);
    }
    blend_close(&blend);
}

static void test_refused(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } ROWS[] = {
        {"a:0.7,b", "'b' has no weight"},
        {"a:0.7,b@0%", "'b' has no weight"},
        {"a,b:1", "'a' has no weight"},
        {"a:0.7,b:x", "weight of 'b'"},
        {"a:0.7,b:0.3x", "weight of 'b'"},
        {"a:0.7,b:", "weight of 'b'"},
        {"a:1,b:0", "weight of 'b'"},
        {"a:1.5,b:-0.5", "weight of 'a'"},
        {"a:nan,b:1", "weight of 'a'"},
        {"a:0x1,b:1", "weight of 'a'"},
        {":1", "no GLOB"},
        {"a:0.7,b:0.2", "add up to 0.9"},
        {"a:0.7,b:0.3@0%,b:0.9@60%", "from 60 % on add up to 0.9"},
        {"a:0.5,a:0.5", "'a' twice"},
        {"a:0.7,b:0.3@10%", "first phase must begin at 0%"},
        {"a:1@0%,b:1@60%,a:1@60%", "ascending"},
        {"a:1@0%,b:1@60%,a:1@50%", "ascending"},
        {"a:1@0%,b:1@100%", "below 100%"},
        {"a:1@0%,b:1@-5%", "below 100%"},
        {"a:1@0%,b:1@60", "not '60'"},
        {"a:1@0%,b:1", "@PERCENT%"},
        {"a:1@0%,", "'' has no weight"},
        {",a:1", "'' has no weight"},
    };
    for (size_t i = 0; i < sizeof(ROWS) / sizeof(ROWS[0]); i++) {
        Blend blend;
        Error error = {""};
        if (blend_parse(&blend, ROWS[i].text, &error)) fail_msg("'%s' was taken", ROWS[i].text);
        if (!strstr(error.message, ROWS[i].part)) fail_msg("'%s': %s", ROWS[i].text, error.message);
        assert_non_null(strstr(error.message, "--train-data"));
        assert_int_equal(blend.num_sources, 0);
    }
    char many[1000] = "a:1@0%";
    for (int i = 1; i <= BLEND_MAX_PHASES; i++) {
        snprintf(many + strlen(many), sizeof(many) - strlen(many), ",a:1@%d%%", i);
    }
    Blend blend;
    Error error;
    assert_false(blend_parse(&blend, many, &error));
    assert_non_null(strstr(error.message, "phases at most"));
    many[0] = '\0';
    for (int i = 0; i <= BLEND_MAX_SOURCES; i++) {
        snprintf(many + strlen(many), sizeof(many) - strlen(many), "%sf%d:0.05", i ? "," : "", i);
    }
    assert_false(blend_parse(&blend, many, &error));
    assert_non_null(strstr(error.message, "sources at most"));
}

static const char *const TEXTS[] = {
    "a:0.7,b:0.3@0%,b:1@60%",
    "a:0.5,b:0.5",
    "a:0.333,b:0.333,c:0.334@0%,c:0.1,a:0.9@25%,b:0.6,d:0.4@25.5%,d:1@99%",
    "a:0.01,b:0.02,c:0.03,d:0.04,e:0.9",
    "a:0.9,b:0.05,c:0.03,d:0.019999,e:0.000001@0%,e:1@1%",
};
enum { NUM_TEXTS = sizeof(TEXTS) / sizeof(TEXTS[0]) };

// Each source's samples are 0, 1, 2, ... in order through all phases, and blend_counts says how
// many there have been. In a phase a source is never further from its share than a rounding for
// each source before it and its own: half of one each.
static void test_order_and_counts(void **state) {
    (void)state;
    enum { STEPS = 1000, BATCH = 12 };
    for (int t = 0; t < NUM_TEXTS; t++) {
        Blend blend = parsed(TEXTS[t]);
        blend_place(&blend, STEPS, BATCH);
        int64_t seen[BLEND_MAX_SOURCES] = {0}, counts[BLEND_MAX_SOURCES], at_start[BLEND_MAX_SOURCES] = {0};
        double worst = 0;
        int phase = 0;
        for (int64_t s = 0; s < STEPS * BATCH; s++) {
            if (phase + 1 < blend.num_phases && blend.phases[phase + 1].first_sample == s) {
                phase++;
                memcpy(at_start, seen, sizeof(seen));
            }
            BlendSample from = blend_sample(&blend, s);
            assert_int_equal(from.sample, seen[from.source]);
            assert_true(blend.phases[phase].weight[from.source] > 0);
            seen[from.source]++;
            blend_counts(&blend, s + 1, counts);
            double n = (double)(s + 1 - blend.phases[phase].first_sample);
            for (int i = 0; i < blend.num_sources; i++) {
                assert_int_equal(counts[i], seen[i]);
                double off = fabs((double)(seen[i] - at_start[i]) - n * blend.phases[phase].weight[i]);
                worst = fmax(worst, off);
                assert_true(off <= 0.5 * (i + 1) + 1e-4);
            }
        }
        printf("%s: at most %.3f samples from a source's share\n", TEXTS[t], worst);
        blend_close(&blend);
    }
}

// Exact where shares are whole numbers, and at numbers of samples whose products with weights
// overflow 64 bits.
static void test_exact(void **state) {
    (void)state;
    int64_t counts[BLEND_MAX_SOURCES];
    Blend blend = parsed("a:0.25,b:0.5,c:0.25");
    blend_place(&blend, INT64_MAX, 1);
    for (int64_t n = 4; n < (int64_t)1 << 61; n *= 2) {
        blend_counts(&blend, n, counts);
        assert_true(counts[0] == n / 4 && counts[1] == n / 2 && counts[2] == n / 4);
        BlendSample from = blend_sample(&blend, n);
        assert_int_equal(from.sample, counts[from.source]);
    }
    blend_close(&blend);
    blend = parsed("a:0.7,b:0.3@0%,b:1@60%");
    blend_place(&blend, 10, 100); // phases of 600 and 400 samples
    blend_counts(&blend, 600, counts);
    assert_true(counts[0] == 420 && counts[1] == 180);
    blend_counts(&blend, 1000, counts);
    assert_true(counts[0] == 420 && counts[1] == 580);
    blend_close(&blend);
}

// Pieces of any size, in any order, read what one piece does: two sources of distinct tokens,
// several epochs of each.
static void test_reading(void **state) {
    (void)state;
    enum { LENGTH = 8, SAMPLES = 240 };
    write_shard("first.bin", 0, 20 * LENGTH + 1);
    write_shard("second.bin", 1000, 7 * LENGTH + 1);
    Blend blend = parsed("#/first.bin:0.6,#/second.bin:0.4@0%,#/second.bin:0.2,#/first.bin:0.8@50%");
    Error error;
    if (!blend_open(&blend, LENGTH, 5, 2000, &error)) fail_msg("%s", error.message);
    blend_place(&blend, SAMPLES / 4, 4);
    assert_int_equal(blend.num_tokens, 27 * LENGTH + 2);
    assert_int_equal(blend.num_windows, 27);
    assert_int_equal(blend.num_files, 2);
    static int32_t tokens[SAMPLES][LENGTH], targets[SAMPLES][LENGTH], others[SAMPLES][LENGTH], after[SAMPLES][LENGTH];
    assert_true(blend_batch(&blend, 0, SAMPLES, tokens[0], targets[0], &error));
    static const int PIECES[] = {1, 2, 3, 7, 119, 240};
    for (size_t p = 0; p < sizeof(PIECES) / sizeof(PIECES[0]); p++) {
        memset(others, 0, sizeof(others));
        for (int last = SAMPLES; last > 0; last -= PIECES[p]) { // from the end
            int first = last > PIECES[p] ? last - PIECES[p] : 0;
            assert_true(blend_batch(&blend, first, last - first, others[first], after[first], &error));
        }
        assert_memory_equal(others, tokens, sizeof(tokens));
        assert_memory_equal(after, targets, sizeof(targets));
    }
    // Each source's samples are its loader's; every epoch has each window once.
    int64_t seen[2] = {0};
    int used[2][20] = {{0}};
    for (int s = 0; s < SAMPLES; s++) {
        int source = tokens[s][0] >= 1000, window = (tokens[s][0] - 1000 * source) / LENGTH;
        int windows = source ? 7 : 20;
        assert_int_equal(targets[s][LENGTH - 1], tokens[s][LENGTH - 1] + 1);
        assert_int_equal(used[source][window], seen[source] / windows);
        used[source][window]++;
        seen[source]++;
    }
    assert_true(seen[0] == 72 + 96 && seen[1] == 48 + 24);
    blend_close(&blend);
    // A pattern reads what its loader alone does.
    blend = parsed("#/first.bin");
    char *path = in_directory("#/first.bin");
    DataLoader loader;
    assert_true(blend_open(&blend, LENGTH, 5, 2000, &error));
    blend_place(&blend, INT64_MAX, 4);
    assert_true(dataloader_open(&loader, path, LENGTH, 5, true, 2000, &error));
    assert_true(blend_batch(&blend, 0, 100, tokens[0], targets[0], &error));
    assert_true(dataloader_batch(&loader, 0, 100, others[0], after[0], &error));
    assert_memory_equal(tokens, others, 100 * sizeof(tokens[0]));
    assert_memory_equal(targets, after, 100 * sizeof(tokens[0]));
    dataloader_close(&loader);
    blend_close(&blend);
    free(path);
}

static void test_a_source_that_is_missing(void **state) {
    (void)state;
    Blend blend = parsed("#/first.bin:0.6,#/none.bin:0.4");
    Error error;
    assert_false(blend_open(&blend, 8, 5, 2000, &error));
    assert_non_null(strstr(error.message, "none.bin"));
    assert_int_equal(blend.num_sources, 0);
}

// It changes with what the samples so far depend on, and with nothing else.
static void test_fingerprint(void **state) {
    (void)state;
    enum { SO_FAR = 300 };
    static const struct {
        const char *text;
        int64_t steps;
        bool is_same;
    } ROWS[] = {{"a:0.7,b:0.3@0%,b:1@60%", 100, true},
                {"a:0.7,b:0.3@0%,a:1@80%", 100, true},
                {"a:0.7,b:0.3", 100, true},
                {"a:0.7,b:0.3@0%,b:1@60%", 200, true},
                {"a:0.7,b:0.3@0%,b:1@20%", 100, false},
                {"a:0.7,b:0.3@0%,b:1@60%", 40, false},
                {"a:0.71,b:0.29@0%,b:1@60%", 100, false},
                {"b:0.3,a:0.7@0%,b:1@60%", 100, false}};
    int64_t first = 0;
    for (size_t i = 0; i < sizeof(ROWS) / sizeof(ROWS[0]); i++) {
        Blend blend = parsed(ROWS[i].text);
        blend_place(&blend, ROWS[i].steps, 10);
        int64_t fingerprint = blend_fingerprint(&blend, SO_FAR);
        assert_true(fingerprint > 0 && fingerprint < (int64_t)1 << 52);
        if (i == 0) first = fingerprint;
        assert_true((fingerprint == first) == ROWS[i].is_same);
        blend_close(&blend);
    }
}

// A phase counts from the first sample that it gives, and not a sample sooner; so do the tokens of
// a source that it is the first to take from.
static void test_fingerprint_where_a_phase_begins(void **state) {
    (void)state;
    write_shard("a.bin", 0, 100);
    write_shard("b.bin", 1000, 100);
    Blend one = parsed("#/a.bin:1"), two = parsed("#/a.bin:1@0%,#/b.bin:1@60%");
    Error error;
    assert_true(blend_open(&one, 8, 5, 2000, &error) && blend_open(&two, 8, 5, 2000, &error));
    blend_place(&one, 100, 10);
    blend_place(&two, 100, 10);
    int64_t first = two.phases[1].first_sample;
    assert_int_equal(first, 600);
    assert_true(blend_fingerprint(&one, first) == blend_fingerprint(&two, first));
    assert_true(blend_fingerprint(&one, first + 1) != blend_fingerprint(&two, first + 1));
    assert_true(blend_hash(&one, first) == blend_hash(&two, first));
    assert_true(blend_hash(&one, first + 1) != blend_hash(&two, first + 1));
    blend_close(&one);
    blend_close(&two);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_parse),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_order_and_counts),
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_reading),
        cmocka_unit_test(test_a_source_that_is_missing),
        cmocka_unit_test(test_fingerprint),
        cmocka_unit_test(test_fingerprint_where_a_phase_begins),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
