/*
What the files of the CPU backend share: the operations (see ../operations.h), the workspace, and
rows of either dtype as FP32.
*/
#pragma once

#include "llmc/backend.h"
#include "llmc/base/util.h" // min_int64

// Columns that one thread sums over all rows: four cache lines of BF16. Reductions over rows go by
// slabs of columns, so that their order doesn't depend on the number of threads.
enum { CPU_SLAB = 128 };

enum { CACHE_LINE = 64 }; // bytes

// Returns the scratch given by use_workspace. Dies if it holds fewer than `bytes`.
void *cpu_workspace(size_t bytes);

// Returns memory for `bytes`, aligned to pages, which free gives back; ends the program where there
// is none.
void *cpu_allocate(size_t bytes);

// Multiplies tensors of one dtype, d = op(a) op(b) (+ bias): the building block of gemm and
// attention. d is BF16 or FP32. Called inside a parallel region it runs on the calling thread
// alone, else on all.
void cpu_matmul(Tensor d, Tensor a, Tensor b, GemmOptions options);

// Multiplies as cpu_matmul does where d (with transpose_b) or `a` as it is stored (without) has a
// row for each of attention's queries and a column for each key, and elements at row i and column j
// > i + diagonal are beyond what a query sees: those of `a` are 0, those of d may be left as they
// were.
void cpu_matmul_causal(Tensor d, Tensor a, Tensor b, GemmOptions options, int64_t diagonal);

// A diagonal beyond which nothing lies.
#define MATMUL_ALL (INT64_MAX / 2)

// Rows of d that matmul_packed makes at once.
enum { MATMUL_ROWS = 96 };

// Returns how many queries attention multiplies at a time by cpu_matmul, in `dtype`: with our own
// loop as many as it makes at once.
int64_t cpu_attention_rows(Format dtype);

// Multiplies operands of any kind as cpu_matmul does, in FP32 and by a loop of ours, and the
// product by `alpha`. Quantized operands are decoded and rounded to `values` (BF16 or FP32) as they
// are read, their factors left out. What is beyond the diagonal, as above, is passed over.
void matmul_packed(Tensor d, Operand a, Operand b, float alpha, GemmOptions options, Format values, int64_t diagonal);

// Returns the bytes that each thread keeps which has called it.
size_t matmul_bytes_of_thread(void);

// Makes d of a product in FP32, which it overwrites: alpha times the product (+ bias), added to d
// where options say so.
void cpu_finish_product(Tensor d, Tensor product, float alpha, GemmOptions options);

static inline void cpu_load(float *out, const void *in, Format dtype, int64_t count) {
    if (dtype == FORMAT_FP32) {
        memcpy(out, in, (size_t)count * sizeof(float));
    } else {
        const uint16_t *bf16 = in;
        for (int64_t i = 0; i < count; i++) {
            out[i] = mx_from_bf16(bf16[i]);
        }
    }
}

static inline void cpu_store(void *out, Format dtype, const float *in, int64_t count) {
    if (dtype == FORMAT_FP32) {
        memcpy(out, in, (size_t)count * sizeof(float));
    } else {
        uint16_t *bf16 = out;
        for (int64_t i = 0; i < count; i++) {
            bf16[i] = mx_to_bf16(in[i]);
        }
    }
}

static inline void cpu_round_to_bf16(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        x[i] = mx_from_bf16(mx_to_bf16(x[i]));
    }
}

static inline void *cpu_at(Tensor tensor, int64_t row, int64_t col) {
    return (char *)tensor.data + (size_t)(row * tensor.stride + col) * dtype_size(tensor.dtype);
}

// The lanes of two vectors of one type that `from` names, which counts those of `b` on from a's: a
// builtin of GCC's that clang lacks.
#ifdef __clang__
#define CPU_SHUFFLE(a, b, from)                                                 \
    ({                                                                          \
        __typeof__(a) of_a_ = (a), of_b_ = (b), shuffled_;                      \
        __typeof__(from) from_ = (from);                                        \
        const int lanes_ = (int)(sizeof(of_a_) / sizeof(of_a_[0]));             \
        for (int lane_ = 0; lane_ < lanes_; lane_++) {                          \
            int at_ = (int)from_[lane_];                                        \
            shuffled_[lane_] = at_ < lanes_ ? of_a_[at_] : of_b_[at_ - lanes_]; \
        }                                                                       \
        shuffled_;                                                              \
    })
#else
#define CPU_SHUFFLE(a, b, from) __builtin_shuffle(a, b, from)
#endif

// Rows of columns that are read one below the other are prefetched so many ahead: they lie further
// apart than processors look for what is read next.
enum { CPU_ROWS_AHEAD = 8 };

// Prefetches bytes. Inlined, since gcc takes a call that only prefetches for one that does nothing.
MX_FUNCTION void cpu_prefetch(const void *data, int64_t bytes) {
    for (int64_t i = -(int64_t)((uintptr_t)data % CACHE_LINE); i < bytes; i += CACHE_LINE) {
        __builtin_prefetch((const char *)data + i);
    }
}

// Loads `count` elements of a row, and prefetches those of a row below.
static inline void cpu_load_column(float *out, Tensor tensor, int64_t row, int64_t col, int64_t count) {
    cpu_prefetch(cpu_at(tensor, row + CPU_ROWS_AHEAD, col), count * (int64_t)dtype_size(tensor.dtype));
    cpu_load(out, cpu_at(tensor, row, col), tensor.dtype, count);
}

static inline void cpu_load_row(float *out, Tensor tensor, int64_t row) {
    cpu_load(out, cpu_at(tensor, row, 0), tensor.dtype, tensor.cols);
}

static inline void cpu_store_row(Tensor tensor, int64_t row, const float *in) {
    cpu_store(cpu_at(tensor, row, 0), tensor.dtype, in, tensor.cols);
}

// Returns the position of a row's token.
static inline int64_t cpu_position(Sequences sequences, int64_t row) {
    return sequences.positions ? sequences.positions[row] : row % sequences.T;
}

// A prototype for each operation: void cpu_convert(Tensor out, Tensor in);
#define OPERATION(result, name, parameters, arguments) result cpu_##name parameters;
#define QUERY(result, name, parameters) result cpu_##name parameters;
#include "llmc/operations.h"

// Decodes columns [first, first + count) of a row, but for a factor; `first` is a multiple of
// MX_BLOCK.
void cpu_decode_row(float *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count);

// The same rounded to BF16.
void cpu_decode_row_to_bf16(uint16_t *out, const QuantizedTensor *in, int64_t row, int64_t first, int64_t count);

// Decodes: out = the values of `in`, rounded to `values` (BF16 or FP32) whatever out's dtype.
void cpu_dequantize(Tensor out, const QuantizedTensor *in, Format values);
