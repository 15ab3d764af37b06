/*
mxcast: what an MX format does to a matrix. `encode` quantizes a tensor with llmc/numerics/mx.h,
plainly, one element after the other, and so is the reference that other quantizers can be compared
with; `stats` compares all formats and scale roundings on a tensor.
*/
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "llmc/numerics/mx.h"          // formats, encode, decode
#include "llmc/numerics/scaling.h"     // scalings that aren't MX
#include "llmc/numerics/block_stats.h" // what quantizing does
#include "llmc/run/options.h"          // the command line
#include "llmc/model/recipe.h"         // names of formats and roundings
#include "llmc/files/safetensors.h"    // tensors by name
#include "llmc/base/system.h"          // closed streams
#include "llmc/base/util.h"            // Error, files

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian and are read as they are");

enum { MAX_DIMS = SAFETENSORS_MAX_DIMS, NUM_MX_FORMATS = NUM_FORMATS - FIRST_MX_FORMAT };

static const char *const AXIS_NAMES[] = {"rowwise", "columnwise", "square", NULL};

// What --scaling says.
typedef struct {
    const char *name;
    Scaling scaling;
    bool is_square;
} NamedScaling;

static const NamedScaling SCALINGS[] = {{"mx", SCALING_MX, false},
                                        {"tensor", SCALING_TENSOR, false},
                                        {"block128", SCALING_BLOCK128, false},
                                        {"block128x128", SCALING_BLOCK128, true},
                                        {"nvfp4", SCALING_NVFP4, false},
                                        {"nvfp4-46", SCALING_NVFP4_46, false}};
static const char *const SCALING_CHOICES[] = {"mx", "tensor", "block128", "block128x128", "nvfp4", "nvfp4-46", NULL};
static const char *const BLOCK_SCALES[] = {"power-of-two", "fp32", NULL};

static const char HELP[] =
    "mxcast - what an MX format does to a matrix\n"
    "\n"
    "  mxcast encode ...   quantize a tensor of a file: scales, elements, dequantized values\n"
    "  mxcast stats FILE   compare all MX formats and scale roundings on a tensor of a file\n"
    "\n"
    "  mxcast encode --help and mxcast stats --help list the options.\n"
    "  Files are .safetensors, .npy, or raw FP32 values.\n"
    "\n"
    "In an MX format 32 neighbours share a scale, a power of two made from the largest magnitude\n"
    "among them (amax). Formats: e4m3, e5m2 (8 bits), e2m3, e3m2 (6 bits), e2m1 (4 bits).\n"
    "Scale roundings: rceil (amax / max rounded up), floor (OCP), ceil, even.\n"
    "Other scalings: one scale per tensor, blocks of 128, NVFP4: mxcast encode --help.\n"
    "\n"
    "Example: a weight of a checkpoint\n"
    "\n"
    "  $ mxcast stats model.safetensors --tensor transformer.h.0.mlp.c_fc.weight\n"
    "  transformer.h.0.mlp.c_fc.weight: F32 [256, 1024], quantized as 256 x 1024, rowwise blocks of 1x32\n"
    "  262144 elements, amax 0.09464, 0.00 % zero, 0 not finite\n"
    "\n"
    "  format  scale  SQNR dB  clamped %  at largest %  flushed %  scale differs %\n"
    "  e4m3    rceil    31.54     0.0000        0.1774     0.0004           0.0000\n"
    "  e4m3    floor    30.63     0.5413        0.7755     0.0004          14.3921\n"
    "  ...\n";

static const char ENCODE_USAGE[] =
    "mxcast encode FILE [--tensor NAME] [--rows R --cols C]\n"
    "              [--scales S.u8] [--tensor-scale T.f32] [--elements E.u8] [--dequantized D.f32]\n"
    "\n"
    "FILE is .safetensors, .npy, or else raw: little-endian FP32 values, row-major, whose --rows and\n"
    "--cols are needed. A tensor of more than two dimensions is taken as rows of its last one. Values\n"
    "that aren't FP32 become so first. Writes at least one of:\n"
    "  the scales       one E8M0 byte each: [R, ceil(C/32)] rowwise, [ceil(R/32), C] columnwise\n"
    "  the elements     one byte each, the code in its low bits: [R, C] whatever the axis\n"
    "  the values that they decode to: FP32, [R, C]\n"
    "A block with a NaN or an infinity gets the scale 0xFF and decodes to NaN.\n"
    "\n"
    "--scaling mx is all of this; --axis square makes blocks of 32x32. The others:\n"
    "  tensor        one scale for all: --tensor-scale has it, 1 FP32; no --scales, no --axis\n"
    "  block128      blocks of 1x128 (or 128x1); scales in FP32, powers of two or not\n"
    "  block128x128  the same of 128x128, as --axis square\n"
    "  nvfp4         e2m1 in blocks of 1x16, 16x1 or 16x16; scales one E4M3 byte each, and the tensor's\n"
    "                own, 1 FP32. A value is element * scale * tensor scale\n"
    "  nvfp4-46      the same, four over six: a block's largest becomes 6, or 4 where that errs less\n"
    "There a block, or with a tensor's scale the tensor, that has a NaN or an infinity decodes to NaN.\n"
    "\n"
    "Example: mxcast encode model.safetensors --tensor transformer.h.0.mlp.c_fc.weight \\\n"
    "             --format e4m3 --axis columnwise --scales w.scales --elements w.e4m3";

static const char STATS_USAGE[] =
    "mxcast stats FILE [--tensor NAME] [--axis AXIS] [--rows R] [--cols C]\n"
    "\n"
    "FILE is .safetensors, .npy, or raw: little-endian FP32 values, row-major, named .f32 or .bin, or\n"
    "else with --rows and --cols. Prints a row for each format and scale rounding:\n"
    "  SQNR dB          10 log10 of the sum of x^2 over the sum of (x - decoded x)^2; inf: exact\n"
    "  clamped %        elements with |x| > max * scale\n"
    "  at largest %     elements coded as the format's largest value, clamped or not, unless their\n"
    "                   block's scale, an E4M3 one, is 0\n"
    "  flushed %        elements that are not zero and decode to zero\n"
    "  scale differs %  blocks whose scale isn't rceil's\n"
    "A tensor of more than two dimensions is taken as rows of its last one. Blocks with a NaN or an\n"
    "infinity decode to NaN: they are counted and left out of the table. A second table has the scalings\n"
    "of mxcast encode --scaling.";

typedef struct {
    const char *name, *dtype; // as the file has them
    int ndim;
    int64_t shape[MAX_DIMS];
    int64_t rows, cols;
    float *data;          // (rows, cols)
    SafetensorsFile file; // which has the name and the dtype; open where it has a path
} Matrix;

typedef struct {
    int format, rounding, axis, scaling, block_scale; // indices into the options' choices
    int64_t rows, cols;                               // 0: not given
    bool axis_given;
    const char *input, *scales, *tensor_scale, *elements, *dequantized, *tensor;
} Settings;

// Reading matrices

static bool ends_with(const char *text, const char *suffix) {
    size_t length = strlen(text), suffix_length = strlen(suffix);
    return length >= suffix_length && strcmp(text + length - suffix_length, suffix) == 0;
}

// Reads a regular file, whole, to be freed. Returns NULL with an error where there is none.
static char *read_regular(const char *path, size_t *bytes, Error *error) {
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) { // a named pipe's reader would wait for its writer
        error_set(error, "%s is not a regular file: name a file that holds a matrix", path);
        return NULL;
    }
    return read_file(path, SIZE_MAX, bytes, error);
}

// Sets rows and cols from the shape: all dimensions but the last make the rows. Refuses empty and
// overflowing shapes.
static bool shape_to_matrix(Matrix *matrix, const char *path, Error *error) {
    int64_t bytes = 8; // as the largest elements
    for (int i = 0; i < matrix->ndim; i++) {
        if (matrix->shape[i] <= 0) return error_set(error, "%s: %s holds no elements", path, matrix->name);
    }
    for (int i = 0; i < matrix->ndim; i++) {
        if (!__builtin_mul_overflow(bytes, matrix->shape[i], &bytes)) continue;
        return error_set(error, "%s: the shape of %s overflows: the file is damaged", path, matrix->name);
    }
    matrix->cols = matrix->ndim ? matrix->shape[matrix->ndim - 1] : 1;
    matrix->rows = bytes / 8 / matrix->cols;
    return true;
}

// Sets a raw file's shape from its size and what was given of --rows and --cols; one row where
// neither was.
static bool raw_shape(Matrix *matrix, size_t bytes, int64_t rows, int64_t cols, const char *path, Error *error) {
    if (bytes == 0 || bytes % 4 != 0) {
        return error_set(error, "%s has %zu bytes, which is not a number of FP32 values: is it the right file?", path,
                         bytes);
    }
    int64_t count = (int64_t)bytes / 4, given;
    if (rows == 0 && cols == 0) rows = 1;
    if (cols == 0) cols = count / rows;
    if (rows == 0) rows = count / cols;
    if (__builtin_mul_overflow(rows, cols, &given) || given != count) {
        return error_set(
            error, "%s holds %ld FP32 values, which don't make a matrix of the given --rows and --cols: correct them",
            path, count);
    }
    matrix->dtype = "F32";
    matrix->ndim = 2;
    matrix->shape[0] = matrix->rows = rows;
    matrix->shape[1] = matrix->cols = cols;
    return true;
}

static bool read_raw(Matrix *matrix, const char *path, int64_t rows, int64_t cols, Error *error) {
    size_t bytes;
    matrix->data = (float *)read_regular(path, &bytes, error);
    return matrix->data && raw_shape(matrix, bytes, rows, cols, path, error);
}

// Returns the text after `'key':` in a .npy file's header, which is a Python dictionary; NULL where
// there is none.
static const char *npy_value(const char *header, const char *key) {
    char quoted[32];
    snprintf(quoted, sizeof(quoted), "'%s':", key);
    const char *found = strstr(header, quoted);
    return found ? found + strlen(quoted) + strspn(found + strlen(quoted), " ") : NULL;
}

// Parses "(768, 3072)", "(5,)" or "()".
static bool npy_shape(Matrix *matrix, const char *text) {
    const char *p = text;
    if (*p++ != '(') return false;
    for (p += strspn(p, " "); *p != ')'; p += strspn(p, ", ")) {
        if (!isdigit((unsigned char)*p) || matrix->ndim == MAX_DIMS) return false;
        char *end;
        errno = 0;
        matrix->shape[matrix->ndim++] = strtoll(p, &end, 10);
        if (errno != 0 || (*end != ',' && *end != ')')) return false;
        p = end;
    }
    return true;
}

typedef struct {
    const char *descr, *dtype;
    int width;
} NpyType;

// NumPy has no BF16: ml_dtypes' is saved as two bytes without a meaning.
static const NpyType NPY_TYPES[] = {
    {"'<f4'", "F32", 4}, {"'<f8'", "F64", 8}, {"'<f2'", "F16", 2}, {"'<V2'", "BF16", 2}, {"'|V2'", "BF16", 2}};

static const NpyType *npy_type(const char *descr) {
    for (int i = 0; i < COUNT(NPY_TYPES); i++) {
        if (strncmp(descr, NPY_TYPES[i].descr, strlen(NPY_TYPES[i].descr)) == 0) return &NPY_TYPES[i];
    }
    return NULL;
}

static bool npy_header(Matrix *matrix, const NpyType **type, const char *header, const char *path, Error *error) {
    const char *descr = npy_value(header, "descr"), *order = npy_value(header, "fortran_order");
    const char *shape = npy_value(header, "shape");
    if (!descr || !order || !shape || !npy_shape(matrix, shape)) {
        return error_set(error,
                         "%s has a .npy header without a valid descr, fortran_order and shape of at most %d "
                         "dimensions: save it again with numpy.save",
                         path, MAX_DIMS);
    }
    if (strncmp(order, "False", 5) != 0) {
        return error_set(error, "%s is in Fortran order: save numpy.ascontiguousarray(x) instead", path);
    }
    *type = npy_type(descr);
    if (!*type) {
        return error_set(error,
                         "%s has elements of type %.*s, where little-endian f4, f8, f2 or BF16 (V2) is needed: save "
                         "x.astype('<f4') instead",
                         path, (int)strcspn(descr, ","), descr);
    }
    matrix->dtype = (*type)->dtype;
    return shape_to_matrix(matrix, path, error);
}

static bool parse_npy(Matrix *matrix, const char *file, size_t bytes, const char *path, Error *error) {
    bool known = bytes >= 12 && memcmp(file, "\x93NUMPY", 6) == 0 && file[6] >= 1 && file[6] <= 3;
    size_t begin = known && file[6] == 1 ? 10 : 12; // of the header, after its length
    uint32_t header_bytes = 0;
    if (!known)
        return error_set(error, "%s is not a .npy file of version 1, 2 or 3: save it again with numpy.save", path);
    memcpy(&header_bytes, file + 8, begin - 8);
    if (header_bytes > bytes - begin) return error_set(error, "%s ends within its .npy header: copy it again", path);
    const NpyType *type = NULL;
    char *header = format_string("%.*s", (int)header_bytes, file + begin);
    bool ok = npy_header(matrix, &type, header, path, error);
    free(header);
    if (!ok) return false;
    size_t count = (size_t)(matrix->rows * matrix->cols), there = bytes - begin - header_bytes;
    if (count * (size_t)type->width != there) {
        return error_set(error, "%s has %zu bytes of data where its shape needs %zu: copy it again", path, there,
                         count * (size_t)type->width);
    }
    matrix->data = allocate(count * sizeof(float));
    safetensors_to_fp32(matrix->data, file + bytes - there, matrix->dtype, count);
    return true;
}

static bool read_npy(Matrix *matrix, const char *path, Error *error) {
    size_t bytes;
    char *file = read_regular(path, &bytes, error);
    bool ok = file && parse_npy(matrix, file, bytes, path, error);
    free(file);
    return ok;
}

static void print_shape(const int64_t *shape, int ndim) {
    printf("[");
    for (int i = 0; i < ndim; i++) {
        printf("%s%ld", i ? ", " : "", shape[i]);
    }
    printf("]");
}

static void list_tensors(const SafetensorsFile *file) {
    int width = 0;
    for (int i = 0; i < file->num_entries; i++) {
        int length = (int)strlen(file->entries[i].name);
        width = length > width ? length : width;
    }
    printf("%s holds %d tensors:\n\n", file->path, file->num_entries);
    for (int i = 0; i < file->num_entries; i++) {
        const SafetensorsEntry *entry = &file->entries[i];
        char *name = make_printable(format_string("%s", entry->name));
        printf("  %-*s  %-4s  ", width, name, entry->dtype);
        free(name);
        print_shape(entry->shape, entry->ndim);
        printf("\n");
    }
    printf("\nChoose one: mxcast stats %s --tensor NAME\n", file->path);
}

static bool unknown_tensor(const SafetensorsFile *file, const char *name, Error *error) {
    const char **names = allocate((size_t)file->num_entries * sizeof(*names));
    for (int i = 0; i < file->num_entries; i++) {
        names[i] = file->entries[i].name;
    }
    const char *nearest = nearest_word(name, names, file->num_entries);
    free(names);
    return error_set(error, "%s has no tensor '%.200s'%s%.200s%s (without --tensor its tensors are listed)", file->path,
                     name, nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
}

// Reads the tensor that was named, or the only one; where there are several and none was named,
// only opens the file.
static bool read_tensor(Matrix *matrix, const char *path, const char *name, Error *error) {
    SafetensorsFile *file = &matrix->file;
    if (!safetensors_open(file, path, error)) return false;
    if (!name && file->num_entries != 1) return true;
    const SafetensorsEntry *entry = name ? safetensors_find(file, name) : &file->entries[0];
    if (!entry) return unknown_tensor(file, name, error);
    matrix->name = entry->name;
    matrix->dtype = entry->dtype;
    matrix->ndim = entry->ndim;
    memcpy(matrix->shape, entry->shape, sizeof(matrix->shape));
    if (!shape_to_matrix(matrix, path, error)) return false;
    matrix->data = allocate((size_t)entry->num_elements * sizeof(float));
    return safetensors_read_fp32(file, entry, matrix->data, error);
}

static bool has_own_shape(const char *path) { return ends_with(path, ".safetensors") || ends_with(path, ".npy"); }

// Reads the input, by its name's ending. Its data stays NULL where it is a .safetensors file of
// several tensors and none was named. To be freed with free_matrix, whatever is returned.
static bool read_matrix(Matrix *matrix, const Settings *s, Error *error) {
    const char *path = s->input;
    *matrix = (Matrix){.name = path};
    bool raw = ends_with(path, ".f32") || ends_with(path, ".bin") || (s->rows && s->cols);
    if (has_own_shape(path) && (s->rows || s->cols)) {
        return error_set(error, "%s has a shape of its own: --rows and --cols are for raw files", path);
    }
    if (ends_with(path, ".safetensors")) return read_tensor(matrix, path, s->tensor, error);
    if (s->tensor) return error_set(error, "%s holds one tensor: --tensor is for .safetensors", path);
    if (ends_with(path, ".npy")) return read_npy(matrix, path, error);
    if (raw) return read_raw(matrix, path, s->rows, s->cols, error);
    if (!path_exists(path)) return error_set(error, "%s: no such file", path);
    return error_set(error,
                     "%s: its name must end in .safetensors, .npy, or, for raw FP32, in .f32 or .bin, where --rows and "
                     "--cols aren't given",
                     path);
}

static void free_matrix(Matrix *matrix) {
    free(matrix->data);
    if (matrix->file.path) safetensors_close(&matrix->file);
}

// Quantizing

// Returns the bits of each block's amax, in the scales' plain layout; to be freed.
static uint32_t *block_amax(const Matrix *matrix, Axis axis) {
    uint32_t *amax = allocate((size_t)mx_num_scales(axis, matrix->rows, matrix->cols) * sizeof(*amax));
    for (int64_t row = 0; row < matrix->rows; row++) {
        for (int64_t col = 0; col < matrix->cols; col++) {
            uint32_t magnitude = mx_magnitude_bits(matrix->data[row * matrix->cols + col]);
            uint32_t *block = &amax[mx_scale_offset(axis, row, col, matrix->cols)];
            *block = magnitude > *block ? magnitude : *block;
        }
    }
    return amax;
}

// How a matrix is quantized.
typedef struct {
    Scaling scaling;
    Format format;
    Axis axis;
    ScaleRounding rounding; // of MX's scales
} Scaled;

// Returns the largest magnitude's bits, of `rows` rows of `cols` values, `stride` from row to row.
static uint32_t amax_of(const float *values, int64_t rows, int64_t cols, int64_t stride) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows * cols; i++) {
        uint32_t magnitude = mx_magnitude_bits(values[i / cols * stride + i % cols]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

static ScaledBlock mx_block_of_amax(Scaled q, uint32_t amax) {
    uint8_t code = mx_scale_code(q.format, q.rounding, amax);
    return (ScaledBlock){.multiplier = mx_scale_reciprocal(code), .value = mx_scale_value(code), .code = code};
}

// Quantizes the block that begins at `row` and `col`.
static void encode_block(uint8_t *scale, uint8_t *elements, float *dequantized, const Matrix *matrix, Scaled q,
                         int64_t row, int64_t col, uint32_t tensor_amax) {
    int64_t height = scaling_block_rows(q.scaling, q.axis), width = scaling_block_cols(q.scaling, q.axis);
    int64_t rows = min_int64(height, matrix->rows - row), cols = min_int64(width, matrix->cols - col);
    int64_t first = row * matrix->cols + col;
    float s = scaling_tensor_scale(q.scaling, q.format, tensor_amax), factor = 1.0f / s;
    const float *x = matrix->data + first;
    ScaledBlock block = q.scaling == SCALING_MX ? mx_block_of_amax(q, amax_of(x, rows, cols, matrix->cols))
                                                : scaling_of_block(q.scaling, q.axis, q.format, x, rows, cols,
                                                                   matrix->cols, tensor_amax, s);
    memcpy(scale, scaling_scale_bytes(q.scaling) == 1 ? (const void *)&block.code : &block.value,
           scaling_scale_bytes(q.scaling));
    for (int64_t i = 0; i < rows * cols; i++) {
        int64_t at = first + i / cols * matrix->cols + i % cols;
        elements[at] = mx_encode(q.format, matrix->data[at] * block.multiplier);
        dequantized[at] = mx_decode(q.format, elements[at]) * block.value * factor;
    }
}

// Writes the scales, the tensor's factor, and (rows, cols) elements and what they decode to.
static void encode_matrix(uint8_t *scales, float *factor, uint8_t *elements, float *dequantized, const Matrix *matrix,
                          Scaled q) {
    int64_t height = scaling_block_rows(q.scaling, q.axis), width = scaling_block_cols(q.scaling, q.axis);
    int64_t across = scaling_blocks_across(q.scaling, q.axis, matrix->cols);
    uint32_t amax = amax_of(matrix->data, matrix->rows, matrix->cols, matrix->cols);
    *factor = 1.0f / scaling_tensor_scale(q.scaling, q.format, amax);
#pragma omp parallel for
    for (int64_t row = 0; row < matrix->rows; row += height) {
        for (int64_t col = 0; col < matrix->cols; col += width) {
            size_t block = (size_t)(row / height * across + col / width);
            encode_block(scales + block * scaling_scale_bytes(q.scaling), elements, dequantized, matrix, q, row, col,
                         amax);
        }
    }
}

// Measures what quantizing does to the blocks of a matrix that are finite; `amax` is
// block_amax()'s.
static QuantStats measure(const Matrix *matrix, const uint32_t *amax, Axis axis, Format format,
                          ScaleRounding rounding) {
    QuantStats stats = {0};
    int64_t num_blocks = mx_num_scales(axis, matrix->rows, matrix->cols);
    const Counted how = {.format = format, .axis = axis, .rounding = rounding};
    BlockScale *blocks = allocate((size_t)num_blocks * sizeof(*blocks)); // of one that isn't finite the max is 0
    for (int64_t i = 0; i < num_blocks; i++) {
        bool is_finite = mx_scale_code(format, rounding, amax[i]) != MX_SCALE_NAN;
        if (is_finite) blocks[i] = stats_add_mx_block(&stats, amax[i], 0, &how);
    }
    for (int64_t row = 0; row < matrix->rows; row++) {
        for (int64_t col = 0; col < matrix->cols; col++) {
            const BlockScale *block = &blocks[mx_scale_offset(axis, row, col, matrix->cols)];
            if (block->max == 0) continue;
            stats_add_element(&stats, block, &how.encoding, matrix->data[row * matrix->cols + col], row, col);
            stats.elements++;
        }
    }
    free(blocks);
    return stats;
}

// encode

typedef struct {
    const char *option, *path; // path NULL: not wanted
    void *data;
    size_t bytes;
    char *staged; // where it lies until all of them do
} Output;

static bool same_inode(const char *a, const char *b) {
    struct stat status_a, status_b;
    return stat(a, &status_a) == 0 && stat(b, &status_b) == 0 && status_a.st_dev == status_b.st_dev &&
           status_a.st_ino == status_b.st_ino;
}

static const char *name_in_directory(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// Returns whether two paths name one file, which may not be there yet.
static bool same_file(const char *a, const char *b) {
    const char *name_a = name_in_directory(a), *name_b = name_in_directory(b);
    if (same_inode(a, b)) return true;
    if (strcmp(name_a, name_b) != 0) return false;
    char *directory_a = format_string("%.*s.", (int)(name_a - a), a);
    char *directory_b = format_string("%.*s.", (int)(name_b - b), b);
    bool same = same_inode(directory_a, directory_b);
    free(directory_a);
    free(directory_b);
    return same;
}

static void check_output_paths(const Output *outputs, int count, const char *input) {
    struct stat status;
    int wanted = 0;
    for (int i = 0; i < count; i++) {
        const char *path = outputs[i].path;
        if (!path) continue;
        wanted++;
        if (same_file(path, input)) {
            die("--%s and --input are the same file %s: name another", outputs[i].option, path);
        }
        for (int j = 0; j < i; j++) {
            if (!outputs[j].path || !same_file(path, outputs[j].path)) continue;
            die("--%s and --%s are the same file %s: name another", outputs[j].option, outputs[i].option, path);
        }
        if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) {
            die("--%s %s is not a regular file: name another", outputs[i].option, path);
        }
    }
    if (wanted == 0) die("nothing to write: give --scales, --tensor-scale, --elements or --dequantized");
}

// Writes all of the files or none: each is written whole under another name before the first takes
// its place.
static void write_outputs(Output *outputs, int count) {
    Error error;
    bool ok = true;
    for (int i = 0; i < count && ok; i++) {
        if (!outputs[i].path) continue;
        outputs[i].staged = format_string("%s.XXXXXX", outputs[i].path);
        int file = mkstemp(outputs[i].staged); // a name that nothing else has
        if (file < 0) {
            ok = error_set(&error, "--%s %s can't be written: %s; check its directory and permissions",
                           outputs[i].option, outputs[i].path, strerror(errno));
            continue;
        }
        close(file);
        ok = write_file_atomic(outputs[i].staged, outputs[i].data, outputs[i].bytes, &error);
    }
    for (int i = 0; i < count && ok; i++) {
        if (outputs[i].path && rename(outputs[i].staged, outputs[i].path) != 0) {
            ok = error_set(&error, "--%s %s can't be written: %s; check its permissions", outputs[i].option,
                           outputs[i].path, strerror(errno));
        }
    }
    for (int i = 0; i < count; i++) {
        if (!ok && outputs[i].staged) unlink(outputs[i].staged);
        free(outputs[i].staged);
    }
    if (!ok) bad_input(&error);
}

// Reads the matrix to encode: one whose shape is certain.
static void read_input(Matrix *matrix, const Settings *s) {
    if (!has_own_shape(s->input) && !(s->rows && s->cols)) {
        die("--rows and --cols are needed: %s is raw FP32 values, which don't know their shape", s->input);
    }
    read_matrix(matrix, s, OR_DIE);
    if (matrix->data) return;
    die("%s holds %d tensors: choose one with --tensor NAME; mxcast stats %s lists them", s->input,
        matrix->file.num_entries, s->input);
}

static Scaled scaled_of(const Settings *s) {
    NamedScaling named = SCALINGS[s->scaling];
    bool is_fp32 = named.scaling == SCALING_BLOCK128 && s->block_scale == 1;
    return (Scaled){.scaling = is_fp32 ? SCALING_BLOCK128_FP32 : named.scaling,
                    .format = (Format)(FIRST_MX_FORMAT + s->format),
                    .axis = named.is_square ? AXIS_SQUARE : (Axis)s->axis,
                    .rounding = (ScaleRounding)s->rounding};
}

// Refuses options that the scaling doesn't go with.
static void check_scaling(const Settings *s) {
    Scaled q = scaled_of(s);
    const char *name = SCALINGS[s->scaling].name;
    if (scaling_is_nvfp4(q.scaling) && q.format != FORMAT_E2M1) {
        die("--scaling %s is of e2m1: give --format e2m1", name);
    }
    if (q.scaling != SCALING_MX && s->rounding != SCALE_RCEIL) {
        die("--scale-rounding is of --scaling mx: leave it out with --scaling %s", name);
    }
    if (s->block_scale == 1 && q.scaling != SCALING_BLOCK128_FP32) {
        die("--block-scale is of block128 and block128x128: leave it out with --scaling %s", name);
    }
    if (s->scales && q.scaling == SCALING_TENSOR) {
        die("--scaling tensor has one scale: give --tensor-scale instead of --scales");
    }
    if (s->tensor_scale && !scaling_has_factor(q.scaling)) {
        die("--tensor-scale is of tensor, nvfp4 and nvfp4-46: leave it out with --scaling %s", name);
    }
    if (s->axis_given && q.scaling == SCALING_TENSOR) {
        die("--axis is of blocks, and --scaling %s has none: leave it out", name);
    }
    if (s->axis_given && q.axis != (Axis)s->axis) {
        die("--scaling %s has square blocks: leave --axis %s out, or give --scaling block128", name,
            AXIS_NAMES[s->axis]);
    }
}

static void encode_file(const Settings *settings) {
    enum { SCALES, TENSOR_SCALE, ELEMENTS, DEQUANTIZED, NUM_OUTPUTS };
    Output outputs[NUM_OUTPUTS] = {{.option = "scales", .path = settings->scales},
                                   {.option = "tensor-scale", .path = settings->tensor_scale},
                                   {.option = "elements", .path = settings->elements},
                                   {.option = "dequantized", .path = settings->dequantized}};
    if (!settings->input) die("--input is missing: name a file that holds a matrix");
    check_scaling(settings);
    check_output_paths(outputs, NUM_OUTPUTS, settings->input);
    Matrix matrix;
    read_input(&matrix, settings);
    Scaled q = scaled_of(settings);
    size_t count = (size_t)(matrix.rows * matrix.cols);
    outputs[SCALES].bytes =
        (size_t)scaling_num_blocks(q.scaling, q.axis, matrix.rows, matrix.cols) * scaling_scale_bytes(q.scaling);
    outputs[TENSOR_SCALE].bytes = sizeof(float);
    outputs[ELEMENTS].bytes = count;
    outputs[DEQUANTIZED].bytes = count * sizeof(float);
    for (int i = 0; i < NUM_OUTPUTS; i++) {
        outputs[i].data = allocate(outputs[i].bytes);
    }
    encode_matrix(outputs[SCALES].data, outputs[TENSOR_SCALE].data, outputs[ELEMENTS].data, outputs[DEQUANTIZED].data,
                  &matrix, q);
    write_outputs(outputs, NUM_OUTPUTS);
    for (int i = 0; i < NUM_OUTPUTS; i++) {
        free(outputs[i].data);
    }
    free_matrix(&matrix);
}

static void encode_command(int argc, char **argv) {
    Settings s = {0};
    const char *const *formats = FORMAT_NAMES + FIRST_MX_FORMAT;
    const double any = INFINITY;
    Option options[] = {
        GROUP("Format"),
        CHOICE("format", "F", &s.format, formats, "element format"),
        CHOICE("scaling", "S", &s.scaling, SCALING_CHOICES, "what has a scale, and of what kind"),
        CHOICE("scale-rounding", "MODE", &s.rounding, SCALE_ROUNDING_NAMES, "how a block's amax becomes its scale"),
        CHOICE("block-scale", "KIND", &s.block_scale, BLOCK_SCALES, "of blocks of 128"),
        CHOICE("axis", "AXIS", &s.axis, AXIS_NAMES, "blocks of 1x32, of 32x1 or of 32x32"),
        GROUP("Input"),
        STRING("input", "FILE", &s.input, "a matrix: .safetensors, .npy, or raw FP32"),
        STRING("tensor", "NAME", &s.tensor, "which tensor of a .safetensors file; needed where there are several"),
        INT("rows", "R", &s.rows, 1, any, "rows of a raw file's matrix"),
        INT("cols", "C", &s.cols, 1, any, "columns of a raw file's matrix"),
        GROUP("Output"),
        STRING("scales", "FILE", &s.scales, "the scales' bytes"),
        STRING("tensor-scale", "FILE", &s.tensor_scale, "the tensor's own scale, 1 FP32"),
        STRING("elements", "FILE", &s.elements, "the elements' bytes"),
        STRING("dequantized", "FILE", &s.dequantized, "what they decode to, FP32"),
    };
    if (options_ask_for_help(argc, argv)) {
        options_print_help(options, COUNT(options), ENCODE_USAGE, stdout);
        return;
    }
    if (argc > 1 && argv[1][0] != '-') { // the file may come first, as for stats
        s.input = *++argv;
        argc--;
    }
    options_parse(options, COUNT(options), argc, argv, OR_DIE);
    s.axis_given = options_given(options, COUNT(options), &s.axis);
    encode_file(&s);
}

// stats

static double percent(int64_t part, int64_t whole) { return whole ? 100.0 * (double)part / (double)whole : 0; }

static void print_header(const Matrix *matrix, Axis axis) {
    int64_t count = matrix->rows * matrix->cols, zeros = 0, not_finite = 0;
    float amax = 0; // of the finite ones
    for (int64_t i = 0; i < count; i++) {
        float magnitude = fabsf(matrix->data[i]);
        zeros += magnitude == 0;
        not_finite += !isfinite(magnitude);
        if (isfinite(magnitude) && magnitude > amax) amax = magnitude;
    }
    char *name = make_printable(format_string("%s", matrix->name));
    printf("%s: %s ", name, matrix->dtype);
    free(name);
    print_shape(matrix->shape, matrix->ndim);
    printf(", quantized as %ld x %ld, %s blocks of %s\n", matrix->rows, matrix->cols, AXIS_NAMES[axis],
           axis == AXIS_ROWWISE      ? "1x32"
           : axis == AXIS_COLUMNWISE ? "32x1"
                                     : "32x32");
    printf("%ld elements, amax %.4g, %.2f %% zero, %ld not finite\n\n", count, amax, percent(zeros, count), not_finite);
}

static void print_row(Format format, ScaleRounding rounding, const QuantStats *stats) {
    char sqnr[32] = "-"; // of a signal that is all zero
    if (stats->signal > 0) snprintf(sqnr, sizeof(sqnr), "%.2f", 10 * log10(stats->signal / stats->noise));
    printf("%-6s  %-5s  %7s  %9.4f  %12.4f  %9.4f  %15.4f\n", FORMAT_NAMES[format], SCALE_ROUNDING_NAMES[rounding],
           sqnr, percent(stats->clamped, stats->elements), percent(stats->at_max, stats->elements),
           percent(stats->flushed, stats->elements), percent(stats->blocks_unlike_rceil, stats->blocks));
}

// Prints a row on a scaling, of the elements that don't decode to NaN.
static void print_scaled_row(const Matrix *matrix, const char *name, Scaled q) {
    int64_t count = matrix->rows * matrix->cols,
            blocks = scaling_num_blocks(q.scaling, q.axis, matrix->rows, matrix->cols);
    uint8_t *elements = allocate((size_t)count), *scales = allocate((size_t)blocks * sizeof(float));
    float *dequantized = allocate((size_t)count * sizeof(float)), factor;
    QuantStats stats = {0};
    encode_matrix(scales, &factor, elements, dequantized, matrix, q);
    for (int64_t i = 0; i < count; i++) {
        double x = (double)matrix->data[i], error = (double)dequantized[i] - x;
        uint32_t magnitude = elements[i] & ((1u << mx_element(q.format).sign_bit) - 1);
        bool is_zero = dequantized[i] == 0; // by its code or by its block's scale
        if (isnan(dequantized[i])) continue;
        stats.elements++;
        stats.signal += x * x;
        stats.noise += error * error;
        stats.at_max += magnitude == mx_element(q.format).max_code && !is_zero;
        stats.flushed += is_zero && x != 0;
    }
    char sqnr[32] = "-", block[32] = "-";
    int64_t height = scaling_block_rows(q.scaling, q.axis), width = scaling_block_cols(q.scaling, q.axis);
    if (stats.signal > 0) snprintf(sqnr, sizeof(sqnr), "%.2f", 10 * log10(stats.signal / stats.noise));
    if (q.scaling != SCALING_TENSOR) snprintf(block, sizeof(block), "%ldx%ld", height, width);
    printf("%-13s  %-7s  %-6s  %7s  %12.4f  %9.4f\n", name, block, FORMAT_NAMES[q.format], sqnr,
           percent(stats.at_max, stats.elements), percent(stats.flushed, stats.elements));
    free(elements);
    free(scales);
    free(dequantized);
}

// Prints the scalings that aren't MX in the formats that they are used with, NVFP4 also in squares.
static void print_scaled_stats(const Matrix *matrix, Axis axis) {
    const Scaled rows[] = {{SCALING_TENSOR, FORMAT_E4M3, axis, SCALE_RCEIL},
                           {SCALING_TENSOR, FORMAT_E5M2, axis, SCALE_RCEIL},
                           {SCALING_BLOCK128, FORMAT_E4M3, axis, SCALE_RCEIL},
                           {SCALING_BLOCK128, FORMAT_E4M3, AXIS_SQUARE, SCALE_RCEIL},
                           {SCALING_BLOCK128_FP32, FORMAT_E4M3, axis, SCALE_RCEIL},
                           {SCALING_BLOCK128_FP32, FORMAT_E4M3, AXIS_SQUARE, SCALE_RCEIL},
                           {SCALING_NVFP4, FORMAT_E2M1, axis, SCALE_RCEIL},
                           {SCALING_NVFP4, FORMAT_E2M1, AXIS_SQUARE, SCALE_RCEIL},
                           {SCALING_NVFP4_46, FORMAT_E2M1, axis, SCALE_RCEIL},
                           {SCALING_NVFP4_46, FORMAT_E2M1, AXIS_SQUARE, SCALE_RCEIL}};
    printf("\n%-13s  %-7s  %-6s  %7s  %12s  %9s\n", "scaling", "block", "format", "SQNR dB", "at largest %",
           "flushed %");
    for (int i = 0; i < COUNT(rows); i++) {
        if (i > 0 && memcmp(&rows[i], &rows[i - 1], sizeof(rows[i])) == 0) continue; // where `axis` is that of squares
        print_scaled_row(matrix, SCALING_NAMES[rows[i].scaling], rows[i]);
    }
}

static void print_stats(const Matrix *matrix, Axis axis) {
    QuantStats stats[NUM_MX_FORMATS * NUM_SCALE_ROUNDINGS];
    uint32_t *amax = block_amax(matrix, axis);
    print_header(matrix, axis);
    fflush(stdout); // a large tensor takes a while
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < NUM_MX_FORMATS * NUM_SCALE_ROUNDINGS; i++) {
        Format format = (Format)(FIRST_MX_FORMAT + i / NUM_SCALE_ROUNDINGS);
        stats[i] = measure(matrix, amax, axis, format, (ScaleRounding)(i % NUM_SCALE_ROUNDINGS));
    }
    printf("format  scale  SQNR dB  clamped %%  at largest %%  flushed %%  scale differs %%\n");
    for (int i = 0; i < NUM_MX_FORMATS * NUM_SCALE_ROUNDINGS; i++) {
        print_row((Format)(FIRST_MX_FORMAT + i / NUM_SCALE_ROUNDINGS), (ScaleRounding)(i % NUM_SCALE_ROUNDINGS),
                  &stats[i]);
    }
    int64_t bad_blocks = mx_num_scales(axis, matrix->rows, matrix->cols) - stats[0].blocks;
    if (bad_blocks > 0) {
        printf("\n%ld blocks hold a value that is not finite: they decode to NaN and are left out of the table.\n",
               bad_blocks);
    }
    free(amax);
    print_scaled_stats(matrix, axis);
}

static void stats_command(int argc, char **argv) {
    Settings s = {0};
    Matrix matrix;
    const double any = INFINITY;
    Option options[] = {
        GROUP("Options"),
        STRING("tensor", "NAME", &s.tensor,
               "which tensor of a .safetensors file; without it, where there are several, a list"),
        CHOICE("axis", "AXIS", &s.axis, AXIS_NAMES, "blocks of 1x32, of 32x1 or of 32x32"),
        INT("rows", "R", &s.rows, 1, any,
            "rows of a raw file's matrix; if not given from its size, or one where --cols isn't given either"),
        INT("cols", "C", &s.cols, 1, any, "columns of a raw file's matrix; if not given from its size"),
    };
    if (options_ask_for_help(argc, argv)) {
        options_print_help(options, COUNT(options), STATS_USAGE, stdout);
        return;
    }
    if (argc < 2 || argv[1][0] == '-') {
        die("the file comes first: mxcast stats FILE [options]; see mxcast stats --help");
    }
    s.input = argv[1];
    options_parse(options, COUNT(options), argc - 1, argv + 1, OR_DIE);
    read_matrix(&matrix, &s, OR_DIE);
    if (matrix.data) {
        print_stats(&matrix, (Axis)s.axis);
    } else {
        list_tensors(&matrix.file);
    }
    free_matrix(&matrix);
}

int main(int argc, char **argv) {
    static const char *const commands[] = {"encode", "stats"};
    system_reserve_streams();
    if (argc < 2) die("a command is missing: encode or stats (mxcast --help explains them)");
    if (strcmp(argv[1], commands[0]) == 0) {
        encode_command(argc - 1, argv + 1);
    } else if (strcmp(argv[1], commands[1]) == 0) {
        stats_command(argc - 1, argv + 1);
    } else if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        fputs(HELP, stdout);
    } else {
        const char *nearest = nearest_word(argv[1], commands, COUNT(commands));
        die("unknown command '%.200s'%s%s%s (there are: encode, stats)", argv[1], nearest ? "; did you mean " : "",
            nearest ? nearest : "", nearest ? "?" : "");
    }
    if (fflush(stdout) != 0 || ferror(stdout)) die("the output can't be written: %s", strerror(errno));
    return 0;
}
