/*
The roofline against numbers worked out by hand, for a model that is small enough to count: 2 layers
of 64 channels, 96 tokens in the vocabulary, 32 positions, 2 sequences of 32. n C and C C are then
both 4096, n V and V C both 6144.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "llmc/cuda/gemm_path.h"
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

static const GPTConfig SMALL = {.layers = 2, .heads = 2, .channels = 64, .max_seq_len = 32, .vocab_size = 96};
// 7.8 billion parameters, like the 8B that Mishra et al. train on 15 trillion tokens.
static const GPTConfig LARGE = {.layers = 36, .heads = 32, .channels = 4096, .max_seq_len = 8192, .vocab_size = 128000};

static void set_up(Setup *s, GPTConfig config, const char *recipe, int ranks, int64_t B, int64_t T) {
    Error error;
    memset(s, 0, sizeof(*s));
    s->comm = (Comm){.name = "nccl", .size = ranks};
    assert_true(recipe_named(&s->recipe, recipe, &error));
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
                            .attention_efficiency = 0.5,
                            .memory_efficiency = 1,
                            .attention_products = 9,
                            .head_scratch_bytes = 48 << 20};
}

static void test_operations(void **state) {
    (void)state;
    Setup s;
    set_up(&s, SMALL, "bf16", 1, 2, 32);
    RooflineDevice device = device_of(1e12, 1e300, false);
    RooflineStep step = roofline_step(&device, &s.run);
    // 6 n (12 L C C + V C) = 384 * (98304 + 6144); 9 products of n T C L at half the peak.
    check("GEMMs, bf16", step.gemm, 40108032e-12);
    check("attention", step.attention, 2 * 2359296e-12);
    check("tokens", step.tokens, 64);
    // The model's operations: these of GEMMs, and 6 n T C L of attention.
    double flops = 40108032 + 6 * 64 * 32 * 64 * 2;
    check("utilization", step.utilization, flops / 1e12 / step.step);

    s.run.accumulation = 3;
    check("three micro-batches", roofline_step(&device, &s.run).gemm, 3 * 40108032e-12);

    set_up(&s, SMALL, "mxfp8", 1, 2, 32);
    check("GEMMs, mxfp8 emulated", roofline_step(&device, &s.run).gemm, 40108032e-12);
    device.native_mx = true;
    check("GEMMs, mxfp8 native", roofline_step(&device, &s.run).gemm, (384 * 98304 / 2 + 384 * 6144) * 1e-12);
    set_up(&s, SMALL, "mxfp4", 1, 2, 32);
    check("GEMMs, mxfp4 on a card with FP8", roofline_step(&device, &s.run).gemm, 40108032e-12);
    set_up(&s, SMALL, "mxfp8-forward-only", 1, 2, 32);
    check("GEMMs, mxfp8 forward only", roofline_step(&device, &s.run).gemm,
          (128 * 98304 / 2 + 256 * 98304 + 384 * 6144) * 1e-12);
}

static void test_bytes(void **state) {
    (void)state;
    Setup s;
    set_up(&s, SMALL, "bf16", 1, 2, 32);
    RooflineDevice device = device_of(1e300, 1, false);
    RooflineStep step = roofline_step(&device, &s.run);
    // GEMMs: of a layer 6 (n K + n N) + 12 N K over four layers, 96 n C + 144 C C; of the head 6 n
    // C + 8 n V + 12 V C.
    check("bytes of GEMMs", step.gemm, 2 * 240 * 4096 + 6 * 4096 + 20 * 6144);
    // A layer: norms' outputs 4, GELU 16, norms 12; backward biases 18, GELU 24, norms 16. Beside:
    // embedding 24, last norm and zeros 10, the classifier 6 n V.
    check("memory-bound bytes, bf16", step.memory, 90 * 2 * 4096 + 34 * 4096 + 6 * 6144);
    // 108288 parameters: zeros 4; gradient's norm 4, AdamW 28, BF16 copy 2.
    check("bytes of the update", step.update, 38 * 108288);

    // A code takes c = 33/32. Forward 26 + 10 c: inputs read 14, codes, norms 12. Backward 76 + 22
    // c: gradients read 34, biases 18, GELU again 8, norms 16, codes.
    set_up(&s, SMALL, "mxfp8", 1, 2, 32);
    device.native_mx = true;
    check("memory-bound bytes, mxfp8 native", roofline_step(&device, &s.run).memory,
          135 * 2 * 4096 + 34 * 4096 + 6 * 6144);
    // Forward 40 + 3 c, backward 120; decoding 6 + 3 c of inputs, 24 (2 + c) of weights.
    device.native_mx = false;
    check("memory-bound bytes, mxfp8 emulated", roofline_step(&device, &s.run).memory,
          (214 + 30 * 33.0 / 32) * 2 * 4096 + 34 * 4096 + 6 * 6144);
}

/*
A Llama of the same sizes, one head of keys and values, an MLP of 96: a layer's weights are qkv 128
x 64, projection 64 x 64, gate and up 192 x 64, down 64 x 96: 30720; with 96 x 64 embedded and in
the head 73728, vectors 2 * 2 * 64 + 64.
*/
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
    check("GEMMs, llama", step.gemm, 384 * (2 * 30720 + 6144) * 1e-12);
    check("attention, llama", step.attention, 2 * 2359296e-12);
    device = device_of(1e300, 1, false);
    step = roofline_step(&device, &s.run);
    // In n = 64 tokens: a layer's norms' outputs 4 C, norms 12 C, rotary positions 4 * 96; SwiGLU 6
    // * 96; backward norms 16 C, positions 4 * 96, SwiGLU 5 * 192. Beside: embedding 6 + 16, last
    // norm and zeros 10, classifier 6 n V.
    check("memory-bound bytes, llama", step.memory,
          2 * 64 * (32 * 64 + 8 * 96 + 6 * 96 + 5 * 192) + 32 * 4096 + 6 * 6144);
    check("bytes of the update, llama", step.update, 38 * (73728 + 320));
    // mxfp8: forward, inputs read 4 C of norms, 2 C of attention, 4 * 96 of gate and up; norms 12
    // C, positions; codes of 3 C + 96 inputs, twice but for the last. Backward: gradients read 2
    // (128 + 64 + 192 + 64) and SwiGLU's as above; SwiGLU again 4 * 96; norms 16 C, positions;
    // codes of 448 gradients, twice, and of 96 inputs.
    set_up(&s, llama, "mxfp8", 1, 2, 32);
    device.native_mx = true;
    double read = 6 * 64 + 4 * 96 + 12 * 64 + 4 * 96 + 2 * 448 + 5 * 192 + 4 * 96 + 16 * 64 + 4 * 96;
    double codes = 2 * 3 * 64 + 96 + 2 * 448 + 96;
    check("memory-bound bytes, llama, mxfp8 native", roofline_step(&device, &s.run).memory,
          2 * 64 * (read + codes * 33 / 32) + 32 * 4096 + 6 * 6144);
    // The first of four has 32 rows of qkv, projection, down, embedding and head; of gate and up
    // 64.
    set_up(&s, llama, "mxfp8", 4, 2, 32);
    double own = 2 * (32 * 64 + 32 * 64 + 64 * 64 + 32 * 96) + 2 * 32 * 64 + 320;
    check("bytes of the update of one of four, llama", roofline_step(&device, &s.run).update,
          2 * 4 * (73728 + 320) + (32 + 66.0 / 32) * own);
}

static void test_ranks(void **state) {
    (void)state;
    Setup s;
    set_up(&s, SMALL, "mxfp8", 4, 2, 32);
    // 106496 elements of matrices, 1792 of vectors; matrices of blocks 98304, embeddings 8192.
    WireBytes wire = wire_bytes(&s);
    check("gradients on the wire", wire.gradients, 0.75 * (4 * 106496 + 8 * 1792));
    check("weights on the wire, mx", wire.weights[GATHER_MX], 0.75 * (98304 * 66.0 / 32 + 2 * 8192));
    check("weights on the wire, bf16", wire.weights[GATHER_BF16], 0.75 * 2 * 106496);
    check("weights on the wire, fp32", wire.weights[GATHER_FP32], 0.75 * 4 * 106496);
    s.recipe.square_weights = true;
    check("weights on the wire, mx 2d", wire_bytes(&s).weights[GATHER_MX],
          0.75 * (98304 * (1 + 1.0 / 1024) + 2 * 8192));
    s.recipe.square_weights = false;

    // The first rank has 64, 32, 64, 32 rows of a layer's matrices, and 32 of each embedding:
    // 40960, and all vectors.
    RooflineDevice device = device_of(1e300, 1, true);
    check("bytes of the update of one of four", roofline_step(&device, &s.run).update,
          2 * 4 * 108288 + (32 + 66.0 / 32) * 42752);

    s.run.wire = (WireBytes){3e9, {1e9, 2e9, 4e9}};
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
    s.sharding.zero = 0;
    check("gradients' seconds, zero 0", roofline_step(&device, &s.run).gradients, 3 + 2e-3);
    assert_true(roofline_step(&device, &s.run).weights == 0);

    // With much to compute all but the embeddings (8192 elements) and one block (49152) is hidden.
    s.sharding.zero = 1;
    device = device_of(1, 1e300, true);
    step = roofline_step(&device, &s.run);
    check("hidden behind compute", step.exposed, 7.0 / 13 * 4);
    assert_true(step.overlapped_step < step.step);
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
        assert_int_equal(card->native_mx, cuda_gemm_has_native(CARDS[i].capability, 130100, &why));
        const Backend *backend = roofline_backend(card);
        assert_int_equal(backend->quantized_form(true), card->native_mx ? FORM_SWIZZLED : FORM_DECODED);
        assert_int_equal(backend->quantized_form(false), card->native_mx ? FORM_SWIZZLED : FORM_PLAIN);
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
    // Of 106496 elements the first of two has 64 of 96 rows of one embedding, all 32 of the other,
    // half of the rest.
    check("gradients that MPI sends", s.run.wire.gradients, 4 * (106496 - 49152 - 96 * 64) + 4 * 1792);
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
        cmocka_unit_test(test_other_models),
        cmocka_unit_test(test_operations),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_monotonicity),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_workspaces),
        cmocka_unit_test(test_this_machine),
        cmocka_unit_test(test_asynchronous_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
