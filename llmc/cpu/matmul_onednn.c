/*
cpu_matmul through oneDNN's matmul primitive, strided, with a sum post-op to accumulate. A primitive
for each shape is made once and kept; so are each thread's memory handles and scratch, so that a
call allocates nothing. Scratch is given to oneDNN by us: a primitive that manages its own can't run
on several threads at once. Takes oneDNN 2, as Debian 12 has it, and 3, as Debian 13 does: what
differs between their interfaces stands first.
*/
#include "cpu.h"
#include "llmc/base/util.h" // die, allocate

#include <omp.h>
#include <oneapi/dnnl/dnnl.h> // matmul primitive
#include <stdio.h>
#include <stdlib.h>

static void check(dnnl_status_t status, const char *what) {
    if (status != dnnl_success) die("oneDNN: %s failed with status %d", what, (int)status);
}

#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t Descriptor;

static Descriptor descriptor_create(dnnl_data_type_t type, dnnl_dims_t dims, dnnl_dims_t strides) {
    dnnl_memory_desc_t result;
    check(dnnl_memory_desc_create_with_strides(&result, 2, dims, type, strides),
          "dnnl_memory_desc_create_with_strides");
    return result;
}

static Descriptor descriptor_copy(Descriptor descriptor) {
    dnnl_memory_desc_t result;
    check(dnnl_memory_desc_clone(&result, descriptor), "dnnl_memory_desc_clone");
    return result;
}

static void append_sum(dnnl_post_ops_t post_ops) {
    check(dnnl_post_ops_append_sum(post_ops, 1.0f, 0, dnnl_data_type_undef), "dnnl_post_ops_append_sum");
}

static dnnl_primitive_desc_t matmul_create(dnnl_engine_t on, Descriptor a, Descriptor b, Descriptor bias, Descriptor d,
                                           dnnl_primitive_attr_t attr) {
    dnnl_primitive_desc_t result;
    check(dnnl_matmul_primitive_desc_create(&result, on, a, b, bias, d, attr), "dnnl_matmul_primitive_desc_create");
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
    check(dnnl_memory_desc_init_by_strides(&result, 2, dims, type, strides), "dnnl_memory_desc_init_by_strides");
    return descriptor_copy(&result);
}

static void append_sum(dnnl_post_ops_t post_ops) {
    check(dnnl_post_ops_append_sum(post_ops, 1.0f), "dnnl_post_ops_append_sum");
}

static dnnl_primitive_desc_t matmul_create(dnnl_engine_t on, Descriptor a, Descriptor b, Descriptor bias, Descriptor d,
                                           dnnl_primitive_attr_t attr) {
    dnnl_matmul_desc_t desc;
    dnnl_primitive_desc_t result;
    check(dnnl_matmul_desc_init(&desc, a, b, bias, d), "dnnl_matmul_desc_init");
    check(dnnl_primitive_desc_create(&result, &desc, attr, on, NULL), "dnnl_primitive_desc_create");
    return result;
}
#endif

// Who calls: oneDNN splits a primitive's work for the threads it is made with.
typedef struct {
    bool in_parallel; // on one thread, within a parallel region
    int threads;
} Caller;

typedef struct {
    CpuMatmul shape;
    Caller caller;
    dnnl_primitive_t primitive;
    Descriptor a, b, bias, d, scratchpad; // bias: NULL without one
} Entry;

typedef struct {
    dnnl_memory_t a, b, bias, d, scratchpad;
} Memories;

// A thread's memory that grows to the largest of its calls.
typedef struct {
    void *data;
    size_t bytes;
} Buffer;

static _Thread_local Buffer scratchpad, widened;

// Entries are never moved or removed once they are in the table, so that they can be read while
// another is added.
enum { TABLE_SIZE = 4096 };
static Entry *table[TABLE_SIZE];
static Memories *memories[TABLE_SIZE]; // of each entry, one for each thread
static dnnl_engine_t engine;
static dnnl_stream_t stream;

static void start(void) {
    if (engine) return;
    check(dnnl_engine_create(&engine, dnnl_cpu, 0), "dnnl_engine_create");
    check(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags), "dnnl_stream_create");
}

static void *buffer_take(Buffer *buffer, size_t bytes) {
    if (bytes > buffer->bytes) {
        free(buffer->data);
        if (posix_memalign(&buffer->data, 4096, bytes) != 0) die("out of memory: %zu bytes could not be had", bytes);
        buffer->bytes = bytes;
    }
    return buffer->data;
}

#if defined(__x86_64__)
// Instruction sets are ordered as bit masks: one includes those below it.
static bool has(dnnl_cpu_isa_t isa) { return (dnnl_get_effective_cpu_isa() & isa) == isa; }

bool cpu_matmul_takes_bf16(void) {
    static int answer = -1;
    if (answer < 0) answer = has(dnnl_cpu_isa_avx512_core_bf16);
    return answer;
}

static const char *isa_name(void) {
    if (dnnl_get_effective_cpu_isa() == dnnl_cpu_isa_avx512_core_bf16) return "AVX-512 BF16";
    return has(dnnl_cpu_isa_avx512_core_bf16)   ? "AMX or newer"
           : has(dnnl_cpu_isa_avx512_core_vnni) ? "AVX-512 VNNI"
           : has(dnnl_cpu_isa_avx512_core)      ? "AVX-512"
           : has(dnnl_cpu_isa_avx2)             ? "AVX2"
           : has(dnnl_cpu_isa_avx)              ? "AVX"
                                                : "SSE4.1";
}
#else
bool cpu_matmul_takes_bf16(void) { return false; }

static const char *isa_name(void) { return "this machine's instructions"; }
#endif

void cpu_matmul_describe(char *text, size_t bytes) {
    const dnnl_version_t *version = dnnl_version();
    snprintf(text, bytes, "GEMMs by oneDNN %d.%d.%d with %s, %s", version->major, version->minor, version->patch,
             isa_name(), cpu_matmul_takes_bf16() ? "BF16 operands" : "BF16 operands widened to FP32");
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

static Entry *entry_create(const CpuMatmul *s, Caller caller) {
    Entry *entry = allocate(sizeof(*entry));
    entry->shape = *s;
    entry->caller = caller;
    entry->a = describe_matrix(s->dtype, s->M, s->K, s->lda, s->transpose_a);
    entry->b = describe_matrix(s->dtype, s->K, s->N, s->ldb, s->transpose_b);
    entry->d = describe_matrix(s->d_dtype, s->M, s->N, s->ldd, false);
    if (s->has_bias) entry->bias = describe_matrix(FORMAT_FP32, 1, s->N, s->N, false);

    dnnl_primitive_attr_t attr;
    dnnl_post_ops_t post_ops;
    check(dnnl_primitive_attr_create(&attr), "dnnl_primitive_attr_create");
    check(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user),
          "dnnl_primitive_attr_set_scratchpad_mode");
    check(dnnl_post_ops_create(&post_ops), "dnnl_post_ops_create");
    if (s->accumulate) {
        append_sum(post_ops);
        check(dnnl_primitive_attr_set_post_ops(attr, post_ops), "dnnl_primitive_attr_set_post_ops");
    }
    dnnl_primitive_desc_t primitive_desc = matmul_create(engine, entry->a, entry->b, entry->bias, entry->d, attr);
    check(dnnl_primitive_create(&entry->primitive, primitive_desc), "dnnl_primitive_create");
    entry->scratchpad = descriptor_copy(dnnl_primitive_desc_query_md(primitive_desc, dnnl_query_scratchpad_md, 0));
    check(dnnl_primitive_desc_destroy(primitive_desc), "dnnl_primitive_desc_destroy");
    check(dnnl_post_ops_destroy(post_ops), "dnnl_post_ops_destroy");
    check(dnnl_primitive_attr_destroy(attr), "dnnl_primitive_attr_destroy");
    return entry;
}

static dnnl_memory_t memory_create(Descriptor desc) {
    dnnl_memory_t memory;
    check(dnnl_memory_create(&memory, desc, engine, DNNL_MEMORY_NONE), "dnnl_memory_create");
    return memory;
}

static Memories *memories_create(const Entry *entry) {
    Memories *result = allocate((size_t)entry->caller.threads * sizeof(*result));
    for (int i = 0; i < entry->caller.threads; i++) {
        result[i].a = memory_create(entry->a);
        result[i].b = memory_create(entry->b);
        result[i].d = memory_create(entry->d);
        result[i].scratchpad = memory_create(entry->scratchpad);
        if (entry->shape.has_bias) result[i].bias = memory_create(entry->bias);
    }
    return result;
}

static bool same_shape(const CpuMatmul *a, const CpuMatmul *b) {
    return a->M == b->M && a->N == b->N && a->K == b->K && a->lda == b->lda && a->ldb == b->ldb && a->ldd == b->ldd &&
           a->transpose_a == b->transpose_a && a->transpose_b == b->transpose_b && a->accumulate == b->accumulate &&
           a->dtype == b->dtype && a->d_dtype == b->d_dtype && a->has_bias == b->has_bias;
}

static uint32_t shape_hash(const CpuMatmul *s, Caller caller) {
    uint64_t fields[] = {s->M,
                         s->N,
                         s->K,
                         s->lda,
                         s->ldb,
                         s->ldd,
                         (uint64_t)s->transpose_a | (uint64_t)s->transpose_b << 1 | (uint64_t)s->accumulate << 2 |
                             (uint64_t)s->has_bias << 3 | (uint64_t)s->dtype << 4 | (uint64_t)s->d_dtype << 8 |
                             (uint64_t)caller.in_parallel << 12 | (uint64_t)caller.threads << 13};
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        hash = (hash ^ fields[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return (uint32_t)hash % TABLE_SIZE;
}

// The table's slot for this shape and caller, filled if it is new.
static int find_entry(const CpuMatmul *shape, Caller caller) {
    uint32_t slot = shape_hash(shape, caller);
    for (int probes = 0; probes < TABLE_SIZE; probes++, slot = (slot + 1) % TABLE_SIZE) {
        if (!table[slot]) {
            Entry *entry = entry_create(shape, caller);
            memories[slot] = memories_create(entry);
            table[slot] = entry;
            return (int)slot;
        }
        const Entry *entry = table[slot];
        bool same_caller = entry->caller.in_parallel == caller.in_parallel && entry->caller.threads == caller.threads;
        if (same_caller && same_shape(&entry->shape, shape)) return (int)slot;
    }
    die("internal error: more than %d shapes of GEMMs in one run", TABLE_SIZE);
}

static void matmul(void *d, const void *a, const void *b, const float *bias, const CpuMatmul *shape) {
    Caller caller = {omp_in_parallel(), omp_get_max_threads()};
    if (caller.in_parallel && omp_get_num_threads() > caller.threads) caller.threads = omp_get_num_threads();
    int slot;
#pragma omp critical(onednn)
    {
        start();
        slot = find_entry(shape, caller);
    }

    const Entry *entry = table[slot];
    const Memories *m = &memories[slot][omp_get_thread_num()];
    void *scratch = buffer_take(&scratchpad, dnnl_memory_desc_get_size(entry->scratchpad));
    check(dnnl_memory_set_data_handle(m->a, (void *)a), "dnnl_memory_set_data_handle");
    check(dnnl_memory_set_data_handle(m->b, (void *)b), "dnnl_memory_set_data_handle");
    check(dnnl_memory_set_data_handle(m->d, d), "dnnl_memory_set_data_handle");
    check(dnnl_memory_set_data_handle(m->scratchpad, scratch), "dnnl_memory_set_data_handle");
    dnnl_exec_arg_t args[5] = {
        {DNNL_ARG_SRC, m->a}, {DNNL_ARG_WEIGHTS, m->b}, {DNNL_ARG_DST, m->d}, {DNNL_ARG_SCRATCHPAD, m->scratchpad}};
    if (shape->has_bias) {
        check(dnnl_memory_set_data_handle(m->bias, (void *)bias), "dnnl_memory_set_data_handle");
        args[4] = (dnnl_exec_arg_t){DNNL_ARG_BIAS, m->bias};
    }
    check(dnnl_primitive_execute(entry->primitive, stream, shape->has_bias ? 5 : 4, args), "dnnl_primitive_execute");
}

// Rows of d that are multiplied at a time where it is rounded afterwards.
enum { WIDENED_ROWS = 256 };

// FP32 operands to a BF16 d, which oneDNN doesn't offer: by way of an FP32 buffer.
static void matmul_rounded(uint16_t *d, const float *a, const void *b, const float *bias, CpuMatmul s) {
    CpuMatmul slab = s;
    slab.d_dtype = FORMAT_FP32;
    slab.ldd = s.N;
    for (int64_t m = 0; m < s.M; m += WIDENED_ROWS) {
        slab.M = s.M - m < WIDENED_ROWS ? s.M - m : WIDENED_ROWS;
        float *wide = buffer_take(&widened, (size_t)(slab.M * s.N) * sizeof(float));
        for (int64_t i = 0; s.accumulate && i < slab.M; i++) {
            cpu_load(wide + i * s.N, d + (m + i) * s.ldd, FORMAT_BF16, s.N);
        }
        matmul(wide, a + m * (s.transpose_a ? 1 : s.lda), b, bias, &slab);
#pragma omp parallel for schedule(static) if (!omp_in_parallel())
        for (int64_t i = 0; i < slab.M; i++) {
            cpu_store(d + (m + i) * s.ldd, FORMAT_BF16, wide + i * s.N, s.N);
        }
    }
}

void cpu_matmul(void *d, const void *a, const void *b, const float *bias, CpuMatmul shape) {
    if (shape.M == 0 || shape.N == 0) return;
    if (shape.dtype == FORMAT_FP32 && shape.d_dtype == FORMAT_BF16) {
        matmul_rounded(d, a, b, bias, shape);
    } else {
        matmul(d, a, b, bias, &shape);
    }
}
