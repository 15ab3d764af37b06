"""The tree is the map: a file includes files of its own floor and of those below it, never above."""

import re

import pytest

from trainer import ROOT

# From the ground up. cpu/ and cuda/ are twins: neither knows of the other.
FLOORS = [["llmc/base"], ["llmc/numerics"], ["llmc/files"], ["llmc/operations.h"], ["llmc/backend.h"],
          ["llmc/cpu", "llmc/cuda"], ["llmc/comm"], ["llmc/data"], ["llmc/model"], ["llmc/run"], [""]]
# Whose headers are included in one place alone.
LIBRARIES = {"oneapi/": ["llmc/cpu/"], "mpi.h": ["llmc/comm/"], "nccl.h": ["llmc/comm/"], "cudnn": ["llmc/cuda/"],
             "cublas": ["llmc/cuda/"], "cuda": ["llmc/cuda/"], "cjson/": ["llmc/files/"]}
SOURCES = sorted(p for p in (ROOT / "llmc").rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh")) + \
    sorted(ROOT.glob("*.cu"))


def room(path):
    """The floor of a path below the root, and which of the floor's rooms."""
    return next((floor, name) for floor, names in enumerate(FLOORS) for name in names if path.startswith(name))


def includes(path, brackets):
    return re.findall(rf"^#include {brackets[0]}([^{brackets[1]}]+){brackets[1]}", path.read_text(), re.M)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_point_down(path):
    own = str(path.relative_to(ROOT))
    floor, name = room(own)
    for included in includes(path, '""'):
        target = next(p for p in (path.parent / included, ROOT / included) if p.exists()).relative_to(ROOT)
        other_floor, other_name = room(str(target))
        assert other_floor < floor or other_name == name, f"{own} includes {target}"
    for header in includes(path, "<>"):
        for library, rooms in LIBRARIES.items():
            assert not header.startswith(library) or any(own.startswith(r) for r in rooms), f"{own} includes <{header}>"


def test_numerics_include_nothing_of_ours_but_numerics_and_philox():
    for path in (ROOT / "llmc/numerics").iterdir():
        assert all((path.parent / included).exists() or included == "llmc/base/random.h"
                   for included in includes(path, '""')), path


def test_no_circle_of_calls_in_cuda():
    """Who reads a file of llmc/cuda needn't know those that call it."""
    name = r"\b(?:backend_)?cuda_\w+"
    text = {p.name: re.sub(r"//.*", "", p.read_text()).replace("cuda_check(", "cuda_check_at(")
            for p in sorted((ROOT / "llmc/cuda").iterdir()) if p.suffix in (".c", ".cu") and p.name != "none.c"}
    home = {function: file for file in text
            for function in re.findall(rf"^(?!static|#)\w.*?({name})\([^;{{]*\) {{", text[file], re.M)}
    calls = {file: {home[f] for f in re.findall(name, text[file]) if f in home} - {file} for file in text}
    assert "stream.c" in calls["backend.c"] and "gemm_cublaslt.c" in calls["gemm.c"]
    while calls:  # files that call no other fall away, until none is left
        lowest = [file for file in calls if not calls[file]]
        assert lowest, f"a circle: {calls}"
        calls = {file: calls[file] - set(lowest) for file in calls if file not in lowest}
