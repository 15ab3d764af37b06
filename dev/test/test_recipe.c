/*
Recipes: the table of named ones, their adjustments, what a layer gets, what the errors say and what
the printed table shows.
*/
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "by_name.h"
#include "llmc/run/recipe_options.h"
#include "llmc/run/recipe_schedule.h"

// Formats in the order of GemmOperand: fprop-x, fprop-w, dgrad-dy, dgrad-w, wgrad-dy, wgrad-x.
static const struct {
    const char *name, *formats, *rounding, *activations;
    bool quantizes;
} TABLE[] = {
    {"fp32", "fp32 fp32 fp32 fp32 fp32 fp32", "rceil", "fp32", false},
    {"bf16", "bf16 bf16 bf16 bf16 bf16 bf16", "rceil", "bf16", false},
    {"mxfp8", "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3", "rceil", "bf16", true},
    {"mxfp8-ocp", "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3", "floor", "bf16", true},
    {"mxfp8-e5m2-gradients", "e4m3 e4m3 e5m2 e4m3 e5m2 e4m3", "rceil", "bf16", true},
    {"mxfp8-forward-only", "e4m3 e4m3 bf16 bf16 bf16 bf16", "rceil", "bf16", true},
    {"mxfp8-weights-only", "bf16 e4m3 bf16 e4m3 bf16 bf16", "rceil", "bf16", true},
    {"mxfp6-e2m3", "e2m3 e2m3 e2m3 e2m3 e2m3 e2m3", "rceil", "bf16", true},
    {"mxfp6-e3m2", "e3m2 e3m2 e3m2 e3m2 e3m2 e3m2", "rceil", "bf16", true},
    {"mxfp4", "e2m1 e2m1 e2m1 e2m1 e2m1 e2m1", "rceil", "bf16", true},
    {"fp8-current", "e4m3 e4m3 e5m2 e4m3 e5m2 e4m3", "rceil", "bf16", true},
    {"fp8-delayed", "e4m3 e4m3 e5m2 e4m3 e5m2 e4m3", "rceil", "bf16", true},
    {"fp8-blockwise", "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3", "rceil", "bf16", true},
    {"fp8-blockwise-fp32", "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3", "rceil", "bf16", true},
    {"nvfp4", "e2m1 e2m1 e2m1 e2m1 e2m1 e2m1", "rceil", "bf16", true},
    {"nvfp4-nvidia", "e2m1 e2m1 e2m1 e2m1 e2m1 e2m1", "rceil", "bf16", true},
    {"nvfp4-46", "e2m1 e2m1 e2m1 e2m1 e2m1 e2m1", "rceil", "bf16", true},
    {"mxfp8-nvfp4", "e4m3 e4m3 e2m1 e2m1 e2m1 e2m1", "rceil", "bf16", true},
    {"nvfp4-mxfp8", "e2m1 e2m1 e4m3 e4m3 e4m3 e4m3", "rceil", "bf16", true},
    {"mxfp4-sr", "bf16 bf16 e2m1 e2m1 e2m1 e2m1", "floor", "bf16", true},
};
enum { NUM_NAMED = sizeof(TABLE) / sizeof(TABLE[0]) };

// The six formats as text.
static const char *formats_of(const Recipe *recipe) {
    static char text[64];
    text[0] = '\0';
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof(text) - used, "%s%s", i ? " " : "", FORMAT_NAMES[recipe->format[i]]);
    }
    return text;
}

static void test_named_recipes(void **state) {
    (void)state;
    const char *const *names = recipe_names();
    for (int i = 0; i < NUM_NAMED; i++) {
        assert_string_equal(names[i], TABLE[i].name);
        Recipe recipe = recipe_of(TABLE[i].name);
        assert_string_equal(recipe.name, TABLE[i].name);
        assert_string_equal(formats_of(&recipe), TABLE[i].formats);
        for (int role = 0; role < NUM_ROLES; role++) {
            assert_string_equal(SCALE_ROUNDING_NAMES[recipe.rounding[role]], TABLE[i].rounding);
        }
        assert_string_equal(FORMAT_NAMES[recipe.activation_dtype], TABLE[i].activations);
        assert_true(recipe_quantizes(&recipe) == TABLE[i].quantizes);
        assert_false(recipe.quantize_lm_head);
        assert_int_equal(recipe.bf16_first_layers + recipe.bf16_last_layers, 0);
    }
    assert_null(names[NUM_NAMED]);
}

// Of the recipes whose scalings aren't MX: those of the six, and whether weights are in squares.
static void test_scalings(void **state) {
    (void)state;
    static const struct {
        const char *name, *forward, *backward;
        bool square;
    } rows[] = {{"fp8-current", "tensor", "tensor", true},
                {"fp8-delayed", "tensor", "tensor", true},
                {"fp8-blockwise", "block128", "block128", true},
                {"fp8-blockwise-fp32", "block128-fp32", "block128-fp32", true},
                {"nvfp4", "nvfp4", "nvfp4", true},
                {"nvfp4-46", "nvfp4-46", "nvfp4-46", true},
                {"mxfp8-nvfp4", "mx", "nvfp4", false},
                {"nvfp4-mxfp8", "nvfp4", "mx", false}};
    Error error;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        Recipe recipe = recipe_of(rows[i].name);
        for (int operand = 0; operand < NUM_GEMM_OPERANDS; operand++) {
            const char *expected = operand <= FPROP_W ? rows[i].forward : rows[i].backward;
            assert_string_equal(SCALING_NAMES[recipe.scaling[operand]], expected);
        }
        assert_true(recipe.square_weights == rows[i].square);
        assert_true(recipe_check(&recipe, &error) && recipe_is_scaled(&recipe));
    }
    static const char *const ENCODED[] = {"mxfp4-sr", "mxfp8,element-rounding-gradients=stochastic"};
    for (size_t i = 0; i < sizeof(ENCODED) / sizeof(ENCODED[0]); i++) {
        Recipe recipe;
        assert_true(recipe_parse(&recipe, ENCODED[i], &error) && !recipe_is_scaled(&recipe));
    }
    // Rows of a weight that stay together: blocks', and groups of dgrad's transform.
    const struct {
        const char *text;
        int64_t rows;
    } UNITS[] = {{"mxfp8", 32},
                 {"fp8-current", 32},
                 {"fp8-blockwise", 128},
                 {"fp8-blockwise-fp32", 128},
                 {"nvfp4", 32},
                 {"nvfp4-mxfp8", 32},
                 {"mxfp4-sr", 64},
                 {"fp8-blockwise,weight-scaling=1d", 128},
                 {"nvfp4-nvidia,hadamard-size=128", 32}};
    for (size_t i = 0; i < sizeof(UNITS) / sizeof(UNITS[0]); i++) {
        Recipe recipe;
        assert_true(recipe_parse(&recipe, UNITS[i].text, &error));
        assert_int_equal(recipe_shard_unit(&recipe), UNITS[i].rows);
    }
    Recipe mx = recipe_of("mxfp8"), nvfp4 = recipe_of("nvfp4"), exact = recipe_for_layer(&nvfp4, 2, 2);
    Recipe delayed = recipe_of("fp8-delayed");
    assert_false(recipe_is_scaled(&mx));
    assert_int_equal(recipe_scalings(&mx), 1 << SCALING_MX);
    Recipe hybrid = recipe_of("mxfp8-nvfp4"), bf16 = recipe_of("bf16"), filtered;
    assert_int_equal(recipe_scalings(&hybrid), 1 << SCALING_MX | 1 << SCALING_NVFP4);
    assert_int_equal(recipe_scalings(&bf16), 0);
    assert_true(recipe_parse(&filtered, "bf16,operand-in=h.0.*:wgrad-x=e4m3", &error));
    assert_int_equal(recipe_scalings(&filtered), 1 << SCALING_MX);
    assert_false(recipe_is_scaled(&exact)); // the LM head, in BF16
    assert_false(recipe_parse(&nvfp4, "nvfp4,format-gradients=e4m3", &error));
    assert_non_null(strstr(error.message, "dgrad-dy"));
    Recipe other;
    assert_int_equal(delayed.delayed.length, 1024);
    assert_true(recipe_parse(&other, "fp8-delayed,amax-history=1024,amax-algorithm=max,amax-margin=0", &error));
    assert_true(recipe_is_same(&other, &delayed) && !recipe_is_adjusted(&other));
    assert_true(recipe_parse(&other, "fp8-delayed,amax-algorithm=most-recent", &error) && recipe_is_adjusted(&other));
    assert_true(recipe_parse(&other, "fp8-delayed,amax-margin=3", &error) && recipe_is_adjusted(&other));
    assert_true(recipe_parse(&other, "fp8-delayed,amax-history=3", &error) && recipe_is_adjusted(&other));
    assert_false(recipe_parse(&other, "fp8-current,amax-history=3", &error));
    assert_non_null(strstr(error.message, "--amax-history"));
    assert_true(recipe_parse(&nvfp4, "nvfp4,wgrad-x=bf16,weight-scaling=1d", &error) && !nvfp4.square_weights);
}

static void check_refused(const char *text, const char *const words[3]) {
    Recipe recipe;
    Error error;
    assert_false(recipe_parse(&recipe, text, &error));
    for (int i = 0; i < 3 && words[i]; i++) {
        if (!strstr(error.message, words[i])) fail_msg("%s: '%s' isn't in: %s", text, words[i], error.message);
    }
}

// Transforms of GEMMs, and the source of backward operands: by name, by adjustment, for a layer,
// and what is refused.
static void test_transforms(void **state) {
    (void)state;
    Recipe recipe = recipe_of("nvfp4-nvidia"), plain = recipe_of("nvfp4");
    Error error;
    assert_true(recipe.transform[GEMM_WGRAD] == TRANSFORM_FIXED && !recipe.transform[GEMM_FPROP]);
    assert_true(!recipe.transform[GEMM_DGRAD] && recipe.hadamard_size == 16 && recipe.square_weights);
    assert_false(recipe_is_same(&recipe, &plain));
    assert_true(recipe_parse(&recipe, "nvfp4-nvidia,hadamard-wgrad=none,element-rounding=nearest", &error) &&
                recipe_is_same(&recipe, &plain));
    assert_true(recipe_parse(&recipe, "mxfp4,hadamard-dgrad=random,hadamard-wgrad=fixed,hadamard-size=64", &error));
    assert_true(recipe.transform[GEMM_DGRAD] == TRANSFORM_RANDOM && recipe.hadamard_size == 64);

    // Where a filter or the layer leaves nothing quantized nothing is transformed.
    assert_true(recipe_add_filter(&recipe, "h.1.*:wgrad-*=bf16", &error));
    Recipe kept = recipe_for_linear(&recipe, 1, 2, "h.1.up"), head = recipe_for_linear(&recipe, 2, 2, "lm_head");
    assert_true(kept.transform[GEMM_DGRAD] == TRANSFORM_RANDOM && kept.transform[GEMM_WGRAD] == TRANSFORM_NONE);
    assert_true(!head.transform[GEMM_DGRAD] && !head.transform[GEMM_WGRAD]);

    assert_true(recipe_parse(&recipe, "mxfp8,backward-source=forward,wgrad-x=bf16", &error));
    assert_true(recipe_is_from_forward(&recipe, DGRAD_W) && !recipe_is_from_forward(&recipe, WGRAD_X));
    assert_false(recipe_is_from_forward(&recipe, WGRAD_DY));

    check_refused("mxfp8,hadamard-size=32", (const char *[3]){"--hadamard-size", "--hadamard-fprop"});
    check_refused("mxfp8,hadamard-wgrad=fixed,hadamard-size=8", (const char *[3]){"16, 32, 64"});
    check_refused("mxfp8,hadamard-fprop=sometimes", (const char *[3]){"sometimes", "random"});
    check_refused("nvfp4,hadamard-dgrad=fixed", (const char *[3]){"--weight-scaling 1d", "--hadamard-dgrad fixed"});
    check_refused("mxfp8,weight-scaling=2d,hadamard-fprop=random", (const char *[3]){"--weight-scaling 1d"});
    check_refused("mxfp8,backward-source=forward,hadamard-fprop=fixed",
                  (const char *[3]){"--backward-source forward", "--hadamard-fprop"});
    assert_true(recipe_parse(&recipe, "mxfp8,weight-scaling=2d,fprop-w=bf16,hadamard-dgrad=fixed", &error));
}

// Returns what two blocks and an LM head make of a recipe.
static RecipeEffects effects_of(const Recipe *recipe) {
    RecipeEffects effects = {0};
    for (int64_t layer = 0; layer <= 2; layer++) {
        Recipe of_linear = recipe_for_linear(recipe, layer, 2, layer == 2 ? "lm_head" : "h.0.up");
        recipe_add_effects(&effects, &of_linear);
    }
    return effects;
}

// Returns whether some of their linear layers makes something of each option.
static bool has_effect(const char *text, Error *error) {
    Recipe recipe;
    if (!recipe_parse(&recipe, text, error)) fail_msg("%s: %s", text, error->message);
    RecipeEffects effects = effects_of(&recipe);
    return recipe_check_effects(&recipe, &effects, error);
}

// Options that no linear layer heeds are refused, by their name: those of one role, one by one;
// those of all, where none heeds them. A named recipe's own values never are, unless they are asked
// for again and are a transform or stochastic.
static void test_effects(void **state) {
    (void)state;
    static const struct {
        const char *recipe, *option; // NULL: has an effect
    } CASES[] = {{"bf16,scale-rounding=floor", "--scale-rounding floor changes"},
                 {"nvfp4,scale-rounding=floor", "--scale-rounding floor changes"},
                 {"nvfp4-mxfp8,scale-rounding-activations=floor", NULL},
                 {"mxfp8-nvfp4,scale-rounding-gradients=floor", "--scale-rounding-gradients floor changes"},
                 {"mxfp8-nvfp4,scale-rounding=floor", NULL},
                 {"bf16,format-gains=e4m3,scale-rounding=floor", NULL},
                 {"bf16,format-gains=e4m3,scale-rounding-gradients=floor", "--scale-rounding-gradients floor changes"},
                 {"mxfp8,scale-rounding=floor,bf16-first-layers=2", "--scale-rounding floor changes"},
                 {"mxfp8,scale-rounding=floor,bf16-first-layers=2,quantize-lm-head", NULL},
                 {"mxfp8,scale-rounding=rceil,bf16-first-layers=2", NULL},
                 {"mxfp8-ocp,bf16-last-layers=2", NULL},
                 {"nvfp4,element-rounding=stochastic", NULL},
                 {"bf16,element-rounding=stochastic", "--element-rounding stochastic changes"},
                 {"mxfp8-forward-only,element-rounding=stochastic", NULL},
                 {"mxfp8-forward-only,element-rounding-gradients=stochastic", "--element-rounding-gradients"},
                 {"mxfp8-forward-only,element-rounding-weights=stochastic,element-rounding-gradients=stochastic",
                  "--element-rounding-gradients stochastic changes nothing: under recipe mxfp8-forward-only no linear "
                  "layer quantizes a gradient operand; leave it out (a resumed run that had it takes "
                  "--element-rounding-gradients nearest)"},
                 {"mxfp8-forward-only,scale-rounding-weights=floor,scale-rounding-gradients=floor",
                  "--scale-rounding-gradients floor changes"},
                 {"mxfp8-weights-only,element-rounding=stochastic,element-rounding-weights=nearest",
                  "--element-rounding stochastic changes"},
                 {"nvfp4-nvidia,format-gradients=bf16", NULL},
                 // What undoes an option that a run before this one had.
                 {"nvfp4-nvidia,format-gradients=bf16,element-rounding-gradients=nearest", NULL},
                 {"nvfp4-nvidia,format-gradients=bf16,wgrad-x=bf16,hadamard-wgrad=none", NULL},
                 {"nvfp4-nvidia,format-gradients=bf16,wgrad-x=bf16,hadamard-size=16", NULL},
                 {"nvfp4-nvidia,format-gradients=bf16,element-rounding-gradients=stochastic",
                  "--element-rounding-gradients stochastic changes"},
                 {"nvfp4-nvidia,dgrad-dy=bf16,element-rounding-gradients=stochastic", NULL},
                 {"nvfp4-nvidia,element-rounding-gradients=stochastic,operand-in=*:*-dy=bf16",
                  "--element-rounding-gradients stochastic changes"},
                 {"nvfp4-nvidia,bf16-last-layers=2,element-rounding=stochastic", "--element-rounding stochastic"},
                 {"mxfp8-forward-only,element-rounding-gradients=nearest", NULL},
                 {"nvfp4-nvidia,format-gradients=bf16,wgrad-x=bf16,hadamard-wgrad=fixed", "--hadamard-wgrad fixed"},
                 {"nvfp4-nvidia,format-gradients=bf16,wgrad-x=bf16,hadamard-size=32", "--hadamard-size 32 changes"},
                 {"nvfp4-nvidia,format-gradients=bf16,hadamard-size=32", NULL},
                 {"fp8-delayed,amax-history=3", NULL},
                 {"fp8-delayed,amax-history=3,bf16-last-layers=2", "--amax-history"},
                 {"fp8-delayed,bf16-last-layers=2", NULL},
                 {"bf16,hadamard-wgrad=fixed", "--hadamard-wgrad fixed changes"},
                 {"mxfp8-forward-only,hadamard-dgrad=random", "--hadamard-dgrad random changes"},
                 {"mxfp4,hadamard-wgrad=fixed,bf16-first-layers=1,operand-in=h.0.up:wgrad-*=bf16",
                  "--hadamard-wgrad fixed changes"},
                 {"nvfp4-nvidia,bf16-last-layers=2", NULL},
                 {"bf16,backward-source=forward", "--backward-source forward changes"},
                 {"mxfp8-forward-only,backward-source=forward", "--backward-source forward changes"},
                 {"mxfp8,backward-source=forward", NULL}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Error error = {0};
        bool found = has_effect(CASES[i].recipe, &error);
        if (found != !CASES[i].option) fail_msg("%s: %s", CASES[i].recipe, error.message);
        if (!found && !strstr(error.message, CASES[i].option)) fail_msg("%s: %s", CASES[i].recipe, error.message);
    }
}

static void test_names(void **state) {
    (void)state;
    for (Format format = FORMAT_FP32; format < NUM_FORMATS; format++) {
        assert_int_equal(find_word(FORMAT_NAMES[format], FORMAT_NAMES), format); // no name stands twice
    }
    assert_null(FORMAT_NAMES[NUM_FORMATS]);
    for (ScaleRounding rounding = SCALE_RCEIL; rounding < NUM_SCALE_ROUNDINGS; rounding++) {
        assert_int_equal(find_word(SCALE_ROUNDING_NAMES[rounding], SCALE_ROUNDING_NAMES), rounding);
    }
    assert_null(SCALE_ROUNDING_NAMES[NUM_SCALE_ROUNDINGS]);
    static const char *const UNKNOWN[] = {"", "E4M3", "fp8", "e4m3 ", "rceil,", "up"};
    for (size_t i = 0; i < sizeof(UNKNOWN) / sizeof(UNKNOWN[0]); i++) {
        assert_true(find_word(UNKNOWN[i], FORMAT_NAMES) < 0 && find_word(UNKNOWN[i], SCALE_ROUNDING_NAMES) < 0);
    }
}

static void test_roles(void **state) {
    (void)state;
    static const char *const ROLE_OF[] = {"activations", "weights", "gradients", "weights", "gradients", "activations"};
    static const char *const NAMES[] = {"fprop-x", "fprop-w", "dgrad-dy", "dgrad-w", "wgrad-dy", "wgrad-x"};
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        assert_string_equal(ROLE_NAMES[operand_role((GemmOperand)i)], ROLE_OF[i]);
        assert_string_equal(OPERAND_NAMES[(GemmOperand)i], NAMES[i]);
    }
}

static void test_adjustments(void **state) {
    (void)state;
    Error error;
    Recipe recipe = recipe_of("mxfp8");
    assert_true(recipe_set_role_format(&recipe, ROLE_GRADIENTS, "e5m2", &error));
    assert_string_equal(formats_of(&recipe), "e4m3 e4m3 e5m2 e4m3 e5m2 e4m3");
    assert_true(recipe_set_role_format(&recipe, ROLE_WEIGHTS, "e2m1", &error));
    assert_string_equal(formats_of(&recipe), "e4m3 e2m1 e5m2 e2m1 e5m2 e4m3");
    assert_true(recipe_set_role_format(&recipe, ROLE_ACTIVATIONS, "bf16", &error));
    assert_string_equal(formats_of(&recipe), "bf16 e2m1 e5m2 e2m1 e5m2 bf16");
    assert_true(recipe_set_operand(&recipe, "wgrad-x=e3m2", &error));
    assert_string_equal(formats_of(&recipe), "bf16 e2m1 e5m2 e2m1 e5m2 e3m2");
    for (int i = 0; i < NUM_GEMM_OPERANDS; i++) {
        char text[32];
        snprintf(text, sizeof(text), "%s=fp32", OPERAND_NAMES[(GemmOperand)i]);
        assert_true(recipe_quantizes(&recipe));
        assert_true(recipe_set_operand(&recipe, text, &error));
        assert_int_equal(recipe.format[i], FORMAT_FP32);
        if (i < WGRAD_DY) continue;
        assert_true(recipe_quantizes(&recipe) == (i == WGRAD_DY));
    }
    assert_string_equal(recipe.name, "mxfp8");
    Recipe fresh = recipe_of("mxfp8"); // the table itself is as it was
    assert_string_equal(formats_of(&fresh), "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3");
}

static void check_layer(const Recipe *recipe, int64_t layer, int64_t layers, const char *formats) {
    Recipe result = recipe_for_layer(recipe, layer, layers);
    assert_string_equal(formats_of(&result), formats);
    assert_memory_equal(result.rounding, recipe->rounding, sizeof(result.rounding));
    assert_int_equal(result.activation_dtype, recipe->activation_dtype);
}

static void test_layers(void **state) {
    (void)state;
    static const char MX[] = "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3", BF16[] = "bf16 bf16 bf16 bf16 bf16 bf16";
    static const char FP32[] = "fp32 fp32 fp32 fp32 fp32 fp32";
    Recipe recipe = recipe_of("mxfp8");
    for (int64_t layer = 0; layer < 6; layer++) {
        check_layer(&recipe, layer, 6, MX);
    }
    check_layer(&recipe, 6, 6, BF16); // the LM head
    recipe.bf16_first_layers = 2;
    recipe.bf16_last_layers = 1;
    static const char *const KEPT[] = {BF16, BF16, MX, MX, MX, BF16, BF16};
    for (int64_t layer = 0; layer <= 6; layer++) {
        check_layer(&recipe, layer, 6, KEPT[layer]);
    }
    recipe.quantize_lm_head = true;
    check_layer(&recipe, 6, 6, MX);
    recipe.bf16_first_layers = 100; // more than there are
    for (int64_t layer = 0; layer < 6; layer++) {
        check_layer(&recipe, layer, 6, BF16);
    }
    Recipe adjusted = recipe_of("fp32"); // MX operands between FP32 activations
    Error error;
    assert_true(recipe_set_role_format(&adjusted, ROLE_WEIGHTS, "e4m3", &error));
    check_layer(&adjusted, 0, 2, "fp32 e4m3 fp32 e4m3 fp32 fp32");
    check_layer(&adjusted, 2, 2, FP32);
}

// An error names what was wrong and offers what is near.
static void check_error(const Error *error, const char *const *needles) {
    for (; *needles; needles++) {
        if (!strstr(error->message, *needles)) fail_msg("'%s' isn't in \"%s\"", *needles, error->message);
    }
    assert_null(strchr(error->message, '\n'));
}

#define NEEDLES(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_errors(void **state) {
    (void)state;
    Error error;
    Recipe recipe = recipe_of("mxfp8"), before = recipe;
    assert_false(recipe_named(&recipe, "mxpf8", &error));
    check_error(&error, NEEDLES("recipe", "'mxpf8'", "did you mean 'mxfp8'", "mxfp6-e2m3", "mxfp4"));
    assert_false(recipe_named(&recipe, "", &error));
    check_error(&error, NEEDLES("recipe", "mxfp8"));
    assert_false(recipe_set_role_format(&recipe, ROLE_WEIGHTS, "e4m4", &error));
    check_error(&error, NEEDLES("format", "'e4m4'", "did you mean 'e4m3'", "e2m1"));
    assert_false(recipe_set_role_format(&recipe, ROLE_WEIGHTS, "completely-other", &error));
    check_error(&error, NEEDLES("format", "'completely-other'", "e4m3"));
    assert_null(strstr(error.message, "did you mean"));
    assert_false(recipe_set_operand(&recipe, "wgrad-x", &error));
    check_error(&error, NEEDLES("--operand", "wgrad-x", "OPERAND=FORMAT"));
    assert_false(recipe_set_operand(&recipe, "wgrad-z=bf16", &error));
    check_error(&error, NEEDLES("operand", "'wgrad-z'", "did you mean 'wgrad-", "fprop-x"));
    assert_false(recipe_set_operand(&recipe, "wgrad-x=", &error));
    check_error(&error, NEEDLES("format", "e4m3"));
    assert_false(recipe_set_operand(&recipe, "=bf16", &error));
    check_error(&error, NEEDLES("operand", "fprop-x"));
    char longest[3000]; // longer than any buffer on the way
    memset(longest, 'x', sizeof(longest));
    longest[2000] = '=';
    longest[sizeof(longest) - 1] = '\0';
    assert_false(recipe_set_operand(&recipe, longest, &error));
    assert_false(recipe_named(&recipe, longest, &error));
    assert_true(strlen(error.message) < sizeof(error.message));
    assert_memory_equal(&recipe, &before, sizeof(recipe)); // errors change nothing
}

static void test_parse(void **state) {
    (void)state;
    Error error;
    Recipe recipe;
    for (const char *const *name = recipe_names(); *name; name++) {
        Recipe same = recipe_of(*name);
        assert_true(recipe_parse(&recipe, *name, &error));
        assert_true(recipe_is_same(&recipe, &same) && !recipe_is_adjusted(&recipe));
    }
    assert_true(
        recipe_parse(&recipe,
                     "mxfp8,format-gradients=e5m2,wgrad-x=bf16,scale-rounding=floor,scale-rounding-weights=even,"
                     "bf16-first-layers=2,bf16-last-layers=3,quantize-lm-head",
                     &error));
    assert_string_equal(formats_of(&recipe), "e4m3 e4m3 e5m2 e4m3 e5m2 bf16");
    assert_int_equal(recipe.rounding[ROLE_WEIGHTS], SCALE_EVEN);
    assert_int_equal(recipe.rounding[ROLE_ACTIVATIONS], SCALE_FLOOR);
    assert_int_equal(recipe.rounding[ROLE_GRADIENTS], SCALE_FLOOR);
    assert_int_equal(recipe.bf16_first_layers, 2);
    assert_int_equal(recipe.bf16_last_layers, 3);
    assert_true(recipe.quantize_lm_head && !recipe.square_weights);
    assert_true(recipe_parse(&recipe, "mxfp8,weight-scaling=2d", &error) && recipe.square_weights);
    assert_true(recipe_parse(&recipe, "mxfp8,weight-scaling=1d", &error) && !recipe.square_weights);
    // As with the options: of the same the last one counts, and an operand's more than a role's.
    assert_true(recipe_parse(&recipe, "mxfp8,format-gradients=e4m3,dgrad-dy=bf16,format-gradients=e5m2", &error));
    assert_string_equal(formats_of(&recipe), "e4m3 e4m3 bf16 e4m3 e5m2 e4m3");
    assert_true(recipe_parse(&recipe, "mxfp8,format-weights=e5m2", &error) && !mx_is_mx(recipe.norm_gains));
    assert_true(recipe_parse(&recipe, "mxfp8,format-weights=e5m2,quantize-ln-affine", &error));
    assert_int_equal(recipe.norm_gains, FORMAT_E5M2);
    assert_true(recipe_parse(&recipe, "mxfp8,quantize-ln-affine,format-gains=e2m1", &error));
    assert_int_equal(recipe.norm_gains, FORMAT_E2M1);
    assert_true(recipe_parse(&recipe, "mxfp8-forward-only,format-weights=bf16,format-gains=e4m3", &error));
    assert_int_equal(recipe.norm_gains, FORMAT_E4M3);
    recipe.bf16_first_layers = 1;
    assert_false(mx_is_mx(recipe_for_layer(&recipe, 0, 3).norm_gains));
    assert_int_equal(recipe_for_layer(&recipe, 1, 3).norm_gains, FORMAT_E4M3);

    static const char *const BAD[] = {"",
                                      ",",
                                      "mxfp9",
                                      "mxfp8,",
                                      "mxfp8,,wgrad-x=bf16",
                                      "mxfp8 ,wgrad-x=bf16",
                                      "mxfp8,wgrad-x",
                                      "mxfp8,wgrad-x=",
                                      "mxfp8,bf16-first-layers=-1",
                                      "mxfp8,bf16-first-layers=1x",
                                      "mxfp8,bf16-last-layers",
                                      "mxfp8,weight-scaling=3d",
                                      "mxfp8,quantize-lm-head=1",
                                      "mxfp8,format-gains=e4m4",
                                      "mxfp8,recipe-at=5:bf16",
                                      "mxfp8,weight-scaling=2d,dgrad-w=e5m2"};
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        error.message[0] = '\0';
        if (recipe_parse(&recipe, BAD[i], &error)) fail_msg("'%s' was taken", BAD[i]);
        assert_true(strlen(error.message) > 20);
    }
}

// Every adjustment alone.
static const char *const ADJUSTED[] = {"mxfp8,fprop-x=bf16",
                                       "mxfp8,fprop-w=bf16",
                                       "mxfp8,dgrad-dy=bf16",
                                       "mxfp8,dgrad-w=bf16",
                                       "mxfp8,wgrad-dy=bf16",
                                       "mxfp8,wgrad-x=bf16",
                                       "mxfp8,scale-rounding-weights=floor",
                                       "mxfp8,scale-rounding-activations=floor",
                                       "mxfp8,scale-rounding-gradients=floor",
                                       "mxfp8,bf16-first-layers=1",
                                       "mxfp8,bf16-last-layers=1",
                                       "mxfp8,quantize-lm-head",
                                       "mxfp8,quantize-ln-affine",
                                       "mxfp8,format-gains=e5m2",
                                       "mxfp8,weight-scaling=2d",
                                       "mxfp8,hadamard-fprop=fixed",
                                       "mxfp8,hadamard-wgrad=random",
                                       "mxfp8,hadamard-wgrad=random,hadamard-size=32",
                                       "mxfp8,backward-source=forward",
                                       "mxfp8,operand-in=h.0.*:wgrad-x=bf16",
                                       "mxfp8,operand-in=h.1.*:wgrad-x=bf16",
                                       "mxfp8,operand-in=h.0.*:wgrad-x=e4m3"};
enum { NUM_ADJUSTED = sizeof(ADJUSTED) / sizeof(ADJUSTED[0]) };

static Recipe parsed(const char *text) {
    Recipe recipe;
    Error error;
    if (!recipe_parse(&recipe, text, &error)) fail_msg("'%s': %s", text, error.message);
    return recipe;
}

static void test_is_same(void **state) {
    (void)state;
    Recipe recipe = recipe_of("mxfp8"), fp32 = recipe_of("fp32"), bf16 = recipe_of("bf16");
    for (int i = 0; i < NUM_ADJUSTED; i++) {
        Recipe other = parsed(ADJUSTED[i]);
        if (recipe_is_same(&recipe, &other)) fail_msg("'%s' is the same as mxfp8", ADJUSTED[i]);
    }
    assert_false(recipe_is_same(&recipe, &fp32) || recipe_is_same(&recipe, &bf16));
    Recipe other = parsed("mxfp8-ocp,scale-rounding=rceil"); // another name
    assert_true(recipe_is_same(&recipe, &other));
}

// Filters, in their order, over what the recipe and its layers say.
static void test_filters(void **state) {
    (void)state;
    static const struct {
        const char *recipe, *linear, *formats;
        int64_t layer;
    } CASES[] = {
        {"mxfp8,operand-in=h.[01].*:wgrad-*=bf16", "h.1.up", "e4m3 e4m3 e4m3 e4m3 bf16 bf16", 1},
        {"mxfp8,operand-in=h.[01].*:wgrad-*=bf16", "h.2.up", "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3", 2},
        {"mxfp8,operand-in=h.1.*:wgrad-*=bf16", "h.11.up", "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3", 11},
        {"mxfp8,operand-in=*.down:*=bf16,operand-in=h.0.*:*-w=e5m2", "h.0.down", "bf16 e5m2 bf16 e5m2 bf16 bf16", 0},
        {"mxfp8,operand-in=*.down:*=bf16,operand-in=h.0.*:*-w=e5m2", "h.3.down", "bf16 bf16 bf16 bf16 bf16 bf16", 3},
        {"mxfp8,bf16-first-layers=1,operand-in=h.0.qkv:fprop-x=e2m1", "h.0.qkv", "e2m1 bf16 bf16 bf16 bf16 bf16", 0},
        {"bf16,operand-in=lm_head:*=e4m3", "lm_head", "e4m3 e4m3 e4m3 e4m3 e4m3 e4m3", 12},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Recipe recipe = parsed(CASES[i].recipe);
        Recipe result = recipe_for_linear(&recipe, CASES[i].layer, 12, CASES[i].linear);
        assert_string_equal(formats_of(&result), CASES[i].formats);
        assert_true(recipe_quantizes(&recipe)); // the last one's blocks don't
    }
    Recipe scaled = parsed("nvfp4,format-weights=bf16,format-activations=bf16,format-gradients=bf16");
    assert_false(recipe_quantizes(&scaled) || recipe_is_scaled(&scaled));
    Error error;
    assert_true(recipe_add_filter(&scaled, "h.0.*:*=e2m1", &error) && recipe_is_scaled(&scaled));
    static const char *const BAD[] = {"h.0.*",         "h.0.*:wgrad-x",     "h.0.*:=bf16",
                                      ":wgrad-x=bf16", "h.0.*:wgrd-x=bf16", "h.0.*:wgrad-x=bf1"};
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        if (recipe_add_filter(&scaled, BAD[i], &error)) fail_msg("'%s' was taken", BAD[i]);
    }
    assert_true(recipe_add_filter(&scaled, "h.[0123456789][0123456789].up**:*=e2m1", &error)); // 31 characters
    scaled.num_filters--;
    assert_false(recipe_add_filter(&scaled, "h.[0123456789][0123456789].up***:*=e2m1", &error));
    assert_non_null(strstr(error.message, "more than 31 characters"));
    for (int i = 1; i < MAX_RECIPE_FILTERS; i++) {
        assert_true(recipe_add_filter(&scaled, "h.0.*:*=e2m1", &error));
    }
    assert_false(recipe_add_filter(&scaled, "h.0.*:*=e2m1", &error)); // one too many
}

// An adjustment that says what the name says already is none.
static void test_is_adjusted(void **state) {
    (void)state;
    static const char *const AS_NAMED[] = {"mxfp8,wgrad-x=e4m3", "mxfp8,scale-rounding=rceil",
                                           "mxfp8,bf16-first-layers=0", "mxfp8,weight-scaling=1d",
                                           "mxfp8-ocp,format-gradients=e4m3"};
    for (int i = 0; i < NUM_ADJUSTED; i++) {
        Recipe recipe = parsed(ADJUSTED[i]);
        if (!recipe_is_adjusted(&recipe)) fail_msg("'%s' counts as it is named", ADJUSTED[i]);
    }
    for (size_t i = 0; i < sizeof(AS_NAMED) / sizeof(AS_NAMED[0]); i++) {
        Recipe recipe = parsed(AS_NAMED[i]);
        if (recipe_is_adjusted(&recipe)) fail_msg("'%s' counts as adjusted", AS_NAMED[i]);
    }
    Recipe recipe = parsed("mxfp8-ocp,scale-rounding=rceil"); // which mxfp8 has, but not mxfp8-ocp
    assert_true(recipe_is_adjusted(&recipe));
}

static void test_schedule(void **state) {
    (void)state;
    Error error;
    RecipeSchedule schedule = {.phases = {{.recipe = recipe_of("mxfp8")}}, .count = 1};
    assert_int_equal(recipe_schedule_at(&schedule, 0), 0);
    assert_int_equal(recipe_schedule_at(&schedule, INT64_MAX), 0);
    assert_true(recipe_schedule_add(&schedule, "10:bf16", &error));
    assert_true(recipe_schedule_add(&schedule, "11:mxfp8,wgrad-x=bf16", &error));
    static const struct {
        int64_t step;
        int phase;
    } ROWS[] = {{0, 0}, {9, 0}, {10, 1}, {11, 2}, {12, 2}, {INT64_MAX, 2}};
    for (size_t i = 0; i < sizeof(ROWS) / sizeof(ROWS[0]); i++) {
        assert_int_equal(recipe_schedule_at(&schedule, ROWS[i].step), ROWS[i].phase);
    }
    assert_int_equal(schedule.phases[2].recipe.format[WGRAD_X], FORMAT_BF16);
    static const char *const BAD[] = {"11:bf16",
                                      "10:bf16",
                                      "12",
                                      "12:",
                                      ":bf16",
                                      "bf16",
                                      "+12:bf16",
                                      " 12:bf16",
                                      "12 :bf16",
                                      "-12:bf16",
                                      "99999999999999999999:bf16",
                                      "12:bf16,"};
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        if (recipe_schedule_add(&schedule, BAD[i], &error)) fail_msg("'%s' was taken", BAD[i]);
        assert_non_null(strstr(error.message, "--recipe-at"));
    }
    assert_int_equal(schedule.count, 3);
}

static char *printed(const Recipe *recipe) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    assert_non_null(stream);
    RecipeEffects effects = effects_of(recipe);
    recipe_print(recipe, &effects, stream);
    assert_int_equal(fclose(stream), 0);
    return text;
}

static void check_print(const Recipe *recipe, const char *const *needles) {
    char *text = printed(recipe);
    for (; *needles; needles++) {
        if (!strstr(text, *needles)) fail_msg("'%s' isn't in\n%s", *needles, text);
    }
    for (const char *line = text; *line; line = strchr(line, '\n') + 1) {
        assert_non_null(strchr(line, '\n'));
        assert_true(strchr(line, '\n') - line <= 120);
    }
    free(text);
}

// What is rounded stochastically or transformed is named, and so is what would be if it were
// quantized.
static void test_print_of_what_is_idle(void **state) {
    (void)state;
    static const char *const ROUNDED = "elements rounded stochastically: ", *const TIMES = "elements times 0.75";
    static const struct {
        const char *recipe, *has[4], *lacks[3];
    } CASES[] = {
        {"nvfp4-nvidia", {"stochastically: gradients\n", "wgrad: Hadamard transform"}, {"no linear layer"}},
        {"nvfp4-nvidia,format-gradients=bf16",
         {"  gradients not rounded stochastically: no linear layer quantizes them\n", "wgrad: Hadamard transform"},
         {ROUNDED}},
        {"nvfp4-nvidia,operand-in=*:wgrad-*=bf16", {ROUNDED, "wgrad: no Hadamard transform"}, {"wgrad: Hadamard"}},
        {"mxfp8-forward-only,element-rounding=stochastic",
         {"stochastically: weights, activations\n", "  gradients not rounded"},
         {TIMES}},
        {"mxfp4-sr,dgrad-w=bf16",
         {"stochastically: activations, gradients\n", "  weights not rounded", TIMES},
         {": no Hadamard"}},
        {"mxfp4-sr,bf16-first-layers=2",
         {"  weights, activations, gradients not rounded", "dgrad: no Hadamard", "wgrad: no Hadamard"},
         {ROUNDED, TIMES, ": Hadamard"}},
        {"bf16,format-gains=e4m3,element-rounding=stochastic", {"stochastically: weights\n"}, {TIMES}},
        {"mxfp8-ocp,bf16-last-layers=2", {"  no linear layer quantizes anything"}, {"stochastically"}},
        {"bf16,format-gains=e4m3", {"gains through e4m3"}, {"no linear layer"}},
        {"mxfp8", {"mxfp8"}, {"stochastically", "Hadamard", "no linear layer"}}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        Recipe recipe;
        Error error;
        if (!recipe_parse(&recipe, CASES[i].recipe, &error)) fail_msg("%s: %s", CASES[i].recipe, error.message);
        check_print(&recipe, CASES[i].has);
        char *text = printed(&recipe);
        for (int j = 0; j < 3 && CASES[i].lacks[j]; j++) {
            if (strstr(text, CASES[i].lacks[j])) fail_msg("'%s' is in\n%s", CASES[i].lacks[j], text);
        }
        free(text);
    }
}

static void test_print(void **state) {
    (void)state;
    Recipe recipe = recipe_of("mxfp8-e5m2-gradients");
    recipe.rounding[ROLE_WEIGHTS] = SCALE_FLOOR;
    recipe.rounding[ROLE_GRADIENTS] = SCALE_EVEN;
    check_print(&recipe,
                NEEDLES("mxfp8-e5m2-gradients", "fprop", "dgrad", "wgrad", "e4m3 1x32 rceil", "e4m3 1x32 floor",
                        "e5m2 1x32 even", "e4m3 32x1 floor", "e5m2 32x1 even", "e4m3 32x1 rceil", "bf16", "fp32"));
    char *text = printed(&recipe);
    assert_null(strstr(text, "LM head"));
    assert_null(strstr(text, "first"));
    free(text);
    recipe = recipe_of("mxfp8");
    recipe.bf16_first_layers = 2;
    recipe.bf16_last_layers = 1;
    recipe.quantize_lm_head = true;
    check_print(&recipe, NEEDLES("first 2", "last 1", "LM head"));
    Error error;
    assert_true(recipe_parse(&recipe, "mxfp8,operand-in=*:wgrad-x=e4m3", &error)); // a filter reaches the head too
    check_print(&recipe, NEEDLES("FFN up and down, LM head by a filter)"));
    for (const char *const *name = recipe_names(); *name; name++) {
        Recipe each = recipe_of(*name);
        check_print(&each, NEEDLES(*name, "fprop", "dgrad", "wgrad"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scalings),    cmocka_unit_test(test_transforms),
        cmocka_unit_test(test_effects),     cmocka_unit_test(test_named_recipes),
        cmocka_unit_test(test_names),       cmocka_unit_test(test_roles),
        cmocka_unit_test(test_adjustments), cmocka_unit_test(test_layers),
        cmocka_unit_test(test_filters),     cmocka_unit_test(test_errors),
        cmocka_unit_test(test_print),       cmocka_unit_test(test_print_of_what_is_idle),
        cmocka_unit_test(test_parse),       cmocka_unit_test(test_is_same),
        cmocka_unit_test(test_schedule),    cmocka_unit_test(test_is_adjusted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
