#include "gemm_cublaslt.h"
#include "llmc/base/library.h"
#include "llmc/base/random.h"
#include "wait.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Loaded when it is first called: linked directly it would cost every start of the program 70 ms
// and 150 MB of address space, --help and runs on the CPU too.
static Library library = {LIBRARY_FILE("cublasLt", CUBLAS_VER_MAJOR), "cuBLASLt",
                          "install the CUDA toolkit, or use --device cpu", NULL};
#define LT(name) LIBRARY_CALL(library, cublasLt##name)

size_t cuda_gemm_cublaslt_version(void) { return library_load(&library) ? LT(GetVersion)() : 0; }

static void check_cublas(cublasStatus_t status, const char *doing) {
    if (status != CUBLAS_STATUS_SUCCESS) die("%s failed: %s", doing, LT(GetStatusString)(status));
}

// Calls as data

enum { MAX_ALIGNMENT = 256 }; // the largest that kernels ask for

static int64_t alignment_of(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer | MAX_ALIGNMENT;
    return (int64_t)(address & -address);
}

GemmCall cuda_gemm_call(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options) {
    return (GemmCall){.m = d.cols,
                      .n = d.rows,
                      .k = options.transpose_a ? a.rows : a.cols,
                      .transpose_a = options.transpose_b,
                      .transpose_b = options.transpose_a,
                      .a_type = b.type,
                      .b_type = a.type,
                      .d_type = d.dtype == FORMAT_FP32 ? CUDA_R_32F : CUDA_R_16BF,
                      .bias_type = bias.data ? (int64_t)bias.type : -1,
                      .a_scaling = b.scales_of,
                      .b_scaling = a.scales_of,
                      .fast_sum = a.scales_of == SCALES_OF_TENSOR && options.fast_sum,
                      .has_factor = a.factor || b.factor || a.prescale != 0 || b.prescale != 0,
                      .lda = b.stride,
                      .ldb = a.stride,
                      .ldd = d.stride,
                      .a_alignment = alignment_of(b.data),
                      .b_alignment = alignment_of(a.data),
                      .d_alignment = alignment_of(d.data),
                      .bias_alignment = bias.data ? alignment_of(bias.data) : 0};
}

static bool is_native(const GemmCall *call) {
    return call->a_type == CUDA_R_8F_E4M3 || call->a_type == CUDA_R_8F_E5M2 || call->a_type == CUDA_E2M1_TYPE;
}

static void set_attribute(const GemmDescriptors *d, cublasLtMatmulDescAttributes_t attribute, const void *value,
                          size_t bytes) {
    check_cublas(LT(MatmulDescSetAttribute)(d->operation, attribute, value, bytes), "describing a GEMM");
}

static void set_int(const GemmDescriptors *d, cublasLtMatmulDescAttributes_t attribute, int32_t value) {
    set_attribute(d, attribute, &value, sizeof(value));
}

static void prefer(const GemmDescriptors *d, cublasLtMatmulPreferenceAttributes_t attribute, int64_t value) {
    uint32_t as_wanted = (uint32_t)value;
    check_cublas(LT(MatmulPreferenceSetAttribute)(d->preference, attribute, &as_wanted, sizeof(as_wanted)),
                 "describing a GEMM");
}

static cublasLtMatrixLayout_t make_layout(int64_t type, int64_t rows, int64_t cols, int64_t stride) {
    cublasLtMatrixLayout_t layout;
    check_cublas(LT(MatrixLayoutCreate)(&layout, (cudaDataType_t)type, (uint64_t)rows, (uint64_t)cols, stride),
                 "describing a matrix");
    return layout;
}

#ifndef NO_NATIVE_MXFP8 // what a header lacks gemm_path.c has no native path for
static const int32_t SCALE_MODES[] = {[SCALES_OF_MX] = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0,
#ifndef NO_NATIVE_BLOCK128
                                      [SCALES_OF_BLOCKS] = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                                      [SCALES_OF_SQUARES] = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
#endif
                                      [SCALES_OF_NVFP4] = CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3};
#endif

GemmDescriptors cuda_gemm_descriptors(const GemmCall *c) {
    GemmDescriptors d;
    check_cublas(LT(MatmulDescCreate)(&d.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a GEMM");
    set_int(&d, CUBLASLT_MATMUL_DESC_TRANSA, c->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_int(&d, CUBLASLT_MATMUL_DESC_TRANSB, c->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
#ifndef NO_NATIVE_MXFP8
    if (is_native(c) && c->a_scaling != SCALES_OF_TENSOR) {
        set_int(&d, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, SCALE_MODES[c->a_scaling]);
        set_int(&d, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, SCALE_MODES[c->b_scaling]);
    }
#endif
    int8_t fast = 1;
    if (c->fast_sum) set_attribute(&d, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof(fast));
    if (c->has_factor) set_int(&d, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    if (c->bias_type >= 0) {
        set_int(&d, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set_int(&d, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)c->bias_type);
    }
    d.a = make_layout(c->a_type, c->transpose_a ? c->k : c->m, c->transpose_a ? c->m : c->k, c->lda);
    d.b = make_layout(c->b_type, c->transpose_b ? c->n : c->k, c->transpose_b ? c->k : c->n, c->ldb);
    d.d = make_layout(c->d_type, c->m, c->n, c->ldd);

    check_cublas(LT(MatmulPreferenceCreate)(&d.preference), "describing a GEMM");
    uint64_t workspace = CUDA_CUBLASLT_BYTES;
    check_cublas(LT(MatmulPreferenceSetAttribute)(d.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                  sizeof(workspace)),
                 "describing a GEMM");
    // Partial sums of a split K stay FP32 and are added in one order; the other schemes round them
    // to d's dtype.
    prefer(&d, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    prefer(&d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, c->a_alignment);
    prefer(&d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, c->b_alignment);
    prefer(&d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c->d_alignment);
    prefer(&d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c->d_alignment);
    return d;
}

void cuda_gemm_descriptors_destroy(GemmDescriptors *d) {
    check_cublas(LT(MatmulPreferenceDestroy)(d->preference), "forgetting a GEMM");
    check_cublas(LT(MatrixLayoutDestroy)(d->d), "forgetting a GEMM");
    check_cublas(LT(MatrixLayoutDestroy)(d->b), "forgetting a GEMM");
    check_cublas(LT(MatrixLayoutDestroy)(d->a), "forgetting a GEMM");
    check_cublas(LT(MatmulDescDestroy)(d->operation), "forgetting a GEMM");
}

void cuda_gemm_set_pointers(const GemmDescriptors *d, const void *a_scales, const void *b_scales, const void *bias) {
    if (a_scales) set_attribute(d, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a_scales, sizeof(a_scales));
    if (b_scales) set_attribute(d, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b_scales, sizeof(b_scales));
    if (bias) set_attribute(d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
}

// Calls made: descriptors and heuristics once for each

enum { TABLE_PROBES = 8, MAX_KERNELS = 8, MAX_TUNED_BIAS = 1 << 17 };

typedef struct {
    bool used;
    const char *declined; // why cuBLASLt doesn't multiply it, one of few constants; NULL: it does
    GemmCall call;
    GemmDescriptors descriptors;
    cublasLtMatmulAlgo_t kernels[MAX_KERNELS]; // that heuristics propose, the best guess first
    int num_kernels;
    int writer, adder; // those that are taken to write d and to add to it
    bool is_tuned;     // or needn't be
} TableEntry;

double cuda_gemm_tuned_flops = 1e10;

static TableEntry table[CUDA_GEMM_TABLE_SIZE];
static cublasLtHandle_t handle;

static uint64_t hash_call(const GemmCall *call) {
    const int64_t *words = (const int64_t *)call;
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof(*call) / sizeof(*words); i++) {
        hash = (hash ^ (uint64_t)words[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

// Returns the call's entry, or the one it is to take: a free one near its place, or the one in its
// place. Sampling has a shape for each length of the text, so that entries do get taken from
// others.
static TableEntry *find_entry(const GemmCall *call) {
    uint64_t first = hash_call(call);
    TableEntry *unused = NULL;
    for (uint64_t i = 0; i < TABLE_PROBES; i++) {
        TableEntry *entry = &table[(first + i) % CUDA_GEMM_TABLE_SIZE];
        if (entry->used && memcmp(&entry->call, call, sizeof(*call)) == 0) return entry;
        if (!entry->used && !unused) unused = entry;
    }
    return unused ? unused : &table[first % CUDA_GEMM_TABLE_SIZE];
}

// Returns whether a call's kernels are to be compared: not those of native FP4, whose sums may be
// exact too, nor of a bias longer than what takes its place.
static bool is_to_be_tuned(const GemmCall *call) {
    double flops = 2.0 * (double)call->m * (double)call->n * (double)call->k;
    bool is_comparable = call->a_type != CUDA_E2M1_TYPE && (call->bias_type < 0 || call->m <= MAX_TUNED_BIAS);
    return is_comparable && flops >= cuda_gemm_tuned_flops;
}

static void fill_entry(TableEntry *entry, const GemmCall *call, const void *a_scales, const void *b_scales,
                       const void *bias) {
    if (entry->used) cuda_gemm_descriptors_destroy(&entry->descriptors);
    if (!handle) check_cublas(LT(Create)(&handle), "starting cuBLASLt");
    *entry = (TableEntry){.used = true, .call = *call, .descriptors = cuda_gemm_descriptors(call)};
    cuda_gemm_set_pointers(&entry->descriptors, a_scales, b_scales, bias); // heuristics look at their alignment

    GemmDescriptors *d = &entry->descriptors;
    cublasLtMatmulHeuristicResult_t results[MAX_KERNELS];
    entry->is_tuned = !is_to_be_tuned(call);
    int count = 0;
    cublasStatus_t status = LT(MatmulAlgoGetHeuristic)(handle, d->operation, d->a, d->b, d->d, d->d, d->preference,
                                                       MAX_KERNELS, results, &count);
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < count; i++) {
        if (results[i].state == CUBLAS_STATUS_SUCCESS) entry->kernels[entry->num_kernels++] = results[i].algo;
    }
    if (entry->num_kernels == 0) {
        entry->declined = is_native(call) ? "cuBLASLt has no native kernel for it" : "cuBLASLt has no kernel for it";
    }
}

// Returns the call's entry, and makes it where it isn't there yet. Looks at no data.
static TableEntry *get_entry(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options) {
    GemmCall call = cuda_gemm_call(d, a, b, bias, options);
    TableEntry *entry = find_entry(&call);
    if (!entry->used || memcmp(&entry->call, &call, sizeof(call)) != 0) {
        fill_entry(entry, &call, b.scales, a.scales, bias.data);
    }
    return entry;
}

// A call all of whose kernels, which heuristics promised, fail isn't tried again. Returns what the
// first such call failed with, for all of them.
static const char *say_failed(cublasStatus_t status) {
    static char text[128];
    if (!text[0]) snprintf(text, sizeof(text), "cublasLtMatmul failed with %s", LT(GetStatusString)(status));
    return text;
}

const char *cuda_gemm_declined(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options) {
    return get_entry(d, a, b, bias, options)->declined;
}

// One multiplication; a and b as cuBLASLt has them.
typedef struct {
    TableEntry *entry;
    Tensor d;
    GemmMatrix a, b;
    GemmBias bias;
    bool has_substitutes;      // alpha is not the one that is asked for
    float host[2];             // alpha and beta
    const float *alpha, *beta; // the same, on the device where an operand has a factor or a prescale
    void *workspace;
} Product;

static const float UNLIKE_1 = 0.7f; // nor a power of two

// What takes the place of a bias and of tensors' scales while kernels are compared. In a run's
// first step biases are 0, and delayed scales and so alpha 1: kernels that add or multiply by these
// before they round or after have the same bits then. Each is as aligned as kernels may ask for.
typedef struct {
    float zeros[MAX_TUNED_BIAS]; // of any dtype
    float fp32[MAX_TUNED_BIAS];  // normal values
    uint16_t bf16[MAX_TUNED_BIAS];
    float scale;
} Substitutes;

// Sets alpha and beta for the runs that follow.
static void set_scalars(Product *p, bool accumulate) {
    p->host[0] = 1;
    p->host[1] = accumulate ? 1 : 0;
    p->alpha = &p->host[0];
    p->beta = &p->host[1];
    if (!p->entry->call.has_factor) return;
    float *factors = (float *)((char *)p->workspace + CUDA_CUBLASLT_BYTES);
    float prescales = (p->a.prescale != 0 ? p->a.prescale : 1) * (p->b.prescale != 0 ? p->b.prescale : 1);
    if (p->has_substitutes) prescales *= UNLIKE_1;
    cuda_multiply_factors(factors, p->a.factor, p->b.factor, prescales, p->host[1]);
    p->alpha = &factors[0];
    p->beta = &factors[1];
}

static cublasStatus_t run(const Product *p, int kernel) {
    const GemmDescriptors *t = &p->entry->descriptors;
    return LT(Matmul)(handle, t->operation, p->alpha, p->a.data, t->a, p->b.data, t->b, p->beta, p->d.data, t->d,
                      p->d.data, t->d, &p->entry->kernels[kernel], p->workspace, CUDA_CUBLASLT_BYTES, cuda_stream());
}

// Forgets that a kernel failed, so that it isn't taken for a later launch's failure. Dies where the
// GPU can't go on.
static void forget_failure(void) {
    cudaGetLastError();
    cuda_has_ended(cudaStreamQuery(cuda_stream()), "multiplying matrices");
}

// Returns whether a kernel failed for what it is asked to do, on every rank and again, and not for
// what the GPU's memory or the library happened to be in.
static bool depends_on_call(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_EXECUTION_FAILED;
}

// Runs one of an entry's kernels: the one that is taken, or, where it fails for what it is asked to
// do, the next that doesn't, which is taken from then on. Returns the last one's status.
static cublasStatus_t run_taken(const Product *p, int *taken) {
    cublasStatus_t status = run(p, *taken);
    for (int failed = 1; depends_on_call(status) && failed < p->entry->num_kernels; failed++) {
        forget_failure();
        *taken = (*taken + 1) % p->entry->num_kernels;
        status = run(p, *taken);
    }
    return status;
}

// Returns the substitutes, on the device.
static const Substitutes *get_substitutes(void) {
    static Substitutes *device; // made by the first call, and kept: freeing it would wait for other ranks
    if (device) return device;
    Substitutes *host = allocate(sizeof(*host));
    host->scale = UNLIKE_1;
    for (int i = 0; i < MAX_TUNED_BIAS; i++) {
        host->fp32[i] = random_normal(0, 0, (uint64_t)i);
        host->bf16[i] = mx_to_bf16(host->fp32[i]);
    }
    cuda_check(cudaMalloc((void **)&device, sizeof(*device)), "allocating memory of the GPU");
    cuda_copy_to_device(device, host, sizeof(*host));
    free(host);
    return device;
}

static void set_substitutes(Product *p, const Substitutes *s) {
    bool has_scales = p->a.scales && p->a.scales_of == SCALES_OF_TENSOR;
    const float *scale = has_scales ? &s->scale : NULL;
    p->has_substitutes = true;
    cuda_gemm_set_pointers(&p->entry->descriptors, scale, scale, NULL);
}

static void take_back_substitutes(Product *p) {
    p->has_substitutes = false;
    cuda_gemm_set_pointers(&p->entry->descriptors, p->a.scales, p->b.scales, p->bias.data);
}

// What a kernel wrote.
typedef struct {
    uint64_t product, biased, sum;
} Digests;

// Runs a kernel with a bias, unless NULL, and digests what it writes. Returns false where it fails.
static bool digest_product(Product *p, int kernel, const void *bias, uint64_t *digest) {
    Tensor d = p->d;
    size_t size = dtype_size(d.dtype);
    // NaN everywhere, so that what one kernel doesn't write isn't another's result.
    cuda_check(
        cudaMemset2DAsync(d.data, (size_t)d.stride * size, 0xFF, (size_t)d.cols * size, (size_t)d.rows, cuda_stream()),
        "setting memory of the GPU");
    cuda_gemm_set_pointers(&p->entry->descriptors, NULL, NULL, bias);
    set_scalars(p, false);
    if (run(p, kernel) != CUBLAS_STATUS_SUCCESS) return false;
    *digest = cuda_digest(d);
    return true;
}

// Runs a kernel and digests what it writes: the product, with a bias of zeros where it has one, as
// a larger one would hide the product's last bits; the product and the bias; and, where d is FP32,
// what it makes of d when it adds to it twice: a sum of three needs more bits than d has, and so
// shows where it is rounded. Returns false where the kernel fails.
static bool digest_kernel(Product *p, int kernel, const Substitutes *s, Digests *digests) {
    bool has_bias = p->bias.data != NULL;
    const void *bias = p->bias.type == CUDA_R_32F ? (const void *)s->fp32 : s->bf16;
    if (has_bias && !digest_product(p, kernel, bias, &digests->biased)) return false;
    if (!digest_product(p, kernel, has_bias ? s->zeros : NULL, &digests->product)) return false;
    if (p->d.dtype != FORMAT_FP32) return true;
    set_scalars(p, true);
    for (int i = 0; i < 2; i++) {
        if (run(p, kernel) != CUBLAS_STATUS_SUCCESS) return false;
    }
    digests->sum = cuda_digest(p->d);
    return true;
}

// Scrambles both matrices, or brings them back: sums of values of few bits are exact in any order,
// so that kernels with other orders would have the same bits. Of few bits are values that were
// decoded from E2M1, and codes of FP8 in the first step of delayed scales, which are 1.
static void scramble(const Product *p) {
    const GemmMatrix *matrices[2] = {&p->a, &p->b};
    for (int i = 0; i < 2; i++) {
        const GemmMatrix *m = matrices[i];
        if (i == 1 && m->data == p->a.data) continue; // a matrix times itself: Muon's
        if (m->type == CUDA_R_16BF) {
            Tensor values = tensor_make((void *)m->data, FORMAT_BF16, m->rows, m->cols);
            values.stride = m->stride;
            cuda_scramble(values);
        } else if (m->type == CUDA_R_8F_E4M3 || m->type == CUDA_R_8F_E5M2) {
            Format format = m->type == CUDA_R_8F_E5M2 ? FORMAT_E5M2 : FORMAT_E4M3;
            cuda_scramble_codes((uint8_t *)m->data, m->rows, m->cols, m->stride, format);
        }
    }
}

// Keeps, of an entry's kernels, the first that runs and those that write the same d and add the
// same to FP32. Where nothing in the product is finite but zeros every kernel does, whatever its
// order of sums, and the first alone is kept. Returns how many are kept; 0: all fail, and stay.
static int keep_same(Product *p) {
    TableEntry *entry = p->entry;
    int kept = 0;
    scramble(p);
    const Substitutes *substitutes = get_substitutes();
    set_substitutes(p, substitutes);
    Digests first = {0};
    for (int i = 0; i < entry->num_kernels; i++) {
        Digests digests = {0};
        if (!digest_kernel(p, i, substitutes, &digests)) {
            forget_failure();
            continue;
        }
        if (kept == 0) first = digests;
        bool is_same = memcmp(&digests, &first, sizeof(first)) == 0 && digests.product != 0;
        if (kept == 0 || is_same) entry->kernels[kept++] = entry->kernels[i];
    }
    if (kept > 0) entry->num_kernels = kept;
    take_back_substitutes(p);
    scramble(p);
    return kept;
}

// Returns the milliseconds of a run, of some in a row.
static float time_kernel(const Product *p, int kernel, cudaEvent_t start, cudaEvent_t end) {
    enum { RUNS = 3 };
    float milliseconds;
    cuda_check(cudaEventRecord(start, cuda_stream()), "timing a GEMM");
    for (int i = 0; i < RUNS; i++) {
        run(p, kernel);
    }
    cuda_check(cudaEventRecord(end, cuda_stream()), "timing a GEMM");
    cuda_synchronize();
    cuda_check(cudaEventElapsedTime(&milliseconds, start, end), "timing a GEMM");
    return milliseconds / RUNS;
}

// Chooses an entry's kernels: the fastest of those that give the same d, each timed in turn, if it
// is by more than what times vary. To BF16, which those may add to otherwise, the first adds.
static void tune(Product *p) {
    enum { ROUNDS = 3 };
    const float CLEARLY = 0.98f;
    TableEntry *entry = p->entry;
    float best[MAX_KERNELS];
    cudaEvent_t start, end;
    entry->is_tuned = true;
    int kept = keep_same(p);
    entry->writer = entry->adder = 0;
    set_scalars(p, false);
    if (kept < 2) return;
    cuda_check(cudaEventCreate(&start), "timing a GEMM");
    cuda_check(cudaEventCreate(&end), "timing a GEMM");
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < entry->num_kernels; i++) {
            float time = time_kernel(p, i, start, end);
            if (round == 0 || time < best[i]) best[i] = time;
        }
    }
    for (int i = 1; i < entry->num_kernels; i++) {
        float limit = entry->writer == 0 ? CLEARLY * best[0] : best[entry->writer];
        if (best[i] < limit) entry->writer = i;
    }
    if (p->d.dtype == FORMAT_FP32) entry->adder = entry->writer;
    cuda_check(cudaEventDestroy(start), "timing a GEMM");
    cuda_check(cudaEventDestroy(end), "timing a GEMM");
}

const char *cuda_gemm_multiply(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options,
                               void *workspace) {
    TableEntry *entry = get_entry(d, a, b, bias, options);
    if (entry->declined) return entry->declined;
    cuda_gemm_set_pointers(&entry->descriptors, b.scales, a.scales, bias.data);
    Product product = {.entry = entry, .d = d, .a = b, .b = a, .bias = bias, .workspace = workspace};
    if (!entry->is_tuned && !options.accumulate) tune(&product);
    set_scalars(&product, options.accumulate);
    cublasStatus_t status = run_taken(&product, options.accumulate ? &entry->adder : &entry->writer);
    if (status == CUBLAS_STATUS_SUCCESS) return NULL;
    if (!is_native(&entry->call) && status != CUBLAS_STATUS_NOT_SUPPORTED) check_cublas(status, "multiplying matrices");
    forget_failure();
    return entry->declined = say_failed(status);
}

void cuda_gemm_forget_calls(void) {
    for (int i = 0; i < CUDA_GEMM_TABLE_SIZE; i++) {
        if (table[i].used) cuda_gemm_descriptors_destroy(&table[i].descriptors);
        table[i].used = false;
    }
}
