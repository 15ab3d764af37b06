/*
Layer normalisation and RMSNorm (see NormKind in ../backend.h). Statistics in FP32.
*/
#include "cpu.h"
#include "rows.h"

// Adds the residual to x, which holds the input, and rounds x as it stores it in `sum`.
static void add_residual(float *x, Tensor sum, Tensor residual, int64_t row) {
    float y[sum.cols];
    cpu_load_row(y, residual, row);
    for (int64_t c = 0; c < sum.cols; c++) {
        x[c] += y[c];
    }
    cpu_store_row(sum, row, x);
    cpu_load_row(x, sum, row);
}

// Returns the mean of x (C).
static float mean_of(const float *x, int64_t C) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; c++) {
        sum += x[c];
    }
    return sum / (float)C;
}

// Returns one over the standard deviation of x (C); over its root mean square where `mean` is 0.
static float rstd_of(const float *x, int64_t C, float mean, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < C; c++) {
        squares += (x[c] - mean) * (x[c] - mean);
    }
    return 1.0f / sqrtf(squares / (float)C + eps);
}

void cpu_layernorm_forward(Tensor out, Tensor sum, Tensor input, Tensor residual, NormParams norm) {
    int64_t C = input.cols;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < input.rows; row++) {
        float x[C];
        cpu_load_row(x, input, row);
        if (residual.data) add_residual(x, sum, residual, row);
        if (norm.kind == NORM_LAYERNORM) norm.mean[row] = mean_of(x, C);
        norm.rstd[row] = rstd_of(x, C, norm_mean(&norm, row), norm.eps);
        if (!out.data) continue;
        row_normalize(x, &norm, row, 0, C);
        cpu_store_row(out, row, x);
    }
}

// Adds to dinput. With n = (x - mean) rstd and dn = dout weight: dx = rstd (dn - mean(dn) - n
// mean(dn n)); RMSNorm's is without mean(dn).
static void input_gradient(Tensor dinput, Tensor dout, Tensor input, const NormParams *norm) {
    int64_t C = input.cols;
    const float *weight = norm->weight;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < input.rows; row++) {
        float n[C], dn[C], dx[C];
        cpu_load_row(n, input, row);
        cpu_load_row(dn, dout, row);
        cpu_load_row(dx, dinput, row);
        float sum = 0, dot = 0, mean = norm_mean(norm, row), rstd = norm->rstd[row];
#pragma omp simd reduction(+ : sum, dot)
        for (int64_t c = 0; c < C; c++) {
            n[c] = (n[c] - mean) * rstd;
            if (weight) dn[c] *= weight[c];
            sum += dn[c];
            dot += dn[c] * n[c];
        }
        sum = norm->kind == NORM_LAYERNORM ? sum / (float)C : 0;
        dot /= (float)C;
        for (int64_t c = 0; c < C; c++) {
            dx[c] += (dn[c] - sum - n[c] * dot) * rstd;
        }
        cpu_store_row(dinput, row, dx);
    }
}

// Adds to dweight and dbias, either of which may be NULL.
static void parameter_gradients(float *dweight, float *dbias, Tensor dout, Tensor input, const NormParams *norm) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < input.cols; first += CPU_SLAB) {
        int64_t count = min_int64(input.cols - first, CPU_SLAB);
        float weight_sum[CPU_SLAB] = {0}, bias_sum[CPU_SLAB] = {0}, x[CPU_SLAB], d[CPU_SLAB];
        for (int64_t row = 0; row < input.rows; row++) {
            cpu_load_column(x, input, row, first, count);
            cpu_load_column(d, dout, row, first, count);
            float mean = norm_mean(norm, row), rstd = norm->rstd[row];
            for (int64_t c = 0; c < count; c++) {
                weight_sum[c] += d[c] * (x[c] - mean) * rstd;
                bias_sum[c] += d[c];
            }
        }
        for (int64_t c = 0; c < count && dweight; c++) {
            dweight[first + c] += weight_sum[c];
        }
        for (int64_t c = 0; c < count && dbias; c++) {
            dbias[first + c] += bias_sum[c];
        }
    }
}

void cpu_layernorm_backward(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input, NormParams norm) {
    input_gradient(dinput, dout, input, &norm);
    if (dweight || dbias) parameter_gradients(dweight, dbias, dout, input, &norm);
}
