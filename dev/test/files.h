/*
What tests of files share: a directory of the program's own, made and removed by a group's set-up
and tear-down, and a check of what an error says. Include it after cmocka.h.
*/
#pragma once

#include <stdlib.h>
#include <string.h>
#include "llmc/base/util.h"

static char directory[] = "/tmp/llmc_test.XXXXXX";

// Makes the directory; returns 0, or -1 where that fails, as cmocka wants.
static inline int make_directory(void **state) {
    (void)state;
    return mkdtemp(directory) ? 0 : -1;
}

// Removes the directory and what is in it.
static inline int remove_directory(void **state) {
    (void)state;
    return remove_tree(directory) ? 0 : -1;
}

// Fails unless the error's message has `words` in it.
static inline void check_says(const Error *error, const char *words) {
    if (!strstr(error->message, words)) fail_msg("\"%s\" lacks \"%s\"", error->message, words);
}
