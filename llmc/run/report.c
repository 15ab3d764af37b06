#include "report.h"
#include "plan_memory.h"
#include "llmc/model/profile.h"
#include "llmc/base/system.h" // system_cpu_name

#include <math.h>
#include <string.h>

// COMMIT comes from make.
void report_version(void) { printf("train_gpt_mxfp8 %s\n", COMMIT); }

void report_device_info(void) {
    char cpu[128], device[1024];
    system_cpu_name(cpu, sizeof(cpu));
    backend_cpu()->describe(device, sizeof(device));
    printf("CPU               %s: %s\n", cpu, device);
    comm_print_info(stdout);
    backend_cuda_print_info(stdout);
}

static void print_memory(const Plan *p) {
    size_t by_kind[NUM_MEMORY_KINDS];
    char text[32];
    size_t total = plan_memory(by_kind, p, p->B);
    printf(p->sharding.comm->size > 1 ? "memory   of each of %d ranks\n" : "memory\n", p->sharding.comm->size);
    for (int kind = 0; kind < NUM_MEMORY_KINDS; kind++) {
        if (by_kind[kind]) {
            printf("  %-28s %10s\n", memory_kind_name((MemoryKind)kind), human_bytes(text, (double)by_kind[kind]));
        }
    }
    printf("  %-28s %10s", "total", human_bytes(text, (double)total));
    printf(" of %s free\n", human_bytes(text, fmax(0, plan_available_bytes(p))));
    double tokens = (double)(p->B * p->T);
    printf("  kept for backward per token and layer: %.0f bytes (%.2f per channel)\n",
           (double)by_kind[MEMORY_KEPT] / tokens / (double)p->config.layers,
           (double)by_kind[MEMORY_KEPT] / tokens / (double)(p->config.layers * p->config.channels));
}

static void print_shape(const Plan *p) {
    char count[32], more[256];
    const GPTConfig *c = &p->config;
    printf("model    %.1fM parameters: %ld layer%s, %ld head%s, %ld channels, %ld positions, %ld tokens in the "
           "vocabulary\n",
           (double)gpt_count_parameters(c).all / 1e6, c->layers, plural(c->layers), c->heads, plural(c->heads),
           c->channels, c->max_seq_len, c->vocab_size);
    gpt_describe(more, sizeof(more), c);
    if (more[0]) printf("         %s\n", more);
    printf("         %s FLOPs per token at sequence length %ld\n", human_count(count, gpt_flops_per_token(c, p->T)),
           p->T);
}

static void print_documents(const Plan *p) {
    const GPTConfig *c = &p->config;
    if (!c->mask_documents) return;
    printf("         attention and positions within documents");
    if (c->end_of_text >= 0) printf(", which begin with token %d", c->end_of_text);
    printf("%s\n", p->backend == backend_cpu() ? "" : "; by this program's kernels, since cuDNN isn't given the mask");
}

static void print_recipe(const Plan *p, const Recipe *recipe) {
    RecipeEffects effects = gpt_recipe_effects(&p->config, recipe);
    recipe_print(recipe, &effects, stdout);
}

void report_model(const Plan *p) {
    char cpu[128], device[1024];
    system_cpu_name(cpu, sizeof(cpu));
    p->backend->describe(device, sizeof(device));
    printf("device   %s%s%s\n", p->card ? "" : cpu, p->card ? "" : ": ", device);
    if (p->no_gpu.message[0]) printf("gpu      none: %s\n", p->no_gpu.message);
    if (p->native_check[0]) printf("mx gemm  %s\n", p->native_check);
    print_shape(p);
    print_documents(p);
    print_recipe(p, &p->recipe);
    for (int i = p->first_phase + 1; i < p->recipes.count; i++) {
        printf("from step %ld on\n", p->recipes.phases[i].first_step);
        print_recipe(p, &p->recipes.phases[i].recipe);
    }
    print_memory(p);
}

static WireBytes wire_of(const Plan *p, int phase) {
    return gpt_wire_bytes(p->config, &p->recipes.phases[phase].recipe, p->backend, &p->sharding, p->accumulation);
}

// Prints what each rank sends in a step of a phase, with the other ways to gather beside the one
// that is taken.
static void print_wire_of(const Plan *p, int phase) {
    WireBytes bytes = wire_of(p, phase);
    char text[4][32];
    printf("a rank sends %s of gradients (%s) a step", human_bytes(text[0], bytes.gradients),
           REDUCE_NAMES[p->sharding.reduce == FORMAT_BF16]);
    if (p->sharding.zero > 0) {
        const char *now = human_bytes(text[0], bytes.weights[p->sharding.gather]);
        printf(" and %s of weights (%s;", now, GATHER_NAMES[p->sharding.gather]);
        for (int gather = 0; gather <= GATHER_FP32; gather++) {
            printf(" %s %s%s", GATHER_NAMES[gather], human_bytes(text[1 + gather], bytes.weights[gather]),
                   gather < GATHER_FP32 ? "," : ")");
        }
    }
    printf("\n");
}

// Prints that of a run: of later recipes, too, where they send something else.
static void print_wire(const Plan *p) {
    WireBytes before = wire_of(p, p->first_phase);
    printf("wire     ");
    print_wire_of(p, p->first_phase);
    for (int i = p->first_phase + 1; i < p->recipes.count; i++) {
        WireBytes bytes = wire_of(p, i);
        bool is_same = bytes.gradients == before.gradients &&
                       bytes.weights[p->sharding.gather] == before.weights[p->sharding.gather];
        before = bytes;
        if (is_same) continue;
        printf("         from step %ld on ", p->recipes.phases[i].first_step);
        print_wire_of(p, i);
    }
}

static void print_data(const Plan *p) {
    char tokens[32];
    if (p->train.num_sources == 0) return;
    printf("data     %s tokens to train on in %d file%s, %ld window%s of %ld",
           human_count(tokens, (double)p->train.num_tokens), p->train.num_files, plural(p->train.num_files),
           p->train.num_windows, plural(p->train.num_windows), p->T);
    if (p->has_val) printf("; %s to validate on", human_count(tokens, (double)p->val.num_tokens));
    printf("\n");
    if (p->has_other_val) {
        printf("         these are other tokens than the checkpoint's run validated on: losses of validation before "
               "and after it\n         can't be compared, and the best one counts from here\n");
    }
    const Settings *s = &p->line.settings;
    if (!p->has_tokenizer && !p->checkpoint && !s->init_from && !settings_given(&p->line, &s->shape.vocab_size)) {
        printf(
            "         without a tokenizer.bin the vocabulary is the preset's; --tokenizer or --vocab-size gives another\n");
    }
}

static void print_steps(const Plan *p) {
    int64_t samples = plan_samples_per_step(p);
    char tokens[32];
    int ranks = p->sharding.comm->size;
    printf("run      %s tokens a step (%ld sequence%s of %ld, %ld micro-batch%s",
           human_count(tokens, (double)(samples * p->T)), p->B, plural(p->B), p->T, p->accumulation,
           p->accumulation == 1 ? "" : "es");
    if (ranks > 1) printf(", on each of %d ranks", ranks);
    printf(")");
    if (p->total_steps != INT64_MAX) {
        printf(", %ld step%s", p->total_steps, plural(p->total_steps));
        double taken = (double)plan_samples_of_run(p);
        if (p->train.num_windows > 0) printf(", %.3g epochs", taken / (double)p->train.num_windows);
    } else if (p->line.settings.max_minutes > 0) {
        printf(
            ", for %g minutes; the learning rate stays at its peak, since a schedule needs --max-steps, --max-tokens or --epochs",
            p->line.settings.max_minutes);
    }
    int64_t warmup = p->line.settings.schedule.warmup_steps;
    if (warmup > p->total_steps) printf("; too short for its warm-up of %ld step%s", warmup, plural(warmup));
    int64_t last_switch = p->recipes.phases[p->recipes.count - 1].first_step;
    if (last_switch >= p->total_steps) printf("; too short for its --recipe-at of step %ld", last_switch);
    printf("\n");
}

// Prints what Newton-Schulz costs, which every rank does for all matrices.
static void print_muon(const Plan *p) {
    char hidden[32], flops[32];
    ParamCounts counts = gpt_count_parameters(&p->config);
    double tokens = (double)(p->B * p->T * p->accumulation);
    if (!p->sharding.muon) return;
    printf("muon     of %s parameters; Newton-Schulz takes %s FLOPs a step, %.3g %% of the model's%s\n",
           human_count(hidden, (double)counts.hidden), human_count(flops, counts.muon_flops),
           100 * counts.muon_flops / tokens / gpt_flops_per_token(&p->config, p->T),
           p->sharding.comm->size > 1 ? " on each rank" : "");
}

static void print_data_and_steps(const Plan *p) {
    print_data(p);
    print_steps(p);
    print_muon(p);
    bool is_known = p->total_steps != INT64_MAX;
    bool is_blend = p->train.num_sources > 0 && !p->train.is_pattern;
    if (is_blend) blend_print(&p->train, is_known ? plan_samples_of_run(p) : 0, stdout);
}

void report_run(const Plan *p) {
    print_data_and_steps(p);
    printf(
        "speed    this machine's %s GEMM reaches %.0f GFLOP/s; \"%% GEMM\" is the model's FLOP/s as a fraction of it\n",
        FORMAT_NAMES[p->recipe.activation_dtype], p->gemm_flops / 1e9);
    if (p->comm->size > 1) {
        static const char *const ZERO[] = {"each has everything", "masters and moments are sharded",
                                           "masters, moments and gradients are sharded"};
        printf("ranks    %s; %s (--zero %d)\n", p->comm->description, ZERO[p->sharding.zero], p->sharding.zero);
        print_wire(p);
    }
    printf("output   %s\n", p->line.settings.out_dir);
    if (p->has_tokenizer && !tokenizer_has_jsons(&p->tokenizer)) {
        printf("         transformers finds no tokenizer in its checkpoints: data/tokenizer_json.py writes the "
               "tokenizer.json that is missing beside tokenizer.bin\n");
    }
    fflush(stdout);
}

// Returns how many steps the run still takes in a phase.
static int64_t steps_of_phase(const Plan *p, int phase) {
    int64_t begin = phase == p->first_phase ? p->start.step : p->recipes.phases[phase].first_step;
    int64_t end = phase + 1 < p->recipes.count ? p->recipes.phases[phase + 1].first_step : p->total_steps;
    return max_int64(0, min_int64(end, p->total_steps) - begin);
}

// Prints the time of a step, where it can be known, and what it would have to be told; and the time
// of all that are left.
static void print_planned_step(const Plan *p) {
    double link = 1e9 * p->line.settings.link_bandwidth;
    int ranks = p->sharding.comm->size;
    if (!p->card && p->backend != backend_cpu()) {
        printf("plan     for the time of a step say with --device which card, such as h100\n");
        return;
    }
    if (ranks > 1 && link == 0) {
        printf("plan     for the time of a step say with --link-bandwidth how many GB/s a rank can send\n");
        return;
    }
    RooflineDevice device = p->card ? *p->card : roofline_measure(p->backend, p->gemm_flops / p->comm->size);
    RooflineRun run = {.config = p->config,
                       .sharding = &p->sharding,
                       .B = p->B,
                       .T = p->T,
                       .accumulation = p->accumulation,
                       .link_bandwidth = link};
    bool is_known = p->total_steps != INT64_MAX;
    RooflineStep step;
    double steps = 0, seconds = 0, overlapped = 0;
    for (int i = p->recipes.count; i-- > p->first_phase;) { // the first recipe last: the table is of its operations
        run.recipe = &p->recipes.phases[i].recipe;
        run.wire = ranks > 1 ? wire_of(p, i) : (WireBytes){0};
        step = roofline_step(&device, &run);
        double taken = (double)steps_of_phase(p, i);
        steps += taken;
        seconds += taken * step.step;
        overlapped += taken * step.overlapped_step;
    }
    roofline_print_step(&device, &step, ranks, stdout);
    if (p->recipes.count > p->first_phase + 1) {
        printf("  (this and the table are of step %ld's recipe%s)\n", p->start.step,
               is_known ? ", the time of all recipes" : "");
    }
    if (is_known && steps > 0) roofline_print_time(steps * step.tokens, seconds, overlapped, ranks, stdout);
    printf("\n");
    profile_print_operations(1);
}

bool report_dry_run(const Plan *p) {
    char text[32];
    size_t by_kind[NUM_MEMORY_KINDS];
    double total = (double)plan_memory(by_kind, p, p->B), beside = plan_staging_bytes(p, by_kind);
    double spare = plan_available_bytes(p) - total - beside;
    if (beside > 0) printf("  %-28s %10s\n", "to save and load, besides", human_bytes(text, beside));
    human_bytes(text, fabs(spare));
    printf("  it %s: %s are %s\n", spare >= 0 ? "fits" : "doesn't fit", text, spare >= 0 ? "left" : "missing");
    print_data_and_steps(p);
    if (p->sharding.comm->size > 1) print_wire(p);
    if (p->card || p->line.settings.world_size > 0) print_planned_step(p);
    if (spare >= 0 || p->comm->rank > 0) return spare >= 0;
    fflush(stdout); // before the sentence on stderr
    fprintf(stderr, "train_gpt_mxfp8: it doesn't fit, %s are missing: ", text);
    if (plan_fits_at_zero_2(p)) fprintf(stderr, "--zero 2 would fit; or ");
    int64_t B = plan_micro_batch_that_fits(p, total + spare);
    if (B > 0) {
        fprintf(stderr, "--batch-size %ld would fit (--total-batch-size %ld keeps the batch of a step); or take", B,
                plan_samples_per_step(p) * p->T);
    } else {
        fprintf(stderr, "take a smaller model, --batch-size or --seq-len, or");
    }
    fprintf(stderr, " %s\n",
            p->backend != backend_cpu() ? "more ranks"
            : p->ranks_here > 1         ? "fewer ranks on this machine"
                                        : "ranks on more machines");
    return false;
}
