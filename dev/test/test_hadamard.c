/*
Hadamard transforms of the CPU backend: against SciPy's matrix, on every axis and size and with
rests of every length; the product of two transformed operands against that of the operands; special
values; the same bits on any number of threads.
*/
#include <omp.h>
#include "check.h"
#include "fixtures/hadamard_sums.h"
#include "llmc/cpu/cpu.h"

enum { LINE = sizeof(hadamard_line) / sizeof(*hadamard_line) };
static const int64_t SIZES[] = {16, 32, 64, 128};
static const Backend *backend;

static Hadamard with_signs(int64_t size, const int *signs) {
    Hadamard h = {.size = size};
    for (int i = 0; i < HADAMARD_LARGEST; i++) {
        if (signs[i] < 0) h.minus[i / 32] |= (uint32_t)1 << (i % 32);
    }
    return h;
}

// Returns a transform with drawn signs, others in each call.
static Hadamard drawn(int64_t size) {
    int32_t bits[HADAMARD_LARGEST];
    int signs[HADAMARD_LARGEST];
    fill_below(bits, HADAMARD_LARGEST, 2);
    for (int i = 0; i < HADAMARD_LARGEST; i++) {
        signs[i] = bits[i] ? -1 : 1;
    }
    return with_signs(size, signs);
}

// Returns the length of the group that element `at` of `count` is in.
static int64_t group_of(int64_t at, int64_t count, int64_t size) {
    int64_t first = 0;
    for (;;) {
        while (size > count - first) {
            size /= 2;
        }
        if (at < first + size) return size;
        first += size;
    }
}

// Against SciPy
// ------------------------------------------------------------------------------------------------------

// Whole numbers below 2^24 are exact up to the factor: it is rounded, and the product, and what is
// stored.
static void check_line(Format dtype, Axis axis, Hadamard h, const int *sums) {
    enum { LINES = 70 };
    bool rowwise = axis == AXIS_ROWWISE;
    Tensor in = take_tensor(dtype, rowwise ? LINES : LINE, rowwise ? LINE : LINES);
    Tensor out = take_tensor(dtype, in.rows, in.cols);
    Check check = {0};
    for (int64_t i = 0; i < in.rows * in.cols; i++) {
        int64_t row = i / in.cols, col = i % in.cols, line = rowwise ? row : col;
        tensor_set(in, row, col, hadamard_line[rowwise ? col : row] * ldexp(1, (int)line - 35));
    }
    backend->hadamard(out, in, axis, h);
    check_padding(out);
    for (int64_t i = 0; i < in.rows * in.cols; i++) {
        int64_t row = i / in.cols, col = i % in.cols, line = rowwise ? row : col, at = rowwise ? col : row;
        double expected = sums[at] / sqrt((double)group_of(at, LINE, h.size)) * ldexp(1, (int)line - 35);
        double bound = (2 * U_FP32 + (dtype == FORMAT_BF16 ? U_BF16 : 0)) * fabs(expected);
        check_value(&check, tensor_get(out, row, col), expected, bound);
    }
    check_end(&check, "%s, %s, size %lld", dtype == FORMAT_BF16 ? "bf16" : "fp32", rowwise ? "rows" : "columns",
              (long long)h.size);
    pool_release();
}

static void test_scipy(void **state) {
    (void)state;
    const int *const fixed[] = {hadamard_fixed_16, hadamard_fixed_32, hadamard_fixed_64, hadamard_fixed_128};
    const int *const others[] = {hadamard_drawn_16, hadamard_drawn_32, hadamard_drawn_64, hadamard_drawn_128};
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 4; k++) {
            Format dtype = k & 1 ? FORMAT_BF16 : FORMAT_FP32;
            Axis axis = k & 2 ? AXIS_COLUMNWISE : AXIS_ROWWISE;
            check_line(dtype, axis, hadamard_fixed(SIZES[i]), fixed[i]);
            check_line(dtype, axis, with_signs(SIZES[i], hadamard_drawn_signs), others[i]);
        }
    }
}

// Products
// -----------------------------------------------------------------------------------------------------------

// Writes to `sums` those of the magnitudes of each element's group, over the root of its length: no
// element of the transform is larger. Along columns, where `down`.
static void magnitudes(double *sums, Tensor t, bool down, int64_t size) {
    int64_t lines = down ? t.cols : t.rows, count = down ? t.rows : t.cols;
    for (int64_t line = 0; line < lines; line++) {
        for (int64_t first = 0; first < count;) {
            int64_t length = group_of(first, count, size);
            double sum = 0;
            for (int64_t i = first; i < first + length; i++) {
                sum += fabs(down ? tensor_get(t, i, line) : tensor_get(t, line, i));
            }
            for (int64_t i = first; i < first + length; i++) {
                sums[line * count + i] = sum / sqrt((double)length);
            }
            first += length;
        }
    }
}

// An element of the transform is off by at most g = (log2 size + 2) u times the group's magnitudes
// over the root of its length, of log2 size additions, the factor and the product; so each of K
// products of the GEMM by 2 g + g^2 of those of its two groups, and by (K + 1) u of accumulation.
static void check_product(Tensor d, Tensor a, Tensor b, GemmOptions options, Hadamard h) {
    Axis a_axis = options.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE;
    Axis b_axis = options.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE;
    int64_t K = options.transpose_a ? a.rows : a.cols;
    Tensor a_transformed = take_tensor(FORMAT_FP32, a.rows, a.cols);
    Tensor b_transformed = take_tensor(FORMAT_FP32, b.rows, b.cols);
    double *a_sums = take_doubles(a.rows * a.cols), *b_sums = take_doubles(b.rows * b.cols);
    Operand operands[] = {operand_tensor(a_transformed), operand_tensor(b_transformed)};
    Check check = {0};
    backend->hadamard(a_transformed, a, a_axis, h);
    backend->hadamard(b_transformed, b, b_axis, h);
    size_t workspace = backend->gemm_workspace(operands[0], operands[1]);
    backend->use_workspace(pool_take(workspace), workspace);
    backend->gemm(d, operands[0], operands[1], options);
    magnitudes(a_sums, a, options.transpose_a, h.size);
    magnitudes(b_sums, b, !options.transpose_b, h.size);
    for (int64_t i = 0; i < d.rows * d.cols; i++) {
        int64_t m = i / d.cols, n = i % d.cols;
        double sum = 0, magnitude = 0, g = (log2((double)h.size) + 2) * U_FP32;
        for (int64_t k = 0; k < K; k++) {
            sum += (options.transpose_a ? tensor_get(a, k, m) : tensor_get(a, m, k)) *
                   (options.transpose_b ? tensor_get(b, n, k) : tensor_get(b, k, n));
            magnitude += a_sums[m * K + k] * b_sums[n * K + k];
        }
        check_value(&check, tensor_get(d, m, n), sum, (2 * g + g * g + (double)(K + 1) * U_FP32) * magnitude);
    }
    check_end(&check, "K %lld, groups of %lld", (long long)K, (long long)h.size);
}

// The three GEMMs of a linear layer with exact operands: transforms change none by more than
// rounding. An outlier in each operand shows the group whose transforms differ.
static void test_products_stay(void **state) {
    (void)state;
    enum { ROWS = 9, N = 200, COLS = 13 };
    for (size_t s = 0; s < sizeof(SIZES) / sizeof(*SIZES); s++) {
        for (int gemm = 0; gemm < 3; gemm++) {
            const GemmOptions options = {.transpose_a = gemm == 2, .transpose_b = gemm == 0};
            Tensor a = random_tensor(FORMAT_FP32, gemm == 2 ? N : ROWS, gemm == 2 ? ROWS : N, 1);
            Tensor b = random_tensor(FORMAT_FP32, gemm == 0 ? COLS : N, gemm == 0 ? N : COLS, 1);
            tensor_set(a, 3, 5, 1e4);
            tensor_set(b, 2, 7, -1e4);
            check_product(take_tensor(FORMAT_FP32, ROWS, COLS), a, b, options, drawn(SIZES[s]));
            pool_release();
        }
    }
}

// Values and threads
// -----------------------------------------------------------------------------------------------------

// A NaN, or two infinities, becomes NaN in all of its group and nowhere else.
static void test_not_finite(void **state) {
    (void)state;
    enum { ROWS = 50, COLS = 200 };
    for (int k = 0; k < 4; k++) {
        Format dtype = k & 1 ? FORMAT_BF16 : FORMAT_FP32;
        bool rowwise = k & 2;
        Tensor in = random_tensor(dtype, rowwise ? ROWS : COLS, rowwise ? COLS : ROWS, 1);
        Tensor out = take_tensor(dtype, in.rows, in.cols);
        tensor_set(in, rowwise ? 7 : 70, rowwise ? 70 : 7, NAN);
        tensor_set(in, rowwise ? 9 : 3, rowwise ? 3 : 9, INFINITY);
        tensor_set(in, rowwise ? 9 : 4, rowwise ? 4 : 9, INFINITY);
        backend->hadamard(out, in, rowwise ? AXIS_ROWWISE : AXIS_COLUMNWISE, hadamard_fixed(32));
        for (int64_t line = 0; line < ROWS; line++) {
            for (int64_t at = 0; at < COLS; at++) {
                bool is_bad = (line == 7 && at / 32 == 2) || (line == 9 && at / 32 == 0);
                double value = rowwise ? tensor_get(out, line, at) : tensor_get(out, at, line);
                assert_true(is_bad ? !isfinite(value) : isfinite(value));
                assert_true(line != 7 || !is_bad || isnan(value));
            }
        }
        pool_release();
    }
}

// The same bits on one thread, two and three.
static void test_threads(void **state) {
    (void)state;
    for (int k = 0; k < 4; k++) {
        Tensor in = random_tensor(k & 1 ? FORMAT_BF16 : FORMAT_FP32, 301, 277, 1), out[3];
        Hadamard h = drawn(64);
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            out[threads - 1] = take_tensor(in.dtype, in.rows, in.cols);
            backend->hadamard(out[threads - 1], in, k & 2 ? AXIS_ROWWISE : AXIS_COLUMNWISE, h);
            check_same_tensor(out[0], out[threads - 1]);
        }
        pool_release();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scipy),
        cmocka_unit_test(test_products_stay),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_threads),
    };
    backend = backend_cpu();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
