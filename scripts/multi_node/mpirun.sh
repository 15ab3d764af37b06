#!/usr/bin/env bash
# Trains on several machines, started by Open MPI's mpirun from one of them. With ranks on CPUs MPI also carries the data;
# with GPUs it only brings the ranks together, and NCCL carries it.
#
#     HOSTS=node1:8,node2:8 scripts/multi_node/mpirun.sh --train-data 'data/train_*.bin' --out-dir runs/two-machines ...
#
# Needs the same program, data, Open MPI and directory that it is called from at the same path on every machine, and ssh
# from this one without a password.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd) # paths in the arguments are of the caller's directory

# Edit: the machines and how many ranks each takes: its GPUs, or 1 for each group of cores that shares memory.
hosts=${HOSTS:-}
# Edit: cores of a rank. On CPUs all cores of a machine divided by its ranks; with GPUs a few.
cores=${CORES:-4}
# Edit: the network that machines reach each other by, where they have several: its interface, or its addresses.
network=${NETWORK:-}

if [ -z "$hosts" ]; then
  echo "mpirun.sh: no machines: say which, and how many ranks each takes, as in HOSTS=node1:8,node2:8" >&2
  exit 2
fi
options=(--host "$hosts" --map-by "slot:pe=$cores" --bind-to core -x "OMP_NUM_THREADS=$cores")
if [ -n "$network" ]; then
  options+=(--mca btl_tcp_if_include "$network" --mca oob_tcp_if_include "$network" -x "NCCL_SOCKET_IFNAME=$network")
fi
if [ "$(id -u)" -eq 0 ]; then options+=(--allow-run-as-root); fi

exec mpirun "${options[@]}" "$root/train_gpt_mxfp8" "$@"
