/*
What quantizing a tensor would do to it, counted instead of stored.
*/
#include "kernel.cuh"

// Statistics are summed in parts, a thread block each, whose number depends on the tensor's shape
// alone.
enum { MAX_STATS_PARTS = 1024, STATS_THREADS = 128 };

// Counts one block: rows x cols elements.
template <typename T>
static __device__ __forceinline__ void count_block(QuantStats *stats, const T *in, int64_t stride, int64_t rows,
                                                   int64_t cols, Format format, ScaleRounding rounding) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t magnitude = mx_magnitude_bits(to_float(in[i / cols * stride + i % cols]));
        amax = magnitude > amax ? magnitude : amax;
    }
    BlockScale block = stats_add_block(stats, amax, rows * cols, format, rounding);
    for (int64_t i = 0; i < rows * cols; i++) {
        stats_add_element(stats, &block, to_float(in[i / cols * stride + i % cols]));
    }
}

// A thread has whole blocks, one at a time.
template <typename T>
static __global__ void __launch_bounds__(STATS_THREADS)
    stats_kernel(QuantStats *parts, const T *__restrict__ in, int64_t stride, int64_t rows, int64_t cols, Axis axis,
                 Format format, ScaleRounding rounding) {
    __shared__ QuantStats of_threads[STATS_THREADS];
    QuantStats stats = {};
    int64_t height = axis == AXIS_ROWWISE ? 1 : MX_BLOCK, width = axis == AXIS_COLUMNWISE ? 1 : MX_BLOCK;
    int64_t blocks_in_row = (cols + width - 1) / width;
    int64_t blocks = mx_num_scales(axis, rows, cols);
    int64_t first = (int64_t)blockIdx.x * STATS_THREADS + threadIdx.x;
    for (int64_t block = first; block < blocks; block += (int64_t)gridDim.x * STATS_THREADS) {
        int64_t row = block / blocks_in_row * height, col = block % blocks_in_row * width;
        count_block(&stats, in + row * stride + col, stride, rows - row < height ? rows - row : height,
                    cols - col < width ? cols - col : width, format, rounding);
    }
    of_threads[threadIdx.x] = stats;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < STATS_THREADS; i++) {
        stats_add(&stats, &of_threads[i]);
    }
    parts[blockIdx.x] = stats;
}

void cuda_quantize_stats(QuantStats *stats, Tensor in, Axis axis, Format format, ScaleRounding rounding) {
    static QuantStats *on_device; // 200 kB, taken by the first call and kept
    QuantStats parts[MAX_STATS_PARTS];
    if (!on_device) cuda_check(cudaMalloc((void **)&on_device, sizeof(parts)), "allocating memory for statistics");
    int64_t wanted = num_parts(mx_num_scales(axis, in.rows, in.cols), STATS_THREADS);
    int grid = wanted < MAX_STATS_PARTS ? (int)wanted : MAX_STATS_PARTS;
    if (grid == 0) return;
    FOR_DTYPE(in.dtype, CUDA_LAUNCH((stats_kernel<T>), grid, STATS_THREADS, 0, on_device, (const T *)in.data, in.stride,
                                    in.rows, in.cols, axis, format, rounding));
    cuda_copy_to_host(parts, on_device, (size_t)grid * sizeof(*parts));
    for (int part = 1; part < grid; part++) {
        stats_add(&parts[0], &parts[part]);
    }
    stats_add(stats, &parts[0]);
}
