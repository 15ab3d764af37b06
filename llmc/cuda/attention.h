/*
The two ways to attention on a GPU, and what chooses between them (attention_choose.c): kernels of
our own (attention.cu), which take any shape in either dtype, and cuDNN's fused kernels
(attention_cudnn.c), where it is built in and takes the shape. Both keep nothing for the backward
pass but qkv and logsumexp. Shapes as in ../backend.h.
*/
#pragma once

#include "cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// The longest head that the kernels of attention.cu take.
enum { CUDA_ATTENTION_MAX_HEAD_SIZE = 256 };

// Memory linear in T, FP32 arithmetic on the plain cores, any alignment. Deterministic. Die for a
// longer head.
size_t cuda_attention_workspace_plain(AttentionShape shape);
void cuda_attention_forward_plain(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape);
void cuda_attention_backward_plain(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, AttentionShape shape);

// Writes what multiplies in attention, as far as it has been asked for: "" before that.
void cuda_attention_describe(char *text, size_t bytes);

#ifdef HAVE_CUDNN
// Returns 91900 for cuDNN 9.19.0; 0 where cuDNN isn't on this machine.
size_t cuda_attention_cudnn_version(void);

// Returns true if cuDNN has plans for this shape, forward and backward, which are made at the first
// question and kept. Says on stderr that cuDNN doesn't start, and the first shape that it refuses.
// Returns false for FP32, and with no usable GPU, without a word.
bool cuda_attention_cudnn_takes(Format dtype, AttentionShape shape);

// Returns what keeps this version of cuDNN from being trusted with sequences of this length; NULL
// where nothing is known.
const char *cuda_attention_cudnn_fault(size_t version, int64_t T, bool causal);

// Take a shape that cuDNN takes, and tensors without gaps between rows, 16-byte aligned.
size_t cuda_attention_workspace_cudnn(AttentionShape shape);
void cuda_attention_forward_cudnn(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape);
// The backward pass makes `out` again where it is {0}.
void cuda_attention_backward_cudnn(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                                   AttentionShape shape);

// Writes the version and the engines of the plans that were made last, with their settings (""
// before any): what was chosen, which a report of a run wants to know.
void cuda_attention_cudnn_describe(char *text, size_t bytes);

// Forgets all plans and makes those to come for the device that `json` describes
// (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION), of compute capability 90 for 9.0, for tests without
// a GPU: they can't be run. Returns false if cuDNN can't read it.
bool cuda_attention_cudnn_describe_device(const char *json, int capability);
#endif

#ifdef __cplusplus
}
#endif
