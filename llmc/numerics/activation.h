/*
Constants of activations, the same for every backend.

GELU's tanh approximation is x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), and (1 +
tanh(u)) / 2 is the logistic function of 2 u, which has no cancellation where u is large and
negative.
*/
#ifndef LLMC_ACTIVATION_H
#define LLMC_ACTIVATION_H

#define GELU_SCALE 1.5957691216057308f // 2 sqrt(2 / pi)
#define GELU_CUBIC 0.044715f

#endif
