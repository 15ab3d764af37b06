#include "blend.h"

#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t WHOLE = 1 << 30; // the parts of a phase
static const double SUM_TOLERANCE = 1e-3, SMALLEST_WEIGHT = 1e-6;

// Text

static bool matches_a_file(const char *pattern) {
    glob_t found = {0};
    bool matches = glob(pattern, GLOB_TILDE, NULL, &found) == 0;
    globfree(&found);
    return matches;
}

// Parses a number with nothing but `end` after it.
static bool parse_number(const char *text, const char *end, double *number) {
    char *after;
    *number = strtod(text, &after);
    return after != text && strspn(text, "+-.0123456789eE") == (size_t)(after - text) && strcmp(after, end) == 0 &&
           isfinite(*number);
}

// "GLOB:WEIGHT@PERCENT%" taken apart in place; NULL for what isn't there.
typedef struct {
    char *pattern, *weight, *percent;
} Piece;

static Piece split_piece(char *text) {
    Piece piece = {.pattern = text, .weight = strrchr(text, ':')};
    char *at = strchr(piece.weight ? piece.weight : text, '@');
    double number;
    // Without a weight the @ may be the pattern's.
    if (at && (piece.weight || parse_number(at + 1, "%", &number))) {
        piece.percent = at + 1;
        *at = '\0';
    }
    if (piece.weight) *piece.weight++ = '\0';
    return piece;
}

static bool looks_like_a_blend(const char *text) {
    char *copy = format_string("%s", text), *rest = copy;
    bool found = false;
    double number;
    while (rest && !found) {
        Piece piece = split_piece(strsep(&rest, ","));
        found = (piece.weight && parse_number(piece.weight, "", &number)) ||
                (piece.percent && parse_number(piece.percent, "%", &number));
    }
    free(copy);
    return found;
}

// Returns the source of that pattern, a new one where there is none yet; -1: too many.
static int find_source(Blend *blend, const char *pattern) {
    for (int i = 0; i < blend->num_sources; i++) {
        if (strcmp(blend->sources[i].pattern, pattern) == 0) return i;
    }
    if (blend->num_sources == BLEND_MAX_SOURCES) return -1;
    blend->sources[blend->num_sources].pattern = format_string("%s", pattern);
    return blend->num_sources++;
}

static bool add_source(Blend *blend, BlendPhase *phase, const Piece *piece, Error *error) {
    double weight;
    if (!piece->weight) {
        return error_set(error,
                         "--train-data: '%s' has no weight: in a blend every source is GLOB:WEIGHT, and a GLOB has no "
                         "comma (write ? for it)",
                         piece->pattern);
    }
    if (!piece->pattern[0]) return error_set(error, "--train-data: weight '%s' has no GLOB before it", piece->weight);
    if (!parse_number(piece->weight, "", &weight) || weight < SMALLEST_WEIGHT || weight > 1) {
        return error_set(error, "--train-data: the weight of '%s' must be a number from %g to 1, not '%s'",
                         piece->pattern, SMALLEST_WEIGHT, piece->weight);
    }
    int source = find_source(blend, piece->pattern);
    if (source < 0) return error_set(error, "--train-data takes %d sources at most", BLEND_MAX_SOURCES);
    if (phase->weight[source] > 0) {
        return error_set(error, "--train-data names '%s' twice in a phase: give it one weight", piece->pattern);
    }
    phase->weight[source] = weight;
    return true;
}

// Sets the phase's whole numbers, in the weights' proportions, whose sum is exactly WHOLE.
static bool set_parts(const Blend *blend, BlendPhase *phase, Error *error) {
    double sum = 0, so_far = 0;
    int64_t parts_so_far = 0;
    for (int i = 0; i < blend->num_sources; i++) {
        sum += phase->weight[i];
    }
    if (fabs(sum - 1) > SUM_TOLERANCE) {
        return error_set(error, "--train-data: the weights from %g %% on add up to %.6g, not to 1", 100 * phase->start,
                         sum);
    }
    for (int i = 0; i < blend->num_sources; i++) {
        phase->weight[i] /= sum;
        so_far += phase->weight[i];
        phase->parts[i] = phase->weight[i] > 0 ? llround(so_far * (double)WHOLE) - parts_so_far : 0;
        parts_so_far += phase->parts[i];
    }
    return true;
}

static bool end_phase(Blend *blend, const char *percent, Error *error) {
    BlendPhase *phase = &blend->phases[blend->num_phases];
    double number;
    if (!parse_number(percent, "%", &number) || number < 0 || number >= 100) {
        return error_set(error, "--train-data: after @ comes where a phase begins, from 0%% to below 100%%, not '%s'",
                         percent);
    }
    phase->start = number / 100;
    if (blend->num_phases == 0 && number > 0) {
        return error_set(error, "--train-data: the first phase must begin at 0%%, not at %s", percent);
    }
    if (blend->num_phases > 0 && phase->start <= phase[-1].start) {
        return error_set(error, "--train-data: the phase at %s comes after one at %g%%: give them in ascending order",
                         percent, 100 * phase[-1].start);
    }
    blend->num_phases++;
    return set_parts(blend, phase, error);
}

static bool parse_pieces(Blend *blend, char *rest, Error *error) {
    bool is_open = false;
    while (rest) {
        if (blend->num_phases == BLEND_MAX_PHASES) {
            return error_set(error, "--train-data takes %d phases at most", BLEND_MAX_PHASES);
        }
        Piece piece = split_piece(strsep(&rest, ","));
        if (!add_source(blend, &blend->phases[blend->num_phases], &piece, error)) return false;
        is_open = !piece.percent;
        if (piece.percent && !end_phase(blend, piece.percent, error)) return false;
        if (is_open && !rest && blend->num_phases > 0) {
            return error_set(error, "--train-data: the last phase doesn't say where it begins: end it with @PERCENT%%");
        }
    }
    return !is_open || end_phase(blend, "0%", error);
}

bool blend_parse(Blend *blend, const char *text, Error *error) {
    *blend = (Blend){.is_pattern = matches_a_file(text) || !looks_like_a_blend(text)};
    if (blend->is_pattern) {
        int source = find_source(blend, text);
        blend->phases[0].weight[source] = 1;
        return end_phase(blend, "0%", error);
    }
    char *copy = format_string("%s", text);
    bool ok = parse_pieces(blend, copy, error);
    free(copy);
    if (!ok) blend_close(blend);
    return ok;
}

// Which sample is whose

// Returns how many of the first n of a sequence are one source's, of which `parts` in `whole` are,
// as evenly as that goes: n * parts / whole, exactly to nearest, without a product that could
// overflow.
static int64_t share(int64_t n, int64_t parts, int64_t whole) {
    return n / whole * parts + (n % whole * parts + whole / 2) / whole;
}

// Writes how many samples each source has given at the end of a phase's first n.
static void phase_counts(const Blend *blend, const BlendPhase *phase, int64_t n, int64_t by_source[BLEND_MAX_SOURCES]) {
    int64_t whole = WHOLE;
    for (int i = 0; i < blend->num_sources; i++) {
        int64_t count = whole > 0 ? share(n, phase->parts[i], whole) : 0;
        by_source[i] = phase->before[i] + count;
        n -= count;
        whole -= phase->parts[i];
    }
}

void blend_place(Blend *blend, int64_t total_steps, int64_t samples_per_step) {
    for (int p = 0; p < blend->num_phases; p++) {
        BlendPhase *phase = &blend->phases[p];
        phase->first_step = llround(phase->start * (double)total_steps);
        phase->first_sample = phase->first_step * samples_per_step;
        if (p > 0) phase_counts(blend, phase - 1, phase->first_sample - phase[-1].first_sample, phase->before);
    }
}

// Returns the phase of a sample. Of two that begin at the same sample the later one counts.
static const BlendPhase *phase_of(const Blend *blend, int64_t sample) {
    int p = blend->num_phases - 1;
    while (p > 0 && blend->phases[p].first_sample > sample) {
        p--;
    }
    return &blend->phases[p];
}

BlendSample blend_sample(const Blend *blend, int64_t sample) {
    const BlendPhase *phase = phase_of(blend, sample);
    int64_t n = sample - phase->first_sample, whole = WHOLE;
    for (int i = 0; i < blend->num_sources; i++) {
        if (phase->parts[i] == 0) continue;
        int64_t count = share(n, phase->parts[i], whole);
        if (share(n + 1, phase->parts[i], whole) > count) return (BlendSample){i, phase->before[i] + count};
        n -= count;
        whole -= phase->parts[i];
    }
    die("internal error: a blend's weights");
}

void blend_counts(const Blend *blend, int64_t count, int64_t by_source[BLEND_MAX_SOURCES]) {
    const BlendPhase *phase = phase_of(blend, count);
    phase_counts(blend, phase, count - phase->first_sample, by_source);
}

// Data

bool blend_open(Blend *blend, int64_t seq_len, uint64_t seed, int64_t vocab_size, Error *error) {
    for (int i = 0; i < blend->num_sources; i++) {
        BlendSource *source = &blend->sources[i];
        if (!dataloader_open(&source->loader, source->pattern, seq_len, seed, true, vocab_size, error)) {
            blend_close(blend);
            return false;
        }
        blend->num_files += source->loader.num_shards;
        blend->num_tokens += source->loader.num_tokens;
        blend->num_windows += source->loader.num_windows;
    }
    return true;
}

void blend_close(Blend *blend) {
    for (int i = 0; i < blend->num_sources; i++) {
        dataloader_close(&blend->sources[i].loader);
        free(blend->sources[i].pattern);
    }
    *blend = (Blend){0};
}

bool blend_batch(const Blend *blend, int64_t first_sample, int64_t count, int32_t *tokens, int32_t *targets,
                 Error *error) {
    for (int64_t i = 0; i < count; i++) {
        BlendSample from = blend_sample(blend, first_sample + i);
        const DataLoader *loader = &blend->sources[from.source].loader;
        int64_t offset = i * loader->seq_len;
        if (!dataloader_batch(loader, from.sample, 1, tokens + offset, targets + offset, error)) return false;
    }
    return true;
}

int64_t blend_fingerprint(const Blend *blend, int64_t count) {
    uint64_t hash = HASH_START;
    if (blend->is_pattern) return 0;
    for (int p = 0; p < blend->num_phases; p++) {
        const BlendPhase *phase = &blend->phases[p];
        if (p > 0 && phase->first_sample >= count) break;
        hash = hash_add(hash, (uint64_t)phase->first_sample);
        for (int i = 0; i < blend->num_sources; i++) {
            if (phase->parts[i] == 0) continue;
            hash = hash_add(hash, (uint64_t)i);
            hash = hash_add(hash, (uint64_t)phase->parts[i]);
            hash = hash_add(hash, (uint64_t)blend->sources[i].loader.num_tokens);
        }
    }
    return (int64_t)(hash >> 12);
}

// Returns whether samples [0, count), or the first phase, take any of a source.
static bool is_taken_from(const Blend *blend, int source, int64_t count) {
    for (int p = 0; p < blend->num_phases && (p == 0 || blend->phases[p].first_sample < count); p++) {
        if (blend->is_pattern || blend->phases[p].parts[source] > 0) return true;
    }
    return false;
}

int64_t blend_hash(const Blend *blend, int64_t count) {
    uint64_t hash = HASH_START;
    for (int i = 0; i < blend->num_sources; i++) {
        if (is_taken_from(blend, i, count)) hash = hash_add(hash, dataloader_hash(&blend->sources[i].loader));
    }
    return (int64_t)(hash >> 12);
}

// What it is

static void print_phase(const Blend *blend, const BlendPhase *phase, FILE *stream) {
    fprintf(stream, "  from step %-10ld", phase->first_step);
    for (int i = 0, printed = 0; i < blend->num_sources; i++) {
        if (phase->parts[i] == 0) continue;
        fprintf(stream, "%s%.4g of %s", printed++ ? ", " : "", phase->weight[i], blend->sources[i].pattern);
    }
    fputc('\n', stream);
}

void blend_print(const Blend *blend, int64_t total_samples, FILE *stream) {
    int64_t taken[BLEND_MAX_SOURCES] = {0};
    char tokens[32], used[32];
    fprintf(stream, "blend    %d source%s in %d phase%s\n", blend->num_sources, plural(blend->num_sources),
            blend->num_phases, plural(blend->num_phases));
    for (int p = 0; p < blend->num_phases; p++) {
        print_phase(blend, &blend->phases[p], stream);
    }
    if (total_samples > 0) blend_counts(blend, total_samples, taken);
    for (int i = 0; i < blend->num_sources; i++) {
        const DataLoader *loader = &blend->sources[i].loader;
        fprintf(stream, "  %s has %s tokens", blend->sources[i].pattern,
                human_count(tokens, (double)loader->num_tokens));
        if (total_samples > 0) {
            fprintf(stream, "; the run takes %s, %.3g epochs", human_count(used, (double)(taken[i] * loader->seq_len)),
                    (double)taken[i] / (double)loader->num_windows);
        }
        fputc('\n', stream);
    }
}

void blend_write_json(const Blend *blend, JsonWriter *w) {
    json_begin_object(w, "data");
    json_begin_array(w, "sources");
    for (int i = 0; i < blend->num_sources; i++) {
        json_begin_object(w, NULL);
        json_write_string(w, "pattern", blend->sources[i].pattern);
        json_write_int64(w, "tokens", blend->sources[i].loader.num_tokens);
        json_end_object(w);
    }
    json_end_array(w);
    json_begin_array(w, "phases");
    for (int p = 0; p < blend->num_phases; p++) {
        json_begin_object(w, NULL);
        json_write_int64(w, "step", blend->phases[p].first_step);
        json_begin_array(w, "weights");
        for (int i = 0; i < blend->num_sources; i++) {
            json_write_double(w, NULL, blend->phases[p].weight[i]);
        }
        json_end_array(w);
        json_end_object(w);
    }
    json_end_array(w);
    json_end_object(w);
}
