"""data/: token files read back with a reader of this file's own, tokenizers, splits, and what bad input is answered."""

import bz2
import gzip
import hashlib
import http.client
import io
import json
import lzma
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import urllib.error
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from trainer import ENVIRONMENT, SLOWNESS, TRAINER, gpt2_like_merges

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA))

import demo_corpus  # noqa: E402
import documents  # noqa: E402
import download  # noqa: E402
import fineweb  # noqa: E402
import debian_docs  # noqa: E402
import linux_corpus  # noqa: E402
import prepare  # noqa: E402
import tinyshakespeare  # noqa: E402
import tinystories  # noqa: E402
import tokenizer_json  # noqa: E402
import token_files  # noqa: E402
from token_files import AtomicFiles, InputError, ShardWriter, tokenizer_bytes  # noqa: E402

STORY = "It was the best of times,\nit was the worst of times;\n\n\tçà et là — 東京 \U0001f600\r\n"
TOKENIZER_FILES = ["tokenizer.bin", "tokenizer.json", "tokenizer_config.json"]


def read_shard(path):
    """Tokens and their width in bytes, by the format's description alone."""
    data = Path(path).read_bytes()
    magic, version, count = struct.unpack_from("<3I", data)
    width = {(20240520, 1): 2, (20240801, 7): 4}[magic, version]
    assert data[12:1024] == bytes(1012)
    assert len(data) == 1024 + count * width
    return list(struct.unpack_from(f"<{count}{'H' if width == 2 else 'I'}", data, 1024)), width


def read_split(out_dir, split):
    return [token for shard in sorted(Path(out_dir).glob(f"{split}_*.bin")) for token in read_shard(shard)[0]]


def read_tokenizer(path):
    data = Path(path).read_bytes()
    magic, version, vocab_size, end_of_text = struct.unpack_from("<4I", data)
    assert (magic, version) == (20240328, 2)
    tokens, position = [], 1024
    for _ in range(vocab_size):
        length = data[position]
        tokens.append(data[position + 1 : position + 1 + length])
        position += 1 + length
    assert position == len(data)
    return tokens, end_of_text


def decoded_documents(out_dir, split):
    tokens, end_of_text = read_tokenizer(Path(out_dir) / "tokenizer.bin")
    ids = read_split(out_dir, split)
    assert not ids or ids[0] == end_of_text
    return b"".join(b"\0EOT\0" if i == end_of_text else tokens[i] for i in ids).decode().split("\0EOT\0")[1:]


def run_prepare(tmp_path, *arguments, name="out"):
    out = tmp_path / name
    prepare.main([*map(str, arguments), "--out-dir", str(out)])
    return out


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_jsonl(path, texts, field="text"):
    return write(path, "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))


def bad_input(tmp_path, *arguments):
    """The sentence of prepare.main for bad input."""
    with pytest.raises(InputError) as caught:
        run_prepare(tmp_path, *arguments)
    out = tmp_path / "out"
    assert not out.is_dir() or not list(out.iterdir())
    return str(caught.value)


# token files


def test_byte_round_trip_and_tokenizer_bin(tmp_path):
    book = write(tmp_path / "book.txt", STORY)
    out = run_prepare(tmp_path, "--input", book, "--val-fraction", 0)
    ids, width = read_shard(out / "train_000000.bin")
    assert width == 2
    assert ids == [256, *STORY.encode()]
    tokens, end_of_text = read_tokenizer(out / "tokenizer.bin")
    assert end_of_text == 256
    assert tokens == [bytes([b]) for b in range(256)] + [b"<|endoftext|>"]
    assert sorted(p.name for p in out.iterdir()) == [*TOKENIZER_FILES, "train_000000.bin"]


def test_many_shards_hold_one_unbroken_stream(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    book = write(tmp_path / "book.md", text)
    out = run_prepare(tmp_path, "--input", book, "--val-fraction", 0, "--shard-tokens", 1000)
    shards = sorted(out.glob("train_*.bin"))
    counts = [len(read_shard(shard)[0]) for shard in shards]
    total = 1 + len(text)
    assert counts == [1000] * (total // 1000) + [total % 1000]
    assert shards[3].name == "train_000003.bin"
    assert read_split(out, "train") == [256, *text.encode()]


@pytest.mark.parametrize("most", [1, 9, 10, 11, 40, 2047, 10**6])
def test_max_tokens_stops_there(tmp_path, most):
    """What is written is the beginning of what is written without it; validation documents on the way are kept."""
    texts = [f"text {i:4d}" for i in range(300)]  # ten tokens each, with the one that begins a document
    documents = write_jsonl(tmp_path / "d.jsonl", texts)
    arguments = ["--input", documents, "--val-fraction", 0.1]
    whole, part = run_prepare(tmp_path, *arguments), run_prepare(tmp_path, *arguments, "--max-tokens", most, name="part")
    train, val = (read_split(whole, split) for split in ("train", "val"))
    assert read_split(part, "train") == train[:most]
    before = 10 * ((most - 1) // 90) if most <= len(train) else len(val)  # after each 9 for training one for validation
    assert (read_split(part, "val") if list(part.glob("val_*.bin")) else []) == val[:before]


def test_max_tokens_leave_the_tail_of_a_document_whole(tmp_path):
    book = write(tmp_path / "a.txt", "a line\n" * 100)
    whole = run_prepare(tmp_path, "--input", book, "--val-fraction", 0.1)
    part = run_prepare(tmp_path, "--input", book, "--val-fraction", 0.1, "--max-tokens", 50, name="part")
    assert decoded_documents(part, "val") == decoded_documents(whole, "val") == ["a line\n" * 9]
    assert len(read_shard(part / "train_000000.bin")[0]) == 50


def test_max_tokens_leave_validation_files_whole(tmp_path):
    train, val = write(tmp_path / "train.txt", STORY), write(tmp_path / "val.txt", STORY)
    out = run_prepare(tmp_path, "--input", train, "--val-input", val, "--max-tokens", 5)
    assert len(read_split(out, "train")) == 5 and read_split(out, "val") == [256, *STORY.encode()]


@pytest.mark.parametrize("option", ["--max-tokens", "--shard-tokens"])
@pytest.mark.parametrize("wrong", ["0", "-1", "many", "1.5", "10 M", "20m", "1.2345k", "0.1", "M", "1e9M", ""])
def test_wrong_numbers_of_tokens_are_refused(tmp_path, option, wrong):
    book = write(tmp_path / "book.txt", STORY)
    assert bad_input(tmp_path, "--input", book, f"{option}={wrong}") == (
        f"{option} {wrong}: give a number of tokens, such as 100M (k or K: thousand, M: million, G or B: billion)")


def test_units_of_numbers_of_tokens(tmp_path):
    written = ("7", "7K", "7k", "7M", "7G", "7B", "7T", "1.5M", "1.000k", "2e3", "1.5E2", "+7000e-3")
    assert [prepare.token_count("", text) for text in written] == [
        7, 7000, 7000, 7 * 10**6, 7 * 10**9, 7 * 10**9, 7 * 10**12, 1_500_000, 1000, 2000, 150, 7]
    book = write(tmp_path / "book.txt", "x" * 3000)
    out = run_prepare(tmp_path, "--input", book, "--val-fraction", 0, "--shard-tokens", "1K", "--max-tokens", "2K")
    assert [len(read_shard(shard)[0]) for shard in sorted(out.glob("train_*.bin"))] == [1000, 1000]


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_width_follows_the_vocabulary(tmp_path, vocab_size, width):
    ids = [0, 1, vocab_size - 1, 65535]
    with AtomicFiles(tmp_path) as files:
        writer = ShardWriter(files, "train", vocab_size, 3)
        writer.append(np.array(ids))
        writer.close()
        files.commit()
    assert [read_shard(p) for p in sorted(tmp_path.glob("*.bin"))] == [(ids[:3], width), (ids[3:], width)]


def test_exact_multiple_of_the_shard_leaves_no_empty_shard(tmp_path):
    book = write(tmp_path / "a.txt", "x" * 99)
    out = run_prepare(tmp_path, "--input", book, "--val-fraction", 0, "--shard-tokens", 50)
    assert [len(read_shard(p)[0]) for p in sorted(out.glob("train_*"))] == [50, 50]


def test_a_failure_leaves_nothing(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for directory in (there, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt), AtomicFiles(directory) as files:
            ShardWriter(files, "train", 257, 2).append([1, 2, 3])
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [there] and list(there.iterdir()) == []


def test_tokens_over_255_bytes(tmp_path):
    """They make a file of version 3, whose lengths have two bytes."""
    assert tokenizer_bytes([b"a" * 255], 0)[1024] == 255
    tokens = [b"a" * 256, b"b", b"c" * 65535]
    data = tokenizer_bytes(tokens, 1)
    assert np.frombuffer(data[:16], "<u4").tolist() == [20240328, 3, 3, 1] and data[1024:1027] == b"\x00\x01a"
    assert token_files.read_tokenizer(write(tmp_path / "tokenizer.bin", data)) == (tokens, 1)
    with pytest.raises(InputError, match="65536 bytes"):
        tokenizer_bytes([b"a" * 65536], 0)


# inputs


def test_json_lines_are_a_document_a_line(tmp_path):
    texts = ["one", "", STORY, "  ", "a <|endoftext|> b", "half a pair: \ud83d."]
    file = write_jsonl(tmp_path / "a.jsonl", texts, "content")
    out = run_prepare(tmp_path, "--input", file, "--text-field", "content", "--val-fraction", 0)
    assert decoded_documents(out, "train") == ["one", STORY, "a <|endoftext|> b", "half a pair: \ufffd."]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_json_lines_by_their_names(tmp_path, name):
    file = write(tmp_path / name, "\n" + write_jsonl(tmp_path / "lines", ["one", "two"]).read_text())
    out = run_prepare(tmp_path, "--input", file, "--val-fraction", 0)
    assert decoded_documents(out, "train") == ["one", "two"]


@pytest.mark.parametrize("content", ['[{"text": "one"}]\n', '{\n  "text": "one"\n}\n', '[\n{"text": "one"}\n]', "one\n", ""])
def test_json_that_is_not_json_lines_is_refused(tmp_path, content):
    file = write(tmp_path / "a.json", content)
    for path in (file, tmp_path / "*.json"):
        sentence = bad_input(tmp_path, "--input", path)
        assert f"{file} is not JSON lines" in sentence and f"jq -c '.[]' {file} > {file.with_suffix('.jsonl')}" in sentence
    # A directory may be a project's: there it is text.
    write(tmp_path / "in/a.json", content or " ")
    write(tmp_path / "in/b.c", "int x;\n")
    out = run_prepare(tmp_path, "--input", tmp_path / "in", "--val-fraction", 0)
    assert decoded_documents(out, "train") == [*filter(None, [content]), "int x;\n"]


def test_an_array_on_one_line_is_not_read_to_be_refused(tmp_path):
    file = write(tmp_path / "a.json", "[" + '{"text": "words"},' * 500_000 + "{}]")
    tracemalloc.start()
    assert "is not JSON lines" in bad_input(tmp_path, "--input", file)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{most} of {file.stat().st_size} bytes")
    assert most < file.stat().st_size / 2


def test_json_lines_in_a_directory(tmp_path, capsys):
    """Not a .json file, which is a project's more often, unless it is named; it is said where it may have been meant."""
    english, package = '{"text": "Hello", "button": "OK"}\n', '{"type": "module"}\n'
    write(tmp_path / "in/english.json", english)
    write(tmp_path / "in/package.json", package)
    write_jsonl(tmp_path / "in/z.ndjson", ["three"])
    run_prepare(tmp_path, "--input", tmp_path / "in", "--val-fraction", 0)
    said = capsys.readouterr().out
    assert "english.json is read as text" in said and "package.json" not in said
    assert decoded_documents(tmp_path / "out", "train") == [english, package, "three"]
    out = run_prepare(tmp_path, "--input", tmp_path / "in/e*.json", "--val-fraction", 0, name="out2")
    assert decoded_documents(out, "train") == ["Hello"]


def test_a_text_field_needs_rows(tmp_path):
    """In --val-input, if not in --input."""
    text, rows = write(tmp_path / "a.txt", "one"), write_jsonl(tmp_path / "b.jsonl", ["two"], "body")
    data_set, other = write(tmp_path / "set/a.txt", "one").parent, write(tmp_path / "c.txt", "one")
    for arguments in (["--input", text], ["--input", text, "--val-input", other], ["--dataset", data_set]):
        assert "--text-field belongs to JSON lines" in bad_input(tmp_path, *arguments, "--text-field", "body")
    out = run_prepare(tmp_path, "--input", text, "--val-input", rows, "--text-field", "body")
    assert decoded_documents(out, "train") == ["one"] and decoded_documents(out, "val") == ["two"]


def test_directory_and_pattern_are_read_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "sub/c.md", "a.jsonl", "d.py"):
        path = tmp_path / "in" / name
        write_jsonl(path, [name]) if name.endswith("jsonl") else write(path, name)
    out = run_prepare(tmp_path, "--input", tmp_path / "in", "--val-fraction", 0)
    assert decoded_documents(out, "train") == ["a.jsonl", "b.txt", "d.py", "sub/c.md"]
    out = run_prepare(tmp_path, "--input", tmp_path / "in" / "?.txt", "--val-fraction", 0, name="out2")
    assert decoded_documents(out, "train") == ["b.txt"]


SOURCES = {"Makefile": "all:\n", "a.c": "int x;\n", "b.tar.txt": "x", "data.csv": "1,2\n", "sub/c.py": "# ç\n", "z": ""}
NO_TEXT = {"image.png": b"\x89PNG\r\n", "latin.c": b"// caf\xe9\n", "zeros.tar": b"a.txt\0\0\0"}


@pytest.mark.parametrize("name", SOURCES)
def test_text_is_taken_whatever_its_ending(tmp_path, name):
    write(tmp_path / name, "text " + SOURCES[name])
    out = run_prepare(tmp_path, "--input", tmp_path / name, "--val-fraction", 0)
    assert decoded_documents(out, "train") == ["text " + SOURCES[name]]


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_refused(tmp_path, name):
    file = write(tmp_path / name, NO_TEXT[name])
    write(tmp_path / "a.txt", "text")
    for path in (file, tmp_path / "*.*"):
        sentence = bad_input(tmp_path, "--input", tmp_path / "a.txt", path)
        assert f"{file} is not UTF-8 text" in sentence and "\n" not in sentence


UTF16_REMEDY = "is UTF-16: convert it first, with iconv -f utf-16 -t utf-8"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize(
    ("encode", "words"),
    [
        (gzip.compress, "is compressed: unpack it first, with gunzip"),
        (bz2.compress, "is compressed: unpack it first, with bunzip2"),
        (lzma.compress, "is compressed: unpack it first, with unxz"),
        (lambda text: b"\x28\xb5\x2f\xfd" + zlib.compress(text), "is compressed: unpack it first, with zstd -d"),
        (lambda text: b"\xff\xfe" + text.decode().encode("utf-16-le"), UTF16_REMEDY),
        (lambda text: b"\xfe\xff" + text.decode().encode("utf-16-be"), UTF16_REMEDY),
    ],
)
def test_the_remedy_for_text_in_another_form(tmp_path, name, encode, words):
    file = write(tmp_path / name, encode('{"text": "\u010a, in UTF-16 with a byte as a line end"}\n'.encode()))
    assert bad_input(tmp_path, "--input", file) == f"{file} {words}"


def test_what_is_no_text_is_left_out_of_a_directory(tmp_path, capsys):
    directory = tmp_path / "in"
    for name, content in {**SOURCES, **NO_TEXT, ".git/config": "hidden", "sub/.cache": "hidden"}.items():
        write(directory / name, content)
    out = run_prepare(tmp_path, "--input", directory, "--val-fraction", 0)
    assert decoded_documents(out, "train") == [content for content in SOURCES.values() if content]
    assert f"left out 3 of 9 files that aren't UTF-8 text, such as {directory / 'image.png'}" in capsys.readouterr().out
    write(directory / "ChangeLog", b"ASCII at first\n" * 50_000 + NO_TEXT["latin.c"])
    assert decoded_documents(run_prepare(tmp_path, "--input", directory, "--overwrite", "--val-fraction", 0), "train")
    assert f"left out 4 of 10 files that aren't UTF-8 text, such as {directory / 'ChangeLog'}" in capsys.readouterr().out
    (directory / "ChangeLog").unlink()
    write(directory / "book.txt", NO_TEXT["latin.c"])  # which is meant to be text
    with pytest.raises(InputError, match="book.txt is not UTF-8 text"):
        run_prepare(tmp_path, "--input", directory, name="other")
    for name in SOURCES:
        (directory / name).unlink()
    (directory / "book.txt").unlink()
    with pytest.raises(InputError, match="holds no text"):
        run_prepare(tmp_path, "--input", directory, name="other")


def test_a_data_set_within_the_directory_is_no_text(tmp_path, capsys):
    """A second call finds what the first one wrote; a project's own files of these names are text."""
    directory = tmp_path / "in"
    write(directory / "a.py", "one"), write(directory / "z/tokenizer.json", '{"own": 1}')
    for _ in range(2):
        out = run_prepare(directory, "--input", directory, "--val-fraction", 0, "--overwrite")
        write(out / "source.json", "{}")
        assert decoded_documents(out, "train") == ["one", '{"own": 1}']
    assert f"left out files that were written beside tokens, 3 in all, such as {out / 'source.json'}" in capsys.readouterr().out


def test_end_of_text_separates_documents_of_a_text_file(tmp_path):
    file = write(tmp_path / "a.txt", "one\n<|endoftext|>\ntwo\n<|endoftext|>\r\n<|endoftext|>three<|endoftext|> four")
    out = run_prepare(tmp_path, "--input", file, "--val-fraction", 0)
    assert decoded_documents(out, "train") == ["one\n", "two\n", "three", " four"]


def joined_documents(pieces):
    result = []
    for piece in pieces:
        if piece.starts_document:
            result.append("")
        result[-1] += piece.text
    return result


def test_documents_do_not_depend_on_where_blocks_end(monkeypatch):
    monkeypatch.setattr(documents, "PIECE_CHARS", 40)
    expected = ["one\n", "two two\n  indented\n\nthree\n" * 6, "x" * 130, "y" * 130, "z"]
    text = "{}<|endoftext|>\r\n{}<|endoftext|>\n{}<|endoftext|>{}<|endoftext|>\r\n{}".format(*expected)
    for size in range(1, len(text) + 1):
        blocks = (text[i : i + size] for i in range(0, len(text), size))
        assert joined_documents(documents.pieces_of_blocks(blocks)) == expected, size


def test_pieces_have_the_tokens_of_the_whole(monkeypatch):
    import tokenizer

    text = "He said:  'It's  the end.'\n\n  'Is it?'   she\tasked...\r\n\r\nIt was 1984 .\n \n" * 40
    bpe = tokenizer.train_tokenizer(320, [text])
    monkeypatch.setattr(documents, "PIECE_CHARS", 100)
    for size in range(1, 120):
        pieces = list(documents.pieces_of_blocks(text[i : i + size] for i in range(0, len(text), size)))
        assert len(pieces) > 10
        ids = np.concatenate(bpe.encode([piece.text for piece in pieces]))
        assert ids.tolist() == bpe.encode([text])[0].tolist(), size


def test_a_long_document_comes_in_pieces(tmp_path):
    text = "the quick brown fox\n" * 200_000  # 4 MB
    pieces = list(documents.text_file_pieces(write(tmp_path / "long.txt", text)))
    assert max(len(piece.text) for piece in pieces) < 2.1 * documents.PIECE_CHARS
    assert [piece.starts_document for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert "".join(piece.text for piece in pieces) == text


def test_parquet_and_arrow(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"n": [1, 2, 3], "text": ["one", None, STORY]})
    parquet.write_table(table, tmp_path / "a.parquet")
    coded = table.set_column(1, "text", table["text"].dictionary_encode())
    for name, write_as, rows in (("b.arrow", pyarrow.ipc.new_stream, table), ("file.arrow", pyarrow.ipc.new_file, table),
                                 ("coded.arrow", pyarrow.ipc.new_stream, coded)):
        with write_as(str(tmp_path / name), rows.schema) as stream:
            stream.write_table(rows)
    for name in ("a.parquet", "b.arrow"):
        shutil.copy(tmp_path / name, tmp_path / os.fsdecode(b"\xe9" + name.encode()))
    for name in ("a.parquet", "b.arrow", "file.arrow", "coded.arrow", "\udce9a.parquet", "\udce9b.arrow"):
        out = run_prepare(tmp_path, "--input", tmp_path / name, "--val-fraction", 0, name=name + "-out")
        assert decoded_documents(out, "train") == ["one", STORY]
    numbers = table.set_column(1, "text", table["n"].dictionary_encode())
    with pyarrow.ipc.new_stream(str(tmp_path / "numbers.arrow"), numbers.schema) as stream:
        stream.write_table(numbers)
    assert "has no text in the field 'text'" in bad_input(tmp_path, "--input", tmp_path / "numbers.arrow")
    sentence = bad_input(tmp_path, "--input", tmp_path / "a.parquet", "--text-field", "body")
    assert "a.parquet has no text in the field 'body'" in sentence and "fields with text: text" in sentence
    twice = pyarrow.Table.from_arrays([table["text"], table["text"]], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "d.parquet")
    assert "has the field 'text' more than once" in bad_input(tmp_path, "--input", tmp_path / "d.parquet")
    sentence = bad_input(tmp_path, "--input", write(tmp_path / "c.parquet", b"PAR1 nonsense"))
    assert "can't read" in sentence and "c.parquet as parquet" in sentence


@pytest.mark.parametrize("damage", ["offsets", "UTF-8"])
def test_damaged_arrow_is_refused(tmp_path, damage):
    """Offsets that lead out of the texts, at which Arrow would read, and bytes that are no text."""
    pyarrow = pytest.importorskip("pyarrow")
    texts = ["one" * 40, "two" * 40, "three" * 40]
    table = pyarrow.table({"text": texts})
    path = tmp_path / "a.arrow"
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    offsets, data = struct.pack("<4i", 0, 120, 240, 440), path.read_bytes()
    assert data.count(offsets) == 1
    bad = data.replace(offsets, struct.pack("<4i", 0, 120, 1 << 30, (1 << 30) + 200)) if damage == "offsets" else (
        data.replace(b"twotwo", b"\xff\xfeotwo", 1))
    path.write_bytes(bad)
    assert "get a whole copy" in bad_input(tmp_path, "--input", path, "--tokenizer", "byte")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_rows_without_a_text_are_left_out(tmp_path, kind):
    """One rule for all kinds: null and empty are no document, also where a whole file has no other."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, texts in {"a": ["one", None, "", "two"], "b": [None, None]}.items():
        file, table = tmp_path / f"{name}.{kind}", pyarrow.table({"text": texts})
        if kind == "jsonl":
            write_jsonl(file, texts)
        elif kind == "parquet":
            parquet.write_table(table, file)
        else:
            with pyarrow.ipc.new_stream(str(file), table.schema) as stream:
                stream.write_table(table)
    out = run_prepare(tmp_path, "--input", tmp_path / f"*.{kind}", "--val-fraction", 0, name="both")
    assert decoded_documents(out, "train") == ["one", "two"]
    assert "no text to train on" in bad_input(tmp_path, "--input", tmp_path / f"b.{kind}")
    assert "no text in the field 'body'" in bad_input(tmp_path, "--input", tmp_path / f"a.{kind}", "--text-field", "body")


def test_dataset_directory_and_its_splits(tmp_path):
    directory = tmp_path / "set"
    write(directory / "README.md", "not data")
    write(directory / "dataset_info.json", "not data")
    write_jsonl(directory / "data" / "train-00001-of-00002.jsonl", ["b"])
    write_jsonl(directory / "data" / "train-00000-of-00002.jsonl", ["a"])
    write_jsonl(directory / "data" / "test-00000-of-00001.jsonl", ["c"])
    for number, (split, expected) in enumerate([((), ["a", "b"]), (("--split", "test"), ["c"])]):
        out = run_prepare(tmp_path, "--dataset", directory, *split, "--val-fraction", 0, name=f"out{number}")
        assert decoded_documents(out, "train") == expected
    sentence = bad_input(tmp_path, "--dataset", directory, "--split", "dev")
    assert "split 'dev'" in sentence and sentence.endswith("pass --split with one of train, test")
    sentence = bad_input(tmp_path, "--dataset", directory, "--dataset-config", "small")
    assert "--dataset-config belongs to a data set on the hub" in sentence
    write_jsonl(tmp_path / "plain" / "data-00000-of-00001.jsonl", ["a"])
    sentence = bad_input(tmp_path, "--dataset", tmp_path / "plain", "--split", "train")
    assert sentence.endswith("plain belongs to the split 'train': its files' names tell none, so leave --split out")


def test_a_data_set_says_what_it_leaves_out(tmp_path, capsys):
    """Names of splits may have numbers; files with other endings are counted."""
    for name in ("train1", "train2", "test1", "valid1"):
        write_jsonl(tmp_path / f"set/{name}.jsonl", [name])
    write(tmp_path / "set/train3.jsonl.gz", "x")
    out = run_prepare(tmp_path, "--dataset", tmp_path / "set", "--val-fraction", 0)
    assert decoded_documents(out, "train") == ["train1", "train2"]
    assert "left out 1 of 5 files without a data set's endings, such as " in capsys.readouterr().out


def test_hub_data_set_through_the_datasets_library(tmp_path, monkeypatch):
    def load_dataset(name, config, split, streaming):
        assert (name, config, split, streaming) == ("someone/pages", "small", "test", True)
        return [{"text": "one"}, {"text": " "}, {"text": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    hub = ["--dataset", "someone/pages", "--dataset-config", "small", "--split", "test"]
    out = run_prepare(tmp_path, *hub, "--val-fraction", 0, name="hub")
    assert decoded_documents(out, "train") == ["one", "two"]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace())  # fails, as it does without a network
    assert "can't read the data set someone/pages" in bad_input(tmp_path, *hub)


# splits


def test_every_nth_of_many_documents_is_for_validation(tmp_path):
    texts = [f"document {i}" for i in range(101)]
    out = run_prepare(tmp_path, "--input", write_jsonl(tmp_path / "a.jsonl", texts), "--val-fraction", 0.1)
    assert decoded_documents(out, "val") == texts[9::10]
    assert decoded_documents(out, "train") == [text for i, text in enumerate(texts) if i % 10 != 9]


def test_the_last_part_of_each_of_few_documents_is_for_validation(tmp_path):
    texts = ["".join(f"{d} line {i}\n" for i in range(100)) for d in "ab"]
    out = run_prepare(tmp_path, "--input", write_jsonl(tmp_path / "a.jsonl", texts), "--val-fraction", 0.2)
    train, val = decoded_documents(out, "train"), decoded_documents(out, "val")
    assert [t + v for t, v in zip(train, val, strict=True)] == texts
    # the validation part begins with the first line after the cut: a fifth, less at most a line of 10 characters
    for document, part in zip(texts, val, strict=True):
        assert len(document) / 5 - 10 <= len(part) <= len(document) / 5 + 1


def test_a_document_of_one_line_is_cut_within_it(tmp_path):
    out = run_prepare(tmp_path, "--input", write(tmp_path / "a.txt", 999 * "x" + "\n"), "--val-fraction", 0.2)
    assert decoded_documents(out, "train") == [800 * "x"] and decoded_documents(out, "val") == [199 * "x" + "\n"]


def test_validation_files_of_their_own(tmp_path):
    train, val = write(tmp_path / "t.txt", "train"), write(tmp_path / "v.txt", "val")
    out = run_prepare(tmp_path, "--input", train, "--val-input", val)
    assert decoded_documents(out, "train") == ["train"] and decoded_documents(out, "val") == ["val"]


def test_validation_files_are_not_trained_on(tmp_path, capsys):
    train, val = write(tmp_path / "d/t.txt", "train"), write(tmp_path / "d/v.txt", "val")
    (tmp_path / "link.txt").symlink_to(val)
    for number, of_val in enumerate((val, tmp_path / "link.txt")):
        out = run_prepare(tmp_path, "--input", tmp_path / "d", "--val-input", of_val, name=f"out{number}")
        assert decoded_documents(out, "train") == ["train"] and decoded_documents(out, "val") == ["val"]
        assert f"left out 1 of 2 files, which are for validation, such as {val}" in capsys.readouterr().out
    assert "is for validation: name other files" in bad_input(tmp_path, "--input", train, "--val-input", train)
    assert "t.txt is named twice" in bad_input(tmp_path, "--input", tmp_path / "d", train)


# tokenizers


def test_trained_tokenizer(tmp_path):
    text = "the cat sat on the mat; the rat ate the cat's hat\n" * 400
    texts = [text, "<|endoftext|> as text, bytes: \x00\x7f\u00ff\u6771"]
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    out = run_prepare(tmp_path, "--input", file, "--tokenizer", "train:280", "--val-fraction", 0)
    tokens, end_of_text = read_tokenizer(out / "tokenizer.bin")
    assert len(tokens) == 280 and end_of_text == 279 and tokens[279] == b"<|endoftext|>"
    assert sorted(tokens[:256]) == [bytes([b]) for b in range(256)]
    # ids are in the order of merges, as tokenizer.bin's readers suppose: each is two earlier tokens
    for i in range(256, 279):
        token = tokens[i]
        assert any(token[:k] in tokens[:i] and token[k:] in tokens[:i] for k in range(1, len(token)))
    assert decoded_documents(out, "train") == texts
    assert len(read_split(out, "train")) < 0.6 * len(text)
    # tokenizer.json says the same, also when it is used again
    again = run_prepare(
        tmp_path, "--input", file, "--tokenizer", out / "tokenizer.json", "--val-fraction", 0, name="again"
    )
    for name in ("train_000000.bin", "tokenizer.bin", "tokenizer.json"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


def genome(length):
    return np.frombuffer(b"acgt", np.uint8)[np.random.default_rng(1).integers(0, 4, length)].tobytes().decode()


def test_long_words_are_cut_for_the_trainer_of_a_tokenizer():
    import tokenizer

    normal = STORY * 100 + "a1_" * 5000 + "x" * 999 + " " + "\u6771\u4eac\u3002" * 3000
    assert list(tokenizer.without_long_words([normal, ""])) == [normal, ""]
    for word in ("gattaca", "\u6771\u4eac", "1234", "-_=", " \n\t"):
        text = "before it " + word * 5000 + "then after it"
        pieces = list(tokenizer.without_long_words([text, normal]))
        assert "".join(pieces) == text + normal and pieces[-1] == normal
        runs = [run for piece in pieces[:-1] for run in re.findall(r"\s+|\S+", piece)]
        assert max(map(len, runs)) < 2 * tokenizer.WINDOW_CHARS
    bpe = tokenizer.train_tokenizer(1024, [genome(400_000)])  # as one word it takes minutes
    assert all(set(token) <= set(b"acgt") for token in bpe.tokens[256:-1]) and bpe.vocab_size == 1024


def test_ctrl_c_ends_the_training_of_a_tokenizer(tmp_path):
    """The library's trainer, which takes some time here, calls no Python meanwhile."""
    command = [sys.executable, DATA / "prepare.py", "--input", write(tmp_path / "a.txt", genome(8_000_000)),
               "--tokenizer", "train:8192", "--out-dir", tmp_path / "out"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stdout.readline() == "training a tokenizer of 8,192 tokens on the data\n"
        time.sleep(5)  # what it reads before takes less
        program.send_signal(signal.SIGINT)
        started = time.monotonic()
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
    assert time.monotonic() - started < 5 * SLOWNESS
    assert (program.returncode, out, err) == (130, "", "prepare.py: stopped before it was done\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture(params=["byte", "gpt2", "trained", "other"])
def any_tokenizer(request, tmp_path):
    """prepare.py's options for a tokenizer of each kind."""
    if request.param == "byte":
        return []
    if request.param == "gpt2":
        path = write(tmp_path / "vocab.bpe", gpt2_like_merges(50000))
        return ["--tokenizer", "gpt2", "--tokenizer-file", path]
    if request.param == "trained":
        return ["--tokenizer", "train:300"]
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    # the bytes after end-of-text, a space before the first word, and end-of-text around a text
    vocab = {"<eos>": 0} | {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    other = Tokenizer(models.BPE(vocab | {"\u0120t": 257}, [("\u0120", "t")]))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    other.decoder = decoders.ByteLevel()
    other.add_special_tokens([AddedToken("<eos>", special=True)])
    other.post_processor = processors.TemplateProcessing("<eos> $A <eos>", special_tokens=[("<eos>", 0)])
    other.save(str(tmp_path / "other.json"))
    return ["--tokenizer", tmp_path / "other.json"]


def check_json(directory, text, ids):
    """That the tokenizer.json in the directory gives a document of this text the ids, read as transformers reads it."""
    from tokenizers import Tokenizer

    tokens, end_of_text = read_tokenizer(directory / "tokenizer.bin")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["bos_token"] == config["eos_token"] == tokens[end_of_text].decode()
    theirs = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert theirs.token_to_id(config["eos_token"]) == end_of_text
    assert theirs.get_vocab_size() == len(tokens)
    # transformers' add_prefix_space overrides tokenizer.json's
    pre_tokenizer = json.loads((directory / "tokenizer.json").read_text())["pre_tokenizer"]
    assert config["add_prefix_space"] == pre_tokenizer["add_prefix_space"]
    assert theirs.encode(config["eos_token"]).ids == [end_of_text]
    theirs.encode_special_tokens = True  # transformers' split_special_tokens: the name in a text is text
    assert [end_of_text, *theirs.encode(text).ids] == ids
    assert theirs.decode(ids[1:]) == "".join(tokens[i].decode("latin-1") for i in ids[1:]).encode("latin-1").decode()


DOCUMENT = STORY * 3 + "  the  cat's\n\n \x00 <|endoftext|> <eos> 1984!!  "


def test_tokenizer_json_gives_the_tokens_of_the_data(tmp_path, any_tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [DOCUMENT])
    out = run_prepare(tmp_path, "--input", file, *any_tokenizer, "--val-fraction", 0)
    check_json(out, DOCUMENT, read_split(out, "train"))


def test_end_of_text_is_text_in_a_document_whatever_its_tokenizer_says(tmp_path):
    """A tokenizer.json may not mark the token as special."""
    file = write_jsonl(tmp_path / "a.jsonl", [STORY * 3 + DOCUMENT])
    marked = run_prepare(tmp_path, "--input", file, "--tokenizer", "train:300", "--val-fraction", 0, name="marked")
    content = json.loads((marked / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    other = write(tmp_path / "other.json", json.dumps(content))
    unmarked = run_prepare(tmp_path, "--input", file, "--tokenizer", other, "--val-fraction", 0, name="unmarked")
    assert list(read_split(unmarked, "train")) == list(read_split(marked, "train"))
    check_json(unmarked, STORY * 3 + DOCUMENT, read_split(unmarked, "train"))


def test_a_pipe_is_refused(tmp_path):
    """It could be read once alone."""
    os.mkfifo(tmp_path / "pipe.txt")
    sentence = bad_input(tmp_path, "--input", tmp_path / "pipe.txt")
    assert "pipe.txt is not a regular file" in sentence


@pytest.mark.parametrize("missing", [["tokenizer.json"], ["tokenizer_config.json"], TOKENIZER_FILES[1:]])
def test_a_missing_tokenizer_json_is_made(tmp_path, capsys, missing):
    file = write_jsonl(tmp_path / "a.jsonl", ["the rat the cat " * 50 + DOCUMENT])
    out = run_prepare(tmp_path, "--input", file, "--tokenizer", "train:300", "--val-fraction", 0)
    config = (out / "tokenizer_config.json").read_bytes()
    for name in missing:
        (out / name).unlink()
    tokenizer_json.main([str(out / "tokenizer.bin")])
    check_json(out, "the rat the cat " * 50 + DOCUMENT, read_split(out, "train"))
    assert (out / "tokenizer_config.json").read_bytes() == config
    capsys.readouterr()
    tokenizer_json.main([str(out / "tokenizer.bin")])
    assert "are there already" in capsys.readouterr().out


def test_tokenizer_json_of_files_that_name_no_merges(tmp_path):
    """The byte tokenizer's, and GPT-2's as llm.c names it, in a version that leaves end-of-text unsaid."""
    file = write_jsonl(tmp_path / "a.jsonl", [DOCUMENT])
    merges = write(tmp_path / "vocab.bpe", gpt2_like_merges(50000))
    for kind, options in {"byte": [], "gpt2": ["--tokenizer-file", merges]}.items():
        out = run_prepare(tmp_path, "--input", file, "--tokenizer", kind, *options, "--val-fraction", 0, name=kind)
        other = tmp_path / f"{kind} alone"
        content = (out / "tokenizer.bin").read_bytes()
        if kind == "gpt2":
            content = struct.pack("<4I", 20240328, 1, 50257, 0) + content[16:]
        path = write(other / f"{kind}_tokenizer.bin", content)
        tokenizer_json.main([str(path)])
        assert len(list(other.iterdir())) == 3
        for name in TOKENIZER_FILES[1:]:
            (other / f"{kind}_{name}").rename(out / name)
        check_json(out, DOCUMENT, read_split(out, "train"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "isn't a tokenizer.bin of version 1 to 3"),
        (tokenizer_bytes([b"a", b"b"], 1)[:-1], "is damaged"),
        (tokenizer_bytes([b"a", b"b"], 1), "a byte is missing"),
        (tokenizer_bytes([*map(bytes, zip(range(256))), b"end", b"a"], 256), "twice"),
        (tokenizer_bytes([*map(bytes, zip(range(256))), b"end", b"abc"], 256), "b'abc' isn't made of two tokens"),
        (tokenizer_bytes([*map(bytes, zip(range(256))), b"\xff\xff"], 256), "is damaged ('utf-8' codec"),
    ],
)
def test_a_tokenizer_bin_without_a_tokenizer_json(tmp_path, content, words):
    path = write(tmp_path / "tokenizer.bin", content)
    with pytest.raises(InputError) as caught:
        tokenizer_json.main([str(path)])
    assert words in str(caught.value) and [p.name for p in tmp_path.iterdir()] == ["tokenizer.bin"]


def test_a_tokenizer_json_that_is_no_object(tmp_path):
    path = write(tmp_path / "t.bin", tokenizer_bytes([*map(bytes, zip(range(256))), b"end"], 256))
    write(tmp_path / "t.json", "[]")
    with pytest.raises(InputError, match="is damaged .*isn't an object"):
        tokenizer_json.main([str(path)])


def test_gpt2_from_vocab_bpe(tmp_path):
    merges = write(tmp_path / "vocab.bpe", gpt2_like_merges(50000))
    book = write(tmp_path / "a.txt", "A\n \u6771!!")
    out = run_prepare(tmp_path, "--input", book, "--tokenizer", "gpt2", "--tokenizer-file", merges, "--val-fraction", 0)
    tokens, end_of_text = read_tokenizer(out / "tokenizer.bin")
    assert len(tokens) == 50257 and end_of_text == 50256
    # GPT-2's published ids of some bytes, and its first merged id
    assert [tokens.index(token) for token in (b"!", b"A", b"a", b"\n", b" ")] == [0, 32, 64, 198, 220]
    assert tokens[256] == b"!!"
    assert read_split(out, "train")[-1] == 256
    assert decoded_documents(out, "train") == ["A\n \u6771!!"]


def test_wide_tokenizer_makes_uint32_files(tmp_path):
    path = write(tmp_path / "merges.txt", gpt2_like_merges(65536 - 256))  # and end-of-text: 65537
    from tokenizer import load_merges

    json_path = tmp_path / "wide.json"
    load_merges(path).save(str(json_path))
    out = run_prepare(
        tmp_path, "--input", write(tmp_path / "a.txt", STORY), "--tokenizer", json_path, "--val-fraction", 0
    )
    ids, width = read_shard(out / "train_000000.bin")
    assert width == 4 and ids[0] == 65536
    assert decoded_documents(out, "train") == [STORY]


def test_one_call_at_a_time_writes_into_a_directory(tmp_path):
    book = write(tmp_path / "a.txt", STORY)
    with AtomicFiles(tmp_path / "out"):
        assert bad_input(tmp_path, "--input", book).startswith(f"another program is writing into {tmp_path / 'out'}: ")
    run_prepare(tmp_path, "--input", book)


def test_a_data_set_that_came_since_is_left_alone(tmp_path):
    out = run_prepare(tmp_path, "--input", write(tmp_path / "a.txt", STORY))
    with pytest.raises(InputError, match="holds a data set already"):
        prepare.prepare(lambda: iter(()), SimpleNamespace(out_dir=out, overwrite=False))


# bad input


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path):
    for program, arguments, words in [
        ("prepare.py", ["--input", "nowhere/*.txt", "--out-dir", "out"], "nowhere/*.txt is neither a file"),
        ("prepare.py", ["--inptu", "a.txt", "--out-dir", "out"], "--help lists the options"),
        ("tinyshakespeare.py", ["--from-file", "none.txt", "--out-dir", "out"], "none.txt"),
        ("demo_corpus.py", ["--wheel", "none.whl", "--out-dir", "out"], "none.whl"),
    ]:
        result = subprocess.run(
            [sys.executable, DATA / program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 2, result
        assert result.stdout == ""
        assert result.stderr.startswith(program + ": ") and result.stderr.count("\n") == 1 and words in result.stderr


def test_names_that_are_not_utf8_are_printed_as_they_are(tmp_path):
    """Python's own output refuses them under a locale such as en_US.UTF-8, though not under C."""
    write(tmp_path / "in/a.txt", STORY * 30), write(tmp_path / "in" / os.fsdecode(b"caf\xe9.png"), b"\0")
    result = subprocess.run([sys.executable, DATA / "prepare.py", "--input", "in", "--out-dir", b"d\xe9"], cwd=tmp_path,
                            capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"})
    assert result.returncode == 0, result
    assert b"such as in/caf\xe9.png\n" in result.stdout and b"--train-data 'd\xe9/train_*.bin'" in result.stdout


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("a.txt", b"caf\xe9", [], "not UTF-8"),
        ("a.txt", b"a" * 300_000 + b"\xff", [], "not UTF-8"),
        ("a.txt", b" \n", [], "no text to train on"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', [], "line 2, is not a JSON object"),
        ("a.jsonl", b'["a"]\n', [], "line 1, is not a JSON object"),
        ("a.jsonl", b"[" * 100_000, [], "line 1, is not a JSON object"),
        ("a.jsonl", b'{"text": "\xff"}\n', [], "line 1, is not a JSON object"),
        ("a.jsonl", b'{"body": "a"}\n', [], "fields with text: body"),
        ("a.jsonl", b'{"text": 1}\n', [], "no text in the field 'text'"),
        ("a.jsonl", b'{"text": "a"}\n' * 999 + b"{", ["--tokenizer", "train:300"], "line 1000, is not a JSON object"),
        ("a.txt", b"a", ["--tokenizer", "gtp2"], "neither byte, gpt2, gpt-neox, train:N nor a file"),
        ("a.txt", b"a", ["--tokenizer", "train:256"], "from 257"),
        ("a.txt", b"a", ["--tokenizer", "train:lots"], "whole number"),
        ("a.txt", b"a", ["--tokenizer", "a.txt"], "is not a tokenizer.json"),
        ("a.txt", b"a", ["--tokenizer", "gpt2", "--tokenizer-file", "a.txt"], "isn't a vocab.bpe"),
        ("a.jsonl", b"\xff", ["--tokenizer", "gpt2", "--tokenizer-file", "a.jsonl"], "is not text"),
        ("a.txt", b"! !\n", ["--tokenizer", "gpt2", "--tokenizer-file", "a.txt"], "is not GPT-2's tokenizer"),
        ("a.txt", b"a", ["--tokenizer", "gpt2", "--tokenizer-file", "none.json"], "can't read the tokenizer none.json"),
        ("a.txt", b"a", ["--tokenizer-file", "a.txt"], "belongs to --tokenizer gpt2"),
        ("a.txt", b"a", ["--shard-tokens", "2147483648"], "--shard-tokens 2147483648 must be at most 2147483647"),
        ("a.txt", b"a", ["--val-fraction", "1"], "--val-fraction 1"),
        ("a.txt", b"a", ["--val-fraction", "nan"], "--val-fraction nan"),
        ("a.txt", b"a", ["--dataset", "x"], "one of the two"),
        ("a.txt", b"a", ["--split", "train"], "--split belongs to --dataset"),
        ("a.txt", b"a", ["--dataset-config", "small"], "--dataset-config belongs to --dataset"),
        ("a.json", b'{"body": "a"}\n', [], "a.json, first line, has no text in the field 'text'"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, name, content, options, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / name, content)
    sentence = bad_input(tmp_path, "--input", name, *options)
    assert words in sentence and "\n" not in sentence


def test_the_trainers_tokenizer_is_told_from_the_one_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", "a" * 100)
    run_prepare(tmp_path, "--input", "a.txt", name="first")
    sentence = bad_input(tmp_path, "--input", "a.txt", "--tokenizer", "first/tokenizer.bin")
    assert "for train_gpt_mxfp8" in sentence and sentence.endswith("name first/tokenizer.json")


def test_tokenizers_that_cannot_be_used(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, decoders, models

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", "a")
    Tokenizer(models.WordLevel({"a": 0}, "a")).save("word.json")
    few = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    few.decoder = decoders.ByteLevel()
    few.save("few.json")
    gap = Tokenizer(models.BPE({"a": 0, "b": 2}, []))
    gap.decoder = decoders.ByteLevel()
    gap.save("gap.json")
    for name, words in [("word", "is neither a byte-level BPE"), ("few", "241 of the bytes of UTF-8"), ("gap", "id 1")]:
        assert words in bad_input(tmp_path, "--input", "a.txt", "--tokenizer", f"{name}.json")


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = write(tmp_path / "a.txt", "a")
    assert "pip install -r" in bad_input(tmp_path, "--input", text, "--tokenizer", "train:300")
    assert "needs pyarrow" in bad_input(tmp_path, "--input", write(tmp_path / "a.parquet", b""))
    assert "pip install datasets" in bad_input(tmp_path, "--dataset", "someone/something")


def test_an_existing_data_set_is_replaced_only_on_request(tmp_path):
    book = write(tmp_path / "a.txt", "abcdef")
    out = run_prepare(tmp_path, "--input", book, "--val-fraction", 0, "--shard-tokens", 2, "--tokenizer", "train:257")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len(before) == 4 + 3
    with pytest.raises(InputError, match="--overwrite"):
        run_prepare(tmp_path, "--input", book)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    run_prepare(tmp_path, "--input", book, "--val-fraction", 0, "--overwrite")
    assert sorted(path.name for path in out.iterdir()) == [*TOKENIZER_FILES, "train_000000.bin"]


def test_a_full_disk_is_said(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    os.symlink("/dev/full", out / ".train_000000.bin.tmp")
    book = write(tmp_path / "a.txt", "abc" * 100_000)
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--input", str(book), "--out-dir", str(out)])
    with pytest.raises(SystemExit) as caught:
        prepare.run(prepare.main)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"prepare.py: no space left for {out}: free some, or choose another --out-dir\n"
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("name", ["a[1]", "a*?", "it's", "a\\b", "~a", "a b"])
def test_the_trainer_understands_the_command_that_is_printed(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "book.txt", STORY * 30)
    write(tmp_path / "abc/train_000000.bin", "what a*? would match, too")
    prepare.main(["--input", "book.txt", "--out-dir", name])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train on it: "))
    options = shlex.split(line.removeprefix("train on it: ./train_gpt_mxfp8 "))
    assert options[0::2] == ["--train-data", "--val-data"]
    model = "--layers 1 --heads 1 --channels 32 --max-seq-len 16 --batch-size 1 --dry-run".split()
    done = subprocess.run([TRAINER, *options, *model], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# one-liners, from local files


def test_tinyshakespeare(tmp_path):
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 50
    file = write(tmp_path / "input.txt", text)
    tinyshakespeare.main(["--from-file", str(file), "--out-dir", str(tmp_path / "out")])
    train, val = decoded_documents(tmp_path / "out", "train")[0], decoded_documents(tmp_path / "out", "val")[0]
    assert train + val == text and 0.08 < len(val) / len(text) <= 0.1


@pytest.mark.parametrize("raised", [http.client.BadStatusLine("garbage"), http.client.IncompleteRead(b"ab", 5),
                                    urllib.error.URLError("no network"), TimeoutError("timed out")])
def test_a_download_that_fails_is_a_sentence(tmp_path, monkeypatch, raised):
    def urlopen(*_, **__):
        raise raised

    monkeypatch.setattr(download.urllib.request, "urlopen", urlopen)
    with pytest.raises(InputError, match="can't download http://a.b/c .*pass it with --from-file"):
        download.download("http://a.b/c", tmp_path)
    assert not list(tmp_path.iterdir())


def test_tinystories(tmp_path):
    train = write(tmp_path / "train.txt", "Once upon a time.\n<|endoftext|>\nThe end.\n")
    val = write(tmp_path / "valid.txt", "One day.\n")
    arguments = ["--from-file", str(train), "--val-from-file", str(val), "--tokenizer", "train:260"]
    tinystories.main([*arguments, "--out-dir", str(tmp_path / "out")])
    assert decoded_documents(tmp_path / "out", "train") == ["Once upon a time.\n", "The end.\n"]
    assert decoded_documents(tmp_path / "out", "val") == ["One day.\n"]
    tinystories.main(["--from-file", str(tmp_path / "*.txt"), *arguments[2:], "--out-dir", str(tmp_path / "both")])
    assert decoded_documents(tmp_path / "both", "train") == ["Once upon a time.\n", "The end.\n"]


def test_fineweb(tmp_path):
    texts = [f"page {i}" for i in range(120)]
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    arguments = ["--from-file", str(file), "--tokenizer", "byte", "--val-fraction", "0.1"]
    fineweb.main([*arguments, "--out-dir", str(tmp_path / "out")])
    assert len(decoded_documents(tmp_path / "out", "train")) == 108
    assert len(decoded_documents(tmp_path / "out", "val")) == 12
    with pytest.raises(InputError, match="beside --from-file"):
        fineweb.main([*arguments, "--dataset-config", "default", "--out-dir", str(tmp_path / "other")])


# the demo's corpus


# where `make demo` leaves it
WHEEL = Path(os.environ.get("DEMO_WHEEL", DATA.parent / "build" / "demo" / "data" / demo_corpus.WHEEL))


def test_plain_text_of_a_play():
    markdown = "# Hamlet\n\n### SCENE I. A room.\n\n_Enter\nOPHELIA_\n\n"
    markdown += "**HAMLET**  \n_\\[Aside]_  \nBut soft \u2014 \\--ay.\n*Exit.*\n"
    expected = "Hamlet\n\nSCENE I. A room.\n\nEnter\nOPHELIA\n\nHAMLET\n[Aside]\nBut soft -- --ay.\nExit.\n"
    assert demo_corpus.plain_text(markdown) == expected


@pytest.mark.skipif(not WHEEL.is_file(), reason=f"{WHEEL} isn't there: make demo downloads it")
def test_demo_corpus(tmp_path, capsys):
    arguments = ["--wheel", str(WHEEL), "--out-dir", str(tmp_path / "out")]
    demo_corpus.main(arguments)
    train, val = decoded_documents(tmp_path / "out", "train"), decoded_documents(tmp_path / "out", "val")
    assert len(train) == 34
    assert [play.splitlines()[0] for play in val] == ["Twelfth Night", "Richard II", "The Tempest", "Macbeth"]
    assert "To be, or not to be: that is the question:\nWhether 'tis nobler" in "".join(train)
    assert all(play.isascii() and not set("*_#\\") & set(play) for play in train + val)
    demo_corpus.main(arguments)
    assert "here already" in capsys.readouterr().out
    (tmp_path / "out" / "tokenizer.json").unlink()  # older versions made none: it is completed
    demo_corpus.main(arguments)
    assert demo_corpus.is_complete(tmp_path / "out")


def test_a_foreign_wheel_is_refused(tmp_path):
    wheel = write(tmp_path / demo_corpus.WHEEL, b"PK")
    with pytest.raises(InputError, match="SHA-256"):
        demo_corpus.main(["--wheel", str(wheel), "--out-dir", str(tmp_path / "out")])


KERNEL = {
    "README": "Linux\n",
    "Makefile": "all:\n\tcc\n",
    "kernel/fork.c": "int fork(void)\n{\n\treturn 0;\n}\n",
    "drivers/gpu/drm/amd/include/regs.h": "#define REGISTER 1\n",
    "logo.ppm": "P3 1 1\n",
    "empty.c": "\n",
    "latin.c": b"// \xe9\n",
    "arch/arm/boot/dts/board.dts": "/dts-v1/; // ç\n",
    "drivers/Kconfig.debug": "config DEBUG\n",
}
TAKEN = ["README", "Makefile", "kernel/fork.c", "arch/arm/boot/dts/board.dts", "drivers/Kconfig.debug"]


def tar_xz(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        for name, content in files.items():
            content = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def ar(members):
    parts = [b"!<arch>\n"]
    for name, content in members.items():
        parts.append(f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2))
    return b"".join(parts)


def make_deb(path, kernel=KERNEL):
    sources = tar_xz({f"linux-source-6.1/{name}": content for name, content in kernel.items()})
    control = tar_xz({"./md5sums": "", "./control": "Package: linux-source-6.1\nSource: linux\nVersion: 6.1.5-1\n"})
    data = tar_xz({"./usr/share/doc/x": "x", "./usr/src/linux-source-6.1.tar.xz": sources})
    return write(path, ar({"debian-binary": b"2.0\n", "control.tar.xz": control, "data.tar.xz": data}))


def run_linux(tmp_path, deb, *arguments, out="out"):
    checksum = hashlib.sha256(Path(deb).read_bytes()).hexdigest()
    fixed = ["--from-file", str(deb), "--sha256", checksum, "--tokenizer", "byte", "--out-dir", str(tmp_path / out)]
    linux_corpus.main([*fixed, *arguments])
    return tmp_path / out


def test_linux_corpus(tmp_path, capsys):
    deb = make_deb(tmp_path / "linux.deb")
    out = run_linux(tmp_path, deb, "--val-fraction", "0")
    texts = [KERNEL[name] for name in TAKEN]
    assert decoded_documents(out, "train") == texts  # what is text, each file once, in the archive's order
    size = sum(len(text.encode()) for text in texts)
    source = json.loads((out / "source.json").read_text())
    assert (source["package"], source["version"]) == ("linux-source-6.1", "6.1.5-1")
    assert source["documents"] == 5 and source["text_bytes"] == size and source["left_out_not_utf8"] == 1
    assert source["train_tokens"] == size + 5 and source["val_tokens"] == 0 and source["vocab_size"] == 257
    assert source["deb_sha256"] == hashlib.sha256(deb.read_bytes()).hexdigest()
    assert "linux-source-6.1 6.1.5-1: 5 documents" in capsys.readouterr().out
    again = run_linux(tmp_path, deb, "--val-fraction", "0", out="again")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}


def test_linux_corpus_keeps_whole_files_for_validation(tmp_path):
    files = {f"f{i}.c": f"int f{i};\n" for i in range(100)}
    out = run_linux(tmp_path, make_deb(tmp_path / "linux.deb", files), "--val-fraction", "0.2", "--tokenizer", "train:280")
    train, val = decoded_documents(out, "train"), decoded_documents(out, "val")
    assert len(train) == 80 and val == [files[f"f{i}.c"] for i in range(4, 100, 5)]
    assert sorted(train + val) == sorted(files.values())


def test_linux_corpus_refuses(tmp_path):
    deb = make_deb(tmp_path / "linux.deb")
    whole = deb.read_bytes()
    out = ["--out-dir", str(tmp_path / "out")]
    cases = {
        "isn't that of --sha256": ["--from-file", str(deb), "--sha256", "0" * 64, *out],
        "run apt-get": ["--from-file", str(deb), "--package", "no-such-package-here", *out],
        "belongs to --from-file": ["--sha256", "0" * 64, *out],
        "no file": ["--from-file", str(tmp_path / "none.deb"), *out],
    }
    if not shutil.which("apt-cache"):
        del cases["run apt-get"]
    for words, arguments in cases.items():
        with pytest.raises(InputError, match=words):
            linux_corpus.main(arguments)
    broken = {
        "not a Debian package": b"PK" + whole,
        "ends early": whole[: len(whole) - 200],
        "holds no sources": ar({"debian-binary": b"2.0\n", "control.tar.xz": tar_xz({"./control": "Package: x\nVersion: 1\n"}),
                                "data.tar.xz": tar_xz({"./usr/share/doc/x": "x"})}),
        "no control.tar.xz": ar({"debian-binary": b"2.0\n", "control.tar.zst": b"x"}),
    }
    for words, content in broken.items():
        with pytest.raises(InputError, match=words):
            run_linux(tmp_path, write(tmp_path / "broken.deb", content))
    assert not list(tmp_path.glob("out/*"))  # nothing half written


def test_linux_corpus_without_apt(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no apt-get on this system"):
        linux_corpus.main(["--out-dir", str(tmp_path / "out")])


PAGE = """<html><head><title>A title that is long enough to be one.</title><style>p { color: red; }</style></head><body>
<p>The first sentence says <em>something</em> &amp; more. It is followed by another one here.</p>
<pre>int program_text_is_left_out(void);</pre><ul><li>Too short.</li><li>An item with more than five words in it.</li></ul>
<p>The second paragraph of this page is here to make it long enough to be kept as a document of its own.</p></body></html>"""


GERMAN = "Dieser Satz steht auf einer Seite in einer anderen Sprache und wird ausgelassen. " * 9


def make_docs(path, name, files):
    everything = {f"./usr/share/doc/{name}/copyright": f"licence of {name}\n", **files}
    control = tar_xz({"./control": f"Package: {name}\nVersion: 1.2-3\n"})
    return write(path, ar({"debian-binary": b"2.0\n", "control.tar.xz": control, "data.tar.xz": tar_xz(everything)}))


def test_debian_docs(tmp_path, capsys):
    """Prose of pages in the cache's packages, each sentence once; licences beside the tokens; nothing is read twice."""
    text = "Plain text of some words stands in a file.\n\nThe first sentence says something & more. " + "It goes on and on. " * 20
    long = " ".join(f"This is sentence {word} of a longer text." for word in "one two three four five six seven".split())
    cache = tmp_path / "cache"
    make_docs(cache / "a-doc.deb", "a-doc", {"./usr/share/doc/a-doc/page.html": PAGE, "./usr/share/doc/a-doc/x.png": b"\x89PNG",
                                             "./usr/share/doc/a-doc/de.html": f"<p>{GERMAN}</p>"})
    make_docs(cache / "b-doc.deb", "b-doc", {"./usr/share/doc/b-doc/b.txt.gz": gzip.compress(f"{text}\n\n{long}".encode() + b" It has one wrong \xe9 byte."),
                                             "./usr/share/doc/b-doc/latin.txt": b"caf\xe9 " * 100})
    arguments = ["--packages", "a-doc,b-doc", "--cache-dir", str(cache), "--tokenizer", "byte", "--val-fraction", "0"]
    debian_docs.main([*arguments, "--out-dir", str(tmp_path / "out")])
    first = ("A title that is long enough to be one.\n\nThe first sentence says something & more. It is followed by another one "
             "here.\n\nAn item with more than five words in it.\n\nThe second paragraph of this page is here to make it long "
             "enough to be kept as a document of its own.")
    second = f"Plain text of some words stands in a file.\n\nIt goes on and on.\n\n{long}"
    assert decoded_documents(tmp_path / "out", "train") == [first, second]
    source = json.loads((tmp_path / "out/source.json").read_text())
    assert [(p["package"], p["version"]) for p in source["packages"]] == [("a-doc", "1.2-3"), ("b-doc", "1.2-3")]
    assert source["documents"] == 2 and source["text_bytes"] == len((first + second).encode())
    assert (tmp_path / "out/copyright-b-doc.txt").read_text() == "licence of b-doc\n"
    assert "reading a-doc: 1 pages" in capsys.readouterr().out
    debian_docs.main([*arguments, "--out-dir", str(tmp_path / "again")])
    assert "reading" not in capsys.readouterr().out
    assert decoded_documents(tmp_path / "again", "train") == [first, second]
    os.utime(make_docs(cache / "a-doc.deb", "a-doc", {"./usr/share/doc/a-doc/newer.txt": long.replace("longer", "newer")}), (0, 0))
    debian_docs.main([*arguments, "--out-dir", str(tmp_path / "newer")])
    said = capsys.readouterr().out
    assert "reading a-doc: 1 pages" in said and "reading b-doc" not in said
    assert decoded_documents(tmp_path / "newer", "train")[0] == long.replace("longer", "newer")


def test_debian_docs_keep_words_apart():
    page = debian_docs.Page()
    page.feed("<p>first line<br>of <b>bo</b>ld <code>text</code>s</p><div><h5>Heading</h5>Text</div><dl><dt>a</dt><dd>b</dd></dl>")
    assert page.paragraphs == ["first line of bold texts", "Heading Text", "b"]


def test_debian_docs_downloads(tmp_path, monkeypatch):
    """Every package is downloaded once, into a cache that holds others; a name that apt doesn't have is said."""
    for name in "a-doc", "b-doc":
        prose = " ".join(f"This is sentence {i} of the text in {name}." for i in range(9))
        make_docs(tmp_path / f"apt/{name}_1.2-3_all.deb", name, {f"./usr/share/doc/{name}/page.txt": prose})
    script = write(tmp_path / "bin/apt-get", f"""#!/bin/sh
for name; do :; done
if ! cp {tmp_path}/apt/$name*_*.deb . 2>/dev/null; then echo "E: Unable to locate package $name" >&2; echo "E: Couldn't find any package by regex '$name'" >&2; exit 100; fi
echo "$name" >> {tmp_path}/downloaded
""")
    available = script.read_text()
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    cache = ["--cache-dir", str(tmp_path / "cache"), "--tokenizer", "byte", "--val-fraction", "0"]
    for out in "out", "again":
        debian_docs.main(["--packages", "a-doc,b-doc", *cache, "--out-dir", str(tmp_path / out)])
        assert len(decoded_documents(tmp_path / out, "train")) == 2
    assert (tmp_path / "downloaded").read_text().split() == ["a-doc", "b-doc"]
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["a-doc.deb", "a-doc.jsonl", "b-doc.deb", "b-doc.jsonl"]
    with pytest.raises(InputError, match=r"a-d \(it has a-doc\).*--packages"):  # apt-get takes what begins so
        debian_docs.main(["--packages", "a-d", *cache, "--out-dir", str(tmp_path / "more")])
    (tmp_path / "cache/b-doc.deb").unlink()
    debian_docs.main(["--packages", "c-doc|b-d|b-doc,a-d|a-doc", *cache, "--out-dir", str(tmp_path / "alternatives")])
    assert len(decoded_documents(tmp_path / "alternatives", "train")) == 2 and (tmp_path / "cache/b-doc.deb").is_file()
    (tmp_path / "cache/b-doc.deb").unlink()
    script.write_text("#!/bin/sh\necho 'E: Temporary failure resolving' >&2; exit 100\n")
    with pytest.raises(InputError, match=r"download b-doc \(Temporary failure resolving\): "):  # not a-doc instead
        debian_docs.main(["--packages", "b-doc|c-doc", *cache, "--out-dir", str(tmp_path / "more")])
    script.write_text(available)
    with pytest.raises(InputError, match=r"c-doc \(Unable to locate package c-doc\).*--packages, or put .*/cache/c-doc.deb"):
        debian_docs.main(["--packages", "a-doc,c-doc", *cache, "--out-dir", str(tmp_path / "more")])


def test_debian_docs_refuses(tmp_path, monkeypatch):
    broken = write(tmp_path / "cache/x-doc.deb", b"PK")
    out = ["--out-dir", str(tmp_path / "out"), "--cache-dir", str(broken.parent)]
    with pytest.raises(InputError, match="not a Debian package"):
        debian_docs.main(["--packages", "x-doc", *out])
    make_docs(tmp_path / "cache/z-doc.deb", "z-doc", {"./usr/share/doc/z-doc/latin.txt": b"It is the caf\xe9 of the town. " * 20})
    for _ in range(2):
        with pytest.raises(InputError, match="z-doc.deb has no page of English prose"):
            debian_docs.main(["--packages", "z-doc", *out])
    with pytest.raises(InputError, match="--packages names none"):
        debian_docs.main(["--packages", ",", *out])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no apt-get on this system"):
        debian_docs.main(["--packages", "y-doc", *out])
    assert not (tmp_path / "out").exists() or not list(tmp_path.glob("out/*"))
