/*
The quantizer's inverse, conversion between dtypes, scales into the layouts of block-scaled GEMMs,
codes transposed and packed, and sums of products that are multiplied by scales.

Dequantizing and converting have a second kernel each, for rows that don't begin and end at
multiples of 16 bytes of values and 8 of codes, and for codes that are stored transposed. There a
lane has a column.
*/
#include "eights.cuh"

enum { THREADS = 128 };

// A thread of the kernels by eights has eight neighbouring columns of four rows, a warp 256
// columns.
enum { CONVERT_ROWS = 4, CONVERT_COLS = WARP * LANE_COLS, CONVERT_THREADS = TILE_ROWS / CONVERT_ROWS * WARP };

// Where the scale of an element's block lies.
static __device__ __forceinline__ int64_t scale_offset(const QuantizedTensor &q, int64_t row, int64_t col) {
    bool rowwise = q.axis == AXIS_ROWWISE;
    if (q.form == FORM_SWIZZLED) {
        return rowwise ? mx_swizzled_scale_offset(row, col / MX_BLOCK, q.cols)
                       : mx_swizzled_scale_offset(col, row / MX_BLOCK, q.rows);
    }
    return mx_scale_offset(q.axis, row, col, q.cols);
}

// The scales of eight neighbouring columns' blocks, the first in the lowest byte.
static __device__ __forceinline__ uint64_t eight_column_scales(const QuantizedTensor &q, int64_t row, int64_t col) {
    if (q.form != FORM_SWIZZLED) return *(const uint64_t *)(q.scales + scale_offset(q, row, col));
    uint64_t scales = 0;
    for (int c = 0; c < LANE_COLS; c++) {
        scales |= (uint64_t)q.scales[scale_offset(q, row, col + c)] << (8 * c);
    }
    return scales;
}

template <typename T, Format FORMAT>
static __global__ void __launch_bounds__(CONVERT_THREADS)
    dequantize_kernel(T *__restrict__ out, int64_t stride, QuantizedTensor in, bool to_bf16) {
    Corner corner = tile_corner(in.cols, CONVERT_COLS);
    int64_t row = corner.row + (int)threadIdx.x / WARP * CONVERT_ROWS;
    int64_t col = corner.col + (int)threadIdx.x % WARP * LANE_COLS;
    if (col >= in.cols) return;
    uint64_t codes[CONVERT_ROWS] = {}, column_scales = 0;
    uint8_t row_scales[CONVERT_ROWS] = {};
    if (in.axis == AXIS_COLUMNWISE) column_scales = eight_column_scales(in, row, col);
#pragma unroll
    for (int i = 0; i < CONVERT_ROWS; i++) {
        if (row + i >= in.rows) continue;
        codes[i] = *(const uint64_t *)(in.elements + (row + i) * in.cols + col);
        if (in.axis != AXIS_COLUMNWISE) row_scales[i] = in.scales[scale_offset(in, row + i, col)];
    }
#pragma unroll
    for (int i = 0; i < CONVERT_ROWS; i++) {
        float x[LANE_COLS];
        decode_eight(x, FORMAT, codes[i]);
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            uint8_t scale = in.axis != AXIS_COLUMNWISE ? row_scales[i] : (uint8_t)(column_scales >> (8 * c));
            x[c] *= mx_scale_value(scale);
            if (to_bf16 && sizeof(T) == 4) x[c] = mx_from_bf16(mx_to_bf16(x[c]));
        }
        if (row + i < in.rows) store_eight(out + (row + i) * stride + col, x);
    }
}

// Of a scaling that isn't MX: what elements of a block are multiplied by, but for the tensor's
// factor.
static __device__ __forceinline__ float scaled_block_value(const QuantizedTensor &q, int64_t row, int64_t col) {
    return scaling_kept_value(q.scaling, q.scales, scaling_block_at(q.scaling, q.axis, row, col, q.cols));
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    dequantize_unaligned_kernel(T *__restrict__ out, int64_t stride, QuantizedTensor in, bool to_bf16) {
    Corner corner = tile_corner(in.cols, THREADS);
    int64_t col = corner.col + threadIdx.x;
    if (col >= in.cols) return;
    for (int64_t row = corner.row; row < corner.row + TILE_ROWS && row < in.rows; row++) {
        float value = in.scaling == SCALING_MX ? mx_scale_value(in.scales[scale_offset(in, row, col)])
                                               : scaled_block_value(in, row, col);
        float x = mx_decode(in.format, in.elements[code_at(in, row, col)]) * value;
        if (to_bf16) x = mx_from_bf16(mx_to_bf16(x));
        from_float(out + row * stride + col, x);
    }
}

template <typename T, Format FORMAT>
static __global__ void __launch_bounds__(CONVERT_THREADS)
    dequantize_scaled_kernel(T *__restrict__ out, int64_t stride, QuantizedTensor in, bool to_bf16) {
    Corner corner = tile_corner(in.cols, CONVERT_COLS);
    int64_t row = corner.row + (int)threadIdx.x / WARP * CONVERT_ROWS;
    int64_t col = corner.col + (int)threadIdx.x % WARP * LANE_COLS;
    if (col >= in.cols || row >= in.rows) return;
    float of_column[LANE_COLS]; // the same in all of the lane's rows
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        of_column[c] = in.axis == AXIS_COLUMNWISE ? scaled_block_value(in, row, col + c) : 0;
    }
    for (int i = 0; i < CONVERT_ROWS && row + i < in.rows; i++) {
        float x[LANE_COLS], of_row = scaled_block_value(in, row + i, col);
        decode_eight(x, FORMAT, *(const uint64_t *)(in.elements + (row + i) * in.cols + col));
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            x[c] *= in.axis == AXIS_COLUMNWISE ? of_column[c] : of_row;
            if (to_bf16 && sizeof(T) == 4) x[c] = mx_from_bf16(mx_to_bf16(x[c]));
        }
        store_eight(out + (row + i) * stride + col, x);
    }
}

void cuda_dequantize(Tensor out, const QuantizedTensor *in, Format values) {
    if (in->rows == 0 || in->cols == 0) return;
    bool to_bf16 = values == FORMAT_BF16, is_mx = in->scaling == SCALING_MX;
    bool by_eights = in->form != FORM_TRANSPOSED && takes_eight_codes(in->elements) && takes_eight_codes(in->scales);
    if (!takes_eights(out) || !by_eights) {
        FOR_DTYPE(out.dtype, CUDA_LAUNCH((dequantize_unaligned_kernel<T>), num_tiles(in->rows, in->cols, THREADS),
                                         THREADS, 0, (T *)out.data, out.stride, *in, to_bf16));
        return;
    }
#define LAUNCH(kernel)                                                                                          \
    FOR_DTYPE(out.dtype, CUDA_LAUNCH((kernel), num_tiles(in->rows, in->cols, CONVERT_COLS), CONVERT_THREADS, 0, \
                                     (T *)out.data, out.stride, *in, to_bf16))
#define DEQUANTIZE(constant) LAUNCH((dequantize_kernel<T, constant>))
#define DEQUANTIZE_SCALED(constant) LAUNCH((dequantize_scaled_kernel<T, constant>))
    if (is_mx) MX_WITH_CONSTANT_FORMAT(in->format, DEQUANTIZE)
    if (!is_mx) MX_WITH_CONSTANT_FORMAT(in->format, DEQUANTIZE_SCALED)
#undef LAUNCH
#undef DEQUANTIZE
#undef DEQUANTIZE_SCALED
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
    // One row as rows of a tile's width, of which a thread block takes 32, and what is left.
    if (in.rows == 1 && in.cols > CONVERT_COLS) {
        int64_t rows = in.cols / CONVERT_COLS, rest = in.cols % CONVERT_COLS;
        cuda_convert(tensor_make(out.data, out.dtype, rows, CONVERT_COLS),
                     tensor_make(in.data, in.dtype, rows, CONVERT_COLS));
        cuda_convert(tensor_cols(out, in.cols - rest, rest), tensor_cols(in, in.cols - rest, rest));
        return;
    }
    if (out.dtype == FORMAT_FP32) {
        FOR_DTYPE(in.dtype, (convert<float, T>(out, in)));
    } else {
        FOR_DTYPE(in.dtype, (convert<Bf16, T>(out, in)));
    }
}

// A thread makes a word: the scales of four neighbouring blocks of one row or column. SCALING: MX,
// or NVFP4, whose blocks are those of both of its kinds.
template <Scaling SCALING>
static __global__ void swizzle_kernel(uint32_t *__restrict__ swizzled, QuantizedTensor in, Axis along,
                                      int64_t outer_count, int64_t blocks, int64_t words) {
    int64_t word = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, tile = word / 128;
    if (word >= words) return;
    int64_t tiles_in_row = (blocks + 3) / 4;
    int64_t outer = tile / tiles_in_row * 128 + word % 4 * 32 + word % 128 / 4, block = tile % tiles_in_row * 4;
    uint32_t codes = 0;
    for (int i = 0; i < 4; i++) {
        if (outer >= outer_count || block + i >= blocks) continue;
        int64_t k = (block + i) * scaling_block(SCALING);
        int64_t at = along == AXIS_ROWWISE ? scaling_block_at(SCALING, in.axis, outer, k, in.cols)
                                           : scaling_block_at(SCALING, in.axis, k, outer, in.cols);
        codes |= (uint32_t)in.scales[at] << (8 * i);
    }
    swizzled[word] = codes;
}

void cuda_swizzle_scales(uint8_t *swizzled, const QuantizedTensor *in, Axis along) {
    int64_t outer_count = along == AXIS_ROWWISE ? in->rows : in->cols;
    int64_t k = along == AXIS_ROWWISE ? in->cols : in->rows;
    int64_t words = scaling_swizzled_bytes(in->scaling, outer_count, k) / 4;
    if (words == 0) return;
#define SWIZZLE(scaling)                                                                                               \
    CUDA_LAUNCH((swizzle_kernel<scaling>), (unsigned)num_parts(words, THREADS), THREADS, 0, (uint32_t *)swizzled, *in, \
                along, outer_count, num_parts(k, scaling_block(scaling)), words)
    if (in->scaling == SCALING_MX) {
        SWIZZLE(SCALING_MX);
    } else {
        SWIZZLE(SCALING_NVFP4);
    }
#undef SWIZZLE
}

// A thread writes a scale, or what pads them.
static __global__ void arrange_kernel(float *__restrict__ arranged, QuantizedTensor in, bool along_rows, int64_t outer,
                                      int64_t blocks, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    bool is_square = in.axis == AXIS_SQUARE;
    int64_t padded = scaling_gemm_blocks(blocks * 128, is_square);
    int64_t o = is_square ? i / padded : i % outer, block = is_square ? i % padded : i / outer;
    int64_t across = scaling_blocks_across(in.scaling, in.axis, in.cols);
    int64_t from = along_rows ? o * across + block : block * across + o;
    arranged[i] = block < blocks ? scaling_kept_value(in.scaling, in.scales, from) : 0;
}

void cuda_arrange_scales(float *arranged, const QuantizedTensor *in, Axis along) {
    bool along_rows = along == AXIS_ROWWISE;
    int64_t outer = along_rows ? in->rows : in->cols, K = along_rows ? in->cols : in->rows;
    int64_t count = scaling_num_gemm_scales(outer, K, in->axis == AXIS_SQUARE);
    if (count == 0) return;
    CUDA_LAUNCH(arrange_kernel, (unsigned)num_parts(count, THREADS), THREADS, 0, arranged, *in, along_rows, outer,
                num_parts(K, 128), count);
}

// The scales of an operand's blocks that have one element of K: that of the product's row or column
// i is first[(i >> shift) * stride], or 1 where `first` is NULL.
struct BlockScales {
    const float *first;
    int64_t stride;
    int shift;
};

static BlockScales block_scales(Operand operand, bool k_along_rows, int64_t k) {
    const QuantizedTensor q = operand.quantized;
    if (!operand_is_summed_by_block(operand)) return {};
    int64_t block = scaling_block_at(q.scaling, q.axis, k_along_rows ? 0 : k, k_along_rows ? k : 0, q.cols);
    return {(const float *)q.scales + block, k_along_rows ? scaling_blocks_across(q.scaling, q.axis, q.cols) : 1,
            q.axis == AXIS_SQUARE ? 7 : 0};
}

static __device__ __forceinline__ float block_scale_at(const BlockScales &scales, int64_t i) {
    return scales.first ? scales.first[(i >> scales.shift) * scales.stride] : 1;
}

static __global__ void __launch_bounds__(THREADS)
    add_block_product(float *__restrict__ sum, const float *__restrict__ product, int64_t rows, int64_t cols,
                      BlockScales a, BlockScales b, int64_t first) {
    Corner corner = tile_corner(cols, THREADS);
    int64_t col = corner.col + threadIdx.x;
    if (col >= cols) return;
    float of_column = block_scale_at(b, col);
#pragma unroll 4
    for (int64_t row = corner.row; row < corner.row + TILE_ROWS && row < rows; row++) {
        int64_t i = row * cols + col;
        sum[i] = fmaf(product[i], block_scale_at(a, first + row) * of_column, sum[i]);
    }
}

void cuda_add_block_product(Tensor sum, Tensor product, Operand a, Operand b, GemmOptions options, int64_t row,
                            int64_t k) {
    CUDA_LAUNCH(add_block_product, num_tiles(sum.rows, sum.cols, THREADS), THREADS, 0, (float *)sum.data,
                (const float *)product.data, sum.rows, sum.cols, block_scales(a, !options.transpose_a, k),
                block_scales(b, options.transpose_b, k), row);
}

// A tile of codes on its way through shared memory. Rows of it begin at different banks.
enum {
    TRANSPOSE_TILE = 64,
    TRANSPOSE_BYTES = 16,
    TRANSPOSE_THREADS = TRANSPOSE_TILE * TRANSPOSE_TILE / TRANSPOSE_BYTES
};

typedef Pack<uint8_t> Bytes;

// A thread reads 16 neighbouring codes of a row of `codes` (rows, cols) and writes 16 of a row of
// `out` (cols, rows). PACKS: each 16 as one word. HALVES: also
// those written, two codes to a byte.
template <bool PACKS, bool HALVES>
static __global__ void __launch_bounds__(TRANSPOSE_THREADS)
    transpose_kernel(uint8_t *__restrict__ out, const uint8_t *__restrict__ codes, int64_t rows, int64_t cols) {
    __shared__ __align__(4) uint8_t tile[TRANSPOSE_TILE][TRANSPOSE_TILE + 4];
    unsigned tiles_in_row = (unsigned)((cols + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE);
    int64_t first_row = (int64_t)(blockIdx.x / tiles_in_row) * TRANSPOSE_TILE;
    int64_t first_col = (int64_t)(blockIdx.x % tiles_in_row) * TRANSPOSE_TILE;
    int line = (int)threadIdx.x * TRANSPOSE_BYTES / TRANSPOSE_TILE;
    int byte = (int)threadIdx.x * TRANSPOSE_BYTES % TRANSPOSE_TILE;

    Bytes bytes = {};
    int64_t row = first_row + line, col = first_col + byte;
    if (PACKS) {
        if (row < rows && col < cols) bytes = *(const Bytes *)(codes + row * cols + col);
    } else {
        for (int i = 0; i < TRANSPOSE_BYTES; i++) {
            if (row < rows && col + i < cols) bytes.x[i] = codes[row * cols + col + i];
        }
    }
#pragma unroll
    for (int i = 0; i < TRANSPOSE_BYTES; i++) {
        tile[line][byte + i] = bytes.x[i];
    }
    __syncthreads();
    uint64_t halves = 0;
#pragma unroll
    for (int i = 0; i < TRANSPOSE_BYTES; i++) {
        bytes.x[i] = tile[byte + i][line];
        halves |= (uint64_t)bytes.x[i] << (4 * i);
    }
    row = first_row + byte, col = first_col + line;
    if (HALVES) {
        if (row < rows && col < cols) *(uint64_t *)(out + (col * rows + row) / 2) = halves;
    } else if (PACKS) {
        if (row < rows && col < cols) *(Bytes *)(out + col * rows + row) = bytes;
    } else {
        for (int i = 0; i < TRANSPOSE_BYTES; i++) {
            if (row + i < rows && col < cols) out[col * rows + row + i] = bytes.x[i];
        }
    }
}

void cuda_transpose_codes(uint8_t *out, const uint8_t *codes, int64_t rows, int64_t cols) {
    if (rows == 0 || cols == 0) return;
    unsigned grid = (unsigned)(num_parts(rows, TRANSPOSE_TILE) * num_parts(cols, TRANSPOSE_TILE));
    if (((size_t)out | (size_t)codes | (size_t)rows | (size_t)cols) % TRANSPOSE_BYTES == 0) {
        CUDA_LAUNCH((transpose_kernel<true, false>), grid, TRANSPOSE_THREADS, 0, out, codes, rows, cols);
    } else {
        CUDA_LAUNCH((transpose_kernel<false, false>), grid, TRANSPOSE_THREADS, 0, out, codes, rows, cols);
    }
}

// Packs eight codes of four bits, a byte each, into a word.
static __device__ __forceinline__ uint32_t pack_eight(uint64_t codes) {
    codes = (codes | codes >> 4) & 0x00FF00FF00FF00FFu;
    codes = (codes | codes >> 8) & 0x0000FFFF0000FFFFu;
    return (uint32_t)(codes | codes >> 16);
}

enum { PACKED_TOGETHER = 32 };

// A thread packs 32 neighbouring codes, of which there is a multiple.
static __global__ void __launch_bounds__(THREADS)
    pack_kernel(uint8_t *__restrict__ out, const uint8_t *__restrict__ codes, int64_t count) {
    int64_t first = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * PACKED_TOGETHER;
    if (first >= count) return;
    const Pack<uint64_t> *in = (const Pack<uint64_t> *)(codes + first);
    Pack<uint64_t> pairs[2] = {in[0], in[1]};
    Pack<uint32_t> packed;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        packed.x[i] = pack_eight(pairs[i / 2].x[i % 2]);
    }
    *(Pack<uint32_t> *)(out + first / 2) = packed;
}

void cuda_pack_codes(uint8_t *out, const QuantizedTensor *in, Axis along) {
    if (in->rows == 0 || in->cols == 0) return;
    if (along == AXIS_ROWWISE) {
        int64_t count = in->rows * in->cols;
        CUDA_LAUNCH(pack_kernel, (unsigned)num_parts(count, PACKED_TOGETHER * THREADS), THREADS, 0, out, in->elements,
                    count);
    } else {
        unsigned grid = (unsigned)(num_parts(in->rows, TRANSPOSE_TILE) * num_parts(in->cols, TRANSPOSE_TILE));
        CUDA_LAUNCH((transpose_kernel<true, true>), grid, TRANSPOSE_THREADS, 0, out, in->elements, in->rows, in->cols);
    }
}

// Multiplies by the factor, unless NULL, over `divisor`: a thread for each element.
template <typename T>
static __global__ void multiply_kernel(T *out, int64_t stride, const float *factor, float divisor, int64_t rows,
                                       int64_t cols) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, at = i / cols * stride + i % cols;
    if (i / cols < rows) from_float(out + at, to_float(out[at]) * ((factor ? *factor : 1.0f) / divisor));
}

void cuda_decode(Tensor out, const QuantizedTensor *in) {
    if (in->rows == 0 || in->cols == 0) return;
    if (in->form == FORM_DECODED) {
        cuda_convert(out, tensor_make(in->elements, FORMAT_BF16, in->rows, in->cols));
    } else {
        cuda_dequantize(out, in, out.dtype);
    }
    float divisor = encoding_prescale(&in->encoding);
    if (!in->factor && divisor == 1) return;
    FOR_DTYPE(out.dtype, CUDA_LAUNCH((multiply_kernel<T>), (unsigned)num_parts(in->rows * in->cols, THREADS), THREADS,
                                     0, (T *)out.data, out.stride, in->factor, divisor, in->rows, in->cols));
}
