/*
The options that make a Recipe: a named one and its adjustments. Every program that trains takes
them.
*/
#pragma once

#include "options.h"
#include "llmc/model/recipe.h"

typedef struct {
    const char *name, *format[NUM_ROLES], *norm_gains, *weight_scaling, *scale_rounding, *role_rounding[NUM_ROLES];
    const char *transform[NUM_GEMMS], *hadamard_size, *backward_source, *amax_algorithm;
    const char *element_rounding, *role_element_rounding[NUM_ROLES];
    StringList operands, filters;
    int64_t bf16_first_layers, bf16_last_layers, amax_history, amax_margin;
    bool quantize_norm_gains, quantize_lm_head;
} RecipeSettings;

enum { MAX_RECIPE_OPTIONS = 29, OPTIONS_OF_A_GPT = 5 };

// Writes the options' rows, with their group's heading, pointing into `settings`. Returns how many
// there are: OPTIONS_OF_A_GPT more in a program whose model is one.
int recipe_options(Option table[MAX_RECIPE_OPTIONS], RecipeSettings *settings, bool is_gpt);

// Makes the recipe that the options add up to. Errors: unknown names; formats that don't go
// together.
bool recipe_from_settings(Recipe *recipe, const RecipeSettings *settings, Error *error);

// Parses a recipe written as one text, "NAME" or "NAME,ADJUSTMENT,...", such as
// "mxfp8,scale-rounding=floor,wgrad-x=bf16". An adjustment is one of the options without its
// dashes, "OPTION=VALUE", or "OPTION" if it is a flag, or an operand and its format. Errors: as of
// the options.
bool recipe_parse(Recipe *recipe, const char *text, Error *error);
