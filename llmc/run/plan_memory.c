#include "plan_memory.h"
#include "llmc/base/util.h"

#include <errno.h> // program_invocation_short_name
#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t total_bytes(const size_t by_kind[NUM_MEMORY_KINDS]) {
    size_t total = 0;
    for (int kind = 0; kind < NUM_MEMORY_KINDS; kind++) {
        total = memory_add(total, by_kind[kind]);
    }
    return total;
}

size_t plan_memory(size_t by_kind[NUM_MEMORY_KINDS], const Plan *p, int64_t B) {
    size_t of_recipe[NUM_MEMORY_KINDS];
    gpt_memory(by_kind, p->config, &p->recipe, p->backend, B, p->T, true, &p->sharding);
    for (int i = recipe_schedule_at(&p->recipes, p->start.step); i < p->recipes.count; i++) {
        gpt_memory(of_recipe, p->config, &p->recipes.phases[i].recipe, p->backend, B, p->T, true, &p->sharding);
        if (total_bytes(of_recipe) > total_bytes(by_kind)) memcpy(by_kind, of_recipe, sizeof(of_recipe));
    }
    if (p->line.settings.gradient_bias_every) by_kind[MEMORY_EXACT] = gpt_exact_memory(p->config, p->backend, B, p->T);
    return total_bytes(by_kind);
}

// Returns the bytes of the host's memory that masters and moments take while the recipe is
// switched.
static double switched_bytes(const Plan *p, const size_t by_kind[NUM_MEMORY_KINDS]) {
    if (p->first_phase + 1 >= p->recipes.count) return 0;
    return (double)by_kind[MEMORY_MASTERS] + (double)by_kind[MEMORY_MOMENTS];
}

// A parameter is there twice while weights are loaded and saved, and masters and moments once more
// while the recipe is switched.
double plan_staging_bytes(const Plan *p, const size_t by_kind[NUM_MEMORY_KINDS]) {
    if (p->backend != backend_cpu()) return 0;
    double largest = (double)(p->config.vocab_size * p->config.channels);
    for (int i = 0; i < LINEARS_PER_BLOCK; i++) {
        LinearShape shape = gpt_linear_shape(&p->config, i);
        largest = fmax(largest, (double)(shape.N * shape.K));
    }
    return 2 * sizeof(float) * largest + switched_bytes(p, by_kind);
}

// Ranks of a machine share its memory, but have a GPU each.
double plan_available_bytes(const Plan *p) {
    return p->backend->available_memory() / (p->backend == backend_cpu() ? p->ranks_here : 1);
}

int64_t plan_micro_batch_that_fits(const Plan *p, double available) {
    size_t by_kind[NUM_MEMORY_KINDS];
    if ((double)plan_memory(by_kind, p, 1) > available) return 0;
    int64_t B = 1, too_large = p->B + 1; // a larger micro-batch takes more
    while (B + 1 < too_large) {
        int64_t middle = (B + too_large) / 2;
        *((double)plan_memory(by_kind, p, middle) <= available ? &B : &too_large) = middle;
    }
    while (p->B * p->accumulation % B != 0) {
        B--;
    }
    return B;
}

static bool multiplies_bf16(const Plan *p) {
    for (int i = 0; i < p->recipes.count; i++) {
        if (p->recipes.phases[i].recipe.activation_dtype != FORMAT_BF16) return false;
    }
    return true;
}

static bool fits(const Plan *p) {
    size_t by_kind[NUM_MEMORY_KINDS];
    double total = (double)plan_memory(by_kind, p, p->B);
    return total + plan_staging_bytes(p, by_kind) <= plan_available_bytes(p);
}

bool plan_fits_at_zero_2(const Plan *p) {
    Plan at_2 = *p;
    at_2.sharding.zero = 2;
    return p->sharding.comm->size > 1 && p->sharding.zero < 2 && fits(&at_2);
}

// Returns whether GEMMs decode operands of one of the run's scalings.
static bool decodes_any(const Plan *p) {
    for (int i = 0; i < NUM_SCALINGS; i++) {
        if (p->scalings >> i & 1 && p->backend->quantized_form((Scaling)i, AXIS_ROWWISE, true) == FORM_DECODED)
            return true;
    }
    return false;
}

// Sets an option of memory, and clears it again where the plan doesn't fit then.
static void set_if_it_fits(const Plan *p, bool *option) {
    *option = true;
    *option = fits(p);
}

void plan_spare_memory(Plan *p) {
    if (p->backend == backend_cpu() || !multiplies_bf16(p)) return;
    set_if_it_fits(p, &p->sharding.keeps_values);
    if (decodes_any(p)) set_if_it_fits(p, &p->sharding.decoded);
    set_if_it_fits(p, &p->sharding.keeps_activations);
}

// Says that the memory here doesn't hold the plan, and what it could.
static void say_too_large(const Plan *p, double total, double available) {
    char needed[32], present[32];
    human_bytes(needed, total);
    human_bytes(present, available);
    int64_t B = plan_micro_batch_that_fits(p, available);
    fprintf(stderr, "train_gpt_mxfp8: this run needs %s of memory and %s are free: ", needed, present);
    bool fits_at_2 = plan_fits_at_zero_2(p);
    if (fits_at_2) fprintf(stderr, "--zero 2 would fit; or ");
    if (B > 0) {
        fprintf(stderr, "--batch-size %ld would fit (--total-batch-size %ld keeps the batch of a step)\n", B,
                plan_samples_per_step(p) * p->T);
    } else {
        fprintf(stderr, "%stake a smaller model or --seq-len\n", fits_at_2 ? "" : "even --batch-size 1 doesn't fit; ");
    }
}

void plan_check_memory(const Plan *p) {
    size_t by_kind[NUM_MEMORY_KINDS];
    double total = (double)plan_memory(by_kind, p, p->B);
    double available = fmax(0, plan_available_bytes(p) - plan_staging_bytes(p, by_kind));
    // With a GPU the host's memory is another one, which its ranks share.
    double host = p->backend == backend_cpu() ? 0 : switched_bytes(p, by_kind) * p->ranks_here;
    bool is_too_large = total > available, is_too_much = host > 0 && host > backend_cpu()->available_memory();
    char text[32];
    if (is_too_large) say_too_large(p, total, available);
    if (is_too_much) {
        fprintf(stderr,
                "%s: --recipe-at keeps masters and moments in this machine's memory while it switches, and %s aren't "
                "free: stop at that step, and go on with --resume --recipe\n",
                program_invocation_short_name, human_bytes(text, host));
    }
    if (comm_any(p->comm, is_too_large || is_too_much)) exit(EXIT_BAD_INPUT);
}
