"""scripts/compare_recipes.py: three recipes of a tiny model, killed and continued; its table against the logs, read here
again by other means; what it answers bad input. And the words and numbers of its report on fabricated logs."""

import errno
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from trainer import ENVIRONMENT, ROOT, SLOWNESS, TRAINER, events, make_data, run, snapshot, steps, validations

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import compare_recipes  # noqa: E402
import runner  # noqa: E402
from plot import InputError  # noqa: E402
from test_plot import events as fabricated  # noqa: E402
from test_plot import write_log  # noqa: E402

T_OF_3 = 4.302652730  # Student's t, 0.975, 2 degrees of freedom, from a table
NAMES = ["bf16", "mxfp8", "mxfp8-ocp", "bf16-seed-1338", "bf16-seed-1339"]


def command(*arguments):
    program = [sys.executable, str(SCRIPTS / "compare_recipes.py"), "--program", TRAINER]
    return program + [str(argument) for argument in arguments]


def compare(*arguments, code=0):
    done = subprocess.run(command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=300 * SLOWNESS)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    compare("--tiny", "--noise-seeds", 2, "--out-dir", out)
    return out


def prose(report):
    """Its text as one line: where it is wrapped doesn't matter."""
    return " ".join(report.read_text().split())


def table(report):
    """The Markdown table's cells, by recipe and column."""
    lines = [line for line in report.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(rows[0], row)) for row in rows[2:]}


def test_same_weights_and_batches_and_what_is_run(tiny):
    for name in NAMES:
        assert [event["step"] for event in steps(tiny / name)] == list(range(20))
        assert len(events(tiny / name, "val")) == 6
        options = events(tiny / name, "config")[0]["options"]
        assert options["seed"] == int(name.rpartition("-")[2]) if "seed" in name else 1337
    first = [events(tiny / name, "val")[0]["loss"] for name in NAMES]
    # the same weights to quantization's precision; others under another seed
    assert abs(first[1] - first[0]) < 0.01 and first[3] != first[0]
    assert len(events(tiny / "mxfp8", "quant")) > 0 and not events(tiny / "bf16", "quant")


def test_table_against_the_logs(tiny):
    rows = table(tiny / "report.md")
    assert list(rows) == ["bf16", "mxfp8", "mxfp8-ocp"]
    base = dict(validations(tiny / "bf16"))
    seconds = {}
    for name in rows:
        measured = {event["step"] for event in events(tiny / name, "quant")} | {0}
        seconds[name] = statistics.median(e["seconds"] for e in events(tiny / name, "train") if e["step"] not in measured)
    fastest = min(seconds.values()) * 20
    for name, row in rows.items():
        losses = dict(validations(tiny / name))
        assert row["final loss"] == f"{losses[20]:.4f}"
        assert float(row["tokens/s"].replace(",", "")) == pytest.approx(4 * 32 / seconds[name], abs=1)
        at = fastest / seconds[name]  # steps, on the line between two validations
        low = min(int(at // 4) * 4, 16)
        expected = losses[low] + (losses[low + 4] - losses[low]) * (at - low) / 4
        assert float(row["loss at equal time"]) == pytest.approx(expected, abs=1e-4)
        if name == "bf16":
            continue
        gaps = {step: 100 * (math.exp(losses[step]) / math.exp(base[step]) - 1) for step in losses}
        worst = max((step for step in gaps if step >= 4), key=gaps.get)  # after 4 steps of warm-up
        assert float(row["gap, % of perplexity"]) == pytest.approx(gaps[20], abs=6e-4)
        assert float(row["worst gap after warm-up, %"]) == pytest.approx(gaps[worst], abs=6e-4)
        assert row["at tokens"] == f"{worst * 128:,}"


def test_noise_and_words_against_the_logs(tiny):
    losses = [dict(validations(tiny / name)) for name in NAMES if name.startswith("bf16")]
    variances = [statistics.variance(run[step] for run in losses) for step in (12, 16, 20)]  # two validations to each side
    noise = 100 * (math.exp(T_OF_3 * math.sqrt(2 * statistics.mean(variances))) - 1)
    text = prose(tiny / "report.md")
    assert f"end within {noise:.3f} % of perplexity, estimated from 3 runs" in text
    for row in list(table(tiny / "report.md").values())[1:]:
        print(row)
        smaller = abs(float(row["gap, % of perplexity"])) < noise
        assert ("smaller than the noise" in row["in words"]) == smaller
        assert ("stayed below" in row["in words"]) == (float(row["worst gap after warm-up, %"]) < 0.5)
        assert ("no difference" in row["in words"]) == (smaller and "not on the way" not in row["in words"])


def test_report_is_one_file_and_says_how_it_was_made(tiny):
    text = (tiny / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', text)
    assert len(sources) == 4 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in text and "<link" not in text and "http" not in re.sub(r"base64,[^\"]*", "", text)
    for name in ("loss", "gradient_norm", "quantization", "throughput"):
        assert (tiny / f"{name}.png").read_bytes().startswith(b"\x89PNG") and f"({name}.png)" in (tiny / "report.md").read_text()
    for name in NAMES:
        assert f"--out-dir {tiny / name}" in (tiny / "report.md").read_text()
    assert re.search(r"commit ([0-9a-f]{12}|not known)", text) and "machine: " in text and "runs done before may be of another one" in text and "trained on: cpu" in text


def test_again_runs_nothing(tiny):
    before = {name: (tiny / name / "log.jsonl").read_bytes() for name in NAMES}
    done = compare("--tiny", "--noise-seeds", 2, "--out-dir", tiny)
    assert done.stdout.count("done before") == 5 and "training" not in done.stdout
    assert before == {name: (tiny / name / "log.jsonl").read_bytes() for name in NAMES}


def test_other_options_are_refused(tiny):
    before = snapshot(tiny)
    done = compare("--tiny", "--out-dir", tiny, "--", "--learning-rate", "1e-4", code=2)
    assert "holds a run of another command" in done.stderr and done.stderr.count("\n") == 1
    assert snapshot(tiny) == before


def trainer_in(directory):
    """The id of the process that trains there; None where none does."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if words[0] == TRAINER.encode() and str(directory).encode() in words:
            return int(entry.name)
    return None


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_and_continued(tmp_path, how):
    """The middle of a run: what was finished stays, what was begun ends with the losses of a run that wasn't stopped."""
    out = tmp_path / "out"
    data = make_data(tmp_path / "data")
    size = "--layers 2 --heads 2 --channels 64 --max-seq-len 32 --batch-size 4 --threads 1".split()
    common = [*data, *size, "--max-steps", 600, "--val-every", 50, "--checkpoint-every", 40, "--val-steps", 2]
    arguments = ["--recipes", "mxfp8", "--out-dir", out, "--", *common]
    process = subprocess.Popen(command(*arguments), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (out / "mxfp8" / "latest").exists():
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    process.send_signal(how)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
    if how == signal.SIGTERM:
        assert errors == "compare_recipes.py: stopped; the same command goes on with what isn't done\n"
        assert events(out / "mxfp8", "end")[-1]["reason"] == "SIGTERM"
    else:  # the program that it started goes on, and has the directory
        orphan = trainer_in(out / "mxfp8")
        os.kill(orphan, signal.SIGSTOP)
        assert "is in use" in compare(*arguments, code=2).stderr
        os.kill(orphan, signal.SIGKILL)
        while trainer_in(out / "mxfp8"):
            time.sleep(0.01)
    assert not (out / "report.md").exists()
    finished = (out / "bf16" / "log.jsonl").read_bytes()
    done = compare(*arguments)
    assert "bf16: done before" in done.stdout and "mxfp8: going on" in done.stdout
    assert (out / "bf16" / "log.jsonl").read_bytes() == finished
    assert [event["step"] for event in steps(out / "mxfp8")] == list(range(600))
    straight = tmp_path / "straight"
    subprocess.run([TRAINER, *map(str, common), "--recipe", "mxfp8", "--out-dir", straight, "--quant-stats-every", "60"],
                   env=ENVIRONMENT, check=True, capture_output=True)
    assert steps(out / "mxfp8") == steps(straight) and validations(out / "mxfp8") == validations(straight)


SMALL = "--layers 2 --heads 2 --channels 64 --max-seq-len 32 --batch-size 4 --threads 1 --max-steps 4".split()


def test_a_command_that_was_refused_can_be_corrected(tmp_path):
    data = make_data(tmp_path / "data")
    arguments = ["--recipes", "mxfp8", "--out-dir", tmp_path / "out", "--", *SMALL, *data[2:], "--train-data"]
    assert "typo" in compare(*arguments, tmp_path / "typo_*.bin", code=2).stderr
    assert "mxfp8: validation loss" in compare(*arguments, data[1]).stdout


def test_a_program_in_this_directory(tmp_path):
    """It isn't looked for in PATH, and is written down as a shell would run it."""
    (tmp_path / "trainer").symlink_to(TRAINER)
    data = make_data(tmp_path / "data")
    arguments = ["--program", "./trainer", "--recipes", "bf16", "--out-dir", "out", "--", *SMALL, *data]
    done = subprocess.run(command(*arguments), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/bf16/command.txt").read_text().startswith("./trainer --recipe bf16 --seed 1337 --layers 2")


WITHOUT_END = """\
#!/bin/sh
case "$*" in *--dry-run*) exit 0;; esac
for directory; do :; done
echo '{"event": "train", "step": 7, "loss": null}' >> "$directory/log.jsonl"
echo "train_gpt_mxfp8: the weights at step 8 aren't finite" >&2
exit 3
"""


def test_a_run_without_finite_weights_to_save_has_ended(tmp_path):
    """The program then logs no end."""
    program = tmp_path / "program"
    program.write_text(WITHOUT_END)
    program.chmod(0o755)
    job, one = runner.Job("mxfp8", ("--recipe", "mxfp8")), runner.Runner(program, tmp_path / "out")
    for _ in range(2):  # the second time nothing is run
        [result] = one.run([job])
        assert compare_recipes.diverged(result) and result.end["step"] == 7
    assert (tmp_path / "out/mxfp8/log.jsonl").read_text().count("train") == 1


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(runner.fcntl, "flock", flock)
    runner.Runner(TRAINER, tmp_path / "out")


def test_adjustments_are_the_options_of_the_group_recipe():
    group = re.search(r"\nRecipe:\n(.*?)\n\n", run("--help").stdout, re.DOTALL)[1]
    names = set(re.findall(r"^  --(?:\[no-\])?([a-z0-9-]+)", group, re.MULTILINE))
    assert len(names) >= 15 and names <= {"recipe", *runner.ADJUSTMENTS}


def test_every_named_recipe_is_one_of_the_program(tmp_path):
    data = make_data(tmp_path / "data")
    size = "--layers 3 --heads 2 --channels 64 --max-seq-len 32 --batch-size 4".split()
    jobs = [runner.Job(r.name, (*r.options, *data, *size)) for r in runner.chosen_recipes("all")]
    runner.Runner(TRAINER, tmp_path / "out").check(jobs)
    assert len({r.options for r in runner.RECIPES.values()}) == len(runner.RECIPES) == 15
    assert {r.name for r in runner.chosen_recipes("paper")} < set(runner.RECIPES)


def test_recipes_with_adjustments():
    chosen = runner.chosen_recipes("mxfp8+scale-rounding-gradients=floor,mxfp8+operand=wgrad-x=bf16+quantize-lm-head")
    assert [r.options for r in chosen] == [
        ("--recipe", "bf16"),
        ("--recipe", "mxfp8", "--scale-rounding-gradients", "floor"),
        ("--recipe", "mxfp8", "--operand", "wgrad-x=bf16", "--quantize-lm-head"),
    ]
    assert [r.name for r in runner.chosen_recipes("mxfp4,bf16")] == ["bf16", "mxfp4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out-dir", "out"], "no --train-data"),
        (["--tiny"], "required: --out-dir"),
        (["--tiny", "--out-dir", "out", "--recipes", "mxfp9"], "mxfp9: --recipe has no choice"),
        (["--tiny", "--out-dir", "out", "--recipes", "mxfp8+format-weights=e9m9"], "e9m9"),
        (["--tiny", "--out-dir", "out", "--recipes", "mxfp8+No=1"], "not an adjustment"),
        (["--tiny", "--out-dir", "out", "--recipes", "mxfp8,mxfp8"], "mxfp8 twice"),
        (["--tiny", "--out-dir", "out", "--recipes", ","], "names none"),
        (["--tiny", "--out-dir", "out", "--recipes", "mxfp8+learning-rate=2e-3"], "not an adjustment of a recipe"),
        (["--tiny", "--out-dir", "out", "--recipes", "mxfp8+recipe=bf16"], "not an adjustment of a recipe"),
        (["--tiny", "--out-dir", "out", "--", "--seed", "5"], "--seed is set for each run"),
        (["--tiny", "--out-dir", "out", "--", "--format-weights", "e4m3"], "--format-weights after -- would change"),
        (["--tiny", "--out-dir", "out", "--", "--operand=wgrad-x=e4m3"], "--operand after -- would change"),
        (["--tiny", "--out-dir", "out", "--", "--recipe-at", "5:mxfp8"], "--recipe-at after -- would change"),
        (["--tiny", "--out-dir", "out", "--", "--no-quantize-lm-head"], "--no-quantize-lm-head after -- would change"),
        (["--tiny", "--out-dir", "out", "--", "--max-minutes", "1"], "--max-minutes would end each run at another"),
        (["--tiny", "--out-dir", "out", "--", "--val-every", "0"], "--val-every 0"),
        (["--tiny", "--out-dir", "out", "--", "--max-steps", "2²"], "2²"),
        (["--tiny", "--out-dir", "out", "--", "--help"], "--help trains nothing"),
        (["--tiny", "--out-dir", "out", "--", "-h"], "-h trains nothing"),
        (["--tiny", "--out-dir", "out", "--", "--device-info"], "--device-info trains nothing"),
        (["--tiny", "--out-dir", "out", "--noise-seeds", "-1"], "must not be negative"),
        (["--tiny", "--out-dir", "out", "--program", "nothing"], "no program nothing"),
        (["--tiny", "--out-dir", "out", "--sede", "1"], "--help lists the options"),
    ],
)
def test_bad_input(tmp_path, arguments, words):
    done = subprocess.run(command(*arguments), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
    assert done.stderr.startswith("compare_recipes.py: ") and not list(tmp_path.glob("out/*/log.jsonl"))


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped; the same command goes on"),
        (runner.Stopped(signal.SIGTERM), 143, "stopped; the same command goes on"),
        (InputError("two\nlines"), 2, "two lines"),
        (PermissionError(13, "Permission denied", "a/file"), 2, "a/file: Permission denied"),
    ],
)
def test_what_the_user_causes_is_a_sentence(capsys, raised, code, words):
    def main(_):
        raise raised

    with pytest.raises(SystemExit) as ended:
        runner.main_of("this.py", main)
    errors = capsys.readouterr().err
    assert ended.value.code == code and errors.startswith(f"this.py: {words}") and errors.count("\n") == 1


MODEL = {"parameters": 3_300_000, "layers": 4, "heads": 4, "channels": 256, "max_seq_len": 128, "vocab_size": 257,
         "kv_heads": 2, "ffn": 1024, "activation": "gelu", "norm": "layernorm", "ln_affine": True, "biases": True,
         "positions": "rope", "rope_theta": 10000, "qk_norm": False, "untied_head": False}


# for one case of twenty at any of three validations: with 2 degrees of freedom Student's t has a closed form
T_OF_3_AT_ANY = math.sqrt(2) * (1 - 0.05 / 3) / math.sqrt(1 - (1 - 0.05 / 3) ** 2)


def fabricated_run(directory, losses, reason="max-steps", warmup=0):
    log = fabricated(20)[:-1]
    log[0]["model"] = MODEL
    log[0]["options"] = {"warmup-steps": warmup}
    log = [event for event in log if event["event"] != "val"]
    for event in log[1:]:
        event["tokens"] = 100 * (event["step"] + 1)
    log += [{"event": "val", "step": 5 * i, "loss": loss} for i, loss in enumerate(losses)]
    return runner.Run(write_log(directory, [*log, {"event": "end", "step": 20, "reason": reason}]), directory.name)


def test_words_of_fabricated_runs(tmp_path):
    base = fabricated_run(tmp_path / "bf16", [5, 4, 3, 2], warmup=5)
    seeds = [base, fabricated_run(tmp_path / "seed", [5, 4, 3, 2.03]), fabricated_run(tmp_path / "seed2", [5, 4, 3, 1.97])]
    band = compare_recipes.noise(seeds)
    widths = [100 * math.expm1(T_OF_3 * math.sqrt(2 * 0.03**2 / n)) for n in (4, 4, 3)]  # 2, 2.03, 1.97: variance 0.03^2
    assert band[1] == pytest.approx([0, *widths])
    assert compare_recipes.noise(seeds[:1]) is None
    at_any = [100 * math.expm1(T_OF_3_AT_ANY * math.sqrt(2 * 0.03**2 / n)) for n in (4, 4, 3)]
    assert compare_recipes.noise(seeds, 3)[1] == pytest.approx([0, *at_any])  # 17.6 % at step 5
    cases = {
        "smaller than the noise (11.11 %): no difference was seen; stayed below the paper's": [9, 4, 3, 2.004],
        "larger than the noise (11.11 %): worse than bf16; exceeded the": [5, 4, 3, 2.2],
        "larger than the noise (11.11 %): better than bf16; stayed below the": [5, 4, 3, 1.8],
        "smaller than the noise (11.11 %) at the end, but not on the way; exceeded the paper's 0.50 % on": [5, 4.2, 3, 2],
        "no difference was seen; above the paper's 0.50 % at times, as chance alone can be": [5, 4, 3, 2.05],
        "seen; above the paper's 0.50 % at times": [5, 4.14, 3, 2],  # 15 %: beyond 9.4 % of one step, not of any
        "a validation loss isn't finite": [5, 4, 3, None],
        "no gap: a validation loss isn't": [5, None, 3, 2],
    }
    for i, (words, losses) in enumerate(cases.items()):
        run = fabricated_run(tmp_path / f"run{i}", losses)
        result = compare_recipes.results_of([base, run], base, 5, seeds)[1]
        assert words in compare_recipes.verdict(result, band[1][-1]), (words, result)
    lost = fabricated_run(tmp_path / "lost", [5, 4], reason="not-finite")
    result = compare_recipes.results_of([base, lost], base, 5, seeds)[1]
    assert compare_recipes.verdict(result, None) == "diverged at step 20"
    alone = compare_recipes.results_of([base, seeds[1]], base, 5, seeds[:1])[1]
    words = "no seeds to tell it from chance; above the paper's 0.50 % at times"
    assert compare_recipes.verdict(alone, None).startswith(words)
    warm = compare_recipes.results_of([base, seeds[1]], base, 1000, seeds)[1]  # all of it warm-up: the last is judged
    assert warm.worst_gap == warm.final_gap == pytest.approx(100 * math.expm1(0.03))


def test_chance_rarely_exceeds_the_bar(tmp_path):
    """Of runs that differ by seed alone fewer than one in twenty is said to; more lie beyond the noise of one step."""
    rng = np.random.default_rng(1)
    exceeded = beyond = 0
    for _ in range(200):
        *seeds, result = [fabricated_run(tmp_path / f"{i}", list(3 + 0.02 * rng.standard_normal(40))) for i in range(6)]
        band = compare_recipes.noise(seeds)
        found = compare_recipes.results_of([seeds[0], result], seeds[0], 1, seeds)[1]
        exceeded += "exceeded" in compare_recipes.verdict(found, band[1][-1])
        beyond += bool((compare_recipes.gaps(result, seeds[0])[2] > band[1]).any())
    print(f"{exceeded} exceeded the bar, {beyond} the noise of one step, of 200")
    assert exceeded < 10 < beyond


def test_every_curve_is_told_apart(tmp_path):
    curves = compare_recipes.styled([fabricated_run(tmp_path / name, [5, 4, 3, 2]) for name in runner.RECIPES])
    assert len({(curve.color, curve.dash) for curve in curves}) == len(curves) == 15
    assert len({curve.color for curve in curves[:9]}) == 9 and curves[0].run.label == "bf16"
    assert curves[0].dash not in {curve.dash for curve in curves[1:]}


def test_seeds_that_are_lost_are_counted(tmp_path):
    runs = [fabricated_run(tmp_path / name, [5, 4, 3, 2]) for name in ("bf16", "mxfp8", "seed")]
    lost = [fabricated_run(tmp_path / "a", [5, None]), fabricated_run(tmp_path / "b", [5, 4], reason="not-finite")]
    recipes = runner.chosen_recipes("mxfp8")
    for seeds, said in ((lost, "no noise band"), ([*lost, runs[2]], "estimated from 2 runs")):
        compare_recipes.write_report(tmp_path, recipes, runs[:2], seeds, "command", ["jobs"])
        text = prose(tmp_path / "report.md")
        assert f"Of bf16's {len(seeds)} further seeds 2 diverged" in text and said in text and "nan" not in text
    with pytest.raises(InputError, match="a has a validation loss that isn't finite"):
        compare_recipes.write_report(tmp_path, recipes, [lost[0], runs[1]], [], "command", ["jobs"])


def test_logs_of_older_programs():
    assert compare_recipes.model_in_words({"layers": 4, "parameters": 2e6}) == "2 million parameters, 4 layers"
    assert compare_recipes.model_in_words({}) == "its size wasn't logged"


def test_what_the_papers_say():
    said = {name: r.finding for name, r in runner.RECIPES.items()}
    assert "0.50 %" in said["mxfp8"] and "divergence" in said["mxfp8-ocp"] and "E4M3" in said["e5m2-gradients-floor"]
    assert "2506.20752" in said["forward-only"] and said["bf16"] == runner.recipe("mxfp4", "").finding == "–"


def test_diverged_runs_are_drawn_and_listed(tmp_path):
    base = fabricated_run(tmp_path / "bf16", [5, 4, 3, 2])
    lost = fabricated_run(tmp_path / "mxfp4", [5, None], reason="not-finite")
    recipes = runner.chosen_recipes("mxfp4")
    compare_recipes.write_report(tmp_path, recipes, [base, lost], [], "command", ["jobs"])
    row = table(tmp_path / "report.md")["mxfp4"]
    words = "128 positions, 257 tokens in the vocabulary, kv-heads 2, positions rope)"
    assert words in prose(tmp_path / "report.md")
    assert row["in words"] == "diverged at step 20" and row["final loss"] == "–" and row["the paper says"] == "–"
    with pytest.raises(InputError, match="bf16 diverged"):
        bad = fabricated_run(tmp_path / "bad" / "bf16", [5, 4], reason="not-finite")
        compare_recipes.write_report(tmp_path, recipes, [bad, lost], [], "command", [])
