#!/usr/bin/env python3
"""Writes dev/test/fixtures/proxy.safetensors: the proxy's model, its losses, gradients and optimizer steps, by PyTorch.

Everything is computed in FP64 from FP32 initial values, so that the reference has no rounding of its own to speak of.
The same version of PyTorch writes the same bytes.

usage: make_proxy_fixture.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parents[1] / "test/fixtures/proxy.safetensors"
LAYERS, WIDTH, ROWS, HEADS, SEQ_LEN, STEPS = 2, 12, 8, 2, 4, 3
ACTIVATIONS = ("gelu", "relu", "relu2", "swiglu")  # new ones at the end: test_proxy.c has their numbers
LOSSES = ("mse", "kl")
OPTIMIZERS = ("adam", "sgd")
RATES = {"adam": 1e-2, "sgd": 0.3}
MOMENTUM = 0.9

# activation, layernorm, attention, loss, optimizer
CASES = (
    ("gelu", True, False, "mse", "adam"),
    ("relu", True, False, "kl", "sgd"),
    ("swiglu", True, False, "mse", "adam"),
    ("gelu", False, False, "kl", "sgd"),
    ("swiglu", False, False, "kl", "adam"),
    ("relu2", False, False, "mse", "adam"),
    ("gelu", True, True, "mse", "adam"),
    ("relu", False, True, "mse", "adam"),
)


def hidden(activation):
    return 4 * WIDTH if activation != "swiglu" else -(-round(8 * WIDTH / 3) // 64) * 64


def make_parameters(activation, layernorm, attention):
    """By name, in the order of the program's list."""
    up = hidden(activation) * (2 if activation == "swiglu" else 1)
    branches = [("ln_1", "qkv", 3 * WIDTH, "projection", WIDTH)] if attention else []
    branches.append(("ln_2", "up", up, "down", hidden(activation)))
    made = {}
    for layer in range(LAYERS):
        for norm, first, first_rows, second, second_cols in branches:
            if layernorm:
                made[f"{layer}.{norm}.weight"] = 1 + 0.2 * torch.randn(WIDTH)
                made[f"{layer}.{norm}.bias"] = 0.2 * torch.randn(WIDTH)
            made[f"{layer}.{first}.weight"] = torch.randn(first_rows, WIDTH) * 0.4
            made[f"{layer}.{second}.weight"] = torch.randn(WIDTH, second_cols) * 0.3
    return {name: value.double().requires_grad_() for name, value in made.items()}


def activate(x, activation):
    if activation == "swiglu":
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(x, approximate="tanh")
    return F.relu(x) ** (2 if activation == "relu2" else 1)


def attend(qkv):
    q, k, v = (t.view(-1, SEQ_LEN, HEADS, WIDTH // HEADS).transpose(1, 2) for t in qkv.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, WIDTH)


def forward(p, x, activation, layernorm, attention):
    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5) if layernorm else x

    for layer in range(LAYERS):
        if attention:
            qkv = norm(x, f"{layer}.ln_1") @ p[f"{layer}.qkv.weight"].T
            x = x + attend(qkv) @ p[f"{layer}.projection.weight"].T
        h = norm(x, f"{layer}.ln_2") @ p[f"{layer}.up.weight"].T
        x = x + activate(h, activation) @ p[f"{layer}.down.weight"].T
    return x


def loss_of(output, target, kind):
    if kind == "mse":
        return F.mse_loss(output, target)
    return F.kl_div(output.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True)


def make_case(index, activation, layernorm, attention, loss, optimizer):
    torch.manual_seed(index)
    p = make_parameters(activation, layernorm, attention)
    x, target = torch.randn(STEPS, ROWS, WIDTH), torch.randn(STEPS, ROWS, WIDTH)
    tensors = {f"initial.{name}": value.detach().float() for name, value in p.items()}
    rate = RATES[optimizer]
    adam = torch.optim.Adam(p.values(), lr=rate, betas=(0.9, 0.999))
    sgd = torch.optim.SGD(p.values(), lr=rate, momentum=MOMENTUM)
    chosen, losses = (adam if optimizer == "adam" else sgd), []
    for step in range(STEPS):
        chosen.zero_grad()
        output = forward(p, x[step].double(), activation, layernorm, attention)
        value = loss_of(output, target[step].double(), loss)
        value.backward()
        losses.append(value.item())
        if step == 0:
            tensors["output"] = output.detach().float()
            tensors |= {f"grad.{name}": value.grad.float() for name, value in p.items()}
        chosen.step()
    tensors |= {f"final.{name}": value.detach().float() for name, value in p.items()}
    tensors |= {"x": x, "target": target, "losses": torch.tensor(losses, dtype=torch.float64)}
    tensors["case"] = torch.tensor(
        [LAYERS, WIDTH, ROWS, HEADS, SEQ_LEN, STEPS, ACTIVATIONS.index(activation), layernorm, attention,
         LOSSES.index(loss), OPTIMIZERS.index(optimizer)], dtype=torch.int32)
    tensors["rates"] = torch.tensor([rate, MOMENTUM], dtype=torch.float64)
    return {f"{index}.{name}": value.contiguous() for name, value in tensors.items()}


def main():
    tensors = {}
    for index, case in enumerate(CASES):
        tensors |= make_case(index, *case)
    save_file(tensors, OUT)
    print(f"{OUT}: {len(CASES)} cases, {OUT.stat().st_size} bytes, torch {torch.__version__}")


if __name__ == "__main__":
    main()
