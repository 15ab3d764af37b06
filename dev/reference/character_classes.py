"""Writes llmc/data/characters.h: which characters tokenizers' regular expressions take for letters, numbers and spaces, by the
tokenizers library itself; and which may be no part of a text in Unicode's form NFC, by Python's unicodedata.

    python dev/reference/character_classes.py > llmc/data/characters.h
"""

import unicodedata

from tokenizers import Regex, pre_tokenizers

POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CLASSES = {"LETTERS": r"\p{L}", "NUMBERS": r"\p{N}", "SPACES": r"\s"}


def members(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    text = "\x01".join(map(chr, POINTS))  # U+0001 is in none of them
    return {ord(piece) for piece, _ in split.pre_tokenize_str(text) if len(piece) == 1 and piece != "\x01"}


def not_surely_composed():
    """Characters that NFC changes, or that may combine with, or change places with, one before them."""
    pairs = [unicodedata.decomposition(chr(c)).split() for c in POINTS]
    second = {int(pair[1], 16) for pair in pairs if len(pair) == 2 and not pair[0].startswith("<")}
    jamo = {*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)}
    return {c for c in POINTS if not unicodedata.is_normalized("NFC", chr(c)) or unicodedata.combining(chr(c))} | second | jamo


def write(name, words, points):
    ranges = []
    for c in sorted(points):
        if ranges and ranges[-1][1] == c - 1:
            ranges[-1][1] = c
        else:
            ranges.append([c, c])
    print(f"\n// {words}\nstatic const uint32_t {name}[][2] = {{")
    line = "   "
    for first, last in ranges:
        cell = f" {{{first:#x}, {last:#x}}},"
        if len(line + cell) > 118:
            print(line)
            line = "   "
        line += cell
    print(f"{line}}};")


print("// Written by dev/reference/character_classes.py: the first and the last code point of each range.\n")
print("// clang-format off\n#pragma once\n\n#include <stdint.h>")
for name, pattern in CLASSES.items():
    write(name, pattern, members(pattern))
write("NOT_SURELY_NFC", "what NFC changes, and what may combine with a character before it", not_surely_composed())
