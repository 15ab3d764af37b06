/*
The GPU of this process: whether there is one that the program can use, and what it is.
*/
#pragma once

#include "llmc/base/util.h" // Error

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

typedef struct {
    int count; // devices that the driver shows (CUDA_VISIBLE_DEVICES hides some)
    int index; // of this one among them
    char name[256];
    int major, minor; // compute capability
    size_t total_bytes, free_bytes;
    int sms;
    int clock_khz, memory_clock_khz, memory_bus_bits; // at their highest; 0: the driver doesn't say
    int l2_bytes;
    int driver, runtime; // 13000 is 13.0; driver is 0 where there is none
    bool usable;
    Error why_not; // one sentence with the remedy, where it isn't usable
} CudaDevice;

// Looks for the first device that the program can use, makes it the current one and fills `device`.
// Returns false, with the reason and the remedy in `error`, where there is none: `device` then has
// what could be learnt of the first one. Needs neither a driver nor a GPU, prints nothing.
bool cuda_device_find(CudaDevice *device, Error *error);

// Return false, with the sentence of why_not, where what the driver, the runtime or cuBLASLt says
// makes a device useless. Pure functions, so that tests can call them.
bool cuda_device_check_driver(int driver, int runtime, int count, int status, Error *why_not);
bool cuda_device_check_capability(const char *name, int major, int minor, Error *why_not);
bool cuda_device_check_kernels(bool quick, Error *why_not);
bool cuda_device_check_cublaslt(const char *name, int major, size_t cublaslt, Error *why_not);

// Return the highest rates by the clocks that the driver reports: dense FLOP/s of BF16 and FP8 with
// FP32 accumulation, bytes/s of memory. 0: unknown.
double cuda_device_bf16_flops(const CudaDevice *device);
double cuda_device_fp8_flops(const CudaDevice *device);
double cuda_device_bandwidth(const CudaDevice *device);

// Writes a clause on a usable device and, in the words of `gemms`, on how it multiplies.
void cuda_device_describe(const CudaDevice *device, const char *gemms, char *text, size_t bytes);

// Prints the table of --device-info. On a machine that lacks something it says what, and how to get
// it.
void cuda_device_print_info(FILE *file);
