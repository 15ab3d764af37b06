/*
Layer normalisation and RMSNorm (see NormKind in ../backend.h). Statistics in FP32, the variance
about the mean.

Forward: a row belongs to as many threads as it takes to hold it at KEPT accesses each, one warp at
least. Backward: a block goes down a part of the rows, one access of each to a thread, which so sums
the gradients of gains and biases of its columns in registers while it computes the input's. A row
too long for that is cut into tiles of columns; what its tiles need to know of the whole row comes
from a kernel before.
*/
#include "ops.cuh"

#include <type_traits>

enum { BLOCK = 256, MAX_BLOCK = 512, KEPT = 4 };

// Returns the sum over the threads that share a row, to all of them: a block is (threads of a row,
// rows), and all call this.
static __device__ __forceinline__ float row_sum(float x, float *scratch) {
    x = warp_reduce<SUM>(x);
    int warps = (int)blockDim.x / WARP;
    if (warps == 1) return x;
    __syncthreads(); // an earlier use of scratch is over
    scratch += threadIdx.y * warps;
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < warps; i++) {
        sum += scratch[i];
    }
    return sum;
}

// An access as it is loaded: a Pack as words. nvcc takes the BF16s of a Pack apart where it is
// loaded, and so waits for it there, before what could have been done meanwhile.
template <typename A> union Loaded {
    std::conditional_t<sizeof(A) == 16, uint4, A> words;
    A access;

    __device__ __forceinline__ void load(const A *from) { words = *(const decltype(words) *)from; }
    __device__ __forceinline__ void store(A *to) const { *(decltype(words) *)to = words; }
};

// Loads a thread's accesses of one tile of a row, from `first` on, as far as the row's `count`.
template <typename A>
static __device__ __forceinline__ void load_tile(Loaded<A> *kept, const A *row, int first, int count, int threads) {
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        if (first + j * threads < count) kept[j].load(row + first + j * threads);
    }
}

// Adds: kept += other, rounded to the tensors' dtype.
template <typename A>
static __device__ __forceinline__ void add_tile(Loaded<A> *kept, const Loaded<A> *other, int first, int count,
                                                int threads) {
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        A &sum = kept[j].access;
        for (int k = 0; k < A::SIZE && first + j * threads < count; k++) {
            from_float(&sum.x[k], to_float(sum.x[k]) + to_float(other[j].access.x[k]));
        }
    }
}

template <typename A>
static __device__ __forceinline__ void store_tile(A *row, const Loaded<A> *kept, int first, int count, int threads) {
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        if (first + j * threads < count) kept[j].store(row + first + j * threads);
    }
}

template <typename A>
static __global__ void __launch_bounds__(MAX_BLOCK)
    layernorm_forward(Tensor out, Tensor sum_out, Tensor input, Tensor residual, NormParams norm) {
    const int SIZE = A::SIZE;
    __shared__ float scratch[WARP];
    int thread = (int)threadIdx.x, threads = (int)blockDim.x, tile = KEPT * threads;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    int count = row < input.rows ? (int)(input.cols / SIZE) : 0; // threads without a row still take part in sums
    const A *in = row_of<A>(input, row);
    Loaded<A> kept[KEPT];

    float sum = 0, squares = 0;
    for (int first = thread; first - thread < count; first += tile) {
        load_tile(kept, in, first, count, threads);
        if (residual.data) {
            Loaded<A> other[KEPT];
            load_tile(other, row_of<A>(residual, row), first, count, threads);
            add_tile(kept, other, first, count, threads);
            store_tile(row_of<A>(sum_out, row), kept, first, count, threads);
        }
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            for (int k = 0; k < SIZE && first + j * threads < count; k++) {
                sum += to_float(kept[j].access.x[k]);
            }
        }
    }
    if (residual.data) in = row_of<A>(sum_out, row); // a thread reads again what it has written
    bool has_mean = norm.kind == NORM_LAYERNORM;
    float m = has_mean ? row_sum(sum, scratch) / (float)input.cols : 0.0f;
    for (int first = thread; first - thread < count; first += tile) {
        if (count > tile) load_tile(kept, in, first, count, threads);
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            for (int k = 0; k < SIZE && first + j * threads < count; k++) {
                float difference = to_float(kept[j].access.x[k]) - m;
                squares += difference * difference;
            }
        }
    }
    float r = 1.0f / sqrtf(row_sum(squares, scratch) / (float)input.cols + norm.eps);
    if (thread == 0 && row < input.rows) {
        if (has_mean) norm.mean[row] = m;
        norm.rstd[row] = r;
    }
    if (!out.data) return;
    for (int first = thread; first - thread < count; first += tile) {
        if (count > tile) load_tile(kept, in, first, count, threads);
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int i = first + j * threads;
            if (i >= count) break;
            float w[SIZE], b[SIZE];
            load_parameters<SIZE>(w, norm.weight, i * SIZE, 1);
            load_parameters<SIZE>(b, norm.bias, i * SIZE, 0);
            A y;
            for (int k = 0; k < SIZE; k++) {
                from_float(&y.x[k], layernorm_value(to_float(kept[j].access.x[k]), m, r, w[k], b[k]));
            }
            row_of<A>(out, row)[i] = y;
        }
    }
}

void cuda_layernorm_forward(Tensor out, Tensor sum, Tensor input, Tensor residual, NormParams norm) {
    Tensor none = {};
    if (!out.data) out = none;
    if (!residual.data) sum = residual = none;
    bool packs = takes_packs(out) && takes_packs(sum) && takes_packs(input) && takes_packs(residual) &&
                 is_aligned(norm.weight) && is_aligned(norm.bias);
    int64_t accesses = packs ? input.cols * (int64_t)dtype_size(input.dtype) / 16 : input.cols;
    unsigned threads = WARP;
    while (threads < MAX_BLOCK && threads * KEPT < accesses) {
        threads *= 2;
    }
    dim3 block(threads, threads < BLOCK ? BLOCK / threads : 1);
    FOR_ACCESS(input.dtype, packs,
               CUDA_LAUNCH((layernorm_forward<A>), (unsigned)num_parts(input.rows, block.y), block, 0, out, sum, input,
                           residual, norm));
}

// Backward

enum { MAX_BACKWARD_BLOCK = 768, TILE_BLOCK = 256 };

// Means over a row of dn = dout weight (0 for RMSNorm) and of dn n, n the normalised input.
typedef struct {
    float dn, dn_n;
} RowMeans;

// Returns sums over the block, to all its threads. `scratch` alternates between two buffers from
// call to call, so that one barrier is enough: a buffer is written again only after the barrier of
// the call between.
static __device__ __forceinline__ RowMeans block_sums(RowMeans x, RowMeans *scratch) {
    int lane = (int)threadIdx.x % WARP, warps = (int)blockDim.x / WARP;
    x.dn = warp_reduce<SUM>(x.dn);
    x.dn_n = warp_reduce<SUM>(x.dn_n);
    if (lane == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    RowMeans sum = {0, 0};
    if (lane < warps) sum = scratch[lane];
    sum.dn = warp_reduce<SUM>(sum.dn);
    sum.dn_n = warp_reduce<SUM>(sum.dn_n);
    return sum;
}

// Finds the means of each row, where no block sees whole rows: block `row`.
template <typename A>
static __global__ void __launch_bounds__(BLOCK)
    layernorm_row_means(RowMeans *means, Tensor dout, Tensor input, NormParams norm) {
    const int SIZE = A::SIZE;
    __shared__ RowMeans scratch[WARP];
    int64_t row = blockIdx.x;
    RowMeans sum = {0, 0};
    for (int64_t i = threadIdx.x; i < input.cols / SIZE; i += BLOCK) {
        A x = row_of<A>(input, row)[i], d = row_of<A>(dout, row)[i];
        float w[SIZE], m = norm_mean(norm, row);
        load_parameters<SIZE>(w, norm.weight, i * SIZE, 1);
        for (int k = 0; k < SIZE; k++) {
            float dn = to_float(d.x[k]) * w[k];
            sum.dn += dn;
            sum.dn_n += dn * ((to_float(x.x[k]) - m) * norm.rstd[row]);
        }
    }
    sum = block_sums(sum, scratch);
    if (threadIdx.x == 0) {
        means[row].dn = norm.kind == NORM_LAYERNORM ? sum.dn / (float)input.cols : 0.0f;
        means[row].dn_n = sum.dn_n / (float)input.cols;
    }
}

// Adds to dinput. With n = (x - mean) rstd and dn = dout weight: dx = rstd (dn - mean(dn) - n
// mean(dn n)); RMSNorm's is without mean(dn). Block `part * tiles + tile`; row `part` of `partials`
// (parts, 2 C; or NULL) gets the part's gradients of gains, then those of biases.
template <typename A, bool WHOLE_ROWS>
static __global__ void __launch_bounds__(MAX_BACKWARD_BLOCK)
    layernorm_backward(Tensor dinput, float *partials, Tensor dout, Tensor input, NormParams norm,
                       const RowMeans *means, int64_t part_rows) {
    const int SIZE = A::SIZE;
    __shared__ RowMeans scratch[2][WARP];
    int C = (int)input.cols, accesses = C / SIZE;
    int tiles = WHOLE_ROWS ? 1 : (accesses + TILE_BLOCK - 1) / TILE_BLOCK, tile = (int)blockIdx.x % tiles;
    int i = tile * TILE_BLOCK + (int)threadIdx.x;
    int64_t part = blockIdx.x / tiles;
    int64_t row = part * part_rows, end = row + part_rows < input.rows ? row + part_rows : input.rows;
    bool has_columns = i < accesses; // threads without still take part in the block's sums

    float w[SIZE] = {0}, weight_sum[SIZE] = {0}, bias_sum[SIZE] = {0};
    Loaded<A> next_x = {}, next_dout = {};
    if (has_columns) {
        load_parameters<SIZE>(w, norm.weight, i * SIZE, 1);
        next_x.load(row_of<A>(input, row) + i), next_dout.load(row_of<A>(dout, row) + i);
    }
    for (; row < end; row++) {
        A x = next_x.access, d = next_dout.access;
        Loaded<A> before = {};
        if (has_columns) before.load(row_of<A>(dinput, row) + i);
        if (has_columns && row + 1 < end) { // under way while this row is summed
            next_x.load(row_of<A>(input, row + 1) + i), next_dout.load(row_of<A>(dout, row + 1) + i);
        }
        float m = norm_mean(norm, row), r = norm.rstd[row];
        float n[SIZE], dn[SIZE];
        RowMeans sum = {0, 0};
        for (int k = 0; k < SIZE; k++) {
            float dy = to_float(d.x[k]);
            n[k] = (to_float(x.x[k]) - m) * r;
            dn[k] = dy * w[k];
            sum.dn += dn[k];
            sum.dn_n += dn[k] * n[k];
            weight_sum[k] += dy * n[k];
            bias_sum[k] += dy;
        }
        if (WHOLE_ROWS) {
            sum = block_sums(sum, scratch[row & 1]);
            sum.dn = norm.kind == NORM_LAYERNORM ? sum.dn / (float)C : 0.0f;
            sum.dn_n /= (float)C;
        } else {
            sum = means[row];
        }
        A dx = before.access;
        for (int k = 0; k < SIZE; k++) {
            from_float(&dx.x[k], to_float(dx.x[k]) + (dn[k] - sum.dn - n[k] * sum.dn_n) * r);
        }
        if (has_columns) row_of<A>(dinput, row)[i] = dx;
    }
    if (!has_columns || !partials) return;
    store_floats<SIZE>(partials + part * 2 * C + i * SIZE, weight_sum);
    store_floats<SIZE>(partials + part * 2 * C + C + i * SIZE, bias_sum);
}

template <typename A>
static void launch_backward(Tensor dinput, float *partials, RowMeans *means, Tensor dout, Tensor input,
                            NormParams norm) {
    int64_t accesses = input.cols / A::SIZE, part = cuda_layernorm_rows_per_part(input.rows),
            parts = num_parts(input.rows, part);
    if (accesses <= MAX_BACKWARD_BLOCK) {
        unsigned block = (unsigned)num_parts(accesses, WARP) * WARP;
        CUDA_LAUNCH((layernorm_backward<A, true>), (unsigned)parts, block, 0, dinput, partials, dout, input, norm,
                    means, part);
        return;
    }
    CUDA_LAUNCH((layernorm_row_means<A>), (unsigned)input.rows, BLOCK, 0, means, dout, input, norm);
    CUDA_LAUNCH((layernorm_backward<A, false>), (unsigned)(parts * num_parts(accesses, TILE_BLOCK)), TILE_BLOCK, 0,
                dinput, partials, dout, input, norm, means, part);
}

void cuda_layernorm_backward(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input, NormParams norm) {
    int64_t rows = input.rows, C = input.cols, parts = num_parts(rows, cuda_layernorm_rows_per_part(rows));
    float *partials = (float *)cuda_workspace(cuda_reduction_workspace(rows, C));
    float *scratch = partials + 2 * parts * C, *means = scratch + cuda_sum_columns_scratch(parts, 2 * C);
    bool packs = takes_packs(dinput) && takes_packs(dout) && takes_packs(input) && is_aligned(norm.weight);
    FOR_ACCESS(input.dtype, packs,
               launch_backward<A>(dinput, dweight || dbias ? partials : NULL, (RowMeans *)means, dout, input, norm));
    Tensor sums = tensor_make(partials, FORMAT_FP32, parts, 2 * C);
    if (dweight && dbias) {
        cuda_sum_columns(dweight, dbias, C, sums, scratch);
    } else if (dweight) {
        cuda_sum_columns(dweight, NULL, C, tensor_cols(sums, 0, C), scratch);
    } else if (dbias) {
        cuda_sum_columns(dbias, NULL, C, tensor_cols(sums, C, C), scratch);
    }
}
