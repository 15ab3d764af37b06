/*
What the tests of the operations share: memory whose surroundings are watched, seeded random
tensors, comparison with a bound that was derived for each value, and the same call under one thread
and two.
*/
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "llmc/backend.h"
#include "llmc/base/random.h"

// Unit roundoffs: the largest relative error of one rounding to nearest.
#define U_FP32 0x1p-24
#define U_BF16 0x1p-8

static inline double u_of(Format dtype) { return dtype == FORMAT_FP32 ? U_FP32 : U_BF16; }

// Returns the bound's share of rounding a result of magnitude `value` to `dtype`. FP32's subnormals
// may be flushed.
static inline double rounding(Format dtype, double value) { return u_of(dtype) * fabs(value) + 0x1p-126; }

// Exact GELU is x times the normal distribution function, half of erfc(z) with z^2 = x^2 / 2. That
// is off by 5e-7 of a polynomial's fit and rounding, z^2 by 3 U_FP32 of itself, exp by 2.4 U_FP32,
// the rest by 6; below exp's range it is at most 2^-126. Its density is off by that of x^2 and 8
// more.
static inline double normal_gate_bound(double x) {
    double z2 = fmin(x * x / 2, 89), tail = erfc(fabs(x) / sqrt(2)) / 2;
    return tail * (5e-7 + U_FP32 * (3 * z2 + 8.4)) + 0x1p-126 + U_FP32 * erfc(-x / sqrt(2)) / 2;
}

static inline double exact_gelu_gradient_bound(double x) {
    double density = exp(-x * x / 2) / sqrt(2 * acos(-1)), held = fmin(fabs(x), 1e10);
    double of_density = held * (density * U_FP32 * (fmin(x * x, 178) + 8) + 0x1p-126);
    return normal_gate_bound(x) + of_density + U_FP32 * (1 + held * density);
}

// Memory of a test, filled with 0xFF (NaN as FP32 and as BF16, so that reading what nobody wrote
// shows), between two guards that pool_release looks at. All begins 64 bytes behind a multiple of
// 256: what is chosen by alignment doesn't hang on the heap.
enum { POOL_CAPACITY = 4096, GUARD_BYTES = 64, GUARD = 0xA5, UNWRITTEN = 0xFF };
static struct {
    uint8_t *memory;
    size_t bytes;
} pool[POOL_CAPACITY];
static int pool_count;

static inline void *pool_take(size_t bytes) {
    assert_true(pool_count < POOL_CAPACITY);
    uint8_t *memory = aligned_alloc(256, (bytes + 2 * GUARD_BYTES + 255) / 256 * 256);
    assert_non_null(memory);
    memset(memory, GUARD, GUARD_BYTES);
    memset(memory + GUARD_BYTES, UNWRITTEN, bytes);
    memset(memory + GUARD_BYTES + bytes, GUARD, GUARD_BYTES);
    pool[pool_count].memory = memory;
    pool[pool_count++].bytes = bytes;
    return memory + GUARD_BYTES;
}

static inline void pool_release(void) {
    bool intact = true;
    while (pool_count > 0) {
        uint8_t *memory = pool[--pool_count].memory;
        for (size_t i = 0; i < GUARD_BYTES; i++) {
            intact = intact && memory[i] == GUARD && memory[GUARD_BYTES + pool[pool_count].bytes + i] == GUARD;
        }
        free(memory);
    }
    if (!intact) fail_msg("memory outside a tensor was written");
}

static inline float *take_floats(int64_t count) { return pool_take((size_t)count * sizeof(float)); }
static inline double *take_doubles(int64_t count) { return pool_take((size_t)count * sizeof(double)); }

// Draw random values: each call has a stream of its own.
static inline uint64_t next_stream(void) {
    static uint64_t stream;
    return stream++;
}

static inline void fill_floats(float *out, int64_t count, double stddev) {
    uint64_t stream = next_stream();
    for (int64_t i = 0; i < count; i++) {
        out[i] = (float)(stddev * random_normal(1, stream, (uint64_t)i));
    }
}

static inline void fill_below(int32_t *out, int64_t count, int32_t limit) {
    uint64_t stream = next_stream();
    for (int64_t i = 0; i < count; i++) {
        out[i] = (int32_t)(random_uniform(1, stream, (uint64_t)i) * (float)limit);
    }
}

// Returns positions (B, T) of tokens in documents of about `length` tokens, 1 and more.
static inline int32_t *take_documents(int64_t B, int64_t T, int32_t length) {
    int32_t *positions = (int32_t *)pool_take((size_t)(B * T) * sizeof(int32_t));
    fill_below(positions, B * T, length);
    for (int64_t i = 0; i < B * T; i++) {
        bool begins = i % T == 0 || positions[i] == 0;
        positions[i] = begins ? 0 : positions[i - 1] + 1;
    }
    return positions;
}

// Columns between a row's end and the next row: rows are never contiguous where a tensor may be
// strided.
enum { ROW_PADDING = 3 };

static inline Tensor take_tensor(Format dtype, int64_t rows, int64_t cols) {
    int64_t stride = cols + ROW_PADDING;
    Tensor tensor = tensor_make(pool_take((size_t)(rows * stride) * dtype_size(dtype)), dtype, rows, cols);
    tensor.stride = stride;
    return tensor;
}

static inline double tensor_get(Tensor t, int64_t row, int64_t col) {
    int64_t at = row * t.stride + col;
    return t.dtype == FORMAT_FP32 ? ((float *)t.data)[at] : mx_from_bf16(((uint16_t *)t.data)[at]);
}

static inline void tensor_set(Tensor t, int64_t row, int64_t col, double value) {
    int64_t at = row * t.stride + col;
    if (t.dtype == FORMAT_FP32) {
        ((float *)t.data)[at] = (float)value;
    } else {
        ((uint16_t *)t.data)[at] = mx_to_bf16((float)value);
    }
}

// Fills a tensor with normal values, and returns it.
static inline Tensor fill_tensor(Tensor tensor, double stddev) {
    uint64_t stream = next_stream();
    for (int64_t r = 0; r < tensor.rows; r++) {
        for (int64_t c = 0; c < tensor.cols; c++) {
            tensor_set(tensor, r, c, stddev * random_normal(1, stream, (uint64_t)(r * tensor.cols + c)));
        }
    }
    return tensor;
}

static inline Tensor random_tensor(Format dtype, int64_t rows, int64_t cols, double stddev) {
    return fill_tensor(take_tensor(dtype, rows, cols), stddev);
}

static inline size_t tensor_bytes(Tensor t) { return (size_t)(t.rows * t.stride) * dtype_size(t.dtype); }

static inline Tensor copy_tensor(Tensor t) {
    Tensor copy = t;
    copy.data = pool_take(tensor_bytes(t));
    memcpy(copy.data, t.data, tensor_bytes(t));
    return copy;
}

static inline float *copy_floats(const float *values, int64_t count) {
    return memcpy(take_floats(count), values, (size_t)count * sizeof(float));
}

// Returns the values, row-major, in double.
static inline double *tensor_doubles(Tensor t) {
    double *values = take_doubles(t.rows * t.cols);
    for (int64_t i = 0; i < t.rows * t.cols; i++) {
        values[i] = tensor_get(t, i / t.cols, i % t.cols);
    }
    return values;
}

static inline void check_padding(Tensor t) {
    size_t size = dtype_size(t.dtype);
    for (int64_t r = 0; r < t.rows; r++) {
        const uint8_t *padding = (uint8_t *)t.data + (size_t)(r * t.stride + t.cols) * size;
        for (size_t i = 0; i < (size_t)(t.stride - t.cols) * size; i++) {
            assert_int_equal(padding[i], UNWRITTEN);
        }
    }
}

static inline void check_same_tensor(Tensor a, Tensor b) { assert_memory_equal(a.data, b.data, tensor_bytes(a)); }

static inline void check_same_floats(const float *a, const float *b, int64_t count) {
    assert_memory_equal(a, b, (size_t)count * sizeof(float));
}

// The comparison of many values, each with its own bound.
typedef struct {
    double ratio; // largest |value - expected| / bound
    double value, expected, bound;
    int64_t count, index;
} Check;

// Compares one value. A NaN, or a difference where the bound is 0, counts as infinitely far off.
static inline void check_value(Check *check, double value, double expected, double bound) {
    double error = fabs(value - expected);
    double ratio = error == 0 ? 0 : error / bound;
    if (!(ratio <= INFINITY)) ratio = INFINITY;
    if (ratio > check->ratio || check->count == 0) {
        *check = (Check){ratio, value, expected, bound, check->count, check->count};
    }
    check->count++;
}

static inline void check_end(const Check *check, const char *format, ...) {
    char name[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof(name), format, arguments);
    va_end(arguments);
    printf("    %-52s worst error/bound %8.2g of %lld values\n", name, check->ratio, (long long)check->count);
    assert_true(check->count > 0);
    if (!(check->ratio <= 1)) {
        fail_msg("%s: value %lld is %.9g, not %.9g within %.3g", name, (long long)check->index, check->value,
                 check->expected, check->bound);
    }
}

// Returns the relative error of a sum of so many terms in FP32, and of a few operations more.
static inline double sum_error(int64_t length) { return (double)(length + 16) * U_FP32; }

// Returns the logarithms of a row's softmax, and what computed ones are off by: the sum's relative
// error, and roundings of numbers as large as the largest.
static inline double *log_softmax(Tensor x, int64_t row, double *error) {
    double *out = take_doubles(x.cols), max = -INFINITY, sum = 0, largest = 0;
    for (int64_t c = 0; c < x.cols; c++) {
        max = fmax(max, tensor_get(x, row, c));
    }
    for (int64_t c = 0; c < x.cols; c++) {
        sum += exp(tensor_get(x, row, c) - max);
    }
    for (int64_t c = 0; c < x.cols; c++) {
        out[c] = tensor_get(x, row, c) - max - log(sum);
        largest = fmax(largest, fabs(tensor_get(x, row, c)) + fabs(out[c]));
    }
    *error = sum_error(x.cols) + 4 * U_FP32 * largest;
    return out;
}

// Returns where the formulas of cuBLAS's manual ("1D Block Scaling Factors Layout") have the scale
// of a block, the `inner`th of `inner_count` along K: in tiles of 128 outer indices by 4 blocks,
// side by side along K.
static inline int64_t tiled_offset(int64_t outer, int64_t inner, int64_t inner_count) {
    int64_t sf_outer = outer / 128, sf_inner = inner / 4 * 4, sf_inner_dim = (inner_count + 3) / 4 * 4;
    int64_t in_tile = outer % 128 % 32 * 16 + outer % 128 / 32 * 4 + inner % 4;
    return (sf_inner + sf_outer * sf_inner_dim) * 128 + in_tile;
}

// Returns where the manual ("Scaling factors layouts") has the scale of a block of 128, the
// `block`th along K, of a matrix of `outer_count` rows of K. Those of 1x128 are outer-major,
// outer_count x L, with L blocks along K; those of 128x128 K-major, L rounded up to a multiple of
// 4.
static inline int64_t index_of_128(bool is_square, int64_t outer, int64_t block, int64_t outer_count, int64_t K) {
    int64_t L = (K + 127) / 128, L4 = (L + 3) / 4 * 4;
    return is_square ? outer / 128 * L4 + block : block * outer_count + outer;
}

typedef double (*Function)(void *context, double x);

// Computes f'(x) by the five-point rule: its error is h^4 f^(5) / 30, far below FP32's for the
// functions tested.
static inline double derivative(Function f, void *context, double x, double h) {
    double near = f(context, x + h) - f(context, x - h), far = f(context, x + 2 * h) - f(context, x - 2 * h);
    return (8 * near - far) / (12 * h);
}
