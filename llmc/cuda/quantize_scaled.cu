/*
The quantizer for scalings that aren't MX (llmc/numerics/scaling.h): the bits of
cpu/quantize_scaled.c, codes and scales, or the BF16 values that a tensor decodes to but for its
factor.

Where a tensor has a factor of its own amax, a pass over the source finds that first: an integer
maximum of magnitude bits, the same in any order. Where its scale is delayed, the pass that
quantizes finds the amax, for later tensors. A thread block takes 128 x 128, whole blocks of every
scaling and axis: eight warps, four below each other and two beside, with the 32 x 64 that a warp of
the MX quantizer holds in registers (quantize.cuh). Blocks that are longer than a warp's tile meet
in shared memory.

A row's or a column's block has one thread that finds its scale and hands it to the others by way of
shared memory, where those of 128 bring their maxima and NVFP4's their sixteen elements. A square's
every thread finds that has a part. Four over six's errors are added in the CPU's order.

A second kernel, whose lanes have a column each and make its elements as often as they need them,
does all else: rows that don't lie in steps of 16 bytes, formats that these scalings are seldom of,
and encodings that aren't plain, but NVFP4's.
*/
#include "sources.cuh"

enum {
    SIDE = 128,
    SQUARE_WARPS_ACROSS = SIDE / WARP_COLS,
    SQUARE_WARPS_DOWN = SIDE / TILE_ROWS,
    SQUARE_THREADS = SQUARE_WARPS_ACROSS * SQUARE_WARPS_DOWN * WARP,
    SQUARE_WARPS = SQUARE_THREADS / WARP,
    NVFP4_STEPS = NVFP4_SIDE / STEP_ROWS,
    AMAX_BLOCKS = 1024 // at most
};

static unsigned num_squares(int64_t rows, int64_t cols) {
    return (unsigned)(num_parts(rows, SIDE) * num_parts(cols, SIDE));
}

// Returns the first row and column of the i-th square.
static __device__ __forceinline__ Corner square_corner(unsigned i, int64_t cols) {
    unsigned squares_in_row = (unsigned)((cols + SIDE - 1) / SIDE);
    Corner corner = {(int64_t)(i / squares_in_row) * SIDE, (int64_t)(i % squares_in_row) * SIDE};
    return corner;
}

// Returns a thread's place in a square: of the first of its elements, where quantize.cuh's warps
// have them.
static __device__ __forceinline__ Corner place_in_square(Corner square) {
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    square.row += warp / SQUARE_WARPS_ACROSS * TILE_ROWS + lane / ROW_LANES;
    square.col += warp % SQUARE_WARPS_ACROSS * WARP_COLS + lane % ROW_LANES * LANE_COLS;
    return square;
}

// Returns the rows of the tensor from `place` on, as sources want it: none where its column lies
// outside.
static __device__ __forceinline__ int height_of(Corner place, int64_t rows, int64_t cols) {
    int64_t height = place.col < cols ? rows - place.row : 0;
    return height < TILE_ROWS ? (int)height : (int)TILE_ROWS;
}

// The tensor's amax

// Returns the largest magnitude bits of a few elements, and of a lane's.
template <typename T, int N> static __device__ __forceinline__ uint32_t largest_of(const Few<T, N> &elements) {
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < Few<T, N>::WORDS; w++) {
        largest = larger_word<T>(largest, magnitudes<T>(elements.x[w]));
    }
    return sizeof(T) == 4 ? largest : larger(largest << 16, largest & 0xFFFF0000u);
}

template <typename T> static __device__ __forceinline__ uint32_t largest_of_lane(const WarpTile<T> &tile) {
    Eight<T> largest = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        raise_each(&largest, tile.x[i]);
    }
    return largest_of(largest);
}

// Raises `amax` to the largest of a warp's magnitude bits, where that is larger.
static __device__ __forceinline__ void raise_amax(uint32_t *amax, uint32_t magnitude) {
    magnitude = larger_over_lanes<float, 1, WARP>(magnitude);
    if (threadIdx.x % WARP == 0) atomicMax(amax, magnitude);
}

template <typename From>
static __global__ void __launch_bounds__(SQUARE_THREADS)
    amax_kernel(uint32_t *amax, From source, int64_t rows, int64_t cols, unsigned squares) {
    uint32_t largest = 0;
    for (unsigned i = blockIdx.x; i < squares; i += gridDim.x) {
        Corner place = place_in_square(square_corner(i, cols));
        WarpTile<typename From::Element> tile;
        source.load(tile.x, place.row, place.col, height_of(place, rows, cols));
        largest = larger(largest, largest_of_lane(tile));
    }
    raise_amax(amax, largest);
}

static __global__ void __launch_bounds__(THREADS)
    amax_columns_kernel(uint32_t *amax, FromAny source, int64_t rows, int64_t cols) {
    Corner corner = tile_corner(cols, THREADS);
    int64_t col = corner.col + threadIdx.x;
    uint32_t largest = 0;
    for (int64_t row = corner.row; row < rows && row < corner.row + TILE_ROWS && col < cols; row++) {
        largest = larger(largest, mx_magnitude_bits(source.element(row, col)));
    }
    raise_amax(amax, largest);
}

// Delayed scales

static bool is_delayed(const QuantizedTensor *out) { return out && out->delayed.scale; }

// Sets the factor of a copy whose scale is delayed, and keeps an amax that is known already.
static __device__ void set_delayed_factor(const QuantizedTensor &out) {
    if (!out.delayed.scale) return;
    bool is_finite = !out.amax || *out.amax < 0x7F800000u;
    *out.factor = is_finite ? 1.0f / *out.delayed.scale : mx_bits_float(0x7FC00000u);
    if (out.amax) *out.delayed.amax = larger(*out.delayed.amax, *out.amax);
}

static __global__ void delayed_factors_kernel(QuantizedTensor rowwise, QuantizedTensor columnwise) {
    set_delayed_factor(rowwise);
    set_delayed_factor(columnwise);
}

// Keeps the larger of all lanes' magnitude bits, if a copy's scale is delayed. What isn't finite
// must not be hidden. An amax only grows: where it is larger already there is nothing to raise.
static __device__ __forceinline__ void keep_amax(const QuantizedTensor &out, uint32_t magnitude) {
    if (!out.delayed.scale) return;
    magnitude = larger_over_lanes<float, 1, WARP>(magnitude);
    if (threadIdx.x % WARP != 0) return;
    if (magnitude > *(const volatile uint32_t *)out.delayed.amax) atomicMax(out.delayed.amax, magnitude);
    if (magnitude >= 0x7F800000u) *out.factor = mx_bits_float(0x7FC00000u);
}

// What a tensor's blocks have in common.
struct TensorScale {
    float amax, s, inverse; // of which `inverse` is 1 / s
    bool is_moderate; // the amax is so far from the ends of FP32's range that no error of four over six is near them
};

static __device__ __forceinline__ TensorScale scale_of_amax(uint32_t amax, float s) {
    return {mx_bits_float(amax), s, 1.0f / s, scaling_46_is_moderate(amax)};
}

// The scale of a tensor whose amax, where it has a factor of that, is found. One thread of the grid
// writes that factor.
static __device__ __forceinline__ TensorScale tensor_scale(const QuantizedTensor &out, const uint32_t *amax) {
    if (out.delayed.scale) return scale_of_amax(0, *out.delayed.scale);
    uint32_t magnitude = out.factor ? *amax : 0;
    TensorScale scale = scale_of_amax(magnitude, scaling_tensor_scale(out.scaling, out.format, magnitude));
    if (out.factor && blockIdx.x == 0 && threadIdx.x == 0) *out.factor = scale.inverse;
    return scale;
}

// By squares

template <Scaling SCALING> constexpr bool IS_NVFP4 = SCALING == SCALING_NVFP4 || SCALING == SCALING_NVFP4_46;

// Rounds to E4M3, with mx_round's bits but for a NaN's.
static __device__ __forceinline__ float round_e4m3(float x) {
    float rounded[2];
    decode_pair(rounded, FORMAT_E4M3, encode_pair(FORMAT_E4M3, x, 0));
    return rounded[0];
}

// The scale of an NVFP4 block, with scaling_nvfp4_block's bits.
static __device__ __forceinline__ ElementScale nvfp4_scale(float scale, const TensorScale &of_tensor) {
    float value = round_e4m3(scale);
    return {scaling_finite(1.0f / (value * of_tensor.inverse)), value};
}

// The scale of a block with this amax, with scaling_block_of_amax's bits. `second`: four over six's
// second candidate.
template <Scaling SCALING, Format FORMAT>
static __device__ __forceinline__ ElementScale block_scale(uint32_t amax, const TensorScale &of_tensor,
                                                           bool second = false) {
    if (SCALING == SCALING_NVFP4) {
        return nvfp4_scale(mx_bits_float(amax) * (of_tensor.s * (1.0f / E2M1_LARGEST)), of_tensor);
    }
    if (SCALING == SCALING_NVFP4_46) {
        float scale = mx_bits_float(amax) / E2M1_LARGEST * of_tensor.s;
        return nvfp4_scale(second ? scale * 1.5f : scale, of_tensor);
    }
    ScaledBlock block = scaling_block_of_amax(SCALING, FORMAT, amax, of_tensor.s, false);
    return {block.multiplier, block.value};
}

// Keeps the scale of the block that begins at an element, if one does. `axis` is the copy's: where
// caller and scaling are constants, nothing is divided.
static __device__ __forceinline__ void keep_scale(const QuantizedTensor &out, Scaling scaling, Axis axis, int64_t row,
                                                  int64_t col, float value) {
    int64_t height = scaling_block_rows(scaling, axis), width = scaling_block_cols(scaling, axis);
    if (out.form == FORM_DECODED || row % height != 0 || col % width != 0) return;
    int64_t block = row / height * scaling_blocks_across(scaling, axis, out.cols) + col / width;
    scaling_keep_value(scaling, out.scales, block, value);
}

// Four over six's errors

// Returns scaling_46_error's value, without a division, which is a call and spills registers.
// MODERATE: the tensor's amax is (scaling_46_is_moderate).
template <bool MODERATE>
static __device__ __forceinline__ float error_46(const ElementScale &block, float amax, float x) {
    float product = round_magnitude(FORMAT_E2M1, x * block.multiplier) * block.value * amax;
    return fabsf((MODERATE ? scaling_46_quotient(product) : scaling_46_quotient_of_any(product)) - fabsf(x));
}

// A band of sixteen rows of a warp's tile: LANES_OF_ROW neighbouring lanes take a row,
// BLOCKS_OF_LANE blocks of it each, and a lane as many columns' blocks.
enum {
    LANES_OF_ROW = WARP / NVFP4_SIDE,
    BLOCKS_OF_ROW = WARP_COLS / NVFP4_SIDE,
    BLOCKS_OF_LANE = BLOCKS_OF_ROW / LANES_OF_ROW
};
static_assert(LANES_OF_ROW * BLOCKS_OF_LANE == BLOCKS_OF_ROW && WARP * BLOCKS_OF_LANE == WARP_COLS,
              "all of a band's rows and columns are taken");

// Returns the sum over the lanes that have the same blocks of all rows, in scaling_46_sum_rows'
// order.
static __device__ __forceinline__ float sum_of_rows(float x) {
#pragma unroll
    for (int distance = WARP / 2; distance >= LANES_OF_ROW; distance /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    }
    return x;
}

// Returns four over six's scale of sixteen values, as scale_of_sixteen does: of two candidates the
// first, unless the second errs less.
template <bool MODERATE>
static __device__ __forceinline__ ElementScale scale_46(const float *x, uint32_t amax, bool square,
                                                        const TensorScale &of_tensor) {
    ElementScale first = block_scale<SCALING_NVFP4_46, FORMAT_E2M1>(amax, of_tensor);
    ElementScale second = block_scale<SCALING_NVFP4_46, FORMAT_E2M1>(amax, of_tensor, true);
    float first_error = 0, second_error = 0;
#pragma unroll
    for (int i = 0; i < NVFP4_SIDE; i++) {
        first_error += error_46<MODERATE>(first, of_tensor.amax, x[i]);
        second_error += error_46<MODERATE>(second, of_tensor.amax, x[i]);
    }
    if (square) {
        first_error = sum_of_rows(first_error);
        second_error = sum_of_rows(second_error);
    }
    return second_error < first_error ? second : first;
}

// Returns the scale of sixteen values with this amax: a block, or a row of a square one, whose
// other rows other lanes have.
template <Scaling SCALING>
static __device__ __forceinline__ ElementScale scale_of_sixteen(const float *x, uint32_t amax, bool square,
                                                                const TensorScale &of_tensor) {
    if (SCALING == SCALING_NVFP4) return block_scale<SCALING, FORMAT_E2M1>(amax, of_tensor);
    return of_tensor.is_moderate ? scale_46<true>(x, amax, square, of_tensor)
                                 : scale_46<false>(x, amax, square, of_tensor);
}

// Scales of a lane's rows and columns

// Sixteen rows of a warp's tile, of which a lane takes whole blocks, and the blocks' scales. Eights
// of neighbouring rows lie in different banks.
template <typename T> struct Band {
    Eight<T> rows[NVFP4_SIDE][ROW_LANES];
    ElementScale found[WARP_COLS];

    __device__ __forceinline__ Eight<T> &eight(int row, int i) { return rows[row][i ^ row % ROW_LANES]; }
};

// Returns the warp's band in shared memory, with the rows from step `first` on.
template <typename T> static __device__ __forceinline__ Band<T> &fill_band(const WarpTile<T> &tile, int first) {
    __shared__ Band<T> bands[SQUARE_WARPS];
    int lane = (int)threadIdx.x % WARP;
    Band<T> &band = bands[threadIdx.x / WARP];
    __syncwarp(); // an earlier use is over
#pragma unroll
    for (int i = 0; i < NVFP4_STEPS; i++) {
        band.eight(i * STEP_ROWS + lane / ROW_LANES, lane % ROW_LANES) = tile.x[first + i];
    }
    __syncwarp();
    return band;
}

// Finds the scales of a lane's rows in blocks of 1x16 or 16x16, those from step `first` on.
template <Scaling SCALING, typename T>
static __device__ __forceinline__ void nvfp4_row_scales(ElementScale *scales, const QuantizedTensor &out,
                                                        const WarpTile<T> &tile, int first, Corner place,
                                                        const TensorScale &of_tensor) {
    enum { EIGHTS = NVFP4_SIDE / LANE_COLS };
    Band<T> &band = fill_band(tile, first);
    int lane = (int)threadIdx.x % WARP, row_of_band = lane / LANES_OF_ROW;
    bool square = out.axis == AXIS_SQUARE;
    int64_t row = place.row - lane / ROW_LANES + first * STEP_ROWS + row_of_band;
    // Unrolled, four over six's kernel for a tensor has 17,800 instructions, and 9,900 so (sm_90a).
#pragma unroll(SCALING == SCALING_NVFP4 ? BLOCKS_OF_LANE : 1)
    for (int i = 0; i < BLOCKS_OF_LANE; i++) {
        int block = i * LANES_OF_ROW + lane % LANES_OF_ROW;
        float values[NVFP4_SIDE];
        uint32_t amax = 0;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const Eight<T> &eight = band.eight(row_of_band, block * EIGHTS + e);
#pragma unroll
            for (int c = 0; c < LANE_COLS; c++) {
                values[e * LANE_COLS + c] = value_at(eight, c);
            }
            amax = larger(amax, largest_of(eight));
        }
        if (square) amax = larger_over_lanes<float, LANES_OF_ROW, WARP>(amax);
        ElementScale scale = scale_of_sixteen<SCALING>(values, amax, square, of_tensor);
        band.found[row_of_band * BLOCKS_OF_ROW + block] = scale;
        int64_t col = place.col - lane % ROW_LANES * LANE_COLS + block * NVFP4_SIDE;
        if (row >= out.rows || col >= out.cols) continue;
        if (square) keep_scale(out, SCALING, AXIS_SQUARE, row, col, scale.value);
        if (!square) keep_scale(out, SCALING, AXIS_ROWWISE, row, col, scale.value);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < NVFP4_STEPS; i++) {
        scales[i] = band.found[(i * STEP_ROWS + lane / ROW_LANES) * BLOCKS_OF_ROW + lane % ROW_LANES / EIGHTS];
    }
}

// Finds the scales of a lane's columns in blocks of sixteen rows, those from step `first` on.
template <Scaling SCALING, typename T>
static __device__ __forceinline__ void nvfp4_column_scales(ElementScale *scales, const QuantizedTensor &out,
                                                           const WarpTile<T> &tile, int first, Corner place,
                                                           const TensorScale &of_tensor) {
    Band<T> &band = fill_band(tile, first);
    int lane = (int)threadIdx.x % WARP;
    typedef Few<T, BLOCKS_OF_LANE> Columns;
    auto columns = [&](int row) {
        const int LANES = LANE_COLS / BLOCKS_OF_LANE; // that have an Eight together
        Columns of_lane;
#pragma unroll
        for (int w = 0; w < Columns::WORDS; w++) {
            of_lane.x[w] = band.eight(row, lane / LANES).x[lane % LANES * Columns::WORDS + w];
        }
        return of_lane;
    };
    Columns amax = {};
#pragma unroll
    for (int r = 0; r < NVFP4_SIDE; r++) {
        raise_each(&amax, columns(r));
    }
    int64_t row = place.row - lane / ROW_LANES + first * STEP_ROWS;
    int64_t col = place.col - lane % ROW_LANES * LANE_COLS + lane * BLOCKS_OF_LANE;
#pragma unroll(SCALING == SCALING_NVFP4 ? BLOCKS_OF_LANE : 1)
    for (int i = 0; i < BLOCKS_OF_LANE; i++) {
        float values[NVFP4_SIDE];
#pragma unroll
        for (int r = 0; r < NVFP4_SIDE; r++) {
            values[r] = value_at(columns(r), i);
        }
        ElementScale scale = scale_of_sixteen<SCALING>(values, bits_at(amax, i), false, of_tensor);
        band.found[lane * BLOCKS_OF_LANE + i] = scale;
        if (row < out.rows && col < out.cols) keep_scale(out, SCALING, AXIS_COLUMNWISE, row, col + i, scale.value);
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        scales[c] = band.found[lane % ROW_LANES * LANE_COLS + c];
    }
}

// The scales of a square's rows or columns of 128, or of it as a whole. `maxima` are those of
// `count` parts of each, which threads have written; a thread finds one scale.
template <Scaling SCALING, Format FORMAT>
static __device__ __forceinline__ void find_block128_scales(ElementScale *scales, const uint32_t (*maxima)[SIDE],
                                                            int count, const QuantizedTensor &out, Corner corner,
                                                            const TensorScale &of_tensor) {
    int i = (int)threadIdx.x;
    __syncthreads();
    if (i < SIDE) {
        uint32_t amax = 0;
        for (int part = 0; part < count; part++) {
            amax = larger(amax, maxima[part][i]);
        }
        ElementScale scale = scales[i] = block_scale<SCALING, FORMAT>(amax, of_tensor);
        bool columnwise = out.axis == AXIS_COLUMNWISE;
        int64_t row = corner.row + (columnwise ? 0 : i), col = corner.col + (columnwise ? i : 0);
        if (columnwise && col < out.cols) keep_scale(out, SCALING, AXIS_COLUMNWISE, row, col, scale.value);
        if (!columnwise && row < out.rows) keep_scale(out, SCALING, AXIS_ROWWISE, row, col, scale.value);
    }
    __syncthreads();
}

template <Scaling SCALING, Format FORMAT, typename T>
static __device__ __forceinline__ void block128_row_scales(ElementScale *scales, const QuantizedTensor &out,
                                                           const WarpTile<T> &tile, Corner corner,
                                                           const TensorScale &of_tensor) {
    __shared__ uint32_t maxima[SQUARE_WARPS_ACROSS][SIDE];
    __shared__ ElementScale found[SIDE];
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    int first = warp / SQUARE_WARPS_ACROSS * TILE_ROWS + lane / ROW_LANES;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        uint32_t amax = larger_over_lanes<float, 1, ROW_LANES>(bits_at(tile.row_amax, i));
        if (lane % ROW_LANES == 0) maxima[warp % SQUARE_WARPS_ACROSS][first + i * STEP_ROWS] = amax;
    }
    find_block128_scales<SCALING, FORMAT>(found, maxima, SQUARE_WARPS_ACROSS, out, corner, of_tensor);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        scales[i] = found[first + i * STEP_ROWS];
    }
}

template <Scaling SCALING, Format FORMAT, typename T>
static __device__ __forceinline__ void block128_square_scales(ElementScale *scales, const QuantizedTensor &out,
                                                              const WarpTile<T> &tile, Corner corner,
                                                              const TensorScale &of_tensor) {
    __shared__ uint32_t maxima[SQUARE_WARPS];
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        amax = larger(amax, bits_at(tile.row_amax, i));
    }
    amax = larger_over_lanes<float, 1, WARP>(amax);
    if (threadIdx.x % WARP == 0) maxima[threadIdx.x / WARP] = amax;
    __syncthreads();
    for (int warp = 0; warp < SQUARE_WARPS; warp++) {
        amax = larger(amax, maxima[warp]);
    }
    ElementScale scale = block_scale<SCALING, FORMAT>(amax, of_tensor);
    if (threadIdx.x == 0) keep_scale(out, SCALING, AXIS_SQUARE, corner.row, corner.col, scale.value);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        scales[i] = scale;
    }
}

template <Scaling SCALING, Format FORMAT, typename T>
static __device__ __forceinline__ void block128_column_scales(ElementScale *scales, const QuantizedTensor &out,
                                                              const WarpTile<T> &tile, Corner corner,
                                                              const TensorScale &of_tensor) {
    __shared__ uint32_t maxima[SQUARE_WARPS_DOWN][SIDE];
    __shared__ ElementScale found[SIDE];
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    int first = warp % SQUARE_WARPS_ACROSS * WARP_COLS + lane % ROW_LANES * LANE_COLS;
    Eight<T> amax = tile.column_amax;
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w++) {
        amax.x[w] = larger_over_lanes<T, ROW_LANES, WARP>(amax.x[w]);
    }
    if (lane < ROW_LANES) {
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            maxima[warp / SQUARE_WARPS_ACROSS][first + c] = bits_at(amax, c);
        }
    }
    find_block128_scales<SCALING, FORMAT>(found, maxima, SQUARE_WARPS_DOWN, out, corner, of_tensor);
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        scales[c] = found[first + c];
    }
}

// Copies

// A square's codes, on their way to rows that were columns. Rows of it are whole words.
typedef uint8_t TransposedCodes[SIDE][SIDE + 4];

// Puts a lane's codes of a row there.
static __device__ __forceinline__ void transpose_row(TransposedCodes &square, Corner in_square, uint64_t codes) {
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        square[in_square.col + c][in_square.row] = (uint8_t)(codes >> (8 * c));
    }
}

// Writes a square that all threads have filled to its place among the codes (cols, rows), whose
// rows are multiples of 16 long: 16 codes at a time, eight neighbouring threads to a row.
static __device__ __forceinline__ void store_transposed(const QuantizedTensor &out, const TransposedCodes &square,
                                                        Corner corner) {
    enum { TOGETHER = 16, IN_ROW = SIDE / TOGETHER };
    __syncthreads();
    for (int i = (int)threadIdx.x; i < SIDE * IN_ROW; i += SQUARE_THREADS) {
        int line = i / IN_ROW, first = i % IN_ROW * TOGETHER;
        int64_t row = corner.row + first, col = corner.col + line;
        if (row >= out.rows || col >= out.cols) continue;
        const uint32_t *words = (const uint32_t *)&square[line][first];
        Pack<uint32_t> codes = {{words[0], words[1], words[2], words[3]}};
        *(Pack<uint32_t> *)(out.elements + col * out.rows + row) = codes;
    }
}

// Makes a rowwise copy, or one of square blocks, of the square from `corner` on, of which `place`
// is the lane's.
template <Scaling SCALING, Format FORMAT, bool PLAIN, typename T>
static __device__ __forceinline__ void make_rows(const QuantizedTensor &out, const WarpTile<T> &tile, Corner corner,
                                                 Corner place, const TensorScale &of_tensor) {
    ElementScale scales[STEPS];
    if constexpr (IS_NVFP4<SCALING>) {
#pragma unroll
        for (int first = 0; first < STEPS; first += NVFP4_STEPS) {
            nvfp4_row_scales<SCALING>(scales + first, out, tile, first, place, of_tensor);
        }
    } else if (SCALING == SCALING_TENSOR) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            scales[i] = {of_tensor.s, 1};
        }
    } else if (out.axis == AXIS_SQUARE) {
        block128_square_scales<SCALING, FORMAT>(scales, out, tile, corner, of_tensor);
    } else {
        block128_row_scales<SCALING, FORMAT>(scales, out, tile, corner, of_tensor);
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        ElementScale of_row[LANE_COLS];
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            of_row[c] = scales[i];
        }
        int64_t row = place.row + i * STEP_ROWS;
        if (row < out.rows && place.col < out.cols) store_row<FORMAT, PLAIN>(out, row, place.col, tile.x[i], of_row);
    }
}

// Makes a columnwise copy of it.
template <Scaling SCALING, Format FORMAT, bool PLAIN, typename T>
static __device__ __forceinline__ void make_columns(const QuantizedTensor &out, const WarpTile<T> &tile, Corner corner,
                                                    Corner place, const TensorScale &of_tensor) {
    const int HEIGHT = IS_NVFP4<SCALING> ? (int)NVFP4_STEPS : (int)STEPS; // of a block, in this lane
    __shared__ __align__(4) TransposedCodes transposed;
#pragma unroll
    for (int first = 0; first < STEPS; first += HEIGHT) {
        ElementScale scales[LANE_COLS];
        if constexpr (IS_NVFP4<SCALING>) {
            nvfp4_column_scales<SCALING>(scales, out, tile, first, place, of_tensor);
        } else if (SCALING == SCALING_TENSOR) {
#pragma unroll
            for (int c = 0; c < LANE_COLS; c++) {
                scales[c] = {of_tensor.s, 1};
            }
        } else {
            block128_column_scales<SCALING, FORMAT>(scales, out, tile, corner, of_tensor);
        }
#pragma unroll
        for (int i = first; i < first + HEIGHT; i++) {
            int64_t row = place.row + i * STEP_ROWS;
            if (!IS_NVFP4<SCALING> && out.form == FORM_TRANSPOSED) {
                float x[LANE_COLS];
                scale_row<PLAIN>(x, out, tile.x[i], scales);
                Corner in_square = {row - corner.row, place.col - corner.col};
                transpose_row(transposed, in_square, encode_eight(FORMAT, x));
            } else if (row < out.rows && place.col < out.cols) {
                store_row<FORMAT, PLAIN>(out, row, place.col, tile.x[i], scales);
            }
        }
    }
    if (!IS_NVFP4<SCALING> && out.form == FORM_TRANSPOSED) store_transposed(out, transposed, corner);
}

// SCALING and FORMAT are both copies'; PLAIN: their encodings are. A copy without elements isn't
// wanted; `stored` and `partials` as quantize_kernel has them.
template <typename From, Scaling SCALING, Format FORMAT, bool PLAIN>
static __global__ void __launch_bounds__(SQUARE_THREADS, sizeof(typename From::Element) == 4 ? 1
                                                         : From::IS_MADE                     ? 2
                                                                                             : 3)
    squares_kernel(QuantizedTensor rowwise, QuantizedTensor columnwise, From source, Tensor stored, float *partials,
                   const uint32_t *amax, int64_t rows, int64_t cols) {
    Corner corner = square_corner(blockIdx.x, cols), place = place_in_square(corner);
    int lane = (int)threadIdx.x % WARP;
    bool inside = place.col < cols;
    WarpTile<typename From::Element> tile;
    source.load(tile.x, place.row, place.col, height_of(place, rows, cols));
    if (SCALING == SCALING_TENSOR && (rowwise.delayed.scale || columnwise.delayed.scale)) {
        uint32_t largest = largest_of_lane(tile);
        keep_amax(rowwise, largest);
        keep_amax(columnwise, largest);
    }
    if (From::IS_MADE && stored.data && inside) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int64_t row = place.row + i * STEP_ROWS;
            if (row < rows) store_made(stored, row, place.col, tile.x[i]);
        }
    }
    int64_t part = (place.row - lane / ROW_LANES) / TILE_ROWS;
    if (partials && part * TILE_ROWS < rows) { // a whole warp, or none of it
        store_column_sums(partials + part * cols + place.col, tile.x, lane, inside);
    }
    find_amaxes(&tile);
    if (rowwise.elements) {
        make_rows<SCALING, FORMAT, PLAIN>(rowwise, tile, corner, place, tensor_scale(rowwise, amax));
    }
    if (columnwise.elements) {
        make_columns<SCALING, FORMAT, PLAIN>(columnwise, tile, corner, place, tensor_scale(columnwise, amax));
    }
}

// By columns

// The larger magnitude bits over blocks of `width` columns: 1, 16 or, over the thread block, 128.
static __device__ __forceinline__ uint32_t larger_over_width(uint32_t amax, int64_t width) {
    __shared__ uint32_t maxima[WARPS];
    for (int distance = 1; distance < width && distance < WARP; distance *= 2) {
        amax = larger(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
    }
    if (width <= WARP) return amax;
    __syncthreads(); // an earlier use is over
    if (threadIdx.x % WARP == 0) maxima[threadIdx.x / WARP] = amax;
    __syncthreads();
    for (int warp = 0; warp < WARPS; warp++) {
        amax = larger(amax, maxima[warp]);
    }
    return amax;
}

// A lane's part of a band of blocks: rows of its column, of which there are `count`.
struct Column {
    FromAny source;
    int64_t row, col, count;
    bool inside;

    __device__ __forceinline__ float value(int64_t r) const { return inside ? source.element(row + r, col) : 0; }
};

// The sum of the errors of four over six in the block that the lane's column belongs to: added in
// the order of scaling_46_errors.
static __device__ float sum_errors(const ScaledBlock &block, Axis axis, const Column &column, float amax) {
    float sums[NVFP4_SIDE] = {};
    for (int r = 0; r < column.count; r++) {
        float error = column.inside ? scaling_46_error(&block, amax, column.value(r), false) : 0, sum = error;
        if (axis != AXIS_COLUMNWISE) {
            sum = 0;
            for (int i = 0; i < NVFP4_SIDE; i++) {
                sum += __shfl_sync(0xFFFFFFFFu, error, (int)threadIdx.x % WARP / NVFP4_SIDE * NVFP4_SIDE + i);
            }
        }
        sums[axis == AXIS_SQUARE ? r : 0] += sum;
    }
    scaling_46_sum_rows(sums);
    return sums[0];
}

// The block that the lane's column belongs to.
static __device__ ScaledBlock block_of_column(const QuantizedTensor &out, const Column &column, TensorScale scale) {
    uint32_t amax = 0;
    for (int64_t r = 0; r < column.count && out.scaling != SCALING_TENSOR; r++) {
        amax = larger(amax, mx_magnitude_bits(column.value(r)));
    }
    if (out.scaling != SCALING_TENSOR) amax = larger_over_width(amax, scaling_block_cols(out.scaling, out.axis));
    ScaledBlock first = scaling_block_of_amax(out.scaling, out.format, amax, scale.s, false);
    if (out.scaling != SCALING_NVFP4_46) return first;
    ScaledBlock second = scaling_block_of_amax(out.scaling, out.format, amax, scale.s, true);
    float first_error = sum_errors(first, out.axis, column, scale.amax);
    return sum_errors(second, out.axis, column, scale.amax) < first_error ? second : first;
}

// PLAIN: the copy's encoding is.
template <bool PLAIN>
static __global__ void __launch_bounds__(THREADS)
    scaled_columns_kernel(QuantizedTensor out, FromAny source, const uint32_t *amax) {
    Corner corner = square_corner(blockIdx.x, out.cols);
    TensorScale scale = tensor_scale(out, amax);
    Column column = {source, corner.row, corner.col + threadIdx.x, scaling_block_rows(out.scaling, out.axis), false};
    column.inside = column.col < out.cols;
    int64_t end = out.rows < corner.row + SIDE ? out.rows : corner.row + SIDE;
    uint32_t largest = 0;
    for (; column.row < end; column.row += column.count) {
        column.count = end - column.row < column.count ? end - column.row : column.count;
        ScaledBlock block = block_of_column(out, column, scale);
        if (column.inside) keep_scale(out, out.scaling, out.axis, column.row, column.col, block.value);
        for (int64_t r = 0; r < column.count && column.inside; r++) {
            int64_t at = (column.row + r) * out.cols + column.col;
            float x = column.value(r);
            largest = larger(largest, mx_magnitude_bits(x));
            uint8_t code = encode_element<PLAIN>(out, column.row + r, column.col, x, block.multiplier);
            if (out.form == FORM_DECODED) {
                from_float((Bf16 *)out.elements + at, mx_decode(out.format, code) * block.value);
            } else {
                out.elements[code_at(out, column.row + r, column.col)] = code;
            }
        }
    }
    keep_amax(out, largest);
}

// Launches

// Returns whether codes are written as they are stored, or transposed codes in steps of 16, which
// no GEMM wants of NVFP4.
static bool takes_codes(const QuantizedTensor *out) {
    if (out->form != FORM_TRANSPOSED) return true;
    return !scaling_is_nvfp4(out->scaling) && ((size_t)out->elements | (size_t)out->rows) % 16 == 0;
}

// Returns whether the first kernel makes a copy.
static bool goes_by_squares(const QuantizedTensor *out) {
    bool is_fp8 = out->format == FORMAT_E4M3 || (out->format == FORMAT_E5M2 && out->scaling != SCALING_BLOCK128_FP32);
    bool is_made = out->scaling == SCALING_NVFP4 || (copy_is_plain(out) && (is_fp8 || scaling_is_nvfp4(out->scaling)));
    return is_made && copy_takes_eights(out) && takes_codes(out);
}

static void find_amax(uint32_t *amax, const Source &in, int64_t rows, int64_t cols) {
    cuda_zero(amax, sizeof(*amax));
    if (!source_takes_eights(&in)) {
        CUDA_LAUNCH(amax_columns_kernel, num_tiles(rows, cols, THREADS), THREADS, 0, amax, FromAny{in, cols}, rows,
                    cols);
        return;
    }
    unsigned squares = num_squares(rows, cols), blocks = squares < AMAX_BLOCKS ? squares : (unsigned)AMAX_BLOCKS;
    with_source(in, [&](auto from) {
        CUDA_LAUNCH((amax_kernel<decltype(from)>), blocks, SQUARE_THREADS, 0, amax, from, rows, cols, squares);
    });
}

void cuda_amax(uint32_t *amax, Tensor in) {
    if (in.rows > 0 && in.cols > 0) {
        find_amax(amax, source_tensor(in), in.rows, in.cols);
    } else {
        cuda_zero(amax, sizeof(*amax));
    }
}

// Sets the factor of a copy of which there are no rows here, of the amax of those elsewhere.
static __global__ void factor_kernel(QuantizedTensor out, const uint32_t *amax) { tensor_scale(out, amax); }

// Quantizes by the first kernel. A copy without elements isn't wanted.
static void quantize_squares(QuantizedTensor row, QuantizedTensor column, const Source &in, float *partials,
                             const uint32_t *amax) {
    int64_t rows = in.x.rows, cols = source_cols(&in);
    Scaling scaling = row.elements ? row.scaling : column.scaling;
    Format format = row.elements ? row.format : column.format;
#define QUANTIZE(SCALING, FORMAT, PLAIN)                                                                              \
    CUDA_LAUNCH((squares_kernel<decltype(from), SCALING, FORMAT, PLAIN>), num_squares(rows, cols), SQUARE_THREADS, 0, \
                row, column, from, in.stored, partials, amax, rows, cols)
    if (scaling == SCALING_NVFP4_46) {
        with_source_as_one(in, [&](auto from) { QUANTIZE(SCALING_NVFP4_46, FORMAT_E2M1, true); });
        return;
    }
    if (!copy_is_plain(&row) || !copy_is_plain(&column)) {
        with_source_as_one(in, [&](auto from) { QUANTIZE(SCALING_NVFP4, FORMAT_E2M1, false); });
        return;
    }
    // These two have few users; with all sources for each, the file compiles for a fifth longer.
    if (scaling == SCALING_BLOCK128_FP32) {
        with_tensor_or_made(in, [&](auto from) { QUANTIZE(SCALING_BLOCK128_FP32, FORMAT_E4M3, true); });
        return;
    }
    if (scaling == SCALING_BLOCK128 && format == FORMAT_E5M2) {
        with_tensor_or_made(in, [&](auto from) { QUANTIZE(SCALING_BLOCK128, FORMAT_E5M2, true); });
        return;
    }
    with_source(in, [&](auto from) {
        if (scaling == SCALING_NVFP4) {
            QUANTIZE(SCALING_NVFP4, FORMAT_E2M1, true);
        } else if (scaling == SCALING_TENSOR && format == FORMAT_E4M3) {
            QUANTIZE(SCALING_TENSOR, FORMAT_E4M3, true);
        } else if (scaling == SCALING_TENSOR) {
            QUANTIZE(SCALING_TENSOR, FORMAT_E5M2, true);
        } else {
            QUANTIZE(SCALING_BLOCK128, FORMAT_E4M3, true);
        }
    });
#undef QUANTIZE
}

// Returns whether a copy has a factor of the tensor's own amax.
static bool wants_amax(const QuantizedTensor *out) { return out && out->factor && !is_delayed(out); }

// Returns memory for an amax, which is made once and kept.
static uint32_t *memory_for_amax(void) {
    static uint32_t *memory;
    if (!memory) cuda_check(cudaMalloc((void **)&memory, sizeof(*memory)), "allocating memory of the GPU");
    return memory;
}

// Returns the amax of the whole that copies of one source are rows of, where it was found before;
// else NULL.
static uint32_t *amax_of_whole(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise) {
    return rowwise && rowwise->amax ? rowwise->amax : columnwise ? columnwise->amax : NULL;
}

static void set_delayed_factors(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise) {
    const QuantizedTensor none = {}, row = rowwise ? *rowwise : none, column = columnwise ? *columnwise : none;
    CUDA_LAUNCH(delayed_factors_kernel, 1, 1, 0, row, column);
}

static void check_scaled(const QuantizedTensor *out) {
    if (out->form == FORM_SWIZZLED) die("internal error: a scaling that isn't MX was to have swizzled scales");
    if (out->scaling == SCALING_BLOCK128_FP32 && out->form == FORM_DECODED) {
        die("internal error: blocks with FP32 scales aren't exact in BF16");
    }
}

// Makes the copies that go by squares, together where they can be. What is stored is stored with
// the last of them: it may lie over what they read.
static void quantize_by_squares(const QuantizedTensor *row, const QuantizedTensor *column, const Source &in,
                                float *partials, const uint32_t *amax) {
    const QuantizedTensor none = {};
    Source read = in;
    read.stored.data = NULL;
    bool together = row && column && row->scaling == column->scaling && row->format == column->format;
    if (row && !together) { quantize_squares(*row, none, column ? read : in, column ? NULL : partials, amax); }
    if (column) quantize_squares(together ? *row : none, *column, in, partials, amax);
}

bool quantize_scaled(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in, float *partials) {
    const QuantizedTensor *copies[] = {rowwise, columnwise}, *by_squares[2] = {};
    int64_t rows = in.x.rows, cols = source_cols(&in);
    uint32_t *known = amax_of_whole(rowwise, columnwise), *amax = known ? known : memory_for_amax();
    if (is_delayed(rowwise) || is_delayed(columnwise)) set_delayed_factors(rowwise, columnwise);
    for (int i = 0; i < 2 && rows == 0; i++) {
        if (wants_amax(copies[i]) && known) CUDA_LAUNCH(factor_kernel, 1, 1, 0, *copies[i], known);
    }
    if (rows == 0 || cols == 0) return true;
    if (!known && (wants_amax(rowwise) || wants_amax(columnwise))) find_amax(amax, in, rows, cols);
    for (int i = 0; i < 2; i++) {
        if (!copies[i]) continue;
        check_scaled(copies[i]);
        if (source_takes_eights(&in) && goes_by_squares(copies[i])) {
            by_squares[i] = copies[i];
        } else {
            auto kernel = copy_is_plain(copies[i]) ? scaled_columns_kernel<true> : scaled_columns_kernel<false>;
            CUDA_LAUNCH(kernel, num_squares(rows, cols), THREADS, 0, *copies[i], (FromAny{in, cols}), amax);
        }
    }
    quantize_by_squares(by_squares[0], by_squares[1], in, partials, amax);
    return by_squares[0] || by_squares[1];
}

static __global__ void multiply_factors_kernel(float *out, const float *a, const float *b, float divisor, float beta) {
    out[0] = (a ? *a : 1.0f) * (b ? *b : 1.0f) / divisor;
    out[1] = beta;
}

void cuda_multiply_factors(float *out, const float *a, const float *b, float divisor, float beta) {
    CUDA_LAUNCH(multiply_factors_kernel, 1, 1, 0, out, a, b, divisor, beta);
}
