"""The table of operations of dev/bench/bench.py: quantizers of other scalings beside MX's."""

import sys

import pytest
from trainer import ROOT

sys.path.insert(0, str(ROOT / "dev/bench"))
import bench  # noqa: E402

CODES, DECODED = "quantize both e4m3 rceil", "quantize both to bf16"


def operation(name, seconds, work, beside=None, shape="[1024, 3072]"):
    of_mx = {"beside": beside} if beside else {}
    return of_mx | {"name": name, "shape": shape, "work": work, "seconds": seconds, "per_second": work / seconds,
                    "limit": "memcpy", "limit_per_second": 4e9, "ratio": work / seconds / 4e9, "required": 0, "met": True}


# MX's codes are made in 4 ms, of the smaller shape in 1, and decoded values in 6.
MX = [operation(CODES, 1e-3, 1e6, shape="[1024, 768]"), operation(CODES, 4e-3, 4e6), operation(DECODED, 6e-3, 6e6)]


@pytest.mark.parametrize("other, said", [
    (operation("quantize both block128", 5e-3, 4e6, CODES), f"over {CODES}: 0.80 of its speed; at least 0.7: yes"),
    (operation("quantize both block128", 4.8e-3, 1e6, CODES, "[1024, 768]"),
     f"over {CODES}: 0.21 of its speed; at least 0.7: **no**"),
    (operation("quantize both nvfp4", 1.2e-2, 8e6, DECODED), f"over {DECODED}: 0.50 of its speed; at least 0.7: **no**"),
    (operation("quantize both tensor", 8e-3, 6e6, CODES),
     f"over {CODES}: 0.50 of its speed, 0.67 by its bytes alone: for information"),
    (operation("quantize both block128", 5e-3, 4e6, CODES, "[1, 1]"), f"over {CODES}: that wasn't measured"),
    (operation("quantize both e2m1 floor stochastic", 8e-3, 4e6), ""),
])
def test_scalings_beside_mx(capsys, other, said):
    bench.print_operations([*MX, other])
    head, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = [dict(zip(head, line)) for line in lines]
    assert [row["beside"] for row in rows] == ["", "", "", said]
    assert rows[-1]["operation"] == other["name"] and rows[-1]["met"] == ""
