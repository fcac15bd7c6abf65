"""A script of one rank, for real launchers: ``python program.py <what> <token>``. The token marks its processes."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), *map(str, Path(__file__).parents[1:3])]

import contract  # noqa: E402

from shardpass.backends import Communicator, connect  # noqa: E402


def main(what: str) -> None:
    comm = connect("mpi") if what == "contract over mpi" else connect()
    print(f"rank {comm.rank} of {comm.size} with {type(comm).__name__}", flush=True)
    if what.startswith("contract"):
        contract.run_all(comm)
        if what == "contract over mpi" and comm.size == 2:
            leave_messages(comm)
    else:
        contract.assert_exchange(comm)
        victim = comm.rank == comm.size - 1
        if what == "slow" and victim:
            time.sleep(float(os.environ["SLOW_SECONDS"]))
        elif victim:
            fail(comm, what)
        elif what == "raise while others compute":
            time.sleep(60)
        to, source = contract.ring(comm)
        recv = torch.zeros(300_000)
        comm.exchange(torch.ones(300_000), to, recv, source, 77, "call 5 round 2").wait()
        comm.barrier("last")
    print(f"rank {comm.rank} is done", flush=True)


def leave_messages(comm: Communicator) -> None:
    """Come to the end with receives that nobody waits for: of a message that is here, one that is late, and none.

    Nothing may be written into their buffers after `close`, since they are freed before MPI ends.
    """
    from mpi4py import MPI

    other, late = 1 - comm.rank, comm.rank == 1
    buffers = torch.zeros(3, 1000)
    for tag in range(3):
        comm.exchange(None, other, buffers[tag], other, tag, f"message {tag}")
    comm.barrier("posted")
    comm.exchange(torch.ones(1000), other, None, other, 0, "message 0")
    comm.barrier("sent")
    if late:
        time.sleep(1)
        comm.exchange(torch.ones(1000), other, None, other, 1, "message 1")
    comm.close()
    before = buffers.clone()
    MPI.Finalize()
    print("left alone" if torch.equal(before, buffers) else "written after the end", flush=True)


def fail(comm: Communicator, what: str) -> None:
    """End this rank as ``what`` says, and note the time."""
    print(f"fault at {time.time():.3f}", flush=True)
    if what.startswith("raise"):
        raise ValueError("boo")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(3)
    if what == "abort":
        comm.abort("the loss is nan")


if __name__ == "__main__":
    main(sys.argv[1])
