#include "task_score.h"

#include <math.h>
#include <string.h>

static bool same_task(const ScoreRequest *a, const ScoreRequest *b) { return strcmp(a->task, b->task) == 0; }

static bool same_question(const ScoreRequest *a, const ScoreRequest *b) {
    return same_task(a, b) && a->question == b->question;
}

// Returns the answer of the largest logprob, divided by its characters where that is asked for; of
// equal ones the first; NULL where one isn't a number, as of a model that diverged.
static const ScoreRequest *likeliest(const ScoreRequest *answers, int64_t count, bool by_characters) {
    const ScoreRequest *best = NULL;
    double most = -INFINITY;
    for (const ScoreRequest *answer = answers; answer < answers + count; answer++) {
        double value = answer->score.logprob / (by_characters ? fmax(1, (double)answer->characters) : 1);
        if (isnan(value)) return NULL;
        if (best && !(value > most)) continue;
        best = answer;
        most = value;
    }
    return best;
}

// Adds a question to the sums of its task.
static void add_question(TaskScore *task, const ScoreRequest *answers, int64_t count) {
    const ScoreRequest *right = answers;
    while (!right->gold && right + 1 < answers + count) {
        right++;
    }
    task->questions++;
    task->is_choice |= count > 1;
    task->accuracy += likeliest(answers, count, false) == right;
    task->accuracy_by_characters += likeliest(answers, count, true) == right;
    task->bits_per_byte += -right->score.logprob / M_LN2 / (double)right->bytes;
}

int64_t task_scores(TaskScore *tasks, const ScoreRequests *all) {
    int64_t num_tasks = 0;
    for (int64_t i = 0, count; i < all->count; i += count) {
        const ScoreRequest *first = &all->requests[i];
        for (count = 1; i + count < all->count && same_question(first, first + count); count++) {}
        if (i == 0 || !same_task(first, first - 1)) tasks[num_tasks++] = (TaskScore){.task = first->task};
        add_question(&tasks[num_tasks - 1], first, count);
    }
    for (TaskScore *task = tasks; task < tasks + num_tasks; task++) {
        task->accuracy /= (double)task->questions;
        task->accuracy_by_characters /= (double)task->questions;
        task->bits_per_byte /= (double)task->questions;
    }
    return num_tasks;
}
