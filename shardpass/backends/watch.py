"""Liveness of a group of processes: a ring of connections, each rank watching the one before it.

[Note: the ring] A small thread of each rank blocks in a receive from its predecessor. When that process dies, its
kernel closes the connection and the receive fails at once, without any timing: a rank that computes for an hour is
alive. What a rank learns (a failure, a divergence) it passes to its successor, then breaks its own connections, so that
its main thread, wherever it is blocked, wakes up with that reason. A second thread looks, twice a second, for ranks
that wait in a circle (see `deadlock`).
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
from typing import TYPE_CHECKING, Any

import torch

from shardpass.backends.failure import KINDS, Failure

if TYPE_CHECKING:
    from shardpass.backends.torch_distributed import TorchCommunicator

_RECORD_BYTES = 4096
_TAG = 0
_BREAK_TAGS = range(1, 5)
_FOREVER = timedelta(days=20)
_SEND_LIMIT = timedelta(seconds=3)
_LOOK_SECONDS = 0.5
_STUCK_SECONDS = 1.0
_NOTICE_SECONDS = 8.0


def break_group(group: Any, peer: int) -> None:
    """Close all connections of a gloo group, so that every wait on it ends with an error, here and at the peers.

    A receive that times out does that; it is the one way that can be taken from another thread.
    """
    for tag in _BREAK_TAGS:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.zeros(1, dtype=torch.uint8)], peer, tag).wait(timedelta(milliseconds=1))


class Watch:
    """The ring of one job and what this rank has learned from it.

    Args:
        group: a gloo group used for nothing else.
        rank, size: of this rank in it.
        failure: where failures of the job are recorded.
        ends_process: end the process when the job has failed and nobody here has noticed for a while.
    """

    def __init__(self, group: Any, rank: int, size: int, failure: Failure, ends_process: bool) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self.failure = failure
        self._ends_process = ends_process
        self._closing = threading.Event()
        self._seen: set[str] = set()
        self.predecessor_ended = False  # in peace
        self._lock = threading.Lock()
        self._comms: weakref.WeakValueDictionary[str, TorchCommunicator] = weakref.WeakValueDictionary()
        self._threads = [
            threading.Thread(target=self._listen, name="shardpass watch", daemon=True),
            threading.Thread(target=self._look, name="shardpass look", daemon=True),
        ]

    def start(self) -> None:
        """Start watching."""
        for thread in self._threads:
            thread.start()

    def register(self, comm: TorchCommunicator) -> None:
        """Have ``comm`` broken when the job fails, and its waits looked at."""
        self._comms[comm.path] = comm
        if self.failure.happened.is_set():
            comm.break_connections()

    def tell(self, kind: str, text: str, path: str = "") -> None:
        """Record a failure here and on every other rank.

        Args:
            kind: ``"failed"``, ``"lost"`` or ``"diverged"``; the latter concerns only the communicator ``path``.
            text: the sentence every rank shows.
            path: of the communicator.
        """
        record = json.dumps({"kind": kind, "text": text[:2500], "path": path})
        with self._lock:
            if record in self._seen:
                return
            self._seen.add(record)
        comm = self._comms.get(path) if kind == "diverged" else None
        first = True
        if kind != "diverged":
            first = self.failure.set(KINDS[kind], text)
        elif comm is not None:
            first = comm.failure.set(KINDS[kind], text)
        if first:
            self._send(record)
        if kind != "diverged":
            for other in list(self._comms.values()):
                other.break_connections()
        elif comm is not None:
            comm.break_connections()

    def _send(self, record: str) -> None:
        raw = record.encode().ljust(_RECORD_BYTES)[:_RECORD_BYTES]
        successor = (self._rank + 1) % self._size
        buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            self._group.send([buffer], successor, _TAG).wait(_SEND_LIMIT)

    def _listen(self) -> None:
        predecessor = (self._rank - 1) % self._size
        buffer = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
        while True:
            try:
                self._group.recv([buffer], predecessor, _TAG).wait(_FOREVER)
            except RuntimeError:
                if not self._closing.is_set() and not self.failure.happened.is_set():
                    self.tell(
                        "lost",
                        f"rank {predecessor} died first: its process ended without a word (killed, out of memory, or "
                        f"crashed); its connection to rank {self._rank} was closed",
                    )
                return
            record = json.loads(bytes(buffer.numpy().tobytes()).decode(errors="replace").rstrip())
            if record["kind"] == "closed":
                self.predecessor_ended = True
                return
            self.tell(record["kind"], record["text"], record["path"])

    def _look(self) -> None:
        since: dict[str, tuple[int, float]] = {}
        while not self._closing.wait(_LOOK_SECONDS) and not self.failure.happened.is_set():
            now = monotonic()
            for path, comm in list(self._comms.items()):
                epoch = comm.blocked_epoch()
                if epoch is None or comm.failure.happened.is_set():
                    since.pop(path, None)
                    continue
                start = since.get(path)
                if start is None or start[0] != epoch:
                    since[path] = (epoch, now)
                elif now - start[1] >= _STUCK_SECONDS:
                    comm.look_for_circle()
        if self._ends_process and self.failure.happened.is_set():
            self._end_process()

    def _end_process(self) -> None:
        """End a rank that computes on: it would find out at its next call, which may be far away."""
        deadline = monotonic() + _NOTICE_SECONDS
        while monotonic() < deadline:
            if self._closing.wait(_LOOK_SECONDS) or self.failure.noticed.is_set():
                return
        print(f"shardpass: rank {self._rank} ends: {self.failure.error()}", file=sys.stderr, flush=True)
        os._exit(1)

    def close(self) -> None:
        """Tell the successor that this rank ends in peace, and stop."""
        if self._closing.is_set():
            return
        self._closing.set()
        if not self.failure.happened.is_set():
            self._send(json.dumps({"kind": "closed"}))
        break_group(self._group, (self._rank + 1) % self._size)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)
