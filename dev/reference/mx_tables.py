#!/usr/bin/env python3
"""Writes dev/test/fixtures/mx_tables.h: what ml_dtypes says about the MX element and scale formats.

For each element format: the value of every code, and for every positive code c >= 1 the smallest FP32 magnitude that
ml_dtypes casts to c or beyond. A cast is monotonic, so these thresholds give the code of every FP32 input by comparison
alone (ml_dtypes doesn't saturate: what it makes NaN or Inf counts as beyond, and the table ends at the largest normal).
--check sweeps all 2^31 non-negative FP32 patterns to show that the thresholds reproduce ml_dtypes' cast.

    pip install numpy ml_dtypes
    python3 dev/reference/mx_tables.py [--check]
"""

import argparse
import pathlib

import ml_dtypes
import numpy as np

FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 0x7E),
    "e5m2": (ml_dtypes.float8_e5m2, 0x7B),
    "e2m3": (ml_dtypes.float6_e2m3fn, 0x1F),
    "e3m2": (ml_dtypes.float6_e3m2fn, 0x1F),
    "e2m1": (ml_dtypes.float4_e2m1fn, 0x07),
}
BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
INFINITY = 0x7F800000
OUTPUT = pathlib.Path(__file__).resolve().parents[1] / "test" / "fixtures" / "mx_tables.h"


def decode(dtype, codes):
    """Returns the FP32 bit patterns of the values of codes; every NaN is written as 0x7FC00000 with
    the code's sign."""
    codes = np.asarray(codes, np.uint8)
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float32)
    bits = values.view(np.uint32).copy()
    bits[np.isnan(values)] = bits[np.isnan(values)] & 0x80000000 | 0x7FC00000
    return bits


def encode(dtype, bits):
    """Returns the codes that ml_dtypes gives to the non-negative FP32 bit patterns."""
    with np.errstate(all="ignore"):
        return np.asarray(bits, np.uint32).view(np.float32).astype(dtype).view(np.uint8)


def thresholds(dtype, max_code):
    """Finds the smallest FP32 bit patterns whose code is at least 1, 2, ..., max_code, by
    bisection."""
    codes = np.arange(1, max_code + 1)
    low = np.zeros(max_code, np.uint32)  # below the threshold
    high = np.full(max_code, INFINITY - 1, np.uint32)  # at or above it
    while np.any(high - low > 1):
        middle = low + (high - low) // 2
        reached = encode(dtype, middle) >= codes
        high = np.where(reached, middle, high)
        low = np.where(reached, low, middle)
    return high


def check(name, dtype, max_code, limits):
    """Checks for every FP32 pattern from 0 to Inf that the thresholds' code is ml_dtypes',
    saturated."""
    step = 1 << 24
    for first in range(0, INFINITY + 1, step):
        bits = np.arange(first, min(first + step, INFINITY + 1), dtype=np.uint32)
        expected = np.minimum(encode(dtype, bits), max_code)
        assert np.array_equal(np.searchsorted(limits, bits, side="right"), expected), (name, hex(first))
    print(f"{name}: thresholds reproduce ml_dtypes' cast on all finite FP32 magnitudes")


def array(name, type_name, values, width):
    rows = [", ".join(f"0x{v:0{width}X}" for v in values[i : i + 10]) for i in range(0, len(values), 10)]
    return f"static const {type_name} {name}[{len(values)}] = {{\n    " + ",\n    ".join(rows) + "};\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="sweep all FP32 magnitudes (a few minutes)")
    options = parser.parse_args()

    text = [
        f"// Written by dev/reference/mx_tables.py with ml_dtypes {ml_dtypes.__version__}; do not edit.\n"
        "// <format>_values: FP32 bits of every code's value. <format>_thresholds[c - 1]: FP32 bits of the\n"
        "// smallest magnitude that rounds to code c or beyond. e8m0_values: FP32 bits of every scale code's\n"
        "// value.\n"
        "// clang-format off\n"
        "#ifndef MX_TABLES_H\n#define MX_TABLES_H\n\n#include <stdint.h>\n\n"
    ]
    for name, (dtype, max_code) in FORMATS.items():
        limits = thresholds(dtype, max_code)
        if options.check:
            check(name, dtype, max_code, limits)
        text.append(array(f"{name}_values", "uint32_t", decode(dtype, range(1 << BITS[name])), 8))
        text.append(array(f"{name}_thresholds", "uint32_t", limits, 8) + "\n")
    text.append(array("e8m0_values", "uint32_t", decode(ml_dtypes.float8_e8m0fnu, range(256)), 8))
    text.append(
        "\n// One row a format, in the order above.\n"
        "typedef struct {\n    const char *name;\n    int num_codes, max_code, mantissa_bits;\n"
        "    const uint32_t *values, *thresholds;\n} MxTable;\n\n"
        "static const MxTable mx_tables[] = {\n"
    )
    for name, (dtype, max_code) in FORMATS.items():
        mantissa_bits = ml_dtypes.finfo(dtype).nmant
        row = f'"{name}", {1 << BITS[name]}, {max_code}, {mantissa_bits}, {name}_values, {name}_thresholds'
        text.append(f"    {{{row}}},\n")
    text.append("};\n\n#endif\n")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text("".join(text))
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
