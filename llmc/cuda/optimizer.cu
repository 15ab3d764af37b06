/*
AdamW, SGD and sums over parameters.
*/
#include "quantize.cuh"

#include <math.h>

enum { BLOCK = 256 };

// Updates one element.
static __device__ __forceinline__ void update_element(float *master, float *moment1, float *moment2, float gradient,
                                                      AdamWFactors f) {
    float scaled = gradient * f.gradient_scale;
    float m = fmaf(f.beta1, *moment1, (1.0f - f.beta1) * scaled);
    float v = fmaf(f.beta2, *moment2, (1.0f - f.beta2) * scaled * scaled);
    *master = fmaf(*master, f.decay, -(f.step_size * m / fmaf(sqrtf(v), f.root2, f.eps)));
    *moment1 = m;
    *moment2 = v;
}

// What AdamW reads of SIZE elements.
template <int SIZE> struct AdamWElements {
    float w[SIZE], m[SIZE], v[SIZE], g[SIZE];

    __device__ __forceinline__ void load(const AdamWUpdate &u, int64_t at) {
        load_floats<SIZE>(w, u.master + at);
        load_floats<SIZE>(m, u.moment1 + at);
        load_floats<SIZE>(v, u.moment2 + at);
        load_floats<SIZE>(g, u.gradient + at);
    }

    // Updates them where they were loaded from; w are the new masters.
    __device__ __forceinline__ void update(const AdamWUpdate &u, int64_t at) {
#pragma unroll
        for (int k = 0; k < SIZE; k++) {
            update_element(&w[k], &m[k], &v[k], g[k], u.factors);
        }
        store_floats<SIZE>(u.master + at, w);
        store_floats<SIZE>(u.moment1 + at, m);
        store_floats<SIZE>(u.moment2 + at, v);
    }
};

// What update_kernel does to SIZE elements from `at` on: AdamW's step where no quantized copies are
// wanted, SGD's, a sum.
struct AdamW {
    AdamWUpdate u;

    template <int SIZE> __device__ __forceinline__ void run(int64_t at) const {
        AdamWElements<SIZE> e;
        e.load(u, at);
        e.update(u, at);
        if (!u.bf16) return;
        if constexpr (SIZE == 1) {
            from_float(u.bf16 + at, e.w[0]);
        } else {
            *(uint2 *)(u.bf16 + at) = {bf16_pair(e.w[0], e.w[1]), bf16_pair(e.w[2], e.w[3])};
        }
    }
};
static_assert(Pack<float>::SIZE == 4, "AdamW stores four BF16s at a time");

// The moment is left alone where there is none.
struct Sgd {
    float *master, *moment;
    const float *gradient;
    SGDOptions o;

    template <int SIZE> __device__ __forceinline__ void run(int64_t at) const {
        float w[SIZE], m[SIZE], g[SIZE];
        load_floats<SIZE>(w, master + at);
        load_floats<SIZE>(g, gradient + at);
        load_parameters<SIZE>(m, moment, at, 0);
        for (int k = 0; k < SIZE; k++) {
            m[k] = fmaf(o.momentum, m[k], o.gradient_scale * g[k]);
            w[k] = fmaf(-o.learning_rate, m[k], w[k]);
        }
        store_floats<SIZE>(master + at, w);
        if (moment) store_floats<SIZE>(moment + at, m);
    }
};

struct Accumulate {
    float *sum;
    const float *values;

    template <int SIZE> __device__ __forceinline__ void run(int64_t at) const {
        float a[SIZE], b[SIZE];
        load_floats<SIZE>(a, sum + at);
        load_floats<SIZE>(b, values + at);
        for (int k = 0; k < SIZE; k++) {
            a[k] += b[k];
        }
        store_floats<SIZE>(sum + at, a);
    }
};

// Thread i < packs takes a Pack, those after it an element each of what is left.
template <typename Update>
static __global__ void __launch_bounds__(BLOCK) update_kernel(Update update, int64_t count, int64_t packs) {
    const int SIZE = Pack<float>::SIZE;
    int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, single = packs * SIZE + (i - packs);
    if (i < packs) {
        update.template run<SIZE>(i * SIZE);
    } else if (single < count) {
        update.template run<1>(single);
    }
}

template <typename Update> static void update_all(Update update, int64_t count, bool aligned) {
    if (count == 0) return;
    int64_t packs = aligned ? count / Pack<float>::SIZE : 0, singles = count - packs * Pack<float>::SIZE;
    CUDA_LAUNCH((update_kernel<Update>), (unsigned)num_parts(packs + singles, BLOCK), BLOCK, 0, update, count, packs);
}

// The new masters, for the quantizer: it updates them as it loads them, in registers. Loads a row
// before it updates the one before: a compiler moves no load up over a store.
struct FromAdamW {
    typedef float Element;
    static const bool IS_MADE = true;
    AdamWUpdate u;

    __device__ __forceinline__ void load(Eight<float> *x, int64_t row, int64_t col, int height) const {
        AdamWElements<LANE_COLS> next;
        if (height > 0) next.load(u, row * u.cols + col);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            x[i] = {};
            if (i * STEP_ROWS >= height) continue;
            AdamWElements<LANE_COLS> e = next;
            int64_t at = (row + i * STEP_ROWS) * u.cols + col;
            if ((i + 1) * STEP_ROWS < height) next.load(u, at + STEP_ROWS * u.cols);
            e.update(u, at);
#pragma unroll
            for (int c = 0; c < LANE_COLS; c++) {
                x[i].x[c] = mx_float_bits(e.w[c]);
            }
        }
    }

    __device__ __forceinline__ float element(int64_t row, int64_t col) const {
        AdamWElements<1> e;
        e.load(u, row * u.cols + col);
        e.update(u, row * u.cols + col);
        return e.w[0];
    }
};

// Takes two rows of four tensors in registers.
template <bool PLAIN> constexpr int MIN_BLOCKS<FromAdamW, PLAIN> = 3;

void cuda_adamw(AdamWUpdate u) {
    int64_t count = u.rows * u.cols;
    if (count == 0) return;
    bool aligned = is_aligned(u.master) && is_aligned(u.moment1) && is_aligned(u.moment2) && is_aligned(u.gradient);
    if (!u.rowwise.elements && !u.columnwise.elements) {
        update_all(AdamW{u}, count, aligned && is_aligned(u.bf16));
        return;
    }
    FromAdamW from = {u};
    Tensor bf16 = tensor_make(u.bf16, FORMAT_BF16, u.rows, u.cols);
    bool by_tiles = aligned && takes_eights(bf16) && copy_takes_eights(&u.rowwise) && copy_takes_eights(&u.columnwise);
    bool plain = copy_is_plain(&u.rowwise) && copy_is_plain(&u.columnwise);
    if (!by_tiles || !have_one_format(&u.rowwise, &u.columnwise)) {
        quantize_columns(u.rowwise, u.columnwise, from, bf16, NULL, u.rows, u.cols, u.rounding);
    } else if (plain) {
        quantize_tiles<FORMAT_E4M3, FORMAT_E5M2, FORMAT_E2M3, FORMAT_E3M2, FORMAT_E2M1>(
            u.rowwise, u.columnwise, from, bf16, NULL, u.rows, u.cols, u.rounding);
    } else {
        quantize_encoded(u.rowwise, u.columnwise, from, bf16, NULL, u.rows, u.cols, u.rounding);
    }
}

void cuda_sgd(float *master, float *moment, const float *gradient, int64_t count, SGDOptions o) {
    bool aligned = is_aligned(master) && is_aligned(moment) && is_aligned(gradient);
    update_all(Sgd{master, moment, gradient, o}, count, aligned);
}

void cuda_accumulate(float *sum, const float *values, int64_t count) {
    update_all(Accumulate{sum, values}, count, is_aligned(sum) && is_aligned(values));
}

// Sums in chunks whose number and size depend on `count` alone, one block each; the host adds them
// in order.
enum { MAX_CHUNKS = 1024, MIN_CHUNK = 16384, CHUNK_UNIT = BLOCK * Pack<float>::SIZE };

static int64_t chunk_size(int64_t count) {
    int64_t size = num_parts(num_parts(count, MAX_CHUNKS), CHUNK_UNIT) * CHUNK_UNIT;
    return size > MIN_CHUNK ? size : (int64_t)MIN_CHUNK;
}

// What is summed of corresponding elements; a term of one takes `b` = `a`, whose second load the
// compiler drops.
typedef double (*Term)(float a, float b);

MX_FUNCTION double value(float a, float) { return a; }
MX_FUNCTION double square(float a, float) { return (double)a * a; }
MX_FUNCTION double squared_difference(float a, float b) { return ((double)a - b) * ((double)a - b); }

// Adds up what a block's threads have and writes it to the block's place.
template <typename T> static __device__ __forceinline__ void store_sum_of_block(T *sums, T sum) {
    __shared__ T scratch[BLOCK];
    scratch[threadIdx.x] = sum;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = scratch[0];
}

// A thread has the same elements in the same order whether they come as Packs or one by one.
template <typename A, Term TERM>
static __global__ void __launch_bounds__(BLOCK)
    sum_chunks(double *sums, const float *a, const float *b, int64_t count, int64_t size) {
    const int PACK = Pack<float>::SIZE;
    int64_t first = blockIdx.x * size, end = first + size < count ? first + size : count;
    double sum = 0;
    int64_t i = first + threadIdx.x * PACK;
#pragma unroll 4
    for (; i + PACK <= end; i += CHUNK_UNIT) {
        float x[PACK], y[PACK];
        for (int k = 0; k < PACK; k += A::SIZE) {
            load_floats<A::SIZE>(x + k, a + i + k);
            load_floats<A::SIZE>(y + k, b + i + k);
        }
        for (int k = 0; k < PACK; k++) {
            sum += TERM(x[k], y[k]);
        }
    }
    for (; i < end; i++) { // what is left of the values, of one thread's Pack
        sum += TERM(a[i], b[i]);
    }
    store_sum_of_block(sums, sum);
}

template <Term TERM> static double sum_of(const float *a, const float *b, int64_t count) {
    static double *device_sums, *sums; // made by the first sum, in the first step, and kept; `sums` is pinned
    if (!sums) {
        cuda_check(cudaMalloc((void **)&device_sums, MAX_CHUNKS * sizeof(double)), "allocating memory of the GPU");
        cuda_check(cudaMallocHost((void **)&sums, MAX_CHUNKS * sizeof(double)), "allocating pinned memory");
    }
    if (count == 0) return 0;
    int64_t size = chunk_size(count), chunks = num_parts(count, size);
    if (is_aligned(a) && is_aligned(b)) {
        CUDA_LAUNCH((sum_chunks<Pack<float>, TERM>), (unsigned)chunks, BLOCK, 0, device_sums, a, b, count, size);
    } else {
        CUDA_LAUNCH((sum_chunks<Single<float>, TERM>), (unsigned)chunks, BLOCK, 0, device_sums, a, b, count, size);
    }
    cuda_check(
        cudaMemcpyAsync(sums, device_sums, (size_t)chunks * sizeof(double), cudaMemcpyDeviceToHost, cuda_stream()),
        "copying from the GPU");
    cuda_synchronize();
    double total = 0;
    for (int64_t i = 0; i < chunks; i++) {
        total += sums[i];
    }
    return total;
}

// Returns a number each of whose bits depends on all of these.
static __device__ __forceinline__ uint64_t mix_bits(uint64_t bits) {
    uint64_t mixed = bits * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9u;
    return mixed ^ mixed >> 32;
}

// Mixes an element's bits with its place; zeros and what isn't finite give 0.
static __device__ __forceinline__ uint64_t mix_element(Tensor tensor, int64_t row, int64_t col) {
    int64_t at = row * tensor.stride + col;
    uint64_t bits = tensor.dtype == FORMAT_FP32 ? ((const uint32_t *)tensor.data)[at] : ((const Bf16 *)tensor.data)[at];
    uint64_t exponent = tensor.dtype == FORMAT_FP32 ? 0x7F800000 : 0x7F80;
    bool counts = bits != 0 && (bits & exponent) != exponent;
    return counts ? mix_bits(bits << 32 ^ (uint64_t)(row * tensor.cols + col)) : 0;
}

// Each block adds up, without carry, what its rows give.
static __global__ void __launch_bounds__(BLOCK) digest_rows(uint64_t *sums, Tensor tensor) {
    uint64_t sum = 0;
    for (int64_t row = blockIdx.x; row < tensor.rows; row += MAX_CHUNKS) {
        for (int64_t col = threadIdx.x; col < tensor.cols; col += BLOCK) {
            sum += mix_element(tensor, row, col);
        }
    }
    store_sum_of_block(sums, sum);
}

uint64_t cuda_digest(Tensor tensor) {
    static uint64_t *device_sums; // made by the first call, and kept: freeing it would wait for other ranks
    uint64_t sums[MAX_CHUNKS], total = 0;
    int64_t blocks = min_int64(tensor.rows, MAX_CHUNKS);
    if (blocks == 0) return 0;
    if (!device_sums) cuda_check(cudaMalloc((void **)&device_sums, sizeof(sums)), "allocating memory of the GPU");
    CUDA_LAUNCH(digest_rows, (unsigned)blocks, BLOCK, 0, device_sums, tensor);
    cuda_copy_to_host(sums, device_sums, (size_t)blocks * sizeof(*sums));
    for (int64_t i = 0; i < blocks; i++) {
        total += sums[i];
    }
    return total;
}

static __global__ void __launch_bounds__(BLOCK) scramble_rows(Tensor tensor) {
    for (int64_t row = blockIdx.x; row < tensor.rows; row += MAX_CHUNKS) {
        for (int64_t col = threadIdx.x; col < tensor.cols; col += BLOCK) {
            Bf16 *value = (Bf16 *)tensor.data + row * tensor.stride + col;
            int high_exponent = *value >> 9 & 0x3F;
            if (high_exponent == 0 || high_exponent == 0x3F) continue;
            *value ^= (Bf16)(mix_bits((uint64_t)(row * tensor.cols + col + 1)) & 0x1FF);
        }
    }
}

void cuda_scramble(Tensor tensor) {
    int64_t blocks = tensor.rows < MAX_CHUNKS ? tensor.rows : (int64_t)MAX_CHUNKS;
    if (blocks > 0) CUDA_LAUNCH(scramble_rows, (unsigned)blocks, BLOCK, 0, tensor);
}

static __global__ void __launch_bounds__(BLOCK)
    scramble_rows_of_codes(uint8_t *codes, int64_t rows, int64_t cols, int64_t stride, int not_finite) {
    for (int64_t row = blockIdx.x; row < rows; row += MAX_CHUNKS) {
        for (int64_t col = threadIdx.x; col < cols; col += BLOCK) {
            uint8_t *code = codes + row * stride + col;
            int scrambled = *code ^ (int)(mix_bits((uint64_t)(row * cols + col + 1)) & 0x7F);
            if ((*code & 0x7F) < not_finite && (scrambled & 0x7F) < not_finite) *code = (uint8_t)scrambled;
        }
    }
}

void cuda_scramble_codes(uint8_t *codes, int64_t rows, int64_t cols, int64_t stride, Format format) {
    int64_t blocks = rows < MAX_CHUNKS ? rows : (int64_t)MAX_CHUNKS;
    int not_finite = format == FORMAT_E5M2 ? 0x7C : 0x7F;
    if (blocks > 0) {
        CUDA_LAUNCH(scramble_rows_of_codes, (unsigned)blocks, BLOCK, 0, codes, rows, cols, stride, not_finite);
    }
}

double cuda_sum_of_squares(const float *values, int64_t count) { return sum_of<square>(values, values, count); }

double cuda_squared_distance(const float *a, const float *b, int64_t count) {
    return sum_of<squared_difference>(a, b, count);
}

double cuda_sum(const float *values, int64_t count) { return sum_of<value>(values, values, count); }
