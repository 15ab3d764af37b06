"""The first 100 steps of the demo, under three recipes, next to the losses that are committed in dev/test/golden/.

Another kind of machine adds in another order; how far that may move a loss was measured when a file was made (perturb.py)
and is in it. The bits are test_isa.py's: compiled for AVX2 the program has the same ones on every processor that has it.

usage: test_golden.py [RECIPE...]    makes the files anew, after numerics were meant to change; TRAINER: the program
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from perturb import deviations, make_initial_weights
from trainer import ROOT, TRAINER, losses, run_well

GOLDEN = ROOT / "dev/test/golden"
# Beside the program, or above it where that is built in a directory of build/.
DATA = next((parent / "demo/data" for parent in Path(TRAINER).parents if (parent / "demo/data").is_dir()),
            ROOT / "build/demo/data")
RECIPES = ["bf16", "mxfp8", "mxfp8-ocp"]
STEPS = 100
# scripts/demo.sh's. Its 1500 steps begin with 100 of warm-up, so these have the same learning rates.
MODEL = ["--layers", 4, "--heads", 4, "--channels", 256, "--max-seq-len", 128]
TRAINING = ["--train-data", f"{DATA}/train_*.bin", "--batch-size", 8, "--warmup-steps", 100]
RATE = ["--learning-rate", "1e-3"]
LONGEST_SUM = 1024  # over the FFN's 4 C channels, and over the tokens of a batch

# Perturbed runs: SHORT ones of a step, LONG ones of all. A step's envelope is the largest deviation of the long ones within
# WINDOW steps of it, some dozen independent samples, so no less than 1.5 standard deviations; the bound is ENVELOPES of
# them. The first step, of which there are SHORT + LONG samples, may be off by DEVIATIONS of their root mean square.
LONG, SHORT, WINDOW = 3, 7, 10
ENVELOPES, DEVIATIONS = 4, 6

def golden_path(recipe):
    return GOLDEN / f"{recipe}.json"


def train(recipe, out, *options, steps=STEPS):
    run_well(*MODEL, *TRAINING, *RATE, "--recipe", recipe, "--max-steps", steps, "--out-dir", out, *options, timeout=600)
    return losses(out)


def bounds(golden):
    return np.array([DEVIATIONS * golden["first_step_deviation"]] + [ENVELOPES * e for e in golden["envelope"][1:]])


def load(recipe):
    return json.loads(golden_path(recipe).read_text())


def worst_ratio(found, golden):
    """The largest of |difference| / bound, and its step; `found` may be the first losses alone."""
    ratio = np.abs(found - np.array(golden["losses"])[:len(found)]) / bounds(golden)[:len(found)]
    return ratio.max(), int(ratio.argmax())


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_the_committed_ones(recipe, tmp_path):
    golden = load(recipe)
    found = train(recipe, tmp_path / "run")
    assert len(found) == STEPS
    ratio, step = worst_ratio(found, golden)
    limit = bounds(golden)[step]
    print(f"{recipe}: worst at step {step}: difference {ratio * limit:.2e}, bound {limit:.2e}, margin "
          f"{1 / ratio if ratio else np.inf:.1f}")
    assert ratio <= 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_bounds_tell_bf16_from_mxfp8(recipe):
    """A bound that any recipe met would show nothing. The two of MXFP8 differ by less than the order of sums may: these
    bounds don't tell them from each other, the bits do."""
    for other in RECIPES:
        ratio, step = worst_ratio(np.array(load(other)["losses"]), load(recipe))
        print(f"{recipe}'s bounds against {other}: {ratio:.2f} times the bound at step {step}")
        if (recipe == "bf16") != (other == "bf16"):
            assert ratio > 1


def test_committed_losses_are_all_different():
    files = [load(recipe)["losses"] for recipe in RECIPES]
    assert all(len(set(losses_of_step)) == len(RECIPES) for losses_of_step in zip(*files))


def test_one_thread_and_two_give_the_same_bits(tmp_path):
    """With AMX, whose sums oneDNN splits by the number of threads, they give what that changes, and each the same twice."""
    one, two, again = (train("mxfp8", tmp_path / str(i), "--threads", n, steps=10) for i, n in enumerate((1, 2, 2)))
    assert two.tolist() == again.tolist()
    device = re.search(r"^device .*$", run_well(*MODEL, *TRAINING, "--dry-run").stdout, re.M)[0]
    if "with AMX" in device:
        assert worst_ratio(two, load("mxfp8"))[0] <= 1
    else:
        assert one.tolist() == two.tolist()


def make(recipe):
    options = [*TRAINING, *RATE, "--recipe", recipe, "--max-steps"]
    device = re.search(r"^device .*?: (.*)$", run_well(*MODEL, *TRAINING, "--dry-run").stdout, re.M)[1]
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        initial = make_initial_weights(scratch / "initial", *MODEL, *TRAINING, "--recipe", recipe)
        reference = train(recipe, scratch / "reference")
        run_well(*options, 1, "--init-from", initial, "--out-dir", scratch / "same")
        assert losses(scratch / "same")[0] == reference[0], "the checkpoint doesn't hold the initial weights"
        long = deviations(initial, reference, LONGEST_SUM, range(LONG), scratch, *options, STEPS)
        short = deviations(initial, reference, LONGEST_SUM, range(LONG, LONG + SHORT), scratch, *options, 1)
    largest = np.abs(long).max(axis=0)
    envelope = [float(largest[max(0, step - WINDOW):step + WINDOW + 1].max()) for step in range(STEPS)]
    first = float(np.sqrt(np.mean(np.concatenate([long[:, 0], short[:, 0]]) ** 2)))
    golden = {"recipe": recipe, "device": device, "first_step_deviation": first,
              "losses": reference.tolist(), "envelope": envelope}
    GOLDEN.mkdir(exist_ok=True)
    golden_path(recipe).write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{golden_path(recipe)}: first step's deviation {first:.1e}, envelope up to {max(envelope):.1e}", flush=True)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RECIPES:
        make(chosen)
