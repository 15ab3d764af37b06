#!/usr/bin/env bash
# Trains the demo's model for some steps and shows where their time goes. `make profile` calls it; arguments go to the
# trainer, such as --recipe bf16 or --model gpt2-124M --seq-len 1024 --max-steps 3.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd -P)

data=build/demo/data
run=$root/runs/profile-$(date +%Y%m%d-%H%M%S)
model=(--layers 4 --heads 4 --channels 256 --max-seq-len 128 --batch-size 8)
case " $* " in *" --model"* | *" --init-from"*) model=() ;; esac
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --out-dir) next=$((i + 1)) && run=${!next-} ;;
    --out-dir=*) run=${!i#*=} ;;
  esac
done
if [ -z "$run" ]; then
  echo "profile.sh: --out-dir needs a directory" >&2
  exit 2
fi
run=$(realpath -sm --relative-base="$root" -- "$run") # a path of the caller's
cd "$root"

.venv/bin/python data/demo_corpus.py --out-dir "$data"
./train_gpt_mxfp8 --train-data "$data/train_*.bin" "${model[@]}" --max-steps 50 --profile "$@" --out-dir "$run"
if [ ! -e "$run/log.jsonl" ]; then exit; fi # --dry-run
.venv/bin/python scripts/plot_profile.py "$run"
