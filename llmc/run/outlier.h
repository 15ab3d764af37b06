/*
Outliers of a loss or a gradient norm, by z-score against the values before; and spikes of a loss,
from the first outlier until it is back.
*/
#pragma once

#include <stdint.h>

enum { OUTLIER_WINDOW = 128 };

// The last OUTLIER_WINDOW values accepted, as a ring. Plain data, zeroed at first: a checkpoint
// saves it as it is.
typedef struct {
    double values[OUTLIER_WINDOW];
    int32_t count;    // values held
    int32_t position; // where the next one goes
} OutlierWindow;

// Returns how many standard deviations (of the population, as in llm.c) `value` lies above the
// window's mean: 0 until the window is full, and where all its values are equal. A value that isn't
// finite is INFINITY from the start: above any threshold.
double outlier_zscore(const OutlierWindow *window, double value);

// Accepts a value in place of the oldest. One that isn't finite is left out, so that it can't make
// every later z-score NaN.
void outlier_add(OutlierWindow *window, double value);

// A spike begins with a loss that lies SPIKE_DEVIATIONS standard deviations above the window's
// mean, and ends with one that is no more than one above that mean. Plain data, zeroed at first.
static const double SPIKE_DEVIATIONS = 6;
typedef struct {
    int64_t count; // of spikes so far
    int64_t steps; // since this one began; 0: there is none
    double level;  // that the loss must come back to
    double peak;   // the largest loss of this spike
} Spike;
typedef enum { SPIKE_GOES_ON, SPIKE_BEGINS, SPIKE_ENDS } SpikeChange; // or there is none, as before

// Follows the loss of a step, before it is added to `losses`. Losses that aren't finite are passed
// over. Of a spike that ends, `steps` is how many it took.
SpikeChange spike_follow(Spike *spike, const OutlierWindow *losses, double loss);

// Returns the mean of the window's last 16 values over that of all: how much they have grown. NaN
// until the window is full.
double outlier_growth(const OutlierWindow *window);
