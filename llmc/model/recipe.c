#include "recipe.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#define NAME_OF(context, name, text, ...) text,
const char *const FORMAT_NAMES[] = {"fp32", "bf16", MX_FORMATS(NAME_OF, ) NULL};
const char *const SCALE_ROUNDING_NAMES[] = {"rceil", "floor", "ceil", "even", NULL};
const char *const ELEMENT_ROUNDING_NAMES[] = {"nearest", "stochastic", NULL};
const char *const SCALING_NAMES[] = {"mx", "tensor", "block128", "block128-fp32", "nvfp4", "nvfp4-46", NULL};
const char *const OPERAND_NAMES[] = {"fprop-x", "fprop-w", "dgrad-dy", "dgrad-w", "wgrad-dy", "wgrad-x", NULL};
const char *const ROLE_NAMES[] = {"weights", "activations", "gradients", NULL};
const char *const GEMM_NAMES[] = {"fprop", "dgrad", "wgrad", NULL};
const char *const TRANSFORM_NAMES[] = {"none", "fixed", "random", NULL};
const char *const HADAMARD_SIZES[] = {"16", "32", "64", "128", NULL};
const char *const BACKWARD_SOURCES[] = {"original", "forward", NULL};
const char *const AMAX_ALGORITHM_NAMES[] = {"max", "most-recent", NULL};
const char *const WEIGHT_SCALING_NAMES[] = {"1d", "2d", NULL};

#define FP32 FORMAT_FP32
#define BF16 FORMAT_BF16
#define E4M3 FORMAT_E4M3
#define E5M2 FORMAT_E5M2
#define E2M1 FORMAT_E2M1
#define ALL(f) f, f, f, f, f, f
#define FORWARD(f, backward) f, f, backward, backward, backward, backward
#define GRADIENTS(f, gradients) f, f, gradients, f, gradients, f
enum { SIZE = 16 }; // of a Hadamard transform

// Name; scale rounding of all roles; dtype of the activations; formats (fprop-x, fprop-w, dgrad-dy,
// dgrad-w, wgrad-dy, wgrad-x). Nothing is adjusted.
#define RECIPE(name_, round, dtype, ...)                                                                      \
    {                                                                                                         \
        .name = name_, .format = {__VA_ARGS__}, .rounding = {round, round, round}, .activation_dtype = dtype, \
        .hadamard_size = SIZE                                                                                 \
    }

// The same with the scalings of the six, whether weights are in square blocks, and what else there
// is to say.
#define SCALED(name_, square, scalings, formats, ...)                                                         \
    {                                                                                                         \
        .name = name_, .format = {formats}, .scaling = {scalings}, .rounding = {0}, .activation_dtype = BF16, \
        .hadamard_size = SIZE, .square_weights = square, __VA_ARGS__                                          \
    }
static const Recipe RECIPES[] = {
    RECIPE("fp32", SCALE_RCEIL, FP32, ALL(FP32)),
    RECIPE("bf16", SCALE_RCEIL, BF16, ALL(BF16)),
    RECIPE("mxfp8", SCALE_RCEIL, BF16, ALL(E4M3)),
    RECIPE("mxfp8-ocp", SCALE_FLOOR, BF16, ALL(E4M3)),
    RECIPE("mxfp8-e5m2-gradients", SCALE_RCEIL, BF16, GRADIENTS(E4M3, E5M2)),
    RECIPE("mxfp8-forward-only", SCALE_RCEIL, BF16, E4M3, E4M3, BF16, BF16, BF16, BF16),
    RECIPE("mxfp8-weights-only", SCALE_RCEIL, BF16, BF16, E4M3, BF16, E4M3, BF16, BF16),
    RECIPE("mxfp6-e2m3", SCALE_RCEIL, BF16, ALL(FORMAT_E2M3)),
    RECIPE("mxfp6-e3m2", SCALE_RCEIL, BF16, ALL(FORMAT_E3M2)),
    RECIPE("mxfp4", SCALE_RCEIL, BF16, ALL(E2M1)),
    SCALED("fp8-current", true, ALL(SCALING_TENSOR), GRADIENTS(E4M3, E5M2)),
    SCALED("fp8-delayed", true, ALL(SCALING_TENSOR), GRADIENTS(E4M3, E5M2), .delayed = {.length = 1024}),
    SCALED("fp8-blockwise", true, ALL(SCALING_BLOCK128), ALL(E4M3)),
    SCALED("fp8-blockwise-fp32", true, ALL(SCALING_BLOCK128_FP32), ALL(E4M3)),
    SCALED("nvfp4", true, ALL(SCALING_NVFP4), ALL(E2M1)),
    SCALED("nvfp4-nvidia", true, ALL(SCALING_NVFP4), ALL(E2M1), .transform = {[GEMM_WGRAD] = TRANSFORM_FIXED},
           .element_rounding = {[ROLE_GRADIENTS] = ROUND_STOCHASTIC}),
    SCALED("nvfp4-46", true, ALL(SCALING_NVFP4_46), ALL(E2M1)),
    SCALED("mxfp8-nvfp4", false, FORWARD(SCALING_MX, SCALING_NVFP4), FORWARD(E4M3, E2M1)),
    SCALED("nvfp4-mxfp8", false, FORWARD(SCALING_NVFP4, SCALING_MX), FORWARD(E2M1, E4M3)),
    {.name = "mxfp4-sr",
     .format = {FORWARD(BF16, E2M1)},
     .rounding = {SCALE_FLOOR, SCALE_FLOOR, SCALE_FLOOR},
     .element_rounding = {ROUND_STOCHASTIC, ROUND_STOCHASTIC, ROUND_STOCHASTIC},
     .prescale = 0.75f, // no element is clamped: amax is below 8 times its scale, and the largest element 6
     .transform = {[GEMM_DGRAD] = TRANSFORM_RANDOM, [GEMM_WGRAD] = TRANSFORM_RANDOM},
     .hadamard_size = 64,
     .activation_dtype = BF16},
};

enum { NUM_RECIPES = COUNT(RECIPES) };

static bool unknown_name(Error *error, const char *what, const char *name, const char *const *names) {
    const char *near = nearest_word(name, names, count_words(names));
    char *list = list_words(names);
    if (near) error_set(error, "unknown %s '%s'; did you mean '%s'? (there are: %s)", what, name, near, list);
    if (!near) error_set(error, "unknown %s '%s' (there are: %s)", what, name, list);
    free(list);
    return false;
}

Role operand_role(GemmOperand operand) {
    static const Role ROLES[] = {
        [FPROP_X] = ROLE_ACTIVATIONS, [FPROP_W] = ROLE_WEIGHTS,    [DGRAD_DY] = ROLE_GRADIENTS,
        [DGRAD_W] = ROLE_WEIGHTS,     [WGRAD_DY] = ROLE_GRADIENTS, [WGRAD_X] = ROLE_ACTIVATIONS};
    return ROLES[operand];
}

Gemm operand_gemm(GemmOperand operand) {
    static const Gemm GEMMS[] = {[FPROP_X] = GEMM_FPROP, [FPROP_W] = GEMM_FPROP,  [DGRAD_DY] = GEMM_DGRAD,
                                 [DGRAD_W] = GEMM_DGRAD, [WGRAD_DY] = GEMM_WGRAD, [WGRAD_X] = GEMM_WGRAD};
    return GEMMS[operand];
}

Axis operand_axis(GemmOperand operand) {
    static const Axis AXES[] = {[FPROP_X] = AXIS_ROWWISE,    [FPROP_W] = AXIS_ROWWISE,     [DGRAD_DY] = AXIS_ROWWISE,
                                [DGRAD_W] = AXIS_COLUMNWISE, [WGRAD_DY] = AXIS_COLUMNWISE, [WGRAD_X] = AXIS_COLUMNWISE};
    return AXES[operand];
}

Axis recipe_axis(const Recipe *recipe, GemmOperand operand) {
    bool is_square = recipe->square_weights && operand_role(operand) == ROLE_WEIGHTS;
    return is_square ? AXIS_SQUARE : operand_axis(operand);
}

// Returns the rows of a block of a weight; one scale of a whole tensor keeps none together.
static int64_t block_rows(const Recipe *recipe, GemmOperand weight) {
    Scaling scaling = recipe->scaling[weight];
    return scaling == SCALING_TENSOR ? 1 : scaling_block_rows(scaling, recipe_axis(recipe, weight));
}

int64_t recipe_shard_unit(const Recipe *recipe) {
    int64_t group = recipe->transform[GEMM_DGRAD] ? recipe->hadamard_size : 1;
    int64_t block = max_int64(block_rows(recipe, FPROP_W), block_rows(recipe, DGRAD_W));
    return max_int64(MX_BLOCK, max_int64(group, block));
}

Encoding recipe_encoding(const Recipe *recipe, GemmOperand operand, int64_t number) {
    return (Encoding){.rounding = recipe->element_rounding[operand_role(operand)],
                      .prescale = recipe->prescale,
                      .tensor = number * NUM_GEMM_OPERANDS + operand};
}

const char *const *recipe_names(void) {
    static const char *names[NUM_RECIPES + 1];
    for (int i = 0; i < NUM_RECIPES; i++) {
        names[i] = RECIPES[i].name;
    }
    return names;
}

Recipe recipe_exact(void) { return RECIPES[0]; }

bool recipe_named(Recipe *recipe, const char *name, Error *error) {
    int found = find_word(name, recipe_names());
    if (found < 0) return unknown_name(error, "recipe", name, recipe_names());
    *recipe = RECIPES[found];
    return true;
}

bool recipe_set_role_format(Recipe *recipe, Role role, const char *text, Error *error) {
    int format = find_word(text, FORMAT_NAMES);
    if (format < 0) return unknown_name(error, "format", text, FORMAT_NAMES);
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        if (operand_role(operand) == role) recipe->format[operand] = (Format)format;
    }
    return true;
}

bool recipe_set_operand(Recipe *recipe, const char *text, Error *error) {
    const char *equals = strchr(text, '=');
    if (!equals) return error_set(error, "--operand takes OPERAND=FORMAT, such as wgrad-x=bf16, not '%s'", text);
    char name[32];
    snprintf(name, sizeof(name), "%.*s", (int)(equals - text), text);
    int operand = find_word(name, OPERAND_NAMES);
    if (operand < 0) return unknown_name(error, "operand", name, OPERAND_NAMES);
    int format = find_word(equals + 1, FORMAT_NAMES);
    if (format < 0) return unknown_name(error, "format", equals + 1, FORMAT_NAMES);
    recipe->format[operand] = (Format)format;
    return true;
}

bool recipe_add_filter(Recipe *recipe, const char *text, Error *error) {
    RecipeFilter filter = {0};
    char format[16];
    int end = 0;
    if (strcspn(text, ":=") >= sizeof(filter.linears)) {
        return error_set(error,
                         "--operand-in: the pattern of linears in '%s' has more than %d characters: shorten it by *",
                         text, (int)sizeof(filter.linears) - 1);
    }
    if (sscanf(text, "%31[^:=]:%15[^:=]=%15s%n", filter.linears, filter.operands, format, &end) != 3 || text[end]) {
        return error_set(error,
                         "--operand-in takes one LINEARS:OPERANDS=FORMAT, such as h.0.*:wgrad-x=bf16, and may be "
                         "repeated, but not '%s'",
                         text);
    }
    int found = find_word(format, FORMAT_NAMES), matches = 0;
    if (found < 0) return unknown_name(error, "format", format, FORMAT_NAMES);
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        matches += fnmatch(filter.operands, OPERAND_NAMES[operand], 0) == 0;
    }
    if (!matches) return unknown_name(error, "operand", filter.operands, OPERAND_NAMES);
    if (recipe->num_filters == MAX_RECIPE_FILTERS) {
        return error_set(error, "--operand-in can be given %d times: join some by a pattern, such as h.[0-3].*",
                         MAX_RECIPE_FILTERS);
    }
    filter.format = (Format)found;
    recipe->filters[recipe->num_filters++] = filter;
    return true;
}

bool recipe_set_delayed(Recipe *recipe, int64_t length, const char *algorithm, int64_t margin, Error *error) {
    bool is_given = length > 0 || algorithm || margin > 0;
    if (is_given && recipe->delayed.length == 0) {
        return error_set(error,
                         "recipe %s makes no scales of earlier amaxes: leave --amax-history, --amax-algorithm and "
                         "--amax-margin out, or take fp8-delayed",
                         recipe->name);
    }
    if (length > 0) recipe->delayed.length = length;
    if (algorithm) recipe->delayed.algorithm = (AmaxAlgorithm)find_word(algorithm, AMAX_ALGORITHM_NAMES);
    recipe->delayed.margin = margin;
    return true;
}

static bool check_scalings(const Recipe *recipe, Error *error) {
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        Format format = recipe->format[operand];
        if (!mx_is_mx(format) || !scaling_is_nvfp4(recipe->scaling[operand]) || format == FORMAT_E2M1) continue;
        return error_set(
            error, "%s's scaling of %s, %s, is of e2m1, not %s: leave it in e2m1 or take bf16 or another recipe",
            recipe->name, OPERAND_NAMES[operand], SCALING_NAMES[recipe->scaling[operand]], FORMAT_NAMES[format]);
    }
    return true;
}

bool recipe_check(const Recipe *recipe, Error *error) {
    if (!check_scalings(recipe, error)) return false;
    if (recipe->from_forward && recipe->transform[GEMM_FPROP]) {
        return error_set(error,
                         "--backward-source forward has only transformed values where --hadamard-fprop is %s: "
                         "leave out one of the two",
                         TRANSFORM_NAMES[recipe->transform[GEMM_FPROP]]);
    }
    Format fprop = recipe->format[FPROP_W], dgrad = recipe->format[DGRAD_W];
    if (!recipe->square_weights || !mx_is_mx(fprop) || !mx_is_mx(dgrad)) return true;
    if (recipe->transform[GEMM_FPROP] || recipe->transform[GEMM_DGRAD]) {
        return error_set(error,
                         "--weight-scaling 2d makes one copy of a weight for fprop and dgrad, and --hadamard-fprop %s "
                         "and --hadamard-dgrad %s transform each its own: take --weight-scaling 1d",
                         TRANSFORM_NAMES[recipe->transform[GEMM_FPROP]],
                         TRANSFORM_NAMES[recipe->transform[GEMM_DGRAD]]);
    }
    if (fprop == dgrad && recipe->scaling[FPROP_W] == recipe->scaling[DGRAD_W]) return true;
    return error_set(error,
                     "--weight-scaling 2d makes one copy of a weight for fprop and dgrad, which this recipe wants in "
                     "%s and %s: give both the same format, or take --weight-scaling 1d",
                     FORMAT_NAMES[fprop], FORMAT_NAMES[dgrad]);
}

Recipe recipe_for_layer(const Recipe *recipe, int64_t layer, int64_t layers) {
    Recipe result = *recipe;
    bool head = layer == layers;
    bool kept = head ? recipe->quantize_lm_head
                     : layer >= recipe->bf16_first_layers && layer < layers - recipe->bf16_last_layers;
    for (int operand = 0; operand < NUM_GEMM_OPERANDS && !kept; operand++) {
        result.format[operand] = recipe->activation_dtype;
    }
    if (!kept) result.norm_gains = FORMAT_FP32;
    return result;
}

bool recipe_filter_matches(const RecipeFilter *filter, const char *name) {
    return fnmatch(filter->linears, name, 0) == 0;
}

// Gives those operands the filter's format that it names.
static void apply_filter(Recipe *recipe, const RecipeFilter *filter) {
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        if (fnmatch(filter->operands, OPERAND_NAMES[operand], 0) == 0) recipe->format[operand] = filter->format;
    }
}

static bool quantizes_for(const Recipe *recipe, Gemm gemm) {
    return mx_is_mx(recipe->format[2 * gemm]) || mx_is_mx(recipe->format[2 * gemm + 1]);
}

Recipe recipe_for_linear(const Recipe *recipe, int64_t layer, int64_t layers, const char *name) {
    Recipe result = recipe_for_layer(recipe, layer, layers);
    for (int i = 0; i < recipe->num_filters; i++) {
        if (recipe_filter_matches(&recipe->filters[i], name)) apply_filter(&result, &recipe->filters[i]);
    }
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        if (!quantizes_for(&result, (Gemm)gemm)) result.transform[gemm] = TRANSFORM_NONE;
    }
    return result;
}

bool recipe_is_from_forward(const Recipe *recipe, GemmOperand backward) {
    GemmOperand forward = backward == DGRAD_W ? FPROP_W : FPROP_X;
    bool has_two = backward == WGRAD_X || (backward == DGRAD_W && !recipe->square_weights);
    return recipe->from_forward && has_two && mx_is_mx(recipe->format[forward]) && mx_is_mx(recipe->format[backward]);
}

// Returns the recipe of this name, of which there is one.
static const Recipe *find_named(const char *name) { return &RECIPES[find_word(name, recipe_names())]; }

bool recipe_is_adjusted(const Recipe *recipe) { return !recipe_is_same(recipe, find_named(recipe->name)); }

bool recipe_is_same(const Recipe *a, const Recipe *b) {
    return memcmp(a->format, b->format, sizeof(a->format)) == 0 &&
           memcmp(a->scaling, b->scaling, sizeof(a->scaling)) == 0 && a->delayed.length == b->delayed.length &&
           a->delayed.algorithm == b->delayed.algorithm && a->delayed.margin == b->delayed.margin &&
           memcmp(a->rounding, b->rounding, sizeof(a->rounding)) == 0 &&
           memcmp(a->element_rounding, b->element_rounding, sizeof(a->element_rounding)) == 0 &&
           a->prescale == b->prescale && memcmp(a->transform, b->transform, sizeof(a->transform)) == 0 &&
           a->hadamard_size == b->hadamard_size && a->from_forward == b->from_forward &&
           a->activation_dtype == b->activation_dtype && a->bf16_first_layers == b->bf16_first_layers &&
           a->bf16_last_layers == b->bf16_last_layers && a->quantize_lm_head == b->quantize_lm_head &&
           a->norm_gains == b->norm_gains && a->square_weights == b->square_weights &&
           a->num_filters == b->num_filters && memcmp(a->filters, b->filters, sizeof(a->filters)) == 0;
}

// Returns the scalings of a linear layer's operands that are quantized: bits 1 << Scaling.
static unsigned scalings_of_operands(const Recipe *recipe) {
    unsigned scalings = 0;
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        if (mx_is_mx(recipe->format[operand])) scalings |= 1u << recipe->scaling[operand];
    }
    return scalings;
}

unsigned recipe_scalings(const Recipe *recipe) {
    unsigned scalings = scalings_of_operands(recipe);
    for (int i = 0; i < recipe->num_filters; i++) {
        Recipe filtered = *recipe;
        apply_filter(&filtered, &recipe->filters[i]);
        scalings |= scalings_of_operands(&filtered);
    }
    return scalings;
}

void recipe_add_effects(RecipeEffects *effects, const Recipe *of_linear) {
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        if (!mx_is_mx(of_linear->format[operand])) continue;
        effects->scalings[operand_role((GemmOperand)operand)] |= 1u << of_linear->scaling[operand];
    }
    if (mx_is_mx(of_linear->norm_gains)) effects->scalings[ROLE_WEIGHTS] |= 1u << SCALING_MX;
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        effects->is_transformed[gemm] = effects->is_transformed[gemm] || of_linear->transform[gemm];
    }
    effects->is_from_forward = effects->is_from_forward || recipe_is_from_forward(of_linear, DGRAD_W) ||
                               recipe_is_from_forward(of_linear, WGRAD_X);
}

// An option that changes nothing, "--x y", and one that undoes it where a resumed run has it from
// before.
typedef struct {
    char option[64], undo[64];
} IdleOption;

static IdleOption idle_option(const char *name, const char *suffix, const char *value, const char *undo) {
    IdleOption idle;
    snprintf(idle.option, sizeof(idle.option), "--%s%s %s", name, suffix, value);
    snprintf(idle.undo, sizeof(idle.undo), "--%s%s %s", name, suffix, undo);
    return idle;
}

static bool has_no_effect(const Recipe *recipe, IdleOption idle, const char *what, Error *error) {
    return error_set(
        error,
        "%s changes nothing: under recipe %s no linear layer quantizes %s; leave it out (a resumed run that "
        "had it takes %s), quantize one, or keep fewer blocks in BF16",
        idle.option, recipe->name, what, idle.undo);
}

// The roundings of one kind, of scales or of elements, by role.
typedef struct {
    const char *option;                // of all roles, "scale-rounding"; one role's ends with its name
    bool given, role_given[NUM_ROLES]; // whether the user gave the option of all, and each role's
    bool matters[NUM_ROLES];           // it is an error if no linear layer heeds the rounding
    bool is_idle[NUM_ROLES];           // no linear layer heeds it
    const char *value[NUM_ROLES];      // "floor"
    const char *undo[NUM_ROLES];       // the value that is never an error
    const char *blocks;                // " in MX blocks", if only an operand in these heeds it
} Roundings;

// Errors: an option of one role that is idle there; the option of all that is idle in every role
// that has no option of its own.
static bool check_roundings(const Recipe *recipe, const Roundings *r, Error *error) {
    static const char *const OPERANDS[] = {"a weight operand", "an activation operand", "a gradient operand"};
    char what[64];
    int idle = -1;
    bool is_heeded = false, any_role_given = false;
    for (int role = 0; role < NUM_ROLES; role++) {
        if (r->role_given[role] && r->is_idle[role] && r->matters[role]) {
            char suffix[32];
            snprintf(suffix, sizeof(suffix), "-%s", ROLE_NAMES[role]);
            snprintf(what, sizeof(what), "%s%s", OPERANDS[role], r->blocks);
            return has_no_effect(recipe, idle_option(r->option, suffix, r->value[role], r->undo[role]), what, error);
        }
        any_role_given = any_role_given || r->role_given[role];
        if (r->role_given[role]) continue;
        is_heeded = is_heeded || !r->is_idle[role];
        if (r->matters[role]) idle = role;
    }
    if (!r->given || is_heeded || idle < 0) return true;
    snprintf(what, sizeof(what), "an operand%s%s", any_role_given ? " of another role" : "", r->blocks);
    return has_no_effect(recipe, idle_option(r->option, "", r->value[idle], r->undo[idle]), what, error);
}

static bool check_scale_roundings(const Recipe *recipe, const Recipe *named, const RecipeEffects *effects,
                                  Error *error) {
    Roundings r = {.option = "scale-rounding", .given = recipe->given.scale_rounding, .blocks = " in MX blocks"};
    for (int role = 0; role < NUM_ROLES; role++) {
        r.role_given[role] = recipe->given.role_scale_rounding[role];
        r.matters[role] = recipe->rounding[role] != named->rounding[role];
        r.is_idle[role] = !(effects->scalings[role] >> SCALING_MX & 1);
        r.value[role] = SCALE_ROUNDING_NAMES[recipe->rounding[role]];
        r.undo[role] = SCALE_ROUNDING_NAMES[named->rounding[role]];
    }
    return check_roundings(recipe, &r, error);
}

static bool check_element_roundings(const Recipe *recipe, const RecipeEffects *effects, Error *error) {
    Roundings r = {.option = "element-rounding", .given = recipe->given.element_rounding, .blocks = ""};
    for (int role = 0; role < NUM_ROLES; role++) {
        ElementRounding rounding = recipe->element_rounding[role];
        r.role_given[role] = recipe->given.role_element_rounding[role];
        r.matters[role] = rounding == ROUND_STOCHASTIC;
        r.is_idle[role] = !effects->scalings[role];
        r.value[role] = ELEMENT_ROUNDING_NAMES[rounding];
        r.undo[role] = ELEMENT_ROUNDING_NAMES[ROUND_NEAREST];
    }
    return check_roundings(recipe, &r, error);
}

// Errors: a transform of a GEMM neither of whose operands is quantized, or a size of none.
static bool check_transforms(const Recipe *recipe, const Recipe *named, const RecipeEffects *effects, Error *error) {
    char what[64], size[32], named_size[32];
    bool any = false;
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        any = any || effects->is_transformed[gemm];
        if (!recipe->given.transform[gemm] || !recipe->transform[gemm] || effects->is_transformed[gemm]) continue;
        snprintf(what, sizeof(what), "an operand of %s", GEMM_NAMES[gemm]);
        return has_no_effect(
            recipe, idle_option("hadamard-", GEMM_NAMES[gemm], TRANSFORM_NAMES[recipe->transform[gemm]], "none"), what,
            error);
    }
    if (any || !recipe->given.hadamard_size || recipe->hadamard_size == named->hadamard_size) return true;
    snprintf(size, sizeof(size), "%ld", recipe->hadamard_size);
    snprintf(named_size, sizeof(named_size), "%ld", named->hadamard_size);
    return has_no_effect(recipe, idle_option("hadamard-size", "", size, named_size),
                         "an operand of a GEMM whose operands are transformed", error);
}

static unsigned scalings_of(const RecipeEffects *effects) {
    return effects->scalings[ROLE_WEIGHTS] | effects->scalings[ROLE_ACTIVATIONS] | effects->scalings[ROLE_GRADIENTS];
}

static bool delayed_scales_are_idle(const Recipe *recipe, const Recipe *named, const RecipeEffects *effects) {
    const DelayedScaling a = recipe->delayed, b = named->delayed;
    bool differs = a.length != b.length || a.algorithm != b.algorithm || a.margin != b.margin;
    return differs && !(scalings_of(effects) >> SCALING_TENSOR & 1);
}

bool recipe_check_effects(const Recipe *recipe, const RecipeEffects *effects, Error *error) {
    const Recipe *named = find_named(recipe->name);
    if (!check_scale_roundings(recipe, named, effects, error)) return false;
    if (!check_element_roundings(recipe, effects, error)) return false;
    if (!check_transforms(recipe, named, effects, error)) return false;
    if (delayed_scales_are_idle(recipe, named, effects)) {
        const IdleOption idle = {"--amax-history, --amax-algorithm or --amax-margin", "what the recipe has"};
        return has_no_effect(recipe, idle, "an operand with one scale per tensor", error);
    }
    if (recipe->from_forward && !effects->is_from_forward) {
        return has_no_effect(recipe, idle_option("backward-source", "", "forward", "original"),
                             "a weight into two copies, or X in both passes", error);
    }
    return true;
}

bool recipe_check_layers(const Recipe *recipe, int64_t layers, Error *error) {
    if (recipe->bf16_first_layers + recipe->bf16_last_layers <= layers) return true;
    return error_set(
        error, "--bf16-first-layers %ld and --bf16-last-layers %ld are more than the model's %ld blocks: lower them",
        recipe->bf16_first_layers, recipe->bf16_last_layers, layers);
}

bool recipe_quantizes(const Recipe *recipe) { return recipe_scalings(recipe) != 0; }

bool recipe_is_scaled(const Recipe *recipe) { return (recipe_scalings(recipe) & ~(1u << SCALING_MX)) != 0; }

bool recipe_has_encoding(const Recipe *recipe) {
    bool result = recipe->prescale != 0;
    for (int role = 0; role < NUM_ROLES; role++) {
        result = result || recipe->element_rounding[role] != ROUND_NEAREST;
    }
    return result;
}

// Writes "1x32 rceil", "1x128 2^k" or "tensor".
static void write_scaling(char text[32], const Recipe *recipe, GemmOperand operand) {
    Scaling scaling = recipe->scaling[operand];
    Axis axis = recipe_axis(recipe, operand);
    static const char *const SCALES[] = {[SCALING_BLOCK128] = "2^k",
                                         [SCALING_BLOCK128_FP32] = "fp32",
                                         [SCALING_NVFP4] = "nvfp4",
                                         [SCALING_NVFP4_46] = "4/6"};
    const char *rounding = SCALE_ROUNDING_NAMES[recipe->rounding[operand_role(operand)]];
    const char *name = scaling == SCALING_MX ? rounding : SCALES[scaling];
    if (scaling == SCALING_TENSOR) {
        snprintf(text, 32, "tensor");
    } else {
        snprintf(text, 32, "%ldx%ld %s", scaling_block_rows(scaling, axis), scaling_block_cols(scaling, axis), name);
    }
}

static void print_operand(const Recipe *recipe, GemmOperand operand, FILE *stream) {
    char text[64], scaling[32];
    Format format = recipe->format[operand];
    if (mx_is_mx(format)) {
        write_scaling(scaling, recipe, operand);
        snprintf(text, sizeof(text), "%s %s", FORMAT_NAMES[format], scaling);
    } else {
        snprintf(text, sizeof(text), "%s", FORMAT_NAMES[format]);
    }
    bool last = operand % 2 == 1;
    fprintf(stream, "  %-2s %-*s", strchr(OPERAND_NAMES[operand], '-') + 1, last ? 0 : 16, text);
}

// Prints the roles whose elements the recipe rounds stochastically and that are quantized, or the
// others. Returns how many they are.
static int print_stochastic(const Recipe *recipe, const RecipeEffects *effects, bool is_quantized, FILE *stream) {
    int count = 0;
    for (int role = 0; role < NUM_ROLES; role++) {
        if (recipe->element_rounding[role] != ROUND_STOCHASTIC || (effects->scalings[role] != 0) != is_quantized) {
            continue;
        }
        const char *before = count > 0 ? ", " : is_quantized ? "  elements rounded stochastically: " : "  ";
        fprintf(stream, "%s%s", before, ROLE_NAMES[role]);
        count++;
    }
    return count;
}

static void print_encoding(const Recipe *recipe, const RecipeEffects *effects, FILE *stream) {
    if (print_stochastic(recipe, effects, true, stream) > 0) fputc('\n', stream);
    if (print_stochastic(recipe, effects, false, stream) > 0) {
        fprintf(stream, " not rounded stochastically: no linear layer quantizes them\n");
    }
    if (recipe->prescale != 0 && scalings_of(effects)) {
        fprintf(stream, "  elements times %g before they are rounded, products divided by that again\n",
                recipe->prescale);
    }
}

static void print_transforms(const Recipe *recipe, const RecipeEffects *effects, FILE *stream) {
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        if (!recipe->transform[gemm]) continue;
        if (effects->is_transformed[gemm]) {
            fprintf(stream, "  %s: Hadamard transform of both operands, groups of %ld, signs %s\n", GEMM_NAMES[gemm],
                    recipe->hadamard_size, TRANSFORM_NAMES[recipe->transform[gemm]]);
        } else {
            fprintf(stream, "  %s: no Hadamard transform: no linear layer quantizes an operand of it\n",
                    GEMM_NAMES[gemm]);
        }
    }
}

// Returns whether an operand of the LM head is quantized.
static bool quantizes_head(const Recipe *recipe) {
    Recipe head = recipe_for_linear(recipe, 1, 1, "lm_head");
    return quantizes_for(&head, GEMM_FPROP) || quantizes_for(&head, GEMM_DGRAD) || quantizes_for(&head, GEMM_WGRAD);
}

void recipe_print(const Recipe *recipe, const RecipeEffects *effects, FILE *stream) {
    static const char *const GEMMS[] = {"fprop  Y  = X W^T", "dgrad  dX = dY W", "wgrad  dW = dY^T X"};
    fprintf(stream, "recipe %s%s: operands of the linear layers (QKV, attention projection, FFN up and down%s)\n",
            recipe->name, recipe_is_adjusted(recipe) ? ", adjusted" : "",
            recipe->quantize_lm_head ? ", LM head"
            : quantizes_head(recipe) ? ", LM head by a filter"
                                     : "");
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        fprintf(stream, "  %-20s", GEMMS[gemm]);
        print_operand(recipe, (GemmOperand)(2 * gemm), stream);
        print_operand(recipe, (GemmOperand)(2 * gemm + 1), stream);
        fputc('\n', stream);
    }
    print_transforms(recipe, effects, stream);
    bool w = recipe_is_from_forward(recipe, DGRAD_W), x = recipe_is_from_forward(recipe, WGRAD_X);
    if (w || x) {
        fprintf(stream, "  backward pass: %s quantized again from the forward pass' values\n",
                w && x ? "W and X"
                : w    ? "W"
                       : "X");
    }
    if (recipe->delayed.length > 0) {
        fprintf(stream, "  scales of the %s amax of the last %ld steps, margin %ld; 1 in the first step\n",
                recipe->delayed.algorithm == AMAX_MAX ? "largest" : "newest", recipe->delayed.length,
                recipe->delayed.margin);
    }
    print_encoding(recipe, effects, stream);
    if (recipe->bf16_first_layers || recipe->bf16_last_layers) {
        fprintf(stream, "  first %ld and last %ld block%s in %s\n", recipe->bf16_first_layers, recipe->bf16_last_layers,
                plural(recipe->bf16_last_layers), FORMAT_NAMES[recipe->activation_dtype]);
    }
    for (int i = 0; i < recipe->num_filters; i++) {
        const RecipeFilter *filter = &recipe->filters[i];
        fprintf(stream, "  in %s: %s %s\n", filter->linears, filter->operands, FORMAT_NAMES[filter->format]);
    }
    if (recipe_quantizes(find_named(recipe->name)) && !scalings_of(effects)) {
        fprintf(stream, "  no linear layer quantizes anything under these options\n");
    }
    if (mx_is_mx(recipe->norm_gains)) {
        fprintf(stream, "  norms' gains through %s %s\n", FORMAT_NAMES[recipe->norm_gains],
                SCALE_ROUNDING_NAMES[recipe->rounding[ROLE_WEIGHTS]]);
    } else if (recipe->norm_gains != FORMAT_FP32) {
        fprintf(stream, "  norms' gains stay in fp32: %s isn't MX\n", FORMAT_NAMES[recipe->norm_gains]);
    }
    fprintf(stream, "  everything else in %s; masters, gradients of weights, moments, %sbiases and the loss in fp32\n",
            FORMAT_NAMES[recipe->activation_dtype], mx_is_mx(recipe->norm_gains) ? "" : "gains, ");
}

void recipe_write_json(const Recipe *recipe, JsonWriter *w) {
    bool is_transformed = false;
    json_begin_object(w, "recipe");
    json_write_string(w, "name", recipe->name);
    json_write_bool(w, "adjusted", recipe_is_adjusted(recipe));
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        json_write_string(w, OPERAND_NAMES[(GemmOperand)operand], FORMAT_NAMES[recipe->format[operand]]);
    }
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        char key[64];
        snprintf(key, sizeof(key), "scaling-%s", OPERAND_NAMES[(GemmOperand)operand]);
        if (recipe->scaling[operand] != SCALING_MX) json_write_string(w, key, SCALING_NAMES[recipe->scaling[operand]]);
    }
    if (recipe->delayed.length > 0) {
        json_write_int64(w, "amax-history", recipe->delayed.length);
        json_write_string(w, "amax-algorithm", AMAX_ALGORITHM_NAMES[recipe->delayed.algorithm]);
        json_write_int64(w, "amax-margin", recipe->delayed.margin);
    }
    for (int role = 0; role < NUM_ROLES; role++) {
        char key[64];
        snprintf(key, sizeof(key), "scale-rounding-%s", ROLE_NAMES[(Role)role]);
        json_write_string(w, key, SCALE_ROUNDING_NAMES[recipe->rounding[role]]);
    }
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        char key[64];
        snprintf(key, sizeof(key), "hadamard-%s", GEMM_NAMES[gemm]);
        if (!recipe->transform[gemm]) continue;
        json_write_string(w, key, TRANSFORM_NAMES[recipe->transform[gemm]]);
        is_transformed = true;
    }
    if (is_transformed) json_write_int64(w, "hadamard-size", recipe->hadamard_size);
    if (recipe->from_forward) json_write_string(w, "backward-source", BACKWARD_SOURCES[1]);
    for (int role = 0; role < NUM_ROLES; role++) {
        char key[64];
        ElementRounding rounding = recipe->element_rounding[role];
        snprintf(key, sizeof(key), "element-rounding-%s", ROLE_NAMES[(Role)role]);
        if (rounding != ROUND_NEAREST) json_write_string(w, key, ELEMENT_ROUNDING_NAMES[rounding]);
    }
    if (recipe->prescale != 0) json_write_double(w, "prescale", recipe->prescale);
    json_write_int64(w, "bf16-first-layers", recipe->bf16_first_layers);
    json_write_int64(w, "bf16-last-layers", recipe->bf16_last_layers);
    json_write_bool(w, "quantize-lm-head", recipe->quantize_lm_head);
    if (recipe->num_filters) json_begin_array(w, "operand-in");
    for (int i = 0; i < recipe->num_filters; i++) {
        const RecipeFilter *filter = &recipe->filters[i];
        char text[96];
        snprintf(text, sizeof(text), "%s:%s=%s", filter->linears, filter->operands, FORMAT_NAMES[filter->format]);
        json_write_string(w, NULL, text);
    }
    if (recipe->num_filters) json_end_array(w);
    json_write_string(w, "gains", FORMAT_NAMES[recipe->norm_gains]);
    json_write_string(w, "weight-scaling", WEIGHT_SCALING_NAMES[recipe->square_weights]);
    json_end_object(w);
}
