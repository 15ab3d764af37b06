#include "recipe_schedule.h"
#include "recipe_options.h" // recipe_parse

#include <ctype.h>
#include <stdlib.h>

bool recipe_schedule_add(RecipeSchedule *schedule, const char *text, Error *error) {
    char *end;
    int64_t step = strtol(text, &end, 10);
    Error detail;
    if (!isdigit((unsigned char)*text) || *end != ':' || step < 1 || step > (int64_t)1e15) {
        return error_set(error,
                         "--recipe-at takes STEP:RECIPE with a step from 1 on, such as 1000:bf16 or "
                         "1000:mxfp8,scale-rounding=floor, not '%s'",
                         text);
    }
    if (schedule->phases[schedule->count - 1].first_step >= step) {
        return error_set(error,
                         "--recipe-at %s comes after one of step %ld: give each a step of its own, in ascending order",
                         text, schedule->phases[schedule->count - 1].first_step);
    }
    RecipePhase *phase = &schedule->phases[schedule->count];
    phase->first_step = step;
    if (!recipe_parse(&phase->recipe, end + 1, &detail)) {
        return error_set(error, "--recipe-at %.200s: %.700s", text, detail.message);
    }
    schedule->count++;
    return true;
}

int recipe_schedule_at(const RecipeSchedule *schedule, int64_t step) {
    int index = 0;
    while (index + 1 < schedule->count && schedule->phases[index + 1].first_step <= step) {
        index++;
    }
    return index;
}

int recipe_schedule_before(const RecipeSchedule *schedule, int64_t step) {
    return recipe_schedule_at(schedule, step > 0 ? step - 1 : 0);
}
