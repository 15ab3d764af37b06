"""The scalings of build/mxcast that aren't MX, bit for bit against Transformer Engine's and torchao's references
(fixtures/scalings.npz, of dev/reference/scaling_fixture.py) and, for other shapes, axes and values, against an
implementation of its own in NumPy.

MXCAST names the program (default build/mxcast).
"""

import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_mxcast import MXCAST, run

FIXTURE = Path(__file__).parent / "fixtures" / "scalings.npz"
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e3m2": ml_dtypes.float6_e3m2fn,
          "e2m1": ml_dtypes.float4_e2m1fn}  # fmt: skip
F = np.float32
LARGEST = np.finfo(F).max
BLOCKS = {"tensor": None, "block128": 128, "block128x128": 128, "nvfp4": 16, "nvfp4-46": 16}


def encode(directory, x, scaling, name, axis=None, *options):
    """Elements' values, scales, the tensor's factor and dequantized values; None where there are none."""
    x.astype(F).tofile(directory / "x.f32")
    files = {"elements": np.uint8, "dequantized": F}
    if scaling != "tensor":
        files["scales"] = F if scaling.startswith("block") else np.uint8
    if not scaling.startswith("block"):
        files["tensor-scale"] = F
    wanted = [word for option in files for word in (f"--{option}", directory / option)]
    how = ["--rows", x.shape[0], "--cols", x.shape[1], "--scaling", scaling, "--format", name]
    how += ["--axis", axis] if axis else []
    done = run("encode", directory / "x.f32", *how, *wanted, *options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    out = {option: np.fromfile(directory / option, dtype) for option, dtype in files.items()}
    values = out["elements"].view(DTYPES[name]).astype(F).reshape(x.shape)
    scales = out.get("scales")
    if scales is not None and scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e4m3fn).astype(F)
    return values, scales, out.get("tensor-scale"), out["dequantized"].reshape(x.shape)


def assert_same(actual, expected):
    """Equal as numbers, and NaN where NaN is."""
    assert np.array_equal(actual, np.asarray(expected, F).reshape(actual.shape), equal_nan=True)


@pytest.mark.parametrize(
    "case, scaling, name, options",
    [
        ("te_nvfp4", "nvfp4", "e2m1", ["rowwise"]),
        ("te_nvfp4_2d", "nvfp4", "e2m1", ["square"]),
        ("te_46", "nvfp4-46", "e2m1", ["rowwise"]),
        ("te_46_2d", "nvfp4-46", "e2m1", ["square"]),
        ("te_nvfp4_columns", "nvfp4", "e2m1", ["columnwise"]),
        ("te_46_columns", "nvfp4-46", "e2m1", ["columnwise"]),
        ("te_tensor_e4m3", "tensor", "e4m3", [None]),
        ("te_tensor_e5m2", "tensor", "e5m2", [None]),
        ("ao_tensor_e4m3", "tensor", "e4m3", [None]),
        ("ao_tensor_e5m2", "tensor", "e5m2", [None]),
        ("te_block", "block128", "e4m3", ["rowwise"]),
        ("te_block_columns", "block128", "e4m3", ["columnwise"]),
        ("te_block_2d", "block128x128", "e4m3", [None]),
        ("te_block_e5m2", "block128", "e5m2", ["rowwise"]),
        ("te_block_columns_e5m2", "block128", "e5m2", ["columnwise"]),
        ("te_block_2d_e5m2", "block128x128", "e5m2", [None]),
        ("ao_block", "block128", "e4m3", ["rowwise", "--block-scale", "fp32"]),
        ("ao_block_columns", "block128", "e4m3", ["columnwise", "--block-scale", "fp32"]),
        ("ao_block_2d", "block128x128", "e4m3", [None, "--block-scale", "fp32"]),
    ],
)
def test_others_references(tmp_path, case, scaling, name, options):
    fixture = np.load(FIXTURE)
    values, scales, factor, dequantized = encode(tmp_path, fixture["x"], scaling, name, *options)
    assert_same(values, fixture[f"{case}.values"])
    if scales is not None:
        assert_same(scales, fixture[f"{case}.scales"])
    if factor is not None:
        assert_same(factor, fixture[f"{case}.factor"])
    error = np.abs(dequantized - fixture["x"]).max() / np.abs(fixture["x"]).max()
    print(f"{case}: the same values and scales; largest error {error:.4f} of amax")


def round_to(x, name):
    dtype = DTYPES[name]
    largest = F(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype).astype(F)


def sum_of_errors(errors, square):
    """In order, or of a square (16, 16) each row in order and then rows half, a quarter, ... apart."""
    rows = np.zeros(16, F)
    for r, row in enumerate(errors if square else errors.reshape(1, -1)):
        for value in row:
            rows[r] += value
    while len(rows) > 1:
        rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
    return rows[0]


def reference_block(block, scaling, name, amax_of_tensor, s, fp32_scales, square):
    """Elements' values and the scale of one block, by the definitions."""
    largest = F(ml_dtypes.finfo(DTYPES[name]).max)
    amax = np.abs(block).max()
    if scaling.startswith("block128"):
        scale = F(1) if amax == 0 else min(largest / amax, LARGEST)
        if not fp32_scales:
            scale = F(2.0 ** np.floor(np.log2(np.float64(scale))))
        return round_to(block * scale, name), F(1) / scale
    base = amax * (s * F(1 / 6)) if scaling == "nvfp4" else amax / F(6) * s
    best = None
    for candidate in [base] if scaling == "nvfp4" else [base, base * F(1.5)]:
        scale = round_to(candidate, "e4m3")
        values = round_to(block * min(F(1) / (scale * (F(1) / s)), LARGEST), name)
        error = F(0)
        if scaling == "nvfp4-46":
            error = sum_of_errors(np.abs(values * scale * amax_of_tensor / F(6 * 256) - block), square)
        if best is None or error < best[0]:
            best = error, values, scale
    return best[1:]


@np.errstate(all="ignore")
def reference(x, scaling, name, axis, fp32_scales):
    if axis == "columnwise":
        values, scales, factor = reference(np.ascontiguousarray(x.T), scaling, name, "rowwise", fp32_scales)
        return values.T, None if scales is None else scales.T, factor
    amax, largest = np.abs(x).max(), F(ml_dtypes.finfo(DTYPES[name]).max)
    bound = {"nvfp4": F(2688), "nvfp4-46": F(1536)}.get(scaling, largest)
    s = F(1) if scaling == "tensor" and amax == 0 else min(bound / amax, LARGEST)
    if scaling == "tensor":
        return round_to(x * s, name), None, F(1) / s
    square = axis == "square" or scaling == "block128x128"
    width, height = BLOCKS[scaling], BLOCKS[scaling] if square else 1
    values = np.zeros_like(x)
    scales = np.zeros((-(-x.shape[0] // height), -(-x.shape[1] // width)), F)
    for i, j in np.ndindex(*scales.shape):
        at = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        values[at], scales[i, j] = reference_block(x[at], scaling, name, amax, s, fp32_scales, square)
    return values, scales, None if scaling.startswith("block") else F(1) / s


def matrix(rows, cols, exponents=12):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-exponents, exponents + 1, (rows, 1)))
    x[0] = np.round(x[0] * 8) / 8
    x[:, -3:] = 0
    return x.astype(F)


CASES = [("tensor", "e4m3"), ("tensor", "e5m2"), ("tensor", "e3m2"), ("block128", "e4m3"), ("block128x128", "e4m3"),
         ("block128", "e5m2"), ("nvfp4", "e2m1"), ("nvfp4-46", "e2m1")]  # fmt: skip


@pytest.mark.parametrize("scaling, name, axis", [
    (scaling, name, axis) for scaling, name in CASES
    for axis in {"tensor": [None], "block128x128": [None, "square"]}.get(scaling, ["rowwise", "columnwise", "square"])])
@pytest.mark.parametrize("shape, exponents", [((45, 161), 12), ((1, 17), 0), ((130, 33), 3), ((5, 300), 60)])
def test_every_shape_and_axis(tmp_path, shape, exponents, scaling, name, axis):
    x = matrix(*shape, exponents) * F(2.0**-60 if exponents == 60 else 1)
    for block_scale in ("power-of-two", "fp32") if scaling.startswith("block") else ("power-of-two",):
        actual = encode(tmp_path, x, scaling, name, axis, "--block-scale", block_scale)
        expected = reference(x, scaling, name, axis, block_scale == "fp32")
        for got, wanted in zip(actual, expected):
            assert (got is None) == (wanted is None)
            if got is not None:
                assert_same(got, wanted)
        with np.errstate(all="ignore"):
            scales, (height, width) = expected[1], block_shape(scaling, axis)
            spread = 1 if scales is None else np.kron(scales, np.ones((height, width), F))[: x.shape[0], : x.shape[1]]
            decoded = expected[0] * F(1) * spread * (F(1) if expected[2] is None else expected[2])
        assert_same(actual[3], decoded)


def block_shape(scaling, axis):
    side = BLOCKS[scaling] or 1
    axis = "square" if scaling == "block128x128" else axis
    return 1 if axis == "rowwise" else side, 1 if axis == "columnwise" else side


@pytest.mark.parametrize("scaling, name", CASES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-39, 3e38])
def test_special_values(tmp_path, scaling, name, value):
    x = np.full((3, 40), value, F)
    values, scales, factor, dequantized = encode(tmp_path, x, scaling, name)
    expected = reference(x, scaling, name, "rowwise", False)
    assert_same(values, expected[0])
    assert np.isfinite(dequantized).all() and (np.sign(dequantized) * np.sign(x) >= 0).all()


@pytest.mark.parametrize("scaling, name", CASES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_never_hide(tmp_path, scaling, name, bad):
    x = matrix(40, 300)
    x[7, 150] = bad
    dequantized = encode(tmp_path, x, scaling, name)[3]
    if not scaling.startswith("block"):
        assert np.isnan(dequantized).all()
        return
    height, width = block_shape(scaling, "rowwise")
    inside = np.zeros(x.shape, bool)
    inside[7 // height * height : (7 // height + 1) * height, 128:256] = True
    assert np.isnan(dequantized[inside]).all() and np.isfinite(dequantized[~inside]).all()


def test_stats_lists_every_scaling(tmp_path):
    x = matrix(64, 256, 2)
    np.save(tmp_path / "x.npy", x)
    done = run("stats", tmp_path / "x.npy")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines[next(i for i, l in enumerate(lines) if l.startswith("scaling ")) + 1 :]]
    names = ["tensor"] * 2 + ["block128"] * 2 + ["block128-fp32"] * 2 + ["nvfp4"] * 2 + ["nvfp4-46"] * 2
    assert [row[0] for row in rows] == names
    for row in rows:
        fp32, square = row[0].endswith("fp32"), row[1] in ("128x128", "16x16")
        scaling = row[0].removesuffix("-fp32")
        values, scales, factor = reference(x, scaling, row[2], "square" if square else "rowwise", fp32)
        height, width = (int(n) for n in row[1].split("x")) if scales is not None else (1, 1)
        spread = 1 if scales is None else np.kron(scales, np.ones((height, width), F))[:64, :256]
        decoded = values * F(1) * spread * (F(1) if factor is None else factor)
        wide = x.astype(np.float64)
        sqnr = 10 * np.log10((wide**2).sum() / ((decoded - wide) ** 2).sum())
        flushed = 100 * np.mean((x != 0) & (values == 0))
        at_max = 100 * np.mean(np.abs(values) == ml_dtypes.finfo(DTYPES[row[2]]).max)
        assert float(row[3]) == pytest.approx(sqnr, abs=0.0051), row
        assert [float(v) for v in row[4:]] == pytest.approx([at_max, flushed], abs=5.1e-5), row


@pytest.mark.parametrize(
    "options, words",
    [
        (["--scaling", "nvfp4"], ["--format e2m1"]),
        (["--scaling", "block128", "--scale-rounding", "floor"], ["--scale-rounding", "block128"]),
        (["--scaling", "tensor", "--block-scale", "fp32"], ["--block-scale"]),
        (["--scaling", "tensor", "--scales", "s"], ["--tensor-scale instead"]),
        (["--scaling", "block128", "--tensor-scale", "t"], ["--tensor-scale", "block128"]),
        (["--scaling", "tensor", "--axis", "columnwise"], ["--axis is of blocks", "--scaling tensor has none"]),
        (["--scaling", "block128x128", "--axis", "columnwise"], ["square blocks", "--axis columnwise", "--scaling block128"]),
        (["--scaling", "block128x128", "--axis", "rowwise"], ["square blocks", "--axis rowwise", "--scaling block128"]),
        (["--scaling", "nvfp5"], ["nvfp5", "nvfp4"]),
    ],
)
def test_refusals(tmp_path, options, words):
    np.ones((4, 32), F).tofile(tmp_path / "x.f32")
    command = [MXCAST, "encode", "x.f32", "--rows", "4", "--cols", "32", "--elements", "e", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words)
    assert [p.name for p in tmp_path.iterdir()] == ["x.f32"]
