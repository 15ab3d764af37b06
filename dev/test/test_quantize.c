/*
The CPU's quantizer byte for byte against a plain loop over llmc/numerics/mx.h (which test_mx
compares with independent converters): elements and scales, both axes and square blocks, every
format and scale rounding, from FP32 and BF16, with tails, strides and the values that quantizers
get wrong. Then its inverse, and its statistics against counts made here.
*/
#include <float.h>
#include <omp.h>
#include "check.h"
#include "llmc/cpu/cpu.h"
#include "mx_reference.h"

#define FOR_EACH_MX_FORMAT(format) for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++)
#define FOR_EACH_ROUNDING(rounding) \
    for (ScaleRounding rounding = SCALE_RCEIL; rounding < NUM_SCALE_ROUNDINGS; rounding++)

static const int64_t SHAPES[][2] = {{1, 1},    {1, 31},   {7, 1},     {31, 1},    {32, 32},  {33, 65}, {33, 48},
                                    {64, 128}, {65, 129}, {100, 257}, {130, 300}, {3, 5000}, {300, 3}};
enum { NUM_SHAPES = sizeof(SHAPES) / sizeof(SHAPES[0]) };

static QuantizedTensor take_quantized(Format format, Axis axis, int64_t rows, int64_t cols) {
    void *memory = pool_take(scaled_bytes(SCALING_MX, FORM_PLAIN, axis, rows, cols));
    return quantized_make(memory, format, axis, rows, cols, FORM_PLAIN);
}

// The index of an element's scale.
static int64_t scale_index(Axis axis, int64_t cols, int64_t row, int64_t col) {
    int64_t blocks = (cols + 31) / 32;
    return axis == AXIS_ROWWISE      ? row * blocks + col / 32
           : axis == AXIS_COLUMNWISE ? row / 32 * cols + col
                                     : row / 32 * blocks + col / 32;
}

// Normal values of magnitudes that differ from block to block, with whole blocks (of either axis)
// of other kinds.
static Tensor quantizer_input(Format dtype, int64_t rows, int64_t cols) {
    Tensor t = random_tensor(dtype, rows, cols, 1);
    uint64_t stream = next_stream();
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            uint64_t block = (uint64_t)(r / 32 * 1000 + c / 32);
            double x = tensor_get(t, r, c);
            switch ((int)(random_uniform(2, stream, block) * 8)) {
            case 0:
                x = r % 3 ? 0 : -0.0;
                break;
            case 1:
                x *= 0x1p-135; // subnormal
                break;
            case 2:
                x = (float)(x * 0x1p125); // huge, some of it infinite
                break;
            case 3:
                x = r % 7 == 3 && c % 5 == 4 ? NAN : x;
                break;
            case 4:
                x = r % 7 == 2 && c % 5 == 2 ? -INFINITY : x * 0x1p-20;
                break;
            case 5:
                x = c % 2 ? x : x * 0x1p-12; // flushed beside the large ones
                break;
            default:
                x *= ldexp(1, (int)(block % 40) - 20);
                break;
            }
            tensor_set(t, r, c, x);
        }
    }
    return t;
}

// The definition: a block's amax, from it the scale, then each element's code.
static void reference_block(const QuantizedTensor *out, Tensor in, int64_t row, int64_t col, ScaleRounding rounding) {
    int64_t rows = out->axis == AXIS_ROWWISE ? 1 : in.rows - row < 32 ? in.rows - row : 32;
    int64_t cols = out->axis == AXIS_COLUMNWISE ? 1 : in.cols - col < 32 ? in.cols - col : 32;
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t bits = mx_float_bits((float)tensor_get(in, row + i / cols, col + i % cols)) & 0x7FFFFFFF;
        amax = bits > amax ? bits : amax;
    }
    uint8_t scale = mx_scale_code(out->format, rounding, amax);
    float reciprocal = ldexpf(1, 127 - scale);
    out->scales[scale_index(out->axis, in.cols, row, col)] = scale;
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t r = row + i / cols, c = col + i % cols;
        out->elements[r * in.cols + c] = mx_encode(out->format, (float)tensor_get(in, r, c) * reciprocal);
    }
}

static void reference_quantize(const QuantizedTensor *out, Tensor in, ScaleRounding rounding) {
    for (int64_t row = 0; row < in.rows; row += out->axis == AXIS_ROWWISE ? 1 : 32) {
        for (int64_t col = 0; col < in.cols; col += out->axis == AXIS_COLUMNWISE ? 1 : 32) {
            reference_block(out, in, row, col, rounding);
        }
    }
}

static void check_same_quantized(const QuantizedTensor *a, const QuantizedTensor *b) {
    assert_memory_equal(a->elements, b->elements, (size_t)(a->rows * a->cols));
    assert_memory_equal(a->scales, b->scales, (size_t)mx_num_scales(a->axis, a->rows, a->cols));
}

// Both copies at once, each alone, and with one thread.
static void check_quantize(Tensor in, Format rowwise_format, Format columnwise_format, ScaleRounding rounding) {
    QuantizedTensor expected[2], both[2], alone[2], single[2];
    for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
        Format format = axis == AXIS_ROWWISE ? rowwise_format : columnwise_format;
        expected[axis] = take_quantized(format, axis, in.rows, in.cols);
        both[axis] = take_quantized(format, axis, in.rows, in.cols);
        alone[axis] = take_quantized(format, axis, in.rows, in.cols);
        single[axis] = take_quantized(format, axis, in.rows, in.cols);
        reference_quantize(&expected[axis], in, rounding);
    }
    omp_set_num_threads(2);
    cpu_quantize(&both[AXIS_ROWWISE], &both[AXIS_COLUMNWISE], source_tensor(in), rounding);
    cpu_quantize(&alone[AXIS_ROWWISE], NULL, source_tensor(in), rounding);
    cpu_quantize(NULL, &alone[AXIS_COLUMNWISE], source_tensor(in), rounding);
    omp_set_num_threads(1);
    cpu_quantize(&single[AXIS_ROWWISE], &single[AXIS_COLUMNWISE], source_tensor(in), rounding);
    for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
        check_same_quantized(&both[axis], &expected[axis]);
        check_same_quantized(&alone[axis], &expected[axis]);
        check_same_quantized(&single[axis], &expected[axis]);
    }
}

// A matrix whose rows are blocks: each of 2048 amaxes (every exponent, mantissas at the roundings'
// thresholds) with every BF16 value of the 19 exponents from its own downwards, beyond which the
// widest format has only zero.
static Tensor every_bf16_block(void) {
    static const uint16_t mantissas[] = {0, 0x40, 0x41, 0x60, 0x61, 0x70, 0x71, 0x7F};
    enum { VALUES = 19 * 128, BLOCKS = (VALUES + 30) / 31 };
    int64_t count = 256 * 8 * BLOCKS;
    Tensor blocks = tensor_make(pool_take((size_t)count * 64), FORMAT_BF16, count, 32);
    uint16_t *at = blocks.data;
    for (int exponent = 0; exponent < 256; exponent++) {
        for (int m = 0; m < 8; m++) {
            int amax = exponent << 7 | mantissas[m];
            for (int value = 0; value < BLOCKS * 31; value++) {
                if (value % 31 == 0) *at++ = (uint16_t)amax;
                int magnitude = amax - value < 0 ? 0 : amax - value;
                *at++ = (uint16_t)(magnitude | (value & 1) << 15);
            }
        }
    }
    return blocks;
}

// Likewise in FP32: some exponents, amaxes and values of BF16 and the FP32 values next to them,
// which BF16 can't tell apart.
static Tensor fp32_blocks(void) {
    static const uint8_t exponents[] = {0, 1, 2, 9, 31, 32, 33, 39, 40, 41, 101, 127, 200, 246, 247, 253, 254, 255};
    static const uint8_t mantissas[] = {0, 0x40, 0x60, 0x70, 0x78, 0x7F};
    enum { VALUES = 19 * 128 * 3, BLOCKS = (VALUES + 30) / 31 };
    int64_t count = (int64_t)(sizeof(exponents) * sizeof(mantissas)) * 3 * BLOCKS;
    Tensor blocks = tensor_make(pool_take((size_t)count * 128), FORMAT_FP32, count, 32);
    uint32_t *at = blocks.data;
    for (size_t i = 0; i < sizeof(exponents) * sizeof(mantissas) * 3; i++) {
        uint32_t middle = (uint32_t)(exponents[i / 3 / sizeof(mantissas)] << 7 | mantissas[i / 3 % sizeof(mantissas)])
                          << 16;
        uint32_t amax = i % 3 == 0 && middle ? middle - 1 : middle + (i % 3 == 2);
        for (uint32_t value = 0; value < BLOCKS * 31; value++) {
            if (value % 31 == 0) *at++ = amax;
            uint32_t below = value / 3 << 16, bits = middle > below ? middle - below : 0;
            bits = value % 3 == 0 && bits ? bits - 1 : bits + (value % 3 == 2);
            *at++ = (bits < amax ? bits : amax) | (value & 1) << 31;
        }
    }
    return blocks;
}

static Tensor transposed(Tensor in) {
    size_t bytes = dtype_size(in.dtype);
    Tensor out = tensor_make(pool_take((size_t)(in.rows * in.cols) * bytes), in.dtype, in.cols, in.rows);
    for (int64_t i = 0; i < in.rows * in.cols; i++) {
        int64_t to = i % in.cols * in.rows + i / in.cols;
        memcpy((char *)out.data + (size_t)to * bytes, (const char *)in.data + (size_t)i * bytes, bytes);
    }
    return out;
}

// Compares blocks, each a row of `rows`, with the definition in either axis, format and rounding.
static void check_blocks(Tensor rows) {
    Tensor columns = transposed(rows);
    QuantizedTensor rowwise = take_quantized(FORMAT_E4M3, AXIS_ROWWISE, rows.rows, rows.cols), expected = rowwise;
    QuantizedTensor columnwise = take_quantized(FORMAT_E4M3, AXIS_COLUMNWISE, columns.rows, columns.cols);
    expected.elements = pool_take((size_t)(rows.rows * rows.cols));
    expected.scales = pool_take((size_t)rows.rows);
    FOR_EACH_MX_FORMAT(format) {
        FOR_EACH_ROUNDING(rounding) {
            rowwise.format = columnwise.format = expected.format = format;
            reference_quantize(&expected, rows, rounding);
            cpu_quantize(&rowwise, NULL, source_tensor(rows), rounding);
            check_same_quantized(&rowwise, &expected);
            cpu_quantize(NULL, &columnwise, source_tensor(columns), rounding);
            assert_memory_equal(columnwise.scales, expected.scales, (size_t)rows.rows);
            for (int64_t i = 0; i < rows.rows * rows.cols; i++) {
                if (columnwise.elements[i % 32 * rows.rows + i / 32] != expected.elements[i]) {
                    fail_msg("block %ld, element %ld", i / 32, i % 32);
                }
            }
        }
    }
    print_message("%ld blocks of %s, 5 formats x 4 roundings x 2 axes: the same bytes\n", rows.rows,
                  rows.dtype == FORMAT_FP32 ? "FP32" : "BF16");
}

static void test_every_bf16_value(void **state) {
    (void)state;
    check_blocks(every_bf16_block());
}

static void test_fp32_between_bf16_values(void **state) {
    (void)state;
    check_blocks(fp32_blocks());
}

// The one amax whose code under rceil is NVIDIA's, just over max * 2^-127, and its neighbours.
static void test_rceil_exception(void **state) {
    (void)state;
    for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++) {
        MxElement e = mx_element(format);
        float exception = nextafterf(ldexpf(mx_decode(format, (uint8_t)e.max_code), -127), 1);
        Tensor in = tensor_make(pool_take(96 * 128 * sizeof(float)), FORMAT_FP32, 96, 128);
        for (int i = 0; i < 96; i += 32) { // an ulp below, the amax itself, an ulp above
            tensor_set(in, i + 5, i + 7, mx_bits_float(mx_float_bits(exception) + (uint32_t)(i / 32) - 1));
        }
        check_quantize(in, format, format, SCALE_RCEIL);
        check_quantize(in, format, format, SCALE_CEIL);
        pool_release();
    }
}

static void test_quantize(void **state) {
    (void)state;
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            FOR_EACH_MX_FORMAT(format) FOR_EACH_ROUNDING(rounding) {
                Tensor in = quantizer_input(dtype, SHAPES[shape][0], SHAPES[shape][1]);
                Format other = format + 1 < NUM_FORMATS ? format + 1 : FIRST_MX_FORMAT;
                check_quantize(in, format, other, rounding);
                pool_release();
                cases++;
            }
        }
    }
    printf("    %d cases, each as both copies, one copy, one thread\n", cases);
}

// A copy of a megabyte is written past the caches.
static void test_quantize_large(void **state) {
    (void)state;
    check_quantize(quantizer_input(FORMAT_BF16, 1024, 1024), FORMAT_E4M3, FORMAT_E4M3, SCALE_RCEIL);
    check_quantize(quantizer_input(FORMAT_BF16, 1021, 1088), FORMAT_E4M3, FORMAT_E5M2, SCALE_FLOOR);
    pool_release();
}

// What a source makes, stored, and its two copies in either form, against `made` quantized as a
// tensor.
static void check_made(Source in, Tensor made, Format format, Format other, ScaleRounding rounding) {
    int64_t rows = made.rows, cols = made.cols;
    QuantizedTensor expected[2] = {take_quantized(format, AXIS_ROWWISE, rows, cols),
                                   take_quantized(other, AXIS_COLUMNWISE, rows, cols)};
    cpu_quantize(&expected[0], &expected[1], source_tensor(made), rounding);
    for (QuantizedForm form = FORM_PLAIN; form <= FORM_DECODED; form += FORM_DECODED - FORM_PLAIN) {
        QuantizedTensor copies[2];
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
            void *memory = pool_take(scaled_bytes(SCALING_MX, form, axis, rows, cols));
            copies[axis] = quantized_make(memory, expected[axis].format, axis, rows, cols, form);
        }
        cpu_quantize(&copies[0], &copies[1], in, rounding);
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
            if (form == FORM_PLAIN) {
                check_same_quantized(&copies[axis], &expected[axis]);
                continue;
            }
            Tensor values = take_tensor(FORMAT_BF16, rows, cols);
            values.stride = cols;
            cpu_dequantize(values, &expected[axis], FORMAT_BF16);
            assert_memory_equal(values.data, copies[axis].elements, (size_t)(rows * cols) * 2);
        }
    }
    if (in.kind == SOURCE_TENSOR) return;
    in.stored = take_tensor(made.dtype, rows, cols);
    cpu_quantize(NULL, NULL, in, rounding);
    check_same_tensor(in.stored, made);
}

typedef struct {
    Tensor x, dout; // (rows, cols)
    float *mean, *rstd, *weight, *bias;
} SourceInputs;

// Each source of these, and what it makes, stored by the operation itself. Returns how many there
// are.
enum { MAX_SOURCES = 1 + 8 + 2 * NUM_ACTIVATIONS - 1 }; // a tensor, norms, activations there and back
static int make_sources(Source sources[MAX_SOURCES], Tensor made[MAX_SOURCES], const SourceInputs *in) {
    int64_t rows = in->x.rows, cols = in->x.cols;
    Format dtype = in->x.dtype;
    const Tensor none = {0};
    int count = 0;
    made[count] = quantizer_input(dtype, rows, cols);
    sources[count++] = source_tensor(made[0]);
    for (int without = 0; without < 8; without++) {
        NormParams norm = {.kind = without & 1 ? NORM_RMSNORM : NORM_LAYERNORM,
                           .eps = NORM_EPS,
                           .mean = without & 1 ? NULL : in->mean,
                           .rstd = without & 1 ? take_floats(rows) : in->rstd,
                           .weight = without & 2 ? NULL : in->weight,
                           .bias = without & 4 ? NULL : in->bias};
        made[count] = take_tensor(dtype, rows, cols);
        cpu_layernorm_forward(made[count], none, in->x, none, norm);
        sources[count++] = (Source){.kind = SOURCE_LAYERNORM, .x = in->x, .norm = norm};
    }
    for (Activation activation = ACTIVATION_GELU; activation <= ACTIVATION_SWIGLU; activation++) {
        Tensor x = activation == ACTIVATION_SWIGLU ? random_tensor(dtype, rows, 2 * cols, 2) : in->x;
        made[count] = take_tensor(dtype, rows, cols);
        cpu_activation_forward(made[count], x, activation);
        sources[count++] = (Source){.kind = SOURCE_ACTIVATION, .x = x, .activation = activation};
        if (activation == ACTIVATION_SWIGLU) break;
        made[count] = take_tensor(dtype, rows, cols);
        cpu_activation_backward(made[count], NULL, in->dout, x, activation);
        sources[count++] =
            (Source){.kind = SOURCE_ACTIVATION_BACKWARD, .x = x, .activation = activation, .dout = in->dout};
    }
    return count;
}

static SourceInputs random_inputs(Format dtype, int64_t rows, int64_t cols) {
    SourceInputs in = {random_tensor(dtype, rows, cols, 2),
                       random_tensor(dtype, rows, cols, 1),
                       take_floats(rows),
                       take_floats(rows),
                       take_floats(cols),
                       take_floats(cols)};
    fill_floats(in.weight, cols, 1);
    fill_floats(in.bias, cols, 1);
    return in;
}

static void test_sources(void **state) {
    (void)state;
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            SourceInputs in = random_inputs(dtype, rows, cols);
            Source sources[MAX_SOURCES];
            Tensor made[MAX_SOURCES];
            int count = make_sources(sources, made, &in);
            for (int i = 0; i < count; i++) {
                FOR_EACH_MX_FORMAT(format) {
                    Format other = cases % 3 == 0 ? FORMAT_E4M3 : format;
                    check_made(sources[i], made[i], format, other, (ScaleRounding)(cases % NUM_SCALE_ROUNDINGS));
                    cases++;
                }
            }
            pool_release();
        }
    }
    printf("    %d cases\n", cases);
}

static void check_decoded_form(const QuantizedTensor *plain, Source in, ScaleRounding rounding) {
    size_t bytes = scaled_bytes(SCALING_MX, FORM_DECODED, plain->axis, plain->rows, plain->cols);
    QuantizedTensor decoded =
        quantized_make(pool_take(bytes), plain->format, plain->axis, plain->rows, plain->cols, FORM_DECODED);
    Tensor values = take_tensor(FORMAT_BF16, plain->rows, plain->cols);
    values.stride = plain->cols;
    cpu_quantize(&decoded, NULL, in, rounding);
    cpu_dequantize(values, plain, FORMAT_BF16);
    assert_memory_equal(values.data, decoded.elements, (size_t)(plain->rows * plain->cols) * 2);
}

// One scale for 32 x 32 elements, or for what there is of them at the edges.
static void test_square(void **state) {
    (void)state;
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            FOR_EACH_MX_FORMAT(format) FOR_EACH_ROUNDING(rounding) {
                int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
                Tensor in = quantizer_input(dtype, rows, cols);
                QuantizedTensor expected = take_quantized(format, AXIS_SQUARE, rows, cols);
                QuantizedTensor two = take_quantized(format, AXIS_SQUARE, rows, cols);
                QuantizedTensor one = take_quantized(format, AXIS_SQUARE, rows, cols);
                reference_quantize(&expected, in, rounding);
                omp_set_num_threads(2);
                cpu_quantize(&two, NULL, source_tensor(in), rounding);
                omp_set_num_threads(1);
                cpu_quantize(&one, NULL, source_tensor(in), rounding);
                check_same_quantized(&two, &expected);
                check_same_quantized(&one, &expected);
                check_decoded_form(&expected, source_tensor(in), rounding);
                pool_release();
                cases++;
            }
        }
    }
    printf("    %d cases\n", cases);
}

// A matrix and its transpose have the same scales and elements: the copy of one axis is that of the
// other.
static void test_square_transposed(void **state) {
    (void)state;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        Tensor in = random_tensor(FORMAT_BF16, SHAPES[shape][0], SHAPES[shape][1], 1), turned;
        turned = take_tensor(FORMAT_BF16, in.cols, in.rows);
        for (int64_t i = 0; i < in.rows * in.cols; i++) {
            tensor_set(turned, i % in.cols, i / in.cols, tensor_get(in, i / in.cols, i % in.cols));
        }
        QuantizedTensor a = take_quantized(FORMAT_E4M3, AXIS_SQUARE, in.rows, in.cols);
        QuantizedTensor b = take_quantized(FORMAT_E4M3, AXIS_SQUARE, in.cols, in.rows);
        cpu_quantize(&a, NULL, source_tensor(in), SCALE_RCEIL);
        cpu_quantize(&b, NULL, source_tensor(turned), SCALE_RCEIL);
        for (int64_t i = 0; i < in.rows * in.cols; i++) {
            int64_t r = i / in.cols, c = i % in.cols;
            assert_int_equal(a.elements[i], b.elements[c * in.rows + r]);
            assert_int_equal(a.scales[scale_index(AXIS_SQUARE, in.cols, r, c)],
                             b.scales[scale_index(AXIS_SQUARE, in.rows, c, r)]);
        }
        pool_release();
    }
}

// An update of `fields` (master, moments, gradient) with its BF16 copy; and what it must come to,
// of an update without copies.
typedef struct {
    AdamWUpdate in;
    float *expected[3];
    Tensor updated, bf16; // of these
} Update;

static Update make_update(float *const fields[4], int64_t rows, int64_t cols) {
    static const AdamWFactors FACTORS = {.beta1 = 0.9f,
                                         .beta2 = 0.95f,
                                         .eps = 1e-8f,
                                         .gradient_scale = 0.5f,
                                         .decay = 0.999f,
                                         .step_size = 0.04f,
                                         .root2 = 2.6f};
    int64_t count = rows * cols;
    Update u;
    for (int i = 0; i < 3; i++) {
        u.expected[i] = copy_floats(fields[i], count);
    }
    cpu_adamw((AdamWUpdate){.master = u.expected[0],
                            .moment1 = u.expected[1],
                            .moment2 = u.expected[2],
                            .gradient = fields[3],
                            .rows = 1,
                            .cols = count,
                            .factors = FACTORS});
    u.updated = tensor_make(u.expected[0], FORMAT_FP32, rows, cols);
    u.bf16 = tensor_make(pool_take((size_t)count * 2), FORMAT_BF16, rows, cols);
    cpu_convert(u.bf16, u.updated);
    u.in = (AdamWUpdate){.master = fields[0],
                         .moment1 = fields[1],
                         .moment2 = fields[2],
                         .gradient = fields[3],
                         .rows = rows,
                         .cols = cols,
                         .factors = FACTORS,
                         .bf16 = pool_take((size_t)count * 2)};
    return u;
}

static void check_update(const Update *u) {
    const AdamWUpdate *in = &u->in;
    const QuantizedTensor *copies[] = {&in->rowwise, &in->columnwise};
    cpu_adamw(*in);
    for (int i = 0; i < 2; i++) {
        if (!copies[i]->elements) continue;
        QuantizedTensor expected = take_quantized(copies[i]->format, copies[i]->axis, in->rows, in->cols);
        reference_quantize(&expected, u->updated, in->rounding);
        check_same_quantized(copies[i], &expected);
    }
    assert_memory_equal(in->bf16, u->bf16.data, (size_t)(in->rows * in->cols) * 2);
    const float *const fields[] = {in->master, in->moment1, in->moment2};
    for (int i = 0; i < 3; i++) {
        check_same_floats(fields[i], u->expected[i], in->rows * in->cols);
    }
}

// Updates of all shapes in one pass with their copies: rowwise and columnwise, each alone, square,
// BF16 alone.
static void test_adamw(void **state) {
    (void)state;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1], count = rows * cols;
        float *fields[4];
        for (int i = 0; i < 4; i++) {
            fields[i] = take_floats(count);
            fill_floats(fields[i], count, 0.1);
        }
        for (int64_t j = 0; j < count; j++) { // a mean of squares
            fields[2][j] *= fields[2][j];
        }
        Format other = shape % 2 ? FORMAT_E4M3 : FORMAT_E5M2;
        for (int copies = 0; copies < 5; copies++) {
            Update u = make_update(fields, rows, cols);
            u.in.rounding = (ScaleRounding)(shape % NUM_SCALE_ROUNDINGS);
            if (copies & 1) u.in.rowwise = take_quantized(FORMAT_E4M3, AXIS_ROWWISE, rows, cols);
            if (copies & 2) u.in.columnwise = take_quantized(other, AXIS_COLUMNWISE, rows, cols);
            if (copies & 4) u.in.rowwise = take_quantized(FORMAT_E4M3, AXIS_SQUARE, rows, cols);
            check_update(&u);
        }
        pool_release();
    }
}

// What the input above must hold for the comparison to mean something: blocks of each kind.
static void test_input_holds_every_kind(void **state) {
    (void)state;
    Tensor in = quantizer_input(FORMAT_FP32, 200, 1000);
    int64_t zero = 0, subnormal = 0, huge = 0, infinite = 0, nan = 0;
    for (int64_t i = 0; i < in.rows * in.cols; i++) {
        double x = tensor_get(in, i / in.cols, i % in.cols), magnitude = fabs(x);
        zero += x == 0;
        subnormal += magnitude > 0 && magnitude < 0x1p-126;
        huge += magnitude > 0x1p124 && isfinite(x);
        infinite += isinf(x) != 0;
        nan += isnan(x) != 0;
    }
    assert_true(zero > 100 && subnormal > 100 && huge > 100 && infinite > 100 && nan > 100);
    pool_release();
}

// Decoded values in double, where the product of element and scale is exact.
static double decoded(const QuantizedTensor *q, int64_t r, int64_t c) {
    uint8_t scale = q->scales[scale_index(q->axis, q->cols, r, c)];
    double element = mx_decode(q->format, q->elements[r * q->cols + c]);
    return scale == MX_SCALE_NAN ? NAN : ldexp(element, scale - 127);
}

static void check_dequantize(const QuantizedTensor *q, Format dtype, Format values) {
    Tensor out = take_tensor(dtype, q->rows, q->cols);
    cpu_dequantize(out, q, values);
    check_padding(out);
    bool narrow = dtype == FORMAT_BF16 || values == FORMAT_BF16;
    for (int64_t r = 0; r < q->rows; r++) {
        for (int64_t c = 0; c < q->cols; c++) {
            float expected = (float)decoded(q, r, c), value = (float)tensor_get(out, r, c);
            if (narrow) expected = mx_from_bf16(mx_to_bf16(expected));
            if (isnan(expected)) {
                assert_true(isnan(value));
            } else {
                assert_int_equal(mx_float_bits(value), mx_float_bits(expected));
            }
        }
    }
}

static void test_dequantize(void **state) {
    (void)state;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        FOR_EACH_MX_FORMAT(format) {
            for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
                QuantizedTensor q = take_quantized(format, axis, SHAPES[shape][0], SHAPES[shape][1]);
                reference_quantize(&q, quantizer_input(FORMAT_FP32, q.rows, q.cols), SCALE_RCEIL);
                check_dequantize(&q, FORMAT_FP32, FORMAT_FP32);
                check_dequantize(&q, FORMAT_FP32, FORMAT_BF16);
                check_dequantize(&q, FORMAT_BF16, FORMAT_BF16);
                pool_release();
            }
        }
    }
}

static QuantizedTensor take_scaled(Scaling scaling, Format format, Axis axis, Tensor in, QuantizedForm form) {
    void *memory = pool_take(scaled_bytes(scaling, form, axis, in.rows, in.cols));
    QuantizedTensor q = quantized_make(memory, format, axis, in.rows, in.cols, form);
    q.scaling = scaling;
    q.factor = take_floats(1);
    return q;
}

// Returns the scale of a kept element, by a table that isn't ours.
static float kept_scale(const QuantizedTensor *q, int64_t r, int64_t c) {
    bool is_nvfp4 = q->scaling == SCALING_NVFP4 || q->scaling == SCALING_NVFP4_46;
    int64_t length = is_nvfp4 ? 16 : 128;
    int64_t high = q->axis == AXIS_ROWWISE ? 1 : length, wide = q->axis == AXIS_COLUMNWISE ? 1 : length;
    int64_t block = r / high * ((q->cols + wide - 1) / wide) + c / wide;
    float scale = 1;
    if (is_nvfp4) scale = mx_bits_float(reference_table(FORMAT_E4M3)->values[q->scales[block]]);
    if (!is_nvfp4 && q->scaling != SCALING_TENSOR) memcpy(&scale, q->scales + 4 * block, sizeof(scale));
    return scale;
}

// Returns what it decodes to.
static float kept_value(const QuantizedTensor *q, int64_t r, int64_t c) {
    return mx_bits_float(reference_table(q->format)->values[q->elements[r * q->cols + c]]) * kept_scale(q, r, c);
}

static void check_same_value(float value, float expected) {
    assert_true(isnan(value) == isnan(expected));
    if (!isnan(expected)) assert_int_equal(mx_float_bits(value), mx_float_bits(expected));
}

// Blocks with FP32 scales have no BF16 values: their largest element is the format's largest, or a
// neighbour of it, and all others lie within half a step of what they stand for.
static void test_fp32_scales(void **state) {
    (void)state;
    for (int i = 0; i < 2 * NUM_SHAPES; i++) {
        Tensor in = random_tensor(FORMAT_FP32, SHAPES[i / 2][0], SHAPES[i / 2][1], i % 2 ? 1e-3 : 40);
        Tensor out = take_tensor(FORMAT_FP32, in.rows, in.cols);
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
            QuantizedTensor q = take_scaled(SCALING_BLOCK128_FP32, FORMAT_E4M3, axis, in, FORM_PLAIN);
            cpu_quantize(&q, NULL, source_tensor(in), SCALE_RCEIL);
            cpu_dequantize(out, &q, FORMAT_FP32);
            for (int64_t j = 0; j < in.rows * in.cols; j++) {
                int64_t r = j / in.cols, c = j % in.cols;
                double x = tensor_get(in, r, c), value = tensor_get(out, r, c);
                float scale = kept_scale(&q, r, c);
                check_same_value((float)value, kept_value(&q, r, c));
                assert_true(fabs(value - x) <= fmax(fabs(x) * 0x1p-4, scale * 0x1p-10) * 1.000001);
                assert_true(fabs(x) <= 448 * scale * 1.000001);
            }
        }
        pool_release();
    }
}

// What is kept as codes decodes to the values of what is made for one GEMM, in any piece of a row,
// and has the same factor.
static void check_scaled_codes(Scaling scaling, Format format, Axis axis, Tensor in) {
    QuantizedTensor codes = take_scaled(scaling, format, axis, in, FORM_PLAIN);
    QuantizedTensor values = take_scaled(scaling, format, axis, in, FORM_DECODED);
    Tensor dequantized = take_tensor(FORMAT_BF16, in.rows, in.cols);
    bool by_column = axis == AXIS_COLUMNWISE;
    cpu_quantize(by_column ? NULL : &codes, by_column ? &codes : NULL, source_tensor(in), SCALE_RCEIL);
    cpu_quantize(by_column ? NULL : &values, by_column ? &values : NULL, source_tensor(in), SCALE_RCEIL);
    cpu_dequantize(dequantized, &codes, FORMAT_BF16);
    check_same_value(*codes.factor, *values.factor);
    float *row = take_floats(in.cols);
    uint16_t *narrow = pool_take((size_t)in.cols * sizeof(*narrow));
    for (int64_t r = 0; r < in.rows; r++) {
        int64_t first = (r * 32) % in.cols / 32 * 32, count = in.cols - first < 96 ? in.cols - first : 96;
        cpu_decode_row(row, &codes, r, first, count);
        cpu_decode_row_to_bf16(narrow, &codes, r, first, count);
        for (int64_t c = 0; c < in.cols; c++) {
            float kept = kept_value(&codes, r, c), rounded = mx_from_bf16(mx_to_bf16(kept));
            if (c >= first && c < first + count) {
                check_same_value(row[c - first], kept);
                check_same_value(mx_from_bf16(narrow[c - first]), rounded);
            }
            check_same_value(mx_from_bf16(((uint16_t *)values.elements)[r * in.cols + c]), rounded);
            check_same_value((float)tensor_get(dequantized, r, c), rounded);
        }
    }
    pool_release();
}

// Bands of rows that each hold one scale, so that vectors take those they can: beside every code of
// an element, every finite one, and zeros alone. FP32 scales are every power of two, then others.
static void check_every_scaled_code(Scaling scaling, Format format, Axis axis) {
    enum { SCALES = 256, COLS = 64 };
    enum { EVERY, FINITE, ZEROS, OTHER_SCALES, KINDS };
    bool is_nvfp4 = scaling == SCALING_NVFP4;
    int64_t high = axis == AXIS_ROWWISE ? 4 : is_nvfp4 ? 16 : 128, bands = KINDS * SCALES;
    int64_t across = axis == AXIS_COLUMNWISE ? COLS : is_nvfp4 ? COLS / 16 : 1;
    int64_t scales_of_band = axis == AXIS_ROWWISE ? high * across : across;
    Tensor out = take_tensor(FORMAT_BF16, bands * high, COLS);
    QuantizedTensor q = take_scaled(scaling, format, axis, out, FORM_PLAIN);
    for (int64_t i = 0; i < bands * scales_of_band; i++) {
        int64_t band = i / scales_of_band;
        uint32_t code = (uint32_t)(band % SCALES), bits = code << 23 | (band / SCALES == OTHER_SCALES ? 0x400000 : 0);
        if (is_nvfp4) q.scales[i] = (uint8_t)code;
        if (scaling == SCALING_BLOCK128) memcpy(q.scales + 4 * i, &bits, sizeof(bits));
    }
    uint32_t sign = 1u << mx_element(format).sign_bit, finite = mx_element(format).max_code;
    for (int64_t i = 0; i < q.rows * q.cols; i++) {
        int64_t kind = i / COLS / high / SCALES;
        uint32_t code = (uint32_t)i % (2 * sign);
        bool is_zero = kind == ZEROS || (kind == FINITE && (code & (sign - 1)) > finite);
        q.elements[i] = (uint8_t)(is_zero ? code & sign : code);
    }
    cpu_dequantize(out, &q, FORMAT_BF16);
    for (int64_t i = 0; i < q.rows * q.cols; i++) {
        float kept = kept_value(&q, i / COLS, i % COLS);
        check_same_value((float)tensor_get(out, i / COLS, i % COLS), mx_from_bf16(mx_to_bf16(kept)));
    }
    pool_release();
}

static void test_every_scaled_code(void **state) {
    (void)state;
    for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
        for (Format format = FORMAT_E4M3; format <= FORMAT_E5M2; format++) {
            check_every_scaled_code(SCALING_TENSOR, format, axis);
            check_every_scaled_code(SCALING_BLOCK128, format, axis);
        }
        check_every_scaled_code(SCALING_NVFP4, FORMAT_E2M1, axis);
    }
}

static void test_scaled_codes(void **state) {
    (void)state;
    for (int i = 0; i < 2 * NUM_SHAPES; i++) {
        const int64_t *shape = SHAPES[i / 2];
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
            for (Scaling scaling = SCALING_TENSOR; scaling < NUM_SCALINGS; scaling++) {
                if (scaling == SCALING_BLOCK128_FP32) continue;
                Format format = scaling >= SCALING_NVFP4 ? FORMAT_E2M1 : i % 4 < 2 ? FORMAT_E4M3 : FORMAT_E5M2;
                Tensor in = i % 2 ? quantizer_input(FORMAT_FP32, shape[0], shape[1])
                                  : random_tensor(FORMAT_BF16, shape[0], shape[1], 1);
                check_scaled_codes(scaling, format, axis, in);
            }
        }
    }
}

// Returns a copy of what a source makes, of any scaling; `codes`: as it is kept.
static QuantizedTensor take_copy(Scaling scaling, Axis axis, Tensor made, bool codes) {
    Format format = scaling >= SCALING_NVFP4 ? FORMAT_E2M1 : FORMAT_E4M3;
    bool is_plain = codes || scaling == SCALING_BLOCK128_FP32;
    return take_scaled(scaling, format, axis, made, is_plain ? FORM_PLAIN : FORM_DECODED);
}

static void check_same_copy(const QuantizedTensor *copy, const QuantizedTensor *expected) {
    size_t size = copy->form == FORM_DECODED ? 2 : 1;
    size_t scales = scaled_scale_bytes(copy->scaling, copy->form, copy->axis, copy->rows, copy->cols);
    assert_memory_equal(copy->elements, expected->elements, (size_t)(copy->rows * copy->cols) * size);
    if (scales > 0) assert_memory_equal(copy->scales, expected->scales, scales);
    if (scaling_has_factor(copy->scaling)) check_same_value(*copy->factor, *expected->factor);
}

// A BF16 tensor becomes the same bytes as its values in FP32, whether both copies are made or one.
static void check_bf16_blocks_of_128(Tensor in, Format format, QuantizedForm form) {
    Tensor wide = take_tensor(FORMAT_FP32, in.rows, in.cols);
    cpu_convert(wide, in);
    for (int which = 1; which <= 3; which++) {
        QuantizedTensor copies[2], expected[2];
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
            copies[axis] = take_scaled(SCALING_BLOCK128, format, axis, in, form);
            expected[axis] = take_scaled(SCALING_BLOCK128, format, axis, in, form);
        }
        bool by_row = which & 1, by_column = which & 2;
        cpu_quantize(by_row ? &copies[0] : NULL, by_column ? &copies[1] : NULL, source_tensor(in), SCALE_RCEIL);
        cpu_quantize(by_row ? &expected[0] : NULL, by_column ? &expected[1] : NULL, source_tensor(wide), SCALE_RCEIL);
        if (by_row) check_same_copy(&copies[0], &expected[0]);
        if (by_column) check_same_copy(&copies[1], &expected[1]);
    }
}

// In blocks of 128 BF16 is encoded by MX's loops and FP32 isn't, nor is BF16 where a scale is at an
// end of E8M0's range: in all parts, in one or in none. Large copies are streamed.
static void test_bf16_blocks_of_128(void **state) {
    (void)state;
    const int64_t LARGE[][2] = {{1024, 1024}, {1021, 1088}};
    omp_set_num_threads(2);
    for (int i = 0; i < 12 * NUM_SHAPES; i++) {
        int64_t rows = SHAPES[i / 12][0], cols = SHAPES[i / 12][1];
        Tensor in = i % 3 == 0 ? quantizer_input(FORMAT_BF16, rows, cols) : random_tensor(FORMAT_BF16, rows, cols, 1e3);
        if (i % 3 == 1) tensor_set(in, rows / 2, cols - 1, NAN);
        check_bf16_blocks_of_128(in, i % 6 < 3 ? FORMAT_E4M3 : FORMAT_E5M2, i % 12 < 6 ? FORM_PLAIN : FORM_DECODED);
        pool_release();
    }
    for (int i = 0; i < 2; i++) {
        check_bf16_blocks_of_128(random_tensor(FORMAT_BF16, LARGE[i][0], LARGE[i][1], 1), FORMAT_E4M3, FORM_PLAIN);
        pool_release();
    }
}

// Copies of two scalings that two threads make together of a source have the bytes of each made
// alone, by one thread, from the stored tensor; what is stored on the way and sums of columns are
// the operation's own.
static void check_scaled_made(Source in, Tensor made, const Scaling scalings[2], bool codes) {
    QuantizedTensor copies[2], expected[2];
    for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
        copies[axis] = take_copy(scalings[axis], axis, made, codes);
        expected[axis] = take_copy(scalings[axis], axis, made, codes);
        omp_set_num_threads(1);
        cpu_quantize(axis == AXIS_ROWWISE ? &expected[axis] : NULL, axis == AXIS_COLUMNWISE ? &expected[axis] : NULL,
                     source_tensor(made), SCALE_RCEIL);
    }
    float *sums = take_floats(made.cols), *expected_sums = take_floats(made.cols);
    memset(sums, 0, (size_t)made.cols * sizeof(float));
    memset(expected_sums, 0, (size_t)made.cols * sizeof(float));
    bool is_summed = in.kind == SOURCE_TENSOR || in.kind == SOURCE_ACTIVATION_BACKWARD;
    if (is_summed) {
        in.sums = sums;
        cpu_bias_backward(expected_sums, made);
    }
    // An FP32 source is stored as it is, or in BF16.
    Tensor stored = codes ? made : take_tensor(FORMAT_BF16, made.rows, made.cols);
    if (!codes) cpu_convert(stored, made);
    if (in.kind != SOURCE_TENSOR) in.stored = take_tensor(stored.dtype, made.rows, made.cols);
    if (in.kind == SOURCE_ACTIVATION_BACKWARD) { // over dout
        in.stored = take_tensor(made.dtype, made.rows, made.cols);
        stored = made;
        for (int64_t r = 0; r < made.rows; r++) {
            for (int64_t c = 0; c < made.cols; c++) {
                tensor_set(in.stored, r, c, tensor_get(in.dout, r, c));
            }
        }
        in.dout = in.stored;
    }
    omp_set_num_threads(2);
    cpu_quantize(&copies[0], &copies[1], in, SCALE_RCEIL);
    check_same_copy(&copies[0], &expected[0]);
    check_same_copy(&copies[1], &expected[1]);
    if (in.kind != SOURCE_TENSOR) check_same_tensor(in.stored, stored);
    assert_memory_equal(sums, expected_sums, (size_t)made.cols * sizeof(float));
}

static void test_scaled_sources(void **state) {
    (void)state;
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            SourceInputs in = random_inputs(dtype, rows, cols);
            Source sources[MAX_SOURCES];
            Tensor made[MAX_SOURCES];
            int count = make_sources(sources, made, &in);
            for (int i = 0; i < count; i++) {
                for (Scaling scaling = SCALING_TENSOR; scaling < NUM_SCALINGS; scaling++, cases++) {
                    const Scaling other = (Scaling)(cases / 5 % NUM_SCALINGS);
                    const bool codes = cases / 30 % 2;
                    check_scaled_made(sources[i], made[i], (Scaling[]){scaling, scaling}, !codes);
                    check_scaled_made(sources[i], made[i], (Scaling[]){scaling, other}, codes);
                    check_scaled_made(sources[i], made[i], (Scaling[]){other, scaling}, codes);
                }
            }
            pool_release();
        }
    }
    printf("    %d cases\n", 3 * cases);
}

// A scale that is known before the values: elements by the converters' table, the amax, and a
// factor that hides nothing that isn't finite.
static void test_delayed_scale(void **state) {
    (void)state;
    static const float SCALES[] = {1, 37.3f, 0x1p-20f, FLT_MAX};
    for (int i = 0; i < 4 * NUM_SHAPES; i++) {
        Format format = i % 2 ? FORMAT_E4M3 : FORMAT_E5M2;
        Tensor in = random_tensor(FORMAT_FP32, SHAPES[i / 4][0], SHAPES[i / 4][1], 30);
        if (i % 4 == 3) tensor_set(in, in.rows / 2, in.cols - 1, i % 8 == 3 ? NAN : INFINITY);
        uint32_t seen = i % 8 == 0 ? 0x50000000 : 0, amax = seen;
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
            QuantizedTensor q = take_scaled(SCALING_TENSOR, format, axis, in, FORM_PLAIN);
            q.delayed = (DelayedScale){&SCALES[i % 4], &seen};
            cpu_quantize(&q, NULL, source_tensor(in), SCALE_RCEIL);
            for (int64_t j = 0; j < in.rows * in.cols; j++) {
                uint32_t bits = mx_float_bits((float)tensor_get(in, j / in.cols, j % in.cols));
                amax = (bits & 0x7FFFFFFF) > amax ? bits & 0x7FFFFFFF : amax;
                uint8_t code = reference_code(format, mx_float_bits(mx_bits_float(bits) * SCALES[i % 4]));
                assert_int_equal(q.elements[j] & 0x7F, code & 0x7F);
            }
            assert_int_equal(seen, amax);
            check_same_value(*q.factor, amax >= 0x7F800000 ? NAN : 1 / SCALES[i % 4]);
        }
        pool_release();
    }
}

// Quantizes rows [first, end) of `in`, told the amax of all rows, and compares them with those of
// `whole`.
static void check_rows_of_whole(const QuantizedTensor *whole, Tensor in, uint32_t *amax, int64_t first, int64_t end) {
    QuantizedTensor all = take_scaled(whole->scaling, whole->format, whole->axis, in, FORM_PLAIN);
    QuantizedTensor q = quantized_rows(all, first, end - first);
    size_t before = scaled_scale_bytes(q.scaling, FORM_PLAIN, q.axis, first, q.cols);
    size_t bytes = scaled_scale_bytes(q.scaling, FORM_PLAIN, q.axis, end - first, q.cols);
    uint32_t seen = 0;
    q.amax = amax;
    q.delayed = (DelayedScale){whole->delayed.scale, &seen};
    cpu_quantize(&q, NULL, source_tensor(tensor_rows(in, first, end - first)), SCALE_RCEIL);
    assert_memory_equal(q.elements, whole->elements + first * q.cols, (size_t)((end - first) * q.cols));
    assert_memory_equal(q.scales, whole->scales + before, bytes);
    check_same_value(*q.factor, *whole->factor);
    if (q.delayed.scale) assert_int_equal(seen, *whole->delayed.amax);
}

// Rows of a tensor whose factor is of the amax of all: the same bytes as in one piece, and the same
// factor where there are no rows, or where what isn't finite is in others.
static void test_rows_of_a_whole(void **state) {
    (void)state;
    static const int64_t CUTS[] = {0, 96, 256, 300, 300};
    const struct {
        Scaling scaling;
        Format format;
        bool is_delayed;
    } CASES[] = {{SCALING_TENSOR, FORMAT_E4M3, false},
                 {SCALING_TENSOR, FORMAT_E5M2, true},
                 {SCALING_NVFP4, FORMAT_E2M1, false},
                 {SCALING_NVFP4_46, FORMAT_E2M1, false}};
    for (size_t i = 0; i < 3 * sizeof(CASES) / sizeof(CASES[0]); i++) {
        Tensor in = random_tensor(i % 2 ? FORMAT_FP32 : FORMAT_BF16, 300, 200, 30);
        if (i / 4 == 2) tensor_set(in, 130, 77, i % 2 ? NAN : INFINITY);
        uint32_t amax = 7, expected = 0;
        for (int64_t j = 0; j < 300 * 200; j++) {
            uint32_t bits = mx_float_bits((float)tensor_get(in, j / 200, j % 200)) & 0x7FFFFFFF;
            expected = bits > expected ? bits : expected;
        }
        cpu_amax(&amax, in);
        assert_int_equal(amax, expected);
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
            float scale = 3.7f;
            uint32_t seen = 0;
            QuantizedTensor whole = take_scaled(CASES[i % 4].scaling, CASES[i % 4].format, axis, in, FORM_PLAIN);
            if (CASES[i % 4].is_delayed) whole.delayed = (DelayedScale){&scale, &seen};
            cpu_quantize(&whole, NULL, source_tensor(in), SCALE_RCEIL);
            for (int part = 0; part < 4; part++) {
                check_rows_of_whole(&whole, in, &amax, CUTS[part], CUTS[part + 1]);
            }
        }
        pool_release();
    }
    uint32_t none = 7;
    cpu_amax(&none, tensor_make(NULL, FORMAT_FP32, 0, 200));
    assert_int_equal(none, 0);
}

// A weight of 300 x 200: a byte an element, and what a block's scale takes.
static void test_bytes_of_scalings(void **state) {
    (void)state;
    const struct {
        Scaling scaling;
        size_t rowwise, columnwise, square;
    } CASES[] = {{SCALING_MX, 300 * 7, 10 * 200, 10 * 7},
                 {SCALING_TENSOR, 0, 0, 0},
                 {SCALING_BLOCK128, 4 * 300 * 2, 4 * 3 * 200, 4 * 3 * 2},
                 {SCALING_BLOCK128_FP32, 4 * 300 * 2, 4 * 3 * 200, 4 * 3 * 2},
                 {SCALING_NVFP4, 300 * 13, 19 * 200, 19 * 13},
                 {SCALING_NVFP4_46, 300 * 13, 19 * 200, 19 * 13}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Scaling scaling = CASES[i].scaling;
        size_t elements = (300 * 200 + 255) / 256 * 256;
        assert_int_equal(scaled_bytes(scaling, FORM_PLAIN, AXIS_ROWWISE, 300, 200), elements + CASES[i].rowwise);
        assert_int_equal(scaled_bytes(scaling, FORM_PLAIN, AXIS_COLUMNWISE, 300, 200), elements + CASES[i].columnwise);
        assert_int_equal(scaled_bytes(scaling, FORM_PLAIN, AXIS_SQUARE, 300, 200), elements + CASES[i].square);
        assert_int_equal(scaled_bytes(scaling, FORM_DECODED, AXIS_SQUARE, 300, 200), 2 * 300 * 200 + 64);
    }
}

// Counts from the definitions, over the quantized copy and its input.
static QuantStats reference_stats(Tensor in, Axis axis, Format format, ScaleRounding rounding) {
    QuantizedTensor q = take_quantized(format, axis, in.rows, in.cols);
    QuantizedTensor rceil = take_quantized(format, axis, in.rows, in.cols);
    reference_quantize(&q, in, rounding);
    reference_quantize(&rceil, in, SCALE_RCEIL);
    static const double MAX[] = {
        [FORMAT_E4M3] = 448, [FORMAT_E5M2] = 57344, [FORMAT_E2M3] = 7.5, [FORMAT_E3M2] = 28, [FORMAT_E2M1] = 6};
    QuantStats stats = {.elements = in.rows * in.cols, .blocks = mx_num_scales(axis, in.rows, in.cols)};
    for (int64_t i = 0; i < stats.blocks; i++) {
        stats.blocks_unlike_rceil += q.scales[i] != rceil.scales[i];
        // Two octaves to a bin from 2^-56, the first and last with what is beyond.
        int bin = (int)floor((q.scales[i] - 127 + 56) / 2.0);
        if (q.scales[i] != 255) stats.scales[bin < 0 ? 0 : bin > 31 ? 31 : bin]++;
    }
    for (int64_t i = 0; i < stats.elements; i++) {
        int64_t r = i / in.cols, c = i % in.cols;
        double x = tensor_get(in, r, c), value = decoded(&q, r, c);
        double max = ldexp(MAX[format], q.scales[scale_index(axis, in.cols, r, c)] - 127);
        stats.amax = fmax(stats.amax, fabs(x));
        stats.signal += x * x;
        stats.noise += (value - x) * (value - x);
        stats.clamped += fabs(x) > max;
        stats.at_max += fabs(value) == max;
        stats.flushed += x != 0 && value == 0;
    }
    return stats;
}

static void check_stats(Tensor in, Axis axis, Format format, ScaleRounding rounding, Check *check) {
    QuantStats stats, expected = reference_stats(in, axis, format, rounding);
    stats = (QuantStats){0};
    QuantizedTensor copy = quantized_make(NULL, format, axis, in.rows, in.cols, FORM_PLAIN);
    cpu_quantize_stats(&stats, in, &copy, rounding);
    assert_int_equal(stats.elements, expected.elements);
    assert_int_equal(stats.blocks, expected.blocks);
    assert_int_equal(stats.blocks_unlike_rceil, expected.blocks_unlike_rceil);
    assert_memory_equal(stats.scales, expected.scales, sizeof(stats.scales));
    assert_int_equal(stats.clamped, expected.clamped);
    assert_int_equal(stats.at_max, expected.at_max);
    assert_int_equal(stats.flushed, expected.flushed);
    assert_true(stats.amax == expected.amax);
    double additions = (double)stats.elements * 0x1p-52;
    check_value(check, stats.signal, expected.signal, additions * expected.signal);
    check_value(check, stats.noise, expected.noise, additions * expected.noise);
}

static void test_quantize_stats(void **state) {
    (void)state;
    Check check = {0};
    int64_t unlike = 0, clamped = 0, flushed = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        FOR_EACH_MX_FORMAT(format) FOR_EACH_ROUNDING(rounding) {
            Tensor in = random_tensor(format % 2 ? FORMAT_FP32 : FORMAT_BF16, SHAPES[shape][0], SHAPES[shape][1], 1);
            for (int64_t i = 0; i < in.rows * in.cols; i += 3) { // some small enough to be flushed, some 0
                int64_t r = i / in.cols, c = i % in.cols;
                tensor_set(in, r, c, i % 2 ? tensor_get(in, r, c) * 0x1p-25 : 0);
            }
            for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
                check_stats(in, axis, format, rounding, &check);
                QuantStats stats;
                stats = (QuantStats){0};
                QuantizedTensor copy = quantized_make(NULL, format, axis, in.rows, in.cols, FORM_PLAIN);
                cpu_quantize_stats(&stats, in, &copy, rounding);
                unlike += stats.blocks_unlike_rceil, clamped += stats.clamped, flushed += stats.flushed;
                assert_true(rounding != SCALE_RCEIL || (stats.clamped == 0 && stats.blocks_unlike_rceil == 0));
            }
            pool_release();
        }
    }
    assert_true(unlike > 0 && clamped > 0 && flushed > 0);
    check_end(&check, "signal and noise");
}

// Counts, from the definitions, of a copy in another scaling.
static void check_scaled_stats(Tensor in, QuantizedTensor copy, Check *check) {
    static const double MAX[] = {[FORMAT_E4M3] = 448, [FORMAT_E5M2] = 57344, [FORMAT_E2M1] = 6};
    QuantStats stats, expected = {.elements = in.rows * in.cols};
    stats = (QuantStats){0};
    cpu_quantize_stats(&stats, in, &copy, SCALE_RCEIL);
    cpu_quantize(&copy, NULL, source_tensor(in), SCALE_RCEIL);
    double factor = scaling_has_factor(copy.scaling) ? *copy.factor : 1;
    for (int64_t i = 0; i < stats.elements; i++) {
        double x = tensor_get(in, i / in.cols, i % in.cols);
        double scale = kept_scale(&copy, i / in.cols, i % in.cols) * factor;
        double value = kept_value(&copy, i / in.cols, i % in.cols) * factor;
        expected.amax = fmax(expected.amax, fabs(x));
        expected.signal += x * x;
        expected.noise += (value - x) * (value - x);
        expected.clamped += scale > 0 && fabs(x) > MAX[copy.format] * scale * (1 + 0x1p-21);
        uint32_t magnitude = copy.elements[i] & (copy.format == FORMAT_E2M1 ? 7u : 127u);
        expected.at_max += magnitude == mx_element(copy.format).max_code && value != 0;
        expected.flushed += x != 0 && value == 0;
    }
    assert_int_equal(stats.elements, expected.elements);
    assert_int_equal(stats.blocks, scaling_num_blocks(copy.scaling, copy.axis, in.rows, in.cols));
    assert_int_equal(stats.clamped, expected.clamped);
    assert_int_equal(stats.at_max, expected.at_max);
    assert_int_equal(stats.flushed, expected.flushed);
    assert_true(stats.amax == expected.amax);
    // A decoded value is rounded twice more here than there, and so off by 2^-23 of itself. The sum
    // of values' squares is at most (sqrt(signal) + sqrt(noise))^2, which bounds what that changes.
    double signal = expected.signal, noise = expected.noise, additions = (double)stats.elements * 0x1p-52;
    double values = sqrt(signal) + sqrt(noise), off = 0x1p-23 * values;
    check_value(check, stats.signal, signal, additions * signal);
    check_value(check, stats.noise, noise, 2 * sqrt(noise) * off + off * off + additions * noise);
}

// Every scaling and axis: of its own amax, of the amax of more rows, of an earlier one, which
// clamps; stochastically rounded, too.
static void test_scaled_stats(void **state) {
    (void)state;
    Check check = {0};
    for (int i = 0; i < 4 * NUM_SHAPES; i++) {
        Tensor in = random_tensor(i % 2 ? FORMAT_FP32 : FORMAT_BF16, SHAPES[i / 4][0], SHAPES[i / 4][1], 3);
        for (int64_t j = 0; j < in.rows * in.cols; j += 3) { // some small enough to be flushed, some 0
            tensor_set(in, j / in.cols, j % in.cols, j % 2 ? tensor_get(in, j / in.cols, j % in.cols) * 0x1p-25 : 0);
        }
        for (int k = 0; k < 3 * (NUM_SCALINGS - 1); k++) {
            Scaling scaling = (Scaling)(1 + k / 3);
            Format format = scaling_is_nvfp4(scaling) ? FORMAT_E2M1 : i % 4 < 2 ? FORMAT_E4M3 : FORMAT_E5M2;
            QuantizedTensor copy = take_scaled(scaling, format, (Axis)(k % 3), in, FORM_PLAIN);
            float scale = 1000;
            uint32_t seen = 0;
            uint32_t amax = mx_float_bits(30);
            if (i % 4 == 1) copy.encoding = (Encoding){ROUND_STOCHASTIC, 0, 7, {3, 5, 11}};
            if (i % 4 == 2 && scaling == SCALING_TENSOR) copy.delayed = (DelayedScale){&scale, &seen};
            if (i % 4 == 3 && scaling_has_factor(scaling)) copy.amax = &amax;
            check_scaled_stats(in, copy, &check);
        }
        pool_release();
    }
    check_end(&check, "signal and noise");
}

// A NaN anywhere shows in amax and noise.
static void test_stats_of_nan(void **state) {
    (void)state;
    for (int place = 0; place < 3; place++) {
        Tensor in = random_tensor(FORMAT_BF16, 40, 70, 1);
        tensor_set(in, place * 19, place * 34, NAN);
        QuantStats stats;
        stats = (QuantStats){0};
        QuantizedTensor copy = quantized_make(NULL, FORMAT_E4M3, AXIS_ROWWISE, 40, 70, FORM_PLAIN);
        cpu_quantize_stats(&stats, in, &copy, SCALE_RCEIL);
        assert_true(isnan(stats.amax) && isnan(stats.noise));
        pool_release();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantize),
        cmocka_unit_test(test_quantize_large),
        cmocka_unit_test(test_sources),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_square),
        cmocka_unit_test(test_square_transposed),
        cmocka_unit_test(test_every_bf16_value),
        cmocka_unit_test(test_fp32_between_bf16_values),
        cmocka_unit_test(test_rceil_exception),
        cmocka_unit_test(test_input_holds_every_kind),
        cmocka_unit_test(test_dequantize),
        cmocka_unit_test(test_scaled_codes),
        cmocka_unit_test(test_every_scaled_code),
        cmocka_unit_test(test_bf16_blocks_of_128),
        cmocka_unit_test(test_scaled_sources),
        cmocka_unit_test(test_bytes_of_scalings),
        cmocka_unit_test(test_fp32_scales),
        cmocka_unit_test(test_delayed_scale),
        cmocka_unit_test(test_rows_of_a_whole),
        cmocka_unit_test(test_quantize_stats),
        cmocka_unit_test(test_scaled_stats),
        cmocka_unit_test(test_stats_of_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
