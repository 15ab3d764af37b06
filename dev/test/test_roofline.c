/*
The roofline, and the count of bytes that it is made of, against numbers worked out by hand, for a
model that is small enough to count: 2 layers of 64 channels, 128 tokens in the vocabulary, 32
positions, 2 sequences of 32. n C and C C are then both 4096, n V and V C both 8192.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "by_name.h"
#include "llmc/cuda/gemm_path.h"
#include "llmc/model/profile.h"
#include "llmc/run/roofline.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static const double TOLERANCE = 1e-12; // relative: some dozens of operations in double precision

static void check(const char *what, double value, double expected) {
    double error = fabs(value - expected) / fabs(expected);
    printf("%-44s %.12g, error %.1e, tolerance %.1e\n", what, value, error, TOLERANCE);
    if (!(error <= TOLERANCE)) fail_msg("%s: %.17g, not %.17g", what, value, expected);
}

typedef struct {
    Comm comm;
    Recipe recipe;
    Sharding sharding;
    RooflineRun run;
} Setup;

static const GPTConfig SMALL = {.layers = 2, .heads = 2, .channels = 64, .max_seq_len = 32, .vocab_size = 128};
// 7.8 billion parameters, like the 8B that Mishra et al. train on 15 trillion tokens.
static const GPTConfig LARGE = {.layers = 36, .heads = 32, .channels = 4096, .max_seq_len = 8192, .vocab_size = 128000};

static void set_up(Setup *s, GPTConfig config, const char *recipe, int ranks, int64_t B, int64_t T) {
    memset(s, 0, sizeof(*s));
    s->comm = (Comm){.name = "nccl", .size = ranks};
    s->recipe = recipe_of(recipe);
    s->sharding = (Sharding){.comm = &s->comm, .zero = 1, .reduce = FORMAT_FP32};
    s->run = (RooflineRun){.config = config,
                           .recipe = &s->recipe,
                           .sharding = &s->sharding,
                           .B = B,
                           .T = T,
                           .accumulation = 1,
                           .link_bandwidth = 1e9};
}

static WireBytes wire_bytes(const Setup *s) {
    return gpt_wire_bytes(s->run.config, &s->recipe, backend_cpu(), &s->sharding, s->run.accumulation);
}

// Everything takes no time but what is to be looked at.
static RooflineDevice device_of(double flops, double bandwidth, bool native) {
    return (RooflineDevice){.name = "test",
                            .bf16_flops = flops,
                            .fp8_flops = 2 * flops,
                            .memory_bytes = 1e9,
                            .memory_bandwidth = bandwidth,
                            .native_mx = native,
                            .gemm_efficiency = 1,
                            .native_efficiency = 1,
                            .block128_efficiency = 1,
                            .attention_efficiency = 0.5,
                            .memory_efficiency = 1,
                            .attention_products = 9};
}

static void test_operations(void **state) {
    (void)state;
    Setup s;
    set_up(&s, SMALL, "bf16", 1, 2, 32);
    RooflineDevice device = device_of(1e12, 1e300, false);
    RooflineStep step = roofline_step(&device, &s.run);
    // 6 n (12 L C C + V C) = 384 * (98304 + 8192); 7 products of n T C L at half the peak:
    // the output is kept, and need not be made again.
    check("GEMMs, bf16", step.gemm, 40894464e-12);
    check("attention", step.attention, 7 * 524288e-12);
    check("tokens", step.tokens, 64);
    // The model's operations: these of GEMMs, and 6 n T C L of attention.
    double flops = 40894464 + 6 * 64 * 32 * 64 * 2;
    check("utilization", step.utilization, flops / 1e12 / step.step);

    s.run.accumulation = 3;
    check("three micro-batches", roofline_step(&device, &s.run).gemm, 3 * 40894464e-12);

    set_up(&s, SMALL, "mxfp8", 1, 2, 32);
    step = roofline_step(&device, &s.run);
    check("GEMMs, mxfp8 emulated", step.gemm, 40894464e-12);
    check("attention, its output made again", step.attention, 9 * 524288e-12);
    device.native_mx = true;
    check("GEMMs, mxfp8 native", roofline_step(&device, &s.run).gemm, (384 * 98304 / 2 + 384 * 8192) * 1e-12);
    set_up(&s, SMALL, "fp8-blockwise", 1, 2, 32);
    check("GEMMs, blocks of 128 on Blackwell", roofline_step(&device, &s.run).gemm, 40894464e-12);
    device.native_mx = false;
    check("GEMMs, blocks of 128 on Hopper", roofline_step(&device, &s.run).gemm,
          (384 * 98304 / 2 + 384 * 8192) * 1e-12);
    device.block128_efficiency = 0.25;
    check("GEMMs, blocks of 128 at a quarter of FP8's peak", roofline_step(&device, &s.run).gemm,
          (384 * 98304 * 2 + 384 * 8192) * 1e-12);
    device.block128_efficiency = 1;
    device.mx_gemm = MX_GEMM_EMULATED;
    check("GEMMs, blocks of 128 emulated", roofline_step(&device, &s.run).gemm, 40894464e-12);
    device.mx_gemm = MX_GEMM_AUTO;
    set_up(&s, SMALL, "fp8-blockwise-fp32", 1, 2, 32);
    check("GEMMs, FP32 blocks of 128", roofline_step(&device, &s.run).gemm, (384 * 98304 / 2 + 384 * 8192) * 1e-12);
    device.native_mx = true;
    set_up(&s, SMALL, "mxfp4", 1, 2, 32);
    check("GEMMs, mxfp4 on a card with FP8", roofline_step(&device, &s.run).gemm, 40894464e-12);
    set_up(&s, SMALL, "nvfp4", 1, 2, 32);
    check("GEMMs, nvfp4 native", roofline_step(&device, &s.run).gemm, (384 * 98304 / 4 + 384 * 8192) * 1e-12);
    device.native_efficiency = 0.25;
    check("GEMMs, nvfp4 at a quarter of its peak", roofline_step(&device, &s.run).gemm,
          (384 * 98304 + 384 * 8192) * 1e-12);
    device.native_efficiency = 1;
    set_up(&s, SMALL, "nvfp4-mxfp8", 1, 2, 32); // the forward pass in FP4
    check("GEMMs, nvfp4-mxfp8 native", roofline_step(&device, &s.run).gemm,
          (128 * 98304 / 4 + 256 * 98304 / 2 + 384 * 8192) * 1e-12);
    device.native_mx = false;
    set_up(&s, SMALL, "nvfp4", 1, 2, 32);
    check("GEMMs, nvfp4 emulated", roofline_step(&device, &s.run).gemm, 40894464e-12);
    device.native_mx = true;
    set_up(&s, SMALL, "mxfp8-forward-only", 1, 2, 32);
    check("GEMMs, mxfp8 forward only", roofline_step(&device, &s.run).gemm,
          (128 * 98304 / 2 + 256 * 98304 + 384 * 8192) * 1e-12);
}

// What dgrad by blocks of 128 moves on Hopper beside its operands and its result: W's codes
// transposed, and both operands' scales put in their places; and what it moves emulated. dY is 64 x
// 192, W 192 x 96; they have no memory, and so don't count themselves.
static void test_blocks_of_128(void **state) {
    (void)state;
    Setup s;
    RooflineDevice device = device_of(1e300, 1, false);
    set_up(&s, SMALL, "fp8-blockwise", 1, 2, 32);
    roofline_step(&device, &s.run);
    const Backend *backend = roofline_backend(&device);
    QuantizedTensor dy = quantized_make(NULL, FORMAT_E4M3, AXIS_ROWWISE, 64, 192, FORM_PLAIN);
    QuantizedTensor w = quantized_make(NULL, FORMAT_E4M3, AXIS_SQUARE, 192, 96, FORM_PLAIN);
    dy.scaling = w.scaling = SCALING_BLOCK128;
    double dy_scales = 4 * 64 * 2, w_scales = 4 * 2, start = backend->now();
    backend->gemm(tensor_make(NULL, FORMAT_BF16, 64, 96), operand_quantized(dy), operand_quantized(w),
                  (GemmOptions){0});
    check("dgrad by blocks of 128", backend->now() - start, 2 * 192 * 96 + 2 * (dy_scales + w_scales));
    device.mx_gemm = MX_GEMM_EMULATED; // 2 bytes of each value written and read
    const double decoded = 4 * (64 * 192 + 192 * 96);
    start = backend->now();
    backend->gemm(tensor_make(NULL, FORMAT_BF16, 64, 96), operand_quantized(dy), operand_quantized(w),
                  (GemmOptions){0});
    check("emulated", backend->now() - start, decoded);
    w.scaling = dy.scaling = SCALING_BLOCK128_FP32; // and two blocks of K, whose products are summed
    start = backend->now();
    backend->gemm(tensor_make(NULL, FORMAT_BF16, 64, 96), operand_quantized(dy), operand_quantized(w),
                  (GemmOptions){0});
    check("emulated, FP32 scales", backend->now() - start, decoded + 2 * 16 * 64 * 96);
}

// What an operation's calls of a step move, by hand.
typedef struct {
    const char *name;
    int64_t calls;
    double read, written;
} Expected;

static void check_lines(const char *what, const Expected *lines, int count) {
    char text[64];
    for (int i = 0; i < count; i++) {
        const Expected *line = &lines[i];
        ProfileCell cell = profile_line(line->name);
        assert_int_equal(cell.calls, line->calls);
        snprintf(text, sizeof(text), "%s, %s: read", what, line->name);
        check(text, cell.read + 1, line->read + 1); // some read, or write, nothing
        snprintf(text, sizeof(text), "%s, %s: written", what, line->name);
        check(text, cell.written + 1, line->written + 1);
    }
}

// n C elements are E, those of the MLP's inside 4 E. A vector of C floats is 256 bytes, as are the
// rows' statistics; of both kinds for layernorm 512. Of a layer linear inputs are 7 E wide, outputs
// 9 E, weights 12 E, biases 9 vectors.
enum { E = 4096, VC = 8192, MATRICES = 108544, VECTORS = 1792, ALL = MATRICES + VECTORS };
// Of these, weights whose gradients GEMMs write: zeroed are those of 18 vectors and the positions.
enum { MULTIPLIED = 24 * E + VC };

static void test_each_operation(void **state) {
    (void)state;
    Setup s;
    RooflineDevice device = device_of(1e300, 1, false);
    set_up(&s, SMALL, "bf16", 1, 2, 32);
    RooflineStep step = roofline_step(&device, &s.run);
    const Expected bf16[] = {
        {"zero", 3, 0, 4 * (ALL - MULTIPLIED) + 2 * E}, // vectors, positions, and the stream's gradient
        {"embedding_forward", 1, 64 * (4 + 128) + 32 * 128, 2 * E},
        {"layernorm_forward", 5, 9 * 2 * E + 5 * 512, 9 * 2 * E + 5 * 512}, // the first adds no residual
        {"gemm fprop", 9, 2 * (2 * 7 * E + 2 * 12 * E + 9 * 256) + 2 * E + 2 * VC, 2 * 2 * 9 * E + 4 * VC},
        {"attention_forward", 2, 2 * 6 * E, 2 * (2 * E + 512)},
        {"activation_forward", 2, 2 * 8 * E, 2 * 8 * E},
        {"classifier", 1, 4 * VC + 256, 2 * VC + 256},
        {"gemm dgrad", 9, 2 * (2 * 9 * E + 2 * 12 * E) + 2 * VC + 2 * VC, 2 * 2 * 7 * E + 2 * E},
        {"gemm wgrad", 9, 2 * 2 * 16 * E + 2 * VC + 2 * E, 2 * 4 * 12 * E + 4 * VC},
        {"layernorm_backward", 5, 5 * (6 * E + 512 + 256 + 512), 5 * (2 * E + 512)},
        {"bias_backward", 6, 2 * (2 * 5 * E + 5 * 256), 2 * 5 * 256}, // one is made with GELU's gradient
        {"activation_backward", 2, 2 * (16 * E + 1024), 2 * (8 * E + 1024)},
        {"attention_backward", 2, 2 * (2 * E + 2 * E + 6 * E + 512), 2 * 6 * E}, // O was kept
        {"embedding_backward", 1, 256 + 2 * E + 4 * E + 4 * 2048, 4 * E + 4 * 2048},
        {"sum", 1, 256, 0},
        {"sum_of_squares", 1, 4 * ALL, 0},
        {"adamw", 11, 16 * ALL, 12 * ALL + 2 * MATRICES}, // vectors all in one,
    };
    check_lines("bf16", bf16, COUNT(bf16));
    double all = 0;
    for (int i = 0; i < COUNT(bf16); i++) {
        all += bf16[i].read + bf16[i].written;
    }
    check("all of them, bf16", step.step, all);
    // And the sum of the losses.
    check("the update, bf16", step.update, 36 * ALL - 4 * MULTIPLIED + 2 * MATRICES + 256);

    // Emulated: what is made for one GEMM is made as BF16, what is kept is codes, 33/32 bytes each,
    // and decoded before its GEMM: 2 bytes written, 2 read.
    const double code = 33.0 / 32;
    set_up(&s, SMALL, "mxfp8", 1, 2, 32);
    roofline_step(&device, &s.run);
    const Expected emulated[] = {
        {"layernorm_forward", 5, 9 * 2 * E + 512, 5 * 2 * E + 5 * 512}, // all but the last are made as they are read
        {"quantize layernorm", 4, 4 * (2 * E + 512 + 512), 4 * (2 + code) * E},
        // Attention's, and gradients, with the sums of their columns, biases' gradients of 5
        // vectors.
        {"quantize", 8, 2 * (2 * (1 + 5) * E + 5 * 256), 2 * ((2 + code) * E + 2 * 2 * 5 * E + 5 * 256)},
        {"bias_backward", 0, 0, 0},
        {"quantize activation", 4, 4 * 8 * E, 4 * 8 * E}, // and again backward
        {"quantize activation_backward", 2, 2 * (16 * E + 1024), 2 * (16 * E + 1024)},
        {"gemm fprop", 9, 2 * (2 * 7 * E + (2 + code) * 12 * E + 9 * 256) + 2 * E + 2 * VC,
         2 * (2 * 9 * E + 2 * 12 * E) + 4 * VC},
        {"gemm dgrad", 9, 2 * (2 * 9 * E + (2 + code) * 12 * E) + 4 * VC, 2 * (2 * 7 * E + 2 * 12 * E) + 2 * E},
        {"gemm wgrad", 9, 2 * (2 * 9 * E + 2 * 4 * E + (2 + code) * 3 * E) + 2 * VC + 2 * E,
         2 * (4 * 12 * E + 2 * 3 * E) + 4 * VC},
        {"quantize adamw", 8, 16 * 24 * E, (12 + 2 * code) * 24 * E},
        {"adamw", 3, 16 * (ALL - 24 * E), 12 * (ALL - 24 * E) + 2 * (MATRICES - 24 * E)},
    };
    check_lines("mxfp8 emulated", emulated, COUNT(emulated));

    // wgrad's operands transformed, each from BF16 to BF16: X of 7 E a layer, dY of 9.
    set_up(&s, SMALL, "mxfp8", 1, 2, 32);
    s.recipe.transform[GEMM_WGRAD] = TRANSFORM_FIXED;
    roofline_step(&device, &s.run);
    const Expected transformed[] = {{"hadamard", 16, 2 * 2 * (7 + 9) * E, 2 * 2 * (7 + 9) * E}};
    check_lines("mxfp8, transformed", transformed, COUNT(transformed));
    s.recipe.transform[GEMM_WGRAD] = TRANSFORM_NONE;

    // Native: codes everywhere, and nothing is decoded.
    device.native_mx = true;
    roofline_step(&device, &s.run);
    // Swizzled scales of (64, cols): tiles of 128 rows, or columns, by 4 blocks, 512 bytes each.
    const double rows_64 = 512, cols_64 = 512, rows_256 = 2 * 512, cols_256 = 2 * 512;
    const Expected native[] = {
        {"quantize layernorm", 4, 4 * (2 * E + 512 + 512), 4 * (2 * E + rows_64 + cols_64)},
        {"quantize activation", 4, 4 * 8 * E, 2 * (8 * E + rows_256 + cols_256)},
        {"quantize activation_backward", 2, 2 * (16 * E + 1024), 2 * (8 * E + rows_256 + cols_256 + 1024)},
    };
    check_lines("mxfp8 native", native, COUNT(native));

    // One scale per tensor, in codes that FP8 GEMMs take, X and dY read twice; delayed, once.
    // `quantize` makes weights' copies too, of 24 E from FP32.
    const char *const RECIPES[] = {"fp8-delayed", "fp8-current"};
    for (int passes = 1; passes <= 2; passes++) {
        set_up(&s, SMALL, RECIPES[passes - 1], 1, 2, 32);
        roofline_step(&device, &s.run);
        const Expected one_scale[] = {
            {"quantize layernorm", 4, 4 * passes * (2 * E + 512 + 512), 4 * 2 * E},
            {"quantize", 16, 2 * (passes * 2 * (1 + 5) * E + 5 * 256) + passes * 4 * 24 * E,
             2 * (2 * E + 2 * 5 * E + 5 * 256) + 24 * E},
            {"quantize activation", 4, 4 * passes * 8 * E, 2 * 8 * E},
            {"quantize activation_backward", 2, 2 * (passes * 16 * E + 1024), 2 * (8 * E + 1024)},
        };
        check_lines(RECIPES[passes - 1], one_scale, COUNT(one_scale));
    }
}

// Bytes of an NVFP4 operand that a GEMM reads: half a byte for each code, and a scale for each 16,
// in tiles of 128 rows by 4 blocks.
static double packed(int64_t outer, int64_t K) {
    return (double)(outer * K / 2 + (outer + 127) / 128 * ((K + 63) / 64) * 512);
}

// Native NVFP4: codes and scales are read once, as the profile counts them, to be packed; packed
// ones are written, and read by every GEMM in place of BF16 ones.
static void test_packed_operands(void **state) {
    (void)state;
    static const int64_t LAYER[][2] = {{192, 64}, {64, 64}, {256, 64}, {64, 256}}; // N, K
    static const char *const OPERATIONS[] = {"zero",
                                             "embedding_forward",
                                             "layernorm_forward",
                                             "quantize layernorm",
                                             "quantize",
                                             "quantize activation",
                                             "quantize activation_backward",
                                             "gemm fprop",
                                             "gemm dgrad",
                                             "gemm wgrad",
                                             "attention_forward",
                                             "attention_backward",
                                             "classifier",
                                             "layernorm_backward",
                                             "embedding_backward",
                                             "sum",
                                             "sum_of_squares",
                                             "quantize adamw",
                                             "adamw"};
    Setup s;
    RooflineDevice device = device_of(1e300, 1, true);
    set_up(&s, SMALL, "bf16", 1, 2, 32);
    RooflineStep bf16 = roofline_step(&device, &s.run);
    set_up(&s, SMALL, "nvfp4", 1, 2, 32);
    RooflineStep nvfp4 = roofline_step(&device, &s.run);
    double values = 0, packed_bytes = 0, profiled = 0;
    for (int i = 0; i < COUNT(LAYER); i++) {
        int64_t N = LAYER[i][0], K = LAYER[i][1], n = 64;
        values += 2 * 2 * (double)(n * K + N * K + n * N);
        packed_bytes += packed(n, K) + packed(N, K) + packed(n, N) + packed(K, N) + packed(N, n) + packed(K, n);
    }
    check("bytes of GEMMs, less than BF16's", bf16.gemm - nvfp4.gemm, 2 * (values - packed_bytes));
    for (int i = 0; i < COUNT(OPERATIONS); i++) {
        ProfileCell cell = profile_line(OPERATIONS[i]);
        profiled += cell.read + cell.written;
    }
    check("bytes of a step", nvfp4.step, profiled + 2 * 2 * packed_bytes);
}

// A vocabulary of 96 is padded to 128 in GEMMs, and there alone.
static void test_padded_vocabulary(void **state) {
    (void)state;
    Setup s;
    GPTConfig config = SMALL;
    config.vocab_size = 96;
    set_up(&s, config, "bf16", 1, 2, 32);
    RooflineDevice device = device_of(1e300, 1, false);
    roofline_step(&device, &s.run);
    const double nv = 96 * 64;
    const Expected lines[] = {
        {"classifier", 1, 4 * nv + 256, 2 * nv + 256},
        {"gemm fprop", 9, 2 * (2 * 7 * E + 2 * 12 * E + 9 * 256) + 2 * E + 2 * VC, 2 * 2 * 9 * E + 4 * VC},
        {"gemm dgrad", 9, 2 * (2 * 9 * E + 2 * 12 * E) + 2 * VC + 2 * VC, 2 * 2 * 7 * E + 2 * E},
        {"gemm wgrad", 9, 2 * 2 * 16 * E + 2 * VC + 2 * E, 2 * 4 * 12 * E + 4 * VC},
        {"adamw", 11, 16 * (ALL - 2048), 12 * (ALL - 2048) + 2 * (MATRICES - 2048)},
    };
    check_lines("vocabulary of 96", lines, COUNT(lines));
}

// Micro-batches between the first and the last stand for each other.
static void test_micro_batches(void **state) {
    (void)state;
    Setup s;
    set_up(&s, SMALL, "mxfp8", 1, 2, 32);
    RooflineDevice device = device_of(1e300, 1, false);
    RooflineStep step = roofline_step(&device, &s.run);
    ProfileCell one = profile_line("gemm dgrad");
    s.run.accumulation = 5;
    RooflineStep steps = roofline_step(&device, &s.run);
    ProfileCell five = profile_line("gemm dgrad");
    assert_int_equal(five.calls, 5 * one.calls);
    check("bytes of five micro-batches", five.read, 5 * one.read);
    // The first one's gradients are written, those of the others read besides.
    check("seconds of their GEMMs", steps.gemm, 5 * step.gemm + 4 * 4 * MULTIPLIED);
}

// A Llama of the same sizes, one head of keys and values, an MLP of 96: a layer's weights are qkv
// 128 x 64, projection 64 x 64, gate and up 192 x 64, down 64 x 96: 30720; with 128 x 64 embedded
// and in the head 77824, vectors 2 * 2 * 64 + 64.
static void test_other_models(void **state) {
    (void)state;
    GPTConfig llama = SMALL;
    llama.kv_heads = 1;
    llama.ffn = 96;
    llama.activation = ACTIVATION_SWIGLU;
    llama.norm = NORM_RMSNORM;
    llama.no_biases = llama.untied_head = true;
    llama.positions = POSITIONS_ROPE;
    Setup s;
    set_up(&s, llama, "bf16", 1, 2, 32);
    RooflineDevice device = device_of(1e12, 1e300, false);
    RooflineStep step = roofline_step(&device, &s.run);
    check("GEMMs, llama", step.gemm, 384 * (2 * 30720 + 8192) * 1e-12);
    check("attention, llama", step.attention, 7 * 524288e-12);
    device = device_of(1e300, 1, false);
    step = roofline_step(&device, &s.run);
    // In n = 64 tokens: rotary positions turn queries and keys, 96 wide, by a table of 32 x 32
    // floats; SwiGLU reads 192 and writes 96, backward reads 96 + 192 and writes 192.
    const Expected bf16[] = {
        {"layernorm_forward", 5, 9 * 2 * E + 5 * 256, 9 * 2 * E + 5 * 256}, // gains alone, no means
        {"rope", 4, 4 * (64 * 96 * 2 + 4096), 4 * 64 * 96 * 2},
        {"attention_forward", 2, 2 * 64 * 128 * 2, 2 * (2 * E + 512)},
        {"activation_forward", 2, 2 * 64 * 192 * 2, 2 * 64 * 96 * 2},
        {"activation_backward", 2, 2 * 64 * (96 + 192) * 2, 2 * 64 * 192 * 2},
        {"layernorm_backward", 5, 5 * (6 * E + 256 + 256 + 256), 5 * (2 * E + 256)},
        {"embedding_backward", 1, 256 + 2 * E + 4 * E, 4 * E},
    };
    check_lines("llama, bf16", bf16, COUNT(bf16));
    // Zeros are of the embedding and of vectors.
    check("bytes of the update, llama", step.update, 38 * 77824 + 36 * 320 - 4 * (77824 - VC) + 256);
    // The first of four has 32 rows of qkv, projection, down, embedding and head; of gate and up
    // 64. Zeros are of the embedding and of vectors.
    set_up(&s, llama, "mxfp8", 4, 2, 32);
    device.native_mx = true;
    double layers = 2 * (32 * 64 + 32 * 64 + 64 * 64 + 32 * 96), embeddings = 2 * 32 * 64;
    check("bytes of the update of one of four, llama", roofline_step(&device, &s.run).update,
          4 * (VC + 320) + 32 * (layers + embeddings + 320) + 66.0 / 32 * layers + 2 * embeddings + 256);
}

static void test_ranks(void **state) {
    (void)state;
    Setup s;
    set_up(&s, SMALL, "mxfp8", 4, 2, 32);
    // 108544 elements of matrices, 1792 of vectors; matrices of blocks 98304, embeddings 10240.
    WireBytes wire = wire_bytes(&s);
    check("gradients on the wire", wire.gradients, 0.75 * (4 * 108544 + 8 * 1792));
    check("weights on the wire, mx", wire.weights[GATHER_MX], 0.75 * (98304 * 66.0 / 32 + 2 * 10240));
    check("weights on the wire, bf16", wire.weights[GATHER_BF16], 0.75 * 2 * 108544);
    check("weights on the wire, fp32", wire.weights[GATHER_FP32], 0.75 * 4 * 108544);
    s.recipe.square_weights = true;
    check("weights on the wire, mx 2d", wire_bytes(&s).weights[GATHER_MX],
          0.75 * (98304 * (1 + 1.0 / 1024) + 2 * 10240));
    // 8 matrices: codes, and of blocks FP32 or E4M3 scales. Amaxes go as doubles.
    s.recipe = recipe_of("fp8-current");
    check("weights on the wire, fp8-current", wire_bytes(&s).weights[GATHER_MX],
          0.75 * (98304 + 2 * 10240) + 3 * 8 * 8);
    s.recipe = recipe_of("nvfp4");
    check("weights on the wire, nvfp4", wire_bytes(&s).weights[GATHER_MX],
          0.75 * (98304 * (1 + 1.0 / 256) + 2 * 10240) + 3 * 8 * 8);
    assert_int_equal(wire_bytes(&s).amax_exchanges, 1);
    s.recipe.square_weights = false;
    assert_int_equal(wire_bytes(&s).amax_exchanges, 1);
    s.recipe.from_forward = true; // columnwise copies are made of the rowwise ones' values
    assert_int_equal(wire_bytes(&s).amax_exchanges, 2);
    s.recipe.from_forward = false;
    check("weights on the wire, nvfp4 1d", wire_bytes(&s).weights[GATHER_MX],
          0.75 * (98304 * (2 + 2.0 / 16) + 2 * 10240) + 3 * 8 * 8);
    s.recipe = recipe_of("fp8-blockwise");
    s.sharding.unit = recipe_shard_unit(&s.recipe);
    // Of 192, 64, 256 and 64 rows, and 64, 64, 64 and 256 columns: 2, 1, 2 and 2 blocks.
    check("weights on the wire, fp8-blockwise", wire_bytes(&s).weights[GATHER_MX],
          0.75 * (98304 + 2 * 10240 + 4.0 * 2 * (2 + 1 + 2 + 2)));
    assert_int_equal(wire_bytes(&s).amax_exchanges, 0);
    s.recipe = recipe_of("mxfp8");
    s.sharding.unit = 0;

    // The first rank has 64, 32, 64, 32 rows of a layer's matrices, and 32 of each embedding:
    // 40960, and all vectors.
    RooflineDevice device = device_of(1e300, 1, true);
    check("bytes of the update of one of four", roofline_step(&device, &s.run).update,
          4 * (ALL - MULTIPLIED) + 32 * (40960 + VECTORS) + 66.0 / 32 * 36864 + 2 * 4096 + 256);

    // Of the same rows amaxes, then codes, each a pass over the masters.
    s.recipe = recipe_of("fp8-current");
    check("bytes of the update of one of four, fp8-current", roofline_step(&device, &s.run).update,
          4 * (ALL - MULTIPLIED) + 32 * (40960 + VECTORS) + (4 + 5) * 36864 + 8 * 4 + 2 * 4096 + 256);
    s.recipe = recipe_of("mxfp8");

    s.run.wire = (WireBytes){.gradients = 3e9, .weights = {1e9, 2e9, 4e9}};
    device = device_of(1e300, 1e300, true);
    device.collective_latency = 1e-3;
    RooflineStep step = roofline_step(&device, &s.run);
    // One all-reduce and 10 reduce-scatters; 2 gathers of embeddings, and of each of 8 matrices
    // codes and scales twice.
    check("gradients' seconds", step.gradients, 3 + 2e-3 * 11);
    check("weights' seconds", step.weights, 1 + 2e-3 * 34);
    check("nothing to hide behind", step.exposed, step.gradients + step.weights);
    s.sharding.gather = GATHER_BF16;
    check("weights' seconds, bf16", roofline_step(&device, &s.run).weights, 2 + 2e-3 * 10);
    s.sharding.gather = GATHER_MX;
    s.recipe.square_weights = true;
    check("weights' seconds, 2d", roofline_step(&device, &s.run).weights, 1 + 2e-3 * 18);
    // Of a tensor with one scale codes alone, once; of NVFP4 codes and scales; and an exchange of
    // amaxes.
    s.recipe = recipe_of("fp8-current");
    s.run.wire.amax_exchanges = 1;
    check("weights' seconds, fp8-current", roofline_step(&device, &s.run).weights, 1 + 2e-3 * (2 + 8 + 1));
    s.recipe = recipe_of("mxfp8-nvfp4");
    check("weights' seconds, mxfp8-nvfp4", roofline_step(&device, &s.run).weights, 1 + 2e-3 * (2 + 4 * 8 + 1));
    s.recipe = recipe_of("mxfp8");
    s.run.wire.amax_exchanges = 0;
    s.recipe.square_weights = true;
    s.sharding.zero = 0;
    check("gradients' seconds, zero 0", roofline_step(&device, &s.run).gradients, 3 + 2e-3);
    assert_true(roofline_step(&device, &s.run).weights == 0);

    // With much to compute all but the embeddings (10240 elements) and one block (49152) is hidden.
    s.sharding.zero = 1;
    device = device_of(1, 1e300, true);
    step = roofline_step(&device, &s.run);
    check("hidden behind compute", step.exposed, 29.0 / 53 * 4);
    assert_true(step.overlapped_step < step.step);

    // Muon waits for what it gathers, a matrix of eight at a time, whatever there is to compute.
    device.collective_latency = 1e-3;
    s.run.wire.muon = 2.5e8;
    s.sharding.muon = true;
    step = roofline_step(&device, &s.run);
    check("weights' seconds, muon", step.weights, 0.75 + 2e-3 * 18);
    check("muon's seconds", step.muon, 0.25 + 2e-3 * 8);
    check("hidden but for muon's", step.exposed, 29.0 / 53 * (step.gradients + step.weights) + step.muon);
    device = device_of(1e300, 1e300, true);
    step = roofline_step(&device, &s.run);
    check("nothing to compute", step.step, step.gradients + step.weights + step.muon);
}

// More of anything is never slower, and a plan with overlap lies between compute alone and no
// overlap.
static void test_monotonicity(void **state) {
    (void)state;
    static const char *const NAMES[] = {"h100", "h200", "b200", "gb200"};
    double before = INFINITY;
    for (int i = 0; i < 4; i++) {
        const RooflineDevice *card = roofline_device(NAMES[i]);
        assert_non_null(card);
        Setup s;
        set_up(&s, LARGE, "mxfp8", 64, 1, 4096);
        s.run.wire = wire_bytes(&s);
        double slower = INFINITY;
        for (double bandwidth = 1e9; bandwidth <= 1e12; bandwidth *= 10) {
            s.run.link_bandwidth = bandwidth;
            RooflineStep step = roofline_step(card, &s.run);
            double compute = step.gemm + step.attention + step.memory + step.update;
            assert_true(step.step < slower && step.overlapped_step <= step.step && step.overlapped_step > compute);
            assert_true(step.utilization > 0 && step.utilization < 2);
            slower = step.step;
        }
        assert_true(slower <= before);
        before = slower;
        double tokens_before = 0, sent_before = 0;
        for (int ranks = 2; ranks <= 65536; ranks *= 2) {
            s.comm.size = ranks;
            s.run.wire = wire_bytes(&s);
            RooflineStep step = roofline_step(card, &s.run);
            double sent = s.run.wire.gradients + s.run.wire.weights[GATHER_MX];
            assert_true(step.tokens / step.step > tokens_before && sent > sent_before);
            tokens_before = step.tokens / step.step;
            sent_before = sent;
        }
    }
    assert_null(roofline_device("cpu"));
    assert_null(roofline_device("H100"));
}

static double total(const size_t by_kind[NUM_MEMORY_KINDS]) {
    double sum = 0;
    for (int kind = 0; kind < NUM_MEMORY_KINDS; kind++) {
        sum += (double)by_kind[kind];
    }
    return sum;
}

// 8B on 3072 cards, at once; what any device holds is the same, and the rest is what the card's
// forms take.
static void test_memory(void **state) {
    (void)state;
    size_t card[NUM_MEMORY_KINDS], cpu[NUM_MEMORY_KINDS];
    Setup s;
    set_up(&s, LARGE, "mxfp8", 3072, 1, 8192);
    s.run.link_bandwidth = 50e9;
    double start = seconds_now();
    const Backend *backend = roofline_backend(roofline_device("b200"));
    gpt_memory(card, LARGE, &s.recipe, backend, 1, 8192, true, &s.sharding);
    s.run.wire = wire_bytes(&s);
    RooflineStep step = roofline_step(roofline_device("b200"), &s.run);
    double seconds = seconds_now() - start;
    printf("8B on 3072 b200: planned in %.3f s, limit 2 s; %.1f GB of %.1f, %.3f s a step\n", seconds,
           total(card) / 1e9, backend->available_memory() / 1e9, step.step);
    assert_true(seconds < 2 && total(card) < backend->available_memory() && isfinite(step.step));
    gpt_memory(card, LARGE, &s.recipe, backend, 64, 8192, true, &s.sharding);
    assert_true(total(card) > backend->available_memory());

    for (int native = 0; native < 2; native++) {
        set_up(&s, LARGE, "mxfp8", 1, 1, 4096);
        backend = roofline_backend(roofline_device(native ? "b200" : "h200"));
        gpt_memory(card, LARGE, &s.recipe, backend, 1, 4096, true, NULL);
        gpt_memory(cpu, LARGE, &s.recipe, backend_cpu(), 1, 4096, true, NULL);
        const MemoryKind same[] = {MEMORY_MASTERS, MEMORY_GRADIENTS, MEMORY_MOMENTS,
                                   MEMORY_WEIGHTS, MEMORY_QUANTIZED, MEMORY_KEPT};
        // Swizzled scales are padded to 128 x 4, which these sizes already are.
        for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++) {
            assert_int_equal(card[same[i]], cpu[same[i]]);
        }
    }

    // 65 rows take 128 of swizzled scales.
    GPTConfig odd = {.layers = 1, .heads = 1, .channels = 65, .max_seq_len = 32, .vocab_size = 96};
    set_up(&s, odd, "mxfp8", 1, 1, 32);
    gpt_memory(card, odd, &s.recipe, roofline_backend(roofline_device("b200")), 1, 32, true, NULL);
    gpt_memory(cpu, odd, &s.recipe, roofline_backend(roofline_device("h100")), 1, 32, true, NULL);
    assert_true(card[MEMORY_QUANTIZED] > cpu[MEMORY_QUANTIZED]);
}

// What a card's operations take is asked of the CUDA backend's own arithmetic; here it is worked
// out by hand.
static void test_workspaces(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int capability;
    } CARDS[] = {{"h100", 90}, {"h200", 90}, {"b200", 100}, {"gb200", 100}};
    for (int i = 0; i < 4; i++) {
        const char *why;
        const RooflineDevice *card = roofline_device(CARDS[i].name);
        assert_int_equal(card->native_mx, cuda_gemm_has_native(CARDS[i].capability, 130100, SCALING_MX, &why));
        const Backend *backend = roofline_backend(card);
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
            QuantizedForm once = backend->quantized_form(SCALING_MX, axis, true),
                          kept = backend->quantized_form(SCALING_MX, axis, false);
            assert_int_equal(once, card->native_mx ? FORM_SWIZZLED : FORM_DECODED);
            assert_int_equal(kept, card->native_mx ? FORM_SWIZZLED : FORM_PLAIN);
            bool is_transposed = !card->native_mx && axis == AXIS_COLUMNWISE;
            assert_int_equal(backend->quantized_form(SCALING_TENSOR, axis, true),
                             is_transposed ? FORM_TRANSPOSED : FORM_PLAIN);
        }
    }
    const Backend *h100 = roofline_backend(roofline_device("h100"));

    // Decoded rows are multiplied where they lie if they are multiples of 16 bytes, which 100
    // values aren't. The bias is that of 104 outputs at most, in steps of 256 bytes.
    for (int64_t K = 100; K <= 104; K += 4) {
        Operand x = operand_quantized(quantized_make(NULL, FORMAT_E4M3, AXIS_ROWWISE, 64, K, FORM_DECODED));
        size_t copies = K == 100 ? 2 * 64 * 104 * 2 : 0;
        assert_int_equal(h100->gemm_workspace(x, x), (32 << 20) + copies + 256);
    }
    // Layernorm: two means for each row, 1024 parts of two gradients, and the first stage of
    // summing these, by 256.
    assert_int_equal(h100->reduction_workspace(32768, 768), 4 * (2 * 32768 + 2 * 1024 * 768 + 4 * 2 * 768));
    // Attention: its output, two values for each row, and dS of as many sequences as divide the
    // batch and fit into 512 MB, or else of one head of keys with its queries.
    AttentionShape batch = {.B = 128, .T = 1024, .NH = 12, .NKV = 12, .HS = 64, .causal = true};
    size_t rows = 128 * 12 * 1024, dscores = (size_t)16 * 12 * 1024 * 1024 * 2;
    assert_int_equal(h100->attention_workspace(FORMAT_BF16, batch), rows * (64 * 2 + 8) + dscores);
    AttentionShape longer = {.B = 2, .T = 16384, .NH = 4, .NKV = 2, .HS = 64, .causal = true};
    rows = 2 * 4 * 16384, dscores = (size_t)2 * 16384 * 16384 * 2;
    assert_int_equal(h100->attention_workspace(FORMAT_BF16, longer), rows * (64 * 2 + 8) + dscores);
    // dS of one head of keys with 32 of queries would take 17 GB: our own kernels, and a sum a row.
    AttentionShape one_for_all = {.B = 2, .T = 16384, .NH = 32, .NKV = 1, .HS = 64, .causal = true};
    assert_int_equal(h100->attention_workspace(FORMAT_BF16, one_for_all), 2 * 32 * 16384 * sizeof(float));
}

// This machine as a device: whatever its speed, a plan of it is finite.
static void test_this_machine(void **state) {
    (void)state;
    Setup s;
    set_up(&s, SMALL, "mxfp8", 2, 2, 32);
    s.comm.name = "mpi";
    s.run.wire = wire_bytes(&s);
    RooflineDevice device = roofline_measure(backend_cpu(), 1e11);
    RooflineStep step = roofline_step(&device, &s.run);
    printf("this machine's memory: %.3g bytes/s\n", device.memory_bandwidth);
    assert_true(device.memory_bandwidth > 1e6 && isfinite(step.step) && step.step > 0);
    // Of 108544 elements the first of two has 64 of 128 rows of one embedding, all 32 of the other,
    // half of the rest.
    check("gradients that MPI sends", s.run.wire.gradients, 4 * (108544 - 49152 - 96 * 64) + 4 * 1792);
}

// A device whose calls return at once: only synchronizing waits for what they do.
static int enqueued;

static void enqueue(float *sum, const float *values, int64_t count) {
    (void)sum, (void)values, (void)count;
    enqueued++;
}

static void wait_for_all(void) {
    const struct timespec EACH = {.tv_nsec = 5000000};
    for (; enqueued > 0; enqueued--) {
        nanosleep(&EACH, NULL);
    }
}

static void test_asynchronous_device(void **state) {
    (void)state;
    Backend asynchronous = *backend_cpu();
    asynchronous.accumulate = enqueue;
    asynchronous.synchronize = wait_for_all;
    RooflineDevice device = roofline_measure(&asynchronous, 1e11);
    assert_int_equal(enqueued, 0);
    assert_true(device.memory_bandwidth > 0 && device.memory_bandwidth <= 3 * 4 * (double)(16 << 20) / 0.005);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_models),        cmocka_unit_test(test_operations),
        cmocka_unit_test(test_blocks_of_128),       cmocka_unit_test(test_packed_operands),
        cmocka_unit_test(test_each_operation),      cmocka_unit_test(test_padded_vocabulary),
        cmocka_unit_test(test_micro_batches),       cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_monotonicity),        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_workspaces),          cmocka_unit_test(test_this_machine),
        cmocka_unit_test(test_asynchronous_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
