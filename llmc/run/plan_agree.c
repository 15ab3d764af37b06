#include "plan_agree.h"
#include "llmc/base/util.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void describe_data(char *text, size_t bytes, const Plan *p) {
    uint64_t train_hash = 0, val_hash = p->has_val ? (uint64_t)p->start.val_hash : 0;
    for (int i = 0; i < p->train.num_sources; i++) {
        train_hash = 31 * train_hash + dataloader_hash(&p->train.sources[i].loader);
    }
    snprintf(text, bytes, "%ld tokens to train on (hash %016lx), %ld to validate on (hash %016lx)", p->train.num_tokens,
             train_hash, p->has_val ? p->val.num_tokens : 0, val_hash);
}

// Hashes the tokens of questions, those of --eval-requests or of --score.
static uint64_t hash_requests(const ScoreRequests *all) {
    uint64_t hash = HASH_START;
    for (int64_t i = 0; i < all->count; i++) {
        const ScoreRequest *request = &all->requests[i];
        hash = hash_add(hash, (uint64_t)request->length << 32 ^ (uint64_t)request->context);
        for (int64_t t = 0; t < request->length; t++) {
            hash = hash_add(hash, (uint32_t)request->tokens[t]);
        }
    }
    return hash;
}

// Hashes a file: all of it up to 256 MiB, of a larger one as much, in pieces that lie evenly in it.
// Returns 0 where it can't be read.
static uint64_t hash_file(const char *path) {
    enum { PIECES = 256, PIECE_BYTES = 1 << 20, WORDS = PIECE_BYTES / sizeof(uint64_t) };
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (file < 0) return 0;
    bool ok = fstat(file, &about) == 0;
    uint64_t *words = allocate(PIECE_BYTES), hash = ok ? hash_add(HASH_START, (uint64_t)about.st_size) : 0;
    int64_t pieces = ok ? min_int64(PIECES, (about.st_size + PIECE_BYTES - 1) / PIECE_BYTES) : 0;
    int64_t stride = pieces > 1 ? max_int64(PIECE_BYTES, (about.st_size - PIECE_BYTES) / (pieces - 1)) : 0;
    for (int64_t i = 0; ok && i < pieces; i++) {
        memset(words, 0, PIECE_BYTES);
        ok = pread(file, words, PIECE_BYTES, i * stride) >= 0;
        for (int w = 0; ok && w < WORDS; w++) {
            hash = hash_add(hash, words[w]);
        }
    }
    free(words);
    close(file);
    return ok ? hash : 0;
}

void plan_check_program(const Plan *p) {
    if (p->comm->size == 1) return;
    char text[64], *command = options_command_line(p->line.options, p->line.num_options, "options");
    snprintf(text, sizeof(text), "hash %016lx", hash_file("/proc/self/exe"));
    comm_check_same(p->comm, "program", text);
    comm_check_same(p->comm, "options", command);
    free(command);
}

// Refuses ranks that ask other questions, given with `option`.
static void check_same_questions(const Plan *p, const char *option, const ScoreRequests *all) {
    char text[64];
    snprintf(text, sizeof(text), "%ld (hash %016lx)", all->count, hash_requests(all));
    comm_check_same(p->comm, option, text);
}

// Refuses ranks that begin with other weights, those in `directory`; NULL: initial ones.
static void check_same_weights(const Plan *p, const char *directory) {
    char text[512], *weights = format_string("%s/model.safetensors", directory ? directory : "");
    snprintf(text, sizeof(text), "step %ld of %.400s (hash %016lx)", p->start.step, directory ? directory : "a new run",
             directory ? hash_file(weights) : 0);
    comm_check_same(p->comm, "checkpoint", text);
    free(weights);
}

void plan_check_score(const Plan *p, const ScoreRequests *all) {
    if (p->comm->size == 1) return;
    plan_check_program(p);
    check_same_questions(p, "--requests", all);
    check_same_weights(p, p->line.settings.score);
}

void plan_check_run(const Plan *p) {
    if (p->comm->size == 1) return;
    char text[1024];
    p->backend->describe(text, sizeof(text));
    comm_check_same(p->comm, "device and libraries", text);
    comm_check_same(p->comm, "communication library", p->comm->description);
    describe_data(text, sizeof(text), p);
    comm_check_same(p->comm, "data", text);
    check_same_questions(p, "--eval-requests", &p->eval);
    check_same_weights(p, p->checkpoint ? p->checkpoint : p->line.settings.init_from);
}
