/*
What the files of comm/ share.
*/
#pragma once

#include "comm.h"

// Makes MPI's Comm. It initialises MPI, which takes half a second.
Comm *comm_create_mpi(const CommOptions *options, Error *error);
// Make NCCL's Comm from an id, which rank 0 makes and all have. They die where NCCL can't start.
enum { COMM_ID_BYTES = 128 };
void comm_nccl_make_id(void *id);
Comm *comm_create_nccl(const CommOptions *options, int rank, int size, const void *id);

// How a process without MPI finds the others.
typedef struct {
    int rank, size;
    const char *host; // rank 0's address and port
    int port;
} CommPlace;

// Finds this process's place in the environment: RANK and WORLD_SIZE, or mpirun's, or Slurm's; a
// place of size 1 where none is set. `with_address` also wants where rank 0 is.
bool comm_find_place(CommPlace *place, bool with_address, Error *error);

// Gives rank 0's `data` (bytes) to all, over TCP: rank 0 listens on place->port, and answers when
// all have asked.
bool comm_exchange_tcp(const CommPlace *place, void *data, int bytes, double timeout_seconds, Error *error);
// Does the same by a file that rank 0 writes. The caller removes it when all have read it.
bool comm_exchange_file(const CommPlace *place, const char *path, void *data, int bytes, double timeout_seconds,
                        Error *error);

// Reads an environment variable that is a whole number in [minimum, maximum]; where it isn't set,
// `value` stays as it is.
bool comm_environment_int(const char *name, int minimum, int maximum, int *value, Error *error);

// Sets `out` to parts[0] + parts[1] + ..., in that order, in FP32. parts (size), each (count) of
// `dtype`, FP32 or BF16; one of them may be `out`.
void comm_sum_parts(float *out, const void *const *parts, int size, int64_t count, Format dtype);

// Do nothing, for a Comm whose collectives have ended when they return.
void comm_no_fork(Comm *comm);
void comm_no_slot(Comm *comm, int slot);

// Returns "; " and what comm_set_remedy has set, or "", for the end of a sentence.
const char *comm_remedy(void);

double comm_timeout(const CommOptions *options);
int comm_patience(const Comm *comm); // that comm_set_patience has set
// Waits after a poll that found nothing: the longer, the longer it is since `since` (seconds_now).
void comm_pause(double since);

// Ends this process with EXIT_RANK_LOST.
void comm_exit_lost(void) __attribute__((noreturn));
