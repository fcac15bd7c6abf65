"""What went wrong first: one record per communicator, read by every wait."""

from __future__ import annotations

import threading

from shardpass.errors import CommunicationError, DivergenceError, PeerFailure


class TransportTimeoutError(Exception):
    """A transfer did not complete in the given time. The base class turns it into words."""


class TransportLostError(Exception):
    """The connection used by a transfer is closed. The base class turns it into words."""


class Failure:
    """The first failure of a communicator; later ones are ignored.

    A failure of the job (``parent``) is a failure of all its communicators; a divergence stays in its own.
    """

    def __init__(self, parent: Failure | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._error: tuple[type[CommunicationError], str] | None = None
        self.happened = threading.Event()
        self.noticed = threading.Event()  # somebody has been told, by an exception
        self._children: list[Failure] = []
        if parent is not None:
            parent._adopt(self)

    def _adopt(self, child: Failure) -> None:
        with self._lock:
            self._children.append(child)
            failed = self.happened.is_set()
        if failed:
            child.happened.set()

    def set(self, kind: type[CommunicationError], text: str) -> bool:
        """Record a failure; False where another one was first."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = (kind, text)
            children = list(self._children)
            self.happened.set()
        for child in children:
            child.happened.set()
        return True

    def error(self) -> CommunicationError | None:
        """A new exception for the recorded failure, or None."""
        if not self.happened.is_set():
            return None
        if self._error is not None:
            kind, text = self._error
            self.noticed.set()
            return kind(text)
        return self._parent.error() if self._parent is not None else None

    def check(self) -> None:
        """Raise the recorded failure, if any."""
        if self.happened.is_set():
            error = self.error()
            if error is not None:
                raise error


KINDS: dict[str, type[CommunicationError]] = {
    "failed": PeerFailure,
    "lost": PeerFailure,
    "diverged": DivergenceError,
}


def first_failure(rank: int, reason: str) -> str:
    """The one sentence every rank shows."""
    return f"rank {rank} failed first: {reason}"


def reason_of(error: BaseException) -> str:
    """``ValueError: words`` for an exception."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
