"""--score: what it says of requests, against logits that PyTorch computed in FP64 and against this program's own logits by
another way; batches, ranks, and files of requests that can't be used."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from trainer import ENVIRONMENT, ROOT, TRAINER, latest, make_data, one_sentence, run, run_well

FIXTURES = ROOT / "dev/test/fixtures"
DUMP_LOGITS = Path(TRAINER).parent / "dump_logits"
VOCAB, END_OF_TEXT, T = 67, 66, 40  # of hf_llama
FIRST = ord("!")  # what token 0 is written as, 1 as '"', ...


def text_of(tokens):
    return "".join(chr(FIRST + token) for token in tokens)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """hf_llama with a tokenizer whose tokens are characters."""
    directory = shutil.copytree(FIXTURES / "hf_llama", tmp_path_factory.mktemp("llama") / "model")
    header = np.zeros(256, np.uint32)
    header[:4] = 20240328, 2, VOCAB, END_OF_TEXT
    names = [text_of([token]).encode() for token in range(END_OF_TEXT)] + [b"<|endoftext|>"]
    table = b"".join(bytes([len(name)]) + name for name in names)
    (directory / "tokenizer.bin").write_bytes(header.tobytes() + table)
    return directory


def request(number, context, continuation):
    return {"id": number, "context": context, "continuation": continuation}


def score(directory, requests, *options, scratch, **run_options):
    """The objects printed for the requests, and what was said besides."""
    path = scratch / "requests.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in requests))
    done = run("--score", directory, "--requests", path, "--threads", 1, *options, **run_options)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(list(line) == ["id", "logprob", "tokens", "bytes", "greedy"] for line in found)
    return found, done.stderr


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)


def bound_of(logits, tokens, recipe):
    """A logit is off by test_gpt.cu's bound: 4 standard deviations of a random walk of roundings, those of FP32 for each product
    of each stage, those of BF16 for each stage. A logarithm of a softmax by twice that, at most, for each token."""
    stages, longest_sum = 10 * 2 + 3, 4 * 32
    roundings = np.sqrt(stages * longest_sum) * 2.0**-24 if recipe == "fp32" else np.sqrt(stages) * 2.0**-9
    return tokens * 2 * 4 * roundings * np.abs(logits).max()


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_scores_are_pytorchs(llama, tmp_path, recipe):
    with safe_open(FIXTURES / "model_llama.safetensors", "numpy") as file:
        sequences, logits = file.get_tensor("tokens")[0], file.get_tensor("logits")
    spans = [(s, first, last) for s, sequence in enumerate(sequences) for first in range(1, len(sequence))
             for last in (first + 1, first + 5, len(sequence)) if last <= len(sequence) and END_OF_TEXT not in sequence[:last]]
    assert len(spans) > 40
    found, said = score(llama, [request(i, text_of(sequences[s][:first]), text_of(sequences[s][first:last]))
                                for i, (s, first, last) in enumerate(spans)], "--recipe", recipe, scratch=tmp_path)
    assert said.startswith(f"scored {len(spans)} requests, ") and len(said.splitlines()) == 1
    least = np.inf
    for line, (s, first, last) in zip(found, spans, strict=True):
        rows, targets = logits[s][first - 1:last - 1], sequences[s][first:last]
        expected = log_softmax(rows)[np.arange(last - first), targets].sum()
        bound = bound_of(logits, last - first, recipe)
        error = abs(line["logprob"] - expected)
        least = min(least, bound / max(error, 1e-300))
        assert error <= bound, (line, expected, bound)
        assert line["tokens"] == line["bytes"] == last - first
        top = np.sort(rows)[:, -2:]
        if (top[:, 1] - top[:, 0]).min() > bound:
            assert line["greedy"] == bool((rows.argmax(-1) == targets).all())
    print(f"{recipe}: {len(spans)} requests, least margin {least:.1f}")


def own_logprob(directory, tokens, count, scratch):
    """Of the last `count` tokens, in pieces where they are more than T, each of which sees the T before its last one."""
    first, pieces = len(tokens) - count, []
    while first < len(tokens):
        end = min(first + T, len(tokens))
        pieces.append(one_logprob(directory, tokens[max(0, end - 1 - T):end], end - first, scratch))
        first = end
    return sum(logprob for logprob, _ in pieces), all(greedy for _, greedy in pieces)


def one_logprob(directory, tokens, count, scratch):
    """Of the last `count` tokens after those before them, by dump_logits, which runs them alone and unpadded."""
    (scratch / "tokens").write_bytes(np.asarray(tokens[:-1], "<i4").tobytes())
    subprocess.run([DUMP_LOGITS, directory, scratch / "tokens", scratch / "logits"], check=True, env=ENVIRONMENT)
    logits = np.fromfile(scratch / "logits", "<f4").reshape(len(tokens) - 1, -1)[-count:]
    targets = np.asarray(tokens[-count:])
    return log_softmax(logits)[np.arange(count), targets].sum(), bool((logits.argmax(-1) == targets).all())


def cases():
    """Requests, and what each is in tokens: all of them, of which so many are the continuation's."""
    rng = np.random.default_rng(5)
    for length in rng.integers(2, T + 1, 30):
        tokens = rng.integers(0, END_OF_TEXT, length).tolist()
        count = int(rng.integers(1, length))
        yield text_of(tokens[:-count]), text_of(tokens[-count:]), tokens, count
    tokens = rng.integers(0, END_OF_TEXT, 3 * T).tolist()
    yield "", text_of(tokens[:4]), [END_OF_TEXT, *tokens[:4]], 4  # end-of-text begins a document
    for count in (3, T, T + 1, 2 * T, 2 * T + 5):
        yield text_of(tokens[:-count]), text_of(tokens[-count:]), tokens, count  # too long


def test_any_length_in_any_batch(llama, tmp_path):
    """Each as if it were alone: the longest batch is another GEMM, whose sums are of another order."""
    table = list(cases())
    ids = [f"number {i} \"é\\\n" if i % 2 else i + 0.5 if i % 3 else -i for i in range(len(table))]
    requests = [request(i, context, continuation) for i, (context, continuation, _, _) in zip(ids, table, strict=True)]
    expected = [own_logprob(llama, tokens, count, tmp_path) for _, _, tokens, count in table]
    for batch in (1, 3, 16):
        found, said = score(llama, requests, "--recipe", "fp32", "--batch-size", batch, scratch=tmp_path)
        assert f"5 of them longer than the {T} positions that the model sees" in said
        assert [line["id"] for line in found] == ids  # in the requests' order, as they came
        for line, (_, continuation, _, count), (logprob, greedy) in zip(found, table, expected, strict=True):
            error, bound = abs(line["logprob"] - logprob), bound_of(10, count, "fp32")
            assert error <= bound and line["greedy"] == greedy, (batch, line, logprob)
            assert line["tokens"] == count and line["bytes"] == len(continuation)


def test_of_equal_logits_the_first_is_greedy(llama, tmp_path):
    """As --generate has it, and PyTorch's argmax. All weights are 0, and all logits."""
    zeros = shutil.copytree(llama, tmp_path / "zeros")
    weights = (zeros / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")
    (zeros / "model.safetensors").write_bytes(weights[:header] + bytes(len(weights) - header))
    found, _ = score(zeros, [request(token, "A", text_of([token])) for token in range(END_OF_TEXT)], scratch=tmp_path)
    assert [line["id"] for line in found if line["greedy"]] == [0]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_ranks_share_the_requests(llama, tmp_path):
    from test_ranks import run_ranks

    requests = [request(i, context, continuation) for i, (context, continuation, _, _) in enumerate(cases())]
    alone, _ = score(llama, requests, "--batch-size", 2, scratch=tmp_path)
    done = run_ranks(3, "--score", llama, "--requests", tmp_path / "requests.jsonl", "--threads", 1, "--batch-size", 2)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == alone


def test_spaces_before_a_continuation(tmp_path):
    """White space at the end of a context belongs to the continuation, as tokens of words have it before them; what melts into
    the context's last token is encoded by itself."""
    data = make_data(tmp_path / "data")
    run_well(*data, "--vocab-size", 65, "--layers", 1, "--heads", 2, "--channels", 32, "--max-seq-len", 16, "--max-steps", 1,
             "--batch-size", 1, "--threads", 1, "--out-dir", tmp_path / "run")
    found, _ = score(tmp_path / "run", [
        request(1, "AB", "  CD"), request(2, "AB ", " CD"), request(3, "AB  ", "CD"), request(4, "  ", "CD"), request(5, "", "  CD"),
        request(6, "AB\n ", "CD")], scratch=tmp_path)
    assert [line["tokens"] for line in found] == [4, 4, 4, 4, 4, 4]
    assert [line["bytes"] for line in found] == [4, 3, 2, 2, 4, 2]
    logprobs = [line["logprob"] for line in found]
    assert logprobs[0] == logprobs[1] == logprobs[2] != logprobs[3] == logprobs[4] and logprobs[5] != logprobs[0]

    names = [b"A", b"B", b" ", b"AB", b"<|endoftext|>"]
    header = np.zeros(256, np.uint32)
    header[:4] = 20240328, 2, len(names), 4
    (tmp_path / "melts.bin").write_bytes(header.tobytes() + b"".join(bytes([len(name)]) + name for name in names))
    for file in (tmp_path / "run").rglob("tokenizer*"):  # of other tokens; with one of its own it takes no other
        file.unlink()
    found, _ = score(tmp_path / "run", [request(1, "A", "B"), request(2, "A", "BA")], "--tokenizer", tmp_path / "melts.bin",
                     scratch=tmp_path)
    assert [line["tokens"] for line in found] == [1, 1]  # A|B; AB|A, whose first token is the context's


GOOD = json.dumps(request(1, "A", "B"))
REFUSED = {
    "no JSON": ("A B", ["line 2", "not valid JSON"]),
    "nothing": ("", ["line 2", "not valid JSON"]),
    "a list": ("[1]", ["line 2", "a request is {"]),
    "no context": ('{"id": 1, "continuation": "B"}', ["line 2", "a request is {"]),
    "no text": ('{"id": 1, "context": "A", "continuation": 7}', ["line 2", "a request is {"]),
    "no continuation": ('{"id": 1, "context": "A", "continuation": ""}', ["line 2", "empty"]),
    "no id": ('{"context": "A", "continuation": "B"}', ["line 2", '"id" must be a string, or a number']),
    "an id that changes": ('{"id": 9007199254740993, "context": "A", "continuation": "B"}', ["line 2", "2^53"]),
    "no token": ('{"id": 1, "context": "A", "continuation": "é"}', ["line 2", "no token"]),
}


@pytest.mark.parametrize("line, parts", REFUSED.values(), ids=[name.replace(" ", "-") for name in REFUSED])
def test_lines_refused(llama, tmp_path, line, parts):
    path = tmp_path / "requests.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    done = run("--score", llama, "--requests", path)
    assert done.returncode == 2 and done.stdout == ""
    sentence = one_sentence(done.stderr)
    print(sentence)
    assert str(path) in sentence and all(part in sentence for part in parts)


def test_what_is_refused_besides(llama, tmp_path):
    path, empty = tmp_path / "requests.jsonl", tmp_path / "empty.jsonl"
    path.write_text(GOOD)  # a last line needs no end
    empty.write_text("")
    own = (llama / "tokenizer.bin").read_bytes()
    (tmp_path / "other.bin").write_bytes(own[:-1] + bytes([own[-1] ^ 1]))
    scored = run("--score", llama, "--requests", path).stdout
    assert scored.startswith('{"id":1,"logprob":-')
    other = tmp_path / "fields.jsonl"
    other.write_text(json.dumps(request(1, "A", "B") | {"question": "Why?", "gold": 0, "task": 7}))
    assert run("--score", llama, "--requests", other).stdout == scored  # fields that it leaves alone
    (tmp_path / "data").mkdir()
    shutil.copy(tmp_path / "other.bin", tmp_path / "data/tokenizer.bin")
    (tmp_path / "run.json").write_text(json.dumps({"val-data": str(tmp_path / "data/val.bin")}))
    assert run("--config", tmp_path / "run.json", "--score", llama, "--requests", path).stdout == scored  # data isn't read
    for arguments, part in ((["--score", llama], "--score needs --requests"),
                            (["--requests", path], "--requests is for --score"),
                            (["--score", llama, "--requests", path, "--generate", llama], "exclude each other"),
                            (["--score", llama, "--requests", tmp_path / "none"], "none"),
                            (["--score", llama, "--requests", empty], "is empty"),
                            (["--score", tmp_path / "none", "--requests", path], "no such directory"),
                            (["--score", llama, "--requests", path, "--tokenizer", tmp_path / "other.bin"], "isn't the same as"),
                            (["--generate", llama, "--tokenizer", tmp_path / "other.bin"], "leave it out"),
                            (["--score", FIXTURES / "hf_llama", "--requests", path], "has no tokenizer.bin")):
        done = run(*arguments)
        assert done.returncode == 2 and done.stdout == "" and part in one_sentence(done.stderr)


def test_scores_that_cannot_be_written(llama, tmp_path):
    (tmp_path / "requests.jsonl").write_text(GOOD)
    with open("/dev/full", "w") as full:
        done = subprocess.run([TRAINER, "--score", llama, "--requests", tmp_path / "requests.jsonl"], stdout=full,
                              stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and "can't be written" in one_sentence(done.stderr)


def test_the_recipe_is_the_runs(tmp_path):
    """As --generate: that of the checkpoint, unless another one is named."""
    data = make_data(tmp_path / "data")
    run_well(*data, "--vocab-size", 65, "--layers", 2, "--heads", 2, "--channels", 64, "--max-seq-len", 32, "--max-steps", 5,
             "--batch-size", 2, "--threads", 1, "--recipe", "fp32", "--out-dir", tmp_path / "run")
    requests = [request(1, "HELLO", " WORLD")]
    logprobs = [score(directory, requests, *options, scratch=tmp_path)[0][0]["logprob"]
                for directory in (tmp_path / "run", latest(tmp_path / "run")) for options in ([], ["--recipe", "mxfp8"])]
    assert logprobs[0] == logprobs[2] and logprobs[1] == logprobs[3] != logprobs[0]
    tokens = [*b"HELLO WORLD"]  # write_tokenizer: a line end, then characters from the space on
    expected, _ = own_logprob(latest(tmp_path / "run"), [character - 32 + 1 for character in tokens], 6, tmp_path)
    assert abs(logprobs[0] - expected) <= bound_of(10, 6, "fp32")
