/*
ParamList: every parameter by name, with master, gradient and moments. The seam between the model
and everything that initialises, updates, shards, gathers, saves or exports it.

Over several ranks a rank has some rows of a matrix's masters, and all of its copies: exchange.h. A
rank alone has all rows.
*/
#pragma once

#include "recipe.h" // NUM_GEMMS
#include "llmc/backend.h"
#include "llmc/comm/comm.h"
#include "llmc/base/memory.h"

// What ranks exchange of their updated weights: quantized copies, MX or not, or values. FP32 gives
// the same copies as MX.
typedef enum { GATHER_MX, GATHER_BF16, GATHER_FP32 } Gather;

typedef struct {
    Comm *comm;
    int zero; // 0: every rank has and updates everything; 1: masters and moments are sharded; 2: gradients too
    Gather gather;
    int64_t unit;  // rows of a matrix that stay on one rank: recipe_shard_unit's; 0: MX_BLOCK
    Format reduce; // what gradients are sent as: FORMAT_FP32 or FORMAT_BF16; summed in FP32
    bool decoded;  // copies that aren't sharded are kept as the BF16 values that they stand for: twice the bytes
    // Attention's output is kept for its own backward pass, though the recipe keeps an MX copy for
    // wgrad, and copies for wgrad are kept as the BF16 values that they stand for.
    bool keeps_values;
    // The copies for wgrad of what GELU and the like give are kept, too, and not made again.
    bool keeps_activations;
    bool muon; // the matrices of layers have Muon's one moment, in moment1, and not AdamW's two
} Sharding;

static inline Sharding sharding_single(void) { return (Sharding){.comm = comm_single()}; }

enum { MAX_PARAM_NAME = 64, MAX_PARAM_PARTS = 3 };

// Rows of a matrix, or elements of a vector, that files hold as a tensor of their own.
typedef struct {
    char name[MAX_PARAM_NAME];
    int64_t rows;
} ParamPart;

typedef struct {
    char name[MAX_PARAM_NAME];        // as Hugging Face names it
    int64_t rows, cols;               // a vector has one row
    bool is_vector;                   // weight decay doesn't apply, to matrices it does
    bool file_transposed;             // files hold it as (cols, rows): Hugging Face's Conv1D
    ParamPart parts[MAX_PARAM_PARTS]; // what files hold it as, one below the other: queries', keys', values' rows
    int num_parts;                    // 0: one tensor, of its own name
    // Rows of the matrices that stand one below the other, such as queries', keys' and values';
    // zeros: it is one matrix.
    int64_t stacked[MAX_PARAM_PARTS];
    float init_stddev; // of normal initial values,
    float init_cutoff; // none beyond so many of these; 0: all; or
    float init_bound;  // uniform ones' largest magnitude; neither: init_value everywhere
    float init_value;
    bool is_sharded;                     // over several ranks
    int64_t first_row, num_rows;         // this rank's; all where it isn't sharded
    float *master, *moment1, *moment2;   // (num_rows, cols); no moments in a model that isn't trained
    float *gradient;                     // (rows, cols), or NULL; at stage 2 scratch that layers share
    float *own_gradient;                 // (num_rows, cols): within `gradient`, or at stage 2 its sum
    bool gemm_writes_gradient;           // a linear layer's weight: the first GEMM of a sum needn't add
    bool gradient_is_stale;              // what `gradient` holds is of the step before: it is to be written (=)
    int64_t layer;                       // the block it is of, whose backward pass makes the gradient whole; -1: none
    bool is_gathered;                    // copies are made of all ranks' values, FP32 or BF16
    float *gathered;                     // (rows, cols), GATHER_FP32: all ranks' masters; else NULL
    bool has_bf16_value;                 // a BF16 copy is needed; else `value` is the master itself
    bool needs_fp32;                     // a GEMM takes the master itself
    bool is_embedding;                   // whose value's rows are taken by token or position
    Format value_format;                 // of a vector. MX: `value` is the master through it, in FP32
    QuantizedTensor decoded;             // on the way to that value
    Tensor value;                        // what the forward pass uses, but for MX operands
    int64_t padded_rows;                 // of gradient and copies, which GEMMs take: zeros follow `rows`; 0: none do
    QuantizedTensor rowwise, columnwise; // quantized copies, where their format is one of those
    ScaleRounding rounding;              // of the copies
    int64_t number;                      // in its list: of param_list_add
    bool square_copies;                  // 32x32 blocks: columnwise is rowwise, the same memory
    Hadamard hadamard[NUM_GEMMS];        // of the copies, and of X and dY
    bool has_random_signs[NUM_GEMMS];    // of these
    bool from_forward;                   // columnwise is made from what rowwise decodes to
} Param;

// What Newton-Schulz computes with. NULLs without Muon.
typedef struct {
    uint16_t *x;    // the largest parameter
    float *product; // the largest matrix
    uint16_t *gram; // the largest square of a matrix's shorter side
    float *square;  // the same
    void *workspace;
    size_t workspace_bytes;
} MuonScratch;

// What a copy is made from that isn't made from the master itself, of the largest parameter with
// such a copy. NULLs where there is none.
typedef struct {
    uint16_t *values;   // what a copy for the forward pass decodes to
    float *transformed; // in the master's dtype, or that of these values
} CopyScratch;

// All vectors: what each array has of them lies in one piece, in the same order in each, with zeros
// between, so that they are cleared and updated in one call.
typedef struct {
    float *master, *moment1, *moment2, *gradient; // NULL as the parameters'
    int64_t count;                                // with these zeros
} VectorSpan;

typedef struct {
    Param *params;
    int count, capacity;
    Sharding sharding;        // set before param_list_layout
    bool borrows_masters;     // set before it too: `master` is another list's, and there are no moments
    float *gradients;         // of all parameters, replicated ones first, with zeros between
    int64_t gradients_count;  // with these zeros
    int64_t replicated_count; // of these, the first ones
    VectorSpan vectors;
    bool is_last_micro_batch; // set by the trainer: gradients of a layer are whole after its backward pass
    MuonScratch muon;
    CopyScratch copies;
    uint32_t *amaxes; // mx_magnitude_bits that ranks share: QuantizedTensor.amax points to them
    int num_amaxes;
    uint64_t seed; // param_list_set_draws'
    int64_t updates;
} ParamList;

// Returns the rows that GEMMs take of a matrix and of its gradient.
static inline int64_t param_gemm_rows(const Param *param) {
    return param->padded_rows ? param->padded_rows : param->rows;
}

static inline int64_t param_count(const Param *param) { return param->rows * param->cols; }
int64_t param_list_count(const ParamList *list); // elements of all

// Makes room for `count` parameters, at most; there are none yet. Others point to them, so they
// stay where they are added.
void param_list_reserve(ParamList *list, int count);

// Returns the masters of this rank's rows.
static inline Tensor param_masters(const Param *param) {
    return tensor_make(param->master, FORMAT_FP32, param->num_rows, param->cols);
}

// Adds a parameter, for which there must be room, and returns its index.
int param_list_add(ParamList *list, Param param);
void param_list_free(ParamList *list);

// Makes the masters of `from`, which has the same parameters, those of the list too. Before
// param_list_layout.
void param_list_borrow_masters(ParamList *list, const ParamList *from);

// Places masters, BF16 and MX copies and, for training, gradients and moments.
void param_list_layout(ParamList *list, MemoryPlan *plan, const Backend *backend, bool training);

// Begins a sum of gradients: sets them to zero, or leaves it to the first GEMM to write them.
void param_clear_gradient(Param *param, const Backend *backend);
void param_list_clear_gradients(ParamList *list, const Backend *backend);

// Fills masters from Philox: value i of parameter p depends on seed, p and i alone.
void param_list_init(ParamList *list, const Backend *backend, uint64_t seed);

// Says which random numbers from here on: signs of operands' transforms and stochastic roundings of
// copies, those of the run's seed and of the updates that the masters have had. optimizer_step
// counts on. After param_list_layout, before copies are made.
void param_list_set_draws(ParamList *list, uint64_t seed, int64_t updates);

// Copies of a parameter; one that there isn't has no elements, or is NULL.
typedef struct {
    QuantizedTensor rowwise, columnwise;
    uint16_t *bf16;
} ParamCopies;

// Returns the MX copies that have memory of their own, and no BF16 copy: two, or one, in `rowwise`,
// where they are square.
ParamCopies param_mx_copies(const Param *param);

// Returns whether both MX copies are quantized from the master as it is, in blocks that know
// nothing of each other: only then can adamw make them.
bool param_copies_are_plain(const Param *param);

// Makes MX copies of `from`, rows of the parameter.
void param_quantize_copies(const ParamList *list, const Param *param, const Backend *backend, const ParamCopies *copies,
                           Tensor from);

// Returns whether ranks must share the amax of what is quantized along an axis: of a copy that has
// a factor, which is of all rows, each rank makes its own rows. Copies that are made at once count
// as rowwise.
bool param_shares_amax(const ParamList *list, const Param *param, Axis axis);

// Returns the rows of a parameter's copies that this rank makes from its masters alone.
ParamCopies param_own_copies(const ParamList *list, const Param *param);

// Makes these from the masters.
void param_make_own_copies(const ParamList *list, const Param *param, const Backend *backend);

// After all masters changed and param_own_copies were made of them: makes what the forward and
// backward passes use besides.
void param_list_complete(const ParamList *list, const Backend *backend);

// Makes all copies from the masters, of all ranks.
void param_list_refresh(const ParamList *list, const Backend *backend);
