/*
What quantizing a tensor would do to it, counted instead of stored.
*/
#include "kernel.cuh"

// Statistics are summed in parts, a thread block each, whose number depends on the tensor's shape
// alone.
enum { MAX_STATS_PARTS = 1024, STATS_THREADS = 128 };

// Returns what scaling_46_errors does, of values where they lie: a copy of a square would take
// local memory, of which a card keeps as much for every thread that it can run.
template <typename T>
static __device__ float errors_of(const ScaledBlock &block, const T *in, int64_t stride, int64_t rows, int64_t cols,
                                  const Counted &how) {
    float sums[NVFP4_SIDE] = {}, amax = mx_bits_float(how.amax);
    for (int64_t i = 0; i < rows * cols; i++) {
        float x = to_float(in[i / cols * stride + i % cols]);
        sums[how.axis == AXIS_SQUARE ? i / cols : 0] += scaling_46_error(&block, amax, x, false);
    }
    scaling_46_sum_rows(sums);
    return sums[0];
}

// Returns the block of rows x cols elements, of a scaling that isn't MX.
template <typename T>
static __device__ ScaledBlock scaled_block(const T *in, int64_t stride, int64_t rows, int64_t cols, uint32_t amax,
                                           const Counted &how) {
    ScaledBlock first = scaling_block_of_amax(how.scaling, how.format, amax, how.scale, false);
    if (how.scaling != SCALING_NVFP4_46) return first;
    ScaledBlock second = scaling_block_of_amax(how.scaling, how.format, amax, how.scale, true);
    float first_error = errors_of(first, in, stride, rows, cols, how);
    return errors_of(second, in, stride, rows, cols, how) < first_error ? second : first;
}

// Counts one block: rows x cols elements, the first of them at (row, col).
template <typename T>
static __device__ void count_block(QuantStats *stats, const T *in, int64_t stride, int64_t row, int64_t col,
                                   int64_t rows, int64_t cols, const Counted &how) {
    uint32_t amax = 0;
    in += row * stride + col;
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t magnitude = mx_magnitude_bits(to_float(in[i / cols * stride + i % cols]));
        amax = magnitude > amax ? magnitude : amax;
    }
    BlockScale block;
    if (how.scaling == SCALING_MX) {
        block = stats_add_mx_block(stats, amax, rows * cols, &how);
    } else {
        ScaledBlock scaled = scaled_block(in, stride, rows, cols, amax, how);
        block = stats_add_scaled_block(stats, amax, rows * cols, &scaled, &how);
    }
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t r = i / cols, c = i % cols;
        stats_add_element(stats, &block, &how.encoding, to_float(in[r * stride + c]), row + r, col + c);
    }
}

// How a copy is quantized, with the amax where its scaling has a factor.
static __device__ Counted counted(const QuantizedTensor &copy, const uint32_t *amax, ScaleRounding rounding) {
    Counted how = {copy.scaling, copy.format, copy.axis, rounding, copy.encoding, 0, 1};
    if (scaling_has_factor(copy.scaling) && !copy.delayed.scale) how.amax = *amax;
    how.scale = copy.delayed.scale ? *copy.delayed.scale : scaling_tensor_scale(copy.scaling, copy.format, how.amax);
    return how;
}

// A thread has whole blocks, one at a time.
template <typename T>
static __global__ void __launch_bounds__(STATS_THREADS)
    stats_kernel(QuantStats *parts, const T *__restrict__ in, int64_t stride, int64_t rows, int64_t cols,
                 QuantizedTensor copy, const uint32_t *amax, ScaleRounding rounding) {
    __shared__ QuantStats of_threads[STATS_THREADS];
    QuantStats stats = {};
    const Counted how = counted(copy, amax, rounding);
    int64_t height = scaling_block_rows(how.scaling, how.axis), width = scaling_block_cols(how.scaling, how.axis);
    int64_t blocks_in_row = scaling_blocks_across(how.scaling, how.axis, cols);
    int64_t blocks = scaling_num_blocks(how.scaling, how.axis, rows, cols);
    int64_t first = (int64_t)blockIdx.x * STATS_THREADS + threadIdx.x;
    for (int64_t block = first; block < blocks; block += (int64_t)gridDim.x * STATS_THREADS) {
        int64_t row = block / blocks_in_row * height, col = block % blocks_in_row * width;
        count_block(&stats, in, stride, row, col, rows - row < height ? rows - row : height,
                    cols - col < width ? cols - col : width, how);
    }
    of_threads[threadIdx.x] = stats;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < STATS_THREADS; i++) {
        stats_add(&stats, &of_threads[i]);
    }
    parts[blockIdx.x] = stats;
}

void cuda_quantize_stats(QuantStats *stats, Tensor in, const QuantizedTensor *copy, ScaleRounding rounding) {
    static QuantStats *on_device; // 336 kB, and an amax behind them, taken by the first call and kept
    QuantStats parts[MAX_STATS_PARTS];
    size_t bytes = sizeof(parts) + sizeof(uint32_t);
    if (!on_device) cuda_check(cudaMalloc((void **)&on_device, bytes), "allocating memory for statistics");
    int64_t wanted = num_parts(scaling_num_blocks(copy->scaling, copy->axis, in.rows, in.cols), STATS_THREADS);
    int grid = wanted < MAX_STATS_PARTS ? (int)wanted : MAX_STATS_PARTS;
    if (grid == 0) return;
    uint32_t *amax = copy->amax ? copy->amax : (uint32_t *)(on_device + MAX_STATS_PARTS);
    if (!copy->amax && !copy->delayed.scale && scaling_has_factor(copy->scaling)) cuda_amax(amax, in);
    FOR_DTYPE(in.dtype, CUDA_LAUNCH((stats_kernel<T>), grid, STATS_THREADS, 0, on_device, (const T *)in.data, in.stride,
                                    in.rows, in.cols, *copy, amax, rounding));
    cuda_copy_to_host(parts, on_device, (size_t)grid * sizeof(*parts));
    for (int part = 1; part < grid; part++) {
        stats_add(&parts[0], &parts[part]);
    }
    stats_add(stats, &parts[0]);
}
