/*
How fast each operation of the CPU's backend is at GPT-2 124M's shapes, next to what limits it: the bytes it must move
at memcpy's speed, or its floating-point operations at that of a GEMM. Limit and operation are timed in turn, on the
same threads, and the best of each is taken. Buffers are rotated so that none is in cache when its turn comes.

    build/bench_ops [FILTER] [--quick] [--json FILE] [--processor-time]

FILTER: only operations whose name contains it. --processor-time counts the time that the threads ran, divided by their
number: what to look at where others use the machine too. It doesn't see threads that wait for each other.
*/
#include "../../llmc/cpu/cpu.h"
#include "../../llmc/gpt.h"
#include "../../llmc/json.h"
#include "../../llmc/recipe.h"
#include "../../llmc/util.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { B = 4, T = 1024, C = 768, NH = 12, HS = C / NH, L = 12, V = 50257, ROWS = B * T };
enum { ATTENTION_ROWS = 128 }; // query rows that attention multiplies at a time

// Larger than any last-level cache this is likely to meet.
static const size_t COLD_BYTES = 128 << 20;

enum { MAX_TENSORS = 3, MAX_VECTORS = 5 };

// The memory of one call: shapes with NULL data in a Case, placed in memory for a run.
typedef struct {
    Tensor tensor[MAX_TENSORS];
    float *vector[MAX_VECTORS];
    int64_t vector_length[MAX_VECTORS];
    int32_t *tokens; // below V
    int64_t num_tokens;
    QuantizedTensor rowwise, columnwise; // format FORMAT_FP32 (0): none
} Buffers;

typedef enum { LIMIT_MEMCPY, LIMIT_LARGE_GEMM, LIMIT_ATTENTION_GEMM, NUM_LIMITS } Limit;

typedef struct Case {
    char name[64], shape[40];
    double work; // bytes that a call must move, or its floating-point operations
    Limit limit;
    Buffers buffers;
    void (*prepare)(const struct Case *, const Buffers *); // gives inputs that random bits are no good for; may be NULL
    void (*run)(const struct Case *, const Buffers *);
    ScaleRounding rounding;
    SourceKind source; // of quantize
    GemmOptions gemm;
    double calls_per_step; // of a GEMM, in a training step of the model
} Case;

typedef struct {
    double seconds, limit_seconds; // best of a call, and of the limit's own call
} Timing;

static const Backend *backend;

// ---------------------------------------------------------------------------------------------------------------------
// Memory

static void *place(char *base, size_t *used, size_t bytes) {
    void *result = base ? base + *used : NULL;
    *used += (bytes + 63) / 64 * 64;
    return result;
}

static void place_quantized(QuantizedTensor *q, char *base, size_t *used) {
    if (!mx_is_mx(q->format)) return;
    void *memory = place(base, used, quantized_bytes(q->form, q->axis, q->rows, q->cols));
    *q = quantized_make(memory, q->format, q->axis, q->rows, q->cols, q->form);
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
    place_quantized(&b->rowwise, base, &used);
    place_quantized(&b->columnwise, base, &used);
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

static void fill_tokens(const Buffers *b) {
    for (int64_t i = 0; i < b->num_tokens; i++) {
        b->tokens[i] = (int32_t)(mix((uint64_t)i + 1) % V);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Limits. Each is one call, whose bytes or floating-point operations limit_work says.

static const char *const LIMIT_NAMES[NUM_LIMITS] = {"memcpy", "large GEMM", "128xTx64 GEMM"};

static struct {
    char *from, *to;
    size_t bytes; // of each
    Tensor x, w, y;
    uint16_t *qkv;
    char *scores; // of each thread
    size_t scores_bytes;
} limits;

static Format gemm_dtype(void) { return cpu_matmul_takes_bf16() ? FORMAT_BF16 : FORMAT_FP32; }

static void *random_memory(size_t bytes) {
    void *memory = backend->allocate(bytes);
    fill_random(memory, bytes);
    return memory;
}

static void create_limits(void) {
    size_t threads = (size_t)omp_get_max_threads(), part = 64 << 20;
    limits.bytes = threads * part;
    limits.from = random_memory(limits.bytes);
    limits.to = backend->allocate(limits.bytes);
    limits.x = tensor_make(random_memory(ROWS * C * 2), FORMAT_BF16, ROWS, C);
    limits.w = tensor_make(random_memory(4 * C * C * 2), FORMAT_BF16, 4 * C, C);
    limits.y = tensor_make(backend->allocate(ROWS * 4 * C * 2), FORMAT_BF16, ROWS, 4 * C);
    limits.qkv = random_memory((size_t)ROWS * 3 * C * dtype_size(gemm_dtype()));
    limits.scores_bytes = ATTENTION_ROWS * T * sizeof(float);
    limits.scores = random_memory(threads * limits.scores_bytes);
}

// In pieces: from some MB on, glibc's memcpy writes past the cache, which is slower on some machines.
enum { MEMCPY_PIECE = 16 << 10 };

static void run_memcpy(void) {
#pragma omp parallel
    {
        size_t part = limits.bytes / (size_t)omp_get_num_threads(), first = part * (size_t)omp_get_thread_num();
        for (size_t i = first; i < first + part; i += MEMCPY_PIECE) {
            memcpy(limits.to + i, limits.from + i, MEMCPY_PIECE);
        }
    }
}

static void run_large_gemm(void) {
    backend->gemm(limits.y, operand_tensor(limits.x), operand_tensor(limits.w), (GemmOptions){.transpose_b = true});
}

// Attention's two products of whole rows, one head of one sequence and 128 query rows at a time, with nothing between.
static void run_attention_gemm(void) {
    Format dtype = gemm_dtype();
    size_t size = dtype_size(dtype);
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int64_t b = 0; b < B; b++) {
        for (int64_t head = 0; head < NH; head++) {
            for (int64_t row = 0; row < T; row += ATTENTION_ROWS) {
                const char *keys = (char *)limits.qkv + (size_t)(b * T * 3 * C + C + head * HS) * size;
                const char *queries = keys - C * size + (size_t)(row * 3 * C) * size, *values = keys + C * size;
                char *scores = limits.scores + (size_t)omp_get_thread_num() * limits.scores_bytes;
                float out[ATTENTION_ROWS * HS];
                cpu_matmul(scores, queries, keys, NULL,
                           (CpuMatmul){ATTENTION_ROWS, T, HS, 3 * C, 3 * C, T, .transpose_b = true, .dtype = dtype,
                                       .d_dtype = FORMAT_FP32});
                cpu_matmul(out, scores, values, NULL,
                           (CpuMatmul){ATTENTION_ROWS, HS, T, T, 3 * C, HS, .dtype = dtype, .d_dtype = FORMAT_FP32});
            }
        }
    }
}

static void (*const RUN_LIMIT[NUM_LIMITS])(void) = {run_memcpy, run_large_gemm, run_attention_gemm};

static double limit_work(Limit limit) {
    if (limit == LIMIT_MEMCPY) return 2.0 * (double)limits.bytes;
    if (limit == LIMIT_LARGE_GEMM) return 2.0 * ROWS * 4 * C * C;
    return 2.0 * 2.0 * B * NH * T * T * HS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Operations

static void run_gemm(const Case *c, const Buffers *b) {
    backend->gemm(b->tensor[0], operand_tensor(b->tensor[1]), operand_tensor(b->tensor[2]), c->gemm);
}

static const AdamWOptions ADAMW = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, .gradient_scale = 1, .step = 10};

static void run_quantize(const Case *c, const Buffers *b) {
    Source in = source_tensor(b->tensor[0]);
    in.kind = c->source;
    if (c->source == SOURCE_GELU_BACKWARD) in.dout = in.stored = b->tensor[1];
    in.mean = b->vector[0];
    in.rstd = b->vector[1];
    in.weight = b->vector[2];
    in.bias = b->vector[3];
    if (c->source == SOURCE_ADAMW) {
        in.gradient = b->vector[0];
        in.moment1 = b->vector[1];
        in.moment2 = b->vector[2];
        in.adamw = ADAMW;
    }
    backend->quantize(mx_is_mx(b->rowwise.format) ? &b->rowwise : NULL,
                      mx_is_mx(b->columnwise.format) ? &b->columnwise : NULL, in, c->rounding);
}

static void run_dequantize(const Case *c, const Buffers *b) {
    (void)c;
    cpu_dequantize(b->tensor[0], mx_is_mx(b->rowwise.format) ? &b->rowwise : &b->columnwise, FORMAT_BF16);
}

static void run_convert(const Case *c, const Buffers *b) {
    (void)c;
    backend->convert(b->tensor[0], b->tensor[1]);
}

static void run_layernorm_forward(const Case *c, const Buffers *b) {
    (void)c;
    backend->layernorm_forward(b->tensor[0], (Tensor){0}, b->vector[0], b->vector[1], b->tensor[1], (Tensor){0},
                               b->vector[2], b->vector[3]);
}

static void run_layernorm_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->layernorm_backward(b->tensor[0], b->vector[3], b->vector[4], b->tensor[1], b->tensor[2], b->vector[2],
                                b->vector[0], b->vector[1]);
}

static void run_gelu_forward(const Case *c, const Buffers *b) {
    (void)c;
    backend->gelu_forward(b->tensor[0], b->tensor[1]);
}

static void run_gelu_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->gelu_backward(b->tensor[0], b->tensor[0], b->tensor[1]);
}

static void run_residual_layernorm(const Case *c, const Buffers *b) {
    (void)c;
    backend->layernorm_forward((Tensor){0}, b->tensor[0], b->vector[0], b->vector[1], b->tensor[1], b->tensor[2],
                               b->vector[2], b->vector[3]);
}

static void run_bias_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->bias_backward(b->vector[0], b->tensor[0]);
}

static void run_embedding_forward(const Case *c, const Buffers *b) {
    (void)c;
    backend->embedding_forward(b->tensor[0], b->tokens, b->tensor[1], b->tensor[2], T);
}

static void run_embedding_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->embedding_backward(b->vector[0], b->vector[1], b->tokens, b->tensor[0], T);
}

static void run_classifier(const Case *c, const Buffers *b) {
    (void)c;
    backend->classifier(b->vector[0], b->tensor[0], b->tensor[1], b->tokens, 1.0f / ROWS);
}

static void make_moments(const Case *c, const Buffers *b) {
    (void)c;
    for (int64_t i = 0; i < b->vector_length[2]; i++) {
        b->vector[2][i] = b->vector[2][i] * b->vector[2][i];
    }
}

static void run_adamw(const Case *c, const Buffers *b) {
    (void)c;
    backend->adamw(b->vector[0], b->vector[1], b->vector[2], b->vector[3], b->vector_length[0], ADAMW);
}

static void run_sum_of_squares(const Case *c, const Buffers *b) {
    (void)c;
    backend->sum_of_squares(b->vector[0], b->vector_length[0]);
}

static void run_attention_forward(const Case *c, const Buffers *b) {
    (void)c;
    backend->attention_forward(b->tensor[1], b->vector[0], b->tensor[2], B, T, NH);
}

static void run_attention_backward(const Case *c, const Buffers *b) {
    (void)c;
    backend->attention_backward(b->tensor[0], b->tensor[1], b->tensor[2], b->vector[0], B, T, NH);
}

// ---------------------------------------------------------------------------------------------------------------------
// The cases

enum { MAX_CASES = 128 };
static Case cases[MAX_CASES];
static int num_cases;

#define BF16(rows, cols) tensor_make(NULL, FORMAT_BF16, rows, cols)
#define FP32(rows, cols) tensor_make(NULL, FORMAT_FP32, rows, cols)

static Case *add_case(const char *name, int64_t rows, int64_t cols, double work, Limit limit,
                      void (*run)(const Case *, const Buffers *), Buffers buffers) {
    if (num_cases == MAX_CASES) die("internal error: more than %d operations to measure", MAX_CASES);
    Case *c = &cases[num_cases++];
    *c = (Case){.work = work, .limit = limit, .run = run, .buffers = buffers};
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

static void add_quantize(Tensor in, Format format, ScaleRounding rounding, bool rowwise, bool columnwise) {
    char name[64];
    snprintf(name, sizeof(name), "quantize %s %s %s%s",
             rowwise && columnwise ? "both"
             : rowwise             ? "rowwise"
                                   : "columnwise",
             format_name(format), scale_rounding_name(rounding), in.dtype == FORMAT_FP32 ? " of fp32" : "");
    Buffers buffers = {.tensor = {in}};
    if (rowwise) buffers.rowwise = quantized(format, AXIS_ROWWISE, in.rows, in.cols);
    if (columnwise) buffers.columnwise = quantized(format, AXIS_COLUMNWISE, in.rows, in.cols);
    double bytes = (double)dtype_size(in.dtype) + (1 + 1.0 / MX_BLOCK) * (rowwise + columnwise);
    add_elementwise(name, in.rows, in.cols, bytes, run_quantize, buffers)->rounding = rounding;
}

// Both copies of what is made on the way: what is read of the source, what it stores, and the copies.
static Case *add_made(const char *name, SourceKind source, int64_t cols, double bytes, Buffers buffers) {
    int64_t rows = buffers.tensor[0].rows;
    buffers.rowwise = quantized(FORMAT_E4M3, AXIS_ROWWISE, rows, cols);
    buffers.columnwise = quantized(FORMAT_E4M3, AXIS_COLUMNWISE, rows, cols);
    Case *c = add_elementwise(name, rows, cols, bytes + 2 * (1 + 1.0 / MX_BLOCK), run_quantize, buffers);
    c->source = source;
    return c;
}

static void add_made_quantizers(void) {
    add_made("layernorm, quantize both", SOURCE_LAYERNORM, C, 2 + 8.0 / C,
             (Buffers){.tensor = {BF16(ROWS, C)}, .vector_length = {ROWS, ROWS, C, C}});
    add_made("gelu, quantize both", SOURCE_GELU, 4 * C, 2, (Buffers){.tensor = {BF16(ROWS, 4 * C)}});
    add_made("gelu backward, quantize both", SOURCE_GELU_BACKWARD, 4 * C, 6,
             (Buffers){.tensor = {BF16(ROWS, 4 * C), BF16(ROWS, 4 * C)}});
    add_made("adamw, quantize both", SOURCE_ADAMW, C, 28,
             (Buffers){.tensor = {FP32(4 * C, C)}, .vector_length = {4 * C * C, 4 * C * C, 4 * C * C}})
        ->prepare = make_moments;
    Case *c = add_made("quantize both to bf16", SOURCE_TENSOR, 4 * C, 4, (Buffers){.tensor = {BF16(ROWS, 4 * C)}});
    c->buffers.rowwise.form = c->buffers.columnwise.form = FORM_DECODED;
}

static void add_quantizers(void) {
    for (int64_t cols = 4 * C; cols >= C; cols -= 3 * C) {
        for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++) {
            for (ScaleRounding rounding = 0; rounding < NUM_SCALE_ROUNDINGS; rounding++) {
                add_quantize(BF16(ROWS, cols), format, rounding, true, true);
            }
        }
        add_quantize(BF16(ROWS, cols), FORMAT_E4M3, SCALE_RCEIL, true, false);
        add_quantize(BF16(ROWS, cols), FORMAT_E4M3, SCALE_RCEIL, false, true);
    }
    add_quantize(FP32(4 * C, C), FORMAT_E4M3, SCALE_RCEIL, true, true);

    double bytes = 2 + 1 + 1.0 / MX_BLOCK;
    add_elementwise(
        "dequantize rowwise e4m3", ROWS, 4 * C, bytes, run_dequantize,
        (Buffers){.tensor = {BF16(ROWS, 4 * C)}, .rowwise = quantized(FORMAT_E4M3, AXIS_ROWWISE, ROWS, 4 * C)})
        ->prepare = run_quantize;
    add_elementwise(
        "dequantize columnwise e4m3", ROWS, 4 * C, bytes, run_dequantize,
        (Buffers){.tensor = {BF16(ROWS, 4 * C)}, .columnwise = quantized(FORMAT_E4M3, AXIS_COLUMNWISE, ROWS, 4 * C)})
        ->prepare = run_quantize;
}

static void add_rows_operations(Tensor logits, Tensor dlogits) {
    const double row_statistics = 8.0 / C; // mean and rstd, for each element
    add_elementwise("layernorm_forward", ROWS, C, 4 + row_statistics, run_layernorm_forward,
                    (Buffers){.tensor = {BF16(ROWS, C), BF16(ROWS, C)}, .vector_length = {ROWS, ROWS, C, C}});
    add_elementwise(
        "layernorm_backward", ROWS, C, 8 + row_statistics, run_layernorm_backward,
        (Buffers){.tensor = {BF16(ROWS, C), BF16(ROWS, C), BF16(ROWS, C)}, .vector_length = {ROWS, ROWS, C, C, C}});
    Buffers two = {.tensor = {BF16(ROWS, 4 * C), BF16(ROWS, 4 * C)}};
    add_elementwise("gelu_forward", ROWS, 4 * C, 4, run_gelu_forward, two);
    add_elementwise("gelu_backward", ROWS, 4 * C, 6, run_gelu_backward, two);
    add_elementwise(
        "residual, layernorm statistics", ROWS, C, 6 + row_statistics, run_residual_layernorm,
        (Buffers){.tensor = {BF16(ROWS, C), BF16(ROWS, C), BF16(ROWS, C)}, .vector_length = {ROWS, ROWS, C, C}});
    for (int64_t cols = C; cols <= 4 * C; cols += 3 * C) {
        add_elementwise("bias_backward", ROWS, cols, 2, run_bias_backward,
                        (Buffers){.tensor = {BF16(ROWS, cols)}, .vector_length = {cols}});
    }
    // A token's row of wte, a position's of wpe once for all sequences; backward reads and writes FP32.
    add_elementwise("embedding_forward", ROWS, C, 2 + 2 + 2.0 / B, run_embedding_forward,
                    (Buffers){.tensor = {BF16(ROWS, C), BF16(V, C), BF16(T, C)}, .num_tokens = ROWS});
    add_elementwise("embedding_backward", ROWS, C, 2 + 8 + 8.0 / B, run_embedding_backward,
                    (Buffers){.tensor = {BF16(ROWS, C)}, .vector_length = {V * C, T * C}, .num_tokens = ROWS});
    add_elementwise("classifier", logits.rows, V, 4 + 2, run_classifier,
                    (Buffers){.tensor = {dlogits, logits}, .vector_length = {logits.rows}, .num_tokens = logits.rows});
}

static void add_parameter_operations(void) {
    enum { COUNT = 16 << 20 };
    add_case("adamw", COUNT, 0, 28.0 * COUNT, LIMIT_MEMCPY, run_adamw,
             (Buffers){.vector_length = {COUNT, COUNT, COUNT, COUNT}})
        ->prepare = make_moments;
    add_case("sum_of_squares", COUNT, 0, 4.0 * COUNT, LIMIT_MEMCPY, run_sum_of_squares,
             (Buffers){.vector_length = {COUNT}});
    add_elementwise("convert fp32 to bf16", 4 * C, C, 6, run_convert,
                    (Buffers){.tensor = {BF16(4 * C, C), FP32(4 * C, C)}});
}

static void add_gemm(const char *layer, const char *pass, Tensor d, Tensor a, Tensor b, GemmOptions options,
                     double calls_per_step) {
    char name[64];
    int64_t K = options.transpose_a ? a.rows : a.cols;
    snprintf(name, sizeof(name), "gemm %s %s", layer, pass);
    Case *c = add_case(name, 0, 0, 2.0 * (double)d.rows * (double)d.cols * (double)K, LIMIT_LARGE_GEMM, run_gemm,
                       (Buffers){.tensor = {d, a, b}});
    snprintf(c->shape, sizeof(c->shape), "%lldx%lldx%lld", (long long)d.rows, (long long)d.cols, (long long)K);
    c->gemm = options;
    c->calls_per_step = calls_per_step;
}

// A linear layer's three GEMMs. x (rows, K), w (N, K), y (rows, N).
static void add_linear(const char *layer, Tensor x, Tensor w, Tensor y, Tensor dy, double calls_per_step) {
    add_gemm(layer, "fprop", y, x, w, (GemmOptions){.transpose_b = true}, calls_per_step);
    add_gemm(layer, "dgrad", x, dy, w, (GemmOptions){0}, calls_per_step);
    add_gemm(layer, "wgrad", FP32(w.rows, w.cols), dy, x, (GemmOptions){.transpose_a = true, .accumulate = true},
             calls_per_step);
}

static void add_gemms(Tensor logits, Tensor dlogits) {
    const struct {
        const char *name;
        int64_t N, K;
    } layers[LINEARS_PER_BLOCK] = {{"qkv", 3 * C, C}, {"projection", C, C}, {"up", 4 * C, C}, {"down", C, 4 * C}};
    for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
        Tensor y = BF16(ROWS, layers[i].N);
        add_linear(layers[i].name, BF16(ROWS, layers[i].K), BF16(layers[i].N, layers[i].K), y, y, L);
    }
    add_linear("head", BF16(logits.rows, C), BF16(V, C), logits, dlogits, (double)ROWS / (double)logits.rows);
}

// The causal half of two products forward and five backward, which recomputes the scores.
static void add_attention(void) {
    const double product = (double)B * NH * T * T * HS;
    Buffers buffers = {.tensor = {BF16(ROWS, 3 * C), BF16(ROWS, C), BF16(ROWS, 3 * C)}, .vector_length = {ROWS * NH}};
    for (Limit limit = LIMIT_ATTENTION_GEMM; limit >= LIMIT_LARGE_GEMM; limit--) {
        add_case("attention_forward", ROWS, C, 2 * product, limit, run_attention_forward, buffers);
        add_case("attention_backward", ROWS, C, 5 * product, limit, run_attention_backward, buffers)->prepare =
            run_attention_forward;
    }
}

static void add_cases(void) {
    Recipe recipe;
    Error error;
    GPT probe; // of the shape that decides how many tokens the LM head takes at a time
    if (!recipe_named(&recipe, "bf16", &error)) die("%s", error.message);
    gpt_create(&probe, (GPTConfig){1, 1, 1, T, V}, &recipe, backend, B, T, true);
    add_quantizers();
    add_made_quantizers();
    Tensor logits = probe.logits, dlogits = probe.dlogits;
    logits.data = dlogits.data = NULL;
    add_rows_operations(logits, dlogits);
    add_parameter_operations();
    add_attention();
    add_gemms(logits, dlogits);
    gpt_free(&probe);
}

// ---------------------------------------------------------------------------------------------------------------------
// Measuring

typedef struct {
    const char *filter, *json_path;
    int repeats;
    double (*now)(void);
} Settings;

static double processor_seconds(void) {
    struct timespec time;
    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) != 0) die("this system has no clock of a process's time");
    return ((double)time.tv_sec + 1e-9 * (double)time.tv_nsec) / omp_get_max_threads();
}

static void give_workspace(void) {
    size_t bytes = backend->attention_workspace(FORMAT_BF16, B, T, NH, HS);
    for (int i = 0; i < num_cases; i++) {
        const Tensor *t = cases[i].buffers.tensor;
        size_t needed =
            cases[i].run == run_gemm ? backend->gemm_workspace(operand_tensor(t[1]), operand_tensor(t[2])) : 0;
        bytes = needed > bytes ? needed : bytes;
    }
    backend->use_workspace(backend->allocate(bytes), bytes);
}

// The best of a few turns. Calls of a memory-bound operation go through as many buffers as the cache can't hold.
static Timing measure(const Case *c, const Settings *settings) {
    enum { MAX_SLOTS = 64 };
    static Buffers slots[MAX_SLOTS];
    Buffers shapes = c->buffers;
    size_t bytes = place_buffers(&shapes, NULL);
    int count = c->limit == LIMIT_MEMCPY ? (int)((COLD_BYTES + bytes - 1) / bytes) : 1;
    count = count > MAX_SLOTS ? MAX_SLOTS : count;
    char *memory = random_memory(bytes * (size_t)count);
    for (int i = 0; i < count; i++) {
        slots[i] = c->buffers;
        place_buffers(&slots[i], memory + bytes * (size_t)i);
        fill_tokens(&slots[i]);
        if (c->prepare) c->prepare(c, &slots[i]);
    }
    c->run(c, &slots[0]); // libraries make their objects

    Timing best = {1e30, 1e30};
    for (int repeat = 0; repeat < settings->repeats; repeat++) {
        double start = settings->now();
        RUN_LIMIT[c->limit]();
        double middle = settings->now();
        for (int i = 0; i < count; i++) {
            c->run(c, &slots[i]);
        }
        double end = settings->now();
        if (middle - start < best.limit_seconds) best.limit_seconds = middle - start;
        if ((end - middle) / count < best.seconds) best.seconds = (end - middle) / count;
    }
    backend->release(memory);
    return best;
}

static void report(FILE *json, const char *name, const char *shape, double work, double seconds, Limit limit,
                   double limit_rate) {
    bool is_bytes = limit == LIMIT_MEMCPY;
    double rate = work / seconds;
    printf("%-32s %-16s %9.2f %-5s %9.3f %9.1f %9.1f %-14s %6.2f\n", name, shape, work / (is_bytes ? 1e6 : 1e9),
           is_bytes ? "MB" : "GFLOP", seconds * 1e3, rate / 1e9, limit_rate / 1e9, LIMIT_NAMES[limit],
           rate / limit_rate);
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
    json_end_object(&writer);
    if (fprintf(json, "%s\n", writer.text) < 0) die("the JSON file can't be written: is the disk full?");
    json_writer_free(&writer);
}

static void measure_all(const Settings *settings, FILE *json) {
    double model_flops = 0, model_seconds = 0, fastest_gemm = 0;
    int gemms = 0, gemms_measured = 0;
    printf("%-32s %-16s %15s %9s %9s %9s %-14s %6s\n", "operation", "shape", "work", "ms", "G/s", "limit", "", "ratio");
    for (int i = 0; i < num_cases; i++) {
        const Case *c = &cases[i];
        gemms += c->run == run_gemm;
        if (settings->filter && !strstr(c->name, settings->filter)) continue;
        Timing timing = measure(c, settings);
        double limit_rate = limit_work(c->limit) / timing.limit_seconds;
        report(json, c->name, c->shape, c->work, timing.seconds, c->limit, limit_rate);
        if (c->run != run_gemm) continue;
        gemms_measured++;
        model_flops += c->work * c->calls_per_step;
        model_seconds += timing.seconds * c->calls_per_step;
        if (limit_rate > fastest_gemm) fastest_gemm = limit_rate;
    }
    if (gemms_measured < gemms) return;
    report(json, "gemm: all of a training step", "", model_flops, model_seconds, LIMIT_LARGE_GEMM, fastest_gemm);
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
        } else if (argv[i][0] != '-' && !settings.filter) {
            settings.filter = argv[i];
        } else {
            die("%s is not an option of bench_ops: it takes [FILTER] [--quick] [--json FILE] [--processor-time]",
                argv[i]);
        }
    }
    return settings;
}

int main(int argc, char **argv) {
    Settings settings = parse_options(argc, argv);
    char device[512];
    backend = backend_cpu();
    backend->describe(device, sizeof(device));
    printf("%s\n", device);
    FILE *json = settings.json_path ? fopen(settings.json_path, "w") : NULL;
    if (settings.json_path && !json)
        die("%s can't be written: give --json a file in a directory that is", settings.json_path);
    create_limits();
    add_cases();
    give_workspace();
    measure_all(&settings, json);
    if (json && fclose(json) != 0) die("%s can't be written: is the disk full?", settings.json_path);
    return 0;
}
