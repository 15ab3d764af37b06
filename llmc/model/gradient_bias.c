#include "gradient_bias.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// Of a gradient, the exact one and their difference.
typedef struct {
    double squares, exact_squares, squared_distance;
} Sums;

// The block that a parameter belongs to, by the number in its name ("transformer.h.3.ln_1.weight");
// -1: none.
static int64_t layer_of(const Param *p) {
    for (const char *dot = strchr(p->name, '.'); dot; dot = strchr(dot + 1, '.')) {
        if (isdigit((unsigned char)dot[1])) return strtoll(dot + 1, NULL, 10);
    }
    return -1;
}

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

void gradient_bias_measure(GradientBiases *biases, const GPT *model, const GPT *exact) {
    const Backend *backend = model->backend;
    int64_t layers = model->config.layers;
    Sums total = {0}, *parts = allocate((size_t)(layers + 1) * sizeof(*parts)); // the last one: of no block
    for (int i = 0; i < model->params.count; i++) {
        const Param *p = &model->params.params[i], *q = &exact->params.params[i];
        int64_t count = param_count(p), layer = layer_of(p);
        Sums sums = {.squares = backend->sum_of_squares(p->gradient, count),
                     .exact_squares = backend->sum_of_squares(q->gradient, count),
                     .squared_distance = backend->squared_distance(p->gradient, q->gradient, count)};
        add_sums(&parts[layer >= 0 ? layer : layers], &sums);
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
