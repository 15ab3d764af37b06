#include "gemm_path.h"

#include <stdio.h>

// Up to 12.8.3 cuBLASLt's own cache of heuristics takes MXFP8 for FP8 with one scale. Blocks of 128
// came with 12.9.
enum { NATIVE_CUBLASLT = 120804, BLOCK128_CUBLASLT = 120900 };

// Headers of older versions have no names for it.
#ifdef NO_NATIVE_MXFP8
enum { BUILT_WITH_NATIVE = false };
#else
enum { BUILT_WITH_NATIVE = true };
#endif
#ifdef NO_NATIVE_BLOCK128
enum { BUILT_WITH_BLOCK128 = false };
#else
enum { BUILT_WITH_BLOCK128 = true };
#endif

static const char *const ONLY_TN =
    "columnwise operands transposed first, since cuBLASLt multiplies these only with both stored along K";
static const char *const WEIGHTS_FIRST =
    "weights with one copy for both axes transposed first for dgrad, since cuBLASLt multiplies these only with both "
    "operands stored along K";
static const char *const MOVED =
    "weights with one copy for both axes transposed first for dgrad, and scales put where cuBLASLt wants them";
static const char *const PACKED = "codes packed first, two to a byte and stored along K, and scales laid out in tiles";

bool cuda_gemm_wants_rows_along_k(int capability, Scaling scaling) {
    if (scaling_is_nvfp4(scaling)) return true;
    return scaling == SCALING_MX ? capability / 10 == 12 : capability / 10 != 10;
}

// Returns whether tensors with one scale are multiplied natively: on Ada, Hopper and Blackwell.
// Sets `why` as cuda_gemm_has_native does.
static bool has_native_tensors(int capability, const char **why) {
    int major = capability / 10;
    *why = capability < 89             ? "compute capabilities below 8.9 have no FP8"
           : major > 12 || major == 11 ? "only compute capabilities 8.9, 9.0, 10.x and 12.x are known to cuBLASLt's FP8"
                                       : NULL;
    return !*why;
}

// Returns whether blocks of 128, each with an FP32 scale, are: on Hopper alone.
static bool has_native_block128(int capability, size_t cublaslt, const char **why) {
    *why = capability != 90               ? "only compute capability 9.0 multiplies FP8 by blocks of 128"
           : !BUILT_WITH_BLOCK128         ? "this program was built with a cuBLASLt before 12.9, which has no FP8 by "
                                            "blocks of 128: build it with CUDA 12.9 or later"
           : cublaslt < BLOCK128_CUBLASLT ? "FP8 by blocks of 128 needs cuBLASLt 12.9 or later"
                                          : NULL;
    return !*why;
}

// Returns whether MXFP8 and NVFP4 are: on Blackwell.
static bool has_native_small_blocks(int capability, size_t cublaslt, const char **why) {
    int major = capability / 10;
    *why = major < 10                   ? "compute capabilities below 10.0 have no block-scaled GEMMs"
           : major != 10 && major != 12 ? "only compute capabilities 10.x and 12.x are known to cuBLASLt's "
                                          "block-scaled GEMMs"
           : !BUILT_WITH_NATIVE
               ? "this program was built with a cuBLASLt before 12.8.4: build it with CUDA 12.9 or later"
           : cublaslt < NATIVE_CUBLASLT ? "block-scaled GEMMs need cuBLASLt 12.9 or later"
                                        : NULL;
    return !*why;
}

bool cuda_gemm_has_native(int capability, size_t cublaslt, Scaling scaling, const char **why) {
    bool is_block128 = scaling_is_block128(scaling);
    bool has_native = scaling == SCALING_TENSOR ? has_native_tensors(capability, why)
                      : is_block128             ? has_native_block128(capability, cublaslt, why)
                                                : has_native_small_blocks(capability, cublaslt, why);
    if (has_native && cuda_gemm_wants_rows_along_k(capability, scaling)) {
        *why = scaling_is_nvfp4(scaling) ? PACKED
               : is_block128             ? MOVED
               : scaling == SCALING_MX   ? ONLY_TN
                                         : WEIGHTS_FIRST;
    }
    return has_native;
}

static bool is_fp8(Format format) { return format == FORMAT_E4M3 || format == FORMAT_E5M2; }

// Returns why devices that multiply operands of a scaling natively don't with these formats of
// elements; NULL: they do.
static const char *why_not_formats(Scaling scaling, Format a, Format b) {
    if (scaling_is_nvfp4(scaling)) {
        bool is_both = a == FORMAT_E2M1 && b == FORMAT_E2M1;
        return is_both ? NULL : "NVFP4 operands other than E2M1 are multiplied in BF16";
    }
    if (!is_fp8(a) || !is_fp8(b)) return "operands other than FP8 are multiplied in BF16";
    return a == FORMAT_E5M2 && b == FORMAT_E5M2 ? "both operands are E5M2" : NULL;
}

GemmShape cuda_gemm_shape(Operand a, Operand b, GemmOptions options) {
    return (GemmShape){.M = options.transpose_a ? operand_cols(a) : operand_rows(a),
                       .N = options.transpose_b ? operand_rows(b) : operand_cols(b),
                       .K = options.transpose_a ? operand_rows(a) : operand_cols(a)};
}

static bool is_multiple(int64_t x, int64_t of) { return x % of == 0; }

static bool is_aligned_16(const void *pointer) { return (uintptr_t)pointer % 16 == 0; }

// Scales that are still to be swizzled may lie anywhere.
static bool is_aligned_as_multiplied(const QuantizedTensor *q) {
    return is_aligned_16(q->elements) && (q->form != FORM_SWIZZLED || is_aligned_16(q->scales));
}

static bool is_square(Operand operand) { return operand.quantized.axis == AXIS_SQUARE; }

// cuBLAS's manual, "Narrow precision data types usage", wants all dimensions, strides and pointers
// in 16-byte steps (of K 32 codes of four bits), at most one operand in E5M2, and bias only of
// BF16. It doesn't say what becomes of an MX or NVFP4 block that isn't whole, so K is in blocks; a
// tensor with one scale has none, and of blocks of 128 it says that the last may be shorter.
// Prescales divide alpha, which is on the device where it has a factor, in NVFP4 always.
static const char *why_not_native(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options) {
    const char *why;
    GemmShape s = cuda_gemm_shape(a, b, options);
    Scaling scaling = a.quantized.scaling;
    bool is_nvfp4 = scaling_is_nvfp4(scaling);
    if (!cuda_gemm_has_native(device.capability, device.cublaslt, scaling, &why)) return why;
    if (scaling != b.quantized.scaling && !(is_nvfp4 && scaling_is_nvfp4(b.quantized.scaling))) {
        return "operands of two scalings are multiplied in BF16";
    }
    if (device.policy == MX_GEMM_EMULATED) return "emulation was asked for, or the self-check wants it";
    if (!is_nvfp4 && (encoding_prescale(&a.quantized.encoding) != 1 || encoding_prescale(&b.quantized.encoding) != 1)) {
        return "products over prescales are multiplied in BF16";
    }
    if ((why = why_not_formats(scaling, a.quantized.format, b.quantized.format))) return why;
    if (options.transpose_a && options.transpose_b) return "both operands are transposed";
    if (scaling_is_block128(scaling) && is_square(a) && is_square(b)) return "both operands have square blocks";
    if ((scaling == SCALING_MX || is_nvfp4) && !is_multiple(s.K, 32)) return "K isn't a multiple of 32";
    if (!is_multiple(s.K, 16)) return "K isn't a multiple of 16";
    if (!is_multiple(s.M, 16) || !is_multiple(s.N, 16)) return "M or N isn't a multiple of 16";
    if (!is_multiple(d.stride * (int64_t)dtype_size(d.dtype), 16) || !is_aligned_16(d.data) ||
        !is_aligned_as_multiplied(&a.quantized) || !is_aligned_as_multiplied(&b.quantized)) {
        return "a matrix isn't aligned to 16 bytes";
    }
    if (options.bias && d.dtype == FORMAT_FP32) return "cuBLASLt would round the bias of an FP32 result to BF16";
    return NULL;
}

GemmPath cuda_gemm_path(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options, const char **why) {
    *why = NULL;
    a = operand_as_stored(a);
    b = operand_as_stored(b);
    if (operands_value_dtype(a, b) == FORMAT_FP32) return GEMM_FP32;
    if (!operand_is_quantized(a) && !operand_is_quantized(b)) return GEMM_BF16;
    if (!operand_is_quantized(a) || !operand_is_quantized(b)) return GEMM_EMULATED;
    *why = why_not_native(device, d, a, b, options);
    return *why ? GEMM_EMULATED : GEMM_NATIVE;
}

bool cuda_gemm_path_decodes(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options) {
    const char *why;
    GemmPath path = cuda_gemm_path(device, d, a, b, options, &why);
    return path == GEMM_EMULATED || path == GEMM_FP32;
}

const char *cuda_gemm_path_refuses(GemmDevice device, Tensor d, Operand a, Operand b, GemmOptions options) {
    const char *why;
    cuda_gemm_path(device, d, a, b, options, &why);
    return device.policy == MX_GEMM_NATIVE ? why : NULL;
}

QuantizedForm cuda_gemm_form(Scaling scaling, Axis axis, bool native, bool rows_along_k, bool for_one_gemm) {
    if (native && scaling == SCALING_MX) return FORM_SWIZZLED;
    bool is_packed = scaling_is_nvfp4(scaling);
    if (native && axis == AXIS_COLUMNWISE && rows_along_k && !is_packed) return FORM_TRANSPOSED;
    if (native) return FORM_PLAIN;
    return for_one_gemm ? FORM_DECODED : FORM_PLAIN;
}

QuantizedForm cuda_gemm_quantized_form(GemmDevice device, Scaling scaling, Axis axis, bool for_one_gemm) {
    const char *why;
    bool has_native = cuda_gemm_has_native(device.capability, device.cublaslt, scaling, &why);
    bool wants_native = has_native && device.policy != MX_GEMM_EMULATED;
    bool rows_along_k = cuda_gemm_wants_rows_along_k(device.capability, scaling);
    return cuda_gemm_form(scaling, axis, wants_native || device.policy == MX_GEMM_NATIVE, rows_along_k, for_one_gemm);
}

bool cuda_gemm_check_native(GemmDevice device, const char *name, Error *error) {
    const char *why;
    return cuda_gemm_has_native(device.capability, device.cublaslt, SCALING_MX, &why) ||
           cuda_gemm_has_native(device.capability, device.cublaslt, SCALING_TENSOR, &why) ||
           error_set(error, "%s can't multiply FP8 natively: %s", name, why);
}

// Writes how operands of a scaling are multiplied.
static void describe_scaling(GemmDevice device, Scaling scaling, char *text, size_t bytes) {
    const char *why;
    bool native = cuda_gemm_has_native(device.capability, device.cublaslt, scaling, &why);
    if (native && device.policy == MX_GEMM_EMULATED) {
        native = false;
        why = "as asked for, or as the self-check wants it";
    }
    snprintf(text, bytes, "%s%s%s%s", native ? "native" : "emulated in BF16", why ? " (" : "", why ? why : "",
             why ? ")" : "");
}

void cuda_gemm_describe(GemmDevice device, char *text, size_t bytes) {
    char mx[192], nvfp4[192], tensor[192], blocks[192];
    describe_scaling(device, SCALING_MX, mx, sizeof(mx));
    describe_scaling(device, SCALING_NVFP4, nvfp4, sizeof(nvfp4));
    describe_scaling(device, SCALING_TENSOR, tensor, sizeof(tensor));
    describe_scaling(device, SCALING_BLOCK128, blocks, sizeof(blocks));
    snprintf(
        text, bytes,
        "GEMMs by cuBLASLt %zu.%zu.%zu, MXFP8 %s, NVFP4 %s, FP8 with one scale per tensor %s, FP8 by blocks of 128 "
        "%s",
        device.cublaslt / 10000, device.cublaslt / 100 % 100, device.cublaslt % 100, mx, nvfp4, tensor, blocks);
}
