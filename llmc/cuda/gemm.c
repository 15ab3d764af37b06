/*
GEMM: cuBLASLt multiplies. On Blackwell it takes MXFP8 operands as they are; elsewhere, and where it
can't take a shape, they are decoded to BF16 first, which gives the same addends (see
../../dev/DESIGN.md).

What cuBLASLt needs beside the operands lies in the workspace: its own 32 MiB, then what a and b are
turned into (decoded, or their scales swizzled and their codes transposed), then the bias as BF16
or, for FP32 operands, d as FP32. Operands that were quantized as the GEMM takes them
(quantized_form) are turned into nothing.
*/
#include "gemm.h"
#include "llmc/base/memory.h" // the self-check's block
#include "llmc/base/random.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    LIBRARY_WORKSPACE = 32 << 20, // what NVIDIA recommends for Hopper and Blackwell
    ALIGNMENT = 256,              // of everything in the workspace, and the largest that kernels ask for
    STRIDE_MULTIPLE = 8,          // decoded rows start at multiples of 16 bytes
    TABLE_SIZE = 256,
    TABLE_PROBES = 8
};

static size_t round_up(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static void check_cublas(cublasStatus_t status, const char *doing) {
    if (status != CUBLAS_STATUS_SUCCESS) die("%s failed: %s", doing, cublasLtGetStatusString(status));
}

// Paths
// ---------------------------------------------------------------------------------------------------------------

// Up to 12.8.3 cuBLASLt's own cache of heuristics takes MXFP8 for FP8 with one scale.
enum { NATIVE_CUBLASLT = 120804 };

static const char *const ONLY_TN = "columnwise operands transposed first, since on compute capability 12.x cuBLASLt "
                                   "multiplies FP8 only with both operands stored along K";

bool cuda_gemm_has_native(int capability, size_t cublaslt, const char **why) {
    int major = capability / 10;
    *why = NULL;
    if (major < 10) {
        *why = "compute capabilities below 10.0 have no block-scaled FP8";
    } else if (major != 10 && major != 12) {
        *why = "only compute capabilities 10.x and 12.x are known to cuBLASLt's block-scaled FP8";
    } else if (cublaslt < NATIVE_CUBLASLT) {
        *why = "block-scaled FP8 needs cuBLASLt 12.9 or later";
    } else {
        if (major == 12) *why = ONLY_TN;
        return true;
    }
    return false;
}

static bool is_fp32(Operand operand) { return !operand_is_quantized(operand) && operand.tensor.dtype == FORMAT_FP32; }

static bool is_fp8(Operand o) { return o.quantized.format == FORMAT_E4M3 || o.quantized.format == FORMAT_E5M2; }

static bool is_multiple(int64_t x, int64_t of) { return x % of == 0; }

static bool is_aligned_16(const void *pointer) { return (uintptr_t)pointer % 16 == 0; }

// Scales that are still to be swizzled may lie anywhere.
static bool is_aligned_as_multiplied(const QuantizedTensor *q) {
    return is_aligned_16(q->elements) && (q->form != FORM_SWIZZLED || is_aligned_16(q->scales));
}

typedef struct {
    int64_t M, N, K;
} Shape;

static Shape gemm_shape(Operand a, Operand b, GemmOptions options) {
    return (Shape){.M = options.transpose_a ? operand_cols(a) : operand_rows(a),
                   .N = options.transpose_b ? operand_rows(b) : operand_cols(b),
                   .K = options.transpose_a ? operand_rows(a) : operand_cols(a)};
}

// cuBLAS's manual, "Narrow precision data types usage": all dimensions, strides and pointers in
// 16-byte steps; one operand may be E5M2; bias only of BF16. It doesn't say what becomes of a block
// that isn't whole, so K is in blocks.
static const char *why_not_native(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options) {
    const char *why;
    Shape s = gemm_shape(a, b, options);
    if (!cuda_gemm_has_native(device.capability, device.cublaslt, &why)) return why;
    if (device.policy == MX_GEMM_EMULATED) return "emulation was asked for";
    if (!is_fp8(a) || !is_fp8(b)) return "FP6 and FP4 operands are multiplied in BF16";
    if (a.quantized.format == FORMAT_E5M2 && b.quantized.format == FORMAT_E5M2) return "both operands are E5M2";
    if (options.transpose_a && options.transpose_b) return "both operands are transposed";
    if (!is_multiple(s.K, MX_BLOCK)) return "K isn't a multiple of 32";
    if (!is_multiple(s.M, 16) || !is_multiple(s.N, 16)) return "M or N isn't a multiple of 16";
    if (!is_multiple(d.stride * (int64_t)dtype_size(d.dtype), 16) || !is_aligned_16(d.data) ||
        !is_aligned_as_multiplied(&a.quantized) || !is_aligned_as_multiplied(&b.quantized)) {
        return "a matrix isn't aligned to 16 bytes";
    }
    if (options.bias && d.dtype == FORMAT_FP32) return "cuBLASLt would round the bias of an FP32 result to BF16";
    return NULL;
}

GemmPath cuda_gemm_path(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options, const char **why) {
    *why = NULL;
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    if (is_fp32(a) || is_fp32(b)) return GEMM_FP32;
    if (!operand_is_quantized(a) && !operand_is_quantized(b)) return GEMM_BF16;
    if (!operand_is_quantized(a) || !operand_is_quantized(b)) return GEMM_EMULATED;
    *why = why_not_native(device, d, a, b, options);
    return *why ? GEMM_EMULATED : GEMM_NATIVE;
}

// The current device, looked at once.
static GemmDevice this_device;

static GemmDevice current_device(void) {
    if (this_device.capability == 0) {
        int device, major, minor;
        cuda_check(cudaGetDevice(&device), "asking for the current GPU");
        cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking what the GPU is");
        cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking what the GPU is");
        this_device.cublaslt = cublasLtGetVersion();
        this_device.capability = 10 * major + minor;
    }
    return this_device;
}

void cuda_gemm_set_policy(MxGemm policy) { this_device.policy = policy; }

bool cuda_gemm_check_native(const char *name, Error *error) {
    GemmDevice device = current_device();
    const char *why;
    return cuda_gemm_has_native(device.capability, device.cublaslt, &why) ||
           error_set(error, "%s can't multiply MXFP8 natively: %s", name, why);
}

QuantizedForm cuda_gemm_quantized_form(GemmDevice device, bool for_one_gemm) {
    const char *why;
    bool native = cuda_gemm_has_native(device.capability, device.cublaslt, &why);
    if (device.policy != MX_GEMM_EMULATED && (native || device.policy == MX_GEMM_NATIVE)) return FORM_SWIZZLED;
    return for_one_gemm ? FORM_DECODED : FORM_PLAIN;
}

QuantizedForm cuda_quantized_form(bool for_one_gemm) {
    return cuda_gemm_quantized_form(current_device(), for_one_gemm);
}

void cuda_gemm_describe(char *text, size_t bytes) {
    GemmDevice device = current_device();
    const char *why;
    bool native = cuda_gemm_has_native(device.capability, device.cublaslt, &why);
    if (native && device.policy == MX_GEMM_EMULATED) {
        native = false;
        why = "as asked for, or as the self-check wants it";
    }
    snprintf(text, bytes, "GEMMs by cuBLASLt %zu.%zu.%zu, MXFP8 %s%s%s%s", device.cublaslt / 10000,
             device.cublaslt / 100 % 100, device.cublaslt % 100, native ? "native" : "emulated in BF16",
             why ? " (" : "", why ? why : "", why ? ")" : "");
}

// The call
// ------------------------------------------------------------------------------------------------------------

static int64_t alignment_of(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer | ALIGNMENT;
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
    check_cublas(cublasLtMatmulDescSetAttribute(d->operation, attribute, value, bytes), "describing a GEMM");
}

static void set_int(const GemmDescriptors *d, cublasLtMatmulDescAttributes_t attribute, int32_t value) {
    set_attribute(d, attribute, &value, sizeof(value));
}

static void prefer(const GemmDescriptors *d, cublasLtMatmulPreferenceAttributes_t attribute, int64_t value) {
    uint32_t as_wanted = (uint32_t)value;
    check_cublas(cublasLtMatmulPreferenceSetAttribute(d->preference, attribute, &as_wanted, sizeof(as_wanted)),
                 "describing a GEMM");
}

static cublasLtMatrixLayout_t make_layout(int64_t type, int64_t rows, int64_t cols, int64_t stride) {
    cublasLtMatrixLayout_t layout;
    check_cublas(cublasLtMatrixLayoutCreate(&layout, (cudaDataType_t)type, (uint64_t)rows, (uint64_t)cols, stride),
                 "describing a matrix");
    return layout;
}

GemmDescriptors cuda_gemm_descriptors(const GemmCall *c) {
    GemmDescriptors d;
    check_cublas(cublasLtMatmulDescCreate(&d.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a GEMM");
    set_int(&d, CUBLASLT_MATMUL_DESC_TRANSA, c->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set_int(&d, CUBLASLT_MATMUL_DESC_TRANSB, c->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (is_native(c)) {
        set_int(&d, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
        set_int(&d, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
    }
    if (c->bias_type >= 0) {
        set_int(&d, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        set_int(&d, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)c->bias_type);
    }
    d.a = make_layout(c->a_type, c->transpose_a ? c->k : c->m, c->transpose_a ? c->m : c->k, c->lda);
    d.b = make_layout(c->b_type, c->transpose_b ? c->n : c->k, c->transpose_b ? c->k : c->n, c->ldb);
    d.d = make_layout(c->d_type, c->m, c->n, c->ldd);

    check_cublas(cublasLtMatmulPreferenceCreate(&d.preference), "describing a GEMM");
    uint64_t workspace = LIBRARY_WORKSPACE;
    check_cublas(cublasLtMatmulPreferenceSetAttribute(d.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &workspace, sizeof(workspace)),
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
    check_cublas(cublasLtMatmulPreferenceDestroy(d->preference), "forgetting a GEMM");
    check_cublas(cublasLtMatrixLayoutDestroy(d->d), "forgetting a GEMM");
    check_cublas(cublasLtMatrixLayoutDestroy(d->b), "forgetting a GEMM");
    check_cublas(cublasLtMatrixLayoutDestroy(d->a), "forgetting a GEMM");
    check_cublas(cublasLtMatmulDescDestroy(d->operation), "forgetting a GEMM");
}

void cuda_gemm_set_pointers(const GemmDescriptors *d, const void *a_scales, const void *b_scales, const void *bias) {
    if (a_scales) set_attribute(d, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a_scales, sizeof(a_scales));
    if (b_scales) set_attribute(d, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b_scales, sizeof(b_scales));
    if (bias) set_attribute(d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
}

// Descriptors and heuristics, made once for each call
// -----------------------------------------------------------------

typedef struct {
    bool used;
    const char *declined; // why cuBLASLt doesn't multiply it, one of few constants; NULL: it does
    GemmCall call;
    GemmDescriptors descriptors;
    cublasLtMatmulAlgo_t algorithm;
} TableEntry;

static TableEntry table[TABLE_SIZE];
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

// The call's entry, or the one it is to take: a free one near its place, or the one in its place.
// Sampling has a shape for each length of the text, so that entries do get taken from others.
static TableEntry *find_entry(const GemmCall *call) {
    uint64_t first = hash_call(call);
    TableEntry *unused = NULL;
    for (uint64_t i = 0; i < TABLE_PROBES; i++) {
        TableEntry *entry = &table[(first + i) % TABLE_SIZE];
        if (entry->used && memcmp(&entry->call, call, sizeof(*call)) == 0) return entry;
        if (!entry->used && !unused) unused = entry;
    }
    return unused ? unused : &table[first % TABLE_SIZE];
}

static void fill_entry(TableEntry *entry, const GemmCall *call, const void *a_scales, const void *b_scales,
                       const void *bias) {
    if (entry->used) cuda_gemm_descriptors_destroy(&entry->descriptors);
    if (!handle) check_cublas(cublasLtCreate(&handle), "starting cuBLASLt");
    *entry = (TableEntry){.used = true, .call = *call, .descriptors = cuda_gemm_descriptors(call)};
    cuda_gemm_set_pointers(&entry->descriptors, a_scales, b_scales, bias); // heuristics look at their alignment

    GemmDescriptors *d = &entry->descriptors;
    cublasLtMatmulHeuristicResult_t result;
    int count = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, d->operation, d->a, d->b, d->d, d->d, d->preference, 1, &result, &count);
    if (status == CUBLAS_STATUS_SUCCESS && count == 1 && result.state == CUBLAS_STATUS_SUCCESS) {
        entry->algorithm = result.algo;
    } else if (is_native(call)) {
        entry->declined = "cuBLASLt has no native kernel for it";
    } else {
        die("cuBLASLt %zu has no kernel for a GEMM of m %lld, n %lld, k %lld: %s", cublasLtGetVersion(),
            (long long)call->m, (long long)call->n, (long long)call->k, cublasLtGetStatusString(status));
    }
}

// The call's entry, made where it isn't there yet. Looks at no data.
static TableEntry *get_entry(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options) {
    GemmCall call = cuda_gemm_call(d, a, b, bias, options);
    TableEntry *entry = find_entry(&call);
    if (!entry->used || memcmp(&entry->call, &call, sizeof(call)) != 0) {
        fill_entry(entry, &call, b.scales, a.scales, bias.data);
    }
    return entry;
}

// A native kernel that heuristics promised and that fails all the same isn't tried again. What it
// failed with is told of the first.
static const char *say_failed(cublasStatus_t status) {
    static char text[128];
    if (!text[0]) snprintf(text, sizeof(text), "cublasLtMatmul failed with %s", cublasLtGetStatusString(status));
    return text;
}

// NULL, or why cuBLASLt doesn't multiply it natively: d is then as it was.
static const char *multiply(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options, void *workspace) {
    TableEntry *entry = get_entry(d, a, b, bias, options);
    GemmDescriptors *t = &entry->descriptors;
    cuda_gemm_set_pointers(t, b.scales, a.scales, bias.data);
    float alpha = 1, beta = options.accumulate ? 1 : 0;
    cublasStatus_t status =
        cublasLtMatmul(handle, t->operation, &alpha, b.data, t->a, a.data, t->b, &beta, d.data, t->d, d.data, t->d,
                       &entry->algorithm, workspace, LIBRARY_WORKSPACE, cuda_stream());
    if (!is_native(&entry->call)) check_cublas(status, "multiplying matrices");
    if (status == CUBLAS_STATUS_SUCCESS) return NULL;
    cudaGetLastError(); // so that it isn't taken for a later launch's
    return entry->declined = say_failed(status);
}

// Operands as they are multiplied
// -------------------------------------------------------------------------------------

static Format value_dtype(Operand a, Operand b) { return is_fp32(a) || is_fp32(b) ? FORMAT_FP32 : FORMAT_BF16; }

static int64_t decoded_stride(Operand operand) {
    return (operand_cols(operand) + STRIDE_MULTIPLE - 1) / STRIDE_MULTIPLE * STRIDE_MULTIPLE;
}

static bool is_decoded(Operand o) { return operand_is_quantized(o) && o.quantized.form == FORM_DECODED; }

// What was quantized into decoded values is as it is multiplied where its rows are aligned.
static bool needs_decoding(Operand operand, Format dtype) {
    if (is_decoded(operand)) return dtype != FORMAT_BF16 || decoded_stride(operand) != operand.quantized.cols;
    return operand_is_quantized(operand) || operand.tensor.dtype != dtype;
}

// Where a native GEMM finds the scales in the workspace, if it has to swizzle them, and codes that
// it transposes.
static size_t swizzled_bytes(const QuantizedTensor *q) {
    if (q->form == FORM_SWIZZLED) return 0;
    size_t along_rows = quantized_scale_bytes(FORM_SWIZZLED, AXIS_ROWWISE, q->rows, q->cols);
    size_t along_columns = quantized_scale_bytes(FORM_SWIZZLED, AXIS_COLUMNWISE, q->rows, q->cols);
    return round_up(q->axis == AXIS_ROWWISE || (q->axis == AXIS_SQUARE && along_rows > along_columns) ? along_rows
                                                                                                      : along_columns);
}

static size_t native_bytes(const QuantizedTensor *q) {
    return swizzled_bytes(q) + (q->axis != AXIS_ROWWISE ? round_up((size_t)(q->rows * q->cols)) : 0);
}

// Enough for either path and for every device: cuBLASLt can decline when it is asked, and the
// self-check can say no.
static size_t prepared_bytes(Operand operand, Format dtype) {
    if (!needs_decoding(operand, dtype)) return 0;
    size_t decoded = round_up((size_t)(operand_rows(operand) * decoded_stride(operand)) * dtype_size(dtype));
    bool has_codes = operand_is_quantized(operand) && !is_decoded(operand);
    size_t native = has_codes ? native_bytes(&operand.quantized) : 0;
    return decoded > native ? decoded : native;
}

// cuBLASLt gives FP32 operands an FP32 result only; a BF16 one is rounded from it. The largest that
// d can be, whichever dimension the operands share.
static size_t wide_result_bytes(Operand a, Operand b) {
    if (value_dtype(a, b) != FORMAT_FP32) return 0;
    int64_t a_sizes[] = {operand_rows(a), operand_cols(a)}, b_sizes[] = {operand_rows(b), operand_cols(b)}, largest = 0;
    for (int i = 0; i < 4; i++) {
        int64_t size = a_sizes[i / 2] == b_sizes[i % 2] ? a_sizes[1 - i / 2] * b_sizes[1 - i % 2] : 0;
        largest = size > largest ? size : largest;
    }
    return round_up((size_t)largest * dtype_size(FORMAT_FP32));
}

size_t cuda_gemm_workspace(Operand a, Operand b) {
    Format dtype = value_dtype(a, b);
    int64_t rows = operand_rows(b), cols = operand_cols(b); // one of them is N
    size_t bias = round_up((size_t)(rows > cols ? rows : cols) * dtype_size(FORMAT_BF16));
    return LIBRARY_WORKSPACE + prepared_bytes(a, dtype) + prepared_bytes(b, dtype) + bias + wide_result_bytes(a, b);
}

// Whether a native GEMM wants rows along K, so that columnwise codes are transposed: blocks run
// along K then too, and the swizzled scales of the transpose are the same bytes.
static bool wants_rows_along_k(void) { return current_device().capability / 10 == 12; }

// Where and how a native GEMM finds the operand, once make_native has made what has to be made of
// it.
static GemmMatrix place_native(const QuantizedTensor *q, Axis along, void *scratch) {
    GemmMatrix matrix = {.data = q->elements,
                         .scales = q->form == FORM_SWIZZLED ? q->scales : scratch,
                         .type = q->format == FORMAT_E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3,
                         .rows = q->rows,
                         .cols = q->cols,
                         .stride = q->cols};
    if (along == AXIS_ROWWISE || !wants_rows_along_k()) return matrix;
    matrix.data = (char *)scratch + swizzled_bytes(q);
    matrix.rows = q->cols;
    matrix.cols = matrix.stride = q->rows;
    return matrix;
}

static void make_native(GemmMatrix matrix, const QuantizedTensor *q, Axis along) {
    if (q->form != FORM_SWIZZLED) cuda_swizzle_scales((uint8_t *)matrix.scales, q, along);
    if (matrix.data != q->elements) cuda_transpose_codes((uint8_t *)matrix.data, q->elements, q->rows, q->cols);
}

// The operand as a tensor of `dtype`: itself, or decoded into `scratch`.
static GemmMatrix prepare_decoded(Operand operand, Format dtype, void *scratch) {
    Tensor tensor = operand_as_stored(operand).tensor;
    if (needs_decoding(operand, dtype)) {
        Tensor stored = tensor;
        tensor = tensor_make(scratch, dtype, operand_rows(operand), operand_cols(operand));
        tensor.stride = decoded_stride(operand);
        if (operand_is_quantized(operand) && !is_decoded(operand)) {
            cuda_dequantize(tensor, &operand.quantized, dtype);
        } else {
            cuda_convert(tensor, stored);
        }
    }
    return (GemmMatrix){.data = tensor.data,
                        .type = dtype == FORMAT_FP32 ? CUDA_R_32F : CUDA_R_16BF,
                        .rows = tensor.rows,
                        .cols = tensor.cols,
                        .stride = tensor.stride};
}

// cuBLASLt adds a bias of d's dtype (CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE in cublasLt.h lists the
// exceptions; none helps). An FP32 one is added to a BF16 result as BF16, before the one rounding
// of the sum.
static GemmBias place_bias(const float *bias, Tensor d, void *scratch) {
    return !bias || d.dtype == FORMAT_FP32 ? (GemmBias){bias, CUDA_R_32F} : (GemmBias){scratch, CUDA_R_16BF};
}

static void make_bias(GemmBias made, const float *bias, Tensor d) {
    if (made.data == bias) return;
    cuda_convert(tensor_make((void *)made.data, FORMAT_BF16, 1, d.cols),
                 tensor_make((void *)bias, FORMAT_FP32, 1, d.cols));
}

const char *cuda_gemm_run(GemmPath path, Tensor d, Operand a, Operand b, GemmOptions options, void *workspace) {
    Format dtype = value_dtype(a, b);
    char *a_scratch = (char *)workspace + LIBRARY_WORKSPACE;
    char *b_scratch = a_scratch + prepared_bytes(a, dtype), *rest = b_scratch + prepared_bytes(b, dtype);
    GemmBias bias = place_bias(options.bias, d, rest);
    if (path == GEMM_NATIVE) {
        // Whether dot products run along the operands' rows or columns.
        Axis a_along = options.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE;
        Axis b_along = options.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE;
        GemmMatrix native_a = place_native(&a.quantized, a_along, a_scratch);
        GemmMatrix native_b = place_native(&b.quantized, b_along, b_scratch);
        if (wants_rows_along_k()) options.transpose_a = false, options.transpose_b = true;
        const char *declined = get_entry(d, native_a, native_b, bias, options)->declined;
        if (declined) return declined; // before anything is made for it
        make_native(native_a, &a.quantized, a_along);
        make_native(native_b, &b.quantized, b_along);
        make_bias(bias, options.bias, d);
        return multiply(d, native_a, native_b, bias, options, workspace);
    }
    GemmMatrix decoded_a = prepare_decoded(a, dtype, a_scratch), decoded_b = prepare_decoded(b, dtype, b_scratch);
    if (dtype != FORMAT_FP32 || d.dtype == FORMAT_FP32) {
        make_bias(bias, options.bias, d);
        return multiply(d, decoded_a, decoded_b, bias, options, workspace);
    }
    Tensor wide = tensor_make(rest, FORMAT_FP32, d.rows, d.cols);
    if (options.accumulate) cuda_convert(wide, d);
    multiply(wide, decoded_a, decoded_b, (GemmBias){options.bias, CUDA_R_32F}, options, workspace);
    cuda_convert(d, wide);
    return NULL;
}

static void check_axis(Operand operand, bool along_columns) {
    if (operand_is_quantized(operand) && operand.quantized.axis == AXIS_SQUARE) return;
    if (operand_is_quantized(operand) && operand.quantized.axis != (along_columns ? AXIS_ROWWISE : AXIS_COLUMNWISE)) {
        die("internal error: gemm was given a quantized operand whose blocks don't run along K");
    }
}

static Shape check_shape(Tensor d, Operand a, Operand b, GemmOptions options) {
    Shape s = gemm_shape(a, b, options);
    int64_t K_of_b = options.transpose_b ? operand_cols(b) : operand_rows(b);
    if (s.K != K_of_b || d.rows != s.M || d.cols != s.N) {
        die("internal error: gemm shapes don't agree: d %lldx%lld, M %lld, N %lld, K %lld and %lld", (long long)d.rows,
            (long long)d.cols, (long long)s.M, (long long)s.N, (long long)s.K, (long long)K_of_b);
    }
    check_axis(a, !options.transpose_a);
    check_axis(b, options.transpose_b);
    return s;
}

// Two quantized operands are not multiplied natively: where the device could, or should, this is
// said, once for each reason. `why` is one of few constants.
static void say_emulated(GemmDevice device, Shape s, const char *why) {
    enum { REASONS = 16 };
    static const char *said[REASONS];
    const char *unused;
    if (device.policy == MX_GEMM_NATIVE) {
        die("a GEMM of M %lld, N %lld, K %lld can't be multiplied natively: %s (--mx-gemm auto emulates it)",
            (long long)s.M, (long long)s.N, (long long)s.K, why);
    }
    if (device.policy == MX_GEMM_EMULATED || !cuda_gemm_has_native(device.capability, device.cublaslt, &unused)) {
        return;
    }
    for (int i = 0; i < REASONS && said[i] != why; i++) {
        if (said[i]) continue;
        said[i] = why;
        fprintf(stderr, "MXFP8 GEMM of M %lld, N %lld, K %lld, and others like it, emulated in BF16: %s\n",
                (long long)s.M, (long long)s.N, (long long)s.K, why);
        return;
    }
}

void cuda_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    Shape s = check_shape(d, a, b, options);
    if (s.M == 0 || s.N == 0) return;
    GemmDevice device = current_device();
    void *workspace = cuda_workspace(cuda_gemm_workspace(a, b));
    const char *why;
    GemmPath path = cuda_gemm_path(device, d, a, b, options, &why);
    if (why) say_emulated(device, s, why);
    const char *declined = cuda_gemm_run(path, d, a, b, options, workspace);
    if (!declined) return;
    say_emulated(device, s, declined);
    cuda_gemm_run(GEMM_EMULATED, d, a, b, options, workspace);
}

// Self-check
// ----------------------------------------------------------------------------------------------------------

// A GEMM of the check: its operands on the host, and as d wants to be.
typedef struct {
    int64_t M, N, K;
    Format a, b;
} CheckShape;

// Multiples of 32 that are none of 128, larger and smaller than a tile; with E5M2 on either side.
static const CheckShape CHECK_SHAPES[] = {{160, 288, 96, FORMAT_E4M3, FORMAT_E4M3},
                                          {32, 416, 544, FORMAT_E5M2, FORMAT_E4M3},
                                          {608, 224, 352, FORMAT_E4M3, FORMAT_E5M2}};

enum { CHECK_BLOCK_BYTES = LIBRARY_WORKSPACE + (8 << 20) };

typedef struct {
    Operand operand; // on the device
    float *values;   // (rows, cols), decoded
} CheckOperand;

static uint32_t next_random(uint64_t *state) {
    uint32_t word[4];
    philox(word, 1, 0, (*state)++);
    return word[0];
}

static void *to_device(MemoryPlan *plan, const void *host, size_t bytes) {
    void *device = memory_take(plan, MEMORY_SCRATCH, bytes);
    cuda_check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, cuda_stream()), "copying to the GPU");
    cuda_check(cudaStreamSynchronize(cuda_stream()), "waiting for the GPU"); // the host's memory is freed after this
    return device;
}

// Every finite code, with scales 2^-4 to 2^3: sums neither overflow nor lose what a block adds.
static CheckOperand make_operand(MemoryPlan *plan, Format format, Axis axis, int64_t rows, int64_t cols,
                                 uint64_t *state) {
    size_t count = (size_t)(rows * cols), num_scales = (size_t)mx_num_scales(axis, rows, cols);
    uint8_t *elements = allocate(count), *scales = allocate(num_scales);
    for (size_t i = 0; i < num_scales; i++) {
        scales[i] = (uint8_t)(123 + next_random(state) % 8);
    }
    CheckOperand result = {.values = allocate(count * sizeof(float))};
    for (size_t i = 0; i < count; i++) {
        uint32_t word = next_random(state), max_code = mx_element(format).max_code;
        int64_t row = (int64_t)i / cols, col = (int64_t)i % cols;
        int64_t block = axis == AXIS_ROWWISE ? row * mx_num_blocks(cols) + col / MX_BLOCK : row / MX_BLOCK * cols + col;
        elements[i] = (uint8_t)((word & 0x80) | (word >> 8) % (max_code + 1));
        result.values[i] = mx_decode(format, elements[i]) * mx_scale_value(scales[block]);
    }
    result.operand = operand_quantized((QuantizedTensor){.elements = to_device(plan, elements, count),
                                                         .scales = to_device(plan, scales, num_scales),
                                                         .format = format,
                                                         .axis = axis,
                                                         .rows = rows,
                                                         .cols = cols});
    free(elements);
    free(scales);
    return result;
}

// The largest |d - exact| / bound. Products of E4M3 and E5M2 values are exact in FP32. Each of the
// K additions, the bias's and d's own, may lose the last of FP32's 24 bits of a sum that never
// exceeds the sum of magnitudes: tensor cores truncate, so 2^-23 where rounding would lose 2^-24.
// The store rounds once, by 2^-8 of a BF16 value at most.
static double worst_error(const CheckShape *s, const float *d, double unit, const float *before, const float *bias,
                          CheckOperand a, CheckOperand b, GemmOptions options) {
    double worst = 0;
    for (int64_t i = 0; i < s->M * s->N; i++) {
        int64_t m = i / s->N, n = i % s->N;
        double sum = before[i] + (double)bias[n], magnitude = fabs((double)before[i]) + fabs((double)bias[n]);
        for (int64_t k = 0; k < s->K; k++) {
            double product = (double)a.values[options.transpose_a ? k * s->M + m : m * s->K + k] *
                             (double)b.values[options.transpose_b ? n * s->K + k : k * s->N + n];
            sum += product;
            magnitude += fabs(product);
        }
        double accumulated = (double)(s->K + 2) * 0x1p-23 * magnitude;
        double ratio = fabs(d[i] - sum) / (accumulated + unit * (fabs(sum) + accumulated));
        worst = ratio <= worst ? worst : isnan(ratio) ? INFINITY : ratio;
    }
    return worst;
}

// Runs the GEMM on a path and returns its worst error, or -1 where cuBLASLt declines: such a GEMM
// then is emulated.
static double check_path(GemmPath path, const CheckShape *s, MemoryPlan plan, CheckOperand a, CheckOperand b,
                         GemmOptions options, bool has_bias, uint64_t *state) {
    size_t count = (size_t)(s->M * s->N), size = options.accumulate ? 4 : 2;
    float *d = allocate(count * sizeof(float)), *before = allocate(count * sizeof(float));
    float *bias = allocate((size_t)s->N * sizeof(float));
    for (size_t i = 0; i < count && options.accumulate; i++) {
        before[i] = (float)(int32_t)next_random(state) * 0x1p-20f;
    }
    for (int64_t n = 0; n < s->N && has_bias; n++) {
        bias[n] = mx_from_bf16(mx_to_bf16((float)(int32_t)next_random(state) * 0x1p-20f)); // so as not to be rounded
    }
    if (has_bias) options.bias = to_device(&plan, bias, (size_t)s->N * sizeof(float));
    Tensor out = tensor_make(to_device(&plan, before, count * size), size == 4 ? FORMAT_FP32 : FORMAT_BF16, s->M, s->N);
    void *workspace = memory_take(&plan, MEMORY_SCRATCH, cuda_gemm_workspace(a.operand, b.operand));
    if (plan.used > CHECK_BLOCK_BYTES) die("internal error: the self-check needs %zu bytes", plan.used);

    bool ran = !cuda_gemm_run(path, out, a.operand, b.operand, options, workspace);
    cuda_check(cudaMemcpyAsync(d, out.data, count * size, cudaMemcpyDeviceToHost, cuda_stream()), "copying a result");
    cuda_check(cudaStreamSynchronize(cuda_stream()), "waiting for the GPU");
    for (size_t i = count; i-- > 0 && size == 2;) { // widened in place, from the end
        uint16_t narrow;
        memcpy(&narrow, (char *)d + 2 * i, sizeof(narrow));
        d[i] = mx_from_bf16(narrow);
    }
    double worst = ran ? worst_error(s, d, size == 2 ? 0x1p-8 : 0x1p-24, before, bias, a, b, options) : -1;
    free(d);
    free(before);
    free(bias);
    return worst;
}

// What a path's GEMMs are off by at most, as a ratio of the bound, and how many ran.
typedef struct {
    double worst;
    int ran;
} CheckResult;

static void add_result(CheckResult *sum, double worst) {
    if (worst < 0) return;
    sum->worst = fmax(sum->worst, worst);
    sum->ran++;
}

// Both paths over one shape in one layout.
static void check_layout(const CheckShape *s, GemmOptions options, bool has_bias, void *block, uint64_t *state,
                         CheckResult *native, CheckResult *emulated) {
    MemoryPlan plan = {.base = block};
    bool ta = options.transpose_a, tb = options.transpose_b;
    CheckOperand a =
        make_operand(&plan, s->a, ta ? AXIS_COLUMNWISE : AXIS_ROWWISE, ta ? s->K : s->M, ta ? s->M : s->K, state);
    CheckOperand b =
        make_operand(&plan, s->b, tb ? AXIS_ROWWISE : AXIS_COLUMNWISE, tb ? s->N : s->K, tb ? s->K : s->N, state);
    add_result(native, check_path(GEMM_NATIVE, s, plan, a, b, options, has_bias, state));
    add_result(emulated, check_path(GEMM_EMULATED, s, plan, a, b, options, has_bias, state));
    free(a.values);
    free(b.values);
}

bool cuda_gemm_self_check(char *text, size_t bytes) {
    GemmDevice device = current_device();
    const char *why;
    if (!cuda_gemm_has_native(device.capability, device.cublaslt, &why)) {
        snprintf(text, bytes, "MXFP8 GEMMs are emulated in BF16, nothing to check: %s", why);
        return true;
    }
    if (device.policy == MX_GEMM_EMULATED) {
        snprintf(text, bytes, "MXFP8 GEMMs are emulated in BF16, as asked for; nothing to check");
        return true;
    }
    static const GemmOptions FPROP = {.transpose_b = true}, DGRAD = {0},
                             WGRAD = {.transpose_a = true, .accumulate = true};
    CheckResult native = {0}, emulated = {0};
    uint64_t state = 0;
    int count = 0;
    void *block = NULL;
    cuda_check(cudaMalloc(&block, CHECK_BLOCK_BYTES), "allocating the self-check's memory");
    for (size_t i = 0; i < sizeof(CHECK_SHAPES) / sizeof(CHECK_SHAPES[0]); i++) {
        check_layout(&CHECK_SHAPES[i], FPROP, true, block, &state, &native, &emulated);
        check_layout(&CHECK_SHAPES[i], DGRAD, false, block, &state, &native, &emulated);
        check_layout(&CHECK_SHAPES[i], WGRAD, false, block, &state, &native, &emulated);
        count += 3;
    }
    cuda_check(cudaFree(block), "freeing the self-check's memory");

    bool agree = native.ran > 0 && native.worst <= 1 && emulated.ran == count && emulated.worst <= 1;
    if (!agree) cuda_gemm_set_policy(MX_GEMM_EMULATED);
    snprintf(text, bytes,
             "%s: of %d MXFP8 GEMMs %d ran natively, off by %.3g of the accumulation bound, %d emulated, by %.3g%s",
             agree ? "self-check passed" : "SELF-CHECK FAILED", count, native.ran, native.worst, emulated.ran,
             emulated.worst, agree ? "" : "; this run does without native MXFP8 GEMMs");
    return agree;
}
