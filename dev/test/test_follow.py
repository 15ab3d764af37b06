"""scripts/log_to_tensorboard.py and log_to_wandb.py with the packages themselves, which are read back: a run's values are there
once, whatever was stopped and resumed. Without the packages: one sentence.
"""

import json
import math
import os
import subprocess
import sys
import time

import pytest
from optional import python  # noqa: F401
from test_plot import SCRIPTS, events, write_log

import follow  # scripts/, which test_plot has put on the path

READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
read.Reload()
tags = read.Tags()
print(json.dumps({
    "scalars": {tag: [(e.step, e.value, e.wall_time) for e in read.Scalars(tag)] for tag in tags["scalars"]},
    "texts": {tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in read.Tensors(tag)] for tag in tags["tensors"]},
}))
"""
# A file of W&B's is seven bytes, then LevelDB's log format: blocks of 32 KiB of records, each a checksum, two bytes of
# length, a type (1 whole; 2, 3, 4 first, middle and last part), and a protocol buffer.
READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
def records(path):
    data, at, parts = open(path, "rb").read(), 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7:at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            record, text, parts = wandb_internal_pb2.Record(), b"".join(parts), []
            record.ParseFromString(text)
            yield record
out = {"rows": [], "config": {}}
for record in records(sys.argv[1]):
    kind = record.WhichOneof("record_type")
    if kind == "history":
        out["rows"].append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    if kind == "run":
        out |= {"id": record.run.run_id, "name": record.run.display_name, "tags": list(record.run.tags)}
    for update in record.config.update if kind == "config" else ():
        out["config"][update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
print(json.dumps(out))
"""


def call(python, script, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return subprocess.run([python, SCRIPTS / script, *map(str, arguments)], capture_output=True, text=True, env=environment)


def write(python, script, *arguments):
    done = call(python, script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(python, program, path):
    done = subprocess.run([python, "-c", program, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def a_run(steps=10, **options):
    """A log with every kind of event, and a step that wasn't finite."""
    log = events(steps, quant=True)[:-1]
    log[0] |= {"step": 0, "options": {"max-steps": 20, "learning-rate": 1e-3} | options}
    log[3] |= {"loss": None, "finite": False}
    log.insert(4, {"event": "sample", "step": 3, "text": "<b>a</b>\nb"})
    return log


def loss_of(log):
    return {e["step"]: e["loss"] for e in log if e["event"] == "train"}


def is_close(value, expected):
    return abs(value - expected) <= abs(expected) * 2**-24  # of FP32's rounding to nearest


# TensorBoard --------------------------------------------------------------------------------------


def test_tensorboard_reads_every_value_once(python, tmp_path):
    log = a_run()
    run = write_log(tmp_path / "a run", log, tail='{"event":"train","step":11,"lo')
    assert write(python, "log_to_tensorboard.py", run / "log.jsonl") == f".venv/bin/tensorboard --logdir '{run}'\n"
    # A second start writes the same again.
    other = write_log(tmp_path / "other/run", a_run())
    assert write(python, "log_to_tensorboard.py", run, other) == f".venv/bin/tensorboard --logdir {tmp_path}\n"
    far = write_log(tmp_path / "far/deep/run", a_run())
    near = write_log(tmp_path / "near/deep/run", a_run())
    names = ",".join(f"{str(path).strip('/').replace('/', '-')}:{path}" for path in (far, near))
    assert write(python, "log_to_tensorboard.py", far, near) == f".venv/bin/tensorboard --logdir_spec {names}\n"
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    found = read(python, READ_TENSORBOARD, run)
    loss = {step: value for step, value, _ in found["scalars"]["train/loss"]}
    assert len(found["scalars"]["train/loss"]) == 10 and math.isnan(loss.pop(3))
    assert all(is_close(value, loss_of(log)[step]) for step, value in loss.items()) and len(loss) == 9
    ((step, value, _), *_) = found["scalars"]["quant/sqnr_db/fprop-x/1/qkv"]
    assert (step, value) == (5, 31.0)
    times = [time for *_, time in found["scalars"]["train/learning_rate"]]
    took = times[-1] - times[0]  # nine steps of 0.1 s, and before the last one a validation of 1 s
    assert abs(took - 1.9) < 1e-3, took
    (settings,), (sample,) = found["texts"]["config"], found["texts"]["sample"]
    assert '"learning-rate": 0.001' in settings[1] and sample == [3, "    <b>a</b>\n    b"]


def test_tensorboard_forgets_the_steps_that_a_resumed_run_takes_again(python, tmp_path):
    run = write_log(tmp_path / "run", a_run(10))
    command = [python, SCRIPTS / "log_to_tensorboard.py", run, "--follow", "--every", "0.2"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list(run.glob("events.out.tfevents.*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        other = call(python, "log_to_tensorboard.py", run)  # whose file readers would take for a later one
        assert other.returncode == 2 and "is in use" in other.stderr
        again = [e | {"loss": 1.0} if e["event"] == "train" and e["step"] > 6 else e for e in a_run(12)]
        write_log(run, [*again, {"event": "end", "step": 12, "reason": "max-steps"}])
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    found = read(python, READ_TENSORBOARD, run)["scalars"]["train/loss"]
    assert [step for step, *_ in found] == list(range(1, 13))
    assert [value for step, value, _ in found if step > 6] == [1.0] * 6


# Weights & Biases ---------------------------------------------------------------------------------


def offline_runs(run):
    """The files of W&B's offline runs, the first one first."""
    return sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)


def test_wandb_has_every_value_once(python, tmp_path):
    log = a_run(10, tags="x, y", **{"run-name": "a name"})
    run = write_log(tmp_path / "a run", log)
    assert write(python, "log_to_wandb.py", run) == f".venv/bin/wandb sync '{run}'/wandb/offline-run-*\n"
    write(python, "log_to_wandb.py", run)  # has nothing to add
    (first,) = offline_runs(run)
    found = read(python, READ_WANDB, first)
    assert (found["name"], found["tags"]) == ("a name", ["x", "y"])
    assert found["config"]["options"]["learning-rate"] == 1e-3
    rows = [row for row in found["rows"] if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 11)) and math.isnan(rows[2]["train/loss"])
    assert all(row["train/loss"] == loss_of(log)[row["step"]] for row in rows if row["step"] != 3)
    assert rows[4]["quant/sqnr_db/fprop-x/1/qkv"] == 31.0
    assert [row["step"] for row in found["rows"] if any("sample" in name for name in row)] == [3]
    (sample,) = run.glob("wandb/offline-run-*/files/media/html/*.html")
    assert "&lt;b&gt;a&lt;/b&gt;\nb" in sample.read_text()


def test_wandb_goes_on_where_it_was_stopped_and_keeps_first_values(python, tmp_path):
    run = write_log(tmp_path / "run", a_run(10))
    write(python, "log_to_wandb.py", run)
    write_log(run, [e | {"loss": 1.0} if e["event"] == "train" and e["step"] > 6 else e for e in a_run(12)])
    write(python, "log_to_wandb.py", run)
    first, second = (read(python, READ_WANDB, path) for path in offline_runs(run))
    assert first["id"] == second["id"]
    assert [(row["step"], row["train/loss"]) for row in second["rows"]] == [(11, 1.0), (12, 1.0)]
    assert [row["_step"] for row in first["rows"] + second["rows"]] == list(range(12))


# Both ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, package", [("log_to_tensorboard.py", "tensorboard"), ("log_to_wandb.py", "wandb")])
def test_bad_input_is_one_sentence(tmp_path, script, package):
    run, empty = write_log(tmp_path / "run", a_run()), write_log(tmp_path / "empty", [])
    hidden = f"import runpy, sys; sys.modules['{package}'] = None; sys.path.insert(0, {str(SCRIPTS)!r}); sys.argv = sys.argv[1:]; " \
             "runpy.run_path(sys.argv[0], run_name='__main__')"
    missing = f"{script}: it needs the package {package}: .venv/bin/pip install {package}\n"
    for arguments, part in (([run], missing), ([tmp_path / "none", "--follow"], missing),  # which would wait for that run
                            ([tmp_path / "none"], "can't read"), ([empty], "is not a log of train_gpt_mxfp8"),
                            ([run, run / "log.jsonl"], "named twice"), ([run, "--every", 0], "--every 0: give seconds")):
        done = subprocess.run([sys.executable, "-c", hidden, SCRIPTS / script, *map(str, arguments)], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        assert done.stderr.startswith(f"{script}: ") and part in done.stderr, done.stderr
    assert sorted(path.name for path in run.iterdir()) == ["log.jsonl"]


@pytest.mark.parametrize("tags, project, part", [("x" * 65, "p", "64 characters"), ("x", "a/b", "Invalid project name")])
def test_what_wandb_refuses_is_one_sentence(python, tmp_path, tags, project, part):
    done = call(python, "log_to_wandb.py", write_log(tmp_path / "run", a_run(tags=tags)), "--project", project)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and part in done.stderr, done.stderr
    assert done.stderr.startswith("log_to_wandb.py: wandb: ")


def test_a_sent_json_that_isn_t_ours(python, tmp_path):
    run = write_log(tmp_path / "run", a_run())
    (run / "wandb").mkdir()
    (run / "wandb/sent.json").write_text("[]")
    done = call(python, "log_to_wandb.py", run)
    assert done.returncode == 2 and "sent.json isn't what log_to_wandb.py writes" in done.stderr


def test_the_log_is_read_line_by_line_and_again_where_it_was_cut(tmp_path):
    log = [{"event": "train", "step": step, "loss": float(step)} for step in range(5)]
    run = write_log(tmp_path / "run", log[:2], tail='{"event":"tr')
    follower = follow.Follower(run)
    losses = lambda: (lambda found: ([e["loss"] for e in found[0]], found[1]))(follower.poll())
    assert losses() == ([0.0, 1.0], True) and losses() == ([], False)
    write_log(run, log[:3])
    assert losses() == ([2.0], False)
    write_log(run, [*log[:2], *({"event": "train", "step": step, "loss": 9.0} for step in (2, 3))])
    assert losses() == ([0.0, 1.0, 9.0, 9.0], True)
    write_log(run, log[:1])
    assert losses() == ([0.0], True)
    (run / "log.jsonl").unlink()
    assert losses() == ([], False)


def test_events_were_logged_by_what_they_took_before_the_last_one(tmp_path):
    log = [{"event": "train", "step": 0, "seconds": 2.0}, {"event": "val", "step": 0, "seconds": 30.0},
           {"event": "spike", "step": 1, "seconds": 500.0}, {"event": "train", "step": 1, "seconds": 4.0}]
    run = write_log(tmp_path / "run", log)
    os.utime(run / "log.jsonl", (1e9, 1e9))
    follower = follow.Follower(run)
    assert follower.times(follower.poll()[0]) == [1e9 - 34, 1e9 - 4, 1e9 - 4, 1e9]


def test_numbers_of_an_event_have_names():
    named = follow.scalars({"event": "eval", "step": 3, "task": "piqa", "accuracy": 0.5, "parts": [{"a": 1}, 2], "pairs": [[-8, 3]]})
    assert named == {"eval/accuracy/piqa": 0.5, "eval/parts/0/a/piqa": 1.0}
    assert follow.scalars({"event": "config", "step": 0, "world_size": 1}) == {}
