/*
Self-attention on the plain cores, for what cuDNN doesn't take: FP32, odd head sizes, machines
without it. By tiles of 64 queries and 64 keys, whose scores live in registers and shared memory and
never as a T x T matrix (Dao, FlashAttention-2, 2023). FP32 throughout; one rounding at the store.

One thread block has one tile of queries (or, for dK and dV, of keys) of one head and goes through
the tiles that its own sees, in order: each value has one owner and its sum one order, so nothing
depends on the card. Everything is made of two products of 64x64 tiles in shared memory, `multiply`
and `accumulate`, both with 4x4 values for each of 256 threads.
*/
#include "attention.h"
#include "kernel.cuh"

#include <float.h>

enum {
    TILE = 64,
    SIDE = 16, // threads along each side of a tile
    THREADS = SIDE * SIDE,
    MINE = TILE / SIDE,    // rows of a tile that a thread has, and columns
    LANES = SIDE,          // neighbours in a warp, which have the same rows
    TILE_STRIDE = TILE + 4 // 16 rows, read at once in 16-byte pieces, fall on different banks
};

// Thread blocks that a multiprocessor should hold at least, so that one computes while another
// waits for its tiles: a limit to registers, where heads aren't so long that sums fill them.
#define MIN_BLOCKS(slices) ((slices) == 1 ? 2 : 1)

typedef float Tile[TILE][TILE_STRIDE]; // in shared memory
typedef Pack<float> Float4;

typedef struct {
    int T, NH, NKV, HS;
    float scale; // of scores: 1 / sqrt(HS)
    bool causal;
    bool packs;               // the head's rows are whole, aligned Packs in every tensor
    const int32_t *positions; // (B, T) in documents, or NULL
} Shape;

// A head of one sequence: T rows of HS values.
template <typename E> struct Rows {
    E *data;
    int64_t stride;
};

// Threads of a block as a square. A thread's rows of a tile are consecutive. So are its columns of
// a product's result in memory; of scores it has every 16th, so that neighbours read neighbouring
// rows of keys.
static __device__ __forceinline__ int thread_x() { return (int)threadIdx.x % SIDE; }
static __device__ __forceinline__ int thread_y() { return (int)threadIdx.x / SIDE; }
static __device__ __forceinline__ int my_row(int i) { return thread_y() * MINE + i; }
static __device__ __forceinline__ int my_score_col(int j) { return thread_x() + j * SIDE; }
static __device__ __forceinline__ int my_col(int j) { return thread_x() * MINE + j; }

// Sequence `b`'s head `h`, counted over a tensor's columns: in qkv after the NH heads of queries
// come NKV of keys and NKV of values.
template <typename E> static __device__ Rows<E> rows_of_head(Tensor tensor, Shape s, int b, int h) {
    Rows<E> rows = {(E *)tensor.data + (int64_t)b * s.T * tensor.stride + h * s.HS, tensor.stride};
    return rows;
}

// A query head's values in a (B, NH, T).
template <typename V> static __device__ __forceinline__ V *values_of_head(V *values, Shape s, int b, int h) {
    return values + ((int64_t)b * s.NH + h) * s.T;
}

// Query heads of one head of keys.
static __device__ __forceinline__ int group_size(Shape s) { return s.NH / s.NKV; }

// tile = rows [first_row, + TILE), columns [first_col, + TILE) of a head; 0 beyond its ends.
template <typename E> static __device__ void load_tile(Tile tile, Rows<E> rows, int first_row, int first_col, Shape s) {
    const int size = Pack<E>::SIZE, per_row = TILE / size;
#pragma unroll 2
    for (int i = (int)threadIdx.x; s.packs && i < TILE * per_row; i += THREADS) {
        int row = i / per_row, col = i % per_row * size;
        Pack<E> pack = {};
        if (first_row + row < s.T && first_col + col < s.HS) {
            pack = *(const Pack<E> *)(rows.data + (first_row + row) * rows.stride + first_col + col);
        }
        for (int k = 0; k < size; k += Float4::SIZE) {
            Float4 x;
            for (int c = 0; c < Float4::SIZE; c++) {
                x.x[c] = to_float(pack.x[k + c]);
            }
            *(Float4 *)&tile[row][col + k] = x;
        }
    }
#pragma unroll 1
    for (int i = (int)threadIdx.x; !s.packs && i < TILE * TILE; i += THREADS) {
        int row = i / TILE, col = i % TILE;
        bool inside = first_row + row < s.T && first_col + col < s.HS;
        tile[row][col] = inside ? to_float(rows.data[(first_row + row) * rows.stride + first_col + col]) : 0.0f;
    }
}

// The reverse, of what each thread has, times `scale`.
template <typename E>
static __device__ void store_rows(Rows<E> rows, int first_row, int first_col, const float (*x)[MINE], float scale,
                                  Shape s) {
    struct __align__(MINE * sizeof(E)) Values {
        E x[MINE];
    };
    int col = first_col + my_col(0);
    for (int i = 0; i < MINE; i++) {
        int row = first_row + my_row(i);
        if (row >= s.T) continue;
        Values values;
        for (int j = 0; j < MINE; j++) {
            from_float(&values.x[j], x[i][j] * scale);
        }
        E *to = rows.data + row * rows.stride + col;
        if (s.packs) {
            if (col < s.HS) *(Values *)to = values;
        } else {
            for (int j = 0; j < MINE; j++) {
                if (col + j < s.HS) to[j] = values.x[j];
            }
        }
    }
}

// scores += a b^T over the tiles' columns, in their order.
static __device__ __forceinline__ void multiply(float (*scores)[MINE], const Tile a, const Tile b) {
#pragma unroll 2
    for (int d = 0; d < TILE; d += Float4::SIZE) {
        Float4 x[MINE], y[MINE];
        for (int i = 0; i < MINE; i++) {
            x[i] = *(const Float4 *)&a[my_row(i)][d];
            y[i] = *(const Float4 *)&b[my_score_col(i)][d];
        }
        for (int c = 0; c < Float4::SIZE; c++) {
            for (int i = 0; i < MINE; i++) {
                for (int j = 0; j < MINE; j++) {
                    scores[i][j] += x[i].x[c] * y[j].x[c];
                }
            }
        }
    }
}

// out += a b over a's columns and b's rows, in their order.
static __device__ __forceinline__ void accumulate(float (*out)[MINE], const Tile a, const Tile b) {
#pragma unroll 2
    for (int k = 0; k < TILE; k += Float4::SIZE) {
        Float4 x[MINE];
        for (int i = 0; i < MINE; i++) {
            x[i] = *(const Float4 *)&a[my_row(i)][k];
        }
        for (int c = 0; c < Float4::SIZE; c++) {
            Float4 y = *(const Float4 *)&b[k + c][my_col(0)];
            for (int i = 0; i < MINE; i++) {
                for (int j = 0; j < MINE; j++) {
                    out[i][j] += x[i].x[c] * y.x[j];
                }
            }
        }
    }
}

// scores += rows [first_a, + TILE) of `a` times rows [first_b, + TILE) of `b`, transposed. The
// tiles are free before and after.
template <int SLICES, typename E>
static __device__ void multiply_rows(float (*scores)[MINE], Tile tile_a, Tile tile_b, Rows<E> a, int first_a, Rows<E> b,
                                     int first_b, Shape s) {
    for (int slice = 0; slice < SLICES; slice++) {
        load_tile(tile_a, a, first_a, slice * TILE, s);
        load_tile(tile_b, b, first_b, slice * TILE, s);
        __syncthreads();
        multiply(scores, tile_a, tile_b);
        __syncthreads();
    }
}

// out += weights (in the layout of scores) times rows [first, + TILE) of `rows`. The tiles are free
// before and after.
template <int SLICES, typename E>
static __device__ void accumulate_rows(float (*out)[MINE][MINE], Tile tile_a, Tile tile_b, const float (*weights)[MINE],
                                       Rows<E> rows, int first, Shape s) {
    for (int i = 0; i < MINE; i++) {
        for (int j = 0; j < MINE; j++) {
            tile_a[my_row(i)][my_score_col(j)] = weights[i][j];
        }
    }
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
        load_tile(tile_b, rows, first, slice * TILE, s);
        __syncthreads();
        accumulate(out[slice], tile_a, tile_b);
        __syncthreads();
    }
}

// Returns the first key that a query of sequence `b` sees: its document's, which no later query's
// comes before.
static __device__ __forceinline__ int begin_of_sight(int query, Shape s, int b) {
    return s.positions && query < s.T ? query - s.positions[(int64_t)b * s.T + query] : 0;
}

// `begin`: begin_of_sight. Queries beyond the sequence's end see nothing, and keys there are seen
// by none.
static __device__ __forceinline__ bool sees(int query, int key, int begin, Shape s) {
    return query < s.T && key >= begin && key <= (s.causal ? query : s.T - 1);
}

// The tiles of keys from this key to `last_key` are seen by some of the TILE queries from `first`
// on.
static __device__ __forceinline__ int first_key(int first, Shape s, int b) {
    return begin_of_sight(first, s, b) / TILE * TILE;
}

static __device__ __forceinline__ int last_key(int first, Shape s) { return s.causal ? first : s.T - 1; }

// The longest rows first: the last of them to start end sooner.
static __device__ __forceinline__ int first_query() { return (int)(gridDim.y - 1 - blockIdx.y) * TILE; }

// out = softmax(q k^T scale) v and the logsumexp of the scaled scores. What is summed so far is
// relative to the largest score so far, and rescaled when a larger one comes.
template <typename E, int SLICES>
static __global__ void __launch_bounds__(THREADS, MIN_BLOCKS(SLICES))
    attention_forward(Tensor out, float *logsumexp, Tensor qkv, Shape s) {
    __shared__ __align__(16) Tile tile_a;
    __shared__ __align__(16) Tile tile_b;
    int b = (int)blockIdx.x / s.NH, h = (int)blockIdx.x % s.NH, kv = h / group_size(s), first = first_query();
    Rows<E> q = rows_of_head<E>(qkv, s, b, h), k = rows_of_head<E>(qkv, s, b, s.NH + kv);
    Rows<E> v = rows_of_head<E>(qkv, s, b, s.NH + s.NKV + kv);
    logsumexp = values_of_head(logsumexp, s, b, h);
    float max[MINE], sum[MINE], sums[SLICES][MINE][MINE] = {}; // sum: over this thread's keys
    int begin[MINE];
    for (int i = 0; i < MINE; i++) {
        // Not -INFINITY: a document may begin behind the first tile, and then that stays the
        // largest, whose difference from itself must be 0.
        max[i] = -FLT_MAX, sum[i] = 0, begin[i] = begin_of_sight(first + my_row(i), s, b);
    }
    for (int key = first_key(first, s, b); key <= last_key(first, s); key += TILE) {
        float probs[MINE][MINE] = {};
        multiply_rows<SLICES>(probs, tile_a, tile_b, q, first, k, key, s);
        for (int i = 0; i < MINE; i++) {
            int query = first + my_row(i);
            float largest = max[i];
            for (int j = 0; j < MINE; j++) {
                if (sees(query, key + my_score_col(j), begin[i], s)) largest = fmaxf(largest, probs[i][j]);
            }
            largest = warp_reduce<MAX, LANES>(largest);
            float rescale = expf((max[i] - largest) * s.scale);
            max[i] = largest;
            sum[i] *= rescale;
            for (int j = 0; j < MINE; j++) {
                float p = expf((probs[i][j] - largest) * s.scale);
                probs[i][j] = sees(query, key + my_score_col(j), begin[i], s) ? p : 0.0f;
                sum[i] += probs[i][j];
            }
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
                for (int j = 0; j < MINE; j++) {
                    sums[slice][i][j] *= rescale;
                }
            }
        }
        accumulate_rows<SLICES>(sums, tile_a, tile_b, probs, v, key, s);
    }
    for (int i = 0; i < MINE; i++) {
        sum[i] = warp_reduce<SUM, LANES>(sum[i]);
        int query = first + my_row(i);
        if (query < s.T && thread_x() == 0) logsumexp[query] = max[i] * s.scale + logf(sum[i]);
        float inverse = 1 / sum[i];
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            for (int j = 0; j < MINE; j++) {
                sums[slice][i][j] *= inverse;
            }
        }
    }
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
        store_rows(rows_of_head<E>(out, s, b, h), first, slice * TILE, sums[slice], 1, s);
    }
}

// dQ = scale sum over keys of P (dP - D) K with dP = dO V^T. D, the sum over keys of P dP, which is
// a row's sum of dO O, is taken from P and dP in a first pass: then it is the same sum of the same
// numbers that it is subtracted from, and no O need be kept. It is left in softmax_sum (B, NH, T)
// for dK and dV.
template <typename E, int SLICES>
static __global__ void __launch_bounds__(THREADS, MIN_BLOCKS(SLICES))
    attention_backward_queries(Tensor dqkv, float *softmax_sum, Tensor dout, Tensor qkv, const float *logsumexp,
                               Shape s) {
    __shared__ __align__(16) Tile tile_a;
    __shared__ __align__(16) Tile tile_b;
    int b = (int)blockIdx.x / s.NH, h = (int)blockIdx.x % s.NH, kv = h / group_size(s), first = first_query();
    Rows<E> q = rows_of_head<E>(qkv, s, b, h), k = rows_of_head<E>(qkv, s, b, s.NH + kv);
    Rows<E> v = rows_of_head<E>(qkv, s, b, s.NH + s.NKV + kv), dout_rows = rows_of_head<E>(dout, s, b, h);
    logsumexp = values_of_head(logsumexp, s, b, h), softmax_sum = values_of_head(softmax_sum, s, b, h);
    float lse[MINE], sum[MINE], dq[SLICES][MINE][MINE] = {};
    int begin[MINE];
    for (int i = 0; i < MINE; i++) {
        int query = first + my_row(i);
        lse[i] = query < s.T ? logsumexp[query] : 0.0f, sum[i] = 0, begin[i] = begin_of_sight(query, s, b);
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int key = first_key(first, s, b); key <= last_key(first, s); key += TILE) {
            float dscores[MINE][MINE] = {}, dprobs[MINE][MINE] = {};
            multiply_rows<SLICES>(dscores, tile_a, tile_b, q, first, k, key, s);
            multiply_rows<SLICES>(dprobs, tile_a, tile_b, dout_rows, first, v, key, s);
            for (int i = 0; i < MINE; i++) {
                for (int j = 0; j < MINE; j++) {
                    float p = expf(dscores[i][j] * s.scale - lse[i]);
                    p = sees(first + my_row(i), key + my_score_col(j), begin[i], s) ? p : 0.0f;
                    if (pass == 0) sum[i] += p * dprobs[i][j];
                    dscores[i][j] = p * (dprobs[i][j] - sum[i]);
                }
            }
            if (pass == 1) accumulate_rows<SLICES>(dq, tile_a, tile_b, dscores, k, key, s);
        }
        for (int i = 0; pass == 0 && i < MINE; i++) {
            int query = first + my_row(i);
            sum[i] = warp_reduce<SUM, LANES>(sum[i]);
            if (query < s.T && thread_x() == 0) softmax_sum[query] = sum[i];
        }
    }
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
        store_rows(rows_of_head<E>(dqkv, s, b, h), first, slice * TILE, dq[slice], s.scale, s);
    }
}

// dV = P^T dO and dK = scale dS^T Q, for a tile of keys, over the queries that see them, head after
// head of their group. Scores are transposed here: a thread's rows are keys.
template <typename E, int SLICES>
static __global__ void __launch_bounds__(THREADS, MIN_BLOCKS(SLICES))
    attention_backward_keys(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, const float *softmax_sum,
                            Shape s) {
    __shared__ __align__(16) Tile tile_a;
    __shared__ __align__(16) Tile tile_b;
    int b = (int)blockIdx.x / s.NKV, kv = (int)blockIdx.x % s.NKV, first = (int)blockIdx.y * TILE;
    Rows<E> k = rows_of_head<E>(qkv, s, b, s.NH + kv), v = rows_of_head<E>(qkv, s, b, s.NH + s.NKV + kv);
    float dk[SLICES][MINE][MINE] = {}, dv[SLICES][MINE][MINE] = {};
    for (int h = kv * group_size(s); h < (kv + 1) * group_size(s); h++) {
        Rows<E> q = rows_of_head<E>(qkv, s, b, h), dout_rows = rows_of_head<E>(dout, s, b, h);
        const float *lses = values_of_head(logsumexp, s, b, h), *sums = values_of_head(softmax_sum, s, b, h);
        for (int first_query = s.causal ? first : 0; first_query < s.T; first_query += TILE) {
            if (begin_of_sight(first_query, s, b) >= first + TILE) break; // later documents don't see these keys
            float probs[MINE][MINE] = {}, dscores[MINE][MINE] = {};
            multiply_rows<SLICES>(probs, tile_a, tile_b, k, first, q, first_query, s);
            multiply_rows<SLICES>(dscores, tile_a, tile_b, v, first, dout_rows, first_query, s);
            for (int j = 0; j < MINE; j++) {
                int query = first_query + my_score_col(j);
                float lse = query < s.T ? lses[query] : 0.0f, sum = query < s.T ? sums[query] : 0.0f;
                int begin = begin_of_sight(query, s, b);
                for (int i = 0; i < MINE; i++) {
                    float p = expf(probs[i][j] * s.scale - lse);
                    probs[i][j] = sees(query, first + my_row(i), begin, s) ? p : 0.0f;
                    dscores[i][j] = probs[i][j] * (dscores[i][j] - sum);
                }
            }
            accumulate_rows<SLICES>(dv, tile_a, tile_b, probs, dout_rows, first_query, s);
            accumulate_rows<SLICES>(dk, tile_a, tile_b, dscores, q, first_query, s);
        }
    }
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
        store_rows(rows_of_head<E>(dqkv, s, b, s.NH + kv), first, slice * TILE, dk[slice], s.scale, s);
        store_rows(rows_of_head<E>(dqkv, s, b, s.NH + s.NKV + kv), first, slice * TILE, dv[slice], 1, s);
    }
}

static void check_head_size(int64_t HS) {
    if (HS > CUDA_ATTENTION_MAX_HEAD_SIZE) {
        die("attention heads of %ld values: the GPU takes at most %d; give the model more heads", HS,
            CUDA_ATTENTION_MAX_HEAD_SIZE);
    }
}

// `packs`: whether each of the call's tensors takes them.
static Shape shape_of(Format dtype, AttentionShape of, bool packs) {
    check_head_size(of.HS);
    packs = packs && of.HS * (int64_t)dtype_size(dtype) % 16 == 0;
    const int32_t *positions = of.by_document ? of.positions : NULL;
    Shape shape = {(int)of.T, (int)of.NH, (int)of.NKV, (int)of.HS, 1 / sqrtf((float)of.HS),
                   of.causal, packs,      positions};
    return shape;
}

// A block for each head, of NH or NKV in a sequence, and tile of its rows.
static dim3 grid_of(AttentionShape of, int64_t heads) {
    return dim3((unsigned)(of.B * heads), (unsigned)num_parts(of.T, TILE));
}

// Calls `call` with SLICES the number of tiles' columns that hold a head.
#define FOR_SLICES(HS, call)         \
    do {                             \
        if (HS <= TILE) {            \
            enum { SLICES = 1 };     \
            call;                    \
        } else if (HS <= 2 * TILE) { \
            enum { SLICES = 2 };     \
            call;                    \
        } else {                     \
            enum { SLICES = 4 };     \
            call;                    \
        }                            \
    } while (0)

extern "C" size_t cuda_attention_workspace_plain(AttentionShape of) {
    check_head_size(of.HS);
    return cuda_attention_plain_bytes(of); // softmax_sum
}

extern "C" void cuda_attention_forward_plain(Tensor out, float *logsumexp, Tensor qkv, AttentionShape of) {
    Shape shape = shape_of(qkv.dtype, of, takes_packs(out) && takes_packs(qkv));
    FOR_DTYPE(qkv.dtype, FOR_SLICES(shape.HS, CUDA_LAUNCH((attention_forward<T, SLICES>), grid_of(of, of.NH), THREADS,
                                                          0, out, logsumexp, qkv, shape)));
}

extern "C" void cuda_attention_backward_plain(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp,
                                              AttentionShape of) {
    bool packs = takes_packs(dqkv) && takes_packs(dout) && takes_packs(qkv);
    Shape shape = shape_of(qkv.dtype, of, packs);
    float *softmax_sum = (float *)cuda_workspace(cuda_attention_workspace_plain(of));
    FOR_DTYPE(qkv.dtype, FOR_SLICES(shape.HS, CUDA_LAUNCH((attention_backward_queries<T, SLICES>), grid_of(of, of.NH),
                                                          THREADS, 0, dqkv, softmax_sum, dout, qkv, logsumexp, shape)));
    FOR_DTYPE(qkv.dtype, FOR_SLICES(shape.HS, CUDA_LAUNCH((attention_backward_keys<T, SLICES>), grid_of(of, of.NKV),
                                                          THREADS, 0, dqkv, dout, qkv, logsumexp, softmax_sum, shape)));
}
