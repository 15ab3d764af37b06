/*
The options that make a Recipe: a named one and its adjustments. Every program that trains takes them.
*/
#ifndef LLMC_RECIPE_OPTIONS_H
#define LLMC_RECIPE_OPTIONS_H

#include "options.h"
#include "recipe.h"

typedef struct {
    const char *name, *format[NUM_ROLES], *scale_rounding, *role_rounding[NUM_ROLES];
    StringList operands;
    int64_t bf16_first_layers, bf16_last_layers;
    int weight_scaling;
    bool quantize_norm_gains;
} RecipeSettings;

enum { NUM_RECIPE_OPTIONS = 13 };

// The options' rows, of the group "Recipe", pointing into `settings`.
void recipe_options(Option table[NUM_RECIPE_OPTIONS], RecipeSettings *settings);

// What they add up to. Errors: unknown names; formats that don't go together.
bool recipe_from_settings(Recipe *recipe, const RecipeSettings *settings, Error *error);

// The recipe as members of the JSON object that is open.
void recipe_write_json(const Recipe *recipe, JsonWriter *writer);

#endif
