#!/usr/bin/env python3
"""Trains a grid of small models on several numbers of tokens under given recipes, and fits a scaling law to each.

The law is L(N, D) = E + A/N^alpha + B/D^beta, the fit that of Hoffmann et al. 2022 (approach 3): the Huber loss (delta
1e-3) of log L, minimized from a grid of starts. N counts the parameters that aren't embeddings, D tokens trained on,
repeated ones too, and L is the validation loss at the end of a run with its own learning rate schedule.
a = beta/(alpha+beta) is the exponent with which the compute-optimal N grows with compute. Intervals are 95 % of
bootstrap fits: to resampled (N, D), and of each to resampled seeds. Under one seed recipes share weights and batches:
they are compared by the differences of their losses at the same N, D and seed, and by the differences of fits to the
same resampled runs of both.

The fit is first checked on points made from coefficients that the authors of arXiv 2506.20752 printed. Results go into
OUT_DIR/report.html and OUT_DIR/report.md. What was finished isn't run again: the same command goes on. --plan says
beforehand how long it takes, and how many seeds show a difference of the recipes' losses.
"""

import itertools
import json
import re
import shlex
import struct
from collections import Counter
from typing import NamedTuple

import numpy as np
from compare_recipes import BAR_LINE, besides_linear_layers, diverged
from logs import InputError, main_of, newest_checkpoint, plural
from paired import BAR, ENOUGH, interval, percent, signed, verdict
from planning import Cost, add_plan, check_plan, print_plan, scatter_in_words
from plot import COLORS, new_figure
from report import Report, markdown_table
from runner import (
    BASELINE,
    Job,
    Runner,
    check_common,
    chosen_pairs,
    experiment_parser,
    list_recipes,
    miniature,
    parse_experiment,
    seeds_of,
    whole_number_of,
    with_defaults,
    without_option,
)

EXAMPLE = """\
example, on the demo's data (make demo prepares it); models are LAYERSxHEADSxCHANNELS:
  scaling_law.py --out-dir runs/law --models 2x2x64,3x3x96,4x4x128,6x6x192 --tokens 0.5M,1M,2M,4M -- \\
      --train-data 'build/demo/data/train_*.bin' --val-data 'build/demo/data/val_*.bin' --max-seq-len 128 \\
      --batch-size 8 --learning-rate 2e-3 --warmup-steps 50 --val-steps 50
"""
EMBEDDINGS = ("wte.weight", "wpe.weight", "embed_tokens.weight", "lm_head.weight")

# ---------------------------------------------------------------------------------------------------------------------
# The fit

DELTA = 1e-3  # of the Huber loss
NAMES = ("E", "A", "B", "alpha", "beta", "a")
COMPARED = ("E", "alpha", "beta", "a")  # between recipes; A and B go with the exponents
# Hoffmann et al. 2022, appendix D.3: starts of log A, log B, log E, alpha, beta
START_GRID = (range(0, 26, 5), range(0, 26, 5), (-1, -0.5, 0, 0.5, 1), (0, 0.5, 1, 1.5, 2), (0, 0.5, 1, 1.5, 2))
STARTS = 20  # of the 4500, those that begin lowest
EXPONENTS = (0.01, 4)  # where they are searched
MIN_POINTS = 8
# Of them in a resample: five coefficients fit five points exactly, whatever the noise. With six, intervals held 90 to
# 97 % of the coefficients of 60 simulated grids of 3x3 with noise of 0.4 %, and 97 to 100 % of 4x4.
MIN_DISTINCT = 6


class Points(NamedTuple):
    N: np.ndarray
    D: np.ndarray
    loss: np.ndarray


class Law(NamedTuple):
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    @property
    def a(self):
        return self.beta / (self.alpha + self.beta)

    def loss(self, N, D):
        return self.E + self.A / N**self.alpha + self.B / D**self.beta


class Problem:
    """The objective over (log A', log B', log E, alpha, beta), where A' and B' are taken at the
    mean of log N and of log D: without that they and the exponents move together, and a search
    crawls along the valley."""

    def __init__(self, points):
        self.mean_n, self.mean_d = np.log(points.N).mean(), np.log(points.D).mean()
        self.x, self.y = np.log(points.N) - self.mean_n, np.log(points.D) - self.mean_d
        self.log_loss = np.log(points.loss)
        # Of a term below DELTA of the loss the fit sees nothing: its logarithm would go down a slope without an end.
        term = (self.log_loss.min() + np.log(DELTA), self.log_loss.max())
        self.bounds = np.array([term, term, term, EXPONENTS, EXPONENTS])

    def centered(self, log_a, log_b, log_e, alpha, beta):
        """Returns parameter vectors, moved into the bounds."""
        p = np.stack([log_a - alpha * self.mean_n, log_b - beta * self.mean_d, log_e, alpha, beta], axis=-1)
        return np.clip(p, *self.bounds.T)

    def law(self, p):
        return Law(np.exp(p[2]), np.exp(p[0] + p[3] * self.mean_n), np.exp(p[1] + p[4] * self.mean_d), p[3], p[4])

    def terms(self, p):
        """Returns the logarithms of the law's three terms at each point: (..., 3, points)."""
        p = np.asarray(p, float)[..., None]
        first = p[..., 0, :] - p[..., 3, :] * self.x
        second = p[..., 1, :] - p[..., 4, :] * self.y
        return np.stack([first, second, np.broadcast_to(p[..., 2, :], first.shape)], axis=-2)

    def residuals(self, terms):
        highest = terms.max(axis=-2)
        return highest + np.log(np.exp(terms - highest[..., None, :]).sum(axis=-2)) - self.log_loss

    def value(self, p):
        """Returns the Huber loss over DELTA^2, summed over the points; p may hold many parameter
        vectors."""
        r = np.abs(self.residuals(self.terms(p))) / DELTA
        return np.where(r <= 1, 0.5 * r * r, r - 0.5).sum(axis=-1)

    def value_and_gradient(self, p):
        """Returns the loss and its gradient at one parameter vector. Within the bounds nothing
        overflows, and most of the time of a fit is spent here."""
        first, second, rest = np.exp(p[0] - p[3] * self.x), np.exp(p[1] - p[4] * self.y), np.exp(p[2])
        total = first + second + rest
        r = (np.log(total) - self.log_loss) / DELTA
        pull = np.minimum(np.maximum(r, -1), 1)
        value = pull @ (r - 0.5 * pull)
        pull /= total * DELTA
        first *= pull
        second *= pull
        return value, np.array([first.sum(), second.sum(), rest * pull.sum(), -(first @ self.x), -(second @ self.y)])

    def starts(self):
        p = self.centered(*np.array(list(itertools.product(*START_GRID)), float).T)
        return p[np.argsort(self.value(p), kind="stable")[:STARTS]]

    def search(self):
        """Returns the lowest minimum that is found from the grid of starts."""
        found = [self.descend(start) for start in self.starts()]
        return min(found, key=self.value)

    def descend(self, start):
        from scipy.optimize import minimize

        # It ends where L-BFGS-B does, in a fifth of the time, since it keeps the whole matrix of these five.
        options = {"maxiter": 1000, "ftol": 1e-12}
        return minimize(
            self.value_and_gradient, start, jac=True, method="SLSQP", bounds=self.bounds, options=options
        ).x

    def at_bound(self, p):
        """Returns the names of the coefficients that are where the search ends."""
        ends = (np.abs(self.bounds - p[:, None]) < 1e-6).any(axis=1)
        return tuple(name for name, end in zip(("A", "B", "E", "alpha", "beta"), ends) if end)


def too_few(points):
    """Returns why the points don't do for a fit; None where they do."""
    sizes, counts, both = len(set(points.N)), len(set(points.D)), len(places(points))
    if both >= MIN_POINTS and min(sizes, counts) >= 3:
        return None
    return (
        f"runs of {both} (N, D) with {sizes} size{plural(sizes)} and {counts} number{plural(counts)} of tokens ended with a finite loss, which "
        f"doesn't fix five coefficients: {MIN_POINTS} with three of each are needed"
    )


def places(points):
    """Returns for each (N, D) the indices of its points, one for each seed."""
    _, at = np.unique(np.stack([points.N, points.D]), axis=1, return_inverse=True)
    return [np.flatnonzero(at == i) for i in range(at.max() + 1)] if len(at) else []


class Fit(NamedTuple):
    law: Law
    low: dict  # of each name, the 95 % interval
    high: dict
    at_bound: tuple  # names of the coefficients that are where the search ends: the points don't fix them
    cut_off: tuple  # of those whose interval ends there


def fit(points, resamples):
    problem = Problem(points)
    p = problem.search()
    law = problem.law(p)
    laws, ends = resampled_fits(points, law, resamples)
    low, high = {}, {}
    for name in NAMES:
        low[name], high[name] = middle([getattr(other, name) for other in laws])
    return Fit(law, low, high, problem.at_bound(p), cut_off(ends))


def middle(values):
    """Returns the ends of the middle 95 %."""
    return np.quantile(values, [0.025, 0.975])


def cut_off(ends):
    """Returns the coefficients that so many fits have where the search ends, which `ends` has of each fit, that an end of the
    middle 95 % may lie there, too."""
    return tuple(name for name in Law._fields if sum(name in of_one for of_one in ends) > 0.025 * len(ends))


def resampled_fits(points, law, resamples, seed=0):
    """Fits to resampled points, from the law of all; returns the laws, and what each has where the search ends. The same N
    and D give the same resamples, whatever the losses."""
    rng, laws, ends = np.random.default_rng(seed), [], []
    for _ in range(resamples):
        problem = Problem(resample(points, rng))
        near = problem.centered(np.log(law.A), np.log(law.B), np.log(law.E), law.alpha, law.beta)
        p = problem.descend(near)
        laws.append(problem.law(p))
        ends.append(problem.at_bound(p))
    return laws, ends


def resample(points, rng):
    """Draws as many (N, D), with replacement, and of each its seeds; again where too few different
    ones are left to fit a law to."""
    at = places(points)
    while True:
        drawn = rng.integers(len(at), size=len(at))
        runs = np.concatenate([rng.choice(at[i], len(at[i])) for i in drawn])
        chosen = Points(*(values[runs] for values in points))
        enough = len(set(drawn)) >= MIN_DISTINCT and min(len(set(chosen.N)), len(set(chosen.D))) >= 3
        if enough:
            return chosen


class Difference(NamedTuple):
    """Of one recipe's coefficients from another's, each fitted to the runs that both have."""

    name: str
    base: str
    points: Points  # N, D, and the difference of the losses
    of_seeds: tuple  # of each seed that has all of the grid that any has, the mean difference of the losses
    value: dict
    low: dict  # the 95 % interval of the resampled fits' differences
    high: dict
    cut_off: tuple  # coefficients of either's whose interval ends where the search does

    @property
    def label(self):
        return f"{self.name} against {self.base}"

    def gap(self):
        """Returns the mean difference of the losses, with its interval over pairs of runs."""
        return interval(self.points.loss)

    def over_seeds(self):
        """Returns the same with its interval over seeds, of each of which all pairs share the order of the data."""
        return interval(self.of_seeds)

    def excludes_zero(self, coefficient):
        return self.low[coefficient] > 0 or self.high[coefficient] < 0


def means_of_seeds(seeds, differences):
    """Returns the mean difference of each seed with the most pairs."""
    seeds, counts = np.array(seeds), Counter(seeds)
    return tuple(float(differences[seeds == seed].mean()) for seed, n in counts.items() if n == max(counts.values()))


def difference(names, seeds, points, base, resamples):
    """Compares two recipes' points: points[i] and base[i] are at the same N, D and seed, seeds[i], and are
    drawn together."""
    laws, beyond = [], []
    for p in (points, base):
        problem = Problem(p)
        law = problem.law(problem.search())
        resampled, ends = resampled_fits(p, law, resamples)
        laws.append([law, *resampled])
        beyond += cut_off(ends)
    value, low, high = {}, {}, {}
    for n in COMPARED:
        value[n], *resampled = [getattr(mine, n) - getattr(other, n) for mine, other in zip(*laws)]
        low[n], high[n] = middle(resampled)
    gaps = points.loss - base.loss
    return Difference(*names, points._replace(loss=gaps), means_of_seeds(seeds, gaps), value, low, high, tuple(dict.fromkeys(beyond)))


# ---------------------------------------------------------------------------------------------------------------------
# The check

# Printed by plot/curve_fitting_and_instability.ipynb of github.com/KempnerInstitute/systems-scaling, the code that the
# authors of arXiv 2506.20752 published: E4M3 weights, BF16 activations; they print a = 0.5138.
PRINTED = Law(E=0.53530798, A=2822.480604, B=20445.40765, alpha=0.52361968, beta=0.55335119)
PRINTED_IN = "the notebook that the authors of arXiv 2506.20752 published with it (E4M3 weights, BF16 activations)"
CHECK_NOISE = 0.002  # of the loss
CHECK_TOLERANCE = 0.01  # of each coefficient, without noise


def printed_points(noise=CHECK_NOISE, seed=0):
    """Returns points of the printed law with noise in log L, at the paper's sizes (n = 6 ... 24
    layers and heads of 64) and budgets (2e17 to 4.8e19 FLOPs, 6 N D), where that is 2 to 500 tokens
    for each parameter."""
    points = []
    for n, flops in itertools.product(range(6, 25, 2), np.geomspace(2e17, 4.8e19, 9)):
        N = 12 * n * (64 * n) ** 2
        if 2 <= flops / (6 * N) / N <= 500:
            points.append((float(N), flops / (6 * N)))
    N, D = np.array(points).T
    errors = np.random.default_rng(seed).normal(0, noise, len(N))
    return Points(N, D, PRINTED.loss(N, D) * np.exp(errors))


class Check(NamedTuple):
    exact: Law  # fitted to the printed law's points without noise
    points: Points  # with noise
    found: Fit  # to those

    def passed(self):
        return all(abs(getattr(self.exact, n) / getattr(PRINTED, n) - 1) < CHECK_TOLERANCE for n in NAMES)

    def inside(self, name):
        return self.found.low[name] <= getattr(PRINTED, name) <= self.found.high[name]


def check_fit(resamples):
    """Fits the points of the printed law."""
    exact = Problem(printed_points(noise=0))
    points = printed_points()
    return Check(exact.law(exact.search()), points, fit(points, resamples))


# ---------------------------------------------------------------------------------------------------------------------
# The grid


class Cell(NamedTuple):
    recipe: str
    model: str
    tokens: int
    seed: int
    job: Job

    @property
    def key(self):
        """Returns what runs that are compared have in common."""
        return self.model, self.tokens, self.seed


def parse_models(text):
    models = [m.strip() for m in text.split(",") if m.strip()]
    sizes = set()
    for model in models:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", model):
            raise InputError(f"--models: {model} is not LAYERSxHEADSxCHANNELS, such as 4x4x128")
        layers, _, channels = map(int, model.split("x"))
        sizes.add(layers * channels**2)
    distinct(models, "--models")
    if len(sizes) < 3:
        raise InputError(
            f"--models {text}: give three or more sizes, not {len(sizes)}; N goes with layers x channels x channels, "
            "whatever the heads"
        )
    return models


def parse_tokens(text):
    counts = []
    for word in (t.strip() for t in text.split(",") if t.strip()):
        count = whole_number_of(word)
        if count is None or count < 1:
            raise InputError(f"--tokens: {word} is not a number of tokens such as 500k or 2M")
        counts.append(count)
    return distinct(counts, "--tokens")


def distinct(values, option):
    if len(set(values)) < max(3, len(values)):
        raise InputError(
            f"{option} names {len(set(values))} different ones of {len(values)}: give three or more, each once"
        )
    return values


def check_steps(tokens, step):
    """Runs that end at the same step are one run twice."""
    steps = [-(-count // step) for count in tokens]
    if len(set(steps)) < len(steps):
        raise InputError(
            f"--tokens: at {step:,} tokens a step, {', '.join(f'{count:,}' for count in tokens)} are "
            f"{', '.join(f'{n:,}' for n in steps)} steps, some of them the same: give numbers further apart"
        )


def cells_of(recipes, models, tokens, common, seeds):
    cells = []
    for seed, r, model, count in itertools.product(seeds, recipes, models, tokens):
        layers, heads, channels = model.split("x")
        size = ("--layers", layers, "--heads", heads, "--channels", channels, "--max-tokens", str(count))
        job = Job(f"{r.name}-{model}-{count}-seed-{seed}", (*r.options, "--seed", str(seed), *size, *common))
        cells.append(Cell(r.name, model, count, seed, job))
    return cells


def parameters(run_dir):
    """Returns the parameters of the newest checkpoint, without embeddings and the head, from the
    header of its safetensors file."""
    with open(newest_checkpoint(run_dir) / "model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if not name.endswith(EMBEDDINGS))


# In dev/results/law, from pair to pair of (N, D) and seed.
KNOWN_SCATTER = 0.0120, "what was measured of mxfp8 against bf16 in the grid of make law; --scatter says another"


def measured_scatter(runner, cells, pairs):
    """Returns the Interval of each pair's differences, of the runs that are finished, where they are enough."""
    done, by_recipe, found = runner.finished([cell.job for cell in cells]), {}, {}
    for cell in cells:
        if cell.job.name in done:
            by_recipe.setdefault(cell.recipe, {}).update(points_of(runner, [cell], [done[cell.job.name]]))
    for pair in pairs:
        mine, base = (by_recipe.get(r.name, {}) for r in pair)
        shared = shared_cells(mine, base)
        differences = interval([mine[key][2] - base[key][2] for key in shared]) if len(shared) >= ENOUGH else None
        if differences and differences.scatter > 0:
            found[pair.label] = differences
    return found


def plan(options, runner, cells, pairs):
    """Prints what --plan asks for. A step takes as long however many tokens follow."""
    of_seed = [cell for cell in cells if cell.seed == options.seed]
    models = {(cell.recipe, cell.model): cell for cell in of_seed}
    steps, validations = {}, {}
    for i, (key, cell) in enumerate(models.items(), 1):
        steps[key], validations[key] = runner.seconds(without_option(cell.job.options, "max-tokens"))
        print(f"[{i}/{len(models)}] {key[0]}, {key[1]}: {steps[key]:.3g} s a step, {validations[key]:.3g} s a validation", flush=True)
    tokens_per_step = runner.length(of_seed[0].job.options).tokens_per_step
    seconds = sum(-(-cell.tokens // tokens_per_step) * steps[cell.recipe, cell.model] + validations[cell.recipe, cell.model]
                  for cell in of_seed)
    recipes = dict.fromkeys(cell.recipe for cell in of_seed)
    of_each = "the recipe" if len(recipes) == 1 else f"each of the {len(recipes)} recipes"
    in_grid = len(of_seed) // len(recipes)
    scatter, source = scatter_in_words(options, measured_scatter(runner, cells, pairs), pairs, KNOWN_SCATTER)
    print_plan(options, scatter, source, Cost(f"The grid, {in_grid} runs of {of_each},", len(of_seed), seconds, in_grid, "pair"))


def points_of(runner, cells, runs):
    """Returns a point for each run that came to its end with a finite loss, by (model, tokens,
    seed)."""
    points = {}
    for cell, run in zip(cells, runs):
        loss = run.series(run.val, "loss")[1]
        if not diverged(run) and len(loss) and np.isfinite(loss[-1]):
            N = parameters(runner.out_dir / cell.job.name)
            points[cell.key] = (float(N), float(run.train[-1]["tokens"]), float(loss[-1]))
    return points


def why_left_out(cell, run):
    if diverged(run):
        return f"{cell.job.name} diverged by step {run.end['step']} and is left out."
    return f"{cell.job.name} ended without a finite validation loss and is left out."


def as_points(by_cell, cells=None):
    """Returns the given cells, or all, in order, as points."""
    rows = [by_cell[key] for key in (by_cell if cells is None else cells)]
    return Points(*np.array(rows).T.reshape(3, -1))


def shared_cells(by_cell, base):
    return sorted(by_cell.keys() & base.keys())


def compare(by_recipe, pairs, resamples):
    """Returns the Differences of the pairs (names) that share enough runs; why not, of the others."""
    differences, remarks = [], []
    for name, base in pairs:
        shared = shared_cells(by_recipe[name], by_recipe[base])
        points = as_points(by_recipe[name], shared)
        if reason := too_few(points):
            remarks.append(f"{name} isn't compared with {base}: in both, {reason}.")
        else:
            seeds = [seed for _, _, seed in shared]
            differences.append(difference((name, base), seeds, points, as_points(by_recipe[base], shared), resamples))
    return differences, remarks


def epochs(cells, runs):
    """Says in words how often the longest runs saw the training data."""
    tokens = [run.config["train_tokens"] for run in runs if "train_tokens" in run.config]
    if not tokens:
        return []
    longest, data = max(cell.tokens for cell in cells), min(tokens)
    said = f"The longest runs saw {longest / data:.3g} epochs of the training data's {data:,} tokens"
    return [said + (": D counts repeated tokens as if they were new." if longest > data else ".")]


# ---------------------------------------------------------------------------------------------------------------------
# The report

HEAD = (
    "recipe",
    "runs:",
    "E:",
    "A:",
    "B:",
    "alpha:",
    "beta:",
    "a:",
    "largest misfit, %:",
)


def cell_text(value, low, high):
    return f"{value:.4g} [{low:.3g}, {high:.3g}]"


def law_row(name, points, found):
    misfit = 100 * np.abs(points.loss / found.law.loss(points.N, points.D) - 1).max()
    cells = [cell_text(getattr(found.law, n), found.low[n], found.high[n]) for n in NAMES]
    return [name, str(len(points.loss)), *cells, f"{misfit:.2f}"]


DIFFERENCE_HEAD = (
    "recipe",
    "less",
    "pairs of runs:",
    "loss at the same N, D, seed: % of perplexity [95 %]:",
    "over seeds [95 %]:",
    *(f"{n}:" for n in COMPARED),
)


def difference_row(d):
    cells = [cell_text(d.value[n], d.low[n], d.high[n]) for n in COMPARED]
    return [d.name, d.base, str(len(d.points.loss)), signed(d.gap()), signed(d.over_seeds()), *cells]


def draw_laws(fits):
    """Draws for each recipe the losses and its law's curves, a color for each N, and what the law
    leaves."""
    figure = new_figure(12, 3.6 * len(fits))
    rows = figure.subplots(len(fits), 2, squeeze=False, sharey="col", width_ratios=[1.6, 1])
    for (left, right), (name, points, found) in zip(rows, fits):
        dense = np.geomspace(points.D.min(), points.D.max(), 100)
        for i, N in enumerate(sorted(set(points.N))):
            chosen, color = points.N == N, COLORS[i % len(COLORS)]
            left.plot(dense, found.law.loss(N, dense), color=color, linewidth=1)
            left.plot(points.D[chosen], points.loss[chosen], "o", color=color, markersize=4, label=f"N = {short(N)}")
            misfit = 100 * (points.loss[chosen] / found.law.loss(N, points.D[chosen]) - 1)
            right.plot(points.D[chosen], misfit, "o", color=color, markersize=4)
        right.axhline(0, color="#888888", linewidth=1)
        left.set(
            title=f"{name}: E + A/N^α + B/D^β", xscale="log", xlabel="training tokens, D", ylabel="validation loss"
        )
        right.set(title="What the law leaves", xscale="log", xlabel="training tokens, D", ylabel="% of the loss")
        left.legend(fontsize=7, ncols=1 + len(set(points.N)) // 6)
    return figure


def short(number):
    from matplotlib.ticker import EngFormatter

    return EngFormatter(places=1, sep="")(number)


def draw_coefficients(fits):
    figure = new_figure(12, 1.2 + 0.4 * len(fits))
    panels = figure.subplots(1, len(COMPARED), sharey=True)
    for axes, name in zip(panels, COMPARED):
        for i, (_, _, found) in enumerate(fits):
            color = COLORS[i % len(COLORS)]
            axes.plot([found.low[name], found.high[name]], [i, i], color=color, linewidth=2)
            axes.plot(getattr(found.law, name), i, "o", color=color)
        axes.set(title={"a": "a = β/(α+β)", "alpha": "α", "beta": "β"}.get(name, name))
    panels[0].set_yticks(range(len(fits)), [name for name, _, _ in fits])
    panels[0].set_ylim(len(fits) - 0.5, -0.5)
    return figure


def draw_gaps(differences):
    """Draws a panel for each pair, all with the same axes: the differences of the losses against D,
    a color for each N, and the interval of their mean."""
    figure = new_figure(12, 3.6)
    panels = figure.subplots(1, len(differences), sharex=True, sharey=True, squeeze=False)[0]
    for axes, d in zip(panels, differences):
        gap = d.gap()
        band = {"color": "#0072B2", "alpha": 0.15, "label": "95 % interval of the mean"}
        axes.axhspan(percent(gap.low), percent(gap.high), **band)
        for i, N in enumerate(sorted(set(d.points.N))):
            chosen, color = d.points.N == N, COLORS[i % len(COLORS)]
            dots = {"color": color, "markersize": 4, "label": f"N = {short(N)}"}
            axes.plot(d.points.D[chosen], percent(d.points.loss[chosen]), "o", **dots)
        axes.axhline(0, color="#555555", linewidth=1)
        axes.axhline(BAR, label=f"the bar of arXiv 2506.08027, {BAR:.2f} %", **BAR_LINE)
        axes.set(title=d.label, xscale="log", xlabel="training tokens, D")
    panels[0].set_ylabel("perplexity, difference in %")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def in_words(fits, differences):
    sentences = []
    for name, _, found in fits:
        if found.at_bound:
            sentences.append(
                f"{name}: {', '.join(found.at_bound)} ended where the search does: these runs don't fix the law."
            )
        if found.cut_off:
            sentences.append(
                f"{name}: of {', '.join(found.cut_off)} an end of the interval may be where the search ends, not what the runs say."
            )
    for d in differences:
        gap, over_seeds, bar = d.gap(), d.over_seeds(), BAR if d.base == BASELINE else None
        sentences.append(f"{d.label}, at the same N, D and seed: perplexity {signed(gap)} if pairs are independent, "
                         f"{verdict(gap, d.base, bar, 'pairs of runs')}. Over the means of {over_seeds.count} "
                         f"seed{plural(over_seeds.count)}, of each of which all pairs share the order of the data: {signed(over_seeds)}, "
                         f"{verdict(over_seeds, d.base, bar)}.")
        excluded = d.excludes_zero("a")
        ends = f"{d.value['a']:+.3g}, with an interval from {d.low['a']:+.3g} to {d.high['a']:+.3g}, which"
        seen = "excludes 0: they differ" if excluded else "includes 0: no difference was seen"
        if d.cut_off:
            seen = f"says nothing: many fits to resampled runs ended where the search for {', '.join(d.cut_off)} does"
        sentences.append(f"{d.name}'s a less {d.base}'s is {ends} {seen}.")
    return sentences


PAPER = (
    "What the paper says (arXiv 2506.20752): certain hybrid configurations are competitive with full precision. To one, "
    f"E4M3 weights with BF16 activations, its authors fit a law of this form, with a = {PRINTED.a:.4f}. What was seen here:"
)

CHECK_HEAD = ("coefficient", "printed:", "fitted, no noise:", "fitted, noise:", "95 % interval:", "printed is inside")


def check_rows(check):
    rows = []
    for n in NAMES:
        values = [f"{getattr(law, n):.5g}" for law in (PRINTED, check.exact, check.found.law)]
        interval = f"{check.found.low[n]:.4g} to {check.found.high[n]:.4g}"
        rows.append([n, *values, interval, "yes" if check.inside(n) else "no"])
    return rows


def check_in_words(check):
    within = "within" if check.passed() else "NOT within"
    return (
        f"{len(check.points.loss)} points were made from the coefficients printed in {PRINTED_IN}, at the paper's "
        f"sizes and budgets: they are no runs. Fitted to them without noise each coefficient is {within} "
        f"{100 * CHECK_TOLERANCE:g} % of the printed one. With noise of {100 * CHECK_NOISE:g} % in the loss the last "
        "columns come out: of such intervals one in twenty misses, and those of A and alpha, and of B and beta, do so "
        "together. The paper's own runs aren't published, so that this checks the fit, not the paper's coefficients."
    )


def print_check(check):
    print(check_in_words(check))
    print(markdown_table(CHECK_HEAD, check_rows(check)), end="", flush=True)
    if not check.passed():
        raise InputError(
            "the fit doesn't find the coefficients that its points were made from: report it, with this table"
        )


def write_report(options, fits, tables, differences, remarks, check, command, jobs, device, besides):
    report = Report("Scaling laws")
    report.paragraph("L(N, D) = E + A/N^alpha + B/D^beta, fitted to each recipe's runs; [95 % of bootstrap fits].")
    report.paragraph(PAPER)
    report.items(in_words(fits, differences) + remarks)
    report.paragraph(besides)
    report.table(HEAD, tables)
    if differences:
        report.paragraph(
            "Differences of runs that both recipes have, pair by pair of the same N, D and seed, which share weights "
            "and batches: of their losses, the mean over this grid [95 %, Student's t over pairs, taken as "
            "independent], and over the means of seeds [95 %, Student's t over seeds]; of the laws fitted to them "
            "[95 % of the differences of fits to the same resampled runs of both]:"
        )
        report.table(DIFFERENCE_HEAD, [difference_row(d) for d in differences])
        report.picture(draw_gaps(differences), "differences", "Differences of perplexity at the same N, D and seed")
    report.paragraph(
        "N counts parameters without embeddings, D tokens; losses are in nats per token. a = beta/(alpha+beta): the "
        "compute-optimal N grows as compute^a. These are laws of models of this size on this data; they don't "
        f"extrapolate far. Each resample has at least {MIN_DISTINCT} different (N, D)."
    )
    report.picture(draw_laws(fits), "laws", "Losses and the fitted laws, and what the laws leave")
    report.picture(draw_coefficients(fits), "coefficients", "Coefficients with their intervals")
    report.heading("The fit, checked")
    report.paragraph(check_in_words(check))
    report.table(CHECK_HEAD, check_rows(check))
    report.picture(
        draw_laws([("printed law", check.points, check.found)]),
        "check",
        "Points of the printed law, and the fit to them",
    )
    report.made_by(command, jobs, device)
    report.write(options.out_dir)


# ---------------------------------------------------------------------------------------------------------------------


def parse(arguments):
    usage = "scaling_law.py --out-dir DIR --models M,M,M --tokens N,N,N [options] -- OPTIONS_OF_TRAIN_GPT_MXFP8..."
    parser = experiment_parser("scaling_law.py", usage, __doc__, EXAMPLE)
    parser.add_argument("--models", metavar="LxHxC,...", help="three or more: layers, heads, channels")
    parser.add_argument(
        "--tokens", metavar="N,...", help="three or more numbers of training tokens, such as 500k,1M,2M"
    )
    parser.add_argument(
        "--recipes",
        default=BASELINE,
        metavar="NAME,...",
        help="as compare_recipes.py takes them (default: %(default)s)",
    )
    parser.add_argument("--bootstrap", type=int, default=200, metavar="N", help="resampled fits (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="only check the fit on the printed coefficients")
    add_plan(parser)
    options = parse_experiment(parser, arguments)
    check_plan(parser, options)
    if options.tiny:
        options.models, options.tokens = options.models or "1x1x32,1x2x64,2x2x64", options.tokens or "1280,2560,5120"
    if options.bootstrap < 20:
        parser.error("--bootstrap must be 20 or more")
    if not (options.list or options.check):
        missing = [
            f"--{name}" for name in ("out-dir", "models", "tokens") if getattr(options, name.replace("-", "_")) is None
        ]
        if missing:
            parser.error(f"the following arguments are required: {', '.join(missing)}")
    return options


def common_options(options):
    given = [*(miniature(options.out_dir) if options.tiny else []), *options.common]
    own = (
        "recipe",
        "seed",
        "out-dir",
        "resume",
        "layers",
        "heads",
        "channels",
        "max-tokens",
        "max-steps",
    )
    check_common(given, own, ("train-data", "val-data"))
    return with_defaults(given, val_every=0, checkpoint_every=500, keep_checkpoints=1)


def main(arguments):
    options = parse(arguments)
    if options.list:
        list_recipes()
        return
    if options.check:
        print_check(check_fit(options.bootstrap))
        return
    recipes, pairs = chosen_pairs(options.recipes, options.against)
    models, tokens = parse_models(options.models), parse_tokens(options.tokens)
    runner = Runner(options.program, options.out_dir, options.jobs)
    common = common_options(options)
    cells = cells_of(recipes, models, tokens, common, seeds_of(options))
    runner.check([cell.job for cell in cells])
    check_steps(tokens, runner.length(cells[0].job.options).tokens_per_step)
    if options.plan:
        plan(options, runner, cells, pairs)
        return
    check = check_fit(options.bootstrap)
    print_check(check)
    runs = runner.run([cell.job for cell in cells])

    by_recipe, fits, tables, remarks = {}, [], [], []
    for r in recipes:
        mine = [(cell, run) for cell, run in zip(cells, runs) if cell.recipe == r.name]
        by_cell = by_recipe[r.name] = points_of(runner, *zip(*mine))
        remarks += [why_left_out(cell, run) for cell, run in mine if cell.key not in by_cell]
        points = as_points(by_cell)
        if reason := too_few(points):
            remarks.append(f"{r.name} has no law: {reason}.")
            continue
        found = fit(points, options.bootstrap)
        fits.append((r.name, points, found))
        tables.append(law_row(r.name, points, found))
    if not fits:
        raise InputError(f"no recipe has a law: {remarks[-1]} Try a lower --learning-rate, or a larger grid")
    differences, not_compared = compare(by_recipe, [(p.recipe.name, p.base.name) for p in pairs], options.bootstrap)
    remarks += not_compared + epochs(cells, runs)
    command = shlex.join([".venv/bin/python", "scripts/scaling_law.py", *arguments])
    jobs = [shlex.join(runner.command(cell.job)) for cell in cells]
    device = runs[0].config.get("device", "not logged")
    besides = besides_linear_layers({cell.recipe: run.config.get("recipe", {}) for cell, run in zip(cells, runs)})
    write_report(options, fits, tables, differences, remarks, check, command, jobs, device, besides)
    print(options.out_dir / "report.html")


if __name__ == "__main__":
    main_of("scaling_law.py", main)
