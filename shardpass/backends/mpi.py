"""Ranks of an MPI job, through mpi4py, on communicators of their own.

Tensors go as buffers, never pickled. Every wait, of collectives too, is Test and a short sleep: Open MPI makes progress
only inside its calls, and its blocking waits burn a core.
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

from shardpass.backends.base import DEFAULT_TIMEOUT, BaseCommunicator
from shardpass.backends.deadlock import Position
from shardpass.backends.failure import Failure, TransportTimeoutError, first_failure
from shardpass.backends.identity import MessageKey, SlotTable
from shardpass.errors import CommunicationError, DivergenceError, require

_SPINS = 20  # tests without sleeping
_MIN_SLEEP, _MAX_SLEEP = 20e-6, 1e-3  # seconds
_NOTE_SECONDS = 0.05  # how often a waiting rank reads the notes of the others
_STUCK_SECONDS = 1.0
_ENDED_SECONDS = 2.0  # how long the last messages of a rank that has ended may take
_TYPES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64_T", torch.int32: "INT32_T",
    torch.int16: "INT16_T", torch.int8: "INT8_T", torch.uint8: "UINT8_T", torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}  # fmt: skip


class _Request:
    """One MPI request of ``comm``.

    MPI goes on reading and writing the buffer of a request until it is complete, also after its wait was given up (a
    timeout, a divergence): until then the job holds it.
    """

    def __init__(
        self, comm: MpiCommunicator, request: Any, buffer: Any, place: tuple[int, bool, int] | None = None
    ) -> None:
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

    The messages tell of divergences, positions and ends. They are read while a rank waits, by whichever of its threads
    does. Nobody waits for one to be read.
    """

    def __init__(self, mpi: Any, channel: Any) -> None:
        self._mpi = mpi
        self._channel = channel
        self._sent: list[tuple[Any, bytes]] = []
        self._lock = threading.RLock()
        self.comms: dict[str, MpiCommunicator] = {}
        self.under_way: set[_Request] = set()
        self.ended: dict[int, float] = {}

    def send(self, kind: str, path: str, text: str) -> None:
        """To every other rank."""
        raw = json.dumps([kind, path, text]).encode()
        with self._lock:
            self._sent = [(request, data) for request, data in self._sent if not request.Test()]
            for rank in range(self._channel.size):
                if rank != self._channel.rank:
                    request = self._channel.Isend([raw, self._mpi.BYTE], rank, 0)
                    self._sent.append((request, raw))

    def read(self) -> None:
        """Take in what has arrived."""
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
                    self.ended.setdefault(source, monotonic())
                elif path in self.comms:
                    self.comms[path].take_note(kind, source, text)


class MpiCommunicator(BaseCommunicator):
    """One rank of an MPI job. Made by `from_mpi`; collective."""

    shares_memory = True

    def __init__(self, mpi: Any, parent: Any, notes: _Notes, device: torch.device, path: str) -> None:
        super().__init__(parent.Get_rank(), parent.Get_size(), device, Failure())
        self._mpi = mpi
        self._channel = parent.Dup()
        self._channel.Set_errhandler(mpi.ERRORS_RETURN)
        self._max_tag = int(self._channel.Get_attr(mpi.TAG_UB))
        self._notes = notes
        self._twins: dict[str, int] = {}
        self._others: dict[int, Position] = {}
        self._published = False
        self.slots = SlotTable()
        self.under_way = notes.under_way
        self.path = path
        notes.comms[path] = self

    @staticmethod
    def from_mpi(
        parent: Any = None, device: torch.device | str = "cpu", timeout: float = DEFAULT_TIMEOUT
    ) -> MpiCommunicator:
        """Collective. The communicator over the ranks of ``parent``, an mpi4py communicator (default: all).

        Args:
            parent: duplicated, so that its own messages never mix with ours.
            device: of the tensors.
            timeout: seconds a wait may take by default.
        """
        mpi = require("mpi4py.MPI", "mpi", "the mpi backend")
        parent = mpi.COMM_WORLD if parent is None else parent
        notes = _Notes(mpi, parent.Dup())
        comm = MpiCommunicator(mpi, parent, notes, torch.device(device), "world")
        comm.timeout = timeout
        threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE  # what mpi4py asks for, if the library has it
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
        pause, next_notes, next_look = _MIN_SLEEP, start, start + _STUCK_SECONDS
        while not test():
            now = monotonic()
            if now >= next_notes:
                self._notes.read()
                self.failure.check()
                self._check_ended(now)
                next_notes = now + _NOTE_SECONDS
            if now - start >= timeout:
                raise TransportTimeoutError
            if now >= next_look:
                next_look = now + _STUCK_SECONDS / 2
                circle = self.check_stuck()
                if circle is not None:
                    self._diverge(circle)
            sleep(pause)
            pause = min(2 * pause, _MAX_SLEEP)

    def _check_ended(self, now: float) -> None:
        position = self._where
        if position is None:
            return
        for rank, since in self._notes.ended.items():
            concerns = position.kind == "collective" or position.peer == rank
            if concerns and now - since > _ENDED_SECONDS:
                raise CommunicationError(
                    f"rank {self.rank} waits in {position.text}, but rank {rank} has ended: it made fewer calls than "
                    f"the others"
                )

    def take_note(self, kind: str, source: int, text: str) -> None:
        """What another rank has told about this communicator."""
        if kind == "diverged":
            self.failure.set(DivergenceError, text)
        elif text:
            self._others[source] = Position.from_json(text)
        else:
            self._others.pop(source, None)

    def _publish(self, position: Position | None) -> None:
        if position is None and not self._published:
            return
        if position is not None and self._published:
            return  # a position does not change while a rank is blocked
        self._published = position is not None
        self._notes.send("position", self.path, position.to_json() if position is not None else "")

    def _positions(self) -> dict[int, Position]:
        return dict(self._others)

    def _spread_divergence(self, text: str) -> None:
        if self.failure.set(DivergenceError, text):
            self._notes.send("diverged", self.path, text)

    # ---- raw primitives

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> _Request:
        place = self.slots.take(to, True, key)
        buffer = flat.numpy()
        request = self._channel.Isend([buffer, self._mpi.BYTE], to, place[2] % (self._max_tag + 1))
        return _Request(self, request, flat, place)

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> _Request:
        place = self.slots.take(source, False, key)
        buffer = flat.numpy()
        request = self._channel.Irecv([buffer, self._mpi.BYTE], source, place[2] % (self._max_tag + 1))
        return _Request(self, request, flat, place)

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        size = len(block)
        blocks = bytearray(size * self.size)
        request = self._channel.Iallgather([bytearray(block), self._mpi.BYTE], [blocks, self._mpi.BYTE])
        _Request(self, request, blocks).wait(timeout)
        return [bytes(blocks[i * size : (i + 1) * size]) for i in range(self.size)]

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        if tensor.dtype not in _TYPES:
            raise TypeError(
                f"all_reduce over MPI: {tensor.dtype} cannot be reduced; known are {', '.join(map(str, _TYPES))}"
            )
        kind = getattr(self._mpi, _TYPES[tensor.dtype])
        request = self._channel.Iallreduce(self._mpi.IN_PLACE, [tensor.numpy(), kind], getattr(self._mpi, op.upper()))
        _Request(self, request, tensor).wait(timeout)

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        request = self._channel.Ibcast([flat.numpy(), self._mpi.BYTE], root)
        _Request(self, request, flat).wait(timeout)

    def _raw_duplicate(self, name: str) -> BaseCommunicator:
        count = self._twins[name] = self._twins.get(name, 0) + 1
        twin = MpiCommunicator(self._mpi, self._channel, self._notes, self.device, f"{self.path}/{name}#{count}")
        twin.serves_threads = self.serves_threads
        return twin

    # ---- failure

    def announce(self, reason: str) -> NoReturn:
        """End the job; does not return. The caller has printed the reason."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(1)
        os._exit(1)

    def abort(self, reason: str) -> NoReturn:
        """Print the reason and end the job; does not return."""
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
