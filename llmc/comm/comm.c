/*
Chooses the Comm that a process gets. It is a file apart because it refers to NCCL's Comm, and so to
the CUDA backend.
*/
#include "internal.h"

#include <limits.h> // INT_MAX
#include <stdlib.h>
#include <string.h>
#include <unistd.h> // unlink

// Sets how many ranks a launcher of MPI's started; 0: it doesn't say; -1: none did.
static bool find_mpi_size(int *size, Error *error) {
    *size = -1;
    if (!comm_environment_int("OMPI_COMM_WORLD_SIZE", 1, INT_MAX, size, error)) return false;
    if (*size < 0 && !comm_environment_int("PMI_SIZE", 1, INT_MAX, size, error)) return false;
    if (*size < 0 && getenv("PMIX_RANK")) *size = 0;
    return true;
}

static Comm *create_mpi(const CommOptions *options, int size, Error *error) {
#ifdef HAVE_MPI
    Comm *comm = comm_create_mpi(options, error);
    if (comm && size > 0 && comm->size != size) {
        error_set(error,
                  "the launcher started %d ranks and MPI knows of %d: start them with mpirun -np %d, or with srun "
                  "--mpi=pmix",
                  size, comm->size, size);
        comm->close(comm);
        return NULL;
    }
    return comm;
#else
    (void)options, (void)size;
    error_set(error,
              "several ranks on CPUs need MPI, which this program was built without: install it (apt-get install "
              "libopenmpi-dev openmpi-bin), then make");
    return NULL;
#endif
}

static Comm *create_cpu(const CommOptions *options, Error *error) {
    int size;
    if (!find_mpi_size(&size, error)) return NULL;
    bool mpi = size >= 0;
    if (!mpi) {
        CommPlace place;
        if (!comm_find_place(&place, false, error)) return NULL;
        size = place.size;
        mpi = size > 1 && getenv("SLURM_PROCID") && !getenv("WORLD_SIZE");
        if (size > 1 && !mpi) {
            error_set(error, "WORLD_SIZE is %d, and ranks on CPUs need mpirun: start them with mpirun -np %d", size,
                      size);
            return NULL;
        }
    }
    if (options->world_size > 1) return create_mpi(options, 0, error);
    if (options->world_size == 1 && mpi && size > 1) {
        error_set(error, "--world-size is 1 and %d ranks were started: leave the option out, or start one", size);
        return NULL;
    }
    if (!mpi || size == 1) return comm_single();
    return create_mpi(options, size, error);
}

#ifdef HAVE_NCCL

#ifdef HAVE_MPI
// Sends NCCL's id over MPI, which is then closed, and returns NCCL's Comm.
static Comm *create_nccl_by_mpi(const CommOptions *options, int size, Error *error) {
    Comm *mpi = create_mpi(options, size, error);
    if (!mpi) return NULL;
    char id[COMM_ID_BYTES] = {0};
    if (mpi->rank == 0) comm_nccl_make_id(id);
    char *ids = comm_gather(mpi, id, sizeof(id)); // of which the first is wanted
    int rank = mpi->rank, ranks = mpi->size;
    mpi->close(mpi);
    Comm *comm = comm_create_nccl(options, rank, ranks, ids);
    free(ids);
    return comm;
}
#endif

static Comm *create_cuda(const CommOptions *options, Error *error) {
    int size;
    CommPlace place;
    if (!find_mpi_size(&size, error) || !comm_find_place(&place, false, error)) return NULL;
#ifdef HAVE_MPI
    // srun may look like a launcher of MPI's where MPI can't start: an address goes first.
    if (size >= 0 && !options->file && !getenv("WORLD_SIZE") && !getenv("MASTER_ADDR")) {
        return size == 1 && options->world_size <= 1 ? comm_single() : create_nccl_by_mpi(options, size, error);
    }
#endif
    if (options->world_size > 0 && options->world_size != place.size) {
        error_set(error,
                  "--world-size is %d and the launcher's variables say %d rank%s: start the ranks with mpirun, srun, "
                  "or RANK and WORLD_SIZE set for each",
                  options->world_size, place.size, plural(place.size));
        return NULL;
    }
    if (place.size == 1) return comm_single();
    if (!options->file && !comm_find_place(&place, true, error)) return NULL;
    char id[COMM_ID_BYTES] = {0};
    if (place.rank == 0) comm_nccl_make_id(id);
    double timeout = comm_timeout(options);
    bool found = options->file ? comm_exchange_file(&place, options->file, id, sizeof(id), timeout, error)
                               : comm_exchange_tcp(&place, id, sizeof(id), timeout, error);
    if (!found) return NULL;
    Comm *comm = comm_create_nccl(options, place.rank, place.size, id); // returns when all have the id
    if (options->file && place.rank == 0) unlink(options->file);
    return comm;
}

#else

int comm_nccl_version(void) { return 0; }

static Comm *create_cuda(const CommOptions *options, Error *error) {
    int size;
    CommPlace place;
    if (!find_mpi_size(&size, error) || !comm_find_place(&place, false, error)) return NULL;
    if (options->world_size <= 1 && place.size == 1 && size <= 1) return comm_single();
    error_set(error,
              "several ranks on GPUs need NCCL, which this program was built without: install it, then make; or start "
              "one rank");
    return NULL;
}

#endif

void comm_print_info(FILE *file) {
#ifdef HAVE_MPI
    fprintf(file, "MPI               built in: ranks on CPUs\n");
#else
    fprintf(
        file,
        "MPI               not built in: no ranks on CPUs (apt-get install libopenmpi-dev openmpi-bin, then make)\n");
#endif
#ifdef HAVE_NCCL
    int nccl = comm_nccl_version();
    if (nccl > 0) {
        fprintf(file, "NCCL              %d.%d.%d\n", nccl / 10000, nccl / 100 % 100, nccl % 100);
    } else {
        fprintf(file, "NCCL              not on this machine: one GPU only (install libnccl2)\n");
    }
#else
    fprintf(file, "NCCL              not built in: no ranks on GPUs (install it and the CUDA toolkit, then make)\n");
#endif
}

Comm *comm_create(const CommOptions *options, Error *error) {
    return options->cuda ? create_cuda(options, error) : create_cpu(options, error);
}

int comm_launch_rank(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK", "SLURM_PROCID"};
    Error ignored; // comm_create finds it
    int rank = -1;
    for (int i = 0; i < COUNT(names) && rank < 0; i++) {
        comm_environment_int(names[i], 0, INT_MAX, &rank, &ignored);
    }
    return rank < 0 ? 0 : rank;
}

bool comm_local_rank(int *local_rank, Error *error) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"};
    *local_rank = -1;
    for (int i = 0; i < COUNT(names) && *local_rank < 0; i++) {
        if (!comm_environment_int(names[i], 0, INT_MAX, local_rank, error)) return false;
    }
    return true;
}

bool comm_own_gpu(char *device, size_t bytes, const char *visible, int local_rank, Error *error) {
    device[0] = 0;
    if (local_rank < 0 || (visible && !strchr(visible, ','))) return true;
    if (!visible) {
        snprintf(device, bytes, "%d", local_rank);
        return true;
    }
    const char *begin = visible;
    for (int i = 0; i < local_rank; i++) {
        begin = strchr(begin, ',');
        if (!begin) {
            return error_set(
                error,
                "this is rank %d (from 0) of its machine, and CUDA_VISIBLE_DEVICES=%s lists %d GPUs: start "
                "as many ranks as there are GPUs",
                local_rank, visible, i);
        }
        begin++;
    }
    snprintf(device, bytes, "%.*s", (int)strcspn(begin, ","), begin);
    return true;
}
