"""`MemoryTracker`: the tensor storages that live while it is on, when each was made and when it was freed.

The tracker sees what torch's dispatcher sees, which is the results of operations. It does not see what an operation
needs inside itself (sorts excepted) or what is not torch's (numba, transports, Python). Weak references tell it when a
storage is freed, as in `torch.distributed._tools.mem_tracker`. What a result is for, the engine says with
`torch.profiler.record_function`: the tracker reads those names as a profiler does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardpass.core.exchange import MESSAGE_BUFFER
from shardpass.core.kernels import COMPILED_LOOPS
from shardpass.core.ranks import torch_private

_SORTS = frozenset({torch.ops.aten.sort.default, torch.ops.aten.sort.stable})
"""A radix sort works between its results and two more tensors of the same size."""


@dataclass
class Storage:
    """One storage: its bytes, the events of its birth and death, and whether it is memory for messages."""

    num_bytes: int
    born: int
    is_message: bool
    died: int | None = None


class MemoryTracker(torch_private.TorchDispatchMode):
    """While it is on, it logs storages in `storages` and `events`, cut into `phases`.

    Attributes:
        storages: in order of birth.
        events: ``+k + 1`` for the birth of storage k, ``-k - 1`` for its death.
        phases: in order of time, each with its label and the number of its first event.
        runs_compiled_loops: whether loops compiled by numba have run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.phases: list[tuple[str, int]] = [("", 0)]
        self.runs_compiled_loops = False
        self._makes_message_buffer = False
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch_private.RECORD_ENTER or func is torch_private.RECORD_EXIT:
            self._makes_message_buffer = func is torch_private.RECORD_ENTER and args[0] == MESSAGE_BUFFER
            self.runs_compiled_loops |= func is torch_private.RECORD_ENTER and args[0] == COMPILED_LOOPS
            return out
        leaves = [out] if isinstance(out, Tensor) else torch_private.tree_leaves(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self.number(tensor)
        if func in _SORTS:
            self._inside_operation(sum(tensor.nbytes for tensor in tensors))
        return out

    def phase(self, label: str) -> None:
        """A new phase begins."""
        self.phases.append((label, len(self.events)))

    def number(self, tensor: Tensor) -> int:
        """The number of the storage of `tensor`, or -1 if it has none. A storage not seen before counts as made now."""
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return -1
        storage = tensor.untyped_storage()
        key = torch_private.storage_number(storage)
        if key not in self._known:
            number = self._known[key] = len(self.storages)
            self.storages.append(Storage(storage.nbytes(), len(self.events), self._makes_message_buffer))
            self.events.append(number + 1)
            weakref.finalize(storage, self._freed, key, number).atexit = False
        return self._known[key]

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the storages of `tensors`."""
        return {self.number(tensor) for tensor in tensors}

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return sum(storage.num_bytes for storage in self.storages if storage.died is None)

    def _inside_operation(self, num_bytes: int) -> None:
        """Note that the latest operation needed `num_bytes` inside itself."""
        self.storages.append(Storage(num_bytes, len(self.events), False, len(self.events) + 1))
        self.events += [len(self.storages), -len(self.storages)]

    def _freed(self, key: int, number: int) -> None:
        if self._known.get(key) == number:
            del self._known[key]
        self.storages[number].died = len(self.events)
        self.events.append(-number - 1)
