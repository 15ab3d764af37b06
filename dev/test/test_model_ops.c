/*
The CPU backend's operations beyond GPT-2's: activations, rotary positions, losses of a regression,
SGD, sums of differences. In FP32 and in BF16 against double precision, with bounds derived as in
test_ops; the same bits with one thread and with two.
*/
#include <omp.h>
#include "check.h"

static const Backend *backend;
static const char *const DTYPE_NAMES[] = {"fp32", "bf16"};
static const Tensor NO_TENSOR = {0};

#define FOR_EACH_DTYPE(dtype) for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++)

// Activations
// ---------------------------------------------------------------------------------------------------------

static const float SPECIAL[] = {0, -0.0f, 10, -10, 1e-6f, -1e-6f, 30, -30, 90, -90, 1e4f, -1e4f};
enum { NUM_SPECIAL = sizeof(SPECIAL) / sizeof(SPECIAL[0]) };

static void set_special(Tensor x) {
    for (int64_t c = 0; c < x.cols && c < NUM_SPECIAL; c++) {
        tensor_set(x, 0, c, SPECIAL[c]);
    }
}

static void check_relu(Format dtype, Activation activation, int64_t rows, int64_t cols) {
    Tensor input = random_tensor(dtype, rows, cols, 2), dout = random_tensor(dtype, rows, cols, 1);
    set_special(input);
    Tensor out = take_tensor(dtype, rows, cols), dinput = copy_tensor(dout);
    backend->activation_forward(out, input, activation);
    backend->activation_backward(dinput, NULL, dinput, input, activation);
    check_padding(out);
    Check forward = {0}, backward = {0};
    bool squared = activation == ACTIVATION_RELU2;
    for (int64_t i = 0; i < rows * cols; i++) {
        double x = tensor_get(input, i / cols, i % cols), d = tensor_get(dout, i / cols, i % cols);
        double y = x <= 0 ? 0 : squared ? x * x : x, slope = x <= 0 ? 0 : squared ? 2 * x : 1;
        double y_bound = squared ? U_FP32 * y + rounding(dtype, y) : 0;
        double d_bound = squared ? U_FP32 * fabs(d * slope) + rounding(dtype, d * slope) : 0;
        check_value(&forward, tensor_get(out, i / cols, i % cols), y, y_bound);
        check_value(&backward, tensor_get(dinput, i / cols, i % cols), d * slope, d_bound);
    }
    check_end(&forward, "%s forward %s (%lld, %lld)", squared ? "relu2" : "relu", DTYPE_NAMES[dtype], (long long)rows,
              (long long)cols);
    check_end(&backward, "  backward, over dout");
}

// The logistic function g of x as computed, and what it is off by: exp by 2.4 U_FP32, of which g
// takes the part 1 - g, the sum and the quotient by one each. Below exp's range g stays at 2^-127.
typedef struct {
    double g, error;
} Gate;

static Gate gate_at(double x) {
    double g = 1 / (1 + exp(-x));
    return (Gate){g, g * U_FP32 * (2.4 * (1 - g) + 2) + 0x1p-126};
}

static void check_swiglu(Format dtype, int64_t rows, int64_t F) {
    Tensor input = random_tensor(dtype, rows, 2 * F, 2), dout = random_tensor(dtype, rows, F, 1);
    set_special(input);
    Tensor out[2], dinput[2];
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i + 1);
        out[i] = take_tensor(dtype, rows, F);
        dinput[i] = take_tensor(dtype, rows, 2 * F);
        backend->activation_forward(out[i], input, ACTIVATION_SWIGLU);
        backend->activation_backward(dinput[i], NULL, dout, input, ACTIVATION_SWIGLU);
    }
    check_same_tensor(out[0], out[1]);
    check_same_tensor(dinput[0], dinput[1]);
    check_padding(out[1]);
    check_padding(dinput[1]);
    Check forward = {0}, backward = {0};
    for (int64_t i = 0; i < rows * F; i++) {
        int64_t r = i / F, c = i % F;
        double x = tensor_get(input, r, c), up = tensor_get(input, r, F + c), d = tensor_get(dout, r, c);
        Gate gate = gate_at(x);
        double silu = x * gate.g, slope = gate.g + silu * (1 - gate.g), silu_error = fabs(x) * gate.error;
        check_value(&forward, tensor_get(out[1], r, c), silu * up,
                    fabs(up) * (silu_error + 2 * U_FP32 * fabs(silu)) + rounding(dtype, silu * up));
        // The slope: g, and silu times 1 - g, whose error is g's.
        double slope_error = gate.error + (silu_error + fabs(silu) * U_FP32) * (1 - gate.g) +
                             fabs(silu) * (gate.error + U_FP32) + 2 * U_FP32 * fabs(slope);
        double dx = d * up * slope, dup = d * silu;
        check_value(&backward, tensor_get(dinput[1], r, c), dx,
                    fabs(d * up) * slope_error + 2 * U_FP32 * fabs(dx) + rounding(dtype, dx));
        check_value(&backward, tensor_get(dinput[1], r, F + c), dup,
                    fabs(d) * silu_error + 2 * U_FP32 * fabs(dup) + rounding(dtype, dup));
    }
    check_end(&forward, "swiglu forward %s (%lld, %lld)", DTYPE_NAMES[dtype], (long long)rows, (long long)F);
    check_end(&backward, "  backward");
}

static double swiglu_of_gate(void *context, double x) { return x / (1 + exp(-x)) * *(double *)context; }

// The formula of the slope that check_swiglu compares with.
static void check_swiglu_slope(void) {
    Check check = {0};
    double up = 0.7;
    for (double x = -8; x < 8; x += 0.37) {
        double g = 1 / (1 + exp(-x));
        check_value(&check, up * (g + x * g * (1 - g)), derivative(swiglu_of_gate, &up, x, 1e-3), 1e-11);
    }
    check_end(&check, "swiglu's slope by finite differences");
}

static void test_activations(void **state) {
    (void)state;
    static const int64_t SHAPES[][2] = {{1, 1}, {33, 96}, {7, 1500}};
    check_swiglu_slope();
    FOR_EACH_DTYPE(dtype) {
        for (size_t i = 0; i < sizeof(SHAPES) / sizeof(SHAPES[0]); i++) {
            check_relu(dtype, ACTIVATION_RELU, SHAPES[i][0], SHAPES[i][1]);
            check_relu(dtype, ACTIVATION_RELU2, SHAPES[i][0], SHAPES[i][1]);
            check_swiglu(dtype, SHAPES[i][0], SHAPES[i][1]);
            pool_release();
        }
    }
}

// Rotary positions
// ----------------------------------------------------------------------------------------------------

// `x` has columns left and right of it that stay as they are, as queries have beside keys and
// values. `length`: of documents; 0: sequences are one.
static void check_rope(Format dtype, int64_t B, int64_t T, int64_t heads, int64_t HS, double theta, int32_t length) {
    int64_t cols = heads * HS, beside = 5;
    Sequences sequences = {.T = T, .positions = length ? take_documents(B, T, length) : NULL};
    Tensor all = random_tensor(dtype, B * T, cols + 2 * beside, 1), before = copy_tensor(all), x = all;
    x.data = (char *)x.data + (size_t)beside * dtype_size(dtype);
    x.cols = cols;
    Tensor again = x;
    again.data = (char *)copy_tensor(all).data + (size_t)beside * dtype_size(dtype);
    float *rotations = take_floats((T + 3) * HS);
    backend->rope_rotations(rotations, T + 3, HS, theta);
    omp_set_num_threads(1);
    backend->rope(again, rotations, sequences, HS, false);
    omp_set_num_threads(2);
    backend->rope(x, rotations, sequences, HS, false);
    Check forward = {0}, back = {0};
    for (int64_t i = 0; i < B * T * all.cols; i++) {
        int64_t row = i / all.cols, col = i % all.cols - beside, d = col % HS;
        double value = tensor_get(all, row, col + beside), old = tensor_get(before, row, col + beside);
        if (col < 0 || col >= cols) {
            assert_true(value == old);
            continue;
        }
        assert_true(value == tensor_get(again, row, col));
        bool second = d >= HS / 2;
        double position = length ? sequences.positions[row] : (double)(row % T);
        double angle = position * pow(theta, -2.0 * (double)(d % (HS / 2)) / (double)HS);
        double other = tensor_get(before, row, col + beside + (second ? -HS / 2 : HS / 2));
        double expected = old * cos(angle) + (second ? other : -other) * sin(angle);
        double bound = 2 * U_FP32 * (fabs(old * cos(angle)) + fabs(other * sin(angle)));
        check_value(&forward, value, expected, bound + rounding(dtype, expected));
    }
    backend->rope(x, rotations, sequences, HS, true);
    for (int64_t i = 0; i < B * T * cols; i++) {
        int64_t row = i / cols, col = i % cols, d = col % HS;
        double a = tensor_get(before, row, beside + col);
        double b = tensor_get(before, row, beside + col + (d >= HS / 2 ? -HS / 2 : HS / 2));
        // Each rotation rounds both elements of a pair: their length times the roundoff, at most,
        // in either.
        check_value(&back, tensor_get(x, row, col), a, 2 * (u_of(dtype) + 4 * U_FP32) * hypot(a, b) + 0x1p-126);
    }
    check_end(&forward, "rope %s B %lld T %lld heads %lld HS %lld%s", DTYPE_NAMES[dtype], (long long)B, (long long)T,
              (long long)heads, (long long)HS, length ? " in documents" : "");
    check_end(&back, "  and back");
}

static void test_rope(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        check_rope(dtype, 2, 33, 3, 8, 10000, 0);
        check_rope(dtype, 2, 33, 3, 8, 10000, 10);
        check_rope(dtype, 1, 5, 1, 2, 10000, 0);
        check_rope(dtype, 1, 3000, 2, 64, 500000, 0);
        pool_release();
    }
}

// Losses
// --------------------------------------------------------------------------------------------------------------

static void check_squared_error(Format dtype, Format target_dtype, int64_t rows, int64_t C) {
    const float scale = 1.0f / 37;
    Tensor out = random_tensor(dtype, rows, C, 1), target = random_tensor(target_dtype, rows, C, 1);
    Tensor dout = take_tensor(dtype, rows, C);
    float *losses = take_floats(rows), *again = take_floats(rows);
    omp_set_num_threads(1);
    backend->squared_error(again, NO_TENSOR, out, target, scale);
    omp_set_num_threads(2);
    backend->squared_error(losses, dout, out, target, scale);
    check_same_floats(losses, again, rows);
    check_padding(dout);
    Check loss = {0}, gradient = {0};
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t c = 0; c < C; c++) {
            double difference = tensor_get(out, r, c) - tensor_get(target, r, c), d = 2 * (double)scale * difference;
            sum += difference * difference;
            check_value(&gradient, tensor_get(dout, r, c), d, 2 * U_FP32 * fabs(d) + rounding(dtype, d));
        }
        check_value(&loss, losses[r], sum, (sum_error(C) + 2 * U_FP32) * sum);
    }
    check_end(&loss, "squared_error %s, target %s (%lld, %lld)", DTYPE_NAMES[dtype], DTYPE_NAMES[target_dtype],
              (long long)rows, (long long)C);
    check_end(&gradient, "  dout");
}

static void check_kl_divergence(Format dtype, Format target_dtype, int64_t rows, int64_t C, double spread) {
    const float scale = 1.0f / 37;
    Tensor logits = random_tensor(dtype, rows, C, spread), targets = random_tensor(target_dtype, rows, C, spread);
    Tensor dlogits = take_tensor(dtype, rows, C);
    float *losses = take_floats(rows), *again = take_floats(rows);
    omp_set_num_threads(1);
    backend->kl_divergence(again, NO_TENSOR, logits, targets, scale);
    omp_set_num_threads(2);
    backend->kl_divergence(losses, dlogits, logits, targets, scale);
    check_same_floats(losses, again, rows);
    check_padding(dlogits);
    Check loss = {0}, gradient = {0};
    for (int64_t r = 0; r < rows; r++) {
        double error_q, error_p, *q = log_softmax(logits, r, &error_q), *p = log_softmax(targets, r, &error_p);
        double sum = 0, bound = 0;
        for (int64_t c = 0; c < C; c++) {
            double of_p = expm1(error_p + 2.4 * U_FP32), of_q = expm1(error_q + 2.4 * U_FP32), term = p[c] - q[c];
            sum += exp(p[c]) * term;
            bound += exp(p[c]) * (fabs(term) * (of_p + sum_error(C)) + (1 + of_p) * (error_p + error_q));
            double d = (double)scale * (exp(q[c]) - exp(p[c]));
            double d_bound = scale * (exp(q[c]) * of_q + exp(p[c]) * of_p) + 2 * U_FP32 * fabs(d) + 0x1p-125;
            check_value(&gradient, tensor_get(dlogits, r, c), d, d_bound + rounding(dtype, d));
        }
        check_value(&loss, losses[r], sum, bound);
    }
    check_end(&loss, "kl_divergence %s, targets %s (%lld, %lld) spread %g", DTYPE_NAMES[dtype],
              DTYPE_NAMES[target_dtype], (long long)rows, (long long)C, spread);
    check_end(&gradient, "  dlogits");
}

static void test_losses(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) FOR_EACH_DTYPE(target_dtype) {
        check_squared_error(dtype, target_dtype, 33, 96);
        check_squared_error(dtype, target_dtype, 1, 1);
        check_kl_divergence(dtype, target_dtype, 33, 96, 1);
        check_kl_divergence(dtype, target_dtype, 7, 257, 10);
        check_kl_divergence(dtype, target_dtype, 1, 1, 1);
        pool_release();
    }
}

// Sums of multiples
// ----------------------------------------------------------------------------------------------------

static void check_combine(Format out_dtype, Format x_dtype, Format y_dtype, bool alone, int64_t rows, int64_t cols) {
    const float a = -4.775f, b = 2.0315f;
    Tensor x = random_tensor(x_dtype, rows, cols, 1), y = random_tensor(y_dtype, rows, cols, 1);
    Tensor out = take_tensor(out_dtype, rows, cols), in_place = copy_tensor(x);
    backend->combine(out, a, x, b, alone ? NO_TENSOR : y);
    check_padding(out);
    Check check = {0};
    for (int64_t i = 0; i < rows * cols; i++) {
        double first = a * tensor_get(x, i / cols, i % cols);
        double second = alone ? 0 : b * tensor_get(y, i / cols, i % cols), sum = first + second;
        double bound = 2 * U_FP32 * (fabs(first) + fabs(second)) + rounding(out_dtype, sum);
        check_value(&check, tensor_get(out, i / cols, i % cols), sum, bound);
    }
    if (x_dtype == out_dtype) {
        backend->combine(in_place, a, in_place, b, alone ? NO_TENSOR : y);
        check_same_tensor(in_place, out);
    }
    check_end(&check, "combine %s = %s + %s (%lld, %lld)", DTYPE_NAMES[out_dtype], DTYPE_NAMES[x_dtype],
              alone ? "nothing" : DTYPE_NAMES[y_dtype], (long long)rows, (long long)cols);
    pool_release();
}

static void test_combine(void **state) {
    (void)state;
    FOR_EACH_DTYPE(out) FOR_EACH_DTYPE(x) FOR_EACH_DTYPE(y) {
        check_combine(out, x, y, false, 33, 2049);
        check_combine(out, x, y, true, 7, 5);
    }
}

// Embedding without positions
// -----------------------------------------------------------------------------------------

static void test_embedding_alone(void **state) {
    (void)state;
    enum { ROWS = 40, T = 8, V = 11, C = 33 };
    FOR_EACH_DTYPE(dtype) {
        Tensor wte = random_tensor(dtype, V, C, 1), dout = random_tensor(dtype, ROWS, C, 1);
        Tensor out = take_tensor(dtype, ROWS, C);
        int32_t *tokens = pool_take(ROWS * sizeof(int32_t));
        fill_below(tokens, ROWS, V);
        float *dwte = take_floats(V * C);
        memset(dwte, 0, V * C * sizeof(float));
        backend->embedding_forward(out, tokens, wte, NO_TENSOR, (Sequences){.T = T});
        backend->embedding_backward(dwte, NULL, tokens, dout, (Sequences){.T = T});
        Check gradient = {0};
        double sum[V * C] = {0}, magnitude[V * C] = {0};
        for (int64_t i = 0; i < ROWS * C; i++) {
            double d = tensor_get(dout, i / C, i % C);
            int64_t at = tokens[i / C] * C + i % C;
            assert_true(tensor_get(out, i / C, i % C) == tensor_get(wte, tokens[i / C], i % C));
            sum[at] += d;
            magnitude[at] += fabs(d);
        }
        for (int64_t i = 0; i < V * C; i++) {
            check_value(&gradient, dwte[i], sum[i], ROWS * U_FP32 * magnitude[i]);
        }
        check_end(&gradient, "embedding without positions, %s", DTYPE_NAMES[dtype]);
        pool_release();
    }
}

// SGD and distances
// ---------------------------------------------------------------------------------------------------

static void test_sgd(void **state) {
    (void)state;
    enum { COUNT = 5001, STEPS = 3 };
    static const float MOMENTA[] = {0, 0.9f};
    for (int with = 0; with < 2; with++) {
        SGDOptions options = {.learning_rate = 0.1f, .momentum = MOMENTA[with], .gradient_scale = 0.5f};
        float *master = take_floats(COUNT), *moment = take_floats(COUNT), *gradient = take_floats(COUNT);
        double *exact = take_doubles(COUNT), *velocity = take_doubles(COUNT), *bound = take_doubles(COUNT);
        fill_floats(master, COUNT, 1);
        memset(moment, 0, COUNT * sizeof(float));
        for (int i = 0; i < COUNT; i++) {
            exact[i] = master[i], velocity[i] = 0, bound[i] = 0;
        }
        for (int step = 0; step < STEPS; step++) {
            fill_floats(gradient, COUNT, 1);
            backend->sgd(master, with ? moment : NULL, gradient, COUNT, options);
            for (int i = 0; i < COUNT; i++) {
                velocity[i] = (double)options.momentum * velocity[i] + (double)options.gradient_scale * gradient[i];
                exact[i] -= (double)options.learning_rate * velocity[i];
                // The moment by three roundings a step, the product by one, the master by one.
                bound[i] += U_FP32 * (fabs(exact[i]) + 0.1 * 4 * STEPS * (fabs(velocity[i]) + fabs(gradient[i])));
            }
        }
        Check check = {0};
        for (int i = 0; i < COUNT; i++) {
            check_value(&check, master[i], exact[i], bound[i]);
        }
        check_end(&check, "sgd, momentum %g", (double)MOMENTA[with]);
        pool_release();
    }
}

static void test_squared_distance(void **state) {
    (void)state;
    static const int64_t COUNTS[] = {0, 1, 16385, 100003};
    for (size_t n = 0; n < sizeof(COUNTS) / sizeof(COUNTS[0]); n++) {
        int64_t count = COUNTS[n];
        float *a = take_floats(count), *b = take_floats(count);
        fill_floats(a, count, 1);
        fill_floats(b, count, 1);
        double sum = 0;
        for (int64_t i = 0; i < count; i++) {
            sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        }
        omp_set_num_threads(1);
        double once = backend->squared_distance(a, b, count);
        omp_set_num_threads(2);
        assert_true(once == backend->squared_distance(a, b, count));
        Check check = {0};
        check_value(&check, once, sum, (double)(count + 2) * 0x1p-52 * sum);
        check_end(&check, "squared_distance of %lld", (long long)count);
        assert_true(backend->squared_distance(a, a, count) == 0);
        pool_release();
    }
}

int main(void) {
    backend = backend_cpu();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_activations),      cmocka_unit_test(test_rope),
        cmocka_unit_test(test_losses),           cmocka_unit_test(test_combine),
        cmocka_unit_test(test_embedding_alone),  cmocka_unit_test(test_sgd),
        cmocka_unit_test(test_squared_distance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
