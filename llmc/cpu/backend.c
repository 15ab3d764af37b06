/*
The CPU's table of operations.
*/
#include "cpu.h"
#include "onednn.h"
#include "llmc/base/system.h" // system_available_memory

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h> // madvise

static void *workspace;
static size_t workspace_bytes;

static void use_workspace(void *memory, size_t bytes) {
    workspace = memory;
    workspace_bytes = bytes;
}

void *cpu_workspace(size_t bytes) {
    if (bytes > workspace_bytes) {
        die("internal error: an operation needs %zu bytes of workspace and was given %zu", bytes, workspace_bytes);
    }
    return workspace;
}

// The instructions that this build was compiled for.
#if defined(__AVX512F__)
static const char VECTORS[] = "AVX-512";
#elif defined(__AVX2__)
static const char VECTORS[] = "AVX2";
#else
static const char VECTORS[] = "vectors of 128 bits";
#endif

static void describe(char *text, size_t bytes) {
    char matmul[256];
    snprintf(matmul, sizeof(matmul), "GEMMs by loops of ours with %s, BF16 operands widened to FP32%s", VECTORS,
             onednn_multiplies(FORMAT_FP32) ? ", those in FP32 by oneDNN" : "");
    if (onednn_multiplies(FORMAT_BF16)) onednn_describe(matmul, sizeof(matmul));
    snprintf(text, bytes, "cpu, %d thread%s; %s", omp_get_max_threads(), plural(omp_get_max_threads()), matmul);
}

static SelfCheck self_check(unsigned scalings, char *text, size_t bytes) {
    (void)scalings;
    snprintf(text, bytes, "%s", "");
    return SELF_CHECK_PASSED;
}

static GemmCounts gemm_counts(void) { return (GemmCounts){0}; }

// Every page is touched by the thread that will most likely use it, and none of it is left to the
// first step.
void cpu_zero(void *memory, size_t bytes) {
    const size_t piece = 1 << 20;
#pragma omp parallel for schedule(static) if (bytes > piece)
    for (size_t first = 0; first < bytes; first += piece) {
        memset((char *)memory + first, 0, bytes - first < piece ? bytes - first : piece);
    }
}

// Rows of a large tensor lie on pages of 4 KB of their own, more than a processor remembers the
// addresses of. Kernels give pages of 2 MB to who asks; without them all works as well.
void *cpu_allocate(size_t bytes) {
    enum { PAGE = 4 << 10, HUGE_PAGE = 2 << 20 };
    void *memory = NULL;
    bool is_large = bytes >= HUGE_PAGE;
    if (posix_memalign(&memory, is_large ? HUGE_PAGE : PAGE, bytes ? bytes : 1) != 0) {
        die("out of memory: %zu bytes could not be had", bytes);
    }
    if (is_large) (void)madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static void *allocate_zeroed(size_t bytes) {
    void *memory = cpu_allocate(bytes);
    cpu_zero(memory, bytes);
    return memory;
}

// Each thread sums its own columns.
size_t cpu_reduction_workspace(int64_t rows, int64_t cols) {
    (void)rows, (void)cols;
    return 0;
}

// Leaves out what is taken besides: by the threads' scratch, their stacks, the libraries' code and
// file buffers.
static double available_memory(void) {
    double of_threads = omp_get_max_threads() * (double)matmul_bytes_of_thread();
    return system_available_memory() - 64e6 - of_threads;
}

static void release(void *memory) { free(memory); }
static void copy_host(void *out, const void *in, size_t bytes) { memcpy(out, in, bytes); }
static void synchronize(void) {}

// In pieces: from some MB on, glibc's memcpy writes past the cache, which is slower on some
// machines.
void cpu_copy(void *out, const void *in, size_t bytes) {
    const size_t piece = 16 << 10;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < bytes; first += piece) {
        memcpy((char *)out + first, (const char *)in + first, bytes - first < piece ? bytes - first : piece);
    }
}

static void copy_batch(int32_t *out, const int32_t *tokens, const int32_t *targets, const int32_t *positions,
                       int64_t count) {
    memcpy(out, tokens, (size_t)count * sizeof(*out));
    memcpy(out + count, targets, (size_t)count * sizeof(*out));
    if (positions) memcpy(out + 2 * count, positions, (size_t)count * sizeof(*out));
}

const Backend *backend_cpu(void) {
    static const Backend table = {
        .name = "cpu",
        .head_scratch_bytes = 200 << 20,
        .head_rows_multiple = MX_BLOCK,
        .vocab_multiple = 1,
        .describe = describe,
        .self_check = self_check,
        .gemm_counts = gemm_counts,
        .available_memory = available_memory,
        .allocate = allocate_zeroed,
        .release = release,
        .copy_to_device = copy_host,
        .copy_to_host = copy_host,
        .copy_batch = copy_batch,
        .synchronize = synchronize,
        .now = seconds_now,
        .use_workspace = use_workspace,
#define OPERATION(result, name, parameters, arguments) .name = cpu_##name,
#define QUERY(result, name, parameters) .name = cpu_##name,
#include "llmc/operations.h"
    };
    return &table;
}
