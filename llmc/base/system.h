/*
What the program needs to know of the machine it runs on.
*/
#pragma once

#include <stddef.h>

// Writes the processor's name, as the system gives it, to `text`.
void system_cpu_name(char *text, size_t bytes);

// Returns the bytes that can still be allocated: the least of what the system, the control groups
// and RLIMIT_AS leave.
double system_available_memory(void);

// Returns the least of what a process' control groups and those around them leave of their limits,
// of version 1 or 2; 1e18 without a limit. `membership` is its /proc/PID/cgroup, `root` where the
// groups are mounted.
double system_group_memory(const char *membership, const char *root);

// Opens /dev/null in the place of standard streams that are closed, so that no file that is opened
// later gets their numbers and what is printed. Printing to it fails, as it did.
void system_reserve_streams(void);

// Makes threads that wait spin for some microseconds, the time between two operations, and then
// sleep. Spinning for longer, as libgomp would, is many times slower where another program wants
// the same cores; never spinning is a quarter slower where none does. Call it early in main:
// libgomp reads this setting when it is loaded, so the program starts itself again, once.
void system_wait_briefly(char **argv);
