"""What --plan of an experiment says: how many seeds, runs and minutes it takes to see a difference of perplexity."""

import math
from typing import NamedTuple

import numpy as np
from paired import BAR, most_scatter, percent, seeds_needed, visible
from report import markdown_table

# Nats: the largest scatter of paired differences, by the narrower of a pair's formats, in dev/results: models of 3.3
# million parameters, 500 steps.
KNOWN_SCATTER = {"4-bit": 0.0103, "6-bit or 8-bit": 0.0054}
# The same of what they grow by from 500 to 1,500 steps.
KNOWN_GROWTH = {"4-bit": 0.0127, "6-bit or 8-bit": 0.0071}
PLANNED = (0.1, 0.2, 0.5, 1, 2)  # %: the differences that a plan is made for


class Cost(NamedTuple):
    """What one seed takes."""

    what: str  # is trained, in words
    runs: int
    seconds: float  # of all of them together
    pairs: int = 1  # of which each tells a recipe's difference from another
    unit: str = "seed"  # what differences scatter by
    of: str = "Paired differences"  # is planned for


def add_plan(parser):
    parser.add_argument("--plan", type=float, nargs="?", const=BAR, metavar="PERCENT",
                        help="say how many seeds and minutes it takes to see such a difference of perplexity, and stop "
                        "(without a number: %(const)s); measures a few steps of each recipe")
    parser.add_argument("--scatter", type=float, metavar="NATS",
                        help="of paired differences, for --plan, where OUT_DIR holds no runs that tell it")


def check_plan(parser, options):
    for name in ("plan", "scatter"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} must be more than 0")


def bits_of(pair):
    """Returns which of KNOWN_SCATTER a pair has."""
    options = " ".join([*pair.recipe.options, *pair.base.options])
    return "4-bit" if "fp4" in options or "e2m1" in options else "6-bit or 8-bit"


def scatter_in_words(options, measured, pairs, known=None, grown=False):
    """Returns the scatter that the plan is made with, and where it is from: where OUT_DIR doesn't tell it, `known`, such a pair,
    or KNOWN_SCATTER's; KNOWN_GROWTH's of what differences have grown by."""
    if options.scatter:
        return options.scatter, "as --scatter says"
    if measured:
        label = max(measured, key=lambda name: measured[name].scatter)
        return most_scatter(measured[label]), f"at most, in four of five cases, by what is measured in {options.out_dir} of {label}"
    if known:
        return known
    scatter, when = (KNOWN_GROWTH, "from 500 steps to 1,500") if grown else (KNOWN_SCATTER, "after 500 steps")
    bits = max(map(bits_of, pairs), key=scatter.get, default="6-bit or 8-bit")
    return scatter[bits], f"the largest that was measured of {bits} recipes in a model of 3.3 million parameters, {when}; " \
        "--scatter says another"


def print_plan(options, scatter, source, cost):
    """Prints the seeds and minutes that differences of perplexity take."""
    print(f"{cost.of} scatter by {scatter:.4f} nats from {cost.unit} to {cost.unit} ({source}).")
    if cost.pairs > 1:
        print("Pairs of one seed are taken as independent. If its order of the data does something to all of them, more seeds are "
              "needed.")
    at_once = f", {options.jobs} runs at once" if options.jobs > 1 else ""
    minutes = cost.seconds / 60 / options.jobs
    print(f"{cost.what} takes {minutes:,.1f} minutes on this machine{at_once}.")
    print("To see a difference (to find an interval without 0) in four of five such experiments takes:\n")
    seeds = {wanted: math.ceil(seeds_needed(np.log1p(wanted / 100), scatter) / cost.pairs) for wanted in (*PLANNED, options.plan)}
    rows = [[f"{wanted:g}", str(n), str(n * cost.runs), f"{n * minutes:,.1f}"] for wanted, n in sorted(seeds.items())]
    print(markdown_table(("difference, % of perplexity:", "seeds:", "runs:", "minutes:"), rows))
    needed = seeds[options.plan]
    print(f"For {options.plan:g} %: --seeds {needed}, {needed * minutes:,.1f} minutes.")
    if options.seeds * cost.pairs > 1:
        seen = percent(visible(options.seeds * cost.pairs) * scatter)
        print(f"--seeds {options.seeds} shows {seen:.2f} %, in {options.seeds * minutes:,.1f} minutes.")
