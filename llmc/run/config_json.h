/*
config.json: the model's configuration as transformers reads and writes it.
  gpt2              what Hugging Face's GPT-2 can be: gpt_is_gpt2
  llama             rotary positions, RMSNorm with gains, SwiGLU, grouped queries or not; biases
                    everywhere or nowhere
  olmo              rotary positions, LayerNorm without gains, SwiGLU, no biases
  train_gpt_mxfp8   all others: transformers has no architecture that is what they are
*/
#pragma once

#include "llmc/model/gpt.h"
#include "llmc/files/json.h"

// Writes config.json. `end_of_text` is the token that begins and ends a document.
void config_json_write(JsonWriter *writer, const GPTConfig *config, int64_t end_of_text);

// Writes the object "model" of the log and of a checkpoint's state.
void config_json_log(JsonWriter *writer, const GPTConfig *config);

// Reads config.json's object; `path` is named in errors: another architecture, something that this
// program computes otherwise or hasn't, a shape that gpt_config_check refuses.
bool config_json_read(GPTConfig *config, const JsonValue *json, const char *path, Error *error);
