#include "sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "llmc/base/util.h" // allocate

// Returns the id of the largest logit; -1 where one is NaN or +Inf, or none is finite.
static int find_largest(const float *logits, int vocab_size) {
    int largest = -1;
    for (int id = 0; id < vocab_size; id++) {
        if (isnan(logits[id]) || logits[id] == INFINITY) return -1;
        if (logits[id] > (largest < 0 ? -INFINITY : logits[largest])) largest = id;
    }
    return largest;
}

static int compare_descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// Returns the value of the top_k-th largest logit, and counts those equal to it that are among the
// top_k.
static float find_threshold(const float *logits, int vocab_size, int top_k, int *num_equal) {
    float *sorted = allocate((size_t)vocab_size * sizeof(*sorted));
    memcpy(sorted, logits, (size_t)vocab_size * sizeof(*sorted));
    qsort(sorted, (size_t)vocab_size, sizeof(*sorted), compare_descending);
    float threshold = sorted[top_k - 1];
    *num_equal = 0;
    for (int i = top_k - 1; i >= 0 && sorted[i] == threshold; i--) {
        ++*num_equal;
    }
    free(sorted);
    return threshold;
}

// Returns the id at which the sum of the weights so far goes beyond `left`; `otherwise` where rounding
// takes the last one.
static int draw_by_weight(const double *weights, int vocab_size, double left, int otherwise) {
    for (int id = 0; id < vocab_size; id++) {
        if (left < weights[id]) return id;
        left -= weights[id];
    }
    return otherwise;
}

int sample_token(const float *logits, int vocab_size, float temperature, int top_k, float uniform) {
    int largest = find_largest(logits, vocab_size);
    if (largest < 0 || !(temperature > 0)) return largest;
    float threshold = -INFINITY;
    int num_equal = 0;
    if (top_k > 0 && top_k < vocab_size) threshold = find_threshold(logits, vocab_size, top_k, &num_equal);

    double *weights = allocate((size_t)vocab_size * sizeof(*weights)); // 0: never drawn
    double sum = 0;
    for (int id = 0; id < vocab_size; id++) {
        bool drawn = logits[id] > threshold || (logits[id] == threshold && num_equal-- > 0);
        if (!drawn || logits[id] == -INFINITY) continue;
        weights[id] = exp(((double)logits[id] - (double)logits[largest]) / (double)temperature);
        sum += weights[id];
    }
    int token = draw_by_weight(weights, vocab_size, (double)uniform * sum, largest);
    free(weights);
    return token;
}
