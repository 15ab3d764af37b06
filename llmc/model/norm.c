#include "norm.h"
#include "place.h"

static const float *value_of(const Param *vector) { return vector ? vector->value.data : NULL; }
static float *gradient_of(const Param *vector) { return vector ? vector->gradient : NULL; }

void norm_declare_gains(Param *gains, const Recipe *recipe) {
    gains->value_format = recipe->norm_gains;
    gains->rounding = recipe->rounding[ROLE_WEIGHTS];
    gains->decoded.encoding = recipe_encoding(recipe, FPROP_W, gains->number);
    gains->decoded.encoding.prescale = 0; // they are no GEMM's operand
}

void norm_layout(Norm *n, MemoryPlan *plan, int64_t rows) {
    if (n->kind == NORM_LAYERNORM) n->mean = take_floats(plan, MEMORY_KEPT, rows);
    n->rstd = take_floats(plan, MEMORY_KEPT, rows);
}

static NormParams params_of(const Norm *n) {
    return (NormParams){.kind = n->kind,
                        .eps = NORM_EPS,
                        .mean = n->mean,
                        .rstd = n->rstd,
                        .weight = value_of(n->weight),
                        .bias = value_of(n->bias)};
}

void norm_forward(const Norm *n, const Backend *backend, Tensor out, Tensor sum, Tensor stream, Tensor delta) {
    backend->layernorm_forward(out, sum, stream, delta, params_of(n));
}

Source norm_source(const Norm *n, Tensor x) { return (Source){.kind = SOURCE_LAYERNORM, .x = x, .norm = params_of(n)}; }

void norm_backward(const Norm *n, const Backend *backend, Tensor dx, Tensor dout, Tensor x) {
    backend->layernorm_backward(dx, gradient_of(n->weight), gradient_of(n->bias), dout, x, params_of(n));
}

// The backend's addition is the one before a norm. RMSNorm has the fewer statistics.
void stream_add(const Backend *backend, Tensor sum, Tensor stream, Tensor delta, float *unused) {
    NormParams unread = {.kind = NORM_RMSNORM, .eps = NORM_EPS, .rstd = unused};
    backend->layernorm_forward((Tensor){0}, sum, stream, delta, unread);
}
