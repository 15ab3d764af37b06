"""What the tests of the whole program share: token files, the program run as a user runs it, its log and checkpoints."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
TRAINER = str(Path(os.environ.get("TRAINER", ROOT / "train_gpt_mxfp8")).resolve())
SLOWNESS = float(os.environ.get("TEST_SLOWNESS", 1))  # of the program, built with a sanitizer
# The machine may be shared: waiting threads must not spin.
ENVIRONMENT = dict(os.environ, OMP_WAIT_POLICY="passive", LC_ALL="C.UTF-8")

# A shell's background job ignores Ctrl-C, and so would the programs that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

VOCAB = 65
END_OF_TEXT = 64
LAYERS, HEADS, CHANNELS, T, B = 2, 2, 64, 32, 4
MODEL = ["--vocab-size", VOCAB, "--layers", LAYERS, "--heads", HEADS, "--channels", CHANNELS, "--max-seq-len", T,
         "--batch-size", B, "--threads", 1]


def markov_tokens(count, seed=0):
    """Draws pseudo-text: a Markov chain over the vocabulary without end-of-text, each token
    followed by one of a few."""
    rng = np.random.default_rng(seed)
    chain = np.random.default_rng(99).dirichlet(np.full(END_OF_TEXT, 0.03), size=END_OF_TEXT).cumsum(axis=1)
    tokens = np.zeros(count, np.uint16)
    for i, u in enumerate(rng.random(count - 1), start=1):
        tokens[i] = min(int(np.searchsorted(chain[tokens[i - 1]], u)), END_OF_TEXT - 1)
    return tokens


def write_tokens(path, tokens, magic=20240520, version=1, count=None):
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    Path(path).write_bytes(header.tobytes() + np.asarray(tokens, np.uint16).tobytes())


def write_tokenizer(path):
    """Writes llm.c's tokenizer.bin, version 2: a line end, the 63 characters from the space on,
    end-of-text."""
    header = np.zeros(256, np.uint32)
    header[:4] = 20240328, 2, VOCAB, END_OF_TEXT
    texts = [b"\n"] + [bytes([32 + i]) for i in range(63)] + [b"<|endoftext|>"]
    Path(path).write_bytes(header.tobytes() + b"".join(bytes([len(text)]) + text for text in texts))


def gpt2_like_merges(count):
    """Returns a vocab.bpe of `count` merges of two bytes, in GPT-2's spelling of bytes."""
    alphabet = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x100))]
    alphabet += [chr(0x100 + i) for i in range(68)]
    pairs = (f"{a} {b}" for a in alphabet for b in alphabet)
    return "#version: 0.2\n" + "".join(f"{pair}\n" for pair, _ in zip(pairs, range(count), strict=False))


def make_data(directory):
    """Writes 625 windows of 32 tokens to train on, some more to validate on, and a tokenizer.
    Returns the options that name them."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokens(directory / "train_000000.bin", markov_tokens(12000, 1))
    write_tokens(directory / "train_000001.bin", markov_tokens(8001, 2))
    write_tokens(directory / "val_000000.bin", markov_tokens(3000, 3))
    write_tokenizer(directory / "tokenizer.bin")
    return ["--train-data", f"{directory}/train_*.bin", "--val-data", f"{directory}/val_*.bin"]


def words(arguments):
    return [TRAINER] + [str(argument) for argument in arguments]


def run(*arguments, before=None, timeout=120, environment=None):
    """Runs the program to its end; returns exit code, stdout, stderr. `before` runs in the child,
    to set limits."""
    return subprocess.run(words(arguments), cwd=ROOT, env=ENVIRONMENT | (environment or {}), text=True, errors="replace",
                          timeout=timeout * SLOWNESS, stdin=subprocess.DEVNULL, capture_output=True, preexec_fn=before)


def run_well(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    assert done.stderr == "", done.stderr
    return done


def start(*arguments, environment=None):
    """Starts the program, with a line for every step."""
    lines = [] if "--generate" in arguments else ["--log-every", 1]
    return subprocess.Popen(words([*arguments, *lines]), cwd=ROOT, env=ENVIRONMENT | (environment or {}), text=True, errors="replace",
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def signal_at_step(step, signals, *arguments):
    """Sends the signals in a row when the step's line comes. Returns exit code, all of stdout, stderr."""
    process = start(*arguments)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step ") and line.split("/")[0].removeprefix("step").strip() == str(step):
            for number in signals:
                process.send_signal(number)
            break
    rest, errors = process.communicate(timeout=60)
    return process.returncode, "".join(lines) + rest, errors


def one_sentence(errors):
    lines = errors.splitlines()
    assert len(lines) == 1 and lines[0].startswith("train_gpt_mxfp8: ") and len(lines[0]) > 40, errors
    return lines[0]


def dry_run(*options):
    """What --dry-run prints; what doesn't fit has a sentence besides."""
    done = run("--dry-run", *options)
    fits = "it fits" in done.stdout
    assert done.returncode == (0 if fits else 2), done
    assert done.stderr == "" if fits else "it doesn't fit, " in one_sentence(done.stderr), done
    return done.stdout


def check_loadable(directory):
    """Checks that a checkpoint is whole, of the step that it is named after, and all finite."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert all(np.isfinite(tensor).all() for tensor in load_file(directory / name).values())
    assert json.loads((directory / "trainer_state.json").read_text())["step"] == int(directory.name[5:])


def no_json(literal):
    raise ValueError(f"{literal} is no JSON")  # Python's reader takes NaN and Infinity


def events(out_dir, kind=None):
    """Returns the log's objects; every line must be one, with an event."""
    text = (Path(out_dir) / "log.jsonl").read_text()
    assert text.endswith("\n")
    found = [json.loads(line, parse_constant=no_json) for line in text.splitlines()]
    assert all(isinstance(event, dict) and "event" in event for event in found)
    return [event for event in found if kind in (None, event["event"])]


NOT_REPRODUCIBLE = {"seconds", "tokens_per_second"}


def steps(out_dir):
    """Returns the train events without what a clock measured."""
    return [{key: value for key, value in event.items() if key not in NOT_REPRODUCIBLE}
            for event in events(out_dir, "train")]


def validations(out_dir):
    return [(event["step"], event["loss"]) for event in events(out_dir, "val")]


def losses(out_dir):
    return np.array([event["loss"] for event in events(out_dir, "train")], np.float64)


def latest(out_dir):
    return Path(out_dir) / (Path(out_dir) / "latest").read_text().strip()


def weights_and_moments(directory):
    return [(Path(directory) / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def assert_same_run(resumed, straight):
    """Asserts that every step is there once, that losses and gradient norms are the same to the
    bit, and the final files byte for byte."""
    assert [event["step"] for event in steps(resumed)] == list(range(len(steps(straight))))
    assert steps(resumed) == steps(straight)
    assert validations(resumed) == validations(straight)
    for kind in ("spike", "recovered"):
        assert events(resumed, kind) == events(straight, kind)
    assert latest(resumed).name == latest(straight).name
    assert weights_and_moments(latest(resumed)) == weights_and_moments(latest(straight))


def snapshot(directory):
    """Returns everything under the directory: paths, and what is in the files."""
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
            for path in sorted(Path(directory).rglob("*"))}


def mount_small(directory, kilobytes):
    """Mounts a file system of that size at `directory`; returns False where that isn't permitted.
    unmount() takes it away."""
    directory.mkdir()
    if shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(directory)]
    return subprocess.run(command, capture_output=True).returncode == 0


def unmount(directory):
    subprocess.run(["umount", str(directory)], check=True)


KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
