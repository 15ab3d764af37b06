/*
GEMM. Where oneDNN multiplies (onednn.h), quantized operands are decoded first; elsewhere a loop of
ours (matmul.c) decodes what it multiplies on the way, but for operands with a factor, a prescale or
FP32 scales, which are decoded first.
*/
#include "cpu.h"
#include "onednn.h"

#include <omp.h>

static size_t round_up_64(size_t bytes) { return (bytes + 63) / 64 * 64; }

static bool needs_decoding(Operand operand, Format dtype) {
    return operand_is_quantized(operand) || operand.tensor.dtype != dtype;
}

static size_t decoded_bytes(Operand operand, Format dtype) {
    if (!needs_decoding(operand, dtype)) return 0;
    return round_up_64((size_t)(operand_rows(operand) * operand_cols(operand)) * dtype_size(dtype));
}

QuantizedForm cpu_quantized_form(Scaling scaling, Axis axis, bool for_one_gemm) {
    (void)scaling, (void)axis;
    return for_one_gemm ? FORM_DECODED : FORM_PLAIN;
}

// Rows of a product that are summed by block at a time, and those that a thread takes of them.
enum { BLOCK_ROWS = 128, BAND_ROWS = 16 };

// Returns whether products are multiplied by something that isn't in the decoded operands.
static bool is_scaled_after(Operand a, Operand b) {
    return operand_has_factor(a) || operand_has_factor(b) || operands_are_summed_by_block(a, b);
}

size_t cpu_gemm_workspace(Operand a, Operand b) {
    int64_t most_cols = operand_rows(b) > operand_cols(b) ? operand_rows(b) : operand_cols(b);
    bool scaled_after = is_scaled_after(a, b), by_block = operands_are_summed_by_block(a, b);
    size_t product = by_block ? (size_t)(2 * BLOCK_ROWS * most_cols) * sizeof(float) : 0; // and sum
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    Format dtype = operands_value_dtype(a, b);
    if (!onednn_multiplies(dtype) && !scaled_after) return 0;
    return decoded_bytes(a, dtype) + decoded_bytes(b, dtype) + product;
}

bool cpu_gemm_decodes(Tensor d, Operand a, Operand b, GemmOptions options) {
    (void)options;
    bool scaled_after = is_scaled_after(a, b);
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    Format dtype = operands_value_dtype(a, b);
    if (!scaled_after && !onednn_takes(dtype, d.dtype)) return false;
    return needs_decoding(a, dtype) || needs_decoding(b, dtype);
}

const char *cpu_gemm_refuses(Tensor d, Operand a, Operand b, GemmOptions options) {
    (void)d, (void)a, (void)b, (void)options;
    return NULL;
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

void cpu_finish_product(Tensor d, Tensor product, float alpha, GemmOptions options) {
#pragma omp parallel for schedule(static) if (!omp_in_parallel())
    for (int64_t row = 0; row < d.rows; row++) {
        float *x = cpu_at(product, row, 0);
        for (int64_t i = 0; i < d.cols; i += CPU_SLAB) {
            int64_t count = min_int64(d.cols - i, CPU_SLAB);
            float before[CPU_SLAB] = {0};
            if (options.accumulate) cpu_load(before, cpu_at(d, row, i), d.dtype, count);
            for (int64_t j = 0; j < count; j++) {
                x[i + j] = alpha * x[i + j] + before[j] + (options.bias ? options.bias[i + j] : 0);
            }
        }
        cpu_store_row(d, row, x);
    }
}

// An operand whose blocks' scales are not in what it is decoded to. `by_row`: K runs along its
// rows.
typedef struct {
    Operand of;
    Tensor values;
    bool by_row;
} Scaled;

// Fills `out` with the scales of the block that K's element k is in, of rows or columns [first,
// first + count) of the product.
static void block_scales(float *out, const Scaled *x, int64_t k, int64_t first, int64_t count) {
    const QuantizedTensor *q = &x->of.quantized;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = x->by_row ? k : first + i, col = x->by_row ? first + i : k;
        int64_t block = scaling_block_at(q->scaling, q->axis, row, col, q->cols);
        out[i] = operand_is_summed_by_block(x->of) ? scaling_kept_value(q->scaling, q->scales, block) : 1;
    }
}

// Adds a block's product to the sum of rows from `first` on, each element times its two scales.
static void add_block(Tensor sum, Tensor product, const Scaled *a, const Scaled *b, int64_t first, int64_t k) {
    float row_scales[BLOCK_ROWS];
    block_scales(row_scales, a, k, first, sum.rows);
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t band = 0; band < sum.rows; band += BAND_ROWS) {
        for (int64_t col = 0; col < sum.cols; col += CPU_SLAB) {
            int64_t rows = min_int64(sum.rows - band, BAND_ROWS);
            int64_t count = min_int64(sum.cols - col, CPU_SLAB);
            float scales[CPU_SLAB];
            block_scales(scales, b, k, col, count);
            for (int64_t row = band; row < band + rows; row++) {
                float *to = cpu_at(sum, row, col);
                const float *x = cpu_at(product, row, col);
                for (int64_t j = 0; j < count; j++) {
                    to[j] += x[j] * (row_scales[row] * scales[j]);
                }
            }
        }
    }
}

// Returns elements [k, k + depth) of K of an operand, of which `rows` from `first` on are the
// product's.
static Tensor part_of(const Scaled *x, int64_t k, int64_t depth, int64_t first, int64_t rows) {
    return x->by_row ? tensor_cols(tensor_rows(x->values, k, depth), first, rows)
                     : tensor_rows(tensor_cols(x->values, k, depth), first, rows);
}

// Multiplies rows of a, from `first` on, and all of b by blocks of K, of which each product is
// multiplied by its scales and added in FP32, as Hopper does.
static void sum_rows_by_block(Tensor sum, Tensor product, const Scaled *a, const Scaled *b, int64_t first) {
    GemmOptions options = {.transpose_a = a->by_row, .transpose_b = !b->by_row};
    int64_t K = a->by_row ? a->values.rows : a->values.cols, length = scaling_block(SCALING_BLOCK128_FP32);
    memset(sum.data, 0, (size_t)(sum.rows * sum.cols) * sizeof(float));
    for (int64_t k = 0; k < K; k += length) {
        int64_t depth = min_int64(K - k, length);
        cpu_matmul(product, part_of(a, k, depth, first, sum.rows), part_of(b, k, depth, 0, sum.cols), options);
        add_block(sum, product, a, b, first, k);
    }
}

static void gemm_by_block(Tensor d, const Scaled *a, const Scaled *b, float alpha, GemmOptions options, void *scratch) {
    for (int64_t row = 0; row < d.rows; row += BLOCK_ROWS) {
        int64_t rows = min_int64(d.rows - row, BLOCK_ROWS);
        Tensor sum = tensor_make(scratch, FORMAT_FP32, rows, d.cols);
        Tensor product = tensor_make((float *)scratch + BLOCK_ROWS * d.cols, FORMAT_FP32, rows, d.cols);
        sum_rows_by_block(sum, product, a, b, row);
        cpu_finish_product(tensor_rows(d, row, rows), sum, alpha, options);
    }
}

static bool is_dense(Tensor x) { return x.stride == x.cols; }

// Returns whether oneDNN has a kernel that multiplies by alpha. Version 2.6 adds something to that
// product in dense matrices alone; of strided ones it would take its reference loops, which are ten
// thousand times slower.
static bool onednn_takes_alpha(Tensor d, Tensor a, Tensor b, GemmOptions options) {
    return (!options.accumulate && !options.bias) || (is_dense(d) && is_dense(a) && is_dense(b));
}

// Multiplies operands of which at least one isn't a tensor, or of two dtypes. Those with a factor
// or a prescale are decoded without it; both factors' product is the GEMM's alpha.
void cpu_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    check_shapes(d, a, b, options);
    float alpha = factor_of(a) * factor_of(b) / (prescale_of(a) * prescale_of(b));
    bool has_alpha = operand_has_factor(a) || operand_has_factor(b), by_block = operands_are_summed_by_block(a, b);
    char *scratch = cpu_workspace(cpu_gemm_workspace(a, b));
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    Format dtype = operands_value_dtype(a, b);
    bool by_onednn = onednn_takes(dtype, d.dtype);
    if (!has_alpha && !by_block && !by_onednn) {
        matmul_packed(d, a, b, 1, options, dtype, MATMUL_ALL);
        return;
    }
    Scaled in = {a, decode_operand(operand_without_block_scales(a), dtype, scratch), options.transpose_a};
    scratch += decoded_bytes(a, dtype);
    Scaled other = {b, decode_operand(operand_without_block_scales(b), dtype, scratch), !options.transpose_b};
    scratch += decoded_bytes(b, dtype);
    if (by_block) {
        gemm_by_block(d, &in, &other, alpha, options, scratch);
    } else if (by_onednn && (!has_alpha || onednn_takes_alpha(d, in.values, other.values, options))) {
        onednn_matmul(d, in.values, other.values, has_alpha ? &alpha : NULL, options);
    } else {
        matmul_packed(d, operand_tensor(in.values), operand_tensor(other.values), alpha, options, dtype, MATMUL_ALL);
    }
}

void cpu_matmul(Tensor d, Tensor a, Tensor b, GemmOptions options) { cpu_matmul_causal(d, a, b, options, MATMUL_ALL); }

void cpu_matmul_causal(Tensor d, Tensor a, Tensor b, GemmOptions options, int64_t diagonal) {
    if (onednn_takes(a.dtype, d.dtype)) {
        onednn_matmul(d, a, b, NULL, options);
    } else {
        matmul_packed(d, operand_tensor(a), operand_tensor(b), 1, options, a.dtype, diagonal);
    }
}
