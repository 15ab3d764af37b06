/*
For tests without a GPU, where the memory of the pretended device is the host's: the CPU's GEMM in place of cuBLASLt's,
and a device that is always there.
*/
#include "../../llmc/cpu/cpu.h"
#include "../../llmc/cuda/cuda.h"
#include "../../llmc/cuda/device.h"
#include "../../llmc/cuda/gemm.h"

size_t cuda_gemm_workspace(Operand a, Operand b) { return cpu_gemm_workspace(a, b); }

void cuda_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    size_t bytes = cpu_gemm_workspace(a, b);
    backend_cpu()->use_workspace(cuda_workspace(bytes), bytes);
    cpu_gemm(d, a, b, options);
}

void cuda_gemm_set_policy(MxGemm policy) { (void)policy; }

bool cuda_gemm_self_check(char *text, size_t bytes) {
    snprintf(text, bytes, "%s", "");
    return true;
}

bool cuda_device_find(CudaDevice *device, Error *error) {
    (void)error;
    *device = (CudaDevice){.count = 1, .usable = true};
    return true;
}

void cuda_device_print_info(FILE *file) { fprintf(file, "hostcuda\n"); }

void cuda_device_describe(const CudaDevice *device, char *text, size_t bytes) {
    (void)device;
    snprintf(text, bytes, "hostcuda");
}
