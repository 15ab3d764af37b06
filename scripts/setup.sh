#!/usr/bin/env bash
# Installs what `make demo` and `make test` need and this machine lacks: packages of Debian 12 and 13 and of Ubuntu 22.04 and
# 24.04 (with apt-get, as root or with sudo), and a Python environment in .venv for data preparation, plots and tests; where
# there are a GPU and the CUDA toolkit, cuDNN and NCCL into it too. Does nothing where all of it is there. On other systems it
# says what to install.
# `setup.sh clang`, for `make fuzz` and `make test-tsan`: also clang with its sanitizers, libFuzzer and OpenMP.
# `setup.sh aarch64`, for `make test-aarch64`: also a cross compiler and an emulator.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 2
}

if [ "$(uname -s)" = Darwin ]; then
  fail "macOS isn't supported: the program uses what Linux has; in a container of Docker it runs, as Dockerfile.cpu says"
fi
release=${OS_RELEASE:-/etc/os-release}
system=unknown
if [ -r "$release" ]; then system=$(. "$release" && echo "${ID:-unknown} ${VERSION_ID:-}"); fi

packages=()
need_header() { # header, package
  printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <%s>\n' "$1" |
    "${CC:-cc}" -E -x c - >/dev/null 2>&1 || packages+=("$2")
}
command -v cc >/dev/null || packages+=(gcc libc6-dev)
has_nvcc() {
  [ "${CUDA:-1}" != 0 ] && { command -v nvcc || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; } >/dev/null
}
# nvcc needs a C++ compiler.
if has_nvcc; then command -v g++ >/dev/null || packages+=(g++); fi
need_header oneapi/dnnl/dnnl.h libdnnl-dev
need_header cjson/cJSON.h libcjson-dev
need_header cmocka.h libcmocka-dev
command -v mpicc >/dev/null || packages+=(libopenmpi-dev)
command -v mpirun >/dev/null || packages+=(openmpi-bin)

# Sets `python` to one that can make .venv; numpy needs 3.11.
find_python() {
  for python in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then return; fi
  done
  return 1
}
if ! find_python; then
  case $system in
    "ubuntu 22.04") packages+=(python3.11 python3.11-venv) ;; # beside its python3, which is 3.10
    *) packages+=(python3-venv) ;;
  esac
fi
if [ "${1:-}" = clang ]; then
  printf '#include <omp.h>\nint LLVMFuzzerTestOneInput(void) { return omp_get_max_threads() < 0; }\n' |
    clang -fopenmp -fsanitize=fuzzer,address -x c - -o /dev/null 2>/dev/null || packages+=(clang libclang-rt-dev libomp-dev)
fi
if [ "${1:-}" = aarch64 ]; then
  command -v aarch64-linux-gnu-g++ >/dev/null ||
    packages+=(gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross)
  command -v qemu-aarch64-static >/dev/null || packages+=(qemu-user-static)
fi

# What Fedora calls Debian's packages.
on_fedora() {
  for package in "$@"; do
    case $package in
      libc6-dev) echo glibc-devel ;;
      g++) echo gcc-c++ ;;
      libdnnl-dev) echo onednn-devel ;;
      libcjson-dev) echo cjson-devel ;;
      libcmocka-dev) echo libcmocka-devel ;;
      libopenmpi-dev) echo openmpi-devel ;;
      openmpi-bin) echo openmpi ;;
      python3-venv) echo python3 ;;
      libclang-rt-dev) echo compiler-rt ;;
      libomp-dev) echo libomp-devel ;;
      *) echo "$package" ;;
    esac
  done
}

if [ ${#packages[@]} -gt 0 ]; then
  case $system in
    fedora*)
      names=$(on_fedora "${packages[@]}")
      fail "on Fedora, where this is untried: sudo dnf install ${names//$'\n'/ }; then make again with" \
        "PATH=\$PATH:/usr/lib64/openmpi/bin, where mpicc is"
      ;;
    "debian "* | "ubuntu 22.04" | "ubuntu 24.04") ;;
    *)
      command -v apt-get >/dev/null ||
        fail "this system has no apt-get; install what matches Debian's packages ${packages[*]}, then run make again"
      say "this system ($system) isn't known here; trying the names of Debian's packages"
      ;;
  esac
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
# What is there may be of a Python that an upgrade of the system has taken away.
if ! cmp -s data/requirements.txt "$stamp" || ! .venv/bin/python -c 'import numpy' 2>/dev/null; then
  say "making the Python environment .venv"
  find_python || fail "Python 3.11 or later is needed, with its module venv: install one, and run make again"
  clear=()
  if [ -e .venv ] && ! .venv/bin/python -c '' 2>/dev/null; then clear=(--clear); fi
  "$python" -m venv "${clear[@]}" .venv || fail "$python -m venv .venv failed"
  .venv/bin/pip install --quiet --disable-pip-version-check -r data/requirements.txt ||
    fail "pip couldn't install data/requirements.txt; check the network"
  cp data/requirements.txt "$stamp"
fi

# Where there is a GPU: cuDNN and NCCL, if make found says that they are lacking, or too old.
if has_nvcc && nvidia-smi -L >/dev/null 2>&1; then
  mapfile -t wheels < <(make --no-print-directory found 2>/dev/null | grep -o 'nvidia-[a-z]*-cu[0-9]*')
  if [ ${#wheels[@]} -gt 0 ]; then
    say "installing ${wheels[*]} in .venv, for the GPU"
    .venv/bin/pip install --quiet --disable-pip-version-check "${wheels[@]}" ||
      say "pip couldn't install ${wheels[*]}: make found says what is slower or left out without"
  fi
fi
