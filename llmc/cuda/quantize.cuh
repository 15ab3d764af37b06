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

A second kernel, whose lanes have a column each, does all else: other dtypes, rows that don't begin
and end at multiples of 16 bytes of input and 8 of codes, and copies of different formats of what is
made.

A source is a struct that a kernel takes by value. For the first kernel it has an Element, float or
Bf16, IS_MADE and load(); for the second, element().
*/
#pragma once

#include "eights.cuh"
#include "ops.cuh"

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

// A source loads a lane's elements, from `row` and `col` on: of STEPS rows, of which those up to
// `rows` are in the tensor, zeros for the others; all zeros where `inside` is false.
template <typename T>
static __device__ __forceinline__ void load_rows(Eight<T> *x, const T *in, int64_t stride, int64_t row, int64_t col,
                                                 int64_t rows, bool inside) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int64_t r = row + i * STEP_ROWS;
        x[i] = load_eight(in + r * stride + col, inside && r < rows);
    }
}

template <typename T> static __device__ __forceinline__ float value_at(const Eight<T> &x, int c) {
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

// The larger magnitude bits of each element.
template <typename T> static __device__ __forceinline__ uint32_t larger_word(uint32_t a, uint32_t b) {
    if (sizeof(T) == 4) return larger(a, b);
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    return larger(a & 0xFFFF0000u, b & 0xFFFF0000u) | larger(a & 0xFFFFu, b & 0xFFFFu);
#endif
}

// A warp's elements, and the amaxes (as magnitude bits) of their blocks: of the lane's rows and of
// its columns.
template <typename T> struct WarpTile {
    Eight<T> x[STEPS];
    uint32_t row_amax[STEPS];
    Eight<T> column_amax;
};

template <typename T> static __device__ __forceinline__ void find_amaxes(WarpTile<T> *tile) {
    tile->column_amax = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        uint32_t amax = 0;
#pragma unroll
        for (int w = 0; w < Eight<T>::WORDS; w++) {
            uint32_t magnitudes = tile->x[i].x[w] & (sizeof(T) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu);
            tile->column_amax.x[w] = larger_word<T>(tile->column_amax.x[w], magnitudes);
            amax = larger_word<T>(amax, magnitudes);
        }
        tile->row_amax[i] = sizeof(T) == 4 ? amax : larger(amax & 0xFFFF0000u, amax << 16);
    }
}

// The largest magnitude bits over the lanes whose numbers differ in the bits from FIRST to below
// END.
template <typename T, int FIRST, int END> static __device__ __forceinline__ uint32_t larger_over_lanes(uint32_t amax) {
#pragma unroll
    for (int distance = FIRST; distance < END; distance *= 2) {
        amax = larger_word<T>(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
    }
    return amax;
}

// Make the maxima of lanes' shares those of whole blocks, and those of rows' blocks those of square
// ones.
template <typename T> static __device__ __forceinline__ void reduce_rows(WarpTile<T> *tile) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        tile->row_amax[i] = larger_over_lanes<float, 1, BLOCK_LANES>(tile->row_amax[i]);
    }
}

template <typename T> static __device__ __forceinline__ void reduce_squares(WarpTile<T> *tile) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        amax = larger(amax, tile->row_amax[i]);
    }
    amax = larger_over_lanes<float, ROW_LANES, WARP>(amax);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        tile->row_amax[i] = amax;
    }
}

template <typename T> static __device__ __forceinline__ void reduce_columns(WarpTile<T> *tile) {
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w++) {
        tile->column_amax.x[w] = larger_over_lanes<T, ROW_LANES, WARP>(tile->column_amax.x[w]);
    }
}

// A swizzled scale of the column's block that begins at `row`, and, after the column's last block,
// padding.
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

// The scales of a lane's eight columns, which the lanes that have the same columns share.
static __device__ __forceinline__ void store_column_scales(const QuantizedTensor &columnwise, uint64_t codes,
                                                           int64_t row, int64_t col, int lane, int64_t rows,
                                                           int64_t cols) {
    if (columnwise.form == FORM_PLAIN) {
        if (col < cols && lane < ROW_LANES) *(uint64_t *)(columnwise.scales + row / MX_BLOCK * cols + col) = codes;
    } else if (columnwise.form == FORM_SWIZZLED && col < (cols + SWIZZLE_OUTER - 1) / SWIZZLE_OUTER * SWIZZLE_OUTER) {
        const int SHARE = LANE_COLS / STEP_ROWS;
        for (int c = lane / ROW_LANES * SHARE; c < (lane / ROW_LANES + 1) * SHARE; c++) {
            store_swizzled_column_scale(columnwise.scales, (uint8_t)(codes >> (8 * c)), row, col + c, rows);
        }
    }
}

// The scales of a tile's rows. Where these are the last rows, rows of padding follow them.
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

// Eight codes of a copy, or what they decode to: `scales` holds a code of each column's scale, or
// of all of them.
template <Format FORMAT, bool ONE_SCALE>
static __device__ __forceinline__ void store_elements(const QuantizedTensor &copy, int64_t at, uint64_t codes,
                                                      uint64_t scales) {
    if (copy.form != FORM_DECODED) {
        *(uint64_t *)(copy.elements + at) = codes;
        return;
    }
    float x[LANE_COLS];
    decode_eight(x, FORMAT, codes);
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        x[c] *= mx_scale_value((uint8_t)(scales >> (ONE_SCALE ? 0 : 8 * c)));
    }
    store_eight((Bf16 *)copy.elements + at, x);
}

// Sums of a lane's columns over the tile's rows: over its own, then over those of the lanes that have
// the same columns.
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

// FORMAT is both copies' format. A copy without elements isn't wanted. Row r of `partials` (rows / 32,
// cols; or NULL) gets the sums of the columns of the r-th 32 rows.
template <typename From, Format FORMAT>
static __global__ void __launch_bounds__(THREADS, sizeof(typename From::Element) == 4 ? 4
                                                  : From::IS_MADE                     ? 5
                                                                                      : 6)
    quantize_kernel(QuantizedTensor rowwise, QuantizedTensor columnwise, From source, Tensor stored, float *partials,
                    int64_t rows, int64_t cols, ScaleRounding rounding) {
    __shared__ __align__(4) uint8_t row_scales[TILE_ROWS][TILE_BLOCKS];
    Corner corner = tile_corner(cols, TILE_COLS);
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    int64_t row = corner.row + lane / ROW_LANES, col = corner.col + warp * WARP_COLS + lane % ROW_LANES * LANE_COLS;
    bool inside = col < cols;
    WarpTile<typename From::Element> tile;
    source.load(tile.x, row, col, rows, inside);
    if (From::IS_MADE && stored.data && inside) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (row + i * STEP_ROWS < rows) store_made(stored, row + i * STEP_ROWS, col, tile.x[i]);
        }
    }
    if (partials) store_column_sums(partials + corner.row / TILE_ROWS * cols + col, tile.x, lane, inside);
    find_amaxes(&tile);

    float column_reciprocals[LANE_COLS] = {};
    uint64_t column_codes = 0;
    if (columnwise.elements) {
        reduce_columns(&tile);
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            uint8_t code = mx_scale_code(FORMAT, rounding, bits_at(tile.column_amax, c));
            column_reciprocals[c] = mx_scale_reciprocal(code);
            column_codes |= (uint64_t)code << (8 * c);
        }
        store_column_scales(columnwise, column_codes, corner.row, col, lane, rows, cols);
    }
    uint64_t row_codes = 0;
    if (rowwise.elements) {
        reduce_rows(&tile);
        if (rowwise.axis == AXIS_SQUARE) reduce_squares(&tile);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            row_codes |= (uint64_t)mx_scale_code(FORMAT, rounding, tile.row_amax[i]) << (8 * i);
        }
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int64_t at = (row + i * STEP_ROWS) * cols + col;
        bool wanted = inside && row + i * STEP_ROWS < rows;
        float x[LANE_COLS];
        if (rowwise.elements) {
            uint8_t code = (uint8_t)(row_codes >> (8 * i));
            float reciprocal = mx_scale_reciprocal(code);
#pragma unroll
            for (int c = 0; c < LANE_COLS; c++) {
                x[c] = value_at(tile.x[i], c) * reciprocal;
            }
            uint64_t codes = encode_eight(FORMAT, x);
            if (wanted) store_elements<FORMAT, true>(rowwise, at, codes, code);
            if (lane % BLOCK_LANES == 0) {
                int block = (warp * ROW_LANES + lane % ROW_LANES) / BLOCK_LANES;
                row_scales[lane / ROW_LANES + i * STEP_ROWS][block] = code;
            }
        }
        if (columnwise.elements) {
#pragma unroll
            for (int c = 0; c < LANE_COLS; c++) {
                x[c] = value_at(tile.x[i], c) * column_reciprocals[c];
            }
            uint64_t codes = encode_eight(FORMAT, x);
            if (wanted) store_elements<FORMAT, false>(columnwise, at, codes, column_codes);
        }
    }
    if (!rowwise.elements || rowwise.form == FORM_DECODED) return;
    __syncthreads();
    store_row_scales(rowwise, row_scales, corner, rows, cols);
}

// By columns

static __device__ __forceinline__ void store_element(const QuantizedTensor &copy, int64_t at, float scaled,
                                                     uint8_t scale) {
    uint8_t code = mx_encode(copy.format, scaled);
    if (copy.form == FORM_DECODED) {
        from_float((Bf16 *)copy.elements + at, mx_decode(copy.format, code) * mx_scale_value(scale));
    } else {
        copy.elements[at] = code;
    }
}

// A warp's columns are one block of each row, also beyond the tensor's edge.
template <typename From>
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
        float reciprocal = mx_scale_reciprocal(code);
        for (int64_t row = corner.row; row < end && inside; row++) {
            store_element(columnwise, row * cols + col, made[row - corner.row][threadIdx.x] * reciprocal, code);
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
        if (inside) store_element(rowwise, row * cols + col, x * mx_scale_reciprocal(code), code);
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

// Returns whether the first kernel can write a copy.
static inline bool copy_takes_eights(const QuantizedTensor *copy) {
    if (copy->form == FORM_DECODED) return is_aligned(copy->elements);
    // Other scales than these are written one by one.
    bool eight_scales = copy->form == FORM_SWIZZLED || copy->axis == AXIS_COLUMNWISE;
    return takes_eight_codes(copy->elements) && (!eight_scales || takes_eight_codes(copy->scales));
}

// Returns whether the first kernel can make both copies in one pass.
static inline bool have_one_format(const QuantizedTensor *row, const QuantizedTensor *column) {
    return !row->elements || !column->elements || row->format == column->format;
}

// Quantizes what `from` makes, (rows, cols), by the first kernel. A copy without elements isn't
// wanted, nor is `stored` without data.
template <typename From>
static void quantize_tiles(QuantizedTensor row, QuantizedTensor column, From from, Tensor stored, float *partials,
                           int64_t rows, int64_t cols, ScaleRounding rounding) {
#define QUANTIZE(constant)                                                                                          \
    CUDA_LAUNCH((quantize_kernel<From, constant>), num_tiles(rows, cols, TILE_COLS), THREADS, 0, row, column, from, \
                stored, partials, rows, cols, rounding)
    MX_WITH_CONSTANT_FORMAT(row.elements ? row.format : column.format, QUANTIZE)
#undef QUANTIZE
}

// Does so by the second kernel.
template <typename From>
static void quantize_columns(QuantizedTensor row, QuantizedTensor column, From from, Tensor stored, float *partials,
                             int64_t rows, int64_t cols, ScaleRounding rounding) {
    CUDA_LAUNCH((quantize_columns_kernel<From>), num_tiles(rows, cols, THREADS), THREADS, 0, row, column, from, stored,
                partials, rows, cols, rounding);
}
