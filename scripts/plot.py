#!/usr/bin/env python3
"""Draws the logs of any number of runs into one picture.

Loss, gradient norm, learning rate and throughput of all runs lie over one another, and so do gradients next to the
exact ones where runs logged them (train_gpt_mxfp8 --gradient-bias-every); the quantization statistics of each run that
has them (--quant-stats-every) get a row of their own. A vertical line marks where a run's recipe was switched
(--recipe-at, or another --recipe at a resume). Long curves are drawn smoothed, the raw values faint behind them.

With --live the picture is a page that a browser loads again and again, until all runs have ended.
"""

import argparse
import base64
import html
import io
import os
import time
from pathlib import Path

import numpy as np
from logs import InputError, Parser, Run, log_of, main_of, number, shortened, write_whole

FORMATS = (".png", ".svg", ".pdf")
SMOOTH_FROM = 200  # points; a shorter curve is drawn as it is
TASK_LINES = ("-", "--", ":", "-.")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#4D4D4D")
# the six operands: the color tells the tensor, the dash the GEMM
OPERAND_COLORS = {"x": "#0072B2", "w": "#009E73", "dy": "#D55E00"}
GEMM_DASHES = {"fprop": "-", "dgrad": "--", "wgrad": (0, (1, 1.2))}
VAL = {"linewidth": 1, "linestyle": ":", "marker": "o", "markersize": 4.5, "markerfacecolor": "white"}
SWITCH = {"linewidth": 0.9, "linestyle": (0, (4, 3))}
MARK = {"linestyle": "none", "marker": "x", "markersize": 6}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "savefig.dpi": 160,
}


def new_figure(width, height):
    """Returns a figure of this style, `width` by `height` inches, that isn't shown on a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt.figure(figsize=(width, height), layout="constrained")


def smoothed(values):
    """Returns a mean over a fiftieth of the curve around each point, NaNs left out; at the start,
    where a loss falls steeply, over as many points after it as there are before it."""
    half = max(1, len(values) // 100)
    known = np.isfinite(values)
    sums = np.concatenate([[0], np.cumsum(np.where(known, values, 0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    i = np.arange(len(values))
    reach = np.minimum(half, i)
    low, high = i - reach, np.minimum(i + reach + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def plain(text):
    """Returns what matplotlib draws as this text, dollars too: between two it would read a formula."""
    return text.replace("$", r"\$")


def draw_curve(axes, steps, values, color, smooth=True):
    if smooth and len(steps) >= SMOOTH_FROM:
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=0.6)
        values = smoothed(values)
    axes.plot(steps, values, color=color, linewidth=1.4)


def are_proxies(runs):
    """Whether losses are a proxy's: squared errors, or a divergence."""
    return all(run.config.get("program") == "proxy" for run, _ in runs)


def draw_loss(axes, runs):
    for run, color in runs:
        steps, values = run.series(run.train, "loss")
        draw_curve(axes, steps, values, color)
        val_steps, val = run.series(run.val, "loss")
        axes.plot(val_steps, val, color=color, markevery=1 + len(val) // 50, **VAL)
    axes.set(title="Loss", ylabel=None if are_proxies(runs) else "nats per token", xlabel="step")


def mark_not_finite(axes, runs):
    for run, color in runs:
        steps, values = run.series(run.train, "loss")
        steps = steps[~np.isfinite(values)]
        axes.plot(steps, np.full(len(steps), 0.03), color=color, transform=axes.get_xaxis_transform(), **MARK)


def mark_switches(axes, runs, named=False):
    """Marks where the recipe changes, and to which."""
    for run, color in runs:
        for step, name in run.recipes[1:]:
            axes.axvline(step, color=color, **SWITCH)
            if named:
                style = {"color": color, "rotation": 90, "fontsize": 8, "transform": axes.get_xaxis_transform()}
                axes.text(step, 0.02, plain(f" {shortened(name)}"), **style)


def draw_bias(row, runs):
    """Draws the total, and faint behind it each layer."""
    panels = (("error_ratio", "Gradient error (L2) over exact gradient"), ("cosine", "Cosine to exact gradient"))
    for axes, (field, title) in zip(row, panels):
        for run, color in runs:
            for layer in zip(*(layers_of(event) for event in run.bias)):
                steps, values = run.series([{"step": e["step"], **part} for e, part in zip(run.bias, layer)], field)
                axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.6)
            point = "." if len(run.bias) == 1 else None
            axes.plot(*run.series(run.bias, field), color=color, linewidth=1.4, label=plain(run.label), marker=point)
        mark_switches(axes, runs)
        axes.set(title=title, xlabel="step")
    if any(number(event.get("error_ratio")) > 0 for run, _ in runs for event in run.bias):  # of fp32 alone all are 0
        row[0].set_yscale("log")


def draw_tasks(row, runs):
    """Draws what each task's questions said: a task has a line's style, and of a single run its color."""
    tasks = list(dict.fromkeys(str(event.get("task")) for run, _ in runs for event in run.eval))
    panels = (("accuracy", "Accuracy"), ("accuracy_by_characters", "Accuracy by characters"),
              ("bits_per_byte", "Bits per byte of right answers"))  # fmt: skip
    for axes, (field, title) in zip(row, panels):
        for run, color in runs:
            for i, task in enumerate(tasks):
                steps, values = run.series([e for e in run.eval if str(e.get("task")) == task], field)
                style = {"color": color if len(runs) > 1 else COLORS[i % len(COLORS)], "linestyle": TASK_LINES[i % len(TASK_LINES)]}
                if len(steps):
                    label = plain(f"{run.label}: {task}" if len(runs) > 1 else task)
                    axes.plot(steps, values, marker=".", label=label, **style)
        axes.set(title=title, xlabel="step")


def layers_of(event):
    layers = event.get("layers")
    return [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []


def draw_gap(axes, runs):
    """Draws how far each run's loss is from the first one's, where both have one: what two curves
    on top of each other hide. Validation losses, where each has two or more at steps of the first one's; else training
    losses, whose difference is smoothed. A proxy's, which fall by orders of magnitude, in percent."""
    (first, first_color), *others = runs
    in_percent = are_proxies(runs)
    base, *losses = (dict(zip(*run.series(run.val, "loss"))) for run, _ in runs)
    validated = all(len(base.keys() & of_run.keys()) > 1 for of_run in losses)
    if not validated:
        base, *losses = (dict(zip(*run.series(run.train, "loss"))) for run, _ in runs)
    axes.axhline(0, color=first_color, linewidth=1.4)
    for (_, color), of_run in zip(others, losses):
        steps = sorted(base.keys() & of_run.keys())
        gaps = np.array([100 * (of_run[step] / base[step] - 1) if in_percent else of_run[step] - base[step] for step in steps])
        axes.plot(steps, gaps if validated else smoothed(gaps), color=color, linewidth=1.4, marker=".")
    kind = "Validation" if validated else "Training"
    axes.set(title=f"{kind} loss, difference from {plain(first.label)}", xlabel="step",
             ylabel="% of the loss" if in_percent else "nats per token")


def draw_loss_legend(axes, runs):
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, linewidth=2.5, label=plain(label_with_result(run))) for run, color in runs]
    handles.append(Line2D([], [], color="#555555", linewidth=1.4, label="training"))
    if any(run.val for run, _ in runs):
        handles.append(Line2D([], [], color="#555555", label="validation", **VAL))
    if any(run.recipes[1:] for run, _ in runs):
        handles.append(Line2D([], [], color="#555555", label="recipe switched", **SWITCH))
    if any(not np.isfinite(run.series(run.train, "loss")[1]).all() for run, _ in runs):
        handles.append(Line2D([], [], color="#555555", label="not finite", **MARK))
    axes.legend(handles=handles, loc="upper right")


def label_with_result(run):
    steps, val = run.series(run.val, "loss")
    finite = np.isfinite(val)
    return (
        f"{run.label}, validation {val[finite][-1]:.4f} at step {steps[finite][-1]:,.0f}" if finite.any() else run.label
    )


def draw_field(axes, runs, field, title, smooth=True):
    for run, color in runs:
        draw_curve(axes, *run.series(run.train, field), color, smooth)
    axes.set_title(title)


def draw_quant(row, run):
    """Draws each operand's median over all layers and linears, and, shaded, from the lowest to the
    highest."""
    panels = (
        ("sqnr_db", "Signal to quantization noise", "dB", 1),
        ("flushed", "Flushed to zero", "% of elements", 100),
        ("at_max", "At the largest code (thin: clamped)", "% of elements", 100),
    )
    operands = sorted({str(e.get("operand")) for e in run.quant}, key=operand_order)
    for axes, (field, title, unit, factor) in zip(row, panels):
        bottoms, tops = [], []
        for operand in operands:
            events = [e for e in run.quant if str(e.get("operand")) == operand]
            style = operand_style(operand)
            steps, (low, median, high) = spread_by_step(*run.series(events, field))
            axes.fill_between(steps, factor * low, factor * high, color=style["color"], alpha=0.07, linewidth=0)
            bottoms.extend(low if operand != "gain" else median)
            tops.extend(high if operand != "gain" else [])
            point = "." if len(steps) == 1 else None  # a line of one point can't be seen
            axes.plot(steps, factor * median, label=operand, marker=point, **style)
            if field == "at_max":
                steps, (_, median, _) = spread_by_step(*run.series(events, "clamped"))
                axes.plot(steps, factor * median, **{**style, "linewidth": 0.6, "alpha": 1})
        axes.set(title=title, ylabel=unit, xlabel="step")
        if factor == 100:
            axes.set_ylim(bottom=0)
        elif tops:  # gains begin as ones, exact, and differ by layer: their spread would press the others into one line
            margin = 0.05 * (max(tops) - min(bottoms)) or 1
            axes.set_ylim(min(bottoms) - margin, max(tops) + margin)


def operand_order(operand):
    gemm, _, tensor = operand.partition("-")
    order = [*GEMM_DASHES]
    return (order.index(gemm) if gemm in order else len(order), tensor, operand)


def operand_style(operand):
    """Returns how an operand is drawn. A tensor's two copies often have one and the same curve: the
    first is a wide pale line, which the second is seen upon."""
    gemm, _, tensor = operand.partition("-")
    is_first = operand in ("fprop-x", "fprop-w", "dgrad-dy")
    return {
        "color": OPERAND_COLORS.get(tensor, "#777777"),
        "linestyle": "-" if is_first else GEMM_DASHES.get(gemm, "-."),
        "linewidth": 4 if is_first else 1.5,
        "alpha": 0.4 if is_first else 1,
    }


def spread_by_step(steps, values):
    """Returns steps, and the lowest, the median and the highest finite value at each."""
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    unique, first = np.unique(steps, return_index=True)
    groups = np.split(values, first[1:]) if len(unique) else []
    return unique, np.array([[f(g) for g in groups] for f in (np.min, np.median, np.max)]).reshape(3, len(unique))


def plain_numbers():
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:g}")


def make_logarithmic(axes, which="y"):
    from matplotlib.ticker import LogLocator, NullFormatter

    class Locator(LogLocator):
        """At 1, 2 and 5 of each decade; of many decades, of which LogLocator would then mark none, at their beginnings."""

        def tick_values(self, vmin, vmax):
            self.set_params(subs=(1, 2, 5) if vmax <= 1e4 * vmin else (1,))
            return super().tick_values(vmin, vmax)

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(Locator())
    axis.set_major_formatter(plain_numbers())
    axis.set_minor_formatter(NullFormatter())


def same_scale(panels, bottom=None):
    """Gives panels one vertical scale: from `bottom`, or the lowest limit that one of them has, to the highest."""
    limits = np.array([axes.get_ylim() for axes in panels])
    for axes in panels:
        axes.set_ylim(limits[:, 0].min() if bottom is None else bottom, limits[:, 1].max())


def draw_training(part, runs):
    from matplotlib.ticker import EngFormatter

    grid = part.add_gridspec(3, 2, width_ratios=[1.75, 1])
    loss = part.add_subplot(grid[: 2 if len(runs) > 1 else 3, 0])
    draw_loss(loss, runs)
    mark_not_finite(loss, runs)
    mark_switches(loss, runs, named=True)
    draw_loss_legend(loss, runs)
    if len(runs) > 1:
        draw_gap(part.add_subplot(grid[2, 0]), runs)
    norm, rate, throughput = (part.add_subplot(grid[i, 1], sharex=loss) for i in range(3))
    draw_field(norm, runs, "grad_norm", "Gradient norm (L2)")
    make_logarithmic(norm)
    mark_switches(norm, runs)
    draw_field(rate, runs, "learning_rate", "Learning rate", smooth=False)
    rate.yaxis.set_major_formatter(plain_numbers())
    draw_field(throughput, runs, "tokens_per_second", "Throughput (tokens/s)")
    throughput.yaxis.set_major_formatter(EngFormatter(sep=""))
    throughput.set_ylim(bottom=0)
    throughput.set_xlabel("step")
    for axes in (norm, rate):
        axes.tick_params(labelbottom=False)


def add_caption(part, text):
    part.suptitle(plain(text), fontsize=9, color="#555555", x=0.01, ha="left")


def draw(runs):
    with_tasks = [(run, color) for run, color in runs if run.eval]
    with_bias = [(run, color) for run, color in runs if run.bias]
    with_quant = [run for run, _ in runs if run.quant]
    top, row_height, rows = 5.6, 2.9, bool(with_tasks) + bool(with_bias) + len(with_quant)
    figure = new_figure(12, top + row_height * rows)
    first, *parts = figure.subfigures(1 + rows, height_ratios=[top] + [row_height] * rows, squeeze=False)[:, 0]
    draw_training(first, runs)
    if with_tasks:
        part, *parts = parts
        add_caption(part, "Questions of tasks")
        row = part.subplots(1, 3)
        draw_tasks(row, with_tasks)
        part.legend(*row[2].get_legend_handles_labels(), loc="outside right center")
    if with_bias:
        part, *parts = parts
        add_caption(part, "Gradients next to the exact ones: of all parameters, and faint of each layer's")
        row = part.subplots(1, 2)
        draw_bias(row, with_bias)
        if len(runs) > 1:
            part.legend(*row[0].get_legend_handles_labels(), loc="outside right center")
    for part, run in zip(parts, with_quant):
        label = run.label_over(run.recipes_of(run.quant))
        add_caption(part, f"Quantization, {label}: median over layers and linears, shaded from lowest to highest")
        row = part.subplots(1, 3)
        draw_quant(row, run)
        part.legend(*row[0].get_legend_handles_labels(), loc="outside right center", title="operand")
    return figure


def save(figure, out):
    """Replaces the picture whole or not at all; makes its directory."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.stem}.tmp{out.suffix}")
    try:
        figure.savefig(temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# A page that is drawn anew as the logs grow

BELL_WINDOW = 128  # steps that a step is compared with, as --skip-outliers does
BELL_DEVIATIONS = 6  # standard deviations above their mean: what chance alone doesn't do in a run
PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8">{refresh}<title>{title}</title></head>
<body style="font: 15px system-ui, sans-serif; color: #222">
<p>{states}; drawn {date}</p>
<img alt="Curves of the runs" style="max-width: 100%" src="data:image/png;base64,{picture}">
</body></html>
"""


def page(runs, every, ended):
    """Returns the runs' picture in a page that loads itself again while they go on."""
    import matplotlib.pyplot as plt

    figure, picture = draw(runs), io.BytesIO()
    figure.savefig(picture, format="png")
    plt.close(figure)
    states = ", ".join(f"{run.label}: step {run.last_step:,}, {run.state}" for run, _ in runs)
    return PAGE.format(
        refresh="" if ended else f'<meta http-equiv="refresh" content="{every:g}">',
        title=html.escape(", ".join(run.name for run, _ in runs)),
        states=html.escape(states),
        date=time.strftime("%Y-%m-%d %H:%M:%S"),
        picture=base64.b64encode(picture.getvalue()).decode(),
    )


def spikes(run, after):
    """Returns (step, sentence) for each step past `after` that wasn't applied, or whose loss or gradient norm isn't finite
    or stands out above those before it."""
    found = [(e["step"], f"not applied, {e['skipped']}") for e in run.train if e["step"] > after and "skipped" in e]
    for field in ("loss", "grad_norm"):
        steps, values = run.series(run.train, field)
        for i in np.flatnonzero(steps > after):
            before = values[:i][np.isfinite(values[:i])][-BELL_WINDOW:]
            if not np.isfinite(values[i]):
                found.append((int(steps[i]), f"{field} isn't finite"))
            elif len(before) == BELL_WINDOW and values[i] > before.mean() + BELL_DEVIATIONS * before.std():
                found.append((int(steps[i]), f"{field} {values[i]:.4g}, {before.mean():.4g} in the steps before"))
    return sorted(found)


def ring(run, after):
    """Rings the terminal's bell once, and says why, where there are spikes past the step `after`."""
    for i, (step, sentence) in enumerate(spikes(run, after)):
        print(f"{'' if i else chr(7)}{run.label}: step {step}: {sentence}", flush=True)


def draw_live(paths, labels, out, every, bell):
    """Draws the page whenever a log has grown, until all runs have ended."""
    drawn, last_steps = None, None
    while True:
        runs = [Run(path, label) for path, label in zip(paths, labels)]
        ended = all(run.end for run in runs)
        colored = [(run, COLORS[i % len(COLORS)]) for i, run in enumerate(runs) if run.train or run.val]
        now = [(run.last_step, run.end) for run in runs]
        if colored and now != drawn:
            write_whole(out, page(colored, every, ended))
            if drawn is None:
                print(out, flush=True)
            drawn = now
        for run, last in zip(runs, last_steps or ()):
            if bell:
                ring(run, last)
        last_steps = [run.train[-1]["step"] if run.train else -1 for run in runs]
        if ended and not colored:
            raise InputError("the runs ended before their first step: there is nothing to draw")
        if ended:
            return
        time.sleep(every)


def run_to_draw(path, label):
    run = Run(path, label)
    if not run.train and not run.val:
        raise InputError(f"{run.log} has no step yet: let the run make one")
    return run


def check_live(options, out):
    if out.suffix != ".html":
        raise InputError(f"--out {out} must end in .html with --live")
    if not 1 <= options.every <= 86400:
        raise InputError(f"--every {options.every:g}: give seconds, from 1 to a day")


def main(arguments):
    parser = Parser(
        prog="plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="a run's --out-dir, or a log.jsonl itself")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to draw, .png, .svg or .pdf, with --live .html (default: RUN_DIR/plot.png; plot.png for several runs)",
    )
    parser.add_argument(
        "--labels", nargs="+", metavar="NAME", help="a name for each run (default: its own, recipe and tags)"
    )
    parser.add_argument(
        "--live", action="store_true", help="draw a page that reloads itself, until all runs have ended (default: plot.html)"
    )
    parser.add_argument(
        "--every", type=float, default=30, metavar="SECONDS", help="with --live: between two pages (default: %(default)s)"
    )
    parser.add_argument(
        "--bell", action="store_true",
        help="with --live: ring the terminal's bell at a step that isn't finite or wasn't applied, or whose loss or gradient "
        f"norm lies {BELL_DEVIATIONS} standard deviations above the last {BELL_WINDOW} steps'",
    )
    options = parser.parse_args(arguments)
    if options.bell and not options.live:
        raise InputError("--bell is for --live: give that too, or leave it out")
    labels = options.labels or [None] * len(options.runs)
    if len(labels) != len(options.runs):
        raise InputError(f"--labels names {len(labels)} runs of {len(options.runs)}: pass one name for each")
    name = "plot.html" if options.live else "plot.png"
    out = options.out or (log_of(options.runs[0]).parent / name if len(options.runs) == 1 else Path(name))
    if options.live:
        check_live(options, out)
        draw_live(options.runs, labels, out, options.every, options.bell)
        return
    if out.suffix not in FORMATS:
        raise InputError(f"--out {out} must end in one of {', '.join(FORMATS)}")
    runs = [
        (run_to_draw(path, label), COLORS[i % len(COLORS)])
        for i, (path, label) in enumerate(zip(options.runs, labels))
    ]
    save(draw(runs), out)
    print(out)


if __name__ == "__main__":
    main_of("plot.py", main)
