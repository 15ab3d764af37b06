/*
The GPU's own attention kernels (llmc/cuda/attention.cu), on a GPU or on the host shim, against
double precision and against the CPU's attention: every value within what FP32 sums of its length
can be off by (attention_reference.h), twice that plus the CPU's roundings between the two. Both
runs give the same bits; nothing beyond a tensor's columns is written. On a GPU also cuDNN's, which
rounds probabilities, their gradients and O to BF16 on the way.
*/
#include "attention_reference.h"
#include "llmc/cpu/cpu.h"
#include "llmc/cuda/attention.h"

#include <math.h>

static const Backend *cuda, *cpu;
static const char *const DTYPE_NAMES[] = {"fp32", "bf16"};

static void *to_device(const void *host, size_t bytes) {
    void *device = cuda->allocate(bytes);
    cuda->copy_to_device(device, host, bytes);
    return device;
}

static void from_device(void *host, void *device, size_t bytes) {
    cuda->copy_to_host(host, device, bytes);
    cuda->release(device);
}

static Tensor tensor_to_device(Tensor host) {
    Tensor device = host;
    device.data = to_device(host.data, tensor_bytes(host));
    return device;
}

typedef struct {
    Tensor out, dqkv;
    float *logsumexp;
} AttentionResult;

typedef struct {
    size_t (*workspace)(Format dtype, AttentionShape shape);
    void (*forward)(Tensor out, float *logsumexp, Tensor qkv, AttentionShape shape);
    void (*backward)(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp, AttentionShape shape);
} Kernels;

static size_t plain_workspace(Format dtype, AttentionShape shape) {
    (void)dtype;
    return cuda_attention_workspace_plain(shape);
}

static void plain_backward(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                           AttentionShape shape) {
    (void)out;
    cuda_attention_backward_plain(dqkv, dout, qkv, logsumexp, shape);
}

static const Kernels PLAIN = {plain_workspace, cuda_attention_forward_plain, plain_backward};

// `gap`: columns between a row's end and the next row.
static AttentionResult take_result(Tensor qkv, AttentionShape shape, bool gap) {
    AttentionResult r = {take_tensor(qkv.dtype, qkv.rows, shape.NH * shape.HS),
                         take_tensor(qkv.dtype, qkv.rows, qkv.cols), take_floats(shape.B * shape.NH * shape.T)};
    if (!gap) r.out.stride = r.out.cols, r.dqkv.stride = r.dqkv.cols;
    return r;
}

static AttentionResult run_kernels(Kernels kernels, Tensor qkv, Tensor dout, AttentionShape shape, bool gap) {
    AttentionResult r = take_result(qkv, shape, gap);
    size_t logsumexp_bytes = (size_t)(shape.B * shape.NH * shape.T) * sizeof(float);
    Tensor qkv_device = tensor_to_device(qkv), dout_device = tensor_to_device(dout);
    Tensor out = tensor_to_device(r.out), dqkv = tensor_to_device(r.dqkv);
    float *logsumexp = to_device(r.logsumexp, logsumexp_bytes);
    int32_t *positions = NULL;
    AttentionShape on_device = shape;
    if (shape.by_document) {
        on_device.positions = positions = to_device(shape.positions, (size_t)qkv.rows * sizeof(int32_t));
    }
    size_t workspace_bytes = kernels.workspace(qkv.dtype, shape);
    void *workspace = cuda->allocate(workspace_bytes);
    cuda->use_workspace(workspace, workspace_bytes);
    kernels.forward(out, logsumexp, qkv_device, on_device);
    kernels.backward(dqkv, dout_device, out, qkv_device, logsumexp, on_device);
    from_device(r.out.data, out.data, tensor_bytes(out));
    from_device(r.dqkv.data, dqkv.data, tensor_bytes(dqkv));
    from_device(r.logsumexp, logsumexp, logsumexp_bytes);
    cuda->release(qkv_device.data), cuda->release(dout_device.data), cuda->release(workspace);
    if (positions) cuda->release(positions);
    return r;
}

static AttentionResult run_cuda(Tensor qkv, Tensor dout, AttentionShape shape, bool gap) {
    return run_kernels(PLAIN, qkv, dout, shape, gap);
}

static AttentionResult run_cpu(Tensor qkv, Tensor dout, AttentionShape shape) {
    AttentionResult r = take_result(qkv, shape, true);
    size_t bytes = cpu_attention_workspace(qkv.dtype, shape);
    cpu->use_workspace(pool_take(bytes), bytes);
    cpu_attention_forward(r.out, r.logsumexp, qkv, shape);
    cpu_attention_backward(r.dqkv, dout, r.out, qkv, r.logsumexp, shape);
    return r;
}

// Rows without gaps and, for heads of whole 16-byte pieces, aligned: another path through the
// kernels.
static Tensor without_gaps(Tensor t) {
    Tensor packed = tensor_make(pool_take(tensor_bytes(t)), t.dtype, t.rows, t.cols);
    for (int64_t i = 0; i < t.rows * t.cols; i++) {
        tensor_set(packed, i / t.cols, i % t.cols, tensor_get(t, i / t.cols, i % t.cols));
    }
    return packed;
}

static void check_same_result(AttentionResult a, AttentionResult b, int64_t logsumexps) {
    for (int64_t i = 0; i < a.dqkv.rows * a.dqkv.cols; i++) {
        int64_t row = i / a.dqkv.cols, col = i % a.dqkv.cols;
        assert_true(tensor_get(a.dqkv, row, col) == tensor_get(b.dqkv, row, col));
        if (col < a.out.cols) assert_true(tensor_get(a.out, row, col) == tensor_get(b.out, row, col));
    }
    check_same_floats(a.logsumexp, b.logsumexp, logsumexps);
}

// What dqkv should be, and what it may be off by: `bound` before its store, `twin_bound` the CPU's.
typedef struct {
    double *dqkv, *bound, *twin_bound;
} Gradients;

static void check_head(Check *out, Check *lse, Check *twins, Gradients *sum, const AttentionResult *r,
                       const AttentionResult *twin, Tensor qkv, Tensor dout, AttentionShape shape, bool rounds,
                       int64_t index) {
    int64_t T = shape.T, HS = shape.HS, b = index / shape.NH, head = index % shape.NH;
    int64_t kv = head / (shape.NH / shape.NKV);
    const int64_t first[] = {head * HS, (shape.NH + kv) * HS, (shape.NH + shape.NKV + kv) * HS};
    HeadReference h = attention_reference(qkv, dout, b, head, shape, rounds ? FORMAT_BF16 : FORMAT_FP32, rounds);
    HeadReference h_twin = attention_reference(qkv, dout, b, head, shape, qkv.dtype, false);
    for (int part = 0; part < 3; part++) {
        // cuDNN rounds what each query head adds to the gradients of keys and values that heads
        // share.
        for (int64_t i = 0; rounds && part > 0 && shape.NKV < shape.NH && i < T * HS; i++) {
            h.bound[part][i] += U_BF16 * (fabs(h.gradient[part][i]) + h.bound[part][i]);
        }
        add_head(sum->dqkv, qkv.cols, h.gradient[part], shape, b, first[part]);
        add_head(sum->bound, qkv.cols, h.bound[part], shape, b, first[part]);
        add_head(sum->twin_bound, qkv.cols, h_twin.bound[part], shape, b, first[part]);
    }
    for (int64_t i = 0; i < T * HS; i++) {
        int64_t row = b * T + i / HS, col = head * HS + i % HS;
        double value = tensor_get(r->out, row, col), once = rounding(qkv.dtype, h.out[i]);
        check_value(out, value, h.out[i], h.out_bound[i] + once);
        check_value(twins, value, tensor_get(twin->out, row, col), h.out_bound[i] + h_twin.out_bound[i] + 2 * once);
    }
    for (int64_t t = 0; t < T; t++) {
        int64_t at = index * T + t;
        check_value(lse, r->logsumexp[at], h.lse[t], h.lse_bound[t]);
        check_value(twins, r->logsumexp[at], twin->logsumexp[at], h.lse_bound[t] + h_twin.lse_bound[t]);
    }
}

// Against double precision and the CPU. `rounds`: P, dS and O to BF16 on the way.
static void check_values(const AttentionResult *r, Tensor qkv, Tensor dout, AttentionShape shape, double stddev,
                         bool rounds) {
    int64_t rows = shape.B * shape.T, heads = shape.B * shape.NH, cols = qkv.cols;
    AttentionResult twin = run_cpu(qkv, dout, shape);
    Check out = {0}, lse = {0}, gradient = {0}, twins = {0};
    Gradients sum = {take_zeros(rows * cols), take_zeros(rows * cols), take_zeros(rows * cols)};
    for (int64_t index = 0; index < heads; index++) {
        check_head(&out, &lse, &twins, &sum, r, &twin, qkv, dout, shape, rounds, index);
    }
    for (int64_t i = 0; i < rows * cols; i++) {
        double value = tensor_get(r->dqkv, i / cols, i % cols), once = rounding(qkv.dtype, sum.dqkv[i]);
        check_value(&gradient, value, sum.dqkv[i], sum.bound[i] + once);
        check_value(&twins, value, tensor_get(twin.dqkv, i / cols, i % cols),
                    sum.bound[i] + sum.twin_bound[i] + 2 * once);
    }
    check_end(&out, "forward %s T %lld NH %lld NKV %lld HS %lld std %g%s", DTYPE_NAMES[qkv.dtype], (long long)shape.T,
              (long long)shape.NH, (long long)shape.NKV, (long long)shape.HS, stddev,
              shape.by_document ? " in documents"
              : shape.causal    ? ""
                                : " unmasked");
    check_end(&lse, "  logsumexp");
    check_end(&gradient, "  backward");
    check_end(&twins, "  all of it against the CPU's");
}

static void check_attention(Format dtype, AttentionShape shape, double stddev) {
    int64_t rows = shape.B * shape.T, cols = (shape.NH + 2 * shape.NKV) * shape.HS;
    Tensor qkv = random_tensor(dtype, rows, cols, stddev), dout = random_tensor(dtype, rows, shape.NH * shape.HS, 1);
    AttentionResult r = run_cuda(qkv, dout, shape, true), again = run_cuda(qkv, dout, shape, true);
    check_same_tensor(r.out, again.out);
    check_same_tensor(r.dqkv, again.dqkv);
    check_same_result(r, run_cuda(without_gaps(qkv), without_gaps(dout), shape, false), shape.B * shape.NH * shape.T);
    check_padding(r.out);
    check_padding(r.dqkv);
    check_values(&r, qkv, dout, shape, stddev, false);
    pool_release();
}

static void test_against_double_and_cpu(void **state) {
    (void)state;
    static const int64_t LENGTHS[] = {1, 7, 64, 129, 200};
    static const int64_t HEADS[][2] = {{3, 20}, {2, 63}, {1, 64}, {2, 128}, {1, 256}};
    for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
        for (size_t t = 0; t < sizeof(LENGTHS) / sizeof(LENGTHS[0]); t++) {
            for (size_t h = 0; h < sizeof(HEADS) / sizeof(HEADS[0]); h++) {
                check_attention(dtype, as_many_keys(LENGTHS[t] < 100 ? 2 : 1, LENGTHS[t], HEADS[h][0], HEADS[h][1]), 1);
            }
        }
        check_attention(dtype, as_many_keys(1, 129, 2, 64), 36); // scores of about +-1e4 before their scale
    }
}

// Query heads that share keys, and queries that see all of them; tiles' edges within and beyond T.
static void test_grouped_and_unmasked(void **state) {
    (void)state;
    static const int64_t HEADS[][3] = {{4, 2, 16}, {6, 2, 20}, {5, 1, 8}, {3, 3, 16}, {2, 1, 128}}; // NH, NKV, HS
    static const int64_t LENGTHS[] = {1, 64, 133};
    for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
        for (size_t h = 0; h < sizeof(HEADS) / sizeof(HEADS[0]); h++) {
            for (size_t t = 0; t < sizeof(LENGTHS) / sizeof(LENGTHS[0]); t++) {
                AttentionShape shape = as_many_keys(LENGTHS[t] < 100 ? 2 : 1, LENGTHS[t], HEADS[h][0], HEADS[h][2]);
                shape.NKV = HEADS[h][1];
                check_attention(dtype, shape, 1);
                shape.causal = false;
                check_attention(dtype, shape, 1);
            }
        }
    }
}

// Documents that begin and end anywhere in tiles of queries and keys, some of one token.
static void test_in_documents(void **state) {
    (void)state;
    static const int64_t LENGTHS[] = {1, 64, 133, 260};
    for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
        for (size_t t = 0; t < sizeof(LENGTHS) / sizeof(LENGTHS[0]); t++) {
            for (int32_t length = 2; length <= 100; length *= 7) {
                AttentionShape shape = as_many_keys(2, LENGTHS[t], 4, 16);
                shape.NKV = 2;
                shape.by_document = true;
                shape.positions = take_documents(shape.B, shape.T, length);
                check_attention(dtype, shape, 1);
            }
        }
    }
}

// Scores of +-1e4 after their scale: the largest takes all, nothing overflows, and gradients that
// cancel are 0.
static void test_large_scores(void **state) {
    (void)state;
    enum { T = 80, HS = 16 };
    for (Format dtype = FORMAT_FP32; dtype <= FORMAT_BF16; dtype++) {
        Tensor qkv = take_tensor(dtype, T, 3 * HS), dout = random_tensor(dtype, T, HS, 1);
        for (int64_t t = 0; t < T; t++) {
            for (int64_t d = 0; d < HS; d++) {
                tensor_set(qkv, t, d, d == 0 ? 200 : 0);
                tensor_set(qkv, t, HS + d, d == 0 ? (t == 0 ? 200 : -200) : 0);
                tensor_set(qkv, t, 2 * HS + d, (double)(t + d));
            }
        }
        AttentionResult r = run_cuda(qkv, dout, as_many_keys(1, T, 1, HS), true);
        for (int64_t t = 0; t < T; t++) {
            assert_true(r.logsumexp[t] == 1e4f);
            for (int64_t d = 0; d < HS; d++) {
                assert_true(tensor_get(r.out, t, d) == (double)d); // v of token 0
                assert_true(tensor_get(r.dqkv, t, d) == 0 && tensor_get(r.dqkv, t, HS + d) == 0);
            }
        }
        pool_release();
    }
}

// Later tokens change nothing before them, and get no gradient from there.
static void test_is_causal(void **state) {
    (void)state;
    enum { T = 140, NH = 2, HS = 20, C = NH * HS, CHANGED = 90 };
    Tensor qkv = random_tensor(FORMAT_BF16, T, 3 * C, 1), dout = random_tensor(FORMAT_BF16, T, C, 1);
    AttentionResult before = run_cuda(qkv, dout, as_many_keys(1, T, NH, HS), true);
    for (int64_t t = CHANGED; t < T; t++) {
        for (int64_t c = 0; c < 3 * C; c++) {
            tensor_set(qkv, t, c, 100.0 * (double)(c % 3 - 1));
            if (c < C) tensor_set(dout, t, c, 0);
        }
    }
    AttentionResult after = run_cuda(qkv, dout, as_many_keys(1, T, NH, HS), true);
    for (int64_t i = 0; i < T * C; i++) {
        if (i < CHANGED * C) assert_true(tensor_get(before.out, i / C, i % C) == tensor_get(after.out, i / C, i % C));
        for (int part = 0; part < 3 && i >= CHANGED * C; part++) {
            assert_true(tensor_get(after.dqkv, i / C, part * C + i % C) == 0);
        }
    }
    pool_release();
}

// A NaN in a token's query, key or value reaches its own output.
static void test_nan(void **state) {
    (void)state;
    enum { T = 70, HS = 20, WHERE = 66 };
    for (int part = 0; part < 3; part++) {
        Tensor qkv = random_tensor(FORMAT_FP32, T, 3 * HS, 1), dout = random_tensor(FORMAT_FP32, T, HS, 1);
        tensor_set(qkv, WHERE, part * HS + 3, NAN);
        AttentionResult r = run_cuda(qkv, dout, as_many_keys(1, T, 1, HS), true);
        assert_true(isnan(tensor_get(r.out, WHERE, 3)));
        assert_true(!isnan(tensor_get(r.out, 0, 3)));
        pool_release();
    }
}

#ifdef HAVE_CUDNN
static const Kernels CHOSEN = {cuda_attention_workspace, cuda_attention_forward, cuda_attention_backward};

// As under a recipe that keeps no BF16 copy of attention's output.
static void backward_without_out(Tensor dqkv, Tensor dout, Tensor out, Tensor qkv, const float *logsumexp,
                                 AttentionShape shape) {
    (void)out;
    cuda_attention_backward(dqkv, dout, (Tensor){0}, qkv, logsumexp, shape);
}

// Returns `count` copies of a sequence, or, by `heads`, of a head within each row: (T, columns of
// queries, keys and values or of outputs).
static Tensor repeated(Tensor one, int64_t count, int64_t parts, bool heads) {
    int64_t rows = heads ? one.rows : count * one.rows, cols = heads ? count * one.cols : one.cols;
    Tensor all = tensor_make(pool_take((size_t)(rows * cols) * sizeof(uint16_t)), FORMAT_BF16, rows, cols);
    int64_t width = one.cols / parts, wide = cols / parts;
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t row = i / cols, col = i % cols;
        int64_t from = col / wide * width + col % wide % width;
        ((uint16_t *)all.data)[i] = ((uint16_t *)one.data)[row % one.rows * one.cols + from];
    }
    return all;
}

// Checks that a backward pass which goes in parts has the same bits for every one of the sequences,
// or heads, that are alike, and that they are those of the pass without `out`.
static void check_parts(AttentionShape one, int64_t count, bool heads) {
    AttentionShape shape = one;
    *(heads ? &shape.NH : &shape.B) *= count;
    shape.NKV = shape.NH;
    Tensor qkv = without_gaps(random_tensor(FORMAT_BF16, one.B * one.T, 3 * one.NH * one.HS, 1));
    Tensor dout = without_gaps(random_tensor(FORMAT_BF16, one.B * one.T, one.NH * one.HS, 1));
    Kernels remade = CHOSEN;
    remade.backward = backward_without_out;
    Tensor all_qkv = repeated(qkv, count, 3, heads), all_dout = repeated(dout, count, 1, heads);
    AttentionResult r = run_kernels(CHOSEN, all_qkv, all_dout, shape, false);
    check_same_tensor(r.dqkv, run_kernels(remade, all_qkv, all_dout, shape, false).dqkv);
    AttentionShape part = cuda_attention_backward_part(shape);
    printf("    B %lld, T %lld, NH %lld in parts of B %lld, NH %lld\n", (long long)shape.B, (long long)shape.T,
           (long long)shape.NH, (long long)part.B, (long long)part.NH);
    assert_true(part.B < shape.B || part.NH < shape.NH);
    int64_t rows = one.B * one.T, width = one.NH * one.HS, wide = shape.NH * shape.HS;
    Tensor first = tensor_make(pool_take((size_t)(rows * qkv.cols) * sizeof(uint16_t)), FORMAT_BF16, rows, qkv.cols);
    for (int64_t i = 0; i < rows * first.cols; i++) {
        int64_t col = i % first.cols;
        tensor_set(first, i / first.cols, col, tensor_get(r.dqkv, i / first.cols, col / width * wide + col % width));
    }
    check_same_tensor(r.dqkv, repeated(first, count, 3, heads));
    if (heads) { // too long for sums in double: beside our own kernels
        AttentionResult plain = run_cuda(qkv, dout, one, false);
        double difference = 0, norm = 0;
        for (int64_t i = 0; i < rows * first.cols; i++) {
            double value = tensor_get(plain.dqkv, i / first.cols, i % first.cols);
            difference += pow(tensor_get(first, i / first.cols, i % first.cols) - value, 2);
            norm += value * value;
        }
        // Probabilities, their gradients, O and the result are each rounded by 2^-9 at most.
        double bound = 4 * 0x1p-9;
        printf("    off by %.3g of our own kernels' in norm, bound %.3g\n", sqrt(difference / norm), bound);
        assert_true(sqrt(difference / norm) <= bound);
    } else {
        AttentionResult alone = {tensor_rows(r.out, 0, rows), first, r.logsumexp};
        check_values(&alone, qkv, dout, one, 1, true);
    }
    pool_release();
}
#endif

// More gradients of scores than the workspace's 512 MB: by sequences, and by heads of a long one.
static void test_cudnn_in_parts(void **state) {
    (void)state;
#ifdef HAVE_CUDNN
    if (cuda_attention_cudnn_version() == 0) skip();
    AttentionShape sequence = as_many_keys(1, 1024, 2, 64), head = as_many_keys(1, 16384, 1, 64);
    if (!cuda_attention_cudnn_takes(FORMAT_BF16, sequence)) skip();
    check_parts(sequence, 160, false);
    check_parts(head, 4, true);
#else
    skip();
#endif
}

// cuDNN's kernels, chosen as the model chooses them. Where it isn't on the machine there is nothing
// to test; a version that has faults isn't used.
static void test_cudnn(void **state) {
    (void)state;
#ifdef HAVE_CUDNN
    static const AttentionShape SHAPES[] = {{.B = 2, .T = 64, .NH = 2, .NKV = 2, .causal = true},
                                            {.B = 1, .T = 129, .NH = 2, .NKV = 2, .causal = true},
                                            {.B = 1, .T = 512, .NH = 2, .NKV = 2, .causal = true},
                                            {.B = 1, .T = 512, .NH = 4, .NKV = 2, .causal = true},
                                            {.B = 1, .T = 512, .NH = 2, .NKV = 2},
                                            {.B = 1, .T = 256, .NH = 4, .NKV = 2}};
    size_t version = cuda_attention_cudnn_version();
    if (version == 0) skip();
    for (int64_t HS = 64; HS <= 128; HS += 64) {
        for (size_t i = 0; i < sizeof(SHAPES) / sizeof(SHAPES[0]); i++) {
            AttentionShape shape = SHAPES[i];
            shape.HS = HS;
            const char *fault = cuda_attention_cudnn_fault(version, shape.T, shape.causal);
            if (fault) {
                printf("    T %lld left out: %s\n", (long long)shape.T, fault);
                continue;
            }
            assert_true(cuda_attention_cudnn_takes(FORMAT_BF16, shape));
            int64_t rows = shape.B * shape.T, cols = (shape.NH + 2 * shape.NKV) * HS;
            Tensor qkv = without_gaps(random_tensor(FORMAT_BF16, rows, cols, 1));
            Tensor dout = without_gaps(random_tensor(FORMAT_BF16, rows, shape.NH * HS, 1));
            AttentionResult r = run_kernels(CHOSEN, qkv, dout, shape, false);
            check_same_result(r, run_kernels(CHOSEN, qkv, dout, shape, false), shape.B * shape.NH * shape.T);
            check_values(&r, qkv, dout, shape, 1, true);
            pool_release();
        }
    }
#else
    skip();
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_double_and_cpu),
        cmocka_unit_test(test_grouped_and_unmasked),
        cmocka_unit_test(test_in_documents),
        cmocka_unit_test(test_large_scores),
        cmocka_unit_test(test_is_causal),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_cudnn),
        cmocka_unit_test(test_cudnn_in_parts),
    };
    Error error;
    cpu = backend_cpu();
    cuda = backend_cuda(MX_GEMM_AUTO, &error);
    if (!cuda) {
        printf("%s\n", error.message);
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
