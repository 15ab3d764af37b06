/*
The CUDA backend's GEMM on a GPU: the cases of gemm_cases.h, and the self-check.
*/
#include "gemm_cases.h"

#include <omp.h>

static const Backend *gpu;

static void *to_gpu(const void *host, size_t bytes) {
    void *device = gpu->allocate(bytes);
    gpu->copy_to_device(device, host, bytes);
    return device;
}

static Operand operand_to_gpu(Operand o) {
    if (operand_is_quantized(o)) {
        QuantizedTensor *q = &o.quantized;
        q->elements = to_gpu(q->elements, (size_t)(q->rows * q->cols) * (q->form == FORM_DECODED ? 2 : 1));
        if (q->factor) q->factor = to_gpu(q->factor, sizeof(float));
        q->scales = to_gpu(q->scales, scaled_scale_bytes(q->scaling, q->form, q->axis, q->rows, q->cols));
    } else {
        o.tensor.data = to_gpu(o.tensor.data, tensor_bytes(o.tensor));
    }
    return o;
}

static void release_operand(Operand o) {
    gpu->release(operand_is_quantized(o) ? (void *)o.quantized.elements : o.tensor.data);
    if (operand_is_quantized(o)) gpu->release(o.quantized.scales);
    if (o.quantized.factor) gpu->release(o.quantized.factor);
}

static void run_gpu(Tensor d, Operand a, Operand b, GemmOptions options) {
    size_t bytes = gpu->gemm_workspace(a, b);
    void *workspace = gpu->allocate(bytes), *bias = NULL;
    gpu->use_workspace(workspace, bytes);
    Tensor on_gpu = d;
    on_gpu.data = to_gpu(d.data, tensor_bytes(d));
    a = operand_to_gpu(a);
    b = operand_to_gpu(b);
    if (options.bias) options.bias = bias = to_gpu(options.bias, (size_t)d.cols * sizeof(float));
    gpu->gemm(on_gpu, a, b, options);
    gpu->copy_to_host(d.data, on_gpu.data, tensor_bytes(d));
    release_operand(a);
    release_operand(b);
    gpu->release(on_gpu.data);
    gpu->release(workspace);
    if (bias) gpu->release(bias);
}

static void test_even_on_gpu(void **state) {
    (void)state;
    Error error;
    gpu = backend_cuda(MX_GEMM_AUTO, &error);
    if (!gpu) {
        printf("    skipped: %s\n", error.message);
        skip();
    }
    keeps_13_bits = cuda_gemm_device().capability / 10 != 10;
    check_even(run_gpu);
    check_padded(512, 768, 1024, 16, ALL, 4, run_gpu);
}

// Even shapes and odd ones, a test for each check: one that fails leaves the others to run.
static void test_factors_on_gpu(void **state) {
    (void)state;
    if (!gpu) skip();
    check_factors(run_gpu);
}

static void test_prescales_on_gpu(void **state) {
    (void)state;
    if (!gpu) skip();
    check_prescales(run_gpu);
}

static void test_one_scale_on_gpu(void **state) {
    (void)state;
    if (!gpu) skip();
    check_one_scale(run_gpu);
}

static void test_nvfp4_on_gpu(void **state) {
    (void)state;
    if (!gpu) skip();
    check_nvfp4(run_gpu);
}

static void test_blocks_of_128_on_gpu(void **state) {
    (void)state;
    if (!gpu) skip();
    check_blocks_of_128(SCALING_BLOCK128, run_gpu);
    check_blocks_of_128(SCALING_BLOCK128_FP32, run_gpu);
    check_rows_by_block(run_gpu);
    check_beside_fp32_scales(run_gpu);
}

// A line for each scaling, which dev/gpu/verdict.py reads, each from the policy that there was.
static void test_self_check_on_gpu(void **state) {
    (void)state;
    if (!gpu) skip();
    static const char *const NAMES[] = {"mx", "tensor", "block128", "block128-fp32", "nvfp4"};
    GemmDevice device = cuda_gemm_device();
    char text[512];
    int failed = 0;
    for (Scaling scaling = SCALING_MX; scaling < SCALING_NVFP4_46; scaling++) {
        failed += gpu->self_check(1u << scaling, text, sizeof(text)) != SELF_CHECK_PASSED;
        printf("    %s: %s\n", NAMES[scaling], text);
        cuda_gemm_use_device(device);
    }
    assert_int_equal(failed, 0);
}

// The kernels that a model's GEMMs get are others than those of small ones.
static void test_large_on_gpu(void **state) {
    (void)state;
    if (!gpu) skip();
    char text[512];
    bool passed = cuda_gemm_check_large(text, sizeof(text));
    printf("    large: %s\n", text);
    assert_true(passed);
}

// After all others, whose results are then there whatever cuBLASLt has no kernel for.
static void test_odd_on_gpu(void **state) {
    (void)state;
    if (!gpu) skip();
    check_odd(run_gpu);
    check_formats(129, 200, 513, ALL, 4, run_gpu);
}

int main(void) {
    omp_set_num_threads(1); // quantizing so little on many would be waiting for each other
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_even_on_gpu),      cmocka_unit_test(test_self_check_on_gpu),
        cmocka_unit_test(test_large_on_gpu),     cmocka_unit_test(test_blocks_of_128_on_gpu),
        cmocka_unit_test(test_one_scale_on_gpu), cmocka_unit_test(test_nvfp4_on_gpu),
        cmocka_unit_test(test_prescales_on_gpu), cmocka_unit_test(test_factors_on_gpu),
        cmocka_unit_test(test_odd_on_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
