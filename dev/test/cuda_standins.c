/*
For tests without a GPU, where the memory of the pretended device is the host's: the CPU's GEMM in
place of cuBLASLt's, and a device that is always there.
*/
#include "llmc/cpu/cpu.h"
#include "llmc/cuda/cuda.h"
#include "llmc/cuda/device.h"
#include "llmc/cuda/gemm.h"
#include "llmc/cuda/gemm_cublaslt.h" // cuda_gemm_cublaslt_version

#include <stdlib.h>

static GemmDevice gemm_device;

void cuda_gemm_use_device(GemmDevice device) { gemm_device = device; }
GemmDevice cuda_gemm_device(void) { return gemm_device; }
size_t cuda_gemm_cublaslt_version(void) { return 130100; }

// As if GEMMs were native, where that is demanded, so that whole models are also tested with
// swizzled scales.
QuantizedForm cuda_quantized_form(Scaling scaling, bool for_one_gemm) {
    return cuda_gemm_form(scaling, gemm_device.policy == MX_GEMM_NATIVE, for_one_gemm);
}

static bool is_swizzled(Operand o) { return operand_is_quantized(o) && o.quantized.form == FORM_SWIZZLED; }

// The CPU's GEMM takes no swizzled scales: their values, as FP32 or BF16, whichever the other
// operand makes of them.
static Operand without_swizzle(Operand operand, Operand other) {
    if (!is_swizzled(operand)) return operand;
    bool fp32 = !operand_is_quantized(other) && other.tensor.dtype == FORMAT_FP32;
    QuantizedTensor q = operand.quantized;
    void *values = q.elements ? malloc((size_t)(q.rows * q.cols) * sizeof(float)) : NULL;
    Tensor decoded = tensor_make(values, fp32 ? FORMAT_FP32 : FORMAT_BF16, q.rows, q.cols);
    if (values) cuda_dequantize(decoded, &q, decoded.dtype);
    return operand_tensor(decoded);
}

static Operand shape_of(Operand operand) {
    if (operand_is_quantized(operand)) operand.quantized.elements = NULL;
    return operand;
}

size_t cuda_gemm_workspace(Operand a, Operand b) {
    return cpu_gemm_workspace(without_swizzle(shape_of(a), b), without_swizzle(shape_of(b), a));
}

bool cuda_gemm_decodes(Tensor d, Operand a, Operand b, GemmOptions options) {
    return cpu_gemm_decodes(d, without_swizzle(shape_of(a), b), without_swizzle(shape_of(b), a), options);
}

const char *cuda_gemm_refuses(Tensor d, Operand a, Operand b, GemmOptions options) {
    return cpu_gemm_refuses(d, a, b, options);
}

void cuda_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    size_t bytes = cuda_gemm_workspace(a, b);
    Operand plain_a = without_swizzle(a, b), plain_b = without_swizzle(b, a);
    backend_cpu()->use_workspace(cuda_workspace(bytes), bytes);
    cpu_gemm(d, plain_a, plain_b, options);
    if (is_swizzled(a)) free(plain_a.tensor.data);
    if (is_swizzled(b)) free(plain_b.tensor.data);
}

bool cuda_gemm_self_check(unsigned scalings, char *text, size_t bytes) {
    (void)scalings;
    snprintf(text, bytes, "%s", "");
    return true;
}

bool cuda_device_find(CudaDevice *device, Error *error) {
    (void)error;
    *device = (CudaDevice){.count = 1, .major = 10, .usable = true};
    return true;
}

void cuda_device_print_info(FILE *file) { fprintf(file, "hostcuda\n"); }

void cuda_device_describe(const CudaDevice *device, const char *gemms, char *text, size_t bytes) {
    (void)device, (void)gemms;
    snprintf(text, bytes, "hostcuda");
}
