#include "settings.h"
#include "llmc/comm/comm.h" // COMM_TIMEOUT_SECONDS
#include "llmc/model/gpt.h" // names of activations, norms, positions
#include "presets.h"

#include <stdlib.h>
#include <string.h>

static const Settings DEFAULTS = {
    .batch_size = 4,
    .seed = 1337,
    // The help shows no default of these: it is the preset's.
    .shape = {.activation = (Activation)-1, .norm = (NormKind)-1, .positions = (PositionKind)-1},
    .ln_affine = true,
    .biases = true,
    .recipe = {.name = "mxfp8"},
    .schedule = {.kind = SCHEDULE_COSINE, .learning_rate = 6e-4, .final_lr_fraction = 0.1, .decay_fraction = 0.2},
    .update = {.beta1 = 0.9,
               .beta2 = 0.95,
               .eps = 1e-8,
               .weight_decay = 0.1,
               .grad_clip = 1.0,
               .muon = {.learning_rate = 0.02, .momentum = 0.95}},
    .val_every = 250,
    .val_steps = 20,
    .sample_tokens = 128,
    .prompt = "",
    .temperature = 0.8,
    .zero = 1,
    .comm_timeout = COMM_TIMEOUT_SECONDS,
    .keep_checkpoints = 3,
    .device = "auto",
};

const char *const GATHER_NAMES[] = {"mx", "bf16", "fp32", NULL};
const char *const REDUCE_NAMES[] = {"fp32", "bf16", NULL};
static const char *const OPTIMIZERS[] = {"adamw", "muon", NULL}; // as OptimizerKind
static const char *const DEVICES[] = {"auto", "cpu", "cuda", "h100", "h200", "b200", "gb200", NULL};
static const char *const MX_GEMMS[] = {"auto", "native", "emulated", NULL}; // as MxGemm

static const char USAGE[] =
    "usage: train_gpt_mxfp8 --train-data GLOB [options]\n"
    "       train_gpt_mxfp8 --resume --out-dir DIR [options]\n"
    "       train_gpt_mxfp8 --generate DIR [--prompt TEXT] [options]\n"
    "       train_gpt_mxfp8 --score DIR --requests FILE [options]\n\n"
    "Pre-trains a GPT. The linear layers' operands are quantized as --recipe says, by default to MXFP8: E4M3 in\n"
    "blocks of 32 elements with one power-of-two scale. Other activations, embeddings and the LM head are BF16;\n"
    "master weights, gradients of weights and the optimizer's moments are FP32.\n\n"
    "Example:\n"
    "  ./train_gpt_mxfp8 --train-data 'build/demo/data/train_*.bin' \\\n"
    "      --val-data 'build/demo/data/val_*.bin' --layers 6 --heads 4 --channels 256 --max-seq-len 256 \\\n"
    "      --batch-size 8 --max-steps 500 --out-dir runs/first\n\n"
    "Exit codes: 0 done, or stopped by a signal with a checkpoint saved; 2 bad input, or a file that can't be\n"
    "written; 3 the loss stopped being finite; 4 a rank was lost.\n";

// Headings of what only training takes.
#define LENGTH_HEADING "Length (the first to be reached ends the run; none: one epoch)"
#define OPTIMIZER_HEADING "Optimizer"
#define OUTPUT_HEADING "Output"

// Writes the table of options, pointing into `s`. Returns how many rows there are.
static int make_options(Option table[MAX_OPTIONS], Settings *s) {
    const double many = 1e15;
    const Option data_and_model[] = {
        GROUP("Data"),
        STRING("train-data", "GLOB", &s->train_data,
               "token files to train on, as data/prepare.py writes them; quote the pattern. Or a blend of patterns "
               "with weights, in phases that begin at a percentage of the run, as in A:0.7,B:0.3@0%,B:1@60%"),
        STRING("val-data", "GLOB", &s->val_data, "token files to validate on; without it there is no validation"),
        STRING(
            "tokenizer", "FILE", &s->tokenizer_path,
            "tokenizer.bin for prompts, samples and requests; where it isn't given, the checkpoint's, or the one beside the training data"),
        INT("batch-size", "B", &s->batch_size, 1, 1 << 20, "sequences in a micro-batch"),
        INT("seq-len", "T", &s->seq_len, 0, MAX_POSITIONS, "tokens in a sequence; 0: the model's --max-seq-len"),
        INT("total-batch-size", "TOKENS", &s->total_batch_size, 0, many,
            "tokens in an optimizer step, a multiple of B*T; more than B*T accumulates gradients; 0: one "
            "micro-batch of each rank, in a resumed run what its steps had"),
        FLAG("mask-documents", &s->mask_documents,
             "keep attention within a document, which begins with the tokenizer's end-of-text token, and begin "
             "positions anew there"),
        INT("seed", "N", &s->seed, 0, many, "of initial weights, data order and samples"),
        GROUP("Model"),
        NAME("model", "NAME", &s->model, preset_names(),
             "a preset; gpt2-124M where nothing else says what the model is"),
        INT("layers", "L", &s->shape.layers, 0, MAX_LAYERS, "blocks; 0, as in the next ones: what the preset has"),
        INT("heads", "NH", &s->shape.heads, 0, MAX_CHANNELS,
            "attention heads, which must divide channels; 0: the preset's"),
        INT("channels", "C", &s->shape.channels, 0, MAX_CHANNELS, "width of the residual stream; 0: the preset's"),
        INT("max-seq-len", "T", &s->shape.max_seq_len, 0, MAX_POSITIONS,
            "positions the model has; 0: --seq-len if that is given, else the preset's"),
        INT("vocab-size", "V", &s->shape.vocab_size, 0, MAX_VOCAB_SIZE,
            "tokens in the vocabulary; 0: the tokenizer's, else the preset's"),
        INT("kv-heads", "NKV", &s->shape.kv_heads, 0, MAX_CHANNELS,
            "heads of keys and values, each shared by NH / NKV heads of queries; 0: the preset's, else as many "
            "as heads"),
        INT("ffn", "F", &s->shape.ffn, 0, MAX_FFN,
            "hidden size of the MLP; 0: the preset's, else 4 C, with swiglu 8/3 C rounded up to a multiple of 64"),
        CHOICE("activation", "KIND", (int *)&s->shape.activation, ACTIVATION_NAMES,
               "of the MLP; gelu: its tanh approximation; relu2: squared ReLU"),
        CHOICE("norm", "KIND", (int *)&s->shape.norm, NORM_NAMES, "of all norms"),
        CHOICE("positions", "KIND", (int *)&s->shape.positions, POSITION_NAMES,
               "learned: added to embeddings; rope: rotary, queries and keys are turned by their position"),
        FLOAT("rope-theta", "X", &s->shape.rope_theta, 0, 1e12,
              "base of rotary positions' wavelengths; 0: the preset's, else 10000"),
        FLAG("qk-norm", &s->shape.qk_norm,
             "normalise queries and keys, each over all heads, before positions turn them"),
        FLAG("ln-affine", &s->ln_affine, "gains and biases in norms, LayerNorm or RMSNorm"),
        FLAG("biases", &s->biases, "biases in linear layers and in LayerNorm"),
        FLAG("untied-head", &s->shape.untied_head, "give the LM head a weight of its own instead of the embedding's"),
        CHOICE("init", "KIND", &s->init, GPT_INIT_NAMES,
               "initial weights: normal as in GPT-2; mitchell: as in OLMo's code, by each matrix's inputs"),
        STRING("init-from", "DIR", &s->init_from,
               "start from the weights of a checkpoint of ours or of a Hugging Face GPT-2, Llama or OLMo 1 "
               "(config.json, model.safetensors)"),
    };
    const Option others[] = {
        REPEATED(
            "recipe-at", "STEP:RECIPE", &s->recipe_at,
            "from that step on another recipe, with adjustments of its own after commas, as in "
            "1000:mxfp8,scale-rounding=floor,wgrad-x=bf16 (the options above belong to --recipe); may be repeated"),
        GROUP(LENGTH_HEADING),
        INT("max-steps", "N", &s->max_steps, 0, many, "optimizer steps; 0: no limit, as for the next three"),
        INT("max-tokens", "N", &s->max_tokens, 0, many, "training tokens"),
        FLOAT("epochs", "N", &s->epochs, 0, 1e9, "passes over the training data, such as 3 or 0.5"),
        FLOAT("max-minutes", "MINUTES", &s->max_minutes, 0, 1e9, "of training"),
        GROUP(OPTIMIZER_HEADING),
        CHOICE("optimizer", "NAME", &s->optimizer, OPTIMIZERS,
               "adamw; or muon for the matrices of the blocks' linear layers, with adamw for all else"),
        FLOAT("learning-rate", "LR", &s->schedule.learning_rate, 0, 1e38, "peak learning rate"),
        CHOICE("schedule", "KIND", (int *)&s->schedule.kind, SCHEDULE_NAMES, "of the learning rate after warm-up"),
        INT("warmup-steps", "N", &s->schedule.warmup_steps, 0, many, "steps of linear warm-up"),
        FLOAT("warmup-fraction", "F", &s->warmup_fraction, 0, 1,
              "fraction of the run's steps that is warm-up, where --warmup-steps isn't given"),
        FLOAT("warmup-from", "LR", &s->schedule.warmup_from, 0, 1e38,
              "learning rate of warm-up's first step; 0: the peak over the steps of warm-up"),
        FLOAT("final-lr-fraction", "F", &s->schedule.final_lr_fraction, 0, 1,
              "of the peak, at the end of the schedule"),
        FLOAT("decay-fraction", "F", &s->schedule.decay_fraction, 0, 1,
              "fraction of the run's steps, at its end, in which --schedule wsd decays linearly"),
        FLOAT("weight-decay", "X", &s->update.weight_decay, 0, 1e6, "decoupled, on matrices"),
        FLOAT("beta1", "X", &s->update.beta1, 0, 0.9999999, "decay of the first moment"),
        FLOAT("beta2", "X", &s->update.beta2, 0, 0.9999999, "decay of the second moment"),
        FLOAT("eps", "X", &s->update.eps, 1e-30, 1, "added to the denominator"),
        FLOAT("grad-clip", "NORM", &s->update.grad_clip, 0, 1e30, "largest global gradient norm; 0: no clipping"),
        FLOAT(
            "muon-learning-rate", "LR", &s->update.muon.learning_rate, 0, 1e38,
            "peak rate of the matrices that muon takes; it rises and falls as --learning-rate does, and is larger by sqrt(rows / columns) where a "
            "matrix has more rows than columns"),
        FLOAT("muon-momentum", "X", &s->update.muon.momentum, 0, 0.9999999, "of muon, with Nesterov's step"),
        FLOAT("muon-weight-decay", "X", &s->update.muon.weight_decay, 0, 1e6, "decoupled, of what muon takes"),
        FLOAT("skip-outliers", "Z", &s->skip_outliers, 0, 1e6,
              "don't apply a step whose loss or gradient norm lies Z standard deviations above those of the last "
              "128 steps; 0: apply all"),
        GROUP("Evaluation"),
        INT("val-every", "STEPS", &s->val_every, 0, many, "between validations; 0: only at the end"),
        INT("val-steps", "N", &s->val_steps, 0, many,
            "micro-batches in a validation, from the start of the validation data; 0: all of it"),
        STRING("eval-requests", "FILE", &s->eval_requests,
               "questions of tasks to ask during the run, as scripts/evaluate.py --write-requests writes them"),
        INT("eval-every", "STEPS", &s->eval_every, 0, many,
            "between times that the questions are asked; 0: only at the end"),
        INT("sample-every", "STEPS", &s->sample_every, 0, many, "between samples of text; 0: none"),
        INT("sample-tokens", "N", &s->sample_tokens, 1, 1 << 20, "tokens in a sample, at most"),
        STRING("prompt", "TEXT", &s->prompt,
               "that samples continue, after the end-of-text token, with which a document begins; nothing: that token "
               "alone"),
        FLOAT("temperature", "X", &s->temperature, 0, 100, "of samples; 0: the likeliest token"),
        INT("top-k", "K", &s->top_k, 0, MAX_VOCAB_SIZE, "sample among the K likeliest tokens; 0: all"),
        INT("quant-stats-every", "STEPS", &s->quant_stats_every, 0, many,
            "between quantization statistics of each layer and operand (amax, clamped, at the largest code, "
            "flushed to zero, SQNR) in the log; 0: none"),
        INT("gradient-bias-every", "STEPS", &s->gradient_bias_every, 0, many,
            "between steps whose exact gradient is computed too, on the same micro-batches and weights under "
            "recipe fp32: logs ||error|| / ||exact|| and the cosine between the two, in total and by layer; "
            "takes a second model's memory; 0: none"),
        GROUP("Ranks"),
        INT("zero", "STAGE", &s->zero, 0, 2,
            "with several ranks: 0: every rank has all; 1: masters and moments are sharded; 2: the sums of "
            "gradients too"),
        CHOICE("gather", "WHAT", &s->gather, GATHER_NAMES,
               "what ranks exchange of updated weights: mx: the copies that the recipe makes of them, MX or not; bf16, "
               "fp32: values to make them from"),
        CHOICE("reduce", "DTYPE", &s->reduce, REDUCE_NAMES, "in which gradients are sent; they are summed in FP32"),
        INT("world-size", "N", &s->world_size, 0, 65536,
            "ranks there must be; 0: as many as the launcher starts. With --dry-run: ranks to plan for"),
        FLOAT("link-bandwidth", "GB/s", &s->link_bandwidth, 0, 1e5,
              "with --dry-run --world-size: what a rank can send a second, for the time of a step; 0: not known"),
        FLOAT("comm-timeout", "SECONDS", &s->comm_timeout, 1, 1e6,
              "after which a rank that doesn't answer ends the run; ten times as many while a checkpoint is written"),
        STRING("comm-file", "PATH", &s->comm_file,
               "on GPUs: a file that all ranks see, to find each other without MPI or TCP"),
        GROUP(OUTPUT_HEADING),
        STRING("out-dir", "DIR", &s->out_dir, "for log.jsonl and checkpoints; where it isn't given, runs/DATE-TIME"),
        STRING("run-name", "NAME", &s->run_name,
               "what plots and lists call the run; where it isn't given, its directory's name"),
        STRING("tags", "TAG,TAG...", &s->tags, "words to find the run by, in plots and lists"),
        INT("checkpoint-every", "STEPS", &s->checkpoint_every, 0, many, "between checkpoints; 0: only at the end"),
        INT("keep-checkpoints", "N", &s->keep_checkpoints, 0, many, "newest checkpoints that are kept; 0: all"),
        INT("log-every", "STEPS", &s->log_every, 0, many,
            "between lines on a console that is no terminal; log.jsonl has every step; 0: a hundred lines a run"),
        FLAG("resume", &s->resume,
             "go on from the newest checkpoint in --out-dir; options not given are what they were"),
        GROUP("Other"),
        STRING(
            "config", "FILE", &s->config,
            "a JSON file of options, {\"layers\": 6, ...}, or what a run wrote, a trainer_state.json or the first line of "
            "log.jsonl, whose options and model it takes; options on the command line win"),
        STRING(
            "generate", "DIR", &s->generate,
            "only sample text, --sample-tokens tokens at most, from a checkpoint (or a run's newest), after --prompt"),
        STRING(
            "score", "DIR", &s->score,
            "only say how likely a checkpoint (or a run's newest) finds the continuations in --requests; prints a "
            "line of JSON for each, {\"id\": ..., \"logprob\": ..., \"tokens\": ..., \"bytes\": ..., \"greedy\": ...}"),
        STRING(
            "requests", "FILE", &s->requests,
            "for --score: {\"id\": 1, \"context\": \"text\", \"continuation\": \" text\"} a line; takes --batch-size "
            "times --seq-len tokens at a time"),
        FLAG("dry-run", &s->dry_run,
             "check the run and print what it would take: memory, FLOPs per token, the recipe, data and steps; for a "
             "planned device or with --world-size also the time of a step and of the run; and stop, with exit code 2 "
             "where it doesn't fit"),
        FLAG("overfit-one-batch", &s->overfit_one_batch,
             "train on the first step's tokens again and again: the loss must go to zero"),
        FLAG("profile", &s->profile,
             "at the end, print where the time of a step went, by operation and by layer, and log it"),
        NAME("device", "NAME", &s->device, DEVICES,
             "where to train: on a GPU where there is one that can be used, or as named; h100 and the like with "
             "--dry-run alone, to plan for them"),
        CHOICE(
            "mx-gemm", "HOW", &s->mx_gemm, MX_GEMMS,
            "how a GPU multiplies MXFP8 and NVFP4 operands, and FP8 ones with one scale per tensor or by blocks of 128: "
            "natively where it can, or decoded to BF16, as the CPU does"),
        FLAG("device-info", &s->device_info, "print what this machine has to train on, and stop"),
        FLAG("version", &s->version, "print the program's version and stop"),
        INT("threads", "N", &s->threads, 0, 4096, "CPU threads; 0: as many as there are cores (or OMP_NUM_THREADS)"),
    };
    _Static_assert(COUNT(data_and_model) + MAX_RECIPE_OPTIONS + COUNT(others) <= MAX_OPTIONS, "raise MAX_OPTIONS");
    memcpy(table, data_and_model, sizeof(data_and_model));
    int count = COUNT(data_and_model);
    count += recipe_options(table + count, &s->recipe, true);
    memcpy(table + count, others, sizeof(others));
    return count + COUNT(others);
}

void settings_init(CommandLine *line) {
    line->settings = DEFAULTS;
    line->num_options = make_options(line->options, &line->settings);
}

void settings_print_help(const CommandLine *line, FILE *stream) {
    options_print_help(line->options, line->num_options, USAGE, stream);
}

bool settings_given(const CommandLine *line, const void *value) {
    return options_given(line->options, line->num_options, value);
}

bool settings_typed(const CommandLine *line, const void *value) {
    return options_typed(line->options, line->num_options, value);
}

const char *settings_typed_of_training(const CommandLine *line) {
    bool is_of_training = false;
    for (int i = 0; i < line->num_options; i++) {
        const Option *option = &line->options[i];
        if (option->type == OPTION_GROUP) {
            is_of_training = strcmp(option->name, LENGTH_HEADING) == 0 ||
                             strcmp(option->name, OPTIMIZER_HEADING) == 0 || strcmp(option->name, OUTPUT_HEADING) == 0;
        } else if (is_of_training && option->was_typed) {
            return option->name;
        }
    }
    return NULL;
}

bool settings_is_of_recipe(const CommandLine *line, const Option *option) {
    const char *value = option->value, *begin = (const char *)&line->settings.recipe;
    return value >= begin && value < begin + sizeof(line->settings.recipe);
}

// A file of options

// Marks as given, beside what the command line gave, what the file has: of a run's options, which
// are all there, those that are no longer the default, so that the others leave the model to the
// preset.
static void mark_given(CommandLine *line, const JsonValue *object) {
    static CommandLine defaults;
    settings_init(&defaults);
    for (int i = 0; i < line->num_options; i++) {
        char *now = option_text(&line->options[i], 0), *then = option_text(&defaults.options[i], 0);
        bool differs = now && (!then || strcmp(now, then) != 0);
        line->options[i].was_set |=
            line->has_saved_options ? differs : !json_is_null(json_get(object, line->options[i].name));
        free(now);
        free(then);
    }
}

// Says whether the option that sets `value` counts as given.
static void mark(CommandLine *line, const void *value, bool given) {
    options_find_value(line->options, line->num_options, value)->was_set = given;
}

// Settles what a file says of warm-up; `steps`, `fraction`: whether the command line gave these.
// Steps of a file give way to the command line's fraction, and those that a run had made of its own
// fraction to that, as the next run may be of another length. A run's fraction then counts as a
// preset's does: not given.
static void settle_warmup(CommandLine *line, bool steps, bool fraction) {
    bool is_replaced = fraction || (line->has_saved_options && line->settings.warmup_fraction > 0);
    if (!steps && is_replaced) {
        line->settings.schedule.warmup_steps = DEFAULTS.schedule.warmup_steps;
        mark(line, &line->settings.schedule.warmup_steps, false);
    }
    if (line->has_saved_options) mark(line, &line->settings.warmup_fraction, fraction);
}

// Settles where weights come from: the command line's --resume or --init takes the place of a
// file's --init-from, and its --init-from that of a file's --init. A run's file may have both,
// since its preset had an --init: then --init-from holds.
static void settle_weights(CommandLine *line) {
    Settings *s = &line->settings;
    bool init = settings_typed(line, &s->init), init_from = settings_typed(line, &s->init_from);
    if ((s->resume || init) && !init_from) {
        s->init_from = NULL;
        mark(line, &s->init_from, false);
    }
    bool is_of_run = line->has_saved_options && s->init_from;
    if ((init_from || is_of_run) && !init) {
        s->init = DEFAULTS.init;
        mark(line, &s->init, false);
    }
}

// Returns whether an option says what to do now, and not what the run is.
static bool is_order(const Settings *s, const Option *option) {
    const void *const orders[] = {&s->resume,   &s->dry_run, &s->device_info, &s->version,
                                  &s->generate, &s->score,   &s->requests,    &s->config};
    bool found = false;
    for (int i = 0; i < COUNT(orders); i++) {
        found |= option->value == orders[i];
    }
    return found;
}

// Refuses orders in a file that no run has written. A run's were for that run, and aren't read.
static bool check_orders(const CommandLine *line, const JsonValue *object, Error *error) {
    for (int i = 0; i < line->num_options; i++) {
        const char *name = line->options[i].name;
        if (!is_order(&line->settings, &line->options[i]) || json_is_null(json_get(object, name))) continue;
        return error_set(error, "'%s' says what to do now, and isn't taken from a file: give --%s on the command line",
                         name, name);
    }
    return true;
}

// Returns whether a run has written this: the first event of its log, or a checkpoint's state.
static bool is_of_a_run(const JsonValue *json) {
    const char *event = json_string(json, "event");
    double version;
    return json_number(json, "version", &version) || (event && strcmp(event, "config") == 0);
}

// Refuses what stands beside the object "options" of a file that no run has written, where it would
// not be read.
static bool check_beside(const JsonValue *json, Error *error) {
    for (const JsonValue *member = json_first(json); member; member = json_next(member)) {
        if (strcmp(json_key(member), "options") == 0) continue;
        return error_set(error,
                         "'%s' stands beside \"options\", where nothing is read: put it in there, or leave it out",
                         json_key(member));
    }
    return true;
}

// Sets what the command line hasn't. Of a run's options those of its recipe, and those that it
// switched to, aren't read where the command line has a --recipe, be it the same; its orders never.
static bool read_options(CommandLine *line, const JsonValue *object, Error *error) {
    bool new_recipe = line->has_saved_options && settings_typed(line, &line->settings.recipe.name);
    for (int i = 0; i < line->num_options; i++) {
        Option *option = &line->options[i];
        bool is_of_recipe = settings_is_of_recipe(line, option) || option->value == &line->settings.recipe_at;
        option->was_set |= (new_recipe && is_of_recipe) || is_order(&line->settings, option);
    }
    bool ok = options_read_json(line->options, line->num_options, object, true, error);
    for (int i = 0; i < line->num_options; i++) {
        line->options[i].was_set = line->options[i].was_typed;
    }
    return ok;
}

// Returns a flag or a choice of the object "model" as an option's text, to be freed; NULL where it
// is missing.
static char *member_text(const JsonValue *model, const char *option) {
    char *name = format_string("%s", option);
    for (char *c = name; *c; c++) {
        if (*c == '-') *c = '_';
    }
    const char *text = json_string(model, name);
    bool flag;
    if (json_bool(model, name, &flag)) text = flag ? "true" : "false";
    free(name);
    return text ? format_string("%s", text) : NULL;
}

// Takes what a run's model has otherwise than its preset from the object "model" of its file: an
// option at the program's default doesn't say whether it was given or the preset decided. Another
// --model decides by itself, and so does a checkpoint, wherever one is named.
static bool read_model_kind(CommandLine *line, const JsonValue *model, Error *error) {
    const Settings *s = &line->settings;
    bool has_checkpoint = s->init_from || s->resume || s->generate || s->score;
    if (!line->has_saved_options || settings_typed(line, &s->model) || has_checkpoint) return true;
    const GPTConfig *preset = preset_config(s->model ? s->model : preset_names()[0]);
    bool ln_affine = !preset->no_norm_affine, biases = !preset->no_biases;
    const struct {
        const void *value, *of_preset;
    } rows[] = {{&s->shape.activation, &preset->activation},
                {&s->shape.norm, &preset->norm},
                {&s->shape.positions, &preset->positions},
                {&s->shape.qk_norm, &preset->qk_norm},
                {&s->shape.untied_head, &preset->untied_head},
                {&s->ln_affine, &ln_affine},
                {&s->biases, &biases}};
    for (int i = 0; i < COUNT(rows); i++) {
        Option *option = options_find_value(line->options, line->num_options, rows[i].value);
        Option of_preset = *option;
        of_preset.value = (void *)rows[i].of_preset;
        char *preset_text = option_text(&of_preset, 0), *text = member_text(model, option->name);
        bool differs = text && strcmp(text, preset_text) != 0, ok = true;
        if (differs && !option->was_typed) {
            ok = option_set(option, text, error);
            option->was_set = true;
        }
        free(preset_text);
        free(text);
        if (!ok) return false;
    }
    return true;
}

static bool read_config(CommandLine *line, const char *path, Error *error) {
    const Settings given = line->settings;
    bool steps = settings_given(line, &line->settings.schedule.warmup_steps);
    bool fraction = settings_given(line, &line->settings.warmup_fraction);
    Error detail;
    JsonValue *json = json_read(path, &detail);
    if (!json) return error_set(error, "--config %.900s", detail.message);
    const JsonValue *inner = json_get(json, "options"), *object = json_is_object(inner) ? inner : json;
    bool ok = json_is_object(object) || error_set(&detail, "it isn't an object, as in {\"layers\": 6}");
    ok = ok && json_names_once(json, &detail);
    line->has_saved_options = object == inner && is_of_a_run(json);
    if (ok && object == inner && !line->has_saved_options) ok = check_beside(json, &detail);
    if (ok && !line->has_saved_options) ok = check_orders(line, object, &detail);
    ok = ok && read_options(line, object, &detail);
    if (line->settings.generate || line->settings.score) line->settings.init_from = given.init_from;
    if (ok) mark_given(line, object);
    ok = ok && read_model_kind(line, json_get(json, "model"), &detail);
    if (ok) settle_warmup(line, steps, fraction);
    if (ok) settle_weights(line);
    json_free(json);
    return ok || error_set(error, "--config %.200s: %.700s", path, detail.message);
}

bool settings_parse(CommandLine *line, int argc, char **argv, Error *error) {
    settings_init(line);
    if (!options_parse(line->options, line->num_options, argc, argv, error)) return false;
    return !line->settings.config || read_config(line, line->settings.config, error);
}
