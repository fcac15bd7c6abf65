"""A communicator that writes down every message of another one, for tests and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from shardpass.backends.communicator import Communicator, Handle
from shardpass.backends.delegating import DelegatingCommunicator


@dataclass(frozen=True)
class Message:
    """One thing that this rank gave to the transport, or expected from it, with the bytes that it gives or expects.

    `kind` is ``"send"``, ``"recv"`` or the name of a collective, whose peer and tag are -1. `time` is that of
    `time.perf_counter` when it started.
    """

    kind: str
    peer: int
    num_bytes: int
    tag: int
    label: str
    time: float


class RecordingCommunicator(DelegatingCommunicator):
    """``inner`` with a record of its `messages`, in the order of the calls, those of duplicates included.

    A message without payload is not sent, so it is not written down either.
    """

    def __init__(self, inner: Communicator, messages: list[Message] | None = None) -> None:
        super().__init__(inner)
        self.messages: list[Message] = [] if messages is None else messages

    def before(self, kind: str, label: str, tensors: Sequence[Tensor] = ()) -> None:
        """Write a collective down."""
        if kind != "exchange":
            self.messages.append(Message(kind, -1, sum(t.nbytes for t in tensors), -1, label, perf_counter()))

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        """See `Communicator.exchange`."""
        for kind, tensor, peer in (("recv", recv, source), ("send", send, to)):
            if tensor is not None and tensor.numel() and peer != self.rank:
                self.messages.append(Message(kind, peer, tensor.nbytes, tag, label, perf_counter()))
        return super().exchange(send, to, recv, source, tag, label)

    def duplicate(self, name: str) -> Communicator:
        """See `Communicator.duplicate`."""
        return RecordingCommunicator(super().duplicate(name), self.messages)
