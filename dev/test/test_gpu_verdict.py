"""The verdict of dev/gpu/check.sh, on made-up output in the form of the real one: no card is needed,
none has been seen.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import ROOT

sys.path.insert(0, str(ROOT / "dev/gpu"))
import verdict  # noqa: E402
from verdict import Card, Goal, Line, Turn  # noqa: E402

DEVICE_INFO = """CPU               AMD EPYC: cpu, 16 threads
cuDNN             9.26.0
GPUs              1
GPU 0             NVIDIA H100 80GB HBM3
  capability      9.0, 132 SMs at up to 1980 MHz
  memory          85.0 GB, 84.1 GB free; L2 52.4 MB
  bandwidth       3352 GB/s expected at most (5120 bits at 2619 MHz, twice a cycle)
  BF16            1070 TFLOP/s expected at most (dense, at the highest clock)
  FP8             2141 TFLOP/s expected at most
  MXFP8           emulated: decoded to BF16 and multiplied so: compute capability 9.0 has no block-scaled GEMM
  NVFP4           emulated: decoded to BF16 and multiplied so: compute capability 9.0 has no block-scaled GEMM
  FP8 by tensor   native: columnwise operands transposed first, since cuBLASLt multiplies these only so
  FP8 by 128      native: columnwise operands transposed first, and scales put where cuBLASLt wants them
"""
H100 = verdict.card_of(DEVICE_INFO)
B200 = Card("NVIDIA B200", 100, 2.2e15, 2.25e15, 8e12, 180e9, frozenset({"MXFP8"}))

CLOCKS = """1980, 612.31, 54, 0x0000000000000000
1755, 699.80, 61, 0x0000000000000004
[N/A], 10.0, 40, 0x0
1770, 698.02, 63, 0x0000000000000004
"""

LLMC = """| device                | NVIDIA H100 80GB HBM3                              |
step    1/20 | loss 10.975 (+nanz)| norm 15.5 (+nanz)| lr 6.00e-04 | 812.33 ms | 31.1% bf16 MFU | 40339 tok/s
step    2/20 | loss 10.812 (+nanz)| norm 6.1 (+nanz)| lr 6.00e-04 | 71.02 ms | 61.2% bf16 MFU | 461390 tok/s
step    3/20 | loss 10.611 (+nanz)| norm 5.0 (+nanz)| lr 6.00e-04 | 70.00 ms | 61.5% bf16 MFU | 461390 tok/s
step    4/20 | loss 10.499 (+nanz)| norm 4.4 (+nanz)| lr 6.00e-04 | 64.00 ms | 61.5% bf16 MFU | 461390 tok/s
"""


def log(speeds, seconds=8.0, **options):
    options = {"batch-size": 32, "seq-len": 0} | options
    config = {"event": "config", "device": "cuda, NVIDIA H100; attention by cuDNN 9.26.0", "flops_per_token": 8.6e8,
              "world_size": 1, "options": options, "model": {"layers": 12, "max_seq_len": 1024}}
    steps = [{"event": "train", "step": i, "loss": 10 - i, "tokens_per_second": s, "seconds": seconds,
              "tokens": 65536 * (i + 1)} for i, s in enumerate(speeds)]
    return "\n".join(json.dumps(e) for e in [config, *steps]) + '\n{"event":"train","st'


def test_card_and_its_two_peaks():
    assert (H100.name, H100.capability) == ("NVIDIA H100 80GB HBM3", 90)
    assert H100.natives == {"FP8 by tensor", "FP8 by 128"}
    assert H100.clock_flops == 1070e12 and H100.official_flops == 989.4e12 and H100.bandwidth == 3352e9
    assert verdict.card_of("GPUs              0\nno GPU is used: no NVIDIA driver\n") is None
    assert verdict.card_of(DEVICE_INFO.replace("H100 80GB HBM3", "X1")).official_flops is None


def test_clocks():
    clocks = verdict.clocks_of(CLOCKS)
    assert (clocks.samples, clocks.sm_mhz, clocks.sm_mhz_least, clocks.temperature) == (3, 1770, 1755, 63)
    assert clocks.power_watts == 698.02 and clocks.throttled == ["power cap"]
    assert verdict.clocks_of("No devices were found\n") is None


def test_turns():
    turn = verdict.turn_of_log(log([1, 1, 400, 500, 410]))
    assert turn.tokens_per_second == 410 and turn.seconds == 24 and turn.flops_per_token == 8.6e8
    assert verdict.turn_of_log(log([1, 1])) is None and verdict.turn_of_log("") is None
    llmc = verdict.turn_of_llmc(LLMC, 32768)
    assert math.isclose(llmc.seconds, 0.134) and math.isclose(llmc.tokens_per_second, 32768 / 0.067)
    assert verdict.turn_of_llmc("out of memory", 32768) is None


def test_interval_is_students():
    # SciPy: scipy.stats.t.interval(0.95, 2, mean, sem) of the logarithms of 1.0, 1.1, 1.21.
    mean, low, high = verdict.interval([1.0, 1.1, 1.21])
    assert math.isclose(mean, 1.1) and math.isclose(low, 1.1 * math.exp(-0.2367636), rel_tol=1e-4)
    assert math.isclose(high, 1.1 * math.exp(0.2367636), rel_tol=1e-4)
    assert verdict.interval([2.0])[1:] == (None, None)


@pytest.mark.parametrize("values, expected", [([0.95, 0.951, 0.949], "PASS"), ([0.92, 0.921, 0.919], "FAIL"),
                                              ([0.9, 0.96, 0.95], "UNCLEAR"), ([0.99], "UNCLEAR")])
def test_a_goal_within_the_interval_is_not_met(values, expected):
    assert verdict.judge_interval("x", values, 0.93).verdict == expected


def turns(a, b, seconds=40):
    return {"124M": {"mxfp8-emulated": [Turn(v, seconds, 8e8) if v else None for v in a],
                     "bf16": [Turn(v, seconds, 8e8) if v else None for v in b]}}


EMULATED = next(g for g in verdict.GOALS if g.a == "mxfp8-emulated" and g.model == "124M")


def test_goals():
    clocks = {"124M": {"bf16": [verdict.clocks_of(CLOCKS)]}}
    line = verdict.judge_goal(EMULATED, turns([95, 95.1, 94.9], [100, 100, 100]), H100, clocks)
    assert line.verdict == "PASS" and "0.950 (0.9" in line.seen and "throttled: power cap" in line.seen
    # The drift of a card that becomes warm is in both of a pair.
    assert verdict.judge_goal(EMULATED, turns([95, 85.5, 76], [100, 90, 80]), H100, {}).verdict == "PASS"
    assert verdict.judge_goal(EMULATED, turns([90, 90.1, 89.9], [100, 100, 100]), H100, {}).verdict == "FAIL"
    assert verdict.judge_goal(EMULATED, turns([95, None, 95], [100, 100, None]), H100, {}).verdict == "UNCLEAR"
    assert verdict.judge_goal(EMULATED, {}, H100, {}).verdict == "NOT RUN"
    short = verdict.judge_goal(EMULATED, turns([95, 95], [100, 100], seconds=12), H100, {})
    assert short.verdict == "NOT RUN" and "12 s of the 30" in short.seen


def test_goals_of_a_peak_and_of_other_cards():
    peak = next(g for g in verdict.GOALS if g.b is None)
    runs = {"1558M": {"bf16": [Turn(53e3, 40, 1e10)] * 3}}
    line = verdict.judge_goal(peak, runs, H100, {})
    assert line.verdict == "PASS" and line.seen.startswith("0.536")  # of the official peak, not of the clock's
    native = next(g for g in verdict.GOALS if g.needs == "MXFP8")
    line = verdict.judge_goal(native, runs, H100, {})
    assert line.verdict == "NOT RUN" and not line.counts
    assert verdict.judge_goal(native, runs, B200, {}).counts
    fp8 = next(g for g in verdict.GOALS if g.needs == "FP8 by tensor")
    assert not verdict.judge_goal(fp8, runs, B200, {}).counts  # which is described without it
    runs["1558M"]["fp8-current"] = [Turn(60e3, 40, 1e10)] * 3
    line = verdict.judge_goal(fp8, runs, H100, {})
    assert line.verdict == "PASS" and line.seen.startswith("1.13")
    fp4 = next(g for g in verdict.GOALS if g.needs == "NVFP4")
    assert not verdict.judge_goal(fp4, runs, H100, {}).counts
    packed = "codes packed first, two to a byte and stored along K, and scales laid out in tiles"
    blackwell = verdict.card_of(re.sub(r"(?m)^  NVFP4 .*", f"  NVFP4           native: {packed}", DEVICE_INFO))
    runs["1558M"]["nvfp4"] = [Turn(62e3, 40, 1e10)] * 3
    line = verdict.judge_goal(fp4, runs, blackwell, {})
    assert line.verdict == "PASS" and line.seen.startswith("1.17")
    blocks = next(g for g in verdict.GOALS if g.needs == "FP8 by 128")
    line = verdict.judge_goal(blocks, runs, B200, {})
    assert not line.counts and "no FP8 by 128 natively" in line.seen
    runs["1558M"]["fp8-blockwise"] = [Turn(50e3, 40, 1e10)] * 3
    assert verdict.judge_goal(blocks, runs, H100, {}).verdict == "FAIL"


def test_goals_are_the_project_s():
    assert [(g.model, g.a, g.b, g.wanted) for g in verdict.GOALS] == [
        ("124M", "bf16", "llmc", 1.0), ("124M", "mxfp8-emulated", "bf16", 0.93),
        ("1558M", "mxfp8-emulated", "bf16", 0.95), ("1558M", "bf16", None, 0.52),
        ("1558M", "mxfp8-native", "bf16", 1.2), ("7B", "mxfp8-native", "bf16", 1.3),
        ("1558M", "fp8-current", "bf16", 1.0), ("1558M", "fp8-blockwise", "bf16", 1.0), ("1558M", "nvfp4", "bf16", 1.0)]


@pytest.mark.parametrize("code, last, expected, counts", [(0, "ok", "PASS", True), (1, "boom", "FAIL", True),
                                                          (124, "step 3", "FAIL", True),
                                                          (124, "left out: 600 s were over", "NOT RUN", True),
                                                          (77, "left out: one GPU", "NOT RUN", False)])
def test_steps(code, last, expected, counts):
    line = verdict.judge_step("resume", code, 12.0, last)
    assert (line.verdict, line.counts) == (expected, counts)


NOTHING = "quantized GEMMs are emulated in BF16, nothing to check: compute capabilities below 10.0"
CHECKED = ("self-check passed: of 16 quantized GEMMs {} ran natively, off by 0.31 of the accumulation bound, 16 emulated, "
           "by 0.2")
SELF_CHECKS = f"""[ RUN      ] test_self_check_on_gpu
    mx: {NOTHING}
    tensor: {CHECKED.format(16)}
    block128: {CHECKED.format(15)}
    block128-fp32: SELF-CHECK FAILED: of 16 quantized GEMMs 16 ran natively, off by 3 of the accumulation bound
[  FAILED  ] test_self_check_on_gpu
"""


def test_self_checks():
    lines = verdict.judge_self_checks(SELF_CHECKS)
    assert [(line.verdict, line.counts) for line in lines] == [
        ("NOT RUN", False), ("PASS", True), ("FAIL", True), ("FAIL", True), ("NOT RUN", True)]
    assert "16 ran natively, off by 0.31" in lines[1].seen and "of block128-fp32" in lines[3].what
    names = re.search(r"NAMES\[\] = \{(.*)\};", (ROOT / "dev/test/gpu_test_cuda_gemm.c").read_text()).group(1)
    assert re.findall(r'"(.*?)"', names) == verdict.SELF_CHECKED


def test_native_run_counts_its_gemms():
    events = verdict.json_lines(log([1, 2, 3]))
    # 3 steps of 65536 tokens, two micro-batches of 32 x 1024 each, but the first one's is taken as one.
    line = verdict.judge_native_run(events, "strictly native")
    assert line.verdict == "PASS" and line.seen.startswith(f"{5 * 12 * 12} GEMMs natively, 0 emulated")
    assert verdict.judge_native_run([], "strictly native").verdict == "FAIL"


def test_curves():
    reference = [5 - i / 100 for i in range(300)]
    assert verdict.judge_curve("mxfp8", [v * 1.005 for v in reference], reference, 0.01).verdict == "PASS"
    assert verdict.judge_curve("mxfp8", [v * 1.02 for v in reference], reference, 0.01).verdict == "FAIL"
    assert verdict.judge_curve("mxfp8", [math.nan] * 300, reference, 0.01).verdict == "FAIL"
    line = verdict.judge_curve("mxfp8", reference[:200], reference, 0.01)
    assert line.verdict == "FAIL" and line.seen == "it ended after 200 of 300 steps"
    assert verdict.judge_curve("mxfp8", reference, reference[:200], 0.01).verdict == "NOT RUN"
    assert verdict.judge_curve("mxfp8", [], reference, 0.01).verdict == "NOT RUN"


def operation(name, seconds, work=8e9, required=0.8, limit="memcpy", limit_per_second=2.8e12):
    return {"name": name, "shape": "[1, 1]", "work": work, "seconds": seconds, "per_second": work / seconds,
            "limit": limit, "limit_per_second": limit_per_second, "ratio": 0, "required": required}


def test_operations_have_a_bar_each_without_the_launch():
    launch = operation(verdict.LAUNCH, 4e-6, required=0)
    small = operation("convert fp32 to bf16", 9.2e-6, work=14e6)  # 0.54 with its launch, 0.96 without
    slow = operation("layernorm_forward", 6e-3)
    fp6 = operation("quantize both e2m3 rceil", 6e-3)
    lines = verdict.judge_operations([launch, small, slow, fp6, operation("swizzle scales", 1, required=0)], H100)
    assert [(line.verdict, line.counts) for line in lines] == [("PASS", True), ("FAIL", True), ("FAIL", False)]
    assert verdict.judge_operations([small], H100)[0].verdict == "FAIL"
    assert verdict.judge_operations([fp6], B200)[0].counts
    assert verdict.judge_operations([], H100)[0].verdict == "NOT RUN"


def test_verdict_over_all():
    def over(*verdicts):
        return verdict.verdict_of([Line("x", v) for v in verdicts])[0]
    assert over("PASS", "PASS") == "PASS"
    assert over("PASS", "NOT RUN") == "INCOMPLETE"
    assert over("PASS", "NOT RUN", "UNCLEAR") == "UNCLEAR"
    assert over("PASS", "UNCLEAR", "FAIL", "NOT RUN") == "FAIL"
    assert verdict.verdict_of([Line("x", "PASS"), Line("y", "FAIL", counts=False)])[0] == "PASS"
    assert verdict.verdict_of([])[0] == "INCOMPLETE"


def test_efficiencies_replace_the_planner_s():
    operations = [operation(verdict.ALL_GEMMS, 0.02, work=1.2e13, limit="large GEMM", required=0),
                  operation("attention_forward", 1e-3, work=4e11, limit="large GEMM", required=0),
                  operation("attention_backward, out kept", 3e-3, work=1e12, limit="large GEMM", required=0),
                  operation("adamw", 4e-3, work=1e10), operation("quantize both e2m3 rceil", 1, work=1)]
    fractions = verdict.efficiencies(operations, H100)
    assert math.isclose(fractions["gemm"], 6e14 / 989.4e12) and math.isclose(fractions["attention"], 3.5e14 / 989.4e12)
    assert math.isclose(fractions["memory"], 2.5e12 / 3352e9)
    table = (ROOT / "llmc/run/cards.h").read_text()
    new = verdict.cards_table(table, "h100", fractions)
    assert "0.61, 0.35, 0.75)" in new and new.replace("0.61, 0.35, 0.75)", "0.71, 0.22, 0.81)") == table
    assert verdict.cards_table(table, "rtx", fractions) is None
    assert verdict.cards_table(table, "h100", dict.fromkeys(fractions)) == table


def test_a_goal_of_its_own():
    goal = Goal("124M", "bf16", "mxfp8-emulated", 1.01, name="x")
    assert verdict.judge_goal(goal, turns([95, 95.1, 94.9], [100, 100.1, 99.9]), H100, {}).verdict == "PASS"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def report(out):
    done = subprocess.run([sys.executable, "dev/gpu/report.py", out, "abc1234", "32"], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines(), (out / "report.md").read_text()


def test_report_of_a_card(tmp_path):
    write(tmp_path / "rows.tsv", "build\t0\t80.1\tok\nreproduce\t0\t9.2\tthe last 20 losses are the same to the bit\n")
    write(tmp_path / "device-info.log", DEVICE_INFO)
    write(tmp_path / "test_cuda_gemm.log", "\n".join(
        f"    {name}: {CHECKED.format(16) if 'n' in name or '1' in name else NOTHING}" for name in verdict.SELF_CHECKED))
    write(tmp_path / "bench.jsonl", "\n".join(json.dumps(o) for o in [
        operation(verdict.LAUNCH, 4e-6, required=0), operation("adamw", 3.5e-3),
        operation(verdict.ALL_GEMMS, 0.02, work=1.2e13, limit="large GEMM", required=0)]))
    for name in ("bf16", "mxfp8"):
        write(tmp_path / f"curve-{name}/log.jsonl", log([1] * 30))
    for i in range(3):
        for name, speed in (("bf16", 450e3), ("mxfp8-emulated", 425e3)):
            write(tmp_path / f"turns/124M/{name}-{i + 1}/log.jsonl", log([1, 1, *[speed + i] * 5]))
            write(tmp_path / f"turns/124M/{name}-{i + 1}/clocks.csv", CLOCKS)
        write(tmp_path / f"turns/124M/llmc-{i + 1}/console.log", "".join(
            f"step {s:4}/20 | loss 10.9 (+nanz)| norm 15.5 (+nanz)| lr 6.00e-04 | {8000 - i}.00 ms | 31.1%\n"
            for s in range(9)))
    code, lines, page = report(tmp_path)
    assert code == 1 and lines[-1].startswith("VERDICT: INCOMPLETE (") and lines[-1].endswith("4 NOT RUN)")
    assert page.rstrip().endswith(lines[-1])
    assert "PASS     mxfp8 emulated, 124M: tokens/s over bf16's: 0.944" in "\n".join(lines)
    assert "PASS     bf16, 124M: tokens/s over llm.c's with cuDNN" in "\n".join(lines)
    assert "| 124M | bf16 | 1 | 450000 | 40 | 0.391 | 0.362 | 1770 (1755) | 698 | 63 | power cap |" in page
    assert "attention by cuDNN 9.26.0" in page
    assert "official 989.4 TFLOP/s; at the highest clock 1070" in page
    assert 'CARD("h100", 989.4, 1978.9, 80, 3.35, false, 0.61, 0.22, 0.68)' in (tmp_path / "cards.h").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "INCOMPLETE"
    # One thing that fails makes all of it fail.
    with (tmp_path / "rows.tsv").open("a") as rows:
        rows.write("test_cuda_ops\t1\t9.2\tnot ok\n")
    assert report(tmp_path)[1][-1].startswith("VERDICT: FAIL (")


def test_report_of_a_curve_with_a_null(tmp_path):
    for name, loss in (("bf16", "2"), ("mxfp8", "null")):
        write(tmp_path / f"curve-{name}/log.jsonl", f'{{"event":"train","step":0,"loss":3}}\n{{"event":"train","step":1,"loss":{loss}}}\n')
    _, lines, _ = report(tmp_path)
    assert "FAIL     mxfp8's losses beside bf16's: nan beside 2.0000, +nan%" in lines


def check_without_build(out, **environment):
    """Runs a check that comes to its build, which fails after a second."""
    make = out.parent / "bin/make"
    write(make, "#!/bin/sh\nsleep 1.1\nexit 1\n")
    make.chmod(0o755)
    environment = os.environ | {"PATH": f"{make.parent}:{os.environ['PATH']}"} | environment
    return subprocess.run([ROOT / "dev/gpu/check.sh", "10", out], env=environment, capture_output=True, text=True, check=False)


def test_a_check_has_a_directory_of_its_own(tmp_path):
    """A second one would judge the first one's logs."""
    out = tmp_path / "out"
    assert check_without_build(out).returncode == 1
    before = (out / "rows.tsv").read_text()
    done = check_without_build(out)
    assert done.returncode == 2 and done.stdout == "" and (out / "rows.tsv").read_text() == before
    assert done.stderr == f"check.sh: {out} holds a check already: name another directory, or remove that one\n"


@pytest.mark.skipif(not Path("/usr/share/i18n/locales/de_DE").exists(), reason="no language with a decimal comma can be made")
def test_a_step_is_timed_in_any_language(tmp_path):
    subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"], check=True, capture_output=True)
    check_without_build(tmp_path / "out", LOCPATH=str(tmp_path), LC_ALL="de_DE.UTF-8")
    seconds = dict(line.split("\t")[:3:2] for line in (tmp_path / "out/rows.tsv").read_text().splitlines())["build"]
    assert 1.1 <= float(seconds) < 60


def test_report_of_nothing(tmp_path):
    code, lines, _ = report(tmp_path)
    assert code == 1 and lines[-1].startswith("VERDICT: INCOMPLETE (0 PASS, 0 FAIL")


def check(directory, *arguments):
    """Calls check.sh in a tree that holds nothing else, where there is nothing to build."""
    (directory / "dev/gpu").mkdir(parents=True, exist_ok=True)
    script = shutil.copy(ROOT / "dev/gpu/check.sh", directory / "dev/gpu")
    return subprocess.run(["bash", script, *arguments], cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--minutes", "10"], ["-x"], ["20"], ["10", "20"], ["30", "--quick"], ["out", "30"]])
def test_check_refuses_what_is_neither_minutes_nor_a_directory(tmp_path, arguments):
    done = check(tmp_path, *arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    assert done.stderr.startswith("check.sh: it takes 10, 30 or 60 minutes") and "--help" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dev"]


def test_check_says_how_it_is_called(tmp_path):
    done = check(tmp_path, "--help")
    assert done.returncode == 0 and done.stderr == "", done
    assert "\n    dev/gpu/check.sh [10|30|60] [DIRECTORY]\n" in done.stdout and "#" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["dev"]
    check(tmp_path, "30", "2026-out")  # a directory's name may begin with a number
    assert "build\t" in (tmp_path / "2026-out/rows.tsv").read_text()
