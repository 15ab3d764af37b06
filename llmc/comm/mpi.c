/*
Collectives over MPI, between processes with host memory.

Every rank sends to every other one, without trees or rings: a rank that waits then waits for the
very rank that is missing, and addends arrive unsummed, so that they can be summed in rank order. A
rank sends as many bytes as in a ring: 2 (N - 1) / N of the buffer for an all-reduce (Thakur,
Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005). Messages
of a pair arrive in the order in which they were sent, so one tag is enough.

A rank that waits looks at its requests, then sleeps. Every WATCH_SECONDS it also looks whether a
rank that it waits for still runs (where that is on the same machine), and whether another rank has
found one that doesn't answer.
*/
#ifdef HAVE_MPI
#include "internal.h"

#include <errno.h>
#include <mpi.h>
#include <signal.h> // kill
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

enum { TAG_DATA = 1, TAG_LOST = 2 };
enum { SCRATCH_BYTES = 32 << 20, SMALLEST_PIECE = 64 << 10, LARGEST_PIECE = 4 << 20 };
// An all-reduce of at most this many bytes sends each rank's whole buffer to all: one exchange
// instead of two.
enum { SMALL_BYTES = 16 << 10 };

static const double WATCH_SECONDS = 0.02;
// Polls are a millisecond apart: a rank that is this late was itself stopped, and must not blame
// others for it.
static const double ASLEEP_SECONDS = 0.2;
// How long messages of a rank that has ended may take to arrive.
static const double DRAIN_SECONDS = 0.3;
// A rank that waits for several gives this long to those that wait for one, and so know which.
static const double CERTAIN_SECONDS = 0.5;
// How long a rank that gives up waits for the others to say so too: a launcher ends all when one
// has ended.
static const double FAREWELL_SECONDS = 0.5;

// A process, as others see it: `place` is the same for two that can see each other's process id.
typedef struct {
    char place[128];
    int64_t pid;
    double ended; // when it was first seen to be gone; 0: it runs
} Process;

typedef struct {
    Comm comm;
    double timeout;
    int64_t piece_bytes;
    Process *processes;    // (size)
    const char *doing;     // the collective of now
    MPI_Request *requests; // (2 size): those of now
    int *peers;            // (2 size): whom each is from or to
    int num_requests;
    int *completed; // (2 size) scratch of wait_all
    MPI_Status *statuses;
    char *scratch;      // (2 size, piece_bytes): what is received, and what is sent in another dtype
    const void **parts; // (size)
} MpiComm;

// What a rank that gives up tells the others.
typedef struct {
    int32_t rank, ended; // ended: its process is gone; else it lets us wait
    double waited;
    char doing[32];
} Lost;

static void check(int status, const char *doing) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, text, &length);
    die("MPI failed at %s: %s", doing, text);
}

static void say_lost(const MpiComm *mpi, const Lost *lost) {
    const char *name = program_invocation_short_name;
    int rank = mpi->comm.rank;
    if (lost->ended) {
        fprintf(stderr, "%s, rank %d: rank %d ended during %s: it was killed or gave up%s\n", name, rank, lost->rank,
                lost->doing, comm_remedy());
    } else if (lost->rank == rank) {
        fprintf(stderr,
                "%s, rank %d: this rank has not answered the others for %.4g s during %s, and they have given up%s\n",
                name, rank, lost->waited, lost->doing, comm_remedy());
    } else {
        fprintf(stderr, "%s, rank %d: rank %d has not answered for %.4g s during %s: it hangs or was killed%s\n", name,
                rank, lost->rank, lost->waited, lost->doing, comm_remedy());
    }
}

// Tells all others which rank is lost, so that they end too, and that all name the same one.
static void give_up(MpiComm *mpi, const Lost *lost) __attribute__((noreturn));
static void give_up(MpiComm *mpi, const Lost *lost) {
    say_lost(mpi, lost);
    double start = seconds_now();
    MPI_Request request;
    for (int peer = 0; peer < mpi->comm.size; peer++) {
        if (peer == mpi->comm.rank) continue;
        if (MPI_Isend(lost, sizeof(*lost), MPI_BYTE, peer, TAG_LOST, MPI_COMM_WORLD, &request) == MPI_SUCCESS) {
            MPI_Request_free(&request);
        }
    }
    // Looking for messages is what makes MPI send.
    while (seconds_now() - start < FAREWELL_SECONDS) {
        int found;
        MPI_Iprobe(MPI_ANY_SOURCE, TAG_LOST, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
        comm_pause(start);
    }
    comm_exit_lost();
}

static bool waits_for(const MpiComm *mpi, int peer) {
    for (int i = 0; i < mpi->num_requests; i++) {
        if (mpi->requests[i] != MPI_REQUEST_NULL && mpi->peers[i] == peer) return true;
    }
    return false;
}

// Ends this process where another rank has found a lost one.
static void give_up_with_others(MpiComm *mpi) {
    int found = 0;
    check(MPI_Iprobe(MPI_ANY_SOURCE, TAG_LOST, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE), mpi->doing);
    if (!found) return;
    Lost lost;
    check(MPI_Recv(&lost, sizeof(lost), MPI_BYTE, MPI_ANY_SOURCE, TAG_LOST, MPI_COMM_WORLD, MPI_STATUS_IGNORE),
          mpi->doing);
    give_up(mpi, &lost);
}

// Returns whether a rank's process is gone, where this one can see it, and its messages have had
// time to arrive.
static bool has_ended(MpiComm *mpi, int peer, double now) {
    const Process *own = &mpi->processes[mpi->comm.rank];
    Process *process = &mpi->processes[peer];
    bool visible = memcmp(process->place, own->place, sizeof(own->place)) == 0;
    if (visible && process->ended == 0 && kill((pid_t)process->pid, 0) != 0 && errno == ESRCH) { process->ended = now; }
    return process->ended > 0 && now - process->ended > DRAIN_SECONDS;
}

// Ends this process where another rank has found a lost one, or where one that this rank waits for
// is lost.
static void watch(MpiComm *mpi, double since) {
    give_up_with_others(mpi);
    double now = seconds_now();
    Lost lost = {.waited = mpi->timeout * comm_patience(&mpi->comm)};
    int missing = 0;
    for (int peer = mpi->comm.size - 1; peer >= 0 && !lost.ended; peer--) {
        if (!waits_for(mpi, peer)) continue;
        missing++;
        lost.rank = peer;
        lost.ended = has_ended(mpi, peer, now);
    }
    snprintf(lost.doing, sizeof(lost.doing), "%s", mpi->doing);
    bool late = now - since > lost.waited + (missing > 1 ? CERTAIN_SECONDS : 0);
    if (missing > 0 && (lost.ended || late)) give_up(mpi, &lost);
}

// Gives up where one of the first `done` completed requests has failed: its rank is gone, or does
// something else.
static void check_requests(MpiComm *mpi, int done) {
    for (int i = 0; i < done; i++) {
        int kind = MPI_SUCCESS, peer = mpi->peers[mpi->completed[i]];
        MPI_Error_class(mpi->statuses[i].MPI_ERROR, &kind);
        if (kind == MPI_SUCCESS || kind == MPI_ERR_PENDING) continue;
        if (kind == MPI_ERR_TRUNCATE) {
            die("rank %d sent more than rank %d expected during %s: they don't do the same; give all ranks the same "
                "program, options and files",
                peer, mpi->comm.rank, mpi->doing);
        }
        Lost lost = {.rank = peer, .ended = 1};
        snprintf(lost.doing, sizeof(lost.doing), "%s", mpi->doing);
        give_up(mpi, &lost);
    }
}

// Waits until all requests have ended, and watches meanwhile. The wait counts from the last one
// that ended, without the time in which this process was stopped itself.
static void wait_all(MpiComm *mpi) {
    double since = seconds_now(), watched = since, polled = since;
    for (int left = mpi->num_requests; left > 0;) {
        int done = 0;
        int status = MPI_Testsome(mpi->num_requests, mpi->requests, &done, mpi->completed, mpi->statuses);
        if (status == MPI_ERR_IN_STATUS) check_requests(mpi, done);
        check(status, mpi->doing);
        if (done > 0) {
            left -= done;
            since = watched = polled = seconds_now();
            continue;
        }
        double now = seconds_now();
        if (now - polled > ASLEEP_SECONDS) since += now - polled;
        polled = now;
        if (now - watched > WATCH_SECONDS) {
            watch(mpi, since);
            watched = now;
        }
        comm_pause(since);
    }
    mpi->num_requests = 0;
}

static void post_send(MpiComm *mpi, int peer, const void *data, int64_t bytes) {
    if (bytes <= 0) return;
    mpi->peers[mpi->num_requests] = peer;
    check(MPI_Isend(data, (int)bytes, MPI_BYTE, peer, TAG_DATA, MPI_COMM_WORLD, &mpi->requests[mpi->num_requests++]),
          mpi->doing);
    mpi->comm.bytes_sent += bytes;
}

static void post_receive(MpiComm *mpi, int peer, void *data, int64_t bytes) {
    if (bytes <= 0) return;
    mpi->peers[mpi->num_requests] = peer;
    check(MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, TAG_DATA, MPI_COMM_WORLD, &mpi->requests[mpi->num_requests++]),
          mpi->doing);
}

// Returns the part of a range that is piece number `piece`: (offset, count), empty past its end.
static CommRange piece_of(CommRange range, int64_t piece, int64_t length) {
    int64_t first = min_int64(piece * length, range.count);
    return (CommRange){range.offset + first, min_int64(range.count - first, length)};
}

static int64_t num_pieces(const CommRange *ranges, int size, int64_t length) {
    int64_t longest = 0;
    for (int rank = 0; rank < size; rank++) {
        longest = max_int64(longest, ranges[rank].count);
    }
    return (longest + length - 1) / length;
}

// Returns the peer that is `step` ranks on, so that each rank begins with another one.
static int peer_at(const MpiComm *mpi, int step) { return (mpi->comm.rank + step) % mpi->comm.size; }

static void gather_ranges(MpiComm *mpi, void *data, const CommRange *ranges) {
    int64_t length = mpi->piece_bytes, pieces = num_pieces(ranges, mpi->comm.size, length);
    for (int64_t piece = 0; piece < pieces; piece++) {
        CommRange own = piece_of(ranges[mpi->comm.rank], piece, length);
        for (int step = 1; step < mpi->comm.size; step++) {
            CommRange theirs = piece_of(ranges[peer_at(mpi, step)], piece, length);
            post_receive(mpi, peer_at(mpi, step), (char *)data + theirs.offset, theirs.count);
        }
        for (int step = 1; step < mpi->comm.size; step++) {
            post_send(mpi, peer_at(mpi, step), (char *)data + own.offset, own.count);
        }
        wait_all(mpi);
    }
}

static void all_gather(Comm *comm, void *data, const CommRange *ranges) {
    MpiComm *mpi = (MpiComm *)comm;
    mpi->doing = "all_gather";
    gather_ranges(mpi, data, ranges);
}

static void to_bf16(uint16_t *out, const float *in, int64_t count) {
#pragma omp parallel for schedule(static) if (count > 16384)
    for (int64_t i = 0; i < count; i++) {
        out[i] = mx_to_bf16(in[i]);
    }
}

static void reduce_ranges(MpiComm *mpi, float *values, const CommRange *ranges, Format wire) {
    int rank = mpi->comm.rank, size = mpi->comm.size;
    int64_t element = wire == FORMAT_BF16 ? 2 : 4;
    int64_t length = mpi->piece_bytes / element, pieces = num_pieces(ranges, size, length);
    for (int64_t piece = 0; piece < pieces; piece++) {
        CommRange own = piece_of(ranges[rank], piece, length);
        for (int step = 1; step < size; step++) {
            int peer = peer_at(mpi, step);
            mpi->parts[peer] = mpi->scratch + peer * mpi->piece_bytes;
            post_receive(mpi, peer, mpi->scratch + peer * mpi->piece_bytes, own.count * element);
        }
        // Own addends come last: others wait for theirs.
        for (int step = 1; step <= size; step++) {
            int peer = peer_at(mpi, step);
            CommRange theirs = piece_of(ranges[peer], piece, length);
            const void *part = values + theirs.offset;
            if (wire == FORMAT_BF16) {
                uint16_t *rounded = (uint16_t *)(mpi->scratch + (size + peer) * mpi->piece_bytes);
                to_bf16(rounded, part, theirs.count);
                part = rounded;
            }
            if (peer == rank) {
                mpi->parts[rank] = part;
            } else {
                post_send(mpi, peer, part, theirs.count * element);
            }
        }
        wait_all(mpi);
        comm_sum_parts(values + own.offset, mpi->parts, size, own.count, wire);
    }
}

static void reduce_scatter(Comm *comm, float *values, const CommRange *ranges, Format wire) {
    MpiComm *mpi = (MpiComm *)comm;
    mpi->doing = "reduce_scatter";
    reduce_ranges(mpi, values, ranges, wire);
}

// Sums each rank's part there and gathers the sums; of few values every rank sums all.
static void all_reduce_sum(Comm *comm, float *values, int64_t count) {
    MpiComm *mpi = (MpiComm *)comm;
    int size = comm->size;
    int64_t bytes = count * (int64_t)sizeof(float);
    bool few = bytes <= mpi->piece_bytes && bytes * (size - 1) <= SMALL_BYTES;
    mpi->doing = "all_reduce_sum";
    CommRange *ranges = allocate((size_t)size * sizeof(*ranges));
    comm_split(ranges, size, count, 16);
    for (int rank = 0; few && rank < size; rank++) {
        ranges[rank] = (CommRange){0, count};
    }
    reduce_ranges(mpi, values, ranges, FORMAT_FP32);
    comm_scale(ranges, size, sizeof(float));
    if (!few) gather_ranges(mpi, values, ranges);
    free(ranges);
}

static void barrier(Comm *comm) {
    MpiComm *mpi = (MpiComm *)comm;
    mpi->doing = "barrier";
    char signs[2] = {0};
    for (int step = 1; step < comm->size; step++) {
        post_receive(mpi, peer_at(mpi, step), &mpi->scratch[step], 1);
        post_send(mpi, peer_at(mpi, step), signs, 1);
    }
    wait_all(mpi);
}

static void release(MpiComm *mpi) {
    free(mpi->processes);
    free(mpi->requests);
    free(mpi->peers);
    free(mpi->completed);
    free(mpi->statuses);
    free(mpi->scratch);
    free(mpi->parts);
    free(mpi);
}

// Finalizes MPI after a barrier of ours, because MPI's own, in MPI_Finalize, has no timeout.
static void close_comm(Comm *comm) {
    barrier(comm);
    check(MPI_Finalize(), "the end");
    release((MpiComm *)comm);
}

// Writes where this process runs: the machine's name, its boot, its process ids' namespace.
static void describe_process(Process *process) {
    char boot[40] = "", space[32] = "", host[48] = "";
    size_t bytes;
    Error error;
    char *text = read_file("/proc/sys/kernel/random/boot_id", 4096, &bytes, &error);
    if (text) snprintf(boot, sizeof(boot), "%.36s", text);
    free(text);
    if (readlink("/proc/self/ns/pid", space, sizeof(space) - 1) < 0) space[0] = 0;
    gethostname(host, sizeof(host) - 1);
    snprintf(process->place, sizeof(process->place), "%s %s %s", host, boot, space);
    process->pid = getpid();
}

static void describe_comm(Comm *comm) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    check(MPI_Get_library_version(version, &length), "asking for its version");
    version[strcspn(version, ",\n")] = 0;
    snprintf(comm->description, sizeof(comm->description), "%d rank%s over MPI (%.100s)", comm->size,
             plural(comm->size), make_printable(version));
}

static void allocate_buffers(MpiComm *mpi, const CommOptions *options) {
    int64_t piece = SCRATCH_BYTES / mpi->comm.size / 64 * 64;
    piece = max_int64(SMALLEST_PIECE, min_int64(piece, LARGEST_PIECE));
    mpi->piece_bytes = options->piece_bytes > 0 ? (options->piece_bytes + 15) / 16 * 16 : piece;
    size_t count = (size_t)mpi->comm.size;
    mpi->processes = allocate(count * sizeof(*mpi->processes));
    mpi->requests = allocate(2 * count * sizeof(MPI_Request));
    mpi->peers = allocate(2 * count * sizeof(*mpi->peers));
    mpi->completed = allocate(2 * count * sizeof(*mpi->completed));
    mpi->statuses = allocate(2 * count * sizeof(MPI_Status));
    mpi->scratch = allocate(2 * count * (size_t)mpi->piece_bytes);
    mpi->parts = allocate(count * sizeof(*mpi->parts));
}

// Tells all ranks where each runs.
static void exchange_processes(MpiComm *mpi) {
    CommRange *ranges = allocate((size_t)mpi->comm.size * sizeof(*ranges));
    comm_split(ranges, mpi->comm.size, mpi->comm.size * (int64_t)sizeof(Process), sizeof(Process));
    describe_process(&mpi->processes[mpi->comm.rank]);
    mpi->doing = "the start";
    gather_ranges(mpi, mpi->processes, ranges);
    free(ranges);
}

Comm *comm_create_mpi(const CommOptions *options, Error *error) {
    int size, rank, provided;
    check(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided), "the start");
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "setting its error handler");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size), "asking for the number of ranks");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "asking for the rank");
    if (options->world_size > 0 && options->world_size != size) {
        error_set(error, "--world-size is %d and MPI has started %d rank%s: start them with mpirun -np %d",
                  options->world_size, size, plural(size), options->world_size);
        MPI_Finalize();
        return NULL;
    }
    // Linux ends a sleep up to 50 microseconds late; a wait is better ended in time.
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    MpiComm *mpi = allocate(sizeof(*mpi));
    mpi->comm = (Comm){
        .name = "mpi",
        .rank = rank,
        .size = size,
        .all_reduce_sum = all_reduce_sum,
        .reduce_scatter = reduce_scatter,
        .all_gather = all_gather,
        .all_gather_host = all_gather,
        .fork = comm_no_fork,
        .join = comm_no_slot,
        .wait = comm_no_slot,
        .barrier = barrier,
        .close = close_comm,
    };
    mpi->timeout = comm_timeout(options);
    comm_set_patience(&mpi->comm, 1);
    allocate_buffers(mpi, options);
    describe_comm(&mpi->comm);
    exchange_processes(mpi);
    mpi->comm.bytes_sent = 0;
    return &mpi->comm;
}
#endif
