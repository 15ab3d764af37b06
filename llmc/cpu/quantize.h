/*
What the quantizer's files share: tiles of 32 rows x 128 columns, which hold whole blocks of either
axis, as FP32 or as BF16.
*/
#pragma once

#include "cpu.h"

enum { TILE_ROWS = MX_BLOCK, TILE_COLS = 4 * MX_BLOCK };

// Where a tile lies in its tensor.
typedef struct {
    int64_t row, col;   // of its first element
    int64_t rows, cols; // that are in the tensor
} TilePlace;

// Returns the place of the tile that begins at `row` and `col` of a tensor (rows, cols).
static inline TilePlace tile_place(int64_t rows, int64_t cols, int64_t row, int64_t col) {
    return (TilePlace){
        .row = row, .col = col, .rows = min_int64(rows - row, TILE_ROWS), .cols = min_int64(cols - col, TILE_COLS)};
}

// A tile as FP32, which stays in the first-level cache. Beyond the tensor's edges it has zeros,
// which change no block's amax and are not written out.
typedef struct {
    TilePlace at;
    float x[TILE_ROWS][TILE_COLS];
} Tile;

// Places a tile, with zeros beyond the edges; what is inside is the caller's to fill.
static inline void tile_begin(Tile *tile, TilePlace at) {
    tile->at = at;
    if (at.rows < TILE_ROWS || at.cols < TILE_COLS) memset(tile->x, 0, sizeof(tile->x));
}

// Makes columns [col, col + count) of a row of what a source stands for, at most TILE_COLS, rounded
// to x's dtype. Stores them where that is asked for.
void source_row(float *out, const Source *in, int64_t row, int64_t col, int64_t count);

// Makes those of the rows of `at`, of a source whose x is BF16, as BF16.
void source_bf16_rows(uint16_t out[][TILE_COLS], const Source *in, TilePlace at);

// Quantizes into one or two copies whose scaling isn't MX, each unless NULL, and stores what is
// stored of the source.
void quantize_scaled(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in);

// Dies where a copy, unless NULL, is wanted in a form that the CPU's quantizers don't make.
void check_form(const QuantizedTensor *copy);

// Quantizes a tile into its parts of one or two copies.
void tile_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Tile *tile,
                   ScaleRounding rounding);

// Draws the random bits of TILE_COLS elements of a row, encoding_draw's, into `random`, and returns
// that; NULL where elements are rounded to nearest. `col`, of the first, is a multiple of
// DRAWN_TOGETHER.
const uint16_t *draw_row(uint16_t random[TILE_COLS], const Encoding *encoding, int64_t row, int64_t col);

// Returns the upper half of FP32's bits, with its last bit set where the lower half isn't zero. All
// that the quantizer asks of a value, scales' thresholds and elements' midpoints, lies on so few
// bits that this answers it as the value itself would, but for mx_rceil_exception.
MX_FUNCTION uint16_t to_bf16_odd(float x) {
    uint32_t bits = mx_float_bits(x);
    return (uint16_t)(bits >> 16 | ((bits & 0xFFFF) != 0));
}

// Blocks of some rows of TILE_COLS columns, in a scaling that isn't MX.
typedef struct {
    int64_t width;                   // columns that share one: 1, NVFP4_SIDE or TILE_COLS
    int64_t stride;                  // from one row's to the next's; 0: all rows have the same
    const float *multiplier, *value; // of elements before they are encoded and after they are decoded
    bool is_finite;                  // no element times its multiplier is NaN, nor what it is decoded with
} Blocks;

// Where the elements of some rows of TILE_COLS columns go.
typedef struct {
    uint8_t *elements;
    int64_t stride; // from one row to the next, in elements
    bool streamed;  // codes may be written past the caches: elements and stride are multiples of CACHE_LINE
} Rows;

// Encodes rows of finite blocks: all TILE_COLS values of each, times their blocks' multipliers,
// rounded to nearest. Where they are streamed, quantize_end_streams must follow.
void encode_products(const Rows *out, const float x[][TILE_COLS], int64_t rows, const Blocks *blocks, Format format);

// Encodes TILE_COLS values of a row, each times its multiplier, with what draw_row returned.
void encode_row(uint8_t *elements, const float *x, const float *multiplier, const uint16_t *random, Format format);

// Returns whether this build quantizes BF16 as it is, rowwise and columnwise.
bool bf16_tiles_are_taken(void);

// A tile of BF16.
typedef struct {
    const uint16_t *x;  // its first element
    int64_t stride;     // between its rows
    const float *exact; // NULL, or what x was rounded to odd from, with the same stride
    Tensor below; // the tensor that tiles are read from, of which rows are fetched on the way; may be without data
    TilePlace at;
} Bf16Tile;

// Quantizes a tile into its parts of one or two copies.
void bf16_tile_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Tile *tile,
                        ScaleRounding rounding);

// Quantizes a part of 128 x 128, or what the tensor has of it, into one or two copies in blocks of
// 128 along rows or columns, of SCALING_BLOCK128, one format and plain encoding. Returns false,
// having written nothing, where an amax isn't finite or a scale is at an end of E8M0's range. Of
// `tile` only x, stride and at are read.
bool bf16_part_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, const Bf16Tile *tile);

// Returns whether a copy is written past the caches: one of codes that is larger than a core's own
// caches, 1 MB or more, and whose rows begin and end with a cache line.
bool copy_is_streamed(const QuantizedTensor *out);

// Writes TILE_COLS codes of such a copy, from the beginning of a cache line on.
// quantize_end_streams must follow.
void stream_row(uint8_t *out, const uint8_t *row);

// Orders the calling thread's stores past the caches before all that follows.
void quantize_end_streams(void);
