#include "gemm_values.h"
#include "llmc/base/memory.h"

#include <stdio.h>

static Format format_of(cudaDataType_t type) { return type == CUDA_R_32F ? FORMAT_FP32 : FORMAT_BF16; }

static Tensor tensor_of(GemmMatrix m) {
    Tensor tensor = tensor_make((void *)m.data, format_of(m.type), m.rows, m.cols);
    tensor.stride = m.stride;
    return tensor;
}

// The bias as rows for d, all of them the same.
static Tensor rows_of_bias(GemmBias bias, Tensor d) {
    Tensor rows = tensor_make((void *)bias.data, format_of(bias.type), d.rows, d.cols);
    rows.stride = 0;
    return rows;
}

// Returns NULL, or why cuBLASLt multiplies neither with its epilogue nor without. Some kernels
// round a product to BF16 before they add it to what is in d (seen on an H100 and an H200 with
// 13.1): there a bias that is in d before costs one rounding more than the epilogue's.
static const char *multiply(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options, void *workspace) {
    const char *declined = cuda_gemm_multiply(d, a, b, bias, options, workspace);
    if (!declined || !bias.data || options.accumulate) return declined;
    GemmBias none = {.type = bias.type};
    declined = cuda_gemm_declined(d, a, b, none, options);
    if (declined) return declined;
    cuda_convert(d, rows_of_bias(bias, d));
    options.accumulate = true;
    return cuda_gemm_multiply(d, a, b, none, options, workspace);
}

// Copies with even dimensions
// ------------------------------------------------------------------------------------------------

// In elements: 16 bytes of BF16. cuBLASLt's fastest kernels ask for as much, and all others for
// less.
enum { EVEN = 8 };

typedef struct {
    Tensor d, a, b;
    Tensor bias; // one row
    size_t bytes;
} Copies;

static Tensor take_copy(MemoryPlan *plan, Tensor of) {
    int64_t rows = num_parts(of.rows, EVEN) * EVEN, cols = num_parts(of.cols, EVEN) * EVEN;
    void *memory = memory_take(plan, MEMORY_SCRATCH, (size_t)(rows * cols) * dtype_size(of.dtype));
    return tensor_make(memory, of.dtype, rows, cols);
}

static Copies place_copies(void *memory, Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias) {
    MemoryPlan plan = {.base = memory};
    Copies copies = {
        .d = take_copy(&plan, d), .a = take_copy(&plan, tensor_of(a)), .b = take_copy(&plan, tensor_of(b))};
    copies.bias = take_copy(&plan, tensor_make(NULL, format_of(bias.type), 1, d.cols));
    copies.bytes = plan.used;
    return copies;
}

// Returns memory that is kept for all copies: no plan has it, since few runs ever need it.
static void *memory_for_copies(size_t bytes) {
    static void *memory;
    static size_t held;
    if (bytes <= held) return memory;
    cuda_check(cudaFree(memory), "freeing memory of the GPU"); // waits for what reads it
    cuda_check(cudaMalloc(&memory, bytes), "allocating memory of the GPU for copies of matrices");
    held = bytes;
    return memory;
}

static Tensor part_of(Tensor copy, Tensor of) {
    copy.rows = of.rows;
    copy.cols = of.cols;
    return copy;
}

// Fills a copy with the values of `of`, and zeros beyond them.
static void fill(Tensor copy, Tensor of) {
    cuda_zero(copy.data, (size_t)(copy.rows * copy.stride) * dtype_size(copy.dtype));
    cuda_convert(part_of(copy, of), of);
}

static GemmMatrix matrix_like(GemmMatrix m, Tensor copy) {
    m.data = copy.data;
    m.rows = copy.rows;
    m.cols = copy.cols;
    m.stride = copy.stride;
    return m;
}

static const char *multiply_copies(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options,
                                   void *workspace) {
    Copies c = place_copies(NULL, d, a, b, bias);
    c = place_copies(memory_for_copies(c.bytes), d, a, b, bias);
    fill(c.a, tensor_of(a));
    fill(c.b, tensor_of(b));
    if (options.accumulate) fill(c.d, d);
    if (bias.data) {
        fill(c.bias, part_of(rows_of_bias(bias, d), tensor_make(NULL, c.bias.dtype, 1, d.cols)));
        bias.data = c.bias.data;
    }
    const char *declined = multiply(c.d, matrix_like(a, c.a), matrix_like(b, c.b), bias, options, workspace);
    if (!declined) cuda_convert(d, part_of(c.d, d));
    return declined;
}

void cuda_gemm_multiply_values(Tensor d, GemmMatrix a, GemmMatrix b, GemmBias bias, GemmOptions options,
                               void *workspace) {
    static bool said;
    if (!multiply(d, a, b, bias, options, workspace)) return;
    int64_t M = d.rows, N = d.cols, K = options.transpose_a ? a.rows : a.cols;
    if (!said) {
        fprintf(stderr,
                "cuBLASLt has no kernel for a GEMM of M %ld, N %ld, K %ld as its matrices lie: it, and others like it, "
                "are multiplied from copies\n",
                M, N, K);
    }
    said = true;
    const char *declined = multiply_copies(d, a, b, bias, options, workspace);
    if (declined) die("cuBLASLt doesn't multiply matrices of M %ld, N %ld, K %ld: %s", M, N, K, declined);
}
