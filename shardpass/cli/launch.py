"""Where the ranks of a command come from: the launcher that started it, or threads or processes of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import NoReturn, TypeVar

from shardpass.backends import DEFAULT_TIMEOUT
from shardpass.backends.environment import Launch, detect
from shardpass.backends.failure import reason_of
from shardpass.backends.hosts import CHEAP_TENSORS
from shardpass.cli.console import fail, sentence
from shardpass.cli.options import Backend
from shardpass.connection import connect, spawn
from shardpass.core.ranks import Ranks
from shardpass.errors import PeerFailure, shows_tracebacks

C = TypeVar("C")
T = TypeVar("T")
_HEAD_START = 1.0  # seconds for rank 0, so that an error that all ranks find is told once


def starts_threads(backend: Backend, ranks: int | None) -> bool:
    """Whether the command itself starts several ranks, as threads of this process."""
    return (ranks or 1) > 1 and (backend == "threads" or (backend == "auto" and started_by() is None))


def started_by() -> Launch | None:
    """The launcher that has started this process among several; `None` if there is none."""
    launch = detect()
    return launch if launch.kind != "none" and launch.size > 1 else None


def run_ranks(
    work: Callable[[Ranks, C], T], config: C, backend: Backend, ranks: int | None, timeout: float = DEFAULT_TIMEOUT
) -> T:
    """What ``work(comm, config)``, a function at module level, returned on this rank, or on rank 0 if ranks start here.

    ``"auto"`` takes the ranks of the launcher if one started this process, else starts threads. `ranks` is how many to
    start, or to expect.
    """
    if backend in ("threads", "processes") and (launch := started_by()):
        raise ValueError(
            f"--backend {backend} starts ranks itself, but a launcher started {launch.size} processes already "
            f"({launch.source}={launch.size}): leave --backend away, or start the command without the launcher"
        )
    if starts_threads(backend, ranks):
        backend = "threads"
    if backend in ("threads", "processes"):
        return spawn(work, ranks or 1, backend, args=(config,), timeout=timeout)[0]
    comm = connect(backend, ranks=ranks, timeout=timeout)
    try:
        return work(comm, config)
    except Exception as error:
        if shows_tracebacks():
            raise
        _end_in_words(comm, error)
    finally:
        comm.close()


def _end_in_words(comm: Ranks, error: BaseException) -> NoReturn:
    """One sentence from the rank that failed first, then the end of all ranks."""
    if comm.size > 1 and not isinstance(error, PeerFailure):
        if comm.rank:
            sleep(_HEAD_START)
        try:
            comm.abort(reason_of(error))  # over MPI, it prints the reason and does not return
        except PeerFailure as failure:
            error = failure
    first = re.match(r"rank (\d+) failed first", str(error))
    if comm.size > 1 and first and int(first[1]) != comm.rank:  # that rank tells why; one that has died does not
        raise SystemExit(1)
    fail(sentence(error))


def find_program(*names: str) -> str | None:
    """The path of the first of these programs: in this Python environment, whose packages it fits, or else on PATH."""
    folders = (sysconfig.get_path("scripts"), str(Path(sys.executable).parent), None)
    found = (shutil.which(name, path=folder) for name in names for folder in folders)
    return next(filter(None, found), None)


def typed_command() -> str:
    """What to type in this shell for the ``shardpass`` of this Python environment, whether it is active or not."""
    program, active = find_program("shardpass"), shutil.which("shardpass")
    is_active = program is not None and active is not None and os.path.samefile(program, active)
    return "shardpass" if is_active else shlex.join([sys.executable, "-m", "shardpass.cli"])


def launcher_environment() -> dict[str, str]:
    """This process's environment for `mpirun` and `torchrun` on one machine: more ranks than cores, unbound, quiet.

    These are variables and not flags, since each MPI ignores those of the others. Running as root is allowed only if
    this process is root already, as in containers.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    env |= {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMP_NUM_THREADS": "1",
        **{name: os.environ.get(name, value) for name, value in CHEAP_TENSORS.items()},
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def launch_command(launcher: str, ranks: int, module: str) -> list[str] | None:
    """The command that runs ``python -m module`` on `ranks` ranks, without arguments; `None` if there is no mpirun.

    The launcher is ``"mpirun"``, ``"torchrun"``, or ``"none"`` for a plain process.
    """
    if launcher == "none":
        return [sys.executable, "-m", module]
    if launcher == "torchrun":
        flags = ["--standalone", "--nproc-per-node", str(ranks)]
        return [sys.executable, "-m", "torch.distributed.run", *flags, "-m", module]
    program = find_program("mpirun", "mpiexec")
    return None if program is None else [program, "-n", str(ranks), sys.executable, "-m", module]
