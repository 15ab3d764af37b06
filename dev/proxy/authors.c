#include "authors.h"

#include <math.h>
#include <stdlib.h>

static const Backend *cpu;
static AuthorsArithmetic arithmetic;

// Scratch

typedef struct {
    void *memory;
    size_t bytes;
} Buffer;
static Buffer made, operand, products, wide; // a source; it rounded; of layernorm; of a GEMM

static void *room(Buffer *buffer, size_t bytes) {
    if (bytes > buffer->bytes) {
        free(buffer->memory);
        *buffer = (Buffer){allocate(bytes), bytes};
    }
    return buffer->memory;
}

static Tensor room_for(Buffer *buffer, Format dtype, int64_t rows, int64_t cols) {
    return tensor_make(room(buffer, (size_t)(rows * cols) * dtype_size(dtype)), dtype, rows, cols);
}

// Elements

// Rounds to BF16, away from zero at ties.
static inline float q(float x) {
    uint32_t bits = mx_float_bits(x);
    if ((bits & 0x7FFFFFFFu) >= 0x7F800000u) return x;
    return mx_bits_float((bits + 0x8000u) & 0xFFFF0000u);
}

static inline float get(Tensor t, int64_t i) {
    return t.dtype == FORMAT_FP32 ? ((const float *)t.data)[i] : mx_from_bf16(((const uint16_t *)t.data)[i]);
}

static inline void put(Tensor t, int64_t i, float x) {
    if (t.dtype == FORMAT_FP32) {
        ((float *)t.data)[i] = x;
    } else {
        ((uint16_t *)t.data)[i] = mx_to_bf16(x);
    }
}

static void round_tensor(Tensor out, Tensor in) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < in.rows * in.cols; i++) {
        put(out, i, q(get(in, i)));
    }
}

// Layernorm

// What both passes know of a row: (x - mean) / root, root^2 the variance with eps.
typedef struct {
    float variance, root, inverse;
} RowStatistics;

static float rounded_mean(double sum, int64_t count) { return q(q((float)sum) / (float)count); }

// Writes the normalized row to n (C).
static RowStatistics normalize_row(float *n, Tensor x, int64_t row, float eps) {
    int64_t C = x.cols, first = row * C;
    double sum = 0, squares = 0;
    for (int64_t c = 0; c < C; c++) {
        sum += n[c] = q(get(x, first + c));
    }
    float mean = rounded_mean(sum, C);
    for (int64_t c = 0; c < C; c++) {
        n[c] = q(n[c] - mean);
        squares += q(n[c] * n[c]);
    }
    RowStatistics s = {.variance = q(rounded_mean(squares, C) + eps)};
    s.root = q(sqrtf(s.variance));
    s.inverse = q(1 / s.root);
    for (int64_t c = 0; c < C; c++) {
        n[c] = q(n[c] * s.inverse);
    }
    return s;
}

static void write_normalized(Tensor out, Tensor x, NormParams norm) {
    int64_t C = x.cols;
    float *all = room(&products, (size_t)(x.rows * C) * sizeof(float));
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.rows; row++) {
        float *n = all + row * C;
        normalize_row(n, x, row, norm.eps);
        for (int64_t c = 0; c < C; c++) {
            float scaled = norm.weight ? q(q(norm.weight[c]) * n[c]) : n[c];
            put(out, row * C + c, norm.bias ? q(scaled + q(norm.bias[c])) : scaled);
        }
    }
}

static void layernorm_forward(Tensor out, Tensor sum, Tensor input, Tensor residual, NormParams norm) {
    if (!arithmetic.layernorm || norm.kind != NORM_LAYERNORM) {
        cpu->layernorm_forward(out, sum, input, residual, norm);
        return;
    }
    NormParams unread = {.kind = NORM_RMSNORM, .eps = norm.eps, .rstd = norm.rstd};
    if (residual.data) cpu->layernorm_forward((Tensor){0}, sum, input, residual, unread);
    if (out.data) write_normalized(out, residual.data ? sum : input, norm);
}

// The gradient of a normalized value.
static inline float normalized_gradient(Tensor dout, int64_t i, const float *weight, int64_t c) {
    return q(q(get(dout, i)) * q(weight ? weight[c] : 1));
}

// The gradient of a value, less the row's mean of these. `back`: along the normalized row n.
static inline float shifted_gradient(float dn, float inverse, float back, float n) {
    return q(q(dn * inverse) + q(-back * n));
}

// Adds a row's gradient to dinput, and makes of n (C), the normalized row, its products with dout.
static void row_backward(Tensor dinput, float *n, RowStatistics s, Tensor dout, int64_t row, const float *weight) {
    int64_t C = dout.cols, first = row * C;
    double along = 0, sum = 0;
    for (int64_t c = 0; c < C; c++) {
        along += q(q(normalized_gradient(dout, first + c, weight, c) * n[c]) * s.root);
    }
    float back = q(rounded_mean(along, C) * q(1 / s.variance));
    for (int64_t c = 0; c < C; c++) {
        sum += shifted_gradient(normalized_gradient(dout, first + c, weight, c), s.inverse, back, n[c]);
    }
    float mean = rounded_mean(sum, C);
    for (int64_t c = 0; c < C; c++) {
        float dn = normalized_gradient(dout, first + c, weight, c);
        float dx = q(shifted_gradient(dn, s.inverse, back, n[c]) - mean);
        put(dinput, first + c, get(dinput, first + c) + dx);
        n[c] = q(q(get(dout, first + c)) * n[c]);
    }
}

// Adds the rounded sums of columns.
static void add_columns(float *sums, const float *values, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < cols; c++) {
        double sum = 0;
        for (int64_t row = 0; row < rows; row++) {
            sum += values[row * cols + c];
        }
        sums[c] += q((float)sum);
    }
}

static void layernorm_backward(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input,
                               NormParams norm) {
    if (arithmetic.no_norm_biases) dbias = NULL;
    if (!arithmetic.layernorm || norm.kind != NORM_LAYERNORM) {
        cpu->layernorm_backward(dinput, dweight, dbias, dout, input, norm);
        return;
    }
    int64_t rows = dout.rows, C = dout.cols;
    float *all = room(&products, (size_t)(rows * C) * sizeof(float));
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        RowStatistics s = normalize_row(all + row * C, input, row, norm.eps);
        row_backward(dinput, all + row * C, s, dout, row, norm.weight);
    }
    if (dweight) add_columns(dweight, all, rows, C);
    if (!dbias) return;
    round_tensor(tensor_make(all, FORMAT_FP32, rows, C), dout);
    add_columns(dbias, all, rows, C);
}

// Activations

// The logistic function of 1.59375 (x + 0.044677734 x^3), by which they have GELU.
static inline float gelu_gate(float x) {
    float inner = q(1.59375f * q(q(0.044677734f * q(q(x * x) * x)) + x));
    return q(1 / q(q(expf(-inner)) + 1));
}

static inline float gelu_slope(float x) {
    float gate = gelu_gate(x), spread = q(gate * q(1 - gate));
    float inner_slope = q(1.59375f + q(0.21386719f * q(x * x)));
    return q(gate + q(x * q(inner_slope * spread)));
}

static bool is_theirs(Activation activation) {
    return arithmetic.activation && (activation == ACTIVATION_GELU || activation == ACTIVATION_RELU);
}

static void activation_forward(Tensor out, Tensor input, Activation activation) {
    if (!is_theirs(activation)) {
        cpu->activation_forward(out, input, activation);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < input.rows * input.cols; i++) {
        float x = q(get(input, i));
        put(out, i, activation == ACTIVATION_RELU ? fmaxf(x, 0) : q(x * gelu_gate(x)));
    }
}

static void activation_backward(Tensor dinput, float *dbias, Tensor dout, Tensor input, Activation activation) {
    if (dbias) die("internal error: the authors' linear layers have no biases");
    if (!is_theirs(activation)) {
        cpu->activation_backward(dinput, NULL, dout, input, activation);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < input.rows * input.cols; i++) {
        float x = q(get(input, i)), slope = activation == ACTIVATION_RELU ? (float)(x > 0) : gelu_slope(x);
        put(dinput, i, q(slope * q(get(dout, i))));
    }
}

// Linear layers

// Returns whether a source is made here, rather than by the CPU's quantizer as it is read.
static bool is_made_here(const Source *in) {
    if (in->kind == SOURCE_TENSOR) return false;
    return arithmetic.linear || (in->kind == SOURCE_LAYERNORM ? arithmetic.layernorm : is_theirs(in->activation));
}

static Tensor make_source(const Source *in) {
    Tensor out = room_for(&made, in->x.dtype, in->x.rows, source_cols(in));
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
        cpu->convert(out, in->dout);
        activation_backward(out, NULL, out, in->x, in->activation);
        break;
    }
    if (in->stored.data) cpu->convert(in->stored, out);
    return out;
}

// Returns the values rounded to BF16, in FP32. Their elements too are rounded away from zero at
// ties: the last bit of FP32, far below BF16's, makes our rounding to even do so. It doesn't move a
// scale that is rounded down.
static Tensor make_operand(Tensor in, ScaleRounding rounding) {
    Tensor out = room_for(&operand, FORMAT_FP32, in.rows, in.cols);
    round_tensor(out, in);
    if (rounding != SCALE_FLOOR) return out;
    float *values = out.data;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < in.rows * in.cols; i++) {
        if (values[i] != 0 && isfinite(values[i])) values[i] = mx_bits_float(mx_float_bits(values[i]) | 1);
    }
    return out;
}

static void quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                     ScaleRounding rounding) {
    Source source = is_made_here(&in) ? source_tensor(make_source(&in)) : in;
    if (arithmetic.linear) source = source_tensor(make_operand(source.x, rounding));
    cpu->quantize(rowwise, columnwise, source, rounding);
}

// Gradients of weights are added to ones that are zero, so that what is rounded is the gradient.
static void gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    bool through_fp32 = arithmetic.linear && d.dtype != FORMAT_FP32;
    Tensor out = through_fp32 ? room_for(&wide, FORMAT_FP32, d.rows, d.cols) : d;
    cpu->gemm(out, a, b, options);
    if (arithmetic.linear) round_tensor(d, out);
}

// Makes the MX copies from the new masters rounded to BF16.
static void adamw(AdamWUpdate update) {
    QuantizedTensor copies[] = {update.rowwise, update.columnwise};
    if (arithmetic.linear) update.rowwise.elements = update.columnwise.elements = NULL;
    cpu->adamw(update);
    if (!arithmetic.linear) return;
    const QuantizedTensor *wanted[2];
    for (int i = 0; i < 2; i++) {
        wanted[i] = copies[i].elements ? &copies[i] : NULL;
    }
    Tensor master = tensor_make(update.master, FORMAT_FP32, update.rows, update.cols);
    if (wanted[0] || wanted[1]) quantize(wanted[0], wanted[1], source_tensor(master), update.rounding);
}

const Backend *authors_backend(const Backend *backend, AuthorsArithmetic what) {
    static Backend table;
    cpu = backend;
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
