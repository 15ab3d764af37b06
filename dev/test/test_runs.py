"""scripts/runs.py and what names a run: --run-name, --tags, and the state that its lock and log say."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import matplotlib.pyplot as plt
import pytest
from test_plot import SCRIPTS, events, write_log
from trainer import MODEL, ROOT, make_data, run_well

import logs  # scripts/, which test_plot has put on the path
import plot
import runner
import runs


def ended(reason, **options):
    log = events(20)
    log[0]["options"] |= options
    log[0]["total_steps"] = 20
    log[-1]["reason"] = reason
    return log


def call(*arguments, cwd=None):
    return subprocess.run([sys.executable, SCRIPTS / "runs.py", *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


def listed(*arguments):
    done = call(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_keeps_its_name_and_tags(tmp_path):
    data = make_data(tmp_path / "data")
    words = [*data, *MODEL, "--max-steps", 2, "--warmup-steps", 0]
    run_well(*words, "--run-name", "a name", "--tags", "tiny, first", "--out-dir", tmp_path / "runs/one")
    run_well("--resume", "--out-dir", tmp_path / "runs/one", "--max-steps", 3)
    (row,) = listed(tmp_path)
    assert (row["name"], row["tags"], row["step"], row["steps"]) == ("a name", ["tiny", "first"], 3, 3)
    assert (row["recipe"], row["state"], row["path"]) == ("mxfp8", "finished", str(tmp_path / "runs/one"))
    assert row["best_val"] > 1 and row["loss"] > 1 and row["tokens_per_second"] > 0
    assert plot.Run(tmp_path / "runs/one").label == "a name (mxfp8, tiny, first)"


def test_the_speed_is_that_of_the_last_steps(tmp_path):
    log = events(150)
    for event in log:
        if event["event"] == "train" and event["step"] <= 60:
            event["tokens_per_second"] = 1.0
    write_log(tmp_path / "run", log)
    assert listed(tmp_path)[0]["tokens_per_second"] == 12345


def test_scale_roundings_are_told_apart(tmp_path):
    words = [*make_data(tmp_path / "data")[:2], *MODEL, "--max-steps", 1, "--recipe", "mxfp8"]
    for name, *given in (["a", "ceil"], ["b", "floor", "--operand", "wgrad-x=bf16", "--quantize-lm-head"], ["c", "rceil"]):
        run_well(*words, "--scale-rounding", *given, "--out-dir", tmp_path / "runs" / name)
    adjusted = ["mxfp8+scale-rounding=ceil", "mxfp8+operand=wgrad-x=bf16+scale-rounding=floor+quantize-lm-head"]
    assert [row["recipe"] for row in listed(tmp_path, "--sort", "name")] == [*adjusted, "mxfp8"]  # which rounds so itself
    assert plot.Run(tmp_path / "runs/a").label == "a (mxfp8+scale-rounding=ceil)"
    assert [runner.recipe(name, "").name for name in adjusted] == adjusted  # compare_recipes.py takes them


def test_a_resume_with_another_recipe_is_in_the_name(tmp_path):
    words = [*make_data(tmp_path / "data")[:2], *MODEL, "--quant-stats-every", 2, "--out-dir", tmp_path / "runs/one"]
    run_well(*words, "--max-steps", 5, "--recipe-at", "3:mxfp8,scale-rounding=even")
    run_well("--resume", "--max-steps", 6, "--out-dir", tmp_path / "runs/one")  # under what it was stopped with
    run_well("--resume", "--max-steps", 9, "--recipe", "bf16", "--out-dir", tmp_path / "runs/one")
    quantized = "mxfp8, then mxfp8+scale-rounding=even from step 3"
    assert listed(tmp_path)[0]["recipe"] == f"{quantized}, then bf16 from step 6"
    run = plot.Run(tmp_path / "runs/one")
    assert run.label == f"one ({quantized}, then bf16 from step 6)"
    for run, label in (run, f"one ({quantized})"), (plot.Run(tmp_path / "runs/one", "mine"), "mine"):
        figure = plot.draw([(run, "black")])
        plt.close(figure)
        assert figure.subfigs[-1].get_suptitle().startswith(f"Quantization, {label}: ")  # of BF16 there are no statistics


def started(step, name, adjusted=True, kind="config", **options):
    return {"event": kind, "step": step, "recipe": {"name": name, "adjusted": adjusted}, "options": options}


@pytest.mark.parametrize("log, words", [
    ([started(0, "bf16", False, **{"operand": ["wgrad-x=bf16"]})], "bf16"),
    ([started(0, "mxfp8", **{"operand": ["wgrad-x=bf16", "wgrad-dy=bf16"], "hadamard-size": 0, "quantize-lm-head": True})],
     "mxfp8+operand=wgrad-x=bf16+operand=wgrad-dy=bf16+quantize-lm-head"),
    ([started(0, "mxfp8", **{"operand": ["wgrad-x=bf16", "wgrad-dy=bf16"], "scale-rounding": "even", "bf16-last-layers": 2})],
     "mxfp8+operand=wgrad-x=bf16+operand=wgrad-dy=bf16 + 2 more"),
    ([started(0, "mxfp8")], "mxfp8, adjusted"),  # an option that isn't known here
    ([started(0, "mxfp8", False), started(8, "bf16", False), started(4, "mxfp4", False)], "mxfp8, then mxfp4 from step 4"),
    ([started(0, "mxfp8", False), started(8, "mxfp8", False), started(9, "bf16", False, "recipe")],
     "mxfp8, then bf16 from step 9"),
    ([started(0, "mxfp8", **{"recipe-at": 5}), {"event": "recipe", "step": []}, {"event": "recipe", "step": 3}],
     "mxfp8, adjusted"),
    ([started(0, "mxfp8", **{"operand": ["wgrad-x=bf16"], "recipe-at": ["2:mxfp8,wgrad-x=bf16", "4:mxfp8,scale-rounding=even"]}),
      started(2, "mxfp8", kind="recipe"), started(4, "mxfp8", kind="recipe")],
     "mxfp8+operand=wgrad-x=bf16, then mxfp8+scale-rounding=even from step 4"),
    ([{"event": "config", "recipe": "mxfp8"}], "mxfp8"),
])
def test_recipes_in_words(log, words):
    assert logs.recipes_in_words(logs.recipes_in(log)) == words


@pytest.mark.parametrize("reason, state", [
    ("max-steps", "finished"), ("epochs", "finished"), ("SIGINT", "stopped"), ("not-finite", "diverged"),
    ("steps", "finished"), ("diverged", "diverged")])
def test_states_of_runs_that_ended(tmp_path, reason, state):
    write_log(tmp_path / "run", ended(reason))
    assert listed(tmp_path)[0]["state"] == state


def test_states_of_runs_that_logged_no_end(tmp_path):
    log = events(20)[:-1]
    write_log(tmp_path / "a-killed", log)
    write_log(tmp_path / "b-not-finite", [*log, {"event": "train", "step": 21, "loss": None, "finite": False}])
    write_log(tmp_path / "c-running", log)
    write_log(tmp_path / "d-no-step", log[:1])
    with open(tmp_path / "c-running/log.jsonl") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rows = listed(tmp_path, "--sort", "name")
    assert [row["state"] for row in rows] == ["stopped", "diverged", "running", "stopped"]
    assert rows[3]["step"] == 0 and rows[3]["loss"] is None
    assert listed(tmp_path, "--sort", "name")[2]["state"] == "stopped"  # the lock was not kept


def test_steps_of_runs_without_validation(tmp_path):
    """The program numbers the lines of steps from 0; a checkpoint and the end say how many were taken."""
    words = [*make_data(tmp_path / "data")[:2], *MODEL, "--max-steps", 3, "--warmup-steps", 0]
    run_well(*words, "--out-dir", tmp_path / "runs/finished")
    log = [e | {"step": e["step"] - 1} if e["event"] == "train" else e for e in events(20) if e["event"] != "val"]
    write_log(tmp_path / "runs/killed", [*log[:-1], {"event": "checkpoint", "step": 20, "path": "step_000020"}])
    write_log(tmp_path / "runs/stopped", [*log[:-1], log[-1] | {"reason": "SIGINT"}])
    assert [(row["name"], row["step"]) for row in listed(tmp_path, "--sort", "name")] == [
        ("finished", 3), ("killed", 20), ("stopped", 20)]


def test_rows_are_sorted_and_chosen_by_tag(tmp_path):
    for name, loss, tags in (("a", 3.0, "x,y"), ("b", 1.0, "y"), ("c", None, "x")):
        log = ended("max-steps", tags=tags)
        write_log(tmp_path / name, [e | {"loss": loss} if e["event"] == "val" else e for e in log])
    names = lambda *arguments: [row["name"] for row in listed(tmp_path, *arguments)]
    assert names() == ["b", "a", "c"]
    assert names("--sort", "name") == ["a", "b", "c"]
    assert names("--tag", "x") == ["a", "c"] and names("--tag", "x", "--tag", "y") == ["a"]
    assert [row["name"] for row in listed(tmp_path / "a", tmp_path / "b", tmp_path / "a")] == ["b", "a"]


def test_the_table(tmp_path):
    write_log(tmp_path / "run", ended("max-steps", **{"run-name": "two\nlines", "tags": "x,y"}))
    head, row = call(tmp_path).stdout.splitlines()
    assert head.split() == ["name", "recipe", "step", "loss", "best", "val", "tok/s", "state", "tags", "path"]
    assert row.split("  ")[0] == "two?lines"
    assert row.split()[1:] == ["mxfp8", "20/20", "4.0000", "4.5000", "12,345", "finished", "x,y", str(tmp_path / "run")]
    assert head.index("loss") + len("loss") == row.index("4.0000") + len("4.0000")  # numbers end below their heads


def test_bad_input_is_one_sentence(tmp_path):
    write_log(tmp_path / "empty", [])
    write_log(tmp_path / "run", ended("max-steps"))
    write_log(tmp_path / "odd", [{"event": "config", "step": 0, "options": 5}])
    (tmp_path / "none").mkdir()
    for arguments, part in ((["nowhere"], "there is no nowhere"), (["none"], "no run in none"), ([], "there is no runs"),
                            (["run", "--tag", "z"], "no run with these tags in run"), (["--sort", "color"], "--help")):
        done = call(*arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("runs.py: ") and done.stderr.count("\n") == 1, done
        assert part in done.stderr
    done = call(".", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("\n") == 3 and "left out: empty/log.jsonl is not a log" in done.stderr


@pytest.mark.parametrize("script", ["scripts/runs.py", "data/prepare.py"])
def test_nobody_reads_on(script):
    """As where `| head` has seen enough: the end is quiet, with a shell's code for SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, ROOT / script, "--help"], stdout=write, stderr=subprocess.PIPE, env=buffered, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("words", [["scripts/runs.py"], ["data/prepare.py", "--out-dir", "out", "--input"]])
def test_a_script_without_an_output(tmp_path, words):
    """As with `>&-`: what it says on stderr, and its code, stay."""
    command = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, ROOT / words[0], *words[1:], "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "nothing" in done.stderr and len(done.stderr.splitlines()) == 1


def test_order_puts_what_has_no_value_last():
    rows = [{"step": 5}, {"step": None}, {"step": 7}]
    assert sorted(rows, key=runs.order("step")) == [{"step": 7}, {"step": 5}, {"step": None}]
