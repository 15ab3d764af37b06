/*
ParamList: every parameter by name, with master, gradient and moments. The seam between the model and everything that
initialises, updates, saves or exports it.
*/
#ifndef LLMC_PARAM_H
#define LLMC_PARAM_H

#include "backend.h"
#include "memory.h"

typedef struct {
    char name[64];      // as Hugging Face names it
    int64_t rows, cols; // a vector has one row
    bool is_vector;
    bool decayed;         // weight decay applies: matrices, not vectors
    bool file_transposed; // files hold it as (cols, rows): Hugging Face's Conv1D
    float init_stddev;    // 0: init_value everywhere
    float init_value;
    float *master;                       // (rows, cols), and so are the others
    float *gradient, *moment1, *moment2; // NULL in a model that isn't trained
    bool has_bf16_value;                 // a BF16 copy is needed; else `value` is the master itself
    Tensor value;                        // what the forward pass uses, but for MX operands
    QuantizedTensor rowwise, columnwise; // MX copies, where their format is an MX format
    ScaleRounding rounding;              // of the copies
} Param;

typedef struct {
    Param *params;
    int count, capacity;
    float *gradients;        // of all parameters, one after the other with zeros between
    int64_t gradients_count; // with these zeros
} ParamList;

static inline int64_t param_count(const Param *param) { return param->rows * param->cols; }
int64_t param_list_count(const ParamList *list); // elements of all

// Adds a parameter and returns its index.
int param_list_add(ParamList *list, Param param);
Param *param_list_find(const ParamList *list, const char *name); // or NULL
void param_list_free(ParamList *list);

// Places masters, BF16 and MX copies and, for training, gradients and moments.
void param_list_layout(ParamList *list, MemoryPlan *plan, const Backend *backend, bool training);

// Fills masters from Philox: value i of parameter p depends on seed, p and i alone.
void param_list_init(ParamList *list, const Backend *backend, uint64_t seed);

// Makes the BF16 and MX copies from the masters.
void param_list_refresh(const ParamList *list, const Backend *backend);

// AdamW on one parameter, and its copies from the updated master, in one pass. Weight decay only where it applies.
void param_update(const Param *param, const Backend *backend, AdamWOptions options);

#endif
