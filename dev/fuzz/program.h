/*
The whole program in a fuzz target, without its main: the options are the program's own table.
*/
#ifndef FUZZ_PROGRAM_H
#define FUZZ_PROGRAM_H

#define main program_main
#include "../../train_gpt_mxfp8.cu"
#undef main

#endif
