/*
In place of cuDNN in a whole model without a GPU: BF16 attention is the CPU's, which rounds what it rounds as BF16, so
that the backends are compared closely; FP32 attention is the CUDA backend's own kernels.
*/
#include "../../llmc/cpu/cpu.h"
#include "../../llmc/cuda/attention.h"

size_t cuda_attention_workspace(Format dtype, int64_t B, int64_t T, int64_t NH, int64_t HS) {
    return dtype == FORMAT_FP32 ? cuda_attention_workspace_plain(B, T, NH, HS)
                                : cpu_attention_workspace(dtype, B, T, NH, HS);
}

static void give_workspace(Tensor qkv, int64_t B, int64_t T, int64_t NH) {
    size_t bytes = cpu_attention_workspace(qkv.dtype, B, T, NH, qkv.cols / 3 / NH);
    backend_cpu()->use_workspace(cuda_workspace(bytes), bytes);
}

void cuda_attention_forward(Tensor out, float *logsumexp, Tensor qkv, int64_t B, int64_t T, int64_t NH) {
    if (qkv.dtype == FORMAT_FP32) {
        cuda_attention_forward_plain(out, logsumexp, qkv, B, T, NH);
        return;
    }
    give_workspace(qkv, B, T, NH);
    cpu_attention_forward(out, logsumexp, qkv, B, T, NH);
}

void cuda_attention_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, int64_t B, int64_t T,
                             int64_t NH) {
    if (qkv.dtype == FORMAT_FP32) {
        cuda_attention_backward_plain(dqkv, dout, qkv, logsumexp, B, T, NH);
        return;
    }
    give_workspace(qkv, B, T, NH);
    cpu_attention_backward(dqkv, dout, qkv, logsumexp, B, T, NH);
}
