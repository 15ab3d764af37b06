#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include "llmc/files/json.h" // utf8_sequence

enum {
    HEADER_WORDS = 256,
    HEADER_BYTES = HEADER_WORDS * 4,
    GPT2_END_OF_TEXT = 50256, // what version 1 leaves unsaid
    MAX_FILE_BYTES = 1 << 28,
    NO_TOKEN = -1
};

static const char *const json_endings[NUM_TOKENIZER_JSONS] = {".json", "_config.json"};

// Opening

// Compares tokens' bytes as memcmp does, a prefix before what it begins.
static int compare_texts(const void *a, const void *b) {
    const Token *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->bytes < y->bytes ? x->bytes : y->bytes);
    return order ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int compare_tokens(const void *a, const void *b) {
    int order = compare_texts(a, b);
    return order ? order : ((const Token *)a)->id - ((const Token *)b)->id;
}

// Fills `sorted` with every token but end-of-text; of those with the same bytes, the one with the
// lowest id.
static void sort_tokens(Tokenizer *tokenizer) {
    Token *sorted = allocate((size_t)tokenizer->vocab_size * sizeof(*sorted));
    int count = 0, kept = 0;
    for (int id = 0; id < tokenizer->vocab_size; id++) {
        if (id != tokenizer->end_of_text) sorted[count++] = tokenizer->tokens[id];
    }
    qsort(sorted, (size_t)count, sizeof(*sorted), compare_tokens);
    for (int i = 0; i < count; i++) {
        if (kept == 0 || compare_texts(&sorted[i], &sorted[kept - 1]) != 0) sorted[kept++] = sorted[i];
    }
    tokenizer->sorted = sorted;
    tokenizer->num_sorted = kept;
}

// Reads the tokens, each after its length in so many bytes.
static bool parse_tokens(Tokenizer *tokenizer, size_t width, const char *path, Error *error) {
    size_t offset = HEADER_BYTES;
    for (int id = 0; id < tokenizer->vocab_size; id++) {
        uint16_t length = 0;
        size_t left = tokenizer->file_bytes - offset;
        if (left >= width) memcpy(&length, tokenizer->file + offset, width);
        if (left < width + length || length == 0) {
            return error_set(error, "%s: token %d of %d %s: the file is damaged; write it again with data/prepare.py",
                             path, id, tokenizer->vocab_size, left < width + length ? "is cut short" : "is empty");
        }
        tokenizer->tokens[id] = (Token){tokenizer->file + offset + width, length, id};
        if (length > tokenizer->longest) tokenizer->longest = length;
        offset += width + length;
    }
    if (offset != tokenizer->file_bytes) {
        return error_set(
            error, "%s has %zu bytes after its last token: the file is damaged; write it again with data/prepare.py",
            path, tokenizer->file_bytes - offset);
    }
    return true;
}

// Makes a tokenizer of `file`, which it comes to own.
static bool parse(Tokenizer *tokenizer, char *file, size_t file_bytes, const char *path, Error *error) {
    *tokenizer = (Tokenizer){.file = file, .file_bytes = file_bytes};
    uint32_t header[HEADER_WORDS] = {0};
    if (file_bytes >= HEADER_BYTES) memcpy(header, file, HEADER_BYTES);
    if (header[0] != TOKENIZER_MAGIC || header[1] < 1 || header[1] > 3) {
        return error_set(error,
                         "%s is not a tokenizer file of version 1 to 3: name the tokenizer.bin that data/prepare.py "
                         "wrote beside the token files",
                         path);
    }
    uint32_t vocab_size = header[2], end_of_text = header[1] == 1 ? GPT2_END_OF_TEXT : header[3];
    if (vocab_size == 0 || vocab_size > (file_bytes - HEADER_BYTES) / 2 || end_of_text >= vocab_size) {
        return error_set(error,
                         "%s claims %u tokens and end-of-text %u, which doesn't fit its %zu bytes: the file is "
                         "damaged; write it again with data/prepare.py",
                         path, vocab_size, end_of_text, file_bytes);
    }
    tokenizer->vocab_size = (int)vocab_size;
    tokenizer->end_of_text = (int)end_of_text;
    tokenizer->tokens = allocate(vocab_size * sizeof(*tokenizer->tokens));
    if (!parse_tokens(tokenizer, header[1] == 3 ? 2 : 1, path, error)) return false;
    sort_tokens(tokenizer);
    return true;
}

// Returns the name of a json beside the tokenizer file: its ending in the place of ".bin". To be
// freed.
static char *json_path(const char *path, int index) {
    size_t length = strlen(path);
    if (length >= 4 && strcmp(path + length - 4, ".bin") == 0) length -= 4;
    return format_string("%.*s%s", (int)length, path, json_endings[index]);
}

static bool read_jsons(Tokenizer *tokenizer, const char *path, Error *error) {
    bool ok = true;
    for (int i = 0; ok && i < NUM_TOKENIZER_JSONS; i++) {
        char *name = json_path(path, i);
        if (path_exists(name)) {
            tokenizer->jsons[i].text = read_file(name, MAX_FILE_BYTES, &tokenizer->jsons[i].bytes, error);
            ok = tokenizer->jsons[i].text != NULL;
        }
        free(name);
    }
    return ok;
}

// Finds the token that each byte begins as: by GPT-2's names, or by SentencePiece's <0x0A>.
static void find_bytes(Tokenizer *tokenizer) {
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        if (tokenizer->rules.spells_bytes) tokenizer_byte_name(name, (unsigned char)byte);
        if (!tokenizer->rules.spells_bytes) snprintf(name, sizeof(name), "<0x%02X>", byte);
        tokenizer->byte_ids[byte] = tokenizer_rules_find(&tokenizer->rules, name);
    }
}

static void read_rules(Tokenizer *tokenizer) {
    if (!tokenizer->jsons[0].text) return;
    tokenizer_rules_read(&tokenizer->rules, tokenizer->jsons[0].text, tokenizer->jsons[0].bytes, tokenizer->vocab_size);
    find_bytes(tokenizer);
}

bool tokenizer_open(Tokenizer *tokenizer, const char *path, Error *error) {
    *tokenizer = (Tokenizer){0};
    size_t bytes;
    char *file = read_file(path, MAX_FILE_BYTES, &bytes, error);
    if (!file) return false;
    bool ok = parse(tokenizer, file, bytes, path, error) && read_jsons(tokenizer, path, error);
    if (ok) read_rules(tokenizer);
    if (!ok) tokenizer_close(tokenizer);
    return ok;
}

void tokenizer_close(Tokenizer *tokenizer) {
    free(tokenizer->file);
    for (int i = 0; i < NUM_TOKENIZER_JSONS; i++) {
        free(tokenizer->jsons[i].text);
    }
    free(tokenizer->tokens);
    free(tokenizer->sorted);
    tokenizer_rules_free(&tokenizer->rules);
    *tokenizer = (Tokenizer){0};
}

bool tokenizer_has_jsons(const Tokenizer *tokenizer) {
    for (int i = 0; i < NUM_TOKENIZER_JSONS; i++) {
        if (!tokenizer->jsons[i].text) return false;
    }
    return true;
}

void tokenizer_take_jsons(Tokenizer *to, Tokenizer *from) {
    for (int i = 0; i < NUM_TOKENIZER_JSONS; i++) {
        if (to->jsons[i].text) continue;
        to->jsons[i] = from->jsons[i];
        from->jsons[i].text = NULL;
    }
    if (!to->rules.json) read_rules(to);
}

bool tokenizer_save(const Tokenizer *tokenizer, const char *path, Error *error) {
    bool ok = write_file_atomic(path, tokenizer->file, tokenizer->file_bytes, error);
    for (int i = 0; ok && i < NUM_TOKENIZER_JSONS; i++) {
        if (!tokenizer->jsons[i].text) continue;
        char *name = json_path(path, i);
        ok = write_file_atomic(name, tokenizer->jsons[i].text, tokenizer->jsons[i].bytes, error);
        free(name);
    }
    return ok;
}

// Decoding and encoding

const char *tokenizer_decode(const Tokenizer *tokenizer, int id, int *length) {
    bool known = id >= 0 && id < tokenizer->vocab_size;
    *length = known ? (int)tokenizer->tokens[id].bytes : 0;
    return known ? tokenizer->tokens[id].text : NULL;
}

// Returns the token made of exactly these bytes, or NO_TOKEN.
static int32_t find_token(const Tokenizer *tokenizer, const char *text, size_t bytes) {
    const Token key = {.text = text, .bytes = bytes};
    const Token *found =
        bsearch(&key, tokenizer->sorted, (size_t)tokenizer->num_sorted, sizeof(*tokenizer->sorted), compare_texts);
    return found ? found->id : NO_TOKEN;
}

// Text cut into pieces, each a token: a list of those that are left, linked by the position of
// their first byte.
typedef struct {
    const Tokenizer *tokenizer;
    const char *text;
    int bytes;
    int *next;     // (bytes) where the following piece begins; `bytes` after the last
    int *previous; // (bytes) where the preceding piece begins; -1 before the first
    int32_t *ids;  // (bytes) the piece's token; NO_TOKEN where no piece begins any more
    // A binary heap of merges that were possible when they were put in, the lowest (rank,
    // position) on top.
    struct Merge {
        int32_t rank, id;     // which merge it is, and the token that it makes
        int position, length; // of both pieces together
    } * heap;
    int heap_count;
} Pieces;

static bool merge_before(struct Merge a, struct Merge b) {
    return a.rank != b.rank ? a.rank < b.rank : a.position < b.position;
}

static void heap_push(Pieces *pieces, struct Merge merge) {
    int i = pieces->heap_count++;
    for (; i > 0 && merge_before(merge, pieces->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        pieces->heap[i] = pieces->heap[(i - 1) / 2];
    }
    pieces->heap[i] = merge;
}

static struct Merge heap_pop(Pieces *pieces) {
    struct Merge top = pieces->heap[0], last = pieces->heap[--pieces->heap_count];
    int i = 0;
    for (int child = 1; child < pieces->heap_count; child = 2 * i + 1) {
        if (child + 1 < pieces->heap_count && merge_before(pieces->heap[child + 1], pieces->heap[child])) child++;
        if (!merge_before(pieces->heap[child], last)) break;
        pieces->heap[i] = pieces->heap[child];
        i = child;
    }
    pieces->heap[i] = last;
    return top;
}

// Finds the token that two pieces, `length` bytes together, become, and how early: without rules
// tokens come in the order of their merges. Returns false where they become none.
static bool find_merge(const Pieces *pieces, struct Merge *merge) {
    const Tokenizer *tokenizer = pieces->tokenizer;
    const TokenizerRules *rules = &tokenizer->rules;
    if (!rules->json) {
        merge->rank = merge->id = find_token(tokenizer, pieces->text + merge->position, (size_t)merge->length);
        return merge->id != NO_TOKEN;
    }
    int second = pieces->next[merge->position];
    const TokenMerge *found = tokenizer_rules_merge(rules, pieces->ids[merge->position], pieces->ids[second]);
    if (!found) return false;
    merge->rank = found->rank;
    merge->id = found->id;
    return true;
}

// Puts the merge of the piece at `position` with its successor into the heap, if it makes a token.
static void offer_merge(Pieces *pieces, int position) {
    if (position < 0 || pieces->next[position] == pieces->bytes) return;
    struct Merge merge = {.position = position, .length = pieces->next[pieces->next[position]] - position};
    if (find_merge(pieces, &merge)) heap_push(pieces, merge);
}

// Merges two pieces, unless one of them has changed since the merge was offered.
static void apply_merge(Pieces *pieces, struct Merge merge) {
    int first = merge.position, second = pieces->next[first];
    if (pieces->ids[first] == NO_TOKEN || second == pieces->bytes) return;
    if (pieces->next[second] - first != merge.length) return;
    pieces->ids[first] = merge.id;
    pieces->ids[second] = NO_TOKEN;
    pieces->next[first] = pieces->next[second];
    if (pieces->next[first] < pieces->bytes) pieces->previous[pieces->next[first]] = first;
    offer_merge(pieces, pieces->previous[first]);
    offer_merge(pieces, first);
}

// Makes a piece of the bytes from `position` on.
static void add_piece(Pieces *pieces, int position, int length, int32_t id) {
    pieces->ids[position] = id;
    pieces->next[position] = position + length;
    if (position + length < pieces->bytes) pieces->previous[position + length] = position;
}

// Returns the token that a character, or where it is none a byte, begins as, and its bytes.
static int32_t first_token(const Pieces *pieces, int position, int *length) {
    const Tokenizer *tokenizer = pieces->tokenizer;
    const char *text = pieces->text + position;
    *length = 1;
    if (!tokenizer->rules.json) return find_token(tokenizer, text, 1);
    int whole = utf8_sequence(text, (size_t)(pieces->bytes - position));
    char name[5] = "";
    if (tokenizer->rules.marks_spaces && whole) memcpy(name, text, (size_t)whole);
    int32_t id = name[0] ? tokenizer_rules_find(&tokenizer->rules, name) : NO_TOKEN;
    if (id != NO_TOKEN) *length = whole;
    return id != NO_TOKEN ? id : tokenizer->byte_ids[(unsigned char)*text];
}

// Cuts the text into what merging begins with. Returns false where a byte has no token.
static bool split_text(Pieces *pieces) {
    if (pieces->bytes > 0) pieces->previous[0] = -1;
    for (int i = 0; i < pieces->bytes; i++) {
        pieces->ids[i] = NO_TOKEN;
    }
    for (int i = 0, length; i < pieces->bytes; i += length) {
        int32_t id = first_token(pieces, i, &length);
        if (id == NO_TOKEN) return false;
        add_piece(pieces, i, length, id);
    }
    return true;
}

static int collect_ids(const Pieces *pieces, int32_t *ids) {
    int count = 0;
    for (int i = 0; i < pieces->bytes; i = pieces->next[i]) {
        ids[count++] = pieces->ids[i];
    }
    return count;
}

// Converts a word, or a text that isn't cut into words, to at most `bytes` ids. Returns their
// number, or -1.
static int encode_word(const Tokenizer *tokenizer, const char *text, size_t bytes, int32_t *ids) {
    Pieces pieces = {.tokenizer = tokenizer, .text = text, .bytes = (int)bytes};
    pieces.next = allocate(bytes * sizeof(*pieces.next));
    pieces.previous = allocate(bytes * sizeof(*pieces.previous));
    pieces.ids = allocate(bytes * sizeof(*pieces.ids));
    // One offer a pair of bytes, and two more for each of fewer than `bytes` merges.
    pieces.heap = allocate(3 * bytes * sizeof(*pieces.heap));
    int count = -1;
    if (split_text(&pieces)) {
        for (int i = 0; i < pieces.bytes; i = pieces.next[i]) {
            offer_merge(&pieces, i);
        }
        while (pieces.heap_count > 0) {
            apply_merge(&pieces, heap_pop(&pieces));
        }
        count = collect_ids(&pieces, ids);
    }
    free(pieces.next);
    free(pieces.previous);
    free(pieces.ids);
    free(pieces.heap);
    return count;
}

// Converts a text without added tokens. Returns the number of ids, or -1.
static int encode_words(const Tokenizer *tokenizer, const char *text, size_t bytes, int32_t *ids) {
    int total = 0;
    for (size_t at = 0, length; at < bytes; at += length) {
        length = tokenizer->rules.cuts_words ? tokenizer_word(text + at, bytes - at) : bytes;
        int count = encode_word(tokenizer, text + at, length, ids + total);
        if (count < 0) return -1;
        total += count;
    }
    return total;
}

// The same with a mark before the text, and one for each space. Returns the number of ids, or -1.
static int encode_marked(const Tokenizer *tokenizer, const char *text, size_t bytes, int32_t *ids) {
    static const char MARK[] = "\xE2\x96\x81";
    char *marked = allocate(3 * (bytes + 1)), *end = marked;
    if (bytes > 0) end = (char *)memcpy(end, MARK, 3) + 3;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == ' ') end = (char *)memcpy(end, MARK, 3) + 3;
        if (text[i] != ' ') *end++ = text[i];
    }
    int32_t *all = allocate((size_t)(end - marked) * sizeof(*all));
    int count = encode_words(tokenizer, marked, (size_t)(end - marked), all);
    if (count > 0) memcpy(ids, all, (size_t)count * sizeof(*ids));
    free(all);
    free(marked);
    return count;
}

int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t bytes, int32_t *ids) {
    const TokenizerRules *rules = &tokenizer->rules;
    if (bytes > INT32_MAX / 4) return -1;
    if (bytes > 0 && (rules->unsupported[0] || (rules->composed && !tokenizer_is_composed(text, bytes)))) return -1;
    int total = 0, which;
    for (size_t at = 0; at < bytes;) {
        size_t length = tokenizer_find_added(rules, text + at, bytes - at, &which);
        int count = (rules->marks_spaces ? encode_marked : encode_words)(tokenizer, text + at, length, ids + total);
        if (count < 0) return -1;
        total += count;
        at += length;
        if (which < 0) continue;
        ids[total++] = rules->added[which].id;
        at += strlen(rules->added[which].name);
    }
    return total;
}

const char *tokenizer_why_not(const Tokenizer *tokenizer) {
    const TokenizerRules *rules = &tokenizer->rules;
    static char why[512];
    if (rules->unsupported[0]) {
        snprintf(why, sizeof(why),
                 "tokenizer.json has %s, by which this program can't encode any text: leave --prompt and "
                 "--eval-requests out, and give checkpoints to transformers and lm-eval for samples and scores",
                 rules->unsupported);
        return why;
    }
    return rules->composed
               ? "the tokenizer has no token for a character of it, or the text has characters that combine "
                 "and may not be in Unicode's form NFC, into which this program can't bring them: leave these out"
               : "the tokenizer has no token for a character of it: leave that out";
}

// Printing

void token_print_safe(FILE *stream, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes;) {
        unsigned char c = (unsigned char)text[i];
        int length = utf8_sequence(text + i, bytes - i);
        // U+0080 to U+009F are control characters too, and terminals obey them.
        bool control = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7F ||
                       (c == 0xC2 && length == 2 && (unsigned char)text[i + 1] < 0xA0);
        size_t step = length ? (size_t)length : 1;
        for (size_t j = 0; j < step; j++) {
            fprintf(stream, control || length == 0 ? "\\x%02X" : "%c", (unsigned char)text[i + j]);
        }
        i += step;
    }
}
