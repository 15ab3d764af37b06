/*
The quantizer: a tensor, or what an operation makes of one, in; rowwise and/or columnwise MX copies
out, in one pass. The kernels are in quantize.cuh, what they read in sources.cuh, and scalings
beside MX in quantize_scaled.cu.
*/
#include "sources.cuh"

static void quantize_source(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                            float *partials, ScaleRounding rounding) {
    int64_t rows = in.x.rows, cols = source_cols(&in);
    if (rows == 0 || cols == 0) return;
    if (!rowwise && !columnwise && !in.stored.data && !partials) return;
    QuantizedTensor none = quantized_make(NULL, FORMAT_E4M3, AXIS_ROWWISE, 0, 0, FORM_PLAIN);
    QuantizedTensor row = rowwise ? *rowwise : none, column = columnwise ? *columnwise : none;
    bool by_tiles = source_takes_eights(&in) && copy_takes_eights(&row) && copy_takes_eights(&column);
    if (!by_tiles || (!have_one_format(&row, &column) && in.kind != SOURCE_TENSOR)) {
        quantize_columns(row, column, FromAny{in, cols}, in.stored, partials, rows, cols, rounding);
        return;
    }
    if (!have_one_format(&row, &column)) {
        quantize_source(rowwise, NULL, in, partials, rounding);
        quantize_source(NULL, columnwise, in, NULL, rounding);
        return;
    }
    Format format = (row.elements ? row : column).format;
    bool is_fp8 = format == FORMAT_E4M3 || format == FORMAT_E5M2;
    // The other formats have one kernel for all that is made: with one for each, compiling takes
    // half as long again.
    if (!copy_is_plain(&row) || !copy_is_plain(&column)) {
        with_source_as_one(
            in, [&](auto from) { quantize_encoded(row, column, from, in.stored, partials, rows, cols, rounding); });
    } else if (is_fp8) {
        with_source(in, [&](auto from) {
            quantize_tiles<FORMAT_E4M3, FORMAT_E5M2>(row, column, from, in.stored, partials, rows, cols, rounding);
        });
    } else {
        with_tensor_or_made(in, [&](auto from) {
            quantize_tiles<FORMAT_E2M3, FORMAT_E3M2, FORMAT_E2M1>(row, column, from, in.stored, partials, rows, cols,
                                                                  rounding);
        });
    }
}

static bool is_scaled(const QuantizedTensor *out) { return out && out->scaling != SCALING_MX; }

// Makes copies whose scalings aren't MX first: what is stored may lie over what they read.
static void quantize_all(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in, float *partials,
                         ScaleRounding rounding) {
    const QuantizedTensor *mx_row = is_scaled(rowwise) ? NULL : rowwise;
    const QuantizedTensor *mx_column = is_scaled(columnwise) ? NULL : columnwise;
    bool has_mx = mx_row || mx_column, is_made = false;
    if (is_scaled(rowwise) || is_scaled(columnwise)) {
        Source read = in;
        if (has_mx) read.stored.data = NULL;
        is_made =
            quantize_scaled(mx_row ? NULL : rowwise, mx_column ? NULL : columnwise, read, has_mx ? NULL : partials);
    }
    if (has_mx || !is_made) quantize_source(mx_row, mx_column, in, partials, rounding);
}

// Sums of columns go by tiles, then over these.
void cuda_quantize(const QuantizedTensor *rowwise, const QuantizedTensor *columnwise, Source in,
                   ScaleRounding rounding) {
    int64_t rows = in.x.rows, cols = source_cols(&in), parts = num_parts(rows, TILE_ROWS);
    float *partials = in.sums ? (float *)cuda_workspace(cuda_reduction_workspace(rows, cols)) : NULL;
    quantize_all(rowwise, columnwise, in, partials, rounding);
    if (!in.sums || rows == 0) return;
    cuda_sum_columns(in.sums, NULL, cols, tensor_make(partials, FORMAT_FP32, parts, cols), partials + parts * cols);
}
