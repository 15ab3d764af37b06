#include "device.h"
#include "attention.h"     // cuda_attention_cudnn_version
#include "gemm_cublaslt.h" // cuda_gemm_cublaslt_version
#include "gemm_path.h"     // cuda_gemm_has_native
#include "llmc/base/library.h"

#include <string.h>

#define NO_DRIVER                                                                                                  \
    "no NVIDIA driver on this machine: install one (https://www.nvidia.com/drivers), or start the container with " \
    "--gpus all"

// Within a major version a runtime works with an older driver ("minor version compatibility"), so
// where both are known and the runtime still refuses, the driver's major version is older.
bool cuda_device_check_driver(int driver, int runtime, int count, int status, Error *why_not) {
    if (driver == 0) return error_set(why_not, NO_DRIVER);
    if (status == cudaErrorInsufficientDriver || driver / 1000 < runtime / 1000) {
        return error_set(
            why_not, "the NVIDIA driver knows CUDA %d.%d, which is older than the runtime's %d.%d: update the driver",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) {
        return error_set(
            why_not,
            "the NVIDIA driver shows no GPU: look at nvidia-smi and at CUDA_VISIBLE_DEVICES, which hides some");
    }
    return status == cudaSuccess || error_set(why_not, "the NVIDIA driver can't be used: %s: look at nvidia-smi",
                                              cudaGetErrorString((cudaError_t)status));
}

// CUDA_MIN_CAPABILITY, from make: the oldest that the binary holds code for. No kernel needs more
// than 8.0.
bool cuda_device_check_capability(const char *name, int major, int minor, Error *why_not) {
    if (10 * major + minor >= CUDA_MIN_CAPABILITY) return true;
    return error_set(why_not, "%s has compute capability %d.%d and this program is built for %d.%d and later%s", name,
                     major, minor, CUDA_MIN_CAPABILITY / 10, CUDA_MIN_CAPABILITY % 10,
                     10 * major + minor >= 80 ? ": build it with CUDA_ARCH for this one" : ": use a newer GPU");
}

// QUICK_KERNELS, from make: the kernels were compiled for tests, on a machine without a GPU.
#ifdef QUICK_KERNELS
#define KERNELS_ARE_QUICK true
#else
#define KERNELS_ARE_QUICK false
#endif

bool cuda_device_check_kernels(bool quick, Error *why_not) {
    return !quick ||
           error_set(why_not, "this program's kernels were compiled by `make test` on a machine without a GPU, "
                              "quickly, and are slow: run make, which compiles them for use");
}

// Nothing on a GPU is multiplied without it.
#define NO_CUBLASLT LIBRARY_FILE("cublasLt", CUBLAS_VER_MAJOR) " isn't on this machine: install the CUDA toolkit"

// Blackwell's kernels are in cuBLASLt from 12.8 on.
bool cuda_device_check_cublaslt(const char *name, int major, size_t cublaslt, Error *why_not) {
    if (cublaslt == 0) return error_set(why_not, NO_CUBLASLT);
    if (major < 10 || cublaslt >= 120800) return true;
    return error_set(why_not,
                     "%s needs cuBLASLt 12.8 or later, and this program has %zu.%zu: build it with CUDA 12.9 "
                     "or later",
                     name, cublaslt / 10000, cublaslt / 100 % 100);
}

// Returns an attribute, or 0 where the driver doesn't give it.
static int attribute(enum cudaDeviceAttr which, int index) {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, which, index) != cudaSuccess) {
        cudaGetLastError(); // so that it isn't taken for a later call's
        return 0;
    }
    return value;
}

static void look_at(CudaDevice *device, int index) {
    struct cudaDeviceProp properties;
    device->index = index;
    if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) {
        snprintf(device->name, sizeof(device->name), "%s", properties.name);
        make_printable(device->name);
        device->total_bytes = properties.totalGlobalMem;
    }
    device->major = attribute(cudaDevAttrComputeCapabilityMajor, index);
    device->minor = attribute(cudaDevAttrComputeCapabilityMinor, index);
    device->sms = attribute(cudaDevAttrMultiProcessorCount, index);
    device->clock_khz = attribute(cudaDevAttrClockRate, index);
    device->memory_clock_khz = attribute(cudaDevAttrMemoryClockRate, index);
    device->memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth, index);
    device->l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
}

// Makes the device current, which starts CUDA on it, and asks for its memory.
static bool start(CudaDevice *device) {
    cudaError_t status = cudaSetDevice(device->index);
    if (status == cudaSuccess) status = cudaMemGetInfo(&device->free_bytes, &device->total_bytes);
    if (status == cudaSuccess) return true;
    error_set(&device->why_not, "%s can't be used: %s: is another process using it?", device->name,
              cudaGetErrorString(status));
    cudaGetLastError();
    return false;
}

bool cuda_device_find(CudaDevice *device, Error *error) {
    *device = (CudaDevice){0};
    cudaDriverGetVersion(&device->driver);
    cudaRuntimeGetVersion(&device->runtime);
    cudaError_t status = cudaGetDeviceCount(&device->count);
    cudaGetLastError();
    if (status != cudaSuccess) device->count = 0;
    bool ready = cuda_device_check_driver(device->driver, device->runtime, device->count, status, &device->why_not);
    for (int index = 0; index < device->count && ready && !device->usable; index++) {
        CudaDevice candidate = *device;
        Error *why_not = &candidate.why_not;
        look_at(&candidate, index);
        candidate.usable =
            cuda_device_check_kernels(KERNELS_ARE_QUICK, why_not) &&
            cuda_device_check_capability(candidate.name, candidate.major, candidate.minor, why_not) &&
            cuda_device_check_cublaslt(candidate.name, candidate.major, cuda_gemm_cublaslt_version(), why_not) &&
            start(&candidate);
        if (candidate.usable) *why_not = (Error){{0}};
        if (candidate.usable || index == 0) *device = candidate;
    }
    return device->usable || error_set(error, "%s", device->why_not.message);
}

// Dense FLOPs of one SM in one cycle, products of BF16 (of FP8 twice as many) accumulated in FP32,
// from the peaks that NVIDIA gives, divided by SMs and boost clock: H100 architecture white paper
// (989.4 TFLOP/s, 132 SMs, 1.83 GHz), B200 data sheet (2.25 PFLOP/s, 148 SMs, 1.85 GHz), RTX
// Blackwell white paper (RTX 5090: 209.5, 170 SMs, 2.407 GHz; RTX PRO 6000: 503.8, 188 SMs, 2.617
// GHz), Ada white paper (RTX 4090: 165.2, 128 SMs, 2.52 GHz; RTX 6000 Ada: 364.2, 142 SMs, 2.505
// GHz): GeForce cards accumulate in FP32 at half rate.
static int bf16_flops_per_sm(const CudaDevice *device) {
    switch (10 * device->major + device->minor) {
    case 90:
        return 4096;
    case 100:
    case 103:
        return 8192;
    case 89:
    case 120:
        return strstr(device->name, "GeForce") ? 512 : 1024;
    default:
        return 0;
    }
}

double cuda_device_bf16_flops(const CudaDevice *device) {
    return (double)device->sms * device->clock_khz * 1e3 * bf16_flops_per_sm(device);
}

double cuda_device_fp8_flops(const CudaDevice *device) { return 2 * cuda_device_bf16_flops(device); }

// Two transfers a cycle on each line of the bus.
double cuda_device_bandwidth(const CudaDevice *device) {
    return 2.0 * device->memory_clock_khz * 1e3 * device->memory_bus_bits / 8;
}

void cuda_device_describe(const CudaDevice *device, const char *gemms, char *text, size_t bytes) {
    char memory[32];
    snprintf(text, bytes, "cuda, %s (compute capability %d.%d, %d SMs, %s); %s", device->name, device->major,
             device->minor, device->sms, human_bytes(memory, (double)device->total_bytes), gemms);
}

// Returns "123.4 TFLOP/s", written to `text`, or "unknown".
static const char *rate(char *text, size_t bytes, double value, double unit, const char *name) {
    snprintf(text, bytes, "%.4g %s", value / unit, name);
    return value > 0 ? text : "unknown";
}

static const char *version(char *text, size_t bytes, int value) {
    snprintf(text, bytes, "CUDA %d.%d", value / 1000, value % 1000 / 10);
    return text;
}

static void print_scaling(FILE *file, const CudaDevice *device, const char *name, Scaling scaling) {
    const char *why;
    int capability = 10 * device->major + device->minor;
    bool native = cuda_gemm_has_native(capability, cuda_gemm_cublaslt_version(), scaling, &why);
    fprintf(file, "  %-15s %s%s%s\n", name, native ? "native" : "emulated: decoded to BF16 and multiplied so",
            why ? ": " : "", why ? why : "");
}

static void print_device(FILE *file, const CudaDevice *device) {
    char total[32], free_now[32], l2[32], text[64];
    fprintf(file, "GPU %-14d%s\n", device->index, device->name);
    fprintf(file, "  capability      %d.%d, %d SMs at up to %.0f MHz\n", device->major, device->minor, device->sms,
            device->clock_khz / 1e3);
    fprintf(file, "  memory          %s, %s free; L2 %s\n", human_bytes(total, (double)device->total_bytes),
            human_bytes(free_now, (double)device->free_bytes), human_bytes(l2, device->l2_bytes));
    fprintf(file, "  bandwidth       %s expected at most (%d bits at %.0f MHz, twice a cycle)\n",
            rate(text, sizeof(text), cuda_device_bandwidth(device), 1e9, "GB/s"), device->memory_bus_bits,
            device->memory_clock_khz / 1e3);
    fprintf(file, "  BF16            %s expected at most (dense, at the highest clock)\n",
            rate(text, sizeof(text), cuda_device_bf16_flops(device), 1e12, "TFLOP/s"));
    fprintf(file, "  FP8             %s expected at most\n",
            rate(text, sizeof(text), cuda_device_fp8_flops(device), 1e12, "TFLOP/s"));
    print_scaling(file, device, "MXFP8", SCALING_MX);
    print_scaling(file, device, "NVFP4", SCALING_NVFP4);
    print_scaling(file, device, "FP8 by tensor", SCALING_TENSOR);
    print_scaling(file, device, "FP8 by 128", SCALING_BLOCK128);
    if (!device->usable) fprintf(file, "  not used        %s\n", device->why_not.message);
}

// Prints a library's version, or what a version of 0, where it is missing, means.
static void print_library(FILE *file, const char *name, size_t version, const char *missing) {
    if (version > 0) {
        fprintf(file, "%-18s%zu.%zu.%zu\n", name, version / 10000, version / 100 % 100, version % 100);
    } else {
        fprintf(file, "%-18s%s\n", name, missing);
    }
}

static void print_libraries(FILE *file) {
    print_library(file, "cuBLASLt", cuda_gemm_cublaslt_version(),
                  "not on this machine: no training on GPUs (install the CUDA toolkit)");
#ifdef HAVE_CUDNN
    print_library(file, "cuDNN", cuda_attention_cudnn_version(),
                  "not on this machine: attention by kernels of our own (install it)");
#else
    print_library(file, "cuDNN", 0, "not built in: attention by kernels of our own (install it, then make)");
#endif
}

void cuda_device_print_info(FILE *file) {
    CudaDevice device;
    Error error = {{0}};
    bool found = cuda_device_find(&device, &error);
    char text[64];
    fprintf(file, "driver            %s\n", device.driver ? version(text, sizeof(text), device.driver) : "none");
    fprintf(file, "toolkit           %s\n", version(text, sizeof(text), device.runtime));
    print_libraries(file);
    fprintf(file, "GPUs              %d\n", device.count);
    if (found || device.name[0]) print_device(file, &device);
    if (!found) fprintf(file, "no GPU is used: %s\n", error.message);
    for (int index = 0; index < device.count; index++) {
        if (index == device.index) continue;
        CudaDevice other = {.count = device.count};
        look_at(&other, index);
        fprintf(file, "GPU %-14d%s, compute capability %d.%d: not used\n", index, other.name, other.major, other.minor);
    }
}
