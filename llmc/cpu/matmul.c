/*
Multiplies matrices in FP32, whatever the operands are stored as: blocks of them are decoded or
widened as they are packed into the caches, where a kernel that holds a tile of d in registers runs
along K (Goto & van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication").

Each thread makes a part of d by itself. An element is summed in one order, block after block of K,
whatever part it lies in: the number of threads doesn't change its bits.
*/
#include "cpu.h"

#include <omp.h>

// What a register holds, and the kernel's tile, whose sums fill most of the registers.
#if defined(__AVX512F__)
enum { LANES = 16, KERNEL_ROWS = 12, KERNEL_COLS = 32 };
#elif defined(__AVX2__)
enum { LANES = 8, KERNEL_ROWS = 6, KERNEL_COLS = 16 };
#else
enum { LANES = 4, KERNEL_ROWS = 6, KERNEL_COLS = 16 };
#endif
enum { KERNEL_VECTORS = KERNEL_COLS / LANES };

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t Places __attribute__((vector_size(LANES * sizeof(int32_t))));

// A block of `a` (M,K) stays in the second-level cache while the kernel passes over it, a panel of
// `b` (K, KERNEL_COLS) in the first. All are multiples of MX_BLOCK, of the kernel's tile, or both.
enum { BLOCK_M = MATMUL_ROWS, BLOCK_N = 512, BLOCK_K = 256, PART_M = 11 * BLOCK_M };
_Static_assert(BLOCK_M % KERNEL_ROWS == 0, "panels of a block are whole");

// A thread's memory.
typedef struct {
    float a[BLOCK_M * BLOCK_K];  // a block: rows along K, or panels of KERNEL_ROWS rows
    float b[BLOCK_K * BLOCK_N];  // panels of KERNEL_COLS columns, each K-major
    float sums[PART_M][BLOCK_N]; // of the blocks of K so far
} Scratch;

// Whole loops, so that an array of sums is registers.
#define UNROLL _Pragma("GCC unroll 16")

// An operand as it is stored, and what its values are rounded to when they are decoded.
typedef struct {
    Operand stored;
    bool transposed;
    Format values;
} Packed;

typedef struct {
    Packed a, b;
    int64_t K;
    float alpha;
    const float *bias;
    bool accumulate;
    int64_t diagonal;
} Product;

// Returns at most `rows` x `cols` of x, those from (row, col) on that there are.
static Tensor tensor_part(Tensor x, int64_t row, int64_t col, int64_t rows, int64_t cols) {
    return tensor_cols(tensor_rows(x, row, min_int64(rows, x.rows - row)), col, min_int64(cols, x.cols - col));
}

size_t matmul_bytes_of_thread(void) { return sizeof(Scratch); }

// Returns the calling thread's scratch, which it keeps.
static Scratch *scratch_of_thread(void) {
    static _Thread_local Scratch *scratch;
    if (!scratch) scratch = cpu_allocate(sizeof(Scratch));
    return scratch;
}

MX_FUNCTION void prefetch_part(const Packed *x, int64_t row, int64_t col, int64_t count) {
    bool is_quantized = operand_is_quantized(x->stored);
    const QuantizedTensor *q = &x->stored.quantized;
    const char *part =
        is_quantized ? (const char *)q->elements + row * q->cols + col : cpu_at(x->stored.tensor, row, col);
    int64_t bytes = is_quantized ? count : count * (int64_t)dtype_size(x->stored.tensor.dtype);
    cpu_prefetch(part, bytes);
}

// Part of a stored row: `count` elements in `dtype`.
typedef struct {
    const void *data;
    Format dtype;
} Part;

// Memory for a part that is decoded.
typedef union {
    float fp32[BLOCK_N];
    uint16_t bf16[BLOCK_N];
} Room;

// Returns elements [col, col + count) of a stored row, as they are or decoded into `room`.
static Part part_of_row(Room *room, const Packed *x, int64_t row, int64_t col, int64_t count) {
    prefetch_part(x, row + CPU_ROWS_AHEAD, col, count);
    if (!operand_is_quantized(x->stored)) return (Part){cpu_at(x->stored.tensor, row, col), x->stored.tensor.dtype};
    if (x->values == FORMAT_BF16) {
        cpu_decode_row_to_bf16(room->bf16, &x->stored.quantized, row, col, count);
    } else {
        cpu_decode_row(room->fp32, &x->stored.quantized, row, col, count);
    }
    return (Part){room, x->values};
}

// Loads the same as FP32.
static void load_part(float *out, const Packed *x, int64_t row, int64_t col, int64_t count) {
    Room room;
    Part part = part_of_row(&room, x, row, col, count);
    cpu_load(out, part.data, part.dtype, count);
}

// Packs a [m, m + rows) x [k, k + depth), row by row.
static void pack_a(float *out, const Packed *a, int64_t m, int64_t k, int64_t rows, int64_t depth) {
    for (int64_t i = 0; i < rows; i++) {
        load_part(out + i * BLOCK_K, a, m + i, k, depth);
    }
}

// Packs the same of a transposed `a` as panels of KERNEL_ROWS rows, each K-major, so that what a
// tile reads lies together.
static void pack_a_transposed(float *out, const Packed *a, int64_t m, int64_t k, int64_t rows, int64_t depth) {
    float row[BLOCK_M] = {0};
    for (int64_t i = 0; i < depth; i++) {
        load_part(row, a, k + i, m, rows);
        for (int64_t j = 0; j < rows; j += KERNEL_ROWS) {
            memcpy(out + j * depth + i * KERNEL_ROWS, row + j, KERNEL_ROWS * sizeof(float));
        }
    }
}

// Spreads a row over panels `stride` apart, the last one filled up with zeros.
MX_FUNCTION void spread(float *out, int64_t stride, const void *row, Format dtype, int64_t cols) {
    int64_t size = (int64_t)dtype_size(dtype), whole = cols / KERNEL_COLS * KERNEL_COLS;
    for (int64_t j = 0; j < whole; j += KERNEL_COLS, out += stride) {
        cpu_load(out, (const char *)row + j * size, dtype, KERNEL_COLS);
    }
    if (whole == cols) return;
    memset(out, 0, KERNEL_COLS * sizeof(float));
    cpu_load(out, (const char *)row + whole * size, dtype, cols - whole);
}

// Packs op(b) [k, k + depth) x [n, n + cols), of b as it is.
static void pack_b(float *out, const Packed *b, int64_t k, int64_t n, int64_t depth, int64_t cols) {
    for (int64_t i = 0; i < depth; i++, out += KERNEL_COLS) {
        Room room;
        Part row = part_of_row(&room, b, k + i, n, cols);
        if (row.dtype == FORMAT_FP32) {
            spread(out, depth * KERNEL_COLS, row.data, FORMAT_FP32, cols);
        } else {
            spread(out, depth * KERNEL_COLS, row.data, FORMAT_BF16, cols);
        }
    }
}

// Exchanges lanes of rows that are `side` apart: the upper's odd groups of `side` lanes for the
// lower's even ones. Does nothing where a register has no more lanes than that.
MX_FUNCTION void exchange_squares(Lanes x[LANES], int side) {
    Places upper, lower;
    UNROLL
    for (int i = 0; i < LANES; i++) {
        upper[i] = i & side ? LANES + i - side : i;
        lower[i] = i & side ? LANES + i : i + side;
    }
    UNROLL
    for (int i = 0; i + side < LANES; i++) {
        if (i & side) continue;
        Lanes first = x[i], second = x[i + side];
        x[i] = CPU_SHUFFLE(first, second, upper);
        x[i + side] = CPU_SHUFFLE(first, second, lower);
    }
}

// Transposes a square of registers: its quarters, then theirs, down to single lanes.
MX_FUNCTION void transpose_lanes(Lanes x[LANES]) {
    exchange_squares(x, 8);
    exchange_squares(x, 4);
    exchange_squares(x, 2);
    exchange_squares(x, 1);
}

// Packs the same of a transposed b, whose rows are columns of the panels: as many of them at a time
// as a register has lanes.
static void pack_b_transposed(float *out, const Packed *b, int64_t k, int64_t n, int64_t depth, int64_t cols) {
    float rows[LANES][BLOCK_K + LANES];                    // not a power of two: the caches have few places for those
    if (depth % LANES != 0) memset(rows, 0, sizeof(rows)); // what is loaded doesn't reach beyond depth
    for (int64_t j = 0; j < round_up_int64(cols, KERNEL_COLS); j += LANES) {
        if (cols - j < LANES) memset(rows, 0, sizeof(rows));
        for (int64_t c = 0; c < min_int64(LANES, cols - j); c++) {
            load_part(rows[c], b, n + j + c, k, depth);
        }
        float *panel = out + (j - j % KERNEL_COLS) * depth + j % KERNEL_COLS;
        for (int64_t i = 0; i < depth; i += LANES) {
            Lanes square[LANES];
            UNROLL
            for (int c = 0; c < LANES; c++) {
                square[c] = *(const Lanes *)&rows[c][i];
            }
            transpose_lanes(square);
            UNROLL
            for (int c = 0; c < LANES; c++) {
                if (i + c < depth) *(Lanes *)(panel + (i + c) * KERNEL_COLS) = square[c];
            }
        }
    }
}

// Makes a tile of sums over a block of K, `from`'s (or NULL) added. A tile that lies in memory is
// on its way while the loop runs.
MX_FUNCTION void kernel(float *to, int64_t to_stride, const float *from, int64_t from_stride, const float *a,
                        int64_t a_row, int64_t a_k, const float *b, int64_t depth) {
    Lanes sum[KERNEL_ROWS][KERNEL_VECTORS] = {{{0}}};
    for (int i = 0; i < KERNEL_ROWS; i++) {
        const float *first = from ? from + i * from_stride : to + i * to_stride;
        __builtin_prefetch(first, 1);
        __builtin_prefetch(first + KERNEL_COLS - 1, 1);
    }
    for (int64_t k = 0; k < depth; k++) {
        const Lanes *row = (const Lanes *)(b + k * KERNEL_COLS);
        UNROLL
        for (int i = 0; i < KERNEL_ROWS; i++) {
            float x = a[i * a_row + k * a_k];
            UNROLL
            for (int j = 0; j < KERNEL_VECTORS; j++) {
                sum[i][j] += x * row[j];
            }
        }
    }
    UNROLL
    for (int i = 0; i < KERNEL_ROWS; i++) {
        Lanes *out = (Lanes *)(to + i * to_stride);
        const Lanes *in = (const Lanes *)(from + i * from_stride);
        UNROLL
        for (int j = 0; j < KERNEL_VECTORS; j++) {
            if (from) sum[i][j] += in[j];
            out[j] = sum[i][j];
        }
    }
}

// The same where fewer rows or columns than the kernel's are left.
static void kernel_at_edge(Tensor to, const float *from, int64_t from_stride, const float *a, int64_t a_row,
                           int64_t a_k, const float *b, int64_t depth) {
    float tile[KERNEL_ROWS][KERNEL_COLS];
    kernel(tile[0], KERNEL_COLS, NULL, 0, a, a_row, a_k, b, depth);
    for (int64_t i = 0; i < to.rows; i++) {
        float *out = cpu_at(to, i, 0);
        for (int64_t j = 0; j < to.cols; j++) {
            out[j] = from ? tile[i][j] + from[i * from_stride + j] : tile[i][j];
        }
    }
}

// What of a block of K a tile of d is summed over.
typedef struct {
    int64_t begin, end;
} Depth;

static int64_t clamped(int64_t x, int64_t most) { return x < 0 ? 0 : min_int64(x, most); }

// Returns what of K [k, k + depth) the tile of d at `row` and `col` is summed over: all but what is
// beyond the diagonal in `a`, and nothing where d's own elements are beyond it.
static Depth depth_of_tile(const Product *p, int64_t row, int64_t col, int64_t k, int64_t depth) {
    if (p->b.transposed) return (Depth){0, col < row + KERNEL_ROWS + p->diagonal ? depth : 0};
    if (p->a.transposed) return (Depth){clamped(row - p->diagonal - k, depth), depth};
    return (Depth){0, clamped(row + KERNEL_ROWS + p->diagonal - k, depth)};
}

// A part of d: where it begins in d and in K.
typedef struct {
    int64_t row, col, k;
} Place;

// Multiplies a packed block of `a` with packed panels of `b` and adds `from`, or nothing where its
// data is NULL. The tile of `a` at row i begins at i * a_tile, and its elements lie a_row and a_k
// apart. A panel is in the first-level cache for all rows.
MX_FUNCTION void multiply_block(const Product *p, Place at, Tensor to, Tensor from, const float *a, int64_t a_tile,
                                int64_t a_row, int64_t a_k, const float *b, int64_t depth) {
    for (int64_t j = 0; j < to.cols; j += KERNEL_COLS) {
        for (int64_t i = 0; i < to.rows; i += KERNEL_ROWS) {
            Depth sum = {0, depth};
            if (p->diagonal != MATMUL_ALL) sum = depth_of_tile(p, at.row + i, at.col + j, at.k, depth);
            const float *added = from.data ? cpu_at(from, i, j) : NULL, *rows = a + i * a_tile + sum.begin * a_k;
            const float *panel = b + j * depth + sum.begin * KERNEL_COLS;
            if (to.rows - i >= KERNEL_ROWS && to.cols - j >= KERNEL_COLS) {
                kernel(cpu_at(to, i, j), to.stride, added, from.stride, rows, a_row, a_k, panel, sum.end - sum.begin);
            } else {
                Tensor rest = tensor_part(to, i, j, KERNEL_ROWS, KERNEL_COLS);
                kernel_at_edge(rest, added, from.stride, rows, a_row, a_k, panel, sum.end - sum.begin);
            }
        }
    }
}

// Returns what the product is added to: d itself, nothing ({0}), or what it makes of d and `bias`
// in `sums`. What is multiplied by alpha is added to them afterwards.
static Tensor begin_sums(const Product *p, Tensor sums, Tensor d, const float *bias) {
    if ((!p->accumulate && !bias) || p->alpha != 1) return (Tensor){0};
    if (!bias && d.dtype == FORMAT_FP32) return d;
    for (int64_t i = 0; i < sums.rows; i++) {
        float *row = cpu_at(sums, i, 0);
        memset(row, 0, (size_t)sums.cols * sizeof(float));
        if (p->accumulate) cpu_load_row(row, d, i);
        for (int64_t j = 0; bias && j < sums.cols; j++) {
            row[j] += bias[j];
        }
    }
    return sums;
}

// Makes the part of d that begins at `row` and `col`, at most PART_M x BLOCK_N. Between the blocks
// of K its sums stand in the scratch: d's rows may lie far apart.
static void multiply_region(const Product *p, Scratch *s, Tensor d, int64_t row, int64_t col) {
    Tensor sums = tensor_make(s->sums, FORMAT_FP32, PART_M, BLOCK_N);
    for (int64_t k = 0; k < p->K; k += BLOCK_K) {
        int64_t depth = min_int64(BLOCK_K, p->K - k);
        bool is_last = k + depth == p->K;
        (p->b.transposed ? pack_b_transposed : pack_b)(s->b, &p->b, k, col, depth, d.cols);
        for (int64_t m = 0; m < d.rows; m += BLOCK_M) {
            Tensor out = tensor_part(d, m, 0, BLOCK_M, d.cols), part = tensor_part(sums, m, 0, out.rows, out.cols);
            const float *bias = p->bias ? p->bias + col : NULL;
            Tensor from = k > 0 ? part : begin_sums(p, part, out, bias);
            Tensor to = is_last && d.dtype == FORMAT_FP32 && p->alpha == 1 ? out : part;
            Place at = {row + m, col, k};
            if (p->a.transposed) {
                pack_a_transposed(s->a, &p->a, row + m, k, out.rows, depth);
                multiply_block(p, at, to, from, s->a, depth, 1, KERNEL_ROWS, s->b, depth);
            } else {
                pack_a(s->a, &p->a, row + m, k, out.rows, depth);
                multiply_block(p, at, to, from, s->a, BLOCK_K, BLOCK_K, 1, s->b, depth);
            }
            if (is_last && p->alpha != 1) {
                cpu_finish_product(out, part, p->alpha, (GemmOptions){.bias = bias, .accumulate = p->accumulate});
                continue;
            }
            for (int64_t i = 0; i < out.rows && is_last && d.dtype == FORMAT_BF16; i++) {
                cpu_store_row(out, i, cpu_at(part, i, 0));
            }
        }
    }
}

// Makes the part of d that begins at `row` and `col`.
static void multiply_part(const Product *p, Tensor d, int64_t row, int64_t col) {
    Scratch *s = scratch_of_thread();
    for (int64_t i = 0; i < d.rows; i += PART_M) {
        for (int64_t j = 0; j < d.cols; j += BLOCK_N) {
            multiply_region(p, s, tensor_part(d, i, j, PART_M, BLOCK_N), row + i, col + j);
        }
    }
}

static int64_t share(int64_t count, int64_t threads) {
    return (count + threads * MX_BLOCK - 1) / (threads * MX_BLOCK) * MX_BLOCK;
}

// Finds the rows and columns of d that each thread makes: of the grids of so many parts the one
// whose parts are the smallest, packing included, which takes as long for an element as about
// MX_BLOCK / 2 multiplications.
static void part_of_each(Tensor d, int threads, int64_t *rows, int64_t *cols) {
    int64_t least_work = INT64_MAX;
    for (int down = 1; down <= threads; down++) {
        int64_t high = share(d.rows, down), wide = share(d.cols, threads / down);
        int64_t work = high * wide + MX_BLOCK / 2 * (high + wide);
        if (threads % down || work >= least_work) continue;
        *rows = high;
        *cols = wide;
        least_work = work;
    }
}

void matmul_packed(Tensor d, Operand a, Operand b, float alpha, GemmOptions options, Format values, int64_t diagonal) {
    const Product p = {.a = {a, options.transpose_a, values},
                       .b = {b, options.transpose_b, values},
                       .K = options.transpose_a ? operand_rows(a) : operand_cols(a),
                       .alpha = alpha,
                       .bias = options.bias,
                       .accumulate = options.accumulate,
                       .diagonal = diagonal};
    if (d.rows == 0 || d.cols == 0) return;
    if (omp_in_parallel()) {
        multiply_part(&p, d, 0, 0);
        return;
    }
    int64_t rows = d.rows, cols = d.cols;
    part_of_each(d, omp_get_max_threads(), &rows, &cols);
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t row = 0; row < d.rows; row += rows) {
        for (int64_t col = 0; col < d.cols; col += cols) {
            multiply_part(&p, tensor_part(d, row, col, rows, cols), row, col);
        }
    }
}
