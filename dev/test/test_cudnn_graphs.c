/*
cuDNN takes the graphs of llmc/cuda/attention_cudnn.c, forward and backward, for GPUs that aren't
there: each is described to cuDNN, whose heuristics then offer engines and whose plans compile their
kernels. What cuDNN asks the driver for in doing so, to load what it compiled, a library that this
test makes answers with success. Nothing is run.
*/
#include "check.h"

#ifdef HAVE_CUDNN

#include <dlfcn.h>
#include <unistd.h>
#include "llmc/cuda/attention.h"

enum { B = 4, T = 1024, NH = 12 };

// What cuDNN looks up when it makes plans. A kernel that was loaded is any address but NULL.
static const char STUB[] =
    "int cuLibraryLoadData(void **library) { *library = (void *)1; return 0; }\n"
    "int cuLibraryGetKernel(void **kernel) { *kernel = (void *)1; return 0; }\n"
    "int cuKernelGetFunction(void **function) { *function = (void *)1; return 0; }\n"
    "#define NOTHING(name) int name(void) { return 0; }\n"
    "NOTHING(cuCtxGetCurrent) NOTHING(cuCtxGetLimit) NOTHING(cuCtxPopCurrent) NOTHING(cuCtxPushCurrent)\n"
    "NOTHING(cuDeviceGet) NOTHING(cuDeviceGetCount) NOTHING(cuDriverGetVersion) NOTHING(cuGetErrorName)\n"
    "NOTHING(cuGetErrorString) NOTHING(cuKernelGetAttribute) NOTHING(cuKernelSetAttribute)\n"
    "NOTHING(cuLaunchCooperativeKernel) NOTHING(cuLaunchKernel) NOTHING(cuLaunchKernelEx)\n"
    "NOTHING(cuLibraryLoadFromFile) NOTHING(cuLibraryUnload) NOTHING(cuLinkAddData) NOTHING(cuLinkComplete)\n"
    "NOTHING(cuLinkCreate) NOTHING(cuLinkDestroy) NOTHING(cuOccupancyMaxPotentialClusterSize)\n"
    "NOTHING(cuStreamGetCtx)\n";

typedef struct {
    const char *name;
    int capability, multiprocessors, shared_bytes, threads;
} Gpu;

static const Gpu GPUS[] = {{"NVIDIA H100 80GB HBM3", 900, 132, 232448, 2048},
                           {"NVIDIA B200", 1000, 148, 232448, 2048},
                           {"NVIDIA GeForce RTX 5090", 1200, 170, 101376, 1536}};
enum { NUM_GPUS = sizeof(GPUS) / sizeof(GPUS[0]) };

static void describe(Gpu gpu) {
    char json[2048];
    snprintf(json, sizeof(json),
             "{\"deviceName\":\"%s\",\"deviceVer\":%d,\"multiProcessorCount\":%d,\"maxSharedMemoryPerBlockOptin\":%d,"
             "\"maxThreadsPerSM\":%d,\"driverVer\":13000,\"maxGridSize\":[2147483647,65535,65535],"
             "\"maxBlockSize\":[1024,1024,64],\"maxThreadsPerBlock\":1024,\"maxCtasPerSM\":32,\"warpSize\":32,"
             "\"regsPerBlock\":65536,\"maxRegistersPerSM\":65536,\"maxSharedMemoryPerBlock\":49152,"
             "\"reservedSharedMemoryPerBlock\":1024,\"totalGlobalMem\":85899345920,\"l2CacheSize\":52428800,"
             "\"smClockRateKHz\":1755000,\"memClockRateKHz\":2619000,\"supportCoopLaunch\":1,\"isTccDriver\":0,"
             "\"pciDeviceId\":0,\"cudaDeviceId\":0}",
             gpu.name, gpu.capability, gpu.multiprocessors, gpu.shared_bytes, gpu.threads);
    assert_true(cuda_attention_cudnn_describe_device(json, gpu.capability / 10));
}

// Loaded under the driver's name, it is what later asks for that name find.
static int load_stub(void **state) {
    (void)state;
    char directory[] = "/tmp/test_cudnn_graphs.XXXXXX", source[64], library[64], command[256];
    assert_non_null(mkdtemp(directory));
    snprintf(source, sizeof(source), "%s/stub.c", directory);
    snprintf(library, sizeof(library), "%s/libcuda.so.1", directory);
    snprintf(command, sizeof(command), "cc -w -shared -fPIC -Wl,-soname,libcuda.so.1 %s -o %s", source, library);
    FILE *file = fopen(source, "w");
    assert_non_null(file);
    assert_true(fputs(STUB, file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(system(command), 0);
    void *stub = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
    assert_non_null(stub);
    assert_true(unlink(source) == 0 && unlink(library) == 0 && rmdir(directory) == 0);
    return 0;
}

// Makes a file of what the calls to come print on stderr.
static int stderr_kept = -1;
static FILE *stderr_file;

static void capture_stderr(void) {
    stderr_file = tmpfile();
    assert_non_null(stderr_file);
    stderr_kept = dup(STDERR_FILENO);
    assert_true(dup2(fileno(stderr_file), STDERR_FILENO) >= 0);
}

static void release_stderr(char *text, size_t bytes) {
    assert_true(dup2(stderr_kept, STDERR_FILENO) >= 0);
    close(stderr_kept);
    rewind(stderr_file);
    text[fread(text, 1, bytes - 1, stderr_file)] = 0;
    fclose(stderr_file);
}

static AttentionShape shape_of(int64_t batch, int64_t HS) {
    return (AttentionShape){.B = batch, .T = T, .NH = NH, .NKV = NH, .HS = HS, .causal = true};
}

// Returns whether a card has the engine that is asked for by its number: it keeps no dS, and no
// batch goes in parts.
static bool is_asked(Gpu gpu) { return gpu.capability / 100 == 10 && cuda_attention_cudnn_version() >= 91801; }

// Returns what `--dry-run` takes a shape's workspace to be, which is exact but for what cuDNN wants
// beside dS.
static size_t planned_bytes(Gpu gpu, AttentionShape shape) {
    if (is_asked(gpu)) return cuda_attention_cudnn_workspace(shape, 0).total;
    int64_t dscores = cuda_attention_dscores_bytes(cuda_attention_backward_part(shape));
    return cuda_attention_cudnn_workspace(shape, (size_t)dscores).total;
}

static void test_taken(void **state) {
    (void)state;
    static const int64_t HEADS[] = {64, 128};
    for (int i = 0; i < NUM_GPUS; i++) {
        describe(GPUS[i]);
        for (int h = 0; h < 2; h++) {
            double start = seconds_now();
            assert_true(cuda_attention_cudnn_takes(FORMAT_BF16, shape_of(B, HEADS[h])));
            double made = seconds_now();
            size_t bytes = cuda_attention_workspace_cudnn(shape_of(B, HEADS[h]));
            printf("    %-24s heads of %-3lld %5.1f MB of workspace, both plans made in %.1f s\n", GPUS[i].name,
                   (long long)HEADS[h], (double)bytes / 1e6, made - start);
            size_t rows = (size_t)B * T * NH, planned = planned_bytes(GPUS[i], shape_of(B, HEADS[h]));
            size_t dscores = is_asked(GPUS[i]) ? 0 : T * 2;
            assert_int_equal(planned, rows * ((size_t)HEADS[h] * 2 + 8 + dscores));
            assert_in_range(bytes, planned, planned + (1 << 20));
            assert_true(cuda_attention_cudnn_takes(FORMAT_BF16, shape_of(B, HEADS[h])));
            assert_true(seconds_now() - made < 0.01); // not made again
            // The line of a run has the engine that was asked for, and its settings as cuDNN has
            // them.
            char text[256];
            cuda_attention_cudnn_describe(text, sizeof(text));
            printf("    %s\n", text);
            assert_non_null(strstr(text, "attention by cuDNN 9."));
            if (is_asked(GPUS[i])) {
                assert_non_null(strstr(text, "backward engine 5 ("));
                assert_non_null(strstr(text, "STAGES 2"));
            }
        }
    }
}

// Query heads that share keys, and queries that see all keys.
static void test_grouped_and_unmasked(void **state) {
    (void)state;
    for (int i = 0; i < NUM_GPUS; i++) {
        describe(GPUS[i]);
        for (int64_t HS = 64; HS <= 128; HS *= 2) {
            for (int variant = 1; variant < 4; variant++) {
                AttentionShape shape = shape_of(B, HS);
                if (variant & 1) shape.NKV = NH / 4;
                if (variant & 2) shape.causal = false;
                assert_true(cuda_attention_cudnn_takes(FORMAT_BF16, shape));
                size_t bytes = cuda_attention_workspace_cudnn(shape), rows = (size_t)B * T * NH;
                printf("    %-24s heads of %-3lld NKV %lld%s: %.1f MB of workspace\n", GPUS[i].name, (long long)HS,
                       (long long)shape.NKV, shape.causal ? "" : " unmasked", (double)bytes / 1e6);
                // As test_taken, and, before they are summed, every query head's gradients of keys
                // and values, in FP32 at most.
                size_t planned = planned_bytes(GPUS[i], shape);
                assert_in_range(bytes, planned, planned + rows * (size_t)HS * 8 + (1 << 20));
            }
        }
    }
}

// A batch whose gradients of scores would take 3.2 GB goes in parts.
static void test_large_batch(void **state) {
    (void)state;
    enum { LARGE_B = 128, HS = 64 };
    describe(GPUS[0]);
    assert_true(cuda_attention_cudnn_takes(FORMAT_BF16, shape_of(LARGE_B, HS)));
    size_t rows = (size_t)LARGE_B * T * NH, bytes = cuda_attention_workspace_cudnn(shape_of(LARGE_B, HS));
    printf("    B %d: %.1f MB of workspace\n", LARGE_B, (double)bytes / 1e6);
    size_t planned = planned_bytes(GPUS[0], shape_of(LARGE_B, HS));
    assert_true(planned <= rows * (HS * 2 + 8) + ((size_t)512 << 20));
    assert_in_range(bytes, planned, planned + (1 << 20));
}

// A long sequence goes by heads: those of one head of keys, where the gradients of scores of two
// would be over 512 MB.
static void test_long_sequence(void **state) {
    (void)state;
    enum { LONG_T = 16384, HS = 64 };
    for (int i = 0; i < NUM_GPUS; i++) {
        describe(GPUS[i]);
        for (int group = 1; group <= 2; group++) {
            AttentionShape shape = {.B = 2, .T = LONG_T, .NH = 4, .NKV = 4 / group, .HS = HS, .causal = true};
            assert_true(cuda_attention_cudnn_takes(FORMAT_BF16, shape));
            size_t rows = (size_t)(shape.B * shape.NH) * LONG_T, dscores = (size_t)LONG_T * LONG_T * 2 * (size_t)group;
            if (is_asked(GPUS[i])) dscores = 0;
            size_t bytes = cuda_attention_workspace_cudnn(shape);
            printf("    %-24s T %d, NKV %lld: %.1f MB of workspace\n", GPUS[i].name, LONG_T, (long long)shape.NKV,
                   (double)bytes / 1e6);
            assert_in_range(bytes, dscores, dscores + rows * (HS * (2 + 8) + 8) + (1 << 20));
        }
    }
}

// Without a backward pass there is no dS, and no engine for it.
static void test_forward_only(void **state) {
    (void)state;
    for (int i = 0; i < NUM_GPUS; i++) {
        describe(GPUS[i]);
        AttentionShape shape = {.B = 1, .T = 32768, .NH = 32, .NKV = 1, .HS = 64, .causal = true, .forward_only = true};
        assert_true(cuda_attention_cudnn_takes(FORMAT_BF16, shape));
        size_t rows = (size_t)shape.NH * (size_t)shape.T;
        assert_in_range(cuda_attention_workspace_cudnn(shape), 0, rows * (64 * 2 + 8) + (1 << 20));
        char text[256];
        cuda_attention_cudnn_describe(text, sizeof(text));
        assert_non_null(strstr(text, "forward engine"));
        assert_null(strstr(text, "backward"));
    }
}

// One head of keys for 32 of queries, whose gradients of scores would take 69 GB, is for our own
// kernels, unless an engine keeps none.
static void test_scores_without_room(void **state) {
    (void)state;
    for (int i = 0; i < NUM_GPUS; i++) {
        describe(GPUS[i]);
        AttentionShape shape = {.B = 1, .T = 32768, .NH = 32, .NKV = 1, .HS = 64, .causal = true};
        assert_int_equal(cuda_attention_cudnn_takes(FORMAT_BF16, shape), is_asked(GPUS[i]));
    }
}

static void test_faults(void **state) {
    (void)state;
    static const struct {
        size_t version;
        int64_t T;
        bool causal;
        const char *says; // NULL: trusted
    } CASES[] = {{90800, 1024, true, "9.10.2"},  {91001, 1024, true, "9.10.2"}, {91002, 1024, true, NULL},
                 {91500, 1000, true, "9.15.1"},  {91500, 1024, true, NULL},     {91501, 1000, true, NULL},
                 {92300, 1024, true, "9.23.1"},  {92301, 1024, true, "9.23.1"}, {92302, 1024, true, NULL},
                 {92600, 1000, false, "a mask"}, {92600, 1024, false, NULL}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        const char *fault = cuda_attention_cudnn_fault(CASES[i].version, CASES[i].T, CASES[i].causal);
        assert_int_equal(fault != NULL, CASES[i].says != NULL);
        if (fault) assert_non_null(strstr(fault, CASES[i].says));
    }
}

static void test_refused(void **state) {
    (void)state;
    char text[4096];
    capture_stderr();
    bool fp32 = cuda_attention_cudnn_takes(FORMAT_FP32, shape_of(B, 64)), odd = false;
    for (int i = 0; i < NUM_GPUS; i++) {
        describe(GPUS[i]);
        odd = odd || cuda_attention_cudnn_takes(FORMAT_BF16, shape_of(B, 63)) ||
              cuda_attention_cudnn_takes(FORMAT_BF16, shape_of(B, 20));
    }
    release_stderr(text, sizeof(text));
    assert_false(fp32);
    assert_false(odd);
    printf("    %s", text);
    assert_non_null(strstr(text, "heads of 63"));
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1); // one line, once
}

static void test_not_a_device(void **state) {
    (void)state;
    assert_false(cuda_attention_cudnn_describe_device("{\"deviceVer\":900}", 90));
    assert_false(cuda_attention_cudnn_describe_device("H100", 90));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_taken),        cmocka_unit_test(test_grouped_and_unmasked),
        cmocka_unit_test(test_large_batch),  cmocka_unit_test(test_long_sequence),
        cmocka_unit_test(test_forward_only), cmocka_unit_test(test_faults),
        cmocka_unit_test(test_refused),      cmocka_unit_test(test_scores_without_room),
        cmocka_unit_test(test_not_a_device),
    };
    return cmocka_run_group_tests(tests, load_stub, NULL);
}

#else

int main(void) {
    printf("skipped: built without cuDNN\n");
    return 0;
}

#endif
