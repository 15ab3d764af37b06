"""Runs of train_gpt_mxfp8 for an experiment: recipes by name, one run after another, each in a directory of its own.

What was finished isn't done again, and what was interrupted goes on from its last checkpoint.
"""

import argparse
import contextlib
import glob
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np
from logs import (
    ADJUSTMENTS,
    ENDS,
    NOT_FINITE,
    InputError,
    Parser,
    Run,
    Stopped,
    number,
    write_whole,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "data"))
from locks import is_taken  # noqa: E402
from whole_numbers import whole_number_of  # noqa: E402

EXIT_NOT_FINITE = 3
TRAINS_NOTHING = ("help", "h", "device-info", "dry-run", "generate")


class Recipe(NamedTuple):
    name: str
    options: tuple  # of train_gpt_mxfp8
    words: str
    in_paper: bool = False  # a curve of "Recipes for Pre-training LLMs with MXFP8" (arXiv 2506.08027)
    finding: str = "–"  # what that paper says of it, or another that is named; a dash for nothing


def recipe(text, words, name=None, in_paper=False, finding="–"):
    base, *adjustments = text.split("+")
    options = ["--recipe", base]
    for adjustment in adjustments:
        option, equals, value = adjustment.partition("=")
        if option not in ADJUSTMENTS:
            raise InputError(
                f"{text}: '{adjustment}' is not an adjustment of a recipe, such as scale-rounding-gradients=floor; "
                "options that all runs share follow --"
            )
        options += [f"--{option}", value] if equals else [f"--{option}"]
    return Recipe(name or text, tuple(options), words, in_paper, finding)


BASELINE = "bf16"
FOLLOWS = "within 0.50 % of BF16 (8B parameters, 15T tokens)"
DIVERGES = "a higher loss, or divergence"
LOSES = "somewhat worse than E4M3 at larger scale"
LOSES_MOST = "diverges or falls behind (section 3.1, figure 2)"
WORSE = "worse than E4M3"
PROPOSED = "arXiv 2506.20752 proposes it against instability"
NAIVE = "the pitfall that its appendix warns of"
NEAR_LOSSLESS = "arXiv 2502.20586: nearly without loss, up to 6.7B parameters"
CULPRIT = "arXiv 2605.09825: wgrad diverges, a fixed transform mends it, a random one and stochastic rounding don't"
NEEDED = "arXiv 2509.25149 needs both, and its last blocks in BF16, to follow FP8 (12B, 10T tokens)"
CLAMPED_GAINS = "arXiv 2506.20752 blames clamped gains for divergence"
OPERANDS = ("fprop-x", "fprop-w", "dgrad-dy", "dgrad-w", "wgrad-dy", "wgrad-x")
STOCHASTIC = {"wgrad-dy": "element-rounding-gradients=stochastic", "wgrad-x": "element-rounding-activations=stochastic"}


def wgrad_in_fp4():
    """Returns recipes with wgrad in MXFP4 or NVFP4, or one of its operands, and all else in BF16: as it is, and with a
    Hadamard transform of fixed or random signs, with stochastic rounding, and for wgrad with both."""
    recipes = []
    for name, words, *operands in (
        ("wgrad", "wgrad", "wgrad-dy", "wgrad-x"),
        ("wgrad-dy", "wgrad's dY", "wgrad-dy"),
        ("wgrad-x", "wgrad's X", "wgrad-x"),
    ):
        stochastic, tensor = STOCHASTIC[operands[0]], "X" if name == "wgrad-x" else "dY"
        variants = {
            "": ("", "the rest BF16"),
            "-fixed": ("+hadamard-wgrad=fixed", "fixed signs"),
            "-random": ("+hadamard-wgrad=random", "random signs"),
            "-stochastic": (f"+{stochastic}", f"{tensor} rounded stochastically"),
        }
        if name == "wgrad":
            variants["-both"] = (f"+hadamard-wgrad=fixed+{stochastic}", "fixed signs and dY rounded stochastically")
        others = "".join(f"+operand={operand}=bf16" for operand in OPERANDS if operand not in operands)
        for format, finding, text in (
            ("mxfp4", CULPRIT, "bf16" + "".join(f"+operand={operand}=e2m1" for operand in operands)),
            ("nvfp4", NEEDED, "nvfp4" + others),
        ):
            recipes += (
                recipe(text + added, f"{words} in {format.upper()}, {besides}", f"{name}-{format}{variant}", finding=finding)
                for variant, (added, besides) in variants.items()
            )
    return recipes


RECIPES = {
    r.name: r
    for r in (
        recipe("bf16", "all BF16: the baseline", in_paper=True),
        recipe("mxfp8", "all E4M3, scales rounded up (rceil)", in_paper=True, finding=FOLLOWS),
        recipe("mxfp8-ocp", "all E4M3, scales rounded down (floor)", in_paper=True, finding=DIVERGES),
        recipe("mxfp8-e5m2-gradients", "gradients E5M2, rceil", "e5m2-gradients", True, LOSES),
        recipe(
            "mxfp8-e5m2-gradients+scale-rounding=floor",
            "gradients E5M2, floor",
            "e5m2-gradients-floor",
            True,
            LOSES_MOST,
        ),
        *(
            recipe(
                f"mxfp8-e5m2-gradients+scale-rounding={rounding}",
                f"gradients E5M2, {rounding}",
                f"e5m2-gradients-{rounding}",
            )
            for rounding in ("ceil", "even")
        ),
        recipe("mxfp8+format-weights=e5m2", "weights E5M2, rceil", "e5m2-weights", True, WORSE),
        recipe("mxfp8+format-activations=e5m2", "activations E5M2, rceil", "e5m2-activations", True, WORSE),
        recipe("mxfp8-forward-only", "E4M3 in fprop, BF16 in the backward pass", "forward-only", finding=PROPOSED),
        recipe("mxfp8-weights-only", "weights E4M3, the rest BF16", "weights-only"),
        recipe(
            "mxfp8+format-activations=bf16",
            "weights and gradients E4M3, activations BF16",
            "bf16-activations",
            finding=PROPOSED,
        ),
        recipe("mxfp8+bf16-first-layers=1+bf16-last-layers=1", "E4M3, first and last block BF16", "bf16-ends"),
        recipe("mxfp8+weight-scaling=2d", "E4M3, weights in blocks of 32x32", "2d-weights"),
        recipe("mxfp8+scale-rounding=ceil", "E4M3, amax up to a power of two (ceil)", "ceil", finding=NAIVE),
        recipe("mxfp8+scale-rounding=even", "E4M3, amax rounded, then down (even)", "even"),
        *(
            recipe(f"mxfp8+scale-rounding-{role}={rounding}", f"E4M3, rceil; {role} {rounding}", f"{rounding}-{role}")
            for rounding in ("floor", "ceil", "even")
            for role in ("weights", "activations", "gradients")
        ),
        recipe("mxfp8+quantize-ln-affine", "E4M3, rceil; norms' gains too", "gains"),
        recipe("mxfp8-ocp+quantize-ln-affine", "E4M3, floor; norms' gains too", "gains-floor", finding=CLAMPED_GAINS),
        recipe("mxfp6-e2m3", "all E2M3, rceil"),
        recipe("mxfp6-e3m2", "all E3M2, rceil"),
        recipe("mxfp4", "all E2M1, rceil"),
        *(
            recipe(f"{name}+scale-rounding={rounding}", f"all {format}, {rounding}", f"{name}-{rounding}")
            for name, format in (("mxfp6-e2m3", "E2M3"), ("mxfp6-e3m2", "E3M2"), ("mxfp4", "E2M1"))
            for rounding in ("floor", "ceil", "even")
        ),
        recipe("mxfp4+weight-scaling=2d", "all E2M1, weights in blocks of 32x32", "mxfp4-2d-weights"),
        recipe("fp8-current", "E4M3, gradients E5M2, one scale per tensor"),
        recipe("fp8-delayed", "E4M3, gradients E5M2, one scale per tensor, of earlier steps' amaxes"),
        recipe("fp8-blockwise", "all E4M3, scales by 1x128, weights' by 128x128"),
        recipe("fp8-blockwise-fp32", "all E4M3, scales by 1x128, weights' by 128x128, in FP32"),
        recipe("nvfp4", "all E2M1, E4M3 scales by 16"),
        recipe("nvfp4+weight-scaling=1d", "NVFP4, weights in blocks of 16, not 16x16", "nvfp4-1d-weights"),
        recipe(
            "nvfp4-nvidia",
            "NVFP4, Hadamard transform in wgrad, gradients rounded stochastically",
            finding=NEEDED,
        ),
        recipe("nvfp4-46", "NVFP4, four over six"),
        recipe("mxfp8-nvfp4", "fprop MXFP8, backward NVFP4"),
        recipe("nvfp4-mxfp8", "fprop NVFP4, backward MXFP8"),
        recipe("mxfp4-sr", "fprop BF16; backward E2M1, transformed and rounded stochastically", finding=NEAR_LOSSLESS),
        recipe(
            "nvfp4-nvidia+bf16-last-layers=1",
            "nvfp4-nvidia, its last block in BF16",
            "nvfp4-published",
            finding=NEEDED,
        ),
        *wgrad_in_fp4(),
    )
}
DEFAULT_RECIPES = "bf16,mxfp8,mxfp8-ocp"


class Pair(NamedTuple):
    """Two recipes that are compared."""

    recipe: Recipe
    base: Recipe

    @property
    def label(self):
        return f"{self.recipe.name} against {self.base.name}"


def named(name):
    return RECIPES.get(name) or recipe(name, name)


def chosen_pairs(text, against=BASELINE):
    """Returns the recipes of a list of names, adjusted recipes, pairs such as mxfp8-ocp:mxfp8,
    `all` and `paper`, what others are compared with first; and the Pairs: a name by itself is
    compared with `against`."""
    groups = {"all": list(RECIPES), "paper": [r.name for r in RECIPES.values() if r.in_paper]}
    given = [word.strip() for word in text.split(",") if word.strip()]
    words = [name for word in given for name in groups.get(word, [word])]
    twice = {word for word in words if words.count(word) > 1}
    if twice or not words:
        raise InputError(f"--recipes {text} names {min(twice) + ' twice' if twice else 'none'}: --list shows the names")
    pairs = [Pair(*map(named, pair_of(word, against))) for word in words]
    recipes = dict.fromkeys([*(pair.base for pair in pairs), *(pair.recipe for pair in pairs)])
    return list(recipes), [pair for pair in dict.fromkeys(pairs) if pair.recipe != pair.base]


def pair_of(word, against):
    """Returns the names of a recipe and of the one that it is compared with; the colons of
    the adjustments recipe-at=STEP:NAME and operand-in=LINEARS:OPERANDS=FORMAT are no pair's."""
    names = re.findall(r"(?:recipe-at=\d+:|operand-in=[^:]*:|[^:])+", word)
    if len(names) > 2 or ":" in (word[0], word[-1]):
        raise InputError(f"--recipes: {word} is neither a recipe nor a pair such as mxfp8-ocp:mxfp8")
    return names[0], names[1] if len(names) == 2 else against


ROUNDINGS = {"rceil": "mxfp8", "floor": "mxfp8-ocp"}  # of scales; ceil and even are names of recipes


def names_of_ours(complaint):
    """Returns, for a recipe that the program doesn't know, the one that was meant, or the names
    that recipes have here alone."""
    unknown = re.search("--recipe has no choice '(.*?)'", complaint)
    if not unknown:
        return ""
    if unknown[1] in ROUNDINGS:
        return f"; the recipe that rounds scales so is {ROUNDINGS[unknown[1]]}"
    return f"; besides, --recipes takes {', '.join(name for name in RECIPES if name != RECIPES[name].options[1])}"


def list_recipes():
    for r in RECIPES.values():
        print(f"{r.name:22} {r.words:48} {' '.join(r.options)}")
    print(
        "\nor any recipe of train_gpt_mxfp8 with adjustments, which are its options: "
        "mxfp8+scale-rounding-gradients=floor; mxfp8-ocp:mxfp8 compares the first with the second"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The options that all runs have in common


def option_value(options, name):
    """Returns what the list of options gives for --name, the last time that counts; None where it
    doesn't name it."""
    value = None
    for option, following in zip(options, [*options[1:], ""]):
        if option == f"--{name}":
            value = following
        elif option.startswith(f"--{name}="):
            value = option.partition("=")[2]
    return value


def whole_number(options, name):
    """Returns the whole number that the list of options gives for --name, with or without a suffix of the program's."""
    text = option_value(options, name)
    number = whole_number_of(text)
    if number is None:
        raise InputError(f"--{name} takes a whole number, not '{text}'")
    return number


def without_option(options, name):
    """Returns the options without --name and its value."""
    kept, rest = [], iter(options)
    for word in rest:
        if word == f"--{name}":
            next(rest, None)
        elif not word.startswith(f"--{name}="):
            kept.append(word)
    return kept


def check_common(options, own, needed):
    """Refuses options after -- that can't be common to all runs: the experiment's `own`, and what
    none allows."""
    written = [option.partition("=")[0] for option in options if option.startswith("-")]
    named = {option.lstrip("-").removeprefix("no-"): option for option in written}
    for name in TRAINS_NOTHING:
        if name in named:
            raise InputError(f"{named[name]} trains nothing: leave it out of what follows --")
    for name in ADJUSTMENTS:
        if name in named:
            raise InputError(
                f"{named[name]} after -- would change every recipe, the baseline too: adjust a recipe by it in "
                "--recipes, as in mxfp8+format-weights=e5m2"
            )
    if "config" in named:
        raise InputError("--config after -- may hold what is set for each run: give its options themselves")
    if "max-minutes" in named:
        raise InputError("--max-minutes would end each run at another step: leave it out of what follows --")
    for name in own:
        if name in named:
            raise InputError(f"{named[name]} is set for each run: leave it out of what follows --")
    for name in needed:
        if name not in named:
            raise InputError(f"there is no --{name}: give train_gpt_mxfp8's options after --, as --help shows")


def experiment_parser(prog, usage, description, epilog):
    """Returns a parser of an experiment's own options, with those that all have."""
    parser = Parser(prog=prog, usage=usage, description=description, epilog=epilog, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-dir", type=Path, metavar="DIR", help="for the runs, a directory each, and the report")
    parser.add_argument("--list", action="store_true", help="show the recipes' names, and stop")
    parser.add_argument("--seed", type=int, default=1337, metavar="N", help="the first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N",
                        help="how many seeds; a seed sets initial weights and the order of the data, "
                        "the same for all recipes (default: %(default)s)")
    parser.add_argument(
        "--against", default=BASELINE, metavar="NAME", help="what recipes are compared with (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="runs that train at once; each has its part of the processor's cores, unless --threads follows "
                        "-- (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a miniature that needs no data: runs of 20 steps or so")
    parser.add_argument("--program", type=Path, default=ROOT / "train_gpt_mxfp8", metavar="PATH",
                        help="the program that trains (default: %(default)s)")
    return parser


def parse_experiment(parser, arguments):
    """Parses the experiment's own options; those after --, of train_gpt_mxfp8, are `common`."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.common = arguments[cut + 1 :]
    if options.seed < 0:
        parser.error("--seed must not be negative")
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.jobs > 1 and not options.tiny:  # whose runs have one thread
        options.common = with_defaults(options.common, threads=max(1, len(os.sched_getaffinity(0)) // options.jobs))
    return options


def seeds_of(options):
    return [options.seed + i for i in range(options.seeds)]


def with_defaults(options, **defaults):
    """Returns the options, and those of the defaults that they don't name; None leaves the
    program's own."""
    named = {name.replace("_", "-"): value for name, value in defaults.items() if value is not None}
    missing = [(f"--{name}", str(value)) for name, value in named.items() if option_value(options, name) is None]
    return [*options, *(word for pair in missing for word in pair)]


# ---------------------------------------------------------------------------------------------------------------------
# Running


class Job(NamedTuple):
    name: str  # of the run's directory
    options: tuple  # all but --out-dir


def lock_directory(directory):
    """Returns a file that holds the directory; a program that inherits it holds it too, where only
    the script was killed."""
    lock = os.open(directory / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    if is_taken(lock):
        raise InputError(f"{directory} is in use: wait for the run that writes there, or choose another directory")
    return lock


class Length(NamedTuple):
    """Of a run, as the program plans it."""

    tokens_per_step: int
    micro_batches: int  # of a step
    steps: int


def what_is_trained(command):
    """Returns a command without --out-dir and --threads: where a run lies, and how many threads it has, makes it no other."""
    kept = list(command)
    for name in ("--out-dir", "--threads"):
        while name in kept:
            at = kept.index(name)
            del kept[at : at + 2]
    return kept


class Runner:
    """Runs jobs in the directory OUT, which it has for itself, some at once."""

    def __init__(self, program, out_dir, at_once=1):
        program, self.out_dir = Path(program), Path(out_dir)
        if not program.is_file():
            raise InputError(f"there is no program {program}: build it with make, or name it with --program")
        # As a user would type it, in commands that are written down; Path drops the ./ of a program in this directory.
        self.program = os.path.join(program.parent, program.name)
        self.executable = str(program.resolve())
        self.out_dir.mkdir(parents=True, exist_ok=True)
        self.lock = lock_directory(self.out_dir)
        self.at_once = at_once
        self.processes, self.stopped_by = set(), None  # that run; the signal that ended them, or the error

    def command(self, job):
        """Returns the command of the job from its start, as it is written down."""
        return [self.program, *job.options, "--out-dir", str(self.out_dir / job.name)]

    def check(self, jobs):
        """Lets the program look at the options of every job that hasn't ended before the first one starts."""
        for job in jobs:
            self.check_same(job)
            if end_of(self.out_dir / job.name):
                continue
            # A directory that isn't there: the plan doesn't depend on what an earlier run left.
            done = subprocess.run([self.executable, *job.options, "--dry-run"], capture_output=True, text=True)
            if done.returncode != 0:
                raise InputError(f"{job.name}: {complaint(done.stderr)}")

    def length(self, options):
        """Returns the Length of a run with these options, from what --dry-run prints."""
        plan = output_of([self.executable, *options, "--dry-run"])
        said = re.search(r"\((\d+) sequences? of (\d+), (\d+) micro-batch(?:es)?\), (\d+) step", plan)
        if not said:
            raise InputError("the runs have no end: give --max-steps or --max-tokens after --")
        sequences, length, micro_batches, steps = map(int, said.groups())
        return Length(sequences * length * micro_batches, micro_batches, steps)

    def seconds(self, options, steps=6):
        """Returns the seconds of a step (the median, without the first) and of a validation, from a
        short run that leaves nothing behind."""
        often = ("val-every", "quant-stats-every", "checkpoint-every", "warmup-steps")
        with tempfile.TemporaryDirectory() as directory:
            words = [*without_option(options, "warmup-from"), "--max-steps", str(steps),
                     *(w for name in often for w in (f"--{name}", "0"))]
            output_of([self.executable, *words, "--out-dir", directory])
            run = Run(directory)
            return float(np.median(run.series(run.train, "seconds")[1][1:])), run.val[-1]["seconds"]

    def check_same(self, job):
        directory = self.out_dir / job.name
        written = directory / "command.txt"
        if not (directory / "log.jsonl").exists() and not (directory / "latest").exists():
            return  # nothing there yet, or the program refused the command before it trained
        if not written.is_file():
            raise InputError(f"{directory} holds a run that wasn't started from here: choose another --out-dir")
        if not self.is_of(job):
            raise InputError(
                f"{directory} holds a run of another command ({written} has it): give the same options, choose another "
                "--out-dir, or remove that directory"
            )

    def is_of(self, job):
        """Returns whether the job's directory says that this command runs in it, wherever it lay then."""
        written = self.out_dir / job.name / "command.txt"
        return written.is_file() and what_is_trained(shlex.split(written.read_text())) == what_is_trained(self.command(job))

    def run(self, jobs, then=None):
        """Brings every job to its end, calls then(directory) after each, and returns their Runs. A
        signal, or the first job that fails, ends the others, which save a checkpoint."""
        self.check(jobs)
        numbered = [(job, f"[{i}/{len(jobs)}] {job.name}") for i, job in enumerate(jobs, 1)]
        with self.signals_passed_on(), ThreadPoolExecutor(self.at_once) as pool:
            ends = [pool.submit(self.run_one, job, announced, then) for job, announced in numbered]
            for end in as_completed(ends):
                end.result()
        return [self.result(job) for job in jobs]

    def run_one(self, job, announced, then):
        if self.stopped_by:  # before this one was taken from those that wait
            raise self.stopped_by
        try:
            say(f"{announced}: {self.finish(job, announced)}")
            if then:
                then(self.out_dir / job.name)
        except BaseException as e:
            self.stop(e)
            raise

    def stop(self, why):
        self.stopped_by = self.stopped_by or why
        for process in list(self.processes):
            process.terminate()

    @contextlib.contextmanager
    def signals_passed_on(self):
        ends = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, lambda number, _: self.stop(Stopped(number))) for number in ends}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def finished(self, jobs):
        """Returns the Runs of those jobs that came to their end before, by name; none of another command."""
        return {job.name: self.result(job) for job in jobs if end_of(self.out_dir / job.name) and self.is_of(job)}

    def result(self, job):
        return Run(self.out_dir / job.name, job.name)

    def finish(self, job, announced):
        directory = self.out_dir / job.name
        if end_of(directory):
            return "done before, " + outcome(self.result(job))
        started = (directory / "command.txt").is_file()
        resumed = (directory / "latest").is_file()
        if started and not resumed:  # it was stopped before its first checkpoint
            (directory / "log.jsonl").unlink(missing_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "command.txt", shlex.join(self.command(job)) + "\n")
        say(f"{announced}: {'going on' if resumed else 'training'} ({directory}/console.txt)")
        arguments = ["--resume", "--out-dir", str(directory)] if resumed else self.command(job)[1:]
        code, said = self.call([self.executable, *arguments], directory / "console.txt")
        if code not in (0, EXIT_NOT_FINITE):
            raise InputError(f"{job.name}: {complaint(said)}")
        if code == EXIT_NOT_FINITE and not end_of(directory):
            log_divergence(directory)
        if not end_of(directory):
            raise InputError(f"{job.name} was stopped before its end: the same command goes on with it")
        return outcome(self.result(job))

    def call(self, command, console):
        """Runs the program to its end, with what it says in a file. Returns its exit status and what
        it said on stderr; raises why it was stopped, where it was."""
        with open(console, "ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[self.lock],
                start_new_session=True,
            )
        self.processes.add(process)
        if self.stopped_by:  # before stop() could see it
            process.terminate()
        said = process.communicate()[1]
        self.processes.remove(process)
        if self.stopped_by:
            raise self.stopped_by
        return process.returncode, said


def say(text):
    """Prints a line, whole where several threads do."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def output_of(command, whose=""):
    """Runs a command and returns what it prints; where it fails, the error is what it complains of, after `whose`."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise InputError(whose + complaint(done.stderr))
    return done.stdout


def complaint(said):
    lines = said.strip().splitlines() or ["it ended without a word"]
    return lines[-1].removeprefix("train_gpt_mxfp8: ") + names_of_ours(lines[-1])


def end_of(directory):
    """Returns the event that says that the run came to its end; None where it didn't, or was
    stopped by a signal."""
    try:
        last = (directory / "log.jsonl").read_bytes().rstrip().rsplit(b"\n", 1)[-1]
        event = json.loads(last)
    except (OSError, ValueError):
        return None
    return event if isinstance(event, dict) and event.get("event") == "end" and event.get("reason") in ENDS else None


def log_divergence(directory):
    """Logs the end that the program doesn't log where it finds no finite weights to save: to go on
    would end there again."""
    end = {"event": "end", "step": Run(directory).last_step, "reason": NOT_FINITE}
    with open(directory / "log.jsonl", "a") as log:
        log.write(json.dumps(end) + "\n")


def outcome(run):
    if run.end and run.end.get("reason") == NOT_FINITE:
        return f"diverged at step {run.end['step']}"
    if not run.val:
        return "no validation"
    return f"validation loss {number(run.val[-1].get('loss')):.4f} at step {run.val[-1]['step']:,}"


def miniature(out_dir):
    """Returns data and options of a model so small that a run takes a second: the pages of doc/ as
    bytes."""
    data = Path(out_dir).resolve() / "data"
    if not (data / "tokenizer.bin").is_file():
        prepare = [sys.executable, str(ROOT / "data" / "prepare.py"), "--input", str(ROOT / "doc/*.md"), "--out-dir"]
        output_of([*prepare, str(data)])
    pattern = glob.escape(str(data))
    files = ["--train-data", f"{pattern}/train_*.bin", "--val-data", f"{pattern}/val_*.bin", "--val-steps", "2"]
    return [*files, *"--max-seq-len 32 --batch-size 4 --learning-rate 3e-3 --warmup-steps 4 --threads 1".split()]
