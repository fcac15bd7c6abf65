"""A transfer under way: the handle that `exchange` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from shardpass.backends.deadlock import Position
from shardpass.backends.identity import Header

if TYPE_CHECKING:
    from shardpass.backends.base import BaseCommunicator


class Pending(Protocol):
    """One raw message under way."""

    def wait(self, timeout: float) -> None:
        """Return when it has completed.

        Raises:
            TransportTimeoutError, TransportLostError: for the base class to put into words.
            CommunicationError: the failure of another rank.
        """
        ...


class DoneHandle:
    """A transfer that has completed already."""

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


class ExchangeHandle:
    """One message out, one message in, or both."""

    def __init__(self, comm: BaseCommunicator) -> None:
        self._comm = comm
        self._outgoing: tuple[Header, int, int, list[Pending], Tensor] | None = None
        self._incoming: tuple[Header, int, int, Pending, Tensor, list[Pending], Callable[[], None]] | None = None
        self._error: BaseException | None = None

    def expect(
        self, header: Header, source: int, count: int, arriving: Pending, raw: Tensor, pieces: list[Pending],
        finish: Callable[[], None],
    ) -> None:  # fmt: skip
        """Note what is received: its header arrives in ``raw``; ``finish`` puts the payload in place."""
        self._incoming = (header, source, count, arriving, raw, pieces, finish)

    def offer(self, header: Header, to: int, count: int, pieces: list[Pending], payload: Tensor) -> None:
        """Note what is sent; ``payload`` is kept alive until it has gone."""
        self._outgoing = (header, to, count, pieces, payload)

    def wait(self, timeout: float | None = None) -> None:
        """Return when both directions have completed; see `Handle.wait`."""
        if self._error is not None:
            raise self._error
        try:
            self._receive(timeout)
            self._send(timeout)
        except BaseException as error:
            self._error = error
            raise

    def _receive(self, timeout: float | None) -> None:
        if self._incoming is None:
            return
        header, source, count, arriving, raw, pieces, finish = self._incoming
        text = f"{header.describe()} from rank {source}"
        with self._comm.waiting(Position(text, "recv", header.number, source, count), timeout) as wait:
            wait(arriving)
            self._comm.check_header(header, bytes(raw.numpy().tobytes()), source)
            for piece in pieces:
                wait(piece)
        finish()
        self._incoming = None

    def _send(self, timeout: float | None) -> None:
        if self._outgoing is None:
            return
        header, to, count, pieces, _payload = self._outgoing
        text = f"{header.describe()} to rank {to}"
        with self._comm.waiting(Position(text, "send", header.number, to, count), timeout) as wait:
            for piece in pieces:
                wait(piece)
        self._outgoing = None
