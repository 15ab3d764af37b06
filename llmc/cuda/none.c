/*
What answers for the CUDA backend in a build without it: there is no GPU, and why.
*/
#include "llmc/backend.h"

const Backend *backend_cuda(MxGemm mx_gemm, Error *error) {
    (void)mx_gemm;
    error_set(error, "this program was built without CUDA; for a GPU run make where the CUDA toolkit is");
    return NULL;
}

bool backend_cuda_has_driver(void) { return false; }

void backend_cuda_print_info(FILE *file) {
    fprintf(file, "CUDA              not built in: trains on the CPU (for a GPU run make where the CUDA toolkit is)\n");
}
