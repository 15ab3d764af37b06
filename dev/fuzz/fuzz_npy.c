// mxcast's readers: the input as a .npy file and as raw FP32, and statistics of what is in it.
#include "fuzz.h"
#include <unistd.h>
#define main mxcast_main
#include "../mxcast.c"
#undef main

// The largest matrix that is quantized, in twenty ways, for one input.
enum { MOST_ELEMENTS = 512 };

static void check_matrix(Matrix *matrix, bool ok, size_t file_bytes, const Error *error) {
    if (!ok) {
        fuzz_check_sentence(error->message, sizeof(error->message));
    } else {
        MUST(matrix->rows > 0 && matrix->cols > 0);
        MUST(matrix->rows <= (int64_t)file_bytes / matrix->cols);
        if (matrix->rows * matrix->cols <= MOST_ELEMENTS) {
            print_stats(matrix, AXIS_ROWWISE);
            print_stats(matrix, AXIS_COLUMNWISE);
        }
    }
    free(matrix->data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static bool silenced;
    if (!silenced) MUST(freopen("/dev/null", "w", stdout));
    silenced = true;
    Error error = {""};
    char *path = fuzz_write("input.npy", data, size);
    Matrix matrix = {.name = path};
    bool ok = read_npy(&matrix, path, &error);
    check_matrix(&matrix, ok, size, &error);
    matrix = (Matrix){.name = path};
    ok = read_raw(&matrix, path, 0, 4, &error);
    check_matrix(&matrix, ok, size, &error);
    free(path);
    return 0;
}
