#include "gemm_cublaslt.h"
#include "llmc/base/library.h"

#include <stdio.h>
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
                      .lda = b.stride,
                      .ldb = a.stride,
                      .ldd = d.stride,
                      .a_alignment = alignment_of(b.data),
                      .b_alignment = alignment_of(a.data),
                      .d_alignment = alignment_of(d.data),
                      .bias_alignment = bias.data ? alignment_of(bias.data) : 0};
}

static bool is_native(const GemmCall *call) { return call->a_type == CUDA_R_8F_E4M3 || call->a_type == CUDA_R_8F_E5M2; }

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

GemmDescriptors cuda_gemm_descriptors(const GemmCall *c) {
    GemmDescriptors d;
    check_cublas(LT(MatmulDescCreate)(&d.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a GEMM");
    set_int(&d, CUBLASLT_MATMUL_DESC_TRANSA, c->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_int(&d, CUBLASLT_MATMUL_DESC_TRANSB, c->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
#ifndef NO_NATIVE_MXFP8 // gemm_path.c then has no native path
    if (is_native(c)) {
        set_int(&d, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
        set_int(&d, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
    }
#endif
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

enum { TABLE_PROBES = 8 };

typedef struct {
    bool used;
    const char *declined; // why cuBLASLt doesn't multiply it, one of few constants; NULL: it does
    GemmCall call;
    GemmDescriptors descriptors;
    cublasLtMatmulAlgo_t algorithm;
} TableEntry;

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

static void fill_entry(TableEntry *entry, const GemmCall *call, const void *a_scales, const void *b_scales,
                       const void *bias) {
    if (entry->used) cuda_gemm_descriptors_destroy(&entry->descriptors);
    if (!handle) check_cublas(LT(Create)(&handle), "starting cuBLASLt");
    *entry = (TableEntry){.used = true, .call = *call, .descriptors = cuda_gemm_descriptors(call)};
    cuda_gemm_set_pointers(&entry->descriptors, a_scales, b_scales, bias); // heuristics look at their alignment

    GemmDescriptors *d = &entry->descriptors;
    cublasLtMatmulHeuristicResult_t result;
    int count = 0;
    cublasStatus_t status =
        LT(MatmulAlgoGetHeuristic)(handle, d->operation, d->a, d->b, d->d, d->d, d->preference, 1, &result, &count);
    if (status == CUBLAS_STATUS_SUCCESS && count == 1 && result.state == CUBLAS_STATUS_SUCCESS) {
        entry->algorithm = result.algo;
    } else {
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

// A kernel that heuristics promised and that fails all the same isn't tried again. Returns what the
// first one failed with, for all of them.
static const char *say_failed(cublasStatus_t status) {
    static char text[128];
    if (!text[0]) snprintf(text, sizeof(text), "cublasLtMatmul failed with %s", LT(GetStatusString)(status));
    return text;
}

const char *cuda_gemm_declined(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options) {
    return get_entry(d, a, b, bias, options)->declined;
}

const char *cuda_gemm_multiply(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options,
                               void *workspace) {
    TableEntry *entry = get_entry(d, a, b, bias, options);
    if (entry->declined) return entry->declined;
    GemmDescriptors *t = &entry->descriptors;
    cuda_gemm_set_pointers(t, b.scales, a.scales, bias.data);
    float alpha = 1, beta = options.accumulate ? 1 : 0;
    cublasStatus_t status = LT(Matmul)(handle, t->operation, &alpha, b.data, t->a, a.data, t->b, &beta, d.data, t->d,
                                       d.data, t->d, &entry->algorithm, workspace, CUDA_CUBLASLT_BYTES, cuda_stream());
    if (status == CUBLAS_STATUS_SUCCESS) return NULL;
    if (!is_native(&entry->call) && status != CUBLAS_STATUS_NOT_SUPPORTED) check_cublas(status, "multiplying matrices");
    cudaGetLastError(); // so that it isn't taken for a later launch's
    return entry->declined = say_failed(status);
}

void cuda_gemm_forget_calls(void) {
    for (int i = 0; i < CUDA_GEMM_TABLE_SIZE; i++) {
        if (table[i].used) cuda_gemm_descriptors_destroy(&table[i].descriptors);
        table[i].used = false;
    }
}
