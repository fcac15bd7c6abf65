"""Ranks of an MPI job, through mpi4py, on communicators of their own.

Tensors travel as buffers and are never pickled. Every wait, also of a collective, tests and sleeps for a short time:
Open MPI makes progress only inside its calls, and its blocking waits keep a core busy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardpass.backends.failure import Failure, TransportTimeoutError
from shardpass.backends.identity import MessageKey, SlotTable, SlotUse
from shardpass.backends.primitives import DEFAULT_TIMEOUT
from shardpass.backends.watch import DEFAULT_HOST_TIMEOUT, WatchedCommunicator
from shardpass.errors import CommunicationError, require

_SPINS = 4  # tests without sleeping
_MIN_SLEEP, _MAX_SLEEP = 20e-6, 1e-3  # seconds
_LOOK_SECONDS = 0.05  # how often a waiting rank looks whether another one has failed
_ENDED_SECONDS = 2.0  # how long the last messages of a rank that has ended may take
_LAST_SECONDS = 5.0  # how long the messages may take that are under way when this rank ends


class _Request:
    """One MPI request of ``comm``.

    MPI reads or writes the buffer of a request until the request is complete, even if its wait was given up because of
    a time-out or a divergence. So the job holds the request until then.
    """

    def __init__(self, comm: MpiCommunicator, request: Any, buffer: Any, place: SlotUse | None = None) -> None:
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

    def end(self, timeout: float) -> None:
        """Complete or cancel the request, so that MPI does not touch its buffer any more."""
        if self._place is not None and not self._place.is_sending:
            self._request.Cancel()
        with suppress(CommunicationError, TransportTimeoutError):  # this rank ends anyway
            self.wait(timeout)


class MpiCommunicator(WatchedCommunicator):
    """One rank of an MPI job. `from_mpi` makes it."""

    shares_memory = True

    def __init__(self, mpi: Any, parent: Any, under_way: set[_Request], device: torch.device, path: str) -> None:
        super().__init__(parent.Get_rank(), parent.Get_size(), device, Failure(), path)
        self._mpi = mpi
        self._channel = parent.Dup()
        self._channel.Set_errhandler(mpi.ERRORS_RETURN)
        self.slots = SlotTable(int(self._channel.Get_attr(mpi.TAG_UB)) + 1)
        self.under_way = under_way  # of all communicators of the job

    @staticmethod
    def from_mpi(
        parent: Any = None,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = 60.0,
        host_timeout: float = DEFAULT_HOST_TIMEOUT,
    ) -> MpiCommunicator:
        """Collective. The communicator over the ranks of ``parent``, an mpi4py communicator (default: all).

        It is duplicated, so that its own messages never mix with ours. Times are those of `shardpass.connect`.
        """
        mpi = require("mpi4py.MPI", "mpi", "the mpi backend")
        comm = MpiCommunicator(mpi, mpi.COMM_WORLD if parent is None else parent, set(), torch.device(device), "world")
        comm.timeout = timeout
        threads = mpi.Query_thread() == mpi.THREAD_MULTIPLE  # mpi4py asks for it, and gets it if the library has it
        comm.serves_threads = all(comm.all_gather_object(threads, "threads"))
        comm.watch_over(connect_timeout, host_timeout)
        return comm

    # ---- waiting

    def block(self, test: Callable[[], bool], timeout: float) -> None:
        """Return when ``test()`` is true."""
        for _ in range(_SPINS):
            if test():
                return
        start = monotonic()
        pause, next_look = _MIN_SLEEP, start
        while not test():
            now = monotonic()
            if now >= next_look:
                next_look = now + _LOOK_SECONDS
                self.failure.check()
                self.check_ended(self._ended(_ENDED_SECONDS, range(self.size)))
            if now - start >= timeout:
                raise TransportTimeoutError
            sleep(pause)
            pause = min(2 * pause, _MAX_SLEEP)

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
        twin = MpiCommunicator(self._mpi, self._channel, self.under_way, self.device, path)
        twin.attend(self.watch)
        return twin

    # ---- failure

    def announce(self, reason: str) -> NoReturn:
        """End the job. It does not return. The caller has printed the reason."""
        super().announce(reason)
        self.give_up()

    def give_up(self) -> NoReturn:
        """End the job: MPI itself could wait for ever for ranks that have died."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(1)
        os._exit(1)

    def abort(self, reason: str) -> NoReturn:
        """Print the reason and end the job. It does not return."""
        print(self.last_words(reason), file=sys.stderr, flush=True)
        self.announce(reason)

    def _end_job(self) -> None:
        """End every request, too. Its buffer is freed soon, and MPI still writes into it while it finalizes."""
        if not self._mpi.Is_finalized():
            deadline = monotonic() + _LAST_SECONDS
            for request in list(self.under_way):
                request.end(max(0.0, deadline - monotonic()))
        super()._end_job()
