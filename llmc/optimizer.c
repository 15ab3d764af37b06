#include "optimizer.h"

#include <math.h>

double optimizer_gradient_norm(const ParamList *list, const Backend *backend) {
    double squares = 0;
    for (int i = 0; i < list->count; i++) {
        squares += backend->sum_of_squares(list->params[i].gradient, param_count(&list->params[i]));
    }
    return sqrt(squares);
}

void optimizer_step(const ParamList *list, const Backend *backend, OptimizerOptions o, double gradient_norm) {
    bool clip = o.grad_clip > 0 && gradient_norm > o.grad_clip;
    AdamWOptions options = {.learning_rate = (float)o.learning_rate,
                            .beta1 = (float)o.beta1,
                            .beta2 = (float)o.beta2,
                            .eps = (float)o.eps,
                            .gradient_scale = clip ? (float)(o.grad_clip / gradient_norm) : 1.0f,
                            .step = o.step};
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        options.weight_decay = p->decayed ? (float)o.weight_decay : 0.0f;
        backend->adamw(p->master, p->moment1, p->moment2, p->gradient, param_count(p), options);
    }
}
