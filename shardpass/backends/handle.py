"""What `exchange` returns: a handle on one message in, one message out, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardpass.backends.deadlock import Position
from shardpass.backends.raw import RawCommunicator

Step = tuple[Position, Callable[[float], None]]
"""Where this rank is while it waits for a message, and what waits for it; the seconds are for each of its parts."""


class ExchangeHandle:
    """A transfer under way.

    Args:
        comm: the communicator on which the messages travel.
        steps: for each message; none if the transfer has completed already.
    """

    def __init__(self, comm: RawCommunicator, steps: Sequence[Step] = ()) -> None:
        self._comm = comm
        self._steps = list(steps)
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when both messages have completed; see `Handle.wait`."""
        if self._error is not None:
            raise self._error
        try:
            while self._steps:
                position, complete = self._steps[0]
                with self._comm.waiting(position, timeout) as seconds:
                    complete(seconds)
                del self._steps[0]
        except BaseException as error:
            self._error = error
            raise
