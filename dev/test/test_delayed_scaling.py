"""fp8-delayed in whole runs: histories of amaxes in checkpoints, by NumPy; resumes, evaluations, ranks, other recipes."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from test_ranks import run_ranks_well
from trainer import MODEL, assert_same_run, latest, losses, one_sentence, run, run_well

F = np.float32
HISTORY = 3
RECIPE = ["--recipe", "fp8-delayed", "--amax-history", HISTORY]
LENGTH = ["--max-steps", 6, "--val-every", 0, "--checkpoint-every", 1, "--keep-checkpoints", 0]
LINEARS = {"qkv": "attn.c_attn", "projection": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
WEIGHTS, ACTIVATIONS, GRADIENTS = range(3)


@pytest.fixture(scope="session")
def straight(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    run_well(*data, *MODEL, *RECIPE, *LENGTH, "--out-dir", out)
    return out


def amaxes(directory):
    return load_file(directory / "amax_history.safetensors")


def test_histories_are_those_of_the_weights_and_of_the_formula(straight):
    """The newest amax of a weight is that of the checkpoint before: with it the step was taken."""
    for step in range(1, 7):
        found = amaxes(straight / f"step_{step:06d}")
        assert len(found) == 2 * 2 * len(LINEARS)
        for layer in range(2):
            for linear, name in LINEARS.items():
                history, amax = (found[f"h.{layer}.{linear}.{what}"] for what in ("amax_history", "amax"))
                assert history.shape == (HISTORY, 3) and history.dtype == amax.dtype == F
                assert (history[:max(HISTORY - step, 0)] == 0).all() and (history[max(HISTORY - step, 0):] > 0).all()
                assert (amax == history.max(axis=0)).all()
                if step == 1:
                    continue
                before = amaxes(straight / f"step_{step - 1:06d}")[f"h.{layer}.{linear}.amax_history"]
                assert (history[:-1] == before[1:]).all()
                weights = load_file(straight / f"step_{step - 1:06d}" / "model.safetensors")
                assert history[-1, WEIGHTS] == np.abs(weights[f"transformer.h.{layer}.{name}.weight"]).max()


def test_the_last_amax_alone(data, tmp_path):
    run_well(*data, *MODEL, *RECIPE, *LENGTH, "--amax-algorithm", "most-recent", "--out-dir", tmp_path / "run")
    for key, history in amaxes(latest(tmp_path / "run")).items():
        if key.endswith("_history"):
            assert (amaxes(latest(tmp_path / "run"))[key.removesuffix("_history")] == history[-1]).all()


def test_a_resumed_run_has_the_same_bits(straight, tmp_path):
    for stop in (1, 4):
        out = shutil.copytree(straight, tmp_path / f"run-{stop}")
        for step in range(stop + 1, 7):
            shutil.rmtree(out / f"step_{step:06d}")
        (out / "latest").write_text(f"step_{stop:06d}\n")
        run_well("--resume", "--out-dir", out)
        assert_same_run(out, straight)
        assert (latest(out) / "amax_history.safetensors").read_bytes() == (latest(straight) / "amax_history.safetensors").read_bytes()


def test_evaluations_change_no_history(data, straight, tmp_path):
    run_well(*data, *MODEL, *RECIPE, *LENGTH, "--val-every", 1, "--sample-every", 2, "--out-dir", tmp_path / "run")
    assert (losses(tmp_path / "run") == losses(straight)).all()
    assert amaxes(latest(tmp_path / "run")).keys() == amaxes(latest(straight)).keys()
    assert all((a == b).all() for a, b in zip(amaxes(latest(tmp_path / "run")).values(), amaxes(latest(straight)).values()))


def test_it_trains_as_current_scaling_does(data, tmp_path):
    """A scale of the step before is nearly the tensor's own, once there is one; the first step has 1."""
    common = [*data, *MODEL, "--max-steps", 40, "--val-every", 0]
    for recipe in ("fp8-current", "fp8-delayed"):
        run_well(*common, "--recipe", recipe, "--out-dir", tmp_path / recipe)
    found, expected = losses(tmp_path / "fp8-delayed"), losses(tmp_path / "fp8-current")
    print(f"losses differ by up to {np.abs(found - expected).max():.3f}")
    assert (found[1:] != expected[1:]).any() and np.abs(found - expected).max() < 0.05 * expected[0]
    assert found[-1] < found[0] - 0.3


def test_a_margin_of_a_power_of_two_leaves_normal_numbers_alone(data, straight, tmp_path):
    run_well(*data, *MODEL, *RECIPE, *LENGTH, "--amax-margin", 1, "--out-dir", tmp_path / "run")
    difference = np.abs(losses(tmp_path / "run") - losses(straight))
    print(f"losses differ by up to {difference.max():.1e}")
    assert difference[0] == 0 and 0 < difference.max() < 0.01  # the first step's scale has no margin


def test_histories_begin_anew_with_another_recipe(data, tmp_path):
    """As --recipe-at, and by hand; a recipe that has none leaves the file out."""
    common = [*data, *MODEL, "--schedule", "constant", "--val-every", 0, "--checkpoint-every", 2, "--keep-checkpoints", 0]
    run_well(*common, "--recipe", "bf16", "--max-steps", 6, "--recipe-at", f"2:fp8-delayed,amax-history={HISTORY}",
             "--recipe-at", "4:bf16", "--out-dir", tmp_path / "run")
    there = [(tmp_path / f"run/step_{step:06d}/amax_history.safetensors").exists() for step in (2, 4, 6)]
    assert there == [False, True, False]
    assert (amaxes(tmp_path / "run/step_000004")["h.0.up.amax_history"][0] == 0).all()
    run_well(*common, "--recipe", "bf16", "--max-steps", 2, "--out-dir", tmp_path / "stopped")
    run_well("--resume", "--max-steps", 4, *RECIPE, "--out-dir", tmp_path / "stopped")
    assert (losses(tmp_path / "stopped") == losses(tmp_path / "run")[:4]).all()


def test_samples_have_the_scales_of_their_checkpoint(data, tmp_path):
    run_well(*data, *MODEL, *RECIPE, "--max-steps", 6, "--val-every", 0, "--sample-every", 6, "--out-dir", tmp_path / "run")
    generate = ["--generate", tmp_path / "run", "--sample-tokens", 40, "--temperature", 0]
    text = run_well(*generate).stdout
    found = amaxes(latest(tmp_path / "run"))
    flat = {key: np.full_like(value, 1e-4) for key, value in found.items()}
    save_file(flat, latest(tmp_path / "run") / "amax_history.safetensors")
    assert run_well(*generate).stdout != text


def test_ranks_have_one_history(data, tmp_path):
    """Maxima over ranks are exact: all of the first step's are one rank's, and so are the weights' copies."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    common = [*data, *MODEL, *RECIPE, *LENGTH, "--batch-size", 2, "--total-batch-size", 4 * 32]
    for name, ranks, options in (("one", 1, []), ("zero", 2, ["--zero", 0]), ("shards", 2, []),
                                 ("gathered", 2, ["--gather", "fp32"])):
        run_ranks_well(ranks, *common, *options, "--out-dir", tmp_path / name)
    one = tmp_path / "one"
    for name in ("zero", "shards", "gathered"):
        out = tmp_path / name
        difference = np.abs(losses(out) - losses(one))
        print(f"{name}: losses are off by up to {difference.max():.1e}")
        assert abs(difference[0]) < 1e-12 and difference.max() < 1e-3
        first, expected = amaxes(out / "step_000001"), amaxes(one / "step_000001")
        assert first.keys() == expected.keys() and all((first[key] == expected[key]).all() for key in first)
    out = shutil.copytree(tmp_path / "shards", tmp_path / "resumed")
    for step in (4, 5, 6):
        shutil.rmtree(out / f"step_{step:06d}")
    (out / "latest").write_text("step_000003\n")
    run_ranks_well(2, "--resume", "--out-dir", out)
    assert_same_run(out, tmp_path / "shards")
    sent, gathered = (latest(tmp_path / name) / "amax_history.safetensors" for name in ("shards", "gathered"))
    assert sent.read_bytes() == gathered.read_bytes()
    assert (losses(tmp_path / "shards") == losses(tmp_path / "gathered")).all()


def test_a_card_reads_tensors_once(data):
    def megabytes_read(recipe):
        lines = run_well("--dry-run", *data, *MODEL, "--device", "h100", "--recipe", recipe).stdout.splitlines()
        return [float(line.split()[-5]) for line in lines if line.startswith("quantize")]

    current, delayed = megabytes_read("fp8-current"), megabytes_read("fp8-delayed")
    print(current, delayed)
    assert len(current) == len(delayed) == 4
    assert abs(2 * sum(delayed) - sum(current)) < 3 * 4 * 0.05  # as they are rounded


def test_a_damaged_history_is_refused(straight, tmp_path):
    def damage(name, change):
        out = shutil.copytree(straight, tmp_path / name)
        found = amaxes(latest(out))
        change(found)
        save_file(found, latest(out) / "amax_history.safetensors")
        return one_sentence(run("--resume", "--max-steps", 8, "--out-dir", out).stderr)

    assert "h.1.down.amax" in damage("missing", lambda found: found.pop("h.1.down.amax"))
    assert "nan" in damage("nan", lambda found: found["h.0.up.amax_history"].fill(np.nan))
    assert "-1" in damage("negative", lambda found: found["h.0.qkv.amax"].fill(-1))
    out = shutil.copytree(straight, tmp_path / "gone")
    (latest(out) / "amax_history.safetensors").unlink()
    assert "has no amax_history.safetensors" in one_sentence(run("--resume", "--max-steps", 8, "--out-dir", out).stderr)


@pytest.mark.parametrize("options, parts", [
    (["--recipe", "mxfp8", "--amax-history", 4], ["mxfp8", "--amax-history", "fp8-delayed"]),
    (["--recipe", "fp8-current", "--amax-algorithm", "max"], ["fp8-current", "--amax-algorithm"]),
    (["--recipe", "fp8-delayed", "--amax-algorithm", "mean"], ["amax-algorithm", "'mean'"]),
    (["--recipe", "fp8-delayed", "--amax-margin", 40], ["--amax-margin"]),
])
def test_refused(data, tmp_path, options, parts):
    done = run(*data, *MODEL, "--max-steps", 2, "--out-dir", tmp_path / "run", *options)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert all(part in one_sentence(done.stderr) for part in parts), done.stderr


def test_the_log_says_what_scales_are_made_of(straight):
    recipe = json.loads((straight / "log.jsonl").read_text().splitlines()[0])["recipe"]
    assert [recipe[key] for key in ("amax-history", "amax-algorithm", "amax-margin")] == [HISTORY, "max", 0]
