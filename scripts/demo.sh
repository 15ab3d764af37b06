#!/usr/bin/env bash
# Trains a byte-level GPT of three million parameters on Shakespeare's plays in MXFP8, in minutes on two cores, and shows
# what came out. `make demo` calls it; arguments go to the trainer.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd -P)

data=build/demo/data
run=$root/runs/demo-$(date +%Y%m%d-%H%M%S)
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --out-dir) run=${2-} && shift $(($# > 1)) ;;
    --out-dir=*) run=${1#*=} ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
if [ -z "$run" ]; then
  echo "demo.sh: --out-dir needs a directory" >&2
  exit 2
fi
run=$(realpath -sm --relative-base="$root" -- "$run") # a path of the caller's
cd "$root"

echo "== Shakespeare's plays as token files"
.venv/bin/python data/demo_corpus.py --out-dir "$data"

echo
echo "== Training"
./train_gpt_mxfp8 --train-data "$data/train_*.bin" --val-data "$data/val_*.bin" --recipe mxfp8 \
  --layers 4 --heads 4 --channels 256 --max-seq-len 128 --batch-size 8 --max-steps 1500 \
  --learning-rate 1e-3 --warmup-steps 100 --val-every 100 --val-steps 24 \
  --sample-every 500 --sample-tokens 200 --prompt ROMEO --quant-stats-every 100 --out-dir "$run" "${arguments[@]}"
if [ ! -e "$run/log.jsonl" ]; then exit; fi # --dry-run
.venv/bin/python scripts/plot.py "$run" --out "$run/loss.png"

checkpoint=$run/$(cat "$run/latest")
quoted() { printf %q "$1"; }
cat <<END

== What you have
picture     $run/loss.png
log         $run/log.jsonl, one JSON object a line
checkpoint  $checkpoint, which Hugging Face transformers loads too

== What to try next
./train_gpt_mxfp8 --generate $(quoted "$checkpoint") --prompt "ROMEO" --sample-tokens 400
the same in BF16, and both curves in one picture:
  scripts/demo.sh --recipe bf16 --out-dir $(quoted "$run-bf16")
  .venv/bin/python scripts/plot.py $(quoted "$run") $(quoted "$run-bf16") --out both.png
your own text:
  .venv/bin/python data/prepare.py --input my.txt --tokenizer byte --out-dir my-data
  ./train_gpt_mxfp8 --train-data 'my-data/train_*.bin' --val-data 'my-data/val_*.bin' --layers 4 --heads 4 --channels 256 \\
      --max-seq-len 128 --batch-size 8 --max-steps 1500 --learning-rate 1e-3 --warmup-steps 100
END
