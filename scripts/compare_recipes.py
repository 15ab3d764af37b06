#!/usr/bin/env python3
"""Trains one model under several recipes, on the same batches from the same weights, and reports what differs.

Validation loss and its gap to bf16 in perplexity, gradient norms, quantization statistics by layer and throughput go
into OUT_DIR/report.html (one file, pictures included) and OUT_DIR/report.md. bf16 under further seeds says how much
runs differ by chance: a seed changes the initial weights and the order of the data, and 19 of 20 pairs of bf16 runs are
closer than the noise (Student's t with few runs is wide: four further seeds halve what two give). A recipe's run shares
the seed of the bf16 run that it is compared with, so that the noise is, if anything, too wide.

What was finished isn't run again: the same command goes on where it was stopped, and then only draws.
"""

import itertools
import shlex
from typing import NamedTuple

import numpy as np
from plot import (
    COLORS,
    SMOOTH_FROM,
    InputError,
    make_logarithmic,
    operand_order,
    operand_style,
    plain_numbers,
    smoothed,
)
from report import Report, new_figure
from runner import (
    BASELINE,
    DEFAULT_RECIPES,
    NOT_FINITE,
    Job,
    Runner,
    check_common,
    chosen_recipes,
    experiment_parser,
    list_recipes,
    main_of,
    miniature,
    option_value,
    parse_experiment,
    with_defaults,
)

BAR = 0.50  # % of perplexity: the largest gap that the MXFP8 paper (arXiv 2506.08027) sees to BF16
BASELINE_STYLE = ("black", (0, (5, 2)))
LINE_STYLES = ("-", (0, (6, 1.5, 1, 1.5)), (0, (1, 1.2)))
EXAMPLE = """\
example, on the demo's data (make demo prepares it):
  compare_recipes.py --out-dir runs/compare --noise-seeds 4 -- --train-data 'build/demo/data/train_*.bin' \\
      --val-data 'build/demo/data/val_*.bin' --layers 4 --heads 4 --channels 256 --max-seq-len 128 --batch-size 8 \\
      --max-steps 1500 --learning-rate 1e-3 --warmup-steps 100 --val-steps 24
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


def tokens_per_step(run):
    last = run.train[-1]
    return last["tokens"] / (last["step"] + 1)


def perplexity_gap(loss, base):
    """Returns how much larger the perplexity is, in %."""
    return 100 * np.expm1(loss - base)


def common_steps(curves):
    return sorted(set.intersection(*(set(curve.steps) for curve in curves)))


def at_steps(curve, steps):
    losses = dict(zip(curve.steps, curve.loss))
    return np.array([losses[step] for step in steps])


def gaps(run, base):
    """Returns steps, tokens and the gap in %, where both have a validation loss."""
    curve, base_curve = curve_of(run), curve_of(base)
    steps = common_steps([curve, base_curve])
    gap = perplexity_gap(at_steps(curve, steps), at_steps(base_curve, steps))
    return np.array(steps), np.array(steps) * tokens_per_step(base), gap


def noise(baselines, validations=1):
    """Returns steps, and the gap in % that two runs which differ by seed alone exceed in one case
    of twenty; None where there is but one run. It comes from the variance of the runs' losses, its
    mean over five validations, and Student's t. For more than one validation it is the gap that
    they exceed at any of them in one case of twenty at most (Bonferroni)."""
    from scipy.stats import t

    if len(baselines) < 2:
        return None
    curves = [curve_of(run) for run in baselines]
    steps = common_steps(curves)
    variance = np.var([at_steps(curve, steps) for curve in curves], axis=0, ddof=1)
    mean = np.array([variance[max(0, i - 2) : i + 3].mean() for i in range(len(steps))])
    return np.array(steps), 100 * np.expm1(t.ppf(1 - 0.025 / validations, len(curves) - 1) * np.sqrt(2 * mean))


def plain_seconds(run):
    """Returns the seconds of each step but the first, which also makes what later ones reuse, and
    those that collected statistics."""
    steps, seconds = run.series(run.train, "seconds")
    left_out = {0, *(e["step"] for e in run.quant)}
    plain = seconds[[step not in left_out for step in steps]]
    return plain if len(plain) else seconds


def step_seconds(run):
    return float(np.median(plain_seconds(run)))


def tokens_per_second(run):
    return tokens_per_step(run) / step_seconds(run)


def loss_at(run, seconds):
    """Returns the validation loss after that much training at the run's median speed, on the
    straight line between validations."""
    curve = curve_of(run)
    return float(np.interp(seconds / step_seconds(run), curve.steps, curve.loss))


class Result(NamedTuple):
    """What the table says of a run; gaps in % of perplexity."""

    final_loss: float
    final_gap: float
    worst_gap: float  # after warm-up
    worst_tokens: float
    tokens_per_second: float
    loss_at_equal_time: float
    exceeded: bool  # whether a gap after warm-up is above the paper's bar, and beyond chance at any validation
    diverged_at: int | None


def results_of(runs, base, warmup_steps, baselines):
    sound = [run for run in runs if not diverged(run)]
    equal_time = min(curve_of(run).steps[-1] * step_seconds(run) for run in sound) if sound else np.nan
    chance = noise(baselines, after_warmup(curve_of(base).steps, warmup_steps).sum())
    return [result_of(run, base, warmup_steps, chance, equal_time) for run in runs]


def diverged(run):
    return bool(run.end) and run.end.get("reason") == NOT_FINITE


def sound_to_its_end(run):
    return not diverged(run) and np.isfinite(curve_of(run).loss).all()


def after_warmup(steps, warmup_steps):
    """Returns which steps lie after warm-up; the last one in any case."""
    return steps >= min(max(1, warmup_steps), steps[-1])


def result_of(run, base, warmup_steps, chance, equal_time):
    speed = tokens_per_second(run)
    if diverged(run):
        return Result(*[np.nan] * 4, speed, np.nan, False, run.end["step"])
    steps, tokens, gap = gaps(run, base)
    after = after_warmup(steps, warmup_steps)
    worst = np.argmax(np.where(after, gap, -np.inf))
    exceeded = chance is not None and bool((after & (gap > np.maximum(BAR, np.interp(steps, *chance)))).any())
    loss, at_equal_time = curve_of(run).loss[-1], loss_at(run, equal_time)
    return Result(loss, gap[-1], gap[worst], tokens[worst], speed, at_equal_time, exceeded, None)


def verdict(result, final_noise):
    """Says in words whether the gap is more than chance, and whether the paper's bar held. Of
    recipes that change nothing, one in forty is called worse at the end, and at most one in forty
    is said to have exceeded the bar on the way."""
    if result.diverged_at is not None:
        return f"diverged at step {result.diverged_at}"
    if not np.isfinite([result.final_gap, result.worst_gap]).all():
        return "no gap: a validation loss isn't finite"
    is_seen = final_noise is not None and abs(result.final_gap) >= final_noise
    if final_noise is None:
        chance = "no seeds to tell it from chance"
    elif is_seen:
        chance = (
            f"larger than the noise ({final_noise:.2f} %): {'worse' if result.final_gap > 0 else 'better'} than bf16"
        )
    elif result.exceeded:
        chance = f"smaller than the noise ({final_noise:.2f} %) at the end, but not on the way"
    else:
        chance = f"smaller than the noise ({final_noise:.2f} %): no difference was seen"
    if result.worst_gap < BAR:
        bar = f"stayed below the paper's {BAR:.2f} %"
    elif is_seen and result.final_gap >= BAR:
        bar = f"exceeded the paper's {BAR:.2f} %"
    elif result.exceeded:
        bar = f"exceeded the paper's {BAR:.2f} % on the way"
    else:
        bar = f"above the paper's {BAR:.2f} % at times, as chance alone can be"
    return f"{chance}; {bar}"


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


class Styled(NamedTuple):
    run: object
    color: str
    dash: object  # as matplotlib takes it

    @property
    def line(self):
        """Returns what matplotlib draws it with: the baseline above the others, which show between
        its dashes."""
        is_base = (self.color, self.dash) == BASELINE_STYLE
        return {"color": self.color, "linestyle": self.dash, "linewidth": 1.4, "zorder": 2.5 if is_base else 2}


def styled(runs):
    """Gives each a color and dash that no other has, up to 25 runs; the first is the baseline."""
    dashes = [(color, dash) for dash in LINE_STYLES for color in COLORS]
    styles = itertools.chain([BASELINE_STYLE], itertools.cycle(dashes))
    return [Styled(run, *style) for run, style in zip(runs, styles)]


def draw_losses(runs, baselines):
    base, band = runs[0].run, noise(baselines)
    figure = new_figure(12, 9)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.15])
    for seed in baselines[1:]:
        top.plot(*curve_of(seed)[1:], color="#aaaaaa", linewidth=0.8)
    for drawn in runs:
        top.plot(*curve_of(drawn.run)[1:], label=drawn.run.label, **drawn.line)
    if baselines[1:]:
        top.plot([], [], color="#aaaaaa", linewidth=0.8, label="bf16, further seeds")
    top.set(title="Validation loss", ylabel="nats per token")
    top.legend(loc="upper right", ncols=1 + len(runs) // 9)

    if band:
        tokens = band[0] * tokens_per_step(base)
        label = "noise: 19 of 20 pairs of bf16 runs at any one step"
        bottom.fill_between(tokens, -band[1], band[1], color="#dddddd", linewidth=0, label=label)
    bottom.axhline(0, **runs[0].line)
    bottom.axhline(BAR, color="#b00020", linewidth=1, linestyle=(0, (6, 3)), label=f"the paper's bar, {BAR:.2f} %")
    for drawn in runs[1:]:
        if not diverged(drawn.run):
            bottom.plot(*gaps(drawn.run, base)[1:], marker=".", **drawn.line)
    bottom.set(title="Perplexity, gap to bf16", ylabel="%", xlabel="training tokens")
    limit_gaps(bottom, runs, band)
    bottom.legend(loc="lower right", frameon=True, facecolor="white", framealpha=0.9, edgecolor="none")
    number_tokens(bottom)
    return figure


def limit_gaps(axes, runs, band):
    """Sets the scale: most runs' gaps are a per cent or so, and beyond 5 % it is logarithmic. Of
    the band, half its steps fit in."""
    base = runs[0].run
    after_start = [gaps(run, base)[2][1:] for run, _, _ in runs[1:] if not diverged(run)]
    edge = np.median(band[1]) if band else BAR
    known = np.concatenate([*after_start, [BAR, edge, -edge]])
    known = known[np.isfinite(known)]
    if np.abs(known).max() > 5:
        axes.set_yscale("symlog", linthresh=1, linscale=1.5)
        axes.set_yticks([-10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
        axes.yaxis.set_major_formatter(plain_numbers())
        axes.minorticks_off()
    margin = 1.2
    axes.set_ylim(min(margin * known.min(), -2 * BAR), max(margin * known.max(), 3 * BAR))


def number_tokens(axes):
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_norms(runs):
    figure = new_figure(12, 4.2)
    axes = figure.subplots()
    for drawn in runs:
        steps, values = drawn.run.series(drawn.run.train, "grad_norm")
        tokens = (steps + 1) * tokens_per_step(drawn.run)
        if len(values) >= SMOOTH_FROM:
            axes.plot(tokens, values, color=drawn.color, alpha=0.15, linewidth=0.5)
            values = smoothed(values)
        axes.plot(tokens, values, label=drawn.run.label, **drawn.line)
    axes.set(title="Gradient norm (L2), smoothed where the curve is long", xlabel="training tokens")
    make_logarithmic(axes)
    axes.legend(loc="upper right", ncols=1 + len(runs) // 9)
    number_tokens(axes)
    return figure


QUANT_PANELS = (
    ("clamped", "Clamped", "% of elements", 100),
    ("at_max", "At the largest code", "% of elements", 100),
    ("sqnr_db", "Signal to quantization noise", "dB", 1),
)


def draw_quant(runs):
    """Draws the last step with statistics, by layer: the median over its linears, shaded from
    lowest to highest."""
    figure = new_figure(12, 2.6 * len(runs) + 0.3)
    parts = figure.subfigures(len(runs), 1, squeeze=False)[:, 0]
    for part, run in zip(parts, runs):
        step = run.quant[-1]["step"]
        events = [e for e in run.quant if e["step"] == step]
        part.suptitle(f"{run.label}, at step {step:,}", fontsize=9, color="#555555", x=0.01, ha="left")
        row = part.subplots(1, 3)
        for axes, (field, title, unit, factor) in zip(row, QUANT_PANELS):
            for operand in sorted({e["operand"] for e in events}, key=operand_order):
                draw_by_layer(axes, [e for e in events if e["operand"] == operand], operand, field, factor)
            axes.set(title=title, ylabel=unit, xlabel="layer")
            axes.xaxis.get_major_locator().set_params(integer=True)
            if factor == 100:
                axes.set_ylim(bottom=0)
        part.legend(*row[0].get_legend_handles_labels(), loc="outside right center", title="operand")
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
    axes.plot(x, median, marker=".", linewidth=1.4, label=operand, **style)


def draw_throughput(runs):
    from matplotlib.ticker import EngFormatter

    figure = new_figure(12, 0.9 + 0.32 * len(runs))
    axes = figure.subplots()
    for i, (run, color, _) in enumerate(runs):
        seconds = plain_seconds(run)
        slow, median, fast = (tokens_per_step(run) / np.quantile(seconds, q) for q in (0.9, 0.5, 0.1))
        axes.barh(i, median, color=color, height=0.6)
        for line, width in (("white", 3), ("#333333", 1)):  # to be seen on a dark bar too
            axes.plot([slow, fast], [i, i], color=line, linewidth=width)
    axes.set_yticks(range(len(runs)), [run.label for run, _, _ in runs])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(title="Throughput of the median step; line: from the 10th to the 90th percentile", xlabel="tokens/s")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# The report

HEAD = (
    "recipe",
    "is",
    "the paper says",
    "final loss:",
    "gap, % of perplexity:",
    "worst gap after warm-up, %:",
    "at tokens:",
    "tokens/s:",
    "loss at equal time:",
    "in words",
)


def table_rows(recipes, results, final_noise):
    def figure(value, form):
        return f"{value:{form}}" if np.isfinite(value) else "–"

    rows = []
    for recipe, r in zip(recipes, results):
        is_base = recipe.name == BASELINE
        cells = [recipe.name, recipe.words, recipe.finding, figure(r.final_loss, ".4f")]
        cells += ["0" if is_base else figure(r.final_gap, "+.3f"), "0" if is_base else figure(r.worst_gap, "+.3f")]
        cells += ["–" if is_base else figure(r.worst_tokens, ",.0f")]
        cells += [figure(r.tokens_per_second, ",.0f"), figure(r.loss_at_equal_time, ".4f")]
        rows.append([*cells, "the baseline" if is_base else verdict(r, final_noise)])
    return rows


def noise_in_words(baselines, final_noise, lost):
    left_out = (
        f"Of bf16's {lost + len(baselines) - 1} further seeds {lost} diverged, or came to a validation loss that isn't "
        "finite, and are left out. "
        if lost
        else ""
    )
    if final_noise is None:
        return left_out + (
            "There is no noise band: bf16 has a whole curve under one seed only (--noise-seeds 4 trains it under four "
            "more), so that small gaps can't be told from chance."
        )
    return left_out + (
        "Noise: of bf16 runs that differ by seed alone (initial weights and order of the data) 19 of 20 pairs end "
        f"within {final_noise:.3f} % of perplexity, estimated from {len(baselines)} runs. A gap below that shows "
        "nothing, and of recipes that change nothing one in twenty has a larger one. The worst of many gaps is large "
        "by chance: on the way only one that seeds reach at any of the validations in at most one case of forty "
        "(Bonferroni's correction) is said to exceed the paper's bar. The recipes share the seed of the bf16 run that "
        "they are compared with, so that the noise is, if anything, too wide."
    )


def model_in_words(model):
    """Returns the model's size, and what it has that GPT-2 hasn't; a log of an older program
    doesn't say all of it."""
    names = {
        "layers": "layers",
        "heads": "heads",
        "channels": "channels",
        "max_seq_len": "positions",
        "vocab_size": "tokens in the vocabulary",
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
    words += [f"{model[field]} {name}" for field, name in names.items() if field in model]
    differing = [field for field, value in gpt2.items() if model.get(field, value) != value]
    words += [f"{field.replace('_', '-')} {model[field]}" for field in differing]
    return ", ".join(words) or "its size wasn't logged"


def write_report(out_dir, recipes, runs, seeds, command, commands):
    """Writes the report of the recipes' runs, the baseline's first, and bf16's under further
    seeds."""
    base = runs[0]
    if diverged(base):
        step = base.end["step"]
        raise InputError(
            f"{base.label} diverged at step {step}: there is nothing to compare with; lower --learning-rate"
        )
    if not sound_to_its_end(base):
        raise InputError(
            f"{base.label} has a validation loss that isn't finite: there is nothing to compare with; lower "
            "--learning-rate"
        )
    baselines = [base, *(run for run in seeds if sound_to_its_end(run))]
    settings = base.config.get("options", {})
    warmup, val_steps = int(settings.get("warmup-steps") or 0), settings.get("val-steps", 20)
    validated = f"{val_steps} micro-batches of validation data" if val_steps else "all validation data"
    band = noise(baselines)
    results = results_of(runs, base, warmup, baselines)
    final_noise = band[1][-1] if band else None
    curve = curve_of(base)

    report = Report("Recipes compared")
    report.paragraph(
        f"One model ({model_in_words(base.config.get('model', {}))}), trained for {curve.steps[-1]:,.0f} steps, "
        f"{curve.tokens[-1]:,.0f} tokens, under {len(runs)} recipes, each from the same weights on the same batches."
    )
    report.items(
        [
            f"{r.name}: {gap_in_words(result)}{verdict(result, final_noise)}."
            for r, result in zip(recipes[1:], results[1:])
        ]
    )
    report.paragraph(noise_in_words(baselines, final_noise, 1 + len(seeds) - len(baselines)))
    report.table(HEAD, table_rows(recipes, results, final_noise))
    report.paragraph(
        f"Losses are in nats per token, of {validated}. The gap is (perplexity / "
        f"bf16's - 1); warm-up is that of the learning rate ({warmup:,} steps). tokens/s are the median step's of "
        "each run by itself: runs are made one after another, and a few per cent between recipes of the same cost are "
        "the machine's, which may do other things too. The loss at equal time is the one each run has at its median "
        "speed when the fastest run ends, between validations on a straight line; validations and statistics take no "
        "time in it."
    )
    report.paragraph(
        "The paper is arXiv 2506.08027 where no other is named. It trains models of up to 8B parameters on up to 15T "
        "tokens: differences that it sees there needn't show in a small model."
    )
    report.heading("Validation loss, and the gap to bf16")
    report.paragraph(
        "As figures 2, 3 and 5 of arXiv 2506.08027, which sees MXFP8 stay within 0.50 % of BF16's perplexity."
    )
    report.picture(draw_losses(styled(runs), baselines), "loss", "Validation loss and its gap to bf16 against tokens")
    report.heading("Gradient norm")
    report.picture(draw_norms(styled(runs)), "gradient_norm", "Gradient norms against tokens")
    quantized = [run for run in runs if run.quant]
    if quantized:
        report.heading("Quantization, by layer")
        report.paragraph(
            "The median over a layer's linears, shaded from the lowest to the highest, at the last step that was "
            "measured."
        )
        report.picture(
            draw_quant(quantized), "quantization", "Clamped, at the largest code, and SQNR, by layer and operand"
        )
    report.heading("Throughput")
    report.picture(draw_throughput(styled(runs)), "throughput", "Tokens per second of each recipe")
    report.made_by(command, commands, base.config.get("device", "not logged"))
    report.write(out_dir)


def gap_in_words(result):
    return f"{result.final_gap:+.3f} %, " if np.isfinite(result.final_gap) else ""


# ---------------------------------------------------------------------------------------------------------------------


def jobs_of(recipes, seeds, common):
    """Returns jobs for the recipes under the first seed, then for bf16 under the others."""
    base = recipes[0]
    jobs = [Job(r.name, (*r.options, "--seed", str(seeds[0]), *common)) for r in recipes]
    return jobs + [Job(f"{base.name}-seed-{seed}", (*base.options, "--seed", str(seed), *common)) for seed in seeds[1:]]


def common_options(options):
    """Returns what follows --, and how often to validate, measure and save where that doesn't say
    it."""
    given = miniature(options.out_dir) if options.tiny else []
    given = [*given, *options.common]
    if options.tiny:
        given = with_defaults(given, layers=2, heads=2, channels=64, max_steps=20, val_every=4, checkpoint_every=5)
    check_common(given, ("recipe", "seed", "out-dir", "resume"), ("train-data", "val-data"))
    if option_value(given, "val-every") == "0":
        raise InputError("--val-every 0 leaves no curves to compare: give the steps between validations")
    steps = option_value(given, "max-steps")
    steps = int(steps) if steps and steps.isdecimal() else 2000
    often = {"val_every": max(1, steps // 40), "quant_stats_every": max(1, steps // 10)}
    return with_defaults(given, **often, checkpoint_every=max(1, steps // 10), keep_checkpoints=1)


def parse(arguments):
    usage = "compare_recipes.py --out-dir DIR [options] -- OPTIONS_OF_TRAIN_GPT_MXFP8..."
    parser = experiment_parser("compare_recipes.py", usage, __doc__, EXAMPLE)
    parser.add_argument(
        "--recipes",
        default=DEFAULT_RECIPES,
        metavar="all|paper|NAME,...",
        help="paper: the curves of arXiv 2506.08027; names as --list shows them, or recipes with adjustments, such as "
        "mxfp8+scale-rounding-gradients=floor (default: %(default)s)",
    )
    parser.add_argument(
        "--noise-seeds", type=int, default=0, metavar="N", help="further seeds under which bf16 is trained (default: 0)"
    )
    options = parse_experiment(parser, arguments)
    if options.out_dir is None and not options.list:
        parser.error("the following arguments are required: --out-dir")
    if options.noise_seeds < 0:
        parser.error("--noise-seeds must not be negative")
    return options


def main(arguments):
    options = parse(arguments)
    if options.list:
        list_recipes()
        return
    recipes = chosen_recipes(options.recipes)
    seeds = [options.seed + i for i in range(1 + options.noise_seeds)]
    runner = Runner(options.program, options.out_dir)
    jobs = jobs_of(recipes, seeds, common_options(options))
    runs = runner.run(jobs)
    compared, further = runs[: len(recipes)], runs[len(recipes) :]
    command = shlex.join(["scripts/compare_recipes.py", *arguments])
    commands = [shlex.join(runner.command(job)) for job in jobs]
    write_report(options.out_dir, recipes, compared, further, command, commands)
    print(options.out_dir / "report.html")


if __name__ == "__main__":
    main_of("compare_recipes.py", main)
