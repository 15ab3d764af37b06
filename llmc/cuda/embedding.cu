/*
Token and position embeddings.

The backward pass first sorts rows by token, rows of the same token in their order. A block then
owns a token: it finds the token's rows side by side, sums them and adds the sum to the token's
gradient, so that sums have a fixed order without atomics. If all rows have one token, one block
sums them all: slow, but only as many additions as there are elements.
*/
#include "ops.cuh"

template <typename A>
static __global__ void embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe,
                                         Sequences sequences) {
    int64_t row = (int64_t)blockIdx.x * SUM_WARPS + threadIdx.x / WARP;
    if (row >= out.rows) return;
    const A *token = row_of<A>(wte, tokens[row]), *position = row_of<A>(wpe, position_of(sequences, row));
    for (int64_t i = threadIdx.x % WARP; i < out.cols / A::SIZE; i += WARP) {
        A x = token[i], y = {};
        if (wpe.data) y = position[i];
        for (int k = 0; k < A::SIZE && wpe.data; k++) {
            from_float(&x.x[k], to_float(x.x[k]) + to_float(y.x[k]));
        }
        row_of<A>(out, row)[i] = x;
    }
}

void cuda_embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, Sequences sequences) {
    Tensor none = {};
    if (!wpe.data) wpe = none;
    bool packs = takes_packs(out) && takes_packs(wte) && takes_packs(wpe);
    FOR_ACCESS(out.dtype, packs,
               CUDA_LAUNCH((embedding_forward<A>), (unsigned)num_parts(out.rows, SUM_WARPS), SUM_BLOCK, 0, out, tokens,
                           wte, wpe, sequences));
}

// Rows are sorted by token in passes over eight bits of it, from the lowest on. A pass keeps the
// order of rows with the same digit: each warp counts the digits of its part of the rows, the
// counts become places, digit by digit and part by part, and each warp goes through its rows again
// and puts them there.
enum { DIGIT_BITS = 8, DIGITS = CUDA_SORT_DIGITS, TOKEN_BITS = 24 }; // of the largest vocabulary

typedef struct {
    const int32_t *tokens, *rows; // rows NULL: 0, 1, 2...
} Unsorted;

typedef struct {
    int32_t *tokens, *rows;
} Sorted;

// Returns which lanes of the warp are `valid` and have the same digit as this one.
static __device__ __forceinline__ unsigned lanes_with(unsigned digit, bool valid) {
    unsigned same = __ballot_sync(0xFFFFFFFFu, valid);
#pragma unroll
    for (int bit = 0; bit < DIGIT_BITS; bit++) {
        unsigned set = __ballot_sync(0xFFFFFFFFu, digit >> bit & 1);
        same &= digit >> bit & 1 ? set : ~set;
    }
    return same;
}

// Counts the digits of each part's rows into `counts` (parts, DIGITS); or, if it holds the places
// of the first rows with each digit, PUTs the rows into `out`.
template <bool PUT>
static __global__ void __launch_bounds__(SUM_BLOCK)
    embedding_sort_part(int32_t *counts, Sorted out, Unsorted in, int64_t rows, int shift) {
    __shared__ int32_t next[SUM_WARPS][DIGITS];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int64_t part = (int64_t)blockIdx.x * SUM_WARPS + warp;
    int64_t begin = part * CUDA_SORT_ROWS, end = begin + CUDA_SORT_ROWS < rows ? begin + CUDA_SORT_ROWS : rows;
    if (begin >= rows) return;
    for (int i = lane; i < DIGITS; i += WARP) {
        next[warp][i] = PUT ? counts[part * DIGITS + i] : 0;
    }
    for (int64_t first = begin; first < end; first += WARP) {
        bool valid = first + lane < end;
        int32_t token = valid ? in.tokens[first + lane] : 0, row = (int32_t)first + lane;
        if (PUT && valid && in.rows) row = in.rows[first + lane];
        unsigned digit = (unsigned)token >> shift & (DIGITS - 1), same = lanes_with(digit, valid);
        int before = __popc(same & ((1u << lane) - 1));
        __syncwarp(); // what others have written is there
        int32_t place = next[warp][digit] + before;
        if (PUT && valid) out.tokens[place] = token, out.rows[place] = row;
        __syncwarp(); // what is overwritten was read
        if (valid && before == 0) next[warp][digit] += __popc(same);
    }
    __syncwarp();
    for (int i = lane; i < DIGITS && !PUT; i += WARP) {
        counts[part * DIGITS + i] = next[warp][i];
    }
}

// Makes of counts the places of the first rows: behind all of lower digits, and those of the same
// digit in earlier parts. One block, a thread for each digit.
static __global__ void __launch_bounds__(DIGITS) embedding_sort_places(int32_t *counts, int64_t parts) {
    const int IN_FLIGHT = 8;
    __shared__ int32_t totals[DIGITS];
    int digit = (int)threadIdx.x;
    int32_t total = 0, place = 0;
#pragma unroll 8
    for (int64_t part = 0; part < parts; part++) {
        total += counts[part * DIGITS + digit];
    }
    totals[digit] = total;
    __syncthreads();
    for (int i = 0; i < DIGITS; i++) {
        place += i < digit ? totals[i] : 0;
    }
    for (int64_t first = 0; first < parts; first += IN_FLIGHT) {
        int32_t own[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            own[i] = first + i < parts ? counts[(first + i) * DIGITS + digit] : 0;
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            if (first + i < parts) counts[(first + i) * DIGITS + digit] = place;
            place += own[i];
        }
    }
}

// Returns the rows sorted by token, at the beginning of `workspace`: an odd number of passes, from
// one half to the other.
static Sorted sort_rows(int32_t *workspace, const int32_t *tokens, int64_t rows) {
    Sorted to = {workspace, workspace + rows}, other = {workspace + 2 * rows, workspace + 3 * rows};
    int32_t *counts = workspace + 4 * rows;
    int64_t parts = num_parts(rows, CUDA_SORT_ROWS);
    unsigned blocks = (unsigned)num_parts(parts, SUM_WARPS);
    Unsorted from = {tokens, NULL};
    for (int shift = 0; shift < TOKEN_BITS; shift += DIGIT_BITS) {
        CUDA_LAUNCH((embedding_sort_part<false>), blocks, SUM_BLOCK, 0, counts, to, from, rows, shift);
        CUDA_LAUNCH(embedding_sort_places, 1, DIGITS, 0, counts, parts);
        CUDA_LAUNCH((embedding_sort_part<true>), blocks, SUM_BLOCK, 0, counts, to, from, rows, shift);
        from = {to.tokens, to.rows};
        Sorted done = to;
        to = other;
        other = done;
    }
    return other;
}

// Block `head` of the sorted rows, if a token's begin there. A warp takes WARP of the token's rows
// at a time and loads ROWS_IN_FLIGHT of them before it adds the first: a frequent token's block is
// what the others' end waits for. (A block for each tile of columns would be as many blocks more
// that find nothing to do.)
template <typename A>
static __global__ void __launch_bounds__(SUM_BLOCK) embedding_sum_tokens(float *dwte, Sorted sorted, Tensor dout) {
    const int SIZE = A::SIZE;
    __shared__ __align__(16) float partial[SUM_WARPS][WARP * SIZE];
    int64_t head = blockIdx.x, accesses = dout.cols / SIZE;
    int32_t token = sorted.tokens[head];
    if (head > 0 && sorted.tokens[head - 1] == token) return;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;

    for (int64_t tile = 0; tile < accesses; tile += WARP) {
        int64_t column = tile + lane < accesses ? tile + lane : 0; // any that is there, for a lane whose sum isn't used
        float sum[SIZE] = {0};
        int count = WARP;
        for (int64_t first = head + warp * WARP; count == WARP; first += SUM_BLOCK) {
            bool same = first + lane < dout.rows && sorted.tokens[first + lane] == token;
            int32_t row = same ? sorted.rows[first + lane] : 0;
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

// Adds the rows of each token to that token's gradient.
static void add_by_token(float *dtable, const int32_t *tokens, Tensor dout) {
    int64_t rows = dout.rows;
    Sorted sorted = sort_rows((int32_t *)cuda_workspace(cuda_reduction_workspace(rows, dout.cols)), tokens, rows);
    FOR_ACCESS(dout.dtype, takes_packs(dout),
               CUDA_LAUNCH((embedding_sum_tokens<A>), (unsigned)rows, SUM_BLOCK, 0, dtable, sorted, dout));
}

void cuda_embedding_backward(float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, Sequences sequences) {
    add_by_token(dwte, tokens, dout);
    if (!dwpe) return;
    if (sequences.positions) { // which rows have a position isn't known, as of tokens
        add_by_token(dwpe, sequences.positions, dout);
        return;
    }
    FOR_ACCESS(dout.dtype, takes_packs(dout) && is_aligned(dwpe),
               CUDA_LAUNCH((embedding_sum_positions<A>),
                           (unsigned)num_parts(sequences.T * (dout.cols / A::SIZE), SUM_BLOCK), SUM_BLOCK, 0, dwpe,
                           dout, sequences.T));
}
