#!/usr/bin/env python3
"""Trains one model under several recipes, each under the same seeds, and reports what differs, with 95 % intervals.

Under one seed all recipes start from the same weights and see the same batches, and all are validated on the same
tokens: what these do cancels in the difference of two runs. The mean of the differences over seeds, how far it may be
from the truth, gradient norms and quantization statistics by layer go into OUT_DIR/report.html (one file, pictures
included) and OUT_DIR/report.md. --plan says beforehand how many seeds it takes, and how long.

What was finished isn't run again: the same command goes on where it was stopped, and then only draws; with more --seeds
it trains what those add.
"""

import itertools
import os
import re
import shlex
import textwrap
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
from experiments import EXPERIMENTS, SCALES
from logs import NOT_FINITE, InputError, main_of, plural
from paired import BAR, ENOUGH, Interval, caution, interval, is_seen, percent, reach, signed, verdict, visible
from planning import Cost, add_plan, check_plan, print_plan, scatter_in_words
from plot import (
    COLORS,
    SMOOTH_FROM,
    make_logarithmic,
    new_figure,
    operand_order,
    operand_style,
    plain_numbers,
    same_scale,
    smoothed,
)
from report import Report
from runner import (
    BASELINE,
    DEFAULT_RECIPES,
    OPERANDS,
    ROOT,
    Job,
    Pair,
    Runner,
    check_common,
    chosen_pairs,
    experiment_parser,
    list_recipes,
    miniature,
    option_value,
    parse_experiment,
    seeds_of,
    whole_number,
    with_defaults,
    without_option,
)

VALIDATIONS = 10  # along a run, and one at its end
JUMP = 0.5  # nats: a run whose losses end so far over its lowest validation has diverged
BASELINE_STYLE = ("black", (0, (5, 2)))
LINE_STYLES = ("-", (0, (6, 1.5, 1, 1.5)), (0, (1, 1.2)))
EXAMPLE = """\
examples, on the demo's data (make demo prepares it):
  compare_recipes.py --experiment rounding --scale cpu --out-dir runs/compare
  compare_recipes.py --out-dir runs/compare --recipes mxfp8,mxfp8-ocp,mxfp8-ocp:mxfp8 -- \\
      --train-data 'build/demo/data/train_*.bin' --val-data 'build/demo/data/val_*.bin' --layers 4 --heads 4 \\
      --channels 256 --max-seq-len 128 --batch-size 8 --max-steps 500 --learning-rate 1e-3 --warmup-steps 100
"""


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


class Curve(NamedTuple):
    """Validation losses of one run."""

    steps: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray


def curve_of(run):
    steps, loss = run.series(run.val, "loss")
    return Curve(steps, steps * tokens_per_step(run), loss)


def a_whole(runs):
    """Returns the first of the runs that came to its end; the first one where none did."""
    return next((run for run in runs if sound_to_its_end(run)), runs[0])


def tokens_per_step(run):
    last = run.train[-1]
    return last["tokens"] / (last["step"] + 1)


def diverged(run):
    """Returns whether a run ended with losses that aren't finite, or far over what it had reached, those of training too: one
    that has learned its data by heart hasn't diverged."""
    if run.end and run.end.get("reason") == NOT_FINITE:
        return True
    loss, training = (values[np.isfinite(values)] for _, values in (run.series(run.val, "loss"), run.series(run.train, "loss")))
    if not len(loss) or not len(training):
        return False
    return bool(min(loss[-1], np.median(training[-20:])) > loss.min() + JUMP)


def sound_to_its_end(run):
    return not diverged(run) and np.isfinite(curve_of(run).loss).all()


class Compared(NamedTuple):
    """What a pair's runs show, after the learning rate's warm-up and at the end."""

    pair: Pair
    seeds: list  # under which both came to their end
    lost: tuple  # seeds under which the recipe didn't, and its base
    tokens: np.ndarray
    differences: np.ndarray  # (seeds, validations), in nats
    along: Interval  # at each validation
    at_any: Interval  # wider: it holds all means after warm-up at once
    after: np.ndarray  # whether a validation lies after warm-up
    final: Interval


def compared(pair, runs, seeds, warmup_steps):
    """Compares a pair's runs, which `runs` has by name and seed; without seeds, and so without numbers, where none has both to
    their end."""
    lost = tuple([seed for seed in seeds if not sound_to_its_end(runs[r.name, seed])] for r in pair)
    both = [seed for seed in seeds if seed not in lost[0] + lost[1]]
    if not both:
        return Compared(pair, both, lost, *[None] * 6)
    curves = [[curve_of(runs[r.name, seed]) for seed in both] for r in pair]
    differences = np.array([curve.loss - base.loss for curve, base in zip(*curves)])
    steps, tokens, _ = curves[0][0]
    after = steps >= min(max(1, warmup_steps), steps[-1])
    return Compared(pair, both, lost, tokens, differences, interval(differences), interval(differences, after.sum()),
                    after, interval(differences[:, -1]))


def worst(c):
    """Returns the place of the highest mean difference after warm-up, where a recipe is worst."""
    return int(np.argmax(np.where(c.after, c.along.mean, -np.inf)))


def in_words(c):
    """Says of a pair what is seen: which runs were lost, the end, and the way where that shows what
    the end doesn't."""
    said = [lost_in_words(r.name, lost, len(c.seeds) + len(set(c.lost[0] + c.lost[1])))
            for r, lost in zip(c.pair, c.lost) if lost]
    if not c.seeds:
        return "; ".join([*said, "no seed has both to their end"])
    others = f"under the other {len(c.seeds)}: " if said else ""
    said.append(others + verdict(c.final, c.pair.base.name, BAR if c.pair.base.name == BASELINE else None))
    return "; ".join(said + on_the_way(c))


def lost_in_words(name, lost, count):
    return f"{name} diverged under {len(lost)} of {count} seeds"


def on_the_way(c):
    """Says where after warm-up the difference is more than chance at any of the validations, if the
    end's isn't."""
    seen = c.after & is_seen(c.at_any)
    if is_seen(c.final) or not seen.any():
        return []
    at = int(np.argmax(np.where(seen, np.abs(c.along.mean), -1)))
    sense = "worse" if c.along.mean[at] > 0 else "better"
    return [f"on the way {sense}, {percent(c.along.mean[at]):+.2f} % after {c.tokens[at]:,.0f} tokens"]


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


class Styled(NamedTuple):
    run: object
    color: str
    dash: object  # as matplotlib takes it

    @property
    def line(self):
        """Returns what matplotlib draws it with: the first above the others, which show between its
        dashes."""
        is_base = (self.color, self.dash) == BASELINE_STYLE
        return {"color": self.color, "linestyle": self.dash, "linewidth": 1.4, "zorder": 2.5 if is_base else 2}


def styled(runs):
    """Gives each a color and dash that no other has, up to 25 runs; the first is what others are
    compared with."""
    dashes = [(color, dash) for dash in LINE_STYLES for color in COLORS]
    styles = itertools.chain([BASELINE_STYLE], itertools.cycle(dashes))
    return [Styled(run, *style) for run, style in zip(runs, styles)]


SEED = {"color": "#56B4E9", "linewidth": 0.7}
MEAN = {"color": "#0072B2", "linewidth": 1.8}
BAR_LINE = {"color": "#b00020", "linewidth": 1, "linestyle": (0, (6, 3))}


def draw_ends(shown):
    """Draws each pair's differences at the end: a dot for each seed, their mean and its interval."""
    figure = new_figure(12, 1.5 + 0.42 * len(shown))
    axes = figure.subplots()
    for i, c in enumerate(shown):
        axes.plot(percent(c.differences[:, -1]), np.full(len(c.seeds), i + 0.22), ".", color=SEED["color"],
                  label="a seed" if i == 0 else None)
        axes.plot(percent(np.array([c.final.low, c.final.high])), [i, i], color=MEAN["color"], linewidth=2.5,
                  label="95 % interval of the mean" if i == 0 else None)
        axes.plot(percent(c.final.mean), i, "o", color=MEAN["color"], label="mean" if i == 0 else None)
    draw_bar(axes.axvline)
    axes.set_yticks(range(len(shown)), [c.pair.label for c in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    ends = [percent(np.array([c.final.low, c.final.high])) for c in shown if c.final.count >= ENOUGH]
    beyond = limit_gaps(axes, "x", [*(percent(c.differences[:, -1]) for c in shown), *ends])
    axes.set(title="Perplexity at the end: how much larger than that of what a recipe is compared with", xlabel=f"%{beyond}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def draw_bar(line, is_to_bf16=True):
    line(0, color="#555555", linewidth=1)
    if is_to_bf16:
        line(BAR, label=f"the paper's bar to BF16, {BAR:.2f} %", **BAR_LINE)


def limit_gaps(axes, which, values):
    """Sets the scale of an axis in %: most gaps are a per cent or so, and beyond 5 % it is
    logarithmic. What the values don't reach is cut off. Returns what the axis' label has to say of it."""
    known = np.concatenate([*map(np.ravel, values), [BAR]])
    is_wide = np.abs(known).max() > 5
    if is_wide:
        getattr(axes, f"set_{which}scale")("symlog", linthresh=1, linscale=1.5)
        axis = getattr(axes, f"{which}axis")
        axis.set_ticks([-10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
        axis.set_major_formatter(plain_numbers())
        axes.minorticks_off()
    getattr(axes, f"set_{which}lim")(min(1.25 * known.min(), -2 * BAR), max(1.25 * known.max(), 2 * BAR))
    return ", logarithmic beyond ±1" if is_wide else ""


def draw_along(shown):
    """Draws a panel for each pair, all with the same axes: the seeds' differences along the run,
    their mean, its interval."""
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = new_figure(12, 0.8 + 3 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, c in zip(panels, shown):
        axes.plot(c.tokens, percent(c.differences.T), **SEED)
        axes.plot([], [], label="a seed", **SEED)
        axes.fill_between(c.tokens, percent(c.along.low), percent(c.along.high), color=MEAN["color"], alpha=0.2,
                          linewidth=0, label="95 % interval of the mean")
        axes.plot(c.tokens, percent(c.along.mean), label="mean", **MEAN)
        draw_bar(axes.axhline, c.pair.base.name == BASELINE)
        axes.set_title(textwrap.fill(c.pair.label, 40, break_on_hyphens=False))
        number_tokens(axes)
    beyond = limit_gaps(panels[0], "y", [percent(c.differences[:, c.after]) for c in shown])
    for i, axes in enumerate(panels):
        axes.set_visible(i < len(shown))
        axes.tick_params(labelbottom=i + columns >= len(shown))
    figure.supxlabel("training tokens", fontsize=9)
    figure.supylabel(f"perplexity, difference in %{beyond}", fontsize=9)
    labelled = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(labelled.values(), labelled, loc="outside upper center", ncols=4)
    return figure


def number_tokens(axes):
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_losses(names, runs, seeds):
    """Draws the mean over seeds of the validation losses of each recipe that came to its end under all of them."""
    figure = new_figure(12, 4.2)
    axes = figure.subplots()
    for drawn in styled(names):
        mine = [runs[drawn.run, seed] for seed in seeds]
        if mine and all(map(sound_to_its_end, mine)):
            curves = [curve_of(run) for run in mine]
            axes.plot(curves[0].tokens, np.mean([c.loss for c in curves], axis=0), label=drawn.run, **drawn.line)
    axes.set(title="Validation loss, mean over seeds", xlabel="training tokens", ylabel="nats per token")
    axes.legend(loc="upper right", ncols=1 + len(names) // 9)
    number_tokens(axes)
    return figure


def draw_norms(names, runs, seed):
    figure = new_figure(12, 4.2)
    axes = figure.subplots()
    for drawn in styled(names):
        run = runs[drawn.run, seed]
        steps, values = run.series(run.train, "grad_norm")
        tokens = (steps + 1) * tokens_per_step(run)
        if len(values) >= SMOOTH_FROM:
            axes.plot(tokens, values, color=drawn.color, alpha=0.15, linewidth=0.5)
            values = smoothed(values)
        axes.plot(tokens, values, label=drawn.run, **drawn.line)
    axes.set(title="Gradient norm (L2), smoothed where the curve is long", xlabel="training tokens")
    make_logarithmic(axes)
    axes.legend(loc="upper right", ncols=1 + len(names) // 9)
    number_tokens(axes)
    return figure


# Gains, which may be clamped altogether, have a panel of their own; they are counted as if they passed through MX where
# they don't.
QUANT_PANELS = (
    ("clamped", "Clamped", "% of elements", 100, False),
    ("at_max", "At the largest code", "% of elements", 100, False),
    ("sqnr_db", "Signal to quantization noise", "dB", 1, False),
    ("clamped", "Gains clamped, counted as MX", "% of gains", 100, True),
)


def draw_quant(quantized):
    """Draws the last step with statistics of (name, run), by layer: the median over its linears,
    shaded from lowest to highest. A column has one scale."""
    figure = new_figure(13, 2.2 * len(quantized) + 0.3)
    parts = figure.subfigures(len(quantized), 1, squeeze=False)[:, 0]
    has_gains = any(e["operand"] == "gain" for _, run in quantized for e in run.quant)
    panels = [panel for panel in QUANT_PANELS if has_gains or not panel[-1]]
    rows = [part.subplots(1, len(panels)) for part in parts]
    for part, row, (name, run) in zip(parts, rows, quantized):
        step = run.quant[-1]["step"]
        events = [e for e in run.quant if e["step"] == step]
        part.suptitle(f"{name}, at step {step:,}", fontsize=9, color="#555555", x=0.01, ha="left")
        for axes, (field, title, unit, factor, is_of_gains) in zip(row, panels):
            for operand in sorted({e["operand"] for e in events if (e["operand"] == "gain") == is_of_gains}, key=operand_order):
                draw_by_layer(axes, [e for e in events if e["operand"] == operand], operand, field, factor)
            axes.set(title=title, ylabel=unit, xlabel="layer")
            axes.xaxis.get_major_locator().set_params(integer=True)
        part.legend(*row[0].get_legend_handles_labels(), loc="outside right center", title="operand")
    for column, (*_, factor, _) in zip(zip(*rows), panels):
        same_scale(column, 0 if factor == 100 else None)
    return figure


def draw_by_layer(axes, events, operand, field, factor):
    layers = sorted({e["layer"] for e in events})
    values = [[e[field] for e in events if e["layer"] == layer and e.get(field) is not None] for layer in layers]
    known = [(layer, factor * np.array(v)) for layer, v in zip(layers, values) if v]
    if not known:
        return
    x, style = [layer for layer, _ in known], operand_style(operand)
    low, median, high = (np.array([f(v) for _, v in known]) for f in (np.min, np.median, np.max))
    axes.fill_between(x, low, high, color=style["color"], alpha=0.07, linewidth=0)
    axes.plot(x, median, marker=".", label=operand, **style)


# ---------------------------------------------------------------------------------------------------------------------
# The report

RECIPE_HEAD = ("recipe", "is", "the paper says", "mean loss at the end:", "scatter between seeds:", "diverged:")
PAIR_HEAD = (
    "recipe",
    "against",
    "seeds:",
    "difference, nats [95 %]:",
    "of perplexity, % [95 %]:",
    "scatter, nats:",
    "would be seen from, %:",
    "highest mean after warm-up, %:",
    "at tokens:",
    "in words",
)


def shared_seeds(names, runs, seeds):
    """Returns the seeds under which every recipe came to its end that did so under any: means over them can be compared."""
    ended = [name for name in names if any(sound_to_its_end(runs[name, seed]) for seed in seeds)]
    return [seed for seed in seeds if all(sound_to_its_end(runs[name, seed]) for name in ended)]


def recipe_row(r, runs, seeds, shared):
    lost = sum(not sound_to_its_end(runs[r.name, seed]) for seed in seeds)
    ends = [curve_of(runs[r.name, seed]).loss[-1] for seed in shared] if lost < len(seeds) else []
    mean = f"{np.mean(ends):.4f}" if ends else "–"
    scatter = f"{np.std(ends, ddof=1):.4f}" if len(ends) > 1 else "–"
    return [r.name, r.words, r.finding, mean, scatter, f"{lost} of {len(seeds)}"]


def in_nats(found):
    return f"{found.mean:+.5f}" + (f" [{found.low:+.5f}, {found.high:+.5f}]" if found.count > 1 else "")


def pair_row(c):
    names = [c.pair.recipe.name, c.pair.base.name, str(len(c.seeds))]
    if not c.seeds:
        return [*names, *["–"] * 6, in_words(c)]
    at, several = worst(c), len(c.seeds) > 1
    return [
        *names,
        in_nats(c.final),
        signed(c.final),
        f"{c.final.scatter:.5f}" if several else "–",
        f"{percent(visible(len(c.seeds)) * c.final.scatter):.3f}" if several else "–",
        f"{percent(c.along.mean[at]):+.3f}",
        f"{c.tokens[at]:,.0f}",
        in_words(c),
    ]


def seed_row(c, seeds):
    ends = dict(zip(c.seeds, c.differences[:, -1] if c.seeds else []))
    return [c.pair.label, *(f"{ends[seed]:+.5f}" if seed in ends else "–" for seed in seeds)]


HOW_TO_READ = (
    "Under one seed two recipes start from the same weights, see the same batches and are validated on the same tokens, so "
    "that what these do cancels in the difference of their losses. The mean of the differences is reported with its 95 % "
    "interval (Student's t over seeds), which holds the truth in 19 of 20 such experiments; where it includes 0 no difference "
    "was seen. Where two recipes don't differ, one comparison in twenty still calls one of them worse or better at the end; on "
    "the way a difference is named only where it is more than chance shows at any of the validations after warm-up "
    "(Bonferroni's correction), which adds up to one in twenty. Scatter is the standard deviation over seeds. Would be seen "
    "from: a true difference of this size is found in four of five such experiments, if differences scatter as they do here. "
    "The scatter is itself an estimate: counting that, eight seeds find it in 7 of 10 such experiments, three seeds in 6 of "
    "10. Highest mean after warm-up: the mean difference at the validation where the recipe is worst, and after how many "
    f"tokens that is. A run counts as diverged where its losses aren't finite, or end more than {JUMP:g} nats above its lowest "
    "validation; its seed is left out of the pair's mean, which may then be one over easier seeds."
)


def seeds_in_words(count):
    if count == 1:
        return "One seed gives differences and no intervals: with --seeds 8 the same command trains seven more."
    width = f"{count} seeds give an interval that reaches {reach(count):.2f} times the differences' scatter"
    return f"{width} to each side" + (f"; 8 would give {reach(8):.2f} (--seeds 8)." if count < 8 else ".")


def model_in_words(model):
    """Returns the model's size, and what it has that GPT-2 hasn't; a log of an older program
    doesn't say all of it."""
    names = {
        "layers": "layer{}",
        "heads": "head{}",
        "channels": "channel{}",
        "max_seq_len": "position{}",
        "vocab_size": "token{} in the vocabulary",
    }
    gpt2 = {
        "kv_heads": model.get("heads"),
        "ffn": 4 * model.get("channels", 0),
        "activation": "gelu",
        "norm": "layernorm",
        "ln_affine": True,
        "biases": True,
        "positions": "learned",
        "qk_norm": False,
        "untied_head": False,
    }
    words = [f"{model['parameters'] / 1e6:.3g} million parameters"] if "parameters" in model else []
    words += [f"{model[field]} {name.format(plural(model[field]))}" for field, name in names.items() if field in model]
    differing = [field for field, value in gpt2.items() if model.get(field, value) != value]
    words += [f"{field.replace('_', '-')} {model[field]}" for field in differing]
    return ", ".join(words) or "its size wasn't logged"


def check_bases(pairs, runs, seeds):
    bases = dict.fromkeys(pair.base.name for pair in pairs)
    if bases and not any(sound_to_its_end(runs[name, seed]) for name in bases for seed in seeds):
        raise InputError(
            f"{' and '.join(bases)} diverged under every seed: there is nothing to compare with; lower --learning-rate"
        )


def quantizes_head(recipe):
    """Returns whether a recipe as it is logged quantizes an operand of the LM head: by its option, but for what filters
    say, of which the last that matches holds."""
    for operand in OPERANDS:
        form = recipe.get(operand, "bf16") if recipe.get("quantize-lm-head") else "bf16"
        for linears, operands, other in (re.fullmatch("(.*):(.*)=(.*)", text).groups() for text in recipe.get("operand-in", ())):
            form = other if fnmatchcase("lm_head", linears) and fnmatchcase(operand, operands) else form
        if form not in ("bf16", "fp32"):
            return True
    return False


def besides_linear_layers(logged):
    """Returns a sentence that says in which precision attention and the LM head are, of recipes as they are logged by name."""
    in_fp32 = [name for name, recipe in logged.items() if recipe.get("name") == "fp32"]
    heads = [name for name, recipe in logged.items() if quantizes_head(recipe)]
    words = "Attention, embeddings, norms and the LM head are in BF16"
    words += f", in FP32 under {', '.join(in_fp32)}" if in_fp32 else ""
    return words + (f"; the LM head is quantized under {', '.join(heads)}." if heads else ".")


def write_report(out_dir, recipes, pairs, runs, seeds, command, commands, experiment=None, shorter=None):
    """Writes the report of runs by recipe's name and seed; `shorter`: the same runs a part as long, which they are
    compared with."""
    check_bases(pairs, runs, seeds)
    names, first = [r.name for r in recipes], runs[recipes[0].name, seeds[0]]
    settings = first.config.get("options", {})
    warmup, val_steps = int(settings.get("warmup-steps") or 0), settings.get("val-steps", 20)
    everything = [compared(pair, runs, seeds, warmup) for pair in pairs]
    shown = [c for c in everything if c.seeds]

    report = Report(experiment.question if experiment else "Recipes compared")
    if experiment:
        report.paragraph(f"What the papers say. {experiment.claim}")
        report.paragraph(f"What is compared. {experiment.compared}")
    curve = curve_of(a_whole([*runs.values()]))
    under = f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})" if len(seeds) > 1 else f"one seed ({seeds[0]})"
    report.paragraph(
        f"One model ({model_in_words(first.config.get('model', {}))}), trained for {curve.steps[-1]:,.0f} "
        f"step{plural(curve.steps[-1])}, {curve.tokens[-1]:,.0f} tokens, under {len(recipes)} recipe{plural(len(recipes))}, "
        f"each under {under}. Perplexity at the end, the mean difference over seeds [its 95 % interval]:"
    )
    report.items([f"{c.pair.label}: {f'{signed(c.final)}, ' if c.seeds else ''}{in_words(c)}." for c in everything])
    report.paragraph(besides_linear_layers({r.name: runs[r.name, seeds[0]].config.get("recipe", {}) for r in recipes}))
    report.paragraph(HOW_TO_READ)
    report.paragraph(seeds_in_words(len(seeds)))
    report.table(PAIR_HEAD, [pair_row(c) for c in everything])
    if shorter:
        steps = curve_of(a_whole([*shorter.values()])).steps[-1]
        report.paragraph(f"The differences at the end of these runs, and of runs of {steps:,.0f} step{plural(steps)}:")
        report.table(GROWTH_HEAD, [growth_row(compared(c.pair, shorter, seeds, warmup), c) for c in everything])
    shared = shared_seeds(names, runs, seeds)
    over = "" if len(shared) == len(seeds) else f", means over {len(shared)} seed{plural(len(shared))} that none of them lost"
    report.paragraph(f"The recipes, losses in nats per token{over}:")
    report.table(RECIPE_HEAD, [recipe_row(r, runs, seeds, shared) for r in recipes])
    report.paragraph("Differences at the end by seed, in nats:")
    report.table(("", *(f"{seed}:" for seed in seeds)), [seed_row(c, seeds) for c in everything])
    validated = {0: "all validation data", 1: "one micro-batch of validation data, the first one,"}.get(
        val_steps, f"the first micro-batches of validation data, {val_steps} or as many as there are,")
    report.paragraph(
        f"Losses are of {validated} for every run. Warm-up is that of the learning rate ({warmup:,} step{plural(warmup)}). "
        "The paper is arXiv 2506.08027 where no other is named. It trains models of up to 8B parameters on up to 15T tokens, and "
        f"sees MXFP8 stay within {BAR:.2f} % of BF16's perplexity: what it sees there needn't show in a small model. "
        "Speed isn't compared: runs that follow one another tell what else the machine did."
    )
    if shown:
        report.heading("Differences at the end")
        report.picture(draw_ends(shown), "ends", "Differences of perplexity at the end, with intervals")
        report.heading("Differences along the run")
        report.picture(draw_along(shown), "differences", "Differences of perplexity against tokens, by pair")
    report.heading("Validation loss")
    report.picture(draw_losses(names, runs, shared), "loss", "Validation loss against tokens")
    report.heading(f"Gradient norm, under seed {seeds[0]}")
    report.picture(draw_norms(names, runs, seeds[0]), "gradient_norm", "Gradient norms against tokens")
    quantized = [(name, runs[name, seeds[0]]) for name in names if runs[name, seeds[0]].quant]
    if quantized:
        report.heading(f"Quantization by layer, under seed {seeds[0]}")
        report.paragraph(
            "The median over a layer's linears, shaded from the lowest to the highest, at the last step that was "
            "measured."
        )
        report.picture(
            draw_quant(quantized), "quantization", "Clamped, at the largest code, and SQNR, by layer and operand; gains clamped"
        )
    of_first_seed = [line for line in commands if f" --seed {seeds[0]} " in line]
    others = "" if len(seeds) == 1 else f", and the same under the other {len(seeds) - 1} seed{plural(len(seeds) - 1)}"
    report.made_by(command, of_first_seed, first.config.get("device", "not logged"), f"which ran{others}")
    report.write(out_dir)


# ---------------------------------------------------------------------------------------------------------------------
# Longer runs

GROWTH_HEAD = ("recipe", "against", "seeds:", "after the shorter runs, %:", "after the longer, %:", "of it grown, % [95 %]:",
               "in words")


def growth_row(short, long):
    """Returns a row of how much larger a pair's difference is at the end of the longer runs, over the seeds that have all
    four runs to their end."""
    ends = [dict(zip(c.seeds, c.differences[:, -1] if c.seeds else [])) for c in (short, long)]
    both = [seed for seed in ends[0] if seed in ends[1]]
    names = [short.pair.recipe.name, short.pair.base.name, str(len(both))]
    if not both:
        return [*names, "–", "–", "–", "no seed has all of its runs to their end"]
    before, after = (np.array([of_seed[seed] for seed in both]) for of_seed in ends)
    found, first, last = interval(after - before), before.mean(), after.mean()
    words = growth_in_words(found, first, last)
    return [*names, f"{percent(first):+.3f}", f"{percent(last):+.3f}", signed(found), words]


def growth_in_words(found, first, last):
    """Says what the interval of a growth shows of a difference that was `first` and is `last`."""
    if found.count < 2:
        return "one seed has no interval"
    if not is_seen(found):
        said = f"no change was seen, it is within ±{max(abs(percent(found.low)), abs(percent(found.high))):.2f} %"
    elif first * last < 0:
        said = "it rises" if found.mean > 0 else "it falls"
    else:
        said = "it grows" if abs(last) > abs(first) else "it shrinks"
    return caution(found) + said


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def measured_scatter(pairs, runs, seeds):
    """Returns the Interval of each pair's differences at the end, where three seeds or more were
    finished before and its runs differ."""
    found = {}
    for pair in pairs:
        done = [seed for seed in seeds if all((r.name, seed) in runs for r in pair)]
        c = compared(pair, runs, done, 0)
        if len(c.seeds) >= 3 and c.final.scatter > 0:
            found[pair.label] = c.final
    return found


def plan(options, runner, recipes, pairs, common, times):
    """Prints what --plan asks for; `times`: of the lengths of the runs, which are all made."""
    length = runner.length([*recipes[0].options, *common])
    every = whole_number(common, "val-every")
    validations = 1 + -(-length.steps // every)
    seconds = 0
    for i, r in enumerate(recipes, 1):
        step, validation = runner.seconds([*r.options, *common])
        print(f"[{i}/{len(recipes)}] {r.name}: {step:.3g} s a step, {validation:.3g} s a validation", flush=True)
        seconds += sum(times) * (length.steps * step + validations * validation)
    seeds = seeds_of(options)
    jobs = {(r.name, seed): job_of(r, seed, common) for seed in seeds for r in recipes}
    done = runner.finished(jobs.values())
    runs = {key: done[job.name] for key, job in jobs.items() if job.name in done}
    grown = len(times) > 1
    measured = {} if grown else measured_scatter(pairs, runs, seeds)  # what has grown isn't measured in OUT_DIR
    scatter, source = scatter_in_words(options, measured, pairs, grown=grown)
    of_each = "the recipe" if len(recipes) == 1 else f"each of the {len(recipes)} recipes"
    steps = ", and one of ".join(f"{n * length.steps:,} step{plural(n * length.steps)}" for n in sorted(times))
    cost = Cost(f"A run of {of_each}, {steps},", len(recipes) * len(times), seconds)
    print_plan(options, scatter, source, cost._replace(of="The growths of paired differences") if grown else cost)


# ---------------------------------------------------------------------------------------------------------------------


def job_of(r, seed, common):
    return Job(f"{r.name}-seed-{seed}", (*r.options, "--seed", str(seed), *common))


def scale_options(name, given):
    """Returns the scale's options, with paths from this directory; without its model, its length and its data where `given`
    has others."""
    scale = {option: os.path.relpath(ROOT / value) if option.endswith("data") else value
             for option, value in SCALES[name].items()}
    instead = {"max_tokens": ["max_steps"], "epochs": ["max_steps"], "warmup_fraction": ["warmup_steps"],
               "model": ["layers", "heads", "channels", "max_seq_len"], "train_data": ["val_data"], "val_data": ["train_data"]}
    left_out = [option for said, options in instead.items() if option_value(given, said.replace("_", "-")) for option in options]
    return {option: value for option, value in scale.items() if option not in left_out}


def longer(common, runner, recipe, times):
    """Returns the options of runs that are so many times as long, with as many validations of as many tokens."""
    steps = times * runner.length([*recipe.options, *common]).steps
    for name in ("max-steps", "max-tokens", "epochs"):
        common = without_option(common, name)
    every = {name: times * whole_number(common, name) for name in ("val-every", "quant-stats-every", "checkpoint-every")}
    for name in every:
        common = without_option(common, name)
    return [*common, "--max-steps", str(steps), *(word for name, value in every.items() for word in (f"--{name}", str(value)))]


def common_options(options, runner, recipe):
    """Returns what follows --, and how often to validate, measure and save where that doesn't say
    it. Validations see as many micro-batches as training: they take a third of its time, as they do
    a third of its work for each."""
    given = miniature(options.out_dir) if options.tiny else []
    given = [*given, *options.common]
    if options.tiny:
        given = with_defaults(given, layers=2, heads=2, channels=64, max_steps=20, val_every=4, checkpoint_every=5)
    elif options.scale:
        given = with_defaults(given, **scale_options(options.scale, given))
    check_common(given, ("recipe", "seed", "out-dir", "resume"), ("train-data", "val-data"))
    if option_value(given, "val-every") and whole_number(given, "val-every") < 1:
        raise InputError("--val-every 0 leaves no curves to compare: give the steps between validations")
    length = runner.length([*recipe.options, *given])
    tenth = max(1, length.steps // 10)
    given = with_defaults(given, val_every=max(1, length.steps // VALIDATIONS))
    validations = 2 + length.steps // whole_number(given, "val-every")
    val_steps = max(1, length.steps * length.micro_batches // validations)
    often = {"quant_stats_every": tenth, "checkpoint_every": tenth, "keep_checkpoints": 1}
    return with_defaults(given, val_steps=val_steps, **often)


def take_recipes(parser, options, default):
    """Sets the recipes where --recipes doesn't: an experiment's, or the default ones."""
    if options.out_dir is None and not options.list:
        parser.error("the following arguments are required: --out-dir")
    if options.experiment and options.recipes is not None:
        parser.error(f"--experiment {options.experiment} has recipes of its own, in place of --recipes: give one of the two")
    if options.recipes is None:
        options.recipes = EXPERIMENTS[options.experiment].recipes if options.experiment else default


def parse(arguments):
    usage = "compare_recipes.py --out-dir DIR [options] -- OPTIONS_OF_TRAIN_GPT_MXFP8..."
    parser = experiment_parser("compare_recipes.py", usage, __doc__, EXAMPLE)
    parser.set_defaults(seeds=8)
    parser.add_argument(
        "--recipes",
        metavar="all|paper|NAME,...",
        help="paper: the curves of arXiv 2506.08027; names as --list shows them, recipes with adjustments, such as "
        "mxfp8+scale-rounding-gradients=floor, or pairs such as mxfp8-ocp:mxfp8, the first compared with the second "
        f"(default: {DEFAULT_RECIPES})",
    )
    parser.add_argument("--experiment", choices=EXPERIMENTS, metavar="NAME",
                        help="recipes and pairs that answer a question, in place of --recipes, with a report in "
                        f"OUT_DIR/NAME; runs in OUT_DIR serve all of them: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--scale", choices=SCALES,
                        help="what isn't given after --: cpu: the demo's model and data, 500 steps; gpu: GPT-2 124M, 10,000 "
                        "steps (data are to be given)")
    add_plan(parser)
    options = parse_experiment(parser, arguments)
    take_recipes(parser, options, DEFAULT_RECIPES)
    check_plan(parser, options)
    return options


def train(runner, recipes, seeds, common):
    """Trains what isn't yet; returns the runs by recipe's name and seed, and the commands."""
    jobs = [(r.name, seed, job_of(r, seed, common)) for seed in seeds for r in recipes]
    finished = runner.run([job for *_, job in jobs])
    runs = {(name, seed): run for (name, seed, _), run in zip(jobs, finished)}
    return runs, [shlex.join(runner.command(job)) for *_, job in jobs]


def main(arguments):
    options = parse(arguments)
    if options.list:
        list_recipes()
        return
    experiment = EXPERIMENTS.get(options.experiment)
    recipes, pairs = chosen_pairs(options.recipes, options.against)
    runner = Runner(options.program, options.out_dir, options.jobs)
    common = common_options(options, runner, recipes[0])
    times = experiment.times if experiment else 1
    if options.plan:
        plan(options, runner, recipes, pairs, common, {1, times})
        return
    seeds = seeds_of(options)
    report_dir = options.out_dir / (options.experiment or "")
    report_dir.mkdir(exist_ok=True)
    runs, commands = train(runner, recipes, seeds, common)
    shorter = None
    if times > 1:
        shorter = runs
        longer_runner = Runner(options.program, report_dir, options.jobs)
        runs, more = train(longer_runner, recipes, seeds, longer(common, runner, recipes[0], times))
        commands += more
    command = shlex.join([".venv/bin/python", "scripts/compare_recipes.py", *arguments])
    write_report(report_dir, recipes, pairs, runs, seeds, command, commands, experiment, shorter)
    print(report_dir / "report.html")


if __name__ == "__main__":
    main_of("compare_recipes.py", main)
