#include "tokenizer_rules.h"
#include "characters.h"

#include <stdlib.h>
#include <string.h>

// What the file says

static bool is_type(const JsonValue *value, const char *type) {
    const char *is = json_string(value, "type");
    return is && strcmp(is, type) == 0;
}

static bool is_text(const JsonValue *value, const char *key, const char *text) {
    const char *is = json_string(value, key);
    return is && strcmp(is, text) == 0;
}

static bool flag(const JsonValue *value, const char *key) {
    bool is = false;
    return json_bool(value, key, &is) && is;
}

static int64_t count_children(const JsonValue *value) {
    int64_t count = 0;
    for (const JsonValue *child = json_first(value); child; child = json_next(child)) {
        count++;
    }
    return count;
}

static int compare_names(const void *a, const void *b) {
    return strcmp(((const TokenName *)a)->name, ((const TokenName *)b)->name);
}

static bool read_names(TokenizerRules *rules, const JsonValue *vocab, int vocab_size) {
    rules->names = allocate((size_t)count_children(vocab) * sizeof(*rules->names));
    for (const JsonValue *child = json_first(vocab); child; child = json_next(child)) {
        int64_t id;
        if (!json_int64(child, NULL, &id) || id < 0 || id >= vocab_size) return false;
        rules->names[rules->num_names++] = (TokenName){json_key(child), (int32_t)id};
    }
    qsort(rules->names, (size_t)rules->num_names, sizeof(*rules->names), compare_names);
    return rules->num_names > 0;
}

// Returns the token of a name of `bytes` bytes, -1 where there is none.
static int32_t find_part(const TokenizerRules *rules, const char *name, size_t bytes) {
    char *copy = format_string("%.*s", (int)bytes, name);
    int32_t id = tokenizer_rules_find(rules, copy);
    free(copy);
    return id;
}

// Reads a merge, "a b" or ["a", "b"]. Returns false where one of the tokens isn't there.
static bool read_merge(TokenizerRules *rules, const JsonValue *pair) {
    const char *text = json_string(pair, NULL), *space = text ? strchr(text, ' ') : NULL;
    const JsonValue *first = json_first(pair), *second = first ? json_next(first) : NULL;
    const char *left = space ? text : first ? json_string(first, NULL) : NULL;
    const char *right = space ? space + 1 : second ? json_string(second, NULL) : NULL;
    if (!left || !right) return false;
    size_t left_bytes = space ? (size_t)(space - text) : strlen(left);
    char *whole = format_string("%.*s%s", (int)left_bytes, left, right);
    TokenMerge merge = {.left = find_part(rules, left, left_bytes),
                        .right = tokenizer_rules_find(rules, right),
                        .rank = (int32_t)rules->num_merges,
                        .id = tokenizer_rules_find(rules, whole)};
    free(whole);
    rules->merges[rules->num_merges++] = merge;
    return merge.left >= 0 && merge.right >= 0 && merge.id >= 0;
}

static int compare_pairs(const void *a, const void *b) {
    const TokenMerge *x = a, *y = b;
    if (x->left != y->left) return x->left < y->left ? -1 : 1;
    return (x->right > y->right) - (x->right < y->right);
}

static int compare_merges(const void *a, const void *b) {
    int order = compare_pairs(a, b);
    return order ? order : ((const TokenMerge *)a)->rank - ((const TokenMerge *)b)->rank;
}

static bool read_merges(TokenizerRules *rules, const JsonValue *merges) {
    size_t count = (size_t)count_children(merges);
    rules->merges = allocate(count * sizeof(*rules->merges));
    for (const JsonValue *pair = json_first(merges); pair; pair = json_next(pair)) {
        if (!read_merge(rules, pair)) return false;
    }
    qsort(rules->merges, count, sizeof(*rules->merges), compare_merges);
    return true;
}

static int compare_lengths(const void *a, const void *b) {
    size_t x = strlen(((const TokenName *)a)->name), y = strlen(((const TokenName *)b)->name);
    return (x < y) - (x > y);
}

// Takes the added tokens that aren't special; those are text in data, and so they are here. Returns
// false where one is found by rules that aren't known.
static bool read_added(TokenizerRules *rules, const JsonValue *tokens, int vocab_size) {
    rules->added = allocate((size_t)count_children(tokens) * sizeof(*rules->added));
    for (const JsonValue *token = json_first(tokens); token; token = json_next(token)) {
        const char *name = json_string(token, "content");
        int64_t id;
        if (flag(token, "special")) continue;
        if (!name || !name[0] || !json_int64(token, "id", &id) || id < 0 || id >= vocab_size) return false;
        if (flag(token, "lstrip") || flag(token, "rstrip") || flag(token, "single_word")) return false;
        // Where spaces are marked a normalized one is found as it is marked itself.
        if (rules->marks_spaces && flag(token, "normalized")) return false;
        rules->added[rules->num_added++] = (TokenName){name, (int32_t)id};
    }
    qsort(rules->added, (size_t)rules->num_added, sizeof(*rules->added), compare_lengths);
    return true;
}

// Returns whether a normalizer is that of Llama 2: a mark before the text, and one for each space.
static bool is_marking(const JsonValue *normalizer) {
    const JsonValue *first = json_first(json_get(normalizer, "normalizers"));
    const JsonValue *second = first ? json_next(first) : NULL;
    const char mark[] = "\xE2\x96\x81";
    return is_type(normalizer, "Sequence") && first && second && !json_next(second) && is_type(first, "Prepend") &&
           is_text(first, "prepend", mark) && is_type(second, "Replace") && is_text(second, "content", mark) &&
           is_text(json_get(second, "pattern"), "String", " ");
}

static bool is_null(const JsonValue *value) { return !json_is_object(value); }

// Returns what of the file isn't known here, or NULL.
static const char *read_kind(TokenizerRules *rules) {
    const JsonValue *json = rules->json, *model = json_get(json, "model"), *normalizer = json_get(json, "normalizer");
    const JsonValue *cutter = json_get(json, "pre_tokenizer"), *decoder = json_get(json, "decoder");
    double dropout;
    rules->spells_bytes = is_type(decoder, "ByteLevel");
    rules->marks_spaces = !rules->spells_bytes && flag(model, "byte_fallback") && is_marking(normalizer);
    rules->composed = is_type(normalizer, "NFC");
    rules->cuts_words = is_type(cutter, "ByteLevel") && flag(cutter, "use_regex");
    if (!is_type(model, "BPE") && json_string(model, "type")) return "a model that is no BPE";
    if (json_number(model, "dropout", &dropout) || flag(model, "ignore_merges")) return "dropout or ignore_merges";
    const char *prefix = json_string(model, "continuing_subword_prefix");
    const char *suffix = json_string(model, "end_of_word_suffix");
    if ((prefix && prefix[0]) || (suffix && suffix[0])) return "prefixes or suffixes of words";
    if (!rules->spells_bytes && !rules->marks_spaces)
        return "neither bytes, as GPT-2's, nor marks of spaces, as Llama 2's";
    if (!is_null(normalizer) && !rules->composed && !rules->marks_spaces) return "another normalizer than NFC";
    if (rules->spells_bytes && (!is_type(cutter, "ByteLevel") || flag(cutter, "add_prefix_space"))) {
        return "another pre_tokenizer than GPT-2's without a space before the text";
    }
    return rules->marks_spaces && !is_null(cutter) ? "a pre_tokenizer" : NULL;
}

void tokenizer_rules_read(TokenizerRules *rules, const char *json, size_t bytes, int vocab_size) {
    Error error = {0};
    *rules = (TokenizerRules){.json = json_parse(json, bytes, &error)};
    const JsonValue *model = json_get(rules->json, "model");
    const char *fault = rules->json ? read_kind(rules) : error.message;
    if (!fault &&
        (!read_names(rules, json_get(model, "vocab"), vocab_size) || !read_merges(rules, json_get(model, "merges")) ||
         !read_added(rules, json_get(rules->json, "added_tokens"), vocab_size))) {
        fault = "tokens, merges or added tokens that don't fit";
    }
    snprintf(rules->unsupported, sizeof(rules->unsupported), "%.200s", fault ? fault : "");
}

void tokenizer_rules_free(TokenizerRules *rules) {
    json_free(rules->json);
    free(rules->names);
    free(rules->merges);
    free(rules->added);
    *rules = (TokenizerRules){0};
}

int32_t tokenizer_rules_find(const TokenizerRules *rules, const char *name) {
    if (rules->num_names == 0) return -1; // bsearch takes no NULL
    const TokenName key = {.name = name};
    const TokenName *found =
        bsearch(&key, rules->names, (size_t)rules->num_names, sizeof(*rules->names), compare_names);
    return found ? found->id : -1;
}

const TokenMerge *tokenizer_rules_merge(const TokenizerRules *rules, int32_t left, int32_t right) {
    const TokenMerge pair = {.left = left, .right = right};
    const TokenMerge *found =
        bsearch(&pair, rules->merges, (size_t)rules->num_merges, sizeof(*rules->merges), compare_pairs);
    while (found && found > rules->merges && compare_pairs(found - 1, &pair) == 0) {
        found--; // a pair may stand there twice
    }
    return found;
}

// Words

static int compare_to_range(const void *character, const void *range) {
    uint32_t c = *(const uint32_t *)character;
    const uint32_t *ends = range;
    return (c > ends[1]) - (c < ends[0]);
}

static bool in_ranges(uint32_t c, const uint32_t (*ranges)[2], int count) {
    return bsearch(&c, ranges, (size_t)count, sizeof(*ranges), compare_to_range) != NULL;
}

// Returns the character that a text begins with, and its bytes; a byte that isn't UTF-8 is one.
static uint32_t character_at(const char *text, size_t bytes, size_t *length) {
    int count = utf8_sequence(text, bytes);
    const unsigned char *byte = (const unsigned char *)text;
    uint32_t c = count > 1 ? byte[0] & (0xFFu >> (count + 1)) : byte[0];
    for (int i = 1; i < count; i++) {
        c = c << 6 | (byte[i] & 0x3F);
    }
    *length = count ? (size_t)count : 1;
    return count ? c : 0xFFFD;
}

enum { LETTER, NUMBER, SPACE, OTHER };

static int kind_at(const char *text, size_t bytes, size_t *length) {
    uint32_t c = character_at(text, bytes, length);
    if (in_ranges(c, LETTERS, COUNT(LETTERS))) return LETTER;
    if (in_ranges(c, NUMBERS, COUNT(NUMBERS))) return NUMBER;
    return in_ranges(c, SPACES, COUNT(SPACES)) ? SPACE : OTHER;
}

bool tokenizer_is_space(const char *text, size_t bytes, size_t *length) {
    return in_ranges(character_at(text, bytes, length), SPACES, COUNT(SPACES));
}

// Returns the bytes of the characters of one kind that a text begins with, and of the last of them.
static size_t run_of(int kind, const char *text, size_t bytes, size_t *last) {
    size_t end = 0, length;
    while (end < bytes && kind_at(text + end, bytes - end, &length) == kind) {
        end += length;
        *last = length;
    }
    return end;
}

size_t tokenizer_word(const char *text, size_t bytes) {
    static const char *const ENDINGS[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (int i = 0; i < COUNT(ENDINGS); i++) {
        size_t length = strlen(ENDINGS[i]);
        if (bytes >= length && memcmp(text, ENDINGS[i], length) == 0) return length;
    }
    size_t length, last = 0, before = text[0] == ' ' && bytes > 1;
    int kind = kind_at(text + before, bytes - before, &length);
    if (kind != SPACE) return before + run_of(kind, text + before, bytes - before, &last);
    // Of several spaces the last one belongs to what follows.
    size_t spaces = run_of(SPACE, text, bytes, &last);
    return spaces < bytes && spaces > last ? spaces - last : spaces;
}

size_t tokenizer_find_added(const TokenizerRules *rules, const char *text, size_t bytes, int *which) {
    *which = -1;
    for (size_t at = 0; at < bytes && rules->num_added; at++) {
        for (int i = 0; i < rules->num_added; i++) {
            size_t length = strlen(rules->added[i].name);
            if (length > bytes - at || memcmp(text + at, rules->added[i].name, length) != 0) continue;
            *which = i;
            return at;
        }
    }
    return bytes;
}

bool tokenizer_is_composed(const char *text, size_t bytes) {
    for (size_t i = 0, length; i < bytes; i += length) {
        uint32_t c = character_at(text + i, bytes - i, &length);
        if (in_ranges(c, NOT_SURELY_NFC, COUNT(NOT_SURELY_NFC))) return false;
    }
    return true;
}

void tokenizer_byte_name(char name[3], unsigned char byte) {
    bool printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    // Bytes that aren't printable have the characters from U+0100 on, in their order.
    unsigned before = byte <= 0x20 ? byte : byte <= 0xA0 ? byte - 0x7F + 0x21u : 67;
    unsigned c = printable ? byte : 256 + before;
    if (c < 0x80) {
        snprintf(name, 3, "%c", (char)c);
    } else {
        snprintf(name, 3, "%c%c", (char)(0xC0 | c >> 6), (char)(0x80 | (c & 0x3F)));
    }
}
