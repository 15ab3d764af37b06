#include "amax_history.h"

#include <math.h>
#include <stdlib.h>

// The device's

static size_t scales_bytes(const DelayedScales *s) { return (size_t)(s->layers * NUM_GEMM_OPERANDS) * sizeof(float); }
static size_t amaxes_bytes(const DelayedScales *s) { return (size_t)(s->layers * NUM_ROLES) * sizeof(uint32_t); }

void delayed_scales_layout(DelayedScales *s, const Recipe *recipe, int64_t layers, MemoryPlan *plan) {
    *s = (DelayedScales){.layers = layers};
    if (recipe->delayed.length == 0) return;
    s->scales = memory_take(plan, MEMORY_QUANTIZED, scales_bytes(s));
    s->amaxes = memory_take(plan, MEMORY_QUANTIZED, amaxes_bytes(s));
}

void delayed_scales_write(const DelayedScales *s, const Backend *backend, const float *values) {
    backend->copy_to_device(s->scales, values, scales_bytes(s));
    backend->zero(s->amaxes, amaxes_bytes(s));
}

void delayed_scales_begin_step(const DelayedScales *s, const Backend *backend) {
    size_t of_weights = (size_t)s->layers * sizeof(uint32_t);
    if (s->scales) backend->zero(s->amaxes + s->layers, amaxes_bytes(s) - of_weights);
}

double *delayed_scales_read(const DelayedScales *s, const Backend *backend) {
    uint32_t *seen = allocate(amaxes_bytes(s));
    double *amaxes = allocate((size_t)(s->layers * NUM_ROLES) * sizeof(double));
    backend->copy_to_host(seen, s->amaxes, amaxes_bytes(s));
    for (int64_t i = 0; i < s->layers * NUM_ROLES; i++) {
        amaxes[i] = mx_bits_float(seen[i % NUM_ROLES * s->layers + i / NUM_ROLES]);
    }
    free(seen);
    return amaxes;
}

// A layer's history

static bool is_delayed(const Recipe *recipe) {
    bool any = false;
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        any = any || (mx_is_mx(recipe->format[operand]) && recipe->scaling[operand] == SCALING_TENSOR);
    }
    return any && recipe->delayed.length > 0;
}

void amax_history_layout(AmaxHistory *h, const Recipe *recipe, const DelayedScales *s, int64_t layer) {
    if (!s->scales || !is_delayed(recipe)) return;
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        uint32_t *amax = s->amaxes + operand_role((GemmOperand)i) * s->layers + layer;
        h->scales[i] = (DelayedScale){s->scales + layer * NUM_GEMM_OPERANDS + i, amax};
    }
}

void amax_history_begin(AmaxHistory *h, const Recipe *recipe) {
    if (is_delayed(recipe)) h->steps = allocate((size_t)(recipe->delayed.length * NUM_ROLES) * sizeof(float));
}

void amax_history_free(AmaxHistory *h) { free(h->steps); }

// Returns the amax of a role that its scales are to be made of; 0: there is none.
static float chosen_amax(const AmaxHistory *h, const DelayedScaling *delayed, Role role, float newest) {
    if (delayed->algorithm == AMAX_MOST_RECENT) return newest;
    float largest = 0;
    for (int64_t step = 0; step < delayed->length; step++) {
        largest = fmaxf(largest, h->steps[step * NUM_ROLES + role]);
    }
    return largest;
}

void amax_history_add(AmaxHistory *h, const Recipe *recipe, const double amax[NUM_ROLES]) {
    float *step = h->steps + h->oldest * NUM_ROLES;
    h->oldest = (h->oldest + 1) % recipe->delayed.length;
    for (int role = 0; role < NUM_ROLES; role++) {
        bool is_good = isfinite(amax[role]);
        step[role] = is_good ? (float)amax[role] : 0;
        float chosen = chosen_amax(h, &recipe->delayed, (Role)role, step[role]);
        if (is_good && chosen > 0) h->amax[role] = chosen;
    }
}

void amax_history_make_scales(float *scales, const AmaxHistory *h, const Recipe *recipe) {
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        if (!mx_is_mx(recipe->format[i])) continue;
        float amax = h->amax[operand_role((GemmOperand)i)];
        scales[i] = scaling_delayed_scale(recipe->format[i], (int)recipe->delayed.margin, amax);
    }
}
