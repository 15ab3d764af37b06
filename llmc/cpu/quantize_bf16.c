/*
Quantizes tiles of BF16 with AVX-512: finds the largest magnitudes of both axes' blocks in one pass,
encodes in a second, which finds the tile in the first-level cache. The inner loops are in
quantize_avx512.h.
*/
#include "quantize.h"
#include "quantize_avx512.h"

#ifdef HAVE_AVX512_QUANTIZE

// A tile is taken by pairs of blocks, whose codes fill a cache line.
enum { PAIR_COLS = 2 * MX_BLOCK };

typedef struct {
    const uint16_t *x;     // the pair's first element
    const uint16_t *share; // see fetched_share
    int64_t stride;        // between its rows
    TilePlace at;
} Bf16Pair;

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

MX_FUNCTION void find_maxima(Maxima *maxima, Bf16Pair tile, bool whole) {
    for (int j = 0; j < 2; j++) {
        __mmask32 lanes = lanes_of(tile.at.cols - j * MX_BLOCK);
        __m512i magnitudes[TILE_ROWS], columns = _mm512_setzero_si512();
        for (int64_t r = 0; r < TILE_ROWS; r++) {
            const uint16_t *x = tile.x + r * tile.stride + j * MX_BLOCK;
            _mm_prefetch((const char *)(tile.share + r * PAIR_COLS + j * MX_BLOCK), _MM_HINT_T1);
            magnitudes[r] =
                whole || r < tile.at.rows ? bf16_magnitudes(load_lanes(x, whole, lanes)) : _mm512_setzero_si512();
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

static void encode_plainly(const TileCopy *copy, const QuantizedTensor *out, const Bf16Pair *tile) {
    bool rowwise = out->axis == AXIS_ROWWISE;
    for (int64_t r = 0; r < tile->at.rows; r++) {
        uint8_t elements[PAIR_COLS], codes[PAIR_COLS];
        for (int64_t c = 0; c < tile->at.cols; c++) {
            codes[c] = copy->codes[c / MX_BLOCK][rowwise ? r : c % MX_BLOCK];
            float value = mx_from_bf16(tile->x[r * tile->stride + c]);
            elements[c] = mx_encode(out->format, value * mx_scale_reciprocal(codes[c]));
        }
        store_elements(out, (tile->at.row + r) * out->cols + tile->at.col, elements, codes, 1, tile->at.cols,
                       out->format);
    }
}

static void store_scales(const TileCopy *copy, const QuantizedTensor *out, const Bf16Pair *tile) {
    if (out->axis == AXIS_COLUMNWISE) {
        uint8_t *scales = out->scales + tile->at.row / MX_BLOCK * out->cols + tile->at.col;
        memcpy(scales, copy->codes, (size_t)tile->at.cols);
        return;
    }
    int64_t blocks_in_row = mx_num_blocks(out->cols), blocks = mx_num_blocks(tile->at.cols);
    uint8_t *scales = out->scales + tile->at.row * blocks_in_row + tile->at.col / MX_BLOCK;
    for (int64_t r = 0; r < tile->at.rows; r++) {
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
MX_FUNCTION void begin_copy(TileCopy *copy, const QuantizedTensor *out, const Bf16Pair *tile,
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
    copy->elements = out->elements + (tile->at.row * out->cols + tile->at.col) * (copy->decoded ? 2 : 1);
    copy->share = out->elements + fetched_share(tile->at.row, tile->at.col, out->cols);
    copy->streamed = is_streamed(out);
    if (!copy->decoded) store_scales(copy, out, tile);
    if (unusual) {
        encode_plainly(copy, out, tile);
        copy->elements = NULL;
    }
}

MX_FUNCTION void quantize_both(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Pair *tile,
                               bool whole, Format format, ScaleRounding rounding) {
    Maxima maxima;
    TileCopy by_row, by_column;
    find_maxima(&maxima, *tile, whole);
    begin_copy(&by_row, rowwise, tile, maxima.rows, format, rounding);
    begin_copy(&by_column, columnwise, tile, maxima.columns, format, rounding);
    EncodeBf16 constants = encode_bf16_of(format);
    DecodeBf16 decoding = decode_bf16_of(format);
    int64_t cols = rowwise ? rowwise->cols : columnwise->cols;
    __mmask32 lanes[2] = {lanes_of(tile->at.cols), lanes_of(tile->at.cols - MX_BLOCK)};
    __m512i of_columns[2] = {_mm512_loadu_si512(by_column.rebias[0]), _mm512_loadu_si512(by_column.rebias[1])};
    for (int64_t r = 0; r < tile->at.rows; r++) {
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

static void quantize_in_one_format(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise,
                                   const Bf16Pair *tile, ScaleRounding rounding) {
    Format format = rowwise ? rowwise->format : columnwise->format;
    bool whole = tile->at.rows == TILE_ROWS && tile->at.cols == PAIR_COLS;
#define QUANTIZE(constant)                                                  \
    if (whole)                                                              \
        quantize_both(rowwise, columnwise, tile, true, constant, rounding); \
    else                                                                    \
        quantize_both(rowwise, columnwise, tile, false, constant, rounding);
    MX_WITH_CONSTANT_FORMAT(format, QUANTIZE)
#undef QUANTIZE
}

bool bf16_tiles_are_taken(void) { return true; }

static void quantize_pair(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Pair *pair,
                          ScaleRounding rounding) {
    if (rowwise && columnwise && rowwise->format != columnwise->format) {
        quantize_in_one_format(rowwise, NULL, pair, rounding);
        quantize_in_one_format(NULL, columnwise, pair, rounding);
    } else {
        quantize_in_one_format(rowwise, columnwise, pair, rounding);
    }
}

void bf16_tile_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const uint16_t *x,
                        int64_t stride, TilePlace at, Tensor below, ScaleRounding rounding) {
    for (int64_t c = 0; c < at.cols; c += PAIR_COLS) {
        TilePlace place = {at.row, at.col + c, at.rows, at.cols - c < PAIR_COLS ? at.cols - c : PAIR_COLS};
        int64_t share = fetched_share(place.row, place.col, below.stride);
        Bf16Pair pair = {x + c, (const uint16_t *)below.data + share, stride, place};
        quantize_pair(rowwise, columnwise, &pair, rounding);
    }
}

void bf16_tiles_end(void) { _mm_sfence(); }

#else

bool bf16_tiles_are_taken(void) { return false; }

void bf16_tile_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const uint16_t *x,
                        int64_t stride, TilePlace at, Tensor below, ScaleRounding rounding) {
    (void)rowwise, (void)columnwise, (void)x, (void)stride, (void)at, (void)below, (void)rounding;
}

void bf16_tiles_end(void) {}

#endif
