#include "roofline.h"
#include "llmc/cuda/gemm_path.h" // what is multiplied natively, and in which forms
#include "llmc/cuda/sizes.h"     // workspaces
#include "llmc/base/util.h"      // seconds_now

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Devices

// Data sheets: NVIDIA H100 Tensor Core GPU (SXM), NVIDIA H200 Tensor Core GPU (SXM), NVIDIA DGX
// B200 (an eighth of it), NVIDIA GB200 NVL72 (a 72nd of it). They give FP8 and BF16 with sparsity:
// half of that is dense. The fractions are assumptions: doc/planning.md says where they come from.
static const RooflineDevice CARDS[] = {
    {"h100", 989.4e12, 1978.9e12, 80e9, 3.35e12, false, 0.7, 0.45, 0.75, 9, 5e-6, CUDA_HEAD_SCRATCH_BYTES},
    {"h200", 989.4e12, 1978.9e12, 141e9, 4.8e12, false, 0.7, 0.45, 0.75, 9, 5e-6, CUDA_HEAD_SCRATCH_BYTES},
    {"b200", 2250e12, 4500e12, 180e9, 8e12, true, 0.7, 0.45, 0.75, 9, 5e-6, CUDA_HEAD_SCRATCH_BYTES},
    {"gb200", 2500e12, 5000e12, 186e9, 8e12, true, 0.7, 0.45, 0.75, 9, 5e-6, CUDA_HEAD_SCRATCH_BYTES},
};
enum { NUM_CARDS = COUNT(CARDS) };

const RooflineDevice *roofline_device(const char *name) {
    for (int i = 0; i < NUM_CARDS; i++) {
        if (strcmp(CARDS[i].name, name) == 0) return &CARDS[i];
    }
    return NULL;
}

// Makes a square matrix of values between 1 and 2: multiplying zeros takes a GPU less power, so
// that it would look faster.
static Tensor take_matrix(const Backend *backend, Format dtype, int64_t N) {
    size_t bytes = (size_t)(N * N) * dtype_size(dtype);
    uint16_t *values = allocate(bytes);
    for (size_t i = 0; i < bytes / sizeof(*values); i++) {
        values[i] = (uint16_t)(0x3F80 | (i * 2654435761u >> 20 & 0x7F));
    }
    Tensor matrix = tensor_make(backend->allocate(bytes), dtype, N, N);
    backend->copy_to_device(matrix.data, values, bytes);
    free(values);
    return matrix;
}

// Returns the seconds of the fastest of the N x N GEMMs that `duration` has room for; two at least.
static double time_gemm(const Backend *backend, Format dtype, int64_t N, double duration) {
    Tensor a = take_matrix(backend, dtype, N), b = take_matrix(backend, dtype, N), d = take_matrix(backend, dtype, N);
    size_t workspace_bytes = backend->gemm_workspace(operand_tensor(a), operand_tensor(b));
    void *workspace = backend->allocate(workspace_bytes);
    backend->use_workspace(workspace, workspace_bytes);
    double best = INFINITY, end = seconds_now() + duration;
    for (int i = 0; i < 2 || seconds_now() < end; i++) {
        double start = seconds_now();
        backend->gemm(d, operand_tensor(a), operand_tensor(b), (GemmOptions){.transpose_b = true});
        backend->synchronize();
        best = fmin(best, seconds_now() - start);
    }
    backend->release(workspace);
    backend->release(a.data);
    backend->release(b.data);
    backend->release(d.data);
    return best;
}

double roofline_measure_gemm(const Backend *backend, Format dtype) {
    int64_t N = 1024;
    while (N < 8192 && time_gemm(backend, dtype, N, 0) < 1e-3) {
        N *= 2;
    }
    return 2.0 * (double)(N * N * N) / time_gemm(backend, dtype, N, 0.5);
}

RooflineDevice roofline_measure(const Backend *backend, double gemm_flops) {
    // Two read, one written; waiting for a GPU takes as long as a tenth of such a call.
    enum { COUNT = 16 << 20, BYTES_EACH = 3 * sizeof(float), CALLS = 4 };
    float *values = backend->allocate(2 * (size_t)COUNT * sizeof(float));
    double best = INFINITY;
    for (int i = 0; i < 3; i++) {
        double start = seconds_now();
        for (int call = 0; call < CALLS; call++) {
            backend->accumulate(values, values + COUNT, COUNT);
        }
        backend->synchronize();
        best = fmin(best, (seconds_now() - start) / CALLS);
    }
    backend->release(values);
    // Fractions as dev/bench measures them: a step's GEMMs next to a large one, attention next to
    // that, the quantizer and its neighbours next to plain copies.
    return (RooflineDevice){.name = "this machine",
                            .bf16_flops = gemm_flops,
                            .fp8_flops = gemm_flops,
                            .memory_bytes = backend->available_memory(),
                            .memory_bandwidth = (double)COUNT * BYTES_EACH / best,
                            .gemm_efficiency = 0.9,
                            .attention_efficiency = 0.6,
                            .memory_efficiency = 0.5,
                            .attention_products = 7,
                            .collective_latency = 5e-6,
                            .head_scratch_bytes = backend->head_scratch_bytes};
}

// The memory of a card: the CUDA backend's own arithmetic

static const RooflineDevice *card;

static void describe(char *text, size_t bytes) {
    snprintf(text, bytes, "a planned %s: %.0f TFLOP/s in BF16, %.0f in FP8, %.3g TB/s; MXFP8 %s", card->name,
             card->bf16_flops / 1e12, card->fp8_flops / 1e12, card->memory_bandwidth / 1e12,
             card->native_mx ? "native" : "emulated in BF16");
}

static double available_memory(void) { return card->memory_bytes - CUDA_LIBRARIES_BYTES; }

static QuantizedForm quantized_form(bool for_one_gemm) { return cuda_gemm_form(card->native_mx, for_one_gemm); }

// Returns the bytes of attention, by cuDNN for BF16: the own workspace of its plans is taken to be
// the gradients of the scores.
static size_t attention_workspace(Format dtype, AttentionShape shape) {
    if (dtype != FORMAT_BF16) return cuda_attention_plain_bytes(shape);
    int64_t plan_bytes = cuda_attention_dscores_bytes(cuda_attention_backward_part(shape));
    return cuda_attention_cudnn_workspace(shape, (size_t)plan_bytes).total;
}

static void use_nothing(void *workspace, size_t bytes) { (void)workspace, (void)bytes; }

const Backend *roofline_backend(const RooflineDevice *device) {
    static const Backend table = {.name = "planned",
                                  .head_scratch_bytes = CUDA_HEAD_SCRATCH_BYTES,
                                  .describe = describe,
                                  .available_memory = available_memory,
                                  .quantized_form = quantized_form,
                                  .gemm_workspace = cuda_gemm_workspace,
                                  .attention_workspace = attention_workspace,
                                  .reduction_workspace = cuda_reduction_workspace,
                                  .use_workspace = use_nothing};
    card = device;
    return &table;
}

// Time

// What a stretch of a step takes: GEMMs and attention in seconds, the rest in the bytes it moves.
typedef struct {
    double gemm, attention; // seconds
    double bytes;
} Work;

static void add(Work *sum, Work work) {
    sum->gemm += work.gemm;
    sum->attention += work.attention;
    sum->bytes += work.bytes;
}

static double memory_seconds(const RooflineDevice *device, double bytes) {
    return bytes / (device->memory_bandwidth * device->memory_efficiency);
}

static double work_seconds(const RooflineDevice *device, Work work) {
    return work.gemm + work.attention + memory_seconds(device, work.bytes);
}

static const double BF16_BYTES = 2, CODE_BYTES = 1 + 1.0 / MX_BLOCK; // with its scale

// Returns the work of a GEMM, [M,K] by [K,N] into `out_bytes`, and of decoding `decoded` elements
// before it that were kept as MX codes.
static Work gemm(const RooflineDevice *device, Format a, Format b, double M, double N, double K, double out_bytes,
                 double decoded) {
    const char *why_not;
    bool native = device->native_mx && cuda_gemm_has_native_formats(a, b, &why_not);
    double operand_bytes = (M * K + N * K) * (native ? CODE_BYTES : BF16_BYTES);
    double flops = 2 * M * N * K / ((native ? device->fp8_flops : device->bf16_flops) * device->gemm_efficiency);
    return (Work){.gemm = fmax(flops, memory_seconds(device, operand_bytes + out_bytes)),
                  .bytes = native ? 0 : decoded * (CODE_BYTES + BF16_BYTES)};
}

// Returns the bytes that the quantizer writes of an element for one GEMM: those of its code, or of
// its value where the code would be decoded at once.
static double written_bytes(const RooflineDevice *device, Format format) {
    if (!mx_is_mx(format)) return 0;
    return device->native_mx ? CODE_BYTES : BF16_BYTES;
}

// What a linear layer's input is made by, and the gradient of its output.
typedef enum { MADE_BY_NORM, MADE_BY_ATTENTION, MADE_BY_ACTIVATION } InputMaker;

// A linear layer: `rows` by K in, N out.
typedef struct {
    const Recipe *recipe;
    double rows, N, K;
    InputMaker input;
    bool activation_follows, is_gated, has_bias; // is_gated: the activation before or behind it is SwiGLU
    double output_bytes;                         // of an element
} RooflineLinear;

static double decoded_elements(Format format, double elements) { return mx_is_mx(format) ? elements : 0; }

// Returns how many elements are read to make one of a linear layer's input.
static double elements_read(const RooflineLinear *l) { return l->input == MADE_BY_ACTIVATION && l->is_gated ? 2 : 1; }

static Work linear_forward_work(const RooflineDevice *device, const RooflineLinear *l) {
    const Format *format = l->recipe->format;
    double elements = l->rows * l->K;
    bool x_is_mx = mx_is_mx(format[FPROP_X]), kept_as_mx = mx_is_mx(format[WGRAD_X]);
    bool is_stored = l->input != MADE_BY_ATTENTION && !(x_is_mx && kept_as_mx), remade = l->input == MADE_BY_ACTIVATION;
    Work work = {0};
    double read = elements_read(l); // a norm has read its input
    if (is_stored) work.bytes += (l->input == MADE_BY_ACTIVATION ? read + 1 : 1) * BF16_BYTES * elements;
    if (x_is_mx || (kept_as_mx && !remade)) work.bytes += (is_stored ? 1 : read) * BF16_BYTES * elements;
    work.bytes += written_bytes(device, format[FPROP_X]) * elements;
    if (kept_as_mx && !remade) work.bytes += CODE_BYTES * elements;
    double x_decoded = device->native_mx ? decoded_elements(format[FPROP_X], elements) : 0;
    add(&work, gemm(device, format[FPROP_X], format[FPROP_W], l->rows, l->N, l->K, l->output_bytes * l->rows * l->N,
                    decoded_elements(format[FPROP_W], l->N * l->K) + x_decoded));
    return work;
}

static Work linear_backward_work(const RooflineDevice *device, const RooflineLinear *l) {
    const Format *format = l->recipe->format;
    double inputs = l->rows * l->K, outputs = l->rows * l->N, weights = l->N * l->K;
    bool both_mx = mx_is_mx(format[DGRAD_DY]) && mx_is_mx(format[WGRAD_DY]);
    bool any_mx = mx_is_mx(format[DGRAD_DY]) || mx_is_mx(format[WGRAD_DY]);
    bool is_made = l->activation_follows && both_mx && !l->is_gated; // by the quantizer, as it is read
    Work work = {0};
    // The activation's backward pass reads the output and the gradient of what it makes, which is
    // half as wide with SwiGLU, and writes the output's gradient.
    if (l->activation_follows) work.bytes += (l->is_gated ? 2.5 : 3) * BF16_BYTES * outputs;
    if (any_mx && !is_made) work.bytes += BF16_BYTES * outputs;
    work.bytes += (written_bytes(device, format[DGRAD_DY]) + written_bytes(device, format[WGRAD_DY])) * outputs;
    if (l->has_bias) work.bytes += BF16_BYTES * outputs; // the bias's gradient
    if (l->input == MADE_BY_ACTIVATION && mx_is_mx(format[WGRAD_X])) {
        work.bytes += (elements_read(l) * BF16_BYTES + written_bytes(device, format[WGRAD_X])) * inputs;
    }
    // Operands that were just made are codes on a native card alone.
    double made = device->native_mx ? outputs : 0;
    bool x_is_code = l->input != MADE_BY_ACTIVATION || device->native_mx;
    add(&work, gemm(device, format[DGRAD_DY], format[DGRAD_W], l->rows, l->K, l->N, BF16_BYTES * inputs,
                    decoded_elements(format[DGRAD_DY], made) + decoded_elements(format[DGRAD_W], weights)));
    add(&work,
        gemm(device, format[WGRAD_DY], format[WGRAD_X], l->N, l->K, l->rows, 2 * sizeof(float) * weights,
             decoded_elements(format[WGRAD_DY], made) + decoded_elements(format[WGRAD_X], x_is_code ? inputs : 0)));
    return work;
}

typedef struct {
    Work forward, backward; // of a micro-batch
} Passes;

// Adds the bytes of QK-norm, which reads copies of queries and keys and goes backward by way of
// scratch, and of rotary positions, which turn in place.
static void add_queries_and_keys(Passes *passes, const GPTConfig *c, double rows) {
    double bytes = BF16_BYTES * rows * (double)((c->heads + gpt_kv_heads(c)) * gpt_head_size(c));
    double forward = 0, backward = 0; // passes over them
    if (c->qk_norm) forward += 4, backward += 7;
    if (c->positions == POSITIONS_ROPE) forward += 2, backward += 2;
    passes->forward.bytes += forward * bytes;
    passes->backward.bytes += backward * bytes;
}

static void add_block(Passes *passes, const RooflineDevice *device, const RooflineRun *run, int64_t layer) {
    const GPTConfig *c = &run->config;
    Recipe recipe = recipe_for_layer(run->recipe, layer, c->layers);
    double n = (double)(run->B * run->T), C = (double)c->channels, T = (double)run->T;
    const InputMaker makers[] = {MADE_BY_NORM, MADE_BY_ATTENTION, MADE_BY_NORM, MADE_BY_ACTIVATION};
    for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
        LinearShape shape = gpt_linear_shape(c, i);
        const RooflineLinear linear = {.recipe = &recipe,
                                       .rows = n,
                                       .N = (double)shape.N,
                                       .K = (double)shape.K,
                                       .input = makers[i],
                                       .activation_follows = i == LINEAR_UP,
                                       .is_gated = c->activation == ACTIVATION_SWIGLU,
                                       .has_bias = !c->no_biases,
                                       .output_bytes = BF16_BYTES};
        add(&passes->forward, linear_forward_work(device, &linear));
        add(&passes->backward, linear_backward_work(device, &linear));
    }
    add_queries_and_keys(passes, c, n);
    // A norm reads input and residual and writes their sum; backward it reads the gradient and the
    // input, and adds to a third.
    passes->forward.bytes += 2 * 3 * BF16_BYTES * n * C;
    passes->backward.bytes += 2 * 4 * BF16_BYTES * n * C;
    // The causal half of each product is n T C operations. Two are of the forward pass.
    double product = n * T * C / (device->bf16_flops * device->attention_efficiency);
    passes->forward.attention += 2 * product;
    passes->backward.attention += (device->attention_products - 2) * product;
}

// Adds the LM head, which goes over a few hundred tokens at a time, and each time over its whole
// weight and its gradient.
static void add_head(Passes *passes, const RooflineDevice *device, const RooflineRun *run) {
    int64_t rows = run->B * run->T,
            at_a_time = gpt_head_rows(&run->config, run->recipe, device->head_scratch_bytes, rows);
    double C = (double)run->config.channels, V = (double)run->config.vocab_size, n = (double)rows;
    double chunks = ceil(n / (double)at_a_time);
    Recipe recipe = recipe_for_layer(run->recipe, run->config.layers, run->config.layers);
    RooflineLinear head = {.recipe = &recipe,
                           .rows = n / chunks,
                           .N = V,
                           .K = C,
                           .input = MADE_BY_ATTENTION,
                           .output_bytes = sizeof(float)};
    Work work = {0};
    add(&work, linear_forward_work(device, &head));
    add(&work, linear_backward_work(device, &head));
    // A training step makes the head's backward pass at once; both count as backward. The
    // classifier reads FP32 and writes BF16.
    passes->backward.gemm += chunks * work.gemm;
    passes->backward.bytes += chunks * work.bytes + 6 * n * V;
}

static int has_positions(const GPTConfig *c) { return c->positions == POSITIONS_LEARNED; }

static Passes micro_batch(const RooflineDevice *device, const RooflineRun *run) {
    Passes passes = {0};
    double n = (double)(run->B * run->T), C = (double)run->config.channels;
    for (int64_t l = 0; l < run->config.layers; l++) {
        add_block(&passes, device, run, l);
    }
    add_head(&passes, device, run);
    // The embedding reads a token's row and a position's, and writes one; backward it adds a gradient
    // of BF16 to one of FP32. The rest is the last norm, and zeros.
    passes.forward.bytes += (2 + has_positions(&run->config) + 4) * BF16_BYTES * n * C;
    passes.backward.bytes += (BF16_BYTES + 2 * sizeof(float)) * n * C + 5 * BF16_BYTES * n * C;
    return passes;
}

typedef struct {
    double matrices, vectors; // elements
    double last;              // the fraction that is exchanged last, or needed first: the embeddings and one block
} Parameters;

// Returns the elements of the embeddings, and of the LM head where it isn't one of them.
static double count_embeddings(const GPTConfig *c, double vocab, double positions) {
    return (double)c->channels * ((c->untied_head ? 2 : 1) * vocab + (has_positions(c) ? positions : 0));
}

static Parameters count_parameters(const GPTConfig *c) {
    ParamCounts counts = gpt_count_parameters(c);
    double matrices = (double)counts.matrices;
    double embeddings = count_embeddings(c, (double)c->vocab_size, (double)c->max_seq_len);
    return (Parameters){.matrices = matrices,
                        .vectors = (double)(counts.all - counts.matrices),
                        .last = (embeddings + (matrices - embeddings) / (double)c->layers) / matrices};
}

// Returns the elements that the first rank updates: the most that one does.
static double own_parameters(const RooflineRun *run) {
    const GPTConfig *c = &run->config;
    Parameters p = count_parameters(c);
    int size = run->sharding->comm->size;
    if (run->sharding->zero == 0 || size == 1) return p.matrices + p.vectors;
    double own = p.vectors;
    for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
        LinearShape shape = gpt_linear_shape(c, i);
        own += (double)c->layers * (double)comm_part(size, shape.N, MX_BLOCK) * (double)shape.K;
    }
    return own + count_embeddings(c, (double)comm_part(size, c->vocab_size, MX_BLOCK),
                                  (double)comm_part(size, c->max_seq_len, MX_BLOCK));
}

// Returns the bytes of a step's end: zeros, sums, AdamW, copies of the weights.
static double update_bytes(const RooflineRun *run) {
    Parameters p = count_parameters(&run->config);
    double all = p.matrices + p.vectors, own = own_parameters(run);
    int copies = run->sharding->gather == GATHER_MX ? 0 : 1; // made of what was gathered, by every rank
    double copy_bytes = recipe_quantizes(run->recipe) ? (run->recipe->square_weights ? 1 : 2) * CODE_BYTES : BF16_BYTES;
    double bytes = sizeof(float) * all + (sizeof(float) + 7 * sizeof(float) + copy_bytes) * own;
    bool is_sharded = run->sharding->zero > 0 && run->sharding->comm->size > 1;
    if (is_sharded) bytes += copies * (copy_bytes + (run->sharding->gather == GATHER_FP32 ? 4 : 2)) * p.matrices;
    // What others send is read once, and at stage 2 added to the sum after each micro-batch, and
    // zeroed.
    if (run->sharding->comm->size > 1) bytes += sizeof(float) * all;
    if (run->sharding->zero == 2 && is_sharded) {
        bytes += (double)run->accumulation * sizeof(float) * (p.matrices + 3 * own);
    }
    return bytes;
}

static double latency(const RooflineDevice *device, const RooflineRun *run, double collectives) {
    return collectives * device->collective_latency * ceil(log2((double)run->sharding->comm->size));
}

static void add_wire(RooflineStep *step, const RooflineDevice *device, const RooflineRun *run) {
    const Sharding *sharding = run->sharding;
    double block_matrices = (double)(LINEARS_PER_BLOCK * run->config.layers);
    double embeddings = 1 + has_positions(&run->config) + run->config.untied_head;
    double reductions = 1, gathers = 0;
    if (sharding->zero > 0) {
        reductions += embeddings + block_matrices * (sharding->zero == 2 ? (double)run->accumulation : 1);
        double of_each = !recipe_quantizes(run->recipe) || sharding->gather != GATHER_MX ? 1
                         : run->recipe->square_weights                                   ? 2
                                                                                         : 4; // codes and scales
        gathers = embeddings + of_each * block_matrices;
    }
    double weights = sharding->zero > 0 ? run->wire.weights[sharding->gather] : 0;
    step->gradients = run->wire.gradients / run->link_bandwidth + latency(device, run, reductions);
    step->weights = weights / run->link_bandwidth + latency(device, run, gathers);
}

RooflineStep roofline_step(const RooflineDevice *device, const RooflineRun *run) {
    RooflineStep step = {0};
    Passes passes = micro_batch(device, run);
    double times = (double)run->accumulation, ranks = (double)run->sharding->comm->size;
    step.gemm = times * (passes.forward.gemm + passes.backward.gemm);
    step.attention = times * (passes.forward.attention + passes.backward.attention);
    step.memory = times * memory_seconds(device, passes.forward.bytes + passes.backward.bytes);
    step.update = memory_seconds(device, update_bytes(run));
    double compute = step.gemm + step.attention + step.memory + step.update;
    if (ranks > 1) {
        add_wire(&step, device, run);
        // Gradients go while the last backward pass makes others (at stage 2 all passes), weights
        // while the first forward pass uses others; the last of the one and the first of the other
        // can't.
        double last = count_parameters(&run->config).last;
        double backward = work_seconds(device, passes.backward) * (run->sharding->zero == 2 ? times : 1);
        double forward = work_seconds(device, passes.forward);
        step.exposed =
            fmax(step.gradients - backward, last * step.gradients) + fmax(step.weights - forward, last * step.weights);
    }
    step.step = compute + step.gradients + step.weights;
    step.overlapped_step = compute + step.exposed;
    step.tokens = (double)run->B * (double)run->T * times * ranks;
    step.utilization = gpt_flops_per_token(&run->config, run->T) * step.tokens / ranks / step.step / device->bf16_flops;
    return step;
}

void roofline_print_step(const RooflineDevice *device, const RooflineStep *step, int ranks, int64_t max_tokens,
                         FILE *stream) {
    char text[2][32];
    fprintf(stream, "plan     %s: GEMMs at %.4g TFLOP/s (BF16%s), attention at %.4g, memory at %.4g GB/s\n",
            device->name, device->bf16_flops * device->gemm_efficiency / 1e12,
            device->native_mx ? "; FP8 twice that" : "", device->bf16_flops * device->attention_efficiency / 1e12,
            device->memory_bandwidth * device->memory_efficiency / 1e9);
    fprintf(stream, "  compute  %.4g s a step: GEMMs %.4g, attention %.4g, memory-bound operations %.4g, update %.4g\n",
            step->gemm + step->attention + step->memory + step->update, step->gemm, step->attention, step->memory,
            step->update);
    char overlapped[128] = "";
    if (ranks > 1) {
        fprintf(stream,
                "  wire     gradients %.4g s, weights %.4g s; %.4g s of it could not be hidden behind compute\n",
                step->gradients, step->weights, step->exposed);
        snprintf(overlapped, sizeof(overlapped), "; %.4g s where ranks exchange beside compute, as on GPUs at --zero 1",
                 step->overlapped_step);
    }
    fprintf(stream, "  step     %.4g s%s\n", step->step, overlapped);
    fprintf(stream, "  speed    %s tokens/s, %s a rank; the model's FLOP/s are %.1f %% of the %s peak\n",
            human_count(text[0], step->tokens / step->step), human_count(text[1], step->tokens / step->step / ranks),
            100 * step->utilization, roofline_device(device->name) ? "dense BF16" : "GEMM's");
    if (max_tokens == 0) return;
    double tokens = (double)max_tokens, days = ceil(tokens / step->tokens) / 86400;
    if (ranks > 1) snprintf(overlapped, sizeof(overlapped), "; %.3g with overlap", days * step->overlapped_step);
    fprintf(stream, "  time     %s tokens: %.3g days%s\n", human_count(text[0], tokens), days * step->step, overlapped);
}
