"""The files a data set is made of: token shards (train_*.bin, val_*.bin) and tokenizer.bin, in llm.c's formats.

README.md in this directory describes both byte by byte. Everything is written under temporary names and renamed when
all of it is on the disk: a reader never sees half a data set.
"""

import contextlib
import errno
import os
from pathlib import Path

import numpy as np
from locks import is_taken

HEADER_INTS = 256
TOKENS_UINT16 = (20240520, 1)  # magic, version
TOKENS_UINT32 = (20240801, 7)
TOKENIZER = (20240328, 2)
# llm.c's first one doesn't say the id of end-of-text, which is GPT-2's; the third is ours, for long tokens
TOKENIZERS = ((20240328, 1), TOKENIZER, (20240328, 3))
GPT2_END_OF_TEXT = 50256
END_OF_TEXT = "<|endoftext|>"
MAX_TOKEN_BYTES = 65535  # a token's length is stored in one byte, in version 3 in two
MAX_SHARD_TOKENS = 2**31 - 1  # readers keep the header's count in a signed 32-bit integer


class InputError(Exception):
    """What a user can cause: one sentence that names the thing and the remedy."""


def header_bytes(magic, version, *values):
    header = np.zeros(HEADER_INTS, "<u4")
    header[: 2 + len(values)] = (magic, version, *values)
    return header.tobytes()


class AtomicFiles:
    """Files of one directory that appear together at commit(), or, on any exception before it, not at all. Only one program at
    a time writes into it so."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.is_new = not self.directory.exists()
        self.files = {}  # final path -> open temporary file

    def __enter__(self):
        self.directory.mkdir(parents=True, exist_ok=True)
        self.opened = os.open(self.directory, os.O_RDONLY)
        if is_taken(self.opened):
            os.close(self.opened)
            raise InputError(f"another program is writing into {self.directory}: wait for it, stop it, or choose another directory")
        return self

    def __exit__(self, kind, exception, traceback):
        for file in self.files.values():
            Path(file.name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what a full disk still has to say
                file.close()
        if exception and self.is_new:
            with contextlib.suppress(OSError):  # someone else's file is in it
                self.directory.rmdir()
        os.close(self.opened)
        if isinstance(exception, OSError) and exception.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"no space left for {self.directory}: free some, or choose another --out-dir") from None

    def create(self, name):
        file = open(self.directory / f".{name}.tmp", "wb")
        self.files[self.directory / name] = file
        return file

    def commit(self):
        for file in self.files.values():
            if not file.closed:
                sync_and_close(file)
        for path, file in self.files.items():
            os.replace(file.name, path)
        self.files.clear()
        os.fsync(self.opened)


def sync_and_close(file):
    file.flush()
    os.fsync(file.fileno())
    file.close()


class ShardWriter:
    """Appends tokens to PREFIX_000000.bin, PREFIX_000001.bin, ... of `shard_tokens` each; the last may be shorter."""

    def __init__(self, files, prefix, vocab_size, shard_tokens):
        self.files, self.prefix, self.shard_tokens = files, prefix, shard_tokens
        wide = vocab_size > 2**16
        self.dtype = np.dtype("<u4" if wide else "<u2")
        self.magic = TOKENS_UINT32 if wide else TOKENS_UINT16
        self.shard = None
        self.shard_count = 0
        self.in_shard = 0
        self.num_tokens = 0

    def append(self, tokens):
        tokens = np.asarray(tokens, self.dtype)
        while tokens.size:
            if self.shard is None:
                self.shard = self.files.create(f"{self.prefix}_{self.shard_count:06d}.bin")
                self.shard.write(bytes(4 * HEADER_INTS))  # the count is known when the shard is closed
                self.shard_count += 1
            part = tokens[: self.shard_tokens - self.in_shard]
            self.shard.write(part.tobytes())
            self.in_shard += part.size
            self.num_tokens += part.size
            tokens = tokens[part.size :]
            if self.in_shard == self.shard_tokens:
                self.close()

    def close(self):
        if self.shard is None:
            return
        self.shard.seek(0)
        self.shard.write(header_bytes(*self.magic, self.in_shard))
        sync_and_close(self.shard)
        self.shard, self.in_shard = None, 0


def read_tokenizer(path):
    """The tokens' bytes in the order of ids, and the id of end-of-text, of a tokenizer.bin."""
    data = Path(path).read_bytes()
    magic, version, vocab_size, end_of_text = np.frombuffer(data[:16].ljust(16, b"\0"), "<u4").tolist()
    if (magic, version) not in TOKENIZERS:
        raise InputError(f"{path} isn't a tokenizer.bin of version 1 to 3: name the one beside the token files")
    tokens, position, width = [], 4 * HEADER_INTS, 2 if version == 3 else 1
    while position < len(data):
        end = position + width + int.from_bytes(data[position : position + width], "little")
        tokens.append(data[position + width : end])
        position = end
    end_of_text = GPT2_END_OF_TEXT if version == 1 else end_of_text
    if len(tokens) != vocab_size or position != len(data) or end_of_text >= vocab_size:
        raise InputError(f"{path} is damaged (its {vocab_size} tokens don't fit its size): get a whole copy")
    return tokens, end_of_text


def tokenizer_bytes(tokens, end_of_text):
    """tokenizer.bin from each token's bytes, in the order of ids: llm.c's version 2 unless a token is too long for it."""
    width = 1 if max(map(len, tokens)) <= 255 else 2
    parts = [header_bytes(TOKENIZER[0], 1 + width, len(tokens), end_of_text)]
    for token_id, token in enumerate(tokens):
        if not 1 <= len(token) <= MAX_TOKEN_BYTES:
            raise InputError(
                f"token {token_id} has {len(token)} bytes where tokenizer.bin can hold 1 to {MAX_TOKEN_BYTES}: "
                "use a tokenizer with shorter tokens"
            )
        parts += [len(token).to_bytes(width, "little"), token]
    return b"".join(parts)
