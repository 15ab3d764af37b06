/*
Plan: what the settings add up to on this machine, with these ranks, data and checkpoint. It is made
before a run begins and doesn't change in it. What the user can't have ends the program with a
sentence and exit code 2.
*/
#pragma once

#include "checkpoint.h"
#include "llmc/data/blend.h"
#include "logger.h"
#include "roofline.h"
#include "recipe_schedule.h"
#include "score.h"
#include "settings.h"

typedef struct {
    CommandLine line; // the settings; of a resumed run those that it had, where the command line has none
    GPTConfig config;
    RecipeSchedule recipes;
    int first_phase, end_phase; // of recipes, that this call of the program computes with
    unsigned scalings;          // of these: bits 1 << Scaling
    Recipe recipe;              // that the run begins or goes on with
    Recipe previous_recipe;     // of a resumed run: of its last step
    const Backend *backend;
    Comm *comm;
    int ranks_here;             // of comm, on this machine
    Sharding sharding;          // with --dry-run --world-size N of N ranks, which comm has not
    const RooflineDevice *card; // that is planned for; NULL: this machine
    Error no_gpu;               // why the CPU was taken, where that wasn't asked for; else ""
    char native_check[512];     // what the backend's self-check has seen, or ""
    int64_t B, T;
    int64_t accumulation; // micro-batches in a step
    int64_t total_steps;  // INT64_MAX: not known, --max-minutes ends the run
    Tokenizer tokenizer;
    bool has_tokenizer;
    int32_t *prompt; // (num_prompt_tokens), after end-of-text, which begins a document
    int64_t num_prompt_tokens;
    Blend train;
    DataLoader val;
    bool has_val;
    bool has_other_val; // than the checkpoint's run validated on
    ScoreRequests eval; // that are asked during the run; empty: none
    char *checkpoint;   // that is resumed from, or NULL
    TrainerState start; // of the checkpoint; else of a new run
    double gemm_flops;  // a second, measured
} Plan;

// Settles what a model needs: checkpoint, device, ranks, recipe, tokenizer and shape. `plan->line`
// has been parsed. A run that is resumed gets its `logger` here: the directory is its own before
// the checkpoint is read.
void plan_model(Plan *plan, Logger *logger);

// Settles what training needs besides, after plan_model: data, batches, number of steps. Refuses
// what doesn't go together and what memory can't hold. With --dry-run the data may be missing, and
// memory too small.
void plan_training(Plan *plan);

// Refuses ranks that would score something else: other options, requests, weights or programs.
void plan_check_score(const Plan *plan, const ScoreRequests *all);

// Measures this machine's GEMM, of all ranks at once, where a plan for this machine wants it.
void plan_measure(Plan *plan);

// Returns the number of sequences that all ranks train on in a step.
int64_t plan_samples_per_step(const Plan *plan);

// Returns the number of sequences that a run of known length is trained on, those before its
// checkpoint in steps of whatever size.
int64_t plan_samples_of_run(const Plan *plan);

// Returns the step at which a run will have seen so many tokens, those before its checkpoint in
// steps of whatever size.
int64_t plan_steps_of_tokens(const Plan *plan, int64_t tokens);
