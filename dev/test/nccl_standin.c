/*
For tests of comm/nccl.c without a GPU: NCCL's functions over MPI, and those of CUDA that it calls, on the host's
memory. Calls have ended when they return; within a group nothing happens before its end. One thread at a time may be
inside. Sums are in rank order. With NCCL_STANDIN=hang collectives never end, as far as events tell.
*/
#include "../../llmc/comm/internal.h"
#include "../../llmc/cpu/cpu.h"
#include "../../llmc/cuda/cuda.h"

#include <mpi.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h> // usleep

// ---------------------------------------------------------------------------------------------------------------------
// CUDA: everything has ended when it returns.

void cuda_check_at(cudaError_t status, const char *doing, const char *file, int line) {
    if (status != cudaSuccess) { die("%s failed: %d (%s:%d)", doing, (int)status, file, line); }
}
cudaStream_t cuda_stream(void) { return NULL; }
void cuda_convert(Tensor out, Tensor in) { cpu_convert(out, in); }
void cuda_accumulate(float *sum, const float *values, int64_t count) { cpu_accumulate(sum, values, count); }

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaMalloc(void **memory, size_t bytes) {
    *memory = allocate(bytes);
    memset(*memory, 0xFF, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind, (void)stream;
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    (void)stream;
    while (getenv("NCCL_STANDIN")) {
        comm_pause(0);
    }
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    (void)flags;
    *stream = allocate(1);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}

// An event: whether it was recorded. They are made in pairs, of which the second ends a collective.
typedef struct {
    atomic_bool recorded;
    bool ends;
} Event;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    static int number;
    (void)flags;
    Event *made = allocate(sizeof(*made));
    made->ends = number++ % 2 == 1;
    *event = (cudaEvent_t)made;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    (void)stream;
    ((Event *)event)->recorded = true;
    return cudaSuccess;
}
// What nobody recorded can't be waited for.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)stream, (void)flags;
    return ((Event *)event)->recorded ? cudaSuccess : cudaErrorInvalidResourceHandle;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    const Event *one = (const Event *)event;
    return one->recorded && !(one->ends && getenv("NCCL_STANDIN")) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// NCCL

enum { MAX_OPERATIONS = 64 };
typedef enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECEIVE } Kind;
typedef struct {
    Kind kind;
    const void *in;
    void *out;
    size_t count;
    ncclDataType_t type;
    int peer;
} Operation;

static Operation operations[MAX_OPERATIONS];
static int num_operations, rank, size;
static atomic_int threads_inside;
static _Thread_local int depth; // of calls and groups, of this thread

static void enter(void) {
    if (depth++ == 0 && atomic_fetch_add(&threads_inside, 1) > 0) { die("two threads are inside NCCL"); }
}
static void leave(void) {
    if (--depth == 0) { atomic_fetch_sub(&threads_inside, 1); }
}

static size_t bytes_of(const Operation *o) {
    return o->count * (o->type == ncclFloat ? 4 : o->type == ncclBfloat16 ? 2 : 1);
}

// (size, count) of all ranks at `root`.
static void sum_at(const float *in, float *out, size_t count, int root) {
    float *all = allocate((size_t)size * count * sizeof(float));
    const void **parts = allocate((size_t)size * sizeof(*parts));
    for (int r = 0; r < size; r++) {
        parts[r] = all + (size_t)r * count;
    }
    MPI_Gather(in, (int)count, MPI_FLOAT, all, (int)count, MPI_FLOAT, root, MPI_COMM_WORLD);
    if (rank == root) { comm_sum_parts(out, parts, size, (int64_t)count, FORMAT_FP32); }
    free(parts);
    free(all);
}

static void execute(const Operation *o, MPI_Request *requests, int *num_requests) {
    int bytes = (int)bytes_of(o);
    switch (o->kind) {
    case ALL_REDUCE:
        sum_at(o->in, o->out, o->count, 0);
        MPI_Bcast(o->out, bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
        break;
    case REDUCE:
        sum_at(o->in, o->out, o->count, o->peer);
        break;
    case REDUCE_SCATTER:
        for (int root = 0; root < size; root++) {
            sum_at((const float *)o->in + (size_t)root * o->count, o->out, o->count, root);
        }
        break;
    case ALL_GATHER: // in place
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, o->out, bytes, MPI_BYTE, MPI_COMM_WORLD);
        if (o->in != (char *)o->out + rank * bytes) { die("all-gather isn't in place"); }
        break;
    case BROADCAST:
        MPI_Bcast(o->out, bytes, MPI_BYTE, o->peer, MPI_COMM_WORLD);
        break;
    case SEND:
        MPI_Isend(o->in, bytes, MPI_BYTE, o->peer, 0, MPI_COMM_WORLD, &requests[(*num_requests)++]);
        break;
    case RECEIVE:
        MPI_Irecv(o->out, bytes, MPI_BYTE, o->peer, 0, MPI_COMM_WORLD, &requests[(*num_requests)++]);
        break;
    }
}

static ncclResult_t run(void) {
    MPI_Request requests[MAX_OPERATIONS];
    int num_requests = 0;
    for (int i = 0; i < num_operations; i++) {
        execute(&operations[i], requests, &num_requests);
    }
    MPI_Waitall(num_requests, requests, MPI_STATUSES_IGNORE);
    num_operations = 0;
    leave();
    return ncclSuccess;
}

static ncclResult_t add(Operation operation) {
    ncclGroupStart();
    if (num_operations == MAX_OPERATIONS) { die("more operations in a group than the stand-in takes"); }
    operations[num_operations++] = operation;
    return ncclGroupEnd();
}

int comm_nccl_version(void) { return NCCL_VERSION_CODE; }
const char *ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : "an error"; }
const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0x5A, sizeof(*id));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int own) {
    enter();
    ncclUniqueId expected;
    ncclGetUniqueId(&expected);
    int provided;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *blocking = getenv("NCCL_COMM_BLOCKING");
    bool good = memcmp(&id, &expected, sizeof(id)) == 0 && rank == own && size == ranks;
    good = good && blocking && strcmp(blocking, "1") == 0;
    *comm = (ncclComm_t)&operations;
    leave();
    return good ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result) {
    if (comm != (ncclComm_t)&operations) { die("NCCL is asked about a communicator that isn't there"); }
    enter();
    usleep(100); // for another thread to come
    leave();
    *result = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    (void)comm;
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    (void)comm;
    enter();
    MPI_Finalize();
    leave();
    return ncclSuccess;
}
ncclResult_t ncclGroupStart(void) {
    enter();
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    if (depth == 1) { return run(); }
    leave();
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    (void)op, (void)comm, (void)stream;
    return add((Operation){ALL_REDUCE, in, out, count, type, 0});
}
ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    (void)op, (void)comm, (void)stream;
    return add((Operation){REDUCE, in, out, count, type, root});
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    (void)op, (void)comm, (void)stream;
    return add((Operation){REDUCE_SCATTER, in, out, count, type, 0});
}
ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    (void)comm, (void)stream;
    return add((Operation){ALL_GATHER, in, out, count, type, 0});
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    (void)comm, (void)stream;
    return add((Operation){BROADCAST, in, out, count, type, root});
}
ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    (void)comm, (void)stream;
    return add((Operation){SEND, in, NULL, count, type, peer});
}
ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    (void)comm, (void)stream;
    return add((Operation){RECEIVE, NULL, out, count, type, peer});
}
