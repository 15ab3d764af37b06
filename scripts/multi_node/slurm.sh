#!/usr/bin/env bash
# Trains on several machines with a GPU for each rank, under Slurm, without MPI: Slurm says which rank each process is.
#
#     sbatch scripts/multi_node/slurm.sh --train-data 'data/train_*.bin' --out-dir runs/slurm ...
#
# Submit it from the repository; relative paths are of that. Slurm runs a copy of this script, which can't know where the
# repository is.
#
# Edit: machines, ranks of a machine (its GPUs), cores of a rank, hours. Partition and account as your site wants them.
#SBATCH --job-name=train_gpt_mxfp8
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
# The program saves and ends on SIGTERM; two minutes are enough for a large checkpoint.
#SBATCH --signal=TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this is for sbatch}"
if [ ! -x train_gpt_mxfp8 ]; then
  echo "slurm.sh: there is no program train_gpt_mxfp8 in $PWD: submit this from the repository, after make" >&2
  exit 2
fi

# Rank 0 runs on the first machine of the job.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# Edit: where machines have several networks, the one to use: export NCCL_SOCKET_IFNAME=ib0

# One rank that fails ends them all. Ranks on CPUs: srun --mpi=pmix (Open MPI must be built with it), or mpirun in its place.
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" ./train_gpt_mxfp8 "$@"
