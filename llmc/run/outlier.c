#include "outlier.h"

#include <math.h>
#include <stdbool.h>

// Equal values have a standard deviation of up to this fraction of their mean, which is the mean's
// own rounding.
static const double SPREAD_OF_ROUNDING = 1e-13;

typedef struct {
    double mean, deviation;
} Spread;

static Spread spread_of(const OutlierWindow *window) {
    double mean = 0, variance = 0;
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        mean += window->values[i] / OUTLIER_WINDOW;
    }
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        variance += (window->values[i] - mean) * (window->values[i] - mean) / OUTLIER_WINDOW;
    }
    return (Spread){mean, sqrt(variance)};
}

double outlier_zscore(const OutlierWindow *window, double value) {
    if (!isfinite(value)) return INFINITY;
    if (window->count < OUTLIER_WINDOW) return 0;
    Spread spread = spread_of(window);
    bool is_spread = spread.deviation > SPREAD_OF_ROUNDING * fabs(spread.mean);
    return is_spread ? (value - spread.mean) / spread.deviation : 0;
}

void outlier_add(OutlierWindow *window, double value) {
    if (!isfinite(value)) return;
    window->values[window->position] = value;
    window->position = (window->position + 1) % OUTLIER_WINDOW;
    if (window->count < OUTLIER_WINDOW) window->count++;
}

static SpikeChange begin_spike(Spike *spike, const OutlierWindow *losses, double loss) {
    Spread spread = spread_of(losses);
    *spike = (Spike){.count = spike->count + 1, .steps = 1, .level = spread.mean + spread.deviation, .peak = loss};
    return SPIKE_BEGINS;
}

SpikeChange spike_follow(Spike *spike, const OutlierWindow *losses, double loss) {
    bool is_open = spike->steps > 0;
    if (!isfinite(loss)) return SPIKE_GOES_ON;
    if (!is_open && outlier_zscore(losses, loss) > SPIKE_DEVIATIONS) return begin_spike(spike, losses, loss);
    if (!is_open) return SPIKE_GOES_ON;
    if (loss <= spike->level) return SPIKE_ENDS;
    spike->steps++;
    spike->peak = fmax(spike->peak, loss);
    return SPIKE_GOES_ON;
}

double outlier_growth(const OutlierWindow *window) {
    enum { LAST = 16 };
    double last = 0;
    if (window->count < OUTLIER_WINDOW) return NAN;
    for (int i = 1; i <= LAST; i++) {
        last += window->values[(window->position + OUTLIER_WINDOW - i) % OUTLIER_WINDOW] / LAST;
    }
    return last / spread_of(window).mean;
}
