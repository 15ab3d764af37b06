/*
What the quantizer and its inverse share: tiles of 32 rows, eight neighbouring elements at a time as
they are in memory, and eight codes at a time.
*/
#pragma once

#include "kernel.cuh"

enum { TILE_ROWS = MX_BLOCK, LANE_COLS = 8 };

// Thread blocks for tiles of 32 rows x `tile_cols` columns.
static inline unsigned num_tiles(int64_t rows, int64_t cols, int64_t tile_cols) {
    return (unsigned)(num_parts(rows, TILE_ROWS) * num_parts(cols, tile_cols));
}

// The first row and column of this thread block's tile. Tiles are counted along the rows of tiles.
typedef struct {
    int64_t row, col;
} Corner;

static __device__ __forceinline__ Corner tile_corner(int64_t cols, int tile_cols) {
    unsigned tiles_in_row = (unsigned)((cols + tile_cols - 1) / tile_cols);
    Corner corner = {(int64_t)(blockIdx.x / tiles_in_row) * TILE_ROWS,
                     (int64_t)(blockIdx.x % tiles_in_row) * tile_cols};
    return corner;
}

// N neighbouring elements of a row as they are in memory: words of two BF16s, or of one FP32.
template <typename T, int N> struct Few {
    static const int WORDS = N * (int)sizeof(T) / 4;
    uint32_t x[WORDS];
};
template <typename T> using Eight = Few<T, LANE_COLS>;

// Zeros where `inside` is false.
template <typename T> static __device__ __forceinline__ Eight<T> load_eight(const T *in, bool inside) {
    Eight<T> v = {};
    if (!inside) return v;
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w += 4) {
        Pack<uint32_t> pack = ((const Pack<uint32_t> *)in)[w / 4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v.x[w + i] = pack.x[i];
        }
    }
    return v;
}

// Two values as BF16, the first in the lower half. The instruction gives the bits of mx_to_bf16,
// but for a NaN's payload.
static __device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
#ifdef __CUDA_ARCH__
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return mx_to_bf16(low) | (uint32_t)mx_to_bf16(high) << 16;
#endif
}

// Two products of BF16s, each rounded once, with the bits of mx_to_bf16 but for a NaN's. 8.9 has no
// product alone; less zero it is one.
static __device__ __forceinline__ uint32_t multiply_bf16_pair(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t products;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(products) : "r"(a), "r"(b), "r"(0x80008000u));
    return products;
#else
    return bf16_pair(mx_bits_float(a << 16) * mx_bits_float(b << 16),
                     mx_bits_float(a & 0xFFFF0000u) * mx_bits_float(b & 0xFFFF0000u));
#endif
}

// Said in assembly since nvcc 13.0 cuts assignments of eight BF16s into words.
static __device__ __forceinline__ void store_16_bytes(void *out, const uint32_t *words) {
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(out)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
#else
    *(Pack<uint32_t> *)out = {{words[0], words[1], words[2], words[3]}};
#endif
}

template <typename T> static __device__ __forceinline__ void store_eight(T *out, const float *x) {
    Eight<T> v;
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w++) {
        if constexpr (sizeof(T) == 4) {
            v.x[w] = mx_float_bits(x[w]);
        } else {
            v.x[w] = bf16_pair(x[2 * w], x[2 * w + 1]);
        }
    }
#pragma unroll
    for (int w = 0; w < Eight<T>::WORDS; w += 4) {
        store_16_bytes((char *)out + 4 * w, v.x + w);
    }
}

template <typename T, int N> static __device__ __forceinline__ uint32_t bits_at(const Few<T, N> &v, int i) {
    uint32_t word = v.x[i * (int)sizeof(T) / 4];
    return sizeof(T) == 4 ? word : i % 2 ? word & 0xFFFF0000u : word << 16;
}

// Blackwell has instructions for FP6 and FP4, in code for its families alone (CUDA_ARCH=100f).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__))
#define HAS_NARROW_CONVERSIONS
#endif

// Returns whether a format's codes are made and decoded by instruction. FP8's are from 8.9 on; what
// runs on less, and on the CPU, goes the same way.
static __device__ __forceinline__ bool converts_by_instruction(Format format) {
#ifdef HAS_NARROW_CONVERSIONS
    (void)format;
    return true;
#else
    return format == FORMAT_E4M3 || format == FORMAT_E5M2;
#endif
}

// Two values to codes, the first in the lower byte. The instructions give the bits of mx_encode:
// they saturate, Inf too, and make every NaN 0x7F, or where a format has none the largest positive
// value. FP4's has both codes in one byte.
static __device__ __forceinline__ uint16_t encode_pair(Format format, float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pair;
#define ENCODE(constant, name)                                                                     \
    if (format == constant) {                                                                      \
        asm("cvt.rn.satfinite." name "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first)); \
        return pair;                                                                               \
    }
    ENCODE(FORMAT_E4M3, "e4m3")
    ENCODE(FORMAT_E5M2, "e5m2")
#endif
#ifdef HAS_NARROW_CONVERSIONS
    ENCODE(FORMAT_E2M3, "e2m3")
    ENCODE(FORMAT_E3M2, "e3m2")
    if (format == FORMAT_E2M1) {
        asm("{.reg .b8 both; cvt.rn.satfinite.e2m1x2.f32 both, %1, %2; mov.b16 %0, {both, 0};}"
            : "=h"(pair)
            : "f"(second), "f"(first));
        return (uint16_t)((pair & 0xF) | (pair & 0xF0) << 4);
    }
#endif
    return (uint16_t)(mx_encode(format, first) | mx_encode(format, second) << 8);
}

// Does so of two BF16s. From CUDA 13.1 on Blackwell needn't make FP32 of them.
static __device__ __forceinline__ uint16_t encode_bf16_pair(Format format, uint32_t pair) {
#if defined(HAS_NARROW_CONVERSIONS) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1301
    uint16_t codes;
#define ENCODE_BF16(constant, name)                                                  \
    if (format == constant) {                                                        \
        asm("cvt.rn.satfinite." name "x2.bf16x2 %0, %1;" : "=h"(codes) : "r"(pair)); \
        return codes;                                                                \
    }
    ENCODE_BF16(FORMAT_E4M3, "e4m3")
    ENCODE_BF16(FORMAT_E5M2, "e5m2")
    ENCODE_BF16(FORMAT_E2M3, "e2m3")
    ENCODE_BF16(FORMAT_E3M2, "e3m2")
#endif
    return encode_pair(format, mx_bits_float(pair << 16), mx_bits_float(pair & 0xFFFF0000u));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
static __device__ __forceinline__ void halves_to_floats(float *x, uint32_t halves) {
    asm("cvt.f32.f16 %0, %1;" : "=f"(x[0]) : "h"((uint16_t)halves));
    asm("cvt.f32.f16 %0, %1;" : "=f"(x[1]) : "h"((uint16_t)(halves >> 16)));
}
#endif

// Two codes to values. Instructions go through FP16, which has all values of FP8, FP6 and FP4.
static __device__ __forceinline__ void decode_pair(float *x, Format format, uint16_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t halves;
#define DECODE(constant, name)                                             \
    if (format == constant) {                                              \
        asm("cvt.rn.f16x2." name "x2 %0, %1;" : "=r"(halves) : "h"(pair)); \
        return halves_to_floats(x, halves);                                \
    }
    DECODE(FORMAT_E4M3, "e4m3")
    DECODE(FORMAT_E5M2, "e5m2")
#endif
#ifdef HAS_NARROW_CONVERSIONS
    DECODE(FORMAT_E2M3, "e2m3")
    DECODE(FORMAT_E3M2, "e3m2")
    if (format == FORMAT_E2M1) {
        uint16_t both = (uint16_t)((pair & 0xF) | (pair >> 4 & 0xF0));
        asm("{.reg .b8 low, high; mov.b16 {low, high}, %1; cvt.rn.f16x2.e2m1x2 %0, low;}" : "=r"(halves) : "h"(both));
        return halves_to_floats(x, halves);
    }
#endif
    x[0] = mx_decode(format, (uint8_t)pair);
    x[1] = mx_decode(format, (uint8_t)(pair >> 8));
}

// Eight values to codes, the first in the lowest byte, and back.
static __device__ __forceinline__ uint64_t encode_eight(Format format, const float *x) {
    uint64_t codes = 0;
#pragma unroll
    for (int i = 0; i < LANE_COLS; i += 2) {
        codes |= (uint64_t)encode_pair(format, x[i], x[i + 1]) << (8 * i);
    }
    return codes;
}

static __device__ __forceinline__ void decode_eight(float *x, Format format, uint64_t codes) {
#pragma unroll
    for (int i = 0; i < LANE_COLS; i += 2) {
        decode_pair(x + i, format, (uint16_t)(codes >> (8 * i)));
    }
}

// Returns where a copy's code of an element lies.
static __device__ __forceinline__ int64_t code_at(const QuantizedTensor &q, int64_t row, int64_t col) {
    return q.form == FORM_TRANSPOSED ? col * q.rows + row : row * q.cols + col;
}

// True where eight codes from a multiple of eight on can be read at once.
static inline bool takes_eight_codes(const void *p) { return (size_t)p % LANE_COLS == 0; }

// True where eight columns from a multiple of eight on are all in the tensor or none, and can be
// read as Packs.
static inline bool takes_eights(Tensor tensor) { return takes_packs(tensor) && tensor.cols % LANE_COLS == 0; }
