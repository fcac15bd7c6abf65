"""`python -m shardpass.cli.selftest [threads|processes]`: two ranks talk to each other and say whether it worked.

Without an argument the ranks come from the launcher (torchrun, mpirun). `shardpass doctor` runs it.
"""

from __future__ import annotations

import sys

import torch

from shardpass.connection import connect, spawn
from shardpass.core.ranks import Ranks

PASSED = "self-test passed"


def talk(comm: Ranks) -> str:
    """An exchange in a ring and a reduction, both checked; says on what. Collective."""
    torch.set_num_threads(1)
    if comm.size != 2:
        return f"{comm.size} ranks instead of 2"
    sent, received = torch.full((1000,), float(comm.rank)), torch.empty(1000)
    comm.exchange(sent, 1 - comm.rank, received, 1 - comm.rank, 7, "self-test").wait(30.0)
    total = float(comm.all_reduce(received.sum().reshape(1), "sum", "self-test"))
    if not bool((received == 1 - comm.rank).all()) or total != 1000.0:
        return f"wrong values: received {received[0]}, total {total}"
    return f"{PASSED} ({type(comm.inner).__name__})"


def main() -> None:
    """Run and print on rank 0."""
    if len(sys.argv) > 1:
        print(spawn(talk, 2, sys.argv[1], timeout=60.0)[0])  # type: ignore[arg-type]
        return
    comm = connect()
    text = talk(comm)
    if comm.rank == 0:
        print(text, flush=True)
    comm.close()


if __name__ == "__main__":
    # Imported by its name, since spawned processes cannot find functions of a `__main__` that was started with -m.
    from shardpass.cli.selftest import main as run

    run()
