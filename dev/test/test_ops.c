/*
Each operation of the CPU backend, in FP32 and in BF16, against plain double precision: forwards
against the formula, gradients against finite differences of the formula. Every bound is derived
from the operation's own sums: (length of a sum) x (unit roundoff) x (sum of magnitudes), plus one
rounding of what is stored. Every operation gives the same bits with one thread and with two (gemm:
each time), leaves the columns between rows alone, and turns a NaN into NaN.
*/
#include <omp.h>
#ifdef HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif
#include <unistd.h>
#include "attention_reference.h"
#include "check.h"
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/onednn.h"
#include "llmc/cpu/vector_math.h"

static const Backend *backend;
static const Format DTYPES[] = {FORMAT_FP32, FORMAT_BF16};
static const char *const DTYPE_NAMES[] = {"fp32", "bf16"};

#define FOR_EACH_DTYPE(dtype) for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++)

// Gives scratch full of NaN.
static void give_workspace(size_t bytes) {
    void *workspace = pool_take(bytes);
    memset(workspace, 0xFF, bytes);
    backend->use_workspace(workspace, bytes);
}

// Vector math
// ---------------------------------------------------------------------------------------------------------

static double ulp_error(float value, double expected) {
    return fabs((double)value - expected) / ldexp(1, ilogb(expected) - 23);
}

// Through the FP32 values of either sign up to `limit`.
static double worst_ulp(float (*function)(float), double (*exact)(double), float limit) {
    const uint32_t stride = 211; // prime: the low bits vary
    double worst = 0;
#pragma omp parallel for reduction(max : worst)
    for (uint32_t bits = 0x00800000u; bits <= mx_float_bits(limit); bits += stride) {
        float x = mx_bits_float(bits);
        worst = fmax(worst, fmax(ulp_error(function(x), exact(x)), ulp_error(function(-x), exact(-x))));
    }
    return worst;
}

static float exp_of(float x) { return vector_exp(x); }

static float logistic2_of(float x) { return vector_logistic2(x); }

static double logistic2(double x) { return 1 / (1 + exp2(-x)); }

#ifdef __AVX512F__
static float exp2_of(float x) { return _mm512_cvtss_f32(vector_exp2(_mm512_set1_ps(x))); }
#endif

static void test_vector_math(void **state) {
    (void)state;
    double exp_error = worst_ulp(exp_of, exp, 87.3f);
    printf("    vector_exp within %.2f ulp\n", exp_error);
    assert_true(exp_error <= 1.2);
    assert_true(vector_exp(0) == 1 && vector_exp(-0.0f) == 1);
    assert_true(vector_exp(-INFINITY) < 2e-38f && vector_exp(-INFINITY) > 0 && isfinite(vector_exp(1e30f)));
    assert_true(isnan(vector_exp(NAN)));
    double logistic_error = worst_ulp(logistic2_of, logistic2, 126);
    printf("    vector_logistic2 within %.2f ulp\n", logistic_error);
    assert_true(logistic_error <= 2.5);
    assert_true(vector_logistic2(0) == 0.5f && vector_logistic2(126) == 1);
#ifdef __AVX512F__
    double exp2_error = worst_ulp(exp2_of, exp2, 126);
    printf("    vector_exp2 within %.2f ulp\n", exp2_error);
    assert_true(exp2_error <= 1);
    assert_true(exp2_of(0) == 1 && exp2_of(-0.0f) == 1 && exp2_of(-126.1f) == 0 && exp2_of(-INFINITY) == 0);
    assert_true(isnan(exp2_of(NAN)));
#endif
}

// Layer normalisation
// -------------------------------------------------------------------------------------------------

typedef struct {
    double mean, rstd, mean_magnitude;
} RowStatistics;

static RowStatistics row_statistics(const double *x, int64_t C, const NormParams *norm) {
    RowStatistics s = {0};
    double squares = 0;
    for (int64_t c = 0; c < C && norm->kind == NORM_LAYERNORM; c++) {
        s.mean += x[c] / (double)C;
        s.mean_magnitude += fabs(x[c]) / (double)C;
    }
    for (int64_t c = 0; c < C; c++) {
        squares += (x[c] - s.mean) * (x[c] - s.mean) / (double)C;
    }
    s.rstd = 1 / sqrt(squares + norm->eps);
    return s;
}

// Sum over a row of dout * layernorm(x), as a function of x[col].
typedef struct {
    double *x;
    const double *weight, *dout;
    int64_t C, col;
    NormParams norm;
} LayernormLoss;

static double layernorm_loss(void *context, double value) {
    LayernormLoss *l = context;
    double kept = l->x[l->col], loss = 0;
    l->x[l->col] = value;
    RowStatistics s = row_statistics(l->x, l->C, &l->norm);
    for (int64_t c = 0; c < l->C; c++) {
        loss += l->dout[c] * l->weight[c] * (l->x[c] - s.mean) * s.rstd;
    }
    l->x[l->col] = kept;
    return loss;
}

// mean: NULL for RMSNorm; weight and dweight, bias and dbias: NULL where there are none.
typedef struct {
    NormKind kind;
    float eps;
    Tensor input, dout, dinput;
    float *weight, *bias, *mean, *rstd, *dweight, *dbias;
    int64_t rows, C;
} LayernormCase;

static NormParams norm_params(const LayernormCase *l) {
    return (NormParams){l->kind, l->eps, l->mean, l->rstd, l->weight, l->bias};
}

static double value_or(const float *values, int64_t i, double otherwise) { return values ? values[i] : otherwise; }
static float *copy_or_null(const float *values, int64_t count) { return values ? copy_floats(values, count) : NULL; }

static void check_same_or_null(const float *a, const float *b, int64_t count) {
    if (a) check_same_floats(a, b, count);
}

static const char *layernorm_name(const LayernormCase *l) {
    static char name[64];
    snprintf(name, sizeof(name), "%s%s%s", l->kind == NORM_LAYERNORM ? "layernorm" : "rmsnorm",
             l->weight ? "" : ", no gains", l->bias ? "" : ", no bias");
    return name;
}

// What a computed (x - mean) rstd is off by, as a multiple of the sums' relative error.
static double normal_sensitivity(RowStatistics s, double x) {
    return s.rstd * s.mean_magnitude + fabs((x - s.mean) * s.rstd);
}

static const Tensor NO_TENSOR = {0};

static void check_layernorm_forward(const LayernormCase *l, Format dtype) {
    Tensor out = take_tensor(dtype, l->rows, l->C), again = take_tensor(dtype, l->rows, l->C);
    NormParams norm = norm_params(l), norm_again = norm;
    float *mean = l->mean ? take_floats(l->rows) : NULL, *rstd = take_floats(l->rows);
    norm_again.mean = mean, norm_again.rstd = rstd;
    omp_set_num_threads(1);
    backend->layernorm_forward(again, NO_TENSOR, l->input, NO_TENSOR, norm_again);
    omp_set_num_threads(2);
    backend->layernorm_forward(out, NO_TENSOR, l->input, NO_TENSOR, norm);
    check_same_tensor(out, again);
    check_same_or_null(mean, l->mean, l->rows);
    check_same_floats(rstd, l->rstd, l->rows);
    check_padding(out);
    memset(rstd, UNWRITTEN, (size_t)l->rows * sizeof(float));
    backend->layernorm_forward(NO_TENSOR, NO_TENSOR, l->input, NO_TENSOR, norm_again);
    check_same_floats(rstd, l->rstd, l->rows);

    const double *x = tensor_doubles(l->input);
    Check values = {0}, statistics = {0};
    for (int64_t r = 0; r < l->rows; r++, x += l->C) {
        RowStatistics s = row_statistics(x, l->C, &norm);
        if (l->mean) check_value(&statistics, l->mean[r], s.mean, sum_error(l->C) * s.mean_magnitude);
        check_value(&statistics, l->rstd[r], s.rstd, sum_error(l->C) * s.rstd);
        for (int64_t c = 0; c < l->C; c++) {
            double weight = value_or(l->weight, c, 1), bias = value_or(l->bias, c, 0);
            double product = (x[c] - s.mean) * s.rstd * weight, y = product + bias;
            double bound = fabs(weight) * sum_error(l->C) * normal_sensitivity(s, x[c]) +
                           4 * U_FP32 * (fabs(product) + fabs(bias)) + rounding(dtype, y);
            check_value(&values, tensor_get(out, r, c), y, bound);
        }
    }
    check_end(&values, "%s forward %s (%lld, %lld)", layernorm_name(l), DTYPE_NAMES[dtype], (long long)l->rows,
              (long long)l->C);
    check_end(&statistics, "  mean and rstd");
}

// dx = rstd (dn - mean(dn) - n mean(dn n)): sums of C terms, and n itself is off.
static double layernorm_input_bound(const LayernormLoss *l, RowStatistics s, int64_t c) {
    double sum = 0, dot = 0, shifted = 0, C = (double)l->C;
    for (int64_t i = 0; i < l->C; i++) {
        double dn = fabs(l->dout[i] * l->weight[i]), n = fabs((l->x[i] - s.mean) * s.rstd);
        sum += dn / C;
        dot += dn * n / C;
        shifted += dn * normal_sensitivity(s, l->x[i]) / C;
    }
    double n = fabs((l->x[c] - s.mean) * s.rstd), dn = fabs(l->dout[c] * l->weight[c]);
    return s.rstd * sum_error(l->C) * (2 * (dn + sum + n * dot) + normal_sensitivity(s, l->x[c]) * dot + n * shifted);
}

static void check_layernorm_backward(const LayernormCase *l, Format dtype) {
    Tensor dinput = copy_tensor(l->dinput), again = copy_tensor(l->dinput);
    float *dweight = copy_or_null(l->dweight, l->C), *dbias = copy_or_null(l->dbias, l->C);
    omp_set_num_threads(1);
    backend->layernorm_backward(again, dweight, dbias, l->dout, l->input, norm_params(l));
    float *dweight_again = dweight, *dbias_again = dbias;
    dweight = copy_or_null(l->dweight, l->C), dbias = copy_or_null(l->dbias, l->C);
    omp_set_num_threads(2);
    backend->layernorm_backward(dinput, dweight, dbias, l->dout, l->input, norm_params(l));
    check_same_tensor(dinput, again);
    check_same_or_null(dweight, dweight_again, l->C);
    check_same_or_null(dbias, dbias_again, l->C);
    check_padding(dinput);

    double *x = tensor_doubles(l->input), *dout = tensor_doubles(l->dout), *weight = take_doubles(l->C);
    double *weight_sum = take_doubles(l->C), *weight_bound = take_doubles(l->C);
    double *bias_sum = take_doubles(l->C), *bias_magnitude = take_doubles(l->C);
    for (int64_t c = 0; c < l->C; c++) {
        weight[c] = value_or(l->weight, c, 1);
        weight_sum[c] = value_or(l->dweight, c, 0), bias_sum[c] = value_or(l->dbias, c, 0);
        weight_bound[c] = U_FP32 * fabs(weight_sum[c]), bias_magnitude[c] = fabs(bias_sum[c]);
    }
    Check inputs = {0}, parameters = {0};
    for (int64_t r = 0; r < l->rows; r++) {
        LayernormLoss loss = {x + r * l->C, weight, dout + r * l->C, l->C, 0, norm_params(l)};
        RowStatistics s = row_statistics(loss.x, l->C, &loss.norm);
        for (int64_t c = 0; c < l->C; c++) {
            loss.col = c;
            double before = tensor_get(l->dinput, r, c);
            double expected = before + derivative(layernorm_loss, &loss, loss.x[c], 1e-4);
            double bound = layernorm_input_bound(&loss, s, c) + U_FP32 * fabs(before) + rounding(dtype, expected);
            check_value(&inputs, tensor_get(dinput, r, c), expected, bound);

            double n = (loss.x[c] - s.mean) * s.rstd, d = loss.dout[c]; // the derivatives by weight and bias
            weight_sum[c] += d * n;
            weight_bound[c] +=
                fabs(d) * (sum_error(l->C) * normal_sensitivity(s, loss.x[c]) + sum_error(l->rows) * fabs(n));
            bias_sum[c] += d;
            bias_magnitude[c] += fabs(d);
        }
    }
    for (int64_t c = 0; c < l->C; c++) {
        if (dweight)
            check_value(&parameters, dweight[c], weight_sum[c], weight_bound[c] + rounding(FORMAT_FP32, weight_sum[c]));
        if (dbias) check_value(&parameters, dbias[c], bias_sum[c], sum_error(l->rows) * bias_magnitude[c]);
    }
    check_end(&inputs, "%s backward %s (%lld, %lld)", layernorm_name(l), DTYPE_NAMES[dtype], (long long)l->rows,
              (long long)l->C);
    if (parameters.count) check_end(&parameters, "  gradients of weight and bias");
}

static LayernormCase make_layernorm_case(Format dtype, int64_t rows, int64_t C) {
    LayernormCase l = {.rows = rows, .C = C, .eps = rows % 2 ? (float)NORM_EPS : 0.1f};
    l.input = random_tensor(dtype, rows, C, 2);
    l.dout = random_tensor(dtype, rows, C, 1);
    l.dinput = random_tensor(dtype, rows, C, 1);
    l.weight = take_floats(C), l.bias = take_floats(C), l.dweight = take_floats(C), l.dbias = take_floats(C);
    l.mean = take_floats(rows), l.rstd = take_floats(rows);
    fill_floats(l.weight, C, 1);
    fill_floats(l.bias, C, 1);
    fill_floats(l.dweight, C, 1);
    fill_floats(l.dbias, C, 1);
    return l;
}

static void test_layernorm(void **state) {
    (void)state;
    static const int64_t SHAPES[][2] = {{1, 96}, {33, 96}, {100, 96}, {7, 1}, {3, 33}, {5, 257}};
    FOR_EACH_DTYPE(dtype) {
        for (size_t i = 0; i < sizeof(SHAPES) / sizeof(SHAPES[0]); i++) {
            for (int without = 0; without < 8; without++) {
                LayernormCase l = make_layernorm_case(dtype, SHAPES[i][0], SHAPES[i][1]);
                if (without & 1) l.kind = NORM_RMSNORM, l.mean = NULL;
                if (without & 2) l.weight = l.dweight = NULL;
                if (without & 4) l.bias = l.dbias = NULL;
                check_layernorm_forward(&l, dtype);
                check_layernorm_backward(&l, dtype);
                pool_release();
            }
        }
    }
}

// GELU
// ----------------------------------------------------------------------------------------------------------------

static double gelu(void *context, double x) {
    (void)context;
    // x (1 + tanh(u)) / 2 without its cancellation
    return x / (1 + exp(-2 * sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}

// GELU is x g with g = 1 / (1 + exp(-z)). z is off by up to 4 U_FP32 of itself (a square, its
// factor, a multiplication and addition, a product), exp by 2.4 U_FP32 more, of which g takes the
// part 1 - g; the sum and the quotient add one each. Below x = -10 g stays at LEAST_GATE.
typedef struct {
    double z, slope, g, relative;
} Gate;

static const double LEAST_GATE = 0x1.07p-126;

static Gate gate_at(double x) {
    double factor = 2 * sqrt(2 / acos(-1)), z = factor * (x + 0.044715 * x * x * x), g = 1 / (1 + exp(-z));
    return (Gate){z, factor * (1 + 3 * 0.044715 * x * x), g,
                  U_FP32 * (1 / (1 + exp(z)) * (2.4 + 4 * fmin(fabs(z), 89)) + 2)};
}

static double gelu_bound(double x) {
    Gate gate = gate_at(x);
    return fabs(x) * (gate.g * (gate.relative + U_FP32) + LEAST_GATE);
}

// Of g + x g (1 - g) slope: 1 - g is off by g's error and a rounding, the product of four by four
// more.
static double gelu_gradient_bound(double x) {
    Gate gate = gate_at(x);
    double error = gate.g * gate.relative + LEAST_GATE, rest = 1 / (1 + exp(gate.z));
    double product = fabs(x) * gate.slope * (error * rest + (gate.g + error) * (error + U_FP32 * rest));
    return error + product + 6 * U_FP32 * (gate.g + fabs(x) * gate.g * rest * gate.slope);
}

static void check_gelu(Format dtype, int64_t rows, int64_t cols) {
    static const double SPECIAL[] = {0, 10, -10, 1e-6, -1e-6, 30, -30, 1e4, -1e4, 0.31, -0.31};
    Tensor input = random_tensor(dtype, rows, cols, 2), dout = random_tensor(dtype, rows, cols, 1);
    for (int64_t c = 0; c < cols && c < (int64_t)(sizeof(SPECIAL) / sizeof(SPECIAL[0])); c++) {
        tensor_set(input, 0, c, SPECIAL[c]);
    }
    Tensor out[2], dinput[2];
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        out[threads - 1] = take_tensor(dtype, rows, cols);
        dinput[threads - 1] = copy_tensor(dout);
        backend->activation_forward(out[threads - 1], input, ACTIVATION_GELU);
        backend->activation_backward(dinput[threads - 1], NULL, dinput[threads - 1], input, ACTIVATION_GELU);
    }
    check_same_tensor(out[0], out[1]);
    check_same_tensor(dinput[0], dinput[1]);
    check_padding(out[1]);
    check_padding(dinput[1]);

    Check forward = {0}, backward = {0};
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            double x = tensor_get(input, r, c), d = tensor_get(dout, r, c), y = gelu(NULL, x);
            check_value(&forward, tensor_get(out[1], r, c), y, gelu_bound(x) + rounding(dtype, y));
            double expected = d * derivative(gelu, NULL, x, 1e-3);
            check_value(&backward, tensor_get(dinput[1], r, c), expected,
                        fabs(d) * gelu_gradient_bound(x) + rounding(dtype, expected));
        }
    }
    check_end(&forward, "gelu_forward %s (%lld, %lld)", DTYPE_NAMES[dtype], (long long)rows, (long long)cols);
    check_end(&backward, "gelu_backward %s, over dout", DTYPE_NAMES[dtype]);
}

// Where x^2 and x^3 overflow the slope is still 1 or 0.
static void check_gelu_of_large(Format dtype) {
    static const double LARGE[] = {1e5, 1e10, 1e13, 2e19, 1e30, 3e38};
    enum { COUNT = sizeof(LARGE) / sizeof(LARGE[0]) };
    Tensor input = take_tensor(dtype, 2, COUNT), dinput = take_tensor(dtype, 2, COUNT);
    for (int64_t i = 0; i < 2 * COUNT; i++) {
        tensor_set(input, i / COUNT, i % COUNT, i < COUNT ? LARGE[i] : -LARGE[i - COUNT]);
        tensor_set(dinput, i / COUNT, i % COUNT, 1);
    }
    backend->activation_backward(dinput, NULL, dinput, input, ACTIVATION_GELU);
    Check check = {0};
    for (int64_t i = 0; i < 2 * COUNT; i++) {
        check_value(&check, tensor_get(dinput, i / COUNT, i % COUNT), i < COUNT, 1e-8);
    }
    check_end(&check, "gelu_backward %s of large x", DTYPE_NAMES[dtype]);
}

static void check_gelu_exact(Format dtype, int64_t rows, int64_t cols) {
    Tensor input = random_tensor(dtype, rows, cols, 2), dout = random_tensor(dtype, rows, cols, 1);
    static const double SPECIAL[] = {0, 10, -10, 1e-6, -1e-6, 30, -30, 1e4, -1e4, -5, 3e38, -3e38};
    for (int64_t c = 0; c < cols && c < (int64_t)(sizeof(SPECIAL) / sizeof(SPECIAL[0])); c++) {
        tensor_set(input, 0, c, SPECIAL[c]);
    }
    Tensor out = take_tensor(dtype, rows, cols), dinput = copy_tensor(dout);
    backend->activation_forward(out, input, ACTIVATION_GELU_EXACT);
    backend->activation_backward(dinput, NULL, dinput, input, ACTIVATION_GELU_EXACT);
    check_padding(out);
    Check forward = {0}, backward = {0};
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t r = i / cols, c = i % cols;
        double x = tensor_get(input, r, c), d = tensor_get(dout, r, c), y = x * erfc(-x / sqrt(2)) / 2;
        double density = exp(-x * x / 2) / sqrt(2 * acos(-1)), slope = erfc(-x / sqrt(2)) / 2 + x * density;
        check_value(&forward, tensor_get(out, r, c), y,
                    fabs(x) * normal_gate_bound(x) + U_FP32 * fabs(y) + rounding(dtype, y));
        check_value(&backward, tensor_get(dinput, r, c), d * slope,
                    fabs(d) * exact_gelu_gradient_bound(x) + rounding(dtype, d * slope));
    }
    check_end(&forward, "exact gelu forward %s (%lld, %lld)", DTYPE_NAMES[dtype], (long long)rows, (long long)cols);
    check_end(&backward, "exact gelu backward %s, over dout", DTYPE_NAMES[dtype]);
}

static void test_gelu(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        check_gelu_exact(dtype, 1, 1);
        check_gelu_exact(dtype, 33, 96);
        check_gelu_of_large(dtype);
        check_gelu(dtype, 1, 1);
        check_gelu(dtype, 33, 96);
        check_gelu(dtype, 7, 1500);
        pool_release();
    }
}

// Sums: residual, biases, embeddings, conversion
// ----------------------------------------------------------------------

static void test_residual(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        LayernormCase l = make_layernorm_case(dtype, 33, 1100);
        Tensor a = l.input, b = random_tensor(dtype, 33, 1100, 1), normalized = take_tensor(dtype, 33, 1100);
        Tensor out = take_tensor(dtype, 33, 1100), again = take_tensor(dtype, 33, 1100);
        Tensor expected = take_tensor(dtype, 33, 1100);
        omp_set_num_threads(1);
        backend->layernorm_forward(NO_TENSOR, again, a, b, norm_params(&l));
        omp_set_num_threads(2);
        backend->layernorm_forward(normalized, out, a, b, norm_params(&l));
        check_same_tensor(out, again);
        check_padding(out);
        backend->layernorm_forward(expected, NO_TENSOR, out, NO_TENSOR, norm_params(&l));
        check_same_tensor(normalized, expected);
        Check check = {0};
        for (int64_t i = 0; i < 33 * 1100; i++) {
            double sum = tensor_get(a, i / 1100, i % 1100) + tensor_get(b, i / 1100, i % 1100);
            check_value(&check, tensor_get(out, i / 1100, i % 1100), sum, U_FP32 * fabs(sum) + rounding(dtype, sum));
        }
        check_end(&check, "layernorm_forward's sum %s (33, 1100)", DTYPE_NAMES[dtype]);
        backend->layernorm_forward(normalized, a, a, b, norm_params(&l)); // in place
        check_same_tensor(a, out);
        pool_release();
    }
}

static void check_bias(Format dtype, int64_t rows, int64_t cols) {
    Tensor dout = random_tensor(dtype, rows, cols, 1);
    float *before = take_floats(cols);
    fill_floats(before, cols, 1);
    float *dbias = copy_floats(before, cols), *again = copy_floats(before, cols);
    omp_set_num_threads(1);
    backend->bias_backward(again, dout);
    omp_set_num_threads(2);
    backend->bias_backward(dbias, dout);
    check_same_floats(dbias, again, cols);
    Check check = {0};
    for (int64_t c = 0; c < cols; c++) {
        double sum = before[c], magnitude = fabs(before[c]);
        for (int64_t r = 0; r < rows; r++) {
            sum += tensor_get(dout, r, c);
            magnitude += fabs(tensor_get(dout, r, c));
        }
        check_value(&check, dbias[c], sum, (double)(rows + 1) * U_FP32 * magnitude);
    }
    check_end(&check, "bias_backward %s (%lld, %lld)", DTYPE_NAMES[dtype], (long long)rows, (long long)cols);
}

static void test_bias(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        check_bias(dtype, 1, 1);
        check_bias(dtype, 100, 96);
        check_bias(dtype, 33, 257);
        pool_release();
    }
}

// `length`: of documents; 0: sequences are one.
static void check_embedding(Format dtype, int64_t B, int64_t T, int64_t V, int64_t C, int32_t length) {
    Tensor wte = random_tensor(dtype, V, C, 1), wpe = random_tensor(dtype, T + 2, C, 1);
    Tensor dout = random_tensor(dtype, B * T, C, 1);
    int32_t *tokens = pool_take((size_t)(B * T) * sizeof(int32_t));
    fill_below(tokens, B * T, (int32_t)V);
    Sequences sequences = {.T = T, .positions = length ? take_documents(B, T, length) : NULL};
    float *dwte_before = take_floats(V * C), *dwpe_before = take_floats((T + 2) * C);
    fill_floats(dwte_before, V * C, 1);
    fill_floats(dwpe_before, (T + 2) * C, 1);
    Tensor out[2];
    float *dwte[2], *dwpe[2];
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        int i = threads - 1;
        out[i] = take_tensor(dtype, B * T, C);
        dwte[i] = copy_floats(dwte_before, V * C), dwpe[i] = copy_floats(dwpe_before, (T + 2) * C);
        backend->embedding_forward(out[i], tokens, wte, wpe, sequences);
        backend->embedding_backward(dwte[i], dwpe[i], tokens, dout, sequences);
    }
    check_same_tensor(out[0], out[1]);
    check_same_floats(dwte[0], dwte[1], V * C);
    check_same_floats(dwpe[0], dwpe[1], (T + 2) * C);
    check_padding(out[1]);

    Check forward = {0}, backward = {0};
    double *sum = take_doubles((V + T + 2) * C), *magnitude = take_doubles((V + T + 2) * C);
    for (int64_t i = 0; i < (V + T + 2) * C; i++) {
        sum[i] = i < V * C ? dwte_before[i] : dwpe_before[i - V * C];
        magnitude[i] = fabs(sum[i]);
    }
    for (int64_t r = 0; r < B * T; r++) {
        for (int64_t c = 0; c < C; c++) {
            int64_t position = length ? sequences.positions[r] : r % T;
            double y = tensor_get(wte, tokens[r], c) + tensor_get(wpe, position, c), d = tensor_get(dout, r, c);
            check_value(&forward, tensor_get(out[1], r, c), y, U_FP32 * fabs(y) + rounding(dtype, y));
            int64_t rows[] = {tokens[r], V + position};
            for (int i = 0; i < 2; i++) {
                sum[rows[i] * C + c] += d;
                magnitude[rows[i] * C + c] += fabs(d);
            }
        }
    }
    for (int64_t i = 0; i < (V + T + 2) * C; i++) {
        double value = i < V * C ? dwte[1][i] : dwpe[1][i - V * C];
        check_value(&backward, value, sum[i], (double)(B * T + 1) * U_FP32 * magnitude[i]);
    }
    check_end(&forward, "embedding_forward %s B %lld T %lld V %lld C %lld%s", DTYPE_NAMES[dtype], (long long)B,
              (long long)T, (long long)V, (long long)C, length ? " in documents" : "");
    check_end(&backward, "embedding_backward %s", DTYPE_NAMES[dtype]);
}

static void test_embedding(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        check_embedding(dtype, 3, 33, 257, 96, 0);
        check_embedding(dtype, 3, 33, 257, 96, 10);
        check_embedding(dtype, 2, 7, 5, 200, 0); // every token many times
        check_embedding(dtype, 1, 1, 1, 1, 0);
        pool_release();
    }
}

// To nearest BF16, ties to even, by scaling to integers.
static double nearest_bf16(double x) {
    if (x == 0 || !isfinite(x)) return x;
    int unit = ilogb(x) - 7 < -133 ? -133 : ilogb(x) - 7;
    double rounded = ldexp(rint(ldexp(x, -unit)), unit);
    return fabs(rounded) >= ldexp(1, 128) ? copysign(INFINITY, x) : rounded;
}

static void test_convert(void **state) {
    (void)state;
    enum { ROWS = 5, COLS = 2100 };
    Tensor in = random_tensor(FORMAT_FP32, ROWS, COLS, 1), narrow = take_tensor(FORMAT_BF16, ROWS, COLS);
    static const float SPECIAL[] = {0,      -0.0f,   INFINITY,    -INFINITY,   NAN,         3.4e38f,   -3.4e38f,
                                    1e-40f, -1e-45f, 1.00390625f, 1.01171875f, 1.00390637f, 0x1p-133f, 0x1p-134f};
    for (size_t i = 0; i < sizeof(SPECIAL) / sizeof(SPECIAL[0]); i++) {
        tensor_set(in, 1, (int64_t)i, SPECIAL[i]);
    }
    backend->convert(narrow, in);
    Tensor wide = take_tensor(FORMAT_FP32, ROWS, COLS);
    backend->convert(wide, narrow);
    for (int64_t i = 0; i < ROWS * COLS; i++) {
        double x = tensor_get(in, i / COLS, i % COLS), y = tensor_get(narrow, i / COLS, i % COLS);
        if (isnan(x)) {
            assert_true(isnan(y));
            continue;
        }
        assert_true(y == nearest_bf16(x) && signbit(y) == signbit(x));
        assert_true(tensor_get(wide, i / COLS, i % COLS) == y);
    }
    check_padding(narrow);
    check_padding(wide);
    pool_release();
}

static void test_sums(void **state) {
    (void)state;
    static const int64_t COUNTS[] = {0, 1, 16383, 16384, 16385, 100003, 17000001}; // the last: chunks that had to grow
    for (size_t i = 0; i < sizeof(COUNTS) / sizeof(COUNTS[0]); i++) {
        int64_t count = COUNTS[i];
        float *values = take_floats(count);
        uint32_t bits = 12345;
        long double sum = 0, squares = 0, magnitude = 0;
        for (int64_t j = 0; j < count; j++) {
            bits = bits * 1664525u + 1013904223u;
            values[j] = (float)(int32_t)bits * 0x1p-20f;
            sum += values[j];
            magnitude += fabsf(values[j]);
            squares += (long double)values[j] * values[j];
        }
        omp_set_num_threads(1);
        double sum_1 = backend->sum(values, count), squares_1 = backend->sum_of_squares(values, count);
        omp_set_num_threads(2);
        double sum_2 = backend->sum(values, count), squares_2 = backend->sum_of_squares(values, count);
        assert_true(sum_1 == sum_2 && squares_1 == squares_2);
        Check check = {0};
        check_value(&check, sum_2, (double)sum, (double)count * 0x1p-53 * (double)magnitude);
        check_value(&check, squares_2, (double)squares, (double)(count + 1) * 0x1p-53 * (double)squares);
        check_end(&check, "sum, sum_of_squares of %lld", (long long)count);
        pool_release();
    }
}

// Classifier
// ----------------------------------------------------------------------------------------------------------

// The loss of a row as a function of one logit.
typedef struct {
    double *logits;
    int64_t V, target, col;
} RowLoss;

static double row_loss(void *context, double value) {
    RowLoss *l = context;
    double kept = l->logits[l->col], max = -INFINITY, sum = 0;
    l->logits[l->col] = value;
    for (int64_t v = 0; v < l->V; v++) {
        max = fmax(max, l->logits[v]);
    }
    for (int64_t v = 0; v < l->V; v++) {
        sum += exp(l->logits[v] - max);
    }
    double loss = log(sum) + max - l->logits[l->target];
    l->logits[l->col] = kept;
    return loss;
}

static void check_classifier(Format dtype, int64_t rows, int64_t V, double spread) {
    const float dloss = 1.0f / 37;
    Tensor logits = random_tensor(FORMAT_FP32, rows, V, spread);
    int32_t *targets = pool_take((size_t)rows * sizeof(int32_t));
    fill_below(targets, rows, (int32_t)V);
    float *losses[3];
    Tensor dlogits[2];
    for (int threads = 1; threads <= 2; threads++) {
        omp_set_num_threads(threads);
        losses[threads - 1] = take_floats(rows);
        dlogits[threads - 1] = take_tensor(dtype, rows, V);
        backend->classifier(losses[threads - 1], dlogits[threads - 1], copy_tensor(logits), targets, dloss);
    }
    losses[2] = take_floats(rows); // without gradients
    backend->classifier(losses[2], (Tensor){0}, copy_tensor(logits), targets, 0);
    check_same_floats(losses[0], losses[1], rows);
    check_same_floats(losses[0], losses[2], rows);
    check_same_tensor(dlogits[0], dlogits[1]);
    check_padding(dlogits[1]);

    double *x = tensor_doubles(logits);
    Check loss_check = {0}, gradient_check = {0};
    for (int64_t r = 0; r < rows; r++, x += V) {
        RowLoss l = {x, V, targets[r], 0};
        double loss = row_loss(&l, x[0]), max = -INFINITY, distance = 0;
        for (int64_t v = 0; v < V; v++) {
            max = fmax(max, x[v]);
        }
        double log_sum = loss + x[targets[r]] - max;
        for (int64_t v = 0; v < V; v++) {
            distance += exp(x[v] - max - log_sum) * (max - x[v]);
        }
        // The sum's relative error: its additions, exp's 2 ulp, and the rounding of each exponent.
        double sum_bound = (double)(V + 8) * U_FP32 + distance * U_FP32;
        check_value(&loss_check, losses[1][r], loss,
                    sum_bound + 4 * U_FP32 * (log_sum + max - x[targets[r]]) + U_FP32 * loss);
        for (int64_t v = 0; v < V; v++) {
            l.col = v;
            double p = exp(x[v] - max - log_sum), expected = derivative(row_loss, &l, x[v], 1e-3) * dloss;
            double bound = p * (sum_bound + (8 + max - x[v]) * U_FP32) + 2 * U_FP32 * (v == targets[r]);
            double difference_error = 1e-15 * (1 + fabs(max)) / 1e-3; // of the finite difference
            check_value(&gradient_check, tensor_get(dlogits[1], r, v), expected,
                        dloss * (bound + difference_error) + rounding(dtype, expected));
        }
    }
    check_end(&loss_check, "classifier %s (%lld, %lld) spread %g: loss", DTYPE_NAMES[dtype], (long long)rows,
              (long long)V, spread);
    check_end(&gradient_check, "  dlogits");
}

static void test_classifier(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        check_classifier(dtype, 1, 1, 1);
        check_classifier(dtype, 33, 257, 3);
        check_classifier(dtype, 7, 33, 30);
        check_classifier(dtype, 7, 100, 1e4); // exp underflows for nearly all
        pool_release();
    }
}

// Attention
// -----------------------------------------------------------------------------------------------------------

// The reference's own gradient, at the first and last token and between, against finite
// differences.
static void check_reference_gradient(HeadReference *h, Check *check) {
    double *inputs[] = {h->q, h->k, h->v};
    for (int i = 0; i < 3; i++) {
        for (int sample = 0; sample < 3; sample++) {
            int64_t at = (h->T * h->HS - 1) * sample / 2;
            h->perturbed = inputs[i] + at;
            double expected = derivative(attention_loss, h, inputs[i][at], 1e-3);
            check_value(check, h->gradient[i][at], expected, 1e-9 * (double)h->T);
        }
    }
}

typedef struct {
    Tensor out, dqkv;
    float *logsumexp;
} AttentionResult;

static AttentionResult run_attention(Tensor qkv, Tensor dout, AttentionShape shape) {
    AttentionResult r = {take_tensor(qkv.dtype, qkv.rows, dout.cols), take_tensor(qkv.dtype, qkv.rows, qkv.cols),
                         take_floats(shape.B * shape.NH * shape.T)};
    give_workspace(backend->attention_workspace(qkv.dtype, shape));
    backend->attention_forward(r.out, r.logsumexp, qkv, shape);
    give_workspace(backend->attention_workspace(qkv.dtype, shape));
    backend->attention_backward(r.dqkv, dout, r.out, qkv, r.logsumexp, shape);
    return r;
}

static void check_attention(Format dtype, AttentionShape shape, double stddev) {
    int64_t B = shape.B, T = shape.T, NH = shape.NH, HS = shape.HS, cols = (NH + 2 * shape.NKV) * HS;
    Tensor qkv = random_tensor(dtype, B * T, cols, stddev), dout = random_tensor(dtype, B * T, NH * HS, 1);
    omp_set_num_threads(1);
    AttentionResult again = run_attention(qkv, dout, shape);
    omp_set_num_threads(2);
    AttentionResult r = run_attention(qkv, dout, shape);
    check_same_tensor(r.out, again.out);
    check_same_tensor(r.dqkv, again.dqkv);
    check_same_floats(r.logsumexp, again.logsumexp, B * NH * T);
    check_padding(r.out);
    check_padding(r.dqkv);

    Check out = {0}, lse = {0}, gradient = {0}, reference = {0};
    double *dqkv = take_zeros(B * T * cols), *bound = take_zeros(B * T * cols);
    for (int64_t index = 0; index < B * NH; index++) {
        int64_t b = index / NH, head = index % NH, kv = head / (NH / shape.NKV);
        HeadReference h = attention_reference(qkv, dout, b, head, shape, dtype, false);
        if (index == B * NH - 1 && stddev < 4) check_reference_gradient(&h, &reference);
        const int64_t first[] = {head * HS, (NH + kv) * HS, (NH + shape.NKV + kv) * HS};
        for (int part = 0; part < 3; part++) {
            add_head(dqkv, cols, h.gradient[part], shape, b, first[part]);
            add_head(bound, cols, h.bound[part], shape, b, first[part]);
        }
        for (int64_t i = 0; i < T * HS; i++) {
            int64_t row = b * T + i / HS, col = head * HS + i % HS;
            check_value(&out, tensor_get(r.out, row, col), h.out[i], h.out_bound[i] + rounding(dtype, h.out[i]));
        }
        for (int64_t t = 0; t < T; t++) {
            check_value(&lse, r.logsumexp[index * T + t], h.lse[t], h.lse_bound[t]);
        }
    }
    for (int64_t i = 0; i < B * T * cols; i++) {
        check_value(&gradient, tensor_get(r.dqkv, i / cols, i % cols), dqkv[i], bound[i] + rounding(dtype, dqkv[i]));
    }
    check_end(&out, "attention_forward %s T %lld NH %lld NKV %lld HS %lld std %g%s", DTYPE_NAMES[dtype], (long long)T,
              (long long)NH, (long long)shape.NKV, (long long)HS, stddev,
              shape.by_document ? " in documents"
              : shape.causal    ? ""
                                : " unmasked");
    check_end(&lse, "  logsumexp");
    check_end(&gradient, "  attention_backward");
    if (reference.count) check_end(&reference, "  the reference's gradient by finite differences");
    pool_release();
}

static void test_attention(void **state) {
    (void)state;
    static const int64_t LENGTHS[] = {1, 7, 33, 129, 200, 257};
    static const int64_t HEADS[][2] = {{12, 8}, {1, 20}, {2, 48}, {3, 64}};
    FOR_EACH_DTYPE(dtype) {
        for (size_t t = 0; t < sizeof(LENGTHS) / sizeof(LENGTHS[0]); t++) {
            for (size_t h = 0; h < sizeof(HEADS) / sizeof(HEADS[0]); h++) {
                check_attention(dtype, as_many_keys(LENGTHS[t] < 100 ? 3 : 1, LENGTHS[t], HEADS[h][0], HEADS[h][1]), 1);
            }
        }
        check_attention(dtype, as_many_keys(1, 129, 2, 64), 36); // scores of about +-1e4 before their scale
    }
}

static void test_attention_grouped_and_unmasked(void **state) {
    (void)state;
    static const int64_t HEADS[][3] = {{4, 2, 16}, {6, 2, 20}, {5, 1, 8}, {3, 3, 48}}; // NH, NKV, HS
    FOR_EACH_DTYPE(dtype) {
        for (size_t h = 0; h < sizeof(HEADS) / sizeof(HEADS[0]); h++) {
            for (int64_t T = 1; T < 200; T += 66) {
                AttentionShape shape = as_many_keys(2, T, HEADS[h][0], HEADS[h][2]);
                shape.NKV = HEADS[h][1];
                check_attention(dtype, shape, 1);
                shape.causal = false;
                check_attention(dtype, shape, 1);
            }
        }
    }
}

// Documents that begin and end anywhere in blocks of queries and steps of keys, some of one token.
static void test_attention_in_documents(void **state) {
    (void)state;
    static const int64_t LENGTHS[] = {1, 33, 129, 400};
    FOR_EACH_DTYPE(dtype) {
        for (size_t t = 0; t < sizeof(LENGTHS) / sizeof(LENGTHS[0]); t++) {
            for (int32_t length = 2; length <= 200; length *= 9) {
                AttentionShape shape = as_many_keys(2, LENGTHS[t], 4, LENGTHS[t] == 129 ? 40 : 8);
                shape.NKV = 2;
                shape.by_document = true;
                shape.positions = take_documents(shape.B, shape.T, length);
                check_attention(dtype, shape, 1);
            }
        }
    }
}

// Scores of +-1e4 after their scale: the largest takes all, nothing overflows.
static void test_attention_large_scores(void **state) {
    (void)state;
    enum { T = 40, HS = 16 };
    FOR_EACH_DTYPE(dtype) {
        Tensor qkv = take_tensor(dtype, T, 3 * HS), dout = random_tensor(dtype, T, HS, 1);
        for (int64_t t = 0; t < T; t++) {
            for (int64_t d = 0; d < HS; d++) {
                tensor_set(qkv, t, d, d == 0 ? 200 : 0);
                tensor_set(qkv, t, HS + d, d == 0 ? (t == 0 ? 200 : -200) : 0);
                tensor_set(qkv, t, 2 * HS + d, (double)(t + d));
            }
        }
        AttentionResult r = run_attention(qkv, dout, as_many_keys(1, T, 1, HS));
        for (int64_t t = 0; t < T; t++) {
            assert_true(r.logsumexp[t] == 1e4f);
            for (int64_t d = 0; d < HS; d++) {
                assert_true(fabs(tensor_get(r.out, t, d) - (double)d) < 1e-30); // v of token 0
                assert_true(fabs(tensor_get(r.dqkv, t, d)) < 1e-30 && fabs(tensor_get(r.dqkv, t, HS + d)) < 1e-30);
            }
        }
        pool_release();
    }
}

// Scores up to 1e11 after their scale, which isn't a power of two: the largest still takes all, and
// logsumexp is that score.
static void test_attention_larger_scores(void **state) {
    (void)state;
    enum { T = 70, HS = 20 };
    FOR_EACH_DTYPE(dtype) {
        for (double length = 1 << 10; length <= 1 << 20; length *= 32) {
            Tensor qkv = take_tensor(dtype, T, 3 * HS), dout = random_tensor(dtype, T, HS, 1);
            for (int64_t t = 0; t < T; t++) {
                tensor_set(qkv, t, 0, length);
                tensor_set(qkv, t, HS, t == 0 ? length : -length);
                for (int64_t d = 0; d < HS; d++) {
                    if (d > 0) tensor_set(qkv, t, d, 0);
                    if (d > 0) tensor_set(qkv, t, HS + d, 0);
                    tensor_set(qkv, t, 2 * HS + d, (double)(t + d));
                }
            }
            AttentionResult r = run_attention(qkv, dout, as_many_keys(1, T, 1, HS));
            for (int64_t t = 0; t < T; t++) {
                assert_true(ulp_error(r.logsumexp[t], length * length / sqrt(HS)) <= 1.5);
                for (int64_t d = 0; d < HS; d++) {
                    assert_true(fabs(tensor_get(r.out, t, d) - (double)d) < 1e-30); // v of token 0
                }
            }
            pool_release();
        }
    }
}

/*
Operands of attention's GEMMs, exact to the bit. Queries and keys have no dimension in common: every
score is 0 and each of three keys has probability 1/3, which BF16 doesn't hold, nor their gradients
dS. Both are rounded to BF16 before they are multiplied, whatever the machine multiplies in; tokens
are small integers, so that FP32 then holds every sum.
*/
enum { EXACT_T = 3, EXACT_HS = 4 };
typedef struct {
    double exact[EXACT_T][EXACT_T], rounded[EXACT_T][EXACT_T];
} AttentionOperand;

static double to_bf16(double x) { return mx_from_bf16(mx_to_bf16((float)x)); }

// FP32's roundings on the way to it must not decide which neighbour a value is rounded to.
static void set_operand(AttentionOperand *operand, int i, int j, double value) {
    operand->exact[i][j] = value;
    operand->rounded[i][j] = to_bf16(value);
    assert_true(to_bf16(value * (1 + 1e-5)) == to_bf16(value * (1 - 1e-5)));
}

// `found` from column `col` on is a, or its transpose, times the tokens from column `from` on. The
// rounding shows in some of the twelve values.
static void check_attention_product(Tensor found, int64_t col, const AttentionOperand *a, bool transposed,
                                    Tensor tokens, int64_t from) {
    int shown = 0;
    for (int i = 0; i < EXACT_T; i++) {
        for (int d = 0; d < EXACT_HS; d++) {
            double rounded = 0, exact = 0;
            for (int j = 0; j < EXACT_T; j++) {
                double token = tensor_get(tokens, j, from + d);
                rounded += (transposed ? a->rounded[j][i] : a->rounded[i][j]) * token;
                exact += (transposed ? a->exact[j][i] : a->exact[i][j]) * token;
            }
            assert_true((double)(float)rounded == rounded);
            if (tensor_get(found, i, col + d) != to_bf16(rounded)) {
                fail_msg("(%d, %d) is %g, not %g", i, (int)col + d, tensor_get(found, i, col + d), to_bf16(rounded));
            }
            shown += to_bf16(rounded) != to_bf16(exact);
        }
    }
    assert_true(shown > 0);
}

static void test_attention_rounds_operands(void **state) {
    (void)state;
    enum { T = EXACT_T, HS = EXACT_HS };
    Tensor qkv = take_tensor(FORMAT_BF16, T, 3 * HS), dout = take_tensor(FORMAT_BF16, T, HS);
    for (int t = 0; t < T; t++) {
        for (int c = 0; c < 3 * HS; c++) {
            bool is_zero = (c / HS == 0 && c % HS >= HS / 2) || (c / HS == 1 && c % HS < HS / 2);
            tensor_set(qkv, t, c, is_zero ? 0 : (71 * t + 18 * c) % 199 - 99);
        }
        for (int d = 0; d < HS; d++) {
            tensor_set(dout, t, d, (83 * t + 37 * d) % 199 - 99);
        }
    }
    AttentionShape shape = {.B = 1, .T = T, .NH = 1, .NKV = 1, .HS = HS};
    AttentionResult r = run_attention(qkv, dout, shape);

    AttentionOperand p, ds; // dS = P (dP - sum(P dP)) / sqrt(HS), dP = dout V^T
    for (int i = 0; i < T; i++) {
        double dp[EXACT_T] = {0}, sum = 0;
        for (int j = 0; j < T; j++) {
            for (int d = 0; d < HS; d++) {
                dp[j] += tensor_get(dout, i, d) * tensor_get(qkv, j, 2 * HS + d);
            }
            sum += dp[j] / T;
        }
        for (int j = 0; j < T; j++) {
            set_operand(&p, i, j, 1.0 / T);
            set_operand(&ds, i, j, (dp[j] - sum) / T / sqrt(HS));
        }
    }
    check_attention_product(r.out, 0, &p, false, qkv, 2 * HS);
    check_attention_product(r.dqkv, 0, &ds, false, qkv, HS);
    check_attention_product(r.dqkv, HS, &ds, true, qkv, 0);
    check_attention_product(r.dqkv, 2 * HS, &p, true, dout, 0);
    pool_release();
}

static void test_attention_is_causal(void **state) {
    (void)state;
    enum { T = 200, NH = 2, HS = 20, C = NH * HS, CHANGED = 140 };
    FOR_EACH_DTYPE(dtype) {
        Tensor qkv = random_tensor(dtype, T, 3 * C, 1), dout = random_tensor(dtype, T, C, 1);
        AttentionResult before = run_attention(qkv, dout, as_many_keys(1, T, NH, HS));
        for (int64_t t = CHANGED; t < T; t++) {
            for (int64_t c = 0; c < 3 * C; c++) {
                tensor_set(qkv, t, c, 100.0 * (double)(c % 3 - 1));
            }
            for (int64_t c = 0; c < C; c++) {
                tensor_set(dout, t, c, 0);
            }
        }
        AttentionResult after = run_attention(qkv, dout, as_many_keys(1, T, NH, HS));
        bool later_differs = false;
        for (int64_t t = 0; t < T; t++) {
            for (int64_t c = 0; c < C; c++) {
                bool same = tensor_get(before.out, t, c) == tensor_get(after.out, t, c);
                if (t < CHANGED) assert_true(same);
                later_differs = later_differs || !same;
                // A token's loss sends no gradient to later tokens.
                for (int part = 0; part < 3 && t >= CHANGED; part++) {
                    assert_true(tensor_get(after.dqkv, t, part * C + c) == 0);
                }
            }
        }
        assert_true(later_differs);
        pool_release();
    }
}

// GEMM
// ----------------------------------------------------------------------------------------------------------------

// An operand with the values that gemm takes it for.
typedef struct {
    Operand operand;
    double *values; // (rows, cols)
} TestOperand;

static TestOperand make_operand(Format format, int64_t rows, int64_t cols, Axis axis) {
    if (!mx_is_mx(format)) {
        Tensor tensor = random_tensor(format, rows, cols, 1);
        return (TestOperand){operand_tensor(tensor), tensor_doubles(tensor)};
    }
    size_t bytes = scaled_bytes(SCALING_MX, FORM_PLAIN, axis, rows, cols);
    QuantizedTensor q = quantized_make(pool_take(bytes), format, axis, rows, cols, FORM_PLAIN);
    bool columnwise = axis == AXIS_COLUMNWISE;
    backend->quantize(columnwise ? NULL : &q, columnwise ? &q : NULL,
                      source_tensor(random_tensor(FORMAT_FP32, rows, cols, 1)), SCALE_RCEIL);
    double *values = take_doubles(rows * cols);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            int64_t row = axis == AXIS_ROWWISE ? r : r / MX_BLOCK;
            uint8_t scale = columnwise ? q.scales[row * cols + c] : q.scales[row * mx_num_blocks(cols) + c / MX_BLOCK];
            values[r * cols + c] = (double)mx_decode(format, q.elements[r * cols + c]) * mx_scale_value(scale);
        }
    }
    return (TestOperand){operand_quantized(q), values};
}

typedef struct {
    int64_t M, N, K;
    Format a, b, d;
    bool transpose_a, transpose_b, accumulate, has_bias;
    bool square_a, square_b; // 32x32 blocks, which run along K whatever the transposition
    float alpha;             // 1 over a's prescale
} GemmCase;

static const float PRESCALE = 0.75f;

static void run_gemm(Tensor d, TestOperand a, TestOperand b, const float *bias, const GemmCase *g, int threads) {
    omp_set_num_threads(threads);
    give_workspace(backend->gemm_workspace(a.operand, b.operand));
    backend->gemm(d, a.operand, b.operand,
                  (GemmOptions){g->transpose_a, g->transpose_b, g->accumulate, g->has_bias ? bias : NULL, false});
}

static void check_gemm_values(Check *check, Tensor d, Tensor before, TestOperand a, TestOperand b, const float *bias,
                              const GemmCase *g) {
    for (int64_t m = 0; m < g->M; m++) {
        for (int64_t n = 0; n < g->N; n++) {
            double start = g->accumulate ? tensor_get(before, m, n) : 0, added = g->has_bias ? bias[n] : 0;
            double sum = start + added, magnitude = fabs(start) + fabs(added);
            for (int64_t k = 0; k < g->K; k++) {
                double product = a.values[g->transpose_a ? k * g->M + m : m * g->K + k] *
                                 b.values[g->transpose_b ? n * g->K + k : k * g->N + n] * g->alpha;
                sum += product;
                magnitude += fabs(product);
            }
            double roundings = (double)(g->K + 2 + (g->alpha != 1));
            check_value(check, tensor_get(d, m, n), sum, roundings * U_FP32 * magnitude + rounding(g->d, sum));
        }
    }
}

// Returns whether one thread gives other bits than two: a library may split K by the number of
// threads, and the values of both must be right.
static bool check_gemm(const GemmCase *g, Check *check) {
    TestOperand a = make_operand(g->a, g->transpose_a ? g->K : g->M, g->transpose_a ? g->M : g->K,
                                 g->square_a      ? AXIS_SQUARE
                                 : g->transpose_a ? AXIS_COLUMNWISE
                                                  : AXIS_ROWWISE);
    TestOperand b = make_operand(g->b, g->transpose_b ? g->N : g->K, g->transpose_b ? g->K : g->N,
                                 g->square_b      ? AXIS_SQUARE
                                 : g->transpose_b ? AXIS_ROWWISE
                                                  : AXIS_COLUMNWISE);
    if (g->alpha != 1) a.operand.quantized.encoding.prescale = PRESCALE;
    Tensor before = random_tensor(g->d, g->M, g->N, 1);
    Tensor single = copy_tensor(before), d = copy_tensor(before), again = copy_tensor(before);
    float *bias = take_floats(g->N);
    fill_floats(bias, g->N, 1);
    run_gemm(single, a, b, bias, g, 1);
    run_gemm(d, a, b, bias, g, 2);
    run_gemm(again, a, b, bias, g, 2);
    check_same_tensor(d, again);
    check_padding(d);
    bool differs = memcmp(single.data, d.data, tensor_bytes(d)) != 0;
    check_gemm_values(check, d, before, a, b, bias, g);
    if (differs) check_gemm_values(check, single, before, a, b, bias, g);
    return differs;
}

// Over the pairs of formats of a shape: every transposition; destination, accumulation, bias and,
// where a can have one, a prescale take turns.
static void check_gemm_formats(int64_t M, int64_t N, int64_t K, const Format *formats, int count) {
    Check check = {0};
    int cases = count * count * 4, differ = 0;
    for (int i = 0; i < cases; i++) {
        GemmCase g = {M,
                      N,
                      K,
                      formats[i / 4 / count],
                      formats[i / 4 % count],
                      DTYPES[i / 3 % 2],
                      i & 1,
                      i & 2,
                      i % 5 < 2,
                      i % 3 < 2,
                      false,
                      false,
                      mx_is_mx(formats[i / 4 / count]) && i % 7 < 3 ? 1 / PRESCALE : 1};
        bool differs = check_gemm(&g, &check);
        Format values = g.a == FORMAT_FP32 || g.b == FORMAT_FP32 ? FORMAT_FP32 : FORMAT_BF16;
        if (!onednn_multiplies(values)) assert_false(differs);
        differ += differs;
        pool_release();
    }
    check_end(&check, "gemm M %lld N %lld K %lld, %d cases", (long long)M, (long long)N, (long long)K, cases);
    if (differ) printf("      %d cases have other bits with one thread than with two\n", differ);
}

static void test_gemm(void **state) {
    (void)state;
    static const Format ALL[] = {FORMAT_FP32, FORMAT_BF16, MX_FORMATS(MX_FORMAT_VALUE, )};
    check_gemm_formats(1, 1, 1, ALL, NUM_FORMATS);
    check_gemm_formats(33, 65, 31, ALL, NUM_FORMATS);
    check_gemm_formats(7, 48, 100, ALL, NUM_FORMATS);
    check_gemm_formats(1, 257, 33, ALL, 3);
    check_gemm_formats(33, 1, 96, ALL, 3);
    check_gemm_formats(7, 65, 1, ALL, 3);
    check_gemm_formats(129, 200, 257, ALL, 3);
    check_gemm_formats(97, 300, 513, ALL, 3);
}

#ifdef HAVE_ONEDNN
// Returns whether a product is multiplied by oneDNN's reference loops, by what it prints of the
// call.
static bool is_by_reference(Tensor d, Operand a, Operand b, GemmOptions options) {
    FILE *file = tmpfile();
    assert_non_null(file);
    fflush(stdout);
    int before = dup(STDOUT_FILENO);
    assert_true(before >= 0 && dup2(fileno(file), STDOUT_FILENO) >= 0);
    assert_int_equal(dnnl_set_verbose(1), dnnl_success);
    give_workspace(backend->gemm_workspace(a, b));
    backend->gemm(d, a, b, options);
    dnnl_set_verbose(0);
    fflush(stdout);
    assert_true(dup2(before, STDOUT_FILENO) >= 0);
    close(before);
    char text[4096] = "";
    rewind(file);
    size_t length = fread(text, 1, sizeof(text) - 1, file);
    text[length] = 0;
    fclose(file);
    return strstr(text, ",ref:") != NULL;
}

// oneDNN multiplies by alpha where it has a kernel for that, of which it isn't asked; its reference
// loops, which give the same values, would take ten thousand times as long.
static void test_gemm_kernels(void **state) {
    (void)state;
    enum { M = 64, N = 96, K = 128 };
    omp_set_num_threads(2);
    for (int i = 0; i < 64; i++) {
        TestOperand a = make_operand(FORMAT_E4M3, M, K, AXIS_ROWWISE);
        if (i & 1) a.operand.quantized.encoding.prescale = PRESCALE;
        Tensor b = random_tensor(FORMAT_BF16, K, N, 1), d = random_tensor(DTYPES[i >> 1 & 1], M, N, 1);
        if (i & 4) b.stride = b.cols;
        if (i & 8) d.stride = d.cols;
        float *bias = take_floats(N);
        fill_floats(bias, N, 1);
        GemmOptions options = {.accumulate = i & 16, .bias = i & 32 ? bias : NULL};
        if (is_by_reference(d, a.operand, operand_tensor(b), options)) fail_msg("case %d is", i);
        pool_release();
    }
}

// Primitives are kept by shape, but there may be more shapes than are kept.
static void test_gemm_of_many_shapes(void **state) {
    (void)state;
    enum { SIDE = 70, K = 3 };
    Tensor a = take_tensor(FORMAT_FP32, SIDE, K), b = take_tensor(FORMAT_FP32, K, SIDE);
    Tensor d = take_tensor(FORMAT_FP32, SIDE, SIDE);
    for (int64_t i = 0; i < SIDE; i++) {
        for (int64_t k = 0; k < K; k++) {
            tensor_set(a, i, k, (double)(i + k));
            tensor_set(b, k, i, (double)(i - k));
        }
    }
    omp_set_num_threads(2);
    for (int64_t at = 0; at < SIDE * SIDE; at++) {
        int64_t M = at / SIDE + 1, N = at % SIDE + 1, m = M - 1, n = N - 1;
        Tensor part = tensor_cols(tensor_rows(d, 0, M), 0, N);
        onednn_matmul(part, tensor_rows(a, 0, M), tensor_cols(b, 0, N), NULL, (GemmOptions){0});
        double expected = (double)(m * n + (m + 1) * (n - 1) + (m + 2) * (n - 2));
        assert_true(tensor_get(part, m, n) == expected);
    }
    pool_release();
}
#endif

// Multiplies by our own loops, whatever the machine has: more rows, columns and K than one block of
// either, on several numbers of threads, which give the same bits.
static void test_gemm_packed(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        GemmCase g = {.M = 970,
                      .N = 530,
                      .K = 260,
                      .a = FORMAT_E4M3,
                      .b = FORMAT_BF16,
                      .d = DTYPES[(i ^ i >> 1 ^ i >> 2) & 1],
                      .transpose_a = i & 1,
                      .transpose_b = i & 2,
                      .accumulate = i & 4,
                      .has_bias = (i >> 1 ^ i >> 2) & 1,
                      .alpha = (i ^ i >> 2) & 1 ? -0.37f : 1};
        TestOperand a = make_operand(g.a, g.transpose_a ? g.K : g.M, g.transpose_a ? g.M : g.K,
                                     g.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE);
        TestOperand b = make_operand(g.b, g.transpose_b ? g.N : g.K, g.transpose_b ? g.K : g.N, AXIS_ROWWISE);
        Tensor before = random_tensor(g.d, g.M, g.N, 1), first = copy_tensor(before);
        float *bias = take_floats(g.N);
        fill_floats(bias, g.N, 1);
        GemmOptions options = {g.transpose_a, g.transpose_b, g.accumulate, g.has_bias ? bias : NULL, false};
        for (int threads = 1; threads <= 6; threads++) {
            Tensor d = threads == 1 ? first : copy_tensor(before);
            omp_set_num_threads(threads);
            matmul_packed(d, a.operand, b.operand, g.alpha, options, FORMAT_BF16, MATMUL_ALL);
            check_same_tensor(first, d);
        }
        Check check = {0};
        check_gemm_values(&check, first, before, a, b, bias, &g);
        check_padding(first);
        check_end(&check, "gemm of ours, M 970 N 530 K 260, to %s, alpha %g", g.d == FORMAT_BF16 ? "bf16" : "fp32",
                  g.alpha);
        pool_release();
    }
}

// What lies beyond a diagonal is passed over where a matrix of attention's scores is multiplied or
// made: the same bits as with zeros there, also where several blocks of K and tiles that aren't
// whole meet the diagonal, and none of the NaNs that lie further beyond it than a tile is high.
static void test_gemm_causal(void **state) {
    (void)state;
    static const int64_t DIAGONALS[] = {-3, 0, 11, 290};
    enum { QUERIES = 101, KEYS = 391, SIZE = 66 };
    for (int i = 0; i < 12; i++) {
        int64_t diagonal = DIAGONALS[i % 4];
        int scores_are_d = i / 4 == 0, transpose_a = i / 4 == 2;
        Format dtype = DTYPES[i % 2];
        Tensor scores = random_tensor(dtype, QUERIES, KEYS, 1), keys = random_tensor(dtype, KEYS, SIZE, 1);
        Tensor queries = random_tensor(dtype, QUERIES, SIZE, 1);
        for (int64_t at = 0; at < QUERIES * KEYS; at++) {
            if (at % KEYS > at / KEYS + diagonal) tensor_set(scores, at / KEYS, at % KEYS, 0);
        }
        Tensor a = scores_are_d ? queries : scores, b = transpose_a ? queries : keys;
        int64_t M = transpose_a ? KEYS : QUERIES, N = scores_are_d ? KEYS : SIZE;
        GemmOptions options = {.transpose_a = transpose_a, .transpose_b = scores_are_d, .accumulate = transpose_a};
        Tensor whole = random_tensor(FORMAT_FP32, M, N, 1), part = copy_tensor(whole);
        matmul_packed(whole, operand_tensor(a), operand_tensor(b), 1, options, dtype, MATMUL_ALL);
        for (int64_t at = 0; at < QUERIES * KEYS; at++) {
            if (at % KEYS > at / KEYS + diagonal + 16) tensor_set(scores, at / KEYS, at % KEYS, NAN);
        }
        matmul_packed(part, operand_tensor(a), operand_tensor(b), 1, options, dtype, diagonal);
        for (int64_t at = 0; at < M * N && scores_are_d; at++) {
            if (at % N > at / N + diagonal) tensor_set(part, at / N, at % N, tensor_get(whole, at / N, at % N));
        }
        check_same_tensor(whole, part);
        pool_release();
    }
}

// Instructions for BF16 may take subnormal operands for zero and make zero of subnormal sums;
// FP32's don't. No GEMM touches normal values.
static void test_gemm_subnormals(void **state) {
    (void)state;
    static const double A[] = {0x1p-126, 0x1p-127, 0x1p-70}, B[] = {1, 1, 0x1p-60};
    enum { K = 64 };
    for (int i = 0; i < 3; i++) {
        Tensor a = take_tensor(FORMAT_BF16, 2, K), b = take_tensor(FORMAT_BF16, 2, K);
        Tensor d = take_tensor(FORMAT_FP32, 2, 2);
        for (int64_t at = 0; at < 2 * K; at++) {
            tensor_set(a, at / K, at % K, A[i]);
            tensor_set(b, at / K, at % K, B[i]);
        }
        give_workspace(backend->gemm_workspace(operand_tensor(a), operand_tensor(b)));
        backend->gemm(d, operand_tensor(a), operand_tensor(b), (GemmOptions){.transpose_b = true});
        double sum = tensor_get(d, 1, 1), exact = K * A[i] * B[i];
        printf("    the sum of %d products %a x %a: %a, exactly %a\n", K, A[i], B[i], sum, exact);
        assert_true(sum == exact || (sum >= 0 && sum < exact && i > 0 && onednn_multiplies(FORMAT_BF16)));
        pool_release();
    }
}

// Square blocks in A, in B or in both, beside a tensor, or an operand in blocks of 32.
static void test_gemm_square(void **state) {
    (void)state;
    static const int64_t SHAPES[][3] = {{1, 1, 1}, {33, 65, 31}, {7, 48, 100}, {64, 96, 32}, {97, 130, 257}};
    static const Format OTHERS[] = {FORMAT_E4M3, FORMAT_E5M2, FORMAT_E2M1, FORMAT_BF16, FORMAT_FP32};
    for (size_t shape = 0; shape < sizeof(SHAPES) / sizeof(SHAPES[0]); shape++) {
        Check check = {0};
        int cases = 0;
        for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++) {
            for (int i = 0; i < 5 * 4; i++, cases++) {
                Format other = OTHERS[i / 4];
                bool is_b = cases % 2;
                GemmCase g = {.M = SHAPES[shape][0],
                              .N = SHAPES[shape][1],
                              .K = SHAPES[shape][2],
                              .alpha = 1,
                              .a = is_b ? other : format,
                              .b = is_b ? format : other,
                              .d = DTYPES[cases / 3 % 2],
                              .transpose_a = i & 1,
                              .transpose_b = i & 2,
                              .accumulate = i % 5 < 2,
                              .has_bias = i % 3 < 2,
                              .square_a = !is_b || (cases % 3 == 0),
                              .square_b = is_b || (cases % 3 == 0)};
                check_gemm(&g, &check);
                pool_release();
            }
        }
        check_end(&check, "gemm, square blocks, M %lld N %lld K %lld, %d cases", (long long)SHAPES[shape][0],
                  (long long)SHAPES[shape][1], (long long)SHAPES[shape][2], cases);
    }
}

// NaN
// -----------------------------------------------------------------------------------------------------------------

// Row `bad` of `t` has a NaN wherever `everywhere`, else somewhere; other rows have none.
static void check_nan_row(Tensor t, int64_t bad, bool everywhere) {
    for (int64_t r = 0; r < t.rows; r++) {
        int64_t nans = 0;
        for (int64_t c = 0; c < t.cols; c++) {
            nans += isnan(tensor_get(t, r, c)) != 0;
        }
        if (r != bad) assert_int_equal(nans, 0);
        if (r == bad) assert_true(everywhere ? nans == t.cols : nans > 0);
    }
}

static void test_nan_of_rows(void **state) {
    (void)state;
    enum { ROWS = 9, C = 96, BAD = 4 };
    FOR_EACH_DTYPE(dtype) {
        LayernormCase l = make_layernorm_case(dtype, ROWS, C);
        Tensor out = take_tensor(dtype, ROWS, C);
        tensor_set(l.input, BAD, 50, NAN);
        backend->layernorm_forward(out, NO_TENSOR, l.input, NO_TENSOR, norm_params(&l));
        check_nan_row(out, BAD, true);
        backend->activation_forward(out, l.input, ACTIVATION_GELU);
        check_nan_row(out, BAD, false);
        backend->activation_backward(out, NULL, l.dout, l.input, ACTIVATION_GELU);
        check_nan_row(out, BAD, false);
        backend->layernorm_forward(NO_TENSOR, out, l.input, l.dout, norm_params(&l));
        check_nan_row(out, BAD, false);
        backend->layernorm_backward(l.dinput, l.dweight, l.dbias, l.dout, l.input, norm_params(&l));
        check_nan_row(l.dinput, BAD, true);

        int32_t targets[ROWS] = {0};
        float losses[ROWS];
        Tensor logits = random_tensor(FORMAT_FP32, ROWS, C, 1);
        tensor_set(logits, BAD, 7, NAN);
        backend->classifier(losses, out, logits, targets, 1);
        check_nan_row(out, BAD, true);
        for (int r = 0; r < ROWS; r++) {
            assert_true(isnan(losses[r]) == (r == BAD));
        }

        Operand a = operand_tensor(l.input), b = operand_tensor(random_tensor(dtype, C, C, 1));
        give_workspace(backend->gemm_workspace(a, b));
        backend->gemm(out, a, b, (GemmOptions){0});
        check_nan_row(out, BAD, true);
        pool_release();
    }
}

// A NaN in a query reaches its own output alone; in a key or a value, all later ones.
static void test_nan_of_attention(void **state) {
    (void)state;
    enum { T = 150, HS = 8, BAD = 135 };
    FOR_EACH_DTYPE(dtype) {
        for (int part = 0; part < 3; part++) {
            Tensor qkv = random_tensor(dtype, T, 3 * HS, 1), dout = random_tensor(dtype, T, HS, 1);
            tensor_set(qkv, BAD, part * HS + 3, NAN);
            AttentionResult r = run_attention(qkv, dout, as_many_keys(1, T, 1, HS));
            if (part == 0) check_nan_row(r.out, BAD, true);
            for (int64_t t = BAD; t < T && part > 0; t++) {
                assert_true(isnan(tensor_get(r.out, t, 3)));
            }
            assert_true(isnan(tensor_get(r.dqkv, BAD, part * HS + 3)) || part == 2);
            pool_release();
        }
    }
}

static void test_memory(void **state) {
    (void)state;
    enum { BYTES = 3000001 };
    uint8_t *memory = backend->allocate(BYTES), *copy = pool_take(BYTES);
    uint8_t *zeros = calloc(1, BYTES);
    assert_memory_equal(memory, zeros, BYTES);
    memset(memory, 7, BYTES);
    backend->copy_to_host(copy, memory, BYTES);
    assert_memory_equal(copy, memory, BYTES);
    backend->zero(memory, BYTES);
    assert_memory_equal(memory, zeros, BYTES);
    backend->copy_to_device(memory, copy, BYTES);
    assert_memory_equal(copy, memory, BYTES);
    uint8_t *other = backend->allocate(BYTES);
    memory[BYTES - 1] = 8;
    backend->copy(other, memory, BYTES);
    assert_memory_equal(other, memory, BYTES);
    backend->release(other);
    backend->release(memory);
    free(zeros);
    pool_release();
}

// Threads keep scratch that no plan has: a thousand's is more than other programs take or give back
// meanwhile.
static void test_memory_of_threads(void **state) {
    (void)state;
    enum { THREADS = 1024 };
    omp_set_num_threads(1);
    double before = backend->available_memory();
    omp_set_num_threads(THREADS);
    double taken = before - backend->available_memory();
    omp_set_num_threads(1);
    assert_true(taken > 0.5 * THREADS * (double)matmul_bytes_of_thread());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vector_math),
        cmocka_unit_test(test_layernorm),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_residual),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_convert),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_classifier),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_grouped_and_unmasked),
        cmocka_unit_test(test_attention_in_documents),
        cmocka_unit_test(test_attention_large_scores),
        cmocka_unit_test(test_attention_larger_scores),
        cmocka_unit_test(test_attention_rounds_operands),
        cmocka_unit_test(test_attention_is_causal),
        cmocka_unit_test(test_gemm),
#ifdef HAVE_ONEDNN
        cmocka_unit_test(test_gemm_kernels),
        cmocka_unit_test(test_gemm_of_many_shapes),
#endif
        cmocka_unit_test(test_gemm_packed),
        cmocka_unit_test(test_gemm_causal),
        cmocka_unit_test(test_gemm_subnormals),
        cmocka_unit_test(test_gemm_square),
        cmocka_unit_test(test_nan_of_rows),
        cmocka_unit_test(test_nan_of_attention),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_memory_of_threads),
    };
    backend = backend_cpu();
    char text[512];
    backend->describe(text, sizeof(text));
    printf("%s\n", text);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
