/*
What tokenizer.json says beside the tokens' bytes, and a text needs to get the ids that the
tokenizers library gives it: the merges in their order, how text is cut into words before, and
tokens that are found in a text as they stand.
*/
#pragma once

#include "llmc/files/json.h"

typedef struct {
    int32_t left, right;
    int32_t rank; // which merge it is: the first goes first
    int32_t id;   // of the token that it makes
} TokenMerge;

// A token by its name in tokenizer.json.
typedef struct {
    const char *name; // of `json`
    int32_t id;
} TokenName;

typedef struct {
    JsonValue *json;
    TokenName *names; // (num_names) in the order of strcmp
    int64_t num_names;
    TokenMerge *merges; // (num_merges) in the order of their pairs
    int64_t num_merges;
    TokenName *added; // (num_added) found in a text before all else, the longest first
    int num_added;
    bool cuts_words;       // as GPT-2 does
    bool composed;         // texts must be in Unicode's form NFC
    bool spells_bytes;     // a token is named by GPT-2's characters for bytes
    bool marks_spaces;     // as SentencePiece: spaces are U+2581, and there is one before the text
    char unsupported[256]; // why texts can't be encoded by it, or ""
} TokenizerRules;

// Makes the rules of tokenizer.json's text, for tokens with ids below vocab_size. Where there is
// something in it that isn't known here, rules->unsupported says what.
void tokenizer_rules_read(TokenizerRules *rules, const char *json, size_t bytes, int vocab_size);
void tokenizer_rules_free(TokenizerRules *rules);

// Returns the token of that name, -1 where there is none.
int32_t tokenizer_rules_find(const TokenizerRules *rules, const char *name);

// Returns the merge that makes one token of two, NULL where none does.
const TokenMerge *tokenizer_rules_merge(const TokenizerRules *rules, int32_t left, int32_t right);

// Returns the bytes up to the end of the word that a text of 1 byte at least begins with, by
// GPT-2's expression 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t tokenizer_word(const char *text, size_t bytes);

// Returns whether the character that a text of 1 byte at least begins with is white space, and its
// bytes.
bool tokenizer_is_space(const char *text, size_t bytes, size_t *length);

// Returns the bytes up to the first token of `added` in a text, and which it is; all bytes and -1
// where there is none.
size_t tokenizer_find_added(const TokenizerRules *rules, const char *text, size_t bytes, int *which);

// Returns whether a text is surely in form NFC: a text with characters that combine may be, and
// isn't taken.
bool tokenizer_is_composed(const char *text, size_t bytes);

// Writes GPT-2's name of a byte, at most 2 bytes and a 0.
void tokenizer_byte_name(char name[3], unsigned char byte);
