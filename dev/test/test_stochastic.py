"""--element-rounding in runs: the same bits on any number of threads, ranks and micro-batches and after a resume; every role
of every kind of recipe is rounded so; the log and the program say it."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from test_ranks import run_ranks
from trainer import MODEL, assert_same_run, events, latest, losses, run_well, steps, validations

LENGTH = ["--max-steps", 12, "--val-every", 4, "--val-steps", 4, "--schedule", "constant"]
ALL = ["--element-rounding", "stochastic", "--quantize-lm-head", "--quantize-ln-affine"]
RECIPES = ["mxfp8", "nvfp4", "mxfp4-sr"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """trained(options...): the directory of a run of one thread, made once."""
    made = {}

    def train(*options):
        if options not in made:
            made[options] = tmp_path_factory.mktemp("trained") / "run"
            run_well(*data, *MODEL, *LENGTH, *options, "--out-dir", made[options])
        return made[options]

    return train


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_threads(data, trained, tmp_path, recipe):
    run_well(*data, *MODEL, *LENGTH, "--recipe", recipe, *ALL, "--threads", 2, "--out-dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", trained("--recipe", recipe, *ALL))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resume(data, trained, tmp_path, recipe):
    options = ["--recipe", recipe, *ALL]
    run_well(*data, *MODEL, *LENGTH, *options, "--max-steps", 8, "--out-dir", tmp_path / "run")
    run_well("--resume", "--max-steps", 12, "--out-dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", trained(*options))


def test_a_resume_after_a_step_that_was_not_applied(data, trained, tmp_path):
    """Weights keep the roundings that they had."""
    options = ["--recipe", "mxfp4-sr", *ALL, "--max-steps", 140, "--val-every", 1, "--val-steps", 1, "--skip-outliers", "0.5"]
    straight = trained(*options)
    skipped = [event["step"] for event in events(straight, "train") if "skipped" in event]
    assert skipped and skipped[0] < 139
    run_well(*data, *MODEL, *LENGTH, *options, "--max-steps", skipped[0] + 1, "--out-dir", tmp_path / "run")
    run_well("--resume", "--max-steps", 140, "--out-dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", straight)


def test_a_switch(data, trained, tmp_path):
    """Adjustments after commas, and copies of weights that are made anew are those that they replace."""
    options = ["--recipe", "mxfp8", "--element-rounding", "stochastic"]
    run_well(*data, *MODEL, *LENGTH, *options, "--recipe-at", "5:mxfp8,element-rounding=stochastic", "--out-dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", trained(*options))


def train_on(ranks, *options):
    done = run_ranks(ranks, *options, *(["--gather", "fp32"] if ranks > 1 else []))
    if done.returncode != 0 and any("without" in text and "MPI" in text for _, text in done.sentences):
        pytest.skip("built without MPI")
    assert done.returncode == 0, done.stderr


def first_moments(out):
    return {name: values for name, values in load_file(latest(out) / "optimizer.safetensors").items() if name.endswith(".exp_avg")}


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_draw_what_one_does(data, tmp_path, recipe):
    """One step of two micro-batches, one a rank. What is quantized has the same bits, so its counts are the same; and a sum of two
    is the same in either order: the loss, and gradients of norms and biases, which dgrad's draws have gone into. A second GEMM
    goes on from the first one's sums, so that matrices' gradients are of the same addends, in another order."""
    common = [*data, *MODEL, "--max-steps", 1, "--recipe", recipe, *ALL, "--total-batch-size", 256, "--quant-stats-every", 1]
    runs = {"one": (1, []), "two": (2, []), "other": (1, ["--element-rounding-gradients", "nearest"])}
    for name, (ranks, options) in runs.items():
        train_on(ranks, *common, *options, "--out-dir", tmp_path / name)
    counts = {}
    for name in runs:
        quant = events(tmp_path / name, "quant")
        counts[name] = [{key: value for key, value in event.items() if key != "sqnr_db"} for event in quant]
        counts[name, "sqnr"] = [event["sqnr_db"] for event in quant]
    assert counts["one"] == counts["two"] and {event["operand"] for event in counts["one"]} >= {"dgrad-dy", "wgrad-dy", "wgrad-x"}
    assert counts["one", "sqnr"] == pytest.approx(counts["two", "sqnr"], rel=1e-12)  # sums of doubles in another order
    assert steps(tmp_path / "one")[0]["loss"] == steps(tmp_path / "two")[0]["loss"]
    one, two, other = (first_moments(tmp_path / name) for name in runs)
    vectors = [name for name in one if one[name].ndim == 1]
    assert len(vectors) > 10 and all(np.array_equal(one[name], two[name]) for name in vectors)
    furthest = max(np.abs(one[name] - two[name]).max() / np.abs(one[name]).max() for name in one)
    print(f"{recipe}: {len(counts['one'])} operands' counts and {len(vectors)} vectors the same; matrices off by {furthest:.1e}")
    assert furthest < 2.0**-20
    # Draws of another kind change all of it.
    assert counts["other"] != counts["one"] and not any(np.array_equal(one[name], other[name]) for name in vectors)


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_and_micro_batches(data, tmp_path, recipe):
    """Elements are drawn by their place in the step. Other sums are another order of the same addends: the first losses, in
    doubles, and the first gradient's norm, whose sums in FP32 are of BF16 products; what is drawn otherwise moves the norm by
    far more. A tensor's scale is of the micro-batch, so that recipes with one are compared at its size alone."""
    common = [*data, *MODEL, *LENGTH, "--recipe", recipe, *ALL, "--total-batch-size", 512]
    runs = {"4 x 4": [1, "--batch-size", 4], "2 ranks": [2, "--batch-size", 4]}
    if recipe != "nvfp4":
        runs["1 x 16"] = [1, "--batch-size", 16, "--val-steps", 1]  # the same 16 windows
    runs["another seed"] = [1, "--batch-size", 4, "--element-rounding-gradients", "nearest"]
    firsts = {}
    for name, (ranks, *options) in runs.items():
        train_on(ranks, *common, *options, "--out-dir", tmp_path / name)
        firsts[name] = events(tmp_path / name, "train")[0]
    one = firsts["4 x 4"]
    far = abs(firsts.pop("another seed")["grad_norm"] / one["grad_norm"] - 1)
    for name, first in firsts.items():
        loss, norm = (abs(first[key] / one[key] - 1) for key in ("loss", "grad_norm"))
        val = abs(validations(tmp_path / name)[0][1] / validations(tmp_path / "4 x 4")[0][1] - 1)
        print(f"{recipe}, {name}: losses off by {loss:.1e}, {val:.1e}, gradient norm by {norm:.1e}; of others {far:.1e}")
        assert max(loss, val) <= (4 * 2.0**-53 if "ranks" in name else 1e-6) and norm < far / 20


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "fp8-current", "fp8-blockwise", "nvfp4", "nvfp4-46"])
def test_every_role_is_rounded_so(trained, recipe):
    """Weights and activations move the first loss, gradients the first norm; each in a way of its own."""
    seen = [steps(trained("--recipe", recipe))[0]]
    for role in ("weights", "activations", "gradients"):
        seen.append(steps(trained("--recipe", recipe, f"--element-rounding-{role}", "stochastic"))[0])
    assert len({step["grad_norm"] for step in seen}) == 4
    assert seen[0]["loss"] == seen[3]["loss"] and len({step["loss"] for step in seen}) == 3
    assert losses(trained("--recipe", recipe, "--element-rounding-gradients", "stochastic"))[-1] < seen[0]["loss"] - 0.2


def test_seeds_and_steps_differ(data, trained, tmp_path):
    """At a learning rate of 0 steps on one batch differ by their random numbers alone."""
    options = ["--recipe", "mxfp4-sr", "--hadamard-dgrad", "none", "--hadamard-wgrad", "none", "--overfit-one-batch", "--learning-rate", 0, "--weight-decay", 0]
    norms = [step["grad_norm"] for step in steps(trained(*options))]
    assert len(set(norms)) == len(norms)
    nearest = [step["grad_norm"] for step in steps(trained(*options, "--element-rounding", "nearest"))]
    assert len(set(nearest)) == 1


def test_a_run_says_what_of_its_recipe_is_not_rounded():
    done = run_well("--dry-run", *MODEL, "--recipe", "nvfp4-nvidia", "--operand", "dgrad-dy=bf16", "--operand", "wgrad-dy=bf16")
    assert "gradients not rounded stochastically: no linear layer quantizes them" in done.stdout
    assert "elements rounded stochastically" not in done.stdout


def test_log(data, tmp_path, trained):
    recipe = events(trained("--recipe", "nvfp4", "--element-rounding-gradients", "stochastic"), "config")[0]["recipe"]
    assert recipe["element-rounding-gradients"] == "stochastic" and recipe["adjusted"]
    assert "element-rounding-weights" not in recipe and "prescale" not in recipe
    assert not any("element" in key for key in events(trained("--recipe", "nvfp4"), "config")[0]["recipe"])
    done = run_well(*data, *MODEL, "--recipe", "mxfp4-sr", "--max-steps", 2, "--quant-stats-every", 1, "--out-dir", tmp_path / "run")
    assert "elements rounded stochastically: weights, activations, gradients" in done.stdout
    assert "elements times 0.75 before they are rounded" in done.stdout
    recipe = events(tmp_path / "run", "config")[0]["recipe"]
    assert recipe["prescale"] == 0.75 and not recipe["adjusted"]
    assert {event["operand"] for event in events(tmp_path / "run", "quant")} == {"dgrad-dy", "wgrad-dy", "wgrad-x"}
