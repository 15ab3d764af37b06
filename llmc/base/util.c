#include "util.h"

#include <errno.h>
#include <fcntl.h> // open
#include <ftw.h>   // nftw, which walks a directory tree
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h> // strcasecmp
#include <sys/stat.h>
#include <time.h>
#include <unistd.h> // fsync, close

bool error_set(Error *error, const char *format, ...) {
    // Formats into a copy, so that a caller can put words around the sentence that is already
    // there.
    char message[sizeof(error->message)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    if (error == OR_DIE) die("%s", message);
    memcpy(error->message, make_printable(message), sizeof(message));
    return false;
}

char *make_printable(char *text) {
    for (unsigned char *c = (unsigned char *)text; *c; c++) {
        // U+0080 to U+009F, two bytes in UTF-8, are control characters too.
        bool two_bytes = c[0] == 0xC2 && c[1] >= 0x80 && c[1] < 0xA0;
        if (*c < 0x20 || *c == 0x7F || two_bytes) c[0] = '?';
        if (two_bytes) *++c = '?';
    }
    return text;
}

void die(const char *format, ...) {
    Error error;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error.message, sizeof(error.message), format, arguments);
    va_end(arguments);
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, make_printable(error.message));
    exit(EXIT_BAD_INPUT);
}

void bad_input(const Error *error) { die("%s", error->message); }

void *allocate(size_t bytes) {
    void *memory = calloc(bytes ? bytes : 1, 1);
    if (!memory) {
        char text[32];
        die("out of memory: %s more were needed", human_bytes(text, (double)bytes));
    }
    return memory;
}

char *format_string(const char *format, ...) {
    char *text;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0) die("out of memory while formatting a text");
    return text;
}

int count_words(const char *const *words) {
    int count = 0;
    while (words[count]) {
        count++;
    }
    return count;
}

int find_word(const char *word, const char *const *words) {
    for (int i = 0; words[i]; i++) {
        if (strcmp(words[i], word) == 0) return i;
    }
    return -1;
}

enum { MAX_WORD = 64 };

// Returns Levenshtein's edit distance of two words of at most MAX_WORD bytes.
static int edit_distance(const char *a, const char *b) {
    int row[MAX_WORD + 1];
    int length = (int)strlen(b);
    for (int j = 0; j <= length; j++) {
        row[j] = j;
    }
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= length; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[length];
}

// In words of so few letters the first is no slip: "gpu" isn't meant to be "cpu".
enum { SHORT_WORD = 3 };

const char *nearest_word(const char *word, const char *const *candidates, int count) {
    size_t length = strlen(word);
    if (length > MAX_WORD) return NULL;
    // One slip in about three letters is still the same word; a word of one letter is none.
    int best = (int)(length + 1) / 3 + 1;
    const char *nearest = NULL;
    for (int i = 0; i < count; i++) {
        if (strlen(candidates[i]) > MAX_WORD) continue;
        if (length <= SHORT_WORD && candidates[i][0] != word[0]) continue;
        int distance = edit_distance(word, candidates[i]);
        if (distance < best) {
            best = distance;
            nearest = candidates[i];
        }
    }
    return nearest;
}

static bool is_but_for_case(const char *candidate, const char *word) { return strcasecmp(candidate, word) == 0; }

static bool begins_with(const char *candidate, const char *word) { return strncmp(candidate, word, strlen(word)) == 0; }

// Returns whether the first letters of `candidate` and of what follows each hyphen make `word`.
static bool has_initials(const char *candidate, const char *word) {
    for (const char *part = candidate; part; part = strchr(part, '-')) {
        part += *part == '-';
        if (*part != *word || *word == 0) return false;
        word++;
    }
    return *word == 0;
}

// Returns whether `word` stands between two hyphens, or ends, of `candidate`.
static bool has_part(const char *candidate, const char *word) {
    size_t length = strlen(word);
    for (const char *part = candidate; part; part = strchr(part, '-')) {
        part += *part == '-';
        if (strcspn(part, "-") == length && memcmp(part, word, length) == 0) return true;
    }
    return false;
}

enum { MAX_SIMILAR = 3 };

char *similar_words(const char *word, const char *const *candidates, int count, const char *prefix) {
    static bool (*const LIKE[])(const char *, const char *) = {is_but_for_case, begins_with, has_initials, has_part};
    const char *found[MAX_SIMILAR];
    int num_found = 0;
    for (int kind = 0; kind < COUNT(LIKE) && strlen(word) > 1; kind++) {
        for (int i = 0; i < count && num_found < MAX_SIMILAR; i++) {
            if (LIKE[kind](candidates[i], word)) found[num_found++] = candidates[i];
        }
        if (kind < 2 && num_found > 0) break;
    }
    const char *nearest = num_found ? NULL : nearest_word(word, candidates, count);
    if (nearest) found[num_found++] = nearest;
    char *text = format_string("%s", num_found ? "; did you mean " : "");
    for (int i = 0; i < num_found; i++) {
        const char *separator = i + 1 == num_found ? "?" : i + 2 == num_found ? " or " : ", ";
        char *longer = format_string("%s%s%s%s", text, prefix, found[i], separator);
        free(text);
        text = longer;
    }
    return text;
}

char *list_words(const char *const *words) {
    char *text = format_string("%s", words[0]);
    for (int i = 1; words[i]; i++) {
        char *longer = format_string("%s, %s", text, words[i]);
        free(text);
        text = longer;
    }
    return text;
}

double seconds_now(void) {
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) die("the monotonic clock can't be read: %s", strerror(errno));
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const char *human(char *text, double value, const char *separator, const char *unit) {
    static const char *const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
    int prefix = 0;
    // 999.95 would be printed as 1000.0.
    while (fabs(value) >= (prefix == 0 ? 999.5 : 999.95) && prefix + 1 < COUNT(prefixes)) {
        value /= 1000;
        prefix++;
    }
    snprintf(text, 32, "%.*f%s%s%s", prefix == 0 ? 0 : 1, value, separator, prefixes[prefix], unit);
    return text;
}

const char *human_bytes(char *text, double bytes) { return human(text, bytes, " ", "B"); }
const char *human_count(char *text, double count) { return human(text, count, "", ""); }

bool check_regular(const char *path, Error *error) {
    struct stat status;
    if (stat(path, &status) != 0 || S_ISREG(status.st_mode)) return true;
    return error_set(error, "%s can't be written: it is not a regular file; choose another name", path);
}

bool sync_directory_of(const char *path, Error *error) {
    const char *slash = strrchr(path, '/');
    char *directory = slash ? format_string("%.*s", (int)(slash - path + 1), path) : format_string(".");
    bool ok = sync_path(directory, error);
    free(directory);
    return ok;
}

// Writes and syncs `path`; returns 0 or errno.
static int write_and_sync(const char *path, const void *data, size_t bytes) {
    FILE *stream = fopen(path, "wbe");
    if (!stream) return errno;
    int failure = 0;
    if (fwrite(data, 1, bytes, stream) != bytes || fflush(stream) != 0 || fsync(fileno(stream)) != 0) {
        failure = errno;
    }
    if (fclose(stream) != 0 && failure == 0) failure = errno;
    return failure;
}

bool write_file_atomic(const char *path, const void *data, size_t bytes, Error *error) {
    if (!check_regular(path, error)) return false;
    char *temporary = format_string("%s.tmp", path);
    int failure = write_and_sync(temporary, data, bytes);
    if (failure == 0 && rename(temporary, path) != 0) failure = errno;
    if (failure != 0) {
        unlink(temporary);
        error_set(error, "%s can't be written: %s; check its directory, its permissions and the free space", path,
                  strerror(failure));
    }
    free(temporary);
    return failure == 0 && sync_directory_of(path, error);
}

// Reads until the file ends or is over `max_bytes`. Returns the data, to be freed, with room for a
// 0 byte.
static char *read_stream(FILE *stream, const char *path, size_t max_bytes, size_t *length) {
    size_t capacity = 4096;
    char *data = allocate(capacity);
    *length = 0;
    for (;;) {
        *length += fread(data + *length, 1, capacity - 1 - *length, stream);
        if (*length < capacity - 1 || *length > max_bytes) return data;
        capacity *= 2;
        data = realloc(data, capacity);
        if (!data) die("out of memory: %zu bytes were needed for %s", capacity, path);
    }
}

char *read_file(const char *path, size_t max_bytes, size_t *bytes, Error *error) {
    FILE *stream = fopen(path, "rbe");
    if (!stream) {
        error_set(error, "%s can't be read: %s; check the path and its permissions", path, strerror(errno));
        return NULL;
    }
    size_t length;
    char *data = read_stream(stream, path, max_bytes, &length), text[32];
    bool failed = ferror(stream);
    int failure = errno;
    fclose(stream);
    if (failed) {
        error_set(error, "%s can't be read: %s; check that it is a file", path, strerror(failure));
    } else if (length > max_bytes) {
        error_set(error, "%s is too large: at most %s are expected of it; check that it is the right file", path,
                  human_bytes(text, (double)max_bytes));
    }
    if (failed || length > max_bytes) {
        free(data);
        return NULL;
    }
    data[length] = 0;
    *bytes = length;
    return data;
}

bool sync_path(const char *path, Error *error) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        return error_set(error, "%s can't be opened to be synced: %s; check its permissions", path, strerror(errno));
    }
    // Filesystems that can't sync a directory answer EINVAL.
    bool ok = fsync(descriptor) == 0 || errno == EINVAL;
    if (!ok) error_set(error, "%s can't be synced to the disk: %s; check the disk", path, strerror(errno));
    close(descriptor);
    return ok;
}

// Makes a directory; one that is already there is as good.
static bool make_directory(const char *path, Error *error) {
    if (mkdir(path, 0777) == 0) return true;
    int failure = errno;
    struct stat status;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) return true;
    return error_set(error, "the directory %s can't be made: %s; choose another, or check its permissions", path,
                     strerror(failure));
}

bool make_directories(const char *path, Error *error) {
    char *prefix = format_string("%s", path);
    bool ok = true;
    for (char *slash = strchr(prefix + (*prefix != 0), '/'); ok && slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        ok = make_directory(prefix, error);
        *slash = '/';
    }
    free(prefix);
    return ok && make_directory(path, error);
}

bool path_exists(const char *path) {
    struct stat status;
    return stat(path, &status) == 0;
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *place) {
    (void)status, (void)type, (void)place;
    return remove(path);
}

bool remove_tree(const char *path) {
    return nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT;
}
