"""A communicator that writes down every message of another one, for tests and traces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardpass.backends.communicator import Communicator, Handle, ReduceOp


@dataclass(frozen=True)
class Message:
    """One thing this rank gave to, or expected from, the transport.

    Attributes:
        kind: ``"send"``, ``"recv"`` or the name of the collective.
        peer: the other rank; -1 for collectives.
        num_bytes: of this rank's payload; for collectives, of its input.
        tag: -1 for collectives.
        label: as given.
        time: `time.perf_counter` when it started.
    """

    kind: str
    peer: int
    num_bytes: int
    tag: int
    label: str
    time: float


class RecordingCommunicator:
    """``inner`` with a record of its messages; everything else is passed on.

    Attributes:
        messages: in the order of the calls; those of duplicates are included. Messages without payload are not
            written down, since they are not sent.
    """

    def __init__(self, inner: Communicator, messages: list[Message] | None = None) -> None:
        self.inner = inner
        self.messages: list[Message] = [] if messages is None else messages

    rank: int = property(lambda self: self.inner.rank)  # type: ignore[assignment]
    size: int = property(lambda self: self.inner.size)  # type: ignore[assignment]
    device: torch.device = property(lambda self: self.inner.device)  # type: ignore[assignment]
    local_ranks: tuple[int, ...] = property(lambda self: self.inner.local_ranks)  # type: ignore[assignment]
    serves_threads: bool = property(lambda self: self.inner.serves_threads)  # type: ignore[assignment]
    bytes_sent: int = property(lambda self: self.inner.bytes_sent)  # type: ignore[assignment]
    shares_memory: bool = property(lambda self: self.inner.shares_memory)  # type: ignore[assignment]

    def _note(self, kind: str, label: str, tensors: Sequence[Tensor] = (), peer: int = -1, tag: int = -1) -> None:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.messages.append(Message(kind, peer, num_bytes, tag, label, perf_counter()))

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        """See `Communicator.exchange`."""
        if recv is not None and recv.numel() and source != self.rank:
            self._note("recv", label, [recv], source, tag)
        if send is not None and send.numel() and to != self.rank:
            self._note("send", label, [send], to, tag)
        return self.inner.exchange(send, to, recv, source, tag, label)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        """See `Communicator.all_reduce`."""
        self._note("all_reduce", label, [tensor])
        return self.inner.all_reduce(tensor, op, label)

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        """See `Communicator.all_gather`."""
        self._note("all_gather", label, [tensor])
        return self.inner.all_gather(tensor, label)

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        """See `Communicator.broadcast`."""
        self._note("broadcast", label, [tensor])
        return self.inner.broadcast(tensor, root, label)

    def all_to_all(self, tensors: Sequence[Tensor], label: str = "") -> list[Tensor]:
        """See `Communicator.all_to_all`."""
        self._note("all_to_all", label, tensors)
        return self.inner.all_to_all(tensors, label)

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        """See `Communicator.all_gather_object`."""
        self._note("all_gather_object", label)
        return self.inner.all_gather_object(obj, label)

    def barrier(self, label: str = "") -> None:
        """See `Communicator.barrier`."""
        self._note("barrier", label)
        self.inner.barrier(label)

    def duplicate(self, name: str) -> Communicator:
        """See `Communicator.duplicate`."""
        self._note("duplicate", name)
        return RecordingCommunicator(self.inner.duplicate(name), self.messages)

    def background(self) -> Communicator | None:
        """See `Communicator.background`."""
        twin = self.inner.background()
        return None if twin is None else RecordingCommunicator(twin, self.messages)

    def give_up(self, reason: str) -> None:
        """See `Communicator.give_up`."""
        self.inner.give_up(reason)

    def share(self, num_bytes: int, label: str = "") -> dict[int, Tensor] | None:
        """See `Communicator.share`."""
        self._note("share", label)
        return self.inner.share(num_bytes, label)

    def random_lock(self) -> AbstractContextManager[Any]:
        """See `Communicator.random_lock`."""
        return self.inner.random_lock()

    def let_first_rank_go(self) -> None:
        """See `Communicator.let_first_rank_go`."""
        self.inner.let_first_rank_go()

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`."""
        self.inner.abort(reason)

    def close(self) -> None:
        """See `Communicator.close`."""
        self.inner.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator belongs to its process; save model.state_dict() instead")

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordingCommunicator:
        return self
