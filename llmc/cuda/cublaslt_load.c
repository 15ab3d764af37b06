/*
cuBLASLt, loaded when it is first called. Linked directly it would cost every start of the program
70 ms and 150 MB of address space, --help and runs on the CPU too.
*/
#include "llmc/base/library.h"
#include "gemm_cublaslt.h" // cuda_gemm_cublaslt_version

static Library library = {LIBRARY_FILE("cublasLt", CUBLAS_VER_MAJOR), "cuBLASLt",
                          "install the CUDA toolkit, or use --device cpu", NULL};

#define FORWARD(type, name, parameters, arguments) LIBRARY_FUNCTION(library, type, name, parameters, arguments)

FORWARD(size_t, cublasLtGetVersion, (void), ())
FORWARD(const char *, cublasLtGetStatusString, (cublasStatus_t status), (status))
FORWARD(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t * handle), (handle))
FORWARD(cublasStatus_t, cublasLtMatmul,
        (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha, const void *A,
         cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C,
         cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algorithm,
         void *workspace, size_t bytes, cudaStream_t stream),
        (handle, operation, alpha, A, a, B, b, beta, C, c, D, d, algorithm, workspace, bytes, stream))
FORWARD(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic,
        (cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
         cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,
         cublasLtMatmulHeuristicResult_t *results, int *found),
        (handle, operation, a, b, c, d, preference, wanted, results, found))
FORWARD(cublasStatus_t, cublasLtMatmulDescCreate,
        (cublasLtMatmulDesc_t * descriptor, cublasComputeType_t compute, cudaDataType_t scale),
        (descriptor, compute, scale))
FORWARD(cublasStatus_t, cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t descriptor), (descriptor))
FORWARD(cublasStatus_t, cublasLtMatmulDescSetAttribute,
        (cublasLtMatmulDesc_t descriptor, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes),
        (descriptor, attribute, value, bytes))
FORWARD(cublasStatus_t, cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * preference), (preference))
FORWARD(cublasStatus_t, cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t preference), (preference))
FORWARD(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute,
        (cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
         size_t bytes),
        (preference, attribute, value, bytes))
FORWARD(cublasStatus_t, cublasLtMatrixLayoutCreate,
        (cublasLtMatrixLayout_t * layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t stride),
        (layout, type, rows, cols, stride))
FORWARD(cublasStatus_t, cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout), (layout))

size_t cuda_gemm_cublaslt_version(void) { return library_load(&library) ? cublasLtGetVersion() : 0; }
