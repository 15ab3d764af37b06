/*
The CUDA table of operations, and its memory.
*/
#include "attention.h" // cuda_attention_describe
#include "cuda.h"
#include "device.h"
#include "gemm.h"
#include "gemm_cublaslt.h" // cuda_gemm_cublaslt_version
#include "wait.h"

#include <stdio.h>
#include <string.h>

static CudaDevice device;

// Batches go through two pinned buffers in turn, on a stream of their own.
static struct {
    cudaStream_t stream;
    char *staging[2];
    size_t bytes;          // of each
    cudaEvent_t copied[2]; // out of staging
    cudaEvent_t called;    // the operations called before the last copy_batch have ended
    int turn;
} batches;

static void describe(char *text, size_t bytes) {
    char gemms[704], attention[384];
    cuda_gemm_describe(cuda_gemm_device(), gemms, sizeof(gemms));
    cuda_device_describe(&device, gemms, text, bytes);
    cuda_attention_describe(attention, sizeof(attention));
    size_t used = strlen(text);
    if (attention[0] && used < bytes) snprintf(text + used, bytes - used, "; %s", attention);
}

static double available_memory(void) {
    size_t available, total;
    cuda_check(cudaMemGetInfo(&available, &total), "asking for the GPU's free memory");
    return (double)available - CUDA_LIBRARIES_BYTES;
}

static double total_memory(void) {
    size_t available, total;
    cuda_check(cudaMemGetInfo(&available, &total), "asking for the GPU's memory");
    return (double)total;
}

static void *allocate_zeroed(size_t bytes) {
    void *memory = NULL;
    cudaError_t status = cudaMalloc(&memory, bytes ? bytes : 1);
    if (status == cudaErrorMemoryAllocation) die("out of memory: %zu bytes could not be had on the GPU", bytes);
    cuda_check(status, "allocating memory of the GPU");
    cuda_zero(memory, bytes);
    cuda_synchronize(); // before another stream writes to it
    return memory;
}

static void release(void *memory) { cuda_check(cudaFree(memory), "freeing memory of the GPU"); }

static void make_batches(void) {
    const unsigned flags = cudaEventDisableTiming;
    cuda_check(cudaStreamCreateWithFlags(&batches.stream, cudaStreamNonBlocking), "making a stream");
    cuda_check(cudaEventCreateWithFlags(&batches.called, flags), "making an event");
    for (int i = 0; i < 2; i++) {
        cuda_check(cudaEventCreateWithFlags(&batches.copied[i], flags), "making an event");
    }
}

static void resize_staging(size_t bytes) {
    cuda_synchronize(); // and so for batches' copies, since the operations' stream waits for them
    for (int i = 0; i < 2; i++) {
        if (batches.staging[i]) cuda_check(cudaFreeHost(batches.staging[i]), "freeing pinned memory");
        cuda_check(cudaMallocHost((void **)&batches.staging[i], bytes), "allocating pinned memory");
    }
    batches.bytes = bytes;
}

static void copy_batch(int32_t *to, const int32_t *tokens, const int32_t *targets, const int32_t *positions,
                       int64_t count) {
    size_t bytes = (size_t)count * sizeof(*to), all_bytes = (positions ? 3 : 2) * bytes;
    if (all_bytes > batches.bytes) resize_staging(all_bytes);
    batches.turn = !batches.turn;
    char *staging = batches.staging[batches.turn];
    cudaEvent_t copied = batches.copied[batches.turn];
    while (!cuda_has_ended(cudaEventQuery(copied), "waiting for the last batch but one")) {}
    memcpy(staging, tokens, bytes);
    memcpy(staging + bytes, targets, bytes);
    if (positions) memcpy(staging + 2 * bytes, positions, bytes);
    // Not for the operations called since the last batch: they are what this one is copied beside.
    cuda_check(cudaStreamWaitEvent(batches.stream, batches.called, 0), "ordering streams");
    cuda_check(cudaEventRecord(batches.called, cuda_stream()), "ordering streams");
    cuda_check(cudaMemcpyAsync(to, staging, all_bytes, cudaMemcpyHostToDevice, batches.stream), "copying to the GPU");
    cuda_check(cudaEventRecord(copied, batches.stream), "ordering streams");
    cuda_check(cudaStreamWaitEvent(cuda_stream(), copied, 0), "ordering streams");
}

bool backend_cuda_has_driver(void) {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version > 0;
}

void backend_cuda_print_info(FILE *file) { cuda_device_print_info(file); }

const Backend *backend_cuda(MxGemm mx_gemm, Error *error) {
    static Backend table = {
        .name = "cuda",
        .head_rows_multiple = CUDA_HEAD_ROWS_MULTIPLE,
        .vocab_multiple = CUDA_VOCAB_MULTIPLE,
        .describe = describe,
        .self_check = cuda_gemm_self_check,
        .gemm_counts = cuda_gemm_counts,
        .available_memory = available_memory,
        .allocate = allocate_zeroed,
        .release = release,
        .copy_to_device = cuda_copy_to_device,
        .copy_to_host = cuda_copy_to_host,
        .copy_batch = copy_batch,
        .synchronize = cuda_synchronize,
        .now = seconds_now,
        .use_workspace = cuda_use_workspace,
#define OPERATION(result, name, parameters, arguments) .name = cuda_##name,
#define QUERY(result, name, parameters) .name = cuda_##name,
#include "llmc/operations.h"
    };
    bool started = cuda_stream() != NULL;
    if (!started && !cuda_device_find(&device, error)) return NULL;
    GemmDevice gemms = {10 * device.major + device.minor, cuda_gemm_cublaslt_version(), mx_gemm};
    if (mx_gemm == MX_GEMM_NATIVE && !cuda_gemm_check_native(gemms, device.name, error)) return NULL;
    if (!started) {
        cuda_start();
        make_batches();
    }
    cuda_gemm_use_device(gemms);
    table.head_scratch_bytes = cuda_head_scratch_bytes(total_memory());
    return &table;
}
