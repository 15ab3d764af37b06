#include "scheduler.h"

#include <math.h>
#include <stddef.h>
#include "llmc/base/util.h" // whole_part

const char *const SCHEDULE_NAMES[] = {"cosine", "linear", "constant", "wsd", NULL};

// Returns the step from which on the rate falls.
static int64_t decay_start(const Schedule *s) {
    int64_t stable_end = s->total_steps - whole_part(s->decay_fraction * (double)s->total_steps);
    return s->kind == SCHEDULE_WSD && stable_end > s->warmup_steps ? stable_end : s->warmup_steps;
}

static double warmup_rate(const Schedule *s, int64_t step) {
    double from = s->warmup_from, steps = (double)s->warmup_steps;
    if (from > 0) return from + (s->learning_rate - from) * (double)step / steps;
    return s->learning_rate * (double)(step + 1) / steps;
}

double learning_rate_at(const Schedule *s, int64_t step) {
    if (step < s->warmup_steps) return warmup_rate(s, step);
    if (s->kind == SCHEDULE_CONSTANT) return s->learning_rate;
    double final_rate = s->learning_rate * s->final_lr_fraction;
    if (step >= s->total_steps) return final_rate;
    int64_t start = decay_start(s);
    if (step < start) return s->learning_rate;
    double progress = (double)(step - start) / (double)(s->total_steps - start);
    double remaining = s->kind == SCHEDULE_COSINE ? 0.5 * (1.0 + cos(M_PI * progress)) : 1.0 - progress;
    return final_rate + remaining * (s->learning_rate - final_rate);
}
