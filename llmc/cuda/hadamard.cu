/*
Hadamard transforms: numerics/hadamard.h says what they are. Along rows a lane has eight
neighbouring columns, and butterflies further apart are made between lanes; down columns a thread
has one column of a group. What is left behind whole groups, and rows that aren't aligned, go by a
kernel in which a thread has a group.
*/
#include "eights.cuh"
#include "ops.cuh"

enum { THREADS = 128 };

// A step of butterflies between values that are `apart`: of each the sum with the other, or of the
// second the difference. `is_second` says which it is.
static __device__ __forceinline__ float butterfly(float x, float other, bool is_second) {
    return is_second ? other - x : x + other;
}

template <typename T, int SIZE>
static __global__ void __launch_bounds__(THREADS)
    rows_kernel(T *__restrict__ out, int64_t out_stride, const T *__restrict__ in, int64_t in_stride, int64_t rows,
                int64_t cols, Hadamard h) {
    int64_t eights = cols / LANE_COLS, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t row = i / eights, col = i % eights * LANE_COLS;
    bool inside = row < rows;
    Eight<T> v = load_eight(in + row * in_stride + col, inside);
    float x[LANE_COLS];
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        x[c] = mx_bits_float(bits_at(v, c) ^ hadamard_sign(&h, (col + c) % SIZE));
    }
#pragma unroll
    for (int apart = 1; apart < LANE_COLS; apart *= 2) {
        float before[LANE_COLS];
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            before[c] = x[c];
        }
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            x[c] = butterfly(before[c], before[c ^ apart], c & apart);
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < SIZE / LANE_COLS; lanes *= 2) {
#pragma unroll
        for (int c = 0; c < LANE_COLS; c++) {
            x[c] = butterfly(x[c], __shfl_xor_sync(0xFFFFFFFFu, x[c], lanes), threadIdx.x & lanes);
        }
    }
#pragma unroll
    for (int c = 0; c < LANE_COLS; c++) {
        x[c] *= hadamard_factor(SIZE);
    }
    if (inside) store_eight(out + row * out_stride + col, x);
}

template <typename T, int SIZE>
static __global__ void __launch_bounds__(THREADS)
    columns_kernel(T *__restrict__ out, int64_t out_stride, const T *__restrict__ in, int64_t in_stride, int64_t cols,
                   int64_t groups, Hadamard h) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, row = i / cols * SIZE, col = i % cols;
    if (i / cols >= groups) return;
    float x[SIZE];
#pragma unroll
    for (int r = 0; r < SIZE; r++) {
        x[r] = mx_bits_float(mx_float_bits(to_float(in[(row + r) * in_stride + col])) ^ hadamard_sign(&h, r));
    }
#pragma unroll
    for (int apart = 1; apart < SIZE; apart *= 2) {
#pragma unroll
        for (int r = 0; r < SIZE; r++) {
            if (r & apart) continue;
            float low = x[r], high = x[r + apart];
            x[r] = low + high;
            x[r + apart] = low - high;
        }
    }
#pragma unroll
    for (int r = 0; r < SIZE; r++) {
        from_float(out + (row + r) * out_stride + col, x[r] * hadamard_factor(SIZE));
    }
}

// Groups from `first` on along the axis, each with a thread: of all lines, rows or columns.
static __global__ void groups_kernel(Tensor out, Tensor in, bool rowwise, int64_t first, Hadamard h) {
    int64_t lines = rowwise ? in.rows : in.cols, count = rowwise ? in.cols : in.rows;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, line = i % lines, at = first + i / lines * h.size;
    int64_t end = at + h.size < count ? at + h.size : count;
    while (at < end) {
        float x[HADAMARD_LARGEST];
        int64_t length = hadamard_length(h.size, end - at);
        for (int64_t k = 0; k < length; k++) {
            x[k] = rowwise ? element_of(in, line, at + k) : element_of(in, at + k, line);
        }
        hadamard_group(x, length, 1, &h);
        for (int64_t k = 0; k < length; k++) {
            set_element(out, rowwise ? line : at + k, rowwise ? at + k : line, x[k]);
        }
        at += length;
    }
}

static void transform_groups(Tensor out, Tensor in, bool rowwise, int64_t first, Hadamard h) {
    int64_t lines = rowwise ? in.rows : in.cols, groups = num_parts((rowwise ? in.cols : in.rows) - first, h.size);
    if (groups <= 0) return;
    CUDA_LAUNCH(groups_kernel, (unsigned)num_parts(lines * groups, THREADS), THREADS, 0, out, in, rowwise, first, h);
}

template <typename T, int SIZE> static void transform(Tensor out, Tensor in, bool rowwise, Hadamard h) {
    int64_t whole = (rowwise ? in.cols : in.rows) / SIZE * SIZE;
    if (!rowwise && whole > 0) {
        CUDA_LAUNCH((columns_kernel<T, SIZE>), (unsigned)num_parts(in.cols * (whole / SIZE), THREADS), THREADS, 0,
                    (T *)out.data, out.stride, (const T *)in.data, in.stride, in.cols, whole / SIZE, h);
    } else if (rowwise && whole == in.cols && takes_eights(out) && takes_eights(in)) {
        CUDA_LAUNCH((rows_kernel<T, SIZE>), (unsigned)num_parts(in.rows * (in.cols / LANE_COLS), THREADS), THREADS, 0,
                    (T *)out.data, out.stride, (const T *)in.data, in.stride, in.rows, in.cols, h);
    } else {
        whole = 0;
    }
    transform_groups(out, in, rowwise, whole, h);
}

void cuda_hadamard(Tensor out, Tensor in, Axis axis, Hadamard h) {
    bool rowwise = axis == AXIS_ROWWISE;
    if (in.rows == 0 || in.cols == 0) return;
    if (h.size == 16) {
        FOR_DTYPE(in.dtype, (transform<T, 16>(out, in, rowwise, h)));
    } else if (h.size == 32) {
        FOR_DTYPE(in.dtype, (transform<T, 32>(out, in, rowwise, h)));
    } else if (h.size == 64) {
        FOR_DTYPE(in.dtype, (transform<T, 64>(out, in, rowwise, h)));
    } else {
        FOR_DTYPE(in.dtype, (transform<T, 128>(out, in, rowwise, h)));
    }
}
