/*
Waiting for the GPU by asking again and again. A comment in PyTorch's ProcessGroupNCCL says that
while cudaStreamSynchronize waits, other threads' questions may not return. Where another rank is
waited for, those are the questions of comm/nccl.c's watcher. Either way the waiting thread spins.
*/
#pragma once

#include "cuda.h"

#include <sched.h>

// Returns whether what was asked about has ended, by the answer; where it hasn't, other threads go
// first.
static inline bool cuda_has_ended(cudaError_t answer, const char *doing) {
    if (answer == cudaErrorNotReady) {
        cudaGetLastError(); // so that it isn't taken for a launch's
        sched_yield();
        return false;
    }
    cuda_check(answer, doing);
    return true;
}
