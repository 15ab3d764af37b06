#include "checkpoint.h"
#include "config_json.h"
#include "llmc/files/safetensors.h"
#include "llmc/model/muon.h" // muon_takes

#include <dirent.h>
#include <errno.h>
#include <fcntl.h> // AT_FDCWD
#include <math.h>
#include <stddef.h> // offsetof
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STATE_VERSION = 1 };

static const char TEMPORARY_PREFIX[] = ".tmp-step_";

// Parameters to and from files

// Transposes (rows, cols) to (cols, rows).
static void transpose(float *out, const float *in, int64_t rows, int64_t cols) {
    enum { TILE = 32 };
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row += TILE) {
        for (int64_t col = 0; col < cols; col++) {
            for (int64_t r = row; r < rows && r < row + TILE; r++) {
                out[col * rows + r] = in[r * cols + col];
            }
        }
    }
}

// A tensor of a file: a parameter, or a part of one.
typedef struct {
    const char *name;
    int ndim;
    int64_t shape[2], count;
} FileTensor;

static int num_file_tensors(const Param *p) { return p->num_parts ? p->num_parts : 1; }

// Returns tensor `index` of a parameter's: their data, one after the other, are the parameter's.
static FileTensor file_tensor(const Param *p, int index) {
    const char *name = p->num_parts ? p->parts[index].name : p->name;
    int64_t rows = p->num_parts ? p->parts[index].rows : p->is_vector ? p->cols : p->rows;
    if (p->is_vector) return (FileTensor){name, 1, {rows, 1}, rows};
    if (p->file_transposed) return (FileTensor){name, 2, {p->cols, rows}, rows * p->cols};
    return (FileTensor){name, 2, {rows, p->cols}, rows * p->cols};
}

// A file of parameters: of each parameter these fields, one after the other.
typedef struct {
    const char *name;
    int num_fields;
    struct {
        const char *suffix; // of the tensor's name
        size_t offset;      // in Param
    } fields[2];
} ParamFile;

static const ParamFile WEIGHTS = {"model.safetensors", 1, {{"", offsetof(Param, master)}}};
static const ParamFile MOMENTS = {
    "optimizer.safetensors", 2, {{".exp_avg", offsetof(Param, moment1)}, {".exp_avg_sq", offsetof(Param, moment2)}}};

static const ParamFile MUON_MOMENTS = {"optimizer.safetensors", 1, {{".momentum_buffer", offsetof(Param, moment1)}}};

// Returns what a file has of a parameter: Muon's has one moment.
static const ParamFile *fields_in(const ParamFile *file, const GPT *m, const Param *p) {
    return file == &MOMENTS && muon_takes(&m->params, p) ? &MUON_MOMENTS : file;
}

static float *field_of(const Param *p, size_t offset) { return *(float *const *)((const char *)p + offset); }

// Returns host memory for any parameter twice: as it is, and behind that transposed. To be freed.
static float *allocate_staging(const ParamList *list) {
    int64_t largest = 0;
    for (int i = 0; i < list->count; i++) {
        largest = max_int64(largest, param_count(&list->params[i]));
    }
    return allocate(2 * (size_t)largest * sizeof(float));
}

// Writes this rank's rows of a parameter whose data begins at `begin`; replicated ones are rank 0's
// to write. In a transposed one the rows are columns, so a part of them is written a piece at a
// time.
static bool write_own_rows(SafetensorsWriter *writer, uint64_t begin, const GPT *m, const Param *p, const float *device,
                           float *staging) {
    if (!p->is_sharded && m->params.sharding.comm->rank > 0) return true;
    size_t bytes = (size_t)(p->num_rows * p->cols) * sizeof(float);
    float *transposed = staging + param_count(p);
    m->backend->copy_to_host(staging, device, bytes);
    if (!p->file_transposed) {
        uint64_t at = begin + (uint64_t)(p->first_row * p->cols) * sizeof(float);
        return safetensors_write_at(writer, at, staging, bytes);
    }
    transpose(transposed, staging, p->num_rows, p->cols);
    int64_t num_pieces = p->num_rows == p->rows ? 1 : p->cols;
    for (int64_t col = 0; col < num_pieces; col++) {
        uint64_t at = begin + (uint64_t)(col * p->rows + p->first_row) * sizeof(float);
        const float *piece = transposed + col * p->num_rows;
        if (!safetensors_write_at(writer, at, piece, bytes / (size_t)num_pieces)) return false;
    }
    return true;
}

static void add_param(SafetensorsWriter *writer, const Param *p, const char *suffix) {
    for (int i = 0; i < num_file_tensors(p); i++) {
        FileTensor tensor = file_tensor(p, i);
        char *name = format_string("%s%s", tensor.name, suffix);
        safetensors_add(writer, name, "F32", tensor.ndim, tensor.shape);
        free(name);
    }
}

// Creates the file, or on ranks other than the first opens what that one has created.
static SafetensorsWriter *begin_file(const GPT *m, const char *path, const ParamFile *file, Error *error) {
    static const char *const METADATA[] = {"format", "pt", NULL};
    bool joins = m->params.sharding.comm->rank > 0;
    SafetensorsWriter *writer =
        joins ? safetensors_join(path, METADATA, error) : safetensors_create(path, METADATA, error);
    if (!writer) return NULL;
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        const ParamFile *of = fields_in(file, m, p);
        for (int field = 0; field < of->num_fields; field++) {
            add_param(writer, p, of->fields[field].suffix);
        }
    }
    safetensors_begin_data(writer);
    return writer;
}

static bool write_own(SafetensorsWriter *writer, const GPT *m, const ParamFile *file, float *staging, Error *error) {
    uint64_t at = 0;
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        const ParamFile *of = fields_in(file, m, p);
        for (int field = 0; field < of->num_fields; field++) {
            const float *device = field_of(p, of->fields[field].offset);
            if (!write_own_rows(writer, at, m, p, device, staging)) return safetensors_sync(writer, error);
            at += (uint64_t)param_count(p) * sizeof(float);
        }
    }
    return safetensors_sync(writer, error);
}

// Returns true where all ranks are well; else each has an error.
static bool all_agree(Comm *comm, bool ok, const char *path, Error *error) {
    bool failed = comm_any(comm, !ok);
    if (ok && failed) error_set(error, "another rank couldn't write its part of %s", path);
    return !failed;
}

// Writes a file: each rank writes its own rows, and rank 0 gives the file its name when all have.
static bool save_file(const GPT *m, const char *path, const ParamFile *file, float *staging, Error *error) {
    Comm *comm = m->params.sharding.comm;
    SafetensorsWriter *writer = NULL;
    if (comm->rank == 0) writer = begin_file(m, path, file, error);
    bool ok = all_agree(comm, comm->rank > 0 || (writer && safetensors_sync(writer, error)), path, error);
    if (ok && comm->rank > 0) writer = begin_file(m, path, file, error);
    if (ok) ok = all_agree(comm, writer && write_own(writer, m, file, staging, error), path, error);
    if (comm->rank > 0) {
        if (writer) safetensors_leave(writer);
        return ok;
    }
    if (!writer) return false;
    if (ok) safetensors_others_are_done(writer);
    Error shorter; // than declared, where a rank failed
    return safetensors_finish(writer, ok ? error : &shorter) && ok;
}

static const SafetensorsEntry *find_tensor(const SafetensorsFile *file, const char *name) {
    const SafetensorsEntry *entry = safetensors_find(file, name);
    if (entry) return entry;
    const char *dot = strchr(name, '.'); // OpenAI's files leave "transformer." out
    return dot ? safetensors_find(file, dot + 1) : NULL;
}

static bool read_tensor(float *values, const SafetensorsFile *file, const FileTensor *tensor, const char *suffix,
                        Error *error) {
    char *name = format_string("%s%s", tensor->name, suffix);
    const SafetensorsEntry *entry = find_tensor(file, name);
    size_t shape_bytes = (size_t)tensor->ndim * sizeof(tensor->shape[0]);
    bool ok = true, is_square = strcmp(suffix, ".exp_avg_sq") == 0;
    if (!entry) {
        ok = error_set(error, "%s has no tensor '%s': it is a checkpoint of another model", file->path, name);
    } else if (entry->ndim != tensor->ndim || memcmp(entry->shape, tensor->shape, shape_bytes) != 0) {
        ok = error_set(error, "%s: tensor '%s' isn't %ldx%ld: it is a checkpoint of another model", file->path, name,
                       tensor->shape[0], tensor->shape[1]);
    } else {
        ok = safetensors_read_fp32(file, entry, values, error);
    }
    for (int64_t i = 0; ok && i < tensor->count; i++) {
        if (!isfinite(values[i]) || (values[i] < 0 && is_square)) {
            ok = error_set(error, "%s: tensor '%s' holds %g, which isn't %s; take an earlier checkpoint", file->path,
                           name, (double)values[i], isfinite(values[i]) ? "a mean of squares" : "finite");
        }
    }
    free(name);
    return ok;
}

static bool read_param(const GPT *m, float *device, const SafetensorsFile *file, const Param *p, const char *suffix,
                       float *staging, Error *error) {
    float *transposed = staging + param_count(p), *at = p->file_transposed ? transposed : staging;
    for (int i = 0; i < num_file_tensors(p); i++) {
        FileTensor tensor = file_tensor(p, i);
        if (!read_tensor(at, file, &tensor, suffix, error)) return false;
        at += tensor.count;
    }
    if (p->file_transposed) transpose(staging, transposed, p->cols, p->rows);
    size_t bytes = (size_t)(p->num_rows * p->cols) * sizeof(float);
    m->backend->copy_to_device(device, staging + p->first_row * p->cols, bytes);
    return true;
}

static bool load_file(GPT *m, const char *directory, const ParamFile *params, Error *error) {
    SafetensorsFile file;
    char *path = format_string("%s/%s", directory, params->name);
    bool ok = safetensors_open(&file, path, error);
    free(path);
    if (!ok) return false;
    float *staging = allocate_staging(&m->params);
    for (int i = 0; ok && i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        const ParamFile *of = fields_in(params, m, p);
        for (int field = 0; ok && field < of->num_fields; field++) {
            float *device = field_of(p, of->fields[field].offset);
            ok = read_param(m, device, &file, p, of->fields[field].suffix, staging, error);
        }
    }
    free(staging);
    safetensors_close(&file);
    return ok;
}

bool checkpoint_load_weights(GPT *m, const char *directory, Error *error) {
    return load_file(m, directory, &WEIGHTS, error);
}

bool checkpoint_load_moments(GPT *m, const char *directory, Error *error) {
    return load_file(m, directory, &MOMENTS, error);
}

// Histories of amaxes to and from a file

static const char AMAXES[] = "amax_history.safetensors", OF_STEPS[] = ".amax_history", OF_SCALES[] = ".amax";

// Returns the name of a linear layer's tensor, to be freed.
static char *amax_name(const GPT *m, int64_t linear, const char *suffix) {
    return format_string("%s%s", gpt_linear_name(&m->config, linear).text, suffix);
}

static void add_amaxes(SafetensorsWriter *writer, const GPT *m, int64_t linear) {
    const int64_t of_steps[] = {m->recipe.delayed.length, NUM_ROLES}, of_scales[] = {NUM_ROLES};
    char *steps = amax_name(m, linear, OF_STEPS), *scales = amax_name(m, linear, OF_SCALES);
    safetensors_add(writer, steps, "F32", 2, of_steps);
    safetensors_add(writer, scales, "F32", 1, of_scales);
    free(steps);
    free(scales);
}

// Writes a ring from its oldest step on.
static void write_amaxes(SafetensorsWriter *writer, const AmaxHistory *h, int64_t length) {
    const size_t row = NUM_ROLES * sizeof(float);
    safetensors_write(writer, h->steps + h->oldest * NUM_ROLES, (size_t)(length - h->oldest) * row);
    safetensors_write(writer, h->steps, (size_t)h->oldest * row);
    safetensors_write(writer, h->amax, row);
}

// Writes what all ranks have alike.
static bool save_amaxes(GPT *m, const char *directory, Error *error) {
    char *path = format_string("%s/%s", directory, AMAXES);
    SafetensorsWriter *writer = safetensors_create(path, NULL, error);
    free(path);
    if (!writer) return false;
    for (int64_t i = 0; i < gpt_num_linears(&m->config); i++) {
        if (gpt_linear_at(m, i)->amaxes.steps) add_amaxes(writer, m, i);
    }
    safetensors_begin_data(writer);
    for (int64_t i = 0; i < gpt_num_linears(&m->config); i++) {
        const AmaxHistory *history = &gpt_linear_at(m, i)->amaxes;
        if (history->steps) write_amaxes(writer, history, m->recipe.delayed.length);
    }
    return safetensors_finish(writer, error);
}

// Reads a tensor of `count` amaxes.
static bool read_amaxes(float *amaxes, int64_t count, const SafetensorsFile *file, const char *name, Error *error) {
    const SafetensorsEntry *entry = safetensors_find(file, name);
    if (!entry || entry->num_elements != count) {
        return error_set(error,
                         "%s has no %ld amaxes '%s': it is of another model or --amax-history; give the run's, or "
                         "leave --recipe out",
                         file->path, count, name);
    }
    if (!safetensors_read_fp32(file, entry, amaxes, error)) return false;
    for (int64_t i = 0; i < count; i++) {
        if (isfinite(amaxes[i]) && amaxes[i] >= 0) continue;
        return error_set(error, "%s: tensor '%s' holds %g, which is no amax; take an earlier checkpoint", file->path,
                         name, (double)amaxes[i]);
    }
    return true;
}

static bool read_history(GPT *m, int64_t linear, const SafetensorsFile *file, Error *error) {
    Linear *l = gpt_linear_at(m, linear);
    char *steps = amax_name(m, linear, OF_STEPS), *scales = amax_name(m, linear, OF_SCALES);
    bool ok = read_amaxes(l->amaxes.steps, m->recipe.delayed.length * NUM_ROLES, file, steps, error) &&
              read_amaxes(l->amaxes.amax, NUM_ROLES, file, scales, error);
    free(steps);
    free(scales);
    return ok;
}

bool checkpoint_load_amaxes(GPT *m, const char *directory, Error *error) {
    SafetensorsFile file;
    char *path = format_string("%s/%s", directory, AMAXES);
    bool is_there = path_exists(path), ok = is_there && safetensors_open(&file, path, error);
    free(path);
    if (!is_there) {
        return error_set(error, "%s has no %s, which recipe %s makes its scales of: take fp8-current", directory,
                         AMAXES, m->recipe.name);
    }
    if (!ok) return false;
    for (int64_t i = 0; ok && i < gpt_num_linears(&m->config); i++) {
        if (gpt_linear_at(m, i)->amaxes.steps) ok = read_history(m, i, &file, error);
    }
    safetensors_close(&file);
    if (ok) gpt_make_scales(m);
    return ok;
}

bool checkpoint_read_config(GPTConfig *config, const char *directory, Error *error) {
    char *path = format_string("%s/config.json", directory);
    JsonValue *json = json_read(path, error);
    bool ok = json && config_json_read(config, json, path, error);
    json_free(json);
    free(path);
    return ok;
}

// trainer_state.json

static void write_window(JsonWriter *w, const char *key, const OutlierWindow *window) {
    json_begin_object(w, key);
    json_write_int64(w, "count", window->count);
    json_write_int64(w, "position", window->position);
    json_begin_array(w, "values");
    for (int i = 0; i < window->count; i++) {
        json_write_double(w, NULL, window->values[i]);
    }
    json_end_array(w);
    json_end_object(w);
}

static bool read_window(const JsonValue *json, const char *key, OutlierWindow *window) {
    const JsonValue *object = json_get(json, key), *values = object ? json_get(object, "values") : NULL;
    int64_t count, position;
    if (!values || !json_int64(object, "count", &count) || !json_int64(object, "position", &position)) return false;
    if (count < 0 || count > OUTLIER_WINDOW || position < 0 || position >= OUTLIER_WINDOW) return false;
    if (count < OUTLIER_WINDOW && position != count) return false; // a ring that isn't full has no gaps
    *window = (OutlierWindow){.count = (int32_t)count, .position = (int32_t)position};
    int64_t i = 0;
    for (const JsonValue *value = json_first(values); value; value = json_next(value), i++) {
        if (i >= count || !json_number(value, NULL, &window->values[i])) return false;
    }
    return i == count;
}

// The whole numbers of the state. Versions that kept no samples_per_step have none, those that had
// no blend no data_fingerprint, those that looked for no spikes none of these, those that had no
// Muon no muon_state: 0. Those without evaluated_at_end took each evaluation for one of the end.
static const struct {
    const char *name;
    size_t offset;
    int64_t minimum;
    bool is_optional;
} NUMBERS[] = {
    {"step", offsetof(TrainerState, step), 0, false},
    {"next_sample", offsetof(TrainerState, next_sample), 0, false},
    {"samples_per_step", offsetof(TrainerState, samples_per_step), 0, true},
    {"train_tokens", offsetof(TrainerState, train_tokens), INT64_MIN, false},
    {"seq_len", offsetof(TrainerState, seq_len), 1, false},
    {"seed", offsetof(TrainerState, seed), INT64_MIN, false},
    {"data_fingerprint", offsetof(TrainerState, data_fingerprint), INT64_MIN, true},
    {"data_hash", offsetof(TrainerState, data_hash), 0, true},
    {"val_hash", offsetof(TrainerState, val_hash), 0, true},
    {"muon_state", offsetof(TrainerState, muon_state), 0, true},
    {"log_position", offsetof(TrainerState, log_position), 0, false},
    {"skipped", offsetof(TrainerState, skipped), 0, false},
    {"nonfinite_in_a_row", offsetof(TrainerState, nonfinite_in_a_row), 0, false},
    {"evaluated", offsetof(TrainerState, evaluated), -1, false},
    {"evaluated_at_end", offsetof(TrainerState, evaluated_at_end), -1, true},
    {"spikes", offsetof(TrainerState, spike.count), 0, true},
    {"spike_steps", offsetof(TrainerState, spike.steps), 0, true},
};
enum { NUM_NUMBERS = COUNT(NUMBERS) };

static void write_state(JsonWriter *w, const TrainerState *s, const GPTConfig *config, const Option *options,
                        int num_options) {
    json_begin_object(w, NULL);
    json_write_int64(w, "version", STATE_VERSION);
    for (int i = 0; i < NUM_NUMBERS; i++) {
        json_write_int64(w, NUMBERS[i].name, *(const int64_t *)((const char *)s + NUMBERS[i].offset));
    }
    json_write_double(w, "best_val_loss", s->best_val_loss);
    json_write_double(w, "seconds", s->seconds);
    json_write_double(w, "spike_level", s->spike.level);
    json_write_double(w, "spike_peak", s->spike.peak);
    write_window(w, "losses", &s->losses);
    write_window(w, "grad_norms", &s->grad_norms);
    config_json_log(w, config);
    json_begin_object(w, "options");
    options_write_json(options, num_options, w);
    json_end_object(w);
    json_end_object(w);
}

static bool read_state(TrainerState *s, const JsonValue *json) {
    int64_t version;
    *s = (TrainerState){.best_val_loss = NAN};
    if (!json_int64(json, "version", &version) || version != STATE_VERSION) return false;
    for (int i = 0; i < NUM_NUMBERS; i++) {
        int64_t *number = (int64_t *)((char *)s + NUMBERS[i].offset);
        bool is_there = json_int64(json, NUMBERS[i].name, number);
        if ((!is_there && !NUMBERS[i].is_optional) || *number < NUMBERS[i].minimum) return false;
    }
    if (!json_get(json, "evaluated_at_end")) s->evaluated_at_end = s->evaluated;
    if (s->skipped > s->step || s->nonfinite_in_a_row > s->skipped) return false;
    // A step takes a sample at least; 64 bits have room for twice the tokens so far and a step's.
    int64_t tokens;
    if (s->step > s->next_sample || (s->step > 0 && s->samples_per_step > s->next_sample) ||
        __builtin_mul_overflow(s->next_sample, 2 * s->seq_len, &tokens) ||
        __builtin_mul_overflow(s->samples_per_step, 2 * s->seq_len, &tokens)) {
        return false;
    }
    json_number(json, "best_val_loss", &s->best_val_loss);
    json_number(json, "spike_level", &s->spike.level);
    json_number(json, "spike_peak", &s->spike.peak);
    return json_number(json, "seconds", &s->seconds) && s->seconds >= 0 && s->seconds < 1e12 &&
           read_window(json, "losses", &s->losses) && read_window(json, "grad_norms", &s->grad_norms);
}

bool checkpoint_has_state(const char *directory) {
    char *path = format_string("%s/trainer_state.json", directory);
    Error error;
    bool exists = path_exists(path);
    JsonValue *json = exists ? json_read(path, &error) : NULL;
    bool is_foreign = json && !json_get(json, "version");
    json_free(json);
    free(path);
    return exists && !is_foreign;
}

bool checkpoint_load_state(TrainerState *state, const char *directory, Option *options, int num_options, Error *error) {
    char *path = format_string("%s/trainer_state.json", directory);
    JsonValue *json = json_read(path, error);
    Error detail;
    bool ok = json != NULL;
    if (ok && !json_names_once(json, &detail)) ok = error_set(error, "%s: %.800s", path, detail.message);
    if (ok && !read_state(state, json)) {
        ok = error_set(error,
                       "%s isn't a trainer state of this program's version; --init-from %s takes its weights alone",
                       path, directory);
    }
    const JsonValue *saved = json ? json_get(json, "options") : NULL;
    if (ok && saved && !options_read_json(options, num_options, saved, false, &detail)) {
        ok = error_set(error, "%s: %.800s", path, detail.message);
    }
    json_free(json);
    free(path);
    return ok;
}

// Directories

bool checkpoint_is_finite(const GPT *m) {
    for (int i = 0; i < m->params.count; i++) {
        const Param *p = &m->params.params[i];
        int64_t count = p->num_rows * p->cols;
        double sum = m->backend->sum_of_squares(p->master, count) + m->backend->sum_of_squares(p->moment1, count);
        if (p->moment2) sum += m->backend->sum_of_squares(p->moment2, count);
        if (!isfinite(sum)) return false;
    }
    return true;
}

static bool write_json_file(JsonWriter *w, const char *directory, const char *name, Error *error) {
    char *path = format_string("%s/%s", directory, name);
    bool ok = write_file_atomic(path, w->text, w->length, error);
    json_writer_free(w);
    free(path);
    return ok;
}

static bool write_directory(const char *directory, GPT *m, const TrainerState *state, const Option *options,
                            int num_options, const Tokenizer *tokenizer, Error *error) {
    Comm *comm = m->params.sharding.comm;
    bool writes = comm->rank == 0, ok = !writes || make_directories(directory, error);
    char *weights = format_string("%s/%s", directory, WEIGHTS.name);
    char *moments = format_string("%s/%s", directory, MOMENTS.name);
    char *tokens = format_string("%s/tokenizer.bin", directory);
    float *staging = allocate_staging(&m->params);
    ok = all_agree(comm, ok, directory, error) && save_file(m, weights, &WEIGHTS, staging, error);
    // what rank 0 has given its name, it has for all
    ok = all_agree(comm, ok, weights, error) && save_file(m, moments, &MOMENTS, staging, error);
    free(staging);
    if (ok && writes && m->recipe.delayed.length > 0) ok = save_amaxes(m, directory, error);
    if (ok && writes && tokenizer) ok = tokenizer_save(tokenizer, tokens, error);
    free(weights);
    free(moments);
    free(tokens);
    if (!ok || !writes) return ok;

    JsonWriter config = {.indented = true}, trainer = {.indented = true};
    config_json_write(&config, &m->config, tokenizer ? tokenizer->end_of_text : m->config.vocab_size - 1);
    write_state(&trainer, state, &m->config, options, num_options);
    ok = write_json_file(&config, directory, "config.json", error);
    return write_json_file(&trainer, directory, "trainer_state.json", error) && ok && sync_path(directory, error);
}

static bool rename_checked(const char *from, const char *to, Error *error) {
    if (rename(from, to) == 0) return true;
    return error_set(error, "%s can't be renamed to %s: %s; check the permissions of its directory", from, to,
                     strerror(errno));
}

// Puts the whole new directory in the place of `path`, where an abandoned one of the same step may
// be: the two exchange names, or on file systems that can't do that, the old one steps aside first.
static bool replace_directory(const char *path, const char *temporary, const char *out_dir, Error *error) {
    if (!path_exists(path)) return rename_checked(temporary, path, error) && sync_path(out_dir, error);
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_EXCHANGE) != 0) {
        char *aside = format_string("%s-old", temporary);
        remove_tree(aside);
        bool ok = rename_checked(path, aside, error) && rename_checked(temporary, path, error) &&
                  rename_checked(aside, temporary, error);
        free(aside);
        if (!ok) return false;
    }
    remove_tree(temporary);
    return sync_path(out_dir, error);
}

static int64_t step_of(const char *name) {
    int64_t step;
    int end = 0;
    if (sscanf(name, "step_%ld%n", &step, &end) != 1 || name[end] != '\0') return -1;
    return step;
}

// Removes a checkpoint. Its name goes first: one that has its name is whole at any moment.
static bool remove_checkpoint(const char *out_dir, const char *name) {
    char *path = format_string("%s/%s", out_dir, name);
    char *temporary = format_string("%s/.tmp-%s", out_dir, name);
    bool ok = remove_tree(temporary) && rename(path, temporary) == 0 && remove_tree(temporary);
    free(path);
    free(temporary);
    return ok;
}

// Removes all but the newest `keep` steps up to `newest`; a later one is of an abandoned run and is
// left alone.
static void remove_old(const char *out_dir, int64_t newest, int64_t keep) {
    for (;;) {
        DIR *directory = opendir(out_dir);
        if (!directory) return;
        int64_t oldest = -1, count = 0;
        char oldest_name[256] = "";
        for (const struct dirent *entry; (entry = readdir(directory));) {
            int64_t step = step_of(entry->d_name);
            if (step < 0 || step > newest) continue;
            count++;
            if (oldest < 0 || step < oldest) {
                oldest = step;
                snprintf(oldest_name, sizeof(oldest_name), "%s", entry->d_name);
            }
        }
        closedir(directory);
        if (count <= keep || oldest == newest) return;
        if (!remove_checkpoint(out_dir, oldest_name)) return;
    }
}

// Rank 0 may have all to write, to a disk that is slow.
enum { PATIENCE_WITH_FILES = 10 };

bool checkpoint_save(char **path, const char *out_dir, GPT *m, const TrainerState *state, const Option *options,
                     int num_options, const Tokenizer *tokenizer, int64_t keep, Error *error) {
    char *temporary = format_string("%s/%s%06ld", out_dir, TEMPORARY_PREFIX, state->step);
    char *latest = format_string("%s/latest", out_dir);
    char *line = format_string("step_%06ld\n", state->step);
    *path = format_string("%s/step_%06ld", out_dir, state->step);
    Comm *comm = m->params.sharding.comm;
    bool writes = comm->rank == 0;
    comm_set_patience(comm, PATIENCE_WITH_FILES);
    if (writes) remove_tree(temporary);
    bool ok = write_directory(temporary, m, state, options, num_options, tokenizer, error);
    if (writes) {
        ok = ok && replace_directory(*path, temporary, out_dir, error) &&
             write_file_atomic(latest, line, strlen(line), error);
        if (!ok) remove_tree(temporary);
        if (ok && keep > 0) remove_old(out_dir, state->step, keep);
    }
    bool failed = comm_any(comm, !ok);
    comm_set_patience(comm, 1);
    if (ok && failed) ok = error_set(error, "rank 0 couldn't write %s", *path);
    free(temporary);
    free(latest);
    free(line);
    return ok;
}

bool checkpoint_any(const char *out_dir) {
    DIR *directory = opendir(out_dir);
    bool found = false;
    for (const struct dirent *entry; directory && !found && (entry = readdir(directory));) {
        found = step_of(entry->d_name) >= 0 || strcmp(entry->d_name, "latest") == 0;
    }
    if (directory) closedir(directory);
    return found;
}

char *checkpoint_latest(const char *out_dir, Error *error) {
    char *path = format_string("%s/latest", out_dir), *name = NULL, *result = NULL;
    char *state = format_string("%s/trainer_state.json", out_dir);
    size_t bytes;
    if (path_exists(state)) {
        error_set(error, "%s is a checkpoint: give --out-dir the run's directory, which holds it", out_dir);
    } else if (!path_exists(path)) {
        error_set(error,
                  checkpoint_any(out_dir)
                      ? "%s holds checkpoints, but no file 'latest', which names the one to go on with: write the name "
                        "of the newest directory step_NNNNNN into it"
                      : "%s has no checkpoint to resume from (no file 'latest'): leave --resume out to start anew, in "
                        "another --out-dir where this one holds a log",
                  out_dir);
    } else if ((name = read_file(path, 256, &bytes, error))) {
        name[strcspn(name, "\n")] = '\0';
        if (step_of(name) >= 0) result = format_string("%s/%s", out_dir, name);
        if (result && !path_exists(result)) {
            free(result);
            result = NULL;
        }
        if (!result) {
            error_set(
                error,
                "%s doesn't name a checkpoint that is there: write the name of the newest directory step_NNNNNN of %s into it",
                path, out_dir);
        }
    }
    free(name);
    free(state);
    free(path);
    return result;
}

void checkpoint_clean(const char *out_dir) {
    DIR *directory = opendir(out_dir);
    if (!directory) return;
    for (const struct dirent *entry; (entry = readdir(directory));) {
        if (strncmp(entry->d_name, TEMPORARY_PREFIX, strlen(TEMPORARY_PREFIX)) != 0) continue;
        char *path = format_string("%s/%s", out_dir, entry->d_name);
        remove_tree(path);
        free(path);
    }
    closedir(directory);
}
