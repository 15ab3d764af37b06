"""What check.sh's output says: from logs, timings and clocks to PASS or FAIL. Nothing here runs a
program, so that it is tested without a card (dev/test/test_gpu_verdict.py).

A line of the verdict is PASS, FAIL, UNCLEAR (the goal lies within the interval of what was
measured) or NOT RUN, with the reason. All together: FAIL where one failed, else UNCLEAR, else
INCOMPLETE where something that this card should have run wasn't, else PASS.
"""

import json
import math
import re
import statistics
from dataclasses import dataclass

WARM_UP = 2  # steps that also make what later ones reuse
SECONDS = 30  # that a contender's turn takes at least

# Student's t for a two-sided interval of 95 %, by degrees of freedom from 1 on.
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]

# Dense BF16 peaks in TFLOP/s that NVIDIA's data sheets and white papers give, by the name that the
# driver gives the card; the first that it contains. Those of 10.x with sparsity, halved.
OFFICIAL_PEAKS = [("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989.4), ("H200", 989.4), ("GH200", 989.4),
                  ("GB200", 2500), ("B200", 2250), ("GeForce RTX 5090", 209.5), ("RTX PRO 6000", 503.8),
                  ("GeForce RTX 4090", 165.2), ("RTX 6000 Ada", 364.2)]

# The driver's reasons for a clock below the highest, by bit (nvmlClocksEventReasons).
THROTTLING = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown",
              0x40: "hardware thermal slowdown", 0x80: "power brake"}


@dataclass
class Line:
    """A line of the verdict."""
    what: str
    verdict: str  # PASS, FAIL, UNCLEAR, NOT RUN
    seen: str = ""
    wanted: str = ""
    counts: bool = True  # in the verdict over all


@dataclass
class Goal:
    """`a`'s tokens/s over `b`'s in turns of one model; where b is None, `a`'s model FLOP/s over the
    official peak."""
    model: str
    a: str
    b: str
    wanted: float
    needs: str = ""  # what a card must multiply natively, as --device-info names it
    name: str = ""


GOALS = [Goal("124M", "bf16", "llmc", 1.0, name="bf16, 124M: tokens/s over llm.c's with cuDNN"),
         Goal("124M", "bf16", "llmc-fused", 1.0, name="bf16, 124M: tokens/s over llm.c's with cuDNN and GELU in its GEMMs"),
         Goal("124M", "mxfp8-emulated", "bf16", 0.93, name="mxfp8 emulated, 124M: tokens/s over bf16's"),
         Goal("1558M", "mxfp8-emulated", "bf16", 0.95, name="mxfp8 emulated, 1558M: tokens/s over bf16's"),
         Goal("1558M", "bf16", None, 0.52, name="bf16, 1558M: of the official dense peak"),
         Goal("1558M", "mxfp8-native", "bf16", 1.2, "MXFP8", "mxfp8 native, 1558M: tokens/s over bf16's"),
         Goal("7B", "mxfp8-native", "bf16", 1.3, "MXFP8", "mxfp8 native, 7B's shapes: tokens/s over bf16's"),
         Goal("1558M", "fp8-current", "bf16", 1.0, "FP8 by tensor", "fp8-current native, 1558M: tokens/s over bf16's"),
         Goal("1558M", "fp8-blockwise", "bf16", 1.0, "FP8 by 128", "fp8-blockwise native, 1558M: tokens/s over bf16's"),
         Goal("1558M", "nvfp4", "bf16", 1.0, "NVFP4", "nvfp4 native, 1558M: tokens/s over bf16's")]


# Scalings that cards multiply natively, by the names in gpu_test_cuda_gemm.
SELF_CHECKED = ["mx", "tensor", "block128", "block128-fp32", "nvfp4"]


# Reading ------------------------------------------------------------------------------------------------------------

def json_lines(text):
    """Reads JSON lines, of which the last may be cut: a program that was ended may have stopped within it."""
    values = []
    for line in text.splitlines():
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:
            pass
    return values


@dataclass
class Turn:
    """What a contender did in one turn."""
    tokens_per_second: float
    seconds: float
    flops_per_token: float = None


def turn_of_log(text):
    """Returns the turn that a run's log.jsonl shows: the steps after the first ones; None where there are too few."""
    events = json_lines(text)
    trained = [e for e in events if e.get("event") == "train"][WARM_UP:]
    config = next((e for e in events if e.get("event") == "config"), None)
    if not config or not trained:
        return None
    speed = statistics.median(e["tokens_per_second"] for e in trained)
    return Turn(speed, sum(e["seconds"] for e in trained), config["flops_per_token"])


def turn_of_llmc(text, tokens_of_step):
    """Returns the same from what llm.c's train_gpt2cu prints: how many milliseconds each step took."""
    times = [float(ms) / 1e3 for ms in re.findall(r"^step +\d+/\d+ .*\| ([\d.]+) ms", text, re.MULTILINE)][WARM_UP:]
    return Turn(tokens_of_step / statistics.median(times), sum(times)) if times else None


@dataclass
class Clocks:
    samples: int
    sm_mhz: float  # medians
    sm_mhz_least: float
    power_watts: float
    temperature: float  # the highest
    throttled: list  # reasons


def clocks_of(text):
    """Returns what samples of nvidia-smi have in common, in each line clocks.sm, power.draw,
    temperature.gpu and clocks_throttle_reasons.active without units; None where there are none. A
    line that isn't four numbers is left out."""
    rows = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        try:
            rows.append((float(fields[0]), float(fields[1]), float(fields[2]), int(fields[3], 16)))
        except (ValueError, IndexError):
            continue
    if not rows:
        return None
    reasons = 0
    for row in rows:
        reasons |= row[3]
    return Clocks(len(rows), statistics.median(r[0] for r in rows), min(r[0] for r in rows),
                  statistics.median(r[1] for r in rows), max(r[2] for r in rows),
                  [name for bit, name in THROTTLING.items() if reasons & bit])


@dataclass
class Card:
    name: str
    capability: int  # 90: 9.0
    clock_flops: float  # BF16, at the highest clock
    official_flops: float
    bandwidth: float
    natives: frozenset = frozenset()  # what it multiplies natively, as --device-info names it


def card_of(device_info):
    """Returns the card of `train_gpt_mxfp8 --device-info`; None where no GPU is in it."""
    name = re.search(r"^GPU \d+ +(.*)", device_info, re.MULTILINE)
    capability = re.search(r"^  capability +(\d+)\.(\d+)", device_info, re.MULTILINE)
    if not name or not capability:
        return None
    def figure(pattern, unit):
        found = re.search(pattern, device_info, re.MULTILINE)
        return float(found.group(1)) * unit if found else None
    official = next((peak * 1e12 for part, peak in OFFICIAL_PEAKS if part in name.group(1)), None)
    return Card(name.group(1), 10 * int(capability.group(1)) + int(capability.group(2)),
                figure(r"^  BF16 +([\d.e+]+) TFLOP/s", 1e12), official, figure(r"^  bandwidth +([\d.e+]+) GB/s", 1e9),
                frozenset(re.findall(r"^  (\w+(?: \w+)*) +native", device_info, re.MULTILINE)))


ATTENTION = re.compile(r"attention by (cuDNN [\d.]+), forward (engine \d+(?: \([^)]*\))?), "
                       r"backward (engine \d+(?: \([^)]*\))?)")


def attention_of(device):
    """Returns what a run's `device` says of attention: whose kernels, and cuDNN's engines forward and
    backward with their settings; None where it says nothing."""
    found = ATTENTION.search(device)
    if found:
        return found.groups()
    own = re.search(r"attention by ([^;]*)", device)
    return (own.group(1), "", "") if own else None


# Judging ------------------------------------------------------------------------------------------------------------

def interval(values):
    """Returns the geometric mean of ratios and the ends of its interval of 95 %, by Student's t of
    their logarithms; the ends are None for fewer than two."""
    logs = [math.log(v) for v in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    degrees = min(len(logs) - 1, len(STUDENT))
    half = STUDENT[degrees - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def judge_interval(what, values, wanted, remark=""):
    """Compares values, one for each round, with a goal that they shall reach."""
    mean, low, high = interval(values)
    seen = f"{mean:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None else " (one round)") + remark
    if low is None:
        verdict = "UNCLEAR"
    else:
        verdict = "PASS" if low >= wanted else "FAIL" if high < wanted else "UNCLEAR"
    return Line(what, verdict, seen, f"at least {wanted:g}")


def judge_goal(goal, turns, card, clocks):
    """Judges a goal by turns[model][contender], a list with a Turn, or None, for each round; clocks likewise."""
    line = Line(goal.name, "NOT RUN", wanted=f"at least {goal.wanted:g}")
    if goal.needs and goal.needs not in card.natives:
        line.seen, line.counts = f"this card multiplies no {goal.needs} natively", False
        return line
    of_model = turns.get(goal.model, {})
    a, b = of_model.get(goal.a, []), of_model.get(goal.b, []) if goal.b else None
    pairs = [(x, y) for x, y in zip(a, b if goal.b else a) if x and y]
    if not pairs:
        line.seen = f"no turns of {goal.a}{' and ' + goal.b if goal.b else ''} at {goal.model}"
        return line
    short = min(min(x.seconds, y.seconds) for x, y in pairs)
    if short < SECONDS:
        line.seen = f"a turn took {short:.0f} s of the {SECONDS} that it should"
        return line
    if goal.b is None and not card.official_flops:
        line.seen = f"no official peak is known of {card.name}"
        return line
    values = [x.tokens_per_second / y.tokens_per_second if goal.b
              else x.tokens_per_second * x.flops_per_token / card.official_flops for x, y in pairs]
    samples = [c for name in (goal.a, goal.b) for c in clocks.get(goal.model, {}).get(name, []) if c]
    reasons = {reason for c in samples for reason in c.throttled}
    remark = f"; throttled: {', '.join(sorted(reasons))}" if reasons else ""
    return judge_interval(goal.name, values, goal.wanted, remark)


def kernels_of(text, most=25):
    """Returns the first lines of the summary of kernels that nsys --stats prints, head and rows; none where there is none."""
    found = re.search(r"^ *\*\* CUDA GPU Kernel Summary.*\n\s*\n((?: *\S.*\n?)+)", text, re.MULTILINE)
    return found.group(1).splitlines()[:2 + most] if found else []


def judge_step(name, code, seconds, last_line):
    """Judges a step of rows.tsv by its exit status: 124 is out of time, or left out though this card
    should have run it; 77 doesn't apply here."""
    if code == 77 or (code == 124 and "left out" in last_line):
        return Line(name, "NOT RUN", last_line, counts=code != 77)
    if code == 124:
        return Line(name, "FAIL", f"not done after {seconds:.0f} s: {last_line}")
    return Line(name, "PASS" if code == 0 else "FAIL", last_line, "" if code == 0 else "exit 0")


def judge_self_checks(text):
    """Judges the lines that gpu_test_cuda_gemm prints, one for each of SELF_CHECKED."""
    return [judge_self_check(scaling, "".join(re.findall(rf"^ *{scaling}: (.*)$", text, re.MULTILINE)))
            for scaling in SELF_CHECKED]


def judge_self_check(scaling, text):
    """Judges the self-check of a scaling: all shapes native, within the bound of how the card accumulates."""
    what = f"self-check of {scaling}: every shape native, within the accumulation bound"
    found = re.search(r"self-check passed: of (\d+) quantized GEMMs (\d+) ran natively, off by ([\d.e+-]+) of", text)
    if "nothing to check" in text:
        return Line(what, "NOT RUN", text.strip(), counts=False)
    if not found:
        return Line(what, "FAIL" if "SELF-CHECK FAILED" in text else "NOT RUN", text.strip() or "no such line")
    return Line(what, "PASS" if found.group(1) == found.group(2) else "FAIL", found.group(0), "all of them natively")


WITHIN = re.compile(r"of (\d+) quantized GEMMs (\d+) ran natively, off by (\S+) of the accumulation bound, "
                    r"(\d+) emulated, by (\S+)")


def judge_large(text):
    """Judges the line of gpu_test_cuda_gemm on shapes of large kernels: all native, within the bound."""
    line = Line("self-check of large kernels: every shape native, within the accumulation bound", "NOT RUN",
                "no such line")
    said = re.search(r"^ *large: (.*)$", text, re.MULTILINE)
    if not said:
        return line
    line.seen = said.group(1)
    found = WITHIN.search(line.seen)
    if not found:
        line.counts = "nothing to check" not in line.seen
        return line
    count, native, emulated = (int(found.group(i)) for i in (1, 2, 4))
    within = max(float(found.group(3)), float(found.group(5))) <= 1
    line.wanted = "all of them natively, both within 1"
    line.verdict = "PASS" if count == native > 0 and emulated > 0 and within else "FAIL"
    return line


def judge_native_run(events, what):
    """Judges a run under --mx-gemm native by its own count of GEMMs of two quantized operands."""
    steps = sum(e.get("event") == "train" for e in events)
    counted = next((e for e in events if e.get("event") == "gemms"), None)
    line = Line(what, "FAIL", "no step was taken", "all GEMMs natively")
    if steps and not counted:
        line.seen = f"{steps} steps, after which GEMMs weren't counted"
    if steps and counted:
        native, emulated = counted["native"], counted["emulated"]
        line.seen = f"{native} GEMMs natively, {emulated} emulated, in {steps} steps"
        line.verdict = "PASS" if native > 0 and emulated == 0 else "FAIL"
    return line


def judge_curve(name, curve, reference, within):
    """Compares the mean loss over the last third of a curve with bf16's."""
    what = f"{name}'s losses beside bf16's"
    wanted = f"within {within:.1%} over the last third"
    if not curve or len(curve) > len(reference):
        return Line(what, "NOT RUN", f"curves of {len(curve)} and {len(reference)} steps", wanted)
    if len(curve) < len(reference):
        return Line(what, "FAIL", f"it ended after {len(curve)} of {len(reference)} steps", wanted)
    last = max(1, len(curve) // 3)
    a, b = statistics.fmean(curve[-last:]), statistics.fmean(reference[-last:])
    ok = math.isfinite(a) and math.isfinite(b) and abs(a / b - 1) <= within
    return Line(what, "PASS" if ok else "FAIL", f"{a:.4f} beside {b:.4f}, {a / b - 1:+.2%}", wanted)


LAUNCH = "a kernel's launch"  # as bench_ops names it
SOFTWARE = re.compile(r"\be2m3\b|\be3m2\b|\be2m1\b")  # formats that only Blackwell converts by instruction
BY_SOFTWARE = "; converted by software here: for information"


OF_MX = 0.7  # of MX's speed that a quantizer of another scaling reaches


def lacks_instructions(card):
    """Returns whether a card converts the formats of SOFTWARE, and NVFP4's codes, by software."""
    return card is not None and card.capability < 100


def judge_scaling(o, operations, seconds_of, card):
    """Judges a scaling's quantizer by its speed over that of MX's, of the same shape, both as codes or both as BF16, and that
    of FP32 weights in squares, one copy, by that over MX's two. It is for information where the bytes that must be moved,
    twice read for an amax, already take too long, and where NVFP4's codes are made by software."""
    line = Line(f"{o['name']} {o['shape']} over {o['beside']}", "NOT RUN", "that wasn't measured", f"at least {OF_MX:g}")
    mx = next((m for m in operations if (m["name"], m["shape"]) == (o["beside"], o["shape"])), None)
    if not mx:
        return line
    ratio, by_bytes = seconds_of(mx) / seconds_of(o), mx["work"] / o["work"]
    line.seen, line.verdict = f"{ratio:.2f} of its speed", "PASS" if ratio >= OF_MX else "FAIL"
    if by_bytes < OF_MX:
        line.seen, line.counts = f"{line.seen}, {by_bytes:.2f} by its bytes alone: for information", False
    elif "nvfp4" in o["name"] and lacks_instructions(card):
        line.seen, line.counts = line.seen + BY_SOFTWARE, False
    return line


def judge_operations(operations, card):
    """Judges each operation of bench_ops that has a bar, a launch's time taken off where there is one."""
    floor = next((o["seconds"] for o in operations if o["name"] == LAUNCH), 0)

    def net_seconds(o):
        return max(o["seconds"] - floor, 1e-3 * o["seconds"])

    lines = [judge_scaling(o, operations, net_seconds, card) for o in operations if o.get("beside")]
    for o in operations:
        if o["required"] <= 0 or o["name"] == LAUNCH:
            continue
        ratio = o["work"] / net_seconds(o) / o["limit_per_second"]
        informs = bool(SOFTWARE.search(o["name"])) and lacks_instructions(card)
        note = BY_SOFTWARE if informs else ""
        lines.append(Line(f"{o['name']} {o['shape']}", "PASS" if ratio >= o["required"] else "FAIL",
                          f"{ratio:.2f} of {o['limit']}{note}", f"at least {o['required']:g}", counts=not informs))
    return lines or [Line("operations", "NOT RUN", "bench_ops measured none")]


def verdict_of(lines):
    """Returns the verdict over all lines, as a word and a sentence."""
    counted = [line.verdict for line in lines if line.counts]
    numbers = {v: counted.count(v) for v in ("PASS", "FAIL", "UNCLEAR", "NOT RUN")}
    word = next((word for v, word in (("FAIL", "FAIL"), ("UNCLEAR", "UNCLEAR"), ("NOT RUN", "INCOMPLETE"))
                 if numbers[v]), "PASS" if numbers["PASS"] else "INCOMPLETE")
    return word, ", ".join(f"{count} {v}" for v, count in numbers.items())


# The planner --------------------------------------------------------------------------------------------------------

ALL_GEMMS = "gemm: all of a training step"  # as bench_ops names it


FRACTIONS = ("gemm", "native", "block128", "attention", "memory")  # as cards.h has them


def rate(operations):
    """Returns the work of operations a second, None of no operation."""
    return sum(o["work"] for o in operations) / sum(o["seconds"] for o in operations) if operations else None


def efficiencies(operations, card):
    """Returns the fractions of the official peaks, and of the memory's bandwidth, that GEMMs, native ones, those of them
    by blocks of 128, attention and memory-bound operations reached: what the planner assumes of a card
    (llmc/run/cards.h). None for what wasn't measured."""
    peak = card.official_flops or card.clock_flops

    def of_peak(operations, times=1):
        return rate(operations) / (times * peak) if operations and peak else None

    def linears(scaling):
        return [o for o in operations if re.fullmatch(rf"{scaling} \w+ (fprop|dgrad|wgrad)", o["name"])]

    attention = [o for o in operations if o["name"] in ("attention_forward", "attention_backward, out kept")]
    memory = [o["per_second"] for o in operations if o["limit"] == "memcpy" and o["required"] > 0
              and not SOFTWARE.search(o["name"])]
    return {"gemm": of_peak([o for o in operations if o["name"] == ALL_GEMMS]),
            "native": of_peak(linears("mxfp8" if card.capability >= 100 else "tensor"), 2),
            "block128": of_peak(linears("block128"), 2),
            "attention": of_peak(attention),
            "memory": statistics.median(memory) / card.bandwidth if memory and card.bandwidth else None}


def cards_table(text, name, fractions):
    """Returns cards.h with a card's fractions replaced by measured ones; None where it has no such card."""
    row = re.compile(rf'^(CARD\("{re.escape(name)}",.*?(?:true|false)),'
                     + ",".join([r" *([\d.]+)"] * len(FRACTIONS)) + r"\)$", re.MULTILINE)
    found = row.search(text)
    if not found:
        return None
    values = [old if new is None else f"{new:.2f}"
              for old, new in zip(found.groups()[1:], (fractions[k] for k in FRACTIONS))]
    return text[:found.start()] + f"{found.group(1)}, {', '.join(values)})" + text[found.end():]
