/*
Runs the threads of CUDA blocks as fibers on the CPU, and stands in for the CUDA runtime.

A block is run by one OS thread, blocks are spread over OpenMP's threads. A CUDA thread starts as a
plain call, on the stack of the OS thread; the next follows when it returns. Where one must wait,
its fiber (a stack) waits with it, and another fiber goes on: it starts the threads that haven't,
then those go on whose barrier is complete.
*/
#include "hostcuda.h"
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <omp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if __has_include(<sanitizer/common_interface_defs.h>)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

enum {
    MAX_THREADS = 1024, // of a block
    LANES = 32,
    MAX_WARPS = MAX_THREADS / LANES,
    GUARD_BYTES = 256,
    PARALLEL_THREADS = 16384, // fewer aren't worth waking OS threads for
    POISON = 0xFF,
    MULTIPROCESSORS = 132,
    L2_BYTES = 50 << 20,
    SHARED_BYTES = 48 << 10,         // of a block
    SHARED_OPTIN_BYTES = 227 << 10,  // where cudaFuncSetAttribute allows it
    SHARED_SM_BYTES = 228 << 10,     // of a multiprocessor
    SHARED_RESERVED_BYTES = 1 << 10, // of each resident block
    STACK_BYTES = 256 << 10,         // of which pages are used as they are touched
    // A distance between stacks that spreads their upper ends over the sets of the caches.
    STACK_STRIDE = STACK_BYTES + 17 * 64,
};
static const uint64_t DEVICE_BYTES = (uint64_t)80 << 30;

static struct {
    uint64_t seed, launches;
    int major, minor;
    bool started, forked;
} device = {0, 0, 9, 0, false, false};

[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char *format, ...) {
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fflush(stdout);
    fprintf(stderr, "hostcuda: %s\n", text);
    _exit(HOSTCUDA_EXIT);
}

// -------------------------------------------------------------------------------------------------
// Stack switches

#if defined(__x86_64__) && !defined(HOSTCUDA_UCONTEXT)

typedef void *Context; // a stack pointer, with the registers that a call preserves above it
extern "C" void hostcuda_switch(Context *from, const Context *to);
__asm__(".text\n"
        ".type hostcuda_switch, @function\n"
        "hostcuda_switch:\n"
        "push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
        "mov %rsp, (%rdi)\n"
        "mov (%rsi), %rsp\n"
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp\n"
        "ret\n"
        ".size hostcuda_switch, . - hostcuda_switch\n");

static void context_make(Context *context, char *stack, size_t bytes, void (*entry)()) {
    void **top = (void **)(stack + bytes);
    *--top = NULL; // where `entry` would return to
    *--top = (void *)entry;
    *context = top - 6; // six registers, of any value
}

#else

#include <ucontext.h>
typedef ucontext_t Context;
static void hostcuda_switch(Context *from, const Context *to) { swapcontext(from, to); }

static void context_make(Context *context, char *stack, size_t bytes, void (*entry)()) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = bytes;
    makecontext(context, entry, 0);
}

#endif

// -------------------------------------------------------------------------------------------------
// Threads, fibers, workers

typedef struct Fiber Fiber;
struct Fiber {
    Context context;
    char *stack; // lowest address
    size_t stack_bytes;
    void *fake_stack; // AddressSanitizer's
    Fiber *next;      // in a list
};

typedef struct {
    uint3 index;
    Fiber *fiber;      // that waits with it
    HostcudaSite site; // where it waits, or last did
    uint64_t value, result;
    HostcudaCombine *combine;
    int source; // lane
    bool exited;
} Thread;

typedef struct {
    uint32_t present, waiting; // lanes that haven't exited; lanes that wait in a warp operation
} Warp;

// A launch
typedef struct {
    const char *name; // "kernel k"
    dim3 grid, block;
    size_t shared_bytes;
    void (*body)(const void *);
    const void *closure;
    uint64_t blocks, seed, number;
    int threads; // of a block
} Launch;

// What an OS thread needs to run blocks of one launch after another.
typedef struct Worker Worker;
struct Worker {
    Worker *next;
    const Launch *launch;
    Fiber native; // the OS thread's own stack
    Fiber fibers[MAX_THREADS];
    int num_fibers;
    char *stacks;
    Fiber *current, *idle;
    Thread threads[MAX_THREADS];
    Thread *thread; // that runs
    Warp warps[MAX_WARPS];
    uint64_t seed;               // of the block that runs
    uint16_t order[MAX_THREADS]; // in which threads start
    int started, present;
    uint16_t arrived[MAX_THREADS]; // at the barrier of the whole block, in this order
    int num_arrived;
    bool different_barriers;
    uint16_t ready[MAX_THREADS]; // a ring, in the order in which they became so
    unsigned first_ready, end_ready;
    char *shared;    // dynamic, between guards
    bool *written;   // which __shared__ variables blocks of this launch have written
    uint64_t blocks; // of this launch that have been run
};

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;
__thread void *hostcuda_shared_memory;
extern "C" __thread Worker *hostcuda_worker; // so named in the symbol table
__thread Worker *hostcuda_worker;
static Worker *free_workers;

static uint64_t random_next(uint64_t *state) { // splitmix64
    uint64_t z = *state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

static void switch_to(Worker *w, Fiber *to) {
    Fiber *from = w->current;
    if (from == to) return;
    w->current = to;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
#endif
    hostcuda_switch(&from->context, &to->context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(from->fake_stack, NULL, NULL);
#endif
}

// -------------------------------------------------------------------------------------------------
// Reports

static bool same_site(const Thread *a, const Thread *b) {
    return a->site.line == b->site.line && a->site.mask == b->site.mask && a->site.name == b->site.name &&
           a->site.file == b->site.file;
}

[[noreturn]] static void report_deadlock(const Worker *w) {
    char text[3000] = "";
    size_t length = 0;
    for (int first = 0, end; first < w->launch->threads && length < sizeof(text) - 500; first = end) {
        const Thread *thread = &w->threads[first];
        for (end = first + 1; end < w->launch->threads; end++) {
            const Thread *other = &w->threads[end];
            if (other->exited != thread->exited || (!other->exited && !same_site(other, thread))) break;
        }
        char *at = text + length;
        size_t left = sizeof(text) - length;
        if (thread->exited) {
            length += snprintf(at, left, "threads %d to %d have exited, ", first, end - 1);
        } else {
            const char *slash = strrchr(thread->site.file, '/');
            length += snprintf(at, left, "threads %d to %d wait at %s (%.200s:%d), ", first, end - 1, thread->site.name,
                               slash ? slash + 1 : thread->site.file, thread->site.line);
        }
    }
    fail("divergent barrier in %s, block (%u, %u, %u): %sand none can go on", w->launch->name, blockIdx.x, blockIdx.y,
         blockIdx.z, text);
}

// -------------------------------------------------------------------------------------------------
// Scheduling

// Leaves a fiber whose thread waits, or that has nothing to do, for one that can go on: by the seed
// the first that could or the last, since then warps run ahead of others as far as barriers let
// them.
static void go_on(Worker *w) {
    if (w->first_ready != w->end_ready) {
        unsigned at = w->seed & 2 ? --w->end_ready : w->first_ready++;
        switch_to(w, w->threads[w->ready[at % MAX_THREADS]].fiber);
    } else if (w->present == 0) {
        switch_to(w, &w->native);
    } else {
        report_deadlock(w);
    }
}

static void make_ready(Worker *w, int index, uint64_t result) {
    w->threads[index].result = result;
    w->ready[w->end_ready++ % MAX_THREADS] = (uint16_t)index;
}

// Lets the threads at the barrier of the whole block go on if all are there.
static void try_block(Worker *w) {
    if (w->num_arrived == 0 || w->num_arrived < w->present || w->different_barriers) return;
    HostcudaCombine *combine = w->threads[w->arrived[0]].combine;
    uint64_t result = w->threads[w->arrived[0]].value;
    for (int i = 1; combine && i < w->num_arrived; i++) {
        result = combine(result, w->threads[w->arrived[i]].value);
    }
    for (int i = 0; i < w->num_arrived; i++) {
        make_ready(w, w->arrived[i], result);
    }
    w->num_arrived = 0;
}

// Lets the lanes that wait where lane `index % LANES` waits go on if all of its mask that haven't
// exited are there.
static void try_warp(Worker *w, int index) {
    Warp *warp = &w->warps[index / LANES];
    Thread *lanes = &w->threads[index / LANES * LANES], *thread = &w->threads[index];
    uint32_t all = (uint32_t)thread->site.mask & warp->present;
    if ((warp->waiting & all) != all) return;
    for (uint32_t rest = all; rest != 0; rest &= rest - 1) {
        if (!same_site(thread, &lanes[__builtin_ctz(rest)])) return;
    }
    uint64_t folded = 0;
    if (thread->combine != NULL) {
        folded = lanes[__builtin_ctz(all)].value;
        for (uint32_t rest = all & (all - 1); rest != 0; rest &= rest - 1) {
            folded = thread->combine(folded, lanes[__builtin_ctz(rest)].value);
        }
    }
    int mix = (int)(w->seed % LANES); // another order of lanes
    for (int i = 0; i < LANES; i++) {
        int lane = i ^ mix;
        if (!(all >> lane & 1)) continue;
        bool takes_part = all >> lanes[lane].source & 1;
        uint64_t shuffled = takes_part ? lanes[lanes[lane].source].value : UINT64_MAX;
        make_ready(w, index / LANES * LANES + lane, thread->combine ? folded : shuffled);
    }
    warp->waiting &= ~all;
}

static void thread_exited(Worker *w, int index) {
    w->threads[index].exited = true;
    w->present--;
    Warp *warp = &w->warps[index / LANES];
    warp->present &= ~((uint32_t)1 << index % LANES);
    try_block(w);
    // Only one group of lanes can have waited for this one alone, but it may be any.
    for (uint32_t rest = warp->waiting; rest != 0; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        if (warp->waiting >> lane & 1) try_warp(w, index / LANES * LANES + lane);
    }
}

// Runs threads that haven't started until none is left. Not inlined: a fiber that was idle may find
// itself on another OS thread, where thread-local variables are elsewhere.
[[gnu::noinline]] static void run_threads(Worker *w) {
    const Launch *launch = w->launch;
    while (w->started < launch->threads) {
        int index = w->order[w->started++];
        w->thread = &w->threads[index];
        w->thread->exited = false;
        threadIdx = w->thread->index;
        launch->body(launch->closure);
        thread_exited(w, index);
    }
}

static void fiber_main() {
    Worker *w = hostcuda_worker;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
    for (;;) {
        run_threads(w);
        Fiber *self = w->current;
        self->next = w->idle;
        w->idle = self;
        go_on(w);
    }
}

static void start_thread(Worker *w) {
    Fiber *fiber = w->idle;
    if (fiber != NULL) {
        w->idle = fiber->next;
    } else {
        fiber = &w->fibers[w->num_fibers];
        fiber->stack = w->stacks + (size_t)w->num_fibers++ * STACK_STRIDE;
        fiber->stack_bytes = STACK_BYTES;
        context_make(&fiber->context, fiber->stack, STACK_BYTES, fiber_main);
    }
    switch_to(w, fiber);
}

uint64_t hostcuda_wait(HostcudaSite site, uint64_t value, int source, HostcudaCombine *combine) {
    Worker *w = hostcuda_worker;
    if (w == NULL) fail("%s outside a kernel", site.name);
    Thread *thread = w->thread;
    int index = (int)(thread - w->threads);
    thread->fiber = w->current;
    thread->site.name = site.name; // part by part: a vector load of all waits for the caller's scalar stores
    thread->site.file = site.file;
    thread->site.line = site.line;
    thread->site.mask = site.mask;
    thread->value = value;
    thread->combine = combine;
    thread->source = source;
    if (site.mask == HOSTCUDA_BLOCK) {
        w->arrived[w->num_arrived++] = (uint16_t)index;
        if (!same_site(thread, &w->threads[w->arrived[0]])) w->different_barriers = true;
        try_block(w);
    } else {
        if (!(site.mask >> index % LANES & 1)) {
            fail("%s, block (%u, %u, %u): thread %d calls %s (%s:%d) with mask 0x%X, in which its lane isn't",
                 w->launch->name, blockIdx.x, blockIdx.y, blockIdx.z, index, site.name, site.file, site.line,
                 (unsigned)site.mask);
        }
        w->warps[index / LANES].waiting |= (uint32_t)1 << index % LANES;
        try_warp(w, index);
    }
    if (w->started < w->launch->threads) {
        start_thread(w);
    } else {
        go_on(w);
    }
    w->thread = thread;
    threadIdx = thread->index;
    return thread->result;
}

// -------------------------------------------------------------------------------------------------
// Guards around memory. With AddressSanitizer they may not be touched; without, they are looked at
// now and then. Read as FP32 or BF16 they are NaN.

#ifdef __SANITIZE_ADDRESS__
static void guard_set(char *guard) { ASAN_POISON_MEMORY_REGION(guard, GUARD_BYTES); }
static void guard_clear(char *guard) { ASAN_UNPOISON_MEMORY_REGION(guard, GUARD_BYTES); }
static int guard_damage(const char *, bool) { return -1; }
#else
#define TIMES_16(bytes) bytes bytes bytes bytes bytes bytes bytes bytes bytes bytes bytes bytes bytes bytes bytes bytes
static const char guard_pattern[GUARD_BYTES + 1] =
    TIMES_16("\xA5\xFF\xA5\xFF\xA5\xFF\xA5\xFF\xA5\xFF\xA5\xFF\xA5\xFF\xA5\xFF");
static void guard_set(char *guard) { memcpy(guard, guard_pattern, GUARD_BYTES); }
static void guard_clear(char *) {}

// The distance from the guarded memory, which lies before or after, of the nearest byte that was
// written; -1: none.
static int guard_damage(const char *guard, bool before) {
    if (memcmp(guard, guard_pattern, GUARD_BYTES) == 0) return -1;
    int distance = 0;
    for (int at; at = before ? GUARD_BYTES - 1 - distance : distance, guard[at] == guard_pattern[at];) {
        distance++;
    }
    return distance;
}
#endif

// `who` is to be followed by what it did to `bytes` bytes of `what`.
static void check_guards(const char *memory, size_t bytes, const char *who, const char *what) {
    int start = guard_damage(memory - GUARD_BYTES, true), end = guard_damage(memory + bytes, false);
    if (start >= 0) fail("%s wrote outside of %zu bytes of %s, %d bytes before the start", who, bytes, what, start + 1);
    if (end >= 0) fail("%s wrote outside of %zu bytes of %s, %d bytes after the end", who, bytes, what, end);
}

// -------------------------------------------------------------------------------------------------
// __shared__ variables: thread-local ones of the program whose symbols say that they are local to a
// C++ function.

typedef struct {
    size_t offset, bytes; // from the start of the program's thread-local memory
} SharedVariable;
static SharedVariable *shared_variables;
static int num_shared_variables;
static size_t worker_offset;                 // of hostcuda_worker, which tells where that memory is
static __thread bool variables_are_poisoned; // all of this OS thread's, whenever it runs no block

static void find_shared_variables() {
    int file = open("/proc/self/exe", O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) fail("can't read the program's symbols: %s", strerror(errno));
    char *elf = (char *)mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (elf == MAP_FAILED) fail("can't read the program's symbols: %s", strerror(errno));
    const ElfW(Ehdr) *header = (const ElfW(Ehdr) *)elf;
    const ElfW(Shdr) *sections = (const ElfW(Shdr) *)(elf + header->e_shoff);
    bool found = false;
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const char *names = elf + sections[sections[i].sh_link].sh_offset;
        const ElfW(Sym) *symbols = (const ElfW(Sym) *)(elf + sections[i].sh_offset);
        for (size_t j = 0; j < sections[i].sh_size / sizeof(*symbols); j++) {
            const char *name = names + symbols[j].st_name;
            if (ELF64_ST_TYPE(symbols[j].st_info) != STT_TLS || symbols[j].st_shndx == SHN_UNDEF) continue;
            if (strcmp(name, "hostcuda_worker") == 0) {
                worker_offset = symbols[j].st_value;
                found = true;
            } else if (strncmp(name, "_ZZ", 3) == 0) {
                size_t bytes = (size_t)(num_shared_variables + 1) * sizeof(SharedVariable);
                shared_variables = (SharedVariable *)realloc(shared_variables, bytes);
                shared_variables[num_shared_variables++] = {symbols[j].st_value, symbols[j].st_size};
            }
        }
    }
    if (!found) fail("the program has no symbols: don't strip it");
    munmap(elf, (size_t)status.st_size);
    close(file);
}

static char *shared_variable(int i) { return (char *)&hostcuda_worker - worker_offset + shared_variables[i].offset; }

static void poison_variable(int i) { memset(shared_variable(i), POISON, shared_variables[i].bytes); }

// Finds the variables that blocks have written since all were poisoned. A program has 1 MB of them
// and a kernel uses a few KB: poisoning all before each block took most of the time of some tests.
static void find_written(Worker *w) {
    for (int i = 0; i < num_shared_variables; i++) {
        if (w->written[i]) continue;
        const char *bytes = shared_variable(i);
        w->written[i] = (uint8_t)bytes[0] != POISON || memcmp(bytes, bytes + 1, shared_variables[i].bytes - 1) != 0;
    }
}

static void poison_written(const Worker *w) {
    for (int i = 0; i < num_shared_variables; i++) {
        if (w->written[i]) poison_variable(i);
    }
}

// -------------------------------------------------------------------------------------------------
// Launches

static Worker *worker_take(const Launch *launch) {
    Worker *w;
#pragma omp critical
    {
        w = free_workers;
        if (w != NULL) free_workers = w->next;
    }
    if (w == NULL) {
        w = (Worker *)calloc(1, sizeof(Worker));
        size_t bytes = (size_t)MAX_THREADS * STACK_STRIDE;
        void *stacks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        void *shared;
        if (w == NULL || stacks == MAP_FAILED ||
            posix_memalign(&shared, GUARD_BYTES, SHARED_OPTIN_BYTES + 2 * GUARD_BYTES) != 0)
            fail("no memory for stacks");
        madvise(stacks, bytes, MADV_NOHUGEPAGE); // or 2 MB are used for each touch
        w->stacks = (char *)stacks;
        w->shared = (char *)shared + GUARD_BYTES;
        w->written = (bool *)calloc((size_t)num_shared_variables + 1, sizeof(bool));
        if (w->written == NULL) fail("no memory for a launch");
    }
#ifdef __SANITIZE_ADDRESS__
    pthread_attr_t attributes;
    void *stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &w->native.stack_bytes);
    pthread_attr_destroy(&attributes);
    w->native.stack = (char *)stack;
#endif
    w->launch = launch;
    w->current = &w->native;
    uint3 index = {0, 0, 0};
    for (int i = 0; i < launch->threads; i++) {
        w->threads[i].index = index;
        if (++index.x < launch->block.x) continue;
        index.x = 0;
        if (++index.y < launch->block.y) continue;
        index.y = 0;
        index.z++;
    }
    guard_set(w->shared - GUARD_BYTES);
    guard_set(w->shared + launch->shared_bytes);
    hostcuda_worker = w;
    hostcuda_shared_memory = w->shared;
    memset(w->written, false, (size_t)num_shared_variables);
    w->blocks = 0;
    for (int i = 0; !variables_are_poisoned && i < num_shared_variables; i++) {
        poison_variable(i);
    }
    variables_are_poisoned = true;
    blockDim = {launch->block.x, launch->block.y, launch->block.z};
    gridDim = {launch->grid.x, launch->grid.y, launch->grid.z};
    return w;
}

static void worker_release(Worker *w) {
    find_written(w);
    poison_written(w);
    guard_clear(w->shared - GUARD_BYTES);
    guard_clear(w->shared + w->launch->shared_bytes);
    hostcuda_worker = NULL;
#pragma omp critical
    {
        w->next = free_workers;
        free_workers = w;
    }
}

// Returns the seed of a block; block UINT64_MAX stands for the order of a launch's blocks.
static uint64_t seed_of(const Launch *launch, uint64_t block) {
    if (launch->seed != HOSTCUDA_MIXED) return launch->seed;
    uint64_t state = launch->number + (block << 32);
    return random_next(&state) & 1 ? 7 : 0;
}

static void run_block(Worker *w, uint64_t block) {
    const Launch *launch = w->launch;
    int threads = launch->threads;
    blockIdx.x = (unsigned)(block % launch->grid.x);
    blockIdx.y = (unsigned)(block / launch->grid.x % launch->grid.y);
    blockIdx.z = (unsigned)(block / launch->grid.x / launch->grid.y);
    w->seed = seed_of(launch, block);
    for (int i = 0; i < threads; i++) {
        w->order[i] = (uint16_t)i;
    }
    if (w->seed != 0) {
        uint64_t state = w->seed + (block << 32);
        for (int i = 0; i < threads; i++) {
            int j = (int)((random_next(&state) >> 32) * (uint64_t)(i + 1) >> 32);
            w->order[i] = w->order[j];
            w->order[j] = (uint16_t)i;
        }
    }
    for (int i = 0; i * LANES < threads; i++) {
        int lanes = threads - i * LANES;
        w->warps[i] = {lanes < LANES ? ((uint32_t)1 << lanes) - 1 : UINT32_MAX, 0};
    }
    w->started = w->num_arrived = 0;
    w->present = threads;
    w->different_barriers = false;
    poison_written(w);
    memset(w->shared, POISON, launch->shared_bytes);
    run_threads(w);
    if (w->present > 0) go_on(w); // and come back when all have exited
    w->blocks++;
    if ((w->blocks & (w->blocks - 1)) == 0) find_written(w); // after 1, 2, 4, 8 ... blocks
    check_guards(w->shared, launch->shared_bytes, launch->name, "dynamic shared memory");
}

// -------------------------------------------------------------------------------------------------
// Device memory

typedef struct {
    char *memory;
    size_t bytes;
} Allocation;
static Allocation *allocations;
static int num_allocations;
static size_t allocated_bytes;
static char last_kernel[256] = "no kernel";

static void check_allocations(const char *who) {
    for (int i = 0; i < num_allocations; i++) {
        check_guards(allocations[i].memory, allocations[i].bytes, who, "device memory");
    }
}

static __thread cudaError_t last_error;

static cudaError_t returned(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

// Whether `bytes` from `memory` lie in device memory (or, where `device` is false, outside of it),
// all of them.
static bool lies_in(const void *memory, size_t bytes, bool device_memory) {
    const char *start = (const char *)memory;
    bool inside = false, touches = false;
    for (int i = 0; i < num_allocations; i++) {
        const Allocation *a = &allocations[i];
        inside = inside || (start >= a->memory && start + bytes <= a->memory + a->bytes);
        touches = touches || (start < a->memory + a->bytes && start + bytes > a->memory);
    }
    return device_memory ? inside : !touches;
}

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) {
        to_device = lies_in(to, bytes, true);
        from_device = lies_in(from, bytes, true);
    }
    if (!lies_in(to, bytes, to_device) || !lies_in(from, bytes, from_device)) return returned(cudaErrorInvalidValue);
    memmove(to, from, bytes);
    return cudaSuccess;
}

static cudaError_t set(void *memory, int value, size_t bytes) {
    if (!lies_in(memory, bytes, true)) return returned(cudaErrorInvalidValue);
    memset(memory, value, bytes);
    return cudaSuccess;
}

static cudaError_t host_allocate(void **memory, size_t bytes) {
    if (posix_memalign(memory, GUARD_BYTES, bytes) != 0) return returned(cudaErrorMemoryAllocation);
    memset(*memory, POISON, bytes);
    return cudaSuccess;
}

static cudaError_t host_free(void *memory) {
    free(memory);
    return cudaSuccess;
}

static cudaError_t give(int *to, int value) {
    *to = value;
    return cudaSuccess;
}

// Nothing runs later than it was asked for, so that synchronizing is but an occasion to look at the
// guards.
static cudaError_t synchronized() {
    check_allocations(last_kernel);
    return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------
// Launches: what hardware would refuse

typedef struct {
    const void *kernel;
    int max_dynamic_shared_bytes;
} KernelAttributes;
static KernelAttributes *kernels;
static int num_kernels;

static int max_dynamic_shared_bytes(const void *kernel) {
    int bytes = SHARED_BYTES;
    for (int i = 0; i < num_kernels; i++) {
        if (kernels[i].kernel == kernel) bytes = kernels[i].max_dynamic_shared_bytes;
    }
    return bytes;
}

static void in_forked_child() { device.forked = true; }

static void start_up() {
    device.started = true;
    const char *seed = getenv("HOSTCUDA_SEED");
    if (seed != NULL && device.seed == 0) {
        device.seed = strcmp(seed, "mixed") == 0 ? HOSTCUDA_MIXED : strtoull(seed, NULL, 10);
    }
    // OpenMP's threads aren't there in a child.
    pthread_atfork(NULL, NULL, in_forked_child);
    find_shared_variables();
}

cudaError_t hostcuda_run(const char *name, const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
                         void (*body)(const void *), const void *closure) {
    if (!device.started) start_up();
    uint64_t threads = (uint64_t)block.x * block.y * block.z, blocks = (uint64_t)grid.x * grid.y * grid.z;
    if (block.x > MAX_THREADS || block.y > MAX_THREADS || block.z > 64 || threads == 0 || threads > MAX_THREADS ||
        grid.x > INT_MAX || grid.y > 65535 || grid.z > 65535 || blocks == 0 ||
        shared_bytes > (size_t)max_dynamic_shared_bytes(kernel))
        return returned(cudaErrorInvalidConfiguration);

    char kernel_name[sizeof(last_kernel)]; // without the parentheses around a template's arguments
    bool parenthesised = name[0] == '(';
    snprintf(kernel_name, sizeof(kernel_name), "kernel %.*s", (int)strlen(name) - 2 * parenthesised,
             name + parenthesised);
    Launch launch = {kernel_name, grid,   block,       shared_bytes,      body,
                     closure,     blocks, device.seed, device.launches++, (int)threads};
    bool backwards = seed_of(&launch, UINT64_MAX) % 2 == 1;
    uint64_t chunk = blocks / (16 * (uint64_t)omp_get_max_threads()) + 1;
    bool parallel = blocks > 1 && blocks * threads >= PARALLEL_THREADS && !device.forked;
#pragma omp parallel if (parallel)
    {
        Worker *w = worker_take(&launch);
#pragma omp for schedule(dynamic, chunk)
        for (uint64_t i = 0; i < blocks; i++) {
            run_block(w, backwards ? blocks - 1 - i : i);
        }
        worker_release(w);
    }
    check_allocations(kernel_name);
    snprintf(last_kernel, sizeof(last_kernel), "%s", kernel_name);
    return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------
// The CUDA runtime

struct CUstream_st {
    int unused;
};
struct CUevent_st {
    struct timespec time; // tv_nsec is out of range until it is recorded
};

extern "C" {

void hostcuda_set_seed(uint64_t seed) { device.seed = seed; }

void hostcuda_set_capability(int major, int minor) {
    device.major = major;
    device.minor = minor;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    *pointer = NULL;
    if (bytes == 0) return cudaSuccess;
    void *memory;
    bool fits =
        bytes <= DEVICE_BYTES - allocated_bytes && posix_memalign(&memory, GUARD_BYTES, bytes + 2 * GUARD_BYTES) == 0;
    if (fits) {
        char *start = (char *)memory + GUARD_BYTES;
        *pointer = memset(start, POISON, bytes);
        guard_set(start - GUARD_BYTES);
        guard_set(start + bytes);
        allocations = (Allocation *)realloc(allocations, (size_t)(num_allocations + 1) * sizeof(Allocation));
        allocations[num_allocations++] = {start, bytes};
        allocated_bytes += bytes;
    }
    return fits ? cudaSuccess : returned(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *pointer) {
    if (pointer == NULL) return cudaSuccess;
    check_allocations(last_kernel);
    cudaError_t error = cudaErrorInvalidValue;
    for (int i = 0; i < num_allocations; i++) {
        Allocation a = allocations[i];
        if (a.memory != pointer) continue;
        guard_clear(a.memory - GUARD_BYTES);
        guard_clear(a.memory + a.bytes);
        free(a.memory - GUARD_BYTES);
        allocated_bytes -= a.bytes;
        allocations[i] = allocations[--num_allocations];
        error = cudaSuccess;
        break;
    }
    return returned(error);
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes) { return set(memory, value, bytes); }
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t) { return set(memory, value, bytes); }
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return copy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return copy(to, from, bytes, kind);
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return host_allocate(pointer, bytes); }
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) { return host_allocate(pointer, bytes); }
cudaError_t cudaFreeHost(void *pointer) { return host_free(pointer); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = DEVICE_BYTES - allocated_bytes;
    *total = DEVICE_BYTES;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    return host_allocate((void **)stream, sizeof(**stream));
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return host_free(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return synchronized(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return synchronized(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return synchronized(); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    return host_allocate((void **)event, sizeof(**event));
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return synchronized(); }
cudaError_t cudaEventQuery(cudaEvent_t) { return synchronized(); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (start->time.tv_nsec < 0 || end->time.tv_nsec < 0) return returned(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)((double)(end->time.tv_sec - start->time.tv_sec) * 1e3 +
                            (double)(end->time.tv_nsec - start->time.tv_nsec) * 1e-6);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return host_free(event); }

cudaError_t cudaGetDeviceCount(int *count) { return give(count, 1); }
cudaError_t cudaSetDevice(int index) { return returned(index == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDevice(int *index) { return give(index, 0); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int index) {
    if (index != 0) return returned(cudaErrorInvalidDevice);
    *properties = {};
    snprintf(properties->name, sizeof(properties->name), "hostcuda");
    properties->major = device.major;
    properties->minor = device.minor;
    properties->totalGlobalMem = DEVICE_BYTES;
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->warpSize = LANES;
    properties->maxThreadsPerBlock = MAX_THREADS;
    properties->maxThreadsPerMultiProcessor = 2 * MAX_THREADS;
    properties->sharedMemPerBlock = SHARED_BYTES;
    properties->sharedMemPerBlockOptin = SHARED_OPTIN_BYTES;
    properties->sharedMemPerMultiprocessor = SHARED_SM_BYTES;
    properties->l2CacheSize = L2_BYTES;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int index) {
    const struct {
        cudaDeviceAttr attribute;
        int value;
    } known[] = {
        {cudaDevAttrComputeCapabilityMajor, device.major},
        {cudaDevAttrComputeCapabilityMinor, device.minor},
        {cudaDevAttrMultiProcessorCount, MULTIPROCESSORS},
        {cudaDevAttrWarpSize, LANES},
        {cudaDevAttrMaxThreadsPerBlock, MAX_THREADS},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2 * MAX_THREADS},
        {cudaDevAttrMaxSharedMemoryPerBlock, SHARED_BYTES},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, SHARED_OPTIN_BYTES},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, SHARED_SM_BYTES},
        {cudaDevAttrL2CacheSize, L2_BYTES},
        {cudaDevAttrClockRate, 1830000},
        {cudaDevAttrMemoryClockRate, 2619000},
        {cudaDevAttrGlobalMemoryBusWidth, 5120},
    };
    for (const auto &k : known) {
        if (index == 0 && k.attribute == attribute) return give(value, k.value);
    }
    return returned(index == 0 ? cudaErrorInvalidValue : cudaErrorInvalidDevice);
}

cudaError_t cudaDriverGetVersion(int *version) { return give(version, CUDART_VERSION); }
cudaError_t cudaRuntimeGetVersion(int *version) { return give(version, CUDART_VERSION); }

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > SHARED_OPTIN_BYTES)
        return returned(cudaErrorInvalidValue);
    kernels = (KernelAttributes *)realloc(kernels, (size_t)(num_kernels + 1) * sizeof(KernelAttributes));
    kernels[num_kernels++] = {kernel, value};
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
    *attributes = {};
    attributes->maxThreadsPerBlock = MAX_THREADS;
    attributes->maxDynamicSharedSizeBytes = max_dynamic_shared_bytes(kernel);
    attributes->binaryVersion = attributes->ptxVersion = 10 * device.major + device.minor;
    return cudaSuccess;
}

// To which CUDA's template without flags leads.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t bytes, unsigned) {
    if (threads < 1 || threads > MAX_THREADS || bytes > (size_t)max_dynamic_shared_bytes(kernel))
        return returned(cudaErrorInvalidValue);
    int warps = (threads + LANES - 1) / LANES, by_shared = SHARED_SM_BYTES / ((int)bytes + SHARED_RESERVED_BYTES);
    *blocks = 2 * MAX_WARPS / warps;
    if (*blocks > by_shared) *blocks = by_shared;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, bytes, 0);
}

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
};
const char *cudaGetErrorName(cudaError_t error) {
    for (const auto &e : errors) {
        if (e.error == error) return e.name;
    }
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t error) {
    for (const auto &e : errors) {
        if (e.error == error) return e.text;
    }
    return "unrecognized error code";
}

} // extern "C"
