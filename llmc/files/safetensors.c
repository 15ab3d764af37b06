#include "safetensors.h"

#include <errno.h>
#include <fcntl.h> // open
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>           // pread, fsync
#include "llmc/numerics/mx.h" // mx_from_bf16

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian, and so must the machine be");

enum {
    LENGTH_BYTES = 8,             // of the header's length, before the header
    MAX_HEADER_BYTES = 100000000, // the format's own limit
    DATA_ALIGNMENT = 64,          // of the data of files we write; the format asks for 8
    READ_BYTES = 1 << 30,         // read at a time: Linux reads less than 2 GiB in one call
};

static const struct {
    const char *name;
    unsigned bits;
} dtypes[] = {
    {"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8},     {"F8_E8M0", 8},     {"I16", 16},    {"U16", 16}, {"F16", 16},
    {"BF16", 16},   {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I32", 32},    {"U32", 32}, {"F32", 32},
    {"C64", 64},    {"F64", 64},        {"I64", 64},        {"U64", 64},
};

// Returns the bits of an element; 0 for a dtype that the format doesn't know.
static unsigned dtype_bits(const char *dtype) {
    for (int i = 0; i < COUNT(dtypes); i++) {
        if (strcmp(dtype, dtypes[i].name) == 0) return dtypes[i].bits;
    }
    return 0;
}

// Sets num_elements and bytes from dtype and shape. Returns false where they overflow or are no
// whole number of bytes.
static bool compute_size(SafetensorsEntry *entry) {
    int64_t elements = 1, bits;
    for (int i = 0; i < entry->ndim; i++) {
        if (__builtin_mul_overflow(elements, entry->shape[i], &elements)) return false;
    }
    if (__builtin_mul_overflow(elements, (int64_t)dtype_bits(entry->dtype), &bits) || bits % 8 != 0) return false;
    entry->num_elements = elements;
    entry->bytes = (uint64_t)bits / 8;
    return true;
}

// Reading

static const char remedy[] = "it is damaged or not a safetensors file; fetch or write it again";

// Reads exactly `bytes` bytes at `offset` of the file.
static bool read_at(const SafetensorsFile *file, void *out, uint64_t bytes, uint64_t offset, Error *error) {
    char *next = out;
    while (bytes > 0) {
        ssize_t count = pread(file->descriptor, next, bytes < READ_BYTES ? bytes : READ_BYTES, (off_t)offset);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return error_set(error, "%s can't be read: %s; check the disk", file->path, strerror(errno));
        if (count == 0) {
            return error_set(error, "%s ends before its data does: was it cut short? Fetch or write it again",
                             file->path);
        }
        next += count;
        bytes -= (uint64_t)count;
        offset += (uint64_t)count;
    }
    return true;
}

// Reads an array of at most `most` whole numbers from 0 on. Returns how many there are; -1 where it
// is anything else.
static int parse_numbers(const JsonValue *array, int64_t *out, int most) {
    int count = 0;
    if (!json_is_array(array)) return -1;
    for (const JsonValue *number = json_first(array); number; number = json_next(number), count++) {
        if (count == most || !json_int64(number, NULL, &out[count]) || out[count] < 0) return -1;
    }
    return count;
}

static bool parse_entry(const char *path, const JsonValue *member, SafetensorsEntry *entry, Error *error) {
    *entry = (SafetensorsEntry){.name = json_key(member), .dtype = json_string(member, "dtype")};
    if (!entry->dtype || dtype_bits(entry->dtype) == 0) {
        return error_set(error, "%s: tensor \"%.200s\" has no known dtype (%.40s): %s", path, entry->name,
                         entry->dtype ? entry->dtype : "missing", remedy);
    }
    entry->ndim = parse_numbers(json_get(member, "shape"), entry->shape, SAFETENSORS_MAX_DIMS);
    if (entry->ndim < 0) {
        return error_set(error, "%s: tensor \"%.200s\" has no shape of at most %d whole numbers: %s", path, entry->name,
                         SAFETENSORS_MAX_DIMS, remedy);
    }
    int64_t offsets[2];
    if (parse_numbers(json_get(member, "data_offsets"), offsets, 2) != 2 || offsets[0] > offsets[1]) {
        return error_set(error, "%s: tensor \"%.200s\" has no data_offsets [begin, end]: %s", path, entry->name,
                         remedy);
    }
    if (!compute_size(entry) || entry->bytes != (uint64_t)(offsets[1] - offsets[0])) {
        return error_set(error, "%s: tensor \"%.200s\" has a shape and dtype that don't make its %ld bytes: %s", path,
                         entry->name, offsets[1] - offsets[0], remedy);
    }
    entry->begin = (uint64_t)offsets[0];
    return true;
}

static bool check_metadata(const char *path, const JsonValue *metadata, Error *error) {
    bool ok = json_is_object(metadata);
    for (const JsonValue *item = json_first(metadata); ok && item; item = json_next(item)) {
        ok = json_string(item, NULL) != NULL;
    }
    return ok || error_set(error, "%s: __metadata__ is not an object of strings: %s", path, remedy);
}

static int compare_begins(const void *a, const void *b) {
    const SafetensorsEntry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); // empty tensors first
}

// Checks that the tensors follow one another without gaps or overlaps and fill the data,
// `data_bytes`, to its end.
static bool check_layout(const SafetensorsFile *file, uint64_t data_bytes, Error *error) {
    uint64_t end = 0;
    for (int i = 0; i < file->num_entries; i++) {
        const SafetensorsEntry *entry = &file->entries[i];
        if (entry->begin != end) {
            return error_set(error, "%s: tensor \"%.200s\" begins at byte %lu of the data, where %lu was due: %s",
                             file->path, entry->name, entry->begin, end, remedy);
        }
        end += entry->bytes; // both below 2^53: see json_int64
    }
    if (end != data_bytes) {
        return error_set(error, "%s has %lu bytes of data where its header promises %lu: %s", file->path, data_bytes,
                         end, remedy);
    }
    return true;
}

// Reads the entries of a header that is an object: it begins with "{".
static bool parse_header(SafetensorsFile *file, Error *error) {
    int count = 0;
    Error cause;
    if (!json_names_once(file->header, &cause)) {
        return error_set(error, "%s: its header: %s: %s", file->path, cause.message, remedy);
    }
    for (const JsonValue *member = json_first(file->header); member; member = json_next(member)) {
        count++;
    }
    file->entries = allocate((size_t)count * sizeof(*file->entries));
    for (const JsonValue *member = json_first(file->header); member; member = json_next(member)) {
        if (strcmp(json_key(member), "__metadata__") == 0) {
            if (!check_metadata(file->path, member, error)) return false;
        } else if (!parse_entry(file->path, member, &file->entries[file->num_entries++], error)) {
            return false;
        }
    }
    qsort(file->entries, (size_t)file->num_entries, sizeof(*file->entries), compare_begins);
    return true;
}

// Reads and parses the header of a file of `file_bytes` bytes.
static bool read_header(SafetensorsFile *file, uint64_t file_bytes, Error *error) {
    uint64_t header_bytes;
    if (file_bytes < LENGTH_BYTES) {
        return error_set(error, "%s has only %lu bytes: %s", file->path, file_bytes, remedy);
    }
    if (!read_at(file, &header_bytes, LENGTH_BYTES, 0, error)) return false;
    if (header_bytes > MAX_HEADER_BYTES || header_bytes > file_bytes - LENGTH_BYTES) {
        return error_set(error, "%s claims a header of %lu bytes (the file has %lu, and %d are allowed): %s",
                         file->path, header_bytes, file_bytes, MAX_HEADER_BYTES, remedy);
    }
    char *text = allocate(header_bytes);
    bool ok = read_at(file, text, header_bytes, LENGTH_BYTES, error);
    if (ok && (header_bytes == 0 || text[0] != '{')) {
        ok = error_set(error, "%s has a header that doesn't begin with '{': %s", file->path, remedy);
    }
    if (ok) {
        Error cause;
        file->header = json_parse(text, header_bytes, &cause);
        ok = file->header != NULL;
        if (!ok) error_set(error, "%s: its header: %s", file->path, cause.message);
    }
    free(text);
    file->data_begin = LENGTH_BYTES + header_bytes;
    return ok && parse_header(file, error) && check_layout(file, file_bytes - file->data_begin, error);
}

bool safetensors_open(SafetensorsFile *file, const char *path, Error *error) {
    // Without O_NONBLOCK, opening a named pipe would wait for its writer.
    *file = (SafetensorsFile){.descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (file->descriptor < 0) {
        return error_set(error, "%s can't be opened: %s; check the path and its permissions", path, strerror(errno));
    }
    file->path = format_string("%s", path);
    struct stat status;
    bool ok = fstat(file->descriptor, &status) == 0 && S_ISREG(status.st_mode);
    if (!ok) error_set(error, "%s is not a file: name the .safetensors file itself", path);
    ok = ok && read_header(file, (uint64_t)status.st_size, error);
    if (!ok) safetensors_close(file);
    return ok;
}

const SafetensorsEntry *safetensors_find(const SafetensorsFile *file, const char *name) {
    for (int i = 0; i < file->num_entries; i++) {
        if (strcmp(file->entries[i].name, name) == 0) return &file->entries[i];
    }
    return NULL;
}

const char *safetensors_metadata(const SafetensorsFile *file, const char *key) {
    return json_string(json_get(file->header, "__metadata__"), key);
}

static float from_fp16(uint16_t x) {
    uint32_t sign = (uint32_t)(x >> 15) << 31, magnitude = x & 0x7FFF;
    // Reads the bits as FP32's with too small a bias, which one exact multiplication puts right;
    // Inf and NaN keep their payload.
    uint32_t bits = magnitude >= 0x7C00 ? 0x7F800000u | (magnitude & 0x3FF) << 13
                                        : mx_float_bits(mx_bits_float(magnitude << 13) * 0x1p112f);
    return mx_bits_float(bits | sign);
}

void safetensors_to_fp32(float *out, const void *in, const char *dtype, size_t count) {
    const char *bytes = in;
    size_t width = dtype_bits(dtype) / 8;
    for (size_t i = 0; i < count; i++, bytes += width) {
        uint16_t half;
        double wide;
        if (width == sizeof(wide)) {
            memcpy(&wide, bytes, width);
            out[i] = (float)wide;
        } else if (width == sizeof(half)) {
            memcpy(&half, bytes, width);
            out[i] = dtype[0] == 'B' ? mx_from_bf16(half) : from_fp16(half);
        } else {
            memcpy(&out[i], bytes, width);
        }
    }
}

bool safetensors_read_fp32(const SafetensorsFile *file, const SafetensorsEntry *entry, float *out, Error *error) {
    const char *dtype = entry->dtype;
    if (strcmp(dtype, "F32") == 0) return safetensors_read(file, entry, out, error);
    if (strcmp(dtype, "F64") != 0 && strcmp(dtype, "F16") != 0 && strcmp(dtype, "BF16") != 0) {
        return error_set(error, "%s: tensor \"%.200s\" is %s, where F64, F32, F16 or BF16 is needed: convert it first",
                         file->path, entry->name, dtype);
    }
    char *data = allocate(entry->bytes);
    bool ok = safetensors_read(file, entry, data, error);
    if (ok) safetensors_to_fp32(out, data, dtype, (size_t)entry->num_elements);
    free(data);
    return ok;
}

bool safetensors_read(const SafetensorsFile *file, const SafetensorsEntry *entry, void *out, Error *error) {
    return read_at(file, out, entry->bytes, file->data_begin + entry->begin, error);
}

void safetensors_close(SafetensorsFile *file) {
    if (file->descriptor >= 0) close(file->descriptor);
    json_free(file->header);
    free(file->entries);
    free(file->path);
    *file = (SafetensorsFile){.descriptor = -1};
}

// Writing

struct SafetensorsWriter {
    char *path, *temporary;
    int descriptor;
    JsonWriter header;
    uint64_t declared, written; // bytes of data
    uint64_t data_begin;        // in the file
    bool joined;                // another process made it
    bool failed;
    Error error; // the first one
};

// Keeps the error, and removes what was written.
static bool writer_fail(SafetensorsWriter *writer, const char *what) {
    writer->failed = true;
    if (!writer->joined) unlink(writer->temporary);
    return error_set(&writer->error, "%s can't be written: %s", writer->path, what);
}

static bool writer_fail_errno(SafetensorsWriter *writer) {
    Error what;
    error_set(&what, "%s; check the free space and the disk", strerror(errno));
    return writer_fail(writer, what.message);
}

static bool report_failure(const SafetensorsWriter *writer, Error *error) {
    return !writer->failed || error_set(error, "%s", writer->error.message);
}

void safetensors_leave(SafetensorsWriter *writer) {
    if (writer->descriptor >= 0) close(writer->descriptor);
    json_writer_free(&writer->header);
    free(writer->temporary);
    free(writer->path);
    free(writer);
}

static SafetensorsWriter *open_writer(const char *path, const char *const *metadata, bool joined, Error *error) {
    SafetensorsWriter *writer = allocate(sizeof(*writer));
    writer->path = format_string("%s", path);
    writer->temporary = format_string("%s.tmp", path);
    writer->joined = joined;
    writer->descriptor = open(writer->temporary, O_WRONLY | O_CLOEXEC | (joined ? 0 : O_CREAT | O_TRUNC), 0666);
    if (writer->descriptor < 0) {
        error_set(error, "%s can't be %s: %s; %s", writer->temporary, joined ? "opened" : "made", strerror(errno),
                  joined ? "every rank must see --out-dir" : "check its directory and permissions");
        safetensors_leave(writer);
        return NULL;
    }
    json_begin_object(&writer->header, NULL);
    if (metadata) json_begin_object(&writer->header, "__metadata__");
    for (int i = 0; metadata && metadata[i]; i += 2) {
        json_write_string(&writer->header, metadata[i], metadata[i + 1]);
    }
    if (metadata) json_end_object(&writer->header);
    return writer;
}

SafetensorsWriter *safetensors_create(const char *path, const char *const *metadata, Error *error) {
    return check_regular(path, error) ? open_writer(path, metadata, false, error) : NULL;
}

SafetensorsWriter *safetensors_join(const char *path, const char *const *metadata, Error *error) {
    return open_writer(path, metadata, true, error);
}

void safetensors_add(SafetensorsWriter *writer, const char *name, const char *dtype, int ndim, const int64_t *shape) {
    SafetensorsEntry entry = {.dtype = dtype, .ndim = ndim};
    if (ndim < 0 || ndim > SAFETENSORS_MAX_DIMS || dtype_bits(dtype) == 0) {
        die("safetensors_add: %s: %d dimensions of %s", name, ndim, dtype);
    }
    json_begin_object(&writer->header, name);
    json_write_string(&writer->header, "dtype", dtype);
    json_begin_array(&writer->header, "shape");
    for (int i = 0; i < ndim; i++) {
        entry.shape[i] = shape[i];
        json_write_int64(&writer->header, NULL, shape[i]);
    }
    json_end_array(&writer->header);
    if (!compute_size(&entry)) die("safetensors_add: the shape of %s overflows", name);
    json_begin_array(&writer->header, "data_offsets");
    json_write_int64(&writer->header, NULL, (int64_t)writer->declared);
    writer->declared += entry.bytes;
    json_write_int64(&writer->header, NULL, (int64_t)writer->declared);
    json_end_array(&writer->header);
    json_end_object(&writer->header);
}

// Writes `bytes` bytes at `offset` of the file.
static bool write_all(SafetensorsWriter *writer, const char *data, size_t bytes, uint64_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t written = pwrite(writer->descriptor, data + done, bytes - done, (off_t)(offset + done));
        if (written < 0 && errno != EINTR) return writer_fail_errno(writer);
        if (written > 0) done += (size_t)written;
    }
    return true;
}

bool safetensors_begin_data(SafetensorsWriter *writer) {
    JsonWriter *header = &writer->header;
    json_end_object(header);
    uint64_t padding = (DATA_ALIGNMENT - (LENGTH_BYTES + header->length) % DATA_ALIGNMENT) % DATA_ALIGNMENT;
    uint64_t bytes = header->length + padding;
    if (bytes > MAX_HEADER_BYTES) return writer_fail(writer, "its header is over the format's limit");
    writer->data_begin = LENGTH_BYTES + bytes;
    if (writer->joined) return true;
    char *start = allocate(writer->data_begin);
    memcpy(start, &bytes, LENGTH_BYTES);
    memcpy(start + LENGTH_BYTES, header->text, header->length);
    memset(start + LENGTH_BYTES + header->length, ' ', padding);
    bool ok = write_all(writer, start, writer->data_begin, 0);
    free(start);
    // The whole size at once: ranks that join write inside a file whose end all of them know.
    if (ok && ftruncate(writer->descriptor, (off_t)(writer->data_begin + writer->declared)) != 0) {
        return writer_fail_errno(writer);
    }
    return ok;
}

bool safetensors_write_at(SafetensorsWriter *writer, uint64_t offset, const void *data, size_t bytes) {
    if (writer->failed) return false;
    if (offset > writer->declared || bytes > writer->declared - offset) {
        return writer_fail(writer, "more data than declared");
    }
    writer->written += bytes;
    return write_all(writer, data, bytes, writer->data_begin + offset);
}

bool safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes) {
    return safetensors_write_at(writer, writer->written, data, bytes);
}

bool safetensors_sync(SafetensorsWriter *writer, Error *error) {
    if (!writer->failed && fsync(writer->descriptor) != 0) writer_fail_errno(writer);
    return report_failure(writer, error);
}

void safetensors_others_are_done(SafetensorsWriter *writer) { writer->written = writer->declared; }

bool safetensors_finish(SafetensorsWriter *writer, Error *error) {
    if (!writer->failed && writer->written != writer->declared) writer_fail(writer, "less data than declared");
    bool ok = safetensors_sync(writer, error);
    if (ok && rename(writer->temporary, writer->path) != 0) writer_fail_errno(writer);
    // the directory, so that the name survives a power cut
    ok = ok && report_failure(writer, error) && sync_directory_of(writer->path, error);
    safetensors_leave(writer);
    return ok;
}
