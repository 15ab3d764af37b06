#!/usr/bin/env python3
"""Writes dev/test/fixtures/delayed_scales.h: the scales that Transformer Engine's delayed scaling makes of amaxes, step by
step, in NumPy.

    pip install numpy jax==0.10.2
    pip download --no-deps transformer_engine==2.20.2 && unzip -d te transformer_engine-2.20.2-py3-none-any.whl
    python3 dev/reference/delayed_scaling_fixture.py --transformer-engine te

A history is an array of FP32 whose first entry is the step's amax. After the step the amax that counts is the largest
of the history, or the first entry; the history is rolled by one and its first entry set to 0; and where that amax is
finite and above 0 the scale is the format's largest value, times 2^-margin, over it, at most the largest FP32 number
(Transformer Engine's delayed_scaling.cu). An amax that isn't finite keeps the scale for its own step here, and enters
the history as 0: there an infinity would keep the scale for as long as it is in the history.

Where amaxes are 0 or normal numbers, and quotients finite, Transformer Engine's functions for JAX have to make the same
scales before anything is written. Importing them needs the compiled library; so they are taken out of their file.
"""

import argparse
import ast
import pathlib

import numpy as np

OUTPUT = pathlib.Path(__file__).resolve().parents[1] / "test" / "fixtures" / "delayed_scales.h"
F = np.float32
LARGEST = {"e4m3": F(448), "e5m2": F(57344)}
CASES = [(1, "max", 0), (3, "max", 0), (3, "most-recent", 0), (4, "max", 2), (2, "most-recent", 5), (1024, "max", 0)]
STEPS = 14


def amaxes_of(rng):
    values = (rng.standard_normal((STEPS, 3)) * np.exp2(rng.integers(-12, 12, (STEPS, 3)))).astype(F)
    values = np.abs(values)
    values[1, 0], values[3, 0], values[4, 1], values[6, 2] = np.inf, np.nan, 0, np.inf
    values[0:2, 2], values[8, 1], values[10, 0], values[12, 2] = 0, F(1e-45), F(3e38), F(1e-40)
    return values


def scales_of(amaxes, largest, length, algorithm, margin):
    """Returns the scale after each step."""
    history, scale, scales = np.zeros(length, F), F(1), []
    for amax in amaxes:
        history[0] = amax if np.isfinite(amax) else 0
        chosen = history.max() if algorithm == "max" else history[0]
        history = np.roll(history, -1)
        history[0] = 0
        if np.isfinite(amax) and chosen > 0:
            with np.errstate(over="ignore"):
                scale = min(F(largest * F(2.0**-margin)) / chosen, np.finfo(F).max)
        scales.append(scale)
    return np.array(scales, F)


def their_functions(root):
    """Returns, by name, the functions of Transformer Engine's that update a history and its scale."""
    import jax.numpy as jnp

    tree = ast.parse((pathlib.Path(root) / "transformer_engine/jax/quantize/quantizer.py").read_text())
    wanted = ("compute_scale_from_amax", "_update_amax_history", "_compute_scale", "_roll_and_reset_amax_history")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for function in functions:
        function.decorator_list, function.returns = [], None
        for argument in function.args.args:
            argument.annotation = None
    names = {"jnp": jnp, "AmaxComputeAlgo": type("AmaxComputeAlgo", (), {"MAX": "max"})}
    exec(compile(ast.Module(functions, []), "quantizer.py", "exec"), names)
    return names


def check_against(root):
    import jax.numpy as jnp

    theirs, rng, compared = their_functions(root), np.random.default_rng(2), 0
    for length, algorithm, margin in CASES:
        for name, dtype in ("e4m3", jnp.float8_e4m3fn), ("e5m2", jnp.float8_e5m2):
            amaxes = np.abs(rng.standard_normal(STEPS) * np.exp2(rng.integers(-90, 90, STEPS))).astype(F)
            amaxes[rng.integers(STEPS, size=2)] = 0
            history, scale, scales = jnp.zeros(length, F), jnp.ones(1, F), []
            for amax in amaxes:
                history = theirs["_update_amax_history"](history, jnp.array(amax))
                scale = theirs["_compute_scale"](history, scale, dtype, algorithm, margin)
                history = theirs["_roll_and_reset_amax_history"](history)
                scales.append(scale[0])
            assert np.array_equal(scales_of(amaxes, LARGEST[name], length, algorithm, margin), np.array(scales)), (length, name)
            compared += STEPS
    print(f"{compared} scales are Transformer Engine's")


def rows(array):
    return ", ".join("{" + ", ".join(f"0x{bits:08X}" for bits in row) + "}" for row in array.view(np.uint32))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformer-engine", required=True, help="directory that its wheel was unpacked into")
    check_against(parser.parse_args().transformer_engine)
    rng = np.random.default_rng(1)
    text = ["// Written by dev/reference/delayed_scaling_fixture.py with NumPy; do not edit.",
            "// FP32 bits: of each step's amaxes of three tensors, and of their scales after the step, E4M3's",
            "// and E5M2's.",
            "// clang-format off", "#pragma once", "#include <stdint.h>", f"enum {{ DELAYED_STEPS = {STEPS} }};",
            "static const struct {", "    int64_t length, margin;", "    const char *algorithm;",
            "    uint32_t amax[DELAYED_STEPS][3], e4m3[DELAYED_STEPS][3], e5m2[DELAYED_STEPS][3];", "} DELAYED_CASES[] = {"]
    for length, algorithm, margin in CASES:
        amaxes = amaxes_of(rng)
        scales = {name: np.stack([scales_of(amaxes[:, i], largest, length, algorithm, margin) for i in range(3)], axis=1)
                  for name, largest in LARGEST.items()}
        text.append(f'    {{{length}, {margin}, "{algorithm}",')
        text += [f"     {{{rows(array)}}}," for array in (amaxes, scales["e4m3"], scales["e5m2"])]
        text.append("    },")
    OUTPUT.write_text("\n".join([*text, "};", ""]))


if __name__ == "__main__":
    main()
