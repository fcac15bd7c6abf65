"""`train_with_restarts`: a training run whose ranks are started again when it fails, from its last checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from shardpass.cli.config import TrainConfig
from shardpass.cli.console import sentence
from shardpass.cli.launch import run_ranks, started_by
from shardpass.cli.logs import Record
from shardpass.cli.options import Backend
from shardpass.cli.training import train_rank
from shardpass.connection import spawn
from shardpass.errors import CommunicationError, DivergenceError


def train_with_restarts(config: TrainConfig, backend: Backend, ranks: int | None, restarts: int) -> Record:
    """The summary of the run. If it may be started again, its ranks are processes of this machine.

    A rank that dies, or cannot be reached, ends the others; then all are started again. Another error is taken for one
    that a restart would repeat, unless a checkpoint has been written since the ranks were started.
    """
    if not restarts:
        return run_ranks(train_rank, config, backend, ranks)
    _check(config, backend)
    path = Path(config.checkpoint)
    at_first = _written(path)
    for number in range(1, restarts + 2):
        before = _written(path)
        try:
            record: Record = spawn(train_rank, ranks or 1, "processes", args=(config,))[0]
            return record
        except Exception as error:
            now = _written(path)
            is_lost = isinstance(error, CommunicationError) and not isinstance(error, DivergenceError)
            if number > restarts:
                _say(f"the run has failed, and no restart of {restarts} is left")
                raise
            if not is_lost and now == before:
                _say("the ranks are not started again: no checkpoint was written since they were started, so this "
                     "error would come again")  # fmt: skip
                raise
            is_own = now != at_first
            # what is there is of this run, or was to be replaced by it
            config = replace(config, resume=config.resume or is_own, overwrite=not (config.resume or is_own))
            origin = f"from {path}" if config.resume and now else "from the beginning: there is no checkpoint of it yet"
            _say(f"{sentence(error)}. Restart {number} of {restarts}, {origin}")
    raise AssertionError("a run ends in a record or an error")


def _check(config: TrainConfig, backend: Backend) -> None:
    if not config.checkpoint:
        raise ValueError("--restarts starts from the file of --checkpoint: give its name")
    if launch := started_by():
        raise ValueError(
            f"--restarts starts ranks itself, but a launcher started {launch.size} processes ({launch.source}="
            f"{launch.size}): use torchrun --max-restarts, or start mpirun again, both with --resume"
        )
    if backend not in ("auto", "processes"):
        raise ValueError(
            f"--restarts needs ranks that are processes of this machine, but --backend is {backend}: leave it away"
        )


def _written(path: Path) -> tuple[int, int] | None:
    """Which file the checkpoint is: each is written anew. `None` if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _say(text: str) -> None:
    print(f"shardpass: {text}", file=sys.stderr, flush=True)
