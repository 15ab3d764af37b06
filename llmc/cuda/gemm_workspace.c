#include "gemm_workspace.h"
#include "llmc/base/memory.h"

enum {
    STRIDE_MULTIPLE = 8,          // decoded rows start at multiples of 16 bytes
    VALUES_BY_BLOCK = 8 << 20,    // of d, at most, that are summed by block at a time
    ROWS_BY_BLOCK_MULTIPLE = 128, // they are whole rows, of which there is a multiple of this
};

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

static bool is_decoded(Operand o) { return operand_is_quantized(o) && o.quantized.form == FORM_DECODED; }

int64_t cuda_gemm_decoded_stride(Operand operand) {
    return num_parts(operand_cols(operand), STRIDE_MULTIPLE) * STRIDE_MULTIPLE;
}

// What was quantized into decoded values is as it is multiplied where its rows are aligned.
bool cuda_gemm_needs_decoding(Operand operand, Format dtype) {
    if (is_decoded(operand)) return dtype != FORMAT_BF16 || cuda_gemm_decoded_stride(operand) != operand.quantized.cols;
    return operand_is_quantized(operand) || operand.tensor.dtype != dtype;
}

// Returns the bytes of an operand's scales as a GEMM wants them whose sum runs along its dimension
// of K, `outer` being the other.
static size_t bytes_along(const QuantizedTensor *q, int64_t outer, int64_t K) {
    if (!scaling_is_block128(q->scaling)) return (size_t)scaling_swizzled_bytes(q->scaling, outer, K);
    return (size_t)scaling_num_gemm_scales(outer, K, q->axis == AXIS_SQUARE) * sizeof(float);
}

// Returns the bytes of scales that are still to be put where cuBLASLt wants them. Blocks of a
// square operand run along either axis: the larger.
static size_t arranged_bytes(const QuantizedTensor *q) {
    if (q->form == FORM_SWIZZLED || q->scaling == SCALING_TENSOR) return 0;
    size_t along_rows = bytes_along(q, q->rows, q->cols), along_columns = bytes_along(q, q->cols, q->rows);
    if (q->axis == AXIS_SQUARE) return max_size(along_rows, along_columns);
    return q->axis == AXIS_ROWWISE ? along_rows : along_columns;
}

// Returns the bytes of codes that are packed or transposed before they are multiplied.
static size_t code_bytes(const QuantizedTensor *q) {
    size_t count = (size_t)(q->rows * q->cols);
    bool is_along_k = q->axis == AXIS_ROWWISE || q->form == FORM_TRANSPOSED;
    return scaling_is_nvfp4(q->scaling) ? (count + 1) / 2 : is_along_k ? 0 : count;
}

static OperandScratch place_operand(MemoryPlan *plan, Operand operand, Format dtype) {
    OperandScratch scratch = {0};
    if (!cuda_gemm_needs_decoding(operand, dtype)) return scratch;
    MemoryPlan values = *plan, native = *plan; // the same memory, of which the larger is taken
    size_t stride = (size_t)cuda_gemm_decoded_stride(operand);
    scratch.values = memory_take(&values, MEMORY_SCRATCH, (size_t)operand_rows(operand) * stride * dtype_size(dtype));
    if (operand_is_quantized(operand) && !is_decoded(operand)) {
        scratch.scales = memory_take(&native, MEMORY_SCRATCH, arranged_bytes(&operand.quantized));
        scratch.codes = memory_take(&native, MEMORY_SCRATCH, code_bytes(&operand.quantized));
    }
    *plan = native.used > values.used ? native : values;
    return scratch;
}

// Returns the elements of the largest that d can be, whichever dimension the operands share.
static int64_t largest_result(Operand a, Operand b) {
    int64_t a_sizes[] = {operand_rows(a), operand_cols(a)}, b_sizes[] = {operand_rows(b), operand_cols(b)}, largest = 0;
    for (int i = 0; i < 4; i++) {
        bool shared = a_sizes[i / 2] == b_sizes[i % 2];
        if (shared) largest = max_int64(largest, a_sizes[1 - i / 2] * b_sizes[1 - i % 2]);
    }
    return largest;
}

int64_t cuda_gemm_rows_by_block(int64_t N) {
    return max_int64(1, VALUES_BY_BLOCK / N / ROWS_BY_BLOCK_MULTIPLE) * ROWS_BY_BLOCK_MULTIPLE;
}

// Returns the bytes of so many of d's values as are summed by block at a time, whichever of b's
// dimensions N is; 0 where that isn't done.
static size_t bytes_by_block(Operand a, Operand b, int64_t values) {
    if (!operands_are_summed_by_block(a, b)) return 0;
    int64_t N = max_int64(operand_rows(b), operand_cols(b));
    int64_t most = max_int64(VALUES_BY_BLOCK, ROWS_BY_BLOCK_MULTIPLE * N);
    return (size_t)(values < most ? values : most) * sizeof(float);
}

GemmWorkspace cuda_gemm_place(void *memory, Operand a, Operand b, int64_t values, bool is_wide) {
    MemoryPlan plan = {.base = memory};
    Format dtype = operands_value_dtype(a, b);
    GemmWorkspace w = {0};
    size_t factors = operand_has_factor(a) || operand_has_factor(b) ? CUDA_GEMM_FACTOR_BYTES : 0;
    w.library = memory_take(&plan, MEMORY_SCRATCH, CUDA_CUBLASLT_BYTES + factors);
    w.a = place_operand(&plan, a, dtype);
    w.b = place_operand(&plan, b, dtype);
    size_t N = (size_t)max_int64(operand_rows(b), operand_cols(b)); // one of them is N
    w.bias = memory_take(&plan, MEMORY_SCRATCH, N * dtype_size(FORMAT_BF16));
    w.wide_result = memory_take(&plan, MEMORY_SCRATCH,
                                is_wide && !operands_are_summed_by_block(a, b) ? (size_t)values * sizeof(float) : 0);
    w.product = memory_take(&plan, MEMORY_SCRATCH, bytes_by_block(a, b, values));
    w.sum = memory_take(&plan, MEMORY_SCRATCH, bytes_by_block(a, b, values));
    w.bytes = plan.used;
    return w;
}

size_t cuda_gemm_workspace(Operand a, Operand b) {
    return cuda_gemm_place(NULL, a, b, largest_result(a, b), operands_value_dtype(a, b) == FORMAT_FP32).bytes;
}
