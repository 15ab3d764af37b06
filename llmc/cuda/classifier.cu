/*
Losses, a block for a row or for rows a grid apart. Softmax cross-entropy: the row's maximum and the
sum of exponentials in one pass (online softmax, Milakov & Gimelshein 2018), gradients in a second.
In between the row waits in shared memory where it fits, so that it is read from memory once: 50257
logits are 201 KB of an H100's 227. A multiprocessor then has room for one block, which would load
nothing as it writes gradients; so a block takes several rows in turn, and as the second pass is
done with a part of a row it starts the copy of the same part of the next one. A row that doesn't
fit is read again, backwards: the rows under way are together larger than the cache, which so still
has what the first pass read last. Rows need only begin at 16 bytes to be read so: what a row has
over whole Packs is read element by element.

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

// A row's softmax is exp(x - max) / sum, of which a gradient is `factor` = dloss / sum times the
// exponential, less dloss at the target.
typedef struct {
    float max, factor, dloss;
    int target;
} Softmax;

static __device__ __forceinline__ float gradient_of(Softmax row, float x, bool is_target) {
    float softmax = expf(x - row.max) * row.factor;
    return is_target ? softmax - row.dloss : softmax;
}

// Writes the gradients of a Pack, whose first logit is the row's `first`, to the row of gradients
// d. The cache needn't keep them.
template <typename T>
static __device__ __forceinline__ void store_gradients(T *d, Softmax row, const float *x, int first) {
    Pack<T> out;
    for (int k = 0; k < Pack<T>::SIZE; k++) {
        from_float(&out.x[k], gradient_of(row, x[k], row.target - first == k));
    }
    uint4 words;
    memcpy(&words, &out, sizeof(words));
    __stcs((uint4 *)(d + first), words);
}

// Reads a row's logits from memory in both passes, or once where no gradients are wanted. Whole
// Packs go by Packs, the rest one by one: a thread has the same elements in both passes and, added
// in the same order, in classify_kept.
template <typename T>
static __global__ void __launch_bounds__(BLOCK)
    classify(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss, bool aligned) {
    const int SIZE = Pack<T>::SIZE;
    __shared__ float scratch[WARP];
    int64_t row = blockIdx.x;
    int V = (int)logits.cols, packs = aligned ? V / SIZE : 0;
    const float *x = (const float *)logits.data + row * logits.stride;
    int target = targets[row];
    float target_logit = x[target];

    Online online = {-FLT_MAX, 0};
#pragma unroll 2
    for (int i = threadIdx.x; i < packs; i += BLOCK) {
        float pack[SIZE];
        load_floats<SIZE>(pack, x + i * SIZE);
        add_logits<SIZE>(&online, pack);
    }
    for (int v = packs * SIZE + threadIdx.x; v < V; v += BLOCK) {
        add_logits<1>(&online, x + v);
    }
    float max = block_reduce<MAX>(online.max, scratch);
    float sum = block_reduce<SUM>(online.sum * expf(online.max - max), scratch);
    if (threadIdx.x == 0) losses[row] = logf(sum) - (target_logit - max);
    if (!dlogits.data) return;

    Softmax softmax = {max, dloss / sum, dloss, target};
    T *d = (T *)dlogits.data + row * dlogits.stride;
    int own = (packs + BLOCK - 1 - (int)threadIdx.x) / BLOCK; // Packs of this thread
#pragma unroll 2
    for (int i = (int)threadIdx.x + (own - 1) * BLOCK; i >= 0; i -= BLOCK) {
        float pack[SIZE];
        load_last<SIZE>(pack, x + i * SIZE);
        store_gradients(d, softmax, pack, i * SIZE);
    }
    for (int v = packs * SIZE + threadIdx.x; v < V; v += BLOCK) {
        from_float(&d[v], gradient_of(softmax, x[v], v == target));
    }
}

// Starts a copy of COUNT floats, 1 or 4, to shared memory, where this thread sees them after
// wait_for_copies.
template <int COUNT> static __device__ __forceinline__ void start_copy(float *to, const float *from) {
#ifdef __CUDA_ARCH__
    if constexpr (COUNT == 1) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                     "l"(__cvta_generic_to_global(from))
                     : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                     "l"(__cvta_generic_to_global(from))
                     : "memory");
    }
#else
    float x[COUNT];
    load_floats<COUNT>(x, from);
    store_floats<COUNT>(to, x);
#endif
}

static __device__ __forceinline__ void wait_for_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Starts copies of a warp's Packs, one for each lane, up to the row's element `end`. Lanes copy 16
// bytes side by side from `at` on, whosever Pack they are of: a lane's own Pack of 32 bytes in two
// parts would take each sector of memory twice.
template <int SIZE> static __device__ __forceinline__ void start_copies(float *to, const float *from, int at, int end) {
    for (int k = 0; k < SIZE * WARP; k += 4 * WARP) {
        if (at + k < end) start_copy<4>(to + at + k, from + at + k);
    }
}

// Keeps a row in dynamic shared memory, which has room for one. A block takes rows a grid apart; in
// the second pass of one it starts copies of the next. A lane's Packs were copied by its own warp,
// and its single elements by itself, so that no warp waits for another before it fills their place
// again.
template <typename T>
static __global__ void __launch_bounds__(BLOCK)
    classify_kept(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss, bool aligned) {
    const int SIZE = Pack<T>::SIZE;
    __shared__ float scratch[WARP];
    CUDA_DYNAMIC_SHARED(float, kept);
    int V = (int)logits.cols, end = aligned ? V / SIZE * SIZE : 0; // of whole Packs
    // Where, of BLOCK Packs, this thread's lies, and where the 16 bytes that it copies first.
    int own = (int)threadIdx.x * SIZE, copied = own + (4 - SIZE) * ((int)threadIdx.x % WARP);
    const float *x = (const float *)logits.data + blockIdx.x * logits.stride;
    for (int at = 0; at < end; at += BLOCK * SIZE) {
        start_copies<SIZE>(kept, x, at + copied, end);
    }
    for (int v = end + threadIdx.x; v < V; v += BLOCK) {
        start_copy<1>(kept + v, x + v);
    }

    for (int64_t row = blockIdx.x; row < logits.rows; row += gridDim.x) {
        int target = targets[row];
        wait_for_copies();
        __syncwarp(); // the other lanes have waited for theirs
        Online online = {-FLT_MAX, 0};
#pragma unroll 2
        for (int v = own; v < end; v += BLOCK * SIZE) {
            float pack[SIZE];
            load_floats<SIZE>(pack, kept + v);
            add_logits<SIZE>(&online, pack);
        }
        for (int v = end + threadIdx.x; v < V; v += BLOCK) {
            add_logits<1>(&online, kept + v);
        }
        // The target's logit may be another warp's. Between the two reductions, by their barriers,
        // every warp has waited for its copies and none has started one of the next row.
        float max = block_reduce<MAX>(online.max, scratch);
        float target_logit = kept[target];
        float sum = block_reduce<SUM>(online.sum * expf(online.max - max), scratch);
        if (threadIdx.x == 0) losses[row] = logf(sum) - (target_logit - max);

        Softmax softmax = {max, dloss / sum, dloss, target};
        T *d = (T *)dlogits.data + row * dlogits.stride;
        bool is_last = row + gridDim.x >= logits.rows;
        x += gridDim.x * logits.stride;
        for (int at = 0; at < end; at += BLOCK * SIZE) {
            int v = at + own;
            float pack[SIZE];
            if (v < end) load_floats<SIZE>(pack, kept + v);
            __syncwarp(); // all lanes have read theirs
            start_copies<SIZE>(kept, x, at + copied, is_last ? 0 : end);
            if (v < end) store_gradients(d, softmax, pack, v);
        }
        for (int v = end + threadIdx.x; v < V; v += BLOCK) {
            from_float(&d[v], gradient_of(softmax, kept[v], v == target));
            if (!is_last) start_copy<1>(kept + v, x + v);
        }
    }
}

// Whether each row begins where a Pack may.
static bool rows_are_aligned(Tensor tensor) {
    return is_aligned(tensor.data) && tensor.stride * (int64_t)dtype_size(tensor.dtype) % 16 == 0;
}

// Returns an attribute of the GPU that is in use.
static int attribute_of_gpu(cudaDeviceAttr which) {
    int index = 0, value = 0;
    cuda_check(cudaGetDevice(&index), "asking for the GPU");
    cuda_check(cudaDeviceGetAttribute(&value, which, index), "asking for an attribute of the GPU");
    return value;
}

// Returns whether a block can have so much dynamic shared memory beside what it has of static.
static bool fits_shared_memory(size_t bytes) {
    enum { STATIC_BYTES = 1024 };
    static int limit;
    if (limit == 0) limit = attribute_of_gpu(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return bytes + STATIC_BYTES <= (size_t)limit;
}

template <typename T>
static void launch_classify(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss,
                            bool aligned) {
    static int multiprocessors;
    size_t row_bytes = (size_t)logits.cols * sizeof(float);
    if (!dlogits.data || !fits_shared_memory(row_bytes)) {
        CUDA_LAUNCH(classify<T>, (unsigned)logits.rows, BLOCK, 0, losses, dlogits, logits, targets, dloss, aligned);
        return;
    }
    if (multiprocessors == 0) multiprocessors = attribute_of_gpu(cudaDevAttrMultiProcessorCount);
    unsigned blocks = (unsigned)(logits.rows < multiprocessors ? logits.rows : multiprocessors);
    cuda_check(cudaFuncSetAttribute(classify_kept<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)row_bytes),
               "giving a kernel shared memory");
    CUDA_LAUNCH(classify_kept<T>, blocks, BLOCK, row_bytes, losses, dlogits, logits, targets, dloss, aligned);
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
