"""--gradient-bias-every: what it logs, next to gradient norms of runs of their own, and that it changes no bit of the run."""

import math
import shutil

import pytest

from test_ranks import run_failing_ranks
from trainer import (
    LAYERS, MODEL, T, assert_same_run, events, one_sentence, run, run_well, steps)

LENGTH = ["--max-steps", 12, "--batch-size", 2, "--total-batch-size", 3 * 2 * T, "--val-every", 5]


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16", "fp32"])
def test_the_run_is_the_same_bit_for_bit(data, tmp_path, recipe):
    common = [*data, *MODEL, *LENGTH, "--recipe", recipe]
    run_well(*common, "--out-dir", tmp_path / "without")
    run_well(*common, "--gradient-bias-every", 3, "--quant-stats-every", 3, "--out-dir", tmp_path / "with")
    run_well(*common, "--quant-stats-every", 3, "--out-dir", tmp_path / "stats")
    assert_same_run(tmp_path / "with", tmp_path / "without")
    assert events(tmp_path / "with", "quant") == events(tmp_path / "stats", "quant")
    assert events(tmp_path / "without", "gradient_bias") == []
    found = events(tmp_path / "with", "gradient_bias")
    assert [event["step"] for event in found] == [0, 3, 6, 9]
    for event in found:
        everywhere = [event, event["rest"], *event["layers"]]
        print(event["step"], [f"{part['error_ratio']:.4f} {part['cosine']:.7f}" for part in everywhere])
        assert len(event["layers"]) == LAYERS
        for part in everywhere:
            if recipe == "fp32":
                assert part["error_ratio"] == 0 and part["cosine"] == 1
            else:
                assert 0 < part["error_ratio"] < (0.5 if recipe == "mxfp8" else 0.05)
                assert 0.8 < part["cosine"] < 1


def test_ratio_and_cosine_fit_the_norms_of_two_runs(data, tmp_path):
    """The law of cosines: ||a - g||^2 = ||a||^2 + ||g||^2 - 2 ||a|| ||g|| cos, with the norms that runs of each recipe log for
    their first step."""
    norms = {}
    for recipe in ("mxfp4", "mxfp8", "bf16", "fp32"):
        out = tmp_path / recipe
        run_well(*data, *MODEL, *LENGTH, "--max-steps", 1, "--recipe", recipe, "--gradient-bias-every", 1, "--out-dir", out)
        norms[recipe] = steps(out)[0]["grad_norm"], events(out, "gradient_bias")[0]
    exact = norms["fp32"][0]
    for norm, event in norms.values():
        distance = norm**2 + exact**2 - 2 * norm * exact * event["cosine"]
        # Squares of order 1 in double that nearly cancel.
        print(f"{event['error_ratio']:.6f} by the law of cosines {math.sqrt(max(0, distance)) / exact:.6f}")
        assert distance == pytest.approx((event["error_ratio"] * exact) ** 2, abs=1e-12 * exact**2)
    ratios = [norms[recipe][1]["error_ratio"] for recipe in ("fp32", "bf16", "mxfp8", "mxfp4")]
    assert ratios[0] == 0 and all(2 * low < high for low, high in zip(ratios, ratios[1:]))


def test_with_another_recipe_from_some_step_on(data, tmp_path):
    common = [*data, *MODEL, *LENGTH, "--recipe-at", "4:fp32", "--recipe-at", "8:mxfp8"]
    run_well(*common, "--out-dir", tmp_path / "without")
    run_well(*common, "--gradient-bias-every", 2, "--out-dir", tmp_path / "with")
    assert_same_run(tmp_path / "with", tmp_path / "without")
    found = {event["step"]: event["error_ratio"] for event in events(tmp_path / "with", "gradient_bias")}
    assert found[4] == found[6] == 0 and min(found[0], found[2], found[8], found[10]) > 0.005


def test_a_resumed_run_logs_the_same(data, tmp_path):
    common = [*data, *MODEL, *LENGTH, "--gradient-bias-every", 2, "--schedule", "constant"]
    run_well(*common, "--out-dir", tmp_path / "straight")
    run_well(*common, "--max-steps", 5, "--out-dir", tmp_path / "stopped")
    run_well("--resume", "--max-steps", 12, "--out-dir", tmp_path / "stopped")
    assert events(tmp_path / "stopped", "gradient_bias") == events(tmp_path / "straight", "gradient_bias")


def test_its_memory_is_a_line_of_the_plan():
    text = run_well("--dry-run", *MODEL, "--gradient-bias-every", 10).stdout
    assert "for exact gradients (fp32)" in text
    assert "for exact gradients" not in run_well("--dry-run", *MODEL).stdout


def test_cards_are_refused():
    done = run("--dry-run", *MODEL, "--gradient-bias-every", 10, "--device", "h100")
    assert done.returncode == 2 and "--gradient-bias-every" in one_sentence(done.stderr)


def test_ranks_are_refused(data, tmp_path):
    planned = run("--dry-run", *MODEL, "--gradient-bias-every", 10, "--world-size", 2)
    assert planned.returncode == 2 and "one rank" in one_sentence(planned.stderr)
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    done = run_failing_ranks(2, *data, *MODEL, "--gradient-bias-every", 10, "--max-steps", 2, "--out-dir", tmp_path / "run")
    assert done.returncode == 2 and "one rank" in done.only_sentence() and not (tmp_path / "run").exists()
