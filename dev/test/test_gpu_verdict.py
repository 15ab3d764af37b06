"""The verdict of dev/gpu/check.sh, without a card: on made-up output, and on what an H200 printed
(fixtures/h200, commit 7684389, its turns' first steps).
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
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
B200 = Card("NVIDIA B200", 100, 2.2e15, 2.25e15, 8e12, frozenset({"MXFP8"}))

CLOCKS = """1980, 612.31, 54, 0x0000000000000000
1755, 699.80, 61, 0x0000000000000004
[N/A], 10.0, 40, 0x0
1770, 698.02, 63, 0x0000000000000004
"""

PROFILE = '{"event":"profile","step":3,"seconds":0.06,"operations":{"qkv fprop":0.004}}\n'

# As nsys prints it, shortened.
TIMELINE = """Processing [run.sqlite] with [cuda_api_sum.py]...

 ** CUDA API Summary (cuda_api_sum):

 Time (%)  Total Time (ns)  Num Calls  Name
 --------  ---------------  ---------  ----------------
     99.0        400000000       1000  cudaLaunchKernel

Processing [run.sqlite] with [cuda_gpu_kern_sum.py]...

 ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):

 Time (%)  Total Time (ns)  Instances  Name
 --------  ---------------  ---------  -------------------
     41.2        164000000        288  nvjet_qqtst_128x256
      8.1         32000000          8  adamw

Processing [run.sqlite] with [cuda_gpu_mem_time_sum.py]...
"""

LLMC = """| device                | NVIDIA H100 80GB HBM3                              |
step    1/20 | loss 10.975 (+nanz)| norm 15.5 (+nanz)| lr 6.00e-04 | 812.33 ms | 31.1% bf16 MFU | 40339 tok/s
step    2/20 | loss 10.812 (+nanz)| norm 6.1 (+nanz)| lr 6.00e-04 | 71.02 ms | 61.2% bf16 MFU | 461390 tok/s
step    3/20 | loss 10.611 (+nanz)| norm 5.0 (+nanz)| lr 6.00e-04 | 70.00 ms | 61.5% bf16 MFU | 461390 tok/s
step    4/20 | loss 10.499 (+nanz)| norm 4.4 (+nanz)| lr 6.00e-04 | 64.00 ms | 61.5% bf16 MFU | 461390 tok/s
"""


# As cuda_attention_cudnn_describe writes it.
ATTENTION = "attention by cuDNN 9.26.0, forward engine 3 (KERNEL_CFG 7), backward engine 5 (KERNEL_CFG 31, STAGES 2)"


def log(speeds, seconds=8.0):
    config = {"event": "config", "device": f"cuda, NVIDIA H100; {ATTENTION}", "flops_per_token": 8.6e8}
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
        ("124M", "bf16", "llmc", 1.0), ("124M", "bf16", "llmc-fused", 1.0), ("124M", "mxfp8-emulated", "bf16", 0.93),
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
# As gpu_test_cuda_gemm prints them; `large` without the first word.
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
    large = CHECKED.format(16).partition("passed: ")[2]
    line = verdict.judge_large(f"{SELF_CHECKS}    large: {large}\n")
    assert line.verdict == "PASS" and line.counts and "16 ran natively, off by 0.31" in line.seen
    for wrong in (large.replace(" 16 ran", " 15 ran"), large.replace("0.31", "inf"), large.replace("by 0.2", "by 1.2")):
        assert verdict.judge_large(f"    large: {wrong}\n").verdict == "FAIL"
    nothing, missing = verdict.judge_large(f"    large: {NOTHING}\n"), verdict.judge_large(SELF_CHECKS)
    assert (nothing.verdict, nothing.counts, missing.verdict, missing.counts) == ("NOT RUN", False, "NOT RUN", True)
    names = re.search(r"NAMES\[\] = \{(.*)\};", (ROOT / "dev/test/gpu_test_cuda_gemm.c").read_text()).group(1)
    assert re.findall(r'"(.*?)"', names) == verdict.SELF_CHECKED


def test_native_run_counts_its_gemms():
    def judge(*more):
        return verdict.judge_native_run([*verdict.json_lines(log([1, 2, 3])), *more], "strictly native")
    line = judge({"event": "gemms", "step": 3, "native": 720, "emulated": 0})
    assert line.verdict == "PASS" and line.seen == "720 GEMMs natively, 0 emulated, in 3 steps"
    line = judge({"event": "gemms", "step": 3, "native": 719, "emulated": 1})
    assert line.verdict == "FAIL" and line.seen == "719 GEMMs natively, 1 emulated, in 3 steps"
    assert judge({"event": "gemms", "step": 3, "native": 0, "emulated": 0}).verdict == "FAIL"
    assert judge().verdict == "FAIL" and "weren't counted" in judge().seen
    assert verdict.judge_native_run([], "strictly native").seen == "no step was taken"


def test_attention_s_engines():
    assert verdict.attention_of(f"cuda, NVIDIA B200; GEMMs by cuBLASLt 13.1.0; {ATTENTION}") == (
        "cuDNN 9.26.0", "engine 3 (KERNEL_CFG 7)", "engine 5 (KERNEL_CFG 31, STAGES 2)")
    plain = "attention by cuDNN 9.19.0, forward engine 3, backward engine 7"
    assert verdict.attention_of(plain) == ("cuDNN 9.19.0", "engine 3", "engine 7")
    assert verdict.attention_of("cuda; attention by our own kernels") == ("our own kernels", "", "")
    assert verdict.attention_of("cpu, 2 threads") is None


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


def test_scalings_beside_mx():
    launch = operation(verdict.LAUNCH, 1e-3, required=0)
    mx = operation("quantize both e4m3 rceil", 5e-3, work=4.0625e9)
    def judge(name, seconds, work, card=H100):
        of_mx = operation(name, seconds, work, required=0) | {"beside": mx["name"]}
        return verdict.judge_operations([launch, mx, of_mx], card)[0]
    line = judge("quantize both block128", 6e-3, 4e9)  # 4 / 5 without the launch, 0.83 with it
    assert (line.verdict, line.counts) == ("PASS", True) and line.seen == "0.80 of its speed"
    assert line.what == "quantize both block128 [1, 1] over quantize both e4m3 rceil"
    assert judge("quantize both block128", 6.8e-3, 4e9).verdict == "FAIL"
    line = judge("quantize both tensor", 7e-3, 6e9)  # which reads its source twice
    assert (line.verdict, line.counts) == ("FAIL", False) and "0.68 by its bytes alone" in line.seen
    assert not judge("quantize both nvfp4", 9e-3, 4e9).counts and judge("quantize both nvfp4", 9e-3, 4e9, B200).counts
    alone = operation("quantize both block128", 1e-3, required=0) | {"beside": mx["name"]}
    assert verdict.judge_operations([launch, alone], H100)[0].verdict == "NOT RUN"


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
                  operation("adamw", 4e-3, work=1e10), operation("quantize both e2m3 rceil", 1, work=1),
                  operation("tensor qkv fprop", 2e-3, work=2e12, limit="large GEMM", required=0),
                  operation("tensor down wgrad", 2e-3, work=3e12, limit="large GEMM", required=0),
                  operation("quantize both tensor", 1, work=1), operation("gemm qkv fprop", 1, work=1),
                  operation("mxfp8 qkv fprop", 1e-3, work=3e12, limit="large GEMM", required=0)]
    fractions = verdict.efficiencies(operations, H100)
    assert math.isclose(fractions["gemm"], 6e14 / 989.4e12) and math.isclose(fractions["attention"], 3.5e14 / 989.4e12)
    assert math.isclose(fractions["native"], 1.25e15 / 2 / 989.4e12) and fractions["block128"] is None
    assert math.isclose(verdict.efficiencies(operations, B200)["native"], 3e15 / 2 / B200.official_flops)
    table = (ROOT / "llmc/run/cards.h").read_text()
    new = verdict.cards_table(table, "h100", fractions)
    old, measured = "false, 0.70, 0.61, 0.42, 0.22, 0.82)", f"false, 0.61, 0.63, 0.42, 0.35, {fractions['memory']:.2f})"
    assert measured in new and new.replace(measured, old) == table
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
        [f"    {name}: {CHECKED.format(16) if 'n' in name or '1' in name else NOTHING}" for name in verdict.SELF_CHECKED]
        + [f"    large: {CHECKED.format(16).partition('passed: ')[2]}"]))
    write(tmp_path / "bench.jsonl", "\n".join(json.dumps(o) for o in [
        operation(verdict.LAUNCH, 4e-6, required=0), operation("adamw", 3.5e-3),
        operation(verdict.ALL_GEMMS, 0.02, work=1.2e13, limit="large GEMM", required=0)]))
    for name in ("bf16", "mxfp8"):
        write(tmp_path / f"curve-{name}/log.jsonl", log([1] * 30))
    for i in range(3):
        for name, speed in (("bf16", 450e3), ("mxfp8-emulated", 425e3)):
            write(tmp_path / f"turns/124M/{name}-{i + 1}/log.jsonl", log([1, 1, *[speed + i] * 5]))
            write(tmp_path / f"turns/124M/{name}-{i + 1}/clocks.csv", CLOCKS)
        for name, ms in (("llmc", 8000), ("llmc-fused", 7000)):
            write(tmp_path / f"turns/124M/{name}-{i + 1}/console.log", "".join(
                f"step {s:4}/20 | loss 10.9 (+nanz)| norm 15.5 (+nanz)| lr 6.00e-04 | {ms - i}.00 ms | 31.1%\n"
                for s in range(9)))
    write(tmp_path / "profile-124M-bf16/log.jsonl", PROFILE)
    write(tmp_path / "profile-124M-bf16/clocks.csv", CLOCKS)
    write(tmp_path / "timeline-bf16.log", TIMELINE)
    write(tmp_path / "timeline-bf16-clocks.csv", CLOCKS)
    code, lines, page = report(tmp_path)
    assert code == 1 and lines[-1].startswith("VERDICT: INCOMPLETE (") and lines[-1].endswith("4 NOT RUN)")
    assert page.rstrip().endswith(lines[-1])
    assert "PASS     mxfp8 emulated, 124M: tokens/s over bf16's: 0.944" in "\n".join(lines)
    assert "PASS     bf16, 124M: tokens/s over llm.c's with cuDNN: 109.8" in "\n".join(lines)
    assert "PASS     bf16, 124M: tokens/s over llm.c's with cuDNN and GELU in its GEMMs: 96" in "\n".join(lines)
    clocks = "SM at 1770 (1755) MHz, 698 W, 63 °C, throttled: power cap."
    assert f"Beside profile-124M-bf16: {clocks}" in page and f"Clocks beside it: {clocks}" in page
    kernels = page.partition("## timeline-bf16: kernels by nsys\n\n```\n")[2].partition("\n```")[0].splitlines()
    assert [line.split()[-1] for line in kernels] == ["Name", "-------------------", "nvjet_qqtst_128x256", "adamw"]
    assert "| 124M | bf16 | 1 | 450000 | 40 | 0.391 | 0.362 | 1770 (1755) | 698 | 63 | power cap |" in page
    engines = "| cuDNN 9.26.0 | engine 3 (KERNEL_CFG 7) | engine 5 (KERNEL_CFG 31, STAGES 2) | curve-bf16, curve-mxfp8, turns"
    assert engines in page and json.loads((tmp_path / "report.json").read_text())["attention"][0]["by"] == "cuDNN 9.26.0"
    assert f"| {verdict.LAUNCH} [1, 1] | 0.004 | 0.00 of memcpy |" in page
    assert "PASS     self-check of large kernels" in "\n".join(lines)
    assert "official 989.4 TFLOP/s; at the highest clock 1070" in page
    assert 'CARD("h100", 989.4, 1978.9, 80, 3.35, false, 0.61, 0.61, 0.42, 0.22, 0.68)' in (tmp_path / "cards.h").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "INCOMPLETE"
    # One thing that fails makes all of it fail.
    with (tmp_path / "rows.tsv").open("a") as rows:
        rows.write("test_cuda_ops\t1\t9.2\tnot ok\n")
    assert report(tmp_path)[1][-1].startswith("VERDICT: FAIL (")


def test_report_of_what_an_h200_printed(tmp_path):
    """Figures are read off the recorded files: steps of some 55.6, 57.6 and 59.7 ms, a launch of 4.017 µs, 814 µs and
    0.972 of memcpy for the classifier."""
    out = tmp_path / "h200"
    shutil.copytree(ROOT / "dev/test/fixtures/h200", out)
    code, lines, page = report(out)
    text = "\n".join(lines)
    assert code == 1 and page.startswith("# NVIDIA H200, ")
    assert "NOT RUN  bf16, 124M: tokens/s over llm.c's with cuDNN: a turn took 1 s of the 30 that it should" in lines
    assert "NOT RUN  mxfp8 native, 1558M: tokens/s over bf16's: this card multiplies no MXFP8 natively" in lines
    for scaling, bound in (("tensor", 0.42), ("block128", 0.451), ("block128-fp32", 0.408)):
        assert f"PASS     self-check of {scaling}: every shape native, within the accumulation bound: self-check passed: of 16 " \
            f"quantized GEMMs 16 ran natively, off by {bound} of" in text
    assert "PASS     self-check of large kernels" in text and "NOT RUN  self-check of mx" in text
    # 0.972 of 0.814 ms is 0.98 of them less a launch.
    for line in ("PASS     classifier [11008, 50257]: 0.98 of memcpy", "FAIL     embedding_backward [32768, 768]: 0.19 of memcpy"):
        assert line in lines
    for name, ratio in (("delayed", "0.91"), ("block128", "0.88")):
        assert re.search(rf"PASS     quantize both .*{name} \[32768, 3072\] over quantize both e4m3 rceil: {ratio} of its speed", text)
    made = json.loads((out / "report.json").read_text())
    turns_of = {name: turns[0]["tokens_per_second"] for name, turns in made["turns"]["124M"].items()}
    assert turns_of == pytest.approx({"bf16": 32768 / 0.0556, "llmc": 32768 / 0.0576, "mxfp8-emulated": 32768 / 0.0597}, rel=0.005)
    assert made["clocks"]["124M"]["bf16"][0]["throttled"] == ["power cap"]
    assert made["attention"][0]["backward"] == "engine 6 (KERNEL_CFG 26)"
    assert 'CARD("h200", 989.4, 1978.9, 141, 4.8, false, 0.73, 0.62, 0.48, 0.24, 0.77)' in (out / "cards.h").read_text()


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


@pytest.mark.parametrize("sign, status, verdict", [(signal.SIGINT, 0, "INCOMPLETE (2 PASS, 0 FAIL"), (signal.SIGTERM, 1, "FAIL")])
def test_a_check_that_is_ended_has_a_report(tmp_path, sign, status, verdict):
    """Of the step that runs then what it came to, of the others that they were left out."""
    out = tmp_path / "out"
    write(tmp_path / "bin/make", "#!/bin/sh\ntouch begun\nsleep 3\nexit STATUS\n".replace("begun", str(tmp_path / "begun")).replace("STATUS", str(status)))
    (tmp_path / "bin/make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    process = subprocess.Popen([ROOT / "dev/gpu/check.sh", "10", out], env=environment, stdout=subprocess.PIPE, text=True,
                               start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, sign)
    printed = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == 1 and printed[-1].startswith(f"VERDICT: {verdict}"), printed
    codes = dict(line.split("\t")[:2] for line in (out / "rows.tsv").read_text().splitlines())
    said = [line.split("\t")[3] for line in (out / "rows.tsv").read_text().splitlines()[2:]]
    assert codes["build"] == str(status) and (out / "report.md").exists()
    assert set(said) == ({"left out: the check was ended"} if status == 0 else set())


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


CHECK = (ROOT / "dev/gpu/check.sh").read_text()


def shell(directory, functions, body, **programs):
    """Runs bash with functions of check.sh, and programs of the directory before all others."""
    texts = [re.search(rf"^{name}\(\) \{{.*?^\}}$", CHECK, re.MULTILINE | re.DOTALL).group() for name in functions]
    for name, text in programs.items():
        path = directory / name
        write(path, text)
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", "\n".join(["set -uo pipefail", *texts, body])], env=environment, cwd=directory,
                          capture_output=True, text=True, timeout=60, check=False)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SAMPLER = "#!/bin/bash\necho $$ >sampler.pid\nwhile :; do echo '1755, 699.8, 61, 0x4'; sleep 0.05; done\n"
# Takes so many steps, and then goes on without.
CONTENDER = """#!/bin/bash
echo $$ >contender.pid
for ((i = 1; i <= $1; i++)); do echo "step $i/99 | loss 9 | 5.00 ms | 31.1%"; sleep 0.05; done
while [ "$2" = hangs ]; do sleep 0.05; done
"""


@pytest.mark.parametrize("steps, then, code", [(100000, "", 0), (0, "hangs", 124), (2, "hangs", 124)])
def test_a_turn_ends_what_it_began(tmp_path, steps, then, code):
    body = f"gpu=0 limit=4 turn_seconds=2; turn out ./contender {steps} '{then}'"
    done = shell(tmp_path, ["steps_in", "sample_clocks", "turn"], body,
                 **{"nvidia-smi": SAMPLER, "contender": CONTENDER})
    assert done.returncode == code and done.stdout.rstrip().endswith(" steps"), done
    counted = int(done.stdout.split()[-2])
    assert counted > 5 if steps > 2 else counted == steps  # of up to 20 a second, for a second or two
    assert not any(is_running(int((tmp_path / f"{name}.pid").read_text())) for name in ("sampler", "contender"))
    if steps > 2:
        assert verdict.clocks_of((tmp_path / "out/clocks.csv").read_text()).throttled == ["power cap"]


@pytest.mark.parametrize("steps", [2, 10])
def test_a_contender_that_ends_by_itself_has_failed(tmp_path, steps):
    body = f"gpu=0 limit=10 turn_seconds=5; turn out ./contender {steps} 'crash'"
    crashing = CONTENDER + "echo 'CUDA error: an illegal memory access'; exit 9\n"
    done = shell(tmp_path, ["steps_in", "sample_clocks", "turn"], body, **{"nvidia-smi": SAMPLER, "contender": crashing})
    assert done.returncode == 1, done
    assert done.stdout == f"{steps} steps, and it ended with 9: CUDA error: an illegal memory access\n"
    assert not is_running(int((tmp_path / "sampler.pid").read_text()))


LAST_LOSSES = re.search(r"^last_losses\(\) .*$", CHECK, re.MULTILINE)[0]


@pytest.mark.parametrize("losses, code", [(["3.5", "3.25"], 0), (["3.5"], 1), (["null", "null"], 1), ([], 1)])
def test_losses_that_are_the_same_are_numbers(tmp_path, losses, code):
    log = "".join(f'{{"event":"train","step":{i},"loss":{loss},"tokens":8}}\n' for i, loss in enumerate(losses))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "log.jsonl", log)
    for call in ("same_losses", "close_losses"):
        assert shell(tmp_path, [call], f"{LAST_LOSSES}; {call} a b 2").returncode == code, call


@pytest.mark.parametrize("code", [0, 3])
def test_clocks_are_sampled_while_operations_are_timed(tmp_path, code):
    body = "gpu=0 limit=10 build=. device=cpu batch=1 out=.; bench_options=(--quick); bench"
    operations = f"#!/bin/bash\nsleep 0.5\necho \"$@\"\nexit {code}\n"
    done = shell(tmp_path, ["sample_clocks", "with_clocks", "bench"], body, **{"nvidia-smi": SAMPLER, "bench_ops": operations})
    assert done.returncode == code and done.stdout == "--device cpu --batch-size 1 --json ./bench.jsonl --quick\n", done
    assert not is_running(int((tmp_path / "sampler.pid").read_text()))
    write(tmp_path / "device-info.log", DEVICE_INFO)
    page = report(tmp_path)[2]
    assert "While operations were timed: SM at 1755 (1755) MHz, 700 W, 61 °C, throttled: power cap." in page


def test_clocks_are_sampled_beside_a_profile(tmp_path):
    body = """gpu=0 limit=10 program=./trainer device=cpu out=. large=(--large)
        profile 124M-bf16 bf16 --model gpt2-124M; echo $?"""
    done = shell(tmp_path, ["sample_clocks", "with_clocks", "train", "profile"], body,
                 **{"nvidia-smi": SAMPLER, "trainer": "#!/bin/bash\nsleep 0.5\necho \"$@\"\n"})
    said = "--device cpu --recipe bf16 --out-dir ./profile-124M-bf16 --large --model gpt2-124M --max-steps 6 --profile"
    assert done.stdout == f"{said}\n0\n", done
    assert verdict.clocks_of((tmp_path / "profile-124M-bf16/clocks.csv").read_text()).power_watts == 699.8
    assert not is_running(int((tmp_path / "sampler.pid").read_text()))


# The first logs steps once the last has begun; all but the last end with a status when that is gone.
RANK = """#!/bin/bash
while [ "$1" != --out-dir ]; do shift; done
mkdir -p "$2"
echo $$ >"$2/$RANK.new" && mv "$2/$RANK.new" "$2/$RANK.pid"
last=$2/$((WORLD_SIZE - 1)).pid
until [ -e "$last" ]; do sleep 0.05; done
if [ "$RANK" = 0 ]; then for i in 0 1 2 3 4; do echo '{"event":"train"}'; done >"$2/log.jsonl"; fi
while kill -0 "$(cat "$last")" 2>/dev/null; do sleep 0.05; done
exit "$STATUS"
"""


@pytest.mark.parametrize("gpus, status, code", [(3, 4, 0), (3, 0, 1), (3, 137, 1), (1, 4, 77)])
def test_ranks_that_are_left_say_so(tmp_path, gpus, status, code):
    body = f"export STATUS={status}; gpus={gpus} limit=30 program=./rank device=cpu out=. small=(); lost_rank"
    done = shell(tmp_path, ["left_out", "start_ranks", "end_ranks", "steps_in", "lost_rank"], body, rank=RANK)
    assert done.returncode == code, done
    assert done.stdout.count(f"a rank ended with {status}\n") == (gpus - 1 if gpus > 1 else 0), done


# Has four GPUs; says which one it is asked about.
SMI = """#!/bin/bash
for option; do
  case $option in
  --list-gpus) printf 'GPU %s: NVIDIA H100\\n' 0 1 2 3 ;;
  --query-gpu=compute_mode) echo "$MODE" ;;
  --id=*) echo "${option#--id=}" >>asked ;;
  esac
done
"""


@pytest.mark.parametrize("visible, gpus, first", [
    (None, 4, "0"), ("2", 1, "2"), ("3,1", 2, "3"), ("GPU-1a,GPU-7b,GPU-6c", 3, "GPU-1a"), ("2,-1,3", 1, "2"), ("", 0, "")])
def test_a_check_keeps_to_the_gpus_it_may_use(tmp_path, visible, gpus, first):
    given = "unset CUDA_VISIBLE_DEVICES" if visible is None else f"export CUDA_VISIBLE_DEVICES={visible}"
    ranks = "#!/bin/bash\necho \"$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER\"\n"
    body = f"""{given}; export MODE=Default; find_gpus; echo $gpus $gpu; sample_clocks clocks.csv; wait
        limit=30 program=./ranks device=cpu out=. small=(); close_losses() {{ :; }}; two_ranks"""
    done = shell(tmp_path, ["smi", "find_gpus", "ask_gpu", "left_out", "start_ranks", "end_ranks", "sample_clocks", "two_ranks"], body,
                 **{"nvidia-smi": SMI, "ranks": ranks})
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == f"{gpus} {first}".rstrip(), done
    assert lines.count(f"{first} PCI_BUS_ID") == 2, done
    assert set((tmp_path / "asked").read_text().split("\n")) == {first, ""}


def test_two_ranks_need_a_card_that_takes_two_processes(tmp_path):
    body = "export MODE=Exclusive_Process; gpu=0 limit=30 program=false device=cpu out=. small=(); two_ranks"
    done = shell(tmp_path, ["smi", "ask_gpu", "left_out", "start_ranks", "end_ranks", "two_ranks"], body, **{"nvidia-smi": SMI})
    line = verdict.judge_step("two-ranks", done.returncode, 0.1, done.stdout.splitlines()[-1])
    assert line.verdict == "NOT RUN" and not line.counts, done


# Prints a test that passed, what it has found, and, where its time ends, what it then says.
SANITIZER = """#!/bin/bash
trap 'echo "========= Error: process did not terminate successfully"; exit 143' TERM
echo '========= COMPUTE-SANITIZER'
echo '[       OK ] test_a'
for ((i = 0; i < REPEATS; i++)); do printf '%s' "$FOUND"; done
while [ "$HANGS" = 1 ]; do sleep 0.05; done
printf '%s' "$SUMMARY"
exit "$STATUS"
"""
INVALID = "========= Invalid __global__ read of size 4 bytes\n"
LIBRARYS = "========= Error: Race reported between Write access at cublasLt_split+0x40\n"
OURS = "========= Error: Race reported between Write access at gather_rows+0x40\n"
SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
OVER = "left out: 3 s were over, and nothing was found in 1 tests"


@pytest.mark.parametrize("call, found, summary, status, hangs, code, last", [
    ("errors memcheck ./tests", "", "========= ERROR SUMMARY: 0 errors\n", 0, 0, 0, "nothing in our own kernels"),
    ("errors memcheck ./tests", "", "", 0, 0, 1, None),  # it never came to its summary
    ("errors memcheck ./tests", "", "", 0, 1, 124, OVER),
    ("errors memcheck ./tests", INVALID, "", 0, 1, 1, None),
    ("errors memcheck ./tests", INVALID, "", 1, 0, 1, None),
    ("errors memcheck ./tests", "", "", 5, 0, 5, None),  # a test failed
    ("errors memcheck ./tests", "", "", 137, 0, 137, None),  # killed for its memory
    ("races ./tests", LIBRARYS, SUMMARY, 0, 0, 0, "no races in our own kernels"),
    ("races ./tests", OURS, SUMMARY, 0, 0, 1, None),
    ("races ./tests", LIBRARYS, "", 0, 1, 124, OVER),
    ("races ./tests", OURS, "", 0, 1, 1, None),
    ("races ./tests", "", "", 0, 0, 1, None)])  # it never came to its summary
def test_a_sanitizer_that_its_time_ended_has_found_what_it_found(tmp_path, call, found, summary, status, hangs, code, last):
    """Findings are as many as fill a pipe."""
    names = "\n".join(re.findall(r"^library_names=.*|^libraries=.*", CHECK, re.MULTILINE))
    body = f"""export FOUND='{found}' SUMMARY='{summary}' STATUS={status} HANGS={hangs} REPEATS=2000
        {names}; limit={3 if hangs else 30} out=. sanitizer=./sanitizer; {call}"""
    done = shell(tmp_path, ["left_out", "sanitize", "errors", "races"], body, sanitizer=SANITIZER)
    said = done.stdout.splitlines()[-1]
    assert done.returncode == code and (last is None or said == last), said
    assert code != 124 or verdict.judge_step("racecheck-ops", code, 3.0, said).verdict == "NOT RUN"


# Seconds that steps took on H100s (README.md beside check.sh; the quantizer's tests on the third);
# those of building, tuned GEMMs, real shapes, profiles and timelines are assumed, as 8 of each that isn't here.
SECONDS = {"build-tests": 60, "test_cuda_quantize": 25, "test_cuda_ops": 15, "test_cuda_attention": 29, "test_cuda_gpt": 8,
           "test_cuda_gemm": 59, "test_gpt": 1, "bench": 20, "reproduce-tuned": 25, "real-shapes": 60, "build-llmc": 80, "profile-124M": 20,
           "profile-1558M": 40, "timeline": 40}
STARTS = {"turn-124M": 5, "turn-1558M": 33}  # before the seconds of a turn
TURN = int(re.search(r"^turn_seconds=\$\{TURN:-(\d+)\}", CHECK, re.MULTILINE)[1])
HOPPER = "MXFP8  emulated\nNVFP4  emulated\nFP8 by tensor  native\nFP8 by 128  native\n"
BLACKWELL = "MXFP8  native\nNVFP4  native\nFP8 by tensor  native\nFP8 by 128  emulated\n"


def schedule(tmp_path, minutes, native):
    """Returns the steps that check.sh takes in so many minutes, without what it leaves to the end."""
    rounds = "\n".join(re.findall(r"^case \$minutes in .*|^fp8_rounds=.*", CHECK, re.MULTILINE))
    write(tmp_path / "device-info.log", native)
    write(tmp_path / "llm.c/train_gpt2cu", "")
    (tmp_path / "llm.c/train_gpt2cu").chmod(0o755)
    body = f"""minutes={minutes}; {rounds}
        step() {{ echo "$1"; }}
        turn_seconds={TURN} build=. out=. LLMC_DIR=llm.c small=() large=() tiny=() model_124M=() part_124M=() part_1558M=()
        choose_contenders; what_is_right; how_fast"""
    done = shell(tmp_path, ["from", "turns", "is_native", "choose_contenders", "what_is_right", "how_fast"], body)
    assert done.returncode == 0 and not done.stderr, done
    return done.stdout.split()


@pytest.mark.parametrize("minutes, brought", [(10, True), (30, False), (60, False)])
def test_a_check_has_time_for_its_steps(tmp_path, minutes, brought):
    """With everything on an H100; in 10 minutes where programs are brought along."""
    steps = schedule(tmp_path, minutes, HOPPER)
    seconds = 0 if brought else 90
    for name in steps:
        if brought and name.startswith("build-"):
            continue
        known = SECONDS | {turn: start + TURN for turn, start in STARTS.items()}
        seconds += next((value for step, value in known.items() if name.startswith(step)), 8)
    print(f"{minutes} minutes: {len(steps)} steps, {seconds} of {60 * minutes - 10} s")
    assert seconds <= 60 * minutes - 10


def test_contenders_of_a_check(tmp_path):
    assert TURN > verdict.SECONDS + 1  # steps' own times leave out what lies between them
    half = schedule(tmp_path, 30, HOPPER)
    assert {"turn-1558M-fp8-current-2", "turn-1558M-bf16-3"} < set(half) and "turn-1558M-fp8-current-3" not in half
    hopper = schedule(tmp_path, 60, HOPPER)
    assert not any("7B" in name for name in hopper)  # its goal is of native MXFP8
    assert "turn-1558M-fp8-current-5" in hopper and "turn-124M-fp8-current-1" not in hopper
    blackwell = schedule(tmp_path, 60, BLACKWELL)
    assert {"native", "native-nvfp4", "turn-7B-mxfp8-native-5", "turn-1558M-nvfp4-5", "turn-124M-llmc-5"} < set(blackwell)
    assert "turn-1558M-fp8-blockwise-1" not in blackwell
