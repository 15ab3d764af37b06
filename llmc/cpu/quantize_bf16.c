/*
Quantizes tiles of BF16 where the processor has vectors: finds the largest magnitudes of both axes'
blocks in one pass, encodes in a second, which finds the tile in the first-level cache. The inner
loops are in quantize_vectors.h. Blocks of 128 whose scales are powers of two are encoded by the
same loops, four tiles at a time, and rows of products that were rounded to odd.
*/
#include "quantize.h"
#include "quantize_vectors.h"

#ifdef VECTOR_BYTES

// A tile is taken by pairs of blocks, whose codes fill a cache line.
enum { PAIR_COLS = 2 * MX_BLOCK };

typedef struct {
    const uint16_t *x;     // the pair's first element; all 32 rows and 64 columns can be read
    int64_t stride;        // between its rows
    const uint16_t *share; // what is fetched on the way: fetched_share, or of a part the one to the right
    int64_t share_stride;  // between what its rows fetch
    const float *exact;    // see Bf16Tile
    int64_t exact_stride;
    TilePlace at;
} Bf16Pair;

// Of the tile's blocks, as BF16 bits, in either axis: of block j of row r, and of column c of block
// column j.
typedef struct {
    uint16_t rows[2][MX_BLOCK], columns[2][MX_BLOCK];
} Maxima;

// Where in a copy or in the input the tile's share of the 32 rows below begins, in elements. Each
// tile fetches, one after the other, as many cache lines of those rows as it has of its own: tiles
// take memory in an order that the processor's prefetcher doesn't foresee.
static int64_t fetched_share(int64_t row, int64_t col, int64_t stride) {
    return (row + TILE_ROWS) * stride + col * TILE_ROWS;
}

MX_FUNCTION void find_maxima(Maxima *maxima, Bf16Pair tile) {
    enum { IN_BLOCK = MX_BLOCK / WORDS };
    for (int j = 0; j < 2; j++) {
        Words columns[IN_BLOCK] = {{0}}, rows[TILE_ROWS];
        for (int64_t r = 0; r < TILE_ROWS; r++) {
            __builtin_prefetch(tile.share + r * tile.share_stride + j * MX_BLOCK, 0, 2);
            for (int i = 0; i < IN_BLOCK; i++) {
                Words magnitudes = words_load(tile.x + r * tile.stride + j * MX_BLOCK + i * WORDS) & 0x7FFF;
                columns[i] = words_max(columns[i], magnitudes);
                rows[r] = i == 0 ? magnitudes : words_max(rows[r], magnitudes);
            }
        }
        largest_of_each(maxima->rows[j], rows);
        memcpy(maxima->columns[j], columns, sizeof(columns));
    }
}

// Where a copy of a tile goes.
typedef struct {
    uint8_t *elements;    // of the tile's first row; NULL: nothing is left to write
    uint8_t *share;       // as Bf16Pair's; where it is streamed none is needed
    int64_t share_stride; // between what its rows fetch, in elements
    int64_t stride;       // between its rows, in elements
    bool decoded;         // FORM_DECODED
    bool streamed; // past the caches: whole cache lines, of a copy that the caches wouldn't hold until it is used
} Destination;

// A copy of a tile, and of its 64 blocks, as in Maxima, the scale codes and what encode_bf16 takes.
typedef struct {
    Destination to;
    uint8_t codes[2][MX_BLOCK];
    uint16_t rebias[2][MX_BLOCK];
} TileCopy;

// Encodes two vectors of row `r`, from column `col` on.
MX_FUNCTION void encode_piece(Destination to, const FormatVectors *constants, const Words x[2],
                              const Bf16Values *values, const Words rebias[2], int64_t r, int col, Format format) {
    Bytes codes = encode_bf16(format, constants, values, rebias);
    if (to.decoded) {
        for (int i = 0; i < 2; i++) {
            Words magnitude = decode_bf16(format, constants, bytes_widen(codes, i), rebias[i]);
            Words value = magnitude | (x[i] & 0x8000);
            __builtin_prefetch(to.share + 2 * (r * to.share_stride + col + i * WORDS), 1);
            memcpy((uint16_t *)to.elements + r * to.stride + col + i * WORDS, &value, sizeof(value));
        }
        return;
    }
    codes |= values->sign;
    uint8_t *out = to.elements + r * to.stride + col;
    if (to.streamed) {
        stream(out, codes);
    } else {
        __builtin_prefetch(to.share + r * to.share_stride, 1);
        memcpy(out, &codes, sizeof(codes));
    }
}

// Finds the scale codes from the values themselves: rounding to odd hides rceil's exception, whose
// scale isn't usual.
static void find_exact_codes(TileCopy *copy, const QuantizedTensor *out, const Bf16Pair *tile, ScaleRounding rounding) {
    bool by_row = out->axis == AXIS_ROWWISE;
    uint32_t amax[2][MX_BLOCK] = {{0}};
    for (int64_t r = 0; r < tile->at.rows; r++) {
        for (int64_t c = 0; c < tile->at.cols; c++) {
            uint32_t magnitude = mx_magnitude_bits(tile->exact[r * tile->exact_stride + c]);
            uint32_t *block = &amax[c / MX_BLOCK][by_row ? r : c % MX_BLOCK];
            *block = magnitude > *block ? magnitude : *block;
        }
    }
    for (int i = 0; i < 2 * MX_BLOCK; i++) {
        copy->codes[i / MX_BLOCK][i % MX_BLOCK] =
            mx_scale_code(out->format, rounding, amax[i / MX_BLOCK][i % MX_BLOCK]);
    }
}

// Stores `count` elements from `at` on in the copy's form; each has the value of its scale.
static void store_elements(const QuantizedTensor *out, int64_t at, const uint8_t *elements, const float *scales,
                           int64_t count, Format format) {
    if (out->form != FORM_DECODED) {
        memcpy(out->elements + at, elements, (size_t)count);
        return;
    }
    uint16_t *values = (uint16_t *)out->elements + at;
    for (int64_t i = 0; i < count; i++) {
        values[i] = mx_to_bf16(mx_decode(format, elements[i]) * scales[i]);
    }
}

static void encode_plainly(const TileCopy *copy, const QuantizedTensor *out, const Bf16Pair *tile) {
    bool by_row = out->axis == AXIS_ROWWISE;
    for (int64_t r = 0; r < tile->at.rows; r++) {
        uint8_t elements[PAIR_COLS];
        float scales[PAIR_COLS];
        for (int64_t c = 0; c < tile->at.cols; c++) {
            uint8_t code = copy->codes[c / MX_BLOCK][by_row ? r : c % MX_BLOCK];
            float value =
                tile->exact ? tile->exact[r * tile->exact_stride + c] : mx_from_bf16(tile->x[r * tile->stride + c]);
            elements[c] = mx_encode(out->format, value * mx_scale_reciprocal(code));
            scales[c] = mx_scale_value(code);
        }
        store_elements(out, (tile->at.row + r) * out->cols + tile->at.col, elements, scales, tile->at.cols,
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

bool copy_is_streamed(const QuantizedTensor *out) {
    return out->form != FORM_DECODED && out->rows * out->cols >= STREAMED_BYTES && out->cols % PAIR_COLS == 0 &&
           (uintptr_t)out->elements % PAIR_COLS == 0;
}

// Returns where the part of a copy goes whose rows fetch what begins at `share`.
static Destination destination(const QuantizedTensor *out, TilePlace at, int64_t share, int64_t share_stride) {
    int64_t size = out->form == FORM_DECODED ? 2 : 1;
    return (Destination){.elements = out->elements + (at.row * out->cols + at.col) * size,
                         .share = out->elements + share * size,
                         .share_stride = share_stride,
                         .stride = out->cols,
                         .decoded = out->form == FORM_DECODED,
                         .streamed = copy_is_streamed(out)};
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
    copy->to = destination(out, tile->at, fetched_share(tile->at.row, tile->at.col, out->cols), PAIR_COLS);
    if (unusual && tile->exact) find_exact_codes(copy, out, tile, rounding);
    if (out->form != FORM_DECODED) store_scales(copy, out, tile);
    if (!unusual) return;
    encode_plainly(copy, out, tile);
    copy->to.elements = NULL;
}

MX_FUNCTION void encode_copies(const TileCopy copies[2], Destination by_row, Destination by_column,
                               const Bf16Pair *tile, Format format) {
    const FormatVectors constants = format_vectors(format);
    const uint16_t *x = tile->x;
    const int64_t stride = tile->stride;
    // A copy's cache line is written at once: in turn with the other copy's, a streamed line would
    // go to memory in halves.
    enum { PIECE = 2 * WORDS, PIECES = PAIR_COLS / PIECE };
    for (int64_t r = 0; r < TILE_ROWS; r++) {
        Words in[PIECES][2], rebias[2];
        Bf16Values values[PIECES];
        for (int i = 0; i < PAIR_COLS / WORDS; i++) {
            in[i / 2][i % 2] = words_load(x + r * stride + i * WORDS);
        }
        for (int i = 0; i < PIECES; i++) {
            values[i] = bf16_values(format, in[i]);
        }
        for (int i = 0; i < PIECES && by_row.elements; i++) {
            for (int j = 0; j < 2; j++) {
                rebias[j] = (Words){0} + copies[0].rebias[(i * PIECE + j * WORDS) / MX_BLOCK][r];
            }
            encode_piece(by_row, &constants, in[i], &values[i], rebias, r, i * PIECE, format);
        }
        for (int i = 0; i < PIECES && by_column.elements; i++) {
            for (int j = 0; j < 2; j++) {
                rebias[j] = words_load(copies[1].rebias[0] + i * PIECE + j * WORDS);
            }
            encode_piece(by_column, &constants, in[i], &values[i], rebias, r, i * PIECE, format);
        }
    }
}

// Memory for a whole tile's copy, in either form: at an edge of the tensor it is made there.
typedef uint8_t Aside[TILE_ROWS * PAIR_COLS * 2];

static Destination aside(Destination to, Aside memory) {
    to.elements = to.elements ? memory : NULL;
    to.stride = PAIR_COLS;
    to.streamed = false;
    return to;
}

static void fetch_aside(Destination to, const Aside memory, TilePlace at) {
    size_t size = to.decoded ? 2 : 1;
    for (int64_t r = 0; r < at.rows && to.elements; r++) {
        memcpy(to.elements + (size_t)(r * to.stride) * size, memory + (size_t)(r * PAIR_COLS) * size,
               (size_t)at.cols * size);
    }
}

// Encodes a tile into the copies that were begun, within the tensor's edges.
MX_FUNCTION void write_copies(const TileCopy copies[2], const Bf16Pair *tile, Format format) {
    bool is_whole = tile->at.rows == TILE_ROWS && tile->at.cols == PAIR_COLS;
    Aside memory[2];
    Destination by_row = is_whole ? copies[0].to : aside(copies[0].to, memory[0]);
    Destination by_column = is_whole ? copies[1].to : aside(copies[1].to, memory[1]);
    // Two streams whose lines take two stores each are faster one after the other: with AVX2 on a
    // Zen 3 both copies of [4096, 3072] took 4.5 ms in turns of a row and take 3.5.
    if (2 * VECTOR_BYTES == CACHE_LINE && by_row.streamed && by_column.streamed) {
        encode_copies(copies, by_row, (Destination){0}, tile, format);
        encode_copies(copies, (Destination){0}, by_column, tile, format);
    } else {
        encode_copies(copies, by_row, by_column, tile, format);
    }
    if (is_whole) return;
    fetch_aside(copies[0].to, memory[0], tile->at);
    fetch_aside(copies[1].to, memory[1], tile->at);
}

MX_FUNCTION void quantize_both(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Pair *tile,
                               Format format, ScaleRounding rounding) {
    Maxima maxima;
    TileCopy copies[2];
    find_maxima(&maxima, *tile);
    begin_copy(&copies[0], rowwise, tile, maxima.rows, format, rounding);
    begin_copy(&copies[1], columnwise, tile, maxima.columns, format, rounding);
    write_copies(copies, tile, format);
}

static void quantize_in_one_format(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise,
                                   const Bf16Pair *tile, ScaleRounding rounding) {
#define QUANTIZE(constant) quantize_both(rowwise, columnwise, tile, constant, rounding)
    MX_WITH_CONSTANT_FORMAT(rowwise ? rowwise->format : columnwise->format, QUANTIZE)
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

// Zeros beyond the tensor's edges change no block's amax.
static void pad(uint16_t padded[TILE_ROWS][PAIR_COLS], Bf16Pair *pair) {
    memset(padded, 0, sizeof(uint16_t[TILE_ROWS][PAIR_COLS]));
    for (int64_t r = 0; r < pair->at.rows; r++) {
        memcpy(padded[r], pair->x + r * pair->stride, (size_t)pair->at.cols * sizeof(uint16_t));
    }
    pair->x = padded[0];
    pair->stride = PAIR_COLS;
}

void bf16_tile_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Tile *tile,
                        ScaleRounding rounding) {
    TilePlace at = tile->at;
    for (int64_t c = 0; c < at.cols; c += PAIR_COLS) {
        TilePlace place = {at.row, at.col + c, at.rows, min_int64(at.cols - c, PAIR_COLS)};
        int64_t share = fetched_share(place.row, place.col, tile->below.stride);
        Bf16Pair pair = {.x = tile->x + c,
                         .stride = tile->stride,
                         .share = tile->below.data ? (const uint16_t *)tile->below.data + share : tile->x,
                         .share_stride = PAIR_COLS,
                         .exact = tile->exact ? tile->exact + c : NULL,
                         .exact_stride = tile->stride,
                         .at = place};
        uint16_t padded[TILE_ROWS][PAIR_COLS];
        if (place.rows < TILE_ROWS || place.cols < PAIR_COLS) pad(padded, &pair);
        quantize_pair(rowwise, columnwise, &pair, rounding);
    }
}

// Blocks of 128

enum { PART = TILE_COLS, MAX_PAIRS = PART / TILE_ROWS * (PART / PAIR_COLS) };

// A part's pairs, those that the tensor has.
typedef struct {
    TilePlace at;
    int count;
    Bf16Pair pairs[MAX_PAIRS];
} Bf16Part;

// The blocks of 128 of a part in one axis: by row or by column.
typedef struct {
    uint16_t amax[PART]; // as BF16 bits
    uint16_t rebias[PART];
    float value[PART];
} PartBlocks;

// Finds the blocks of the largest magnitudes. Returns whether each scale is usual.
MX_FUNCTION bool find_part_blocks(PartBlocks *blocks, Format format) {
    uint32_t unusual = 0;
    for (int i = 0; i < PART; i++) {
        uint32_t amax = (uint32_t)blocks->amax[i] << 16;
        blocks->value[i] = scaling_block_of_amax(SCALING_BLOCK128, format, amax, 1, false).value;
        uint8_t code = (uint8_t)(mx_float_bits(blocks->value[i]) >> 23); // E8M0's of that power of two
        blocks->rebias[i] = rebias_of(format, code, amax);
        unusual |= !scale_is_usual(code, amax);
    }
    return !unusual;
}

MX_FUNCTION void raise_amaxes(uint16_t *amax, const uint16_t *others) {
    for (int i = 0; i < MX_BLOCK; i++) {
        amax[i] = others[i] > amax[i] ? others[i] : amax[i];
    }
}

static void store_part_scales(const PartBlocks *blocks, const QuantizedTensor *out, TilePlace at) {
    bool by_row = out->axis == AXIS_ROWWISE;
    for (int64_t i = 0; i < (by_row ? at.rows : at.cols); i++) {
        int64_t block =
            scaling_block_at(out->scaling, out->axis, at.row + (by_row ? i : 0), at.col + (by_row ? 0 : i), out->cols);
        scaling_keep_value(out->scaling, out->scales, block, blocks->value[i]);
    }
}

// Begins a pair's copy. What is fetched on the way is the part to the right, which comes next.
static void begin_part_copy(TileCopy *copy, const QuantizedTensor *out, const PartBlocks *blocks, const Bf16Part *part,
                            TilePlace at) {
    *copy = (TileCopy){0};
    if (!out) return;
    int64_t row = at.row - part->at.row, col = at.col - part->at.col;
    copy->to = destination(out, at, at.row * out->cols + at.col + PART, out->cols);
    for (int j = 0; j < 2; j++) {
        const uint16_t *rebias = blocks->rebias + (out->axis == AXIS_ROWWISE ? row : col + j * MX_BLOCK);
        memcpy(copy->rebias[j], rebias, sizeof(copy->rebias[j]));
    }
}

// Finds the largest magnitudes of a part's blocks in both axes.
MX_FUNCTION void find_part_maxima(PartBlocks *by_row, PartBlocks *by_column, const Bf16Part *part) {
    for (int i = 0; i < part->count; i++) {
        TilePlace at = part->pairs[i].at;
        Maxima maxima;
        find_maxima(&maxima, part->pairs[i]);
        for (int j = 0; j < 2; j++) {
            raise_amaxes(by_row->amax + (at.row - part->at.row), maxima.rows[j]);
            raise_amaxes(by_column->amax + (at.col - part->at.col) + j * MX_BLOCK, maxima.columns[j]);
        }
    }
}

// Quantizes a part, as bf16_part_quantize does.
MX_FUNCTION bool encode_part(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Part *part,
                             Format format) {
    PartBlocks by_row = {0}, by_column = {0};
    find_part_maxima(&by_row, &by_column, part);
    if (rowwise && !find_part_blocks(&by_row, format)) return false;
    if (columnwise && !find_part_blocks(&by_column, format)) return false;
    if (rowwise && rowwise->form != FORM_DECODED) store_part_scales(&by_row, rowwise, part->at);
    if (columnwise && columnwise->form != FORM_DECODED) store_part_scales(&by_column, columnwise, part->at);
    for (int i = 0; i < part->count; i++) {
        TileCopy copies[2];
        begin_part_copy(&copies[0], rowwise, &by_row, part, part->pairs[i].at);
        begin_part_copy(&copies[1], columnwise, &by_column, part, part->pairs[i].at);
        write_copies(copies, &part->pairs[i], format);
    }
    return true;
}

bool bf16_part_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Tile *tile) {
    const TilePlace at = tile->at;
    Bf16Part part = {.at = at};
    uint16_t padded[MAX_PAIRS][TILE_ROWS][PAIR_COLS];
    for (int64_t row = 0; row < at.rows; row += TILE_ROWS) {
        for (int64_t col = 0; col < at.cols; col += PAIR_COLS) {
            const uint16_t *x = tile->x + row * tile->stride + col;
            Bf16Pair *pair = &part.pairs[part.count];
            *pair = (Bf16Pair){.x = x, .stride = tile->stride, .share = x + PART, .share_stride = tile->stride};
            pair->at = tile_place(at.row + at.rows, at.col + at.cols, at.row + row, at.col + col);
            if (pair->at.cols > PAIR_COLS) pair->at.cols = PAIR_COLS;
            if (pair->at.rows < TILE_ROWS || pair->at.cols < PAIR_COLS) pad(padded[part.count], pair);
            part.count++;
        }
    }
    bool done = false;
#define QUANTIZE(constant) done = encode_part(rowwise, columnwise, &part, constant)
    MX_WITH_CONSTANT_FORMAT(rowwise ? rowwise->format : columnwise->format, QUANTIZE)
#undef QUANTIZE
    return done;
}

void stream_row(uint8_t *out, const uint8_t *row) {
    for (int i = 0; i < TILE_COLS; i += VECTOR_BYTES) {
        Bytes bytes;
        memcpy(&bytes, row + i, sizeof(bytes));
        stream(out + i, bytes);
    }
}

void quantize_end_streams(void) { end_streams(); }

// Rows

// Returns the upper halves of the lanes of `a` and `b`, rounded to odd as to_bf16_odd does.
MX_FUNCTION Words words_odd(Singles a, Singles b) {
    return words_upper(a | ((a & 0xFFFF) + 0xFFFF), b | ((b & 0xFFFF) + 0xFFFF));
}

// Returns SINGLES products of the values of a row from column `c` on and their multipliers.
MX_FUNCTION Singles products(const float *x, const float *multiplier, int64_t width, int c) {
    Floats values, multipliers;
    memcpy(&values, x + c, sizeof(values));
    if (width == 1) {
        memcpy(&multipliers, multiplier + c, sizeof(multipliers));
    } else {
        multipliers = (Floats){0} + multiplier[c / width];
    }
    return (Singles)(values * multipliers);
}

MX_FUNCTION void encode_rows(const Rows *out, const float x[][TILE_COLS], int64_t rows, const Blocks *blocks,
                             int64_t width, Format format) {
    const FormatVectors constants = format_vectors(format);
    const Words one = kept((Words){0} + rebias_of(format, 127, 1)), rebias[2] = {one, one};
    const uint32_t max_bits = mx_float_bits(mx_decode(format, (uint8_t)mx_element(format).max_code));
    const Words largest = kept((Words){0} + (uint16_t)(max_bits >> 16));
    for (int64_t r = 0; r < rows; r++) {
        const float *multiplier = blocks->multiplier + r * blocks->stride;
        uint8_t *row = out->elements + r * out->stride;
        for (int c = 0; c < TILE_COLS; c += 2 * WORDS) {
            Words clamped[2];
            for (int i = 0; i < 2; i++) {
                int first = c + i * WORDS;
                Words odd = words_odd(products(x[r], multiplier, width, first),
                                      products(x[r], multiplier, width, first + SINGLES));
                clamped[i] = words_min(odd & 0x7FFF, largest) | (odd & 0x8000);
            }
            const Bf16Values values = bf16_values(format, clamped);
            Bytes codes = encode_bf16(format, &constants, &values, rebias) | values.sign;
            if (out->streamed) {
                stream(row + c, codes);
            } else {
                memcpy(row + c, &codes, sizeof(codes));
            }
        }
    }
}

MX_FUNCTION void encode_in_format(const Rows *out, const float x[][TILE_COLS], int64_t rows, const Blocks *blocks,
                                  Format format) {
    if (blocks->width == 1) {
        encode_rows(out, x, rows, blocks, 1, format);
    } else if (blocks->width == NVFP4_SIDE) {
        encode_rows(out, x, rows, blocks, NVFP4_SIDE, format);
    } else {
        encode_rows(out, x, rows, blocks, TILE_COLS, format);
    }
}

void encode_products(const Rows *out, const float x[][TILE_COLS], int64_t rows, const Blocks *blocks, Format format) {
#define ENCODE(constant) encode_in_format(out, x, rows, blocks, constant)
    MX_WITH_CONSTANT_FORMAT(format, ENCODE)
#undef ENCODE
}

#else

void encode_products(const Rows *out, const float x[][TILE_COLS], int64_t rows, const Blocks *blocks, Format format) {
    for (int64_t r = 0; r < rows; r++) {
        const float *multiplier = blocks->multiplier + r * blocks->stride;
        for (int64_t c = 0; c < TILE_COLS; c++) {
            out->elements[r * out->stride + c] = mx_encode(format, x[r][c] * multiplier[c / blocks->width]);
        }
    }
}

bool bf16_tiles_are_taken(void) { return false; }

void bf16_tile_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Tile *tile,
                        ScaleRounding rounding) {
    (void)rowwise, (void)columnwise, (void)tile, (void)rounding;
}

bool bf16_part_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Tile *tile) {
    (void)rowwise, (void)columnwise, (void)tile;
    return false;
}

bool copy_is_streamed(const QuantizedTensor *out) {
    (void)out;
    return false;
}

void stream_row(uint8_t *out, const uint8_t *row) { memcpy(out, row, TILE_COLS); }

void quantize_end_streams(void) {}

#endif
