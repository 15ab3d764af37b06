/*
llmc/numerics/mx.h on every input: all 2^32 FP32 values encoded and rounded in the five formats, and
the scale codes of all 2^31 amax for the five formats and four roundings, against the references of
mx_reference.h. Minutes; exits with 1 on a mismatch.

The sweeps go by ranges of inputs between two thresholds, which share one expected code, so that the
compiler vectorises the comparison; CUDA's conversions are called value by value.
*/
#include <stdio.h>
#include "llmc/model/recipe.h" // scale_rounding_name
#include "llmc/base/util.h"    // seconds_now
#include "mx_reference.h"

#define NUM_PATTERNS (UINT64_C(1) << 32)
#define CHUNK (UINT64_C(1) << 20) // bit patterns a thread takes at a time
enum { MAX_REPORTED = 5 };

// FP32 bits of the first magnitude after `magnitude` that may have another code.
static uint64_t next_change(Format format, uint32_t magnitude) {
    const MxTable *table = reference_table(format);
    int code = reference_code(format, magnitude);
    if (magnitude > INFINITY_BITS) return 0x80000000u;
    return code == table->max_code ? INFINITY_BITS + 1 : table->thresholds[code];
}

MX_FUNCTION int64_t count_other_codes(Format format, uint32_t first, uint32_t count, uint8_t expected) {
    uint32_t others = 0;
#pragma omp simd reduction(+ : others)
    for (uint32_t i = 0; i < count; i++) {
        others += mx_encode(format, mx_bits_float(first + i)) != expected;
    }
    return others;
}

// mx_round's of these that aren't the value of that code.
MX_FUNCTION int64_t count_other_values(Format format, uint32_t first, uint32_t count, uint8_t expected) {
    uint32_t others = 0, value = reference_table(format)->values[expected];
    bool is_nan = (value & 0x7FFFFFFF) > INFINITY_BITS;
#pragma omp simd reduction(+ : others)
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits = mx_float_bits(mx_round(format, mx_bits_float(first + i)));
        others += is_nan ? (bits & 0x7FFFFFFF) <= INFINITY_BITS : bits != value;
    }
    return others;
}

// Counts both, an input that is wrong in both twice: a copy for each format, in which it is a
// constant.
static int64_t count_mismatches(Format format, uint32_t first, uint32_t count, uint8_t expected) {
    int64_t others;
#define COUNT_OTHERS(constant) \
    others = count_other_codes(constant, first, count, expected) + count_other_values(constant, first, count, expected)
    MX_WITH_CONSTANT_FORMAT(format, COUNT_OTHERS)
#undef COUNT_OTHERS
    return others;
}

static void report_encode(Format format, uint32_t first, uint32_t count, uint8_t expected) {
    int reported = 0;
    for (uint32_t bits = first; bits < first + count && reported < MAX_REPORTED; bits++) {
        uint8_t code = mx_encode(format, mx_bits_float(bits));
        if (code == expected && count_other_values(format, bits, 1, expected) == 0) continue;
        printf("  0x%08X -> 0x%02X, rounded %g, not 0x%02X, %g\n", bits, code, mx_round(format, mx_bits_float(bits)),
               expected, mx_bits_float(reference_table(format)->values[expected]));
        reported++;
    }
}

static int64_t sweep_encode(Format format) {
    int64_t mismatches = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : mismatches)
    for (uint64_t chunk = 0; chunk < NUM_PATTERNS; chunk += CHUNK) {
        uint64_t sign = chunk & 0x80000000u;
        for (uint64_t bits = chunk, end; bits < chunk + CHUNK; bits = end) {
            end = sign + next_change(format, (uint32_t)(bits - sign));
            end = end < chunk + CHUNK ? end : chunk + CHUNK;
            uint8_t expected = reference_code(format, (uint32_t)bits);
            int64_t others = count_mismatches(format, (uint32_t)bits, (uint32_t)(end - bits), expected);
            if (others > 0 && mismatches == 0) {
                report_encode(format, (uint32_t)bits, (uint32_t)(end - bits), expected);
            }
            mismatches += others;
        }
    }
    return mismatches;
}

MX_FUNCTION int64_t count_other_scales(Format format, ScaleRounding rounding, uint32_t first, uint32_t count,
                                       uint8_t expected) {
    uint32_t others = 0;
#pragma omp simd reduction(+ : others)
    for (uint32_t i = 0; i < count; i++) {
        others += mx_scale_code(format, rounding, first + i) != expected;
    }
    return others;
}

static void report_scale(Format format, ScaleRounding rounding, uint32_t first, uint32_t count, uint8_t expected) {
    int reported = 0;
    for (uint32_t bits = first; bits < first + count && reported < MAX_REPORTED; bits++) {
        uint8_t code = mx_scale_code(format, rounding, bits);
        if (code == expected) continue;
        printf("  amax 0x%08X -> %d, not %d\n", bits, code, expected);
        reported++;
    }
}

// Each scale code's range of amax is one iteration; the code after the last finite one stands for
// MX_SCALE_NAN.
static int64_t sweep_scales(Format format, ScaleRounding rounding) {
    int64_t mismatches = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : mismatches)
    for (int code = 0; code <= MX_SCALE_NAN; code++) {
        uint32_t first = code == 0 ? 0 : INFINITY_BITS, end = 0x80000000u;
        if (code > 0 && code < MX_SCALE_NAN) first = reference_scale_threshold(format, rounding, code);
        if (code < MX_SCALE_NAN) {
            end = code + 1 < MX_SCALE_NAN ? reference_scale_threshold(format, rounding, code + 1) : INFINITY_BITS;
        }
        int64_t others = count_other_scales(format, rounding, first, end - first, (uint8_t)code);
        if (others > 0) report_scale(format, rounding, first, end - first, (uint8_t)code);
        mismatches += others;
    }
    return mismatches;
}

#if HAVE_CUDA_FP8
static int64_t sweep_encode_cuda(Format format) {
    int64_t mismatches = 0;
#pragma omp parallel for schedule(dynamic, CHUNK) reduction(+ : mismatches)
    for (uint64_t bits = 0; bits < NUM_PATTERNS; bits++) {
        float x = mx_bits_float((uint32_t)bits);
        uint8_t code = mx_encode(format, x), cuda = cuda_code(format, x);
        if (code == cuda) continue;
        if (mismatches++ < MAX_REPORTED) printf("  0x%08X -> 0x%02X, CUDA 0x%02X\n", (uint32_t)bits, code, cuda);
    }
    return mismatches;
}

// Finite amax only: CUDA saturates an infinite one, this project marks the block.
static int64_t sweep_scales_cuda(Format format, ScaleRounding rounding) {
    int64_t mismatches = 0;
#pragma omp parallel for schedule(dynamic, CHUNK) reduction(+ : mismatches)
    for (uint32_t bits = 0; bits < INFINITY_BITS; bits++) {
        uint8_t code = mx_scale_code(format, rounding, bits);
        uint8_t cuda = cuda_scale_code(format, rounding, mx_bits_float(bits));
        if (code == cuda) continue;
        if (mismatches++ < MAX_REPORTED) printf("  amax 0x%08X -> %d, CUDA %d\n", bits, code, cuda);
    }
    return mismatches;
}
#endif

static int64_t total_mismatches;
static double started;

static void conclude(const char *what, const char *format, const char *rounding, int64_t mismatches) {
    double now = seconds_now();
    printf("%-34s %-4s %-5s  %lld mismatches  %6.1f s\n", what, format, rounding, (long long)mismatches, now - started);
    fflush(stdout);
    total_mismatches += mismatches;
    started = now;
}

int main(void) {
    double beginning = seconds_now();
    started = beginning;
    for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++) {
        const char *name = reference_table(format)->name;
        conclude("encode, round, 2^32 FP32, ml_dtypes", name, "", sweep_encode(format));
        for (ScaleRounding rounding = SCALE_RCEIL; rounding < NUM_SCALE_ROUNDINGS; rounding++) {
            conclude("scale code, 2^31 amax, definition", name, SCALE_ROUNDING_NAMES[rounding],
                     sweep_scales(format, rounding));
        }
#if HAVE_CUDA_FP8
        conclude("encode, 2^32 FP32, CUDA", name, "", sweep_encode_cuda(format));
        for (ScaleRounding rounding = SCALE_RCEIL; rounding < SCALE_EVEN; rounding++) {
            conclude("scale code, finite amax, CUDA", name, SCALE_ROUNDING_NAMES[rounding],
                     sweep_scales_cuda(format, rounding));
        }
#endif
    }
    printf("%s: %lld mismatches in %.0f s%s\n", total_mismatches ? "FAILED" : "passed", (long long)total_mismatches,
           seconds_now() - beginning, HAVE_CUDA_FP8 ? "" : " (no CUDA headers here)");
    return total_mismatches != 0;
}
