/*
NCCL, loaded when it is first called: the program starts, and trains on one GPU, where it isn't
installed.
*/
#ifdef HAVE_NCCL
#include "internal.h"
#include "llmc/base/library.h"

#include <nccl.h>

static Library library = {LIBRARY_FILE("nccl", NCCL_MAJOR), "NCCL, which several GPUs need,",
                          "install it, or start one rank", NULL};

#define FORWARD(type, name, parameters, arguments) LIBRARY_FUNCTION(library, type, name, parameters, arguments)

FORWARD(ncclResult_t, ncclGetVersion, (int *version), (version))
FORWARD(const char *, ncclGetErrorString, (ncclResult_t result), (result))
FORWARD(const char *, ncclGetLastError, (ncclComm_t comm), (comm))
FORWARD(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id), (id))
FORWARD(ncclResult_t, ncclCommInitRank, (ncclComm_t * comm, int size, ncclUniqueId id, int rank),
        (comm, size, id, rank))
FORWARD(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *result), (comm, result))
FORWARD(ncclResult_t, ncclCommFinalize, (ncclComm_t comm), (comm))
FORWARD(ncclResult_t, ncclCommDestroy, (ncclComm_t comm), (comm))
FORWARD(ncclResult_t, ncclGroupStart, (void), ())
FORWARD(ncclResult_t, ncclGroupEnd, (void), ())
FORWARD(ncclResult_t, ncclAllReduce,
        (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
         cudaStream_t stream),
        (in, out, count, type, op, comm, stream))
FORWARD(ncclResult_t, ncclReduce,
        (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
         cudaStream_t stream),
        (in, out, count, type, op, root, comm, stream))
FORWARD(ncclResult_t, ncclReduceScatter,
        (const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
         cudaStream_t stream),
        (in, out, count, type, op, comm, stream))
FORWARD(ncclResult_t, ncclAllGather,
        (const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream),
        (in, out, count, type, comm, stream))
FORWARD(ncclResult_t, ncclBroadcast,
        (const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream),
        (in, out, count, type, root, comm, stream))
FORWARD(ncclResult_t, ncclSend,
        (const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream),
        (in, count, type, peer, comm, stream))
FORWARD(ncclResult_t, ncclRecv,
        (void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream),
        (out, count, type, peer, comm, stream))

int comm_nccl_version(void) {
    int version = 0;
    if (library_load(&library)) ncclGetVersion(&version);
    return version;
}
#endif
