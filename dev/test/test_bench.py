"""dev/bench/bench.py without a bench: what it takes a processor for, which peers and limits follow, and how it says what is
under its limit. Programs are made up, which print what ours does on such a processor, and so are times."""

import argparse
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_isa import of_processor, processor_flags
from trainer import ROOT, TRAINER

sys.path.insert(0, str(ROOT / "dev/bench"))
import bench  # noqa: E402

WIDENED = "GEMMs by loops of ours with {}, BF16 operands widened to FP32"
# What --device-info says of the GEMMs, and what these multiply BF16 in.
PROCESSORS = {
    "Zen 3": (WIDENED.format("AVX2"), "fp32"),
    "Intel with AVX-512 BF16": (WIDENED.format("AVX-512") + ", those in FP32 by oneDNN", "fp32"),
    "Zen 4": ("GEMMs by oneDNN 2.6.3 with AVX-512 BF16, BF16 operands", "bf16"),
    "AMX": ("GEMMs by oneDNN 3.7.1 with AMX, BF16 operands", "bf16"),
    "AArch64": (WIDENED.format("vectors of 128 bits"), "fp32"),
}
# What each of PyTorch's dtypes takes for a step, ours taking 2, and GEMMs for its 1,000 FLOPs.
TORCH_SECONDS = {"fp32": 1, "bf16": 4}
LARGE_GEMM_SECONDS, GEMMS_PER_SECOND = 1.9, 1000


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What programs are started in, without caps."""
    caps = bench.AVX2_ALONE
    monkeypatch.setattr(bench, "ENVIRONMENT", {k: v for k, v in bench.ENVIRONMENT.items() if k not in caps})
    return bench.ENVIRONMENT


def made_up_build(directory, gemms, arch="native"):
    """Makes a build whose program leaves in a file what its environment has of oneDNN's cap."""
    (directory / "settings").write_text(f"cc -O3 -march={arch} -fopenmp llmc/base/util.c")
    program = directory / "train_gpt_mxfp8"
    program.write_text(f"#!/bin/sh\nprintf %s \"$ONEDNN_MAX_CPU_ISA\" > '{directory}/cap'\ncat << END\n"
                       f"CPU               AMD EPYC: cpu, 2 threads; {gemms}\nMPI               built in\nEND\n")
    program.chmod(0o755)
    return directory


@pytest.fixture(params=PROCESSORS)
def processor(request, tmp_path):
    """A processor as bench.py sees it, and what it multiplies BF16 in."""
    gemms, dtype = PROCESSORS[request.param]
    return bench.Instructions(made_up_build(tmp_path, gemms)), gemms, dtype


class StandIn:
    """In place of a Trainer: every step takes 2 s."""

    tokens_per_step, flops_per_token, batch_size = 100, 10, 1

    def __init__(self, *arguments):
        pass

    def train(self, recipe, count):
        steps = bench.Steps.of_seconds([2.0] * count)
        steps.peak_bytes = 1.2e9 if recipe == "mxfp8" else 1.05e9
        return steps

    def flops_per_step(self):
        return 1000

    def dry_run(self, recipe):
        return 1e9, {"bf16": 100, "mxfp8": 66}[recipe]


@pytest.fixture
def bench_on(monkeypatch, tmp_path):
    """Makes a bench of made-up times on a processor."""
    def train_torch(python, model, batch_size, seq_len, count, threads, options):
        return bench.Steps.of_seconds([TORCH_SECONDS[options[options.index("--dtype") + 1]]] * count)

    def run_steps(command, count, pattern, threads):
        assert command[command.index("--large-gemm") + 1] == StandIn().flops_per_step()
        return bench.Steps.of_seconds([LARGE_GEMM_SECONDS] * count)

    monkeypatch.setattr(bench, "Trainer", StandIn)
    monkeypatch.setattr(bench, "train_torch", train_torch)
    monkeypatch.setattr(bench, "run_steps", run_steps)
    monkeypatch.setattr(bench, "gemm_speed", lambda *arguments: GEMMS_PER_SECOND)
    args = argparse.Namespace(build=tmp_path, rounds=None, quick=True, processor_time=False, torch_python="python",
                              threads=2)
    return lambda machine: bench.Bench(args, tmp_path, machine)


def found_rows(measured):
    return [(row["name"].split(", ")[-1], row["beside"], row["required"], round(row["ratio"], 3)) for row in measured.rows]


# The processor's class ----------------------------------------------------------------------------------------------

def test_class_of_a_processor(processor):
    machine, gemms, dtype = processor
    assert machine.dtype == dtype
    assert machine.required == bench.REQUIRED[dtype]
    assert machine.describe() == f"{gemms}; loops compiled for native"


@pytest.mark.parametrize("cap", [None, "AVX2"])
def test_class_of_this_processor(cap, environment):
    """Asks the program that is built: the made-up ones may say what it no longer does."""
    build = Path(TRAINER).parent
    if "-DHAVE_ONEDNN" not in (build / "settings").read_text():
        pytest.skip("a build without oneDNN multiplies BF16 on no processor")
    environment.update({"ONEDNN_MAX_CPU_ISA": cap} if cap else {})
    flags, is_intel = processor_flags(), of_processor("vendor_id") == ["GenuineIntel"]
    multiplies_bf16 = not cap and ("amx_bf16" in flags or ("avx512_bf16" in flags and not is_intel))
    assert bench.Instructions(build).dtype == ("bf16" if multiplies_bf16 else "fp32")


@pytest.mark.parametrize("arch, cap, alone", [("x86-64-v3", None, True), ("native", "AVX2", True), ("native", None, False),
                                              ("native", "AVX512_CORE_BF16", False)])
def test_peers_are_kept_to_avx2_where_ours_is(arch, cap, alone, environment, tmp_path):
    environment.update({"ONEDNN_MAX_CPU_ISA": cap} if cap else {})
    machine = bench.Instructions(made_up_build(tmp_path, PROCESSORS["Zen 3"][0], arch))
    assert machine.loops == arch
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    assert [environment.get(name) for name in names] == (["avx2", "AVX2", "AVX2"] if alone else [None, None, cap])
    assert (tmp_path / "cap").read_text() == ("AVX2" if alone else cap or "")


# Peers and limits ---------------------------------------------------------------------------------------------------

AUTOCAST, FP32, LARGE, OF_A_STEP = "PyTorch, BF16 autocast", "PyTorch, FP32", "a large FP32 GEMM", "the BF16 GEMMs of a step"
MEMORY = [("bf16: peak memory", "--dry-run's total", "0.9 to 1.1", 1.05),
          ("mxfp8: peak memory", "--dry-run's total", "0.9 to 1.1", 1.2),
          ("mxfp8: kept for backward", "bf16", "at most 0.7", 0.66)]
ROWS = {"fp32": {"recipes": [("fp32", FP32, "at least 1", 0.5), ("bf16", FP32, "", 0.5),
                             ("bf16", "fp32", "at least 0.95", 1), ("mxfp8", "bf16", "at least 0.85", 1),
                             ("fp32", FP32, "at least 1.2", 0.5), ("bf16", FP32, "at least 1.2", 0.5),
                             ("bf16", "fp32", "", 1), ("mxfp8", "bf16", "at least 0.9", 1),
                             ("fp32: model FLOP/s", LARGE, "at least 0.85", 0.95),
                             ("bf16: model FLOP/s", LARGE, "at least 0.85", 0.95)],
                 "large": [("bf16: model FLOP/s", LARGE, "at least 0.85", 0.95), ("bf16", FP32, "at least 1.2", 0.5),
                           ("mxfp8", "bf16", "at least 0.9", 1), *MEMORY]},
        "bf16": {"recipes": [("fp32", FP32, "", 0.5), ("bf16", AUTOCAST, "", 2),
                             ("bf16", "fp32", "", 1), ("mxfp8", "bf16", "", 1),
                             ("fp32", FP32, "", 0.5), ("bf16", AUTOCAST, "at least 1.8", 2),
                             ("bf16", "fp32", "", 1), ("mxfp8", "bf16", "at least 0.98", 1),
                             ("fp32: model FLOP/s", OF_A_STEP, "", 0.5),
                             ("bf16: model FLOP/s", OF_A_STEP, "at least 0.9", 0.5)],
                 "large": [("bf16: model FLOP/s", OF_A_STEP, "at least 0.9", 0.5), ("bf16", AUTOCAST, "at least 1.8", 2),
                           ("mxfp8", "bf16", "at least 0.98", 1), *MEMORY]}}


@pytest.mark.parametrize("part", ["recipes", "large"])
def test_rows_have_their_peers_and_limits(part, processor, bench_on):
    machine, _, dtype = processor
    measured = bench_on(machine)
    getattr(measured, f"measure_{part}")()
    assert found_rows(measured) == ROWS[dtype][part]


def test_limits_are_those_of_the_page():
    """In the page's table: where BF16 is multiplied as it is, and where it is widened."""
    page = (ROOT / "dev/bench/README.md").read_text()

    def limits(row):
        cell = re.search(rf"^\| {re.escape(row)} \|.*\| ([^|]*) \|$", page, re.M)[1]
        return [float(number) for number in re.findall(r"(?<!\w)\d+(?:\.\d+)?(?=×|,| of|$)", cell)]

    def required(*keys):
        return [bench.REQUIRED[dtype][key] for key in keys for dtype in ("bf16", "fp32")]

    assert limits("B=4, T=64, bf16") == required("llm.c")
    assert limits("B=4, T=1024, bf16: model FLOP/s") == required("GEMM")
    assert limits("B=4, T=1024, bf16") == required("PyTorch")
    assert limits("B=4, T=1024, mxfp8") == required("mxfp8")
    assert limits("B=1, T=1024") == required("PyTorch", "GEMM", "mxfp8")
    demo = required("demo: PyTorch, FP32", "demo: bf16", "demo: mxfp8")
    assert demo[::2] == [None] * 3 and demo[1::2] == limits("the demo's model")


# What is said -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("value, options, met, text", [
    (0.98, {}, True, "at least 0.98"), (0.977, {}, False, "at least 0.98"),
    (0.98, {"at_most": True}, True, "at most 0.98"), (0.99, {"at_most": True}, False, "at most 0.98"),
    (0.9, {"low": 0.9}, True, "0.9 to 0.98"), (0.89, {"low": 0.9}, False, "0.9 to 0.98"),
    (0.99, {"low": 0.9}, False, "0.9 to 0.98"),
    ([0.9, 0.97, 0.98], {}, False, "at least 0.98"), ([0.9, 0.98, 0.99], {}, True, "at least 0.98"),
])
def test_a_row_says_whether_its_limit_is_met(value, options, met, text):
    row = bench.row("a step", value, "tokens/s", "bf16", 1, 0.98, **options)
    assert (row["met"], row["required"]) == (met, text)


def test_a_row_without_a_limit_says_nothing():
    row = bench.row("a step", 0.1, "tokens/s", "bf16", 1, None)
    assert row["met"] is None and bench.met_text(row["met"]) == "" and row["required"] == ""


OPERATIONS = [{"name": name, "shape": "[8, 8]", "per_second": ratio * 1e9, "limit": "memcpy", "limit_per_second": 1e9,
               "ratio": ratio, "required": required}
              for name, ratio, required in (("met", 0.4, 0.4), ("missed", 0.39, 0.4), ("free", 0.1, 0))]


def test_report_says_what_is_under_its_limit(monkeypatch, bench_on, tmp_path, capsys):
    monkeypatch.setattr(bench, "run_operations", lambda *arguments: [dict(o) for o in OPERATIONS])
    machine = bench.Instructions(made_up_build(tmp_path, PROCESSORS["Zen 4"][0], "znver4"))
    measured = bench_on(machine)
    measured.measure_operations()
    measured.add("one that passes", 1.8, "tokens/s", "PyTorch", 1, 1.8)
    measured.add("one that fails", 1.79, "tokens/s", "PyTorch", 1, 1.8)
    measured.leave_out("llm.c", "Name a clone.")
    capsys.readouterr()
    bench.print_report({"machine": "AMD EPYC, 2 threads", "instructions": machine.describe(), "commit": "b3a7858",
                        "date": "2026-11-27T12:00:00", "load_before": 0.25, "load_after": 2, "quick": True,
                        "processor_time": False, "rows": measured.rows, "left_out": measured.left_out,
                        "operations": measured.operations})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == ("AMD EPYC, 2 threads; GEMMs by oneDNN 2.6.3 with AVX-512 BF16, BF16 operands; loops compiled for "
                        "znver4; commit b3a7858; 2026-11-27T12:00:00; load 0.2 before, 2.0 after; --quick")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert {c[0]: c[-2:] for c in cells if c[0] in ("one that passes", "one that fails")} == {
        "one that passes": ["at least 1.8", "yes"], "one that fails": ["at least 1.8", "**no**"]}
    assert {c[0]: c[-3:] for c in cells if c[0] in ("met", "missed", "free")} == {  # none of them beside another
        "met": ["0.4", "yes", ""], "missed": ["0.4", "**no**", ""], "free": ["", "", ""]}
    assert "Left out: llm.c. Name a clone." in lines


@pytest.mark.parametrize("cpuinfo, name", [
    ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: avx2\n", "AMD EPYC"),
    ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: asimd bf16\nCPU implementer\t: 0x41\n", platform.machine()),
], ids=["x86", "AArch64"])
def test_machine_is_named(cpuinfo, name, tmp_path):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert bench.describe_machine(3, tmp_path / "cpuinfo") == f"{name}, 3 threads"


def run_bench(build, *arguments):
    done = subprocess.run([sys.executable, ROOT / "dev/bench/bench.py", "--build", build, *arguments], text=True,
                          capture_output=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def build(tmp_path):
    (tmp_path / "bench_ops").touch()
    return made_up_build(tmp_path, PROCESSORS["Zen 4"][0])


@pytest.mark.parametrize("arguments, said", [
    (["--only", "start,nosuch"], "--only nosuch is unknown"),
    (["--threads", "0"], "--threads 0: give a number of threads"),
    (["--rounds", "0"], "--rounds 0: give a number of rounds"),
    (["--out", "/nosuch/bench.json"], "--out /nosuch/bench.json can't be written"),
    (["--out", "/"], "--out / can't be written"),
])
def test_bad_options_are_refused_before_anything_is_measured(build, arguments, said):
    code, printed, sentence = run_bench(build, *arguments)
    assert code == 2 and printed == "" and said in sentence and len(sentence.splitlines()) == 1, sentence


@pytest.mark.parametrize("file", ["bench_ops", "train_gpt_mxfp8", "settings"])
def test_a_build_that_lacks_a_file_is_refused(build, file):
    (build / file).unlink()
    assert run_bench(build) == (2, "", f"bench.py: --build {build} has no {file}: name a directory that does\n")


def test_ctrl_c_is_one_sentence(build):
    (build / "train_gpt_mxfp8").write_text("#!/bin/sh\nkill -INT $PPID\nexec sleep 5\n")
    code, printed, sentence = run_bench(build)
    assert (code, printed) == (130, "") and sentence == "bench.py: stopped before all was measured; nothing was written\n"
