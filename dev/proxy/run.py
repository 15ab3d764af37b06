#!/usr/bin/env python3
"""Runs the proxy's experiments (arXiv:2506.20752, sections 5 and 6), each to a table and a picture.

    reference      twins, FP32 and MXFP8 with floor scales and quantized layernorm gains
    interventions  from a state shortly before the divergence (or the largest error of the gradient) and from one well
                   before, on under other recipes
    seeds          rceil from step 0, and gains in FP32, against floor, some seeds each
    text           the same with the teacher of the paper's text and without label noise
    text_interventions  the interventions on that, under some seeds
    swiglu         the same with SwiGLU, the activation that is the least stable; BF16 and gains in FP32 too
    sweep          learning rate x depth x width x formats, each case under some seeds, as in those below
    activations    activation x layernorm
    optimizers     Adam, SGD with and without momentum, and a learning rate that falls
    inits          PyTorch's default initialisation, and a smaller one
    variants       KL divergence in place of the squared error, self-attention before each MLP
    authors        the arithmetic of the authors' program, each of its parts alone and all together
    authors_swiglu the same with SwiGLU, under more seeds: where losses jump, which part makes them
    all            these, in this order

A run is a directory in OUT_DIR/runs; one that has ended isn't run again, one that was cut off goes on from its last state.
Each experiment writes OUT_DIR/EXPERIMENT.md and .png.
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from logs import InputError, Parser, main_of, number, plural, read_events, write_whole  # noqa: E402
from paired import ENOUGH, difference_in_words, interval, is_seen, percent, reach, signed, verdict, visible  # noqa: E402
from plot import COLORS, new_figure, same_scale, save, smoothed  # noqa: E402
from report import commit, machine, markdown_table, wrapped  # noqa: E402
from runner import lock_directory  # noqa: E402

# What a scale changes of the program's defaults. `near` and `far`: steps before the divergence that interventions start
# at, the paper's at scale `paper`; they last twice `far`. The teacher is that of the authors' program, with which the
# paper's runs were made, with its label noise; `reference` shows the one of the paper's text too, without. How many seeds:
# `seeds` is for the experiments seeds, swiglu and authors_swiglu, `few` for text, text_interventions and authors, `of_cases`
# for each case of the others.
SCALES = {
    "paper": {
        "options": {"steps": 9000, "learning-rate": 6e-4, "teacher": "plain"},
        "seeds": 10,
        "few": 3,
        "of_cases": 3,
        "rates": (1e-5, 5e-5, 1e-4, 5e-4, 1e-3),
        "depths": (2, 4, 8),
        "widths": (256, 512, 1024),
        "sweep_steps": 4000,
        "near": 20,
        "far": 600,
        "save_every": 500,
    },
    "cpu": {
        "options": {"width": 128, "batch-size": 256, "steps": 4000, "learning-rate": 2e-3, "teacher": "plain"},
        "seeds": 10,
        "few": 3,
        "of_cases": 5,
        "rates": (1e-4, 1e-3, 4e-3, 1.6e-2),
        "depths": (2, 4),
        "widths": (64, 128),
        "sweep_steps": 1000,
        "near": 20,
        "far": 300,
        "save_every": 500,
    },
    "tiny": {
        "options": {"width": 32, "layers": 2, "batch-size": 64, "steps": 30, "learning-rate": 5e-3, "teacher": "plain",
                    "threads": 1},
        "seeds": 2,
        "few": 2,
        "of_cases": 2,
        "rates": (1e-3, 1e-2),
        "depths": (1,),
        "widths": (32,),
        "sweep_steps": 15,
        "near": 2,
        "far": 8,
        "save_every": 5,
    },
}

FP32 = {"recipe": "fp32"}
FLOOR = {"recipe": "mxfp8-ocp", "quantize-ln-affine": True}
RCEIL = {"recipe": "mxfp8", "quantize-ln-affine": True}
MIXED = {"recipe": "mxfp8-e5m2-gradients", "scale-rounding": "floor", "quantize-ln-affine": True}
MXFP6 = {"recipe": "mxfp6-e2m3", "scale-rounding": "floor", "quantize-ln-affine": True}
GAINS_KEPT = {"recipe": "mxfp8-ocp"}
TEXT = {"teacher": "residual", "label-noise": 0}
PARTS = {"layernorm in BF16": {"bf16-layernorm": True}, "GELU in BF16": {"bf16-activation": True},
         "linear layers by way of BF16": {"bf16-linear": True}, "the stream in FP32": {"fp32-stream": True},
         "norms' biases not trained": {"norm-bias-gradient": False}, "the teacher in MX": {"quantize-teacher": True}}
INTERVENTIONS = {
    "none": FLOOR,
    "FP32": FP32,
    "rceil": RCEIL,
    "no MX on gains": GAINS_KEPT,
    "forward only": FLOOR | {"recipe": "mxfp8-forward-only", "scale-rounding": "floor"},
    "BF16 weights": FLOOR | {"format-weights": "bf16", "format-gains": "e4m3"},
    "BF16 weights, no MX on gains": FLOOR | {"format-weights": "bf16"},
    "BF16 activations, forward": FLOOR | {"operand": "fprop-x=bf16"},
    "BF16 activations, both passes": FLOOR | {"format-activations": "bf16", "format-gradients": "bf16"},
}


class Run:
    """A run of the program: its log, and what is told of it in tables. `before`: the run whose state it started from."""

    def __init__(self, label, directory, command, before=None):
        self.label, self.directory, self.command = label, directory, command
        events = read_events(directory / "log.jsonl")
        train = [e for e in events if e["event"] == "train"]
        self.steps = np.array([e["step"] for e in train], float)
        self.loss = np.array([number(e["loss"]) for e in train])
        self.bias = [e for e in events if e["event"] == "gradient_bias"]
        self.twin = [e for e in events if e["event"] == "twin"]
        self.quant = [e for e in events if e["event"] == "quant"]
        self.spikes = sum(e.get("spike", False) for e in train)
        self.seconds = sum(e["seconds"] for e in train)  # of a resumed run all; run.py logs every step
        self.end = next(e for e in reversed(events) if e["event"] == "end")
        earlier = before.loss[before.steps < self.steps[0]] if before else np.zeros(0)
        self.diverged, self.excursions = departures(self.steps, self.loss, self.end["reason"], earlier)

    def final(self):
        """The median loss of the last twentieth of the steps; of a run that diverged none."""
        return np.nan if self.diverged is not None else float(np.median(self.loss[-max(1, len(self.loss) // 20) :]))

    def errors(self, events=None):
        """Steps, the gradient's errors relative to the exact one's norm, and the cosines of the two; of self.twin: to that
        of the FP32 twin."""
        events = self.bias if events is None else events
        return tuple(np.array([number(e[field]) for e in events]) for field in ("step", "error_ratio", "cosine"))

    def worst_bias(self):
        """The largest error and the lowest cosine."""
        _, errors, cosines = self.errors()
        return (np.nanmax(errors), np.nanmin(cosines)) if np.isfinite(errors).any() else (np.nan, np.nan)

    def event(self):
        """The step of the divergence or of the first excursion; where there was none, of the largest error of the gradient,
        as a median of five measurements."""
        if self.diverged is not None or self.excursions:
            return self.diverged if self.diverged is not None else self.excursions[0]
        steps, errors, _ = self.errors()
        typical = [np.nanmedian(errors[max(0, i - 2) : i + 3]) for i in range(len(errors))]
        return int(steps[np.nanargmax(typical)])


def departures(steps, loss, reason, earlier=(), factor=10, window=20):
    """Where `window` losses or more in a row are over `factor` times the lowest median of `window` losses before, those
    `earlier` than this run's among them: the step at which this began and lasted to the run's end (or at which the
    program stopped for its loss), None where it didn't; and the steps of those that came back."""
    losses = np.concatenate([earlier, loss])
    lowest, above, returned = np.inf, 0, []
    for i in range(len(losses)):
        if not losses[i] <= factor * lowest:
            above += 1
            continue
        if above >= window and i - above >= len(earlier):
            returned.append(int(steps[i - above - len(earlier)]))
        above = 0
        if i + 1 >= window:
            lowest = min(lowest, float(np.median(losses[i + 1 - window : i + 1])))
    lasts = above >= window or reason != "steps"
    return int(steps[max(0, len(loss) - max(above, 1))]) if lasts else None, returned


def has_effect(name, options):
    """Returns whether an option changes anything beside the others: the program refuses one that doesn't, but --option is
    given to every run."""
    layernorm = options.get("layernorm", True)
    needed = {"heads": options.get("attention"), "seq-len": options.get("attention"),
              "bf16-layernorm": layernorm, "norm-bias-gradient": layernorm,
              "momentum": options.get("optimizer") == "sgd", "final-learning-rate": options.get("schedule") == "cosine"}
    return needed.get(name, True)


# What experiments give every run themselves, and log-every, since they read all steps.
OWN_OPTIONS = ("recipe", "out-dir", "resume", "load", "log-every")


class Runner:
    def __init__(self, settings):
        self.settings = settings
        self.scale = SCALES[settings.scale]
        self.base = self.scale["options"] | dict(parse_option(text) for text in settings.option)
        if not isinstance(self.base["steps"], int):
            raise InputError(f"--option steps={self.base['steps']}: give a number of steps, such as 2000")
        if not isinstance(self.base["learning-rate"], (int, float)):
            raise InputError(f"--option learning-rate={self.base['learning-rate']}: give a number, such as 1e-3")
        self.out_dir = settings.out_dir

    def run(self, label, options, before=None):
        """The run of these options, made unless it is there already; from a state of the run `before`, which holds all but
        where it is computed."""
        base = {name: value for name, value in self.base.items() if before is None or name in ("threads", "device")}
        options = {**base, **options} if before is None else {**options, **base}
        moved = options | ({"load": Path(options["load"]).relative_to(self.out_dir)} if "load" in options else {})
        name = hashlib.sha1(" ".join(words(moved)).encode()).hexdigest()[:8]  # without the directory, which may be moved
        directory = next(self.out_dir.glob(f"runs/*-{name}"), None)
        if directory is None:
            slug = "".join(c if c.isalnum() else "-" for c in label.lower())
            directory = self.out_dir / "runs" / f"{slug}-{name}"
        arguments = words({name: value for name, value in options.items() if has_effect(name, options)})
        command = [str(self.settings.proxy), *arguments, "--out-dir", str(directory)]
        if not is_finished(directory):
            self.make(label, directory, self.resumable(options, command))
        return Run(label, directory, command, before)

    def resumable(self, options, command):
        """The command of a run that goes on from its last state where it was cut off."""
        states = [] if "save-every" in options else ["--save-every", str(self.scale["save_every"]), "--keep-states", "1"]
        return [*command, *states, "--resume"]

    def make(self, label, directory, command):
        start = time.monotonic()
        print(f"{label}: {shlex.join(command)}", flush=True)
        directory.mkdir(exist_ok=True)
        write_whole(directory / "commit.txt", commit() + "\n")  # the program may end when this script has
        try:
            done = subprocess.run([self.settings.proxy.resolve(), *command[1:]], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True, pass_fds=[self.settings.lock])
        except OSError as e:
            raise InputError(f"can't run {command[0]} ({e.strerror}): build it with make, or name it with --proxy") from None
        if done.returncode != 0:
            raise InputError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
        print(f"  {time.monotonic() - start:.0f} s", flush=True)

    def diagnosed(self, options):
        """With the diagnostics, some 100 times in a run."""
        every = max(1, self.base["steps"] // 100)
        return options | {"gradient-bias-every": every, "stats-every": every}

    def twinned(self, options):
        """With the diagnostics, and an FP32 twin trained beside."""
        diagnosed = self.diagnosed(options)
        return diagnosed | {"twin-every": diagnosed["stats-every"]}

    def reference(self, options={}):
        """FP32 and MX twins; the MX one saves states that interventions start from."""
        mx = self.run("floor, gains in MX", self.twinned(FLOOR) | options | {"save-every": self.scale["save_every"]})
        return [self.run("FP32", FP32 | options), mx]


def parse_option(text):
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--option takes NAME=VALUE, such as width=256, not '{text}'")
    if name in OWN_OPTIONS:
        raise InputError(f"--option {text}: --{name} is for the experiments to set; leave it out, or run build/proxy by itself")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def words(options):
    """Options of the program; True is a flag's."""
    made = []
    for name, value in options.items():
        if value is True:
            made.append(f"--{name}")
        elif value is False:
            made.append(f"--no-{name}")
        else:
            made += [f"--{name}", str(value)]
    return made


def is_finished(directory):
    try:
        return any(e["event"] == "end" for e in read_events(directory / "log.jsonl"))
    except InputError:
        return False


# ---------------------------------------------------------------------------------------------------------------------
# Tables and pictures


def sig(value, digits=3):
    return "-" if value is None or not np.isfinite(value) else f"{value:.{digits}g}"


def outcome(run):
    if run.diverged is not None:
        return f"at step {run.diverged}"
    return f"no; up from step {run.excursions[0]}, and back" if run.excursions else "no"


def table(header, rows):
    return markdown_table(header, [[str(cell) for cell in row] for row in rows]).rstrip()


def run_row(run, against):
    ratio = f"{run.final() / against.final():.3f}" if np.isfinite(run.final()) else "-"
    return [run.label, outcome(run), run.spikes, sig(run.final(), 4), ratio, *map(sig, run.worst_bias())]


RUN_HEADER = ["run", "diverged", "spikes", "final loss", "of FP32's", "highest ‖ε‖/‖ḡ‖", "lowest cosine"]


def new_panels(rows, cols, height=3.2, width=4.2):
    figure = new_figure(width * cols, height * rows)
    return figure, figure.subplots(rows, cols, squeeze=False)


def curve(i):
    """How the i-th of some runs is drawn."""
    return {"color": COLORS[i % len(COLORS)], "linestyle": ("-", "--", ":")[i // len(COLORS) % 3]}


def smooth_loss(run):
    return smoothed(run.loss) if len(run.loss) > 200 else run.loss


def draw_losses(axes, runs, title, legend=True):
    for i, run in enumerate(runs):
        color = curve(i)["color"]
        axes.plot(run.steps, run.loss, color=color, alpha=0.25, linewidth=0.5)
        axes.plot(run.steps, smooth_loss(run), linewidth=1.2, label=run.label, **curve(i))
        for step in [*run.excursions, *([run.diverged] if run.diverged is not None else [])]:
            axes.axvline(step, color=color, linewidth=0.7, linestyle=":")
    axes.set(title=title, xlabel="step", ylabel="loss", yscale="log")
    if legend:
        axes.legend(fontsize=7)


def draw_arms(axes, made, title, legend):
    """The losses of each arm's runs, in one color."""
    for i, (arm, runs) in enumerate(made.items()):
        for run in runs:
            axes.plot(run.steps, smooth_loss(run), color=COLORS[i], linewidth=0.7, alpha=0.7,
                      label=arm if run is runs[0] else None)
    axes.set(title=title, xlabel="step", ylabel="loss", yscale="log")
    if legend:
        axes.legend(fontsize=7)


def draw_errors(axes, runs, title, legend=True):
    """Against the exact gradients of the same weights; the line: as long as these."""
    draw_ratios(axes, [run.errors() for run in runs], [run.label for run in runs], 1, title, legend)


def draw_zeta(axes, runs, title):
    """Against the FP32 twin's gradients, each at its own weights, as the paper draws it, with its line at 2."""
    draw_ratios(axes, [run.errors(run.twin) for run in runs], [run.label for run in runs], 2, title, len(runs) > 1)


def draw_ratios(axes, measured, labels, line, title, legend):
    for i, (steps, errors, _) in enumerate(measured):
        axes.plot(steps, errors, linewidth=1, label=labels[i] if len(steps) else None, **curve(i))
    axes.axhline(line, color="0.5", linewidth=0.7)
    axes.set(title=title, xlabel="step", ylabel="‖ε‖/‖ḡ‖", yscale="log")
    if legend:
        axes.legend(fontsize=7)


def draw_cosines(axes, runs):
    for i, run in enumerate(runs):
        steps, _, cosines = run.errors()
        axes.plot(steps, cosines, linewidth=1, **curve(i))
    axes.axhline(0, color="0.5", linewidth=0.7)
    axes.set(title="Cosine of the gradient and the exact one", xlabel="step", ylim=(-1, 1.05))


def draw_clamped(axes, run, operand, linear, title):
    """Solid: in the last bin; dashed: clamped to it."""
    chosen = [e for e in run.quant if e["operand"] == operand and e["linear"] == linear]
    for layer in sorted({e["layer"] for e in chosen}):
        events = [e for e in chosen if e["layer"] == layer]
        for field, line in (("at_max", "-"), ("clamped", "--")):
            axes.plot([e["step"] for e in events], [100 * e[field] for e in events], line, color=COLORS[layer % len(COLORS)],
                      label=f"layer {layer}" if field == "at_max" else None)
    axes.set(title=title, xlabel="step", ylabel="%", ylim=(0, None))
    if chosen:
        axes.legend(fontsize=7)


def write_report(runner, name, title, paper, seen, tables, runs, figure):
    width = int(14 * figure.get_figwidth())
    figure.suptitle("\n".join([title, *textwrap.wrap(f"seen: {seen}", width)]), fontsize=9, x=0.01, ha="left")
    save(figure, runner.out_dir / f"{name}.png")
    config = next(e for e in read_events(runs[0].directory / "log.jsonl") if e["event"] == "config")
    seconds = sum(run.seconds for run in {run.directory: run for run in runs}.values())
    text = [f"# {title}", "", f"![{name}]({name}.png)", "", wrapped(f"**The paper**: {paper}"), "",
            wrapped(f"**Seen**: {seen}"), ""]
    text += [part for t in tables for part in (t, "")]
    device = config["device"]
    # A GPU's runs are drawn elsewhere, often, and what it does with other scalings is no matter here.
    where = device.partition(", NVFP4")[0] if device.startswith("cuda") else f"{device}; {machine()}"
    commits = sorted({(run.directory / "commit.txt").read_text().strip() for run in runs})
    text += [wrapped(f"Scale `{runner.settings.scale}`; {where}; commit {', '.join(commits)}; "
                     f"{seconds:.0f} s of training."), "",
             wrapped("Diverged: from a step on, and to the end, all losses are over 10 times the lowest median of 20 before "
                     "it; or the run was stopped there, at a loss 10 times the first one or not finite. Up and back: 20 or "
                     "more in a row were, of a run that didn't diverge. Final loss: the median of the last twentieth of the "
                     "steps. Spikes: loss over 100 times that of the step before. Runs of one seed share weights and samples; "
                     "arms with one seed each have no interval, so that small differences between them can't be told from chance. Would be "
                     "seen from: a true difference of this size is found in four of five such experiments, if differences scatter as "
                     "they do here. The scatter is itself an estimate: counting that, ten seeds find it in 7 of 10, three in 6 "
                     "of 10."), "",
             f"<details><summary>{len(runs)} commands</summary>", "", "```",
             *dict.fromkeys(shlex.join(run.command) for run in runs), "```", "", "</details>", ""]
    out = runner.out_dir / f"{name}.md"
    write_whole(out, "\n".join(text))
    print(f"{out}: {seen}")


def came_back(run):
    return run.diverged is None and bool(run.excursions)


def how_many(runs):
    diverged = sum(run.diverged is not None for run in runs)
    returned = sum(came_back(run) for run in runs)
    return f"{diverged} of {len(runs)} diverged" + (f", {returned} went up and came back" if returned else "")


# ---------------------------------------------------------------------------------------------------------------------
# Experiments


def reference(runner):
    runs = runner.reference()
    runs.append(runner.run("rceil, gains in MX", runner.diagnosed(RCEIL)))
    runs.append(runner.run("floor, gains in FP32", runner.diagnosed(FLOOR | {"quantize-ln-affine": False})))
    text = [runner.run(f"{name}, the text's teacher", options | TEXT)
            for name, options in (("FP32", FP32), ("floor, gains in MX", runner.twinned(FLOOR)))]
    fp32, mx, *_ = runs
    figure, axes = new_panels(2, 5)
    draw_losses(axes[0, 0], runs, "Loss")
    draw_errors(axes[0, 1], runs, "Gradient's error against the exact one", legend=False)
    draw_cosines(axes[0, 2], runs)
    draw_losses(axes[0, 3], text, "Loss, with the teacher of the paper's text")
    draw_clamped(axes[1, 0], mx, "gain", "ln_2", "Gains, floor: in the last bin (dashed: clamped)")
    draw_clamped(axes[1, 1], mx, "fprop-x", "up", "LN's output, floor: the same")
    draw_clamped(axes[1, 2], mx, "fprop-x", "down", "Activation's output, floor: the same")
    draw_errors(axes[1, 3], text, "Gradient's error, with the text's teacher", legend=False)
    draw_zeta(axes[0, 4], [mx], "ζ: the error against the FP32 twin's gradient")
    draw_zeta(axes[1, 4], [text[1]], "ζ, with the text's teacher")
    for alike in axes[0, [0, 3]], [axes[0, 1], axes[1, 3]], axes[:, 4], axes[1, 1:3]:
        same_scale(alike)
    seen = f"FP32 diverged: {outcome(fp32)}. MX with floor: {outcome(mx)}."
    for whose, run, of in (("Its", mx, fp32), ("With the text's teacher its", text[1], text[0])):
        if np.isfinite(run.final() / of.final()):
            seen += f" {whose} final loss is {run.final() / of.final():.3f} of FP32's."
    seen += f" Against the FP32 twin's gradient, at other weights, it reached {sig(zeta_of(mx))} (the paper's line is at 2)."
    seen += f" Its gradient's error reached {sig(mx.worst_bias()[0])} of the exact one's norm; rceil's {sig(runs[2].worst_bias()[0])}."
    write_report(
        runner, "reference", "Twins: FP32 and MXFP8 from the same weights, on the same samples",
        "with 4 layers of width 512, batch 2048, Adam at 6e-4, FP32 stays stable; MXFP8 E4M3 in both passes with floor "
        "scales and quantized layernorm gains diverges near step 5100. Gains that lie close together under a power of two are "
        "clamped as whole blocks, which biases the gradient.",
        seen, [table(RUN_HEADER, [run_row(run, fp32) for run in runs] + [run_row(run, text[0]) for run in text])],
        runs + text, figure)


def zeta_of(run):
    """The largest error against the twin."""
    errors = run.errors(run.twin)[1]
    return np.nanmax(errors) if np.isfinite(errors).any() else np.nan


def state_at(runner, mx, step, others):
    """The reference's state at a step: saved, or reached from the nearest one saved before."""
    every = runner.scale["save_every"]
    saved = mx.directory / f"step_{step:06d}.safetensors"
    if saved.exists():
        return saved
    start = step // every * every
    options = FLOOR | others | {"steps": step, "save-at": step}
    if start > 0:
        options["load"] = mx.directory / f"step_{start:06d}.safetensors"
    run = runner.run(f"to step {step}", options, before=mx if start > 0 else None)
    return run.directory / saved.name


def intervened(runner, others={}):
    """Returns the reference with these options besides, and by the step that they start from the runs that go on from its
    states, near and far, in INTERVENTIONS' order."""
    _, mx = runner.reference(others)
    steps, scale, event = runner.base["steps"], runner.scale, mx.event()
    last = min(steps, event + 2 * scale["far"])
    sets = {}
    for distance in (scale["near"], scale["far"]):
        start = max(1, event - distance)
        state = state_at(runner, mx, start, others)
        options = {"load": state, "steps": last, "keep-going": True, "gradient-bias-every": max(1, (last - start) // 50)}
        sets[start] = [runner.run(name, recipe | options, before=mx) for name, recipe in INTERVENTIONS.items()]
    return mx, sets


def draw_interventions(sets):
    """Returns a figure with a column for each step that the runs start from: their losses and the gradients' errors."""
    figure, axes = new_panels(2, len(sets), width=6)
    for i, (start, made) in enumerate(sets.items()):
        draw_losses(axes[0, i], made, f"From step {start}: loss", legend=False)
        draw_errors(axes[1, i], made, "The gradient's error", legend=False)
    for row in axes:
        same_scale(row)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=1 + 2 * len(sets), fontsize=7)
    return figure


PAPERS_INTERVENTIONS = "starts them at steps 5080 and 4500, before a divergence near 5100: instabilities can be averted or " \
    "delayed by changing precision in mid-training."


def interventions(runner):
    mx, sets = intervened(runner)
    event, runs = mx.event(), [run for made in sets.values() for run in made]
    rows = [[f"step {start}", run.label, outcome(run), run.spikes, sig(run.final(), 4), *map(sig, run.worst_bias())]
            for start, made in sets.items() for run in made]
    if mx.diverged is not None:
        seen = f"the reference diverged {outcome(mx)}. " + " ".join(
            f"From step {start} {len(kept)} of {len(made)} interventions didn't: {', '.join(kept) or 'none'}."
            for start, made in sets.items() for kept in [[run.label for run in made if run.diverged is None]])
    else:
        seen = ("the reference went up and came back, so these start before the step at which it first did" if mx.excursions else
                "the reference didn't diverge, so these start before the step at which its gradient was furthest from the exact one")
        seen += f", {event}. " + " ".join(f"From step {start} {how_many(made)}; the error reached " + ", ".join(
            f"{sig(run.worst_bias()[0], 2)} ({run.label})" for run in made) + "." for start, made in sets.items())
    write_report(
        runner, "interventions", "Interventions: the MX run goes on from a state under other recipes",
        PAPERS_INTERVENTIONS,
        seen, [table(["from", "intervention", "diverged", "spikes", "final loss", "highest ‖ε‖/‖ḡ‖", "lowest cosine"], rows)],
        runs, draw_interventions(sets))


def text_interventions(runner):
    write_text_interventions(runner, [intervened(runner, TEXT | {"seed": 1337 + i}) for i in range(runner.scale["few"])])


def write_text_interventions(runner, made):
    """Compares each intervention with none, seed by seed; `made`: what intervened() returns, by seed. A seed whose event is so
    early that both starts are its first step has one set of runs for both."""
    references = [mx for mx, _ in made]
    sides = {f"{runner.scale['near']} steps before": [next(iter(sets.values())) for _, sets in made],
             f"{runner.scale['far']} steps before": [list(sets.values())[-1] for _, sets in made]}
    losses, highest, seen = {}, {}, []
    for side, by_seed in sides.items():
        nothing = [runs[0] for runs in by_seed]
        for i, name in enumerate(INTERVENTIONS):
            runs = [runs[i] for runs in by_seed]
            found, errors = paired_losses(runs, nothing) if i > 0 else None, [run.worst_bias()[0] for run in runs]
            losses[name, side] = signed(found) + of_fewer(found, runs) if found else "-"
            highest[name, side] = f"{sig(min(errors), 2)} to {sig(max(errors), 2)}"
            if found and is_seen(found):
                seen.append(f"{name} from {side} {signed(found)}")
    rows = [[name, *(losses[name, side] for side in sides), *(highest[name, side] for side in sides)] for name in INTERVENTIONS]
    events = ", ".join(str(mx.event()) for mx in references)
    every = [run for by_seed in sides.values() for runs in by_seed for run in runs]
    write_report(
        runner, "text_interventions", "Interventions with the paper's text: its teacher, no label noise", PAPERS_INTERVENTIONS,
        f"of the references {how_many(references)}; the steps before which these start are {events}. Of the interventions' runs "
        f"{how_many(every)}. Intervals of the final loss over that without an intervention that are without 0, which one in twenty "
        f"has where nothing differs: {'; '.join(seen) or 'none'}." + too_few(len(made)),
        [table(["intervention", *(f"final loss over that without one [95 %], from {side}" for side in sides),
                *(f"highest ‖ε‖/‖ḡ‖, from {side}" for side in sides)], rows)],
        every, draw_interventions(made[0][1]))


def remedies(runner):
    """The arms that say what rounding up and gains in FP32 change, each from step 0."""
    return {"FP32": FP32, "floor": runner.diagnosed(FLOOR), "rceil": runner.diagnosed(RCEIL),
            "floor, gains in FP32": runner.diagnosed(GAINS_KEPT)}


REMEDIES_AGAINST_FLOOR = [("rceil", "floor"), ("floor, gains in FP32", "floor")]


def seeds(runner):
    over_seeds(runner, "seeds", "rceil from step 0, and gains in FP32, against floor", {}, remedies(runner),
               "doesn't say: neither paper ran the proxy with rceil from the start.", REMEDIES_AGAINST_FLOOR)


def text(runner):
    over_seeds(runner, "text", "The paper's text as it stands: its teacher, no label noise", TEXT, remedies(runner),
               "describes a teacher of the student's shape, with a residual stream, and labels without noise; its runs were "
               "made with the authors' program, whose teacher has no residual stream and whose labels have noise. FP32 stays "
               "stable there, and MXFP8 with floor scales and quantized gains diverges.",
               REMEDIES_AGAINST_FLOOR, "few")


def swiglu(runner):
    arms = {"FP32": FP32, "BF16": runner.diagnosed({"recipe": "bf16"}), **remedies(runner)}
    over_seeds(runner, "swiglu", "SwiGLU over seeds: FP32, BF16, and MXFP8 in three ways", {"activation": "swiglu"}, arms,
               "sweeps activations, SwiGLU among them, without rceil from the start.")


def paired_losses(runs, others):
    """The interval of the mean logarithm of final losses, of runs over others of the same seeds; None where no seed has both."""
    ratios = np.array([run.final() / other.final() for run, other in zip(runs, others)])
    ratios = ratios[np.isfinite(ratios)]
    return interval(np.log(ratios)) if len(ratios) else None


def of_fewer(found, runs):
    """Says of how many seeds a comparison is, where it isn't of all runs."""
    return f" (of {found.count} seed{plural(found.count)} with both to their end)" if found.count < len(runs) else ""


def comparison_row(made, arm, base):
    """Returns a row of what the seeds show of two arms."""
    found = paired_losses(made[arm], made[base])
    if found is None:
        return [f"{arm} against {base}", "-", "-", "no seed has both to their end"]
    seen_from = f"{percent(visible(found.count) * found.scatter):.2f}" if found.count > 1 else "-"
    if found.count == len(made[arm]) > 1:
        return [f"{arm} against {base}", signed(found), seen_from, difference_in_words(found)]
    return [f"{arm} against {base}", signed(found) + of_fewer(found, made[arm]), seen_from, verdict(found, None)]


def too_few(seeds):
    """Returns a sentence to add where intervals of so many seeds are too wide to be of use."""
    return f" {seeds} seeds are too few: an interval reaches {reach(seeds):.1f} times their scatter." if 1 < seeds < ENOUGH else ""


def authors(runner):
    parts = {f"ours, {part}": runner.diagnosed(GAINS_KEPT | options) for part, options in PARTS.items()}
    arms = {"FP32": FP32, "ours": runner.diagnosed(GAINS_KEPT), **parts,
            "the authors'": runner.diagnosed(GAINS_KEPT | {"arithmetic": "authors"}),
            "ours, gains in MX": runner.diagnosed(FLOOR)}
    over_seeds(runner, "authors", "The arithmetic of the authors' program, part by part", {}, arms,
               "was made with a program that never quantizes gains: its layernorm and GELU round each operation to BF16, its "
               "linear layers their operands and results, norms' biases aren't trained in MX, and the teacher is in MX too. "
               "Which of these makes a run diverge nobody has asked.",
               [(arm, "ours") for arm in arms if arm not in ("FP32", "ours")], "few")


def authors_swiglu(runner):
    parts = {part: options for part, options in PARTS.items() if "bf16-activation" not in options}  # that is of GELU and ReLU
    together = {name: value for options in parts.values() for name, value in options.items()}
    arms = {"ours": GAINS_KEPT, **{f"ours, {part}": GAINS_KEPT | options for part, options in parts.items()},
            "all of these": GAINS_KEPT | together}
    over_seeds(runner, "authors_swiglu", "The authors' arithmetic where the loss jumps: SwiGLU", {"activation": "swiglu"},
               {"FP32": FP32, **{arm: runner.diagnosed(recipe) for arm, recipe in arms.items()}},
               "finds SwiGLU the least stable activation in MX, with a program that computes in its own way. Which part of that "
               "way makes a run diverge nobody has asked.",
               [(arm, "ours") for arm in arms if arm != "ours"])


def under_seeds(runner, options, arms, count):
    """Returns the runs of each arm, under the same seeds."""
    return {arm: [runner.run(f"{arm}, seed {1337 + i}", recipe | options | {"seed": 1337 + i})
                  for i in range(runner.scale[count])] for arm, recipe in arms.items()}


def over_seeds(runner, name, title, options, arms, paper, pairs=(("rceil", "floor"),), count="seeds"):
    """Runs all arms under the same seeds, and compares each with FP32, and those of pairs, seed by seed."""
    made = under_seeds(runner, options, arms, count)
    cols = min(5, len(arms))
    figure, axes = new_panels(2 * -(-len(arms) // cols), cols)
    curves, errors = axes[::2].flat, axes[1::2].flat
    rows = []
    for above, below, (arm, runs) in zip(curves, errors, made.items()):
        draw_losses(above, runs, arm, legend=False)
        found = None if arm == "FP32" else paired_losses(runs, made["FP32"])
        row = [arm, len(runs), sum(run.diverged is not None for run in runs), sum(came_back(run) for run in runs),
               sum(run.spikes for run in runs), signed(found) + of_fewer(found, runs) if found else "-",
               f"{found.scatter:.4f}" if found and found.count > 1 else "-"]
        if runs[0].bias:
            draw_errors(below, runs, "The gradient's error", legend=False)
            typical = [float(np.nanmedian(run.errors()[1])) for run in runs]
            row += [f"{sig(np.median(typical))}, {sig(min(typical))} to {sig(max(typical))}", sum(run.worst_bias()[1] < 0 for run in runs)]
        rows.append(row + ["-"] * (9 - len(row)))
    for ax in axes.flat:
        ax.set_visible(ax.has_data())
    for panels in axes[::2].flat, axes[1::2].flat:
        same_scale([ax for ax in panels if ax.has_data()])
    pairs = [*((arm, "FP32") for arm in arms if arm != "FP32"), *pairs]
    compared = [comparison_row(made, *pair) for pair in pairs]
    differing = [f"{arms} {by}" for arms, by, _, words in compared if words.endswith(("worse", "better"))]
    jumps = [(alone(made[arm], made[base]), alone(made[base], made[arm])) for arm, base in pairs]
    apart = [f"{arm} {a}, {base} {b}" for (arm, base), (a, b) in zip(pairs, jumps) if sign_test(a, b) < 0.05]
    unsteady = [f"{arm}: {how_many(runs)}" for arm, runs in made.items() if any(map(jumped, runs))]
    seen = ("; ".join(unsteady) or f"none of the {sum(map(len, made.values()))} runs diverged") + ". Intervals without 0, which one " \
        f"comparison in twenty has where nothing differs: {'; '.join(differing) or 'none'}."
    if unsteady:
        seen += f" Pairs of which one jumps alone more often than the other (p below 0.05): {'; '.join(apart) or 'none'}."
    write_report(
        runner, name, title, paper, seen + too_few(runner.scale[count]),
        [table(["arm", "seeds", "diverged", "up and back", "spikes", "final loss against FP32's [95 %]", "scatter of its log",
                "‖ε‖/‖ḡ‖, a run's median: median and range", "runs with a cosine under 0"], rows),
         table(["seed by seed", "final loss [95 %]", "would be seen from, %", "", "jumped alone: it, the other"],
               [[*row, f"{a}, {b}" + (f" (p = {sig(sign_test(a, b), 2)})" if a + b else "")] for row, (a, b) in zip(compared, jumps)])],
        [run for runs in made.values() for run in runs], figure)


def jumped(run):
    return run.diverged is not None or bool(run.excursions)


def cell(runs):
    """What a table says of an arm's runs: the median of their final losses, and what became of those that jumped."""
    ended = [run.final() for run in runs if run.diverged is None]
    spikes = sum(run.spikes for run in runs)
    counts = {"diverged": len(runs) - len(ended), "up and back": sum(map(came_back, runs)), f"spike{plural(spikes)}": spikes}
    median = [sig(np.median(ended))] if ended else []
    return ", ".join(median + [f"{count} {what}" for what, count in counts.items() if count])


def sign_test(a, b):
    """Returns the probability that a fair coin's tosses, `a` of them heads and `b` tails, fall apart so much or more."""
    from scipy.stats import binomtest

    return binomtest(a, a + b).pvalue if a + b else 1.0


def alone(runs, others):
    """Returns how many runs jumped where the other arm's of the same case and seed didn't."""
    return sum(jumped(run) and not jumped(other) for run, other in zip(runs, others))


def compare(runner, name, title, paper, cases, arms, remark=""):
    """Runs cases (label: options) by arms (label: recipe), each under the same seeds, and compares each arm with the first.
    A panel for each case, in which the seeds of an arm have one color."""
    made = {case: under_seeds(runner, options, arms, "of_cases") for case, options in cases.items()}
    every = {arm: [run for of_case in made.values() for run in of_case[arm]] for arm in arms}
    cols = min(4, len(cases))
    figure, axes = new_panels(-(-len(cases) // cols), cols, height=2.6, width=3.4)
    for ax, (case, of_case) in zip(axes.flat, made.items()):
        draw_arms(ax, of_case, case, legend=ax is axes[0, 0])
    for ax in axes.flat[len(cases) :]:
        ax.set_axis_off()
    same_scale(axes.flat[: len(cases)])
    base, *others = arms
    compared = [[case, *comparison_row(of_case, arm, base)] for case, of_case in made.items() for arm in others]
    said = [f"{base}: {how_many(every[base])}."]
    for arm in others:
        a, b = alone(every[arm], every[base]), alone(every[base], every[arm])
        pairs = [pair for of_case in made.values() if (pair := paired_losses(of_case[arm], of_case[base]))]
        differing = [pair.mean for pair in pairs if is_seen(pair)]
        said.append(f"{arm}: {how_many(every[arm])}; beside {base} of the same case and seed it jumped alone {a} times, {base} alone {b}"
                    + (f" (p = {sig(sign_test(a, b), 2)}, as if pairs were independent)" if a + b else "")
                    + f"; it ends higher in {sum(mean > 0 for mean in differing)} of {len(pairs)} cases, lower in "
                    f"{sum(mean < 0 for mean in differing)}.")
    said.append("One interval in twenty leaves 0 out where nothing differs." + too_few(runner.scale["of_cases"]) + remark)
    write_report(runner, name, title, paper, " ".join(said),
                 [table(["median of final losses", *arms], [[case, *map(cell, of_case.values())] for case, of_case in made.items()]),
                  table(["case", "seed by seed", "final loss [95 %]", "would be seen from, %", ""], compared)],
                 [run for runs in every.values() for run in runs], figure)


def sweep(runner):
    scale = runner.scale
    cases = {f"lr {rate:g}, L={depth}, d={width}": {"learning-rate": rate, "layers": depth, "width": width,
                                                    "steps": scale["sweep_steps"]}
             for depth in scale["depths"] for width in scale["widths"] for rate in scale["rates"]}
    compare(runner, "sweep", "Learning rate, depth, width and formats",
            "learning rates are chosen for each depth and width such that FP32 is stable and MX isn't; at larger ones FP32 "
            "too becomes unstable, which it expects. In MX instabilities are sharp and stochastic, over all formats, and more "
            "at larger scales. A spike is a loss over 100 times that of the step before.", cases,
            {"FP32": FP32, "E4M3, E5M2 backward": MIXED, "MXFP6 E2M3": MXFP6})


def activations(runner):
    cases = {f"{activation}, {'LN' if layernorm else 'no LN'}": {"activation": activation, "layernorm": layernorm}
             for activation in ("relu", "gelu", "swiglu") for layernorm in (True, False)}
    compare(runner, "activations", "Activation and layernorm",
            "with layernorm GELU and SwiGLU become unstable in MX, SwiGLU much more; SwiGLU in FP32 too, but mostly recovers "
            "there. Without layernorm losses are lower, MX is steadier and FP32 less so.", cases,
            {"FP32": FP32, "floor": FLOOR})


def optimizers(runner):
    cases = {"Adam": {}, "Adam, cosine": {"schedule": "cosine", "final-learning-rate": runner.base["learning-rate"] / 10},
             "SGD at 1e-2": {"optimizer": "sgd", "learning-rate": 1e-2},
             "SGD at 1": {"optimizer": "sgd", "learning-rate": 1},
             "SGD at 0.1, momentum 0.9": {"optimizer": "sgd", "learning-rate": 0.1, "momentum": 0.9}}
    compare(runner, "optimizers", "Optimizers",
            "has SGD at 1e-2 and cosine schedules beside Adam, and finds instabilities in MX over a broad range of "
            "hyperparameters. SGD at 1, and at 0.1 with momentum, are ours.", cases,
            {"FP32": FP32, "floor": FLOOR})


def inits(runner):
    cases = {kind: {"init": kind} for kind in ("kaiming-uniform", "xavier-normal")}
    compare(runner, "inits", "Initialisation",
            "finds instabilities in MX over a broad range of hyperparameters, PyTorch's default initialisation and a smaller "
            "one, Xavier's normal with gain 0.5, among them.", cases,
            {"FP32": FP32, "floor": FLOOR})


def variants(runner):
    cases = {"squared error": {}, "KL divergence": {"loss": "kl"}, "with attention": {"attention": True}}
    compare(runner, "variants", "KL divergence, self-attention",
            "neither attention nor a KL loss changes the kind of the divergences.", cases, {"FP32": FP32, "floor": FLOOR},
            " Attention itself is in BF16 under floor and in FP32 under FP32; the linear layers before and after it are the "
            "recipe's.")


EXPERIMENTS = {f.__name__: f for f in (
    reference, interventions, seeds, text, text_interventions, swiglu, sweep, activations, optimizers, inits, variants, authors,
    authors_swiglu)}


def main(arguments):
    parser = Parser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    parser.add_argument("experiment", nargs="+", choices=[*EXPERIMENTS, "all"], metavar="EXPERIMENT", help="as above")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="sizes: the paper's, or smaller ones (default: cpu)")
    parser.add_argument("--out-dir", type=Path, required=True, metavar="DIR", help="for runs, tables and pictures")
    parser.add_argument("--proxy", type=Path, default=ROOT / "build/proxy", metavar="FILE", help="the program")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="of the program, such as width=256, for every run that doesn't set it itself, where it changes "
                        "anything; may be repeated")
    settings = parser.parse_args(arguments)
    if not settings.proxy.is_file():
        raise InputError(f"{settings.proxy} isn't there: build it with make, or name it with --proxy")
    runner = Runner(settings)
    (runner.out_dir / "runs").mkdir(parents=True, exist_ok=True)
    settings.lock = lock_directory(runner.out_dir)
    for name in EXPERIMENTS if "all" in settings.experiment else settings.experiment:
        EXPERIMENTS[name](runner)


if __name__ == "__main__":
    main_of("run.py", main)
