#!/usr/bin/env python3
"""Writes a checkpoint as transformers' Nemotron: a model with LayerNorm and rotary positions, without a gate or QK-norm, as
the nemotron presets are.

    scripts/export_nemotron.py RUN_DIR OUT_DIR

The weights are the same but for norms: Nemotron's files hold gains less one, and biases that may be zero. Checkpoints of the
other architectures that transformers has (GPT-2, Llama, OLMo 1) need no such thing: it loads them as they are.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from logs import InputError, Parser, main_of, newest_checkpoint
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

OWN_TYPE = "train_gpt_mxfp8"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ACTIVATIONS = {"gelu": "gelu_new", "gelu-exact": "gelu", "relu": "relu", "relu2": "relu2"}  # by their names in transformers
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "initializer_range", "norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id",
        "torch_dtype")


def read_config(directory):
    path = directory / "config.json"
    if not path.is_file():
        raise InputError(f"{directory} has no config.json: give a run's directory, or one of its checkpoints")
    try:
        config = json.loads(path.read_text())
    except ValueError as e:
        raise InputError(f"{path} isn't JSON ({e}): give a checkpoint of train_gpt_mxfp8") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no JSON object: give a checkpoint of train_gpt_mxfp8")
    return config


def read_weights(directory):
    path = directory / "model.safetensors"
    try:
        return load_file(path)
    except SafetensorError as e:
        raise InputError(f"{path} isn't whole ({e}): give another checkpoint") from None


def check_architecture(config, directory):
    """Refuses a model that transformers loads as it is, and one that its Nemotron can't be."""
    if config["model_type"] != OWN_TYPE:
        raise InputError(f"{directory} is a {config['model_type']}, which transformers loads as it is: nothing to export")
    needed = {"norm": "layernorm", "norm_affine": True, "positions": "rope", "qk_norm": False}
    differing = [key for key, value in needed.items() if config[key] != value]
    if config["activation"] not in ACTIVATIONS:
        differing.append("activation")
    if differing:
        raise InputError(f"{directory} isn't a Nemotron: its {differing[0]} is {json.dumps(config[differing[0]])}, and transformers "
                         "has no other architecture for it")


def nemotron_config(config):
    turned = {"rope_theta": config["rope_theta"], "partial_rotary_factor": 1.0}
    return {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        **{key: config[key] for key in SAME},
        "hidden_act": ACTIVATIONS[config["activation"]],
        "attention_bias": config["biases"],
        "mlp_bias": config["biases"],
        **turned,  # transformers up to version 4
        "rope_parameters": {"rope_type": "default", **turned},
    }


def nemotron_weights(weights):
    exported = {}
    for name, values in weights.items():
        exported[name] = values
        if name.endswith(NORMS):
            exported[name] = values - np.float32(1)
            bias = name.removesuffix("weight") + "bias"
            if bias not in weights:
                exported[bias] = np.zeros_like(values)
    return exported


def write(out_dir, config, weights, tokenizer_files):
    """Writes the directory, which appears when all of it is there."""
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        for path in tokenizer_files:
            shutil.copy(path, made)
        for path in made.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        made.rename(out_dir)


def main(arguments):
    parser = Parser(description=__doc__.splitlines()[0] + " " + __doc__.splitlines()[1])
    parser.add_argument("checkpoint", type=Path, metavar="RUN_DIR", help="of a run, whose latest checkpoint is meant, or a checkpoint")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="a new directory, for config.json, model.safetensors and the tokenizer")
    options = parser.parse_args(arguments)
    if options.out_dir.exists():
        raise InputError(f"{options.out_dir} is there already: name a new directory")
    directory = newest_checkpoint(options.checkpoint)
    config = read_config(directory)
    try:
        check_architecture(config, directory)
        exported = nemotron_config(config)
    except KeyError as e:
        raise InputError(f"{directory}/config.json has no {e.args[0]}: give a checkpoint of train_gpt_mxfp8") from None
    tokenizer_files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    write(options.out_dir, exported, nemotron_weights(read_weights(directory)), tokenizer_files)
    print(options.out_dir)


if __name__ == "__main__":
    main_of("export_nemotron.py", main)
