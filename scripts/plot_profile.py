#!/usr/bin/env python3
"""Draws where a step's time went, from the log of a run that was made with train_gpt_mxfp8 --profile."""

import re
from pathlib import Path

from logs import InputError, Parser, log_of, main_of, read_events
from plot import FORMATS, new_figure, save

COLORS = {"gemm": "#0072B2", "quantize": "#D55E00", "attention": "#009E73", "activation": "#E69F00", "layernorm": "#CC79A7",
          "adamw": "#7F3C8D"}
OTHERS = "#999999"


def color_of(operation):
    return COLORS.get(re.split("[ _]", operation)[0], OTHERS)


def read_profile(run):
    log = log_of(run)
    profiles = [event for event in read_events(log) if event["event"] == "profile"]
    if not profiles:
        raise InputError(f"{log} has no profile: make the run with --profile")
    return profiles[-1]


def draw_operations(axes, profile):
    step = profile["seconds"]
    operations = dict(profile["operations"])
    operations["between operations"] = max(0, step - sum(operations.values()))
    names = sorted(operations, key=operations.get)
    axes.barh(names, [1e3 * operations[name] for name in names], color=[color_of(name) for name in names])
    for y, name in enumerate(names):
        axes.annotate(f" {100 * operations[name] / step:.1f} %", (1e3 * operations[name], y), va="center", fontsize=8)
    axes.set_title(f"A step by operation: {1e3 * step:.0f} ms")
    axes.set_xlabel("ms")
    axes.margins(x=0.12)
    axes.grid(axis="y", visible=False)


def draw_layers(axes, profile):
    layers = list(profile["layers"])[::-1]
    left = [0.0] * len(layers)
    for operation in profile["operations"]:
        widths = [1e3 * profile["layers"][layer].get(operation, 0) for layer in layers]
        axes.barh(layers, widths, left=left, color=color_of(operation), edgecolor="white", linewidth=0.5)
        left = [a + b for a, b in zip(left, widths)]
    axes.set_title("by layer")
    axes.set_xlabel("ms")
    axes.grid(axis="y", visible=False)


def main(arguments):
    parser = Parser(description=__doc__)
    parser.add_argument("run", help="the run's directory, or its log.jsonl")
    parser.add_argument("--out", help="the picture (.png, .svg or .pdf); profile.png in the run's directory where it isn't given")
    options = parser.parse_args(arguments)
    profile = read_profile(options.run)
    out = Path(options.out) if options.out else log_of(options.run).parent / "profile.png"
    if out.suffix not in FORMATS:
        raise InputError(f"--out {out} must end in one of {', '.join(FORMATS)}")
    rows = max(len(profile["operations"]) + 1, len(profile["layers"]))
    figure = new_figure(12, 1 + 0.24 * rows)
    axes = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_operations(axes[0], profile)
    draw_layers(axes[1], profile)
    save(figure, out)
    print(out)


if __name__ == "__main__":
    main_of("plot_profile.py", main)
