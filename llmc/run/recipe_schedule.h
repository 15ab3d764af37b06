/*
Recipe schedule: from which step on which recipe.
*/
#pragma once

#include "llmc/model/recipe.h"
#include "options.h" // STRING_LIST_MAX

typedef struct {
    int64_t first_step;
    Recipe recipe;
} RecipePhase;

// In ascending order; the first one's first_step is 0.
typedef struct {
    RecipePhase phases[1 + STRING_LIST_MAX];
    int count;
} RecipeSchedule;

// Adds "STEP:RECIPE", a recipe as recipe_parse takes it. Errors: another form, a step that isn't
// after those before it.
bool recipe_schedule_add(RecipeSchedule *schedule, const char *text, Error *error);

// Returns the index of the phase that step `step` belongs to.
int recipe_schedule_at(const RecipeSchedule *schedule, int64_t step);

// Returns the index of the phase before step `step`: what happens between two steps, evaluation and
// checkpoints, has the recipe of the step before.
int recipe_schedule_before(const RecipeSchedule *schedule, int64_t step);
