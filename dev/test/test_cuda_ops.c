/*
The memory-bound operations of the CUDA backend against the CPU's, in FP32 and in BF16, in rows of
three strides (without gaps, with aligned gaps, with odd ones). Bounds are derived as in test_ops,
once for each of the two: an operation whose arithmetic leaves no choice must have the CPU's bits.
Each operation runs twice and gives the same bits, writes nothing outside its tensors, and turns NaN
into NaN. Runs on a GPU, or on the CPU through dev/hostcuda; where there is neither it says so and
passes.
*/
#include "device.h"
#include "llmc/cpu/cpu.h"
#include "llmc/model/optimizer.h"

static const Backend *backend;
static const char *const DTYPE_NAMES[] = {"fp32", "bf16"};

#define FOR_EACH_DTYPE(dtype) for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++)
#define LENGTH(array) (sizeof(array) / sizeof(array[0]))

// Memory of the device
// ------------------------------------------------------------------------------------------------

// NULL of NULL.
static float *floats_to_device(const float *host, int64_t count) {
    return host ? to_device(host, (size_t)count * sizeof(float)) : NULL;
}

static float *floats_to_host(const float *device, int64_t count) {
    if (!device) return NULL;
    float *values = take_floats(count);
    download(values, device, (size_t)count * sizeof(float));
    return values;
}

static void *give_workspace(int64_t rows, int64_t cols) {
    size_t bytes = cuda_reduction_workspace(rows, cols);
    void *workspace = to_device(pool_take(bytes), bytes);
    backend->use_workspace(workspace, bytes);
    return workspace;
}

// Columns between a row's end and the next row: none, whole 16-byte accesses, or neither.
static const int64_t GAPS[] = {0, 8, 3};
static int64_t gap;

static Tensor empty_tensor(Format dtype, int64_t rows, int64_t cols) {
    Tensor tensor = tensor_make(NULL, dtype, rows, cols);
    tensor.stride = cols + gap;
    tensor.data = pool_take(tensor_bytes(tensor));
    return tensor;
}

static Tensor normal_tensor(Format dtype, int64_t rows, int64_t cols, double stddev) {
    return fill_tensor(empty_tensor(dtype, rows, cols), stddev);
}

static float *normal_floats(int64_t count) {
    float *values = take_floats(count);
    fill_floats(values, count, 1);
    return values;
}

#define FOR_EACH_GAP for (size_t gap_index = 0; gap_index < LENGTH(GAPS) && (gap = GAPS[gap_index], true); gap_index++)

// Elementwise
// ---------------------------------------------------------------------------------------------------------

// What a computed gate 1 / (1 + exp(-z)) is off by: z by up to 4 U_FP32 of itself, exp by 4 U_FP32
// (2 ulp), of which the gate takes the part 1 - g; the sum and the quotient add one each. Beyond
// exp's range it may be 0, or 2^-126 as rows.h has it.
typedef struct {
    double g, rest, error, slope; // slope: dz/dx
} Gate;

static Gate gate_of(double z, double slope) {
    Gate gate = {1 / (1 + exp(-z)), 1 / (1 + exp(z)), 0, slope};
    gate.error = gate.g * U_FP32 * (gate.rest * (4 + 4 * fmin(fabs(z), 89)) + 2) + 0x1p-126;
    return gate;
}

static Gate gate_at(double x) { // of GELU
    double factor = 2 * sqrt(2 / acos(-1));
    return gate_of(factor * (x + 0.044715 * x * x * x), factor * (1 + 3 * 0.044715 * x * x));
}

static double gelu_bound(double x) {
    Gate gate = gate_at(x);
    return fabs(x) * (gate.error + gate.g * U_FP32);
}

static double gelu_gradient_bound(double x) {
    Gate gate = gate_at(x);
    double product =
        fabs(x) * gate.slope * (gate.error * gate.rest + (gate.g + gate.error) * (gate.error + U_FP32 * gate.rest));
    return gate.error + product + 6 * U_FP32 * (gate.g + fabs(x) * gate.g * gate.rest * gate.slope);
}

static void set_special(Tensor x) {
    static const double SPECIAL[] = {0, 10, -10, 1e-6, -1e-6, 30, -30, 1e4, -1e4, 0.31, -0.31};
    for (int64_t c = 0; c < x.cols && c < (int64_t)LENGTH(SPECIAL); c++) {
        tensor_set(x, 0, c, SPECIAL[c]);
    }
}

// Of an activation's output and its input's gradient: what the CPU gives and what the GPU does.
typedef struct {
    Tensor input, dout, expected[2], result[2];
} ActivationCase;

static ActivationCase run_activation(Activation activation, Format dtype, int64_t rows, int64_t F) {
    bool is_wide = activation == ACTIVATION_SWIGLU;
    int64_t cols = is_wide ? 2 * F : F;
    ActivationCase c = {normal_tensor(dtype, rows, cols, 2), normal_tensor(dtype, rows, F, 1), {{0}}, {{0}}};
    set_special(c.input);
    c.expected[0] = empty_tensor(dtype, rows, F);
    c.expected[1] = is_wide ? empty_tensor(dtype, rows, cols) : copy_tensor(c.dout);
    cpu_activation_forward(c.expected[0], c.input, activation);
    cpu_activation_backward(c.expected[1], NULL, is_wide ? c.dout : c.expected[1], c.input, activation);
    for (int run = 0; run < 2; run++) {
        Tensor x = tensor_to_device(c.input), out = tensor_to_device(empty_tensor(dtype, rows, F));
        Tensor dout = tensor_to_device(c.dout), dinput = is_wide ? tensor_to_device(c.expected[1]) : dout; // over dout
        if (is_wide) dinput = tensor_to_device(empty_tensor(dtype, rows, cols));
        cuda_activation_forward(out, x, activation);
        cuda_activation_backward(dinput, NULL, dout, x, activation);
        Tensor results[] = {tensor_to_host(out), tensor_to_host(dinput)};
        for (int i = 0; i < 2; i++) {
            check_padding(results[i]);
            if (run == 1) check_same_tensor(c.result[i], results[i]);
            c.result[i] = results[i];
        }
    }
    return c;
}

static void check_gelu(Format dtype, int64_t rows, int64_t cols) {
    ActivationCase a = run_activation(ACTIVATION_GELU, dtype, rows, cols);
    Check forward = {0}, backward = {0};
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t r = i / cols, c = i % cols;
        double x = tensor_get(a.input, r, c), d = tensor_get(a.dout, r, c);
        double y = tensor_get(a.expected[0], r, c), dx = tensor_get(a.expected[1], r, c);
        check_value(&forward, tensor_get(a.result[0], r, c), y, 2 * (gelu_bound(x) + rounding(dtype, y)));
        check_value(&backward, tensor_get(a.result[1], r, c), dx,
                    2 * (fabs(d) * gelu_gradient_bound(x) + rounding(dtype, dx)));
    }
    check_end(&forward, "gelu forward %s (%lld, %lld) gap %lld", DTYPE_NAMES[dtype], (long long)rows, (long long)cols,
              (long long)gap);
    check_end(&backward, "  backward, over dout");
}

// Where x^2 and x^3 overflow the slope is still 1 or 0.
static void check_gelu_of_large(Format dtype) {
    static const double LARGE[] = {1e5, 1e10, 1e13, 2e19, 1e30, 3e38};
    Tensor input = empty_tensor(dtype, 2, LENGTH(LARGE)), dout = empty_tensor(dtype, 2, LENGTH(LARGE));
    for (int64_t r = 0; r < 2; r++) {
        for (int64_t c = 0; c < input.cols; c++) {
            tensor_set(input, r, c, r == 0 ? LARGE[c] : -LARGE[c]);
            tensor_set(dout, r, c, 1);
        }
    }
    Tensor dinput = tensor_to_device(dout);
    cuda_activation_backward(dinput, NULL, dinput, tensor_to_device(input), ACTIVATION_GELU);
    dinput = tensor_to_host(dinput);
    Check check = {0};
    for (int64_t i = 0; i < 2 * input.cols; i++) {
        check_value(&check, tensor_get(dinput, i / input.cols, i % input.cols), i < input.cols, 1e-8);
    }
    check_end(&check, "gelu backward %s of large x", DTYPE_NAMES[dtype]);
}

// One rounding leaves no choice.
static void check_relu(Activation activation, Format dtype, int64_t rows, int64_t cols) {
    ActivationCase a = run_activation(activation, dtype, rows, cols);
    check_same_tensor(a.result[0], a.expected[0]);
    check_same_tensor(a.result[1], a.expected[1]);
}

static void check_swiglu(Format dtype, int64_t rows, int64_t F) {
    ActivationCase a = run_activation(ACTIVATION_SWIGLU, dtype, rows, F);
    Check forward = {0}, backward = {0};
    for (int64_t i = 0; i < rows * F; i++) {
        int64_t r = i / F, c = i % F;
        double x = tensor_get(a.input, r, c), up = tensor_get(a.input, r, F + c), d = tensor_get(a.dout, r, c);
        Gate gate = gate_of(x, 1);
        double silu = x * gate.g, slope = gate.g + silu * gate.rest, silu_error = fabs(x) * gate.error;
        double y = tensor_get(a.expected[0], r, c), dx = tensor_get(a.expected[1], r, c);
        double dup = tensor_get(a.expected[1], r, F + c);
        check_value(&forward, tensor_get(a.result[0], r, c), y,
                    2 * (fabs(up) * (silu_error + 2 * U_FP32 * fabs(silu)) + rounding(dtype, y)));
        // The slope: g, and silu times 1 - g, whose error is g's.
        double slope_error = gate.error + (silu_error + fabs(silu) * U_FP32) * gate.rest +
                             fabs(silu) * (gate.error + U_FP32) + 2 * U_FP32 * fabs(slope);
        check_value(&backward, tensor_get(a.result[1], r, c), dx,
                    2 * (fabs(d * up) * (slope_error + 2 * U_FP32 * fabs(slope)) + rounding(dtype, dx)));
        check_value(&backward, tensor_get(a.result[1], r, F + c), dup,
                    2 * (fabs(d) * (silu_error + 2 * U_FP32 * fabs(silu)) + rounding(dtype, dup)));
    }
    check_end(&forward, "swiglu forward %s (%lld, %lld) gap %lld", DTYPE_NAMES[dtype], (long long)rows, (long long)F,
              (long long)gap);
    check_end(&backward, "  backward");
}

static void check_gelu_exact(Format dtype, int64_t rows, int64_t cols) {
    ActivationCase a = run_activation(ACTIVATION_GELU_EXACT, dtype, rows, cols);
    Check forward = {0}, backward = {0};
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t r = i / cols, c = i % cols;
        double x = tensor_get(a.input, r, c), d = tensor_get(a.dout, r, c);
        double y = tensor_get(a.expected[0], r, c), dx = tensor_get(a.expected[1], r, c);
        check_value(&forward, tensor_get(a.result[0], r, c), y,
                    2 * (fabs(x) * normal_gate_bound(x) + U_FP32 * fabs(y) + rounding(dtype, y)));
        check_value(&backward, tensor_get(a.result[1], r, c), dx,
                    2 * (fabs(d) * exact_gelu_gradient_bound(x) + rounding(dtype, dx)));
    }
    check_end(&forward, "exact gelu forward %s (%lld, %lld)", DTYPE_NAMES[dtype], (long long)rows, (long long)cols);
    check_end(&backward, "  backward, over dout");
}

static void test_elementwise(void **state) {
    (void)state;
    static const int64_t SHAPES[][2] = {{1, 1}, {33, 96}, {7, 1500}, {5, 2056}, {66000, 1}};
    FOR_EACH_DTYPE(dtype) {
        check_gelu_of_large(dtype);
        FOR_EACH_GAP {
            for (size_t i = 0; i < LENGTH(SHAPES); i++) {
                check_gelu(dtype, SHAPES[i][0], SHAPES[i][1]);
                check_gelu_exact(dtype, SHAPES[i][0], SHAPES[i][1]);
                if (SHAPES[i][0] > 65535 && gap > 0) continue; // more rows than a grid has, once
                check_relu(ACTIVATION_RELU, dtype, SHAPES[i][0], SHAPES[i][1]);
                check_relu(ACTIVATION_RELU2, dtype, SHAPES[i][0], SHAPES[i][1]);
                check_swiglu(dtype, SHAPES[i][0], SHAPES[i][1]);
                release_all();
            }
        }
    }
}

// Rotary positions
// ----------------------------------------------------------------------------------------------------

// `beside` columns left and right of x stay as they are, as keys and values do beside queries.
static void check_rope(Format dtype, AttentionShape s, double theta, int64_t beside, bool inverse) {
    int64_t cols = s.NH * s.HS;
    Tensor before = normal_tensor(dtype, s.B * s.T, cols + 2 * beside, 1), expected = copy_tensor(before), result = {0};
    Tensor x = expected;
    x.data = (char *)x.data + (size_t)beside * dtype_size(dtype);
    x.cols = cols;
    Sequences sequences = {.T = s.T}, on_device_too = sequences;
    if (s.by_document) {
        sequences.positions = take_documents(s.B, s.T, 5);
        on_device_too.positions = to_device(sequences.positions, (size_t)(s.B * s.T) * sizeof(int32_t));
    }
    int64_t angles = (s.T + 2) * s.HS; // of more positions than sequences have
    float *rotations = take_floats(angles), *on_gpu = floats_to_device(rotations, angles);
    cpu_rope_rotations(rotations, s.T + 2, s.HS, theta);
    cpu_rope(x, rotations, sequences, s.HS, inverse);
    cuda_rope_rotations(on_gpu, s.T + 2, s.HS, theta);
    for (int run = 0; run < 2; run++) {
        Tensor all = tensor_to_device(before);
        x.data = (char *)all.data + (size_t)beside * dtype_size(dtype);
        cuda_rope(x, on_gpu, on_device_too, s.HS, inverse);
        Tensor values = tensor_to_host(all);
        check_padding(values);
        if (run == 1) check_same_tensor(result, values);
        result = values;
    }
    Check check = {0};
    for (int64_t i = 0; i < before.rows * before.cols; i++) {
        int64_t row = i / before.cols, col = i % before.cols, d = (col - beside) % s.HS;
        double value = tensor_get(result, row, col), wanted = tensor_get(expected, row, col);
        if (col < beside || col >= beside + cols) {
            assert_true(value == wanted);
            continue;
        }
        // Sine and cosine, their products and the sum are rounded once each.
        double a = tensor_get(before, row, col), b = tensor_get(before, row, col + (d < s.HS / 2 ? s.HS : -s.HS) / 2);
        check_value(&check, value, wanted, 2 * (3 * U_FP32 * (fabs(a) + fabs(b)) + rounding(dtype, wanted)));
    }
    check_end(&check, "rope %s B %lld T %lld heads %lld HS %lld gap %lld%s", DTYPE_NAMES[dtype], (long long)s.B,
              (long long)s.T, (long long)s.NH, (long long)s.HS, (long long)gap, inverse ? ", back" : "");
    release_all();
}

static void test_rope(void **state) {
    (void)state;
    static const AttentionShape SHAPES[] = {
        {.B = 2, .T = 33, .NH = 3, .HS = 16}, {.B = 1, .T = 1500, .NH = 9, .HS = 16},
        {.B = 3, .T = 7, .NH = 5, .HS = 64},  {.B = 1, .T = 5, .NH = 1, .HS = 2},
        {.B = 2, .T = 9, .NH = 4, .HS = 6},   {.B = 2, .T = 33, .NH = 3, .HS = 16, .by_document = true}};
    FOR_EACH_DTYPE(dtype) {
        FOR_EACH_GAP {
            for (size_t i = 0; i < LENGTH(SHAPES); i++) {
                double theta = i % 2 ? 500000 : 10000;
                check_rope(dtype, SHAPES[i], theta, gap == 3 ? 5 : 8, false);
                check_rope(dtype, SHAPES[i], theta, gap == 3 ? 5 : 8, true);
            }
        }
    }
}

// Sums over rows
// ------------------------------------------------------------------------------------------------------

// Each column's sum of magnitudes, `before` among them.
static double *column_magnitudes(Tensor t, const float *before) {
    double *sums = take_doubles(t.cols);
    for (int64_t c = 0; c < t.cols; c++) {
        sums[c] = fabs(before[c]);
        for (int64_t r = 0; r < t.rows; r++) {
            sums[c] += fabs(tensor_get(t, r, c));
        }
    }
    return sums;
}

static void check_bias(Format dtype, int64_t rows, int64_t cols) {
    Tensor dout = normal_tensor(dtype, rows, cols, 1), on_gpu = tensor_to_device(dout);
    float *before = normal_floats(cols), *expected = copy_floats(before, cols), *result[2];
    cpu_bias_backward(expected, dout);
    for (int run = 0; run < 2; run++) {
        float *dbias = floats_to_device(before, cols);
        give_workspace(rows, cols);
        cuda_bias_backward(dbias, on_gpu);
        result[run] = floats_to_host(dbias, cols);
    }
    check_same_floats(result[0], result[1], cols);
    const double *magnitude = column_magnitudes(dout, before);
    Check check = {0};
    for (int64_t c = 0; c < cols; c++) {
        check_value(&check, result[0][c], expected[c], 2 * (double)(rows + 1) * U_FP32 * magnitude[c]);
    }
    check_end(&check, "bias_backward %s (%lld, %lld) gap %lld", DTYPE_NAMES[dtype], (long long)rows, (long long)cols,
              (long long)gap);
    release_all();
}

// An activation's gradient and the sums of its columns at once: the same bits as one after the
// other, also where it is written over dout.
static void check_gradient_with_bias(Format dtype, int64_t rows, int64_t F, Activation activation) {
    bool is_wide = activation == ACTIVATION_SWIGLU;
    int64_t cols = is_wide ? 2 * F : F;
    Tensor dout = normal_tensor(dtype, rows, F, 1), input = tensor_to_device(normal_tensor(dtype, rows, cols, 2));
    Tensor apart = tensor_to_device(empty_tensor(dtype, rows, cols)), together = tensor_to_device(dout);
    float *before = normal_floats(cols), *dbias = floats_to_device(before, cols),
          *sums = floats_to_device(before, cols);
    if (is_wide) together = tensor_to_device(empty_tensor(dtype, rows, cols));
    give_workspace(rows, cols);
    cuda_activation_backward(apart, NULL, tensor_to_device(dout), input, activation);
    cuda_bias_backward(dbias, apart);
    cuda_activation_backward(together, sums, is_wide ? tensor_to_device(dout) : together, input, activation);
    check_same_tensor(tensor_to_host(apart), tensor_to_host(together));
    check_padding(tensor_to_host(together));
    check_same_floats(floats_to_host(dbias, cols), floats_to_host(sums, cols), cols);
    release_all();
}

static void test_bias(void **state) {
    (void)state;
    // The second has a part of one row; the last, parts of parts of parts.
    static const int64_t SHAPES[][2] = {{1, 1}, {257, 96}, {33, 257}, {600, 520}, {66000, 8}};
    FOR_EACH_DTYPE(dtype) {
        FOR_EACH_GAP {
            for (size_t i = 0; i < LENGTH(SHAPES); i++) {
                check_bias(dtype, SHAPES[i][0], SHAPES[i][1]);
                for (int activation = 0; activation < NUM_ACTIVATIONS; activation++) {
                    check_gradient_with_bias(dtype, SHAPES[i][0], SHAPES[i][1], (Activation)activation);
                }
            }
        }
    }
}

// Layer normalisation
// -------------------------------------------------------------------------------------------------

typedef struct {
    NormKind kind;
    float eps;
    Tensor input, dout, dinput;                           // dinput: what is added to
    float *weight, *bias, *mean, *rstd, *dweight, *dbias; // all but rstd may be NULL
} LayernormCase;

static NormParams norm_params(const LayernormCase *l) {
    return (NormParams){l->kind, l->eps, l->mean, l->rstd, l->weight, l->bias};
}

// On the device, with statistics that a forward pass has still to write.
static NormParams norm_on_device(const LayernormCase *l) {
    int64_t rows = l->input.rows, C = l->input.cols;
    return (NormParams){.kind = l->kind,
                        .eps = l->eps,
                        .mean = floats_to_device(l->mean ? take_floats(rows) : NULL, rows),
                        .rstd = floats_to_device(take_floats(rows), rows),
                        .weight = floats_to_device(l->weight, C),
                        .bias = floats_to_device(l->bias, C)};
}

static LayernormCase make_layernorm_case(Format dtype, int64_t rows, int64_t C) {
    return (LayernormCase){NORM_LAYERNORM,
                           rows % 2 ? (float)NORM_EPS : 0.1f,
                           normal_tensor(dtype, rows, C, 2),
                           normal_tensor(dtype, rows, C, 1),
                           normal_tensor(dtype, rows, C, 1),
                           normal_floats(C),
                           normal_floats(C),
                           take_floats(rows),
                           take_floats(rows),
                           normal_floats(C),
                           normal_floats(C)};
}

// A norm without any of these: bits of a mask.
enum { NO_MEAN = 1, NO_WEIGHT = 2, NO_BIAS = 4, NO_DWEIGHT = 8, NO_DBIAS = 16 };

static LayernormCase without(LayernormCase l, int mask) {
    if (mask & NO_MEAN) l.kind = NORM_RMSNORM, l.mean = NULL;
    if (mask & NO_WEIGHT) l.weight = NULL;
    if (mask & NO_BIAS) l.bias = NULL;
    if (mask & NO_DWEIGHT) l.dweight = NULL;
    if (mask & NO_DBIAS) l.dbias = NULL;
    return l;
}

static double value_or(const float *values, int64_t i, double otherwise) { return values ? values[i] : otherwise; }

static Tensor layernorm_forward_twice(const LayernormCase *l, float **mean, float **rstd) {
    int64_t rows = l->input.rows, C = l->input.cols;
    Tensor result[2];
    for (int run = 0; run < 2; run++) {
        Tensor out = tensor_to_device(empty_tensor(l->input.dtype, rows, C));
        NormParams norm = norm_on_device(l);
        cuda_layernorm_forward(out, (Tensor){0}, tensor_to_device(l->input), (Tensor){0}, norm);
        result[run] = tensor_to_host(out);
        *mean = floats_to_host(norm.mean, rows), *rstd = floats_to_host(norm.rstd, rows);
    }
    check_same_tensor(result[0], result[1]);
    check_padding(result[0]);
    return result[0];
}

static void check_layernorm_forward(const LayernormCase *l) {
    int64_t rows = l->input.rows, C = l->input.cols;
    Format dtype = l->input.dtype;
    Tensor expected = empty_tensor(dtype, rows, C);
    cpu_layernorm_forward(expected, (Tensor){0}, l->input, (Tensor){0}, norm_params(l));
    float *mean, *rstd;
    Tensor out = layernorm_forward_twice(l, &mean, &rstd);
    Check values = {0}, statistics = {0};
    for (int64_t r = 0; r < rows; r++) {
        double magnitude = 0;
        for (int64_t c = 0; c < C; c++) {
            magnitude += fabs(tensor_get(l->input, r, c)) / (double)C;
        }
        double m = value_or(l->mean, r, 0);
        check_value(&statistics, value_or(mean, r, 0), m, 2 * sum_error(C) * magnitude);
        check_value(&statistics, rstd[r], l->rstd[r], 2 * sum_error(C) * l->rstd[r]);
        for (int64_t c = 0; c < C; c++) {
            double n = (tensor_get(l->input, r, c) - m) * l->rstd[r], w = value_or(l->weight, c, 1), product = n * w;
            double y = tensor_get(expected, r, c);
            double bound = fabs(w) * sum_error(C) * (l->rstd[r] * magnitude + fabs(n)) +
                           4 * U_FP32 * (fabs(product) + fabs(value_or(l->bias, c, 0))) + rounding(dtype, y);
            check_value(&values, tensor_get(out, r, c), y, 2 * bound);
        }
    }
    check_end(&values, "layernorm_forward %s (%lld, %lld) gap %lld", DTYPE_NAMES[dtype], (long long)rows, (long long)C,
              (long long)gap);
    check_end(&statistics, "  mean and rstd");
}

// With a residual: the CPU's sum, and of that sum what the operation makes of a tensor, all to the
// bit. Also where the sum takes the place of either, and where statistics alone are wanted.
static void check_layernorm_residual(const LayernormCase *l) {
    int64_t rows = l->input.rows, C = l->input.cols;
    Format dtype = l->input.dtype;
    Tensor expected_sum = empty_tensor(dtype, rows, C);
    cpu_layernorm_forward(empty_tensor(dtype, rows, C), expected_sum, l->input, l->dout, norm_params(l));
    LayernormCase plain = *l;
    plain.input = expected_sum;
    float *expected_mean, *expected_rstd;
    Tensor expected = layernorm_forward_twice(&plain, &expected_mean, &expected_rstd);
    for (int variant = 0; variant < 4; variant++) {
        Tensor input = tensor_to_device(l->input), residual = tensor_to_device(l->dout), out = {0};
        Tensor sum = variant == 1 ? input : variant == 2 ? residual : tensor_to_device(empty_tensor(dtype, rows, C));
        if (variant != 3) out = tensor_to_device(empty_tensor(dtype, rows, C));
        NormParams norm = norm_on_device(l);
        cuda_layernorm_forward(out, sum, input, residual, norm);
        check_same_tensor(tensor_to_host(sum), expected_sum);
        if (out.data) check_same_tensor(tensor_to_host(out), expected);
        if (norm.mean) check_same_floats(floats_to_host(norm.mean, rows), expected_mean, rows);
        check_same_floats(floats_to_host(norm.rstd, rows), expected_rstd, rows);
        if (sum.data != input.data) check_same_tensor(tensor_to_host(input), l->input);
        if (sum.data != residual.data) check_same_tensor(tensor_to_host(residual), l->dout);
    }
}

typedef struct {
    Tensor dinput;
    float *dweight, *dbias;
} LayernormGradients;

static LayernormGradients layernorm_backward_twice(const LayernormCase *l) {
    int64_t rows = l->input.rows, C = l->input.cols;
    LayernormGradients result[2];
    for (int run = 0; run < 2; run++) {
        Tensor dinput = tensor_to_device(l->dinput);
        float *dweight = floats_to_device(l->dweight, C), *dbias = floats_to_device(l->dbias, C);
        NormParams norm = norm_on_device(l);
        norm.mean = floats_to_device(l->mean, rows), norm.rstd = floats_to_device(l->rstd, rows);
        give_workspace(rows, C);
        cuda_layernorm_backward(dinput, dweight, dbias, tensor_to_device(l->dout), tensor_to_device(l->input), norm);
        result[run] =
            (LayernormGradients){tensor_to_host(dinput), floats_to_host(dweight, C), floats_to_host(dbias, C)};
    }
    check_same_tensor(result[0].dinput, result[1].dinput);
    if (l->dweight) check_same_floats(result[0].dweight, result[1].dweight, C);
    if (l->dbias) check_same_floats(result[0].dbias, result[1].dbias, C);
    check_padding(result[0].dinput);
    return result[0];
}

// Both are given the same mean and rstd, so n = (x - mean) rstd is off by 2 U_FP32 of itself and dn
// by one.
static void check_layernorm_backward(const LayernormCase *l) {
    int64_t rows = l->input.rows, C = l->input.cols;
    Format dtype = l->input.dtype;
    LayernormGradients expected = {copy_tensor(l->dinput), l->dweight ? copy_floats(l->dweight, C) : NULL,
                                   l->dbias ? copy_floats(l->dbias, C) : NULL};
    cpu_layernorm_backward(expected.dinput, expected.dweight, expected.dbias, l->dout, l->input, norm_params(l));
    LayernormGradients result = layernorm_backward_twice(l);
    const float *no_dbias = memset(take_floats(C), 0, (size_t)C * sizeof(float));
    double *weight_magnitude = take_doubles(C);
    double *bias_magnitude = column_magnitudes(l->dout, l->dbias ? l->dbias : no_dbias);
    for (int64_t c = 0; c < C; c++) {
        weight_magnitude[c] = fabs(value_or(l->dweight, c, 0));
    }
    Check inputs = {0}, parameters = {0};
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0, dot = 0, m = value_or(l->mean, r, 0);
        for (int64_t c = 0; c < C; c++) {
            double n = fabs((tensor_get(l->input, r, c) - m) * l->rstd[r]), d = tensor_get(l->dout, r, c);
            double dn = fabs(d * value_or(l->weight, c, 1));
            sum += dn / (double)C;
            dot += dn * n / (double)C;
            weight_magnitude[c] += fabs(d) * n;
        }
        for (int64_t c = 0; c < C; c++) {
            double n = fabs((tensor_get(l->input, r, c) - m) * l->rstd[r]);
            double dn = fabs(tensor_get(l->dout, r, c) * value_or(l->weight, c, 1)),
                   dx = tensor_get(expected.dinput, r, c);
            double bound = l->rstd[r] * (4 * U_FP32 * dn + sum_error(C) * (sum + n * dot)) +
                           U_FP32 * fabs(tensor_get(l->dinput, r, c)) + rounding(dtype, dx);
            check_value(&inputs, tensor_get(result.dinput, r, c), dx, 2 * bound);
        }
    }
    for (int64_t c = 0; c < C; c++) {
        check_value(&parameters, value_or(result.dweight, c, 0), value_or(expected.dweight, c, 0),
                    2 * sum_error(rows) * weight_magnitude[c]);
        check_value(&parameters, value_or(result.dbias, c, 0), value_or(expected.dbias, c, 0),
                    2 * sum_error(rows) * bias_magnitude[c]);
    }
    check_end(&inputs, "layernorm_backward %s (%lld, %lld) gap %lld", DTYPE_NAMES[dtype], (long long)rows, (long long)C,
              (long long)gap);
    check_end(&parameters, "  gradients of weight and bias");
}

static void test_layernorm(void **state) {
    (void)state;
    // Rows of one warp's threads, of several warps', too long to keep; parts of many rows; sums of
    // more than 256 parts.
    static const int64_t SHAPES[][2] = {{1, 96},  {33, 96},   {100, 264}, {7, 1},    {3, 33},
                                        {5, 257}, {3, 20000}, {2, 65536}, {8300, 8}, {2100, 40}};
    FOR_EACH_DTYPE(dtype) {
        FOR_EACH_GAP {
            for (size_t i = 0; i < LENGTH(SHAPES); i++) {
                LayernormCase l = make_layernorm_case(dtype, SHAPES[i][0], SHAPES[i][1]);
                check_layernorm_forward(&l);
                check_layernorm_backward(&l);
                release_all();
                l = make_layernorm_case(dtype, SHAPES[i][0], SHAPES[i][1]);
                check_layernorm_residual(&l);
                release_all();
            }
        }
    }
}

// RMSNorm, norms without gains or biases, gradients that nobody wants.
static void test_norms(void **state) {
    (void)state;
    static const int MASKS[] = {NO_MEAN,
                                NO_MEAN | NO_BIAS | NO_DBIAS,
                                NO_MEAN | NO_WEIGHT | NO_BIAS | NO_DWEIGHT | NO_DBIAS,
                                NO_WEIGHT | NO_BIAS | NO_DWEIGHT | NO_DBIAS,
                                NO_BIAS | NO_DBIAS,
                                NO_DWEIGHT | NO_DBIAS,
                                NO_WEIGHT | NO_DWEIGHT};
    static const int64_t SHAPES[][2] = {{33, 96}, {5, 257}, {3, 20000}, {2100, 40}};
    FOR_EACH_DTYPE(dtype) {
        for (size_t i = 0; i < LENGTH(SHAPES) * LENGTH(MASKS); i++) {
            gap = GAPS[i % LENGTH(GAPS)];
            const int64_t *shape = SHAPES[i / LENGTH(MASKS)];
            LayernormCase l = without(make_layernorm_case(dtype, shape[0], shape[1]), MASKS[i % LENGTH(MASKS)]);
            check_layernorm_forward(&l);
            check_layernorm_backward(&l);
            release_all();
            if (shape[1] > 300) continue;
            l = without(make_layernorm_case(dtype, shape[0], shape[1]), MASKS[i % LENGTH(MASKS)]);
            check_layernorm_residual(&l);
            release_all();
        }
    }
}

// Embeddings
// ----------------------------------------------------------------------------------------------------------

// dwte, dwpe
typedef struct {
    float *values[2];
} EmbeddingGradients;

typedef enum { NO_POSITIONS, POSITIONS, OF_DOCUMENTS } Positions;

static void check_embedding(Format dtype, int64_t B, int64_t T, int64_t V, int64_t C, Positions kind) {
    bool has_positions = kind != NO_POSITIONS;
    Sequences sequences = {.T = T}, on_device_too = sequences;
    if (kind == OF_DOCUMENTS) {
        sequences.positions = take_documents(B, T, 20);
        on_device_too.positions = to_device(sequences.positions, (size_t)(B * T) * sizeof(int32_t));
    }
    int64_t rows = B * T, counts[] = {V * C, (T + 2) * C};
    Tensor wte = normal_tensor(dtype, V, C, 1), wpe = normal_tensor(dtype, T + 2, C, 1);
    Tensor dout = normal_tensor(dtype, rows, C, 1), expected = empty_tensor(dtype, rows, C), out[2];
    int32_t *tokens = pool_take((size_t)rows * sizeof(int32_t));
    fill_below(tokens, rows, (int32_t)V);
    EmbeddingGradients before = {{normal_floats(counts[0]), normal_floats(counts[1])}}, wanted, result[2];
    for (int i = 0; i < 2; i++) {
        wanted.values[i] = copy_floats(before.values[i], counts[i]);
    }
    cpu_embedding_forward(expected, tokens, wte, has_positions ? wpe : (Tensor){0}, sequences);
    cpu_embedding_backward(wanted.values[0], has_positions ? wanted.values[1] : NULL, tokens, dout, sequences);
    for (int run = 0; run < 2; run++) {
        Tensor device_out = tensor_to_device(empty_tensor(dtype, rows, C));
        int32_t *device_tokens = to_device(tokens, (size_t)rows * sizeof(int32_t));
        float *dwte = floats_to_device(before.values[0], counts[0]);
        float *dwpe = floats_to_device(before.values[1], counts[1]);
        cuda_embedding_forward(device_out, device_tokens, tensor_to_device(wte),
                               has_positions ? tensor_to_device(wpe) : (Tensor){0}, on_device_too);
        give_workspace(rows, C);
        cuda_embedding_backward(dwte, has_positions ? dwpe : NULL, device_tokens, tensor_to_device(dout),
                                on_device_too);
        out[run] = tensor_to_host(device_out);
        result[run] = (EmbeddingGradients){{floats_to_host(dwte, counts[0]), floats_to_host(dwpe, counts[1])}};
    }
    check_same_tensor(out[0], out[1]);
    check_same_tensor(out[0], expected);
    Check check = {0};
    for (int i = 0; i < 2; i++) {
        check_same_floats(result[0].values[i], result[1].values[i], counts[i]);
        double *magnitude = take_doubles(counts[i]);
        for (int64_t at = 0; at < counts[i]; at++) {
            magnitude[at] = fabs(before.values[i][at]);
        }
        for (int64_t at = 0; at < rows * C; at++) {
            int64_t row = at / C, to = i == 0 ? tokens[row] : cpu_position(sequences, row);
            magnitude[to * C + at % C] += fabs(tensor_get(dout, row, at % C));
        }
        for (int64_t at = 0; at < counts[i]; at++) {
            check_value(&check, result[0].values[i][at], wanted.values[i][at],
                        2 * (double)(rows + 1) * U_FP32 * magnitude[at]);
        }
    }
    check_end(&check, "embedding_backward %s B %lld T %lld V %lld C %lld gap %lld%s", DTYPE_NAMES[dtype], (long long)B,
              (long long)T, (long long)V, (long long)C, (long long)gap, has_positions ? "" : ", no positions");
    release_all();
}

static void test_embedding(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        FOR_EACH_GAP {
            check_embedding(dtype, 3, 33, 257, 96, POSITIONS);
            check_embedding(dtype, 3, 33, 257, 96, NO_POSITIONS);
            check_embedding(dtype, 3, 33, 257, 96, OF_DOCUMENTS);
            check_embedding(dtype, 2, 7, 5, 200, POSITIONS);   // every token many times
            check_embedding(dtype, 2, 300, 1, 520, POSITIONS); // more of a token than a block's warps take at once
            check_embedding(dtype, 4, 257, 50, 13, POSITIONS);
            check_embedding(dtype, 4, 257, 50, 13, NO_POSITIONS);
            check_embedding(dtype, 4, 257, 50, 13, OF_DOCUMENTS);
            check_embedding(dtype, 1, 1, 1, 1, POSITIONS);
        }
    }
    check_embedding(FORMAT_BF16, 5, 700, 1 << 20, 1, NO_POSITIONS); // three digits of a token, several blocks of parts
}

// The backward pass begins with sorting rows by token, which it leaves where its workspace begins:
// tokens in order, and the rows of a token in theirs, each row once.
static void test_embedding_sort(void **state) {
    (void)state;
    static const int64_t CASES[][2] = {{1, 1}, {31, 2}, {256, 1}, {257, 300}, {2049, 1 << 24}, {5000, 70000}};
    for (size_t i = 0; i < LENGTH(CASES); i++) {
        int64_t rows = CASES[i][0];
        int32_t *tokens = pool_take((size_t)rows * sizeof(int32_t)), *sorted = pool_take((size_t)rows * 8);
        fill_below(tokens, rows, (int32_t)CASES[i][1]);
        for (int64_t row = 0; row < rows; row += 7) { // tokens that come more than once
            tokens[row] = (int32_t)(CASES[i][1] - 1) & ~0xFF00;
        }
        const int32_t *order = sorted + rows;
        float *dwte = floats_to_device(take_floats(CASES[i][1]), CASES[i][1]);
        void *workspace = give_workspace(rows, 1);
        cuda_embedding_backward(dwte, NULL, to_device(tokens, (size_t)rows * sizeof(int32_t)),
                                tensor_to_device(normal_tensor(FORMAT_BF16, rows, 1, 1)), (Sequences){.T = rows});
        cuda_copy_to_host(sorted, workspace, (size_t)rows * 8);
        for (int64_t at = 0; at < rows; at++) {
            assert_in_range(order[at], 0, rows - 1);
            assert_int_equal(sorted[at], tokens[order[at]]);
            assert_true(at == 0 || sorted[at - 1] < sorted[at] ||
                        (sorted[at - 1] == sorted[at] && order[at - 1] < order[at]));
        }
        release_all();
    }
}

// Classifier
// ----------------------------------------------------------------------------------------------------------

static void check_classifier(Format dtype, int64_t rows, int64_t V, double spread) {
    const float dloss = 1.0f / 37;
    Tensor logits = normal_tensor(FORMAT_FP32, rows, V, spread), expected = empty_tensor(dtype, rows, V), dlogits[2];
    if (V > 64) tensor_set(logits, 0, 5, -INFINITY); // a probability of 0
    int32_t *targets = pool_take((size_t)rows * sizeof(int32_t));
    fill_below(targets, rows, (int32_t)V);
    targets[0] = (int32_t)V - 1;
    int32_t *device_targets = to_device(targets, (size_t)rows * sizeof(int32_t));
    float *wanted = take_floats(rows), *losses[3];
    cpu_classifier(wanted, expected, copy_tensor(logits), targets, dloss);
    for (int run = 0; run < 3; run++) { // the third without gradients
        Tensor device_dlogits = run < 2 ? tensor_to_device(empty_tensor(dtype, rows, V)) : (Tensor){0};
        float *device_losses = floats_to_device(take_floats(rows), rows);
        cuda_classifier(device_losses, device_dlogits, tensor_to_device(logits), device_targets, dloss);
        losses[run] = floats_to_host(device_losses, rows);
        if (run < 2) dlogits[run] = tensor_to_host(device_dlogits);
    }
    check_same_floats(losses[0], losses[1], rows);
    check_same_tensor(dlogits[0], dlogits[1]);
    check_padding(dlogits[0]);
    // Without gradients a kernel that doesn't keep rows has the same order of sums, but where packs
    // are of another size.
    if (dtype == FORMAT_FP32) check_same_floats(losses[0], losses[2], rows);

    Check loss_check = {0}, gradient_check = {0};
    for (int64_t r = 0; r < rows; r++) {
        double max = -INFINITY, sum = 0, distance = 0, target = tensor_get(logits, r, targets[r]);
        for (int64_t v = 0; v < V; v++) {
            max = fmax(max, tensor_get(logits, r, v));
        }
        for (int64_t v = 0; v < V; v++) {
            double x = tensor_get(logits, r, v), e = exp(x - max);
            sum += e;
            distance += e == 0 ? 0 : e * (max - x);
        }
        // The sum's relative error: its additions, exp's 2 ulp, the rounding of each exponent.
        double sum_bound = (double)(V + 8) * U_FP32 + distance / sum * U_FP32;
        double loss_bound = sum_bound + 4 * U_FP32 * (log(sum) + max - target) + U_FP32 * wanted[r];
        check_value(&loss_check, losses[0][r], wanted[r], 2 * loss_bound);
        check_value(&loss_check, losses[2][r], wanted[r], 2 * loss_bound);
        for (int64_t v = 0; v < V; v++) {
            double x = tensor_get(logits, r, v), p = exp(x - max) / sum, d = tensor_get(expected, r, v);
            double relative = p == 0 ? 0 : p * (sum_bound + (8 + max - x) * U_FP32);
            double bound = relative + 2 * U_FP32 * (v == targets[r]) + 0x1p-125;
            check_value(&gradient_check, tensor_get(dlogits[0], r, v), d, 2 * (dloss * bound + rounding(dtype, d)));
        }
    }
    check_end(&loss_check, "classifier %s (%lld, %lld) spread %g gap %lld: loss", DTYPE_NAMES[dtype], (long long)rows,
              (long long)V, spread, (long long)gap);
    check_end(&gradient_check, "  dlogits");
    release_all();
}

static void test_classifier(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        FOR_EACH_GAP {
            check_classifier(dtype, 1, 1, 1);
            check_classifier(dtype, 33, 256, 3);
            check_classifier(dtype, 7, 33, 30);
            check_classifier(dtype, 7, 100, 1e4); // exp underflows for nearly all
            check_classifier(dtype, 3, 20001, 2);
            check_classifier(dtype, 2, 60001, 2); // a row that no shared memory has room for
            // Up to three rows to each block of a grid of 132, aligned, and more than whole packs.
            if (gap == 3) check_classifier(dtype, 270, 8205, 2);
        }
    }
}

// Losses of a regression
// ----------------------------------------------------------------------------------------------

static void check_squared_error(Format dtype, Format target_dtype, int64_t rows, int64_t C) {
    const float scale = 1.0f / 37;
    Tensor out = normal_tensor(dtype, rows, C, 1), target = normal_tensor(target_dtype, rows, C, 1);
    Tensor expected = empty_tensor(dtype, rows, C);
    float *wanted = take_floats(rows), *losses[2];
    cpu_squared_error(wanted, expected, out, target, scale);
    for (int run = 0; run < 2; run++) { // the second without gradients
        Tensor dout = run == 0 ? tensor_to_device(empty_tensor(dtype, rows, C)) : (Tensor){0};
        float *on_gpu = floats_to_device(take_floats(rows), rows);
        cuda_squared_error(on_gpu, dout, tensor_to_device(out), tensor_to_device(target), scale);
        losses[run] = floats_to_host(on_gpu, rows);
        if (run > 0) continue;
        check_same_tensor(tensor_to_host(dout), expected); // a difference and a product leave no choice
        check_padding(tensor_to_host(dout));
    }
    check_same_floats(losses[0], losses[1], rows);
    Check check = {0};
    for (int64_t r = 0; r < rows; r++) {
        check_value(&check, losses[0][r], wanted[r], 2 * (sum_error(C) + 2 * U_FP32) * wanted[r]);
    }
    check_end(&check, "squared_error %s, target %s (%lld, %lld) gap %lld", DTYPE_NAMES[dtype],
              DTYPE_NAMES[target_dtype], (long long)rows, (long long)C, (long long)gap);
    release_all();
}

static void check_kl_divergence(Format dtype, Format target_dtype, int64_t rows, int64_t C, double spread) {
    const float scale = 1.0f / 37;
    Tensor logits = normal_tensor(dtype, rows, C, spread), targets = normal_tensor(target_dtype, rows, C, spread);
    Tensor expected = empty_tensor(dtype, rows, C), dlogits = {0};
    float *wanted = take_floats(rows), *losses[2];
    cpu_kl_divergence(wanted, expected, logits, targets, scale);
    for (int run = 0; run < 2; run++) { // the second without gradients
        Tensor on_gpu = run == 0 ? tensor_to_device(empty_tensor(dtype, rows, C)) : (Tensor){0};
        float *device_losses = floats_to_device(take_floats(rows), rows);
        cuda_kl_divergence(device_losses, on_gpu, tensor_to_device(logits), tensor_to_device(targets), scale);
        losses[run] = floats_to_host(device_losses, rows);
        if (run == 0) dlogits = tensor_to_host(on_gpu);
    }
    check_same_floats(losses[0], losses[1], rows);
    check_padding(dlogits);
    Check loss = {0}, gradient = {0};
    for (int64_t r = 0; r < rows; r++) {
        double bound = 0, error_q, error_p, *q = log_softmax(logits, r, &error_q),
               *p = log_softmax(targets, r, &error_p);
        for (int64_t c = 0; c < C; c++) { // exp by 2 ulp
            double of_p = expm1(error_p + 4 * U_FP32), of_q = expm1(error_q + 4 * U_FP32);
            bound += exp(p[c]) * (fabs(p[c] - q[c]) * (of_p + sum_error(C)) + (1 + of_p) * (error_p + error_q));
            double d = tensor_get(expected, r, c);
            double d_bound = scale * (exp(q[c]) * of_q + exp(p[c]) * of_p) + 2 * U_FP32 * fabs(d) + 0x1p-125;
            check_value(&gradient, tensor_get(dlogits, r, c), d, 2 * (d_bound + rounding(dtype, d)));
        }
        check_value(&loss, losses[0][r], wanted[r], 2 * bound);
    }
    check_end(&loss, "kl_divergence %s, targets %s (%lld, %lld) spread %g gap %lld", DTYPE_NAMES[dtype],
              DTYPE_NAMES[target_dtype], (long long)rows, (long long)C, spread, (long long)gap);
    check_end(&gradient, "  dlogits");
    release_all();
}

static void test_losses(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) FOR_EACH_DTYPE(target_dtype) FOR_EACH_GAP {
        check_squared_error(dtype, target_dtype, 9, 96);
        check_squared_error(dtype, target_dtype, 3, 2500);
        check_squared_error(dtype, target_dtype, 1, 1);
        check_kl_divergence(dtype, target_dtype, 9, 96, 1);
        check_kl_divergence(dtype, target_dtype, 3, 2500, 10);
        check_kl_divergence(dtype, target_dtype, 1, 1, 1);
    }
}

// Over parameters
// -----------------------------------------------------------------------------------------------------

static AdamWUpdate update_of(float *const fields[4], int64_t count, AdamWFactors factors) {
    return (AdamWUpdate){.master = fields[0],
                         .moment1 = fields[1],
                         .moment2 = fields[2],
                         .gradient = fields[3],
                         .rows = 1,
                         .cols = count,
                         .factors = factors};
}

static void check_adamw(int64_t count, size_t shift) {
    OptimizerOptions options = {1e-3, 0.9, 0.95, 1e-8, 0.1, .grad_clip = 0.7, .step = 3};
    AdamWFactors factors = optimizer_factors(options, 1);
    float *before[4], *expected[4], *result[2][4];
    size_t bytes = (size_t)count * sizeof(float);
    for (int i = 0; i < 4; i++) { // master, moments, gradient
        before[i] = normal_floats(count);
        expected[i] = copy_floats(before[i], count);
    }
    for (int64_t k = 0; k < count; k++) {
        before[2][k] = expected[2][k] = fabsf(before[2][k]); // of squares
    }
    cpu_adamw(update_of(expected, count, factors));
    for (int run = 0; run < 2; run++) {
        float *on_gpu[4];
        for (int i = 0; i < 4; i++) {
            on_gpu[i] = to_device_at(before[i], bytes, shift);
        }
        cuda_adamw(update_of(on_gpu, count, factors));
        for (int i = 0; i < 4; i++) {
            result[run][i] = floats_to_host(on_gpu[i], count);
            if (run == 1) check_same_floats(result[0][i], result[1][i], count);
        }
    }
    double correction1 = 1 - pow(options.beta1, 3), correction2 = 1 - pow(options.beta2, 3);
    Check check = {0};
    check_same_floats(result[0][3], before[3], count);
    for (int64_t k = 0; k < count; k++) {
        double g = before[3][k] * factors.gradient_scale, w = before[0][k], v = expected[2][k];
        double moment_error = 4 * U_FP32 * (fabs(options.beta1 * before[1][k]) + fabs((1 - options.beta1) * g));
        double denominator = sqrt(v / correction2) + options.eps;
        double factor = options.learning_rate / correction1 / denominator;
        double update_error = factor * (moment_error + 16 * U_FP32 * fabs(expected[1][k]));
        check_value(&check, result[0][1][k], expected[1][k], 2 * moment_error);
        check_value(&check, result[0][2][k], v, 2 * 6 * U_FP32 * v);
        check_value(&check, result[0][0][k], expected[0][k], 2 * (3 * U_FP32 * fabs(w) + update_error));
    }
    if (count > 0) check_end(&check, "adamw of %lld, %zu bytes off", (long long)count, shift);
    release_all();
}

static void test_adamw(void **state) {
    (void)state;
    static const int64_t COUNTS[] = {0, 1, 3, 4, 1023, 4097, 100003};
    for (size_t i = 0; i < LENGTH(COUNTS); i++) {
        check_adamw(COUNTS[i], 0);
        check_adamw(COUNTS[i], sizeof(float));
    }
}

static void check_sgd(int64_t count, size_t shift, bool has_moment) {
    SGDOptions options = {.learning_rate = 0.1f, .momentum = has_moment ? 0.9f : 0, .gradient_scale = 0.7f};
    float *before[3], *expected[3], *result[2][3];
    size_t bytes = (size_t)count * sizeof(float);
    for (int i = 0; i < 3; i++) { // master, moment, gradient
        before[i] = normal_floats(count);
        expected[i] = copy_floats(before[i], count);
    }
    cpu_sgd(expected[0], has_moment ? expected[1] : NULL, expected[2], count, options);
    for (int run = 0; run < 2; run++) {
        float *on_gpu[3];
        for (int i = 0; i < 3; i++) {
            on_gpu[i] = to_device_at(before[i], bytes, shift);
        }
        cuda_sgd(on_gpu[0], has_moment ? on_gpu[1] : NULL, on_gpu[2], count, options);
        for (int i = 0; i < 3; i++) {
            result[run][i] = floats_to_host(on_gpu[i], count);
            if (run == 1) check_same_floats(result[0][i], result[1][i], count);
        }
    }
    check_same_floats(result[0][2], before[2], count);
    if (!has_moment) check_same_floats(result[0][1], before[1], count);
    Check check = {0};
    for (int64_t k = 0; k < count; k++) {
        double kept = has_moment ? fabs(options.momentum * before[1][k]) : 0;
        double moment_error = 3 * U_FP32 * (kept + fabs(options.gradient_scale * before[2][k]));
        double moment = has_moment ? expected[1][k] : options.gradient_scale * before[2][k];
        double update_error = options.learning_rate * (moment_error + U_FP32 * fabs(moment));
        check_value(&check, result[0][1][k], expected[1][k], 2 * moment_error);
        check_value(&check, result[0][0][k], expected[0][k], 2 * (U_FP32 * fabs(expected[0][k]) + update_error));
    }
    if (count > 0)
        check_end(&check, "sgd of %lld, %zu bytes off, momentum %g", (long long)count, shift, options.momentum);
    release_all();
}

static void test_sgd(void **state) {
    (void)state;
    static const int64_t COUNTS[] = {0, 1, 3, 4, 1023, 4097, 100003};
    for (size_t i = 0; i < LENGTH(COUNTS); i++) {
        for (size_t shift = 0; shift <= sizeof(float); shift += sizeof(float)) {
            check_sgd(COUNTS[i], shift, false);
            check_sgd(COUNTS[i], shift, true);
        }
    }
}

static void check_sums(int64_t count, size_t shift) {
    float *values = normal_floats(count), *others = normal_floats(count);
    double magnitude = 0, distance = cpu_squared_distance(values, others, count);
    for (int64_t i = 0; i < count; i++) {
        magnitude += fabsf(values[i]);
    }
    double sum = cpu_sum(values, count), squares = cpu_sum_of_squares(values, count);
    const float *on_gpu = to_device_at(values, (size_t)count * sizeof(float), shift);
    const float *others_on_gpu = to_device(others, (size_t)count * sizeof(float));
    double result[] = {cuda_sum(on_gpu, count), cuda_sum_of_squares(on_gpu, count),
                       cuda_squared_distance(on_gpu, others_on_gpu, count)};
    assert_true(cuda_sum(on_gpu, count) == result[0] && cuda_sum_of_squares(on_gpu, count) == result[1]);
    assert_true(cuda_squared_distance(on_gpu, others_on_gpu, count) == result[2]);
    assert_true(cuda_squared_distance(on_gpu, on_gpu, count) == 0);
    Check check = {0};
    check_value(&check, result[0], sum, 2 * (double)count * 0x1p-53 * magnitude);
    check_value(&check, result[1], squares, 2 * (double)(count + 1) * 0x1p-53 * squares);
    check_value(&check, result[2], distance, 2 * (double)(count + 2) * 0x1p-53 * distance);
    check_end(&check, "sum, sum_of_squares, squared_distance of %lld, %zu bytes off", (long long)count, shift);
    release_all();
}

static void test_sums(void **state) {
    (void)state;
    static const int64_t COUNTS[] = {0, 1, 16383, 16384, 16385, 100003, 17000001}; // the last: chunks that had to grow
    for (size_t i = 0; i < LENGTH(COUNTS); i++) {
        check_sums(COUNTS[i], 0);
        if (COUNTS[i] < 1000000) check_sums(COUNTS[i], sizeof(float));
    }
}

// A digest is of the finite values and their places, and not of what lies between rows.
static void test_digest(void **state) {
    (void)state;
    enum { ROWS = 2050, COLS = 37, GAP = 3, ALL = ROWS * (COLS + GAP) };
    static float values[ALL];
    fill_floats(values, ALL, 1);
    Tensor t = tensor_make(NULL, FORMAT_FP32, ROWS, COLS);
    t.stride = COLS + GAP;
    uint64_t digests[6] = {0};
    for (int i = 0; i < 6; i++) {
        float *last = &values[(ROWS - 1) * (COLS + GAP) + COLS - 1];
        if (i == 1) values[COLS] = 7; // between rows
        if (i == 2) *last = nextafterf(*last, 9);
        if (i == 3) last[-1] = values[0], values[0] = last[-2], last[-2] = last[-1]; // moved
        if (i >= 4) memset(values, i == 4 ? 0 : 0xFF, sizeof(values));               // NaN
        t.data = floats_to_device(values, ALL);
        digests[i] = cuda_digest(t);
        assert_true(cuda_digest(t) == digests[i]);
        release_all();
    }
    assert_true(digests[0] == digests[1] && digests[1] != digests[2] && digests[2] != digests[3]);
    assert_true(digests[3] != 0 && digests[4] == 0 && digests[5] == 0);
}

// Scrambled, values have their signs, their exponents' upper bits and nearly all other lower ones;
// zeros, infinities and what lies between rows stay; a second time all is as it was.
static void test_scrambled(void **state) {
    (void)state;
    enum { ROWS = 1026, COLS = 300, GAP = 5, ALL = ROWS * (COLS + GAP) };
    static uint16_t before[ALL], after[ALL];
    for (int64_t i = 0; i < ALL; i++) {
        before[i] = i % 7 == 0 ? (uint16_t)(i % 2 << 15) : i % 11 == 0 ? 0x7F80 : (uint16_t)(0x3F80 + i % 3 * 0x80);
    }
    Tensor t = tensor_make(to_device(before, sizeof(before)), FORMAT_BF16, ROWS, COLS);
    t.stride = COLS + GAP;
    int64_t changed = 0, normal = 0;
    cuda_scramble(t);
    cuda_copy_to_host(after, t.data, sizeof(after));
    for (int64_t i = 0; i < ALL; i++) {
        int high_exponent = before[i] >> 9 & 0x3F;
        bool changes = high_exponent != 0 && high_exponent != 0x3F && i % (COLS + GAP) < COLS;
        assert_int_equal(before[i] >> 9, after[i] >> 9);
        if (!changes) assert_int_equal(before[i], after[i]);
        normal += changes;
        changed += before[i] != after[i];
    }
    print_message("%.4f of the values changed, 511/512 are %.4f\n", (double)changed / normal, 511.0 / 512);
    assert_true(fabs((double)changed / normal - 511.0 / 512) < 0.001);
    cuda_scramble(t);
    cuda_copy_to_host(after, t.data, sizeof(after));
    assert_memory_equal(before, after, sizeof(before));
    release_all();
}

static void test_scrambled_codes(void **state) {
    (void)state;
    enum { ROWS = 1026, COLS = 300, GAP = 5, ALL = ROWS * (COLS + GAP) };
    static uint8_t before[ALL], after[ALL];
    for (Format format = FORMAT_E4M3; format <= FORMAT_E5M2; format++) {
        for (int64_t i = 0; i < ALL; i++) {
            before[i] = (uint8_t)(i % 3 ? 0x38 : i);
        }
        uint8_t *codes = to_device(before, sizeof(before));
        int64_t changed = 0;
        cuda_scramble_codes(codes, ROWS, COLS, COLS + GAP, format);
        cuda_copy_to_host(after, codes, sizeof(after));
        for (int64_t i = 0; i < ALL; i++) {
            bool stays = i % (COLS + GAP) >= COLS || !isfinite(mx_decode(format, before[i]));
            if (stays) assert_int_equal(before[i], after[i]);
            assert_int_equal(isfinite(mx_decode(format, before[i])), isfinite(mx_decode(format, after[i])));
            assert_int_equal(before[i] & 0x80, after[i] & 0x80);
            changed += before[i] != after[i];
        }
        print_message("%s: %.4f of the codes changed\n", FORMAT_NAMES[format], (double)changed / (ROWS * COLS));
        assert_true(changed > 9 * ROWS * COLS / 10);
        cuda_scramble_codes(codes, ROWS, COLS, COLS + GAP, format);
        cuda_copy_to_host(after, codes, sizeof(after));
        assert_memory_equal(before, after, sizeof(before));
    }
    release_all();
}

static void test_accumulate(void **state) {
    (void)state;
    enum { MOST = 5003 };
    static const int64_t COUNTS[] = {0, 1, 4, 1023, 1024, MOST};
    for (size_t i = 0; i < LENGTH(COUNTS); i++) {
        for (size_t shift = 0; shift <= sizeof(float); shift += sizeof(float)) {
            int64_t count = COUNTS[i];
            float *sum = take_floats(count), *values = take_floats(count), *result = take_floats(count);
            fill_floats(sum, count, 1);
            fill_floats(values, count, 1);
            float *on_gpu = to_device_at(sum, (size_t)count * sizeof(float), shift);
            cuda_accumulate(on_gpu, to_device_at(values, (size_t)count * sizeof(float), 0), count);
            cpu_accumulate(sum, values, count);
            backend->copy_to_host(result, on_gpu, (size_t)count * sizeof(float));
            check_same_floats(result, sum, count);
            release_all();
        }
    }
}

static void check_combine(Format out_dtype, Format x_dtype, Format y_dtype, int64_t rows, int64_t cols) {
    Tensor x = normal_tensor(x_dtype, rows, cols, 1), y = normal_tensor(y_dtype, rows, cols, 1);
    Tensor expected = empty_tensor(out_dtype, rows, cols), device_out = tensor_to_device(expected);
    cpu_combine(expected, 3.4445f, x, -0.5f, y);
    cuda_combine(device_out, 3.4445f, tensor_to_device(x), -0.5f, tensor_to_device(y));
    Tensor result = tensor_to_host(device_out);
    check_padding(result);
    Check check = {0};
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t row = i / cols, col = i % cols;
        double magnitude = 3.4445 * fabs(tensor_get(x, row, col)) + 0.5 * fabs(tensor_get(y, row, col));
        double wanted = tensor_get(expected, row, col);
        // The CPU rounds products, a GPU one of them; a sum on either side of a tie differs once
        // more.
        check_value(&check, tensor_get(result, row, col), wanted,
                    3 * U_FP32 * magnitude + 2 * rounding(out_dtype, wanted));
    }
    check_end(&check, "combine %s = %s + %s (%lld, %lld)", DTYPE_NAMES[out_dtype], DTYPE_NAMES[x_dtype],
              DTYPE_NAMES[y_dtype], (long long)rows, (long long)cols);
    release_all();
}

static void test_combine(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        check_combine((Format)(i & 1), (Format)(i >> 1 & 1), (Format)(i >> 2), 33, 257);
    }
    Tensor nothing = tensor_make(NULL, FORMAT_FP32, 0, 5); // as a rank has without rows: no kernel, no error
    cuda_combine(nothing, 1, nothing, 1, nothing);
}

// The CPU's bits: only additions, a multiplication and a rounding, in one order.
static void check_hadamard(Format dtype, Axis axis, int64_t rows, int64_t cols, int64_t size, int64_t used_cols) {
    Tensor in = tensor_cols(normal_tensor(dtype, rows, cols, 1), 0, used_cols), expected = copy_tensor(in);
    Hadamard h = hadamard_fixed(size);
    h.minus[1] = 0x12345678u;
    h.minus[3] = 0x9ABCDEF0u;
    cpu_hadamard(expected, in, axis, h);
    Tensor device_out = tensor_to_device(copy_tensor(in));
    cuda_hadamard(device_out, tensor_to_device(in), axis, h);
    Tensor result = tensor_to_host(device_out);
    for (int64_t row = 0; row < rows; row++) {
        size_t at = (size_t)(row * in.stride) * dtype_size(dtype);
        assert_memory_equal((char *)result.data + at, (char *)expected.data + at,
                            (size_t)used_cols * dtype_size(dtype));
    }
    release_all();
}

// Shapes whose rows are taken by eights and whose aren't, and rests of every kind.
static void test_hadamard(void **state) {
    (void)state;
    static const int64_t SHAPES[][3] = {{64, 256, 256}, {3, 128, 128}, {133, 384, 384}, {100, 72, 72},
                                        {33, 65, 65},   {1, 16, 16},   {16, 1, 1},      {129, 512, 257}};
    for (size_t i = 0; i < LENGTH(SHAPES); i++) {
        for (int64_t size = 16; size <= 128; size *= 2) {
            for (int k = 0; k < 4; k++) {
                check_hadamard((Format)(k & 1), k & 2 ? AXIS_COLUMNWISE : AXIS_ROWWISE, SHAPES[i][0], SHAPES[i][1],
                               size, SHAPES[i][2]);
            }
        }
    }
}

// NaN
// -------------------------------------------------------------------------------------------------

// Row `bad` is NaN throughout, or somewhere; other rows have none.
static void check_nan_row(Tensor device, int64_t bad, bool everywhere) {
    Tensor t = tensor_to_host(device);
    for (int64_t r = 0; r < t.rows; r++) {
        int64_t nans = 0;
        for (int64_t c = 0; c < t.cols; c++) {
            nans += isnan(tensor_get(t, r, c)) != 0;
        }
        if (r != bad) assert_int_equal(nans, 0);
        if (r == bad) assert_true(everywhere ? nans == t.cols : nans > 0);
    }
}

static void test_nan(void **state) {
    (void)state;
    enum { ROWS = 9, C = 96, BAD = 4 };
    FOR_EACH_DTYPE(dtype) {
        FOR_EACH_GAP {
            LayernormCase l = make_layernorm_case(dtype, ROWS, C);
            tensor_set(l.input, BAD, 50, NAN);
            Tensor input = tensor_to_device(l.input), dout = tensor_to_device(l.dout);
            Tensor dinput = tensor_to_device(l.dinput), out = tensor_to_device(empty_tensor(dtype, ROWS, C));
            NormParams norm = norm_on_device(&l);
            float *dweight = floats_to_device(l.dweight, C), *dbias = floats_to_device(l.dbias, C);
            cuda_layernorm_forward(out, (Tensor){0}, input, (Tensor){0}, norm);
            check_nan_row(out, BAD, true);
            for (Activation activation = ACTIVATION_GELU; activation < ACTIVATION_SWIGLU; activation++) {
                cuda_activation_forward(out, input, activation);
                check_nan_row(out, BAD, false);
                if (activation == ACTIVATION_RELU) continue; // whose slope is 1 there, as PyTorch's
                cuda_activation_backward(out, NULL, dout, input, activation);
                check_nan_row(out, BAD, false);
            }
            cuda_layernorm_forward((Tensor){0}, out, dout, input, norm); // a NaN in the residual
            check_nan_row(out, BAD, false);
            assert_true(isnan(floats_to_host(norm.mean, ROWS)[BAD]) && isnan(floats_to_host(norm.rstd, ROWS)[BAD]));
            cuda_layernorm_forward(out, (Tensor){0}, input, (Tensor){0}, norm);
            give_workspace(ROWS, C);
            cuda_layernorm_backward(dinput, dweight, dbias, dout, input, norm);
            check_nan_row(dinput, BAD, true);
            dweight = floats_to_host(dweight, C);
            assert_true(isnan(dweight[50]) && isnan(dweight[0])); // through the row's mean

            int32_t targets[ROWS] = {0};
            Tensor logits = normal_tensor(FORMAT_FP32, ROWS, C, 1);
            tensor_set(logits, BAD, 7, NAN);
            float *losses = floats_to_device(l.mean, ROWS);
            cuda_classifier(losses, out, tensor_to_device(logits), to_device(targets, sizeof(targets)), 1);
            check_nan_row(out, BAD, true);
            losses = floats_to_host(losses, ROWS);
            for (int r = 0; r < ROWS; r++) {
                assert_true(isnan(losses[r]) == (r == BAD));
            }
            float bad[] = {1, NAN, 2};
            assert_true(isnan(cuda_sum(floats_to_device(bad, 3), 3)));
            assert_true(isnan(cuda_sum_of_squares(floats_to_device(bad, 3), 3)));
            release_all();
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_elementwise),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_layernorm),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_embedding_sort),
        cmocka_unit_test(test_classifier),
        cmocka_unit_test(test_losses),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_sgd),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_digest),
        cmocka_unit_test(test_scrambled),
        cmocka_unit_test(test_scrambled_codes),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_accumulate),
        cmocka_unit_test(test_combine),
        cmocka_unit_test(test_hadamard),
    };
    Error error;
    backend = backend_cuda(MX_GEMM_AUTO, &error);
    if (!backend) {
        printf("%s\n", error.message);
        return 1;
    }
    char text[512];
    backend->describe(text, sizeof(text));
    printf("%s\n", text);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
