/*
What the program says about the GPU, in particular where there is none or it can't be used.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include "llmc/cuda/device.h"

// In the place of libc's: on this machine, while `no_cublaslt`, there is none.
static bool no_cublaslt;

void *dlopen(const char *file, int flags) {
    static void *(*real)(const char *, int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "dlopen");
    return no_cublaslt && file && strstr(file, "libcublasLt") ? NULL : real(file, flags);
}

static const char *refusal(int driver, int runtime, int count, cudaError_t status) {
    static Error why_not;
    return cuda_device_check_driver(driver, runtime, count, status, &why_not) ? NULL : why_not.message;
}

static void assert_says(const char *text, const char *what) {
    if (!text || !strstr(text, what)) fail_msg("'%s' doesn't say '%s'", text ? text : "(nothing)", what);
}

static void test_drivers(void **state) {
    (void)state;
    assert_says(refusal(0, 13000, 0, cudaErrorInsufficientDriver), "no NVIDIA driver");
    assert_says(refusal(0, 13000, 0, cudaErrorNoDevice), "install one");
    assert_says(refusal(12040, 13000, 0, cudaErrorInsufficientDriver),
                "knows CUDA 12.4, which is older than the runtime's 13.0: update the driver");
    assert_says(refusal(12090, 13000, 1, cudaSuccess), "12.9");
    assert_says(refusal(13000, 13000, 0, cudaErrorNoDevice), "CUDA_VISIBLE_DEVICES");
    assert_says(refusal(13000, 13000, 0, cudaSuccess), "CUDA_VISIBLE_DEVICES");
    assert_says(refusal(13000, 13000, 0, cudaErrorInitializationError),
                cudaGetErrorString(cudaErrorInitializationError));
    assert_null(refusal(13000, 13000, 1, cudaSuccess));
    assert_null(refusal(13020, 13000, 8, cudaSuccess));
    assert_null(refusal(13000, 13010, 1, cudaSuccess)); // minor version compatibility
    assert_null(refusal(14000, 13000, 1, cudaSuccess));
}

static const char *refused_capability(const char *name, int major, int minor) {
    static Error why_not;
    return cuda_device_check_capability(name, major, minor, &why_not) ? NULL : why_not.message;
}

static void test_quick_kernels(void **state) {
    (void)state;
    Error why_not;
    assert_true(cuda_device_check_kernels(false, &why_not));
    assert_false(cuda_device_check_kernels(true, &why_not));
    assert_says(why_not.message, "run make");
}

static void test_capabilities(void **state) {
    (void)state;
    assert_says(refused_capability("Tesla T4", 7, 5), "Tesla T4 has compute capability 7.5");
    assert_says(refused_capability("Tesla T4", 7, 5), "newer GPU");
    assert_says(refused_capability("A100", 8, 0), "CUDA_ARCH");
    assert_int_equal(refused_capability("L40S", 8, 9) == NULL, CUDA_MIN_CAPABILITY <= 89);
    assert_null(refused_capability("H100", 9, 0));
    assert_null(refused_capability("B200", 10, 0));
    assert_null(refused_capability("RTX 5090", 12, 0));
}

static void test_cublaslt(void **state) {
    (void)state;
    Error why_not;
    assert_true(cuda_device_check_cublaslt("B200", 10, 130100, &why_not));
    assert_true(cuda_device_check_cublaslt("B200", 10, 120803, &why_not));
    assert_true(cuda_device_check_cublaslt("L40S", 8, 120405, &why_not));
    assert_false(cuda_device_check_cublaslt("RTX 5090", 12, 120604, &why_not));
    assert_says(why_not.message, "RTX 5090 needs cuBLASLt 12.8 or later, and this program has 12.6: build it with");
    assert_false(cuda_device_check_cublaslt("H100", 9, 0, &why_not));
    assert_says(why_not.message, "libcublasLt.so.");
    assert_says(why_not.message, "install the CUDA toolkit");
}

static bool is_near(double value, double expected) { return value > 0.99 * expected && value < 1.01 * expected; }

// From their data sheets: SMs, boost clock and memory clock in, the peaks they give out.
static void test_peaks(void **state) {
    (void)state;
    CudaDevice h100 = {.name = "NVIDIA H100 80GB HBM3",
                       .major = 9,
                       .sms = 132,
                       .clock_khz = 1830000,
                       .memory_clock_khz = 2619000,
                       .memory_bus_bits = 5120};
    assert_true(is_near(cuda_device_bf16_flops(&h100), 989.4e12));
    assert_true(is_near(cuda_device_fp8_flops(&h100), 1978.9e12));
    assert_true(is_near(cuda_device_bandwidth(&h100), 3.35e12));
    CudaDevice b200 = {.name = "NVIDIA B200",
                       .major = 10,
                       .sms = 148,
                       .clock_khz = 1850000,
                       .memory_clock_khz = 3996000,
                       .memory_bus_bits = 8192};
    assert_true(is_near(cuda_device_bf16_flops(&b200), 2250e12));
    assert_true(is_near(cuda_device_fp8_flops(&b200), 4500e12));
    assert_true(is_near(cuda_device_bandwidth(&b200), 8.2e12));
    CudaDevice rtx5090 = {.name = "NVIDIA GeForce RTX 5090",
                          .major = 12,
                          .sms = 170,
                          .clock_khz = 2407000,
                          .memory_clock_khz = 14001000,
                          .memory_bus_bits = 512};
    assert_true(is_near(cuda_device_bf16_flops(&rtx5090), 209.5e12));
    assert_true(is_near(cuda_device_bandwidth(&rtx5090), 1.792e12));
    CudaDevice ada = {
        .name = "NVIDIA RTX 6000 Ada Generation", .major = 8, .minor = 9, .sms = 142, .clock_khz = 2505000};
    assert_true(is_near(cuda_device_bf16_flops(&ada), 364.2e12));
    CudaDevice unknown = {.name = "from the future", .major = 15, .sms = 500, .clock_khz = 3000000};
    assert_true(cuda_device_bf16_flops(&unknown) == 0);
    assert_true(cuda_device_bandwidth(&unknown) == 0);
}

static char *printed_info(void) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    assert_non_null(file);
    cuda_device_print_info(file);
    assert_int_equal(fclose(file), 0);
    return text;
}

static void test_find(void **state) {
    (void)state;
    CudaDevice device;
    Error error = {{0}};
    bool found = cuda_device_find(&device, &error);
    assert_true(device.usable == found);
    assert_true(device.runtime >= 13000);
    if (found) {
        assert_true(device.sms > 0 && device.total_bytes > 0 && device.why_not.message[0] == 0);
    } else {
        printf("    %s\n", error.message);
        assert_true(strlen(error.message) > 0 && !strchr(error.message, '\n'));
        assert_string_equal(error.message, device.why_not.message);
    }
    // The outcome is the same the second time, whatever error the first left behind.
    CudaDevice again;
    assert_true(cuda_device_find(&again, &error) == found);
    assert_string_equal(again.why_not.message, device.why_not.message);
}

// Before anything else asks for cuBLASLt, which stays loaded.
static void test_info_without_cublaslt(void **state) {
    (void)state;
    no_cublaslt = true;
    char *text = printed_info();
    no_cublaslt = false;
    assert_says(text, "cuBLASLt          not on this machine");
    assert_says(text, "no GPU is used: ");
    free(text);
}

static void test_info(void **state) {
    (void)state;
    char *text = printed_info();
    printf("%s", text);
    assert_says(text, "cuBLASLt ");
    assert_says(text, "cuDNN ");
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0) {
        assert_says(text, "driver            none\n");
        assert_says(text, "GPUs              0\n");
        assert_says(text, "no GPU is used: no NVIDIA driver on this machine: install one");
        int count;
        assert_int_equal(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
    }
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_info_without_cublaslt),
        cmocka_unit_test(test_drivers),
        cmocka_unit_test(test_capabilities),
        cmocka_unit_test(test_quick_kernels),
        cmocka_unit_test(test_cublaslt),
        cmocka_unit_test(test_peaks),
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_info),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
