"""What ranks tell each other beside their calls, and what follows from it: no thread, no socket, no clock of its own.

[Note: news] Ranks tell their failures, where they wait, and that they end in peace. The first failure is recorded and
passed on, and the connections that carry tensors are broken, so that the main thread wakes up with the reason, wherever
it is blocked. A rank that computes for an hour is alive.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.failure import Failure
from shardpass.backends.mesh import beat_seconds
from shardpass.backends.primitives import Clock
from shardpass.errors import CommunicationError, DivergenceError, PeerFailure

_EXPLAIN_SECONDS = 5.0  # how long the reason of a closed connection may take to come
_ENDED_SECONDS = 1.0  # how long to wait for a failure that explains more than a rank which has ended in peace


class Listener(Protocol):
    """The connection with one other rank, as far as records are sent on it."""

    def send(self, record: Sequence[Any]) -> None:
        """Send a record, without blocking."""


class News:
    """The ranks of one job as this rank knows them from what they have told.

    Args:
        peers: the connections, by rank.
        rank: of this process.
        host_timeout: seconds after which a host that does not answer is lost.
        clock: by which they are counted.

    Attributes:
        ended: by rank: when it said that it ends in peace.
        published: by communicator and rank: where the rank waits.
    """

    def __init__(self, peers: Mapping[int, Listener], rank: int, host_timeout: float, clock: Clock = time) -> None:
        self.failure = Failure()
        self.ended: dict[int, float] = {}
        self.published: dict[str, dict[int, str]] = defaultdict(dict)
        self._listeners, self._rank, self._host_timeout, self._clock = peers, rank, host_timeout, clock
        self._heard = dict.fromkeys(peers, clock.monotonic())
        self._silent: set[int] = set()
        self._next_beat = 0.0
        self._diverged: dict[str, str] = {}
        self._comms: weakref.WeakValueDictionary[str, InformedCommunicator] = weakref.WeakValueDictionary()

    # ---- telling

    def register(self, comm: InformedCommunicator) -> None:
        """Have ``comm`` broken when the job fails, and its waits looked at."""
        self._comms[comm.path] = comm
        if comm.path in self._diverged:
            comm.failure.set(DivergenceError, self._diverged[comm.path])
        if comm.failure.happened:
            comm.break_connections()

    def fail(self, text: str) -> None:
        """Make ``text`` the first failure of the job, here and on every other rank."""
        if not self.failure.set(PeerFailure, text):
            return
        self.send("failed", text)
        for comm in list(self._comms.values()):
            comm.break_connections()
        self.write_calls(text)

    def diverge(self, path: str, text: str) -> None:
        """Make ``text`` the divergence of the communicator ``path``, here and on every other rank."""
        if path in self._diverged:
            return
        self._diverged[path] = text
        self.send("diverged", path, text)
        comm = self._comms.get(path)
        if comm is not None:
            comm.failure.set(DivergenceError, text)
            comm.break_connections()
            self.write_calls(text)

    def write_calls(self, why: str) -> str:
        """Write the last calls of this rank, and return words that say where they are."""
        comm = next(iter(list(self._comms.values())), None)
        return "" if comm is None else comm.calls.write(why)

    def publish(self, path: str, text: str) -> None:
        """Let every other rank know where this one waits on the communicator ``path``."""
        self.send("waits", path, text)

    def tell_end(self) -> None:
        """Tell the other ranks that this one ends in peace, or why it does not."""
        error = self.failure.error()
        for comm in list(self._comms.values()):
            comm.publish_end()
        self.send(*(["ends"] if error is None else ["failed", str(error)]))

    def silent(self) -> list[int]:
        """The ranks that have not been heard of for a while, though their hosts answer."""
        return sorted(self._silent)

    def send(self, *record: str) -> None:
        """Send a record to every other rank."""
        for peer in list(self._listeners.values()):
            peer.send(record)

    def say(self, text: str) -> None:
        """Print a sentence for the user, also while Python ends and `sys.stderr` is closed already."""
        line = f"shardpass: {text}\n"
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            with suppress(OSError):  # nobody reads it any more
                os.write(2, line.encode())

    # ---- being told

    def hear(self, rank: int, records: Iterable[Sequence[str]]) -> None:
        """Take what ``rank`` has sent."""
        for record in records:
            self._take(rank, *record)
        self._heard[rank] = self._clock.monotonic()
        self._silent.discard(rank)

    def _take(self, rank: int, kind: str, *texts: str) -> None:
        if kind == "failed":
            self.fail(*texts)
        elif kind == "diverged":
            self.diverge(*texts)
        elif kind == "waits":
            path, text = texts
            self.published[path][rank] = text
        elif kind == "ends":
            self.ended[rank] = self._clock.monotonic()

    def lose(self, rank: int, error: Exception) -> None:
        """Note that the connection with ``rank`` is gone, with the ``error`` that it gave."""
        del self._heard[rank]
        self._silent.discard(rank)
        if rank not in self.ended and not self.failure.happened:
            self.fail(self._why_gone(rank, error))

    def _why_gone(self, rank: int, error: Exception) -> str:
        if isinstance(error, (EOFError, ConnectionError)):
            return (
                f"rank {rank} died first: its process ended without a word (killed, out of memory, or crashed); its "
                f"connection to rank {self._rank} was closed"
            )
        if isinstance(error, OSError):
            return (
                f"rank {rank} was lost first: its host has not answered rank {self._rank} within "
                f"{self._host_timeout:.0f} s. It is down, or the network between the two is ({error.strerror or error})"
            )
        return f"rank {rank} failed first: what came from it at rank {self._rank} cannot be read ({error})"

    # ---- looking

    def look(self) -> None:
        """Do what is to be done from time to time: show that this rank is there, and see whether the others are."""
        now = self._clock.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + beat_seconds(self._host_timeout)
            self.send("beats")
        for comm in list(self._comms.values()):
            with suppress(RuntimeError):  # counts change while they are read
                comm.look_for_circle()
        for rank, heard in self._heard.items():
            if now - heard > self._host_timeout and rank not in self._silent and rank not in self.ended:
                self._silent.add(rank)
                self.say(
                    f"rank {self._rank} has not heard of rank {rank} for {now - heard:.0f} s, though its host answers: "
                    f"its process is stopped, or the host is swapping. It is waited for"
                )


class InformedCommunicator(BaseCommunicator):
    """A communicator of ranks that tell each other their `News`."""

    watch: News | None = None  # `None` for a single rank, and until the ranks are connected

    def attend(self, watch: News | None) -> None:
        """Have this communicator looked after from now on."""
        if watch is not None:
            self.watch = watch
            self.failure = Failure(watch.failure)
            watch.register(self)

    def break_connections(self) -> None:
        """Wake this rank's waits with an error. It is called after the reason has been recorded."""

    def _publish(self, text: str) -> None:
        if self.watch is not None:
            self.watch.publish(self.path, text)

    def _published(self) -> dict[int, str]:
        return {} if self.watch is None else dict(self.watch.published[self.path])

    def _silent(self) -> list[int]:
        return [] if self.watch is None else self.watch.silent()

    def _spread_divergence(self, text: str) -> None:
        if self.watch is not None:
            self.watch.diverge(self.path, text)
        self.failure.set(DivergenceError, text)

    def _spread_failure(self, text: str) -> None:
        if self.watch is not None:
            self.watch.fail(text)
        else:
            super()._spread_failure(text)

    def _ended(self, seconds: float, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` that have ended in peace at least ``seconds`` ago."""
        ends, now = {} if self.watch is None else self.watch.ended, self.clock.monotonic()
        return [rank for rank in ranks if rank in ends and now - ends[rank] >= seconds]

    def look_for_circle(self) -> None:
        """See `RawCommunicator`. Between devices no connection tells that a peer has ended, so it is looked for."""
        if self.is_direct:
            self.blame_ended(self._ended(_ENDED_SECONDS, range(self.size)))
        super().look_for_circle()

    def _explain_lost(self, peers: Sequence[int]) -> CommunicationError | None:
        deadline, ended = self.clock.monotonic() + _EXPLAIN_SECONDS, list[int]()
        while self.clock.monotonic() < deadline and not self.failure.happened:
            self.clock.sleep(0.05)
            if not ended:
                ended = self._ended(0.0, peers)
                deadline = self.clock.monotonic() + _ENDED_SECONDS if ended else deadline
        self.blame_ended(ended)
        return self.failure.error()
