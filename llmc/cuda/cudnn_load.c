/*
cuDNN, loaded when it is first called: the program starts where it isn't installed, and attention
runs on our kernels.
*/
#ifdef HAVE_CUDNN

#include "attention.h"
#include "llmc/base/library.h"

#include <cudnn.h>

static Library library = {LIBRARY_FILE("cudnn", CUDNN_MAJOR), "cuDNN", "install it, then start again", NULL};

#define FORWARD(type, name, parameters, arguments) LIBRARY_FUNCTION(library, type, name, parameters, arguments)

FORWARD(size_t, cudnnGetVersion, (void), ())
FORWARD(const char *, cudnnGetErrorString, (cudnnStatus_t status), (status))
FORWARD(cudnnStatus_t, cudnnCreate, (cudnnHandle_t * handle), (handle))
FORWARD(cudnnStatus_t, cudnnSetStream, (cudnnHandle_t handle, cudaStream_t stream), (handle, stream))
FORWARD(cudnnStatus_t, cudnnBackendCreateDescriptor,
        (cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor), (type, descriptor))
FORWARD(cudnnStatus_t, cudnnBackendDestroyDescriptor, (cudnnBackendDescriptor_t descriptor), (descriptor))
FORWARD(cudnnStatus_t, cudnnBackendFinalize, (cudnnBackendDescriptor_t descriptor), (descriptor))
FORWARD(cudnnStatus_t, cudnnBackendSetAttribute,
        (cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
         int64_t count, const void *values),
        (descriptor, name, type, count, values))
FORWARD(cudnnStatus_t, cudnnBackendGetAttribute,
        (cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
         int64_t wanted, int64_t *count, void *values),
        (descriptor, name, type, wanted, count, values))
FORWARD(cudnnStatus_t, cudnnBackendExecute,
        (cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack), (handle, plan, pack))

size_t cuda_attention_cudnn_version(void) { return library_load(&library) ? cudnnGetVersion() : 0; }

#endif
