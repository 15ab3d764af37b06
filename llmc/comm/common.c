/*
What is built on any Comm, and what all implementations use.
*/
#include "internal.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h> // _exit

// Elements that are summed at a time: they fit the first-level cache.
enum { CHUNK = 1024 };

void comm_sum_parts(float *out, const void *const *parts, int size, int64_t count, Format dtype) {
#pragma omp parallel for schedule(static) if (count > 16 * CHUNK)
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t n = min_int64(CHUNK, count - first);
        float sum[CHUNK];
        for (int64_t i = 0; i < n; i++) {
            sum[i] = -0.0f; // to which anything can be added without changing it
        }
        for (int part = 0; part < size; part++) {
            if (dtype == FORMAT_BF16) {
                const uint16_t *x = (const uint16_t *)parts[part] + first;
                for (int64_t i = 0; i < n; i++) {
                    sum[i] += mx_from_bf16(x[i]);
                }
            } else {
                const float *x = (const float *)parts[part] + first;
                for (int64_t i = 0; i < n; i++) {
                    sum[i] += x[i];
                }
            }
        }
        memcpy(out + first, sum, (size_t)n * sizeof(float));
    }
}

static _Atomic(const char *) remedy; // a Comm's own thread reads it, too

void comm_set_remedy(const char *text) { remedy = text; }

const char *comm_remedy(void) {
    static _Thread_local char text[256];
    const char *now = remedy;
    snprintf(text, sizeof(text), "%s%s", now ? "; " : "", now ? now : "");
    return text;
}

CommRange comm_part(int rank, int size, int64_t count, int64_t multiple) {
    int64_t units = (count + multiple - 1) / multiple;
    int64_t first = min_int64(count, (units / size * rank + min_int64(rank, units % size)) * multiple);
    int64_t end = min_int64(count, (units / size * (rank + 1) + min_int64(rank + 1, units % size)) * multiple);
    return (CommRange){first, end - first};
}

void comm_split(CommRange *ranges, int size, int64_t count, int64_t multiple) {
    for (int rank = 0; rank < size; rank++) {
        ranges[rank] = comm_part(rank, size, count, multiple);
    }
}

void comm_scale(CommRange *ranges, int size, int64_t per_unit) {
    for (int rank = 0; rank < size; rank++) {
        ranges[rank].offset *= per_unit;
        ranges[rank].count *= per_unit;
    }
}

void *comm_gather(Comm *comm, const void *data, int64_t bytes) {
    char *all = allocate((size_t)(comm->size * bytes));
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    comm_split(ranges, comm->size, comm->size * bytes, bytes);
    memcpy(all + comm->rank * bytes, data, (size_t)bytes);
    comm->all_gather_host(comm, all, ranges);
    free(ranges);
    return all;
}

int comm_local_size(Comm *comm) {
    char name[256] = "";
    gethostname(name, sizeof(name) - 1);
    char *names = comm_gather(comm, name, sizeof(name));
    int count = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        count += memcmp(names + (size_t)rank * sizeof(name), name, sizeof(name)) == 0;
    }
    free(names);
    return count;
}

// Sets `values` to all ranks' sums, or largest.
static void fold(Comm *comm, double *values, int64_t count, bool sums) {
    if (comm->size == 1 || count == 0) return;
    double *all = comm_gather(comm, values, count * (int64_t)sizeof(double));
    memcpy(values, all, (size_t)count * sizeof(double));
    for (int64_t i = count; i < comm->size * count; i++) {
        double *value = &values[i % count];
        if (sums) *value += all[i];
        if (!sums && (isnan(all[i]) || all[i] > *value)) *value = all[i];
    }
    free(all);
}

void comm_sum_doubles(Comm *comm, double *values, int64_t count) { fold(comm, values, count, true); }
void comm_max_doubles(Comm *comm, double *values, int64_t count) { fold(comm, values, count, false); }

bool comm_any(Comm *comm, bool flag) {
    double value = flag;
    comm_max_doubles(comm, &value, 1);
    return value > 0;
}

// Writes up to EXCERPT bytes of `text` around byte `at`, with dots where something is left out.
enum { EXCERPT = 100, BEFORE = 40 };
static void excerpt(char out[EXCERPT + 7], const char *text, int64_t length, int64_t at) {
    int64_t first = at > BEFORE ? at - BEFORE : 0;
    int64_t shown = first < length ? min_int64(EXCERPT, length - first) : 0;
    snprintf(out, EXCERPT + 7, "%s%.*s%s", first > 0 ? "..." : "", (int)shown, text + min_int64(first, length),
             first + shown < length ? "..." : "");
}

// Prints where rank `differs`'s text parts from rank 0's.
static void say_differing(const char *what, int differs, const char *all, const CommRange *ranges) {
    const char *other = all + ranges[differs].offset;
    int64_t at = 0, shorter = min_int64(ranges[0].count, ranges[differs].count);
    while (at < shorter && all[at] == other[at]) {
        at++;
    }
    char here[EXCERPT + 7], there[EXCERPT + 7];
    excerpt(here, all, ranges[0].count, at);
    excerpt(there, other, ranges[differs].count, at);
    fprintf(stderr, "%s: rank %d and rank 0 differ in their %s: \"%s\" and \"%s\"; start every rank with the same\n",
            program_invocation_short_name, differs, what, make_printable(there), make_printable(here));
}

// Returns all ranks' texts, one after the other, and writes where each lies to ranges (size).
static char *gather_texts(Comm *comm, const char *text, CommRange *ranges) {
    int64_t length = (int64_t)strlen(text), total = 0;
    int64_t *lengths = comm_gather(comm, &length, sizeof(length));
    for (int rank = 0; rank < comm->size; rank++) {
        ranges[rank] = (CommRange){total, lengths[rank]};
        total += lengths[rank];
    }
    free(lengths);
    char *all = allocate((size_t)total);
    memcpy(all + ranges[comm->rank].offset, text, (size_t)length);
    comm->all_gather_host(comm, all, ranges);
    return all;
}

void comm_check_same(Comm *comm, const char *what, const char *text) {
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    char *all = gather_texts(comm, text, ranges);
    int differs = 0;
    for (int rank = comm->size - 1; rank > 0; rank--) {
        bool same = ranges[rank].count == ranges[0].count &&
                    memcmp(all + ranges[rank].offset, all, (size_t)ranges[0].count) == 0;
        if (!same) differs = rank;
    }
    if (differs > 0 && comm->rank == 0) say_differing(what, differs, all, ranges);
    free(all);
    free(ranges);
    if (differs == 0) return;
    comm->close(comm); // after the sentence: a launcher may end all when one has ended
    exit(EXIT_BAD_INPUT);
}

void comm_no_fork(Comm *comm) { (void)comm; }
void comm_no_slot(Comm *comm, int slot) { (void)comm, (void)slot; }

double comm_timeout(const CommOptions *options) {
    return options->timeout_seconds > 0 ? options->timeout_seconds : COMM_TIMEOUT_SECONDS;
}

// NCCL's watcher reads it from its own thread.
void comm_set_patience(Comm *comm, int times) { __atomic_store_n(&comm->patience, times, __ATOMIC_RELAXED); }

int comm_patience(const Comm *comm) { return __atomic_load_n(&comm->patience, __ATOMIC_RELAXED); }

// Spins for the first microseconds, in which a sleep would make an answer late; then sleeps for an
// eighth of the time waited. So a wait ends at most an eighth late and takes little of a core.
void comm_pause(double since) {
    double waited = seconds_now() - since;
    if (waited < 20e-6) return;
    double sleep = waited / 8 < 1e-3 ? waited / 8 : 1e-3;
    struct timespec duration = {0, (long)(sleep * 1e9)};
    nanosleep(&duration, NULL);
}

void comm_exit_lost(void) {
    fflush(stdout);
    fflush(stderr);
    _exit(EXIT_RANK_LOST);
}
