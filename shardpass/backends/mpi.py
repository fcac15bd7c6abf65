"""Ranks of an MPI job, through mpi4py, on communicators of their own.

Tensors travel as buffers and are never pickled. Every wait, also of a collective, tests and sleeps for a short time:
Open MPI makes progress only inside its calls, and its blocking waits keep a core busy.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.failure import Failure, TransportTimeoutError, first_failure
from shardpass.backends.identity import MessageKey, Place, SlotTable
from shardpass.backends.raw import DEFAULT_TIMEOUT
from shardpass.errors import DivergenceError, require

_SPINS = 20  # tests without sleeping
_MIN_SLEEP, _MAX_SLEEP = 20e-6, 1e-3  # seconds
_NOTE_SECONDS = 0.05  # how often a waiting rank reads the notes of the others
_ENDED_SECONDS = 2.0  # how long the last messages of a rank that has ended may take


class _Request:
    """One MPI request of ``comm``.

    MPI reads or writes the buffer of a request until the request is complete, even if its wait was given up because of
    a time-out or a divergence. So the job holds the request until then.
    """

    def __init__(self, comm: MpiCommunicator, request: Any, buffer: Any, place: Place | None = None) -> None:
        self._comm = comm
        self._request = request
        self._buffer = buffer
        self._place = place
        comm.under_way.add(self)

    def wait(self, timeout: float) -> None:
        """See `Pending.wait`."""
        self._comm.block(self._request.Test, timeout)
        self._comm.under_way.discard(self)
        if self._place is not None:
            self._comm.slots.release(self._place)


class _Notes:
    """What the communicators of a job share: the requests under way, and short messages beside the ranks' calls.

    The messages tell what a rank publishes, that it has ended, and of divergences. A rank reads them while it waits, in
    whichever of its threads waits. Nobody waits for a message to be read.
    """

    def __init__(self, mpi: Any, channel: Any) -> None:
        self._mpi = mpi
        self._channel = channel
        self._sent: list[tuple[Any, bytes]] = []
        self._lock = threading.RLock()
        self._ended: dict[int, float] = {}  # by rank: when it said so
        self.comms: dict[str, MpiCommunicator] = {}
        self.under_way: set[_Request] = set()

    def send(self, kind: str, path: str, text: str) -> None:
        """Send a note to every other rank."""
        raw = json.dumps([kind, path, text]).encode()
        with self._lock:
            self._sent = [(request, data) for request, data in self._sent if not request.Test()]
            for rank in range(self._channel.size):
                if rank != self._channel.rank:
                    request = self._channel.Isend([raw, self._mpi.BYTE], rank, 0)
                    self._sent.append((request, raw))

    def read(self) -> None:
        """Take in the notes that have arrived."""
        status = self._mpi.Status()
        with self._lock:
            while True:
                message = self._channel.Improbe(self._mpi.ANY_SOURCE, 0, status)
                if message is None:
                    return
                raw = bytearray(status.Get_count(self._mpi.BYTE))
                source = status.Get_source()
                message.Recv([raw, self._mpi.BYTE])
                kind, path, text = json.loads(raw.decode())
                if kind == "ended":
                    self._ended.setdefault(source, monotonic())
                elif path in self.comms:
                    self.comms[path].take_note(kind, source, text)

    def ended(self) -> list[int]:
        """The ranks that have ended, once their last messages must have arrived."""
        now = monotonic()
        return [rank for rank, since in list(self._ended.items()) if now - since > _ENDED_SECONDS]


class MpiCommunicator(BaseCommunicator):
    """One rank of an MPI job. `from_mpi` makes it."""

    shares_memory = True

    def __init__(self, mpi: Any, parent: Any, notes: _Notes, device: torch.device, path: str) -> None:
        super().__init__(parent.Get_rank(), parent.Get_size(), device, Failure(), path)
        self._mpi = mpi
        self._channel = parent.Dup()
        self._channel.Set_errhandler(mpi.ERRORS_RETURN)
        self._notes = notes
        self._texts: dict[int, str] = {}  # by rank, what the others have published
        self.slots = SlotTable(int(self._channel.Get_attr(mpi.TAG_UB)) + 1)
        self.under_way = notes.under_way
        notes.comms[path] = self

    @staticmethod
    def from_mpi(
        parent: Any = None, device: torch.device | str = "cpu", timeout: float = DEFAULT_TIMEOUT
    ) -> MpiCommunicator:
        """Collective. The communicator over the ranks of ``parent``, an mpi4py communicator (default: all).

        Args:
            parent: it is duplicated, so that its own messages never mix with ours.
            device: of the tensors.
            timeout: seconds that a wait may take unless the caller says otherwise.
        """
        mpi = require("mpi4py.MPI", "mpi", "the mpi backend")
        parent = mpi.COMM_WORLD if parent is None else parent
        notes = _Notes(mpi, parent.Dup())
        comm = MpiCommunicator(mpi, parent, notes, torch.device(device), "world")
        comm.timeout = timeout
        threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE  # mpi4py asks for it, and gets it if the library has it
        every = comm.all_gather_object([mpi.Get_processor_name(), threads], "hosts")
        comm.local_ranks = tuple(r for r, (host, _) in enumerate(every) if host == every[comm.rank][0])
        comm.serves_threads = all(threads for _, threads in every)
        atexit.register(comm.close)
        return comm

    # ---- waiting

    def block(self, test: Callable[[], bool], timeout: float) -> None:
        """Return when ``test()`` is true."""
        for _ in range(_SPINS):
            if test():
                return
        start = monotonic()
        pause, next_notes = _MIN_SLEEP, start
        while not test():
            now = monotonic()
            if now >= next_notes:
                next_notes = now + _NOTE_SECONDS
                self._notes.read()
                self.failure.check()
                self.check_ended(self._notes.ended())
                self.look_for_circle()
            if now - start >= timeout:
                raise TransportTimeoutError
            sleep(pause)
            pause = min(2 * pause, _MAX_SLEEP)

    def take_note(self, kind: str, source: int, text: str) -> None:
        """Take in what another rank has told about this communicator."""
        if kind == "diverged":
            self.failure.set(DivergenceError, text)
        else:
            self._texts[source] = text

    def _publish(self, text: str) -> None:
        self._notes.send("published", self.path, text)

    def _published(self) -> dict[int, str]:
        return dict(self._texts)

    def _spread_divergence(self, text: str) -> None:
        if self.failure.set(DivergenceError, text):
            self._notes.send("diverged", self.path, text)

    # ---- raw primitives

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> _Request:
        place = self.slots.take(to, True, key)
        return _Request(self, self._channel.Isend([flat.numpy(), self._mpi.BYTE], to, place.slot), flat, place)

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> _Request:
        place = self.slots.take(source, False, key)
        return _Request(self, self._channel.Irecv([flat.numpy(), self._mpi.BYTE], source, place.slot), flat, place)

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        size = len(block)
        blocks = bytearray(size * self.size)
        request = self._channel.Iallgather([bytearray(block), self._mpi.BYTE], [blocks, self._mpi.BYTE])
        _Request(self, request, blocks).wait(timeout)
        return [bytes(blocks[i * size : (i + 1) * size]) for i in range(self.size)]

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        request = self._channel.Iallreduce(self._mpi.IN_PLACE, tensor.numpy(), getattr(self._mpi, op.upper()))
        _Request(self, request, tensor).wait(timeout)

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        request = self._channel.Ibcast([flat.numpy(), self._mpi.BYTE], root)
        _Request(self, request, flat).wait(timeout)

    def _raw_duplicate(self, path: str) -> MpiCommunicator:
        return MpiCommunicator(self._mpi, self._channel, self._notes, self.device, path)

    # ---- failure

    def announce(self, reason: str) -> NoReturn:
        """End the job. It does not return. The caller has printed the reason."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(1)
        os._exit(1)

    def abort(self, reason: str) -> NoReturn:
        """Print the reason and end the job. It does not return."""
        print(f"shardpass: {first_failure(self.rank, reason)}", file=sys.stderr, flush=True)
        self.announce(reason)

    def close(self) -> None:
        """See `Communicator.close`. Closing the first communicator tells the other ranks that this one has ended."""
        if self._closed:
            return
        super().close()
        if "/" in self.path:
            self._notes.comms.pop(self.path, None)
            return
        atexit.unregister(self.close)
        if not self._mpi.Is_finalized():
            self._notes.read()
            self._notes.send("ended", self.path, "")
