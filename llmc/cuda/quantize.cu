/*
Quantizer: BF16 or FP32 in, rowwise and/or columnwise MX copies out, in one pass over the input; its inverse, its
statistics, and conversion between dtypes.

A warp takes 32 rows x 64 columns, whole blocks of either axis, and holds them in registers: a lane has eight rows, four
apart, of eight neighbouring columns. A row's block lies in four neighbouring lanes, a column's block in the four lanes
that are eight apart. A thread block is four warps beside each other. What lies beyond the tensor's edges is held as
zeros, which change no block's amax, and not written out.

Each operation has a second kernel for rows that don't begin and end at multiples of 16 bytes of input and 8 of output.
There a lane has a column.
*/
#include "kernel.cuh"

enum {
    TILE_ROWS = MX_BLOCK,
    LANE_COLS = 8,
    WARP_COLS = 64,
    WARPS = 4,
    THREADS = WARPS * WARP,
    TILE_COLS = WARPS * WARP_COLS,
    ROW_LANES = WARP_COLS / LANE_COLS, // that read a row together
    STEP_ROWS = WARP / ROW_LANES,      // that a warp reads at a time
    STEPS = TILE_ROWS / STEP_ROWS,
    BLOCK_LANES = MX_BLOCK / LANE_COLS,
    TILE_BLOCKS = TILE_COLS / MX_BLOCK, // in a row of the tile
};

// Thread blocks for tiles of 32 rows x `tile_cols` columns.
static unsigned num_tiles(int64_t rows, int64_t cols, int64_t tile_cols) {
    return (unsigned)(num_parts(rows, TILE_ROWS) * num_parts(cols, tile_cols));
}

// The first row and column of this thread block's tile. Tiles are counted along the rows of tiles.
typedef struct {
    int64_t row, col;
} Corner;

static __device__ __forceinline__ Corner tile_corner(int64_t cols, int tile_cols) {
    unsigned tiles_in_row = (unsigned)((cols + tile_cols - 1) / tile_cols);
    Corner corner = {(int64_t)(blockIdx.x / tiles_in_row) * TILE_ROWS,
                     (int64_t)(blockIdx.x % tiles_in_row) * tile_cols};
    return corner;
}

// Eight neighbouring elements of a row as they are in memory: four words of two BF16s, or eight of one FP32.
template <typename T> struct Eight {
    static const int WORDS = LANE_COLS * (int)sizeof(T) / 4;
    uint32_t x[WORDS];
};

// Zeros where `inside` is false.
template <typename T> static __device__ __forceinline__ Eight<T> load_eight(const T *in, bool inside) {
    Eight<T> v = {};
    if (!inside) return v;
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w += 4) {
        Pack<uint32_t> pack = ((const Pack<uint32_t> *)in)[w / 4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v.x[w + i] = pack.x[i];
        }
    }
    return v;
}

// Two values as BF16, the first in the lower half. The instruction gives the bits of mx_to_bf16, but for a NaN's
// payload.
static __device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
#ifdef __CUDA_ARCH__
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return mx_to_bf16(low) | (uint32_t)mx_to_bf16(high) << 16;
#endif
}

// Said in assembly since nvcc 13.0 cuts assignments of eight BF16s into words.
static __device__ __forceinline__ void store_16_bytes(void *out, const uint32_t *words) {
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(out)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
#else
    memcpy(out, words, 16);
#endif
}

template <typename T> static __device__ __forceinline__ void store_eight(T *out, const float *x) {
    Eight<T> v;
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w++) {
        if constexpr (sizeof(T) == 4) {
            v.x[w] = mx_float_bits(x[w]);
        } else {
            v.x[w] = bf16_pair(x[2 * w], x[2 * w + 1]);
        }
    }
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w += 4) {
        store_16_bytes((char *)out + 4 * w, v.x + w);
    }
}

template <typename T> static __device__ __forceinline__ uint32_t bits_at(const Eight<T> &v, int i) {
    uint32_t word = v.x[i * (int)sizeof(T) / 4];
    return sizeof(T) == 4 ? word : i % 2 ? word & 0xFFFF0000u : word << 16;
}

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

// A warp's elements, and the amaxes (as magnitude bits) of their blocks: of the lane's rows and of its columns.
template <typename T> struct WarpTile {
    Eight<T> x[STEPS];
    uint32_t row_amax[STEPS];
    Eight<T> column_amax;
};

template <typename T>
static __device__ __forceinline__ WarpTile<T> load_tile(const T *in, int64_t stride, int64_t rows, bool inside) {
    WarpTile<T> tile;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        tile.x[i] = load_eight(in + i * STEP_ROWS * stride, inside && i * STEP_ROWS < rows);
    }
    tile.column_amax = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        uint32_t amax = 0;
#pragma unroll
        for (int w = 0; w < Eight<T>::WORDS; w++) {
            uint32_t magnitudes = tile.x[i].x[w] & (sizeof(T) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu);
            tile.column_amax.x[w] = larger_word<T>(tile.column_amax.x[w], magnitudes);
            amax = larger_word<T>(amax, magnitudes);
        }
        tile.row_amax[i] = sizeof(T) == 4 ? amax : larger(amax & 0xFFFF0000u, amax << 16);
    }
    return tile;
}

// Makes the maxima of lanes' shares those of whole blocks.
template <typename T> static __device__ __forceinline__ void reduce_rows(WarpTile<T> *tile) {
#pragma unroll
    for (int distance = 1; distance < BLOCK_LANES; distance *= 2) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, tile->row_amax[i], distance);
            tile->row_amax[i] = larger(tile->row_amax[i], other);
        }
    }
}

template <typename T> static __device__ __forceinline__ void reduce_columns(WarpTile<T> *tile) {
#pragma unroll
    for (int distance = ROW_LANES; distance < WARP; distance *= 2) {
#pragma unroll
        for (int w = 0; w < Eight<T>::WORDS; w++) {
            uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, tile->column_amax.x[w], distance);
            tile->column_amax.x[w] = larger_word<T>(tile->column_amax.x[w], other);
        }
    }
}

// Eight values to codes, the first in the lowest byte. The instruction for FP8 gives the bits of mx_encode: it
// saturates, Inf too, and makes every NaN 0x7F.
static __device__ __forceinline__ uint64_t encode_eight(Format format, const float *x) {
    uint64_t codes = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if (format == FORMAT_E4M3 || format == FORMAT_E5M2) {
#pragma unroll
        for (int i = 0; i < LANE_COLS; i += 2) {
            uint16_t pair;
            if (format == FORMAT_E4M3) {
                asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(x[i + 1]), "f"(x[i]));
            } else {
                asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(x[i + 1]), "f"(x[i]));
            }
            codes |= (uint64_t)pair << (8 * i);
        }
        return codes;
    }
#endif
#pragma unroll
    for (int i = 0; i < LANE_COLS; i++) {
        codes |= (uint64_t)mx_encode(format, x[i]) << (8 * i);
    }
    return codes;
}

// Eight codes to values, the first from the lowest byte. FP8 goes through FP16, which has all its values.
static __device__ __forceinline__ void decode_eight(float *x, Format format, uint64_t codes) {
#pragma unroll
    for (int i = 0; i < LANE_COLS; i += 2) {
        uint16_t pair = (uint16_t)(codes >> (8 * i));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        if (format == FORMAT_E4M3 || format == FORMAT_E5M2) {
            uint32_t halves;
            if (format == FORMAT_E4M3) {
                asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
            } else {
                asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
            }
            asm("cvt.f32.f16 %0, %1;" : "=f"(x[i]) : "h"((uint16_t)halves));
            asm("cvt.f32.f16 %0, %1;" : "=f"(x[i + 1]) : "h"((uint16_t)(halves >> 16)));
            continue;
        }
#endif
        x[i] = mx_decode(format, (uint8_t)pair);
        x[i + 1] = mx_decode(format, (uint8_t)(pair >> 8));
    }
}

// FORMAT is both copies' format. A copy without elements isn't wanted.
template <typename T, Format FORMAT>
static __global__ void __launch_bounds__(THREADS, sizeof(T) == 2 ? 6 : 4)
    quantize_kernel(QuantizedTensor rowwise, QuantizedTensor columnwise, const T *__restrict__ in, int64_t stride,
                    int64_t rows, int64_t cols, ScaleRounding rounding) {
    __shared__ uint8_t row_scales[TILE_ROWS][TILE_BLOCKS];
    Corner corner = tile_corner(cols, TILE_COLS);
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    int64_t row = corner.row + lane / ROW_LANES, col = corner.col + warp * WARP_COLS + lane % ROW_LANES * LANE_COLS;
    bool inside = col < cols;
    WarpTile<T> tile = load_tile(in + row * stride + col, stride, rows - row, inside);

    float column_reciprocals[LANE_COLS] = {};
    if (columnwise.elements) {
        reduce_columns(&tile);
        uint64_t codes = 0;
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            uint8_t code = mx_scale_code(FORMAT, rounding, bits_at(tile.column_amax, c));
            column_reciprocals[c] = mx_scale_reciprocal(code);
            codes |= (uint64_t)code << (8 * c);
        }
        if (inside && lane < ROW_LANES) *(uint64_t *)(columnwise.scales + corner.row / MX_BLOCK * cols + col) = codes;
    }
    uint64_t row_codes = 0;
    if (rowwise.elements) {
        reduce_rows(&tile);
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
                x[c] = mx_bits_float(bits_at(tile.x[i], c)) * reciprocal;
            }
            uint64_t codes = encode_eight(FORMAT, x);
            if (wanted) *(uint64_t *)(rowwise.elements + at) = codes;
            if (lane % BLOCK_LANES == 0) {
                int block = (warp * ROW_LANES + lane % ROW_LANES) / BLOCK_LANES;
                row_scales[lane / ROW_LANES + i * STEP_ROWS][block] = code;
            }
        }
        if (columnwise.elements) {
#pragma unroll
            for (int c = 0; c < LANE_COLS; c++) {
                x[c] = mx_bits_float(bits_at(tile.x[i], c)) * column_reciprocals[c];
            }
            uint64_t codes = encode_eight(FORMAT, x);
            if (wanted) *(uint64_t *)(columnwise.elements + at) = codes;
        }
    }
    if (!rowwise.elements) return;
    __syncthreads();
    int64_t blocks_in_row = mx_num_blocks(cols), first = corner.col / MX_BLOCK;
    for (int i = (int)threadIdx.x; i < TILE_ROWS * TILE_BLOCKS; i += THREADS) {
        int r = i / TILE_BLOCKS, block = i % TILE_BLOCKS;
        if (corner.row + r < rows && first + block < blocks_in_row) {
            rowwise.scales[(corner.row + r) * blocks_in_row + first + block] = row_scales[r][block];
        }
    }
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    quantize_unaligned_kernel(QuantizedTensor rowwise, QuantizedTensor columnwise, const T *__restrict__ in,
                              int64_t stride, int64_t rows, int64_t cols, ScaleRounding rounding) {
    Corner corner = tile_corner(cols, THREADS);
    int64_t col = corner.col + threadIdx.x, end = rows < corner.row + TILE_ROWS ? rows : corner.row + TILE_ROWS;
    bool inside = col < cols;
    float column_reciprocal = 0;
    if (columnwise.elements) {
        uint32_t amax = 0;
        for (int64_t row = corner.row; row < end && inside; row++) {
            amax = larger(amax, mx_magnitude_bits(to_float(in[row * stride + col])));
        }
        uint8_t code = mx_scale_code(columnwise.format, rounding, amax);
        column_reciprocal = mx_scale_reciprocal(code);
        if (inside) columnwise.scales[corner.row / MX_BLOCK * cols + col] = code;
    }
    for (int64_t row = corner.row; row < end; row++) {
        float x = inside ? to_float(in[row * stride + col]) : 0;
        if (rowwise.elements) {
            uint32_t amax = mx_magnitude_bits(x); // a warp's columns are one block of the row
            for (int distance = 1; distance < WARP; distance *= 2) {
                amax = larger(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
            }
            uint8_t code = mx_scale_code(rowwise.format, rounding, amax);
            uint8_t element = mx_encode(rowwise.format, x * mx_scale_reciprocal(code));
            if (inside) rowwise.elements[row * cols + col] = element;
            if (inside && col % MX_BLOCK == 0) rowwise.scales[row * mx_num_blocks(cols) + col / MX_BLOCK] = code;
        }
        if (columnwise.elements && inside) {
            columnwise.elements[row * cols + col] = mx_encode(columnwise.format, x * column_reciprocal);
        }
    }
}

static bool is_aligned(const void *p) { return (size_t)p % LANE_COLS == 0; }

// True where eight columns from a multiple of eight on are all in the tensor or none, and can be read as Packs.
static bool takes_eights(Tensor tensor) { return takes_packs(tensor) && tensor.cols % LANE_COLS == 0; }

void cuda_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Tensor in,
                   ScaleRounding rounding) {
    if (in.rows == 0 || in.cols == 0 || (!rowwise && !columnwise)) return;
    QuantizedTensor none = {NULL, NULL, FORMAT_E4M3, AXIS_ROWWISE, 0, 0};
    QuantizedTensor row = rowwise ? *rowwise : none, column = columnwise ? *columnwise : none;
    if (!takes_eights(in) || !is_aligned(row.elements) || !is_aligned(column.elements) || !is_aligned(column.scales)) {
        FOR_DTYPE(in.dtype, CUDA_LAUNCH((quantize_unaligned_kernel<T>), num_tiles(in.rows, in.cols, THREADS), THREADS,
                                        0, row, column, (const T *)in.data, in.stride, in.rows, in.cols, rounding));
        return;
    }
    if (rowwise && columnwise && rowwise->format != columnwise->format) {
        cuda_quantize(rowwise, NULL, in, rounding);
        cuda_quantize(NULL, columnwise, in, rounding);
        return;
    }
#define QUANTIZE(constant)                                                                                           \
    FOR_DTYPE(in.dtype, CUDA_LAUNCH((quantize_kernel<T, constant>), num_tiles(in.rows, in.cols, TILE_COLS), THREADS, \
                                    0, row, column, (const T *)in.data, in.stride, in.rows, in.cols, rounding))
    MX_WITH_CONSTANT_FORMAT(rowwise ? row.format : column.format, QUANTIZE)
#undef QUANTIZE
}

// A thread of the kernels below has eight neighbouring columns of four rows, a warp 256 columns.
enum { CONVERT_ROWS = 4, CONVERT_COLS = WARP * LANE_COLS, CONVERT_THREADS = TILE_ROWS / CONVERT_ROWS * WARP };

template <typename T, Format FORMAT>
static __global__ void __launch_bounds__(CONVERT_THREADS)
    dequantize_kernel(T *__restrict__ out, int64_t stride, QuantizedTensor in, bool to_bf16) {
    Corner corner = tile_corner(in.cols, CONVERT_COLS);
    int64_t row = corner.row + (int)threadIdx.x / WARP * CONVERT_ROWS;
    int64_t col = corner.col + (int)threadIdx.x % WARP * LANE_COLS;
    if (col >= in.cols) return;
    uint64_t codes[CONVERT_ROWS] = {}, column_scales = 0;
    uint8_t row_scales[CONVERT_ROWS] = {};
    if (in.axis == AXIS_COLUMNWISE) column_scales = *(const uint64_t *)(in.scales + row / MX_BLOCK * in.cols + col);
#pragma unroll
    for (int i = 0; i < CONVERT_ROWS; i++) {
        if (row + i >= in.rows) continue;
        codes[i] = *(const uint64_t *)(in.elements + (row + i) * in.cols + col);
        if (in.axis == AXIS_ROWWISE) row_scales[i] = in.scales[(row + i) * mx_num_blocks(in.cols) + col / MX_BLOCK];
    }
#pragma unroll
    for (int i = 0; i < CONVERT_ROWS; i++) {
        float x[LANE_COLS];
        decode_eight(x, FORMAT, codes[i]);
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            uint8_t scale = in.axis == AXIS_ROWWISE ? row_scales[i] : (uint8_t)(column_scales >> (8 * c));
            x[c] *= mx_scale_value(scale);
            if (to_bf16 && sizeof(T) == 4) x[c] = mx_from_bf16(mx_to_bf16(x[c]));
        }
        if (row + i < in.rows) store_eight(out + (row + i) * stride + col, x);
    }
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    dequantize_unaligned_kernel(T *__restrict__ out, int64_t stride, QuantizedTensor in, bool to_bf16) {
    Corner corner = tile_corner(in.cols, THREADS);
    int64_t col = corner.col + threadIdx.x, blocks_in_row = mx_num_blocks(in.cols);
    if (col >= in.cols) return;
    for (int64_t row = corner.row; row < corner.row + TILE_ROWS && row < in.rows; row++) {
        bool rowwise = in.axis == AXIS_ROWWISE;
        uint8_t scale = in.scales[rowwise ? row * blocks_in_row + col / MX_BLOCK : row / MX_BLOCK * in.cols + col];
        float x = mx_decode(in.format, in.elements[row * in.cols + col]) * mx_scale_value(scale);
        if (to_bf16) x = mx_from_bf16(mx_to_bf16(x));
        from_float(out + row * stride + col, x);
    }
}

void cuda_dequantize(Tensor out, const QuantizedTensor *in, Format values) {
    if (in->rows == 0 || in->cols == 0) return;
    bool to_bf16 = values == FORMAT_BF16;
    if (!takes_eights(out) || !is_aligned(in->elements) || !is_aligned(in->scales)) {
        FOR_DTYPE(out.dtype, CUDA_LAUNCH((dequantize_unaligned_kernel<T>), num_tiles(in->rows, in->cols, THREADS),
                                         THREADS, 0, (T *)out.data, out.stride, *in, to_bf16));
        return;
    }
#define DEQUANTIZE(constant)                                                                                        \
    FOR_DTYPE(out.dtype, CUDA_LAUNCH((dequantize_kernel<T, constant>), num_tiles(in->rows, in->cols, CONVERT_COLS), \
                                     CONVERT_THREADS, 0, (T *)out.data, out.stride, *in, to_bf16))
    MX_WITH_CONSTANT_FORMAT(in->format, DEQUANTIZE)
#undef DEQUANTIZE
}

template <typename To, typename From>
static __global__ void __launch_bounds__(CONVERT_THREADS)
    convert_kernel(To *__restrict__ out, int64_t out_stride, const From *__restrict__ in, int64_t in_stride,
                   int64_t rows, int64_t cols) {
    Corner corner = tile_corner(cols, CONVERT_COLS);
    int64_t row = corner.row + (int)threadIdx.x / WARP * CONVERT_ROWS;
    int64_t col = corner.col + (int)threadIdx.x % WARP * LANE_COLS;
    if (col >= cols) return;
    Eight<From> v[CONVERT_ROWS];
#pragma unroll
    for (int i = 0; i < CONVERT_ROWS; i++) {
        v[i] = load_eight(in + (row + i) * in_stride + col, row + i < rows);
    }
#pragma unroll
    for (int i = 0; i < CONVERT_ROWS; i++) {
        float x[LANE_COLS];
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            x[c] = mx_bits_float(bits_at(v[i], c));
        }
        if (row + i < rows) store_eight(out + (row + i) * out_stride + col, x);
    }
}

template <typename To, typename From>
static __global__ void __launch_bounds__(THREADS)
    convert_unaligned_kernel(To *__restrict__ out, int64_t out_stride, const From *__restrict__ in, int64_t in_stride,
                             int64_t rows, int64_t cols) {
    Corner corner = tile_corner(cols, THREADS);
    int64_t col = corner.col + threadIdx.x;
    if (col >= cols) return;
    for (int64_t row = corner.row; row < corner.row + TILE_ROWS && row < rows; row++) {
        from_float(out + row * out_stride + col, to_float(in[row * in_stride + col]));
    }
}

template <typename To, typename From> static void convert(Tensor out, Tensor in) {
    if (takes_eights(out) && takes_eights(in)) {
        CUDA_LAUNCH((convert_kernel<To, From>), num_tiles(in.rows, in.cols, CONVERT_COLS), CONVERT_THREADS, 0,
                    (To *)out.data, out.stride, (const From *)in.data, in.stride, in.rows, in.cols);
    } else {
        CUDA_LAUNCH((convert_unaligned_kernel<To, From>), num_tiles(in.rows, in.cols, THREADS), THREADS, 0,
                    (To *)out.data, out.stride, (const From *)in.data, in.stride, in.rows, in.cols);
    }
}

void cuda_convert(Tensor out, Tensor in) {
    if (in.rows == 0 || in.cols == 0) return;
    if (out.dtype == FORMAT_FP32) {
        FOR_DTYPE(in.dtype, (convert<float, T>(out, in)));
    } else {
        FOR_DTYPE(in.dtype, (convert<Bf16, T>(out, in)));
    }
}

// A thread makes a word: the scales of four neighbouring blocks of one row or column.
static __global__ void swizzle_kernel(uint32_t *__restrict__ swizzled, const uint8_t *__restrict__ scales, Axis axis,
                                      int64_t outer_count, int64_t blocks, int64_t words) {
    int64_t word = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, tile = word / 128;
    if (word >= words) return;
    int64_t tiles_in_row = (blocks + 3) / 4;
    int64_t outer = tile / tiles_in_row * 128 + word % 4 * 32 + word % 128 / 4, block = tile % tiles_in_row * 4;
    uint32_t codes = 0;
    for (int i = 0; i < 4; i++) {
        if (outer >= outer_count || block + i >= blocks) continue;
        int64_t at = axis == AXIS_ROWWISE ? outer * blocks + block + i : (block + i) * outer_count + outer;
        codes |= (uint32_t)scales[at] << (8 * i);
    }
    swizzled[word] = codes;
}

void cuda_swizzle_scales(uint8_t *swizzled, const QuantizedTensor *in) {
    int64_t outer_count = in->axis == AXIS_ROWWISE ? in->rows : in->cols;
    int64_t k = in->axis == AXIS_ROWWISE ? in->cols : in->rows;
    int64_t words = mx_swizzled_scale_bytes(outer_count, k) / 4;
    if (words == 0) return;
    CUDA_LAUNCH(swizzle_kernel, (unsigned)num_parts(words, THREADS), THREADS, 0, (uint32_t *)swizzled, in->scales,
                in->axis, outer_count, mx_num_blocks(k), words);
}

// Statistics are summed in parts, a thread block each, whose number depends on the tensor's shape alone.
enum { MAX_STATS_PARTS = 1024, STATS_THREADS = 128 };

// One block: `count` elements `stride` apart.
template <typename T>
static __device__ __forceinline__ void block_stats(QuantStats *stats, const T *in, int64_t stride, int64_t count,
                                                   Format format, ScaleRounding rounding) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < count; i++) {
        amax = larger(amax, mx_magnitude_bits(to_float(in[i * stride])));
    }
    uint8_t code = mx_scale_code(format, rounding, amax);
    float scale = mx_scale_value(code), reciprocal = mx_scale_reciprocal(code);
    uint32_t max_code = mx_element(format).max_code, magnitude_mask = (1u << mx_element(format).sign_bit) - 1;
    float max = mx_decode(format, (uint8_t)max_code);
    for (int64_t i = 0; i < count; i++) {
        float value = to_float(in[i * stride]);
        uint8_t element = mx_encode(format, value * reciprocal);
        double error = (double)(mx_decode(format, element) * scale) - value;
        uint32_t magnitude = element & magnitude_mask;
        stats->signal += (double)value * value;
        stats->noise += error * error;
        stats->clamped += fabsf(value * reciprocal) > max;
        stats->at_max += magnitude == max_code;
        stats->flushed += magnitude == 0 && value != 0;
    }
    stats->elements += count;
    stats->blocks++;
    stats->blocks_unlike_rceil += code != mx_scale_code(format, SCALE_RCEIL, amax);
    if (amax > mx_magnitude_bits((float)stats->amax)) stats->amax = mx_bits_float(amax);
}

MX_FUNCTION void add_stats(QuantStats *sum, const QuantStats *part) {
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

// A thread has whole blocks, one at a time.
template <typename T>
static __global__ void __launch_bounds__(STATS_THREADS)
    stats_kernel(QuantStats *parts, const T *__restrict__ in, int64_t stride, int64_t rows, int64_t cols, Axis axis,
                 Format format, ScaleRounding rounding) {
    __shared__ QuantStats of_threads[STATS_THREADS];
    QuantStats stats = {};
    bool rowwise = axis == AXIS_ROWWISE;
    int64_t blocks_in_row = rowwise ? mx_num_blocks(cols) : cols;
    int64_t blocks = mx_num_scales(axis, rows, cols);
    int64_t first = (int64_t)blockIdx.x * STATS_THREADS + threadIdx.x;
    for (int64_t block = first; block < blocks; block += (int64_t)gridDim.x * STATS_THREADS) {
        int64_t row = block / blocks_in_row * (rowwise ? 1 : MX_BLOCK);
        int64_t col = block % blocks_in_row * (rowwise ? MX_BLOCK : 1);
        int64_t left = rowwise ? cols - col : rows - row;
        block_stats(&stats, in + row * stride + col, rowwise ? 1 : stride, left < MX_BLOCK ? left : MX_BLOCK, format,
                    rounding);
    }
    of_threads[threadIdx.x] = stats;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < STATS_THREADS; i++) {
        add_stats(&stats, &of_threads[i]);
    }
    parts[blockIdx.x] = stats;
}

void cuda_quantize_stats(QuantStats *stats, Tensor in, Axis axis, Format format, ScaleRounding rounding) {
    static QuantStats *on_device; // 72 kB, taken by the first call and kept
    QuantStats parts[MAX_STATS_PARTS];
    if (!on_device) cuda_check(cudaMalloc((void **)&on_device, sizeof(parts)), "allocating memory for statistics");
    int64_t wanted = num_parts(mx_num_scales(axis, in.rows, in.cols), STATS_THREADS);
    int grid = wanted < MAX_STATS_PARTS ? (int)wanted : MAX_STATS_PARTS;
    if (grid == 0) return;
    FOR_DTYPE(in.dtype, CUDA_LAUNCH((stats_kernel<T>), grid, STATS_THREADS, 0, on_device, (const T *)in.data, in.stride,
                                    in.rows, in.cols, axis, format, rounding));
    cuda_check(cudaMemcpyAsync(parts, on_device, (size_t)grid * sizeof(*parts), cudaMemcpyDeviceToHost, cuda_stream()),
               "copying statistics from the GPU");
    cuda_check(cudaStreamSynchronize(cuda_stream()), "waiting for the GPU");
    for (int part = 1; part < grid; part++) {
        add_stats(&parts[0], &parts[part]);
    }
    add_stats(stats, &parts[0]);
}
