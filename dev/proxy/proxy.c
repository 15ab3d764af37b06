/*
proxy: trains a residual MLP student on a fixed random teacher under a Recipe (arXiv:2506.20752,
section 5), to see what MX formats do to training. Reads from top to bottom: options, what they add
up to, states, the training loop.
*/
#include <glob.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/run/logger.h"          // log.jsonl and the console
#include "llmc/model/gpt_config.h"    // names of activations
#include "llmc/model/gradient_bias.h" // next to the exact gradient
#include "llmc/model/optimizer.h"     // Adam, SGD
#include "llmc/run/quant_stats.h"     // of each operand
#include "llmc/run/recipe_options.h"  // --recipe and its adjustments
#include "llmc/run/scheduler.h"       // learning rate
#include "llmc/files/safetensors.h"   // states
#include "llmc/base/system.h"         // waiting
#include "authors.h"
#include "data.h"
#include "model.h"

// Options

typedef enum { OPTIMIZER_ADAM, OPTIMIZER_SGD } OptimizerKind;
typedef enum { TEACHER_RESIDUAL, TEACHER_PLAIN } TeacherKind;
typedef enum { ARITHMETIC_OURS, ARITHMETIC_AUTHORS } ArithmeticKind;

// What is saved with a state stands before `recipe`.
typedef struct {
    ProxyConfig config;
    int init, loss, optimizer, teacher, schedule;
    int64_t batch_size, seed, teacher_seed;
    double label_noise, learning_rate, final_learning_rate, momentum;
    OptimizerOptions adam; // its learning_rate and step are each step's
    RecipeSettings recipe;
    int arithmetic;
    AuthorsArithmetic parts;
    bool fp32_stream, quantize_teacher, norm_bias_gradient;
    int64_t steps;
    double diverged_at;
    bool keep_going, resume;
    const char *out_dir, *load, *device;
    int64_t log_every, save_every, keep_states, gradient_bias_every, twin_every, stats_every, threads;
    StringList save_at;
} Settings;

// The reference case of the paper. Label noise is that of the authors' program.
static const Settings DEFAULTS = {
    .config = {.layers = 4, .width = 512, .layernorm = true, .heads = 8, .seq_len = 32},
    .batch_size = 2048,
    .seed = 1337,
    .teacher_seed = 1,
    .label_noise = 0.005,
    .learning_rate = 6e-4,
    .adam = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8},
    .recipe = {.name = "mxfp8-ocp"},
    .norm_bias_gradient = true,
    .steps = 6000,
    .diverged_at = 10,
    .log_every = 1,
    .device = "auto",
};

static const char *const INITS[] = {"kaiming-uniform", "xavier-normal", NULL}; // as ProxyInit
static const char *const LOSSES[] = {"mse", "kl", NULL};                       // as ProxyLoss
static const char *const OPTIMIZERS[] = {"adam", "sgd", NULL};                 // as OptimizerKind
static const char *const SCHEDULES[] = {"constant", "cosine", NULL};
static const char *const TEACHERS[] = {"residual", "plain", NULL};  // as TeacherKind
static const char *const ARITHMETICS[] = {"ours", "authors", NULL}; // as ArithmeticKind
static const char *const DEVICES[] = {"auto", "cpu", "cuda", NULL};

enum { MAX_OPTIONS = 96, PRINT_EVERY = 100 };
static const double SPIKE = 100; // times the loss of the step before: the paper's

// Writes the table of options, pointing into `s`. Returns how many there are.
static int make_options(Option table[MAX_OPTIONS], Settings *s) {
    const double many = 1e15;
    ProxyConfig *c = &s->config;
    const Option before[] = {
        GROUP("Model"),
        INT("layers", "L", &c->layers, 1, 1000, "of student and teacher"),
        INT("width", "D", &c->width, 1, 65536, "features; the hidden layer has 4 D, with swiglu 8/3 D"),
        CHOICE("activation", "KIND", (int *)&c->activation, ACTIVATION_NAMES, "of student and teacher"),
        FLAG("layernorm", &c->layernorm, "the student's, with gains and biases"),
        FLAG("attention", &c->attention, "before each MLP, self-attention without a mask"),
        INT("heads", "NH", &c->heads, 1, 65536, "of attention"),
        INT("seq-len", "T", &c->seq_len, 1, 1 << 20, "rows of the batch that attend to one another"),
        CHOICE("init", "KIND", &s->init, INITS,
               "of the student: PyTorch's default, or normal with gain 0.5. The teacher's is PyTorch's default"),
        GROUP("Data"),
        INT("batch-size", "B", &s->batch_size, 1, 1 << 24, "new samples in a step"),
        CHOICE("loss", "KIND", &s->loss, LOSSES, "mean squared error, or KL divergence of the softmax"),
        CHOICE("teacher", "KIND", &s->teacher, TEACHERS,
               "residual: the student's shape without layernorm; plain: that of the authors' program, without the "
               "residual stream and with hidden layers as wide as the features"),
        FLOAT("label-noise", "X", &s->label_noise, 0, 1e6,
              "standard deviation of what is added to the teacher's output"),
        INT("seed", "N", &s->seed, 0, many, "of the student's initial weights and of the samples"),
        INT("teacher-seed", "N", &s->teacher_seed, 0, many, "of the teacher's weights"),
        GROUP("Optimizer"),
        CHOICE("optimizer", "KIND", &s->optimizer, OPTIMIZERS, "without weight decay or clipping"),
        FLOAT("learning-rate", "LR", &s->learning_rate, 0, 1e38, "of the first step"),
        CHOICE("schedule", "KIND", &s->schedule, SCHEDULES, "of the learning rate: cosine falls until --steps"),
        FLOAT("final-learning-rate", "LR", &s->final_learning_rate, 0, 1e38, "at the end of a cosine"),
        FLOAT("momentum", "X", &s->momentum, 0, 0.9999999, "of sgd; 0: none"),
        FLOAT("beta1", "X", &s->adam.beta1, 0, 0.9999999, "of adam: decay of the first moment"),
        FLOAT("beta2", "X", &s->adam.beta2, 0, 0.9999999, "of adam: decay of the second moment"),
        FLOAT("eps", "X", &s->adam.eps, 1e-30, 1, "of adam: added to the denominator"),
    };
    const Option after[] = {
        GROUP("Arithmetic, as the authors' program has it"),
        CHOICE("arithmetic", "WHOSE", &s->arithmetic, ARITHMETICS,
               "authors: all of the next six, and gains aren't quantized. The FP32 twin has none of them"),
        FLAG("bf16-layernorm", &s->parts.layernorm,
             "compute layernorm in BF16, each operation rounded, away from zero at ties"),
        FLAG("bf16-activation", &s->parts.activation, "compute gelu and relu likewise"),
        FLAG("bf16-linear", &s->parts.linear,
             "round operands to BF16 before they are quantized, and outputs and both gradients after"),
        FLAG("fp32-stream", &s->fp32_stream, "keep the residual stream, and what layers pass on, in FP32"),
        FLAG("norm-bias-gradient", &s->norm_bias_gradient, "train layernorm's biases"),
        FLAG("quantize-teacher", &s->quantize_teacher, "compute the teacher as the student is, too"),
        GROUP("Length"),
        INT("steps", "N", &s->steps, 1, many, "optimizer steps, those before a loaded state too"),
        FLOAT("diverged-at", "X", &s->diverged_at, 1, 1e30, "stop when the loss is over X times the first one"),
        FLAG("keep-going", &s->keep_going, "don't stop there, only where the loss isn't finite"),
        GROUP("Output"),
        STRING("out-dir", "DIR", &s->out_dir, "for log.jsonl and states"),
        INT("log-every", "STEPS", &s->log_every, 1, many, "between lines of the log; spikes are counted in every step"),
        REPEATED("save-at", "STEP", &s->save_at, "save the state in DIR/step_STEP.safetensors; may be repeated"),
        INT("save-every", "STEPS", &s->save_every, 0, many, "between such states; 0: only those of --save-at"),
        INT("keep-states", "N", &s->keep_states, 0, many, "newest of --save-every's states that are kept; 0: all"),
        FLAG(
            "resume", &s->resume,
            "go on from the newest state in --out-dir; a run that was cut off before its first starts anew, with the options that it had"),
        STRING("load", "FILE", &s->load,
               "start from a state; what is trained, on what, is as in it, the recipe as the options say"),
        GROUP("Diagnostics"),
        INT("gradient-bias-every", "STEPS", &s->gradient_bias_every, 0, many,
            "between comparisons of the gradient with the exact FP32 one of the same weights and batch; 0: none"),
        INT("twin-every", "STEPS", &s->twin_every, 0, many,
            "between comparisons of the gradient with that of an FP32 twin, which is trained beside the student from "
            "the same weights on the same samples: the paper's zeta; 0: no twin"),
        INT("stats-every", "STEPS", &s->stats_every, 0, many,
            "between quantization statistics of gains, activations, weights and gradients by layer; 0: none"),
        GROUP("Other"),
        NAME("device", "NAME", &s->device, DEVICES, "auto: a GPU where there is one that can be used"),
        INT("threads", "N", &s->threads, 0, 4096, "CPU threads; 0: as many as there are cores (or OMP_NUM_THREADS)"),
    };
    _Static_assert(COUNT(before) + MAX_RECIPE_OPTIONS + COUNT(after) <= MAX_OPTIONS, "raise MAX_OPTIONS");
    memcpy(table, before, sizeof(before));
    int count = COUNT(before);
    count += recipe_options(table + count, &s->recipe, false);
    memcpy(table + count, after, sizeof(after));
    return count + COUNT(after);
}

static const char USAGE[] =
    "usage: proxy --out-dir DIR [options]\n"
    "       proxy --load DIR/step_STEP.safetensors --out-dir OTHER_DIR [options]\n\n"
    "Trains a residual MLP on a fixed random teacher, with linear layers as --recipe says: the proxy of\n"
    "arXiv:2506.20752. The same seed gives the same weights and samples under every recipe, so that runs are\n"
    "twins. The defaults are the paper's reference case with the teacher of its text, but for two things: the\n"
    "case has --quantize-ln-affine, and the text no --label-noise, which is the authors' program's.\n\n"
    "Example:\n"
    "  build/proxy --label-noise 0 --quantize-ln-affine --out-dir runs/mx\n"
    "  build/proxy --label-noise 0 --recipe fp32 --out-dir runs/fp32\n"
    "  .venv/bin/python scripts/plot.py runs/mx runs/fp32 --out both.png\n\n"
    "Exit codes: 0 done, also where training diverged, which the log says; 2 bad input, or a file that can't\n"
    "be written.\n";

// What the options add up to

typedef struct {
    int64_t step; // updates that were made
    int64_t spikes;
    double first_loss, last_loss; // of steps 0 and step - 1
} Progress;

typedef struct {
    Settings settings;
    Option options[MAX_OPTIONS];
    int num_options;
    Recipe recipe;
    const Backend *backend, *student_backend;
    Progress progress;
    int64_t first_step;
    ProxyModel student, teacher;
    ProxyModel exact; // the student in FP32, where the gradient's bias is wanted
    ProxyModel twin;  // trained beside it in FP32, with --twin-every
    float *samples;   // (B, width) on the host
    Tensor x, noise;  // (B, width) FP32
    Tensor target;    // the teacher's output, with noise
    QuantStats *stats;
    Logger logger;
    int64_t log_position; // of a run that is resumed: where its state's line ends in the log; 0: it has no state
    bool has_ended;       // of a run that is resumed: its log has an end
    double seconds;
} Run;

// Returns whether an option is saved with a state: the settings of model, data and optimizer, which
// stand before the recipe's.
static bool is_saved(const Run *run, const Option *option) {
    return option->type != OPTION_GROUP && (const char *)option->value < (const char *)&run->settings.recipe;
}

static void check_same_option(const Option *option, const char *saved, const char *path) {
    char *given = option_text(option, 0);
    if (strcmp(given, saved) != 0) {
        die("--%s %s was given, but '%s' was trained with %s: leave the option out, or load another state",
            option->name, given, path, saved);
    }
    free(given);
}

// Returns what a state says of `key`.
static const char *saved_text(const SafetensorsFile *file, const char *key) {
    const char *text = safetensors_metadata(file, key);
    if (!text) die("'%s' is no state of the proxy: it doesn't say its %s", file->path, key);
    return text;
}

// What is trained, on what, is as in the state; only the learning rate may be another.
static void options_from_state(Run *run, const SafetensorsFile *file) {
    for (int i = 0; i < run->num_options; i++) {
        Option *option = &run->options[i];
        if (!is_saved(run, option)) continue;
        const char *saved = saved_text(file, option->name);
        if (!option->was_set) option_set(option, saved, OR_DIE);
        bool may_differ = strcmp(option->name, "learning-rate") == 0;
        if (!may_differ) check_same_option(option, saved, file->path);
    }
}

static void plan_backend(Run *run) {
    const Settings *s = &run->settings;
    Error no_gpu;
    if (s->threads) omp_set_num_threads((int)s->threads);
    run->backend = backend_cpu();
    if (strcmp(s->device, "cpu") == 0) return;
    const Backend *cuda = backend_cuda(MX_GEMM_AUTO, &no_gpu);
    if (cuda) run->backend = cuda;
    if (run->backend == backend_cpu() && strcmp(s->device, "cuda") == 0) {
        die("--device cuda: %s; or use --device cpu", no_gpu.message);
    }
}

// What a device multiplies natively is compared with the emulation before it is trusted.
static void check_native(const Run *run) {
    char text[512];
    SelfCheck seen = run->backend->self_check(recipe_scalings(&run->recipe), text, sizeof(text));
    if (seen == SELF_CHECK_PASSED) return;
    if (seen == SELF_CHECK_FAILED) {
        die("GEMMs of quantized operands can't be trusted on this GPU: %s; use --device cpu", text);
    }
    fprintf(stderr, "proxy: native GEMMs can't be trusted and aren't used: %s\n", text);
}

// Refuses what is no step, and steps that were given and never come. What a resumed run was given
// before may lie behind it, or behind its present --steps. A number that is too large for strtol
// becomes its largest, which is over --steps too.
static void check_save_at(const Run *run) {
    const Settings *s = &run->settings;
    bool given = options_given(run->options, run->num_options, &s->save_at);
    for (int i = 0; i < s->save_at.count; i++) {
        char *end;
        const char *text = s->save_at.items[i];
        int64_t step = strtol(text, &end, 10);
        if (*end || step < 1) die("--save-at takes a step, such as 4500, not '%s'", text);
        if (given && step > s->steps) {
            die("--save-at %s comes after the last step, --steps %ld: save earlier, or give more --steps", text,
                s->steps);
        }
        if (given && step <= run->progress.step && run->log_position == 0) {
            die("--save-at %s comes before this run, which goes on from step %ld: save later, or leave it out", text,
                run->progress.step);
        }
    }
}

static void check_steps(const Run *run) {
    const Settings *s = &run->settings;
    int64_t step = run->progress.step;
    check_save_at(run);
    if (s->schedule && s->learning_rate == 0) {
        die("--schedule cosine takes a --learning-rate above 0, from which it goes to --final-learning-rate");
    }
    // A run that was cut off behind its last state has but to log its end.
    bool lacks_end = run->log_position > 0 && !run->has_ended;
    if (step < s->steps || (step == s->steps && lacks_end)) return;
    die("'%s' has made %ld steps already: give --steps more than that", s->load, step);
}

// Both draw their weights from the same streams.
static void check_seeds(const Settings *s) {
    if (s->seed != s->teacher_seed) return;
    die("--seed %ld is the teacher's too, and the student would begin with weights of the teacher: choose another "
        "--seed or --teacher-seed",
        s->seed);
}

// Refuses options that change nothing without another one. A default takes back what a state brings
// of the optimizer's and of --keep-states.
static void check_effects(const Run *run) {
    const Settings *s = &run->settings;
    bool is_adam = s->optimizer == OPTIMIZER_ADAM;
    const struct {
        const void *value;
        const char *needs;
        bool has_effect;
    } rows[] = {{&s->config.heads, "--attention", s->config.attention},
                {&s->config.seq_len, "--attention", s->config.attention},
                {&s->final_learning_rate, "--schedule cosine", s->schedule},
                {&s->momentum, "--optimizer sgd", !is_adam || s->momentum == 0},
                {&s->adam.beta1, "--optimizer adam", is_adam || s->adam.beta1 == DEFAULTS.adam.beta1},
                {&s->adam.beta2, "--optimizer adam", is_adam || s->adam.beta2 == DEFAULTS.adam.beta2},
                {&s->adam.eps, "--optimizer adam", is_adam || s->adam.eps == DEFAULTS.adam.eps},
                {&s->keep_states, "--save-every", s->save_every || s->keep_states == 0},
                {&s->parts.layernorm, "--layernorm", s->config.layernorm || !s->parts.layernorm},
                {&s->norm_bias_gradient, "--layernorm", s->config.layernorm || s->norm_bias_gradient},
                {&s->diverged_at, "--no-keep-going", !s->keep_going}};
    for (int i = 0; i < COUNT(rows); i++) {
        const Option *option = options_find_value(run->options, run->num_options, rows[i].value);
        if (rows[i].has_effect || !option->was_set) continue;
        die("--%s changes nothing without %s: give that too, or leave it out", option->name, rows[i].needs);
    }
}

static ProxyConfig teacher_config(const Settings *s) {
    ProxyConfig config = s->config;
    config.layernorm = false;
    config.is_plain = s->teacher == TEACHER_PLAIN;
    return config;
}

static const AuthorsOps *authors_ops(const Backend *backend) {
#ifdef HAVE_CUDA
    if (backend != backend_cpu()) return &authors_on_cuda;
#endif
    (void)backend; // without CUDA there is one alone
    return &authors_on_cpu;
}

// Makes of --arithmetic authors its parts, and of these the student's backend.
static void plan_arithmetic(Run *run) {
    Settings *s = &run->settings;
    if (s->arithmetic == ARITHMETIC_AUTHORS) {
        s->parts = (AuthorsArithmetic){.layernorm = true, .activation = true, .linear = true};
        s->fp32_stream = s->quantize_teacher = true;
        s->norm_bias_gradient = false;
    }
    if (s->arithmetic == ARITHMETIC_AUTHORS && s->recipe.quantize_norm_gains) {
        die("--arithmetic authors never quantizes gains: leave --quantize-ln-affine out");
    }
    if (s->parts.activation && s->config.activation > ACTIVATION_RELU) {
        die("--bf16-activation is for gelu and relu: choose one of them, or leave it out");
    }
    s->parts.no_norm_biases = !s->norm_bias_gradient;
    if (s->fp32_stream) run->recipe.activation_dtype = FORMAT_FP32;
    run->student_backend = run->backend;
    bool ours = !s->parts.layernorm && !s->parts.activation && !s->parts.linear && !s->parts.no_norm_biases;
    if (ours) return;
    if (recipe_is_scaled(&run->recipe) || recipe_has_encoding(&run->recipe)) {
        die("the authors' arithmetic knows MX with elements rounded to nearest alone, which recipe %s isn't as given: "
            "leave out one",
            run->recipe.name);
    }
    run->student_backend = authors_backend(run->backend, authors_ops(run->backend), s->parts);
}

// The teacher's recipe; its output is FP32 always.
static Recipe teacher_recipe(const Run *run) {
    Recipe recipe = run->settings.quantize_teacher ? run->recipe : recipe_exact();
    recipe.activation_dtype = FORMAT_FP32;
    return recipe;
}

static void check_memory(const Run *run, const Recipe *of_teacher) {
    const Settings *s = &run->settings;
    const Recipe fp32 = recipe_exact();
    ProxyConfig teacher = teacher_config(s);
    double needed = (double)proxy_memory(&s->config, &run->recipe, run->backend, s->batch_size, true) +
                    (double)proxy_memory(&teacher, of_teacher, run->backend, s->batch_size, false);
    if (s->twin_every) needed += (double)proxy_memory(&s->config, &fp32, run->backend, s->batch_size, true);
    if (s->gradient_bias_every) needed += (double)proxy_exact_memory(&s->config, run->backend, s->batch_size);
    double available = run->backend->available_memory();
    char need[32], have[32];
    if (needed > available) {
        die("this needs %s of memory and %s are available: choose a smaller --batch-size, --width or --layers",
            human_bytes(need, needed), human_bytes(have, available));
    }
}

static void create_models(Run *run) {
    const Settings *s = &run->settings;
    const Recipe fp32 = recipe_exact(), of_teacher = teacher_recipe(run);
    ProxyConfig teacher = teacher_config(s);
    check_memory(run, &of_teacher);
    proxy_create(&run->teacher, &teacher, &of_teacher, s->quantize_teacher ? run->student_backend : run->backend,
                 s->batch_size, false);
    proxy_init(&run->teacher, INIT_KAIMING_UNIFORM, (uint64_t)s->teacher_seed);
    proxy_create(&run->student, &s->config, &run->recipe, run->student_backend, s->batch_size, true);
    if (s->twin_every) proxy_create(&run->twin, &s->config, &fp32, run->backend, s->batch_size, true);
    if (s->gradient_bias_every) proxy_create_exact(&run->exact, &run->student, run->backend);
    int64_t count = s->batch_size * s->config.width;
    run->samples = allocate((size_t)count * sizeof(float));
    Tensor *const tensors[] = {&run->x, &run->noise};
    for (int i = 0; i < 2; i++) {
        void *memory = run->backend->allocate((size_t)count * sizeof(float));
        *tensors[i] = tensor_make(memory, FORMAT_FP32, s->batch_size, s->config.width);
    }
    run->stats = allocate((size_t)run->student.branches.count * 2 * NUM_GEMM_OPERANDS * sizeof(QuantStats));
}

static void free_models(Run *run) {
    proxy_free(&run->student);
    proxy_free(&run->teacher);
    if (run->exact.memory) proxy_free(&run->exact);
    if (run->twin.memory) proxy_free(&run->twin);
    run->backend->release(run->x.data);
    run->backend->release(run->noise.data);
    free(run->samples);
    free(run->stats);
}

// States: masters and moments, what was trained, how far

enum { TENSORS_PER_PARAM = 3, NAME_BYTES = 112 };

// One tensor of a state: of a parameter of the student, or of the twin.
typedef struct {
    char name[NAME_BYTES];
    const Param *param;
    float *data;
} StateTensor;

static int count_state_tensors(const Run *run) {
    return (run->student.params.count + run->twin.params.count) * TENSORS_PER_PARAM;
}

static StateTensor state_tensor(const Run *run, int i) {
    static const char *const KINDS[] = {"master", "moment1", "moment2"};
    int which = i % TENSORS_PER_PARAM, number = i / TENSORS_PER_PARAM, own = run->student.params.count;
    const Param *p = number < own ? &run->student.params.params[number] : &run->twin.params.params[number - own];
    float *const all[] = {p->master, p->moment1, p->moment2};
    StateTensor tensor = {.param = p, .data = all[which]};
    snprintf(tensor.name, NAME_BYTES, "%s%s.%s", number < own ? "" : "twin.", KINDS[which], p->name);
    return tensor;
}

static void free_texts(char **texts) {
    for (char **text = texts; *text; text++) {
        free(*text);
    }
    free(texts);
}

// key, value, ..., NULL
static char **state_metadata(const Run *run) {
    char **texts = allocate((2 * MAX_OPTIONS + 16) * sizeof(*texts));
    int n = 0;
    const Progress *progress = &run->progress;
    texts[n++] = format_string("step");
    texts[n++] = format_string("%ld", progress->step);
    texts[n++] = format_string("spikes");
    texts[n++] = format_string("%ld", progress->spikes);
    texts[n++] = format_string("first_loss");
    texts[n++] = format_string("%.17g", progress->first_loss);
    texts[n++] = format_string("last_loss");
    texts[n++] = format_string("%.17g", progress->last_loss);
    for (int i = 0; i < run->num_options; i++) {
        if (!is_saved(run, &run->options[i])) continue;
        texts[n++] = format_string("%s", run->options[i].name);
        texts[n++] = option_text(&run->options[i], 0);
    }
    return texts;
}

static void write_state(const Run *run, const char *path) {
    char **metadata = state_metadata(run);
    int count = count_state_tensors(run);
    SafetensorsWriter *writer = safetensors_create(path, (const char *const *)metadata, OR_DIE);
    free_texts(metadata);
    for (int i = 0; i < count; i++) {
        StateTensor tensor = state_tensor(run, i);
        const int64_t shape[] = {tensor.param->rows, tensor.param->cols};
        safetensors_add(writer, tensor.name, "F32", 2, shape);
    }
    safetensors_begin_data(writer);
    for (int i = 0; i < count; i++) {
        StateTensor tensor = state_tensor(run, i);
        size_t bytes = (size_t)param_count(tensor.param) * sizeof(float);
        float *host = allocate(bytes);
        run->backend->copy_to_host(host, tensor.data, bytes);
        safetensors_write(writer, host, bytes);
        free(host);
    }
    safetensors_finish(writer, OR_DIE);
}

static void read_weights(const Run *run, const SafetensorsFile *file) {
    for (int i = 0; i < count_state_tensors(run); i++) {
        StateTensor tensor = state_tensor(run, i);
        const SafetensorsEntry *entry = safetensors_find(file, tensor.name);
        if (!entry || entry->num_elements != param_count(tensor.param)) {
            die("'%s' is no state of this run: it has no %s of %ld x %ld", file->path, tensor.name, tensor.param->rows,
                tensor.param->cols);
        }
        size_t bytes = (size_t)param_count(tensor.param) * sizeof(float);
        float *host = allocate(bytes);
        safetensors_read_fp32(file, entry, host, OR_DIE);
        run->backend->copy_to_device(tensor.data, host, bytes);
        free(host);
    }
}

static Progress read_progress(const SafetensorsFile *file) {
    Progress p;
    if (sscanf(saved_text(file, "step"), "%ld", &p.step) != 1 || p.step < 0 ||
        sscanf(saved_text(file, "spikes"), "%ld", &p.spikes) != 1 ||
        sscanf(saved_text(file, "first_loss"), "%lf", &p.first_loss) != 1 ||
        sscanf(saved_text(file, "last_loss"), "%lf", &p.last_loss) != 1) {
        die("'%s' is no state of the proxy: its step or losses aren't numbers", file->path);
    }
    return p;
}

// The log

// Ends the program where a log couldn't be written to.
static void check_log(const Run *run) {
    if (run->logger.failed) exit(EXIT_BAD_INPUT);
}

static void log_config(Run *run) {
    char device[1024];
    JsonWriter *w = logger_begin_event(&run->logger, "config", run->progress.step);
    json_write_string(w, "program", "proxy");
    char *command = options_command_line(run->options, run->num_options, "build/proxy");
    json_write_string(w, "command", command);
    free(command);
    run->backend->describe(device, sizeof(device));
    json_write_string(w, "device", device);
    json_write_int64(w, "parameters", param_list_count(&run->student.params));
    recipe_write_json(&run->recipe, w);
    json_begin_object(w, "options");
    options_write_json(run->options, run->num_options, w);
    json_end_object(w);
    logger_end_event(&run->logger);
    logger_message(&run->logger, "device   %s", device);
    logger_message(&run->logger, "model    %.1fM parameters: %ld layers, %ld wide, %s, layernorm %s%s",
                   (double)param_list_count(&run->student.params) / 1e6, run->settings.config.layers,
                   run->settings.config.width, ACTIVATION_NAMES[run->settings.config.activation],
                   run->settings.config.layernorm ? "on" : "off", run->settings.config.attention ? ", attention" : "");
    RecipeEffects effects = proxy_recipe_effects(&run->settings.config, &run->recipe);
    recipe_print(&run->recipe, &effects, stdout);
}

static double learning_rate_now(const Run *run) {
    const Settings *s = &run->settings;
    if (s->schedule == 0) return s->learning_rate;
    Schedule cosine = {.kind = SCHEDULE_COSINE,
                       .learning_rate = s->learning_rate,
                       .total_steps = s->steps,
                       .final_lr_fraction = s->final_learning_rate / s->learning_rate};
    return learning_rate_at(&cosine, run->progress.step);
}

typedef struct {
    double loss, gradient_norm, seconds;
    bool is_spike;
} StepResult;

static void log_step(Run *run, const StepResult *result) {
    int64_t step = run->progress.step;
    if (step % PRINT_EVERY == 0 || result->is_spike) {
        logger_message(&run->logger, "step %ld/%ld  loss %.4g  norm %.4g  %.0f ms%s", step, run->settings.steps,
                       printable(result->loss), printable(result->gradient_norm), 1000 * result->seconds,
                       result->is_spike ? "  spike" : "");
    }
    if (step % run->settings.log_every != 0 && !result->is_spike) return;
    JsonWriter *w = logger_begin_event(&run->logger, "train", step);
    json_write_double(w, "loss", result->loss);
    json_write_double(w, "grad_norm", result->gradient_norm);
    if (!isfinite(result->loss) || !isfinite(result->gradient_norm)) json_write_bool(w, "finite", false);
    json_write_double(w, "learning_rate", learning_rate_now(run));
    if (result->is_spike) json_write_bool(w, "spike", true);
    json_write_double(w, "seconds", result->seconds);
    logger_end_event(&run->logger);
}

static void log_end(Run *run, const char *reason) {
    const Progress *progress = &run->progress;
    int64_t steps = progress->step - run->first_step;
    double flops = proxy_gemm_flops(&run->student) + proxy_gemm_flops(&run->teacher);
    double speed = run->seconds > 0 ? flops * (double)steps / run->seconds : NAN;
    logger_message(&run->logger, "step %ld: end (%s); %ld spikes; %.0f s, %.0f GFLOP/s", progress->step, reason,
                   progress->spikes, run->seconds, speed / 1e9);
    JsonWriter *w = logger_begin_event(&run->logger, "end", progress->step);
    json_write_string(w, "reason", reason);
    json_write_int64(w, "spikes", progress->spikes);
    json_write_double(w, "first_loss", progress->first_loss);
    json_write_double(w, "last_loss", progress->last_loss);
    json_write_double(w, "seconds", run->seconds);
    json_write_double(w, "gemm_flops_per_second", speed);
    logger_end_event(&run->logger);
}

// Training

static bool due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

static void copy_normal(Run *run, Tensor tensor, double scale, uint64_t streams) {
    int64_t count = tensor.rows * tensor.cols;
    data_normal(run->samples, count, (float)scale, (uint64_t)run->settings.seed,
                streams + (uint64_t)run->progress.step);
    run->backend->copy_to_device(tensor.data, run->samples, (size_t)count * sizeof(float));
}

// Makes the step's samples, and the teacher's answers to them.
static void make_batch(Run *run) {
    copy_normal(run, run->x, 1, INPUT_STREAMS);
    run->target = proxy_forward(&run->teacher, run->x);
    if (run->settings.label_noise == 0) return;
    copy_normal(run, run->noise, run->settings.label_noise, NOISE_STREAMS);
    run->backend->accumulate(run->target.data, run->noise.data, run->target.rows * run->target.cols);
}

static void collect_stats(Run *run, bool on) {
    const BranchList *list = &run->student.branches;
    if (on) memset(run->stats, 0, (size_t)list->count * 2 * NUM_GEMM_OPERANDS * sizeof(QuantStats));
    for (int i = 0; i < list->count; i++) {
        QuantStats *stats = run->stats + (int64_t)i * 2 * NUM_GEMM_OPERANDS;
        list->branches[i].first.stats = on ? stats : NULL;
        list->branches[i].second.stats = on ? stats + NUM_GEMM_OPERANDS : NULL;
    }
}

static void log_all_stats(Run *run) {
    const BranchList *list = &run->student.branches;
    for (int i = 0; i < list->count; i++) {
        const Branch *b = &list->branches[i];
        BranchNames names = proxy_branch_names(b);
        QuantEvent event = {.step = run->progress.step, .layer = i / list->per_layer};
        event.linear = names.norm;
        quant_stats_log_gains(&b->norm, &b->first.recipe, run->backend, event, &run->logger);
        event.linear = names.first;
        quant_stats_log_linear(&b->first, event, &run->logger);
        event.linear = names.second;
        quant_stats_log_linear(&b->second, event, &run->logger);
    }
}

// Logs how far the gradient is from the exact one, of the same weights and batch.
static void log_gradient_bias(Run *run) {
    int64_t layers = run->settings.config.layers;
    GradientBiases biases = {.layers = allocate((size_t)layers * sizeof(GradientBias))};
    double loss = proxy_loss_and_gradients(&run->exact, (ProxyLoss)run->settings.loss, run->x, run->target);
    gradient_bias_measure(&biases, &run->student.params, &run->exact.params, run->backend, layers);
    JsonWriter *w = logger_begin_event(&run->logger, "gradient_bias", run->progress.step);
    json_write_double(w, "exact_loss", loss);
    json_write_double(w, "exact_grad_norm", optimizer_gradient_norm(&run->exact.params, run->backend));
    json_write_double(w, "log_error_ratio", log(biases.total.error_ratio));
    gradient_bias_write(&biases, layers, w);
    logger_end_event(&run->logger);
    free(biases.layers);
}

static void update(const Run *run, ProxyModel *model, double norm) {
    const Settings *s = &run->settings;
    if (s->optimizer == OPTIMIZER_SGD) {
        optimizer_sgd_step(&model->params, model->backend, learning_rate_now(run), s->momentum);
        return;
    }
    OptimizerOptions options = s->adam;
    options.learning_rate = learning_rate_now(run);
    options.step = run->progress.step + 1;
    optimizer_step(&model->params, model->backend, options, norm);
}

// Trains the twin on the step's samples. Where it is due logs how far the student's gradient is
// from the twin's, each at its own weights.
static void train_twin(Run *run) {
    const Settings *s = &run->settings;
    int64_t layers = s->config.layers;
    GradientBiases biases = {.layers = allocate((size_t)layers * sizeof(GradientBias))};
    double loss = proxy_loss_and_gradients(&run->twin, (ProxyLoss)s->loss, run->x, run->target);
    double norm = optimizer_gradient_norm(&run->twin.params, run->backend);
    if (due(s->twin_every, run->progress.step)) {
        gradient_bias_measure(&biases, &run->student.params, &run->twin.params, run->backend, layers);
        JsonWriter *w = logger_begin_event(&run->logger, "twin", run->progress.step);
        json_write_double(w, "loss", loss);
        json_write_double(w, "grad_norm", norm);
        gradient_bias_write(&biases, layers, w);
        logger_end_event(&run->logger);
    }
    free(biases.layers);
    if (isfinite(loss) && isfinite(norm)) update(run, &run->twin, norm);
}
static bool is_asked_for(const Settings *s, int64_t step) {
    for (int i = 0; i < s->save_at.count; i++) {
        if (atoll(s->save_at.items[i]) == step) return true;
    }
    return false;
}

static void save(Run *run) {
    double start = seconds_now();
    char *path = format_string("%s/step_%06ld.safetensors", run->settings.out_dir, run->progress.step);
    write_state(run, path);
    logger_checkpoint(&run->logger, run->progress.step, path, seconds_now() - start);
    free(path);
}

// Removes the state that --keep-states has no more room for.
static void remove_old_state(const Run *run) {
    const Settings *s = &run->settings;
    int64_t old = run->progress.step - s->keep_states * s->save_every;
    if (s->keep_states == 0 || !due(s->save_every, run->progress.step) || old <= 0 || is_asked_for(s, old)) return;
    char *path = format_string("%s/step_%06ld.safetensors", s->out_dir, old);
    unlink(path);
    free(path);
}

// Why training ends with this loss, whose gradient is not applied, or NULL.
static const char *reason_to_stop(const Run *run, const StepResult *result) {
    const Settings *s = &run->settings;
    if (!isfinite(result->loss) || !isfinite(result->gradient_norm)) return "not-finite";
    if (!s->keep_going && result->loss > s->diverged_at * run->progress.first_loss) return "diverged";
    return NULL;
}

// NULL, or why this is the last step.
static const char *train_step(Run *run) {
    const Settings *s = &run->settings;
    Progress *progress = &run->progress;
    double start = seconds_now();
    bool with_stats = due(s->stats_every, progress->step);
    if (with_stats) collect_stats(run, true);
    proxy_set_draws(&run->teacher, (uint64_t)s->teacher_seed, progress->step);
    proxy_set_draws(&run->student, (uint64_t)s->seed, progress->step);
    make_batch(run);
    StepResult result = {
        .loss = proxy_loss_and_gradients(&run->student, (ProxyLoss)s->loss, run->x, run->target),
        .gradient_norm = optimizer_gradient_norm(&run->student.params, run->backend),
    };
    if (progress->step == 0) progress->first_loss = progress->last_loss = result.loss;
    result.is_spike = result.loss > SPIKE * progress->last_loss;
    if (due(s->gradient_bias_every, progress->step)) log_gradient_bias(run);
    if (with_stats) log_all_stats(run);
    if (with_stats) collect_stats(run, false);
    const char *reason = reason_to_stop(run, &result);
    if (run->twin.memory) train_twin(run);
    if (!reason) update(run, &run->student, result.gradient_norm);
    result.seconds = seconds_now() - start;
    run->seconds += result.seconds;
    log_step(run, &result);
    progress->spikes += result.is_spike;
    progress->last_loss = result.loss;
    if (!reason) progress->step++;
    return reason;
}

static void train(Run *run) {
    const Settings *s = &run->settings;
    const char *reason = NULL;
    log_config(run); // a resumed run's too: its recipe may be another
    run->first_step = run->progress.step;
    while (!reason && run->progress.step < s->steps) {
        reason = train_step(run);
        check_log(run);
        if (reason || !(is_asked_for(s, run->progress.step) || due(s->save_every, run->progress.step))) continue;
        save(run);
        check_log(run);
        remove_old_state(run);
    }
    log_end(run, reason ? reason : "steps");
    check_log(run);
}

// Resuming: from the newest state that the log has, whose line is the last one that is kept

// Takes from an event of the log, which ends at `position`, what a run goes on from: a state that
// is still there. Keeps the options that it had in `config`, and whether it has ended.
static void take_event(Run *run, JsonValue **config, JsonValue *event, int64_t position) {
    int64_t step;
    const char *kind = event ? json_string(event, "event") : NULL;
    if (kind && strcmp(kind, "config") == 0) {
        json_free(*config);
        *config = event;
        return;
    }
    if (kind && strcmp(kind, "end") == 0) run->has_ended = true;
    bool is_state = kind && strcmp(kind, "checkpoint") == 0 && json_int64(event, "step", &step);
    char *path = is_state ? format_string("%s/step_%06ld.safetensors", run->settings.out_dir, step) : NULL;
    if (path && path_exists(path)) {
        run->settings.load = path;
        run->log_position = position;
    } else {
        free(path);
    }
    json_free(event);
}

// Refuses a log of which --resume would erase what nothing makes again. What may be erased is a run
// that was cut off before its first state, or as it wrote its first line (`is_begun`).
static void check_own_log(const Run *run, const JsonValue *config, bool is_begun) {
    const char *program = config ? json_string(config, "program") : NULL, *out_dir = run->settings.out_dir;
    if (is_begun) return;
    if (!program || strcmp(program, "proxy") != 0) {
        die("'%s/log.jsonl' is no log of the proxy: choose another --out-dir", out_dir);
    }
    if (run->has_ended && run->log_position == 0) {
        die("the run in '%s' has ended and has no state to go on from: choose another --out-dir", out_dir);
    }
}

// Returns whether a log of so many bytes, whose last line this is, holds no more than the beginning
// of a run's first line.
static bool is_first_line_begun(const char *line, int64_t bytes) {
    static const char BEGINS[] = "{\"event\":\"config\"";
    size_t length = bytes < (int64_t)strlen(BEGINS) ? (size_t)bytes : strlen(BEGINS);
    return bytes == 0 ||
           ((int64_t)strlen(line) == bytes && line[bytes - 1] != '\n' && strncmp(line, BEGINS, length) == 0);
}

// Finds what a run goes on from: run->settings.load and run->log_position, where there is a state,
// and the options that aren't given, which a run that starts anew keeps too.
static void find_state(Run *run) {
    Settings *s = &run->settings;
    const char *given = s->load;
    char *path = format_string("%s/log.jsonl", s->out_dir), *line = NULL;
    FILE *log = fopen(path, "r");
    JsonValue *config = NULL;
    Error ignored;
    size_t capacity = 0;
    int64_t position = 0;
    for (ssize_t bytes; log && (bytes = getline(&line, &capacity, log)) > 0;) {
        position += bytes;
        if (line[bytes - 1] == '\n') take_event(run, &config, json_parse(line, (size_t)bytes, &ignored), position);
    }
    check_own_log(run, config, is_first_line_begun(line, position));
    const char *state = s->load;
    const JsonValue *options = config ? json_get(config, "options") : NULL;
    if (options) options_read_json(run->options, run->num_options, options, false, OR_DIE);
    if (state != given) s->load = state;
    json_free(config);
    if (log) fclose(log);
    free(line);
    free(path);
}

// Finds what a run goes on from, where --out-dir has a log. That is this run's own before it is
// read: another run might be writing it.
static void resume(Run *run) {
    const char *out_dir = run->settings.out_dir;
    char *path = format_string("%s/log.jsonl", out_dir);
    bool has_log = path_exists(path);
    free(path);
    if (!has_log) return;
    logger_open(&run->logger, out_dir, true, OR_DIE);
    find_state(run);
}

// Refuses a directory that has states and no log, which a run would overwrite.
static void check_states_have_a_log(const char *out_dir) {
    char *path = format_string("%s/log.jsonl", out_dir), *pattern = format_string("%s/step_*.safetensors", out_dir);
    glob_t found = {0};
    bool has_states = !path_exists(path) && glob(pattern, 0, NULL, &found) == 0;
    globfree(&found);
    if (has_states) {
        die("'%s' holds states whose log.jsonl is gone: put it back, or choose another --out-dir (--load starts from a "
            "state)",
            out_dir);
    }
    free(path);
    free(pattern);
}

// Opens the log of a new run. A run that is resumed has it open: drops the lines that it will make
// again.
static void open_log(Run *run) {
    const char *out_dir = run->settings.out_dir;
    if (run->logger.path) {
        logger_cut(&run->logger, run->log_position, OR_DIE);
        return;
    }
    check_states_have_a_log(out_dir);
    logger_open(&run->logger, out_dir, false, OR_DIE);
}

int main(int argc, char **argv) {
    system_reserve_streams();
    system_wait_briefly(argv);
    static Run run;
    SafetensorsFile state;
    Settings *s = &run.settings;
    *s = DEFAULTS;
    run.num_options = make_options(run.options, s);
    if (options_ask_for_help(argc, argv) || argc == 1) {
        options_print_help(run.options, run.num_options, USAGE, argc == 1 ? stderr : stdout);
        return argc == 1 ? EXIT_BAD_INPUT : 0;
    }
    options_parse(run.options, run.num_options, argc, argv, OR_DIE);
    if (!s->out_dir) die("--out-dir is missing: name a directory for the log");
    if (s->resume) resume(&run);
    if (s->load) {
        safetensors_open(&state, s->load, OR_DIE);
        options_from_state(&run, &state);
        run.progress = read_progress(&state);
    }
    recipe_from_settings(&run.recipe, &s->recipe, OR_DIE);
    proxy_config_check(&s->config, s->batch_size, OR_DIE);
    proxy_check_recipe(&s->config, &run.recipe, OR_DIE);
    check_seeds(s);
    check_effects(&run);
    check_steps(&run);
    plan_backend(&run);
    plan_arithmetic(&run);
    check_native(&run);
    proxy_check_gemms(&s->config, &run.recipe, run.backend, s->batch_size, OR_DIE);
    create_models(&run);
    if (s->load) {
        read_weights(&run, &state);
        safetensors_close(&state);
    } else {
        proxy_init(&run.student, (ProxyInit)s->init, (uint64_t)s->seed);
        if (run.twin.memory) proxy_init(&run.twin, (ProxyInit)s->init, (uint64_t)s->seed);
    }
    param_list_set_draws(&run.student.params, (uint64_t)s->seed, run.progress.step);
    param_list_set_draws(&run.teacher.params, (uint64_t)s->teacher_seed, 0);
    proxy_refresh(&run.student);
    if (run.twin.memory) param_list_set_draws(&run.twin.params, (uint64_t)s->seed, run.progress.step);
    if (run.twin.memory) proxy_refresh(&run.twin);
    proxy_refresh(&run.teacher);
    open_log(&run);
    train(&run);
    logger_close(&run.logger);
    free_models(&run);
    return 0;
}
