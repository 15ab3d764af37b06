#include "muon.h"
#include "exchange.h"
#include "place.h"
#include "profile.h" // profile_set_muon
#include "llmc/base/util.h"

#include <math.h>
#include <stdlib.h>

enum { STEPS = 5 };
static const float A = 3.4445f, B = -4.7750f, C = 2.0315f; // as in Jordan's implementation
static const double EPS = 1e-7;

bool muon_takes(const ParamList *list, const Param *p) { return list->sharding.muon && p->layer >= 0 && !p->is_vector; }

// Rows of a parameter.
typedef struct {
    int64_t first, count;
} Rows;

// Returns how many matrices a parameter is, and the rows of each.
static int find_matrices(Rows matrices[MAX_PARAM_PARTS], const Param *p) {
    int count = 0;
    for (int64_t first = 0; count < MAX_PARAM_PARTS && p->stacked[count]; first += p->stacked[count++]) {
        matrices[count] = (Rows){first, p->stacked[count]};
    }
    if (count > 0) return count;
    matrices[0] = (Rows){0, p->rows};
    return 1;
}

// Returns those of the rows that are this rank's.
static Rows own_rows(const Param *p, Rows rows) {
    int64_t first = max_int64(rows.first, p->first_row);
    int64_t end = min_int64(rows.first + rows.count, p->first_row + p->num_rows);
    return (Rows){first, max_int64(0, end - first)};
}

// Returns this rank's values of own rows.
static Tensor own_values(const Param *p, float *values, Rows own) {
    return tensor_make(values + (own.first - p->first_row) * p->cols, FORMAT_FP32, own.count, p->cols);
}

// Memory

// What a step of Newton-Schulz reads and writes, A of the smaller of rows and columns squared.
// Operands of products are BF16. What is added to them is FP32, so that a sum is rounded once.
typedef struct {
    Tensor x, product;   // (rows, cols) BF16, FP32: X, (b A + c A A) X
    Tensor gram, square; // (n, n) BF16, FP32: A and then b A + c A A, A A
    bool is_tall;
} Iteration;

static Iteration iteration_of(const MuonScratch *scratch, int64_t first_row, int64_t rows, int64_t cols) {
    int64_t n = min_int64(rows, cols);
    uint16_t *x = scratch->x ? scratch->x + first_row * cols : NULL;
    return (Iteration){.x = tensor_make(x, FORMAT_BF16, rows, cols),
                       .product = tensor_make(scratch->product, FORMAT_FP32, rows, cols),
                       .gram = tensor_make(scratch->gram, FORMAT_BF16, n, n),
                       .square = tensor_make(scratch->square, FORMAT_FP32, n, n),
                       .is_tall = rows > cols};
}

static size_t iteration_workspace(const Backend *backend, Iteration i) {
    Operand x = operand_tensor(i.x), gram = operand_tensor(i.gram);
    size_t most = backend->gemm_workspace(x, x), squaring = backend->gemm_workspace(gram, gram);
    size_t product = i.is_tall ? backend->gemm_workspace(x, gram) : backend->gemm_workspace(gram, x);
    most = squaring > most ? squaring : most;
    return product > most ? product : most;
}

static uint16_t *take_bf16(MemoryPlan *plan, int64_t count) {
    return memory_take(plan, MEMORY_SCRATCH, (size_t)count * sizeof(uint16_t));
}

void muon_layout(ParamList *list, MemoryPlan *plan, const Backend *backend) {
    MuonScratch *scratch = &list->muon;
    int64_t whole = 0, largest = 0, gram = 0;
    *scratch = (MuonScratch){0};
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        Rows matrices[MAX_PARAM_PARTS];
        if (!muon_takes(list, p)) continue;
        whole = max_int64(whole, param_count(p));
        for (int k = find_matrices(matrices, p); k-- > 0;) {
            int64_t n = min_int64(matrices[k].count, p->cols);
            size_t bytes = iteration_workspace(backend, iteration_of(scratch, 0, matrices[k].count, p->cols));
            largest = max_int64(largest, matrices[k].count * p->cols);
            gram = max_int64(gram, n * n);
            scratch->workspace_bytes = bytes > scratch->workspace_bytes ? bytes : scratch->workspace_bytes;
        }
    }
    if (whole == 0) return;
    scratch->x = take_bf16(plan, whole);
    scratch->product = take_floats(plan, MEMORY_SCRATCH, largest);
    scratch->gram = take_bf16(plan, gram);
    scratch->square = take_floats(plan, MEMORY_SCRATCH, gram);
    scratch->workspace = memory_take(plan, MEMORY_SCRATCH, scratch->workspace_bytes);
}

// A step

// Updates a moment and makes of the gradient what Newton-Schulz takes. Writes to `squares` the sums
// of its squares, of each matrix, as far as this rank adds them: of what all ranks have, only the
// first does.
static void add_momentum(const ParamList *list, const Param *p, const Backend *backend, float momentum,
                         float gradient_scale, double *squares) {
    const Rows all = {p->first_row, p->num_rows};
    Tensor moment = own_values(p, p->moment1, all), gradient = own_values(p, p->own_gradient, all);
    Rows matrices[MAX_PARAM_PARTS];
    float share = (1 - momentum) * gradient_scale;
    backend->combine(moment, momentum, moment, share, gradient);
    backend->combine(gradient, share, gradient, momentum, moment);
    for (int k = find_matrices(matrices, p); k-- > 0;) {
        Rows own = own_rows(p, matrices[k]);
        bool is_added = p->is_sharded || list->sharding.comm->rank == 0;
        squares[k] = 0;
        if (is_added)
            squares[k] = backend->sum_of_squares(own_values(p, p->own_gradient, own).data, own.count * p->cols);
    }
}

static void newton_schulz(const Backend *backend, Iteration i) {
    Operand x = operand_tensor(i.x), gram = operand_tensor(i.gram);
    profile_set_muon(true);
    for (int step = 0; step < STEPS; step++) {
        backend->gemm(i.gram, x, x, (GemmOptions){.transpose_a = i.is_tall, .transpose_b = !i.is_tall});
        backend->gemm(i.square, gram, gram, (GemmOptions){0});
        backend->combine(i.gram, B, i.gram, C, i.square);
        backend->gemm(i.product, i.is_tall ? x : gram, i.is_tall ? gram : x, (GemmOptions){0});
        backend->combine(i.x, A, i.x, 1, i.product);
    }
    profile_set_muon(false);
}

// Makes X of all rows from this rank's and the others'.
static void gather_normalised(const ParamList *list, const Param *p, const Backend *backend, const double *squares) {
    Tensor x = tensor_make(list->muon.x, FORMAT_BF16, p->rows, p->cols), none = {0};
    Rows matrices[MAX_PARAM_PARTS];
    for (int k = find_matrices(matrices, p); k-- > 0;) {
        Rows own = own_rows(p, matrices[k]);
        float scale = (float)(1 / (sqrt(squares[k]) + EPS));
        backend->combine(tensor_rows(x, own.first, own.count), scale, own_values(p, p->own_gradient, own), 0, none);
    }
    if (p->is_sharded) exchange_gather_rows(list, p, x.data, (size_t)p->cols * sizeof(uint16_t), 1);
}

static void update(const ParamList *list, const Param *p, const Backend *backend, MuonOptions o,
                   const double *squares) {
    Rows matrices[MAX_PARAM_PARTS];
    gather_normalised(list, p, backend, squares);
    for (int k = find_matrices(matrices, p); k-- > 0;) {
        Rows m = matrices[k], own = own_rows(p, m);
        Iteration i = iteration_of(&list->muon, m.first, m.count, p->cols);
        Tensor master = own_values(p, p->master, own), x = tensor_rows(i.x, own.first - m.first, own.count);
        double rate = o.learning_rate * sqrt(fmax(1, (double)m.count / (double)p->cols));
        newton_schulz(backend, i);
        backend->combine(master, (float)(1 - o.learning_rate * o.weight_decay), master, (float)-rate, x);
    }
    param_make_own_copies(list, p, backend);
}

void muon_step(const ParamList *list, const Backend *backend, MuonOptions options, float gradient_scale) {
    int64_t count = (int64_t)list->count * MAX_PARAM_PARTS;
    double *squares = allocate((size_t)count * sizeof(double));
    if (list->muon.x) backend->use_workspace(list->muon.workspace, list->muon.workspace_bytes);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (!muon_takes(list, p)) continue;
        add_momentum(list, p, backend, (float)options.momentum, gradient_scale, squares + i * MAX_PARAM_PARTS);
    }
    comm_sum_doubles(list->sharding.comm, squares, count);
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        if (muon_takes(list, p)) update(list, p, backend, options, squares + i * MAX_PARAM_PARTS);
    }
    free(squares);
}

double muon_flops(const ParamList *list) {
    double flops = 0;
    for (int i = 0; i < list->count; i++) {
        const Param *p = &list->params[i];
        Rows matrices[MAX_PARAM_PARTS];
        for (int k = muon_takes(list, p) ? find_matrices(matrices, p) : 0; k-- > 0;) {
            double n = (double)min_int64(matrices[k].count, p->cols), all = (double)(matrices[k].count * p->cols);
            flops += STEPS * (2 * n * all + 2 * n * n * n + 2 * n * all);
        }
    }
    return flops;
}
