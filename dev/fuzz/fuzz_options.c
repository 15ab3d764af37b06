// The options: the input's lines are a command line of the program. What was accepted is written
// out as a command line and must be accepted again with the same values.
#include "fuzz.h"
#include "llmc/run/recipe_schedule.h"
#include "llmc/run/settings.h"

enum { MAX_ARGUMENTS = 64 };

// One argument a line. The arguments point into `text`, which is changed.
static int split_lines(char *text, char *arguments[MAX_ARGUMENTS]) {
    int count = 0;
    arguments[count++] = "train_gpt_mxfp8";
    for (char *rest = text, *line; count < MAX_ARGUMENTS && (line = strsep(&rest, "\n"));) {
        arguments[count++] = line;
    }
    return count;
}

static void check_same_values(const Option *a, const Option *b, int count) {
    for (int i = 0; i < count; i++) {
        for (int item = 0; a[i].type != OPTION_GROUP; item++) {
            char *x = option_text(&a[i], item), *y = option_text(&b[i], item);
            bool last = !x || a[i].type != OPTION_REPEATED;
            MUST(!x == !y && (!x || strcmp(x, y) == 0));
            free(x);
            free(y);
            if (last) break;
        }
    }
}

// Every value as text, and from the text again: what a checkpoint does.
static void check_texts(const Option *options, int count) {
    static CommandLine other;
    settings_init(&other);
    Option *again = other.options;
    char *texts[MAX_OPTIONS * STRING_LIST_MAX];
    int num_texts = 0;
    Error error = {""};
    for (int i = 0; i < count; i++) {
        for (int item = 0; options[i].type != OPTION_GROUP; item++) {
            char *text = option_text(&options[i], item);
            if (!text) break;
            texts[num_texts++] = text;
            MUST(option_set(&again[i], text, &error));
            if (options[i].type != OPTION_REPEATED) break;
        }
    }
    check_same_values(options, again, count);
    while (num_texts > 0) {
        free(texts[--num_texts]);
    }
}

// What follows --recipe-at is one recipe or a sentence.
static void check_recipes(const StringList *texts) {
    RecipeSchedule schedule = {.count = 1};
    Error error = {""};
    recipe_named(&schedule.phases[0].recipe, "mxfp8", &error);
    for (int i = 0; i < texts->count; i++) {
        int count = schedule.count;
        if (recipe_schedule_add(&schedule, texts->items[i], &error)) {
            const RecipePhase *phase = &schedule.phases[count];
            MUST(schedule.count == count + 1 && phase->first_step > phase[-1].first_step);
            MUST(recipe_is_same(&phase->recipe, &phase->recipe) && recipe_schedule_at(&schedule, INT64_MAX) == count);
        } else {
            MUST(schedule.count == count && error.message[0]);
        }
    }
}

static void write_everywhere(const Option *options, int count) {
    static FILE *sink;
    if (!sink) sink = fopen("/dev/null", "w");
    options_print_help(options, count, "usage", sink);
    JsonWriter writer = {0};
    Error error = {""};
    json_begin_object(&writer, NULL);
    options_write_json(options, count, &writer);
    json_end_object(&writer);
    JsonValue *json = json_parse(writer.text, writer.length, &error);
    MUST(json_is_object(json));
    json_free(json);
    json_writer_free(&writer);
    char *command = options_command_line(options, count, "train_gpt_mxfp8");
    MUST(strlen(command) > 0);
    free(command);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Error error = {""};
    static CommandLine line;
    settings_init(&line);
    Option *options = line.options;
    int count = line.num_options;
    char *text = strndup((const char *)data, size), *arguments[MAX_ARGUMENTS];
    int num_arguments = split_lines(text, arguments);
    options_ask_for_help(num_arguments, arguments);
    if (options_parse(options, count, num_arguments, arguments, &error)) {
        write_everywhere(options, count);
        check_texts(options, count);
        check_recipes(&line.settings.recipe_at);
    } else {
        // A sentence repeats what was typed, which may fill it.
        MUST(error.message[0] && strnlen(error.message, sizeof(error.message)) < sizeof(error.message));
    }
    free(text);
    return 0;
}
