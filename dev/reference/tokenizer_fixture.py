"""Trains two small byte-level BPEs with the `tokenizers` library and writes, for dev/test/test_tokenizer.c,

dev/test/fixtures/tokenizer_plain.bin   trained without cutting text into words first
dev/test/fixtures/tokenizer_words.bin   trained with GPT-2's cutting
dev/test/fixtures/tokenizer_cases.h     texts and the ids that the library gives them

    python dev/reference/tokenizer_fixture.py

Made with tokenizers 0.23.3. The vocabularies are written here anew, not by data/prepare.py, so that the test's side is
independent of it.
"""

import random
import struct
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FIXTURES = Path(__file__).resolve().parent.parent / "test" / "fixtures"
END_OF_TEXT = "<|endoftext|>"

# Training text: ours, and small; repeated with variations so that merges are learnt.
WORDS = (
    "the block scale is a power of two and the elements of the block are quantized with the scale of the block "
    "gradients of the weights are accumulated in single precision while the activations are kept in bytes "
    "training the model again and again gives the same losses 1234 2048 and 3.14 isn't it we'll see they've been "
    "\u00fcber na\u00efve caf\u00e9 \u4f60\u597d \U0001f600"
).split()


def training_lines(count):
    generator = random.Random(7)
    for _ in range(count):
        line = " ".join(generator.choice(WORDS) for _ in range(generator.randint(3, 12)))
        yield line[0].upper() + line[1:] + generator.choice([".\n", "!\n", ",  ", "\n\n", "; "])


def train(use_regex):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_lines(400), trainer)
    return tokenizer


def byte_of_letter():
    """Returns the byte that each letter of a byte-level vocabulary stands for: GPT-2's table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    for number, byte in enumerate(b for b in range(256) if b not in printable):
        letters[chr(256 + number)] = byte
    return letters


def write_bin(tokenizer, path):
    letters = byte_of_letter()
    size = tokenizer.get_vocab_size()
    header = [20240328, 2, size, tokenizer.token_to_id(END_OF_TEXT)] + [0] * 252
    with open(path, "wb") as file:
        file.write(struct.pack("<256I", *header))
        for token in range(size):
            text = tokenizer.id_to_token(token)
            data = text.encode() if text == END_OF_TEXT else bytes(letters[letter] for letter in text)
            file.write(bytes([len(data)]) + data)


def cases():
    generator = random.Random(11)
    prose = ["The block of weights", "isn't it the same model?", "training again, and again: 1234 losses", "a", ""]
    prose += [" ".join(generator.choice(WORDS) for _ in range(12)) + "." for _ in range(6)]
    free = ["  the  the\n\n\n block\t\t", "aaaaaaaaaaaaaaaaaaaaaaa"]
    free += ["\u4f60\u597d\u4f60 \U0001f600\U0001f601 \u00e9\u00e9"]
    pool = "".join(WORDS) + "     \n\n,.;!"
    free += ["".join(generator.choice(pool) for _ in range(80)) for _ in range(8)]
    free += ["".join(line for line in training_lines(5))]
    return prose, free


def c_string(text):
    def letter(byte):
        return chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\?' else f"\\{byte:03o}"

    return '"' + "".join(letter(byte) for byte in text.encode()) + '"'


HEADER = """// Made by dev/reference/tokenizer_fixture.py.
// clang-format off
static const struct {
    const char *file, *text;
    int count;
    int32_t ids[400];
} cases[] = {
"""


def main():
    plain, words = train(use_regex=False), train(use_regex=True)
    write_bin(plain, FIXTURES / "tokenizer_plain.bin")
    write_bin(words, FIXTURES / "tokenizer_words.bin")
    prose, free = cases()
    rows = []
    for name, tokenizer, texts in (("plain", plain, prose + free), ("words", words, prose)):
        for text in texts:
            ids = tokenizer.encode(text).ids
            numbers = ", ".join(map(str, ids or [0]))
            rows.append(f'    {{"tokenizer_{name}.bin", {c_string(text)}, {len(ids)}, {{{numbers}}}}},\n')
    (FIXTURES / "tokenizer_cases.h").write_text(HEADER + "".join(rows) + "};\n")
    print(len(rows), "cases")


if __name__ == "__main__":
    main()
