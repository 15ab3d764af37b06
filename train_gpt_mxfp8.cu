/*
train_gpt_mxfp8: pre-trains a GPT with MXFP8 linear layers.

Host code only, compiled as C. main is at the end: settings, what they add up to (a plan), a run.
Above it stands the run: a step, what happens between steps, its beginning and its end.
*/
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "llmc/base/system.h"         // system_wait_briefly
#include "llmc/model/gradient_bias.h" // next to the exact gradient
#include "llmc/model/not_finite.h"    // which GEMM was first
#include "llmc/model/optimizer.h"     // AdamW, Muon
#include "llmc/model/profile.h"       // where the time goes
#include "llmc/run/config_json.h"     // the model in the log
#include "llmc/run/plan.h"            // settings, and what they add up to: checkpoint, data, ranks, recipe, model
#include "llmc/run/quant_stats.h"     // what quantization does
#include "llmc/run/report.h"          // what is printed before a run
#include "llmc/run/sample.h"          // text that the model writes
#include "llmc/run/scheduler.h"       // learning rate
#include "llmc/run/task_score.h"      // which answers it finds likely

enum { BAD_STEPS_IN_A_ROW = 5 }; // of a loss or gradient norm that isn't finite, after which the run ends
static const char CHECKPOINT_IS_WHOLE[] = "the last checkpoint is whole";

static volatile sig_atomic_t stop_signal; // the last one; 0: none
static volatile sig_atomic_t stop_signals;
static bool answers_signals; // on a terminal

static void on_signal(int signal_number) {
    static const char ANSWER[] = "\nfinishing the step, then saving; Ctrl-C again gives the step up\n";
    stop_signal = signal_number;
    if (++stop_signals == 1 && answers_signals && write(STDERR_FILENO, ANSWER, sizeof(ANSWER) - 1) < 0) return;
}

// What changes in a run.
typedef struct {
    const Plan *plan;
    GPT model;
    GPT exact;      // with --gradient-bias-every: for exact gradients
    bool with_bias; // in this step
    GradientBiases biases;
    int recipe;         // the phase of the plan's schedule that the model is made for
    TrainerState state; // what a checkpoint saves beside the model
    Logger logger;
    int32_t *tokens, *targets; // one micro-batch
    QuantStats *quant_stats;   // of every layer and operand
    double start;              // of training, less what was spent before a resume
    double step_seconds;       // running mean
    int64_t profiled_steps;    // with --profile: of this process, all but its first
    double profiled_seconds;   // that these took
    int64_t first_step;        // that this process takes
    int64_t saved_step;        // of the newest checkpoint of this process, or resumed from; -1: none
    int64_t log_position;      // before an evaluation that was cut short, which a resumed run logs anew; -1: none was
    int stop_signal;           // as stop_signal, but all ranks agree on it: between steps
} Run;

// Makes data that can't be used end the run, as a log that can't be written to does, but not before
// its weights are saved.
static void check(Run *run, bool ok, const Error *error) {
    if (!ok) logger_fail(&run->logger, error);
}

// Lets ranks decide together: a signal or a failure of one is one of all, from the next step on.
static void agree(Run *run) {
    Comm *comm = run->plan->comm;
    double values[] = {run->logger.failed, stop_signal};
    comm_max_doubles(comm, values, 2);
    run->logger.failed = values[0] > 0;
    run->stop_signal = (int)values[1];
}

// Returns whether this rank stops: alone at once; among others where they agree to.
static bool stops_now(const Run *run) { return run->plan->comm->size > 1 ? run->stop_signal != 0 : stop_signal != 0; }

// Places the random numbers of stochastic rounding for a micro-batch that begins with this sample
// of the step's.
static void set_draws(Run *run, int64_t first_sample) {
    gpt_set_draws(&run->model, (uint64_t)run->plan->line.settings.seed, run->state.step, first_sample);
}

static bool load_train_batch(Run *run, int64_t first_sample) {
    const Plan *p = run->plan;
    Error error;
    check(run, blend_batch(&p->train, first_sample, p->B, run->tokens, run->targets, &error), &error);
    return !run->logger.failed;
}

static void validate(Run *run) {
    const Plan *p = run->plan;
    Error error;
    if (!p->has_val) return;
    double start = seconds_now(), sum = 0;
    int64_t windows = p->val.num_windows, steps = p->line.settings.val_steps;
    if (steps > 0 && steps <= windows / p->B) windows = steps * p->B;
    for (int64_t first = p->comm->rank * p->B; first < windows; first += p->comm->size * p->B) {
        int64_t count = min_int64(windows - first, p->B);
        if (stops_now(run)) break;
        check(run, dataloader_batch(&p->val, first, count, run->tokens, run->targets, &error), &error);
        if (run->logger.failed) break;
        set_draws(run, first);
        sum += gpt_loss(&run->model, run->tokens, run->targets, count, p->T) * (double)count;
    }
    agree(run);
    if (stops_now(run) || run->logger.failed) return;
    comm_sum_doubles(p->comm, &sum, 1);
    double loss = sum / (double)windows;
    TrainerState *state = &run->state;
    if (isfinite(loss) && !(loss >= state->best_val_loss)) state->best_val_loss = loss;
    logger_val(&run->logger, state->step, loss, seconds_now() - start);
}

static bool due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

static void log_task(Run *run, const TaskScore *task) {
    char accuracy[64] = "";
    JsonWriter *w = logger_begin_event(&run->logger, "eval", run->state.step);
    json_write_string(w, "task", task->task);
    json_write_int64(w, "questions", task->questions);
    if (task->is_choice) {
        json_write_double(w, "accuracy", task->accuracy);
        json_write_double(w, "accuracy_by_characters", task->accuracy_by_characters);
        snprintf(accuracy, sizeof(accuracy), " accuracy %.1f %%, by characters %.1f %%,", 100 * task->accuracy,
                 100 * task->accuracy_by_characters);
    }
    json_write_double(w, "bits_per_byte", task->bits_per_byte);
    if (!isfinite(task->bits_per_byte)) json_write_bool(w, "finite", false);
    logger_end_event(&run->logger);
    logger_message(&run->logger, "step %ld: %s:%s %.4f bits per byte", run->state.step,
                   task->task[0] ? task->task : "requests", accuracy, printable(task->bits_per_byte));
}

// Asks the questions of --eval-requests.
static void ask_questions(Run *run) {
    const Plan *p = run->plan;
    ScoreRequests all = p->eval;
    if (all.count == 0) return;
    score_run(&all, &run->model, p->comm, &stop_signal);
    agree(run);
    if (stops_now(run) || run->logger.failed) return;
    TaskScore *tasks = allocate((size_t)all.count * sizeof(*tasks));
    int64_t count = task_scores(tasks, &all);
    for (int64_t i = 0; i < count; i++) {
        log_task(run, &tasks[i]);
    }
    free(tasks);
}

static void write_sample(Run *run) {
    const Plan *p = run->plan;
    size_t bytes;
    if (p->comm->rank > 0) {
        sample_wait(p->comm);
        return;
    }
    char *text = sample_text(p, &run->model, (uint64_t)run->state.step, NULL, &stop_signal, p->comm, &bytes);
    if (!stop_signal) logger_sample(&run->logger, run->state.step, text, bytes);
    free(text);
}

// Validates, asks and samples where it is due at this step, or at the run's end, and hasn't been
// done before a resume. Returns false where a signal or a failure cut it short: a resumed run does
// all of it again.
static bool evaluate(Run *run, bool at_end) {
    const Settings *s = &run->plan->line.settings;
    TrainerState *state = &run->state;
    bool done = state->evaluated == state->step; // what was due at this step
    if (at_end ? state->evaluated_at_end == state->step : done) return true;
    bool validates = due(s->val_every, state->step), asks = due(s->eval_every, state->step);
    bool samples = state->step > 0 && due(s->sample_every, state->step);
    int64_t log_position = logger_position(&run->logger);
    set_draws(run, 0);
    if (at_end ? !(done && validates) : validates) validate(run);
    if (at_end ? !(done && asks) : asks) ask_questions(run);
    if (at_end ? s->sample_every > 0 && !(done && samples) : samples) write_sample(run);
    agree(run);
    if (run->stop_signal || run->logger.failed) {
        run->log_position = log_position;
        return false;
    }
    state->evaluated = state->step;
    if (at_end) state->evaluated_at_end = state->step;
    return true;
}

static bool write_checkpoint(Run *run, char **path, Error *error) {
    const Plan *p = run->plan;
    bool fails = logger_is_displaced(&run->logger, error);
    run->state.log_position = run->log_position >= 0 ? run->log_position : logger_position(&run->logger);
    if (!fails && run->state.log_position < 0) {
        fails = !error_set(error, "the length of log.jsonl in '%s' can't be told: see to the disk",
                           p->line.settings.out_dir);
    }
    if (comm_any(p->comm, fails)) return fails ? false : error_set(error, "rank 0 can't save beside its log");
    run->state.seconds = seconds_now() - run->start;
    run->state.data_fingerprint = blend_fingerprint(&p->train, run->state.next_sample);
    run->state.data_hash = blend_hash(&p->train, run->state.next_sample);
    // Older checkpoints don't go for weights that the next steps may prove to be useless.
    int64_t keep = run->state.nonfinite_in_a_row > 0 ? 0 : p->line.settings.keep_checkpoints;
    if (!checkpoint_save(path, p->line.settings.out_dir, &run->model, &run->state, p->line.options, p->line.num_options,
                         p->has_tokenizer ? &p->tokenizer : NULL, keep, error)) {
        return false;
    }
    run->saved_step = run->state.step;
    comm_set_remedy(CHECKPOINT_IS_WHOLE);
    return true;
}

static void save_checkpoint(Run *run) {
    const Plan *p = run->plan;
    Error error;
    char *path = NULL;
    double start = seconds_now();
    if (comm_any(p->comm, !checkpoint_is_finite(&run->model))) {
        fprintf(stderr,
                "train_gpt_mxfp8: the weights at step %ld aren't finite, and no checkpoint is written; resume from "
                "the last one in %s, if there is one, with a lower --learning-rate\n",
                run->state.step, p->line.settings.out_dir);
        exit(EXIT_NOT_FINITE);
    }
    if (!write_checkpoint(run, &path, &error)) bad_input(&error);
    logger_checkpoint(&run->logger, run->state.step, path, seconds_now() - start);
    free(path);
}

static void log_gradient_bias(Run *run) {
    gpt_take_loss(&run->exact);
    gradient_bias_measure(&run->biases, &run->model.params, &run->exact.params, run->plan->backend,
                          run->plan->config.layers);
    JsonWriter *w = logger_begin_event(&run->logger, "gradient_bias", run->state.step);
    gradient_bias_write(&run->biases, run->plan->config.layers, w);
    logger_end_event(&run->logger);
}

// Computes the mean loss and the summed gradients of a step's micro-batches. Returns false where
// the data can't be used, or a second signal gives the step up.
static bool forward_backward(Run *run, double *loss) {
    const Plan *p = run->plan;
    gpt_clear_gradients(&run->model);
    if (run->with_bias) gpt_clear_gradients(&run->exact);
    const Comm *comm = p->comm;
    double micro_batches = (double)(p->accumulation * comm->size);
    bool given_up = false;
    for (int64_t micro = 0; micro < p->accumulation; micro++) {
        int64_t first = (micro * comm->size + comm->rank) * p->B;
        set_draws(run, first);
        if (!p->line.settings.overfit_one_batch) first += run->state.next_sample;
        bool is_last = micro + 1 == p->accumulation;
        if (!given_up) given_up = stop_signals > 1 || !load_train_batch(run, first);
        // All ranks must come to where they meet in the backward pass.
        if (is_last || p->sharding.zero == 2) given_up = comm_any(p->comm, given_up);
        if (given_up) continue;
        run->model.params.is_last_micro_batch = is_last;
        gpt_loss_and_gradients(&run->model, run->tokens, run->targets, p->B, p->T, 1 / micro_batches);
        if (run->with_bias)
            gpt_loss_and_gradients(&run->exact, run->tokens, run->targets, p->B, p->T, 1 / micro_batches);
    }
    if (given_up) return false;
    exchange_reduce(&run->model.params);
    *loss = gpt_take_loss(&run->model);
    comm_sum_doubles(p->comm, loss, 1);
    *loss /= micro_batches;
    return true;
}

// Returns why a step must not be applied, or NULL.
static const char *reason_to_skip(const Run *run, double loss, double grad_norm) {
    if (!isfinite(loss)) return "the loss isn't finite";
    if (!isfinite(grad_norm)) return "the gradient norm isn't finite";
    double z = run->plan->line.settings.skip_outliers;
    if (z > 0 && outlier_zscore(&run->state.losses, loss) > z) return "the loss is an outlier";
    if (z > 0 && outlier_zscore(&run->state.grad_norms, grad_norm) > z) return "the gradient norm is an outlier";
    return NULL;
}

// Finds the first GEMM of the step just taken whose output isn't finite, and logs it: of steps in a
// row for the first.
static void log_not_finite(Run *run) {
    const Plan *p = run->plan;
    if (run->state.nonfinite_in_a_row != 1) return;
    NotFinite at = {0};
    for (int64_t micro = 0; micro < p->accumulation && !at.found; micro++) {
        int64_t first = (micro * p->comm->size + p->comm->rank) * p->B;
        set_draws(run, first);
        if (!p->line.settings.overfit_one_batch) first += run->state.next_sample - plan_samples_per_step(p);
        if (comm_any(p->comm, !load_train_batch(run, first))) return;
        double micro_batches = (double)(p->accumulation * p->comm->size);
        at = not_finite_find(&run->model, run->tokens, run->targets, p->B, p->T, 1 / micro_batches);
    }
    JsonWriter *w = logger_begin_event(&run->logger, "not_finite", run->state.step);
    if (at.found) json_write_int64(w, "layer", at.layer);
    json_write_string(w, "linear", at.found ? LINEAR_NAMES[at.linear] : NULL);
    json_write_string(w, "gemm", at.found ? GEMM_NAMES[at.gemm] : NULL);
    if (at.found && p->comm->size > 1) json_write_int64(w, "rank", at.rank);
    logger_end_event(&run->logger);
    if (!at.found) {
        logger_message(&run->logger, "step %ld: every GEMM's output is finite; a sum or a norm isn't", run->state.step);
    } else {
        logger_message(&run->logger, "step %ld: the first output that isn't finite is that of layer %ld, %s, %s",
                       run->state.step, at.layer, LINEAR_NAMES[at.linear], GEMM_NAMES[at.gemm]);
    }
}

static double learning_rate_of_step(const Run *run) {
    const Plan *p = run->plan;
    Schedule schedule = p->line.settings.schedule;
    schedule.total_steps = p->total_steps;
    if (p->total_steps == INT64_MAX) schedule.kind = SCHEDULE_CONSTANT;
    return learning_rate_at(&schedule, run->state.step);
}

static void log_spike_begins(Run *run, double loss) {
    const TrainerState *state = &run->state;
    double growth = outlier_growth(&state->grad_norms);
    JsonWriter *w = logger_begin_event(&run->logger, "spike", state->step);
    json_write_int64(w, "count", state->spike.count);
    json_write_double(w, "loss", loss);
    json_write_double(w, "level", state->spike.level);
    json_write_double(w, "grad_norm_growth", growth);
    logger_end_event(&run->logger);
    logger_message(&run->logger, "step %ld: spike %ld, loss %.4f over %.4f; the gradient norm had grown by %+.0f %%",
                   state->step, state->spike.count, loss, state->spike.level, 100 * (growth - 1));
}

static void log_spike_ends(Run *run) {
    const TrainerState *state = &run->state;
    JsonWriter *w = logger_begin_event(&run->logger, "recovered", state->step);
    json_write_int64(w, "count", state->spike.count);
    json_write_int64(w, "steps", state->spike.steps);
    json_write_double(w, "peak", state->spike.peak);
    logger_end_event(&run->logger);
    logger_message(&run->logger, "step %ld: recovered from spike %ld after %ld step%s", state->step, state->spike.count,
                   state->spike.steps, plural(state->spike.steps));
}

// Follows the loss, before it is one of those that the next steps are compared with.
static void watch_for_spikes(Run *run, double loss) {
    Spike *spike = &run->state.spike;
    SpikeChange change = spike_follow(spike, &run->state.losses, loss);
    if (change == SPIKE_BEGINS) log_spike_begins(run, loss);
    if (change != SPIKE_ENDS) return;
    log_spike_ends(run);
    spike->steps = 0;
}

// Applies the step's gradients, unless there is a reason not to, which is returned.
static const char *update(Run *run, double loss, double grad_norm, double learning_rate) {
    const Plan *p = run->plan;
    const Settings *s = &p->line.settings;
    TrainerState *state = &run->state;
    const char *skipped = reason_to_skip(run, loss, grad_norm);
    if (!skipped) {
        double peak = s->schedule.learning_rate;
        OptimizerOptions options = s->update;
        options.learning_rate = learning_rate;
        options.muon.learning_rate *= peak > 0 ? learning_rate / peak : 0;
        options.step = state->step - state->skipped + 1;
        gpt_make_scales(&run->model);
        optimizer_step(&run->model.params, p->backend, options, grad_norm);
    }
    watch_for_spikes(run, loss);
    // Skipped steps count too: a lasting change of level is then an outlier for a while, not for
    // ever.
    outlier_add(&state->losses, loss);
    outlier_add(&state->grad_norms, grad_norm);
    bool finite = isfinite(loss) && isfinite(grad_norm);
    state->nonfinite_in_a_row = finite ? 0 : state->nonfinite_in_a_row + 1;
    state->skipped += skipped != NULL;
    state->next_sample += plan_samples_per_step(p);
    return skipped;
}

// Returns the seconds that are left, by the mean step and by the clock.
static double seconds_left(Run *run, double seconds) {
    const Plan *p = run->plan;
    // The first step says little about later ones: it also makes what they reuse.
    double newest = run->state.step - run->first_step <= 1 ? 1 : 0.1;
    run->step_seconds += newest * (seconds - run->step_seconds);
    double steps = (double)(p->total_steps - run->state.step - 1), minutes = p->line.settings.max_minutes;
    double by_steps = p->total_steps == INT64_MAX ? INFINITY : steps * run->step_seconds;
    double by_clock = minutes > 0 ? 60 * minutes - (seconds_now() - run->start) : INFINITY;
    return fmin(by_steps, by_clock);
}

static void train_step(Run *run) {
    const Plan *p = run->plan;
    const Settings *s = &p->line.settings;
    TrainerState *state = &run->state;

    // What is measured in this step
    bool profiled = s->profile && state->step > run->first_step;
    profile_count(profiled);
    double start = seconds_now();
    int64_t sent_before = p->comm->bytes_sent;
    bool with_stats = due(s->quant_stats_every, state->step);
    if (with_stats) quant_stats_collect(&run->model, run->quant_stats);
    run->with_bias = due(s->gradient_bias_every, state->step);

    // Gradients and update
    double loss;
    if (!forward_backward(run, &loss)) return;
    gpt_add_amaxes(&run->model);
    if (run->with_bias) log_gradient_bias(run);
    double grad_norm = optimizer_gradient_norm(&run->model.params, p->backend);
    double learning_rate = learning_rate_of_step(run);
    const char *skipped = update(run, loss, grad_norm, learning_rate);

    // Log
    double seconds = seconds_now() - start, tokens = (double)(plan_samples_per_step(p) * p->T);
    profile_count(false);
    run->profiled_steps += profiled;
    run->profiled_seconds += profiled ? seconds : 0;
    TrainEvent event = {.step = state->step,
                        .total_steps = p->total_steps == INT64_MAX ? 0 : p->total_steps,
                        .tokens = state->next_sample * p->T,
                        .loss = loss,
                        .grad_norm = grad_norm,
                        .learning_rate = learning_rate,
                        .tokens_per_second = tokens / seconds,
                        .seconds = seconds,
                        .gemm_fraction = gpt_flops_per_token(&p->config, p->T) * tokens / seconds / p->gemm_flops,
                        .seconds_left = seconds_left(run, seconds),
                        .bytes_sent = p->comm->bytes_sent - sent_before,
                        .skipped = skipped};
    logger_train(&run->logger, &event);
    if (with_stats) { // before what isn't finite is looked for, which computes the step again
        quant_stats_log(&run->model, run->quant_stats, &run->logger, state->step);
        quant_stats_collect(&run->model, NULL);
    }
    if (!isfinite(loss) || !isfinite(grad_norm)) log_not_finite(run);
    if (skipped && run->model.recipe.delayed.length > 0) {
        gpt_make_scales(&run->model);
        gpt_refresh(&run->model); // copies with the new scales, which a resumed run would have
    }
    state->step++;
}

// Returns the name of the last signal; NULL: none came.
static const char *stop_signal_name(const Run *run) {
    int signal_number = run->stop_signal;
    if (!signal_number) return NULL;
    return signal_number == SIGINT ? "SIGINT" : signal_number == SIGTERM ? "SIGTERM" : "SIGHUP";
}

// Returns which limit made the number of steps what it is.
static const char *reason_of_length(const Plan *p) {
    const Settings *s = &p->line.settings;
    if (s->max_steps == p->total_steps) return "max-steps";
    if (s->max_tokens && plan_steps_of_tokens(p, s->max_tokens) == p->total_steps) return "max-tokens";
    return s->epochs > 0 ? "epochs" : "epoch";
}

// Returns why the run ends after the steps taken so far, or NULL.
static const char *reason_to_stop(Run *run) {
    const Plan *p = run->plan;
    agree(run);
    if (run->logger.failed) return "failed";
    if (run->state.nonfinite_in_a_row >= BAD_STEPS_IN_A_ROW) return "not-finite";
    if (run->stop_signal) return stop_signal_name(run);
    if (run->state.step >= p->total_steps) return reason_of_length(p);
    double minutes = p->line.settings.max_minutes;
    return comm_any(p->comm, minutes > 0 && seconds_now() - run->start >= 60 * minutes) ? "max-minutes" : NULL;
}

static void log_config(Run *run) {
    const Plan *p = run->plan;
    const GPTConfig *c = &p->config;
    char device[1024];
    JsonWriter *w = logger_begin_event(&run->logger, "config", run->state.step);
    json_write_string(w, "program", "train_gpt_mxfp8");
    char *command = options_command_line(p->line.options, p->line.num_options, "./train_gpt_mxfp8");
    json_write_string(w, "command", command);
    free(command);
    p->backend->describe(device, sizeof(device));
    json_write_string(w, "backend", p->backend->name);
    json_write_string(w, "device", device);
    json_write_int64(w, "world_size", p->comm->size);
    json_write_double(w, "gemm_flops_per_second", p->gemm_flops);
    json_write_double(w, "flops_per_token", gpt_flops_per_token(c, p->T));
    config_json_log(w, c);
    recipe_write_json(&p->recipe, w);
    json_begin_object(w, "options");
    options_write_json(p->line.options, p->line.num_options, w);
    json_end_object(w);
    json_write_int64(w, "train_tokens", p->train.num_tokens);
    if (!p->train.is_pattern) blend_write_json(&p->train, w);
    json_write_int64(w, "total_steps", p->total_steps == INT64_MAX ? 0 : p->total_steps);
    logger_end_event(&run->logger);
}

static void log_recipe(Run *run, const Recipe *before) {
    const Recipe *recipe = &run->model.recipe;
    JsonWriter *w = logger_begin_event(&run->logger, "recipe", run->state.step);
    recipe_write_json(recipe, w);
    json_write_string(w, "was", before->name);
    logger_end_event(&run->logger);
    logger_message(&run->logger, "step %ld: from here on recipe %s%s in place of %s%s", run->state.step, recipe->name,
                   recipe_is_adjusted(recipe) ? ", adjusted," : "", before->name,
                   recipe_is_adjusted(before) ? ", adjusted" : "");
}

// Makes the model that shares the masters of run->model.
static void create_exact(Run *run) {
    if (!run->plan->line.settings.gradient_bias_every) return;
    gpt_create_exact(&run->exact, &run->model);
}

// Switches the recipe where the next step's is another one.
static void switch_recipe(Run *run) {
    const Plan *p = run->plan;
    int next = recipe_schedule_at(&p->recipes, run->state.step);
    if (next == run->recipe) return;
    Recipe before = run->model.recipe;
    gpt_free(&run->exact);
    gpt_switch_recipe(&run->model, &p->recipes.phases[next].recipe);
    create_exact(run);
    run->recipe = next;
    log_recipe(run, &before);
}

// Logs the checkpoint that a run resumes from: that line stood after those that the checkpoint says
// are its own, and was cut.
static void log_resumed(Run *run) {
    const Plan *p = run->plan;
    JsonWriter *w = logger_begin_event(&run->logger, "checkpoint", run->state.step);
    json_write_string(w, "path", p->checkpoint);
    logger_end_event(&run->logger);
    logger_message(&run->logger, "resumed from %s", p->checkpoint);
    if (!recipe_is_same(&p->recipe, &p->previous_recipe)) log_recipe(run, &p->previous_recipe);
}

// Loads what delayed scales are made of.
static void load_amaxes(GPT *model, const char *directory) {
    if (model->recipe.delayed.length > 0) checkpoint_load_amaxes(model, directory, OR_DIE);
}

static void start_run(Run *run) {
    const Plan *p = run->plan;
    gpt_create(&run->model, p->config, &p->recipe, p->backend, p->B, p->T, true, &p->sharding);
    run->recipe = p->first_phase;
    const char *weights = p->checkpoint ? p->checkpoint : p->line.settings.init_from;
    if (!weights) gpt_init(&run->model, (GPTInit)p->line.settings.init, (uint64_t)p->line.settings.seed);
    if (weights) checkpoint_load_weights(&run->model, weights, OR_DIE);
    if (p->checkpoint) checkpoint_load_moments(&run->model, p->checkpoint, OR_DIE);
    param_list_set_draws(&run->model.params, (uint64_t)p->line.settings.seed, run->state.step - run->state.skipped);
    // Another recipe begins with a history of its own.
    if (p->checkpoint && recipe_is_same(&p->recipe, &p->previous_recipe)) load_amaxes(&run->model, p->checkpoint);
    gpt_refresh(&run->model);
    create_exact(run);
    run->biases.layers = allocate((size_t)p->config.layers * sizeof(GradientBias));
    size_t tokens = (size_t)(p->B * p->T);
    run->tokens = allocate(tokens * sizeof(int32_t));
    run->targets = allocate(tokens * sizeof(int32_t));
    run->quant_stats = quant_stats_allocate(&p->config);
}

static void report_profile(Run *run) {
    if (run->profiled_steps == 0) {
        printf("no profile: it leaves the first step out, and there was no other\n");
        return;
    }
    JsonWriter *w = logger_begin_event(&run->logger, "profile", run->state.step);
    json_write_int64(w, "steps", run->profiled_steps);
    profile_write(w, run->profiled_steps, run->profiled_seconds);
    logger_end_event(&run->logger);
    profile_print(run->profiled_steps, run->profiled_seconds);
}

// Ends a run after a failure. What has been learned is saved if it can be, and else said to be
// lost; the sentence on stderr is the failure's.
static int finish_failed_run(Run *run) {
    const Plan *p = run->plan;
    Error error;
    char *path = NULL;
    bool is_new = run->state.step > run->first_step && run->state.step != run->saved_step;
    bool worth_saving = is_new && !comm_any(p->comm, !checkpoint_is_finite(&run->model));
    if (worth_saving && write_checkpoint(run, &path, &error)) {
        printf("saved %s; go on with: ./train_gpt_mxfp8 --resume --out-dir '%s'\n", path, p->line.settings.out_dir);
    } else if (worth_saving && p->comm->rank == 0) {
        printf("the weights at step %ld are lost: %s\n", run->state.step, make_printable(error.message));
    }
    free(path);
    logger_close(&run->logger);
    return EXIT_BAD_INPUT;
}

static int finish_run(Run *run, const char *reason) {
    const Plan *p = run->plan;
    bool finite = run->state.nonfinite_in_a_row < BAD_STEPS_IN_A_ROW;
    logger_end_line(&run->logger); // what is printed from here on isn't about this step
    bool finished = finite && !run->stop_signal && evaluate(run, true);
    if (run->logger.failed) return finish_failed_run(run);
    if (finite && !finished) reason = stop_signal_name(run);
    // A resumed run that took no step has its checkpoint already.
    if (finite && run->state.step != run->saved_step) save_checkpoint(run);
    double seconds = seconds_now() - run->start;
    if (p->line.settings.profile) report_profile(run);
    logger_gemms(&run->logger, run->state.step, p->backend->gemm_counts());
    logger_finish(&run->logger, run->state.step, reason, run->state.best_val_loss, seconds);
    bool failed = run->logger.failed;
    logger_close(&run->logger);
    if (failed) return EXIT_BAD_INPUT;
    if (!finite) {
        fprintf(stderr,
                "train_gpt_mxfp8: the loss or gradient norm wasn't finite %d steps in a row; none of them was applied. "
                "Resume from the last checkpoint in %s, if there is one, with a lower --learning-rate or another "
                "--recipe\n",
                BAD_STEPS_IN_A_ROW, p->line.settings.out_dir);
        return EXIT_NOT_FINITE;
    }
    if (!finished) {
        printf("stopped by %s; go on with: ./train_gpt_mxfp8 --resume --out-dir '%s'\n", reason,
               p->line.settings.out_dir);
    } else if (p->checkpoint && run->state.step == run->first_step) {
        printf("nothing to do: the run had reached its end; give a larger --%s to go on\n",
               strcmp(reason, "epoch") == 0 ? "epochs" : reason);
    }
    return 0;
}

// Ends the program where memory that is a file's can't be read.
static void on_bus_error(int signal_number) {
    static const char WHY[] =
        "train_gpt_mxfp8: a file that lies in memory can't be read any more (SIGBUS): a token file "
        "was cut short, its disk fails, or /dev/shm is full; where there is a checkpoint, go on with "
        "--resume\n";
    ssize_t written = write(STDERR_FILENO, WHY, sizeof(WHY) - 1);
    (void)signal_number, (void)written;
    _exit(EXIT_BAD_INPUT);
}

// Makes signals end the run after the step, with a checkpoint.
static void catch_signals(void) {
    if (signal(SIGBUS, on_bus_error) == SIG_ERR) die("signal failed");
    answers_signals = isatty(STDERR_FILENO);
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    if (sigaction(SIGINT, &action, NULL) != 0 || sigaction(SIGTERM, &action, NULL) != 0) die("sigaction failed");
    // A closed terminal ends the run so too, but not under nohup, where it goes on.
    struct sigaction hangup;
    if (sigaction(SIGHUP, NULL, &hangup) != 0) die("sigaction failed");
    if (hangup.sa_handler != SIG_IGN && sigaction(SIGHUP, &action, NULL) != 0) die("sigaction failed");
    // A full disk or a file over `ulimit -f` becomes an error with a sentence.
    if (signal(SIGXFSZ, SIG_IGN) == SIG_ERR) die("signal failed");
    // Ctrl-C also ends a `| tee log`: what is printed after that is lost, but not the run.
    if (signal(SIGPIPE, SIG_IGN) == SIG_ERR) die("signal failed");
}

// Opens the log of a new run, which must not replace another's checkpoints, whose log may be gone,
// nor lie in a checkpoint, which the run that wrote it may remove.
static bool open_new_log(Logger *logger, const char *out_dir, Error *error) {
    char *weights = format_string("%s/model.safetensors", out_dir);
    bool is_checkpoint = path_exists(weights);
    free(weights);
    if (is_checkpoint) {
        return error_set(
            error,
            "'%s' holds a checkpoint's model.safetensors: choose another --out-dir for a new run; to go on "
            "with a run, give --resume and the directory that holds its checkpoints as --out-dir",
            out_dir);
    }
    if (!logger_open(logger, out_dir, false, error)) return false;
    if (!checkpoint_any(out_dir)) return true;
    unlink(logger->path); // it is empty
    return error_set(error,
                     "'%s' holds checkpoints whose log.jsonl is gone: go on with them by --resume, or choose "
                     "another --out-dir for a new run",
                     out_dir);
}

// Prints a rank's error, if it isn't another's. Returns false.
static bool refuse(bool is_another, Error *error) {
    fflush(stdout);
    if (!is_another) fprintf(stderr, "train_gpt_mxfp8: %s\n", make_printable(error->message));
    return false;
}

// Returns whether a file is there and has so many bytes. A network's file system says so anew when
// a file is opened.
static bool is_file_of(const char *path, double bytes) {
    struct stat status;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    bool same = fstat(file, &status) == 0 && (double)status.st_size == bytes;
    close(file);
    return same;
}

// Cuts a resumed run's log to where its checkpoint was. Where a launcher's variables spoke of
// another rank, though this is the only one, the log isn't open yet.
static bool open_old_log(Run *run, Error *error) {
    if (!run->logger.path && !logger_open(&run->logger, run->plan->line.settings.out_dir, true, error)) return false;
    return logger_cut(&run->logger, run->state.log_position, error);
}

// Opens the log: rank 0's, of a resumed run cut to where its checkpoint was. Returns false with a
// sentence on stderr, on all ranks together, so that nobody takes another rank for lost.
static bool open_log(Run *run) {
    const Plan *p = run->plan;
    Error error;
    const char *out_dir = p->line.settings.out_dir;
    bool opened = p->comm->rank > 0 ? logger_open_nowhere(&run->logger, &error)
                  : p->checkpoint   ? open_old_log(run, &error)
                                    : open_new_log(&run->logger, out_dir, &error);
    if (comm_any(p->comm, !opened)) return refuse(opened, &error);
    char *log = format_string("%s/log.jsonl", out_dir);
    double bytes = p->comm->rank == 0 ? (double)logger_position(&run->logger) : 0;
    comm_max_doubles(p->comm, &bytes, 1);
    bool sees =
        p->comm->size == 1 || is_file_of(log, bytes) ||
        error_set(&error,
                  "rank %d of %d doesn't see '%s', which rank 0 has made, and would lose its checkpoints: every "
                  "rank must see the same --out-dir; name it by its whole path, on a disk that all machines share",
                  p->comm->rank, p->comm->size, log);
    free(log);
    if (comm_any(p->comm, !sees)) return refuse(sees, &error);
    if (p->comm->size > 1) run->logger.in_place = false; // a launcher passes lines on
    run->logger.every = p->line.settings.log_every;
    return true;
}

static int train(Run *run) {
    const Plan *p = run->plan;
    catch_signals();
    comm_set_remedy(p->checkpoint ? CHECKPOINT_IS_WHOLE : "no checkpoint was written yet");
    start_run(run); // before the log is opened: weights that can't be loaded leave the directory as it was
    if (!open_log(run)) {
        p->comm->close(p->comm);
        return EXIT_BAD_INPUT;
    }
    if (p->comm->rank == 0) checkpoint_clean(p->line.settings.out_dir);
    log_config(run); // a resumed run's too: its options may have changed
    if (p->checkpoint) log_resumed(run);

    run->start = seconds_now() - run->state.seconds;
    const char *reason;
    while (!(reason = reason_to_stop(run))) {
        const TrainerState *state = &run->state;
        if (!evaluate(run, false)) continue; // there is a reason to stop
        // Weights that give losses that aren't finite aren't saved: older checkpoints would go for
        // them.
        bool sound = state->step > run->first_step && state->nonfinite_in_a_row == 0;
        if (sound && due(p->line.settings.checkpoint_every, state->step)) save_checkpoint(run);
        switch_recipe(run);
        train_step(run);
    }
    int code = run->logger.failed ? finish_failed_run(run) : finish_run(run, reason);
    gpt_free(&run->exact);
    gpt_free(&run->model);
    p->comm->close(p->comm);
    return code;
}

// The program

// Returns 0, the exit code of what has told all that it was asked for.
static int end_output(void) {
    if (fflush(stdout) != 0 || ferror(stdout)) die("the output can't be written: %s", strerror(errno));
    return 0;
}

// Makes a model of the weights in a directory, for B sequences at a time, that isn't trained.
static void load_model(GPT *model, const Plan *p, const char *directory, int64_t B) {
    gpt_create(model, p->config, &p->recipe, p->backend, B, p->T, false, NULL);
    checkpoint_load_weights(model, directory, OR_DIE);
    load_amaxes(model, directory);
    gpt_refresh(model);
}

static int generate(const Plan *p) {
    size_t bytes;
    GPT model;
    load_model(&model, p, p->line.settings.generate, 1);
    free(sample_text(p, &model, 0, stdout, &stop_signal, NULL, &bytes));
    putchar('\n');
    gpt_free(&model);
    return end_output();
}

static int score(const Plan *p) {
    const Settings *s = &p->line.settings;
    ScoreRequests all;
    GPT model;
    score_read(&all, s->requests, &p->tokenizer, false, OR_DIE);
    plan_check_score(p, &all);
    double start = seconds_now();
    load_model(&model, p, s->score, p->B);
    score_run(&all, &model, p->comm, &stop_signal);
    score_write(&all, stdout);
    end_output();
    if (p->comm->rank == 0) score_report(&all, p->T, seconds_now() - start, stderr);
    gpt_free(&model);
    score_free(&all);
    p->comm->close(p->comm);
    return 0;
}

static int dry_run(Plan *p) {
    report_model(p);
    if (p->line.settings.world_size > 0 && p->backend == backend_cpu()) plan_measure(p);
    bool fits = report_dry_run(p);
    p->comm->close(p->comm);
    end_output();
    return fits ? 0 : EXIT_BAD_INPUT;
}

enum { DIRECTORY_BYTES = 48 };
static char made_directory[DIRECTORY_BYTES];

// Removes the directory of a run that was refused before it wrote anything: another isn't empty.
static void remove_made_directory(void) { rmdir(made_directory); }

// Makes runs/DATE-TIME, or where a run of the same second has it runs/DATE-TIME-2 and so on.
static void make_default_out_dir(char path[DIRECTORY_BYTES]) {
    char date[24];
    time_t now = time(NULL);
    strftime(date, sizeof(date), "%Y%m%d-%H%M%S", localtime(&now));
    snprintf(path, DIRECTORY_BYTES, "runs/%s", date);
    mkdir("runs", 0777);
    for (int i = 2; mkdir(path, 0777) != 0 && errno == EEXIST; i++) {
        snprintf(path, DIRECTORY_BYTES, "runs/%s-%d", date, i);
    }
}

// Returns the directory that rank 0 makes: others' clocks may be a second away.
static const char *default_out_dir(Comm *comm) {
    char path[DIRECTORY_BYTES] = "";
    if (comm->rank == 0) {
        make_default_out_dir(path);
        memcpy(made_directory, path, sizeof(path));
        atexit(remove_made_directory);
    }
    return comm_gather(comm, path, sizeof(path));
}

int main(int argc, char **argv) {
    system_reserve_streams();
    system_wait_briefly(argv);
    static Plan plan;
    static Run run = {.plan = &plan, .saved_step = -1, .log_position = -1};
    Settings *s = &plan.line.settings;

    // Settings
    settings_init(&plan.line);
    if (options_ask_for_help(argc, argv)) return settings_print_help(&plan.line, stdout), end_output();
    settings_parse(&plan.line, argc, argv, OR_DIE);
    if (s->version) return report_version(), end_output();
    if (s->device_info) return report_device_info(), end_output();

    // Plan
    plan_model(&plan, &run.logger);
    if (s->generate) return generate(&plan);
    if (s->score) return score(&plan);
    plan_training(&plan);
    if (s->dry_run) return dry_run(&plan);
    if (!s->out_dir) s->out_dir = default_out_dir(plan.comm);
    report_model(&plan);
    plan_measure(&plan);
    report_run(&plan);
    if (s->profile) plan.backend = profile_backend(plan.backend, plan.config.layers);

    // Run
    run.state = plan.start;
    run.first_step = plan.start.step;
    if (plan.checkpoint) run.saved_step = plan.start.step;
    return train(&run);
}
