#include "outlier.h"

#include <math.h>

// Equal values have a standard deviation of up to this fraction of their mean, which is the mean's
// own rounding.
static const double SPREAD_OF_ROUNDING = 1e-13;

double outlier_zscore(const OutlierWindow *window, double value) {
    if (!isfinite(value)) return INFINITY;
    if (window->count < OUTLIER_WINDOW) return 0;
    double mean = 0, variance = 0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        mean += window->values[i] / OUTLIER_WINDOW;
    }
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        variance += (window->values[i] - mean) * (window->values[i] - mean) / OUTLIER_WINDOW;
    }
    double deviation = sqrt(variance);
    return deviation > SPREAD_OF_ROUNDING * fabs(mean) ? (value - mean) / deviation : 0;
}

void outlier_add(OutlierWindow *window, double value) {
    if (!isfinite(value)) return;
    window->values[window->position] = value;
    window->position = (window->position + 1) % OUTLIER_WINDOW;
    if (window->count < OUTLIER_WINDOW) window->count++;
}
