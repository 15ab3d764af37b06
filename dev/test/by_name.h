/*
Recipes and parameters by their names; a test fails where there is none. Include it after cmocka.h.
*/
#pragma once

#include <string.h>
#include "llmc/model/param.h"

// Returns the recipe of that name.
static inline Recipe recipe_of(const char *name) {
    Recipe recipe;
    Error error;
    if (!recipe_named(&recipe, name, &error)) fail_msg("%s", error.message);
    return recipe;
}

// Returns the parameter of that name.
static inline const Param *param_of(const ParamList *list, const char *name) {
    int i = 0;
    while (i < list->count && strcmp(list->params[i].name, name) != 0) {
        i++;
    }
    if (i == list->count) fail_msg("there is no parameter %s", name);
    return &list->params[i];
}
