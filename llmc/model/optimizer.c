#include "optimizer.h"

#include <math.h>

double optimizer_gradient_norm(const ParamList *list, const Backend *backend) {
    Comm *comm = list->sharding.comm;
    if (list->replicated_count == list->gradients_count) {
        return sqrt(backend->sum_of_squares(list->gradients, list->gradients_count));
    }
    double own = 0;
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (!p->is_sharded) continue;
        own += backend->sum_of_squares(p->own_gradient, p->num_rows * p->cols);
    }
    comm_sum_doubles(comm, &own, 1);
    return sqrt(own + backend->sum_of_squares(list->gradients, list->replicated_count));
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
    param_list_update(list, backend, options);
}

void optimizer_sgd_step(const ParamList *list, const Backend *backend, double learning_rate, double momentum) {
    SGDOptions options = {.learning_rate = (float)learning_rate, .momentum = (float)momentum, .gradient_scale = 1.0f};
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        backend->sgd(p->master, momentum > 0 ? p->moment1 : NULL, p->own_gradient, p->num_rows * p->cols, options);
    }
    param_list_refresh(list, backend);
}
