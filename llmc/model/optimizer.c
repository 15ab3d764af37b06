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

AdamWFactors optimizer_factors(OptimizerOptions o, double gradient_norm) {
    bool clip = o.grad_clip > 0 && gradient_norm > o.grad_clip;
    float rate = (float)o.learning_rate, beta1 = (float)o.beta1, beta2 = (float)o.beta2;
    float correction1 = (float)(1.0 - pow(beta1, (double)o.step)); // in double: near 1 the difference cancels
    float correction2 = (float)(1.0 - pow(beta2, (double)o.step));
    return (AdamWFactors){.beta1 = beta1,
                          .beta2 = beta2,
                          .eps = (float)o.eps,
                          .gradient_scale = clip ? (float)(o.grad_clip / gradient_norm) : 1.0f,
                          .decay = 1.0f - rate * (float)o.weight_decay,
                          .step_size = rate / correction1,
                          .root2 = 1.0f / sqrtf(correction2)};
}

void optimizer_step(ParamList *list, const Backend *backend, OptimizerOptions options, double gradient_norm) {
    const AdamWFactors factors = optimizer_factors(options, gradient_norm);
    param_list_set_draws(list, list->seed, list->updates + 1);
    const VectorSpan *vectors = &list->vectors; // which have no copies
    AdamWUpdate of_vectors = {.master = vectors->master,
                              .moment1 = vectors->moment1,
                              .moment2 = vectors->moment2,
                              .gradient = vectors->gradient,
                              .rows = 1,
                              .cols = vectors->count,
                              .factors = factors};
    of_vectors.factors.decay = 1;
    if (vectors->count > 0) backend->adamw(of_vectors);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (p->is_vector || muon_takes(list, p)) continue;
        ParamCopies copies = param_own_copies(list, p);
        AdamWUpdate update = {.master = p->master,
                              .moment1 = p->moment1,
                              .moment2 = p->moment2,
                              .gradient = p->own_gradient,
                              .rows = p->num_rows,
                              .cols = p->cols,
                              .factors = factors,
                              .rowwise = copies.rowwise,
                              .columnwise = copies.columnwise,
                              .rounding = p->rounding,
                              .bf16 = copies.bf16};
        bool is_plain = param_copies_are_plain(p);
        if (!is_plain) update.rowwise = update.columnwise = (QuantizedTensor){0};
        backend->adamw(update);
        if (!is_plain) param_quantize_copies(list, p, backend, &copies, param_masters(p));
    }
    if (list->sharding.muon) muon_step(list, backend, options.muon, factors.gradient_scale);
    param_list_complete(list, backend);
}

void optimizer_sgd_step(ParamList *list, const Backend *backend, double learning_rate, double momentum) {
    SGDOptions options = {.learning_rate = (float)learning_rate, .momentum = (float)momentum, .gradient_scale = 1.0f};
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        backend->sgd(p->master, momentum > 0 ? p->moment1 : NULL, p->own_gradient, p->num_rows * p->cols, options);
    }
    param_list_set_draws(list, list->seed, list->updates + 1);
    param_list_refresh(list, backend);
}
