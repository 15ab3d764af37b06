"""What dev/gpu/check.sh saw, as report.md and report.json.

usage: report.py DIRECTORY COMMIT CARD BATCH    DIRECTORY holds the steps' logs, the runs, bench.jsonl and rows.tsv
"""

import datetime
import json
import re
import statistics
import sys
from pathlib import Path

# Wanted of tokens/s: those of emulated mxfp8 over bf16's, and bf16's over the speed of light.
MXFP8_OF_BF16 = {"124M": 0.8, "1558M": 0.9}
SPEED_OF_LIGHT = 0.5
SQUARE = "[8192, 8192]"
# Ways to emulate a GEMM of an operand that is made for it, as bench_ops names them.
TO_BF16, TO_CODES = "quantize to bf16, up wgrad", "quantize to codes, up wgrad"
WARM_UP = 2  # steps that also make what later ones reuse


def read(path):
    return path.read_text(errors="replace") if path.exists() else ""


def read_json_lines(path):
    """Reads JSON lines, of which the last may be cut: a program that was ended may have stopped
    within it."""
    values = []
    for line in read(path).splitlines():
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:
            pass
    return values


def peaks(device_info):
    """Returns the card's own FLOP/s and whether it multiplies MXFP8 natively, as --device-info has
    them."""
    found = {}
    for name in ("BF16", "FP8"):
        match = re.search(rf"^  {name} +([\d.]+) TFLOP/s expected", device_info, re.MULTILINE)
        found[name] = float(match.group(1)) * 1e12 if match else None
    found["native"] = bool(re.search(r"^  MXFP8 +native", device_info, re.MULTILINE))
    return found


def light_seconds(config, peak):
    """Returns the seconds of a token if every FLOP ran at its peak: FP8's for those of quantized
    layers that are multiplied natively."""
    if not peak["BF16"]:
        return None
    native = peak["native"] and config["recipe"]["name"].startswith("mxfp8") and "emulated" not in config["command"]
    model = config["model"]
    quantized = 6 * 12 * model["layers"] * model["channels"] ** 2 if native else 0
    return quantized / (peak["FP8"] or peak["BF16"]) + (config["flops_per_token"] - quantized) / peak["BF16"]


def run_row(out, name, events, peak):
    config = next(e for e in events if e["event"] == "config")
    trained = [e for e in events if e["event"] == "train"]
    tokens_per_second = statistics.median(e["tokens_per_second"] for e in trained[WARM_UP:])
    flops = tokens_per_second * config["flops_per_token"]
    light = light_seconds(config, peak)
    memory = re.search(r"^  total +([\d.]+) (\S?)B", read(out / f"{name}.log"), re.MULTILINE)
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
    return {"name": name, "tokens_per_second": tokens_per_second, "model_flops_per_second": flops,
            "of_large_gemm": flops / config["gemm_flops_per_second"],
            "of_speed_of_light": tokens_per_second * light if light else None,
            "memory_bytes": float(memory.group(1)) * scale[memory.group(2)] if memory else None,
            "last_loss": trained[-1]["loss"]}


def llmc_speed(out, batch):
    """Returns the tokens/s of llm.c's train_gpt2cu, whose lines say how many milliseconds a step
    took."""
    times = [float(ms) for ms in re.findall(r"^step +\d+/\d+ .*\| ([\d.]+) ms", read(out / "llmc.log"), re.MULTILINE)]
    return batch * 1024 / statistics.median(times[WARM_UP:]) * 1e3 if len(times) > WARM_UP else None


def bar(name, value, required, at_most=False):
    met = None if value is None else value <= required if at_most else value >= required
    return {"bar": name, "value": value, "required": required, "met": met}


def ratio(values, a, b):
    return values[a] / values[b] if values.get(a) and values.get(b) else None


def bars_of(runs, operations, llmc):
    speed = {run["name"]: run["tokens_per_second"] for run in runs}
    memory = {run["name"]: run["memory_bytes"] for run in runs}
    light = {run["name"]: run["of_speed_of_light"] for run in runs}
    bars = [bar("bf16, 124M: tokens/s over llm.c's", speed["speed-124M-bf16"] / llmc
                if llmc and "speed-124M-bf16" in speed else None, 1)]
    for model, required in MXFP8_OF_BF16.items():
        name = f"speed-{model}-mxfp8"
        emulated = f"{name}-emulated" if f"{name}-emulated" in speed else name
        bars.append(bar(f"mxfp8 emulated, {model}: tokens/s over bf16's",
                        ratio(speed, emulated, f"speed-{model}-bf16"), required))
    bars.append(bar("bf16, 1558M: of the speed of light", light.get("speed-1558M-bf16"), SPEED_OF_LIGHT))
    for model in MXFP8_OF_BF16:
        bars.append(bar(f"{model}: memory of mxfp8 over bf16's", ratio(memory, f"speed-{model}-mxfp8",
                                                                      f"speed-{model}-bf16"), 0.999, at_most=True))
    held = [o for o in operations if o["required"] > 0]
    square = [o for o in held if o["name"].startswith("quantize both e4m3 rceil") and o["shape"] == SQUARE]
    bars.append(bar("quantizer, both directions, 8192 x 8192: of copy bandwidth",
                    square[0]["ratio"] if square else None, square[0]["required"] if square else 0.85))
    others = [o for o in held if o not in square]
    worst = min(others, key=lambda o: o["ratio"] / o["required"], default=None)
    name = f"memory-bound operations, {len(others)}"
    if worst:
        name += f", the worst: {worst['name']} {worst['shape']}"
    bars.append(bar(name, worst["ratio"] if worst else None, worst["required"] if worst else 0.8))
    return bars


# Output -------------------------------------------------------------------------------------------------------------

def number(value, form):
    return "" if value is None else format(value, form)


def met_text(met):
    return {True: "met", False: "**not met**", None: "not measured"}[met]


def table(head, rows):
    return ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head),
            *("| " + " | ".join(row) + " |" for row in rows)]


def operation_row(o):
    held = o["required"] > 0
    return [o["name"], o["shape"], f"{o['seconds'] * 1e3:.3f}", f"{o['per_second'] / 1e9:.1f}", o["limit"],
            f"{o['limit_per_second'] / 1e9:.1f}", f"{o['ratio']:.2f}", number(o["required"] or None, ".2f"),
            met_text(o["ratio"] >= o["required"]) if held else ""]


def emulation_line(operations):
    seconds = {o["name"]: o["seconds"] for o in operations if o["name"] in (TO_BF16, TO_CODES)}
    if len(seconds) < 2:
        return []
    return ["", f"Emulated, 124M, up wgrad with what makes its operand: {seconds[TO_BF16] * 1e3:.3f} ms by BF16 values, "
            f"{seconds[TO_CODES] * 1e3:.3f} ms by codes that are decoded: "
            f"{seconds[TO_BF16] / seconds[TO_CODES]:.3f} of it."]


def profile_table(profiles):
    names = {operation: None for profile in profiles.values() for operation in profile["operations"]}
    rows = [[name, *(f"{p['operations'][name] * 1e3:.2f}" if name in p["operations"] else ""
                     for p in profiles.values())] for name in names]
    rows.append(["a step", *(f"{p['seconds'] * 1e3:.2f}" for p in profiles.values())])
    return table(["ms a step, each operation waited for", *profiles], rows)


def markdown(report, device_info):
    lines = [f"# {report['card']}, {report['date']}, commit {report['commit']}"]
    lines += table(["step", "", "seconds", "last line"],
                   [[s["step"], "ok" if s["exit"] == 0 else f"exit {s['exit']}", f"{s['seconds']}", s["last_line"]]
                    for s in report["steps"]])
    lines += table(["bar", "seen", "required", ""],
                   [[b["bar"], number(b["value"], ".3f"), f"{b['required']:g}", met_text(b["met"])]
                    for b in report["bars"]])
    lines += table(["run", "tokens/s, median", "model TFLOP/s", "of a large BF16 GEMM", "of the speed of light",
                    "memory, GB", "last loss"],
                   [[r["name"], f"{r['tokens_per_second']:.0f}", f"{r['model_flops_per_second'] / 1e12:.2f}",
                     f"{r['of_large_gemm']:.3f}", number(r["of_speed_of_light"], ".3f"),
                     number(r["memory_bytes"] and r["memory_bytes"] / 1e9, ".2f"), number(r["last_loss"], ".4f")]
                    for r in report["runs"]])
    if report["llmc_tokens_per_second"]:
        lines += ["", f"llm.c's train_gpt2cu, 124M, same batch: {report['llmc_tokens_per_second']:.0f} tokens/s."]
    if report["profiles"]:
        lines += profile_table(report["profiles"])
        lines += ["", "profile-1558M: 6 of its 48 layers."]
    lines += table(["operation", "shape", "ms", "G/s", "limit", "its G/s", "ratio", "required", ""],
                   [operation_row(o) for o in report["operations"]])
    lines += emulation_line(report["operations"])
    return "\n".join([*lines, "", "```", device_info.rstrip(), "```", ""])


def main():
    out, commit, card, batch = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    rows = [line.split("\t") for line in read(out / "rows.tsv").splitlines()]
    device_info = read(out / "device-info.log")
    runs, profiles = [], {}
    for log in sorted(out.glob("*/log.jsonl")):
        name, events = log.parent.name, read_json_lines(log)
        profiles |= {name: event for event in events if event["event"] == "profile"}
        if sum(event["event"] == "train" for event in events) > WARM_UP and not name.startswith("profile"):
            runs.append(run_row(out, name, events, peaks(device_info)))
    operations = read_json_lines(out / "bench.jsonl")
    llmc = llmc_speed(out, batch)
    report = {"date": datetime.date.today().isoformat(), "card": card, "commit": commit,
              "steps": [{"step": r[0], "exit": int(r[1]), "seconds": float(r[2]), "last_line": r[3]} for r in rows],
              "bars": bars_of(runs, operations, llmc), "runs": runs, "llmc_tokens_per_second": llmc,
              "profiles": profiles, "operations": operations}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.md").write_text(markdown(report, device_info))


if __name__ == "__main__":
    main()
