#!/usr/bin/env bash
# Everything that only a GPU can show, in one command: builds for this machine's card, compares
# every operation and a whole model with the CPU backend and with PyTorch's values, looks for races,
# trains, resumes, and times. Its last line is the verdict.
#
#     dev/gpu/check.sh [10|30|60] [DIRECTORY]
#
# The first number is the minutes that it may take (10): what is right and a first figure in 10; the
# larger model, real shapes and profiles in 30; on Blackwell a 7B's shapes, several GPUs,
# compute-sanitizer on the operations' tests and narrow intervals in 60. Writes report.md, report.json, cards.h for the
# planner, and the logs into DIRECTORY (default: dev/gpu/results/DATE-TIME-CARD), which no other check
# may have written. Ends with 0 if the verdict is PASS.
#
# Needs the CUDA toolkit, a C compiler, cmocka, cJSON and python3; oneDNN makes the CPU's side
# faster. Without cmocka it leaves out the tests of operations, without cJSON resuming; README.md
# beside it says how to bring them where there is no network. LLMC_DIR names a clone of llm.c, which
# is then built in a copy and timed in turn with this program (with cuDNN where cudnn-frontend lies
# in the clone or at home); its train_gpt2cu is taken as it is where it has been built. BUILT names
# a directory of programs that were built elsewhere (make gpu-tests BUILD=DIR), for minutes that are
# too short to build in. BATCH, BATCH_1558M and BATCH_7B are the sequences in a micro-batch. LIMIT is
# the seconds it may take, where something else ends it before the minutes are over. What hasn't
# begun then is left out. So it is after Ctrl-C or SIGTERM: once the step that runs has ended, the
# report is made of what there is. It keeps to the GPUs of CUDA_VISIBLE_DEVICES, which CUDA numbers
# as nvidia-smi does here; what takes one takes the first. DEVICE=cpu BATCH=1 TURN=1 goes through
# the motions without a card, on models of one layer.
set -uo pipefail
export LC_ALL=C # in other languages EPOCHREALTIME has a comma
caller=$PWD
cd "$(dirname "$0")/../.." || exit 2
minutes=10
case ${1:-} in
10 | 30 | 60) minutes=$1 && shift ;;
-h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' dev/gpu/check.sh && exit ;;
esac
if [[ ${1-} =~ ^(-.*|[0-9]+)$ ]] || [ $# -gt 1 ]; then
  echo "check.sh: it takes 10, 30 or 60 minutes and then a directory, not '$*': --help says more" >&2
  exit 2
fi
if ! [[ ${LIMIT:-600} =~ ^[1-9][0-9]{1,4}$ ]]; then
  echo "check.sh: LIMIT is seconds from 10 on, not '$LIMIT'" >&2
  exit 2
fi
device=${DEVICE:-cuda}
trap '' PIPE # a reader that goes takes nothing of the report
# nvidia-smi, which a driver in trouble can keep.
smi() {
  timeout -k 5 10 nvidia-smi "$@" 2>/dev/null
}
# Finds the GPUs that it may use, all or those of CUDA_VISIBLE_DEVICES: how many in $gpus, the first
# in $gpu, which CUDA and nvidia-smi then count alike.
find_gpus() {
  export CUDA_DEVICE_ORDER=PCI_BUS_ID
  gpus=$(smi --list-gpus | grep -c '^GPU ') # without a driver it prints a sentence
  gpu=${CUDA_VISIBLE_DEVICES-0}
  gpu=${gpu%%,*}
  if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^-1$/,$d' | grep -c .) # CUDA stops at -1
  fi
}
# Prints what nvidia-smi says of the first GPU; of any, where it doesn't know the first by that name,
# as where a part of a card is named.
ask_gpu() {
  smi --query-gpu="$1" --format=csv,noheader --id="$gpu" || smi --query-gpu="$1" --format=csv,noheader | head -n 1
}
find_gpus
card='' capability=''
if [ "$gpus" -gt 0 ]; then
  card=$(ask_gpu name | tr ' ' '-') || card=''
  capability=$(ask_gpu compute_cap | tr -d .) || capability=''
fi
case ${1-} in '' | /*) ;; *) set -- "$caller/$1" ;; esac
out=${1:-dev/gpu/results/$(date +%Y-%m-%d-%H%M%S)-${card:-no-card}}
if [ -e "$out/rows.tsv" ]; then
  echo "check.sh: $out holds a check already: name another directory, or remove that one" >&2
  exit 2
fi
case ${BUILT-} in '' | /*) ;; *) BUILT=$caller/$BUILT ;; esac
build=${BUILT:-build/gpu-check}
if [ -n "${BUILT:-}" ] && ! [ -x "$BUILT/train_gpt_mxfp8" ]; then
  echo "check.sh: BUILT=$BUILT has no train_gpt_mxfp8: name the directory that make gpu-tests BUILD=DIR made" >&2
  exit 2
fi
mkdir -p "$build" || exit 2
nvcc=$(command -v nvcc)
sanitizer=$(PATH=$PATH:${nvcc:+$(dirname "$(readlink -f "$nvcc")"):}${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/cuda/bin && command -v compute-sanitizer)
batch=${BATCH:-32}
turn_seconds=${TURN:-32} # of a contender in each round, after its first steps
case $minutes in 10) rounds=2 ;; 30) rounds=3 ;; *) rounds=5 ;; esac
fp8_rounds=$((rounds < 5 ? 2 : rounds)) # a Hopper's FP8 is far from its goals (README.md beside this)
limit_seconds=$((${LIMIT:-60 * minutes} - 10)) # what is left is for the report
over="$limit_seconds s were over"
trap 'limit_seconds=0 over="the check was ended"' INT TERM
mkdir -p "$out" || exit 2
rows=$out/rows.tsv
: >"$rows"

# step NAME SECONDS COMMAND...: runs it, its output in NAME.log, and notes how it ended. A function
# gets its seconds in $limit.
step() {
  local name=$1 wanted=$2 limit left=$((limit_seconds - SECONDS)) start=${EPOCHREALTIME/./} code tenths
  shift 2
  limit=$((left < wanted ? left : wanted))
  if [ "$limit" -lt 1 ]; then
    set -- bash -c "echo 'left out: $over'; exit 124"
  elif [ "$(type -t "$1")" != function ]; then
    set -- timeout -k 5 "$limit" "$@"
  fi
  "$@" >"$out/$name.log" 2>&1
  code=$?
  tenths=$(((${EPOCHREALTIME/./} - start) / 100000))
  if [ "$code" -ge 128 ] && [ "$limit_seconds" -eq 0 ]; then # the signal ended it too
    code=124
    echo "left out: $over while it ran" >>"$out/$name.log"
  fi
  if [ "$code" -eq 137 ] && [ "$tenths" -ge $((10 * limit)) ]; then code=124; fi # its time was over, and it had to be killed
  if [ "$code" -eq 124 ] && [ "$limit" -ge 1 ] && [ "$limit" -lt "$wanted" ] && [ "$tenths" -ge $((10 * limit - 10)) ]; then
    echo "left out: $over while it ran" >>"$out/$name.log"
  fi
  printf '%s\t%d\t%d.%d\t%s\n' "$name" "$code" $((tenths / 10)) $((tenths % 10)) \
    "$(tail -n 1 "$out/$name.log" | tr '\t|\r\f\v' '     ' | cut -c1-200)" >>"$rows"
  tail -n 1 "$rows"
  rm -rf "$out"/*/step_*
  return $code
}

# from MINUTES NAME...: the step, in a check of so many minutes or more.
from() {
  if [ "$minutes" -ge "$1" ]; then step "${@:2}"; fi
}

# Returns 77 where a step has no sense here, 124 where it lacks something that it should have.
left_out() { # status, reason
  echo "left out: ${*:2}"
  return "$1"
}

# Made here, so that no file need be brought. chain: each token mostly a function of the one before;
# zipf: as common as words are.
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

make_data() { make_tokens "$out/train.bin" 2000000 256 chain && make_tokens "$out/large.bin" 2000000 50257 zipf; }

program=$build/train_gpt_mxfp8
train() { # recipe, name, options...
  timeout -k 5 "$limit" "$program" --device "$device" --recipe "$1" --out-dir "$out/$2" "${@:3}"
}
small=(--train-data "$out/train.bin" --vocab-size 256 --layers 4 --heads 4 --channels 256 --max-seq-len 128 --batch-size 8
  --learning-rate 1e-3 --warmup-steps 20)
tiny=("$program" --device "$device" --train-data "$out/train.bin" --vocab-size 256 --layers 1 --heads 2 --channels 96
  --max-seq-len 33 --batch-size 2)
large=(--train-data "$out/large.bin" --vocab-size 50257)
# shellcheck disable=SC2034 # turn_ours takes these by their names
model_124M=(--model gpt2-124M --batch-size "$batch")
part_124M=("${model_124M[@]}" --layers 2)
model_1558M=(--model gpt2-1558M --batch-size "${BATCH_1558M:-16}")
part_1558M=("${model_1558M[@]}" --layers 6)
# shellcheck disable=SC2034
model_7B=(--layers 4 --heads 32 --channels 4096 --max-seq-len 2048 --batch-size "${BATCH_7B:-4}")
bench_options=()
if [ "$minutes" -lt 60 ]; then bench_options=(--quick); fi
if [ "$device" = cpu ]; then
  model_124M=(--model gpt2-124M --layers 1 --batch-size "$batch" --seq-len 128)
  part_124M=("${model_124M[@]}")
  model_1558M=(--model gpt2-1558M --layers 1 --batch-size 1 --seq-len 64)
  # shellcheck disable=SC2034
  model_7B=(--layers 1 --heads 2 --channels 128 --max-seq-len 64 --batch-size 1)
  part_1558M=("${model_1558M[@]}")
  bench_options=(--quick)
fi

last_losses() { grep -hs '"event":"train"' "$1/log.jsonl" | sed 's/.*"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/' | tail -n "$2"; }
same_losses() {
  [ "$(last_losses "$1" "$3" | grep -c ' [0-9]')" -eq "$3" ] || { echo "$1 hasn't $3 losses that are numbers"; return 1; }
  diff <(last_losses "$1" "$3") <(last_losses "$2" "$3") && echo "the last $3 losses are the same to the bit"
}
# As train, in what is left of a step's seconds until $end.
train_until() {
  limit=$((end - SECONDS))
  if [ "$limit" -lt 1 ]; then echo "no time was left for it"; return 124; fi
  train "$@"
}
# A run, the same again, and the same in two halves, whose losses must have the same bits. Another
# schedule than a constant one would be shorter in the first half.
reproduce() { # name, recipe, steps, options...
  local name=$1 recipe=$2 steps=$3 end=$((SECONDS + limit))
  shift 3
  set -- "$@" --schedule constant
  train_until "$recipe" "$name-straight" "$@" --max-steps "$steps" &&
    train_until "$recipe" "$name-again" "$@" --max-steps "$steps" &&
    train_until "$recipe" "$name-resumed" "$@" --max-steps $((steps / 2)) &&
    train_until "$recipe" "$name-resumed" --resume --max-steps "$steps" &&
    same_losses "$out/$name-straight" "$out/$name-again" "$steps" &&
    same_losses "$out/$name-straight" "$out/$name-resumed" $((steps / 2))
}

# Ranks -----------------------------------------------------------------------------------------------------------------------

# Starts ranks, on a card each or, with NCCL taking each for a machine of its own, all on the first:
# their process ids in $pids.
start_ranks() { # count, shared|own, name, options...
  local rank
  pids=()
  for ((rank = 0; rank < $1; rank++)); do
    (
      export RANK=$rank WORLD_SIZE=$1 MASTER_ADDR=localhost MASTER_PORT=29517
      if [ "$2" = shared ]; then export LOCAL_RANK=0 NCCL_HOSTID=check$rank CUDA_VISIBLE_DEVICES=$gpu; else export LOCAL_RANK=$rank; fi
      exec timeout -k 5 "$limit" "$program" --device "$device" --recipe mxfp8 --out-dir "$out/$3" --comm-timeout 60 "${@:4}"
    ) &
    pids+=($!)
  done
}
end_ranks() { # the exit status that is wanted of each
  local pid code ended=0
  for pid in "${pids[@]}"; do
    wait "$pid"
    code=$?
    while kill -0 "$pid" 2>/dev/null; do # a signal ended the waiting, not the rank
      wait "$pid"
      code=$?
    done
    echo "a rank ended with $code"
    if [ $code -ne "$1" ]; then ended=1; fi
  done
  return $ended
}
close_losses() { # a, b, steps: within a thousandth, since ranks sum in another order
  paste <(last_losses "$1" "$3") <(last_losses "$2" "$3") | awk -v steps="$3" '
    { d = $2 - $4; d = d < 0 ? -d : d; if (!(d <= 1e-3 * $2) || $2 !~ /[0-9]/ || $4 !~ /[0-9]/) bad = 1; worst = d > worst ? d : worst }
    END { print "losses " worst " apart at most, over " NR " steps"; exit bad || NR < steps }'
}
two_ranks() {
  case $(ask_gpu compute_mode) in Exclusive*)
    left_out 77 "the card takes one process at a time, by its compute mode"
    return
    ;;
  esac
  start_ranks 2 shared two-ranks "${small[@]}" --total-batch-size 2048 --max-steps 20
  end_ranks 0 && close_losses "$out/one-rank" "$out/two-ranks" 20
}
ranks() { # name, options...
  if [ "$gpus" -lt 2 ]; then left_out 77 "one GPU"; return; fi
  start_ranks "$gpus" own "$1" "${small[@]}" --total-batch-size $((gpus * 1024)) --max-steps 20 "${@:2}"
  end_ranks 0
}
# `--gather mx` goes beside compute; `fp32` makes the same copies after it, so that the bits must be
# the same.
overlap() { ranks ranks-apart --zero 1 --gather fp32 && same_losses "$out/ranks-zero1" "$out/ranks-apart" 20; }
zero2() { ranks ranks-zero2 --zero 2 && close_losses "$out/ranks-zero1" "$out/ranks-zero2" 20; }
# Each rank that is left ends with status 4 and says which one is lost.
lost_rank() {
  local victim
  if [ "$gpus" -lt 2 ]; then left_out 77 "one GPU"; return; fi
  start_ranks "$gpus" own lost-rank "${small[@]}" --total-batch-size $((gpus * 1024)) --max-steps 100000
  until [ "$(steps_in "$out/lost-rank")" -ge 5 ] || ! kill -0 "${pids[0]}"; do sleep 0.2; done
  victim=$((gpus - 1))
  pkill -9 -P "${pids[$victim]}"
  unset "pids[$victim]"
  end_ranks 4
}

# Timing ----------------------------------------------------------------------------------------------------------------------

steps_in() {
  grep -cs '"event":"train"\|^step .* ms ' "$1/log.jsonl" "$1/console.log" | awk -F: '{ n += $NF } END { print n + 0 }'
}
# Samples clocks, power, temperature and throttling into a file until $sampler is ended.
sample_clocks() { # file
  nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu,clocks_throttle_reasons.active --format=csv,noheader,nounits \
    --id="$gpu" --loop-ms=1000 >"$1" 2>/dev/null &
  sampler=$!
}
# Lets a contender train for its seconds after its first steps, while clocks are sampled, and ends
# it: a checkpoint of the largest model would be 19 GB. One that ends by itself has failed.
turn() { # directory, command...
  local directory=$1 pid sampler='' begun='' steps=0 end=$((SECONDS + limit)) code=''
  shift
  mkdir -p "$directory"
  sample_clocks "$directory/clocks.csv"
  "$@" >"$directory/console.log" 2>&1 &
  pid=$!
  while kill -0 $pid 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do
    steps=$(steps_in "$directory")
    if [ "$steps" -ge 3 ] && [ -z "$begun" ]; then begun=$SECONDS; fi
    if [ -n "$begun" ] && [ $((SECONDS - begun)) -ge "$turn_seconds" ]; then break; fi
    if [ "${limit_seconds-}" = 0 ]; then break; fi
    sleep 0.2
  done
  if ! kill -0 $pid 2>/dev/null; then
    wait $pid
    code=$?
  fi
  kill -9 $pid $sampler 2>/dev/null
  wait $pid $sampler 2>/dev/null
  steps=$(steps_in "$directory")
  if [ -n "$code" ]; then
    echo "$steps steps, and it ended with $code: $(tail -n 1 "$directory/console.log")"
    return 1
  fi
  tail -n 3 "$directory/console.log"
  if [ "${limit_seconds-}" = 0 ]; then
    left_out 124 "$over"
    return
  fi
  echo "$steps steps"
  if [ "$steps" -lt 3 ]; then return 124; fi
}
turn_ours() { # model, contender, round
  local -n options=model_$1
  local contender=$2 recipe=${2%%-*} more=()
  case $contender in
  fp8-*) recipe=$contender more=(--mx-gemm native) ;;
  nvfp4) more=(--mx-gemm native) ;;
  mxfp8-emulated) more=(--mx-gemm emulated) ;;
  mxfp8-native) more=(--mx-gemm native) ;;
  esac
  turn "$out/turns/$1/$contender-$3" "$program" --device "$device" --recipe "$recipe" --max-steps 100000 \
    --out-dir "$out/turns/$1/$contender-$3" "${large[@]}" "${options[@]}" "${more[@]}"
}
# Random weights, recomputation of GELU off, without evaluations and samples. Its other defaults are
# its best, but for GELU in cuBLASLt's epilogues (llmc-fused), which it leaves to the user.
turn_llmc() { # contender, round
  local more=()
  if [ "$1" = llmc-fused ]; then more=(-ge 2); fi
  turn "$out/turns/124M/$1-$2" stdbuf -oL "$build/llm.c/train_gpt2cu" -e d12 -i "$out/large.bin" -j "$out/large.bin" \
    -b "$batch" -t 1024 -x 100000 -r 0 -v 1000000 -m 1 -s 1000000 -g 1 -h 0 -n 0 "${more[@]}"
}
turns() { # model: all contenders, round by round
  local round contender
  for ((round = 1; round <= rounds; round++)); do
    for contender in "${contenders[@]}"; do
      case $1$contender in
      124Mfp8-* | 124Mnvfp4 | 7Bfp8-* | 7Bnvfp4) continue ;; # their goals are at 1558M
      1558Mfp8-*) if [ "$round" -gt $fp8_rounds ]; then continue; fi ;;
      esac
      step "turn-$1-$contender-$round" $((turn_seconds + 60)) turn_ours "$1" "$contender" "$round"
    done
    if [ "$1" = 124M ] && [ -x "$build/llm.c/train_gpt2cu" ]; then
      step "turn-124M-llmc-$round" $((turn_seconds + 60)) turn_llmc llmc "$round"
      from 30 "turn-124M-llmc-fused-$round" $((turn_seconds + 60)) turn_llmc llmc-fused "$round"
    fi
  done
}
# Runs a command while clocks are sampled.
with_clocks() { # file, command...
  local sampler code
  sample_clocks "$1"
  "${@:2}"
  code=$?
  kill $sampler 2>/dev/null
  wait $sampler 2>/dev/null
  return $code
}
bench() {
  with_clocks "$out/bench-clocks.csv" timeout -k 5 "$limit" "$build/bench_ops" --device "$device" --batch-size "$batch" \
    --json "$out/bench.jsonl" "${bench_options[@]}"
}
profile() { # name, recipe, options...
  mkdir -p "$out/profile-$1"
  with_clocks "$out/profile-$1/clocks.csv" train "$2" "profile-$1" "${large[@]}" "${@:3}" --max-steps 6 --profile
}
build_llmc() {
  local cudnn=
  rm -rf "$build/llm.c"
  cp -r "$LLMC_DIR" "$build/llm.c" || return 1
  if [ -x "$LLMC_DIR/train_gpt2cu" ]; then
    echo "llm.c as it was built"
    return
  fi
  if [ -d "$LLMC_DIR/cudnn-frontend" ] || [ -d "${HOME:-}/cudnn-frontend" ]; then cudnn=1; fi
  # Since CUDA 13 the place of managed memory has a type, which llm.c of 2025 doesn't know, and the
  # cudnn-frontend of 2026 wants NVRTC.
  if ! "$nvcc" --version | grep -q 'release 1[12]\.'; then
    sed -i 's/SetPreferredLocation, cudaCpuDeviceId/SetPreferredLocation, cudaMemLocation{cudaMemLocationTypeHost, 0}/' \
      "$build/llm.c/llmc/cuda_utils.cuh"
  fi
  timeout -k 5 "$limit" make -C "$build/llm.c" train_gpt2cu NO_MULTI_GPU=1 NO_USE_MPI=1 ${cudnn:+USE_CUDNN=1} \
    NVCC_LDFLAGS="-lcublas -lcublasLt -lnvidia-ml ${cudnn:+-lcudnn -lnvrtc}" \
    ${capability:+GPU_COMPUTE_CAPABILITY="$capability"} || return 1
  if [ -n "$cudnn" ]; then echo "llm.c with cuDNN"; else echo "llm.c without cuDNN"; fi
}

# Other steps -----------------------------------------------------------------------------------------------------------------

# Our own kernels alone: libraries' take minutes and aren't ours to mend.
library_names='cudnn|cublas|cutlass|nvjet|gemm|splitK'
libraries="regex=.*($library_names).*"
# Runs a tool of it, whose words go into a file; fails where they have a finding of our own kernels.
# One that its time ended without is left out: it tells how many tests came to their end.
sanitize() { # file, what a finding has, tool and options...
  local code begun=$SECONDS
  if [ -z "$sanitizer" ]; then left_out 124 "no compute-sanitizer in PATH, beside nvcc or in /usr/local/cuda/bin"; return; fi
  timeout -k 5 "$limit" "$sanitizer" --tool "${@:3}" >"$1" 2>&1
  code=$?
  grep -v '^=========  *$' "$1"
  if grep "$2" "$1" | grep -vE "$library_names" >/dev/null; then return 1; fi
  if [ $code -ne 0 ] && [ $((SECONDS - begun)) -ge "$limit" ]; then
    left_out 124 "$limit s were over, and nothing was found in $(grep -c '^\[ *OK' "$1") tests"
    return
  fi
  return $code
}
errors() { # tool, program, options...
  sanitize "$out/$1.txt" '^========= \(Invalid\|Uninitialized\|Barrier error\|Divergent\|Program hit\)' "$1" \
    --error-exitcode 1 --kernel-name-exclude "$libraries" "${@:2}" &&
    grep -q 'ERROR SUMMARY' "$out/$1.txt" && echo "nothing in our own kernels"
}
# Of all kernels, since racecheck of 2025.3 ends a program with an illegal access where some are left
# out (seen on an H100, where all together are fine); what it says of libraries' doesn't count.
races() { # program, options...
  sanitize "$out/races.txt" 'Race reported' racecheck "$@" &&
    grep -q 'RACECHECK SUMMARY' "$out/races.txt" && echo "no races in our own kernels"
}
# Kernels as they follow one another, where --profile waits for each: the summary of nsys.
timeline() { # recipe
  if ! command -v nsys >/dev/null; then left_out 77 "no nsys"; return; fi
  with_clocks "$out/timeline-$1-clocks.csv" timeout -k 5 "$limit" nsys profile --trace cuda --stats true \
    --force-overwrite true --output "$out/nsys-$1" "$program" --device "$device" --recipe "$1" \
    --out-dir "$out/nsys-run-$1" "${large[@]}" "${model_124M[@]}" --max-steps 8
}
versions() {
  "$program" --version 2>/dev/null || git describe --always --dirty
  uname -sr
  smi --query-gpu=index,name,driver_version,vbios_version,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current \
    --format=csv || echo 'no nvidia-smi'
  for tool in "${nvcc:-nvcc}" gcc nsys "${sanitizer:-compute-sanitizer}" python3; do
    command -v "$tool" >/dev/null && "$tool" --version | grep -v '^$\|warranty\|free software\|FITNESS' | tail -n 2
  done
  if [ -n "${LLMC_DIR:-}" ]; then echo "llm.c $(git -C "$LLMC_DIR" describe --always 2>/dev/null)"; fi
}
# Without a card it skips what needs one, and passes.
gemm_test() { timeout -k 5 "$limit" "$build/gpu_test_cuda_gemm" && ! grep -q skipped: "$out/test_cuda_gemm.log"; }

build() {
  if [ -n "${BUILT:-}" ]; then echo "built elsewhere: $BUILT"; return; fi
  timeout -k 5 "$limit" make -j"$(nproc)" BUILD="$build" "$@"
}

# The steps ---------------------------------------------------------------------------------------------------------------------

is_native() { grep -q "$1  *native" "$out/device-info.log"; }

choose_contenders() {
  contenders=(bf16 mxfp8-emulated)
  if is_native MXFP8; then contenders+=(mxfp8-native); fi
  if is_native 'FP8 by tensor'; then contenders+=(fp8-current); fi
  if is_native 'FP8 by 128'; then contenders+=(fp8-blockwise); fi
  if is_native NVFP4; then contenders+=(nvfp4); fi
}
what_is_right() {
  if step build-tests 300 build gpu-tests; then
    for name in quantize ops attention gpt authors; do
      step "test_cuda_$name" 180 "$build/gpu_test_cuda_$name"
    done
    step test_cuda_gemm 120 gemm_test
    step test_gpt 60 env TEST_BACKEND=cuda "$build/test_gpt"
  fi
  step reproduce 120 reproduce small mxfp8 40 "${small[@]}"
  step reproduce-tuned 120 reproduce tuned fp8-delayed 8 "${large[@]}" "${part_124M[@]}" # with GEMMs that are tuned
  step one-rank 60 train mxfp8 one-rank "${small[@]}" --total-batch-size 2048 --max-steps 20
  step two-ranks 120 two_ranks
  if is_native MXFP8; then
    step native 60 train mxfp8 native "${large[@]}" "${model_124M[@]}" --mx-gemm native --max-steps 6
  fi
  if is_native NVFP4; then
    step native-nvfp4 60 train nvfp4 native-nvfp4 "${large[@]}" "${model_124M[@]}" --mx-gemm native --max-steps 6
  fi
  for tool in memcheck initcheck synccheck; do
    step "$tool" 60 errors "$tool" "${tiny[@]}" --max-steps 1 --out-dir "$out/$tool"
  done
  step racecheck 60 races "${tiny[@]}" --max-steps 1 --out-dir "$out/racecheck"
  for recipe in bf16 mxfp8; do
    step "curve-$recipe" 60 train "$recipe" "curve-$recipe" "${small[@]}" --max-steps 300
  done
  from 30 real-shapes 240 reproduce large mxfp8 6 "${large[@]}" "${model_124M[@]}"
  from 60 ranks-zero1 120 ranks ranks-zero1 --zero 1
  from 60 ranks-overlap 120 overlap
  from 60 ranks-zero2 120 zero2
  from 60 lost-rank 180 lost_rank
}
how_fast() {
  if [ -n "${LLMC_DIR:-}" ]; then step build-llmc 200 build_llmc; fi
  turns 124M
  if [ "$minutes" -ge 30 ]; then turns 1558M; fi
  if [ "$minutes" -ge 60 ] && is_native MXFP8; then turns 7B; fi # its goal is of native MXFP8
  step bench 240 bench
  for recipe in bf16 mxfp8; do
    from 30 "profile-124M-$recipe" 60 profile "124M-$recipe" "$recipe" "${model_124M[@]}"
    from 60 "profile-1558M-$recipe" 60 profile "1558M-$recipe" "$recipe" "${part_1558M[@]}"
    from 30 "timeline-$recipe" 120 timeline "$recipe"
  done
}
# Takes what is left of 60 minutes. On an H100 racecheck of the operations' tests wants over 240 s.
sanitize_tests() {
  for name in ops attention quantize; do
    from 60 "racecheck-$name" 420 races "$build/gpu_test_cuda_$name"
    for tool in memcheck initcheck synccheck; do
      from 60 "$tool-$name" 300 errors "$tool" "$build/gpu_test_cuda_$name"
    done
  done
}

step versions 20 versions
if step build 300 build programs "$build/bench_ops"; then
  step tokens 60 make_data
  step device-info 60 "$program" --device-info
  choose_contenders
  what_is_right
  how_fast
  sanitize_tests
fi

echo "report: $out/report.md"
rm -f "$out/train.bin" "$out/large.bin"
commit=$("$program" --version 2>/dev/null | sed 's/^[^ ]* //')
python3 dev/gpu/report.py "$out" "${commit:-unknown}" "$batch"
