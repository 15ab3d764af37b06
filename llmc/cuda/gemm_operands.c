#include "gemm_operands.h"

GemmMatrix cuda_gemm_place_native(const QuantizedTensor *q, Axis along, bool rows_along_k, OperandScratch scratch) {
    GemmMatrix matrix = {.data = q->elements,
                         .scales = q->form == FORM_SWIZZLED ? q->scales : scratch.scales,
                         .type = q->format == FORMAT_E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3,
                         .rows = q->rows,
                         .cols = q->cols,
                         .stride = q->cols};
    if (along == AXIS_ROWWISE || !rows_along_k) return matrix;
    matrix.data = scratch.codes;
    matrix.rows = q->cols;
    matrix.cols = matrix.stride = q->rows;
    return matrix;
}

void cuda_gemm_make_native(GemmMatrix matrix, const QuantizedTensor *q, Axis along) {
    if (q->form != FORM_SWIZZLED) cuda_swizzle_scales((uint8_t *)matrix.scales, q, along);
    if (matrix.data != q->elements) cuda_transpose_codes((uint8_t *)matrix.data, q->elements, q->rows, q->cols);
}

static GemmMatrix matrix_of(Tensor tensor) {
    return (GemmMatrix){.data = tensor.data,
                        .type = tensor.dtype == FORMAT_FP32 ? CUDA_R_32F : CUDA_R_16BF,
                        .rows = tensor.rows,
                        .cols = tensor.cols,
                        .stride = tensor.stride};
}

GemmMatrix cuda_gemm_decode(Operand operand, Format dtype, OperandScratch scratch) {
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

// cuBLASLt adds a bias of d's dtype (CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE in cublasLt.h lists the
// exceptions; none helps). An FP32 one is added to a BF16 result as BF16, before the one rounding
// of the sum.
GemmBias cuda_gemm_place_bias(const float *bias, Tensor d, void *scratch) {
    return !bias || d.dtype == FORMAT_FP32 ? (GemmBias){bias, CUDA_R_32F} : (GemmBias){scratch, CUDA_R_16BF};
}

void cuda_gemm_make_bias(GemmBias placed, const float *bias, Tensor d) {
    if (placed.data == bias) return;
    cuda_convert(tensor_make((void *)placed.data, FORMAT_BF16, 1, d.cols),
                 tensor_make((void *)bias, FORMAT_FP32, 1, d.cols));
}
