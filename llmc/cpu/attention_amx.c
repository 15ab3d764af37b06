/*
Self-attention by AMX's tiles. A head's keys and values are packed once; then a block of queries at
a time is multiplied with the keys it sees, and what softmax makes of the scores is written as tiles
of the next product. The backward pass recomputes probabilities from the scores and logsumexp (Dao
et al., FlashAttention-2). Up to about 1,024 tokens a block's scores and a head's gradients stay in
the second-level cache.

The numbers are attention.c's but for the order of sums and the last bits of exponentials. Subnormal
numbers are 0, as they are for the tiles' instruction: others take many times as long over them.
*/
#include "attention.h"

#ifdef HAVE_AMX
#include "vector_math.h"
#include "llmc/base/memory.h"

#include <immintrin.h>

// A block's queries fill so many tiles along K, where they lie along it.
enum { QUERIES = 64, TILES_OF_QUERIES = QUERIES / AMX_K };
enum { LANES = 16 }; // of a register, in FP32

// A thread's scratch. P and dS are probabilities and the gradients of scores. Operands are packed
// as amx.h says.
typedef struct {
    float *scores, *dprobs; // (QUERIES, stride)
    int64_t stride;
    int64_t tiles_of_keys, tiles_of_channels; // along K
    uint16_t *k, *v;                          // right operands: K^T, and V or V^T
    uint16_t *k_rows;                         // and K
    uint16_t *rows;                           // left operand: P or dS
    uint16_t *q, *dout;                       // left operands: rows of Q and dO
    uint16_t *q_turned, *dout_turned;         // and these transposed
    uint16_t *probs, *dscores;                // right operands: P and dS
    float *dk, *dv; // transposed, in blocks of AMX_PRODUCT channels and keys: those of a key together
} Scratch;

static void *take(MemoryPlan *plan, int64_t count, size_t bytes) {
    return memory_take(plan, MEMORY_SCRATCH, (size_t)count * bytes);
}

static uint16_t *take_tiles(MemoryPlan *plan, int64_t count) {
    return take(plan, count, AMX_ELEMENTS * sizeof(uint16_t));
}

static int64_t elements_of_gradient(const Scratch *s) {
    return s->tiles_of_keys * s->tiles_of_channels * AMX_PRODUCT * AMX_PRODUCT;
}

// Lays a thread's scratch out from `base`, which may be NULL to get its size.
static size_t scratch_layout(Scratch *s, char *base, AttentionShape shape) {
    MemoryPlan plan = {.base = base};
    int64_t keys = amx_tiles(shape.T), channels = amx_tiles(shape.HS);
    s->tiles_of_keys = keys;
    s->tiles_of_channels = channels;
    s->stride = keys * AMX_K + LANES; // rows that aren't a power of two apart: caches have few places for those
    s->scores = take(&plan, QUERIES * s->stride, sizeof(float));
    s->dprobs = take(&plan, QUERIES * s->stride, sizeof(float));
    s->k = take_tiles(&plan, 2 * keys * channels);
    s->v = take_tiles(&plan, 2 * keys * channels);
    s->k_rows = take_tiles(&plan, 2 * keys * channels);
    s->rows = take_tiles(&plan, 2 * keys * TILES_OF_QUERIES);
    s->q = take_tiles(&plan, 2 * channels * TILES_OF_QUERIES);
    s->dout = take_tiles(&plan, 2 * channels * TILES_OF_QUERIES);
    s->q_turned = take_tiles(&plan, 2 * channels * TILES_OF_QUERIES);
    s->dout_turned = take_tiles(&plan, 2 * channels * TILES_OF_QUERIES);
    s->probs = take_tiles(&plan, 2 * keys * TILES_OF_QUERIES);
    s->dscores = take_tiles(&plan, 2 * keys * TILES_OF_QUERIES);
    s->dk = take(&plan, elements_of_gradient(s), sizeof(float));
    s->dv = take(&plan, elements_of_gradient(s), sizeof(float));
    return plan.used;
}

size_t attention_amx_scratch(AttentionShape shape) {
    Scratch s;
    return scratch_layout(&s, NULL, shape);
}

// A block of queries [first, first + count), and the tiles along K of the keys that they see.
typedef struct {
    int64_t first, count;
    int64_t first_tile, end_tile;
    int64_t tiles; // along K, of queries
} Block;

static Block block_at(const Head *head, int64_t first) {
    int64_t count = min_int64(QUERIES, head->q.rows - first);
    return (Block){first, count, keys_seen(head, first).begin / AMX_K,
                   amx_tiles(keys_seen(head, first + count - 1).end), amx_tiles(count)};
}

// Makes scores (QUERIES, keys) of queries and keys, or likewise dprobs of dO and values.
static void rows_times_tokens(float *scores, const Scratch *s, const uint16_t *rows, const uint16_t *tokens,
                              Block block) {
    int64_t depth = s->tiles_of_channels, panel = 2 * depth * AMX_ELEMENTS;
    for (int64_t t = block.first_tile; t < block.end_tile; t++) {
        for (int64_t i = 0; i < block.count; i += AMX_PRODUCT) {
            amx_multiply(scores + i * s->stride + t * AMX_K, s->stride, NULL, 0, rows + i / AMX_PRODUCT * panel,
                         tokens + t * panel, depth, 0, depth);
        }
    }
}

// Writes a block's rows of d (T, HS): the left operand s->rows times `tokens`.
static void write_rows(Tensor d, const Scratch *s, const uint16_t *tokens, Block block) {
    float product[AMX_PRODUCT][AMX_PRODUCT];
    int64_t depth = s->tiles_of_keys, panel = 2 * depth * AMX_ELEMENTS;
    for (int64_t c = 0; c < d.cols; c += AMX_PRODUCT) {
        for (int64_t first = 0; first < block.count; first += AMX_PRODUCT) {
            amx_multiply(product[0], AMX_PRODUCT, NULL, 0, s->rows + first / AMX_PRODUCT * panel,
                         tokens + c / AMX_PRODUCT * panel, depth, block.first_tile, block.end_tile);
            for (int64_t i = 0; i < min_int64(AMX_PRODUCT, block.count - first); i++) {
                cpu_store(cpu_at(d, block.first + first + i, c), FORMAT_BF16, product[i],
                          min_int64(AMX_PRODUCT, d.cols - c));
            }
        }
    }
}

// Returns where row `i` of a block is in the left operand s->rows, in the tile of the first keys.
static uint16_t *row_of_left(const Scratch *s, int64_t i) {
    return s->rows + (i / AMX_ROWS * s->tiles_of_keys * AMX_ROWS + i % AMX_ROWS) * AMX_K;
}

// Returns which of 16 keys from `key` on are seen.
static inline __mmask16 lanes_seen(Keys seen, int64_t key) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i from_begin = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(key - seen.begin)));
    return _mm512_cmplt_epu32_mask(from_begin, _mm512_set1_epi32((int)(seen.end - seen.begin)));
}

// Returns the largest score that a query sees.
static float largest(const float *scores, Keys seen) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t j = seen.begin; j < seen.end; j += LANES) {
        __mmask16 mask = lanes_seen(seen, j);
        most = _mm512_mask_max_ps(most, mask, _mm512_maskz_loadu_ps(mask, scores + j), most); // NaN is passed over
    }
    return _mm512_reduce_max_ps(most);
}

// Makes row `i` of a block's scores probabilities, in the left operand s->rows: 0 where the query
// doesn't see.
static void softmax_row(const Scratch *s, int64_t i, float scale, float *logsumexp, Keys seen, Block block) {
    float *scores = s->scores + i * s->stride, max = largest(scores, seen);
    __m512 factor = _mm512_set1_ps(scale * LOG2_E), most = _mm512_set1_ps(max);
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t t = block.first_tile; t < block.end_tile; t++) {
        for (int half = 0; half < 2; half++) {
            int64_t key = t * AMX_K + half * LANES;
            __m512 exponent = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + key), most), factor);
            __m512 probs = _mm512_maskz_mov_ps(lanes_seen(seen, key), vector_exp2(exponent));
            sums[half] = _mm512_add_ps(sums[half], probs);
            _mm512_storeu_ps(scores + key, probs);
        }
    }
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
    uint16_t *out = row_of_left(s, i);
    __m512 inverse = _mm512_set1_ps(1 / sum);
    for (int64_t t = block.first_tile; t < block.end_tile; t++) {
        __m512 probs = _mm512_mul_ps(_mm512_loadu_ps(scores + t * AMX_K), inverse);
        __m512 others = _mm512_mul_ps(_mm512_loadu_ps(scores + t * AMX_K + LANES), inverse);
        _mm512_storeu_si512(out + t * AMX_ELEMENTS, (__m512i)_mm512_cvtne2ps_pbh(others, probs));
    }
    *logsumexp = max * scale + logf(sum);
}

// Begins the calling thread's use of tiles, and makes 0 of subnormal numbers. Returns what end
// takes.
static unsigned begin(void) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    amx_begin();
    return mode;
}

static void end(unsigned mode) {
    amx_end();
    _mm_setcsr(mode);
}

void attention_amx_forward(Tensor out, float *logsumexp, const Head *head, AttentionShape shape, void *scratch) {
    Scratch s;
    scratch_layout(&s, scratch, shape);
    unsigned mode = begin();
    amx_pack_right(s.k, head->k, true);
    amx_pack_right(s.v, head->v, false);
    for (int64_t first = 0; first < out.rows; first += QUERIES) {
        Block block = block_at(head, first);
        amx_pack_left(s.q, tensor_rows(head->q, first, block.count), false);
        rows_times_tokens(s.scores, &s, s.q, s.k, block);
        for (int64_t i = 0; i < block.count; i++) {
            softmax_row(&s, i, head->scale, &logsumexp[first + i], keys_seen(head, first + i), block);
        }
        write_rows(out, &s, s.v, block);
    }
    end(mode);
}

// A query's row of a block. What it doesn't see isn't read: that may be NaN.
typedef struct {
    float *scores, *dprobs;
    float dot; // sum(P * dP)
    Keys seen;
} Row;

// Makes a row's scores P, 0 where the query doesn't see, and its dot.
static void recompute_probs(Row *row, float scale, float logsumexp, Block block) {
    __m512 factor = _mm512_set1_ps(scale), subtracted = _mm512_set1_ps(logsumexp);
    __m512 dots[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t t = block.first_tile; t < block.end_tile; t++) {
        for (int half = 0; half < 2; half++) {
            int64_t key = t * AMX_K + half * LANES;
            __mmask16 mask = lanes_seen(row->seen, key);
            __m512 exponent = _mm512_fmsub_ps(_mm512_loadu_ps(row->scores + key), factor, subtracted);
            __m512 probs = vector_exp2(_mm512_mul_ps(exponent, _mm512_set1_ps(LOG2_E)));
            probs = _mm512_maskz_mov_ps(mask, probs);
            dots[half] = _mm512_mask3_fmadd_ps(probs, _mm512_loadu_ps(row->dprobs + key), dots[half], mask);
            _mm512_storeu_ps(row->scores + key, probs);
        }
    }
    row->dot = _mm512_reduce_add_ps(_mm512_add_ps(dots[0], dots[1]));
}

// Returns two rows' numbers in BF16, those of a column beside each other.
static inline __m512i pairs_of(__m512 row, __m512 row_below) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(row_below, row));
}

// Returns dS = P * (dP - dot) * scale of a row's 16 keys from `key` on.
static inline __m512 dscores_of(const Row *row, float scale, int64_t key) {
    __m512 probs = _mm512_loadu_ps(row->scores + key), dprobs = _mm512_loadu_ps(row->dprobs + key);
    __m512 difference = _mm512_sub_ps(dprobs, _mm512_set1_ps(row->dot));
    __mmask16 mask = lanes_seen(row->seen, key);
    return _mm512_maskz_mul_ps(mask, _mm512_mul_ps(probs, difference), _mm512_set1_ps(scale));
}

// Writes rows `i` and `i` + 1 of P and dS into the operands of the products that follow.
static void write_operands(const Scratch *s, int64_t i, const Row rows[2], float scale, Block block) {
    uint16_t *left = row_of_left(s, i);
    int64_t pair = (i / AMX_K * AMX_ROWS + i % AMX_K / 2) * AMX_K;
    for (int64_t t = block.first_tile; t < block.end_tile; t++) {
        __m512 dscores[2][2];
        for (int half = 0; half < 2; half++) {
            int64_t key = t * AMX_K + half * LANES, at = (2 * t + half) * block.tiles * AMX_ELEMENTS + pair;
            for (int r = 0; r < 2; r++) {
                dscores[r][half] = dscores_of(&rows[r], scale, key);
            }
            __m512 probs = _mm512_loadu_ps(rows[0].scores + key), below = _mm512_loadu_ps(rows[1].scores + key);
            _mm512_storeu_si512(s->probs + at, pairs_of(probs, below));
            _mm512_storeu_si512(s->dscores + at, pairs_of(dscores[0][half], dscores[1][half]));
        }
        for (int r = 0; r < 2; r++) {
            __m512bh row = _mm512_cvtne2ps_pbh(dscores[r][1], dscores[r][0]);
            _mm512_storeu_si512(left + t * AMX_ELEMENTS + r * AMX_K, (__m512i)row);
        }
    }
}

// Adds turned^T block, where block is a right operand (QUERIES, keys), to a gradient of keys or
// values.
static void accumulate_tokens(float *gradient, const Scratch *s, const uint16_t *turned, const uint16_t *right,
                              Block block) {
    int64_t panel = 2 * block.tiles * AMX_ELEMENTS;
    for (int64_t t = block.first_tile; t < block.end_tile; t++) {
        for (int64_t c = 0; c < s->tiles_of_channels; c++) {
            float *to = gradient + (t * s->tiles_of_channels + c) * AMX_PRODUCT * AMX_PRODUCT;
            amx_multiply(to, AMX_PRODUCT, to, AMX_PRODUCT, turned + c * panel, right + t * panel, block.tiles, 0,
                         block.tiles);
        }
    }
}

// Writes dq; adds to the scratch's dk and dv.
static void head_backward(Tensor dq, Tensor dout, const float *logsumexp, const Head *head, const Scratch *s) {
    for (int64_t first = 0; first < dq.rows; first += QUERIES) {
        Block block = block_at(head, first);
        Tensor q_rows = tensor_rows(head->q, first, block.count), dout_rows = tensor_rows(dout, first, block.count);
        amx_pack_left(s->q, q_rows, false);
        amx_pack_left(s->dout, dout_rows, false);
        amx_pack_left(s->q_turned, q_rows, true);
        amx_pack_left(s->dout_turned, dout_rows, true);
        rows_times_tokens(s->scores, s, s->q, s->k, block);
        rows_times_tokens(s->dprobs, s, s->dout, s->v, block);
        for (int64_t i = 0; i < block.tiles * AMX_K; i += 2) {
            Row rows[2];
            for (int64_t r = 0; r < 2; r++) {
                bool is_there = i + r < block.count; // what fills the tiles sees nothing
                rows[r] = (Row){.scores = s->scores + (i + r) * s->stride,
                                .dprobs = s->dprobs + (i + r) * s->stride,
                                .seen = is_there ? keys_seen(head, first + i + r) : (Keys){0, 0}};
                recompute_probs(&rows[r], head->scale, is_there ? logsumexp[first + i + r] : 0, block);
            }
            write_operands(s, i, rows, head->scale, block);
        }
        accumulate_tokens(s->dv, s, s->dout_turned, s->probs, block);
        accumulate_tokens(s->dk, s, s->q_turned, s->dscores, block);
        write_rows(dq, s, s->k_rows, block);
    }
}

// Stores a gradient of keys or values (T, HS), whose blocks it transposes.
static void store_tokens(Tensor d, float *gradient) {
    for (int64_t t = 0; t < d.rows; t += AMX_PRODUCT) {
        for (int64_t c = 0; c < d.cols; c += AMX_PRODUCT, gradient += AMX_PRODUCT * AMX_PRODUCT) {
            amx_transpose(gradient);
            for (int64_t i = 0; i < min_int64(AMX_PRODUCT, d.rows - t); i++) {
                cpu_store(cpu_at(d, t + i, c), FORMAT_BF16, gradient + i * AMX_PRODUCT,
                          min_int64(AMX_PRODUCT, d.cols - c));
            }
        }
    }
}

void attention_amx_backward(Tensor dqkv, Tensor dout, Tensor qkv, const float *logsumexp, int64_t b, int64_t kv,
                            AttentionShape shape, void *scratch) {
    Scratch s;
    scratch_layout(&s, scratch, shape);
    memset(s.dk, 0, (size_t)elements_of_gradient(&s) * sizeof(float));
    memset(s.dv, 0, (size_t)elements_of_gradient(&s) * sizeof(float));
    int64_t group = shape.NH / shape.NKV;
    unsigned mode = begin();
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        Head head = head_at(qkv, b, h, shape);
        if (h == kv * group) {
            amx_pack_right(s.k, head.k, true);
            amx_pack_right(s.k_rows, head.k, false);
            amx_pack_right(s.v, head.v, true);
        }
        head_backward(head_of(dqkv, shape, b, h), head_of(dout, shape, b, h), logsumexp + (b * shape.NH + h) * shape.T,
                      &head, &s);
    }
    end(mode);
    store_tokens(head_of(dqkv, shape, b, shape.NH + kv), s.dk);
    store_tokens(head_of(dqkv, shape, b, shape.NH + shape.NKV + kv), s.dv);
}
#endif
