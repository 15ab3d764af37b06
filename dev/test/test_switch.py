"""Another recipe from some step on, by --recipe-at and by --resume: the same state, other arithmetic, and the log says so."""

import shutil

import pytest

from test_ranks import run_failing_ranks, run_ranks_well
from trainer import (
    MODEL, TERM, assert_same_run, events, latest, losses, one_sentence, run, run_well, signal_at_step, steps,
    validations, weights_and_moments)

LENGTH = ["--max-steps", 40, "--val-every", 10]


@pytest.fixture(scope="session")
def plain(data, tmp_path_factory):
    """A run of 40 steps under mxfp8."""
    out = tmp_path_factory.mktemp("plain") / "run"
    run_well(*data, *MODEL, *LENGTH, "--out-dir", out)
    return out


def switches(out):
    return [(event["step"], event["was"], event["recipe"]["name"]) for event in events(out, "recipe")]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp32", "mxfp8,wgrad-x=bf16"], ids=["mxfp8", "fp32", "adjusted"])
def test_a_switch_to_the_same_recipe_changes_no_bit(data, plain, tmp_path, recipe):
    name, _, operand = recipe.partition(",")
    options = ["--recipe", name, *(["--operand", operand] if operand else [])]
    straight = plain
    if recipe != "mxfp8":
        straight = tmp_path / "straight"
        run_well(*data, *MODEL, *LENGTH, *options, "--out-dir", straight)
    out = tmp_path / "switched"
    run_well(*data, *MODEL, *LENGTH, *options, "--recipe-at", f"10:{recipe}", "--recipe-at", f"17:{recipe}", "--out-dir", out)
    assert_same_run(out, straight)
    assert switches(out) == [(10, name, name), (17, name, name)]


@pytest.mark.parametrize("before, after, text", [
    ("mxfp8", ["--recipe", "bf16"], "bf16"),
    ("bf16", ["--recipe", "mxfp8", "--scale-rounding", "floor", "--operand", "wgrad-x=bf16"],
     "mxfp8,scale-rounding=floor,wgrad-x=bf16"),
    ("fp32", ["--recipe", "mxfp8"], "mxfp8"),
    ("mxfp8", ["--recipe", "mxfp8", "--quantize-lm-head", "--bf16-first-layers", 1, "--weight-scaling", "2d"],
     "mxfp8,quantize-lm-head,bf16-first-layers=1,weight-scaling=2d"),
], ids=["mxfp8-bf16", "bf16-mxfp8", "fp32-mxfp8", "head"])
def test_a_switch_is_a_stop_and_a_resume_with_the_other_recipe(data, tmp_path, before, after, text):
    """A stop validates, and so it falls where a validation is due. The learning rate has the length of the whole run."""
    common = [*data, *MODEL, "--val-every", 10, "--schedule", "constant", "--skip-outliers", 100, "--recipe", before]
    run_well(*common, "--max-steps", 40, "--recipe-at", f"20:{text}", "--out-dir", tmp_path / "switched")
    run_well(*common, "--max-steps", 20, "--out-dir", tmp_path / "stopped")
    done = run_well("--resume", "--max-steps", 40, *after, "--out-dir", tmp_path / "stopped")
    assert_same_run(tmp_path / "stopped", tmp_path / "switched")
    logged = events(tmp_path / "switched", "recipe")
    assert logged == events(tmp_path / "stopped", "recipe") and len(logged) == 1
    assert logged[0]["step"] == 20 and logged[0]["was"] == before
    assert logged[0]["recipe"] == events(tmp_path / "stopped", "config")[-1]["recipe"]
    assert f"step 20: from here on recipe {logged[0]['recipe']['name']}" in done.stdout


def test_other_arithmetic_from_that_step_on(data, plain, tmp_path):
    run_well(*data, *MODEL, *LENGTH, "--recipe-at", "15:mxfp4", "--recipe-at", "25:fp32", "--out-dir", tmp_path / "run")
    assert steps(tmp_path / "run")[:15] == steps(plain)[:15] and validations(tmp_path / "run")[:2] == validations(plain)[:2]
    apart = abs(losses(tmp_path / "run") - losses(plain))
    print(f"losses are apart by {apart[15]:.2g} at the switch, {apart[15:].max():.2g} at most")
    assert apart[15] > 1e-4  # 32 values of E2M1 instead of 256: not a rounding difference
    assert switches(tmp_path / "run") == [(15, "mxfp8", "mxfp4"), (25, "mxfp4", "fp32")]


@pytest.mark.parametrize("stop", [9, 14, 15, 30])
def test_a_resumed_run_derives_the_recipe_in_force(data, tmp_path, stop):
    """Stopped before, at and after the switches."""
    common = [*data, *MODEL, *LENGTH, "--schedule", "constant", "--recipe-at", "15:bf16", "--recipe-at", "30:mxfp8-ocp"]
    run_well(*common, "--out-dir", tmp_path / "straight")
    run_well(*common, "--max-steps", stop, "--val-every", 0, "--out-dir", tmp_path / "run")
    run_well("--resume", "--max-steps", 40, "--val-every", 10, "--out-dir", tmp_path / "run")
    assert steps(tmp_path / "run") == steps(tmp_path / "straight")
    assert weights_and_moments(latest(tmp_path / "run")) == weights_and_moments(latest(tmp_path / "straight"))
    assert switches(tmp_path / "run") == switches(tmp_path / "straight") == [(15, "mxfp8", "bf16"), (30, "bf16", "mxfp8-ocp")]


def test_a_signal_between_switches(data, tmp_path):
    common = [*data, *MODEL, "--max-steps", 60, "--val-every", 10, "--recipe-at", "10:bf16", "--recipe-at", "40:mxfp8"]
    run_well(*common, "--out-dir", tmp_path / "straight")
    assert signal_at_step(20, [TERM], *common, "--out-dir", tmp_path / "run")[0] == 0
    run_well("--resume", "--out-dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_a_new_recipe_at_a_resume_lasts(data, plain, tmp_path):
    """It comes without the old one's adjustments, replaces the switches that have been, and not those to come."""
    out = tmp_path / "run"
    run_well(*data, *MODEL, "--max-steps", 20, "--operand", "wgrad-x=bf16", "--recipe-at", "10:bf16", "--recipe-at", "30:fp32",
             "--out-dir", out)
    done = run_well("--resume", "--max-steps", 25, "--recipe", "mxfp8-ocp", "--out-dir", out)
    assert "25 steps, 0.16 epochs; too short for its --recipe-at of step 30\n" in done.stdout, done.stdout
    run_well("--resume", "--max-steps", 35, "--out-dir", out)
    assert switches(out) == [(10, "mxfp8", "bf16"), (20, "bf16", "mxfp8-ocp"), (30, "mxfp8-ocp", "fp32")]
    recipe = events(out, "config")[1]["recipe"]
    assert recipe["name"] == "mxfp8-ocp" and not recipe["adjusted"]
    assert events(out, "config")[2]["recipe"] == recipe


def test_a_later_switch_at_a_resume_leaves_those_that_were(data, tmp_path):
    out, straight = tmp_path / "run", tmp_path / "straight"
    common = [*data, *MODEL, "--schedule", "constant"]
    run_well(*common, "--max-steps", 5, "--recipe-at", "3:bf16", "--recipe-at", "9:mxfp4", "--out-dir", out)
    run_well("--resume", "--max-steps", 10, "--recipe-at", "8:mxfp8-ocp", "--out-dir", out)
    run_well(*common, "--max-steps", 10, "--recipe-at", "3:bf16", "--recipe-at", "8:mxfp8-ocp", "--out-dir", straight)
    assert switches(out) == switches(straight) == [(3, "mxfp8", "bf16"), (8, "bf16", "mxfp8-ocp")]
    assert steps(out) == steps(straight)


def test_a_transform_s_size_can_be_taken_back(data, tmp_path):
    run_well(*data, *MODEL, "--max-steps", 1, "--hadamard-wgrad", "fixed", "--hadamard-size", 32, "--out-dir", tmp_path / "run")
    again = ["--resume", "--max-steps", 2, "--hadamard-wgrad", "none", "--out-dir", tmp_path / "run"]
    done = run(*again)
    assert done.returncode == 2 and "(a resumed run that had it takes --hadamard-size 16)" in one_sentence(done.stderr)
    run_well(*again, "--hadamard-size", 16)


def test_the_same_recipe_at_a_resume_says_nothing(data, plain, tmp_path):
    out = shutil.copytree(plain, tmp_path / "run")
    run_well("--resume", "--recipe", "mxfp8", "--max-steps", 45, "--out-dir", out)
    assert switches(out) == []


def test_samples_have_the_recipe_of_their_checkpoint(data, tmp_path):
    out = tmp_path / "run"
    run_well(*data, *MODEL, "--max-steps", 4, "--recipe-at", "2:mxfp4", "--out-dir", out)
    texts = [run_well("--generate", out, "--sample-tokens", 200, "--temperature", 1, *options).stdout
             for options in ([], ["--recipe", "mxfp4"], ["--recipe", "mxfp8"])]
    assert texts[0] == texts[1] != texts[2]


# The largest of them is what must fit.

def total_of(*options):
    lines = run_well("--dry-run", *MODEL, *options).stdout.splitlines()
    return next(line for line in lines if line.strip().startswith("total")).split()[1:3]


def test_memory_is_that_of_the_largest(data):
    assert total_of("--recipe", "fp32") != total_of()
    assert total_of("--recipe-at", "5:fp32") == total_of("--recipe", "fp32") == total_of("--recipe", "fp32", "--recipe-at", "5:bf16")
    text = run_well("--dry-run", *MODEL, "--recipe-at", "5:fp32").stdout
    assert "recipe mxfp8" in text and "from step 5 on\nrecipe fp32" in text


BAD = {
    "no step": (["--recipe-at", "bf16"], ["STEP:RECIPE", "'bf16'"]),
    "step 0": (["--recipe-at", "0:bf16"], ["STEP:RECIPE", "from 1 on"]),
    "negative": (["--recipe-at=-4:bf16"], ["STEP:RECIPE"]),
    "no recipe": (["--recipe-at", "5:"], ["--recipe-at 5:", "unknown recipe ''"]),
    "unknown recipe": (["--recipe-at", "5:bf17"], ["--recipe-at 5:bf17", "did you mean 'bf16'"]),
    "unknown adjustment": (["--recipe-at", "5:mxfp8,wgard-x=bf16"], ["adjustment", "'wgard-x'", "did you mean 'wgrad-x'"]),
    "unknown format": (["--recipe-at", "5:mxfp8,wgrad-x=bf17"], ["format 'bf17'", "did you mean 'bf16'"]),
    "unknown rounding": (["--recipe-at", "5:mxfp8,scale-rounding=flor"], ["scale-rounding has no choice 'flor'", "did you mean floor"]),
    "a flag's value": (["--recipe-at", "5:mxfp8,quantize-lm-head=yes"], ["quantize-lm-head takes no value"]),
    "descending": (["--recipe-at", "9:bf16", "--recipe-at", "5:mxfp8"], ["5:mxfp8", "step 9", "ascending"]),
    "twice": (["--recipe-at", "9:bf16", "--recipe-at", "9:mxfp8"], ["9:mxfp8", "ascending"]),
    "too many BF16 layers": (["--recipe-at", "9:mxfp8,bf16-first-layers=3"], ["--bf16-first-layers 3", "2 blocks"]),
    "square": (["--recipe-at", "9:mxfp8,dgrad-w=e5m2,weight-scaling=2d"], ["--weight-scaling 2d", "e4m3 and e5m2"]),
    "a scaling's format": (["--recipe", "nvfp4", "--format-gradients", "e4m3"], ["dgrad-dy", "e2m1, not e4m3"]),
    "a scaling on a card": (["--dry-run", "--device", "b200", "--mx-gemm", "native", "--recipe-at", "9:fp8-blockwise-fp32"],
                            ["--mx-gemm native", "only compute capability 9.0"]),
    "a transform of nothing": (["--recipe", "bf16", "--hadamard-wgrad", "fixed"], ["--hadamard-wgrad", "recipe bf16"]),
    "a size of nothing": (["--recipe", "mxfp4", "--hadamard-size", "32"], ["--hadamard-size", "--hadamard-dgrad"]),
    "a size": (["--recipe", "mxfp4", "--hadamard-wgrad", "fixed", "--hadamard-size", "48"], ["48", "16"]),
    "two transforms of one copy": (["--recipe-at", "9:nvfp4,hadamard-fprop=random"], ["--weight-scaling 1d", "--hadamard-fprop random"]),
    "a backward source of nothing": (["--recipe", "mxfp8-forward-only", "--backward-source", "forward"], ["--backward-source forward", "mxfp8-forward-only"]),
    "a transform of blocks in BF16": (["--bf16-first-layers", "2", "--hadamard-wgrad", "fixed"], ["--hadamard-wgrad", "fewer blocks"]),
    "a transform that a filter undoes": (["--operand-in", "h.*:wgrad-*=bf16", "--hadamard-wgrad", "random"], ["--hadamard-wgrad", "no linear layer"]),
    "a backward source of blocks in BF16": (["--bf16-first-layers", "1", "--bf16-last-layers", "1", "--backward-source", "forward"], ["--backward-source forward", "fewer blocks"]),
    "a scale rounding of none": (["--recipe-at", "9:nvfp4,scale-rounding=floor"], ["--scale-rounding", "recipe nvfp4", "MX blocks"]),
    "a stochastic rounding of one kind": (["--recipe", "mxfp8-forward-only", "--element-rounding-weights", "stochastic", "--element-rounding-gradients", "stochastic"],
                                          ["--element-rounding-gradients stochastic", "mxfp8-forward-only", "a gradient operand", "leave it out"]),
    "a recipe's own rounding, undone": (["--recipe-at", "5:nvfp4-nvidia,element-rounding-gradients=stochastic,dgrad-dy=bf16,wgrad-dy=bf16"],
                                        ["--element-rounding-gradients stochastic", "nvfp4-nvidia"]),
    "a transformed backward source": (["--backward-source", "forward", "--hadamard-fprop", "fixed"], ["--backward-source forward", "--hadamard-fprop"]),
    "a card": (["--dry-run", "--device", "h100", "--recipe-at", "9:fp32"], ["--recipe fp32"]),
}


@pytest.mark.parametrize("options, parts", BAD.values(), ids=[name.replace(" ", "-") for name in BAD])
def test_what_makes_no_sense_is_refused(data, tmp_path, options, parts):
    done = run(*data, *MODEL, "--max-steps", 2, "--out-dir", tmp_path / "run", *options)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert all(part in one_sentence(done.stderr) for part in parts), done.stderr


@pytest.mark.parametrize("options", [["--hadamard-wgrad", "fixed"], ["--backward-source", "forward"]])
def test_what_is_of_effect_in_the_head_alone_is_taken(data, options):
    run_well("--dry-run", *data, *MODEL, "--bf16-first-layers", "2", "--quantize-lm-head", *options)


def test_an_adjustment_of_a_recipe_that_is_past_is_refused(data, tmp_path):
    run_well(*data, *MODEL, "--max-steps", 4, "--recipe-at", "2:bf16", "--out-dir", tmp_path / "run")
    done = run("--resume", "--max-steps", 6, "--scale-rounding", "floor", "--out-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "--scale-rounding" in one_sentence(done.stderr) and "step 4" in done.stderr and "2:bf16" in done.stderr


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.parametrize("zero, recipe", [(0, "fp32"), (1, "bf16"), (2, "mxfp8-ocp")])
def test_ranks_switch_together(data, tmp_path, zero, recipe):
    common = [*data, *MODEL, *LENGTH, "--max-steps", 12, "--zero", zero, "--batch-size", 2]
    run_ranks_well(2, *common, "--recipe-at", f"6:{recipe}", "--recipe-at", "9:mxfp8", "--out-dir", tmp_path / "run")
    run_ranks_well(2, *common, "--out-dir", tmp_path / "straight")
    assert switches(tmp_path / "run") == [(6, "mxfp8", recipe), (9, recipe, "mxfp8")]
    ours, straight = steps(tmp_path / "run"), steps(tmp_path / "straight")
    assert len(ours) == 12 and ours[:6] == straight[:6] and ours[6]["loss"] != straight[6]["loss"]
    apart = abs(losses(tmp_path / "run") - losses(tmp_path / "straight")).max()
    print(f"losses are at most {apart:.2g} apart")
    assert apart < 0.1  # the same training in other arithmetic


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_ranks_that_switch_to_the_same_recipe(data, tmp_path):
    common = [*data, *MODEL, "--max-steps", 8, "--batch-size", 2]
    run_ranks_well(2, *common, "--out-dir", tmp_path / "straight")
    run_ranks_well(2, *common, "--recipe-at", "4:mxfp8", "--out-dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_ranks_refuse_to_shard_anew(data, tmp_path):
    done = run_failing_ranks(2, *data, *MODEL, "--max-steps", 8, "--batch-size", 2, "--recipe-at", "4:fp32", "--out-dir",
                             tmp_path / "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    sentence = done.only_sentence()
    assert "--recipe-at 4:fp32" in sentence and "--zero 0" in sentence
