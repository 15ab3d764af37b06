/*
Learning-rate schedules.
*/
#pragma once

#include <stdint.h>

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } ScheduleKind;

extern const char *const SCHEDULE_NAMES[]; // by ScheduleKind, NULL-terminated: the choices of an option

typedef struct {
    ScheduleKind kind;
    double learning_rate;     // the peak
    int64_t warmup_steps;     // linear warm-up, every kind has it
    int64_t total_steps;      // warm-up included
    double final_lr_fraction; // of the peak, reached at step total_steps; SCHEDULE_CONSTANT has no use for it
    double decay_fraction;    // of the steps, the last ones: SCHEDULE_WSD's decay
    double warmup_from;       // the learning rate that warm-up begins with; 0: a part of the peak, see below
} Schedule;

// Returns the learning rate of step `step` (0 is the first). With W = warmup_steps and
// N = total_steps:
//
//   warm-up   step < W: learning_rate * (step + 1) / W, so that the first step already moves and
//             step W - 1 has the peak; with warmup_from F: F + (learning_rate - F) * step / W, as
//             in OLMo's code, so that step W has it
//   cosine    half a cosine from the peak at step W to the final rate at step N
//   linear    a straight line between the same two points
//   constant  the peak
//   wsd       warm-up, stable, decay: the peak, then over the last decay_fraction of the steps, or
//             what warm-up has left of them, a straight line to the final rate
//
// Steps from N on have the final rate: step N - 1, the last one, is one step short of it. These are
// llm.c's conventions, and PyTorch's CosineAnnealingLR(T_max = N - W) and LinearLR(total_iters =
// N - W), except that llm.c's constant has no warm-up and its wsd decays as 1 - sqrt, which drops
// at once and is less like the linear decay of the WSD literature.
double learning_rate_at(const Schedule *schedule, int64_t step);
