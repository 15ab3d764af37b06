/*
Layer normalisation (Ba et al. 2016), and without a mean RMSNorm (Zhang & Sennrich 2019). Statistics
in FP32.
*/
#include "cpu.h"
#include "rows.h"

static const float EPS = 1e-5f;

// x = input + residual, as it is stored.
static void add_residual(float *x, Tensor sum, Tensor residual, int64_t row) {
    float y[sum.cols];
    cpu_load_row(y, residual, row);
    for (int64_t c = 0; c < sum.cols; c++) {
        x[c] += y[c];
    }
    cpu_store_row(sum, row, x);
    cpu_load_row(x, sum, row);
}

void cpu_layernorm_forward(Tensor out, Tensor sum, float *mean, float *rstd, Tensor input, Tensor residual,
                           const float *weight, const float *bias) {
    int64_t C = input.cols;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < input.rows; row++) {
        float x[C];
        cpu_load_row(x, input, row);
        if (residual.data) add_residual(x, sum, residual, row);
        float total = 0, squares = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t c = 0; c < C; c++) {
            total += x[c];
        }
        float m = mean ? total / (float)C : 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < C; c++) {
            squares += (x[c] - m) * (x[c] - m);
        }
        if (mean) mean[row] = m;
        rstd[row] = 1.0f / sqrtf(squares / (float)C + EPS);
        if (!out.data) continue;
        row_normalize(x, mean ? &m : NULL, rstd[row], weight, bias, C);
        cpu_store_row(out, row, x);
    }
}

// With n = (x - mean) rstd and dn = dout weight: dx = rstd (dn - mean(dn) - n mean(dn n)); without
// a mean, without mean(dn).
static void input_gradient(Tensor dinput, Tensor dout, Tensor input, const float *weight, const float *mean,
                           const float *rstd) {
    int64_t C = input.cols;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < input.rows; row++) {
        float n[C], dn[C], dx[C];
        cpu_load_row(n, input, row);
        cpu_load_row(dn, dout, row);
        cpu_load_row(dx, dinput, row);
        float sum = 0, dot = 0, m = mean ? mean[row] : 0;
#pragma omp simd reduction(+ : sum, dot)
        for (int64_t c = 0; c < C; c++) {
            n[c] = (n[c] - m) * rstd[row];
            if (weight) dn[c] *= weight[c];
            sum += dn[c];
            dot += dn[c] * n[c];
        }
        sum = mean ? sum / (float)C : 0;
        dot /= (float)C;
        for (int64_t c = 0; c < C; c++) {
            dx[c] += (dn[c] - sum - n[c] * dot) * rstd[row];
        }
        cpu_store_row(dinput, row, dx);
    }
}

static void parameter_gradients(float *dweight, float *dbias, Tensor dout, Tensor input, const float *mean,
                                const float *rstd) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < input.cols; first += CPU_SLAB) {
        int64_t count = input.cols - first < CPU_SLAB ? input.cols - first : CPU_SLAB;
        float weight_sum[CPU_SLAB] = {0}, bias_sum[CPU_SLAB] = {0}, x[CPU_SLAB], d[CPU_SLAB];
        for (int64_t row = 0; row < input.rows; row++) {
            cpu_load(x, cpu_at(input, row, first), input.dtype, count);
            cpu_load(d, cpu_at(dout, row, first), dout.dtype, count);
            float m = mean ? mean[row] : 0;
            for (int64_t c = 0; c < count; c++) {
                weight_sum[c] += d[c] * (x[c] - m) * rstd[row];
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

void cpu_layernorm_backward(Tensor dinput, float *dweight, float *dbias, Tensor dout, Tensor input, const float *weight,
                            const float *mean, const float *rstd) {
    input_gradient(dinput, dout, input, weight, mean, rstd);
    if (dweight || dbias) parameter_gradients(dweight, dbias, dout, input, mean, rstd);
}
