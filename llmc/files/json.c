#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_CJSON
#include <cjson/cJSON.h>
enum { CAN_READ = true };

// Makes cJSON end the program where there is no memory: it can't say so otherwise than as if a text
// weren't JSON.
static void set_memory(void) { cJSON_InitHooks(&(cJSON_Hooks){allocate, free}); }
#else
// Stands in for cJSON where it isn't there. It parses nothing, so no value can ever be asked.
struct cJSON {
    JsonValue *next, *child;
    char *string;
    double valuedouble;
};
enum { CAN_READ = false };
static void set_memory(void) {}
#define cJSON_ParseWithLengthOpts(text, bytes, end, whole) ((void)(end), (JsonValue *)NULL)
#define cJSON_GetObjectItemCaseSensitive(value, key) ((void)(key), (value)->child)
#define cJSON_GetStringValue(value) ((value) ? (value)->string : NULL)
#define cJSON_Delete(value) ((void)(value))
#define cJSON_IsObject(value) ((void)(value), false)
#define cJSON_IsArray(value) ((void)(value), false)
#define cJSON_IsNull(value) ((void)(value), true)
#define cJSON_IsNumber(value) ((void)(value), false)
#define cJSON_IsBool(value) ((void)(value), false)
#define cJSON_IsTrue(value) ((void)(value), false)
#endif

enum { MAX_NESTING = 100, MAX_FILE_BYTES = 16 << 20 };

// UTF-8

int utf8_sequence(const char *text, size_t bytes) {
    // By the first byte, the bounds of the second: they shut out overlong forms, surrogates and
    // what lies above U+10FFFF (The Unicode Standard, table 3-7).
    static const struct {
        unsigned char first, last, low, high;
        int length;
    } FORMS[] = {{0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3}, {0xE1, 0xEC, 0x80, 0xBF, 3},
                 {0xED, 0xED, 0x80, 0x9F, 3}, {0xEE, 0xEF, 0x80, 0xBF, 3}, {0xF0, 0xF0, 0x90, 0xBF, 4},
                 {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4}};
    const unsigned char *byte = (const unsigned char *)text;
    if (bytes == 0 || byte[0] < 0x80) return bytes > 0;
    for (int form = 0; form < COUNT(FORMS); form++) {
        int length = FORMS[form].length;
        if (byte[0] < FORMS[form].first || byte[0] > FORMS[form].last) continue;
        if (bytes < (size_t)length || byte[1] < FORMS[form].low || byte[1] > FORMS[form].high) return 0;
        for (int i = 2; i < length; i++) {
            if ((byte[i] & 0xC0) != 0x80) return 0;
        }
        return length;
    }
    return 0;
}

// Writing

static void append(JsonWriter *writer, const char *text, size_t bytes) {
    if (writer->capacity - writer->length < bytes + 1) {
        writer->capacity = 2 * writer->capacity + bytes + 256;
        writer->text = realloc(writer->text, writer->capacity);
        if (!writer->text) die("out of memory: %zu bytes were needed for JSON", writer->capacity);
    }
    memcpy(writer->text + writer->length, text, bytes);
    writer->length += bytes;
    writer->text[writer->length] = 0;
}

static void append_string(JsonWriter *writer, const char *value, size_t bytes) {
    static const char ESCAPED[] = "\"\\\n\t", LETTERS[] = "\"\\nt";
    append(writer, "\"", 1);
    for (size_t i = 0; i < bytes;) {
        unsigned char c = (unsigned char)value[i];
        const char *escaped = c ? strchr(ESCAPED, c) : NULL;
        int length = utf8_sequence(value + i, bytes - i);
        if (escaped) {
            append(writer, (const char[]){'\\', LETTERS[escaped - ESCAPED]}, 2);
        } else if (c < 0x20) {
            char escape[8];
            snprintf(escape, sizeof(escape), "\\u%04x", c);
            append(writer, escape, 6);
        } else if (length == 0) {
            append(writer, "\\ufffd", 6);
        } else {
            append(writer, value + i, (size_t)length);
        }
        i += length ? (size_t)length : 1;
    }
    append(writer, "\"", 1);
}

static void append_newline(JsonWriter *writer) {
    if (!writer->indented) return;
    append(writer, "\n", 1);
    for (int i = 0; i < writer->depth; i++) {
        append(writer, "  ", 2);
    }
}

// Writes what comes before a value: the comma that is due, the line's indentation, the name.
static void begin_value(JsonWriter *writer, const char *key) {
    if (writer->continued) append(writer, ",", 1);
    if (writer->depth > 0) append_newline(writer);
    writer->continued = true;
    if (key) {
        append_string(writer, key, strlen(key));
        append(writer, ": ", writer->indented ? 2 : 1);
    }
}

static void begin_container(JsonWriter *writer, const char *key, const char *bracket) {
    begin_value(writer, key);
    append(writer, bracket, 1);
    writer->depth++;
    writer->continued = false;
}

static void end_container(JsonWriter *writer, const char *bracket) {
    writer->depth--;
    if (writer->continued) append_newline(writer);
    append(writer, bracket, 1);
    writer->continued = true;
}

void json_begin_object(JsonWriter *writer, const char *key) { begin_container(writer, key, "{"); }
void json_end_object(JsonWriter *writer) { end_container(writer, "}"); }
void json_begin_array(JsonWriter *writer, const char *key) { begin_container(writer, key, "["); }
void json_end_array(JsonWriter *writer) { end_container(writer, "]"); }

void json_write_literal(JsonWriter *writer, const char *key, const char *literal) {
    begin_value(writer, key);
    append(writer, literal, strlen(literal));
}

void json_write_int64(JsonWriter *writer, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof(text), "%ld", value);
    json_write_literal(writer, key, text);
}

void json_write_double(JsonWriter *writer, const char *key, double value) {
    char text[40] = "null";
    if (isfinite(value)) {
        int digits = 0;
        do {
            snprintf(text, sizeof(text), "%.*g", ++digits, value);
        } while (strtod(text, NULL) != value);
    }
    json_write_literal(writer, key, text);
}

void json_write_bool(JsonWriter *writer, const char *key, bool value) {
    json_write_literal(writer, key, value ? "true" : "false");
}

void json_write_string(JsonWriter *writer, const char *key, const char *value) {
    if (value) json_write_text(writer, key, value, strlen(value));
    if (!value) json_write_literal(writer, key, "null");
}

void json_write_text(JsonWriter *writer, const char *key, const char *value, size_t bytes) {
    begin_value(writer, key);
    append_string(writer, value, bytes);
}

void json_writer_free(JsonWriter *writer) {
    free(writer->text);
    *writer = (JsonWriter){.indented = writer->indented};
}

// Reading

// Writes "byte 17 (line 2)" for an error; `place` holds 64 bytes.
static const char *describe_place(char *place, const char *text, size_t offset) {
    int line = 1;
    for (size_t i = 0; i < offset; i++) {
        line += text[i] == '\n';
    }
    snprintf(place, 64, "byte %zu (line %d)", offset, line);
    return place;
}

// Refuses what cJSON lets pass and a hostile file may hold: control characters, 0 bytes (which
// would cut a string short), bytes that are not UTF-8, nesting that is only there to be deep.
static bool check_text(const char *text, size_t bytes, Error *error) {
    bool in_string = false;
    int depth = 0;
    char place[64];
    for (size_t i = 0; i < bytes;) {
        unsigned char c = (unsigned char)text[i];
        int length = utf8_sequence(text + i, bytes - i);
        const char *fault = NULL;
        if (length == 0) {
            fault = "bytes that are not UTF-8";
        } else if (c < 0x20 && (in_string || (c != '\t' && c != '\n' && c != '\r'))) {
            fault = "a control character";
        } else if (in_string && c == '\\') {
            if (bytes - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0) fault = "a \\u0000";
            length = i + 1 < bytes && text[i + 1] == '"' ? 2 : 1;
            if (i + 1 < bytes && text[i + 1] == '\\') length = 2;
        } else if (c == '"') {
            in_string = !in_string;
        } else if (!in_string && (c == '{' || c == '[')) {
            if (++depth > MAX_NESTING) fault = "more than 100 nested brackets";
        } else if (!in_string && (c == '}' || c == ']')) {
            depth--;
        }
        if (fault) return error_set(error, "not valid JSON: %s at %s", fault, describe_place(place, text, i));
        i += (size_t)length;
    }
    return true;
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

bool json_names_once(const JsonValue *value, Error *error) {
    int count = 0, i = 0;
    for (const JsonValue *child = json_first(value); child; child = json_next(child), count++) {
        if (!json_names_once(child, error)) return false;
    }
    if (!json_is_object(value) || count < 2) return true;
    const char **names = allocate((size_t)count * sizeof(*names));
    for (const JsonValue *child = json_first(value); child; child = json_next(child)) {
        names[i++] = json_key(child);
    }
    qsort(names, (size_t)count, sizeof(*names), compare_names);
    bool ok = true;
    for (i = 1; ok && i < count; i++) {
        if (strcmp(names[i - 1], names[i]) != 0) continue;
        ok = error_set(error, "an object names \"%.200s\" twice, and must name it once", names[i]);
    }
    free(names);
    return ok;
}

JsonValue *json_parse(const char *text, size_t bytes, Error *error) {
    if (!CAN_READ) {
        error_set(error,
                  "this build can't read JSON (safetensors, config.json): apt-get install libcjson-dev, then make");
    }
    if (!CAN_READ || !check_text(text, bytes, error)) return NULL;
    char place[64];
    const char *end = text;
    set_memory();
    JsonValue *value = cJSON_ParseWithLengthOpts(text, bytes, &end, false);
    if (!value) {
        // At the end of the text cJSON points at its last byte.
        size_t offset = end ? (size_t)(end - text) : 0;
        error_set(error, "not valid JSON: a mistake at %s, or the text ends too early",
                  describe_place(place, text, offset));
        return NULL;
    }
    size_t used = (size_t)(end - text);
    while (used < bytes && strchr(" \t\n\r", text[used])) {
        used++;
    }
    if (used < bytes) {
        error_set(error, "not valid JSON: the value ends, and something follows, at %s",
                  describe_place(place, text, used));
        cJSON_Delete(value);
        return NULL;
    }
    return value;
}

JsonValue *json_read(const char *path, Error *error) {
    size_t bytes;
    char *text = read_file(path, MAX_FILE_BYTES, &bytes, error);
    if (!text) return NULL;
    Error detail;
    JsonValue *json = json_parse(text, bytes, &detail);
    free(text);
    if (!json) error_set(error, "%s: %.900s", path, detail.message);
    return json;
}

void json_free(JsonValue *value) { cJSON_Delete(value); }

const JsonValue *json_get(const JsonValue *value, const char *key) {
    if (!key) return value;
    return cJSON_IsObject(value) ? cJSON_GetObjectItemCaseSensitive(value, key) : NULL;
}

bool json_number(const JsonValue *value, const char *key, double *out) {
    const JsonValue *item = json_get(value, key);
    if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble)) return false;
    *out = item->valuedouble;
    return true;
}

bool json_int64(const JsonValue *value, const char *key, int64_t *out) {
    double number;
    // Beyond 2^53 neighbours read as the same double.
    if (!json_number(value, key, &number) || fabs(number) >= 0x1p53 || number != floor(number)) return false;
    *out = (int64_t)number;
    return true;
}

bool json_bool(const JsonValue *value, const char *key, bool *out) {
    const JsonValue *item = json_get(value, key);
    if (!cJSON_IsBool(item)) return false;
    *out = cJSON_IsTrue(item);
    return true;
}

const char *json_string(const JsonValue *value, const char *key) { return cJSON_GetStringValue(json_get(value, key)); }

bool json_is_object(const JsonValue *value) { return cJSON_IsObject(value); }
bool json_is_null(const JsonValue *value) { return !value || cJSON_IsNull(value); }
bool json_is_array(const JsonValue *value) { return cJSON_IsArray(value); }

const JsonValue *json_first(const JsonValue *value) {
    return cJSON_IsObject(value) || cJSON_IsArray(value) ? value->child : NULL;
}

const JsonValue *json_next(const JsonValue *child) { return child->next; }
const char *json_key(const JsonValue *member) { return member->string; }
