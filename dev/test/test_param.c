/*
Parameters over many ranks against one rank that has them all: what every rank holds after a refresh
and after an update is the same bytes, and a rank's masters, moments and gradients are its rows of
them. Under mpirun, on that many ranks.

Gradients are small integers, so that their sums over ranks and micro-batches are exact in any
order, in BF16 too. Memory is filled with bytes that differ from rank to rank before anything is
placed in it: what nobody has sent shows.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "llmc/model/exchange.h"
#include "llmc/model/linear.h"
#include "llmc/model/optimizer.h"

static Comm *comm;
static const Backend *backend;

static const int64_t ROWS[] = {1, 31, 32, 33, 95, 96, 257}, COLS[] = {48, 65, 96};
enum { NUM_ROWS = sizeof(ROWS) / sizeof(ROWS[0]), NUM_COLS = sizeof(COLS) / sizeof(COLS[0]), LAYERS = 4 };

typedef struct {
    int zero;
    Gather gather;
    Format reduce;
    int64_t micro_batches;
    int steps;
    bool muon;
    bool has_nan; // the first master of each parameter, which is the first rank's, is NaN
    int64_t unit; // of shards, where it isn't MX_BLOCK
} Case;

typedef struct {
    ParamList list;
    MemoryPlan plan;
} Laid;

// -------------------------------------------------------------------------------------------------
// Lists of parameters, the same for one rank and for many

enum { MAX_PARAMS = 256 };

static void add(ParamList *list, Param p) {
    if (!list->params) param_list_reserve(list, MAX_PARAMS);
    param_list_add(list, p);
}

static void add_matrix(ParamList *list, int64_t rows, int64_t cols, const Recipe *recipe, int64_t layer) {
    Param p = {.rows = rows, .cols = cols, .layer = layer, .number = list->count};
    snprintf(p.name, sizeof(p.name), "%d: %lld x %lld", list->count, (long long)rows, (long long)cols);
    linear_declare_weight(&p, recipe);
    add(list, p);
}

static void add_vector(ParamList *list, int64_t cols) {
    Param p = {.name = "vector", .rows = 1, .cols = cols, .layer = -1, .is_vector = true};
    add(list, p);
}

// Elements are rounded stochastically under every second rounding of scales.
static Recipe weights_in(Format fprop, Format dgrad, ScaleRounding rounding, bool square) {
    Recipe recipe = {.name = "test", .activation_dtype = FORMAT_BF16, .square_weights = square};
    recipe.format[FPROP_W] = fprop;
    recipe.format[DGRAD_W] = dgrad;
    recipe.rounding[ROLE_WEIGHTS] = rounding;
    recipe.element_rounding[ROLE_WEIGHTS] = rounding % 2 ? ROUND_STOCHASTIC : ROUND_NEAREST;
    return recipe;
}

// Every shape, in one format and rounding: for both GEMMs, for one of them with BF16 for the other,
// and with a BF16 copy beside them, in turn. Then what is never MX: an embedding, a weight that a
// GEMM takes in FP32, a vector.
static void add_all_shapes(ParamList *list, Format format, ScaleRounding rounding, bool square) {
    for (int i = 0; i < NUM_ROWS * NUM_COLS; i++) {
        int kind = (i + (int)format + (int)rounding) % 5;
        Recipe recipe =
            weights_in(kind == 3 ? FORMAT_BF16 : format, kind == 4 ? FORMAT_BF16 : format, rounding, square);
        add_matrix(list, ROWS[i / NUM_COLS], COLS[i % NUM_COLS], &recipe, -1);
        if (kind == 2) list->params[list->count - 1].has_bf16_value = true;
    }
    Recipe bf16 = weights_in(FORMAT_BF16, FORMAT_BF16, rounding, square);
    Recipe fp32 = weights_in(format, FORMAT_FP32, rounding, square);
    add_matrix(list, 97, 65, &bf16, -1);
    add_matrix(list, 97, 65, &fp32, -1);
    add_vector(list, 301);
}

// Layers of the same parameters, and others around them. The vector is longer than what an
// all-reduce sends whole.
static void add_layers(ParamList *list, bool square) {
    Recipe mx = weights_in(FORMAT_E4M3, FORMAT_E4M3, SCALE_RCEIL, square);
    Recipe bf16 = weights_in(FORMAT_BF16, FORMAT_BF16, SCALE_RCEIL, square);
    add_matrix(list, 65, 48, &bf16, -1);
    for (int layer = 0; layer < LAYERS; layer++) {
        const Recipe *recipe = layer == 1 ? &bf16 : &mx;
        add_vector(list, 48);
        add_matrix(list, 257, 48, recipe, layer);
        memcpy(list->params[list->count - 1].stacked, (int64_t[]){100, 100, 57}, 3 * sizeof(int64_t));
        add_matrix(list, 96, 65, recipe, layer);
        add_matrix(list, 31, 96, recipe, layer);
    }
    add_vector(list, 9000);
}

// 32 bits that look random: products by odd numbers, high bits into low ones. Philox would take
// most of the test's time.
static uint32_t mix(int stream, int64_t index) {
    uint32_t h = ((uint32_t)stream * 0x9E3779B1u + (uint32_t)index) * 0x9E3779B1u;
    h = (h ^ h >> 15) * 0xAC564B05u;
    h = (h ^ h >> 16) * 0x9E3779B1u;
    return h ^ h >> 15;
}

// Values of both signs, whose magnitudes differ from block to block, some blocks of zeros.
static float master_value(int param, int64_t row, int64_t col) {
    int exponent = (int)(mix(param, row / MX_BLOCK * 64 + col / MX_BLOCK) % 24) - 12;
    float value = (float)(int32_t)mix(1000 + param, row * 1024 + col) * 0x1p-31f;
    return exponent == 11 ? 0 : value * mx_bits_float((uint32_t)(127 + exponent) << 23);
}

static void lay_out(Laid *laid, const Sharding *sharding, int junk, bool has_nan) {
    laid->list.sharding = *sharding;
    for (int pass = 0; pass < 2; pass++) {
        MemoryPlan plan = {.base = pass ? backend->allocate(laid->plan.used) : NULL};
        if (pass) memset(plan.base, junk, laid->plan.used);
        param_list_layout(&laid->list, &plan, backend, true);
        assert_true(pass == 0 || plan.used == laid->plan.used);
        laid->plan = plan;
    }
    memset(laid->list.gradients, 0, (size_t)laid->list.gradients_count * sizeof(float));
    for (int i = 0; i < laid->list.count; i++) {
        const Param *p = &laid->list.params[i];
        for (int64_t j = 0; j < p->num_rows * p->cols; j++) {
            p->master[j] = master_value(i, p->first_row + j / p->cols, j % p->cols);
            p->moment1[j] = 0;
            if (p->moment2) p->moment2[j] = 0;
        }
        if (has_nan && p->first_row == 0 && p->num_rows > 0) p->master[0] = NAN;
    }
}

static void release(Laid *laid) {
    backend->release(laid->plan.base);
    param_list_free(&laid->list);
}

// -------------------------------------------------------------------------------------------------
// Comparison

static void check_bytes(const void *found, const void *expected, size_t bytes, const char *what, const Param *p) {
    const uint8_t *a = found, *b = expected;
    for (size_t i = 0; i < bytes; i++) {
        if (a[i] != b[i]) {
            fail_msg("rank %d of %d, %s, %s: byte %zu of %zu is 0x%02X, not 0x%02X", comm->rank, comm->size, p->name,
                     what, i, bytes, a[i], b[i]);
        }
    }
}

static void check_copy(const QuantizedTensor *found, const QuantizedTensor *expected, const char *what,
                       const Param *p) {
    assert_int_equal(found->format, expected->format);
    assert_int_equal(found->axis, expected->axis);
    assert_true((found->elements != NULL) == (expected->elements != NULL));
    if (!found->elements) return;
    char scales[64];
    snprintf(scales, sizeof(scales), "%s copy's scales", what);
    size_t bytes = scaled_scale_bytes(found->scaling, FORM_PLAIN, found->axis, p->rows, p->cols);
    check_bytes(found->scales, expected->scales, bytes, scales, p);
    if (expected->factor) check_bytes(found->factor, expected->factor, sizeof(float), "factor", p);
    check_bytes(found->elements, expected->elements, (size_t)(p->rows * p->cols), what, p);
}

// A copy of `values`, made in one call.
static QuantizedTensor whole_copy(const QuantizedTensor *like, Tensor values, ScaleRounding rounding) {
    QuantizedTensor copy = *like;
    if (!like->elements) return copy;
    size_t bytes = scaled_bytes(like->scaling, FORM_PLAIN, like->axis, values.rows, values.cols);
    uint8_t *memory = allocate(bytes + MEMORY_ALIGNMENT); // the factor behind it
    copy = quantized_make(memory, like->format, like->axis, values.rows, values.cols, FORM_PLAIN);
    copy.scaling = like->scaling;
    copy.factor = like->factor ? (float *)(memory + (bytes + 3) / 4 * 4) : NULL;
    copy.encoding = like->encoding;
    bool columnwise = like->axis == AXIS_COLUMNWISE;
    backend->quantize(columnwise ? NULL : &copy, columnwise ? &copy : NULL, source_tensor(values), rounding);
    return copy;
}

// What all ranks hold against what the masters of one rank give, and against what one rank holds.
// `by_bf16`: by way of their BF16 values, of which one rank's copies are made again.
static void check_copies(const Param *p, const ParamList *list_alone, const Param *alone, bool by_bf16) {
    Tensor values = tensor_make(alone->master, FORMAT_FP32, p->rows, p->cols);
    uint16_t *bf16 = allocate((size_t)param_count(p) * sizeof(*bf16));
    for (int64_t i = 0; i < param_count(p); i++) {
        bf16[i] = mx_to_bf16(alone->master[i]);
    }
    if (by_bf16) values = tensor_make(bf16, FORMAT_BF16, p->rows, p->cols);
    QuantizedTensor rowwise = whole_copy(&p->rowwise, values, p->rounding);
    QuantizedTensor columnwise = whole_copy(&p->columnwise, values, p->rounding);
    bool is_of_values = !p->from_forward && !p->hadamard[GEMM_FPROP].size && !p->hadamard[GEMM_DGRAD].size;
    if (is_of_values) check_copy(&p->rowwise, &rowwise, "rowwise", p);
    if (is_of_values) check_copy(&p->columnwise, &columnwise, "columnwise", p);
    ParamCopies copies = param_mx_copies(alone);
    if (by_bf16) param_quantize_copies(list_alone, alone, backend, &copies, values);
    check_copy(&p->rowwise, &alone->rowwise, "rowwise", p);
    check_copy(&p->columnwise, &alone->columnwise, "columnwise", p);
    if (p->square_copies && mx_is_mx(p->rowwise.format) && mx_is_mx(p->columnwise.format)) {
        assert_ptr_equal(p->rowwise.elements, p->columnwise.elements);
        assert_ptr_equal(p->rowwise.scales, p->columnwise.scales);
    }
    if (p->value.dtype == FORMAT_BF16) {
        check_bytes(p->value.data, bf16, (size_t)param_count(p) * sizeof(*bf16), "BF16 value", p);
    }
    if (rowwise.elements) free(rowwise.elements);
    if (columnwise.elements) free(columnwise.elements);
    free(bf16);
}

static void check_rows(const Param *p, const float *found, const float *alone, const char *what) {
    size_t bytes = (size_t)(p->num_rows * p->cols) * sizeof(float);
    check_bytes(found, alone + p->first_row * p->cols, bytes, what, p);
}

static void check_lists(const Laid *ours, const Laid *alone, const Case *c) {
    for (int64_t layer = -1; layer < LAYERS; layer++) {
        exchange_await(&ours->list, AXIS_ROWWISE, layer);
        exchange_await(&ours->list, AXIS_COLUMNWISE, layer);
    }
    for (int i = 0; i < ours->list.count; i++) {
        const Param *p = &ours->list.params[i], *whole = &alone->list.params[i];
        check_rows(p, p->master, whole->master, "masters");
        check_rows(p, p->moment1, whole->moment1, "first moments");
        assert_true((p->moment2 == NULL) == muon_takes(&ours->list, p));
        if (p->moment2) check_rows(p, p->moment2, whole->moment2, "second moments");
        check_copies(p, &alone->list, whole, p->is_sharded && c->gather == GATHER_BF16);
    }
}

// Every matrix but those that are used in FP32 is sharded, in whole blocks or groups; all have all
// rows between them.
static void check_shards(const Laid *ours, const Laid *alone, const Case *c) {
    int64_t own = 0, unit = c->unit ? c->unit : MX_BLOCK;
    for (int i = 0; i < ours->list.count; i++) {
        const Param *p = &ours->list.params[i];
        bool sharded = comm->size > 1 && c->zero > 0 && !p->is_vector && !p->needs_fp32;
        assert_int_equal(p->is_sharded, sharded);
        bool last = p->first_row + p->num_rows == p->rows;
        assert_true(!sharded || p->num_rows == 0 || (p->first_row % unit == 0 && (last || p->num_rows % unit == 0)));
        double rows = (double)p->num_rows;
        comm_sum_doubles(comm, &rows, 1);
        assert_true(rows == (double)(p->rows * (sharded ? 1 : comm->size)));
        own += p->num_rows * p->cols;
    }
    size_t masters = ours->plan.by_kind[MEMORY_MASTERS], slack = (size_t)ours->list.count * MEMORY_ALIGNMENT;
    assert_true(masters >= (size_t)own * sizeof(float) && masters <= (size_t)own * sizeof(float) + slack);
    assert_true(comm->size == 1 || c->zero == 0 || c->unit || masters < alone->plan.by_kind[MEMORY_MASTERS]);
}

// -------------------------------------------------------------------------------------------------
// A step

// -8 to 7.
static float gradient_value(int rank, int64_t micro, int param, int64_t index, int step) {
    return (float)((int)(mix(((rank * 8 + (int)micro) * 8 + step) * 64 + param, index) >> 28) - 8);
}

static void add_gradients(const ParamList *list, int rank, int64_t micro, int64_t layer, int step) {
    for (int i = 0; i < list->count; i++) {
        Param *p = &list->params[i];
        if (p->layer != layer) continue;
        for (int64_t j = 0; j < param_count(p); j++) {
            float value = gradient_value(rank, micro, i, j, step);
            p->gradient[j] = p->gradient_is_stale ? value : p->gradient[j] + value;
        }
        p->gradient_is_stale = false;
    }
}

// As the model does it: layers backwards, then the rest; each rank its own micro-batches.
static void make_gradients(Laid *ours, Laid *alone, const Case *c, int step) {
    param_list_clear_gradients(&ours->list, backend);
    param_list_clear_gradients(&alone->list, backend);
    for (int64_t micro = 0; micro < c->micro_batches; micro++) {
        ours->list.is_last_micro_batch = micro + 1 == c->micro_batches;
        for (int64_t layer = LAYERS - 1; layer >= -1; layer--) {
            add_gradients(&ours->list, comm->rank, micro, layer, step);
            if (layer >= 0) exchange_reduce_layer(&ours->list, backend, layer);
            for (int rank = 0; rank < comm->size; rank++) {
                add_gradients(&alone->list, rank, micro, layer, step);
            }
        }
    }
    exchange_reduce(&ours->list);
    for (int i = 0; i < ours->list.count; i++) {
        const Param *p = &ours->list.params[i];
        check_rows(p, p->own_gradient, alone->list.params[i].gradient, "gradient");
    }
    // Squares of integers: exact sums.
    double norm = optimizer_gradient_norm(&ours->list, backend);
    assert_true(norm > 0 && norm == optimizer_gradient_norm(&alone->list, backend));
}

// What is planned is the mean over ranks for what is replicated, and exact for what is sharded.
static void check_wire_bytes(const Laid *ours, const Case *c, int64_t gradients_sent, int64_t weights_sent) {
    WireBytes planned = exchange_wire_bytes(&ours->list, c->micro_batches);
    double weights = comm->size > 1 && c->zero > 0 ? planned.weights[c->gather] : 0;
    assert_true((double)weights_sent == weights);
    double sums[] = {(double)gradients_sent, comm->size > 1 ? planned.gradients : 0};
    comm_sum_doubles(comm, sums, 2);
    if (fabs(sums[0] - sums[1]) > 1e-9 * sums[1]) {
        fail_msg("%d ranks: %.0f bytes of gradients were sent, and %.0f planned", comm->size, sums[0], sums[1]);
    }
}

static void check_case(Laid *ours, Laid *alone, const Case *c) {
    Sharding sharding = {
        .comm = comm, .zero = c->zero, .gather = c->gather, .unit = c->unit, .reduce = c->reduce, .muon = c->muon};
    Sharding single = sharding_single();
    single.muon = c->muon;
    lay_out(ours, &sharding, 0x51 + comm->rank, c->has_nan);
    lay_out(alone, &single, 0x77, c->has_nan);
    check_shards(ours, alone, c);
    param_list_set_draws(&alone->list, 11, 0);
    param_list_set_draws(&ours->list, 11, 0);
    param_list_refresh(&alone->list, backend);
    param_list_refresh(&ours->list, backend);
    check_lists(ours, alone, c);
    OptimizerOptions options = {
        .learning_rate = 0.02, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_clip = 1};
    options.muon = (MuonOptions){.learning_rate = 0.02, .momentum = 0.95, .weight_decay = 0.1};
    const double norm_of_all = 16; // as if: gradients are clipped to a sixteenth
    for (options.step = 1; options.step <= c->steps; options.step++) {
        int64_t start = comm->bytes_sent;
        make_gradients(ours, alone, c, (int)options.step);
        int64_t norm = c->zero > 0 && ours->list.replicated_count < ours->list.gradients_count;
        int64_t gradients_sent = comm->bytes_sent - start - norm * (comm->size - 1) * (int64_t)sizeof(double);
        start = comm->bytes_sent;
        optimizer_step(&alone->list, backend, options, norm_of_all);
        optimizer_step(&ours->list, backend, options, norm_of_all);
        int64_t norms = c->muon ? ours->list.count * MAX_PARAM_PARTS : 0;
        int64_t weights_sent = comm->bytes_sent - start - norms * (comm->size - 1) * (int64_t)sizeof(double);
        check_lists(ours, alone, c);
        check_wire_bytes(ours, c, gradients_sent, weights_sent);
    }
    release(ours);
    release(alone);
}

// -------------------------------------------------------------------------------------------------

static void check_formats(Gather gather, bool square) {
    int cases = 0;
    for (Format format = FIRST_MX_FORMAT; format < NUM_FORMATS; format++) {
        for (ScaleRounding rounding = SCALE_RCEIL; rounding < NUM_SCALE_ROUNDINGS; rounding++) {
            Laid ours = {0}, alone = {0};
            add_all_shapes(&ours.list, format, rounding, square);
            add_all_shapes(&alone.list, format, rounding, square);
            Case c = {.zero = 1, .gather = gather, .reduce = FORMAT_FP32, .micro_batches = 1, .steps = 1};
            // A vector as short as a real model's norms goes another way, and would be counted
            // otherwise.
            add_vector(&ours.list, 9000);
            add_vector(&alone.list, 9000);
            check_case(&ours, &alone, &c);
            cases++;
        }
    }
    print_message("%d ranks: %d formats and roundings, %d shapes\n", comm->size, cases, NUM_ROWS * NUM_COLS);
}

static void test_gather_mx(void **state) {
    (void)state;
    check_formats(GATHER_MX, false);
}

static void test_gather_mx_square(void **state) {
    (void)state;
    check_formats(GATHER_MX, true);
}

static void test_gather_fp32(void **state) {
    (void)state;
    check_formats(GATHER_FP32, false);
}

static void test_gather_fp32_square(void **state) {
    (void)state;
    check_formats(GATHER_FP32, true);
}

static void test_gather_bf16(void **state) {
    (void)state;
    check_formats(GATHER_BF16, false);
}

static void test_gather_bf16_square(void **state) {
    (void)state;
    check_formats(GATHER_BF16, true);
}

// What else there is to say of a recipe's weights.
typedef struct {
    Scaling fprop, dgrad;
    bool square, from_forward;
    int64_t hadamard_size; // of dgrad's transform
    int64_t unit;          // rows that stay together
} Scaled;

static Recipe scaled_weights(const Scaled *s, ElementRounding rounding) {
    Recipe recipe = {.name = "test",
                     .format = {[FPROP_W] = scaling_is_nvfp4(s->fprop) ? FORMAT_E2M1 : FORMAT_E4M3,
                                [DGRAD_W] = scaling_is_nvfp4(s->dgrad) ? FORMAT_E2M1 : FORMAT_E4M3},
                     .scaling = {[FPROP_W] = s->fprop, [DGRAD_W] = s->dgrad},
                     .square_weights = s->square,
                     .from_forward = s->from_forward,
                     .element_rounding = {[ROLE_WEIGHTS] = rounding},
                     .hadamard_size = s->hadamard_size,
                     .activation_dtype = FORMAT_BF16};
    recipe.transform[GEMM_DGRAD] = s->hadamard_size ? TRANSFORM_RANDOM : TRANSFORM_NONE;
    return recipe;
}

// Weights with fewer rows than a block, whole blocks, and tails; one of BF16 and a vector beside
// them.
static void add_scaled_shapes(ParamList *list, const Recipe *recipe) {
    static const int64_t SCALED_ROWS[] = {1, 31, 64, 128, 129, 300, 513}, SCALED_COLS[] = {48, 65, 136};
    Recipe bf16 = weights_in(FORMAT_BF16, FORMAT_BF16, SCALE_RCEIL, recipe->square_weights);
    for (int i = 0; i < 7 * 3; i++) {
        add_matrix(list, SCALED_ROWS[i / 3], SCALED_COLS[i % 3], recipe, i / 7);
    }
    Recipe forward = *recipe, backward = *recipe;
    forward.format[DGRAD_W] = backward.format[FPROP_W] = FORMAT_BF16;
    add_matrix(list, 300, 65, &forward, 3);
    add_matrix(list, 300, 65, &backward, 3);
    add_matrix(list, 200, 65, &bf16, -1);
    add_vector(list, 9000);
}

// Scalings that aren't MX, each alone and beside MX; factors of amaxes that ranks share, of
// transforms and of what the forward pass' copy decodes to; and of masters one of which is NaN,
// whose factor is NaN on ranks that have other rows too.
static void test_scalings(void **state) {
    (void)state;
    static const Scaled CASES[] = {
        {SCALING_TENSOR, SCALING_TENSOR, true, false, 0, 32},
        {SCALING_TENSOR, SCALING_TENSOR, false, false, 0, 32},
        {SCALING_TENSOR, SCALING_TENSOR, false, true, 64, 64},
        {SCALING_BLOCK128, SCALING_BLOCK128, true, false, 0, 128},
        {SCALING_BLOCK128, SCALING_BLOCK128, false, true, 0, 128},
        {SCALING_BLOCK128_FP32, SCALING_BLOCK128_FP32, true, false, 0, 128},
        {SCALING_BLOCK128_FP32, SCALING_MX, false, false, 0, 32},
        {SCALING_NVFP4, SCALING_NVFP4, true, false, 0, 32},
        {SCALING_NVFP4, SCALING_NVFP4, false, true, 0, 32},
        {SCALING_NVFP4, SCALING_NVFP4, false, false, 128, 128},
        {SCALING_NVFP4_46, SCALING_NVFP4_46, true, false, 0, 32},
        {SCALING_NVFP4_46, SCALING_NVFP4_46, false, false, 16, 32},
        {SCALING_MX, SCALING_NVFP4, false, false, 0, 32},
        {SCALING_MX, SCALING_NVFP4, false, true, 0, 32},
        {SCALING_NVFP4, SCALING_MX, false, false, 64, 64},
        {SCALING_MX, SCALING_MX, false, false, 64, 64},
    };
    enum { NUM_CASES = sizeof(CASES) / sizeof(CASES[0]) };
    for (int i = 0; i < 3 * NUM_CASES; i++) {
        const Scaled *s = &CASES[i / 3];
        Recipe recipe = scaled_weights(s, i % 2 ? ROUND_STOCHASTIC : ROUND_NEAREST);
        Case c = {.zero = 1 + i % 2, .gather = (Gather)(i % 3), .reduce = FORMAT_FP32, .micro_batches = 1, .steps = 2};
        c.muon = i % 5 == 4;
        c.unit = recipe_shard_unit(&recipe);
        assert_int_equal(c.unit, s->unit);
        Laid ours = {0}, alone = {0};
        add_scaled_shapes(&ours.list, &recipe);
        add_scaled_shapes(&alone.list, &recipe);
        check_case(&ours, &alone, &c);
        Case not_finite = {.zero = 1, .gather = c.gather, .has_nan = true, .unit = c.unit};
        add_scaled_shapes(&ours.list, &recipe);
        add_scaled_shapes(&alone.list, &recipe);
        check_case(&ours, &alone, &not_finite);
    }
    print_message("%d ranks: %d scalings of weights\n", comm->size, (int)NUM_CASES);
}

static void test_stages(void **state) {
    (void)state;
    size_t gradients[3] = {0};
    for (int i = 0; i < 3 * 3 * 2 * 2; i++) {
        Case c = {.zero = i % 3,
                  .gather = (Gather)(i / 3 % 3),
                  .reduce = i / 9 % 2 ? FORMAT_BF16 : FORMAT_FP32,
                  .micro_batches = 1 + i % 2,
                  .steps = 2};
        bool square = i / 18 % 2;
        Laid ours = {0}, alone = {0};
        add_layers(&ours.list, square);
        add_layers(&alone.list, square);
        check_case(&ours, &alone, &c);
        gradients[c.zero] = ours.plan.by_kind[MEMORY_GRADIENTS];
    }
    // One layer's whole gradients and the sums of this rank's rows are less than all layers' whole
    // gradients.
    assert_int_equal(gradients[0], gradients[1]);
    assert_true(comm->size == 1 ? gradients[2] == gradients[1] : gradients[2] < gradients[1]);
}

// Muon over many ranks: matrices that stand one below the other begin and end within ranks' rows.
static void test_muon(void **state) {
    (void)state;
    for (int i = 0; i < 3 * 3; i++) {
        Case c = {.zero = i % 3, .gather = (Gather)(i / 3), .reduce = FORMAT_FP32, .micro_batches = 1, .steps = 2};
        c.muon = true;
        Laid ours = {0}, alone = {0};
        add_layers(&ours.list, false);
        add_layers(&alone.list, false);
        check_case(&ours, &alone, &c);
    }
}

// Layers of other recipes: a place in the shared memory is that of the first layer with a parameter
// there.
static void test_layers_that_differ(void **state) {
    (void)state;
    Recipe recipes[] = {weights_in(FORMAT_E4M3, FORMAT_FP32, SCALE_RCEIL, false), // replicated
                        weights_in(FORMAT_BF16, FORMAT_BF16, SCALE_RCEIL, false),
                        weights_in(FORMAT_E5M2, FORMAT_E2M1, SCALE_EVEN, false)};
    Laid ours = {0}, alone = {0};
    ParamList *lists[] = {&ours.list, &alone.list};
    for (int i = 0; i < 2; i++) {
        for (int layer = 0; layer < LAYERS; layer++) {
            add_matrix(lists[i], 96, 48, &recipes[layer % 3], layer);
            add_matrix(lists[i], 33, 65, &recipes[layer % 3], layer);
        }
        add_vector(lists[i], 9000);
    }
    Case c = {.zero = 2, .gather = GATHER_MX, .reduce = FORMAT_FP32, .micro_batches = 3, .steps = 2};
    check_case(&ours, &alone, &c);
}

// Initial weights don't depend on the number of ranks.
static void test_init(void **state) {
    (void)state;
    Laid ours = {0}, alone = {0};
    Sharding sharding = {.comm = comm, .zero = 1}, single = sharding_single();
    ParamList *lists[] = {&ours.list, &alone.list};
    for (int i = 0; i < 2; i++) {
        add_layers(lists[i], false);
        for (int j = 0; j < lists[i]->count; j++) {
            lists[i]->params[j].init_stddev = 0.02f * (float)(j % 3);
            lists[i]->params[j].init_value = 1;
        }
        lay_out(i ? &alone : &ours, i ? &single : &sharding, 0x33, false);
        param_list_init(lists[i], backend, 1234);
    }
    for (int i = 0; i < ours.list.count; i++) {
        check_rows(&ours.list.params[i], ours.list.params[i].master, alone.list.params[i].master, "initial weights");
    }
    release(&ours);
    release(&alone);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather_mx),   cmocka_unit_test(test_gather_mx_square),
        cmocka_unit_test(test_gather_fp32), cmocka_unit_test(test_gather_fp32_square),
        cmocka_unit_test(test_gather_bf16), cmocka_unit_test(test_gather_bf16_square),
        cmocka_unit_test(test_stages),      cmocka_unit_test(test_layers_that_differ),
        cmocka_unit_test(test_init),        cmocka_unit_test(test_muon),
        cmocka_unit_test(test_scalings),
    };
    // One rank speaks for all in TAP; the others' failures show as text and in the exit code.
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (rank && strcmp(rank, "0") != 0) setenv("CMOCKA_MESSAGE_OUTPUT", "STDOUT", 1);
#ifndef HAVE_MPI
    if (rank) {
        if (strcmp(rank, "0") == 0) puts("ok 1 # SKIP built without MPI");
        return 0;
    }
#endif
    Error error;
    comm = comm_create(&(CommOptions){.timeout_seconds = 60}, &error);
    if (!comm) die("%s", error.message);
    backend = backend_cpu();
    int failed = cmocka_run_group_tests_name("parameters", tests, NULL, NULL);
    if (failed == 0) comm->close(comm);
    return failed;
}
