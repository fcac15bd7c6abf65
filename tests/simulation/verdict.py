"""Whether a run has ended well: with the right numbers, or with one true sentence on every rank that is left."""

import re
from typing import Any

import numpy as np
import torch

from shardpass.errors import CheckpointError, CommunicationError, PeerFailure, ShardpassError

from .programs import UserError
from .world import Process

KILLS = ("kill", "rot")


def judge(run: Any, right: Any, output: np.ndarray | None, names: list[str], is_resumed: bool = False) -> list[str]:
    """What is wrong with how a run has ended.

    Args:
        run: a `Run`.
        right: the `Undisturbed` one.
        output: what is in the file that it writes.
        names: of what it has left in its folder.
        is_resumed: whether it continued another one.
    """
    world, problems = run.world, list(run.world.problems)
    for process in world.processes:
        problems += [f"rank {process.rank}: {text}" for text in _of_rank(run, process, right, is_resumed)]
    if output is not None and not np.array_equal(output, right.output):
        problems.append("the output file holds other numbers")
    is_good = all(process.error is None and process.state == "ended" for process in world.processes)
    if output is None and right.output is not None and is_good and run.fault.kind != "stray":
        problems.append("there is no output file")
    return problems + _left_behind(run, names)


def _left_behind(run: Any, names: list[str]) -> list[str]:
    """Files that should not be there: a rank that is killed may leave some, and an inference keeps its journal."""
    kept = {"checkpoint", "out.npy"}
    failed = any(process.error is not None or process.state == "killed" for process in run.world.processes)
    if failed:
        kept.add(".out.npy.partial")
    if run.fault.kind in (*KILLS, "disk"):  # what cannot be removed stays
        kept |= {".out.npy.writing", ".out.npy.partial"}
    found = [name for name in names if name not in kept]
    if run.fault.kind in KILLS:
        found = [name for name in found if not re.fullmatch(r"\.checkpoint\.\d+\.tmp", name)]
    return [f"{name} is left behind" for name in found]


def _of_rank(run: Any, process: Process, right: Any, is_resumed: bool) -> list[str]:
    fault, error = run.fault, process.error
    if process.state == "killed":
        if "hang" in run.world.problems or (fault.kind in KILLS and fault.rank == process.rank):
            return []
        return ["was killed, and nobody asked for that"]
    if error is None:
        if fault.kind == "stray" or process.result is None:
            return []
        return _numbers(process.result, right.results[process.rank], is_resumed)
    if run.happened is None:
        return [f"nothing went wrong, but it ended with {type(error).__name__}: {error}"]
    if not _is_true(fault, process.rank, error, run):
        return [f"a sentence that is not true of {fault}: {type(error).__name__}: {error}"]
    return []


def _numbers(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor], is_resumed: bool) -> list[str]:
    names = [name for name in right if name in found] if is_resumed else list(right)
    different = [name for name in names if name not in found or not torch.equal(found[name], right[name])]
    return [f"other numbers: {', '.join(different[:4])}"] if different else []


def _is_true(fault: Any, rank: int, error: BaseException, run: Any) -> bool:
    """Whether an error tells what has happened."""
    text = str(error)
    first = re.match(r"rank (\d+) (failed|died|ended|was lost) first", text)
    named = int(first.group(1)) if first else None
    about = (fault.rank, fault.other)
    if fault.kind == "raise":
        own = isinstance(error, UserError)
        return own if rank == fault.rank else named == fault.rank and "UserError: boo" in text
    if fault.kind == "exit":
        if rank == fault.rank:
            return isinstance(error, SystemExit)
        return named == fault.rank and "ended first" in text
    if fault.kind == "memory":
        if rank == fault.rank:
            return "out of memory (simulated)" in text
        return "out of memory (simulated)" in text and (named == fault.rank or f"rank {fault.rank}" in text)
    if fault.kind == "disk":
        is_ours = isinstance(error, (OSError, CheckpointError, PeerFailure))
        return is_ours and "(simulated)" in text and (rank == fault.rank or f"rank {fault.rank}" in text)
    if fault.kind == "rot" and not fault.point:  # the program that runs again finds the damage
        return "CheckpointError" in (type(error).__name__, *text.split(": "))
    if fault.kind in KILLS:
        lost = f"lost its connection with rank {fault.rank}" in text
        return isinstance(error, CommunicationError) and (named == fault.rank or lost)
    if fault.kind == "stop":
        return (
            isinstance(error, CommunicationError)
            and fault.seconds > run.world.timeout / 2
            and (f"rank {fault.rank}" in text or "one of them is slower than that" in text)  # once it goes on
        )
    if fault.kind in ("cut", "unplug"):
        return isinstance(error, CommunicationError) and all(f"rank {other}" in text for other in about)
    if fault.kind == "stray":
        is_named = named == fault.rank or "DivergenceError" in text
        is_ours = isinstance(error, ShardpassError) and (not isinstance(error, PeerFailure) or is_named)
        return is_ours and "has waited" not in text
    return False
