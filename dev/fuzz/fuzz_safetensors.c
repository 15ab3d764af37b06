// The safetensors reader: reads every tensor that it admits, and what its metadata says.
#include "fuzz.h"
#include "llmc/files/safetensors.h"

static void read_entry(const SafetensorsFile *file, const SafetensorsEntry *entry, size_t file_bytes) {
    Error error = {""};
    // Data that is in the file, and so little of it that it can be allocated; elements have 4 bits
    // at least.
    MUST(entry->bytes <= file_bytes && entry->begin <= file_bytes - entry->bytes);
    MUST(entry->num_elements >= 0 && (uint64_t)entry->num_elements <= 2 * entry->bytes);
    void *bytes = malloc(entry->bytes + 1);
    float *values = malloc((size_t)entry->num_elements * sizeof(float) + 1);
    MUST(bytes && values);
    MUST(safetensors_read(file, entry, bytes, &error));
    if (!safetensors_read_fp32(file, entry, values, &error)) {
        fuzz_check_sentence(error.message, sizeof(error.message));
    }
    free(bytes);
    free(values);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Error error = {""};
    SafetensorsFile file;
    char *path = fuzz_write("input.safetensors", data, size);
    if (safetensors_open(&file, path, &error)) {
        for (int i = 0; i < file.num_entries; i++) {
            MUST(safetensors_find(&file, file.entries[i].name) == &file.entries[i]);
            read_entry(&file, &file.entries[i], size);
        }
        const char *format = safetensors_metadata(&file, "format");
        MUST(!format || strlen(format) <= size);
        safetensors_close(&file);
    } else {
        fuzz_check_sentence(error.message, sizeof(error.message));
    }
    free(path);
    return 0;
}
