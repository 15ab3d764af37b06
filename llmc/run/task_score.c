#include "task_score.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool same_task(const ScoreRequest *a, const ScoreRequest *b) { return strcmp(a->task, b->task) == 0; }

static bool same_question(const ScoreRequest *a, const ScoreRequest *b) {
    return same_task(a, b) && a->question == b->question;
}

static int compare_tasks(const void *a, const void *b) {
    const ScoreRequest *x = *(const ScoreRequest *const *)a, *y = *(const ScoreRequest *const *)b;
    return strcmp(x->task, y->task);
}

static int compare_questions(const void *a, const void *b) {
    const ScoreRequest *x = *(const ScoreRequest *const *)a, *y = *(const ScoreRequest *const *)b;
    int tasks = strcmp(x->task, y->task);
    return tasks ? tasks : (x->question > y->question) - (x->question < y->question);
}

// Returns a request that begins anew what has been there before, other things between, or NULL.
// `compare` says what is the same.
static const ScoreRequest *find_return(const ScoreRequests *all, int (*compare)(const void *, const void *)) {
    const ScoreRequest **starts = allocate((size_t)all->count * sizeof(*starts)), *found = NULL;
    int64_t count = 0;
    for (const ScoreRequest *r = all->requests, *before = NULL; r < all->requests + all->count; before = r++) {
        if (!before || compare(&before, &r) != 0) starts[count++] = r;
    }
    qsort(starts, (size_t)count, sizeof(*starts), compare);
    for (int64_t i = 1; i < count && !found; i++) {
        const ScoreRequest *later = starts[i] > starts[i - 1] ? starts[i] : starts[i - 1];
        if (compare(&starts[i - 1], &starts[i]) == 0) found = later;
    }
    free(starts);
    return found;
}

// Returns how many requests a question has, from its first on.
static int64_t count_answers(const ScoreRequests *all, const ScoreRequest *first) {
    int64_t count = 1;
    while (first + count < all->requests + all->count && same_question(first, first + count)) {
        count++;
    }
    return count;
}

bool task_check(const ScoreRequests *all, const char *path, Error *error) {
    const ScoreRequest *task = find_return(all, compare_tasks);
    const ScoreRequest *question = task ? NULL : find_return(all, compare_questions);
    if (task || question) {
        int64_t line = (task ? task : question) - all->requests + 1;
        return error_set(error,
                         "%.300s, line %ld: the %s of this line has been before, others between: bring its "
                         "lines together",
                         path, line, task ? "task" : "question");
    }
    for (const ScoreRequest *first = all->requests; first < all->requests + all->count;) {
        int64_t count = count_answers(all, first), right = 0;
        for (int64_t i = 0; i < count; i++) {
            right += first[i].gold;
        }
        if (right != 1) {
            return error_set(error,
                             "%.300s, line %ld: of the answers of the question that begins there %ld are right, "
                             "where one has to be: give that one \"gold\": true and the others \"gold\": false",
                             path, (int64_t)(first - all->requests + 1), right);
        }
        first += count;
    }
    return true;
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
    while (!right->gold) {
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
        count = count_answers(all, first);
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
