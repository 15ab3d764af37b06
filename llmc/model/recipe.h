/*
Recipe: which operand of which GEMM of a linear layer is in which format, with which roundings.

A linear layer has three GEMMs and each has two operands, so a recipe is six formats; the roundings
of scales and of elements go with what a tensor is (weight, activation, gradient). The named recipes
are rows of one table; everything else is an adjustment.
*/
#pragma once

#include <stdio.h>
#include "llmc/files/json.h"        // JsonWriter
#include "llmc/numerics/encoding.h" // ElementRounding
#include "llmc/numerics/scaling.h"  // Format, ScaleRounding, Scaling
#include "llmc/base/util.h"         // Error

typedef enum {
    FPROP_X, // Y = X W^T
    FPROP_W,
    DGRAD_DY, // dX = dY W
    DGRAD_W,
    WGRAD_DY, // dW += dY^T X
    WGRAD_X,
    NUM_GEMM_OPERANDS
} GemmOperand;

typedef enum { GEMM_FPROP, GEMM_DGRAD, GEMM_WGRAD, NUM_GEMMS } Gemm;

// How a GEMM's operands are transformed before they are quantized (numerics/hadamard.h).
typedef enum {
    TRANSFORM_NONE,
    TRANSFORM_FIXED, // with Transformer Engine's signs
    TRANSFORM_RANDOM // with signs drawn from the seed, the step, the linear layer and the GEMM
} Transform;

typedef enum { ROLE_WEIGHTS, ROLE_ACTIVATIONS, ROLE_GRADIENTS, NUM_ROLES } Role;

// What some linear layers' operands are in, whatever the rest of the recipe says. Both patterns are
// as of a shell: "h.1[01].*" or "lm_head"; "wgrad-*" or "*".
typedef struct {
    char linears[32], operands[16];
    Format format;
} RecipeFilter;

enum { MAX_RECIPE_FILTERS = 16 };

// Which options a user gave, of this run or of the one that it resumes: recipe_check_effects
// refuses those that change nothing. They are no part of the recipe's arithmetic.
typedef struct {
    bool scale_rounding, role_scale_rounding[NUM_ROLES], element_rounding, role_element_rounding[NUM_ROLES];
    bool transform[NUM_GEMMS], hadamard_size;
} GivenOptions;

// Scales of tensors made of the amaxes of the steps before: of the largest, or of the last.
typedef enum { AMAX_MAX, AMAX_MOST_RECENT } AmaxAlgorithm;
typedef struct {
    int64_t length; // steps; 0: a scale is of the tensor's own amax
    AmaxAlgorithm algorithm;
    int64_t margin; // scales are 2^margin smaller
} DelayedScaling;

typedef struct {
    const char *name; // the named recipe it started from
    Format format[NUM_GEMM_OPERANDS];
    Scaling scaling[NUM_GEMM_OPERANDS]; // of operands in an MX format
    DelayedScaling delayed;             // of SCALING_TENSOR
    ScaleRounding rounding[NUM_ROLES];
    Transform transform[NUM_GEMMS]; // of both operands
    int64_t hadamard_size;          // of its groups: 16, 32, 64 or 128
    // dgrad's W and wgrad's X, where they and fprop's are in MX formats, are quantized again from
    // the values that fprop multiplied, in place of the tensor.
    bool from_forward;
    ElementRounding element_rounding[NUM_ROLES];
    float prescale;          // of all quantized operands' elements (Encoding); 0: none
    Format activation_dtype; // of everything that is not a GEMM operand: FP32 under `fp32`, else BF16
    int64_t bf16_first_layers, bf16_last_layers; // blocks whose linear layers stay in BF16
    bool quantize_lm_head;
    bool square_weights; // weights in square blocks: the copies for fprop and dgrad are the same bytes
    // Where MX: norms' gains pass through this format, with the weights' rounding, before use
    // (arXiv:2506.20752). The backward pass uses the same gains; a gain's own gradient goes
    // straight through. Where not, they stay FP32.
    Format norm_gains;
    RecipeFilter filters[MAX_RECIPE_FILTERS]; // the last that matches holds
    int num_filters;
    GivenOptions given;
} Recipe;

// Names by the enumerations of these values, NULL-terminated.
extern const char *const FORMAT_NAMES[];           // "e4m3"
extern const char *const SCALE_ROUNDING_NAMES[];   // "rceil"
extern const char *const ELEMENT_ROUNDING_NAMES[]; // "stochastic"
extern const char *const SCALING_NAMES[];          // "nvfp4"
extern const char *const OPERAND_NAMES[];          // "fprop-x"
extern const char *const ROLE_NAMES[];             // "weights"
extern const char *const GEMM_NAMES[];             // "fprop"
extern const char *const TRANSFORM_NAMES[];        // "fixed"
extern const char *const HADAMARD_SIZES[];         // "16"
extern const char *const BACKWARD_SOURCES[];       // by from_forward
extern const char *const AMAX_ALGORITHM_NAMES[];   // "most-recent"
extern const char *const WEIGHT_SCALING_NAMES[];   // by square_weights
const char *const *recipe_names(void);

Role operand_role(GemmOperand operand);
Gemm operand_gemm(GemmOperand operand);
Axis operand_axis(GemmOperand operand); // along which its GEMM sums, and its blocks run

// Returns the axis of an operand's blocks under a recipe, which may make weights' square.
Axis recipe_axis(const Recipe *recipe, GemmOperand operand);

// Returns how many rows of a weight its copies are made of together: those of a block, or of a
// group that dgrad's transform mixes, and no less than MX_BLOCK. Powers of two.
int64_t recipe_shard_unit(const Recipe *recipe);

// Returns how an operand's elements are made, in a linear layer whose weight has this number among
// the parameters; its random numbers are to be placed.
Encoding recipe_encoding(const Recipe *recipe, GemmOperand operand, int64_t number);

// Returns `fp32`, whose gradients are what others' are compared with.
Recipe recipe_exact(void);

// The named recipe. Errors: an unknown name.
bool recipe_named(Recipe *recipe, const char *name, Error *error);

// Adjustments. `text` is a format's name; recipe_set_operand takes "OPERAND=FORMAT", such as
// "wgrad-x=bf16".
bool recipe_set_role_format(Recipe *recipe, Role role, const char *text, Error *error);
bool recipe_set_operand(Recipe *recipe, const char *text, Error *error);

// Adds the filter "LINEARS:OPERANDS=FORMAT", such as "h.0.*:wgrad-x=bf16".
bool recipe_add_filter(Recipe *recipe, const char *text, Error *error);

// Changes scales of earlier steps: `length` 0 and `algorithm` NULL leave what there is. Errors:
// there are none such.
bool recipe_set_delayed(Recipe *recipe, int64_t length, const char *algorithm, int64_t margin, Error *error);

// Errors: formats that square weights, or their scalings, can't have; transforms that a weight's
// one copy, or a backward pass that quantizes the forward pass' values again, can't have.
bool recipe_check(const Recipe *recipe, Error *error);

// What the linear layers of block `layer` (0-based, of `layers`), or with layer == layers the LM
// head, do: the recipe itself, or its six operands in BF16 (FP32 under `fp32`).
Recipe recipe_for_layer(const Recipe *recipe, int64_t layer, int64_t layers);

// Returns what one linear layer of that block does, by its name: the same, through the filters.
Recipe recipe_for_linear(const Recipe *recipe, int64_t layer, int64_t layers, const char *name);

// True if the filter's pattern matches the linear layer's name.
bool recipe_filter_matches(const RecipeFilter *filter, const char *name);

// True if it is no longer as its name says.
bool recipe_is_adjusted(const Recipe *recipe);

// True if they are the same arithmetic, whatever their names.
bool recipe_is_same(const Recipe *a, const Recipe *b);

// True if the values of fprop's operand become those of the backward pass' one, dgrad's W or
// wgrad's X, which is quantized again from them.
bool recipe_is_from_forward(const Recipe *recipe, GemmOperand backward);

// What a model's linear layers make of a recipe, all together.
typedef struct {
    unsigned scalings[NUM_ROLES]; // bits 1 << Scaling, of the operands that they quantize and of gains
    bool is_transformed[NUM_GEMMS], is_from_forward;
} RecipeEffects;

// Adds the effects in a linear layer, whose recipe (recipe_for_linear) this is.
void recipe_add_effects(RecipeEffects *effects, const Recipe *of_linear);

// Errors: an option given that is of no effect in any linear layer, unless it says what the named
// recipe does anyway; of those that say so, stochastic rounding and transforms are errors too. An
// option of all roles, each of which has an option of its own, is none.
bool recipe_check_effects(const Recipe *recipe, const RecipeEffects *effects, Error *error);

// Returns whether a model of so many layers has all that the recipe keeps in BF16.
bool recipe_check_layers(const Recipe *recipe, int64_t layers, Error *error);

// True if any of the six operands is in an MX format, be it in one linear layer.
bool recipe_quantizes(const Recipe *recipe);

// True if the scaling of any of these isn't MX.
bool recipe_is_scaled(const Recipe *recipe);

// Returns the scalings of what is quantized, of all linear layers: bits 1 << Scaling.
unsigned recipe_scalings(const Recipe *recipe);

// True if elements aren't simply rounded to nearest, should they be quantized.
bool recipe_has_encoding(const Recipe *recipe);

// The recipe as a small table, for a person: what a model's linear layers round stochastically and
// transform, and what they don't although the recipe has it.
void recipe_print(const Recipe *recipe, const RecipeEffects *effects, FILE *stream);

// The recipe as the object "recipe" of the log.
void recipe_write_json(const Recipe *recipe, JsonWriter *writer);
