/*
The authors' arithmetic of the proxy (dev/proxy/authors) on a GPU against the CPU's: each operation,
and a student that trains by all of them. The CPU's is compared with numpy in test_proxy_program.py.
Without a GPU the kernels run on the CPU (dev/hostcuda).
*/
#include "device.h"
#include "by_name.h"
#include "../proxy/authors.h"
#include "../proxy/model.h"
#include "llmc/cpu/cpu.h"
#include "llmc/model/optimizer.h"

static const Backend *cuda;

enum { SHAPES = 3 };
static const int64_t ROWS[SHAPES] = {37, 64, 5}, COLS[SHAPES] = {51, 256, 1};

#define FOR_EACH_DTYPE(dtype) for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++)

// Rows follow one another without gaps.
static Tensor new_tensor(Format dtype, int64_t rows, int64_t cols) {
    return tensor_make(pool_take((size_t)(rows * cols) * dtype_size(dtype)), dtype, rows, cols);
}

static Tensor normal_tensor(Format dtype, int64_t rows, int64_t cols, double stddev) {
    return fill_tensor(new_tensor(dtype, rows, cols), stddev);
}

// Returns an element's bits; those of one NaN for all.
static uint32_t bits_of(Tensor t, int64_t i) {
    double value = tensor_get(t, i / t.cols, i % t.cols);
    return isnan(value) ? 0x7FC00000u : mx_float_bits((float)value);
}

// Fails unless the device's tensor has the CPU's bits.
static void check_bits(const char *what, Tensor device, Tensor expected) {
    Tensor found = tensor_to_host(device);
    for (int64_t i = 0; i < expected.rows * expected.cols; i++) {
        if (bits_of(found, i) != bits_of(expected, i)) {
            fail_msg("%s of (%ld, %ld): element %ld is 0x%08X, on the CPU 0x%08X", what, (long)found.rows,
                     (long)found.cols, (long)i, bits_of(found, i), bits_of(expected, i));
        }
    }
}

typedef struct {
    Tensor x, dout, stream, out, weight, bias, sums, products;
} NormTensors;

static NormTensors norm_to_device(NormTensors t) {
    return (NormTensors){tensor_to_device(t.x),    tensor_to_device(t.dout),    tensor_to_device(t.stream),
                         tensor_to_device(t.out),  tensor_to_device(t.weight),  tensor_to_device(t.bias),
                         tensor_to_device(t.sums), tensor_to_device(t.products)};
}

static void run_norm(const AuthorsOps *ops, NormTensors t, bool affine) {
    NormParams norm = {.kind = NORM_LAYERNORM, .eps = 1e-5f};
    if (affine) norm.weight = t.weight.data;
    if (affine) norm.bias = t.bias.data;
    ops->norm_forward(t.out, t.products.data, t.x, norm);
    ops->norm_backward(t.stream, t.products.data, t.dout, t.x, norm);
    ops->add_columns(t.sums.data, t.products);
}

// Rows' means are sums of BF16 values in FP64, which are exact here in any order.
static void check_norm(Format dtype, int64_t rows, int64_t cols, bool affine) {
    NormTensors host = {.x = normal_tensor(dtype, rows, cols, 3),
                        .dout = normal_tensor(dtype, rows, cols, 1),
                        .stream = normal_tensor(dtype, rows, cols, 1),
                        .out = new_tensor(dtype, rows, cols),
                        .weight = normal_tensor(FORMAT_FP32, 1, cols, 1),
                        .bias = normal_tensor(FORMAT_FP32, 1, cols, 1),
                        .sums = normal_tensor(FORMAT_FP32, 1, cols, 1),
                        .products = new_tensor(FORMAT_FP32, rows, cols)};
    NormTensors device = norm_to_device(host);
    run_norm(&authors_on_cpu, host, affine);
    run_norm(&authors_on_cuda, device, affine);
    check_bits("layernorm", device.out, host.out);
    check_bits("layernorm's gradient", device.stream, host.stream);
    check_bits("products of the normalized rows", device.products, host.products);
    check_bits("sums of columns", device.sums, host.sums);
    release_all();
}

static void test_norm(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        for (int i = 0; i < SHAPES; i++) {
            check_norm(dtype, ROWS[i], COLS[i], true);
            check_norm(dtype, ROWS[i], COLS[i], false);
        }
    }
}

// Values of which some are ties of BF16, and some aren't finite.
static Tensor values_to_round(int64_t rows, int64_t cols) {
    Tensor in = normal_tensor(FORMAT_FP32, rows, cols, 1);
    float *values = in.data;
    for (int64_t i = 0; i < rows * cols; i += 3) {
        values[i] = mx_bits_float((mx_float_bits(values[i]) & 0xFFFF0000u) | 0x8000u);
    }
    const float special[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 3.4e38f, 1e-45f};
    for (int64_t i = 0; i < (int64_t)(sizeof(special) / sizeof(special[0])) && 5 * i < rows * cols; i++) {
        values[5 * i] = special[i];
    }
    return in;
}

static void check_rounded(Tensor in, Format dtype, bool odd) {
    Tensor out = new_tensor(dtype, in.rows, in.cols), out_there = tensor_to_device(out);
    authors_on_cpu.round(out, in, odd);
    authors_on_cuda.round(out_there, tensor_to_device(in), odd);
    check_bits(odd ? "values rounded and made odd" : "values rounded", out_there, out);
}

static void test_rounding(void **state) {
    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        Tensor in = values_to_round(ROWS[i], COLS[i]);
        FOR_EACH_DTYPE(dtype) check_rounded(in, dtype, false);
        check_rounded(in, FORMAT_FP32, true);
        release_all();
    }
}

// An error beside its bound.
typedef struct {
    double off, bound;
} Margin;

static void take_error(Margin *worst, const char *what, int64_t i, double off, double bound) {
    if (!(off <= bound)) fail_msg("%s of element %ld is off by %g, over %g", what, (long)i, off, bound);
    if (bound > 0 && off * worst->bound >= worst->off * bound) *worst = (Margin){off, bound};
}

// A card's expf may differ from the CPU's in FP32's last bits, and its rounding to BF16 then in one
// of 2^15 elements or so: one in 500 is allowed. There the exponential is off by a step of BF16, at
// most 2^-7 of itself, and the gate by no more than 2^-7. The slope is the gate and x times the
// inner slope times gate (1 - gate), both of whose factors are off by as much.
static void check_activation(Format dtype, int64_t rows, int64_t cols, Activation activation) {
    Tensor x = normal_tensor(dtype, rows, cols, 2), dout = normal_tensor(dtype, rows, cols, 1);
    Tensor out = new_tensor(dtype, rows, cols), dx = new_tensor(dtype, rows, cols);
    Tensor x_there = tensor_to_device(x), dout_there = tensor_to_device(dout);
    Tensor out_there = tensor_to_device(out), dx_there = tensor_to_device(dx);
    authors_on_cpu.activation_forward(out, x, activation);
    authors_on_cuda.activation_forward(out_there, x_there, activation);
    authors_on_cpu.activation_backward(dx, dout, x, activation);
    authors_on_cuda.activation_backward(dx_there, dout_there, x_there, activation);
    Tensor found = tensor_to_host(out_there), dfound = tensor_to_host(dx_there);
    int64_t count = rows * cols, others = 0, most = activation == ACTIVATION_RELU ? 0 : count / 500;
    Margin forward = {0, 1}, backward = {0, 1};
    for (int64_t i = 0; i < count; i++) {
        int64_t row = i / cols, col = i % cols;
        double value = fabs(tensor_get(x, row, col)), slope = 1.59375 + 0.21386719 * value * value;
        double off = fabs(tensor_get(found, row, col) - tensor_get(out, row, col));
        double doff = fabs(tensor_get(dfound, row, col) - tensor_get(dx, row, col));
        take_error(&forward, "the activation", i, off, 0x1p-7 * value);
        take_error(&backward, "the gradient", i, doff,
                   0x1p-7 * (1 + 2 * value * slope) * fabs(tensor_get(dout, row, col)));
        others += off != 0 || doff != 0;
    }
    if (others > most) fail_msg("%ld elements of %ld differ, over %ld", (long)others, (long)count, (long)most);
    print_message("%s, %ld values: %ld differ of %ld that may; at worst by %.2g of %.2g, gradients %.2g of %.2g\n",
                  activation == ACTIVATION_RELU ? "relu" : "gelu", (long)count, (long)others, (long)most, forward.off,
                  forward.bound, backward.off, backward.bound);
    release_all();
}

static void test_activations(void **state) {
    (void)state;
    FOR_EACH_DTYPE(dtype) {
        for (int i = 0; i < SHAPES; i++) {
            check_activation(dtype, ROWS[i], COLS[i], ACTIVATION_GELU);
            check_activation(dtype, ROWS[i], COLS[i], ACTIVATION_RELU);
        }
    }
}

// A student

enum { STEPS = 3, BATCH = 96, WIDTH = 64 };

typedef struct {
    double losses[STEPS], norms[STEPS];
} Training;

static Training train(const Backend *device, const AuthorsOps *ops, const AuthorsArithmetic *arithmetic) {
    const ProxyConfig config = {.layers = 2, .width = WIDTH, .layernorm = true};
    Recipe recipe = recipe_of("mxfp8-ocp");
    recipe.activation_dtype = FORMAT_FP32;
    ProxyModel model;
    proxy_create(&model, &config, &recipe, arithmetic ? authors_backend(device, ops, *arithmetic) : device, BATCH,
                 true);
    proxy_init(&model, INIT_KAIMING_UNIFORM, 1337);
    proxy_refresh(&model);
    size_t bytes = (size_t)(BATCH * WIDTH) * sizeof(float);
    float *samples = device->allocate(2 * bytes), *values = take_floats(2 * BATCH * WIDTH);
    for (int64_t i = 0; i < 2 * BATCH * WIDTH; i++) {
        values[i] = (float)random_normal(1, 1, (uint64_t)i);
    }
    device->copy_to_device(samples, values, 2 * bytes);
    Tensor x = tensor_make(samples, FORMAT_FP32, BATCH, WIDTH), target = x;
    target.data = samples + BATCH * WIDTH;
    Training training;
    for (int step = 0; step < STEPS; step++) {
        training.losses[step] = proxy_loss_and_gradients(&model, LOSS_MSE, x, target);
        training.norms[step] = optimizer_gradient_norm(&model.params, device);
        OptimizerOptions options = {.learning_rate = 2e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = step + 1};
        optimizer_step(&model.params, model.backend, options, 0);
    }
    proxy_free(&model);
    device->release(samples);
    release_all();
    return training;
}

static double worst_difference(const Training *a, const Training *b) {
    double worst = 0;
    for (int step = 0; step < STEPS; step++) {
        worst = fmax(worst, fabs(a->losses[step] / b->losses[step] - 1));
        worst = fmax(worst, fabs(a->norms[step] / b->norms[step] - 1));
    }
    return worst;
}

// Devices add in other orders: a sum that comes out beside a tie of BF16 rounds the other way, by
// 2^-8 of itself. That befalls one in some thousands, and a loss and a norm add the squares of
// thousands: a fiftieth of 2^-8 has room for one in 50. What a part changes has to be more.
static void check_training(const char *name, AuthorsArithmetic arithmetic) {
    const double bound = 0x1p-8 / 50;
    Training expected = train(backend_cpu(), &authors_on_cpu, &arithmetic);
    Training found = train(cuda, &authors_on_cuda, &arithmetic), ours = train(cuda, NULL, NULL);
    double off = worst_difference(&found, &expected), apart = worst_difference(&found, &ours);
    print_message("%s: off by %.2g of %.2g; from our arithmetic by %.2g\n", name, off, bound, apart);
    assert_true(off <= bound && apart > 2 * off);
}

static void test_training(void **state) {
    (void)state;
    check_training("layernorm", (AuthorsArithmetic){.layernorm = true});
    check_training("activation", (AuthorsArithmetic){.activation = true});
    check_training("linear", (AuthorsArithmetic){.linear = true});
    check_training("no biases of norms", (AuthorsArithmetic){.no_norm_biases = true});
    check_training("all", (AuthorsArithmetic){true, true, true, true});
}

int main(void) {
    Error error;
    cuda = backend_cuda(MX_GEMM_AUTO, &error);
    if (!cuda) {
        print_message("%s\n", error.message);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_activations),
        cmocka_unit_test(test_training),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
