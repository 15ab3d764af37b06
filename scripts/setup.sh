#!/usr/bin/env bash
# Installs what `make demo` and `make test` need and this machine lacks: Debian packages (with apt-get, as root or with sudo)
# and a Python environment in .venv for data preparation, plots and tests. Does nothing where all of it is there.
# `setup.sh clang`, for `make fuzz` and `make test-tsan`: also clang with its sanitizers, libFuzzer and OpenMP.
# `setup.sh aarch64`, for `make test-aarch64`: also a cross compiler and an emulator.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 2
}

packages=()
need_header() { # header, package
  printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <%s>\n' "$1" |
    "${CC:-cc}" -E -x c - >/dev/null 2>&1 || packages+=("$2")
}
command -v cc >/dev/null || packages+=(gcc libc6-dev)
# nvcc needs a C++ compiler.
if [ "${CUDA:-1}" != 0 ] && { command -v nvcc || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; } >/dev/null; then
  command -v g++ >/dev/null || packages+=(g++)
fi
need_header oneapi/dnnl/dnnl.h libdnnl-dev
need_header cjson/cJSON.h libcjson-dev
need_header cmocka.h libcmocka-dev
command -v mpicc >/dev/null || packages+=(libopenmpi-dev)
command -v mpirun >/dev/null || packages+=(openmpi-bin)
python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
if [ "${1:-}" = clang ]; then
  printf '#include <omp.h>\nint LLVMFuzzerTestOneInput(void) { return omp_get_max_threads() < 0; }\n' |
    clang -fopenmp -fsanitize=fuzzer,address -x c - -o /dev/null 2>/dev/null || packages+=(clang libclang-rt-dev libomp-dev)
fi
if [ "${1:-}" = aarch64 ]; then
  command -v aarch64-linux-gnu-gcc >/dev/null || packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
  command -v qemu-aarch64-static >/dev/null || packages+=(qemu-user-static)
fi

if [ ${#packages[@]} -gt 0 ]; then
  command -v apt-get >/dev/null ||
    fail "this system has no apt-get; install what matches Debian's packages ${packages[*]}, then run make again"
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "run as root: apt-get install ${packages[*]}; then run make again"
    as_root=(sudo)
  fi
  say "installing ${packages[*]}"
  "${as_root[@]}" apt-get update -qq || fail "apt-get update failed; check the network and /etc/apt/sources.list"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
    fail "apt-get couldn't install ${packages[*]}"
fi

stamp=.venv/installed
if ! cmp -s data/requirements.txt "$stamp"; then
  say "making the Python environment .venv"
  python3 -m venv .venv || fail "python3 -m venv .venv failed"
  .venv/bin/pip install --quiet --disable-pip-version-check -r data/requirements.txt ||
    fail "pip couldn't install data/requirements.txt; check the network"
  cp data/requirements.txt "$stamp"
fi
