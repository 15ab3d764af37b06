/*
What the ranks of a run must agree on, each compared among all of them: a difference ends the
program, with a sentence that says what it is. plan.c's own; plan_check_score, for --score, is in
plan.h.
*/
#pragma once

#include "plan.h"

// Refuses ranks that were given other options, or are another program. It comes before what asks
// all ranks about each recipe.
void plan_check_program(const Plan *p);

// Refuses ranks that would compute something else: on other devices or libraries, of other data or
// questions, or from other weights.
void plan_check_run(const Plan *p);
