#!/usr/bin/env python3
"""Tiny Shakespeare (1.1 MB): downloads it, or takes a local copy, and writes token files.

The last tenth is for validation.
"""

from documents import file_source
from download import download, sha256
from prepare import Parser, add_output_options, check_output_options, prepare, print_summary, run, split_val
from token_files import InputError

URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
    "/data/tinyshakespeare/input.txt"
)
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def main(arguments):
    parser = Parser(prog="tinyshakespeare.py", description=__doc__)
    parser.add_argument("--from-file", metavar="PATH", help="a local input.txt instead of a download")
    add_output_options(parser, tokenizer="byte", val_fraction=0.1)
    options = parser.parse_args(arguments)
    check_output_options(options)
    path = options.from_file or downloaded(options.out_dir)
    print_summary(prepare(split_val(file_source([path]), options.val_fraction), options), options.out_dir)


def downloaded(out_dir):
    path = download(URL, out_dir)
    if sha256(path) != SHA256:
        raise InputError(f"{path} is not Tiny Shakespeare (its SHA-256 isn't {SHA256}): remove it and try again")
    return path


if __name__ == "__main__":
    run(main)
