"""A stand-in for Slurm's srun: starts the ranks on this machine, with the variables of a step."""

import argparse
import os
import subprocess
import sys

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("-n", "--ntasks", type=int)
parser.add_argument("-N", "--nodes", type=int, default=1)
parser.add_argument("--ntasks-per-node", type=int)
for option in ("--mpi", "--kill-on-bad-exit", "--cpus-per-task"):
    parser.add_argument(option)
parser.add_argument("words", nargs=argparse.REMAINDER)
given = parser.parse_args()

per_node = given.ntasks_per_node and given.nodes * given.ntasks_per_node
ranks = given.ntasks or per_node or int(os.environ["SLURM_NTASKS"])
step = {"SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
started = [
    subprocess.Popen(given.words, env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
    for rank in range(ranks)
]
sys.exit(max(process.wait() for process in started))
