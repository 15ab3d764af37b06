/*
The shim that runs kernels on the CPU (dev/hostcuda): what is right comes out right in any order of
threads, and what is wrong (a missing or divergent barrier, a write outside of memory, a read of
what nobody wrote, a launch that hardware would refuse) shows.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
extern "C" {
#include <cmocka.h>
}
#include <cuda_bf16.h>
#include <cuda_fp8.h>

static const uint64_t NUM_SEEDS = 8;

static void check(cudaError_t error) {
    if (error != cudaSuccess) fail_msg("%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
}

template <typename T> static T *device_new(size_t count) {
    void *memory;
    check(cudaMalloc(&memory, count * sizeof(T)));
    return (T *)memory;
}

template <typename T> static T *device_copy(const T *values, size_t count) {
    T *memory = device_new<T>(count);
    check(cudaMemcpy(memory, values, count * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

template <typename T> static void host_copy(T *values, const T *memory, size_t count) {
    check(cudaMemcpy(values, memory, count * sizeof(T), cudaMemcpyDeviceToHost));
}

// What a child process that calls `body` leaves: its exit status, and in `text` what it wrote to
// stderr.
static int run_child(void (*body)(), char *text, size_t bytes) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    close(ends[1]);
    size_t length = 0;
    for (ssize_t got; length < bytes - 1 && (got = read(ends[0], text + length, bytes - 1 - length)) > 0;) {
        length += (size_t)got;
    }
    text[length] = '\0';
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void check_reported(void (*body)(), const char *const *expected) {
    static char text[1 << 16];
    int status = run_child(body, text, sizeof(text));
    assert_int_equal(status, HOSTCUDA_EXIT);
    for (; *expected; expected++) {
        if (!strstr(text, *expected)) fail_msg("'%s' isn't in: %s", *expected, text);
    }
    assert_true(strchr(text, '\n') == text + strlen(text) - 1);
}

// -------------------------------------------------------------------------------------------------

// The sum of each block's inputs. With SYNCHRONIZED false a barrier is missing.
template <bool SYNCHRONIZED> __global__ void block_sum(float *out, const float *in) {
    __shared__ float sums[32];
    int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    float sum = in[blockIdx.x * blockDim.x + threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
    }
    if (lane == 0) sums[warp] = sum;
    if (SYNCHRONIZED) __syncthreads();
    if (thread == 0) {
        float total = 0;
        for (int i = 0; i < (int)blockDim.x / 32; i++) {
            total += sums[i];
        }
        out[blockIdx.x] = total;
    }
}

enum { SUM_BLOCKS = 50, SUM_THREADS = 256 };

// The number of blocks whose sum is wrong.
template <bool SYNCHRONIZED> static int wrong_sums() {
    static float in[SUM_BLOCKS * SUM_THREADS], out[SUM_BLOCKS];
    for (int i = 0; i < SUM_BLOCKS * SUM_THREADS; i++) {
        in[i] = (float)(i % 1000);
    }
    float *device_in = device_copy(in, SUM_BLOCKS * SUM_THREADS), *device_out = device_new<float>(SUM_BLOCKS);
    check(hostcuda_launch((block_sum<SYNCHRONIZED>), SUM_BLOCKS, SUM_THREADS, 0, device_out, device_in));
    host_copy(out, device_out, SUM_BLOCKS);
    check(cudaFree(device_in));
    check(cudaFree(device_out));
    int wrong = 0;
    for (int b = 0; b < SUM_BLOCKS; b++) {
        double expected = 0;
        for (int i = 0; i < SUM_THREADS; i++) {
            expected += in[b * SUM_THREADS + i];
        }
        wrong += out[b] != (float)expected;
    }
    return wrong;
}

static void test_sums_in_any_order(void **) {
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        hostcuda_set_seed(seed);
        assert_int_equal(wrong_sums<true>(), 0);
    }
}

static void test_missing_barrier_shows(void **) {
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        hostcuda_set_seed(seed);
        assert_true(wrong_sums<false>() > 0);
    }
}

// Each thread takes its left neighbour's number. In order the neighbour has always written it
// already.
template <bool SYNCHRONIZED> __global__ void shift(int *out) {
    __shared__ int numbers[64];
    int i = (int)threadIdx.x;
    numbers[i] = i;
    if (SYNCHRONIZED) __syncthreads();
    out[i] = i > 0 ? numbers[i - 1] : 0;
}

template <bool SYNCHRONIZED> static bool shifts_right(uint64_t seed) {
    int out[64], *device_out = device_new<int>(64);
    hostcuda_set_seed(seed);
    check(hostcuda_launch((shift<SYNCHRONIZED>), 1, 64, 0, device_out));
    host_copy(out, device_out, 64);
    check(cudaFree(device_out));
    bool right = true;
    for (int i = 1; i < 64; i++) {
        right = right && out[i] == i - 1;
    }
    return right;
}

// Half of the launches, of a block each, have a seed that is in order.
static void test_mixed_seeds(void **) {
    int right = 0, launches = 64;
    for (int i = 0; i < launches; i++) {
        right += shifts_right<false>(HOSTCUDA_MIXED);
        assert_true(shifts_right<true>(HOSTCUDA_MIXED));
    }
    assert_in_range(right, launches / 4, 3 * launches / 4);
}

static void test_seed_changes_order(void **) {
    assert_true(shifts_right<false>(0));
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        assert_true(shifts_right<true>(seed));
        if (seed > 0) assert_false(shifts_right<false>(seed));
    }
}

// Two sums over the block, the second in the memory of the first. Without SYNCHRONIZED nothing
// keeps a warp from writing its part of the second while another still reads the first.
template <bool SYNCHRONIZED> __global__ void two_sums(float *out) {
    __shared__ float sums[8];
    int thread = (int)threadIdx.x;
    for (int round = 0; round < 2; round++) {
        float sum = (float)(thread + round);
        for (int offset = 16; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset);
        }
        if (SYNCHRONIZED) __syncthreads();
        if (thread % 32 == 0) sums[thread / 32] = sum;
        __syncthreads();
        float total = 0;
        for (float of_warp : sums) {
            total += of_warp;
        }
        out[round * (int)blockDim.x + thread] = total;
    }
}

template <bool SYNCHRONIZED> static bool sums_twice(uint64_t seed) {
    enum { THREADS = 256, SUM = THREADS * (THREADS - 1) / 2 };
    float out[2 * THREADS], *device_out = device_new<float>(2 * THREADS);
    hostcuda_set_seed(seed);
    check(hostcuda_launch((two_sums<SYNCHRONIZED>), 1, THREADS, 0, device_out));
    host_copy(out, device_out, 2 * THREADS);
    check(cudaFree(device_out));
    bool right = true;
    for (int i = 0; i < 2 * THREADS; i++) {
        right = right && out[i] == (float)(i < THREADS ? SUM : SUM + THREADS);
    }
    return right;
}

static void test_some_seeds_let_warps_run_ahead(void **) {
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        assert_true(sums_twice<true>(seed));
        assert_int_equal(sums_twice<false>(seed), !(seed & 2));
    }
}

// -------------------------------------------------------------------------------------------------

// One row of results for each warp operation.
enum { OP_SHFL, OP_SEGMENT, OP_UP, OP_DOWN, OP_XOR, OP_BALLOT, OP_ANY, OP_ALL, OP_HALF, OP_BARRIER, NUM_OPS };
__global__ void warp_operations(long long *out) {
    const unsigned all = 0xFFFFFFFF;
    int i = (int)threadIdx.x, lane = i % warpSize;
    unsigned half = lane < 16 ? 0xFFFF : 0xFFFF0000;
    long long results[NUM_OPS];
    results[OP_SHFL] = __shfl_sync(all, i, 5);
    results[OP_SEGMENT] = (long long)__shfl_sync(all, (double)i, 9, 8);
    results[OP_UP] = __shfl_up_sync(all, (long long)i << 40, 3) >> 40;
    results[OP_DOWN] = (long long)__shfl_down_sync(all, (float)i, 3, 16);
    results[OP_XOR] = __shfl_xor_sync(all, (unsigned)i, 7u);
    results[OP_BALLOT] = __ballot_sync(all, lane % 3 == 0);
    results[OP_ANY] = __any_sync(all, i == 40);
    results[OP_ALL] = __all_sync(all, i < 40);
    // Halves of a warp for themselves, a different number of times.
    int sum = i;
    for (int times = 0; times < (lane < 16 ? 1 : 3); times++) {
        sum += __shfl_xor_sync(half, sum, 1);
    }
    __syncwarp();
    results[OP_HALF] = sum;
    results[OP_BARRIER] =
        __syncthreads_count(i % 5 == 0) * 100 + __syncthreads_or(i == 3) * 10 + __syncthreads_and(i != 3);
    for (int op = 0; op < NUM_OPS; op++) {
        out[op * (int)blockDim.x + i] = results[op];
    }
}

static void test_warp_operations(void **) {
    enum { THREADS = 64 };
    static long long out[NUM_OPS][THREADS];
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        hostcuda_set_seed(seed);
        long long *device_out = device_new<long long>(NUM_OPS * THREADS);
        check(hostcuda_launch(warp_operations, 1, THREADS, 0, device_out));
        host_copy(out[0], device_out, NUM_OPS * THREADS);
        check(cudaFree(device_out));
        for (int i = 0; i < THREADS; i++) {
            int lane = i % 32, warp = i - lane, pair = i + (i ^ 1);
            assert_int_equal(out[OP_SHFL][i], warp + 5);
            assert_int_equal(out[OP_SEGMENT][i], i / 8 * 8 + 1);
            assert_int_equal(out[OP_UP][i], lane < 3 ? i : i - 3);
            assert_int_equal(out[OP_DOWN][i], lane % 16 > 12 ? i : i + 3);
            assert_int_equal(out[OP_XOR][i], i ^ 7);
            assert_int_equal(out[OP_BALLOT][i], 0x49249249);
            assert_int_equal(out[OP_ANY][i], warp == 32);
            assert_int_equal(out[OP_ALL][i], warp == 0);
            assert_int_equal(out[OP_HALF][i], lane < 16 ? pair : 4 * pair);
            assert_int_equal(out[OP_BARRIER][i], 13 * 100 + 10 + 0);
        }
    }
}

// Threads from `count` on exit before the barriers.
__global__ void early_exit(int *out, int count) {
    __shared__ int numbers[100];
    int i = (int)threadIdx.x;
    if (i >= count) return;
    numbers[i] = i;
    __syncthreads();
    int next = numbers[(i + 1) % count];
    __syncthreads();
    numbers[i] = next;
    __syncthreads();
    out[i] = __syncthreads_count(1) * 1000 + numbers[(i + 1) % count] + __shfl_xor_sync(0xFFFFFFFF, 0, 0);
}

static void test_exited_threads(void **) {
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        hostcuda_set_seed(seed);
        for (int count = 1; count <= 100; count += 11) {
            int out[100], *device_out = device_new<int>(100);
            check(hostcuda_launch(early_exit, 1, 100, 0, device_out, count));
            host_copy(out, device_out, 100);
            check(cudaFree(device_out));
            for (int i = 0; i < count; i++) {
                assert_int_equal(out[i], count * 1000 + (i + 2) % count);
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------

__global__ void coordinates(int *out) {
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x), y = (int)(blockIdx.y * blockDim.y + threadIdx.y),
        z = (int)(blockIdx.z * blockDim.z + threadIdx.z);
    int width = (int)(gridDim.x * blockDim.x), height = (int)(gridDim.y * blockDim.y);
    out[(z * height + y) * width + x] = x + 1000 * y + 1000000 * z;
}

static void test_grid_of_many_blocks(void **) {
    const dim3 grid(37, 11, 5), block(8, 4, 3);
    int width = 37 * 8, height = 11 * 4, count = width * height * 15;
    int *out = (int *)malloc((size_t)count * sizeof(int));
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        hostcuda_set_seed(seed);
        int *device_out = device_new<int>((size_t)count);
        check(hostcuda_launch(coordinates, grid, block, 0, device_out));
        host_copy(out, device_out, (size_t)count);
        check(cudaFree(device_out));
        for (int i = 0; i < count; i++) {
            assert_int_equal(out[i], i % width + 1000 * (i / width % height) + 1000000 * (i / width / height));
        }
    }
    free(out);
}

// Reverses each block's elements in dynamic shared memory.
template <typename T> __global__ void reverse(T *data) {
    T *shared = (T *)hostcuda_dynamic_shared();
    int i = (int)threadIdx.x, n = (int)blockDim.x;
    shared[i] = data[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    data[blockIdx.x * blockDim.x + threadIdx.x] = shared[n - 1 - i];
}

static void test_dynamic_shared_memory(void **) {
    enum { BLOCKS = 20, THREADS = 96 };
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        hostcuda_set_seed(seed);
        double values[BLOCKS * THREADS];
        for (int i = 0; i < BLOCKS * THREADS; i++) {
            values[i] = i;
        }
        double *data = device_copy(values, BLOCKS * THREADS);
        check(hostcuda_launch((reverse<double>), BLOCKS, THREADS, THREADS * sizeof(double), data));
        host_copy(values, data, BLOCKS * THREADS);
        check(cudaFree(data));
        for (int i = 0; i < BLOCKS * THREADS; i++) {
            assert_true(values[i] == i / THREADS * THREADS + THREADS - 1 - i % THREADS);
        }
    }
}

// -------------------------------------------------------------------------------------------------

// Only threads below `writers` write what all of them read.
template <typename T> __global__ void read_shared(float *out, int writers) {
    __shared__ T values[64];
    T *dynamic = (T *)hostcuda_dynamic_shared();
    int i = (int)threadIdx.x;
    if (i < writers) {
        values[i] = (T)1.0f;
        dynamic[i] = (T)1.0f;
    }
    __syncthreads();
    out[i] = (float)values[i];
    out[64 + i] = (float)dynamic[i];
}

template <typename T> static void check_unwritten_shared() {
    // The first launch writes all of it, so that nothing is left for the second.
    for (int writers = 64; writers >= 0; writers -= 16) {
        float out[128], *device_out = device_new<float>(128);
        check(hostcuda_launch((read_shared<T>), 30, 64, 64 * sizeof(T), device_out, writers));
        host_copy(out, device_out, 128);
        check(cudaFree(device_out));
        for (int i = 0; i < 128; i++) {
            assert_true(i % 64 < writers ? out[i] == 1 : isnan(out[i]));
        }
    }
}

static void test_unwritten_memory_is_nan(void **) {
    check_unwritten_shared<float>();
    check_unwritten_shared<__nv_bfloat16>();
    check_unwritten_shared<__nv_fp8_e4m3>();
    float out[1000], *memory = device_new<float>(1000);
    host_copy(out, memory, 1000);
    check(cudaFree(memory));
    for (int i = 0; i < 1000; i++) {
        assert_true(isnan(out[i]));
    }
}

// -------------------------------------------------------------------------------------------------

__global__ void divergent_barrier(int *out) {
    if (threadIdx.x < 20 && blockIdx.x == 2) {
        out[0] = __shfl_sync(0xFFFFFFFF, 1, 0);
    } else {
        __syncthreads();
    }
}

__global__ void different_barriers(int *out) {
    if (threadIdx.x == 7) {
        __syncthreads();
        out[0] = 1;
    } else {
        __syncthreads();
        out[1] = 1;
    }
}

__global__ void different_warp_operations(int *out) {
    if (threadIdx.x < 16) {
        out[0] = __shfl_sync(0xFFFFFFFF, 1, 0);
    } else {
        out[1] = __any_sync(0xFFFFFFFF, 1);
    }
}

// Lane 3 leaves a loop of shuffles too early, and waits at a barrier.
__global__ void loop_cut_short(int *out) {
    for (int times = 0; times < (threadIdx.x == 3 ? 1 : 2); times++) {
        out[threadIdx.x] = __shfl_down_sync(0xFFFFFFFF, 1, 1);
    }
    __syncthreads();
}

__global__ void not_in_mask(int *out) { out[threadIdx.x] = __shfl_sync(0xFFFF, 1, 0); }

static void run_divergent_barrier() { hostcuda_launch(divergent_barrier, 4, 64, 0, device_new<int>(64)); }
static void run_different_barriers() { hostcuda_launch(different_barriers, 1, 32, 0, device_new<int>(64)); }
static void run_different_warp_operations() {
    hostcuda_launch(different_warp_operations, 1, 32, 0, device_new<int>(64));
}
static void run_loop_cut_short() { hostcuda_launch(loop_cut_short, 1, 64, 0, device_new<int>(64)); }
static void run_not_in_mask() { hostcuda_launch(not_in_mask, 1, 32, 0, device_new<int>(64)); }

static void test_divergent_barriers_are_reported(void **) {
    for (uint64_t seed = 0; seed < NUM_SEEDS; seed++) {
        hostcuda_set_seed(seed);
        const char *divergent[] = {"kernel divergent_barrier, block (2, 0, 0)", "threads 0 to 19 wait at __shfl_sync",
                                   "threads 20 to 63 wait at __syncthreads (test_hostcuda.cu:", NULL};
        check_reported(run_divergent_barrier, divergent);
        const char *different[] = {"kernel different_barriers", "threads 7 to 7 wait at __syncthreads",
                                   "threads 0 to 6 wait", "threads 8 to 31 wait", NULL};
        check_reported(run_different_barriers, different);
        const char *operations[] = {"kernel different_warp_operations", "threads 0 to 15 wait at __shfl_sync",
                                    "threads 16 to 31 wait at __any_sync", NULL};
        check_reported(run_different_warp_operations, operations);
        const char *cut[] = {"kernel loop_cut_short", "threads 0 to 2 wait at __shfl_down_sync",
                             "threads 3 to 3 wait at __syncthreads", NULL};
        check_reported(run_loop_cut_short, cut);
    }
    const char *mask[] = {"kernel not_in_mask", "thread 16", "0xFFFF", NULL};
    hostcuda_set_seed(0);
    check_reported(run_not_in_mask, mask);
}

// -------------------------------------------------------------------------------------------------

__global__ void write_at(int8_t *out, int at) { out[at] = 1; }
__global__ void write_shared_at(int at) { ((int8_t *)hostcuda_dynamic_shared())[at] = 1; }

static int write_offset;
static void run_write() { hostcuda_launch(write_at, 1, 1, 0, device_new<int8_t>(1001), write_offset); }
static void run_write_shared() { hostcuda_launch(write_shared_at, 1, 1, 1001, write_offset); }

static void test_writes_outside_are_reported(void **) {
    static char text[1 << 16];
    const int outside[] = {-256, -1, 1001, 1250}, inside[] = {0, 1000};
    for (int offset : outside) {
        write_offset = offset;
        assert_int_not_equal(run_child(run_write, text, sizeof(text)), 0);
        assert_non_null(strstr(text, "write_at"));
        assert_int_not_equal(run_child(run_write_shared, text, sizeof(text)), 0);
        assert_non_null(strstr(text, "write_shared_at"));
#ifndef __SANITIZE_ADDRESS__
        const char *place = offset < 0 ? "before the start" : "after the end";
        const char *expected[] = {"kernel write_at", "1001 bytes of device memory", place, NULL};
        check_reported(run_write, expected);
        const char *expected_shared[] = {"kernel write_shared_at", "1001 bytes of dynamic shared memory", place, NULL};
        check_reported(run_write_shared, expected_shared);
#endif
    }
    for (int offset : inside) {
        write_offset = offset;
        assert_int_equal(run_child(run_write, text, sizeof(text)), 0);
        assert_int_equal(run_child(run_write_shared, text, sizeof(text)), 0);
    }
}

// -------------------------------------------------------------------------------------------------

__global__ void nothing() {}

static void check_launch(dim3 grid, dim3 block, size_t shared_bytes, cudaError_t expected) {
    assert_int_equal(hostcuda_launch(nothing, grid, block, shared_bytes), expected);
    assert_int_equal(cudaPeekAtLastError(), expected);
    assert_int_equal(cudaGetLastError(), expected);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
}

static void test_launches_that_hardware_refuses(void **) {
    const cudaError_t refused = cudaErrorInvalidConfiguration;
    check_launch(1, 1024, 48 << 10, cudaSuccess);
    check_launch(dim3(1, 65535, 1), dim3(1, 1, 64), 0, cudaSuccess);
    check_launch(1, 1025, 0, refused);
    check_launch(1, dim3(32, 33), 0, refused);
    check_launch(1, dim3(1, 1, 65), 0, refused);
    check_launch(1, 0, 0, refused);
    check_launch(0, 1, 0, refused);
    check_launch(dim3(1, 0, 1), 1, 0, refused);
    check_launch(dim3(1, 65536, 1), 1, 0, refused);
    check_launch(dim3(1, 1, 65536), 1, 0, refused);
    check_launch(0x80000000, 1, 0, refused);
    check_launch(1, 1, (48 << 10) + 1, refused);
    check(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10));
    check_launch(1, 1, 227 << 10, cudaSuccess);
    check_launch(1, 1, (227 << 10) + 1, refused);
    assert_int_equal(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1),
                     cudaErrorInvalidValue);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidValue);
}

static void test_runtime(void **) {
    cudaDeviceProp properties;
    int value, blocks;
    size_t before, after, total;
    hostcuda_set_capability(10, 3);
    check(cudaGetDeviceProperties(&properties, 0));
    check(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
    assert_int_equal(properties.major * 10 + properties.minor, 103);
    assert_int_equal(value, 10);
    assert_int_equal(properties.multiProcessorCount, 132);
    hostcuda_set_capability(9, 0);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, coordinates, 256, 0));
    assert_int_equal(blocks, 8);

    check(cudaMemGetInfo(&before, &total));
    int8_t *memory = device_new<int8_t>(1000), host[1000];
    check(cudaMemGetInfo(&after, &total));
    assert_int_equal(before - after, 1000);
    check(cudaMemset(memory, 3, 1000));
    host_copy(host, memory, 1000);
    assert_int_equal(host[999], 3);
    // Copies of which an end isn't where it is said to be.
    assert_int_equal(cudaMemcpy(memory + 1, host, 1000, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(host, host, 10, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(memory, memory + 500, 10, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    assert_int_equal(cudaMemset(memory, 0, 1001), cudaErrorInvalidValue);
    assert_int_equal(cudaFree(host), cudaErrorInvalidValue);
    check(cudaFree(memory));
    assert_int_equal(cudaFree(memory), cudaErrorInvalidValue);
    void *too_much;
    assert_int_equal(cudaMalloc(&too_much, total + 1), cudaErrorMemoryAllocation);
    assert_string_equal(cudaGetErrorName(cudaGetLastError()), "cudaErrorMemoryAllocation");

    cudaStream_t stream;
    cudaEvent_t start, end;
    float milliseconds;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&end));
    check(cudaEventRecord(start, stream));
    assert_int_equal(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorInvalidResourceHandle);
    usleep(2000);
    check(cudaEventRecord(end, stream));
    check(cudaStreamWaitEvent(stream, end));
    check(cudaStreamSynchronize(stream));
    check(cudaStreamQuery(stream));
    check(cudaEventQuery(end));
    check(cudaEventElapsedTime(&milliseconds, start, end));
    assert_true(milliseconds >= 2 && milliseconds < 10000);
    check(cudaEventDestroy(start));
    check(cudaEventDestroy(end));
    check(cudaStreamDestroy(stream));
}

__global__ void intrinsics(float *out) {
    int i = 0;
    out[i++] = (float)__float2int_rn(2.5f);
    out[i++] = (float)(__float2int_rn(1e20f) == INT_MAX);
    out[i++] = (float)__float2int_rn(NAN);
    out[i++] = (float)__popc(0xF0F0u);
    out[i++] = (float)__ffs(8);
    out[i++] = (float)__clz(1) + (float)__clz(0);
    out[i++] = __uint_as_float(__float_as_uint(-3.5f));
    out[i++] = rsqrtf(4);
    out[i++] = max(3, 4u) + min(1.5f, NAN) + max((int64_t)5, 6);
    float4 four = make_float4(1, 2, 3, 4);
    __stcs((float4 *)out + 3, __ldg(&four));
}

static void test_intrinsics(void **) {
    const float expected[] = {2, 1, 0, 8, 4, 63, -3.5f, 0.5f, 11.5f};
    float out[16], *device_out = device_new<float>(16);
    check(hostcuda_launch(intrinsics, 1, 1, 0, device_out));
    host_copy(out, device_out, 16);
    check(cudaFree(device_out));
    for (int i = 0; i < 9; i++) {
        assert_true(out[i] == expected[i]);
    }
    assert_true(out[12] == 1 && out[15] == 4);
}

int main() {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_in_any_order),
        cmocka_unit_test(test_missing_barrier_shows),
        cmocka_unit_test(test_seed_changes_order),
        cmocka_unit_test(test_mixed_seeds),
        cmocka_unit_test(test_some_seeds_let_warps_run_ahead),
        cmocka_unit_test(test_warp_operations),
        cmocka_unit_test(test_exited_threads),
        cmocka_unit_test(test_grid_of_many_blocks),
        cmocka_unit_test(test_dynamic_shared_memory),
        cmocka_unit_test(test_unwritten_memory_is_nan),
        cmocka_unit_test(test_divergent_barriers_are_reported),
        cmocka_unit_test(test_writes_outside_are_reported),
        cmocka_unit_test(test_launches_that_hardware_refuses),
        cmocka_unit_test(test_runtime),
        cmocka_unit_test(test_intrinsics),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
