/*
The self-check of GEMMs: a few of them multiplied natively and emulated, and both compared with exact
dot products.
*/
#include "gemm.h"
#include "gemm_workspace.h"
#include "llmc/base/memory.h"
#include "llmc/base/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    int64_t M, N, K;
    Format a, b;
} CheckShape;

// Dimensions are multiples of 32 that are none of 128, larger and smaller than a tile; E5M2 is on
// either side.
static const CheckShape CHECK_SHAPES[] = {{160, 288, 96, FORMAT_E4M3, FORMAT_E4M3},
                                          {32, 416, 544, FORMAT_E5M2, FORMAT_E4M3},
                                          {608, 224, 352, FORMAT_E4M3, FORMAT_E5M2}};

enum { CHECK_BLOCK_BYTES = CUDA_CUBLASLT_BYTES + (8 << 20) };

typedef struct {
    Operand operand; // on the device
    float *values;   // (rows, cols), decoded
} CheckOperand;

static uint32_t next_random(uint64_t *state) {
    uint32_t word[4];
    philox(word, 1, 0, (*state)++);
    return word[0];
}

static void *to_device(MemoryPlan *plan, const void *host, size_t bytes) {
    void *device = memory_take(plan, MEMORY_SCRATCH, bytes);
    cuda_copy_to_device(device, host, bytes);
    return device;
}

// Makes an operand of every finite code, with scales 2^-4 to 2^3: sums neither overflow nor lose
// what a block adds.
static CheckOperand make_operand(MemoryPlan *plan, Format format, Axis axis, int64_t rows, int64_t cols,
                                 uint64_t *state) {
    int64_t num_scales = mx_num_scales(axis, rows, cols);
    size_t bytes = quantized_bytes(FORM_PLAIN, axis, rows, cols);
    QuantizedTensor q = quantized_make(allocate(bytes), format, axis, rows, cols, FORM_PLAIN);
    for (int64_t i = 0; i < num_scales; i++) {
        q.scales[i] = (uint8_t)(123 + next_random(state) % 8);
    }
    CheckOperand result = {.values = allocate((size_t)(rows * cols) * sizeof(float))};
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t word = next_random(state), max_code = mx_element(format).max_code;
        q.elements[i] = (uint8_t)((word & 0x80) | (word >> 8) % (max_code + 1));
        uint8_t scale = q.scales[mx_scale_offset(axis, i / cols, i % cols, cols)];
        result.values[i] = mx_decode(format, q.elements[i]) * mx_scale_value(scale);
    }
    void *device = to_device(plan, q.elements, bytes);
    result.operand = operand_quantized(quantized_make(device, format, axis, rows, cols, FORM_PLAIN));
    free(q.elements);
    return result;
}

// Returns the largest |d - exact| / bound. Products of E4M3 and E5M2 values are exact in FP32. Each
// of the K additions, the bias's and d's own, may lose the last of FP32's 24 bits of a sum that
// never exceeds the sum of magnitudes: tensor cores truncate, so 2^-23 where rounding would lose
// 2^-24. The store rounds once, by 2^-8 of a BF16 value at most.
static double worst_error(const CheckShape *s, const float *d, double unit, const float *before, const float *bias,
                          CheckOperand a, CheckOperand b, GemmOptions options) {
    double worst = 0;
    for (int64_t i = 0; i < s->M * s->N; i++) {
        int64_t m = i / s->N, n = i % s->N;
        double sum = before[i] + (double)bias[n], magnitude = fabs((double)before[i]) + fabs((double)bias[n]);
        for (int64_t k = 0; k < s->K; k++) {
            double product = (double)a.values[options.transpose_a ? k * s->M + m : m * s->K + k] *
                             (double)b.values[options.transpose_b ? n * s->K + k : k * s->N + n];
            sum += product;
            magnitude += fabs(product);
        }
        double accumulated = (double)(s->K + 2) * 0x1p-23 * magnitude;
        double ratio = fabs(d[i] - sum) / (accumulated + unit * (fabs(sum) + accumulated));
        worst = ratio <= worst ? worst : isnan(ratio) ? INFINITY : ratio;
    }
    return worst;
}

// What was seen of a path.
typedef struct {
    double worst; // that a GEMM was off by, as a ratio of the bound
    int ran;
} CheckResult;

// Runs the GEMM on a path and adds its worst error to `result`; nothing where cuBLASLt declines:
// outside the check it is then emulated.
static void check_path(CheckResult *result, GemmPath path, const CheckShape *s, MemoryPlan plan, CheckOperand a,
                       CheckOperand b, GemmOptions options, bool has_bias, uint64_t *state) {
    size_t count = (size_t)(s->M * s->N), size = options.accumulate ? 4 : 2;
    float *d = allocate(count * sizeof(float)), *before = allocate(count * sizeof(float));
    float *bias = allocate((size_t)s->N * sizeof(float));
    for (size_t i = 0; i < count && options.accumulate; i++) {
        before[i] = (float)(int32_t)next_random(state) * 0x1p-20f;
    }
    for (int64_t n = 0; n < s->N && has_bias; n++) {
        bias[n] = mx_from_bf16(mx_to_bf16((float)(int32_t)next_random(state) * 0x1p-20f)); // so as not to be rounded
    }
    if (has_bias) options.bias = to_device(&plan, bias, (size_t)s->N * sizeof(float));
    Tensor out = tensor_make(to_device(&plan, before, count * size), size == 4 ? FORMAT_FP32 : FORMAT_BF16, s->M, s->N);
    void *workspace = memory_take(&plan, MEMORY_SCRATCH, cuda_gemm_workspace(a.operand, b.operand));
    if (plan.used > CHECK_BLOCK_BYTES) die("internal error: the self-check needs %zu bytes", plan.used);

    bool ran = !cuda_gemm_run(path, out, a.operand, b.operand, options, workspace);
    cuda_copy_to_host(d, out.data, count * size);
    for (size_t i = count; i-- > 0 && size == 2;) { // widened in place, from the end
        uint16_t narrow;
        memcpy(&narrow, (char *)d + 2 * i, sizeof(narrow));
        d[i] = mx_from_bf16(narrow);
    }
    if (ran) {
        double unit = size == 2 ? 0x1p-8 : 0x1p-24;
        result->worst = fmax(result->worst, worst_error(s, d, unit, before, bias, a, b, options));
        result->ran++;
    }
    free(d);
    free(before);
    free(bias);
}

// Checks both paths over one shape in one layout.
static void check_layout(const CheckShape *s, GemmOptions options, bool has_bias, void *block, uint64_t *state,
                         CheckResult *native, CheckResult *emulated) {
    MemoryPlan plan = {.base = block};
    bool ta = options.transpose_a, tb = options.transpose_b;
    CheckOperand a =
        make_operand(&plan, s->a, ta ? AXIS_COLUMNWISE : AXIS_ROWWISE, ta ? s->K : s->M, ta ? s->M : s->K, state);
    CheckOperand b =
        make_operand(&plan, s->b, tb ? AXIS_ROWWISE : AXIS_COLUMNWISE, tb ? s->N : s->K, tb ? s->K : s->N, state);
    check_path(native, GEMM_NATIVE, s, plan, a, b, options, has_bias, state);
    check_path(emulated, GEMM_EMULATED, s, plan, a, b, options, has_bias, state);
    free(a.values);
    free(b.values);
}

bool cuda_gemm_self_check(char *text, size_t bytes) {
    GemmDevice device = cuda_gemm_device();
    const char *why;
    if (!cuda_gemm_has_native(device.capability, device.cublaslt, &why)) {
        snprintf(text, bytes, "MXFP8 GEMMs are emulated in BF16, nothing to check: %s", why);
        return true;
    }
    if (device.policy == MX_GEMM_EMULATED) {
        snprintf(text, bytes, "MXFP8 GEMMs are emulated in BF16, as asked for; nothing to check");
        return true;
    }
    static const struct {
        GemmOptions options;
        bool has_bias;
    } LAYOUTS[] = {{{.transpose_b = true}, true}, {{0}, false}, {{.transpose_a = true, .accumulate = true}, false}};
    CheckResult native = {0}, emulated = {0};
    uint64_t state = 0;
    int count = 0;
    void *block = NULL;
    cuda_check(cudaMalloc(&block, CHECK_BLOCK_BYTES), "allocating the self-check's memory");
    for (int i = 0; i < COUNT(CHECK_SHAPES); i++) {
        for (int l = 0; l < 3; l++, count++) { // fprop, dgrad, wgrad
            check_layout(&CHECK_SHAPES[i], LAYOUTS[l].options, LAYOUTS[l].has_bias, block, &state, &native, &emulated);
        }
    }
    cuda_check(cudaFree(block), "freeing the self-check's memory");

    bool agree = native.ran > 0 && native.worst <= 1 && emulated.ran == count && emulated.worst <= 1;
    if (!agree) {
        device.policy = MX_GEMM_EMULATED;
        cuda_gemm_use_device(device);
    }
    snprintf(text, bytes,
             "%s: of %d MXFP8 GEMMs %d ran natively, off by %.3g of the accumulation bound, %d emulated, by %.3g%s",
             agree ? "self-check passed" : "SELF-CHECK FAILED", count, native.ran, native.worst, emulated.ran,
             emulated.worst, agree ? "" : "; this run does without native MXFP8 GEMMs");
    return agree;
}
