/*
Command-line options from one table: parsing, --help, and the options as text for the log and for a
resume.
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <stdio.h>
#include "llmc/files/json.h" // JsonWriter
#include "llmc/base/util.h"  // Error

typedef enum {
    OPTION_FLAG,    // bool; --name or --no-name
    OPTION_INT,     // int64_t; "500", "500K", "1.5M", "2G" or "2B" (1000, not 1024), "1e6": whatever is a whole number
    OPTION_FLOAT,   // double, finite
    OPTION_STRING,  // const char *; with `choices`, one of them
    OPTION_CHOICE,  // int, an index into `choices`; -1 where none is chosen
    OPTION_REPEATED // StringList; the option may be given several times
} OptionType;

enum { STRING_LIST_MAX = 32 };

// Strings are not copied: they live in argv or in the table.
typedef struct {
    const char *items[STRING_LIST_MAX];
    int count;
} StringList;

typedef struct {
    const char *group;      // heading in the help; options of one group stand together in the table
    const char *name;       // without the --
    const char *value_name; // "N", "GLOB"; NULL for a flag
    const char *help;       // with units, without default and choices
    OptionType type;
    void *value;                // of the type above; holds the default until it is parsed
    double minimum, maximum;    // both included; numbers are checked where minimum < maximum
    const char *const *choices; // NULL-terminated, or NULL
    bool was_set;               // written by options_parse: the command line had it
} Option;

// True where --help or -h is among the arguments. To be asked before options_parse, so that the
// help shows the defaults.
bool options_ask_for_help(int argc, char **argv);

// Prints `usage`, then the options by group, aligned, wrapped to 100 columns, with choices and
// defaults (the present values).
void options_print_help(const Option *options, int count, const char *usage, FILE *stream);

// Sets the values from argv[1...]: `--name value` or `--name=value`. An option given twice has its
// last value, so that a script's options can be overridden by adding to them. A value that begins
// with -- must be written --name=value. Errors: unknown option or choice (with the nearest),
// missing, malformed or out-of-range value, positional argument.
bool options_parse(Option *options, int count, int argc, char **argv, Error *error);

// Whether the command line had the option of that name, of which there must be one.
bool options_was_set(const Option *options, int count, const char *name);

// One option from and to text: option_text gives what option_set takes, exactly, and a flag as
// "true" or "false". option_set adds to an OPTION_REPEATED, option_text gives item `index` of it
// (of others, index 0 is the value); NULL where there is none. The text of option_text is to be
// freed.
bool option_set(Option *option, const char *text, Error *error);
char *option_text(const Option *option, int index);

// All options as members of the JSON object that is open: flags, numbers and strings as such, lists
// as arrays, what has no value as null.
void options_write_json(const Option *options, int count, JsonWriter *writer);

// A shell command that gives the same options: `program` and what was set on the command line,
// quoted. To be freed.
char *options_command_line(const Option *options, int count, const char *program);

#endif
