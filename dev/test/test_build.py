"""What make finds where, and what it leaves out with older versions: NVIDIA's libraries in Python wheels, old toolkits that
are headers and an nvcc of a few lines. (Real toolkits are found by every build with one; dev/gpu/toolkits.sh builds with
others.)
"""

import shutil
import subprocess

import pytest

from trainer import ENVIRONMENT, ROOT

HEADERS = {"CUDA": "cu13/include/cublasLt.h", "cuDNN": "cudnn/include/cudnn_version.h", "NCCL": "nccl/include/nccl.h"}

# What their headers say of their versions.
VERSIONS = {"CUDA": "#define CUBLAS_VERSION 130100", "cuDNN": "#define CUDNN_VERSION 91900", "NCCL": ""}

HANDED_DOWN = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CUDA", "CUDA_ARCH", "CUDNN", "NCCL", "QUICK_KERNELS"}  # by the make that runs the tests


def table(*variables):
    """What `make found` says of each library, a sentence each, where the system has no headers."""
    command = ["make", "-s", "found", "CC=cc -nostdinc", *variables]
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


def found(site_packages, *variables):
    """What it says before the colon, where only Python packages can have it."""
    answers = table("NVCC=true", "CUDA_INCLUDE=/nonexistent", f"SITE_PACKAGES=/nonexistent {site_packages}", *variables)
    return {name: what.split(":")[0] for name, what in answers.items()}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def toolkit(path, release, archs, cublas, cudnn=None, help=""):
    """Makes a toolkit of headers with these versions; returns make's variable for it."""
    write(path / "bin/nvcc", f"""#!/bin/sh
case $1 in
--version) echo "Cuda compilation tools, release {release}, V{release}.1" ;;
--list-gpu-arch) printf 'compute_%s\\n' {archs} ;;
--help) echo '{help}' ;;
*) exit 1 ;;
esac""")
    (path / "bin/nvcc").chmod(0o755)
    write(path / "include/cublasLt.h", f"#define CUBLAS_VERSION {cublas}")
    if cudnn:
        write(path / "include/cudnn_version.h", f"#define CUDNN_VERSION {cudnn}")
    return f"CUDA_HOME={path}"


@pytest.mark.parametrize("there", [[], ["CUDA"], ["CUDA", "cuDNN"], ["CUDA", "NCCL"], list(HEADERS)], ids="-".join)
def test_libraries_in_wheels(tmp_path, there):
    for name in there:
        write(tmp_path / "nvidia" / HEADERS[name], VERSIONS[name])
    answers = found(tmp_path)
    for name in HEADERS:
        assert answers[name].startswith("found" if name in there else "no"), answers


def test_a_library_left_out(tmp_path):
    write(tmp_path / "nvidia" / HEADERS["CUDA"], VERSIONS["CUDA"])
    assert found(tmp_path, "CUDA=0")["CUDA"] .startswith("left out")


NO_BLACKWELL = "; not on Blackwell (nvcc knows it from 12.8 on)"
NO_BLOCKS = "; no native FP8 by blocks of 128 (cuBLAS has it from 12.9 on)"
NO_NATIVE = "; no native MXFP8 or NVFP4 (cuBLAS has them from 12.8.4 on)" + NO_BLOCKS


@pytest.mark.parametrize("release, archs, cublas, says", [
    ("12.4", "80 89 90", 120405, "89 90 and later" + NO_BLACKWELL + NO_NATIVE),
    ("12.8", "89 90 100 101 120", 120803, "89 90 100a 120a and later" + NO_NATIVE),
    ("12.8", "89 90 100 101 120", 120804, "89 90 100a 120a and later" + NO_BLOCKS),
    ("12.9", "89 90 100 101 103 120 121", 120901, "89 90 100f 120f and later"),
    ("13.0", "75 89 90 100 103 110 120 121", 130100, "89 90 100f 120f and later"),
])
def test_toolkits(tmp_path, release, archs, cublas, says):
    answers = table(toolkit(tmp_path, release, archs, cublas), "SITE_PACKAGES=/nonexistent", "CUDA_ARCH=all")
    assert answers["CUDA"] == "found: trains on GPUs of compute capability " + says


@pytest.mark.parametrize("cards, says", [
    ("9.0 9.0", "90"),
    ("8.9 12.0", "120f 89"),
    ("10.3", "100f"),
    ("12.1 12.1", "120f"),
    ("10.0 10.3", "100f"),
    ("8.6", "89 90 100f 120f"),
    ("9.0 12.1", "120f 90"),
    ("No_devices_were_found", "89 90 100f 120f"),
    ("N/A", "89 90 100f 120f"),
])
def test_code_is_for_the_cards_that_are_there(tmp_path, monkeypatch, cards, says):
    smi = tmp_path / "smi/nvidia-smi"
    write(smi, f"""#!/bin/sh
test "$*" = '--query-gpu=compute_cap --format=csv,noheader' && printf '%s\\n' {cards}""")
    smi.chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{smi.parent}:{ENVIRONMENT['PATH']}")
    home = toolkit(tmp_path, "13.0", "75 89 90 100 103 110 120 121", 130100)
    for options, archs in [([], says), (["CUDA_ARCH=all"], "89 90 100f 120f"), (["CUDA_ARCH=90a"], "90a")]:
        answers = table(home, "SITE_PACKAGES=/nonexistent", *options)
        assert answers["CUDA"] == f"found: trains on GPUs of compute capability {archs} and later"


def test_a_toolkit_that_is_too_old(tmp_path):
    answers = table(toolkit(tmp_path, "11.8", "80 89 90", 110113, 91900), "SITE_PACKAGES=/nonexistent")
    assert answers["CUDA"].startswith("CUDA 11.8 is older than 12.4: no training on GPUs (install")
    assert answers["cuDNN"] == "not needed without CUDA"


@pytest.mark.parametrize("in_toolkit, in_wheel, says", [
    (90100, None, "older than 9.10.2: attention on GPUs by kernels of ours, slower (install it: .venv/bin/pip install nvidia-cudnn-cu12)"),
    (90100, 90701, "older than 9.10.2"),
    (90100, 91900, "found"),
    (91002, None, "found"),
    (None, None, "not found"),
])
def test_a_cudnn_that_is_too_old_gives_way_to_a_wheel_s(tmp_path, in_toolkit, in_wheel, says):
    if in_wheel:
        write(tmp_path / "site/nvidia" / HEADERS["cuDNN"], f"#define CUDNN_VERSION {in_wheel}")
    answers = table(toolkit(tmp_path / "cuda", "12.4", "89 90", 120405, in_toolkit), f"SITE_PACKAGES={tmp_path}/site")
    assert answers["cuDNN"].startswith(says), answers["cuDNN"]


@pytest.mark.parametrize("target, after", [([], ['echo "$FOUND"']), (["train_gpt_mxfp8"], [])], ids=["alone", "by its name"])
def test_make_builds_the_program(target, after):
    """Alone it says what was found, too. By the program's name it isn't content with a link that is there."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    done = subprocess.run(["make", "-n", "CUDA=0", *target], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    commands = done.stdout.splitlines()
    assert commands[-1 - len(after):] == ["ln -sf build/train_gpt_mxfp8 train_gpt_mxfp8", *after]


@pytest.mark.parametrize("goal, gpu, help, there, quick", [
    ("test", "", "--Ofast-compile <level>", "", True), ("test", "", "", "", False),
    ("test", "/dev/nvidiactl", "--Ofast-compile <level>", "", False), ("programs", "", "--Ofast-compile <level>", "", False),
    ("test", "", "--Ofast-compile <level>", "for use", False), ("test", "", "--Ofast-compile <level>", "quick", True),
])
def test_kernels_are_compiled_quickly_for_tests_without_a_gpu(tmp_path, goal, gpu, help, there, quick):
    """But those that are there for use stay so."""
    if there:
        write(tmp_path / "build/llmc/cuda/quantize.o", "")
        write(tmp_path / "build/kernels", there)
    variables = [toolkit(tmp_path / "cuda", "13.0", "89 90 100 120", 130100, help=help), f"BUILD={tmp_path}/build", f"GPU={gpu}"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    commands = subprocess.run(["make", "-n", goal, *variables], cwd=ROOT, env=environment, capture_output=True, text=True,
                              check=True).stdout.splitlines()
    kernels = [command for command in commands if command.startswith(f"{tmp_path}/cuda/bin/nvcc") and " -c llmc/" in command]
    device = [command for command in commands if command.endswith("llmc/cuda/device.o")]
    assert len(kernels) > 5 and len(device) == 1
    assert all(("--Ofast-compile=max" in command) == quick for command in kernels)
    assert sum("-DQUICK_KERNELS" in command for command in commands) == quick
    assert ("-DQUICK_KERNELS" in device[0]) == quick


def test_make_clean_twice(tmp_path):
    """It takes what was built and leaves data; the second time nothing is there to take."""
    for name in ("Makefile", "dev", "llmc"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("build/mxcast", "build/llmc/numerics/mx.o", "build/test_gpt", "build/libllmc.a", "build/settings", "train_gpt_mxfp8",
                 "build/demo/data/train.bin"):
        write(tmp_path / name, "")
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    for _ in range(2):
        subprocess.run(["make", "clean", "CUDA=0"], cwd=tmp_path, env=environment, capture_output=True, check=True)
        left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
        assert left == (["train.bin"] if (tmp_path / "build").exists() else [])
        shutil.rmtree(tmp_path / "build", ignore_errors=True)


def test_a_build_beside_the_sources_is_refused():
    """Cleaning it would take them."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    for place in (".", ROOT):
        done = subprocess.run(["make", "-n", "clean", f"BUILD={place}"], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and "is where the sources are: choose another directory" in done.stderr and not done.stdout


@pytest.mark.parametrize("goals, waits", [("demo test", True), ("profile compare", True), ("demo", False), ("programs tests", False)])
def test_goals_that_build_all_wait_for_one_another(goals, waits):
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    done = subprocess.run(["make", "-npq", "CUDA=0", *goals.split()], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (".NOTPARALLEL:" in done.stdout) == waits


def test_a_library_that_was_left_out_isn_t_to_be_installed(tmp_path):
    command = ["make", "-s", "found", "CUDA=0"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("CUDA "))
    assert "install" not in line or "no nvcc" in line
