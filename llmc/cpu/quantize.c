/*
Quantizer: BF16 or FP32 in, rowwise and/or columnwise MX copies out, in one pass over the input.

The input is taken in tiles of 32 rows x 128 columns, which hold whole blocks of either axis. Where
the processor has AVX-512, tiles of BF16 are read as they are, or made as BF16; else, and for FP32,
they are held as FP32 in the first-level cache, filled up at the edges with zeros, which change no
block's amax and are not written out.
*/
#include "cpu.h"
#include "llmc/base/util.h" // die
#include "quantize_avx512.h"
#include "rows.h"

#include <math.h>

enum { TILE_ROWS = MX_BLOCK, TILE_COLS = 4 * MX_BLOCK };

typedef struct {
    float x[TILE_ROWS][TILE_COLS];
    int64_t row, col;   // of the tile's first element
    int64_t rows, cols; // that are in the tensor
} Tile;

static void round_to_bf16(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        x[i] = mx_from_bf16(mx_to_bf16(x[i]));
    }
}

// What one call does, for all its tiles.
typedef struct {
    const QuantizedTensor *rowwise, *columnwise; // either may be NULL
    Source in;
    AdamWConstants adamw;
    ScaleRounding rounding;
} Task;

// Columns [col, col + count) of a row of what the source makes, at most TILE_COLS, not yet rounded
// to x's dtype.
static void make_row(float *out, const Task *task, int64_t row, int64_t col, int64_t count) {
    const Source *in = &task->in;
    const Tensor x = in->x;
    if (in->kind == SOURCE_ACTIVATION_BACKWARD) {
        float input[TILE_COLS];
        cpu_load(input, cpu_at(x, row, col), x.dtype, count);
        cpu_load(out, cpu_at(in->dout, row, col), in->dout.dtype, count);
        row_activation_backward(out, input, count, in->activation);
    } else if (in->kind == SOURCE_ADAMW) {
        int64_t at = row * x.cols + col;
        float *master = (float *)x.data + at;
        row_adamw(master, in->moment1 + at, in->moment2 + at, in->gradient + at, count, &task->adamw);
        memcpy(out, master, (size_t)count * sizeof(float));
    } else {
        cpu_load(out, cpu_at(x, row, col), x.dtype, count);
        if (in->kind == SOURCE_ACTIVATION) {
            float up[TILE_COLS];
            bool is_gated = in->activation == ACTIVATION_SWIGLU;
            if (is_gated) cpu_load(up, cpu_at(x, row, source_cols(in) + col), x.dtype, count);
            row_activation(out, is_gated ? up : NULL, count, in->activation);
        }
        if (in->kind == SOURCE_LAYERNORM) row_normalize(out, &in->norm, row, col, count);
    }
    if (in->stored.data) cpu_store(cpu_at(in->stored, row, col), in->stored.dtype, out, count);
}

static void tile_load(Tile *tile, const Task *task, int64_t row, int64_t col) {
    const Tensor x = task->in.x;
    int64_t width = source_cols(&task->in);
    tile->row = row;
    tile->col = col;
    tile->rows = x.rows - row < TILE_ROWS ? x.rows - row : TILE_ROWS;
    tile->cols = width - col < TILE_COLS ? width - col : TILE_COLS;
    if (tile->rows < TILE_ROWS || tile->cols < TILE_COLS) memset(tile->x, 0, sizeof(tile->x));
    for (int64_t r = 0; r < tile->rows; r++) {
        make_row(tile->x[r], task, row + r, col, tile->cols);
        if (x.dtype == FORMAT_BF16 && task->in.kind != SOURCE_TENSOR) round_to_bf16(tile->x[r], tile->cols);
    }
}

static inline uint8_t row_block_scale(const float *x, Format format, ScaleRounding rounding) {
    uint32_t amax = 0;
    for (int i = 0; i < MX_BLOCK; i++) {
        uint32_t magnitude = mx_magnitude_bits(x[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return mx_scale_code(format, rounding, amax);
}

static inline void column_block_scales(uint8_t *codes, const Tile *tile, Format format, ScaleRounding rounding) {
    uint32_t amax[TILE_COLS] = {0};
    for (int r = 0; r < TILE_ROWS; r++) {
        for (int c = 0; c < TILE_COLS; c++) {
            uint32_t magnitude = mx_magnitude_bits(tile->x[r][c]);
            amax[c] = magnitude > amax[c] ? magnitude : amax[c];
        }
    }
    for (int c = 0; c < TILE_COLS; c++) {
        codes[c] = mx_scale_code(format, rounding, amax[c]);
    }
}

// Elements `at` on of a copy, in its form; each of `codes` is the scale of `per_code` of them.
MX_FUNCTION void store_elements(const QuantizedTensor *out, int64_t at, const uint8_t *elements, const uint8_t *codes,
                                int64_t per_code, int64_t count, Format format) {
    if (out->form != FORM_DECODED) {
        memcpy(out->elements + at, elements, (size_t)count);
        return;
    }
    uint16_t *values = (uint16_t *)out->elements + at;
    for (int64_t i = 0; i < count; i++) {
        values[i] = mx_to_bf16(mx_decode(format, elements[i]) * mx_scale_value(codes[i / per_code]));
    }
}

MX_FUNCTION void tile_rowwise(const QuantizedTensor *out, const Tile *tile, Format format, ScaleRounding rounding) {
    int64_t blocks_in_row = mx_num_blocks(out->cols), blocks = mx_num_blocks(tile->cols);
    for (int64_t r = 0; r < tile->rows; r++) {
        uint8_t elements[TILE_COLS], codes[TILE_COLS / MX_BLOCK];
        int64_t row = tile->row + r;
        for (int64_t block = 0; block < blocks; block++) {
            const float *x = tile->x[r] + block * MX_BLOCK;
            codes[block] = row_block_scale(x, format, rounding);
            float reciprocal = mx_scale_reciprocal(codes[block]);
            for (int i = 0; i < MX_BLOCK; i++) {
                elements[block * MX_BLOCK + i] = mx_encode(format, x[i] * reciprocal);
            }
        }
        store_elements(out, row * out->cols + tile->col, elements, codes, MX_BLOCK, tile->cols, format);
        if (out->form == FORM_DECODED) continue;
        memcpy(out->scales + row * blocks_in_row + tile->col / MX_BLOCK, codes, (size_t)blocks);
    }
}

MX_FUNCTION void tile_columnwise(const QuantizedTensor *out, const Tile *tile, Format format, ScaleRounding rounding) {
    uint8_t codes[TILE_COLS];
    float reciprocal[TILE_COLS];
    column_block_scales(codes, tile, format, rounding);
    for (int c = 0; c < TILE_COLS; c++) {
        reciprocal[c] = mx_scale_reciprocal(codes[c]);
    }
    for (int64_t r = 0; r < tile->rows; r++) {
        uint8_t elements[TILE_COLS];
        for (int c = 0; c < TILE_COLS; c++) {
            elements[c] = mx_encode(format, tile->x[r][c] * reciprocal[c]);
        }
        store_elements(out, (tile->row + r) * out->cols + tile->col, elements, codes, 1, tile->cols, format);
    }
    if (out->form == FORM_DECODED) return;
    memcpy(out->scales + tile->row / MX_BLOCK * out->cols + tile->col, codes, (size_t)tile->cols);
}

MX_FUNCTION void tile_square(const QuantizedTensor *out, const Tile *tile, Format format, ScaleRounding rounding) {
    enum { BLOCKS = TILE_COLS / MX_BLOCK };
    uint8_t codes[BLOCKS];
    float reciprocal[BLOCKS];
    for (int block = 0; block < BLOCKS; block++) {
        uint32_t amax = 0;
        for (int r = 0; r < TILE_ROWS; r++) {
            for (int c = block * MX_BLOCK; c < (block + 1) * MX_BLOCK; c++) {
                uint32_t magnitude = mx_magnitude_bits(tile->x[r][c]);
                amax = magnitude > amax ? magnitude : amax;
            }
        }
        codes[block] = mx_scale_code(format, rounding, amax);
        reciprocal[block] = mx_scale_reciprocal(codes[block]);
    }
    for (int64_t r = 0; r < tile->rows; r++) {
        uint8_t elements[TILE_COLS];
        for (int c = 0; c < TILE_COLS; c++) {
            elements[c] = mx_encode(format, tile->x[r][c] * reciprocal[c / MX_BLOCK]);
        }
        store_elements(out, (tile->row + r) * out->cols + tile->col, elements, codes, MX_BLOCK, tile->cols, format);
    }
    if (out->form == FORM_DECODED) return;
    uint8_t *scales = out->scales + mx_scale_offset(AXIS_SQUARE, tile->row, tile->col, out->cols);
    memcpy(scales, codes, (size_t)mx_num_blocks(tile->cols));
}

static void tile_quantize(const QuantizedTensor *out, const Tile *tile, ScaleRounding rounding) {
#define ROWWISE(constant) tile_rowwise(out, tile, constant, rounding)
#define COLUMNWISE(constant) tile_columnwise(out, tile, constant, rounding)
#define SQUARE(constant) tile_square(out, tile, constant, rounding)
    if (out->axis == AXIS_ROWWISE) {
        MX_WITH_CONSTANT_FORMAT(out->format, ROWWISE)
    } else if (out->axis == AXIS_SQUARE) {
        MX_WITH_CONSTANT_FORMAT(out->format, SQUARE)
    } else {
        MX_WITH_CONSTANT_FORMAT(out->format, COLUMNWISE)
    }
#undef ROWWISE
#undef COLUMNWISE
#undef SQUARE
}

#ifdef HAVE_AVX512_QUANTIZE

// Tiles of BF16 are two blocks wide, whose codes fill a cache line.
enum { PAIR_COLS = 2 * MX_BLOCK };

typedef struct {
    const uint16_t *x;     // the tile's first element
    const uint16_t *share; // see fetched_share
    int64_t stride;        // between its rows
    int64_t row, col;      // of the tile's first element in the tensor
    int64_t rows, cols;    // that are in the tensor
} Bf16Tile;

// Of the tile's blocks, as BF16 bits, in either axis: of block j of row r, and of column c of block
// column j.
typedef struct {
    uint16_t rows[2][MX_BLOCK], columns[2][MX_BLOCK];
} Maxima;

// Whole vectors are nearly all, and quicker without a mask.
MX_FUNCTION __m512i load_lanes(const uint16_t *x, bool whole, __mmask32 lanes) {
    return whole ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16(lanes, x);
}

static __mmask32 lanes_of(int64_t count) {
    return count >= MX_BLOCK ? 0xFFFFFFFFu : count <= 0 ? 0 : (1u << count) - 1;
}

// Where in a copy or in the input the tile's share of the 32 rows below begins, in elements. Each
// tile fetches, one after the other, as many cache lines of those rows as it has of its own: tiles
// take memory in an order that the processor's prefetcher doesn't foresee.
static int64_t fetched_share(int64_t row, int64_t col, int64_t stride) {
    return (row + TILE_ROWS) * stride + col * TILE_ROWS;
}

MX_FUNCTION void find_maxima(Maxima *maxima, Bf16Tile tile, bool whole) {
    for (int j = 0; j < 2; j++) {
        __mmask32 lanes = lanes_of(tile.cols - j * MX_BLOCK);
        __m512i magnitudes[TILE_ROWS], columns = _mm512_setzero_si512();
        for (int64_t r = 0; r < TILE_ROWS; r++) {
            const uint16_t *x = tile.x + r * tile.stride + j * MX_BLOCK;
            _mm_prefetch((const char *)(tile.share + r * PAIR_COLS + j * MX_BLOCK), _MM_HINT_T1);
            magnitudes[r] =
                whole || r < tile.rows ? bf16_magnitudes(load_lanes(x, whole, lanes)) : _mm512_setzero_si512();
            columns = _mm512_max_epu16(columns, magnitudes[r]);
        }
        _mm512_storeu_si512(maxima->rows[j], largest_of_each(magnitudes));
        _mm512_storeu_si512(maxima->columns[j], columns);
    }
}

// A copy of a tile: where it goes, and of its 64 blocks, as in Maxima, the scale codes and what
// encode_bf16 takes.
typedef struct {
    uint8_t *elements; // of the tile's first row; NULL: nothing is left to write
    uint8_t *share;    // see fetched_share; where it is streamed none is needed
    bool decoded;      // FORM_DECODED
    bool streamed;     // past the caches: whole cache lines, of a copy that the caches wouldn't hold until it is used
    uint8_t codes[2][MX_BLOCK];
    uint16_t rebias[2][MX_BLOCK];
} TileCopy;

// 64 columns of row `r` of the tile, 32 of a scale each side.
MX_FUNCTION void store_codes(const TileCopy *copy, int64_t r, int64_t cols, __m512i codes, bool whole,
                             const __mmask32 lanes[2]) {
    uint8_t *out = copy->elements + r * cols;
    if (whole && copy->streamed) {
        _mm512_stream_si512((void *)out, codes);
        return;
    }
    __builtin_prefetch(copy->share + r * PAIR_COLS, 1);
    if (whole) {
        _mm512_storeu_si512(out, codes);
    } else {
        _mm512_mask_storeu_epi8(out, _mm512_kunpackd(lanes[1], lanes[0]), codes);
    }
}

MX_FUNCTION void store_values(const TileCopy *copy, int64_t r, int64_t cols, const __m512i values[2], bool whole,
                              const __mmask32 lanes[2]) {
    uint16_t *out = (uint16_t *)copy->elements + r * cols;
    for (int j = 0; j < 2; j++) {
        if (whole) {
            _mm512_storeu_si512(out + j * MX_BLOCK, values[j]);
        } else {
            _mm512_mask_storeu_epi16(out + j * MX_BLOCK, lanes[j], values[j]);
        }
    }
}

MX_FUNCTION void encode_row(const TileCopy *copy, int64_t r, int64_t cols, const EncodeBf16 *constants,
                            const DecodeBf16 *decoding, const Bf16Values *values, __m512i rebias, __m512i second_rebias,
                            bool whole, const __mmask32 lanes[2]) {
    __m512i codes = encode_bf16(constants, values, rebias, second_rebias);
    if (!copy->decoded) {
        store_codes(copy, r, cols, codes, whole, lanes);
        return;
    }
    __m512i decoded[2] = {decode_bf16(decoding, _mm512_castsi512_si256(codes), rebias),
                          decode_bf16(decoding, _mm512_extracti64x4_epi64(codes, 1), second_rebias)};
    store_values(copy, r, cols, decoded, whole, lanes);
}

static void encode_plainly(const TileCopy *copy, const QuantizedTensor *out, const Bf16Tile *tile) {
    bool rowwise = out->axis == AXIS_ROWWISE;
    for (int64_t r = 0; r < tile->rows; r++) {
        uint8_t elements[PAIR_COLS], codes[PAIR_COLS];
        for (int64_t c = 0; c < tile->cols; c++) {
            codes[c] = copy->codes[c / MX_BLOCK][rowwise ? r : c % MX_BLOCK];
            float value = mx_from_bf16(tile->x[r * tile->stride + c]);
            elements[c] = mx_encode(out->format, value * mx_scale_reciprocal(codes[c]));
        }
        store_elements(out, (tile->row + r) * out->cols + tile->col, elements, codes, 1, tile->cols, out->format);
    }
}

static void store_scales(const TileCopy *copy, const QuantizedTensor *out, const Bf16Tile *tile) {
    if (out->axis == AXIS_COLUMNWISE) {
        uint8_t *scales = out->scales + tile->row / MX_BLOCK * out->cols + tile->col;
        memcpy(scales, copy->codes, (size_t)tile->cols);
        return;
    }
    int64_t blocks_in_row = mx_num_blocks(out->cols), blocks = mx_num_blocks(tile->cols);
    uint8_t *scales = out->scales + tile->row * blocks_in_row + tile->col / MX_BLOCK;
    for (int64_t r = 0; r < tile->rows; r++) {
        for (int64_t j = 0; j < blocks; j++) {
            scales[r * blocks_in_row + j] = copy->codes[j][r];
        }
    }
}

// A copy as large as a core's own caches. Lines that are written past them needn't be read first.
enum { STREAMED_BYTES = 1 << 20 };

static bool is_streamed(const QuantizedTensor *out) {
    return out->rows * out->cols >= STREAMED_BYTES && out->cols % PAIR_COLS == 0 &&
           (uintptr_t)out->elements % PAIR_COLS == 0;
}

// Writes the scales, and the elements too where a scale isn't usual.
MX_FUNCTION void begin_copy(TileCopy *copy, const QuantizedTensor *out, const Bf16Tile *tile,
                            const uint16_t maxima[2][MX_BLOCK], Format format, ScaleRounding rounding) {
    if (!out) {
        *copy = (TileCopy){0};
        return;
    }
    uint32_t unusual = 0;
    for (int j = 0; j < 2; j++) {
        for (int i = 0; i < MX_BLOCK; i++) {
            copy->codes[j][i] = mx_scale_code(format, rounding, (uint32_t)maxima[j][i] << 16);
            copy->rebias[j][i] = rebias_of(format, copy->codes[j][i], maxima[j][i]);
            unusual |= !scale_is_usual(copy->codes[j][i], maxima[j][i]);
        }
    }
    copy->decoded = out->form == FORM_DECODED;
    copy->elements = out->elements + (tile->row * out->cols + tile->col) * (copy->decoded ? 2 : 1);
    copy->share = out->elements + fetched_share(tile->row, tile->col, out->cols);
    copy->streamed = is_streamed(out);
    if (!copy->decoded) store_scales(copy, out, tile);
    if (unusual) {
        encode_plainly(copy, out, tile);
        copy->elements = NULL;
    }
}

MX_FUNCTION void quantize_tile(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Tile *tile,
                               bool whole, Format format, ScaleRounding rounding) {
    Maxima maxima;
    TileCopy by_row, by_column;
    find_maxima(&maxima, *tile, whole);
    begin_copy(&by_row, rowwise, tile, maxima.rows, format, rounding);
    begin_copy(&by_column, columnwise, tile, maxima.columns, format, rounding);
    EncodeBf16 constants = encode_bf16_of(format);
    DecodeBf16 decoding = decode_bf16_of(format);
    int64_t cols = rowwise ? rowwise->cols : columnwise->cols;
    __mmask32 lanes[2] = {lanes_of(tile->cols), lanes_of(tile->cols - MX_BLOCK)};
    __m512i of_columns[2] = {_mm512_loadu_si512(by_column.rebias[0]), _mm512_loadu_si512(by_column.rebias[1])};
    for (int64_t r = 0; r < tile->rows; r++) {
        const uint16_t *x = tile->x + r * tile->stride;
        Bf16Values values =
            bf16_values(&constants, load_lanes(x, whole, lanes[0]), load_lanes(x + MX_BLOCK, whole, lanes[1]));
        if (by_row.elements) {
            __m512i first = _mm512_set1_epi16((short)by_row.rebias[0][r]);
            __m512i second = _mm512_set1_epi16((short)by_row.rebias[1][r]);
            encode_row(&by_row, r, cols, &constants, &decoding, &values, first, second, whole, lanes);
        }
        if (by_column.elements) {
            encode_row(&by_column, r, cols, &constants, &decoding, &values, of_columns[0], of_columns[1], whole, lanes);
        }
    }
}

static void quantize_any_tile(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Tile *tile,
                              ScaleRounding rounding) {
    Format format = rowwise ? rowwise->format : columnwise->format;
    bool whole = tile->rows == TILE_ROWS && tile->cols == PAIR_COLS;
#define QUANTIZE(constant)                                                  \
    if (whole)                                                              \
        quantize_tile(rowwise, columnwise, tile, true, constant, rounding); \
    else                                                                    \
        quantize_tile(rowwise, columnwise, tile, false, constant, rounding);
    MX_WITH_CONSTANT_FORMAT(format, QUANTIZE)
#undef QUANTIZE
}

static void quantize_bf16_tile(const Task *task, const Bf16Tile *tile) {
    const QuantizedTensor *rowwise = task->rowwise, *columnwise = task->columnwise;
    if (rowwise && columnwise && rowwise->format != columnwise->format) {
        quantize_any_tile(rowwise, NULL, tile, task->rounding);
        quantize_any_tile(NULL, columnwise, tile, task->rounding);
    } else if (rowwise || columnwise) {
        quantize_any_tile(rowwise, columnwise, tile, task->rounding);
    }
}

// The tiles of TILE_COLS columns: in the tensor, or made in `made`.
static bool quantize_bf16(const Task *task, int64_t row, int64_t col) {
    const Tensor x = task->in.x;
    if (x.dtype != FORMAT_BF16 || (task->rowwise && task->rowwise->axis == AXIS_SQUARE)) return false;
    bool is_made = task->in.kind != SOURCE_TENSOR;
    uint16_t made[TILE_ROWS][TILE_COLS];
    int64_t width = source_cols(&task->in);
    int64_t rows = x.rows - row < TILE_ROWS ? x.rows - row : TILE_ROWS;
    int64_t cols = width - col < TILE_COLS ? width - col : TILE_COLS;
    for (int64_t r = 0; r < rows && is_made; r++) {
        float values[TILE_COLS];
        make_row(values, task, row + r, col, cols);
        cpu_store(made[r], FORMAT_BF16, values, cols);
    }
    for (int64_t c = 0; c < cols; c += PAIR_COLS) {
        Bf16Tile tile = {.x = is_made ? &made[0][c] : cpu_at(x, row, col + c),
                         .stride = is_made ? TILE_COLS : x.stride,
                         .row = row,
                         .col = col + c,
                         .rows = rows,
                         .cols = cols - c < PAIR_COLS ? cols - c : PAIR_COLS};
        tile.share = (const uint16_t *)x.data + fetched_share(row, col + c, x.stride);
        quantize_bf16_tile(task, &tile);
    }
    return true;
}

static void order_streamed_stores(void) { _mm_sfence(); }

#else

static bool quantize_bf16(const Task *task, int64_t row, int64_t col) {
    (void)task, (void)row, (void)col;
    return false;
}

static void order_streamed_stores(void) {}

#endif

// Without copies there are no tiles: rows are made as memory has them.
static void store_rows(const Task *task) {
    const Tensor x = task->in.x;
    int64_t width = source_cols(&task->in);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < x.rows; row++) {
        for (int64_t col = 0; col < width; col += TILE_COLS) {
            float made[TILE_COLS];
            make_row(made, task, row, col, width - col < TILE_COLS ? width - col : TILE_COLS);
        }
    }
}

void cpu_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                  ScaleRounding rounding) {
    if ((rowwise && rowwise->form == FORM_SWIZZLED) || (columnwise && columnwise->form == FORM_SWIZZLED)) {
        die("internal error: the CPU's quantizer was asked for swizzled scales");
    }
    Task task = {.rowwise = rowwise, .columnwise = columnwise, .in = in, .rounding = rounding};
    if (in.kind == SOURCE_ADAMW) task.adamw = adamw_constants(&in.adamw);
    if (!rowwise && !columnwise) {
        store_rows(&task);
        return;
    }
    int64_t width = source_cols(&in);
#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t row = 0; row < in.x.rows; row += TILE_ROWS) {
            for (int64_t col = 0; col < width; col += TILE_COLS) {
                if (quantize_bf16(&task, row, col)) continue;
                Tile tile;
                tile_load(&tile, &task, row, col);
                if (rowwise) tile_quantize(rowwise, &tile, rounding);
                if (columnwise) tile_quantize(columnwise, &tile, rounding);
            }
        }
        order_streamed_stores();
    }
}

MX_FUNCTION void decode_row_block(float *out, const uint8_t *elements, float scale, Format format, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = mx_decode(format, elements[i]) * scale;
    }
}

// Columns [first, first + count) of a row; `first` is a multiple of MX_BLOCK.
MX_FUNCTION void decode_row(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count,
                            Format format) {
    const uint8_t *elements = in->elements + row * in->cols + first;
    const uint8_t *scales = in->scales + mx_scale_offset(in->axis, row, first, in->cols);
    if (in->axis != AXIS_COLUMNWISE) {
        int64_t whole = count / MX_BLOCK * MX_BLOCK;
        for (int64_t c = 0; c < whole; c += MX_BLOCK) {
            decode_row_block(out + c, elements + c, mx_scale_value(scales[c / MX_BLOCK]), format, MX_BLOCK);
        }
        if (whole < count) {
            float scale = mx_scale_value(scales[whole / MX_BLOCK]);
            decode_row_block(out + whole, elements + whole, scale, format, count - whole);
        }
    } else {
        for (int64_t c = 0; c < count; c++) {
            out[c] = mx_decode(format, elements[c]) * mx_scale_value(scales[c]);
        }
    }
}

// Columns that are converted at a time: they fit the first-level cache.
enum { CONVERT_COLS = 2048 };

void cpu_dequantize(Tensor out, const QuantizedTensor *in, Format values) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in->rows; row++) {
        for (int64_t first = 0; first < in->cols; first += CONVERT_COLS) {
            float x[CONVERT_COLS];
            int64_t count = in->cols - first < CONVERT_COLS ? in->cols - first : CONVERT_COLS;
#define DECODE(constant) decode_row(x, in, row, first, count, constant)
            MX_WITH_CONSTANT_FORMAT(in->format, DECODE)
#undef DECODE
            if (values == FORMAT_BF16 && out.dtype == FORMAT_FP32) round_to_bf16(x, count);
            cpu_store(cpu_at(out, row, first), out.dtype, x, count);
        }
    }
}

void cpu_convert(Tensor out, Tensor in) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in.rows; row++) {
        for (int64_t first = 0; first < in.cols; first += CONVERT_COLS) {
            float x[CONVERT_COLS];
            int64_t count = in.cols - first < CONVERT_COLS ? in.cols - first : CONVERT_COLS;
            cpu_load(x, cpu_at(in, row, first), in.dtype, count);
            cpu_store(cpu_at(out, row, first), out.dtype, x, count);
        }
    }
}

// One block: `rows` x `cols` elements of a tile.
static void block_stats(QuantStats *stats, const float *x, int64_t rows, int64_t cols, Format format,
                        ScaleRounding rounding) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t magnitude = mx_magnitude_bits(x[i / cols * TILE_COLS + i % cols]);
        amax = magnitude > amax ? magnitude : amax;
    }
    uint8_t code = mx_scale_code(format, rounding, amax);
    float scale = mx_scale_value(code), reciprocal = mx_scale_reciprocal(code);
    uint32_t max_code = mx_element(format).max_code;
    uint32_t magnitude_mask = (1u << mx_element(format).sign_bit) - 1;
    float max = mx_decode(format, (uint8_t)max_code);
    for (int64_t i = 0; i < rows * cols; i++) {
        float value = x[i / cols * TILE_COLS + i % cols];
        uint8_t element = mx_encode(format, value * reciprocal);
        double error = (double)(mx_decode(format, element) * scale) - value;
        uint32_t magnitude = element & magnitude_mask;
        stats->signal += (double)value * value;
        stats->noise += error * error;
        stats->clamped += fabsf(value * reciprocal) > max;
        stats->at_max += magnitude == max_code;
        stats->flushed += magnitude == 0 && value != 0;
    }
    stats->elements += rows * cols;
    stats->blocks++;
    stats->blocks_unlike_rceil += code != mx_scale_code(format, SCALE_RCEIL, amax);
    if (amax > mx_magnitude_bits((float)stats->amax)) stats->amax = mx_bits_float(amax);
}

static void tile_stats(QuantStats *stats, const Tile *tile, Axis axis, Format format, ScaleRounding rounding) {
    int64_t height = axis == AXIS_ROWWISE ? 1 : tile->rows, width = axis == AXIS_COLUMNWISE ? 1 : MX_BLOCK;
    for (int64_t r = 0; r < tile->rows; r += height) {
        for (int64_t c = 0; c < tile->cols; c += width) {
            int64_t cols = tile->cols - c < width ? tile->cols - c : width;
            block_stats(stats, &tile->x[r][c], height, cols, format, rounding);
        }
    }
}

static void add_stats(QuantStats *sum, const QuantStats *part) {
    if (mx_magnitude_bits((float)part->amax) > mx_magnitude_bits((float)sum->amax)) sum->amax = part->amax;
    sum->signal += part->signal;
    sum->noise += part->noise;
    sum->elements += part->elements;
    sum->clamped += part->clamped;
    sum->at_max += part->at_max;
    sum->flushed += part->flushed;
    sum->blocks += part->blocks;
    sum->blocks_unlike_rceil += part->blocks_unlike_rceil;
}

void cpu_quantize_stats(QuantStats *stats, Tensor in, Axis axis, Format format, ScaleRounding rounding) {
    // Rows are cut into parts whose number doesn't depend on the number of threads, and neither do
    // the sums.
    enum { PARTS = 64 };
    const Task task = {.in = source_tensor(in)};
    QuantStats parts[PARTS] = {0};
    int64_t tiles = (in.rows + TILE_ROWS - 1) / TILE_ROWS, part_rows = (tiles + PARTS - 1) / PARTS * TILE_ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < PARTS; part++) {
        int64_t end = (part + 1) * part_rows < in.rows ? (part + 1) * part_rows : in.rows;
        for (int64_t row = part * part_rows; row < end; row += TILE_ROWS) {
            for (int64_t col = 0; col < in.cols; col += TILE_COLS) {
                Tile tile;
                tile_load(&tile, &task, row, col);
                tile_stats(&parts[part], &tile, axis, format, rounding);
            }
        }
    }
    for (int part = 0; part < PARTS; part++) {
        add_stats(stats, &parts[part]);
    }
}
