#include "roofline.h"
#include "llmc/cuda/gemm_path.h" // what is multiplied natively, and in which forms
#include "llmc/cuda/sizes.h"     // workspaces
#include "llmc/model/optimizer.h"
#include "llmc/model/profile.h"
#include "llmc/model/work.h"
#include "llmc/base/util.h" // seconds_now

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Devices

#define CARD(name, bf16, fp8, memory, bandwidth, mx, gemm, native, block128, attention, memory_bound)              \
    {name,         (bf16)*1e12, (fp8)*1e12, (memory)*1e9, (bandwidth)*1e12, mx, gemm, native, block128, attention, \
     memory_bound, 9,           5e-6,       NULL,         MX_GEMM_AUTO},
static const RooflineDevice CARDS[] = {
#include "cards.h"
};
enum { NUM_CARDS = COUNT(CARDS) };

const RooflineDevice *roofline_device(const char *name) {
    for (int i = 0; i < NUM_CARDS; i++) {
        if (strcmp(CARDS[i].name, name) == 0) return &CARDS[i];
    }
    return NULL;
}

// Makes a square matrix of values of either sign from 2^-7 to 2. Multiplying zeros takes a GPU less
// power, and so do values of one sign and magnitude (an H100 did 870 TFLOP/s on those from 1 to 2,
// and 790 on these), so that it would look faster.
static Tensor take_matrix(const Backend *backend, Format dtype, int64_t N) {
    size_t bytes = (size_t)(N * N) * dtype_size(dtype);
    uint16_t *values = allocate(bytes);
    for (size_t i = 0; i < bytes / sizeof(*values); i++) {
        uint32_t random = (uint32_t)(i * 0x9E3779B97F4A7C15u >> 32);
        values[i] = (uint16_t)((random & 0x807F) | (120 + (random >> 16 & 7)) << 7);
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

double roofline_measure_gemm(const Backend *backend, Format dtype, double flops_of_run) {
    int64_t N = 1024;
    double seconds = time_gemm(backend, dtype, N, 0);
    while (N < 8192 && seconds < 1e-3) {
        N *= 2;
        seconds = time_gemm(backend, dtype, N, 0);
    }
    double flops = 2.0 * (double)(N * N * N), seconds_of_run = flops_of_run * seconds / flops;
    return flops / time_gemm(backend, dtype, N, fmin(0.5, fmax(0.1, 0.1 * seconds_of_run)));
}

RooflineDevice roofline_measure(const Backend *backend, double gemm_flops) {
    // Two read, one written; waiting for a GPU takes as long as a tenth of such a call.
    enum { VALUES = 16 << 20, BYTES_EACH = 3 * sizeof(float), CALLS = 4 };
    float *values = backend->allocate(2 * (size_t)VALUES * sizeof(float));
    double best = INFINITY;
    for (int i = 0; i < 3; i++) {
        double start = seconds_now();
        for (int call = 0; call < CALLS; call++) {
            backend->accumulate(values, values + VALUES, VALUES);
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
                            .memory_bandwidth = (double)VALUES * BYTES_EACH / best,
                            .gemm_efficiency = 0.9,
                            .attention_efficiency = 0.6,
                            .memory_efficiency = 0.5,
                            .attention_products = 7,
                            .collective_latency = 5e-6,
                            .backend = backend};
}

// A card as the CUDA backend would answer for it, by that backend's own arithmetic

static const RooflineDevice *card;

static bool multiplies_mx(const RooflineDevice *device) {
    return device->native_mx && device->mx_gemm != MX_GEMM_EMULATED;
}

static bool multiplies_fp8(const RooflineDevice *device) {
    return device->fp8_flops > device->bf16_flops && device->mx_gemm != MX_GEMM_EMULATED;
}

static void describe(char *text, size_t bytes) {
    snprintf(text, bytes, "a planned %s: %.0f TFLOP/s in BF16, %.0f in FP8, %.3g TB/s; %s", card->name,
             card->bf16_flops / 1e12, card->fp8_flops / 1e12, card->memory_bandwidth / 1e12,
             multiplies_mx(card) ? "MXFP8, NVFP4 and FP8 with one scale per tensor native"
             : multiplies_fp8(card)
                 ? "FP8 with one scale per tensor or a block of 128 native, MXFP8 and NVFP4 emulated in BF16"
                 : "FP8, MXFP8 and NVFP4 emulated in BF16");
}

static double available_memory(void) { return card->memory_bytes - CUDA_LIBRARIES_BYTES; }

static GemmDevice gemm_device(void) {
    return (GemmDevice){.capability = card->native_mx ? 100 : 90, .cublaslt = 130100, .policy = card->mx_gemm};
}

static QuantizedForm quantized_form(Scaling scaling, Axis axis, bool for_one_gemm) {
    return cuda_gemm_quantized_form(gemm_device(), scaling, axis, for_one_gemm);
}

static bool gemm_decodes(Tensor d, Operand a, Operand b, GemmOptions options) {
    return cuda_gemm_path_decodes(gemm_device(), d, a, b, options);
}

static const char *gemm_refuses(Tensor d, Operand a, Operand b, GemmOptions options) {
    return cuda_gemm_path_refuses(gemm_device(), d, a, b, options);
}

// Returns the bytes of attention, by cuDNN for BF16 but within documents: the own workspace of its
// plans is taken to be the gradients of the scores.
static size_t attention_workspace(Format dtype, AttentionShape shape) {
    bool by_cudnn = dtype == FORMAT_BF16 && !shape.by_document && cuda_attention_has_room_for_dscores(shape);
    if (!by_cudnn) return cuda_attention_plain_bytes(shape);
    int64_t plan_bytes = cuda_attention_dscores_bytes(cuda_attention_backward_part(shape));
    return cuda_attention_cudnn_workspace(shape, (size_t)plan_bytes).total;
}

static const Backend CARD = {.name = "planned",
                             .head_rows_multiple = CUDA_HEAD_ROWS_MULTIPLE,
                             .vocab_multiple = CUDA_VOCAB_MULTIPLE,
                             .describe = describe,
                             .available_memory = available_memory,
                             .quantized_form = quantized_form,
                             .gemm_workspace = cuda_gemm_workspace,
                             .gemm_decodes = gemm_decodes,
                             .gemm_refuses = gemm_refuses,
                             .attention_workspace = attention_workspace,
                             .reduction_workspace = cuda_reduction_workspace};

// Time: what operations would take, which do nothing but move a clock

static struct {
    const RooflineDevice *device;
    double now;
    double times;                           // that each operation counts: a micro-batch stands for others like it
    double gemm, attention, memory, update; // seconds
    double forward;                         // of these, those of forward passes
    bool is_forward, is_update;
} planned;

static double planned_now(void) { return planned.now; }

static void spend(double *kind, double seconds) {
    planned.now += seconds;
    *kind += planned.times * seconds;
    if (planned.is_forward) planned.forward += planned.times * seconds;
}

static double memory_seconds(Work work) {
    const RooflineDevice *device = planned.device;
    return (work.read + work.written) / (device->memory_bandwidth * device->memory_efficiency);
}

static void spend_memory(Work work) {
    spend(planned.is_update ? &planned.update : &planned.memory, memory_seconds(work));
}

// Each has all parameters of its operation.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define OPERATION(result, name, parameters, arguments) \
    static result planned_##name parameters {          \
        spend_memory(work_##name arguments);           \
        return (result)0;                              \
    }
#define QUERY(result, name, parameters)
#include "llmc/operations.h"
#pragma GCC diagnostic pop

// Returns what it moves to make an operand as a native GEMM takes it: NVFP4's codes packed and
// scales in tiles, or scales of blocks of 128 in their places and codes along K, where a card wants
// them so. along_rows: dot products run along its rows.
static Work work_of_making(Operand operand, bool along_rows) {
    const QuantizedTensor *q = &operand.quantized;
    double codes = (double)q->rows * (double)q->cols;
    double scales = (double)scaled_scale_bytes(q->scaling, q->form, q->axis, q->rows, q->cols);
    if (scaling_is_nvfp4(q->scaling)) {
        int64_t outer = along_rows ? q->rows : q->cols, K = along_rows ? q->cols : q->rows;
        double tiles = (double)scaling_swizzled_bytes(q->scaling, outer, K);
        return (Work){.read = codes + scales, .written = codes / 2 + tiles};
    }
    bool is_along_k = along_rows || q->form == FORM_TRANSPOSED;
    bool transposes = !is_along_k && cuda_gemm_wants_rows_along_k(gemm_device().capability, q->scaling);
    double moved = (transposes ? codes : 0) + (scaling_is_block128(q->scaling) ? scales : 0);
    return (Work){.read = moved, .written = moved};
}

// Returns what products of such operands reach. A card's peak of FP4 is twice that of FP8 (DGX
// B200: 9 PFLOP/s, GB200 NVL72: 10).
static double native_flops(const RooflineDevice *device, Scaling scaling) {
    if (scaling_is_block128(scaling)) return device->fp8_flops * device->block128_efficiency;
    return device->fp8_flops * (scaling_is_nvfp4(scaling) ? 2 : 1) * device->native_efficiency;
}

// Returns what a card that sums a product by block moves for it: each block's own is written and
// read, the sum read and written.
static Work work_of_sums_by_block(Tensor d, int64_t K) {
    double moved = 8 * (double)d.rows * (double)d.cols * (double)num_parts(K, scaling_block(SCALING_BLOCK128_FP32));
    return (Work){.read = moved, .written = moved};
}

static void spend_gemm(Tensor d, Operand a, Operand b, GemmOptions options) {
    const RooflineDevice *device = planned.device;
    bool decodes = device->backend || gemm_decodes(d, a, b, options);
    bool native = !decodes && operand_is_quantized(operand_as_stored(a)) && operand_is_quantized(operand_as_stored(b));
    Work work = work_gemm(d, a, b, options), made = {0};
    if (native) made = work_add(work_of_making(a, !options.transpose_a), work_of_making(b, options.transpose_b));
    work.read += made.written - made.read; // in place of what it is made of
    double flops = native ? native_flops(device, a.quantized.scaling) : device->bf16_flops * device->gemm_efficiency;
    spend(planned.is_update ? &planned.update : &planned.gemm, fmax(work.operations / flops, memory_seconds(work)));
    if (native) spend_memory(made);
    const Backend *backend = device->backend ? device->backend : &CARD;
    if (backend->gemm_decodes(d, a, b, options)) spend_memory(work_of_decoding(a, b));
    if (!native && !device->backend && operands_are_summed_by_block(a, b)) {
        spend_memory(work_of_sums_by_block(d, cuda_gemm_shape(a, b, options).K));
    }
}

static void spend_attention(Work work, double again) {
    const RooflineDevice *device = planned.device;
    double operations = work.operations * again / (device->bf16_flops * device->attention_efficiency);
    spend(&planned.attention, fmax(operations, memory_seconds(work)));
}

static void spend_attention_forward(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape) {
    spend_attention(work_attention_forward(out, logsumexp, qkv, shape), 1);
}

// Of the products of a step two are the forward pass's and five the backward pass's; a device may
// make others again there, for an output that wasn't kept.
static void spend_attention_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                                     AttentionShape shape) {
    double again = out.data ? 1 : (planned.device->attention_products - 2) / 5.0;
    spend_attention(work_attention_backward(dqkv, dout, out, qkv, logsumexp, shape), again);
}

// A forward pass begins with the embedding and ends with the first logits: a training step makes
// the head's backward pass with its forward pass, and both count as backward.
static void begin_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, Sequences sequences) {
    planned.is_forward = true;
    planned_embedding_forward(out, tokens, wte, wpe, sequences);
}

static void end_forward(float *losses, Tensor dlogits, Tensor logits, const int32_t *targets, float dloss) {
    planned.is_forward = false;
    planned_classifier(losses, dlogits, logits, targets, dloss);
}

// Memory is addresses, which nobody looks at.
static void *take_addresses(size_t bytes) {
    static char _Alignas(MEMORY_ALIGNMENT) first[MEMORY_ALIGNMENT];
    (void)bytes;
    return first;
}

static void release_nothing(void *memory) { (void)memory; }
static void copy_nothing(void *to, const void *from, size_t bytes) { (void)to, (void)from, (void)bytes; }
static void use_nothing(void *workspace, size_t bytes) { (void)workspace, (void)bytes; }
static void wait_for_nothing(void) {}
static void copy_no_batch(int32_t *device, const int32_t *tokens, const int32_t *targets, const int32_t *positions,
                          int64_t count) {
    (void)device, (void)tokens, (void)targets, (void)positions, (void)count;
}

const Backend *roofline_backend(const RooflineDevice *device) {
    static Backend table;
    planned.device = device;
    if (!device->backend) card = device;
    table = device->backend ? *device->backend : CARD;
    if (!device->backend) table.head_scratch_bytes = cuda_head_scratch_bytes(device->memory_bytes);
    table.allocate = take_addresses;
    table.release = release_nothing;
    table.copy_batch = copy_no_batch;
    table.copy_to_device = table.copy_to_host = copy_nothing;
    table.synchronize = wait_for_nothing;
    table.now = planned_now;
    table.use_workspace = use_nothing;
#define OPERATION(result, name, parameters, arguments) table.name = planned_##name;
#define QUERY(result, name, parameters)
#include "llmc/operations.h"
    table.gemm = spend_gemm;
    table.attention_forward = spend_attention_forward;
    table.attention_backward = spend_attention_backward;
    table.embedding_forward = begin_forward;
    table.classifier = end_forward;
    return &table;
}

// Returns a group of as many ranks that sends nothing: the wire is counted apart.
static Comm silent_comm(const Comm *like) {
    Comm comm = *comm_single();
    comm.name = like->name;
    comm.size = like->size;
    return comm;
}

// Seconds of one micro-batch's passes.
typedef struct {
    double forward, backward;
} Passes;

static Passes micro_batches(GPT *model, const RooflineRun *run, int64_t times, bool is_last) {
    double forward = planned.forward, all = planned.now;
    planned.times = (double)times;
    planned.is_update = false;
    profile_count(times);
    model->params.is_last_micro_batch = is_last;
    gpt_loss_and_gradients(model, NULL, NULL, run->B, run->T, 1);
    planned.times = 1;
    planned.is_update = true;
    profile_count(1);
    forward = (planned.forward - forward) / (double)times;
    return (Passes){forward, planned.now - all - forward};
}

// Takes a step as the trainer does, of all micro-batches. Those between the first and the last are
// alike. Returns the first one's forward pass and the last one's backward pass.
static Passes take_step(GPT *model, const Backend *backend, const RooflineRun *run) {
    int64_t count = run->accumulation;
    gpt_clear_gradients(model);
    Passes first = micro_batches(model, run, 1, count == 1), last = first;
    if (count > 2) micro_batches(model, run, count - 2, false);
    if (count > 1) last = micro_batches(model, run, 1, true);
    exchange_reduce(&model->params);
    gpt_take_loss(model);
    double norm = optimizer_gradient_norm(&model->params, backend);
    optimizer_step(&model->params, backend, (OptimizerOptions){.step = 1}, norm);
    return (Passes){first.forward, last.backward};
}

// Ranks

static int has_positions(const GPTConfig *c) { return c->positions == POSITIONS_LEARNED; }

// Returns the fraction of matrices that is exchanged last, or needed first: the embeddings, the LM
// head where it isn't one of them, and one block.
static double last_exchanged(const GPTConfig *c) {
    double matrices = (double)gpt_count_parameters(c).matrices, vocab = (double)c->vocab_size;
    double rows = (c->untied_head ? 2 : 1) * vocab + (has_positions(c) ? (double)c->max_seq_len : 0);
    double embeddings = (double)c->channels * rows;
    return (embeddings + (matrices - embeddings) / (double)c->layers) / matrices;
}

static double latency(const RooflineDevice *device, const RooflineRun *run, double collectives) {
    return collectives * device->collective_latency * ceil(log2((double)run->sharding->comm->size));
}

// Returns the gathers that a matrix takes: of each copy its codes, and scales where its blocks have
// some, and of a BF16 value.
static double gathers_of_matrix(const Recipe *recipe) {
    const GemmOperand weights[] = {FPROP_W, DGRAD_W};
    double copies = 0, values = 0, gathers = 0;
    for (int i = 0; i < 2; i++) {
        bool is_quantized = mx_is_mx(recipe->format[weights[i]]);
        copies += is_quantized;
        if (is_quantized) gathers += scaling_scale_bytes(recipe->scaling[weights[i]]) > 0 ? 2 : 1;
        if (!is_quantized) values = 1;
    }
    return (recipe->square_weights && copies == 2 ? gathers / 2 : gathers) + values;
}

static void add_wire(RooflineStep *step, const RooflineDevice *device, const RooflineRun *run) {
    const Sharding *sharding = run->sharding;
    double block_matrices = (double)(LINEARS_PER_BLOCK * run->config.layers);
    double embeddings = 1 + has_positions(&run->config) + run->config.untied_head;
    double reductions = 1, gathers = 0;
    if (sharding->zero > 0) {
        reductions += embeddings + block_matrices * (sharding->zero == 2 ? (double)run->accumulation : 1);
        bool sends_copies = sharding->gather == GATHER_MX;
        gathers = embeddings + (sends_copies ? gathers_of_matrix(run->recipe) : 1) * block_matrices;
        if (sends_copies) gathers += run->wire.amax_exchanges;
    }
    double weights = sharding->zero > 0 ? run->wire.weights[sharding->gather] - run->wire.muon : 0;
    step->gradients = run->wire.gradients / run->link_bandwidth + latency(device, run, reductions);
    step->weights = weights / run->link_bandwidth + latency(device, run, gathers);
    if (sharding->zero > 0 && sharding->muon) {
        step->muon = run->wire.muon / run->link_bandwidth + latency(device, run, block_matrices);
    }
}

// Returns the run with micro-batches of no more tokens than anybody has, and more of them: the LM
// head's pieces are counted one by one.
static RooflineRun counted_run(const RooflineRun *run) {
    const int64_t MOST_TOKENS = 1 << 24;
    RooflineRun counted = *run;
    while (counted.B > 1 && counted.B * counted.T > MOST_TOKENS) {
        counted.B = (counted.B + 1) / 2;
        counted.accumulation *= 2;
    }
    return counted;
}

static Passes plan_step(const RooflineDevice *device, const RooflineRun *run) {
    GPT model;
    Comm comm = silent_comm(run->sharding->comm);
    Sharding sharding = *run->sharding;
    sharding.comm = &comm;
    memset(&planned, 0, sizeof(planned));
    const Backend *backend = profile_backend(roofline_backend(device), run->config.layers);
    gpt_create(&model, run->config, run->recipe, backend, run->B, run->T, true, &sharding);
    planned.times = 1;
    planned.is_update = true;
    profile_count(1);
    Passes passes = take_step(&model, backend, run);
    profile_count(0);
    gpt_free(&model);
    return passes;
}

RooflineStep roofline_step(const RooflineDevice *device, const RooflineRun *run) {
    RooflineRun counted = counted_run(run);
    Passes passes = plan_step(device, &counted);
    RooflineStep step = {
        .gemm = planned.gemm, .attention = planned.attention, .memory = planned.memory, .update = planned.update};
    double times = (double)run->accumulation, ranks = (double)run->sharding->comm->size;
    double compute = step.gemm + step.attention + step.memory + step.update;
    if (ranks > 1) {
        add_wire(&step, device, run);
        // Gradients go while the last backward pass makes others (at stage 2 all passes), weights
        // while the first forward pass uses others; the last of the one and the first of the other
        // can't. Muon waits for each matrix that it gathers.
        double last = last_exchanged(&run->config);
        double backward = passes.backward * (run->sharding->zero == 2 ? times : 1);
        step.exposed = fmax(step.gradients - backward, last * step.gradients) +
                       fmax(step.weights - passes.forward, last * step.weights) + step.muon;
    }
    step.step = compute + step.gradients + step.weights + step.muon;
    step.overlapped_step = compute + step.exposed;
    step.may_overlap = run->sharding->zero == 1;
    step.tokens = (double)run->B * (double)run->T * times * ranks;
    step.utilization = gpt_flops_per_token(&run->config, run->T) * step.tokens / ranks / step.step / device->bf16_flops;
    return step;
}

void roofline_print_step(const RooflineDevice *device, const RooflineStep *step, int ranks, FILE *stream) {
    char text[2][32], native[96] = "";
    double fp8 = native_flops(device, SCALING_TENSOR) / 1e12;
    if (multiplies_mx(device)) {
        double nvfp4 = native_flops(device, SCALING_NVFP4) / 1e12;
        snprintf(native, sizeof(native), ", %.4g in FP8, %.4g in NVFP4", fp8, nvfp4);
    } else if (multiplies_fp8(device)) {
        double blocks = native_flops(device, SCALING_BLOCK128) / 1e12;
        snprintf(native, sizeof(native), ", %.4g in FP8 with one scale per tensor, %.4g by blocks of 128", fp8, blocks);
    }
    fprintf(stream, "plan     %s: GEMMs at %.4g TFLOP/s in BF16%s; attention at %.4g, memory at %.4g GB/s\n",
            device->name, device->bf16_flops * device->gemm_efficiency / 1e12, native,
            device->bf16_flops * device->attention_efficiency / 1e12,
            device->memory_bandwidth * device->memory_efficiency / 1e9);
    fprintf(stream, "  compute  %.4g s a step: GEMMs %.4g, attention %.4g, memory-bound operations %.4g, update %.4g\n",
            step->gemm + step->attention + step->memory + step->update, step->gemm, step->attention, step->memory,
            step->update);
    char overlapped[128] = "";
    if (ranks > 1) {
        fprintf(stream,
                "  wire     gradients %.4g s, weights %.4g s; %.4g s of it could not be hidden behind compute\n",
                step->gradients, step->weights + step->muon, step->exposed);
        snprintf(overlapped, sizeof(overlapped), "; %.4g s %s", step->overlapped_step,
                 step->may_overlap ? "where ranks exchange beside compute, as on GPUs at --zero 1"
                                   : "if all were exchanged beside compute, as on GPUs at --zero 1 alone");
    }
    fprintf(stream, "  step     %.4g s%s\n", step->step, overlapped);
    fprintf(stream, "  speed    %s tokens/s, %s a rank; the model's FLOP/s are %.1f %% of the %s peak\n",
            human_count(text[0], step->tokens / step->step), human_count(text[1], step->tokens / step->step / ranks),
            100 * step->utilization, roofline_device(device->name) ? "dense BF16" : "GEMM's");
}

void roofline_print_time(double tokens, double seconds, double overlapped, int ranks, FILE *stream) {
    double days = seconds / 86400, unit = days < 1.0 / 24 ? 60 : days < 1 ? 3600 : 86400;
    const char *name = days < 1.0 / 24 ? "minutes" : days < 1 ? "hours" : "days";
    char text[32], with_overlap[64] = "";
    if (ranks > 1) snprintf(with_overlap, sizeof(with_overlap), "; %.3g with overlap", overlapped / unit);
    fprintf(stream, "  time     %s tokens: %.3g %s%s\n", human_count(text, tokens), seconds / unit, name, with_overlap);
}
