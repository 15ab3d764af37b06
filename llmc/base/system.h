/*
What the program needs to know of the machine it runs on.
*/
#ifndef LLMC_SYSTEM_H
#define LLMC_SYSTEM_H

#include <stddef.h>

// The processor's name as the system gives it.
void system_cpu_name(char *text, size_t bytes);

// Bytes that can still be allocated: the least of what the system, the control group and RLIMIT_AS
// leave.
double system_available_memory(void);

// To be called first in main. Threads that wait spin for some microseconds, the time between two
// operations, and then sleep: spinning for longer, as libgomp would, is many times slower where
// another program wants the same cores, and never spinning a quarter slower where none does.
// libgomp reads this when it is loaded, so the program starts itself again, once.
void system_wait_briefly(char **argv);

#endif
