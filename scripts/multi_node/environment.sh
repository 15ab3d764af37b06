#!/usr/bin/env bash
# Starts this machine's ranks, a GPU each, with the variables that torchrun sets, and needs neither MPI nor Slurm nor
# torchrun. To be run on every machine, within the timeout (ten minutes) of each other:
#
#     MACHINE=0 MACHINES=2 MASTER_ADDR=node1 scripts/multi_node/environment.sh --train-data 'data/train_*.bin' ...
#     MACHINE=1 MACHINES=2 MASTER_ADDR=node1 scripts/multi_node/environment.sh --train-data 'data/train_*.bin' ...
#
# On one machine: scripts/multi_node/environment.sh ... alone.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd) # paths in the arguments are of the caller's directory

# Edit, or set: this machine's number from 0, how many there are, the name of number 0, and a port that is free there.
machine=${MACHINE:-0}
machines=${MACHINES:-1}
export MASTER_ADDR=${MASTER_ADDR:-localhost}
export MASTER_PORT=${MASTER_PORT:-29500}
# Edit, or set: ranks of this machine; all machines have the same number.
ranks=${RANKS:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)}
if [ "$ranks" -eq 0 ]; then
  echo "environment.sh: no GPU was found; set RANKS. Ranks on CPUs need scripts/multi_node/mpirun.sh" >&2
  exit 2
fi

export WORLD_SIZE=$((machines * ranks))
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
trap : INT # a terminal sends Ctrl-C to the ranks too, to which a second signal would mean to drop the step
for ((local_rank = 0; local_rank < ranks; local_rank++)); do
  # bash has programs in the background ignore Ctrl-C, unless they are told not to.
  (trap - INT && RANK=$((machine * ranks + local_rank)) LOCAL_RANK=$local_rank exec "$root/train_gpt_mxfp8" "$@") &
  pids+=($!)
done

# The exit code of the first that fails. The others end by themselves: the one that failed is named by them.
code=0
for pid in "${pids[@]}"; do
  ended=0
  wait "$pid" || ended=$?
  while [ "$ended" -gt 128 ] && kill -0 "$pid" 2>/dev/null; do # a signal to this script, not the rank's end
    ended=0
    wait "$pid" || ended=$?
  done
  if [ "$code" -eq 0 ]; then code=$ended; fi
done
exit "$code"
