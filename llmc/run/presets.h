/*
Presets: models by name, as papers and programs have them.
*/
#pragma once

#include "llmc/model/gpt.h"

// Returns the names, NULL-terminated, gpt2-124M first.
const char *const *preset_names(void);

// Returns the model of that name, or NULL.
const GPTConfig *preset_config(const char *name);
