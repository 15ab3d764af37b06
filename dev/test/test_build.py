"""What make finds where: NVIDIA's libraries in Python wheels. (Toolkits are found by every build with one.)"""

import subprocess

import pytest

from trainer import ENVIRONMENT, ROOT

HEADERS = {"CUDA": "cu13/include/cublasLt.h", "cuDNN": "cudnn/include/cudnn_version.h", "NCCL": "nccl/include/nccl.h"}

HANDED_DOWN = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CUDA", "CUDNN", "NCCL"}  # by the make that runs the tests


def found(site_packages, *variables):
    """What `make found` says of each library, where only Python packages can have it."""
    command = ["make", "-s", "found", "NVCC=true", "CUDA_INCLUDE=/nonexistent", "CC=cc -nostdinc",
               f"SITE_PACKAGES=/nonexistent {site_packages}", *variables]
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return {name: what.split(":")[0] for name, what in (line.split(maxsplit=1) for line in done.stdout.splitlines())}


@pytest.mark.parametrize("there", [[], ["CUDA"], ["CUDA", "cuDNN"], ["CUDA", "NCCL"], list(HEADERS)], ids="-".join)
def test_libraries_in_wheels(tmp_path, there):
    for name in there:
        header = tmp_path / "nvidia" / HEADERS[name]
        header.parent.mkdir(parents=True)
        header.touch()
    answers = found(tmp_path)
    for name in HEADERS:
        assert answers[name].startswith("found" if name in there else "no"), answers


def test_a_library_left_out(tmp_path):
    header = tmp_path / "nvidia" / HEADERS["CUDA"]
    header.parent.mkdir(parents=True)
    header.touch()
    assert found(tmp_path, "CUDA=0")["CUDA"] .startswith("left out")


def test_make_alone_builds_the_program_and_says_what_was_found():
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    done = subprocess.run(["make", "-n", "CUDA=0"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    commands = done.stdout.splitlines()
    assert commands[-2:] == ["ln -sf build/train_gpt_mxfp8 train_gpt_mxfp8", 'echo "$FOUND"']


def test_a_library_that_was_left_out_isn_t_to_be_installed(tmp_path):
    command = ["make", "-s", "found", "CUDA=0"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("CUDA "))
    assert "install" not in line or "no nvcc" in line
