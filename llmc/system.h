/*
What the program needs to know of the machine it runs on.
*/
#ifndef LLMC_SYSTEM_H
#define LLMC_SYSTEM_H

#include <stddef.h>

// The processor's name as the system gives it.
void system_cpu_name(char *text, size_t bytes);

// Bytes that can still be allocated: the least of what the system, the control group and RLIMIT_AS leave.
double system_available_memory(void);

#endif
