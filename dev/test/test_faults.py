"""Faults: kills, signals, disks that fail, values that aren't finite, two runs in one directory.

What must hold after each: the newest checkpoint is whole, and a run that goes on from it ends in the bits of a run that
nothing disturbed. KILLS=100 makes 100 kills instead of 15, and meets every system call of a checkpoint instead of some."""

import errno
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trainer import (
    END_OF_TEXT, INT, KILL, MODEL, SLOWNESS, T, TERM, assert_same_run, check_loadable, events, latest, make_data,
    markov_tokens, one_sentence, run, run_well, snapshot, start, steps, validations, weights_and_moments, write_tokenizer,
    write_tokens)

KILLS = int(os.environ.get("KILLS", 15))
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """faults(path, at=..., ...) gives the environment in which fault_shim.c has the faults that it describes."""
    library = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    subprocess.run(["cc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC",
                    HERE / "fault_shim.c", "-o", library], check=True)
    # A sanitizer's library wants to come first, but can do without; its search for leaks can't have its calls trapped.
    sanitizer = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0:detect_leaks=0"
    environment = {"LD_PRELOAD": str(library), "ASAN_OPTIONS": sanitizer}
    tried = run("--help", environment=environment)
    if "fault_shim:" in tried.stderr:
        pytest.skip(f"system calls can't be trapped here: {tried.stderr.strip()}")

    def faults(path, **values):
        return environment | {"FAULT_PATH": str(path)} | {f"FAULT_{name.upper()}": str(v) for name, v in values.items()}
    return faults


def step_directories(out):
    return sorted(out.glob("step_*"))


def assert_no_temporary_files(out):
    assert [str(path) for path in out.rglob("*") if "tmp" in path.name] == []


def resume_and_compare(out, straight):
    run_well("--resume", "--out-dir", out)
    assert_same_run(out, straight)
    assert_no_temporary_files(out)


# ---------------------------------------------------------------------------------------------------------------------
# kill -9

def test_kills_at_any_moment(data, tmp_path):
    common = [*data, *MODEL, "--max-steps", 10 * KILLS, "--val-every", 7]
    each = ["--checkpoint-every", 1, "--keep-checkpoints", 2]
    out, straight = tmp_path / "killed", tmp_path / "straight"
    run_well(*common, "--out-dir", straight)
    rng = np.random.default_rng(5)
    process = start(*common, *each, "--out-dir", out)
    reached, interrupted, kills = [], 0, 0
    while kills < KILLS:
        # Every seventh while the program starts, the others when it has written a new checkpoint or two.
        deadline = time.monotonic() + (20 if kills % 7 else rng.uniform(0, 0.8))
        while time.monotonic() < deadline and (not (out / "latest").exists() or reached[-1:] == [int(latest(out).name[5:])]):
            time.sleep(0.003)
        time.sleep(rng.uniform(0, 0.08))
        process.kill()
        process.communicate()
        assert process.returncode == -KILL
        kills += 1
        for directory in step_directories(out):
            check_loadable(directory)  # a directory with a step's name is whole, the older ones too
        if (out / "latest").exists():
            assert latest(out) in step_directories(out)
            newest = int(latest(out).name[5:])
            interrupted += any(out.glob("*tmp*")) or any(out.glob(".tmp*")) or (out / f"step_{newest + 1:06d}").exists()
            reached.append(newest)
        else:
            shutil.rmtree(out, ignore_errors=True)  # a log without a checkpoint: nothing to go on with
        process = start(*(["--resume"] if reached else [*common, *each]), "--out-dir", out)
    process.communicate(timeout=300)
    print(f"{kills} kills, after checkpoints {reached}; {interrupted} in the middle of one")
    assert process.returncode == 0 and reached == sorted(reached) and len(set(reached)) > kills / 2
    assert interrupted > kills / 10 or SLOWNESS > 1  # slow computing leaves little time for checkpoints
    assert_same_run(out, straight)
    assert_no_temporary_files(out)


# ---------------------------------------------------------------------------------------------------------------------
# Disks

@pytest.fixture(scope="session")
def short_run(data, tmp_path_factory):
    """`common` options, a straight run of 6 steps that keeps the checkpoint of every step, and one that has taken 3."""
    base = tmp_path_factory.mktemp("short")
    common = [*data[:2], *MODEL, "--schedule", "constant"]
    run_well(*common, "--max-steps", 6, "--checkpoint-every", 1, "--keep-checkpoints", 0, "--out-dir", base / "straight")
    run_well(*common, "--max-steps", 3, "--out-dir", base / "half")
    return base


RESUME = ["--resume", "--max-steps", 6, "--out-dir"]
FAILURES = {"open": errno.EACCES, "write": errno.ENOSPC, "fsync": errno.EIO, "truncate": errno.EIO, "rename": errno.EACCES,
            "mkdir": errno.ENOSPC}


@pytest.fixture(scope="session")
def calls(short_run, shim, tmp_path_factory):
    """(number, name, path below the run) of the calls that a resumed run makes to change files; of the many writes of a
    file the first, the one in the middle and the last."""
    base = tmp_path_factory.mktemp("calls")
    out = shutil.copytree(short_run / "half", base / "run")
    done = run(*RESUME, out, environment=shim(out, log=base / "log"))
    assert (done.returncode, done.stderr) == (0, "")
    assert_same_run(out, short_run / "straight")
    found, writes = [], {}
    for number, line in enumerate((base / "log").read_text().splitlines(), start=1):
        name, path = line.split(" ", 1)
        path = os.path.relpath(path, out)
        # mkdir of the run's directory may fail: it is there.
        if name == "write" and path != "log.jsonl":
            writes.setdefault(path, []).append((number, name, path))
        elif (name, path) != ("mkdir", "."):
            found.append((number, name, path))
    for of_file in writes.values():
        found += {of_file[0], of_file[len(of_file) // 2], of_file[-1]}
    kinds = {(name, Path(path).name) for _, name, path in found}
    assert {("write", "latest.tmp"), ("fsync", "optimizer.safetensors.tmp"), ("rename", ".tmp-step_000006"),
            ("write", "log.jsonl"), ("truncate", "log.jsonl"), ("open", "trainer_state.json.tmp")} <= kinds
    return sorted(found)


def assert_nothing_is_harmed(out, short_run):
    """Whatever checkpoint is there is whole and has the undisturbed run's bits; the one before the fault is among them."""
    assert (out / "step_000003").exists() and latest(out) in step_directories(out)
    for directory in step_directories(out):
        check_loadable(directory)
        assert weights_and_moments(directory) == weights_and_moments(short_run / "straight" / directory.name)
    before = snapshot(short_run / "half" / "step_000003")
    assert snapshot(out / "step_000003") == before


def test_each_call_that_changes_a_file_may_fail(short_run, shim, calls, tmp_path):
    chosen = calls
    if KILLS < 100:
        named = [[call for call in calls if call[1] == name] for name in FAILURES]
        chosen = sorted({call for group in named for call in (group[len(group) // 2], group[-1])})
    for number, name, path in chosen:
        out = shutil.copytree(short_run / "half", tmp_path / f"{number}")
        done = run(*RESUME, out, environment=shim(out, at=number, errno=FAILURES[name]))
        print(number, name, path, done.stderr.strip().replace(str(out), "RUN"))
        assert done.returncode == 2
        sentence = one_sentence(done.stderr)
        assert str(out) in sentence and os.strerror(FAILURES[name]) in sentence
        assert path.removesuffix(".tmp") in sentence or Path(path).parent.name in sentence
        assert_nothing_is_harmed(out, short_run)
        assert_no_temporary_files(out)
        taken = {event["step"] for event in steps(out)}
        if path == "log.jsonl" and taken >= {0, 1, 2}:
            # What was learned is saved, the step whose line couldn't be written too.
            saved = int(latest(out).name[5:])
            assert saved in (len(taken), len(taken) + 1) and set(range(len(taken))) == taken
            assert name != "write" or saved > 3 or len(taken) == 3
        if path == "log.jsonl" or KILLS >= 100:
            run_well(*RESUME, out)
            assert weights_and_moments(latest(out)) == weights_and_moments(short_run / "straight" / "step_000006")
            lost = 6 - len(steps(out))
            assert lost <= (path == "log.jsonl" and name == "write")  # that line alone
        shutil.rmtree(out)
    print(f"{len(chosen)} of {len(calls)} calls")


def numbers(calls, name, path, log=False):
    return [number for number, call, where in calls if call == name and where.endswith(path)]


def test_only_the_log_fails_and_the_weights_are_saved(short_run, shim, calls, tmp_path):
    out = shutil.copytree(short_run / "half", tmp_path / "run")
    # The lines of a resumed run: its configuration, its checkpoint, step 3, step 4.
    at = numbers(calls, "write", "log.jsonl")[3]
    done = run(*RESUME, out, environment=shim(out, at=at, errno=errno.ENOSPC))
    assert done.returncode == 2
    assert "log.jsonl" in one_sentence(done.stderr) and "No space left" in done.stderr
    assert latest(out).name == "step_000005" and "step_000005; go on with" in done.stdout
    assert [event["step"] for event in steps(out)] == [0, 1, 2, 3]
    assert_nothing_is_harmed(out, short_run)
    run_well(*RESUME, out)
    assert weights_and_moments(latest(out)) == weights_and_moments(short_run / "straight" / "step_000006")


@pytest.mark.parametrize("name, path", [("write", "log.jsonl"), ("write", "optimizer.safetensors.tmp"),
                                        ("rename", ".tmp-step_000006")], ids=["log", "moments", "rename"])
def test_a_directory_that_becomes_read_only(short_run, shim, calls, tmp_path, name, path):
    out = shutil.copytree(short_run / "half", tmp_path / "run")
    found = numbers(calls, name, path)
    done = run(*RESUME, out, environment=shim(out, at=found[len(found) // 2], errno=errno.EROFS, lasts=1))
    assert done.returncode == 2
    assert "Read-only file system" in one_sentence(done.stderr) and Path(path).stem in done.stderr
    assert ("are lost: the directory" in done.stdout) == (name == "write" and path == "log.jsonl")
    assert latest(out).name == "step_000003"
    assert_nothing_is_harmed(out, short_run)
    run_well(*RESUME, out)
    assert_same_run(out, short_run / "straight")
    assert_no_temporary_files(out)


def test_short_writes_are_continued(short_run, shim, tmp_path):
    out = shutil.copytree(short_run / "half", tmp_path / "run")
    log = tmp_path / "calls"
    done = run(*RESUME, out, environment=shim(out, short=100, log=log))
    assert (done.returncode, done.stderr) == (0, "")
    written = log.read_text().count("write ")
    print(f"{written} short writes")
    assert written > sum(path.stat().st_size for path in latest(out).iterdir()) / 101
    assert_same_run(out, short_run / "straight")
    assert steps(out) == steps(short_run / "straight")


@pytest.mark.parametrize("path", ["log.jsonl", "model.safetensors", "trainer_state.json", "latest"])
def test_a_short_write_before_a_full_disk(short_run, shim, tmp_path, path):
    out = shutil.copytree(short_run / "half", tmp_path / "run")
    log = tmp_path / "calls"
    # The third call on that file is a write's continuation: open (and of the log, truncate), write, write.
    at, short = (4, 100) if path == "log.jsonl" else (3, 5)
    done = run(*RESUME, out, environment=shim(f"run/{path}" if path[0] == "l" else path, at=at, short=short,
                                              errno=errno.ENOSPC, log=log))
    assert log.read_text().splitlines()[at - 1].startswith("write "), log.read_text()
    assert done.returncode == 2
    assert path in one_sentence(done.stderr) and "No space left" in done.stderr
    assert latest(out).name == "step_000003"
    assert_nothing_is_harmed(out, short_run)
    assert_no_temporary_files(out)
    events(out)  # whole lines: what was written of one is taken back
    run_well(*RESUME, out)
    assert_same_run(out, short_run / "straight")


# ---------------------------------------------------------------------------------------------------------------------
# Signals

def wait_for_line(process, beginning):
    for line in process.stdout:
        if line.startswith(beginning):
            return
    pytest.fail(f"no line that begins with '{beginning}': {process.stderr.read()}")


def send_and_wait(process, signals, pause=0.02, timeout=60):
    """Exit code and seconds that it took, all that was still printed."""
    begin = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(pause)
    output, errors = process.communicate(timeout=timeout)
    assert errors == ""
    return process.returncode, time.monotonic() - begin, output


def test_signals_during_start_up(data, tmp_path):
    common = [*data, *MODEL, "--max-steps", 40, "--val-every", 5]
    straight = tmp_path / "straight"
    begin = time.monotonic()
    run_well(*common, "--out-dir", straight)
    whole = time.monotonic() - begin
    saved = []
    for i, delay in enumerate([0.0, 0.3, 0.6, 0.75, 0.9]):
        out = tmp_path / str(i)
        process = start(*common, "--out-dir", out)
        time.sleep(delay * whole)
        code, _, _ = send_and_wait(process, [(INT, TERM)[i % 2], TERM], pause=0.003)
        if out.exists():
            assert code == 0
            check_loadable(latest(out))
            assert_no_temporary_files(out)
            saved.append(latest(out).name)
            resume_and_compare(out, straight)
        else:
            assert code in (-INT, -TERM)
    # When the line before the first step is printed, training has begun, or begins at once.
    process = start(*common, "--out-dir", tmp_path / "begun")
    wait_for_line(process, "output")
    time.sleep(0.05)
    assert send_and_wait(process, [TERM, INT])[0] == 0
    resume_and_compare(tmp_path / "begun", straight)
    print(f"of a run of {whole:.2f} s: saved {saved}, the others died with nothing written")


def never_end_of_text(tensors):
    tensors["transformer.ln_f.weight"][3] = 0
    tensors["transformer.ln_f.bias"][3] = 1
    tensors["transformer.wte.weight"][END_OF_TEXT, 3] = -1000


LONG = {"validation": ["--val-every", 10, "--val-steps", 0],
        "sample": ["--val-every", 10, "--val-steps", 1, "--sample-every", 10, "--sample-tokens", 3000]}


@pytest.mark.parametrize("what, signals", [("validation", [INT, INT]), ("sample", [TERM])], ids=LONG)
def test_a_signal_cuts_a_long_evaluation_short(data, short_run, tmp_path, what, signals):
    start_from = changed_weights(short_run / "half" / "step_000003", tmp_path / "start", never_end_of_text)
    write_tokens(tmp_path / "val.bin", np.tile(markov_tokens(5000, 3), 48))
    common = [*data[:2], "--val-data", tmp_path / "val.bin", *MODEL, "--init-from", start_from, "--max-steps", 20, *LONG[what]]
    straight, out = tmp_path / "straight", tmp_path / "run"
    process = start(*common, "--out-dir", straight)
    wait_for_line(process, "step  9/20")
    begin = time.monotonic()
    wait_for_line(process, f"step 10: {what}")
    long = time.monotonic() - begin
    process.communicate(timeout=120)

    process = start(*common, "--out-dir", out)
    wait_for_line(process, "step  9/20")
    time.sleep(long / 4)
    code, seconds, output = send_and_wait(process, signals)
    print(f"{what} of {long:.2f} s was cut short in {seconds:.2f} s")
    assert code == 0 and "go on with" in output
    kind = {"validation": "val", "sample": "sample"}[what]
    evaluated = lambda step: step in [event["step"] for event in events(out, kind)]
    assert not evaluated(10) and f"step 10: {what}" not in output
    assert latest(out).name == "step_000010" and len(steps(out)) == 10

    process = start("--resume", "--out-dir", out)  # and once more, in the last one
    wait_for_line(process, "step 19/20")
    time.sleep(long / 4)
    code, _, output = send_and_wait(process, signals)
    assert code == 0 and not evaluated(20) and "go on with" in output
    assert events(out, "end")[-1]["reason"] in ("SIGINT", "SIGTERM") and latest(out).name == "step_000020"
    run_well("--resume", "--out-dir", out)
    assert_same_run(out, straight)
    text = lambda run: [(event["step"], event["text"]) for event in events(run, "sample")]
    assert text(out) == text(straight)


@pytest.mark.parametrize("signals", [[INT], [TERM, INT, TERM]], ids=["once", "thrice"])
def test_signals_during_a_checkpoint(data, shim, tmp_path, signals):
    common = [*data, *MODEL, "--max-steps", 20, "--val-every", 5, "--checkpoint-every", 5]
    straight, out = tmp_path / "straight", tmp_path / "run"
    run_well(*common, "--out-dir", straight)
    process = start(*common, "--out-dir", out, environment=shim(".tmp-step", sleep=40))
    while not (out / ".tmp-step_000010").exists():
        time.sleep(0.002)
    code, _, _ = send_and_wait(process, signals, pause=0.05)
    assert code == 0
    for directory in step_directories(out):
        check_loadable(directory)
    # The checkpoint is finished, then the step; a second signal gives up only what is left of a step.
    assert latest(out).name in ("step_000010", "step_000011")
    assert_no_temporary_files(out)
    resume_and_compare(out, straight)


@pytest.mark.parametrize("signals, taken", [([TERM], 2), ([INT, INT], 1)], ids=["once", "twice"])
def test_a_second_signal_gives_a_long_step_up(data, tmp_path, signals, taken):
    common = [*data, *MODEL, "--total-batch-size", 200 * 4 * T, "--max-steps", 3, "--checkpoint-every", 1]
    straight, out = tmp_path / "straight", tmp_path / "run"
    run_well(*common, "--out-dir", straight)
    long = events(straight, "train")[1]["seconds"]
    process = start(*common, "--out-dir", out)
    wait_for_line(process, "step 0/3")
    time.sleep(long / 4)
    code, seconds, _ = send_and_wait(process, signals)
    print(f"a step of {long:.2f} s; {len(signals)} signals ended it in {seconds:.2f} s")
    assert code == 0 and len(steps(out)) == taken and latest(out).name == f"step_{taken:06d}"
    assert len(signals) == 1 or seconds < long / 2
    resume_and_compare(out, straight)


def test_generate_and_dry_run_die_and_write_nothing(short_run, tmp_path):
    run_directory = shutil.copytree(short_run / "half", tmp_path / "run")
    write_tokenizer(tmp_path / "tokenizer.bin")
    before = snapshot(tmp_path)
    for number in (INT, TERM):
        process = start("--generate", run_directory, "--sample-tokens", 1000000, "--threads", 1,
                        "--temperature", 0)  # end-of-text, which the data doesn't have, is never the likeliest
        assert process.stdout.read(1)
        assert send_and_wait(process, [number])[0] == -number
        process = start("--dry-run", "--model", "gpt2-1558M", "--out-dir", tmp_path / "new")
        assert send_and_wait(process, [number, number])[0] in (0, 2, -number)  # 2: it doesn't fit this machine
    assert snapshot(tmp_path) == before


# ---------------------------------------------------------------------------------------------------------------------
# Values that aren't finite

def changed_weights(directory, to, change, file="model.safetensors"):
    """A copy of the checkpoint, `change` applied to the dictionary of its tensors."""
    shutil.copytree(directory, to)
    tensors = {name: tensor.copy() for name, tensor in load_file(to / file).items()}
    change(tensors)
    save_file(tensors, to / file, metadata={"format": "pt"})
    return to


WEIGHT = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize("value", [np.nan, -np.inf], ids=["nan", "inf"])
def test_a_planted_value_is_refused(data, short_run, tmp_path, value):
    out = shutil.copytree(short_run / "half", tmp_path / "run")
    checkpoint = latest(out)
    plant = {"model.safetensors": (WEIGHT, value), "optimizer.safetensors": (WEIGHT + ".exp_avg", value)}
    for file, (tensor, bad) in plant.items():
        shutil.rmtree(checkpoint)

        def change(tensors):
            tensors[tensor].flat[-1] = bad
        changed_weights(short_run / "half" / "step_000003", checkpoint, change, file)
        ways = [[*RESUME, out]]
        if file == "model.safetensors":
            ways += [[*data, "--threads", 1, "--init-from", checkpoint, "--max-steps", 5, "--out-dir", tmp_path / "new"],
                     ["--generate", checkpoint]]
        before = snapshot(tmp_path)
        for arguments in ways:
            done = run(*arguments)
            assert done.returncode == 2
            sentence = one_sentence(done.stderr)
            assert f"{checkpoint}/{file}" in sentence and f"'{tensor}'" in sentence and "finite" in sentence
        assert snapshot(tmp_path) == before


def test_a_negative_mean_of_squares_is_refused(short_run, tmp_path):
    """Its square root is the NaN that the next step would have."""
    out = shutil.copytree(short_run / "half", tmp_path / "run")
    checkpoint = latest(out)
    shutil.rmtree(checkpoint)

    def change(tensors):
        tensors[WEIGHT + ".exp_avg_sq"].flat[7] = -1e-30
    changed_weights(short_run / "half" / "step_000003", checkpoint, change, "optimizer.safetensors")
    done = run(*RESUME, out)
    assert done.returncode == 2 and WEIGHT + ".exp_avg_sq" in one_sentence(done.stderr) and "-1e-30" in done.stderr


def scale_all(tensors):
    for name in tensors:
        tensors[name] *= np.float32(1e30)


def large_gain(tensors):
    tensors["transformer.h.0.ln_1.weight"][:] = 3e38


def large_bias(tensors):
    tensors["transformer.h.1.attn.c_proj.bias"][:] = 3.4e38  # its BF16 neighbour is Inf


OVERFLOWS = [(scale_all, "mxfp8"), (scale_all, "mxfp8-ocp"), (scale_all, "bf16"), (scale_all, "fp32"), (large_gain, "mxfp8"),
             (large_bias, "mxfp8")]


@pytest.mark.parametrize("change, recipe", OVERFLOWS, ids=[f"{change.__name__}-{recipe}" for change, recipe in OVERFLOWS])
def test_finite_weights_that_overflow_end_the_run(data, short_run, tmp_path, change, recipe):
    start_from = changed_weights(short_run / "half" / "step_000003", tmp_path / "start", change)
    out = tmp_path / "run"
    done = run(*data, "--batch-size", 4, "--threads", 1, "--recipe", recipe, "--init-from", start_from, "--max-steps", 50,
               "--quant-stats-every", 1, "--checkpoint-every", 1, "--sample-every", 2, "--skip-outliers", 3, "--out-dir", out)
    assert done.returncode == 3
    assert "--learning-rate" in one_sentence(done.stderr)
    train = events(out, "train")
    assert len(train) == 5
    for event in train:
        assert event["finite"] is False and "finite" in event["skipped"] and None in (event["loss"], event["grad_norm"])
    assert {event["step"] for event in events(out, "quant")} == (set() if recipe in ("bf16", "fp32") else set(range(5)))
    for event in events(out, "quant"):
        assert event["amax"] is not None or event["finite"] is False
        assert all(event[name] is not None and 0 <= event[name] <= 1 for name in ("clamped", "at_max", "flushed"))
    (first,) = events(out, "not_finite")
    assert first["step"] == train[0]["step"] and first["gemm"] in ("fprop", "dgrad", "wgrad")
    # A gain of 3e38 makes the first layer's QKV overflow, a bias that of the second layer's projection.
    expected = {large_gain: (0, "qkv", "fprop"), large_bias: (1, "projection", "fprop")}
    if change in expected:
        assert (first["layer"], first["linear"], first["gemm"]) == expected[change]
        assert f"isn't finite is that of layer {first['layer']}, {first['linear']}, fprop" in done.stdout
    assert events(out, "end")[0]["reason"] == "not-finite"
    assert step_directories(out) == [] and not (out / "latest").exists()


def overflow_behind_the_head_and_under_later_scales(tensors):
    """The first QKV's X, clamped to 448 by a scale of 1, would overflow that layer under a scale of its own amax."""
    tensors["transformer.h.0.ln_1.weight"][:] = 1e37
    tensors["transformer.h.0.attn.c_attn.weight"] *= 1000
    tensors["transformer.ln_f.weight"][:] = 3e38


def test_a_step_that_is_not_finite_is_searched_with_its_own_scales(data, short_run, tmp_path):
    start_from = changed_weights(short_run / "half" / "step_000003", tmp_path / "start", overflow_behind_the_head_and_under_later_scales)
    done = run(*data, "--batch-size", 4, "--threads", 1, "--recipe", "fp8-delayed", "--init-from", start_from, "--max-steps", 50,
               "--out-dir", tmp_path / "run")
    assert done.returncode == 3
    (first,) = events(tmp_path / "run", "not_finite")
    assert (first["step"], first["linear"], first["gemm"]) == (0, "lm_head", "fprop")


@pytest.fixture(scope="session")
def rare(tmp_path_factory):
    """A text of 1024 windows, one of them with a token that is nowhere else: the options that name it."""
    directory = tmp_path_factory.mktemp("rare")
    tokens = markov_tokens(1024 * T + 1, 1)
    tokens[700 * T + T // 2] = END_OF_TEXT
    write_tokens(directory / "train.bin", tokens)
    write_tokens(directory / "val.bin", markov_tokens(3000, 3))
    write_tokenizer(directory / "tokenizer.bin")
    return ["--train-data", directory / "train.bin", "--val-data", directory / "val.bin"]


def overflow_where_the_rare_token_is(tensors):
    """Two channels that are 1 behind the last norm make the rare token's logit -6e38, -Inf in FP32: no other token's
    probability changes by that, but the loss is Inf where it is to be predicted, and NaN where it is read."""
    channels = [3, 40]
    tensors["transformer.ln_f.weight"][channels] = 0
    tensors["transformer.ln_f.bias"][channels] = 1
    tensors["transformer.wte.weight"][END_OF_TEXT, channels] = -3e38


def assert_update_counts_applied_steps(out):
    """Of two more steps the second is AdamW's of the moments behind it, their biases corrected by the steps that were applied.
    With a beta2 of 0.9999 a step more or less than 300 moves an update by a 600th."""
    beta1, beta2 = (float(np.float32(beta)) for beta in (0.9, 0.9999))
    run_well("--resume", "--max-steps", 302, "--beta2", 0.9999, "--checkpoint-every", 1, "--out-dir", out)
    before, after = (load_file(out / f"step_{step:06}" / "model.safetensors") for step in (301, 302))
    moments = load_file(out / "step_000302" / "optimizer.safetensors")
    state = json.loads((out / "step_000302" / "trainer_state.json").read_text())
    rate, applied = events(out, "train")[-1]["learning_rate"], state["step"] - state["skipped"]
    assert state["skipped"] > 0 and "skipped" not in events(out, "train")[-1]
    furthest = 0
    for name, weight in before.items():
        m, v = (moments[f"{name}.{moment}"].astype(np.float64) / (1 - beta**applied)
                for moment, beta in (("exp_avg", beta1), ("exp_avg_sq", beta2)))
        kept = weight.astype(np.float64) * (1 - (0.1 * rate if weight.ndim == 2 else 0))
        update = rate * m / (np.sqrt(v) + 1e-8)
        # In FP32, roundings of 2^-24 of the weight: its factor's, its product's, the difference's; of the update: the rate's,
        # those of two corrections, of a quotient and a root and a reciprocal of these, of two products, a root, a sum and a
        # quotient, the difference's.
        bound = 2.0**-24 * (3 * np.abs(kept) + 12 * np.abs(update))
        off = np.abs(after[name] - (kept - update))
        furthest = max(furthest, (off / np.maximum(bound, 1e-45)).max())
    print(f"updates are off by {furthest:.2f} of the bound at most")
    assert furthest <= 1


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_one_step_that_is_not_finite_is_skipped_and_training_goes_on(rare, short_run, tmp_path, recipe):
    start_from = changed_weights(short_run / "half" / "step_000003", tmp_path / "start", overflow_where_the_rare_token_is)
    common = [*rare, "--batch-size", 4, "--threads", 1, "--recipe", recipe, "--max-steps", 300, "--val-every", 50,
              "--skip-outliers", 8]
    out, stopped = tmp_path / "run", tmp_path / "stopped"
    run_well(*common, "--init-from", start_from, "--checkpoint-every", 50, "--out-dir", out)
    train = events(out, "train")
    bad = [event for event in train if event.get("finite") is False]
    print([(event["step"], event["skipped"]) for event in bad])
    # 256 steps see each window once.
    assert len(train) == 300 and [event["step"] // 256 for event in bad] in ([0], [0, 1])
    assert all("finite" in event["skipped"] and event["loss"] is None for event in bad)
    others = [event for event in train if event not in bad]
    assert not any("skipped" in event for event in others)  # the statistics of outliers have survived
    losses = np.array([event["loss"] for event in others])
    assert np.mean(losses[-50:]) < np.mean(losses[:50]) - 0.2
    assert all(loss is not None for _, loss in validations(out))
    for directory in step_directories(out):
        check_loadable(directory)
    state = json.loads((latest(out) / "trainer_state.json").read_text())
    assert state["skipped"] == len(bad) and state["nonfinite_in_a_row"] == 0
    for name, key in (("losses", "loss"), ("grad_norms", "grad_norm")):
        assert sorted(state[name]["values"]) == sorted(event[key] for event in others[-128:])
    assert_update_counts_applied_steps(shutil.copytree(out, tmp_path / "longer"))
    # Killed right behind that step, and resumed from before it.
    process = start(*common, "--init-from", start_from, "--checkpoint-every", 50, "--out-dir", stopped)
    wait_for_line(process, f"step {max(bad[0]['step'] + 1, 51):3d}/300")
    process.kill()
    process.communicate()
    run_well("--resume", "--out-dir", stopped)
    assert_same_run(stopped, out)


def test_a_signal_between_bad_steps_keeps_the_good_checkpoint(short_run, data, tmp_path):
    """A checkpoint of weights whose losses aren't finite must not push the last good one out."""
    out = tmp_path / "run"
    common = [*data, *MODEL, "--learning-rate", "1e30", "--checkpoint-every", 1, "--keep-checkpoints", 1]
    assert run(*common, "--max-steps", 100, "--out-dir", out).returncode == 3
    good, = step_directories(out)
    bad_from = int(good.name[5:])
    before = snapshot(good)
    # As if stopped at two bad steps: a run of that length ends with a checkpoint too.
    run_well("--resume", "--max-steps", bad_from + 3, "--out-dir", out)
    assert len(step_directories(out)) == 2 and snapshot(good) == before
    done = run("--resume", "--max-steps", 100, "--out-dir", out)
    assert done.returncode == 3 and good in step_directories(out)


# ---------------------------------------------------------------------------------------------------------------------
# What others do to a run's files

@pytest.mark.parametrize("closed", [(1,), (1, 2)])
def test_closed_streams_write_into_no_file(data, tmp_path, closed):
    """The log would have their number, and what is printed."""
    out = tmp_path / "run"
    done = run(*data, *MODEL, "--max-steps", 3, "--out-dir", out, before=lambda: [os.close(number) for number in closed])
    assert done.returncode == 0
    assert [event["step"] for event in steps(out)] == [0, 1, 2]  # every line is JSON


def test_a_token_file_that_is_cut_short(tmp_path):
    data = make_data(tmp_path / "data")
    run_of_many = start(*data, *MODEL, "--max-steps", 100000, "--checkpoint-every", 20, "--out-dir", tmp_path / "run")
    wait_for_line(run_of_many, "step     50/")
    for path in (tmp_path / "data").glob("train*.bin"):
        os.truncate(path, 0)
    _, errors = run_of_many.communicate(timeout=60)
    assert run_of_many.returncode == 2 and "a token file was cut short" in one_sentence(errors)
    check_loadable(latest(tmp_path / "run"))


# ---------------------------------------------------------------------------------------------------------------------
# Two runs in one directory

def test_a_second_run_in_the_same_directory_is_refused(data, tmp_path):
    # Each step has a checkpoint, which replaces the last: --resume must have the directory before it reads one.
    common = [*data, *MODEL, "--max-steps", 100000, "--checkpoint-every", 1]
    out = tmp_path / "run"
    first = start(*common, "--out-dir", out)
    wait_for_line(first, "step    100/")
    for arguments in (common, *10 * (["--resume"], ["--resume", "--max-steps", 5])):
        done = run(*arguments, "--out-dir", out)
        assert done.returncode == 2 and first.poll() is None
        assert "another run is writing" in one_sentence(done.stderr) and str(out) in done.stderr
    first.kill()
    first.communicate()
    taken = [event["step"] for event in steps(out)]
    assert taken == list(range(len(taken))) and sum(event["event"] == "config" for event in events(out)) == 1
    check_loadable(latest(out))
    # The killed run's lock went with it. Only --resume may go on in its directory.
    done = run(*common, "--out-dir", out)
    assert done.returncode == 2 and "--resume" in one_sentence(done.stderr)
    reached = int(latest(out).name[5:])
    run_well("--resume", "--max-steps", reached + 20, "--out-dir", out)
    assert latest(out).name == f"step_{reached + 20:06d}"
