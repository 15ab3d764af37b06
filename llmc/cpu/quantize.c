/*
The quantizer: a tensor, or what another operation would make of one, into rowwise and/or columnwise
MX copies, in one pass over the input.

The input is taken in tiles (quantize.h). Where the processor has vectors that quantize_bf16.c
knows, tiles of BF16 are read as they are, or made as BF16, and quantized there, and so are tiles of
FP32 once they are rounded to odd; else, for square blocks and for elements that aren't rounded to
nearest or have a prescale, they are held as FP32 and quantized here.
*/
#include "quantize.h"
#include "llmc/base/util.h" // die
#include "rows.h"

void check_form(const QuantizedTensor *copy) {
    if (!copy) return;
    if (copy->form == FORM_SWIZZLED || copy->form == FORM_TRANSPOSED) {
        die("internal error: the CPU was asked for a layout of GPUs' GEMMs");
    }
    if (copy->scaling == SCALING_BLOCK128_FP32 && copy->form == FORM_DECODED) {
        die("internal error: blocks with FP32 scales aren't exact in BF16");
    }
}

// Tiles of FP32

MX_FUNCTION void encode_in_format(uint8_t *elements, const float *x, const float *multiplier, const uint16_t *random,
                                  Format format) {
    for (int i = 0; random && i < TILE_COLS; i++) {
        elements[i] = mx_encode_stochastic(format, x[i] * multiplier[i], random[i]);
    }
    for (int i = 0; !random && i < TILE_COLS; i++) {
        elements[i] = mx_encode(format, x[i] * multiplier[i]);
    }
}

#define ENCODE(constant) encode_in_format(elements, x, multiplier, random, constant)
void encode_row(uint8_t *elements, const float *x, const float *multiplier, const uint16_t *random, Format format) {
    MX_WITH_CONSTANT_FORMAT(format, ENCODE)
}
#undef ENCODE

// Makes TILE_COLS elements of a row in the copy's form and stores `count` of them, `at` elements
// from its first. `value`: of their scales.
MX_FUNCTION void make_elements(const QuantizedTensor *out, int64_t at, const float *x, const float *multiplier,
                               const float *value, const uint16_t *random, int64_t count, Format format) {
    uint8_t elements[TILE_COLS];
    uint16_t values[TILE_COLS];
    if (out->form != FORM_DECODED) {
        encode_in_format(elements, x, multiplier, random, format);
        memcpy(out->elements + at, elements, (size_t)count);
        return;
    }
    for (int i = 0; random && i < TILE_COLS; i++) {
        values[i] = mx_to_bf16(mx_round_stochastic(format, x[i] * multiplier[i], random[i]) * value[i]);
    }
    for (int i = 0; !random && i < TILE_COLS; i++) {
        values[i] = mx_to_bf16(mx_round(format, x[i] * multiplier[i]) * value[i]);
    }
    memcpy((uint16_t *)out->elements + at, values, (size_t)count * sizeof(*values));
}

static inline uint8_t row_block_scale(const float *x, Format format, ScaleRounding rounding) {
    uint32_t amax = 0;
    for (int i = 0; i < MX_BLOCK; i++) {
        uint32_t magnitude = mx_magnitude_bits(x[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return mx_scale_code(format, rounding, amax);
}

// Finds the scale code of each column's block; where `square`, of the square block that it is in.
MX_FUNCTION void column_block_scales(uint8_t codes[TILE_COLS], const Tile *tile, bool square, Format format,
                                     ScaleRounding rounding) {
    uint32_t amax[TILE_COLS] = {0};
    for (int r = 0; r < TILE_ROWS; r++) {
        for (int c = 0; c < TILE_COLS; c++) {
            uint32_t magnitude = mx_magnitude_bits(tile->x[r][c]);
            amax[c] = magnitude > amax[c] ? magnitude : amax[c];
        }
    }
    for (int first = 0; square && first < TILE_COLS; first += MX_BLOCK) {
        uint32_t largest = 0;
        for (int c = first; c < first + MX_BLOCK; c++) {
            largest = amax[c] > largest ? amax[c] : largest;
        }
        for (int c = first; c < first + MX_BLOCK; c++) {
            amax[c] = largest;
        }
    }
    for (int c = 0; c < TILE_COLS; c++) {
        codes[c] = mx_scale_code(format, rounding, amax[c]);
    }
}

MX_FUNCTION void tile_rowwise(const QuantizedTensor *out, const Tile *tile, Format format, ScaleRounding rounding) {
    int64_t blocks_in_row = mx_num_blocks(out->cols), blocks = mx_num_blocks(tile->at.cols);
    for (int64_t r = 0; r < tile->at.rows; r++) {
        float multiplier[TILE_COLS] = {0}, value[TILE_COLS] = {0};
        uint8_t codes[TILE_COLS / MX_BLOCK];
        uint16_t random[TILE_COLS];
        int64_t row = tile->at.row + r;
        for (int64_t block = 0; block < blocks; block++) {
            const float *x = tile->x[r] + block * MX_BLOCK;
            codes[block] = row_block_scale(x, format, rounding);
            for (int64_t i = block * MX_BLOCK; i < (block + 1) * MX_BLOCK; i++) {
                multiplier[i] = mx_scale_reciprocal(codes[block]) * encoding_prescale(&out->encoding);
                value[i] = mx_scale_value(codes[block]);
            }
        }
        make_elements(out, row * out->cols + tile->at.col, tile->x[r], multiplier, value,
                      draw_row(random, &out->encoding, row, tile->at.col), tile->at.cols, format);
        if (out->form == FORM_DECODED) continue;
        memcpy(out->scales + row * blocks_in_row + tile->at.col / MX_BLOCK, codes, (size_t)blocks);
    }
}

// Quantizes into columnwise blocks, or into square ones: either have a scale for all rows.
MX_FUNCTION void tile_columnwise(const QuantizedTensor *out, const Tile *tile, Format format, ScaleRounding rounding) {
    bool square = out->axis == AXIS_SQUARE;
    uint8_t codes[TILE_COLS];
    float multiplier[TILE_COLS], value[TILE_COLS];
    column_block_scales(codes, tile, square, format, rounding);
    for (int c = 0; c < TILE_COLS; c++) {
        multiplier[c] = mx_scale_reciprocal(codes[c]) * encoding_prescale(&out->encoding);
        value[c] = mx_scale_value(codes[c]);
    }
    for (int64_t r = 0; r < tile->at.rows; r++) {
        uint16_t random[TILE_COLS];
        int64_t row = tile->at.row + r;
        make_elements(out, row * out->cols + tile->at.col, tile->x[r], multiplier, value,
                      draw_row(random, &out->encoding, row, tile->at.col), tile->at.cols, format);
    }
    if (out->form == FORM_DECODED) return;
    uint8_t *scales = out->scales + mx_scale_offset(out->axis, tile->at.row, tile->at.col, out->cols);
    for (int64_t c = 0, step = square ? MX_BLOCK : 1; c < tile->at.cols; c += step) {
        *scales++ = codes[c];
    }
}

static void quantize_plainly(const QuantizedTensor *out, const Tile *tile, ScaleRounding rounding) {
#define ROWWISE(constant) tile_rowwise(out, tile, constant, rounding)
#define COLUMNWISE(constant) tile_columnwise(out, tile, constant, rounding)
    if (out->axis == AXIS_ROWWISE) {
        MX_WITH_CONSTANT_FORMAT(out->format, ROWWISE)
    } else {
        MX_WITH_CONSTANT_FORMAT(out->format, COLUMNWISE)
    }
#undef ROWWISE
#undef COLUMNWISE
}

// Returns whether a copy isn't one of those that quantize_bf16.c makes.
static bool wants_fp32_tiles(const QuantizedTensor *out) {
    return out && (out->axis == AXIS_SQUARE || !encoding_is_plain(&out->encoding));
}

static void quantize_rounded_to_odd(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Tile *tile,
                                    ScaleRounding rounding) {
    uint16_t odd[TILE_ROWS][TILE_COLS];
    for (int64_t r = 0; r < tile->at.rows; r++) {
        for (int64_t c = 0; c < TILE_COLS; c++) {
            odd[r][c] = to_bf16_odd(tile->x[r][c]);
        }
    }
    Bf16Tile as_bf16 = {.x = odd[0], .stride = TILE_COLS, .exact = tile->x[0], .at = tile->at};
    bf16_tile_quantize(rowwise, columnwise, &as_bf16, rounding);
}

void tile_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Tile *tile,
                   ScaleRounding rounding) {
    if (bf16_tiles_are_taken() && !wants_fp32_tiles(rowwise) && !wants_fp32_tiles(columnwise)) {
        quantize_rounded_to_odd(rowwise, columnwise, tile, rounding);
        return;
    }
    if (rowwise) quantize_plainly(rowwise, tile, rounding);
    if (columnwise) quantize_plainly(columnwise, tile, rounding);
}

// Sources

// What one call does, for all its tiles.
typedef struct {
    const QuantizedTensor *rowwise, *columnwise; // either may be NULL
    Source in;
    ScaleRounding rounding;
} Task;

// Fetches the same row of the tile that follows. Tiles take memory in an order that the processor's
// prefetcher doesn't foresee.
static void fetch_next(Tensor t, int64_t row, int64_t col) {
    const char *next = cpu_at(t, row, col + TILE_COLS);
    for (size_t i = 0; i < TILE_COLS * dtype_size(t.dtype); i += CACHE_LINE) {
        __builtin_prefetch(next + i, 0, 2);
    }
}

// Makes columns [col, col + count) of a row of what the source stands for, at most TILE_COLS, not
// yet rounded to x's dtype. Stores them where that is asked for.
static void make_row(float *out, const Source *in, int64_t row, int64_t col, int64_t count) {
    const Tensor x = in->x;
    if (x.dtype == FORMAT_FP32) fetch_next(x, row, col); // else bf16_tile_quantize does
    if (in->kind == SOURCE_ACTIVATION_BACKWARD) {
        fetch_next(in->dout, row, col);
        float input[TILE_COLS];
        cpu_load(input, cpu_at(x, row, col), x.dtype, count);
        cpu_load(out, cpu_at(in->dout, row, col), in->dout.dtype, count);
        row_activation_backward(out, input, count, in->activation);
    } else {
        cpu_load(out, cpu_at(x, row, col), x.dtype, count);
        if (in->kind == SOURCE_ACTIVATION) {
            float up[TILE_COLS];
            bool is_gated = in->activation == ACTIVATION_SWIGLU;
            if (is_gated) {
                fetch_next(x, row, source_cols(in) + col);
                cpu_load(up, cpu_at(x, row, source_cols(in) + col), x.dtype, count);
            }
            row_activation(out, is_gated ? up : NULL, count, in->activation);
        }
        if (in->kind == SOURCE_LAYERNORM) row_normalize(out, &in->norm, row, col, count);
    }
    if (in->stored.data) cpu_store(cpu_at(in->stored, row, col), in->stored.dtype, out, count);
}

void source_row(float *out, const Source *in, int64_t row, int64_t col, int64_t count) {
    if (in->x.dtype == FORMAT_BF16) fetch_next(in->x, row, col);
    make_row(out, in, row, col, count);
    if (in->x.dtype == FORMAT_BF16 && in->kind != SOURCE_TENSOR) cpu_round_to_bf16(out, count);
}

void source_bf16_rows(uint16_t out[][TILE_COLS], const Source *in, TilePlace at) {
    for (int64_t r = 0; r < at.rows; r++) {
        float values[TILE_COLS];
        make_row(values, in, at.row + r, at.col, at.cols);
        cpu_store(out[r], FORMAT_BF16, values, at.cols);
    }
}

static void tile_load(Tile *tile, const Task *task, TilePlace at) {
    tile_begin(tile, at);
    for (int64_t r = 0; r < at.rows; r++) {
        source_row(tile->x[r], &task->in, at.row + r, at.col, at.cols);
    }
}

// Without copies a source is only stored.
static bool takes_bf16(const Task *task) {
    if (task->in.x.dtype != FORMAT_BF16 || (!task->rowwise && !task->columnwise)) return false;
    return !wants_fp32_tiles(task->rowwise) && !wants_fp32_tiles(task->columnwise) && bf16_tiles_are_taken();
}

// Quantizes a tile that lies in the tensor as BF16, or is made here.
static void quantize_bf16(const Task *task, TilePlace at) {
    const Tensor x = task->in.x;
    if (task->in.kind == SOURCE_TENSOR) {
        Bf16Tile tile = {.x = cpu_at(x, at.row, at.col), .stride = x.stride, .below = x, .at = at};
        bf16_tile_quantize(task->rowwise, task->columnwise, &tile, task->rounding);
        return;
    }
    uint16_t made[TILE_ROWS][TILE_COLS];
    source_bf16_rows(made, &task->in, at);
    Bf16Tile tile = {.x = made[0], .stride = TILE_COLS, .below = x, .at = at};
    bf16_tile_quantize(task->rowwise, task->columnwise, &tile, task->rounding);
}

static void quantize_fp32(const Task *task, TilePlace at) {
    Tile tile;
    tile_load(&tile, task, at);
    if (task->rowwise || task->columnwise) tile_quantize(task->rowwise, task->columnwise, &tile, task->rounding);
}

static bool is_scaled(const QuantizedTensor *out) { return out && out->scaling != SCALING_MX; }

// Makes copies of which all are MX, and stores what is stored of the source.
static void quantize_mx(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                        ScaleRounding rounding) {
    Task task = {.rowwise = rowwise, .columnwise = columnwise, .in = in, .rounding = rounding};
    int64_t width = source_cols(&in);
    bool as_bf16 = takes_bf16(&task);
#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t row = 0; row < in.x.rows; row += TILE_ROWS) {
            for (int64_t col = 0; col < width; col += TILE_COLS) {
                TilePlace at = tile_place(in.x.rows, width, row, col);
                if (as_bf16) {
                    quantize_bf16(&task, at);
                } else {
                    quantize_fp32(&task, at);
                }
            }
        }
        quantize_end_streams();
    }
}

// Makes the MX copies first, then the others, and stores the source with these: it may be stored
// over what the MX copies read.
static void quantize_apart(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                           ScaleRounding rounding) {
    bool row_is_scaled = is_scaled(rowwise), column_is_scaled = is_scaled(columnwise);
    const QuantizedTensor *mx_row = row_is_scaled ? NULL : rowwise, *mx_column = column_is_scaled ? NULL : columnwise;
    Source read = in;
    read.stored.data = NULL;
    if (mx_row || mx_column) quantize_mx(mx_row, mx_column, read, rounding);
    quantize_scaled(row_is_scaled ? rowwise : NULL, column_is_scaled ? columnwise : NULL, in);
}

void cpu_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                  ScaleRounding rounding) {
    bool is_made = in.kind != SOURCE_TENSOR;
    check_form(rowwise);
    check_form(columnwise);
    if (in.sums && is_made && !in.stored.data) in.stored = in.dout;
    if (is_scaled(rowwise) || is_scaled(columnwise)) {
        quantize_apart(rowwise, columnwise, in, rounding);
    } else {
        quantize_mx(rowwise, columnwise, in, rounding);
    }
    if (in.sums) cpu_bias_backward(in.sums, is_made ? in.stored : in.x);
}
