/*
For tests of comm/nccl.c without a GPU: NCCL's functions over MPI, and those of CUDA that it calls,
on the host's memory. Calls have ended when they return; within a group nothing happens before its
end. One thread at a time may be inside. Sums are in rank order.

Collectives on another stream than cuda_stream, the main one, must have the greatest priority, and
wait for the main stream again when that has waited for theirs. What they receive is held back, and
0xFF, NaN, in its place, until the main stream waits for an event that is recorded after them.

From when NCCL_STANDIN is set to `connected`, an algorithm that hasn't been used before is refused.
From when it is set to `hang`, collectives never end as far as events and streams tell, nor what is
behind them on their stream; what would wait for them within the driver is refused. From when it is
set to `no-memory` or `remote`, collectives fail.
*/
#include "llmc/base/library.h"
#include "llmc/comm/internal.h"
#include "llmc/cpu/cpu.h"
#include "llmc/cuda/cuda.h"

#include <dlfcn.h>
#include <limits.h>
#include <mpi.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h> // usleep

// -------------------------------------------------------------------------------------------------
// CUDA: everything has ended when it returns; at exit it is unloaded.

const char *cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "no error" : "an error"; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }

typedef struct {
    bool is_stuck; // behind a collective that doesn't end
    int priority;
    int has_seen; // the last turn of the main stream that it has waited for
} Stream;

static bool is_stuck; // a stream is
static int turn = 1;  // of the main stream: it begins another one when it waits for another stream

static Stream *stream_at(cudaStream_t stream) { return (Stream *)stream; }

static void stick(Stream *stream) { stream->is_stuck = is_stuck = true; }

// Dies where the driver would wait for other ranks, while another thread's question may not return.
static void wait_inside(bool waits) {
    if (waits) die("the driver waits for other ranks");
}

// What was received beside the main stream and isn't to be seen yet, the oldest first.
typedef struct Held {
    struct Held *next;
    void *at;
    size_t bytes;
    char received[];
} Held;

static Held *first_held, **last_held = &first_held;
static int num_held;            // in all
static atomic_int num_released; // of these, the first ones; the watcher's questions read it

static void hold(void *at, size_t bytes) {
    Held *held = allocate(sizeof(*held) + bytes);
    held->at = at;
    held->bytes = bytes;
    memcpy(held->received, at, bytes);
    memset(at, 0xFF, bytes);
    *last_held = held;
    last_held = &held->next;
    num_held++;
}

// Lets the first `count` that were held be seen.
static void release(int count) {
    while (num_released < count) {
        Held *held = first_held;
        memcpy(held->at, held->received, held->bytes);
        first_held = held->next;
        if (!first_held) last_held = &first_held;
        free(held);
        num_released++;
    }
}

void cuda_convert(Tensor out, Tensor in) { cpu_convert(out, in); }
void cuda_accumulate(float *sum, const float *values, int64_t count) { cpu_accumulate(sum, values, count); }

static atomic_bool is_unloaded;
// At exit: for long enough for another thread to come.
static void unload(void) {
    is_unloaded = true;
    usleep(100000);
}

cudaError_t cudaGetDevice(int *device) {
    if (atexit(unload) != 0) die("what is to be done at exit can't be said");
    if (!cuda_stream()) cuda_start(); // as a backend has by then
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
    wait_inside(memory && is_stuck);
    release(num_held);
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    wait_inside(kind != cudaMemcpyDeviceToDevice && stream_at(stream)->is_stuck);
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    memset(memory, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (stream_at(stream)->is_stuck) return cudaErrorNotReady;
    if (stream != cuda_stream()) release(num_held);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    wait_inside(stream_at(stream)->is_stuck);
    return cudaStreamQuery(stream);
}

enum { GREATEST_PRIORITY = -5 };
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = GREATEST_PRIORITY;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    Stream *made = allocate(sizeof(*made));
    made->priority = priority;
    *stream = (cudaStream_t)made;
    return flags == cudaStreamNonBlocking ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}

// It has ended when what was held before it has been released; recorded on a stream that is stuck,
// never.
typedef struct {
    bool is_recorded;
    cudaStream_t stream;
    int turn; // of the main stream
    atomic_int num_before;
} Event;
enum { NEVER = INT_MAX };

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    *event = allocate(sizeof(Event));
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Event *one = (Event *)event;
    one->num_before = stream_at(stream)->is_stuck ? NEVER : stream == cuda_stream() ? 0 : num_held;
    one->stream = stream;
    one->turn = turn;
    one->is_recorded = true;
    return cudaSuccess;
}
// What nobody recorded can't be waited for.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    const Event *one = (const Event *)event;
    if (!one->is_recorded) return cudaErrorInvalidResourceHandle;
    if (one->num_before == NEVER) {
        stick(stream_at(stream));
    } else if (stream == cuda_stream()) {
        release(one->num_before);
    }
    if (one->stream == cuda_stream()) {
        stream_at(stream)->has_seen = one->turn;
    } else if (stream == cuda_stream()) {
        turn++;
    }
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (is_unloaded) {
        fprintf(stderr, "CUDA is called when it has been unloaded\n");
        return cudaErrorCudartUnloading;
    }
    return ((const Event *)event)->num_before <= num_released ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------
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
    cudaStream_t stream;
} Operation;

static Operation operations[MAX_OPERATIONS];
static int num_operations, rank, size;
static atomic_int threads_inside;
static _Thread_local int depth; // of calls and groups, of this thread

static bool is_set_to(const char *what) {
    const char *set = getenv("NCCL_STANDIN");
    return set && strcmp(set, what) == 0;
}

static void enter(void) {
    if (depth++ == 0 && atomic_fetch_add(&threads_inside, 1) > 0) die("two threads are inside NCCL");
}
static void leave(void) {
    if (--depth == 0) atomic_fetch_sub(&threads_inside, 1);
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
    if (rank == root) comm_sum_parts(out, parts, size, (int64_t)count, FORMAT_FP32);
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
        if (o->in != (char *)o->out + rank * bytes) die("all-gather isn't in place");
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

// What NCCL may have algorithms of their own for: which connect ranks, and take memory, when they
// are first used.
static void connect_for(const Operation *o) {
    static bool is_connected[RECEIVE + 1][2];
    bool *one = &is_connected[o->kind][bytes_of(o) > 1 << 20];
    if (!*one && is_set_to("connected")) die("an operation of kind %d connects late", (int)o->kind);
    *one = true;
}

// Holds back what this rank has received.
static void hold_received(const Operation *o) {
    bool is_root = rank == o->peer;
    if (o->kind == SEND || (o->kind == REDUCE && !is_root) || (o->kind == BROADCAST && is_root)) return;
    hold(o->out, bytes_of(o) * (size_t)(o->kind == ALL_GATHER ? size : 1));
}

static ncclResult_t run(void) {
    MPI_Request requests[MAX_OPERATIONS];
    int num_requests = 0;
    if (is_set_to("no-memory")) return ncclSystemError;
    if (is_set_to("remote")) return ncclRemoteError;
    for (int i = 0; i < num_operations; i++) {
        connect_for(&operations[i]);
        execute(&operations[i], requests, &num_requests);
        if (is_set_to("hang")) stick(stream_at(operations[i].stream));
    }
    MPI_Waitall(num_requests, requests, MPI_STATUSES_IGNORE);
    for (int i = 0; i < num_operations && !is_stuck; i++) {
        if (operations[i].stream != cuda_stream()) hold_received(&operations[i]);
    }
    num_operations = 0;
    leave();
    return ncclSuccess;
}

static ncclResult_t add(Operation operation) {
    ncclGroupStart();
    if (operation.stream != cuda_stream()) {
        const Stream *beside = stream_at(operation.stream);
        if (beside->priority != GREATEST_PRIORITY) die("collectives beside compute have no priority");
        if (beside->has_seen != turn) die("collectives beside compute don't wait for what was computed before them");
    }
    if (num_operations == MAX_OPERATIONS) die("more operations in a group than the stand-in takes");
    operations[num_operations++] = operation;
    return ncclGroupEnd();
}

// In the place of llmc/base/library.c: NCCL's functions are those of this file.
bool library_load(Library *library) {
    (void)library;
    return true;
}

void *library_function(Library *library, const char *name) {
    (void)library;
    void *function = dlsym(RTLD_DEFAULT, name);
    if (!function) die("the stand-in has no %s", name);
    return function;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : "an error"; }
const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return is_set_to("no-memory") ? "no space left in /dev/shm" : is_set_to("remote") ? "connection closed" : "";
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
    if (comm != (ncclComm_t)&operations) die("NCCL is asked about a communicator that isn't there");
    enter();
    usleep(100); // for another thread to come
    leave();
    *result = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    (void)comm;
    release(num_held);
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
    if (depth == 1) return run();
    leave();
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    (void)op, (void)comm;
    return add((Operation){ALL_REDUCE, in, out, count, type, 0, stream});
}
ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    (void)op, (void)comm;
    return add((Operation){REDUCE, in, out, count, type, root, stream});
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    (void)op, (void)comm;
    return add((Operation){REDUCE_SCATTER, in, out, count, type, 0, stream});
}
ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    (void)comm;
    return add((Operation){ALL_GATHER, in, out, count, type, 0, stream});
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    (void)comm;
    return add((Operation){BROADCAST, in, out, count, type, root, stream});
}
ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    (void)comm;
    return add((Operation){SEND, in, NULL, count, type, peer, stream});
}
ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    (void)comm;
    return add((Operation){RECEIVE, NULL, out, count, type, peer, stream});
}
