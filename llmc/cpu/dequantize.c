/*
The quantizer's inverse, and conversion between dtypes.
*/
#include "cpu.h"
#include "quantize_vectors.h"

// Columns that are converted at a time: they fit the first-level cache.
enum { CONVERT_COLS = 2048 };

MX_FUNCTION void decode_row_block(float *out, const uint8_t *elements, float scale, Format format, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = mx_decode(format, elements[i]) * scale;
    }
}

// Decodes columns [first, first + count) of a row; `first` is a multiple of MX_BLOCK.
MX_FUNCTION void decode_row(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count,
                            Format format) {
    const uint8_t *elements = in->elements + row * in->cols + first;
    const uint8_t *scales = in->scales + mx_scale_offset(in->axis, row, first, in->cols);
    if (in->axis != AXIS_COLUMNWISE) {
        int64_t whole = count / MX_BLOCK * MX_BLOCK;
        for (int64_t c = 0; c < whole; c += MX_BLOCK) {
            decode_row_block(out + c, elements + c, mx_scale_value(scales[c / MX_BLOCK]), format, MX_BLOCK);
        }
        if (whole < count) {
            float scale = mx_scale_value(scales[whole / MX_BLOCK]);
            decode_row_block(out + whole, elements + whole, scale, format, count - whole);
        }
    } else {
        for (int64_t c = 0; c < count; c++) {
            out[c] = mx_decode(format, elements[c]) * mx_scale_value(scales[c]);
        }
    }
}

// Decodes columns [first, first + count) of a row of a scaling that isn't MX, of which `width` have
// a scale in common, without the tensor's factor.
MX_FUNCTION void decode_scaled_row(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count,
                                   int64_t width, Format format) {
    const uint8_t *elements = in->elements + row * in->cols;
    int64_t blocks = row / scaling_block_rows(in->scaling, in->axis) * ((in->cols + width - 1) / width);
    for (int64_t col = first; col < first + count;) {
        int64_t end = (col / width + 1) * width < first + count ? (col / width + 1) * width : first + count;
        float scale = scaling_kept_value(in->scaling, in->scales, blocks + col / width);
        decode_row_block(out + col - first, elements + col, scale, format, end - col);
        col = end;
    }
}

// The same where each column has a scale, but for a tensor with one.
MX_FUNCTION void decode_scaled_columns(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count,
                                       bool is_nvfp4, Format format) {
    const uint8_t *elements = in->elements + row * in->cols + first;
    int64_t blocks = row / scaling_block(in->scaling) * in->cols + first;
    const uint8_t *codes = in->scales + blocks;
    const float *scales = (const float *)in->scales + blocks;
    for (int64_t c = 0; c < count; c++) {
        out[c] = mx_decode(format, elements[c]) * (is_nvfp4 ? mx_decode(FORMAT_E4M3, codes[c]) : scales[c]);
    }
}

static void decode_scaled(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count) {
#define ALONE(constant) decode_row_block(out, in->elements + row * in->cols + first, 1, constant, count)
#define WIDE(constant) decode_scaled_row(out, in, row, first, count, 128, constant)
#define NARROW(constant) decode_scaled_columns(out, in, row, first, count, false, constant)
    if (in->scaling == SCALING_TENSOR) {
        MX_WITH_CONSTANT_FORMAT(in->format, ALONE)
    } else if (scaling_is_nvfp4(in->scaling) && in->axis == AXIS_COLUMNWISE) {
        decode_scaled_columns(out, in, row, first, count, true, FORMAT_E2M1);
    } else if (scaling_is_nvfp4(in->scaling)) {
        decode_scaled_row(out, in, row, first, count, 16, FORMAT_E2M1);
    } else if (in->axis == AXIS_COLUMNWISE) {
        MX_WITH_CONSTANT_FORMAT(in->format, NARROW)
    } else {
        MX_WITH_CONSTANT_FORMAT(in->format, WIDE)
    }
#undef ALONE
#undef WIDE
#undef NARROW
}

void cpu_decode_row(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count) {
    if (in->scaling != SCALING_MX) {
        decode_scaled(out, in, row, first, count);
        return;
    }
#define DECODE(constant) decode_row(out, in, row, first, count, constant)
    MX_WITH_CONSTANT_FORMAT(in->format, DECODE)
#undef DECODE
}

#ifdef VECTOR_BYTES

// Decodes `count` elements of a row into BF16, a multiple of two vectors; `scales` has one for each
// element, or for each block, or is NULL where all are 1. Returns false, and leaves no sense in
// `out`, where an element isn't finite, or a scale so small or large that an element times it may
// not be a normal number.
MX_FUNCTION bool decode_vectors(uint16_t *out, const uint8_t *elements, const uint8_t *scales, bool by_column,
                                int64_t count, Format format) {
    const MxElement e = mx_element(format);
    const FormatVectors constants = format_vectors(format);
    const uint8_t magnitude = (uint8_t)((1 << e.sign_bit) - 1);
    const uint8_t usual_scales = (uint8_t)(254 - e.emax - FIRST_USUAL_SCALE);
    Bytes unusual = {0};
    for (int64_t c = 0; c < count; c += 2 * WORDS) {
        Bytes codes, of_columns = {0};
        memcpy(&codes, elements + c, sizeof(codes));
        if (by_column) memcpy(&of_columns, scales + c, sizeof(of_columns));
        unusual |= (Bytes)((codes & magnitude) > (uint8_t)e.max_code);
        for (int i = 0; i < 2; i++) {
            Words signed_codes = bytes_widen(codes, i), scale = bytes_widen(of_columns, i);
            if (!by_column) scale = (Words){0} + (uint16_t)(scales ? scales[(c + i * WORDS) / MX_BLOCK] : 127);
            Words magnitudes = signed_codes & magnitude;
            Words is_zero = (Words)((scale | magnitudes) == 0); // of a block of zeros, whose scale is the smallest
            unusual |= (Bytes)((Words)(scale - FIRST_USUAL_SCALE > usual_scales) & ~is_zero);
            Words rebias = (scale - (uint16_t)(e.bias + small_binades(format))) << 7;
            Words bits = decode_bf16(format, &constants, magnitudes, rebias);
            bits |= signed_codes << (15 - e.sign_bit) & 0x8000;
            memcpy(out + c + i * WORDS, &bits, sizeof(bits));
        }
    }
    Bytes none = {0};
    return memcmp(&unusual, &none, sizeof(none)) == 0;
}

// Writes MX's codes of the scales of columns [first, first + count), which are FP32: of each column
// or, where blocks run along rows, of each MX_BLOCK. Returns false where one isn't a power of two.
MX_FUNCTION bool codes_of_scales(uint8_t *codes, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count) {
    bool by_column = in->axis == AXIS_COLUMNWISE;
    const float *scales = (const float *)in->scales + scaling_block_at(in->scaling, in->axis, row, 0, in->cols);
    uint32_t rest = 0;
    for (int64_t i = 0; by_column && i < count; i++) {
        uint32_t bits = mx_float_bits(scales[first + i]);
        codes[i] = (uint8_t)(bits >> 23);
        rest |= bits & 0x807FFFFF;
    }
    for (int64_t i = 0; !by_column && i < count / MX_BLOCK; i++) {
        uint32_t bits = mx_float_bits(scales[(first + i * MX_BLOCK) / scaling_block(in->scaling)]);
        codes[i] = (uint8_t)(bits >> 23);
        rest |= bits & 0x807FFFFF;
    }
    return rest == 0;
}

// Decodes `count` elements of NVFP4, a multiple of two vectors, each with its E4M3 scale: products
// of a significand of two bits and one of four, which fit BF16's. Returns false, and leaves no
// sense in `out`, where a scale is NaN, or subnormal beside another element than 0.
MX_FUNCTION bool decode_nvfp4_vectors(uint16_t *out, const uint8_t *elements, const uint8_t *scales, int64_t count) {
    Words unusual = {0};
    for (int64_t c = 0; c < count; c += 2 * WORDS) {
        Bytes codes, of_columns;
        memcpy(&codes, elements + c, sizeof(codes));
        memcpy(&of_columns, scales + c, sizeof(of_columns));
        for (int i = 0; i < 2; i++) {
            Words code = bytes_widen(codes, i), scale = bytes_widen(of_columns, i), magnitude = code & 7;
            Words is_zero = (Words)(magnitude == 0), is_normal = (Words)(magnitude > 1);
            unusual |= (Words)(scale > 0x7E) | ((Words)(scale < 8) & ~is_zero);
            Words product = (2 + (magnitude & is_normal & 1)) * (8 + (scale & 7)); // 16 to 45
            Words is_two = (Words)(product > 31);                                  // or more, of 16
            Words fraction = (product << 3) - ((product << 2) & is_two);
            Words exponent = (magnitude >> 1) + (scale >> 3) + (127 - 7 - 1) - is_two;
            Words bits = (exponent << 7 | (fraction & 0x7F)) & ~is_zero;
            bits |= (code & 8) << 12;
            memcpy(out + c + i * WORDS, &bits, sizeof(bits));
        }
    }
    Words none = {0};
    return memcmp(&unusual, &none, sizeof(none)) == 0;
}

// The same of columns [first, first + count) of a row.
MX_FUNCTION bool decode_nvfp4(uint16_t *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count) {
    const uint8_t *scales = in->scales + scaling_block_at(in->scaling, in->axis, row, 0, in->cols);
    uint8_t of_columns[CONVERT_COLS];
    for (int64_t c = 0; c < count && in->axis != AXIS_COLUMNWISE; c += NVFP4_SIDE) {
        memset(of_columns + c, scales[(first + c) / NVFP4_SIDE], NVFP4_SIDE);
    }
    return decode_nvfp4_vectors(out, in->elements + row * in->cols + first,
                                in->axis == AXIS_COLUMNWISE ? scales + first : of_columns, count);
}

// Decodes columns [first, first + count) of a row of another scaling, as decode_vectors does.
MX_FUNCTION bool decode_in_format(uint16_t *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count,
                                  Format format) {
    const uint8_t *elements = in->elements + row * in->cols + first;
    if (in->scaling == SCALING_TENSOR) return decode_vectors(out, elements, NULL, false, count, format);
    const uint8_t *scales = in->scales + mx_scale_offset(in->axis, row, first, in->cols);
    uint8_t codes[CONVERT_COLS];
    if (in->scaling == SCALING_BLOCK128) {
        if (!codes_of_scales(codes, in, row, first, count)) return false;
        scales = codes;
    }
    return in->axis == AXIS_COLUMNWISE ? decode_vectors(out, elements, scales, true, count, format)
                                       : decode_vectors(out, elements, scales, false, count, format);
}

// Decodes as many of a row's columns from `first` on as vectors can, at most CONVERT_COLS, and
// returns how many: whole vectors and whole blocks of MX.
static int64_t decode_by_vectors(uint16_t *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count) {
    enum { STEP = 2 * WORDS > MX_BLOCK ? 2 * WORDS : MX_BLOCK };
    int64_t whole = min_int64(count, CONVERT_COLS) / STEP * STEP;
    bool done = false;
#define DECODE(constant) done = decode_in_format(out, in, row, first, whole, constant)
    if (scaling_is_nvfp4(in->scaling)) {
        done = decode_nvfp4(out, in, row, first, whole);
    } else if (in->scaling != SCALING_BLOCK128_FP32) {
        MX_WITH_CONSTANT_FORMAT(in->format, DECODE)
    }
#undef DECODE
    return done ? whole : 0;
}

#else

static int64_t decode_by_vectors(uint16_t *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count) {
    (void)out, (void)in, (void)row, (void)first, (void)count;
    return 0;
}

#endif

void cpu_decode_row_to_bf16(uint16_t *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count) {
    for (int64_t c = decode_by_vectors(out, in, row, first, count); c < count; c += CPU_SLAB) {
        int64_t part = min_int64(count - c, CPU_SLAB);
        float x[CPU_SLAB];
        cpu_decode_row(x, in, row, first + c, part);
        cpu_store(out + c, FORMAT_BF16, x, part);
    }
}

void cpu_dequantize(Tensor out, const QuantizedTensor *in, Format values) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in->rows; row++) {
        for (int64_t first = 0; first < in->cols; first += CONVERT_COLS) {
            int64_t count = min_int64(in->cols - first, CONVERT_COLS);
            void *to = cpu_at(out, row, first);
            if (out.dtype == FORMAT_BF16) {
                cpu_decode_row_to_bf16(to, in, row, first, count);
            } else if (values == FORMAT_BF16) {
                uint16_t x[CONVERT_COLS];
                cpu_decode_row_to_bf16(x, in, row, first, count);
                cpu_load(to, x, FORMAT_BF16, count);
            } else {
                cpu_decode_row(to, in, row, first, count);
            }
        }
    }
}

void cpu_convert(Tensor out, Tensor in) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in.rows; row++) {
        for (int64_t first = 0; first < in.cols; first += CONVERT_COLS) {
            float x[CONVERT_COLS];
            int64_t count = min_int64(in.cols - first, CONVERT_COLS);
            cpu_load(x, cpu_at(in, row, first), in.dtype, count);
            cpu_store(cpu_at(out, row, first), out.dtype, x, count);
        }
    }
}

static void multiply(Tensor x, float factor) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < x.rows; row++) {
        for (int64_t first = 0; first < x.cols; first += CONVERT_COLS) {
            float values[CONVERT_COLS];
            int64_t count = min_int64(x.cols - first, CONVERT_COLS);
            cpu_load(values, cpu_at(x, row, first), x.dtype, count);
            for (int64_t i = 0; i < count; i++) {
                values[i] *= factor;
            }
            cpu_store(cpu_at(x, row, first), x.dtype, values, count);
        }
    }
}

void cpu_decode(Tensor out, const QuantizedTensor *in) {
    if (in->form == FORM_DECODED) {
        cpu_convert(out, tensor_make(in->elements, FORMAT_BF16, in->rows, in->cols));
    } else {
        cpu_dequantize(out, in, out.dtype);
    }
    float factor = (in->factor ? *in->factor : 1) / encoding_prescale(&in->encoding);
    if (factor != 1) multiply(out, factor);
}
