"""scripts/plot.py on fabricated logs: what is drawn, which flaws of a log it survives, what bad input is answered."""

import base64
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import plot  # noqa: E402
import plot_profile  # noqa: E402

SIGNATURES = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


def events(steps, recipe="mxfp8", quant=False):
    log = [{"event": "config", "recipe": {"name": recipe}, "options": {"max-steps": steps}}]
    for step in range(1, steps + 1):
        train = {"loss": 5 - step / steps, "grad_norm": 1.5, "learning_rate": 1e-3, "tokens_per_second": 12345.0}
        log.append({"event": "train", "step": step, **train, "seconds": 0.1})
        if step % 5 == 0:
            log.append({"event": "val", "step": step, "loss": 5.5 - step / steps, "seconds": 1.0})
            figures = {"amax": 3.0, "clamped": 0.0, "at_max": 0.004, "flushed": 0.01}
            for layer in range(2 if quant else 0):
                for operand in ("fprop-x", "fprop-w", "dgrad-dy", "dgrad-w", "wgrad-dy", "wgrad-x"):
                    where = {"layer": layer, "linear": "qkv", "operand": operand, "format": "e4m3"}
                    quality = {"scale_rounding": "rceil", **figures, "sqnr_db": 30.0 + layer}
                    log.append({"event": "quant", "step": step, **where, **quality})
    return [*log, {"event": "end", "step": steps, "reason": "max-steps", "best_val_loss": 4.5}]


def write_log(directory, log, tail=""):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in log) + tail)
    return directory


def axes_titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_each_format_is_written(tmp_path, suffix):
    run = write_log(tmp_path / "run", events(20, quant=True))
    out = tmp_path / f"picture{suffix}"
    plot.main([str(run), "--out", str(out)])
    assert out.read_bytes().startswith(SIGNATURES[suffix]) and out.stat().st_size > 10_000
    assert sorted(p.name for p in tmp_path.iterdir()) == [out.name, "run"]


def test_one_run_is_drawn_into_its_directory(tmp_path, capsys):
    run = write_log(tmp_path / "run", events(20))
    plot.main([str(run)])
    assert capsys.readouterr().out == f"{run}/plot.png\n"
    assert (run / "plot.png").stat().st_size > 10_000


def test_panels_and_curves(tmp_path):
    several = [
        plot.Run(write_log(tmp_path / "a", events(20, "bf16")), "A"),
        plot.Run(write_log(tmp_path / "b", events(20, quant=True))),
    ]
    figure = plot.draw([(run, "black") for run in several])
    titles = axes_titles(figure)
    assert len(titles) == 5 + 3  # the run without quant events has no row of them
    loss = figure.axes[0]
    assert [line.get_xydata()[-1].tolist() for line in loss.lines[:2]] == [[20, 4.0], [20, 4.5]]
    legend = [text.get_text() for text in loss.get_legend().get_texts()]
    assert legend[:2] == ["A, validation 4.5000 at step 20", "b (mxfp8), validation 4.5000 at step 20"]
    sqnr = figure.axes[titles.index("Signal to quantization noise")]
    assert len(sqnr.lines) == 6
    assert set(sqnr.lines[0].get_ydata()) == {30.5}  # the median of two layers
    single = plot.draw([(several[0], "black")])
    assert axes_titles(single) == ["Loss", "Gradient norm (L2)", "Learning rate", "Throughput (tokens/s)"]


def test_losses_have_their_unit(tmp_path):
    """The proxy's are no cross-entropies of tokens."""
    drawn = []
    for program in "train_gpt_mxfp8", "proxy":
        config, *log = events(20)
        run = plot.Run(write_log(tmp_path / program, [config | {"program": program}, *log]))
        drawn.append(plot.draw([(run, "black")]).axes[0].get_ylabel())
    assert drawn == ["nats per token", ""]
    proxies = [plot.Run(write_log(tmp_path / name, [config | {"program": "proxy"}, *map(halved, log)]), name)
               for name, halved in (("whole", dict), ("half", lambda e: e | {"loss": e["loss"] / 2} if "loss" in e else e))]
    assert gap_between(*proxies)[2] == pytest.approx(-50)


def gap_between(*runs):
    """The title and the points of the panel of differences."""
    figure = plot.draw([(run, "black") for run in runs])
    plt.close(figure)
    axes = next(axes for axes in figure.axes if "difference from" in axes.get_title(loc="left"))
    return axes.get_title(loc="left"), axes.lines[1].get_xdata(), axes.lines[1].get_ydata()


def test_exact_gains_leave_the_others_their_scale(tmp_path):
    log = events(20, quant=True)
    gains = [event | {"operand": "gain", "sqnr_db": 100.0} for event in log if event.get("operand") == "fprop-w"]
    figure = plot.draw([(plot.Run(write_log(tmp_path / "run", log + gains)), "black")])
    bottom, top = figure.axes[axes_titles(figure).index("Signal to quantization noise")].get_ylim()
    assert 29.5 < bottom < 30 and 31 < top < 31.5


def test_the_gap_is_of_one_kind_of_loss(tmp_path):
    """Two runs with the same losses don't differ, where one of them wasn't validated or is shorter."""
    losses = {step: 2 + 3 * np.exp(-step / 40) + 0.1 * np.sin(step) for step in range(1, 1501)}
    log = [event | {"loss": losses[event["step"]]} for event in events(1500) if event["event"] == "train"]
    full = plot.Run(write_log(tmp_path / "full", log), "full")
    title, steps, gaps = gap_between(full, plot.Run(write_log(tmp_path / "part", log[:300]), "part"))
    assert title == "Training loss, difference from full" and list(steps) == list(range(1, 301)) and not np.any(gaps)
    validated = plot.Run(write_log(tmp_path / "val", [*log, *(e for e in events(1500) if e["event"] == "val")]), "val")
    title, _, gaps = gap_between(validated, full)
    assert title.startswith("Training loss") and not np.any(gaps)
    title, steps, gaps = gap_between(validated, validated)
    assert title.startswith("Validation loss") and len(steps) == 300 and not np.any(gaps)
    at = [plot.Run(write_log(tmp_path / f"at{end}", [*log, *({"event": "val", "step": step, "loss": 4.0} for step in (0, end))]), "v")
          for end in (60, 30)]  # before its first step and at its end: of these the one alone is both runs'
    assert gap_between(*at)[0].startswith("Training loss") and gap_between(at[0], at[0])[0].startswith("Validation loss")
    assert gap_between(at[0], at[0], at[1])[0].startswith("Training loss")


def test_a_logarithmic_axis_has_numbers():
    """However many decades it has: a diverging run's gradient norm has a dozen."""
    for decades in (0.3, 1, 2, 3.9, 4.1, 5.5, 6, 7, 8, 12, 40):
        figure, axes = plt.subplots(figsize=(4, 2))
        axes.plot([0, 1], [0.3, 0.3 * 10**decades])
        plot.make_logarithmic(axes)
        figure.canvas.draw()
        low, high = axes.get_ylim()
        texts = [tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        plt.close(figure)
        assert 3 <= len([text for text in texts if text]) <= 12, (decades, texts)


def test_a_gap_of_training_losses_is_smoothed(tmp_path):
    log = [event for event in events(1000) if event["event"] == "train"]
    more = [event | {"loss": event["loss"] + 0.01 + 0.01 * np.sin(event["step"])} for event in log]
    _, _, gaps = gap_between(*(plot.Run(write_log(tmp_path / name, of), name) for name, of in (("a", log), ("b", more))))
    assert np.abs(gaps - 0.01)[10:-10].max() < 0.001  # nats; a mean over 21 points of the sine is at most 1/(21·sin(1/2))


def test_dollars_are_no_formulas(tmp_path):
    run = plot.Run(write_log(tmp_path / "run", [*events(20, quant=True), bias(3, 0.1, [1]), answered(5, "t$^$")]), "a$b^$")
    figure = plot.draw([(run, "black"), (run, "red")])
    plot.save(figure, tmp_path / "picture.svg")
    plt.close(figure)
    shown = (tmp_path / "picture.svg").read_text()
    assert "difference from a$b^$" in shown and ">a$b^$: t$^$<" in shown and "\\$" not in shown


def answered(step, task, **values):
    return {"event": "eval", "step": step, "task": task, "questions": 9, **values, "bits_per_byte": 4 - step / 10}


def test_tasks_are_drawn(tmp_path):
    choices = [answered(step, "quiz", accuracy=step / 100, accuracy_by_characters=0.5) for step in (0, 10)]
    log = write_log(tmp_path / "a", events(20) + choices + [answered(10, "text")])
    figure = plot.draw([(plot.Run(log), "black")])
    accuracy, by_characters, bits = figure.axes[-3:]
    assert axes_titles(figure)[-3:] == ["Accuracy", "Accuracy by characters", "Bits per byte of right answers"]
    assert [line.get_xydata().tolist() for line in accuracy.lines] == [[[0, 0], [10, 0.1]]]  # a task without choices has none
    assert [(line.get_label(), line.get_ydata().tolist()) for line in bits.lines] == [("quiz", [4, 3]), ("text", [3])]
    assert by_characters.lines[0].get_color() != bits.lines[1].get_color()
    several = plot.draw([(plot.Run(log, "A"), "black"), (plot.Run(log, "B"), "red")])
    assert [line.get_label() for line in several.axes[-1].lines] == ["A: quiz", "A: text", "B: quiz", "B: text"]
    assert {line.get_color() for line in several.axes[-1].lines} == {"black", "red"}


def bias(step, ratio, layers):
    parts = [{"error_ratio": ratio * factor, "cosine": 1 - ratio**2 / 2} for factor in layers]
    return {"event": "gradient_bias", "step": step, "error_ratio": ratio, "cosine": 1 - ratio**2 / 2, "layers": parts}


def test_gradient_bias_is_drawn(tmp_path):
    log = events(20) + [bias(step, 0.04 + step / 1000, (0.5, 2)) for step in (5, 10, 15)]
    runs = [plot.Run(write_log(tmp_path / "a", log)), plot.Run(write_log(tmp_path / "b", events(20))),
            plot.Run(write_log(tmp_path / "c", events(20) + [bias(10, 0.0, (0, 0))]))]
    figure = plot.draw([(run, "black") for run in runs])
    titles = axes_titles(figure)
    assert len(titles) == 5 + 2
    ratio, cosine = figure.axes[-2:]
    assert titles[-2:] == ["Gradient error (L2) over exact gradient", "Cosine to exact gradient"]
    total = next(line for line in ratio.lines if line.get_label().startswith("a"))
    assert total.get_xydata().tolist() == [[5, 0.045], [10, 0.05], [15, 0.055]] and ratio.get_yscale() == "log"
    layers = [line.get_ydata().tolist() for line in ratio.lines[:2]]
    assert np.allclose(layers, [[0.0225, 0.025, 0.0275], [0.09, 0.1, 0.11]])
    assert cosine.get_yscale() == "linear" and cosine.lines[2].get_ydata()[0] == 1 - 0.045**2 / 2
    exact = plot.draw([(runs[2], "black")])  # of fp32 all are 0
    assert exact.axes[-2].get_yscale() == "linear"
    plot.main([str(tmp_path / name) for name in "abc"] + ["--out", str(tmp_path / "p.png")])
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_a_switched_recipe_is_marked(tmp_path):
    switch = {"event": "recipe", "step": 12, "recipe": {"name": "bf16", "adjusted": True}, "was": "mxfp8"}
    log = events(20) + [switch, switch] + [bias(step, 0.04, (1,)) for step in (5, 10)]
    figure = plot.draw([(plot.Run(write_log(tmp_path / "run", log)), "red")])
    for axes in (figure.axes[0], figure.axes[1], *figure.axes[-2:]):  # loss, norm, bias
        marks = [line for line in axes.lines if list(line.get_xdata()) == [12, 12]]
        assert len(marks) == 1 and marks[0].get_color() == "red"
    assert [text.get_text() for text in figure.axes[0].texts] == [" bf16, adjusted"]
    assert "recipe switched" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_another_recipe_at_a_resume_is_marked_too(tmp_path):
    again = {"event": "config", "step": 12, "recipe": {"name": "bf16"}}
    log = events(20, quant=True)
    figure = plot.draw([(plot.Run(write_log(tmp_path / "run", [*log[:50], again, *log[50:]])), "red")])
    plt.close(figure)
    assert [text.get_text() for text in figure.axes[0].texts] == [" bf16"]
    caption = figure.subfigs[-1].get_suptitle()
    assert caption.startswith("Quantization, run (mxfp8, then bf16 from step 12): ")  # statistics of step 15 too


def test_long_curves_are_smoothed_over_the_raw_ones():
    values = np.sin(np.arange(1000)) + np.linspace(5, 2, 1000)
    values[500] = np.nan
    smooth = plot.smoothed(values)
    assert np.isfinite(smooth).all() and smooth[0] == values[0]
    # The mean over 21 points of the line is the line; of the sine it is at most 1/(21·sin(1/2)) < 0.1. Leaving out the
    # point that is NaN moves it by at most (|sine - mean| + slope) / 20 < 0.06.
    error = np.abs(smooth - np.linspace(5, 2, 1000))[10:-10].max()
    print(f"largest error {error:.3f}, bound 0.16")
    assert error < 0.16


def test_a_truncated_line_foreign_lines_and_unknown_events_are_passed_over(tmp_path):
    log = events(20)
    log.insert(3, {"event": "surprise", "step": {"not": "a number"}})
    log.insert(4, ["not", "an", "object"])
    log.insert(5, {"event": "train", "step": None, "loss": 1})
    log.insert(6, {"event": "gradient_bias", "step": 3, "error_ratio": None, "layers": 7})
    log.insert(7, {"event": "recipe", "step": 3})
    directory = write_log(tmp_path / "run", log, tail='\x00\x00 {"event": "val"}\n{"event":"train","step":21,"lo')
    run = plot.Run(directory)
    assert [e["step"] for e in run.train] == list(range(1, 21))
    plot.main([str(directory / "log.jsonl"), "--out", str(tmp_path / "p.png")])
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_steps_run_again_after_a_resume_count_once(tmp_path):
    again = [{"event": "train", "step": step, "loss": 1.0} for step in (15, 16)]
    run = plot.Run(write_log(tmp_path / "run", [*events(20), {"event": "config"}, *again]))
    steps, losses = run.series(run.train, "loss")
    assert steps.tolist() == list(range(1, 21)) and losses[14:16].tolist() == [1.0, 1.0]
    assert run.series(run.train, "grad_norm")[0].tolist() == [s for s in range(1, 21) if s not in (15, 16)]


def test_non_finite_losses_are_marked(tmp_path):
    log = events(300)
    for event in log:
        if event["event"] == "train" and event["step"] in (7, 8):
            event.update(loss=None, grad_norm=None, finite=False)
    figure = plot.draw([(plot.Run(write_log(tmp_path / "run", log)), "black")])
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [line.get_xdata().tolist() for line in marks] == [[7, 8]]
    assert "not finite" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_a_live_page_grows_and_ends_with_the_runs(tmp_path):
    log = events(200)
    run = write_log(tmp_path / "run", log[:1])
    command = [sys.executable, SCRIPTS / "plot.py", run, "--live", "--every", "1", "--bell"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        time.sleep(1)
        assert not (run / "plot.html").exists()  # there is nothing to draw yet
        write_log(run, [*log[:151], {"event": "checkpoint", "step": 126}])  # before the step with this number
        assert process.stdout.readline() == f"{run}/plot.html\n"
        first = (run / "plot.html").read_text()
        assert '<meta http-equiv="refresh" content="1">' in first and "step 126, stopped" in first
        picture = base64.b64decode(re.search('base64,([^"]*)"', first)[1])
        assert picture.startswith(SIGNATURES[".png"]) and len(picture) > 10_000
        log[151]["loss"], log[-3]["loss"] = None, 100.0
        write_log(run, log)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    first, second = out.splitlines()
    assert first == "\arun (mxfp8): step 126: loss isn't finite" and second.startswith("run (mxfp8): step 200: loss 100, 4.3")
    last = (run / "plot.html").read_text()
    assert "refresh" not in last and "step 200, finished" in last
    assert sorted(p.name for p in run.iterdir()) == ["log.jsonl", "plot.html"]


def test_spikes(tmp_path):
    rng = np.random.default_rng(1)
    log = [{"event": "train", "step": i, "loss": 3 + 0.1 * rng.standard_normal(), "grad_norm": 1.0} for i in range(300)]
    for step, change in ((20, {"loss": 9.0}), (250, {"loss": 3.9}), (260, {"grad_norm": 1.5}), (270, {"loss": None}),
                         (280, {"skipped": "the loss is an outlier"}), (290, {"loss": 2.0})):
        log[step] |= change
    run = plot.Run(write_log(tmp_path / "run", log))
    # Step 20 has too few before it. 3.9 is nine deviations above; no other of 300 normal values lies six above.
    assert [step for step, _ in plot.spikes(run, -1)] == [250, 260, 270, 280]
    assert [step for step, _ in plot.spikes(run, 260)] == [270, 280]


def test_where_it_is_drawn(tmp_path, capsys, monkeypatch):
    """A log's picture lies beside it, as its run's does; the directory of --out is made."""
    monkeypatch.chdir(tmp_path)
    profile = {"event": "profile", "seconds": 0.04, "operations": {"adamw": 0.02}, "layers": {"rest": {"adamw": 0.02}}}
    write_log(tmp_path / "run", [*events(10)[:-1], profile, events(10)[-1]])
    for draw, name, more in ((plot, "plot.png", []), (plot, "plot.html", ["--live"]), (plot_profile, "profile.png", [])):
        draw.main(["run/log.jsonl", *more])
        draw.main(["run", "--out", f"a new/directory/{name}", *more])
        assert capsys.readouterr().out == f"run/{name}\na new/directory/{name}\n"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["log.jsonl", "plot.html", "plot.png", "profile.png"]
    assert sorted(path.name for path in (tmp_path / "a new/directory").iterdir()) == ["plot.html", "plot.png", "profile.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a new", "run"]


@pytest.mark.parametrize("kinds", [{"train"}, {"val"}])
def test_logs_with_one_kind_of_loss(tmp_path, kinds):
    log = [event for event in events(20) if event["event"] in kinds]
    runs = [str(write_log(tmp_path / name, log)) for name in "ab"]
    plot.main([*runs, "--out", str(tmp_path / "p.png")])
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path):
    write_log(tmp_path / "run", events(5))
    write_log(tmp_path / "empty", [])
    write_log(tmp_path / "unstarted", events(5)[:1])
    write_log(tmp_path / "stepless", [events(5)[0], events(5)[-1]])
    for arguments, words in [
        (["none"], "can't read none"),
        (["empty"], "is not a log of train_gpt_mxfp8"),
        (["unstarted"], "no step yet"),
        (["run", "--out", "p.gif"], "must end in one of .png, .svg, .pdf"),
        (["run", "--labels", "a", "b"], "--labels names 2 runs of 1"),
        (["run", "--out", "run/log.jsonl/p.png"], "run/log.jsonl: "),
        (["run", "--bell"], "--bell is for --live"),
        (["run", "--live", "--out", "p.png"], "must end in .html with --live"),
        (["run", "--live", "--every", "0"], "--every 0: give seconds"),
        (["none", "--live"], "can't read none"),
        (["stepless", "--live"], "ended before their first step"),
        ([], "--help"),
    ]:
        result = subprocess.run(
            [sys.executable, SCRIPTS / "plot.py", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 2, result
        assert result.stderr.startswith("plot.py: ") and result.stderr.count("\n") == 1 and words in result.stderr


def test_a_profile_is_drawn(tmp_path, capsys):
    operations = {"gemm fprop": 0.02, "attention forward": 0.01, "adamw": 0.005}
    layers = {"block 0": {"gemm fprop": 0.02, "attention forward": 0.01}, "embeddings, head, optimizer": {"adamw": 0.005}}
    profile = {"event": "profile", "steps": 9, "seconds": 0.04, "operations": operations, "layers": layers}
    run = write_log(tmp_path / "run", [*events(10), profile])
    plot_profile.main([str(run)])
    assert capsys.readouterr().out == f"{run}/profile.png\n"
    assert (run / "profile.png").read_bytes().startswith(SIGNATURES[".png"])
    plot_profile.main([str(run / "log.jsonl")])
    assert capsys.readouterr().out == f"{run}/profile.png\n"
    with pytest.raises(plot.InputError, match="--profile"):
        plot_profile.main([str(write_log(tmp_path / "without", events(10)))])


STANDIN = """#!/bin/sh
case "$*" in *--dry-run*) exit ;; esac
while [ $# -gt 0 ]; do if [ "$1" = --out-dir ]; then out=$2; fi; shift; done
mkdir -p "$out"
touch "$out/log.jsonl"
"""


@pytest.mark.parametrize("options, drawn", [
    ([], "runs/profile-"), (["--out-dir", "a run"], "a run"), (["--dry-run"], None), (["--dry-run", "--out-dir", "none"], None),
    (["--dry-run", "--out-dir", "scripts"], None)])  # which is there
def test_what_is_drawn_of_a_profiled_run(tmp_path, options, drawn):
    """profile.sh's options go to the trainer, here to one that makes its directory."""
    for name, text in (("scripts/profile.sh", (SCRIPTS / "profile.sh").read_text()), ("train_gpt_mxfp8", STANDIN),
                       (".venv/bin/python", '#!/bin/sh\necho "$1 $2"\n')):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run([tmp_path / "scripts/profile.sh", *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = done.stdout.splitlines()[1:]  # the first makes the data
    assert len(calls) == bool(drawn) and all(call.startswith(f"scripts/plot_profile.py {drawn}") for call in calls)
