"""Writes dev/test/fixtures/official.safetensors with the format's own library, for dev/test/test_safetensors.c.

    python dev/reference/safetensors_fixture.py

Made with safetensors 0.8.0 and torch 2.15.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

TENSORS = {
    "f32": torch.tensor([[0.1, -2.5, 3e38], [1e-45, -0.0, 7.0]], dtype=torch.float32),
    "f64": torch.tensor([0.1, -1e300, 2.0**-149], dtype=torch.float64),
    "f16": torch.tensor(
        [0.0, -0.0, 1.0, -65504.0, 2.0**-24, 2.0**-14, -math.inf, math.nan, 1.0 / 3.0], dtype=torch.float16
    ),
    "bf16": torch.tensor([1.0, -2.5, 2.0**-133, math.inf, 1.0 / 3.0], dtype=torch.bfloat16),
    "i64": torch.tensor([-1, 2**62], dtype=torch.int64),
    "scalar": torch.tensor(42.0),
    "empty": torch.zeros((0, 3)),
}

if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "test" / "fixtures" / "official.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt", "note": 'caf\u00e9 "quoted"\n'})
    print(path, path.stat().st_size, "bytes")
