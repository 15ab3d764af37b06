/*
Cases of the CUDA backend's GEMM, for test_cuda_gemm.c without a GPU and gpu_test_cuda_gemm.c on
one: operands of all formats and forms, all layouts, tails, unaligned strides; each result is
compared with one in double precision.
*/
#pragma once

#include "check.h"
#include "llmc/cpu/cpu.h"
#include "llmc/cuda/gemm.h"
#include "llmc/cuda/gemm_workspace.h"

#define E4M3 FORMAT_E4M3
#define E5M2 FORMAT_E5M2
#define BF16 FORMAT_BF16
#define FP32 FORMAT_FP32

typedef enum { FPROP, DGRAD, WGRAD, BOTH_TRANSPOSED, NUM_LAYOUTS } LayoutKind;

static inline GemmOptions options_of(LayoutKind kind) {
    return (GemmOptions){.transpose_a = kind == WGRAD || kind == BOTH_TRANSPOSED,
                         .transpose_b = kind == FPROP || kind == BOTH_TRANSPOSED};
}

typedef struct {
    int64_t M, N, K;
    Format a, b, d;
    LayoutKind kind;
    bool accumulate, has_bias;
    int64_t padding; // of the rows of a, b and d where they are tensors
    QuantizedForm a_form, b_form;
    float a_factor, b_factor;     // of decoded operands; 0: they have none
    float a_prescale, b_prescale; // of quantized operands; 0: they have none
    Scaling scaling, b_scaling;   // of a and of b
    bool has_square_b;            // blocks that are as high as they are wide
    bool fast_sum;
} GemmCase;

// An operand with the values that gemm takes it for.
typedef struct {
    Operand operand;
    double *values; // (rows, cols)
} TestOperand;

static inline Tensor padded_tensor(Format dtype, int64_t rows, int64_t cols, int64_t padding) {
    Tensor random = random_tensor(dtype, rows, cols, 1);
    Tensor tensor = tensor_make(pool_take((size_t)(rows * (cols + padding)) * dtype_size(dtype)), dtype, rows, cols);
    tensor.stride += padding;
    cpu_convert(tensor, random);
    return tensor;
}

static inline int64_t swizzled_offset(const QuantizedTensor *q, int64_t row, int64_t col) {
    return q->axis == AXIS_ROWWISE ? mx_swizzled_scale_offset(row, col / MX_BLOCK, q->cols)
                                   : mx_swizzled_scale_offset(col, row / MX_BLOCK, q->rows);
}

static inline int64_t plain_offset(const QuantizedTensor *q, int64_t row, int64_t col) {
    return q->axis == AXIS_ROWWISE ? row * mx_num_blocks(q->cols) + col / MX_BLOCK : row / MX_BLOCK * q->cols + col;
}

// Writes q's plain scales, of MX, in the layout of block-scaled GEMMs.
static inline void swizzle_scales(uint8_t *swizzled, const QuantizedTensor *q) {
    memset(swizzled, 0, scaled_scale_bytes(SCALING_MX, FORM_SWIZZLED, q->axis, q->rows, q->cols));
    for (int64_t i = 0; i < q->rows * q->cols; i++) {
        int64_t row = i / q->cols, col = i % q->cols;
        swizzled[swizzled_offset(q, row, col)] = q->scales[plain_offset(q, row, col)];
    }
}

// Returns the same in another form.
static inline QuantizedTensor in_form(QuantizedTensor q, QuantizedForm form) {
    QuantizedTensor result = q;
    result.form = form;
    if (form == FORM_SWIZZLED) {
        result.scales = pool_take(scaled_scale_bytes(SCALING_MX, form, q.axis, q.rows, q.cols));
        swizzle_scales(result.scales, &q);
    }
    if (form == FORM_DECODED) {
        result.elements = pool_take((size_t)(q.rows * q.cols) * 2);
        result.scales = NULL;
        cpu_dequantize(tensor_make(result.elements, BF16, q.rows, q.cols), &q, BF16);
    }
    if (form == FORM_TRANSPOSED) {
        result.elements = pool_take((size_t)(q.rows * q.cols));
        for (int64_t i = 0; i < q.rows * q.cols; i++) {
            result.elements[i % q.cols * q.rows + i / q.cols] = q.elements[i];
        }
    }
    return result;
}

static inline TestOperand make_test_operand(Format format, int64_t rows, int64_t cols, Axis axis, int64_t padding,
                                            bool as_fp32, QuantizedForm form) {
    if (!mx_is_mx(format)) {
        Tensor tensor = padded_tensor(format, rows, cols, padding);
        return (TestOperand){operand_tensor(tensor), tensor_doubles(tensor)};
    }
    QuantizedTensor q = {.elements = pool_take((size_t)(rows * cols)),
                         .scales = pool_take((size_t)mx_num_scales(axis, rows, cols)),
                         .format = format,
                         .axis = axis,
                         .rows = rows,
                         .cols = cols,
                         .form = FORM_PLAIN};
    cpu_quantize(axis == AXIS_ROWWISE ? &q : NULL, axis == AXIS_COLUMNWISE ? &q : NULL,
                 source_tensor(padded_tensor(FP32, rows, cols, 0)), SCALE_RCEIL);
    Tensor values = tensor_make(take_floats(rows * cols), FP32, rows, cols);
    cpu_dequantize(values, &q, as_fp32 ? FP32 : BF16);
    return (TestOperand){operand_quantized(in_form(q, form)), tensor_doubles(values)};
}

// Gives a decoded operand a factor, as those of scalings that aren't MX have.
static inline void set_factor(TestOperand *o, float factor) {
    QuantizedTensor *q = &o->operand.quantized;
    if (factor == 0 || !operand_is_quantized(o->operand)) return;
    q->scaling = SCALING_TENSOR;
    q->factor = take_floats(1);
    *q->factor = factor;
    for (int64_t i = 0; i < q->rows * q->cols; i++) {
        o->values[i] *= factor;
    }
}

// Gives a quantized operand a prescale.
static inline void set_prescale(TestOperand *o, float prescale) {
    QuantizedTensor *q = &o->operand.quantized;
    if (prescale == 0 || !operand_is_quantized(o->operand)) return;
    q->encoding.prescale = prescale;
    for (int64_t i = 0; i < q->rows * q->cols; i++) {
        o->values[i] /= prescale;
    }
}

// Makes an operand of a scaling that isn't MX.
static inline TestOperand make_scaled_operand(Scaling scaling, Format format, int64_t rows, int64_t cols, Axis axis,
                                              QuantizedForm wanted) {
    QuantizedForm form = wanted == FORM_TRANSPOSED ? FORM_PLAIN : wanted; // as the CPU makes it
    QuantizedTensor q =
        quantized_make(pool_take(scaled_bytes(scaling, form, axis, rows, cols)), format, axis, rows, cols, form);
    bool is_columnwise = axis == AXIS_COLUMNWISE;
    q.scaling = scaling;
    if (scaling_has_factor(scaling)) q.factor = take_floats(1);
    cpu_quantize(is_columnwise ? NULL : &q, is_columnwise ? &q : NULL,
                 source_tensor(padded_tensor(FP32, rows, cols, 0)), SCALE_RCEIL);
    Tensor elements = tensor_make(take_floats(rows * cols), FP32, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++) {
        float element =
            form == FORM_PLAIN ? mx_decode(format, q.elements[i]) : mx_from_bf16(((const uint16_t *)q.elements)[i]);
        tensor_set(elements, i / cols, i % cols, element);
    }
    TestOperand result = {operand_quantized(form == wanted ? q : in_form(q, wanted)), tensor_doubles(elements)};
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t block = scaling_block_at(scaling, axis, i / cols, i % cols, cols);
        if (form == FORM_PLAIN) result.values[i] *= scaling_kept_value(scaling, q.scales, block);
        if (q.factor) result.values[i] *= *q.factor;
    }
    return result;
}

// Multiplies operands that are on the host into d, which holds what it is accumulated into.
typedef void (*Gemm)(Tensor d, Operand a, Operand b, GemmOptions options);

// Whether the device keeps 13 bits of the sums of native GEMMs, and not FP32's 24: what
// gemm_self_check.c says of capabilities other than 10.x.
static bool keeps_13_bits;

// Returns what the sum of K products loses where 13 bits are kept, by gemm_self_check.c's count.
static inline double lost_beyond_13_bits(const GemmCase *g, const double *products) {
    int64_t together = g->a == FORMAT_E2M1 ? 64 : 32;
    double sum = 0, start_of_block = 0, of_instruction = 0, lost = 0;
    for (int64_t k = 0; k < g->K; k++) {
        if (scaling_is_block128(g->scaling) && k % 128 == 0) start_of_block = sum;
        if (k % together == 0) of_instruction = fabs(sum - start_of_block);
        sum += products[k];
        of_instruction += fabs(products[k]);
        bool is_last = (k + 1) % together == 0 || k + 1 == g->K;
        if (is_last) lost += (double)(together + 1) * 0x1p-13 * of_instruction;
    }
    return lost;
}

static inline void check_case(const GemmCase *g, Gemm gemm, Check *check) {
    GemmOptions o = options_of(g->kind);
    bool as_fp32 = g->a == FP32 || g->b == FP32;
    int64_t a_rows = o.transpose_a ? g->K : g->M, a_cols = o.transpose_a ? g->M : g->K;
    int64_t b_rows = o.transpose_b ? g->N : g->K, b_cols = o.transpose_b ? g->K : g->N;
    Axis a_axis = o.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE;
    Axis b_axis = g->has_square_b ? AXIS_SQUARE : o.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE;
    TestOperand a, b;
    if (g->scaling == SCALING_MX) {
        a = make_test_operand(g->a, a_rows, a_cols, a_axis, g->padding, as_fp32, g->a_form);
        b = make_test_operand(g->b, b_rows, b_cols, b_axis, g->padding, as_fp32, g->b_form);
    } else {
        a = make_scaled_operand(g->scaling, g->a, a_rows, a_cols, a_axis, g->a_form);
        b = mx_is_mx(g->b) ? make_scaled_operand(g->b_scaling, g->b, b_rows, b_cols, b_axis, g->b_form)
                           : make_test_operand(g->b, b_rows, b_cols, b_axis, g->padding, as_fp32, FORM_PLAIN);
        o.fast_sum = g->fast_sum;
    }
    set_factor(&a, g->a_factor);
    set_factor(&b, g->b_factor);
    set_prescale(&a, g->a_prescale);
    set_prescale(&b, g->b_prescale);
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
    // Before a product is added to what is in a BF16 d, some of cuBLASLt's kernels round it: so
    // where it has no kernel with an epilogue for odd strides, and a bias is in d first. Where both
    // are added to the product, its sum with the first of them is rounded too (an H200, cuBLASLt
    // 13.1).
    bool is_odd = (g->M | g->N | g->K | g->padding) % 8 != 0;
    // alpha is rounded, as a product and over prescales, and what it multiplies.
    bool has_alpha = g->a_factor != 0 || g->b_factor != 0 || g->a_prescale != 0 || g->scaling != SCALING_MX;
    double additions = (double)g->K + (has_alpha ? 4 : 2);
    double product_unit = g->accumulate || (g->has_bias && is_odd) ? bias_unit : 0;
    const char *why;
    bool is_native = cuda_gemm_path(cuda_gemm_device(), d, a.operand, b.operand, o, &why) == GEMM_NATIVE;
    double *products = take_doubles(g->K);
    // Of large shapes every 16th row: the sums here are those of one thread.
    int64_t step = g->M * g->N * g->K > 1 << 24 ? 16 : 1;
    for (int64_t m = 0; m < g->M; m += step) {
        for (int64_t n = 0; n < g->N; n++) {
            double start = g->accumulate ? tensor_get(before, m, n) : 0, added = g->has_bias ? bias[n] : 0;
            double sum = start + added, magnitude = fabs(start) + fabs(added);
            for (int64_t k = 0; k < g->K; k++) {
                products[k] = a.values[o.transpose_a ? k * g->M + m : m * g->K + k] *
                              b.values[o.transpose_b ? n * g->K + k : k * g->N + n];
                sum += products[k];
                magnitude += fabs(products[k]);
            }
            double bound = additions * 0x1p-23 * magnitude + bias_unit * fabs(added);
            if (is_native && keeps_13_bits) bound += lost_beyond_13_bits(g, products);
            bound += product_unit * (fabs(sum - start - added) + bound);
            if (g->accumulate && g->has_bias) {
                bound += product_unit * (fmax(fabs(sum - start), fabs(sum - added)) + bound);
            }
            check_value(check, tensor_get(d, m, n), sum, bound + u_of(g->d) * (fabs(sum) + bound));
        }
    }
    pool_release();
}

// Checks every pair of formats in every layout of a shape; destination, accumulation, bias, padding
// of rows (none, 8 or `padding`) and forms take turns.
static inline void check_padded(int64_t M, int64_t N, int64_t K, int64_t padding, const Format *formats, int count,
                                Gemm gemm) {
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
                      .padding = (int64_t[]){0, padding, 8}[i / 2 % 3],
                      .a_form = (QuantizedForm)(i / NUM_LAYOUTS % 3),
                      .b_form = (QuantizedForm)(i / 7 % 3)};
        check_case(&g, gemm, &check);
    }
    check_end(&check, "M %lld N %lld K %lld, %d cases", (long long)M, (long long)N, (long long)K, cases);
}

static const Format ALL[] = {FP32, BF16, MX_FORMATS(MX_FORMAT_VALUE, )}; // FP8 before the others

static inline void check_formats(int64_t M, int64_t N, int64_t K, const Format *formats, int count, Gemm gemm) {
    check_padded(M, N, K, 3, formats, count, gemm);
}

// Every row begins at a multiple of 16 bytes: native where formats and layout allow it.
static inline void check_even(Gemm gemm) {
    check_padded(64, 48, 96, 16, ALL, NUM_FORMATS, gemm);
    check_padded(80, 144, 160, 16, ALL, 4, gemm);
}

static inline void check_odd(Gemm gemm) {
    check_formats(64, 48, 96, ALL, NUM_FORMATS, gemm);
    check_formats(1, 1, 1, ALL, NUM_FORMATS, gemm);
    check_formats(33, 65, 31, ALL, NUM_FORMATS, gemm);
    check_formats(7, 48, 100, ALL, NUM_FORMATS, gemm);
    check_formats(1, 257, 33, ALL, 4, gemm);
    check_formats(33, 1, 96, ALL, 4, gemm);
}

// Checks operands with factors, both or one beside a tensor, in every layout; destination,
// accumulation, bias and padding take turns.
static inline void check_factors(Gemm gemm) {
    static const int64_t SIZES[][3] = {{64, 48, 96}, {33, 65, 31}, {1, 1, 1}, {80, 144, 160}};
    static const Format PAIRS[][2] = {{E5M2, E4M3}, {FORMAT_E2M1, BF16}, {FP32, E4M3}};
    Check check = {0};
    int count = COUNT(SIZES) * COUNT(PAIRS) * NUM_LAYOUTS * 4;
    for (int i = 0; i < count; i++) {
        const int64_t *size = SIZES[i / NUM_LAYOUTS / 4 % COUNT(SIZES)];
        const Format *pair = PAIRS[i % COUNT(PAIRS)];
        GemmCase g = {.M = size[0],
                      .N = size[1],
                      .K = size[2],
                      .a = pair[0],
                      .b = pair[1],
                      .d = i / 2 % 2 ? FP32 : BF16,
                      .kind = (LayoutKind)(i / 4 % NUM_LAYOUTS),
                      .accumulate = i % 2,
                      .has_bias = i % 5 < 3,
                      .padding = i % 7 == 0 ? 3 : 0,
                      .a_form = FORM_DECODED,
                      .b_form = FORM_DECODED,
                      .a_factor = 0.37f,
                      .b_factor = -1e-3f};
        check_case(&g, gemm, &check);
    }
    check_end(&check, "operands with factors, %d cases", count);
}

// Checks operands with prescales, some also with factors, some as codes, as check_factors does.
static inline void check_prescales(Gemm gemm) {
    static const int64_t SIZES[][3] = {{64, 48, 96}, {33, 65, 31}, {1, 1, 1}, {80, 144, 160}};
    static const Format PAIRS[][2] = {{E4M3, E4M3}, {FORMAT_E2M1, FORMAT_E2M1}, {FORMAT_E2M1, BF16}};
    Check check = {0};
    int count = COUNT(SIZES) * COUNT(PAIRS) * NUM_LAYOUTS * 4;
    for (int i = 0; i < count; i++) {
        const int64_t *size = SIZES[i / NUM_LAYOUTS / 4 % COUNT(SIZES)];
        const Format *pair = PAIRS[i % COUNT(PAIRS)];
        bool has_factors = i / 8 % 2;
        GemmCase g = {.M = size[0],
                      .N = size[1],
                      .K = size[2],
                      .a = pair[0],
                      .b = pair[1],
                      .d = i / 2 % 2 ? FP32 : BF16,
                      .kind = (LayoutKind)(i / 4 % NUM_LAYOUTS),
                      .accumulate = i % 2,
                      .has_bias = i % 5 < 3,
                      .padding = i % 7 == 0 ? 3 : 0,
                      .a_form = has_factors ? FORM_DECODED : FORM_PLAIN,
                      .b_form = has_factors || i % 4 == 0 ? FORM_DECODED : FORM_PLAIN,
                      .a_factor = has_factors ? 0.37f : 0,
                      .b_factor = has_factors ? -1e-3f : 0,
                      .a_prescale = 0.75f,
                      .b_prescale = i % 4 ? 0.75f : 1.3f};
        check_case(&g, gemm, &check);
    }
    check_end(&check, "operands with prescales, %d cases", count);
}

// Returns the i-th case of FP8 operands of a scaling, as codes: sixteen are every pair of formats
// in every layout; destination, accumulation, bias and fast sums take turns.
static inline GemmCase fp8_case(int i, const int64_t size[3], Scaling scaling) {
    return (GemmCase){.M = size[0],
                      .N = size[1],
                      .K = size[2],
                      .a = i % 2 ? E5M2 : E4M3,
                      .b = i / 2 % 2 ? E5M2 : E4M3,
                      .d = i / 3 % 2 ? FP32 : BF16,
                      .kind = (LayoutKind)(i / 4 % NUM_LAYOUTS),
                      .accumulate = i % 3 == 1,
                      .has_bias = i % 3 == 2,
                      .scaling = scaling,
                      .b_scaling = scaling,
                      .fast_sum = i / 5 % 2};
}

// Returns the form of the i-th columnwise operand, `along` K: now and then that which the device
// wants of it, but decoded where scales aren't exact in BF16.
static inline QuantizedForm form_in_turn(int i, Scaling scaling, bool is_columnwise) {
    QuantizedForm wanted = cuda_quantized_form(scaling, AXIS_COLUMNWISE, true);
    bool has_no_values = scaling == SCALING_BLOCK128_FP32 && wanted == FORM_DECODED;
    return is_columnwise && i / 3 % 2 && !has_no_values ? wanted : FORM_PLAIN;
}

// Checks FP8 operands with one scale each; shapes and forms take turns.
static inline void check_one_scale(Gemm gemm) {
    static const int64_t SIZES[][3] = {{64, 48, 96}, {80, 144, 48}, {33, 65, 31}};
    Check check = {0};
    int count = COUNT(SIZES) * 4 * NUM_LAYOUTS * 5;
    for (int i = 0; i < count; i++) {
        GemmCase g = fp8_case(i, SIZES[i / NUM_LAYOUTS / 4 % COUNT(SIZES)], SCALING_TENSOR);
        GemmOptions o = options_of(g.kind);
        g.a_form = i % 7 == 6 ? FORM_DECODED : form_in_turn(i, g.scaling, o.transpose_a);
        g.b_form = form_in_turn(i, g.scaling, !o.transpose_b);
        check_case(&g, gemm, &check);
    }
    check_end(&check, "operands with one scale, %d cases", count);
}

// Checks NVFP4 operands in every layout, as codes and decoded, b with blocks of either shape, most
// of them four over six, with and without prescales; shapes that native GEMMs take, tiles of scales
// that are full and that aren't, and shapes that they don't take.
static inline void check_nvfp4(Gemm gemm) {
    static const int64_t SIZES[][3] = {{64, 48, 96},   {80, 144, 160}, {144, 32, 64},
                                       {16, 128, 128}, {64, 48, 48},   {33, 65, 31}};
    Check check = {0};
    int count = COUNT(SIZES) * NUM_LAYOUTS * 12;
    for (int i = 0; i < count; i++) {
        const int64_t *size = SIZES[i / NUM_LAYOUTS / 12];
        GemmCase g = {.M = size[0],
                      .N = size[1],
                      .K = size[2],
                      .a = FORMAT_E2M1,
                      .b = FORMAT_E2M1,
                      .d = i / 4 % 2 ? FP32 : BF16,
                      .kind = (LayoutKind)(i % NUM_LAYOUTS),
                      .accumulate = i / 4 % 3 == 1,
                      .has_bias = i / 4 % 3 == 2,
                      .a_form = i / 4 % 12 == 11 ? FORM_DECODED : FORM_PLAIN,
                      .scaling = SCALING_NVFP4,
                      .b_scaling = i / 4 % 5 ? SCALING_NVFP4_46 : SCALING_NVFP4,
                      .has_square_b = i / 8 % 2,
                      .a_prescale = i / 16 % 2 ? 0.75f : 0,
                      .b_prescale = i / 16 % 3 ? 0 : 1.25f};
        check_case(&g, gemm, &check);
    }
    check_end(&check, "NVFP4 operands, %d cases", count);
}

// Checks FP8 operands by blocks of 128, a weight's blocks square; shapes, whose blocks are short
// and none, take turns.
static inline void check_blocks_of_128(Scaling scaling, Gemm gemm) {
    static const int64_t SIZES[][3] = {{64, 48, 96}, {80, 144, 48}, {144, 272, 400}, {16, 128, 640}, {33, 65, 31}};
    Check check = {0};
    int count = COUNT(SIZES) * 4 * NUM_LAYOUTS * 2;
    for (int i = 0; i < count; i++) {
        GemmCase g = fp8_case(i, SIZES[i / NUM_LAYOUTS / 4 % COUNT(SIZES)], scaling);
        GemmOptions o = options_of(g.kind);
        g.has_square_b = i / 7 % 4 && g.kind != WGRAD;
        g.a_form = form_in_turn(i, scaling, o.transpose_a);
        g.b_form = form_in_turn(i, scaling, !o.transpose_b && !g.has_square_b);
        check_case(&g, gemm, &check);
    }
    check_end(&check, "blocks of 128, %d cases", count);
}

// Checks operands of blocks with FP32 scales beside ones of other kinds.
static inline void check_beside_fp32_scales(Gemm gemm) {
    static const struct {
        Format format;
        Scaling scaling;
        QuantizedForm form;
    } OTHERS[] = {{BF16, SCALING_MX, FORM_PLAIN},           {FP32, SCALING_MX, FORM_PLAIN},
                  {E4M3, SCALING_TENSOR, FORM_PLAIN},       {E5M2, SCALING_TENSOR, FORM_DECODED},
                  {FORMAT_E2M1, SCALING_NVFP4, FORM_PLAIN}, {E4M3, SCALING_BLOCK128, FORM_PLAIN}};
    static const int64_t SIZES[][3] = {{144, 48, 272}, {33, 65, 300}};
    Check check = {0};
    int count = COUNT(SIZES) * COUNT(OTHERS) * NUM_LAYOUTS;
    for (int i = 0; i < count; i++) {
        int other = i / NUM_LAYOUTS % COUNT(OTHERS);
        const int64_t *size = SIZES[i / NUM_LAYOUTS / COUNT(OTHERS)];
        GemmCase g = {.M = size[0],
                      .N = size[1],
                      .K = size[2],
                      .a = E4M3,
                      .b = OTHERS[other].format,
                      .d = i % 3 ? FP32 : BF16,
                      .kind = (LayoutKind)(i % NUM_LAYOUTS),
                      .accumulate = i % 5 < 2,
                      .has_bias = i % 7 < 3,
                      .scaling = SCALING_BLOCK128_FP32,
                      .b_scaling = OTHERS[other].scaling,
                      .b_form = OTHERS[other].form};
        if (OTHERS[other].scaling == SCALING_NVFP4) g.b_prescale = 0.75f;
        check_case(&g, gemm, &check);
    }
    check_end(&check, "beside blocks with FP32 scales, %d cases", count);
}

// Checks a product that is summed by block in more than one part of its rows (256 and 16 of them)
// and of K (128 and 16).
static inline void check_rows_by_block(Gemm gemm) {
    Check check = {0};
    for (int i = 0; i < 2; i++) {
        GemmCase g = {.M = 272,
                      .N = 32768,
                      .K = 144,
                      .a = E4M3,
                      .b = E4M3,
                      .d = i ? FP32 : BF16,
                      .kind = i ? WGRAD : FPROP,
                      .accumulate = i,
                      .scaling = SCALING_BLOCK128_FP32,
                      .b_scaling = SCALING_BLOCK128_FP32,
                      .has_square_b = !i};
        assert_int_equal(cuda_gemm_rows_by_block(g.N), 256);
        check_case(&g, gemm, &check);
    }
    check_end(&check, "sums by block of many columns, 2 cases");
}
