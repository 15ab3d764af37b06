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

// Waits for weights that other ranks still send: their memory is about to be freed.
static void await_all(const GPT *m) {
    for (int64_t layer = -1; layer < m->config.layers; layer++) {
        exchange_await(&m->params, AXIS_ROWWISE, layer);
        exchange_await(&m->params, AXIS_COLUMNWISE, layer);
    }
    m->backend->synchronize();
}

// Copies masters and moments from the model to `state`, or back from there. Returns how many values
// they are; with NULL it only counts.
static size_t copy_state(const GPT *m, float *state, bool back) {
    size_t total = 0;
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        float *const parts[] = {p->master, p->moment1, p->moment2};
        size_t count = (size_t)(p->num_rows * p->cols), bytes = count * sizeof(float);
        for (int part = 0; part < 3; part++, total += count) {
            if (state && back) m->backend->copy_to_device(parts[part], state + total, bytes);
            if (state && !back) m->backend->copy_to_host(state + total, parts[part], bytes);
        }
    }
    return total;
}

void gpt_switch_recipe(GPT *m, const Recipe *recipe) {
    GPT old = *m;
    Sharding sharding = m->params.sharding;
    size_t count = copy_state(m, NULL, false);
    float *state = allocate(count * sizeof(float));
    await_all(m);
    copy_state(m, state, false);
    gpt_free(m);
    gpt_create(m, old.config, recipe, old.backend, old.B, old.T, true, &sharding);
    if (copy_state(m, NULL, true) != count) die("internal error: recipes that shard parameters differently");
    copy_state(m, state, true);
    gpt_refresh(m);
    free(state);
}
