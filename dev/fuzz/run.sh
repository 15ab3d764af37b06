#!/usr/bin/env bash
# Runs each fuzz target for some seconds and stops at the first that fails, with a sentence that says where the input is.
# usage: run.sh BUILD_DIR SECONDS [TARGET...]     TARGET: only these, such as tokens or npy
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
seconds=$2
shift 2

# Files of the targets, in memory where there is such a file system.
TMPDIR=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)/fuzz.XXXXXX")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
# One input at a time: threads would only make it slower.
export OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1

run_target() { # name
  local found="$build/corpus/$1" log="$build/fuzz_$1.log" dictionary=() code=0
  mkdir -p "$found"
  if [ -f "$here/$1.dict" ]; then dictionary=("-dict=$here/$1.dict"); fi
  # No file here is larger than 4 kB: what takes 5 s, or 64 MB in one allocation, was made to.
  "$build/fuzz_$1" "${dictionary[@]}" -max_total_time="$seconds" -max_len=4096 -timeout=5 -malloc_limit_mb=64 \
    -rss_limit_mb=1024 -detect_leaks=1 -print_final_stats=1 -artifact_prefix="$build/$1-" \
    "$found" "$here/corpus/$1" </dev/null >"$log" 2>&1 || code=$?
  if [ $code -ne 0 ]; then
    tail -n 60 "$log" >&2
    local input
    input=$(sed -n 's/^.*Test unit written to //p' "$log" | tail -n 1)
    printf 'fuzz: %s failed on the input %s; to see it again: %s %s\n' "$1" "${input:-(none written: see $log)}" \
      "$build/fuzz_$1" "$input" >&2
    exit 1
  fi
  printf '%-14s %10s inputs in %s s, %s reached points in the code, no failure\n' "$1" \
    "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" "$seconds" \
    "$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)"
}

if [ $# -eq 0 ]; then
  for source in "$here"/fuzz_*.c; do
    name=$(basename "$source" .c)
    set -- "$@" "${name#fuzz_}"
  done
fi
for target in "$@"; do run_target "$target"; done
