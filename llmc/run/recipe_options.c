#include "recipe_options.h"

#include <stdlib.h>
#include <string.h>

int recipe_options(Option table[MAX_RECIPE_OPTIONS], RecipeSettings *s, bool is_gpt) {
    const Option options[] = {
        GROUP("Recipe"),
        NAME("recipe", "NAME", &s->name, recipe_names(),
             "what is quantized, how: see doc/recipes.md; printed at start"),
        NAME("format-weights", "FORMAT", &s->format[ROLE_WEIGHTS], FORMAT_NAMES,
             "of both weight operands (fprop-w, dgrad-w)"),
        NAME("format-activations", "FORMAT", &s->format[ROLE_ACTIVATIONS], FORMAT_NAMES,
             "of both activation operands (fprop-x, wgrad-x)"),
        NAME("format-gradients", "FORMAT", &s->format[ROLE_GRADIENTS], FORMAT_NAMES,
             "of both gradient operands (dgrad-dy, wgrad-dy)"),
        REPEATED("operand", "OPERAND=FORMAT", &s->operands,
                 "one operand of one GEMM, such as wgrad-x=bf16; may be repeated"),
        NAME("scale-rounding", "MODE", &s->scale_rounding, SCALE_ROUNDING_NAMES, "of all scales"),
        NAME("scale-rounding-weights", "MODE", &s->role_rounding[ROLE_WEIGHTS], SCALE_ROUNDING_NAMES,
             "of the weights' scales"),
        NAME("scale-rounding-activations", "MODE", &s->role_rounding[ROLE_ACTIVATIONS], SCALE_ROUNDING_NAMES,
             "of the activations' scales"),
        NAME("scale-rounding-gradients", "MODE", &s->role_rounding[ROLE_GRADIENTS], SCALE_ROUNDING_NAMES,
             "of the gradients' scales"),
        NAME("element-rounding", "MODE", &s->element_rounding, ELEMENT_ROUNDING_NAMES,
             "of all elements: stochastic is up with the probability that makes the mean exact"),
        NAME("element-rounding-weights", "MODE", &s->role_element_rounding[ROLE_WEIGHTS], ELEMENT_ROUNDING_NAMES,
             "of the weights' elements"),
        NAME("element-rounding-activations", "MODE", &s->role_element_rounding[ROLE_ACTIVATIONS],
             ELEMENT_ROUNDING_NAMES, "of the activations' elements"),
        NAME("element-rounding-gradients", "MODE", &s->role_element_rounding[ROLE_GRADIENTS], ELEMENT_ROUNDING_NAMES,
             "of the gradients' elements"),
        INT("bf16-first-layers", "N", &s->bf16_first_layers, 0, 1000,
            "blocks at the input whose linear layers stay in BF16"),
        INT("bf16-last-layers", "N", &s->bf16_last_layers, 0, 1000,
            "blocks at the output whose linear layers stay in BF16"),
        NAME("weight-scaling", "BLOCKS", &s->weight_scaling, WEIGHT_SCALING_NAMES,
             "1d: weights in blocks of 1x32 for fprop and of 32x1 for dgrad; 2d: of 32x32, one copy for both"),
        NAME("hadamard-fprop", "SIGNS", &s->transform[GEMM_FPROP], TRANSFORM_NAMES,
             "Hadamard transform of both operands of fprop before they are quantized; signs of its matrix fixed, as "
             "Transformer Engine has them, or random, drawn each step"),
        NAME("hadamard-dgrad", "SIGNS", &s->transform[GEMM_DGRAD], TRANSFORM_NAMES, "the same of dgrad"),
        NAME("hadamard-wgrad", "SIGNS", &s->transform[GEMM_WGRAD], TRANSFORM_NAMES, "the same of wgrad"),
        NAME("hadamard-size", "N", &s->hadamard_size, HADAMARD_SIZES,
             "elements of the dot product that are transformed together (16 where nothing else is said)"),
        NAME("backward-source", "WHAT", &s->backward_source, BACKWARD_SOURCES,
             "what dgrad's W and wgrad's X are quantized from: original, the tensor; forward, what fprop multiplied"),
        FLAG("quantize-ln-affine", &s->quantize_norm_gains,
             "norms' gains pass through the weights' MX format and scale rounding before use"),
        NAME("format-gains", "FORMAT", &s->norm_gains, FORMAT_NAMES,
             "norms' gains pass through this one before use, whatever the weights' is"),
        INT("amax-history", "N", &s->amax_history, 0, 1000000,
            "of fp8-delayed: how many past steps' amaxes (largest magnitudes) scales are made of; 0: 1024"),
        NAME("amax-algorithm", "WHICH", &s->amax_algorithm, AMAX_ALGORITHM_NAMES,
             "of fp8-delayed: the largest of these amaxes, or the last one; max if not given"),
        INT("amax-margin", "N", &s->amax_margin, 0, 32, "fp8-delayed makes its scales 2^N smaller"),
        REPEATED(
            "operand-in", "LINEARS:OPERANDS=FORMAT", &s->filters,
            "some operands of some linear layers, such as 'h.0.*:wgrad-x=bf16'; they are h.BLOCK.qkv, projection, up, "
            "down, and lm_head; may be repeated"),
        FLAG("quantize-lm-head", &s->quantize_lm_head, "quantize the LM head too"),
    };
    _Static_assert(COUNT(options) == MAX_RECIPE_OPTIONS, "change MAX_RECIPE_OPTIONS");
    memcpy(table, options, sizeof(options));
    return is_gpt ? MAX_RECIPE_OPTIONS : MAX_RECIPE_OPTIONS - OPTIONS_OF_A_GPT;
}

// Errors: a size, but the recipe's own, of transforms of which there is none.
static bool set_transforms(Recipe *recipe, const RecipeSettings *s, Error *error) {
    bool any = false;
    for (int gemm = 0; gemm < NUM_GEMMS; gemm++) {
        if (s->transform[gemm]) recipe->transform[gemm] = (Transform)find_word(s->transform[gemm], TRANSFORM_NAMES);
        recipe->given.transform[gemm] = s->transform[gemm] != NULL;
        any = any || recipe->transform[gemm];
    }
    long size = s->hadamard_size ? strtol(s->hadamard_size, NULL, 10) : recipe->hadamard_size;
    if (size != recipe->hadamard_size && !any) {
        return error_set(error,
                         "--hadamard-size %ld changes nothing without a transform: give --hadamard-fprop, "
                         "--hadamard-dgrad or --hadamard-wgrad too, or leave it out (a resumed run that had it takes "
                         "--hadamard-size %ld)",
                         size, (long)recipe->hadamard_size);
    }
    recipe->hadamard_size = size;
    recipe->given.hadamard_size = s->hadamard_size != NULL;
    return true;
}

static void set_roundings(Recipe *recipe, const RecipeSettings *s) {
    recipe->given.scale_rounding = s->scale_rounding != NULL;
    recipe->given.element_rounding = s->element_rounding != NULL;
    for (int role = 0; role < NUM_ROLES; role++) {
        const char *rounding = s->role_rounding[role] ? s->role_rounding[role] : s->scale_rounding;
        if (rounding) recipe->rounding[role] = (ScaleRounding)find_word(rounding, SCALE_ROUNDING_NAMES); // a choice
        const char *elements = s->role_element_rounding[role] ? s->role_element_rounding[role] : s->element_rounding;
        if (elements) recipe->element_rounding[role] = (ElementRounding)find_word(elements, ELEMENT_ROUNDING_NAMES);
        recipe->given.role_scale_rounding[role] = s->role_rounding[role] != NULL;
        recipe->given.role_element_rounding[role] = s->role_element_rounding[role] != NULL;
    }
}

bool recipe_from_settings(Recipe *recipe, const RecipeSettings *s, Error *error) {
    if (!recipe_named(recipe, s->name, error)) return false;
    for (int role = 0; role < NUM_ROLES; role++) {
        if (s->format[role] && !recipe_set_role_format(recipe, (Role)role, s->format[role], error)) return false;
    }
    for (int i = 0; i < s->operands.count; i++) {
        if (!recipe_set_operand(recipe, s->operands.items[i], error)) return false;
    }
    for (int i = 0; i < s->filters.count; i++) {
        if (!recipe_add_filter(recipe, s->filters.items[i], error)) return false;
    }
    set_roundings(recipe, s);
    recipe->bf16_first_layers = s->bf16_first_layers;
    recipe->bf16_last_layers = s->bf16_last_layers;
    if (s->weight_scaling) recipe->square_weights = find_word(s->weight_scaling, WEIGHT_SCALING_NAMES) == 1;
    if (s->quantize_norm_gains) recipe->norm_gains = recipe->format[FPROP_W];
    if (s->norm_gains) recipe->norm_gains = (Format)find_word(s->norm_gains, FORMAT_NAMES);
    recipe->quantize_lm_head = s->quantize_lm_head;
    if (s->backward_source) recipe->from_forward = find_word(s->backward_source, BACKWARD_SOURCES) == 1;
    if (!recipe_set_delayed(recipe, s->amax_history, s->amax_algorithm, s->amax_margin, error)) return false;
    return set_transforms(recipe, s, error) && recipe_check(recipe, error);
}

static bool unknown_adjustment(Error *error, const char *name, const Option *options, int count) {
    const char *names[MAX_RECIPE_OPTIONS + NUM_GEMM_OPERANDS];
    for (int i = 0; i < count; i++) {
        names[i] = options[i].name;
    }
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        names[count++] = OPERAND_NAMES[(GemmOperand)operand];
    }
    const char *near = nearest_word(name, names, count);
    if (near) return error_set(error, "a recipe has no adjustment '%s'; did you mean '%s'?", name, near);
    return error_set(error, "a recipe has no adjustment '%s': it takes the options of the group Recipe", name);
}

// Sets the option that `text` says: "OPTION=VALUE", "FLAG" or "OPERAND=FORMAT".
static bool adjust(Option *options, int count, char *text, Error *error) {
    char *value = strchr(text, '=');
    size_t length = value ? (size_t)(value - text) : strlen(text);
    char *name = format_string("%.*s", (int)length, text);
    bool by_operand = find_word(name, OPERAND_NAMES) >= 0, ok;
    const char *sought = by_operand ? "operand" : name;
    Option *option = options_find(options, count, sought, strlen(sought));
    if (!option) {
        ok = unknown_adjustment(error, name, options, count);
    } else if (!value && option->type != OPTION_FLAG) {
        ok = error_set(error, "the adjustment %s needs a value, as in %s=%s", name, name, option->value_name);
    } else {
        ok = option_set(option, by_operand ? text : value ? value + 1 : "true", error);
    }
    free(name);
    return ok;
}

bool recipe_parse(Recipe *recipe, const char *text, Error *error) {
    RecipeSettings settings = {0};
    Option options[MAX_RECIPE_OPTIONS];
    enum { FIRST_ADJUSTMENT = 2 }; // after the group's heading and --recipe, the first part of the text
    int count = recipe_options(options, &settings, true);
    char *copy = format_string("%s", text), *rest = copy;
    settings.name = strsep(&rest, ",");
    bool ok = true;
    while (ok && rest) {
        ok = adjust(options + FIRST_ADJUSTMENT, count - FIRST_ADJUSTMENT, strsep(&rest, ","), error);
    }
    ok = ok && recipe_from_settings(recipe, &settings, error);
    free(copy);
    return ok;
}
