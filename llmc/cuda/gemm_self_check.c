/*
The self-check of GEMMs: a few of them multiplied natively and emulated, and both compared with
exact dot products.
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
    Format a, b; // where the scaling isn't of one format alone
} CheckShape;

// Dimensions are multiples of 16, and none is of 128; they are larger and smaller than a tile. E5M2
// is on either side. Blocks of 128 end with short ones, also of 16, and their numbers along K
// aren't multiples of 4.
static const CheckShape CHECK_SHAPES[] = {{160, 288, 96, FORMAT_E4M3, FORMAT_E4M3},
                                          {32, 416, 544, FORMAT_E5M2, FORMAT_E4M3},
                                          {608, 224, 352, FORMAT_E4M3, FORMAT_E5M2},
                                          {144, 288, 656, FORMAT_E4M3, FORMAT_E4M3}};
// Large enough for the kernels that a model's GEMMs get, whose tiles two multiprocessors share.
static const CheckShape LARGE_SHAPES[] = {{4096, 2304, 768, FORMAT_E4M3, FORMAT_E4M3},
                                          {4096, 768, 3072, FORMAT_E5M2, FORMAT_E4M3}};

enum {
    CHECK_BLOCK_BYTES = CUDA_CUBLASLT_BYTES + (128 << 20),
    CHECKED_VALUES = 1 << 14 // of a result, at most: evenly spread over a larger one
};

typedef struct {
    Operand operand; // on the device
    float *values;   // (rows, cols), decoded
} CheckOperand;

static uint32_t next_random(uint64_t *state) {
    uint32_t word[4];
    philox(word, 1, 0, (*state)++);
    return word[0];
}

// Returns memory of the check's block, which must have room for it.
static void *take(MemoryPlan *plan, size_t bytes) {
    void *memory = memory_take(plan, MEMORY_SCRATCH, bytes);
    if (plan->used > CHECK_BLOCK_BYTES) die("internal error: the self-check needs %zu bytes", plan->used);
    return memory;
}

static void *to_device(MemoryPlan *plan, const void *host, size_t bytes) {
    void *device = take(plan, bytes);
    cuda_copy_to_device(device, host, bytes);
    return device;
}

// Fills an operand's scales with 2^-4 to 2^3, times 1 to 2 where they needn't be powers of two.
// They have so few bits that values are exact: E4M3's all three behind the leading one, FP32's
// four.
static void fill_scales(QuantizedTensor q, uint64_t *state) {
    for (int64_t i = 0; i < scaling_num_blocks(q.scaling, q.axis, q.rows, q.cols) && q.scaling != SCALING_TENSOR; i++) {
        uint32_t word = next_random(state);
        uint8_t code = (uint8_t)(123 + word % 8);
        float more = q.scaling == SCALING_BLOCK128_FP32 ? (float)(word >> 8 & 15) / 16 : 0;
        if (q.scaling == SCALING_MX) q.scales[i] = code;
        if (scaling_is_nvfp4(q.scaling)) q.scales[i] = (uint8_t)(0x18 + word % 64);
        if (scaling_is_block128(q.scaling)) ((float *)q.scales)[i] = mx_scale_value(code) * (1 + more);
    }
}

// Returns what elements of a block are multiplied by, but for the tensor's factor.
static float scale_at(QuantizedTensor q, int64_t row, int64_t col) {
    int64_t block = scaling_block_at(q.scaling, q.axis, row, col, q.cols);
    return q.scaling == SCALING_MX ? mx_scale_value(q.scales[block]) : scaling_kept_value(q.scaling, q.scales, block);
}

// Makes an operand of every finite code, with scales of which sums neither overflow nor lose what a
// block adds. The tensor's factor, where it has one, is of so few bits that values are exact, and
// so is the product of two.
static CheckOperand make_operand(MemoryPlan *plan, Format format, Scaling scaling, Axis axis, int64_t rows,
                                 int64_t cols, uint64_t *state) {
    const float FACTOR = 0.375f;
    bool has_factor = scaling_has_factor(scaling);
    size_t bytes = scaled_bytes(scaling, FORM_PLAIN, axis, rows, cols);
    QuantizedTensor q = quantized_make(allocate(bytes), format, axis, rows, cols, FORM_PLAIN);
    q.scaling = scaling;
    fill_scales(q, state);
    CheckOperand result = {.values = allocate((size_t)(rows * cols) * sizeof(float))};
    MxElement element = mx_element(format);
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t word = next_random(state);
        q.elements[i] = (uint8_t)((word >> 7 & 1) << element.sign_bit | (word >> 8) % (element.max_code + 1));
        float value = mx_decode(format, q.elements[i]) * scale_at(q, i / cols, i % cols);
        result.values[i] = value * (has_factor ? FACTOR : 1);
    }
    void *device = to_device(plan, q.elements, bytes);
    result.operand = operand_quantized(quantized_make(device, format, axis, rows, cols, FORM_PLAIN));
    result.operand.quantized.scaling = scaling;
    if (has_factor) result.operand.quantized.factor = to_device(plan, &FACTOR, sizeof(FACTOR));
    free(q.elements);
    return result;
}

// A value of the result in exact arithmetic, and what accumulating its addends may lose.
typedef struct {
    double sum, lost;
} ExactValue;

// Returns a value of the result, and what accumulating its addends may lose.
//
// Products of E4M3 and E5M2 values are exact in FP32, and so are those of E2M1 values times both
// blocks' E4M3 scales: 2 * 2 and 2 * 4 bits. Each of the K - 1 additions, alpha, the bias's and d's
// own may lose the last of FP32's 24 bits of a sum that never exceeds the sum of magnitudes: tensor
// cores truncate, so 2^-23 where rounding would lose 2^-24. Where they keep fewer bits, 2^-13 of
// the largest addend (DeepSeek-V3, 2024, saw that of Hopper's FP8; Ada and 12.x, whose instruction
// is Ada's, are taken to be alike), whether or not partial sums are then added in FP32, an
// instruction adds 32 products to the sum, of FP4 64 (PTX ISA: m16n8k64), and each of these 33 or
// 65 may lose that of what the sum of products and the new ones reach: what d was and the bias are
// added after all of them. Blocks of 128 start from 0; their sum is multiplied by two scales and
// added in FP32. `lost` has the additions within a block, so K 2^-23 is left for three roundings a
// block, and a short block, too, has 16 additions' worth of that.
static ExactValue exact_value(const CheckShape *s, int64_t m, int64_t n, double before, double bias, CheckOperand a,
                              CheckOperand b, GemmOptions options, bool keeps_13_bits) {
    const QuantizedTensor *q = &a.operand.quantized;
    int64_t together = q->format == FORMAT_E2M1 ? 64 : 32;
    const float *x = a.values + (options.transpose_a ? m : m * s->K);
    const float *w = b.values + (options.transpose_b ? n * s->K : n);
    int64_t x_step = options.transpose_a ? s->M : 1, w_step = options.transpose_b ? 1 : s->N;
    double sum = before + bias, added = sum, magnitude = fabs(before) + fabs(bias), lost = 0;
    for (int64_t first = 0; first < s->K; first += together) {
        if (scaling_is_block128(q->scaling) && first % 128 == 0) added = sum;
        double until_now = fabs(sum - added), of_products = 0;
        for (int64_t k = first; k < first + together && k < s->K; k++) {
            double product = (double)x[k * x_step] * (double)w[k * w_step];
            sum += product;
            of_products += fabs(product);
        }
        magnitude += of_products;
        lost += (double)(together + 1) * 0x1p-13 * (until_now + of_products);
    }
    double in_fp32 = (double)(s->K + 2) * 0x1p-23 * magnitude;
    return (ExactValue){sum, keeps_13_bits ? lost + in_fp32 : in_fp32};
}

// Returns the largest |d - exact| / bound. The store rounds once, by 2^-8 of a BF16 value at most,
// and so does, where a bias is added to it later, the product.
static double worst_error(const CheckShape *s, const float *d, double unit, const float *before, const float *bias,
                          CheckOperand a, CheckOperand b, GemmOptions options, bool keeps_13_bits,
                          bool rounds_product) {
    double worst = 0;
    int64_t apart = num_parts(s->M * s->N, CHECKED_VALUES);
    for (int64_t m = 0; m < s->M; m++) {
        for (int64_t n = m % apart; n < s->N; n += apart) { // all rows and columns come up
            int64_t i = m * s->N + n;
            ExactValue exact = exact_value(s, m, n, before[i], bias[n], a, b, options, keeps_13_bits);
            double sum = exact.sum, accumulated = exact.lost;
            double product = rounds_product ? fabs(sum - bias[n]) + accumulated : 0;
            double ratio = fabs(d[i] - sum) / (accumulated + unit * (fabs(sum) + accumulated + product));
            worst = ratio <= worst ? worst : isnan(ratio) ? INFINITY : ratio;
        }
    }
    return worst;
}

// What was seen of a path.
typedef struct {
    double worst; // that a GEMM was off by, as a ratio of the bound
    int ran, wanted;
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
    void *workspace = take(&plan, cuda_gemm_workspace(a.operand, b.operand));

    bool ran = !cuda_gemm_run(path, out, a.operand, b.operand, options, workspace);
    cuda_copy_to_host(d, out.data, count * size);
    for (size_t i = count; i-- > 0 && size == 2;) { // widened in place, from the end
        uint16_t narrow;
        memcpy(&narrow, (char *)d + 2 * i, sizeof(narrow));
        d[i] = mx_from_bf16(narrow);
    }
    if (ran) {
        double unit = size == 2 ? 0x1p-8 : 0x1p-24;
        bool keeps_13_bits = path == GEMM_NATIVE && cuda_gemm_device().capability / 10 != 10;
        // Where cuBLASLt declines an emulated GEMM's bias, it is added otherwise.
        bool rounds_product = path == GEMM_EMULATED && has_bias;
        double worst = worst_error(s, d, unit, before, bias, a, b, options, keeps_13_bits, rounds_product);
        result->worst = fmax(result->worst, worst);
        result->ran++;
    }
    free(d);
    free(before);
    free(bias);
}

// Checks both paths over one shape of a scaling in one layout. By blocks of 128 and in NVFP4
// fprop's and dgrad's b has square blocks, as weights have.
static void check_layout(const CheckShape *s, Scaling scaling, GemmOptions options, bool has_bias, void *block,
                         uint64_t *state, CheckResult *native, CheckResult *emulated) {
    MemoryPlan plan = {.base = block};
    bool ta = options.transpose_a, tb = options.transpose_b, is_nvfp4 = scaling_is_nvfp4(scaling);
    CheckOperand a = make_operand(&plan, is_nvfp4 ? FORMAT_E2M1 : s->a, scaling, ta ? AXIS_COLUMNWISE : AXIS_ROWWISE,
                                  ta ? s->K : s->M, ta ? s->M : s->K, state);
    bool has_squares = scaling_is_block128(scaling) || is_nvfp4;
    Axis b_axis = has_squares && !ta ? AXIS_SQUARE : tb ? AXIS_ROWWISE : AXIS_COLUMNWISE;
    CheckOperand b =
        make_operand(&plan, is_nvfp4 ? FORMAT_E2M1 : s->b, scaling, b_axis, tb ? s->N : s->K, tb ? s->K : s->N, state);
    check_path(native, GEMM_NATIVE, s, plan, a, b, options, has_bias, state);
    check_path(emulated, GEMM_EMULATED, s, plan, a, b, options, has_bias, state);
    free(a.values);
    free(b.values);
}

// Returns which scalings the device takes natively of some (bits 1 << Scaling), without four over
// six, whose GEMMs are those of SCALING_NVFP4. Sets `why` to a clause that says why not the others.
static unsigned native_scalings(unsigned scalings, const char **why) {
    GemmDevice device = cuda_gemm_device();
    unsigned natives = 0;
    if (scalings >> SCALING_NVFP4_46 & 1) scalings |= 1u << SCALING_NVFP4;
    for (Scaling scaling = SCALING_MX; scaling < SCALING_NVFP4_46; scaling++) {
        bool is_wanted = scalings >> scaling & 1;
        if (is_wanted && cuda_gemm_has_native(device.capability, device.cublaslt, scaling, why)) {
            natives |= 1u << scaling;
        }
    }
    return natives;
}

// Writes why there is nothing to check, if that is so, and returns it. Of no scalings there is
// nothing to say.
static bool has_nothing_to_check(unsigned scalings, char *text, size_t bytes) {
    const char *why = NULL;
    if (!native_scalings(scalings, &why)) {
        snprintf(text, bytes, "%s%s", why ? "quantized GEMMs are emulated in BF16, nothing to check: " : "",
                 why ? why : "");
        return true;
    }
    bool is_unwanted = cuda_gemm_device().policy == MX_GEMM_EMULATED;
    if (is_unwanted) snprintf(text, bytes, "quantized GEMMs are emulated in BF16, as asked for; nothing to check");
    return is_unwanted;
}

// Returns whether a sum over K has whole blocks where a native GEMM wants them: in MX and NVFP4.
static bool has_whole_blocks(int64_t K, Scaling scaling) {
    return K % MX_BLOCK == 0 || !(scaling == SCALING_MX || scaling_is_nvfp4(scaling));
}

// Checks both paths over the shapes, where blocks are whole, in each scaling among `natives` and in
// the layouts of fprop, dgrad and wgrad, which writes its result or adds to it. Sets what was seen
// of each path, writes it to `text`, and returns whether both are within their bounds.
static bool check_shapes(const CheckShape *shapes, int num_shapes, unsigned natives, CheckResult *native,
                         CheckResult *emulated, char *text, size_t bytes) {
    static const struct {
        GemmOptions options;
        bool has_bias;
    } LAYOUTS[] = {{{.transpose_b = true, .fast_sum = true}, true},
                   {{0}, false},
                   {{.transpose_a = true}, false},
                   {{.transpose_a = true, .accumulate = true}, false}};
    uint64_t state = 0;
    int count = 0;
    void *block = NULL;
    *native = *emulated = (CheckResult){0};
    cuda_check(cudaMalloc(&block, CHECK_BLOCK_BYTES), "allocating the self-check's memory");
    for (int i = 0; i < NUM_SCALINGS * num_shapes; i++) {
        Scaling scaling = (Scaling)(i / num_shapes);
        const CheckShape *s = &shapes[i % num_shapes];
        if (!(natives >> scaling & 1) || !has_whole_blocks(s->K, scaling)) continue;
        for (int l = 0; l < COUNT(LAYOUTS); l++, count++) {
            check_layout(s, scaling, LAYOUTS[l].options, LAYOUTS[l].has_bias, block, &state, native, emulated);
        }
    }
    cuda_check(cudaFree(block), "freeing the self-check's memory");
    native->wanted = count;
    bool agree = native->worst <= 1 && emulated->worst <= 1;
    snprintf(text, bytes,
             "of %d quantized GEMMs %d ran natively, off by %.3g of the accumulation bound, %d emulated, by %.3g",
             count, native->ran, native->worst, emulated->ran, emulated->worst);
    return agree;
}

SelfCheck cuda_gemm_self_check(unsigned scalings, char *text, size_t bytes) {
    if (has_nothing_to_check(scalings, text, bytes)) return SELF_CHECK_PASSED;
    CheckResult native, emulated;
    const char *why;
    char seen[256];
    unsigned natives = native_scalings(scalings, &why);
    bool agree = check_shapes(CHECK_SHAPES, COUNT(CHECK_SHAPES), natives, &native, &emulated, seen, sizeof(seen)) &&
                 native.ran > 0;
    if (!agree) {
        GemmDevice device = cuda_gemm_device();
        device.policy = MX_GEMM_EMULATED;
        cuda_gemm_use_device(device);
    }
    static const char *const MEANS[] = {[SELF_CHECK_PASSED] = "",
                                        [SELF_CHECK_EMULATES] = "; this run does without native GEMMs",
                                        [SELF_CHECK_FAILED] = "; emulated ones are wrong"};
    SelfCheck result = agree ? SELF_CHECK_PASSED : emulated.worst <= 1 ? SELF_CHECK_EMULATES : SELF_CHECK_FAILED;
    snprintf(text, bytes, "%s: %s%s", agree ? "self-check passed" : "SELF-CHECK FAILED", seen, MEANS[result]);
    return result;
}

bool cuda_gemm_check_large(char *text, size_t bytes) {
    CheckResult native, emulated;
    const char *why;
    if (has_nothing_to_check(~0u, text, bytes)) return true;
    unsigned natives = native_scalings(~0u, &why);
    bool agree = check_shapes(LARGE_SHAPES, COUNT(LARGE_SHAPES), natives, &native, &emulated, text, bytes);
    return agree && native.ran == native.wanted;
}
