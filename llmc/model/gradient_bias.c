#include "gradient_bias.h"

#include <math.h>
#include <stdlib.h>

// Sums of a gradient, the exact one and their difference.
typedef struct {
    double squares, exact_squares, squared_distance;
} Sums;

static void add_sums(Sums *to, const Sums *sums) {
    to->squares += sums->squares;
    to->exact_squares += sums->exact_squares;
    to->squared_distance += sums->squared_distance;
}

static GradientBias bias_of(const Sums *s) {
    double product = (s->squares + s->exact_squares - s->squared_distance) / 2;
    return (GradientBias){.error_ratio = sqrt(s->squared_distance / s->exact_squares),
                          .cosine = product / sqrt(s->squares * s->exact_squares)};
}

void gradient_bias_measure(GradientBiases *biases, const ParamList *list, const ParamList *exact,
                           const Backend *backend, int64_t layers) {
    Sums total = {0}, *parts = allocate((size_t)(layers + 1) * sizeof(*parts)); // the last one: of no layer
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i], *q = &exact->params[i];
        int64_t count = param_count(p);
        Sums sums = {.squares = backend->sum_of_squares(p->gradient, count),
                     .exact_squares = backend->sum_of_squares(q->gradient, count),
                     .squared_distance = backend->squared_distance(p->gradient, q->gradient, count)};
        add_sums(&parts[p->layer >= 0 ? p->layer : layers], &sums);
        add_sums(&total, &sums);
    }
    for (int64_t l = 0; l < layers; l++) {
        biases->layers[l] = bias_of(&parts[l]);
    }
    biases->rest = bias_of(&parts[layers]);
    biases->total = bias_of(&total);
    free(parts);
}

static void write_bias(JsonWriter *w, const GradientBias *bias) {
    json_write_double(w, "error_ratio", bias->error_ratio);
    json_write_double(w, "cosine", bias->cosine);
}

void gradient_bias_write(const GradientBiases *biases, int64_t layers, JsonWriter *w) {
    write_bias(w, &biases->total);
    json_begin_array(w, "layers");
    for (int64_t l = 0; l < layers; l++) {
        json_begin_object(w, NULL);
        write_bias(w, &biases->layers[l]);
        json_end_object(w);
    }
    json_end_array(w);
    json_begin_object(w, "rest");
    write_bias(w, &biases->rest);
    json_end_object(w);
}
