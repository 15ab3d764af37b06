/*
BF16 GEMMs through oneDNN's matmul primitive, strided, with a sum post-op to accumulate, and a
binary one to multiply by alpha before that. Primitives are kept by shape, some thousands at most,
and so are each thread's memory handles and scratch: a call of a shape that is kept allocates
nothing. Scratch is given to oneDNN by us: a primitive that manages its own can't run on several
threads at once. Takes oneDNN 2, as Debian 12 has it, and 3, as Debian 13 does: what differs between
their interfaces stands first.
*/
#include "cpu.h"
#include "onednn.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h> // matmul primitive
#include <stdio.h>
#include <stdlib.h>

static void check(dnnl_status_t status, const char *what) {
    if (status != dnnl_success) die("oneDNN: %s failed with status %d", what, (int)status);
}

#define CALL(function, ...) check(function(__VA_ARGS__), #function)

#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t Descriptor;

static Descriptor descriptor_create(dnnl_data_type_t type, dnnl_dims_t dims, dnnl_dims_t strides) {
    dnnl_memory_desc_t result;
    CALL(dnnl_memory_desc_create_with_strides, &result, 2, dims, type, strides);
    return result;
}

static Descriptor descriptor_copy(Descriptor descriptor) {
    dnnl_memory_desc_t result;
    CALL(dnnl_memory_desc_clone, &result, descriptor);
    return result;
}

static void descriptor_destroy(Descriptor descriptor) {
    CALL(dnnl_memory_desc_destroy, (dnnl_memory_desc_t)descriptor);
}

static void append_sum(dnnl_post_ops_t post_ops) {
    CALL(dnnl_post_ops_append_sum, post_ops, 1.0f, 0, dnnl_data_type_undef);
}

static dnnl_primitive_desc_t matmul_create(dnnl_engine_t on, Descriptor a, Descriptor b, Descriptor bias, Descriptor d,
                                           dnnl_primitive_attr_t attr) {
    dnnl_primitive_desc_t result;
    CALL(dnnl_matmul_primitive_desc_create, &result, on, a, b, bias, d, attr);
    return result;
}
#else
typedef const dnnl_memory_desc_t *Descriptor;

static Descriptor descriptor_copy(Descriptor descriptor) {
    dnnl_memory_desc_t *result = allocate(sizeof(*result));
    *result = *descriptor;
    return result;
}

static Descriptor descriptor_create(dnnl_data_type_t type, dnnl_dims_t dims, dnnl_dims_t strides) {
    dnnl_memory_desc_t result;
    CALL(dnnl_memory_desc_init_by_strides, &result, 2, dims, type, strides);
    return descriptor_copy(&result);
}

static void descriptor_destroy(Descriptor descriptor) { free((void *)descriptor); }

static void append_sum(dnnl_post_ops_t post_ops) { CALL(dnnl_post_ops_append_sum, post_ops, 1.0f); }

static dnnl_primitive_desc_t matmul_create(dnnl_engine_t on, Descriptor a, Descriptor b, Descriptor bias, Descriptor d,
                                           dnnl_primitive_attr_t attr) {
    dnnl_matmul_desc_t desc;
    dnnl_primitive_desc_t result;
    CALL(dnnl_matmul_desc_init, &desc, a, b, bias, d);
    CALL(dnnl_primitive_desc_create, &result, &desc, attr, on, NULL);
    return result;
}
#endif

// What a primitive is made for. All are of one type, so that shapes are hashed and compared as
// arrays.
typedef struct {
    int64_t M, N, K;
    int64_t lda, ldb, ldd; // strides between rows as stored
    int64_t transpose_a, transpose_b, accumulate, has_bias, has_alpha;
    int64_t dtype, d_dtype; // Format: of a and b; of d
    int64_t in_parallel;    // called on one thread, within a parallel region
    int64_t threads;        // oneDNN splits a primitive's work for those it is made with
} Shape;

enum { ARG_A, ARG_B, ARG_D, ARG_SCRATCH, ARG_BIAS, ARG_ALPHA, ARGS };

typedef struct {
    Shape shape;
    dnnl_primitive_t primitive;
    Descriptor descriptors[ARGS];  // NULL: the GEMM has no such argument
    dnnl_exec_arg_t (*args)[ARGS]; // for each thread, its handles of memory
} Entry;

// A thread's memory that grows to the largest of its calls.
typedef struct {
    void *data;
    size_t bytes;
} Buffer;

static _Thread_local Buffer scratchpad;

// Within a parallel region entries aren't moved or removed once they are in the table, so that they
// can be read while another is added.
enum { TABLE_SIZE = 4096 };
static Entry *table[TABLE_SIZE];
static int num_entries;
static dnnl_engine_t engine;
static dnnl_stream_t stream;

static void start(void) {
    if (engine) return;
    CALL(dnnl_engine_create, &engine, dnnl_cpu, 0);
    CALL(dnnl_stream_create, &stream, engine, dnnl_stream_default_flags);
}

static void *buffer_take(Buffer *buffer, size_t bytes) {
    if (bytes > buffer->bytes) {
        free(buffer->data);
        buffer->data = cpu_allocate(bytes);
        buffer->bytes = bytes;
    }
    return buffer->data;
}

#if defined(__x86_64__)
// Instruction sets are ordered as bit masks: one includes those below it.
static bool has(dnnl_cpu_isa_t isa) {
    static int effective = -1;
    if (effective < 0) effective = dnnl_get_effective_cpu_isa();
    return (effective & isa) == isa;
}

static bool has_amx(void) { return has(dnnl_cpu_isa_avx512_core_amx); }

// On Intel's processors AVX-512 BF16 without AMX is slower than our loops in FP32, and these slower
// than oneDNN in FP32: dev/bench/README.md.
bool onednn_multiplies(Format operands) {
    if (operands == FORMAT_FP32) return has(dnnl_cpu_isa_avx512_core);
    return has_amx() || (has(dnnl_cpu_isa_avx512_core_bf16) && !__builtin_cpu_is("intel"));
}

static const char *isa_name(void) { return has_amx() ? "AMX" : "AVX-512 BF16"; }
#else
bool onednn_multiplies(Format operands) {
    (void)operands;
    return false;
}

static const char *isa_name(void) { return ""; }
#endif

void onednn_describe(char *text, size_t bytes) {
    const dnnl_version_t *version = dnnl_version();
    snprintf(text, bytes, "GEMMs by oneDNN %d.%d.%d with %s, BF16 operands", version->major, version->minor,
             version->patch, isa_name());
}

static dnnl_data_type_t dnnl_type(Format dtype) { return dtype == FORMAT_FP32 ? dnnl_f32 : dnnl_bf16; }

// Of a vector whose elements lie `stride` apart the other dimension has the whole's stride: oneDNN
// 3.7 takes a dimension of stride 1 for that of neighbours in memory, also where it has one
// element.
static Descriptor describe_matrix(Format dtype, int64_t rows, int64_t cols, int64_t stride, bool transposed) {
    int64_t length = transposed ? rows : cols, count = transposed ? cols : rows;
    int64_t step = length == 1 ? count * stride : 1;
    dnnl_dims_t dims = {rows, cols};
    dnnl_dims_t strides = {transposed ? step : stride, transposed ? stride : step};
    return descriptor_create(dnnl_type(dtype), dims, strides);
}

// Returns oneDNN's number of an argument. Its own bias is added before alpha multiplies, so that
// beside alpha the bias is the last post-op's operand.
static int number_of(const Shape *s, int arg) {
    static const int NUMBERS[ARGS] = {DNNL_ARG_SRC,  DNNL_ARG_WEIGHTS,
                                      DNNL_ARG_DST,  DNNL_ARG_SCRATCHPAD,
                                      DNNL_ARG_BIAS, DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1};
    bool is_post_op = arg == ARG_BIAS && s->has_alpha;
    return is_post_op ? DNNL_ARG_ATTR_MULTIPLE_POST_OP(s->accumulate ? 2 : 1) | DNNL_ARG_SRC_1 : NUMBERS[arg];
}

static dnnl_primitive_desc_t describe_primitive(const Shape *s, const Descriptor of[ARGS]) {
    dnnl_primitive_attr_t attr;
    dnnl_post_ops_t post_ops;
    CALL(dnnl_primitive_attr_create, &attr);
    CALL(dnnl_primitive_attr_set_scratchpad_mode, attr, dnnl_scratchpad_mode_user);
    CALL(dnnl_post_ops_create, &post_ops);
    if (s->has_alpha) CALL(dnnl_post_ops_append_binary, post_ops, dnnl_binary_mul, of[ARG_ALPHA]);
    if (s->accumulate) append_sum(post_ops);
    if (s->has_alpha && s->has_bias) CALL(dnnl_post_ops_append_binary, post_ops, dnnl_binary_add, of[ARG_BIAS]);
    CALL(dnnl_primitive_attr_set_post_ops, attr, post_ops);
    Descriptor bias = s->has_alpha ? NULL : of[ARG_BIAS];
    dnnl_primitive_desc_t result = matmul_create(engine, of[ARG_A], of[ARG_B], bias, of[ARG_D], attr);
    CALL(dnnl_post_ops_destroy, post_ops);
    CALL(dnnl_primitive_attr_destroy, attr);
    return result;
}

static Entry *entry_create(const Shape *s) {
    Entry *entry = allocate(sizeof(*entry));
    Descriptor *of = entry->descriptors;
    entry->shape = *s;
    of[ARG_A] = describe_matrix(s->dtype, s->M, s->K, s->lda, s->transpose_a);
    of[ARG_B] = describe_matrix(s->dtype, s->K, s->N, s->ldb, s->transpose_b);
    of[ARG_D] = describe_matrix(s->d_dtype, s->M, s->N, s->ldd, false);
    if (s->has_bias) of[ARG_BIAS] = describe_matrix(FORMAT_FP32, 1, s->N, s->N, false);
    if (s->has_alpha) of[ARG_ALPHA] = describe_matrix(FORMAT_FP32, 1, 1, 1, false);

    dnnl_primitive_desc_t primitive_desc = describe_primitive(s, of);
    CALL(dnnl_primitive_create, &entry->primitive, primitive_desc);
    of[ARG_SCRATCH] = descriptor_copy(dnnl_primitive_desc_query_md(primitive_desc, dnnl_query_scratchpad_md, 0));
    CALL(dnnl_primitive_desc_destroy, primitive_desc);

    entry->args = allocate((size_t)s->threads * sizeof(*entry->args));
    for (int64_t thread = 0; thread < s->threads; thread++) {
        for (int i = 0; i < ARGS; i++) {
            dnnl_exec_arg_t *arg = &entry->args[thread][i];
            arg->arg = number_of(s, i);
            if (of[i]) CALL(dnnl_memory_create, &arg->memory, of[i], engine, DNNL_MEMORY_NONE);
        }
    }
    return entry;
}

static void entry_free(Entry *entry) {
    for (int64_t thread = 0; thread < entry->shape.threads; thread++) {
        for (int i = 0; i < ARGS; i++) {
            if (entry->descriptors[i]) CALL(dnnl_memory_destroy, entry->args[thread][i].memory);
        }
    }
    for (int i = 0; i < ARGS; i++) {
        if (entry->descriptors[i]) descriptor_destroy(entry->descriptors[i]);
    }
    CALL(dnnl_primitive_destroy, entry->primitive);
    free(entry->args);
    free(entry);
}

// Empties the table where it is half full: scores of texts of many lengths come to thousands of
// shapes.
static void make_room(void) {
    if (num_entries <= TABLE_SIZE / 2) return;
    for (int slot = 0; slot < TABLE_SIZE; slot++) {
        if (table[slot]) entry_free(table[slot]);
        table[slot] = NULL;
    }
    num_entries = 0;
}

static uint32_t shape_hash(const Shape *shape) {
    uint64_t fields[sizeof(*shape) / sizeof(uint64_t)], hash = 0;
    memcpy(fields, shape, sizeof(fields));
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        hash = (hash ^ fields[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return (uint32_t)hash % TABLE_SIZE;
}

// Returns the table's entry for this shape, made if it is new.
static const Entry *find_entry(const Shape *shape) {
    uint32_t slot = shape_hash(shape);
    for (int probes = 0; probes < TABLE_SIZE; probes++, slot = (slot + 1) % TABLE_SIZE) {
        if (!table[slot]) {
            table[slot] = entry_create(shape);
            num_entries++;
        }
        if (memcmp(&table[slot]->shape, shape, sizeof(*shape)) == 0) return table[slot];
    }
    die("internal error: more than %d shapes of GEMMs in one parallel region", TABLE_SIZE);
}

static Shape shape_of(Tensor d, Tensor a, Tensor b, const float *alpha, GemmOptions options) {
    int threads = omp_get_max_threads();
    if (omp_in_parallel() && omp_get_num_threads() > threads) threads = omp_get_num_threads();
    return (Shape){.M = d.rows,
                   .N = d.cols,
                   .K = options.transpose_a ? a.rows : a.cols,
                   .lda = a.stride,
                   .ldb = b.stride,
                   .ldd = d.stride,
                   .transpose_a = options.transpose_a,
                   .transpose_b = options.transpose_b,
                   .accumulate = options.accumulate,
                   .has_bias = options.bias != NULL,
                   .has_alpha = alpha != NULL,
                   .dtype = a.dtype,
                   .d_dtype = d.dtype,
                   .in_parallel = omp_in_parallel(),
                   .threads = threads};
}

void onednn_matmul(Tensor d, Tensor a, Tensor b, const float *alpha, GemmOptions options) {
    if (d.rows == 0 || d.cols == 0) return;
    Shape shape = shape_of(d, a, b, alpha, options);
    const Entry *entry;
#pragma omp critical(onednn)
    {
        start();
        if (!shape.in_parallel) make_room();
        entry = find_entry(&shape);
    }

    const dnnl_exec_arg_t *args = entry->args[omp_get_thread_num()];
    void *scratch = buffer_take(&scratchpad, dnnl_memory_desc_get_size(entry->descriptors[ARG_SCRATCH]));
    void *const data[ARGS] = {a.data, b.data, d.data, scratch, (void *)options.bias, (void *)alpha};
    dnnl_exec_arg_t given[ARGS];
    int count = 0;
    for (int i = 0; i < ARGS; i++) {
        if (!entry->descriptors[i]) continue;
        CALL(dnnl_memory_set_data_handle, args[i].memory, data[i]);
        given[count++] = args[i];
    }
    CALL(dnnl_primitive_execute, entry->primitive, stream, count, given);
}
