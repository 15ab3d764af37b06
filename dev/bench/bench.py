"""`make bench`: the program and its operations on a CPU next to their limits and their peers, as one table and as JSON.
(On a GPU: dev/gpu/check.sh.)

Each row is a ratio of two things measured in turn on the same threads: the median over rounds. Peers are not part of
this repository: name a clone or an interpreter of yours, or their rows are left out. dev/bench/README.md says what each
row means.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
import verdict  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# Threads that wait spin for microseconds only, in the peers as in ours: on a shared machine more would slow both.
ENVIRONMENT = dict(os.environ, GOMP_SPINCOUNT="1000", LC_ALL="C.UTF-8")

GPT2 = {"layers": 12, "heads": 12, "channels": 768, "vocab-size": 50257}
SMALL = {"layers": 4, "heads": 4, "channels": 256, "vocab-size": 257}
ENGLISH = {"layers": 6, "heads": 6, "channels": 384, "vocab-size": 4096}  # dev/results/english
MEDIUM = {"layers": 6, "heads": 8, "channels": 512, "vocab-size": 8192}
DEFAULT_GROUPS = "llmc,large,recipes,microxcaling,start,ranks,operations"
GROUPS = f"{DEFAULT_GROUPS},scalings,scalings_of_124M"

# Of each scaling, rounding and transform those that people train with.
SCALINGS = ("mxfp8", "mxfp8-ocp", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxfp4-sr", "fp8-current", "fp8-delayed",
            "fp8-blockwise", "fp8-blockwise-fp32", "nvfp4", "nvfp4-nvidia", "nvfp4-published", "nvfp4-46", "mxfp8-nvfp4",
            "nvfp4-mxfp8")
# What follows --recipe, where it isn't the name alone.
RECIPE_OPTIONS = {"nvfp4-published": ("nvfp4-nvidia", "--bf16-last-layers", 1)}

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}  # of bytes, as the program prints them

# What keeps PyTorch's own kernels, oneDNN's and MKL's to AVX2.
AVX2_ALONE = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# Ratios that are required of rows, by what GEMMs multiply in; None: nothing.
REQUIRED = {
    "bf16": {"llm.c": 8, "GEMM": 0.9, "PyTorch": 1.8, "PyTorch, FP32": None, "mxfp8": 0.98,
             "demo: PyTorch, FP32": None, "demo: bf16": None, "demo: mxfp8": None},
    "fp32": {"llm.c": 6, "GEMM": 0.85, "PyTorch": 1.2, "PyTorch, FP32": 1.2, "mxfp8": 0.9,
             "demo: PyTorch, FP32": 1, "demo: bf16": 0.95, "demo: mxfp8": 0.85},
}


def fail(sentence):
    print(f"bench.py: {sentence}", file=sys.stderr)
    sys.exit(2)


# Token files --------------------------------------------------------------------------------------------------------

def write_tokens(path, vocab, count):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, count
    tokens = np.random.default_rng(0).integers(vocab, size=count).astype(np.uint16)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


# Instructions -------------------------------------------------------------------------------------------------------

class Instructions:
    """What a run's programs may use: GEMMs by what the program says of its library, our own loops by what they were
    compiled for."""

    def __init__(self, build):
        self.loops = re.search(r"-m(?:arch|cpu)=(\S+)", (build / "settings").read_text())[1]
        if self.loops == "x86-64-v3":  # compiled for AVX2: measured as on a processor that has no more
            ENVIRONMENT.update(AVX2_ALONE)
        text = subprocess.run([build / "train_gpt_mxfp8", "--device-info"], env=ENVIRONMENT, capture_output=True,
                              text=True, check=True).stdout
        self.gemms = re.search(r"GEMMs by .*", text)[0]
        # PyTorch takes the same: BF16 autocast is slower than FP32 where ours widens BF16, so no peer.
        self.dtype = "bf16" if self.gemms.endswith(" BF16 operands") else "fp32"
        if ENVIRONMENT.get("ONEDNN_MAX_CPU_ISA") == "AVX2":
            ENVIRONMENT.update(AVX2_ALONE)
        self.required = REQUIRED[self.dtype]

    def describe(self):
        return f"{self.gemms}; loops compiled for {self.loops}"


def torch_name(dtype):
    return {"bf16": "PyTorch, BF16 autocast", "fp32": "PyTorch, FP32"}[dtype]


# Running ------------------------------------------------------------------------------------------------------------

class Steps:
    """What a program did until its step `count` was reported: seconds of each step and more."""

    def __init__(self):
        self.first_line = None  # seconds from the start to the first step's line
        self.wall, self.processor = [], []  # seconds of each step
        self.peak_bytes = None  # VmHWM

    @classmethod
    def of_seconds(cls, seconds):
        steps = cls()
        steps.wall = steps.processor = seconds
        return steps

    def mean(self, processor_time):
        """Returns the mean seconds of a step from the second on: the first also makes what later ones reuse."""
        return statistics.mean((self.processor if processor_time else self.wall)[1:])


def processor_seconds(pid):
    """Returns the seconds that the process's threads have run. They are in nanoseconds at the
    source: /proc/PID/stat counts in hundredths."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def peak_bytes(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def run_steps(command, count, pattern, threads, cwd=ROOT):
    """Runs a program until `count` of its lines match `pattern`, whose group is a step's seconds, and ends it.

    Processor time is what all threads ran since the line before, divided by their number.
    """
    steps, lines = Steps(), []
    start = time.monotonic()
    process = subprocess.Popen([str(word) for word in command], cwd=cwd, stdin=subprocess.DEVNULL,
                               env=dict(ENVIRONMENT, OMP_NUM_THREADS=str(threads)), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace")
    before = 0
    try:
        for line in process.stdout:
            lines.append(line)
            match = re.search(pattern, line)
            if not match:
                continue
            now = processor_seconds(process.pid)
            steps.first_line = steps.first_line or time.monotonic() - start
            steps.processor.append((now - before) / threads)
            steps.wall.append(float(match.group(1)) if match.groups() else None)
            before = now
            if len(steps.wall) == count:
                steps.peak_bytes = peak_bytes(process.pid)
                return steps
    finally:
        process.kill()
        process.wait()
    fail(f"{' '.join(str(word) for word in command)} ended before its step {count}: {''.join(lines[-5:]).strip()}")


class Trainer:
    """Our program on synthetic tokens of a model."""

    def __init__(self, program, directory, model, batch_size, seq_len, threads):
        tokens = write_tokens(directory / f"tokens-{model['vocab-size']}.bin", model["vocab-size"], 1 << 17)
        self.program, self.out_dir, self.threads = program, directory / "run", threads
        self.batch_size, self.tokens_per_step = batch_size, batch_size * seq_len
        self.options = ["--device", "cpu", "--train-data", tokens, "--batch-size", batch_size, "--max-seq-len", seq_len,
                        "--max-steps", 1000, "--threads", threads, "--log-every", 1]
        for name, value in model.items():
            self.options += [f"--{name}", value]

    def command(self, recipe):
        return [self.program, *self.options, "--recipe", *RECIPE_OPTIONS.get(recipe, (recipe,))]

    def train(self, recipe, count):
        shutil.rmtree(self.out_dir, ignore_errors=True)
        command = [*self.command(recipe), "--out-dir", self.out_dir]
        steps = run_steps(command, count, r"^step +\d+/", self.threads)
        events = verdict.json_lines((self.out_dir / "log.jsonl").read_text())
        steps.wall = [event["seconds"] for event in events if event["event"] == "train"]
        self.flops_per_token = events[0]["flops_per_token"]
        return steps

    def flops_per_step(self):
        """Returns the model FLOPs of a step; a run must have been before."""
        return self.flops_per_token * self.tokens_per_step

    def dry_run(self, recipe):
        """Returns the bytes in all, and the bytes kept for the backward pass per token and layer,
        as it says before a run."""
        command = [*self.command(recipe), "--dry-run"]
        text = subprocess.run([str(word) for word in command], cwd=ROOT, env=ENVIRONMENT, capture_output=True,
                              text=True, check=True).stdout
        number, unit = re.search(r"^ *total +([\d.]+) (\S?)B", text, re.MULTILINE).groups()
        kept = re.search(r"kept for backward per token and layer: (\d+) bytes", text)
        return float(number) * UNITS[unit], int(kept.group(1))


class Ranks:
    """Our program on ranks of a core each, started by mpirun; with one rank, by taskset alone."""

    def __init__(self, build, directory, model, batch_size, seq_len):
        self.build, self.out_dir = build, directory / "run"
        self.trainer = Trainer(build / "train_gpt_mxfp8", directory, model, batch_size, seq_len, 1)

    @staticmethod
    def launch(command, ranks):
        start = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
        if ranks > 1:
            start = ["mpirun", "--allow-run-as-root", "--bind-to", "core", "-np", str(ranks)]
        done = subprocess.run([str(word) for word in [*start, *command]], cwd=ROOT, capture_output=True, text=True,
                              env=dict(ENVIRONMENT, OMP_NUM_THREADS="1"), stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            fail(f"{' '.join(start)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
        return done.stdout

    def train(self, ranks, count, *options):
        """Returns the seconds of the best step but the first, and the bytes that a rank sends in
        one."""
        shutil.rmtree(self.out_dir, ignore_errors=True)
        self.launch([*self.command(), "--max-steps", count, "--out-dir", self.out_dir, *options], ranks)
        events = verdict.json_lines((self.out_dir / "log.jsonl").read_text())
        steps = [event for event in events if event["event"] == "train"][1:]
        return min(step["seconds"] for step in steps), steps[0].get("bytes_sent", 0)

    def command(self):
        return [self.trainer.program, *self.trainer.options, "--val-every", 0]

    def collectives(self, ranks):
        """Returns what bench_comm measures, by name."""
        text = self.launch([self.build / "bench_comm"], ranks)
        return {name: float(value) for name, value in re.findall(r"^(\w+) ([\d.e+-]+)$", text, re.MULTILINE)}

    def plan(self, ranks, link_bandwidth, *options):
        """Returns the seconds of a step and the bytes on the wire, as the program predicts them."""
        text = self.launch([*self.command(), *options, "--dry-run", "--world-size", ranks, "--link-bandwidth",
                            link_bandwidth], ranks)
        seconds = float(re.search(r"^  step +([\d.e+-]+) s", text, re.MULTILINE).group(1))
        sent = re.search(r"a rank sends ([\d.]+) (\S?)B of gradients .* a step(?: and ([\d.]+) (\S?)B of weights)?", text)
        parts = sent.groups() if sent else (None,) * 4
        return seconds, sum(float(number) * UNITS[unit] for number, unit in zip(parts[::2], parts[1::2]) if number)


def run_operations(build, arguments, threads):
    """Returns the rows of bench_ops."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [build / "bench_ops", *arguments, "--json", file.name]
        subprocess.run([str(word) for word in command], cwd=ROOT, env=dict(ENVIRONMENT, OMP_NUM_THREADS=str(threads)),
                       stdout=subprocess.DEVNULL, check=True)
        return verdict.json_lines(Path(file.name).read_text())


def gemm_speed(build, arguments, threads):
    """Returns the backend's FLOP/s over all GEMMs of a training step of GPT-2 124M."""
    rows = run_operations(build, ["gemm", *arguments], threads)
    return [row for row in rows if row["name"].startswith("gemm: all")][0]["per_second"]


# Peers --------------------------------------------------------------------------------------------------------------

class LlmC:
    """llm.c's train_gpt2, built by its own Makefile in a copy, on random weights."""

    TOKENS_PER_STEP = 4 * 64

    def __init__(self, source, directory, march):
        self.directory = directory / "llm.c"
        shutil.copytree(source, self.directory, ignore=shutil.ignore_patterns(".git"))
        command = ["make", "CC=gcc", "NO_MULTI_GPU=1", "NO_USE_MPI=1", f"CFLAGS_COND=-march={march}", "train_gpt2"]
        built = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            fail(f"llm.c in {source} doesn't build: {built.stderr.strip()[-500:]}")
        for part in ("train", "val"):
            write_tokens(self.directory / f"dev/data/tinyshakespeare/tiny_shakespeare_{part}.bin", 50257, 1 << 15)
        self.write_weights()

    def write_weights(self):
        """Writes gpt2_124M.bin, version 3: every FP32 parameter, vocabulary padded to 50304."""
        L, C, max_seq_len, padded = 12, 768, 1024, 50304
        rng = np.random.default_rng(0)
        header = np.zeros(256, np.int32)
        header[:8] = 20240326, 3, max_seq_len, 50257, L, 12, C, padded
        sizes = (padded * C, max_seq_len * C, L * C, L * C, L * 3 * C * C, L * 3 * C, L * C * C, L * C, L * C, L * C,
                 L * 4 * C * C, L * 4 * C, L * 4 * C * C, L * C, C, C)
        gains = (2, 8, 14)
        with open(self.directory / "gpt2_124M.bin", "wb") as file:
            file.write(header.tobytes())
            for i, size in enumerate(sizes):
                values = np.ones(size, np.float32) if i in gains else rng.standard_normal(size, np.float32) * 0.02
                file.write(values.astype(np.float32).tobytes())

    def train(self, count, threads):
        return run_steps(["stdbuf", "-oL", "./train_gpt2"], count, r"^step \d+: .*\(took ([\d.]+) ms\)", threads,
                         cwd=self.directory)


def train_torch(python, model, batch_size, seq_len, count, threads, options=()):
    command = [python, HERE / "torch_gpt2.py", "--batch-size", batch_size, "--seq-len", seq_len, "--steps", count,
               "--threads", threads, *options]
    for name, value in model.items():
        command += [f"--{name}", value]
    return run_steps(command, count, r"^step \d+: ([\d.]+) s", threads)


# Rows ---------------------------------------------------------------------------------------------------------------

def row(name, value, unit, beside, beside_value, required, at_most=False, low=None):
    """Returns a row, which says whether value / beside_value is at least `required`; with at_most
    at most; with `low` between the two. None requires nothing. Values are numbers, or an array with one of each round:
    then medians are reported, of the ratio that of the rounds' ratios."""
    ratios = np.atleast_1d(np.divide(value, beside_value))
    value, beside_value, ratio = (float(np.median(numbers)) for numbers in (value, beside_value, ratios))
    if required is None:
        met, text = None, ""
    elif low is not None:
        met, text = low <= ratio <= required, f"{low:g} to {required:g}"
    elif at_most:
        met, text = ratio <= required, f"at most {required:g}"
    else:
        met, text = ratio >= required, f"at least {required:g}"
    return {"name": name, "value": value, "unit": unit, "beside": beside, "beside_value": beside_value, "ratio": ratio,
            "ratios": ratios.tolist(), "required": text, "met": met}


class Bench:
    def __init__(self, args, directory, machine):
        self.args, self.directory, self.machine = args, directory, machine
        self.program = args.build / "train_gpt_mxfp8"
        self.rounds, self.count = args.rounds or (1 if args.quick else 3), 2 if args.quick else 3
        self.batch_size = 1 if args.quick else 4
        self.operation_options = ["--quick"] if args.quick else []
        if args.processor_time:
            self.operation_options.append("--processor-time")
        self.rows, self.operations, self.left_out = [], [], []

    def trainer(self, model, batch_size, seq_len):
        return Trainer(self.program, self.directory, model, batch_size, seq_len, self.args.threads)

    def add(self, *fields, **options):
        self.rows.append(row(*fields, **options))
        r = self.rows[-1]
        print(f"  {r['name']}: {r['ratio']:.3g} ({r['required']})", flush=True)

    def leave_out(self, what, how):
        self.left_out.append(f"Left out: {what}. {how}")
        print("  " + self.left_out[-1], flush=True)

    def in_turn(self, *runs):
        """Returns the mean seconds of each one's steps in each round of one after the other, (runs, rounds)."""
        rounds = [[run().mean(self.args.processor_time) for run in runs] for _ in range(self.rounds)]
        return np.array(rounds).T

    def measure_llmc(self):
        if not self.args.llmc:
            self.leave_out("llm.c", "git clone https://github.com/karpathy/llm.c, then LLMC_DIR=llm.c or --llmc llm.c")
            return
        peer, ours = LlmC(self.args.llmc, self.directory, self.machine.loops), self.trainer(GPT2, 4, 64)

        def train_peer():
            steps = peer.train(self.count, self.args.threads)
            steps.wall = [milliseconds / 1e3 for milliseconds in steps.wall]
            return steps

        seconds, peer_seconds = self.in_turn(lambda: ours.train("bf16", self.count + 2), train_peer)
        self.add("GPT-2 124M, B=4, T=64, bf16", ours.tokens_per_step / seconds, "tokens/s", "llm.c train_gpt2",
                 peer.TOKENS_PER_STEP / peer_seconds, self.machine.required["llm.c"])
        shutil.rmtree(peer.directory)

    def torch(self, model, batch_size, seq_len, count, dtype):
        return train_torch(self.args.torch_python, model, batch_size, seq_len, count, self.args.threads,
                           ["--dtype", dtype])

    def leave_out_torch(self):
        self.leave_out("PyTorch", "pip install torch in a virtual environment, then TORCH_PYTHON=ENV/bin/python or "
                                  "--torch-python ENV/bin/python")

    def gemms(self, ours, count):
        """Returns what GEMMs alone would take for the FLOPs of a step of `ours`, which has run, as steps: the BF16 GEMMs
        of a step; without instructions for those a large FP32 one, which nothing has to be widened for. That is timed
        for as long as a step: one call is over in a moment, in which a shared machine may be twice as fast as on
        average."""
        if self.machine.dtype == "bf16":
            arguments = [*self.operation_options, "--batch-size", ours.batch_size]
            seconds = ours.flops_per_step() / gemm_speed(self.args.build, arguments, self.args.threads)
            return Steps.of_seconds([seconds, seconds])
        command = [self.args.build / "bench_ops", "--batch-size", 1, "--large-gemm", ours.flops_per_step(),
                   *self.operation_options]
        steps = run_steps(command, count, r"^large GEMM: ([\d.]+) s", self.args.threads)
        return Steps.of_seconds(steps.wall)  # which bench_ops has in the time that is asked for

    def add_flops(self, name, ours, speed, gemm_seconds, required):
        """Adds the row of a step's model FLOP/s, `speed` in tokens/s, beside those of GEMMs."""
        beside = "the BF16 GEMMs of a step" if self.machine.dtype == "bf16" else "a large FP32 GEMM"
        self.add(f"{name}: model FLOP/s", ours.flops_per_token * speed / 1e9, "GFLOP/s", beside,
                 ours.flops_per_step() / gemm_seconds / 1e9, required)

    def measure_large(self):
        """Measures B=4, T=1024: against GEMMs, PyTorch, and mxfp8 against bf16; memory on the way."""
        ours, required = self.trainer(GPT2, self.batch_size, 1024), self.machine.required
        name = f"GPT-2 124M, B={self.batch_size}, T=1024"
        peaks = {}

        def train(recipe):
            steps = ours.train(recipe, self.count)
            peaks[recipe] = max(peaks.get(recipe, 0), steps.peak_bytes)
            return steps

        def train_peer():
            return self.torch(GPT2, self.batch_size, 1024, self.count, self.machine.dtype)

        seconds = self.in_turn(lambda: train("bf16"), lambda: train("mxfp8"), lambda: self.gemms(ours, self.count),
                               *([train_peer] if self.args.torch_python else []))
        bf16, mxfp8, gemms, *torch = ours.tokens_per_step / seconds
        self.add_flops(f"{name}, bf16", ours, bf16, ours.tokens_per_step / gemms, required["GEMM"])
        if torch:
            self.add(f"{name}, bf16", bf16, "tokens/s", torch_name(self.machine.dtype), torch[0],
                     required["PyTorch"])
        else:
            self.leave_out_torch()
        self.add(f"{name}, mxfp8", mxfp8, "tokens/s", "bf16", bf16, required["mxfp8"])
        totals = {recipe: ours.dry_run(recipe) for recipe in ("bf16", "mxfp8")}
        for recipe, (total, _) in totals.items():
            self.add(f"{name}, {recipe}: peak memory", peaks[recipe] / 1e9, "GB", "--dry-run's total", total / 1e9,
                     1.1, low=0.9)
        self.add(f"{name}, mxfp8: kept for backward", totals["mxfp8"][1], "bytes a token and layer", "bf16",
                 totals["bf16"][1], 0.7, at_most=True)

    def measure_recipes(self):
        """Measures fp32, bf16 and mxfp8 in the demo's model and in GPT-2 124M with B=1."""
        required, name = self.machine.required, "GPT-2 124M, B=1, T=1024"
        self.add_recipes("the demo's model", self.recipe_speeds(self.trainer(SMALL, 8, 128), SMALL, 8, 128, 20),
                         required["demo: PyTorch, FP32"], None, required["demo: bf16"], required["demo: mxfp8"])
        ours = self.trainer(GPT2, 1, 1024)
        speed = self.recipe_speeds(ours, GPT2, 1, 1024, self.count, {"GEMMs": lambda: self.gemms(ours, self.count)})
        self.add_recipes(name, speed, required["PyTorch, FP32"], required["PyTorch"], None, required["mxfp8"])
        for recipe in ("fp32", "bf16"):
            self.add_flops(f"{name}, {recipe}", ours, speed[recipe], ours.tokens_per_step / speed["GEMMs"],
                           required["GEMM"] if recipe in ("bf16", self.machine.dtype) else None)
        if not self.args.torch_python:
            self.leave_out_torch()

    def recipe_speeds(self, ours, model, batch_size, seq_len, count, others=()):
        """Returns tokens a second, by recipe, by PyTorch's name with its dtype, and by that of other runs."""
        runs = {recipe: lambda recipe=recipe: ours.train(recipe, count) for recipe in ("fp32", "bf16", "mxfp8")}
        for dtype in sorted({"fp32", self.machine.dtype}) if self.args.torch_python else []:
            runs[torch_name(dtype)] = lambda dtype=dtype: self.torch(model, batch_size, seq_len, count, dtype)
        return self.speeds(ours, runs | dict(others))

    def speeds(self, ours, runs):
        return {key: ours.tokens_per_step / seconds for key, seconds in zip(runs, self.in_turn(*runs.values()))}

    def measure_scalings(self):
        self.measure_recipes_of("the demo's model", self.trainer(SMALL, 8, 128), 10)
        self.measure_recipes_of("6 layers x 384, B=4, T=128", self.trainer(ENGLISH, 4, 128), 10)

    def measure_scalings_of_124M(self):
        self.measure_recipes_of("GPT-2 124M, B=1, T=1024", self.trainer(GPT2, 1, 1024), 3)

    def measure_recipes_of(self, name, ours, count):
        """Measures a step of a model and the bytes kept for the backward pass under each recipe, with
        bf16."""
        recipes = ("bf16", *SCALINGS)
        speed = self.speeds(ours, {recipe: lambda recipe=recipe: ours.train(recipe, count) for recipe in recipes})
        kept = {recipe: ours.dry_run(recipe)[1] for recipe in recipes}
        for recipe in SCALINGS:
            self.add(f"{name}, {recipe}", speed[recipe], "tokens/s", "bf16", speed["bf16"], None)
            self.add(f"{name}, {recipe}: kept for backward", kept[recipe], "bytes a token and layer", "bf16",
                     kept["bf16"], None)

    def add_recipes(self, name, speed, fp32, bf16, bf16_beside_fp32, mxfp8):
        """Adds rows of such speeds, with what is required of fp32 and of bf16 beside PyTorch, of bf16 beside fp32, and of
        mxfp8 beside bf16."""
        for recipe, torch, required in (("fp32", torch_name("fp32"), fp32),
                                        ("bf16", torch_name(self.machine.dtype), bf16)):
            if torch in speed:
                self.add(f"{name}, {recipe}", speed[recipe], "tokens/s", torch, speed[torch], required)
        self.add(f"{name}, bf16", speed["bf16"], "tokens/s", "fp32", speed["fp32"], bf16_beside_fp32)
        self.add(f"{name}, mxfp8", speed["mxfp8"], "tokens/s", "bf16", speed["bf16"], mxfp8)

    def measure_microxcaling(self):
        args = self.args
        if not args.microxcaling or not args.torch_python:
            self.leave_out("microxcaling", "git clone https://github.com/microsoft/microxcaling, then MICROXCALING_DIR="
                                           "microxcaling or --microxcaling microxcaling; it needs --torch-python too")
            return
        ours = self.trainer(SMALL, 8, 128)

        def train_peer(bfloat):
            options = ["--microxcaling", args.microxcaling, "--bfloat", bfloat]
            return train_torch(args.torch_python, SMALL, 8, 128, 3, args.threads, options)

        seconds, bf16_seconds, fp32_seconds = self.in_turn(lambda: ours.train("mxfp8", 10), lambda: train_peer(16),
                                                           lambda: train_peer(0))
        for what, peer_seconds in (("the rest in BF16", bf16_seconds), ("the rest in FP32", fp32_seconds)):
            self.add("4 layers x 256, B=8, T=128, mxfp8", ours.tokens_per_step / seconds, "tokens/s",
                     f"microxcaling, {what}", ours.tokens_per_step / peer_seconds, 10)

    def measure_start(self):
        ours = self.trainer(SMALL, 8, 128)
        seconds = min(ours.train("mxfp8", 1).first_line for _ in range(3))
        self.add("the demo's model: start to the end of step 1", seconds, "s", "required", 2.0, 1, at_most=True)

    def measure_ranks(self):
        """Measures two ranks of a core each: what goes over the wire, what it costs, and what the
        plan says of it."""
        if not shutil.which("mpirun") or len(os.sched_getaffinity(0)) < 2:
            self.leave_out("two ranks", "apt-get install libopenmpi-dev openmpi-bin, then make; it takes two cores")
            return
        ways = {"gather mx": [], "gather mx, 2d": ["--weight-scaling", "2d"], "gather bf16": ["--gather", "bf16"],
                "gather fp32": ["--gather", "fp32"], "gather mx, zero 2": ["--zero", 2]}
        ours = Ranks(self.args.build, self.directory, MEDIUM, 4, 256)
        seconds, sent = {way: float("inf") for way in ["one rank", *ways]}, {}
        for _ in range(self.rounds):
            seconds["one rank"] = min(seconds["one rank"], ours.train(1, self.count + 2)[0])
            for way, options in ways.items():
                best, sent[way] = ours.train(2, self.count + 2, *options)
                seconds[way] = min(seconds[way], best)
        link = ours.collectives(2)
        for kind in ("all_gather", "reduce_scatter"):
            self.add(f"2 ranks: {kind} of 64 MB", link[kind], "GB/s", "memory copied by one thread", self.memcpy_speed(),
                     None)
        plans = {way: ours.plan(2, link["all_gather"], *options) for way, options in ways.items()}
        for way, (planned, planned_bytes) in plans.items():
            self.add(f"2 ranks, {way}: sent a step", sent[way] / 1e6, "MB", "as planned", planned_bytes / 1e6, 1.02,
                     low=0.98)
            if way != "gather mx":
                self.add(f"2 ranks, {way}: a step", seconds[way] * 1e3, "ms", "gather mx", seconds["gather mx"] * 1e3,
                         None)
            self.add(f"2 ranks, {way}: a step", seconds[way] * 1e3, "ms", "as planned", planned * 1e3, None)
        self.add("one rank: a step", seconds["one rank"] * 1e3, "ms", "as planned",
                 ours.plan(1, 0)[0] * 1e3, None)
        tokens = ours.trainer.tokens_per_step
        self.add("2 ranks", 2 * tokens / seconds["gather mx"], "tokens/s", "2 x one rank",
                 2 * tokens / seconds["one rank"], None)

    @staticmethod
    def memcpy_speed():
        """Returns the GB/s of copying 64 MB."""
        source, best = np.ones(1 << 23), float("inf")
        copy = np.zeros_like(source)
        for _ in range(5):
            start = time.monotonic()
            np.copyto(copy, source)
            best = min(best, time.monotonic() - start)
        return source.nbytes / best / 1e9

    def measure_operations(self):
        for operation in run_operations(self.args.build, self.operation_options, self.args.threads):
            operation["met"] = operation["ratio"] >= operation["required"]
            self.operations.append(operation)


# Output -------------------------------------------------------------------------------------------------------------

def describe_machine(threads, cpuinfo=Path("/proc/cpuinfo")):
    model = re.search(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE)
    return f"{model.group(1) if model else os.uname().machine}, {threads} threads"


def commit():
    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    if not git("rev-parse", "HEAD"):
        return "unknown"
    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else "")


def print_table(head, lines):
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    for line in [head, ["-" * width for width in widths], *lines]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")


def met_text(met):
    return {None: "", True: "yes", False: "**no**"}[met]


def ratio_text(row):
    """Says the ratio, and from where to where it went over the rounds."""
    several = f" ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})" if len(row["ratios"]) > 1 else ""
    return f"{row['ratio']:.2f}{several}"


def beside_text(operation, operations):
    """Says an operation's speed over that of the one beside it, of a scaling's quantizer MX's, as dev/gpu's report does."""
    if not operation.get("beside"):
        return ""
    line = verdict.judge_scaling(operation, operations, lambda o: o["seconds"], None)
    is_judged = line.counts and line.verdict != "NOT RUN"
    met = f"; {line.wanted}: {met_text(line.verdict == 'PASS')}" if is_judged else ""
    return f"over {operation['beside']}: {line.seen}{met}"


def print_operations(operations):
    print_table(["operation", "shape", "G/s", "limit", "its G/s", "ratio", "required", "met", "beside"],
                [[o["name"], o["shape"], f"{o['per_second'] / 1e9:.1f}", o["limit"],
                  f"{o['limit_per_second'] / 1e9:.1f}", f"{o['ratio']:.2f}", f"{o['required'] or ''}",
                  met_text(o["met"] if o["required"] else None), beside_text(o, operations)] for o in operations])


def print_report(report):
    how = ["--quick"] * report["quick"] + ["processor time"] * report["processor_time"]
    load = f"load {report['load_before']:.1f} before, {report['load_after']:.1f} after"
    print("\n" + "; ".join([report["machine"], report["instructions"], f"commit {report['commit']}", report["date"], load,
                           *how]) + "\n")
    print_table(["what", "ours", "beside", "its", "ratio", "required", "met"],
                [[r["name"], f"{r['value']:.4g} {r['unit']}", r["beside"], f"{r['beside_value']:.4g}",
                  ratio_text(r), r["required"], met_text(r["met"])] for r in report["rows"]])
    print("\n" + "".join(f"{sentence}\n" for sentence in report["left_out"]))
    print_operations(report["operations"])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    env = os.environ.get
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where train_gpt_mxfp8 and bench_ops are")
    parser.add_argument("--out", type=Path, default=None, help="JSON (default: bench.json in --build)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps, B=1 for B=4")
    parser.add_argument("--rounds", type=int, metavar="N",
                        help="rounds of things that are measured in turn (default: 3, with --quick 1): more where others "
                             "use the machine")
    parser.add_argument("--only", default=DEFAULT_GROUPS, help=f"some of {GROUPS} (default: all but the last two)")
    parser.add_argument("--processor-time", action="store_true",
                        help="time that threads ran, divided by their number, instead of time that passed: to look at "
                             "where others use the machine; not for figures to publish")
    parser.add_argument("--llmc", type=Path, default=env("LLMC_DIR"), help="a clone of llm.c (LLMC_DIR)")
    parser.add_argument("--torch-python", default=env("TORCH_PYTHON"), help="a Python with torch (TORCH_PYTHON)")
    parser.add_argument("--microxcaling", type=Path, default=env("MICROXCALING_DIR"),
                        help="a clone of microxcaling (MICROXCALING_DIR)")
    args = parser.parse_args()
    args.build = args.build.resolve()
    args.out = args.out or args.build / "bench.json"
    for option, path, file in (*(("--build", args.build, file) for file in ("bench_ops", "train_gpt_mxfp8", "settings")),
                               ("--llmc", args.llmc, "train_gpt2.c"), ("--microxcaling", args.microxcaling, "mx/linear.py")):
        if path and not (Path(path) / file).exists():
            fail(f"{option} {path} has no {file}: name a directory that does")
    for name, number in ("rounds", args.rounds), ("threads", args.threads):
        if number is not None and number < 1:
            fail(f"--{name} {number}: give a number of {name}, 1 or more")
    for part in args.only.split(","):
        if part not in GROUPS.split(","):
            fail(f"--only {part} is unknown: choose from {GROUPS}")
    if args.out.is_dir() or not os.access(args.out.parent, os.W_OK):  # found now, not when all is measured
        fail(f"--out {args.out} can't be written: name a file in a directory that is there and can be written to")
    if args.torch_python and not shutil.which(args.torch_python):
        fail(f"--torch-python {args.torch_python} is no program: name the interpreter of an environment with torch")
    return args


def main():
    args = parse_arguments()
    machine = Instructions(args.build)
    report = {"machine": describe_machine(args.threads), "instructions": machine.describe(), "commit": commit(),
              "quick": args.quick, "processor_time": args.processor_time, "load_before": os.getloadavg()[0],
              "date": datetime.datetime.now().isoformat(timespec="seconds")}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        bench = Bench(args, Path(directory), machine)
        for part in args.only.split(","):
            print(f"{part} ...", flush=True)
            getattr(bench, f"measure_{part}")()
    report |= {"load_after": os.getloadavg()[0], "rows": bench.rows, "left_out": bench.left_out,
               "operations": bench.operations}
    temporary = args.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.rename(args.out)
    print_report(report)
    print(f"\nas JSON: {args.out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("bench.py: stopped before all was measured; nothing was written", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
