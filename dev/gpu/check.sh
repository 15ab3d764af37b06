#!/usr/bin/env bash
# Everything that only a GPU can show, in one command of under ten minutes: builds for this machine's card, then compares
# every operation and a whole model with the CPU backend, trains, resumes, and times. Writes report.md, report.json and the
# logs into a directory (default: dev/gpu/results/DATE-CARD).
#
#     dev/gpu/check.sh [DIRECTORY]
#
# Needs the CUDA toolkit, a C compiler, cmocka, cJSON and python3; oneDNN makes the CPU's side faster. DEVICE=cpu goes through the
# motions without a card.
set -uo pipefail
cd "$(dirname "$0")/../.."
device=${DEVICE:-cuda}
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr ' ' '-')
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
out=${1:-dev/gpu/results/$(date +%Y-%m-%d)-${card:-no-card}}
build=build/gpu-check
mkdir -p "$out" || exit 2
rows=$out/rows.tsv
: >"$rows"

# step NAME SECONDS COMMAND...: runs it, its output in NAME.log, and notes how it ended.
step() {
  local name=$1 limit=$2 start=${EPOCHREALTIME/./} code tenths
  shift 2
  if [ "$(type -t "$1")" != function ]; then set -- timeout "$limit" "$@"; fi
  "$@" >"$out/$name.log" 2>&1
  code=$?
  tenths=$(((${EPOCHREALTIME/./} - start) / 100000))
  printf '%s\t%d\t%d.%d\t%s\n' "$name" "$code" $((tenths / 10)) $((tenths % 10)) \
    "$(tail -n 1 "$out/$name.log" | tr '\t' ' ' | cut -c1-200)" | tee -a "$rows"
  return $code
}

# Tokens with some order in them: each mostly a function of the one before. Made here, so that no file need be brought.
make_tokens() {
  python3 - "$1" "$2" <<'PYTHON'
import array, random, struct, sys
path, count = sys.argv[1], int(sys.argv[2])
random.seed(1)
tokens, last = array.array("H"), 0
for _ in range(count):
    last = (last * 77 + 13) % 256 if random.random() < 0.8 else random.randrange(256)
    tokens.append(last)
with open(path, "wb") as f:
    f.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253) + tokens.tobytes())
PYTHON
}

train() { # recipe, name, options...
  local recipe=$1 name=$2
  shift 2
  timeout 120 "$build/train_gpt_mxfp8" --device "$device" --recipe "$recipe" --train-data "$build/train.bin" --vocab-size 256 --out-dir "$out/$name" "$@"
}
small=(--layers 4 --heads 4 --channels 256 --max-seq-len 128 --batch-size 8 --learning-rate 1e-3 --warmup-steps 20)
large=(--model gpt2-124M --vocab-size 50257 --seq-len 1024 --batch-size "${BATCH:-16}" --max-steps 12 --profile)

last_losses() { grep -h '"event":"train"' "$1/log.jsonl" | sed 's/.*"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/' | tail -n "$2"; }
same_losses() { diff <(last_losses "$1" "$3") <(last_losses "$2" "$3") && echo "the last $3 losses are the same to the bit"; }
resume_run() {
  train mxfp8 resumed "${small[@]}" --max-steps 20 --checkpoint-every 10 &&
    train mxfp8 resumed --resume --max-steps 40 && same_losses "$out/resumed" "$out/straight" 15
}

if step build 300 make -j"$(nproc)" BUILD="$build" ${capability:+CUDA_ARCH="${capability}a"} programs gpu-tests; then
  make_tokens "$build/train.bin" 2000000
  step device-info 60 "$build/train_gpt_mxfp8" --device-info
  for name in quantize ops attention gemm gpt; do
    step "test_cuda_$name" 120 "$build/gpu_test_cuda_$name"
  done
  step straight 120 train mxfp8 straight "${small[@]}" --max-steps 40 --checkpoint-every 40
  step again 120 train mxfp8 again "${small[@]}" --max-steps 40 --checkpoint-every 40
  step run-to-run 10 same_losses "$out/straight" "$out/again" 40
  step resume 120 resume_run
  for recipe in bf16 mxfp8 mxfp8-ocp; do
    step "curve-$recipe" 120 train "$recipe" "curve-$recipe" "${small[@]}" --max-steps 300
  done
  for recipe in bf16 mxfp8; do
    step "speed-$recipe" 120 train "$recipe" "speed-$recipe" "${large[@]}"
  done
  if command -v compute-sanitizer >/dev/null; then
    step memcheck 180 compute-sanitizer --error-exitcode 1 "$build/train_gpt_mxfp8" --device "$device" --train-data "$build/train.bin" \
      --vocab-size 256 --layers 1 --heads 2 --channels 96 --max-seq-len 33 --batch-size 2 --max-steps 2 --out-dir "$out/memcheck-run"
    step racecheck 180 compute-sanitizer --tool racecheck --error-exitcode 1 "$build/train_gpt_mxfp8" --device "$device" \
      --train-data "$build/train.bin" --vocab-size 256 --layers 1 --heads 2 --channels 96 --max-seq-len 33 --batch-size 2 --max-steps 1 \
      --out-dir "$out/racecheck-run"
  fi
fi

find "$out" -name 'step_*' -type d -prune -exec rm -r {} +
python3 - "$out" "$(git rev-parse --short HEAD 2>/dev/null)" "${card:-none}" <<'PYTHON'
import datetime, json, pathlib, statistics, sys
out, commit, card = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rows = [line.split("\t") for line in (out / "rows.tsv").read_text().splitlines()]
steps = [{"step": r[0], "exit": int(r[1]), "seconds": float(r[2]), "last_line": r[3]} for r in rows]
speeds, losses = {}, {}
for log in sorted(out.glob("*/log.jsonl")):
    events = [json.loads(line) for line in log.read_text().splitlines()]
    trained = [e for e in events if e["event"] == "train"]
    if len(trained) > 2:
        speeds[log.parent.name] = statistics.median(e["tokens_per_second"] for e in trained[2:])
        losses[log.parent.name] = trained[-1]["loss"]
report = {"date": datetime.date.today().isoformat(), "card": card, "commit": commit, "steps": steps, "tokens_per_second": speeds,
          "last_loss": losses}
(out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
lines = [f"# {card}, {report['date']}, commit {commit}", "", "| step | | seconds | last line |", "|---|---|---|---|"]
lines += [f"| {s['step']} | {'ok' if s['exit'] == 0 else 'exit ' + str(s['exit'])} | {s['seconds']} | {s['last_line']} |" for s in steps]
lines += ["", "| run | tokens/s, median | last loss |", "|---|---|---|"]
lines += [f"| {name} | {speeds[name]:.0f} | {losses[name]:.4f} |" for name in speeds]
(out / "report.md").write_text("\n".join(lines) + "\n")
PYTHON
rm "$rows"
echo "report: $out/report.md"
! grep -q '| exit ' "$out/report.md"
