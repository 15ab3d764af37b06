/*
The quantizer's inverse, and conversion between dtypes.
*/
#include "cpu.h"

MX_FUNCTION void decode_row_block(float *out, const uint8_t *elements, float scale, Format format, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = mx_decode(format, elements[i]) * scale;
    }
}

// Columns [first, first + count) of a row; `first` is a multiple of MX_BLOCK.
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

void cpu_decode_row(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count) {
#define DECODE(constant) decode_row(out, in, row, first, count, constant)
    MX_WITH_CONSTANT_FORMAT(in->format, DECODE)
#undef DECODE
}

// Columns that are converted at a time: they fit the first-level cache.
enum { CONVERT_COLS = 2048 };

void cpu_dequantize(Tensor out, const QuantizedTensor *in, Format values) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in->rows; row++) {
        for (int64_t first = 0; first < in->cols; first += CONVERT_COLS) {
            float x[CONVERT_COLS];
            int64_t count = in->cols - first < CONVERT_COLS ? in->cols - first : CONVERT_COLS;
            cpu_decode_row(x, in, row, first, count);
            if (values == FORMAT_BF16 && out.dtype == FORMAT_FP32) cpu_round_to_bf16(x, count);
            cpu_store(cpu_at(out, row, first), out.dtype, x, count);
        }
    }
}

void cpu_convert(Tensor out, Tensor in) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < in.rows; row++) {
        for (int64_t first = 0; first < in.cols; first += CONVERT_COLS) {
            float x[CONVERT_COLS];
            int64_t count = in.cols - first < CONVERT_COLS ? in.cols - first : CONVERT_COLS;
            cpu_load(x, cpu_at(in, row, first), in.dtype, count);
            cpu_store(cpu_at(out, row, first), out.dtype, x, count);
        }
    }
}
