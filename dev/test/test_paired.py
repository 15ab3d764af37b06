"""scripts/paired.py: intervals against tables, SciPy's paired t-test and simulation; power against published sample
sizes; what is said in words."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import nct, ttest_rel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import paired  # noqa: E402

T_975 = {2: 12.706205, 3: 4.302653, 4: 3.182446, 8: 2.364624, 31: 2.042272}  # a table's, by count: degrees of freedom + 1


@pytest.mark.parametrize("count", T_975)
def test_reach_is_a_tables_t_over_the_root_of_the_count(count):
    assert paired.reach(count) == pytest.approx(T_975[count] / np.sqrt(count), rel=1e-6)


def test_interval_by_hand():
    found = paired.interval([0.001, 0.002, 0.003, 0.006])
    scatter = np.sqrt((0.002**2 + 0.001**2 + 0 + 0.003**2) / 3)
    assert found.mean == pytest.approx(0.003) and found.scatter == pytest.approx(scatter) and found.count == 4
    assert [found.low, found.high] == pytest.approx([0.003 - 3.182446 * scatter / 2, 0.003 + 3.182446 * scatter / 2])
    assert paired.percent(0.005) == pytest.approx(0.501252)  # e^0.005 - 1


def test_interval_is_that_of_scipys_paired_test():
    rng = np.random.default_rng(3)
    base = rng.normal(2.3, 0.012, (8, 5))
    losses = base + rng.normal(0.002, 0.003, (8, 5))
    found, theirs = paired.interval(losses - base), ttest_rel(losses, base).confidence_interval(0.95)
    assert found.low == pytest.approx(theirs.low) and found.high == pytest.approx(theirs.high)
    strict = ttest_rel(losses, base).confidence_interval(1 - 0.05 / 5)
    assert paired.interval(losses - base, at_any_of=5).high == pytest.approx(strict.high)


def test_one_difference_has_no_interval():
    found = paired.interval([[0.1, 0.2]])
    assert found.mean == pytest.approx([0.1, 0.2]) and np.isnan([*found.low, *found.high, *found.scatter]).all()


def within_chance(share, expected, trials):
    """Four standard deviations of a binomial share: one test in 16,000 fails by chance."""
    print(f"{share:.4f}, expected {expected}")
    return abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / trials)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_intervals_hold_the_truth_in_19_of_20_experiments(count):
    """Losses that scatter by 0.013 between seeds and by 0.003 within: of both recipes' the first goes with the seed."""
    rng, trials = np.random.default_rng(count), 20_000
    seed = rng.normal(2.3, 0.013, (count, trials))
    losses, base = (seed + rng.normal(mean, 0.003 / np.sqrt(2), seed.shape) for mean in (0.001, 0))
    found = paired.interval(losses - base)
    assert within_chance(np.mean((found.low < 0.001) & (0.001 < found.high)), 0.95, trials)
    nothing = paired.interval(losses - base - 0.001)
    assert within_chance(np.mean(paired.is_seen(nothing)), 0.05, trials)


def test_all_of_many_validations_at_once():
    """Bonferroni's intervals hold all means together in 95 % of experiments at least, single ones don't."""
    rng, trials, validations = np.random.default_rng(1), 4000, 10
    all_held = {}
    for at_any_of in (1, validations):
        held = []
        for _ in range(trials):
            found = paired.interval(rng.normal(0, 1, (6, validations)), at_any_of)
            held.append(not paired.is_seen(found).any())
        all_held[at_any_of] = np.mean(held)
    print(all_held)
    assert all_held[validations] > 0.94 and all_held[1] < 0.75  # 0.95^10 is 0.60


@pytest.mark.parametrize(("count", "difference"), [(2, 9), (3, 2), (5, 1.2), (8, 1), (34, 0.5)])
def test_chance_to_see_is_the_noncentral_ts(count, difference):
    edge, shift = paired.reach(count) * np.sqrt(count), difference * np.sqrt(count)
    theirs = nct.sf(edge, count - 1, shift) + nct.cdf(-edge, count - 1, shift)
    assert paired.chance_to_see(difference, count) == pytest.approx(theirs, abs=1e-4)


def test_planned_seeds_see_the_difference():
    """Sample sizes of paired t-tests at 5 % and 80 % as textbooks have them (Cohen's d of 1, 0.8, 0.5); and simulated."""
    assert [paired.seeds_needed(d, 1) for d in (1.0, 0.8, 0.5)] == [10, 15, 34]
    rng, trials = np.random.default_rng(5), 20_000
    count = paired.seeds_needed(0.005, 0.0036)
    seen = {n: np.mean(paired.is_seen(paired.interval(rng.normal(0.005, 0.0036, (n, trials))))) for n in (count - 1, count)}
    print(seen)
    assert seen[count - 1] < 0.8 < seen[count] + 0.01
    for n in (2, 3, 8):
        assert paired.chance_to_see(paired.visible(n), n) == pytest.approx(0.8)
    assert np.isnan(paired.visible(1))


def spread(mean, scatter, count):
    """Differences of exactly this mean and scatter."""
    values = np.linspace(-1, 1, count)
    return paired.interval(mean + scatter * values / values.std(ddof=1))


@pytest.mark.parametrize(
    ("mean", "scatter", "count", "words"),
    [
        (0.010, 0.001, 8, "worse than bf16; above the paper's 0.50 %"),
        (0.004, 0.001, 8, "worse than bf16; below the paper's 0.50 %"),
        (0.005, 0.001, 8, "worse than bf16; whether it is below the paper's 0.50 % stays open"),
        (-0.010, 0.001, 8, "better than bf16; below the paper's 0.50 %"),
        # 2.364624 * 0.003 / sqrt(8) = 0.002508: from -0.001508 to 0.003508
        (0.001, 0.003, 8, "no difference from bf16 was seen, it is within ±0.35 %; below the paper's 0.50 %"),
        (-0.001, 0.003, 8, "no difference from bf16 was seen, it is within ±0.35 %; below"),
        (0.001, 0.03, 8, "no difference from bf16 was seen, it is within ±2.64 %; whether it is below"),
        (0.001, 0.003, 2, "2 seeds are too few (the interval reaches 9.0 times their scatter): no difference"),
        (0.1, 0.003, 3, "3 seeds are too few (the interval reaches 2.5 times their scatter): worse than bf16; above"),
    ],
)
def test_verdicts(mean, scatter, count, words):
    assert paired.verdict(spread(mean, scatter, count), "bf16", 0.5).startswith(words)


def test_words_without_a_bar_and_without_an_interval():
    assert paired.verdict(spread(0.01, 0.001, 8), "mxfp8") == "worse than mxfp8"
    alone = paired.interval([0.002])
    assert paired.verdict(alone, "bf16", 0.5) == "a single difference has no interval: it can't be told from chance"
    assert paired.signed(alone) == "+0.200 %" and paired.signed(spread(0, 0, 4)) == "+0.000 % [+0.000, +0.000]"
