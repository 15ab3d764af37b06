/*
Collectives against loops over what every rank is known to hold, and what becomes of ranks that
hang, are killed, or differ. Under mpirun: the collectives, and a model's steps over them, on that
many ranks. Without: one process, the environment, the exchanges over TCP and by a file between
forked processes, and programs that this one starts with mpirun (`test_comm hang` and the like).
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "llmc/comm/internal.h"
#include "llmc/base/random.h"
#include "llmc/model/gpt.h"
#include "llmc/model/optimizer.h"

static Comm *comm; // of the tests under mpirun
static char program[4096];

// -------------------------------------------------------------------------------------------------
// Collectives

static const int64_t COUNTS[] = {0, 1, 2, 31, 1000, 5000, 70001, 700001};
enum { NUM_COUNTS = sizeof(COUNTS) / sizeof(COUNTS[0]), GUARD = 5 };
static const float UNTOUCHED = 12345.5f;

// What `rank` holds at `index` in test number `stream`: both signs and many magnitudes, so that the
// order of a sum shows.
static float value_of(int rank, uint64_t stream, int64_t index) {
    uint64_t at = (uint64_t)index;
    float exponent = random_uniform(2, stream * 64 + (uint64_t)rank, at);
    return ldexpf(random_uniform(1, stream * 64 + (uint64_t)rank, at) - 0.5f, (int)(exponent * 20));
}

static float sum_of(uint64_t stream, int64_t index, Format wire) {
    float sum = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        float value = value_of(rank, stream, index);
        if (wire == FORMAT_BF16) value = mx_from_bf16(mx_to_bf16(value));
        sum = rank == 0 ? value : sum + value;
    }
    return sum;
}

// Ranges of unequal length, rank `pattern` % size with none, in falling order, with gaps between.
static CommRange *uneven_ranges(int64_t count, int pattern, int64_t *extent) {
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    *extent = GUARD;
    for (int rank = comm->size - 1; rank >= 0; rank--) {
        int64_t length = rank == pattern % comm->size ? 0 : count / (rank + 1 + pattern);
        ranges[rank] = (CommRange){*extent, length};
        *extent += length + GUARD;
    }
    return ranges;
}

static void check_floats(const float *values, const float *expected, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (memcmp(&values[i], &expected[i], sizeof(float)) != 0) {
            fail_msg("rank %d, value %lld of %lld: %.9g, not %.9g", comm->rank, (long long)i, (long long)count,
                     values[i], expected[i]);
        }
    }
}

static void test_all_reduce_sum(void **state) {
    (void)state;
    for (int test = 0; test < NUM_COUNTS; test++) {
        int64_t count = COUNTS[test];
        float *values = allocate((size_t)(count + GUARD) * sizeof(float)),
              *expected = allocate((size_t)(count + GUARD) * 4);
        for (int64_t i = 0; i < count + GUARD; i++) {
            values[i] = i < count ? value_of(comm->rank, (uint64_t)test, i) : UNTOUCHED;
            expected[i] = i < count ? sum_of((uint64_t)test, i, FORMAT_FP32) : UNTOUCHED;
        }
        comm->all_reduce_sum(comm, values, count);
        check_floats(values, expected, count + GUARD);
        free(values);
        free(expected);
    }
}

static void test_reduce_scatter(void **state) {
    (void)state;
    for (int test = 0; test < 3 * NUM_COUNTS * 2; test++) {
        Format wire = test % 2 ? FORMAT_BF16 : FORMAT_FP32;
        int64_t count = COUNTS[test / 2 % NUM_COUNTS], extent;
        int pattern = test / 2 / NUM_COUNTS;
        CommRange *ranges = uneven_ranges(count, pattern, &extent);
        if (pattern == 2) {
            extent = count + GUARD;
            comm_split(ranges, comm->size, count, 32);
        }
        float *values = allocate((size_t)extent * sizeof(float)), *expected = allocate((size_t)extent * sizeof(float));
        for (int64_t i = 0; i < extent; i++) {
            values[i] = expected[i] = value_of(comm->rank, 99, i);
        }
        CommRange own = ranges[comm->rank];
        for (int64_t i = own.offset; i < own.offset + own.count; i++) {
            expected[i] = comm->size == 1 ? values[i] : sum_of(99, i, wire);
        }
        comm->reduce_scatter(comm, values, ranges, wire);
        check_floats(values, expected, extent);
        free(ranges);
        free(values);
        free(expected);
    }
}

static void test_all_gather(void **state) {
    (void)state;
    for (int test = 0; test < 2 * NUM_COUNTS; test++) {
        int64_t extent;
        CommRange *ranges = uneven_ranges(4 * COUNTS[test / 2], test % 2, &extent);
        uint8_t *data = allocate((size_t)extent), *expected = allocate((size_t)extent);
        memset(data, 0xEE, (size_t)extent);
        memset(expected, 0xEE, (size_t)extent);
        for (int rank = 0; rank < comm->size; rank++) {
            for (int64_t i = 0; i < ranges[rank].count; i++) {
                uint32_t words[4];
                philox(words, 5, (uint64_t)rank, (uint64_t)i);
                expected[ranges[rank].offset + i] = (uint8_t)words[0];
            }
        }
        CommRange own = ranges[comm->rank];
        memcpy(data + own.offset, expected + own.offset, (size_t)own.count);
        comm->all_gather(comm, data, ranges);
        assert_memory_equal(data, expected, (size_t)extent);
        free(ranges);
        free(data);
        free(expected);
    }
}

static void test_doubles(void **state) {
    (void)state;
    double sums[3], largest[3], expected_sum[3] = {0}, expected_largest[3] = {-INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        sums[i] = largest[i] = value_of(comm->rank, 4, i) / 3.0;
        for (int rank = 0; rank < comm->size; rank++) {
            double value = value_of(rank, 4, i) / 3.0;
            expected_sum[i] = rank == 0 ? value : expected_sum[i] + value;
            if (value > expected_largest[i]) expected_largest[i] = value;
        }
    }
    if (comm->rank == comm->size / 2) largest[2] = NAN;
    comm_sum_doubles(comm, sums, 3);
    comm_max_doubles(comm, largest, 3);
    comm_max_doubles(comm, NULL, 0);
    assert_memory_equal(sums, expected_sum, sizeof(sums));
    assert_memory_equal(largest, expected_largest, 2 * sizeof(double));
    assert_true(isnan(largest[2]));
}

// Collectives beside the backend's work: there when waited for, NCCL's stand-in's no sooner, and a
// slot may be waited for that nothing has used.
static void test_fork(void **state) {
    (void)state;
    enum { COUNT = 1000, ROUNDS = 3 };
    bool is_nccl = strcmp(comm->name, "nccl") == 0;
    float rounded[2][COUNT];
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    comm_split(ranges, comm->size, COUNT, 1);
    CommRange own = ranges[comm->rank];
    float *sums[2] = {allocate(COUNT * sizeof(float)), allocate(COUNT * sizeof(float))};
    float ranks = (float)comm->size, sum_of_ranks = ranks * (ranks - 1) / 2;
    for (int round = 0; round < ROUNDS; round++) {
        for (int slot = 0; slot < 2; slot++) {
            for (int i = 0; i < COUNT; i++) {
                sums[slot][i] = (float)(comm->rank + slot + round + i);
                rounded[slot][i] = (float)comm->rank;
            }
            comm->fork(comm);
            comm->all_reduce_sum(comm, sums[slot], COUNT / 2);
            comm->all_reduce_sum(comm, sums[slot] + COUNT / 2, COUNT / 4);
            comm->reduce_scatter(comm, rounded[slot], ranges, FORMAT_BF16);
            comm->all_reduce_sum(comm, sums[slot] + COUNT * 3 / 4, COUNT / 4);
            comm->join(comm, slot);
        }
        comm->wait(comm, COMM_SLOTS - 1);
        for (int slot = 0; slot < 2; slot++) {
            assert_int_equal(isnan(sums[slot][0]) && isnan(sums[slot][COUNT - 1]), is_nccl);
            comm->wait(comm, slot);
            for (int i = 0; i < COUNT; i++) {
                assert_true(sums[slot][i] == sum_of_ranks + ranks * (float)(slot + round + i));
            }
            for (int64_t i = own.offset; i < own.offset + own.count; i++) {
                assert_true(rounded[slot][i] == sum_of_ranks);
            }
        }
    }
    free(ranges);
    free(sums[0]);
    free(sums[1]);
}

enum { SEQUENCES = 2, TOKENS = 32, VOCABULARY = 256 };

// Makes a model at stage 1 all of whose weights are gathered beside compute.
static void make_model(GPT *model) {
    GPTConfig config = {.layers = 3, .heads = 2, .channels = 64, .max_seq_len = TOKENS, .vocab_size = VOCABULARY};
    Sharding sharding = {.comm = comm, .zero = 1, .gather = GATHER_MX, .reduce = FORMAT_FP32};
    Recipe recipe;
    Error error;
    assert_true(recipe_named(&recipe, "mxfp8", &error));
    recipe.quantize_lm_head = true;
    gpt_create(model, config, &recipe, backend_cpu(), SEQUENCES, TOKENS, true, &sharding);
    gpt_init(model, INIT_GPT2, 1);
    gpt_refresh(model);
}

// Trains a model. Weights and gradients that haven't been waited for are NaN with NCCL's stand-in;
// where they are used, so is the loss or the gradients' norm.
static void test_steps(void **state) {
    (void)state;
    OptimizerOptions options = {.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .grad_clip = 1};
    int32_t tokens[SEQUENCES * TOKENS];
    for (int i = 0; i < SEQUENCES * TOKENS; i++) {
        tokens[i] = (i * 37 + comm->rank) % VOCABULARY;
    }
    GPT model;
    make_model(&model);
    model.params.is_last_micro_batch = true;
    for (options.step = 1; options.step <= 3; options.step++) {
        gpt_clear_gradients(&model);
        gpt_loss_and_gradients(&model, tokens, tokens, SEQUENCES, TOKENS, 1.0 / comm->size);
        exchange_reduce(&model.params);
        double loss = gpt_take_loss(&model), norm = optimizer_gradient_norm(&model.params, model.backend);
        printf("    step %d: loss %.6f, norm of gradients %.6f\n", (int)options.step, loss, norm);
        assert_true(isfinite(loss) && isfinite(norm));
        optimizer_step(&model.params, model.backend, options, norm);
    }
    gpt_free(&model);
}

// A rank leaves a barrier only when the last has come: rank 0 comes 50 ms late. All ranks are on
// one machine, which has one clock.
static void test_barrier(void **state) {
    (void)state;
    if (comm->rank == 0) usleep(50000);
    double entered = comm->rank == 0 ? seconds_now() : 0;
    comm->barrier(comm);
    double left = seconds_now();
    comm_max_doubles(comm, &entered, 1);
    printf("    barrier left %.4f s after the last had come\n", left - entered);
    assert_true(left >= entered);
}

static void test_bytes_sent(void **state) {
    (void)state;
    int64_t others = comm->size - 1, count = 1 << 16;
    float *values = allocate((size_t)count * sizeof(float));
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    comm_split(ranges, comm->size, count, 1);
    int64_t start = comm->bytes_sent;
    comm->reduce_scatter(comm, values, ranges, FORMAT_FP32);
    int64_t fp32 = comm->bytes_sent - start;
    comm->reduce_scatter(comm, values, ranges, FORMAT_BF16);
    int64_t bf16 = comm->bytes_sent - start - fp32;
    comm->all_gather(comm, values, ranges);
    int64_t gathered = comm->bytes_sent - start - fp32 - bf16;
    int64_t own = ranges[comm->rank].count;
    bool ring = strcmp(comm->name, "nccl") == 0;
    assert_int_equal(fp32, ring ? 4 * count * others / comm->size : others ? 4 * (count - own) : 0);
    assert_int_equal(bf16, others ? 2 * (count - own) : 0);
    assert_int_equal(gathered, ring ? count * others / comm->size : others * own);
    printf("    bytes sent by rank %d of %d: reduce-scatter of %lld floats %lld, in BF16 %lld, all-gather %lld\n",
           comm->rank, comm->size, (long long)count, (long long)fp32, (long long)bf16, (long long)gathered);
    free(values);
    free(ranges);
}

static void test_check_same(void **state) {
    (void)state;
    comm_check_same(comm, "options", "");
    comm_check_same(comm, "options", "--layers 4 --heads 4");
}

static void test_split(void **state) {
    (void)state;
    for (int size = 1; size < 9; size++) {
        for (int64_t count = 0; count < 200; count += 7) {
            CommRange ranges[9];
            comm_split(ranges, size, count, 32);
            int64_t next = 0;
            for (int rank = 0; rank < size; rank++) {
                assert_int_equal(ranges[rank].offset, next);
                assert_true(ranges[rank].count >= 0 && ranges[rank].count <= (count / 32 / size + 1) * 32);
                next += ranges[rank].count;
                assert_true(next % 32 == 0 || next == count);
            }
            assert_int_equal(next, count);
        }
    }
}

static void say_description(void **state) {
    (void)state;
    Error error;
    int local;
    assert_true(comm_local_rank(&local, &error));
    printf("    %s: %s, rank %d, local rank %d\n", comm->name, comm->description, comm->rank, local);
    assert_true(local >= (comm->size == 1 ? -1 : 0) && local < comm->size);
}

static const struct CMUnitTest collectives[] = {
    cmocka_unit_test(say_description),     cmocka_unit_test(test_split),      cmocka_unit_test(test_all_reduce_sum),
    cmocka_unit_test(test_reduce_scatter), cmocka_unit_test(test_all_gather), cmocka_unit_test(test_doubles),
    cmocka_unit_test(test_barrier),        cmocka_unit_test(test_bytes_sent), cmocka_unit_test(test_fork),
    cmocka_unit_test(test_steps),          cmocka_unit_test(test_check_same),
};

// -------------------------------------------------------------------------------------------------
// What ranks started by the tests below do

static void ignore(int signal) { (void)signal; }

// test_comm_nccl's ranks take NCCL's Comm, and meet by a file that only this job has.
static void use_nccl(CommOptions *options) {
    static char path[128];
    options->cuda = strcmp(program_invocation_short_name, "test_comm_nccl") == 0;
    if (options->cuda) {
        snprintf(path, sizeof(path), "/tmp/test_comm_nccl_%d", (int)getppid()); // mpirun's
        options->file = path;
    }
}

static Comm *join(double timeout) {
    Error error;
    const char *piece = getenv("COMM_PIECE_BYTES");
    CommOptions options = {.timeout_seconds = timeout, .piece_bytes = piece ? atoi(piece) : 0};
    use_nccl(&options);
    Comm *joined = comm_create(&options, &error);
    if (!joined) die("%s", error.message);
    signal(SIGTERM, ignore); // as the trainer, which finishes its step first
    return joined;
}

// From here on nothing that NCCL's stand-in does ends (`hang`), or it refuses what it hasn't done
// yet (`connected`).
static void set_nccl(const char *what) {
    if (setenv("NCCL_STANDIN", what, 1) != 0) die("the environment can't be changed");
}

// Reduces for as long as it lasts; rank 1 sends itself `number` after `delay` seconds.
static int act_fault(int number, double delay) {
    comm = join(1.0);
    float *values = allocate(4 << 20);
    if (comm->rank == 1) {
        pid_t parent = getpid();
        if (fork() == 0) {
            usleep((useconds_t)(delay * 1e6));
            kill(parent, number);
            _exit(0);
        }
    }
    for (;;) {
        comm->all_reduce_sum(comm, values, 100);
        comm->all_reduce_sum(comm, values, 1 << 20);
    }
}

enum { HANGING_ROUNDS = 100000 };

static int act_nccl_hang(void) {
    comm = join(1.0);
    set_nccl("hang");
    float values[100] = {0};
    for (int i = 0; i < HANGING_ROUNDS; i++) {
        comm->all_reduce_sum(comm, values, 100);
    }
    return 1; // isn't reached
}

// In BF16, forked.
static int act_nccl_hang_beside(void) {
    comm = join(1.0);
    set_nccl("hang");
    float values[100] = {0};
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    comm_split(ranges, comm->size, 100, 1);
    for (int i = 0; i < HANGING_ROUNDS; i++) {
        comm->fork(comm);
        comm->reduce_scatter(comm, values, ranges, FORMAT_BF16);
        comm->join(comm, 0);
        comm->wait(comm, 0);
    }
    return 1; // isn't reached
}

// More collectives than the GPU's queue of them takes, before it has ended the first. They are
// begun within a second unless the machine is busy.
static int act_nccl_ahead(void) {
    comm = join(5.0);
    set_nccl("hang");
    float values[8] = {0};
    for (int slot = 0; slot < 300; slot++) {
        comm->fork(comm);
        for (int i = 0; i < 8; i++) {
            comm->all_reduce_sum(comm, &values[i], 1);
        }
        comm->join(comm, slot);
    }
    printf("the host is ahead\n");
    comm->wait(comm, 0);
    comm->barrier(comm);
    return 1; // isn't reached
}

// What ranks agree on, in the host's memory. The second time there are collectives beside compute,
// and more to agree on than before.
static int act_nccl_agree(bool beside) {
    comm = join(1.0);
    comm->barrier(comm);
    set_nccl("hang");
    float values[100] = {0};
    if (beside) {
        comm->fork(comm);
        comm->all_reduce_sum(comm, values, 100);
        comm->join(comm, 0);
    }
    comm_gather(comm, values, beside ? sizeof(values) : sizeof(double));
    return 1; // isn't reached
}

static int act_nccl_connected(void) {
    const int64_t parts[] = {1, 1 << 20};
    comm = join(60);
    if (comm->bytes_sent != 0) die("what connects ranks is counted as sent");
    set_nccl("connected");
    float *values = allocate((size_t)(comm->size * parts[1]) * sizeof(float));
    CommRange *ranges = allocate((size_t)comm->size * sizeof(*ranges));
    for (int i = 0; i < 2; i++) {
        int64_t part = parts[i];
        for (int rank = 0; rank < comm->size; rank++) {
            ranges[rank] = (CommRange){rank * part, part};
        }
        comm->all_reduce_sum(comm, values, part * comm->size);
        comm->reduce_scatter(comm, values, ranges, FORMAT_FP32);
        for (int rank = 0; rank < comm->size; rank++) {
            ranges[rank] = (CommRange){rank * part * (int64_t)sizeof(float), part * (int64_t)sizeof(float)};
        }
        comm->all_gather(comm, values, ranges);
    }
    free(ranges);
    free(values);
    comm->close(comm);
    return 0;
}

// NCCL fails at the start, or at the first collective after it.
static int act_nccl_fails(const char *how, bool at_start) {
    float value = 0;
    if (at_start) set_nccl(how);
    comm = join(60);
    set_nccl(how);
    comm->all_reduce_sum(comm, &value, 1);
    return 1; // isn't reached
}

static int act_nccl_die(void) {
    comm = join(60);
    set_nccl("hang");
    float values[100] = {0};
    comm->all_reduce_sum(comm, values, 100);
    die("this rank dies");
}

static int act_differs(void) {
    comm = join(5.0);
    char *text = format_string("%s --learning-rate %s",
                               "--model gpt2-124M --total-batch-size 524288 --max-tokens 10G --recipe mxfp8",
                               comm->rank == 2 ? "1e-3" : "6e-4");
    comm_check_same(comm, "options", text);
    return 0;
}

// --world-size contradicts the launcher.
static int act_contradict(void) {
    Error error;
    if (comm_create(&(CommOptions){.world_size = 2}, &error)) return 1;
    die("%s", error.message);
}

static int act_bench(void) {
    comm = join(60);
    enum { REPEATS = 2000 };
    float *values = allocate((8 << 20) * sizeof(float));
    for (int64_t count = 1; count <= 8 << 20; count *= 8) {
        int repeats = count < 4096 ? REPEATS : count < 1 << 19 ? 200 : 20;
        double total = 0, least = INFINITY;
        for (int i = 0; i < repeats; i++) {
            double start = seconds_now();
            comm->all_reduce_sum(comm, values, count);
            double seconds = seconds_now() - start;
            total += seconds;
            if (seconds < least) least = seconds;
        }
        if (comm->rank == 0) {
            double sent = 2.0 * (double)count * 4 * (comm->size - 1) / comm->size;
            printf("all_reduce_sum of %8lld floats: mean %8.1f us, least %8.1f us, %.2f GB/s sent by each rank\n",
                   (long long)count, total / repeats * 1e6, least * 1e6, 1e-9 * sent / least);
        }
    }
    free(values);
    comm->close(comm);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Faults, seen from outside

// Runs this program's `what` on 3 ranks; returns the exit code, or minus a signal.
static int run_ranks_by_mpi(const char *what, char *output, size_t capacity, double *seconds) {
    char *command = format_string("ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 " // Open MPI's
                                  "timeout 60 mpirun --oversubscribe --allow-run-as-root -np 3 %s %s 2>&1",
                                  program, what);
    double start = seconds_now();
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t length = fread(output, 1, capacity - 1, pipe);
    output[length] = 0;
    int status = pclose(pipe);
    *seconds = seconds_now() - start;
    free(command);
    printf("    %s: exit code %d after %.2f s\n%s", what, WEXITSTATUS(status), *seconds, output);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static int count_of(const char *text, const char *word) {
    int count = 0;
    for (const char *at = text; (at = strstr(at, word)); at++) {
        count++;
    }
    return count;
}

static void skip_without_mpi(void) {
#ifndef HAVE_MPI
    skip();
#endif
    if (system("command -v mpirun >/dev/null") != 0) skip();
}

static char output[1 << 16];

static void test_hang(void **state) {
    (void)state;
    skip_without_mpi();
    double seconds;
    assert_int_equal(run_ranks_by_mpi("hang", output, sizeof(output), &seconds), EXIT_RANK_LOST);
    assert_int_equal(count_of(output,
                              ": rank 1 has not answered for 1 s during all_reduce_sum: it hangs or was killed; the "
                              "last checkpoint is whole\n"),
                     2);
    assert_true(strstr(output, "test_comm, rank 0: ") && strstr(output, "test_comm, rank 2: "));
    assert_true(seconds < 15);
}

static void test_killed(void **state) {
    (void)state;
    skip_without_mpi();
    double seconds;
    assert_int_not_equal(run_ranks_by_mpi("killed", output, sizeof(output), &seconds), 0);
    assert_int_equal(count_of(output,
                              ": rank 1 ended during all_reduce_sum: it was killed or gave up; the last checkpoint is "
                              "whole\n"),
                     2);
    assert_true(seconds < 15);
}

// Which rank is missing NCCL doesn't tell; all say that one is.
static void check_nccl_hang(const char *what, const char *doing, int timeout) {
    skip_without_mpi();
    double seconds;
    assert_int_equal(run_ranks_by_mpi(what, output, sizeof(output), &seconds), EXIT_RANK_LOST);
    char *sentence = format_string(
        ": a rank has not answered for %d s during %s: it hangs or was killed; the last checkpoint is whole\n", timeout,
        doing);
    assert_int_equal(count_of(output, sentence), 3);
    free(sentence);
    assert_true(seconds < timeout + 14);
}

static void test_nccl_hang(void **state) {
    (void)state;
    check_nccl_hang("nccl-hang", "all_reduce_sum", 1);
}

static void test_nccl_hang_beside(void **state) {
    (void)state;
    check_nccl_hang("nccl-hang-beside", "reduce_scatter", 1);
}

// The host isn't kept from what comes after many forks.
static void test_nccl_ahead(void **state) {
    (void)state;
    check_nccl_hang("nccl-ahead", "all_reduce_sum", 5);
    assert_int_equal(count_of(output, "the host is ahead\n"), 3);
}

// Other ranks are waited for where the watcher isn't kept from seeing it.
static void test_nccl_agree(void **state) {
    (void)state;
    check_nccl_hang("nccl-agree", "all_gather", 1);
    check_nccl_hang("nccl-agree-beside", "all_reduce_sum", 1);
}

// What takes memory has taken it when there is a Comm.
static void test_nccl_connected(void **state) {
    (void)state;
    skip_without_mpi();
    double seconds;
    assert_int_equal(run_ranks_by_mpi("nccl-connected", output, sizeof(output), &seconds), 0);
}

// What fails of the system is this machine's fault at the start, and another's later.
static void test_nccl_fails(void **state) {
    (void)state;
    static const struct {
        const char *what;
        int code;
        const char *sentence;
    } CASES[] = {
        {"nccl-fails-at-start", EXIT_BAD_INPUT,
         "NCCL failed at the start: an error (no space left in /dev/shm); NCCL_DEBUG=INFO says more\n"},
        {"nccl-fails", EXIT_RANK_LOST,
         "a rank ended, or the network to it failed, during all_reduce_sum (NCCL: an error: no space left in "
         "/dev/shm); the last checkpoint is whole\n"},
        {"nccl-loses-at-start", EXIT_RANK_LOST,
         "a rank ended, or the network to it failed, during the start (NCCL: an error: connection closed); "},
    };
    skip_without_mpi();
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        double seconds;
        assert_int_equal(run_ranks_by_mpi(CASES[i].what, output, sizeof(output), &seconds), CASES[i].code);
        assert_non_null(strstr(output, CASES[i].sentence));
    }
}

// While a collective runs, which the watcher asks CUDA about.
static void test_nccl_die(void **state) {
    (void)state;
    skip_without_mpi();
    double seconds;
    assert_int_equal(run_ranks_by_mpi("nccl-die", output, sizeof(output), &seconds), EXIT_BAD_INPUT);
    assert_non_null(strstr(output, "test_comm_nccl: this rank dies\n"));
    assert_null(strstr(output, "unloaded"));
    assert_true(seconds < 15);
}

// Rank 1 doesn't come, and the others are kept inside NCCL.
static void test_nccl_stopped(void **state) {
    (void)state;
    skip_without_mpi();
    double seconds;
    assert_int_equal(run_ranks_by_mpi("hang", output, sizeof(output), &seconds), EXIT_RANK_LOST);
    assert_non_null(strstr(output, "test_comm_nccl, rank 0: a rank has not answered for 1 s during all_reduce_sum: "));
    assert_non_null(strstr(output, "test_comm_nccl, rank 2: a rank has not answered for 1 s during all_reduce_sum: "));
    assert_true(seconds < 15);
}

static void test_differs(void **state) {
    (void)state;
    skip_without_mpi();
    double seconds;
    assert_int_equal(run_ranks_by_mpi("differs", output, sizeof(output), &seconds), EXIT_BAD_INPUT);
    assert_int_equal(count_of(output, "rank 2 and rank 0 differ in their options: "), 1);
    assert_true(strstr(output, "--learning-rate 1e-3\" and ") && strstr(output, "--learning-rate 6e-4\"; start"));
    assert_int_equal(run_ranks_by_mpi("contradict", output, sizeof(output), &seconds), EXIT_BAD_INPUT);
    assert_non_null(strstr(output, "--world-size is 2 and MPI has started 3 ranks: start them with mpirun -np 2"));
}

// -------------------------------------------------------------------------------------------------
// One process, the environment

static void test_single(void **state) {
    (void)state;
    Error error;
    comm = comm_create(&(CommOptions){0}, &error);
    assert_true(comm == comm_single());
    assert_true(comm_create(&(CommOptions){.cuda = true}, &error) == comm);
    assert_int_equal(comm->size, 1);
}

static void test_single_sends_nothing(void **state) {
    (void)state;
    assert_int_equal(comm->bytes_sent, 0);
    comm->close(comm);
}

static const char *const VARIABLES[] = {
    "RANK",         "WORLD_SIZE",   "LOCAL_RANK",           "MASTER_ADDR",   "MASTER_PORT",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_JOB_ID"};

// Sets the variables of "NAME=value NAME=value", and none else of those that matter.
static void set_environment(const char *text) {
    for (size_t i = 0; i < sizeof(VARIABLES) / sizeof(VARIABLES[0]); i++) {
        unsetenv(VARIABLES[i]);
    }
    char *copy = format_string("%s", text);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) {
        char *equals = strchr(word, '=');
        *equals = 0;
        setenv(word, equals + 1, 1);
    }
    free(copy);
}

static void test_place(void **state) {
    (void)state;
    static const struct {
        const char *environment;
        int rank, size, port;
        const char *host;
    } good[] = {
        {"", 0, 1, 0, NULL},
        {"RANK=0 WORLD_SIZE=1", 0, 1, 0, NULL},
        {"RANK=2 WORLD_SIZE=4 MASTER_ADDR=node7 MASTER_PORT=29500", 2, 4, 29500, "node7"},
        {"SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_JOB_ID=1234567 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1", 3, 8, 24567,
         "10.0.0.1"},
        {"SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=4 MASTER_ADDR=a MASTER_PORT=5", 3, 4, 5, "a"},
        {"SLURM_PROCID=0 SLURM_NTASKS=8 RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=5", 1, 2, 5, "a"},
    };
    static const struct {
        const char *environment, *sentence;
    } bad[] = {
        {"RANK=1", "WORLD_SIZE isn't"},
        {"WORLD_SIZE=2", "RANK isn't"},
        {"RANK=2 WORLD_SIZE=2", "RANK is \"2\" and must be a whole number from 0 to 1"},
        {"RANK=-1 WORLD_SIZE=2", "RANK is \"-1\""},
        {"RANK=0 WORLD_SIZE=two", "WORLD_SIZE is \"two\""},
        {"RANK=0 WORLD_SIZE=99999999999", "WORLD_SIZE is \"99999999999\""},
        {"RANK=0 WORLD_SIZE=2 MASTER_PORT=1", "MASTER_ADDR isn't set"},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "MASTER_PORT isn't set"},
        {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65536", "MASTER_PORT is \"65536\""},
        {"SLURM_PROCID=1 SLURM_NTASKS=2", "MASTER_ADDR isn't set"},
        {"SLURM_PROCID=1", "SLURM_NTASKS isn't"},
    };
    Error error;
    CommPlace place;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        set_environment(good[i].environment);
        if (!comm_find_place(&place, true, &error)) fail_msg("%s: %s", good[i].environment, error.message);
        assert_int_equal(place.rank, good[i].rank);
        assert_int_equal(place.size, good[i].size);
        assert_int_equal(place.port, good[i].port);
        if (good[i].host) assert_string_equal(place.host, good[i].host);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        set_environment(bad[i].environment);
        assert_false(comm_find_place(&place, true, &error));
        printf("    %s: %s\n", bad[i].environment, error.message);
        assert_non_null(strstr(error.message, bad[i].sentence));
    }
    set_environment("");
}

static void test_local_rank(void **state) {
    (void)state;
    Error error;
    int local = -1;
    set_environment("SLURM_LOCALID=3");
    assert_true(comm_local_rank(&local, &error) && local == 3);
    set_environment("SLURM_LOCALID=3 LOCAL_RANK=2");
    assert_true(comm_local_rank(&local, &error) && local == 2);
    set_environment("LOCAL_RANK=first");
    assert_false(comm_local_rank(&local, &error));
    assert_non_null(strstr(error.message, "LOCAL_RANK is \"first\""));
    set_environment("");
    assert_true(comm_local_rank(&local, &error) && local == -1);
}

static void test_own_gpu(void **state) {
    (void)state;
    static const struct {
        const char *visible;
        int local_rank;
        const char *own; // NULL: refused
    } CASES[] = {{NULL, -1, ""},    {"2,3", -1, ""},    {NULL, 0, "0"},   {NULL, 5, "5"},
                 {"2", 0, ""},      {"2", 3, ""},       {"", 1, ""},      {"4,5,6", 0, "4"},
                 {"4,5,6", 2, "6"}, {"4,5,6", 3, NULL}, {"4,5", 9, NULL}, {"GPU-8a,MIG-7b", 1, "MIG-7b"}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Error error;
        char device[32];
        bool found = comm_own_gpu(device, sizeof(device), CASES[i].visible, CASES[i].local_rank, &error);
        assert_int_equal(found, CASES[i].own != NULL);
        if (found) assert_string_equal(device, CASES[i].own);
        if (!found) assert_non_null(strstr(error.message, CASES[i].visible));
    }
}

static void check_refused(CommOptions options, const char *sentence) {
    Error error;
    assert_null(comm_create(&options, &error));
    printf("    %s\n", error.message);
    assert_non_null(strstr(error.message, sentence));
}

static void test_create_refused(void **state) {
    (void)state;
    set_environment("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500");
    check_refused((CommOptions){0}, "ranks on CPUs need mpirun: start them with mpirun -np 2");
    set_environment("RANK=5 WORLD_SIZE=2");
    check_refused((CommOptions){0}, "RANK is \"5\"");
    check_refused((CommOptions){.cuda = true}, "RANK is \"5\"");
    set_environment("RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost");
    check_refused((CommOptions){.cuda = true}, comm_nccl_version() ? "MASTER_PORT isn't set" : "NCCL");
    set_environment("");
    check_refused((CommOptions){.cuda = true, .world_size = 2}, comm_nccl_version() ? "--world-size is 2" : "NCCL");
    setenv("PMI_SIZE", "0", 1);
    check_refused((CommOptions){0}, "PMI_SIZE is \"0\"");
    unsetenv("PMI_SIZE");
    printf("    NCCL's version here: %d\n", comm_nccl_version());
}

// -------------------------------------------------------------------------------------------------
// Exchanges between processes

enum { MAX_PROCESSES = 6 };
typedef struct {
    CommPlace place;
    const char *path; // of a file; NULL: TCP
    double delay, timeout;
    bool starts; // else this rank is missing
} Participant;

static uint8_t id_byte(int i) { return (uint8_t)(i * 37 + 11); }

// Lets every participant exchange 128 bytes, in a process of its own; messages (count): "" where it
// got them.
static void exchange(const Participant *participants, int count, char messages[][1024]) {
    int pipes[MAX_PROCESSES][2];
    pid_t processes[MAX_PROCESSES];
    fflush(NULL);
    for (int p = 0; p < count; p++) {
        const Participant *one = &participants[p];
        messages[p][0] = 0;
        if (!one->starts) continue;
        assert_int_equal(pipe(pipes[p]), 0);
        processes[p] = fork();
        assert_true(processes[p] >= 0);
        if (processes[p] > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        usleep((useconds_t)(one->delay * 1e6));
        Error error = {""};
        uint8_t id[COMM_ID_BYTES] = {0};
        for (int i = 0; i < COMM_ID_BYTES && one->place.rank == 0; i++) {
            id[i] = id_byte(i);
        }
        bool ok = one->path ? comm_exchange_file(&one->place, one->path, id, sizeof(id), one->timeout, &error)
                            : comm_exchange_tcp(&one->place, id, sizeof(id), one->timeout, &error);
        for (int i = 0; i < COMM_ID_BYTES && ok; i++) {
            if (id[i] != id_byte(i)) ok = error_set(&error, "byte %d is %d", i, id[i]);
        }
        if (write(pipes[p][1], error.message, ok ? 0 : strlen(error.message)) < 0) _exit(1);
        _exit(0);
    }
    for (int p = 0; p < count; p++) {
        if (!participants[p].starts) continue;
        close(pipes[p][1]);
        ssize_t length = read(pipes[p][0], messages[p], 1023);
        messages[p][length > 0 ? length : 0] = 0;
        close(pipes[p][0]);
        int status;
        waitpid(processes[p], &status, 0);
        assert_int_equal(status, 0);
        if (messages[p][0]) printf("    rank %d: %s\n", participants[p].place.rank, messages[p]);
    }
}

static int free_port(void) {
    int one = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof(address);
    assert_int_equal(bind(one, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(getsockname(one, (struct sockaddr *)&address, &bytes), 0);
    close(one);
    return ntohs(address.sin_port);
}

static void make_participants(Participant *participants, int size, const char *path, double timeout) {
    int port = free_port();
    for (int rank = 0; rank < size; rank++) {
        participants[rank] = (Participant){{rank, size, "localhost", port}, path, 0, timeout, true};
    }
}

static char messages[MAX_PROCESSES][1024];

static void check_all_silent(int count) {
    for (int p = 0; p < count; p++) {
        assert_string_equal(messages[p], "");
    }
}

static void check_all_say(int count, const char *sentence) {
    for (int p = 0; p < count; p++) {
        if (!strstr(messages[p], sentence)) {
            fail_msg("process %d says \"%s\", not \"%s\"", p, messages[p], sentence);
        }
    }
}

static void test_tcp(void **state) {
    (void)state;
    static const char *const hosts[] = {"localhost", "127.0.0.1", "::1"};
    Participant participants[MAX_PROCESSES];
    for (int size = 2; size <= MAX_PROCESSES; size += 2) {
        for (size_t host = 0; host < 3; host++) {
            make_participants(participants, size, NULL, 10);
            bool ipv6 = access("/proc/net/if_inet6", R_OK) == 0 && system("grep -qs . /proc/net/if_inet6") == 0;
            if (host == 2 && !ipv6) continue;
            for (int p = 0; p < size; p++) {
                participants[p].place.host = hosts[host];
                participants[p].delay = p == 0 ? 0.2 * (double)host : 0; // rank 0 comes late
            }
            exchange(participants, size, messages);
            check_all_silent(size);
        }
    }
}

static void test_tcp_missing_rank(void **state) {
    (void)state;
    Participant participants[4];
    make_participants(participants, 4, NULL, 1);
    participants[2].starts = false;
    exchange(participants, 4, messages);
    memcpy(messages[2], messages[3], sizeof(messages[2]));
    check_all_say(3, "rank 2 has not connected to rank 0 at localhost:");
}

static void test_tcp_wrong_port(void **state) {
    (void)state;
    Participant participants[2];
    make_participants(participants, 2, NULL, 0.5);
    participants[1].place.port = free_port();
    exchange(participants, 2, messages);
    assert_non_null(strstr(messages[0], "rank 1 has not connected"));
    assert_non_null(strstr(messages[1], "rank 1 can't reach rank 0 at localhost:"));
    assert_non_null(strstr(messages[1], "Connection refused; check that rank 0 was started, MASTER_ADDR, MASTER_PORT"));
    participants[1].place.host = "no-such-host.invalid";
    participants[0].starts = false;
    exchange(participants, 2, messages);
    assert_non_null(strstr(messages[1], "\"no-such-host.invalid\", can't be found"));
}

static void test_tcp_contradictions(void **state) {
    (void)state;
    Participant participants[3];
    make_participants(participants, 3, NULL, 5);
    participants[2].place.rank = 1;
    exchange(participants, 3, messages);
    check_all_say(3, "two processes were started as rank 1");
    make_participants(participants, 2, NULL, 5);
    participants[1].place.size = 3;
    exchange(participants, 2, messages);
    check_all_say(2, "rank 1 was started as one of 3 ranks and rank 0 as one of 2");
}

// Something listens at rank 0's port already; what isn't a rank connects to it.
static void test_tcp_strangers(void **state) {
    (void)state;
    Participant participants[2];
    make_participants(participants, 2, NULL, 1);
    int other = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)participants[0].place.port)};
    assert_int_equal(bind(other, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(other, 1), 0);
    participants[1].starts = false;
    exchange(participants, 1, messages);
    assert_non_null(strstr(messages[0], "choose another MASTER_PORT"));
    close(other);

    make_participants(participants, 2, NULL, 10);
    participants[1].delay = 0.5;
    pid_t stranger = fork();
    if (stranger == 0) {
        address.sin_port = htons((uint16_t)participants[0].place.port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        for (int attempt = 0; attempt < 40; attempt++) {
            int one = socket(AF_INET, SOCK_STREAM, 0);
            bool connected = connect(one, (struct sockaddr *)&address, sizeof(address)) == 0;
            if (connected && send(one, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 35, MSG_NOSIGNAL) > 0) _exit(0);
            close(one);
            usleep(10000);
        }
        _exit(1);
    }
    exchange(participants, 2, messages);
    int status;
    waitpid(stranger, &status, 0);
    assert_int_equal(status, 0);
    check_all_silent(2);
}

static void test_file(void **state) {
    (void)state;
    Participant participants[4];
    char path[] = "/tmp/test_comm_XXXXXX";
    assert_non_null(mkdtemp(path));
    char *file = format_string("%s/id", path);
    make_participants(participants, 4, file, 10);
    participants[0].delay = 0.2;
    exchange(participants, 4, messages);
    check_all_silent(4);

    participants[0].delay = 0;
    participants[1].starts = participants[2].starts = participants[3].starts = false;
    exchange(participants, 4, messages); // what the first left
    assert_non_null(strstr(messages[0], "is there already"));

    participants[0].starts = false;
    participants[1].starts = true;
    participants[1].place.size = 3;
    exchange(participants, 4, messages);
    assert_non_null(strstr(messages[1], "one of 3 ranks and rank 0 as one of 4"));
    participants[1].place.size = 4;
    Error error;
    assert_true(write_file_atomic(file, "something", 9, &error));
    exchange(participants, 4, messages);
    assert_non_null(strstr(messages[1], "was not written by rank 0"));
    assert_int_equal(unlink(file), 0);
    participants[1].timeout = 0.3;
    exchange(participants, 4, messages);
    assert_non_null(strstr(messages[1], "rank 0 has not written"));
    assert_non_null(strstr(messages[1], "--comm-file"));
    free(file);
    assert_true(remove_tree(path));
}

// One rank of an exchange over TCP, for test_two_hosts: test_comm tcp HOST PORT RANK.
static int act_tcp(char **arguments) {
    Error error;
    CommPlace place = {atoi(arguments[4]), 2, arguments[2], atoi(arguments[3])};
    uint8_t id[COMM_ID_BYTES] = {0};
    for (int i = 0; i < COMM_ID_BYTES && place.rank == 0; i++) {
        id[i] = id_byte(i);
    }
    if (!comm_exchange_tcp(&place, id, sizeof(id), 10, &error)) die("%s", error.message);
    return id[COMM_ID_BYTES - 1] == id_byte(COMM_ID_BYTES - 1) ? 0 : 1;
}

// Two network namespaces with a cable between them are two hosts as far as TCP can tell. Needs
// root.
static void test_two_hosts(void **state) {
    (void)state;
    char *names = format_string("a=mxa%d b=mxb%d", getpid(), getpid());
    char *prepare =
        format_string("PATH=$PATH:/usr/sbin; %s; exec 2>/dev/null; ip netns add $a && ip netns add $b && "
                      "ip -n $a link add eth0 type veth peer name eth0 netns $b && "
                      "ip -n $a addr add 10.77.0.1/24 dev eth0 && ip -n $b addr add 10.77.0.2/24 dev eth0 && "
                      "ip -n $a link set eth0 up && ip -n $b link set eth0 up",
                      names);
    char *run = format_string("PATH=$PATH:/usr/sbin; %s; ip netns exec $b %s tcp 10.77.0.1 29500 1 & "
                              "ip netns exec $a %s tcp 10.77.0.1 29500 0 && wait $!",
                              names, program, program);
    char *clean = format_string("PATH=$PATH:/usr/sbin; %s; exec 2>/dev/null; ip netns del $a; ip netns del $b", names);
    bool prepared = system(prepare) == 0;
    int status = prepared ? system(run) : 0;
    if (system(clean) != 0 && prepared) printf("    a network namespace was left\n");
    free(names);
    free(prepare);
    free(run);
    free(clean);
    if (!prepared) skip();
    assert_int_equal(status, 0);
}

static int run_collectives(void) {
    Error error;
    const char *piece = getenv("COMM_PIECE_BYTES");
    // One rank speaks for all in TAP; the others' failures show as text and in the exit code.
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank && strcmp(rank, "0") != 0) setenv("CMOCKA_MESSAGE_OUTPUT", "STDOUT", 1);
    CommOptions options = {.timeout_seconds = 60, .piece_bytes = piece ? atoi(piece) : 0};
    use_nccl(&options);
    comm = comm_create(&options, &error);
    if (!comm) die("%s", error.message);
    int failed = cmocka_run_group_tests_name("collectives", collectives, NULL, NULL);
    if (failed == 0) comm->close(comm);
    return failed;
}

static int run_alone(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_single),
        cmocka_unit_test(say_description),
        cmocka_unit_test(test_all_reduce_sum),
        cmocka_unit_test(test_reduce_scatter),
        cmocka_unit_test(test_all_gather),
        cmocka_unit_test(test_doubles),
        cmocka_unit_test(test_barrier),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_bytes_sent),
        cmocka_unit_test(test_check_same),
        cmocka_unit_test(test_single_sends_nothing),
        cmocka_unit_test(test_place),
        cmocka_unit_test(test_local_rank),
        cmocka_unit_test(test_own_gpu),
        cmocka_unit_test(test_create_refused),
        cmocka_unit_test(test_tcp),
        cmocka_unit_test(test_tcp_missing_rank),
        cmocka_unit_test(test_tcp_wrong_port),
        cmocka_unit_test(test_tcp_contradictions),
        cmocka_unit_test(test_tcp_strangers),
        cmocka_unit_test(test_two_hosts),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_hang),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_differs),
    };
    const struct CMUnitTest nccl_tests[] = {
        cmocka_unit_test(test_nccl_hang),  cmocka_unit_test(test_nccl_hang_beside), cmocka_unit_test(test_nccl_ahead),
        cmocka_unit_test(test_nccl_agree), cmocka_unit_test(test_nccl_connected),   cmocka_unit_test(test_nccl_fails),
        cmocka_unit_test(test_nccl_die),   cmocka_unit_test(test_nccl_stopped),
    };
    set_environment("");
    if (strcmp(program_invocation_short_name, "test_comm_nccl") == 0) {
        return cmocka_run_group_tests_name("nccl", nccl_tests, NULL, NULL);
    }
    return cmocka_run_group_tests_name("alone", tests, NULL, NULL);
}

int main(int argc, char **argv) {
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    program[length > 0 ? length : 0] = 0;
    const char *what = argc > 1 ? argv[1] : "";
    comm_set_remedy("the last checkpoint is whole");
    double delay = argc > 2 ? atof(argv[2]) : 0.2;
    if (strcmp(what, "hang") == 0) return act_fault(SIGSTOP, delay);
    if (strcmp(what, "nccl-hang") == 0) return act_nccl_hang();
    if (strcmp(what, "nccl-hang-beside") == 0) return act_nccl_hang_beside();
    if (strcmp(what, "nccl-ahead") == 0) return act_nccl_ahead();
    if (strcmp(what, "nccl-agree") == 0) return act_nccl_agree(false);
    if (strcmp(what, "nccl-agree-beside") == 0) return act_nccl_agree(true);
    if (strcmp(what, "nccl-connected") == 0) return act_nccl_connected();
    if (strcmp(what, "nccl-fails") == 0) return act_nccl_fails("no-memory", false);
    if (strcmp(what, "nccl-fails-at-start") == 0) return act_nccl_fails("no-memory", true);
    if (strcmp(what, "nccl-loses-at-start") == 0) return act_nccl_fails("remote", true);
    if (strcmp(what, "nccl-die") == 0) return act_nccl_die();
    if (strcmp(what, "killed") == 0) return act_fault(SIGKILL, delay);
    if (strcmp(what, "differs") == 0) return act_differs();
    if (strcmp(what, "contradict") == 0) return act_contradict();
    if (strcmp(what, "bench") == 0) return act_bench();
    if (strcmp(what, "tcp") == 0 && argc == 5) return act_tcp(argv);
    if (!getenv("OMPI_COMM_WORLD_SIZE")) return run_alone();
#ifndef HAVE_MPI
    if (strcmp(getenv("OMPI_COMM_WORLD_RANK"), "0") == 0) puts("ok 1 # SKIP built without MPI");
    return 0;
#endif
    return run_collectives();
}
