/*
Report: what a person is told before a run begins, from its plan.
*/
#pragma once

#include "plan.h"

// Prints device, model, recipe and memory.
void report_model(const Plan *plan);

// Prints data, steps, speed and ranks: the rest of what a run begins with.
void report_run(const Plan *plan);

// Prints what --dry-run adds: whether the run fits, the time of a step where it can be planned.
// Returns whether it fits; where it doesn't, a sentence of rank 0's on stderr says so too.
bool report_dry_run(const Plan *plan);

// Prints the table of --device-info.
void report_device_info(void);

// Prints the line of --version.
void report_version(void);
