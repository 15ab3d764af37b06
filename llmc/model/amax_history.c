#include "amax_history.h"

#include <math.h>
#include <stdlib.h>

enum { SCALES_BYTES = NUM_GEMM_OPERANDS * sizeof(DelayedScale) };

static bool is_delayed(const Recipe *recipe) {
    bool any = false;
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        any = any || (mx_is_mx(recipe->format[operand]) && recipe->scaling[operand] == SCALING_TENSOR);
    }
    return any && recipe->delayed.length > 0;
}

void amax_history_layout(AmaxHistory *h, const Recipe *recipe, MemoryPlan *plan) {
    if (is_delayed(recipe)) h->scales = memory_take(plan, MEMORY_QUANTIZED, SCALES_BYTES);
}

DelayedScale *amax_history_scale(const AmaxHistory *h, GemmOperand operand) {
    return h->scales ? h->scales + operand : NULL;
}

void amax_history_make_scales(const AmaxHistory *h, const Recipe *recipe, const Backend *backend) {
    DelayedScale scales[NUM_GEMM_OPERANDS] = {{0, 0}};
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        if (!mx_is_mx(recipe->format[i])) continue;
        scales[i].scale =
            scaling_delayed_scale(recipe->format[i], (int)recipe->delayed.margin, h->amax[operand_role(i)]);
    }
    backend->copy_to_device(h->scales, scales, SCALES_BYTES);
}

void amax_history_begin(AmaxHistory *h, const Recipe *recipe, const Backend *backend) {
    if (!h->scales) return;
    h->steps = allocate((size_t)(recipe->delayed.length * NUM_ROLES) * sizeof(float));
    amax_history_make_scales(h, recipe, backend);
}

void amax_history_free(AmaxHistory *h) { free(h->steps); }

void amax_history_begin_step(AmaxHistory *h, const Backend *backend) {
    DelayedScale scales[NUM_GEMM_OPERANDS];
    if (!h->scales) return;
    backend->copy_to_host(scales, h->scales, SCALES_BYTES);
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        if (operand_role(i) != ROLE_WEIGHTS) scales[i].amax = 0;
    }
    backend->copy_to_device(h->scales, scales, SCALES_BYTES);
}

void amax_history_read(double amax[NUM_ROLES], const AmaxHistory *h, const Backend *backend) {
    DelayedScale scales[NUM_GEMM_OPERANDS];
    backend->copy_to_host(scales, h->scales, SCALES_BYTES);
    for (int role = 0; role < NUM_ROLES; role++) {
        amax[role] = 0;
    }
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        double seen = mx_bits_float(scales[i].amax);
        if (!(seen <= amax[operand_role(i)])) amax[operand_role(i)] = seen; // a NaN stays
    }
}

// Returns the amax of a role that its scales are to be made of; 0: there is none.
static float chosen_amax(const AmaxHistory *h, const DelayedScaling *delayed, Role role, float newest) {
    float largest = 0;
    for (int64_t step = 0; step < delayed->length; step++) {
        largest = fmaxf(largest, h->steps[step * NUM_ROLES + role]);
    }
    return delayed->algorithm == AMAX_MAX ? largest : newest;
}

void amax_history_add(AmaxHistory *h, const Recipe *recipe, const Backend *backend, const double amax[NUM_ROLES]) {
    float *step = h->steps + h->oldest * NUM_ROLES;
    h->oldest = (h->oldest + 1) % recipe->delayed.length;
    for (int role = 0; role < NUM_ROLES; role++) {
        step[role] = isfinite(amax[role]) ? (float)amax[role] : 0;
        float chosen = chosen_amax(h, &recipe->delayed, role, step[role]);
        if (chosen > 0) h->amax[role] = chosen;
    }
    amax_history_make_scales(h, recipe, backend);
}
