/*
For tests without a GPU, where the memory of the pretended device is the host's: the CPU's GEMM in
place of cuBLASLt's, and a device that is always there.
*/
#include "cuda_standins.h"

#include "llmc/cpu/cpu.h"
#include "llmc/cuda/cuda.h"
#include "llmc/cuda/device.h"
#include "llmc/cuda/gemm.h"
#include "llmc/cuda/gemm_cublaslt.h" // cuda_gemm_cublaslt_version

#include <stdlib.h>

int cuda_standin_capability;
static GemmDevice gemm_device;

void cuda_gemm_use_device(GemmDevice device) {
    gemm_device = device;
    if (cuda_standin_capability) gemm_device.capability = cuda_standin_capability;
}

GemmDevice cuda_gemm_device(void) { return gemm_device; }
GemmCounts cuda_gemm_counts(void) { return (GemmCounts){0}; }
size_t cuda_gemm_cublaslt_version(void) { return 130100; }

// As if GEMMs were native, where that is demanded, so that whole models are also tested with
// swizzled scales and transposed codes.
QuantizedForm cuda_quantized_form(Scaling scaling, Axis axis, bool for_one_gemm) {
    if (cuda_standin_capability) return cuda_gemm_quantized_form(gemm_device, scaling, axis, for_one_gemm);
    return cuda_gemm_form(scaling, axis, gemm_device.policy == MX_GEMM_NATIVE, true, for_one_gemm);
}

static bool is_in_form(Operand o, QuantizedForm form) { return operand_is_quantized(o) && o.quantized.form == form; }

// The CPU's GEMM takes no swizzled scales: their values, as FP32 or BF16, whichever the other
// operand makes of them.
static Operand without_swizzle(QuantizedTensor q, Operand other) {
    bool fp32 = !operand_is_quantized(other) && other.tensor.dtype == FORMAT_FP32;
    void *values = q.elements ? malloc((size_t)(q.rows * q.cols) * sizeof(float)) : NULL;
    Tensor decoded = tensor_make(values, fp32 ? FORMAT_FP32 : FORMAT_BF16, q.rows, q.cols);
    if (values) cuda_dequantize(decoded, &q, decoded.dtype);
    return operand_tensor(decoded);
}

// Nor transposed codes: these, transposed back.
static Operand as_plain(QuantizedTensor q) {
    uint8_t *codes = q.elements ? malloc((size_t)(q.rows * q.cols)) : NULL;
    if (codes) cuda_transpose_codes(codes, q.elements, q.cols, q.rows);
    q.elements = codes;
    q.form = FORM_PLAIN;
    return operand_quantized(q);
}

// Returns the operand as the CPU's GEMM takes it, to be given back.
static Operand for_cpu(Operand operand, Operand other) {
    if (is_in_form(operand, FORM_SWIZZLED)) return without_swizzle(operand.quantized, other);
    return is_in_form(operand, FORM_TRANSPOSED) ? as_plain(operand.quantized) : operand;
}

static void give_back(Operand operand, Operand made) {
    if (is_in_form(operand, FORM_SWIZZLED)) free(made.tensor.data);
    if (is_in_form(operand, FORM_TRANSPOSED)) free(made.quantized.elements);
}

static Operand shape_of(Operand operand) {
    if (operand_is_quantized(operand)) operand.quantized.elements = NULL;
    return operand;
}

size_t cuda_gemm_workspace(Operand a, Operand b) {
    return cpu_gemm_workspace(for_cpu(shape_of(a), b), for_cpu(shape_of(b), a));
}

bool cuda_gemm_decodes(Tensor d, Operand a, Operand b, GemmOptions options) {
    return cuda_gemm_path_decodes(gemm_device, d, a, b, options);
}

const char *cuda_gemm_refuses(Tensor d, Operand a, Operand b, GemmOptions options) {
    return cpu_gemm_refuses(d, a, b, options);
}

void cuda_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    size_t bytes = cuda_gemm_workspace(a, b);
    Operand made_a = for_cpu(a, b), made_b = for_cpu(b, a);
    backend_cpu()->use_workspace(cuda_workspace(bytes), bytes);
    cpu_gemm(d, made_a, made_b, options);
    give_back(a, made_a);
    give_back(b, made_b);
}

SelfCheck cuda_gemm_self_check(unsigned scalings, char *text, size_t bytes) {
    (void)scalings;
    snprintf(text, bytes, "%s", "");
    return SELF_CHECK_PASSED;
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
