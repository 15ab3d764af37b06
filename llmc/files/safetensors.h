/*
safetensors: tensors by name in one file. It holds the header's length in 8 little-endian bytes, a
JSON header {name: {dtype, shape, data_offsets}}, and the data. It is read by tensor and written as
a stream, or by several processes.
*/
#pragma once

#include "json.h"           // JsonValue
#include "llmc/base/util.h" // Error

enum { SAFETENSORS_MAX_DIMS = 8 };

typedef struct {
    const char *name;  // lives as long as the file is open
    const char *dtype; // "F32", "BF16", ...: the format's names
    int ndim;          // 0: a scalar
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t num_elements;
    uint64_t begin, bytes; // in the data, which starts at file->data_begin
} SafetensorsEntry;

typedef struct {
    char *path;
    int descriptor;
    uint64_t data_begin;
    JsonValue *header;
    int num_entries;
    SafetensorsEntry *entries; // in the order of their data
} SafetensorsFile;

// Opens a file: reads its header and checks that every tensor lies in the file where and as large
// as it says. What the format's own library refuses this does too, but for odd spellings of whole
// numbers (016, 1e3). On an error nothing is open.
bool safetensors_open(SafetensorsFile *file, const char *path, Error *error);
const SafetensorsEntry *safetensors_find(const SafetensorsFile *file, const char *name); // NULL where there is none
const char *safetensors_metadata(const SafetensorsFile *file, const char *key);          // NULL where there is none

// Read a tensor's data: as `num_elements` floats, from F64, F32, F16 or BF16 (other dtypes are
// refused); or its `bytes` as they are in the file, little-endian.
bool safetensors_read_fp32(const SafetensorsFile *file, const SafetensorsEntry *entry, float *out, Error *error);
bool safetensors_read(const SafetensorsFile *file, const SafetensorsEntry *entry, void *out, Error *error);
void safetensors_close(SafetensorsFile *file);

// Converts `count` little-endian elements of F64, F32, F16 or BF16.
void safetensors_to_fp32(float *out, const void *in, const char *dtype, size_t count);

/*
Writing: create, add every tensor, begin_data, write the data in the order added (in pieces of any
size), finish. The file appears under its name at the end, whole, or not at all. The first failure
sticks: later calls return false, and finish, or sync, says what it was. A caller may check finish
alone; it must call it in any case.
*/
typedef struct SafetensorsWriter SafetensorsWriter;

// Creates a file. `metadata` is key, value, ..., NULL; or NULL. transformers expects
// {"format": "pt"}. Returns NULL with an error where the file can't be made.
SafetensorsWriter *safetensors_create(const char *path, const char *const *metadata, Error *error);
void safetensors_add(SafetensorsWriter *writer, const char *name, const char *dtype, int ndim, const int64_t *shape);
bool safetensors_begin_data(SafetensorsWriter *writer);
bool safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes);
// Refuses a file with less data than was declared. Frees `writer`, whatever it returns.
bool safetensors_finish(SafetensorsWriter *writer, Error *error);

/*
Writing by several processes: one creates, adds and begins the data; then the others join with the
same metadata, and add the same tensors and begin theirs; each writes its parts; all sync; the first
finishes when all have, the others leave.
*/
SafetensorsWriter *safetensors_join(const char *path, const char *const *metadata, Error *error);
// Writes `bytes` at `offset` of the data; they count as written.
bool safetensors_write_at(SafetensorsWriter *writer, uint64_t offset, const void *data, size_t bytes);
// Syncs this process's parts to the disk.
bool safetensors_sync(SafetensorsWriter *writer, Error *error);
// Counts the parts that other processes have written as written.
void safetensors_others_are_done(SafetensorsWriter *writer);
void safetensors_leave(SafetensorsWriter *writer);
