"""A script of one rank, for real launchers: ``python program.py <what> <token>``. The token marks its processes."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), *map(str, Path(__file__).parents[1:3])]

import contract  # noqa: E402

from shardpass.backends.connect import connect  # noqa: E402


def main(what: str) -> None:
    comm = connect("mpi") if what == "contract over mpi" else connect()
    print(f"rank {comm.rank} of {comm.size} with {type(comm).__name__}", flush=True)
    if what.startswith("contract"):
        contract.run_all(comm)
    elif what == "gradients":
        from core import test_gradient_overlap

        test_gradient_overlap.on_a_transport(comm)
    else:
        contract.check_exchange(comm)
        victim = comm.rank == comm.size - 1
        if what == "raise" and victim:
            raise ValueError("boo")
        if what == "kill" and victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit" and victim:
            sys.exit(3)
        if what == "abort" and victim:
            comm.abort("the loss is nan")
        if what == "raise while others compute":
            if victim:
                raise ValueError("boo")
            time.sleep(60)
        if what == "slow" and victim:
            time.sleep(float(os.environ["SLOW_SECONDS"]))
        to, source = contract.ring(comm)
        recv = torch.zeros(300_000)
        comm.exchange(torch.ones(300_000), to, recv, source, 77, "call 5 round 2").wait()
        comm.barrier("last")
    print(f"rank {comm.rank} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
