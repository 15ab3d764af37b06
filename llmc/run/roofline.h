/*
A roofline: how long a training step takes on machines that aren't here, and what it needs there.
Each GEMM and each product of attention takes its operations at a fraction of the card's peak or its
bytes at a fraction of the memory's bandwidth, whichever is longer; everything else takes its bytes;
ranks exchange bytes over a link. The model, its figures and what it leaves out are written down in
doc/planning.md.
*/
#pragma once

#include "llmc/model/gpt.h"

// A device as its data sheet or a measurement has it: dense peaks in FLOP/s, bytes, bytes/s.
typedef struct {
    const char *name;
    double bf16_flops, fp8_flops;
    double memory_bytes, memory_bandwidth;
    bool native_mx; // multiplies MXFP8 operands as they are and NVFP4 ones packed; else they are decoded to BF16
    // Fractions that are reached.
    double gemm_efficiency;      // by GEMMs, of BF16's peak
    double native_efficiency;    // by GEMMs of operands as they are, of FP8's or FP4's
    double block128_efficiency;  // by those of FP8 by blocks of 128
    double attention_efficiency; // by attention, of BF16's peak
    double memory_efficiency;    // by all else, of the bandwidth
    int attention_products;      // of a T x T by T x HS product, or its like, that a step makes for each head
    double collective_latency;   // seconds, for each doubling of the ranks
    const Backend *backend;      // that it is; NULL: a card, which isn't here
    MxGemm mx_gemm;              // of a card
} RooflineDevice;

typedef struct {
    GPTConfig config;
    const Recipe *recipe;
    const Sharding *sharding; // comm: its name and size alone
    int64_t B, T, accumulation;
    double link_bandwidth; // bytes/s that a rank sends; not asked for with one rank
    WireBytes wire;        // of gpt_wire_bytes
} RooflineRun;

// Seconds of a step on each rank, but for the last two.
typedef struct {
    double gemm, attention, memory, update; // of all micro-batches; update: optimizer, copies of weights
    double gradients, weights, muon;        // on the wire; muon: before the update, with nothing beside it
    double exposed;                         // of these, where they overlap with compute
    double step, overlapped_step;
    bool may_overlap;   // at --zero 1
    double tokens;      // of a step, on all ranks
    double utilization; // the model's FLOP/s of a step without overlap over the BF16 peak (MFU, Chowdhery et al. 2022)
} RooflineStep;

// Returns the card of that name ("h100", "h200", "b200", "gb200"), or NULL.
const RooflineDevice *roofline_device(const char *name);

// Measures and returns the FLOP/s of a GEMM that is large for this device, in the activations'
// dtype: what a training step's speed is compared with. Takes half a second or, of a run of fewer
// floating-point operations, about a tenth of its time, but no less than a tenth of a second.
double roofline_measure_gemm(const Backend *backend, Format dtype, double flops_of_run);

// Returns this machine as a device: its GEMM's speed is given, its memory's is measured on
// `backend`, which must be the CPU's.
RooflineDevice roofline_measure(const Backend *backend, double gemm_flops);

// Returns a Backend that answers as that device's would, a card's by the CUDA backend's own
// functions (cuda/sizes.h, cuda/gemm_path.h), and whose operations take time alone, on a clock of
// their own (`now`): by what their contracts move and compute (model/work.h). Its memory is
// addresses that nothing may look at. The last one made is in force.
const Backend *roofline_backend(const RooflineDevice *device);

// Returns how long a step takes, which is taken on that Backend: profile_line and
// profile_print_operations then say its operations.
RooflineStep roofline_step(const RooflineDevice *device, const RooflineRun *run);

// Prints it for a person.
void roofline_print_step(const RooflineDevice *device, const RooflineStep *step, int ranks, FILE *stream);

// Prints how long so many tokens take, in seconds without overlap, of several ranks also with it.
void roofline_print_time(double tokens, double seconds, double overlapped, int ranks, FILE *stream);
