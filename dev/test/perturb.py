"""How far losses move when sums are added in another order: measured, by perturbing the initial weights.

Two machines multiply the same values and add the products in FP32 in different orders. A sum of K products then differs by
about sqrt(K) roundings of 2^-24, independently for each sum. Weights that are off by as much, each by itself, change the
sums by as much (errors of K terms add up to sqrt(K) of one's, as the sum itself does), and what follows is the same: in BF16
and in MX formats a few values round to the other neighbour, and training amplifies that from step to step."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from trainer import latest, losses, run_well

FP32_ROUNDOFF = 2.0**-24


def make_initial_weights(out, *options):
    """Saves the weights that a run with these options begins with. Returns the checkpoint's
    directory."""
    run_well(*options, "--max-steps", 1, "--learning-rate", 0, "--out-dir", out)
    return latest(out)


def perturbed(initial, directory, longest_sum, seed):
    """Writes a copy of the checkpoint in which every weight is off by sqrt(longest_sum) roundings,
    up or down."""
    shutil.copytree(initial, directory)
    path = Path(directory) / "model.safetensors"
    rng = np.random.default_rng(seed)
    relative = FP32_ROUNDOFF * np.sqrt(longest_sum)
    weights = {name: (w * (1 + relative * rng.choice([-1.0, 1.0], w.shape))).astype(np.float32)
               for name, w in load_file(path).items()}
    save_file(weights, path)
    return directory


def deviations(initial, reference, longest_sum, seeds, scratch, *options):
    """Returns for each seed the losses of a run from perturbed weights, less those of the run that
    is perturbed."""
    found = []
    for seed in seeds:
        weights = perturbed(initial, Path(scratch) / f"weights-{seed}", longest_sum, seed)
        out = Path(scratch) / f"run-{seed}"
        run_well(*options, "--init-from", weights, "--out-dir", out, timeout=600)
        found.append(losses(out) - reference[:len(losses(out))])
        shutil.rmtree(weights)
        shutil.rmtree(out)
    return np.array(found)
