"""The first failure of a communicator, which every wait looks at, and the words that ranks use for failures."""

from __future__ import annotations

import contextlib
import threading

from shardpass.errors import CommunicationError, advice

_MAX_REASON = 4000


class TransportTimeoutError(Exception):
    """A transfer has not completed in the given time. `RawCommunicator.waiting` puts it into words."""


class TransportLostError(Exception):
    """The connection that a transfer uses is closed. `RawCommunicator.waiting` puts it into words."""


class Failure:
    """The first failure of a communicator. Later ones are ignored. `noticed` says whether somebody was given it.

    The failure of the whole job, `parent`, is one of each of its communicators. A divergence concerns only the
    communicator on which it happened.
    """

    def __init__(self, parent: Failure | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._first: tuple[type[CommunicationError], str] | None = None
        self.noticed = False

    @property
    def happened(self) -> bool:
        """Whether the communicator or its job has failed."""
        return self._first is not None or (self._parent is not None and self._parent.happened)

    def set(self, kind: type[CommunicationError], text: str) -> bool:
        """Record a failure. Returns False if another one was first."""
        with self._lock:
            if self._first is not None:
                return False
            self._first = (kind, text)
            return True

    def error(self) -> CommunicationError | None:
        """A new exception for the first failure, or `None` if nothing has failed."""
        if self._first is not None:
            self.noticed = True
            kind, text = self._first
            return kind(text)
        return None if self._parent is None else self._parent.error()

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        error = self.error()
        if error is not None:
            raise error


def first_failure(rank: int, reason: str) -> str:
    """The sentence that every rank shows when ``rank`` has failed."""
    return f"rank {rank} failed first: {reason}"


def reason_of(error: BaseException) -> str:
    """An exception in words, such as ``ValueError: the text``. The middle of a very long text is left out."""
    text = str(error)
    if len(text) > _MAX_REASON:
        text = f"{text[: _MAX_REASON // 2]} [... {len(text) - _MAX_REASON} characters ...] {text[-_MAX_REASON // 2 :]}"
    told = advice(error)
    text += f" ({told})" if told else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def add_note(error: BaseException, text: str) -> None:
    """Add a note to ``error``, unless it is empty or there already."""
    if text and text not in getattr(error, "__notes__", ()) and hasattr(error, "add_note"):  # from Python 3.11 on
        with contextlib.suppress(Exception):
            error.add_note(text)
