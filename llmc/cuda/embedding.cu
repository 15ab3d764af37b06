/*
Token and position embeddings.

The backward pass first sorts rows by token, rows of the same token in their order. A block then
owns a token: it finds the token's rows side by side, sums them and adds the sum to the token's
gradient, so that sums have a fixed order without atomics. If all rows have one token, one block
sums them all: slow, but only as many additions as there are elements.
*/
#include "ops.cuh"

template <typename A>
static __global__ void embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t seq_len) {
    int64_t row = (int64_t)blockIdx.x * SUM_WARPS + threadIdx.x / WARP;
    if (row >= out.rows) return;
    const A *token = row_of<A>(wte, tokens[row]), *position = row_of<A>(wpe, row % seq_len);
    for (int64_t i = threadIdx.x % WARP; i < out.cols / A::SIZE; i += WARP) {
        A x = token[i], y = {};
        if (wpe.data) y = position[i];
        for (int k = 0; k < A::SIZE && wpe.data; k++) {
            from_float(&x.x[k], to_float(x.x[k]) + to_float(y.x[k]));
        }
        row_of<A>(out, row)[i] = x;
    }
}

void cuda_embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, int64_t seq_len) {
    Tensor none = {};
    if (!wpe.data) wpe = none;
    bool packs = takes_packs(out) && takes_packs(wte) && takes_packs(wpe);
    FOR_ACCESS(out.dtype, packs,
               CUDA_LAUNCH((embedding_forward<A>), (unsigned)num_parts(out.rows, SUM_WARPS), SUM_BLOCK, 0, out, tokens,
                           wte, wpe, seq_len));
}

// Each row's place in the stable sort by token is the number of rows that come before it, counted
// by rows^2 comparisons: for 32768 rows some 10^8 instructions of a warp, a tenth of a millisecond
// of a large GPU.
static __global__ void __launch_bounds__(SUM_BLOCK)
    embedding_sort_rows(int32_t *sorted, int32_t *order, const int32_t *tokens, int64_t rows) {
    __shared__ __align__(16) int32_t tile[SUM_BLOCK];
    int64_t own = (int64_t)blockIdx.x * SUM_BLOCK, row = own + threadIdx.x;
    int32_t token = row < rows ? tokens[row] : 0, place = 0;
    int32_t next = threadIdx.x < rows ? tokens[threadIdx.x] : INT32_MAX; // before no row
    for (int64_t first = 0; first < rows; first += SUM_BLOCK) {
        __syncthreads();
        tile[threadIdx.x] = next;
        __syncthreads();
        int64_t after = first + SUM_BLOCK + threadIdx.x; // under way while this tile is compared
        next = after < rows ? tokens[after] : INT32_MAX;
        if (first == own) {
            for (int i = 0; i < SUM_BLOCK; i++) {
                place += tile[i] < token + (i < (int)threadIdx.x);
            }
        } else {
            // Below the limit the difference has a sign: its sum is one dependent instruction each,
            // that of < is two.
            int32_t limit = token + (first < own);
#pragma unroll 16
            for (int i = 0; i < SUM_BLOCK; i++) {
                place += (int32_t)((uint32_t)(tile[i] - limit) >> 31);
            }
        }
    }
    if (row < rows) sorted[place] = token, order[place] = (int32_t)row;
}

// Block `head` of the sorted rows, if a token's begin there. A warp takes WARP of the token's rows
// at a time and loads ROWS_IN_FLIGHT of them before it adds the first: a frequent token's block is
// what the others' end waits for. (A block for each tile of columns would be as many blocks more
// that find nothing to do.)
template <typename A>
static __global__ void __launch_bounds__(SUM_BLOCK)
    embedding_sum_tokens(float *dwte, const int32_t *sorted, const int32_t *order, Tensor dout) {
    const int SIZE = A::SIZE;
    __shared__ __align__(16) float partial[SUM_WARPS][WARP * SIZE];
    int64_t head = blockIdx.x, accesses = dout.cols / SIZE;
    int32_t token = sorted[head];
    if (head > 0 && sorted[head - 1] == token) return;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;

    for (int64_t tile = 0; tile < accesses; tile += WARP) {
        int64_t column = tile + lane < accesses ? tile + lane : 0; // any that is there, for a lane whose sum isn't used
        float sum[SIZE] = {0};
        int count = WARP;
        for (int64_t first = head + warp * WARP; count == WARP; first += SUM_BLOCK) {
            bool same = first + lane < dout.rows && sorted[first + lane] == token;
            int32_t row = same ? order[first + lane] : 0;
            count = __popc(__ballot_sync(0xFFFFFFFFu, same));
#pragma unroll 1
            for (int j = 0; j < count; j += ROWS_IN_FLIGHT) {
                A d[ROWS_IN_FLIGHT];
#pragma unroll
                for (int r = 0; r < ROWS_IN_FLIGHT; r++) {
                    int from = j + r < count ? j + r : j;
                    d[r] = row_of<A>(dout, __shfl_sync(0xFFFFFFFFu, row, from))[column];
                }
#pragma unroll
                for (int r = 0; r < ROWS_IN_FLIGHT; r++) {
                    for (int k = 0; k < SIZE; k++) {
                        if (j + r < count) sum[k] += to_float(d[r].x[k]);
                    }
                }
            }
        }
        float total = sum_over_warps<SIZE>(partial, sum);
        int64_t col = tile * SIZE + threadIdx.x;
        if (threadIdx.x < WARP * SIZE && col < dout.cols) dwte[token * dout.cols + col] += total;
    }
}

// One thread for each access of each position: it adds the sequences in order.
template <typename A> static __global__ void embedding_sum_positions(float *dwpe, Tensor dout, int64_t seq_len) {
    const int SIZE = A::SIZE;
    int64_t index = (int64_t)blockIdx.x * SUM_BLOCK + threadIdx.x, accesses = dout.cols / SIZE;
    int64_t position = index / accesses, i = index % accesses;
    if (position >= seq_len) return;
    float sum[SIZE] = {0}, before[SIZE];
#pragma unroll 8
    for (int64_t row = position; row < dout.rows; row += seq_len) {
        A d = row_of<A>(dout, row)[i];
        for (int k = 0; k < SIZE; k++) {
            sum[k] += to_float(d.x[k]);
        }
    }
    float *out = dwpe + position * dout.cols + i * SIZE;
    load_floats<SIZE>(before, out);
    for (int k = 0; k < SIZE; k++) {
        sum[k] += before[k];
    }
    store_floats<SIZE>(out, sum);
}

void cuda_embedding_backward(float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, int64_t seq_len) {
    int64_t rows = dout.rows;
    int32_t *sorted = (int32_t *)cuda_workspace(cuda_reduction_workspace(rows, dout.cols)), *order = sorted + rows;
    CUDA_LAUNCH(embedding_sort_rows, (unsigned)num_parts(rows, SUM_BLOCK), SUM_BLOCK, 0, sorted, order, tokens, rows);
    FOR_ACCESS(dout.dtype, takes_packs(dout),
               CUDA_LAUNCH((embedding_sum_tokens<A>), (unsigned)rows, SUM_BLOCK, 0, dwte, sorted, order, dout));
    if (!dwpe) return;
    FOR_ACCESS(dout.dtype, takes_packs(dout) && is_aligned(dwpe),
               CUDA_LAUNCH((embedding_sum_positions<A>),
                           (unsigned)num_parts(seq_len * (dout.cols / A::SIZE), SUM_BLOCK), SUM_BLOCK, 0, dwpe, dout,
                           seq_len));
}
