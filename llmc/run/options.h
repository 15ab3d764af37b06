/*
Command-line options from one table: parsing, --help, and the options as text for the log and for a
resume.
*/
#pragma once

#include <stdio.h>
#include "llmc/files/json.h" // JsonWriter
#include "llmc/base/util.h"  // Error

typedef enum {
    OPTION_GROUP,   // a heading of the help: what follows it, up to the next one, belongs to it
    OPTION_FLAG,    // bool; --name or --no-name
    OPTION_INT,     // int64_t; "500", "500K", "1.5M", "2G" or "2B", "3T" (1000, not 1024), "1e6": any whole number
    OPTION_FLOAT,   // double, finite
    OPTION_STRING,  // const char *; with `choices`, one of them
    OPTION_CHOICE,  // int, an index into `choices`
    OPTION_REPEATED // StringList; the option may be given several times
} OptionType;

enum { STRING_LIST_MAX = 32 };

// Strings are not copied: they live in argv or in the table.
typedef struct {
    const char *items[STRING_LIST_MAX];
    int count;
} StringList;

typedef struct {
    OptionType type;
    const char *name;           // without the --; of a group its heading
    const char *value_name;     // "N", "GLOB"; NULL for a flag
    void *value;                // of the type above; holds the default until it is parsed
    double minimum, maximum;    // both included; numbers are checked where minimum < maximum
    const char *const *choices; // NULL-terminated, or NULL
    const char *help;           // with units, without default and choices
    bool was_set;               // the command line, or a file of options, had it
    bool was_typed;             // the command line had it
} Option;

// The rows of a table. The compiler refuses a `pointer` of another type than the option's.
#define OPTION_POINTER(type, pointer) (1 ? (pointer) : (type *)0)
#define GROUP(heading) \
    { OPTION_GROUP, .name = heading }
#define FLAG(name_, pointer, help_) \
    { OPTION_FLAG, .name = name_, .value = OPTION_POINTER(bool, pointer), .help = help_ }
#define INT(name_, value_name_, pointer, minimum_, maximum_, help_) \
    { OPTION_INT, name_, value_name_, OPTION_POINTER(int64_t, pointer), minimum_, maximum_, .help = help_ }
#define FLOAT(name_, value_name_, pointer, minimum_, maximum_, help_) \
    { OPTION_FLOAT, name_, value_name_, OPTION_POINTER(double, pointer), minimum_, maximum_, .help = help_ }
#define STRING(name_, value_name_, pointer, help_) \
    { OPTION_STRING, name_, value_name_, OPTION_POINTER(const char *, pointer), 0, 0, .help = help_ }
#define NAME(name_, value_name_, pointer, choices_, help_) /* a string that is one of the choices */ \
    { OPTION_STRING, name_, value_name_, OPTION_POINTER(const char *, pointer), 0, 0, choices_, .help = help_ }
#define CHOICE(name_, value_name_, pointer, choices_, help_) /* the choice's index */ \
    { OPTION_CHOICE, name_, value_name_, OPTION_POINTER(int, pointer), 0, 0, choices_, .help = help_ }
#define REPEATED(name_, value_name_, pointer, help_) \
    { OPTION_REPEATED, name_, value_name_, OPTION_POINTER(StringList, pointer), 0, 0, .help = help_ }

// Returns whether --help or -h is among the arguments. Ask before options_parse, so that the help
// shows the defaults.
bool options_ask_for_help(int argc, char **argv);

// Prints `usage`, then the options by group, aligned, wrapped to 100 columns, with choices and
// defaults (the present values).
void options_print_help(const Option *options, int count, const char *usage, FILE *stream);

// Sets the values from argv[1...]: `--name value` or `--name=value`. An option given twice has its
// last value, so that a script's options can be overridden by adding to them. A value that begins
// with -- must be written --name=value. Errors: unknown option or choice (with the nearest),
// missing, malformed or out-of-range value, positional argument.
bool options_parse(Option *options, int count, int argc, char **argv, Error *error);

// Returns the option whose name is the `length` characters at `name`; NULL where there is none.
Option *options_find(const Option *options, int count, const char *name, size_t length);

// Returns the option that sets `value`; there must be one.
Option *options_find_value(const Option *options, int count, const void *value);

// Returns whether the option that sets `value` was given; there must be one.
bool options_given(const Option *options, int count, const void *value);

// The same of the command line alone, not of a file.
bool options_typed(const Option *options, int count, const void *value);

// Converts one option from and to text: option_text gives what option_set takes, exactly, and a
// flag as "true" or "false". option_set adds to an OPTION_REPEATED, option_text gives item `index`
// of it (of others, index 0 is the value); NULL where there is none. The text of option_text is to
// be freed.
bool option_set(Option *option, const char *text, Error *error);
char *option_text(const Option *option, int index);

// Writes all options as members of the JSON object that is open: flags, numbers and strings as
// such, lists as arrays, what has no value as null.
void options_write_json(const Option *options, int count, JsonWriter *writer);

// Sets the options that were not given from the members of `object`, which may be as
// options_write_json writes them, or texts, or lists of texts; a null says nothing. Errors: those
// of option_set, values that are no values; with `only_options` a member that is no option.
bool options_read_json(Option *options, int count, const JsonValue *object, bool only_options, Error *error);

// Returns the option that sets `value` as it would be given with the value at `other_value`, of the
// same type: "--layers 6", "--no-biases". To be freed.
char *options_spelling(const Option *options, int count, const void *value, const void *other_value);

// Returns a shell command that gives the same options: `program` and what was given, quoted. To be
// freed.
char *options_command_line(const Option *options, int count, const char *program);
