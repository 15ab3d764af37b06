/*
GEMM: cuBLASLt multiplies. On Blackwell it takes MXFP8 operands as they are and NVFP4 ones packed,
from Ada on FP8 ones with one scale per tensor, on Hopper those by blocks of 128; elsewhere, and
where it can't take a shape, they are decoded to BF16 first, which gives the same addends
(dev/DESIGN.md).
Blocks with FP32 scales aren't exact in BF16: their elements are decoded alone, and the product of
each 128 along K is multiplied by both scales before it is added to the sum.
*/
#include "gemm.h"
#include "gemm_values.h"
#include "gemm_workspace.h"

#include <stdio.h>

static GemmDevice this_device;
static GemmCounts counts;

void cuda_gemm_use_device(GemmDevice device) {
    this_device = device;
    counts = (GemmCounts){0};
    cuda_gemm_forget_calls();
}

GemmDevice cuda_gemm_device(void) { return this_device; }

GemmCounts cuda_gemm_counts(void) { return counts; }

QuantizedForm cuda_quantized_form(Scaling scaling, Axis axis, bool for_one_gemm) {
    return cuda_gemm_quantized_form(this_device, scaling, axis, for_one_gemm);
}

bool cuda_gemm_decodes(Tensor d, Operand a, Operand b, GemmOptions options) {
    return cuda_gemm_path_decodes(this_device, d, a, b, options);
}

const char *cuda_gemm_refuses(Tensor d, Operand a, Operand b, GemmOptions options) {
    return cuda_gemm_path_refuses(this_device, d, a, b, options);
}

// What operands and bias are turned into. For a native GEMM they are placed first, so that cuBLASLt
// can decline the call before anything is made for it.

static GemmScales scales_of(const QuantizedTensor *q) {
    if (q->scaling == SCALING_MX) return SCALES_OF_MX;
    if (q->scaling == SCALING_TENSOR) return SCALES_OF_TENSOR;
    return q->axis == AXIS_SQUARE ? SCALES_OF_SQUARES : SCALES_OF_BLOCKS;
}

// Returns what place_native does for an NVFP4 operand, whose codes and scales are in scratch.
static GemmMatrix place_nvfp4(const QuantizedTensor *q, Axis along, OperandScratch scratch) {
    bool rowwise = along == AXIS_ROWWISE;
    int64_t K = rowwise ? q->cols : q->rows;
    return (GemmMatrix){.data = scratch.codes,
                        .scales = scratch.scales,
                        .scales_of = SCALES_OF_NVFP4,
                        .factor = q->factor,
                        .prescale = q->encoding.prescale,
                        .type = CUDA_E2M1_TYPE,
                        .rows = rowwise ? q->rows : q->cols,
                        .cols = K,
                        .stride = K};
}

// Returns the matrix that a native GEMM is given once make_native has made it. `along`: whether dot
// products run along the operand's rows or columns. rows_along_k: as cuda_gemm_wants_rows_along_k.
static GemmMatrix place_native(const QuantizedTensor *q, Axis along, bool rows_along_k, OperandScratch scratch) {
    if (scaling_is_nvfp4(q->scaling)) return place_nvfp4(q, along, scratch);
    GemmMatrix matrix = {.data = q->elements,
                         .scales = q->scaling == SCALING_TENSOR ? (const void *)q->factor
                                   : q->form == FORM_SWIZZLED   ? q->scales
                                                                : scratch.scales,
                         .scales_of = scales_of(q),
                         .type = q->format == FORMAT_E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3,
                         .rows = q->rows,
                         .cols = q->cols,
                         .stride = q->cols};
    bool is_transposed = along == AXIS_COLUMNWISE && rows_along_k;
    if (q->form == FORM_TRANSPOSED && !is_transposed)
        die("internal error: a GEMM was given codes along the wrong axis");
    if (!is_transposed) return matrix;
    if (q->form != FORM_TRANSPOSED) matrix.data = scratch.codes;
    matrix.rows = q->cols;
    matrix.cols = matrix.stride = q->rows;
    return matrix;
}

// Puts the operand's scales where cuBLASLt wants them and transposes or packs its codes, where it
// was placed so.
static void make_native(GemmMatrix matrix, const QuantizedTensor *q, Axis along) {
    uint8_t *codes = (uint8_t *)matrix.data, *scales = (uint8_t *)matrix.scales;
    bool is_nvfp4 = scaling_is_nvfp4(q->scaling), is_plain_mx = q->scaling == SCALING_MX && q->form != FORM_SWIZZLED;
    if (is_nvfp4 || is_plain_mx) cuda_swizzle_scales(scales, q, along);
    if (scaling_is_block128(q->scaling)) cuda_arrange_scales((float *)scales, q, along);
    if (is_nvfp4) {
        cuda_pack_codes(codes, q, along);
    } else if (codes != q->elements) {
        cuda_transpose_codes(codes, q->elements, q->rows, q->cols);
    }
}

static GemmMatrix matrix_of(Tensor tensor) {
    return (GemmMatrix){.data = tensor.data,
                        .type = tensor.dtype == FORMAT_FP32 ? CUDA_R_32F : CUDA_R_16BF,
                        .rows = tensor.rows,
                        .cols = tensor.cols,
                        .stride = tensor.stride};
}

// Returns the operand's values, but for its factor, as a matrix of `dtype`: where they lie, or
// decoded into `scratch`.
static GemmMatrix decode_values(Operand operand, Format dtype, OperandScratch scratch) {
    Operand stored = operand_as_stored(operand);
    if (!cuda_gemm_needs_decoding(operand, dtype)) return matrix_of(stored.tensor);
    Tensor values = tensor_make(scratch.values, dtype, operand_rows(operand), operand_cols(operand));
    values.stride = cuda_gemm_decoded_stride(operand);
    if (operand_is_quantized(stored)) {
        cuda_dequantize(values, &stored.quantized, dtype);
    } else {
        cuda_convert(values, stored.tensor);
    }
    return matrix_of(values);
}

static GemmMatrix decode(Operand operand, Format dtype, OperandScratch scratch) {
    GemmMatrix matrix = decode_values(operand_without_block_scales(operand), dtype, scratch);
    if (!operand_has_factor(operand)) return matrix;
    matrix.factor = operand.quantized.factor;
    matrix.prescale = operand.quantized.encoding.prescale;
    return matrix;
}

// Returns the bias as it is added to d: itself, or in `scratch`, where make_bias rounds it to BF16.
// cuBLASLt adds a bias of d's dtype (CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE in cublasLt.h lists the
// exceptions; none helps). An FP32 one is added to a BF16 result as BF16, before the one rounding
// of the sum.
static GemmBias place_bias(const float *bias, Tensor d, void *scratch) {
    return !bias || d.dtype == FORMAT_FP32 ? (GemmBias){bias, CUDA_R_32F} : (GemmBias){scratch, CUDA_R_16BF};
}

static void make_bias(GemmBias placed, const float *bias, Tensor d) {
    if (placed.data == bias) return;
    cuda_convert(tensor_make((void *)placed.data, FORMAT_BF16, 1, d.cols),
                 tensor_make((void *)bias, FORMAT_FP32, 1, d.cols));
}

// Paths

// Multiplies quantized operands as they are.
static const char *run_native(Tensor d, const QuantizedTensor *a, const QuantizedTensor *b, GemmOptions options,
                              const GemmWorkspace *w) {
    // Place what will be multiplied.
    bool rows_along_k = cuda_gemm_wants_rows_along_k(this_device.capability, a->scaling);
    Axis a_along = options.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE;
    Axis b_along = options.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE;
    GemmMatrix native_a = place_native(a, a_along, rows_along_k, w->a);
    GemmMatrix native_b = place_native(b, b_along, rows_along_k, w->b);
    GemmBias bias = place_bias(options.bias, d, w->bias);
    if (rows_along_k) options.transpose_a = false, options.transpose_b = true;
    // Ask before anything is made for it.
    const char *declined = cuda_gemm_declined(d, native_a, native_b, bias, options);
    if (declined) return declined;
    // Make it, and multiply.
    make_native(native_a, a, a_along);
    make_native(native_b, b, b_along);
    make_bias(bias, options.bias, d);
    return cuda_gemm_multiply(d, native_a, native_b, bias, options, w->library);
}

// Returns whether a product is made as FP32 and then rounded: cuBLASLt gives FP32 operands an FP32
// result only.
static bool widens(Tensor d, Operand a, Operand b) {
    return operands_value_dtype(a, b) == FORMAT_FP32 && d.dtype != FORMAT_FP32;
}

static GemmWorkspace place(void *memory, Tensor d, Operand a, Operand b) {
    return cuda_gemm_place(memory, a, b, d.rows * d.cols, widens(d, a, b));
}

// Multiplies operands as values of one dtype.
static void run_decoded(Tensor d, Operand a, Operand b, GemmOptions options, const GemmWorkspace *w) {
    Format dtype = operands_value_dtype(a, b);
    GemmMatrix decoded_a = decode(a, dtype, w->a), decoded_b = decode(b, dtype, w->b);
    Tensor result = d;
    bool is_wide = widens(d, a, b);
    if (is_wide) result = tensor_make(w->wide_result, FORMAT_FP32, d.rows, d.cols);
    if (is_wide && options.accumulate) cuda_convert(result, d);
    GemmBias bias = place_bias(options.bias, result, w->bias);
    make_bias(bias, options.bias, result);
    cuda_gemm_multiply_values(result, decoded_a, decoded_b, bias, options, w->library);
    if (is_wide) cuda_convert(d, result);
}

// Returns `rows` x `cols` of a matrix of values, from (row, col) on.
static GemmMatrix part_of(GemmMatrix m, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    size_t size = m.type == CUDA_R_32F ? sizeof(float) : sizeof(uint16_t);
    m.data = (const char *)m.data + (size_t)(row * m.stride + col) * size;
    m.rows = rows;
    m.cols = cols;
    return m;
}

// Adds what a GEMM adds to a product besides: d as it was, and the bias. `sum` is changed.
static void finish_sum(Tensor d, Tensor sum, GemmOptions options) {
    if (options.bias) {
        Tensor bias = tensor_make((void *)options.bias, FORMAT_FP32, sum.rows, sum.cols);
        bias.stride = 0;
        cuda_combine(sum, 1, sum, 1, bias);
    }
    if (options.accumulate) {
        cuda_combine(d, 1, sum, 1, d);
    } else {
        cuda_convert(d, sum);
    }
}

// Multiplies operands of which one has scales that aren't exact in BF16: their elements, by blocks
// of 128 along K and some rows of d at a time; each block's product, times its scales, is added in
// FP32, as Hopper does.
static void run_by_block(Tensor d, Operand a, Operand b, GemmOptions options, const GemmWorkspace *w) {
    Format dtype = operands_value_dtype(a, b);
    GemmMatrix of_a = decode(a, dtype, w->a), of_b = decode(b, dtype, w->b);
    GemmOptions transposed = {.transpose_a = options.transpose_a, .transpose_b = options.transpose_b};
    int64_t K = cuda_gemm_shape(a, b, options).K, length = scaling_block(SCALING_BLOCK128_FP32);
    int64_t at_a_time = cuda_gemm_rows_by_block(d.cols);
    for (int64_t row = 0; row < d.rows; row += at_a_time) {
        int64_t rows = min_int64(d.rows - row, at_a_time);
        Tensor sum = tensor_make(w->sum, FORMAT_FP32, rows, d.cols);
        Tensor product = tensor_make(w->product, FORMAT_FP32, rows, d.cols);
        cuda_zero(sum.data, (size_t)(rows * d.cols) * sizeof(float));
        for (int64_t k = 0; k < K; k += length) {
            int64_t depth = min_int64(K - k, length);
            GemmMatrix part_a =
                options.transpose_a ? part_of(of_a, k, depth, row, rows) : part_of(of_a, row, rows, k, depth);
            GemmMatrix part_b =
                options.transpose_b ? part_of(of_b, 0, d.cols, k, depth) : part_of(of_b, k, depth, 0, d.cols);
            GemmBias none = {.type = CUDA_R_32F};
            cuda_gemm_multiply_values(product, part_a, part_b, none, transposed, w->library);
            cuda_add_block_product(sum, product, a, b, options, row, k);
        }
        finish_sum(tensor_rows(d, row, rows), sum, options);
    }
}

const char *cuda_gemm_run(GemmPath path, Tensor d, Operand a, Operand b, GemmOptions options, void *workspace) {
    GemmWorkspace w = place(workspace, d, a, b);
    if (path == GEMM_NATIVE) return run_native(d, &a.quantized, &b.quantized, options, &w);
    if (operands_are_summed_by_block(a, b)) {
        run_by_block(d, a, b, options, &w);
    } else {
        run_decoded(d, a, b, options, &w);
    }
    return NULL;
}

static GemmShape check_shape(Tensor d, Operand a, Operand b, GemmOptions options) {
    GemmShape s = cuda_gemm_shape(a, b, options);
    int64_t K_of_b = options.transpose_b ? operand_cols(b) : operand_rows(b);
    if (s.K != K_of_b || d.rows != s.M || d.cols != s.N) {
        die("internal error: gemm shapes don't agree: d %ldx%ld, M %ld, N %ld, K %ld and %ld", d.rows, d.cols, s.M, s.N,
            s.K, K_of_b);
    }
    if (!gemm_blocks_run_along_k(a, b, options)) {
        die("internal error: gemm was given a quantized operand whose blocks don't run along K");
    }
    return s;
}

// Ends the program over a GEMM that was to be native.
static void die_refused(GemmShape s, const char *why) {
    die("a GEMM of M %ld, N %ld, K %ld can't be multiplied natively: %s (--mx-gemm auto emulates it)", s.M, s.N, s.K,
        why);
}

// Counts two quantized operands that are not multiplied natively, where the device could or should,
// and says so, once for each reason. `why` is one of few constants.
static void note_emulated(GemmShape s, Scaling scaling, const char *why) {
    enum { REASONS = 16 };
    static const char *said[REASONS];
    const char *unused;
    if (this_device.policy == MX_GEMM_EMULATED ||
        !cuda_gemm_has_native(this_device.capability, this_device.cublaslt, scaling, &unused)) {
        return;
    }
    counts.emulated++;
    for (int i = 0; i < REASONS && said[i] != why; i++) {
        if (said[i]) continue;
        said[i] = why;
        fprintf(stderr, "%s GEMM of M %ld, N %ld, K %ld, and others like it, emulated in BF16: %s\n",
                scaling == SCALING_MX       ? "MXFP8"
                : scaling_is_nvfp4(scaling) ? "NVFP4"
                                            : "FP8",
                s.M, s.N, s.K, why);
        return;
    }
}

// Says once that GEMMs are summed by block, for which no card has an instruction.
static void note_summed_by_block(void) {
    static bool said;
    if (!said) {
        fprintf(stderr,
                "blocks with FP32 scales are emulated by a GEMM for each 128 of K, which takes several times as "
                "long as powers of two (--recipe fp8-blockwise)\n");
    }
    said = true;
}

void cuda_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    GemmShape s = check_shape(d, a, b, options);
    if (s.M == 0 || s.N == 0) return;
    void *workspace = cuda_workspace(place(NULL, d, a, b).bytes);
    const char *refused = cuda_gemm_path_refuses(this_device, d, a, b, options), *why;
    if (refused) die_refused(s, refused);
    GemmPath path = cuda_gemm_path(this_device, d, a, b, options, &why);
    if (why) note_emulated(s, a.quantized.scaling, why);
    const char *declined = cuda_gemm_run(path, d, a, b, options, workspace);
    bool is_native = path == GEMM_NATIVE && !declined;
    if (!is_native && operands_are_summed_by_block(a, b)) note_summed_by_block();
    if (!declined) {
        counts.native += is_native;
        return;
    }
    if (this_device.policy == MX_GEMM_NATIVE) die_refused(s, declined);
    note_emulated(s, a.quantized.scaling, declined);
    cuda_gemm_run(GEMM_EMULATED, d, a, b, options, workspace);
}
