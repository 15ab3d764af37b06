#!/usr/bin/env python3
"""Writes dev/test/fixtures/muon.safetensors: matrices after steps of Muon, by torch.optim.Muon and in FP64.

PyTorch's Muon follows Keller Jordan's implementation: its coefficients, five steps of Newton-Schulz in BF16, Nesterov's
momentum as interpolations, a learning rate times sqrt(max(1, rows / columns)). The same in FP64, by PyTorch's own functions,
is what BF16 is judged by.

usage: make_muon_fixture.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.optim import Muon, _muon

OUT = Path(__file__).resolve().parents[1] / "test/fixtures/muon.safetensors"
STEPS, RATE, MOMENTUM, DECAY = 4, 0.02, 0.95, 0.1

# Rows of the matrices that one parameter stacks, and columns.
CASES = {"wide": ([24], 70), "tall": ([96], 33), "square": ([40], 40), "stacked": ([32, 16, 16], 32), "row": ([1], 48)}


def exact_update(buffer, gradient):
    """One step's update in FP64; changes the buffer."""
    buffer.lerp_(gradient, 1 - MOMENTUM)
    x = gradient.lerp(buffer, MOMENTUM)
    rows, cols = x.shape
    x = x / x.norm()
    x = x.T if rows > cols else x
    a, b, c = _muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C
    for _ in range(_muon.DEFAULT_NS_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if rows > cols else x) * max(1, rows / cols) ** 0.5


def case(rows, cols):
    tensors = {"initial": torch.randn(sum(rows), cols) * 0.1, "gradients": torch.randn(STEPS, sum(rows), cols)}
    # One direction is ten times the others, as gradients have some.
    tensors["gradients"] += 2 * torch.randn(STEPS, sum(rows), 1) * torch.randn(cols)
    theirs, exact = [], []
    for initial, gradients in zip(tensors["initial"].split(rows), tensors["gradients"].split(rows, 1), strict=True):
        weight = torch.nn.Parameter(initial.clone())
        optimizer = Muon([weight], lr=RATE, weight_decay=DECAY, momentum=MOMENTUM)
        master, buffer = initial.double(), torch.zeros_like(initial).double()
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
            master = master * (1 - RATE * DECAY) - RATE * exact_update(buffer, gradient.double())
        theirs.append(weight.detach())
        exact.append(master)
    tensors |= {"pytorch": torch.cat(theirs), "exact": torch.cat(exact).float()}
    return {name: value.contiguous() for name, value in tensors.items()}


def main():
    torch.manual_seed(20)
    torch.set_num_threads(1)
    made = {}
    for name, (rows, cols) in CASES.items():
        tensors = case(rows, cols)
        change = (tensors["exact"] - tensors["initial"]).norm()
        print(f"{name}: PyTorch's BF16 is {(tensors['pytorch'] - tensors['exact']).norm() / change:.4f} from FP64")
        made |= {f"{name}.{key}": value for key, value in tensors.items()}
        made[f"{name}.rows"] = torch.tensor(rows, dtype=torch.int32)
    made["options"] = torch.tensor([RATE, MOMENTUM, DECAY], dtype=torch.float64)
    save_file(made, OUT)


if __name__ == "__main__":
    main()
