/*
Blend: training samples from several sources, each a pattern of token files with a weight, in phases
of the run.

Which source a sample comes from, and which of that source's samples it is, depends on the sample's
number and the blend alone: nothing is remembered, so that a resume and many ranks need no state.
Within a phase sources alternate as evenly as their weights allow: of the phase's first n samples
the first source has n * weight, rounded; of those left the second one has its part of what is left,
rounded; and so on. A source's samples are its loader's in order, through all phases, so that each
source has epochs and shuffles of its own.
*/
#pragma once

#include "dataloader.h"
#include "llmc/files/json.h" // JsonWriter

enum { BLEND_MAX_SOURCES = 16, BLEND_MAX_PHASES = 16 };

typedef struct {
    char *pattern;
    DataLoader loader;
} BlendSource;

typedef struct {
    double start;                      // fraction of the run
    int64_t first_step, first_sample;  // once it is placed
    double weight[BLEND_MAX_SOURCES];  // by source, 0: isn't in this phase; their sum is 1
    int64_t parts[BLEND_MAX_SOURCES];  // the same in whole numbers
    int64_t before[BLEND_MAX_SOURCES]; // samples taken of each source before this phase
} BlendPhase;

typedef struct {
    BlendSource sources[BLEND_MAX_SOURCES]; // in the order in which the text names them
    BlendPhase phases[BLEND_MAX_PHASES];    // ascending, the first from the start on
    int num_sources, num_phases;
    bool is_pattern; // one source without weights
    int num_files;
    int64_t num_tokens, num_windows; // of all sources
} Blend;

typedef struct {
    int source;
    int64_t sample; // of the source
} BlendSample;

// Parses "GLOB", or "GLOB:WEIGHT,...@PERCENT%,...": sources and weights, the last of each phase
// with the percentage of the run at which that phase begins. Without any @ there is one phase. A
// text that matches a file as it stands is a GLOB, whatever characters it has; so is one in which
// nothing looks like a weight or a percentage. In a blend a GLOB may have ':' and '@', but not ','
// (write '?'). Errors: a weight that is missing, malformed or not above 0, weights whose sum isn't
// 1 (by more than 0.001, for thirds), phases that don't begin at 0 % or don't ascend, a GLOB twice
// in a phase, too many.
bool blend_parse(Blend *blend, const char *text, Error *error);

// Opens the sources' loaders, shuffled. Errors: dataloader_open's. Follow with blend_place.
bool blend_open(Blend *blend, int64_t seq_len, uint64_t seed, int64_t vocab_size, Error *error);
void blend_close(Blend *blend);

// Sets where phases begin, in a run of so many steps.
void blend_place(Blend *blend, int64_t total_steps, int64_t samples_per_step);

// Returns where sample `sample` comes from.
BlendSample blend_sample(const Blend *blend, int64_t sample);

// Writes how many of samples [0, count) are each source's.
void blend_counts(const Blend *blend, int64_t count, int64_t by_source[BLEND_MAX_SOURCES]);

// Reads samples [first_sample, first_sample + count) of the run, as dataloader_batch does.
bool blend_batch(const Blend *blend, int64_t first_sample, int64_t count, int32_t *tokens, int32_t *targets,
                 Error *error);

// Returns a number that differs where samples [0, count) would probably differ: a hash of the
// sources' sizes, weights and beginnings of the phases so far. It is below 2^52, and 0 without
// weights.
int64_t blend_fingerprint(const Blend *blend, int64_t count);

// Returns a number that differs where the tokens of sources that samples [0, count) come from
// probably differ, though there are as many: a hash of some of them, below 2^52.
int64_t blend_hash(const Blend *blend, int64_t count);

// Prints, for a person, phases and each source's tokens and epochs in `total_samples` (0: not
// known).
void blend_print(const Blend *blend, int64_t total_samples, FILE *stream);

// Writes the object "data" of the log.
void blend_write_json(const Blend *blend, JsonWriter *writer);
