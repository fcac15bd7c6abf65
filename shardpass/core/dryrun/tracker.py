"""`MemoryTracker`: every tensor storage that lives while it is on, when it was made, and by what.

It sees what torch's dispatcher sees: each operation's results. What an operation needs inside itself (but for sorts),
and what is not torch's (numba, transports, Python), it does not see. Storages are told to be dead by weak references,
as in `torch.distributed._tools.mem_tracker`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_EXCHANGE = ("core/exchange/walk.py", "core/exchange/windows.py")
_LOOPS = ("core/kernels/attention.py", "core/kernels/scores.py", "core/aggregation/attention.py")
_PACKAGE = "shardpass/"
_SORTS = frozenset({torch.ops.aten.sort.default, torch.ops.aten.sort.stable})
"""Radix sort works between its results and two more vectors like them."""
_DEEPEST = 12  # frames between an operation and the engine's code that asked for it


@dataclass
class Storage:
    """One storage: its bytes, the numbers of the events of its birth and death, and whether it is a message buffer."""

    num_bytes: int
    born: int
    is_message: bool
    died: int | None = None


@dataclass(frozen=True)
class Phase:
    """A stretch of a run: `label` and the number of its first event."""

    label: str
    first: int


class MemoryTracker(TorchDispatchMode):
    """While it is on, a log of storages in `storages` and `events`, cut into `phases`.

    Attributes:
        storages: in order of birth.
        events: ``+k + 1`` for the birth of storage k, ``-k - 1`` for its death.
        phases: in order of time.
        runs_loops: whether attention was computed by the engine's own loops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.phases: list[Phase] = [Phase("", 0)]
        self.runs_loops = False
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self.number(tensor)
        if func in _SORTS:
            self._within(sum(tensor.nbytes for tensor in tensors))
        return out

    def phase(self, label: str) -> None:
        """A new phase begins."""
        self.phases.append(Phase(label, len(self.events)))

    def number(self, tensor: Tensor) -> int:
        """The number of the storage of `tensor`, which counts as made now if it was not known; -1 where it has none."""
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return -1
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            number = self._known[key] = len(self.storages)
            file = _engine_file()
            self.runs_loops = self.runs_loops or file.endswith(_LOOPS)
            self.storages.append(Storage(storage.nbytes(), len(self.events), file.endswith(_EXCHANGE)))
            self.events.append(number + 1)
            weakref.finalize(storage, self._dead, key, number).atexit = False
        return self._known[key]

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the storages of `tensors`."""
        return {self.number(tensor) for tensor in tensors}

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return sum(storage.num_bytes for storage in self.storages if storage.died is None)

    def _within(self, num_bytes: int) -> None:
        """Note that the latest operation needed so much inside itself."""
        self.storages.append(Storage(num_bytes, len(self.events), False, len(self.events) + 1))
        self.events += [len(self.storages), -len(self.storages)]

    def _dead(self, key: int, number: int) -> None:
        if self._known.get(key) == number:
            del self._known[key]
        self.storages[number].died = len(self.events)
        self.events.append(-number - 1)


def _engine_file() -> str:
    """The file of the innermost code of the engine on the stack; empty where there is none."""
    frame = sys._getframe(2)
    for _ in range(_DEEPEST):
        if frame is None:
            break
        name = frame.f_code.co_filename
        if _PACKAGE in name and "/dryrun/" not in name:
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""
