/*
llmc/numerics/mx.h in CUDA C++: it compiles for the device for every target the program will be
built for, and its host side gives what CUDA's own conversions give. Built where nvcc is; needs no
GPU, and runs nothing on one.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
extern "C" {
#include <cmocka.h>
}
#include <cuda_fp8.h> // conversions that ours must equal

#include "llmc/numerics/mx.h"

// Every function of mx.h in device code; never launched.
__global__ void every_function(uint8_t *codes, float *values, int64_t *offsets, const float *in, Format format,
                               ScaleRounding rounding) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint8_t scale = mx_scale_code(format, rounding, mx_magnitude_bits(in[i]));
    uint8_t element = mx_encode(format, in[i] * mx_scale_reciprocal(scale));
    codes[i] = mx_is_mx(format) ? element : 0;
    values[i] = mx_decode(format, element) * mx_scale_value(scale) + mx_from_bf16(mx_to_bf16(in[i]));
    offsets[i] = mx_swizzled_scale_offset(i, i / MX_BLOCK, 1024) + mx_swizzled_scale_bytes(i, 1024) +
                 mx_num_scales(AXIS_ROWWISE, i, 1024);
}

// FP32 bit patterns a prime apart: all exponents, signs and kinds of values.
static const uint64_t STRIDE = 9973;

static void test_host_encodes_as_cuda_does(void **) {
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += STRIDE) {
        float x = mx_bits_float((uint32_t)bits);
        bool is_nan = mx_magnitude_bits(x) > 0x7F800000u;
        uint8_t e4m3 = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
        uint8_t e5m2 = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
        assert_int_equal(mx_encode(FORMAT_E4M3, x), is_nan ? 0x7F : e4m3);
        assert_int_equal(mx_encode(FORMAT_E5M2, x), is_nan ? 0x7F : e5m2);
    }
}

#if CUDART_VERSION >= 12080 // from here on CUDA has E8M0
static void test_host_rounds_scales_as_cuda_does(void **) {
    const double max = 448;
    for (uint64_t bits = 0; bits < 0x7F800000u; bits += STRIDE) {
        float amax = mx_bits_float((uint32_t)bits);
        uint8_t expected = __nv_cvt_double_to_e8m0(amax / max, __NV_SATFINITE, cudaRoundPosInf);
        assert_int_equal(mx_scale_code(FORMAT_E4M3, SCALE_RCEIL, mx_magnitude_bits(amax)), expected);
    }
}
#endif

int main() {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host_encodes_as_cuda_does),
#if CUDART_VERSION >= 12080
        cmocka_unit_test(test_host_rounds_scales_as_cuda_does),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
