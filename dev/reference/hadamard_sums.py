#!/usr/bin/env python3
"""Writes dev/test/fixtures/hadamard_sums.h: Hadamard transforms of whole numbers by SciPy's matrix, before they are divided
by the square root of a group's length, so that they are whole numbers too.

    pip install scipy==1.17.1
    pip download --no-deps transformer_engine==2.20.2 && unzip -d te transformer_engine-2.20.2-py3-none-any.whl
    python dev/reference/hadamard_sums.py --transformer-engine te

The line is 228 long: groups of 16, 32, 64 and 128, and what these leave in powers of two. Signs are Transformer Engine's
16 again and again, and 128 drawn ones. Of Transformer Engine one file is run, with an empty stand-in for JAX.
"""

import argparse
import runpy
import sys
import unittest.mock
from pathlib import Path

import numpy as np
import scipy
from scipy.linalg import hadamard

OUTPUT = Path(__file__).resolve().parents[1] / "test" / "fixtures" / "hadamard_sums.h"
LENGTH, SIZES, LARGEST = 228, (16, 32, 64, 128), 128


def fixed_signs(root):
    sys.modules |= {name: unittest.mock.MagicMock() for name in ("jax", "jax.numpy")}
    return runpy.run_path(f"{root}/transformer_engine/jax/quantize/hadamard.py")["get_wgrad_sign_vector"]()


def transform(x, size, signs):
    sums, first = [], 0
    while first < len(x):
        while size > len(x) - first:
            size //= 2
        sums.append(x[first : first + size] @ np.diag(signs[:size]) @ hadamard(size))
        first += size
    return np.concatenate(sums)


def array(name, values):
    lines = [", ".join(map(str, values[i : i + 20])) for i in range(0, len(values), 20)]
    return f"static const int {name}[{len(values)}] = {{\n    " + ",\n    ".join(lines) + "};\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformer-engine", required=True, help="directory that its wheel was unpacked into")
    fixed = np.tile(fixed_signs(parser.parse_args().transformer_engine), LARGEST // 16)
    rng = np.random.default_rng(1)
    x, drawn = rng.integers(-100, 101, LENGTH), rng.choice([-1, 1], LARGEST)
    parts = [array("hadamard_line", x), array("hadamard_drawn_signs", drawn)]
    for size in SIZES:
        parts += [array(f"hadamard_fixed_{size}", transform(x, size, fixed))]
        parts += [array(f"hadamard_drawn_{size}", transform(x, size, drawn))]
    OUTPUT.write_text(f"// Written by dev/reference/hadamard_sums.py with SciPy {scipy.__version__}; do not edit.\n"
                      "// clang-format off\n" + "".join(parts))  # fmt: skip


main()
