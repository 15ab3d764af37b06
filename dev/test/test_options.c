/*
The options parser on a small table: every way to give a value, every way to get one wrong, the
help, the texts.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "llmc/run/options.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const COLOURS[] = {"red", "green", "blue", NULL};

// The variables behind the table, and the table.
typedef struct {
    const char *data, *recipe;
    int64_t layers, max_tokens;
    double rate;
    bool shuffle, resume;
    int colour;
    StringList operands;
    Option options[12];
} Fixture;

enum { COUNT = 12, MAX_TOKENS = 5, RATE = 6, OPERAND = 9 }; // rows of the table

static void set_up(Fixture *f) {
    *f = (Fixture){.recipe = "green", .layers = 12, .rate = 3e-4, .shuffle = true, .colour = -1};
    const Option options[] = {
        GROUP("Data"),
        STRING("data", "GLOB", &f->data, "token files"),
        FLAG("shuffle", &f->shuffle, "shuffle windows"),
        GROUP("Model"),
        INT("layers", "N", &f->layers, 1, INFINITY,
            "number of blocks, each of which has attention and an FFN, and that is a help long enough to be wrapped"),
        INT("max-tokens", "N", &f->max_tokens, 0, 0, "tokens"),
        FLOAT("rate", "X", &f->rate, 0, 1, "rate"),
        CHOICE("colour", "COLOUR", &f->colour, COLOURS, "as an index"),
        NAME("recipe", "NAME", &f->recipe, COLOURS, "as a string"),
        REPEATED("operand", "A=B", &f->operands,
                 "one operand of one GEMM, in a help whose last word would end one column too far-aw"),
        GROUP("Output"),
        FLAG("resume", &f->resume, "go on"),
    };
    memcpy(f->options, options, sizeof(options));
}

// Splits `line` at its spaces and parses it.
static bool parse(Fixture *f, const char *line, Error *error) {
    static char words[1024];
    char *argv[64] = {"program"};
    int argc = 1;
    snprintf(words, sizeof(words), "%s", line);
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " "))
        argv[argc++] = word;
    return options_parse(f->options, COUNT, argc, argv, error);
}

static void accept(Fixture *f, const char *line) {
    Error error;
    set_up(f);
    if (!parse(f, line, &error)) fail_msg("'%s' is refused: %s", line, error.message);
}

static void refuse(const char *line, const char *sentence) {
    Fixture f;
    Error error;
    set_up(&f);
    if (parse(&f, line, &error)) fail_msg("'%s' is accepted", line);
    assert_string_equal(error.message, sentence);
}

static void test_values(void **state) {
    (void)state;
    Fixture f;
    accept(&f, "");
    assert_true(f.layers == 12 && f.rate == 3e-4 && f.shuffle && !f.resume && !f.data && f.colour == -1);
    accept(&f, "--data a*.bin --no-shuffle --layers=3 --rate 1e-1 --colour blue --recipe=red --resume");
    assert_string_equal(f.data, "a*.bin");
    assert_string_equal(f.recipe, "red");
    assert_true(f.layers == 3 && f.rate == 0.1 && !f.shuffle && f.resume && f.colour == 2);
    accept(&f, "--data=a=b --operand wgrad-x=bf16 --operand=fprop-x=e4m3 --shuffle=false --resume=true");
    assert_string_equal(f.data, "a=b");
    assert_int_equal(f.operands.count, 2);
    assert_string_equal(f.operands.items[0], "wgrad-x=bf16");
    assert_string_equal(f.operands.items[1], "fprop-x=e4m3");
    assert_true(!f.shuffle && f.resume);
    accept(&f, "--rate 0");
    assert_true(f.rate == 0);
}

static void test_whole_numbers(void **state) {
    (void)state;
    const struct {
        const char *text;
        int64_t value;
    } good[] = {{"0", 0},
                {"-7", -7},
                {"+7", 7},
                {"500K", 500000},
                {"500k", 500000},
                {"1.5M", 1500000},
                {"1.1G", 1100000000},
                {"2B", 2000000000},
                {"1.5T", 1500000000000},
                {"1e9", 1000000000},
                {"2.5e3", 2500},
                {"1000e-3", 1},
                {"3.0", 3},
                {".5K", 500},
                {"9223372036854775807", INT64_MAX},
                {"9223372036.854775807G", INT64_MAX}};
    const char *bad[] = {"",
                         "x",
                         "1x",
                         "1KK",
                         "1.5",
                         "1e-1",
                         "1.2345K",
                         "0x10",
                         "1e",
                         "1e+",
                         "1e99",
                         "-",
                         ".",
                         "1..2",
                         "--1",
                         "9223372036854775808",
                         "9223372036854775807K",
                         "1 ",
                         " 1",
                         "1e9K"};
    Fixture f;
    Error error;
    set_up(&f);
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        if (!option_set(&f.options[MAX_TOKENS], good[i].text, &error)) fail_msg("%s", error.message);
        if (f.max_tokens != good[i].value) fail_msg("'%s' is read as %lld", good[i].text, (long long)f.max_tokens);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        f.max_tokens = 42;
        if (option_set(&f.options[MAX_TOKENS], bad[i], &error)) fail_msg("'%s' is accepted", bad[i]);
        assert_true(f.max_tokens == 42);
        assert_non_null(strstr(error.message, "--max-tokens takes a whole number"));
    }
}

static void test_sentences(void **state) {
    (void)state;
    refuse("--data=", "--data is empty: give a GLOB, or leave it out");
    refuse("--layer 3", "unknown option --layer; did you mean --layers? (--help lists all)");
    refuse("--layer=3", "unknown option --layer; did you mean --layers? (--help lists all)");
    refuse("-layers 3", "unknown option -layers; did you mean --layers? (--help lists all)");
    refuse("--zzzzzzzzzzzz", "unknown option --zzzzzzzzzzzz (--help lists all)");
    refuse("--", "unknown option -- (--help lists all)");
    refuse("--=3", "unknown option -- (--help lists all)");
    refuse(
        "a.bin",
        "unexpected argument 'a.bin': options begin with --, and a pattern such as 'data/train_*.bin' must be in quotes");
    refuse("--layers", "--layers needs a value (N)");
    refuse("--data --resume",
           "--data needs a value (GLOB) before --resume; one that begins with -- is written --data=--resume");
    refuse("--layers 0", "--layers must be at least 1, not 0");
    refuse("--rate 1.5", "--rate must be from 0 to 1, not 1.5");
    refuse("--rate 0.1x", "--rate takes a number, such as 0.5 or 3e-4, not '0.1x'");
    refuse("--rate nan", "--rate takes a number, such as 0.5 or 3e-4, not 'nan'");
    refuse("--rate=", "--rate takes a number, such as 0.5 or 3e-4, not ''");
    refuse("--colour grean", "--colour has no choice 'grean'; did you mean green? (there are: red, green, blue)");
    refuse("--recipe chartreuse", "--recipe has no choice 'chartreuse' (there are: red, green, blue)");
    refuse("--resume=maybe", "--resume takes no value but true or false, not 'maybe'");
    refuse("--no-resume=true", "--no-resume takes no value");
    refuse("--resume a.bin", "unexpected argument 'a.bin': --resume takes no value");
    refuse("--resume=true a.bin",
           "unexpected argument 'a.bin': options begin with --, and a pattern such as 'data/train_*.bin' must be in "
           "quotes");
    refuse("--resume --layers 3 a.bin",
           "unexpected argument 'a.bin': options begin with --, and a pattern such as 'data/train_*.bin' must be in "
           "quotes");
    refuse("--no-layers", "unknown option --no-layers; did you mean --layers? (--help lists all)");
}

static void test_last_wins_and_given(void **state) {
    (void)state;
    Fixture f;
    accept(&f, "--layers 3 --shuffle --layers 12 --no-shuffle");
    assert_true(f.layers == 12 && !f.shuffle);
    assert_true(options_given(f.options, COUNT, &f.layers) && options_given(f.options, COUNT, &f.shuffle));
    assert_false(options_given(f.options, COUNT, &f.resume) || options_given(f.options, COUNT, &f.rate));
}

static void test_list_is_full(void **state) {
    (void)state;
    Fixture f;
    Error error;
    set_up(&f);
    for (int i = 0; i < STRING_LIST_MAX; i++)
        assert_true(option_set(&f.options[OPERAND], "a=b", &error));
    assert_false(option_set(&f.options[OPERAND], "a=b", &error));
    assert_string_equal(error.message, "--operand can be given 32 times at most");
}

static void test_help(void **state) {
    (void)state;
    char *asking[] = {"program", "--layers", "-h"}, *not_asking[] = {"program", "--layers", "3"};
    assert_true(options_ask_for_help(3, asking));
    assert_false(options_ask_for_help(3, not_asking));
    Fixture f;
    set_up(&f);
    char *text;
    size_t bytes;
    FILE *stream = open_memstream(&text, &bytes);
    options_print_help(f.options, COUNT, "Usage: program", stream);
    fclose(stream);
    assert_string_equal(
        text, "Usage: program\n"
              "\n"
              "Data:\n"
              "  --data GLOB      token files\n"
              "  --[no-]shuffle   shuffle windows (default: on)\n"
              "\n"
              "Model:\n"
              "  --layers N       number of blocks, each of which has attention and an FFN, and that is a help long\n"
              "                   enough to be wrapped (default: 12)\n"
              "  --max-tokens N   tokens\n"
              "  --rate X         rate (default: 0.0003)\n"
              "  --colour COLOUR  as an index (red, green, blue)\n"
              "  --recipe NAME    as a string (red, green, blue; default: green)\n"
              "  --operand A=B    one operand of one GEMM, in a help whose last word would end one column too\n"
              "                   far-aw\n"
              "\n"
              "Output:\n"
              "  --resume         go on\n");
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
        assert_true(strcspn(line, "\n") <= 100);
    free(text);
}

// What option_text writes, option_set reads back to the same bits.
static void test_text_round_trip(void **state) {
    (void)state;
    const double rates[] = {0, 1, 0.1, 1.0 / 3, 3e-4, 0x1p-1074, 0.99999999999999989};
    Fixture f;
    Error error;
    set_up(&f);
    for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
        f.rate = rates[i];
        char *text = option_text(&f.options[RATE], 0);
        f.rate = -1;
        assert_true(option_set(&f.options[RATE], text, &error));
        assert_true(f.rate == rates[i]);
        free(text);
    }
    Fixture from, to;
    char *texts[STRING_LIST_MAX];
    int num_texts = 0;
    accept(&from, "--data x --no-shuffle --max-tokens 9223372036854775807 --colour red --operand a=b --operand c=d");
    set_up(&to);
    for (int i = 0; i < COUNT; i++) {
        for (int index = 0; (texts[num_texts] = option_text(&from.options[i], index)) != NULL; index++)
            assert_true(option_set(&to.options[i], texts[num_texts++], &error));
    }
    assert_string_equal(to.data, "x");
    assert_true(!to.shuffle && to.max_tokens == INT64_MAX && to.colour == 0);
    assert_true(to.operands.count == 2 && strcmp(to.operands.items[1], "c=d") == 0);
    while (num_texts > 0)
        free(texts[--num_texts]);
}

static void test_json(void **state) {
    (void)state;
    Fixture f;
    accept(&f, "--layers 2K --operand a=b --resume --data it's\"");
    JsonWriter writer = {0};
    json_begin_object(&writer, NULL);
    options_write_json(f.options, COUNT, &writer);
    json_end_object(&writer);
    assert_string_equal(writer.text,
                        "{\"data\":\"it's\\\"\",\"shuffle\":true,\"layers\":2000,\"max-tokens\":0,\"rate\":0.0003,"
                        "\"colour\":null,\"recipe\":\"green\",\"operand\":[\"a=b\"],\"resume\":true}");
    json_writer_free(&writer);
}

// Reads `json` over the fixture after `line` was parsed; "" or the error's sentence.
static const char *read_json(Fixture *f, const char *line, const char *json, bool only_options) {
    static Error error;
    Error detail;
    accept(f, line);
    error.message[0] = 0;
    JsonValue *value = json_parse(json, strlen(json), &detail);
    assert_non_null(value);
    bool ok = options_read_json(f->options, COUNT, value, only_options, &error);
    json_free(value);
    assert_int_equal(ok, error.message[0] == 0);
    return error.message;
}

static void test_from_json(void **state) {
    (void)state;
    static Fixture f, given, other; // static: they keep texts for as long as the program runs
    const char *all =
        "{\"data\":\"x\",\"shuffle\":false,\"layers\":2000,\"rate\":0.25,\"colour\":\"blue\",\"recipe\":null,"
        "\"operand\":[\"a=b\",\"c=d\"],\"resume\":[\"true\"]}";
    assert_string_equal(read_json(&f, "", all, true), "");
    assert_true(strcmp(f.data, "x") == 0 && !f.shuffle && f.layers == 2000 && f.rate == 0.25 && f.colour == 2);
    assert_true(strcmp(f.recipe, "green") == 0 && f.operands.count == 2 && f.resume);
    assert_string_equal(read_json(&given, "--layers 3 --shuffle", all, true), "");
    assert_true(given.layers == 3 && given.shuffle && given.rate == 0.25);
    assert_string_equal(read_json(&other, "", "{\"layer\":3}", true),
                        "'layer' is no option; did you mean --layers? (--help lists all)");
    assert_string_equal(read_json(&other, "", "{\"layer\":3}", false), "");
    assert_string_equal(read_json(&other, "", "{\"layers\":0}", true), "--layers must be at least 1, not 0");
    assert_string_equal(read_json(&other, "", "{\"layers\":[\"1\",\"2\"]}", true), "--layers has more than one value");
    assert_string_equal(read_json(&other, "", "{\"data\":{}}", true),
                        "--data takes a text, a number, true or false, or a list of texts");
    assert_string_equal(read_json(&other, "", "{\"operand\":[\"a=b\",null]}", true),
                        "--operand takes a text, a number, true or false, or a list of texts");
    assert_string_equal(read_json(&other, "", "{\"rate\":1e999}", true),
                        "--rate has a number that is too large to be read: give a smaller one");
    assert_string_equal(read_json(&other, "", "{\"layers\":[]}", true),
                        "--layers has an empty list for its value: give it one, or leave it out");
    assert_string_equal(read_json(&other, "", "{\"operand\":[],\"layers\":null}", true), "");
}

// 600 isn't printed as 6e+02.
static void test_numbers_read_well(void **state) {
    (void)state;
    const struct {
        double number;
        const char *text;
    } cases[] = {{600, "600"}, {1e6, "1000000"}, {0.1, "0.1"}, {3e-4, "0.0003"}, {1e-8, "1e-08"}, {1e30, "1e+30"}};
    Fixture f;
    set_up(&f);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        f.rate = cases[i].number;
        char *text = option_text(&f.options[RATE], 0);
        assert_string_equal(text, cases[i].text);
        free(text);
    }
}

static void test_spelling(void **state) {
    (void)state;
    Fixture f;
    set_up(&f);
    const int64_t seven = 7;
    const bool off = false;
    char *layers = options_spelling(f.options, COUNT, &f.layers, &seven);
    char *shuffle = options_spelling(f.options, COUNT, &f.shuffle, &off);
    assert_string_equal(layers, "--layers 7");
    assert_string_equal(shuffle, "--no-shuffle");
    free(layers);
    free(shuffle);
}

// The command line goes through a shell and comes back.
static void test_command_line(void **state) {
    (void)state;
    Fixture f;
    Error error;
    set_up(&f);
    char *argv[] = {"program", "--data",        "a b/*'$HOME.bin", "--no-shuffle", "--layers",
                    "1.5K",    "--recipe=blue", "--operand=--x",   "--operand",    ""};
    assert_true(options_parse(f.options, COUNT, 10, argv, &error));
    char *command = options_command_line(f.options, COUNT, "printf");
    assert_string_equal(
        command,
        "printf --data 'a b/*'\\''$HOME.bin' --no-shuffle --layers 1500 --recipe blue --operand=--x --operand ''");
    free(command);
    command = options_command_line(f.options, COUNT, "%s|");
    char *shell = format_string("printf %s", command);
    FILE *pipe = popen(shell, "r");
    char output[256] = "";
    assert_non_null(pipe);
    assert_non_null(fgets(output, sizeof(output), pipe));
    assert_int_equal(pclose(pipe), 0);
    assert_string_equal(output,
                        "--data|a b/*'$HOME.bin|--no-shuffle|--layers|1500|--recipe|blue|--operand=--x|--operand||");
    free(shell);
    free(command);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_whole_numbers),
        cmocka_unit_test(test_sentences),
        cmocka_unit_test(test_last_wins_and_given),
        cmocka_unit_test(test_list_is_full),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_text_round_trip),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_command_line),
        cmocka_unit_test(test_from_json),
        cmocka_unit_test(test_numbers_read_well),
        cmocka_unit_test(test_spelling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
