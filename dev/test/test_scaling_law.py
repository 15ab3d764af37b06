"""scripts/scaling_law.py: the fit against known coefficients, finite differences and another optimizer; a grid in
miniature, stopped and continued; what it answers bad input."""

import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy.optimize import least_squares, minimize
from scipy.stats import ttest_1samp
from test_compare_recipes import numbers
from test_pages import HANDED_DOWN
from trainer import ENVIRONMENT, ROOT, SLOWNESS, TRAINER, events, validations

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import scaling_law  # noqa: E402
from logs import InputError  # noqa: E402
from runner import RECIPES  # noqa: E402
from scaling_law import NAMES, Law, Points, Problem  # noqa: E402

KNOWN = Law(E=1.7, A=400.0, B=1500.0, alpha=0.34, beta=0.37)


def grid_points(law, noise=0.0, seed=0):
    N, D = (values.ravel() for values in np.meshgrid(np.geomspace(1e6, 1e9, 6), np.geomspace(2e7, 2e10, 6)))
    return Points(N, D, law.loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, noise, N.size)))


@pytest.mark.parametrize("law", [KNOWN, scaling_law.PRINTED, Law(0.9, 50.0, 90.0, 0.25, 0.2)])
def test_exact_points_give_the_law_back(law):
    problem = Problem(grid_points(law))
    found = problem.law(problem.search())
    for name in NAMES:
        error = getattr(found, name) / getattr(law, name) - 1
        print(f"{name}: {getattr(found, name):.6g}, relative error {error:.1e}")
        assert abs(error) < 1e-3


def test_noisy_points_give_intervals_that_hold_the_law():
    inside, errors = 0, []
    for seed in range(3):
        found = scaling_law.fit(grid_points(KNOWN, 0.002, seed), 60)
        inside += sum(found.low[n] <= getattr(KNOWN, n) <= found.high[n] for n in NAMES)
        errors.append([abs(getattr(found.law, n) - getattr(KNOWN, n)) / (found.high[n] - found.low[n]) for n in NAMES])
        assert all(found.low[n] < getattr(found.law, n) < found.high[n] for n in NAMES) and found.at_bound == ()
    # 95 % each, but few independent ones: A goes with alpha, B with beta
    print(f"{inside} of {3 * len(NAMES)} known coefficients inside; errors in widths {np.max(errors):.2f}")
    assert inside >= 14 and np.max(errors) < 2


def test_gradient_against_finite_differences():
    problem = Problem(grid_points(KNOWN, 0.01))
    for p in problem.starts()[::10]:
        value, gradient = problem.value_and_gradient(p)
        assert value == pytest.approx(problem.value(p), rel=1e-12)
        h = 1e-6
        numeric = [(problem.value(p + h * e) - problem.value(p - h * e)) / (2 * h) for e in np.eye(5)]
        assert gradient == pytest.approx(numeric, rel=1e-3, abs=1e-3 * np.abs(gradient).max())


def test_minimum_against_another_optimizer():
    """SciPy's trust-region least squares with the Huber loss, from the known law, finds nothing lower."""
    points = grid_points(KNOWN, 0.003, 7)

    def residuals(q):
        terms = [np.exp(q[0]) / points.N ** q[3], np.exp(q[1]) / points.D ** q[4], np.exp(q[2])]
        return np.log(sum(terms)) - np.log(points.loss)

    start = [np.log(KNOWN.A), np.log(KNOWN.B), np.log(KNOWN.E), KNOWN.alpha, KNOWN.beta]
    other = least_squares(residuals, start, loss="huber", f_scale=1e-3, x_scale="jac", ftol=1e-15, xtol=1e-15, gtol=1e-15)
    problem = Problem(points)
    ours = problem.value(problem.search())
    theirs = other.cost / 1e-6  # in our units, over DELTA^2
    print(f"Huber loss {ours:.8f}, least_squares {theirs:.8f}")
    assert ours <= theirs * (1 + 1e-6)


def small_grid(law, noise, seed, sizes=4):
    N, D = (v.ravel() for v in np.meshgrid(np.geomspace(1e5, 2e6, sizes), np.geomspace(5e5, 4e6, sizes)))
    return Points(N, D, law.loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, noise, N.size)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(4))
def test_minimum_where_a_term_vanishes(seed):
    """E so small that the noise hides it: the fit still is at its minimum, and resampled laws aren't the law itself."""
    points = small_grid(Law(0.05, 60.0, 90.0, 0.3, 0.3), 0.004, seed)
    problem = Problem(points)
    p = problem.search()
    other = minimize(
        problem.value_and_gradient,
        p,
        jac=True,
        method="L-BFGS-B",
        bounds=problem.bounds,
        options={"maxiter": 5000, "maxfun": 20000, "ftol": 1e-14, "gtol": 1e-9},
    )
    print(f"Huber loss {problem.value(p):.8f}, L-BFGS-B from there {other.fun:.8f}; at a bound: {problem.at_bound(p)}")
    assert problem.value(p) <= other.fun * (1 + 1e-6)

    law = problem.law(p)
    laws, _ = scaling_law.resampled_fits(points, law, 20)
    assert len({other.alpha for other in laws}) == 20 and all(other.alpha != law.alpha for other in laws)


def test_bounds_are_named():
    points = small_grid(Law(0.0, 60.0, 90.0, 0.3, 0.3), 0.004, 1)
    found = scaling_law.fit(points, 20)
    least = scaling_law.DELTA * points.loss.min()
    assert found.at_bound == ("E",) and found.law.E == pytest.approx(least)
    steep = small_grid(Law(1.0, 1e23, 90.0, 4.5, 0.3), 0.0, 1)
    assert "alpha" in scaling_law.fit(steep, 20).at_bound
    assert scaling_law.fit(grid_points(KNOWN, 0.002), 20).at_bound == ()


def test_printed_coefficients():
    check = scaling_law.check_fit(20)
    assert check.passed() and check.exact.a == pytest.approx(0.51380330, rel=1e-3)  # as the notebook prints it
    assert np.sum([check.inside(n) for n in NAMES]) >= 3
    broken = check._replace(exact=check.exact._replace(beta=0.6))
    assert not broken.passed()
    with pytest.raises(InputError, match="doesn't find"):
        scaling_law.print_check(broken)


# ---------------------------------------------------------------------------------------------------------------------
# The grid


def command(*arguments):
    program = [sys.executable, str(SCRIPTS / "scaling_law.py"), "--program", TRAINER]
    return program + [str(argument) for argument in arguments]


def call(*arguments, code=0, cwd=None):
    done = subprocess.run(command(*arguments), cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=400 * SLOWNESS)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def tables(report):
    """The report's rows, a list of cells each."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in report.read_text().splitlines()
            if line.startswith("| ")]


def test_plan(tmp_path):
    """Each of nine pairs of a seed counts; nothing is left."""
    out = tmp_path / "out"
    said = call("--tiny", "--recipes", "mxfp8", "--plan", 0.3, "--scatter", 0.005, "--seeds", 2, "--out-dir", out).stdout
    measured = re.findall(r"^\[(.)/6\] (\w+), (\w+): [\d.e-]+ s a step, [\d.e-]+ s a validation$", said, re.M)
    assert [(int(i), *key) for i, *key in measured] == [
        (i + 1, recipe, model) for i, (recipe, model) in enumerate(itertools.product(["bf16", "mxfp8"], ["1x1x32", "1x2x64", "2x2x64"]))]
    assert "scatter by 0.0050 nats from pair to pair (as --scatter says)" in said
    assert "The grid, 9 runs of each of the 2 recipes, takes" in said
    row = next(line.split("|")[2:4] for line in said.splitlines() if line.startswith("| 0.3"))
    assert [int(cell) for cell in row] == [3, 54]  # of 24 pairs, 0.0029955 / 0.005 = 0.599 of the scatter
    assert "For 0.3 %: --seeds 3," in said and "--seeds 2 shows 0.35 %, in" in said
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["data"]
    said = call("--tiny", "--plan", "--out-dir", out).stdout
    assert "scatter by 0.0120 nats from pair to pair (what was measured of mxfp8 against bf16 in the grid of make law;" in said


def test_grid_stopped_and_continued(tmp_path):
    out = tmp_path / "out"
    arguments = ["--tiny", "--recipes", "mxfp8", "--seeds", 2, "--bootstrap", 20, "--out-dir", out]
    process = subprocess.Popen(command(*arguments), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (out / "bf16-1x2x64-2560-seed-1337" / "log.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].startswith("scaling_law.py: stopped") and process.returncode == 130
    logs = {path.parent.name: path.read_bytes() for path in out.glob("*/log.jsonl")}
    finished = [name for name in logs if name < "bf16-1x2x64-2560" and "1x1x32" in name]
    assert len(finished) == 3

    done = call(*arguments)
    assert done.stdout.count("done before") >= 3 and "36/36" in done.stdout
    assert all((out / name / "log.jsonl").read_bytes() == logs[name] for name in finished)
    rows = [row for row in tables(out / "report.md") if row[0] in RECIPES]
    assert [row[:2] for row in rows] == [["bf16", "18"], ["mxfp8", "18"], ["mxfp8", "bf16"]]  # two laws, a difference
    runner = scaling_law.Runner(TRAINER, out)
    differences = []
    for model, tokens, seed in itertools.product(("1x1x32", "1x2x64", "2x2x64"), (1280, 2560, 5120), (1337, 1338)):
        layers, _, channels = map(int, model.split("x"))
        cell = scaling_law.Cell("bf16", model, tokens, seed, scaling_law.Job(f"bf16-{model}-{tokens}-seed-{seed}", ()))
        by_cell = scaling_law.points_of(runner, [cell], [runner.result(cell.job)])
        asked = scaling_law.points_of(runner, [cell._replace(tokens=tokens - 1)], [runner.result(cell.job)])
        losses = {r: validations(out / f"{r}-{model}-{tokens}-seed-{seed}")[-1][1] for r in ("bf16", "mxfp8")}
        # four matrices, biases, two norms a layer, and the last norm
        parameters = layers * (12 * channels**2 + 13 * channels) + 2 * channels
        assert by_cell == {(model, tokens, seed): (parameters, tokens, losses["bf16"])}
        assert list(asked.values()) == list(by_cell.values())  # whole steps' tokens, not those that were asked for
        assert events(out / cell.job.name, "end")[-1]["reason"] == "max-tokens"
        differences.append(losses["mxfp8"] - losses["bf16"])
    found = ttest_1samp(differences, 0).confidence_interval(0.95)
    expected = 100 * np.expm1([np.mean(differences), found.low, found.high])
    assert rows[2][2] == "18" and numbers(rows[2][3]) == pytest.approx(expected, abs=6e-4)
    html = (out / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 4 and "src=\"http" not in html and "<script" not in html


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "1x1x32,1x2x64,2x2x64"], "required: --out-dir, --tokens"),
        (["--out-dir", "out", "--models", "1x1x32,1x2x64", "--tokens", "1k,2k,3k"], "--models names 2 different ones"),
        (["--out-dir", "out", "--models", "1x1x32,1x2x64,1x2x64", "--tokens", "1k,2k,3k"], "--models names 2 different"),
        (["--out-dir", "out", "--models", "1x1,1x2x64,2x2x64", "--tokens", "1k,2k,3k"], "1x1 is not LAYERSxHEADSxCHANNELS"),
        (["--out-dir", "out", "--models", "1x1x32,1x2x64,2x2x64", "--tokens", "1k,2k,3m"], "3m is not a number of tokens"),
        (["--out-dir", "out", "--models", "1x1x32,1x2x64,2x2x64", "--tokens", "0,2k,3k"], "0 is not a number of tokens"),
        (["--tiny", "--out-dir", "out", "--bootstrap", "3"], "--bootstrap must be 20 or more"),
        (["--tiny", "--out-dir", "out", "--", "--max-steps", "3"], "--max-steps is set for each run"),
        (["--tiny", "--out-dir", "out", "--", "--max-minutes", "3"], "--max-minutes would end each run at another"),
        (["--out-dir", "out", "--models", "4x2x128,4x4x128,4x8x128", "--tokens", "1k,2k,3k"], "sizes, not 1"),
        (["--tiny", "--out-dir", "out", "--models", "1x1x32,1x2x64,4x1x32"], "sizes, not 2"),
        (["--tiny", "--out-dir", "out", "--tokens", "1200,1280,2k,4k"], "are 10, 10, 16, 32 steps, some of"),
        (["--out-dir", "out", "--models", "1x1x32,1x2x64,2x2x64", "--tokens", "1k,2k,3k"], "no --train-data"),
    ],
)
def test_bad_input(tmp_path, arguments, words):
    done = call(*arguments, code=2, cwd=tmp_path)
    assert done.stderr.startswith("scaling_law.py: ") and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr


@pytest.mark.parametrize("law, tokens", [("--seeds 2", "0.5M,1M,2M,4M"), ("--tiny --seeds 2", "1280,2560,5120")])
def test_make_law_takes_the_miniature(law, tokens):
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    done = subprocess.run(["make", "-n", "law", f"LAW={law}", "CUDA=0"], cwd=ROOT, env=environment, capture_output=True, text=True)
    options = scaling_law.parse(shlex.split(done.stdout.replace("\\\n", "").partition("scripts/scaling_law.py ")[2]))
    assert (options.tokens, options.seeds, options.recipes) == (tokens, 2, "bf16,mxfp8"), done
    assert ("--train-data" in options.common) == (law == "--seeds 2")


def test_too_few_points():
    points = grid_points(KNOWN)
    assert scaling_law.too_few(points) is None
    assert scaling_law.too_few(Points(*(v[:7] for v in points))).startswith("runs of 7 (N, D) with")
    kept = points.N < sorted(set(points.N))[2]
    assert "with 2 sizes" in scaling_law.too_few(Points(*(v[kept] for v in points)))
    kept = points.N < sorted(set(points.N))[1]
    assert "with 1 size and" in scaling_law.too_few(Points(*(v[kept] for v in points)))
    few = Points(*(np.tile(v[:7], 3) for v in points))  # three seeds of seven (N, D)
    assert scaling_law.too_few(few).startswith("runs of 7 (N, D)")
    assert scaling_law.too_few(scaling_law.as_points({})).startswith("runs of 0 (N, D) with 0 sizes")


def test_resamples_have_more_points_than_coefficients():
    points, rng = small_grid(KNOWN, 0.004, 0, sizes=3), np.random.default_rng(0)
    kept = [scaling_law.resample(points, rng) for _ in range(300)]
    distinct = np.array([len(set(zip(chosen.N, chosen.D))) for chosen in kept])
    print(f"different points of nine: {np.bincount(distinct)}")
    # among free draws 24 % have five or fewer: 300 without one aren't by chance (0.76^300 is 1e-36)
    assert distinct.min() == 6 and all(len(chosen.loss) == 9 for chosen in kept)


def test_resamples_of_seeds():
    """Of each (N, D) that is drawn, as many runs as there are seeds, some more than once: never another's."""
    points = Points(*(np.tile(v, 3) for v in small_grid(KNOWN, 0.0, 0, sizes=3)))
    points = points._replace(loss=np.arange(27.0))
    assert sorted(map(sorted, scaling_law.places(points))) == [[i, i + 9, i + 18] for i in range(9)]
    same = {}
    for seed in range(50):
        chosen = scaling_law.resample(points, np.random.default_rng(seed))
        assert len(chosen.loss) == 27 and all(points.N[int(i)] == n for i, n in zip(chosen.loss, chosen.N))
        same[seed] = len(set(chosen.loss))
        again = scaling_law.resample(points._replace(loss=points.loss + 1), np.random.default_rng(seed))
        assert (again.loss == chosen.loss + 1).all()  # another recipe's: the same runs
    assert 6 <= min(same.values()) and max(same.values()) < 27


def recipe_pair(shift, noise):
    """Points of two recipes by cell, in other orders: noise that they share, and a beta that differs by shift."""
    N, D = (v.ravel() for v in np.meshgrid(np.geomspace(1e6, 1e9, 5), np.geomspace(2e7, 2e10, 5)))
    errors = np.random.default_rng(1).normal(0, noise, N.size)
    own = np.random.default_rng(2).normal(0, 1e-4, N.size)
    base, other = {}, {}
    for i in range(N.size):
        key = (f"model{N[i]:.0f}", int(D[i]), 1337)
        base[key] = (N[i], D[i], KNOWN.loss(N[i], D[i]) * np.exp(errors[i]))
        law = KNOWN._replace(beta=KNOWN.beta + shift)
        other[key] = (N[i], D[i], law.loss(N[i], D[i]) * np.exp(errors[i] + own[i]))
    return base, dict(reversed(list(other.items())))


def test_an_interval_that_the_search_cuts_off_shows_nothing():
    """Of forty fits to resampled runs one, or two, have E where the search ends."""
    inside, at_end = [()] * 39, ("E", "alpha")
    assert scaling_law.cut_off([*inside, at_end]) == () and scaling_law.cut_off([*inside[1:], at_end, ("E",)]) == ("E",)
    d = scaling_law.Difference("mxfp8", "bf16", scaling_law.Points(*np.ones((3, 4))), (1.0,), {"a": 0.1}, {"a": 0.05}, {"a": 0.2}, ("E",))
    assert "says nothing: many fits to resampled runs ended where the search for E does" in scaling_law.in_words([], [d])[1]


def test_a_constant_that_the_points_do_not_show_has_an_interval_that_the_search_cuts_off():
    """E is a thousandth of the smallest loss: the fits' intervals go down to where the search ends."""
    law, rng = KNOWN._replace(E=1e-3), np.random.default_rng(1)
    N, D = (v.ravel() for v in np.meshgrid(np.geomspace(1e5, 1e7, 4), np.geomspace(5e5, 4e6, 4)))
    points = scaling_law.Points(N, D, law.loss(N, D) * np.exp(rng.normal(0, 0.01, N.size)))
    found = scaling_law.fit(points, 40)
    assert "E" in found.cut_off and len(found.cut_off) < 5, found
    assert "of E an end of the interval may be" in " ".join(scaling_law.in_words([("bf16", points, found)], []))


@pytest.mark.parametrize(("shift", "differ"), [(0.01, True), (0.0, False)])
def test_recipes_are_compared_in_pairs(shift, differ):
    """Noise that both share hides a difference in the intervals of each, but not in that of the differences."""
    base, other = recipe_pair(shift, 0.004)
    lost = next(iter(base))
    del other[lost]
    (d,), remarks = scaling_law.compare({"bf16": base, "mxfp8": other}, [("mxfp8", "bf16")], 40)
    points = {name: scaling_law.as_points(cells) for name, cells in (("bf16", base), ("mxfp8", other))}
    fits = [(name, p, scaling_law.fit(p, 40)) for name, p in points.items()]
    one, two = fits[0][2], fits[1][2]
    print(f"a: {one.low['a']:.4f} to {one.high['a']:.4f}, {two.low['a']:.4f} to {two.high['a']:.4f};", end=" ")
    print(f"differences {d.low['a']:+.4f} to {d.high['a']:+.4f}")
    assert one.high["a"] > two.low["a"] and two.high["a"] > one.low["a"]
    truth = KNOWN._replace(beta=KNOWN.beta + shift).a - KNOWN.a
    assert d.excludes_zero("a") == differ and d.low["a"] <= truth <= d.high["a"]
    assert len(d.points.loss) == 24 and remarks == []
    gap, gaps = d.gap(), [other[key][2] - base[key][2] for key in sorted(other)]
    assert gap.mean == pytest.approx(np.mean(gaps)) and (gap.high < 0) == differ  # a larger beta: lower losses
    assert d.of_seeds == pytest.approx([np.mean(gaps)])
    words = scaling_law.in_words(fits, [d])
    assert "Over the means of 1 seed, of" in words[0] and "a single difference has no interval" in words[0]
    assert len(words) == 2 and ("excludes 0: they differ" if differ else "includes 0: no difference") in words[1]
    assert ("better than bf16" if differ else "no difference from bf16") in words[0]
    (axes,) = scaling_law.draw_gaps([d]).axes
    drawn = sorted(y for line in axes.lines if line.get_marker() == "o" for y in line.get_ydata())
    assert drawn == pytest.approx(sorted(100 * np.expm1(gaps)))


def test_a_seed_that_lost_a_run_has_no_mean():
    means = scaling_law.means_of_seeds([1, 2, 3, 1, 2, 3, 1, 2], np.array([0.1, 0.2, 9, 0.3, 0.4, 9, 0.5, 0.9]))
    assert means == pytest.approx((0.3, 0.5))


def test_too_few_runs_in_common():
    base, other = recipe_pair(0.0, 0.004)
    few = {key: other[key] for key in list(other)[:4]}
    differences, (remark,) = scaling_law.compare({"bf16": base, "mxfp4": few}, [("mxfp4", "bf16")], 20)
    assert differences == [] and remark.startswith("mxfp4 isn't compared with bf16: in both, runs of 4 (N, D)")


def rewrite(directory, change):
    """A finished run's log, with each event as change(event) makes it."""
    log = directory / "log.jsonl"
    changed = [change(json.loads(line)) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(event) + "\n" for event in changed))


def test_recipe_that_diverges(tmp_path):
    """By their logs, one recipe's runs diverged: the others have their laws, and the report says so."""
    out = tmp_path / "out"
    arguments = ["--tiny", "--recipes", "mxfp8,mxfp4", "--bootstrap", 20, "--out-dir", out]
    call(*arguments)

    def diverge(event):
        return event | {"reason": "not-finite", "step": 7} if event["event"] == "end" else event

    def lose(event):
        return event | {"loss": None} if event["event"] == "val" else event

    def little_data(event):
        return event | {"train_tokens": 2560} if event["event"] == "config" else event

    for directory in sorted(out.glob("mxfp4-*")):
        rewrite(directory, diverge)
    rewrite(out / "mxfp8-1x1x32-1280-seed-1337", lose)
    for directory in out.glob("*-*x*-*"):
        rewrite(directory, little_data)
    done = call(*arguments)
    assert done.stderr == ""
    rows = [row[:3] for row in tables(out / "report.md") if row[0] in RECIPES]
    # two laws and a difference
    assert [rows[0][:2], rows[1][:2], rows[2]] == [["bf16", "9"], ["mxfp8", "8"], ["mxfp8", "bf16", "8"]]
    report = " ".join((out / "report.md").read_text().split())  # where it is wrapped doesn't matter
    assert "mxfp4-2x2x64-5120-seed-1337 diverged by step 7 and is left out." in report
    assert "mxfp8-1x1x32-1280-seed-1337 ended without a finite validation loss and is left out." in report
    assert "mxfp4 has no law: runs of 0 (N, D)" in report and "mxfp4 isn't compared with bf16" in report
    assert "mxfp8's a less bf16's is" in report
    assert "Attention, embeddings, norms and the LM head are in BF16." in report
    assert "2 epochs of the training data's 2,560 tokens: D counts repeated tokens as if they were new." in report
    assert report.index("What the paper says (arXiv 2506.20752)") < report.index("mxfp8's a less")

    for directory in [*out.glob("bf16-*"), *out.glob("mxfp8-*")]:
        rewrite(directory, diverge)
    done = call(*arguments, code=2)
    assert done.stderr.startswith("scaling_law.py: no recipe has a law: ") and done.stderr.count("\n") == 1


def test_steps_of_the_program(tmp_path):
    """The tokens of a step and the steps as the program plans them, from options in all forms that it takes."""
    data, one = scaling_law.miniature(tmp_path)[:4], scaling_law.Runner(TRAINER, tmp_path / "out")
    for given, step, micro_batches in (
        (["--batch-size", "3", "--max-seq-len", "32"], 96, 1),
        (["--seq-len=16", "--max-seq-len", "32"], 64, 1),
        (["--max-seq-len", "0.032K", "--total-batch-size", "2.56e2", "--batch-size", "2"], 256, 4),
        (["--batch-size", "1"], 1024, 1),
    ):
        length = one.length([*data, *given, *"--layers 1 --heads 1 --channels 32 --max-tokens 3000 --threads 1".split()])
        assert length == (step, micro_batches, -(-3000 // step)), given
