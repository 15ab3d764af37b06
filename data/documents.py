"""Documents: text files, JSON lines, parquet, and Hugging Face data sets, as a stream of pieces of text.

A source is a function without arguments that starts an iterator of Pieces afresh. A text file can be larger than the
memory: it comes in pieces. Rows of JSON lines and of tables come whole, one at a time.
"""

import glob
import json
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from token_files import END_OF_TEXT, InputError

TABLE_SUFFIXES = (".parquet", ".arrow")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
DATA_SUFFIXES = (".txt", ".md", *JSON_LINES_SUFFIXES, *TABLE_SUFFIXES)  # what a data set's directory is searched for
TEXT_TYPES = ("string", "large_string", "string_view")  # Arrow's
TEXT_FIELD = "text"  # where the text of a row is, unless it is said
SPLIT_NAMES = ("train", "validation", "valid", "val", "dev", "test")
PIECE_CHARS = 2**18
# In a text file end-of-text separates documents; the end of its line belongs to neither.
SEPARATOR = re.compile(re.escape(END_OF_TEXT) + r"(?:\r?\n)?")
LONGEST_SEPARATOR = len(END_OF_TEXT) + 2
WRITTEN_NAMES = ("tokenizer.json", "tokenizer_config.json", "source.json")  # beside tokenizer.bin, of a data set
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
UNPACKERS = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "zstd -d", b"BZh": "bunzip2", b"\xfd7zXZ\0": "unxz"}


class Piece(NamedTuple):
    starts_document: bool
    text: str


def file_source(paths, text_field=TEXT_FIELD, data_alone=False, besides=()):
    """The documents of files, directories (searched through) and glob patterns, in the order of their names. Leaves out
    files among `besides`, a set of real paths.

    Of a directory it takes everything that is text, or, with data_alone, files with a data set's endings. The source
    has has_fields, whether text_field is of any use for it, and files, real paths.
    """
    named = [(file, Path(path).is_dir()) for path in paths for file in expand(path, text_field, data_alone)]
    check_named_once([os.path.abspath(file) for file, _ in named])
    files = [(file, is_found) for file, is_found in named if os.path.realpath(file) not in besides]
    if len(files) < len(named):
        left_out = next(file for file, _ in named if os.path.realpath(file) in besides)
        if not files:
            raise InputError(f"all that is to be trained on, such as {left_out}, is for validation: name other files for one of the two")
        print(f"left out {len(named) - len(files)} of {len(named)} files, which are for validation, such as {left_out}")
    readers = [(file, reader_of_rows(file, is_found)) for file, is_found in files]

    def source():
        for file, rows in readers:
            yield from row_pieces(rows(file, text_field)) if rows else text_file_pieces(file)

    source.has_fields = any(rows for _, rows in readers)
    source.files = {os.path.realpath(file) for file, _ in files}
    return source


def check_named_once(files):
    seen = set()
    twice = next((file for file in files if file in seen or seen.add(file)), None)
    if twice:
        raise InputError(f"{twice} is named twice: name it once; where it is to count twice, name a copy too")


def reader_of_rows(path, is_found):
    """Returns what reads the texts of a file's rows; None for a text file, as a .json that is found in a directory is, such as
    a project's package.json."""
    if path.suffix in JSON_LINES_SUFFIXES or path.suffix == ".json" and not is_found:
        return json_lines
    return table_rows if path.suffix in TABLE_SUFFIXES else None


def row_pieces(texts):
    return (Piece(True, text) for text in texts if text.strip())


def expand(path, text_field, data_alone):
    path = str(path)
    if Path(path).is_dir():
        return data_files(path) if data_alone else text_files(path, text_field)
    files = [Path(path)] if Path(path).is_file() else [Path(p) for p in sorted(glob.glob(path, recursive=True))]
    files = [file for file in files if not file.is_dir()]
    if not files:
        raise InputError(f"{path} is neither a file, a directory nor a pattern that matches one: check the path")
    for file in files:
        if not file.is_file():
            raise InputError(f"{file} is not a regular file, and is read more than once: save it as one first")
        check_start(file)
        if file.suffix == ".json":
            check_json(file, text_field)
    return files


def files_within(directory):
    """All files, but those with a name, or in a directory with a name, that begins with a dot."""
    paths = sorted(path for path in Path(directory).rglob("*") if path.is_file())
    return [p for p in paths if not any(part.startswith(".") for part in p.relative_to(directory).parts)]


def data_files(directory):
    found = files_within(directory)
    files = [file for file in found if file.suffix in DATA_SUFFIXES]
    if not files:
        raise InputError(f"the directory {directory} holds no file named {', '.join('*' + s for s in DATA_SUFFIXES)}")
    if len(files) < len(found):
        other = next(file for file in found if file.suffix not in DATA_SUFFIXES)
        print(f"{directory}: left out {len(found) - len(files)} of {len(found)} files without a data set's endings, such as {other}")
    return files


def text_files(directory, text_field):
    """Returns those with a data set's endings, and all others that are text, but for what was written beside tokens. Says
    where a .json has rows, which aren't read as such there."""
    files, others, written = [], [], []
    for file in files_within(directory):
        kind = written if is_written(file) else files if file.suffix in DATA_SUFFIXES or is_text(file) else others
        kind.append(file)
    if written:
        print(f"{directory}: left out files that were written beside tokens, {len(written)} in all, such as {written[0]}")
    if not files:
        raise InputError(f"the directory {directory} holds no text (files whose names begin with a dot don't count)")
    if others:
        total = len(files) + len(others)
        print(f"{directory}: left out {len(others)} of {total} files that aren't UTF-8 text, such as {others[0]}")
    rows = [file for file in files if file.suffix == ".json" and isinstance((first_object(file) or {}).get(text_field), str)]
    if rows:
        print(f"{directory}: {rows[0]} is read as text, as .json is in a directory: name it itself to read it as JSON lines")
    return files


def is_written(path):
    """Whether a file describes a data set that was made here, perhaps by this program's last call."""
    return path.name in WRITTEN_NAMES and path.with_name("tokenizer.bin").is_file()


def is_text(path):
    try:
        for _ in text_file_pieces(path):
            pass
    except InputError:
        return False
    return True


def check_start(path):
    """Refuses a file that isn't text, as far as its first piece tells."""
    if path.suffix not in JSON_LINES_SUFFIXES and path.suffix not in TABLE_SUFFIXES:
        next(text_file_pieces(path), None)


def check_json(path, text_field):
    """Refuses a .json file that isn't JSON lines with that field: nobody who names one wants to train on its brackets."""
    row = first_object(path)
    if row is None:
        lines = shlex.quote(str(path.with_suffix(".jsonl")))
        raise InputError(
            f"{path} is not JSON lines, an object on every line: make them with jq -c '.[]' {shlex.quote(str(path))} > "
            f"{lines} of an array, with jq -c . of an object, or, to train on it as it is, name it .txt"
        )
    row_text(row, text_field, f"{path}, first line,")


def first_object(path):
    """Returns the object that is the first line of a file that isn't blank; None where that line is something else, such as an
    array, which may hold all of the data and isn't read."""
    with open(path, "rb") as file:
        if not file.read(PIECE_CHARS).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return None
        file.seek(0)
        return json_object(next((line for line in file if line.strip()), b""))


def text_file_pieces(path):
    def blocks(file):
        while block := file.read(PIECE_CHARS):
            if "\0" in block:  # which is UTF-8, but in no text
                raise not_text(path, 0)
            yield block

    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            yield from pieces_of_blocks(blocks(file))
        except UnicodeDecodeError as e:
            raise not_text(path, e.object[e.start]) from None


def not_text(path, byte):
    return encoded_otherwise(path) or InputError(
        f"{path} is not UTF-8 text (byte 0x{byte:02x}): leave it out, or, where it is text, convert it first, for "
        "example with iconv -f latin1 -t utf-8"
    )


def encoded_otherwise(path):
    """Returns the error for a file whose first bytes say how to make UTF-8 of it, or None."""
    with open(path, "rb") as file:
        start = file.read(6)
    if start.startswith(UTF16_MARKS):
        return InputError(f"{path} is UTF-16: convert it first, with iconv -f utf-16 -t utf-8")
    for magic, command in UNPACKERS.items():
        if start.startswith(magic):
            return InputError(f"{path} is compressed: unpack it first, with {command}")
    return None


def pieces_of_blocks(blocks):
    """Cuts a long document before a space that follows a character: GPT-2's words and their like end there, whatever
    comes next, so that the pieces have the tokens of the whole."""
    starts, pending = True, ""
    for block in blocks:
        pending += block
        starts, pending = yield from complete_documents(starts, pending, len(pending) - 2)
        cut = cut_position(pending)
        if cut:
            yield Piece(starts, pending[:cut])
            starts, pending = False, pending[cut:]
    starts, pending = yield from complete_documents(starts, pending, len(pending))
    if pending.strip() or not starts and pending:
        yield Piece(starts, pending)


def complete_documents(starts, pending, last_end):
    """Yields the documents closed by a separator that ends by `last_end`; returns what follows the last of them."""
    begin = 0
    for separator in SEPARATOR.finditer(pending):
        if separator.end() > last_end:
            break  # the end of its line may be in the next block
        text = pending[begin : separator.start()]
        if text.strip() or not starts and text:
            yield Piece(starts, text)
        starts, begin = True, separator.end()
    return starts, pending[begin:]


def cut_position(text):
    """Where to cut a piece off the text of a document that goes on; 0 while it is short."""
    limit = len(text) - LONGEST_SEPARATOR - 1  # a separator may have begun, or end before the last character
    if limit < PIECE_CHARS:
        return 0
    space = limit
    while (space := text.rfind(" ", 0, space)) > 0:
        if not text[space - 1].isspace():
            return space
    return limit


def json_object(line):
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def json_lines(path, text_field):
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            row = json_object(line)
            if row is None:
                raise encoded_otherwise(path) or InputError(
                    f"{path}, line {number}, is not a JSON object: every line must be one, in UTF-8"
                )
            yield row_text(row, text_field, f"{path}, line {number}")


def row_text(row, text_field, where):
    """Returns the text of a row: none where the field is null, as in a table; a field that isn't there is an error."""
    text = row.get(text_field)
    if text is None and text_field in row:
        return ""
    if not isinstance(text, str):
        fields = ", ".join(str(k) for k, v in row.items() if isinstance(v, str)) or "none"
        raise InputError(
            f"{where} has no text in the field {text_field!r}: pass --text-field (fields with text: {fields})"
        )
    # JSON can spell half a surrogate pair, which is no character
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def table_rows(path, text_field):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"reading {path} needs pyarrow: pip install -r data/requirements.txt") from None
    name = os.fsencode(path)  # which may not be UTF-8
    try:
        if path.suffix == ".parquet":
            with pyarrow.OSFile(name) as source, pyarrow.parquet.ParquetFile(source) as file:
                check_column(file.schema_arrow, text_field, path)
                batches = file.iter_batches(batch_size=1024, columns=[text_field])
                yield from column_texts(batches, text_field)
        else:
            # Arrow's stream format is what the datasets library saves; its file format begins with ARROW1
            with pyarrow.memory_map(name) as file:
                is_file = file.read(6) == b"ARROW1"
                file.seek(0)
                with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file) as reader:
                    check_column(reader.schema, text_field, path)
                    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
                    yield from column_texts(batches, text_field)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise InputError(
            f"can't read {path} as {path.suffix[1:]}: {str(e).splitlines()[0]}; get a whole copy"
        ) from None


def check_column(schema, text_field, path):
    if schema.names.count(text_field) > 1:
        raise InputError(f"{path} has the field {text_field!r} more than once: name them apart, or pass --text-field")
    of_text = [field.name for field in schema if holds_text(field.type)]
    if text_field not in of_text and (text_field not in schema.names or str(schema.field(text_field).type) != "null"):  # all rows
        names = ", ".join(of_text) or "none"
        raise InputError(
            f"{path} has no text in the field {text_field!r}: pass --text-field (fields with text: {names})"
        )


def holds_text(column):
    """Whether a column of that type holds texts, themselves or as places in a dictionary of them."""
    return str(column.value_type if str(column).startswith("dictionary") else column) in TEXT_TYPES


def column_texts(batches, text_field):
    for batch in batches:
        batch.validate(full=True)  # offsets of a damaged file may lead anywhere
        yield from (text or "" for text in batch.column(text_field).to_pylist())


def dataset_source(name, config=None, split=None, text_field=TEXT_FIELD):
    """The documents of a data set: a local directory of parquet, arrow, JSON lines or text files, or a hub's name."""
    if Path(name).is_dir():
        return file_source(split_files(Path(name), split), text_field)
    return hub_source(name, config, split or "train", text_field)


def split_files(directory, split):
    """The files whose name or directory says `split`; without one, those of "train", or all where no name says any."""
    files = [file for file in data_files(directory) if file.suffix != ".md"]  # a data set's README is not of it

    def of_split(name):
        pattern = re.compile(rf"(^|[/._-]){re.escape(name)}([/._0-9-]|$)")
        return [f for f in files if pattern.search(f.relative_to(directory).as_posix())]

    chosen = of_split(split or "train")
    present = [name for name in SPLIT_NAMES if of_split(name)]
    if not chosen and (split or present):
        remedy = f"pass --split with one of {', '.join(present)}" if present else "its files' names tell none, so leave --split out"
        raise InputError(f"no file of {directory} belongs to the split {split or 'train'!r}: {remedy}")
    return chosen or files


def hub_source(name, config, split, text_field):
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{name} is not a local directory, and getting it from the Hugging Face hub needs the datasets library: "
            ".venv/bin/pip install datasets, or download the data set and pass its directory (prepare.py --dataset DIR, "
            "fineweb.py and tinystories.py --from-file DIR)"
        ) from None

    def source():
        try:
            rows = iter(datasets.load_dataset(name, config, split=split, streaming=True))
            yield from row_pieces(row_text(row, text_field, f"{name}, row {i}") for i, row in enumerate(rows))
        except InputError:
            raise
        except Exception as e:  # whatever the network, the hub or the library has to say
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise InputError(
                f"can't read the data set {name} from the Hugging Face hub ({reason}): check the name and the network, "
                "or download it elsewhere and pass its directory (prepare.py --dataset DIR, fineweb.py and tinystories.py "
                "--from-file DIR)"
            ) from None

    source.has_fields = True
    return source


def split_source(source, val_fraction):
    """An iterator of (split, Piece): which documents, or parts of documents, are for validation.

    With more than 10 / val_fraction documents, every (1 / val_fraction)-th document is. With fewer, the last part of
    each document is, beginning with a line.
    """
    if val_fraction == 0:
        yield from (("train", piece) for piece in source())
        return
    lengths = document_lengths(source, at_most=int(10 / val_fraction))
    if lengths is None:
        yield from split_by_document(source(), val_fraction)
    else:  # validation first, since --max-tokens ends with training's
        for wanted in ("val", "train"):
            yield from (part for part in split_tails(source(), lengths, val_fraction) if part[0] == wanted)


def document_lengths(source, at_most):
    """Characters of each document; None where there are more than `at_most` documents."""
    lengths = []
    for piece in source():
        if piece.starts_document:
            lengths.append(0)
            if len(lengths) > at_most:
                return None
        lengths[-1] += len(piece.text)
    return lengths


def split_by_document(pieces, val_fraction):
    document = -1
    for piece in pieces:
        document += piece.starts_document
        is_val = int((document + 1) * val_fraction) > int(document * val_fraction)
        yield ("val" if is_val else "train"), piece


def split_tails(pieces, lengths, val_fraction):
    lengths = iter(lengths)
    for piece in pieces:
        if piece.starts_document:
            until_val = round(next(lengths) * (1 - val_fraction))
            in_val = False
        if in_val:
            yield "val", Piece(False, piece.text)
            continue
        if len(piece.text) <= until_val:
            until_val -= len(piece.text)
            yield "train", piece
            continue
        newline = piece.text.find("\n", until_val)
        cut = newline + 1 if 0 <= newline < len(piece.text) - 1 else until_val
        if cut:
            yield "train", Piece(piece.starts_document, piece.text[:cut])
        yield "val", Piece(True, piece.text[cut:])
        in_val = True
