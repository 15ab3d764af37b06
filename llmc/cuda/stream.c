/*
What every file of the CUDA backend stands on: the stream, the workspace, checks.
*/
#include "cuda.h"

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
