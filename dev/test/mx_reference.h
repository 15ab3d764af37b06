/*
What the tests of llmc/numerics/mx.h compare it with, none of it computed by that header:
- elements: ml_dtypes, through a generated table of thresholds that gives the code of every FP32
  input by comparison;
- elements and scales: NVIDIA's own conversions on the host (cuda_fp8.h, cuda_fp6.h, cuda_fp4.h),
  where a toolkit is;
- scales: the smallest amax of each code, from the definition of the rounding in exact double
  arithmetic.
*/
#pragma once

#include <math.h>
#include <stdlib.h>
#include "llmc/numerics/mx.h"
#include "fixtures/mx_tables.h"

// NVIDIA's headers don't compile without warnings as C.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-function"
#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif
#if CUDART_VERSION >= 12080 // with E8M0, FP6 and FP4
#include <cuda_fp8.h>
#include <cuda_fp6.h>
#include <cuda_fp4.h>
#define HAVE_CUDA_FP8 1
#else
#define HAVE_CUDA_FP8 0
#endif
#pragma GCC diagnostic pop

#define INFINITY_BITS 0x7F800000u

static inline const MxTable *reference_table(Format format) { return &mx_tables[format - FIRST_MX_FORMAT]; }

static inline uint32_t reference_sign(Format format, uint32_t bits) {
    return (bits >> 31) * (uint32_t)reference_table(format)->num_codes / 2;
}

// Returns the code of the value with FP32 bits `bits`: as many thresholds as its magnitude reaches.
// A NaN is 0x7F in FP8 and the largest value where there is none.
static inline uint8_t reference_code(Format format, uint32_t bits) {
    const MxTable *table = reference_table(format);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > INFINITY_BITS) return table->num_codes == 256 ? 0x7F : (uint8_t)table->max_code;
    int low = 0, high = table->max_code;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (magnitude >= table->thresholds[middle - 1]) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return (uint8_t)((uint32_t)low | reference_sign(format, bits));
}

static inline double reference_max(Format format) {
    const MxTable *table = reference_table(format);
    return (double)mx_bits_float(table->values[table->max_code]);
}

// Returns the FP32 bits of the smallest amax whose scale code is at least `code` (>= 1);
// INFINITY_BITS where no finite one is. Under rceil the quotient is an FP32 number: just over
// 2^-127 it is subnormal, has one bit less than amax, and is 2^-127 for one amax more.
static inline uint32_t reference_scale_threshold(Format format, ScaleRounding rounding, int code) {
    double max = reference_max(format);
    int emax = ilogb(max);
    double bound = 0;
    bool inclusive = true;
    switch (rounding) {
    case SCALE_FLOOR:
        bound = ldexp(1, emax + code - 127);
        break;
    case SCALE_EVEN: // half a step below the power of two rounds up to it
        bound = ldexp(1 - ldexp(1, -(reference_table(format)->mantissa_bits + 2)), emax + code - 127);
        break;
    case SCALE_CEIL:
        bound = ldexp(1, emax + code - 1 - 127);
        inclusive = false;
        break;
    default:
        bound = ldexp(max, code - 1 - 127);
        inclusive = false;
        break;
    }
    uint32_t bits = mx_float_bits((float)bound);
    bool quotient_rounds_down = rounding == SCALE_RCEIL && code == 1;
    return bits >= INFINITY_BITS ? INFINITY_BITS : bits + !inclusive + quotient_rounds_down;
}

#if HAVE_CUDA_FP8
static inline uint8_t cuda_code(Format format, float x) {
    switch (format) {
    case FORMAT_E4M3:
        return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    case FORMAT_E5M2:
        return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
    case FORMAT_E2M3:
        return __nv_cvt_float_to_fp6(x, __NV_E2M3, cudaRoundNearest);
    case FORMAT_E3M2:
        return __nv_cvt_float_to_fp6(x, __NV_E3M2, cudaRoundNearest);
    case FORMAT_E2M1:
        return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
    case FORMAT_FP32: // no default: the compiler asks for a new format's conversion
    case FORMAT_BF16:
    case NUM_FORMATS:
        break;
    }
    abort();
}

// Returns CUDA's code of a scale. NVIDIA's recipe rounds an FP32 product up; the power of two that
// `floor` and `ceil` divide by makes an exact quotient. CUDA has no `even`.
static inline uint8_t cuda_scale_code(Format format, ScaleRounding rounding, float amax) {
    double max = reference_max(format);
    float product = amax * (float)(1 / max);
    double quotient = rounding == SCALE_RCEIL ? (double)product : (double)amax / ldexp(1, ilogb(max));
    return __nv_cvt_double_to_e8m0(quotient, __NV_SATFINITE, rounding == SCALE_FLOOR ? cudaRoundZero : cudaRoundPosInf);
}
#endif
