"""Statistics of paired runs. Two recipes under one seed share weights and batches, so that what the seed does to both
cancels in their difference; the scatter of the differences over seeds says how much of their mean is chance.

Differences are of losses in nats, or of logarithms: percent() makes a part of the perplexity, or of the value, of them.
"""

from typing import NamedTuple

import numpy as np

BAR = 0.50  # % of perplexity: the largest gap that the MXFP8 paper (arXiv 2506.08027) sees to BF16
LEVEL = 0.95  # of intervals
POWER = 0.80  # of a plan: the share of experiments that see the difference
ENOUGH = 4  # seeds; with fewer an interval reaches more than twice the differences' scatter to each side


def percent(nats):
    """Returns how much larger the perplexity is, in %."""
    return 100 * np.expm1(nats)


class Interval(NamedTuple):
    """The mean of paired differences, and where it is known to lie; numbers, or an array for each
    validation."""

    mean: np.ndarray
    low: np.ndarray  # NaN where there is one difference
    high: np.ndarray
    scatter: np.ndarray  # standard deviation of the differences
    count: int


def interval(differences, at_any_of=1):
    """Returns the mean over the first axis with its 95 % interval (Student's t). For more than one
    of them it is so wide that all hold their means in 95 % of cases (Bonferroni)."""
    differences = np.asarray(differences, float)
    count, mean = len(differences), differences.mean(axis=0)
    scatter = differences.std(axis=0, ddof=1) if count > 1 else np.full_like(mean, np.nan)
    half = reach(count, at_any_of) * scatter
    return Interval(mean, mean - half, mean + half, scatter, count)


def reach(count, at_any_of=1):
    """Returns how far an interval reaches to each side, in units of the scatter."""
    from scipy.special import stdtrit  # Student's t: scipy.stats takes half a second more to import

    return stdtrit(count - 1, 1 - (1 - LEVEL) / (2 * at_any_of)) / np.sqrt(count) if count > 1 else np.nan


def chance_to_see(difference, count):
    """Returns the probability that the interval excludes 0 where the true mean is `difference`, in
    units of the scatter."""
    from scipy.special import chdtri, ndtr

    # Over the quantiles of the estimated scatter, since SciPy's noncentral t gives NaN for a few seeds.
    estimated = np.sqrt(chdtri(count - 1, 1 - (np.arange(2000) + 0.5) / 2000) / (count - 1))
    edge, shift = reach(count) * np.sqrt(count) * estimated, difference * np.sqrt(count)
    return float(np.mean(ndtr(shift - edge) + ndtr(-edge - shift)))


def visible(count):
    """Returns the difference, in units of the scatter, that so many seeds show with a chance of
    POWER; NaN for one."""
    from scipy.optimize import brentq

    if count < 2:
        return np.nan
    return brentq(lambda d: chance_to_see(d, count) - POWER, 0, 6 * reach(count))


def most_scatter(found):
    """Returns an upper bound of the true scatter, which holds with a chance of POWER. Planned with the measured one itself
    an experiment of few seeds is too small as often as too large."""
    from scipy.special import chdtri

    return float(found.scatter * np.sqrt((found.count - 1) / chdtri(found.count - 1, POWER)))


def seeds_needed(difference, scatter):
    """Returns the fewest seeds, two at least, that show the difference with a chance of POWER."""
    count = 2
    while chance_to_see(difference / scatter, count) < POWER:
        count += 1 + int(0.01 * count)  # of many seeds, to the hundredth
    return count


def is_seen(found):
    """Returns whether the interval excludes 0: the difference is more than chance."""
    return (found.low > 0) | (found.high < 0)


def signed(found):
    """Says the mean in %, and its interval."""
    mean = f"{percent(found.mean):+.3f} %"
    return mean if found.count < 2 else f"{mean} [{percent(found.low):+.3f}, {percent(found.high):+.3f}]"


def difference_in_words(found, against=None):
    """Says whether an interval shows a difference (from `against`), and within what none."""
    if is_seen(found):
        return ("worse" if found.mean > 0 else "better") + (f" than {against}" if against else "")
    widest = max(abs(percent(found.low)), abs(percent(found.high)))
    return f"no difference {f'from {against} ' if against else ''}was seen, it is within ±{widest:.2f} %"


def caution(found, what="seeds"):
    """Says, before what an interval shows, that it is of too few; nothing where it isn't."""
    if found.count >= ENOUGH:
        return ""
    return f"{found.count} {what} are too few (the interval reaches {reach(found.count):.1f} times their scatter): "


def verdict(found, against, bar=None, what="seeds"):
    """Says in words what the interval shows, and where it lies to the bar, if there is one."""
    if found.count < 2:
        return "a single difference has no interval: it can't be told from chance"
    said = difference_in_words(found, against)
    return caution(found, what) + said + ("" if bar is None else f"; {beside_bar(found, bar)}")


def beside_bar(found, bar):
    if percent(found.high) < bar:
        return f"below the paper's {bar:.2f} %"
    if percent(found.low) > bar:
        return f"above the paper's {bar:.2f} %"
    return f"whether it is below the paper's {bar:.2f} % stays open"
