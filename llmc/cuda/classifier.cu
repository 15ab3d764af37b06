/*
Losses, a block for each row. Softmax cross-entropy: the row's maximum and the sum of exponentials
in one pass (online softmax, Milakov & Gimelshein 2018), gradients in a second. In between the row
waits in shared memory where it fits, so that it is read from memory once: 50257 logits are 201 KB
of an H100's 227. A row that doesn't fit is read again, backwards: the rows under way are together
larger than the cache, which so still has what the first pass read last. Rows need only begin at 16
bytes to be read so: what a row has over whole Packs is read element by element.

The squared error and the divergence of two softmaxes, which are for small experiments, read all
elements one by one.
*/
#include "ops.cuh"

enum { BLOCK = 1024 };

// Sum of exp(x - max) of a thread's elements. `max` begins at a finite value, so that -Inf is taken
// for what it is; a NaN leaves max alone and makes the sum NaN.
typedef struct {
    float max, sum;
} Online;

template <int COUNT> static __device__ __forceinline__ void add_logits(Online *online, const float *x) {
    float max = online->max;
    for (int k = 0; k < COUNT; k++) {
        max = fmaxf(max, x[k]);
    }
    float sum = online->sum * expf(online->max - max);
    for (int k = 0; k < COUNT; k++) {
        sum += expf(x[k] - max);
    }
    online->max = max, online->sum = sum;
}

// As load_floats, for the last time: the cache needn't keep them.
template <int SIZE> static __device__ __forceinline__ void load_last(float *out, const float *in) {
    for (int i = 0; i < SIZE / 4; i++) {
        float4 four = __ldcs((const float4 *)in + i);
        out[4 * i] = four.x, out[4 * i + 1] = four.y, out[4 * i + 2] = four.z, out[4 * i + 3] = four.w;
    }
}

// Elements [0, packs * Pack<T>::SIZE) of a row go by Packs, the others one by one: a thread has the
// same ones in both passes. KEEPS: dynamic shared memory has room for the row.
template <typename T, bool KEEPS>
static __global__ void __launch_bounds__(BLOCK)
    classify(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss, bool aligned) {
    const int SIZE = Pack<T>::SIZE;
    __shared__ float scratch[WARP];
    CUDA_DYNAMIC_SHARED(float, kept);
    int64_t row = blockIdx.x, V = logits.cols, packs = aligned ? V / SIZE : 0;
    const float *x = (const float *)logits.data + row * logits.stride;
    int32_t target = targets[row];
    float target_logit = x[target];

    Online online = {-FLT_MAX, 0};
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < packs; i += BLOCK) {
        float pack[SIZE];
        load_floats<SIZE>(pack, x + i * SIZE);
        add_logits<SIZE>(&online, pack);
        if (KEEPS) store_floats<SIZE>(kept + i * SIZE, pack);
    }
    for (int64_t v = packs * SIZE + threadIdx.x; v < V; v += BLOCK) {
        add_logits<1>(&online, x + v);
        if (KEEPS) kept[v] = x[v];
    }
    float max = block_reduce<MAX>(online.max, scratch);
    float sum = block_reduce<SUM>(online.sum * expf(online.max - max), scratch);
    if (threadIdx.x == 0) losses[row] = logf(sum) - (target_logit - max);
    if (!dlogits.data) return;

    float factor = dloss / sum;
    T *d = (T *)dlogits.data + row * dlogits.stride;
    int64_t own = (packs + BLOCK - 1 - threadIdx.x) / BLOCK; // Packs of this thread
#pragma unroll 2
    for (int64_t i = threadIdx.x + (own - 1) * BLOCK; i >= 0; i -= BLOCK) {
        float pack[SIZE];
        Pack<T> out;
        if (KEEPS) {
            load_floats<SIZE>(pack, kept + i * SIZE);
        } else {
            load_last<SIZE>(pack, x + i * SIZE);
        }
        for (int k = 0; k < SIZE; k++) {
            float softmax = expf(pack[k] - max) * factor;
            from_float(&out.x[k], i * SIZE + k == target ? softmax - dloss : softmax);
        }
        uint4 words;
        memcpy(&words, &out, sizeof(words));
        __stcs((uint4 *)d + i, words);
    }
    for (int64_t v = packs * SIZE + threadIdx.x; v < V; v += BLOCK) {
        float softmax = expf((KEEPS ? kept[v] : x[v]) - max) * factor;
        from_float(&d[v], v == target ? softmax - dloss : softmax);
    }
}

// Whether each row begins where a Pack may.
static bool rows_are_aligned(Tensor tensor) {
    return is_aligned(tensor.data) && tensor.stride * (int64_t)dtype_size(tensor.dtype) % 16 == 0;
}

// Returns whether a block can have so much dynamic shared memory beside what it has of static.
static bool fits_shared_memory(size_t bytes) {
    enum { STATIC_BYTES = 1024 };
    static int limit;
    int index = 0;
    if (limit == 0) {
        cuda_check(cudaGetDevice(&index), "asking for the GPU");
        cuda_check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
                   "asking for the GPU's shared memory");
    }
    return bytes + STATIC_BYTES <= (size_t)limit;
}

template <typename T>
static void launch_classify(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss,
                            bool aligned) {
    size_t row_bytes = (size_t)logits.cols * sizeof(float);
    if (!dlogits.data || !fits_shared_memory(row_bytes)) {
        CUDA_LAUNCH((classify<T, false>), (unsigned)logits.rows, BLOCK, 0, losses, dlogits, logits, targets, dloss,
                    aligned);
        return;
    }
    cuda_check(cudaFuncSetAttribute(classify<T, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)row_bytes),
               "giving a kernel shared memory");
    CUDA_LAUNCH((classify<T, true>), (unsigned)logits.rows, BLOCK, row_bytes, losses, dlogits, logits, targets, dloss,
                aligned);
}

void cuda_classifier(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss) {
    Format dtype = dlogits.data ? dlogits.dtype : FORMAT_FP32;
    bool aligned = rows_are_aligned(logits) && (!dlogits.data || rows_are_aligned(dlogits));
    FOR_DTYPE(dtype, launch_classify<T>(losses, dlogits, logits, targets, dloss, aligned));
}

static __global__ void __launch_bounds__(BLOCK)
    squared_error(float *losses, Tensor dout, Tensor out, Tensor target, float scale) {
    __shared__ float scratch[WARP];
    int64_t row = blockIdx.x;
    float sum = 0;
    for (int64_t c = threadIdx.x; c < out.cols; c += BLOCK) {
        float difference = element_of(out, row, c) - element_of(target, row, c);
        sum = fmaf(difference, difference, sum);
        if (dout.data) set_element(dout, row, c, 2 * scale * difference);
    }
    sum = block_reduce<SUM>(sum, scratch);
    if (threadIdx.x == 0) losses[row] = sum;
}

void cuda_squared_error(float *losses, Tensor dout, Tensor out, Tensor target, float scale) {
    CUDA_LAUNCH(squared_error, (unsigned)out.rows, BLOCK, 0, losses, dout, out, target, scale);
}

// What is subtracted from a row's logits to make them logarithms of its softmax, to all threads.
static __device__ float log_of_sum(Tensor logits, int64_t row, float *scratch) {
    Online online = {-FLT_MAX, 0};
    for (int64_t c = threadIdx.x; c < logits.cols; c += BLOCK) {
        float x = element_of(logits, row, c);
        add_logits<1>(&online, &x);
    }
    float max = block_reduce<MAX>(online.max, scratch);
    return max + logf(block_reduce<SUM>(online.sum * expf(online.max - max), scratch));
}

static __global__ void __launch_bounds__(BLOCK)
    kl_divergence(float *losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) {
    __shared__ float scratch[WARP];
    int64_t row = blockIdx.x;
    float log_sum = log_of_sum(logits, row, scratch), target_log_sum = log_of_sum(targets, row, scratch), sum = 0;
    for (int64_t c = threadIdx.x; c < logits.cols; c += BLOCK) {
        float log_q = element_of(logits, row, c) - log_sum, log_p = element_of(targets, row, c) - target_log_sum;
        float p = expf(log_p);
        sum = fmaf(p, log_p - log_q, sum);
        if (dlogits.data) set_element(dlogits, row, c, scale * (expf(log_q) - p));
    }
    sum = block_reduce<SUM>(sum, scratch);
    if (threadIdx.x == 0) losses[row] = sum;
}

void cuda_kl_divergence(float *losses, Tensor dlogits, Tensor logits, Tensor targets, float scale) {
    CUDA_LAUNCH(kl_divergence, (unsigned)logits.rows, BLOCK, 0, losses, dlogits, logits, targets, scale);
}
