/*
Collectives over NCCL, between processes with a GPU each, on the stream of the CUDA backend: they
run in the order of its operations, and the host waits for none; or, forked, on a stream beside it.
A thread watches: it sees by the clock whether the other one is inside NCCL for longer than the
timeout, by events whether a collective runs for longer, and asks NCCL for failures. Which rank is
missing NCCL doesn't tell.

Who finds a rank lost ends the process, which frees the GPU too. ncclCommAbort would end the waiting
kernels first: they leave unfinished sums behind, with which the other thread would carry on. For
whatever reason the process ends before the Comm is closed, one thread alone ends it, by _exit.

FP32 sums are NCCL's own. Their order depends on the algorithm (ring, tree), which NCCL chooses by
size, topology and version: the same bits in every run on the same machines. Sums in NVLink's
switches (NVLS), whose order differs from call to call by what NCCL's maintainers say
(github.com/NVIDIA/nccl/issues/1497), are off unless NCCL_ALGO or NCCL_NVLS_ENABLE is set. Reduction
in BF16 is ours, as with MPI: rounded addends are exchanged and summed in FP32 in rank order, which
NCCL, adding in BF16, has no operation for.
*/
#ifdef HAVE_NCCL
#include "internal.h"
#include "llmc/base/library.h"
#include "llmc/cuda/cuda.h" // cuda_stream, cuda_check, copies

#define __CUDA_BF16_TYPES_EXIST__ // else older headers (2.20) have no ncclBfloat16
#include <errno.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h> // pause, usleep, _exit

// Loaded when it is first called: without it the program starts, and trains on one GPU.
static Library library = {LIBRARY_FILE("nccl", NCCL_MAJOR), "NCCL, which several GPUs need,",
                          "install it, or start one rank", NULL};
#define NCCL(name) LIBRARY_CALL(library, nccl##name)

int comm_nccl_version(void) {
    int version = 0;
    if (library_load(&library)) NCCL(GetVersion)(&version);
    return version;
}

// A step has two groups of gathers a layer, all of them before its forward pass.
enum { MAX_RUNNING = 1024, LARGEST_PIECE = 2 << 20, PIECES_BYTES = 64 << 20 };
// Floats for which NCCL takes the algorithms of small messages, and those of large ones.
enum { SMALL_COUNT = 1 << 10, LARGE_COUNT = 4 << 20 };

// A group of collectives on a stream, between two events.
typedef struct {
    cudaEvent_t begin, end;
    cudaStream_t stream;
    const char *doing;
} Running;

typedef struct {
    Comm comm;
    ncclComm_t nccl;
    double timeout;
    char *staging; // of the GPU, for the host's arrays
    int64_t staging_bytes;
    int64_t piece;             // elements that are exchanged in BF16 at a time
    uint16_t *sent, *received; // (size, piece) BF16, of the GPU; made when first needed
    float *addend;             // (piece)
    pthread_t watcher;
    // Of what is below, down to first_since. The watcher holds it while it asks NCCL.
    pthread_mutex_t lock;
    double called_since; // since when the other thread is inside NCCL; 0: it isn't
    const char *doing;   // what it does there
    Running running[MAX_RUNNING];
    int first, num_running;
    double first_since; // when the watcher first saw the first one run; 0: it doesn't yet
    atomic_flag ends;   // a thread ends the process
    atomic_bool stop, is_connected;
    int device;
    cudaStream_t beside; // of forked collectives
    bool forked;
    Running *open; // whose group has begun and not ended
    cudaEvent_t forking, joins[COMM_SLOTS];
} NcclComm;

// Lets one thread end the process and say why: the first. The other one waits here for the end.
static void be_the_one_to_end(NcclComm *nccl) {
    while (atomic_flag_test_and_set(&nccl->ends)) {
        pause();
    }
}

static NcclComm *unclosed;

// Ends the process at once at exit(), die's too: what would come after takes CUDA down, which the
// watcher still uses, and may wait for kernels that never end.
static void skip_exit(int status, void *argument) {
    (void)argument;
    if (!unclosed) return;
    be_the_one_to_end(unclosed);
    fflush(NULL);
    _exit(status);
}

// Ends the process after a while in which the others can say so too: a launcher ends all when one
// has ended.
static void give_up(void) __attribute__((noreturn));
static void give_up(void) {
    usleep(500000);
    comm_exit_lost();
}

// Returns the seconds that a rank may let this one wait.
static double patience_of(const NcclComm *nccl) { return nccl->timeout * comm_patience(&nccl->comm); }

static void say_late(NcclComm *nccl, const char *doing) __attribute__((noreturn));
static void say_late(NcclComm *nccl, const char *doing) {
    be_the_one_to_end(nccl);
    fprintf(stderr, "%s, rank %d: a rank has not answered for %.4g s during %s: it hangs or was killed%s\n",
            program_invocation_short_name, nccl->comm.rank, patience_of(nccl), doing, comm_remedy());
    give_up();
}

// Ends the process where NCCL has failed. Until ranks are connected a failure of the system is this
// machine's, such as shared memory of a container's that is too small.
static void check(NcclComm *nccl, ncclResult_t result, const char *doing) {
    if (result == ncclSuccess) return;
    be_the_one_to_end(nccl);
    const char *name = program_invocation_short_name, *error = NCCL(GetErrorString)(result);
    const char *last = NCCL(GetLastError)(NULL);
    if (!nccl->is_connected) doing = "the start";
    if (result != ncclRemoteError && (result != ncclSystemError || !nccl->is_connected)) {
        fprintf(stderr, "%s, rank %d: NCCL failed at %s: %s (%s); NCCL_DEBUG=INFO says more\n", name, nccl->comm.rank,
                doing, error, last);
        fflush(NULL);
        _exit(EXIT_BAD_INPUT);
    }
    fprintf(stderr, "%s, rank %d: a rank ended, or the network to it failed, during %s (NCCL: %s%s%s)%s\n", name,
            nccl->comm.rank, doing, error, last[0] ? ": " : "", last, comm_remedy());
    give_up();
}

// Calls NCCL for what `nccl` is doing.
#define CALL(name, ...) check(nccl, NCCL(name)(__VA_ARGS__), nccl->doing)

// Tell the watcher when a call of NCCL's begins and ends: it may wait for other ranks, and doesn't
// return where one is lost.
static void enter(NcclComm *nccl, const char *doing) {
    pthread_mutex_lock(&nccl->lock);
    nccl->called_since = seconds_now();
    nccl->doing = doing;
    pthread_mutex_unlock(&nccl->lock);
}

static void leave(NcclComm *nccl) {
    pthread_mutex_lock(&nccl->lock);
    nccl->called_since = 0;
    pthread_mutex_unlock(&nccl->lock);
}

// Returns whether the GPU has passed the event. Failures of the GPU count as passed: the other
// thread's own calls report them.
static bool has_ended(cudaEvent_t event) { return cudaEventQuery(event) != cudaErrorNotReady; }

static bool is_late(double since, double patience) { return since > 0 && seconds_now() - since > patience; }

static void *watch(void *argument) {
    NcclComm *nccl = argument;
    cuda_check(cudaSetDevice(nccl->device), "choosing the GPU");
    while (!nccl->stop) {
        ncclResult_t asked = ncclSuccess, state = ncclSuccess;
        const char *late = NULL;
        // Asked before what has ended: it is lowered when a wait has.
        double patience = patience_of(nccl);
        pthread_mutex_lock(&nccl->lock);
        // NCCL takes one thread at a time. What fails in a call is reported to the other thread
        // when it returns.
        if (nccl->called_since == 0) asked = NCCL(CommGetAsyncError)(nccl->nccl, &state);
        while (nccl->num_running > 0 && has_ended(nccl->running[nccl->first].end)) {
            nccl->first = (nccl->first + 1) % MAX_RUNNING;
            nccl->num_running--;
            nccl->first_since = 0;
        }
        const Running *oldest = &nccl->running[nccl->first];
        if (nccl->num_running > 0 && nccl->first_since == 0 && has_ended(oldest->begin)) {
            nccl->first_since = seconds_now();
        }
        if (is_late(nccl->called_since, patience)) late = nccl->doing;
        if (is_late(nccl->first_since, patience)) late = oldest->doing;
        pthread_mutex_unlock(&nccl->lock);
        check(nccl, asked, "the run");
        check(nccl, state, "the run");
        if (late) say_late(nccl, late);
        usleep(1000);
    }
    return NULL;
}

// Returns the next free pair of events. Where all are in use the host is far ahead of the GPU, and
// waits.
static Running *next_running(NcclComm *nccl) {
    double start = seconds_now();
    for (;;) {
        pthread_mutex_lock(&nccl->lock);
        bool full = nccl->num_running == MAX_RUNNING;
        Running *next = &nccl->running[(nccl->first + nccl->num_running) % MAX_RUNNING];
        pthread_mutex_unlock(&nccl->lock);
        if (!full) return next;
        comm_pause(start);
    }
}

static void end_group(NcclComm *nccl) {
    Running *running = nccl->open;
    CALL(GroupEnd);
    leave(nccl);
    cuda_check(cudaEventRecord(running->end, running->stream), "marking a collective's end");
    pthread_mutex_lock(&nccl->lock);
    nccl->num_running++;
    pthread_mutex_unlock(&nccl->lock);
    nccl->open = NULL;
}

// Begins a group of collectives on `stream`. What is forked is one group, which NCCL launches at
// once, when `join` ends it.
static void begin(NcclComm *nccl, const char *doing, cudaStream_t stream) {
    if (nccl->open && nccl->open->stream == stream) return;
    if (nccl->open) end_group(nccl);
    Running *next = next_running(nccl);
    next->doing = doing;
    next->stream = stream;
    cuda_check(cudaEventRecord(next->begin, stream), "marking a collective's begin");
    enter(nccl, doing);
    check(nccl, NCCL(GroupStart)(), doing);
    nccl->open = next;
}

static void end(NcclComm *nccl) {
    if (nccl->open->stream != nccl->beside) end_group(nccl);
}

static void make_event(cudaEvent_t *event) {
    cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
}

static void free_event(cudaEvent_t event) { cuda_check(cudaEventDestroy(event), "freeing an event"); }

static cudaStream_t stream_of(const NcclComm *nccl) { return nccl->forked ? nccl->beside : cuda_stream(); }

static void fork_stream(Comm *comm) {
    NcclComm *nccl = (NcclComm *)comm;
    cuda_check(cudaEventRecord(nccl->forking, cuda_stream()), "marking where collectives begin");
    cuda_check(cudaStreamWaitEvent(nccl->beside, nccl->forking, 0), "ordering collectives");
    nccl->forked = true;
}

static void join_stream(Comm *comm, int slot) {
    NcclComm *nccl = (NcclComm *)comm;
    if (!nccl->joins[slot]) { make_event(&nccl->joins[slot]); }
    if (nccl->open) end_group(nccl);
    cuda_check(cudaEventRecord(nccl->joins[slot], nccl->beside), "marking where collectives end");
    nccl->forked = false;
}

static void wait_for_slot(Comm *comm, int slot) {
    NcclComm *nccl = (NcclComm *)comm;
    if (!nccl->joins[slot]) return;
    cuda_check(cudaStreamWaitEvent(cuda_stream(), nccl->joins[slot], 0), "waiting for collectives");
}

// Returns whether ranges are of one length and follow each other, as NCCL's own reduce-scatter and
// all-gather take them.
static bool is_regular(const CommRange *ranges, int size) {
    for (int rank = 0; rank < size; rank++) {
        if (ranges[rank].count != ranges[0].count || ranges[rank].offset != rank * ranges[0].count) return false;
    }
    return true;
}

static int64_t total_count(const CommRange *ranges, int size) {
    int64_t count = 0;
    for (int rank = 0; rank < size; rank++) {
        count += ranges[rank].count;
    }
    return count;
}

static void all_reduce_sum(Comm *comm, float *values, int64_t count) {
    NcclComm *nccl = (NcclComm *)comm;
    if (count == 0) return;
    begin(nccl, "all_reduce_sum", stream_of(nccl));
    CALL(AllReduce, values, values, (size_t)count, ncclFloat, ncclSum, nccl->nccl, stream_of(nccl));
    end(nccl);
    comm->bytes_sent += 2 * count * (int64_t)sizeof(float) * (comm->size - 1) / comm->size;
}

static void allocate_pieces(NcclComm *nccl) {
    size_t elements = (size_t)(nccl->comm.size * nccl->piece);
    cuda_check(cudaMalloc((void **)&nccl->sent, elements * sizeof(uint16_t)), "allocating memory for BF16 addends");
    cuda_check(cudaMalloc((void **)&nccl->received, elements * sizeof(uint16_t)), "allocating memory for BF16 addends");
    cuda_check(cudaMalloc((void **)&nccl->addend, (size_t)nccl->piece * sizeof(float)),
               "allocating memory for addends");
}

// Returns how many elements of a range lie in the piece that begins at its element `at`.
static int64_t piece_count(const NcclComm *nccl, CommRange range, int64_t at) {
    return max_int64(0, min_int64(range.count - at, nccl->piece));
}

// Rounds this rank's addends of the piece at `at` of every range to BF16.
static void round_pieces(NcclComm *nccl, float *values, const CommRange *ranges, int64_t at) {
    for (int peer = 0; peer < nccl->comm.size; peer++) {
        int64_t count = piece_count(nccl, ranges[peer], at);
        if (count == 0) continue;
        cuda_convert(tensor_make(nccl->sent + peer * nccl->piece, FORMAT_BF16, 1, count),
                     tensor_make(values + ranges[peer].offset + at, FORMAT_FP32, 1, count));
    }
}

// Sends each rank the rounded addends of its range, and receives all others' of this rank's.
static void exchange_pieces(NcclComm *nccl, const CommRange *ranges, int64_t at) {
    int rank = nccl->comm.rank;
    int64_t piece = nccl->piece, own = piece_count(nccl, ranges[rank], at);
    begin(nccl, "reduce_scatter", cuda_stream());
    for (int peer = 0; peer < nccl->comm.size; peer++) {
        int64_t count = piece_count(nccl, ranges[peer], at);
        if (peer == rank) continue;
        if (count > 0) {
            CALL(Send, nccl->sent + peer * piece, (size_t)count, ncclBfloat16, peer, nccl->nccl, cuda_stream());
            nccl->comm.bytes_sent += count * (int64_t)sizeof(uint16_t);
        }
        if (own > 0) {
            CALL(Recv, nccl->received + peer * piece, (size_t)own, ncclBfloat16, peer, nccl->nccl, cuda_stream());
        }
    }
    end(nccl);
}

// Sums the addends of this rank's range, in rank order, in FP32.
static void sum_pieces(NcclComm *nccl, float *values, const CommRange *ranges, int64_t at) {
    int rank = nccl->comm.rank;
    int64_t own = piece_count(nccl, ranges[rank], at);
    Tensor sum = tensor_make(values + ranges[rank].offset + at, FORMAT_FP32, 1, own);
    for (int peer = 0; peer < nccl->comm.size && own > 0; peer++) {
        uint16_t *part = (peer == rank ? nccl->sent : nccl->received) + peer * nccl->piece;
        Tensor addend = tensor_make(nccl->addend, FORMAT_FP32, 1, own);
        cuda_convert(peer == 0 ? sum : addend, tensor_make(part, FORMAT_BF16, 1, own));
        if (peer > 0) cuda_accumulate(sum.data, addend.data, own);
    }
}

// Exchanges rounded addends, a piece of every range at a time, which the rank that they are for
// sums, as in mpi.c. It never runs beside: what rounds and adds is the backend's.
static void reduce_bf16(NcclComm *nccl, float *values, const CommRange *ranges) {
    if (!nccl->sent) allocate_pieces(nccl);
    int64_t longest = 0;
    for (int rank = 0; rank < nccl->comm.size; rank++) {
        longest = max_int64(longest, ranges[rank].count);
    }
    for (int64_t at = 0; at < longest; at += nccl->piece) {
        round_pieces(nccl, values, ranges, at);
        exchange_pieces(nccl, ranges, at);
        sum_pieces(nccl, values, ranges, at);
    }
}

static void reduce_scatter(Comm *comm, float *values, const CommRange *ranges, Format wire) {
    NcclComm *nccl = (NcclComm *)comm;
    int64_t total = total_count(ranges, comm->size);
    if (total == 0) return;
    if (wire == FORMAT_BF16) {
        reduce_bf16(nccl, values, ranges);
        return;
    }
    begin(nccl, "reduce_scatter", stream_of(nccl));
    float *own = values + ranges[comm->rank].offset;
    if (is_regular(ranges, comm->size)) {
        CALL(ReduceScatter, values, own, (size_t)ranges[0].count, ncclFloat, ncclSum, nccl->nccl, stream_of(nccl));
    } else {
        for (int root = 0; root < comm->size; root++) {
            float *theirs = values + ranges[root].offset;
            if (ranges[root].count == 0) continue;
            CALL(Reduce, theirs, theirs, (size_t)ranges[root].count, ncclFloat, ncclSum, root, nccl->nccl,
                 stream_of(nccl));
        }
    }
    end(nccl);
    comm->bytes_sent += total * (int64_t)sizeof(float) * (comm->size - 1) / comm->size;
}

static void all_gather(Comm *comm, void *data, const CommRange *ranges) {
    NcclComm *nccl = (NcclComm *)comm;
    int64_t total = total_count(ranges, comm->size);
    if (total == 0) return;
    begin(nccl, "all_gather", stream_of(nccl));
    if (is_regular(ranges, comm->size)) {
        char *own = (char *)data + ranges[comm->rank].offset;
        CALL(AllGather, own, data, (size_t)ranges[0].count, ncclUint8, nccl->nccl, stream_of(nccl));
    } else {
        for (int root = 0; root < comm->size; root++) {
            char *theirs = (char *)data + ranges[root].offset;
            if (ranges[root].count == 0) continue;
            CALL(Broadcast, theirs, theirs, (size_t)ranges[root].count, ncclUint8, root, nccl->nccl, stream_of(nccl));
        }
    }
    end(nccl);
    comm->bytes_sent += total * (comm->size - 1) / comm->size;
}

// Makes room for the host's arrays. cudaFree waits within the driver for all streams; so what runs
// on them is waited for before.
static void grow_staging(NcclComm *nccl, int64_t bytes) {
    cuda_check(cudaEventRecord(nccl->forking, nccl->beside), "marking where collectives end");
    cuda_check(cudaStreamWaitEvent(cuda_stream(), nccl->forking, 0), "waiting for collectives");
    cuda_synchronize();
    cuda_check(cudaFree(nccl->staging), "freeing memory of the GPU");
    cuda_check(cudaMalloc((void **)&nccl->staging, (size_t)bytes), "allocating memory for the host's arrays");
    nccl->staging_bytes = bytes;
}

// Sets pieces[rank] to the part of a range, from its byte `at` on, that has room in its place among
// places of `bytes`.
static void set_pieces(CommRange *pieces, const CommRange *ranges, int size, int64_t at, int64_t bytes) {
    for (int rank = 0; rank < size; rank++) {
        int64_t left = max_int64(0, ranges[rank].count - at);
        pieces[rank] = (CommRange){rank * bytes, min_int64(left, bytes)};
    }
}

// Gathers by way of the GPU, a piece of each range at a time: no plan counts this memory, and there
// are many ranks. Other ranks are waited for outside the driver: cuda/wait.h says why.
static void all_gather_host(Comm *comm, void *data, const CommRange *ranges) {
    NcclComm *nccl = (NcclComm *)comm;
    int64_t longest = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        longest = max_int64(longest, ranges[rank].count);
    }
    int64_t bytes = min_int64(longest, nccl->piece * (int64_t)sizeof(uint16_t)), all = comm->size * bytes;
    if (all > nccl->staging_bytes) grow_staging(nccl, all);
    char *gathered = allocate((size_t)all);
    CommRange *pieces = allocate((size_t)comm->size * sizeof(*pieces));
    for (int64_t at = 0; at < longest; at += bytes) {
        set_pieces(pieces, ranges, comm->size, at, bytes);
        CommRange mine = pieces[comm->rank];
        if (mine.count > 0) {
            const char *from = (const char *)data + ranges[comm->rank].offset + at;
            cuda_copy_to_device(nccl->staging + mine.offset, from, (size_t)mine.count);
        }
        all_gather(comm, nccl->staging, pieces);
        cuda_copy_to_host(gathered, nccl->staging, (size_t)all);
        for (int rank = 0; rank < comm->size; rank++) {
            char *to = (char *)data + ranges[rank].offset + at;
            if (pieces[rank].count > 0) memcpy(to, gathered + pieces[rank].offset, (size_t)pieces[rank].count);
        }
    }
    free(pieces);
    free(gathered);
}

static void barrier(Comm *comm) { comm_any(comm, false); }

// Makes NCCL connect the ranks, which takes memory, for all algorithms but BF16's sends and
// receives, which few runs need. NCCL would do it at the first call of each; done here, who asks
// later how much of the GPU's memory is free is told what is.
static void connect_ranks(Comm *comm) {
    const int counts[] = {SMALL_COUNT, LARGE_COUNT};
    CommRange *floats = allocate((size_t)comm->size * sizeof(*floats));
    for (int i = 0; i < 2; i++) {
        int64_t part = (counts[i] + comm->size - 1) / comm->size;
        comm_split(floats, comm->size, part * comm->size, part);
        float *values;
        cuda_check(cudaMalloc((void **)&values, (size_t)(part * comm->size) * sizeof(float)),
                   "allocating memory to connect ranks");
        all_reduce_sum(comm, values, part * comm->size);
        reduce_scatter(comm, values, floats, FORMAT_FP32);
        comm_scale(floats, comm->size, sizeof(float));
        all_gather(comm, values, floats);
        cuda_synchronize();
        cuda_check(cudaFree(values), "freeing memory of the GPU");
    }
    free(floats);
    comm->bytes_sent = 0;
}

static void close_comm(Comm *comm) {
    NcclComm *nccl = (NcclComm *)comm;
    barrier(comm);
    enter(nccl, "the end"); // and never leaves: the watcher asks NCCL no more
    CALL(CommFinalize, nccl->nccl);
    CALL(CommDestroy, nccl->nccl);
    nccl->stop = true;
    int failure = pthread_join(nccl->watcher, NULL);
    if (failure != 0) die("the thread that watches NCCL can't be waited for: %s", strerror(failure));
    for (int i = 0; i < MAX_RUNNING; i++) {
        free_event(nccl->running[i].begin);
        free_event(nccl->running[i].end);
    }
    for (int slot = 0; slot < COMM_SLOTS; slot++) {
        if (nccl->joins[slot]) free_event(nccl->joins[slot]);
    }
    free_event(nccl->forking);
    cuda_check(cudaStreamDestroy(nccl->beside), "freeing a stream");
    cuda_check(cudaFree(nccl->staging), "freeing memory of the GPU");
    cuda_check(cudaFree(nccl->sent), "freeing memory of the GPU");
    cuda_check(cudaFree(nccl->received), "freeing memory of the GPU");
    cuda_check(cudaFree(nccl->addend), "freeing memory of the GPU");
    pthread_mutex_destroy(&nccl->lock);
    unclosed = NULL;
    free(nccl);
}

void comm_nccl_make_id(void *id) {
    ncclUniqueId unique;
    _Static_assert(sizeof(unique) == COMM_ID_BYTES, "the size of NCCL's id");
    ncclResult_t result = NCCL(GetUniqueId)(&unique);
    if (result != ncclSuccess) {
        die("NCCL can't make an id: %s (%s); NCCL_DEBUG=INFO says more", NCCL(GetErrorString)(result),
            NCCL(GetLastError)(NULL));
    }
    memcpy(id, &unique, sizeof(unique));
}

// Makes the stream of forked collectives. Its priority lets their blocks go before those of GEMMs
// that were launched before them and haven't begun.
static void create_stream(NcclComm *nccl) {
    int least, greatest;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for streams' priorities");
    cuda_check(cudaStreamCreateWithPriority(&nccl->beside, cudaStreamNonBlocking, greatest), "making a stream");
}

static void create_events(NcclComm *nccl) {
    cuda_check(cudaGetDevice(&nccl->device), "asking for the GPU");
    for (int i = 0; i < MAX_RUNNING; i++) {
        make_event(&nccl->running[i].begin);
        make_event(&nccl->running[i].end);
    }
    make_event(&nccl->forking);
}

static void set_variable(const char *name, const char *value, bool replace) {
    if (setenv(name, value, replace) != 0) die("the environment can't be changed: %s", strerror(errno));
}

Comm *comm_create_nccl(const CommOptions *options, int rank, int size, const void *id) {
    NcclComm *nccl = allocate(sizeof(*nccl));
    nccl->comm = (Comm){
        .name = "nccl",
        .rank = rank,
        .size = size,
        .all_reduce_sum = all_reduce_sum,
        .reduce_scatter = reduce_scatter,
        .all_gather = all_gather,
        .all_gather_host = all_gather_host,
        .fork = fork_stream,
        .join = join_stream,
        .wait = wait_for_slot,
        .barrier = barrier,
        .close = close_comm,
    };
    int version = comm_nccl_version();
    snprintf(nccl->comm.description, sizeof(nccl->comm.description), "%d ranks over NCCL %d.%d.%d", size,
             version / 10000, version / 100 % 100, version % 100);
    nccl->timeout = comm_timeout(options);
    comm_set_patience(&nccl->comm, 1);
    int64_t piece_bytes = min_int64(LARGEST_PIECE, PIECES_BYTES / size);
    nccl->piece = (options->piece_bytes > 0 ? options->piece_bytes : piece_bytes) / (int64_t)sizeof(uint16_t);
    create_events(nccl);
    create_stream(nccl);
    pthread_mutex_init(&nccl->lock, NULL);
    atomic_flag_clear(&nccl->ends);
    // Calls that return before they have ended would start a thread each, which a later one, or the
    // watcher, joins.
    set_variable("NCCL_COMM_BLOCKING", "1", true);
    if (!getenv("NCCL_ALGO")) set_variable("NCCL_NVLS_ENABLE", "0", false);
    unclosed = nccl;
    if (on_exit(skip_exit, NULL) != 0) die("out of memory for what is to be done at exit");
    enter(nccl, "the start");
    int failure = pthread_create(&nccl->watcher, NULL, watch, nccl);
    if (failure != 0) die("the thread that watches NCCL can't be started: %s", strerror(failure));
    ncclUniqueId unique;
    memcpy(&unique, id, sizeof(unique));
    CALL(CommInitRank, &nccl->nccl, size, unique, rank);
    leave(nccl);
    connect_ranks(&nccl->comm);
    nccl->is_connected = true;
    return &nccl->comm;
}
#endif
