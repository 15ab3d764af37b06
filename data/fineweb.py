#!/usr/bin/env python3
"""FineWeb-Edu: streams it from the Hugging Face hub, or takes local files, and writes token files.

The hub needs the datasets library (pip install datasets). The default is the sample of 10 billion GPT-2 tokens: 20 GB
of token files, and hours of tokenizing.
"""

from documents import dataset_source, file_source
from prepare import Parser, add_output_options, check_output_options, prepare, print_summary, run, split_val

NAME = "HuggingFaceFW/fineweb-edu"


def main(arguments):
    parser = Parser(prog="fineweb.py", description=__doc__)
    parser.add_argument(
        "--from-file", nargs="+", metavar="PATH", help="local .parquet or .jsonl files, directories or quoted patterns"
    )
    parser.add_argument(
        "--dataset-config",
        metavar="NAME",
        help="sample-10BT, sample-100BT, sample-350BT or default, which is all of it (default: sample-10BT)",
    )
    add_output_options(parser, tokenizer="gpt2", val_fraction=0.001)
    options = parser.parse_args(arguments)
    check_output_options(options)
    if options.from_file and options.dataset_config:
        parser.error("--dataset-config names what is downloaded: leave it out beside --from-file")
    if options.from_file:
        source = file_source(options.from_file, data_alone=True)
    else:
        source = dataset_source(NAME, options.dataset_config or "sample-10BT")
    print_summary(prepare(split_val(source, options.val_fraction), options), options.out_dir)


if __name__ == "__main__":
    run(main)
