#!/usr/bin/env bash
# Cross-compiles for AArch64, without oneDNN and cJSON, and runs the tests of the numerics under qemu: some minutes.
# `make test-aarch64` calls it with the directory to build in.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath -m "${1:-build/aarch64}")
tests=(test_mx test_quantize test_ops)

fail() {
  printf 'test_aarch64: %s\n' "$*" >&2
  exit 2
}

scripts/setup.sh aarch64

# cmocka for arm64 comes from Debian, unpacked here: nothing foreign is installed, and apt's own lists stay as they are.
cmocka=$build/cmocka
if [ ! -e "$cmocka/usr/lib/aarch64-linux-gnu/libcmocka.so" ]; then
  apt=$build/apt
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/packages"
  options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=
    -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache")
  apt-get "${options[@]}" update || fail "apt-get update for arm64 failed; check the network and /etc/apt"
  (cd "$apt/packages" && apt-get "${options[@]}" download libcmocka-dev:arm64 libcmocka0:arm64) ||
    fail "apt-get couldn't download libcmocka-dev and libcmocka0 for arm64"
  for package in "$apt/packages"/*.deb; do
    dpkg -x "$package" "$cmocka"
  done
  rm -r "$apt"
fi
library=$cmocka/usr/lib/aarch64-linux-gnu

# A make that doesn't know that this one runs shares no jobs with it.
flags=$(sed -E 's/ -j[0-9]*//; s/ --jobserver-[a-z]+=[^ ]+//' <<<"${MAKEFLAGS-}")
MAKEFLAGS=$flags make -j"$(nproc)" --no-print-directory BUILD="$build" CC=aarch64-linux-gnu-gcc ARCH=generic ONEDNN=0 CJSON=0 MPI=0 CUDA=0 LDFLAGS="-L$library" \
  "${tests[@]/#/$build/}"

mkdir -p "$build/test-logs"
passed=0 failed=0
for name in "${tests[@]}"; do
  log=$build/test-logs/$name.log
  code=0
  CMOCKA_MESSAGE_OUTPUT=TAP OMP_WAIT_POLICY=passive qemu-aarch64-static -L /usr/aarch64-linux-gnu \
    -E "LD_LIBRARY_PATH=$library" "$build/$name" >"$log" 2>&1 || code=$?
  good=$(grep -c '^ok ' "$log" || true)
  bad=$(grep -c '^not ok ' "$log" || true)
  if [ "$code" -ne 0 ] && [ "$bad" -eq 0 ]; then bad=1; fi # it crashed, or never began
  printf '%-24s %4d passed, %d failed\n' "$name" "$good" "$bad"
  if [ "$bad" -ne 0 ]; then tail -n 40 "$log"; fi
  passed=$((passed + good)) failed=$((failed + bad))
done
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
