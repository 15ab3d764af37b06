/*
Errors, allocation, files, text: what every module needs and no module owns.

Two kinds of failure. What a user can cause (a file, an option) is returned: a function that reads
such input returns false and leaves one sentence in its Error, which names the thing and the remedy;
given OR_DIE for an Error, it stops the program with that sentence. What nobody expects (a library's
return code, malloc) stops the program: die().
*/
#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { EXIT_BAD_INPUT = 2, EXIT_NOT_FINITE = 3 };

typedef struct {
    char message[1024];
} Error;

#define PRINTF_LIKE(format_index, first_argument) __attribute__((format(printf, format_index, first_argument)))

// Is passed for an Error where nothing can be done without what is asked for.
#define OR_DIE ((Error *)NULL)

// Writes the sentence into `error` and returns false, so that a reader can `return error_set(error,
// ...)`; dies of it where `error` is OR_DIE.
bool error_set(Error *error, const char *format, ...) PRINTF_LIKE(2, 3);

// Replaces each byte of a control character by '?' and returns `text`: names in hostile files must
// not reach a terminal as commands. Errors are treated so already.
char *make_printable(char *text);

// Prints "<program>: <sentence>" on stderr and exits with EXIT_BAD_INPUT.
void die(const char *format, ...) PRINTF_LIKE(1, 2) __attribute__((noreturn));
void bad_input(const Error *error) __attribute__((noreturn)); // with that sentence

// Allocate, and die where they can't. allocate() returns zeroed memory; 0 bytes is allowed.
void *allocate(size_t bytes);
char *format_string(const char *format, ...) PRINTF_LIKE(1, 2); // to be freed

// The number of an array's elements.
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

// Return how many words there are before the NULL that ends them; the index of a word, or -1.
int count_words(const char *const *words);
int find_word(const char *word, const char *const *words);

// Returns the candidate nearest to `word` by edit distance, for a word of three letters or fewer
// among those with the same first one, or NULL where none is near enough to be meant.
const char *nearest_word(const char *word, const char *const *candidates, int count);

// Returns what a user who typed `word` may have meant, as the end of a sentence: "; did you mean
// --max-steps, --warmup-steps or --val-steps?", each after `prefix`; "" where nothing is similar.
// First come candidates that are the word but for small and capital letters, then those that begin
// with it, then those whose parts between hyphens have its letters as initials (lr), then those
// that have it as a part; where there are none, nearest_word's. To be freed.
char *similar_words(const char *word, const char *const *candidates, int count, const char *prefix);

// Returns "cosine, linear, constant", to be freed. The words end with NULL.
char *list_words(const char *const *words);

static inline int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up_int64(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Returns the whole part of a product of a fraction and a count, in which rounding the fraction may
// have lost a little: 0.29 * 100 is less than 29.
static inline int64_t whole_part(double product) { return (int64_t)(product * (1 + 0x1p-49)); }

// Returns the number without the sign of a NaN, which says nothing and would be printed.
static inline double printable(double x) { return x != x ? __builtin_nan("") : x; }

// Returns a hash that has a word more: FNV-1a, with 64-bit words for bytes. It begins with
// HASH_START.
#define HASH_START 0xCBF29CE484222325u
static inline uint64_t hash_add(uint64_t hash, uint64_t word) { return (hash ^ word) * 0x100000001B3u; }

// Returns "s" where `count` isn't 1: "1 step", "2 steps".
static inline const char *plural(int64_t count) { return count == 1 ? "" : "s"; }

// Returns the seconds on the monotonic clock.
double seconds_now(void);

// Write a number as people read it, in decimal units with up to four digits: "1.5 GB", "312.4M".
// `text` holds at least 32 bytes, and is returned.
const char *human_bytes(char *text, double bytes);
const char *human_count(char *text, double count);

// Writes a file so that a reader sees all of it or none: temporary name in the same directory,
// sync, rename, sync of the directory.
bool write_file_atomic(const char *path, const void *data, size_t bytes, Error *error);

// Returns a whole file, with a 0 byte after it, to be freed; NULL with an error where it can't be
// read or is over `max_bytes`.
char *read_file(const char *path, size_t max_bytes, size_t *bytes, Error *error);

// Returns whether `path` is free or a regular file: rename() would put a file in the place of a
// device.
bool check_regular(const char *path, Error *error);

bool sync_path(const char *path, Error *error);         // fsync of a file or a directory
bool sync_directory_of(const char *path, Error *error); // of the directory that a file lies in
bool make_directories(const char *path, Error *error);  // mkdir -p
bool path_exists(const char *path);
bool remove_tree(const char *path); // rm -rf of a directory of ours
