"""build/mxcast against an implementation of its own in NumPy and ml_dtypes.

MXCAST names the program (default build/mxcast).
"""

import os
import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

MXCAST = Path(os.environ.get("MXCAST", "build/mxcast")).resolve()
FORMATS = {  # dtype, largest code
    "e4m3": (ml_dtypes.float8_e4m3fn, 0x7E),
    "e5m2": (ml_dtypes.float8_e5m2, 0x7B),
    "e2m3": (ml_dtypes.float6_e2m3fn, 0x1F),
    "e3m2": (ml_dtypes.float6_e3m2fn, 0x1F),
    "e2m1": (ml_dtypes.float4_e2m1fn, 0x07),
}
CODE_MASK = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m3": 0x1F, "e3m2": 0x1F, "e2m1": 0x07}  # a code without its sign
ROUNDINGS = ["rceil", "floor", "ceil", "even"]
BLOCK = 32
AXES = {"rowwise": (1, BLOCK), "columnwise": (BLOCK, 1), "square": (BLOCK, BLOCK)}  # rows and columns of a block


def element_max(name):
    return float(ml_dtypes.finfo(FORMATS[name][0]).max)


def reference_scales(amax, name, rounding):
    """E8M0 codes of blocks by their amax, by the definitions, in double precision."""
    maximum, mantissa_bits = element_max(name), ml_dtypes.finfo(FORMATS[name][0]).nmant
    finite = np.isfinite(amax)
    safe = np.where(finite & (amax > 0), amax, 1).astype(np.float64)
    fraction, exponent = np.frexp(safe)
    m_a, A = fraction * 2, exponent - 1
    m_e, E = np.frexp(maximum)[0] * 2, np.frexp(maximum)[1] - 1
    up = {
        "rceil": m_a > m_e,
        "floor": np.zeros_like(m_a, bool),
        "ceil": m_a > 1,
        "even": np.floor(m_a * 2**mantissa_bits + 0.5) >= 2 ** (mantissa_bits + 1),
    }[rounding]
    codes = np.clip(A - E + 127 + up, 0, 254)
    return np.where(finite, np.where(amax > 0, codes, 0), 255).astype(np.uint8)


def reference_elements(x, name):
    """Codes of FP32 values: ml_dtypes' rounding, saturated."""
    dtype, _ = FORMATS[name]
    maximum = np.float32(element_max(name))
    codes = np.clip(x, -maximum, maximum).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), 0x7F if name in ("e4m3", "e5m2") else FORMATS[name][1], codes).astype(np.uint8)


def blocks_of(shape, axis):
    """How many blocks a matrix has, down and across."""
    (rows, cols), (height, width) = shape, AXES[axis]
    return -(-rows // height), -(-cols // width)


def of_elements(scales, shape, axis):
    """Each element's scale."""
    height, width = AXES[axis]
    return scales.repeat(height, axis=0).repeat(width, axis=1)[: shape[0], : shape[1]]


@np.errstate(all="ignore")
def reference_encode(x, name, rounding, axis):
    (height, width), (down, across) = AXES[axis], blocks_of(x.shape, axis)
    padded = np.zeros((down * height, across * width), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    magnitude = np.abs(padded).reshape(down, height, across, width)
    bad = ~np.isfinite(magnitude).all(axis=(1, 3))
    amax = np.where(bad, np.inf, np.where(np.isfinite(magnitude), magnitude, 0).max(axis=(1, 3)))
    scales = reference_scales(amax, name, rounding)
    exponents = of_elements(scales.astype(np.int32), x.shape, axis) - 127
    elements = reference_elements(np.ldexp(x, -exponents), name)
    decoded = np.ldexp(elements.view(FORMATS[name][0]).astype(np.float32), exponents)
    return scales, elements, np.where(exponents == 128, np.float32(np.nan), decoded)


def run(*arguments):
    return subprocess.run([MXCAST, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def encode(directory, x, name, rounding, axis):
    x.tofile(directory / "in.f32")
    rows, cols = x.shape
    return encode_file(x.shape, name, rounding, axis, "--input", directory / "in.f32", "--rows", rows, "--cols", cols)


def encode_file(shape, name, rounding, axis, option, path, *options):
    """Scales, elements and dequantized values of a matrix of this shape in the file at `path`."""
    directory = path.parent
    done = run(
        *("encode", "--format", name, "--scale-rounding", rounding, "--axis", axis, option, path, *options),
        *("--scales", directory / "s.u8", "--elements", directory / "e.u8", "--dequantized", directory / "d.f32"),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return (
        np.fromfile(directory / "s.u8", np.uint8).reshape(blocks_of(shape, axis)),
        np.fromfile(directory / "e.u8", np.uint8).reshape(shape),
        np.fromfile(directory / "d.f32", np.float32).reshape(shape),
    )


def wide_matrix(rows, cols, seed):
    """Blocks of all magnitudes, with zeros of both signs, values on thresholds, subnormals, huge ones, NaN and Inf."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-150, 128, (rows, cols // 7 + 1)).repeat(7, axis=1)[:, :cols]
    exponents += rng.integers(-12, 1, (rows, cols))
    with np.errstate(over="ignore", under="ignore"):
        x = np.ldexp(rng.uniform(-2, 2, (rows, cols)), exponents)
        x = np.clip(x, -3.4e38, 3.4e38).astype(np.float32)
    x[rng.random((rows, cols)) < 0.1] = 0
    x[rng.random((rows, cols)) < 0.05] *= np.float32(-0.0)
    narrow = rng.integers(-60, 60, (rows, cols)) * np.float32(0.125)  # exact ties and thresholds
    pick = (np.arange(rows)[:, None] // BLOCK + np.arange(cols) // BLOCK) % 2 == 0
    x[pick] = narrow[pick]
    for value in (np.nan, np.inf, -np.inf):
        x[rng.integers(rows), rng.integers(cols)] = value
    x[:, -1] = 0  # a block of zeros, where it has one of its own
    return x


def assert_same_bits(actual, expected):
    """Equal as bits, and NaN where NaN is."""
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    present = ~np.isnan(expected)
    assert np.array_equal(actual[present].view(np.uint32), expected[present].view(np.uint32))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(96, 128), (45, 97), (1, 33), (33, 1)])
def test_encode(tmp_path, shape, name, rounding, axis):
    x = wide_matrix(*shape, seed=1)
    scales, elements, dequantized = encode(tmp_path, x, name, rounding, axis)
    expected_scales, expected_elements, expected_dequantized = reference_encode(x, name, rounding, axis)
    assert np.array_equal(scales, expected_scales)
    assert np.array_equal(elements, expected_elements)
    assert_same_bits(dequantized, expected_dequantized)


@pytest.mark.parametrize("name", FORMATS)
def test_encode_special_blocks(tmp_path, name):
    tiny, largest = np.float32(1e-45), np.finfo(np.float32).max
    x = np.zeros((6, BLOCK), np.float32)
    x[1] = -0.0
    x[2] = tiny
    x[3, 5], x[3, 6] = 1, np.nan
    x[4, 7] = -np.inf
    x[5] = -largest
    scales, elements, dequantized = encode(tmp_path, x, name, "floor", "rowwise")
    sign = CODE_MASK[name] + 1
    assert list(scales[:5, 0]) == [0, 0, 0, 255, 255]
    assert (elements[0] == 0).all() and (elements[1] == sign).all() and (elements[2] == 0).all()
    assert np.isnan(dequantized[3:5]).all()
    assert (elements[5] == FORMATS[name][1] | sign).all() and np.isfinite(dequantized[5]).all()


def test_encode_writes_only_what_is_asked_for(tmp_path):
    np.ones((2, 40), np.float32).tofile(tmp_path / "in.f32")
    done = run("encode", "--rows", 2, "--cols", 40, "--input", tmp_path / "in.f32", "--scales", tmp_path / "s.u8")
    assert done.returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.f32", "s.u8"]
    assert (tmp_path / "s.u8").read_bytes() == bytes([127 - 8] * 4)  # e4m3, rceil, rowwise


def test_encode_takes_nothing_else_s_name(tmp_path):
    """Neither the input's, whatever that is called, nor one file's for two outputs, also where it isn't there yet."""
    for name in ("w.mxcast", "w.tmp", "w.mxcast.tmp"):
        np.ones((2, 40), np.float32).tofile(tmp_path / name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run("encode", tmp_path / "w.mxcast", "--rows", 2, "--cols", 40, "--scales", tmp_path / "w").returncode == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "w"} == before
    done = run("encode", tmp_path / "w.tmp", "--rows", 2, "--cols", 40, "--scales", tmp_path / "s", "--elements", f"{tmp_path}/./s")
    assert done.returncode == 2 and "are the same file" in done.stderr and not (tmp_path / "s").exists()


def test_stats_count_what_decodes_to_zero(tmp_path):
    """Blocks of NVFP4 whose scale becomes 0 have the largest codes and decode to zero: 15 of the 16 here."""
    x = np.full((1, 256), 1e-4, np.float32)
    x[0, :16] = 1e6
    np.save(tmp_path / "x.npy", x)
    row = next(line.split() for line in run("stats", tmp_path / "x.npy").stdout.splitlines() if line.startswith("nvfp4 "))
    assert row[-2:] == ["6.2500", "93.7500"]


def assert_encodes(x, *arguments, axis="columnwise"):
    """That the matrix in a file, named by encode's options, is quantized as x is."""
    expected = reference_encode(x, "e3m2", "floor", axis)
    actual = encode_file(x.shape, "e3m2", "floor", axis, *arguments)
    assert np.array_equal(actual[0], expected[0]) and np.array_equal(actual[1], expected[1])
    assert_same_bits(actual[2], expected[2])


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", ml_dtypes.bfloat16])
def test_encode_of_npy(tmp_path, dtype):
    x = normal_matrix(64, 40).astype(dtype)
    np.save(tmp_path / "x.npy", x.reshape(2, 32, 40))
    assert_encodes(x.astype(np.float32), "--input", tmp_path / "x.npy")


def test_encode_of_safetensors(tmp_path):
    x, path = normal_matrix(), tmp_path / "model.safetensors"
    tensors = {"weight": x, "bf16": x.astype(ml_dtypes.bfloat16)}
    save_file(tensors, path)
    if "can't read JSON" in run("stats", path).stderr:
        pytest.skip("mxcast was built without cJSON")
    for name, tensor in tensors.items():
        assert_encodes(tensor.astype(np.float32), "--input", path, "--tensor", name)
    scales = tmp_path / "scales"
    assert_refused(run("encode", "--input", path, "--scales", scales), "2 tensors", "--tensor NAME", "mxcast stats")
    assert_refused(run("stats", tmp_path / "nothing"), "nothing: no such file")
    assert_refused(run("encode", "--input", path, "--tensor", "wieght", "--scales", scales), "did you mean 'weight'")
    assert_refused(run("encode", "--input", path, "--rows", 70, "--cols", 100, "--scales", scales), "shape of its own")
    assert not scales.exists()
    save_file({"only": x}, path)
    assert_encodes(x, "--input", path)


def test_encode_of_raw_under_any_name(tmp_path):
    x = normal_matrix()
    x.tofile(tmp_path / "x.dat")
    assert_encodes(x, "--input", tmp_path / "x.dat", "--rows", 70, "--cols", 100)


@pytest.mark.parametrize("axis", AXES)
def test_encode_by_the_scaling_s_name(tmp_path, axis):
    x = normal_matrix()
    np.save(tmp_path / "x.npy", x)
    assert_encodes(x, "--input", tmp_path / "x.npy", "--scaling", "mx", axis=axis)


# ----------------------------------------------------------------------------------------------------------------------
# stats


@np.errstate(all="ignore")
def reference_stats(x, name, rounding, axis):
    """SQNR in dB, then clamped, at largest, flushed, scale differs: in percent."""
    scales, elements, dequantized = reference_encode(x, name, rounding, axis)
    rceil = reference_encode(x, name, "rceil", axis)[0]
    ok = ~np.isnan(dequantized)
    block_scale = of_elements(scales.astype(np.int64), x.shape, axis)
    wide, magnitude_code = x.astype(np.float64), elements & CODE_MASK[name]
    noise = (wide[ok] - dequantized[ok].astype(np.float64)) ** 2
    sqnr = 10 * np.log10((wide[ok] ** 2).sum() / noise.sum())
    clamped = np.abs(wide[ok]) > np.ldexp(element_max(name), block_scale[ok] - 127)
    largest = magnitude_code[ok] == FORMATS[name][1]
    flushed = (wide[ok] != 0) & (magnitude_code[ok] == 0)
    finite = scales != 255
    return [sqnr, *(100 * np.mean(f) for f in (clamped, largest, flushed, (scales != rceil)[finite]))]


def parse_table(text):
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("format "))
    rows = [line.split() for line in lines[start + 1 : start + 21]]
    return {(row[0], row[1]): [float(value) for value in row[2:]] for row in rows}


def check_stats(path, x, *options, axis="rowwise"):
    done = run("stats", path, *options, "--axis", axis)
    assert (done.returncode, done.stderr) == (0, "")
    table = parse_table(done.stdout)
    assert set(table) == {(name, rounding) for name in FORMATS for rounding in ROUNDINGS}
    for (name, rounding), values in table.items():
        expected = reference_stats(x, name, rounding, axis)
        assert values[0] == pytest.approx(expected[0], abs=0.0051), (name, rounding)  # printed to 2 decimals
        assert values[1:] == pytest.approx(expected[1:], abs=5.1e-5), (name, rounding)  # printed to 4
    return done.stdout


def normal_matrix(rows=70, cols=100):
    x = np.random.default_rng(2).standard_normal((rows, cols)) * np.logspace(-3, 1, cols)
    x[3, :40] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("axis", AXES)
def test_stats_of_raw(tmp_path, axis):
    x = normal_matrix()
    x.tofile(tmp_path / "x.f32")
    text = check_stats(tmp_path / "x.f32", x, "--rows", 70, "--cols", 100, axis=axis)
    scaled = re.findall(r"^(\S+ +\S+ +e\d\S+) .*", text.split("scaling  ")[1], re.M)
    assert len(scaled) == len(set(scaled)) == (6 if axis == "square" else 10), text
    assert "F32 [70, 100]" in text and axis in text
    amax, zeros = np.abs(x).max(), 100 * np.mean(x == 0)
    assert f"7000 elements, amax {amax:.4g}, {zeros:.2f} % zero, 0 not finite" in text


def test_stats_of_raw_without_shape_is_one_row(tmp_path):
    x = normal_matrix()
    x.tofile(tmp_path / "x.bin")
    assert "[1, 7000]" in check_stats(tmp_path / "x.bin", x.reshape(1, -1))
    assert "[70, 100]" in check_stats(tmp_path / "x.bin", x, "--cols", 100)


def test_stats_leaves_out_blocks_that_are_not_finite(tmp_path):
    x = normal_matrix()
    x[0, 0], x[0, 1], x[5, 99] = np.nan, np.inf, -np.inf
    np.save(tmp_path / "x.npy", x)
    text = check_stats(tmp_path / "x.npy", x)
    assert "3 not finite" in text
    assert "2 blocks hold a value that is not finite" in text


def test_stats_of_exact_and_zero_matrices(tmp_path):
    np.save(tmp_path / "ones.npy", np.ones((4, 32), np.float32))
    np.save(tmp_path / "zeros.npy", np.zeros((4, 32), np.float32))
    assert all(row[0] == np.inf for row in parse_table(run("stats", tmp_path / "ones.npy").stdout).values())
    lines = run("stats", tmp_path / "zeros.npy").stdout.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("scaling ")) - 1
    assert [line.split()[2] for line in lines[end - 20 : end]] == ["-"] * 20
    assert [line.split()[3] for line in lines[end + 2 :]] == ["-"] * 10


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "bfloat16"])
def test_stats_of_npy(tmp_path, version, dtype):
    x = normal_matrix().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else f"<{dtype}")
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(file, x, version=version)
    text = check_stats(tmp_path / "x.npy", x.astype(np.float32))
    assert {"f2": "F16", "f4": "F32", "f8": "F64", "bfloat16": "BF16"}[dtype] in text


def test_stats_of_every_fp16_value(tmp_path):
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 1024)
    np.save(tmp_path / "x.npy", x)
    text = check_stats(tmp_path / "x.npy", x.astype(np.float32))
    assert "amax 6.55e+04" in text and "2048 not finite" in text


def test_stats_of_npy_of_other_dimensions(tmp_path):
    x = normal_matrix(64, 96)
    np.save(tmp_path / "x3.npy", x.reshape(4, 16, 96))
    np.save(tmp_path / "x1.npy", x[0])
    assert "[4, 16, 96], quantized as 64 x 96" in check_stats(tmp_path / "x3.npy", x)
    assert "[96], quantized as 1 x 96" in check_stats(tmp_path / "x1.npy", x[:1])


def test_stats_of_safetensors(tmp_path):
    x = normal_matrix()
    tensors = {
        "h.0.weight": x,
        "h.0.bf16": x.astype(ml_dtypes.bfloat16),
        "ids": np.arange(4),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    if "can't read JSON" in run("stats", path).stderr:
        pytest.skip("mxcast was built without cJSON")
    check_stats(path, x, "--tensor", "h.0.weight")
    assert "BF16 [70, 100]" in check_stats(path, tensors["h.0.bf16"].astype(np.float32), "--tensor", "h.0.bf16")
    listing = run("stats", path)
    assert listing.returncode == 0
    assert all(name in listing.stdout for name in [*tensors, "[70, 100]", "--tensor NAME"])
    save_file({"only": x}, path)
    check_stats(path, x)


# ----------------------------------------------------------------------------------------------------------------------
# Bad input: one sentence, exit code 2, and nothing written


def assert_refused(done, *words):
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mxcast: ") and done.stderr.count("\n") == 1
    for word in words:
        assert str(word) in done.stderr


@pytest.mark.parametrize(
    "change, words",
    [
        ({"--format": "e4m2"}, ["e4m2", "e4m3"]),
        ({"--format": "bf16"}, ["bf16"]),
        ({"--scale-rounding": "flor"}, ["flor", "floor"]),
        ({"--axis": "rows"}, ["rows", "rowwise"]),
        ({"--rows": "0"}, ["--rows"]),
        ({"--rows": "-4"}, ["--rows"]),
        ({"--rows": "5"}, ["128 FP32 values", "--rows"]),
        ({"--tensor": "weight"}, ["in.f32", "--tensor"]),
        ({"--cols": "4611686018427387904"}, ["--cols"]),
        ({"--rows": "3037000500", "--cols": "3037000500"}, ["--rows"]),
        ({"--input": "missing.f32"}, ["missing.f32", "No such file"]),
        ({"--input": "."}, ["regular file"]),
        ({"--scales": "no-such-directory/s.u8"}, ["no-such-directory"]),
        ({"--dequantized": "no-such-directory/d.f32"}, ["no-such-directory"]),
        ({"--elements": "/dev/null"}, ["/dev/null", "regular file"]),
        ({"--elements": "s.u8"}, ["--scales", "--elements", "same file"]),
        ({"--dequantized": "in.f32"}, ["--dequantized", "same file"]),
        ({"--tensor-scale": "t.f32", "--scaling": "mx"}, ["--tensor-scale", "--scaling mx"]),
        ({"--block-scale": "fp32", "--scaling": "mx"}, ["--block-scale", "--scaling mx"]),
        ({"--colls": "4"}, ["--colls", "--cols"]),
    ],
    ids=lambda value: "=".join(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_encode_refuses(tmp_path, change, words):
    np.ones((4, 32), np.float32).tofile(tmp_path / "in.f32")
    before = {"in.f32": (tmp_path / "in.f32").read_bytes(), "s.u8": b"old", "e.u8": b"old", "d.f32": b"old"}
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    options = {"--rows": "4", "--cols": "32", "--input": "in.f32", "--scales": "s.u8", "--elements": "e.u8"}
    options |= {"--dequantized": "d.f32"} | change
    command = [MXCAST, "encode", *(word for pair in options.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert_refused(done, *words)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_encode_refuses_missing_options(tmp_path):
    np.ones((4, 32), np.float32).tofile(tmp_path / "in.f32")
    shape = ["--rows", 4, "--cols", 32]
    assert_refused(run("encode", *shape, "--scales", tmp_path / "s"), "--input")
    assert_refused(run("encode", "--cols", 4, "--input", tmp_path / "in.f32", "--scales", tmp_path / "s"), "--rows")
    assert_refused(run("encode", "--input", tmp_path / "in.f32", "--scales", tmp_path / "s"), "--rows and --cols")
    assert_refused(run("encode", *shape, "--input", tmp_path / "in.f32"), "--scales", "--elements", "--dequantized")
    assert_refused(run("encode", "--rows"), "--rows")


def test_commands_and_help():
    assert_refused(run(), "encode", "stats")
    assert_refused(run("encod"), "encod", "did you mean encode")
    for arguments in (["--help"], ["encode", "--help"], ["stats", "--help"]):
        done = run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "mxcast" in done.stdout


def npy_bytes(header, data=b"", version=1):
    text = header.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + data


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", [".npy"]),
        (b"\x93NUMPY\x01", [".npy"]),
        (npy_bytes("{}"), ["header"]),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", [".npy"]),
        (npy_bytes("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }", bytes(16)), ["Fortran"]),
        (npy_bytes("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 2), }", bytes(16)), ["'>f4'"]),
        (npy_bytes("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 2), }", bytes(16)), ["'<i4'"]),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }", bytes(12)), ["12 bytes"]),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 2), }"), ["no elements"]),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2), }"), ["shape"]),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2"), ["shape"]),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999, 9999999999999), }"), ["overflows"]),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999999999999999,), }"), ["shape"]),
        (npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"), ["0 bytes"]),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[0],
)
def test_stats_refuses_npy(tmp_path, data, words):
    (tmp_path / "x.npy").write_bytes(data)
    assert_refused(run("stats", tmp_path / "x.npy"), "x.npy", *words)


def test_stats_refuses(tmp_path):
    x = np.ones((4, 32), np.float32)
    raw, odd, npy = (tmp_path / name for name in ("x.f32", "odd.bin", "x.npy"))
    x.tofile(raw)
    odd.write_bytes(bytes(5))
    np.save(npy, x)
    (tmp_path / "x.pt").touch()
    assert_refused(run("stats"), "FILE")
    assert_refused(run("stats", "--tensor", "weight", npy), "FILE")
    assert_refused(run("stats", tmp_path / "x.pt"), "x.pt", ".safetensors")
    assert_refused(run("stats", tmp_path / "missing.npy"), "missing.npy")
    assert_refused(run("stats", odd), "5 bytes")
    assert_refused(run("stats", raw, "--cols", 33), "--cols")
    assert_refused(run("stats", raw, "--rows", 4, "--cols", 33), "--rows")
    assert_refused(run("stats", raw, "--tensor", "weight"), "--tensor")
    assert_refused(run("stats", npy, "--rows", 4), "--rows")


def test_stats_refuses_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")  # nobody will ever write into it
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert_refused(run("stats", tmp_path / "pipe.npy"), "pipe.npy", "regular file")
    assert_refused(run("stats", tmp_path / "pipe.safetensors"), "pipe.safetensors")


def test_no_name_commands_the_terminal(tmp_path):
    x = np.ones((4, 32), np.float32)
    np.save(tmp_path / "x.npy", x)
    header = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(header.replace(b"'<f4'", b"'\x1b[J'"))
    assert_refused(run("stats", tmp_path / "x.npy"), "'?[J'")
    save_file({"evil\x1b[2J\x9b2J": x, "weight": x}, tmp_path / "m.safetensors")
    listing = run("stats", tmp_path / "m.safetensors")
    if "can't read JSON" in listing.stderr:
        pytest.skip("mxcast was built without cJSON")
    assert "evil?[2J??2J" in listing.stdout
    done = run("stats", tmp_path / "m.safetensors", "--tensor", "evil\x1b[2J\x9b2J")
    assert done.stdout.startswith("evil?[2J??2J: F32")


def test_stats_refuses_safetensors(tmp_path):
    model, broken = tmp_path / "m.safetensors", tmp_path / "broken.safetensors"
    save_file({"weight": np.ones((4, 32), np.float32), "ids": np.arange(4)}, model)
    broken.write_bytes(b"\xff" * 8 + b"{}")
    assert_refused(run("stats", broken), "broken.safetensors")
    if "can't read JSON" in run("stats", model).stderr:
        pytest.skip("mxcast was built without cJSON")
    assert_refused(run("stats", model, "--tensor", "wieght"), "wieght", "did you mean 'weight'")
    assert_refused(run("stats", model, "--tensor", "ids"), "ids", "I64")
    assert_refused(run("stats", model, "--rows", 4), "--rows")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        done = subprocess.run([MXCAST, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert "can't be written" in done.stderr
