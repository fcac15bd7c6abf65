"""`DryCommunicator`: one rank of many without the others, for a dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardpass.backends.communicator import Communicator, Handle, ReduceOp


class _Done:
    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


class DryCommunicator:
    """Rank 0 of `size` ranks that are all alike: it receives what it would if every rank did what it does.

    Rows that others would send are zeros. Collectives answer from this rank's own tensors. Ranks are alike up to a
    rotation of the ring: what rank p sends to this one is what this one sends to rank ``-p``. All shared memory is this
    rank's own, so that the memory of each rank counts once, at its owner.

    Args:
        size: number of ranks to pretend.
        notify: called with the label of each message and collective, before it.
        per_host: how many of the ranks share this one's host and its memory.
    """

    def __init__(self, size: int, notify: Callable[[str], None] = lambda label: None, per_host: int = 1) -> None:
        self.rank, self.size, self.device = 0, size, torch.device("cpu")
        self.local_ranks: tuple[int, ...] = tuple(range(min(per_host, size)))
        self.processes: tuple[int, ...] = ()
        self.bytes_sent = self.collectives = 0
        self.shares_memory = len(self.local_ranks) > 1
        self.serves_threads = False
        self._notify = notify

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        """Count what is sent, and fill what is received with zeros."""
        self._notify(label)
        if send is not None and to != self.rank:
            self.bytes_sent += send.nbytes
        if recv is not None:
            recv.zero_()
        return _Done()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        """The reduction of `size` equal tensors."""
        self._notify(label)
        tensor = tensor.detach()
        if tensor.dtype == torch.bool or op in ("max", "min"):
            return tensor.clone()
        return tensor * self.size if op == "sum" else tensor**self.size

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        """`size` copies of `tensor`; in a halo plan, the numbers per rank rotated as the ranks are. Moments differ."""
        self._notify(label)
        if label == "halo plan":
            per_rank, rest = tensor[: self.size], tensor[self.size :]
            return [torch.cat([per_rank.roll(rank), rest]) for rank in range(self.size)]
        if label.startswith(("batch norm", "moments")):  # equal ones say that all ranks have the same rows
            return [tensor.detach() + rank for rank in range(self.size)]
        return [tensor.detach().clone() for _ in range(self.size)]

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        """`tensor` as it is."""
        self._notify(label)
        return tensor

    def all_to_all(self, tensors: Sequence[Tensor], label: str = "") -> list[Tensor]:
        """From rank p what this rank sends to rank ``-p``, counted on its host alone for rows that its host shares."""
        self._notify(label)
        local = len(self.local_ranks)
        if label == "halo plan: shared rows":
            order = [-rank % local if rank < local else rank for rank in range(self.size)]
        else:
            order = [-rank % self.size for rank in range(self.size)]
        return [tensors[rank].detach().clone() for rank in order]

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        """`obj`, `size` times."""
        self._notify(label)
        return [obj] * self.size

    def barrier(self, label: str = "") -> None:
        """Return at once."""

    def duplicate(self, name: str) -> Communicator:
        """Another dry communicator like this one."""
        return DryCommunicator(self.size, self._notify, len(self.local_ranks))

    def share(self, num_bytes: int, label: str = "") -> dict[int, Tensor] | None:
        """This rank's memory, for every rank of the host."""
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return dict.fromkeys(self.local_ranks, memory)

    def random_lock(self) -> AbstractContextManager[Any]:
        """Nothing is locked."""
        return nullcontext()

    def take_turns(self) -> None:
        """There is no other rank."""

    def run_at_once(self) -> None:
        """There is no other rank."""

    def out_of_turn(self) -> AbstractContextManager[Any]:
        """There is no other rank."""
        return nullcontext()

    def abort(self, reason: str) -> None:
        """Raise, since there is no other rank to end."""
        raise RuntimeError(reason)

    def close(self) -> None:
        """There is nothing to release."""
