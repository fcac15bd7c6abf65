"""The Communicator protocol: what the engine needs from a transport. Tensors and ranks; never nodes or edges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

T = TypeVar("T")
ReduceOp = Literal["sum", "max", "min", "prod"]


class OfOneProcess:
    """An object that a copy of what refers to it shares, and that cannot be sent to another process."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator belongs to its process; save model.state_dict() instead")

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        return self

    def __copy__(self: T) -> T:
        return self


class Handle(Protocol):
    """A transfer under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer has completed: received rows are in place, and sent rows may be overwritten.

        Raises:
            CommunicationError: the wait has timed out, or the peer has died. The text names the peer, the call and the
                round.
            DivergenceError: the peer's message belongs to another call, direction or round, or has another size.
        """


@runtime_checkable
class Communicator(Protocol):
    """One rank's end of a group of ranks.

    Every rank must call the methods marked *collective* in the same order with matching arguments. Every message and
    every collective carries an identity (sequence number, kind, dtype, size, label). A mismatch raises a
    `DivergenceError` in words on every rank involved. It never causes a hang or a wrong number. All tensors are
    contiguous. Those of exchanges are on ``device``. Those of collectives are there or on the CPU, and so are results.
    """

    rank: int
    size: int
    device: torch.device
    local_ranks: tuple[int, ...]  # ranks on this host, this one included
    processes: tuple[int, ...]  # the rank of each in the default group of torch.distributed; empty if they have none
    shares_memory: bool  # whether rows between ranks of one host may be read by `share` in place of messages
    serves_threads: bool  # whether a duplicate may be used by another thread at the same time; the same on every rank
    collectives: int  # how many collectives this rank has been through; the same on every rank at the same point
    bytes_sent: int  # payload bytes this rank has put on the wire in `exchange` (self-exchanges excluded)

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        """Start to send ``send`` to rank ``to`` and to receive into ``recv`` from rank ``source``. It does not block.

        `None` or an empty tensor means that nothing travels in that direction, and the peer must agree. ``tag`` is in
        ``[0, 2**31)`` and identifies call, direction and round: two messages between the same pair that are under way
        at once have different tags. Both start the messages between them in the same order, since some transports
        match by it. The adjoint of an exchange is the exchange with the peers swapped. If ``to`` and
        ``source`` are this rank, the tensor is copied.
        """

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        """Collective. A new tensor: the elementwise reduction over ranks, the same bits on every rank.

        The input is left unchanged. Half precision is reduced in float32. Shapes and dtypes must agree.
        """

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        """Collective. Every rank's tensor, in rank order. The first dimension may differ between ranks."""

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        """Collective. ``tensor``, overwritten in place with the root's value. Shapes and dtypes must agree."""

    def all_to_all(self, tensors: Sequence[Tensor], label: str = "") -> list[Tensor]:
        """Collective. ``tensors[r]`` goes to rank r; result[r] came from rank r. First dimensions may differ."""

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        """Collective. Every rank's JSON-representable object, in rank order. For set-up and agreement, not for data."""

    def barrier(self, label: str = "") -> None:
        """Collective. Returns when every rank has entered."""

    def duplicate(self, name: str) -> Communicator:
        """Collective. A communicator over the same ranks whose messages never mix with this one's."""

    def share(self, num_bytes: int, label: str = "") -> dict[int, Tensor] | None:
        """Collective. New memory of the ranks of this host, by rank: uint8, ``[num_bytes of that rank]`` each.

        The memory is aligned for every dtype, and lives as long as a tensor on it lives on any rank. Write only to your
        own. What you wrote before a message or a collective, the other ranks see after it. ``num_bytes`` may differ
        between ranks. The result is `None` on every rank if some rank could not have its own memory or map another's.
        """

    def random_lock(self) -> AbstractContextManager[Any]:
        """A context to hold while torch's process-wide generator is replayed. It locks if ranks share a process."""

    def take_turns(self) -> None:
        """From now on, ranks that share a process run one at a time, each with random generators of its own.

        They start so. Every rank calls this between two collectives, and none draws there before it does.
        """

    def run_at_once(self) -> None:
        """Collective where ranks take turns. From now on they run at once, and share the generators of the process."""

    def out_of_turn(self) -> AbstractContextManager[Any]:
        """A block that draws no random numbers, so that other ranks may run meanwhile."""

    def abort(self, reason: str) -> None:
        """End every rank, within seconds, with this rank's ``reason`` shown as the first cause."""

    def close(self) -> None:
        """Release what the communicator holds. Idempotent; not collective."""
