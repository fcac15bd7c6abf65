"""A communicator that passes every call on to another one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardpass.backends.communicator import Communicator, Handle, OfOneProcess, ReduceOp


class DelegatingCommunicator(OfOneProcess, Communicator):
    """Passes every call on to ``inner``, on which tensors travel. Derive from it to add something to a few calls."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner

    rank: int = property(lambda self: self.inner.rank)  # type: ignore[assignment]
    size: int = property(lambda self: self.inner.size)  # type: ignore[assignment]
    device: torch.device = property(lambda self: self.inner.device)  # type: ignore[assignment]
    local_ranks: tuple[int, ...] = property(lambda self: self.inner.local_ranks)  # type: ignore[assignment]
    processes: tuple[int, ...] = property(lambda self: self.inner.processes)  # type: ignore[assignment]
    serves_threads: bool = property(lambda self: self.inner.serves_threads)  # type: ignore[assignment]
    bytes_sent: int = property(lambda self: self.inner.bytes_sent)  # type: ignore[assignment]
    collectives: int = property(lambda self: self.inner.collectives)  # type: ignore[assignment]
    shares_memory: bool = property(lambda self: self.inner.shares_memory)  # type: ignore[assignment]

    def before(self, kind: str, label: str, tensors: Sequence[Tensor] = ()) -> None:
        """Called before each call that communicates. It does nothing here.

        Args:
            kind: the name of the method.
            label: that the caller gave; the name for a duplicate.
            tensors: that this rank contributes; none for an exchange.
        """

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        self.before("exchange", label)
        return self.inner.exchange(send, to, recv, source, tag, label)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        self.before("all_reduce", label, [tensor])
        return self.inner.all_reduce(tensor, op, label)

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        self.before("all_gather", label, [tensor])
        return self.inner.all_gather(tensor, label)

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        self.before("broadcast", label, [tensor])
        return self.inner.broadcast(tensor, root, label)

    def all_to_all(self, tensors: Sequence[Tensor], label: str = "") -> list[Tensor]:
        self.before("all_to_all", label, tensors)
        return self.inner.all_to_all(tensors, label)

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        self.before("all_gather_object", label)
        return self.inner.all_gather_object(obj, label)

    def barrier(self, label: str = "") -> None:
        self.before("barrier", label)
        self.inner.barrier(label)

    def share(self, num_bytes: int, label: str = "") -> dict[int, Tensor] | None:
        self.before("share", label)
        return self.inner.share(num_bytes, label)

    def duplicate(self, name: str) -> Communicator:
        self.before("duplicate", name)
        return self.inner.duplicate(name)

    def random_lock(self) -> AbstractContextManager[Any]:
        return self.inner.random_lock()

    def take_turns(self) -> None:
        self.inner.take_turns()

    def run_at_once(self) -> None:
        self.inner.run_at_once()

    def out_of_turn(self) -> AbstractContextManager[Any]:
        return self.inner.out_of_turn()

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()
