"""Liveness of a group of processes: a ring of connections, in which each rank watches the one before it.

[Note: the ring] A small thread of each rank blocks in a receive from its predecessor. When that process dies, its
kernel closes the connection and the receive fails at once. No clock is involved: a rank that computes for an hour is
alive. A rank passes every failure or divergence that it learns of to its successor. Then it breaks its own connections,
so that its main thread wakes up with that reason, wherever it is blocked. A second thread looks twice a second for
ranks that wait in a circle (see `deadlock`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import weakref
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch

from shardpass.backends.failure import Failure
from shardpass.errors import DivergenceError, PeerFailure

_RECORD_BYTES = 4096
_MAX_TEXT_BYTES = 3500  # the rest is for the path, and for what JSON adds
_TAG = 0
_BREAK_TAGS = range(1, 5)
_FOREVER = timedelta(days=20)
_SEND_LIMIT = timedelta(seconds=3)
_LOOK_SECONDS = 0.5
_NOTICE_SECONDS = 8.0


class Watched(Protocol):
    """A communicator, as far as the watch knows it."""

    path: str
    failure: Failure

    def look_for_circle(self) -> None:
        """See `RawCommunicator.look_for_circle`."""
        ...

    def break_connections(self) -> None:
        """Wake this rank's waits with an error."""
        ...


def break_group(group: Any, peer: int) -> None:
    """Close all connections of a gloo group, so that every wait on it ends with an error, here and at the peers.

    A receive that times out does that. It is the only way that another thread can take.
    """
    for tag in _BREAK_TAGS:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.zeros(1, dtype=torch.uint8)], peer, tag).wait(timedelta(milliseconds=1))


class Watch:
    """The ring of one job, and what this rank has learned from it.

    Args:
        group: a gloo group that nothing else uses.
        rank, size: of this rank in it.
        failure: of the job.
        ends_process: whether to end the process if the job has failed and nobody here notices for a while.

    Attributes:
        predecessor_ended: whether the rank before this one has ended in peace.
    """

    def __init__(self, group: Any, rank: int, size: int, failure: Failure, ends_process: bool) -> None:
        self._group = group
        self._rank = rank
        self._predecessor = (rank - 1) % size
        self._successor = (rank + 1) % size
        self._failure = failure
        self._ends_process = ends_process
        self._closing = threading.Event()
        self._seen: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._comms: weakref.WeakValueDictionary[str, Watched] = weakref.WeakValueDictionary()
        self.predecessor_ended = False
        self._threads = [
            threading.Thread(target=self._listen, name="shardpass watch", daemon=True),
            threading.Thread(target=self._look, name="shardpass look", daemon=True),
        ]

    def start(self) -> None:
        """Start watching."""
        for thread in self._threads:
            thread.start()

    def register(self, comm: Watched) -> None:
        """Have ``comm`` broken when the job fails, and its waits looked at."""
        self._comms[comm.path] = comm
        if self._failure.happened:
            comm.break_connections()

    def tell(self, text: str, path: str = "") -> None:
        """Record a failure here and on every other rank.

        Args:
            text: the sentence that every rank shows.
            path: of the communicator that has diverged; empty if the whole job has failed.
        """
        record = (text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore"), path)
        with self._lock:
            if record in self._seen:
                return
            self._seen.add(record)
        comms = [comm for comm in list(self._comms.values()) if path in ("", comm.path)]
        is_first = True
        if path == "":
            is_first = self._failure.set(PeerFailure, text)
        elif comms:
            is_first = comms[0].failure.set(DivergenceError, text)
        if is_first:
            self._send(record)
        for comm in comms:
            comm.break_connections()

    def _send(self, record: tuple[str, str] | None) -> None:
        raw = json.dumps(record, ensure_ascii=False).encode().ljust(_RECORD_BYTES)[:_RECORD_BYTES]
        with contextlib.suppress(RuntimeError):
            buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            self._group.send([buffer], self._successor, _TAG).wait(_SEND_LIMIT)

    def _listen(self) -> None:
        buffer = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
        while True:
            try:
                self._group.recv([buffer], self._predecessor, _TAG).wait(_FOREVER)
            except RuntimeError:
                if not self._closing.is_set() and not self._failure.happened:
                    self.tell(
                        f"rank {self._predecessor} died first: its process ended without a word (killed, out of "
                        f"memory, or crashed); its connection to rank {self._rank} was closed"
                    )
                return
            record = json.loads(bytes(buffer.numpy().tobytes()))
            if record is None:
                self.predecessor_ended = True
                return
            self.tell(*record)

    def _look(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS) and not self._failure.happened:
            for comm in list(self._comms.values()):
                with contextlib.suppress(RuntimeError):  # the store has gone, or counts change while they are read
                    comm.look_for_circle()
        if self._ends_process and self._failure.happened:
            self._end_process()

    def _end_process(self) -> None:
        """End a rank that goes on computing: it would find out at its next call, which may be far away."""
        deadline = monotonic() + _NOTICE_SECONDS
        while monotonic() < deadline:
            if self._closing.wait(_LOOK_SECONDS) or self._failure.noticed:
                return
        print(f"shardpass: rank {self._rank} ends: {self._failure.error()}", file=sys.stderr, flush=True)
        os._exit(1)

    def close(self) -> None:
        """Tell the successor that this rank ends in peace, and stop watching."""
        if self._closing.is_set():
            return
        self._closing.set()
        if not self._failure.happened:
            self._send(None)
        break_group(self._group, self._successor)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)
