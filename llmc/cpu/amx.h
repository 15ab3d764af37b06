/*
Products of BF16 matrices by the tile instructions of Intel's processors (AMX). A tile has 16 rows
of 64 bytes: of a left operand 32 elements along K each, of a right one 16 columns' pairs along K,
of a product 16 columns in FP32. The instruction takes subnormal numbers for 0, as oneDNN's GEMMs do
that are made of it. See Intel's Intrinsics Guide, _tile_dpbf16ps.
*/
#pragma once

#include "llmc/backend.h"

enum {
    AMX_ROWS = 16,                   // of a tile
    AMX_K = 32,                      // elements along K of a tile
    AMX_ELEMENTS = AMX_ROWS * AMX_K, // BF16 elements of a tile
    AMX_PRODUCT = 2 * AMX_ROWS,      // rows and columns that amx_multiply makes
};

// Returns the tiles that so many elements along K fill.
static inline int64_t amx_tiles(int64_t depth) { return (depth + AMX_K - 1) / AMX_K; }

#ifdef HAVE_AMX
// Returns whether the processor has these instructions, and AVX-512 BF16, and Linux lets the
// process use them.
bool amx_is_there(void);

// Begins and ends the calling thread's use of tiles. Other libraries' calls come before or after.
void amx_begin(void);
void amx_end(void);

// Packs op(a) into tiles: 16 rows' tiles along K one after another. Rows are filled up with zeros
// to a multiple of AMX_PRODUCT, K to one of AMX_K; `out` has room for these. `transposed`: a is
// stored (K, rows).
void amx_pack_left(uint16_t *out, Tensor a, bool transposed);

// Packs op(b) likewise: 16 columns' tiles along K one after another. `transposed`: b is stored
// (columns, K).
void amx_pack_right(uint16_t *out, Tensor b, bool transposed);

// Makes `to` (AMX_PRODUCT, AMX_PRODUCT) of tiles [begin, end) along K, with `from` (or NULL) added.
// Both operands have `tiles` along K.
void amx_multiply(float *to, int64_t to_stride, const float *from, int64_t from_stride, const uint16_t *a,
                  const uint16_t *b, int64_t tiles, int64_t begin, int64_t end);

// Transposes (AMX_PRODUCT, AMX_PRODUCT) in place.
void amx_transpose(float *x);
#else
static inline bool amx_is_there(void) { return false; }
#endif
