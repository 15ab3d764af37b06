/*
Waiting for the GPU by asking again and again. While cudaStreamSynchronize waits, which spins as
well, other threads' questions may not return, by a comment in PyTorch's ProcessGroupNCCL: nor those
of comm/nccl.c's watcher, where what is waited for is another rank.
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
