#!/usr/bin/env python3
"""Says how wrong a recipe's gradient is, and how much of that averages out over tokens.

At the same weights the gradient of each recipe is compared with the exact one (recipe fp32) of the same tokens: of one
micro-batch, and of 32. Where micro-batches are drawn alike, the mean squared length of an error over n tokens is
bias^2 + noise / n. Noise is what the roundings of different tokens do apart: it falls as the scatter of the gradients of
batches does, and is given as a part of that, in variance. Noise of 1 % costs what batches smaller by 1 % do, where
errors aren't correlated with the gradients themselves. Bias is what all tokens have in common, the error of rounded
weights among it, and is given as a part of the mean gradient's length.

The weights are those of a bf16 run under each seed, or what --init-from after -- names. What was finished isn't run again.
OUT_DIR/report.html and report.md have a table and a picture.
"""

import shlex
import shutil
from typing import NamedTuple

import numpy as np
from compare_recipes import besides_linear_layers, model_in_words, scale_options, take_recipes
from experiments import EXPERIMENTS, SCALES
from logs import InputError, main_of, newest_checkpoint, plural
from paired import ENOUGH, interval, reach
from plot import make_logarithmic, new_figure
from report import Report
from runner import (
    Job,
    Runner,
    check_common,
    chosen_pairs,
    experiment_parser,
    list_recipes,
    miniature,
    named,
    option_value,
    parse_experiment,
    seeds_of,
    with_defaults,
    without_option,
)

MEASURED = ((1, 16), (32, 1))  # micro-batches that a gradient is the mean of, and of how many that is measured
EXACT = "fp32"
DEFAULT_RECIPES = "bf16,mxfp8,mxfp8-ocp:mxfp8,fp8-current,fp8-blockwise,nvfp4,mxfp4"
OWN = ("recipe", "seed", "out-dir", "resume", "total-batch-size", "gradient-bias-every")
EXAMPLE = """\
examples, on the demo's data (make demo prepares it):
  gradient_error.py --scale cpu --out-dir runs/gradient-error
  gradient_error.py --scale cpu --out-dir runs/gradient-error --recipes nvfp4,nvfp4-nvidia:nvfp4 --seeds 4
at the weights of a run that you have, on its tokens:
  gradient_error.py --out-dir runs/gradient-error -- --init-from runs/NAME --train-data 'build/demo/data/train_*.bin' \\
      --val-data 'build/demo/data/val_*.bin' --batch-size 8
"""


class Split(NamedTuple):
    """Mean squares of lengths over n tokens: constant + falling / n."""

    constant: float
    falling: float


def split_of(squares, tokens):
    """Returns the Split of two mean squares over so many tokens."""
    falling = (squares[0] - squares[1]) / (1 / tokens[0] - 1 / tokens[1])
    return Split(squares[1] - falling / tokens[1], falling)


class Errors(NamedTuple):
    """Of a recipe under one seed."""

    ratios: np.ndarray  # of the error to the exact gradient, over each number of tokens, of root mean squares
    bias_squared: float  # as a part of the mean gradient's square; below 0 by chance where there is none
    noise: float  # as a part of the variance of exact gradients

    @property
    def bias(self):
        return np.sqrt(max(0, self.bias_squared))


def errors_of(runs, exact, tokens):
    """Returns the Errors of runs over so many tokens each, beside the exact recipe's on the same ones."""
    lengths = [exact_lengths(run) for run in exact]
    squares = [np.mean((length * error_ratios(run)) ** 2) for run, length in zip(runs, lengths)]
    of_exact = [np.mean(length**2) for length in lengths]
    error, gradient = split_of(squares, tokens), split_of(of_exact, tokens)
    if gradient.constant <= 0 or gradient.falling <= 0:
        raise InputError("the mean gradient can't be told from the scatter of batches: give a larger --batch-size after --")
    return Errors(np.sqrt(np.divide(squares, of_exact)), error.constant / gradient.constant, error.falling / gradient.falling)


def exact_lengths(run):
    return run.series(run.train, "grad_norm")[1]


def error_ratios(run):
    ratios = run.series(run.bias, "error_ratio")[1]
    if not np.isfinite(ratios).all():
        raise InputError(f"{run.name}: a gradient isn't finite")
    return ratios


# ---------------------------------------------------------------------------------------------------------------------
# The report


def share(values):
    """Says the mean of parts of a whole in %, and its interval."""
    found = interval(100 * np.asarray(values))
    said, low = f"{found.mean:.3g}", found.low if found.mean < 0 else max(0, found.low)
    return said if found.count < 2 else f"{said} [{low:.3g}, {found.high:.3g}]"


def share_of_squares(values):
    """Says the root of their mean in %, and of its interval: means of roots, which chance can't take below 0, would see a
    bias where there is none."""
    found = interval(np.asarray(values))
    mean, low, high = (f"{100 * np.sqrt(max(0, value)):.3g}" for value in (found.mean, found.low, found.high))
    return mean if found.count < 2 else f"{mean} [{low}, {high}]"


def times(values, base):
    """Says how many times the base's the values are, by the mean of paired logarithms; a dash where one is 0."""
    values, base = np.asarray(values), np.asarray(base)
    if not (np.minimum(values, base) > 0).all():
        return "–"
    found = interval(np.log(values / base))
    said = f"{np.exp(found.mean):.3g}"
    return said if found.count < 2 else f"{said} [{np.exp(found.low):.3g}, {np.exp(found.high):.3g}]"


def picture(recipes, errors, seeds):
    figure = new_figure(9, 1.2 + 0.26 * len(recipes))
    panels = figure.subplots(1, 2, sharey=True)
    rows = np.arange(len(recipes))
    for axes, field, title in zip(panels, ("bias", "noise"), ("bias, % of the mean gradient",
                                                             "noise, % of the batches' variance")):
        for i, seed in enumerate(seeds):
            values = [100 * getattr(errors[r.name, seed], field) for r in recipes]
            axes.scatter(values, rows, s=14, color=f"C{i}", label=f"seed {seed}")
        if any(getattr(e, field) > 0 for e in errors.values()):
            make_logarithmic(axes, "x")
        axes.set_title(title)
        axes.grid(True, axis="both", alpha=0.3)
    panels[0].set_yticks(rows, [r.name for r in recipes])
    panels[0].invert_yaxis()
    panels[1].legend(loc="lower left")
    return figure


def in_words(seeds, tokens, given):
    """Says what the numbers are. `given`: whose weights were named, or None."""
    count = len(seeds)
    few = f" {count} seeds give intervals of {reach(count):.1f} times their scatter." if 1 < count < ENOUGH else ""
    return (
        f"Gradients at the weights {f'of {given}' if given else 'that bf16 ends with'}, of {count} seed{plural(count)}, each the "
        f"mean over {tokens[0]:,} or {tokens[1]:,} tokens. "
        "An error is the length of the difference from the exact gradient (recipe fp32) of the same weights and tokens, as a "
        "part of its length. Bias is the part of it that doesn't average out over tokens, beside the mean gradient; noise is "
        "the variance that does, beside that of the exact gradients of batches: noise of 1 % costs what batches smaller by "
        "1 % do, where errors aren't correlated with the gradients themselves."
        + (" In brackets: 95 % intervals of the mean over seeds (Student's t), of bias the root of that of its square; what "
           "would begin below 0 is given from 0." if count > 1 else "") + few
    )


def write_report(out_dir, words, recipes, pairs, errors, seeds, tokens, configs, command, commands):
    """`words`: of in_words; `configs`: what a run of each recipe logged of itself, by name."""
    config = configs[recipes[0].name]
    report = Report("How wrong is the gradient, and what averages out?")
    report.paragraph(f"One model ({model_in_words(config.get('model', {}))}). {words}")
    report.paragraph(besides_linear_layers({name: config.get("recipe", {}) for name, config in configs.items()}))

    def values(r, field):
        return [getattr(errors[r.name, seed], field) for seed in seeds]

    head = ["recipe", "is", *(f"error over {n:,}, %:" for n in tokens), "bias, %:", "noise, %:"]
    report.table(head, [[r.name, r.words, *(share([errors[r.name, s].ratios[i] for s in seeds]) for i in (0, 1)),
                         share_of_squares(values(r, "bias_squared")), share(values(r, "noise"))] for r in recipes])  # fmt: skip
    report.paragraph("One recipe beside another, both under the same seeds:")
    report.table(["recipe", "against", "bias, times:", "noise, times:"],
                 [[pair.recipe.name, pair.base.name, *(times(values(pair.recipe, field), values(pair.base, field))
                                                       for field in ("bias", "noise"))] for pair in pairs])  # fmt: skip
    report.heading("Bias and noise")
    report.picture(picture(recipes, errors, seeds), "errors", "Bias and noise of each recipe's gradient")
    report.made_by(command, commands, config.get("device", "not logged"), "which ran, and the like for each recipe and seed")
    report.write(out_dir)


# ---------------------------------------------------------------------------------------------------------------------


def parse(arguments):
    usage = "gradient_error.py --out-dir DIR [options] -- OPTIONS_OF_TRAIN_GPT_MXFP8..."
    parser = experiment_parser("gradient_error.py", usage, __doc__, EXAMPLE)
    parser.set_defaults(seeds=ENOUGH)
    parser.add_argument("--recipes", metavar="all|paper|NAME,...", help="as compare_recipes.py takes them; a pair, such as "
                        f"mxfp8-ocp:mxfp8, is compared by how many times as large errors are (default: {DEFAULT_RECIPES})")
    parser.add_argument("--experiment", choices=EXPERIMENTS, metavar="NAME",
                        help=f"the recipes of an experiment of compare_recipes.py: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--scale", choices=SCALES, help="what isn't given after --: as compare_recipes.py has it")
    options = parse_experiment(parser, arguments)
    take_recipes(parser, options, DEFAULT_RECIPES)
    return options


def common_options(options):
    given = [*(miniature(options.out_dir) if options.tiny else []), *options.common]
    if options.tiny:
        given = with_defaults(given, layers=2, heads=2, channels=64, max_steps=20)
    elif options.scale:
        given = with_defaults(given, **scale_options(options.scale, given))
    from_elsewhere = option_value(given, "init-from") is not None
    check_common(given, OWN, ("train-data", "val-data"))
    if not from_elsewhere and not any(option_value(given, name) for name in ("max-steps", "max-tokens", "epochs")):
        raise InputError("there are no weights: give --init-from, or --max-steps of the run that makes them, after --")
    return given


def measurable(asked, pairs):
    """Leaves out delayed scales, and says so: a run's first steps, which have none of earlier amaxes, tell nothing of them."""
    delayed = [r.name for r in asked if any("fp8-delayed" in option for option in r.options)]
    for name in delayed:
        print(f"{name} is left out: its scales are of earlier steps' amaxes, of which a run at given weights has none")
    asked = [r for r in asked if r.name not in delayed]
    if not asked:
        raise InputError("no recipe is left to measure: give others in --recipes")
    return asked, [pair for pair in pairs if not {pair.recipe.name, pair.base.name} & set(delayed)]


def train(runner, seeds, common):
    """Trains under bf16 and returns the jobs, one a seed."""
    jobs = [Job(f"weights-seed-{seed}", ("--recipe", "bf16", "--seed", str(seed), *common)) for seed in seeds]
    runner.run(jobs)
    return jobs


def measuring(common, weights, steps):
    """Returns the options of a run that changes no weights and measures the gradients of so many steps."""
    for name in ("init-from", "init", "learning-rate", "warmup-steps", "warmup-fraction", "warmup-from", "max-steps",
                 "max-tokens", "epochs", "val-every", "val-steps", "checkpoint-every", "quant-stats-every"):  # fmt: skip
        common = without_option(common, name)
    return [*common, "--init-from", weights, "--learning-rate", "0", "--warmup-steps", "0", "--max-steps", str(steps),
            "--gradient-bias-every", "1", "--val-steps", "1"]  # fmt: skip


def measure(runner, jobs):
    """Runs them, and takes away the checkpoints at their ends: the weights are those that they began with."""

    def take_away(directory):
        (directory / "latest").unlink(missing_ok=True)
        for checkpoint in directory.glob("step_*"):
            shutil.rmtree(checkpoint)

    return {job.name: run for job, run in zip(jobs, runner.run(jobs, take_away))}


def main(arguments):
    options = parse(arguments)
    if options.list:
        list_recipes()
        return
    common = common_options(options)
    asked, pairs = chosen_pairs(options.recipes, options.against)
    asked = list(dict.fromkeys([r for pair in pairs for r in (pair.base, pair.recipe)] or asked))  # neighbours in the table
    asked, pairs = measurable(asked, pairs)
    recipes = list(dict.fromkeys([named(EXACT), *asked]))
    runner, seeds = Runner(options.program, options.out_dir, options.jobs), seeds_of(options)
    runner.check([Job(f"a run of {r.name}", (*r.options, *common)) for r in recipes])
    given = option_value(common, "init-from")
    given = given and str(newest_checkpoint(given))  # the same for all, also of a run that goes on meanwhile
    trained = [] if given else train(runner, seeds, common)
    weights = {seed: given or str(options.out_dir / trained[i].name) for i, seed in enumerate(seeds)}
    micro_batch = runner.length(["--recipe", EXACT, *measuring(common, weights[seeds[0]], 1)]).tokens_per_step
    tokens = [count * micro_batch for count, _ in MEASURED]
    jobs = {(r.name, seed, count): Job(f"{r.name}-of-{count}-seed-{seed}", (
                *r.options, "--seed", str(seed), *measuring(common, weights[seed], steps),
                "--total-batch-size", str(count * micro_batch)))
            for seed in seeds for r in recipes for count, steps in MEASURED}  # fmt: skip
    runs = measure(runner, list(jobs.values()))
    of = {(r.name, seed): [runs[jobs[r.name, seed, count].name] for count, _ in MEASURED] for r in recipes for seed in seeds}
    errors = {(r.name, seed): errors_of(of[r.name, seed], of[EXACT, seed], tokens) for r in asked for seed in seeds}
    configs = {r.name: of[r.name, seeds[0]][0].config for r in asked}
    commands = [shlex.join(runner.command(job)) for job in (*trained[:1], *list(jobs.values())[: len(MEASURED)])]
    command = shlex.join([".venv/bin/python", "scripts/gradient_error.py", *arguments])
    write_report(options.out_dir, in_words(seeds, tokens, given), asked, pairs, errors, seeds, tokens, configs, command, commands)
    print(options.out_dir / "report.html")


if __name__ == "__main__":
    main_of("gradient_error.py", main)
