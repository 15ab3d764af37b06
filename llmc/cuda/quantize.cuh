/*
The quantizer's kernels: 32 rows x 64 columns of a source at a time, or a column of each lane; what
a source makes is the including file's.

A warp takes 32 rows x 64 columns, whole blocks of either axis, and holds them in registers: a lane
has eight rows, four apart, of eight neighbouring columns. A row's block lies in four neighbouring
lanes, a column's block in the four lanes that are eight apart. A thread block is four warps beside
each other. What lies beyond the tensor's edges is held as zeros, which change no block's amax and
have the scale code 0. Their codes are not written out; their scales are, where swizzled scales are
padded: by the blocks at the edges, since memory set to 0 before would be one launch more and
written twice.

Elements that are rounded stochastically or have a prescale (llmc/numerics/encoding.h) have an
instance of that kernel in E2M1, the only format that recipes round so.

A second kernel, whose lanes have a column each, does all else: other dtypes, rows that don't begin
and end at multiples of 16 bytes of input and 8 of codes, copies of different formats of what is
made, and other formats' elements that aren't plain. Its lanes draw eight elements' random numbers
each and use one of them: simple before fast.

A source is a struct that a kernel takes by value. For the first kernel it has an Element, float or
Bf16, IS_MADE and load(); for the second, element().
*/
#pragma once

#include "eights.cuh"
#include "ops.cuh"
#include "rounding.cuh"

enum {
    WARP_COLS = 64,
    WARPS = 4,
    THREADS = WARPS * WARP,
    TILE_COLS = WARPS * WARP_COLS,
    ROW_LANES = WARP_COLS / LANE_COLS, // that read a row together
    STEP_ROWS = WARP / ROW_LANES,      // that a warp reads at a time
    STEPS = TILE_ROWS / STEP_ROWS,
    BLOCK_LANES = MX_BLOCK / LANE_COLS,
    TILE_BLOCKS = TILE_COLS / MX_BLOCK, // in a row of the tile
    SWIZZLE_OUTER = 128,                // swizzled scales are padded to multiples of this
    SWIZZLE_BLOCKS = 4,                 // and of this
};

// A source loads a lane's elements, from `row` and `col` on: of STEPS rows, zeros for those that
// are `height` rows on or more, where the tensor ends.
template <typename T>
static __device__ __forceinline__ void load_rows(Eight<T> *x, const T *in, int64_t stride, int64_t row, int64_t col,
                                                 int height) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        x[i] = load_eight(in + (row + i * STEP_ROWS) * stride + col, i * STEP_ROWS < height);
    }
}

template <typename T, int N> static __device__ __forceinline__ float value_at(const Few<T, N> &x, int c) {
    return mx_bits_float(bits_at(x, c));
}

template <typename T>
static __device__ __forceinline__ void store_made(Tensor stored, int64_t row, int64_t col, const Eight<T> &x) {
    int64_t at = row * stored.stride + col;
    float values[LANE_COLS];
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        values[c] = value_at(x, c);
    }
    if (stored.dtype == FORMAT_FP32) {
        store_eight((float *)stored.data + at, values);
    } else {
        store_eight((Bf16 *)stored.data + at, values);
    }
}

// By tiles

static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Returns the larger magnitude bits of each element of two words.
template <typename T> static __device__ __forceinline__ uint32_t larger_word(uint32_t a, uint32_t b) {
    if (sizeof(T) == 4) return larger(a, b);
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    return larger(a & 0xFFFF0000u, b & 0xFFFF0000u) | larger(a & 0xFFFFu, b & 0xFFFFu);
#endif
}

// Returns a word of elements without their signs.
template <typename T> static __device__ __forceinline__ uint32_t magnitudes(uint32_t word) {
    return word & (sizeof(T) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu);
}

// Makes each of some magnitudes that of the element beside it, where that is larger.
template <typename T, int N>
static __device__ __forceinline__ void raise_each(Few<T, N> *amax, const Few<T, N> &elements) {
#pragma unroll
    for (int w = 0; w < Few<T, N>::WORDS; w++) {
        amax->x[w] = larger_word<T>(amax->x[w], magnitudes<T>(elements.x[w]));
    }
}

// Elements of a warp's tile, and the amaxes of their blocks, as magnitude bits: of the lane's eight
// rows and of its eight columns.
template <typename T> struct WarpTile {
    Eight<T> x[STEPS];
    Eight<T> row_amax, column_amax;
};
static_assert((int)STEPS == (int)LANE_COLS, "a lane's rows and its columns are both eight");

// Returns the larger half of each of two words: the first word's in the lower half.
static __device__ __forceinline__ uint32_t larger_halves(uint32_t first, uint32_t second) {
    return larger_word<Bf16>((first & 0xFFFFu) | second << 16, first >> 16 | (second & 0xFFFF0000u));
}

template <typename T> static __device__ __forceinline__ void find_amaxes(WarpTile<T> *tile) {
    uint32_t row_amax[STEPS] = {};
    tile->column_amax = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        raise_each(&tile->column_amax, tile->x[i]);
#pragma unroll
        for (int w = 0; w < Eight<T>::WORDS; w++) {
            row_amax[i] = larger_word<T>(row_amax[i], magnitudes<T>(tile->x[i].x[w]));
        }
    }
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w++) {
        tile->row_amax.x[w] = sizeof(T) == 4 ? row_amax[w] : larger_halves(row_amax[2 * w], row_amax[2 * w + 1]);
    }
}

// Returns the largest magnitude bits over the lanes whose numbers differ in the bits from FIRST to
// below END.
template <typename T, int FIRST, int END> static __device__ __forceinline__ uint32_t larger_over_lanes(uint32_t amax) {
#pragma unroll
    for (int distance = FIRST; distance < END; distance *= 2) {
        amax = larger_word<T>(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
    }
    return amax;
}

// Makes of the amaxes of rows those of square blocks.
template <typename T> static __device__ __forceinline__ void reduce_squares(Eight<T> *row_amax) {
    uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w++) {
        amax = larger_word<T>(amax, row_amax->x[w]);
    }
    if (sizeof(T) == 2) amax = larger_halves(amax, amax);
    amax = larger_over_lanes<T, 1, BLOCK_LANES>(larger_over_lanes<T, ROW_LANES, WARP>(amax));
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w++) {
        row_amax->x[w] = amax;
    }
}

// A block's shares are in four lanes, DISTANCE apart, which have the same eight blocks: a lane
// finds two of the scales and hands them to the others. Which of the four a lane is says which two.
enum { SHARERS = 4, SHARE = LANE_COLS / SHARERS };

template <int DISTANCE> static __device__ __forceinline__ int sharer(int lane) { return lane / DISTANCE % SHARERS; }

// Returns the amaxes of a lane's two blocks, of the shares of eight that each of the four lanes
// has: a lane hands half of its words over and receives the other's half, twice.
template <typename T, int DISTANCE> static __device__ __forceinline__ Eight<T> reduce_shares(Eight<T> amax, int lane) {
#pragma unroll
    for (int half = Eight<T>::WORDS / 2, distance = 2 * DISTANCE; distance >= DISTANCE; half /= 2, distance /= 2) {
        bool upper = lane & distance;
#pragma unroll
        for (int w = 0; w < half; w++) {
            uint32_t first = amax.x[w], second = amax.x[half + w];
            uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, upper ? first : second, distance);
            amax.x[w] = larger_word<T>(upper ? second : first, received);
        }
    }
    return amax;
}

// Returns all eight of the four lanes' pairs.
template <int DISTANCE> static __device__ __forceinline__ Eight<Bf16> gather_pairs(uint32_t pair, int lane) {
    Eight<Bf16> pairs;
#pragma unroll
    for (int i = 0; i < SHARERS; i++) {
        int first = lane - sharer<DISTANCE>(lane) * DISTANCE;
        pairs.x[i] = __shfl_sync(0xFFFFFFFFu, pair, first + i * DISTANCE);
    }
    return pairs;
}

// Scales of a lane's eight blocks along an axis. All powers of two are exact in BF16.
struct Scales {
    uint8_t codes[SHARE]; // of its own two
    Eight<Bf16> reciprocals;
    Eight<Bf16> values; // where `decodes`
};

// Returns two numbers that are exact in BF16 as a pair of it.
static __device__ __forceinline__ uint32_t exact_pair(float low, float high) {
    return mx_float_bits(low) >> 16 | mx_float_bits(high);
}

template <typename T, int DISTANCE>
static __device__ __forceinline__ Scales find_scales(Eight<T> amax, Format format, ScaleRounding rounding, bool decodes,
                                                     int lane) {
    amax = reduce_shares<T, DISTANCE>(amax, lane);
    Scales scales = {};
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        scales.codes[i] = mx_scale_code(format, rounding, bits_at(amax, i));
    }
    float reciprocals[SHARE] = {mx_scale_reciprocal(scales.codes[0]), mx_scale_reciprocal(scales.codes[1])};
    scales.reciprocals = gather_pairs<DISTANCE>(exact_pair(reciprocals[0], reciprocals[1]), lane);
    if (!decodes) return scales;
    float values[SHARE] = {mx_scale_value(scales.codes[0]), mx_scale_value(scales.codes[1])};
    scales.values = gather_pairs<DISTANCE>(exact_pair(values[0], values[1]), lane);
    return scales;
}

// Returns the i-th of eight, eight times.
static __device__ __forceinline__ Eight<Bf16> repeat(const Eight<Bf16> &x, int i) {
    uint32_t bits = bits_at(x, i), pair = bits | bits >> 16;
    return {{pair, pair, pair, pair}};
}

// Stores the swizzled scale of the column's block that begins at `row`, and padding after the
// column's last block.
static __device__ __forceinline__ void store_swizzled_column_scale(uint8_t *scales, uint8_t code, int64_t row,
                                                                   int64_t col, int64_t rows) {
    int64_t block = row / MX_BLOCK;
    uint8_t *at = scales + mx_swizzled_scale_offset(col, block, rows);
    *at = code;
    if (row + MX_BLOCK < rows) return;
    while (++block % SWIZZLE_BLOCKS) {
        *++at = 0;
    }
}

// Stores the scales of a lane's two columns of the eight that it has with others.
static __device__ __forceinline__ void store_column_scales(const QuantizedTensor &columnwise, const uint8_t *codes,
                                                           int64_t row, int64_t col, int64_t rows, int64_t cols) {
    if (columnwise.form == FORM_PLAIN) {
        uint16_t pair = (uint16_t)(codes[0] | codes[1] << 8);
        if (col < cols) *(uint16_t *)(columnwise.scales + row / MX_BLOCK * cols + col) = pair;
    } else if (columnwise.form == FORM_SWIZZLED && col < (cols + SWIZZLE_OUTER - 1) / SWIZZLE_OUTER * SWIZZLE_OUTER) {
#pragma unroll
        for (int c = 0; c < SHARE; c++) {
            store_swizzled_column_scale(columnwise.scales, codes[c], row, col + c, rows);
        }
    }
}

// Stores the scales of a tile's rows, and after the tensor's last rows those of rows of padding.
static __device__ __forceinline__ void store_row_scales(const QuantizedTensor &rowwise,
                                                        const uint8_t (*codes)[TILE_BLOCKS], Corner corner,
                                                        int64_t rows, int64_t cols) {
    int64_t blocks_in_row = mx_num_blocks(cols), first = corner.col / MX_BLOCK;
    if (rowwise.form == FORM_PLAIN) {
        int height = rowwise.axis == AXIS_SQUARE ? 1 : TILE_ROWS; // rows of scales
        for (int i = (int)threadIdx.x; i < height * TILE_BLOCKS; i += THREADS) {
            int r = i / TILE_BLOCKS, block = i % TILE_BLOCKS;
            if (corner.row + r < rows && first + block < blocks_in_row) {
                int64_t at = mx_scale_offset(rowwise.axis, corner.row + r, (first + block) * MX_BLOCK, cols);
                rowwise.scales[at] = codes[r][block];
            }
        }
        return;
    }
    for (int i = (int)threadIdx.x; i < TILE_ROWS * TILE_BLOCKS / SWIZZLE_BLOCKS; i += THREADS) {
        int r = i % TILE_ROWS, block = i / TILE_ROWS * SWIZZLE_BLOCKS;
        if (first + block >= blocks_in_row) continue;
        int64_t row = corner.row + r;
        uint32_t *at = (uint32_t *)(rowwise.scales + mx_swizzled_scale_offset(row, first + block, cols));
        *at = *(const uint32_t *)&codes[r][block];
        if (corner.row + TILE_ROWS < rows) continue;
        while ((row += TILE_ROWS) % SWIZZLE_OUTER >= TILE_ROWS) {
            *++at = 0;
        }
    }
}

// Returns the codes of eight elements times reciprocals of their scales. A BF16 times a power of
// two is exact as BF16 too, unless it is so small that every format makes 0 of it.
template <Format FORMAT>
static __device__ __forceinline__ uint64_t encode_scaled(const Eight<Bf16> &x, const Eight<Bf16> &reciprocals) {
    uint64_t codes = 0;
#pragma unroll
    for (int w = 0; w < Eight<Bf16>::WORDS; w++) {
        codes |= (uint64_t)encode_bf16_pair(FORMAT, multiply_bf16_pair(x.x[w], reciprocals.x[w])) << (16 * w);
    }
    return codes;
}

template <Format FORMAT>
static __device__ __forceinline__ uint64_t encode_scaled(const Eight<float> &x, const Eight<Bf16> &reciprocals) {
    float scaled[LANE_COLS];
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        scaled[c] = value_at(x, c) * value_at(reciprocals, c);
    }
    return encode_eight(FORMAT, scaled);
}

// Returns the codes of a lane's scaled elements of a row. PLAIN: the copy's encoding is; else eight
// elements' random numbers are drawn together.
template <Format FORMAT, bool PLAIN>
static __device__ __forceinline__ uint64_t encode_row(const QuantizedTensor &copy, int64_t row, int64_t col,
                                                      const float *x) {
    if (PLAIN || copy.encoding.rounding == ROUND_NEAREST) return encode_eight(FORMAT, x);
    uint16_t random[DRAWN_TOGETHER];
    uint64_t codes = 0;
    encoding_draw(random, &copy.encoding, row, col / DRAWN_TOGETHER);
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        codes |= (uint64_t)encode_stochastic(FORMAT, x[c], random[c]) << (8 * c);
    }
    return codes;
}

// Rounds a lane's elements of a row to values of the format. What a NaN becomes doesn't matter: its
// block's scale is NaN.
template <Format FORMAT, bool PLAIN>
static __device__ __forceinline__ void round_row(const QuantizedTensor &copy, int64_t row, int64_t col, float *x) {
    if (PLAIN || copy.encoding.rounding == ROUND_NEAREST) {
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            x[c] = copysignf(round_magnitude(FORMAT, x[c]), x[c]);
        }
        return;
    }
    uint16_t random[DRAWN_TOGETHER];
    encoding_draw(random, &copy.encoding, row, col / DRAWN_TOGETHER);
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        x[c] = round_stochastic(FORMAT, x[c], random[c]);
    }
}
static_assert((int)DRAWN_TOGETHER == (int)LANE_COLS, "a lane's elements of a row are drawn together");

// What a block's elements are multiplied by before they are encoded, and after they are decoded.
struct ElementScale {
    float multiplier, value;
};

template <bool PLAIN, typename T>
static __device__ __forceinline__ void scale_row(float *x, const QuantizedTensor &copy, const Eight<T> &elements,
                                                 const ElementScale *scales) {
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        float multiplier = scales[c].multiplier;
        x[c] = value_at(elements, c) * (PLAIN ? multiplier : multiplier * encoding_prescale(&copy.encoding));
    }
}

// Writes a lane's elements of a row, of which that in column c is in a block of scales[c], as the
// values that they become, BF16, or as codes, which a transposed copy isn't written of.
template <Format FORMAT, bool PLAIN, typename T>
static __device__ __forceinline__ void store_row(const QuantizedTensor &copy, int64_t row, int64_t col,
                                                 const Eight<T> &elements, const ElementScale *scales) {
    float x[LANE_COLS];
    scale_row<PLAIN>(x, copy, elements, scales);
    if (copy.form != FORM_DECODED) {
        *(uint64_t *)(copy.elements + row * copy.cols + col) = encode_row<FORMAT, PLAIN>(copy, row, col, x);
        return;
    }
    if (PLAIN && converts_by_instruction(FORMAT)) {
        decode_eight(x, FORMAT, encode_eight(FORMAT, x));
    } else {
        round_row<FORMAT, PLAIN>(copy, row, col, x);
    }
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        x[c] *= scales[c].value;
    }
    store_eight((Bf16 *)copy.elements + row * copy.cols + col, x);
}

// Stores eight codes of a copy, or what they decode to.
template <Format FORMAT>
static __device__ __forceinline__ void store_codes(const QuantizedTensor &copy, int64_t at, uint64_t codes,
                                                   const Eight<Bf16> &values) {
    if (copy.form != FORM_DECODED) {
        *(uint64_t *)(copy.elements + at) = codes;
        return;
    }
    float x[LANE_COLS];
    decode_eight(x, FORMAT, codes);
    uint32_t words[Eight<Bf16>::WORDS];
#pragma unroll
    for (int w = 0; w < Eight<Bf16>::WORDS; w++) {
        words[w] = multiply_bf16_pair(bf16_pair(x[2 * w], x[2 * w + 1]), values.x[w]);
    }
    store_16_bytes((Bf16 *)copy.elements + at, words);
}

// Writes a lane's elements of a row in blocks of MX, whose scales are exact in BF16, if they are
// wanted. `at` is row * cols + col.
template <Format FORMAT, bool PLAIN, typename T>
static __device__ __forceinline__ void store_elements(const QuantizedTensor &copy, int64_t row, int64_t col, int64_t at,
                                                      const Eight<T> &elements, const Eight<Bf16> &reciprocals,
                                                      const Eight<Bf16> &values, bool wanted) {
    if (PLAIN && (copy.form != FORM_DECODED || converts_by_instruction(FORMAT))) {
        uint64_t codes = encode_scaled<FORMAT>(elements, reciprocals);
        if (wanted) store_codes<FORMAT>(copy, at, codes, values);
        return;
    }
    ElementScale scales[LANE_COLS];
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        scales[c] = {value_at(reciprocals, c), value_at(values, c)};
    }
    if (wanted) store_row<FORMAT, PLAIN>(copy, row, col, elements, scales);
}

// Stores the sums of a lane's columns over the tile's rows: over its own, then over those of the
// lanes that have the same columns.
template <typename T>
static __device__ __forceinline__ void store_column_sums(float *sums, const Eight<T> *x, int lane, bool inside) {
    float sum[LANE_COLS] = {};
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            sum[c] += value_at(x[i], c);
        }
#pragma unroll
        for (int distance = ROW_LANES; distance < WARP; distance *= 2) {
            sum[c] += __shfl_xor_sync(0xFFFFFFFFu, sum[c], distance);
        }
    }
    if (inside && lane < ROW_LANES) store_floats<LANE_COLS>(sums, sum);
}

// Thread blocks that shall fit a multiprocessor, by the registers that they take then.
template <typename From, bool PLAIN>
constexpr int MIN_BLOCKS = sizeof(typename From::Element) == 4 || !PLAIN ? 4
                           : From::IS_MADE                               ? 5
                                                                         : 6;

// FORMAT is both copies' format; PLAIN: their encodings are. A copy without elements isn't wanted.
// Row r of `partials` (rows / 32, cols; or NULL) gets the sums of the columns of the r-th 32 rows.
template <typename From, Format FORMAT, bool PLAIN>
static __global__ void __launch_bounds__(THREADS, MIN_BLOCKS<From, PLAIN>)
    quantize_kernel(QuantizedTensor rowwise, QuantizedTensor columnwise, From source, Tensor stored, float *partials,
                    int64_t rows, int64_t cols, ScaleRounding rounding) {
    __shared__ __align__(4) uint8_t row_scales[TILE_ROWS][TILE_BLOCKS];
    Corner corner = tile_corner(cols, TILE_COLS);
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    int64_t row = corner.row + lane / ROW_LANES, col = corner.col + warp * WARP_COLS + lane % ROW_LANES * LANE_COLS;
    bool inside = col < cols;
    int height = !inside ? 0 : rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
    WarpTile<typename From::Element> tile;
    source.load(tile.x, row, col, height);
    if (From::IS_MADE && stored.data) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (i * STEP_ROWS < height) store_made(stored, row + i * STEP_ROWS, col, tile.x[i]);
        }
    }
    if (partials) store_column_sums(partials + corner.row / TILE_ROWS * cols + col, tile.x, lane, inside);
    find_amaxes(&tile);

    typedef typename From::Element T;
    Scales of_columns, of_rows;
    if (columnwise.elements) {
        of_columns =
            find_scales<T, ROW_LANES>(tile.column_amax, FORMAT, rounding, columnwise.form == FORM_DECODED, lane);
        store_column_scales(columnwise, of_columns.codes, corner.row, col + sharer<ROW_LANES>(lane) * SHARE, rows,
                            cols);
    }
    if (rowwise.elements) {
        if (rowwise.axis == AXIS_SQUARE) reduce_squares(&tile.row_amax);
        of_rows = find_scales<T, 1>(tile.row_amax, FORMAT, rounding, rowwise.form == FORM_DECODED, lane);
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            int r = lane / ROW_LANES + (sharer<1>(lane) * SHARE + i) * STEP_ROWS;
            row_scales[r][(warp * ROW_LANES + lane % ROW_LANES) / BLOCK_LANES] = of_rows.codes[i];
        }
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int64_t of_step = row + i * STEP_ROWS, at = of_step * cols + col;
        bool wanted = i * STEP_ROWS < height;
        if (rowwise.elements) {
            store_elements<FORMAT, PLAIN>(rowwise, of_step, col, at, tile.x[i], repeat(of_rows.reciprocals, i),
                                          repeat(of_rows.values, i), wanted);
        }
        if (columnwise.elements) {
            store_elements<FORMAT, PLAIN>(columnwise, of_step, col, at, tile.x[i], of_columns.reciprocals,
                                          of_columns.values, wanted);
        }
    }
    if (!rowwise.elements || rowwise.form == FORM_DECODED) return;
    __syncthreads();
    store_row_scales(rowwise, row_scales, corner, rows, cols);
}

// By columns

// Returns the 16 random bits of an element.
static __device__ __forceinline__ uint32_t random_bits(const Encoding &encoding, int64_t row, int64_t col) {
    uint16_t random[DRAWN_TOGETHER];
    uint32_t bits = 0;
    encoding_draw(random, &encoding, row, col / DRAWN_TOGETHER);
#pragma unroll
    for (int i = 0; i < DRAWN_TOGETHER; i++) {
        if (i == col % DRAWN_TOGETHER) bits = random[i];
    }
    return bits;
}

// Returns the code of an element that is multiplied by `multiplier` and the tensor's prescale.
// PLAIN: the tensor's encoding is.
template <bool PLAIN>
static __device__ __forceinline__ uint8_t encode_element(const QuantizedTensor &copy, int64_t row, int64_t col, float x,
                                                         float multiplier) {
    if (PLAIN) return mx_encode(copy.format, x * multiplier);
    float scaled = x * (multiplier * encoding_prescale(&copy.encoding));
    if (copy.encoding.rounding == ROUND_NEAREST) return mx_encode(copy.format, scaled);
    return mx_encode_stochastic(copy.format, scaled, random_bits(copy.encoding, row, col));
}

template <bool PLAIN>
static __device__ __forceinline__ void store_element(const QuantizedTensor &copy, int64_t row, int64_t col, float x,
                                                     uint8_t scale) {
    int64_t at = row * copy.cols + col;
    uint8_t code = encode_element<PLAIN>(copy, row, col, x, mx_scale_reciprocal(scale));
    if (copy.form == FORM_DECODED) {
        from_float((Bf16 *)copy.elements + at, mx_decode(copy.format, code) * mx_scale_value(scale));
    } else {
        copy.elements[at] = code;
    }
}

// A warp's columns are one block of each row, also beyond the tensor's edge. PLAIN: both copies'
// encodings are.
template <typename From, bool PLAIN>
static __global__ void __launch_bounds__(THREADS)
    quantize_columns_kernel(QuantizedTensor rowwise, QuantizedTensor columnwise, From source, Tensor stored,
                            float *partials, int64_t rows, int64_t cols, ScaleRounding rounding) {
    __shared__ float made[TILE_ROWS][THREADS];
    Corner corner = tile_corner(cols, THREADS);
    int64_t col = corner.col + threadIdx.x, end = rows < corner.row + TILE_ROWS ? rows : corner.row + TILE_ROWS;
    bool inside = col < cols;
    uint32_t column_amax = 0;
    float sum = 0;
    for (int64_t row = corner.row; row < end; row++) {
        float x = inside ? source.element(row, col) : 0;
        sum += x;
        made[row - corner.row][threadIdx.x] = x;
        column_amax = larger(column_amax, mx_magnitude_bits(x));
        if (inside && stored.data) set_element(stored, row, col, x);
    }
    if (inside && partials) partials[corner.row / TILE_ROWS * cols + col] = sum;
    if (columnwise.elements) {
        uint8_t code = mx_scale_code(columnwise.format, rounding, column_amax);
        for (int64_t row = corner.row; row < end && inside; row++) {
            store_element<PLAIN>(columnwise, row, col, made[row - corner.row][threadIdx.x], code);
        }
        if (columnwise.form == FORM_SWIZZLED) {
            store_swizzled_column_scale(columnwise.scales, code, corner.row, col, rows);
        } else if (columnwise.form == FORM_PLAIN && inside) {
            columnwise.scales[corner.row / MX_BLOCK * cols + col] = code;
        }
    }
    if (!rowwise.elements) return;
    bool square = rowwise.axis == AXIS_SQUARE;
    for (int64_t row = corner.row; row < end; row++) {
        float x = made[row - corner.row][threadIdx.x];
        uint32_t amax = larger_over_lanes<float, 1, WARP>(square ? column_amax : mx_magnitude_bits(x));
        uint8_t code = mx_scale_code(rowwise.format, rounding, amax);
        if (inside) store_element<PLAIN>(rowwise, row, col, x, code);
        if (col % MX_BLOCK != 0) continue;
        if (rowwise.form == FORM_SWIZZLED) {
            rowwise.scales[mx_swizzled_scale_offset(row, col / MX_BLOCK, cols)] = code;
        } else if (rowwise.form == FORM_PLAIN && inside && (!square || row == corner.row)) {
            rowwise.scales[mx_scale_offset(rowwise.axis, row, col, cols)] = code;
        }
    }
    if (rowwise.form != FORM_SWIZZLED || end < rows || col % MX_BLOCK != 0) return;
    for (int64_t row = rows; row % SWIZZLE_OUTER != 0; row++) {
        rowwise.scales[mx_swizzled_scale_offset(row, col / MX_BLOCK, cols)] = 0;
    }
}

// Launches

// Returns whether a copy that is wanted has a plain encoding.
static inline bool copy_is_plain(const QuantizedTensor *copy) {
    return !copy->elements || encoding_is_plain(&copy->encoding);
}

// Returns whether the first kernel can write a copy.
static inline bool copy_takes_eights(const QuantizedTensor *copy) {
    if (!copy_is_plain(copy) && (copy->format != FORMAT_E2M1 || copy->form == FORM_TRANSPOSED)) return false;
    if (copy->form == FORM_DECODED) return is_aligned(copy->elements);
    // Other scales than these are written one by one.
    bool eight_scales = copy->form == FORM_SWIZZLED || copy->axis == AXIS_COLUMNWISE;
    return takes_eight_codes(copy->elements) && (!eight_scales || takes_eight_codes(copy->scales));
}

// Returns whether the first kernel can make both copies in one pass.
static inline bool have_one_format(const QuantizedTensor *row, const QuantizedTensor *column) {
    return !row->elements || !column->elements || row->format == column->format;
}

// Quantizes what `from` makes, (rows, cols), by the first kernel, into one of FORMATS. A copy
// without elements isn't wanted, nor is `stored` without data.
template <Format FORMAT, Format... FORMATS, typename From>
static void quantize_tiles(QuantizedTensor row, QuantizedTensor column, From from, Tensor stored, float *partials,
                           int64_t rows, int64_t cols, ScaleRounding rounding) {
    if constexpr (sizeof...(FORMATS) > 0) {
        if ((row.elements ? row : column).format != FORMAT) {
            quantize_tiles<FORMATS...>(row, column, from, stored, partials, rows, cols, rounding);
            return;
        }
    }
    CUDA_LAUNCH((quantize_kernel<From, FORMAT, true>), num_tiles(rows, cols, TILE_COLS), THREADS, 0, row, column, from,
                stored, partials, rows, cols, rounding);
}

// Does so of E2M1 with encodings that aren't plain.
template <typename From>
static void quantize_encoded(QuantizedTensor row, QuantizedTensor column, From from, Tensor stored, float *partials,
                             int64_t rows, int64_t cols, ScaleRounding rounding) {
    CUDA_LAUNCH((quantize_kernel<From, FORMAT_E2M1, false>), num_tiles(rows, cols, TILE_COLS), THREADS, 0, row, column,
                from, stored, partials, rows, cols, rounding);
}

// Does so by the second kernel.
template <typename From>
static void quantize_columns(QuantizedTensor row, QuantizedTensor column, From from, Tensor stored, float *partials,
                             int64_t rows, int64_t cols, ScaleRounding rounding) {
    auto kernel = copy_is_plain(&row) && copy_is_plain(&column) ? quantize_columns_kernel<From, true>
                                                                : quantize_columns_kernel<From, false>;
    CUDA_LAUNCH(kernel, num_tiles(rows, cols, THREADS), THREADS, 0, row, column, from, stored, partials, rows, cols,
                rounding);
}

// Quantizes into copies whose scalings aren't MX, each unless NULL: quantize_scaled.cu. Returns
// whether it also stored what is stored, and wrote `partials` as quantize_kernel does.
bool quantize_scaled(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in, float *partials);
