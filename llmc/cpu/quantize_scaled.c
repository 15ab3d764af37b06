/*
The quantizer for scalings that aren't MX: into codes and scales, or into the BF16 values that a
tensor decodes to, but for its own factor. Scales and values are computed in FP32, codes, where the
processor has vectors, from products in FP32 that were rounded to odd; BF16 in blocks of 128 with
scales that are powers of two is quantize_bf16.c's. E4M3 and E2M1 elements times a power of two or
an E4M3 scale are exact in BF16 (but at the ends of its range), so that the product's addends are
the hardware's. Times an FP32 scale they aren't: such blocks are codes.
*/
#include "quantize.h"

enum { SIDE = TILE_COLS }; // columns of a part, and the most rows: whole blocks of every scaling

// A part of a tensor as FP32, zeros beyond the tensor's edges. It has SIDE rows where blocks of so
// many rows are wanted, else TILE_ROWS, so that it stays in the caches from one copy to the next.
typedef struct {
    TilePlace at;
    float x[SIDE][SIDE];
} Part;

// What a tensor's blocks have in common.
typedef struct {
    uint32_t amax;
    float scale;
    bool is_finite; // false: an infinity or a NaN is in the tensor; true: none is, or its blocks' amaxes tell
} TensorScale;

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Amaxes

MX_FUNCTION uint32_t amax_of_bf16(const uint16_t *x, int64_t count) {
    uint16_t amax = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = x[i] & 0x7FFF;
        amax = magnitude > amax ? magnitude : amax;
    }
    return (uint32_t)amax << 16;
}

MX_FUNCTION uint32_t amax_of_fp32(const float *x, int64_t count) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < count; i++) {
        amax = larger(mx_magnitude_bits(x[i]), amax);
    }
    return amax;
}

static uint32_t amax_of_made_row(const Source *in, int64_t row) {
    uint32_t amax = 0;
    int64_t cols = source_cols(in);
    for (int64_t col = 0; col < cols; col += SIDE) {
        float x[SIDE];
        int64_t count = min_int64(SIDE, cols - col);
        source_row(x, in, row, col, count);
        amax = larger(amax_of_fp32(x, count), amax);
    }
    return amax;
}

// Finds the amax of what a source stands for, which is stored on the way where that is asked for.
static uint32_t source_amax(const Source *in) {
    uint32_t amax = 0;
#pragma omp parallel for schedule(static) reduction(max : amax)
    for (int64_t row = 0; row < in->x.rows; row++) {
        uint32_t of_row = in->kind != SOURCE_TENSOR    ? amax_of_made_row(in, row)
                          : in->x.dtype == FORMAT_BF16 ? amax_of_bf16(cpu_at(in->x, row, 0), in->x.cols)
                                                       : amax_of_fp32(cpu_at(in->x, row, 0), in->x.cols);
        amax = larger(of_row, amax);
    }
    return amax;
}

void cpu_amax(uint32_t *amax, Tensor in) {
    Source source = source_tensor(in);
    *amax = source_amax(&source);
}

// Blocks

// What elements of columns are multiplied by before they are encoded and after they are decoded,
// where each column of a band of rows, as high as a block, is a block or in one.
typedef struct {
    float multiplier[SIDE], value[SIDE];
    bool is_finite; // all amaxes are
} Band;

// Finds the largest magnitudes of columns, `rows` of them from x on.
MX_FUNCTION void column_amaxes(uint32_t amax[SIDE], const float x[][SIDE], int64_t rows) {
    memset(amax, 0, SIDE * sizeof(*amax));
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < SIDE; c++) {
            amax[c] = larger(mx_magnitude_bits(x[r][c]), amax[c]);
        }
    }
}

// Returns whether no amax is that of an infinity or a NaN.
MX_FUNCTION bool are_finite(const uint32_t *amax, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = larger(amax[i], largest);
    }
    return largest < 0x7F800000u;
}

// Finds the blocks of `amax`, `count` of them. Returns whether all amaxes are finite.
MX_FUNCTION bool blocks_of_amaxes(float *multiplier, float *value, const uint32_t *amax, int64_t count, float s,
                                  Scaling scaling, Format format, bool second) {
    for (int64_t i = 0; i < count; i++) {
        ScaledBlock block = scaling_block_of_amax(scaling, format, amax[i], s, second);
        multiplier[i] = block.multiplier;
        value[i] = block.value;
    }
    return are_finite(amax, count);
}

MX_FUNCTION void columnwise_blocks(Band *band, const float x[][SIDE], float s, Scaling scaling, Format format) {
    uint32_t amax[SIDE];
    column_amaxes(amax, x, scaling_block(scaling));
    band->is_finite = blocks_of_amaxes(band->multiplier, band->value, amax, SIDE, s, scaling, format, false);
}

// The blocks of a strip of rows that don't run down columns: of each row, from the left.
enum { STRIP_ROWS = TILE_ROWS, MOST_ACROSS = SIDE / NVFP4_SIDE };
typedef struct {
    float multiplier[STRIP_ROWS * MOST_ACROSS], value[STRIP_ROWS * MOST_ACROSS];
    bool is_finite; // all amaxes are
} RowBlocks;

// Finds the blocks of 128 of a strip.
static void find_blocks_of_128(RowBlocks *blocks, const QuantizedTensor *out, const float x[][SIDE]) {
    uint32_t amax[STRIP_ROWS];
    if (out->axis == AXIS_SQUARE) {
        uint32_t largest = 0;
        for (int64_t r = 0; r < SIDE; r++) {
            largest = larger(amax_of_fp32(x[r], SIDE), largest);
        }
        for (int64_t r = 0; r < STRIP_ROWS; r++) {
            amax[r] = largest;
        }
    } else {
        for (int64_t r = 0; r < STRIP_ROWS; r++) {
            amax[r] = amax_of_fp32(x[r], SIDE);
        }
    }
    // With a constant scaling the loops are vectors.
    if (out->scaling == SCALING_BLOCK128) {
        blocks->is_finite = blocks_of_amaxes(blocks->multiplier, blocks->value, amax, STRIP_ROWS, 1, SCALING_BLOCK128,
                                             out->format, false);
    } else {
        blocks->is_finite = blocks_of_amaxes(blocks->multiplier, blocks->value, amax, STRIP_ROWS, 1,
                                             SCALING_BLOCK128_FP32, out->format, false);
    }
}

// NVFP4

// Raises the amaxes of a square's rows to the square's.
MX_FUNCTION void spread_largest(uint32_t amax[NVFP4_SIDE][MOST_ACROSS]) {
    for (int64_t r = 1; r < NVFP4_SIDE; r++) {
        for (int64_t i = 0; i < MOST_ACROSS; i++) {
            amax[0][i] = larger(amax[r][i], amax[0][i]);
        }
    }
    for (int64_t r = 1; r < NVFP4_SIDE; r++) {
        memcpy(amax[r], amax[0], sizeof(amax[0]));
    }
}

// Finds the largest magnitudes of a strip's blocks of NVFP4_SIDE neighbours, `x` being the first:
// for all blocks those of half against half, then of quarter against quarter, then of the four that
// are left. One block after the other they took 0.7 of the 1.8 ms of a rowwise copy with AVX2.
MX_FUNCTION void nvfp4_amaxes(uint32_t *amax, const float *x) {
    enum { BLOCKS = STRIP_ROWS * MOST_ACROSS, HALF = NVFP4_SIDE / 2, QUARTER = NVFP4_SIDE / 4 };
    uint32_t halves[BLOCKS][HALF], quarters[BLOCKS][QUARTER];
    for (int64_t i = 0; i < BLOCKS; i++) {
        for (int64_t j = 0; j < HALF; j++) {
            halves[i][j] =
                larger(mx_magnitude_bits(x[i * NVFP4_SIDE + j]), mx_magnitude_bits(x[i * NVFP4_SIDE + HALF + j]));
        }
    }
    for (int64_t i = 0; i < BLOCKS; i++) {
        for (int64_t j = 0; j < QUARTER; j++) {
            quarters[i][j] = larger(halves[i][j], halves[i][QUARTER + j]);
        }
    }
    for (int64_t i = 0; i < BLOCKS; i++) {
        amax[i] = larger(larger(quarters[i][0], quarters[i][1]), larger(quarters[i][2], quarters[i][3]));
    }
}

static void find_nvfp4(RowBlocks *blocks, const QuantizedTensor *out, const float x[][SIDE], float s) {
    uint32_t amax[STRIP_ROWS][MOST_ACROSS];
    nvfp4_amaxes(amax[0], x[0]);
    for (int64_t r = 0; out->axis == AXIS_SQUARE && r < STRIP_ROWS; r += NVFP4_SIDE) {
        spread_largest(amax + r);
    }
    blocks->is_finite = blocks_of_amaxes(blocks->multiplier, blocks->value, amax[0], STRIP_ROWS * MOST_ACROSS, s,
                                         SCALING_NVFP4, FORMAT_E2M1, false);
}

// Whether the processor multiplies and adds with one rounding: a multiplication and two such
// instructions take less time than a division.
#ifdef __FP_FAST_FMAF
static const bool divides_by_fma = true;
#else
static const bool divides_by_fma = false;
#endif

// Adds the errors of NVFP4_SIDE values, one below the other, in each column's block.
MX_FUNCTION void add_errors(float errors[SIDE], const Band *blocks, const float x[][SIDE], float amax,
                            bool is_moderate) {
    memset(errors, 0, SIDE * sizeof(*errors));
    for (int64_t r = 0; r < NVFP4_SIDE; r++) {
        for (int64_t c = 0; c < SIDE; c++) {
            ScaledBlock block = {blocks->multiplier[c], blocks->value[c], 0};
            errors[c] += scaling_46_error(&block, amax, x[r][c], is_moderate);
        }
    }
}

// Chooses, for each column of NVFP4_SIDE rows, the one of four over six's blocks that errs less.
// Columns are a block each, or NVFP4_SIDE of them together.
MX_FUNCTION void choose_blocks(Band *best, const float x[][SIDE], bool together, TensorScale s) {
    uint32_t amax[SIDE];
    float errors[2][SIDE];
    Band blocks[2];
    column_amaxes(amax, x, NVFP4_SIDE);
    for (int64_t c = 0; together && c < SIDE; c += NVFP4_SIDE) {
        uint32_t largest = 0;
        for (int64_t i = c; i < c + NVFP4_SIDE; i++) {
            largest = larger(amax[i], largest);
        }
        for (int64_t i = c; i < c + NVFP4_SIDE; i++) {
            amax[i] = largest;
        }
    }
    for (int second = 0; second < 2; second++) {
        best->is_finite = blocks_of_amaxes(blocks[second].multiplier, blocks[second].value, amax, SIDE, s.scale,
                                           SCALING_NVFP4_46, FORMAT_E2M1, second);
        if (divides_by_fma && scaling_46_is_moderate(s.amax)) {
            add_errors(errors[second], &blocks[second], x, mx_bits_float(s.amax), true);
        } else {
            add_errors(errors[second], &blocks[second], x, mx_bits_float(s.amax), false);
        }
        for (int64_t c = 0; together && c < SIDE; c += NVFP4_SIDE) {
            scaling_46_sum_rows(errors[second] + c);
            for (int64_t i = c + 1; i < c + NVFP4_SIDE; i++) {
                errors[second][i] = errors[second][c];
            }
        }
    }
    for (int64_t c = 0; c < SIDE; c++) {
        bool is_second = errors[1][c] < errors[0][c];
        best->multiplier[c] = is_second ? blocks[1].multiplier[c] : blocks[0].multiplier[c];
        best->value[c] = is_second ? blocks[1].value[c] : blocks[0].value[c];
    }
}

typedef float Four __attribute__((vector_size(16)));

MX_FUNCTION Four lower_in_turn(Four a, Four b) { return (Four){a[0], b[0], a[1], b[1]}; }
MX_FUNCTION Four upper_in_turn(Four a, Four b) { return (Four){a[2], b[2], a[3], b[3]}; }

// Transposes 4 rows and columns; rows of either lie SIDE apart.
MX_FUNCTION void transpose_four(float *restrict out, const float *restrict in) {
    Four a, b, c, d;
    memcpy(&a, in, sizeof(a));
    memcpy(&b, in + SIDE, sizeof(b));
    memcpy(&c, in + 2 * SIDE, sizeof(c));
    memcpy(&d, in + 3 * SIDE, sizeof(d));
    Four lower[] = {lower_in_turn(a, c), lower_in_turn(b, d)}, upper[] = {upper_in_turn(a, c), upper_in_turn(b, d)};
    Four columns[] = {lower_in_turn(lower[0], lower[1]), upper_in_turn(lower[0], lower[1]),
                      lower_in_turn(upper[0], upper[1]), upper_in_turn(upper[0], upper[1])};
    for (int i = 0; i < 4; i++) {
        memcpy(out + i * SIDE, &columns[i], sizeof(columns[i]));
    }
}

// Transposes NVFP4_SIDE rows and columns.
MX_FUNCTION void transpose_square(float *restrict out, const float *restrict in) {
    for (int64_t r = 0; r < NVFP4_SIDE; r += 4) {
        for (int64_t c = 0; c < NVFP4_SIDE; c += 4) {
            transpose_four(out + c * SIDE + r, in + r * SIDE + c);
        }
    }
}

// Chooses the blocks of a strip from a copy whose columns are rows of blocks, so that loops run
// over blocks.
static void choose_row_blocks(RowBlocks *blocks, const QuantizedTensor *out, const float x[][SIDE], TensorScale s) {
    blocks->is_finite = true;
    for (int64_t row = 0; row < STRIP_ROWS; row += NVFP4_SIDE) {
        float transposed[NVFP4_SIDE][SIDE];
        Band best;
        for (int64_t first = 0; first < SIDE; first += NVFP4_SIDE) {
            transpose_square(&transposed[0][first], &x[row][first]);
        }
        choose_blocks(&best, transposed, out->axis == AXIS_SQUARE, s);
        blocks->is_finite &= best.is_finite;
        for (int64_t r = 0; r < NVFP4_SIDE; r++) {
            for (int64_t i = 0; i < MOST_ACROSS; i++) {
                blocks->multiplier[(row + r) * MOST_ACROSS + i] = best.multiplier[i * NVFP4_SIDE + r];
                blocks->value[(row + r) * MOST_ACROSS + i] = best.value[i * NVFP4_SIDE + r];
            }
        }
    }
}

// Finds the blocks of a strip of rows from x on.
static void find_row_blocks(RowBlocks *blocks, const QuantizedTensor *out, const float x[][SIDE], TensorScale s) {
    if (out->scaling == SCALING_NVFP4_46) {
        choose_row_blocks(blocks, out, x, s);
    } else if (out->scaling == SCALING_NVFP4) {
        find_nvfp4(blocks, out, x, s.scale);
    } else {
        find_blocks_of_128(blocks, out, x);
    }
}

// Finds the columnwise blocks of the rows from x on, in vectors, of a constant scaling.
static void find_columnwise(Band *band, const QuantizedTensor *out, const float x[][SIDE], TensorScale s) {
    if (out->scaling == SCALING_NVFP4_46) {
        choose_blocks(band, x, false, s);
    } else if (out->scaling == SCALING_NVFP4) {
        columnwise_blocks(band, x, s.scale, SCALING_NVFP4, FORMAT_E2M1);
    } else if (out->scaling == SCALING_BLOCK128) {
        columnwise_blocks(band, x, 1, SCALING_BLOCK128, out->format);
    } else {
        columnwise_blocks(band, x, 1, SCALING_BLOCK128_FP32, out->format);
    }
}

// Encodes the scales of NVFP4's blocks, `count` of them, which are E4M3 values.
MX_FUNCTION void encode_scales(uint8_t *codes, const float *value, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        codes[i] = mx_encode(FORMAT_E4M3, value[i]);
    }
}

// Keeps the scales of the blocks of the rows at `at`, as scaling_keep_value does, but many at once.
static void keep_scales(const QuantizedTensor *out, const Blocks *blocks, TilePlace at) {
    int64_t height = scaling_block_rows(out->scaling, out->axis);
    int64_t across = scaling_blocks_across(out->scaling, out->axis, out->cols), first_col = at.col / blocks->width;
    size_t count = (size_t)((at.cols + blocks->width - 1) / blocks->width), size = scaling_scale_bytes(out->scaling);
    uint8_t codes[STRIP_ROWS * MOST_ACROSS];
    const uint8_t *scales = (const uint8_t *)blocks->value;
    if (at.row % height != 0) return; // kept with the first of their rows
    if (scaling_is_nvfp4(out->scaling)) {
        // With a constant count the loops are vectors.
        if (blocks->width == 1) {
            encode_scales(codes, blocks->value, SIDE);
        } else {
            encode_scales(codes, blocks->value, STRIP_ROWS * MOST_ACROSS);
        }
        scales = codes;
    }
    for (int64_t r = 0; r < at.rows; r += height) {
        int64_t first = (at.row + r) / height * across + first_col;
        memcpy(out->scales + (size_t)first * size, scales + (size_t)(r * blocks->stride) * size, count * size);
    }
}

// Elements

// Returns a decoded value as BF16: rounded as mx_to_bf16 does, which is only needed of a power of
// two's subnormal products. x isn't a NaN with a payload, which decoded values never are.
MX_FUNCTION uint16_t decoded_to_bf16(float x) {
    uint32_t bits = mx_float_bits(x);
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Makes SIDE values as they are decoded, each column a block. `random`: as encode_row takes it.
MX_FUNCTION void row_of_values(uint16_t *restrict out, const float *x, Blocks blocks, const uint16_t *random,
                               Format format) {
    for (int64_t i = 0; random && i < SIDE; i++) {
        float element = mx_round_stochastic(format, x[i] * blocks.multiplier[i], random[i]);
        out[i] = decoded_to_bf16(element * blocks.value[i]);
    }
    if (random) return;
    for (int64_t i = 0; i < SIDE; i++) {
        out[i] = decoded_to_bf16(mx_round(format, x[i] * blocks.multiplier[i]) * blocks.value[i]);
    }
}

// Fetches the place of the elements to the right of SIDE in a row. To fetch it for writing
// (PREFETCHW) made both decoded copies of one scale per tensor take 1.3 to 1.5 times as long on an
// Emerald Rapids.
static inline void fetch_next(const uint8_t *row, size_t size) {
    for (size_t i = SIDE * size; i < 2 * SIDE * size; i += CACHE_LINE) {
        __builtin_prefetch(row + i);
    }
}

// Makes rows of SIDE values, of which none is NaN and all are exact in BF16, as they are decoded,
// and fetches what lies to their right.
MX_FUNCTION void rows_of_numbers(const Rows *out, const float x[][SIDE], int64_t rows, const Blocks *blocks,
                                 int64_t width, Format format) {
    for (int64_t r = 0; r < rows; r++) {
        const float *multipliers = blocks->multiplier + r * blocks->stride,
                    *values = blocks->value + r * blocks->stride;
        uint16_t *restrict row = (uint16_t *)out->elements + r * out->stride;
        for (int64_t i = 0; i < SIDE / width; i++) {
            float multiplier = multipliers[i], value = values[i];
            for (int64_t c = i * width; c < (i + 1) * width; c++) {
                row[c] = (uint16_t)(mx_float_bits(mx_round_number(format, x[r][c] * multiplier) * value) >> 16);
            }
        }
        fetch_next((uint8_t *)row, sizeof(*row));
    }
}

// Does so in NVFP4's blocks, along rows or columns, or with one scale for the tensor.
static void numbers_in_format(const Rows *out, const float x[][SIDE], int64_t rows, const Blocks *blocks,
                              Format format) {
#define WHOLE(constant) rows_of_numbers(out, x, rows, blocks, SIDE, constant)
    if (blocks->width == NVFP4_SIDE) {
        rows_of_numbers(out, x, rows, blocks, NVFP4_SIDE, FORMAT_E2M1);
    } else if (blocks->width == 1) {
        rows_of_numbers(out, x, rows, blocks, 1, FORMAT_E2M1);
    } else {
        MX_WITH_CONSTANT_FORMAT(format, WHOLE)
    }
#undef WHOLE
}

// Spreads a row's blocks over its columns. `band`: memory for them.
static Blocks blocks_of_columns(Band *band, Blocks blocks, float prescale) {
    if (blocks.width == 1 && prescale == 1) return blocks;
    for (int64_t i = 0; i < SIDE / blocks.width; i++) {
        for (int64_t c = i * blocks.width; c < (i + 1) * blocks.width; c++) {
            band->multiplier[c] = blocks.multiplier[i] * prescale;
            band->value[c] = blocks.value[i];
        }
    }
    return (Blocks){1, 0, band->multiplier, band->value, blocks.is_finite};
}

// Makes codes or values of any kind.
static void row_of_any(uint8_t *out, const QuantizedTensor *copy, const float *x, Blocks blocks,
                       const uint16_t *random) {
    Band band;
    blocks = blocks_of_columns(&band, blocks, encoding_prescale(&copy->encoding));
    if (copy->form != FORM_DECODED) {
        encode_row(out, x, blocks.multiplier, random, copy->format);
        return;
    }
#define VALUES(constant) row_of_values((uint16_t *)out, x, blocks, random, constant)
    MX_WITH_CONSTANT_FORMAT(copy->format, VALUES)
#undef VALUES
}

// Makes the elements of rows whose place is `at`, in a copy's form.
static void make_rows(const Rows *to, const QuantizedTensor *out, const float x[][SIDE], TilePlace at,
                      const Blocks *blocks) {
    bool decoded = out->form == FORM_DECODED, is_usual = blocks->is_finite && encoding_is_plain(&out->encoding);
    size_t size = decoded ? sizeof(uint16_t) : sizeof(uint8_t);
    if (is_usual && !decoded) {
        encode_products(to, x, at.rows, blocks, out->format);
        return;
    }
    if (is_usual && out->scaling != SCALING_BLOCK128) { // whose subnormal values aren't exact in BF16
        numbers_in_format(to, x, at.rows, blocks, out->format);
        return;
    }
    for (int64_t r = 0; r < at.rows; r++) {
        uint16_t drawn[SIDE];
        Blocks of_row = *blocks;
        of_row.multiplier += r * blocks->stride;
        of_row.value += r * blocks->stride;
        row_of_any(to->elements + (size_t)(r * to->stride) * size, out, x[r], of_row,
                   draw_row(drawn, &out->encoding, at.row + r, at.col));
    }
}

// Returns where the elements at `at` are in a copy.
static Rows place_of(const QuantizedTensor *out, TilePlace at, size_t size) {
    return (Rows){out->elements + (size_t)(at.row * out->cols + at.col) * size, out->cols, copy_is_streamed(out)};
}

// Stores rows that were made elsewhere.
static void store_rows(const QuantizedTensor *out, const Rows *from, TilePlace at, size_t size) {
    Rows to = place_of(out, at, size);
    for (int64_t r = 0; r < at.rows; r++) {
        uint8_t *row = to.elements + (size_t)(r * to.stride) * size;
        const uint8_t *made = from->elements + (size_t)(r * from->stride) * size;
        if (at.cols < SIDE) {
            memcpy(row, made, (size_t)at.cols * size);
        } else if (to.streamed) {
            stream_row(row, made);
        } else {
            for (size_t i = 0; i < SIDE * size; i += CACHE_LINE) {
                memcpy(row + i, made + i, CACHE_LINE);
            }
            fetch_next(row, size);
        }
    }
}

// Quantizes rows whose place is `at` into a copy and, unless it is NULL, into `also`, a copy with
// the same elements.
static void quantize_rows(const QuantizedTensor *out, const QuantizedTensor *also, const float x[][SIDE], TilePlace at,
                          const Blocks *blocks) {
    size_t size = out->form == FORM_DECODED ? sizeof(uint16_t) : sizeof(uint8_t);
    uint16_t aside[STRIP_ROWS][SIDE];
    Rows made = place_of(out, at, size);
    bool is_aside = at.cols < SIDE || (also && made.streamed);
    if (is_aside) made = (Rows){(uint8_t *)aside, SIDE, false};
    make_rows(&made, out, x, at, blocks);
    if (is_aside) store_rows(out, &made, at, size);
    if (also) store_rows(also, &made, at, size);
}

// Finds the blocks of the rows of a part from `row` on. `band`, `strip`: memory for them.
static Blocks find_blocks(Band *band, RowBlocks *strip, const QuantizedTensor *out, const Part *part, int64_t row,
                          TensorScale s) {
    int64_t height = scaling_block_rows(out->scaling, out->axis), width = scaling_block(out->scaling);
    if (out->axis == AXIS_COLUMNWISE) {
        if (row % height == 0) find_columnwise(band, out, part->x + row, s);
        return (Blocks){1, 0, band->multiplier, band->value, band->is_finite && s.is_finite};
    }
    if (height <= STRIP_ROWS || row % height == 0) find_row_blocks(strip, out, part->x + row, s);
    return (Blocks){width, SIDE / width, strip->multiplier, strip->value, strip->is_finite && s.is_finite};
}

// Quantizes a part into a copy and, unless it is NULL, into `also`, a copy with the same elements.
static void quantize_part(const QuantizedTensor *out, const QuantizedTensor *also, const Part *part, TensorScale s) {
    Band band;
    RowBlocks strip;
    float one = 1;
    int64_t height = scaling_block_rows(out->scaling, out->axis);
    // Rows that are stored twice are made four at a time: the second store finds them in the cache.
    int64_t together = also ? 4 : out->axis == AXIS_COLUMNWISE ? min_int64(height, STRIP_ROWS) : STRIP_ROWS;
    Blocks blocks = {SIDE, 0, &s.scale, &one, s.is_finite}; // of a tensor with one scale
    for (int64_t row = 0; row < part->at.rows; row += together) {
        TilePlace at = {part->at.row + row, part->at.col, min_int64(together, part->at.rows - row), part->at.cols};
        if (out->scaling != SCALING_TENSOR) {
            blocks = find_blocks(&band, &strip, out, part, row, s);
            if (out->form == FORM_PLAIN) keep_scales(out, &blocks, at);
        }
        quantize_rows(out, also, part->x + row, at, &blocks);
    }
}

// Tensors

// Returns whether a scale is of the amax of this very tensor.
static bool wants_amax(const QuantizedTensor *out) {
    return out && scaling_has_factor(out->scaling) && !out->delayed.scale && !out->amax;
}

// Returns what a tensor's blocks have in common, and sets its factor. `amax`: of the tensor, where
// it is wanted.
static TensorScale scale_tensor(const QuantizedTensor *out, uint32_t amax) {
    TensorScale s = {.scale = 1, .is_finite = true};
    if (out->delayed.scale) {
        s.scale = *out->delayed.scale;
    } else {
        s.amax = !scaling_has_factor(out->scaling) ? 0 : out->amax ? *out->amax : amax;
        s.scale = scaling_tensor_scale(out->scaling, out->format, s.amax);
        s.is_finite = s.amax < 0x7F800000u;
    }
    if (out->factor) *out->factor = 1.0f / s.scale;
    return s;
}

// Keeps the amax of a tensor whose scale was known before. One that isn't finite must not be
// hidden.
static void keep_amax(const QuantizedTensor *out, uint32_t amax) {
    if (amax > *out->delayed.amax) *out->delayed.amax = amax;
    if (amax >= 0x7F800000u) *out->factor = mx_bits_float(0x7FC00000u);
}

// Places a part of `height` rows, with zeros beyond the edges; what is inside is the caller's to
// fill.
static void part_begin(Part *part, TilePlace at, int64_t height) {
    part->at = at;
    if (at.rows < height || at.cols < SIDE) memset(part->x, 0, (size_t)height * sizeof(part->x[0]));
}

static void part_load(Part *part, const Source *in, TilePlace at, int64_t height) {
    part_begin(part, at, height);
    for (int64_t r = 0; r < at.rows; r++) {
        source_row(part->x[r], in, at.row + r, at.col, at.cols);
    }
}

// Finds the amax of a source, which becomes the tensor that it is stored as, so that it is made
// once.
static uint32_t find_amax(Source *in) {
    if (in->stored.data && in->stored.dtype == in->x.dtype) {
        uint32_t amax = source_amax(in);
        *in = source_tensor(in->stored);
        return amax;
    }
    Source read = *in;
    read.stored.data = NULL;
    return source_amax(&read);
}

// Returns whether two copies have the same elements: of one scale per tensor, which has no axis.
static bool are_alike(const QuantizedTensor *a, const QuantizedTensor *b, const TensorScale scales[2]) {
    return a && b && a->scaling == SCALING_TENSOR && b->scaling == SCALING_TENSOR && a->format == b->format &&
           a->form == b->form && encoding_is_plain(&a->encoding) && encoding_is_plain(&b->encoding) &&
           mx_float_bits(scales[0].scale) == mx_float_bits(scales[1].scale);
}

// Quantizes a part of `height` rows. Returns its amax where a copy's scale is delayed, else 0.
static uint32_t quantize_fp32_part(const QuantizedTensor *const copies[2], const TensorScale scales[2],
                                   const Source *in, TilePlace at, int64_t height, bool is_delayed) {
    Part part;
    uint32_t amax = 0;
    part_load(&part, in, at, height);
    for (int64_t r = 0; is_delayed && r < at.rows; r++) {
        amax = larger(amax_of_fp32(part.x[r], SIDE), amax);
    }
    bool alike = are_alike(copies[0], copies[1], scales);
    for (int i = 0; i < 2; i++) {
        if (!copies[i] || (i == 1 && alike)) continue;
        TensorScale s = scales[i];
        if (copies[i]->delayed.scale) s.is_finite = amax < 0x7F800000u;
        quantize_part(copies[i], alike ? copies[1] : NULL, &part, s);
    }
    return amax;
}

// Returns whether a copy, or NULL, is one of those that bf16_part_quantize makes along `axis`.
static bool is_bf16_part(const QuantizedTensor *out, Axis axis) {
    return !out || (out->scaling == SCALING_BLOCK128 && out->axis == axis && encoding_is_plain(&out->encoding));
}

static bool takes_bf16_parts(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Source *in) {
    if (in->x.dtype != FORMAT_BF16 || (!rowwise && !columnwise) || !bf16_tiles_are_taken()) return false;
    if (rowwise && columnwise && rowwise->format != columnwise->format) return false;
    return is_bf16_part(rowwise, AXIS_ROWWISE) && is_bf16_part(columnwise, AXIS_COLUMNWISE);
}

// Quantizes a part of BF16 values as they are, or as FP32 where bf16_part_quantize doesn't.
static void quantize_bf16_part(const QuantizedTensor *const copies[2], const TensorScale scales[2], const Source *in,
                               TilePlace at) {
    uint16_t made[SIDE][SIDE];
    Bf16Tile tile = {.x = made[0], .stride = SIDE, .at = at};
    Part part;
    if (in->kind == SOURCE_TENSOR && !in->stored.data) {
        tile.x = cpu_at(in->x, at.row, at.col);
        tile.stride = in->x.stride;
    } else {
        source_bf16_rows(made, in, at);
    }
    if (bf16_part_quantize(copies[0], copies[1], &tile)) return;
    part_begin(&part, at, SIDE);
    for (int64_t r = 0; r < at.rows; r++) {
        cpu_load(part.x[r], tile.x + r * tile.stride, FORMAT_BF16, at.cols);
    }
    for (int i = 0; i < 2; i++) {
        if (copies[i]) quantize_part(copies[i], NULL, &part, scales[i]);
    }
}

void quantize_scaled(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in) {
    const QuantizedTensor *copies[] = {rowwise, columnwise};
    TensorScale scales[2];
    uint32_t found = 0, delayed = 0;
    int64_t height = TILE_ROWS, cols = source_cols(&in);
    bool is_delayed = false, as_bf16 = takes_bf16_parts(rowwise, columnwise, &in);
    if (wants_amax(rowwise) || wants_amax(columnwise)) found = find_amax(&in);
    for (int i = 0; i < 2; i++) {
        const QuantizedTensor *out = copies[i];
        if (!out) continue;
        scales[i] = scale_tensor(out, found);
        is_delayed |= out->delayed.scale != NULL;
        if (scaling_is_block128(out->scaling) && out->axis != AXIS_ROWWISE) height = SIDE;
    }
    if (as_bf16) height = SIDE;
#pragma omp parallel reduction(max : delayed)
    {
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t row = 0; row < in.x.rows; row += height) {
            for (int64_t col = 0; col < cols; col += SIDE) {
                TilePlace at = {row, col, min_int64(height, in.x.rows - row), min_int64(SIDE, cols - col)};
                if (as_bf16) {
                    quantize_bf16_part(copies, scales, &in, at);
                } else {
                    uint32_t amax = quantize_fp32_part(copies, scales, &in, at, height, is_delayed);
                    delayed = larger(amax, delayed);
                }
            }
        }
        quantize_end_streams();
    }
    for (int i = 0; i < 2; i++) {
        const QuantizedTensor *out = copies[i];
        if (out && out->delayed.scale) keep_amax(out, out->amax ? *out->amax : delayed);
    }
}
