"""What ranks tell each other beside their calls, and how they notice that one of them has gone.

[Note: the watch] One small thread of each rank listens to all other ranks (see `mesh`). They tell it their failures,
where they wait, and that they end in peace. When a connection closes before that, its rank has died. The thread records
the first failure and breaks the connections that carry tensors, so that the main thread wakes up with the reason,
wherever it is blocked. A rank that computes for an hour is alive. The thread also looks for ranks that wait in a circle
(see `deadlock`), and it ends a process whose launcher has gone, or that does not notice a failure because it computes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from time import monotonic

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.ending import Bell
from shardpass.backends.failure import Failure, first_failure
from shardpass.backends.hosts import memory_space
from shardpass.backends.mesh import Gather, Peer, beat_seconds, connect_mesh
from shardpass.errors import DivergenceError, PeerFailure

DEFAULT_HOST_TIMEOUT = 30.0
_LOOK_SECONDS = 0.5
_NOTICE_SECONDS = 8.0
_CAUSE_SECONDS = 0.5  # how long the reason why a launcher ends this rank may take to come


class Watch:
    """The ranks of one job as this rank sees them. `connect` makes it.

    Args:
        peers: the connections, by rank.
        rank: of this process.
        host_timeout: seconds after which a host that does not answer is lost.

    Attributes:
        failure: of the job.
        ended: by rank: when it said that it ends in peace.
        published: by communicator and rank: where the rank waits.
    """

    def __init__(self, peers: dict[int, Peer], rank: int, host_timeout: float) -> None:
        self.failure = Failure()
        self.ended: dict[int, float] = {}
        self.published: dict[str, dict[int, str]] = defaultdict(dict)
        self._launcher = 0
        self._ends_process = False
        self._peers = peers
        self._rank = rank
        self._process = os.getpid()
        self._host_timeout = host_timeout
        self._heard = dict.fromkeys(peers, monotonic())
        self._silent: set[int] = set()
        self._next_beat = 0.0
        self._ends_at: float | None = None
        self._diverged: dict[str, str] = {}
        self._comms: weakref.WeakValueDictionary[str, WatchedCommunicator] = weakref.WeakValueDictionary()
        self._closing = threading.Event()
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        for other, peer in peers.items():
            self._selector.register(peer, selectors.EVENT_READ, other)
        self._thread = threading.Thread(target=self._run, name="shardpass watch", daemon=True)

    @staticmethod
    def connect(gather: Gather, rank: int, size: int, limit: float, host_timeout: float) -> Watch:
        """Collective. A watch over the ranks, started. See `mesh.connect_mesh`."""
        watch = Watch(connect_mesh(gather, rank, size, limit, host_timeout), rank, host_timeout)
        watch._thread.start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=_weakly(watch._bell.before_fork),
                after_in_parent=_weakly(watch._bell.after_fork),
                after_in_child=_weakly(watch.let_go),
            )
        return watch

    def guard(self, launcher: int) -> None:
        """End this process if the job has failed and nobody notices, or if ``launcher`` has gone, and say why.

        Args:
            launcher: a process, or 0 for none.
        """
        self._ends_process = True
        self._launcher = launcher
        self._bell.hear_sigterm()

    # ---- telling

    def register(self, comm: WatchedCommunicator) -> None:
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
        self._send("failed", text)
        for comm in list(self._comms.values()):
            comm.break_connections()
        self._write_calls(text)

    def diverge(self, path: str, text: str) -> None:
        """Make ``text`` the divergence of the communicator ``path``, here and on every other rank."""
        if path in self._diverged:
            return
        self._diverged[path] = text
        self._send("diverged", path, text)
        comm = self._comms.get(path)
        if comm is not None:
            comm.failure.set(DivergenceError, text)
            comm.break_connections()
            self._write_calls(text)

    def _write_calls(self, why: str) -> str:
        """Write the last calls of this rank, and return words that say where they are."""
        comm = next(iter(list(self._comms.values())), None)
        return "" if comm is None else comm.calls.write(why)

    def publish(self, path: str, text: str) -> None:
        """Let every other rank know where this one waits on the communicator ``path``."""
        self._send("waits", path, text)

    def silent(self) -> list[int]:
        """The ranks that have not been heard of for a while, though their hosts answer."""
        return sorted(self._silent)

    def _send(self, *record: str) -> None:
        if os.getpid() == self._process:
            for peer in list(self._peers.values()):
                peer.send(record)

    # ---- listening

    def _run(self) -> None:
        while not self._closing.is_set():
            self._listen(_LOOK_SECONDS)
            if not self.failure.happened:
                self._look()
            elif self._ends_process:
                self._end_unnoticed()

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._hear(key.data)
            elif self._bell.rang_for_sigterm():
                self._end_as_told()
                return

    def _hear(self, rank: int) -> None:
        try:
            for record in self._peers[rank].receive():
                self._take(rank, *record)
            self._heard[rank] = monotonic()
            self._silent.discard(rank)
        except (OSError, EOFError, ValueError, TypeError) as error:
            self._selector.unregister(self._peers[rank])
            del self._heard[rank]
            self._silent.discard(rank)
            if rank not in self.ended and not self._closing.is_set() and not self.failure.happened:
                self.fail(self._why_gone(rank, error))

    def _take(self, rank: int, kind: str, *texts: str) -> None:
        if kind == "failed":
            self.fail(*texts)
        elif kind == "diverged":
            self.diverge(*texts)
        elif kind == "waits":
            path, text = texts
            self.published[path][rank] = text
        elif kind == "ends":
            self.ended[rank] = monotonic()

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

    def _look(self) -> None:
        now = monotonic()
        if now >= self._next_beat:
            self._next_beat = now + beat_seconds(self._host_timeout)
            self._send("beats")
        for comm in list(self._comms.values()):
            with contextlib.suppress(RuntimeError):  # counts change while they are read
                comm.look_for_circle()
        for rank, heard in self._heard.items():
            if now - heard > self._host_timeout and rank not in self._silent and rank not in self.ended:
                self._silent.add(rank)
                self._say(
                    f"rank {self._rank} has not heard of rank {rank} for {now - heard:.0f} s, though its host answers: "
                    f"its process is stopped, or the host is swapping. It is waited for"
                )
        if self._launcher and os.getppid() != self._launcher:
            self.fail(first_failure(self._rank, f"its launcher, process {self._launcher}, has gone"))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            print(f"shardpass: {text}", file=sys.stderr, flush=True)

    # ---- ending

    def _end_unnoticed(self) -> None:
        """End a rank that goes on computing: it would find out at its next call, which may be far away."""
        if self._ends_at is None:
            self._ends_at = monotonic() + _NOTICE_SECONDS
        if monotonic() >= self._ends_at and not self.failure.noticed:
            self._end_process(1)

    def _end_as_told(self) -> None:
        """End this process because of SIGTERM, with the reason: often another rank has failed, and the launcher knows.

        The main thread may have noticed the failure already. Then it has its time to end.
        """
        deadline = monotonic() + _CAUSE_SECONDS
        while not self.failure.happened and monotonic() < deadline:
            self._listen(0.05)
        if self.ended:
            first = min(self.ended, key=self.ended.__getitem__)
            self.fail(f"rank {first} ended first, and then rank {self._rank} was told to end (SIGTERM)")
        self.fail(first_failure(self._rank, "it was told to end (SIGTERM)"))
        deadline = monotonic() + _NOTICE_SECONDS
        while self.failure.noticed and monotonic() < deadline:
            if self._closing.wait(0.1):
                return
        self._end_process(128 + signal.SIGTERM)

    def _end_process(self, code: int) -> None:
        words = self._write_calls(str(self.failure.error()))
        self._say(f"rank {self._rank} ends: {self.failure.error()}" + f" ({words})" * bool(words))
        self._hang_up()
        os._exit(code)

    def let_go(self) -> None:
        """Have a forked child hold no connections, which would seem alive after this process, and hear no signals."""
        self._bell.close()
        self._bell.after_fork()
        for peer in self._peers.values():
            peer.drop()

    def _hang_up(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def close(self) -> None:
        """Tell the other ranks that this one ends in peace, or why it does not, and stop watching."""
        if self._closing.is_set() or os.getpid() != self._process:
            return
        error = self.failure.error()
        self._bell.close()
        self._send(*(["ends"] if error is None else ["failed", str(error)]))
        self._closing.set()
        self._bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)
        self._hang_up()
        self._selector.close()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    known = weakref.WeakMethod(method)

    def call() -> None:
        found = known()
        if found is not None:
            found()

    return call


class WatchedCommunicator(BaseCommunicator):
    """A communicator of a job of processes, which a `Watch` looks after."""

    watch: Watch | None = None  # `None` for a single rank, and until the ranks are connected

    def watch_over(self, limit: float, host_timeout: float) -> None:
        """Collective: find out which ranks can share memory, and watch all of them from now on."""
        timeout, self.timeout = self.timeout, min(2 * limit, self.timeout)  # nobody can say yet who has died
        facts = self.all_gather_object([memory_space(), secrets.token_hex(4)], "hosts")
        self.local_ranks = tuple(rank for rank, (space, _) in enumerate(facts) if space == facts[self.rank][0])
        self.calls.job = facts[0][1]
        if self.size > 1:
            self.attend(Watch.connect(self.all_gather_object, self.rank, self.size, limit, host_timeout))
        self.timeout = timeout

    def attend(self, watch: Watch | None) -> None:
        """Have this communicator looked after from now on."""
        if watch is not None:
            self.watch = watch
            self.failure = Failure(watch.failure)
            watch.register(self)

    def break_connections(self) -> None:
        """Wake this rank's waits with an error. The watch calls it after it has recorded the reason."""

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
        ends = {} if self.watch is None else self.watch.ended
        return [rank for rank in ranks if rank in ends and monotonic() - ends[rank] >= seconds]
