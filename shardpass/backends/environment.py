"""What the launcher of this process has left in its environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                "SLURM_LOCALID")  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        kind: ``"torchrun"`` stands for anything that sets its variables.
        size: number of processes that the launcher started.
        rank: of this process; -1 if only MPI knows it.
        host, port: where rank 0 listens; empty and 0 for MPI and none.
        source: the variable that the size was read from.
    """

    kind: Literal["torchrun", "mpi", "srun", "none"]
    size: int
    rank: int = 0
    host: str = ""
    port: int = 0
    source: str = ""


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """How the process with the environment ``environ`` (default: this process) was started.

    Raises:
        ValueError: torchrun's variables are incomplete or contradict each other.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torchrun(env)
    for name in _MPI_SIZES:
        if name in env:
            return Launch("mpi", int(env[name]), -1, source=name)
    if "SLURM_PROCID" in env:
        return _srun(env)
    return Launch("none", 1)


def local_rank() -> int | None:
    """The number of this process among those of its host, or `None` if the launcher has not set one."""
    return next((int(os.environ[name]) for name in _LOCAL_RANKS if name in os.environ), None)


def _torchrun(env: Mapping[str, str]) -> Launch:
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but ranks are numbered from 0 to WORLD_SIZE - 1: correct "
            f"them, start with torchrun, or unset both to run one process"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing and size > 1:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but not {' and '.join(missing)}: set the address and "
            f"port where rank 0 is reached, or start with torchrun, which does"
        )
    host, port = env.get("MASTER_ADDR", ""), _integer(env, "MASTER_PORT", "0")
    return Launch("torchrun", size, rank, host, port, "WORLD_SIZE")


def _integer(env: Mapping[str, str], name: str, otherwise: str = "") -> int:
    text = env.get(name, otherwise)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name} is {text!r}, but it must be an integer") from None


def _srun(env: Mapping[str, str]) -> Launch:
    """An srun step. A batch script without srun has SLURM_PROCID too, but is one process whatever SLURM_NTASKS says."""
    if "SLURM_STEP_NUM_TASKS" in env:
        source = "SLURM_STEP_NUM_TASKS"
    elif "SLURM_STEP_ID" in env or "SLURM_STEPID" in env:
        source = "SLURM_NTASKS"
    else:
        return Launch("none", 1)
    size = int(env.get(source, "1"))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    host = env.get("MASTER_ADDR") or first_host(nodes) or env.get("SLURM_LAUNCH_NODE_IPADDR", "")
    job = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "0")))
    port = int(env.get("MASTER_PORT", str(20000 + job % 20000)))
    return Launch("srun", size, int(env["SLURM_PROCID"]), host, port, source)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-05,9],login`` gives ``gpu03``."""
    match = re.match(r"([^,\[]*)(?:\[([0-9]+)[^\]]*\]([^,\[]*))?", nodes.strip())
    return "".join(group or "" for group in match.groups()) if match else ""
