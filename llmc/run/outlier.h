/*
Outliers of a loss or a gradient norm, by z-score against the values before.
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
