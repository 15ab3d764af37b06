/*
What tests of kernels share: memory of the device, filled and guarded as check.h's pool, and copies
to it and from it.
*/
#pragma once

#include "check.h"
#include "llmc/cuda/cuda.h"

enum { DEVICE_GUARD = 256 }; // the alignment of what a model takes
static struct {
    uint8_t *memory;
    size_t bytes;
} device_pool[POOL_CAPACITY];
static int device_count;

// Copies from the device when all work there has ended.
static inline void download(void *host, const void *device, size_t bytes) {
    cuda_check(cudaDeviceSynchronize(), "waiting for the GPU");
    cuda_check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "copying from the GPU");
}

// Returns a copy of `host` (NULL: of what nobody wrote) on the device, so many bytes off its
// alignment.
static inline void *to_device_at(const void *host, size_t bytes, size_t misalignment) {
    assert_true(device_count < POOL_CAPACITY);
    size_t all = bytes + misalignment + 2 * DEVICE_GUARD;
    uint8_t *memory, *image = test_malloc(all), *begin = image + DEVICE_GUARD + misalignment;
    memset(image, GUARD, all);
    host ? memcpy(begin, host, bytes) : memset(begin, UNWRITTEN, bytes);
    cuda_check(cudaMalloc((void **)&memory, all), "allocating memory of the GPU");
    cuda_check(cudaMemcpy(memory, image, all, cudaMemcpyHostToDevice), "copying to the GPU");
    cuda_check(cudaDeviceSynchronize(), "waiting for the GPU"); // the operations' stream doesn't wait for this one
    test_free(image);
    device_pool[device_count].memory = memory;
    device_pool[device_count++].bytes = all;
    return memory + DEVICE_GUARD + misalignment;
}

static inline void *to_device(const void *host, size_t bytes) { return to_device_at(host, bytes, 0); }

// Returns memory of the device that nobody wrote, so many bytes off its alignment.
static inline void *device_take_at(size_t bytes, size_t misalignment) {
    return to_device_at(NULL, bytes, misalignment);
}

static inline void *device_take(size_t bytes) { return to_device_at(NULL, bytes, 0); }

// Returns a copy of the tensor on the device, or on the host.
static inline Tensor tensor_to_device(Tensor host) {
    host.data = to_device(host.data, tensor_bytes(host));
    return host;
}

static inline Tensor tensor_to_host(Tensor device) {
    Tensor host = device;
    host.data = pool_take(tensor_bytes(device));
    download(host.data, device.data, tensor_bytes(device));
    return host;
}

// Releases all that a test took, on the host and on the device. Fails where something wrote beside
// it.
static inline void release_all(void) {
    bool intact = true;
    while (device_count > 0) {
        uint8_t *memory = device_pool[--device_count].memory, guards[2][DEVICE_GUARD];
        download(guards[0], memory, DEVICE_GUARD);
        download(guards[1], memory + device_pool[device_count].bytes - DEVICE_GUARD, DEVICE_GUARD);
        for (size_t i = 0; i < DEVICE_GUARD; i++) {
            intact = intact && guards[0][i] == GUARD && guards[1][i] == GUARD;
        }
        cuda_check(cudaFree(memory), "freeing memory of the GPU");
    }
    pool_release();
    if (!intact) fail_msg("memory of the device outside a tensor was written");
}
