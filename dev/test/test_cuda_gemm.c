/*
The CUDA backend's GEMM. Without a GPU:
- the path of a GEMM as a table: compute capability x cuBLASLt version x operands x shape x policy;
- the descriptors that cuBLASLt is given, read back;
- all of gemm.c executed: a second copy of it, whose library calls go to a column-major GEMM of this
  file that obeys the descriptors and refuses what NVIDIA's manual says cuBLASLt refuses. Operands of
  all formats and forms, all layouts, tails, unaligned strides, every path; the self-check, with
  faults planted in the multiplication.
On a GPU the same cases go through cuBLASLt.
*/
#include "check.h"
#include "llmc/cpu/cpu.h"
#include "llmc/cuda/gemm.h"

#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CAPABILITY_H100 = 90, CAPABILITY_B200 = 100, CAPABILITY_5090 = 120, CUBLASLT_13_1 = 130100 };

// The second copy
// -----------------------------------------------------------------------------------------------------

static void *hosted_block;
static size_t hosted_block_bytes;
static int heuristics_asked;
static bool declines_native, declines_e5m2, takes_only_tn;
static cublasStatus_t native_status; // of native GEMMs when they are run
static int native_runs;              // since it was set to 0
static enum { NO_FAULT, WRONG_SCALE, LOST_BIAS, COARSE_SUM } fault;

static void *hosted_workspace(size_t bytes) {
    assert_true(bytes <= hosted_block_bytes);
    return hosted_block;
}

static cudaError_t hosted_malloc(void **memory, size_t bytes) {
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return cudaSuccess;
}

static cudaError_t hosted_free(void *memory) {
    free(memory);
    return cudaSuccess;
}

static cudaError_t hosted_copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                               cudaStream_t stream) {
    (void)kind, (void)stream;
    memcpy(to, from, bytes);
    return cudaSuccess;
}

static int swizzles, dequantizations, transposes; // since they were set to 0

static int64_t swizzled_offset(const QuantizedTensor *q, int64_t row, int64_t col) {
    return q->axis == AXIS_ROWWISE ? mx_swizzled_scale_offset(row, col / MX_BLOCK, q->cols)
                                   : mx_swizzled_scale_offset(col, row / MX_BLOCK, q->rows);
}

static int64_t plain_offset(const QuantizedTensor *q, int64_t row, int64_t col) {
    return q->axis == AXIS_ROWWISE ? row * mx_num_blocks(q->cols) + col / MX_BLOCK : row / MX_BLOCK * q->cols + col;
}

static void hosted_swizzle(uint8_t *swizzled, const QuantizedTensor *q, Axis along) {
    assert_int_equal(along, q->axis);
    assert_int_equal(q->form, FORM_PLAIN);
    swizzles++;
    memset(swizzled, 0, quantized_scale_bytes(FORM_SWIZZLED, q->axis, q->rows, q->cols));
    for (int64_t i = 0; i < q->rows * q->cols; i++) {
        int64_t row = i / q->cols, col = i % q->cols;
        swizzled[swizzled_offset(q, row, col)] = q->scales[plain_offset(q, row, col)];
    }
}

static void hosted_dequantize(Tensor out, const QuantizedTensor *q, Format values) {
    assert_int_not_equal(q->form, FORM_DECODED);
    dequantizations++;
    QuantizedTensor plain = *q;
    plain.form = FORM_PLAIN;
    if (q->form == FORM_SWIZZLED) plain.scales = malloc((size_t)mx_num_scales(q->axis, q->rows, q->cols));
    for (int64_t i = 0; i < q->rows * q->cols && q->form == FORM_SWIZZLED; i++) {
        int64_t row = i / q->cols, col = i % q->cols;
        plain.scales[plain_offset(q, row, col)] = q->scales[swizzled_offset(q, row, col)];
    }
    cpu_dequantize(out, &plain, values);
    if (q->form == FORM_SWIZZLED) free(plain.scales);
}

static void hosted_transpose(uint8_t *out, const uint8_t *codes, int64_t rows, int64_t cols) {
    transposes++;
    for (int64_t i = 0; i < rows * cols; i++) {
        out[i % cols * rows + i / cols] = codes[i];
    }
}

// What the descriptors hold.
typedef struct {
    int32_t transpose_a, transpose_b, epilogue, bias_type, a_mode, b_mode;
    const void *a_scales, *b_scales, *bias;
} Operation;

typedef struct {
    uint32_t type;
    uint64_t rows, cols;
    int64_t stride;
} Layout;

static void get(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, void *value, size_t bytes) {
    size_t written = 0;
    assert_int_equal(cublasLtMatmulDescGetAttribute(operation, attribute, value, bytes, &written),
                     CUBLAS_STATUS_SUCCESS);
    assert_int_equal(written, bytes);
}

static Operation read_operation(cublasLtMatmulDesc_t d) {
    Operation o;
    int32_t compute = 0, scale = 0, pointer_mode = -1;
    int8_t fast_accumulation = -1;
    get(d, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, &compute, sizeof(compute));
    get(d, CUBLASLT_MATMUL_DESC_SCALE_TYPE, &scale, sizeof(scale));
    get(d, CUBLASLT_MATMUL_DESC_POINTER_MODE, &pointer_mode, sizeof(pointer_mode));
    get(d, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast_accumulation, sizeof(fast_accumulation));
    assert_int_equal(compute, CUBLAS_COMPUTE_32F); // not ..._FAST_TF32
    assert_int_equal(scale, CUDA_R_32F);
    assert_int_equal(pointer_mode, CUBLASLT_POINTER_MODE_HOST);
    assert_int_equal(fast_accumulation, 0);
    get(d, CUBLASLT_MATMUL_DESC_TRANSA, &o.transpose_a, sizeof(o.transpose_a));
    get(d, CUBLASLT_MATMUL_DESC_TRANSB, &o.transpose_b, sizeof(o.transpose_b));
    get(d, CUBLASLT_MATMUL_DESC_EPILOGUE, &o.epilogue, sizeof(o.epilogue));
    get(d, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &o.bias_type, sizeof(o.bias_type));
    get(d, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &o.a_mode, sizeof(o.a_mode));
    get(d, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &o.b_mode, sizeof(o.b_mode));
    get(d, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &o.a_scales, sizeof(o.a_scales));
    get(d, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &o.b_scales, sizeof(o.b_scales));
    get(d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &o.bias, sizeof(o.bias));
    return o;
}

static void get_layout(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, void *value,
                       size_t bytes) {
    size_t written = 0;
    assert_int_equal(cublasLtMatrixLayoutGetAttribute(layout, attribute, value, bytes, &written),
                     CUBLAS_STATUS_SUCCESS);
    assert_int_equal(written, bytes);
}

static Layout read_layout(cublasLtMatrixLayout_t layout) {
    Layout l;
    int32_t order = -1;
    get_layout(layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof(order));
    assert_int_equal(order, CUBLASLT_ORDER_COL);
    get_layout(layout, CUBLASLT_MATRIX_LAYOUT_TYPE, &l.type, sizeof(l.type));
    get_layout(layout, CUBLASLT_MATRIX_LAYOUT_ROWS, &l.rows, sizeof(l.rows));
    get_layout(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &l.cols, sizeof(l.cols));
    get_layout(layout, CUBLASLT_MATRIX_LAYOUT_LD, &l.stride, sizeof(l.stride));
    assert_true(l.stride >= (int64_t)l.rows);
    return l;
}

static uint32_t read_preference(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute) {
    uint32_t value = 0;
    size_t written = 0;
    assert_int_equal(cublasLtMatmulPreferenceGetAttribute(preference, attribute, &value, sizeof(value), &written),
                     CUBLAS_STATUS_SUCCESS);
    return value;
}

static bool is_fp8_type(uint32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
static int64_t type_size(uint32_t type) { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1; }

static cublasStatus_t hosted_create(cublasLtHandle_t *handle) {
    *handle = (cublasLtHandle_t)&heuristics_asked;
    return CUBLAS_STATUS_SUCCESS;
}

// What the manual says that cuBLASLt takes ("cublasLtMatmul", table of types; "Narrow precision
// data types usage").
static bool is_supported(cublasLtMatmulDesc_t operation, Layout a, Layout b, Layout c, Layout d) {
    Operation o = read_operation(operation);
    bool fp8 = is_fp8_type(a.type), has_bias = o.epilogue == CUBLASLT_EPILOGUE_BIAS;
    uint64_t k = o.transpose_a ? a.rows : a.cols;
    if (memcmp(&c, &d, sizeof(c)) != 0) return false; // d is written in place
    if (fp8) {
        if (declines_native || !is_fp8_type(b.type) || (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2))
            return false;
        if (declines_e5m2 && (a.type == CUDA_R_8F_E5M2 || b.type == CUDA_R_8F_E5M2)) return false;
        if (takes_only_tn && (o.transpose_a != CUBLAS_OP_T || o.transpose_b != CUBLAS_OP_N)) return false;
        if (o.a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 || o.b_mode != o.a_mode) return false;
        if (a.stride % 16 || b.stride % 16 || d.rows % 16 || d.cols % 16 || k % 16) return false;
        if (d.stride * type_size(d.type) % 16) return false;
        return !has_bias || o.bias_type == CUDA_R_16BF;
    }
    if (o.a_mode || o.b_mode || a.type != b.type) return false;
    if (a.type == CUDA_R_32F && d.type != CUDA_R_32F) return false;
    return !has_bias || o.bias_type == (int32_t)d.type;
}

static cublasStatus_t hosted_heuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                       cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,
                                       cublasLtMatmulHeuristicResult_t *result, int *count) {
    assert_non_null(handle);
    assert_int_equal(wanted, 1);
    assert_int_equal(read_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK),
                     CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    heuristics_asked++;
    *count = is_supported(operation, read_layout(a), read_layout(b), read_layout(c), read_layout(d));
    memset(result, 0, sizeof(*result));
    return *count ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

static double element(const void *data, uint32_t type, int64_t at) {
    switch (type) {
    case CUDA_R_32F:
        return ((const float *)data)[at];
    case CUDA_R_16BF:
        return mx_from_bf16(((const uint16_t *)data)[at]);
    default:
        return mx_decode(type == CUDA_R_8F_E5M2 ? FORMAT_E5M2 : FORMAT_E4M3, ((const uint8_t *)data)[at]);
    }
}

// (i, l) of op(A) or of op(B)^T, decoded.
static double factor(const void *data, Layout layout, bool l_is_row, const uint8_t *scales, int64_t i, int64_t l,
                     int64_t k) {
    double value = element(data, layout.type, l_is_row ? i * layout.stride + l : l * layout.stride + i);
    if (!scales) return value;
    int64_t block = fault == WRONG_SCALE && i == 17 && l / MX_BLOCK == 1 ? 0 : l / MX_BLOCK;
    return value * (double)mx_scale_value(scales[mx_swizzled_scale_offset(i, block, k)]);
}

static cublasStatus_t hosted_matmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha,
                                    const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                    cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                    cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                    const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes,
                                    cudaStream_t stream) {
    (void)handle, (void)algorithm, (void)stream;
    Operation o = read_operation(operation);
    Layout la = read_layout(a_layout), lb = read_layout(b_layout), ld = read_layout(d_layout);
    if (!is_supported(operation, la, lb, read_layout(c_layout), ld) || c != d) return CUBLAS_STATUS_NOT_SUPPORTED;
    bool fp8 = is_fp8_type(la.type);
    native_runs += fp8;
    if (fp8 && native_status != CUBLAS_STATUS_SUCCESS) return native_status;
    const void *a_scales = fp8 ? o.a_scales : NULL, *b_scales = fp8 ? o.b_scales : NULL;
    uintptr_t together = (uintptr_t)a | (uintptr_t)b | (uintptr_t)d | (uintptr_t)a_scales | (uintptr_t)b_scales;
    if (fp8 && (together % 16 || !a_scales || !b_scales)) return CUBLAS_STATUS_INVALID_VALUE;
    assert_true((uintptr_t)workspace % 256 == 0 && workspace_bytes == 32 << 20);
    assert_true(*(const float *)alpha == 1);
    memset(workspace, UNWRITTEN, workspace_bytes < 4096 ? workspace_bytes : 4096);

    int64_t m = (int64_t)ld.rows, n = (int64_t)ld.cols, k = (int64_t)(o.transpose_a ? la.rows : la.cols);
    assert_int_equal(o.transpose_a ? la.cols : la.rows, m);
    assert_int_equal(o.transpose_b ? lb.rows : lb.cols, n);
    assert_int_equal(o.transpose_b ? lb.cols : lb.rows, k);
    bool has_bias = o.epilogue == CUBLASLT_EPILOGUE_BIAS && !(fault == LOST_BIAS && fp8);
    double *row = malloc((size_t)k * sizeof(double)), *columns = malloc((size_t)(n * k) * sizeof(double));
    for (int64_t i = 0; i < n * k; i++) {
        columns[i] = factor(b, lb, !o.transpose_b, b_scales, i / k, i % k, k);
    }
    for (int64_t i = 0; i < m; i++) {
        for (int64_t l = 0; l < k; l++) {
            row[l] = factor(a, la, o.transpose_a, a_scales, i, l, k);
        }
        for (int64_t j = 0; j < n; j++) {
            double sum = *(const float *)beta == 0 ? 0 : element(d, ld.type, j * ld.stride + i);
            if (has_bias) sum += element(o.bias, (uint32_t)o.bias_type, i);
            for (int64_t l = 0; l < k; l++) {
                sum += row[l] * columns[j * k + l];
            }
            if (fault == COARSE_SUM && fp8) sum *= 1 + 0x1p-6;
            if (ld.type == CUDA_R_32F) ((float *)d)[j * ld.stride + i] = (float)sum;
            if (ld.type == CUDA_R_16BF) ((uint16_t *)d)[j * ld.stride + i] = mx_to_bf16((float)sum);
        }
    }
    free(row);
    free(columns);
    return CUBLAS_STATUS_SUCCESS;
}

#define cuda_gemm hosted_gemm
#define cuda_gemm_has_native hosted_gemm_has_native
#define cuda_gemm_path hosted_gemm_path
#define cuda_gemm_set_policy hosted_gemm_set_policy
#define cuda_gemm_check_native hosted_gemm_check_native
#define cuda_gemm_describe hosted_gemm_describe
#define cuda_gemm_self_check hosted_gemm_self_check
#define cuda_gemm_run hosted_gemm_run
#define cuda_gemm_call hosted_gemm_call
#define cuda_gemm_descriptors hosted_gemm_descriptors
#define cuda_gemm_descriptors_destroy hosted_gemm_descriptors_destroy
#define cuda_gemm_set_pointers hosted_gemm_set_pointers
#define cuda_gemm_workspace hosted_gemm_workspace
#define cublasLtCreate hosted_create
#define cublasLtMatmulAlgoGetHeuristic hosted_heuristic
#define cublasLtMatmul hosted_matmul
#define cuda_gemm_quantized_form hosted_gemm_quantized_form
#define cuda_quantized_form hosted_quantized_form
#define cuda_dequantize hosted_dequantize
#define cuda_transpose_codes hosted_transpose
#define cuda_convert cpu_convert
#define cuda_swizzle_scales hosted_swizzle
#define cuda_workspace hosted_workspace
#define cuda_stream() NULL
#define cudaMalloc hosted_malloc
#define cudaFree hosted_free
#define cudaMemcpyAsync hosted_copy
#define cudaStreamSynchronize(stream) cudaSuccess
#include "llmc/cuda/gemm.c"
#undef cuda_gemm
#undef cuda_gemm_workspace
#undef cuda_gemm_self_check
#undef cudaMalloc
#undef cudaFree

// Paths
// ---------------------------------------------------------------------------------------------------------------

static _Alignas(256) char somewhere[512];

static Operand shape_of(Format format, int64_t rows, int64_t cols, Axis axis) {
    if (!mx_is_mx(format)) return operand_tensor(tensor_make(somewhere, format, rows, cols));
    return operand_quantized(
        (QuantizedTensor){(uint8_t *)somewhere, (uint8_t *)somewhere, format, axis, rows, cols, FORM_PLAIN});
}

typedef enum { FPROP, DGRAD, WGRAD, BOTH_TRANSPOSED, NUM_LAYOUTS } LayoutKind;

static GemmOptions options_of(LayoutKind kind) {
    return (GemmOptions){.transpose_a = kind == WGRAD || kind == BOTH_TRANSPOSED,
                         .transpose_b = kind == FPROP || kind == BOTH_TRANSPOSED};
}

static Operand operand_a(Format format, int64_t M, int64_t K, GemmOptions o) {
    return o.transpose_a ? shape_of(format, K, M, AXIS_COLUMNWISE) : shape_of(format, M, K, AXIS_ROWWISE);
}

static Operand operand_b(Format format, int64_t N, int64_t K, GemmOptions o) {
    return o.transpose_b ? shape_of(format, N, K, AXIS_ROWWISE) : shape_of(format, K, N, AXIS_COLUMNWISE);
}

typedef struct {
    int capability;
    size_t cublaslt;
    MxGemm policy;
    Format a, b;
    LayoutKind kind;
    int64_t M, N, K;
    GemmPath path;
    const char *why; // part of the reason; NULL: none
} PathCase;

#define E4M3 FORMAT_E4M3
#define E5M2 FORMAT_E5M2
#define BF16 FORMAT_BF16
#define FP32 FORMAT_FP32
#define AUTO MX_GEMM_AUTO
#define EMULATED GEMM_EMULATED
#define NATIVE GEMM_NATIVE

static void test_paths(void **state) {
    (void)state;
    static const PathCase CASES[] = {
        // capability and library
        {75, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {89, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {90, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {90, 130100, MX_GEMM_NATIVE, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, DGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, BOTH_TRANSPOSED, 64, 64, 64, EMULATED, "both operands are transposed"},
        {103, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 120900, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {100, 120804, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {100, 120803, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "12.9 or later"},
        {100, 120603, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "12.9 or later"},
        {110, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "only compute capabilities"},
        {120, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {120, 130100, AUTO, E4M3, E4M3, DGRAD, 64, 64, 64, NATIVE, NULL},
        {120, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {120, 130100, AUTO, E4M3, E4M3, BOTH_TRANSPOSED, 64, 64, 64, EMULATED, "both operands are transposed"},
        {120, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 48, EMULATED, "K isn't"},
        {120, 130100, MX_GEMM_EMULATED, E4M3, E4M3, DGRAD, 64, 64, 64, EMULATED, "asked for"},
        {121, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {120, 120803, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "12.9 or later"},
        {130, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "only compute capabilities"},
        // policy
        {100, 130100, MX_GEMM_EMULATED, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "asked for"},
        {100, 130100, MX_GEMM_NATIVE, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        // formats
        {100, 130100, AUTO, E5M2, E4M3, DGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E5M2, DGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E5M2, E5M2, DGRAD, 64, 64, 64, EMULATED, "both operands are E5M2"},
        {100, 130100, AUTO, FORMAT_E2M3, E4M3, FPROP, 64, 64, 64, EMULATED, "FP6 and FP4"},
        {100, 130100, AUTO, E4M3, FORMAT_E3M2, FPROP, 64, 64, 64, EMULATED, "FP6 and FP4"},
        {100, 130100, AUTO, FORMAT_E2M1, FORMAT_E2M1, FPROP, 64, 64, 64, EMULATED, "FP6 and FP4"},
        {100, 130100, AUTO, BF16, E4M3, FPROP, 64, 64, 64, EMULATED, NULL},
        {100, 130100, AUTO, E4M3, BF16, WGRAD, 64, 64, 64, EMULATED, NULL},
        {100, 130100, AUTO, BF16, BF16, FPROP, 64, 64, 64, GEMM_BF16, NULL},
        {90, 130100, AUTO, BF16, BF16, FPROP, 1, 1, 1, GEMM_BF16, NULL},
        {100, 130100, AUTO, FP32, BF16, FPROP, 64, 64, 64, GEMM_FP32, NULL},
        {100, 130100, AUTO, E4M3, FP32, FPROP, 64, 64, 64, GEMM_FP32, NULL},
        {90, 130100, AUTO, FP32, FP32, DGRAD, 7, 5, 3, GEMM_FP32, NULL},
        // shapes
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 16, 16, 32, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 48, 80, 96, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, WGRAD, 32768, 50304, 768, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 15, 64, 64, EMULATED, "M or N"},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 64, 50257, 64, EMULATED, "M or N"},
        {100, 130100, AUTO, E4M3, E4M3, DGRAD, 64, 72, 64, EMULATED, "M or N"},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 48, EMULATED, "K isn't"},
        {100, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 65, EMULATED, "K isn't"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        const PathCase *c = &CASES[i];
        GemmOptions o = options_of(c->kind);
        const char *why = "unset";
        GemmPath path = cuda_gemm_path((GemmDevice){c->capability, c->cublaslt, c->policy},
                                       tensor_make(somewhere, BF16, c->M, c->N), operand_a(c->a, c->M, c->K, o),
                                       operand_b(c->b, c->N, c->K, o), o, &why);
        if (path != c->path || !why != !c->why || (why && !strstr(why, c->why))) {
            fail_msg("case %zu: path %d, not %d; %s", i, (int)path, (int)c->path, why ? why : "no reason");
        }
    }
}

// A decoded operand is one of BF16, and no reason is given for not multiplying it natively.
static void test_paths_by_form(void **state) {
    (void)state;
    static const struct {
        QuantizedForm a, b;
        GemmPath path;
    } CASES[] = {{FORM_PLAIN, FORM_PLAIN, NATIVE},        {FORM_SWIZZLED, FORM_SWIZZLED, NATIVE},
                 {FORM_SWIZZLED, FORM_PLAIN, NATIVE},     {FORM_DECODED, FORM_PLAIN, EMULATED},
                 {FORM_SWIZZLED, FORM_DECODED, EMULATED}, {FORM_DECODED, FORM_DECODED, GEMM_BF16}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        GemmOptions o = options_of(DGRAD);
        Operand a = operand_a(E4M3, 64, 64, o), b = operand_b(E4M3, 64, 64, o);
        a.quantized.form = CASES[i].a;
        b.quantized.form = CASES[i].b;
        const char *why = "unset";
        GemmDevice device = {CAPABILITY_B200, CUBLASLT_13_1, AUTO};
        assert_int_equal(cuda_gemm_path(device, tensor_make(somewhere, BF16, 64, 64), a, b, o, &why), CASES[i].path);
        assert_null(why);
    }
}

// Forms in which operands are quantized: those made for one GEMM, those kept.
static void test_quantized_form(void **state) {
    (void)state;
    static const struct {
        GemmDevice device;
        QuantizedForm once, kept;
    } CASES[] = {{{90, 130100, AUTO}, FORM_DECODED, FORM_PLAIN},
                 {{90, 130100, MX_GEMM_EMULATED}, FORM_DECODED, FORM_PLAIN},
                 {{90, 130100, MX_GEMM_NATIVE}, FORM_SWIZZLED, FORM_SWIZZLED}, // whose GEMMs then refuse
                 {{100, 130100, AUTO}, FORM_SWIZZLED, FORM_SWIZZLED},
                 {{103, 130100, MX_GEMM_NATIVE}, FORM_SWIZZLED, FORM_SWIZZLED},
                 {{100, 130100, MX_GEMM_EMULATED}, FORM_DECODED, FORM_PLAIN},
                 {{100, 120803, AUTO}, FORM_DECODED, FORM_PLAIN},
                 {{110, 130100, AUTO}, FORM_DECODED, FORM_PLAIN},
                 {{120, 130100, AUTO}, FORM_SWIZZLED, FORM_SWIZZLED},
                 {{120, 130100, MX_GEMM_EMULATED}, FORM_DECODED, FORM_PLAIN}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        assert_int_equal(cuda_gemm_quantized_form(CASES[i].device, true), CASES[i].once);
        assert_int_equal(cuda_gemm_quantized_form(CASES[i].device, false), CASES[i].kept);
    }
}

static const char *path_of_aligned(size_t d_offset, int64_t d_stride, Format d_dtype, size_t a_offset, size_t b_offset,
                                   const float *bias, GemmPath *path) {
    GemmOptions o = {.transpose_b = true, .bias = bias};
    Operand a = operand_a(E4M3, 64, 64, o), b = operand_b(E4M3, 64, 64, o);
    a.quantized.elements += a_offset;
    b.quantized.elements += b_offset;
    a.quantized.scales += 1; // plain scales may lie anywhere
    Tensor d = tensor_make(somewhere + d_offset, d_dtype, 64, 64);
    d.stride = d_stride;
    const char *why;
    *path = cuda_gemm_path((GemmDevice){CAPABILITY_B200, CUBLASLT_13_1, AUTO}, d, a, b, o, &why);
    return why;
}

static void test_paths_by_alignment(void **state) {
    (void)state;
    static const float bias[64];
    GemmPath path;
    assert_null(path_of_aligned(0, 64, BF16, 0, 0, NULL, &path));
    assert_int_equal(path, NATIVE);
    assert_null(path_of_aligned(16, 72, BF16, 16, 48, bias, &path));
    assert_null(path_of_aligned(16, 68, FP32, 16, 48, NULL, &path));
    assert_non_null(strstr(path_of_aligned(8, 64, BF16, 0, 0, NULL, &path), "aligned"));
    assert_int_equal(path, EMULATED);
    assert_non_null(strstr(path_of_aligned(0, 68, BF16, 0, 0, NULL, &path), "aligned"));
    assert_non_null(strstr(path_of_aligned(0, 66, FP32, 0, 0, NULL, &path), "aligned"));
    assert_non_null(strstr(path_of_aligned(0, 64, BF16, 1, 0, NULL, &path), "aligned"));
    assert_non_null(strstr(path_of_aligned(0, 64, BF16, 0, 8, NULL, &path), "aligned"));
    assert_non_null(strstr(path_of_aligned(0, 64, FP32, 0, 0, bias, &path), "bias"));
    GemmOptions o = options_of(WGRAD);
    Operand a = operand_a(E4M3, 64, 64, o), b = operand_b(E4M3, 64, 64, o);
    a.quantized.form = b.quantized.form = FORM_SWIZZLED; // scales that are used where they lie
    const char *why;
    GemmDevice device = {CAPABILITY_B200, CUBLASLT_13_1, AUTO};
    assert_int_equal(cuda_gemm_path(device, tensor_make(somewhere, BF16, 64, 64), a, b, o, &why), NATIVE);
    b.quantized.scales += 8;
    assert_int_equal(cuda_gemm_path(device, tensor_make(somewhere, BF16, 64, 64), a, b, o, &why), EMULATED);
    assert_non_null(strstr(why, "aligned"));
}

// Descriptors
// ---------------------------------------------------------------------------------------------------------

typedef struct {
    LayoutKind kind;
    int64_t M, N, K; // of the GEMM: d is M x N
    uint32_t type_a, type_b;
    Format d;
    int64_t stride_padding; // of all rows
    size_t offset;          // bytes that pointers lie beyond an aligned place
    bool has_bias;
} DescriptorCase;

static void check_layout_is(cublasLtMatrixLayout_t layout, uint32_t type, int64_t rows, int64_t cols, int64_t stride) {
    Layout l = read_layout(layout);
    assert_int_equal(l.type, type);
    assert_int_equal(l.rows, rows);
    assert_int_equal(l.cols, cols);
    assert_int_equal(l.stride, stride);
}

static void check_descriptors(const DescriptorCase *c) {
    GemmOptions o = options_of(c->kind);
    int64_t a_rows = o.transpose_a ? c->K : c->M, a_cols = o.transpose_a ? c->M : c->K;
    int64_t b_rows = o.transpose_b ? c->N : c->K, b_cols = o.transpose_b ? c->K : c->N;
    bool native = is_fp8_type(c->type_a);
    const char *data = somewhere + c->offset;
    const void *a_scales = native ? somewhere + 16 : NULL, *b_scales = native ? somewhere + 32 : NULL;
    GemmMatrix a = {data, a_scales, (cudaDataType_t)c->type_a, a_rows, a_cols, a_cols + c->stride_padding};
    GemmMatrix b = {data, b_scales, (cudaDataType_t)c->type_b, b_rows, b_cols, b_cols + c->stride_padding};
    Tensor d = tensor_make((void *)data, c->d, c->M, c->N);
    d.stride += c->stride_padding;
    GemmBias bias = {c->has_bias ? somewhere + 64 : NULL, CUDA_R_16BF};

    GemmCall call = cuda_gemm_call(d, a, b, bias, o);
    GemmDescriptors t = cuda_gemm_descriptors(&call);
    cuda_gemm_set_pointers(&t, b.scales, a.scales, bias.data);

    Operation read = read_operation(t.operation);
    // Row-major a and b are the column-major B^T and A^T: what they are transposed by, and their
    // order, are exchanged.
    assert_int_equal(read.transpose_a, o.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    assert_int_equal(read.transpose_b, o.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    assert_int_equal(read.a_mode, native ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 : 0);
    assert_int_equal(read.b_mode, native ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 : 0);
    assert_ptr_equal(read.a_scales, b_scales);
    assert_ptr_equal(read.b_scales, a_scales);
    assert_int_equal(read.epilogue, c->has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
    assert_int_equal(read.bias_type, c->has_bias ? CUDA_R_16BF : -1);
    assert_ptr_equal(read.bias, bias.data);
    check_layout_is(t.a, c->type_b, b_cols, b_rows, b_cols + c->stride_padding);
    check_layout_is(t.b, c->type_a, a_cols, a_rows, a_cols + c->stride_padding);
    check_layout_is(t.d, c->d == FP32 ? CUDA_R_32F : CUDA_R_16BF, c->N, c->M, c->N + c->stride_padding);

    uint64_t workspace = 0;
    size_t written;
    cublasLtMatmulPreferenceGetAttribute(t.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof(workspace), &written);
    assert_int_equal(workspace, 32 << 20);
    uint32_t alignment = c->offset ? (uint32_t)(c->offset & -c->offset) : 256;
    assert_int_equal(read_preference(t.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES), alignment);
    assert_int_equal(read_preference(t.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES), alignment);
    assert_int_equal(read_preference(t.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES), alignment);
    assert_int_equal(read_preference(t.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES), alignment);
    cuda_gemm_descriptors_destroy(&t);
}

// What cuBLASLt, which counts in columns, is told of a layer of N = 48 outputs and K = 160 inputs
// over M = 96 tokens. fprop's A is W, transposed; m, n, k = N, M, K. dgrad's A is W; K, M, N. wgrad's
// A is X and its B is dY, transposed; K, N, M.
static void test_descriptors_of_a_layer(void **state) {
    (void)state;
    enum { M = 96, N = 48, K = 160 };
    static const struct {
        LayoutKind kind;
        int64_t gemm[3], m, n, k;
        int32_t transpose_a, transpose_b;
    } TABLE[] = {{FPROP, {M, N, K}, N, M, K, CUBLAS_OP_T, CUBLAS_OP_N},
                 {DGRAD, {M, K, N}, K, M, N, CUBLAS_OP_N, CUBLAS_OP_N},
                 {WGRAD, {N, K, M}, K, N, M, CUBLAS_OP_N, CUBLAS_OP_T}};
    for (int i = 0; i < 3; i++) {
        GemmOptions o = options_of(TABLE[i].kind);
        const int64_t *gemm = TABLE[i].gemm;
        int64_t a_rows = o.transpose_a ? gemm[2] : gemm[0], a_cols = o.transpose_a ? gemm[0] : gemm[2];
        int64_t b_rows = o.transpose_b ? gemm[1] : gemm[2], b_cols = o.transpose_b ? gemm[2] : gemm[1];
        GemmCall call = cuda_gemm_call(tensor_make(somewhere, BF16, gemm[0], gemm[1]),
                                       (GemmMatrix){somewhere, NULL, CUDA_R_8F_E4M3, a_rows, a_cols, a_cols},
                                       (GemmMatrix){somewhere, NULL, CUDA_R_8F_E4M3, b_rows, b_cols, b_cols},
                                       (GemmBias){NULL, CUDA_R_16BF}, o);
        GemmDescriptors t = cuda_gemm_descriptors(&call);
        Operation read = read_operation(t.operation);
        assert_int_equal(call.m, TABLE[i].m);
        assert_int_equal(call.n, TABLE[i].n);
        assert_int_equal(call.k, TABLE[i].k);
        assert_int_equal(read.transpose_a, TABLE[i].transpose_a);
        assert_int_equal(read.transpose_b, TABLE[i].transpose_b);
        cuda_gemm_descriptors_destroy(&t);
    }
}

static void test_descriptors(void **state) {
    (void)state;
    static const int64_t SHAPES[][3] = {{64, 96, 128}, {1, 1, 1}, {33, 65, 31}, {1, 50257, 768}, {4096, 1, 7}};
    int count = 0;
    for (LayoutKind kind = 0; kind < NUM_LAYOUTS; kind++) {
        for (int d = 0; d < 2; d++) {
            for (int has_bias = 0; has_bias < 2; has_bias++) {
                Format dtype = d ? FP32 : BF16;
                for (size_t s = 0; s < sizeof(SHAPES) / sizeof(SHAPES[0]); s++, count += 2) {
                    const int64_t *x = SHAPES[s];
                    DescriptorCase c = {kind, x[0], x[1], x[2], CUDA_R_16BF, CUDA_R_16BF, dtype, 0, 0, has_bias};
                    check_descriptors(&c);
                    c.stride_padding = 3;
                    c.offset = 4 << s;
                    check_descriptors(&c);
                }
                for (int e5m2 = 0; e5m2 < 3; e5m2++, count += 2) {
                    DescriptorCase c = {kind,
                                        160,
                                        48,
                                        224,
                                        e5m2 == 1 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3,
                                        e5m2 == 2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3,
                                        dtype,
                                        0,
                                        0,
                                        has_bias};
                    check_descriptors(&c);
                    c.offset = 16;
                    check_descriptors(&c);
                }
            }
        }
    }
    DescriptorCase fp32 = {FPROP, 33, 65, 31, CUDA_R_32F, CUDA_R_32F, FP32, 1, 4, false};
    check_descriptors(&fp32);
    printf("    %d sets of descriptors read back\n", count + 1);
}

// Values
// --------------------------------------------------------------------------------------------------------------

typedef struct {
    int64_t M, N, K;
    Format a, b, d;
    LayoutKind kind;
    bool accumulate, has_bias;
    int64_t padding; // of the rows of a, b and d where they are tensors
    QuantizedForm a_form, b_form;
} GemmCase;

// An operand with the values that gemm takes it for.
typedef struct {
    Operand operand;
    double *values; // (rows, cols)
} TestOperand;

static Tensor padded_tensor(Format dtype, int64_t rows, int64_t cols, int64_t padding) {
    Tensor random = random_tensor(dtype, rows, cols, 1);
    Tensor tensor = tensor_make(pool_take((size_t)(rows * (cols + padding)) * dtype_size(dtype)), dtype, rows, cols);
    tensor.stride += padding;
    cpu_convert(tensor, random);
    return tensor;
}

// The same in another form.
static QuantizedTensor in_form(QuantizedTensor q, QuantizedForm form) {
    QuantizedTensor result = q;
    result.form = form;
    if (form == FORM_SWIZZLED) {
        result.scales = pool_take(quantized_scale_bytes(form, q.axis, q.rows, q.cols));
        hosted_swizzle(result.scales, &q, q.axis);
    }
    if (form == FORM_DECODED) {
        result.elements = pool_take((size_t)(q.rows * q.cols) * 2);
        result.scales = NULL;
        cpu_dequantize(tensor_make(result.elements, BF16, q.rows, q.cols), &q, BF16);
    }
    return result;
}

static TestOperand make_test_operand(Format format, int64_t rows, int64_t cols, Axis axis, int64_t padding,
                                     bool as_fp32, QuantizedForm form) {
    if (!mx_is_mx(format)) {
        Tensor tensor = padded_tensor(format, rows, cols, padding);
        return (TestOperand){operand_tensor(tensor), tensor_doubles(tensor)};
    }
    QuantizedTensor q = {pool_take((size_t)(rows * cols)),
                         pool_take((size_t)mx_num_scales(axis, rows, cols)),
                         format,
                         axis,
                         rows,
                         cols,
                         FORM_PLAIN};
    cpu_quantize(axis == AXIS_ROWWISE ? &q : NULL, axis == AXIS_COLUMNWISE ? &q : NULL,
                 source_tensor(padded_tensor(FP32, rows, cols, 0)), SCALE_RCEIL);
    Tensor values = tensor_make(take_floats(rows * cols), FP32, rows, cols);
    cpu_dequantize(values, &q, as_fp32 ? FP32 : BF16);
    return (TestOperand){operand_quantized(in_form(q, form)), tensor_doubles(values)};
}

// d, given a case and its operands on the host: d holds what it is accumulated into.
typedef void (*Gemm)(Tensor d, Operand a, Operand b, GemmOptions options);

// One workspace for all calls, poisoned where a call may write.
static void run_hosted(Tensor d, Operand a, Operand b, GemmOptions options) {
    enum { CAPACITY = LIBRARY_WORKSPACE + (1 << 20) };
    hosted_block_bytes = hosted_gemm_workspace(a, b);
    assert_true(hosted_block_bytes < CAPACITY);
    if (!hosted_block) hosted_block = aligned_alloc(256, CAPACITY);
    uint8_t *ours = (uint8_t *)hosted_block + LIBRARY_WORKSPACE, *end = (uint8_t *)hosted_block + hosted_block_bytes;
    memset(ours, UNWRITTEN, (size_t)(end - ours));
    *end = GUARD;
    hosted_gemm(d, a, b, options);
    assert_int_equal(*end, GUARD);
}

static void check_case(const GemmCase *g, Gemm gemm, Check *check) {
    GemmOptions o = options_of(g->kind);
    bool as_fp32 = g->a == FP32 || g->b == FP32;
    TestOperand a = make_test_operand(g->a, o.transpose_a ? g->K : g->M, o.transpose_a ? g->M : g->K,
                                      o.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE, g->padding, as_fp32, g->a_form);
    TestOperand b = make_test_operand(g->b, o.transpose_b ? g->N : g->K, o.transpose_b ? g->K : g->N,
                                      o.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE, g->padding, as_fp32, g->b_form);
    Tensor before = padded_tensor(g->d, g->M, g->N, g->padding), d = copy_tensor(before), again = copy_tensor(before);
    float *bias = take_floats(g->N);
    fill_floats(bias, g->N, 1);
    o.accumulate = g->accumulate;
    o.bias = g->has_bias ? bias : NULL;
    gemm(d, a.operand, b.operand, o);
    gemm(again, a.operand, b.operand, o);
    check_same_tensor(d, again);
    if (g->padding) check_padding(d);

    // Tensor cores may truncate where FP32 rounds: 2^-23 for each addition. A bias is added to BF16
    // as BF16, but that FP32 operands give an FP32 result first.
    double bias_unit = g->d == BF16 && !as_fp32 ? U_BF16 : 0;
    for (int64_t m = 0; m < g->M; m++) {
        for (int64_t n = 0; n < g->N; n++) {
            double start = g->accumulate ? tensor_get(before, m, n) : 0, added = g->has_bias ? bias[n] : 0;
            double sum = start + added, magnitude = fabs(start) + fabs(added);
            for (int64_t k = 0; k < g->K; k++) {
                double product = a.values[o.transpose_a ? k * g->M + m : m * g->K + k] *
                                 b.values[o.transpose_b ? n * g->K + k : k * g->N + n];
                sum += product;
                magnitude += fabs(product);
            }
            double bound = (double)(g->K + 2) * 0x1p-23 * magnitude + bias_unit * fabs(added);
            check_value(check, tensor_get(d, m, n), sum, bound + u_of(g->d) * (fabs(sum) + bound));
        }
    }
    pool_release();
}

// Over the pairs of formats of a shape: every layout; destination, accumulation, bias and padding
// take turns.
static void check_formats(int64_t M, int64_t N, int64_t K, const Format *formats, int count, Gemm gemm) {
    Check check = {0};
    int cases = count * count * NUM_LAYOUTS;
    for (int i = 0; i < cases; i++) {
        GemmCase g = {.M = M,
                      .N = N,
                      .K = K,
                      .a = formats[i / NUM_LAYOUTS / count],
                      .b = formats[i / NUM_LAYOUTS % count],
                      .d = i / 3 % 2 ? FP32 : BF16,
                      .kind = (LayoutKind)(i % NUM_LAYOUTS),
                      .accumulate = i % 5 < 2,
                      .has_bias = i % 3 < 2,
                      .padding = (int64_t[]){0, 3, 8}[i / 2 % 3],
                      .a_form = (QuantizedForm)(i / NUM_LAYOUTS % 3),
                      .b_form = (QuantizedForm)(i / 7 % 3)};
        check_case(&g, gemm, &check);
    }
    check_end(&check, "M %lld N %lld K %lld, %d cases", (long long)M, (long long)N, (long long)K, cases);
}

static const Format ALL[] = {FP32, BF16, E4M3, E5M2, FORMAT_E2M3, FORMAT_E3M2, FORMAT_E2M1};

static void check_all(Gemm gemm) {
    check_formats(1, 1, 1, ALL, 7, gemm);
    check_formats(33, 65, 31, ALL, 7, gemm);
    check_formats(7, 48, 100, ALL, 7, gemm);
    check_formats(64, 48, 96, ALL, 7, gemm); // native where formats and layout allow it
    check_formats(1, 257, 33, ALL, 4, gemm);
    check_formats(33, 1, 96, ALL, 4, gemm);
    check_formats(80, 144, 160, ALL, 4, gemm);
}

static void pretend(int capability, MxGemm policy) {
    this_device = (GemmDevice){capability, CUBLASLT_13_1, policy};
    declines_native = declines_e5m2 = false;
    takes_only_tn = capability / 10 == 12;
    native_status = CUBLAS_STATUS_SUCCESS;
    fault = NO_FAULT;
}

static void forget_calls(void) {
    for (int i = 0; i < TABLE_SIZE; i++) {
        if (table[i].used) hosted_gemm_descriptors_destroy(&table[i].descriptors);
        table[i].used = false;
    }
}

static void test_values_emulated(void **state) {
    (void)state;
    pretend(CAPABILITY_H100, AUTO);
    check_all(run_hosted);
}

static void test_values_native(void **state) {
    (void)state;
    pretend(CAPABILITY_B200, AUTO);
    check_formats(33, 65, 31, ALL, 4, run_hosted);
    check_formats(64, 48, 96, ALL, 7, run_hosted);
    check_formats(80, 144, 160, ALL, 4, run_hosted);
    forget_calls(); // cuBLASLt takes fewer of them now
    pretend(CAPABILITY_5090, AUTO);
    check_formats(33, 65, 31, ALL, 4, run_hosted);
    check_formats(64, 48, 96, ALL, 7, run_hosted);
    check_formats(80, 144, 160, ALL, 4, run_hosted);
    forget_calls();
}

// With native GEMMs that a fault spoils, results are wrong only if they really were native.
static bool is_spoiled(LayoutKind kind, int capability, QuantizedForm form) {
    pretend(capability, AUTO);
    fault = COARSE_SUM;
    GemmCase g = {.M = 64, .N = 48, .K = 96, .a = E4M3, .b = E4M3, .d = FP32, .kind = kind};
    GemmOptions o = options_of(kind);
    TestOperand a = make_test_operand(E4M3, o.transpose_a ? g.K : g.M, o.transpose_a ? g.M : g.K,
                                      o.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE, 0, false, form);
    TestOperand b = make_test_operand(E4M3, o.transpose_b ? g.N : g.K, o.transpose_b ? g.K : g.N,
                                      o.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE, 0, false, form);
    Tensor d = padded_tensor(FP32, g.M, g.N, 0), emulated = copy_tensor(d);
    swizzles = dequantizations = transposes = 0;
    run_hosted(d, a.operand, b.operand, o);
    if (capability >= CAPABILITY_B200) {
        assert_int_equal(dequantizations, 0);
        assert_int_equal(swizzles, form == FORM_PLAIN ? 2 : 0);
        assert_int_equal(transposes, capability < CAPABILITY_5090 ? 0 : kind == FPROP ? 0 : kind == DGRAD ? 1 : 2);
    }
    this_device.policy = MX_GEMM_EMULATED;
    run_hosted(emulated, a.operand, b.operand, o);
    bool differs = memcmp(d.data, emulated.data, tensor_bytes(d)) != 0;
    pool_release();
    fault = NO_FAULT;
    return differs;
}

static void test_native_is_native(void **state) {
    (void)state;
    for (QuantizedForm form = FORM_PLAIN; form <= FORM_SWIZZLED; form++) {
        for (LayoutKind kind = FPROP; kind <= WGRAD; kind++) {
            forget_calls();
            assert_false(is_spoiled(kind, CAPABILITY_H100, form));
            assert_true(is_spoiled(kind, CAPABILITY_B200, form));
            forget_calls();
            assert_true(is_spoiled(kind, CAPABILITY_5090, form));
        }
    }
    forget_calls();
}

// Decoded operands are multiplied where they lie, but for rows that aren't aligned.
static void test_decoded_as_they_lie(void **state) {
    (void)state;
    pretend(CAPABILITY_H100, AUTO);
    GemmOptions o = options_of(FPROP);
    for (int64_t K = 96; K <= 100; K += 4) {
        TestOperand a = make_test_operand(E4M3, 64, K, AXIS_ROWWISE, 0, false, FORM_DECODED);
        TestOperand b = make_test_operand(E4M3, 48, K, AXIS_ROWWISE, 0, false, FORM_DECODED);
        size_t copies = K % 8 ? 64 * 104 * 2 + 48 * 104 * 2 : 0; // multiples of 256
        assert_int_equal(hosted_gemm_workspace(a.operand, b.operand), (32 << 20) + copies + 256);
        swizzles = dequantizations = 0;
        run_hosted(padded_tensor(BF16, 64, 48, 0), a.operand, b.operand, o);
        assert_int_equal(swizzles + dequantizations, 0);
        pool_release();
    }
}

// Checks the values of a GEMM that could be native and returns the number of lines on stderr.
static int lines_of_gemm(int64_t M) {
    FILE *file = tmpfile();
    assert_non_null(file);
    int before = dup(STDERR_FILENO), lines = 0;
    assert_true(before >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    Check check = {0};
    check_case(&(GemmCase){.M = M, .N = 48, .K = 96, .a = E4M3, .b = E4M3, .d = BF16, .kind = WGRAD, .has_bias = true},
               run_hosted, &check);
    assert_true(dup2(before, STDERR_FILENO) >= 0);
    close(before);
    rewind(file);
    for (int c; (c = fgetc(file)) != EOF;) {
        lines += c == '\n';
    }
    fclose(file);
    check_end(&check, "M %lld, not native", (long long)M);
    return lines;
}

// A shape that cuBLASLt declines is emulated, and nothing is made for the call that it won't take.
static void test_declined(void **state) {
    (void)state;
    forget_calls(); // what it took before it must decline now
    pretend(CAPABILITY_5090, AUTO);
    declines_native = true;
    native_runs = swizzles = transposes = 0;
    assert_int_equal(lines_of_gemm(64), 1);
    heuristics_asked = 0;
    assert_int_equal(lines_of_gemm(64), 0);
    assert_int_equal(heuristics_asked + native_runs + swizzles + transposes, 0);
    forget_calls();
}

// So is one whose kernel fails when it is run: that is said once, and it isn't tried again.
static void test_failing_kernel(void **state) {
    (void)state;
    char text[512];
    pretend(CAPABILITY_B200, AUTO);
    native_status = CUBLAS_STATUS_EXECUTION_FAILED;
    native_runs = swizzles = 0;
    assert_int_equal(lines_of_gemm(64), 1);
    assert_true(native_runs > 0);
    assert_int_equal(swizzles, 2 * native_runs);
    native_runs = swizzles = 0;
    assert_int_equal(lines_of_gemm(64), 0);
    assert_int_equal(native_runs + swizzles, 0);
    assert_int_equal(lines_of_gemm(32), 0);
    assert_true(native_runs > 0);
    assert_false(hosted_gemm_self_check(text, sizeof(text)));
    printf("    %s\n", text);
    assert_non_null(strstr(text, "of 9 MXFP8 GEMMs 0 ran natively"));
    assert_int_equal(this_device.policy, MX_GEMM_EMULATED);
    forget_calls();
}

// Under MX_GEMM_NATIVE what can't be native ends the program, and what can is.
static int exit_code_under_native_policy(Format b) {
    pretend(CAPABILITY_B200, MX_GEMM_NATIVE);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(99);
        Check check = {0};
        check_case(&(GemmCase){.M = 64, .N = 48, .K = 96, .a = E4M3, .b = b, .d = BF16, .kind = DGRAD}, run_hosted,
                   &check);
        _exit(0);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_native_policy(void **state) {
    (void)state;
    Error error;
    pretend(CAPABILITY_H100, MX_GEMM_NATIVE);
    assert_false(hosted_gemm_check_native("H100", &error));
    assert_string_equal(error.message, "H100 can't multiply MXFP8 natively: compute capabilities below 10.0 have no "
                                       "block-scaled FP8");
    pretend(CAPABILITY_5090, MX_GEMM_NATIVE);
    assert_true(hosted_gemm_check_native("RTX 5090", &error));
    assert_int_equal(exit_code_under_native_policy(E4M3), 0);
    assert_int_equal(exit_code_under_native_policy(BF16), 0); // not a product of two MX operands
    assert_int_equal(exit_code_under_native_policy(FORMAT_E2M1), EXIT_BAD_INPUT);
}

// Heuristics are asked once for each call, however often it comes, also when more calls come than
// the table holds.
static void test_table(void **state) {
    (void)state;
    pretend(CAPABILITY_H100, AUTO);
    enum { SHAPES = 2 * TABLE_SIZE };
    Tensor a = padded_tensor(BF16, SHAPES, 8, 0), b = padded_tensor(BF16, 8, 8, 0),
           d = padded_tensor(BF16, SHAPES, 8, 0);
    heuristics_asked = 0;
    for (int i = 0; i < 3; i++) {
        for (int64_t rows = 1; rows <= 16; rows++) {
            run_hosted(tensor_rows(d, 0, rows), operand_tensor(tensor_rows(a, 0, rows)), operand_tensor(b),
                       (GemmOptions){0});
        }
        assert_true(heuristics_asked <= 16);
    }
    for (int64_t rows = 1; rows <= SHAPES; rows++) {
        run_hosted(tensor_rows(d, 0, rows), operand_tensor(tensor_rows(a, 0, rows)), operand_tensor(b),
                   (GemmOptions){0});
        heuristics_asked = 0;
        run_hosted(tensor_rows(d, 0, rows), operand_tensor(tensor_rows(a, 0, rows)), operand_tensor(b),
                   (GemmOptions){0});
        assert_int_equal(heuristics_asked, 0);
    }
    pool_release();
}

static void test_workspace(void **state) {
    (void)state;
    GemmOptions o = options_of(FPROP);
    size_t bf16 = cuda_gemm_workspace(operand_a(BF16, 100, 64, o), operand_b(BF16, 72, 64, o));
    assert_int_equal(bf16, (32 << 20) + 256);
    size_t mx = cuda_gemm_workspace(operand_a(E4M3, 128, 64, o), operand_b(E4M3, 256, 64, o));
    assert_int_equal(mx, (32 << 20) + 128 * 64 * 2 + 256 * 64 * 2 + 512);
    Operand a = operand_a(E4M3, 128, 64, o), b = operand_b(E4M3, 256, 64, o);
    a.quantized.form = b.quantized.form = FORM_SWIZZLED; // may be declined, and is decoded then
    assert_int_equal(cuda_gemm_workspace(a, b), mx);
    a.quantized.form = FORM_DECODED;
    assert_int_equal(cuda_gemm_workspace(a, b), (32 << 20) + 256 * 64 * 2 + 512);
    b.quantized.form = FORM_DECODED;
    assert_int_equal(cuda_gemm_workspace(a, b), (32 << 20) + 512);
    a.quantized.elements = b.quantized.elements = NULL; // shapes are enough
    assert_int_equal(cuda_gemm_workspace(a, b), (32 << 20) + 512);
    GemmOptions wgrad = options_of(WGRAD); // as few elements as need more room for padded scales than for values
    size_t small = cuda_gemm_workspace(operand_a(E4M3, 1, 1, wgrad), operand_b(E4M3, 1, 1, wgrad));
    assert_int_equal(small, (32 << 20) + 2 * (512 + 256) + 256);
    size_t fp32 = cuda_gemm_workspace(operand_a(FP32, 128, 64, o), operand_b(FP32, 256, 64, o));
    assert_int_equal(fp32, (32 << 20) + 512 + 128 * 256 * 4);
}

// The self-check
// ------------------------------------------------------------------------------------------------------

static void test_self_check(void **state) {
    (void)state;
    char text[512];
    pretend(CAPABILITY_H100, AUTO);
    assert_true(hosted_gemm_self_check(text, sizeof(text)));
    printf("    9.0   %s\n", text);
    assert_non_null(strstr(text, "nothing to check"));
    pretend(CAPABILITY_B200, MX_GEMM_EMULATED);
    assert_true(hosted_gemm_self_check(text, sizeof(text)));
    assert_non_null(strstr(text, "asked for"));
    pretend(CAPABILITY_B200, AUTO);
    assert_true(hosted_gemm_self_check(text, sizeof(text)));
    printf("    10.0  %s\n", text);
    assert_non_null(strstr(text, "passed: of 9 MXFP8 GEMMs 9 ran natively"));
    assert_int_equal(this_device.policy, AUTO);
    forget_calls();
    pretend(CAPABILITY_5090, MX_GEMM_NATIVE);
    transposes = 0;
    assert_true(hosted_gemm_self_check(text, sizeof(text)));
    printf("    12.0  %s\n", text);
    assert_int_equal(transposes, 9);
    assert_non_null(strstr(text, "passed: of 9 MXFP8 GEMMs 9 ran natively"));
    forget_calls();
}

static void test_self_check_finds_faults(void **state) {
    (void)state;
    static const char *const NAMES[] = {"", "a wrong scale", "no bias", "a coarse sum"};
    static const int FAULTS[] = {WRONG_SCALE, LOST_BIAS, COARSE_SUM};
    char text[512];
    for (size_t i = 0; i < sizeof(FAULTS) / sizeof(FAULTS[0]); i++) {
        pretend(CAPABILITY_B200, AUTO);
        fault = FAULTS[i];
        assert_false(hosted_gemm_self_check(text, sizeof(text)));
        printf("    %-14s%s\n", NAMES[FAULTS[i]], text);
        assert_non_null(strstr(text, "FAILED"));
        assert_int_equal(this_device.policy, MX_GEMM_EMULATED);
    }
    forget_calls();
    pretend(CAPABILITY_B200, AUTO);
    declines_e5m2 = true;
    assert_true(hosted_gemm_self_check(text, sizeof(text)));
    printf("    %-14s%s\n", "some declined", text);
    assert_non_null(strstr(text, "of 9 MXFP8 GEMMs 3 ran natively"));
    assert_int_equal(this_device.policy, AUTO);
    forget_calls();
    pretend(CAPABILITY_B200, AUTO);
    declines_native = true;
    assert_false(hosted_gemm_self_check(text, sizeof(text)));
    printf("    %-14s%s\n", "declined", text);
    assert_int_equal(this_device.policy, MX_GEMM_EMULATED);
    forget_calls();
}

// On a GPU
// ------------------------------------------------------------------------------------------------------------

static const Backend *gpu;

static void *to_gpu(const void *host, size_t bytes) {
    void *device = gpu->allocate(bytes);
    gpu->copy_to_device(device, host, bytes);
    return device;
}

static Operand operand_to_gpu(Operand o) {
    if (operand_is_quantized(o)) {
        QuantizedTensor *q = &o.quantized;
        q->elements = to_gpu(q->elements, (size_t)(q->rows * q->cols) * (q->form == FORM_DECODED ? 2 : 1));
        q->scales = to_gpu(q->scales, quantized_scale_bytes(q->form, q->axis, q->rows, q->cols));
    } else {
        o.tensor.data = to_gpu(o.tensor.data, tensor_bytes(o.tensor));
    }
    return o;
}

static void release_operand(Operand o) {
    gpu->release(operand_is_quantized(o) ? (void *)o.quantized.elements : o.tensor.data);
    if (operand_is_quantized(o)) gpu->release(o.quantized.scales);
}

static void run_gpu(Tensor d, Operand a, Operand b, GemmOptions options) {
    size_t bytes = gpu->gemm_workspace(a, b);
    void *workspace = gpu->allocate(bytes), *bias = NULL;
    gpu->use_workspace(workspace, bytes);
    Tensor on_gpu = d;
    on_gpu.data = to_gpu(d.data, tensor_bytes(d));
    a = operand_to_gpu(a);
    b = operand_to_gpu(b);
    if (options.bias) options.bias = bias = to_gpu(options.bias, (size_t)d.cols * sizeof(float));
    gpu->gemm(on_gpu, a, b, options);
    gpu->copy_to_host(d.data, on_gpu.data, tensor_bytes(d));
    release_operand(a);
    release_operand(b);
    gpu->release(on_gpu.data);
    gpu->release(workspace);
    if (bias) gpu->release(bias);
}

static void test_values_on_gpu(void **state) {
    (void)state;
    Error error;
    gpu = backend_cuda(MX_GEMM_AUTO, &error);
    if (!gpu) {
        printf("    skipped: %s\n", error.message);
        skip();
    }
    check_all(run_gpu);
    check_formats(512, 768, 1024, ALL, 4, run_gpu);
    check_formats(129, 200, 513, ALL, 4, run_gpu);
}

static void test_self_check_on_gpu(void **state) {
    (void)state;
    Error error;
    if (!backend_cuda(MX_GEMM_AUTO, &error)) skip();
    char text[512];
    bool passed = cuda_gemm_self_check(text, sizeof(text));
    printf("    %s\n", text);
    assert_true(passed);
}

int main(void) {
    omp_set_num_threads(1); // quantizing so little on many would be waiting for each other
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_paths_by_form),
        cmocka_unit_test(test_paths_by_alignment),
        cmocka_unit_test(test_quantized_form),
        cmocka_unit_test(test_descriptors_of_a_layer),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_values_emulated),
        cmocka_unit_test(test_values_native),
        cmocka_unit_test(test_native_is_native),
        cmocka_unit_test(test_decoded_as_they_lie),
        cmocka_unit_test(test_declined),
        cmocka_unit_test(test_failing_kernel),
        cmocka_unit_test(test_native_policy),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_self_check),
        cmocka_unit_test(test_self_check_finds_faults),
        cmocka_unit_test(test_values_on_gpu),
        cmocka_unit_test(test_self_check_on_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
