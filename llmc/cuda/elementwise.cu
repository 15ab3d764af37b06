/*
GELU, gradients of biases, and the workspace of all sums over rows.

An elementwise kernel gives each thread one 16-byte access of each tensor. A sum over rows goes by parts of
CUDA_ROWS_PER_PART rows, one block for each part and tile of columns.
*/
#include "ops.cuh"

enum { BLOCK = 256 };
static const int64_t MAX_GRID_Y = 65535;

// f of corresponding elements of a and b. A function of one takes `b` = `a`, whose second load the compiler drops.
typedef float (*Function)(float a, float b);

template <typename A, Function FUNCTION> static __global__ void elementwise(Tensor out, Tensor a, Tensor b) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= out.cols / A::SIZE) return;
    for (int64_t row = blockIdx.y; row < out.rows; row += gridDim.y) {
        A x = row_of<A>(a, row)[i], y = row_of<A>(b, row)[i], result;
        for (int k = 0; k < A::SIZE; k++) {
            from_float(&result.x[k], FUNCTION(to_float(x.x[k]), to_float(y.x[k])));
        }
        row_of<A>(out, row)[i] = result;
    }
}

// Rows that follow one another without a gap, as one long row.
static Tensor as_one_row(Tensor tensor) { return tensor_make(tensor.data, tensor.dtype, 1, tensor.rows * tensor.cols); }

template <Function FUNCTION> static void launch_elementwise(Tensor out, Tensor a, Tensor b) {
    if (out.stride == out.cols && a.stride == a.cols && b.stride == b.cols) {
        out = as_one_row(out), a = as_one_row(a), b = as_one_row(b);
    }
    bool packs = takes_packs(out) && takes_packs(a) && takes_packs(b);
    unsigned grid_y = (unsigned)(out.rows < MAX_GRID_Y ? out.rows : MAX_GRID_Y);
    FOR_ACCESS(out.dtype, packs,
               CUDA_LAUNCH((elementwise<A, FUNCTION>),
                           dim3((unsigned)num_parts(out.cols, (int64_t)A::SIZE * BLOCK), grid_y), BLOCK, 0, out, a, b));
}

MX_FUNCTION float gelu_of_first(float x, float) { return gelu(x); }

void cuda_gelu_forward(Tensor out, Tensor input) { launch_elementwise<gelu_of_first>(out, input, input); }

void cuda_gelu_backward(Tensor dinput, Tensor dout, Tensor input) {
    launch_elementwise<gelu_gradient>(dinput, dout, input);
}

// Block `part * tiles + tile` sums `rows_per_part` rows of WARP accesses; to row `part` of sums, or, where there is one
// part alone, added to what is in `first` and `second`.
template <typename A>
static __global__ void __launch_bounds__(SUM_BLOCK)
    sum_columns(float *first, float *second, int64_t split, Tensor in, int64_t rows_per_part) {
    const int SIZE = A::SIZE;
    __shared__ __align__(16) float partial[SUM_WARPS][WARP * SIZE];
    unsigned tiles = (unsigned)((in.cols + WARP * SIZE - 1) / (WARP * SIZE));
    int64_t part = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    int64_t access = tile * WARP + threadIdx.x % WARP;
    int64_t row = part * rows_per_part, end = row + rows_per_part < in.rows ? row + rows_per_part : in.rows;

    float sum[SIZE] = {0};
    if (access < in.cols / SIZE) {
#pragma unroll 8
        for (row += threadIdx.x / WARP; row < end; row += SUM_WARPS) {
            A a = row_of<A>(in, row)[access];
            for (int k = 0; k < SIZE; k++) {
                sum[k] += to_float(a.x[k]);
            }
        }
    }
    float total = sum_over_warps<SIZE>(partial, sum);
    int64_t col = tile * WARP * SIZE + threadIdx.x;
    if (threadIdx.x >= WARP * SIZE || col >= in.cols) return;
    if (rows_per_part < in.rows) {
        first[part * in.cols + col] = total;
    } else if (col < split) {
        first[col] += total;
    } else {
        second[col - split] += total;
    }
}

void cuda_sum_columns(float *first, float *second, int64_t split, Tensor in, float *scratch) {
    int64_t parts;
    do {
        parts = num_parts(in.rows, CUDA_ROWS_PER_PART);
        FOR_ACCESS(in.dtype, takes_packs(in),
                   CUDA_LAUNCH((sum_columns<A>), (unsigned)(parts * num_parts(in.cols, WARP * A::SIZE)), SUM_BLOCK, 0,
                               parts > 1 ? scratch : first, second, split, in, CUDA_ROWS_PER_PART));
        in = tensor_make(scratch, FORMAT_FP32, parts, in.cols);
        scratch += parts * in.cols;
    } while (parts > 1);
}

int64_t cuda_sum_columns_scratch(int64_t rows, int64_t cols) {
    int64_t count = 0;
    while (rows > CUDA_ROWS_PER_PART) {
        rows = num_parts(rows, CUDA_ROWS_PER_PART);
        count += rows * cols;
    }
    return count;
}

void cuda_bias_backward(float *dbias, Tensor dout) {
    float *scratch = (float *)cuda_workspace(cuda_reduction_workspace(dout.rows, dout.cols));
    cuda_sum_columns(dbias, NULL, dout.cols, dout, scratch);
}

size_t cuda_reduction_workspace(int64_t rows, int64_t cols) {
    int64_t bias = cuda_sum_columns_scratch(rows, cols), layernorm = cuda_layernorm_scratch(rows, cols);
    int64_t embedding = 2 * rows; // int32, as large as floats
    int64_t count = bias > layernorm ? bias : layernorm;
    return (size_t)(count > embedding ? count : embedding) * sizeof(float);
}
