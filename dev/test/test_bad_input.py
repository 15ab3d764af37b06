"""Bad input: each has exit code 2, one sentence on stderr that names the thing and the remedy, and leaves every file as it
was."""

import fcntl
import json
import os
import resource
import shutil
import struct
import subprocess

import numpy as np
import pytest

from trainer import ENVIRONMENT, MODEL, B, T, latest, make_data, markov_tokens, one_sentence, run, run_well, snapshot, words, write_tokens


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """data/ and run/, a run of four steps with checkpoints at 2 and 4."""
    base = tmp_path_factory.mktemp("original")
    run_well(*make_data(base / "data"), *MODEL, "--total-batch-size", 2 * B * T, "--max-steps", 4, "--checkpoint-every", 2,
             "--out-dir", base / "run")
    return base


@pytest.fixture
def base(original, tmp_path):
    """A copy to spoil. The run's options name the original's data."""
    return shutil.copytree(original, tmp_path / "base")


def refused(base, arguments, *parts, before=None, code=2):
    """Runs with {base} and {step} (the latest checkpoint) filled in, checks what every refusal has in common, and that its
    sentence has the parts."""
    words = [os.fsdecode(word) if isinstance(word, bytes) else str(word) for word in arguments]
    words = [word.replace("{base}", str(base)).replace("{step}", str(base / "run" / "step_000004")) for word in words]
    files = snapshot(base)
    done = run(*words, before=before, timeout=60)
    assert done.returncode == code, (done.returncode, done.stderr, done.stdout[-500:])
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].isprintable(), repr(lines[0])
    print(lines[0])
    assert lines[0].startswith("train_gpt_mxfp8: ") and "internal error" not in lines[0]
    for part in parts:
        assert part.replace("{base}", str(base)) in lines[0]
    after = snapshot(base)
    assert files.keys() == after.keys(), files.keys() ^ after.keys()
    assert files == after, [name for name in files if files[name] != after[name]]


DATA = ["--train-data", "{base}/data/train_*.bin", "--val-data", "{base}/data/val_*.bin"]
NEW = [*DATA, *MODEL, "--max-steps", 2, "--out-dir", "{base}/new"]

# name: options after NEW, parts of the sentence
OPTIONS = {
    "unknown option": (["--recpie", "bf16"], ["--recpie", "did you mean --recipe?"]),
    "single dash": (["-recipe", "bf16"], ["-recipe", "--recipe"]),
    "unknown option with value": (["--learning-rte=3"], ["--learning-rte", "--learning-rate"]),
    "gains that aren't there": (["--quantize-ln-affine", "--no-ln-affine"], ["--quantize-ln-affine changes nothing", "--ln-affine"]),
    "nothing near": (["--xyzzy"], ["--xyzzy", "--help"]),
    "positional": (["data.bin"], ["data.bin", "quotes"]),
    "no value": (["--warmup-steps"], ["--warmup-steps", "needs a value"]),
    "option as value": (["--warmup-steps", "--dry-run"], ["--warmup-steps", "--dry-run"]),
    "flag with value": (["--dry-run=maybe"], ["--dry-run", "maybe"]),
    "recipe": (["--recipe", "mxfp9"], ["mxfp9", "mxfp8"]),
    "model": (["--model", "gpt2-125M"], ["gpt2-125M", "gpt2-124M"]),
    "init and init-from": (["--init", "mitchell", "--init-from", "{step}"], ["--init and --init-from"]),
    "warm-up from above": (["--warmup-steps", "4", "--warmup-from", "1"], ["--warmup-from 1", "--learning-rate"]),
    "warm-up from without one": (["--warmup-from", "1e-5"], ["--warmup-from", "--warmup-steps"]),
    "a decay of another schedule": (["--decay-fraction", "0.3"], ["--decay-fraction", "--schedule wsd"]),
    "the end of a schedule that has none": (["--schedule", "constant", "--final-lr-fraction", "0.5"],
                                           ["--final-lr-fraction changes nothing", "--schedule cosine, linear or wsd"]),
    "a file for ranks on GPUs": (["--device", "cpu", "--comm-file", "{base}/ranks"], ["--comm-file changes nothing", "--device cuda"]),
    "schedule": (["--schedule", "cosin"], ["cosin", "cosine"]),
    "scale rounding": (["--scale-rounding", "flor"], ["flor", "floor"]),
    "scale rounding of a role": (["--scale-rounding-gradients", "up"], ["--scale-rounding-gradients", "up", "rceil"]),
    "format": (["--format-weights", "e4m4"], ["e4m4", "e4m3"]),
    "operand": (["--operand", "wgrad-z=bf16"], ["wgrad-z", "wgrad-x"]),
    "operand's format": (["--operand", "wgrad-x=bf17"], ["bf17", "bf16"]),
    "operand without format": (["--operand", "wgrad-x"], ["wgrad-x", "OPERAND=FORMAT"]),
    "two rules in one": (["--operand-in", "h.0.*:wgrad-x=bf16 h.0.*:dgrad-dy=bf16"], ["--operand-in takes one", "may be repeated"]),
    "a rule and more": (["--operand-in", "h.0.*:wgrad-x=bf16 "], ["--operand-in takes one"]),
    "a later recipe's rule and more": (["--recipe-at", "1:mxfp8,operand-in=h.0.*:wgrad-x=bf16 junk"], ["--operand-in takes one"]),
    "device": (["--device", "gpu"], ["gpu", "cuda"]),
    "native on a CPU": (["--mx-gemm", "native", "--device", "cpu"], ["--mx-gemm native", "--device cpu", "--mx-gemm auto"]),
    "native without a GPU": (["--mx-gemm", "native"], ["--mx-gemm native", "--mx-gemm auto"]),
    "native on a card that can't": (["--mx-gemm", "native", "--device", "h100", "--dry-run"],
                                    ["--mx-gemm native", "h.0.qkv", "below 10.0", "--mx-gemm auto"]),
    "no CUDA": (["--device", "cuda"], ["--device cuda", "--device cpu"]),
    "words for a number": (["--max-steps", "ten"], ["--max-steps", "ten", "500"]),
    "fraction": (["--max-steps", "1.5"], ["--max-steps", "1.5", "whole number"]),
    "negative": (["--max-steps", "-1"], ["--max-steps", "-1"]),
    "over 64 bits": (["--max-steps", "99999999999999999999"], ["--max-steps", "99999999999999999999"]),
    "over the most": (["--batch-size", "2G"], ["--batch-size", "2G", "1048576"]),
    "zero": (["--batch-size", "0"], ["--batch-size", "from 1"]),
    "nan": (["--learning-rate", "nan"], ["--learning-rate", "nan"]),
    "inf": (["--learning-rate", "inf"], ["--learning-rate", "inf"]),
    "overflow": (["--learning-rate", "1e400"], ["--learning-rate", "1e400"]),
    "trailing letters": (["--learning-rate", "3e-4x"], ["--learning-rate", "3e-4x"]),
    "empty number": (["--weight-decay="], ["--weight-decay"]),
    "beta of one": (["--beta1", "1"], ["--beta1"]),
    "heads": (["--heads", "3"], ["--channels 64", "--heads 3", "divide"]),
    "sequence over positions": (["--seq-len", "33"], ["--seq-len 33", "32", "--max-seq-len"]),
    "sequence over data": (["--seq-len", "30000", "--max-seq-len", "30000"], ["20001 tokens", "30001", "--seq-len"]),
    "total batch size": (["--total-batch-size", "300"], ["--total-batch-size 300", "128", "take 256"]),
    "small total batch size": (["--total-batch-size", "100"], ["--total-batch-size 100", "take 128"]),
    "vocabulary under the tokenizer's": (["--vocab-size", "60"], ["65", "60", "--vocab-size"]),
    "text that isn't UTF-8": (["--run-name", b"caf\xe9"], ["--run-name isn't UTF-8", "resumed"]),
    "texts that aren't UTF-8": (["--tags", "caf\xe9", "--operand-in", b"\xff:*=bf16"], ["--operand-in isn't UTF-8"]),
    "resume and init-from": (["--resume", "--init-from", "{step}"], ["--resume", "--init-from"]),
    "no tokenizer for samples": (["--train-data", "{base}/alone/train.bin", "--sample-every", "1"],
                                 ["--sample-every", "--tokenizer"]),
    "prompt without tokens": (["--sample-every", "1", "--prompt", "été"], ["--prompt", "no token for a character"]),
    "a prompt for nothing": (["--prompt", "A"], ["--prompt", "--sample-every"]),
    "missing tokenizer": (["--tokenizer", "{base}/none.bin"], ["{base}/none.bin", "No such file"]),
    "muon's option without muon": (["--muon-momentum", "0.9"], ["--muon-momentum", "--optimizer muon"]),
    "documents without a tokenizer": (["--train-data", "{base}/alone/train.bin", "--mask-documents"],
                                      ["--mask-documents", "end-of-text", "--tokenizer"]),
    "foreign tokenizer": (["--tokenizer", "{base}/data/val_000000.bin"], ["val_000000.bin", "data/prepare.py"]),
    # a prime, which nothing else divides
    "too little memory": (["--batch-size", "1000003", "--layers", "200"], ["memory", "--batch-size 1 would fit"]),
    "far too little memory": (["--channels", "65536", "--layers", "1000"], ["memory", "smaller model"]),
    "init-from nothing": (["--init-from", "{base}/none"], ["{base}/none", "no such directory"]),
    "init-from another model": (["--init-from", "{step}", "--layers", "3"], ["--layers 3", "2", "leave the option out"]),
    "a directory that has a run": (["--out-dir", "{base}/run"], ["{base}/run", "--resume", "another --out-dir"]),
    "a file in the directory's place": (["--out-dir", "{base}/data/tokenizer.bin"], ["tokenizer.bin", "choose another"]),
    "a file on the way": (["--out-dir", "{base}/data/tokenizer.bin/x/y"], ["tokenizer.bin", "choose another"]),
    "unwritable directory": (["--out-dir", "/proc/x/y"], ["/proc/x", "choose another"]),
    "unwritable log": (["--out-dir", "/proc/self/task"], ["/proc/self/task/log.jsonl"]),
}


@pytest.mark.parametrize("arguments, parts", OPTIONS.values(), ids=[name.replace(" ", "-") for name in OPTIONS])
def test_options(base, arguments, parts):
    (base / "alone").mkdir()
    write_tokens(base / "alone" / "train.bin", markov_tokens(1000))
    refused(base, [*NEW, *arguments], *parts)


ALONE = {
    "validations of nothing": (["--train-data", "{base}/data/train_*.bin", "--max-steps", 1, "--val-every", 5],
                               ["--val-every", "--val-data"]),
    "no training data": (["--max-steps", 1], ["--train-data"]),
    "resume without a directory": (["--resume"], ["--resume", "--out-dir"]),
    "resume of nothing": (["--resume", "--out-dir", "{base}/new"], ["{base}/new", "--resume"]),
    "resume of a directory without a run": (["--resume", "--out-dir", "{base}/data"], ["{base}/data", "latest"]),
    "resume of a checkpoint": (["--resume", "--out-dir", "{step}"], ["is a checkpoint: give --out-dir the run's directory"]),
    "resume with another model": (["--resume", "--out-dir", "{base}/run", "--channels", 128], ["--channels 128", "64"]),
    "resume with other data": (["--resume", "--out-dir", "{base}/run", "--train-data", "{base}/data/val_*.bin"],
                               ["3000", "20001", "--init-from"]),
    "more BF16 blocks than blocks": (["--dry-run", "--layers", 2, "--bf16-first-layers", 2, "--bf16-last-layers", 1],
                                     ["--bf16-first-layers 2", "2 blocks"]),
    "a filter of no linear layer": (["--dry-run", "--layers", 2, "--operand-in", "h.2.*:wgrad-x=bf16"], ["h.2.*", "h.1.down"]),
    "resume with another optimizer": (["--resume", "--out-dir", "{base}/run", "--optimizer", "muon"],
                                      ["moments of adamw", "muon", "--optimizer", "--init-from"]),
    "resume with another seed": (["--resume", "--out-dir", "{base}/run", "--seed", "99"], ["--seed", "99", "--init-from"]),
    "resume with another seq-len": (["--resume", "--out-dir", "{base}/run", "--seq-len", "16"], ["--seq-len", "16"]),
    "generate from nothing": (["--generate", "{base}/none"], ["{base}/none"]),
    "generate and resume": (["--generate", "{base}/run", "--resume", "--out-dir", "{base}/run"], ["--generate", "no --resume"]),
    "generate from two": (["--generate", "{base}/run", "--init-from", "{base}/run"], ["--generate", "no --init-from"]),
    "generate without": (["--generate", "{base}/run", "--dry-run"], ["--generate", "no --dry-run"]),
    "generate and train": (["--generate", "{base}/run", "--learning-rate", 1], ["--generate trains nothing and takes no --learning-rate"]),
    "generate for steps": (["--generate", "{base}/run", "--max-steps", 1], ["takes no --max-steps"]),
    "generate into": (["--generate", "{base}/run", "--out-dir", "{base}/new"], ["takes no --out-dir"]),
    "generate from data": (["--generate", "{base}/data"], ["{base}/data is neither a checkpoint nor a run"]),
    "resume of a batch that ranks can't make": (["--resume", "--out-dir", "{base}/run", "--batch-size", 3],
                                                ["--total-batch-size 256 isn't a multiple", "take 192"]),
    "weights of another preset": ([*DATA, "--init-from", "{step}", "--model", "gpt2-355M", "--max-steps", 1],
                                  ["--model gpt2-355M was given", "2 layers, 2 heads and 64 channels"]),
    "resume of another preset": (["--resume", "--out-dir", "{base}/run", "--model", "nemotron-2B"],
                                 ["--model nemotron-2B was given", "2 layers, 2 heads and 64 channels"]),
    "a preset's warm-up of minutes": ([*DATA, *MODEL, "--model", "olmo-n6", "--max-minutes", 1, "--out-dir", "{base}/new"],
                                      ["0.2 of the run's steps", "--max-minutes", "--warmup-steps"]),
    "a fraction of minutes": ([*DATA, *MODEL, "--max-minutes", 1, "--warmup-fraction", 0.1, "--out-dir", "{base}/new"],
                              ["--warmup-fraction", "--max-steps", "--warmup-steps"]),
    "dry run of no model": (["--dry-run", "--heads", 5], ["--heads 5", "768"]),
}


@pytest.mark.parametrize("arguments, parts", ALONE.values(), ids=[name.replace(" ", "-") for name in ALONE])
def test_commands(base, arguments, parts):
    refused(base, arguments, *parts)


def test_without_arguments_the_missing_option_is_named():
    done = run()
    assert done.returncode == 2 and done.stdout == ""
    assert "--train-data is missing" in one_sentence(done.stderr)


@pytest.mark.skipif(os.environ.get("SANITIZER") == "address", reason="AddressSanitizer takes terabytes of address space")
@pytest.mark.parametrize("megabytes", [180, 240, 320])
def test_an_address_space_limit(base, megabytes):
    limit = megabytes << 20
    refused(base, [*NEW, "--batch-size", 16384], "memory", "--batch-size",
            before=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))


def test_a_log_that_another_run_writes(base):
    with open(base / "run" / "log.jsonl", "r+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        refused(base, ["--resume", "--max-steps", 9, "--out-dir", "{base}/run"], "another run", "another --out-dir")


# ---------------------------------------------------------------------------------------------------------------------
# Token files

def whole(count=1000):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, count
    return header.tobytes() + np.full(count, 7, np.uint16).tobytes()


TOKEN_FILES = {
    "nothing matches": (None, ["{base}/bad/*.bin", "no file matches"]),
    "empty": (b"", ["bad.bin", "not a token file"]),
    "only a header's half": (whole()[:512], ["bad.bin", "not a token file"]),
    "truncated": (whole()[:-2], ["bad.bin", "truncated", "again"]),
    "longer than it says": (whole() + b"xx", ["bad.bin", "too long"]),
    "no tokens": (whole(0), ["bad/*.bin", "0 tokens", "--seq-len"]),
    "too few tokens": (whole(T), ["bad/*.bin", "32 tokens", "--seq-len"]),
    "text": (b"It was the best of times. " * 100, ["bad.bin", "not a token file", "data/prepare.py"]),
    "another version": (whole()[:4] + b"\2" + whole()[5:], ["bad.bin", "not a token file"]),
    "claims terabytes": (struct.pack("<3I", 20240520, 1, 0xFFFFFFFF) + whole()[12:], ["bad.bin", "4294967295", "truncated"]),
    "token over the vocabulary": (whole()[:-2] + struct.pack("<H", 65), ["bad.bin", "id 65", "--vocab-size 66"]),
}


@pytest.mark.parametrize("option", ["--train-data", "--val-data"])
@pytest.mark.parametrize("content, parts", TOKEN_FILES.values(), ids=[name.replace(" ", "-") for name in TOKEN_FILES])
def test_token_files(base, content, parts, option):
    (base / "bad").mkdir()
    if content is not None:
        (base / "bad" / "bad.bin").write_bytes(content)
    refused(base, [*NEW, option, "{base}/bad/*.bin"], *parts)


def test_token_files_of_two_widths(base):
    wide = struct.pack("<3I", 20240801, 7, 1000) + bytes(1012 + 4000)
    (base / "data" / "train_000002.bin").write_bytes(wide)
    refused(base, NEW, "train_000002.bin", "one data set")


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints

def safetensors(header, data=b"", length=None):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def spoil(content):
    """The weights as they are, but for one value."""
    length, = struct.unpack_from("<Q", content)
    return content[:8 + length] + struct.pack("<f", float("nan")) + content[8 + length + 4:]


SAFETENSORS = {
    "empty": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "cut in its header": lambda content: content[:100],
    "cut in its data": lambda content: content[:-1000],
    "longer": lambda content: content + b"x",
    "header of exabytes": lambda content: struct.pack("<Q", 1 << 62) + content[8:],
    "header of all ones": lambda content: b"\xff" * 8 + content[8:],
    "header over the file": lambda content: struct.pack("<Q", len(content)) + content[8:],
    "no JSON": lambda content: safetensors(b"{" * 1000),
    "JSON of another kind": lambda content: safetensors(b"[1, 2]"),
    "text": lambda content: b"It was the best of times. " * 100,
    "no tensors": lambda content: safetensors({}),
    "shape that overflows": lambda content: safetensors(
        {"transformer.wte.weight": {"dtype": "F32", "shape": [1 << 33, 1 << 33], "data_offsets": [0, 16]}}, bytes(16)),
    "offsets outside": lambda content: safetensors(
        {"transformer.wte.weight": {"dtype": "F32", "shape": [4], "data_offsets": [1 << 50, (1 << 50) + 16]}}, bytes(16)),
    "unknown dtype": lambda content: content.replace(b'"F32"', b'"F31"', 1),
    "another dtype": lambda content: content.replace(b'"F32"', b'"I32"'),
    "another name": lambda content: content.replace(b"transformer.wpe.weight", b"transformer.wpx.weight"),
    "another shape": lambda content: content.replace(b"[65,64]", b"[64,65]"),
    "a value that isn't finite": spoil,
}


@pytest.mark.parametrize("way", ["init-from", "resume", "generate"])
@pytest.mark.parametrize("change", SAFETENSORS.values(), ids=[name.replace(" ", "-") for name in SAFETENSORS])
def test_corrupt_weights(base, change, way):
    path = latest(base / "run") / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(change(content))
    assert path.read_bytes() != content
    ways = {"init-from": [*NEW, "--init-from", "{step}"], "resume": ["--resume", "--max-steps", 9, "--out-dir", "{base}/run"],
            "generate": ["--generate", "{step}"]}
    refused(base, ways[way], "step_000004/model.safetensors")


@pytest.mark.parametrize("change", [lambda content: content[:5000], spoil, None], ids=["cut", "not finite", "missing"])
def test_corrupt_moments(base, change):
    path = latest(base / "run") / "optimizer.safetensors"
    content = path.read_bytes()
    path.unlink() if change is None else path.write_bytes(change(content))
    refused(base, ["--resume", "--max-steps", 9, "--out-dir", "{base}/run"], "optimizer.safetensors")


def changed(**members):
    return lambda text: json.dumps(json.loads(text) | members)


STATES = {
    "empty": lambda text: "",
    "cut": lambda text: text[:len(text) // 2],
    "null": lambda text: "null",
    "array": lambda text: "[]",
    "object without members": lambda text: "{}",
    "deep": lambda text: "[" * 100000,
    "0 byte": lambda text: text[:50] + "\0" + text[50:],
    "another version": changed(version=99),
    "negative step": changed(step=-1),
    "negative log position": changed(log_position=-5),
    "step as text": changed(step="4"),
    "fraction of a step": changed(step=1.5),
    "huge sample": changed(next_sample=1e300),
    "a step of more samples than were taken": changed(samples_per_step=10**15),
    "huge time": changed(seconds=1e308),
    "more tokens than 64 bits count": changed(next_sample=2**53 - 1, seq_len=2**10),
    "sequences without tokens": changed(seq_len=0),
    "more steps than samples": changed(step=2**52),
    "more steps skipped than taken": changed(skipped=5),
    "more bad steps in a row than skipped": changed(skipped=1, nonfinite_in_a_row=2),
    "window too long": changed(losses={"count": 1000, "position": 0, "values": [1.0] * 1000}),
    "window shorter than it says": changed(losses={"count": 5, "position": 5, "values": [1.0]}),
    "window with a gap": changed(losses={"count": 1, "position": 7, "values": [1.0]}),
    "negative count of bad steps": changed(nonfinite_in_a_row=-(2**52)),
    "negative seconds": changed(seconds=-1),
    "window of text": changed(grad_norms={"count": 1, "position": 1, "values": ["x"]}),
    "unknown recipe": changed(options={"recipe": ["mxfp9"]}),
    "option of another type": changed(options={"recipe": [8]}),
    "option out of range": changed(options={"batch-size": ["0"]}),
    "option that is no number any more": lambda text: text.replace('"learning-rate": 0.0006', '"learning-rate": 1e999'),
    "option without a value": changed(options={"batch-size": []}),
    "a member twice": lambda text: text.replace('"step": 4', '"step": 4, "step": 2'),
    "option with two values": changed(options={"prompt": ["a", "b"]}),
    "option that commands a terminal": changed(options={"recipe": ["\x1b[2J\x9b2J\r"]}),
}


@pytest.mark.parametrize("change", STATES.values(), ids=[name.replace(" ", "-") for name in STATES])
def test_corrupt_trainer_state(base, change):
    path = latest(base / "run") / "trainer_state.json"
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text
    refused(base, ["--resume", "--max-steps", 9, "--out-dir", "{base}/run"], "trainer_state.json")


def test_generate_with_a_corrupt_trainer_state(base):
    (latest(base / "run") / "trainer_state.json").write_text('{"version": 99}')
    refused(base, ["--generate", "{step}"], "trainer_state.json")


def test_data_of_another_tokenizer(base):
    path = base / "data" / "tokenizer.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    refused(base, [*NEW, "--init-from", "{step}"], "tokenizer", "step_000004", "prepare the data")


def test_validation_data_of_another_tokenizer(base):
    other = shutil.copytree(base / "data", base / "other")
    (other / "tokenizer.bin").write_bytes((other / "tokenizer.bin").read_bytes()[:-1] + b"?")
    refused(base, [*NEW, "--val-data", "{base}/other/val_*.bin"], "tokenizer", "{base}/other/val_*.bin",
            "prepare these with the former's")


def test_a_new_run_within_a_checkpoint(base):
    refused(base, [*NEW, "--out-dir", "{step}"], "step_000004", "holds a checkpoint's model.safetensors: choose another --out-dir")
    assert not (latest(base / "run") / "log.jsonl").exists()


def test_a_new_run_beside_checkpoints_without_their_log(base):
    again = [*NEW, "--keep-checkpoints", 1, "--out-dir", "{base}/run"]
    (base / "run" / "log.jsonl").unlink()
    refused(base, again, "{base}/run", "holds checkpoints whose log.jsonl is gone", "--resume")
    (base / "run" / "log.jsonl").touch()  # as a resume that is refused leaves it
    assert run(*[str(word).replace("{base}", str(base)) for word in again]).returncode == 2
    (base / "run" / "latest").write_text("step_000031\n")
    refused(base, ["--generate", "{base}/run"], "{base}/run/latest doesn't name a checkpoint that is there")
    (base / "run" / "latest").unlink()
    refused(base, ["--resume", "--out-dir", "{base}/run"], "no file 'latest'", "write the name of the newest directory step_NNNNNN")


@pytest.mark.parametrize("arguments", [["--generate", "{base}/run", "--sample-tokens", 5], ["--help"], ["--version"],
                                       ["--device-info"], ["--dry-run"]], ids=lambda arguments: arguments[0])
def test_output_that_cannot_be_written(base, arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(words([str(word).replace("{base}", str(base)) for word in arguments]), stdout=full,
                              stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and "can't be written" in one_sentence(done.stderr)


CONFIGS = {
    "empty": lambda text: "",
    "cut": lambda text: text[:40],
    "object without members": lambda text: "{}",
    "another architecture": changed(model_type="llama"),
    "another activation": changed(activation_function="tanh"),
    "another epsilon": changed(layer_norm_epsilon=1e-6),
    "an untied head": changed(tie_word_embeddings=False),
    "another width": changed(n_inner=100),
    "scores not scaled": changed(scale_attn_weights=False),
    "cross-attention": changed(add_cross_attention=True),
    "scores scaled by layer": changed(scale_attn_by_inverse_layer_idx=True),
    "heads that don't divide": changed(n_head=3),
    "no layers": changed(n_layer=0),
    "negative": changed(n_embd=-64),
    "a billion layers": changed(n_layer=10**9),
    "text for a number": changed(n_embd="64"),
    "another model": changed(n_layer=3),
}


@pytest.mark.parametrize("way", ["init-from", "resume", "generate"])
@pytest.mark.parametrize("change", CONFIGS.values(), ids=[name.replace(" ", "-") for name in CONFIGS])
def test_corrupt_config(base, change, way):
    path = latest(base / "run") / "config.json"
    path.write_text(change(path.read_text()))
    ways = {"init-from": [*NEW, "--init-from", "{step}"], "resume": ["--resume", "--max-steps", 9, "--out-dir", "{base}/run"],
            "generate": ["--generate", "{step}"]}
    refused(base, ways[way], "step_000004")


LATEST = {
    "empty": "",
    "another word": "newest\n",
    "a step without number": "step_\n",
    "a path": "../../etc\n",
    "a step and more": "step_000004/../step_000002\n",
    "a step that isn't there": "step_000099\n",
    "long": "step_" + "1" * 1000,
}


@pytest.mark.parametrize("text", LATEST.values(), ids=[name.replace(" ", "-") for name in LATEST])
def test_corrupt_latest(base, text):
    (base / "run" / "latest").write_text(text)
    refused(base, ["--resume", "--max-steps", 9, "--out-dir", "{base}/run"], "{base}/run")


def test_missing_tokenizer_in_a_checkpoint(base):
    (latest(base / "run") / "tokenizer.bin").unlink()
    refused(base, ["--generate", "{step}"], "{base}/run/step_000004", "--tokenizer")


def test_a_resume_that_was_refused_can_be_put_right(base):
    """--resume with corrupt weights must not have cut the log."""
    path = latest(base / "run") / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:1000])
    refused(base, ["--resume", "--max-steps", 9, "--out-dir", "{base}/run"], "model.safetensors")
    path.write_bytes(content)
    run_well("--resume", "--max-steps", 9, "--out-dir", base / "run")
    assert latest(base / "run").name == "step_000009"
