"""Ranks of which one goes wrong: ``python black_box.py <what> <token>``. The token marks the processes."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardpass as sp

RANKS = 3
TIMEOUT = 1.0  # of the waits, where a rank is to be late


def program(comm, what):
    """Some calls in which all is well, and then something else on rank 1."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.run_at_once()
    for number in range(3):
        comm.exchange(torch.ones(4), to, torch.zeros(4), source, number, f"call {number}, round 1").wait()
        comm.all_reduce(torch.ones(1), label="loss")
    if comm.rank == 1:
        print(f"fault at {time.time():.3f}", flush=True)
        if what == "raises":
            raise ValueError("boo")
        if what == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "is late":
            time.sleep(3 * TIMEOUT)
    if what != "skips" or comm.rank != 1:
        comm.all_reduce(torch.ones(1), label="norm")
    comm.exchange(torch.ones(4), to, torch.zeros(4), source, 7, "call 7, round 1").wait()
    comm.barrier("the end")


def rank_of_a_job(what, rank=None):
    if rank is not None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    comm = sp.connect(**({"timeout": TIMEOUT} if what == "is late" else {}))
    program(comm, what)


if __name__ == "__main__":
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        rank_of_a_job(sys.argv[1])
    else:
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=rank_of_a_job, args=(sys.argv[1], rank)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
