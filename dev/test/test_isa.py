"""Processors with fewer instructions: the GEMM path that is taken, and what it computes.

ONEDNN_MAX_CPU_ISA makes oneDNN believe in an older processor. Where it has no instructions for BF16, or on Intel's processors
no AMX, loops of ours multiply the same values in FP32, so losses may differ by the order of sums alone; how far is measured
(perturb.py). Our code is compiled anew for AVX2, into a directory beside the program that is kept, and what has vector code is
tested there: on a processor that has more the tests of the build itself don't reach that code. Without a library's GEMMs the
same compiler and C library make the same losses on every processor with AVX2, to the bit: dev/test/golden/avx2.json has them.

usage: test_isa.py    makes that file anew, after numerics were meant to change; TRAINER: the program compiled for AVX2
"""

import json
import os
import platform
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

import test_golden as golden
from perturb import deviations, make_initial_weights
from trainer import B, CHANNELS, ENVIRONMENT, MODEL, ROOT, SLOWNESS, TRAINER, losses, run_well

RECIPES = ["fp32", "bf16", "mxfp8"]
STEPS = 20
OPTIONS = ["--learning-rate", "1e-3", "--max-steps", STEPS]
LONGEST_SUM = 4 * CHANNELS
# A step's loss may be off by so many root mean squares of what perturbed runs are off by there or earlier.
PERTURBED, DEVIATIONS = 8, 6

# The cap, and the processor's flag for it. AVX512_CORE is AVX-512 without BF16.
CAPS = {"AVX2": "avx2", "AVX512_CORE": "avx512dq", "AVX512_CORE_BF16": "avx512_bf16"}
C_TESTS = ["test_ops", "test_linear", "test_gpt"]
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
AVX2_TESTS = ["test_mx", "test_quantize", "test_optimizer", "test_hadamard", "test_model_ops", *C_TESTS]
GOLDEN_STEPS = 10  # of the 100 that are committed
GOLDEN_BITS = golden.GOLDEN / "avx2.json"


def device(environment=None):
    return re.search(r"^device .*$", run_well(*MODEL, "--dry-run", environment=environment).stdout, re.M)[0]


def of_processor(name):
    """What /proc/cpuinfo says of the first processor."""
    found = re.search(rf"^{name}\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1].split() if found else []


def processor_flags():
    return set(of_processor("flags"))


@pytest.fixture(params=CAPS)
def cap(request):
    """The environment variable that caps, and its value."""
    if CAPS[request.param] not in processor_flags():
        pytest.skip(f"this processor has no {CAPS[request.param]}, so that {request.param} keeps it from nothing")
    if "oneDNN" not in device():
        pytest.skip("oneDNN isn't in this build, or multiplies nothing on this processor")
    return {"ONEDNN_MAX_CPU_ISA": request.param}


def train(data, out, recipe, environment=None, program=TRAINER):
    arguments = map(str, [*data, *MODEL, *OPTIONS, "--recipe", recipe, "--out-dir", out])
    run_to_zero(program, *arguments, environment=environment)
    return losses(out)


def run_to_zero(*command, environment=None):
    """Runs a command that must exit with 0 and returns all that it wrote."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=ENVIRONMENT | (environment or {}), text=True,
                          timeout=300 * SLOWNESS, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def uncapped(data, tmp_path_factory):
    """For each recipe: the losses, and a bound for each of them."""
    found = {}
    for recipe in RECIPES:
        scratch = tmp_path_factory.mktemp(recipe)
        reference = train(data, scratch / "reference", recipe)
        initial = make_initial_weights(scratch / "initial", *data, *MODEL, "--recipe", recipe)
        errors = deviations(initial, reference, LONGEST_SUM, range(PERTURBED), scratch, *data, *OPTIONS, "--batch-size", B,
                            "--threads", 1, "--recipe", recipe)
        rms = np.sqrt((errors ** 2).mean(axis=0))
        found[recipe] = reference, DEVIATIONS * np.maximum.accumulate(rms)
    return found


def check_losses(what, found, reference, bound):
    error = np.abs(found - reference)
    step = int((error / bound).argmax())
    margin = bound[step] / error[step] if error[step] else np.inf
    print(f"{what}: {STEPS} losses, worst at step {step}: difference {error[step]:.2e}, bound {bound[step]:.2e}, margin "
          f"{margin:.1f}")
    assert (error <= bound).all()


def test_the_path_is_the_right_one(cap):
    isa, line = cap["ONEDNN_MAX_CPU_ISA"], device(cap)
    print(line)
    if isa == "AVX512_CORE_BF16" and of_processor("vendor_id") != ["GenuineIntel"]:
        assert "GEMMs by oneDNN" in line and line.endswith(", BF16 operands")
    else:
        assert line.endswith(", BF16 operands widened to FP32" + ("" if isa == "AVX2" else ", those in FP32 by oneDNN"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_the_uncapped_run(cap, recipe, data, uncapped, tmp_path):
    found = train(data, tmp_path / "run", recipe, environment=cap)
    check_losses(f"{recipe}, {cap['ONEDNN_MAX_CPU_ISA']}", found, *uncapped[recipe])


@pytest.mark.parametrize("name", C_TESTS)
def test_c_tests_pass(cap, name):
    program = Path(TRAINER).parent / name
    if not program.exists():
        pytest.skip(f"{program} isn't built")
    run_to_zero(program, environment=cap)


@pytest.fixture(scope="module")
def avx2():
    """The directory of a build for AVX2."""
    if platform.machine() != "x86_64" or "avx2" not in processor_flags():
        pytest.skip("this processor has no AVX2")
    if SLOWNESS > 1:
        pytest.skip("only what is built here is built with the sanitizer or for coverage: make test builds for AVX2 too")
    build = os.path.relpath(Path(TRAINER).parent / "avx2", ROOT)
    targets = [f"{build}/{name}" for name in [*AVX2_TESTS, "train_gpt_mxfp8"]]
    # Without what a make around these tests was told.
    made = run_to_zero("env", "-u", "MAKEFLAGS", "-u", "MFLAGS", "make", "ARCH=x86-64-v3", "CUDA=0", f"BUILD={build}", *targets)
    assert "warning" not in made, made
    return ROOT / build


@pytest.mark.parametrize("name", AVX2_TESTS)
def test_c_tests_pass_compiled_for_avx2(name, avx2):
    run_to_zero(avx2 / name, environment=AVX2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_compiled_for_avx2(recipe, avx2, data, uncapped, tmp_path):
    found = train(data, tmp_path / recipe, recipe, environment=AVX2, program=avx2 / "train_gpt_mxfp8")
    reference, bound = uncapped[recipe]
    print(f"{recipe}, compiled for AVX2: {'the same bits' if (found == reference).all() else 'other bits'}")
    check_losses(f"{recipe}, compiled for AVX2", found, reference, bound)


def golden_losses(program, recipe, out):
    run_to_zero(program, *golden.MODEL, *golden.TRAINING, *golden.RATE, "--recipe", recipe, "--max-steps", GOLDEN_STEPS,
                "--out-dir", out, environment=AVX2)
    return losses(out)


def made_by(program):
    """Returns what the bits depend on beside the program's text: the C library, the compiler and its flags, as the Makefile
    left them beside the program."""
    compiler, *flags = shlex.split((Path(program).parent / "settings").read_text())
    version = subprocess.run([compiler, "--version"], check=True, text=True, capture_output=True).stdout.splitlines()[0]
    kept = [flag for flag in flags if re.match("-(O|m|f)", flag)]
    return {"libc": " ".join(platform.libc_ver()), "compiler": version, "flags": " ".join(kept)}


@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_golden_losses_compiled_for_avx2(recipe, avx2, tmp_path):
    program, file = avx2 / "train_gpt_mxfp8", json.loads(GOLDEN_BITS.read_text())
    found = golden_losses(program, recipe, tmp_path)
    assert len(found) == GOLDEN_STEPS
    ratio, step = golden.worst_ratio(found, golden.load(recipe))
    print(f"{recipe}, compiled for AVX2: worst at step {step}: {ratio:.2f} of the bound")
    assert ratio <= 1
    here = made_by(program)
    others = [name for name in here if here[name] != file["made_by"][name]]
    if others:
        pytest.skip(f"bits not compared: another {', '.join(others)} than the file's")
    assert found.tolist() == file["losses"][recipe]


def test_the_file_of_bits_has_the_makefile_s_flags(avx2):
    """Else no machine compares them."""
    flags = made_by(avx2 / "train_gpt_mxfp8")["flags"]
    assert flags == json.loads(GOLDEN_BITS.read_text())["made_by"]["flags"]


def make_golden_bits():
    with tempfile.TemporaryDirectory() as scratch:
        found = {recipe: golden_losses(TRAINER, recipe, Path(scratch) / recipe).tolist() for recipe in golden.RECIPES}
    GOLDEN_BITS.write_text(json.dumps({"made_by": made_by(TRAINER), "losses": found}, indent=1) + "\n")


if __name__ == "__main__":
    make_golden_bits()
