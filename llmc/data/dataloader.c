#include "dataloader.h"
#include "tokenizer.h" // TOKENIZER_MAGIC

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "llmc/base/random.h" // random_permute

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token files are mapped, and they are little-endian");

enum { HEADER_BYTES = 1024, UINT16_MAGIC = 20240520, UINT16_VERSION = 1, UINT32_MAGIC = 20240801, UINT32_VERSION = 7 };
static const int64_t MAX_TOKENS_CHECKED_AT_OPEN = 64 << 20;

// Opening

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// Says that `pattern` matches nothing, and which .bin file of its directory it may have meant.
static bool nothing_matches(const char *pattern, Error *error) {
    int directory_length = (int)(file_name(pattern) - pattern);
    char *directory = directory_length ? format_string("%.*s", directory_length, pattern) : format_string("./");
    char *every_bin = format_string("%s*.bin", directory);
    glob_t found = {0};
    if (path_exists(directory) && access(directory, R_OK | X_OK) != 0) {
        error_set(error, "no file matches '%s', and what '%s' has can't be seen: %s; see to its permissions", pattern,
                  directory, strerror(errno));
    } else if (glob(every_bin, GLOB_TILDE, NULL, &found) == 0) {
        const char **names = allocate(found.gl_pathc * sizeof(*names));
        for (size_t i = 0; i < found.gl_pathc; i++) {
            names[i] = file_name(found.gl_pathv[i]);
        }
        const char *near = nearest_word(file_name(pattern), names, (int)found.gl_pathc);
        if (near) {
            error_set(error, "no file matches '%s'; did you mean '%s%s'?", pattern, directory, near);
        } else {
            error_set(error, "no file matches '%s'; what '%s' has is '%s'%s", pattern, directory, names[0],
                      found.gl_pathc > 1 ? " and others" : "");
        }
        free(names);
    } else if (strpbrk(directory, "[*?") && path_exists(directory)) {
        error_set(error,
                  "no file matches '%s', though '%s' is there: [, * and ? have a meaning in a pattern, write \\[, \\* "
                  "and \\? for the characters",
                  pattern, directory);
    } else {
        error_set(error, "no file matches '%s', and '%s' has no .bin file at all; data/README.md says how to make one",
                  pattern, directory);
    }
    globfree(&found);
    free(every_bin);
    free(directory);
    return false;
}

// Checks a shard's header against its size.
static bool check_header(TokenShard *shard, Error *error) {
    const int32_t *header = shard->file;
    if (header[0] == UINT16_MAGIC && header[1] == UINT16_VERSION) shard->token_bytes = 2;
    if (header[0] == UINT32_MAGIC && header[1] == UINT32_VERSION) shard->token_bytes = 4;
    if (header[0] == TOKENIZER_MAGIC) {
        return error_set(error, "'%s' is a tokenizer, not a token file: name those alone, as in 'my-data/train_*.bin'",
                         shard->path);
    }
    if (shard->token_bytes == 0) {
        return error_set(error,
                         "'%s' is not a token file: its first numbers are %d and %d, not %d and %d (uint16 tokens) or "
                         "%d and %d (uint32); data/prepare.py makes token files from text",
                         shard->path, header[0], header[1], UINT16_MAGIC, UINT16_VERSION, UINT32_MAGIC, UINT32_VERSION);
    }
    shard->num_tokens = (uint32_t)header[2];
    int64_t file_bytes = (int64_t)shard->file_bytes,
            expected_bytes = HEADER_BYTES + shard->num_tokens * shard->token_bytes;
    if (file_bytes != expected_bytes) {
        return error_set(error,
                         "'%s' is %s: its header claims %ld tokens, %ld bytes in all, and it has %ld bytes; prepare "
                         "it again, or copy it whole",
                         shard->path, file_bytes < expected_bytes ? "truncated" : "too long", shard->num_tokens,
                         expected_bytes, file_bytes);
    }
    return true;
}

// Maps the open file `descriptor` and checks its header.
static bool map_shard(TokenShard *shard, int descriptor, Error *error) {
    struct stat status;
    if (fstat(descriptor, &status) != 0) return error_set(error, "can't read '%s': %s", shard->path, strerror(errno));
    if (S_ISDIR(status.st_mode)) {
        return error_set(error, "'%s' is a directory: name the token files in it, as in '%s/train_*.bin'", shard->path,
                         shard->path);
    }
    if (!S_ISREG(status.st_mode)) {
        return error_set(error, "'%s' is not a regular file: name files that data/prepare.py made", shard->path);
    }
    if (status.st_size < HEADER_BYTES) {
        return error_set(error, "'%s' is not a token file: it has %ld bytes, fewer than the header's %d", shard->path,
                         status.st_size, HEADER_BYTES);
    }
    shard->file_bytes = (size_t)status.st_size;
    shard->file = mmap(NULL, shard->file_bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (shard->file == MAP_FAILED) {
        shard->file = NULL;
        return error_set(error, "can't map '%s': %s", shard->path, strerror(errno));
    }
    return check_header(shard, error);
}

static bool open_shard(TokenShard *shard, const char *path, Error *error) {
    shard->path = format_string("%s", path);
    // Without O_NONBLOCK, opening a named pipe would wait for its writer.
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) {
        return error_set(error, "can't open '%s': %s; check the path and its permissions", path, strerror(errno));
    }
    bool mapped = map_shard(shard, descriptor, error);
    close(descriptor);
    return mapped;
}

static bool open_shards(DataLoader *loader, char **paths, int count, Error *error) {
    loader->shards = allocate((size_t)count * sizeof(*loader->shards));
    for (int i = 0; i < count; i++) {
        TokenShard *shard = &loader->shards[i];
        loader->num_shards++;
        if (!open_shard(shard, paths[i], error)) return false;
        if (shard->token_bytes != loader->shards[0].token_bytes) {
            return error_set(error,
                             "'%s' has %d-byte tokens and '%s' %d-byte ones: they come from different tokenizers; name "
                             "only files of one data set",
                             paths[0], loader->shards[0].token_bytes, paths[i], shard->token_bytes);
        }
        shard->first_token = loader->num_tokens;
        loader->num_tokens += shard->num_tokens;
    }
    return true;
}

// Reading

// Copies `count` tokens of `shard`, from its token number `first` on.
static bool read_shard(const DataLoader *loader, const TokenShard *shard, int64_t first, int64_t count, int32_t *tokens,
                       Error *error) {
    const char *source = (const char *)shard->file + HEADER_BYTES + first * shard->token_bytes;
    for (int64_t i = 0; i < count; i++) {
        uint32_t token = shard->token_bytes == 2 ? ((const uint16_t *)source)[i] : ((const uint32_t *)source)[i];
        if (token >= loader->vocab_size) {
            return error_set(error,
                             "'%s': token number %ld has id %lu, but the model's vocabulary has %ld ids; use "
                             "--vocab-size %lu or more, or the tokenizer that the model was made for",
                             shard->path, first + i, (unsigned long)token, loader->vocab_size,
                             (unsigned long)token + 1);
        }
        tokens[i] = (int32_t)token;
    }
    return true;
}

// Copies `count` tokens from a position in the stream of all shards on.
static bool read_stream(const DataLoader *loader, int64_t position, int64_t count, int32_t *tokens, Error *error) {
    for (int i = 0; i < loader->num_shards && count > 0; i++) {
        const TokenShard *shard = &loader->shards[i];
        int64_t first = position - shard->first_token;
        if (first >= shard->num_tokens) continue;
        int64_t here = min_int64(shard->num_tokens - first, count);
        if (!read_shard(loader, shard, first, here, tokens, error)) return false;
        position += here;
        count -= here;
        tokens += here;
    }
    return true;
}

static bool check_all_tokens(const DataLoader *loader, Error *error) {
    int32_t tokens[4096];
    const int64_t most = COUNT(tokens);
    for (int64_t position = 0; position < loader->num_tokens; position += most) {
        int64_t left = loader->num_tokens - position;
        if (!read_stream(loader, position, min_int64(left, most), tokens, error)) return false;
    }
    return true;
}

// Returns where sample `sample` begins in the stream.
static int64_t sample_position(const DataLoader *loader, int64_t sample) {
    int64_t epoch = sample / loader->num_windows, window = sample % loader->num_windows;
    if (loader->shuffle) {
        window = (int64_t)random_permute(loader->seed, SHUFFLE_STREAMS + (uint64_t)epoch, (uint64_t)window,
                                         (uint64_t)loader->num_windows);
    }
    return window * loader->seq_len;
}

bool dataloader_batch(const DataLoader *loader, int64_t first_sample, int64_t count, int32_t *tokens, int32_t *targets,
                      Error *error) {
    int64_t length = loader->seq_len;
    for (int64_t i = 0; i < count; i++) {
        int64_t position = sample_position(loader, first_sample + i);
        if (!read_stream(loader, position, length, tokens + i * length, error) ||
            !read_stream(loader, position + 1, length, targets + i * length, error)) {
            return false;
        }
    }
    return true;
}

uint64_t dataloader_hash(const DataLoader *loader) {
    enum { SAMPLES = 64 };
    size_t bytes = (size_t)loader->seq_len * sizeof(int32_t);
    int32_t *tokens = allocate(bytes), *targets = allocate(bytes);
    DataLoader unchecked = *loader;
    unchecked.vocab_size = INT64_MAX;
    int64_t step = loader->num_windows > SAMPLES ? loader->num_windows / SAMPLES : 1;
    uint64_t hash = HASH_START;
    for (int64_t i = 0; i < SAMPLES && i * step < loader->num_windows; i++) {
        dataloader_batch(&unchecked, i * step, 1, tokens, targets, OR_DIE);
        for (int64_t t = 0; t < loader->seq_len; t++) {
            hash = hash_add(hash, (uint32_t)tokens[t]);
        }
    }
    free(tokens);
    free(targets);
    return hash;
}

// All of it

char *dataloader_first_file(const char *pattern) {
    glob_t found = {0};
    char *file = glob(pattern, GLOB_TILDE, NULL, &found) == 0 ? format_string("%s", found.gl_pathv[0]) : NULL;
    globfree(&found);
    return file;
}

static bool open_pattern(DataLoader *loader, const char *pattern, Error *error) {
    glob_t found = {0};
    int status = glob(pattern, GLOB_TILDE, NULL, &found);
    if (status == GLOB_NOSPACE) die("out of memory");
    bool opened =
        status == 0 ? open_shards(loader, found.gl_pathv, (int)found.gl_pathc, error) : nothing_matches(pattern, error);
    globfree(&found);
    return opened;
}

static bool cut_windows(DataLoader *loader, const char *pattern, Error *error) {
    if (loader->num_tokens <= loader->seq_len) {
        return error_set(error,
                         "'%s' has %ld tokens in all, but one sequence takes %ld (--seq-len and one to predict); "
                         "give more data or a shorter --seq-len",
                         pattern, loader->num_tokens, loader->seq_len + 1);
    }
    loader->num_windows = (loader->num_tokens - 1) / loader->seq_len;
    return true;
}

// Tells the system in which order the files will be read; it may ignore that.
static void advise(const DataLoader *loader) {
    for (int i = 0; i < loader->num_shards; i++) {
        const TokenShard *shard = &loader->shards[i];
        madvise(shard->file, shard->file_bytes, loader->shuffle ? MADV_RANDOM : MADV_SEQUENTIAL);
    }
}

bool dataloader_open(DataLoader *loader, const char *glob_pattern, int64_t seq_len, uint64_t seed, bool shuffle,
                     int64_t vocab_size, Error *error) {
    *loader = (DataLoader){.seq_len = seq_len, .vocab_size = vocab_size, .seed = seed, .shuffle = shuffle};
    bool opened = open_pattern(loader, glob_pattern, error) && cut_windows(loader, glob_pattern, error);
    if (opened && loader->num_tokens <= MAX_TOKENS_CHECKED_AT_OPEN) opened = check_all_tokens(loader, error);
    if (!opened) dataloader_close(loader); // which leaves no files to advise about
    advise(loader);
    return opened;
}

void dataloader_close(DataLoader *loader) {
    for (int i = 0; i < loader->num_shards; i++) {
        TokenShard *shard = &loader->shards[i];
        if (shard->file) munmap(shard->file, shard->file_bytes);
        free(shard->path);
    }
    free(loader->shards);
    *loader = (DataLoader){0};
}
