"""build/proxy as a user runs it: twins, states, diagnostics, bad input; and dev/proxy/run.py in miniature."""

import fcntl
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, safe_open, save_file

ROOT = Path(__file__).resolve().parents[2]
PROXY = str(Path(os.environ.get("PROXY", ROOT / "build/proxy")).resolve())
SLOWNESS = float(os.environ.get("TEST_SLOWNESS", 1))
SMALL = ["--layers", 2, "--width", 32, "--batch-size", 64, "--threads", 1, "--learning-rate", 3e-3, "--device", "cpu"]
SWIGLU = ["--activation", "swiglu", "--attention", "--heads", 2, "--seq-len", 8]


def run(*arguments, timeout=120):
    return subprocess.run([PROXY, *(str(a) for a in arguments)], cwd=ROOT, text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=timeout * SLOWNESS)


def train(out_dir, *arguments):
    done = run(*arguments, "--out-dir", out_dir)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return events(out_dir)


def events(out_dir, kind=None):
    found = [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]
    return [event for event in found if kind in (None, event["event"])]


def steps(out_dir):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in events(out_dir, "train")]


def end(out_dir):
    return {k: v for k, v in events(out_dir)[-1].items() if k not in ("seconds", "gemm_flops_per_second")}


@pytest.mark.parametrize("options", [
    [], SWIGLU, ["--no-layernorm", "--optimizer", "sgd", "--momentum", 0.9, "--loss", "kl", "--label-noise", 0],
    [*SWIGLU, "--teacher", "plain"]])
def test_same_seed_same_bits_and_a_state_goes_on(tmp_path, options):
    """A run again, and one loaded from its middle, have the same steps and the same state at the end, byte for byte."""
    model = [*SMALL, *options, "--quantize-ln-affine"]
    train(tmp_path / "a", *model, "--steps", 12, "--save-at", 5, "--save-every", 12)
    train(tmp_path / "b", *model, "--steps", 12, "--save-at", 12)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "log.jsonl", "step_000005.safetensors", "step_000012.safetensors"]
    state = (tmp_path / "a/step_000012.safetensors").read_bytes()
    assert steps(tmp_path / "a") == steps(tmp_path / "b") and len(steps(tmp_path / "a")) == 12
    assert state == (tmp_path / "b/step_000012.safetensors").read_bytes()
    train(tmp_path / "c", "--load", tmp_path / "a/step_000005.safetensors", "--quantize-ln-affine", "--steps", 12,
          "--save-at", 12, "--threads", 1, "--device", "cpu")
    assert steps(tmp_path / "c") == steps(tmp_path / "a")[5:]
    assert (tmp_path / "c/step_000012.safetensors").read_bytes() == state
    assert end(tmp_path / "c") == end(tmp_path / "a")


def test_another_seed_is_another_run_with_the_same_teacher(tmp_path):
    first, second = (train(tmp_path / str(seed), *SMALL, "--steps", 2, "--seed", seed) for seed in (3, 2))
    assert first[1]["loss"] != second[1]["loss"]
    other = train(tmp_path / "teacher", *SMALL, "--steps", 2, "--seed", 3, "--teacher-seed", 9)
    assert other[1]["loss"] != first[1]["loss"]


# The first step's loss by numpy alone, in FP64: weights, samples, student and teacher.
INPUTS, NOISE = 1 << 60, 1 << 61  # streams, as dev/proxy/data.h has them
BASE = {"layers": 2, "width": 32, "batch": 64, "heads": 2, "seq_len": 8}  # as SMALL and SWIGLU


def philox(key, stream, count):
    """Philox4x32-10 (Salmon et al. 2011) of counters (stream, 0 to count - 1): (count, 4) words of 32
    bits."""
    low = np.uint64(0xFFFFFFFF)
    halves = (key & 0xFFFFFFFF, 0x9E3779B9), (key >> 32, 0xBB67AE85)
    counter = np.arange(count, dtype=np.uint64)
    x = [counter & low, counter >> np.uint64(32), np.full(count, stream & 0xFFFFFFFF, np.uint64),
         np.full(count, stream >> 32, np.uint64)]
    for turn in range(10):
        keys = [np.uint64((half + turn * weyl) & 0xFFFFFFFF) for half, weyl in halves]
        a, b = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [(b >> np.uint64(32)) ^ x[1] ^ keys[0], b & low, (a >> np.uint64(32)) ^ x[3] ^ keys[1], a & low]
    return np.stack(x, axis=1)


def normal(seed, stream, shape):
    """Box and Muller: a draw's words 0 and 2 are radii, 1 and 3 angles, whose two highest bits choose
    the quadrant."""
    words = philox(seed, stream, -(-np.prod(shape) // 4)).astype(np.float64)
    radius = np.sqrt(-2 * np.log((words[:, ::2] + 0.5) / 2**32))
    quadrant, rest = np.divmod(words[:, 1::2], 2**30)
    angle = np.pi / 2 * (quadrant + rest / 2**30 - 0.5)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2)
    return pairs.ravel()[:np.prod(shape)].reshape(shape)


def uniform_weights(seed, parameter, rows, cols):
    """PyTorch's nn.Linear: U(-1/sqrt(cols), 1/sqrt(cols))."""
    u = (philox(seed, parameter, rows * cols)[:, 0] >> np.uint64(8)).astype(np.float64) / 2**24
    return ((2 * u - 1) / np.sqrt(cols)).reshape(rows, cols)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu_gate(x):
    gate, up = np.split(x, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attend(qkv):
    q, k, v = (x.reshape(-1, BASE["seq_len"], BASE["heads"], BASE["width"] // BASE["heads"]).swapaxes(1, 2)
               for x in np.split(qkv, 3, axis=1))
    return (softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])) @ v).swapaxes(1, 2).reshape(len(qkv), -1)


def forward(x, seed, swiglu=False, attention=False, layernorm=True, plain=False):
    """dev/proxy/model.h's formulas, with gains of 1 and biases of 0. A weight's stream is its place in the
    list of parameters."""
    width, parameter = BASE["width"], 0
    hidden = width if plain else 4 * width
    if swiglu:
        hidden = -(-2 * hidden // 3 // 64) * 64  # up to a multiple of 64
    branches = [(3 * width, attend, width)] if attention else []
    branches.append((2 * hidden, silu_gate, hidden) if swiglu else (hidden, gelu, hidden))
    for first_rows, between, second_cols in branches * BASE["layers"]:
        parameter += 2 * layernorm
        normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) if layernorm else x
        added = between(normed @ uniform_weights(seed, parameter, first_rows, width).T)
        added = added @ uniform_weights(seed, parameter + 1, width, second_cols).T
        x = added if plain else x + added
        parameter += 2
    return x


def first_loss(kl, label_noise, seed=1337, teacher_seed=1, layernorm=True, plain=False, **model):
    x = normal(seed, INPUTS, (BASE["batch"], BASE["width"]))
    output = forward(x, seed, layernorm=layernorm, **model)
    target = forward(x, teacher_seed, layernorm=False, plain=plain, **model)
    target = target + label_noise * normal(seed, NOISE, x.shape)
    if not kl:
        return ((output - target) ** 2).mean()
    p, q = softmax(target), softmax(output)
    return (p * np.log(p / q)).sum(axis=1).mean()


@pytest.mark.parametrize("options, model", [
    ([], {}),
    (["--no-layernorm"], {"layernorm": False}),
    (["--teacher", "plain"], {"plain": True}),
    (["--loss", "kl"], {"kl": True}),
    (["--seed", 7, "--teacher-seed", 5000000000, "--label-noise", 0.5],
     {"seed": 7, "teacher_seed": 5000000000, "label_noise": 0.5}),
    (SWIGLU, {"swiglu": True, "attention": True}),
    ([*SWIGLU, "--teacher", "plain"], {"swiglu": True, "attention": True, "plain": True}),
])
def test_the_first_loss_is_that_of_an_independent_computation(tmp_path, options, model):
    """The student has its norms, the teacher none; both see the same samples. The loss is a mean of 2048
    values, each of sums of up to 256 rounded products: 256 roundings of FP32 are ample."""
    log = train(tmp_path / "run", *SMALL, "--recipe", "fp32", "--steps", 1, *options)
    found = next(e["loss"] for e in log if e["event"] == "train")
    expected = first_loss(**({"kl": False, "label_noise": 0.005} | model))
    print(f"{options}: {found:.9g}, off by {abs(found / expected - 1):.1e}, at most {256 * 2**-24:.1e}")
    assert abs(found / expected - 1) < 256 * 2**-24


# The authors' arithmetic, by numpy in FP32 with each operation rounded as their program rounds it


def away(x):
    """To BF16, away from zero at ties."""
    x = np.asarray(x, np.float32)
    bits = (np.abs(x).view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return np.copysign(bits.view(np.float32), x)


def e4m3(x, axis):
    """Through blocks of 32 E4M3 elements with a scale rounded down; elements away from zero at ties."""
    moved = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(np.where(amax > 0, amax, 1))) - 8)
    scaled = np.abs(blocks) / scale
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.where(scaled > 0, scaled, 1))), -6) - 3)
    decoded = np.sign(blocks) * np.minimum(np.floor(scaled / step + 0.5) * step, 448) * scale
    return np.moveaxis(decoded.reshape(moved.shape), -1, axis)


def their_product(a, a_axis, b, b_axis):
    """a and b as the quantizer gets them, with the axes along which they are multiplied."""
    left, right = e4m3(away(a), a_axis), e4m3(away(b), b_axis)
    return away(np.tensordot(left, right, (a_axis, b_axis)))


def mean(x, axis=1):
    return away(away(x.astype(np.float64).sum(axis, keepdims=True)) / np.float32(x.shape[axis]))


def their_norm(x):
    shift = away(away(x) - mean(away(x)))
    variance = away(mean(away(shift * shift)) + np.float32(1e-5))
    root = away(np.sqrt(variance))
    return away(shift * away(1 / root)), variance, root  # with gains of 1 and biases of 0


def their_norm_backward(dout, normed, variance, root):
    dout = away(dout)
    along = away(mean(away(away(dout * normed) * root)) * away(1 / variance))
    dx = away(away(dout * away(1 / root)) + away(-along * normed))
    return away(dx - mean(dx)), away(away(dout * normed).astype(np.float64).sum(0))


def their_gelu(x):
    x = away(x)
    inner = away(np.float32(1.59375) * away(away(np.float32(0.044677734) * away(away(x * x) * x)) + x))
    gate = away(1 / away(away(np.exp(-inner)) + np.float32(1)))
    slope = away(np.float32(1.59375) + away(np.float32(0.21386719) * away(x * x)))
    spread = away(gate * away(np.float32(1) - gate))
    return away(x * gate), away(gate + away(x * away(slope * spread)))


def their_weights(seed, plain):
    width, hidden = BASE["width"], BASE["width"] if plain else 4 * BASE["width"]
    places = range(0 if plain else 2, 100, 2 if plain else 4)
    return [(uniform_weights(seed, at, hidden, width).astype(np.float32),
             uniform_weights(seed, at + 1, width, hidden).astype(np.float32)) for at, _ in zip(places, range(BASE["layers"]))]


def their_first_step():
    """The first loss, and the norm of its gradient without layernorms' biases."""
    stream = x = normal(1337, INPUTS, (BASE["batch"], BASE["width"])).astype(np.float32)
    target, kept, squares = x, [], 0.0
    for first, second in their_weights(1, plain=True):
        target = their_product(their_gelu(their_product(target, 1, first, 1))[0], 1, second, 1)
    weights = their_weights(1337, plain=False)
    for first, second in weights:
        normed, variance, root = their_norm(stream)
        hidden, slope = their_gelu(their_product(normed, 1, first, 1))
        stream = stream + their_product(hidden, 1, second, 1)
        kept.append((normed, variance, root, hidden, slope))
    loss = np.mean((stream.astype(np.float64) - target) ** 2)
    dstream = (2 / stream.size * (stream - target)).astype(np.float32)
    for (first, second), (normed, variance, root, hidden, slope) in zip(weights[::-1], kept[::-1]):
        dsecond = their_product(dstream, 0, hidden, 0)
        dhidden = away(slope * away(their_product(dstream, 1, second, 0)))
        dfirst = their_product(dhidden, 0, normed, 0)
        back, dgains = their_norm_backward(their_product(dhidden, 1, first, 0), normed, variance, root)
        dstream = dstream + back
        squares += sum((g.astype(np.float64) ** 2).sum() for g in (dsecond, dfirst, dgains))
    return loss, np.sqrt(squares)


def test_the_authors_arithmetic(tmp_path):
    """Loss and gradient norm of the first step, against numpy; any part left out moves them by more. Sums are added in
    another order there: one that comes out beside a tie of BF16 rounds the other way, by 2^-8 of itself, one in some
    thousands."""
    model = [*SMALL, "--teacher", "plain", "--label-noise", 0, "--steps", 1]
    parts = ["--bf16-layernorm", "--bf16-activation", "--bf16-linear", "--fp32-stream", "--quantize-teacher",
             "--no-norm-bias-gradient"]
    expected, bound = np.array(their_first_step()), 2.0**-8 / 50

    def off(name, *options):
        (step,) = [e for e in train(tmp_path / name, *model, *options) if e["event"] == "train"]
        return np.abs(np.array([step["loss"], step["grad_norm"]]) / expected - 1)

    found = off("all", "--arithmetic", "authors")
    print(f"off by {found}, at most {bound:.1e}")
    assert (found < bound).all() and np.array_equal(found, off("parts", *parts))
    for part in parts:
        without = off(part[2:], *(other for other in parts if other != part))
        print(f"without {part}: {without}")
        assert (without > 2 * found).any() and not np.array_equal(without, found)


def test_a_twin_is_the_fp32_run(tmp_path):
    """Its losses are those of a run of its own, and zeta is the distance to its gradient; a resumed run has both."""
    model = [*SMALL, "--save-every", 4, "--keep-states", 2]
    train(tmp_path / "fp32", *SMALL, "--recipe", "fp32", "--steps", 12)
    train(tmp_path / "mx", *model, "--steps", 12, "--twin-every", 1, "--gradient-bias-every", 1)
    alone, twin = steps(tmp_path / "fp32"), events(tmp_path / "mx", "twin")
    assert [e["loss"] for e in twin] == [e["loss"] for e in alone]
    assert [e["grad_norm"] for e in twin] == [e["grad_norm"] for e in alone]
    at_equal_weights = events(tmp_path / "mx", "gradient_bias")
    assert twin[0]["error_ratio"] == at_equal_weights[0]["error_ratio"] > 0
    assert twin[5]["error_ratio"] != at_equal_weights[5]["error_ratio"]
    states = sorted(path.name for path in (tmp_path / "mx").glob("step_*"))
    assert states == ["step_000008.safetensors", "step_000012.safetensors"]


def lines_without_times(path):
    return [re.sub(r'"(seconds|gemm_flops_per_second|command|path)":("[^"]*"|[^,}]*)', "", line)
            for line in (path / "log.jsonl").read_text().splitlines()]


def test_a_run_that_was_cut_off_goes_on(tmp_path):
    """From its newest state, with the log of a run that was not; from the start where there is no state."""
    model = [*SMALL, "--steps", 12, "--save-every", 4, "--twin-every", 2, "--resume"]
    train(tmp_path / "whole", *model)
    whole = (tmp_path / "whole/log.jsonl").read_text().splitlines(keepends=True)
    saved = next(i for i, line in enumerate(whole) if '"checkpoint"' in line and '"step":8' in line)
    for name, kept, first in (("late", saved + 4, 8), ("early", 3, 0)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "log.jsonl").write_text("".join(whole[:kept]) + '{"event":"train","st')
        if first:
            (directory / "step_000008.safetensors").write_bytes((tmp_path / "whole/step_000008.safetensors").read_bytes())
        train(directory, *model)
        assert [e["step"] for e in steps(directory)] == list(range(12))
        assert (directory / "step_000012.safetensors").read_bytes() == (tmp_path / "whole/step_000012.safetensors").read_bytes()
        assert len(lines_without_times(directory)) == len(whole) + (first > 0)  # config, again
        assert [{**e, "seconds": 0} for e in events(directory, "twin")] == [
            {**e, "seconds": 0} for e in events(tmp_path / "whole", "twin")]


def test_a_run_that_was_cut_off_before_its_end_has_but_to_log_it(tmp_path):
    """By the state of its last step. Once it has its end, as many steps are refused as before; fewer always are."""
    model = [*SMALL, "--steps", 4, "--save-every", 2, "--resume"]
    log, state = tmp_path / "log.jsonl", tmp_path / "step_000004.safetensors"
    train(tmp_path, *model)
    whole, saved, ended, made = log.read_text().splitlines(keepends=True), state.read_bytes(), end(tmp_path), steps(tmp_path)
    log.write_text("".join(whole[:-1]))
    assert "4 steps already" in refused(tmp_path, *model, "--steps", 3, "--out-dir", tmp_path)
    assert "4 steps already" in refused(tmp_path, *model, "--load", state, "--out-dir", tmp_path / "new")
    train(tmp_path, *model)
    assert [e["event"] for e in events(tmp_path)] == [json.loads(line)["event"] for line in whole[:-1]] + ["config", "end"]
    assert end(tmp_path) == ended and steps(tmp_path) == made and state.read_bytes() == saved
    assert "4 steps already" in refused(tmp_path, *model, "--out-dir", tmp_path)


def test_an_intervention_that_was_cut_off_goes_on(tmp_path):
    """From its own newest state; where it has none, from the one that it started from."""
    train(tmp_path / "before", *SMALL, "--steps", 4, "--save-every", 4)
    arguments = ["--load", tmp_path / "before/step_000004.safetensors", "--recipe", "mxfp4", "--steps", 12, "--save-every", 4,
                 "--resume"]
    train(tmp_path / "whole", *arguments)
    whole = (tmp_path / "whole/log.jsonl").read_text().splitlines(keepends=True)
    saved = next(i for i, line in enumerate(whole) if '"checkpoint"' in line)
    for name, kept in (("late", saved + 2), ("early", 2)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "log.jsonl").write_text("".join(whole[:kept]))
        if kept > saved:
            (directory / "step_000008.safetensors").write_bytes((tmp_path / "whole/step_000008.safetensors").read_bytes())
        train(directory, *arguments)
        assert [e["step"] for e in steps(directory)] == list(range(4, 12))
        assert [e["recipe"]["name"] for e in events(directory, "config")] == ["mxfp4"] * (1 + (kept > saved))
        assert (directory / "step_000012.safetensors").read_bytes() == (tmp_path / "whole/step_000012.safetensors").read_bytes()


def test_a_resumed_run_keeps_what_is_not_given(tmp_path):
    """The recipe too, which a state doesn't hold; another one that is given is logged."""
    model = [*SMALL, "--save-every", 4]
    train(tmp_path / "straight", *model, "--recipe", "mxfp4", "--steps", 12)
    train(tmp_path / "run", *model, "--recipe", "mxfp4", "--steps", 8)
    train(tmp_path / "run", "--resume", "--steps", 12)
    assert (tmp_path / "run/step_000012.safetensors").read_bytes() == (tmp_path / "straight/step_000012.safetensors").read_bytes()
    train(tmp_path / "run", "--resume", "--steps", 16, "--recipe", "fp32")
    assert [e["recipe"]["name"] for e in events(tmp_path / "run", "config")] == ["mxfp4", "mxfp4", "fp32"]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_run_that_starts_anew_keeps_what_is_not_given(tmp_path, loaded):
    """The log of a run that was cut off before its first state has its options, a state to start from among them."""
    train(tmp_path / "before", *SMALL, "--steps", 4, "--save-at", 4)
    begun = ["--load", tmp_path / "before/step_000004.safetensors", "--threads", 1] if loaded else SMALL
    whole = train(tmp_path, *begun, "--recipe", "mxfp4", "--steps", 9)
    lines = (tmp_path / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_text("".join(lines[:3]))
    made = train(tmp_path, "--steps", 9, "--resume")
    losses = [[(e["step"], e["loss"]) for e in log if e["event"] == "train"] for log in (whole, made)]
    assert losses[0] == losses[1] and len(losses[0]) == (5 if loaded else 9)
    assert made[0]["recipe"]["name"] == "mxfp4"


def refused(directory, *arguments):
    """Returns the sentence with which the program refuses, and leaves every file in the directory as it was."""
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    done = run(*arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, (done.returncode, done.stderr)
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return done.stderr


TRAINER_LOG = ('{"event":"config","step":0,"program":"train_gpt_mxfp8","options":{"layers":2}}\n'
               '{"event":"train","step":0,"loss":4.2}\n{"event":"checkpoint","step":1,"path":"step_000001"}\n')


@pytest.mark.parametrize("text", [TRAINER_LOG, "not a log\n", '{"event":"train"'])
def test_resume_leaves_the_log_of_another_program(tmp_path, text):
    (tmp_path / "log.jsonl").write_text(text)
    assert "is no log of the proxy: choose another --out-dir" in refused(
        tmp_path, *SMALL, "--steps", 3, "--resume", "--out-dir", tmp_path)


def test_resume_leaves_a_run_that_has_ended_without_a_state(tmp_path):
    """Whatever it is given to start from; one that has an end and a state goes on."""
    train(tmp_path / "run", *SMALL, "--steps", 8)
    train(tmp_path / "other", *SMALL, "--steps", 2, "--save-at", 2)
    state = tmp_path / "other/step_000002.safetensors"
    for given in ["--steps", 3], ["--steps", 12], ["--steps", 12, "--load", state]:
        assert "has ended and has no state to go on from: choose another --out-dir" in refused(
            tmp_path, *SMALL, *given, "--resume", "--out-dir", tmp_path / "run")
    train(tmp_path / "other", *SMALL, "--steps", 3, "--resume")
    state.unlink()
    assert "has no state" in refused(tmp_path, *SMALL, "--steps", 5, "--resume", "--out-dir", tmp_path / "other")


@pytest.mark.parametrize("text", ['{"ev', '{"event":"config","step":0,"prog'])
def test_resume_starts_anew_where_the_first_line_was_cut(tmp_path, text):
    """As a full disk leaves it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/log.jsonl").write_text(text)
    train(tmp_path / "run", *SMALL, "--steps", 3, "--resume")
    train(tmp_path / "other", *SMALL, "--steps", 3)
    losses = [[event["loss"] for event in events(tmp_path / name, "train")] for name in ("run", "other")]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_resume_starts_anew_where_a_log_is_empty(tmp_path):
    (tmp_path / "log.jsonl").touch()
    assert len(train(tmp_path, *SMALL, "--steps", 2, "--resume")) == 4


def test_a_log_is_not_read_while_another_run_writes_it(tmp_path):
    train(tmp_path, *SMALL, "--steps", 2, "--save-at", 2)
    with (tmp_path / "log.jsonl").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert "another run is writing" in refused(tmp_path, "--steps", 2, "--resume", "--out-dir", tmp_path)


def test_options_that_a_resumed_run_keeps_give_others_their_effect(tmp_path):
    """What needs another option finds it in the log or in the state; what was to be saved later than --steps isn't refused."""
    train(tmp_path, *SMALL, *SWIGLU, "--steps", 4, "--save-every", 2, "--save-at", 3)
    whole, saved, _ = (tmp_path / "log.jsonl").read_text().partition('{"event":"checkpoint","step":3')
    assert saved
    (tmp_path / "log.jsonl").write_text(whole)
    train(tmp_path, "--heads", 2, "--seq-len", 8, "--keep-states", 1, "--steps", 2, "--resume")
    assert events(tmp_path)[-1]["step"] == 2


def test_twins_share_weights_and_samples(tmp_path):
    """The exact gradient of an MX run's first step is the FP32 run's; of an FP32 run the error is nothing."""
    train(tmp_path / "fp32", *SMALL, "--recipe", "fp32", "--steps", 3, "--gradient-bias-every", 1)
    train(tmp_path / "mx", *SMALL, "--recipe", "mxfp8-ocp", "--steps", 3, "--gradient-bias-every", 2)
    exact, mx = events(tmp_path / "fp32", "gradient_bias"), events(tmp_path / "mx", "gradient_bias")
    assert [e["step"] for e in exact] == [0, 1, 2] and [e["step"] for e in mx] == [0, 2]
    assert all(e["error_ratio"] == 0 and abs(e["cosine"] - 1) < 1e-9 for e in exact)
    assert exact[0]["exact_loss"] == mx[0]["exact_loss"] == steps(tmp_path / "fp32")[0]["loss"]
    assert mx[0]["exact_grad_norm"] == steps(tmp_path / "fp32")[0]["grad_norm"]
    for e in mx:
        assert 0.005 < e["error_ratio"] < 0.5 and 0.8 < e["cosine"] < 1
        assert np.isclose(e["log_error_ratio"], np.log(e["error_ratio"]))


def test_an_intervention_changes_the_arithmetic_alone(tmp_path):
    """From one state: the first loss under FP32 is the exact one that the MX run logged there."""
    train(tmp_path / "mx", *SMALL, "--steps", 8, "--save-at", 6, "--gradient-bias-every", 6)
    state = tmp_path / "mx/step_000006.safetensors"
    for name, options in (("fp32", ["--recipe", "fp32"]), ("rceil", ["--scale-rounding", "rceil"]),
                          ("forward", ["--recipe", "mxfp8-forward-only"])):
        train(tmp_path / name, "--load", state, *options, "--steps", 8, "--threads", 1, "--device", "cpu")
        assert [e["step"] for e in steps(tmp_path / name)] == [6, 7]
    assert steps(tmp_path / "fp32")[0]["loss"] == events(tmp_path / "mx", "gradient_bias")[1]["exact_loss"]
    losses = {name: steps(tmp_path / name)[0]["loss"] for name in ("fp32", "rceil")}
    assert len({*losses.values(), steps(tmp_path / "mx")[6]["loss"]}) == 3
    config = events(tmp_path / "rceil", "config")[0]
    assert config["recipe"]["scale-rounding-weights"] == "rceil" and config["options"]["width"] == 32


def test_a_block_in_bf16_is_not_transformed(tmp_path):
    """One step of a run whose wgrad is transformed moves the weights of the block that is kept in BF16 as without."""
    base = [*SMALL, "--recipe", "mxfp4", "--bf16-last-layers", 1, "--steps", 1, "--save-at", 1]
    train(tmp_path / "plain", *base)
    train(tmp_path / "transformed", *base, "--hadamard-wgrad", "fixed")
    plain, transformed = (load_file(tmp_path / name / "step_000001.safetensors") for name in ("plain", "transformed"))
    same = {name for name in plain if np.array_equal(plain[name], transformed[name])}
    assert {name for name in plain if ".1." in name} <= same
    assert {name for name in plain if ".0." in name and name.endswith("weight")} - same


def test_statistics_by_layer(tmp_path):
    """Gains that training has moved a little under 1 are all clamped by floor; rceil clamps nothing. What is logged
    doesn't change what is computed."""
    for name, recipe in (("floor", "mxfp8-ocp"), ("rceil", "mxfp8")):
        # One step of Adam moves every gain by the learning rate, up or down.
        train(tmp_path / name, *SMALL, "--recipe", recipe, "--steps", 4, "--stats-every", 1, "--quantize-ln-affine")
    quiet = train(tmp_path / "quiet", *SMALL, "--recipe", "mxfp8-ocp", "--steps", 4, "--quantize-ln-affine")
    assert [e for e in quiet if e["event"] == "quant"] == []
    assert steps(tmp_path / "quiet") == steps(tmp_path / "floor")
    floor, rceil = events(tmp_path / "floor", "quant"), events(tmp_path / "rceil", "quant")
    assert {(e["layer"], e["linear"], e["operand"]) for e in floor} == {
        (layer, linear, operand) for layer in range(2) for linear, operands in (
            ("ln_2", ["gain"]),
            *((name, ["fprop-x", "fprop-w", "dgrad-dy", "dgrad-w", "wgrad-dy", "wgrad-x"]) for name in ("up", "down")))
        for operand in operands}
    assert all(e["clamped"] == 0 for e in rceil)
    scaled = train(tmp_path / "nvfp4", *SMALL, "--recipe", "nvfp4", "--steps", 1, "--stats-every", 1)
    assert [e["operand"] for e in scaled if e["event"] == "quant" and e["scaling"] == "nvfp4"] == 2 * 2 * [
        "fprop-x", "fprop-w", "dgrad-dy", "dgrad-w", "wgrad-dy", "wgrad-x"]
    assert any(e["clamped"] > 0 for e in floor if e["operand"] == "fprop-x")
    assert any(e["clamped"] > 0.5 for e in floor if e["operand"] == "gain")
    assert all(e["clamped"] == 0 for e in floor if e["operand"] == "gain" and e["step"] == 0)  # all are 1


def test_a_run_that_diverges_says_so(tmp_path):
    huge = ["--optimizer", "sgd", "--no-layernorm", "--recipe", "fp32", "--learning-rate", 1e4]
    log = train(tmp_path / "stops", *SMALL, *huge, "--steps", 50)
    assert log[-1]["reason"] in ("diverged", "not-finite") and log[-1]["step"] < 50
    assert log[-1]["spikes"] == sum(e.get("spike", False) for e in log) > 0
    log = train(tmp_path / "goes on", *SMALL, *huge, "--steps", 50, "--keep-going")
    assert log[-1]["reason"] == "not-finite" and log[-2]["finite"] is False


def copy_with(path, to, **changes):
    with safe_open(path, "numpy") as f:
        metadata = {k: v for k, v in (f.metadata() | changes).items() if v is not None}
    save_file(load_file(path), to, metadata)
    return to


def test_bad_input_is_refused_with_a_sentence(tmp_path):
    train(tmp_path / "ok", *SMALL, "--steps", 2, "--save-at", 2)
    state = tmp_path / "ok/step_000002.safetensors"
    other = copy_with(state, tmp_path / "other.safetensors", width="64")
    short = copy_with(state, tmp_path / "short.safetensors", step=None)
    odd = copy_with(state, tmp_path / "odd.safetensors", step="x")
    (tmp_path / "bare").mkdir()
    copy_with(state, tmp_path / "bare/step_000002.safetensors")
    new = ["--out-dir", tmp_path / "new", "--steps", 3]
    cases = [
        ([*SMALL], "--out-dir"),
        ([*SMALL, "--out-dir", tmp_path / "ok"], "holds a run already"),
        ([*new, "--recipe", "mxfp9"], "mxfp9"),
        ([*new, "--recipe", "fp8-delayed", "--device", "cpu"], "fp8-current"),
        ([*new, "--recipe", "fp32", "--scale-rounding", "floor"], "--scale-rounding floor changes nothing"),
        ([*new, "--activation", "tanh"], "tanh"),
        ([*new, "--operand", "x"], "OPERAND=FORMAT"),
        ([*new, "--attention", "--width", 30, "--heads", 4], "--heads"),
        ([*new, "--attention", "--batch-size", 30, "--seq-len", 4], "--seq-len"),
        ([*new, "--width", 65536, "--layers", 1000], "memory"),
        ([*new, "--load", tmp_path / "none"], "none"),
        ([*new, "--load", tmp_path / "ok/log.jsonl"], "log.jsonl"),
        ([*new, "--load", state, "--width", 64], "--width 64"),
        ([*new, "--load", state, "--seed", 2], "--seed 2"),
        ([*new, "--load", other], "1 x 64"),
        ([*new, "--load", short], "step"),
        ([*new, "--load", odd], "step"),
        ([*new, "--load", state, "--steps", 2], "2 steps already"),
        ([*new, "--save-at", "soon"], "soon"),
        ([*new, "--save-at", 3, "--save-at", 4], "--save-at 4 comes after the last step, --steps 3"),
        ([*new, "--save-at", "9" * 20], f"--save-at {'9' * 20} comes after the last step, --steps 3"),
        ([*new, "--load", state, "--save-at", 2], "--save-at 2 comes before this run, which goes on from step 2"),
        ([*new, "--heads", 4], "--heads changes nothing without --attention"),
        ([*new, "--load", state, "--seq-len", 32], "--seq-len changes nothing without --attention"),
        ([*new, "--final-learning-rate", 1e-4], "--final-learning-rate changes nothing without --schedule cosine"),
        ([*new, "--momentum", 0.9], "--momentum changes nothing without --optimizer sgd"),
        ([*new, "--optimizer", "sgd", "--beta1", 0.8], "--beta1 changes nothing without --optimizer adam"),
        ([*new, "--save-at", 2, "--keep-states", 1], "--keep-states changes nothing without --save-every"),
        ([*new, "--no-layernorm", "--bf16-layernorm"], "--bf16-layernorm changes nothing without --layernorm"),
        ([*new, "--no-layernorm", "--no-norm-bias-gradient"], "--norm-bias-gradient changes nothing without --layernorm"),
        ([*new, "--keep-going", "--diverged-at", 5], "--diverged-at changes nothing without --no-keep-going"),
        ([*new, "--layers", 2, "--bf16-first-layers", 2, "--bf16-last-layers", 1], "are more than the model's 2 blocks"),
        ([*new, "--learning-rate", 0, "--schedule", "cosine"], "--learning-rate above 0"),
        (["--resume", "--out-dir", tmp_path / "bare", "--steps", 9], "whose log.jsonl is gone"),
        ([*new, "--seed", 5, "--teacher-seed", 5], "--teacher-seed"),
        ([*new, "--arithmetic", "authors", "--quantize-ln-affine"], "never quantizes gains"),
        ([*new, "--bf16-activation", "--activation", "swiglu"], "--bf16-activation"),
        ([*new, "--load", state, "--twin-every", 1], "twin."),
        (["--steps", 0], "steps"),
    ]
    before = sorted(p.name for p in tmp_path.iterdir())
    for arguments, named in cases:
        done = run(*arguments)
        lines = done.stderr.splitlines()
        assert done.returncode == 2 and len(lines) == 1 and named in lines[0], (arguments, done.stderr)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert run("--help").returncode == 0 and run().returncode == 2


def test_cosine_of_the_learning_rate(tmp_path):
    """From --learning-rate, towards --final-learning-rate after the last step; constant without it."""
    rates = lambda name, *options: [e["learning_rate"] for e in train(tmp_path / name, *SMALL, "--learning-rate", 0.02,
                                                                      *options) if e["event"] == "train"]
    falling = rates("cosine", "--steps", 8, "--schedule", "cosine", "--final-learning-rate", 0.004)
    assert falling == pytest.approx([0.004 + 0.016 * (1 + np.cos(np.pi * step / 8)) / 2 for step in range(8)], rel=1e-6)
    assert rates("constant", "--steps", 3) == pytest.approx([0.02] * 3)


def load_run():
    spec = importlib.util.spec_from_file_location("proxy_run", ROOT / "dev/proxy/run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_divergence_is_what_lasts():
    """20 losses in a row over 10 times the lowest median before, to the end; what comes back is told apart, a spike is neither."""
    departures = load_run().departures
    steps, falling = np.arange(300), 0.1 + np.exp(-np.arange(300) / 30)
    between = lambda first, last: np.where((steps >= first) & (steps < last), 5.0, falling)
    assert departures(steps, falling, "steps") == (None, [])
    assert departures(steps, between(200, 300), "steps") == (200, [])
    assert departures(steps, np.where(steps >= 200, 0.9, falling), "steps") == (None, [])
    assert departures(steps, between(200, 219), "steps") == (None, [])
    assert departures(steps, between(200, 220), "steps") == (None, [200])
    assert departures(steps, np.maximum(between(150, 180), between(270, 300)), "steps") == (270, [150])
    assert departures(steps, between(281, 300), "steps") == (None, [])
    assert departures(steps + 4000, np.where(steps == 299, np.nan, falling), "not-finite") == (4299, [])
    assert departures(steps, np.where(steps >= 298, 50.0, falling), "diverged") == (298, [])
    assert departures(steps[:3], falling[:3], "steps") == (None, [])


def test_an_intervention_is_measured_against_the_run_it_left():
    """A loss that rises slowly from where it was saved is a divergence there too."""
    departures = load_run().departures
    steps = np.arange(600)
    loss = np.where(steps < 300, 0.1, 0.1 * np.exp((steps - 300) / 40))
    whole, _ = departures(steps, loss, "steps")
    start = whole - 20
    assert departures(steps[start:], loss[start:], "steps", loss[:start]) == (whole, [])
    assert departures(steps[whole + 5 :], loss[whole + 5 :], "steps", loss[: whole + 5]) == (whole + 5, [])


def test_what_is_told_of_a_run(tmp_path):
    """Of a log that is written here: spikes since its own start, the final loss, the worst of the gradient's errors."""
    proxy_run = load_run()

    def write(name, losses, first=0, reason="steps", **end):
        directory = tmp_path / name
        directory.mkdir()
        lines = [{"event": "train", "step": first + i, "loss": loss, "seconds": 0.1} | ({"spike": True} if loss > 50 else {})
                 for i, loss in enumerate(losses)]
        lines += [{"event": "gradient_bias", "step": first + 10 * i, "error_ratio": ratio, "cosine": 1 - ratio}
                  for i, ratio in enumerate((0.1, 0.2, 1.9, 0.2, 0.1, 0.2, 0.3, 0.7, 0.8, 0.7))]
        (directory / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [*lines, {"event": "end", "reason": reason} | end]))
        return directory

    losses = np.concatenate([np.full(30, 0.2), np.linspace(0.2, 0.1, 70)])
    run = proxy_run.Run("a", write("a", losses, spikes=3), ["proxy"])
    assert run.spikes == 0 and run.diverged is None and run.final() == np.median(losses[-5:])
    assert run.seconds == pytest.approx(10)
    assert run.worst_bias() == (1.9, 1 - 1.9)
    assert run.event() == 70  # not the outlier at 20: the median of five around it is 0.2
    up = np.concatenate([losses, np.full(40, 5.0), np.full(40, 0.1), [60.0], np.full(40, 5.0)])
    run = proxy_run.Run("up", write("up", up), ["proxy"])
    assert (run.spikes, run.diverged, run.excursions, run.event()) == (1, 180, [100], 180) and np.isnan(run.final())
    on = proxy_run.Run("on", write("on", np.full(30, 5.0), first=100), ["proxy"], before=run)
    assert (on.diverged, on.excursions) == (100, [])
    assert proxy_run.outcome(on) == "at step 100" and proxy_run.how_many([run, on]) == "2 of 2 diverged"


def test_options_reach_the_program_as_they_were_given(tmp_path):
    words = load_run().words
    assert words({"learning-rate": 1.23456789e-3, "steps": 1234567, "layernorm": False, "attention": True}) == [
        "--learning-rate", "0.00123456789", "--steps", "1234567", "--no-layernorm", "--attention"]
    done = subprocess.run([sys.executable, ROOT / "dev/proxy/run.py", "reference", "--scale", "tiny", "--out-dir", tmp_path,
                           "--proxy", PROXY, "--option", "steps=6K"], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "steps=6K" in done.stderr


@pytest.mark.parametrize("option, said", [
    ("load=state.safetensors", "--load is for the experiments to set"),
    ("out-dir=x", "--out-dir is for the experiments to set"),
    ("recipe=bf16", "--recipe is for the experiments to set"), ("resume=true", "--resume is for the experiments to set"),
    ("log-every=10", "--log-every is for the experiments to set"),
    ("learning-rate=fast", "learning-rate=fast: give a number"),  # of which `optimizers` takes a part
])
def test_options_that_experiments_set_are_refused(tmp_path, option, said):
    done = subprocess.run([sys.executable, ROOT / "dev/proxy/run.py", "optimizers", "--scale", "tiny", "--out-dir", tmp_path,
                           "--proxy", PROXY, "--option", option], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and said in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_options_of_attention_reach_the_runs_that_have_it(tmp_path):
    """The program refuses them without; `variants` has a case with it and others."""
    lock = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "runs").mkdir()
    runner = load_run().Runner(SimpleNamespace(scale="tiny", option=["heads=2", "seq-len=8", "steps=2"], out_dir=tmp_path,
                                               proxy=Path(PROXY), lock=lock))
    with_it, without = (runner.run(str(on), {"attention": on}) for on in (True, False))
    os.close(lock)
    options = events(with_it.directory, "config")[0]["options"]
    assert (options["heads"], options["seq-len"]) == (2, 8) and "--heads" not in without.command


def test_options_of_layernorm_are_for_runs_that_have_it():
    has_effect = load_run().has_effect
    for name in "bf16-layernorm", "norm-bias-gradient":
        assert has_effect(name, {}) and not has_effect(name, {"layernorm": False})


def test_the_commit_is_there_before_the_program_ends(tmp_path):
    """Its run can be reported where the script was killed before."""
    program = tmp_path / "proxy"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    command = [sys.executable, ROOT / "dev/proxy/run.py", "reference", "--scale", "tiny", "--out-dir", tmp_path, "--proxy", program]
    assert subprocess.run(command, cwd=ROOT, text=True, capture_output=True).returncode == 2
    (written,) = tmp_path.glob("runs/*/commit.txt")
    assert len(written.read_text().strip()) >= 7


def report_of(monkeypatch, experiment, reference, losses, growth=1, scale="tiny"):
    """What an experiment gives to its report where its runs have these losses by label; all others stay at 1, each run's times
    `growth` those of the one before."""
    proxy_run, given, count = load_run(), [], itertools.count()

    def made(label, *_, **__):
        factor = growth ** next(count)
        loss = factor * np.array(losses.get(label, np.ones(100)), float)
        run = proxy_run.Run.__new__(proxy_run.Run)
        run.label, run.directory, run.command, run.loss, run.steps = label, Path(label), [], loss, np.arange(len(loss))
        run.quant, run.spikes, run.end = [], 0, {"reason": "steps" if np.isfinite(loss).all() else "not-finite"}
        run.bias = run.twin = [{"step": step, "error_ratio": 0.1 * factor, "cosine": 0.9} for step in range(0, len(loss), 10)]
        run.diverged, run.excursions = proxy_run.departures(run.steps, loss, run.end["reason"])
        return run

    runner = SimpleNamespace(scale=proxy_run.SCALES[scale], base={"steps": 100, "learning-rate": 1e-3}, run=made, out_dir=Path(),
                             reference=lambda *_: [made(label) for label in reference], diagnosed=dict, twinned=dict)
    monkeypatch.setattr(proxy_run, "write_report", lambda *arguments: given.append(arguments))
    getattr(proxy_run, experiment)(runner)
    return given[0]


def seen_of(monkeypatch, experiment, reference, losses):
    return report_of(monkeypatch, experiment, reference, losses)[4]


@pytest.mark.parametrize("experiment", ["reference", "interventions", "text_interventions", "seeds", "text", "swiglu", "authors",
                                        "authors_swiglu", "sweep", "activations", "optimizers", "inits", "variants"])
def test_a_quantity_has_one_scale_in_a_row(monkeypatch, experiment):
    """Losses and errors that grow from run to run, so that panels by themselves would have different axes."""
    figure = report_of(monkeypatch, experiment, ["FP32", "floor"], {"floor": UP_AND_BACK}, growth=1.5)[-1]
    scales = {}
    for axes in figure.axes:
        if axes.get_visible() and axes.axison and axes.get_ylabel() in ("loss", "‖ε‖/‖ḡ‖"):
            row = axes.get_subplotspec().rowspan.start
            ratio_to = axes.lines[-1].get_ydata()[0] if axes.get_ylabel() != "loss" else None  # zeta's line is at 2, not at 1
            scales.setdefault((row, axes.get_ylabel(), ratio_to), []).append(axes.get_ylim())
    assert any(len(limits) > 1 for limits in scales.values())
    assert all(len(set(limits)) == 1 for limits in scales.values()), scales


LOST = [*np.ones(50), np.nan]
UP_AND_BACK = [*np.ones(40), *np.full(25, 50), *np.ones(35)]


def test_words_of_interventions_are_those_of_their_table(monkeypatch):
    seen = seen_of(monkeypatch, "interventions", ["FP32", "floor"], {"floor": UP_AND_BACK, "rceil": LOST})
    assert seen.startswith("the reference went up and came back, so these start before the step at which it first did, 40.")
    assert "From step 38 1 of 9 diverged; the error reached 0.1 (none)" in seen
    seen = seen_of(monkeypatch, "interventions", ["FP32", "floor"], {"floor": LOST})
    assert seen.startswith("the reference diverged at step 50. From step 48 9 of 9 interventions didn't")


@pytest.mark.parametrize("floor, columns", [([1.0, np.nan], 1), (UP_AND_BACK, 2)])
def test_a_legend_of_interventions_is_within_the_picture(monkeypatch, floor, columns):
    """Where the reference diverges so early that all start from one state, it has half the width."""
    figure = report_of(monkeypatch, "interventions", ["FP32", "floor"], {"floor": floor})[-1]
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert len(figure.axes) == 2 * columns and box.x0 >= 0 and box.x1 <= figure.bbox.width, (box, figure.bbox)


def test_interventions_over_seeds_are_compared_with_none(monkeypatch):
    """Both seeds' losses differ by as much, so that the interval is its mean."""
    losses = {"rceil": np.full(100, 1.1), "FP32": LOST}
    _, _, _, _, seen, (table,), runs, _ = report_of(monkeypatch, "text_interventions", ["FP32", "floor"], losses)
    assert len(runs) == 2 * 2 * 9 and "of the references 0 of 2 diverged" in seen and "runs 4 of 36 diverged" in seen
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())}
    assert cells["rceil"][:2] == 2 * ["+10.000 % [+10.000, +10.000]"] and cells["rceil"][2:] == 2 * ["0.1 to 0.1"]
    assert cells["FP32"][:2] == cells["none"][:2] == ["-", "-"]
    assert cells["no MX on gains"][0] == "+0.000 % [+0.000, +0.000]"
    assert "rceil from 2 steps before +10.000 %" in seen and "no MX on gains" not in seen


def test_words_of_the_reference_have_no_ratio_of_a_run_that_diverged(monkeypatch):
    seen = seen_of(monkeypatch, "reference", ["FP32", "floor"], {"FP32": LOST})
    assert "nan" not in seen and "FP32 diverged: at step 50. MX with floor: no. With the text's teacher its final loss is 1.000" in seen
    seen = seen_of(monkeypatch, "reference", ["FP32", "floor"], {"FP32, the text's teacher": LOST})
    assert "nan" not in seen and "Its final loss is 1.000 of FP32's. Against" in seen


def test_words_of_a_sweep_count_what_jumped_in_one_arm_alone(monkeypatch):
    """Two cases by two seeds: FP32 is lost under seed 1338, MXFP6 under both, E4M3 comes back under 1337."""
    losses = {"FP32, seed 1338": LOST, "MXFP6 E2M3, seed 1337": LOST, "MXFP6 E2M3, seed 1338": LOST,
              "E4M3, E5M2 backward, seed 1337": UP_AND_BACK, "E4M3, E5M2 backward, seed 1338": 2 * np.ones(100)}
    _, _, _, _, seen, (cells, compared), runs, _ = report_of(monkeypatch, "sweep", [], losses)
    alone = "beside FP32 of the same case and seed it jumped alone 2 times, FP32 alone"
    assert seen.startswith("FP32: 2 of 4 diverged. E4M3, E5M2 backward: 0 of 4 diverged, 2 went up and came back; ")
    assert f"came back; {alone} 2 (p = 1, as if" in seen and f"MXFP6 E2M3: 4 of 4 diverged; {alone} 0 (p = 0.5, as if" in seen
    assert "2 seeds are too few" in seen and len(runs) == 12
    assert cells.splitlines()[2] == "| lr 0.001, L=1, d=32 | 1, 1 diverged | 1.5, 1 up and back | 2 diverged |"
    assert "| MXFP6 E2M3 against FP32 | - | - | no seed has both to their end |" in compared


CLAIMS = {  # what the paper says of a case, and the case
    "sweep": {"learning rates are chosen for each depth and width": "lr 0.001, L=1, d=32"},
    "activations": {"GELU": "gelu, LN", "SwiGLU in FP32": "swiglu, LN",
                    "Without layernorm losses are lower, MX is steadier and FP32 less so": "relu, no LN"},
    "optimizers": {"has SGD at 1e-2": "SGD at 1e-2", "cosine schedules": "Adam, cosine", "SGD at 1, and": "SGD at 1 ",
                   "and at 0.1 with momentum, are ours": "SGD at 0.1, momentum"},
    "inits": {"PyTorch's default": "kaiming-uniform", "Xavier's normal": "xavier-normal"},
    "variants": {"attention": "with attention", "KL loss": "KL divergence"},
}


@pytest.mark.parametrize("experiment", CLAIMS)
def test_claims_are_of_the_cases_that_are_compared(monkeypatch, experiment):
    _, _, _, paper, _, (cells, _), *_ = report_of(monkeypatch, experiment, [], {})
    for words, case in CLAIMS[experiment].items():
        assert words in paper and f"| {case}" in cells, (words, case)


def test_a_sign_test_is_a_fair_coin_s():
    sign_test = load_run().sign_test
    assert sign_test(0, 0) == 1 and sign_test(3, 3) == 1
    assert sign_test(1, 7) == sign_test(7, 1) == pytest.approx(2 * (1 + 8) / 2**8)


def test_jumps_of_a_part_are_counted_beside_ours(monkeypatch):
    """Five of ten seeds of an arm that jump where ours don't may be chance, six aren't."""
    for count, cell, said in ((5, "5, 0 (p = 0.062)", "none"), (6, "6, 0 (p = 0.031)", "ours, the teacher in MX 6, ours 0")):
        jumping = dict.fromkeys((f"ours, the teacher in MX, seed {1337 + i}" for i in range(count)), UP_AND_BACK)
        *_, seen, (_, compared), _, _ = report_of(monkeypatch, "authors_swiglu", [], jumping, scale="cpu")
        row = next(line for line in compared.splitlines() if line.startswith("| ours, the teacher in MX against ours |"))
        assert row.endswith(f"| {cell} |")
        assert said in seen.partition("(p below 0.05): ")[2].rstrip(".").replace("; ", ";").split(";")


def arms_of(losses):
    """Arms of runs that have nothing but a final loss by seed; None of one that diverged."""
    alike = lambda loss: SimpleNamespace(final=lambda: np.nan if loss is None else loss)
    return {arm: [alike(loss) for loss in of_seeds] for arm, of_seeds in losses.items()}


def test_arms_are_compared_seed_by_seed():
    """Seeds' losses lie apart by a factor of two, the arms' differences by a per cent: floor's are 2 % larger."""
    fp32 = np.array([1.0, 2.0, 1.5, 1.2, 0.9])
    apart = np.exp(0.01 * np.array([-1, 1, 0, 1, -1]))
    made = arms_of({"FP32": fp32, "floor": 1.02 * fp32 * apart, "rceil": fp32 / apart, "lost": [None] * 5,
                    "some": [None, *(0.9 * fp32 * apart)[1:]], "one": [1.0, *[None] * 4]})
    row = load_run().comparison_row
    half = 2.776445 * 0.01 / np.sqrt(5)  # Student's t of 4 degrees of freedom; the logarithms' scatter is 0.01
    low, high = 100 * np.expm1(np.log(1.02) + np.array([-half, half]))
    seen_from = "1.70"  # 1.682 times the scatter has a chance of 0.8, by the noncentral t distribution
    assert row(made, "floor", "FP32") == ["floor against FP32", f"+2.000 % [{low:+.3f}, {high:+.3f}]", seen_from, "worse"]
    assert row(made, "rceil", "FP32")[3] == "no difference was seen, it is within ±1.25 %"
    assert row(made, "rceil", "floor")[3] == "no difference was seen, it is within ±4.37 %"
    assert row(made, "lost", "FP32") == ["lost against FP32", "-", "-", "no seed has both to their end"]
    _, said, _, words = row(made, "some", "FP32")
    assert said.endswith("] (of 4 seeds with both to their end)") and words == "better"
    _, said, seen_from, words = row(made, "one", "FP32")
    assert said.endswith("% (of 1 seed with both to their end)") and seen_from == "-" and words.startswith("a single difference has no interval")
    made["two"] = arms_of({"two": [*1.1 * fp32[:2], *[None] * 3]})["two"]
    assert row(made, "two", "FP32")[3].startswith("2 seeds are too few (")


# Of options that experiments change, the values at scale `tiny`.
UNCHANGED = {"steps": 30, "learning-rate": 5e-3, "optimizer": "adam", "schedule": "constant", "init": "kaiming-uniform",
             "loss": "mse", "attention": False, "layernorm": True, "arithmetic": "ours"}


def check_seeds(directory, report, **case):
    """The row of floor, from the logs of its two seeds: the last loss of thirty, since a twentieth of them is one."""
    losses = {}
    for path in (directory / "runs").iterdir():
        options = events(path, "config")[0]["options"]
        is_case = all(options[name] == value for name, value in (UNCHANGED | case).items())
        if is_case and path.name.startswith(("fp32--seed", "floor--seed")):
            losses[path.name[:5], options["seed"]] = events(path, "train")[-1]["loss"]
    logs = [np.log(losses["floor", seed] / losses["fp32-", seed]) for seed in (1337, 1338)]
    mean, half = np.mean(logs), 12.706205 * np.std(logs, ddof=1) / np.sqrt(2)
    row = next(line for line in (directory / f"{report}.md").read_text().splitlines() if line.startswith("| floor |"))
    expected = 100 * np.expm1([mean, mean - half, mean + half])
    said = [float(number) for number in re.findall(r"[-+][\d.]+", row.split("|")[6])]
    assert said == pytest.approx(list(expected), abs=6e-4) and row.split("|")[2].strip() == "2"


def runs_of(directory, **options):
    """The directories of the runs with these options and no state to start from."""
    found = []
    for path in (directory / "runs").iterdir():
        given = events(path, "config")[0]["options"]
        if not given["load"] and all(given[name.replace("_", "-")] == value for name, value in options.items()):
            found.append(path)
    return found


def seeds_of(directory, **options):
    """The directories of the runs with these options under both seeds."""
    found = [path for path in runs_of(directory, **options) if "--seed-" in path.name]
    assert len({events(path, "config")[0]["options"]["seed"] for path in found}) == len(found) == 2
    return found


def row_of(report, label):
    line = next(line for line in report.read_text().splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def check_reference(directory):
    """Of the text's teacher: final losses, their ratio, the largest error and lowest cosine, zeta, from the logs."""
    report = directory / "reference.md"
    fp32, mx = (next(path for path in runs_of(directory, teacher="residual", recipe=recipe) if "text-s-teacher" in path.name)
                for recipe in ("fp32", "mxfp8-ocp"))
    last = [steps(path)[-1]["loss"] for path in (fp32, mx)]  # a twentieth of thirty steps is one
    bias = events(mx, "gradient_bias")
    row = row_of(report, "floor, gains in MX, the text's teacher")
    found = [last[1], last[1] / last[0], max(e["error_ratio"] for e in bias), min(e["cosine"] for e in bias)]
    assert [float(cell) for cell in row[3:]] == pytest.approx(found, rel=6e-3) and row[1] == "no"
    assert events(mx, "config")[0]["options"]["label-noise"] == 0
    (plain,) = [path for path in runs_of(directory, recipe="mxfp8-ocp", teacher="plain") if events(path, "twin")
                and events(path, "config")[0]["options"]["activation"] == "gelu"]
    zeta = max(e["error_ratio"] for e in events(plain, "twin"))
    assert f"at other weights, it reached {zeta:.3g} (the paper's line is at 2)" in " ".join(report.read_text().split())


CELLS = {
    "sweep": ("lr 0.01, L=1, d=32", {"learning_rate": 0.01, "layers": 1, "steps": 15}),
    "activations": ("swiglu, no LN", {"activation": "swiglu", "layernorm": False}),
    "optimizers": ("SGD at 0.1, momentum 0.9", {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9}),
    "inits": ("xavier-normal", {"init": "xavier-normal"}),
    "variants": ("KL divergence", {"loss": "kl"}),
}
ARMS = {"FP32": "fp32", "floor": "mxfp8-ocp", "E4M3, E5M2 backward": "mxfp8-e5m2-gradients", "MXFP6 E2M3": "mxfp6-e2m3"}


def check_cells(directory, report):
    """A row's medians of final losses, of every arm, from the logs: the last loss, since a twentieth of the steps is one at
    most; the median of two seeds is their mean."""
    label, options = CELLS[report]
    arms = row_of(directory / f"{report}.md", "median of final losses")[1:]
    cells = row_of(directory / f"{report}.md", label)[1:]
    assert len(arms) == len(cells) == (3 if report == "sweep" else 2)
    found = {}
    for arm, cell in zip(arms, cells):
        found[arm] = np.mean([steps(run)[-1]["loss"] for run in seeds_of(directory, recipe=ARMS[arm], **options)])
        assert cell == f"{found[arm]:.3g}", (report, arm, cell)
    assert len(set(found.values())) == len(found)  # or a cell could be of another arm


def check_directions(directory):
    """What is called worse or better in a report has a ratio of losses that says the same, and is in its sentence."""
    report = directory / "authors.md"
    said = " ".join(report.read_text().split("\n| ")[0].split())
    for pair in "ours, layernorm in BF16 against ours", "ours, the teacher in MX against ours", "the authors' against FP32":
        _, by, _, words, _ = row_of(report, pair)
        assert "is within ±" in words or (words in ("worse", "better") and (float(by.split()[0]) > 0) == (words == "worse"))
        assert (f"{pair} {by}" in said) == (words in ("worse", "better"))


def test_experiments_in_miniature(tmp_path):
    """Every experiment of run.py ends in a table and a picture; a second call runs nothing again."""
    command = [sys.executable, ROOT / "dev/proxy/run.py", "all", "--scale", "tiny", "--out-dir", tmp_path, "--proxy", PROXY]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600 * SLOWNESS)
    assert done.returncode == 0, done.stderr
    names = ("reference", "interventions", "text_interventions", "seeds", "text", "swiglu", "authors", "authors_swiglu",
             "sweep", "activations", "optimizers", "inits", "variants")
    for name in names:
        assert (tmp_path / f"{name}.png").is_file()
        report = (tmp_path / f"{name}.md").read_text()
        assert "| --- |" in report and "**The paper**" in report
    check_seeds(tmp_path, "seeds", teacher="plain", activation="gelu")
    check_seeds(tmp_path, "text", teacher="residual", activation="gelu")
    check_seeds(tmp_path, "swiglu", teacher="plain", activation="swiglu")
    for report in CELLS:
        check_cells(tmp_path, report)
    check_reference(tmp_path)
    check_directions(tmp_path)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("log.jsonl")}
    assert len(times) > 20
    again = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600 * SLOWNESS)
    assert again.returncode == 0, again.stderr
    assert times == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("log.jsonl")}
    bad = subprocess.run([*command[:2], "reference", "--scale", "tiny", "--out-dir", tmp_path, "--proxy", tmp_path / "no"],
                         cwd=ROOT, text=True, capture_output=True)
    assert bad.returncode == 2 and len(bad.stderr.splitlines()) == 1
