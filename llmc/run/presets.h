/*
Presets: models by name, as papers and programs have them.
*/
#pragma once

#include "llmc/model/gpt.h"
#include "options.h"

// Returns the names, NULL-terminated, gpt2-124M first.
const char *const *preset_names(void);

// Returns the model of that name, or NULL.
const GPTConfig *preset_config(const char *name);

// Sets those options that a preset trains with and that weren't given; they count as not given
// still.
bool preset_set_training(const char *name, Option *options, int count, Error *error);
