"""scripts/gradient_error.py: bias and noise of simulated gradients, the report of a tiny model against its logs, which are
read here by other means, and what it answers bad input."""

import math
import shutil
import statistics
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from trainer import ENVIRONMENT, ROOT, SLOWNESS, TRAINER, events, snapshot

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gradient_error  # noqa: E402

ARGUMENTS = ["--tiny", "--seeds", 2, "--recipes", "mxfp8,mxfp4:mxfp8"]
# The miniature's text is the documentation. With its micro-batches of 4 some of it has gradients whose mean can't be told
# from their scatter, which the program refuses.
LARGE_BATCHES = ["--", "--batch-size", 64]
SEEDS, RECIPES = (1337, 1338), ("bf16", "mxfp8", "mxfp4")


def call(*arguments, code=0):
    command = [sys.executable, str(SCRIPTS / "gradient_error.py"), "--program", TRAINER, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300 * SLOWNESS)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("gradient") / "out"
    call(*ARGUMENTS, "--out-dir", out, *LARGE_BATCHES)
    return out


def rows(out, head):
    """The cells of the Markdown table whose first row begins so, by the first cell."""
    lines = (out / "report.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(head))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first + 2 :]]
    return {row[0]: row[1:] for row in cells[: cells.index([""])]}


def fake_run(ratios, lengths):
    values = {"error_ratio": ratios, "grad_norm": lengths}
    return SimpleNamespace(name="a run", train=None, bias=None, series=lambda _, field: (None, np.array(values[field])))


def test_bias_and_noise_of_simulated_gradients():
    """Vectors of 4,000 elements, 16 of one micro-batch and one of 32: by the variance of squared lengths the estimates
    scatter by 1 to 1.5 %."""
    random, size = np.random.default_rng(1), 4000
    mean, bias = random.normal(size=size), random.normal(size=size)
    mean /= np.linalg.norm(mean)
    bias *= 0.03 / np.linalg.norm(bias)
    runs, exact = [], []
    for count, steps in gradient_error.MEASURED:
        gradients = [mean + random.normal(size=size) * 2 / math.sqrt(size * count) for _ in range(steps)]
        wrong = [bias + random.normal(size=size) * 0.1 / math.sqrt(size * count) for _ in range(steps)]
        lengths = [np.linalg.norm(g) for g in gradients]
        runs.append(fake_run([np.linalg.norm(e) / g for e, g in zip(wrong, lengths)], lengths))
        exact.append(fake_run([0] * steps, lengths))
    found = gradient_error.errors_of(runs, exact, [count * 1024 for count, _ in gradient_error.MEASURED])
    print(f"bias {found.bias:.5f} (0.03), noise {found.noise:.6f} ({0.1**2 / 2**2}), within a tenth")
    assert found.bias == pytest.approx(0.03, rel=0.1)
    assert found.noise == pytest.approx(0.1**2 / 2**2, rel=0.1)
    assert found.ratios[0] == pytest.approx(math.hypot(0.03, 0.1) / math.hypot(1, 2), rel=0.1)


def measured(out, recipe, count, seed):
    """Squares of the error's length and of the exact gradient's, as the logs of this recipe and of fp32 have them."""
    ratios = [e["error_ratio"] for e in events(out / f"{recipe}-of-{count}-seed-{seed}", "gradient_bias")]
    lengths = [e["grad_norm"] for e in events(out / f"fp32-of-{count}-seed-{seed}", "train")]
    assert len(ratios) == len(lengths) == dict(gradient_error.MEASURED)[count]
    return (statistics.mean((r * g) ** 2 for r, g in zip(ratios, lengths)), statistics.mean(g**2 for g in lengths))


def test_table_against_the_logs(tiny):
    table = rows(tiny, "| recipe | is |")
    assert list(table) == list(RECIPES)
    small, large = (count for count, _ in gradient_error.MEASURED)
    for recipe in RECIPES:
        biases, noises, errors = [], [], []
        for seed in SEEDS:
            (e1, g1), (e2, g2) = measured(tiny, recipe, small, seed), measured(tiny, recipe, large, seed)
            n = large / small
            errors.append(100 * math.sqrt(e1 / g1))
            biases.append((n * e2 - e1) / (n * g2 - g1))
            noises.append(100 * (e1 - e2) / (g1 - g2))
        bias = 100 * math.sqrt(max(0, statistics.mean(biases)))
        for cell, value in zip((table[recipe][1], table[recipe][3], table[recipe][4]),
                               (statistics.mean(errors), bias, statistics.mean(noises))):
            assert float(cell.split()[0]) == pytest.approx(value, rel=0.006), (recipe, cell)
    # By medians: the errors of a few micro-batches in a hundred are many times the others', under any recipe.
    of_recipe = {recipe: statistics.median(e["error_ratio"] for seed in SEEDS for e in events(
        tiny / f"{recipe}-of-{small}-seed-{seed}", "gradient_bias")) for recipe in RECIPES}
    assert of_recipe["bf16"] < of_recipe["mxfp8"] < of_recipe["mxfp4"]


def test_a_bias_that_is_not_there_is_not_seen():
    """Squares around 0: roots of those above, and 0 for the others, have a mean above 0 and an interval without it."""
    squares = 1e-4 * np.array([0.5, 0.6, 0.4, -0.5, -0.6, -0.4, 0.5, -0.5])
    assert gradient_error.share_of_squares(squares) == f"0 [0, {100 * math.sqrt(2.364624 * squares.std(ddof=1) / math.sqrt(8)):.3g}]"
    assert gradient_error.share_of_squares([4e-4, 4e-4]) == "2 [2, 2]"


def test_weights_stay_and_checkpoints_go(tiny):
    """Every gradient is of the weights of the run under its seed, and of that run alone a checkpoint is kept."""
    assert sorted(path.parent.name for path in tiny.rglob("step_*") if path.is_dir()) == [f"weights-seed-{s}" for s in SEEDS]
    for seed in SEEDS:
        of_one = events(tiny / f"mxfp8-of-1-seed-{seed}", "config")[0]["options"]
        assert of_one["learning-rate"] == 0 and of_one["init-from"].startswith(str(tiny / f"weights-seed-{seed}"))
        losses = {events(tiny / f"fp32-of-{count}-seed-{seed}", "val")[-1]["loss"] for count, _ in gradient_error.MEASURED}
        assert len(losses) == 1


def test_what_was_measured_is_not_measured_again(tiny):
    before = snapshot(tiny)
    report = (tiny / "report.md").read_text()
    done = call(*ARGUMENTS, "--out-dir", tiny, *LARGE_BATCHES)
    logs = {path for path in before if str(path).endswith("log.jsonl")}
    assert logs and {path: snapshot(tiny)[path] for path in logs} == {path: before[path] for path in logs}
    assert "training" not in done.stdout and (tiny / "report.md").read_text() == report


def test_at_weights_of_ones_own(tiny, tmp_path):
    shutil.copytree(tiny / "data", tmp_path / "out/data")
    call("--tiny", "--seeds", 1, "--recipes", "mxfp8", "--out-dir", tmp_path / "out", *LARGE_BATCHES, "--init-from",
         tiny / "weights-seed-1337")  # fmt: skip
    assert not list((tmp_path / "out").glob("weights*"))
    for count, _ in gradient_error.MEASURED:
        name = f"mxfp8-of-{count}-seed-1337"
        there, here = (events(out / name, "gradient_bias") for out in (tiny, tmp_path / "out"))
        assert [e["error_ratio"] for e in there] == [e["error_ratio"] for e in here]


@pytest.mark.parametrize("arguments, says", [
    (["--recipes", "mxfp8", "--", "--train-data", "a.bin", "--val-data", "b.bin"], "there are no weights: give --init-from"),
    (["--tiny", "--", "--total-batch-size", "512"], "--total-batch-size is set for each run"),
    (["--tiny", "--recipes", "fp8-delayed", "--against", "fp8-delayed"], "no recipe is left to measure"),
    (["--tiny", "--recipes", "mxfp8+recipe-at=2:fp8-delayed", "--against", "fp8-delayed"], "no recipe is left to measure"),
    (["--tiny", "--recipes", "mxfp9"], "a run of mxfp9: --recipe has no choice 'mxfp9'"),
    (["--experiment", "wgrad", "--recipes", "mxfp8"], "give one of the two"),
    (["--tiny", "--seeds", "1", "--", "--init-from", "nowhere"], "nowhere: no such directory"),
])
def test_bad_input(tmp_path, arguments, says):
    done = call("--out-dir", tmp_path / "out", *arguments, code=2)
    assert says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(tmp_path.rglob("log.jsonl"))
