"""What dev/gpu/check.sh saw, as report.md, report.json and, where the planner knows the card, cards.h.

usage: report.py DIRECTORY COMMIT BATCH    DIRECTORY holds the steps' logs, the runs, turns/, bench.jsonl and rows.tsv;
                                           its last line is the verdict, and so is this program's. Exit 0: PASS.
"""

import dataclasses
import datetime
import json
import math
import sys
from pathlib import Path

import verdict

CURVE_WITHIN = 0.01  # of bf16's loss: seeds of such runs differ by a few thousandths
# Names in cards.h, by the driver's.
PLANNED = [("H100 80GB", "h100"), ("H200", "h200"), ("GB200", "gb200"), ("B200", "b200")]
# Runs under --mx-gemm native, by what --device-info says that the card multiplies so.
NATIVE_RUNS = [("MXFP8", "native"), ("NVFP4", "native-nvfp4")]
TO_BF16, TO_CODES = "quantize to bf16, up wgrad", "quantize to codes, up wgrad"


def read(path):
    return path.read_text(errors="replace") if path.exists() else ""


def read_turns(out, batch):
    """Returns turns and clocks of turns/MODEL/CONTENDER-ROUND, each by model and contender, a list over rounds."""
    turns, clocks = {}, {}
    for directory in sorted((out / "turns").glob("*/*")):
        if not directory.is_dir():
            continue
        contender = directory.name.rpartition("-")[0]
        if contender.startswith("llmc"):
            turn = verdict.turn_of_llmc(read(directory / "console.log"), batch * 1024)
        else:
            turn = verdict.turn_of_log(read(directory / "log.jsonl"))
        turns.setdefault(directory.parent.name, {}).setdefault(contender, []).append(turn)
        clocks.setdefault(directory.parent.name, {}).setdefault(contender, []).append(
            verdict.clocks_of(read(directory / "clocks.csv")))
    return turns, clocks


def losses(path):
    """Returns the losses of a log; NaN where it says null."""
    return [math.nan if e["loss"] is None else e["loss"] for e in verdict.json_lines(read(path)) if e.get("event") == "train"]


def lines_of(out, rows, card, turns, clocks, operations):
    """Returns the lines of the verdict, by section."""
    steps = [verdict.judge_step(name, int(code), float(seconds), last) for name, code, seconds, last in rows]
    curves = {name: losses(out / f"curve-{name}/log.jsonl") for name in ("bf16", "mxfp8")}
    special = [verdict.judge_curve("mxfp8", curves["mxfp8"], curves["bf16"], CURVE_WITHIN)]
    if card:
        checks = read(out / "test_cuda_gemm.log")
        special += [*verdict.judge_self_checks(checks), verdict.judge_large(checks)]
    for scaling, run in NATIVE_RUNS:
        if card and scaling in card.natives:
            events = verdict.json_lines(read(out / run / "log.jsonl"))
            special.append(verdict.judge_native_run(events, f"strictly native run, {scaling}"))
    goals = [verdict.judge_goal(goal, turns, card, clocks) for goal in verdict.GOALS] if card else \
        [verdict.Line(goal.name, "NOT RUN", "no card", f"at least {goal.wanted:g}") for goal in verdict.GOALS]
    return {"goals": goals, "correctness": special + steps, "operations": verdict.judge_operations(operations, card)}


# Output -------------------------------------------------------------------------------------------------------------

def table(head, rows):
    return ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head),
            *("| " + " | ".join(str(cell).replace("|", " ") for cell in row) + " |" for row in rows)]


def clocks_text(c):
    if not c:
        return "", "", "", ""
    return (f"{c.sm_mhz:.0f} ({c.sm_mhz_least:.0f})", f"{c.power_watts:.0f}", f"{c.temperature:.0f}",
            ", ".join(c.throttled) or "no")


def turn_rows(turns, clocks, card):
    """Yields a row for each turn: its speed, the fractions of both peaks, and the clocks beside it."""
    for model, contenders in turns.items():
        for name, rounds in contenders.items():
            for i, turn in enumerate(rounds):
                if not turn:
                    yield [model, name, i + 1, "nothing measured", "", "", "", "", "", "", ""]
                    continue
                flops = turn.tokens_per_second * turn.flops_per_token if turn.flops_per_token else None
                of = [f"{flops / peak:.3f}" if flops and peak else "" for peak in
                      (card.official_flops if card else None, card.clock_flops if card else None)]
                yield [model, name, i + 1, f"{turn.tokens_per_second:.0f}", f"{turn.seconds:.0f}", *of,
                       *clocks_text(clocks[model][name][i])]


def figures(operations):
    """Returns a table of the operations that have neither a bar nor an operation beside them."""
    rows = [[f"{o['name']} {o['shape']}", f"{o['seconds'] * 1e3:.3f}", f"{o['ratio']:.2f} of {o['limit']}"]
            for o in operations if o["required"] <= 0 and not o.get("beside")]
    return table(["operations without a bar", "ms", ""], rows) if rows else []


def clocks_line(what, path):
    """Returns a line of the clocks sampled into a file; none where there were none."""
    clocks = verdict.clocks_of(read(path))
    if not clocks:
        return []
    mhz, watts, temperature, throttled = clocks_text(clocks)
    return ["", f"{what}: SM at {mhz} MHz, {watts} W, {temperature} °C, throttled: {throttled}."]


def timelines(out):
    """Returns the kernels that took most of a run's time, as nsys has them, of each recipe that it watched."""
    lines = []
    for log in sorted(out.glob("timeline-*.log")):
        kernels = verdict.kernels_of(read(log))
        if kernels:
            lines += ["", f"## {log.stem}: kernels by nsys", "", "```", *(line[:200] for line in kernels), "```"]
            lines += clocks_line("Clocks beside it", out / f"{log.stem}-clocks.csv")
    return lines


def emulation_line(operations):
    seconds = {o["name"]: o["seconds"] for o in operations if o["name"] in (TO_BF16, TO_CODES)}
    if len(seconds) < 2:
        return []
    return ["", "Emulated, 124M, up wgrad with what makes its operand: "
            f"{seconds[TO_BF16] * 1e3:.3f} ms by BF16 values, "
            f"{seconds[TO_CODES] * 1e3:.3f} ms by codes that are decoded."]


def profile_table(profiles):
    names = {operation: None for profile in profiles.values() for operation in profile["operations"]}
    def cell(profile, name):
        seconds = profile["operations"].get(name)
        return "" if seconds is None else f"{seconds * 1e3:.2f}"
    rows = [[name, *(cell(p, name) for p in profiles.values())] for name in names]
    rows.append(["a step", *(f"{p['seconds'] * 1e3:.2f}" for p in profiles.values())])
    return table(["ms a step, each operation waited for", *profiles], rows)


def devices(out):
    """Returns what runs' logs say of the device, by the run's directory."""
    return {str(log.parent.relative_to(out)): event["device"] for log in sorted(out.glob("**/log.jsonl"))
            for event in verdict.json_lines(read(log))[:1] if event.get("event") == "config"}


def attention_of_runs(said):
    """Returns what attention runs on and cuDNN's engines forward and backward, each with the runs that
    had them: shapes have engines of their own."""
    runs = {}
    for run, device in said.items():
        attention = verdict.attention_of(device)
        if attention:
            runs.setdefault(attention, []).append(run)
    return [{"by": by, "forward": forward, "backward": backward, "runs": names}
            for (by, forward, backward), names in runs.items()]


def device_lines(out):
    said = devices(out)
    lines = ["", f"The device as runs have it: {next(iter(said.values()))}"] if said else []
    rows = [[a["by"], a["forward"], a["backward"], ", ".join(a["runs"])] for a in attention_of_runs(said)]
    return lines + (table(["attention by", "forward", "backward", "runs"], rows) if rows else [])


def markdown(title, sections, card, turns, clocks, operations, profiles, out):
    lines = [f"# {title}"]
    for name, section in sections.items():
        lines += ["", f"## {name}"]
        lines += table(["", "", "seen", "wanted"],
                       [[line.verdict + ("" if line.counts else ", for information"), line.what, line.seen, line.wanted]
                        for line in section])
    lines += ["", "## turns", "", "Contenders in turn; clocks are medians, in brackets the lowest."]
    if card:
        official = f"{card.official_flops / 1e12:g} TFLOP/s" if card.official_flops else "not known"
        clock = f"{card.clock_flops / 1e12:g}" if card.clock_flops else "not known"
        lines += [f"Dense BF16 peak: official {official}; at the highest clock {clock}."]
    lines += table(["model", "contender", "round", "tokens/s", "seconds", "of the official peak", "of the clock's",
                    "SM MHz", "W", "°C", "throttled"], turn_rows(turns, clocks, card))
    if profiles:
        lines += profile_table(profiles)
        for name in profiles:
            lines += clocks_line(f"Beside {name}", out / name / "clocks.csv")
    lines += figures(operations) + clocks_line("While operations were timed", out / "bench-clocks.csv")
    lines += emulation_line(operations) + device_lines(out) + timelines(out)
    for name in ("versions", "device-info"):
        lines += ["", "```", read(out / f"{name}.log").rstrip(), "```"]
    return lines


def main():
    out, commit, batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rows = [fields for line in read(out / "rows.tsv").split("\n") if len(fields := line.split("\t")) == 4]
    card = verdict.card_of(read(out / "device-info.log"))
    operations = verdict.json_lines(read(out / "bench.jsonl"))
    turns, clocks = read_turns(out, batch)
    profiles = {log.parent.name: event for log in sorted(out.glob("profile-*/log.jsonl"))
                for event in verdict.json_lines(read(log)) if event.get("event") == "profile"}
    sections = lines_of(out, rows, card, turns, clocks, operations)
    word, counts = verdict.verdict_of([line for section in sections.values() for line in section])
    name = card.name if card else "no card"
    date = datetime.date.today().isoformat()
    fractions = verdict.efficiencies(operations, card) if card else None
    planned = next((short for part, short in PLANNED if card and part in card.name), None)
    cards = verdict.cards_table(read(Path("llmc/run/cards.h")), planned, fractions) if planned else None
    if cards:
        (out / "cards.h").write_text(cards)
    (out / "report.json").write_text(json.dumps({
        "date": date, "card": name, "commit": commit, "verdict": word, "efficiencies": fractions,
        "lines": {k: [dataclasses.asdict(line) for line in v] for k, v in sections.items()},
        "turns": {m: {c: [t and dataclasses.asdict(t) for t in r] for c, r in v.items()} for m, v in turns.items()},
        "clocks": {m: {c: [t and dataclasses.asdict(t) for t in r] for c, r in v.items()} for m, v in clocks.items()},
        "attention": attention_of_runs(devices(out)), "profiles": profiles, "operations": operations}, indent=1) + "\n")
    lines = markdown(f"{name}, {date}, commit {commit}", sections, card, turns, clocks, operations, profiles, out)
    if fractions:
        lines += ["", "For the planner, of peaks and bandwidth: " + ", ".join(
            f"{k} {v:.2f}" if v else f"{k} not measured" for k, v in fractions.items())
            + (": cards.h beside this report has them." if cards else ".")]
    last = f"VERDICT: {word} ({counts})"
    (out / "report.md").write_text("\n".join([*lines, "", last, ""]))
    for section in sections.values():
        for line in section:
            print(f"{line.verdict:8} {line.what}" + (f": {line.seen}" if line.seen else ""))
    print(last)
    sys.exit(0 if word == "PASS" else 1)


if __name__ == "__main__":
    main()
