/*
Data loader: windows of tokens from llm.c's token files, in an order that depends on the seed alone.

A token file (a shard) is a header of 256 little-endian int32 {magic, version, number of tokens as
uint32, 0...} and then the tokens: uint16 with magic 20240520 and version 1, uint32 with magic
20240801 and version 7. All the shards of a pattern, sorted by name, are one stream of tokens, so
that a document that runs from one shard into the next is unbroken. The stream is cut into windows
of seq_len tokens; a window's targets are its tokens shifted by one, so its last target is the first
token of the next.
*/
#pragma once

#include "llmc/base/util.h" // Error

typedef struct {
    char *path;
    void *file; // the whole file, mapped read-only; one that is cut short during the run ends it with SIGBUS
    size_t file_bytes;
    int64_t first_token; // position of its first token in the stream
    int64_t num_tokens;
    int token_bytes; // 2 or 4, the same for all shards
} TokenShard;

typedef struct {
    TokenShard *shards; // sorted by name
    int num_shards;
    int64_t num_tokens;  // of all shards
    int64_t num_windows; // (num_tokens - 1) / seq_len: an epoch
    int64_t seq_len;
    int64_t vocab_size;
    uint64_t seed;
    bool shuffle;
} DataLoader;

// Returns the first file that matches a pattern, to be freed; NULL: none does.
char *dataloader_first_file(const char *pattern);

// Maps all files that match `glob_pattern`. Up to 64M tokens are compared with vocab_size here,
// before the first step; of more, each when it is read. Errors: nothing matches, a directory, an
// unreadable, foreign, truncated or overlong file, shards of both widths, fewer than seq_len + 1
// tokens in all, a token id that is not below vocab_size. After an error there is nothing to close.
bool dataloader_open(DataLoader *loader, const char *glob_pattern, int64_t seq_len, uint64_t seed, bool shuffle,
                     int64_t vocab_size, Error *error);

// Reads samples [first_sample, first_sample + count), counted from 0 at the start of training, over
// all ranks and all epochs:
//   tokens   (count, seq_len)
//   targets  (count, seq_len)
// Sample s is a window of epoch s / num_windows; every epoch has every window once, in a shuffled
// order of its own, or without `shuffle` in the stream's. Nothing is remembered from call to call:
// who reads which samples, and when, changes nothing. Several threads may call it at once. Errors:
// a token id that is not below vocab_size.
bool dataloader_batch(const DataLoader *loader, int64_t first_sample, int64_t count, int32_t *tokens, int32_t *targets,
                      Error *error);

// Returns a hash of the tokens of up to 64 samples of the first epoch, whether they are below
// vocab_size or not.
uint64_t dataloader_hash(const DataLoader *loader);

void dataloader_close(DataLoader *loader);
