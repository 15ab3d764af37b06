/*
Comm: collectives between ranks, as one table of functions. Three make one: a single process, MPI
(CPU backend), NCCL (CUDA backend). Nothing outside comm/ includes their headers.

Every rank calls the same collectives in the same order with the same sizes; counts are of elements
and may be 0, where nothing is waited for. All work in place. all_reduce_sum, reduce_scatter and
all_gather take the backend's memory: the host's with MPI, the GPU's with NCCL, where they run in
the order of the backend's stream and may return before they have ended. The others, of FP64 scalars
and of text, take the host's memory, and return when they have ended.

Sums are the same bits on every rank and in every run at the same number of ranks. With MPI they are
taken in rank order in FP32, whatever MPI's own order is. NCCL's FP32 sums are in an order of its
own, which is fixed for a number of ranks, an algorithm, a card and a version of NCCL; its BF16
reduction and all FP64 ones are ours, in rank order.

A rank that ends, or that lets the others wait for longer than the timeout, ends them all: each
prints a sentence that names it (NCCL can't tell which) and exits with EXIT_RANK_LOST.
*/
#pragma once

#include "llmc/numerics/mx.h" // Format
#include "llmc/base/util.h"   // Error

enum { EXIT_RANK_LOST = 4 };

// A rank's part of a buffer that all ranks have: elements [offset, offset + count). Two ranks'
// parts don't overlap.
typedef struct {
    int64_t offset, count;
} CommRange;

typedef struct Comm Comm;
struct Comm {
    const char *name;      // "single", "mpi", "nccl"
    char description[256]; // "2 ranks over MPI (Open MPI v4.1.4)"
    int rank, size;
    int64_t bytes_sent; // what this rank has put on the wire; with NCCL what a ring would have it send
    int patience;       // so many times the timeout a rank may let the others wait: comm_set_patience

    // Sets values (count) to the sum over all ranks.
    void (*all_reduce_sum)(Comm *comm, float *values, int64_t count);
    // Sets this rank's range of `values` (ranges[rank]) to the sum over all ranks; the rest stays
    // as it is. `values` is as long as all ranges (size), which are in floats, together. `wire` is
    // FORMAT_FP32, or FORMAT_BF16: every rank's addends, its own too, are rounded to BF16 (to
    // nearest even), sent as such and summed in FP32.
    void (*reduce_scatter)(Comm *comm, float *values, const CommRange *ranges, Format wire);
    // Sends this rank's range of `data` to all, and receives all others'. ranges (size), in bytes.
    void (*all_gather)(Comm *comm, void *data, const CommRange *ranges);

    // Let collectives run beside the backend's operations. Those between `fork` and `join`, each on
    // memory of its own, come after what the backend was asked to do before `fork`, and may run
    // beside what it is asked later; what it is asked after `wait` comes after them. `slot` names a
    // join: 0 to COMM_SLOTS - 1, used again and again. With MPI, and in one process, collectives
    // have ended when `join` returns.
    void (*fork)(Comm *comm);
    void (*join)(Comm *comm, int slot);
    void (*wait)(Comm *comm, int slot);

    // Does what all_gather does, in the host's memory.
    void (*all_gather_host)(Comm *comm, void *data, const CommRange *ranges);
    // Returns when every rank has called it.
    void (*barrier)(Comm *comm);
    // Frees the Comm. Every rank must call it.
    void (*close)(Comm *comm);
};

typedef struct {
    int world_size;         // how many ranks there must be; 0: as many as the launcher says
    bool cuda;              // the backend is CUDA's
    const char *file;       // NCCL's rendezvous: a path that all ranks see. NULL: MPI's, or that of the environment
    double timeout_seconds; // 0: COMM_TIMEOUT_SECONDS
    int64_t piece_bytes;    // largest message; 0: what is fastest. For tests
} CommOptions;

enum { COMM_TIMEOUT_SECONDS = 600, COMM_SLOTS = 4096 };

// Makes the Comm of this process, by what launched it. One rank: comm_single(). On CPUs: MPI's,
// where a launcher of MPI's (or --world-size) says so. On GPUs: NCCL's, on the current device. Its
// ranks meet by `file`; else where MASTER_ADDR and MASTER_PORT say; else, under mpirun, by MPI;
// else where Slurm says. Who they are is in RANK and WORLD_SIZE, mpirun's variables, or
// SLURM_PROCID and SLURM_NTASKS. Returns NULL with an error where variables are missing or wrong,
// or a library isn't built in. Not for OR_DIE: other ranks are told of an error before this one
// ends.
Comm *comm_create(const CommOptions *options, Error *error);
// Returns the Comm of a single process, whose collectives return at once. It is static and needs no
// close.
Comm *comm_single(void);

// Sets which of the ranks of this machine this process is, from 0, by the launcher's variables
// (LOCAL_RANK and the like); -1 where none is set. Returns false with an error where one isn't a
// number.
bool comm_local_rank(int *local_rank, Error *error);

// Writes what CUDA_VISIBLE_DEVICES, now `visible` (NULL: not set), has to be for this rank to see
// one GPU alone: the one of its number in the list. Writes "" where it stays as it is: a list of
// one was made by a launcher for this rank. Returns false with an error where the list is too
// short.
bool comm_own_gpu(char *device, size_t bytes, const char *visible, int local_rank, Error *error);

// Sets what the sentence about a lost rank ends with, such as what can be resumed from; `text` must
// stay. NULL, as at first: nothing.
void comm_set_remedy(const char *text);

// Sets how many times the timeout a rank may let the others wait from now on: 1 at first, more
// while it writes what they can't help with.
void comm_set_patience(Comm *comm, int times);

// Returns this process's rank as its launcher says, before there is a Comm; 0 where none does.
int comm_launch_rank(void);
// Returns the number of ranks on this rank's machine, by the machine's name.
int comm_local_size(Comm *comm);

// Returns NCCL's version, 22809 for 2.28.9; 0 where it isn't built in, or isn't on this machine.
int comm_nccl_version(void);
// Prints which libraries connect ranks, a line each, for --device-info.
void comm_print_info(FILE *file);

// Set values (count) to the sum over all ranks, taken in rank order, or to the largest; NaN if any
// rank's is NaN.
void comm_sum_doubles(Comm *comm, double *values, int64_t count);
void comm_max_doubles(Comm *comm, double *values, int64_t count);
// Returns all ranks' `data` (bytes) in rank order, (size, bytes), to be freed.
void *comm_gather(Comm *comm, const void *data, int64_t bytes);
// Returns whether `flag` is true on any rank.
bool comm_any(Comm *comm, bool flag);

// Compares the texts that the ranks give. Where one differs from rank 0's, all end with
// EXIT_BAD_INPUT, and rank 0 prints one sentence that names the first such rank, `what` ("options")
// and where the texts part.
void comm_check_same(Comm *comm, const char *what, const char *text);

// Multiplies ranges (size) of one unit, which has `per_unit` of another, to be of that.
void comm_scale(CommRange *ranges, int size, int64_t per_unit);

// Returns a rank's range of `count` elements that are cut as equally as multiples of `multiple`
// allow.
CommRange comm_part(int rank, int size, int64_t count, int64_t multiple);

// Sets ranges (size) to all ranks'.
void comm_split(CommRange *ranges, int size, int64_t count, int64_t multiple);
