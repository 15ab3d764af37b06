#include "options.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HELP_WIDTH = 100, HELP_MAX_NAME_WIDTH = 36 };

// Values

// Returns the power of ten of a suffix; -1 where it is none.
static int suffix_exponent(char suffix) {
    static const char SUFFIXES[] = "kKMGBT";
    static const int EXPONENTS[] = {3, 3, 6, 9, 9, 12};
    const char *found = strchr(SUFFIXES, suffix);
    return found ? EXPONENTS[found - SUFFIXES] : -1;
}

// Reads the power of ten that follows a number's digits, as e6 or as a suffix, to the text's end.
static bool parse_exponent(const char *text, int64_t *exponent) {
    *exponent = 0;
    if (!*text) return true;
    if (*text != 'e' && *text != 'E') {
        *exponent = suffix_exponent(*text);
        return *exponent >= 0 && !text[1];
    }
    char *end;
    const char *first_digit = text + 1 + (text[1] == '-' || text[1] == '+');
    if (!isdigit((unsigned char)*first_digit)) return false;
    *exponent = strtol(text + 1, &end, 10);
    return *exponent >= -18 && *exponent <= 18 && !*end;
}

// Multiplies by a power of ten. Returns false where the result overflows or isn't whole.
static bool scale_by_ten(int64_t *value, int64_t exponent) {
    for (; exponent > 0; exponent--) {
        if (__builtin_mul_overflow(*value, 10, value)) return false;
    }
    for (; exponent < 0; exponent++) {
        if (*value % 10 != 0) return false;
        *value /= 10;
    }
    return true;
}

// Parses a number of items, exactly: digits with an optional point and an optional power of ten, as
// e6 or as a suffix.
static bool parse_int(const char *text, int64_t *out) {
    bool negative = *text == '-', after_point = false;
    int64_t value = 0, decimals = 0, exponent;
    int digits = 0;
    const char *p = text + (*text == '-' || *text == '+');
    for (; isdigit((unsigned char)*p) || (*p == '.' && !after_point); p++) {
        if (*p == '.') {
            after_point = true;
            continue;
        }
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *p - '0', &value)) return false;
        decimals += after_point;
        digits++;
    }
    if (digits == 0 || !parse_exponent(p, &exponent) || !scale_by_ten(&value, exponent - decimals)) return false;
    *out = negative ? -value : value;
    return true;
}

static bool parse_float(const char *text, double *out) {
    char *end;
    *out = strtod(text, &end);
    return end != text && *end == 0 && !isspace((unsigned char)*text) && isfinite(*out);
}

static bool check_range(const Option *option, double number, const char *text, Error *error) {
    double minimum = option->minimum, maximum = option->maximum;
    if (!(minimum < maximum) || (number >= minimum && number <= maximum)) return true;
    if (isinf(maximum)) return error_set(error, "--%s must be at least %.15g, not %s", option->name, minimum, text);
    return error_set(error, "--%s must be from %.15g to %.15g, not %s", option->name, minimum, maximum, text);
}

// Returns the index of `text` among the option's choices, or -1 with an error.
static int parse_choice(const Option *option, const char *text, Error *error) {
    int found = find_word(text, option->choices);
    if (found >= 0) return found;
    char *similar = similar_words(text, option->choices, count_words(option->choices), "");
    char *list = list_words(option->choices);
    error_set(error, "--%s has no choice '%s'%s (there are: %s)", option->name, text, similar, list);
    free(similar);
    free(list);
    return -1;
}

// Returns whether the option's value is a path or a pattern of paths, which no empty text is.
static bool names_a_path(const Option *option) {
    static const char *const PATHS[] = {"GLOB", "DIR", "FILE", "PATH", NULL};
    return option->value_name && find_word(option->value_name, PATHS) >= 0;
}

bool option_set(Option *option, const char *text, Error *error) {
    switch (option->type) {
    case OPTION_GROUP:
        break;
    case OPTION_FLAG:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0) {
            return error_set(error, "--%s takes no value but true or false, not '%s'", option->name, text);
        }
        *(bool *)option->value = text[0] == 't';
        return true;
    case OPTION_INT: {
        int64_t number;
        if (!parse_int(text, &number)) {
            return error_set(error, "--%s takes a whole number below 2^63, such as 500, 20K, 1.5M or 2G, not '%s'",
                             option->name, text);
        }
        if (!check_range(option, (double)number, text, error)) return false;
        *(int64_t *)option->value = number;
        return true;
    }
    case OPTION_FLOAT: {
        double number;
        if (!parse_float(text, &number)) {
            return error_set(error, "--%s takes a number, such as 0.5 or 3e-4, not '%s'", option->name, text);
        }
        if (!check_range(option, number, text, error)) return false;
        *(double *)option->value = number;
        return true;
    }
    case OPTION_STRING:
        if (!*text && names_a_path(option)) {
            return error_set(error, "--%s is empty: give a %s, or leave it out", option->name, option->value_name);
        }
        if (option->choices && parse_choice(option, text, error) < 0) return false;
        *(const char **)option->value = text;
        return true;
    case OPTION_CHOICE: {
        int index = parse_choice(option, text, error);
        if (index < 0) return false;
        *(int *)option->value = index;
        return true;
    }
    case OPTION_REPEATED: {
        StringList *list = option->value;
        if (list->count == STRING_LIST_MAX) {
            return error_set(error, "--%s can be given %d times at most", option->name, STRING_LIST_MAX);
        }
        list->items[list->count++] = text;
        return true;
    }
    }
    die("option --%s: type %d", option->name, (int)option->type);
}

// Returns the fewest digits that read back as the same number; whole numbers as such, not as 6e+02.
static char *double_text(double number) {
    const double readable = 1e15;
    char text[32];
    if (fabs(number) < readable && number == floor(number)) return format_string("%.0f", number);
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, number);
        if (strtod(text, NULL) == number) break;
    }
    return format_string("%s", text);
}

char *option_text(const Option *option, int index) {
    if (option->type == OPTION_REPEATED) {
        const StringList *list = option->value;
        return index < list->count ? format_string("%s", list->items[index]) : NULL;
    }
    if (index > 0 || option->type == OPTION_GROUP) return NULL;
    switch (option->type) {
    case OPTION_FLAG:
        return format_string("%s", *(bool *)option->value ? "true" : "false");
    case OPTION_INT:
        return format_string("%ld", *(int64_t *)option->value);
    case OPTION_FLOAT:
        return double_text(*(double *)option->value);
    case OPTION_CHOICE: {
        int choice = *(int *)option->value;
        return choice < 0 ? NULL : format_string("%s", option->choices[choice]);
    }
    default: {
        const char *string = *(const char **)option->value;
        return string ? format_string("%s", string) : NULL;
    }
    }
}

// The command line

Option *options_find(const Option *options, int count, const char *name, size_t length) {
    for (const Option *option = options; option < options + count; option++) {
        if (option->type == OPTION_GROUP) continue;
        if (strlen(option->name) == length && memcmp(option->name, name, length) == 0) return (Option *)option;
    }
    return NULL;
}

Option *options_find_value(const Option *options, int count, const void *value) {
    for (int i = 0; i < count; i++) {
        if (options[i].value == value) return (Option *)&options[i];
    }
    die("no option has this value");
}

bool options_given(const Option *options, int count, const void *value) {
    return options_find_value(options, count, value)->was_set;
}

bool options_typed(const Option *options, int count, const void *value) {
    return options_find_value(options, count, value)->was_typed;
}

bool options_ask_for_help(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return true;
    }
    return false;
}

// Returns "; did you mean --a or --b?", or "". To be freed.
static char *similar_options(const Option *options, int count, const char *name) {
    const char **names = allocate((size_t)count * sizeof(*names));
    int num_names = 0;
    for (int i = 0; i < count; i++) {
        if (options[i].type != OPTION_GROUP) names[num_names++] = options[i].name;
    }
    char *similar = similar_words(name, names, num_names, "--");
    free(names);
    return similar;
}

// Says why nothing has the name that begins an argument; `flag`: the option before it, where that
// is a flag without a value, else NULL.
static bool unknown_option(const Option *options, int count, const char *argument, size_t length, const Option *flag,
                           Error *error) {
    if (argument[0] != '-' && flag) {
        return error_set(error, "unexpected argument '%s': --%s takes no value", argument, flag->name);
    }
    if (argument[0] != '-') {
        return error_set(
            error,
            "unexpected argument '%s': options begin with --, and a pattern such as 'data/train_*.bin' must be in quotes",
            argument);
    }
    size_t dashes = strspn(argument, "-");
    char *name = format_string("%.*s", (int)(length > dashes ? length - dashes : 0), argument + dashes);
    char *similar = similar_options(options, count, name);
    error_set(error, "unknown option %.*s%s (--help lists all)", (int)length, argument, similar);
    free(name);
    free(similar);
    return false;
}

// Returns the option that `argument`, without its =value, names as --name, or a flag it names as
// --no-name; NULL where it is none.
static Option *match(Option *options, int count, const char *argument, size_t length, bool *negated) {
    *negated = false;
    if (length < 2 || strncmp(argument, "--", 2) != 0) return NULL;
    Option *option = options_find(options, count, argument + 2, length - 2);
    if (option || length < 5 || strncmp(argument, "--no-", 5) != 0) return option;
    option = options_find(options, count, argument + 5, length - 5);
    *negated = true;
    return option && option->type == OPTION_FLAG ? option : NULL;
}

bool options_parse(Option *options, int count, int argc, char **argv, Error *error) {
    const Option *flag = NULL;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        size_t length = strcspn(argument, "=");
        const char *text = argument[length] ? argument + length + 1 : NULL;
        bool negated;
        Option *option = match(options, count, argument, length, &negated);
        if (!option) return unknown_option(options, count, argument, length, flag, error);
        if (negated && text) return error_set(error, "%.*s takes no value", (int)length, argument);
        if (option->type == OPTION_FLAG && !text) text = negated ? "false" : "true";
        if (!text) {
            if (i + 1 == argc) return error_set(error, "--%s needs a value (%s)", option->name, option->value_name);
            text = argv[++i];
            if (strncmp(text, "--", 2) == 0) {
                return error_set(error, "--%s needs a value (%s) before %s; one that begins with -- is written --%s=%s",
                                 option->name, option->value_name, text, option->name, text);
            }
        }
        if (!option_set(option, text, error)) return false;
        option->was_set = option->was_typed = true;
        flag = option->type == OPTION_FLAG && !negated && !argument[length] ? option : NULL;
    }
    return true;
}

// Text from the table

// Returns "--layers N", "--resume", and for a flag that is on "--[no-]shuffle".
static char *help_name(const Option *option) {
    if (option->type != OPTION_FLAG) return format_string("--%s %s", option->name, option->value_name);
    return format_string("--%s%s", *(bool *)option->value ? "[no-]" : "", option->name);
}

// Returns an option's help: text (choices; default: value).
static char *help_text(const Option *option) {
    char *value = option_text(option, 0), *choices = option->choices ? list_words(option->choices) : NULL;
    // What 0 stands for the help says itself.
    bool has_default = value && value[0] && strcmp(value, "false") != 0 && strcmp(value, "0") != 0;
    const char *shown = !has_default ? "" : option->type == OPTION_FLAG ? "on" : value;
    char *text = format_string("%s%s%s%s%s%s%s", option->help, choices || has_default ? " (" : "",
                               choices ? choices : "", choices && has_default ? "; " : "",
                               has_default ? "default: " : "", shown, choices || has_default ? ")" : "");
    free(value);
    free(choices);
    return text;
}

// Prints the words of `text` from column `indent` on, where the cursor stands, and a newline at the
// end.
static void print_wrapped(const char *text, int indent, FILE *stream) {
    int column = indent;
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column > indent && column + 1 + length > HELP_WIDTH) {
            fprintf(stream, "\n%*s", indent, "");
            column = indent;
        }
        column += fprintf(stream, "%s%.*s", column > indent ? " " : "", length, text);
        text += length;
        text += strspn(text, " ");
    }
    fprintf(stream, "\n");
}

void options_print_help(const Option *options, int count, const char *usage, FILE *stream) {
    int width = 0;
    for (int i = 0; i < count; i++) {
        if (options[i].type == OPTION_GROUP) continue;
        char *name = help_name(&options[i]);
        int length = (int)strlen(name);
        if (length > width && length <= HELP_MAX_NAME_WIDTH) width = length;
        free(name);
    }
    int indent = 2 + width + 2;
    fprintf(stream, "%s\n", usage);
    for (int i = 0; i < count; i++) {
        if (options[i].type == OPTION_GROUP) {
            fprintf(stream, "\n%s:\n", options[i].name);
            continue;
        }
        char *name = help_name(&options[i]), *text = help_text(&options[i]);
        if ((int)strlen(name) > width) {
            fprintf(stream, "  %s\n%*s", name, indent, "");
        } else {
            fprintf(stream, "  %-*s", indent - 2, name);
        }
        print_wrapped(text, indent, stream);
        free(name);
        free(text);
    }
}

void options_write_json(const Option *options, int count, JsonWriter *writer) {
    for (const Option *option = options; option < options + count; option++) {
        if (option->type == OPTION_GROUP) continue;
        if (option->type == OPTION_REPEATED) {
            const StringList *list = option->value;
            json_begin_array(writer, option->name);
            for (int item = 0; item < list->count; item++) {
                json_write_string(writer, NULL, list->items[item]);
            }
            json_end_array(writer);
            continue;
        }
        char *text = option_text(option, 0);
        bool is_literal = option->type == OPTION_FLAG || option->type == OPTION_INT || option->type == OPTION_FLOAT;
        (is_literal ? json_write_literal : json_write_string)(writer, option->name, text);
        free(text);
    }
}

// Returns the text of a JSON value for option_set, to be freed; NULL where it has none.
static char *json_text(const JsonValue *value) {
    double number;
    bool flag;
    if (json_string(value, NULL)) return format_string("%s", json_string(value, NULL));
    if (json_number(value, NULL, &number)) return double_text(number);
    if (json_bool(value, NULL, &flag)) return format_string("%s", flag ? "true" : "false");
    return NULL;
}

static bool set_from_json(Option *option, const JsonValue *value, Error *error) {
    if (json_is_object(value) || json_is_array(value) || json_is_null(value)) {
        return error_set(error, "--%s takes a text, a number, true or false, or a list of texts", option->name);
    }
    char *text = json_text(value);
    if (!text) {
        return error_set(error, "--%s has a number that is too large to be read: give a smaller one", option->name);
    }
    bool ok = option_set(option, text, error);
    // These two types keep pointers to their text, for as long as the program runs.
    bool kept = ok && (option->type == OPTION_STRING || option->type == OPTION_REPEATED);
    if (!kept) free(text);
    return ok;
}

static bool check_members(const Option *options, int count, const JsonValue *object, Error *error) {
    for (const JsonValue *member = json_first(object); member; member = json_next(member)) {
        const char *name = json_key(member);
        if (options_find(options, count, name, strlen(name))) continue;
        char *similar = similar_options(options, count, name);
        error_set(error, "'%s' is no option%s (--help lists all)", name, similar);
        free(similar);
        return false;
    }
    return true;
}

bool options_read_json(Option *options, int count, const JsonValue *object, bool only_options, Error *error) {
    if (only_options && !check_members(options, count, object, error)) return false;
    for (int i = 0; i < count; i++) {
        Option *option = &options[i];
        bool is_open = option->type != OPTION_GROUP && !option->was_set;
        const JsonValue *value = is_open ? json_get(object, option->name) : NULL;
        if (json_is_null(value)) continue;
        bool is_list = json_is_array(value);
        if (is_list && !json_first(value) && option->type != OPTION_REPEATED) {
            return error_set(error, "--%s has an empty list for its value: give it one, or leave it out", option->name);
        }
        for (const JsonValue *item = is_list ? json_first(value) : value, *next; item; item = next) {
            next = is_list ? json_next(item) : NULL;
            if (!set_from_json(option, item, error)) return false;
            if (option->type != OPTION_REPEATED && next) {
                return error_set(error, "--%s has more than one value", option->name);
            }
        }
    }
    return true;
}

// Prints `text` as one word of a shell's command line.
static void print_quoted(const char *text, FILE *stream) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%";
    if (*text && text[strspn(text, plain)] == 0) {
        fputs(text, stream);
        return;
    }
    fputc('\'', stream);
    for (; *text; text++) {
        fprintf(stream, *text == '\'' ? "'\\''" : "%c", *text);
    }
    fputc('\'', stream);
}

// Prints " --name value", quoted for a shell, with the value of `option` or one item of it.
static void print_spelling(const Option *option, const char *text, FILE *stream) {
    if (option->type == OPTION_FLAG) {
        fprintf(stream, " --%s%s", text[0] == 't' ? "" : "no-", option->name);
        return;
    }
    // A value that begins with -- would be taken for an option.
    fprintf(stream, " --%s%s", option->name, strncmp(text, "--", 2) == 0 ? "=" : " ");
    print_quoted(text, stream);
}

static void print_spellings(const Option *option, FILE *stream) {
    char *text;
    for (int index = 0; (text = option_text(option, index)) != NULL; index++) {
        print_spelling(option, text, stream);
        free(text);
    }
}

// Opens a text to be printed into, freed when it is closed and used.
static FILE *open_text(char **text, size_t *bytes) {
    FILE *stream = open_memstream(text, bytes);
    if (!stream) die("open_memstream failed");
    return stream;
}

char *options_spelling(const Option *options, int count, const void *value, const void *other_value) {
    char *text;
    size_t bytes;
    FILE *stream = open_text(&text, &bytes);
    Option option = *options_find_value(options, count, value);
    option.value = (void *)other_value;
    print_spellings(&option, stream);
    if (fclose(stream) != 0) die("out of memory");
    memmove(text, text + (text[0] == ' '), strlen(text) + (text[0] != ' '));
    return text;
}

char *options_command_line(const Option *options, int count, const char *program) {
    char *command;
    size_t bytes;
    FILE *stream = open_text(&command, &bytes);
    print_quoted(program, stream);
    for (int i = 0; i < count; i++) {
        if (options[i].type != OPTION_GROUP && options[i].was_set) print_spellings(&options[i], stream);
    }
    if (fclose(stream) != 0) die("out of memory");
    return command;
}
