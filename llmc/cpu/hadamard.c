/*
Hadamard transforms: numerics/hadamard.h says what they are. Rows below one another are transformed
a piece of their columns at a time, rows a piece of whole groups at a time, so that either stays in
the first-level cache from the first butterfly to the last.
*/
#include "cpu.h"

enum { PIECE = HADAMARD_LARGEST }; // of a row: whole groups of every size

MX_FUNCTION void flip(float *x, uint32_t sign, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        x[i] = mx_bits_float(mx_float_bits(x[i]) ^ sign);
    }
}

MX_FUNCTION void scale(float *x, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        x[i] *= factor;
    }
}

// Makes sums and differences of `count` values of a and of b.
MX_FUNCTION void butterflies(float *restrict a, float *restrict b, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float low = a[i], high = b[i];
        a[i] = low + high;
        b[i] = low - high;
    }
}

// Along rows

// Makes those of a piece's values that are `apart` from each other: a constant in each call.
MX_FUNCTION void butterflies_within(float *x, int64_t apart) {
    for (int64_t first = 0; first < PIECE; first += 2 * apart) {
        butterflies(x + first, x + first + apart, apart);
    }
}

// Transforms a piece as groups of `size`, of which `signs` has those of all its elements.
MX_FUNCTION void transform_piece(float *x, const uint32_t *signs, int64_t size) {
    for (int64_t i = 0; i < PIECE; i++) {
        x[i] = mx_bits_float(mx_float_bits(x[i]) ^ signs[i]);
    }
    butterflies_within(x, 1);
    butterflies_within(x, 2);
    butterflies_within(x, 4);
    butterflies_within(x, 8);
    if (size > 16) butterflies_within(x, 16);
    if (size > 32) butterflies_within(x, 32);
    if (size > 64) butterflies_within(x, 64);
    scale(x, hadamard_factor(size), PIECE);
}

// Transforms what is left of a row behind whole groups.
static void transform_rest(float *x, int64_t count, const Hadamard *h) {
    for (int64_t i = 0; i < count;) {
        int64_t length = hadamard_length(h->size, count - i);
        hadamard_group(x + i, length, 1, h);
        i += length;
    }
}

static void transform_rows(Tensor out, Tensor in, const Hadamard *h) {
    int64_t whole = in.cols / h->size * h->size;
    uint32_t signs[PIECE];
    for (int64_t i = 0; i < PIECE; i++) {
        signs[i] = hadamard_sign(h, i % h->size);
    }
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in.rows; row++) {
        for (int64_t col = 0; col < in.cols; col += PIECE) {
            float x[PIECE] = {0};
            int64_t count = min_int64(PIECE, in.cols - col), in_groups = min_int64(PIECE, whole - col);
            cpu_load(x, cpu_at(in, row, col), in.dtype, count);
            if (in_groups == PIECE) {
                transform_piece(x, signs, h->size);
            } else {
                transform_rest(x, count, h);
            }
            cpu_store(cpu_at(out, row, col), out.dtype, x, count);
        }
    }
}

// Down columns

enum { WIDTH = 128 }; // of columns

typedef struct {
    float x[HADAMARD_LARGEST][WIDTH];
} Columns;

// Makes two steps of butterflies in one pass: of a and b, and c and d, and then of a and c, and b
// and d.
MX_FUNCTION void butterflies_twice(float *restrict a, float *restrict b, float *restrict c, float *restrict d,
                                   int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float ab = a[i] + b[i], a_b = a[i] - b[i], cd = c[i] + d[i], c_d = c[i] - d[i];
        a[i] = ab + cd;
        b[i] = a_b + c_d;
        c[i] = ab - cd;
        d[i] = a_b - c_d;
    }
}

// Transforms `length` rows.
MX_FUNCTION void transform_group(Columns *columns, int64_t length, const Hadamard *h) {
    float(*x)[WIDTH] = columns->x;
    int64_t apart = 1;
    for (int64_t i = 0; i < length; i++) {
        flip(x[i], hadamard_sign(h, i), WIDTH);
    }
    for (; 2 * apart < length; apart *= 4) {
        for (int64_t i = 0; i < length; i++) {
            if (i & (3 * apart)) continue;
            butterflies_twice(x[i], x[i + apart], x[i + 2 * apart], x[i + 3 * apart], WIDTH);
        }
    }
    for (int64_t i = 0; i < length && apart < length; i++) {
        if (!(i & apart)) butterflies(x[i], x[i + apart], WIDTH);
    }
    scale(x[0], hadamard_factor(length), length * WIDTH);
}

// Transforms columns [col, col + count) of the group of rows that begins at `row`.
static void transform_columns(Tensor out, Tensor in, int64_t row, int64_t length, int64_t col, const Hadamard *h) {
    Columns columns;
    int64_t count = min_int64(WIDTH, in.cols - col);
    if (count < WIDTH) memset(columns.x, 0, sizeof(columns.x));
    for (int64_t i = 0; i < length; i++) {
        cpu_load(columns.x[i], cpu_at(in, row + i, col), in.dtype, count);
    }
    transform_group(&columns, length, h);
    for (int64_t i = 0; i < length; i++) {
        cpu_store(cpu_at(out, row + i, col), out.dtype, columns.x[i], count);
    }
}

static void transform_down(Tensor out, Tensor in, const Hadamard *h) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t first = 0; first < in.rows; first += h->size) {
        for (int64_t col = 0; col < in.cols; col += WIDTH) {
            int64_t end = min_int64(first + h->size, in.rows);
            for (int64_t row = first; row < end;) {
                int64_t length = hadamard_length(h->size, end - row);
                transform_columns(out, in, row, length, col, h);
                row += length;
            }
        }
    }
}

void cpu_hadamard(Tensor out, Tensor in, Axis axis, Hadamard hadamard) {
    if (axis == AXIS_ROWWISE) {
        transform_rows(out, in, &hadamard);
    } else {
        transform_down(out, in, &hadamard);
    }
}
