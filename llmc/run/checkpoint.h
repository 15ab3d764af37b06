/*
Checkpoints: a directory for each step, OUT_DIR/step_000100/, and OUT_DIR/latest, which names the
newest whole one.
  model.safetensors      FP32 masters, named and laid out as Hugging Face's GPT2LMHeadModel or
                         LlamaForCausalLM
  optimizer.safetensors  AdamW's moments, NAME.exp_avg and NAME.exp_avg_sq, or Muon's,
                         NAME.momentum_buffer, laid out like the weights
  amax_history.safetensors  under delayed scaling, of each linear layer LINEAR.amax_history, its weight's, X's
                         and dY's amaxes of earlier steps, the oldest first, and LINEAR.amax, what its scales are
                         made of
  config.json            the model, as transformers reads it where it has the architecture
                         (config_json.h)
  trainer_state.json     everything else that an exact resume needs
  tokenizer.bin          where the run has a tokenizer; and tokenizer.json, tokenizer_config.json,
                         which transformers reads, where they lay beside it
A directory is written under a temporary name and renamed when all of it is on the disk, so that one
that has its name is whole.
*/
#pragma once

#include "llmc/model/gpt.h"
#include "options.h"
#include "outlier.h"
#include "llmc/data/tokenizer.h"

enum { MUON_STATE = 1 }; // what Muon's moments in optimizer.safetensors are; another number where they change

typedef struct {
    int64_t step;             // optimizer steps taken or skipped
    int64_t next_sample;      // of the training data
    int64_t samples_per_step; // of the last step; 0: not known
    int64_t train_tokens;     // in the training data; this and the next two decide what the run sees
    int64_t seq_len, seed;
    int64_t data_fingerprint; // of the blend and its phases so far; 0: no blend
    int64_t data_hash;        // blend_hash(); 0: not known
    int64_t val_hash;         // of the validation data, that best_val_loss is of; 0: none, or not known
    int64_t muon_state;       // MUON_STATE of a run with Muon; 0: AdamW alone
    int64_t log_position;     // bytes of log.jsonl that belong to these steps
    int64_t skipped;          // steps not applied, in all
    int64_t nonfinite_in_a_row;
    int64_t evaluated; // the last step whose validation and sample, where they were due, are in the log; -1: none
    int64_t evaluated_at_end; // the last step at which a run ended with these; -1: none
    double best_val_loss;     // NaN: no validation yet
    double seconds;           // of training
    OutlierWindow losses, grad_norms;
    Spike spike;
} TrainerState;

// Writes OUT_DIR/step_NNNNNN (over one of the same step) and makes it the latest; then removes
// older ones but the newest `keep` (0: keeps all). `path` gets its path, to be freed. `tokenizer`
// may be NULL. Errors: not enough space, not writable; nothing that was there is harmed.
bool checkpoint_save(char **path, const char *out_dir, GPT *model, const TrainerState *state, const Option *options,
                     int num_options, const Tokenizer *tokenizer, int64_t keep, Error *error);

// Returns whether OUT_DIR holds a checkpoint, or a file `latest`.
bool checkpoint_any(const char *out_dir);

// Returns the directory that OUT_DIR/latest names, to be freed. Errors: there is none.
char *checkpoint_latest(const char *out_dir, Error *error);

// Removes what an interrupted checkpoint_save has left.
void checkpoint_clean(const char *out_dir);

// Reads DIR/config.json, of ours or of Hugging Face's GPT-2, Llama or OLMo. Errors: another
// architecture, an activation or shape that this program doesn't have.
bool checkpoint_read_config(GPTConfig *config, const char *directory, Error *error);

// Reads DIR/model.safetensors into the masters; names with or without "transformer.", F32, F16 or
// BF16. Follow with gpt_refresh. Errors: a missing tensor, another shape, a value that isn't
// finite.
bool checkpoint_load_weights(GPT *model, const char *directory, Error *error);
bool checkpoint_load_moments(GPT *model, const char *directory, Error *error);

// Reads DIR/amax_history.safetensors, for a model with delayed scales. Follow with gpt_refresh.
bool checkpoint_load_amaxes(GPT *model, const char *directory, Error *error);

// Returns whether all masters and moments are finite: what isn't must not be saved.
bool checkpoint_is_finite(const GPT *model);

// Returns whether DIR has a trainer_state.json that isn't another program's: transformers' Trainer
// writes files of that name too.
bool checkpoint_has_state(const char *directory);

// Reads DIR/trainer_state.json. Options that the command line didn't set take the values they had.
bool checkpoint_load_state(TrainerState *state, const char *directory, Option *options, int num_options, Error *error);
