/*
Task scores: what a model's scores of requests say of the tasks whose questions they are.
*/
#pragma once

#include "score.h"

typedef struct {
    const char *task; // of the requests
    int64_t questions;
    bool is_choice;                          // questions have several answers; else there are bits per byte alone
    double accuracy, accuracy_by_characters; // parts of the questions whose right answer has the largest
                                             // logprob, or the largest by character
    double bits_per_byte;                    // of right answers, the mean over questions
} TaskScore;

// Returns false, with an error that names a line of the file at `path`, where a task's lines, or a
// question's, don't follow each other, or where a question hasn't exactly one right answer.
bool task_check(const ScoreRequests *all, const char *path, Error *error);

// Fills `tasks` (all->count at most) with the tasks of requests that have been scored, which follow
// each other in the file. Returns how many there are.
int64_t task_scores(TaskScore *tasks, const ScoreRequests *all);
