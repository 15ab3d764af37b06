#!/usr/bin/env bash
# Builds with CUDA toolkits that aren't installed, old and new, without a GPU: the program, its tools and what check.sh runs.
# Says for each what `make` leaves out, and fails where something doesn't compile.
#
#     dev/gpu/toolkits.sh [VERSION...]        # of those below; all of them without any
#
# A toolkit is unpacked into build/toolkits from NVIDIA's wheels on PyPI (1 to 2 GB are downloaded for each, the headers kept).
# Wheels of CUDA 12 have ptxas but no nvcc. That of 12.4 comes from Debian (trixie, non-free). For the others this machine's
# own nvcc compiles to PTX with the old headers, and the old ptxas assembles that under the version of PTX that it knows.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD/build/toolkits
download=$root/download

# version, its PTX (-: its own nvcc), and wheels with the versions that an image with it has.
toolkits='
12.4 -   nvcc-cu12==12.4.131 runtime-cu12==12.4.127 cccl-cu12==12.4.127.post1 cublas-cu12==12.4.5.8 cudnn-cu12==9.1.0.70 nccl-cu12==2.20.5
12.6 8.5 nvcc-cu12==12.6.85 runtime-cu12==12.6.77 cccl-cu12==12.6.77 cublas-cu12==12.6.4.1 cudnn-cu12==9.5.1.17 nccl-cu12==2.23.4
12.8 8.7 nvcc-cu12==12.8.93 runtime-cu12==12.8.90 cccl-cu12==12.8.90 cublas-cu12==12.8.4.1 cudnn-cu12==9.7.1.26 nccl-cu12==2.25.1
12.9 8.8 nvcc-cu12==12.9.86 runtime-cu12==12.9.79 cccl-cu12==12.9.27 cublas-cu12==12.9.1.4 cudnn-cu12==9.10.2.21 nccl-cu12==2.27.3
13.5 -   nvcc==13.5.37 nvvm==13.5.37 crt==13.5.37 runtime==13.5.37 cccl==13.3.5.0.6 cublas==13.10.0.20 cudnn-cu13==9.28.1.4 nccl-cu13==2.32.3
'

fail() {
  printf 'toolkits: %s\n' "$*" >&2
  exit 2
}

# Unpacks a wheel into $toolkit, but for shared libraries.
unpack_wheel() { # requirement, its folders that are taken
  local name=nvidia-$1
  case $1 in nvcc* | runtime* | cccl* | crt*) name=nvidia-cuda-$1 ;; esac
  rm -rf "$download"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --dest "$download" "$name" ||
    fail "pip can't download $name; check the network"
  python3 - "$download" "$toolkit" "$2" <<'PYTHON'
import pathlib, sys, zipfile
download, toolkit, folders = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3].split()
for wheel in download.glob("*.whl"):
    archive = zipfile.ZipFile(wheel)
    for entry in archive.infolist():
        path = pathlib.PurePath(entry.filename).parts[2:]  # nvidia/PART/include/...
        if entry.is_dir() or not path or path[0] not in folders or ".so" in path[-1]:
            continue
        to = toolkit.joinpath("lib64" if path[0] == "lib" else path[0], *path[1:])
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(archive.read(entry))
        if path[0] == "bin" or path[:2] == ("nvvm", "bin"):
            to.chmod(0o755)
PYTHON
  rm -rf "$download"
}

# Where nvcc finds what it calls, and headers.
write_profile() { # directory of nvcc, directory of nvvm
  cat >"$1/nvcc.profile" <<PROFILE
TOP = $toolkit
CICC_PATH = $2/bin
NVVMIR_LIBRARY_DIR = $2/libdevice
PATH += \$(CICC_PATH):\$(_HERE_):
INCLUDES += "-I$toolkit/include" "-I$toolkit/include/cccl" \$(_SPACE_)
LIBRARIES =+ \$(_SPACE_) "-L$toolkit/lib64"
PROFILE
}

# nvcc 12.4 is Debian's, which apt-get downloads with lists of its own: this system's stay as they are.
add_debians_nvcc() {
  local apt=$root/apt unpacked
  unpacked=$apt/unpacked/usr
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$toolkit/nvvm/bin"
  echo 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie non-free' >"$apt/sources.list"
  options=(-qq -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o APT::Sandbox::User=
    -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache")
  apt-get "${options[@]}" update && (cd "$apt" && apt-get "${options[@]}" download nvidia-cuda-toolkit) ||
    fail "apt-get can't download nvidia-cuda-toolkit of Debian's trixie"
  dpkg -x "$apt"/nvidia-cuda-toolkit_*.deb "$apt/unpacked"
  cp "$unpacked/lib/nvidia-cuda-toolkit/bin/nvcc" "$unpacked/bin"/{cudafe++,fatbinary,ptxas,nvlink,bin2c} "$toolkit/bin"
  cp "$unpacked/lib/nvidia-cuda-toolkit/bin/cicc" "$toolkit/nvvm/bin"
  cp -r "$unpacked/lib/nvidia-cuda-toolkit/bin/crt" "$toolkit/bin"
  write_profile "$toolkit/bin" "$toolkit/nvvm"
  rm -r "$apt"
}

# This machine's nvcc, for which ptxas and what it knows are the old ones.
add_own_nvcc() { # version of PTX
  local own=$toolkit/own nvcc
  nvcc=$(realpath "$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v nvcc)") || fail "no nvcc on this machine"
  mkdir -p "$own/bin" "$toolkit/old"
  cp -r "$(dirname "$nvcc")"/{nvcc,cudafe++,fatbinary,nvlink,bin2c,crt} "$own/bin"
  cp -r "$(dirname "$nvcc")/../nvvm" "$own"
  write_profile "$own/bin" "$own/nvvm"
  mv "$toolkit/bin/ptxas" "$toolkit/old"
  cp "$(dirname "$nvcc")/../include/crt/host_runtime.h" "$toolkit/include/crt" # what nvcc's host code calls: its own version's
  cat >"$own/bin/ptxas" <<WRAPPER
#!/usr/bin/env bash
for argument in "\$@"; do
  case \$argument in *.ptx) sed -i 's/^\.version .*/.version $1/' "\$argument" ;; esac
done
exec '$toolkit/old/ptxas' "\$@"
WRAPPER
  cat >"$toolkit/bin/nvcc" <<WRAPPER
#!/usr/bin/env bash
case \$1 in
--version) exec '$toolkit/old/ptxas' --version ;;
--list-gpu-arch) '$toolkit/old/ptxas' --help | grep -o 'sm_[0-9]*' | sort -u | sed s/sm_/compute_/ ;;
*) exec '$own/bin/nvcc' "\$@" ;;
esac
WRAPPER
  chmod +x "$own/bin/ptxas" "$toolkit/bin/nvcc"
}

assemble() { # version, PTX, requirements
  local version=$1 ptx=$2 requirement
  shift 2
  for requirement in "$@"; do
    unpack_wheel "$requirement" "bin include lib nvvm"
  done
  case $version:$ptx in
  12.4:*) add_debians_nvcc ;;
  *:-) write_profile "$toolkit/bin" "$toolkit/nvvm" ;;
  *) add_own_nvcc "$ptx" ;;
  esac
  # Older wheels have the runtime only as a shared library; within a major version any static one does.
  if [ ! -e "$toolkit/lib64/libcudart_static.a" ]; then unpack_wheel runtime-cu12==12.9.79 lib; fi
  touch "$toolkit/complete"
}

failed=0
for version in "${@:-12.4 12.6 12.8 12.9 13.5}"; do
  for one in $version; do
    row=$(grep "^$one " <<<"$toolkits") || fail "no toolkit $one: $(cut -d' ' -f1 <<<"$toolkits" | tr '\n' ' ')"
    toolkit=$root/$one
    # shellcheck disable=SC2086
    if [ ! -e "$toolkit/complete" ]; then rm -rf "$toolkit" && assemble $row; fi
    printf '\n%s\n' "CUDA $one"
    options=(--no-print-directory CUDA_HOME="$toolkit" BUILD="$root/build-$one" SITE_PACKAGES=/nonexistent CUDA_ARCH=all)
    make "${options[@]}" found | grep '^CUDA\|^cuDNN\|^NCCL'
    if make "${options[@]}" programs gpu-tests >"$root/build-$one.log" 2>&1; then
      "$root/build-$one/train_gpt_mxfp8" --version && echo builds
    else
      grep -m 8 -i 'error\|warning' "$root/build-$one.log" || tail "$root/build-$one.log"
      failed=1
    fi
  done
done
exit $failed
