#include "cublaslt_standin.h"
#include "gemm_cases.h"
#include "llmc/base/library.h"

#include <dlfcn.h>

Standin standin;

// The descriptors, read back
// ------------------------------------------------------------------------------------------------

static void get(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, void *value, size_t bytes) {
    size_t written = 0;
    assert_int_equal(cublasLtMatmulDescGetAttribute(operation, attribute, value, bytes, &written),
                     CUBLAS_STATUS_SUCCESS);
    assert_int_equal(written, bytes);
}

Operation read_operation(cublasLtMatmulDesc_t d) {
    Operation o;
    int32_t compute = 0, scale = 0;
    int8_t fast_accumulation = -1;
    get(d, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, &compute, sizeof(compute));
    get(d, CUBLASLT_MATMUL_DESC_SCALE_TYPE, &scale, sizeof(scale));
    get(d, CUBLASLT_MATMUL_DESC_POINTER_MODE, &o.pointer_mode, sizeof(o.pointer_mode));
    get(d, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast_accumulation, sizeof(fast_accumulation));
    assert_int_equal(compute, CUBLAS_COMPUTE_32F); // not ..._FAST_TF32
    assert_int_equal(scale, CUDA_R_32F);
    o.fast_accumulation = fast_accumulation;
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

Layout read_layout(cublasLtMatrixLayout_t layout) {
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

uint32_t read_preference(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute) {
    uint32_t value = 0;
    size_t written = 0;
    assert_int_equal(cublasLtMatmulPreferenceGetAttribute(preference, attribute, &value, sizeof(value), &written),
                     CUBLAS_STATUS_SUCCESS);
    return value;
}

// The multiplication
// ------------------------------------------------------------------------------------------------

bool is_fp8_type(uint32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
static int64_t type_size(uint32_t type) { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1; }

static cublasStatus_t create(cublasLtHandle_t *handle) {
    *handle = (cublasLtHandle_t)&standin;
    return CUBLAS_STATUS_SUCCESS;
}

static bool is_odd(Layout l) { return l.rows % 8 || l.cols % 8 || l.stride * type_size(l.type) % 16; }

// What the manual says that cuBLASLt takes of FP4 ("cublasLtMatmul": "To use block-scaled FP4
// kernels").
static bool supports_fp4(Operation o, Layout a, Layout b, Layout d) {
    bool has_bias = o.epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (standin.declines_native || standin.takes_no_mx || b.type != CUDA_R_4F_E2M1) return false;
    if (o.transpose_a != CUBLAS_OP_T || o.transpose_b != CUBLAS_OP_N || o.fast_accumulation) return false;
    if (o.a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 || o.b_mode != o.a_mode) return false;
    if (a.rows % 32 || a.stride % 32 || b.stride % 32 || d.rows % 16 || d.cols % 16) return false; // 16 bytes
    if (d.stride * type_size(d.type) % 16) return false;
    return !has_bias || (o.bias_type == CUDA_R_16BF && !standin.declines_fp4_bias);
}

// Returns whether the modes of scales are those of blocks of 128 that the manual says are taken
// together.
static bool is_by_128(int32_t a, int32_t b) {
    const int32_t BLOCKS = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    const int32_t SQUARES = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    return (a == BLOCKS && b == BLOCKS) || (a == BLOCKS && b == SQUARES) || (a == SQUARES && b == BLOCKS);
}

// Returns whether the manual says that modes of scales are taken together.
static bool is_supported_mode(int32_t a, int32_t b) {
    const int32_t MX = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    if (is_by_128(a, b)) return standin.takes_blocks_of_128;
    if (a == MX && b == MX) return !standin.takes_no_mx;
    return a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && b == a;
}

// What the manual says that cuBLASLt takes ("cublasLtMatmul", table of types; "Narrow precision
// data types usage").
static bool is_supported(cublasLtMatmulDesc_t operation, Layout a, Layout b, Layout c, Layout d, bool promised) {
    Operation o = read_operation(operation);
    bool fp8 = is_fp8_type(a.type), has_bias = o.epilogue == CUBLASLT_EPILOGUE_BIAS;
    uint64_t k = o.transpose_a ? a.rows : a.cols;
    if (memcmp(&c, &d, sizeof(c)) != 0) return false; // d is written in place
    if (a.type == CUDA_R_4F_E2M1) return supports_fp4(o, a, b, d);
    if (fp8) {
        if (standin.declines_native || !is_fp8_type(b.type) || (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2))
            return false;
        if (standin.declines_e5m2 && (a.type == CUDA_R_8F_E5M2 || b.type == CUDA_R_8F_E5M2)) return false;
        if (standin.takes_only_tn && (o.transpose_a != CUBLAS_OP_T || o.transpose_b != CUBLAS_OP_N)) return false;
        if (!is_supported_mode(o.a_mode, o.b_mode)) return false;
        if (o.a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && o.fast_accumulation) return false;
        if (a.stride % 16 || b.stride % 16 || d.rows % 16 || d.cols % 16 || k % 16) return false;
        if (d.stride * type_size(d.type) % 16) return false;
        return !has_bias || o.bias_type == CUDA_R_16BF;
    }
    if (o.a_mode || o.b_mode || a.type != b.type) return false;
    if (a.type == CUDA_R_32F && d.type != CUDA_R_32F) return false;
    bool refuses_odd = standin.odd == NO_ODD || (standin.odd == NO_ODD_BIAS && has_bias);
    if (refuses_odd && !promised && (is_odd(a) || is_odd(b) || is_odd(d))) return false;
    return !has_bias || o.bias_type == (int32_t)d.type;
}

static cublasStatus_t heuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                                cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                cublasLtMatmulPreference_t preference, int wanted,
                                cublasLtMatmulHeuristicResult_t *results, int *count) {
    assert_non_null(handle);
    assert_in_range(wanted, 1, 8);
    assert_int_equal(read_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK),
                     CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    standin.heuristics_asked++;
    bool takes =
        is_supported(operation, read_layout(a), read_layout(b), read_layout(c), read_layout(d), standin.promises_odd);
    int proposed = standin.num_kernels > 1 ? standin.num_kernels : 1;
    *count = !takes ? 0 : wanted < proposed ? wanted : proposed;
    memset(results, 0, (size_t)wanted * sizeof(*results));
    for (int i = 0; i < *count; i++) {
        results[i].algo.data[0] = (uint64_t)i;
    }
    return *count ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

static double element(const void *data, uint32_t type, int64_t at) {
    switch (type) {
    case CUDA_R_32F:
        return ((const float *)data)[at];
    case CUDA_R_16BF:
        return mx_from_bf16(((const uint16_t *)data)[at]);
    case CUDA_R_4F_E2M1: // __nv_fp4x2_e2m1: the first is the lower half
        return mx_decode(FORMAT_E2M1, ((const uint8_t *)data)[at / 2] >> (at % 2 * 4) & 15);
    default:
        return mx_decode(type == CUDA_R_8F_E5M2 ? FORMAT_E5M2 : FORMAT_E4M3, ((const uint8_t *)data)[at]);
    }
}

// (i, l) of op(A) or of op(B)^T, decoded.
static double factor(const void *data, Layout layout, bool l_is_row, const uint8_t *scales, int32_t mode, int64_t i,
                     int64_t l, int64_t count, int64_t k) {
    double value = element(data, layout.type, l_is_row ? i * layout.stride + l : l * layout.stride + i);
    if (!scales) return value;
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) {
        return value * *(const float *)scales * (standin.fault == WRONG_SCALE ? 1.5 : 1);
    }
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3) {
        int64_t sixteen = standin.fault == WRONG_SCALE && i == 17 && l / 16 == 1 ? 0 : l / 16;
        return value * (double)mx_decode(FORMAT_E4M3, scales[tiled_offset(i, sixteen, (k + 15) / 16)]);
    }
    if (mode != CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0) {
        int64_t block = standin.fault == WRONG_SCALE && i == 17 ? 0 : l / 128;
        bool is_square = mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
        return value * ((const float *)scales)[index_of_128(is_square, i, block, count, k)];
    }
    int64_t block = standin.fault == WRONG_SCALE && i == 17 && l / MX_BLOCK == 1 ? 0 : l / MX_BLOCK;
    return value * (double)mx_scale_value(scales[mx_swizzled_scale_offset(i, block, k)]);
}

// Returns a sum of products, in any order.
static double sum_of(const double *a, const double *b, int64_t k) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t l = 0; l < k; l++) {
        sum += a[l] * b[l];
    }
    return sum;
}

// Returns a sum of products where 13 bits of it are kept: an instruction cuts what it adds,
// products and the sum, off below 2^-13 of the largest. The sums of blocks of 128 are added
// without.
static double sum_of_13_bits(const double *a, const double *b, int64_t k, int64_t together, bool by_blocks) {
    double sum = 0, of_block = 0;
    for (int64_t first = 0; first < k; first += together) {
        if (by_blocks && first % 128 == 0) sum += of_block, of_block = 0;
        int64_t end = first + together < k ? first + together : k;
        double largest = fabs(of_block);
#pragma omp simd reduction(max : largest)
        for (int64_t l = first; l < end; l++) {
            double magnitude = fabs(a[l] * b[l]);
            largest = magnitude > largest ? magnitude : largest;
        }
        double unit = ldexp(1, largest > 0 ? ilogb(largest) - 13 : 0), per_unit = 1 / unit; // a power of two
        double units = trunc(of_block * per_unit);
#pragma omp simd reduction(+ : units)
        for (int64_t l = first; l < end; l++) {
            units += trunc(a[l] * b[l] * per_unit);
        }
        of_block = units * unit;
    }
    return sum + of_block;
}

static cublasStatus_t matmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha, const void *a,
                             cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                             const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                             cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                             size_t workspace_bytes, cudaStream_t stream) {
    (void)handle, (void)stream;
    StandinKernel *kernel = &standin.kernels[algorithm->data[0]];
    kernel->runs++;
    standin.time += kernel->time;
    standin.lost_gpu |= kernel->way == LOSES_GPU;
    if (kernel->way == FAILS || kernel->way == LOSES_GPU) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (kernel->way == IDLE) return CUBLAS_STATUS_SUCCESS;
    Operation o = read_operation(operation);
    Layout la = read_layout(a_layout), lb = read_layout(b_layout), ld = read_layout(d_layout);
    if (!is_supported(operation, la, lb, read_layout(c_layout), ld, false) || c != d)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    bool native = is_fp8_type(la.type) || la.type == CUDA_R_4F_E2M1;
    standin.native_runs += native;
    standin.fast_runs += o.fast_accumulation;
    if (native && standin.native_status != CUBLAS_STATUS_SUCCESS) return standin.native_status;
    const void *a_scales = native ? o.a_scales : NULL, *b_scales = native ? o.b_scales : NULL;
    uintptr_t pointers = (uintptr_t)a | (uintptr_t)b | (uintptr_t)d | (uintptr_t)a_scales | (uintptr_t)b_scales;
    if (native && (pointers % 16 || !a_scales || !b_scales)) return CUBLAS_STATUS_INVALID_VALUE;
    assert_true((uintptr_t)workspace % 256 == 0 && workspace_bytes == 32 << 20);
    float scale = *(const float *)alpha;
    bool on_device = o.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;
    assert_true(on_device ? alpha == standin.factors && beta == standin.factors + 1
                          : scale == 1 && o.pointer_mode == CUBLASLT_POINTER_MODE_HOST);
    memset(workspace, UNWRITTEN, workspace_bytes < 4096 ? workspace_bytes : 4096);

    int64_t m = (int64_t)ld.rows, n = (int64_t)ld.cols, k = (int64_t)(o.transpose_a ? la.rows : la.cols);
    assert_int_equal(o.transpose_a ? la.cols : la.rows, m);
    assert_int_equal(o.transpose_b ? lb.rows : lb.cols, n);
    assert_int_equal(o.transpose_b ? lb.cols : lb.rows, k);
    bool has_bias = o.epilogue == CUBLASLT_EPILOGUE_BIAS && !(standin.fault == LOST_BIAS && native);
    bool is_coarse = native && standin.keeps_13_bits, by_blocks = is_by_128(o.a_mode, o.b_mode);
    bool adds = *(const float *)beta != 0, rounds = kernel->way == COARSE || (kernel->way == ADDS_COARSELY && adds);
    bool rounds_product = kernel->way == BIAS_LAST && !native && ld.type == CUDA_R_16BF;
    int64_t together = la.type == CUDA_R_4F_E2M1 ? 64 : 32;
    bool is_scaled = native && o.a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    double of_tensors = is_scaled ? (double)*(const float *)a_scales * *(const float *)b_scales : 1;
    double *row = malloc((size_t)k * sizeof(double)), *columns = malloc((size_t)(n * k) * sizeof(double));
    for (int64_t i = 0; i < n * k; i++) {
        columns[i] = factor(b, lb, !o.transpose_b, b_scales, o.b_mode, i / k, i % k, n, k);
    }
    for (int64_t i = 0; i < m; i++) {
        for (int64_t l = 0; l < k; l++) {
            row[l] = factor(a, la, o.transpose_a, a_scales, o.a_mode, i, l, m, k);
        }
        for (int64_t j = 0; j < n; j++) {
            const double *column = columns + j * k;
            double sum = kernel->way == SPLITS
                             ? (float)sum_of(row, column, k / 2) + (float)sum_of(row + k / 2, column + k / 2, k - k / 2)
                         : is_coarse ? sum_of_13_bits(row, column, k, together, by_blocks)
                                     : sum_of(row, column, k);
            sum *= scale;
            double scales = scale * of_tensors;
            if (kernel->way == SCALES_LAST && scales != 1) sum = (float)(sum / scales) * scales;
            if (rounds_product) sum = mx_from_bf16(mx_to_bf16((float)sum));
            if (adds && (native || standin.fault != LOST_SUM)) sum += element(d, ld.type, j * ld.stride + i);
            if (has_bias) sum += element(o.bias, (uint32_t)o.bias_type, i);
            if (standin.fault == COARSE_SUM && native) sum *= 1 + 0x1p-6;
            if (rounds) sum = mx_from_bf16((uint16_t)(mx_to_bf16((float)sum) & 0xFFF0));
            if (ld.type == CUDA_R_32F) ((float *)d)[j * ld.stride + i] = (float)sum;
            if (ld.type == CUDA_R_16BF) ((uint16_t *)d)[j * ld.stride + i] = mx_to_bf16((float)sum);
        }
    }
    free(row);
    free(columns);
    return CUBLAS_STATUS_SUCCESS;
}

// In the place of llmc/base/library.c: three of the functions that gemm_cublaslt.c asks for are
// those above, all others the library's own.
// ------------------------------------------------------------------------------------------------

bool library_load(Library *library) {
    if (!library->handle) library->handle = dlopen(library->file, RTLD_NOW);
    return library->handle != NULL;
}

void *library_function(Library *library, const char *name) {
    if (strcmp(name, "cublasLtCreate") == 0) return (void *)create;
    if (strcmp(name, "cublasLtMatmulAlgoGetHeuristic") == 0) return (void *)heuristic;
    if (strcmp(name, "cublasLtMatmul") == 0) return (void *)matmul;
    assert_true(library_load(library));
    void *function = dlsym(library->handle, name);
    assert_non_null(function);
    return function;
}

// In the place of CUDA: its memory is the host's, and everything has ended when it returns
// ------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    standin.allocations++;
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    standin.frees += memory != NULL;
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind, (void)stream;
    memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset2DAsync(void *memory, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream) {
    (void)stream;
    for (size_t row = 0; row < height; row++) {
        memset((char *)memory + row * pitch, value, width);
    }
    return cudaSuccess;
}

// Events are the stand-in's time when they were recorded.
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = calloc(1, sizeof(float));
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    (void)stream;
    *(float *)event = standin.time;
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = *(float *)end - *(float *)start;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    (void)flags;
    *stream = NULL;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (standin.lost_gpu) return cudaErrorLaunchFailure;
    return stream ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "success" : "failure"; }

// In the place of the kernels that prepare operands
// ------------------------------------------------------------------------------------------------

void cuda_convert(Tensor out, Tensor in) { cpu_convert(out, in); }

void cuda_combine(Tensor out, float a, Tensor x, float b, Tensor y) { cpu_combine(out, a, x, b, y); }

// The scale of each element's block goes where the manual's formulas have it.
static void tile_scales(uint8_t *tiled, const QuantizedTensor *q, Axis along) {
    bool rowwise = along == AXIS_ROWWISE;
    int64_t outer_count = rowwise ? q->rows : q->cols, blocks = num_parts(rowwise ? q->cols : q->rows, 16);
    memset(tiled, 0, (size_t)(num_parts(outer_count, 128) * num_parts(blocks, 4) * 512));
    for (int64_t i = 0; i < q->rows * q->cols; i++) {
        int64_t row = i / q->cols, col = i % q->cols, outer = rowwise ? row : col, k = rowwise ? col : row;
        int64_t at = q->axis == AXIS_SQUARE    ? row / 16 * num_parts(q->cols, 16) + col / 16
                     : q->axis == AXIS_ROWWISE ? row * num_parts(q->cols, 16) + col / 16
                                               : row / 16 * q->cols + col;
        tiled[tiled_offset(outer, k / 16, blocks)] = q->scales[at];
    }
}

void cuda_swizzle_scales(uint8_t *swizzled, const QuantizedTensor *q, Axis along) {
    assert_true(along == q->axis || (q->axis == AXIS_SQUARE && q->scaling != SCALING_MX));
    assert_int_equal(q->form, FORM_PLAIN);
    standin.swizzles++;
    if (q->scaling == SCALING_MX) {
        swizzle_scales(swizzled, q);
    } else {
        tile_scales(swizzled, q, along);
    }
}

void cuda_pack_codes(uint8_t *out, const QuantizedTensor *q, Axis along) {
    assert_true(along == q->axis || q->axis == AXIS_SQUARE);
    standin.packs++;
    for (int64_t i = 0; i < q->rows * q->cols; i++) {
        int64_t row = i / q->cols, col = i % q->cols;
        int64_t at = along == AXIS_ROWWISE ? i : col * q->rows + row;
        uint8_t other = at % 2 ? out[at / 2] & 0x0F : out[at / 2] & 0xF0;
        out[at / 2] = (uint8_t)(other | q->elements[i] << (at % 2 * 4));
    }
}

// Fills what is written, and only that, from each scale's own place.
void cuda_arrange_scales(float *arranged, const QuantizedTensor *q, Axis along) {
    assert_true(q->axis == along || q->axis == AXIS_SQUARE);
    standin.arrangements++;
    int64_t outer = along == AXIS_ROWWISE ? q->rows : q->cols, k = along == AXIS_ROWWISE ? q->cols : q->rows;
    bool is_square = q->axis == AXIS_SQUARE;
    int64_t across = q->axis == AXIS_COLUMNWISE ? q->cols : (q->cols + 127) / 128;
    for (int64_t o = 0; o < outer; o += is_square ? 128 : 1) {
        for (int64_t block = 0; block < scaling_gemm_blocks(k, is_square); block++) {
            int64_t row = is_square ? o / 128 : o;
            int64_t from = along == AXIS_ROWWISE ? row * across + block : block * across + row;
            float scale = block * 128 < k ? ((const float *)q->scales)[from] : 0;
            arranged[index_of_128(is_square, o, block, outer, k)] = scale;
        }
    }
}

// Returns the scale, by its own place, of a block of 128 along K, of the product's row or column
// `outer`.
static float scale_of_128(Operand operand, bool k_along_rows, int64_t outer, int64_t block) {
    const QuantizedTensor *q = &operand.quantized;
    if (!operand_is_summed_by_block(operand)) return 1;
    if (q->axis == AXIS_SQUARE) outer /= 128;
    int64_t across = q->axis == AXIS_COLUMNWISE ? q->cols : (q->cols + 127) / 128;
    return ((const float *)q->scales)[k_along_rows ? outer * across + block : block * across + outer];
}

void cuda_add_block_product(Tensor sum, Tensor product, Operand a, Operand b, GemmOptions options, int64_t row,
                            int64_t k) {
    assert_int_equal(k % 128, 0);
    standin.block_products++;
    for (int64_t i = 0; i < sum.rows; i++) {
        for (int64_t j = 0; j < sum.cols; j++) {
            float scale = scale_of_128(a, !options.transpose_a, row + i, k / 128) *
                          scale_of_128(b, options.transpose_b, j, k / 128);
            float *to = (float *)sum.data + i * sum.stride + j;
            *to += scale * ((const float *)product.data)[i * product.stride + j];
        }
    }
}

void cuda_dequantize(Tensor out, const QuantizedTensor *q, Format values) {
    assert_int_not_equal(q->form, FORM_DECODED);
    standin.dequantizations++;
    QuantizedTensor plain = *q;
    plain.form = FORM_PLAIN;
    if (q->form == FORM_SWIZZLED) plain.scales = malloc((size_t)mx_num_scales(q->axis, q->rows, q->cols));
    for (int64_t i = 0; i < q->rows * q->cols && q->form == FORM_SWIZZLED; i++) {
        int64_t row = i / q->cols, col = i % q->cols;
        plain.scales[plain_offset(q, row, col)] = q->scales[swizzled_offset(q, row, col)];
    }
    if (q->form == FORM_TRANSPOSED) plain.elements = malloc((size_t)(q->rows * q->cols));
    for (int64_t i = 0; i < q->rows * q->cols && q->form == FORM_TRANSPOSED; i++) {
        plain.elements[i] = q->elements[i % q->cols * q->rows + i / q->cols];
    }
    cpu_dequantize(out, &plain, values);
    if (q->form == FORM_SWIZZLED) free(plain.scales);
    if (q->form == FORM_TRANSPOSED) free(plain.elements);
}

uint64_t cuda_digest(Tensor tensor) {
    uint64_t digest = 0;
    for (int64_t i = 0; i < tensor.rows * tensor.cols; i++) {
        float value = (float)tensor_get(tensor, i / tensor.cols, i % tensor.cols);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        if (isfinite(value)) digest += bits * (uint64_t)(2 * i + 1);
    }
    return digest;
}

void cuda_scramble(Tensor tensor) {
    for (int64_t i = 0; i < tensor.rows * tensor.cols; i++) {
        uint16_t *value = (uint16_t *)tensor.data + i / tensor.cols * tensor.stride + i % tensor.cols;
        int high_exponent = *value >> 9 & 0x3F;
        if (high_exponent != 0 && high_exponent != 0x3F)
            *value ^= (uint16_t)((uint64_t)(i + 1) * 0x9E3779B97F4A7C15 >> 55);
    }
}

void cuda_scramble_codes(uint8_t *codes, int64_t rows, int64_t cols, int64_t stride, Format format) {
    for (int64_t i = 0; i < rows * cols; i++) {
        uint8_t *code = codes + i / cols * stride + i % cols;
        uint8_t scrambled = *code ^ (uint8_t)((uint64_t)(i + 1) * 0x9E3779B97F4A7C15 >> 57);
        if (isfinite(mx_decode(format, *code)) && isfinite(mx_decode(format, scrambled))) *code = scrambled;
    }
}

void cuda_multiply_factors(float *out, const float *a, const float *b, float divisor, float beta) {
    standin.factors = out;
    out[0] = (a ? *a : 1) * (b ? *b : 1) / divisor;
    out[1] = beta;
}

void cuda_transpose_codes(uint8_t *out, const uint8_t *codes, int64_t rows, int64_t cols) {
    standin.transposes++;
    for (int64_t i = 0; i < rows * cols; i++) {
        out[i % cols * rows + i / cols] = codes[i];
    }
}
