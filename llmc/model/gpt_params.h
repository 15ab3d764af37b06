/*
The parameters of a GPT, by the names that Hugging Face gives them, and the branches and norms that
use them.
*/
#ifndef LLMC_GPT_PARAMS_H
#define LLMC_GPT_PARAMS_H

#include "gpt.h"

// Adds all parameters of the model's configuration and recipe to model->params, and links the
// branches, the final norm and the head to theirs.
void gpt_declare_params(GPT *model);

#endif
