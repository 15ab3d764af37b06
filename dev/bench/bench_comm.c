/*
What ranks can send each other a second, alone: mpirun -np 2 build/bench_comm [MEGABYTES]

Prints for each collective the bytes that a rank sends a second while all ranks send, as "NAME
GB/S", and the time of an all-gather of nothing much, as "latency MICROSECONDS". The best of some
calls.
*/
#include "llmc/comm/comm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CALLS = 10, SMALL = 1024 };

typedef struct {
    Comm *comm;
    float *values;     // (count)
    CommRange *ranges; // (size)
    int64_t count;
} Bench;

static void make_ranges(Bench *b, int64_t count, int64_t element_bytes) {
    comm_split(b->ranges, b->comm->size, count, 1);
    for (int rank = 0; rank < b->comm->size; rank++) {
        b->ranges[rank].offset *= element_bytes;
        b->ranges[rank].count *= element_bytes;
    }
}

static void all_gather(const Bench *b) { b->comm->all_gather(b->comm, b->values, b->ranges); }

static void reduce_scatter(const Bench *b) { b->comm->reduce_scatter(b->comm, b->values, b->ranges, FORMAT_FP32); }

// Seconds of the slowest rank in the best call; `sent`: the bytes of one.
static double time_call(const Bench *b, void (*call)(const Bench *), int64_t *sent) {
    double best = INFINITY;
    for (int i = 0; i < CALLS; i++) {
        b->comm->barrier(b->comm);
        int64_t before = b->comm->bytes_sent;
        double start = seconds_now();
        call(b);
        double seconds = seconds_now() - start;
        *sent = b->comm->bytes_sent - before;
        comm_max_doubles(b->comm, &seconds, 1);
        best = fmin(best, seconds);
    }
    return best;
}

int main(int argc, char **argv) {
    Error error;
    CommOptions options = {0};
    int64_t sent;
    double megabytes = argc > 1 ? strtod(argv[1], NULL) : 64;
    if (!(megabytes > 0 && megabytes < 1e5)) die("give the megabytes of a collective, such as 64");
    Bench b = {.comm = comm_create(&options, &error), .count = (int64_t)(megabytes * 1e6) / (int64_t)sizeof(float)};
    if (!b.comm) die("%s", error.message);
    if (b.comm->size == 1) die("one rank has nothing to send: start it with mpirun -np 2");
    b.values = allocate((size_t)b.count * sizeof(float));
    b.ranges = allocate((size_t)b.comm->size * sizeof(*b.ranges));
    bool prints = b.comm->rank == 0;

    make_ranges(&b, b.count, sizeof(float));
    double seconds = time_call(&b, all_gather, &sent);
    if (prints) printf("all_gather %.4g\n", (double)sent / seconds / 1e9);
    make_ranges(&b, b.count, 1);
    seconds = time_call(&b, reduce_scatter, &sent);
    if (prints) printf("reduce_scatter %.4g\n", (double)sent / seconds / 1e9);
    make_ranges(&b, SMALL / (int64_t)sizeof(float), sizeof(float));
    seconds = time_call(&b, all_gather, &sent);
    if (prints) printf("latency %.4g\n", seconds * 1e6);
    b.comm->close(b.comm);
    free(b.values);
    free(b.ranges);
    return 0;
}
