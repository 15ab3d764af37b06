/*
train_gpt_mxfp8: pre-trains a GPT with MXFP8 linear layers.

Host code only, compiled as C. Reads from top to bottom: options, what they add up to (a plan),
set-up, the training loop.
*/
#include <errno.h>
#include <math.h>
#include <omp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llmc/run/checkpoint.h"      // checkpoints, and through it the model, options, tokenizer
#include "llmc/data/blend.h"          // token files
#include "llmc/model/gradient_bias.h" // next to the exact gradient
#include "llmc/run/logger.h"          // log.jsonl and the console
#include "llmc/model/optimizer.h"     // AdamW
#include "llmc/run/planner.h"         // machines that aren't here
#include "llmc/model/profile.h"       // where the time goes
#include "llmc/run/quant_stats.h"     // what quantization does
#include "llmc/base/random.h"         // Philox
#include "llmc/run/recipe_options.h"  // --recipe and its adjustments
#include "llmc/run/recipe_schedule.h" // a recipe for each step
#include "llmc/run/sampler.h"         // logits to a token
#include "llmc/run/scheduler.h"       // learning rate
#include "llmc/base/system.h"         // processor, memory

// -------------------------------------------------------------------------------------------------
// Options

typedef struct {
    const char *train_data, *val_data, *tokenizer_path;
    int64_t batch_size, seq_len, total_batch_size, seed;
    const char *model;
    int64_t layers, heads, channels, max_seq_len, vocab_size, kv_heads, ffn;
    int activation, norm, positions;
    double rope_theta;
    bool ln_affine, biases, qk_norm, untied_head;
    RecipeSettings recipe;
    StringList recipe_at;
    int64_t max_steps, max_tokens;
    double max_minutes;
    double learning_rate, final_lr_fraction, decay_fraction, weight_decay, beta1, beta2, eps, grad_clip, skip_outliers;
    int schedule;
    int64_t warmup_steps;
    int64_t val_every, val_steps, sample_every, sample_tokens, top_k, quant_stats_every, gradient_bias_every;
    double temperature;
    const char *prompt;
    const char *out_dir, *init_from, *generate;
    int64_t checkpoint_every, keep_checkpoints;
    bool resume, dry_run, overfit_one_batch, profile, device_info;
    const char *device;
    int mx_gemm;
    int64_t threads;
    int64_t zero, world_size;
    int gather, reduce;
    double comm_timeout, link_bandwidth;
    const char *comm_file;
} Settings;

static const Settings DEFAULTS = {
    .batch_size = 4,
    .seed = 1337,
    .activation = -1,
    .norm = -1,
    .positions = -1,
    .ln_affine = true,
    .biases = true,
    .recipe = {.name = "mxfp8"},
    .learning_rate = 6e-4,
    .schedule = SCHEDULE_COSINE,
    .warmup_steps = 0,
    .final_lr_fraction = 0.1,
    .decay_fraction = 0.2,
    .weight_decay = 0.1,
    .beta1 = 0.9,
    .beta2 = 0.95,
    .eps = 1e-8,
    .grad_clip = 1.0,
    .val_every = 250,
    .val_steps = 20,
    .sample_tokens = 128,
    .temperature = 0.8,
    .zero = 1,
    .comm_timeout = COMM_TIMEOUT_SECONDS,
    .prompt = "",
    .keep_checkpoints = 3,
    .device = "auto",
};

static const char *const DEVICES[] = {"auto", "cpu", "cuda", "h100", "h200", "b200", "gb200", NULL};
static const char *const MX_GEMMS[] = {"auto", "native", "emulated", NULL}; // as MxGemm
static const char *const GATHERS[] = {"mx", "bf16", "fp32", NULL};          // as Gather
static const char *const REDUCES[] = {"fp32", "bf16", NULL};

typedef struct {
    const char *name;
    GPTConfig config;
} Preset;

#define GPT2(L, NH, C) .layers = L, .heads = NH, .channels = C, .max_seq_len = 1024, .vocab_size = 50257
// As the sweeps of arXiv:2506.20752 have them (github.com/Hither1/systems-scaling), with Llama 2's
// tokenizer.
#define OLMO(n)                                                                                              \
    .layers = n, .heads = n, .channels = 64 * n, .max_seq_len = 512, .vocab_size = 32000, .no_biases = true, \
    .positions = POSITIONS_ROPE, .qk_norm = true, .untied_head = true
// Of arXiv:2506.08027, with Nemotron-4's vocabulary.
#define NEMOTRON(L, NH, NKV, C)                                                                          \
    .layers = L, .heads = NH, .channels = C, .max_seq_len = 4096, .vocab_size = 256000, .kv_heads = NKV, \
    .activation = ACTIVATION_RELU2, .no_biases = true, .positions = POSITIONS_ROPE, .untied_head = true

static const Preset PRESETS[] = {
    {"gpt2-124M", {GPT2(12, 12, 768)}},
    {"gpt2-355M", {GPT2(24, 16, 1024)}},
    {"gpt2-774M", {GPT2(36, 20, 1280)}},
    {"gpt2-1558M", {GPT2(48, 25, 1600)}},
    {"olmo-n6", {OLMO(6)}},
    {"olmo-n7", {OLMO(7)}},
    {"olmo-n8", {OLMO(8)}},
    {"olmo-n9", {OLMO(9)}},
    {"olmo-n10", {OLMO(10)}},
    {"olmo-n11", {OLMO(11)}},
    {"olmo-n12", {OLMO(12)}},
    {"olmo-n13", {OLMO(13)}},
    {"olmo-n14", {OLMO(14)}},
    {"olmo-n15", {OLMO(15)}},
    {"olmo-n16", {OLMO(16)}},
    {"olmo-n17", {OLMO(17)}},
    {"olmo-n18", {OLMO(18)}},
    {"olmo-n19", {OLMO(19)}},
    {"olmo-n20", {OLMO(20)}},
    {"olmo-n21", {OLMO(21)}},
    {"olmo-n22", {OLMO(22)}},
    {"olmo-n23", {OLMO(23)}},
    {"olmo-n24", {OLMO(24)}},
    {"nemotron-843M", {NEMOTRON(24, 16, 16, 1024)}},
    {"nemotron-2B", {NEMOTRON(24, 16, 16, 2048)}},
    {"nemotron-8B", {NEMOTRON(32, 32, 8, 4096)}},
};
enum { NUM_PRESETS = sizeof(PRESETS) / sizeof(PRESETS[0]) };

static const char *const *preset_names(void) {
    static const char *names[NUM_PRESETS + 1];
    for (int i = 0; i < NUM_PRESETS; i++) {
        names[i] = PRESETS[i].name;
    }
    return names;
}

enum { MAX_OPTIONS = 100, BAD_STEPS_IN_A_ROW = 5 };

// The table of options, pointing into `s`. Returns how many there are.
static int make_options(Option table[MAX_OPTIONS], Settings *s) {
    const double many = 1e15, none = 0;
    const Option before[] = {
        {"Data", "train-data", "GLOB",
         "token files to train on, as data/prepare.py writes them; quote the pattern. Or a blend of patterns with "
         "weights, in phases that begin at a percentage of the run, as in A:0.7,B:0.3@0%,B:1@60%",
         OPTION_STRING, &s->train_data, none, none, NULL, false},
        {"Data", "val-data", "GLOB", "token files to validate on; without it there is no validation", OPTION_STRING,
         &s->val_data, none, none, NULL, false},
        {"Data", "tokenizer", "FILE",
         "tokenizer.bin for prompts and samples; where it isn't given, the one beside the training data", OPTION_STRING,
         &s->tokenizer_path, none, none, NULL, false},
        {"Data", "batch-size", "B", "sequences in a micro-batch", OPTION_INT, &s->batch_size, 1, 1 << 20, NULL, false},
        {"Data", "seq-len", "T", "tokens in a sequence; 0: the model's --max-seq-len", OPTION_INT, &s->seq_len, 0,
         1 << 20, NULL, false},
        {"Data", "total-batch-size", "TOKENS",
         "tokens in an optimizer step, a multiple of B*T; more than B*T accumulates gradients; 0: one micro-batch",
         OPTION_INT, &s->total_batch_size, 0, many, NULL, false},
        {"Data", "seed", "N", "of initial weights, data order and samples", OPTION_INT, &s->seed, 0, many, NULL, false},

        {"Model", "model", "NAME", "a preset; gpt2-124M where nothing else says what the model is", OPTION_STRING,
         &s->model, none, none, preset_names(), false},
        {"Model", "layers", "L", "blocks; like the next four, 0: the preset's", OPTION_INT, &s->layers, 0, 1000, NULL,
         false},
        {"Model", "heads", "NH", "attention heads; must divide channels", OPTION_INT, &s->heads, 0, 65536, NULL, false},
        {"Model", "channels", "C", "width of the residual stream", OPTION_INT, &s->channels, 0, 65536, NULL, false},
        {"Model", "max-seq-len", "T", "positions the model has; 0: --seq-len if that is given, else the preset's",
         OPTION_INT, &s->max_seq_len, 0, 1 << 20, NULL, false},
        {"Model", "vocab-size", "V", "tokens in the vocabulary; 0: the tokenizer's, else the preset's", OPTION_INT,
         &s->vocab_size, 0, 1 << 24, NULL, false},
        {"Model", "kv-heads", "NKV",
         "heads of keys and values, each shared by NH / NKV heads of queries; 0: the preset's, else as many as heads",
         OPTION_INT, &s->kv_heads, 0, 65536, NULL, false},
        {"Model", "ffn", "F",
         "hidden size of the MLP; 0: the preset's, else 4 C, with swiglu 8/3 C rounded up to a multiple of 64",
         OPTION_INT, &s->ffn, 0, 1 << 20, NULL, false},
        {"Model", "activation", "KIND",
         "of the MLP; relu2: squared ReLU; like the next two, where it isn't given, the preset's", OPTION_CHOICE,
         &s->activation, none, none, gpt_activation_names(), false},
        {"Model", "norm", "KIND", "of all norms", OPTION_CHOICE, &s->norm, none, none, gpt_norm_names(), false},
        {"Model", "positions", "KIND",
         "learned: added to embeddings; rope: rotary, queries and keys are turned by their position", OPTION_CHOICE,
         &s->positions, none, none, gpt_position_names(), false},
        {"Model", "rope-theta", "X", "base of rotary positions' wavelengths; 0: the preset's, else 10000", OPTION_FLOAT,
         &s->rope_theta, 0, 1e12, NULL, false},
        {"Model", "qk-norm", NULL, "normalise queries and keys, each over all heads, before positions turn them",
         OPTION_FLAG, &s->qk_norm, none, none, NULL, false},
        {"Model", "ln-affine", NULL, "gains and biases in norms, LayerNorm or RMSNorm", OPTION_FLAG, &s->ln_affine,
         none, none, NULL, false},
        {"Model", "biases", NULL, "biases in linear layers and in LayerNorm", OPTION_FLAG, &s->biases, none, none, NULL,
         false},
        {"Model", "untied-head", NULL, "give the LM head a weight of its own instead of the embedding's", OPTION_FLAG,
         &s->untied_head, none, none, NULL, false},
        {"Model", "init-from", "DIR",
         "start from the weights of a checkpoint of ours or of a Hugging Face GPT-2, Llama or OLMo 1 (config.json, "
         "model.safetensors)",
         OPTION_STRING, &s->init_from, none, none, NULL, false},
    };
    const Option after[] = {
        {"Recipe", "recipe-at", "STEP:RECIPE",
         "from that step on another recipe, with adjustments of its own after commas, as in "
         "1000:mxfp8,scale-rounding=floor,wgrad-x=bf16 (the options above belong to --recipe); may be repeated",
         OPTION_REPEATED, &s->recipe_at, none, none, NULL, false},

        {"Length (the first to be reached ends the run; none: one epoch)", "max-steps", "N", "optimizer steps",
         OPTION_INT, &s->max_steps, 0, many, NULL, false},
        {"Length (the first to be reached ends the run; none: one epoch)", "max-tokens", "N", "training tokens",
         OPTION_INT, &s->max_tokens, 0, many, NULL, false},
        {"Length (the first to be reached ends the run; none: one epoch)", "max-minutes", "MINUTES", "of training",
         OPTION_FLOAT, &s->max_minutes, 0, 1e9, NULL, false},

        {"Optimizer (AdamW)", "learning-rate", "LR", "peak learning rate", OPTION_FLOAT, &s->learning_rate, 0, 1e38,
         NULL, false},
        {"Optimizer (AdamW)", "schedule", "KIND", "of the learning rate after warm-up", OPTION_CHOICE, &s->schedule,
         none, none, schedule_names(), false},
        {"Optimizer (AdamW)", "warmup-steps", "N", "steps of linear warm-up", OPTION_INT, &s->warmup_steps, 0, many,
         NULL, false},
        {"Optimizer (AdamW)", "final-lr-fraction", "F", "of the peak, at the end of the schedule", OPTION_FLOAT,
         &s->final_lr_fraction, 0, 1, NULL, false},
        {"Optimizer (AdamW)", "decay-fraction", "F",
         "of the steps, the last ones: those of --schedule wsd's linear decay", OPTION_FLOAT, &s->decay_fraction, 0, 1,
         NULL, false},
        {"Optimizer (AdamW)", "weight-decay", "X", "decoupled, on matrices", OPTION_FLOAT, &s->weight_decay, 0, 1e6,
         NULL, false},
        {"Optimizer (AdamW)", "beta1", "X", "decay of the first moment", OPTION_FLOAT, &s->beta1, 0, 0.9999999, NULL,
         false},
        {"Optimizer (AdamW)", "beta2", "X", "decay of the second moment", OPTION_FLOAT, &s->beta2, 0, 0.9999999, NULL,
         false},
        {"Optimizer (AdamW)", "eps", "X", "added to the denominator", OPTION_FLOAT, &s->eps, 1e-30, 1, NULL, false},
        {"Optimizer (AdamW)", "grad-clip", "NORM", "largest global gradient norm; 0: no clipping", OPTION_FLOAT,
         &s->grad_clip, 0, 1e30, NULL, false},
        {"Optimizer (AdamW)", "skip-outliers", "Z",
         "don't apply a step whose loss or gradient norm lies Z standard deviations above those of the last 128 steps; "
         "0: apply all",
         OPTION_FLOAT, &s->skip_outliers, 0, 1e6, NULL, false},

        {"Evaluation", "val-every", "STEPS", "between validations; 0: only at the end", OPTION_INT, &s->val_every, 0,
         many, NULL, false},
        {"Evaluation", "val-steps", "N",
         "micro-batches in a validation, from the start of the validation data; 0: all of it", OPTION_INT,
         &s->val_steps, 0, many, NULL, false},
        {"Evaluation", "sample-every", "STEPS", "between samples of text; 0: none", OPTION_INT, &s->sample_every, 0,
         many, NULL, false},
        {"Evaluation", "sample-tokens", "N", "tokens in a sample", OPTION_INT, &s->sample_tokens, 1, 1 << 20, NULL,
         false},
        {"Evaluation", "prompt", "TEXT", "that samples continue; nothing: a document's start", OPTION_STRING,
         &s->prompt, none, none, NULL, false},
        {"Evaluation", "temperature", "X", "of samples; 0: the likeliest token", OPTION_FLOAT, &s->temperature, 0, 100,
         NULL, false},
        {"Evaluation", "top-k", "K", "sample among the K likeliest tokens; 0: all", OPTION_INT, &s->top_k, 0, 1 << 24,
         NULL, false},
        {"Evaluation", "quant-stats-every", "STEPS",
         "between quantization statistics of each layer and operand (amax, clamped, at the largest code, flushed to "
         "zero, SQNR) in the log; 0: none",
         OPTION_INT, &s->quant_stats_every, 0, many, NULL, false},
        {"Evaluation", "gradient-bias-every", "STEPS",
         "between steps whose exact gradient is computed too, on the same micro-batches and weights under recipe fp32: "
         "logs ||error|| / ||exact|| and the cosine between the two, in total and by layer; takes a second model's "
         "memory; 0: none",
         OPTION_INT, &s->gradient_bias_every, 0, many, NULL, false},

        {"Ranks", "zero", "STAGE",
         "with several ranks: 0: every rank has all; 1: masters and moments are sharded; 2: the sums of gradients too",
         OPTION_INT, &s->zero, 0, 2, NULL, false},
        {"Ranks", "gather", "WHAT",
         "what ranks exchange of updated weights: their MX copies, or BF16 or FP32 values to make them from",
         OPTION_CHOICE, &s->gather, none, none, GATHERS, false},
        {"Ranks", "reduce", "DTYPE", "in which gradients are sent; they are summed in FP32", OPTION_CHOICE, &s->reduce,
         none, none, REDUCES, false},
        {"Ranks", "world-size", "N",
         "ranks there must be; 0: as many as the launcher starts. With --dry-run: ranks to plan for", OPTION_INT,
         &s->world_size, 0, 65536, NULL, false},
        {"Ranks", "link-bandwidth", "GB/s",
         "with --dry-run --world-size: what a rank can send a second, for the time of a step; 0: not known",
         OPTION_FLOAT, &s->link_bandwidth, 0, 1e5, NULL, false},
        {"Ranks", "comm-timeout", "SECONDS", "after which a rank that doesn't answer ends the run", OPTION_FLOAT,
         &s->comm_timeout, 1, 1e6, NULL, false},
        {"Ranks", "comm-file", "PATH", "on GPUs: a file that all ranks see, to find each other without MPI or TCP",
         OPTION_STRING, &s->comm_file, none, none, NULL, false},

        {"Output", "out-dir", "DIR", "for log.jsonl and checkpoints; where it isn't given, runs/DATE-TIME",
         OPTION_STRING, &s->out_dir, none, none, NULL, false},
        {"Output", "checkpoint-every", "STEPS", "between checkpoints; 0: only at the end", OPTION_INT,
         &s->checkpoint_every, 0, many, NULL, false},
        {"Output", "keep-checkpoints", "N", "newest checkpoints that are kept; 0: all", OPTION_INT,
         &s->keep_checkpoints, 0, many, NULL, false},
        {"Output", "resume", NULL,
         "go on from the newest checkpoint in --out-dir; options not given are what they were", OPTION_FLAG, &s->resume,
         none, none, NULL, false},

        {"Other", "generate", "DIR",
         "only sample --sample-tokens tokens of text from a checkpoint (or a run's newest), after --prompt",
         OPTION_STRING, &s->generate, none, none, NULL, false},
        {"Other", "dry-run", NULL,
         "print memory, FLOPs per token and the recipe, for a planned device or ranks also the time of a step, and "
         "stop",
         OPTION_FLAG, &s->dry_run, none, none, NULL, false},
        {"Other", "overfit-one-batch", NULL,
         "train on the first step's tokens again and again: the loss must go to zero", OPTION_FLAG,
         &s->overfit_one_batch, none, none, NULL, false},
        {"Other", "profile", NULL,
         "at the end, print where the time of a step went, by operation and by layer, and log it", OPTION_FLAG,
         &s->profile, none, none, NULL, false},
        {"Other", "device", "NAME",
         "where to train: on a GPU where there is one that can be used, or as named; h100 and the like with --dry-run "
         "alone, to plan for them",
         OPTION_STRING, &s->device, none, none, DEVICES, false},
        {"Other", "mx-gemm", "HOW",
         "how a GPU multiplies MXFP8 operands: natively where it can, or decoded to BF16, as the CPU does",
         OPTION_CHOICE, &s->mx_gemm, none, none, MX_GEMMS, false},
        {"Other", "device-info", NULL, "print what this machine has to train on, and stop", OPTION_FLAG,
         &s->device_info, none, none, NULL, false},
        {"Other", "threads", "N", "CPU threads; 0: as many as there are cores (or OMP_NUM_THREADS)", OPTION_INT,
         &s->threads, 0, 4096, NULL, false},
    };
    memcpy(table, before, sizeof(before));
    int count = sizeof(before) / sizeof(before[0]);
    count += recipe_options(table + count, &s->recipe, true);
    memcpy(table + count, after, sizeof(after));
    return count + (int)(sizeof(after) / sizeof(after[0]));
}

static const char USAGE[] =
    "usage: train_gpt_mxfp8 --train-data GLOB [options]\n"
    "       train_gpt_mxfp8 --resume --out-dir DIR [options]\n"
    "       train_gpt_mxfp8 --generate CHECKPOINT_DIR [--prompt TEXT] [options]\n\n"
    "Pre-trains a GPT. The linear layers' operands are quantized to MX formats (blocks of 32 elements with\n"
    "one power-of-two scale) as --recipe says; master weights stay in FP32, everything else in BF16.\n\n"
    "Example:\n"
    "  ./train_gpt_mxfp8 --train-data 'build/demo/data/train_*.bin' \\\n"
    "      --val-data 'build/demo/data/val_*.bin' --layers 6 --heads 4 --channels 256 --max-seq-len 256 \\\n"
    "      --batch-size 8 --max-steps 500 --out-dir runs/first\n\n"
    "Exit codes: 0 done, or stopped by a signal with a checkpoint saved; 2 bad input, or a file that can't be\n"
    "written; 3 the loss stopped being finite; 4 a rank was lost.\n";

static _Noreturn void bad_input(const Error *error) { die("%s", error->message); }

// -------------------------------------------------------------------------------------------------
// What the options add up to

typedef struct {
    Settings settings;
    Option options[MAX_OPTIONS];
    int num_options;
    GPTConfig config;
    RecipeSchedule recipes;
    Recipe recipe;          // that the run begins or goes on with
    Recipe previous_recipe; // of a resumed run: of its last step
    const Backend *backend;
    Comm *comm;
    Sharding sharding;
    const PlannedDevice *card; // that is planned for; NULL: this machine
    Error no_gpu;              // why the CPU was taken, where that wasn't asked for; else ""
    char native_check[512];    // what the backend's self-check has seen, or ""
    int64_t B, T;
    int64_t accumulation; // micro-batches in a step
    int64_t total_steps;
    Tokenizer tokenizer;
    bool has_tokenizer;
    int32_t *prompt; // (num_prompt_tokens), after end-of-text, which begins a document
    int64_t num_prompt_tokens;
    Blend train;
    DataLoader val;
    bool has_val;
    char *checkpoint; // that is resumed from, or NULL
    TrainerState state;
    Logger logger;     // open from the start in a resumed run, else from the first step on
    double gemm_flops; // a second, measured
} Plan;

// --recipe and its adjustments.
static Recipe first_recipe(const Settings *s) {
    Recipe recipe;
    Error error;
    if (!recipe_from_settings(&recipe, &s->recipe, &error)) bad_input(&error);
    return recipe;
}

static RecipeSchedule schedule_of(const Settings *s) {
    RecipeSchedule schedule = {.phases = {{.recipe = first_recipe(s)}}, .count = 1};
    Error error;
    for (int i = 0; i < s->recipe_at.count; i++) {
        if (!recipe_schedule_add(&schedule, s->recipe_at.items[i], &error)) bad_input(&error);
    }
    return schedule;
}

// What happens between two steps, evaluation and checkpoints, has the recipe of the step before.
static int phase_before(const RecipeSchedule *schedule, int64_t step) {
    return recipe_schedule_at(schedule, step > 0 ? step - 1 : 0);
}

// The recipe of a resumed run's last step, by the options that it had.
static Recipe recipe_of_checkpoint(const char *checkpoint) {
    Settings then = DEFAULTS;
    Option options[MAX_OPTIONS];
    TrainerState state;
    Error error;
    int count = make_options(options, &then);
    if (!checkpoint_load_state(&state, checkpoint, options, count, &error)) bad_input(&error);
    RecipeSchedule schedule = schedule_of(&then);
    return schedule.phases[phase_before(&schedule, state.step)].recipe;
}

// An adjustment that is given for a resume would change a recipe that isn't used any more.
static void check_adjustments(const Plan *p) {
    int now = recipe_schedule_at(&p->recipes, p->state.step);
    if (!p->checkpoint || now == 0 || options_was_set(p->options, p->num_options, "recipe")) return;
    for (int i = 0; i < p->num_options; i++) {
        const Option *option = &p->options[i];
        if (strcmp(option->group, "Recipe") != 0 || !option->was_set || option->value == &p->settings.recipe_at)
            continue;
        die("--%s belongs to --recipe, but step %lld has the recipe of --recipe-at %s: give --recipe too, or an "
            "adjustment in --recipe-at",
            option->name, (long long)p->state.step, p->settings.recipe_at.items[now - 1]);
    }
}

static void plan_recipe(Plan *p) {
    p->recipes = schedule_of(&p->settings);
    p->recipe = p->recipes.phases[phase_before(&p->recipes, p->state.step)].recipe;
    check_adjustments(p);
    p->previous_recipe = p->checkpoint ? recipe_of_checkpoint(p->checkpoint) : p->recipe;
}

// The tokenizer beside the files of a pattern, to be freed.
static char *tokenizer_beside(const char *pattern) {
    const char *slash = strrchr(pattern, '/');
    int length = slash ? (int)(slash - pattern) : 1;
    return format_string("%.*s/tokenizer.bin", length, slash ? pattern : ".");
}

// Samples and prompts, and a blend, would be nonsense with the tokens of one vocabulary and the
// model, or a part of the data, of another.
static void check_same_tokenizer(const Plan *p, const char *path, const char *whose) {
    Error error;
    Tokenizer other;
    if (!p->has_tokenizer || !path_exists(path)) return;
    if (!tokenizer_open(&other, path, &error)) bad_input(&error);
    if (other.file_bytes != p->tokenizer.file_bytes || memcmp(other.file, p->tokenizer.file, other.file_bytes) != 0) {
        die("the data's tokenizer (%d tokens) isn't the one of %s (%d tokens): prepare the data with that one",
            p->tokenizer.vocab_size, whose, other.vocab_size);
    }
    tokenizer_close(&other);
}

static void check_same_tokenizers(const Plan *p) {
    const char *directory = p->settings.init_from;
    char *path = directory ? format_string("%s/tokenizer.bin", directory) : NULL;
    if (path) check_same_tokenizer(p, path, directory);
    free(path);
    for (int i = 0; i < p->train.num_sources && p->train.num_sources > 1; i++) {
        path = tokenizer_beside(p->train.sources[i].pattern);
        check_same_tokenizer(p, path, p->train.sources[i].pattern);
        free(path);
    }
}

// Where the training data comes from; it is opened later.
static void plan_sources(Plan *p) {
    Error error;
    if (!p->settings.train_data) return;
    if (!blend_parse(&p->train, p->settings.train_data, &error)) bad_input(&error);
}

static void plan_tokenizer(Plan *p) {
    const Settings *s = &p->settings;
    Error error;
    char *path = NULL;
    if (s->tokenizer_path) {
        path = format_string("%s", s->tokenizer_path);
    } else if (s->generate || p->checkpoint) {
        path = format_string("%s/tokenizer.bin", s->generate ? s->generate : p->checkpoint);
    } else if (s->train_data) {
        path = tokenizer_beside(p->train.sources[0].pattern);
    }
    if (path && (s->tokenizer_path || path_exists(path))) {
        if (!tokenizer_open(&p->tokenizer, path, &error)) bad_input(&error);
        p->has_tokenizer = true;
    }
    free(path);
    check_same_tokenizers(p);
}

// The prompt as tokens, where this run samples.
static void plan_prompt(Plan *p) {
    const Settings *s = &p->settings;
    if (!s->generate && !s->sample_every) return;
    if (!p->has_tokenizer && s->generate) die("%s has no tokenizer.bin: name one with --tokenizer", s->generate);
    if (!p->has_tokenizer) {
        die("--sample-every needs a tokenizer: there is no tokenizer.bin beside the training data; name one with "
            "--tokenizer");
    }
    size_t bytes = strlen(s->prompt);
    p->prompt = allocate((bytes + 1) * sizeof(*p->prompt));
    p->prompt[0] = p->tokenizer.end_of_text;
    int tokens = tokenizer_encode(&p->tokenizer, s->prompt, bytes, p->prompt + 1);
    if (tokens < 0) {
        die("--prompt has a character that the tokenizer has no token for: write it in characters of the training "
            "text");
    }
    p->num_prompt_tokens = 1 + tokens;
}

static void override(int64_t *value, int64_t given, const char *name, const char *directory) {
    if (given == 0) return;
    if (directory && *value != given) {
        die("--%s %lld was given, but %s holds a model with %lld: leave the option out or take another checkpoint",
            name, (long long)given, directory, (long long)*value);
    }
    *value = given;
}

static int override_choice(int value, int given, const char *name, const char *const *names, const char *directory) {
    if (given < 0) return value;
    if (directory && given != value) {
        die("--%s %s was given, but %s holds a model with %s: leave the option out or take another checkpoint", name,
            names[given], directory, names[value]);
    }
    return given;
}

static bool override_flag(const Plan *p, bool value, bool given, const char *name, const char *directory) {
    if (!options_was_set(p->options, p->num_options, name)) return value;
    if (directory && given != value) {
        die("--%s%s was given, but %s holds a model %s: leave the option out or take another checkpoint",
            given ? "" : "no-", name, directory, value ? "with that" : "without that");
    }
    return given;
}

// What makes the model another than a GPT-2.
static void plan_architecture(Plan *p, const char *directory) {
    const Settings *s = &p->settings;
    GPTConfig *c = &p->config;
    const char *const *activations = gpt_activation_names(), *const *norms = gpt_norm_names();
    override(&c->kv_heads, s->kv_heads, "kv-heads", directory);
    override(&c->ffn, s->ffn, "ffn", directory);
    c->activation =
        (Activation)override_choice((int)c->activation, s->activation, "activation", activations, directory);
    c->norm = (NormKind)override_choice((int)c->norm, s->norm, "norm", norms, directory);
    c->positions =
        (PositionKind)override_choice((int)c->positions, s->positions, "positions", gpt_position_names(), directory);
    if (s->rope_theta > 0 && directory && s->rope_theta != gpt_rope_theta(c)) {
        die("--rope-theta %g was given, but %s holds a model with %g: leave the option out or take another checkpoint",
            s->rope_theta, directory, gpt_rope_theta(c));
    }
    if (s->rope_theta > 0) c->rope_theta = s->rope_theta;
    c->qk_norm = override_flag(p, c->qk_norm, s->qk_norm, "qk-norm", directory);
    c->no_norm_affine = !override_flag(p, !c->no_norm_affine, s->ln_affine, "ln-affine", directory);
    c->no_biases = !override_flag(p, !c->no_biases, s->biases, "biases", directory);
    c->untied_head = override_flag(p, c->untied_head, s->untied_head, "untied-head", directory);
}

static void plan_model(Plan *p) {
    const Settings *s = &p->settings;
    Error error;
    const char *directory = s->generate ? s->generate : p->checkpoint ? p->checkpoint : s->init_from;
    bool custom = s->layers || s->heads || s->channels;
    p->config = PRESETS[0].config;
    for (int i = 0; s->model && i < NUM_PRESETS; i++) {
        if (strcmp(s->model, PRESETS[i].name) == 0) p->config = PRESETS[i].config;
    }
    if (custom && !s->model) p->config.max_seq_len = s->seq_len ? s->seq_len : p->config.max_seq_len;
    if (p->has_tokenizer) p->config.vocab_size = p->tokenizer.vocab_size;
    if (directory && !checkpoint_read_config(&p->config, directory, &error)) bad_input(&error);
    override(&p->config.layers, s->layers, "layers", directory);
    override(&p->config.heads, s->heads, "heads", directory);
    override(&p->config.channels, s->channels, "channels", directory);
    override(&p->config.max_seq_len, s->max_seq_len, "max-seq-len", directory);
    override(&p->config.vocab_size, s->vocab_size, "vocab-size", directory);
    plan_architecture(p, directory);
    if (!gpt_config_check(&p->config, &error)) bad_input(&error);
    for (int i = 0; i < p->recipes.count; i++) {
        const Recipe *recipe = &p->recipes.phases[i].recipe;
        if (recipe->bf16_first_layers + recipe->bf16_last_layers <= p->config.layers) continue;
        die("--bf16-first-layers %lld and --bf16-last-layers %lld are more than the model's %lld blocks: lower them",
            (long long)recipe->bf16_first_layers, (long long)recipe->bf16_last_layers, (long long)p->config.layers);
    }
    if (p->has_tokenizer && p->tokenizer.vocab_size > p->config.vocab_size) {
        die("the tokenizer has %d tokens and the model %lld: give --vocab-size %d or another --tokenizer",
            p->tokenizer.vocab_size, (long long)p->config.vocab_size, p->tokenizer.vocab_size);
    }
    p->B = s->generate ? 1 : s->batch_size;
    p->T = s->seq_len ? s->seq_len : p->config.max_seq_len;
    if (p->T > p->config.max_seq_len) {
        die("--seq-len %lld is over the model's %lld positions: lower it or raise --max-seq-len", (long long)p->T,
            (long long)p->config.max_seq_len);
    }
}

static int64_t samples_per_step(const Plan *p) { return p->B * p->accumulation * p->sharding.comm->size; }

static void plan_micro_batches(Plan *p) {
    const Settings *s = &p->settings;
    int ranks_planned = p->sharding.comm->size;
    int64_t micro_batch = p->B * p->T * ranks_planned, total = s->total_batch_size ? s->total_batch_size : micro_batch;
    if (total % micro_batch != 0) {
        int64_t lower = total / micro_batch * micro_batch;
        char ranks[32] = "";
        if (ranks_planned > 1) snprintf(ranks, sizeof(ranks), " * %d ranks", ranks_planned);
        die("--total-batch-size %lld isn't a multiple of the micro-batch's %lld tokens (--batch-size %lld * --seq-len "
            "%lld%s): take %lld",
            (long long)total, (long long)micro_batch, (long long)p->B, (long long)p->T, ranks,
            (long long)(lower ? lower : micro_batch));
    }
    p->accumulation = total / micro_batch;
}

static void plan_steps(Plan *p) {
    const Settings *s = &p->settings;
    if (s->schedule != SCHEDULE_WSD && options_was_set(p->options, p->num_options, "decay-fraction")) {
        die("--decay-fraction is for --schedule wsd; the others decay from the end of warm-up on");
    }
    int64_t total = samples_per_step(p) * p->T;
    int64_t epoch = p->train.num_windows / samples_per_step(p);
    p->total_steps = epoch > 0 ? epoch : 1;
    bool limited = s->max_steps || s->max_tokens || s->max_minutes > 0;
    if (limited) p->total_steps = INT64_MAX;
    if (s->max_steps) p->total_steps = s->max_steps;
    if (s->max_tokens) {
        int64_t steps = (s->max_tokens + total - 1) / total;
        p->total_steps = steps < p->total_steps ? steps : p->total_steps;
    }
    if (p->total_steps == INT64_MAX && p->train.num_phases > 1) {
        die("--train-data has phases, which begin at a percentage of the run's steps: give --max-steps or "
            "--max-tokens");
    }
    blend_place(&p->train, p->total_steps, samples_per_step(p));
}

// Each rank of a machine sees a GPU of its own alone. One that has none doesn't take the CPU by
// itself: where a driver is, the others have theirs.
static const Backend *plan_gpu(Plan *p) {
    const Settings *s = &p->settings;
    Error error;
    int local_rank;
    char device[128];
    if (!comm_local_rank(&local_rank, &error) ||
        !comm_own_gpu(device, sizeof(device), getenv("CUDA_VISIBLE_DEVICES"), local_rank, &error)) {
        bad_input(&error);
    }
    if (device[0] && setenv("CUDA_VISIBLE_DEVICES", device, 1) != 0) die("can't set CUDA_VISIBLE_DEVICES");
    const Backend *cuda = backend_cuda((MxGemm)s->mx_gemm, &p->no_gpu);
    if (!cuda && s->mx_gemm == MX_GEMM_NATIVE) die("--mx-gemm native: %s; use --mx-gemm auto", p->no_gpu.message);
    if (!cuda && local_rank >= 0 && strcmp(s->device, "auto") == 0 && backend_cuda_has_driver()) {
        die("rank %d (from 0) of this machine has no GPU: %s; start as many ranks as there are GPUs, or all with "
            "--device cpu",
            local_rank, p->no_gpu.message);
    }
    return cuda;
}

static void plan_backend(Plan *p) {
    const Settings *s = &p->settings;
    if (s->threads) omp_set_num_threads((int)s->threads);
    p->backend = backend_cpu();
    p->card = planner_device(s->device);
    if (p->card && !s->dry_run) {
        die("--device %s is a machine to plan for, with --dry-run; to train take --device auto, cpu or cuda",
            s->device);
    }
    if (s->link_bandwidth > 0 && !s->dry_run) die("--link-bandwidth is for --dry-run: a run measures what it takes");
    if (p->card) p->backend = planner_backend(p->card);
    if (s->mx_gemm == MX_GEMM_NATIVE && (p->card ? !p->card->native_mx : strcmp(s->device, "cpu") == 0)) {
        die("--mx-gemm native: --device %s can't multiply MXFP8 natively; use --mx-gemm auto", s->device);
    }
    if (p->card || strcmp(s->device, "cpu") == 0) return;
    const Backend *cuda = plan_gpu(p);
    if (cuda) p->backend = cuda;
    if (p->backend == backend_cpu() && strcmp(s->device, "cuda") == 0) {
        die("--device cuda: %s; or use --device cpu", p->no_gpu.message);
    }
}

// Where nobody has said how many threads a rank takes, those of a machine share its cores. A
// launcher that binds ranks to cores has said it.
static void share_cores(const Plan *p) {
    int cores = omp_get_num_procs(), ranks = comm_local_size(p->comm);
    if (p->settings.threads || getenv("OMP_NUM_THREADS") || cores < sysconf(_SC_NPROCESSORS_ONLN)) return;
    omp_set_num_threads(cores > ranks ? cores / ranks : 1);
}

// The ranks of this run. Only the first one prints and writes.
static void plan_ranks(Plan *p) {
    const Settings *s = &p->settings;
    Error error;
    CommOptions options = {.world_size = s->dry_run ? 0 : (int)s->world_size,
                           .cuda = p->backend != backend_cpu(),
                           .file = s->comm_file,
                           .timeout_seconds = s->comm_timeout};
    p->comm = s->generate || s->device_info || p->card ? comm_single() : comm_create(&options, &error);
    if (!p->comm) bad_input(&error);
    p->sharding = (Sharding){.comm = p->comm,
                             .zero = (int)s->zero,
                             .gather = (Gather)s->gather,
                             .reduce = s->reduce ? FORMAT_BF16 : FORMAT_FP32};
    if (p->comm->rank > 0 && !freopen("/dev/null", "w", stdout)) die("can't open /dev/null: %s", strerror(errno));
    if (p->comm->size > 1) share_cores(p);
    if (s->dry_run && s->world_size > 1) {
        static Comm planned;
        planned.name = p->backend == backend_cpu() ? "mpi" : "nccl";
        planned.size = (int)s->world_size;
        p->sharding.comm = &planned;
    }
}

// What a device multiplies natively is compared with the emulation before it is trusted, and before
// memory is planned, since operands have other forms for the emulation. Ranks are all native or
// none.
static void check_native(Plan *p) {
    if (p->card) return;
    bool agrees = p->backend->self_check(p->native_check, sizeof(p->native_check));
    double wrong = !agrees;
    comm_max_doubles(p->comm, &wrong, 1);
    if (wrong == 0) return;
    if (agrees) {
        snprintf(p->native_check, sizeof(p->native_check),
                 "the self-check failed on another rank; this run does without native MXFP8 GEMMs");
    }
    if (p->settings.mx_gemm == MX_GEMM_NATIVE) {
        die("--mx-gemm native can't be trusted: %s; use --mx-gemm auto", p->native_check);
    }
    fprintf(stderr, "train_gpt_mxfp8: native MXFP8 can't be trusted and isn't used: %s\n", p->native_check);
    backend_cuda(MX_GEMM_EMULATED, &p->no_gpu);
}

// Masters and moments stay where they are when the recipe is switched.
static void check_switches(const Plan *p) {
    for (int i = phase_before(&p->recipes, p->state.step) + 1; i < p->recipes.count; i++) {
        const Recipe *before = &p->recipes.phases[i - 1].recipe, *after = &p->recipes.phases[i].recipe;
        double differ = !gpt_shards_alike(p->config, before, after, p->backend, &p->sharding);
        comm_max_doubles(p->comm, &differ, 1);
        if (differ > 0) {
            die("--recipe-at %s: ranks would have to exchange masters and moments, which recipe %s shards in another "
                "way than %s does; use --zero 0",
                p->settings.recipe_at.items[i - 1], after->name, before->name);
        }
    }
}

static void check_gradient_bias(const Plan *p) {
    if (!p->settings.gradient_bias_every) return;
    if (p->sharding.comm->size > 1)
        die("--gradient-bias-every is for one rank: its exact gradient isn't spread over several");
    if (p->card) die("--gradient-bias-every isn't planned for cards: it is for comparisons, not for training");
}

// FNV-1a of the first samples' tokens: what files of one size, but not of one content, differ in.
static uint64_t hash_samples(const DataLoader *loader) {
    enum { SAMPLES = 64 };
    Error error;
    size_t bytes = (size_t)loader->seq_len * sizeof(int32_t);
    int32_t *tokens = allocate(bytes), *targets = allocate(bytes);
    uint64_t hash = 0xCBF29CE484222325u;
    for (int64_t sample = 0; sample < SAMPLES && sample < loader->num_windows; sample++) {
        if (!dataloader_batch(loader, sample, 1, tokens, targets, &error)) bad_input(&error);
        for (int64_t t = 0; t < loader->seq_len; t++) {
            hash = (hash ^ (uint32_t)tokens[t]) * 0x100000001B3u;
        }
    }
    free(tokens);
    free(targets);
    return hash;
}

// Ranks that would compute something else are refused.
static void check_same_run(Plan *p) {
    if (p->comm->size == 1) return;
    uint64_t train_hash = 0;
    for (int i = 0; i < p->train.num_sources; i++) {
        train_hash = 31 * train_hash + hash_samples(&p->train.sources[i].loader);
    }
    char text[512], *command = options_command_line(p->options, p->num_options, "options");
    comm_check_same(p->comm, "options", command);
    free(command);
    snprintf(text, sizeof(text), "built %s %s", __DATE__, __TIME__);
    comm_check_same(p->comm, "program", text);
    p->backend->describe(text, sizeof(text));
    comm_check_same(p->comm, "device and libraries", text);
    comm_check_same(p->comm, "communication library", p->comm->description);
    snprintf(text, sizeof(text), "%lld tokens to train on (hash %016llx), %lld to validate on (hash %016llx)",
             (long long)p->train.num_tokens, (unsigned long long)train_hash,
             (long long)(p->has_val ? p->val.num_tokens : 0),
             (unsigned long long)(p->has_val ? hash_samples(&p->val) : 0));
    comm_check_same(p->comm, "data", text);
    snprintf(text, sizeof(text), "step %lld of %.400s", (long long)p->state.step,
             p->checkpoint ? p->checkpoint : "a new run");
    comm_check_same(p->comm, "checkpoint", text);
}

// A resumed run goes on in the data where it stopped: whatever decides what comes next must be as
// it was.
static void check_same_data(const Plan *p) {
    if (!p->checkpoint) return;
    const struct {
        const char *what;
        int64_t then, now;
    } values[] = {{"--train-data's number of tokens", p->state.train_tokens, p->train.num_tokens},
                  {"--seq-len", p->state.seq_len, p->T},
                  {"--seed", p->state.seed, p->settings.seed}};
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        if (values[i].then == values[i].now) continue;
        die("%s was %lld when %s was written and is %lld now: the run would see other data; put it back, or start a "
            "new run with --init-from",
            values[i].what, (long long)values[i].then, p->checkpoint, (long long)values[i].now);
    }
}

// The same of a blend, of the phases so far.
static void check_same_blend(const Plan *p) {
    if (!p->checkpoint) return;
    if (p->train.num_phases > 1 && p->state.next_sample != p->state.step * samples_per_step(p)) {
        die("--train-data has phases, which begin where the batch size puts them, and %s wasn't made with %lld tokens "
            "a step: give the --total-batch-size of that run, or start a new run with --init-from",
            p->checkpoint, (long long)(samples_per_step(p) * p->T));
    }
    if (p->state.data_fingerprint == blend_fingerprint(&p->train, p->state.next_sample)) return;
    die("--train-data's weights or phases before step %lld aren't those that %s was made with (phases move with the "
        "number of steps): put them back, or start a new run with --init-from",
        (long long)p->state.step, p->checkpoint);
}

static void open_train_data(Plan *p) {
    Error error;
    if (!blend_open(&p->train, p->T, (uint64_t)p->settings.seed, p->config.vocab_size, &error)) bad_input(&error);
}

static void plan_data(Plan *p) {
    const Settings *s = &p->settings;
    Error error;
    uint64_t seed = (uint64_t)s->seed;
    if (!s->train_data)
        die("--train-data is missing: name the token files to train on (data/prepare.py makes them; see --help)");
    open_train_data(p);
    if (s->val_data) {
        if (!dataloader_open(&p->val, s->val_data, p->T, seed, false, p->config.vocab_size, &error)) bad_input(&error);
        p->has_val = true;
    }
    check_same_data(p);
    p->state.train_tokens = p->train.num_tokens;
    p->state.seq_len = p->T;
    p->state.seed = s->seed;
}

// A checkpoint's state, and its run's values of those options that the command line didn't set. A
// --recipe that was set comes without the adjustments of the run's, and replaces what that run's
// --recipe-at had changed until then.
static void load_state(Plan *p, TrainerState *state, const char *checkpoint, Option *options, int count) {
    bool new_recipe = options_was_set(p->options, p->num_options, "recipe"), was_set[MAX_OPTIONS];
    StringList *later = &p->settings.recipe_at;
    bool new_later = options_was_set(p->options, p->num_options, "recipe-at");
    Error error;
    for (int i = 0; i < count; i++) {
        was_set[i] = options[i].was_set;
        bool is_adjustment = strcmp(options[i].group, "Recipe") == 0 && options[i].value != later;
        options[i].was_set = was_set[i] || (new_recipe && is_adjustment);
    }
    if (!checkpoint_load_state(state, checkpoint, options, count, &error)) bad_input(&error);
    for (int i = 0; i < count; i++) {
        options[i].was_set = was_set[i];
    }
    int kept = 0;
    for (int i = 0; i < later->count; i++) {
        bool is_past = strtoll(later->items[i], NULL, 10) <= state->step;
        if (!new_recipe || new_later || !is_past) later->items[kept++] = later->items[i];
    }
    later->count = kept;
}

// A checkpoint of ours is sampled from under the recipe it was trained with, unless the command
// line says otherwise.
static void plan_generate(Plan *p) {
    TrainerState state;
    char *path = format_string("%s/trainer_state.json", p->settings.generate);
    int first = 0, count = 0;
    while (strcmp(p->options[first].group, "Recipe") != 0) {
        first++;
    }
    while (strcmp(p->options[first + count].group, "Recipe") == 0) {
        count++;
    }
    if (path_exists(path)) {
        load_state(p, &state, p->settings.generate, p->options + first, count);
        p->state.step = state.step;
    }
    free(path);
}

// The checkpoint that --generate or --init-from names: a directory that holds one, or a run, whose
// newest it is.
static const char *find_checkpoint(const char *directory) {
    Error error;
    if (!directory) return NULL;
    if (!path_exists(directory)) {
        die("%s: no such directory; name a checkpoint, such as runs/NAME/step_000100, or a run", directory);
    }
    char *latest = format_string("%s/latest", directory);
    bool is_run = path_exists(latest);
    free(latest);
    if (!is_run) return directory;
    const char *newest = checkpoint_latest(directory, &error);
    if (!newest) bad_input(&error);
    return newest;
}

static void plan_resume(Plan *p) {
    Settings *s = &p->settings;
    Error error;
    s->generate = find_checkpoint(s->generate);
    s->init_from = find_checkpoint(s->init_from);
    p->state.best_val_loss = NAN;
    p->state.evaluated = -1;
    if (s->resume && !s->out_dir) die("--resume needs --out-dir, the directory of the run to go on with");
    if (s->resume && s->init_from) die("--resume and --init-from exclude each other: a resumed run has its weights");
    if (s->generate) plan_generate(p);
    if (!s->resume) return;
    p->checkpoint = checkpoint_latest(s->out_dir, &error);
    if (p->checkpoint && !s->dry_run && comm_launch_rank() == 0) {
        // Another run may have replaced it before this one had the directory for itself.
        free(p->checkpoint);
        if (!logger_open(&p->logger, s->out_dir, true, &error)) bad_input(&error);
        p->checkpoint = checkpoint_latest(s->out_dir, &error);
    }
    if (!p->checkpoint) bad_input(&error);
    load_state(p, &p->state, p->checkpoint, p->options, p->num_options);
}

static size_t total_bytes(const size_t by_kind[NUM_MEMORY_KINDS]) {
    size_t total = 0;
    for (int kind = 0; kind < NUM_MEMORY_KINDS; kind++) {
        total = memory_add(total, by_kind[kind]);
    }
    return total;
}

// The run's bytes with micro-batches of B: the largest of the recipes that it still has before it.
static void plan_memory(size_t by_kind[NUM_MEMORY_KINDS], const Plan *p, int64_t B) {
    size_t of_recipe[NUM_MEMORY_KINDS];
    gpt_memory(by_kind, p->config, &p->recipe, p->backend, B, p->T, true, &p->sharding);
    for (int i = recipe_schedule_at(&p->recipes, p->state.step); i < p->recipes.count; i++) {
        gpt_memory(of_recipe, p->config, &p->recipes.phases[i].recipe, p->backend, B, p->T, true, &p->sharding);
        if (total_bytes(of_recipe) > total_bytes(by_kind)) memcpy(by_kind, of_recipe, sizeof(of_recipe));
    }
    if (p->settings.gradient_bias_every) by_kind[MEMORY_EXACT] = gpt_exact_memory(p->config, p->backend, B, p->T);
}

// Whether the recipe changes in this run's steps.
static bool switches_recipe(const Plan *p) { return phase_before(&p->recipes, p->state.step) + 1 < p->recipes.count; }

static void print_memory(const Plan *p) {
    size_t by_kind[NUM_MEMORY_KINDS];
    char text[32];
    plan_memory(by_kind, p, p->B);
    printf(p->sharding.comm->size > 1 ? "memory   of each of %d ranks\n" : "memory\n", p->sharding.comm->size);
    for (int kind = 0; kind < NUM_MEMORY_KINDS; kind++) {
        if (by_kind[kind])
            printf("  %-28s %10s\n", memory_kind_name((MemoryKind)kind), human_bytes(text, (double)by_kind[kind]));
    }
    printf("  %-28s %10s", "total", human_bytes(text, (double)total_bytes(by_kind)));
    printf(" of %s free\n", human_bytes(text, fmax(0, p->backend->available_memory())));
    double tokens = (double)(p->B * p->T);
    printf("  kept for backward per token and layer: %.0f bytes (%.2f per channel)\n",
           (double)by_kind[MEMORY_KEPT] / tokens / (double)p->config.layers,
           (double)by_kind[MEMORY_KEPT] / tokens / (double)(p->config.layers * p->config.channels));
}

// Refuses a plan that this machine's memory can't hold, and says what it could.
static void check_memory(const Plan *p) {
    size_t by_kind[NUM_MEMORY_KINDS];
    char needed[32], present[32];
    // Beside the plan: a parameter twice while weights are loaded and saved.
    double largest = (double)(p->config.vocab_size * p->config.channels);
    for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
        LinearShape shape = gpt_linear_shape(&p->config, i);
        largest = fmax(largest, (double)(shape.N * shape.K));
    }
    double staging = 2 * sizeof(float) * largest;
    plan_memory(by_kind, p, p->B);
    // And masters and moments once more, on the host, while the recipe is switched.
    if (switches_recipe(p) && p->backend == backend_cpu()) {
        staging += (double)by_kind[MEMORY_MASTERS] + (double)by_kind[MEMORY_MOMENTS];
    }
    double available = fmax(0, p->backend->available_memory() - staging);
    double total = (double)total_bytes(by_kind);
    if (total <= available) return;
    int64_t B = p->B;
    while (B > 1 && (double)total_bytes(by_kind) > available) {
        do {
            B--;
        } while (p->B * p->accumulation % B != 0);
        plan_memory(by_kind, p, B);
    }
    human_bytes(needed, total);
    human_bytes(present, available);
    if ((double)total_bytes(by_kind) <= available) {
        die("this run needs %s of memory and %s are free: --batch-size %lld would fit (--total-batch-size %lld keeps "
            "the batch of a step)",
            needed, present, (long long)B, (long long)(samples_per_step(p) * p->T));
    }
    die("this run needs %s of memory and %s are free: even --batch-size 1 doesn't fit; take a smaller model or "
        "--seq-len",
        needed, present);
}

static void print_header(const Plan *p) {
    char cpu[128], device[512], count[32];
    const GPTConfig *c = &p->config;
    system_cpu_name(cpu, sizeof(cpu));
    p->backend->describe(device, sizeof(device));
    printf("device   %s%s%s\n", p->card ? "" : cpu, p->card ? "" : ": ", device);
    if (p->no_gpu.message[0]) printf("gpu      none: %s\n", p->no_gpu.message);
    if (p->native_check[0]) printf("mx gemm  %s\n", p->native_check);
    printf("model    %.1fM parameters: %lld layers, %lld heads, %lld channels, %lld positions, %lld tokens in the "
           "vocabulary\n",
           (double)gpt_count_parameters(c).all / 1e6, (long long)c->layers, (long long)c->heads, (long long)c->channels,
           (long long)c->max_seq_len, (long long)c->vocab_size);
    char more[256];
    gpt_describe(more, sizeof(more), c);
    if (more[0]) printf("         %s\n", more);
    printf("         %s FLOPs per token at sequence length %lld\n", human_count(count, gpt_flops_per_token(c, p->T)),
           (long long)p->T);
    recipe_print(&p->recipe, stdout);
    for (int i = phase_before(&p->recipes, p->state.step) + 1; i < p->recipes.count; i++) {
        printf("from step %lld on\n", (long long)p->recipes.phases[i].first_step);
        recipe_print(&p->recipes.phases[i].recipe, stdout);
    }
    print_memory(p);
}

// What each rank sends in a step, with the other ways to gather beside the one that is taken.
static WireBytes print_wire(const Plan *p) {
    WireBytes bytes = gpt_wire_bytes(p->config, &p->recipe, p->backend, &p->sharding, p->accumulation);
    char text[4][32];
    printf("wire     a rank sends %s of gradients (%s) a step", human_bytes(text[0], bytes.gradients),
           REDUCES[p->sharding.reduce == FORMAT_BF16]);
    if (p->sharding.zero > 0) {
        const char *now = human_bytes(text[0], bytes.weights[p->sharding.gather]);
        printf(" and %s of weights (%s;", now, GATHERS[p->sharding.gather]);
        for (int gather = 0; gather <= GATHER_FP32; gather++) {
            printf(" %s %s%s", GATHERS[gather], human_bytes(text[1 + gather], bytes.weights[gather]),
                   gather < GATHER_FP32 ? "," : ")");
        }
    }
    printf("\n");
    return bytes;
}

// What can be known of a run of these ranks on machines that may not be here.
static void print_plan(const Plan *p) {
    double link = 1e9 * p->settings.link_bandwidth;
    int ranks = p->sharding.comm->size;
    size_t by_kind[NUM_MEMORY_KINDS];
    char text[32];
    plan_memory(by_kind, p, p->B);
    double spare = p->backend->available_memory() - (double)total_bytes(by_kind);
    printf("  it %s: %s %s\n", spare >= 0 ? "fits" : "doesn't fit", human_bytes(text, fabs(spare)),
           spare >= 0 ? "are left" : "are missing; take a smaller --batch-size or --seq-len, or more ranks");
    printf("run      %s tokens a step (%lld sequences of %lld, %lld micro-batch%s), on each of %d rank%s\n",
           human_count(text, (double)(samples_per_step(p) * p->T)), (long long)p->B, (long long)p->T,
           (long long)p->accumulation, p->accumulation == 1 ? "" : "es", ranks, ranks == 1 ? "" : "s");
    WireBytes wire = {0};
    if (ranks > 1) wire = print_wire(p);
    if (!p->card && p->backend != backend_cpu()) {
        printf("plan     for the time of a step say with --device which card, such as h100\n");
        return;
    }
    if (ranks > 1 && link == 0) {
        printf("plan     for the time of a step say with --link-bandwidth how many GB/s a rank can send\n");
        return;
    }
    PlannedDevice device = p->card ? *p->card : planner_measure(p->backend, p->gemm_flops / p->comm->size);
    PlannedRun run = {.config = p->config,
                      .recipe = &p->recipe,
                      .sharding = &p->sharding,
                      .B = p->B,
                      .T = p->T,
                      .accumulation = p->accumulation,
                      .link_bandwidth = link,
                      .wire = wire};
    PlannedStep step = planner_step(&device, &run);
    planner_print_step(&device, &step, ranks, p->settings.max_tokens, stdout);
}

static void print_blend(const Plan *p) {
    bool is_known = p->total_steps != INT64_MAX;
    blend_print(&p->train, is_known ? p->total_steps * samples_per_step(p) : 0, stdout);
}

static void print_run(const Plan *p) {
    char tokens[32], step[32];
    printf("data     %s tokens to train on in %d file%s, %lld windows of %lld",
           human_count(tokens, (double)p->train.num_tokens), p->train.num_files, p->train.num_files == 1 ? "" : "s",
           (long long)p->train.num_windows, (long long)p->T);
    if (p->has_val) printf("; %s to validate on", human_count(tokens, (double)p->val.num_tokens));
    printf("\nrun      %s tokens a step (%lld sequences of %lld, %lld micro-batch%s), ",
           human_count(step, (double)(samples_per_step(p) * p->T)), (long long)p->B, (long long)p->T,
           (long long)p->accumulation, p->accumulation == 1 ? "" : "es");
    if (p->comm->size > 1) printf("on each of %d ranks, ", p->comm->size);
    if (p->total_steps == INT64_MAX) {
        printf(
            "for %g minutes; the learning rate stays at its peak, since a schedule needs --max-steps or --max-tokens\n",
            p->settings.max_minutes);
    } else {
        double samples = (double)p->total_steps * (double)samples_per_step(p);
        printf("%lld steps, %.3g epochs\n", (long long)p->total_steps, samples / (double)p->train.num_windows);
    }
    if (!p->train.is_pattern) print_blend(p);
    printf(
        "speed    this machine's %s GEMM reaches %.0f GFLOP/s; \"%% GEMM\" is the model's FLOP/s as a fraction of it\n",
        format_name(p->recipe.activation_dtype), p->gemm_flops / 1e9);
    if (p->comm->size > 1) {
        static const char *const ZERO[] = {"each has everything", "masters and moments are sharded",
                                           "masters, moments and gradients are sharded"};
        printf("ranks    %s; %s (--zero %d)\n", p->comm->description, ZERO[p->sharding.zero], p->sharding.zero);
        print_wire(p);
    }
    printf("output   %s\n", p->settings.out_dir);
    fflush(stdout);
}

// -------------------------------------------------------------------------------------------------
// Samples of text

// Bytes of `text` that don't end within a UTF-8 character: a token may hold part of one.
static size_t whole_characters(const char *text, size_t bytes) {
    for (size_t back = 1; back <= 3 && back <= bytes; back++) {
        unsigned char byte = (unsigned char)text[bytes - back];
        if ((byte & 0xC0) == 0x80) continue;
        size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
        return length > back ? bytes - back : bytes;
    }
    return bytes;
}

static volatile sig_atomic_t stop_signal; // the last one; 0: none
static volatile sig_atomic_t stop_signals;
static void on_signal(int signal_number) {
    stop_signal = signal_number;
    stop_signals++;
}

// Draws --sample-tokens tokens after the prompt, or fewer where a signal comes; with `stream`,
// prints as they come. Returns prompt and continuation, to be freed.
static char *sample_text(Plan *p, GPT *model, uint64_t step, FILE *stream, size_t *bytes) {
    const Settings *s = &p->settings;
    int64_t V = p->config.vocab_size, T = p->T, length = p->num_prompt_tokens < T ? p->num_prompt_tokens : T;
    int32_t *tokens = allocate((size_t)T * sizeof(int32_t));
    float *logits = allocate((size_t)V * sizeof(float));
    enum { LENGTH_STEP = 64, LONGEST_TOKEN = 255 };
    char *text = allocate(strlen(s->prompt) + (size_t)s->sample_tokens * LONGEST_TOKEN + 1);
    size_t printed = 0;
    *bytes = strlen(s->prompt);
    memcpy(text, s->prompt, *bytes);
    memcpy(tokens, p->prompt + p->num_prompt_tokens - length, (size_t)length * sizeof(int32_t));
    for (int64_t i = 0; i < s->sample_tokens && !stop_signal; i++) {
        // In steps, so that GEMMs have few shapes; tokens after `length` can't be seen by those
        // before.
        int64_t forwarded = (length + LENGTH_STEP - 1) / LENGTH_STEP * LENGTH_STEP;
        gpt_logits(model, logits, tokens, 1, forwarded < T ? forwarded : T, length - 1, 1);
        float uniform = random_uniform((uint64_t)s->seed, SAMPLE_STREAMS + step, (uint64_t)i);
        int token = sample_token(logits, (int)V, (float)s->temperature, (int)s->top_k, uniform);
        if (token < 0 || token == p->tokenizer.end_of_text) break;
        if (length == T) { // the second half is the context of what follows
            length = T / 2;
            memmove(tokens, tokens + T - length, (size_t)length * sizeof(int32_t));
        }
        tokens[length++] = token;
        int token_bytes;
        const char *piece = tokenizer_decode(&p->tokenizer, token, &token_bytes);
        if (token_bytes) memcpy(text + *bytes, piece, (size_t)token_bytes);
        *bytes += (size_t)token_bytes;
        size_t whole = whole_characters(text, *bytes);
        if (stream && whole > printed) {
            token_print_safe(stream, text + printed, whole - printed);
            fflush(stream);
            printed = whole;
        }
    }
    if (stream) token_print_safe(stream, text + printed, *bytes - printed);
    free(tokens);
    free(logits);
    return text;
}

static int generate(Plan *p) {
    Error error;
    size_t bytes;
    GPT model;
    gpt_create(&model, p->config, &p->recipe, p->backend, 1, p->T, false, NULL);
    if (!checkpoint_load_weights(&model, p->settings.generate, &error)) bad_input(&error);
    gpt_refresh(&model);
    free(sample_text(p, &model, 0, stdout, &bytes));
    putchar('\n');
    gpt_free(&model);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Training

typedef struct {
    Plan *plan;
    GPT model;
    GPT exact;      // with --gradient-bias-every: for exact gradients
    bool with_bias; // in this step
    GradientBiases biases;
    int recipe; // the phase of the plan's schedule that the model is made for
    Logger *logger;
    int32_t *tokens, *targets; // one micro-batch
    QuantStats *quant_stats;   // of every layer and operand
    double start;              // of training, less what was spent before a resume
    double step_seconds;       // running mean
    int64_t profiled_steps;    // with --profile: all of this process but its first, which
    double profiled_seconds;   // took so long
    bool failed;               // a sentence on stderr has said why
    int64_t first_step;        // that this process takes
    int64_t saved_step;        // of the newest checkpoint of this process, or resumed from; -1: none
    int64_t log_position;      // before an evaluation that was cut short, which a resumed run logs anew; -1: none was
    int stop_signal;           // as stop_signal, but all ranks agree on it: between steps
} Run;

// A log that can't be written to or data that can't be used ends the run, but not before its
// weights are saved.
static void check(Run *run, bool ok, const Error *error) {
    if (ok || run->failed) return;
    run->failed = true;
    fflush(stdout);
    fprintf(stderr, "train_gpt_mxfp8: %s\n", error->message);
}

// Ranks decide together: a signal or a failure of one is one of all, from the next step on.
static void agree(Run *run) {
    Comm *comm = run->plan->comm;
    double values[] = {run->failed, stop_signal};
    comm_max_doubles(comm, values, 2);
    run->failed = values[0] > 0;
    run->stop_signal = (int)values[1];
}

// Alone a rank stops at once; among others where they agree to.
static bool stops_now(const Run *run) { return run->plan->comm->size > 1 ? run->stop_signal != 0 : stop_signal != 0; }

static bool load_batch(Run *run, const DataLoader *loader, int64_t first_sample, int64_t count) {
    Error error;
    check(run, dataloader_batch(loader, first_sample, count, run->tokens, run->targets, &error), &error);
    return !run->failed;
}

static bool load_train_batch(Run *run, int64_t first_sample) {
    const Plan *p = run->plan;
    Error error;
    check(run, blend_batch(&p->train, first_sample, p->B, run->tokens, run->targets, &error), &error);
    return !run->failed;
}

static void validate(Run *run) {
    const Plan *p = run->plan;
    Error error;
    if (!p->has_val) return;
    double start = seconds_now(), sum = 0;
    int64_t windows = p->settings.val_steps * p->B;
    if (windows == 0 || windows > p->val.num_windows) windows = p->val.num_windows;
    for (int64_t first = p->comm->rank * p->B; first < windows; first += p->comm->size * p->B) {
        int64_t count = windows - first < p->B ? windows - first : p->B;
        if (stops_now(run) || !load_batch(run, &p->val, first, count)) break;
        sum += gpt_loss(&run->model, run->tokens, run->targets, count, p->T) * (double)count;
    }
    agree(run);
    if (stops_now(run) || run->failed) return;
    comm_sum_doubles(p->comm, &sum, 1);
    double loss = sum / (double)windows;
    TrainerState *state = &run->plan->state;
    if (isfinite(loss) && !(loss >= state->best_val_loss)) state->best_val_loss = loss;
    check(run, logger_val(run->logger, state->step, loss, seconds_now() - start, &error), &error);
}

static bool due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

static void write_sample(Run *run) {
    Plan *p = run->plan;
    Error error;
    size_t bytes;
    if (p->comm->rank > 0) return;
    char *text = sample_text(p, &run->model, (uint64_t)p->state.step, NULL, &bytes);
    if (!stop_signal) check(run, logger_sample(run->logger, p->state.step, text, bytes, &error), &error);
    free(text);
}

// Validates and samples where it is due at this step, or at the run's end, and hasn't been done
// before a resume. False where a signal or a failure cut it short: a resumed run does all of it
// again.
static bool evaluate(Run *run, bool at_end) {
    const Settings *s = &run->plan->settings;
    TrainerState *state = &run->plan->state;
    if (state->evaluated == state->step) return true;
    int64_t log_position = logger_position(run->logger);
    if (at_end || due(s->val_every, state->step)) validate(run);
    if (at_end ? s->sample_every > 0 : state->step > 0 && due(s->sample_every, state->step)) write_sample(run);
    agree(run);
    if (run->stop_signal || run->failed) {
        run->log_position = log_position;
        return false;
    }
    state->evaluated = state->step;
    return true;
}

static bool write_checkpoint(Run *run, char **path, Error *error) {
    Plan *p = run->plan;
    p->state.log_position = run->log_position >= 0 ? run->log_position : logger_position(run->logger);
    p->state.seconds = seconds_now() - run->start;
    p->state.data_fingerprint = blend_fingerprint(&p->train, p->state.next_sample);
    // Older ones don't go for weights that the next steps may prove to be useless.
    int64_t keep = p->state.nonfinite_in_a_row > 0 ? 0 : p->settings.keep_checkpoints;
    if (!checkpoint_save(path, p->settings.out_dir, &run->model, &p->state, p->options, p->num_options,
                         p->has_tokenizer ? &p->tokenizer : NULL, keep, error)) {
        return false;
    }
    run->saved_step = p->state.step;
    return true;
}

static void save_checkpoint(Run *run) {
    const Plan *p = run->plan;
    Error error;
    char *path = NULL;
    double start = seconds_now();
    double is_bad = !checkpoint_is_finite(&run->model);
    comm_max_doubles(p->comm, &is_bad, 1);
    if (is_bad > 0) {
        fprintf(stderr,
                "train_gpt_mxfp8: the weights at step %lld aren't finite, and no checkpoint is written; resume from "
                "the last one in %s, if there is one, with a lower --learning-rate\n",
                (long long)p->state.step, p->settings.out_dir);
        exit(EXIT_NOT_FINITE);
    }
    if (!write_checkpoint(run, &path, &error)) bad_input(&error);
    check(run, logger_checkpoint(run->logger, p->state.step, path, seconds_now() - start, &error), &error);
    free(path);
}

// Of the micro-batch that is loaded.
static void add_exact_gradients(Run *run, double scale) {
    const Plan *p = run->plan;
    gpt_use_workspace(&run->exact);
    gpt_loss_and_gradients(&run->exact, run->tokens, run->targets, p->B, p->T, scale);
    gpt_use_workspace(&run->model);
}

static void log_gradient_bias(Run *run) {
    Error error;
    gpt_take_loss(&run->exact);
    gradient_bias_measure(&run->biases, &run->model, &run->exact);
    JsonWriter *w = logger_begin_event(run->logger, "gradient_bias");
    json_write_int64(w, "step", run->plan->state.step);
    gradient_bias_write(&run->biases, run->plan->config.layers, w);
    check(run, logger_end_event(run->logger, &error), &error);
}

// Mean loss and summed gradients of a step's micro-batches. False where the data can't be used, or
// a second signal gives the step up.
static bool forward_backward(Run *run, double *loss) {
    const Plan *p = run->plan;
    gpt_zero_gradients(&run->model);
    if (run->with_bias) gpt_zero_gradients(&run->exact);
    const Comm *comm = p->comm;
    double micro_batches = (double)(p->accumulation * comm->size), given_up = 0;
    for (int64_t micro = 0; micro < p->accumulation; micro++) {
        int64_t first = (micro * comm->size + comm->rank) * p->B;
        if (!p->settings.overfit_one_batch) first += p->state.next_sample;
        bool is_last = micro + 1 == p->accumulation;
        if (given_up == 0) given_up = stop_signals > 1 || !load_train_batch(run, first);
        // Where ranks meet in the backward pass they must all come.
        if (is_last || p->sharding.zero == 2) comm_max_doubles(p->comm, &given_up, 1);
        if (given_up > 0) continue;
        run->model.params.is_last_micro_batch = is_last;
        gpt_loss_and_gradients(&run->model, run->tokens, run->targets, p->B, p->T, 1 / micro_batches);
        if (run->with_bias) add_exact_gradients(run, 1 / micro_batches);
    }
    if (given_up > 0) return false;
    param_list_reduce(&run->model.params);
    *loss = gpt_take_loss(&run->model);
    comm_sum_doubles(p->comm, loss, 1);
    *loss /= micro_batches;
    return true;
}

// Why a step must not be applied, or NULL.
static const char *reason_to_skip(const Plan *p, double loss, double grad_norm) {
    if (!isfinite(loss)) return "the loss isn't finite";
    if (!isfinite(grad_norm)) return "the gradient norm isn't finite";
    double z = p->settings.skip_outliers;
    if (z > 0 && outlier_zscore(&p->state.losses, loss) > z) return "the loss is an outlier";
    if (z > 0 && outlier_zscore(&p->state.grad_norms, grad_norm) > z) return "the gradient norm is an outlier";
    return NULL;
}

static double learning_rate_of_step(const Plan *p) {
    const Settings *s = &p->settings;
    Schedule schedule = {.kind = p->total_steps == INT64_MAX ? SCHEDULE_CONSTANT : (ScheduleKind)s->schedule,
                         .learning_rate = s->learning_rate,
                         .warmup_steps = s->warmup_steps,
                         .total_steps = p->total_steps,
                         .final_lr_fraction = s->final_lr_fraction,
                         .decay_fraction = s->decay_fraction};
    return learning_rate_at(&schedule, p->state.step);
}

static void train_step(Run *run) {
    Plan *p = run->plan;
    const Settings *s = &p->settings;
    TrainerState *state = &p->state;
    bool profiled = s->profile && state->step > run->first_step;
    profile_count(profiled);
    double start = seconds_now();
    int64_t sent_before = p->comm->bytes_sent;
    bool with_stats = s->quant_stats_every && state->step % s->quant_stats_every == 0;
    if (with_stats) quant_stats_collect(&run->model, run->quant_stats);

    run->with_bias = due(s->gradient_bias_every, state->step);

    double loss;
    if (!forward_backward(run, &loss)) return;
    if (run->with_bias) log_gradient_bias(run);
    double grad_norm = optimizer_gradient_norm(&run->model.params, p->backend);
    double learning_rate = learning_rate_of_step(p);
    const char *skipped = reason_to_skip(p, loss, grad_norm);
    if (!skipped) {
        OptimizerOptions options = {.learning_rate = learning_rate,
                                    .beta1 = s->beta1,
                                    .beta2 = s->beta2,
                                    .eps = s->eps,
                                    .weight_decay = s->weight_decay,
                                    .grad_clip = s->grad_clip,
                                    .step = state->step - state->skipped + 1};
        optimizer_step(&run->model.params, p->backend, options, grad_norm);
    }
    // Skipped ones too: a lasting change of level is then an outlier for a while, not for ever.
    outlier_add(&state->losses, loss);
    outlier_add(&state->grad_norms, grad_norm);
    bool finite = isfinite(loss) && isfinite(grad_norm);
    state->nonfinite_in_a_row = finite ? 0 : state->nonfinite_in_a_row + 1;
    state->skipped += skipped != NULL;
    state->next_sample += samples_per_step(p);

    double seconds = seconds_now() - start, tokens = (double)(samples_per_step(p) * p->T);
    profile_count(false);
    run->profiled_steps += profiled;
    run->profiled_seconds += profiled ? seconds : 0;
    // The first step also makes what later ones reuse: it says little about them.
    double newest = state->step - run->first_step <= 1 ? 1 : 0.1;
    run->step_seconds += newest * (seconds - run->step_seconds);
    double left =
        p->total_steps == INT64_MAX ? INFINITY : (double)(p->total_steps - state->step - 1) * run->step_seconds;
    double minutes_left = s->max_minutes > 0 ? 60 * s->max_minutes - (seconds_now() - run->start) : INFINITY;
    left = minutes_left < left ? minutes_left : left;
    TrainEvent event = {.step = state->step,
                        .total_steps = p->total_steps == INT64_MAX ? 0 : p->total_steps,
                        .tokens = state->next_sample * p->T,
                        .loss = loss,
                        .grad_norm = grad_norm,
                        .learning_rate = learning_rate,
                        .tokens_per_second = tokens / seconds,
                        .seconds = seconds,
                        .gemm_fraction = gpt_flops_per_token(&p->config, p->T) * tokens / seconds / p->gemm_flops,
                        .seconds_left = left,
                        .bytes_sent = p->comm->bytes_sent - sent_before,
                        .skipped = skipped};
    Error error;
    check(run, logger_train(run->logger, &event, &error), &error);
    if (with_stats) {
        check(run, quant_stats_log(&run->model, run->quant_stats, run->logger, state->step, &error), &error);
        quant_stats_collect(&run->model, NULL);
    }
    state->step++;
}

// Of the last signal; NULL: none came.
static const char *stop_signal_name(const Run *run) {
    int signal_number = run->stop_signal;
    if (!signal_number) return NULL;
    return signal_number == SIGINT ? "SIGINT" : signal_number == SIGTERM ? "SIGTERM" : "SIGHUP";
}

// Why the run ends after the steps taken so far, or NULL.
static const char *reason_to_stop(Run *run) {
    const Plan *p = run->plan;
    agree(run);
    if (run->failed) return "failed";
    if (p->state.nonfinite_in_a_row >= BAD_STEPS_IN_A_ROW) return "not-finite";
    if (run->stop_signal) return stop_signal_name(run);
    if (p->state.step >= p->total_steps) {
        if (p->settings.max_steps == p->total_steps) return "max-steps";
        return p->settings.max_tokens ? "max-tokens" : "epoch";
    }
    double is_late = p->settings.max_minutes > 0 && seconds_now() - run->start >= 60 * p->settings.max_minutes;
    comm_max_doubles(p->comm, &is_late, 1);
    return is_late > 0 ? "max-minutes" : NULL;
}

static void log_config(Run *run) {
    const Plan *p = run->plan;
    const GPTConfig *c = &p->config;
    char device[512];
    Error error;
    JsonWriter *w = logger_begin_event(run->logger, "config");
    json_write_string(w, "program", "train_gpt_mxfp8");
    char *command = options_command_line(p->options, p->num_options, "./train_gpt_mxfp8");
    json_write_string(w, "command", command);
    free(command);
    p->backend->describe(device, sizeof(device));
    json_write_string(w, "backend", p->backend->name);
    json_write_string(w, "device", device);
    json_write_int64(w, "world_size", p->comm->size);
    json_write_double(w, "gemm_flops_per_second", p->gemm_flops);
    json_write_double(w, "flops_per_token", gpt_flops_per_token(c, p->T));
    json_begin_object(w, "model");
    json_write_int64(w, "layers", c->layers);
    json_write_int64(w, "heads", c->heads);
    json_write_int64(w, "channels", c->channels);
    json_write_int64(w, "max_seq_len", c->max_seq_len);
    json_write_int64(w, "vocab_size", c->vocab_size);
    json_write_int64(w, "parameters", gpt_count_parameters(c).all);
    json_write_int64(w, "kv_heads", gpt_kv_heads(c));
    json_write_int64(w, "ffn", gpt_ffn(c));
    json_write_string(w, "activation", gpt_activation_names()[c->activation]);
    json_write_string(w, "norm", gpt_norm_names()[c->norm]);
    json_write_bool(w, "ln_affine", !c->no_norm_affine);
    json_write_bool(w, "biases", !c->no_biases);
    json_write_string(w, "positions", gpt_position_names()[c->positions]);
    if (c->positions == POSITIONS_ROPE) json_write_double(w, "rope_theta", gpt_rope_theta(c));
    json_write_bool(w, "qk_norm", c->qk_norm);
    json_write_bool(w, "untied_head", c->untied_head);
    json_end_object(w);
    recipe_write_json(&p->recipe, w);
    json_begin_object(w, "options");
    options_write_json(p->options, p->num_options, w);
    json_end_object(w);
    json_write_int64(w, "step", p->state.step);
    json_write_int64(w, "train_tokens", p->train.num_tokens);
    if (!p->train.is_pattern) blend_write_json(&p->train, w);
    json_write_int64(w, "total_steps", p->total_steps == INT64_MAX ? 0 : p->total_steps);
    check(run, logger_end_event(run->logger, &error), &error);
}

static void log_recipe(Run *run, const Recipe *before) {
    const Recipe *recipe = &run->model.recipe;
    Error error;
    JsonWriter *w = logger_begin_event(run->logger, "recipe");
    json_write_int64(w, "step", run->plan->state.step);
    recipe_write_json(recipe, w);
    json_write_string(w, "was", before->name);
    check(run, logger_end_event(run->logger, &error), &error);
    logger_message(run->logger, "step %lld: from here on recipe %s%s in place of %s%s",
                   (long long)run->plan->state.step, recipe->name, recipe_is_adjusted(recipe) ? ", adjusted," : "",
                   before->name, recipe_is_adjusted(before) ? ", adjusted" : "");
}

// The model that shares the masters of run->model.
static void create_exact(Run *run) {
    if (!run->plan->settings.gradient_bias_every) return;
    gpt_create_exact(&run->exact, &run->model);
    gpt_use_workspace(&run->model);
}

// Where the next step's recipe is another one.
static void switch_recipe(Run *run) {
    const Plan *p = run->plan;
    int next = recipe_schedule_at(&p->recipes, p->state.step);
    if (next == run->recipe) return;
    Recipe before = run->model.recipe;
    gpt_free(&run->exact);
    gpt_switch_recipe(&run->model, &p->recipes.phases[next].recipe);
    create_exact(run);
    run->recipe = next;
    log_recipe(run, &before);
}

// The line on the checkpoint that a run resumes from stood after the lines that the checkpoint says
// are its own.
static void log_resumed(Run *run) {
    const Plan *p = run->plan;
    Error error;
    JsonWriter *w = logger_begin_event(run->logger, "checkpoint");
    json_write_int64(w, "step", p->state.step);
    json_write_string(w, "path", p->checkpoint);
    check(run, logger_end_event(run->logger, &error), &error);
    logger_message(run->logger, "resumed from %s", p->checkpoint);
    if (!recipe_is_same(&p->recipe, &p->previous_recipe)) log_recipe(run, &p->previous_recipe);
}

static void start_run(Run *run) {
    Plan *p = run->plan;
    Error error;
    gpt_create(&run->model, p->config, &p->recipe, p->backend, p->B, p->T, true, &p->sharding);
    run->recipe = phase_before(&p->recipes, p->state.step);
    const char *weights = p->checkpoint ? p->checkpoint : p->settings.init_from;
    if (!weights) gpt_init(&run->model, (uint64_t)p->settings.seed);
    if (weights && !checkpoint_load_weights(&run->model, weights, &error)) bad_input(&error);
    if (p->checkpoint && !checkpoint_load_moments(&run->model, p->checkpoint, &error)) bad_input(&error);
    gpt_refresh(&run->model);
    create_exact(run);
    run->biases.layers = allocate((size_t)p->config.layers * sizeof(GradientBias));
    size_t tokens = (size_t)(p->B * p->T);
    run->tokens = allocate(tokens * sizeof(int32_t));
    run->targets = allocate(tokens * sizeof(int32_t));
    run->quant_stats = quant_stats_allocate(&p->config);
}

static void report_profile(Run *run) {
    Error error;
    JsonWriter *w = logger_begin_event(run->logger, "profile");
    json_write_int64(w, "steps", run->profiled_steps);
    profile_write(w, run->profiled_steps, run->profiled_seconds);
    check(run, logger_end_event(run->logger, &error), &error);
    profile_print(run->profiled_steps, run->profiled_seconds);
}

// After a failure: what has been learned is saved if it can be; the sentence on stderr is the
// failure's.
static int finish_failed_run(Run *run) {
    const Plan *p = run->plan;
    Error error;
    char *path = NULL;
    bool is_new = p->state.step > run->first_step && p->state.step != run->saved_step;
    bool worth_saving = is_new && checkpoint_is_finite(&run->model);
    if (worth_saving && write_checkpoint(run, &path, &error)) {
        printf("saved %s; go on with: ./train_gpt_mxfp8 --resume --out-dir '%s'\n", path, p->settings.out_dir);
    }
    free(path);
    logger_close(run->logger);
    return EXIT_BAD_INPUT;
}

static int finish_run(Run *run, const char *reason) {
    const Plan *p = run->plan;
    Error error;
    bool finite = strcmp(reason, "not-finite") != 0;
    bool finished = finite && !run->stop_signal && evaluate(run, true);
    if (run->failed) return finish_failed_run(run);
    if (finite && !finished) reason = stop_signal_name(run);
    // A resumed run that took no step has its checkpoint already.
    if (finite && p->state.step != run->saved_step) save_checkpoint(run);
    double seconds = seconds_now() - run->start;
    if (run->profiled_steps > 0) report_profile(run);
    check(run, logger_finish(run->logger, p->state.step, reason, p->state.best_val_loss, seconds, &error), &error);
    logger_close(run->logger);
    if (run->failed) return EXIT_BAD_INPUT;
    if (!finite) {
        fprintf(stderr,
                "train_gpt_mxfp8: the loss or gradient norm wasn't finite %d steps in a row; none of them was applied. "
                "Resume from the last checkpoint in %s, if there is one, with a lower --learning-rate or another "
                "--recipe\n",
                BAD_STEPS_IN_A_ROW, p->settings.out_dir);
        return EXIT_NOT_FINITE;
    }
    if (!finished) {
        printf("stopped by %s; go on with: ./train_gpt_mxfp8 --resume --out-dir '%s'\n", reason, p->settings.out_dir);
    } else if (p->checkpoint && p->state.step == run->first_step) {
        printf("nothing to do: the run had reached its end; give a larger --%s to go on\n",
               strcmp(reason, "epoch") == 0 ? "max-tokens" : reason);
    }
    return 0;
}

static int train(Plan *p) {
    static Run run;
    Error error;
    run.plan = p;
    run.logger = &p->logger;
    run.first_step = p->state.step;
    run.saved_step = p->checkpoint ? p->state.step : -1;
    run.log_position = -1;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    if (sigaction(SIGINT, &action, NULL) != 0 || sigaction(SIGTERM, &action, NULL) != 0) die("sigaction failed");
    // A closed terminal saves too, but not under nohup, which goes on.
    struct sigaction hangup;
    if (sigaction(SIGHUP, NULL, &hangup) != 0) die("sigaction failed");
    if (hangup.sa_handler != SIG_IGN && sigaction(SIGHUP, &action, NULL) != 0) die("sigaction failed");

    // A full disk or a file over `ulimit -f` is then an error with a sentence.
    if (signal(SIGXFSZ, SIG_IGN) == SIG_ERR) die("signal failed");
    // Ctrl-C also ends a `| tee log`: what is printed then is lost, not the run.
    if (signal(SIGPIPE, SIG_IGN) == SIG_ERR) die("signal failed");

    // Weights that can't be loaded leave the directory as it was.
    start_run(&run);
    bool opened = p->comm->rank > 0 ? logger_open_nowhere(&p->logger, &error)
                  : p->checkpoint   ? logger_cut(&p->logger, p->state.log_position, &error)
                                    : logger_open(&p->logger, p->settings.out_dir, false, &error);
    double refused = !opened;
    comm_max_doubles(p->comm, &refused, 1);
    if (refused > 0) { // together, so that nobody takes another rank for lost
        fflush(stdout);
        if (!opened) fprintf(stderr, "train_gpt_mxfp8: %s\n", make_printable(error.message));
        p->comm->close(p->comm);
        return EXIT_BAD_INPUT;
    }
    if (p->comm->rank == 0) checkpoint_clean(p->settings.out_dir);
    if (p->comm->size > 1) p->logger.in_place = false; // a launcher passes lines on
    log_config(&run);                                  // a resumed run's too: its options may have changed
    if (p->checkpoint) log_resumed(&run);

    run.start = seconds_now() - p->state.seconds;
    const char *reason;
    while (!(reason = reason_to_stop(&run))) {
        const TrainerState *state = &p->state;
        if (!evaluate(&run, false)) continue; // there is a reason to stop
        // No checkpoint of weights that give losses that aren't finite: older ones would have to go
        // for it.
        bool sound = state->step > run.first_step && state->nonfinite_in_a_row == 0;
        if (sound && due(p->settings.checkpoint_every, state->step)) save_checkpoint(&run);
        switch_recipe(&run);
        train_step(&run);
    }
    int code = run.failed ? finish_failed_run(&run) : finish_run(&run, reason);
    gpt_free(&run.exact);
    gpt_free(&run.model);
    p->comm->close(p->comm);
    return code;
}

// -------------------------------------------------------------------------------------------------

static const char *default_out_dir(void) {
    char date[32];
    time_t now = time(NULL);
    strftime(date, sizeof(date), "%Y%m%d-%H%M%S", localtime(&now));
    return format_string("runs/%s", date);
}

static int print_device_info(void) {
    char cpu[128], device[512];
    system_cpu_name(cpu, sizeof(cpu));
    backend_cpu()->describe(device, sizeof(device));
    printf("CPU               %s: %s\n", cpu, device);
    comm_print_info(stdout);
    backend_cuda_print_info(stdout);
    return 0;
}

static int dry_run(Plan *p) {
    bool plans = p->card || p->settings.world_size > 0;
    for (int i = 0; i < p->recipes.count; i++) {
        if (!p->card || p->recipes.phases[i].recipe.activation_dtype != FORMAT_FP32) continue;
        die("--recipe fp32 isn't planned for cards: it is for comparisons, not for training");
    }
    if (plans) plan_micro_batches(p);
    check_switches(p);
    check_gradient_bias(p);
    bool has_blend = p->settings.train_data && !p->train.is_pattern;
    if (has_blend) {
        open_train_data(p);
        plan_micro_batches(p);
        plan_steps(p);
    }
    print_header(p);
    if (has_blend) print_blend(p);
    if (plans && p->backend == backend_cpu()) {
        p->gemm_flops = planner_measure_gemm(p->backend, p->recipe.activation_dtype);
        comm_sum_doubles(p->comm, &p->gemm_flops, 1); // of all ranks at once
    }
    if (plans) print_plan(p);
    p->comm->close(p->comm);
    return 0;
}

int main(int argc, char **argv) {
    system_wait_briefly(argv);
    static Plan plan;
    Plan *p = &plan;
    Error error;
    p->settings = DEFAULTS;
    p->num_options = make_options(p->options, &p->settings);
    if (options_ask_for_help(argc, argv) || argc == 1) {
        options_print_help(p->options, p->num_options, USAGE, argc == 1 ? stderr : stdout);
        return argc == 1 ? EXIT_BAD_INPUT : 0;
    }
    if (!options_parse(p->options, p->num_options, argc, argv, &error)) bad_input(&error);
    if (p->settings.device_info) return print_device_info();
    plan_resume(p);
    plan_backend(p);
    plan_ranks(p);
    check_native(p);
    plan_recipe(p);
    plan_sources(p);
    plan_tokenizer(p);
    plan_prompt(p);
    plan_model(p);
    if (p->settings.generate) return generate(p);
    if (p->settings.dry_run) return dry_run(p);
    plan_data(p);
    plan_micro_batches(p);
    plan_steps(p);
    check_same_blend(p);
    check_switches(p);
    check_gradient_bias(p);
    check_memory(p);
    check_same_run(p);
    if (!p->settings.out_dir) p->settings.out_dir = default_out_dir();
    print_header(p);
    p->gemm_flops = planner_measure_gemm(p->backend, p->recipe.activation_dtype);
    comm_sum_doubles(p->comm, &p->gemm_flops, 1); // of all ranks at once
    print_run(p);
    if (p->settings.profile) p->backend = profile_backend(p->backend, p->config.layers);
    return train(p);
}
