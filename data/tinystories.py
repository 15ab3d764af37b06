#!/usr/bin/env python3
"""TinyStories (2.2 GB of text written by GPT-4): downloads it, or takes local copies, and writes token files.

Downloaded, its own validation file is used and --val-fraction is not.
"""

from documents import file_source
from download import download
from prepare import Parser, add_output_options, check_output_options, given_val, prepare, print_summary, run, split_val

URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/"
TRAIN_FILE, VAL_FILE = "TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"


def main(arguments):
    parser = Parser(prog="tinystories.py", description=__doc__)
    parser.add_argument(
        "--from-file", nargs="+", metavar="PATH", help=f"local copies of {TRAIN_FILE}, or .jsonl or .parquet of it"
    )
    parser.add_argument("--val-from-file", nargs="+", metavar="PATH", help=f"local copies of {VAL_FILE}")
    add_output_options(parser, tokenizer="train:8192")
    options = parser.parse_args(arguments)
    if options.val_from_file and not options.from_file:
        parser.error("--val-from-file belongs to --from-file")
    check_output_options(options)
    train, val = options.from_file, options.val_from_file
    if not train:
        train, val = [download(URL + TRAIN_FILE, options.out_dir)], [download(URL + VAL_FILE, options.out_dir)]
    if val:
        val_source = file_source(val)
        parts = given_val(file_source(train, besides=val_source.files), val_source)
    else:
        parts = split_val(file_source(train), options.val_fraction)
    print_summary(prepare(parts, options), options.out_dir)


if __name__ == "__main__":
    run(main)
