/*
In place of cuDNN in a whole model without a GPU: BF16 attention is the CPU's, which rounds what it
rounds as BF16, so that the backends are compared closely; FP32 attention is the CUDA backend's own
kernels.
*/
#include "llmc/cpu/cpu.h"
#include "llmc/cuda/attention.h"

#include <stdio.h>

size_t cuda_attention_workspace(Format dtype, AttentionShape shape) {
    return dtype == FORMAT_FP32 ? cuda_attention_workspace_plain(shape) : cpu_attention_workspace(dtype, shape);
}

void cuda_attention_describe(char *text, size_t bytes) { snprintf(text, bytes, "attention by the CPU's"); }

static void give_workspace(Format dtype, AttentionShape shape) {
    size_t bytes = cpu_attention_workspace(dtype, shape);
    backend_cpu()->use_workspace(cuda_workspace(bytes), bytes);
}

void cuda_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape) {
    if (qkv.dtype == FORMAT_FP32) {
        cuda_attention_forward_plain(out, logsumexp, qkv, shape);
        return;
    }
    give_workspace(qkv.dtype, shape);
    cpu_attention_forward(out, logsumexp, qkv, shape);
}

void cuda_attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                             AttentionShape shape) {
    if (qkv.dtype == FORMAT_FP32) {
        cuda_attention_backward_plain(dqkv, dout, qkv, logsumexp, shape);
        return;
    }
    give_workspace(qkv.dtype, shape);
    cpu_attention_backward(dqkv, dout, out, qkv, logsumexp, shape);
}
