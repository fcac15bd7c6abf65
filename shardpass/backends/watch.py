"""The thread that listens to what the other ranks tell, and ends this process where that is needed.

[Note: the watch] One small thread of each rank listens to all other ranks (see `mesh`). What they tell it, and what
follows from that, is in `news`. When a connection closes before its rank has said that it ends, that rank has died. The
thread also looks for ranks that wait in a circle (see `deadlock`), and it ends a process whose launcher has gone, or
that does not notice a failure because it computes.
"""

from __future__ import annotations

import atexit
import os
import secrets
import selectors
import signal
import threading
import weakref
from collections.abc import Callable
from time import monotonic

from shardpass.backends.ending import Bell
from shardpass.backends.failure import first_failure
from shardpass.backends.hosts import memory_space
from shardpass.backends.mesh import Gather, Peer, connect_mesh
from shardpass.backends.news import InformedCommunicator, News

DEFAULT_HOST_TIMEOUT = 30.0
_LOOK_SECONDS = 0.5
_NOTICE_SECONDS = 8.0
_CAUSE_SECONDS = 0.5  # how long the reason why a launcher ends this rank may take to come


class Watch(News):
    """The `News` of a process, and the thread that listens to them. `connect` makes it.

    The arguments are those of `News`.
    """

    def __init__(self, peers: dict[int, Peer], rank: int, host_timeout: float) -> None:
        super().__init__(peers, rank, host_timeout)
        self._launcher = 0
        self._ends_process = False
        self._peers = peers
        self._process = os.getpid()
        self._ends_at: float | None = None
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
        connections = connect_mesh(gather, rank, size, limit)
        peers = {other: Peer(connection, host_timeout) for other, connection in connections.items()}
        watch = Watch(peers, rank, host_timeout)
        watch._thread.start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=_weakly(watch._bell.before_fork),
                after_in_parent=_weakly(watch._bell.after_fork),
                after_in_child=_weakly(watch.let_go),
            )
        return watch

    def guard(self, launcher: int) -> None:
        """End this process if the job has failed unnoticed, or the process ``launcher`` (0: none) has gone; say why."""
        self._ends_process, self._launcher = True, launcher
        self._bell.hear_sigterm()

    def send(self, *record: str) -> None:
        """See `News.send`. A forked child says nothing."""
        if os.getpid() == self._process:
            super().send(*record)

    # ---- listening

    def _run(self) -> None:
        while not self._closing.is_set():
            self._listen(_LOOK_SECONDS)
            if not self.failure.happened:
                self.look()
            elif self._ends_process:
                self._end_unnoticed()

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._receive(key.data)
            elif self._bell.rang_for_sigterm():
                self._end_as_told()
                return

    def _receive(self, rank: int) -> None:
        try:
            self.hear(rank, self._peers[rank].receive())
        except (OSError, EOFError, ValueError, TypeError) as error:
            self._selector.unregister(self._peers[rank])
            if not self._closing.is_set():
                self.lose(rank, error)

    def look(self) -> None:
        """See `News.look`. It also sees whether the launcher is there."""
        super().look()
        if self._launcher and os.getppid() != self._launcher:
            self.fail(first_failure(self._rank, f"its launcher, process {self._launcher}, has gone"))

    # ---- ending

    def _end_unnoticed(self) -> None:
        """End a rank that goes on computing, and would find out at its next call only."""
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
        words = self.write_calls(str(self.failure.error()))
        self.say(f"rank {self._rank} ends: {self.failure.error()}" + f" ({words})" * bool(words))
        self._hang_up()
        os._exit(code)

    def _hang_up(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def let_go(self) -> None:
        """Have a forked child hold no connections, which would seem alive after this process, and hear no signals."""
        self._bell.close()
        self._bell.after_fork()
        for peer in self._peers.values():
            peer.drop()

    def close(self) -> None:
        """Tell the other ranks that this one ends in peace, or why it does not, and stop watching."""
        if self._closing.is_set() or os.getpid() != self._process:
            return
        self._bell.close()
        self.tell_end()
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


class WatchedCommunicator(InformedCommunicator):
    """A communicator of a job of processes, which a `Watch` looks after."""

    watch: Watch | None = None

    def watch_over(self, limit: float, host_timeout: float) -> None:
        """Collective: find out which ranks can share memory, and watch all of them from now on."""
        atexit.register(self.close)
        timeout, self.timeout = self.timeout, min(2 * limit, self.timeout)  # nobody can say yet who has died
        facts = self.all_gather_object([memory_space(), secrets.token_hex(4)], "hosts")
        self.local_ranks = tuple(rank for rank, (space, _) in enumerate(facts) if space == facts[self.rank][0])
        self.calls.job = facts[0][1]
        if self.size > 1:
            self.attend(Watch.connect(self.all_gather_object, self.rank, self.size, limit, host_timeout))
        self.timeout = timeout

    def close(self) -> None:
        """See `Communicator.close`. Closing the first communicator of a job ends its duplicates too."""
        if self._closed:
            return
        super().close()
        if "/" not in self.path:
            atexit.unregister(self.close)
            self._end_job()

    def _end_job(self) -> None:
        """Tell the other ranks that this one has ended. A backend adds what else belongs to the whole job."""
        if self.watch is not None:
            self.watch.close()
