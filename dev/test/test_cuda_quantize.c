/*
The CUDA quantizer against the CPU's, byte for byte: elements and scales, every format, form and
scale rounding, both axes, from FP32 and BF16, with tails, strides, every BF16 value, ties, and
blocks that are tiny, huge, zero or not finite; the scalings beside MX, values and factors. What it
makes as it reads, against the operation that makes it and the CPU's quantizer after it, as closely.
Then dequantize, convert, the swizzle, codes transposed and packed, and the statistics. Only CUDA's
runtime is called: the same test runs on a GPU and over dev/hostcuda.
*/
#include <float.h>
#include "device.h"
#include "llmc/cpu/cpu.h"

#define FOR_EACH_MX_FORMAT(format) for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++)
#define FOR_EACH_ROUNDING(rounding) \
    for (ScaleRounding rounding = SCALE_RCEIL; rounding < NUM_SCALE_ROUNDINGS; rounding++)
#define FOR_EACH_AXIS(axis) for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++)

// Tails of blocks, of a thread's eight columns, of a warp's 64 and of a thread block's 256; with
// and without 16-byte accesses.
static const int64_t SHAPES[][2] = {{1, 1},    {31, 33},   {32, 32},   {100, 257},  {64, 128}, {33, 264},
                                    {65, 8},   {7, 520},   {300, 3},   {128, 1544}, {2, 4096}, {3, 5000},
                                    {1, 2056}, {2001, 16}, {130, 300}, {128, 4096}};
enum { NUM_SHAPES = sizeof(SHAPES) / sizeof(SHAPES[0]) };

static Encoding encoding; // of all copies

// Of copies with one scale per tensor, where it is delayed, and what was seen under it before; 0:
// it isn't.
static float delayed_scale;
static uint32_t seen_amax;

static QuantizedTensor take_quantized(Format format, Axis axis, int64_t rows, int64_t cols) {
    return (QuantizedTensor){.elements = pool_take((size_t)(rows * cols)),
                             .scales = pool_take((size_t)mx_num_scales(axis, rows, cols)),
                             .format = format,
                             .axis = axis,
                             .rows = rows,
                             .cols = cols,
                             .form = FORM_PLAIN,
                             .encoding = encoding};
}

static size_t element_bytes(const QuantizedTensor *q) {
    return (size_t)(q->rows * q->cols) * (q->form == FORM_DECODED ? 2 : 1);
}

static size_t scale_bytes(const QuantizedTensor *q) {
    return scaled_scale_bytes(SCALING_MX, q->form, q->axis, q->rows, q->cols);
}

static QuantizedTensor device_quantized(Format format, QuantizedForm form, Axis axis, int64_t rows, int64_t cols,
                                        size_t misalignment) {
    QuantizedTensor q = quantized_make(NULL, format, axis, rows, cols, form);
    q.encoding = encoding;
    q.elements = device_take_at(element_bytes(&q), misalignment == 1 ? 0 : misalignment); // 1: of scales alone
    q.scales = device_take_at(scale_bytes(&q), misalignment);
    return q;
}

// A plain tensor in another form: what mx.h and the CPU's decoder make of it.
static QuantizedTensor in_form(const QuantizedTensor *plain, QuantizedForm form) {
    QuantizedTensor q = *plain;
    q.form = form;
    bool rowwise = q.axis == AXIS_ROWWISE;
    if (form == FORM_DECODED) {
        q.elements = pool_take(element_bytes(&q));
        cpu_dequantize(tensor_make(q.elements, FORMAT_BF16, q.rows, q.cols), plain, FORMAT_BF16);
    }
    if (form != FORM_PLAIN) q.scales = pool_take(scale_bytes(&q));
    if (form == FORM_SWIZZLED) {
        int64_t blocks_in_row = rowwise ? mx_num_blocks(q.cols) : q.cols, k = rowwise ? q.cols : q.rows;
        memset(q.scales, 0, scale_bytes(&q));
        for (int64_t i = 0; i < mx_num_scales(q.axis, q.rows, q.cols); i++) {
            int64_t row = i / blocks_in_row, col = i % blocks_in_row;
            q.scales[mx_swizzled_scale_offset(rowwise ? row : col, rowwise ? col : row, k)] = plain->scales[i];
        }
    }
    return q;
}

static bool is_delayed(Scaling scaling) { return scaling == SCALING_TENSOR && delayed_scale > 0; }

// Copies of a scaling that isn't MX, on the host and on the device.
static QuantizedTensor take_scaled_copy(Scaling scaling, Format format, QuantizedForm form, Axis axis, int64_t rows,
                                        int64_t cols) {
    void *memory = pool_take(scaled_bytes(scaling, form, axis, rows, cols));
    QuantizedTensor q = quantized_make(memory, format, axis, rows, cols, form);
    q.scaling = scaling;
    q.encoding = encoding;
    if (scaling_has_factor(scaling)) q.factor = take_floats(1);
    if (!is_delayed(scaling)) return q;
    q.delayed = (DelayedScale){&delayed_scale, pool_take(sizeof(uint32_t))};
    *q.delayed.amax = seen_amax;
    return q;
}

static QuantizedTensor device_scaled(Scaling scaling, Format format, QuantizedForm form, Axis axis, int64_t rows,
                                     int64_t cols, size_t misalignment) {
    QuantizedTensor q = quantized_make(NULL, format, axis, rows, cols, form);
    q.elements = device_take_at(element_bytes(&q), misalignment);
    q.scales = device_take(scaled_scale_bytes(scaling, form, axis, rows, cols));
    q.scaling = scaling;
    q.encoding = encoding;
    if (scaling_has_factor(scaling)) q.factor = device_take(sizeof(float));
    if (!is_delayed(scaling)) return q;
    q.delayed.scale = to_device(&delayed_scale, sizeof(delayed_scale));
    q.delayed.amax = to_device(&seen_amax, sizeof(seen_amax));
    return q;
}

static void check_bytes(const uint8_t *device, const uint8_t *expected, int64_t count, const char *what,
                        const QuantizedTensor *q) {
    uint8_t *values = test_malloc((size_t)count);
    download(values, device, (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        if (values[i] == expected[i]) continue;
        fail_msg("%s %lld of a %lld x %lld tensor, format %d, axis %d: 0x%02X, not 0x%02X", what, (long long)i,
                 (long long)q->rows, (long long)q->cols, q->format, q->axis, values[i], expected[i]);
    }
    test_free(values);
}

// Decoded values: any NaN is as good as another.
static void check_decoded(const QuantizedTensor *device, const QuantizedTensor *expected) {
    uint16_t *values = test_malloc(element_bytes(device));
    download(values, device->elements, element_bytes(device));
    for (int64_t i = 0; i < device->rows * device->cols; i++) {
        uint16_t value = values[i], wanted = ((const uint16_t *)expected->elements)[i];
        if (value == wanted || (isnan(mx_from_bf16(value)) && isnan(mx_from_bf16(wanted)))) continue;
        fail_msg("value %lld of a %lld x %lld tensor, format %d, axis %d: 0x%04X, not 0x%04X", (long long)i,
                 (long long)expected->rows, (long long)expected->cols, expected->format, expected->axis, value, wanted);
    }
    test_free(values);
}

static void check_quantized(const QuantizedTensor *device, const QuantizedTensor *plain) {
    QuantizedTensor expected = in_form(plain, device->form);
    check_bytes(device->scales, expected.scales, (int64_t)scale_bytes(device), "scale", &expected);
    if (device->form == FORM_DECODED) {
        check_decoded(device, &expected);
    } else {
        check_bytes(device->elements, expected.elements, device->rows * device->cols, "element", &expected);
    }
}

static void check_kept_scales(const QuantizedTensor *device, const QuantizedTensor *expected) {
    size_t bytes = scaled_scale_bytes(expected->scaling, FORM_PLAIN, expected->axis, expected->rows, expected->cols);
    uint8_t *scales = test_malloc(bytes + 1);
    download(scales, device->scales, bytes);
    for (int64_t i = 0; i < scaling_num_blocks(expected->scaling, expected->axis, expected->rows, expected->cols);
         i++) {
        float scale = scaling_kept_value(expected->scaling, scales, i);
        float wanted = scaling_kept_value(expected->scaling, expected->scales, i);
        if (mx_float_bits(scale) == mx_float_bits(wanted) || (isnan(scale) && isnan(wanted))) continue;
        fail_msg("scale %lld of a %lld x %lld tensor, scaling %d, axis %d: %a, not %a", (long long)i,
                 (long long)expected->rows, (long long)expected->cols, expected->scaling, expected->axis, scale,
                 wanted);
    }
    test_free(scales);
}

// Values, factors and delayed scales' amaxes of a scaling that isn't MX: any NaN is as good as
// another.
static void check_scaled(const QuantizedTensor *device, const QuantizedTensor *expected) {
    if (device->form == FORM_DECODED) {
        check_decoded(device, expected);
    } else {
        check_bytes(device->elements, expected->elements, device->rows * device->cols, "element", expected);
        check_kept_scales(device, expected);
    }
    if (!expected->factor) return;
    float factor;
    download(&factor, device->factor, sizeof(factor));
    if (mx_float_bits(factor) != mx_float_bits(*expected->factor) && !(isnan(factor) && isnan(*expected->factor))) {
        fail_msg("the factor of a %lld x %lld tensor, scaling %d, format %d: %a, not %a", (long long)device->rows,
                 (long long)device->cols, device->scaling, device->format, factor, *expected->factor);
    }
    if (!expected->delayed.amax) return;
    uint32_t amax;
    download(&amax, device->delayed.amax, sizeof(amax));
    if (isnan(mx_bits_float(amax)) && isnan(mx_bits_float(*expected->delayed.amax))) return;
    assert_int_equal(amax, *expected->delayed.amax);
}

// -------------------------------------------------------------------------------------------------
// Inputs

static float any_finite(uint64_t stream, uint64_t i) {
    uint32_t bits = (uint32_t)(random_uniform(3, stream, 2 * i) * 0x1p24f) << 8 |
                    (uint32_t)(random_uniform(3, stream, 2 * i + 1) * 0x1p8f);
    return mx_bits_float((bits & 0x7F800000u) == 0x7F800000u ? bits & 0xBFFFFFFFu : bits);
}

// Whole blocks of either axis of each kind that a quantizer may get wrong.
static void fill_input(Tensor t) {
    uint64_t stream = next_stream();
    for (int64_t r = 0; r < t.rows; r++) {
        for (int64_t c = 0; c < t.cols; c++) {
            uint64_t i = (uint64_t)(r * t.cols + c), block = (uint64_t)(r / 32 * 1000 + c / 32);
            int exponent = (int)(random_uniform(4, stream, block) * 250) - 125;
            double x = random_normal(1, stream, i);
            switch ((int)(random_uniform(2, stream, block) * 10)) {
            case 0:
                x = r % 3 ? 0 : -0.0;
                break;
            case 1: // subnormal
                x *= 0x1p-135;
                break;
            case 2: // huge, some of it infinite
                x = (float)(x * 0x1p125);
                break;
            case 3:
                x = r % 7 == 3 && c % 5 == 4 ? (r % 2 ? NAN : -NAN) : x;
                break;
            case 4:
                x = r % 7 == 2 && c % 5 == 2 ? -INFINITY : x * 0x1p-20;
                break;
            case 5: // flushed beside the large ones
                x = c % 2 ? x : x * 0x1p-12;
                break;
            case 6: // clustered: every value near one, as layernorm's gains are
                x = 0.96 + 0.03 * x;
                break;
            case 7: // ties and their neighbours, over the exponents of a block
                x = ldexp((double)(i * 5 % 64 + 64) / 128, exponent - (int)(i % 20)) * (i % 3 ? 1 : -1);
                break;
            case 8: // any exponents at all
                x = any_finite(stream, i);
                break;
            default:
                x = ldexp(x, exponent);
                break;
            }
            tensor_set(t, r, c, x);
        }
    }
}

static Tensor input_with_stride(Format dtype, int64_t rows, int64_t cols, int64_t stride) {
    Tensor t = tensor_make(pool_take((size_t)(rows * stride) * dtype_size(dtype)), dtype, rows, cols);
    t.stride = stride;
    fill_input(t);
    return t;
}

// -------------------------------------------------------------------------------------------------
// Tests

// Both copies at once, and each alone, in the forms of either axis.
static void check_quantize_forms(Tensor in, Format rowwise, Format columnwise, const QuantizedForm forms[2],
                                 ScaleRounding rounding, size_t misalignment) {
    QuantizedTensor expected[2] = {take_quantized(rowwise, AXIS_ROWWISE, in.rows, in.cols),
                                   take_quantized(columnwise, AXIS_COLUMNWISE, in.rows, in.cols)};
    cpu_quantize(&expected[0], &expected[1], source_tensor(in), rounding);
    Source input = source_tensor(tensor_to_device(in));
    QuantizedTensor both[2], alone[2];
    FOR_EACH_AXIS(axis) {
        Format format = expected[axis].format;
        both[axis] = device_quantized(format, forms[axis], axis, in.rows, in.cols, misalignment);
        alone[axis] = device_quantized(format, forms[axis], axis, in.rows, in.cols, misalignment);
    }
    cuda_quantize(&both[0], &both[1], input, rounding);
    cuda_quantize(&alone[0], NULL, input, rounding);
    cuda_quantize(NULL, &alone[1], input, rounding);
    FOR_EACH_AXIS(axis) {
        check_quantized(&both[axis], &expected[axis]);
        check_quantized(&alone[axis], &expected[axis]);
    }
}

static void check_quantize(Tensor in, Format rowwise, Format columnwise, ScaleRounding rounding, size_t misalignment) {
    static const QuantizedForm PLAIN[2] = {FORM_PLAIN, FORM_PLAIN};
    check_quantize_forms(in, rowwise, columnwise, PLAIN, rounding, misalignment);
}

static void test_quantize(void **state) {
    (void)state;
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
        bool large = rows * cols > 100000;
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            Tensor in = input_with_stride(dtype, rows, cols, cols);
            FOR_EACH_MX_FORMAT(format) FOR_EACH_ROUNDING(rounding) {
                if (large && (int)format % 4 != (int)rounding) continue;
                check_quantize(in, format, format, rounding, 0);
                cases++;
            }
            release_all();
        }
    }
    printf("    %d cases, each as both copies and as one\n", cases);
}

// Copies of different formats, rows that lie apart, memory that isn't aligned.
static void test_quantize_layouts(void **state) {
    (void)state;
    static const int64_t PADDING[] = {0, 3, 8, 64};
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
        if (rows * cols > 100000) continue;
        for (int padding = 0; padding < 4; padding++) {
            Format dtype = (shape + padding) % 2 ? FORMAT_FP32 : FORMAT_BF16;
            Tensor in = input_with_stride(dtype, rows, cols, cols + PADDING[padding]);
            FOR_EACH_MX_FORMAT(format) {
                Format other = format + 1 < NUM_FORMATS ? format + 1 : FIRST_MX_FORMAT;
                check_quantize(in, format, other, (ScaleRounding)(cases % NUM_SCALE_ROUNDINGS), 0);
                check_quantize(in, format, format, SCALE_RCEIL, (size_t)(cases % 3));
                cases++;
            }
            release_all();
        }
    }
    printf("    %d cases\n", cases);
}

// A matrix whose rows' blocks are each of 2048 amaxes (every exponent, mantissas at the roundings'
// thresholds) with every BF16 value of the 19 exponents from its own downwards, beyond which the
// widest format has only zero.
static Tensor every_bf16_block(void) {
    static const uint16_t MANTISSAS[] = {0, 0x40, 0x41, 0x60, 0x61, 0x70, 0x71, 0x7F};
    enum { VALUES = 19 * 128, BLOCKS = (VALUES + 30) / 31, COLS = 512 };
    int64_t blocks = 256 * 8 * BLOCKS, rows = blocks * 32 / COLS;
    Tensor t = tensor_make(pool_take((size_t)blocks * 64), FORMAT_BF16, rows, COLS);
    uint16_t *at = t.data;
    for (int exponent = 0; exponent < 256; exponent++) {
        for (int m = 0; m < 8; m++) {
            int amax = exponent << 7 | MANTISSAS[m];
            for (int value = 0; value < BLOCKS * 31; value++) {
                if (value % 31 == 0) *at++ = (uint16_t)amax;
                int magnitude = amax - value < 0 ? 0 : amax - value;
                *at++ = (uint16_t)(magnitude | (value & 1) << 15);
            }
        }
    }
    return t;
}

static Tensor transposed(Tensor in) {
    Tensor out = tensor_make(pool_take((size_t)(in.rows * in.cols) * 2), FORMAT_BF16, in.cols, in.rows);
    for (int64_t i = 0; i < in.rows * in.cols; i++) {
        ((uint16_t *)out.data)[i % in.cols * in.rows + i / in.cols] = ((const uint16_t *)in.data)[i];
    }
    return out;
}

static void test_every_bf16_value(void **state) {
    (void)state;
    Tensor rows = every_bf16_block(), columns = transposed(rows);
    Tensor device_rows = tensor_to_device(rows), device_columns = tensor_to_device(columns);
    QuantizedTensor rowwise = take_quantized(FORMAT_E4M3, AXIS_ROWWISE, rows.rows, rows.cols);
    QuantizedTensor columnwise = take_quantized(FORMAT_E4M3, AXIS_COLUMNWISE, columns.rows, columns.cols);
    QuantizedTensor device_rowwise = device_quantized(FORMAT_E4M3, FORM_PLAIN, AXIS_ROWWISE, rows.rows, rows.cols, 0);
    QuantizedTensor device_columnwise =
        device_quantized(FORMAT_E4M3, FORM_PLAIN, AXIS_COLUMNWISE, columns.rows, columns.cols, 0);
    FOR_EACH_MX_FORMAT(format) {
        for (ScaleRounding rounding = SCALE_RCEIL; rounding <= SCALE_FLOOR; rounding++) {
            rowwise.format = columnwise.format = device_rowwise.format = device_columnwise.format = format;
            cpu_quantize(&rowwise, NULL, source_tensor(rows), rounding);
            cpu_quantize(NULL, &columnwise, source_tensor(columns), rounding);
            cuda_quantize(&device_rowwise, NULL, source_tensor(device_rows), rounding);
            cuda_quantize(NULL, &device_columnwise, source_tensor(device_columns), rounding);
            check_quantized(&device_rowwise, &rowwise);
            check_quantized(&device_columnwise, &columnwise);
        }
    }
    printf("    %lld blocks of BF16, 5 formats x 2 roundings x 2 axes\n", (long long)(rows.rows * rows.cols / 32));
    release_all();
}

static void test_quantize_forms(void **state) {
    (void)state;
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
        if (rows * cols > 100000) continue;
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            Tensor in = input_with_stride(dtype, rows, cols, cols + (shape % 3 ? 0 : 8));
            for (int pair = 0; pair < 9; pair++, cases++) {
                QuantizedForm forms[2] = {(QuantizedForm)(pair % 3), (QuantizedForm)(pair / 3)};
                Format format = (Format)(FIRST_MX_FORMAT + cases % (NUM_FORMATS - FIRST_MX_FORMAT));
                Format other = cases % 3 ? format : FORMAT_E2M3;
                check_quantize_forms(in, format, other, forms, (ScaleRounding)(cases % NUM_SCALE_ROUNDINGS),
                                     cases % 5 == 4 ? 2 : 0);
            }
            release_all();
        }
    }
    printf("    %d cases, each as both copies and as one\n", cases);
}

// The same values; any NaN is as good as another.
static void check_same_values(Tensor device, Tensor expected) {
    Tensor values = tensor_to_host(device);
    check_padding(values);
    for (int64_t r = 0; r < values.rows; r++) {
        for (int64_t c = 0; c < values.cols; c++) {
            float value = (float)tensor_get(values, r, c), wanted = (float)tensor_get(expected, r, c);
            if (isnan(value) && isnan(wanted)) continue;
            if (mx_float_bits(value) != mx_float_bits(wanted)) {
                fail_msg("row %lld, column %lld of %lld x %lld: %a, not %a", (long long)r, (long long)c,
                         (long long)values.rows, (long long)values.cols, value, wanted);
            }
        }
    }
}

static Tensor tensor_like(Tensor t, int64_t padding) {
    t.stride = t.cols + padding;
    t.data = pool_take(tensor_bytes(t));
    return t;
}

static void check_dequantize(const QuantizedTensor *q, const QuantizedTensor *device, Format dtype, Format values,
                             int64_t padding) {
    Tensor expected = tensor_like((Tensor){NULL, dtype, q->rows, q->cols, 0}, padding), out = expected;
    out.data = device_take(tensor_bytes(out));
    cpu_dequantize(expected, q, values);
    cuda_dequantize(out, device, values);
    check_same_values(out, expected);

    QuantizedTensor decoded = *q, device_decoded = *device;
    float factor = 0.3f;
    for (int has_factor = 0; has_factor < 2; has_factor++) {
        decoded.factor = has_factor ? &factor : NULL;
        device_decoded.factor = has_factor ? to_device(&factor, sizeof(factor)) : NULL;
        cpu_decode(expected, &decoded);
        cuda_decode(out, &device_decoded);
        check_same_values(out, expected);
    }
}

static void test_dequantize(void **state) {
    (void)state;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
        FOR_EACH_MX_FORMAT(format) FOR_EACH_AXIS(axis) {
            QuantizedTensor q = take_quantized(format, axis, rows, cols), device = q;
            Tensor in = input_with_stride(FORMAT_FP32, rows, cols, cols);
            cpu_quantize(axis == AXIS_ROWWISE ? &q : NULL, axis == AXIS_ROWWISE ? NULL : &q, source_tensor(in),
                         SCALE_RCEIL);
            device.elements = to_device(q.elements, (size_t)(rows * cols));
            device.scales = to_device(q.scales, (size_t)mx_num_scales(axis, rows, cols));
            check_dequantize(&q, &device, FORMAT_FP32, FORMAT_FP32, 0);
            check_dequantize(&q, &device, FORMAT_FP32, FORMAT_BF16, 8);
            check_dequantize(&q, &device, FORMAT_BF16, FORMAT_BF16, 0);
            check_dequantize(&q, &device, FORMAT_BF16, FORMAT_BF16, 3);
            QuantizedTensor swizzled = in_form(&q, FORM_SWIZZLED);
            device.form = FORM_SWIZZLED;
            device.scales = to_device(swizzled.scales, scale_bytes(&swizzled));
            check_dequantize(&q, &device, FORMAT_FP32, FORMAT_FP32, 0);
            check_dequantize(&q, &device, FORMAT_BF16, FORMAT_BF16, 3);
            release_all();
        }
    }
}

// The scalings beside MX

static const Scaling SCALINGS[] = {SCALING_TENSOR, SCALING_BLOCK128, SCALING_BLOCK128_FP32, SCALING_NVFP4,
                                   SCALING_NVFP4_46};
enum { NUM_SCALED = sizeof(SCALINGS) / sizeof(SCALINGS[0]) };

// Values within a range that the tensor's own scale leaves something of; some blocks of zeros.
static Tensor finite_input(Format dtype, int64_t rows, int64_t cols, int64_t stride) {
    Tensor t = tensor_make(pool_take((size_t)(rows * stride) * dtype_size(dtype)), dtype, rows, cols);
    t.stride = stride;
    uint64_t stream = next_stream();
    for (int64_t i = 0; i < rows * cols; i++) {
        uint64_t block = (uint64_t)(i / cols / 16 * 1000 + i % cols / 16);
        int kind = (int)(random_uniform(2, stream, block) * 16);
        double x = ldexp(random_normal(1, stream, (uint64_t)i), -kind);
        tensor_set(t, i / cols, i % cols, kind == 15 ? 0 : x);
    }
    return t;
}

// Returns a plain copy with its codes transposed.
static QuantizedTensor as_transposed(const QuantizedTensor *plain) {
    QuantizedTensor result = *plain;
    result.form = FORM_TRANSPOSED;
    result.elements = pool_take(element_bytes(plain));
    for (int64_t i = 0; i < plain->rows * plain->cols; i++) {
        result.elements[i % plain->cols * plain->rows + i / plain->cols] = plain->elements[i];
    }
    return result;
}

// A columnwise copy whose codes are written transposed, with a rowwise one and alone; what they are
// decoded to.
static void check_transposed(Tensor in, const QuantizedTensor *row, const QuantizedTensor *expected_row,
                             const QuantizedTensor *expected, size_t misalignment) {
    Source input = source_tensor(tensor_to_device(in));
    QuantizedTensor transposed = as_transposed(expected);
    for (int i = 0; i < 2; i++) {
        QuantizedTensor copy = device_scaled(expected->scaling, expected->format, FORM_TRANSPOSED, AXIS_COLUMNWISE,
                                             in.rows, in.cols, misalignment);
        cuda_quantize(i ? row : NULL, &copy, input, 0);
        check_scaled(&copy, &transposed);
        check_scaled(row, expected_row);
        check_dequantize(expected, &copy, FORMAT_BF16, FORMAT_BF16, 0);
    }
}

// Both copies at once, each alone, and a square one; what codes are decoded to.
static void check_scaled_copies(Tensor in, Scaling scaling, const Format formats[2], QuantizedForm form,
                                size_t misalignment) {
    Source input = source_tensor(tensor_to_device(in));
    QuantizedTensor expected[3], both[2], alone[3];
    for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
        Format format = formats[axis == AXIS_COLUMNWISE];
        expected[axis] = take_scaled_copy(scaling, format, form, axis, in.rows, in.cols);
        alone[axis] = device_scaled(scaling, format, form, axis, in.rows, in.cols, misalignment);
        if (axis != AXIS_SQUARE)
            both[axis] = device_scaled(scaling, format, form, axis, in.rows, in.cols, misalignment);
        bool is_column = axis == AXIS_COLUMNWISE;
        cpu_quantize(is_column ? NULL : &expected[axis], is_column ? &expected[axis] : NULL, source_tensor(in), 0);
        cuda_quantize(is_column ? NULL : &alone[axis], is_column ? &alone[axis] : NULL, input, 0);
        check_scaled(&alone[axis], &expected[axis]);
        if (form != FORM_PLAIN) continue;
        check_dequantize(&expected[axis], &alone[axis], FORMAT_BF16, FORMAT_BF16, 0);
        check_dequantize(&expected[axis], &alone[axis], FORMAT_FP32, FORMAT_FP32, 3);
    }
    cuda_quantize(&both[0], &both[1], input, 0);
    FOR_EACH_AXIS(axis) check_scaled(&both[axis], &expected[axis]);
    if (form == FORM_PLAIN) check_transposed(in, &both[0], &expected[0], &expected[1], misalignment);
}

// Every scaling and format, with and without values that aren't finite, rows that lie apart, copies
// of two formats, memory that isn't aligned.
static void test_scaled(void **state) {
    (void)state;
    static const int64_t SIZES[][2] = {{1, 1},     {16, 16}, {128, 128}, {129, 136}, {100, 257},
                                       {33, 264},  {300, 3}, {40, 520},  {257, 128}, {2, 2056},
                                       {130, 300}, {15, 17}, {384, 64},  {144, 264}};
    int cases = 0;
    for (size_t size = 0; size < sizeof(SIZES) / sizeof(SIZES[0]); size++) {
        int64_t rows = SIZES[size][0], cols = SIZES[size][1];
        for (int i = 0; i < NUM_SCALED; i++) {
            FOR_EACH_MX_FORMAT(format) for (int special = 0; special < 2; special++, cases++) {
                if (scaling_is_nvfp4(SCALINGS[i]) && format != FORMAT_E2M1) continue;
                Format dtype = cases / 2 % 2 ? FORMAT_FP32 : FORMAT_BF16;
                int64_t stride = cols + (cases % 3 ? 0 : 8);
                Tensor in =
                    special ? input_with_stride(dtype, rows, cols, stride) : finite_input(dtype, rows, cols, stride);
                bool is_one = scaling_is_nvfp4(SCALINGS[i]) || cases % 4 < 3;
                const Format formats[] = {format, is_one ? format : FORMAT_E5M2};
                bool is_plain = SCALINGS[i] == SCALING_BLOCK128_FP32 || cases / 4 % 2;
                check_scaled_copies(in, SCALINGS[i], formats, is_plain ? FORM_PLAIN : FORM_DECODED,
                                    cases % 5 == 4 ? 2 : 0);
                release_all();
            }
        }
    }
    printf("    %d cases, each as both copies, as one and as square blocks\n", cases);
}

// Finite tensors whose amaxes are near the ends of FP32's range, where four over six divides
// otherwise.
static void test_scaled_near_the_ends(void **state) {
    (void)state;
    static const int EXPONENTS[] = {-149, -140, -130, -126, -115, -100, -84, -82, -80, 96, 98, 100, 112, 120, 125};
    enum { COUNT_EXPONENTS = sizeof(EXPONENTS) / sizeof(EXPONENTS[0]) };
    for (int i = 0; i < COUNT_EXPONENTS * NUM_SCALED * 2; i++) {
        Scaling scaling = SCALINGS[i % NUM_SCALED];
        Format dtype = i / NUM_SCALED % 2 ? FORMAT_FP32 : FORMAT_BF16;
        Format format = scaling_is_nvfp4(scaling) ? FORMAT_E2M1 : FORMAT_E4M3;
        Tensor in = finite_input(dtype, 48, 136, 136);
        for (int64_t at = 0; at < in.rows * in.cols; at++) {
            double x = tensor_get(in, at / in.cols, at % in.cols);
            tensor_set(in, at / in.cols, at % in.cols, ldexp(x, EXPONENTS[i / NUM_SCALED / 2]));
        }
        const Format formats[] = {format, format};
        check_scaled_copies(in, scaling, formats,
                            scaling == SCALING_BLOCK128_FP32 || i / NUM_SCALED % 3 ? FORM_PLAIN : FORM_DECODED, 0);
        release_all();
    }
}

// Rows of a tensor, told the amax of all rows, some not finite: the CPU's bytes, and the factor
// where there are no rows; the same where the scale was known before.
static void test_rows_of_a_whole(void **state) {
    (void)state;
    static const int64_t COLS[] = {264, 257, 64};
    for (int i = 0; i < 6 * NUM_SCALED; i++) {
        int64_t rows = i % 3 ? 160 : 0, cols = COLS[i % 3];
        Scaling scaling = SCALINGS[i / 3 % NUM_SCALED];
        delayed_scale = i < 3 * NUM_SCALED ? 0 : 37.3f;
        Format format = scaling_is_nvfp4(scaling) ? FORMAT_E2M1 : FORMAT_E4M3;
        bool is_finite = i % 2 == 0;
        Tensor whole =
            is_finite ? finite_input(FORMAT_FP32, 300, cols, cols) : input_with_stride(FORMAT_FP32, 300, cols, cols);
        Tensor in = tensor_rows(whole, 128, rows);
        uint32_t amax, found = 7, *on_gpu = to_device(&found, sizeof(found));
        cpu_amax(&amax, whole);
        cuda_amax(on_gpu, tensor_to_device(whole));
        download(&found, on_gpu, sizeof(found));
        assert_int_equal(found, amax);
        assert_true((amax < 0x7F800000u) == is_finite);
        FOR_EACH_AXIS(axis) {
            QuantizedTensor expected = take_scaled_copy(scaling, format, FORM_PLAIN, axis, rows, cols);
            QuantizedTensor copy = device_scaled(scaling, format, FORM_PLAIN, axis, rows, cols, 0);
            expected.amax = &amax;
            copy.amax = on_gpu;
            bool is_column = axis == AXIS_COLUMNWISE;
            Source input = source_tensor(tensor_to_device(in));
            cpu_quantize(is_column ? NULL : &expected, is_column ? &expected : NULL, source_tensor(in), 0);
            cuda_quantize(is_column ? NULL : &copy, is_column ? &copy : NULL, input, 0);
            check_scaled(&copy, &expected);
        }
        cuda_amax(on_gpu, tensor_rows(tensor_to_device(whole), 0, 0));
        download(&found, on_gpu, sizeof(found));
        assert_int_equal(found, 0);
        release_all();
    }
    delayed_scale = 0;
}

// Scales that are known before the values, what is clamped under them and what was seen before
// among it.
static void test_delayed(void **state) {
    (void)state;
    static const int64_t SIZES[][2] = {{1, 1},   {128, 128}, {129, 136}, {100, 257}, {33, 264},
                                       {300, 3}, {257, 128}, {2, 2056},  {40, 520},  {384, 64}};
    static const float SCALES[] = {1, 37.3f, 1000, 0x1p-20f, FLT_MAX};
    int cases = 0;
    for (size_t size = 0; size < sizeof(SIZES) / sizeof(SIZES[0]); size++) {
        int64_t rows = SIZES[size][0], cols = SIZES[size][1];
        for (int i = 0; i < 5; i++) {
            FOR_EACH_MX_FORMAT(format) for (int special = 0; special < 2; special++, cases++) {
                Format dtype = cases / 2 % 2 ? FORMAT_FP32 : FORMAT_BF16;
                int64_t stride = cols + (cases % 3 ? 0 : 8);
                const Format formats[] = {format, cases % 4 < 3 ? format : FORMAT_E5M2};
                Tensor in =
                    special ? input_with_stride(dtype, rows, cols, stride) : finite_input(dtype, rows, cols, stride);
                delayed_scale = SCALES[i];
                seen_amax = cases % 7 == 6 ? 0x42280000 : 0; // 42
                check_scaled_copies(in, SCALING_TENSOR, formats, cases / 4 % 2 ? FORM_PLAIN : FORM_DECODED,
                                    cases % 5 == 4 ? 2 : 0);
                release_all();
            }
        }
    }
    delayed_scale = 0;
    printf("    %d cases, each as both copies, as one and as square blocks\n", cases);
}

// Every code under every scale.
static void test_dequantize_every_code(void **state) {
    (void)state;
    FOR_EACH_MX_FORMAT(format) {
        QuantizedTensor q = take_quantized(format, AXIS_ROWWISE, 256, 256), device = q;
        for (int i = 0; i < 256 * 256; i++) {
            q.elements[i] = (uint8_t)i;
        }
        for (int i = 0; i < 256 * 8; i++) {
            q.scales[i] = (uint8_t)(i / 8);
        }
        device.elements = to_device(q.elements, 256 * 256);
        device.scales = to_device(q.scales, 256 * 8);
        check_dequantize(&q, &device, FORMAT_FP32, FORMAT_FP32, 0);
        check_dequantize(&q, &device, FORMAT_BF16, FORMAT_BF16, 0);
        release_all();
    }
}

static void test_convert(void **state) {
    (void)state;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        for (int kind = 0; kind < 16; kind++) {
            Format from = kind & 1 ? FORMAT_BF16 : FORMAT_FP32, to = kind & 2 ? FORMAT_BF16 : FORMAT_FP32;
            int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
            Tensor in = input_with_stride(from, rows, cols, cols + (kind & 4 ? 3 : 0));
            Tensor expected = tensor_like((Tensor){NULL, to, rows, cols, 0}, kind & 8 ? 8 : 0), out = expected;
            out.data = device_take(tensor_bytes(out));
            cpu_convert(expected, in);
            cuda_convert(out, tensor_to_device(in));
            check_same_values(out, expected);
            release_all();
        }
    }
}

static void test_transpose_codes(void **state) {
    (void)state;
    static const int64_t MORE[][2] = {{64, 64}, {16, 16}, {80, 208}, {16, 1040}, {1, 16}};
    enum { NUM_MORE = sizeof(MORE) / sizeof(MORE[0]) };
    for (int shape = 0; shape < NUM_SHAPES + NUM_MORE; shape++) {
        const int64_t *sizes = shape < NUM_SHAPES ? SHAPES[shape] : MORE[shape - NUM_SHAPES];
        int64_t rows = sizes[0], cols = sizes[1];
        QuantizedTensor described = quantized_make(NULL, FORMAT_E4M3, AXIS_ROWWISE, cols, rows, FORM_PLAIN);
        uint8_t *codes = pool_take((size_t)(rows * cols)), *expected = pool_take((size_t)(rows * cols));
        for (int64_t i = 0; i < rows * cols; i++) {
            codes[i] = expected[i % cols * rows + i / cols] = (uint8_t)((uint64_t)i * 2654435761u >> 13);
        }
        for (size_t misalignment = 0; misalignment < 2; misalignment++) {
            uint8_t *out = device_take_at((size_t)(rows * cols), misalignment);
            cuda_transpose_codes(out, to_device(codes, (size_t)(rows * cols)), rows, cols);
            check_bytes(out, expected, rows * cols, "transposed code", &described);
        }
        release_all();
    }
}

static void test_swizzle_scales(void **state) {
    (void)state;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        FOR_EACH_AXIS(axis) {
            QuantizedTensor q = quantized_make(NULL, FORMAT_E4M3, axis, SHAPES[shape][0], SHAPES[shape][1], FORM_PLAIN);
            bool rowwise = axis == AXIS_ROWWISE;
            int64_t outer = rowwise ? q.rows : q.cols, k = rowwise ? q.cols : q.rows, blocks = mx_num_blocks(k);
            int64_t bytes = mx_swizzled_scale_bytes(outer, k);
            q.scales = pool_take((size_t)(outer * blocks));
            uint8_t *expected = pool_take((size_t)bytes), *swizzled = device_take((size_t)bytes);
            memset(expected, 0, (size_t)bytes);
            for (int64_t i = 0; i < outer * blocks; i++) {
                q.scales[i] = (uint8_t)(1 + i % 255);
                int64_t o = rowwise ? i / blocks : i % outer, block = rowwise ? i % blocks : i / outer;
                expected[mx_swizzled_scale_offset(o, block, k)] = q.scales[i];
            }
            q.scales = to_device(q.scales, (size_t)(outer * blocks));
            cuda_swizzle_scales(swizzled, &q, q.axis);
            check_bytes(swizzled, expected, bytes, "swizzled byte", &q);
            release_all();
        }
    }
}

// Compares NVFP4's scales with what cuBLASLt wants.
static void check_tiles(const QuantizedTensor *q, const QuantizedTensor *device, Axis along) {
    bool rowwise = along == AXIS_ROWWISE;
    int64_t outer_count = rowwise ? q->rows : q->cols, blocks = ((rowwise ? q->cols : q->rows) + 15) / 16;
    int64_t bytes = (outer_count + 127) / 128 * ((blocks + 3) / 4) * 512;
    assert_int_equal(scaling_swizzled_bytes(q->scaling, outer_count, rowwise ? q->cols : q->rows), bytes);
    uint8_t *expected = pool_take((size_t)bytes), *tiles = device_take((size_t)bytes);
    memset(expected, 0, (size_t)bytes);
    for (int64_t outer = 0; outer < outer_count; outer++) {
        for (int64_t block = 0; block < blocks; block++) {
            int64_t across = (q->cols + 15) / 16;
            int64_t at = q->axis == AXIS_ROWWISE      ? outer * across + block
                         : q->axis == AXIS_COLUMNWISE ? block * q->cols + outer
                         : rowwise                    ? outer / 16 * across + block
                                                      : block * across + outer / 16;
            expected[tiled_offset(outer, block, blocks)] = q->scales[at];
        }
    }
    cuda_swizzle_scales(tiles, device, along);
    check_bytes(tiles, expected, bytes, "byte of NVFP4's tiles", q);
}

static void test_swizzle_nvfp4_scales(void **state) {
    (void)state;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_SQUARE; axis++) {
            int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
            QuantizedTensor q = quantized_make(NULL, FORMAT_E2M1, axis, rows, cols, FORM_PLAIN), device = q;
            q.scaling = device.scaling = shape % 2 ? SCALING_NVFP4 : SCALING_NVFP4_46;
            int64_t count =
                (axis == AXIS_ROWWISE ? rows : (rows + 15) / 16) * (axis == AXIS_COLUMNWISE ? cols : (cols + 15) / 16);
            q.scales = pool_take((size_t)count);
            for (int64_t i = 0; i < count; i++) {
                q.scales[i] = (uint8_t)(1 + i * 7 % 126);
            }
            device.scales = to_device(q.scales, (size_t)count);
            if (axis != AXIS_COLUMNWISE) check_tiles(&q, &device, AXIS_ROWWISE);
            if (axis != AXIS_ROWWISE) check_tiles(&q, &device, AXIS_COLUMNWISE);
            release_all();
        }
    }
}

// Of two codes in a byte the first is the lower half, as in CUDA's __nv_fp4x2_e2m1.
static void test_pack_codes(void **state) {
    (void)state;
    static const int64_t SIZES[][2] = {{16, 32}, {32, 32}, {64, 64}, {80, 96}, {48, 1056}, {208, 4128}, {1040, 160}};
    for (size_t i = 0; i < COUNT(SIZES); i++) {
        FOR_EACH_AXIS(along) {
            bool rowwise = along == AXIS_ROWWISE;
            int64_t outer_count = SIZES[i][0], K = SIZES[i][1], bytes = outer_count * K / 2;
            int64_t rows = rowwise ? outer_count : K, cols = rowwise ? K : outer_count;
            QuantizedTensor q = quantized_make(NULL, FORMAT_E2M1, along, rows, cols, FORM_PLAIN);
            uint8_t *codes = pool_take((size_t)(rows * cols)), *expected = pool_take((size_t)bytes);
            for (int64_t j = 0; j < rows * cols; j++) {
                codes[j] = (uint8_t)((uint64_t)j * 2654435761u >> 13 & 15);
            }
            for (int64_t j = 0; j < bytes; j++) {
                int64_t outer = 2 * j / K, k = 2 * j % K, apart = rowwise ? 1 : cols;
                const uint8_t *first = codes + (rowwise ? outer * cols + k : k * cols + outer);
                expected[j] = (uint8_t)(first[0] | first[apart] << 4);
            }
            q.elements = to_device(codes, (size_t)(rows * cols));
            uint8_t *out = device_take((size_t)bytes);
            cuda_pack_codes(out, &q, along);
            check_bytes(out, expected, bytes, "byte of packed codes", &q);
            release_all();
        }
    }
}

// Scales of blocks of 128 where cuBLAS's manual wants them, those of 128x128 with 0 between. The
// transpose of a columnwise copy has its rows along K.
static void test_arrange_scales(void **state) {
    (void)state;
    static const int64_t MORE[][2] = {{640, 400}, {128, 128}, {129, 1025}, {16, 2048}};
    enum { NUM_MORE = sizeof(MORE) / sizeof(MORE[0]) };
    for (int shape = 0; shape < NUM_SHAPES + NUM_MORE; shape++) {
        const int64_t *sizes = shape < NUM_SHAPES ? SHAPES[shape] : MORE[shape - NUM_SHAPES];
        for (int i = 0; i < 4; i++) {
            Axis along = i % 2 ? AXIS_COLUMNWISE : AXIS_ROWWISE, axis = i < 2 ? along : AXIS_SQUARE;
            QuantizedTensor q = quantized_make(NULL, FORMAT_E4M3, axis, sizes[0], sizes[1], FORM_PLAIN);
            q.scaling = SCALING_BLOCK128_FP32;
            int64_t outer = along == AXIS_ROWWISE ? q.rows : q.cols, K = along == AXIS_ROWWISE ? q.cols : q.rows;
            int64_t L = (K + 127) / 128, L4 = (L + 3) / 4 * 4, high = i < 2 ? outer : (outer + 127) / 128;
            int64_t count = i < 2 ? outer * L : L4 * high;
            float *scales = take_floats(high * L), *expected = take_floats(count);
            memset(expected, 0, (size_t)count * sizeof(float));
            for (int64_t o = 0; o < high; o++) {
                for (int64_t block = 0; block < L; block++) {
                    float scale = (float)(1 + o * L + block) / 3;
                    scales[along == AXIS_ROWWISE ? o * L + block : block * high + o] = scale;
                    expected[index_of_128(i >= 2, i < 2 ? o : 128 * o, block, outer, K)] = scale;
                }
            }
            assert_int_equal(count, scaling_num_gemm_scales(outer, K, i >= 2));
            q.scales = to_device(scales, (size_t)(high * L) * sizeof(float));
            uint8_t *arranged = device_take((size_t)count * sizeof(float));
            cuda_arrange_scales((float *)arranged, &q, along);
            check_bytes(arranged, (uint8_t *)expected, count * (int64_t)sizeof(float), "byte of a scale", &q);
            release_all();
        }
    }
}

// Returns an operand of blocks of 128 with FP32 scales, K along its rows or columns, on the GPU
// that there is, and its scales, (outer, blocks of K) in `scales`.
static Operand operand_of_128(float **scales, int64_t outer, int64_t K, bool k_along_rows, bool is_square) {
    Axis axis = is_square ? AXIS_SQUARE : k_along_rows ? AXIS_ROWWISE : AXIS_COLUMNWISE;
    QuantizedTensor q =
        quantized_make(NULL, FORMAT_E4M3, axis, k_along_rows ? outer : K, k_along_rows ? K : outer, FORM_PLAIN);
    int64_t blocks = (K + 127) / 128, high = is_square ? (outer + 127) / 128 : outer;
    float *kept = take_floats(high * blocks);
    *scales = take_floats(outer * blocks);
    for (int64_t i = 0; i < outer * blocks; i++) {
        int64_t o = is_square ? i / blocks / 128 : i / blocks, block = i % blocks;
        (*scales)[i] = (float)(1 + o * blocks + block) / 3;
        kept[k_along_rows ? o * blocks + block : block * high + o] = (*scales)[i];
    }
    q.scaling = SCALING_BLOCK128_FP32;
    q.scales = to_device(kept, (size_t)(high * blocks) * sizeof(float));
    return operand_quantized(q);
}

// A product of one block of K, of rows of a GEMM from the first or a later one on, times both
// operands' scales, of every layout, and where one of them has none.
static void test_add_block_product(void **state) {
    (void)state;
    enum { K = 300, LATER = 128, MOST = 300 };
    static const int64_t SIZES[][2] = {{1, 1}, {40, 130}, {MOST - LATER, 257}};
    for (int i = 0; i < 3 * 2 * 3 * 64; i++) {
        int64_t rows = SIZES[i % 3][0], cols = SIZES[i % 3][1], first = i / 3 % 2 * LATER, block = i / 6 % 3;
        int kind = i / 18;
        GemmOptions o = {.transpose_a = kind & 1, .transpose_b = kind & 2};
        bool a_has_none = (kind & 48) == 16, b_has_none = (kind & 48) == 32;
        float *a_scales, *b_scales, *x = take_floats(rows * cols), *sum = take_floats(rows * cols);
        Operand a = operand_of_128(&a_scales, MOST, K, !o.transpose_a, kind & 4);
        Operand b = operand_of_128(&b_scales, cols, K, o.transpose_b, kind & 8);
        if (a_has_none) a.quantized.scaling = SCALING_BLOCK128;
        if (b_has_none) b = operand_tensor(tensor_make(NULL, FORMAT_BF16, 0, 0));
        fill_floats(x, rows * cols, 1);
        fill_floats(sum, rows * cols, 1);
        size_t bytes = (size_t)(rows * cols) * sizeof(float);
        Tensor product = tensor_make(to_device(x, bytes), FORMAT_FP32, rows, cols);
        Tensor out = tensor_make(to_device(sum, bytes), FORMAT_FP32, rows, cols);
        cuda_add_block_product(out, product, a, b, o, first, block * 128);
        for (int64_t j = 0; j < rows * cols; j++) {
            float of_row = a_has_none ? 1 : a_scales[(first + j / cols) * 3 + block];
            float of_col = b_has_none ? 1 : b_scales[j % cols * 3 + block];
            sum[j] = fmaf(x[j], of_row * of_col, sum[j]);
        }
        check_bytes(out.data, (uint8_t *)sum, (int64_t)bytes, "byte of a sum", &a.quantized);
        release_all();
    }
}

// -------------------------------------------------------------------------------------------------
// Sources: what is made as it is read, against the operation that makes it

typedef enum { NOWHERE, ELSEWHERE, OVER_DOUT, NUM_STORES } Store; // where what is made is stored

typedef struct {
    SourceKind kind;
    Activation activation;
    NormKind norm;
    bool without_weight, without_bias; // of a norm
    Format dtype;                      // of x
    int64_t rows, cols, padding;
    size_t misalignment; // of vectors and copies, in bytes: 0 or 4
    Format formats[2];   // of the copies by axis, and
    Scaling scalings[2];
    QuantizedForm forms[2];
    bool wanted[2];
    ScaleRounding rounding;
    Store store;
    Format stored_dtype;
} SourceCase;

static float *device_floats(const float *host, int64_t count, size_t misalignment) {
    return to_device_at(host, (size_t)count * sizeof(float), misalignment);
}

static float *random_device_floats(int64_t count, bool positive, size_t misalignment) {
    float *values = take_floats(count);
    fill_floats(values, count, 1);
    for (int64_t i = 0; i < count && positive; i++) {
        values[i] *= values[i];
    }
    return device_floats(values, count, misalignment);
}

static Tensor device_tensor_like(Tensor t, Format dtype) {
    t.dtype = dtype;
    t.data = device_take(tensor_bytes(t));
    return t;
}

static Tensor source_input(const SourceCase *c, int64_t cols, bool special) {
    if (special) return tensor_to_device(input_with_stride(c->dtype, c->rows, cols, cols + c->padding));
    Tensor t = tensor_like((Tensor){NULL, c->dtype, c->rows, cols, 0}, c->padding);
    uint64_t stream = next_stream();
    for (int64_t i = 0; i < c->rows * cols; i++) {
        tensor_set(t, i / cols, i % cols, 2 * random_normal(1, stream, (uint64_t)i));
    }
    return tensor_to_device(t);
}

// Returns a source with its inputs on the device. `made` gets what the operation itself makes of
// them.
static Source make_source(const SourceCase *c, Tensor *made) {
    size_t shift = c->misalignment;
    bool is_wide = c->kind == SOURCE_ACTIVATION && c->activation == ACTIVATION_SWIGLU;
    bool is_scaled = c->scalings[0] != SCALING_MX || c->scalings[1] != SCALING_MX;
    bool special = c->kind != SOURCE_LAYERNORM && c->rows % (is_scaled ? 4 : 2) == 1;
    Source source = source_tensor(source_input(c, is_wide ? 2 * c->cols : c->cols, special));
    source.kind = c->kind;
    source.activation = c->activation;
    Tensor like_made = tensor_make(NULL, c->dtype, c->rows, c->cols);
    like_made.stride += c->padding;
    *made = device_tensor_like(like_made, c->dtype);
    if (c->kind == SOURCE_LAYERNORM) {
        size_t bytes = (size_t)c->rows * sizeof(float);
        source.norm = (NormParams){
            .kind = c->norm,
            .eps = NORM_EPS,
            .mean = c->norm == NORM_RMSNORM ? NULL : device_take(bytes),
            .rstd = device_take(bytes),
            .weight = c->without_weight ? NULL : random_device_floats(c->cols, false, shift),
            .bias = c->without_bias ? NULL : random_device_floats(c->cols, false, shift),
        };
        cuda_layernorm_forward(*made, (Tensor){0}, source.x, (Tensor){0}, source.norm);
    } else if (c->kind == SOURCE_ACTIVATION) {
        cuda_activation_forward(*made, source.x, source.activation);
    } else {
        source.dout = source_input(c, c->cols, false);
        cuda_activation_backward(*made, NULL, source.dout, source.x, source.activation);
    }
    if (c->store == ELSEWHERE) source.stored = device_tensor_like(like_made, c->stored_dtype);
    if (c->store == OVER_DOUT) source.stored = source.dout;
    return source;
}

static void check_source(const SourceCase *c) {
    Tensor made, expected_stored;
    QuantizedTensor expected[2], copies[2];
    Source source = make_source(c, &made);
    Tensor host_made = tensor_to_host(made);
    FOR_EACH_AXIS(axis) {
        Scaling scaling = c->scalings[axis];
        Format format = c->formats[axis];
        bool is_mx = scaling == SCALING_MX;
        QuantizedForm form = c->forms[axis] == FORM_TRANSPOSED ? FORM_PLAIN : c->forms[axis]; // as the CPU makes it
        expected[axis] = is_mx ? take_quantized(format, axis, c->rows, c->cols)
                               : take_scaled_copy(scaling, format, form, axis, c->rows, c->cols);
        copies[axis] = is_mx ? device_quantized(format, c->forms[axis], axis, c->rows, c->cols, c->misalignment)
                             : device_scaled(scaling, format, c->forms[axis], axis, c->rows, c->cols, c->misalignment);
    }
    cpu_quantize(&expected[0], &expected[1], source_tensor(host_made), c->rounding);
    cuda_quantize(c->wanted[0] ? &copies[0] : NULL, c->wanted[1] ? &copies[1] : NULL, source, c->rounding);
    if (c->forms[1] == FORM_TRANSPOSED) expected[1] = as_transposed(&expected[1]);
    FOR_EACH_AXIS(axis) {
        if (!c->wanted[axis]) continue;
        if (c->scalings[axis] == SCALING_MX) check_quantized(&copies[axis], &expected[axis]);
        if (c->scalings[axis] != SCALING_MX) check_scaled(&copies[axis], &expected[axis]);
    }
    if (source.stored.data) {
        expected_stored = tensor_like(source.stored, c->padding);
        cpu_convert(expected_stored, host_made);
        check_same_values(source.stored, expected_stored);
    }
    release_all();
}

static const struct {
    const char *name;
    SourceKind kind;
    Activation activation;
} SOURCES[] = {{"norm", SOURCE_LAYERNORM, ACTIVATION_GELU},
               {"gelu", SOURCE_ACTIVATION, ACTIVATION_GELU},
               {"relu", SOURCE_ACTIVATION, ACTIVATION_RELU},
               {"relu2", SOURCE_ACTIVATION, ACTIVATION_RELU2},
               {"exact gelu", SOURCE_ACTIVATION, ACTIVATION_GELU_EXACT},
               {"swiglu", SOURCE_ACTIVATION, ACTIVATION_SWIGLU},
               {"gelu's gradient", SOURCE_ACTIVATION_BACKWARD, ACTIVATION_GELU},
               {"exact gelu's", SOURCE_ACTIVATION_BACKWARD, ACTIVATION_GELU_EXACT},
               {"relu's", SOURCE_ACTIVATION_BACKWARD, ACTIVATION_RELU},
               {"relu2's", SOURCE_ACTIVATION_BACKWARD, ACTIVATION_RELU2}};
enum { NUM_SOURCES = sizeof(SOURCES) / sizeof(SOURCES[0]) };

// Every source, dtype, format, form and axis, with what is left to choose taking turns.
static void test_sources(void **state) {
    (void)state;
    static const int64_t SIZES[][2] = {{1, 8},   {33, 64},  {65, 264}, {7, 520},  {130, 304},
                                       {31, 33}, {34, 257}, {300, 3},  {129, 96}, {32, 1032}};
    static const bool WANTED[][2] = {{true, true}, {true, true}, {true, false}, {false, true}, {false, false}};
    enum { NUM_SIZES = sizeof(SIZES) / sizeof(SIZES[0]) };
    unsigned turn = 0;
    for (int s = 0; s < NUM_SOURCES; s++) {
        SourceKind kind = SOURCES[s].kind;
        int cases = 0;
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            for (int size = 0; size < NUM_SIZES; size++) {
                FOR_EACH_MX_FORMAT(format) for (int form = 0; form < 3; form++) {
                    uint32_t random[4];
                    philox(random, 5, 0, turn++);
                    SourceCase c = {.kind = kind,
                                    .activation = SOURCES[s].activation,
                                    .norm = random[3] >> 8 & 1 ? NORM_RMSNORM : NORM_LAYERNORM,
                                    .without_weight = random[3] >> 9 & 1,
                                    .without_bias = random[3] >> 10 & 1,
                                    .dtype = dtype,
                                    .rows = SIZES[size][0],
                                    .cols = SIZES[size][1],
                                    .padding = (int64_t[]){0, 8, 0, 3}[random[0] % 4],
                                    .misalignment = random[0] >> 8 & 7 ? 0 : 4,
                                    .formats = {format, random[0] >> 12 & 3 ? format : FORMAT_E5M2},
                                    .forms = {(QuantizedForm)form, (QuantizedForm)((form + random[1]) % 3)},
                                    .rounding = (ScaleRounding)(random[1] >> 8 & 3),
                                    .store = (Store)((random[2] & 0xFF) % NUM_STORES),
                                    .stored_dtype = dtype == FORMAT_FP32 && random[3] & 1 ? FORMAT_FP32 : FORMAT_BF16};
                    if (kind != SOURCE_ACTIVATION_BACKWARD && c.store == OVER_DOUT) c.store = ELSEWHERE;
                    memcpy(c.wanted, WANTED[(random[2] >> 8) % 5], sizeof(c.wanted));
                    check_source(&c);
                    cases++;
                }
            }
        }
        printf("    %-16s %d cases\n", SOURCES[s].name, cases);
    }
}

// Every source under every pair of scalings, MX among them.
static void check_scaled_sources(void) {
    static const int64_t SIZES[][2] = {{65, 264}, {130, 304}, {31, 33}, {33, 64}, {128, 136}, {34, 257}};
    unsigned turn = 0;
    for (int s = 0; s < NUM_SOURCES; s++) {
        SourceKind kind = SOURCES[s].kind;
        for (int pair = 0; pair < (NUM_SCALED + 1) * (NUM_SCALED + 1); pair++) {
            uint32_t random[4];
            philox(random, 8, 0, turn++);
            int of_row = pair % (NUM_SCALED + 1), of_column = pair / (NUM_SCALED + 1);
            SourceCase c = {.kind = kind,
                            .activation = SOURCES[s].activation,
                            .dtype = random[0] & 3 ? FORMAT_BF16 : FORMAT_FP32,
                            .rows = SIZES[turn % 6][0],
                            .cols = SIZES[turn % 6][1],
                            .padding = random[0] >> 4 & 1 ? 8 : 0,
                            .misalignment = random[0] >> 8 & 7 ? 0 : 4,
                            .forms = {FORM_DECODED, FORM_PLAIN},
                            .scalings = {of_row ? SCALINGS[of_row - 1] : SCALING_MX,
                                         of_column ? SCALINGS[of_column - 1] : SCALING_MX},
                            .wanted = {true, true},
                            .store = (Store)(random[2] % NUM_STORES),
                            .stored_dtype = FORMAT_BF16};
            for (int i = 0; i < 2; i++) {
                Format fp8 = random[3] >> i & 1 ? FORMAT_E4M3 : FORMAT_E5M2;
                c.formats[i] = scaling_is_nvfp4(c.scalings[i]) ? FORMAT_E2M1 : fp8;
            }
            if (c.scalings[0] == SCALING_BLOCK128_FP32) c.forms[0] = FORM_PLAIN;
            if (of_column && random[1] & 1) c.forms[1] = FORM_TRANSPOSED;
            if (kind != SOURCE_ACTIVATION_BACKWARD && c.store == OVER_DOUT) c.store = ELSEWHERE;
            check_source(&c);
        }
    }
    printf("    %u cases\n", turn);
}

static void test_scaled_sources(void **state) {
    (void)state;
    check_scaled_sources();
    delayed_scale = 37.3f;
    check_scaled_sources();
    delayed_scale = 0;
}

static float *copy_on_device(const float *device, int64_t count, size_t misalignment) {
    float *host = take_floats(count);
    download(host, device, (size_t)count * sizeof(float));
    return device_floats(host, count, misalignment);
}

static void check_same_device_floats(const float *a, const float *b, int64_t count) {
    float *host[2] = {take_floats(count), take_floats(count)};
    download(host[0], a, (size_t)count * sizeof(float));
    download(host[1], b, (size_t)count * sizeof(float));
    check_same_floats(host[0], host[1], count);
}

// The sums of columns that come with quantizing a tensor, or an activation's gradient, against
// double precision; by both kernels, with whole and cut tiles, added to what is there.
static void check_sums(SourceKind kind, Format dtype, int64_t rows, int64_t cols, Scaling scaling, Check *check) {
    SourceCase c = {.kind = kind, .dtype = dtype, .rows = rows, .cols = cols, .activation = ACTIVATION_GELU};
    Tensor x = source_input(&c, cols, false), made = device_tensor_like(x, dtype);
    Source source = source_tensor(x);
    source.kind = kind;
    if (kind == SOURCE_ACTIVATION_BACKWARD) {
        source.dout = source_input(&c, cols, false);
        cuda_activation_backward(made, NULL, source.dout, x, source.activation);
    }
    Tensor values = tensor_to_host(kind == SOURCE_TENSOR ? x : made);
    float *before = take_floats(cols), *after = take_floats(cols);
    fill_floats(before, cols, 1);
    source.sums = device_floats(before, cols, 0);
    size_t bytes = cuda_reduction_workspace(rows, cols);
    cuda_use_workspace(device_take(bytes), bytes);
    QuantizedTensor copies[2];
    Format format = scaling_is_nvfp4(scaling) ? FORMAT_E2M1 : FORMAT_E4M3;
    QuantizedForm form = scaling == SCALING_BLOCK128_FP32 ? FORM_PLAIN : FORM_DECODED;
    FOR_EACH_AXIS(axis) copies[axis] = device_scaled(scaling, format, form, axis, rows, cols, 0);
    cuda_quantize(&copies[0], &copies[1], source, SCALE_RCEIL);
    download(after, source.sums, (size_t)cols * sizeof(float));
    for (int64_t col = 0; col < cols; col++) {
        double sum = before[col], magnitude = fabs(sum);
        for (int64_t row = 0; row < rows; row++) {
            double value = tensor_get(values, row, col);
            sum += value;
            magnitude += fabs(value);
        }
        check_value(check, after[col], sum, sum_error(rows) * magnitude);
    }
    release_all();
}

static void test_sums(void **state) {
    (void)state;
    static const int64_t SIZES[][2] = {{1, 8}, {33, 64}, {65, 264}, {31, 33}, {1000, 40}, {300, 3}};
    for (size_t size = 0; size < sizeof(SIZES) / sizeof(SIZES[0]); size++) {
        int64_t rows = SIZES[size][0], cols = SIZES[size][1];
        Check check = {0};
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            for (Scaling scaling = SCALING_MX; scaling < NUM_SCALINGS; scaling++) {
                check_sums(SOURCE_TENSOR, dtype, rows, cols, scaling, &check);
                check_sums(SOURCE_ACTIVATION_BACKWARD, dtype, rows, cols, scaling, &check);
            }
        }
        check_end(&check, "sums of columns of (%lld, %lld)", (long long)rows, (long long)cols);
    }
}

// An update with copies against one without, on the device, quantized by the CPU.
static void check_adamw(int64_t rows, int64_t cols, const QuantizedTensor copies[2], ScaleRounding rounding,
                        bool with_bf16, size_t shift) {
    int64_t count = rows * cols;
    AdamWUpdate update = {.master = random_device_floats(count, false, shift),
                          .moment1 = random_device_floats(count, false, shift),
                          .moment2 = random_device_floats(count, true, shift),
                          .gradient = random_device_floats(count, false, shift),
                          .rows = rows,
                          .cols = cols,
                          .factors = {.beta1 = 0.9f,
                                      .beta2 = 0.95f,
                                      .eps = 1e-8f,
                                      .gradient_scale = 0.7f,
                                      .decay = 0.9999f,
                                      .step_size = 4e-3f,
                                      .root2 = 2.6f},
                          .rowwise = copies[0],
                          .columnwise = copies[1],
                          .rounding = rounding,
                          .bf16 = with_bf16 ? device_take((size_t)count * 2) : NULL};
    AdamWUpdate plain = {.master = copy_on_device(update.master, count, 0),
                         .moment1 = copy_on_device(update.moment1, count, 0),
                         .moment2 = copy_on_device(update.moment2, count, 0),
                         .gradient = update.gradient,
                         .rows = rows,
                         .cols = cols,
                         .factors = update.factors};
    cuda_adamw(plain);
    cuda_adamw(update);
    check_same_device_floats(update.master, plain.master, count);
    check_same_device_floats(update.moment1, plain.moment1, count);
    check_same_device_floats(update.moment2, plain.moment2, count);
    Tensor masters = tensor_to_host(tensor_make(plain.master, FORMAT_FP32, rows, cols));
    for (int i = 0; i < 2; i++) {
        if (!copies[i].elements) continue;
        QuantizedTensor expected = take_quantized(copies[i].format, copies[i].axis, rows, cols);
        bool rowwise = copies[i].axis != AXIS_COLUMNWISE;
        cpu_quantize(rowwise ? &expected : NULL, rowwise ? NULL : &expected, source_tensor(masters), rounding);
        check_quantized(&copies[i], &expected);
    }
    if (!with_bf16) return;
    Tensor expected = tensor_like(tensor_make(NULL, FORMAT_BF16, rows, cols), 0);
    cpu_convert(expected, masters);
    check_same_values(tensor_make(update.bf16, FORMAT_BF16, rows, cols), expected);
}

// Every format and form, with one copy, both or a square one, a BF16 copy or none, aligned or not.
static void test_adamw(void **state) {
    (void)state;
    static const int64_t SIZES[][2] = {{1, 8},   {33, 64},  {65, 264}, {7, 520},  {130, 304},
                                       {31, 33}, {34, 257}, {300, 3},  {129, 96}, {32, 1032}};
    unsigned turn = 0;
    for (size_t size = 0; size < sizeof(SIZES) / sizeof(SIZES[0]); size++) {
        FOR_EACH_MX_FORMAT(format) for (int form = 0; form < 3; form++) {
            int64_t rows = SIZES[size][0], cols = SIZES[size][1];
            uint32_t random[4];
            philox(random, 6, 0, turn++);
            size_t shift = random[0] & 7 ? 0 : 4;
            Format other = random[0] >> 8 & 3 ? format : FORMAT_E5M2;
            QuantizedForm other_form = (QuantizedForm)((form + random[1]) % 3);
            QuantizedTensor copies[2] = {0};
            int kind = (int)(random[2] % 4); // rowwise, columnwise, both, square
            if (kind == 0 || kind == 2) {
                copies[0] = device_quantized(format, (QuantizedForm)form, AXIS_ROWWISE, rows, cols, shift);
            }
            if (kind == 1 || kind == 2) {
                copies[1] = device_quantized(other, other_form, AXIS_COLUMNWISE, rows, cols, shift);
            }
            if (kind == 3) copies[0] = device_quantized(format, FORM_PLAIN, AXIS_SQUARE, rows, cols, shift);
            check_adamw(rows, cols, copies, (ScaleRounding)(random[1] >> 8 & 3), random[3] & 1, shift);
            release_all();
        }
        const QuantizedTensor none[2] = {0};
        check_adamw(SIZES[size][0], SIZES[size][1], none, SCALE_RCEIL, true, 0);
        release_all();
    }
}

// Counts are the same. Sums of n squares, each rounded once or not at all, are added in another
// order.
static void check_copy_stats(Tensor in, QuantizedTensor copy, ScaleRounding rounding, Check *check) {
    QuantStats expected = {0}, stats = {0}, again;
    Tensor input = tensor_to_device(in);
    cpu_quantize_stats(&expected, in, &copy, rounding);
    cuda_quantize_stats(&stats, input, &copy, rounding);
    assert_int_equal(stats.elements, expected.elements);
    assert_int_equal(stats.clamped, expected.clamped);
    assert_int_equal(stats.at_max, expected.at_max);
    assert_int_equal(stats.flushed, expected.flushed);
    assert_int_equal(stats.blocks, expected.blocks);
    assert_int_equal(stats.blocks_unlike_rceil, expected.blocks_unlike_rceil);
    assert_true(stats.amax == expected.amax || (isnan(stats.amax) && isnan(expected.amax)));
    if (isfinite(expected.signal) && isfinite(expected.noise)) {
        double additions = (double)stats.elements * 0x1p-52;
        check_value(check, stats.signal, expected.signal, additions * expected.signal);
        check_value(check, stats.noise, expected.noise, additions * expected.noise);
    } else {
        assert_true(isnan(stats.signal) == isnan(expected.signal) && !isfinite(stats.noise));
    }
    again = stats; // is added to
    cuda_quantize_stats(&again, input, &copy, rounding);
    assert_int_equal(again.elements, 2 * stats.elements);
    assert_int_equal(again.flushed, 2 * stats.flushed);
    assert_true(again.signal == 2 * stats.signal || isnan(stats.signal));
}

static void check_stats(Tensor in, Axis axis, Format format, ScaleRounding rounding, Check *check) {
    check_copy_stats(in, quantized_make(NULL, format, axis, in.rows, in.cols, FORM_PLAIN), rounding, check);
}

// Of other scalings, rounded to nearest and stochastically.
static void test_scaled_stats(void **state) {
    (void)state;
    Check check = {0};
    for (int i = 0; i < 2 * 3 * NUM_SCALED; i++) {
        Scaling scaling = SCALINGS[i / 6];
        QuantizedTensor copy = quantized_make(NULL, scaling_is_nvfp4(scaling) ? FORMAT_E2M1 : FORMAT_E4M3,
                                              (Axis)(i % 3), 0, 0, FORM_PLAIN);
        copy.scaling = scaling;
        if (i / 3 % 2) copy.encoding = (Encoding){ROUND_STOCHASTIC, 0.75f, 7, {3, 5, 11}};
        check_copy_stats(finite_input(i % 2 ? FORMAT_BF16 : FORMAT_FP32, 300, 264, 264), copy, 0, &check);
        check_copy_stats(input_with_stride(FORMAT_FP32, 33, 130, 132), copy, 0, &check);
        release_all();
    }
    check_end(&check, "signal and noise");
}

static void test_quantize_stats(void **state) {
    (void)state;
    Check check = {0};
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        int64_t rows = SHAPES[shape][0], cols = SHAPES[shape][1];
        FOR_EACH_MX_FORMAT(format) FOR_EACH_AXIS(axis) {
            ScaleRounding rounding = (ScaleRounding)(cases++ % NUM_SCALE_ROUNDINGS);
            Tensor plain = random_tensor(cases % 2 ? FORMAT_BF16 : FORMAT_FP32, rows, cols, 1);
            tensor_set(plain, rows / 2, cols / 2, 0x1p-40);
            check_stats(plain, axis, format, rounding, &check);
            check_stats(input_with_stride(FORMAT_FP32, rows, cols, cols), axis, format, rounding, &check);
            release_all();
        }
    }
    check_end(&check, "signal and noise");
}

// Square blocks: quantized, decoded, as either axis' swizzled scales, and counted.
static void check_square(Tensor in, Format format, ScaleRounding rounding, size_t misalignment) {
    int64_t rows = in.rows, cols = in.cols;
    QuantizedTensor expected = take_quantized(format, AXIS_SQUARE, rows, cols);
    cpu_quantize(&expected, NULL, source_tensor(in), rounding);
    Tensor input = tensor_to_device(in);
    for (QuantizedForm form = FORM_PLAIN; form <= FORM_DECODED; form += FORM_DECODED - FORM_PLAIN) {
        QuantizedTensor q = device_quantized(format, form, AXIS_SQUARE, rows, cols, misalignment);
        cuda_quantize(&q, NULL, source_tensor(input), rounding);
        check_quantized(&q, &expected);
        if (form == FORM_DECODED) continue;
        check_dequantize(&expected, &q, FORMAT_BF16, FORMAT_BF16, 0);
        FOR_EACH_AXIS(along) {
            bool rowwise = along == AXIS_ROWWISE;
            int64_t outer = rowwise ? rows : cols, k = rowwise ? cols : rows, bytes = mx_swizzled_scale_bytes(outer, k);
            uint8_t *wanted = pool_take((size_t)bytes), *swizzled = device_take((size_t)bytes);
            memset(wanted, 0, (size_t)bytes);
            for (int64_t i = 0; i < outer * mx_num_blocks(k); i++) {
                int64_t o = i % outer, block = i / outer;
                int64_t row_block = rowwise ? o / MX_BLOCK : block, col_block = rowwise ? block : o / MX_BLOCK;
                wanted[mx_swizzled_scale_offset(o, block, k)] =
                    expected.scales[row_block * mx_num_blocks(cols) + col_block];
            }
            cuda_swizzle_scales(swizzled, &q, along);
            check_bytes(swizzled, wanted, bytes, "swizzled byte of square blocks", &expected);
        }
    }
}

static void test_square(void **state) {
    (void)state;
    Check check = {0};
    int cases = 0;
    for (int shape = 0; shape < NUM_SHAPES; shape++) {
        for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
            FOR_EACH_MX_FORMAT(format) {
                ScaleRounding rounding = (ScaleRounding)(cases++ % NUM_SCALE_ROUNDINGS);
                Tensor in = input_with_stride(dtype, SHAPES[shape][0], SHAPES[shape][1], SHAPES[shape][1]);
                check_square(in, format, rounding, cases % 4 == 0 ? 2 : 0);
                if (shape < 6)
                    check_stats(random_tensor(dtype, in.rows, in.cols, 1), AXIS_SQUARE, format, rounding, &check);
                release_all();
            }
        }
    }
    check_end(&check, "statistics of square blocks");
    printf("    %d cases\n", cases);
}

// Everything that quantizes, of one shape and format. `turn`: what else takes turns.
static void check_encoding(int64_t rows, int64_t cols, Format format, unsigned turn) {
    Format dtype = turn % 2 ? FORMAT_BF16 : FORMAT_FP32;
    Tensor special = input_with_stride(dtype, rows, cols, cols + (turn % 3 ? 0 : 8));
    Tensor finite = finite_input(dtype, rows, cols, cols);
    QuantizedForm forms[2] = {(QuantizedForm)(turn % 3), (QuantizedForm)(turn / 3 % 3)};
    ScaleRounding rounding = (ScaleRounding)(turn % NUM_SCALE_ROUNDINGS);
    size_t misalignment = turn % 5 == 4 ? 2 : 0;
    check_quantize_forms(turn % 2 ? special : finite, format, turn % 4 ? format : FORMAT_E5M2, forms, rounding,
                         misalignment);
    check_square(turn % 2 ? finite : special, format, rounding, misalignment);
    release_all();
    for (int i = 0; i < NUM_SCALED; i++) {
        const Format formats[] = {format, format};
        if (scaling_is_nvfp4(SCALINGS[i]) && format != FORMAT_E2M1) continue;
        Tensor in = finite_input(dtype, rows, cols, cols);
        delayed_scale = turn % 3 == 2 ? 37.3f : 0;
        bool is_plain = SCALINGS[i] == SCALING_BLOCK128_FP32 || (turn + i) % 2;
        check_scaled_copies(in, SCALINGS[i], formats, is_plain ? FORM_PLAIN : FORM_DECODED, misalignment);
        delayed_scale = 0;
        release_all();
    }
    QuantizedTensor copies[2] = {
        device_quantized(format, forms[0], AXIS_ROWWISE, rows, cols, 0),
        device_quantized(format, forms[1], AXIS_COLUMNWISE, rows, cols, 0),
    };
    check_adamw(rows, cols, copies, rounding, turn % 2, 0);
    release_all();
}

// Elements that are rounded stochastically, that have a prescale, or both.
static void test_encodings(void **state) {
    (void)state;
    static const int64_t SIZES[][2] = {{1, 1}, {32, 64}, {33, 257}, {129, 136}, {40, 520}, {130, 300}};
    const DrawPlace at = {.seed = 0x123456789ABCDEF0u, .step = 5, .first_row = 3 * 1024};
    unsigned turn = 0;
    for (int kind = 0; kind < 3; kind++) {
        encoding = (Encoding){kind == 0 ? ROUND_NEAREST : ROUND_STOCHASTIC, kind == 1 ? 0 : 0.75f, 77, at};
        for (size_t size = 0; size < sizeof(SIZES) / sizeof(SIZES[0]); size++) {
            FOR_EACH_MX_FORMAT(format) check_encoding(SIZES[size][0], SIZES[size][1], format, turn++);
        }
    }
    encoding = (Encoding){0};
    printf("    %u cases\n", turn);
}

// Nothing to do, nothing touched.
static void test_empty(void **state) {
    (void)state;
    static const int64_t EMPTY[][2] = {{0, 64}, {64, 0}, {0, 0}};
    for (int i = 0; i < 3; i++) {
        Tensor t = tensor_make(device_take(64), FORMAT_BF16, EMPTY[i][0], EMPTY[i][1]);
        QuantizedTensor q = device_quantized(FORMAT_E4M3, FORM_PLAIN, AXIS_ROWWISE, t.rows, t.cols, 0);
        QuantStats stats = {0};
        cuda_quantize(&q, NULL, source_tensor(t), SCALE_RCEIL);
        cuda_quantize(NULL, NULL, source_tensor(t), SCALE_RCEIL);
        cuda_transpose_codes((uint8_t *)t.data, (uint8_t *)t.data, t.rows, t.cols);
        cuda_dequantize(t, &q, FORMAT_BF16);
        cuda_convert(t, t);
        cuda_quantize_stats(&stats, t, &q, SCALE_RCEIL);
        assert_true(stats.elements == 0 && stats.amax == 0);
        release_all();
    }
}

int main(void) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no GPU\n");
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantize),
        cmocka_unit_test(test_quantize_layouts),
        cmocka_unit_test(test_quantize_forms),
        cmocka_unit_test(test_sources),
        cmocka_unit_test(test_scaled_sources),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_every_bf16_value),
        cmocka_unit_test(test_dequantize),
        cmocka_unit_test(test_scaled),
        cmocka_unit_test(test_scaled_near_the_ends),
        cmocka_unit_test(test_rows_of_a_whole),
        cmocka_unit_test(test_delayed),
        cmocka_unit_test(test_dequantize_every_code),
        cmocka_unit_test(test_convert),
        cmocka_unit_test(test_transpose_codes),
        cmocka_unit_test(test_swizzle_scales),
        cmocka_unit_test(test_swizzle_nvfp4_scales),
        cmocka_unit_test(test_pack_codes),
        cmocka_unit_test(test_arrange_scales),
        cmocka_unit_test(test_add_block_product),
        cmocka_unit_test(test_quantize_stats),
        cmocka_unit_test(test_scaled_stats),
        cmocka_unit_test(test_square),
        cmocka_unit_test(test_encodings),
        cmocka_unit_test(test_empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
