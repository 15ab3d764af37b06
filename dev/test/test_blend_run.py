"""A run on a blend of sources in phases: the samples it says, the same on a resume and on ranks, and what is refused."""

import json
import re
import shutil

import numpy as np
import pytest

from test_ranks import run_ranks_well
from trainer import (
    MODEL, T, TERM, VOCAB, assert_same_run, events, latest, losses, markov_tokens, one_sentence, run, run_well,
    signal_at_step, steps, write_tokenizer, write_tokens)

LENGTH = ["--max-steps", 50, "--schedule", "constant"]


@pytest.fixture(scope="session")
def where(tmp_path_factory):
    """Two sources that can be told apart by their losses: a chain of tokens, and the same token again and again."""
    directory = tmp_path_factory.mktemp("sources")
    write_tokens(directory / "a.bin", markov_tokens(100 * T + 1, 1))
    write_tokens(directory / "b.bin", np.full(30 * T + 1, 5))
    write_tokenizer(directory / "tokenizer.bin")
    return directory


def data(where, text):
    return ["--train-data", text.replace("A", f"{where}/a.bin").replace("B", f"{where}/b.bin")]


@pytest.fixture(scope="session")
def blended(where, tmp_path_factory):
    out = tmp_path_factory.mktemp("blended") / "run"
    done = run_well(*data(where, "A:0.7,B:0.3@0%,B:1@60%"), *MODEL, *LENGTH, "--out-dir", out)
    (out.parent / "stdout").write_text(done.stdout)
    return out


def test_one_source_of_weight_one_is_the_pattern(where, tmp_path):
    for name, text in (("pattern", "A"), ("weight", "A:1"), ("phase", "A:1@0%"), ("phases", "A:1@0%,A:1@50%")):
        run_well(*data(where, text), *MODEL, *LENGTH, "--out-dir", tmp_path / name)
    for name in ("weight", "phase", "phases"):
        assert_same_run(tmp_path / name, tmp_path / "pattern")


def test_phases_begin_where_they_say(where, blended, tmp_path):
    run_well(*data(where, "A:0.7,B:0.3"), *MODEL, *LENGTH, "--out-dir", tmp_path / "first")
    assert steps(tmp_path / "first")[:30] == steps(blended)[:30]
    assert steps(tmp_path / "first")[30] != steps(blended)[30]
    # From step 30 on every token is the same, and soon known; before, a third of the samples are.
    print(f"losses before {losses(blended)[25:30]}, after {losses(blended)[32:37]}")
    assert losses(blended)[32:].max() < losses(blended)[:30].min()


def test_the_log_and_the_console_say_what_is_blended(where, blended):
    config = events(blended, "config")[0]
    assert config["data"] == {
        "sources": [{"pattern": f"{where}/a.bin", "tokens": 100 * T + 1}, {"pattern": f"{where}/b.bin", "tokens": 30 * T + 1}],
        "phases": [{"step": 0, "weights": [0.7, 0.3]}, {"step": 30, "weights": [0, 1]}]}
    assert config["train_tokens"] == 130 * T + 2
    text = (blended.parent / "stdout").read_text()
    # 30 steps of 4 samples, 84 of A and 36 of B; then 80 of B.
    for name, epochs in (("a", 84 / 100), ("b", 116 / 30)):
        line, = re.findall(rf"^  {where}/{name}\.bin has .*$", text, re.M)
        print(line)
        assert line.endswith(f", {epochs:.3g} epochs")
    assert re.search(r"^  from step 30 +1 of .*b\.bin$", text, re.M)


def test_dry_run_prints_the_blend(where):
    text = run_well("--dry-run", *MODEL, *data(where, "A:0.7,B:0.3@0%,B:1@60%"), "--max-steps", 50).stdout
    assert "2 sources in 2 phases" in text and "0.84 epochs" in text and "3.87 epochs" in text
    text = run_well("--dry-run", *MODEL, *data(where, "A:0.7,B:0.3")).stdout  # as long as both together: 32 steps
    assert "1 phase\n" in text and f"{round(128 * 0.7) / 100:.3g} epochs" in text


def test_a_pattern_logs_no_blend(where, tmp_path):
    run_well(*data(where, "A"), *MODEL, "--max-steps", 1, "--out-dir", tmp_path / "run")
    assert "data" not in events(tmp_path / "run", "config")[0]


@pytest.mark.parametrize("stop", [17, 29, 30, 31])
def test_stopped_and_resumed_across_a_phase(where, blended, tmp_path, stop):
    """The stop is a signal: the number of steps, which phases depend on, stays."""
    common = [*data(where, "A:0.7,B:0.3@0%,B:1@60%"), *MODEL, *LENGTH]
    code, _, errors = signal_at_step(stop, [TERM], *common, "--out-dir", tmp_path / "run")
    assert (code, errors) == (0, "")
    run_well("--resume", "--out-dir", tmp_path / "run")
    assert_same_run(tmp_path / "run", blended)


def test_accumulation_and_micro_batches_change_no_sample(where, tmp_path):
    runs = []
    for batch in (6, 3, 1):
        out = tmp_path / str(batch)
        run_well(*data(where, "A:0.5,B:0.5@0%,A:0.2,B:0.8@33%"), *MODEL, "--recipe", "fp32", "--batch-size", batch,
                 "--total-batch-size", 6 * T, "--max-steps", 12, "--out-dir", out)
        runs.append(losses(out))
    apart = max(abs(run - runs[0])[0] for run in runs[1:]), max(abs(run - runs[0]).max() for run in runs[1:])
    print(f"first losses are {apart[0]:.2g} apart, any {apart[1]:.2g}")
    # As in test_trainer.py: a mean of 192 losses in FP32 in another order; then AdamW spreads it.
    assert apart[0] <= 4.2 * 192 * 2**-24 and apart[1] < 1e-3


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_ranks_see_the_samples_of_one(where, blended, tmp_path):
    out = tmp_path / "run"
    run_ranks_well(2, *data(where, "A:0.7,B:0.3@0%,B:1@60%"), *MODEL, *LENGTH, "--batch-size", 2, "--out-dir", out)
    difference = abs(losses(out) - losses(blended))
    print(f"losses of 1 and 2 ranks are at most {difference.max():.2g} apart; a step of another source is 2 off")
    assert difference.max() < 0.05


def test_a_resume_with_other_past_phases_is_refused(where, blended, tmp_path):
    out = shutil.copytree(blended, tmp_path / "run")
    for options in (["--max-steps", 100], data(where, "A:0.6,B:0.4@0%,B:1@60%"), data(where, "A:0.7,B:0.3@0%,B:1@62%")):
        done = run("--resume", "--out-dir", out, "--max-steps", 60 if options[0] != "--max-steps" else 100, *options)
        assert done.returncode == 2
        assert "--train-data" in one_sentence(done.stderr) and "--init-from" in done.stderr and "step 50" in done.stderr
    done = run("--resume", "--out-dir", out, "--max-steps", 60, "--batch-size", 8, "--total-batch-size", 8 * T)
    assert done.returncode == 2 and "--total-batch-size" in one_sentence(done.stderr) and "phases" in done.stderr
    # 50 steps of phases that begin where they did: at 30 of 60.
    run_well("--resume", "--out-dir", out, "--max-steps", 60, *data(where, "A:0.7,B:0.3@0%,B:1@50%"))
    assert len(steps(out)) == 60


def test_a_resume_tells_other_phases_from_other_tokens(where, tmp_path):
    """In a longer run the second phase, which takes a source more, begins later."""
    out = tmp_path / "run"
    run_well(*data(where, "A:1@0%,A:0.5,B:0.5@50%"), *MODEL, "--max-steps", 4, "--out-dir", out)
    done = run("--resume", "--out-dir", out, "--max-steps", 40)
    assert done.returncode == 2 and "weights or phases before step 4" in one_sentence(done.stderr)


def test_checkpoints_from_before_there_were_blends(where, tmp_path):
    run_well(*data(where, "A"), *MODEL, "--max-steps", 2, "--out-dir", tmp_path / "run")
    path = latest(tmp_path / "run") / "trainer_state.json"
    state = json.loads(path.read_text())
    assert state.pop("data_fingerprint") == 0
    path.write_text(json.dumps(state))
    run_well("--resume", "--max-steps", 4, "--out-dir", tmp_path / "run")
    assert len(steps(tmp_path / "run")) == 4


@pytest.mark.parametrize("text, options, parts", [
    ("A:0.7,B:0.2", [], ["add up to 0.9"]),
    ("A:0.7,B:0.3@10%", [], ["0%"]),
    ("A:1@0%,B:1@60%,A:1@50%", [], ["ascending"]),
    ("A:0.7,B", [], ["no weight"]),
    ("A:0.7,none.bin:0.3", [], ["no file matches 'none.bin'"]),
    ("A:1@0%,B:1@60%", ["--max-steps", 0, "--max-minutes", 1], ["--max-steps"]),
], ids=["sum", "start", "order", "weight", "file", "minutes"])
def test_what_makes_no_sense_is_refused(where, tmp_path, text, options, parts):
    done = run(*data(where, text), *MODEL, *LENGTH, *options, "--out-dir", tmp_path / "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert all(part in one_sentence(done.stderr) for part in parts), done.stderr


def test_sources_of_two_tokenizers_are_refused(where, tmp_path):
    shutil.copytree(where, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.bin"
    path.write_bytes(path.read_bytes().replace(b"\x01A", b"\x01a"))
    text = f"{where}/a.bin:0.5,{tmp_path}/other/b.bin:0.5"
    done = run("--train-data", text, *MODEL, *LENGTH, "--out-dir", tmp_path / "run")
    assert done.returncode == 2 and "tokenizer" in one_sentence(done.stderr) and str(VOCAB) in done.stderr


def test_a_file_whose_name_looks_like_a_blend(where, tmp_path):
    odd = tmp_path / "a:0.7,b:0.3@0%"
    shutil.copy(where / "a.bin", odd)
    run_well("--train-data", odd, *MODEL, *LENGTH, "--out-dir", tmp_path / "odd")
    run_well(*data(where, "A"), *MODEL, *LENGTH, "--out-dir", tmp_path / "plain")
    assert_same_run(tmp_path / "odd", tmp_path / "plain")
