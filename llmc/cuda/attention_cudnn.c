/*
Attention by cuDNN: its fused kernels, asked for as graphs of operations through the backend C API.
BF16; Q, K and V are read where they lie in qkv, through strides, and their gradients written so.

cuDNN's backward graph takes attention's output O, for each row's sum of dO O. Recipes that multiply
wgrad in BF16 have kept it, as the projection's input. Where a recipe keeps an MX copy alone, O is
kept beside it if the card has the memory; else the backward pass first makes O again, in the
workspace, with the forward plan. The other way, the same sum over keys of P dP by a kernel of ours
given to the graph in place of O, would need the two products S and dP on the plain cores, where
making O again takes two on the tensor cores, an order of magnitude faster, and no further code.

The backward plan keeps dS, the gradient of the scores, B*NH*T*T BF16 values, in its workspace, so
that each of dQ, dK and dV has one owner that sums in a fixed order. So it is made for some
sequences of the batch, or for some heads of one, and run for one part after another. On Blackwell
10.x the engine that NVIDIA says to be deterministic is asked for first, whatever it keeps.
*/
#ifdef HAVE_CUDNN

#include "attention.h"
#include "llmc/base/library.h"

#include <cudnn.h>
#include <math.h>
#include <string.h>

// Loaded when it is first called: the program starts where it isn't installed.
static Library library = {LIBRARY_FILE("cudnn", CUDNN_MAJOR), "cuDNN", "install it, then start again", NULL};
#define CUDNN(name) LIBRARY_CALL(library, cudnn##name)

size_t cuda_attention_cudnn_version(void) { return library_load(&library) ? CUDNN(GetVersion)() : 0; }

enum { MAX_DESCRIPTORS = 256, MAX_OPERATIONS = 24, MAX_CONFIGS = 16, MAX_SHAPES = 32, ALIGNMENT = 16, DIMS = 4 };

// What a plan is given at each run: tensors' memory by these identities. Those within a graph
// follow, from FIRST_INNER.
typedef enum {
    ID_Q,
    ID_K,
    ID_V,
    ID_O,
    ID_STATS, // logsumexp
    ID_DO,
    ID_DQ,
    ID_DK,
    ID_DV,
    ID_SOFTMAX_SUM,
    ID_SCALE, // by value from here on
    ID_MINUS_INFINITY,
    ID_ONE,
    FIRST_INNER
} TensorId;

typedef cudnnBackendDescriptor_t Descriptor;

// A graph being built, and all that goes with it. After the first failure nothing more is done.
typedef struct {
    AttentionShape shape;
    int64_t row_heads, out_heads; // in a row of qkv and of O, of which the shape's may be a part
    bool is_part;                 // of a batch, which may begin at any of its heads
    cudnnStatus_t status;
    const char *failed; // what was being done then
    Descriptor made[MAX_DESCRIPTORS], operations[MAX_OPERATIONS];
    int num_made, num_operations;
    int64_t next_id;
} Graph;

// A tensor of a graph: (B, NH, rows, cols).
typedef struct {
    int64_t dims[DIMS], strides[DIMS];
    cudnnDataType_t type;
} Layout;

// A setting of an engine, by cuDNN's numbers.
typedef struct {
    cudnnBackendKnobType_t type;
    int64_t value;
} Knob;

enum { MAX_KNOBS = 32 };

// An engine and settings of it: one that is asked for, or what a plan has.
typedef struct {
    int64_t engine, count;
    Knob knobs[MAX_KNOBS];
} EngineChoice;

typedef struct {
    Descriptor plan; // NULL: none
    int64_t workspace;
    EngineChoice choice;
} ExecutionPlan;

// A shape that cuDNN was asked for; it takes it if it has both plans.
typedef struct {
    AttentionShape shape;
    ExecutionPlan forward, backward;
    AttentionShape part; // of one run of `backward`
} ShapePlans;

static ShapePlans shapes[MAX_SHAPES];
static int num_shapes;
static cudnnHandle_t handle;
static Descriptor described_device;
static int capability; // of the device that plans are made for: 100 is 10.0

static void check(cudnnStatus_t status, const char *doing) {
    if (status != CUDNN_STATUS_SUCCESS) die("%s failed: %s", doing, CUDNN(GetErrorString)(status));
}

// Descriptors

static void try(Graph *g, cudnnStatus_t status, const char *doing) {
    if (g->status != CUDNN_STATUS_SUCCESS) return;
    g->status = status;
    g->failed = doing;
}

static bool ok(const Graph *g) { return g->status == CUDNN_STATUS_SUCCESS; }

static Descriptor make(Graph *g, cudnnBackendDescriptorType_t type) {
    Descriptor descriptor = NULL;
    if (!ok(g)) return NULL;
    if (g->num_made == MAX_DESCRIPTORS) die("internal error: a cuDNN graph of over %d descriptors", MAX_DESCRIPTORS);
    try(g, CUDNN(BackendCreateDescriptor)(type, &descriptor), "making a descriptor");
    if (ok(g)) g->made[g->num_made++] = descriptor;
    return descriptor;
}

static void set(Graph *g, Descriptor d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t count, const void *values) {
    if (ok(g)) try(g, CUDNN(BackendSetAttribute)(d, name, type, count, values), "describing the graph");
}

static void set_descriptor(Graph *g, Descriptor d, cudnnBackendAttributeName_t name, Descriptor value) {
    set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

// Reads up to `wanted` values of an attribute; returns how many there are.
static int64_t get(Graph *g, Descriptor d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                   int64_t wanted, void *values, const char *doing) {
    int64_t count = 0;
    if (ok(g)) try(g, CUDNN(BackendGetAttribute)(d, name, type, wanted, &count, values), doing);
    return count;
}

static void finalize(Graph *g, Descriptor d, const char *doing) {
    if (ok(g)) try(g, CUDNN(BackendFinalize)(d), doing);
}

// Destroys all descriptors. Those that a plan is made of stay with it as long as the program runs.
static void release(Graph *g) {
    while (g->num_made > 0) {
        check(CUDNN(BackendDestroyDescriptor)(g->made[--g->num_made]), "freeing a descriptor of cuDNN");
    }
}

// Tensors

static Descriptor tensor(Graph *g, int64_t id, Layout layout, bool inner, bool by_value) {
    Descriptor d = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    // A part's logsumexp begins at any row of T.
    bool is_unaligned = g->is_part && id == ID_STATS && layout.dims[2] * (int64_t)sizeof(float) % ALIGNMENT != 0;
    int64_t alignment = by_value || is_unaligned ? sizeof(float) : ALIGNMENT;
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
    set(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &layout.type);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, DIMS, layout.dims);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, DIMS, layout.strides);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &inner);
    set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    finalize(g, d, "describing a tensor");
    return d;
}

// Returns the layout (B, heads, T, HS) in rows of `row_heads` heads.
static Layout heads_in(AttentionShape s, int64_t heads, int64_t row_heads) {
    int64_t row = row_heads * s.HS;
    Layout layout = {{s.B, heads, s.T, s.HS}, {s.T * row, s.HS, row, 1}, CUDNN_DATA_BFLOAT16};
    return layout;
}

// Return the layouts of Q in qkv, of K or V in qkv, of O in out.
static Layout queries(const Graph *g) { return heads_in(g->shape, g->shape.NH, g->row_heads); }
static Layout keys(const Graph *g) { return heads_in(g->shape, g->shape.NKV, g->row_heads); }
static Layout outputs(const Graph *g) { return heads_in(g->shape, g->shape.NH, g->out_heads); }

// Returns the layout of `cols` values for each query, without gaps.
static Layout packed(AttentionShape s, int64_t cols, cudnnDataType_t type) {
    Layout layout = {{s.B, s.NH, s.T, cols}, {s.NH * s.T * cols, s.T * cols, cols, 1}, type};
    return layout;
}

static Layout transposed(Layout layout) {
    Layout t = layout;
    t.dims[2] = layout.dims[3], t.dims[3] = layout.dims[2];
    t.strides[2] = layout.strides[3], t.strides[3] = layout.strides[2];
    return t;
}

static Descriptor outer(Graph *g, TensorId id, Layout layout) { return tensor(g, id, layout, false, false); }
static Descriptor inner(Graph *g, Layout layout) { return tensor(g, g->next_id++, layout, true, false); }

static Descriptor by_value(Graph *g, TensorId id) {
    Layout layout = {{1, 1, 1, 1}, {1, 1, 1, 1}, CUDNN_DATA_FLOAT};
    return tensor(g, id, layout, false, true);
}

// Make tensors within the graph: of a value for each pair of a query and a key, or for each query.
static Descriptor inner_scores(Graph *g, cudnnDataType_t type) { return inner(g, packed(g->shape, g->shape.T, type)); }
static Descriptor inner_rows(Graph *g) { return inner(g, packed(g->shape, 1, CUDNN_DATA_FLOAT)); }

// Operations: each writes `y` and returns it

static void add_operation(Graph *g, Descriptor operation) {
    finalize(g, operation, "describing an operation");
    if (g->num_operations == MAX_OPERATIONS) die("internal error: a cuDNN graph of over %d operations", MAX_OPERATIONS);
    g->operations[g->num_operations++] = operation;
}

// Adds an operation on each element. `b` and `t` may be NULL; `axis` is GEN_INDEX's, or -1.
static Descriptor pointwise(Graph *g, cudnnPointwiseMode_t mode, int64_t axis, Descriptor y, Descriptor x, Descriptor b,
                            Descriptor t) {
    cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT;
    Descriptor kind = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(g, kind, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &arithmetic);
    if (axis >= 0) set(g, kind, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    finalize(g, kind, "describing an operation");
    Descriptor operation = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b) set_descriptor(g, operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t) set_descriptor(g, operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_operation(g, operation);
    return y;
}

static Descriptor binary(Graph *g, cudnnPointwiseMode_t mode, Descriptor y, Descriptor x, Descriptor b) {
    return pointwise(g, mode, -1, y, x, b, NULL);
}

static Descriptor unary(Graph *g, cudnnPointwiseMode_t mode, Descriptor y, Descriptor x) {
    return pointwise(g, mode, -1, y, x, NULL, NULL);
}

static Descriptor matmul(Graph *g, Descriptor c, Descriptor a, Descriptor b) {
    cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT;
    Descriptor kind = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(g, kind, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &arithmetic);
    finalize(g, kind, "describing an operation");
    Descriptor operation = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, kind);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    add_operation(g, operation);
    return c;
}

// Reduces along the axes in which y is shorter than x.
static Descriptor reduce(Graph *g, cudnnReduceTensorOp_t how, Descriptor y, Descriptor x) {
    cudnnDataType_t arithmetic = CUDNN_DATA_FLOAT;
    Descriptor kind = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, kind, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
    set(g, kind, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &arithmetic);
    finalize(g, kind, "describing an operation");
    Descriptor operation = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_operation(g, operation);
    return y;
}

// Gives the same values under y's dimensions and strides.
static Descriptor reshape(Graph *g, Descriptor y, Descriptor x) {
    Descriptor operation = make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_descriptor(g, operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_operation(g, operation);
    return y;
}

// Graphs

// Puts -inf where the key is later than the query.
static Descriptor mask(Graph *g, Descriptor scores) {
    Descriptor query =
        pointwise(g, CUDNN_POINTWISE_GEN_INDEX, 2, inner_scores(g, CUDNN_DATA_INT32), scores, NULL, NULL);
    Descriptor key = pointwise(g, CUDNN_POINTWISE_GEN_INDEX, 3, inner_scores(g, CUDNN_DATA_INT32), scores, NULL, NULL);
    Descriptor sees = binary(g, CUDNN_POINTWISE_CMP_GE, inner_scores(g, CUDNN_DATA_BOOLEAN), query, key);
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, -1, inner_scores(g, CUDNN_DATA_FLOAT), scores,
                     by_value(g, ID_MINUS_INFINITY), sees);
}

// Builds O = softmax(mask(Q K^T scale)) V, stats = logsumexp of each row of scores.
static void forward_graph(Graph *g) {
    const cudnnDataType_t fp32 = CUDNN_DATA_FLOAT, bf16 = CUDNN_DATA_BFLOAT16;
    AttentionShape s = g->shape;
    Descriptor q = outer(g, ID_Q, queries(g)), k_t = outer(g, ID_K, transposed(keys(g))), v = outer(g, ID_V, keys(g));
    Descriptor stats = outer(g, ID_STATS, packed(s, 1, fp32)), o = outer(g, ID_O, outputs(g));

    Descriptor scores = matmul(g, inner_scores(g, fp32), q, k_t);
    scores = binary(g, CUDNN_POINTWISE_MUL, inner_scores(g, fp32), scores, by_value(g, ID_SCALE));
    if (s.causal) scores = mask(g, scores);
    Descriptor max = reduce(g, CUDNN_REDUCE_TENSOR_MAX, inner_rows(g), scores);
    Descriptor below = binary(g, CUDNN_POINTWISE_SUB, inner_scores(g, fp32), scores, max);
    Descriptor exps = unary(g, CUDNN_POINTWISE_EXP, inner_scores(g, fp32), below);
    Descriptor sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, inner_rows(g), exps);
    Descriptor log = unary(g, CUDNN_POINTWISE_LOG, inner_rows(g), sum);
    binary(g, CUDNN_POINTWISE_ADD, stats, max, log);
    Descriptor probs = binary(g, CUDNN_POINTWISE_DIV, inner_scores(g, bf16), exps, sum);
    matmul(g, o, probs, v);
}

// Adds c = a b, summed over the query heads of each head of keys. Each head's is rounded to BF16
// first, as in the graph that NVIDIA's frontend makes (cudnn-frontend 1.23): asked for them in
// FP32, cuDNN 9.19 took the plan and summed something else on an H100.
static void matmul_to_keys(Graph *g, Descriptor c, Descriptor a, Descriptor b) {
    if (g->shape.NKV == g->shape.NH) {
        matmul(g, c, a, b);
    } else {
        Layout of_queries = packed(g->shape, g->shape.HS, CUDNN_DATA_BFLOAT16);
        reduce(g, CUDNN_REDUCE_TENSOR_ADD, c, matmul(g, inner(g, of_queries), a, b));
    }
}

// Builds P from scores and stats; dV = P^T dO; dS = P (dO V^T - sum(dO O)) scale; dK = dS^T Q;
// dQ = dS K.
static void backward_graph(Graph *g) {
    const cudnnDataType_t fp32 = CUDNN_DATA_FLOAT, bf16 = CUDNN_DATA_BFLOAT16;
    AttentionShape s = g->shape;
    Layout per_row = packed(s, 1, fp32), scores_t = transposed(packed(s, s.T, bf16)), out_fp32 = packed(s, s.HS, fp32);
    Descriptor q = outer(g, ID_Q, queries(g)), k_t = outer(g, ID_K, transposed(keys(g)));
    Descriptor v_t = outer(g, ID_V, transposed(keys(g))), stats = outer(g, ID_STATS, per_row);
    Descriptor o = outer(g, ID_O, outputs(g)), dout = outer(g, ID_DO, outputs(g)), scale = by_value(g, ID_SCALE);
    Descriptor dq = outer(g, ID_DQ, queries(g)), dk = outer(g, ID_DK, keys(g)), dv = outer(g, ID_DV, keys(g));

    Descriptor product = binary(g, CUDNN_POINTWISE_MUL, inner(g, out_fp32), dout, o);
    Descriptor row_sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, inner_rows(g), product);
    Descriptor sum = binary(g, CUDNN_POINTWISE_MUL, outer(g, ID_SOFTMAX_SUM, per_row), row_sum, by_value(g, ID_ONE));

    Descriptor scores = matmul(g, inner_scores(g, fp32), q, k_t);
    scores = binary(g, CUDNN_POINTWISE_MUL, inner_scores(g, fp32), scores, scale);
    if (s.causal) scores = mask(g, scores);
    scores = binary(g, CUDNN_POINTWISE_SUB, inner_scores(g, fp32), scores, stats);
    Descriptor probs = unary(g, CUDNN_POINTWISE_EXP, inner_scores(g, fp32), scores);
    matmul_to_keys(g, dv, reshape(g, inner(g, scores_t), probs), dout);

    Descriptor dscores = matmul(g, inner_scores(g, fp32), dout, v_t);
    dscores = binary(g, CUDNN_POINTWISE_SUB, inner_scores(g, fp32), dscores, sum);
    dscores = binary(g, CUDNN_POINTWISE_MUL, inner_scores(g, fp32), dscores, probs);
    dscores = binary(g, CUDNN_POINTWISE_MUL, inner_scores(g, bf16), dscores, scale);
    matmul_to_keys(g, dk, reshape(g, inner(g, scores_t), dscores), q);
    matmul(g, dq, dscores, reshape(g, inner(g, keys(g)), k_t));
}

// Plans

// Says which device a descriptor is for: the one that is described, or, where there is an attribute
// for it, the handle's.
enum { NO_ATTRIBUTE = -1 };
static void set_device(Graph *g, Descriptor d, int of_described, int of_handle) {
    if (described_device) {
        if (of_described != NO_ATTRIBUTE)
            set_descriptor(g, d, (cudnnBackendAttributeName_t)of_described, described_device);
    } else if (of_handle != NO_ATTRIBUTE) {
        set(g, d, (cudnnBackendAttributeName_t)of_handle, CUDNN_TYPE_HANDLE, 1, &handle);
    }
}

static Descriptor engine_of(Graph *g, Descriptor config) {
    Descriptor engine = make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    get(g, config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine, "reading an engine");
    return engine;
}

// Returns false for engines that sum in an order of the moment.
static bool is_deterministic(Graph *g, Descriptor config) {
    cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    int64_t count = get(g, engine_of(g, config), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                        CUDNN_NUMERICAL_NOTE_TYPE_COUNT, notes, "reading an engine's notes");
    for (int64_t i = 0; ok(g) && i < count; i++) {
        if (notes[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return false;
    }
    return ok(g);
}

// Returns the engine and the settings of a config, to be said: those that can't be read are left
// out, which is no reason not to take the config.
static EngineChoice choice_of(Graph *g, Descriptor config) {
    static const char DOING[] = "reading an engine's settings";
    EngineChoice choice = {.engine = -1};
    Descriptor knobs[MAX_KNOBS];
    get(g, engine_of(g, config), CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &choice.engine, DOING);
    for (int i = 0; i < MAX_KNOBS; i++) {
        knobs[i] = make(g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    }
    int64_t count =
        get(g, config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_KNOBS, knobs, DOING);
    for (int64_t i = 0; ok(g) && i < count && i < MAX_KNOBS; i++) {
        Knob *knob = &choice.knobs[i];
        get(g, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &knob->type, DOING);
        get(g, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &knob->value, DOING);
        choice.count += ok(g);
    }
    g->status = CUDNN_STATUS_SUCCESS;
    return choice;
}

// Returns a config of an engine that is asked for by its number.
static Descriptor config_of(Graph *g, Descriptor graph, const EngineChoice *choice) {
    Descriptor engine = make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR), knobs[MAX_KNOBS];
    set_descriptor(g, engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
    set(g, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &choice->engine);
    set_device(g, engine, CUDNN_ATTR_ENGINE_DEVICEPROP, NO_ATTRIBUTE);
    finalize(g, engine, "asking for an engine");
    for (int64_t i = 0; i < choice->count; i++) {
        knobs[i] = make(g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
        set(g, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &choice->knobs[i].type);
        set(g, knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &choice->knobs[i].value);
        finalize(g, knobs[i], "asking for an engine's settings");
    }
    Descriptor config = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    set_descriptor(g, config, CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    set(g, config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, choice->count, knobs);
    finalize(g, config, "asking for an engine");
    return config;
}

static ExecutionPlan plan_of(Graph *g, Descriptor config) {
    ExecutionPlan plan = {.plan = make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)};
    set_device(g, plan.plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_ATTR_EXECUTION_PLAN_HANDLE);
    set_descriptor(g, plan.plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    finalize(g, plan.plan, "making a plan");
    get(g, plan.plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &plan.workspace, "reading a plan");
    return ok(g) ? plan : (ExecutionPlan){0};
}

static void say_refusal(AttentionShape s, const char *direction, const char *why) {
    static bool said;
    if (said) return;
    said = true;
    size_t version = CUDNN(GetVersion)();
    fprintf(stderr,
            "cuDNN %zu.%zu.%zu doesn't take attention's %s with B %ld, T %ld and %ld heads of %ld, %ld of keys (%s): "
            "our own, slower kernels run instead\n",
            version / 10000, version / 100 % 100, version % 100, direction, s.B, s.T, s.NH, s.HS, s.NKV, why);
}

// Returns the plan of a config; {0}, and the reason in `g`, where the config doesn't do. What an
// earlier config failed with is forgotten.
static ExecutionPlan try_config(Graph *g, Descriptor config, int64_t workspace) {
    if (!is_deterministic(g, config)) {
        try(g, CUDNN_STATUS_NOT_SUPPORTED, "looking for a deterministic engine");
        return (ExecutionPlan){0};
    }
    ExecutionPlan plan = plan_of(g, config);
    if (plan.plan && plan.workspace >= workspace) {
        plan.choice = choice_of(g, config);
        return plan;
    }
    try(g, CUDNN_STATUS_NOT_SUPPORTED, "looking for a deterministic engine");
    return (ExecutionPlan){0};
}

// Returns the first plan that heuristics propose and that has at least `workspace` bytes.
static ExecutionPlan plan_by_heuristics(Graph *g, Descriptor graph, int64_t workspace) {
    Descriptor configs[MAX_CONFIGS];
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    Descriptor heuristics = make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set_descriptor(g, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(g, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    set_device(g, heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, NO_ATTRIBUTE);
    finalize(g, heuristics, "looking for an engine");
    for (int i = 0; i < MAX_CONFIGS; i++) {
        configs[i] = make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    }
    int64_t count = get(g, heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CONFIGS,
                        configs, "looking for an engine");
    if (count == 0) try(g, CUDNN_STATUS_NOT_SUPPORTED, "looking for an engine");
    if (!ok(g)) return (ExecutionPlan){0};
    ExecutionPlan plan = {0};
    for (int64_t i = 0; !plan.plan && i < count && i < MAX_CONFIGS; i++) {
        g->status = CUDNN_STATUS_SUCCESS;
        plan = try_config(g, configs[i], workspace);
    }
    return plan;
}

// Begins `build`'s graph of a part of `whole`; returns its descriptor.
static Descriptor make_graph(Graph *g, void (*build)(Graph *g), AttentionShape part, AttentionShape whole) {
    *g = (Graph){.shape = part,
                 .row_heads = whole.NH + 2 * whole.NKV,
                 .out_heads = whole.NH,
                 .is_part = part.B < whole.B || part.NH < whole.NH,
                 .next_id = FIRST_INNER};
    build(g);
    Descriptor graph = make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->num_operations, g->operations);
    set_device(g, graph, NO_ATTRIBUTE, CUDNN_ATTR_OPERATIONGRAPH_HANDLE);
    finalize(g, graph, "making the graph");
    return graph;
}

// Returns a deterministic plan that heuristics propose for `build`'s graph of a part of `whole`,
// with at least `workspace` bytes of its own; {0}, and says why, where there is none.
static ExecutionPlan make_plan(void (*build)(Graph *g), const char *direction, AttentionShape part,
                               AttentionShape whole, int64_t workspace) {
    Graph g;
    ExecutionPlan plan = plan_by_heuristics(&g, make_graph(&g, build, part, whole), workspace);
    if (plan.plan) return plan;
    char why[256];
    snprintf(why, sizeof(why), "%s: %s", g.failed, CUDNN(GetErrorString)(g.status));
    release(&g);
    say_refusal(part, direction, why);
    return plan;
}

// Returns NVIDIA's own deterministic backward engine for Blackwell 10.x and its settings, by the
// numbers that NVIDIA's frontend asks for it with (cudnn-frontend 1.32, its scaled dot product
// attention; heuristics don't propose it): from cuDNN 9.18.1 on, before which Transformer Engine
// takes none to be deterministic there, and under other settings from 9.23 on. NULL elsewhere.
static const EngineChoice *deterministic_engine(size_t version) {
    static EngineChoice choice;
    static const Knob OLD[] = {{CUDNN_KNOB_TYPE_KERNEL_CFG, 31}, {CUDNN_KNOB_TYPE_STAGES, 2}};
    static const Knob NEW[] = {{CUDNN_KNOB_TYPE_TILE_M, 3},     {CUDNN_KNOB_TYPE_TILE_N, 2},
                               {CUDNN_KNOB_TYPE_KERNEL_CFG, 2}, {CUDNN_KNOB_TYPE_STREAM_K, 0},
                               {CUDNN_KNOB_TYPE_TILE_CGA_M, 0}, {CUDNN_KNOB_TYPE_STAGES, 2}};
    if (capability / 10 != 10 || version < 91801) return NULL;
    const Knob *knobs = version < 92300 ? OLD : NEW;
    choice.engine = capability > 103 ? 17 : 5;
    choice.count = version < 92300 ? COUNT(OLD) : COUNT(NEW);
    memcpy(choice.knobs, knobs, (size_t)choice.count * sizeof(*knobs));
    return &choice;
}

// Returns the backward plan of that engine for a whole shape; {0} where there is no such engine, or
// it doesn't take the shape.
static ExecutionPlan make_asked_plan(AttentionShape shape) {
    const EngineChoice *choice = deterministic_engine(CUDNN(GetVersion)());
    if (!choice) return (ExecutionPlan){0};
    Graph g;
    Descriptor graph = make_graph(&g, backward_graph, shape, shape);
    ExecutionPlan plan = try_config(&g, config_of(&g, graph, choice), 0);
    if (!plan.plan) release(&g);
    return plan;
}

// Returns false where cuDNN doesn't start, which is said, or has nothing to start on.
static bool has_device(void) {
    static bool tried;
    if (described_device || handle) return true;
    if (tried || !cuda_stream()) return false;
    tried = true;
    if (cuda_attention_cudnn_version() == 0) {
        fprintf(stderr, "cuDNN isn't on this machine: attention runs on our own, slower kernels\n");
        return false;
    }
    cudnnStatus_t status = CUDNN(Create)(&handle);
    if (status != CUDNN_STATUS_SUCCESS) {
        handle = NULL;
        fprintf(stderr, "cuDNN doesn't start (%s): attention runs on our own, slower kernels\n",
                CUDNN(GetErrorString)(status));
        return false;
    }
    check(CUDNN(SetStream)(handle, cuda_stream()), "giving cuDNN a stream");
    int device, major, minor;
    cuda_check(cudaGetDevice(&device), "asking for the GPU");
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the GPU");
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the GPU");
    capability = 10 * major + minor;
    return true;
}

// Known faults: NVIDIA's frontend (cudnn-frontend 1.16, its scaled dot product attention) refuses
// 9.10.0 and 9.10.1, has another mask for those before, and up to 9.15.0 doesn't leave sequences to
// the graph whose length isn't a multiple of 128, since their gradient may be NaN. 9.23.0 and
// 9.23.1 are said to be wrong. Without a mask such lengths were seen to give NaN by later versions,
// too (github.com/pytorch/pytorch/issues/196678).
const char *cuda_attention_cudnn_fault(size_t version, int64_t T, bool causal) {
    if (version < 91002) return "versions before 9.10.2 have faults in attention: update it";
    if (version == 92300 || version == 92301) return "versions 9.23.0 and 9.23.1 have faults in attention: update it";
    if (T % 128 == 0) return NULL;
    if (version < 91501) return "versions before 9.15.1 have faults where T isn't a multiple of 128: update it";
    return causal ? NULL : "it has faults without a mask where T isn't a multiple of 128";
}

static bool is_same(AttentionShape a, AttentionShape b) {
    return a.B == b.B && a.T == b.T && a.NH == b.NH && a.NKV == b.NKV && a.HS == b.HS && a.causal == b.causal &&
           a.forward_only == b.forward_only;
}

static ShapePlans make_plans(AttentionShape shape) {
    ShapePlans plans = {.shape = shape, .part = shape};
    const char *fault = cuda_attention_cudnn_fault(CUDNN(GetVersion)(), shape.T, shape.causal);
    if (fault) {
        say_refusal(shape, "passes", fault);
        return plans;
    }
    plans.forward = make_plan(forward_graph, "forward pass", shape, shape, 0);
    if (!plans.forward.plan || shape.forward_only) return plans;
    plans.backward = make_asked_plan(shape);
    if (plans.backward.plan) return plans;
    if (!cuda_attention_has_room_for_dscores(shape)) {
        say_refusal(shape, "backward pass", "its gradients of the scores take more than 8 GiB");
        return plans;
    }
    // A plan that keeps dS sums in a fixed order, whatever it says of itself.
    plans.part = cuda_attention_backward_part(shape);
    int64_t dscores = cuda_attention_dscores_bytes(plans.part);
    plans.backward = make_plan(backward_graph, "backward pass", plans.part, shape, dscores);
    return plans;
}

// Returns a shape's plans, which are made at the first call; NULL where cuDNN doesn't take it, or
// there is no device or no room.
static const ShapePlans *find_plans(AttentionShape shape) {
    int i = 0;
    while (i < num_shapes && !is_same(shapes[i].shape, shape)) {
        i++;
    }
    if (i == num_shapes) {
        if (num_shapes == MAX_SHAPES || !has_device()) return NULL;
        shapes[num_shapes++] = make_plans(shape);
    }
    const ShapePlans *plans = &shapes[i];
    return plans->backward.plan || (shape.forward_only && plans->forward.plan) ? plans : NULL;
}

bool cuda_attention_cudnn_takes(Format dtype, AttentionShape shape) {
    return dtype == FORMAT_BF16 && find_plans(shape);
}

bool cuda_attention_cudnn_describe_device(const char *json, int described_capability) {
    Graph g = {0};
    num_shapes = 0;
    capability = described_capability;
    described_device = NULL;
    Descriptor device = make(&g, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    set(&g, device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)strlen(json) + 1, json);
    finalize(&g, device, "describing a device");
    described_device = ok(&g) ? device : NULL;
    if (!described_device) release(&g);
    return described_device != NULL;
}

// Settings that are asked for, or that cuDNN's heuristics are known to choose among.
static const char *const KNOB_NAMES[] = {
    [CUDNN_KNOB_TYPE_STAGES] = "STAGES",         [CUDNN_KNOB_TYPE_KERNEL_CFG] = "KERNEL_CFG",
    [CUDNN_KNOB_TYPE_TILE_CGA_M] = "TILE_CGA_M", [CUDNN_KNOB_TYPE_TILE_CGA_N] = "TILE_CGA_N",
    [CUDNN_KNOB_TYPE_STREAM_K] = "STREAM_K",     [CUDNN_KNOB_TYPE_TILE_M] = "TILE_M",
    [CUDNN_KNOB_TYPE_TILE_N] = "TILE_N"};

// Adds "engine 5 (KERNEL_CFG 31, STAGES 2)" to a text; settings without a name go by their number.
static void describe_choice(char *text, size_t bytes, const EngineChoice *choice) {
    size_t used = strlen(text);
    used += (size_t)snprintf(text + used, bytes - used, "engine %ld", choice->engine);
    for (int64_t i = 0; i < choice->count && used < bytes; i++) {
        const Knob *knob = &choice->knobs[i];
        const char *name = knob->type < COUNT(KNOB_NAMES) ? KNOB_NAMES[knob->type] : NULL;
        char number[16];
        snprintf(number, sizeof(number), "%d", knob->type);
        used += (size_t)snprintf(text + used, bytes - used, "%s%s %ld%s", i == 0 ? " (" : ", ", name ? name : number,
                                 knob->value, i + 1 == choice->count ? ")" : "");
    }
}

void cuda_attention_cudnn_describe(char *text, size_t bytes) {
    const ShapePlans *plans = num_shapes > 0 ? &shapes[num_shapes - 1] : NULL;
    size_t version = plans ? CUDNN(GetVersion)() : 0;
    text[0] = 0;
    if (!plans || !plans->forward.plan || (!plans->backward.plan && !plans->shape.forward_only)) return;
    snprintf(text, bytes, "attention by cuDNN %zu.%zu.%zu, forward ", version / 10000, version / 100 % 100,
             version % 100);
    describe_choice(text, bytes, &plans->forward.choice);
    if (!plans->backward.plan) return;
    size_t used = strlen(text);
    snprintf(text + used, bytes - used, ", backward ");
    describe_choice(text, bytes, &plans->backward.choice);
}

// Runs

static CudnnWorkspace workspace_of(const ShapePlans *plans) {
    int64_t forward = plans->forward.workspace, backward = plans->backward.workspace;
    return cuda_attention_cudnn_workspace(plans->shape, (size_t)(forward > backward ? forward : backward));
}

static const ShapePlans *taken_plans(AttentionShape shape) {
    const ShapePlans *plans = find_plans(shape);
    if (!plans) die("internal error: attention by cuDNN of a shape that it doesn't take");
    return plans;
}

size_t cuda_attention_workspace_cudnn(AttentionShape shape) { return workspace_of(taken_plans(shape)).total; }

// Runs a plan on `memory`, by TensorId; NULL for what the plan doesn't have.
static void run(ExecutionPlan plan, void *const *memory, void *workspace) {
    int64_t ids[FIRST_INNER];
    void *pointers[FIRST_INNER];
    int64_t count = 0;
    for (int64_t id = 0; id < FIRST_INNER; id++) {
        if (memory[id]) ids[count] = id, pointers[count++] = memory[id];
    }
    const char *doing = "attention by cuDNN";
    Descriptor pack;
    check(CUDNN(BackendCreateDescriptor)(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack), doing);
    check(CUDNN(BackendSetAttribute)(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids), doing);
    check(CUDNN(BackendSetAttribute)(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers),
          doing);
    check(CUDNN(BackendSetAttribute)(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace),
          doing);
    check(CUDNN(BackendFinalize)(pack), doing);
    check(CUDNN(BackendExecute)(handle, plan.plan, pack), doing);
    check(CUDNN(BackendDestroyDescriptor)(pack), doing);
}

// Returns head `h` of a row; in qkv queries lie from 0, keys from NH, values from NH + NKV on.
static void *head_at(Tensor rows, int64_t h, AttentionShape shape) { return (uint16_t *)rows.data + h * shape.HS; }

void cuda_attention_forward_cudnn(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape) {
    const ShapePlans *plans = taken_plans(shape);
    CudnnWorkspace w = workspace_of(plans);
    char *workspace = cuda_workspace(w.total);
    float scale = 1 / sqrtf((float)shape.HS), minus_infinity = -INFINITY;
    void *memory[FIRST_INNER] = {[ID_Q] = head_at(qkv, 0, shape),
                                 [ID_K] = head_at(qkv, shape.NH, shape),
                                 [ID_V] = head_at(qkv, shape.NH + shape.NKV, shape),
                                 [ID_O] = out.data,
                                 [ID_STATS] = logsumexp,
                                 [ID_SCALE] = &scale,
                                 [ID_MINUS_INFINITY] = shape.causal ? &minus_infinity : NULL};
    run(plans->forward, memory, workspace + w.plan);
}

void cuda_attention_backward_cudnn(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                                   AttentionShape shape) {
    const ShapePlans *plans = taken_plans(shape);
    CudnnWorkspace w = workspace_of(plans);
    int64_t T = shape.T;
    char *workspace = cuda_workspace(w.total);
    Tensor o = out.data ? out : tensor_make(workspace + w.o, FORMAT_BF16, dout.rows, dout.cols);
    void *logsumexp_again = workspace + w.logsumexp;
    if (!out.data) cuda_attention_forward_cudnn(o, logsumexp_again, qkv, shape);
    float scale = 1 / sqrtf((float)shape.HS), minus_infinity = -INFINITY, one = 1;
    AttentionShape part = plans->part;
    for (int64_t b = 0; b < shape.B; b += part.B) {
        Tensor qkv_rows = tensor_rows(qkv, b * T, part.B * T), dqkv_rows = tensor_rows(dqkv, b * T, part.B * T);
        Tensor o_rows = tensor_rows(o, b * T, part.B * T), dout_rows = tensor_rows(dout, b * T, part.B * T);
        for (int64_t keys = 0; keys < shape.NKV; keys += part.NKV) {
            int64_t head = shape.NH / shape.NKV * keys, values = shape.NH + shape.NKV + keys;
            void *memory[FIRST_INNER] = {[ID_Q] = head_at(qkv_rows, head, shape),
                                         [ID_K] = head_at(qkv_rows, shape.NH + keys, shape),
                                         [ID_V] = head_at(qkv_rows, values, shape),
                                         [ID_O] = head_at(o_rows, head, shape),
                                         [ID_STATS] = (float *)logsumexp + (b * shape.NH + head) * T,
                                         [ID_DO] = head_at(dout_rows, head, shape),
                                         [ID_DQ] = head_at(dqkv_rows, head, shape),
                                         [ID_DK] = head_at(dqkv_rows, shape.NH + keys, shape),
                                         [ID_DV] = head_at(dqkv_rows, values, shape),
                                         [ID_SOFTMAX_SUM] = workspace + w.softmax_sum,
                                         [ID_SCALE] = &scale,
                                         [ID_MINUS_INFINITY] = shape.causal ? &minus_infinity : NULL,
                                         [ID_ONE] = &one};
            run(plans->backward, memory, workspace + w.plan);
        }
    }
}

#endif
