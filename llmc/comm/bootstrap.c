/*
How ranks without MPI find each other: from the environment who they are, then one exchange of a few
bytes from rank 0, over TCP or by a file.
*/
#include "internal.h"

#include <errno.h>
#include <limits.h> // INT_MAX
#include <netdb.h>  // getaddrinfo
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// The environment

bool comm_environment_int(const char *name, int minimum, int maximum, int *value, Error *error) {
    const char *text = getenv(name);
    if (!text || !*text) return true;
    char *end;
    errno = 0;
    long number = strtol(text, &end, 10);
    if (errno != 0 || *end || end == text || number < minimum || number > maximum) {
        return error_set(error, "the environment variable %s is \"%s\" and must be a whole number from %d to %d", name,
                         text, minimum, maximum);
    }
    *value = (int)number;
    return true;
}

// Finds the rank and the number of ranks in the variables of these names, one of which is set.
static bool find_rank(CommPlace *place, const char *rank_name, const char *size_name, Error *error) {
    int rank = -1, size = -1;
    if (!comm_environment_int(size_name, 1, INT_MAX, &size, error) ||
        !comm_environment_int(rank_name, 0, size > 0 ? size - 1 : INT_MAX, &rank, error)) {
        return false;
    }
    if (size < 0) {
        return error_set(error, "the environment variable %s is set and %s isn't: set it to the number of ranks",
                         rank_name, size_name);
    }
    if (rank < 0) {
        return error_set(error,
                         "the environment variable %s is set and %s isn't: set it to this process's rank, from 0 to %d",
                         size_name, rank_name, size - 1);
    }
    *place = (CommPlace){.rank = rank, .size = size};
    return true;
}

static bool is_set(const char *name) { return getenv(name) && *getenv(name); }

bool comm_find_place(CommPlace *place, bool with_address, Error *error) {
    *place = (CommPlace){.rank = 0, .size = 1};
    bool slurm = false;
    if (is_set("RANK") || is_set("WORLD_SIZE")) {
        if (!find_rank(place, "RANK", "WORLD_SIZE", error)) return false;
    } else if (is_set("OMPI_COMM_WORLD_SIZE")) { // before Slurm's: of those a rank of mpirun's sees its daemon's
        if (!find_rank(place, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", error)) return false;
    } else if (is_set("SLURM_PROCID")) {
        slurm = true;
        const char *size_name = is_set("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
        if (!find_rank(place, "SLURM_PROCID", size_name, error)) return false;
    }
    if (place->size == 1 || !with_address) return true;

    place->host = getenv("MASTER_ADDR");
    if (slurm && (!place->host || !*place->host)) place->host = getenv("SLURM_LAUNCH_NODE_IPADDR");
    if (!place->host || !*place->host) {
        return error_set(error,
                         "the environment variable MASTER_ADDR isn't set: set it to the name or address of rank 0's "
                         "machine, on every rank");
    }
    if (!comm_environment_int("MASTER_PORT", 1, 65535, &place->port, error)) return false;
    if (place->port > 0) return true;
    int job = -1;
    if (slurm && comm_environment_int("SLURM_JOB_ID", 0, INT_MAX, &job, error) && job >= 0) {
        place->port = 20000 + job % 10000; // two jobs of a machine don't meet
        return true;
    }
    return error_set(error, "the environment variable MASTER_PORT isn't set: set it to a port that is free on rank 0's "
                            "machine, such as 29500, on every rank");
}

// TCP

enum { RETRY_MICROSECONDS = 50000 };
static const char MAGIC[8] = "mxfp8gpt";

// Hello is what a rank sends, in network byte order. Answer is what rank 0 sends back once it has
// heard all: a sentence where it gives up, else the data, which follow.
typedef struct {
    char magic[8];
    uint32_t rank, size;
} Hello;

typedef struct {
    char magic[8];
    char sentence[504];
} Answer;

static int milliseconds_until(double deadline) {
    double left = (deadline - seconds_now()) * 1e3;
    return left <= 0 ? 0 : left > 1e6 ? 1000000 : (int)left + 1;
}

// Sends or receives all `bytes` over a socket that doesn't block. Returns false at the deadline, or
// where the other side is gone.
static bool transfer(int socket, void *data, size_t bytes, bool sends, double deadline) {
    for (size_t done = 0; done < bytes;) {
        char *at = (char *)data + done;
        ssize_t n = sends ? send(socket, at, bytes - done, MSG_NOSIGNAL) : recv(socket, at, bytes - done, 0);
        if (n > 0) {
            done += (size_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            struct pollfd wait = {socket, sends ? POLLOUT : POLLIN, 0};
            if (seconds_now() >= deadline) return false;
            poll(&wait, 1, milliseconds_until(deadline));
        } else {
            return false;
        }
    }
    return true;
}

// Opens a socket that takes IPv6 and IPv4, or IPv4 alone where `family` says so. Returns -1 with
// errno where it can't.
static int listen_at(int port, int family) {
    int listener = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0) return -1;
    int on = 1, off = 0;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)); // after a run that ended a moment ago
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = in6addr_any};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (family == AF_INET6) setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    struct sockaddr *address = family == AF_INET6 ? (struct sockaddr *)&six : (struct sockaddr *)&four;
    socklen_t bytes = family == AF_INET6 ? sizeof(six) : sizeof(four);
    if (bind(listener, address, bytes) == 0 && listen(listener, SOMAXCONN) == 0) return listener;
    int failure = errno;
    close(listener);
    errno = failure;
    return -1;
}

// Reads who it is that connected. Returns false, with the socket closed, where it isn't a rank.
static bool take_hello(int socket, Hello *hello) {
    double patience = seconds_now() + 5;
    if (transfer(socket, hello, sizeof(*hello), false, patience) && memcmp(hello->magic, MAGIC, sizeof(MAGIC)) == 0) {
        hello->rank = ntohl(hello->rank);
        hello->size = ntohl(hello->size);
        return true;
    }
    close(socket);
    return false;
}

// Says which rank has not connected, of `connected` that have.
static bool say_missing(const CommPlace *place, const int *sockets, int connected, double timeout, Error *error) {
    int missing = 1;
    while (sockets[missing] >= 0) {
        missing++;
    }
    return error_set(error,
                     "rank %d has not connected to rank 0 at %s:%d within %.4g s (%d of %d ranks have): check "
                     "that it was started, and its MASTER_ADDR and MASTER_PORT",
                     missing, place->host, place->port, timeout, connected, place->size);
}

// Says why a rank that connected can't be one of this run's.
static bool refuse_rank(const CommPlace *place, const Hello *hello, Error *error) {
    if (hello->size != (uint32_t)place->size) {
        return error_set(error,
                         "rank %u was started as one of %u ranks and rank 0 as one of %d: give all the same "
                         "WORLD_SIZE",
                         hello->rank, hello->size, place->size);
    }
    return error_set(error, "two processes were started as rank %u: give each a RANK of its own, from 0 to %d",
                     hello->rank, place->size - 1);
}

// Waits until every rank has connected, and writes their sockets (size). Returns false with an
// error.
static bool collect_ranks(const CommPlace *place, int listener, int *sockets, double timeout, Error *error) {
    double deadline = seconds_now() + timeout;
    for (int connected = 1; connected < place->size;) {
        int left = milliseconds_until(deadline);
        if (left == 0) return say_missing(place, sockets, connected, timeout, error);
        struct pollfd wait = {listener, POLLIN, 0};
        if (poll(&wait, 1, left) <= 0) continue;
        int socket = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        Hello hello;
        if (socket < 0 || !take_hello(socket, &hello)) continue;
        bool good = hello.size == (uint32_t)place->size && hello.rank > 0 && hello.rank < hello.size;
        if (!good || sockets[hello.rank] >= 0) {
            sockets[0] = socket; // to be told too
            return refuse_rank(place, &hello, error);
        }
        sockets[hello.rank] = socket;
        connected++;
    }
    return true;
}

static bool serve(const CommPlace *place, void *data, int bytes, double timeout, Error *error) {
    int listener = listen_at(place->port, AF_INET6);
    if (listener < 0 && errno != EADDRINUSE) listener = listen_at(place->port, AF_INET);
    if (listener < 0) {
        return error_set(error, "rank 0 can't listen at port %d: %s; choose another MASTER_PORT, on every rank",
                         place->port, strerror(errno));
    }
    int *sockets = allocate((size_t)place->size * sizeof(*sockets));
    for (int rank = 0; rank < place->size; rank++) {
        sockets[rank] = -1;
    }
    bool ok = collect_ranks(place, listener, sockets, timeout, error);
    Answer answer = {{0}, {0}};
    memcpy(answer.magic, MAGIC, sizeof(MAGIC));
    if (!ok) snprintf(answer.sentence, sizeof(answer.sentence), "%.500s", error->message);
    double deadline = seconds_now() + 5;
    for (int rank = 0; rank < place->size; rank++) {
        if (sockets[rank] < 0) continue;
        bool told = transfer(sockets[rank], &answer, sizeof(answer), true, deadline) &&
                    transfer(sockets[rank], data, ok ? (size_t)bytes : 0, true, deadline);
        close(sockets[rank]);
        if (ok && !told) {
            ok = error_set(error, "rank %d ended as it was about to join: look for its own sentence", rank);
        }
    }
    free(sockets);
    close(listener);
    return ok;
}

// Returns a connected socket; -1 with errno where there is none.
static int connect_to(const struct addrinfo *address, double deadline) {
    int one = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (one < 0) return -1;
    int failure = connect(one, address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
    if (failure == EINPROGRESS) {
        double patience = seconds_now() + 5 < deadline ? seconds_now() + 5 : deadline;
        struct pollfd wait = {one, POLLOUT, 0};
        socklen_t bytes = sizeof(failure);
        if (poll(&wait, 1, milliseconds_until(patience)) <= 0) {
            failure = ETIMEDOUT;
        } else if (getsockopt(one, SOL_SOCKET, SO_ERROR, &failure, &bytes) != 0) {
            failure = errno;
        }
    }
    if (failure == 0) return one;
    close(one);
    errno = failure;
    return -1;
}

// Connects to rank 0, which may not have begun to listen. Returns the socket; -1 with an error.
static int reach(const CommPlace *place, double timeout, Error *error) {
    double deadline = seconds_now() + timeout;
    char port[16];
    snprintf(port, sizeof(port), "%d", place->port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *addresses;
    int status = getaddrinfo(place->host, port, &hints, &addresses);
    if (status != 0) {
        error_set(error, "rank 0's machine, \"%s\", can't be found: %s; check MASTER_ADDR", place->host,
                  gai_strerror(status));
        return -1;
    }
    int connection = -1, failure = 0;
    while (connection < 0) {
        for (const struct addrinfo *a = addresses; a && connection < 0; a = a->ai_next) {
            connection = connect_to(a, deadline);
            if (connection < 0) failure = errno;
        }
        if (connection < 0 && seconds_now() > deadline) break;
        if (connection < 0) usleep(RETRY_MICROSECONDS);
    }
    freeaddrinfo(addresses);
    if (connection < 0) {
        error_set(error,
                  "rank %d can't reach rank 0 at %s:%d within %.4g s: %s; check that rank 0 was started, "
                  "MASTER_ADDR, MASTER_PORT, and firewalls",
                  place->rank, place->host, place->port, timeout, strerror(failure));
    }
    return connection;
}

// Says who this rank is, and receives rank 0's data.
static bool ask(const CommPlace *place, void *data, int bytes, double timeout, Error *error) {
    int connection = reach(place, timeout, error);
    if (connection < 0) return false;
    Hello hello = {{0}, htonl((uint32_t)place->rank), htonl((uint32_t)place->size)};
    memcpy(hello.magic, MAGIC, sizeof(MAGIC));
    Answer answer = {{0}, {0}};
    // Rank 0 may have begun to wait now, and then takes as long again.
    double deadline = seconds_now() + timeout + 10;
    bool heard = transfer(connection, &hello, sizeof(hello), true, deadline) &&
                 transfer(connection, &answer, sizeof(answer), false, deadline);
    bool ours = heard && memcmp(answer.magic, MAGIC, sizeof(MAGIC)) == 0;
    answer.sentence[sizeof(answer.sentence) - 1] = 0;
    bool ok = ours && !answer.sentence[0] && transfer(connection, data, (size_t)bytes, false, deadline);
    close(connection);
    if (ok) return true;
    if (ours && answer.sentence[0]) return error_set(error, "%s", answer.sentence);
    return error_set(
        error,
        "what listens at %s:%d gave rank %d no answer: check that rank 0 runs there, MASTER_ADDR and MASTER_PORT",
        place->host, place->port, place->rank);
}

bool comm_exchange_tcp(const CommPlace *place, void *data, int bytes, double timeout_seconds, Error *error) {
    if (place->rank == 0) return serve(place, data, bytes, timeout_seconds, error);
    return ask(place, data, bytes, timeout_seconds, error);
}

// A file

// Writes rank 0's file: a Hello with the number of ranks, and the data.
static bool write_exchange(const CommPlace *place, const char *path, const void *data, int bytes, Error *error) {
    if (path_exists(path)) {
        return error_set(error,
                         "%s is there already: another run uses it, or left it; remove it, or choose another "
                         "--comm-file on every rank",
                         path);
    }
    size_t length = sizeof(Hello) + (size_t)bytes;
    char *content = allocate(length);
    Hello head = {{0}, 0, htonl((uint32_t)place->size)};
    memcpy(head.magic, MAGIC, sizeof(MAGIC));
    memcpy(content, &head, sizeof(head));
    memcpy(content + sizeof(head), data, (size_t)bytes);
    bool ok = write_file_atomic(path, content, length, error);
    free(content);
    return ok;
}

// Waits for rank 0's file. Returns its content, to be freed, which may be shorter; NULL with an
// error.
static char *await_exchange(const char *path, size_t length, size_t *read_bytes, double timeout, Error *error) {
    double deadline = seconds_now() + timeout;
    char *content;
    while (!(content = path_exists(path) ? read_file(path, length, read_bytes, error) : NULL)) {
        if (seconds_now() > deadline) {
            error_set(error,
                      "rank 0 has not written %s within %.4g s: check that it was started with the same "
                      "--comm-file, on a file system that all ranks see",
                      path, timeout);
            return NULL;
        }
        usleep(RETRY_MICROSECONDS);
    }
    return content;
}

// Refuses a head of a file that isn't rank 0's of this run.
static bool check_head(const CommPlace *place, const char *path, const Hello *head, Error *error) {
    if (memcmp(head->magic, MAGIC, sizeof(MAGIC)) != 0) {
        return error_set(
            error, "%s was not written by rank 0 of this program: choose another --comm-file on every rank", path);
    }
    if (ntohl(head->size) == (uint32_t)place->size) return true;
    return error_set(error,
                     "rank %d was started as one of %d ranks and rank 0 as one of %u: give all the same WORLD_SIZE",
                     place->rank, place->size, ntohl(head->size));
}

bool comm_exchange_file(const CommPlace *place, const char *path, void *data, int bytes, double timeout_seconds,
                        Error *error) {
    if (place->rank == 0) return write_exchange(place, path, data, bytes, error);
    size_t length = sizeof(Hello) + (size_t)bytes, read_bytes = 0;
    char *content = await_exchange(path, length, &read_bytes, timeout_seconds, error);
    if (!content) return false;
    Hello head = {{0}, 0, 0};
    if (read_bytes == length) memcpy(&head, content, sizeof(head));
    bool ok = check_head(place, path, &head, error);
    if (ok) memcpy(data, content + sizeof(head), (size_t)bytes);
    free(content);
    return ok;
}
