"""The Communicator protocol: what the engine needs from a transport. Tensors and ranks; never nodes or edges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

ReduceOp = Literal["sum", "max", "min", "prod"]


class Handle(Protocol):
    """A transfer under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer has completed (received rows are in place, sent rows may be overwritten).

        Raises:
            CommunicationError: on a time-out or a dead peer; the message names the peer, the call and the round.
            DivergenceError: when the peer's message belongs to another call, direction or round, or has another size.
        """
        ...


@runtime_checkable
class Communicator(Protocol):
    """One rank's end of a group of ranks.

    Methods marked *collective* must be called by every rank in the same order with matching arguments. Every message
    and every collective carries an identity (sequence number, kind, dtype, size, label), and a mismatch is a
    `DivergenceError` on every rank involved, in words; it is never a hang and never a wrong number. All tensors are
    contiguous and on ``device``; results are on ``device``.
    """

    rank: int
    size: int
    device: torch.device
    local_ranks: tuple[int, ...]  # ranks on this host, this one included
    shares_memory: bool  # whether rows between ranks of one host may be read by `share` in place of messages
    serves_threads: bool  # whether a duplicate may be used by another thread at the same time; the same on every rank
    bytes_sent: int  # payload bytes this rank has put on the wire in `exchange` (self-exchanges excluded)

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        """Start sending ``send`` to rank ``to`` and receiving into ``recv`` from rank ``source``; non-blocking.

        ``None`` (or an empty tensor) means: nothing in that direction; the peer must agree. ``tag`` is in
        ``[0, 2**31)`` and identifies call, direction and round; two messages between a pair that are under way at once
        have different tags. The adjoint of an exchange is the exchange with the peers swapped. ``to == source == rank``
        copies locally.
        """
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        """Collective. A new tensor: the elementwise reduction over ranks, the same bits on every rank.

        The input is left unchanged. Half precision is reduced in float32. Shapes and dtypes must agree.
        """
        ...

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        """Collective. Every rank's tensor, in rank order. The first dimension may differ between ranks."""
        ...

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        """Collective. ``tensor``, overwritten in place with the root's value. Shapes and dtypes must agree."""
        ...

    def all_to_all(self, tensors: Sequence[Tensor], label: str = "") -> list[Tensor]:
        """Collective. ``tensors[r]`` goes to rank r; result[r] came from rank r. First dimensions may differ."""
        ...

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        """Collective. Every rank's JSON-representable object, in rank order. For set-up and agreement, not for data."""
        ...

    def barrier(self, label: str = "") -> None:
        """Collective. Returns when every rank has entered."""
        ...

    def duplicate(self, name: str) -> Communicator:
        """Collective. A communicator over the same ranks whose messages never mix with this one's."""
        ...

    def background(self) -> Communicator | None:
        """Collective where it makes one: a duplicate for one other thread of this rank, which is kept.

        None, on every rank, where there is no other rank or where the transport may not be called by two threads at
        once. A new one is made on the ranks that have given theirs up.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Have every rank's present and later calls on this communicator raise `DivergenceError` with ``reason``.

        Not collective; from any thread. Duplicates, and what this is a duplicate of, are not concerned.
        """
        ...

    def share(self, num_bytes: int, label: str = "") -> dict[int, Tensor] | None:
        """Collective. New memory of the ranks of this host, by rank: uint8, ``[num_bytes of that rank]`` each.

        It is aligned for every dtype and lives as long as a tensor on it, on any rank. Write to your own alone; what
        you wrote before a message or a collective, the others see after it. None, on every rank, where some rank could
        not have its own or map another's. `num_bytes` may differ.
        """
        ...

    def random_lock(self) -> AbstractContextManager[Any]:
        """Held while torch's process-wide generator is replayed: a real lock where ranks share a process."""
        ...

    def let_first_rank_go(self) -> None:
        """Where ranks share a process: return once rank 0 has entered its next collective. Elsewhere at once.

        So that what rank 0 draws from the shared generator until then depends on nothing the other ranks do.
        """
        ...

    def abort(self, reason: str) -> None:
        """End every rank, within seconds, with this rank's ``reason`` shown as the first cause."""
        ...

    def close(self) -> None:
        """Release what the communicator holds. Idempotent; not collective."""
        ...
