/*
What every file of the CUDA backend stands on: the stream, the workspace, copies, checks.
*/
#include "cuda.h"
#include "wait.h"

static cudaStream_t stream;
static void *workspace;
static size_t workspace_bytes;

void cuda_check_at(cudaError_t status, const char *doing, const char *file, int line) {
    if (status == cudaSuccess) return;
    die("%s failed: %s (%s:%d)", doing, cudaGetErrorString(status), file, line);
}

void cuda_start(void) { cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream"); }

cudaStream_t cuda_stream(void) { return stream; }

void cuda_use_workspace(void *memory, size_t bytes) {
    workspace = memory;
    workspace_bytes = bytes;
}

void *cuda_workspace(size_t bytes) {
    if (bytes > workspace_bytes) {
        die("internal error: an operation needs %zu bytes of workspace and was given %zu", bytes, workspace_bytes);
    }
    return workspace;
}

void cuda_synchronize(void) {
    while (!cuda_has_ended(cudaStreamQuery(stream), "waiting for the GPU")) {}
}

// Copies of pageable memory may wait for the stream within the driver: it is waited for before.
void cuda_copy_to_device(void *to, const void *from, size_t bytes) {
    cuda_synchronize();
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "copying to the GPU");
    cuda_synchronize();
}

void cuda_copy_to_host(void *to, const void *from, size_t bytes) {
    cuda_synchronize();
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "copying from the GPU");
    cuda_synchronize();
}

void cuda_zero(void *memory, size_t bytes) {
    cuda_check(cudaMemsetAsync(memory, 0, bytes, stream), "zeroing memory of the GPU");
}

void cuda_copy(void *to, const void *from, size_t bytes) {
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copying within the GPU's memory");
}
