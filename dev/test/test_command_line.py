"""What a newcomer types: files of options, the version, words that are nearly right."""

import json
import re
import subprocess
from unittest.mock import ANY

import pytest
from trainer import ENVIRONMENT, LAYERS, MODEL, SLOWNESS, events, latest, losses, one_sentence, run, run_well, words


@pytest.mark.parametrize("words, suggestion", [
    (["--lr", 1], "did you mean --learning-rate or --final-lr-fraction?"),
    (["--steps", 1], "did you mean --max-steps, --warmup-steps or --val-steps?"),
    (["--epoch", 1], "did you mean --epochs?"),
    (["--schedule", "cos"], "did you mean cosine?"),
    (["--recipe", "mx"], "did you mean mxfp8,"),
    (["--batch", 1], "did you mean --batch-size?")])
def test_words_that_are_nearly_right(words, suggestion):
    done = run(*words)
    assert done.returncode == 2 and suggestion in one_sentence(done.stderr)


def test_runs_of_one_second_have_directories_of_their_own(data, tmp_path):
    command = words([*data, *MODEL, "--max-steps", 1, "--checkpoint-every", 0])
    runs = [subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(4)]
    ends = [run.communicate(timeout=60 * SLOWNESS)[1] for run in runs]
    assert ends == [""] * 4 and [run.returncode for run in runs] == [0] * 4
    directories = sorted(path.name for path in (tmp_path / "runs").iterdir())
    print(directories)
    assert len(directories) == 4 and all(re.fullmatch(r"\d{8}-\d{6}(-[234])?", name) for name in directories)
    for path in (tmp_path / "runs").iterdir():
        (latest(path) / "model.safetensors").write_bytes(b"damaged")
    refused = subprocess.run([*command, "--init-from", path], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert refused.returncode == 2 and "model.safetensors" in refused.stderr
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == directories  # nothing of it stays


def test_version():
    assert re.fullmatch(r"train_gpt_mxfp8 \S.*\n", run_well("--version").stdout)


def test_help_prints_no_number_with_an_exponent_that_needs_none():
    text = re.sub(r"\s+", " ", run_well("--help").stdout)
    assert "(default: 600)" in text and not re.search(r"\de\+", text)


def test_one_of_a_thing_is_singular(data):
    text = run_well("--dry-run", *data, *MODEL, "--batch-size", 1, "--max-steps", 1, "--layers", 1, "--heads", 1).stdout
    assert "cpu, 1 thread;" in text and "1 layer, 1 head," in text
    assert "(1 sequence of 32, 1 micro-batch), 1 step, " in text


# ---------------------------------------------------------------------------------------------------------------------
# --config


def write(path, options):
    path.write_text(json.dumps(options))
    return path


def test_a_file_of_options_is_the_command_line(data, tmp_path):
    words = [*data, *MODEL, "--max-steps", 5, "--no-biases", "--operand", "wgrad-x=bf16"]
    run_well(*words, "--out-dir", tmp_path / "words")
    options = {"train-data": data[1], "val-data": data[3], "max-steps": 5, "biases": False, "operand": ["wgrad-x=bf16"]}
    options |= {name.removeprefix("--"): value for name, value in zip(MODEL[::2], MODEL[1::2])}
    run_well("--config", write(tmp_path / "options.json", options), "--out-dir", tmp_path / "file")
    assert losses(tmp_path / "file").tolist() == losses(tmp_path / "words").tolist()


def test_the_command_line_goes_before_the_file(data, tmp_path):
    path = write(tmp_path / "options.json", {"max-steps": 5, "operand": ["wgrad-x=bf16"], "seed": 3})
    run_well("--config", path, *data, *MODEL, "--max-steps", 2, "--operand", "wgrad-x=e5m2", "--out-dir", tmp_path / "run")
    config = events(tmp_path / "run", "config")[0]["options"]
    assert (config["max-steps"], config["operand"], config["seed"]) == (2, ["wgrad-x=e5m2"], 3)


def test_a_checkpoint_s_options_make_the_run_again(data, tmp_path):
    run_well(*data, *MODEL, "--max-steps", 5, "--seed", 7, "--norm", "rmsnorm", "--out-dir", tmp_path / "first")
    run_well("--config", latest(tmp_path / "first") / "trainer_state.json", "--out-dir", tmp_path / "again")
    assert losses(tmp_path / "again").tolist() == losses(tmp_path / "first").tolist()
    # Nor is what it began with what it is asked for: text of a run that came from another one.
    run_well(*data, *MODEL, "--max-steps", 1, "--init-from", tmp_path / "first", "--out-dir", tmp_path / "second")
    run_well("--config", latest(tmp_path / "second") / "trainer_state.json", "--generate", tmp_path / "second",
             "--sample-tokens", 2)
    # What the run was isn't what it is told: a model from a preset stays possible.
    text = run_well("--dry-run", "--config", latest(tmp_path / "first") / "trainer_state.json", "--layers", 3).stdout
    assert "3 layers, 2 heads, 64 channels" in text


def test_a_log_s_first_line_makes_the_run_again(data, tmp_path):
    """Also with a schedule that has no use for the saved --decay-fraction."""
    schedule = ["--schedule", "wsd", "--decay-fraction", 0.5, "--final-lr-fraction", 0.5]
    run_well(*data, *MODEL, "--max-steps", 5, *schedule, "--out-dir", tmp_path / "first")
    with open(tmp_path / "first" / "log.jsonl") as log:
        (tmp_path / "line.json").write_text(log.readline())
    run_well("--config", tmp_path / "line.json", "--out-dir", tmp_path / "again")
    assert losses(tmp_path / "again").tolist() == losses(tmp_path / "first").tolist()
    run_well("--config", tmp_path / "line.json", "--schedule", "constant", "--out-dir", tmp_path / "constant")


def test_another_recipe_leaves_a_run_s_adjustments(data, tmp_path):
    """They adjusted the run's own, which was switched from; those of the command line hold."""
    run_well(*data, *MODEL, "--max-steps", 2, "--recipe", "mxfp8", "--scale-rounding", "floor", "--recipe-at", "1:mxfp4",
             "--out-dir", tmp_path / "first")
    common = ["--config", latest(tmp_path / "first") / "trainer_state.json", "--recipe"]
    for recipe, *given in (["bf16"], ["mxfp8-ocp", "--scale-rounding", "even"], ["mxfp8"]):
        out = tmp_path / f"under-{recipe}"
        run_well(*common, recipe, *given, "--out-dir", out)
        options = events(out, "config")[0]["options"]
        assert (options["recipe"], options["scale-rounding"]) == (recipe, given[1] if given else None)
        assert not events(out, "recipe")


def test_weights_are_the_command_line_s(data, tmp_path):
    """A file's --init and --init-from give way to the command line's, and to --resume."""
    common = [*data, *MODEL, "--max-steps", 2]
    run_well(*common, "--init", "mitchell", "--out-dir", tmp_path / "mitchell")
    run_well(*common, "--out-dir", tmp_path / "gpt2")
    run_well(*common, "--init-from", tmp_path / "gpt2", "--out-dir", tmp_path / "from")
    run_well("--config", latest(tmp_path / "mitchell") / "trainer_state.json", "--init-from", tmp_path / "gpt2", "--out-dir", tmp_path / "a")
    assert losses(tmp_path / "a").tolist() == losses(tmp_path / "from").tolist()
    path = write(tmp_path / "options.json", {"init-from": str(tmp_path / "gpt2")})
    run_well("--config", latest(tmp_path / "from") / "trainer_state.json", "--init", "mitchell", "--out-dir", tmp_path / "b")
    assert losses(tmp_path / "b").tolist() == losses(tmp_path / "mitchell").tolist()
    run_well("--resume", "--config", path, "--max-steps", 3, "--out-dir", tmp_path / "from")
    done = run("--resume", "--init", "mitchell", "--max-steps", 4, "--out-dir", tmp_path / "from")
    assert done.returncode == 2 and "--init is of new weights" in one_sentence(done.stderr)


def test_a_preset_leaves_what_a_file_says(data, tmp_path):
    """Also where that is what is taken without a preset; and a run's own options make the same run again."""
    given = {"weight-decay": 0.0, "learning-rate": 6e-4, "eps": 1e-8, "init": "gpt2"}
    shape = ["--model", "olmo-n6", *MODEL, "--total-batch-size", 256, "--max-steps", 2]
    run_well("--config", write(tmp_path / "options.json", given | {"warmup-from": None}), *data, *shape, "--out-dir", tmp_path / "file")
    options = events(tmp_path / "file", "config")[0]["options"]
    assert {name: options[name] for name in given} == given and options["warmup-from"] == 2e-5  # null says nothing
    run_well("--config", latest(tmp_path / "file") / "trainer_state.json", "--out-dir", tmp_path / "again")
    assert losses(tmp_path / "again").tolist() == losses(tmp_path / "file").tolist()
    # An object named options that no run has written is a file of options.
    run_well("--config", write(tmp_path / "hand.json", {"options": {"model": "olmo-n6"}}), *data, *shape[2:], "--out-dir", tmp_path / "hand")
    assert events(tmp_path / "hand", "config")[0]["options"]["learning-rate"] == 2e-4


def test_a_run_s_options_make_its_model_again(data, tmp_path):
    """Also where the run gave the program's default over a preset's; another --model is as its preset has it."""
    run_well(*data, "--model", "olmo-n6", *MODEL, "--total-batch-size", 256, "--biases", "--activation", "gelu", "--no-qk-norm",
             "--max-steps", 2, "--out-dir", tmp_path / "first")
    model = events(tmp_path / "first", "config")[0]["model"]
    assert (model["biases"], model["activation"], model["qk_norm"]) == (True, "gelu", False)
    line = (tmp_path / "first" / "log.jsonl").read_text().splitlines()[0]
    for i, path in enumerate([latest(tmp_path / "first") / "trainer_state.json", write(tmp_path / "line.json", json.loads(line))]):
        run_well("--config", path, "--out-dir", tmp_path / f"again-{i}")
        assert events(tmp_path / f"again-{i}", "config")[0]["model"] == model
        assert losses(tmp_path / f"again-{i}").tolist() == losses(tmp_path / "first").tolist()
    # the command line's flag, then its preset, over the file's
    run_well("--config", path, "--no-biases", "--out-dir", tmp_path / "flag")
    assert events(tmp_path / "flag", "config")[0]["model"] == model | {"biases": False, "parameters": ANY}
    run_well("--config", path, "--model", "gpt2-124M", "--out-dir", tmp_path / "preset")
    assert is_gpt2(events(tmp_path / "preset", "config")[0]["model"])


def is_gpt2(model):
    return (model["positions"], model["biases"], model["untied_head"], model["layers"]) == ("learned", True, False, LAYERS)


def test_what_a_preset_decided_is_not_given(data, tmp_path):
    """In a second generation, too, another preset decides, or a checkpoint that is named."""
    run_well(*data, "--model", "olmo-n6", *MODEL, "--total-batch-size", 256, "--max-steps", 1, "--out-dir", tmp_path / "first")
    run_well("--config", latest(tmp_path / "first") / "trainer_state.json", "--out-dir", tmp_path / "second")
    run_well(*data, *MODEL, "--max-steps", 1, "--out-dir", tmp_path / "gpt2")
    second, gpt2 = (latest(tmp_path / name) / "trainer_state.json" for name in ("second", "gpt2"))
    assert events(tmp_path / "second", "config")[0]["model"] == events(tmp_path / "first", "config")[0]["model"]
    run_well("--config", second, "--model", "gpt2-124M", "--out-dir", tmp_path / "preset")
    assert is_gpt2(events(tmp_path / "preset", "config")[0]["model"])
    run_well("--config", second, "--init-from", gpt2.parent, "--out-dir", tmp_path / "weights")
    assert is_gpt2(events(tmp_path / "weights", "config")[0]["model"])
    # of a file whose run began with others' weights the checkpoint has the model
    run_well("--config", latest(tmp_path / "weights") / "trainer_state.json", "--init", "gpt2", "--dry-run")
    run_well("--config", gpt2, "--generate", second.parent, "--prompt", "1", "--sample-tokens", 1)
    run_well("--config", gpt2, "--resume", "--max-steps", 2, "--out-dir", tmp_path / "second")
    # a preset's --init isn't held against the run's --init-from
    run_well(*data, "--model", "olmo-n6", *MODEL, "--total-batch-size", 256, "--max-steps", 1, "--init-from",
             latest(tmp_path / "first"), "--out-dir", tmp_path / "on")
    run_well("--config", latest(tmp_path / "on") / "trainer_state.json", "--out-dir", tmp_path / "on-again")
    assert losses(tmp_path / "on-again").tolist() == losses(tmp_path / "on").tolist()


@pytest.mark.parametrize("content, part", [
    ("{\"layer\": 3}", "'layer' is no option; did you mean --layers?"),
    ("{\"layers\": 3.5}", "--layers takes a whole number"),
    ("{\"layers\": [1, 2]}", "--layers has more than one value"),
    ('{"learning-rate": 1e999}', "--learning-rate has a number that is too large"),
    ('{"max-steps": []}', "--max-steps has an empty list"),
    ('{"max-steps": [null]}', "--max-steps takes a text, a number"),
    ('{"max-steps": 5, "max-steps": 7}', "an object names \"max-steps\" twice"),
    ('{"options": {"layers": 1}, "max-steps": 5}', "'max-steps' stands beside \"options\""),
    ('{"options": {"layers": 1}, "bogus": 3}', "'bogus' stands beside \"options\""),
    ('{"options": {"layers": 1}, "version": true}', "'version' stands beside \"options\""),
    ('{"event": "train", "options": {}}', "'event' stands beside \"options\""),
    ('{"max-steps": 1, "dry-run": true}', "'dry-run' says what to do now, and isn't taken from a file: give --dry-run"),
    ('{"options": {"max-steps": 1, "resume": true}}', "'resume' says what to do now"),
    ('{"generate": "runs/mine"}', "'generate' says what to do now"),
    ("[1]", "it isn't an object"),
    ("{", "not valid JSON"),
    (None, "can't be read")])
def test_bad_files_of_options(data, tmp_path, content, part):
    path = tmp_path / "options.json"
    if content is not None:
        path.write_text(content)
    done = run("--config", path, "--dry-run", *data)
    assert done.returncode == 2 and part in one_sentence(done.stderr) and str(path) in done.stderr
