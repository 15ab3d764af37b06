#!/usr/bin/env bash
# Trains a byte-level GPT of three million parameters on Shakespeare's plays in MXFP8, in minutes on two cores, and shows
# what came out. `make demo` calls it; arguments go to the trainer.
set -euo pipefail
cd "$(dirname "$0")/.."

data=build/demo/data
run=runs/demo-$(date +%Y%m%d-%H%M%S)
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    --out-dir) next=$((i + 1)) && run=${!next-} ;;
    --out-dir=*) run=${!i#*=} ;;
  esac
done

echo "== Shakespeare's plays as token files"
.venv/bin/python data/demo_corpus.py --out-dir "$data"

echo
echo "== Training"
./train_gpt_mxfp8 --train-data "$data/train_*.bin" --val-data "$data/val_*.bin" --recipe mxfp8 \
  --layers 4 --heads 4 --channels 256 --max-seq-len 128 --batch-size 8 --max-steps 1500 \
  --learning-rate 1e-3 --warmup-steps 100 --val-every 100 --val-steps 24 \
  --sample-every 500 --sample-tokens 200 --prompt ROMEO --quant-stats-every 100 --out-dir "$run" "$@"
if [ ! -e "$run" ]; then exit; fi # --dry-run
.venv/bin/python scripts/plot.py "$run" --out "$run/loss.png"

cat <<END

== What you have
picture     $run/loss.png
log         $run/log.jsonl, one JSON object a line
checkpoint  $run/$(cat "$run/latest"), which Hugging Face transformers loads too

== What to try next
./train_gpt_mxfp8 --generate $run/$(cat "$run/latest") --prompt "ROMEO" --sample-tokens 400
the same in BF16, and both curves in one picture:
  scripts/demo.sh --recipe bf16
  .venv/bin/python scripts/plot.py runs/demo-* --out both.png
your own text:
  .venv/bin/python data/prepare.py --input my.txt --tokenizer byte --out-dir my-data
  ./train_gpt_mxfp8 --train-data 'my-data/train_*.bin' --val-data 'my-data/val_*.bin' --layers 4 --heads 4 --channels 256 \\
      --max-seq-len 128 --batch-size 8 --max-steps 1500 --learning-rate 1e-3 --warmup-steps 100
END
