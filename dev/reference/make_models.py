"""Writes dev/test/fixtures/model_*.safetensors, reference values for the models that aren't a GPT-2, with a plain PyTorch
model of ours in FP64, and dev/test/fixtures/hf_llama, a checkpoint as transformers writes it.

    python dev/reference/make_models.py

What the files hold, and with which versions they were made: README.md beside this file.
"""

import torch
import torch.nn.functional as F
from make_fixtures import FIXTURES, write
from transformers import LlamaConfig, LlamaForCausalLM

B, T, VOCAB, EPS = 2, 37, 67, 1e-5

# As GPTConfig has them; what isn't named is GPT-2's.
MODELS = {
    "llama": dict(layers=2, heads=4, kv_heads=2, channels=32, ffn=40, activation="swiglu", norm="rmsnorm", no_biases=True,
                  positions="rope", rope_theta=500.0, untied_head=True),
    "olmo": dict(layers=1, heads=2, channels=32, no_biases=True, positions="rope", qk_norm=True, untied_head=True),
    "nemotron": dict(layers=1, heads=4, kv_heads=1, channels=32, activation="relu2", no_biases=True, positions="rope",
                     untied_head=True),
    "no_affine": dict(layers=1, heads=3, channels=48, ffn=56, activation="relu", no_norm_affine=True, qk_norm=True),
    "mixed": dict(layers=1, heads=4, kv_heads=2, channels=32, activation="swiglu", norm="rmsnorm", qk_norm=True),
}
DEFAULTS = dict(activation="gelu", norm="layernorm", positions="learned", rope_theta=10000.0, no_biases=False,
                no_norm_affine=False, qk_norm=False, untied_head=False)


def complete(config):
    config = DEFAULTS | dict(kv_heads=config["heads"], max_seq_len=T + 3, vocab_size=VOCAB) | config
    gated = config["activation"] == "swiglu"
    config.setdefault("ffn", -(-8 * config["channels"] // (3 * 64)) * 64 if gated else 4 * config["channels"])
    return config


def shapes(c):
    """Returns the shape of every parameter, by the name that it has in Hugging Face's Llama, or
    would have."""
    C, HS = c["channels"], c["channels"] // c["heads"]
    linears = {"self_attn.q_proj": (C, C), "self_attn.k_proj": (c["kv_heads"] * HS, C),
               "self_attn.v_proj": (c["kv_heads"] * HS, C), "self_attn.o_proj": (C, C),
               "mlp.up_proj": (c["ffn"], C), "mlp.down_proj": (C, c["ffn"])}
    if c["activation"] == "swiglu":
        linears["mlp.gate_proj"] = (c["ffn"], C)
    norms = {"input_layernorm": C, "post_attention_layernorm": C}
    if c["qk_norm"]:
        norms |= {"self_attn.q_norm": C, "self_attn.k_norm": c["kv_heads"] * HS}
    found = {"model.embed_tokens.weight": (VOCAB, C)}
    if c["positions"] == "learned":
        found["model.embed_positions.weight"] = (c["max_seq_len"], C)
    if c["untied_head"]:
        found["lm_head.weight"] = (VOCAB, C)
    all_norms = {"model.norm": C}
    for layer in range(c["layers"]):
        for name, shape in linears.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
            if not c["no_biases"]:
                found[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        all_norms |= {f"model.layers.{layer}.{name}": size for name, size in norms.items()}
    for name, size in all_norms.items():
        if not c["no_norm_affine"]:
            found[f"{name}.weight"] = (size,)
            if c["norm"] == "layernorm" and not c["no_biases"]:
                found[f"{name}.bias"] = (size,)
    return found


def make_weights(c, seed):
    """Draws weights that are BF16 values, so that files hold them exactly in two bytes."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(c).items():
        mean, deviation = (1, 0.3) if "norm" in name and name.endswith("weight") else (0, 0.1 if len(shape) == 1 else 0.2)
        values = mean + deviation * torch.randn(shape, generator=generator)
        weights[name] = values.to(torch.bfloat16).double().requires_grad_()
    return weights


def normalise(c, weights, name, x):
    weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
    if c["norm"] == "layernorm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def turn(c, x):
    """Applies rotary positions to x (B, heads, T, HS)."""
    half = x.shape[-1] // 2
    rates = c["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)


def attend(c, weights, block, x):
    HS = c["channels"] // c["heads"]
    linear = lambda name, y: F.linear(y, weights[f"{block}.{name}.weight"], weights.get(f"{block}.{name}.bias"))
    split = lambda y: y.unflatten(-1, (-1, HS)).transpose(1, 2)
    queries, keys, values = (linear(f"self_attn.{part}_proj", x) for part in "qkv")
    if c["qk_norm"]:
        queries = normalise(c, weights, f"{block}.self_attn.q_norm", queries)
        keys = normalise(c, weights, f"{block}.self_attn.k_norm", keys)
    queries, keys, values = split(queries), split(keys), split(values)
    if c["positions"] == "rope":
        queries, keys = turn(c, queries), turn(c, keys)
    group = c["heads"] // c["kv_heads"]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = queries @ keys.transpose(-1, -2) / HS**0.5
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    out = scores.masked_fill(mask, -torch.inf).softmax(-1) @ values
    return linear("self_attn.o_proj", out.transpose(1, 2).flatten(2))


def feed_forward(c, weights, block, x):
    linear = lambda name, y: F.linear(y, weights[f"{block}.mlp.{name}.weight"], weights.get(f"{block}.mlp.{name}.bias"))
    activations = {"gelu": lambda y: F.gelu(y, approximate="tanh"), "relu": F.relu, "relu2": lambda y: F.relu(y) ** 2}
    up = linear("up_proj", x)
    hidden = F.silu(linear("gate_proj", x)) * up if c["activation"] == "swiglu" else activations[c["activation"]](up)
    return linear("down_proj", hidden)


def logits_of(c, weights, tokens):
    x = weights["model.embed_tokens.weight"][tokens.long()]
    if c["positions"] == "learned":
        x = x + weights["model.embed_positions.weight"][:tokens.shape[1]]
    for layer in range(c["layers"]):
        block = f"model.layers.{layer}"
        x = x + attend(c, weights, block, normalise(c, weights, f"{block}.input_layernorm", x))
        x = x + feed_forward(c, weights, block, normalise(c, weights, f"{block}.post_attention_layernorm", x))
    return normalise(c, weights, "model.norm", x) @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def llama_of(c, weights):
    """Returns transformers' model of the same weights."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=c["channels"], intermediate_size=c["ffn"], num_hidden_layers=c["layers"],
        num_attention_heads=c["heads"], num_key_value_heads=c["kv_heads"], max_position_embeddings=c["max_seq_len"],
        rms_norm_eps=EPS, rope_parameters={"rope_type": "default", "rope_theta": c["rope_theta"]},
        tie_word_embeddings=not c["untied_head"], bos_token_id=None, eos_token_id=VOCAB - 1, attn_implementation="eager",
    ))
    model.load_state_dict({name: p.detach().to(torch.bfloat16) for name, p in weights.items()})
    return model.eval()


def save_llama(model):
    model.to(torch.bfloat16).save_pretrained(FIXTURES / "hf_llama")
    (FIXTURES / "hf_llama" / "generation_config.json").unlink()
    (FIXTURES / "hf_llama" / "model.safetensors").chmod(0o644)


def make(name, config, seed):
    c = complete(config)
    weights = make_weights(c, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 1, B, T), generator=generator, dtype=torch.int32)
    logits = logits_of(c, weights, tokens[0])
    loss = F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())
    loss.backward()
    print(f"{name}: {sum(p.numel() for p in weights.values())} parameters, loss {loss.item():.6f}")
    if name == "llama":
        save_llama(llama_of(c, weights))
        # Its angles and norms are FP32 whatever its dtype.
        error = (llama_of(c, weights).double()(tokens[0].long()).logits - logits).abs().max().item()
        print(f"  transformers' Llama differs by {error:.1e}")
        assert error < 1e-4
    tensors = {key: p.detach().to(torch.bfloat16) for key, p in weights.items()}
    tensors |= {f"grad.{key}": p.grad.float() for key, p in weights.items()}
    tensors |= {"tokens": tokens, "targets": targets, "logits": logits.detach().float(), "losses": loss.detach()[None]}
    write(FIXTURES / f"model_{name}.safetensors", tensors, {key: str(value) for key, value in c.items()})


if __name__ == "__main__":
    for number, (name, config) in enumerate(MODELS.items()):
        make(name, config, seed=10 + number)
