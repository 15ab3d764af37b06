#!/usr/bin/env python3
"""Writes the tokenizer.json and tokenizer_config.json that are missing beside a tokenizer.bin: llm.c's,
an older data set's or an older checkpoint's. transformers' AutoTokenizer reads them.

Of NAME.bin they are NAME.json and NAME_config.json. tokenizer.bin lists tokens alone: a token's merge
is found from those before it, and text is supposed to be cut into words as GPT-2 cuts it.
"""

import json
from pathlib import Path

from prepare import Parser, run
from token_files import AtomicFiles, InputError, read_tokenizer
from tokenizer import byte_level_json, config_json


def main(arguments):
    parser = Parser(prog="tokenizer_json.py", description=__doc__)
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER.BIN", help="of a data set or of a checkpoint")
    path = parser.parse_args(arguments).tokenizer
    if path.suffix != ".bin":
        raise InputError(f"{path} isn't named .bin: name a tokenizer.bin")
    json_path, config_path = (path.with_name(path.stem + ending) for ending in (".json", "_config.json"))
    missing = [file for file in (json_path, config_path) if not file.exists()]
    if not missing:
        print(f"{json_path} and {config_path} are there already")
        return
    content = texts(path, json_path, config_path)
    with AtomicFiles(path.parent) as files:
        for file in missing:
            files.create(file.name).write(content[file].encode())
        files.commit()
    print(" and ".join(map(str, missing)) + " written")


def texts(path, json_path, config_path):
    """What the two files hold: tokenizer.json what it holds already, where it is there."""
    tokens, end_of_text = read_tokenizer(path)
    try:
        if json_path.exists():
            tokenizer_json = json_path.read_text(encoding="utf-8")
            if not isinstance(json.loads(tokenizer_json), dict):
                raise ValueError("tokenizer.json isn't an object")
        else:
            tokenizer_json = byte_level_json(tokens, end_of_text, merges(tokens, end_of_text, path))
        return {json_path: tokenizer_json, config_path: config_json(tokenizer_json, tokens[end_of_text].decode())}
    except ValueError as e:  # no UTF-8, or no JSON
        raise InputError(f"{path} or {json_path} is damaged ({e}): get a whole copy") from None


def merges(tokens, end_of_text, path):
    """The two tokens that each token but bytes and end-of-text is merged of, in the order of ids."""
    ids = {token: i for i, token in enumerate(tokens) if i != end_of_text}
    if len(ids) != len(tokens) - 1 or any(bytes([b]) not in ids for b in range(256)):
        raise InputError(f"{path} isn't a byte-level BPE's (a byte is missing, or a token is there twice): use another")
    pairs = [merged(token, ids) for token in ids if len(token) > 1]
    for pair in pairs:
        if len(pair) != 2:
            raise InputError(
                f"{path}: token {b''.join(pair)!r} isn't made of two tokens with lower ids, so it isn't a byte-level "
                "BPE in the order of its merges: get the tokenizer.json where the tokenizer comes from"
            )
    return pairs


def merged(token, ids):
    """What the token's bytes become by the merges that come before its own."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 1:
        joined = [ids.get(a + b, len(ids) + 1) for a, b in zip(parts, parts[1:])]
        first = min(joined)
        if first >= ids[token]:
            break
        at = joined.index(first)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


if __name__ == "__main__":
    run(main)
