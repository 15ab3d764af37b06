/*
Settings: what the command line of train_gpt_mxfp8 says. settings.c has the table of options, a row
for each: from a line of --help to the field that it sets it is one step.
*/
#pragma once

#include "recipe_options.h"
#include "scheduler.h"
#include "llmc/model/gpt_config.h"
#include "llmc/model/optimizer.h"

enum { MAX_OPTIONS = 128 };

// What the options set. What 0 stands for is in the option's help.
typedef struct {
    const char *train_data, *val_data, *tokenizer_path;
    int64_t batch_size, seq_len, total_batch_size, seed;
    bool mask_documents;
    // Of the model; what isn't given (settings_given) is the preset's or the checkpoint's.
    const char *model;
    GPTConfig shape; // its no_norm_affine and no_biases are
    bool ln_affine, biases;
    int init; // GPTInit
    const char *init_from;
    RecipeSettings recipe;
    StringList recipe_at;
    int64_t max_steps, max_tokens;
    double epochs, max_minutes;
    int optimizer;     // OptimizerKind
    Schedule schedule; // its total_steps aren't an option's
    double warmup_fraction;
    OptimizerOptions update; // its learning_rate and step are each step's; muon's learning rate is the peak
    double skip_outliers;
    int64_t val_every, val_steps;
    const char *eval_requests;
    int64_t eval_every, sample_every, sample_tokens;
    const char *prompt;
    double temperature;
    int64_t top_k, quant_stats_every, gradient_bias_every;
    int64_t zero;
    int gather, reduce; // Gather; an index into REDUCE_NAMES
    int64_t world_size;
    double link_bandwidth, comm_timeout;
    const char *comm_file;
    const char *out_dir, *run_name, *tags;
    int64_t checkpoint_every, keep_checkpoints, log_every;
    bool resume;
    const char *config;
    const char *generate, *score, *requests;
    bool dry_run, overfit_one_batch, profile;
    const char *device;
    int mx_gemm; // MxGemm
    int64_t threads;
    bool device_info, version;
} Settings;

typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_MUON } OptimizerKind; // Muon for the blocks' matrices, else AdamW

extern const char *const GATHER_NAMES[]; // "mx", "bf16", "fp32", by Gather
extern const char *const REDUCE_NAMES[]; // "fp32", "bf16"

// The settings with the table that they were made by, which knows what was given.
typedef struct {
    Settings settings;
    Option options[MAX_OPTIONS];
    int num_options;
    bool has_saved_options; // --config named a run's, which say of every option what it was
} CommandLine;

// Fills `line` with the defaults. The table points into it, so it must stay where it is.
void settings_init(CommandLine *line);

// Reads argv over the defaults; a file of options that --config names goes first. Errors: those of
// options_parse, and a file that can't be read, isn't JSON, or has what is no option.
bool settings_parse(CommandLine *line, int argc, char **argv, Error *error);

void settings_print_help(const CommandLine *line, FILE *stream);

// Returns whether the option that sets `value`, a field of line->settings, was given.
bool settings_given(const CommandLine *line, const void *value);

// The same of the command line alone, not of --config.
bool settings_typed(const CommandLine *line, const void *value);

// Returns the name of an option that the command line has and only training takes: of its length,
// of its optimizer, or of what it writes. NULL where there is none.
const char *settings_typed_of_training(const CommandLine *line);

// Returns whether an option is one of a recipe's, --recipe among them.
bool settings_is_of_recipe(const CommandLine *line, const Option *option);
