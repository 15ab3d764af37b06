#include "plan.h"
#include "plan_agree.h"
#include "plan_memory.h"
#include "llmc/base/util.h"
#include "presets.h"
#include "task_score.h"

#include <errno.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h> // sysconf

static const char NO_TRAIN_DATA[] =
    "--train-data is missing: name the token files to train on (data/prepare.py makes them; see --help)";

// Checkpoint

// Drops from --recipe-at what a run had changed until `step`.
static void drop_past_recipes(StringList *later, int64_t step) {
    int kept = 0;
    for (int i = 0; i < later->count; i++) {
        if (strtoll(later->items[i], NULL, 10) > step) later->items[kept++] = later->items[i];
    }
    later->count = kept;
}

// Puts before the changes that are given those that a run had made by this step, and before these.
static void add_past_recipes(StringList *given, const StringList *of_run, int64_t step) {
    StringList all = {.count = 0};
    for (int i = 0; i < of_run->count; i++) {
        long long at = strtoll(of_run->items[i], NULL, 10);
        if (at <= step && at < strtoll(given->items[0], NULL, 10)) all.items[all.count++] = of_run->items[i];
    }
    for (int i = 0; i < given->count; i++) {
        if (all.count == STRING_LIST_MAX) die("--recipe-at can be given %d times, the run's own too", STRING_LIST_MAX);
        all.items[all.count++] = given->items[i];
    }
    *given = all;
}

// Loads a checkpoint's state, and its run's values of the options that weren't given; with
// `recipe_alone`, of the recipe's alone. A --recipe that was given comes without the adjustments of
// the run's, and replaces what that run's --recipe-at had changed until then; a --recipe-at alone
// doesn't.
static void load_state(Plan *p, TrainerState *state, const char *checkpoint, bool recipe_alone) {
    CommandLine *line = &p->line;
    StringList *later = &line->settings.recipe_at;
    bool new_recipe = settings_given(line, &line->settings.recipe.name), new_later = settings_given(line, later);
    StringList given = *later;
    bool was_set[MAX_OPTIONS], adds = new_later && later->count > 0 && !new_recipe;
    if (adds) *later = (StringList){.count = 0};
    for (int i = 0; i < line->num_options; i++) {
        Option *option = &line->options[i];
        bool of_recipe = settings_is_of_recipe(line, option), of_later = option->value == later;
        was_set[i] = option->was_set;
        option->was_set = of_later ? was_set[i] && !adds : was_set[i] || (of_recipe ? new_recipe : recipe_alone);
    }
    checkpoint_load_state(state, checkpoint, line->options, line->num_options, OR_DIE);
    for (int i = 0; i < line->num_options; i++) {
        line->options[i].was_set = was_set[i];
    }
    if (new_recipe && !new_later) drop_past_recipes(later, state->step);
    if (!adds) return;
    add_past_recipes(&given, later, state->step);
    *later = given;
}

// Returns the checkpoint that is only asked, not trained; NULL: none.
static const char *given_model(const Settings *s) { return s->generate ? s->generate : s->score; }

// Takes the recipe that a checkpoint of ours was trained with, unless the command line says
// otherwise.
static void plan_read_only(Plan *p) {
    TrainerState state;
    const char *directory = given_model(&p->line.settings);
    if (!checkpoint_has_state(directory)) return;
    load_state(p, &state, directory, true);
    p->start.step = state.step;
}

// Returns the checkpoint that --generate, --score or --init-from names: a directory that holds one,
// or a run, whose newest it is.
static const char *find_checkpoint(const char *directory) {
    if (!directory) return NULL;
    if (!path_exists(directory)) {
        die("%s: no such directory; name a checkpoint, such as runs/NAME/step_000100, or a run", directory);
    }
    char *latest = format_string("%s/latest", directory), *config = format_string("%s/config.json", directory);
    bool is_checkpoint = path_exists(config), is_run = !is_checkpoint && path_exists(latest);
    free(latest);
    free(config);
    if (!is_checkpoint && !is_run) {
        die("%s is neither a checkpoint nor a run: name a checkpoint, such as runs/NAME/step_000100, or a run that has "
            "one",
            directory);
    }
    return is_run ? checkpoint_latest(directory, OR_DIE) : directory;
}

// Refuses what can't be asked for together with --score or --generate.
static void check_asked(const CommandLine *line) {
    const Settings *s = &line->settings;
    if (s->score && s->generate) die("--score and --generate exclude each other: call the program once for each");
    const char *name = s->score ? "score" : "generate";
    const char *other = s->resume ? "resume" : s->init_from ? "init-from" : s->dry_run ? "dry-run" : NULL;
    if (!other) other = settings_typed_of_training(line);
    if (given_model(s) && other) die("--%s trains nothing and takes no --%s: leave one of them out", name, other);
    if (s->score && !s->requests) die("--score needs --requests, a file with a request a line (doc/evaluation.md)");
    if (!s->score && s->requests) die("--requests is for --score: name the checkpoint that shall score them");
}

// Finds the checkpoint that the run begins with, if any, and takes its state and options. Its run's
// directory is this run's own before it is read: another run might replace it.
static void plan_checkpoint(Plan *p, Logger *logger) {
    Settings *s = &p->line.settings;
    check_asked(&p->line);
    s->generate = find_checkpoint(s->generate);
    s->score = find_checkpoint(s->score);
    s->init_from = find_checkpoint(s->init_from);
    p->start.best_val_loss = NAN;
    p->start.evaluated = p->start.evaluated_at_end = -1;
    if (s->resume && !s->out_dir) die("--resume needs --out-dir, the directory of the run to go on with");
    if (s->resume && s->init_from) die("--resume and --init-from exclude each other: a resumed run has its weights");
    if (s->resume && settings_typed(&p->line, &s->init)) {
        die("--init is of new weights, and a resumed run has its own: leave it out, or start another run");
    }
    if (s->init_from && settings_given(&p->line, &s->init)) {
        die("--init and --init-from exclude each other: weights come from %s", s->init_from);
    }
    if (given_model(s)) plan_read_only(p);
    if (!s->resume && !given_model(s) && !s->dry_run && !s->train_data) die("%s", NO_TRAIN_DATA);
    if (!s->resume) return;
    p->checkpoint = checkpoint_latest(s->out_dir, OR_DIE);
    if (!s->dry_run && comm_launch_rank() == 0) {
        free(p->checkpoint);
        logger_open(logger, s->out_dir, true, OR_DIE);
        p->checkpoint = checkpoint_latest(s->out_dir, OR_DIE);
    }
    load_state(p, &p->start, p->checkpoint, false);
    if (!s->train_data) die("%s", NO_TRAIN_DATA);
}

// Device and ranks

// Opens the GPU: each rank of a machine sees one of its own alone. A rank that has none doesn't
// take the CPU by itself: where a driver is, the others have theirs.
static const Backend *plan_gpu(Plan *p) {
    const Settings *s = &p->line.settings;
    int local_rank;
    char device[128];
    comm_local_rank(&local_rank, OR_DIE);
    comm_own_gpu(device, sizeof(device), getenv("CUDA_VISIBLE_DEVICES"), local_rank, OR_DIE);
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

static void check_device_options(const Plan *p) {
    const Settings *s = &p->line.settings;
    if (p->card && !s->dry_run) {
        die("--device %s is a machine to plan for, with --dry-run; to train take --device auto, cpu or cuda",
            s->device);
    }
    if (s->link_bandwidth > 0 && !s->dry_run) die("--link-bandwidth is for --dry-run: a run measures what it takes");
    if (s->mx_gemm == MX_GEMM_NATIVE && strcmp(s->device, "cpu") == 0) {
        die("--mx-gemm native: --device cpu multiplies nothing natively; use --mx-gemm auto");
    }
}

// Returns the card that is planned for, with the policy of its GEMMs; NULL: this machine.
static const RooflineDevice *plan_card(const Settings *s) {
    static RooflineDevice card;
    const RooflineDevice *named = roofline_device(s->device);
    if (!named) return NULL;
    card = *named;
    card.mx_gemm = (MxGemm)s->mx_gemm;
    return &card;
}

static void plan_backend(Plan *p) {
    const Settings *s = &p->line.settings;
    if (s->threads) omp_set_num_threads((int)s->threads);
    p->card = plan_card(s);
    check_device_options(p);
    p->backend = p->card ? roofline_backend(p->card) : backend_cpu();
    if (p->card || strcmp(s->device, "cpu") == 0) return;
    const Backend *cuda = plan_gpu(p);
    if (cuda) p->backend = cuda;
    if (p->backend == backend_cpu() && strcmp(s->device, "cuda") == 0) {
        die("--device cuda: %s; or use --device cpu", p->no_gpu.message);
    }
}

// Shares a machine's cores among its ranks, where nobody has said how many threads a rank takes. A
// launcher that binds ranks to cores has said it.
static void share_cores(const Plan *p) {
    int cores = omp_get_num_procs(), ranks = comm_local_size(p->comm);
    if (p->line.settings.threads || getenv("OMP_NUM_THREADS") || cores < sysconf(_SC_NPROCESSORS_ONLN)) return;
    omp_set_num_threads(cores > ranks ? cores / ranks : 1);
}

// Finds the ranks of this run. Only the first one prints and writes.
static void plan_ranks(Plan *p) {
    const Settings *s = &p->line.settings;
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
                             .reduce = s->reduce ? FORMAT_BF16 : FORMAT_FP32,
                             .muon = s->optimizer == OPTIMIZER_MUON};
    if (p->comm->rank > 0 && !freopen("/dev/null", "w", stdout)) die("can't open /dev/null: %s", strerror(errno));
    if (p->comm->size > 1) share_cores(p);
    if (s->dry_run && s->world_size > 1) {
        static Comm planned;
        planned.name = p->backend == backend_cpu() ? "mpi" : "nccl";
        planned.size = (int)s->world_size;
        p->sharding.comm = &planned;
    }
}

// Compares what a device multiplies natively of the run's recipes with the emulation, before it is
// trusted, and before memory is planned, since operands have other forms for the emulation. Ranks
// are all native or none.
static void check_native(Plan *p) {
    if (p->card) return;
    SelfCheck seen = p->backend->self_check(p->scalings, p->native_check, sizeof(p->native_check));
    if (!comm_any(p->comm, seen != SELF_CHECK_PASSED)) return;
    if (comm_any(p->comm, seen == SELF_CHECK_FAILED)) {
        die("GEMMs of quantized operands can't be trusted on this GPU: %s; use --device cpu",
            seen == SELF_CHECK_FAILED ? p->native_check : "the self-check failed on another rank");
    }
    if (seen == SELF_CHECK_PASSED) {
        snprintf(p->native_check, sizeof(p->native_check),
                 "the self-check failed on another rank; this run does without native GEMMs");
    }
    if (p->line.settings.mx_gemm == MX_GEMM_NATIVE) {
        die("--mx-gemm native can't be trusted: %s; use --mx-gemm auto", p->native_check);
    }
    fprintf(stderr, "train_gpt_mxfp8: native GEMMs can't be trusted and aren't used: %s\n", p->native_check);
    backend_cuda(MX_GEMM_EMULATED, &p->no_gpu);
}

// Recipe

static RecipeSchedule make_schedule(const Settings *s) {
    RecipeSchedule schedule = {.count = 1};
    recipe_from_settings(&schedule.phases[0].recipe, &s->recipe, OR_DIE);
    for (int i = 0; i < s->recipe_at.count; i++) {
        recipe_schedule_add(&schedule, s->recipe_at.items[i], OR_DIE);
    }
    return schedule;
}

// Returns the recipe of a resumed run's last step, by the options that it had.
static Recipe recipe_of_checkpoint(const char *checkpoint) {
    static CommandLine then;
    TrainerState state;
    settings_init(&then);
    checkpoint_load_state(&state, checkpoint, then.options, then.num_options, OR_DIE);
    RecipeSchedule schedule = make_schedule(&then.settings);
    return schedule.phases[recipe_schedule_before(&schedule, state.step)].recipe;
}

// Refuses an adjustment that is given for a resume and would change a recipe that isn't used any
// more.
static void check_adjustments(const Plan *p) {
    const CommandLine *line = &p->line;
    int now = recipe_schedule_at(&p->recipes, p->start.step);
    if (!p->checkpoint || now == 0 || settings_given(line, &line->settings.recipe.name)) return;
    for (int i = 0; i < line->num_options; i++) {
        const Option *option = &line->options[i];
        if (!option->was_set || !settings_is_of_recipe(line, option)) continue;
        die("--%s belongs to --recipe, but step %ld has the recipe of --recipe-at %s: give --recipe too, or an "
            "adjustment in --recipe-at",
            option->name, p->start.step, line->settings.recipe_at.items[now - 1]);
    }
}

// Settles the recipes, and the rows that ranks shard by, the same under all of them. Refuses
// adjustments of a recipe that isn't used any more.
static void plan_recipe(Plan *p) {
    p->recipes = make_schedule(&p->line.settings);
    for (int i = 0; i < p->recipes.count; i++) {
        const Recipe *recipe = &p->recipes.phases[i].recipe;
        p->sharding.unit = max_int64(p->sharding.unit, recipe_shard_unit(recipe));
    }
    p->first_phase = recipe_schedule_before(&p->recipes, p->start.step);
    p->end_phase = given_model(&p->line.settings) ? p->first_phase + 1 : p->recipes.count;
    for (int i = p->first_phase; i < p->end_phase; i++) {
        p->scalings |= recipe_scalings(&p->recipes.phases[i].recipe);
    }
    p->recipe = p->recipes.phases[p->first_phase].recipe;
    check_adjustments(p);
    p->previous_recipe = p->checkpoint ? recipe_of_checkpoint(p->checkpoint) : p->recipe;
}

// Tokenizer and prompt

// Returns the path of the tokenizer beside the first file of a pattern, to be freed. Where none
// matches, opening the data will say so.
static char *tokenizer_beside(const char *pattern) {
    char *file = dataloader_first_file(pattern);
    const char *path = file ? file : pattern, *slash = strrchr(path, '/');
    char *tokenizer = format_string("%.*s/tokenizer.bin", slash ? (int)(slash - path) : 1, slash ? path : ".");
    free(file);
    return tokenizer;
}

// Refuses a tokenizer at `path`, where there is one, other than the data's or, for a given model,
// the one that was named: with it samples, prompts and scores, or a part of a blend, would be
// nonsense. It is a checkpoint's or, with `is_data`, that of other data.
static void check_same_tokenizer(Plan *p, const char *path, const char *whose, bool is_data) {
    Tokenizer other;
    if (!p->has_tokenizer || !path_exists(path)) return;
    tokenizer_open(&other, path, OR_DIE);
    bool is_same =
        other.file_bytes == p->tokenizer.file_bytes && memcmp(other.file, p->tokenizer.file, other.file_bytes) == 0;
    if (!is_same && given_model(&p->line.settings)) {
        die("--tokenizer %s (%d tokens) isn't the same as the tokenizer.bin of %s (%d tokens): leave it out, and that "
            "one is taken",
            p->line.settings.tokenizer_path, p->tokenizer.vocab_size, whose, other.vocab_size);
    }
    if (!is_same) {
        die("the training data's tokenizer (%d tokens) isn't the one of %s (%d tokens): prepare %s "
            "(data/prepare.py --tokenizer)",
            p->tokenizer.vocab_size, whose, other.vocab_size,
            is_data ? "these with the former's tokenizer.json" : "the data with the latter");
    }
    tokenizer_take_jsons(&p->tokenizer, &other); // for checkpoints, where the data has none
    tokenizer_close(&other);
}

static void check_same_tokenizers(Plan *p) {
    const Settings *s = &p->line.settings;
    const char *directory = given_model(s) ? given_model(s) : s->init_from;
    char *path = directory ? format_string("%s/tokenizer.bin", directory) : NULL;
    if (path) check_same_tokenizer(p, path, directory, false);
    free(path);
    if (given_model(s)) return; // what a --config says of data isn't read
    for (int i = 0; i < p->train.num_sources && p->train.num_sources > 1; i++) {
        path = tokenizer_beside(p->train.sources[i].pattern);
        check_same_tokenizer(p, path, p->train.sources[i].pattern, true);
        free(path);
    }
    path = p->line.settings.val_data ? tokenizer_beside(p->line.settings.val_data) : NULL;
    if (path) check_same_tokenizer(p, path, p->line.settings.val_data, true);
    free(path);
}

// Settles where the training data comes from; it is opened later.
static void plan_sources(Plan *p) {
    if (!p->line.settings.train_data) return;
    blend_parse(&p->train, p->line.settings.train_data, OR_DIE);
}

static void plan_tokenizer(Plan *p) {
    const Settings *s = &p->line.settings;
    const char *checkpoint = given_model(s) ? given_model(s) : p->checkpoint;
    // One that the run was begun with is in its checkpoints.
    bool named = s->tokenizer_path && (!checkpoint || settings_given(&p->line, &s->tokenizer_path));
    char *path = NULL;
    if (named) {
        path = format_string("%s", s->tokenizer_path);
    } else if (checkpoint) {
        path = format_string("%s/tokenizer.bin", checkpoint);
    } else if (s->train_data) {
        path = tokenizer_beside(p->train.sources[0].pattern);
    }
    if (path && (named || path_exists(path))) {
        tokenizer_open(&p->tokenizer, path, OR_DIE);
        p->has_tokenizer = true;
    }
    free(path);
    check_same_tokenizers(p);
}

static _Noreturn void die_without_tokenizer(const Plan *p, const char *option) {
    die("%s needs a tokenizer: there is no tokenizer.bin %s%s; name one with --tokenizer", option,
        p->checkpoint ? "in " : "beside the training data", p->checkpoint ? p->checkpoint : "");
}

// Makes tokens of the prompt, where this run samples.
static void plan_prompt(Plan *p) {
    const Settings *s = &p->line.settings;
    if (!p->has_tokenizer && given_model(s)) die("%s has no tokenizer.bin: name one with --tokenizer", given_model(s));
    if (s->score || (!s->generate && !s->sample_every)) return;
    if (!p->has_tokenizer) die_without_tokenizer(p, "--sample-every");
    size_t bytes = strlen(s->prompt);
    p->prompt = allocate((1 + tokenizer_most_ids(bytes)) * sizeof(*p->prompt));
    p->prompt[0] = p->tokenizer.end_of_text;
    int tokens = tokenizer_encode(&p->tokenizer, s->prompt, bytes, p->prompt + 1);
    if (tokens < 0) die("--prompt can't be encoded: %s", tokenizer_why_not(&p->tokenizer));
    p->num_prompt_tokens = 1 + tokens;
}

// Model

// Takes what was given by `option`, one of the model's, over what the preset or the checkpoint in
// `directory` (NULL: none) has in `field`, of the same type. With a checkpoint they may not differ.
static void take(const Plan *p, void *field, const Option *option, const char *directory) {
    size_t bytes = option->type == OPTION_FLAG ? sizeof(bool) : option->type == OPTION_CHOICE ? sizeof(int) : 8;
    if (directory && memcmp(field, option->value, bytes) != 0) {
        char *given = options_spelling(p->line.options, p->line.num_options, option->value, option->value);
        char *held = options_spelling(p->line.options, p->line.num_options, option->value, field);
        die("%s was given, but %s holds a model with %s: leave the option out or take another checkpoint", given,
            directory, held);
    }
    memcpy(field, option->value, bytes);
}

// Returns whether an option of the model says that the preset, or the checkpoint, has it.
static bool says_nothing(const Option *option) {
    return option->type == OPTION_INT     ? *(const int64_t *)option->value == 0
           : option->type == OPTION_FLOAT ? *(const double *)option->value == 0
                                          : false;
}

// Fills p->config from the preset or the checkpoint in `directory`, and what was given.
static void take_all(Plan *p, const char *directory) {
    const Settings *s = &p->line.settings;
    GPTConfig *c = &p->config;
    bool affine = !c->no_norm_affine, biases = !c->no_biases;
    for (int i = 0; i < p->line.num_options; i++) {
        const Option *option = &p->line.options[i];
        uintptr_t offset = (uintptr_t)option->value - (uintptr_t)&s->shape;
        if (!option->was_set || says_nothing(option)) continue;
        if (offset < sizeof(*c)) take(p, (char *)c + offset, option, directory);
        if (option->value == &s->ln_affine) take(p, &affine, option, directory);
        if (option->value == &s->biases) take(p, &biases, option, directory);
    }
    c->no_norm_affine = !affine;
    c->no_biases = !biases;
}

// Returns a size of the model: what the command line gives, if anything, else the preset's. What a
// checkpoint saved doesn't count.
static int64_t size_given(const Plan *p, const int64_t *over, int64_t of_preset) {
    return *over && settings_given(&p->line, over) ? *over : of_preset;
}

// Refuses a preset that was given beside a checkpoint of a model of another size than it has with
// the options that change it.
static void check_same_model(const Plan *p, const char *directory) {
    const Settings *s = &p->line.settings;
    if (!directory || !settings_given(&p->line, &s->model)) return;
    const GPTConfig *preset = preset_config(s->model), *over = &s->shape, *c = &p->config;
    if (size_given(p, &over->layers, preset->layers) == c->layers &&
        size_given(p, &over->heads, preset->heads) == c->heads &&
        size_given(p, &over->channels, preset->channels) == c->channels) {
        return;
    }
    die("--model %s was given, but %s holds a model of %ld layer%s, %ld head%s and %ld channels: leave the option out "
        "or take another checkpoint",
        s->model, directory, c->layers, plural(c->layers), c->heads, plural(c->heads), c->channels);
}

static void check_recipes_fit(const Plan *p) {
    for (int i = 0; i < p->recipes.count; i++) {
        gpt_check_recipe(&p->config, &p->recipes.phases[i].recipe, OR_DIE);
    }
}

// Settles the shape of the model: the preset's, over it the checkpoint's, over it what was given.
static void plan_config(Plan *p) {
    const Settings *s = &p->line.settings;
    const CommandLine *line = &p->line;
    const char *directory = given_model(s) ? given_model(s) : p->checkpoint ? p->checkpoint : s->init_from;
    bool custom = settings_given(line, &s->shape.layers) || settings_given(line, &s->shape.heads) ||
                  settings_given(line, &s->shape.channels);
    p->config = *preset_config(s->model ? s->model : preset_names()[0]);
    if (custom && !s->model && s->seq_len) p->config.max_seq_len = s->seq_len;
    if (p->has_tokenizer) p->config.vocab_size = p->tokenizer.vocab_size;
    if (directory) checkpoint_read_config(&p->config, directory, OR_DIE);
    check_same_model(p, directory);
    take_all(p, directory);
    gpt_config_check(&p->config, OR_DIE);
    check_recipes_fit(p);
    if (p->has_tokenizer && p->tokenizer.vocab_size > p->config.vocab_size) {
        die("the tokenizer has %d tokens and the model %ld: give --vocab-size %d or another --tokenizer",
            p->tokenizer.vocab_size, p->config.vocab_size, p->tokenizer.vocab_size);
    }
}

// Takes what begins a document from the tokenizer, where documents are masked. A dry run does
// without: neither memory nor time depends on it.
static void plan_documents(Plan *p) {
    const Settings *s = &p->line.settings;
    p->config.mask_documents = s->mask_documents;
    if (!s->mask_documents) return;
    if (!p->has_tokenizer && !s->dry_run) {
        die("--mask-documents needs the tokenizer, whose end-of-text token begins a document: give --tokenizer, or put "
            "tokenizer.bin beside the training data");
    }
    p->config.end_of_text = p->has_tokenizer ? p->tokenizer.end_of_text : -1;
}

// Settles the shape of a micro-batch.
static void plan_micro_batch(Plan *p) {
    const Settings *s = &p->line.settings;
    p->B = s->generate ? 1 : s->batch_size;
    p->T = s->seq_len ? s->seq_len : p->config.max_seq_len;
    if (p->T > p->config.max_seq_len) {
        die("--seq-len %ld is over the model's %ld positions: lower it or raise --max-seq-len", p->T,
            p->config.max_seq_len);
    }
}

// Takes from the preset how it is trained, where no option says it and neither a checkpoint nor
// another run's options have it.
static void plan_preset(Plan *p) {
    const Settings *s = &p->line.settings;
    if (!s->model || p->checkpoint || s->generate || p->line.has_saved_options) return;
    preset_set_training(s->model, p->line.options, p->line.num_options, OR_DIE);
}

// Ends the program over recipes with GEMMs that the device refuses (gemm_refuses): of a
// micro-batch, and of what isn't trained on, whose rows are a multiple of T or of 16, and in the
// head may be one row alone.
static void check_gemms(const Plan *p) {
    const Settings *s = &p->line.settings;
    int64_t rows = p->B * p->T;
    bool trains = !given_model(s), asks = !trains || s->sample_every || s->eval_requests;
    for (int i = p->first_phase; i < p->end_phase; i++) {
        const Recipe *recipe = &p->recipes.phases[i].recipe;
        if (trains) gpt_check_gemms(&p->config, recipe, p->backend, rows, rows, true, OR_DIE);
        if (asks || s->val_data) {
            gpt_check_gemms(&p->config, recipe, p->backend, p->T, asks ? 1 : p->T, false, OR_DIE);
        }
    }
}

static bool is_utf8(const char *text) {
    size_t left = strlen(text);
    while (left > 0) {
        int length = utf8_sequence(text, left);
        if (length == 0) return false;
        text += length;
        left -= (size_t)length;
    }
    return true;
}

// Refuses texts that a run's checkpoints couldn't keep: they have options as JSON, which is UTF-8.
static void check_texts(const Plan *p) {
    const CommandLine *line = &p->line;
    for (int i = 0; i < line->num_options && !given_model(&line->settings); i++) {
        const Option *option = &line->options[i];
        bool is_text = option->type == OPTION_STRING || option->type == OPTION_REPEATED;
        char *text;
        for (int index = 0; is_text && (text = option_text(option, index)) != NULL; index++) {
            if (!is_utf8(text)) {
                die("--%s isn't UTF-8, in which checkpoints keep options, so that the run couldn't be resumed: write "
                    "it in UTF-8",
                    option->name);
            }
            free(text);
        }
    }
}

void plan_model(Plan *p, Logger *logger) {
    check_texts(p);
    plan_checkpoint(p, logger);
    plan_backend(p);
    plan_preset(p);
    plan_ranks(p);
    plan_recipe(p);
    check_native(p);
    plan_sources(p);
    plan_tokenizer(p);
    plan_prompt(p);
    plan_config(p);
    plan_documents(p);
    plan_micro_batch(p);
    check_gemms(p);
}

// Data and steps

int64_t plan_samples_per_step(const Plan *p) { return p->B * p->accumulation * p->sharding.comm->size; }

// Returns the largest micro-batch, `most` sequences or fewer, whose tokens on all ranks divide a
// step's `total`, at `tokens` for a sequence on each; 0 if there is none.
static int64_t micro_batch_that_divides(int64_t total, int64_t tokens, int64_t most) {
    if (total % tokens != 0) return 0;
    int64_t B = min_int64(most, total / tokens);
    while (total / tokens % B != 0) {
        B--;
    }
    return B;
}

// Settles how many micro-batches a step has. Without --total-batch-size a new run has one of each
// rank, and a resumed one keeps its step, whatever its ranks and its micro-batch are now.
static void plan_accumulation(Plan *p) {
    Settings *s = &p->line.settings;
    int ranks_planned = p->sharding.comm->size;
    int64_t micro_batch = p->B * p->T * ranks_planned, total = s->total_batch_size;
    bool keeps = !total && p->start.samples_per_step > 0;
    if (!total) total = keeps ? p->start.samples_per_step * p->T : micro_batch;
    // A preset's is taken by a new run where it can be.
    if (total % micro_batch != 0 && !p->checkpoint && !settings_given(&p->line, &s->total_batch_size)) {
        s->total_batch_size = 0;
        total = micro_batch;
    }
    if (total % micro_batch != 0) {
        int64_t lower = total / micro_batch * micro_batch;
        char ranks[32] = "";
        if (ranks_planned > 1) snprintf(ranks, sizeof(ranks), " * %d ranks", ranks_planned);
        if (keeps) {
            int64_t B = micro_batch_that_divides(total, p->T * ranks_planned, p->B);
            char way[64] = "take another number of ranks";
            if (B > 0) snprintf(way, sizeof(way), "--batch-size %ld keeps the step", B);
            die("a step of this run has %ld tokens, which isn't a multiple of the micro-batch's %ld (--batch-size %ld * "
                "--seq-len %ld%s): %s, or give --total-batch-size %ld to go on with steps of that many",
                total, micro_batch, p->B, p->T, ranks, way, lower ? lower : micro_batch);
        }
        die("--total-batch-size %ld isn't a multiple of the micro-batch's %ld tokens (--batch-size %ld * --seq-len "
            "%ld%s): take %ld",
            total, micro_batch, p->B, p->T, ranks, lower ? lower : micro_batch);
    }
    p->accumulation = total / micro_batch;
    p->start.samples_per_step = plan_samples_per_step(p);
}

// Refuses other data for a resumed run, which goes on where it stopped: whatever decides what comes
// next must be as it was.
static void check_same_data(const Plan *p) {
    if (!p->checkpoint) return;
    const struct {
        const char *what;
        int64_t then, now;
    } values[] = {{"--train-data's number of tokens", p->start.train_tokens, p->train.num_tokens},
                  {"--seq-len", p->start.seq_len, p->T},
                  {"--seed", p->start.seed, p->line.settings.seed}};
    for (int i = 0; i < COUNT(values); i++) {
        if (values[i].then == values[i].now) continue;
        die("%s was %ld when %s was written and is %ld now: the run would see other data; put it back, or start a "
            "new run with --init-from",
            values[i].what, values[i].then, p->checkpoint, values[i].now);
    }
}

// Refuses moments that are another optimizer's, or another version's of it.
static void check_same_optimizer(const Plan *p) {
    int64_t now = p->sharding.muon ? MUON_STATE : 0;
    if (!p->checkpoint || p->start.muon_state == now) return;
    die("%s has moments of %s, and this run would go on with %s: put --optimizer back, or start a new run with "
        "--init-from",
        p->checkpoint,
        p->start.muon_state == 0            ? "adamw"
        : p->start.muon_state == MUON_STATE ? "muon"
                                            : "another version's muon",
        now ? "muon" : "adamw");
}

// Notes what the run validates on. Where a resumed run has other tokens there, its best loss so far
// isn't one of theirs.
static void plan_validation(Plan *p) {
    uint64_t whole = hash_add(dataloader_hash(&p->val), (uint64_t)p->val.num_tokens);
    int64_t hash = (int64_t)(whole >> 12); // JSON keeps 53 bits
    p->has_other_val = p->start.val_hash && p->start.val_hash != hash;
    if (p->has_other_val) p->start.best_val_loss = NAN;
    p->start.val_hash = hash;
}

// Opens the data. Without --train-data there is only something to plan.
static void plan_data(Plan *p) {
    const Settings *s = &p->line.settings;
    uint64_t seed = (uint64_t)s->seed;
    if (!s->train_data) return;
    blend_open(&p->train, p->T, seed, p->config.vocab_size, OR_DIE);
    if (s->val_data) {
        dataloader_open(&p->val, s->val_data, p->T, seed, false, p->config.vocab_size, OR_DIE);
        p->has_val = true;
        plan_validation(p);
    }
    check_same_data(p);
    check_same_optimizer(p);
    p->start.muon_state = p->sharding.muon ? MUON_STATE : 0;
    p->start.train_tokens = p->train.num_tokens;
    p->start.seq_len = p->T;
    p->start.seed = s->seed;
}

int64_t plan_samples_of_run(const Plan *p) {
    int64_t left = p->total_steps > p->start.step ? p->total_steps - p->start.step : 0;
    return p->start.next_sample + left * plan_samples_per_step(p);
}

// Returns the samples that the steps before the checkpoint would have taken with this run's batch
// size, INT64_MAX where those are more.
static int64_t samples_of_start(const Plan *p) {
    int64_t samples;
    return __builtin_mul_overflow(p->start.step, plan_samples_per_step(p), &samples) ? INT64_MAX : samples;
}

int64_t plan_steps_of_tokens(const Plan *p, int64_t tokens) {
    int64_t seen = p->start.next_sample * p->T, per_step = plan_samples_per_step(p) * p->T;
    return p->start.step + (tokens > seen ? (tokens - seen + per_step - 1) / per_step : 0);
}

// Returns the least of the limits that were given on the number of steps; without any, one epoch;
// INT64_MAX: not known. The steps before a checkpoint may have been of another size.
static int64_t limit_of_steps(const Plan *p) {
    const Settings *s = &p->line.settings;
    int64_t samples = plan_samples_per_step(p), limit = INT64_MAX;
    bool is_limited = s->max_steps || s->max_tokens || s->epochs > 0 || s->max_minutes > 0;
    double epochs = is_limited ? s->epochs : 1;
    if (epochs > 0 && p->train.num_windows > 0) {
        int64_t unlike = samples_of_start(p) - p->start.next_sample;
        double steps = epochs * (double)p->train.num_windows / (double)samples + (double)unlike / (double)samples;
        limit = steps < 1 ? 1 : whole_part(fmin(steps, 1e15));
    }
    if (s->max_steps) limit = min_int64(limit, s->max_steps);
    if (s->max_tokens) limit = min_int64(limit, plan_steps_of_tokens(p, s->max_tokens));
    return limit;
}

// Settles the steps of warm-up; a resumed run has them already, unless it is given a fraction.
static void plan_warmup(Plan *p) {
    Settings *s = &p->line.settings;
    bool is_known = p->total_steps != INT64_MAX, of_steps = settings_given(&p->line, &s->schedule.warmup_steps);
    bool given = settings_given(&p->line, &s->warmup_fraction) && !of_steps;
    if (of_steps) s->warmup_fraction = 0;
    bool is_wanted = given || (s->warmup_fraction > 0 && !p->checkpoint);
    if (is_wanted && s->warmup_fraction > 0 && !is_known && !s->dry_run) {
        die("warm-up is %g of the run's steps (--warmup-fraction), whose number --max-minutes doesn't tell: give "
            "--max-steps or --max-tokens too, or --warmup-steps",
            s->warmup_fraction);
    }
    if (is_wanted && is_known) s->schedule.warmup_steps = whole_part(s->warmup_fraction * (double)p->total_steps);
    if (s->schedule.warmup_from > s->schedule.learning_rate) {
        die("--warmup-from %g is over --learning-rate %g, which warm-up rises to: lower it", s->schedule.warmup_from,
            s->schedule.learning_rate);
    }
}

// Refuses a run of more tokens than an int64_t counts, those before the checkpoint too.
static void check_length(const Plan *p) {
    const Settings *s = &p->line.settings;
    int64_t per_step = plan_samples_per_step(p) * p->T, seen = p->start.next_sample * p->T, tokens;
    if (p->total_steps == INT64_MAX) return;
    if (!__builtin_mul_overflow(p->total_steps, per_step, &tokens) && !__builtin_add_overflow(tokens, seen, &tokens)) {
        return;
    }
    die("%ld steps of %ld tokens are more than 2^63 tokens in all: lower %s or %s", p->total_steps, per_step,
        s->max_steps ? "--max-steps" : "--epochs", s->total_batch_size ? "--total-batch-size" : "--batch-size");
}

// Settles the number of steps, and where the data's phases begin in them.
static void plan_steps(Plan *p) {
    p->total_steps = limit_of_steps(p);
    check_length(p);
    plan_warmup(p);
    if (p->total_steps == INT64_MAX && p->train.num_phases > 1) {
        die("--train-data has phases, which begin at a percentage of the run's steps: give --max-steps or "
            "--max-tokens");
    }
    if (p->train.num_sources > 0) blend_place(&p->train, p->total_steps, plan_samples_per_step(p));
}

// Refuses other tokens, or another blend, for a resumed run, of the phases so far.
static void check_same_blend(const Plan *p) {
    if (!p->checkpoint) return;
    if (p->train.num_phases > 1 && p->start.next_sample != samples_of_start(p)) {
        die("--train-data has phases, which begin where the batch size puts them, and %s wasn't made with %ld tokens "
            "a step: give the --total-batch-size of that run, or start a new run with --init-from",
            p->checkpoint, plan_samples_per_step(p) * p->T);
    }
    if (p->start.data_fingerprint != blend_fingerprint(&p->train, p->start.next_sample)) {
        die("--train-data's weights or phases before step %ld aren't those that %s was made with (phases move with the "
            "number of steps): put them back, or start a new run with --init-from",
            p->start.step, p->checkpoint);
    }
    if (p->start.data_hash && p->start.data_hash != blend_hash(&p->train, p->start.next_sample)) {
        die("--train-data has other tokens than when %s was written, though as many: the run would see other data; put "
            "them back, or start a new run with --init-from",
            p->checkpoint);
    }
}

// What doesn't go together

// Refuses a switch of recipes between which ranks would have to exchange masters and moments, which
// stay where they are.
static void check_switches(const Plan *p) {
    for (int i = p->first_phase + 1; i < p->recipes.count; i++) {
        const Recipe *before = &p->recipes.phases[i - 1].recipe, *after = &p->recipes.phases[i].recipe;
        if (comm_any(p->comm, !gpt_shards_alike(p->config, before, after, p->backend, &p->sharding))) {
            die("--recipe-at %s: ranks would have to exchange masters and moments, which recipe %s shards in another "
                "way than %s does; use --zero 0",
                p->line.settings.recipe_at.items[i - 1], after->name, before->name);
        }
    }
}

static void check_gradient_bias(const Plan *p) {
    if (!p->line.settings.gradient_bias_every) return;
    if (p->sharding.comm->size > 1) {
        die("--gradient-bias-every is for one rank: its exact gradient isn't spread over several");
    }
    if (p->card) die("--gradient-bias-every isn't planned for cards: it is for comparisons, not for training");
}

static void check_card(const Plan *p) {
    for (int i = 0; i < p->recipes.count && p->card; i++) {
        if (p->recipes.phases[i].recipe.activation_dtype != FORMAT_FP32) continue;
        die("--recipe fp32 isn't planned for cards: it is for comparisons, not for training");
    }
}

// Refuses options of the command line that change nothing without another one. Those of a --config
// may stay: it may be another run's, and no option would take them back.
static void check_effects(const Plan *p) {
    const CommandLine *line = &p->line;
    const Settings *s = &line->settings;
    const struct {
        const void *value;
        const char *needs;
        bool has_effect;
    } rows[] = {
        {&s->val_every, "--val-data", s->val_data || s->val_every == 0},
        {&s->val_steps, "--val-data", s->val_data},
        {&s->eval_every, "--eval-requests", s->eval_requests || s->eval_every == 0},
        {&s->sample_tokens, "--sample-every", s->sample_every},
        {&s->prompt, "--sample-every", s->sample_every},
        {&s->temperature, "--sample-every", s->sample_every},
        {&s->top_k, "--sample-every", s->sample_every},
        {&s->schedule.warmup_from, "--warmup-steps", s->schedule.warmup_steps || s->warmup_fraction > 0},
        {&s->schedule.final_lr_fraction, "--schedule cosine, linear or wsd", s->schedule.kind != SCHEDULE_CONSTANT},
        {&s->schedule.decay_fraction, "--schedule wsd", s->schedule.kind == SCHEDULE_WSD},
        {&s->link_bandwidth, "--world-size", s->link_bandwidth == 0 || s->world_size > 0 || p->comm->size > 1},
        {&s->comm_file, "--device cuda", strcmp(s->device, "cpu") != 0},
        {&s->recipe.quantize_norm_gains, "--ln-affine", !p->config.no_norm_affine || !s->recipe.quantize_norm_gains},
        {&s->update.muon.learning_rate, "--optimizer muon", s->optimizer == OPTIMIZER_MUON},
        {&s->update.muon.momentum, "--optimizer muon", s->optimizer == OPTIMIZER_MUON},
        {&s->update.muon.weight_decay, "--optimizer muon", s->optimizer == OPTIMIZER_MUON}};
    for (int i = 0; i < COUNT(rows); i++) {
        const Option *option = options_find_value(line->options, line->num_options, rows[i].value);
        if (rows[i].has_effect || !option->was_typed) continue;
        die("--%s changes nothing without %s: give that too, or leave it out", option->name, rows[i].needs);
    }
}

// Reads the questions that are asked during the run.
static void plan_eval(Plan *p) {
    const char *path = p->line.settings.eval_requests;
    if (!path) return;
    if (!p->has_tokenizer) die_without_tokenizer(p, "--eval-requests");
    score_read(&p->eval, path, &p->tokenizer, true, OR_DIE);
    task_check(&p->eval, path, OR_DIE);
}

void plan_training(Plan *p) {
    bool is_dry = p->line.settings.dry_run;
    p->ranks_here = comm_local_size(p->comm);
    if (!is_dry) plan_check_program(p);
    check_effects(p);
    check_card(p);
    plan_data(p);
    plan_eval(p);
    plan_accumulation(p);
    plan_steps(p);
    check_same_blend(p);
    check_switches(p);
    check_gradient_bias(p);
    plan_spare_memory(p);
    if (!is_dry) plan_check_memory(p);
    if (!is_dry) plan_check_run(p);
}

void plan_measure(Plan *p) {
    if (p->card) return;
    bool is_known = p->total_steps != INT64_MAX;
    double samples = is_known ? (double)((p->total_steps - p->start.step) * plan_samples_per_step(p)) : INFINITY;
    double flops = samples * (double)p->T * gpt_flops_per_token(&p->config, p->T);
    p->gemm_flops = roofline_measure_gemm(p->backend, p->recipe.activation_dtype, flops);
    comm_sum_doubles(p->comm, &p->gemm_flops, 1);
}
