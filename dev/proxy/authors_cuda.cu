/*
The authors' arithmetic on a GPU: a warp for each row, a thread for each element and for each column
that is summed. Nothing in it is tuned.
*/
#include "authors.h"
#include "authors_rows.h"
#include "llmc/cuda/kernel.cuh"

enum { BLOCK = 256 };

static __device__ __forceinline__ int64_t thread_of_grid(void) {
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static unsigned blocks_for(int64_t threads) { return (unsigned)((threads + BLOCK - 1) / BLOCK); }

static __global__ void round_elements(Tensor out, Tensor in, bool odd) {
    int64_t i = thread_of_grid();
    if (i < in.rows * in.cols) put(out, i, q_operand(get(in, i), odd));
}

static void round_tensor(Tensor out, Tensor in, bool odd) {
    CUDA_LAUNCH(round_elements, blocks_for(in.rows * in.cols), BLOCK, 0, out, in, odd);
}

static __global__ void forward_of_rows(Tensor out, float *scratch, Tensor x, NormParams norm) {
    int64_t row = thread_of_grid() / WARP;
    Columns columns = {threadIdx.x % WARP, WARP};
    if (row < x.rows) row_forward(out, scratch + row * x.cols, x, row, norm, columns);
}

static void norm_forward(Tensor out, float *scratch, Tensor x, NormParams norm) {
    CUDA_LAUNCH(forward_of_rows, blocks_for(x.rows * WARP), BLOCK, 0, out, scratch, x, norm);
}

static __global__ void backward_of_rows(Tensor dinput, float *products, Tensor dout, Tensor input, NormParams norm) {
    int64_t row = thread_of_grid() / WARP;
    Columns columns = {threadIdx.x % WARP, WARP};
    if (row < input.rows) row_backward(dinput, products + row * input.cols, dout, input, row, norm, columns);
}

static void norm_backward(Tensor dinput, float *products, Tensor dout, Tensor input, NormParams norm) {
    CUDA_LAUNCH(backward_of_rows, blocks_for(input.rows * WARP), BLOCK, 0, dinput, products, dout, input, norm);
}

static __global__ void add_rows(float *sums, Tensor values) {
    int64_t col = thread_of_grid();
    if (col < values.cols) add_column(sums, values, col);
}

// Blocks of a warp, so that few columns are spread over many multiprocessors.
static void add_columns(float *sums, Tensor values) {
    CUDA_LAUNCH(add_rows, (unsigned)((values.cols + WARP - 1) / WARP), WARP, 0, sums, values);
}

static __global__ void activate_elements(Tensor out, Tensor input, Activation activation) {
    int64_t i = thread_of_grid();
    if (i < input.rows * input.cols) put(out, i, activate(get(input, i), activation));
}

static void activation_forward(Tensor out, Tensor input, Activation activation) {
    CUDA_LAUNCH(activate_elements, blocks_for(input.rows * input.cols), BLOCK, 0, out, input, activation);
}

static __global__ void gradient_of_elements(Tensor dinput, Tensor dout, Tensor input, Activation activation) {
    int64_t i = thread_of_grid();
    if (i < input.rows * input.cols) {
        put(dinput, i, q(activation_slope(get(input, i), activation) * q(get(dout, i))));
    }
}

static void activation_backward(Tensor dinput, Tensor dout, Tensor input, Activation activation) {
    CUDA_LAUNCH(gradient_of_elements, blocks_for(input.rows * input.cols), BLOCK, 0, dinput, dout, input, activation);
}

const AuthorsOps authors_on_cuda = {round_tensor, norm_forward,       norm_backward,
                                    add_columns,  activation_forward, activation_backward};
