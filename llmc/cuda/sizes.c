#include "sizes.h"

static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// A 32nd: GPT-2's logits of 8192 tokens on an 80 GB card.
size_t cuda_head_scratch_bytes(double memory_bytes) { return (size_t)(memory_bytes / 32); }

// Sums over rows

int64_t cuda_sum_columns_scratch(int64_t rows, int64_t cols) {
    int64_t count = 0;
    while (rows > CUDA_ROWS_PER_PART) {
        rows = num_parts(rows, CUDA_ROWS_PER_PART);
        count += rows * cols;
    }
    return count;
}

// Parts have at least MIN_PART_ROWS rows, and there are at most MAX_PARTS of them, so that there
// are several blocks to a multiprocessor. Beside the tensors' 8 bytes per element in BF16, partial
// sums move 16 a column and part: a quarter in the smallest parts, a sixteenth with 32768 rows.
enum { MAX_PARTS = 1024, MIN_PART_ROWS = 8 };

int64_t cuda_layernorm_rows_per_part(int64_t rows) { return max_int64(num_parts(rows, MAX_PARTS), MIN_PART_ROWS); }

// Returns the floats of scratch that this pass takes; never less for more rows or columns.
static int64_t layernorm_scratch(int64_t rows, int64_t cols) {
    int64_t parts = min_int64(num_parts(rows, MIN_PART_ROWS), MAX_PARTS);
    return 2 * rows + 2 * parts * cols + cuda_sum_columns_scratch(parts, 2 * cols);
}

size_t cuda_reduction_workspace(int64_t rows, int64_t cols) {
    int64_t bias = cuda_sum_columns_scratch(rows, cols), layernorm = layernorm_scratch(rows, cols);
    // Tokens and rows, before a pass of their sort and after it, and counts: int32, as large as
    // floats.
    int64_t parts = num_parts(rows, MX_BLOCK), quantizer = parts * cols + cuda_sum_columns_scratch(parts, cols);
    int64_t embedding = 4 * rows + num_parts(rows, CUDA_SORT_ROWS) * CUDA_SORT_DIGITS;
    return (size_t)max_int64(max_int64(bias, quantizer), max_int64(layernorm, embedding)) * sizeof(float);
}

// Attention

size_t cuda_attention_plain_bytes(AttentionShape s) { return (size_t)(s.B * s.NH * s.T) * sizeof(float); }

// What dS may take: 256 heads at T 1024, more than enough to fill a GPU.
static const int64_t MAX_DSCORES_BYTES = (int64_t)512 << 20;

int64_t cuda_attention_dscores_bytes(AttentionShape s) { return s.B * s.NH * s.T * s.T * 2; }

// Returns the largest divisor of `whole` that isn't above `limit`; 1 where that is below 1.
static int64_t largest_divisor(int64_t whole, int64_t limit) {
    int64_t divisor = max_int64(min_int64(whole, limit), 1);
    while (whole % divisor != 0) {
        divisor--;
    }
    return divisor;
}

AttentionShape cuda_attention_backward_part(AttentionShape s) {
    AttentionShape part = s;
    part.B = 1;
    int64_t of_sequence = cuda_attention_dscores_bytes(part);
    if (of_sequence <= MAX_DSCORES_BYTES) {
        part.B = largest_divisor(s.B, MAX_DSCORES_BYTES / of_sequence);
    } else {
        part.NKV = largest_divisor(s.NKV, MAX_DSCORES_BYTES / (of_sequence / s.NKV));
        part.NH = s.NH / s.NKV * part.NKV;
    }
    return part;
}

// Of one head alone a sequence of 65536 has as much.
bool cuda_attention_has_room_for_dscores(AttentionShape s) {
    return cuda_attention_dscores_bytes(cuda_attention_backward_part(s)) <= (int64_t)8 << 30;
}

CudnnWorkspace cuda_attention_cudnn_workspace(AttentionShape s, size_t plan_bytes) {
    size_t rows = (size_t)(s.B * s.NH * s.T);
    CudnnWorkspace w = {.o = 0};
    w.softmax_sum = aligned(rows * (size_t)s.HS * sizeof(uint16_t));
    w.logsumexp = w.softmax_sum + aligned(rows * sizeof(float));
    w.plan = w.logsumexp + aligned(rows * sizeof(float));
    w.total = w.plan + plan_bytes;
    return w;
}
