#!/bin/bash
#SBATCH --job-name=shardpass
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue
# sbatch slurm-1-node.sh parts --model gat --epochs 100
set -euo pipefail
source "${VENV:-$HOME/venv}/bin/activate"
mkdir -p "${SHARDPASS_BLACK_BOX:=$PWD/black-boxes}"
export SHARDPASS_BLACK_BOX  # what each rank did last, if the run fails

srun --mpi=none --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    shardpass train "$@" --threads "$SLURM_CPUS_PER_TASK" --checkpoint "${CHECKPOINT:-run.ckpt}" --resume
