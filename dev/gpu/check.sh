#!/usr/bin/env bash
# Everything that only a GPU can show, in one command of under ten minutes: builds for this machine's card, then compares
# every operation and a whole model with the CPU backend, whole models with PyTorch's values, looks for races, trains, resumes,
# and times. Writes report.md, report.json and the logs into a directory (default: dev/gpu/results/DATE-CARD).
#
#     dev/gpu/check.sh [DIRECTORY]
#
# Needs the CUDA toolkit, a C compiler, cmocka, cJSON and python3; oneDNN makes the CPU's side faster. Without cmocka it leaves out
# the tests of operations, without cJSON resuming; README.md beside it says how to bring them where there is no network. LLMC_DIR names a clone of
# llm.c, which is then built in a copy and timed beside this program (with cuDNN where cudnn-frontend lies in the clone or at home).
# BATCH and BATCH_1558M are the sequences of 1024 tokens in a micro-batch. What hasn't begun after LIMIT seconds is left out.
# DEVICE=cpu BATCH=1 goes through the motions without a card, on models of one layer.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
device=${DEVICE:-cuda}
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr ' ' '-')
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
out=${1:-dev/gpu/results/$(date +%Y-%m-%d)-${card:-no-card}}
build=build/gpu-check
nvcc=$(command -v nvcc)
sanitizer=$(PATH=$PATH:${nvcc:+$(dirname "$(readlink -f "$nvcc")"):}${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/cuda/bin && command -v compute-sanitizer)
batch=${BATCH:-32}
limit_seconds=${LIMIT:-590}
mkdir -p "$out" || exit 2
rows=$out/rows.tsv
: >"$rows"

# step NAME SECONDS COMMAND...: runs it, its output in NAME.log, and notes how it ended. A function gets its seconds in $limit.
step() {
  local name=$1 limit=$2 left=$((limit_seconds - SECONDS)) start=${EPOCHREALTIME/./} code tenths
  shift 2
  limit=$((left < limit ? left : limit))
  if [ "$limit" -lt 1 ]; then
    set -- bash -c "echo 'left out: $limit_seconds s were over'; exit 124"
  elif [ "$(type -t "$1")" != function ]; then
    set -- timeout "$limit" "$@"
  fi
  "$@" >"$out/$name.log" 2>&1
  code=$?
  tenths=$(((${EPOCHREALTIME/./} - start) / 100000))
  printf '%s\t%d\t%d.%d\t%s\n' "$name" "$code" $((tenths / 10)) $((tenths % 10)) \
    "$(tail -n 1 "$out/$name.log" | tr '\t|' '  ' | cut -c1-200)" | tee -a "$rows"
  rm -rf "$out"/*/step_*
  return $code
}

# Made here, so that no file need be brought. chain: each token mostly a function of the one before; zipf: as common as words are.
make_tokens() { # path, count, vocabulary, chain|zipf
  python3 - "$@" <<'PYTHON'
import array, random, struct, sys
path, count, vocab, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
random.seed(1)
tokens, last = array.array("H"), 0
for _ in range(count):
    if kind == "zipf":
        last = int(vocab ** random.random()) - 1
    else:
        last = (last * 77 + 13) % vocab if random.random() < 0.8 else random.randrange(vocab)
    tokens.append(last)
with open(path, "wb") as f:
    f.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253) + tokens.tobytes())
PYTHON
}

train() { # recipe, name, options...
  local recipe=$1 name=$2
  shift 2
  timeout "$limit" "$build/train_gpt_mxfp8" --device "$device" --recipe "$recipe" --out-dir "$out/$name" "$@"
}
small=(--train-data "$build/train.bin" --vocab-size 256 --layers 4 --heads 4 --channels 256 --max-seq-len 128 --batch-size 8
  --learning-rate 1e-3 --warmup-steps 20)
tiny=("$build/train_gpt_mxfp8" --device "$device" --train-data "$build/train.bin" --vocab-size 256 --layers 1 --heads 2 --channels 96
  --max-seq-len 33 --batch-size 2)
large=(--train-data "$build/large.bin" --vocab-size 50257 --max-steps 1000)
model_124M=(--model gpt2-124M --batch-size "$batch")
model_1558M=(--model gpt2-1558M --batch-size "${BATCH_1558M:-16}")
part_1558M=("${model_1558M[@]}" --layers 6)
bench_options=()
if [ "$device" = cpu ]; then
  model_124M=(--model gpt2-124M --layers 1 --batch-size "$batch" --seq-len 128)
  model_1558M=(--model gpt2-1558M --layers 1 --batch-size 1 --seq-len 64)
  part_1558M=("${model_1558M[@]}")
  bench_options=(--quick)
fi

last_losses() { grep -hs '"event":"train"' "$1/log.jsonl" | sed 's/.*"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/' | tail -n "$2"; }
same_losses() {
  last_losses "$1" "$3" | grep -q . || { echo "$1 has no losses"; return 1; }
  diff <(last_losses "$1" "$3") <(last_losses "$2" "$3") && echo "the last $3 losses are the same to the bit"
}
resume_run() {
  train mxfp8 resumed "${small[@]}" --max-steps 20 --checkpoint-every 10 &&
    train mxfp8 resumed --resume --max-steps 40 && same_losses "$out/resumed" "$out/straight" 15
}

# NCCL takes two ranks on one card where each says it is on a machine of its own.
two_ranks() {
  local rank pids=() ended='' one two
  for rank in 0 1; do
    NCCL_HOSTID=check$rank CUDA_VISIBLE_DEVICES=0 RANK=$rank LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29517 \
      timeout "$limit" "$build/train_gpt_mxfp8" --device "$device" --recipe mxfp8 --out-dir "$out/two-ranks" "${small[@]}" \
      --total-batch-size 2048 --max-steps 20 --comm-timeout 60 &
    pids+=($!)
  done
  for rank in 0 1; do
    wait "${pids[$rank]}"
    ended+=" $?"
  done
  one=$(last_losses "$out/one-rank" 20) two=$(last_losses "$out/two-ranks" 20)
  if [ -z "$two" ] || [ "$(wc -l <<<"$one")" -ne "$(wc -l <<<"$two")" ]; then
    echo "nothing to compare: 2 ranks logged $(grep -c . <<<"$two") steps and ended with$ended, 1 rank logged $(grep -c . <<<"$one")"
    return 1
  fi
  paste <(echo "$one") <(echo "$two") |
    awk '{ d = $2 - $4; worst = d > worst ? d : -d > worst ? -d : worst } END { print "losses of 1 and 2 ranks: " worst " apart at most, over " NR " steps" }'
  [ "$ended" = " 0 0" ]
}

# As train, until the log has so many steps: a checkpoint of the largest model would be 19 GB.
steps_in() { grep -c '"event":"train"' "$1/log.jsonl" 2>/dev/null; }
speed() { # count, recipe, name, options...
  local count=$1 recipe=$2 name=$3 steps=0 pid end=$((SECONDS + limit))
  shift 3
  "$build/train_gpt_mxfp8" --device "$device" --recipe "$recipe" --out-dir "$out/$name" "${large[@]}" "$@" &
  pid=$!
  while kill -0 $pid 2>/dev/null; do
    steps=$(steps_in "$out/$name")
    if [ "${steps:-0}" -ge "$count" ] || [ "$SECONDS" -ge "$end" ]; then kill -9 $pid; fi
    sleep 0.2
  done
  wait $pid 2>/dev/null
  steps=$(steps_in "$out/$name")
  echo "${steps:-0} steps in the log"
  [ "${steps:-0}" -ge "$count" ]
}

# Our own kernels alone: libraries' take minutes and aren't ours to mend.
libraries='regex=.*(cudnn|cublas|cutlass|nvjet|gemm|splitK).*'
sanitize() { # tool, program, options...
  if [ -z "$sanitizer" ]; then
    echo "left out: no compute-sanitizer in PATH, beside nvcc or in /usr/local/cuda/bin"
    return 1
  fi
  timeout -k 5 "$limit" "$sanitizer" --tool "$1" --error-exitcode 1 --kernel-name-exclude "$libraries" "${@:2}"
}

# Without a card it skips what needs one, and passes.
gemm_test() { timeout "$limit" "$build/gpu_test_cuda_gemm" && ! grep -q skipped: "$out/test_cuda_gemm.log"; }

build_llmc() {
  local cudnn=
  rm -rf "$build/llm.c"
  cp -r "$LLMC_DIR" "$build/llm.c" || return 1
  if [ -d "$LLMC_DIR/cudnn-frontend" ] || [ -d "$HOME/cudnn-frontend" ]; then cudnn=1; fi
  make -C "$build/llm.c" train_gpt2cu NO_MULTI_GPU=1 NO_USE_MPI=1 ${cudnn:+USE_CUDNN=1} \
    ${capability:+GPU_COMPUTE_CAPABILITY="$capability"} >"$out/llmc-build.log" 2>&1
  echo "exit $?, ${cudnn:+with}${cudnn:-without} cuDNN" >>"$out/llmc-build.log"
}
# Random weights, its recomputation of GELU off; it evaluates and samples at the last step, after those that are counted.
run_llmc() {
  wait "$llmc_pid"
  tail -n 3 "$out/llmc-build.log"
  timeout "$limit" "$build/llm.c/train_gpt2cu" -e d12 -i "$build/large.bin" -j "$build/large.bin" -b "$batch" -t 1024 -x 20 -r 0 \
    -v 1000 -m 1 -s 1000 -g 1 -h 0 -n 0
}

# Blackwell's own instructions are in code for its families alone.
arch=$capability
if [ "${capability:-0}" -ge 100 ]; then arch=${capability}a; fi
build() { timeout "$limit" make -j"$(nproc)" BUILD="$build" ${arch:+CUDA_ARCH="$arch"} "$@"; }

if step build 300 build programs "$build/bench_ops"; then
  if [ -n "${LLMC_DIR:-}" ]; then
    build_llmc &
    llmc_pid=$!
  fi
  make_tokens "$build/train.bin" 2000000 256 chain
  make_tokens "$build/large.bin" 2000000 50257 zipf
  step device-info 60 "$build/train_gpt_mxfp8" --device-info
  if step build-tests 300 build gpu-tests; then
    for name in quantize ops attention gpt; do
      step "test_cuda_$name" 120 "$build/gpu_test_cuda_$name"
    done
    step test_cuda_gemm 120 gemm_test
    step test_gpt 60 env TEST_BACKEND=cuda "$build/test_gpt"
  fi
  step straight 60 train mxfp8 straight "${small[@]}" --max-steps 40 --checkpoint-every 40
  step again 60 train mxfp8 again "${small[@]}" --max-steps 40 --checkpoint-every 40
  step run-to-run 10 same_losses "$out/straight" "$out/again" 40
  step resume 60 resume_run
  step one-rank 60 train mxfp8 one-rank "${small[@]}" --total-batch-size 2048 --max-steps 20
  step two-ranks 120 two_ranks
  step memcheck 60 sanitize memcheck "${tiny[@]}" --max-steps 2 --out-dir "$out/memcheck"
  step racecheck 60 sanitize racecheck "${tiny[@]}" --max-steps 1 --out-dir "$out/racecheck"
  if [ -n "${LLMC_DIR:-}" ]; then step llmc 180 run_llmc; fi
  # By --mx-gemm auto a card without native MXFP8 emulates anyway.
  recipes=(bf16 mxfp8)
  if grep -q 'MXFP8  *native' "$out/device-info.log"; then recipes+=(mxfp8-emulated); fi
  for model in 124M 1558M; do
    declare -n options=model_$model
    for recipe in "${recipes[@]}"; do
      emulated=()
      if [ "$recipe" = mxfp8-emulated ]; then emulated=(--mx-gemm emulated); fi
      step "speed-$model-$recipe" 60 speed 12 "${recipe%-emulated}" "speed-$model-$recipe" "${options[@]}" "${emulated[@]}"
    done
  done
  step bench 150 "$build/bench_ops" --device "$device" --batch-size "$batch" --json "$out/bench.jsonl" "${bench_options[@]}"
  for recipe in bf16 mxfp8; do
    step "profile-124M-$recipe" 60 train "$recipe" "profile-124M-$recipe" "${large[@]}" "${model_124M[@]}" --max-steps 6 --profile
    step "profile-1558M-$recipe" 60 train "$recipe" "profile-1558M-$recipe" "${large[@]}" "${part_1558M[@]}" --max-steps 6 --profile
  done
  for recipe in bf16 mxfp8 mxfp8-ocp; do
    step "curve-$recipe" 60 train "$recipe" "curve-$recipe" "${small[@]}" --max-steps 300
  done
  for name in ops attention; do
    step "racecheck-$name" 60 sanitize racecheck "$build/gpu_test_cuda_$name"
  done
fi

python3 dev/gpu/report.py "$out" "$(git rev-parse --short HEAD 2>/dev/null)" "${card:-none}" "$batch"
rm "$rows"
echo "report: $out/report.md"
! grep -q '| exit ' "$out/report.md"
