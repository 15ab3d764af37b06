"""Checks that transformers loads a checkpoint, of ours or of its own, and computes the same logits as this program; and
where the checkpoint has a tokenizer.json, that AutoTokenizer encodes by it.

    python dev/reference/check_transformers.py CHECKPOINT_DIR [--exported DIR] [--dump-logits build/dump_logits]

transformers computes in FP64 here, so that the difference is our FP32 rounding alone. Exit codes: 0 the same, 1 not,
2 bad arguments, 77 torch or transformers isn't installed, or has no architecture for the model.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

EXIT_SKIPPED = 77
OWN_TYPE = "train_gpt_mxfp8"
FP32_ROUNDOFF = 2.0**-24
TEXT = "  the cat's  hat\n\n\tçà et là — 東京 \U0001f600\r\n"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint_dir", type=Path, help="directory with config.json and model.safetensors")
    parser.add_argument("--exported", type=Path, metavar="DIR", help="what transformers loads, made of the checkpoint by "
                        "scripts/export_nemotron.py (default: the checkpoint itself)")
    parser.add_argument("--dump-logits", type=Path, default=Path("build/dump_logits"), help="default: %(default)s")
    arguments = parser.parse_args()
    if not (arguments.checkpoint_dir / "config.json").is_file():
        parser.error(f"{arguments.checkpoint_dir} has no config.json: give a checkpoint's directory")
    if not arguments.dump_logits.is_file():
        parser.error(f"{arguments.dump_logits} isn't there: run make, or give --dump-logits PATH")
    return arguments


def our_logits(program, checkpoint_dir, tokens):
    """Returns (T, V) FP64 logits, from a program of ours in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        tokens_path, logits_path = Path(scratch) / "tokens.i32", Path(scratch) / "logits.f32"
        tokens_path.write_bytes(tokens.numpy().astype("<i4").tobytes())
        if subprocess.run([program.resolve(), checkpoint_dir, tokens_path, logits_path], check=False).returncode != 0:
            sys.exit(1)  # it has said why
        logits = torch.frombuffer(bytearray(logits_path.read_bytes()), dtype=torch.float32)
    return logits.reshape(len(tokens), -1).double()


def check_keys(info):
    """Prints the problems that from_pretrained met while it matched names and shapes. Returns
    whether there were none."""
    problems = {what: names for what, names in info.items() if names}
    for what, names in problems.items():
        print(f"{what}: {names}")
    return not problems


def check_tokenizer(directory, config):
    """Whether AutoTokenizer gives TEXT the ids that tokenizer.json gives it, and end-of-text config.json's id."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        print(f"{directory} has no tokenizer.json")
        return True
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ids, expected = theirs(TEXT)["input_ids"], tokenizers.Tokenizer.from_file(str(path)).encode(TEXT).ids
    agrees = ids == expected and theirs.bos_token_id == theirs.eos_token_id == config.eos_token_id
    print(f"{directory}: AutoTokenizer has {len(theirs)} tokens and {'agrees' if agrees else 'differs'}")
    return agrees


def relative_bound(config):
    """Returns the bound that test_gpt.cu derives: 4 standard deviations of a random walk of FP32
    roundings, one for each stage of the network and each product in a stage's sums."""
    stages = 11 * config.num_hidden_layers + 3  # SwiGLU and rotary positions are stages of their own
    ffn = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    longest_sum = max(ffn, config.hidden_size, config.max_position_embeddings)
    return 4 * math.sqrt(stages * longest_sum) * FP32_ROUNDOFF


def main():
    arguments = parse_arguments()
    theirs_dir = arguments.exported or arguments.checkpoint_dir
    model_type = json.loads((theirs_dir / "config.json").read_text())["model_type"]
    if model_type == OWN_TYPE:
        print(f"{theirs_dir} holds a model that transformers has no architecture for ({OWN_TYPE})")
        return EXIT_SKIPPED
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        theirs_dir, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    keys_agree = check_keys(info)
    config = model.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (min(config.max_position_embeddings, 512),), generator=generator)

    ours = our_logits(arguments.dump_logits, arguments.checkpoint_dir, tokens)
    with torch.no_grad():
        theirs = model.double().eval()(tokens[None]).logits[0]
    if ours.shape != theirs.shape:
        print(f"logits are {tuple(ours.shape)}, transformers' are {tuple(theirs.shape)}")
        return 1
    error = (ours - theirs).abs().max().item()
    bound = relative_bound(config) * theirs.abs().max().item()
    print(
        f"{theirs_dir}: {len(tokens)} tokens, logits up to {theirs.abs().max():.3f}, error {error:.2e}, "
        f"bound {bound:.2e}, margin {bound / max(error, 1e-300):.1f}"
    )
    tokens_agree = check_tokenizer(theirs_dir, config)
    return 0 if keys_agree and tokens_agree and error <= bound else 1  # a NaN is not <= anything


if __name__ == "__main__":
    try:
        import tokenizers
        import torch
        import transformers
    except ImportError as missing:
        print(f"skipped: {missing.name} isn't installed (pip install torch transformers)")
        sys.exit(EXIT_SKIPPED)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    sys.exit(main())
