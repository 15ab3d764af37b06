#include "optimizer.h"

#include <math.h>

double optimizer_gradient_norm(const ParamList *list, const Backend *backend) {
    return sqrt(backend->sum_of_squares(list->gradients, list->gradients_count));
}

void optimizer_step(const ParamList *list, const Backend *backend, OptimizerOptions o, double gradient_norm) {
    bool clip = o.grad_clip > 0 && gradient_norm > o.grad_clip;
    AdamWOptions options = {.learning_rate = (float)o.learning_rate,
                            .beta1 = (float)o.beta1,
                            .beta2 = (float)o.beta2,
                            .eps = (float)o.eps,
                            .weight_decay = (float)o.weight_decay,
                            .gradient_scale = clip ? (float)(o.grad_clip / gradient_norm) : 1.0f,
                            .step = o.step};
    for (int i = 0; i < list->count; i++) {
        param_update(&list->params[i], backend, options);
    }
}
