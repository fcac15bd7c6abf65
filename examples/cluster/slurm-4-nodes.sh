#!/bin/bash
#SBATCH --job-name=shardpass
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue
# sbatch slurm-4-nodes.sh /shared/parts --model gat --epochs 100
# All nodes must see the parts, the environment and the checkpoint under the same paths.
set -euo pipefail
source "${VENV:-$HOME/venv}/bin/activate"
mkdir -p "${SHARDPASS_BLACK_BOX:=$PWD/black-boxes}"
export SHARDPASS_BLACK_BOX  # what each rank did last, if the run fails
export SHARDPASS_CONNECT_TIMEOUT=300  # a node may take a while to start Python from a shared file system
# export GLOO_SOCKET_IFNAME=ib0  # a faster interface than the one that reaches the first node

srun --mpi=none --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    shardpass train "$@" --threads "$SLURM_CPUS_PER_TASK" --checkpoint "${CHECKPOINT:-run.ckpt}" --resume
