#include "amx.h"

#ifdef HAVE_AMX
#include "cpu.h"

#include <asm/prctl.h> // ARCH_REQ_XCOMP_PERM
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h> // syscall

typedef __m512i Rows[AMX_ROWS]; // a tile in registers

enum { BYTES_ACROSS = 64 };

// Linux gives a process the tiles' 8 kB of state when it asks for them.
bool amx_is_there(void) {
    enum { XFEATURE_XTILEDATA = 18 };
    static int answer = -1;
    if (answer < 0) {
        answer = __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("avx512bf16") &&
                 syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    }
    return answer;
}

// A constant: GCC 12 doesn't know that the instruction reads all of it, and would leave out what is
// written to a variable.
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_across[16];
    uint8_t rows[16];
} TILES = {.palette = 1, .bytes_across = {[0 ... 7] = BYTES_ACROSS}, .rows = {[0 ... 7] = AMX_ROWS}};

void amx_begin(void) { _tile_loadconfig(&TILES); }

void amx_end(void) { _tile_release(); }

#define UNROLL _Pragma("GCC unroll 16")

// Transposes 16 x 16 words: pairs of words, of pairs, and then of quarters of registers change
// places.
static inline void transpose_words(Rows out, const Rows in) {
    Rows pairs, fours;
    UNROLL
    for (int i = 0; i < AMX_ROWS; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    UNROLL
    for (int i = 0; i < AMX_ROWS; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    UNROLL
    for (int c = 0; c < 4; c++) { // fours[4 g + c] has rows 4 g on of columns c, 4 + c, 8 + c, 12 + c
        __m512i first = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x44);
        __m512i second = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xEE);
        __m512i third = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x44);
        __m512i fourth = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xEE);
        out[c] = _mm512_shuffle_i32x4(first, third, 0x88);
        out[4 + c] = _mm512_shuffle_i32x4(first, third, 0xDD);
        out[8 + c] = _mm512_shuffle_i32x4(second, fourth, 0x88);
        out[12 + c] = _mm512_shuffle_i32x4(second, fourth, 0xDD);
    }
}

// Loads 32 elements of a row from `col` on, zeros where the tensor has none.
static inline __m512i load_row(Tensor x, int64_t row, int64_t col) {
    int64_t left = x.cols - col;
    if (row >= x.rows || left <= 0) return _mm512_setzero_si512();
    const uint16_t *from = cpu_at(x, row, col);
    if (left >= AMX_K) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16(((__mmask32)1 << left) - 1, from);
}

// Loads 16 rows of 32 elements, and prefetches those of the next two tiles.
static inline void load_rows(Rows tile, Tensor x, int64_t row, int64_t col) {
    UNROLL
    for (int i = 0; i < AMX_ROWS; i++) {
        __builtin_prefetch(cpu_at(x, row + i + AMX_PRODUCT, col));
        tile[i] = load_row(x, row + i, col);
    }
}

// Loads 32 rows of 32 elements as 16 pairs of rows: of the first 16 columns, and of the others.
static inline void load_pairs(Rows first, Rows second, Tensor x, int64_t row, int64_t col) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    UNROLL
    for (int i = 0; i < AMX_ROWS; i++) {
        __builtin_prefetch(cpu_at(x, row + 2 * i + AMX_K, col));
        __builtin_prefetch(cpu_at(x, row + 2 * i + 1 + AMX_K, col));
        __m512i even = load_row(x, row + 2 * i, col), odd = load_row(x, row + 2 * i + 1, col);
        __m512i lower = _mm512_unpacklo_epi16(even, odd), upper = _mm512_unpackhi_epi16(even, odd);
        first[i] = _mm512_permutex2var_epi32(lower, low, upper);
        second[i] = _mm512_permutex2var_epi32(lower, high, upper);
    }
}

static inline void store_rows(void *out, const Rows tile, bool transposed) {
    Rows turned;
    if (transposed) {
        transpose_words(turned, tile);
        tile = turned;
    }
    UNROLL
    for (int i = 0; i < AMX_ROWS; i++) {
        _mm512_storeu_si512((char *)out + i * BYTES_ACROSS, tile[i]);
    }
}

// Packs a matrix whose K runs across its rows, or down its columns, two tiles at a time that lie
// beside each other along the other dimension.
static inline void pack(uint16_t *out, Tensor x, bool k_is_across, bool transposed) {
    int64_t count = k_is_across ? x.rows : x.cols, tiles = amx_tiles(k_is_across ? x.cols : x.rows);
    for (int64_t at = 0; at < count; at += AMX_PRODUCT) {
        for (int64_t t = 0; t < tiles; t++) {
            uint16_t *to = out + (at / AMX_ROWS * tiles + t) * AMX_ELEMENTS;
            Rows tile, other;
            if (k_is_across) {
                load_rows(tile, x, at, t * AMX_K);
                load_rows(other, x, at + AMX_ROWS, t * AMX_K);
            } else {
                load_pairs(tile, other, x, t * AMX_K, at);
            }
            store_rows(to, tile, transposed);
            store_rows(to + tiles * AMX_ELEMENTS, other, transposed);
        }
    }
}

void amx_pack_left(uint16_t *out, Tensor a, bool transposed) {
    if (transposed) {
        pack(out, a, false, true);
    } else {
        pack(out, a, true, false);
    }
}

void amx_pack_right(uint16_t *out, Tensor b, bool transposed) {
    if (transposed) {
        pack(out, b, true, true);
    } else {
        pack(out, b, false, false);
    }
}

void amx_multiply(float *to, int64_t to_stride, const float *from, int64_t from_stride, const uint16_t *a,
                  const uint16_t *b, int64_t tiles, int64_t begin, int64_t end) {
    const uint16_t *a_below = a + tiles * AMX_ELEMENTS, *b_beside = b + tiles * AMX_ELEMENTS;
    __asm__ volatile("" ::: "memory"); // nor does GCC 12 know that _tile_loadd reads memory
    if (from) {
        int64_t bytes = from_stride * (int64_t)sizeof(float);
        _tile_loadd(0, from, bytes);
        _tile_loadd(1, from + AMX_ROWS, bytes);
        _tile_loadd(2, from + AMX_ROWS * from_stride, bytes);
        _tile_loadd(3, from + AMX_ROWS * from_stride + AMX_ROWS, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t t = begin; t < end; t++) {
        _tile_loadd(4, a + t * AMX_ELEMENTS, BYTES_ACROSS);
        _tile_loadd(6, b + t * AMX_ELEMENTS, BYTES_ACROSS);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b_beside + t * AMX_ELEMENTS, BYTES_ACROSS);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a_below + t * AMX_ELEMENTS, BYTES_ACROSS);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    int64_t bytes = to_stride * (int64_t)sizeof(float);
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + AMX_ROWS, bytes);
    _tile_stored(2, to + AMX_ROWS * to_stride, bytes);
    _tile_stored(3, to + AMX_ROWS * to_stride + AMX_ROWS, bytes);
}

// Loads 16 rows of 16 numbers of the 32 x 32 that begin at `x`.
static inline void load_quarter(Rows rows, const float *x) {
    UNROLL
    for (int i = 0; i < AMX_ROWS; i++) {
        rows[i] = _mm512_loadu_si512(x + i * AMX_PRODUCT);
    }
}

static inline void store_quarter(float *x, const Rows rows) {
    Rows turned;
    transpose_words(turned, rows);
    UNROLL
    for (int i = 0; i < AMX_ROWS; i++) {
        _mm512_storeu_si512(x + i * AMX_PRODUCT, turned[i]);
    }
}

void amx_transpose(float *x) {
    Rows quarter, other;
    for (int i = 0; i < AMX_PRODUCT; i += AMX_ROWS) {
        for (int j = 0; j <= i; j += AMX_ROWS) {
            float *below = x + i * AMX_PRODUCT + j, *above = x + j * AMX_PRODUCT + i;
            load_quarter(quarter, below);
            load_quarter(other, above);
            store_quarter(above, quarter);
            if (i != j) store_quarter(below, other);
        }
    }
}
#endif
