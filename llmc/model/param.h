/*
ParamList: every parameter by name, with master, gradient and moments. The seam between the model
and everything that initialises, updates, shards, gathers, saves or exports it.

Over several ranks a matrix is sharded by rows (ZeRO, Rajbhandari et al. 2020): each rank has the
masters and moments of its own, and after an update all of the copies that the forward and backward
passes use. Shards begin at multiples of MX_BLOCK rows, so that no MX block, rowwise or columnwise,
is of two ranks. Vectors, and matrices that are used in FP32, are replicated.
*/
#ifndef LLMC_PARAM_H
#define LLMC_PARAM_H

#include "llmc/backend.h"
#include "llmc/comm/comm.h"
#include "llmc/base/memory.h"

// What ranks exchange of their updated weights. FP32 gives the same copies as MX.
typedef enum { GATHER_MX, GATHER_BF16, GATHER_FP32 } Gather;

typedef struct {
    Comm *comm;
    int zero; // 0: every rank has and updates everything; 1: masters and moments are sharded; 2: gradients too
    Gather gather;
    Format reduce; // what gradients are sent as: FORMAT_FP32 or FORMAT_BF16; summed in FP32
} Sharding;

static inline Sharding sharding_single(void) { return (Sharding){.comm = comm_single()}; }

enum { MAX_PARAM_NAME = 64, MAX_PARAM_PARTS = 3 };

// Rows of a matrix, or elements of a vector, that files hold as a tensor of their own.
typedef struct {
    char name[MAX_PARAM_NAME];
    int64_t rows;
} ParamPart;

typedef struct {
    char name[MAX_PARAM_NAME]; // as Hugging Face names it
    int64_t rows, cols;        // a vector has one row
    bool is_vector;
    bool decayed;                     // weight decay applies: matrices, not vectors
    bool file_transposed;             // files hold it as (cols, rows): Hugging Face's Conv1D
    ParamPart parts[MAX_PARAM_PARTS]; // what files hold it as, one below the other: queries', keys', values' rows
    int num_parts;                    // 0: one tensor, of its own name
    float init_stddev;                // 0: init_value everywhere
    float init_value;
    bool is_sharded;                     // over several ranks
    int64_t first_row, num_rows;         // this rank's; all where it isn't sharded
    float *master, *moment1, *moment2;   // (num_rows, cols); no moments in a model that isn't trained
    float *gradient;                     // (rows, cols), or NULL; at stage 2 scratch that layers share
    float *own_gradient;                 // (num_rows, cols): within `gradient`, or at stage 2 its sum
    int64_t layer;                       // the block it is of, whose backward pass makes the gradient whole; -1: none
    float *gathered;                     // (rows, cols), GATHER_FP32: all ranks' masters; else NULL
    bool has_bf16_value;                 // a BF16 copy is needed; else `value` is the master itself
    bool needs_fp32;                     // a GEMM takes the master itself
    Format value_format;                 // of a vector. MX: `value` is the master through it, in FP32
    QuantizedTensor decoded;             // on the way to that value
    Tensor value;                        // what the forward pass uses, but for MX operands
    QuantizedTensor rowwise, columnwise; // MX copies, where their format is an MX format
    ScaleRounding rounding;              // of the copies
    bool square_copies;                  // 32x32 blocks: columnwise is rowwise, the same memory
} Param;

typedef struct {
    Param *params;
    int count, capacity;
    bool is_reserved;         // the capacity stays: others point to parameters
    Sharding sharding;        // set before param_list_layout
    bool borrows_masters;     // set before it too: `master` is another list's, and there are no moments
    float *gradients;         // of all parameters, replicated ones first, with zeros between
    int64_t gradients_count;  // with these zeros
    int64_t replicated_count; // of these, the first ones
    bool is_last_micro_batch; // set by the trainer: gradients of a layer are whole after its backward pass
} ParamList;

static inline int64_t param_count(const Param *param) { return param->rows * param->cols; }
int64_t param_list_count(const ParamList *list); // elements of all

// Makes room for `count` parameters, of which there are none yet: they stay where they are added.
void param_list_reserve(ParamList *list, int count);

// Adds a parameter and returns its index.
int param_list_add(ParamList *list, Param param);
Param *param_list_find(const ParamList *list, const char *name); // or NULL
void param_list_free(ParamList *list);

// Makes the masters of `from`, which has the same parameters, those of the list too. Before
// param_list_layout.
void param_list_borrow_masters(ParamList *list, const ParamList *from);

// Places masters, BF16 and MX copies and, for training, gradients and moments.
void param_list_layout(ParamList *list, MemoryPlan *plan, const Backend *backend, bool training);

// Bytes that this rank sends in a step of `micro_batches`: of gradients, and of updated weights by
// each way to gather.
typedef struct {
    double gradients, weights[GATHER_FP32 + 1];
} WireBytes;
WireBytes param_list_wire_bytes(const ParamList *list, int64_t micro_batches);

// After the backward pass of a layer: at stage 2 adds the sum over ranks of its gradients to
// own_gradient; at stage 1, in the last micro-batch, begins to make own_gradient that sum, beside
// the backward passes to come.
void param_list_reduce_layer(const ParamList *list, const Backend *backend, int64_t layer);

// After a step's micro-batches: makes every other gradient, or this rank's rows of one that is
// sharded, the sum over ranks.
void param_list_reduce(ParamList *list);

// Before the forward pass of a layer uses its rowwise copies, and before the backward pass its
// columnwise ones: they are there. layer -1: what isn't of a layer.
void param_list_await(const ParamList *list, Axis axis, int64_t layer);

// Fills masters from Philox: value i of parameter p depends on seed, p and i alone.
void param_list_init(ParamList *list, const Backend *backend, uint64_t seed);

// Copies of a parameter; one that there isn't has no elements, or is NULL.
typedef struct {
    QuantizedTensor rowwise, columnwise;
    uint16_t *bf16;
} ParamCopies;

// Returns the rows of a parameter's copies that this rank makes from its masters.
ParamCopies param_own_copies(const ParamList *list, const Param *p);

// After all masters changed and param_own_copies were made of them: makes what the forward and
// backward passes use besides.
void param_list_complete(const ParamList *list, const Backend *backend);

// Makes all copies from the masters, of all ranks.
void param_list_refresh(const ParamList *list, const Backend *backend);

#endif
