/*
Score: how likely a model finds texts, which is what multiple-choice tasks and bits per byte are
made of. A request is a context and a continuation; doc/evaluation.md describes the files.
*/
#pragma once

#include "llmc/comm/comm.h"
#include "llmc/data/tokenizer.h"
#include "llmc/model/gpt.h"

#include <signal.h>

// What a model finds of a continuation after its context.
typedef struct {
    double logprob; // natural logarithm of its probability
    bool greedy;    // each token of it is the likeliest after those before it
} Score;

typedef struct {
    char *id;                // as JSON
    int32_t *tokens;         // (length): context, or end-of-text where that is empty, and continuation
    int64_t length, context; // tokens of both, and of the context: 1 at least
    int64_t bytes;           // of the continuation
    int64_t characters;      // of it, without a space that it begins with
    // Read for tasks alone, of a question whose requests follow each other:
    char *task;       // "" where the file doesn't say
    int64_t question; // minus the line's number where the file doesn't say
    bool gold;        // the right answer
    Score score;
} ScoreRequest;

typedef struct {
    ScoreRequest *requests; // (count)
    int64_t count;
} ScoreRequests;

// Reads a file of requests, one JSON object a line; what its lines say of tasks only where
// `of_tasks`. A line that can't be used is an error that names it.
bool score_read(ScoreRequests *all, const char *path, const Tokenizer *tokenizer, bool of_tasks, Error *error);
void score_free(ScoreRequests *all);

// Fills the scores of all requests, on every rank, each of which has the same model and requests
// and takes its share of them: those of about the same length together, as many tokens at a time as
// the model was made for. Of what is longer than its T positions it sees the last ones; a
// continuation that is longer by itself is scored in pieces of T tokens, each after what fits
// before it. Where `*stop` is no longer 0 the rest is left out.
void score_run(ScoreRequests *all, GPT *model, Comm *comm, const volatile sig_atomic_t *stop);

// Says how much that was and took, and how much of it was longer than T positions, for people.
void score_report(const ScoreRequests *all, int64_t T, double seconds, FILE *stream);

// Writes a line for each request, in their order:
// {"id":7,"logprob":-3.2,"tokens":2,"bytes":6,"greedy":false}
void score_write(const ScoreRequests *all, FILE *stream);
