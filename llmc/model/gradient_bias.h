/*
Gradient bias: how far the gradients of a recipe are from the exact ones, of the same micro-batches
and weights. With the exact gradient g, of recipe fp32, and the error e = gradient - g: ||e|| /
||g||, and the cosine between gradient and g (Su et al., arXiv:2506.20752, whose figures show both
on the way to a divergence).
*/
#pragma once

#include "param.h"
#include "llmc/files/json.h" // JsonWriter

typedef struct {
    double error_ratio, cosine; // NaN where a gradient is zero or not finite
} GradientBias;

// Of all gradients; of each layer's; and of what belongs to no layer: embeddings, final norm, head.
typedef struct {
    GradientBias total, rest;
    GradientBias *layers; // (layers), the caller's
} GradientBiases;

// Compares the gradients of two models with the same parameters, of the same micro-batches.
void gradient_bias_measure(GradientBiases *biases, const ParamList *list, const ParamList *exact,
                           const Backend *backend, int64_t layers);

// Writes the members of the event "gradient_bias" but for its step.
void gradient_bias_write(const GradientBiases *biases, int64_t layers, JsonWriter *writer);
