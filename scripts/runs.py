#!/usr/bin/env python3
"""Lists runs: recipe, steps, losses, speed, and whether they run, have finished, were stopped or diverged.

Directories are searched for logs of train_gpt_mxfp8. The best validation loss comes first; --sort takes another column.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from logs import InputError, Parser, Run, main_of, number, recipes_in_words
from report import print_table

STEPS_OF_SPEED = 100  # the last ones, whose median is the speed


def finite(value):
    """Returns a number, None for one that isn't finite."""
    return float(value) if np.isfinite(value) else None


def last(events, field):
    return finite(number(events[-1].get(field))) if events else None


def best_val_loss(run):
    losses = [number(event.get("loss")) for event in run.val]
    return finite(min((loss for loss in losses if np.isfinite(loss)), default=np.nan))


def tokens_per_second(run):
    speeds = run.series(run.train, "tokens_per_second")[1][-STEPS_OF_SPEED:]
    return finite(np.median(speeds)) if len(speeds) else None


def row_of(path):
    """Returns what the list says of a run, a value or None for each column."""
    run = Run(path)
    return {
        "name": run.name,
        "recipe": recipes_in_words(run.recipes) or None,
        "step": run.last_step,
        "steps": run.config.get("total_steps") or None,
        "loss": last(run.train, "loss"),
        "best_val": best_val_loss(run),
        "tokens_per_second": tokens_per_second(run),
        "state": run.state,
        "tags": run.tags,
        "path": str(path.parent if path.name == "log.jsonl" else path),
    }


COLUMNS = ("name", "recipe", "step", "loss", "best_val", "tokens_per_second", "state", "tags", "path")
HEADS = {"step": "step:", "loss": "loss:", "best_val": "best val:", "tokens_per_second": "tok/s:"}  # as print_table() has them


def cell(row, column):
    value = row[column]
    if column == "step" and row["steps"]:
        return f"{value}/{row['steps']}"
    if value is None or value == []:
        return "–"
    if column == "tokens_per_second":
        return f"{value:,.0f}"
    text = f"{value:.4f}" if isinstance(value, float) else ",".join(value) if isinstance(value, list) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def order(column):
    """Returns a key to sort rows by: what has no value comes last, the fastest and the longest first."""
    sign = -1 if column in ("step", "tokens_per_second") else 1

    def key(row):
        value = row[column]
        return value is None, sign * value if isinstance(value, (int, float)) else str(value or "")

    return key


def logs_in(directory):
    if not Path(directory).exists():
        raise InputError(f"there is no {directory}: name a run, or a directory that holds some")
    return [Path(directory)] if Path(directory).is_file() else sorted(Path(directory).rglob("log.jsonl"))


def readable_rows(logs):
    for log in logs:
        try:
            yield row_of(log)
        except InputError as e:
            print(f"runs.py: left out: {e}", file=sys.stderr)


def main(arguments):
    parser = Parser(
        prog="runs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("directories", nargs="*", default=["runs"], metavar="DIR",
                        help="runs, or directories that hold some (default: runs)")
    parser.add_argument("--sort", choices=COLUMNS, default="best_val", help="the column to sort by (default: %(default)s)")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG",
                        help="only runs with this tag of their --tags; may be repeated")
    parser.add_argument("--json", action="store_true", help="print a JSON array with an object for each run")
    options = parser.parse_args(arguments)
    logs = dict.fromkeys(log for directory in options.directories for log in logs_in(directory))
    rows = [row for row in readable_rows(logs) if set(options.tag) <= set(row["tags"])]
    if not rows:
        raise InputError(f"no run{' with these tags' if options.tag else ''} in {', '.join(options.directories)}")
    rows.sort(key=order(options.sort))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table([HEADS.get(column, column) for column in COLUMNS], [[cell(row, c) for c in COLUMNS] for row in rows])


if __name__ == "__main__":
    main_of("runs.py", main)
