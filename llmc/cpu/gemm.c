/*
GEMM. Where oneDNN has instructions for BF16, quantized operands are decoded and it multiplies;
elsewhere a loop of ours (matmul.c) decodes what it multiplies on the way.
*/
#include "cpu.h"
#include "onednn.h"
#include "llmc/base/util.h" // die

#include <stdio.h>

static size_t round_up_64(size_t bytes) { return (bytes + 63) / 64 * 64; }

static bool is_fp32(Operand operand) { return !operand_is_quantized(operand) && operand.tensor.dtype == FORMAT_FP32; }

// Returns what quantized operands are decoded to: BF16 for a BF16 GEMM, also where the machine then
// multiplies in FP32.
static Format value_dtype(Operand a, Operand b) { return is_fp32(a) || is_fp32(b) ? FORMAT_FP32 : FORMAT_BF16; }

static bool needs_decoding(Operand operand, Format dtype) {
    return operand_is_quantized(operand) || operand.tensor.dtype != dtype;
}

static size_t decoded_bytes(Operand operand, Format dtype) {
    if (!needs_decoding(operand, dtype)) return 0;
    return round_up_64((size_t)(operand_rows(operand) * operand_cols(operand)) * dtype_size(dtype));
}

QuantizedForm cpu_quantized_form(bool for_one_gemm) { return for_one_gemm ? FORM_DECODED : FORM_PLAIN; }

// Rows of a product that are multiplied by its operands' factors at a time.
enum { FACTOR_ROWS = 128 };

size_t cpu_gemm_workspace(Operand a, Operand b) {
    int64_t most_cols = operand_rows(b) > operand_cols(b) ? operand_rows(b) : operand_cols(b);
    bool has_factor = operand_has_factor(a) || operand_has_factor(b);
    size_t product = has_factor ? (size_t)(FACTOR_ROWS * most_cols) * sizeof(float) : 0;
    if (!onednn_multiplies() && !has_factor) return 0;
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    Format dtype = value_dtype(a, b);
    return decoded_bytes(a, dtype) + decoded_bytes(b, dtype) + product;
}

bool cpu_gemm_decodes(Tensor d, Operand a, Operand b, GemmOptions options) {
    (void)options;
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    Format dtype = value_dtype(a, b);
    return onednn_takes(dtype, d.dtype) && (needs_decoding(a, dtype) || needs_decoding(b, dtype));
}

// Returns the operand as a tensor of `dtype`: itself, or decoded into `scratch`.
static Tensor decode_operand(Operand operand, Format dtype, void *scratch) {
    if (!needs_decoding(operand, dtype)) return operand.tensor;
    Tensor decoded = tensor_make(scratch, dtype, operand_rows(operand), operand_cols(operand));
    if (operand_is_quantized(operand)) {
        cpu_dequantize(decoded, &operand.quantized, dtype);
    } else {
        cpu_convert(decoded, operand.tensor);
    }
    return decoded;
}

static void check_shapes(Tensor d, Operand a, Operand b, GemmOptions options) {
    int64_t M = options.transpose_a ? operand_cols(a) : operand_rows(a);
    int64_t K = options.transpose_a ? operand_rows(a) : operand_cols(a);
    int64_t N = options.transpose_b ? operand_rows(b) : operand_cols(b);
    int64_t K_of_b = options.transpose_b ? operand_cols(b) : operand_rows(b);
    if (K != K_of_b || d.rows != M || d.cols != N) {
        die("internal error: gemm shapes don't agree: d %lldx%lld, M %lld, N %lld, K %lld and %lld", (long long)d.rows,
            (long long)d.cols, (long long)M, (long long)N, (long long)K, (long long)K_of_b);
    }
    if (!gemm_blocks_run_along_k(a, b, options)) {
        die("internal error: gemm was given a quantized operand whose blocks don't run along K");
    }
}

static float factor_of(Operand operand) {
    return operand_is_quantized(operand) && operand.quantized.factor ? *operand.quantized.factor : 1;
}

static float prescale_of(Operand operand) {
    return operand_is_quantized(operand) ? encoding_prescale(&operand.quantized.encoding) : 1;
}

// Makes rows of d: their product times alpha, added to d or to the bias.
static void finish_rows(Tensor d, Tensor product, float alpha, GemmOptions options) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < d.rows; row++) {
        float *x = cpu_at(product, row, 0);
        for (int64_t i = 0; i < d.cols; i += CPU_SLAB) {
            int64_t count = d.cols - i < CPU_SLAB ? d.cols - i : CPU_SLAB;
            float before[CPU_SLAB] = {0};
            if (options.accumulate) cpu_load(before, cpu_at(d, row, i), d.dtype, count);
            for (int64_t j = 0; j < count; j++) {
                x[i + j] = alpha * x[i + j] + before[j] + (options.bias ? options.bias[i + j] : 0);
            }
        }
        cpu_store_row(d, row, x);
    }
}

// Multiplies operands of which one has a factor or a prescale: what they decode to without it, in
// FP32, and then the products with both factors' product, as a GEMM's alpha.
static void gemm_with_factors(Tensor d, Operand a, Operand b, GemmOptions options) {
    float alpha = factor_of(a) * factor_of(b) / (prescale_of(a) * prescale_of(b));
    char *scratch = cpu_workspace(cpu_gemm_workspace(a, b));
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    Format dtype = value_dtype(a, b);
    Tensor in = decode_operand(a, dtype, scratch);
    scratch += decoded_bytes(a, dtype);
    Tensor other = decode_operand(b, dtype, scratch);
    scratch += decoded_bytes(b, dtype);
    for (int64_t row = 0; row < d.rows; row += FACTOR_ROWS) {
        int64_t rows = d.rows - row < FACTOR_ROWS ? d.rows - row : FACTOR_ROWS;
        Tensor product = tensor_make(scratch, FORMAT_FP32, rows, d.cols);
        Tensor part = options.transpose_a ? tensor_cols(in, row, rows) : tensor_rows(in, row, rows);
        cpu_matmul(product, part, other,
                   (GemmOptions){.transpose_a = options.transpose_a, .transpose_b = options.transpose_b});
        finish_rows(tensor_rows(d, row, rows), product, alpha, options);
    }
}

// Multiplies operands of which at least one isn't a tensor, or of two dtypes.
void cpu_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    check_shapes(d, a, b, options);
    if (operand_has_factor(a) || operand_has_factor(b)) {
        gemm_with_factors(d, a, b, options);
        return;
    }
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    Format dtype = value_dtype(a, b);
    if (!onednn_takes(dtype, d.dtype)) {
        matmul_packed(d, a, b, options, dtype);
        return;
    }
    char *scratch = cpu_workspace(cpu_gemm_workspace(a, b));
    Tensor decoded_a = decode_operand(a, dtype, scratch);
    Tensor decoded_b = decode_operand(b, dtype, scratch + decoded_bytes(a, dtype));
    onednn_matmul(d, decoded_a, decoded_b, options);
}

void cpu_matmul(Tensor d, Tensor a, Tensor b, GemmOptions options) {
    if (onednn_takes(a.dtype, d.dtype)) {
        onednn_matmul(d, a, b, options);
    } else {
        matmul_packed(d, operand_tensor(a), operand_tensor(b), options, a.dtype);
    }
}
