/*
Token and position embeddings. The backward pass goes by slabs of columns, tokens in order, so that
sums don't depend on the number of threads.
*/
#include "cpu.h"

void cpu_embedding_forward(Tensor out, const int32_t *tokens, Tensor wte, Tensor wpe, Sequences sequences) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < out.rows; row++) {
        float x[out.cols], position[out.cols];
        cpu_load_row(x, wte, tokens[row]);
        if (wpe.data) cpu_load_row(position, wpe, cpu_position(sequences, row));
        for (int64_t c = 0; c < out.cols && wpe.data; c++) {
            x[c] += position[c];
        }
        cpu_store_row(out, row, x);
    }
}

void cpu_embedding_backward(float *dwte, float *dwpe, const int32_t *tokens, Tensor dout, Sequences sequences) {
    int64_t C = dout.cols;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < C; first += CPU_SLAB) {
        int64_t count = min_int64(C - first, CPU_SLAB);
        float d[CPU_SLAB];
        for (int64_t row = 0; row < dout.rows; row++) {
            cpu_load(d, cpu_at(dout, row, first), dout.dtype, count);
            float *token = dwte + tokens[row] * C + first;
            for (int64_t c = 0; c < count; c++) {
                token[c] += d[c];
            }
            if (!dwpe) continue;
            float *position = dwpe + cpu_position(sequences, row) * C + first;
            for (int64_t c = 0; c < count; c++) {
                position[c] += d[c];
            }
        }
    }
}
