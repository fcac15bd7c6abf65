"""What goes wrong in a run: one fault of one rank, at the n-th point of a kind.

A rank comes to a point of the kind ``"step"`` before each thing that it does with the transport, ``"op"`` before each
operation of torch, ``"file"`` before each thing that it does with the disk, and ``"user"`` in the user's own code.

To add a fault, give `KINDS` its kinds of points and `Injector` a method of its name. `verdict` says what is true then.
"""

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardpass.core.training import checkpoint_file

from .programs import UserError
from .world import Process, World

KINDS = {
    "none": (),
    "kill": ("step", "op", "file", "user"),
    "raise": ("user",),
    "exit": ("user",),
    "memory": ("op",),
    "stop": ("step",),
    "cut": ("step",),
    "unplug": ("step",),
    "disk": ("file",),
    "rot": ("step", "file"),
    "stray": (),
}
STRAYS = {
    "call": ("backward", "sync", "width", "extra", "op"),
    "train": ("backward", "sync", "extra"),
    "checkpoint": ("backward", "sync", "save", "extra"),
    "infer": ("infer",),
    "sample": ("sync",),
}
_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: of `KINDS`.
        rank: that it happens to.
        point: the kind of the point at which it happens.
        number: of the point, from 1 on.
        other: the other rank of a connection.
        seconds: that a stopped rank is stopped for.
        detail: which call is left out, or the number of the error of the disk.
    """

    kind: str = "none"
    rank: int = 0
    point: str = ""
    number: int = 0
    other: int = 0
    seconds: float = 0.0
    detail: Any = None

    def __str__(self) -> str:
        if self.kind == "none":
            return "no fault"
        words = [f"{self.kind} rank {self.rank}"]
        words += [f"at {self.point} {self.number}"] if self.point else []
        words += [f"from rank {self.other}"] if self.kind in ("cut", "unplug") else []
        words += [f"for {self.seconds:.0f} s"] if self.seconds else []
        words += [f"({self.detail})"] if self.detail is not None else []
        return " ".join(words)


def fault_of(draw: random.Random, program_kind: str, counts: list[Counter[str]], timeout: float) -> Fault:
    """A fault for a program whose ranks come to `counts` points of each kind if nothing goes wrong."""
    rank = draw.randrange(len(counts))
    of_disk = [one for one, count in enumerate(counts) if count["file"]]
    kind = draw.choice([*KINDS, "none", "kill", "memory", "stray"])
    if of_disk and draw.random() < 0.6:
        kind, rank = draw.choice(("disk", "kill", "kill", "rot")), draw.choice(of_disk)
    if kind == "none":
        return Fault()
    if kind == "stray":
        return Fault(kind, rank, detail=draw.choice(STRAYS[program_kind]))
    if kind == "rot" and not of_disk:
        return Fault()
    points = [point for point in KINDS[kind] if counts[rank][point]]
    if not points or (len(counts) == 1 and kind in ("cut", "unplug", "stop")):
        return Fault()
    point = "file" if "file" in points and draw.random() < 0.7 else draw.choice(points)
    number = draw.randint(1, counts[rank][point])
    other = (rank + draw.randrange(1, max(2, len(counts)))) % len(counts)
    seconds = draw.choice((0.3, 5.0, 0.8 * timeout, 3.0 * timeout)) if kind == "stop" else 0.0
    detail = draw.choice(_ERRORS) if kind == "disk" else None
    return Fault(kind, rank, point, number, other, seconds, detail)


class Injector:
    """Makes a fault happen, once.

    Attributes:
        happened: the simulated time at which it did, or `None`.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.world: World | None = None
        self.happened: float | None = None

    def at(self, process: Process, point: str) -> None:
        """Called at each point of each rank."""
        fault = self.fault
        if process.rank == fault.rank and point == fault.point and process.counts[point] == fault.number:
            assert self.world is not None
            self.happened = self.world.now
            self.world.note(f"rank {process.rank}: FAULT {fault}")
            getattr(self, f"_{fault.kind}")(self.world, process)

    def strays(self, process: Process, call: str) -> bool:
        """Whether a rank leaves out a call."""
        fault = self.fault
        found = fault.kind == "stray" and fault.rank == process.rank and fault.detail == call
        if found and self.happened is None:
            assert self.world is not None
            self.happened = self.world.now
        return found

    def _kill(self, world: World, process: Process) -> None:
        world.doom(process)

    _rot = _kill  # and `simulate` damages a file before the program runs again

    def _raise(self, world: World, process: Process) -> None:
        raise UserError("boo (simulated)")

    def _exit(self, world: World, process: Process) -> None:
        raise SystemExit(3)

    def _memory(self, world: World, process: Process) -> None:
        raise torch.OutOfMemoryError("out of memory (simulated)")

    def _stop(self, world: World, process: Process) -> None:
        process.stopped_until = world.now + self.fault.seconds

    def _cut(self, world: World, process: Process) -> None:
        world.cut(process.rank, self.fault.other)

    def _unplug(self, world: World, process: Process) -> None:
        world.unplug(process.rank, self.fault.other)

    def _disk(self, world: World, process: Process) -> None:
        raise OSError(self.fault.detail, f"{os.strerror(self.fault.detail)} (simulated)")


class Operations(TorchDispatchMode):
    """Each operation of torch is a point."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__()
        self._world, self._process = world, process

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not self._process.is_doomed:  # what is unwound may still close what it has open
            self._world.point(self._process, "op")
        return func(*args, **(kwargs or {}))


@contextmanager
def disk(world: World) -> Iterator[None]:
    """A block in which each thing that the running rank does with the disk is a point."""

    def point() -> None:
        assert world.current is not None
        world.point(world.current, "file")

    def before(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            point()
            return function(*args, **kwargs)

        return call

    fill = checkpoint_file._fill

    def fill_partly(path: Any, *args: Any) -> None:
        point()
        fill(path, *args)
        content = Path(path).read_bytes()
        try:
            point()  # in the middle of writing
        except BaseException:
            Path(path).write_bytes(content[: len(content) // 2])
            raise

    with ExitStack() as stack:
        for owner, name in (
            (os, "fsync"), (os, "replace"), (os, "posix_fallocate"), (os, "unlink"),
            (Path, "mkdir"), (Path, "write_text"), (shutil, "rmtree"),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, before(name, getattr(owner, name))))
        stack.enter_context(mock.patch.object(checkpoint_file, "_fill", fill_partly))
        yield
