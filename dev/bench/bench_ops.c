/*
How fast each operation of a backend is at GPT-2 124M's shapes, next to what limits it: the bytes it
must move at the speed of the device's own copy, or its floating-point operations at that of a GEMM.
Limit and operation are timed in turn, and the best of each is taken. Buffers are rotated so that
none is in cache when its turn comes.

    build/bench_ops [FILTER] [--device cpu|cuda] [--batch-size B] [--quick] [--json FILE] [--processor-time]
    build/bench_ops --large-gemm FLOP [--device cpu|cuda] [--batch-size B] [--quick] [--processor-time]

FILTER: only operations whose name contains it. B: sequences of 1024 (default: 4 on a CPU, 32 on a
GPU). --processor-time counts the time that the threads ran, divided by their number: what to look
at where others use the machine too. It doesn't see threads that wait for each other. --large-gemm
times the large GEMM alone, as many calls in a row as make FLOP or a little more, a few times, and
prints the seconds that FLOP take: a limit for what takes as long.
*/
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/onednn.h"
#include "llmc/model/gpt.h"
#include "llmc/model/optimizer.h"
#include "llmc/files/json.h"
#include "llmc/model/recipe.h"
#include "llmc/base/util.h"
#ifdef HAVE_CUDA
#include "llmc/cuda/cuda.h"
#endif

#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef BENCH_SMALL // for a test that runs every operation
enum { T = 128, C = 128, NH = 2, V = 300, SMALLER = 32 };
#else
enum { T = 1024, C = 768, NH = 12, V = 50257, SMALLER = 1 };
#endif
enum { HS = C / NH, L = 12 };
enum { SCORES_STRIDE = T + CACHE_LINE / (int)sizeof(float) }; // as attention's

// What is required: fractions of the limits, 0: nothing.
typedef struct {
    double quantizer;  // both copies of a BF16 tensor
    double one_copy;   // of a BF16 tensor
    double weights;    // both copies of an FP32 tensor
    double normalized; // both copies of what layernorm makes
    double activation; // an activation or its gradient, also where it is quantized at once
    double decoding;
    double memory_bound; // all others that are
    double attention;
} Required;

// For what our own loops may use: what the compiler was told.
#ifdef __AVX512BW__
static const Required CPU = {.quantizer = 0.5,
                             .one_copy = 0.4,
                             .weights = 0.5,
                             .normalized = 0.4,
                             .activation = 0.4,
                             .decoding = 0.4,
                             .memory_bound = 0.4,
                             .attention = 0.4};
#else
static const Required CPU = {.quantizer = 0.35,
                             .one_copy = 0.35,
                             .weights = 0.25,
                             .normalized = 0.25,
                             .activation = 0.12,
                             .decoding = 0.5,
                             .memory_bound = 0.4,
                             .attention = 0.4};
#endif
static const Required GPU = {.quantizer = 0.85,
                             .one_copy = 0.8,
                             .weights = 0.8,
                             .normalized = 0.8,
                             .activation = 0.8,
                             .decoding = 0.8,
                             .memory_bound = 0.8};

// What is measured on a device, and how.
typedef struct {
    const char *name;
    int64_t batch_size;
    int64_t square;           // of the quantizer's largest input, to which its requirement then applies; 0: to all
    int64_t parameters;       // at a time
    int64_t large_gemm[3][3]; // M, N, K; the fastest is the limit
    size_t cold_bytes;        // more than any last-level cache
    double seconds;           // at least, of calls that are timed together, so that it isn't launches that are timed
    const Required *required;
} Device;

enum { N = 4096 / SMALLER };

static const Device DEVICES[] = {{.name = "cpu",
                                  .batch_size = 4,
                                  .parameters = 16 << 20,
                                  .large_gemm = {{4 * T, 4 * C, C}},
                                  .cold_bytes = 128 << 20,
                                  .required = &CPU},
                                 {.name = "cuda",
                                  .batch_size = 32 / SMALLER,
                                  .square = 2 * N,
                                  .parameters = (124 << 20) / (SMALLER * SMALLER),
                                  .large_gemm = {{N, N, N}, {2 * N, 2 * N, 2 * N}, {4 * N, 4 * N, 4 * N}},
                                  .cold_bytes = (512 << 20) / (SMALLER * SMALLER),
                                  .seconds = 5e-3 / SMALLER,
                                  .required = &GPU}};

enum { MAX_TENSORS = 3, MAX_VECTORS = 5 };

// The memory of one call: shapes with NULL data in a Case, placed in memory for a run.
typedef struct {
    Tensor tensor[MAX_TENSORS];
    float *vector[MAX_VECTORS];
    int64_t vector_length[MAX_VECTORS];
    int32_t *tokens; // below V
    int64_t num_tokens;
    QuantizedTensor quantized[2]; // rowwise and columnwise copy, or a GEMM's operands; format FORMAT_FP32 (0): none
} Buffers;

typedef enum { LIMIT_MEMCPY, LIMIT_LARGE_GEMM, LIMIT_ATTENTION_GEMM, NUM_LIMITS } Limit;

typedef struct Case {
    char name[64], shape[40];
    double work; // bytes that a call must move, or its floating-point operations
    Limit limit;
    Buffers buffers;
    // Makes inputs that random bits are no good for, or what a first call must have done; may be
    // NULL.
    void (*prepare)(const struct Case *, const Buffers *);
    void (*run)(const struct Case *, const Buffers *);
    ScaleRounding rounding;
    SourceKind source; // of quantize
    Axis axis;         // of a transform, as the next
    int group;
    Activation activation; // of an activation, or what quantize makes
    GemmOptions gemm;
    double calls_per_step; // of a GEMM, in a training step of the model
    double required;       // of the limit's speed; 0: nothing is
    const char *beside;    // the operation on the same shape that it is compared with; may be NULL
} Case;

typedef struct {
    double seconds, limit_seconds; // best of a call, and of the limit's own call
} Timing;

static const Device *device = &DEVICES[0];
static const Backend *backend;
static int64_t B, BT; // sequences, tokens

static bool on_cpu(void) { return device == &DEVICES[0]; }

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

// -------------------------------------------------------------------------------------------------
// Memory

static void *place(char *base, size_t *used, size_t bytes) {
    void *result = base ? base + *used : NULL;
    *used += (bytes + 255) / 256 * 256;
    return result;
}

static void place_quantized(QuantizedTensor *q, char *base, size_t *used) {
    if (!mx_is_mx(q->format)) return;
    Scaling scaling = q->scaling;
    const Encoding encoding = q->encoding;
    void *memory = place(base, used, scaled_bytes(scaling, q->form, q->axis, q->rows, q->cols));
    *q = quantized_make(memory, q->format, q->axis, q->rows, q->cols, q->form);
    q->scaling = scaling;
    q->encoding = encoding;
    if (scaling_has_factor(scaling)) q->factor = place(base, used, sizeof(float));
}

// Bytes of the buffers, which are placed at `base` where it isn't NULL.
static size_t place_buffers(Buffers *b, char *base) {
    size_t used = 0;
    for (int i = 0; i < MAX_TENSORS; i++) {
        Tensor *t = &b->tensor[i];
        t->data = place(base, &used, (size_t)(t->rows * t->stride) * dtype_size(t->dtype));
    }
    for (int i = 0; i < MAX_VECTORS; i++) {
        b->vector[i] = place(base, &used, (size_t)b->vector_length[i] * sizeof(float));
    }
    b->tokens = place(base, &used, (size_t)b->num_tokens * sizeof(int32_t));
    place_quantized(&b->quantized[0], base, &used);
    place_quantized(&b->quantized[1], base, &used);
    return used;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
    return x ^ x >> 29;
}

// Magnitudes from 2^-7 to 2, read as BF16 or as FP32.
static void fill_random(void *memory, size_t bytes) {
    uint16_t *values = memory;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < bytes / sizeof(uint16_t); i++) {
        uint64_t random = mix(i + 1) >> 32;
        values[i] = (uint16_t)((random & 0x807F) | (120 + (random >> 16 & 7)) << 7);
    }
}

// Memory of the device, where the same random values follow one another.
static void *random_memory(size_t bytes) {
    enum { PIECE = 16 << 20 };
    static char *values;
    if (!values) fill_random(values = allocate(PIECE), PIECE);
    char *memory = backend->allocate(bytes);
    for (size_t first = 0; first < bytes; first += PIECE) {
        backend->copy_to_device(memory + first, values, bytes - first < PIECE ? bytes - first : PIECE);
    }
    return memory;
}

static void fill_tokens(const Buffers *b) {
    size_t bytes = (size_t)b->num_tokens * sizeof(int32_t);
    int32_t *tokens = allocate(bytes);
    for (int64_t i = 0; i < b->num_tokens; i++) {
        tokens[i] = (int32_t)(mix((uint64_t)i + 1) % V);
    }
    backend->copy_to_device(b->tokens, tokens, bytes);
    backend->synchronize();
    free(tokens);
}

// -------------------------------------------------------------------------------------------------
// Limits. Each is one call, whose bytes or floating-point operations limit_work says.

static const char *const LIMIT_NAMES[NUM_LIMITS] = {"memcpy", "large GEMM", "attention's GEMMs"};

static struct {
    char *from, *to;
    size_t bytes; // of each
    Tensor x, w, y, qkv;
    float *scores; // (queries at once, SCORES_STRIDE), and outputs (queries at once, HS), of each thread
} limits;

// What the device multiplies in: BF16, but for a CPU whose GEMMs widen it.
static Format gemm_dtype(void) { return on_cpu() && !onednn_multiplies(FORMAT_BF16) ? FORMAT_FP32 : FORMAT_BF16; }

// The first M x K, N x K and M x N elements of the limit's memory.
static void set_large_gemm(const int64_t shape[3]) {
    int64_t M = shape[0], N = shape[1], K = shape[2];
    limits.x = tensor_make(limits.x.data, gemm_dtype(), M, K);
    limits.w = tensor_make(limits.w.data, gemm_dtype(), N, K);
    limits.y = tensor_make(limits.y.data, gemm_dtype(), M, N);
}

static void create_limits(void) {
    size_t threads = (size_t)omp_get_max_threads(), x = 0, w = 0, y = 0;
    limits.bytes = on_cpu() ? threads * (64 << 20) : device->cold_bytes;
    limits.from = random_memory(limits.bytes);
    limits.to = backend->allocate(limits.bytes);
    for (int i = 0; i < 3; i++) {
        const int64_t *shape = device->large_gemm[i];
        x = larger(x, (size_t)(shape[0] * shape[2]));
        w = larger(w, (size_t)(shape[1] * shape[2]));
        y = larger(y, (size_t)(shape[0] * shape[1]));
    }
    size_t element = dtype_size(gemm_dtype());
    limits.x.data = random_memory(element * x);
    limits.w.data = random_memory(element * w);
    limits.y.data = backend->allocate(element * y);
    set_large_gemm(device->large_gemm[0]);
    if (!on_cpu()) return;
    void *qkv = random_memory((size_t)BT * 3 * C * dtype_size(gemm_dtype()));
    limits.qkv = tensor_make(qkv, gemm_dtype(), BT, 3 * C);
    limits.scores =
        random_memory(threads * (size_t)(cpu_attention_rows(gemm_dtype()) * (SCORES_STRIDE + HS)) * sizeof(float));
}

static void run_memcpy(void) { backend->copy(limits.to, limits.from, limits.bytes); }

static void run_large_gemm(void) {
    backend->gemm(limits.y, operand_tensor(limits.x), operand_tensor(limits.w), (GemmOptions){.transpose_b = true});
}

// Returns rows of a thread's scores as attention has them, in FP32 or rounded in place.
static Tensor scores_at(float *memory, Format dtype, int64_t rows) {
    Tensor scores = tensor_make(memory, dtype, rows, T);
    scores.stride = SCORES_STRIDE * (int64_t)(sizeof(float) / dtype_size(dtype));
    return scores;
}

// Attention's two products of whole rows, one head of one sequence and as many queries at a time,
// with nothing between.
static void run_attention_gemm(void) {
    int64_t at_once = cpu_attention_rows(gemm_dtype());
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int64_t b = 0; b < B; b++) {
        for (int64_t head = 0; head < NH; head++) {
            for (int64_t row = 0; row < T; row += at_once) {
                int64_t rows = row + at_once < T ? at_once : T - row;
                Tensor tokens = tensor_rows(limits.qkv, b * T, T), queries = tensor_rows(tokens, row, rows);
                float *scores = limits.scores + omp_get_thread_num() * at_once * (SCORES_STRIDE + HS);
                Tensor out = tensor_make(scores + at_once * SCORES_STRIDE, FORMAT_FP32, rows, HS);
                cpu_matmul(scores_at(scores, FORMAT_FP32, rows), tensor_cols(queries, head * HS, HS),
                           tensor_cols(tokens, C + head * HS, HS), (GemmOptions){.transpose_b = true});
                cpu_matmul(out, scores_at(scores, gemm_dtype(), rows), tensor_cols(tokens, 2 * C + head * HS, HS),
                           (GemmOptions){0});
            }
        }
    }
}

static void (*const RUN_LIMIT[NUM_LIMITS])(void) = {run_memcpy, run_large_gemm, run_attention_gemm};

static double limit_work(Limit limit) {
    if (limit == LIMIT_MEMCPY) return 2.0 * (double)limits.bytes;
    if (limit == LIMIT_LARGE_GEMM) return 2.0 * (double)(limits.x.rows * limits.w.rows * limits.x.cols);
    return 2.0 * 2.0 * (double)B * NH * T * T * HS;
}

// -------------------------------------------------------------------------------------------------
// Operations

static void run_gemm(const Case *c, const Buffers *b) {
    backend->gemm(b->tensor[0], operand_tensor(b->tensor[1]), operand_tensor(b->tensor[2]), c->gemm);
}

static NormParams norm_of(const Buffers *b) {
    return (NormParams){NORM_LAYERNORM, NORM_EPS, b->vector[0], b->vector[1], b->vector[2], b->vector[3]};
}

static void run_quantize(const Case *c, const Buffers *b) {
    Source in = source_tensor(b->tensor[0]);
    in.kind = c->source;
    in.activation = c->activation;
    if (c->source == SOURCE_ACTIVATION_BACKWARD) in.dout = in.stored = b->tensor[1];
    in.norm = norm_of(b);
    backend->quantize(mx_is_mx(b->quantized[0].format) ? &b->quantized[0] : NULL,
                      mx_is_mx(b->quantized[1].format) ? &b->quantized[1] : NULL, in, c->rounding);
}

// The same with a scale that is known before, and an amax that is kept for later ones. A vector's
// random number does for either.
static void run_quantize_delayed(const Case *c, const Buffers *b) {
    QuantizedTensor rowwise = b->quantized[0], columnwise = b->quantized[1];
    rowwise.delayed = columnwise.delayed = (DelayedScale){b->vector[0], (uint32_t *)b->vector[1]};
    backend->quantize(&rowwise, &columnwise, source_tensor(b->tensor[0]), c->rounding);
}

static void quantize_operand(const QuantizedTensor *out, Tensor in) {
    bool columnwise = out->axis == AXIS_COLUMNWISE;
    backend->quantize(columnwise ? NULL : out, columnwise ? out : NULL, source_tensor(in), SCALE_RCEIL);
}

// Runs an accumulating GEMM once without, as a step's first micro-batch does: by that a card
// chooses the kernel.
static void choose_kernel(const Case *c, const Buffers *b) {
    Case first = *c;
    first.gemm.accumulate = false;
    if (c->gemm.accumulate && !on_cpu()) c->run(&first, b);
}

static void quantize_operands(const Case *c, const Buffers *b) {
    quantize_operand(&b->quantized[0], b->tensor[1]);
    quantize_operand(&b->quantized[1], b->tensor[2]);
    choose_kernel(c, b);
}

static void run_quantized_gemm(const Case *c, const Buffers *b) {
    backend->gemm(b->tensor[0], operand_quantized(b->quantized[0]), operand_quantized(b->quantized[1]), c->gemm);
}

// What emulation does where an operand is made for one GEMM: the second is there.
static void run_quantize_and_gemm(const Case *c, const Buffers *b) {
    quantize_operand(&b->quantized[0], b->tensor[1]);
    run_quantized_gemm(c, b);
}

static void run_dequantize(const Case *c, const Buffers *b) {
    (void)c;
    const QuantizedTensor *in = &b->quantized[mx_is_mx(b->quantized[0].format) ? 0 : 1];
#ifdef HAVE_CUDA
    if (!on_cpu()) {
        cuda_dequantize(b->tensor[0], in, FORMAT_BF16);
        return;
    }
#endif
    cpu_dequantize(b->tensor[0], in, FORMAT_BF16);
}

#ifdef HAVE_CUDA
static void run_swizzle_scales(const Case *c, const Buffers *b) {
    (void)c;
    cuda_swizzle_scales((uint8_t *)b->vector[0], &b->quantized[0], AXIS_ROWWISE);
}

static void run_arrange_scales(const Case *c, const Buffers *b) {
    (void)c;
    cuda_arrange_scales(b->vector[0], &b->quantized[0], AXIS_ROWWISE);
}

static void run_transpose_codes(const Case *c, const Buffers *b) {
    (void)c;
    cuda_transpose_codes(b->tensor[0].data, b->quantized[0].elements, b->quantized[0].rows, b->quantized[0].cols);
}

static void run_pack_codes(const Case *c, const Buffers *b) {
    (void)c;
    const QuantizedTensor *in = &b->quantized[mx_is_mx(b->quantized[0].format) ? 0 : 1];
    cuda_pack_codes(b->tensor[0].data, in, in->axis);
}
#endif

static void run_convert(const Case *c, const Buffers *b) {
    (void)c;
    backend->convert(b->tensor[0], b->tensor[1]);
}

static void run_layernorm_forward(const Case *c, const Buffers *b) {
    (void)c;
    backend->layernorm_forward(b->tensor[0], (Tensor){0}, b->tensor[1], (Tensor){0}, norm_of(b));
}

static void run_layernorm_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->layernorm_backward(b->tensor[0], b->vector[3], b->vector[4], b->tensor[1], b->tensor[2], norm_of(b));
}

static void run_activation_forward(const Case *c, const Buffers *b) {
    backend->activation_forward(b->tensor[0], b->tensor[1], c->activation);
}

static void run_activation_backward(const Case *c, const Buffers *b) {
    backend->activation_backward(b->tensor[0], NULL, b->tensor[1], b->tensor[2], c->activation);
}

static void run_gelu_backward(const Case *c, const Buffers *b) {
    backend->activation_backward(b->tensor[0], NULL, b->tensor[0], b->tensor[1], c->activation);
}

static void run_gelu_backward_with_bias(const Case *c, const Buffers *b) {
    backend->activation_backward(b->tensor[0], b->vector[0], b->tensor[0], b->tensor[1], c->activation);
}

static void prepare_rope(const Case *c, const Buffers *b) {
    (void)c;
    backend->rope_rotations(b->vector[0], T, HS, 10000);
}

static void run_rope(const Case *c, const Buffers *b) {
    (void)c;
    backend->rope(b->tensor[0], b->vector[0], (Sequences){.T = T}, HS, false);
}

static void run_residual_layernorm(const Case *c, const Buffers *b) {
    (void)c;
    backend->layernorm_forward((Tensor){0}, b->tensor[0], b->tensor[1], b->tensor[2], norm_of(b));
}

static void run_bias_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->bias_backward(b->vector[0], b->tensor[0]);
}

static void run_embedding_forward(const Case *c, const Buffers *b) {
    (void)c;
    backend->embedding_forward(b->tensor[0], b->tokens, b->tensor[1], b->tensor[2], (Sequences){.T = T});
}

static void run_embedding_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->embedding_backward(b->vector[0], b->vector[1], b->tokens, b->tensor[0], (Sequences){.T = T});
}

static void run_classifier(const Case *c, const Buffers *b) {
    (void)c;
    backend->classifier(b->vector[0], b->tensor[0], b->tensor[1], b->tokens, 1.0f / (float)BT);
}

static void make_moments(const Case *c, const Buffers *b) {
    (void)c;
    size_t bytes = (size_t)b->vector_length[2] * sizeof(float);
    float *moment = allocate(bytes);
    backend->copy_to_host(moment, b->vector[2], bytes);
    for (int64_t i = 0; i < b->vector_length[2]; i++) {
        moment[i] = moment[i] * moment[i];
    }
    backend->copy_to_device(b->vector[2], moment, bytes);
    backend->synchronize();
    free(moment);
}

// Of vectors: masters, moments, gradient.
static AdamWUpdate update_of(const Buffers *b, int64_t rows, int64_t cols) {
    const OptimizerOptions options = {
        .learning_rate = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = 10};
    return (AdamWUpdate){.master = b->vector[0],
                         .moment1 = b->vector[1],
                         .moment2 = b->vector[2],
                         .gradient = b->vector[3],
                         .rows = rows,
                         .cols = cols,
                         .factors = optimizer_factors(options, 1)};
}

static void run_adamw(const Case *c, const Buffers *b) {
    (void)c;
    backend->adamw(update_of(b, 1, b->vector_length[0]));
}

static void run_adamw_quantize(const Case *c, const Buffers *b) {
    AdamWUpdate update = update_of(b, b->quantized[0].rows, b->quantized[0].cols);
    update.rowwise = b->quantized[0];
    update.columnwise = b->quantized[1];
    update.rounding = c->rounding;
    backend->adamw(update);
}

static void run_combine(const Case *c, const Buffers *b) {
    (void)c;
    backend->combine(b->tensor[0], 0.5f, b->tensor[0], 0.5f, b->tensor[1]);
}

static void run_hadamard(const Case *c, const Buffers *b) {
    backend->hadamard(b->tensor[0], b->tensor[1], c->axis, hadamard_fixed(c->group));
}

static void run_sum_of_squares(const Case *c, const Buffers *b) {
    (void)c;
    backend->sum_of_squares(b->vector[0], b->vector_length[0]);
}

static void run_amax(const Case *c, const Buffers *b) {
    (void)c;
    backend->amax((uint32_t *)b->vector[0], b->tensor[0]);
}

static AttentionShape attention_shape(void) {
    return (AttentionShape){.B = B, .T = T, .NH = NH, .NKV = NH, .HS = HS, .causal = true};
}

static void run_attention_forward(const Case *c, const Buffers *b) {
    (void)c;
    backend->attention_forward(b->tensor[1], b->vector[0], b->tensor[2], attention_shape());
}

// As under a recipe that keeps no BF16 copy of attention's output, and as under one that does.
static void run_attention_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->attention_backward(b->tensor[0], b->tensor[1], (Tensor){0}, b->tensor[2], b->vector[0], attention_shape());
}

static void run_attention_backward_kept(const Case *c, const Buffers *b) {
    (void)c;
    backend->attention_backward(b->tensor[0], b->tensor[1], b->tensor[1], b->tensor[2], b->vector[0],
                                attention_shape());
}

// -------------------------------------------------------------------------------------------------
// The cases

enum { MAX_CASES = 192 };
static Case cases[MAX_CASES];
static int num_cases;

#define BF16(rows, cols) tensor_make(NULL, FORMAT_BF16, rows, cols)
#define FP32(rows, cols) tensor_make(NULL, FORMAT_FP32, rows, cols)

static Case *add_case(const char *name, int64_t rows, int64_t cols, double work, Limit limit,
                      void (*run)(const Case *, const Buffers *), Buffers buffers) {
    if (num_cases == MAX_CASES) die("internal error: more than %d operations to measure", MAX_CASES);
    Case *c = &cases[num_cases++];
    *c = (Case){.work = work, .limit = limit, .run = run, .buffers = buffers};
    if (limit == LIMIT_MEMCPY) c->required = device->required->memory_bound;
    snprintf(c->name, sizeof(c->name), "%s", name);
    snprintf(c->shape, sizeof(c->shape), cols ? "[%lld, %lld]" : "[%lld]", (long long)rows, (long long)cols);
    return c;
}

// work: bytes for each element of [rows, cols].
static Case *add_elementwise(const char *name, int64_t rows, int64_t cols, double bytes,
                             void (*run)(const Case *, const Buffers *), Buffers buffers) {
    return add_case(name, rows, cols, bytes * (double)(rows * cols), LIMIT_MEMCPY, run, buffers);
}

static QuantizedTensor quantized(Format format, Axis axis, int64_t rows, int64_t cols) {
    return (QuantizedTensor){.format = format, .axis = axis, .rows = rows, .cols = cols};
}

static Case *add_quantize(Tensor in, Format format, ScaleRounding rounding, bool rowwise, bool columnwise) {
    char name[64];
    bool both = rowwise && columnwise;
    snprintf(name, sizeof(name), "quantize %s %s %s%s",
             both      ? "both"
             : rowwise ? "rowwise"
                       : "columnwise",
             FORMAT_NAMES[format], SCALE_ROUNDING_NAMES[rounding], in.dtype == FORMAT_FP32 ? " of fp32" : "");
    Buffers buffers = {.tensor = {in}};
    if (rowwise) buffers.quantized[0] = quantized(format, AXIS_ROWWISE, in.rows, in.cols);
    if (columnwise) buffers.quantized[1] = quantized(format, AXIS_COLUMNWISE, in.rows, in.cols);
    double bytes = (double)dtype_size(in.dtype) + (1 + 1.0 / MX_BLOCK) * (rowwise + columnwise);
    Case *c = add_elementwise(name, in.rows, in.cols, bytes, run_quantize, buffers);
    c->rounding = rounding;
    bool is_square = device->square == 0 || in.rows == device->square;
    c->required = in.dtype == FORMAT_FP32 ? device->required->weights
                  : both && is_square     ? device->required->quantizer
                                          : device->required->one_copy;
    return c;
}

// Both copies of `in`, in another form: its bytes for each element instead of those of codes and
// scales.
static void add_quantize_form(Tensor in, const char *name, QuantizedForm form, double bytes) {
    Case *c = add_quantize(in, FORMAT_E4M3, SCALE_RCEIL, true, true);
    snprintf(c->name, sizeof(c->name), "%s", name);
    c->buffers.quantized[0].form = c->buffers.quantized[1].form = form;
    c->work = (2 + 2 * bytes) * (double)(in.rows * in.cols);
}

// Both copies of what is made on the way: what is read of the source, what it stores, and the
// copies.
static Case *add_made(const char *name, SourceKind source, int64_t cols, double bytes, Buffers buffers) {
    int64_t rows = buffers.tensor[0].rows;
    buffers.quantized[0] = quantized(FORMAT_E4M3, AXIS_ROWWISE, rows, cols);
    buffers.quantized[1] = quantized(FORMAT_E4M3, AXIS_COLUMNWISE, rows, cols);
    Case *c = add_elementwise(name, rows, cols, bytes + 2 * (1 + 1.0 / MX_BLOCK), run_quantize, buffers);
    c->source = source;
    c->required = source == SOURCE_LAYERNORM ? device->required->normalized : device->required->activation;
    return c;
}

static void add_made_quantizers(void) {
    add_made("layernorm, quantize both", SOURCE_LAYERNORM, C, 2 + 8.0 / C,
             (Buffers){.tensor = {BF16(BT, C)}, .vector_length = {BT, BT, C, C}});
    add_made("gelu, quantize both", SOURCE_ACTIVATION, 4 * C, 2, (Buffers){.tensor = {BF16(BT, 4 * C)}});
    add_made("gelu backward, quantize both", SOURCE_ACTIVATION_BACKWARD, 4 * C, 6,
             (Buffers){.tensor = {BF16(BT, 4 * C), BF16(BT, 4 * C)}});
    add_made("swiglu, quantize both", SOURCE_ACTIVATION, 4 * C, 4, (Buffers){.tensor = {BF16(BT, 8 * C)}})->activation =
        ACTIVATION_SWIGLU;
    add_quantize_form(BF16(BT, 4 * C), "quantize both to bf16", FORM_DECODED, 2);
}

// Has a quantizer round stochastically. Nothing is required of it then: it has a random number for
// each element.
static void round_stochastically(Case *c) {
    size_t length = strlen(c->name);
    snprintf(c->name + length, sizeof(c->name) - length, " stochastic");
    c->required = 0;
    c->beside = NULL;
    for (int i = 0; i < 2; i++) {
        c->buffers.quantized[i].encoding = (Encoding){.rounding = ROUND_STOCHASTIC, .tensor = i};
    }
}

// Both copies of a scaling beside MX, as they are made for one GEMM, to be compared with MX's in
// that form, or as codes where scales aren't exact in BF16. A factor that isn't delayed takes a
// pass over the tensor first.
static Case *add_scaled_quantizer(Scaling scaling, bool is_delayed) {
    Tensor in = BF16(BT, 4 * C);
    Case *c = add_quantize(in, scaling_is_nvfp4(scaling) ? FORMAT_E2M1 : FORMAT_E4M3, SCALE_RCEIL, true, true);
    snprintf(c->name, sizeof(c->name), "quantize both %s%s", SCALING_NAMES[scaling], is_delayed ? " delayed" : "");
    for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
        c->buffers.quantized[axis].scaling = scaling;
        QuantizedForm form = backend->quantized_form(scaling, axis, true);
        bool is_inexact = scaling == SCALING_BLOCK128_FP32 && form == FORM_DECODED; // which no quantizer makes
        c->buffers.quantized[axis].form = is_inexact ? FORM_PLAIN : form;
    }
    bool decoded = c->buffers.quantized[AXIS_ROWWISE].form == FORM_DECODED;
    double read = scaling_has_factor(scaling) && !is_delayed ? 4 : 2, written = decoded ? 4 : 2;
    c->work = (read + written) * (double)(in.rows * in.cols);
    c->required = 0;
    c->beside = decoded ? "quantize both to bf16" : "quantize both e4m3 rceil";
    if (!is_delayed) return c;
    c->run = run_quantize_delayed;
    c->buffers.vector_length[0] = c->buffers.vector_length[1] = 1;
    return c;
}

// One copy of FP32 weights in squares, for fprop and dgrad, to be compared with MX's two, by
// rows and by columns.
static void add_square_weights(Scaling scaling) {
    Tensor in = FP32(4 * C, C);
    Case *c = add_quantize(in, scaling_is_nvfp4(scaling) ? FORMAT_E2M1 : FORMAT_E4M3, SCALE_RCEIL, true, false);
    snprintf(c->name, sizeof(c->name), "quantize squares %s of fp32", SCALING_NAMES[scaling]);
    c->buffers.quantized[0].axis = AXIS_SQUARE;
    c->buffers.quantized[0].scaling = scaling;
    c->work = (scaling_has_factor(scaling) ? 9 : 5) * (double)(in.rows * in.cols);
    c->required = 0;
    c->beside = "quantize both e4m3 rceil of fp32";
}

static void add_scaled_quantizers(void) {
    add_scaled_quantizer(SCALING_TENSOR, false);
    add_scaled_quantizer(SCALING_TENSOR, true);
    add_scaled_quantizer(SCALING_BLOCK128, false);
    add_scaled_quantizer(SCALING_BLOCK128_FP32, false);
    add_scaled_quantizer(SCALING_NVFP4, false);
    round_stochastically(add_scaled_quantizer(SCALING_NVFP4, false));
    add_scaled_quantizer(SCALING_NVFP4_46, false);
    add_square_weights(SCALING_MX);
    add_square_weights(SCALING_BLOCK128);
    add_square_weights(SCALING_BLOCK128_FP32);
    add_square_weights(SCALING_NVFP4);
    add_square_weights(SCALING_NVFP4_46);
}

static void add_square_quantizers(void) {
    Tensor in = BF16(device->square, device->square);
    add_quantize(in, FORMAT_E4M3, SCALE_RCEIL, true, true);
    add_quantize(in, FORMAT_E4M3, SCALE_RCEIL, true, false);
    add_quantize(in, FORMAT_E4M3, SCALE_RCEIL, false, true);
    add_quantize_form(in, "quantize both, swizzled", FORM_SWIZZLED, 1 + 1.0 / MX_BLOCK);
    add_quantize_form(in, "quantize both to bf16", FORM_DECODED, 2);
}

static void add_dequantizers(void) {
    for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
        Buffers buffers = {.tensor = {BF16(BT, 4 * C)}};
        buffers.quantized[axis] = quantized(FORMAT_E4M3, axis, BT, 4 * C);
        Case *c = add_elementwise(axis == AXIS_ROWWISE ? "dequantize rowwise e4m3" : "dequantize columnwise e4m3", BT,
                                  4 * C, 2 + 1 + 1.0 / MX_BLOCK, run_dequantize, buffers);
        c->prepare = run_quantize;
        c->required = device->required->decoding;
    }
#ifdef HAVE_CUDA
    if (on_cpu()) return;
    QuantizedTensor codes = quantized(FORMAT_E4M3, AXIS_ROWWISE, BT, 4 * C);
    add_elementwise("transpose codes", BT, 4 * C, 2, run_transpose_codes,
                    (Buffers){.tensor = {BF16(4 * C, BT / 2)}, .quantized = {codes}});
    for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
        Buffers buffers = {.tensor = {BF16(4 * C, BT / 4)}};
        buffers.quantized[axis] = quantized(FORMAT_E2M1, axis, BT, 4 * C);
        add_elementwise(axis == AXIS_ROWWISE ? "pack rowwise e2m1" : "pack columnwise e2m1", BT, 4 * C, 1.5,
                        run_pack_codes, buffers);
    }
    // Nothing is required: scales of all the buffers together fit in a cache.
    add_elementwise(
        "swizzle scales", BT, 4 * C, 2.0 / MX_BLOCK, run_swizzle_scales,
        (Buffers){.vector_length = {mx_swizzled_scale_bytes(BT, 4 * C) / (int64_t)sizeof(float)}, .quantized = {codes}})
        ->required = 0;
    codes.scaling = SCALING_BLOCK128; // whose scales are no more bytes than MX's
    add_elementwise("arrange scales", BT, 4 * C, 2 * sizeof(float) / 128.0, run_arrange_scales,
                    (Buffers){.vector_length = {scaling_num_gemm_scales(BT, 4 * C, false)}, .quantized = {codes}})
        ->required = 0;
#endif
}

static void add_quantizers(void) {
    for (int64_t cols = 4 * C; cols >= C; cols -= 3 * C) {
        for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++) {
            for (ScaleRounding rounding = 0; rounding < NUM_SCALE_ROUNDINGS; rounding++) {
                add_quantize(BF16(BT, cols), format, rounding, true, true);
            }
        }
        add_quantize(BF16(BT, cols), FORMAT_E4M3, SCALE_RCEIL, true, false);
        add_quantize(BF16(BT, cols), FORMAT_E4M3, SCALE_RCEIL, false, true);
    }
    add_quantize(FP32(4 * C, C), FORMAT_E4M3, SCALE_RCEIL, true, true);
    round_stochastically(add_quantize(BF16(BT, 4 * C), FORMAT_E2M1, SCALE_FLOOR, true, true));
    if (device->square) add_square_quantizers();
    add_scaled_quantizers();
    add_dequantizers();
}

static void add_activation(const char *name, Activation activation, double bytes,
                           void (*run)(const Case *, const Buffers *), Buffers buffers) {
    Case *c = add_elementwise(name, BT, 4 * C, bytes, run, buffers);
    c->activation = activation;
    c->required = device->required->activation;
}

static void add_rows_operations(Tensor logits, Tensor dlogits) {
    const double row_statistics = 8.0 / C; // mean and rstd, for each element
    add_elementwise("layernorm_forward", BT, C, 4 + row_statistics, run_layernorm_forward,
                    (Buffers){.tensor = {BF16(BT, C), BF16(BT, C)}, .vector_length = {BT, BT, C, C}});
    add_elementwise("layernorm_backward", BT, C, 8 + row_statistics, run_layernorm_backward,
                    (Buffers){.tensor = {BF16(BT, C), BF16(BT, C), BF16(BT, C)}, .vector_length = {BT, BT, C, C, C}});
    Buffers two = {.tensor = {BF16(BT, 4 * C), BF16(BT, 4 * C)}};
    Tensor in = BF16(BT, 8 * C), out = BF16(BT, 4 * C);
    add_activation("gelu_forward", ACTIVATION_GELU, 4, run_activation_forward, two);
    add_activation("gelu_backward", ACTIVATION_GELU, 6, run_gelu_backward, two);
    Buffers with_bias = {.tensor = {two.tensor[0], two.tensor[1]}, .vector_length = {4 * C}};
    if (!on_cpu()) add_activation("gelu_backward, bias", ACTIVATION_GELU, 6, run_gelu_backward_with_bias, with_bias);
    add_activation("swiglu_forward", ACTIVATION_SWIGLU, 6, run_activation_forward, (Buffers){.tensor = {out, in}});
    add_activation("swiglu_backward", ACTIVATION_SWIGLU, 10, run_activation_backward,
                   (Buffers){.tensor = {in, out, in}});
    add_elementwise("rope, queries and keys", BT, 2 * C, 4, run_rope,
                    (Buffers){.tensor = {BF16(BT, 2 * C)}, .vector_length = {T * HS}})
        ->prepare = prepare_rope;
    add_elementwise("residual, layernorm statistics", BT, C, 6 + row_statistics, run_residual_layernorm,
                    (Buffers){.tensor = {BF16(BT, C), BF16(BT, C), BF16(BT, C)}, .vector_length = {BT, BT, C, C}});
    for (int64_t cols = C; cols <= 4 * C; cols += 3 * C) {
        add_elementwise("bias_backward", BT, cols, 2, run_bias_backward,
                        (Buffers){.tensor = {BF16(BT, cols)}, .vector_length = {cols}});
    }
    // A token's row of wte, a position's of wpe once for all sequences; backward reads and writes
    // FP32.
    const double positions = 1 / (double)B;
    add_elementwise("embedding_forward", BT, C, 2 + 2 + 2 * positions, run_embedding_forward,
                    (Buffers){.tensor = {BF16(BT, C), BF16(V, C), BF16(T, C)}, .num_tokens = BT});
    add_elementwise("embedding_backward", BT, C, 2 + 8 + 8 * positions, run_embedding_backward,
                    (Buffers){.tensor = {BF16(BT, C)}, .vector_length = {V * C, T * C}, .num_tokens = BT});
    add_elementwise("classifier", logits.rows, V, 4 + 2, run_classifier,
                    (Buffers){.tensor = {dlogits, logits}, .vector_length = {logits.rows}, .num_tokens = logits.rows});
}

// In groups of the sizes that recipes have.
static void add_transforms(void) {
    for (int group = 16; group <= 64; group *= 4) {
        for (Axis axis = AXIS_ROWWISE; axis <= AXIS_COLUMNWISE; axis++) {
            Case *c = add_elementwise("", BT, 4 * C, 4, run_hadamard,
                                      (Buffers){.tensor = {BF16(BT, 4 * C), BF16(BT, 4 * C)}});
            snprintf(c->name, sizeof(c->name), "hadamard %d, %s", group,
                     axis == AXIS_ROWWISE ? "rowwise" : "columnwise");
            c->axis = axis;
            c->group = group;
            c->required = 0;
        }
    }
}

static void add_parameter_operations(void) {
    const int64_t count = device->parameters;
    add_case("adamw", count, 0, 28.0 * (double)count, LIMIT_MEMCPY, run_adamw,
             (Buffers){.vector_length = {count, count, count, count}})
        ->prepare = make_moments;
    add_case("sum_of_squares", count, 0, 4.0 * (double)count, LIMIT_MEMCPY, run_sum_of_squares,
             (Buffers){.vector_length = {count}});
    const int64_t rows = 4 * C, weight = rows * C;
    add_elementwise("amax", rows, C, 4, run_amax, (Buffers){.tensor = {FP32(rows, C)}, .vector_length = {1}})
        ->required = 0;
    add_elementwise("adamw, quantize both", rows, C, 28 + 2 * (1 + 1.0 / MX_BLOCK), run_adamw_quantize,
                    (Buffers){.quantized = {quantized(FORMAT_E4M3, AXIS_ROWWISE, rows, C),
                                            quantized(FORMAT_E4M3, AXIS_COLUMNWISE, rows, C)},
                              .vector_length = {weight, weight, weight, weight}})
        ->prepare = make_moments;
    add_elementwise("convert fp32 to bf16", 4 * C, C, 6, run_convert,
                    (Buffers){.tensor = {BF16(4 * C, C), FP32(4 * C, C)}});
    add_elementwise("combine, bf16 and fp32", 4 * C, C, 8, run_combine,
                    (Buffers){.tensor = {BF16(4 * C, C), FP32(4 * C, C)}});
}

static Case *add_gemm(const char *layer, const char *pass, Tensor d, Tensor a, Tensor b, GemmOptions options,
                      double calls_per_step) {
    char name[64];
    int64_t K = options.transpose_a ? a.rows : a.cols;
    snprintf(name, sizeof(name), "gemm %s %s", layer, pass);
    Case *c = add_case(name, 0, 0, 2.0 * (double)d.rows * (double)d.cols * (double)K, LIMIT_LARGE_GEMM, run_gemm,
                       (Buffers){.tensor = {d, a, b}});
    snprintf(c->shape, sizeof(c->shape), "%lldx%lldx%lld", (long long)d.rows, (long long)d.cols, (long long)K);
    c->gemm = options;
    c->prepare = choose_kernel;
    c->calls_per_step = calls_per_step;
    return c;
}

// The same of quantized operands: the first made for this GEMM, the second kept for it. A weight in
// blocks of 128 has one copy for both axes, as in the model.
static Case *add_quantized_gemm(Scaling scaling, const char *layer, const char *pass, Tensor d, Tensor a, Tensor b,
                                GemmOptions options) {
    bool is_square = scaling_is_block128(scaling) && !options.transpose_a;
    Case *c = add_gemm(layer, pass, d, a, b, options, 0);
    snprintf(c->name, sizeof(c->name), "%s %s %s", scaling == SCALING_MX ? "mxfp8" : SCALING_NAMES[scaling], layer,
             pass);
    c->run = run_quantized_gemm;
    c->prepare = quantize_operands;
    QuantizedTensor *q = c->buffers.quantized;
    q[0] = quantized(FORMAT_E4M3, options.transpose_a ? AXIS_COLUMNWISE : AXIS_ROWWISE, a.rows, a.cols);
    q[1] = quantized(FORMAT_E4M3, options.transpose_b ? AXIS_ROWWISE : AXIS_COLUMNWISE, b.rows, b.cols);
    for (int i = 0; i < 2; i++) {
        q[i].scaling = scaling;
        q[i].form = backend->quantized_form(scaling, q[i].axis, i == 0);
    }
    if (is_square) q[1].axis = AXIS_SQUARE;
    if (is_square) q[1].form = FORM_PLAIN;
    return c;
}

// Returns whether the device multiplies such operands without decoding them first. It is asked of
// operands that are kept: one that is made for one GEMM may be decoded when it is made.
static bool multiplies(Scaling scaling) {
    QuantizedTensor q = quantized(FORMAT_E4M3, AXIS_ROWWISE, T, T);
    q.scaling = scaling;
    q.form = backend->quantized_form(scaling, q.axis, false);
    return !backend->gemm_decodes(BF16(T, T), operand_quantized(q), operand_quantized(q),
                                  (GemmOptions){.transpose_b = true});
}

// Which is faster where MXFP8 is emulated: an operand made as BF16 values at once, or as codes that
// the GEMM decodes.
static void add_emulated(const char *name, QuantizedForm form) {
    Case *c = add_quantized_gemm(SCALING_MX, "up", "wgrad", FP32(4 * C, C), BF16(BT, 4 * C), BF16(BT, C),
                                 (GemmOptions){.transpose_a = true, .accumulate = true});
    snprintf(c->name, sizeof(c->name), "%s", name);
    c->run = run_quantize_and_gemm;
    c->buffers.quantized[0].form = form;
}

// A linear layer's three GEMMs. x (rows, K), w (N, K), y (rows, N).
static void add_linear(const char *layer, Tensor x, Tensor w, Tensor y, Tensor dy, double calls_per_step) {
    add_gemm(layer, "fprop", y, x, w, (GemmOptions){.transpose_b = true}, calls_per_step);
    add_gemm(layer, "dgrad", x, dy, w, (GemmOptions){0}, calls_per_step);
    add_gemm(layer, "wgrad", FP32(w.rows, w.cols), dy, x, (GemmOptions){.transpose_a = true, .accumulate = true},
             calls_per_step);
}

static void add_quantized_linear(Scaling scaling, const char *layer, int64_t N, int64_t K) {
    Tensor x = BF16(BT, K), w = BF16(N, K), y = BF16(BT, N);
    add_quantized_gemm(scaling, layer, "fprop", y, x, w, (GemmOptions){.transpose_b = true, .fast_sum = true});
    add_quantized_gemm(scaling, layer, "dgrad", x, y, w, (GemmOptions){0});
    add_quantized_gemm(scaling, layer, "wgrad", FP32(N, K), y, x,
                       (GemmOptions){.transpose_a = true, .accumulate = true});
}

static void add_gemms(Tensor logits, Tensor dlogits) {
    const struct {
        const char *name;
        int64_t N, K;
    } layers[LINEARS_PER_BLOCK] = {{"qkv", 3 * C, C}, {"projection", C, C}, {"up", 4 * C, C}, {"down", C, 4 * C}};
    for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
        Tensor y = BF16(BT, layers[i].N);
        add_linear(layers[i].name, BF16(BT, layers[i].K), BF16(layers[i].N, layers[i].K), y, y, L);
    }
    static const Scaling SCALINGS[] = {SCALING_MX, SCALING_TENSOR, SCALING_BLOCK128};
    for (int i = 0; i < LINEARS_PER_BLOCK * COUNT(SCALINGS); i++) {
        int layer = i % LINEARS_PER_BLOCK;
        Scaling scaling = SCALINGS[i / LINEARS_PER_BLOCK];
        if (scaling == SCALING_MX || (!on_cpu() && multiplies(scaling))) {
            add_quantized_linear(scaling, layers[layer].name, layers[layer].N, layers[layer].K);
        }
    }
    if (backend->quantized_form(SCALING_MX, AXIS_ROWWISE, true) != FORM_SWIZZLED) {
        add_emulated("quantize to bf16, up wgrad", FORM_DECODED);
        add_emulated("quantize to codes, up wgrad", FORM_PLAIN);
    }
    // What a step of Muon's Newton-Schulz multiplies, for the MLP's matrices.
    Tensor up = BF16(4 * C, C), gram = BF16(C, C);
    add_gemm("muon", "gram", gram, up, up, (GemmOptions){.transpose_a = true}, 0);
    add_gemm("muon", "square", FP32(C, C), gram, gram, (GemmOptions){0}, 0);
    add_gemm("muon", "product", FP32(4 * C, C), up, gram, (GemmOptions){0}, 0);
    add_linear("head", BF16(logits.rows, C), BF16(logits.cols, C), logits, dlogits, (double)BT / (double)logits.rows);
}

// The causal half of two products forward and five backward, which recomputes the scores.
static void add_attention(void) {
    const double product = (double)B * NH * T * T * HS;
    Limit first = on_cpu() ? LIMIT_ATTENTION_GEMM : LIMIT_LARGE_GEMM;
    Buffers buffers = {.tensor = {BF16(BT, 3 * C), BF16(BT, C), BF16(BT, 3 * C)}, .vector_length = {BT * NH}};
    for (Limit limit = first; limit >= LIMIT_LARGE_GEMM; limit--) {
        Case *forward = add_case("attention_forward", BT, C, 2 * product, limit, run_attention_forward, buffers);
        Case *backward = add_case("attention_backward", BT, C, 5 * product, limit, run_attention_backward, buffers);
        backward->prepare = run_attention_forward;
        forward->required = backward->required = device->required->attention;
    }
    if (on_cpu()) return; // which doesn't make it again
    add_case("attention_backward, out kept", BT, C, 5 * product, LIMIT_LARGE_GEMM, run_attention_backward_kept, buffers)
        ->prepare = run_attention_forward;
}

// What a call costs that has next to nothing to do: check.sh takes it off small operations' times.
static void add_launch(void) {
    Buffers buffers = {.tensor = {BF16(1, 1), BF16(1, 1)}};
    if (!on_cpu()) add_elementwise("a kernel's launch", 1, 1, 4, run_convert, buffers)->required = 0;
}

static void add_cases(void) {
    Recipe recipe;
    Error error;
    GPT probe; // of the shape that decides how many tokens the LM head takes at a time, and a head that cuDNN takes
    if (!recipe_named(&recipe, "bf16", &error)) die("%s", error.message);
    gpt_create(&probe, (GPTConfig){.layers = 1, .heads = 1, .channels = 64, .max_seq_len = T, .vocab_size = V}, &recipe,
               backend, B, T, true, NULL);
    add_launch();
    add_quantizers();
    add_made_quantizers();
    add_transforms();
    Tensor logits = probe.logits, dlogits = probe.dlogits;
    logits.data = dlogits.data = NULL;
    add_rows_operations(logits, dlogits);
    add_parameter_operations();
    add_attention();
    add_gemms(logits, dlogits);
    gpt_free(&probe);
}

// -------------------------------------------------------------------------------------------------
// Measuring

typedef struct {
    const char *filter, *json_path;
    int repeats;
    double large_gemm; // FLOP of it to be timed, alone; 0: all operations
    double (*now)(void);
} Settings;

static double processor_seconds(void) {
    struct timespec time;
    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) != 0) die("this system has no clock of a process's time");
    return ((double)time.tv_sec + 1e-9 * (double)time.tv_nsec) / omp_get_max_threads();
}

static void give_workspace(void) {
    size_t bytes = backend->attention_workspace(FORMAT_BF16, attention_shape());
    bytes = larger(bytes, backend->reduction_workspace(BT, 4 * C));
    bytes = larger(bytes, backend->gemm_workspace(operand_tensor(limits.x), operand_tensor(limits.w)));
    for (int i = 0; i < num_cases; i++) {
        const Tensor *t = cases[i].buffers.tensor;
        const QuantizedTensor *q = cases[i].buffers.quantized;
        if (cases[i].run == run_gemm) {
            bytes = larger(bytes, backend->gemm_workspace(operand_tensor(t[1]), operand_tensor(t[2])));
        }
        if (cases[i].run == run_quantized_gemm || cases[i].run == run_quantize_and_gemm) {
            bytes = larger(bytes, backend->gemm_workspace(operand_quantized(q[0]), operand_quantized(q[1])));
        }
    }
    backend->use_workspace(backend->allocate(bytes), bytes);
}

// Seconds of a call, of so many in a row; `slots` of them in turn for an operation.
static double time_calls(const Case *c, const Buffers *slots, int count, int64_t calls, double (*now)(void)) {
    double start = now();
    for (int64_t i = 0; i < calls; i++) {
        c->run(c, &slots[i % count]);
    }
    backend->synchronize();
    return (now() - start) / (double)calls;
}

static double time_limit(Limit limit, int64_t calls, double (*now)(void)) {
    double start = now();
    for (int64_t i = 0; i < calls; i++) {
        RUN_LIMIT[limit]();
    }
    backend->synchronize();
    return (now() - start) / (double)calls;
}

// Calls that take the device's time together, a multiple of `unit`, of which each takes `seconds`.
static int64_t calls_together(int64_t unit, double seconds) {
    return unit * (1 + (int64_t)(device->seconds / (seconds * (double)unit)));
}

static void choose_large_gemm(double (*now)(void)) {
    const int64_t *best = device->large_gemm[0];
    double best_rate = 0;
    for (int i = 0; i < 3 && device->large_gemm[i][0] > 0; i++) {
        set_large_gemm(device->large_gemm[i]);
        time_limit(LIMIT_LARGE_GEMM, 1, now); // libraries make their objects
        double rate = limit_work(LIMIT_LARGE_GEMM) / time_limit(LIMIT_LARGE_GEMM, 3, now);
        if (rate > best_rate) best = device->large_gemm[i];
        if (rate > best_rate) best_rate = rate;
    }
    set_large_gemm(best);
}

// The best of a few turns. Calls of a memory-bound operation go through as many buffers as the
// cache can't hold.
static Timing measure(const Case *c, const Settings *settings) {
    enum { MAX_SLOTS = 64 };
    static Buffers slots[MAX_SLOTS];
    Buffers shapes = c->buffers;
    size_t bytes = place_buffers(&shapes, NULL);
    int count = c->limit == LIMIT_MEMCPY ? (int)((device->cold_bytes + bytes - 1) / bytes) : 1;
    count = count > MAX_SLOTS ? MAX_SLOTS : count;
    char *memory = random_memory(bytes * (size_t)count);
    for (int i = 0; i < count; i++) {
        slots[i] = c->buffers;
        place_buffers(&slots[i], memory + bytes * (size_t)i);
        fill_tokens(&slots[i]);
        if (c->prepare) c->prepare(c, &slots[i]);
    }
    int64_t calls = count, limit_calls = 1;
    time_calls(c, slots, count, 1, settings->now); // libraries make their objects
    if (device->seconds > 0) {
        calls = calls_together(count, time_calls(c, slots, count, count, settings->now));
        limit_calls = calls_together(1, time_limit(c->limit, 2, settings->now));
    }
    Timing best = {1e30, 1e30};
    for (int repeat = 0; repeat < settings->repeats; repeat++) {
        double limit_seconds = time_limit(c->limit, limit_calls, settings->now);
        double seconds = time_calls(c, slots, count, calls, settings->now);
        if (limit_seconds < best.limit_seconds) best.limit_seconds = limit_seconds;
        if (seconds < best.seconds) best.seconds = seconds;
    }
    backend->release(memory);
    return best;
}

static void measure_large_gemm(const Settings *settings) {
    int64_t calls = 1 + (int64_t)(settings->large_gemm / limit_work(LIMIT_LARGE_GEMM));
    for (int repeat = 0; repeat < settings->repeats; repeat++) {
        double seconds = time_limit(LIMIT_LARGE_GEMM, calls, settings->now);
        printf("large GEMM: %.6f s\n", seconds * settings->large_gemm / limit_work(LIMIT_LARGE_GEMM));
        fflush(stdout);
    }
}

static void report(FILE *json, const char *name, const char *shape, double work, double seconds, Limit limit,
                   double limit_rate, double required, const char *beside) {
    bool is_bytes = limit == LIMIT_MEMCPY;
    double rate = work / seconds;
    printf("%-32s %-17s %9.2f %-5s %9.3f %9.1f %9.1f %-14s %6.2f", name, shape, work / (is_bytes ? 1e6 : 1e9),
           is_bytes ? "MB" : "GFLOP", seconds * 1e3, rate / 1e9, limit_rate / 1e9, LIMIT_NAMES[limit],
           rate / limit_rate);
    if (required > 0) printf(" %9.2f %s", required, rate / limit_rate >= required ? "yes" : "no");
    printf("\n");
    fflush(stdout);
    if (!json) return;
    JsonWriter writer = {0};
    json_begin_object(&writer, NULL);
    json_write_string(&writer, "name", name);
    json_write_string(&writer, "shape", shape);
    json_write_string(&writer, "unit", is_bytes ? "bytes" : "flops");
    json_write_double(&writer, "work", work);
    json_write_double(&writer, "seconds", seconds);
    json_write_double(&writer, "per_second", rate);
    json_write_string(&writer, "limit", LIMIT_NAMES[limit]);
    json_write_double(&writer, "limit_per_second", limit_rate);
    json_write_double(&writer, "ratio", rate / limit_rate);
    json_write_double(&writer, "required", required);
    if (beside) json_write_string(&writer, "beside", beside);
    json_end_object(&writer);
    if (fprintf(json, "%s\n", writer.text) < 0 || fflush(json) != 0)
        die("the JSON file can't be written: is the disk full?");
    json_writer_free(&writer);
}

static void measure_all(const Settings *settings, FILE *json) {
    double model_flops = 0, model_seconds = 0, fastest_gemm = 0;
    int gemms = 0, gemms_measured = 0;
    printf("%-32s %-17s %15s %9s %9s %9s %-14s %6s %9s met\n", "operation", "shape", "work", "ms", "G/s", "limit", "",
           "ratio", "required");
    for (int i = 0; i < num_cases; i++) {
        const Case *c = &cases[i];
        gemms += c->run == run_gemm;
        if (settings->filter && !strstr(c->name, settings->filter)) continue;
        Timing timing = measure(c, settings);
        double limit_rate = limit_work(c->limit) / timing.limit_seconds;
        report(json, c->name, c->shape, c->work, timing.seconds, c->limit, limit_rate, c->required, c->beside);
        if (c->run != run_gemm) continue;
        gemms_measured++;
        model_flops += c->work * c->calls_per_step;
        model_seconds += timing.seconds * c->calls_per_step;
        if (limit_rate > fastest_gemm) fastest_gemm = limit_rate;
    }
    if (gemms_measured < gemms) return;
    report(json, "gemm: all of a training step", "", model_flops, model_seconds, LIMIT_LARGE_GEMM, fastest_gemm, 0,
           NULL);
}

static const Device *device_named(const char *name) {
    for (size_t i = 0; i < sizeof(DEVICES) / sizeof(DEVICES[0]); i++) {
        if (strcmp(DEVICES[i].name, name) == 0) return &DEVICES[i];
    }
    die("--device %s is unknown: choose cpu or cuda", name);
}

static Settings parse_options(int argc, char **argv) {
    Settings settings = {.repeats = 9, .now = seconds_now};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            settings.repeats = 3;
        } else if (strcmp(argv[i], "--processor-time") == 0) {
            settings.now = processor_seconds;
        } else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
            settings.json_path = argv[++i];
        } else if (strcmp(argv[i], "--batch-size") == 0 && i + 1 < argc) {
            B = atoll(argv[++i]);
            if (B < 1) die("--batch-size %s: give a number of sequences, 1 or more", argv[i]);
        } else if (strcmp(argv[i], "--large-gemm") == 0 && i + 1 < argc) {
            settings.large_gemm = atof(argv[++i]);
            if (!(settings.large_gemm > 0)) die("--large-gemm %s: give a number of FLOP, such as 1e12", argv[i]);
        } else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
            device = device_named(argv[++i]);
        } else if (argv[i][0] != '-' && !settings.filter) {
            settings.filter = argv[i];
        } else {
            die("%s is not an option of bench_ops: it takes [FILTER] [--device cpu|cuda] [--batch-size B] [--quick] "
                "[--json FILE] [--processor-time] [--large-gemm FLOP]",
                argv[i]);
        }
    }
    if (!on_cpu() && settings.now == processor_seconds) die("--processor-time is for --device cpu");
    if (settings.large_gemm > 0 && (settings.filter || settings.json_path)) {
        die("--large-gemm measures nothing else: leave out %s", settings.filter ? settings.filter : "--json");
    }
    if (B == 0) B = device->batch_size;
    BT = B * T;
    return settings;
}

static const Backend *backend_of_device(void) {
    if (on_cpu()) return backend_cpu();
#ifdef HAVE_CUDA
    Error error;
    const Backend *cuda = backend_cuda(MX_GEMM_AUTO, &error);
    if (!cuda) die("--device cuda: %s", error.message);
    return cuda;
#else
    die("--device cuda: this program was built without CUDA: install the toolkit and run make again");
#endif
}

int main(int argc, char **argv) {
    Settings settings = parse_options(argc, argv);
    char description[512];
    backend = backend_of_device();
    backend->describe(description, sizeof(description));
    printf("%s\n", description);
    FILE *json = settings.json_path ? fopen(settings.json_path, "w") : NULL;
    if (settings.json_path && !json)
        die("%s can't be written: give --json a file in a directory that is", settings.json_path);
    create_limits();
    add_cases();
    give_workspace();
    choose_large_gemm(settings.now);
    if (settings.large_gemm > 0) {
        measure_large_gemm(&settings);
    } else {
        measure_all(&settings, json);
    }
    if (json && fclose(json) != 0) die("%s can't be written: is the disk full?", settings.json_path);
    return 0;
}
