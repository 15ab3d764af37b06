/*
Attention on a GPU: by cuDNN where the program is built with it, it takes the shape and the tensors
lie as it wants them; else by our own kernels, as within documents (--mask-documents): cuDNN's
ragged and padding masks want the number of documents when a plan is made, which differs from batch
to batch, and a gradient of the scores for each. Both give and take the same logsumexp, so forward
and backward choose each for itself.
*/
#include "attention.h"

#include <stdio.h>

#ifdef HAVE_CUDNN

// The workspace that was last asked for. cuDNN's plans take a second to make, so they are made for
// sequences of this length alone and not for each length of a text that is being generated.
static int64_t asked_T;
static size_t asked_bytes;

static size_t workspace_of_cudnn(Format dtype, AttentionShape shape) {
    if (dtype != FORMAT_BF16) return 0; // a second model's, beside one that cuDNN may take
    if (shape.by_document) return 0;
    asked_T = shape.T;
    asked_bytes = cuda_attention_cudnn_takes(dtype, shape) ? cuda_attention_workspace_cudnn(shape) : 0;
    return asked_bytes;
}

static bool is_dense(Tensor tensor) { return tensor.stride == tensor.cols && (size_t)tensor.data % 16 == 0; }

static bool by_cudnn(Tensor a, Tensor b, Tensor c, AttentionShape shape) {
    return !shape.by_document && is_dense(a) && is_dense(b) && is_dense(c) && asked_bytes > 0 && shape.T == asked_T &&
           cuda_attention_cudnn_takes(a.dtype, shape) && cuda_attention_workspace_cudnn(shape) <= asked_bytes;
}

#else

static size_t workspace_of_cudnn(Format dtype, AttentionShape shape) {
    (void)dtype, (void)shape;
    return 0;
}

#endif

static bool was_asked; // for the workspace of BF16 attention

void cuda_attention_describe(char *text, size_t bytes) {
    text[0] = 0;
#ifdef HAVE_CUDNN
    cuda_attention_cudnn_describe(text, bytes);
#endif
    if (was_asked && !text[0]) snprintf(text, bytes, "attention by our own kernels");
}

size_t cuda_attention_workspace(Format dtype, AttentionShape shape) {
    was_asked = was_asked || dtype == FORMAT_BF16;
    size_t plain = cuda_attention_workspace_plain(shape), cudnn = workspace_of_cudnn(dtype, shape);
    return cudnn > plain ? cudnn : plain;
}

void cuda_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape) {
#ifdef HAVE_CUDNN
    if (by_cudnn(out, qkv, qkv, shape)) {
        cuda_attention_forward_cudnn(out, logsumexp, qkv, shape);
        return;
    }
#endif
    cuda_attention_forward_plain(out, logsumexp, qkv, shape);
}

void cuda_attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                             AttentionShape shape) {
#ifdef HAVE_CUDNN
    if (by_cudnn(dqkv, dout, qkv, shape)) {
        cuda_attention_backward_cudnn(dqkv, dout, out.data && is_dense(out) ? out : (Tensor){0}, qkv, logsumexp, shape);
        return;
    }
#else
    (void)out; // our own kernels sum P dP in its place
#endif
    cuda_attention_backward_plain(dqkv, dout, qkv, logsumexp, shape);
}
