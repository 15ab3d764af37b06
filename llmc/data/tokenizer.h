/*
Tokens to text and back, by llm.c's tokenizer.bin: 256 uint32 little-endian (magic 20240328,
version, vocabulary size, end-of-text id), then for each token one length byte (1 to 255) and its
bytes. In version 1 end-of-text is 50256, GPT-2's; in version 3, ours, a length has two bytes.
*/
#pragma once

#include "tokenizer_rules.h"

enum { NUM_TOKENIZER_JSONS = 2, TOKENIZER_MAGIC = 20240328 };

typedef struct {
    const char *text; // in the file, not 0-terminated
    size_t bytes;
    int32_t id;
} Token;

typedef struct {
    int vocab_size;
    int end_of_text;
    char *file; // tokenizer.bin as it was read
    size_t file_bytes;
    // NAME.json and NAME_config.json, where they lay beside NAME.bin, as they were read: the same
    // tokenizer for transformers, which this program only copies.
    struct {
        char *text; // NULL: it wasn't there
        size_t bytes;
    } jsons[NUM_TOKENIZER_JSONS];
    Token *tokens;  // (vocab_size)
    size_t longest; // bytes of one
    Token *sorted;  // (num_sorted) those that text can become, in the order of their bytes
    int num_sorted;
    TokenizerRules rules;  // of NAME.json, where it is there
    int32_t byte_ids[256]; // the tokens that bytes begin as, by these rules
} Tokenizer;

bool tokenizer_open(Tokenizer *tokenizer, const char *path, Error *error); // on an error nothing is open
void tokenizer_close(Tokenizer *tokenizer);
bool tokenizer_has_jsons(const Tokenizer *tokenizer); // all of them
// Moves the jsons that `to` lacks there from another one of the same tokens.
void tokenizer_take_jsons(Tokenizer *to, Tokenizer *from);
// Writes the same tokenizer.bin, byte for byte, and beside it the jsons that there are.
bool tokenizer_save(const Tokenizer *tokenizer, const char *path, Error *error);

// Returns the bytes of a token, not 0-terminated; NULL and length 0 for an id outside the
// vocabulary. A token may hold part of a UTF-8 character.
const char *tokenizer_decode(const Tokenizer *tokenizer, int id, int *length);

// Returns the most ids that so many bytes can become. Where spaces are marked, a mark is three
// bytes, which may be a token each, and one more begins a text and what follows an added token.
static inline size_t tokenizer_most_ids(size_t bytes) { return 4 * (bytes + 1); }

// Converts text to at most tokenizer_most_ids(bytes) ids. Returns their number, or -1 where it
// can't: tokenizer_why_not says why. Where there is a NAME.json the
// ids are those of the tokenizers library, special tokens taken for text. Else it begins with
// single bytes and merges the adjacent pair that makes the token of the lowest id, the leftmost
// first, until none is left: that is tiktoken's rule without its cutting into words beforehand,
// which NAME.bin doesn't describe, so that runs of spaces and of line ends may become other tokens
// (of the same text) than there. End-of-text is never produced.
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes, int32_t *ids);
// Returns why a text couldn't be encoded, without a full stop.
const char *tokenizer_why_not(const Tokenizer *tokenizer);

// Prints text so that a terminal can't be harmed: control characters but \n and \t, and bytes that
// are not UTF-8, as \x1B.
void token_print_safe(FILE *stream, const char *text, size_t bytes);
