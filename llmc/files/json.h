/*
JSON: written by a small emitter of ours (the log, config files), read by cJSON where it was there
at build time. Also UTF-8, which JSON is made of.
*/
#pragma once

#include "llmc/base/util.h" // Error

// Writing

// Text that grows. Start with `JsonWriter writer = {0}` for one line or `{.indented = true}` for
// people; give `text` and `length` to whatever writes files; call json_writer_free() at the end.
typedef struct {
    bool indented; // two spaces a level
    char *text;    // `length` bytes and a 0 byte; NULL before the first call
    size_t length, capacity;
    int depth;
    bool continued; // something precedes in the innermost object or array: a comma is due
} JsonWriter;

// Begin, end and write values. `key` names a member of an object; it is NULL for an element of an
// array and for the outermost value.
void json_begin_object(JsonWriter *writer, const char *key);
void json_end_object(JsonWriter *writer);
void json_begin_array(JsonWriter *writer, const char *key);
void json_end_array(JsonWriter *writer);
void json_write_int64(JsonWriter *writer, const char *key, int64_t value);
void json_write_double(JsonWriter *writer, const char *key, double value); // shortest that reads back; NaN, Inf: null
void json_write_bool(JsonWriter *writer, const char *key, bool value);
void json_write_literal(JsonWriter *writer, const char *key, const char *json); // as it stands
void json_write_string(JsonWriter *writer, const char *key, const char *value); // NULL: null
// Writes a string of `bytes` bytes, 0 bytes allowed. Bytes that are not UTF-8 (what a byte-level
// model may produce) are written as U+FFFD each.
void json_write_text(JsonWriter *writer, const char *key, const char *value, size_t bytes);
void json_writer_free(JsonWriter *writer);

// Reading

typedef struct cJSON JsonValue;

// Parses `text`. Returns a value to be freed with json_free; NULL with an error where the text is
// not one JSON value in UTF-8, nests deeper than 100, holds a 0 byte (or \u0000), or where this
// build can't read JSON.
JsonValue *json_parse(const char *text, size_t bytes, Error *error);
JsonValue *json_read(const char *path, Error *error); // of a file
void json_free(JsonValue *value);                     // NULL is allowed

// Returns the member `key` of an object, the value itself where `key` is NULL; NULL where there is
// none. Names are case-sensitive; of a name given twice the first counts.
const JsonValue *json_get(const JsonValue *value, const char *key);

// Get a member of a type. They return false (NULL) where it is missing or of another type.
bool json_number(const JsonValue *value, const char *key, double *out); // finite
bool json_int64(const JsonValue *value, const char *key, int64_t *out); // a whole number, |x| < 2^53: exact
bool json_bool(const JsonValue *value, const char *key, bool *out);
const char *json_string(const JsonValue *value, const char *key); // lives as long as the value

bool json_is_null(const JsonValue *value); // or NULL
bool json_is_object(const JsonValue *value);

// Returns false, with an error, where an object in `value` names a member twice: readers differ in
// which of the two they take. For files that must not be misread; others' files are read as they
// are.
bool json_names_once(const JsonValue *value, Error *error);

bool json_is_array(const JsonValue *value);

// Iterate: for (const JsonValue *child = json_first(value); child; child = json_next(child)).
const JsonValue *json_first(const JsonValue *value); // first member or element, NULL where there is none
const JsonValue *json_next(const JsonValue *child);
const char *json_key(const JsonValue *member); // a member's name

// UTF-8

// Returns the number of bytes (1 to 4) of the well-formed UTF-8 sequence that `text` begins with; 0
// where there is none.
int utf8_sequence(const char *text, size_t bytes);
