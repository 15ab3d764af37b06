/*
AdamW, SGD and sums over parameters.
*/
#include "ops.cuh"

#include <math.h>

enum { BLOCK = 256 };

AdamWFactors cuda_adamw_factors(AdamWOptions o) {
    float correction1 = (float)(1.0 - pow(o.beta1, (double)o.step)); // in double: near 1 the difference cancels
    float correction2 = (float)(1.0 - pow(o.beta2, (double)o.step));
    AdamWFactors factors = {o.beta1,
                            o.beta2,
                            o.eps,
                            1.0f - o.learning_rate * o.weight_decay,
                            o.learning_rate / correction1,
                            1.0f / sqrtf(correction2),
                            o.gradient_scale};
    return factors;
}

template <typename A>
static __device__ __forceinline__ void update(float *master, float *moment1, float *moment2, const float *gradient,
                                              int64_t at, AdamWFactors f) {
    const int SIZE = A::SIZE;
    float w[SIZE], m[SIZE], v[SIZE], g[SIZE];
    load_floats<SIZE>(w, master + at);
    load_floats<SIZE>(m, moment1 + at);
    load_floats<SIZE>(v, moment2 + at);
    load_floats<SIZE>(g, gradient + at);
    for (int k = 0; k < SIZE; k++) {
        adamw_update(&w[k], &m[k], &v[k], g[k], f);
    }
    store_floats<SIZE>(master + at, w);
    store_floats<SIZE>(moment1 + at, m);
    store_floats<SIZE>(moment2 + at, v);
}

// Thread i < packs takes a Pack, those after it an element each of what is left.
static __global__ void __launch_bounds__(BLOCK)
    adamw(float *master, float *moment1, float *moment2, const float *gradient, int64_t count, int64_t packs,
          AdamWFactors f) {
    const int SIZE = Pack<float>::SIZE;
    int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, single = packs * SIZE + (i - packs);
    if (i < packs) {
        update<Pack<float>>(master, moment1, moment2, gradient, i * SIZE, f);
    } else if (single < count) {
        update<Single<float>>(master, moment1, moment2, gradient, single, f);
    }
}

void cuda_adamw(float *master, float *moment1, float *moment2, const float *gradient, int64_t count, AdamWOptions o) {
    if (count == 0) return;
    AdamWFactors f = cuda_adamw_factors(o);
    bool aligned = is_aligned(master) && is_aligned(moment1) && is_aligned(moment2) && is_aligned(gradient);
    int64_t packs = aligned ? count / Pack<float>::SIZE : 0, singles = count - packs * Pack<float>::SIZE;
    CUDA_LAUNCH(adamw, (unsigned)num_parts(packs + singles, BLOCK), BLOCK, 0, master, moment1, moment2, gradient, count,
                packs, f);
}

// One element's update; the moment is left alone where there is none.
template <typename A>
static __device__ __forceinline__ void sgd_update(float *master, float *moment, const float *gradient, int64_t at,
                                                  SGDOptions o) {
    const int SIZE = A::SIZE;
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

static __global__ void __launch_bounds__(BLOCK)
    sgd(float *master, float *moment, const float *gradient, int64_t count, int64_t packs, SGDOptions o) {
    const int SIZE = Pack<float>::SIZE;
    int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, single = packs * SIZE + (i - packs);
    if (i < packs) {
        sgd_update<Pack<float>>(master, moment, gradient, i * SIZE, o);
    } else if (single < count) {
        sgd_update<Single<float>>(master, moment, gradient, single, o);
    }
}

void cuda_sgd(float *master, float *moment, const float *gradient, int64_t count, SGDOptions o) {
    if (count == 0) return;
    bool aligned = is_aligned(master) && is_aligned(moment) && is_aligned(gradient);
    int64_t packs = aligned ? count / Pack<float>::SIZE : 0, singles = count - packs * Pack<float>::SIZE;
    CUDA_LAUNCH(sgd, (unsigned)num_parts(packs + singles, BLOCK), BLOCK, 0, master, moment, gradient, count, packs, o);
}

static __global__ void __launch_bounds__(BLOCK)
    accumulate(float *sum, const float *__restrict__ values, int64_t count, int64_t packs) {
    const int SIZE = Pack<float>::SIZE;
    int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, single = packs * SIZE + (i - packs);
    if (i < packs) {
        float a[SIZE], b[SIZE];
        load_floats<SIZE>(a, sum + i * SIZE);
        load_floats<SIZE>(b, values + i * SIZE);
        for (int k = 0; k < SIZE; k++) {
            a[k] += b[k];
        }
        store_floats<SIZE>(sum + i * SIZE, a);
    } else if (single < count) {
        sum[single] += values[single];
    }
}

void cuda_accumulate(float *sum, const float *values, int64_t count) {
    if (count == 0) return;
    int64_t packs = is_aligned(sum) && is_aligned(values) ? count / Pack<float>::SIZE : 0;
    int64_t singles = count - packs * Pack<float>::SIZE;
    CUDA_LAUNCH(accumulate, (unsigned)num_parts(packs + singles, BLOCK), BLOCK, 0, sum, values, count, packs);
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

// A thread has the same elements in the same order whether they come as Packs or one by one.
template <typename A, Term TERM>
static __global__ void __launch_bounds__(BLOCK)
    sum_chunks(double *sums, const float *a, const float *b, int64_t count, int64_t size) {
    const int PACK = Pack<float>::SIZE;
    __shared__ double scratch[BLOCK];
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
    scratch[threadIdx.x] = sum;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = scratch[0];
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
    cuda_check(cudaStreamSynchronize(cuda_stream()), "waiting for the GPU");
    double total = 0;
    for (int64_t i = 0; i < chunks; i++) {
        total += sums[i];
    }
    return total;
}

double cuda_sum_of_squares(const float *values, int64_t count) { return sum_of<square>(values, values, count); }

double cuda_squared_distance(const float *a, const float *b, int64_t count) {
    return sum_of<squared_difference>(a, b, count);
}

double cuda_sum(const float *values, int64_t count) { return sum_of<value>(values, values, count); }
