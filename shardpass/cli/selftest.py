"""`python -m shardpass.cli.selftest [threads|processes]`: two ranks talk to each other and say whether it worked.

Without an argument the ranks come from the launcher (torchrun, mpirun). `shardpass doctor` runs it.
"""

from __future__ import annotations

import sys

import torch

from shardpass.cli.launch import run_ranks
from shardpass.cli.proof.links import measure
from shardpass.core.ranks import Ranks

PASSED = "self-test passed"


def talk(comm: Ranks, config: None) -> None:
    """Exchange messages in a ring and reduce a number; rank 0 prints whether all of it was right. Collective."""
    torch.set_num_threads(1)
    is_right = all(link.is_right for link in measure(comm)) and int(comm.all_reduce(torch.ones(1))) == comm.size
    if comm.rank == 0:
        print(f"{PASSED} ({type(comm.inner).__name__})" if is_right else "wrong values", flush=True)


if __name__ == "__main__":
    # Imported by its name, since spawned processes cannot find functions of a `__main__` that was started with -m.
    from shardpass.cli import selftest

    run_ranks(selftest.talk, None, sys.argv[1] if len(sys.argv) > 1 else "auto", 2, 60.0)  # type: ignore[arg-type]
