#include "recipe_options.h"

#include <stdlib.h>
#include <string.h>

static const char *const WEIGHT_SCALINGS[] = {"1d", "2d", NULL};

void recipe_options(Option table[NUM_RECIPE_OPTIONS], RecipeSettings *s) {
    const double none = 0;
    const Option options[NUM_RECIPE_OPTIONS] = {
        {"Recipe", "recipe", "NAME", "what is quantized, how; printed at start", OPTION_STRING, &s->name, none, none,
         recipe_names(), false},
        {"Recipe", "format-weights", "FORMAT", "of both weight operands (fprop-w, dgrad-w)", OPTION_STRING,
         &s->format[ROLE_WEIGHTS], none, none, format_names(), false},
        {"Recipe", "format-activations", "FORMAT", "of both activation operands (fprop-x, wgrad-x)", OPTION_STRING,
         &s->format[ROLE_ACTIVATIONS], none, none, format_names(), false},
        {"Recipe", "format-gradients", "FORMAT", "of both gradient operands (dgrad-dy, wgrad-dy)", OPTION_STRING,
         &s->format[ROLE_GRADIENTS], none, none, format_names(), false},
        {"Recipe", "operand", "OPERAND=FORMAT", "one operand of one GEMM, such as wgrad-x=bf16; may be repeated",
         OPTION_REPEATED, &s->operands, none, none, NULL, false},
        {"Recipe", "scale-rounding", "MODE", "of all scales", OPTION_STRING, &s->scale_rounding, none, none,
         scale_rounding_names(), false},
        {"Recipe", "scale-rounding-weights", "MODE", "of the weights' scales", OPTION_STRING,
         &s->role_rounding[ROLE_WEIGHTS], none, none, scale_rounding_names(), false},
        {"Recipe", "scale-rounding-activations", "MODE", "of the activations' scales", OPTION_STRING,
         &s->role_rounding[ROLE_ACTIVATIONS], none, none, scale_rounding_names(), false},
        {"Recipe", "scale-rounding-gradients", "MODE", "of the gradients' scales", OPTION_STRING,
         &s->role_rounding[ROLE_GRADIENTS], none, none, scale_rounding_names(), false},
        {"Recipe", "bf16-first-layers", "N", "blocks at the input whose linear layers stay in BF16", OPTION_INT,
         &s->bf16_first_layers, 0, 1000, NULL, false},
        {"Recipe", "bf16-last-layers", "N", "blocks at the output whose linear layers stay in BF16", OPTION_INT,
         &s->bf16_last_layers, 0, 1000, NULL, false},
        {"Recipe", "weight-scaling", "BLOCKS",
         "1d: weights in blocks of 1x32 for fprop and of 32x1 for dgrad; 2d: of 32x32, one copy for both",
         OPTION_CHOICE, &s->weight_scaling, none, none, WEIGHT_SCALINGS, false},
        {"Recipe", "quantize-ln-affine", NULL,
         "norms' gains pass through the weights' MX format and scale rounding before use", OPTION_FLAG,
         &s->quantize_norm_gains, none, none, NULL, false},
    };
    memcpy(table, options, sizeof(options));
}

bool recipe_from_settings(Recipe *recipe, const RecipeSettings *s, Error *error) {
    if (!recipe_named(recipe, s->name, error)) return false;
    for (int role = 0; role < NUM_ROLES; role++) {
        if (s->format[role] && !recipe_set_role_format(recipe, (Role)role, s->format[role], error)) return false;
    }
    for (int i = 0; i < s->operands.count; i++) {
        if (!recipe_set_operand(recipe, s->operands.items[i], error)) return false;
    }
    for (int role = 0; role < NUM_ROLES; role++) {
        // The options' choices have been checked.
        if (s->scale_rounding) scale_rounding_parse(s->scale_rounding, &recipe->rounding[role]);
        if (s->role_rounding[role]) scale_rounding_parse(s->role_rounding[role], &recipe->rounding[role]);
    }
    recipe->bf16_first_layers = s->bf16_first_layers;
    recipe->bf16_last_layers = s->bf16_last_layers;
    recipe->square_weights = s->weight_scaling == 1;
    recipe->quantize_norm_gains = s->quantize_norm_gains;
    return recipe_check(recipe, error);
}

void recipe_write_json(const Recipe *recipe, JsonWriter *writer) {
    json_write_string(writer, "name", recipe->name);
    json_write_bool(writer, "adjusted", recipe_is_adjusted(recipe));
    for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
        json_write_string(writer, operand_name((GemmOperand)operand), format_name(recipe->format[operand]));
    }
    for (int role = 0; role < NUM_ROLES; role++) {
        char *key = format_string("scale-rounding-%s", role_name((Role)role));
        json_write_string(writer, key, scale_rounding_name(recipe->rounding[role]));
        free(key);
    }
    json_write_int64(writer, "bf16-first-layers", recipe->bf16_first_layers);
    json_write_int64(writer, "bf16-last-layers", recipe->bf16_last_layers);
    json_write_bool(writer, "quantize-lm-head", recipe->quantize_lm_head);
    json_write_string(writer, "weight-scaling", WEIGHT_SCALINGS[recipe->square_weights]);
    json_write_bool(writer, "quantize-ln-affine", recipe->quantize_norm_gains);
}
