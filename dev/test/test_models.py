"""Models that aren't a GPT-2, as a user trains them: checkpoints, what Hugging Face wrote, ranks, presets, refusals. Their
gradients are test_gpt's business."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from test_ranks import run_ranks_well
from trainer import (
    END_OF_TEXT, ENVIRONMENT, ROOT, T, TRAINER, VOCAB, assert_same_run, dry_run, events, latest, losses,
    one_sentence, run, run_well, steps, validations, weights_and_moments)

FIXTURES = ROOT / "dev/test/fixtures"
DUMP_LOGITS = Path(TRAINER).parent / "dump_logits"
LAYERS, HEADS, CHANNELS, B, STEPS = 2, 6, 96, 4, 6
SIZE = ["--vocab-size", VOCAB, "--layers", LAYERS, "--heads", HEADS, "--channels", CHANNELS, "--max-seq-len", T]
RUN = ["--batch-size", B, "--threads", 1, "--val-every", 3, "--val-steps", 2]

# Parts of weights end within what a rank has of them: 96, 48, 48 rows of queries, keys, values, and twice 80 of an MLP.
LLAMA = ["--kv-heads", 3, "--ffn", 80, "--activation", "swiglu", "--norm", "rmsnorm", "--positions", "rope", "--no-biases"]
MODELS = {
    "llama": (LLAMA, "llama"),
    "llama with biases, tied": (["--activation", "swiglu", "--norm", "rmsnorm", "--positions", "rope", "--rope-theta", 500], "llama"),
    "olmo 1": (["--activation", "swiglu", "--positions", "rope", "--no-biases", "--no-ln-affine", "--untied-head"], "olmo"),
    "gpt2 of another width": (["--ffn", 100, "--activation", "relu2", "--untied-head"], "gpt2"),
    "olmo-n": (["--positions", "rope", "--no-biases", "--qk-norm", "--untied-head"], "train_gpt_mxfp8"),
    "learned positions, all else other": (["--kv-heads", 2, "--qk-norm", "--norm", "rmsnorm", "--activation", "swiglu"],
                                          "train_gpt_mxfp8"),
}
ids = lambda table: [name.replace(" ", "-") for name in table]


@pytest.mark.parametrize("options, model_type", MODELS.values(), ids=ids(MODELS))
def test_checkpoints(data, tmp_path, options, model_type):
    """Stopped and resumed: the same bits. Loaded as initial weights: the same validation loss."""
    model = [*SIZE, *options]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    gains = [] if "--no-ln-affine" in options else ["--quantize-ln-affine"]
    run_well(*data, *model, *RUN, "--max-steps", STEPS, *gains, "--out-dir", straight)
    run_well(*data, *model, *RUN, "--max-steps", STEPS // 2, "--schedule", "constant", *gains, "--out-dir", resumed)
    constant = tmp_path / "constant"
    run_well(*data, *model, *RUN, "--max-steps", STEPS, "--schedule", "constant", *gains, "--out-dir", constant)
    run_well("--resume", "--max-steps", STEPS, "--out-dir", resumed)
    assert_same_run(resumed, constant)

    config = json.loads((latest(straight) / "config.json").read_text())
    assert config["model_type"] == model_type
    common = [*data, "--init-from", straight, *RUN, "--max-steps", 1, *gains]
    run_well(*common, "--out-dir", tmp_path / "next")
    assert validations(tmp_path / "next")[0][1] == validations(straight)[-1][1]
    run_well(*common, *options, "--out-dir", tmp_path / "again")  # what is true may be said
    assert losses(tmp_path / "again") == losses(tmp_path / "next")
    assert run_well("--generate", straight, "--sample-tokens", 20, "--threads", 1).stdout


@pytest.mark.parametrize("activation, theirs", [("gelu", "gelu_new"), ("gelu-exact", "gelu"), ("relu", "relu"), ("relu2", "relu2")])
def test_a_gpt2_s_activation_has_hugging_face_s_name(data, tmp_path, activation, theirs):
    """The reader takes what the writer writes: that it is theirs, too, is said here (transformers' ACT2FN)."""
    run_well(*data, *SIZE, *RUN, "--activation", activation, "--max-steps", 1, "--out-dir", tmp_path)
    config = json.loads((latest(tmp_path) / "config.json").read_text())
    assert (config["model_type"], config["activation_function"]) == ("gpt2", theirs)


def test_a_llama_has_hugging_faces_names_and_shapes(data, tmp_path):
    run_well(*data, *SIZE, *LLAMA, *RUN, "--max-steps", 1, "--untied-head", "--out-dir", tmp_path)
    C, kv, F = CHANNELS, 3 * CHANNELS // HEADS, 80
    blocks = {"self_attn.q_proj": (C, C), "self_attn.k_proj": (kv, C), "self_attn.v_proj": (kv, C), "self_attn.o_proj": (C, C),
              "mlp.gate_proj": (F, C), "mlp.up_proj": (F, C), "mlp.down_proj": (C, F), "input_layernorm": (C,),
              "post_attention_layernorm": (C,)}
    expected = {"model.embed_tokens.weight": (VOCAB, C), "model.norm.weight": (C,), "lm_head.weight": (VOCAB, C)}
    expected |= {f"model.layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in blocks.items()}
    weights, moments = (load_file(latest(tmp_path) / f"{name}.safetensors") for name in ("model", "optimizer"))
    assert {name: tensor.shape for name, tensor in weights.items()} == expected
    assert {name: tensor.shape for name, tensor in moments.items()} == {
        f"{name}.{moment}": shape for name, shape in expected.items() for moment in ("exp_avg", "exp_avg_sq")}
    config = json.loads((latest(tmp_path) / "config.json").read_text())
    theirs = json.loads((FIXTURES / "hf_llama/config.json").read_text())
    same = {"hidden_size": C, "intermediate_size": F, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "num_key_value_heads": 3, "max_position_embeddings": T, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
            "eos_token_id": END_OF_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    assert {key: config[key] for key in same} == same and same.keys() <= theirs.keys()
    assert config["architectures"] == theirs["architectures"]


# ---------------------------------------------------------------------------------------------------------------------
# What Hugging Face wrote

def logits_of(directory, tokens, scratch):
    (scratch / "tokens").write_bytes(tokens.astype("<i4").tobytes())
    subprocess.run([DUMP_LOGITS, directory, scratch / "tokens", scratch / "logits"], check=True, env=ENVIRONMENT)
    return np.fromfile(scratch / "logits", "<f4").reshape(len(tokens), -1)


def test_logits_of_a_checkpoint_of_transformers(tmp_path):
    """As PyTorch computes them in FP64; the bound is test_gpt.cu's."""
    with safe_open(FIXTURES / "model_llama.safetensors", "numpy") as file:
        tokens, expected, said = file.get_tensor("tokens")[0], file.get_tensor("logits"), file.metadata()
    stages, longest_sum = 10 * int(said["layers"]) + 3, 4 * int(said["channels"])
    bound = 4 * np.sqrt(stages * longest_sum) * 2.0**-24 * np.abs(expected).max()
    for sequence in range(len(tokens)):
        error = np.abs(logits_of(FIXTURES / "hf_llama", tokens[sequence], tmp_path) - expected[sequence]).max()
        print(f"sequence {sequence}: error {error:.2e}, bound {bound:.2e}, margin {bound / error:.1f}")
        assert error <= bound


def test_a_checkpoint_of_transformers_is_trained_and_saved(data, tmp_path):
    """At a learning rate of 0: what is saved is what was read."""
    run_well(*data, "--init-from", FIXTURES / "hf_llama", "--batch-size", B, "--max-steps", 2, "--learning-rate", 0,
             "--threads", 1, "--out-dir", tmp_path)
    saved, read = load_file(latest(tmp_path) / "model.safetensors"), load_file(FIXTURES / "hf_llama/model.safetensors")
    assert saved.keys() == read.keys()
    for name, tensor in read.items():
        assert tensor.dtype == ml_dtypes.bfloat16 and np.array_equal(saved[name], tensor.astype(np.float32)), name


def changed(**members):
    return lambda config: config | members


CONFIGS = {
    "another epsilon": (changed(rms_norm_eps=1e-6), ["rms_norm_eps", "1e-06", "1e-5"]),
    "transformers' epsilon": (lambda config: {k: v for k, v in config.items() if k != "rms_norm_eps"}, ["1e-06"]),
    "another activation": (changed(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    "scaled positions": (changed(rope_scaling={"rope_type": "llama3", "factor": 8.0}), ["rope_scaling"]),
    "newly scaled positions": (changed(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5}), ["llama3", "default"]),
    "some of a head turned": (changed(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), ["0.5"]),
    "no wavelength": (changed(rope_parameters={"rope_type": "default", "rope_theta": 0.0}), ["rope_theta is 0"]),
    "biases of attention alone": (changed(attention_bias=True), ["attention_bias is true and mlp_bias false"]),
    "wide heads": (changed(head_dim=16), ["head_dim is 16"]),
    "heads not shared evenly": (changed(num_key_value_heads=3), ["--kv-heads 3"]),
    "no heads of keys": (changed(num_key_value_heads=-1), ["--kv-heads -1"]),
    "other heads of keys": (changed(num_key_value_heads=4), ["self_attn.k_proj.weight", "32x32"]),
    "another MLP": (changed(intermediate_size=41), ["mlp.gate_proj.weight", "41x32"]),
    "no size": (changed(hidden_size=None), ["hidden_size"]),
    "clipped": (changed(model_type="olmo", clip_qkv=8.0), ["clip_qkv is 8"]),
    "gains that are missing": (changed(model_type="olmo"), None),  # OLMo's norms have none: they are not read
    "another architecture": (changed(model_type="mistral"), ["mistral", "gpt2, llama, olmo"]),
    "no architecture": (changed(model_type=None), ["model_type"]),
    "ours, without what it says": (changed(model_type="train_gpt_mxfp8"), ["activation is 'missing'", "swiglu"]),
}


@pytest.mark.parametrize("change, parts", CONFIGS.values(), ids=ids(CONFIGS))
def test_configurations_of_others(data, tmp_path, change, parts):
    config = change(json.loads((FIXTURES / "hf_llama/config.json").read_text()))
    directory = tmp_path / "theirs"
    directory.mkdir()
    shutil.copy(FIXTURES / "hf_llama/model.safetensors", directory)
    (directory / "config.json").write_text(json.dumps(config))
    done = run(*data, "--init-from", directory, "--max-steps", 1, "--threads", 1, "--out-dir", tmp_path / "out")
    if parts is None:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    sentence = one_sentence(done.stderr)
    print(sentence)
    assert all(part in sentence for part in parts) and str(directory) in sentence, sentence


# ---------------------------------------------------------------------------------------------------------------------
# Nemotron, exported

def export(*arguments):
    return subprocess.run([sys.executable, ROOT / "scripts/export_nemotron.py", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("options, activation, biases", [
    (["--kv-heads", 3, "--activation", "relu2", "--no-biases", "--untied-head"], "relu2", False),
    (["--rope-theta", 500], "gelu_new", True),
], ids=["as-the-presets", "with-biases"])
def test_a_nemotron_is_exported(data, tmp_path, options, activation, biases):
    """What dev/reference/check_transformers.py saw transformers load and compute: gains less one, biases of norms always."""
    run_well(*data, *SIZE, "--positions", "rope", *options, *RUN, "--max-steps", 20, "--learning-rate", "1e-2", "--out-dir",
             tmp_path / "run")
    (latest(tmp_path / "run") / "tokenizer.json").write_text("a tokenizer")
    for checkpoint, out in ((tmp_path / "run", tmp_path / "out"), (latest(tmp_path / "run"), tmp_path / "again")):
        done = export(checkpoint, out)
        assert done.returncode == 0 and done.stdout == f"{out}\n", done.stderr
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (out / "tokenizer.json").read_text() == "a tokenizer"
    ours, theirs = load_file(latest(tmp_path / "run") / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    gains = [name for name in ours if "norm" in name and name.endswith(".weight")]
    assert len(gains) == 2 * LAYERS + 1 and any((ours[name] != 1).any() for name in gains)
    for name in gains:
        assert np.array_equal(theirs.pop(name), ours[name] - 1) and ours.pop(name).shape == (CHANNELS,)
        bias = name.replace("weight", "bias")
        assert np.array_equal(theirs.pop(bias), ours.pop(bias, np.zeros(CHANNELS, np.float32)))
    assert theirs.keys() == ours.keys() and all(np.array_equal(theirs[name], ours[name]) for name in ours)
    assert ("model.layers.0.mlp.up_proj.bias" in theirs) == biases
    config = json.loads((tmp_path / "out/config.json").read_text())
    expected = {"model_type": "nemotron", "hidden_act": activation, "attention_bias": biases, "mlp_bias": biases,
                "tie_word_embeddings": biases, "num_key_value_heads": HEADS if biases else 3, "norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500 if biases else 10000, "partial_rotary_factor": 1.0}}
    assert {key: config[key] for key in expected} == expected


def test_what_is_no_nemotron_is_not_exported(data, tmp_path):
    run_well(*data, *SIZE, *MODELS["olmo-n"][0], *RUN, "--max-steps", 1, "--out-dir", tmp_path / "olmo-n")
    (tmp_path / "there").mkdir()
    for checkpoint, out, parts in (
            (tmp_path / "olmo-n", tmp_path / "out", ["qk_norm is true"]),
            (FIXTURES / "hf_llama", tmp_path / "out", ["llama", "as it is"]),
            (tmp_path / "there", tmp_path / "out", ["config.json"]),
            (tmp_path / "olmo-n", tmp_path / "there", ["is there already"])):
        done = export(checkpoint, out)
        print(done.stderr)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and all(part in done.stderr for part in parts)
        assert not (tmp_path / "out").exists() and not list((tmp_path / "there").iterdir())


NEMOTRON = {"model_type": "train_gpt_mxfp8", "norm": "layernorm", "norm_affine": True, "positions": "rope", "qk_norm": False,
            "activation": "relu2"}


@pytest.mark.parametrize("name, content, words", [
    ("config.json", "[]", "holds no JSON object"),
    ("config.json", "{}", "has no model_type"),
    ("config.json", "{", "isn't JSON"),
    ("config.json", json.dumps(NEMOTRON), "has no rope_theta"),
    ("model.safetensors", "cut off", "isn't whole"),
    ("model.safetensors", None, "model.safetensors"),
])
def test_damaged_checkpoints_are_not_exported(data, tmp_path, name, content, words):
    run_well(*data, *SIZE, "--positions", "rope", "--no-biases", *RUN, "--max-steps", 1, "--out-dir", tmp_path / "run")
    path = latest(tmp_path / "run") / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    done = export(tmp_path / "run", tmp_path / "out")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("export_nemotron.py: ") and str(path) in done.stderr and words in done.stderr
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Ranks

@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.parametrize("zero", [1, 2])
def test_two_ranks_are_one(data, tmp_path, zero):
    """The first loss has seen no gradient and is a sum of doubles in another order, the first gradient norm one of FP32. Later
    losses differ by no more than four times what other numbers of micro-batches on one rank make of them."""
    model = [*data, *SIZE, *LLAMA, "--qk-norm", "--untied-head", "--total-batch-size", 4 * T, "--max-steps", 20,
             "--learning-rate", "1e-2"]
    for batch in (1, 2, 4):
        run_ranks_well(1, *model, "--batch-size", batch, "--out-dir", tmp_path / f"one-{batch}")
    run_ranks_well(2, *model, "--batch-size", 2, "--zero", zero, "--out-dir", tmp_path / "two")
    one = losses(tmp_path / "one-2")
    bound = 4 * np.max([np.abs(losses(tmp_path / f"one-{batch}") - one) for batch in (1, 4)])
    difference = np.abs(losses(tmp_path / "two") - one)
    norms = [steps(tmp_path / name)[0]["grad_norm"] for name in ("one-2", "two")]
    print(f"difference {difference.max():.1e}, bound {bound:.1e}, margin {bound / max(difference.max(), 1e-300):.3g}; first norms "
          f"differ by {abs(norms[1] / norms[0] - 1):.1e}")
    assert difference[0] <= 2.0**-50 * one[0] and difference.max() <= bound < 0.1 * (one[0] - one[-1])
    assert abs(norms[1] / norms[0] - 1) <= 4 * (4 * T)**0.5 * 2.0**-24


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_write_and_read_parts(data, tmp_path, ranks):
    """Weights that a learning rate of 0 leaves alone: the same bytes from any number of ranks, and back."""
    model = [*data, *SIZE, *LLAMA, "--batch-size", 1, "--total-batch-size", 6 * T, "--learning-rate", 0, "--max-steps"]
    run_ranks_well(1, *model, 1, "--out-dir", tmp_path / "one")
    run_ranks_well(ranks, *model, 1, "--out-dir", tmp_path / "some")
    name = "model.safetensors"
    first = (latest(tmp_path / "one") / name).read_bytes()
    assert (latest(tmp_path / "some") / name).read_bytes() == first
    run_ranks_well(ranks, "--resume", "--max-steps", 2, "--out-dir", tmp_path / "one")
    assert (latest(tmp_path / "one") / name).read_bytes() == first and latest(tmp_path / "one").name == "step_000002"
    run_ranks_well(ranks, *model, 2, "--out-dir", tmp_path / "straight")
    run_ranks_well(ranks, "--resume", "--max-steps", 2, "--out-dir", tmp_path / "some")
    assert weights_and_moments(latest(tmp_path / "some")) == weights_and_moments(latest(tmp_path / "straight"))


# ---------------------------------------------------------------------------------------------------------------------
# Presets and options

PRESETS = {  # parameters in millions, what is said of the model
    "gpt2-124M": (124.4, None),
    "gpt2-355M": (354.8, None),
    "gpt2-774M": (774.0, None),
    "gpt2-1558M": (1557.6, None),
    # 12 C C a layer in 64 n channels, gains of four norms, twice 32000 embeddings
    **{f"olmo-n{n}": ((12 * n * C**2 + n * 4 * C + C + 2 * 32000 * C) / 1e6, "rotary positions") for n in range(6, 25) for C in [64 * n]},
    "nemotron-843M": ((12 * 24 * 1024**2 + 49 * 1024 + 2 * 256000 * 1024) / 1e6, "squared ReLU of 4096"),
    "nemotron-2B": ((12 * 24 * 2048**2 + 49 * 2048 + 2 * 256000 * 2048) / 1e6, "untied head"),
    # keys and values of 8 heads of 128: 2 C 1024 instead of 2 C C
    "nemotron-8B": ((32 * (10 * 4096**2 + 2 * 4096 * 1024) + 65 * 4096 + 2 * 256000 * 4096) / 1e6, "8 heads of keys and values"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    parameters, said = PRESETS[name]
    text = dry_run("--model", name, "--device", "b200")
    assert f"model    {parameters:.1f}M parameters" in text
    assert said is None or said in text
    assert ("normalised queries and keys" in text) == name.startswith("olmo")


def test_every_preset_is_one_of_these():
    names = re.search(r"--model NAME[^(]*\(([^)]*)\)", run_well("--help").stdout)[1]
    names = [name.strip() for name in re.sub(r"\s+", " ", names).split(",")]
    assert set(names) == set(PRESETS)


def test_options_change_a_preset(data, tmp_path):
    run_well(*data, "--model", "olmo-n6", "--layers", 1, "--heads", 2, "--channels", 32, "--max-seq-len", T, "--biases",
             "--total-batch-size", B * T, "--no-qk-norm", "--activation", "relu", "--rope-theta", 77, "--batch-size", B, "--max-steps", 1, "--out-dir", tmp_path)
    model = events(tmp_path, "config")[0]["model"]
    assert model == {
        "layers": 1, "heads": 2, "channels": 32, "max_seq_len": T, "vocab_size": VOCAB, "kv_heads": 2, "ffn": 128,
        "activation": "relu", "norm": "layernorm", "ln_affine": True, "biases": True, "positions": "rope", "rope_theta": 77,
        "qk_norm": False, "untied_head": True, "parameters": 2 * VOCAB * 32 + 12 * 32**2 + 13 * 32 + 2 * 32}


def test_a_preset_with_other_sizes_stays_the_model(data, tmp_path):
    """Of the same command, resumed, begun from and asked; and a run's own options, with minutes that don't tell its steps."""
    small = [*data, "--model", "olmo-n6", "--layers", 1, "--heads", 2, "--channels", 32, "--max-seq-len", T, "--batch-size", B,
             "--total-batch-size", B * T]
    run_well(*small, "--max-steps", 1, "--out-dir", tmp_path / "run")
    run_well(*small, "--max-steps", 2, "--resume", "--out-dir", tmp_path / "run")
    run_well("--generate", tmp_path / "run", *small[4:12], "--sample-tokens", 1)
    done = run("--generate", tmp_path / "run", "--model", "gpt2-355M")
    assert done.returncode == 2 and "holds a model of 1 layer, 2 heads and 32 channels" in one_sentence(done.stderr)
    run_well(*small, "--max-minutes", 0.001, "--warmup-steps", 0, "--warmup-from", 0, "--out-dir", tmp_path / "minutes")
    run_well("--config", latest(tmp_path / "minutes") / "trainer_state.json", "--out-dir", tmp_path / "again")


OLMO = ["--model", "olmo-n6", "--layers", 3, "--heads", 2, "--channels", 64, "--max-seq-len", T, "--batch-size", B,
        "--total-batch-size", B * T]


def test_a_preset_says_how_it_is_trained(data, tmp_path):
    """The sweep's own settings, of which a given one goes first; warm-up is a fifth of the steps, from 2e-5 to 2e-4."""
    run_well(*data, *OLMO, "--max-steps", 20, "--beta2", 0.99, "--out-dir", tmp_path)
    assert events(tmp_path, "config")[0]["model"]["activation"] == "gelu-exact"  # not the tanh one, as its authors' program
    options = events(tmp_path, "config")[0]["options"]
    assert [options[name] for name in ("learning-rate", "eps", "weight-decay", "beta1", "beta2", "grad-clip", "schedule", "init",
                                       "final-lr-fraction", "warmup-steps")] == [
        2e-4, 1e-15, 0, 0.9, 0.99, 1, "cosine", "mitchell", 0.1, 4]
    rates = [event["learning_rate"] for event in events(tmp_path, "train")]
    assert rates[:5] == pytest.approx([2e-5, 6.5e-5, 1.1e-4, 1.55e-4, 2e-4]) and rates[12] == pytest.approx(1.1e-4)
    said = run_well("--dry-run", "--model", "olmo-n8", "--batch-size", 64, "--device", "b200", "--max-steps", 10).stdout
    assert "262.1k tokens a step (64 sequences of 512, 8 micro-batches)" in said


def test_mitchell_weights(data, tmp_path):
    """Normal, 1 / sqrt(inputs), cut off at three times that, whose standard deviation is 0.98658 of what isn't cut; what
    writes to the stream by sqrt(2 l) less. A step at a learning rate of 0 leaves them."""
    run_well(*data, *OLMO, "--learning-rate", 0, "--warmup-from", 0, "--max-steps", 1, "--out-dir", tmp_path)
    matrices = {name: w for name, w in load_file(latest(tmp_path) / "model.safetensors").items() if w.ndim == 2}
    assert len(matrices) == 2 + 3 * 6
    for name, weights in matrices.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        shrunk = 2 * (int(layer[1]) + 1) if re.search("o_proj|down_proj|c_proj", name) else 1
        scale = 1 / np.sqrt(weights.shape[1] * shrunk)
        found, bound = weights.std() / scale, 4 / np.sqrt(2 * weights.size)  # four standard errors
        print(f"{name}: {found:.4f}, off by {abs(found - 0.98658):.4f}, at most {bound:.4f}")
        assert abs(found - 0.98658) < bound and np.abs(weights).max() <= 3 * scale * (1 + 1e-6)


REFUSED = {
    "heads not shared evenly": (["--heads", 6, "--kv-heads", 4], ["--kv-heads 4", "--heads 6"]),
    "odd heads turned": (["--heads", 2, "--channels", 66, "--positions", "rope"], ["--positions rope", "33", "odd"]),
    "wavelengths of nothing": (["--rope-theta", 500], ["--rope-theta", "--positions rope"]),
    "an unknown activation": (["--activation", "swish"], ["swish", "swiglu"]),
    "an unknown norm": (["--norm", "batchnorm"], ["batchnorm", "layernorm"]),
    "another activation than a checkpoint's": (["--init-from", str(FIXTURES / "hf_llama"), "--activation", "gelu"],
                                               ["--activation gelu", "swiglu", "leave the option out"]),
    "biases that a checkpoint hasn't": (["--init-from", str(FIXTURES / "hf_llama"), "--biases"],
                                        ["--biases", "with --no-biases", "leave the option out"]),
    "other wavelengths than a checkpoint's": (["--init-from", str(FIXTURES / "hf_llama"), "--rope-theta", 10000],
                                              ["--rope-theta 10000", "500"]),
}


@pytest.mark.parametrize("arguments, parts", REFUSED.values(), ids=ids(REFUSED))
def test_refused(arguments, parts):
    done = run("--dry-run", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    sentence = one_sentence(done.stderr)
    assert all(part in sentence for part in parts), sentence
