"""What people load a checkpoint with, where it is installed: transformers computes the same logits and has the same tokens, and
lm-eval's harness, asked a task of local files, gives the scores of --score."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer import ENVIRONMENT, ROOT, TRAINER, gpt2_like_merges, latest, run, run_well

WHY = "pip install torch transformers accelerate lm-eval (some GB, so `make test` doesn't)"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

DUMP_LOGITS = Path(TRAINER).parent / "dump_logits"
T, LAYERS, CHANNELS = 64, 2, 32
TOKENIZERS = ["byte", "train:400", "gpt2"]
ARCHITECTURES = {
    "gpt2": [],
    "llama": ["--activation", "swiglu", "--norm", "rmsnorm", "--positions", "rope", "--no-biases", "--kv-heads", 1],
    "olmo": ["--activation", "swiglu", "--positions", "rope", "--no-biases", "--no-ln-affine", "--untied-head"],
    "nemotron": ["--activation", "relu2", "--positions", "rope", "--no-biases", "--untied-head"],
    "nemotron-gelu": ["--activation", "gelu-exact", "--positions", "rope"],
}
TEXT = "The cat sat on the mat. Why? It isn't ours!\n\n  Two  spaces, 1234 numbers; naïve café, 東京 \U0001f600\n\tdone"


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """make(architecture, tokenizer): the checkpoint of a run, made once."""
    base, made = tmp_path_factory.mktemp("runs"), {}

    def data(tokenizer):
        out = base / tokenizer.replace(":", "-")
        if not out.exists():
            (base / "gpt2.bpe").write_text(gpt2_like_merges(50000))
            file = ["--tokenizer-file", base / "gpt2.bpe"] if tokenizer == "gpt2" else []
            subprocess.run([sys.executable, ROOT / "data/prepare.py", "--input", *sorted((ROOT / "doc").glob("*.md")), "--tokenizer",
                            tokenizer, *file, "--out-dir", out], check=True, capture_output=True)
        return out

    def checkpoint(architecture, tokenizer="train:400"):
        if (architecture, tokenizer) not in made:
            out = base / f"{architecture}-{len(made)}"
            run_well("--train-data", data(tokenizer) / "train_*.bin", "--layers", LAYERS, "--heads", 2, "--channels", CHANNELS,
                     "--max-seq-len", T, "--batch-size", 4, "--max-steps", 20, "--learning-rate", "3e-3", "--warmup-steps", 2,
                     "--threads", 1, *ARCHITECTURES[architecture], "--out-dir", out)
            made[architecture, tokenizer] = latest(out)
        return made[architecture, tokenizer]

    return checkpoint


def reference(*arguments):
    command = [sys.executable, ROOT / "dev/reference/check_transformers.py", *arguments, "--dump-logits", DUMP_LOGITS]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=ENVIRONMENT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(make, tmp_path, architecture):
    checkpoint = make(architecture)
    exported = []
    if architecture.startswith("nemotron"):
        exported = ["--exported", tmp_path / "exported"]
        subprocess.run([sys.executable, ROOT / "scripts/export_nemotron.py", checkpoint, exported[1]], check=True, capture_output=True)
    reference(checkpoint, *exported)


def requests_of(seed=0):
    """Contexts and continuations cut out of a text anywhere, among them within spaces, and one of nothing."""
    rng = np.random.default_rng(seed)
    cuts = [sorted(rng.choice(len(TEXT) + 1, 3, replace=False)) for _ in range(30)]
    pairs = [(TEXT[a:b], TEXT[b:min(c, b + T // 3)]) for a, b, c in cuts]
    pairs += [("", TEXT[:9]), ("The cat ", "sat"), (TEXT * 3, " and more")]
    return [(context, continuation) for context, continuation in pairs if continuation and (not context or context.strip())]


def own_scores(checkpoint, pairs, path, *options):
    path.write_text("".join(json.dumps({"id": i, "context": context, "continuation": continuation}) + "\n"
                            for i, (context, continuation) in enumerate(pairs)))
    done = run("--score", checkpoint, "--requests", path, "--threads", 1, *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def bound_of(tokens, largest, recipe):
    """test_score.py derives it: a logit's error for each stage of the network, twice, for each token."""
    stages, longest_sum = 11 * LAYERS + 3, 4 * CHANNELS
    roundings = np.sqrt(stages * longest_sum) * 2.0**-24 if recipe == "fp32" else np.sqrt(stages) * 2.0**-9
    return tokens * 2 * 4 * roundings * largest


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_scores_are_lm_evals(make, tmp_path, tokenizer, recipe):
    """Each request by lm-eval's model in FP64: the same tokens, logarithms within the bound, the same choice of the likeliest."""
    lm_eval = pytest.importorskip("lm_eval", reason=WHY)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    checkpoint, pairs = make("llama", tokenizer), requests_of()
    harness = HFLM(pretrained=str(checkpoint), dtype="float64", device="cpu", batch_size=1, max_length=T)
    expected = harness.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)], disable_tqdm=True)
    found = own_scores(checkpoint, pairs, tmp_path / "requests.jsonl", "--recipe", recipe)
    least = np.inf
    for pair, (logprob, greedy), line in zip(pairs, expected, found, strict=True):
        count = len(harness._encode_pair(*pair)[1]) if pair[0] else len(harness.tok_encode(pair[1]))
        assert line["tokens"] == count and line["bytes"] == len(pair[1].encode()), (pair, line)
        error, bound = abs(line["logprob"] - logprob), bound_of(count, 10, recipe)
        least = min(least, bound / max(error, 1e-300))
        assert error <= bound, (pair, line, logprob)
        assert recipe == "bf16" or line["greedy"] == greedy
    print(f"lm-eval {lm_eval.__version__}, {tokenizer}, {recipe}: {len(pairs)} requests, least margin {least:.1f}")


TASK = """task: local_quiz
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def test_a_task_of_local_files(make, tmp_path):
    """lm-eval's harness, from a task's file to its accuracy, and scripts/evaluate.py on the same file."""
    lm_eval = pytest.importorskip("lm_eval", reason=WHY)
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rng = np.random.default_rng(1)
    words = sorted(set(TEXT.split()))
    lines = [{"context": " ".join(rng.choice(words, 4)), "choices": [" " + " ".join(rng.choice(words, 2)) for _ in range(3)],
              "gold": int(rng.integers(3))} for _ in range(40)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "task").mkdir()
    (tmp_path / "task/quiz.yaml").write_text(TASK.format(data=tmp_path / "quiz.jsonl"))
    checkpoint = make("llama")
    model = HFLM(pretrained=str(checkpoint), dtype="float32", device="cpu", batch_size=8)
    manager = TaskManager(include_path=str(tmp_path / "task"), include_defaults=False)
    theirs = lm_eval.simple_evaluate(model=model, tasks=["local_quiz"], task_manager=manager, bootstrap_iters=0)["results"]["local_quiz"]
    done = subprocess.run([sys.executable, ROOT / "scripts/evaluate.py", checkpoint, "--tasks", tmp_path / "quiz.jsonl",
                           "--program", shlex.quote(TRAINER), "--out-dir", tmp_path / "out", "--", "--recipe", "fp32", "--threads", "1"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    (ours,) = json.loads((tmp_path / "out/answers.json").read_text())
    print(theirs)
    assert np.mean(ours["accuracy"]) == pytest.approx(theirs["acc,none"], abs=1e-12) and 0 < theirs["acc,none"] < 1
