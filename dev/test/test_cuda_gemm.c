/*
The CUDA backend's GEMM without a GPU:
- the path of a GEMM as a table: compute capability x cuBLASLt version x operands x shape x policy;
- the descriptors that cuBLASLt is given, read back;
- all of llmc/cuda/gemm*.c executed over a stand-in of cuBLASLt (cublaslt_standin.h): operands of
  all formats and forms, all layouts, tails, unaligned strides, every path; the self-check, with
  faults planted in the multiplication.
On a GPU gpu_test_cuda_gemm.c multiplies the same cases.
*/
#include "cublaslt_standin.h"
#include "gemm_cases.h"
#include "llmc/cuda/gemm.h"

#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CAPABILITY_H100 = 90, CAPABILITY_B200 = 100, CAPABILITY_5090 = 120, CUBLASLT_13_1 = 130100 };

// Paths
// ------------------------------------------------------------------------------------------------

static _Alignas(256) char somewhere[512];

static Operand shape_of(Format format, int64_t rows, int64_t cols, Axis axis) {
    if (!mx_is_mx(format)) return operand_tensor(tensor_make(somewhere, format, rows, cols));
    QuantizedTensor q = quantized_make(somewhere, format, axis, rows, cols, FORM_PLAIN);
    q.scales = (uint8_t *)somewhere;
    return operand_quantized(q);
}

static Operand operand_a(Format format, int64_t M, int64_t K, GemmOptions o) {
    return o.transpose_a ? shape_of(format, K, M, AXIS_COLUMNWISE) : shape_of(format, M, K, AXIS_ROWWISE);
}

static Operand operand_b(Format format, int64_t N, int64_t K, GemmOptions o) {
    return o.transpose_b ? shape_of(format, N, K, AXIS_ROWWISE) : shape_of(format, K, N, AXIS_COLUMNWISE);
}

typedef struct {
    int capability;
    size_t cublaslt;
    MxGemm policy;
    Format a, b;
    LayoutKind kind;
    int64_t M, N, K;
    GemmPath path;
    const char *why; // part of the reason; NULL: none
} PathCase;

#define AUTO MX_GEMM_AUTO
#define EMULATED GEMM_EMULATED
#define NATIVE GEMM_NATIVE

// Checks the path of a GEMM whose result is BF16, and part of the reason for it (NULL: there is
// none). `number`: that a failure names.
static void check_path(int number, GemmDevice device, Operand a, Operand b, GemmOptions o, GemmPath expected,
                       const char *part) {
    GemmShape s = cuda_gemm_shape(a, b, o);
    const char *why = "unset";
    GemmPath path = cuda_gemm_path(device, tensor_make(somewhere, BF16, s.M, s.N), a, b, o, &why);
    bool is_reason = part ? why && strstr(why, part) : !why;
    if (path != expected || !is_reason) {
        fail_msg("case %d: path %d, not %d; %s", number, (int)path, (int)expected, why ? why : "no reason");
    }
}

static void check_paths(const PathCase *cases, int count, Scaling scaling) {
    for (int i = 0; i < count; i++) {
        const PathCase *c = &cases[i];
        GemmOptions o = options_of(c->kind);
        Operand a = operand_a(c->a, c->M, c->K, o), b = operand_b(c->b, c->N, c->K, o);
        a.quantized.scaling = b.quantized.scaling = scaling;
        check_path(i, (GemmDevice){c->capability, c->cublaslt, c->policy}, a, b, o, c->path, c->why);
    }
}

// One scale per tensor: from Ada on, whatever the version of cuBLASLt, in steps of 16.
static void test_paths_with_one_scale(void **state) {
    (void)state;
    static const PathCase CASES[] = {
        {80, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 8.9"},
        {89, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {90, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {90, 120403, AUTO, E5M2, E4M3, DGRAD, 64, 64, 64, NATIVE, NULL},
        {90, 130100, AUTO, E5M2, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {90, 130100, MX_GEMM_NATIVE, E4M3, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {90, 130100, MX_GEMM_EMULATED, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "asked for"},
        {100, 130100, AUTO, E4M3, E5M2, DGRAD, 64, 64, 64, NATIVE, NULL},
        {110, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "only compute capabilities"},
        {120, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {130, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "only compute capabilities"},
        {90, 130100, AUTO, E5M2, E5M2, DGRAD, 64, 64, 64, EMULATED, "both operands are E5M2"},
        {90, 130100, AUTO, FORMAT_E2M1, E4M3, FPROP, 64, 64, 64, EMULATED, "other than FP8"},
        {90, 130100, AUTO, BF16, E4M3, FPROP, 64, 64, 64, EMULATED, NULL},
        {90, 130100, AUTO, FP32, E4M3, FPROP, 64, 64, 64, GEMM_FP32, NULL},
        {90, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 48, NATIVE, NULL},
        {90, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 40, EMULATED, "K isn't a multiple of 16"},
        {90, 130100, AUTO, E4M3, E4M3, FPROP, 72, 64, 64, EMULATED, "M or N"},
    };
    check_paths(CASES, COUNT(CASES), SCALING_TENSOR);
    GemmOptions o = options_of(FPROP);
    Operand a = operand_a(E4M3, 64, 64, o), b = operand_b(E4M3, 64, 64, o);
    a.quantized.scaling = SCALING_TENSOR;
    GemmDevice device = {CAPABILITY_B200, CUBLASLT_13_1, AUTO};
    check_path(COUNT(CASES), device, a, b, o, EMULATED, "two scalings");
    b.quantized.scaling = SCALING_TENSOR;
    check_path(COUNT(CASES) + 1, device, a, b, o, NATIVE, NULL);
    b.quantized.encoding.prescale = 0.75f;
    check_path(COUNT(CASES) + 2, device, a, b, o, EMULATED, "prescales");
}

// NVFP4: as MXFP8 by card and library, of E2M1 alone, in steps of 32 along K.
static void test_paths_with_nvfp4(void **state) {
    (void)state;
    static const Format E2M1 = FORMAT_E2M1;
    const PathCase CASES[] = {
        {89, 130100, AUTO, E2M1, E2M1, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {90, 130100, MX_GEMM_NATIVE, E2M1, E2M1, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {100, 130100, AUTO, E2M1, E2M1, FPROP, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E2M1, E2M1, DGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, MX_GEMM_NATIVE, E2M1, E2M1, WGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E2M1, E2M1, BOTH_TRANSPOSED, 64, 64, 64, EMULATED, "both operands are transposed"},
        {100, 130100, MX_GEMM_EMULATED, E2M1, E2M1, FPROP, 64, 64, 64, EMULATED, "asked for"},
        {100, 120804, AUTO, E2M1, E2M1, FPROP, 64, 64, 64, NATIVE, NULL},
        {100, 120803, AUTO, E2M1, E2M1, FPROP, 64, 64, 64, EMULATED, "12.9 or later"},
        {103, 130100, AUTO, E2M1, E2M1, WGRAD, 64, 64, 64, NATIVE, NULL},
        {110, 130100, AUTO, E2M1, E2M1, FPROP, 64, 64, 64, EMULATED, "only compute capabilities"},
        {120, 130100, AUTO, E2M1, E2M1, DGRAD, 64, 64, 64, NATIVE, NULL},
        {121, 130100, AUTO, E2M1, E2M1, WGRAD, 64, 64, 64, NATIVE, NULL},
        {130, 130100, AUTO, E2M1, E2M1, FPROP, 64, 64, 64, EMULATED, "only compute capabilities"},
        {100, 130100, AUTO, E4M3, E2M1, FPROP, 64, 64, 64, EMULATED, "other than E2M1"},
        {100, 130100, AUTO, E2M1, E5M2, DGRAD, 64, 64, 64, EMULATED, "other than E2M1"},
        {100, 130100, AUTO, BF16, E2M1, FPROP, 64, 64, 64, EMULATED, NULL},
        {100, 130100, AUTO, FP32, E2M1, FPROP, 64, 64, 64, GEMM_FP32, NULL},
        {100, 130100, AUTO, E2M1, E2M1, FPROP, 16, 16, 32, NATIVE, NULL},
        {100, 130100, AUTO, E2M1, E2M1, WGRAD, 50304, 768, 8192, NATIVE, NULL},
        {100, 130100, AUTO, E2M1, E2M1, FPROP, 64, 64, 48, EMULATED, "K isn't a multiple of 32"},
        {100, 130100, AUTO, E2M1, E2M1, WGRAD, 64, 64, 16, EMULATED, "K isn't a multiple of 32"},
        {100, 130100, AUTO, E2M1, E2M1, DGRAD, 64, 72, 64, EMULATED, "M or N"},
        {100, 130100, AUTO, E2M1, E2M1, FPROP, 8, 64, 64, EMULATED, "M or N"},
    };
    check_paths(CASES, COUNT(CASES), SCALING_NVFP4);
    check_paths(CASES, COUNT(CASES), SCALING_NVFP4_46);
    // Both kinds of it, squares and prescales beside each other; not MX beside it.
    GemmOptions o = options_of(DGRAD);
    Operand a = operand_a(E2M1, 64, 64, o), b = operand_b(E2M1, 64, 64, o);
    a.quantized.scaling = SCALING_NVFP4;
    b.quantized.scaling = SCALING_NVFP4_46;
    b.quantized.axis = AXIS_SQUARE;
    a.quantized.encoding.prescale = 0.75f;
    GemmDevice device = {CAPABILITY_B200, CUBLASLT_13_1, AUTO};
    check_path(COUNT(CASES), device, a, b, o, NATIVE, NULL);
    a.quantized.elements += 8;
    check_path(COUNT(CASES) + 1, device, a, b, o, EMULATED, "aligned");
    a.quantized.elements -= 8;
    b.quantized.scaling = SCALING_MX;
    check_path(COUNT(CASES) + 2, device, a, b, o, EMULATED, "two scalings");
}

// Blocks of 128: Hopper alone, from cuBLASLt 12.9 on, in steps of 16, and not both of them square.
static void test_paths_with_blocks_of_128(void **state) {
    (void)state;
    static const PathCase CASES[] = {
        {80, 130100, AUTO, E4M3, E4M3, FPROP, 128, 128, 128, EMULATED, "only compute capability 9.0"},
        {89, 130100, AUTO, E4M3, E4M3, FPROP, 128, 128, 128, EMULATED, "only compute capability 9.0"},
        {90, 130100, AUTO, E4M3, E4M3, FPROP, 128, 128, 128, NATIVE, NULL},
        {90, 130100, AUTO, E4M3, E4M3, DGRAD, 128, 128, 128, NATIVE, NULL},
        {90, 130100, AUTO, E4M3, E4M3, WGRAD, 128, 128, 128, NATIVE, NULL},
        {90, 130100, AUTO, E5M2, E4M3, WGRAD, 128, 128, 128, NATIVE, NULL},
        {90, 120900, AUTO, E4M3, E4M3, FPROP, 128, 128, 128, NATIVE, NULL},
        {90, 120804, AUTO, E4M3, E4M3, FPROP, 128, 128, 128, EMULATED, "12.9 or later"},
        {90, 0, AUTO, E4M3, E4M3, FPROP, 128, 128, 128, EMULATED, "12.9 or later"},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 128, 128, 128, EMULATED, "only compute capability 9.0"},
        {120, 130100, AUTO, E4M3, E4M3, FPROP, 128, 128, 128, EMULATED, "only compute capability 9.0"},
        {90, 130100, MX_GEMM_NATIVE, E4M3, E4M3, WGRAD, 128, 128, 128, NATIVE, NULL},
        {90, 130100, MX_GEMM_EMULATED, E4M3, E4M3, WGRAD, 128, 128, 128, EMULATED, "asked for"},
        {90, 130100, AUTO, E5M2, E5M2, FPROP, 128, 128, 128, EMULATED, "both operands are E5M2"},
        {90, 130100, AUTO, FORMAT_E2M3, E4M3, FPROP, 128, 128, 128, EMULATED, "other than FP8"},
        {90, 130100, AUTO, E4M3, E4M3, BOTH_TRANSPOSED, 128, 128, 128, EMULATED, "both operands are transposed"},
        {90, 130100, AUTO, E4M3, BF16, FPROP, 128, 128, 128, EMULATED, NULL},
        {90, 130100, AUTO, E4M3, FP32, FPROP, 128, 128, 128, GEMM_FP32, NULL},
        {90, 130100, AUTO, E4M3, E4M3, FPROP, 16, 48, 80, NATIVE, NULL},
        {90, 130100, AUTO, E4M3, E4M3, FPROP, 128, 128, 72, EMULATED, "K isn't a multiple of 16"},
        {90, 130100, AUTO, E4M3, E4M3, WGRAD, 128, 72, 128, EMULATED, "M or N"},
    };
    check_paths(CASES, COUNT(CASES), SCALING_BLOCK128);
    check_paths(CASES, COUNT(CASES), SCALING_BLOCK128_FP32);
    GemmDevice h100 = {CAPABILITY_H100, CUBLASLT_13_1, AUTO};
    GemmOptions o = options_of(DGRAD);
    Operand a = operand_a(E4M3, 128, 128, o), b = operand_b(E4M3, 128, 128, o);
    a.quantized.scaling = b.quantized.scaling = SCALING_BLOCK128;
    a.quantized.scales += 4; // copied to where they are aligned
    b.quantized.axis = AXIS_SQUARE;
    check_path(COUNT(CASES), h100, a, b, o, NATIVE, NULL);
    a.quantized.axis = AXIS_SQUARE;
    check_path(COUNT(CASES) + 1, h100, a, b, o, EMULATED, "square");
    a.quantized.axis = AXIS_ROWWISE;
    a.quantized.scaling = SCALING_BLOCK128_FP32;
    check_path(COUNT(CASES) + 2, h100, a, b, o, EMULATED, "two scalings");
}

// A device that multiplies a scaling natively says what it does with operands first, if anything:
// on 10.x it takes MXFP8 and tensors with one scale as they are.
static void test_what_is_done_first(void **state) {
    (void)state;
    static const struct {
        int capability;
        const char *of_mx, *of_tensor, *of_block128, *of_nvfp4; // part of it; NULL: nothing
    } CASES[] = {{89, "below 10.0", "transposed first", "only compute capability 9.0", "below 10.0"},
                 {90, "below 10.0", "transposed first", "transposed first for dgrad, and scales", "below 10.0"},
                 {100, NULL, NULL, "only compute capability 9.0", "packed first"},
                 {120, "transposed first", "transposed first", "only compute capability 9.0", "packed first"}};
    for (int i = 0; i < COUNT(CASES); i++) {
        const char *parts[] = {CASES[i].of_mx, CASES[i].of_tensor, CASES[i].of_block128, CASES[i].of_block128,
                               CASES[i].of_nvfp4};
        for (Scaling scaling = SCALING_MX; scaling <= SCALING_NVFP4; scaling++) {
            const char *why = "unset", *part = parts[scaling];
            bool native = cuda_gemm_has_native(CASES[i].capability, CUBLASLT_13_1, scaling, &why);
            assert_true(part ? why && strstr(why, part) : !why);
            assert_true(native == (!part || strstr(part, "first")));
        }
    }
}

// A GEMM is refused where a policy of native GEMMs alone has to emulate it, and nowhere else.
static void test_refusals(void **state) {
    (void)state;
    static const struct {
        int capability;
        MxGemm policy;
        Scaling scaling;
        Format b;
        int64_t K;
        const char *why; // NULL: isn't refused
    } CASES[] = {{90, AUTO, SCALING_BLOCK128_FP32, E4M3, 136, NULL},
                 {90, AUTO, SCALING_BLOCK128_FP32, BF16, 128, NULL},
                 {90, MX_GEMM_EMULATED, SCALING_BLOCK128_FP32, E4M3, 128, NULL},
                 {90, MX_GEMM_NATIVE, SCALING_BLOCK128_FP32, E4M3, 144, NULL},
                 {90, MX_GEMM_NATIVE, SCALING_BLOCK128_FP32, E4M3, 136, "K isn't a multiple of 16"},
                 {90, MX_GEMM_NATIVE, SCALING_BLOCK128, E4M3, 136, "K isn't a multiple of 16"},
                 {90, MX_GEMM_NATIVE, SCALING_BLOCK128_FP32, FORMAT_E2M3, 128, "other than FP8"},
                 {90, MX_GEMM_NATIVE, SCALING_BLOCK128_FP32, BF16, 128, NULL},
                 {100, AUTO, SCALING_BLOCK128_FP32, E4M3, 128, NULL},
                 {100, MX_GEMM_NATIVE, SCALING_BLOCK128_FP32, E4M3, 128, "only compute capability 9.0"},
                 {90, MX_GEMM_NATIVE, SCALING_MX, E4M3, 128, "below 10.0"},
                 {90, AUTO, SCALING_MX, E4M3, 128, NULL},
                 {90, MX_GEMM_NATIVE, SCALING_TENSOR, E4M3, 128, NULL},
                 {100, MX_GEMM_NATIVE, SCALING_MX, BF16, 128, NULL}};
    GemmOptions o = options_of(FPROP);
    for (int i = 0; i < COUNT(CASES); i++) {
        Operand a = operand_a(E4M3, 64, CASES[i].K, o), b = operand_b(CASES[i].b, 64, CASES[i].K, o);
        a.quantized.scaling = b.quantized.scaling = CASES[i].scaling;
        GemmDevice device = {CASES[i].capability, CUBLASLT_13_1, CASES[i].policy};
        for (int exchanged = 0; exchanged < 2; exchanged++) {
            Operand first = exchanged ? b : a, second = exchanged ? a : b;
            const char *why = cuda_gemm_path_refuses(device, tensor_make(somewhere, BF16, 64, 64), first, second, o);
            if (!why != !CASES[i].why || (why && !strstr(why, CASES[i].why))) {
                fail_msg("case %d: %s", i, why ? why : "isn't refused");
            }
        }
    }
}

static void test_paths(void **state) {
    (void)state;
    static const PathCase CASES[] = {
        // capability and library
        {75, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {89, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {90, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {90, 130100, MX_GEMM_NATIVE, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "below 10.0"},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, DGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, BOTH_TRANSPOSED, 64, 64, 64, EMULATED, "both operands are transposed"},
        {103, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 120900, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {100, 120804, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {100, 120803, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "12.9 or later"},
        {100, 120603, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "12.9 or later"},
        {110, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "only compute capabilities"},
        {120, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {120, 130100, AUTO, E4M3, E4M3, DGRAD, 64, 64, 64, NATIVE, NULL},
        {120, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 64, NATIVE, NULL},
        {120, 130100, AUTO, E4M3, E4M3, BOTH_TRANSPOSED, 64, 64, 64, EMULATED, "both operands are transposed"},
        {120, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 48, EMULATED, "K isn't"},
        {120, 130100, MX_GEMM_EMULATED, E4M3, E4M3, DGRAD, 64, 64, 64, EMULATED, "asked for"},
        {121, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        {120, 120803, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "12.9 or later"},
        {130, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "only compute capabilities"},
        // policy
        {100, 130100, MX_GEMM_EMULATED, E4M3, E4M3, FPROP, 64, 64, 64, EMULATED, "asked for"},
        {100, 130100, MX_GEMM_NATIVE, E4M3, E4M3, FPROP, 64, 64, 64, NATIVE, NULL},
        // formats
        {100, 130100, AUTO, E5M2, E4M3, DGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E5M2, DGRAD, 64, 64, 64, NATIVE, NULL},
        {100, 130100, AUTO, E5M2, E5M2, DGRAD, 64, 64, 64, EMULATED, "both operands are E5M2"},
        {100, 130100, AUTO, FORMAT_E2M3, E4M3, FPROP, 64, 64, 64, EMULATED, "other than FP8"},
        {100, 130100, AUTO, E4M3, FORMAT_E3M2, FPROP, 64, 64, 64, EMULATED, "other than FP8"},
        {100, 130100, AUTO, FORMAT_E2M1, FORMAT_E2M1, FPROP, 64, 64, 64, EMULATED, "other than FP8"},
        {100, 130100, AUTO, BF16, E4M3, FPROP, 64, 64, 64, EMULATED, NULL},
        {100, 130100, AUTO, E4M3, BF16, WGRAD, 64, 64, 64, EMULATED, NULL},
        {100, 130100, AUTO, BF16, BF16, FPROP, 64, 64, 64, GEMM_BF16, NULL},
        {90, 130100, AUTO, BF16, BF16, FPROP, 1, 1, 1, GEMM_BF16, NULL},
        {100, 130100, AUTO, FP32, BF16, FPROP, 64, 64, 64, GEMM_FP32, NULL},
        {100, 130100, AUTO, E4M3, FP32, FPROP, 64, 64, 64, GEMM_FP32, NULL},
        {90, 130100, AUTO, FP32, FP32, DGRAD, 7, 5, 3, GEMM_FP32, NULL},
        // shapes
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 16, 16, 32, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 48, 80, 96, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, WGRAD, 32768, 50304, 768, NATIVE, NULL},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 15, 64, 64, EMULATED, "M or N"},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 64, 50257, 64, EMULATED, "M or N"},
        {100, 130100, AUTO, E4M3, E4M3, DGRAD, 64, 72, 64, EMULATED, "M or N"},
        {100, 130100, AUTO, E4M3, E4M3, FPROP, 64, 64, 48, EMULATED, "K isn't"},
        {100, 130100, AUTO, E4M3, E4M3, WGRAD, 64, 64, 65, EMULATED, "K isn't"},
    };
    check_paths(CASES, COUNT(CASES), SCALING_MX);
}

// A decoded operand is one of BF16, and no reason is given for not multiplying it natively.
static void test_paths_by_form(void **state) {
    (void)state;
    static const struct {
        QuantizedForm a, b;
        GemmPath path;
    } CASES[] = {{FORM_PLAIN, FORM_PLAIN, NATIVE},        {FORM_SWIZZLED, FORM_SWIZZLED, NATIVE},
                 {FORM_SWIZZLED, FORM_PLAIN, NATIVE},     {FORM_DECODED, FORM_PLAIN, EMULATED},
                 {FORM_SWIZZLED, FORM_DECODED, EMULATED}, {FORM_DECODED, FORM_DECODED, GEMM_BF16}};
    for (int i = 0; i < COUNT(CASES); i++) {
        GemmOptions o = options_of(DGRAD);
        Operand a = operand_a(E4M3, 64, 64, o), b = operand_b(E4M3, 64, 64, o);
        a.quantized.form = CASES[i].a;
        b.quantized.form = CASES[i].b;
        check_path(i, (GemmDevice){CAPABILITY_B200, CUBLASLT_13_1, AUTO}, a, b, o, CASES[i].path, NULL);
    }
}

static void check_form(GemmDevice device, Scaling scaling, Axis axis, QuantizedForm once, QuantizedForm kept) {
    assert_int_equal(cuda_gemm_quantized_form(device, scaling, axis, true), once);
    assert_int_equal(cuda_gemm_quantized_form(device, scaling, axis, false), kept);
}

// Forms in which operands are quantized: those made for one GEMM, those kept.
static void test_quantized_form(void **state) {
    (void)state;
    static const struct {
        GemmDevice device;
        QuantizedForm once, kept;
    } CASES[] = {{{90, 130100, AUTO}, FORM_DECODED, FORM_PLAIN},
                 {{90, 130100, MX_GEMM_EMULATED}, FORM_DECODED, FORM_PLAIN},
                 {{90, 130100, MX_GEMM_NATIVE}, FORM_SWIZZLED, FORM_SWIZZLED}, // whose GEMMs then refuse
                 {{100, 130100, AUTO}, FORM_SWIZZLED, FORM_SWIZZLED},
                 {{103, 130100, MX_GEMM_NATIVE}, FORM_SWIZZLED, FORM_SWIZZLED},
                 {{100, 130100, MX_GEMM_EMULATED}, FORM_DECODED, FORM_PLAIN},
                 {{100, 120803, AUTO}, FORM_DECODED, FORM_PLAIN},
                 {{110, 130100, AUTO}, FORM_DECODED, FORM_PLAIN},
                 {{120, 130100, AUTO}, FORM_SWIZZLED, FORM_SWIZZLED},
                 {{120, 130100, MX_GEMM_EMULATED}, FORM_DECODED, FORM_PLAIN}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        GemmDevice device = CASES[i].device;
        bool emulates = device.policy == MX_GEMM_EMULATED || device.capability == 110;
        bool has_blocks = device.policy == MX_GEMM_NATIVE || (device.policy == AUTO && device.capability == 90);
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
            // Codes along K, which but for 10.x all want of FP8.
            QuantizedForm native = axis == AXIS_COLUMNWISE ? FORM_TRANSPOSED : FORM_PLAIN;
            QuantizedForm tensor = device.capability / 10 == 10 ? FORM_PLAIN : native;
            check_form(device, SCALING_MX, axis, CASES[i].once, CASES[i].kept);
            check_form(device, SCALING_TENSOR, axis, emulates ? FORM_DECODED : tensor, emulates ? FORM_PLAIN : tensor);
            QuantizedForm nvfp4 = CASES[i].once == FORM_SWIZZLED ? FORM_PLAIN : FORM_DECODED; // which the GEMM packs
            check_form(device, SCALING_NVFP4, axis, nvfp4, FORM_PLAIN);
            check_form(device, SCALING_NVFP4_46, axis, nvfp4, FORM_PLAIN);
            QuantizedForm blocks = device.capability / 10 == 10 ? FORM_PLAIN : native;
            for (Scaling scaling = SCALING_BLOCK128; scaling <= SCALING_BLOCK128_FP32; scaling++) {
                check_form(device, scaling, axis, has_blocks ? blocks : FORM_DECODED, has_blocks ? blocks : FORM_PLAIN);
            }
        }
    }
}

static const char *path_of_aligned(size_t d_offset, int64_t d_stride, Format d_dtype, size_t a_offset, size_t b_offset,
                                   const float *bias, GemmPath *path) {
    GemmOptions o = {.transpose_b = true, .bias = bias};
    Operand a = operand_a(E4M3, 64, 64, o), b = operand_b(E4M3, 64, 64, o);
    a.quantized.elements += a_offset;
    b.quantized.elements += b_offset;
    a.quantized.scales += 1; // plain scales may lie anywhere
    Tensor d = tensor_make(somewhere + d_offset, d_dtype, 64, 64);
    d.stride = d_stride;
    const char *why;
    *path = cuda_gemm_path((GemmDevice){CAPABILITY_B200, CUBLASLT_13_1, AUTO}, d, a, b, o, &why);
    return why;
}

static void test_paths_by_alignment(void **state) {
    (void)state;
    static const float bias[64];
    GemmPath path;
    assert_null(path_of_aligned(0, 64, BF16, 0, 0, NULL, &path));
    assert_int_equal(path, NATIVE);
    assert_null(path_of_aligned(16, 72, BF16, 16, 48, bias, &path));
    assert_null(path_of_aligned(16, 68, FP32, 16, 48, NULL, &path));
    assert_non_null(strstr(path_of_aligned(8, 64, BF16, 0, 0, NULL, &path), "aligned"));
    assert_int_equal(path, EMULATED);
    assert_non_null(strstr(path_of_aligned(0, 68, BF16, 0, 0, NULL, &path), "aligned"));
    assert_non_null(strstr(path_of_aligned(0, 66, FP32, 0, 0, NULL, &path), "aligned"));
    assert_non_null(strstr(path_of_aligned(0, 64, BF16, 1, 0, NULL, &path), "aligned"));
    assert_non_null(strstr(path_of_aligned(0, 64, BF16, 0, 8, NULL, &path), "aligned"));
    assert_non_null(strstr(path_of_aligned(0, 64, FP32, 0, 0, bias, &path), "bias"));
    GemmOptions o = options_of(WGRAD);
    Operand a = operand_a(E4M3, 64, 64, o), b = operand_b(E4M3, 64, 64, o);
    a.quantized.form = b.quantized.form = FORM_SWIZZLED; // scales that are used where they lie
    GemmDevice device = {CAPABILITY_B200, CUBLASLT_13_1, AUTO};
    check_path(0, device, a, b, o, NATIVE, NULL);
    b.quantized.scales += 8;
    check_path(1, device, a, b, o, EMULATED, "aligned");
}

// Descriptors
// ------------------------------------------------------------------------------------------------

typedef struct {
    LayoutKind kind;
    int64_t M, N, K; // of the GEMM: d is M x N
    uint32_t type_a, type_b;
    Format d;
    int64_t stride_padding; // of all rows
    size_t offset;          // bytes that pointers lie beyond an aligned place
    bool has_bias, has_factor;
    GemmScales scales_of_a, scales_of_b;
    float prescale;
} DescriptorCase;

static int32_t mode_of(GemmScales scales) {
    return scales == SCALES_OF_MX        ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0
           : scales == SCALES_OF_NVFP4   ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3
           : scales == SCALES_OF_BLOCKS  ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
           : scales == SCALES_OF_SQUARES ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                         : CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

static void check_layout_is(cublasLtMatrixLayout_t layout, uint32_t type, int64_t rows, int64_t cols, int64_t stride) {
    Layout l = read_layout(layout);
    assert_int_equal(l.type, type);
    assert_int_equal(l.rows, rows);
    assert_int_equal(l.cols, cols);
    assert_int_equal(l.stride, stride);
}

static void check_descriptors(const DescriptorCase *c) {
    GemmOptions o = options_of(c->kind);
    int64_t a_rows = o.transpose_a ? c->K : c->M, a_cols = o.transpose_a ? c->M : c->K;
    int64_t b_rows = o.transpose_b ? c->N : c->K, b_cols = o.transpose_b ? c->K : c->N;
    bool native = is_fp8_type(c->type_a) || c->type_a == CUDA_R_4F_E2M1;
    const char *data = somewhere + c->offset;
    const void *a_scales = native ? somewhere + 16 : NULL, *b_scales = native ? somewhere + 32 : NULL;
    const float *factor = c->has_factor ? (const float *)somewhere : NULL;
    GemmMatrix a = {.data = data,
                    .scales = a_scales,
                    .scales_of = c->scales_of_a,
                    .factor = factor,
                    .type = (cudaDataType_t)c->type_a,
                    .rows = a_rows,
                    .cols = a_cols,
                    .stride = a_cols + c->stride_padding};
    GemmMatrix b = {.data = data,
                    .scales = b_scales,
                    .scales_of = c->scales_of_b,
                    .prescale = c->prescale,
                    .type = (cudaDataType_t)c->type_b,
                    .rows = b_rows,
                    .cols = b_cols,
                    .stride = b_cols + c->stride_padding};
    Tensor d = tensor_make((void *)data, c->d, c->M, c->N);
    d.stride += c->stride_padding;
    GemmBias bias = {c->has_bias ? somewhere + 64 : NULL, CUDA_R_16BF};
    o.fast_sum = c->kind == FPROP;

    GemmCall call = cuda_gemm_call(d, a, b, bias, o);
    GemmDescriptors t = cuda_gemm_descriptors(&call);
    cuda_gemm_set_pointers(&t, b.scales, a.scales, bias.data);

    Operation read = read_operation(t.operation);
    // Row-major a and b are the column-major B^T and A^T: what they are transposed by, and their
    // order, are exchanged.
    assert_int_equal(read.transpose_a, o.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    assert_int_equal(read.transpose_b, o.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    assert_int_equal(read.a_mode, mode_of(native ? c->scales_of_b : SCALES_OF_TENSOR));
    assert_int_equal(read.b_mode, mode_of(native ? c->scales_of_a : SCALES_OF_TENSOR));
    assert_int_equal(read.fast_accumulation, native && c->scales_of_a == SCALES_OF_TENSOR && c->kind == FPROP);
    bool has_alpha = c->has_factor || c->prescale != 0;
    assert_int_equal(read.pointer_mode, has_alpha ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST);
    assert_ptr_equal(read.a_scales, b_scales);
    assert_ptr_equal(read.b_scales, a_scales);
    assert_int_equal(read.epilogue, c->has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
    assert_int_equal(read.bias_type, c->has_bias ? CUDA_R_16BF : -1);
    assert_ptr_equal(read.bias, bias.data);
    check_layout_is(t.a, c->type_b, b_cols, b_rows, b_cols + c->stride_padding);
    check_layout_is(t.b, c->type_a, a_cols, a_rows, a_cols + c->stride_padding);
    check_layout_is(t.d, c->d == FP32 ? CUDA_R_32F : CUDA_R_16BF, c->N, c->M, c->N + c->stride_padding);

    uint64_t workspace = 0;
    size_t written;
    cublasLtMatmulPreferenceGetAttribute(t.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof(workspace), &written);
    assert_int_equal(workspace, 32 << 20);
    uint32_t alignment = c->offset ? (uint32_t)(c->offset & -c->offset) : 256;
    assert_int_equal(read_preference(t.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES), alignment);
    assert_int_equal(read_preference(t.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES), alignment);
    assert_int_equal(read_preference(t.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES), alignment);
    assert_int_equal(read_preference(t.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES), alignment);
    cuda_gemm_descriptors_destroy(&t);
}

// What cuBLASLt, which counts in columns, is told of a layer of N = 48 outputs and K = 160 inputs
// over M = 96 tokens. fprop's A is W, transposed; m, n, k = N, M, K. dgrad's A is W; K, M, N.
// wgrad's A is X and its B is dY, transposed; K, N, M.
static void test_descriptors_of_a_layer(void **state) {
    (void)state;
    enum { M = 96, N = 48, K = 160 };
    static const struct {
        LayoutKind kind;
        int64_t gemm[3], m, n, k;
        int32_t transpose_a, transpose_b;
    } TABLE[] = {{FPROP, {M, N, K}, N, M, K, CUBLAS_OP_T, CUBLAS_OP_N},
                 {DGRAD, {M, K, N}, K, M, N, CUBLAS_OP_N, CUBLAS_OP_N},
                 {WGRAD, {N, K, M}, K, N, M, CUBLAS_OP_N, CUBLAS_OP_T}};
    for (int i = 0; i < 3; i++) {
        GemmOptions o = options_of(TABLE[i].kind);
        const int64_t *gemm = TABLE[i].gemm;
        int64_t a_rows = o.transpose_a ? gemm[2] : gemm[0], a_cols = o.transpose_a ? gemm[0] : gemm[2];
        int64_t b_rows = o.transpose_b ? gemm[1] : gemm[2], b_cols = o.transpose_b ? gemm[2] : gemm[1];
        GemmCall call =
            cuda_gemm_call(tensor_make(somewhere, BF16, gemm[0], gemm[1]),
                           (GemmMatrix){somewhere, NULL, SCALES_OF_MX, NULL, 0, CUDA_R_8F_E4M3, a_rows, a_cols, a_cols},
                           (GemmMatrix){somewhere, NULL, SCALES_OF_MX, NULL, 0, CUDA_R_8F_E4M3, b_rows, b_cols, b_cols},
                           (GemmBias){NULL, CUDA_R_16BF}, o);
        GemmDescriptors t = cuda_gemm_descriptors(&call);
        Operation read = read_operation(t.operation);
        assert_int_equal(call.m, TABLE[i].m);
        assert_int_equal(call.n, TABLE[i].n);
        assert_int_equal(call.k, TABLE[i].k);
        assert_int_equal(read.transpose_a, TABLE[i].transpose_a);
        assert_int_equal(read.transpose_b, TABLE[i].transpose_b);
        cuda_gemm_descriptors_destroy(&t);
    }
}

static void test_descriptors(void **state) {
    (void)state;
    static const int64_t SHAPES[][3] = {{64, 96, 128}, {1, 1, 1}, {33, 65, 31}, {1, 50257, 768}, {4096, 1, 7}};
    static const GemmScales OTHERS[][2] = {{SCALES_OF_TENSOR, SCALES_OF_TENSOR},
                                           {SCALES_OF_BLOCKS, SCALES_OF_BLOCKS},
                                           {SCALES_OF_BLOCKS, SCALES_OF_SQUARES},
                                           {SCALES_OF_SQUARES, SCALES_OF_BLOCKS}};
    int count = 0;
    for (LayoutKind kind = 0; kind < NUM_LAYOUTS; kind++) {
        for (int d = 0; d < 2; d++) {
            for (int has_bias = 0; has_bias < 2; has_bias++) {
                Format dtype = d ? FP32 : BF16;
                for (size_t s = 0; s < sizeof(SHAPES) / sizeof(SHAPES[0]); s++, count += 3) {
                    const int64_t *x = SHAPES[s];
                    DescriptorCase c = {kind, x[0], x[1],     x[2],  CUDA_R_16BF,  CUDA_R_16BF,  dtype,
                                        0,    0,    has_bias, false, SCALES_OF_MX, SCALES_OF_MX, 0};
                    check_descriptors(&c);
                    c.prescale = 0.75f;
                    check_descriptors(&c);
                    c.prescale = 0;
                    c.has_factor = true;
                    c.stride_padding = 3;
                    c.offset = 4 << s;
                    check_descriptors(&c);
                }
                for (int e5m2 = 0; e5m2 < 3; e5m2++, count += 5) {
                    DescriptorCase c = {kind,
                                        160,
                                        48,
                                        224,
                                        e5m2 == 1 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3,
                                        e5m2 == 2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3,
                                        dtype,
                                        0,
                                        0,
                                        has_bias,
                                        false,
                                        SCALES_OF_MX,
                                        SCALES_OF_MX,
                                        0};
                    check_descriptors(&c);
                    c.offset = 16;
                    for (size_t i = 0; i < sizeof(OTHERS) / sizeof(OTHERS[0]); i++) {
                        c.scales_of_a = OTHERS[i][0];
                        c.scales_of_b = OTHERS[i][1];
                        check_descriptors(&c);
                    }
                }
                DescriptorCase fp4 = {.kind = kind,
                                      .M = 160,
                                      .N = 48,
                                      .K = 224,
                                      .type_a = CUDA_R_4F_E2M1,
                                      .type_b = CUDA_R_4F_E2M1,
                                      .d = dtype,
                                      .has_bias = has_bias,
                                      .has_factor = true,
                                      .scales_of_a = SCALES_OF_NVFP4,
                                      .scales_of_b = SCALES_OF_NVFP4};
                check_descriptors(&fp4);
                count++;
            }
        }
    }
    DescriptorCase fp32 = {FPROP, 33, 65,    31,    CUDA_R_32F,   CUDA_R_32F,   FP32,
                           1,     4,  false, false, SCALES_OF_MX, SCALES_OF_MX, 0};
    check_descriptors(&fp32);
    printf("    %d sets of descriptors read back\n", count + 1);
}

// Values
// ------------------------------------------------------------------------------------------------

// Multiplies on the host, in one workspace for all calls that is poisoned where a call may write.
static void run_on_host(Tensor d, Operand a, Operand b, GemmOptions options) {
    enum { CAPACITY = CUDA_CUBLASLT_BYTES + (96 << 20) };
    static uint8_t *workspace;
    size_t bytes = cuda_gemm_workspace(a, b);
    assert_true(bytes < CAPACITY);
    if (!workspace) workspace = aligned_alloc(256, CAPACITY);
    memset(workspace + CUDA_CUBLASLT_BYTES, UNWRITTEN, bytes - CUDA_CUBLASLT_BYTES);
    workspace[bytes] = GUARD;
    cuda_use_workspace(workspace, bytes);
    cuda_gemm(d, a, b, options);
    assert_int_equal(workspace[bytes], GUARD);
}

// Makes as if there were such a device, whose cuBLASLt does all that it is asked for.
static void pretend(int capability, MxGemm policy) {
    standin = (Standin){.takes_only_tn = capability / 10 != 10,
                        .takes_no_mx = capability / 10 < 10,
                        .takes_blocks_of_128 = capability == CAPABILITY_H100};
    cuda_gemm_use_device((GemmDevice){capability, CUBLASLT_13_1, policy});
}

static void test_values_emulated(void **state) {
    (void)state;
    pretend(CAPABILITY_H100, AUTO);
    check_even(run_on_host);
    check_odd(run_on_host);
}

// Factors, over prescales, are alpha, on the device, wherever a product comes from: also from
// copies.
static void test_values_with_factors(void **state) {
    (void)state;
    for (int odd = TAKES_ODD; odd <= NO_ODD; odd++) {
        pretend(CAPABILITY_H100, AUTO);
        standin.odd = odd;
        check_factors(run_on_host);
        assert_non_null(standin.factors);
        standin.factors = NULL;
        check_prescales(run_on_host);
        assert_non_null(standin.factors);
    }
}

// Matrices whose rows don't begin at multiples of 16 bytes are multiplied, also where cuBLASLt has
// no kernel for them, with or without a bias, or has one that fails; it is said once, and memory
// for copies is had as often as more is needed.
static void test_values_of_odd_shapes(void **state) {
    (void)state;
    for (int odd = NO_ODD_BIAS; odd <= NO_ODD; odd++) {
        for (int promises = 0; promises < 2; promises++) {
            pretend(CAPABILITY_H100, AUTO);
            standin.odd = odd;
            standin.promises_odd = promises;
            check_even(run_on_host);
            assert_int_equal(standin.allocations, 0);
            check_odd(run_on_host);
            assert_true(standin.allocations < 16);
        }
    }
}

static void test_values_native(void **state) {
    (void)state;
    pretend(CAPABILITY_B200, AUTO);
    check_formats(33, 65, 31, ALL, 4, run_on_host);
    check_formats(64, 48, 96, ALL, 7, run_on_host);
    check_formats(80, 144, 160, ALL, 4, run_on_host);
    pretend(CAPABILITY_5090, AUTO);
    check_formats(33, 65, 31, ALL, 4, run_on_host);
    check_formats(64, 48, 96, ALL, 7, run_on_host);
    check_formats(80, 144, 160, ALL, 4, run_on_host);
}

// FP8 operands with one scale each, where they are multiplied natively, in every layout, and where
// a shape, a bias or two E5M2 operands aren't taken.
static void test_values_with_one_scale(void **state) {
    (void)state;
    static const int CAPABILITIES[] = {CAPABILITY_H100, CAPABILITY_B200, CAPABILITY_5090};
    for (int i = 0; i < COUNT(CAPABILITIES); i++) {
        pretend(CAPABILITIES[i], AUTO);
        check_one_scale(run_on_host);
        printf("    %d ran natively, %d of them with fast sums; %d transposes\n", standin.native_runs,
               standin.fast_runs, standin.transposes);
        assert_int_equal(cuda_gemm_counts().native, standin.native_runs);
        assert_true(standin.native_runs > 0 && standin.fast_runs > 0 && standin.fast_runs < standin.native_runs);
        assert_true((standin.transposes > 0) == (CAPABILITIES[i] != CAPABILITY_B200));
        assert_int_equal(standin.swizzles, 0);
    }
}

// NVFP4 operands, where they are multiplied natively, in every layout, and where a shape or a bias
// isn't taken. What is made for a native one is made twice: each operand's codes and scales.
static void test_values_with_nvfp4(void **state) {
    (void)state;
    assert_int_equal(CUDA_E2M1_TYPE, CUDA_R_4F_E2M1);
    static const int CAPABILITIES[] = {CAPABILITY_H100, CAPABILITY_B200, CAPABILITY_5090};
    for (int i = 0; i < COUNT(CAPABILITIES); i++) {
        pretend(CAPABILITIES[i], AUTO);
        check_nvfp4(run_on_host);
        printf("    %d ran natively; %d operands packed, %d decoded\n", standin.native_runs, standin.packs,
               standin.dequantizations);
        assert_true((standin.native_runs > 0) == (CAPABILITIES[i] != CAPABILITY_H100));
        assert_int_equal(cuda_gemm_counts().native, standin.native_runs);
        assert_int_equal(standin.packs, 2 * standin.native_runs);
        assert_int_equal(standin.swizzles, 2 * standin.native_runs);
        assert_int_equal(standin.transposes, 0);
    }
}

// FP8 operands by blocks of 128, natively on Hopper: codes that aren't stored along K are
// transposed, scales are put in their places once for each operand. Elsewhere those with FP32
// scales are summed by block, and no others.
static void test_values_with_blocks_of_128(void **state) {
    (void)state;
    static const int CAPABILITIES[] = {CAPABILITY_H100, CAPABILITY_B200};
    for (int i = 0; i < COUNT(CAPABILITIES) * 2; i++) {
        Scaling scaling = i % 2 ? SCALING_BLOCK128_FP32 : SCALING_BLOCK128;
        pretend(CAPABILITIES[i / 2], AUTO);
        bool is_hopper = CAPABILITIES[i / 2] == CAPABILITY_H100;
        check_blocks_of_128(scaling, run_on_host);
        printf("    %d ran natively; %d transposes, %d products of blocks\n", standin.native_runs, standin.transposes,
               standin.block_products);
        assert_true((standin.native_runs > 0) == is_hopper);
        assert_true((standin.transposes > 0) == is_hopper);
        assert_int_equal(standin.arrangements, 2 * standin.native_runs);
        assert_true(standin.dequantizations > 0 && standin.fast_runs == 0 && standin.swizzles == 0);
        assert_true((standin.block_products > 0) == (scaling == SCALING_BLOCK128_FP32));
    }
    for (Scaling scaling = SCALING_BLOCK128; scaling <= SCALING_BLOCK128_FP32; scaling++) {
        pretend(CAPABILITY_H100, MX_GEMM_EMULATED);
        check_blocks_of_128(scaling, run_on_host);
        assert_int_equal(standin.native_runs, 0);
    }
}

static void test_sums_by_block(void **state) {
    (void)state;
    pretend(CAPABILITY_B200, AUTO);
    check_rows_by_block(run_on_host);
    assert_int_equal(standin.block_products, 2 * 2 * 2 * 2); // two cases twice, two parts of rows, two of K
    check_beside_fp32_scales(run_on_host);
}

// With native GEMMs that a fault spoils, results are wrong only if they really were native.
static bool is_spoiled(LayoutKind kind, int capability, QuantizedForm form) {
    pretend(capability, AUTO);
    standin.fault = COARSE_SUM;
    GemmCase g = {.M = 64, .N = 48, .K = 96, .a = E4M3, .b = E4M3, .d = FP32, .kind = kind};
    GemmOptions o = options_of(kind);
    TestOperand a = make_test_operand(E4M3, o.transpose_a ? g.K : g.M, o.transpose_a ? g.M : g.K,
                                      o.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE, 0, false, form);
    TestOperand b = make_test_operand(E4M3, o.transpose_b ? g.N : g.K, o.transpose_b ? g.K : g.N,
                                      o.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE, 0, false, form);
    Tensor d = padded_tensor(FP32, g.M, g.N, 0), emulated = copy_tensor(d);
    standin.swizzles = standin.dequantizations = standin.transposes = 0;
    run_on_host(d, a.operand, b.operand, o);
    if (capability >= CAPABILITY_B200) {
        assert_int_equal(standin.dequantizations, 0);
        assert_int_equal(standin.swizzles, form == FORM_PLAIN ? 2 : 0);
        assert_int_equal(standin.transposes, capability < CAPABILITY_5090 ? 0
                                             : kind == FPROP              ? 0
                                             : kind == DGRAD              ? 1
                                                                          : 2);
    }
    cuda_gemm_use_device((GemmDevice){capability, CUBLASLT_13_1, MX_GEMM_EMULATED});
    run_on_host(emulated, a.operand, b.operand, o);
    bool differs = memcmp(d.data, emulated.data, tensor_bytes(d)) != 0;
    pool_release();
    standin.fault = NO_FAULT;
    return differs;
}

static void test_native_is_native(void **state) {
    (void)state;
    for (QuantizedForm form = FORM_PLAIN; form <= FORM_SWIZZLED; form++) {
        for (LayoutKind kind = FPROP; kind <= WGRAD; kind++) {
            assert_false(is_spoiled(kind, CAPABILITY_H100, form));
            assert_true(is_spoiled(kind, CAPABILITY_B200, form));
            assert_true(is_spoiled(kind, CAPABILITY_5090, form));
        }
    }
}

// Decoded operands are multiplied where they lie, but for rows that aren't aligned.
static void test_decoded_as_they_lie(void **state) {
    (void)state;
    pretend(CAPABILITY_H100, AUTO);
    GemmOptions o = options_of(FPROP);
    for (int64_t K = 96; K <= 100; K += 4) {
        TestOperand a = make_test_operand(E4M3, 64, K, AXIS_ROWWISE, 0, false, FORM_DECODED);
        TestOperand b = make_test_operand(E4M3, 48, K, AXIS_ROWWISE, 0, false, FORM_DECODED);
        size_t copies = K % 8 ? 64 * 104 * 2 + 48 * 104 * 2 : 0; // multiples of 256
        assert_int_equal(cuda_gemm_workspace(a.operand, b.operand), (32 << 20) + copies + 256);
        standin.swizzles = standin.dequantizations = 0;
        run_on_host(padded_tensor(BF16, 64, 48, 0), a.operand, b.operand, o);
        assert_int_equal(standin.swizzles + standin.dequantizations, 0);
        pool_release();
    }
}

// Checks the values of a GEMM that could be native and returns the number of lines on stderr.
static int lines_of_gemm(int64_t M) {
    FILE *file = tmpfile();
    assert_non_null(file);
    int before = dup(STDERR_FILENO), lines = 0;
    assert_true(before >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    Check check = {0};
    check_case(&(GemmCase){.M = M, .N = 48, .K = 96, .a = E4M3, .b = E4M3, .d = BF16, .kind = WGRAD, .has_bias = true},
               run_on_host, &check);
    assert_true(dup2(before, STDERR_FILENO) >= 0);
    close(before);
    rewind(file);
    for (int c; (c = fgetc(file)) != EOF;) {
        lines += c == '\n';
    }
    fclose(file);
    check_end(&check, "M %lld, not native", (long long)M);
    return lines;
}

// A shape that cuBLASLt declines is emulated, and nothing is made for the call that it won't take.
static void test_declined(void **state) {
    (void)state;
    pretend(CAPABILITY_5090, AUTO);
    standin.declines_native = true;
    standin.native_runs = standin.swizzles = standin.transposes = 0;
    assert_int_equal(lines_of_gemm(64), 1);
    standin.heuristics_asked = 0;
    assert_int_equal(lines_of_gemm(64), 0);
    assert_int_equal(standin.heuristics_asked + standin.native_runs + standin.swizzles + standin.transposes, 0);
}

// So is one whose kernels fail when they are run: that is said once, and it isn't tried again.
static void test_failing_kernel(void **state) {
    (void)state;
    char text[512];
    pretend(CAPABILITY_B200, AUTO);
    standin.native_status = CUBLAS_STATUS_EXECUTION_FAILED;
    standin.num_kernels = 3; // all of which are tried
    standin.native_runs = standin.swizzles = 0;
    assert_int_equal(lines_of_gemm(64), 1);
    assert_true(standin.native_runs > 0);
    assert_int_equal(3 * standin.swizzles, 2 * standin.native_runs);
    standin.native_runs = standin.swizzles = 0;
    assert_int_equal(lines_of_gemm(64), 0);
    assert_int_equal(standin.native_runs + standin.swizzles, 0);
    assert_int_equal(lines_of_gemm(32), 0);
    assert_true(standin.native_runs > 0);
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_EMULATES);
    printf("    %s\n", text);
    assert_non_null(strstr(text, "of 40 quantized GEMMs 0 ran natively"));
    assert_int_equal(cuda_gemm_device().policy, MX_GEMM_EMULATED);
}

// A bias that cuBLASLt's FP4 kernels don't add (seen by others: NVIDIA/CUDALibrarySamples, issue
// 303) has its GEMM emulated, and no other.
static void test_declined_bias(void **state) {
    (void)state;
    int native_runs[2];
    for (int declines = 0; declines < 2; declines++) {
        pretend(CAPABILITY_B200, AUTO);
        standin.declines_fp4_bias = declines;
        check_nvfp4(run_on_host);
        native_runs[declines] = standin.native_runs;
        assert_int_equal(standin.packs, 2 * standin.native_runs);
    }
    assert_true(native_runs[1] > 0 && native_runs[1] < native_runs[0]);
}

// Returns the exit status of a process of its own that runs this, silently: 0 where it comes to an
// end.
static int exit_code_of(void (*run)(Format b), Format b) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(99);
        run(b);
        _exit(0);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

// Multiplies into FP32, which is 1 before, by such kernels alone.
static Tensor multiply_by(const StandinKernel *kernels, int count, Operand a, Operand b, bool accumulate) {
    pretend(CAPABILITY_H100, AUTO);
    memcpy(standin.kernels, kernels, (size_t)count * sizeof(*kernels));
    standin.num_kernels = count;
    Tensor d = padded_tensor(FP32, operand_rows(a), operand_rows(b), 0);
    for (int64_t i = 0; i < d.rows * d.cols; i++) {
        tensor_set(d, i / d.cols, i % d.cols, 1);
    }
    run_on_host(d, a, b, (GemmOptions){.transpose_b = true, .accumulate = accumulate});
    return d;
}

// Kernels that fail when they are run, the first and another, are left for one that runs, tuned or
// not, and aren't run again; where kernels are compared it is with the first that runs.
static void test_failing_proposals(void **state) {
    (void)state;
    enum { SIDE = 64, KERNELS = 6 };
    static const StandinKernel FAILING[KERNELS] = {{1, FAILS, 0},    {5, SPLITS, 0}, {1, GOOD, 0},
                                                   {0.5f, FAILS, 0}, {3, SPLITS, 0}, {2, COARSE, 0}};
    Operand operands[][2] = {
        {operand_tensor(padded_tensor(BF16, SIDE, SIDE, 0)), operand_tensor(padded_tensor(BF16, SIDE, SIDE, 0))},
        {operand_tensor(padded_tensor(FP32, SIDE, SIDE, 0)), operand_tensor(padded_tensor(FP32, SIDE, SIDE, 0))},
        {make_scaled_operand(SCALING_TENSOR, E4M3, SIDE, SIDE, AXIS_ROWWISE, FORM_PLAIN).operand,
         make_scaled_operand(SCALING_TENSOR, E4M3, SIDE, SIDE, AXIS_ROWWISE, FORM_PLAIN).operand}};
    for (int i = 0; i < 4 * COUNT(operands); i++) {
        Operand a = operands[i / 4][0], b = operands[i / 4][1];
        bool is_tuned = i % 4 / 2, accumulate = i % 2; // what accumulates first isn't tuned
        Tensor expected = multiply_by(&FAILING[1], 1, a, b, accumulate);
        cuda_gemm_tuned_flops = is_tuned ? 0 : 1e10;
        check_same_tensor(multiply_by(FAILING, KERNELS, a, b, accumulate), expected);
        StandinKernel before[KERNELS];
        memcpy(before, standin.kernels, sizeof(before));
        run_on_host(expected, a, b, (GemmOptions){.transpose_b = true, .accumulate = accumulate});
        for (int k = 0; k < KERNELS; k++) {
            assert_int_equal(standin.kernels[k].runs - before[k].runs, k == (is_tuned && !accumulate ? 4 : 1));
        }
        cuda_gemm_tuned_flops = 1e10;
    }
    pool_release();
}

static void multiply_by_failing_kernels(Format format) {
    Operand x = operand_tensor(padded_tensor(format, 64, 64, 0));
    multiply_by((StandinKernel[]){{1, FAILS, 0}, {1, FAILS, 0}}, 2, x, x, false);
}

static void multiply_after_losing_the_gpu(Format format) {
    Operand x = operand_tensor(padded_tensor(format, 64, 64, 0));
    multiply_by((StandinKernel[]){{1, LOSES_GPU, 0}, {1, GOOD, 0}}, 2, x, x, false);
}

// A GEMM of values ends the program where all kernels fail, and where one leaves a GPU that can't
// go on.
static void test_no_kernel_runs(void **state) {
    (void)state;
    for (int is_tuned = 0; is_tuned < 2; is_tuned++) {
        cuda_gemm_tuned_flops = is_tuned ? 0 : 1e10;
        assert_int_equal(exit_code_of(multiply_by_failing_kernels, BF16), EXIT_BAD_INPUT);
        assert_int_equal(exit_code_of(multiply_after_losing_the_gpu, BF16), EXIT_BAD_INPUT);
    }
    cuda_gemm_tuned_flops = 1e10;
}

// GEMMs of blocks with FP32 scales that cuBLASLt declines, contrary to what it says of itself, are
// summed by block.
static void test_declined_blocks(void **state) {
    (void)state;
    pretend(CAPABILITY_H100, AUTO);
    standin.declines_native = true;
    check_blocks_of_128(SCALING_BLOCK128_FP32, run_on_host);
    assert_true(standin.native_runs == 0 && standin.block_products > 0);
}

static void run_under_native_policy(Format b) {
    Check check = {0};
    pretend(CAPABILITY_B200, MX_GEMM_NATIVE);
    check_case(&(GemmCase){.M = 64, .N = 48, .K = 96, .a = E4M3, .b = b, .d = BF16, .kind = DGRAD}, run_on_host,
               &check);
}

// Under MX_GEMM_NATIVE what can't be native ends the program, and what can is.
static void test_native_policy(void **state) {
    (void)state;
    Error error;
    pretend(80, MX_GEMM_NATIVE);
    assert_false(cuda_gemm_check_native(cuda_gemm_device(), "A100", &error));
    assert_string_equal(error.message, "A100 can't multiply FP8 natively: compute capabilities below 8.9 have no FP8");
    pretend(CAPABILITY_H100, MX_GEMM_NATIVE);
    assert_true(cuda_gemm_check_native(cuda_gemm_device(), "H100", &error));
    pretend(CAPABILITY_5090, MX_GEMM_NATIVE);
    assert_true(cuda_gemm_check_native(cuda_gemm_device(), "RTX 5090", &error));
    assert_int_equal(exit_code_of(run_under_native_policy, E4M3), 0);
    assert_int_equal(exit_code_of(run_under_native_policy, BF16), 0); // not a product of two MX operands
    assert_int_equal(exit_code_of(run_under_native_policy, FORMAT_E2M1), EXIT_BAD_INPUT);
}

// Multiplies operands of two formats, of MX where they are quantized, twice as every case is, and
// checks how many GEMMs have been counted since a device was last pretended.
static void check_counts(Format a, Format b, int64_t M, int64_t native, int64_t emulated) {
    Check check = {0};
    check_case(&(GemmCase){.M = M, .N = 48, .K = 96, .a = a, .b = b, .d = BF16, .kind = DGRAD}, run_on_host, &check);
    check_end(&check, "M %lld, counted", (long long)M);
    GemmCounts counts = cuda_gemm_counts();
    assert_int_equal(counts.native, native);
    assert_int_equal(counts.emulated, emulated);
}

// GEMMs of two quantized operands are counted by the path that they took, whether their shape or
// cuBLASLt kept them from being native; none where none is to be.
static void test_counts(void **state) {
    (void)state;
    char text[512];
    pretend(CAPABILITY_B200, AUTO);
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
    check_counts(E4M3, E4M3, 64, 2, 0);
    check_counts(E4M3, E5M2, 64, 4, 0);
    check_counts(E4M3, E4M3, 33, 4, 2);
    check_counts(E4M3, FORMAT_E2M1, 64, 4, 4);
    check_counts(BF16, BF16, 64, 4, 4);
    check_counts(BF16, E4M3, 64, 4, 4);
    standin.declines_e5m2 = true;
    check_counts(E4M3, E5M2, 80, 4, 6);
    pretend(CAPABILITY_B200, MX_GEMM_NATIVE);
    check_counts(E4M3, E4M3, 64, 2, 0);
    pretend(CAPABILITY_B200, MX_GEMM_EMULATED);
    check_counts(E4M3, E4M3, 64, 0, 0);
    pretend(CAPABILITY_H100, AUTO); // which has no native path for MX
    check_counts(E4M3, E4M3, 64, 0, 0);
}

// Heuristics are asked once for each call, however often it comes, also when more calls come than
// the table holds.
static void test_table(void **state) {
    (void)state;
    pretend(CAPABILITY_H100, AUTO);
    enum { SHAPES = 2 * CUDA_GEMM_TABLE_SIZE };
    Tensor a = padded_tensor(BF16, SHAPES, 8, 0), b = padded_tensor(BF16, 8, 8, 0),
           d = padded_tensor(BF16, SHAPES, 8, 0);
    standin.heuristics_asked = 0;
    for (int i = 0; i < 3; i++) {
        for (int64_t rows = 1; rows <= 16; rows++) {
            run_on_host(tensor_rows(d, 0, rows), operand_tensor(tensor_rows(a, 0, rows)), operand_tensor(b),
                        (GemmOptions){0});
        }
        assert_true(standin.heuristics_asked <= 16);
    }
    for (int64_t rows = 1; rows <= SHAPES; rows++) {
        run_on_host(tensor_rows(d, 0, rows), operand_tensor(tensor_rows(a, 0, rows)), operand_tensor(b),
                    (GemmOptions){0});
        standin.heuristics_asked = 0;
        run_on_host(tensor_rows(d, 0, rows), operand_tensor(tensor_rows(a, 0, rows)), operand_tensor(b),
                    (GemmOptions){0});
        assert_int_equal(standin.heuristics_asked, 0);
    }
    pool_release();
}

// Sums of codes that are all 1 or -1 are exact in every order: kernels are told apart all the same,
// and the codes are what they were.
static void check_tuning_of_fp8(const StandinKernel kernels[MAX_STANDIN_KERNELS]) {
    enum { SIDE = 64 };
    pretend(CAPABILITY_H100, AUTO);
    memcpy(standin.kernels, kernels, MAX_STANDIN_KERNELS * sizeof(*kernels));
    standin.num_kernels = MAX_STANDIN_KERNELS;
    Operand x = make_scaled_operand(SCALING_TENSOR, E4M3, SIDE, SIDE, AXIS_ROWWISE, FORM_PLAIN).operand;
    Operand w = make_scaled_operand(SCALING_TENSOR, E4M3, SIDE, SIDE, AXIS_ROWWISE, FORM_PLAIN).operand;
    *x.quantized.factor = *w.quantized.factor = 1; // the scales of delayed scaling's first step
    for (int i = 0; i < SIDE * SIDE; i++) {
        x.quantized.elements[i] = i * 7 % 13 < 6 ? 0x38 : 0xB8;
        w.quantized.elements[i] = i * 5 % 11 < 5 ? 0x38 : 0xB8;
    }
    run_on_host(padded_tensor(FP32, SIDE, SIDE, 0), x, w, (GemmOptions){.transpose_b = true});
    assert_int_equal(standin.native_runs > 0, true);
    int good = standin.kernels[4].runs, splits = standin.kernels[6].runs;
    run_on_host(padded_tensor(FP32, SIDE, SIDE, 0), x, w, (GemmOptions){.transpose_b = true});
    assert_int_equal(standin.kernels[4].runs, good + 1);
    assert_int_equal(standin.kernels[6].runs, splits);
    for (int i = 0; i < SIDE * SIDE; i++) {
        assert_int_equal(x.quantized.elements[i], i * 7 % 13 < 6 ? 0x38 : 0xB8);
        assert_int_equal(w.quantized.elements[i], i * 5 % 11 < 5 ? 0x38 : 0xB8);
    }
}

// A kernel that only adds otherwise may write BF16, and the first one adds to it.
static void check_tuning_into_bf16(const StandinKernel kernels[MAX_STANDIN_KERNELS]) {
    enum { SIDE = 40 };
    Tensor a = padded_tensor(BF16, SIDE, SIDE, 0), b = padded_tensor(BF16, SIDE, SIDE, 0);
    Tensor d = padded_tensor(BF16, SIDE, SIDE, 0);
    pretend(CAPABILITY_H100, AUTO);
    memcpy(standin.kernels, kernels, MAX_STANDIN_KERNELS * sizeof(*kernels));
    standin.num_kernels = MAX_STANDIN_KERNELS;
    standin.kernels[6].way = FAILS; // whose sums of halves may round to the same BF16
    for (int i = 0; i < 3; i++) {
        int first = standin.kernels[0].runs, adds_coarsely = standin.kernels[5].runs;
        run_on_host(d, operand_tensor(a), operand_tensor(b), (GemmOptions){.transpose_b = true, .accumulate = i == 2});
        if (i == 0) continue; // it is tuned
        assert_int_equal(standin.kernels[0].runs - first, i == 2);
        assert_int_equal(standin.kernels[5].runs - adds_coarsely, i == 1);
    }
}

// Returns whether a faster kernel, of that way, is taken in place of a good one.
static bool is_taken(int way, Tensor d, Operand a, Operand b, const float *bias) {
    GemmOptions options = {.transpose_b = true, .bias = bias};
    pretend(CAPABILITY_H100, AUTO);
    standin.kernels[0] = (StandinKernel){5, GOOD, 0};
    standin.kernels[1] = (StandinKernel){.time = 1, .way = way};
    standin.num_kernels = 2;
    run_on_host(d, a, b, options);
    Tensor first = copy_tensor(d);
    int runs = standin.kernels[1].runs;
    run_on_host(d, a, b, options);
    check_same_tensor(first, d);        // what took the bias's place and the scales' is gone
    assert_int_equal(standin.frees, 0); // which would wait for other ranks
    return standin.kernels[1].runs > runs;
}

// Data that tells some kernels apart from none: biases of 0, scales of tensors and factors of 1,
// and values that aren't finite. A slower kernel is kept there if the other would differ later.
static void test_tuning_on_a_first_steps_data(void **state) {
    (void)state;
    enum { SIDE = 64 };
    static const float ZEROS[SIDE], BIAS[SIDE] = {1, -2}, LONG_BIAS[(1 << 17) + 8];
    Operand a = operand_tensor(padded_tensor(BF16, SIDE, SIDE, 0)),
            b = operand_tensor(padded_tensor(BF16, SIDE, SIDE, 0));
    Tensor into_bf16 = padded_tensor(BF16, SIDE, SIDE, 0), into_fp32 = padded_tensor(FP32, SIDE, SIDE, 0);
    Tensor small = copy_tensor(a.tensor);
    for (int64_t i = 0; i < SIDE * SIDE; i++) {
        tensor_set(small, i / SIDE, i % SIDE, (float)tensor_get(small, i / SIDE, i % SIDE) * 0x1p-30f);
    }
    cuda_gemm_tuned_flops = 0;
    assert_true(is_taken(GOOD, into_bf16, a, b, ZEROS));
    assert_true(is_taken(GOOD, into_bf16, a, b, BIAS));
    assert_false(is_taken(BIAS_LAST, into_bf16, a, b, ZEROS));
    assert_false(is_taken(SPLITS, into_fp32, operand_tensor(small), b, ZEROS)); // the bias doesn't hide its sums
    static const QuantizedForm FORMS[] = {FORM_PLAIN, FORM_DECODED};
    for (int i = 0; i < COUNT(FORMS); i++) {
        Operand x = make_scaled_operand(SCALING_TENSOR, E4M3, SIDE, SIDE, AXIS_ROWWISE, FORMS[i]).operand;
        Operand w = make_scaled_operand(SCALING_TENSOR, E4M3, SIDE, SIDE, AXIS_ROWWISE, FORMS[i]).operand;
        *x.quantized.factor = *w.quantized.factor = 1;
        assert_true(is_taken(GOOD, into_fp32, x, w, NULL));
        assert_false(is_taken(SCALES_LAST, into_fp32, x, w, NULL));
        assert_int_equal(standin.native_runs > 0, FORMS[i] == FORM_PLAIN);
    }
    // A bias as long as what takes its place, and a longer one: there the first kernel is taken.
    for (int64_t cols = 1 << 17; cols <= (1 << 17) + 8; cols += 8) {
        Operand x = operand_tensor(padded_tensor(BF16, 8, 8, 0)), w = operand_tensor(padded_tensor(BF16, cols, 8, 0));
        assert_int_equal(is_taken(GOOD, padded_tensor(BF16, 8, cols, 0), x, w, LONG_BIAS), cols == 1 << 17);
    }
    memset(a.tensor.data, 0xFF, tensor_bytes(a.tensor));
    assert_false(is_taken(COARSE, into_fp32, a, b, NULL));
    cuda_gemm_tuned_flops = 1e10;
    pool_release();
}

// Of the kernels that heuristics propose the fastest is taken that writes, and adds, what the first
// does: not one that rounds otherwise, if only where it adds, that sums in another order, if only
// where sums aren't exact, writes nothing or fails, nor one that is faster by less than times vary.
// What d held is added to by the first call that accumulates, whether or not one was chosen before.
static void test_tuning(void **state) {
    (void)state;
    enum { M = 24, N = 16, K = 40 };
    static const StandinKernel KERNELS[] = {{5, GOOD, 0}, {1, COARSE, 0},           {0.5f, IDLE, 0},  {0.1f, FAILS, 0},
                                            {3, GOOD, 0}, {0.2f, ADDS_COARSELY, 0}, {0.3f, SPLITS, 0}};
    static const struct {
        float time;   // of the last good kernel
        bool zeros;   // are all that is multiplied
        bool small;   // whole numbers are, whose sums are exact
        int64_t cols; // of d's rows that are multiplied
        bool factor;  // of the first operand, so that alpha and beta are on the device
        int taken;
    } CASES[] = {{3, false, false, N, false, 4}, {4.95f, false, false, N, false, 0}, {3, true, false, N, false, 0},
                 {3, false, true, N, false, 4},  {3, false, false, N - 8, false, 4}, {3, false, false, N, true, 4}};
    Tensor a = padded_tensor(BF16, M, K, 0), b = padded_tensor(BF16, N, K, 0), zeros = copy_tensor(a);
    Tensor small_a = copy_tensor(a), small_b = copy_tensor(b);
    memset(zeros.data, 0, tensor_bytes(zeros));
    for (int64_t i = 0; i < M * K; i++) {
        tensor_set(small_a, i / K, i % K, (float)(i * 7 % 13 - 6));
        if (i < N * K) tensor_set(small_b, i / K, i % K, (float)(i * 5 % 11 - 5));
    }
    cuda_gemm_tuned_flops = 0;
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Tensor whole = padded_tensor(FP32, M, N, 0), before = copy_tensor(whole), expected = copy_tensor(whole);
        Tensor d = tensor_cols(whole, 0, CASES[i].cols);
        Tensor w = tensor_rows(CASES[i].small ? small_b : b, 0, CASES[i].cols);
        Operand x = operand_tensor(CASES[i].zeros ? zeros : CASES[i].small ? small_a : a);
        if (CASES[i].factor) {
            x = make_scaled_operand(SCALING_TENSOR, E4M3, M, K, AXIS_ROWWISE, FORM_DECODED).operand;
        }
        GemmOptions writes = {.transpose_b = true}, adds = {.transpose_b = true, .accumulate = true};
        pretend(CAPABILITY_H100, AUTO);
        run_on_host(tensor_cols(expected, 0, CASES[i].cols), x, operand_tensor(w), writes);
        pretend(CAPABILITY_H100, AUTO);
        memcpy(standin.kernels, KERNELS, sizeof(KERNELS));
        standin.num_kernels = MAX_STANDIN_KERNELS;
        standin.kernels[4].time = CASES[i].time;
        run_on_host(d, x, operand_tensor(w), adds);
        assert_int_equal(standin.kernels[0].runs, 1); // what there is isn't written over
        for (int64_t j = 0; j < M * CASES[i].cols; j++) {
            int64_t row = j / CASES[i].cols, col = j % CASES[i].cols;
            assert_true(tensor_get(d, row, col) != 0 || CASES[i].zeros);
            tensor_set(d, row, col, tensor_get(before, row, col));
        }
        run_on_host(d, x, operand_tensor(w), writes);
        check_same_tensor(whole, expected);
        int runs[MAX_STANDIN_KERNELS];
        for (int k = 0; k < MAX_STANDIN_KERNELS; k++) {
            runs[k] = standin.kernels[k].runs;
        }
        run_on_host(d, x, operand_tensor(w), writes);
        for (int k = 0; k < MAX_STANDIN_KERNELS; k++) {
            assert_int_equal(standin.kernels[k].runs - runs[k], k == CASES[i].taken);
        }
        check_same_tensor(whole, expected);
    }
    check_tuning_into_bf16(KERNELS);
    check_tuning_of_fp8(KERNELS);
    // Of native FP4 the first.
    pretend(CAPABILITY_B200, AUTO);
    memcpy(standin.kernels, KERNELS, sizeof(KERNELS));
    standin.num_kernels = MAX_STANDIN_KERNELS;
    Operand x = make_scaled_operand(SCALING_NVFP4, FORMAT_E2M1, 64, 64, AXIS_ROWWISE, FORM_PLAIN).operand;
    Operand w = make_scaled_operand(SCALING_NVFP4, FORMAT_E2M1, 64, 64, AXIS_ROWWISE, FORM_PLAIN).operand;
    run_on_host(padded_tensor(FP32, 64, 64, 0), x, w, (GemmOptions){.transpose_b = true});
    assert_int_equal(standin.native_runs, 1);
    assert_int_equal(standin.kernels[0].runs, 1);
    cuda_gemm_tuned_flops = 1e10;
    pool_release();
}

static void test_workspace(void **state) {
    (void)state;
    GemmOptions o = options_of(FPROP);
    size_t bf16 = cuda_gemm_workspace(operand_a(BF16, 100, 64, o), operand_b(BF16, 72, 64, o));
    assert_int_equal(bf16, (32 << 20) + 256);
    size_t mx = cuda_gemm_workspace(operand_a(E4M3, 128, 64, o), operand_b(E4M3, 256, 64, o));
    assert_int_equal(mx, (32 << 20) + 128 * 64 * 2 + 256 * 64 * 2 + 512);
    Operand a = operand_a(E4M3, 128, 64, o), b = operand_b(E4M3, 256, 64, o);
    a.quantized.form = b.quantized.form = FORM_SWIZZLED; // may be declined, and is decoded then
    assert_int_equal(cuda_gemm_workspace(a, b), mx);
    a.quantized.form = FORM_DECODED;
    assert_int_equal(cuda_gemm_workspace(a, b), (32 << 20) + 256 * 64 * 2 + 512);
    b.quantized.form = FORM_DECODED;
    assert_int_equal(cuda_gemm_workspace(a, b), (32 << 20) + 512);
    a.quantized.elements = b.quantized.elements = NULL; // shapes are enough
    assert_int_equal(cuda_gemm_workspace(a, b), (32 << 20) + 512);
    Operand fp4_a = operand_a(FORMAT_E2M1, 128, 64, o), fp4_b = operand_b(FORMAT_E2M1, 256, 64, o);
    fp4_a.quantized.scaling = fp4_b.quantized.scaling = SCALING_NVFP4; // packed codes and tiled scales are less
    assert_int_equal(cuda_gemm_workspace(fp4_a, fp4_b), mx + 256);     // alpha and beta
    GemmOptions wgrad = options_of(WGRAD); // as few elements as need more room for padded scales than for values
    size_t small = cuda_gemm_workspace(operand_a(E4M3, 1, 1, wgrad), operand_b(E4M3, 1, 1, wgrad));
    assert_int_equal(small, (32 << 20) + 2 * (512 + 256) + 256);
    // Of so few elements FP32 scales of blocks, square ones padded to 4 along K, need more than
    // values.
    Operand dy = operand_a(E4M3, 1, 1, wgrad), w = operand_b(E4M3, 1, 1, wgrad);
    dy.quantized.scaling = w.quantized.scaling = SCALING_BLOCK128;
    w.quantized.axis = AXIS_SQUARE;
    assert_int_equal(cuda_gemm_workspace(dy, w), (32 << 20) + 2 * 256 + 2 * 256 + 256);
    dy = operand_a(E4M3, 128, 64, o), w = operand_b(E4M3, 256, 64, o);
    dy.quantized.scaling = w.quantized.scaling = SCALING_BLOCK128; // values are larger
    assert_int_equal(cuda_gemm_workspace(dy, w), mx);
    w.quantized.scaling = SCALING_BLOCK128_FP32; // a block's product and the sum of those before
    assert_int_equal(cuda_gemm_workspace(dy, w), mx + 2 * 128 * 256 * 4);
    dy.quantized.rows = 1 << 20; // of as many rows as are summed at a time
    assert_int_equal(cuda_gemm_workspace(dy, w), (32 << 20) + (1 << 20) * 64 * 2 + 256 * 64 * 2 + 512 + 2 * (32 << 20));
    size_t fp32 = cuda_gemm_workspace(operand_a(FP32, 128, 64, o), operand_b(FP32, 256, 64, o));
    assert_int_equal(fp32, (32 << 20) + 512 + 128 * 256 * 4);
}

// What is planned for many rows is enough for fewer, also for as many as the operands have of
// another dimension: then a plan couldn't tell which of them they share.
static void test_workspace_of_fewer_rows(void **state) {
    (void)state;
    enum { ROWS = 96, C = 32, HIDDEN = 4 * C };
    static uint8_t memory[CUDA_CUBLASLT_BYTES + (1 << 20)] __attribute__((aligned(256)));
    static float x[ROWS * HIDDEN], w[C * HIDDEN], y[ROWS * C];
    Tensor weight = tensor_make(w, FORMAT_FP32, C, HIDDEN);
    Operand most = operand_tensor(tensor_make(x, FORMAT_FP32, ROWS, HIDDEN));
    size_t planned = cuda_gemm_workspace(most, operand_tensor(weight));
    assert_true(planned < sizeof(memory));
    pretend(CAPABILITY_H100, AUTO);
    for (int64_t rows = 1; rows <= ROWS; rows++) {
        Operand fewer = operand_tensor(tensor_make(x, FORMAT_FP32, rows, HIDDEN));
        cuda_use_workspace(memory, planned);
        cuda_gemm(tensor_make(y, FORMAT_FP32, rows, C), fewer, operand_tensor(weight), options_of(FPROP));
        cuda_gemm(tensor_make(y, FORMAT_BF16, rows, C), fewer, operand_tensor(weight), options_of(FPROP));
    }
    TestOperand b = make_scaled_operand(SCALING_BLOCK128_FP32, E4M3, C, HIDDEN, AXIS_ROWWISE, FORM_PLAIN);
    TestOperand a = make_scaled_operand(SCALING_BLOCK128_FP32, E4M3, ROWS, HIDDEN, AXIS_ROWWISE, FORM_PLAIN);
    planned = cuda_gemm_workspace(a.operand, b.operand);
    assert_true(planned < sizeof(memory));
    pretend(CAPABILITY_B200, AUTO);
    for (int64_t rows = 1; rows <= ROWS; rows++) {
        a.operand.quantized.rows = rows;
        cuda_use_workspace(memory, planned);
        cuda_gemm(tensor_make(y, FORMAT_BF16, rows, C), a.operand, b.operand, options_of(FPROP));
    }
    pool_release();
}

// The self-check
// ------------------------------------------------------------------------------------------------

static void test_self_check(void **state) {
    (void)state;
    char text[512];
    pretend(80, AUTO);
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
    printf("    8.0   %s\n", text);
    assert_non_null(strstr(text, "nothing to check"));
    pretend(CAPABILITY_H100, AUTO);
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
    printf("    9.0   %s\n", text);
    assert_non_null(strstr(text, "passed: of 48 quantized GEMMs 48 ran natively"));
    assert_int_equal(standin.fast_runs, 4); // fprop of each shape with one scale
    pretend(CAPABILITY_B200, MX_GEMM_EMULATED);
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
    assert_non_null(strstr(text, "asked for"));
    pretend(CAPABILITY_B200, AUTO);
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
    printf("    10.0  %s\n", text);
    assert_non_null(strstr(text, "passed: of 40 quantized GEMMs 40 ran natively"));
    assert_int_equal(cuda_gemm_device().policy, AUTO);
    pretend(CAPABILITY_5090, MX_GEMM_NATIVE);
    standin.transposes = 0;
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
    printf("    12.0  %s\n", text);
    assert_int_equal(standin.transposes, 35); // of seven FP8 shapes one of dgrad and two of each wgrad
    assert_non_null(strstr(text, "passed: of 40 quantized GEMMs 40 ran natively"));
    pretend(CAPABILITY_B200, AUTO);
    standin.kernels[0].way = BIAS_LAST;
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
    printf("    10.0, emulated biases added to rounded products  %s\n", text);
}

// Only what a run multiplies is checked, and so can make it do without native GEMMs.
static void test_self_check_of_scalings(void **state) {
    (void)state;
    const struct {
        int capability;
        unsigned scalings;
        const char *seen;
    } CASES[] = {{CAPABILITY_B200, 1u << SCALING_MX, "passed: of 12 quantized GEMMs 12"},
                 {CAPABILITY_B200, 1u << SCALING_NVFP4_46, "passed: of 12 quantized GEMMs 12"},
                 {CAPABILITY_B200, 1u << SCALING_MX | 1u << SCALING_TENSOR, "passed: of 28 quantized GEMMs 28"},
                 {CAPABILITY_B200, 1u << SCALING_BLOCK128, "nothing to check"},
                 {CAPABILITY_H100, 1u << SCALING_MX, "nothing to check"},
                 {CAPABILITY_H100, 1u << SCALING_BLOCK128_FP32, "passed: of 16 quantized GEMMs 16"},
                 {CAPABILITY_B200, 0, ""}};
    char text[512];
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        pretend(CASES[i].capability, AUTO);
        assert_int_equal(cuda_gemm_self_check(CASES[i].scalings, text, sizeof(text)), SELF_CHECK_PASSED);
        assert_non_null(strstr(text, CASES[i].seen));
    }
    assert_string_equal(text, "");
}

// Each fault is found in each scaling alone, also where a card is taken to keep no more than 13
// bits of a sum.
static void test_self_check_finds_faults(void **state) {
    (void)state;
    static const struct {
        int capability;
        Scaling scaling;
        const char *name;
    } CASES[] = {{CAPABILITY_H100, SCALING_TENSOR, "one scale"},
                 {CAPABILITY_H100, SCALING_BLOCK128, "blocks of 128"},
                 {CAPABILITY_H100, SCALING_BLOCK128_FP32, "FP32 scales"},
                 {CAPABILITY_B200, SCALING_MX, "MX"},
                 {CAPABILITY_B200, SCALING_TENSOR, "one scale"},
                 {CAPABILITY_B200, SCALING_NVFP4, "NVFP4"},
                 {CAPABILITY_5090, SCALING_MX, "MX"},
                 {CAPABILITY_5090, SCALING_TENSOR, "one scale"},
                 {CAPABILITY_5090, SCALING_NVFP4, "NVFP4"}};
    static const char *const FAULTS[] = {"", "a wrong scale", "no bias", "a coarse sum"};
    char text[512];
    for (int i = 0; i < COUNT(CASES) * 3; i++) {
        int fault = WRONG_SCALE + i % 3, capability = CASES[i / 3].capability;
        pretend(capability, AUTO);
        standin.fault = fault;
        SelfCheck seen = cuda_gemm_self_check(1u << CASES[i / 3].scaling, text, sizeof(text));
        printf("    %4.1f, %-13s, %-13s: %s\n", capability / 10.0, CASES[i / 3].name, FAULTS[fault], text);
        assert_int_equal(seen, SELF_CHECK_EMULATES);
        assert_non_null(strstr(text, "FAILED"));
        assert_int_equal(cuda_gemm_device().policy, MX_GEMM_EMULATED);
    }
}

// A device whose emulated GEMMs don't add to what there is can't be trusted, though its native ones
// do.
static void test_self_check_of_emulation(void **state) {
    (void)state;
    char text[512];
    pretend(CAPABILITY_H100, AUTO);
    standin.fault = LOST_SUM;
    assert_int_equal(cuda_gemm_self_check(1u << SCALING_TENSOR, text, sizeof(text)), SELF_CHECK_FAILED);
    printf("    %s\n", text);
    assert_non_null(strstr(text, "16 ran natively, off by 0."));
    assert_non_null(strstr(text, "emulated ones are wrong"));
}

// Where kernels decline, GEMMs are emulated, which is no fault unless all do.
static void test_self_check_where_some_decline(void **state) {
    (void)state;
    char text[512];
    pretend(CAPABILITY_B200, AUTO);
    standin.declines_e5m2 = true;
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
    printf("    %-14s%s\n", "some declined", text);
    assert_non_null(strstr(text, "of 40 quantized GEMMs 24 ran natively"));
    assert_int_equal(cuda_gemm_device().policy, AUTO);
    pretend(CAPABILITY_B200, AUTO);
    standin.declines_native = true;
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_EMULATES);
    printf("    %-14s%s\n", "declined", text);
    assert_int_equal(cuda_gemm_device().policy, MX_GEMM_EMULATED);
}

// Returns the error, as a ratio of its bound, of a GEMM whose result is FP32.
static double worst_of_case(Scaling scaling) {
    Check check = {0};
    GemmCase g = fp8_case(4, (int64_t[]){144, 272, 400}, scaling);
    check_case(&g, run_on_host, &check);
    return check.ratio;
}

// Sums of which a card keeps 13 bits are within the bounds for such, here and in the self-check,
// and within no others.
static void test_sums_of_13_bits(void **state) {
    (void)state;
    char text[512];
    for (int i = 0; i < 2; i++) {
        pretend(i ? CAPABILITY_5090 : CAPABILITY_H100, AUTO);
        standin.keeps_13_bits = true;
        assert_true(worst_of_case(i ? SCALING_TENSOR : SCALING_BLOCK128) > 1);
        keeps_13_bits = true;
        if (i) {
            check_formats(80, 144, 160, ALL, 4, run_on_host);
            check_nvfp4(run_on_host);
        } else {
            check_one_scale(run_on_host);
            check_blocks_of_128(SCALING_BLOCK128_FP32, run_on_host);
        }
        keeps_13_bits = false;
        assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_PASSED);
        printf("    %s\n", text);
    }
    pretend(CAPABILITY_B200, AUTO);
    standin.keeps_13_bits = true;
    assert_int_equal(cuda_gemm_self_check(~0u, text, sizeof(text)), SELF_CHECK_EMULATES);
    printf("    10.0: %s\n", text);
}

int main(void) {
    omp_set_num_threads(1); // quantizing so little on many would be waiting for each other
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_paths_with_one_scale),
        cmocka_unit_test(test_paths_with_nvfp4),
        cmocka_unit_test(test_paths_with_blocks_of_128),
        cmocka_unit_test(test_what_is_done_first),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_paths_by_form),
        cmocka_unit_test(test_paths_by_alignment),
        cmocka_unit_test(test_quantized_form),
        cmocka_unit_test(test_descriptors_of_a_layer),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_values_emulated),
        cmocka_unit_test(test_values_with_factors),
        cmocka_unit_test(test_values_of_odd_shapes),
        cmocka_unit_test(test_values_native),
        cmocka_unit_test(test_values_with_one_scale),
        cmocka_unit_test(test_values_with_nvfp4),
        cmocka_unit_test(test_values_with_blocks_of_128),
        cmocka_unit_test(test_native_is_native),
        cmocka_unit_test(test_decoded_as_they_lie),
        cmocka_unit_test(test_declined),
        cmocka_unit_test(test_failing_kernel),
        cmocka_unit_test(test_failing_proposals),
        cmocka_unit_test(test_no_kernel_runs),
        cmocka_unit_test(test_declined_bias),
        cmocka_unit_test(test_declined_blocks),
        cmocka_unit_test(test_sums_by_block),
        cmocka_unit_test(test_native_policy),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_tuning),
        cmocka_unit_test(test_tuning_on_a_first_steps_data),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_workspace_of_fewer_rows),
        cmocka_unit_test(test_self_check),
        cmocka_unit_test(test_self_check_of_scalings),
        cmocka_unit_test(test_self_check_finds_faults),
        cmocka_unit_test(test_self_check_of_emulation),
        cmocka_unit_test(test_self_check_where_some_decline),
        cmocka_unit_test(test_sums_of_13_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
