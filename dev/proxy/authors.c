#include "authors.h"
#include "authors_rows.h"

#include <stdlib.h>

static const Backend *base; // what the table is made around
static const AuthorsOps *ops;
static AuthorsArithmetic arithmetic;

// On the CPU

static const Columns ALL = {0, 1};

static void cpu_round(Tensor out, Tensor in, bool odd) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < in.rows * in.cols; i++) {
        put(out, i, q_operand(get(in, i), odd));
    }
}

static void cpu_norm_forward(Tensor out, float *scratch, Tensor x, NormParams norm) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.rows; row++) {
        row_forward(out, scratch + row * x.cols, x, row, norm, ALL);
    }
}

static void cpu_norm_backward(Tensor dinput, float *products, Tensor dout, Tensor input, NormParams norm) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < dout.rows; row++) {
        row_backward(dinput, products + row * dout.cols, dout, input, row, norm, ALL);
    }
}

static void cpu_add_columns(float *sums, Tensor values) {
#pragma omp parallel for schedule(static)
    for (int64_t col = 0; col < values.cols; col++) {
        add_column(sums, values, col);
    }
}

static void cpu_activation_forward(Tensor out, Tensor input, Activation activation) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < input.rows * input.cols; i++) {
        put(out, i, activate(get(input, i), activation));
    }
}

static void cpu_activation_backward(Tensor dinput, Tensor dout, Tensor input, Activation activation) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < input.rows * input.cols; i++) {
        put(dinput, i, q(activation_slope(get(input, i), activation) * q(get(dout, i))));
    }
}

const AuthorsOps authors_on_cpu = {cpu_round,       cpu_norm_forward,       cpu_norm_backward,
                                   cpu_add_columns, cpu_activation_forward, cpu_activation_backward};

// Scratch, on the device

typedef struct {
    void *memory;
    size_t bytes;
} Buffer;
enum { MADE, OPERAND, PRODUCTS, WIDE, BUFFERS }; // a source; it rounded; of layernorm; of a GEMM
static Buffer buffers[BUFFERS];

static void release(Buffer *buffer) {
    if (buffer->memory) base->release(buffer->memory);
    *buffer = (Buffer){0};
}

static Tensor room_for(int which, Format dtype, int64_t rows, int64_t cols) {
    Buffer *buffer = &buffers[which];
    size_t bytes = (size_t)(rows * cols) * dtype_size(dtype);
    if (bytes > buffer->bytes) {
        release(buffer);
        *buffer = (Buffer){base->allocate(bytes), bytes};
    }
    return tensor_make(buffer->memory, dtype, rows, cols);
}

// Layernorm

static void layernorm_forward(Tensor out, Tensor sum, Tensor input, Tensor residual, NormParams norm) {
    if (!arithmetic.layernorm || norm.kind != NORM_LAYERNORM) {
        base->layernorm_forward(out, sum, input, residual, norm);
        return;
    }
    NormParams unread = {.kind = NORM_RMSNORM, .eps = norm.eps, .rstd = norm.rstd};
    if (residual.data) base->layernorm_forward((Tensor){0}, sum, input, residual, unread);
    if (!out.data) return;
    Tensor x = residual.data ? sum : input;
    ops->norm_forward(out, room_for(PRODUCTS, FORMAT_FP32, x.rows, x.cols).data, x, norm);
}

static void layernorm_backward(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input,
                               NormParams norm) {
    if (arithmetic.no_norm_biases) dbias = NULL;
    if (!arithmetic.layernorm || norm.kind != NORM_LAYERNORM) {
        base->layernorm_backward(dinput, dweight, dbias, dout, input, norm);
        return;
    }
    Tensor values = room_for(PRODUCTS, FORMAT_FP32, dout.rows, dout.cols);
    ops->norm_backward(dinput, values.data, dout, input, norm);
    if (dweight) ops->add_columns(dweight, values);
    if (!dbias) return;
    ops->round(values, dout, false);
    ops->add_columns(dbias, values);
}

// Activations

static bool is_theirs(Activation activation) {
    return arithmetic.activation && (activation == ACTIVATION_GELU || activation == ACTIVATION_RELU);
}

static void activation_forward(Tensor out, Tensor input, Activation activation) {
    (is_theirs(activation) ? ops->activation_forward : base->activation_forward)(out, input, activation);
}

static void activation_backward(Tensor dinput, float *dbias, Tensor dout, Tensor input, Activation activation) {
    if (dbias) die("internal error: the authors' linear layers have no biases");
    if (is_theirs(activation)) {
        ops->activation_backward(dinput, dout, input, activation);
    } else {
        base->activation_backward(dinput, NULL, dout, input, activation);
    }
}

// Linear layers

// Returns whether a source is made here, rather than by the quantizer as it is read.
static bool is_made_here(const Source *in) {
    if (in->kind == SOURCE_TENSOR) return false;
    return arithmetic.linear || (in->kind == SOURCE_LAYERNORM ? arithmetic.layernorm : is_theirs(in->activation));
}

static Tensor make_source(const Source *in) {
    Tensor out = room_for(MADE, in->x.dtype, in->x.rows, source_cols(in));
    switch (in->kind) {
    case SOURCE_TENSOR:
        return in->x;
    case SOURCE_LAYERNORM:
        layernorm_forward(out, in->x, in->x, (Tensor){0}, in->norm);
        break;
    case SOURCE_ACTIVATION:
        activation_forward(out, in->x, in->activation);
        break;
    case SOURCE_ACTIVATION_BACKWARD:
        base->convert(out, in->dout);
        activation_backward(out, NULL, out, in->x, in->activation);
        break;
    }
    if (in->stored.data) base->convert(in->stored, out);
    return out;
}

// Returns the values rounded to BF16, in FP32, so that their elements too are rounded away from
// zero at ties. What that takes doesn't move a scale that is rounded down.
static Tensor make_operand(Tensor in, ScaleRounding rounding) {
    Tensor out = room_for(OPERAND, FORMAT_FP32, in.rows, in.cols);
    ops->round(out, in, rounding == SCALE_FLOOR);
    return out;
}

static void quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                     ScaleRounding rounding) {
    Source source = is_made_here(&in) ? source_tensor(make_source(&in)) : in;
    if (arithmetic.linear) source = source_tensor(make_operand(source.x, rounding));
    base->quantize(rowwise, columnwise, source, rounding);
}

// Gradients of weights are added to ones that are zero, so that what is rounded is the gradient.
static void gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    bool through_fp32 = arithmetic.linear && d.dtype != FORMAT_FP32;
    Tensor out = through_fp32 ? room_for(WIDE, FORMAT_FP32, d.rows, d.cols) : d;
    base->gemm(out, a, b, options);
    if (arithmetic.linear) ops->round(d, out, false);
}

// Makes the MX copies from the new masters rounded to BF16.
static void adamw(AdamWUpdate update) {
    QuantizedTensor copies[] = {update.rowwise, update.columnwise};
    if (arithmetic.linear) update.rowwise.elements = update.columnwise.elements = NULL;
    base->adamw(update);
    if (!arithmetic.linear) return;
    const QuantizedTensor *wanted[2];
    for (int i = 0; i < 2; i++) {
        wanted[i] = copies[i].elements ? &copies[i] : NULL;
    }
    Tensor master = tensor_make(update.master, FORMAT_FP32, update.rows, update.cols);
    if (wanted[0] || wanted[1]) quantize(wanted[0], wanted[1], source_tensor(master), update.rounding);
}

const Backend *authors_backend(const Backend *backend, const AuthorsOps *of_device, AuthorsArithmetic what) {
    static Backend table;
    for (int i = 0; i < BUFFERS; i++) {
        release(&buffers[i]);
    }
    base = backend;
    ops = of_device;
    arithmetic = what;
    table = *backend;
    table.layernorm_forward = layernorm_forward;
    table.layernorm_backward = layernorm_backward;
    table.activation_forward = activation_forward;
    table.activation_backward = activation_backward;
    table.quantize = quantize;
    table.gemm = gemm;
    table.adamw = adamw;
    return &table;
}
