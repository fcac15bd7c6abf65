"""Ranks of a torch.distributed process group, over gloo connections of their own.

Whatever backend the given group has, messages between ranks travel over a gloo group that is made here over the same
ranks. Gloo makes progress by itself, keeps tags apart, and its connections tell when a process dies. Tensors on a GPU
are staged over the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.failure import Failure, TransportLostError, TransportTimeoutError, first_failure
from shardpass.backends.identity import MessageKey, Place, SlotTable
from shardpass.backends.raw import DEFAULT_TIMEOUT
from shardpass.backends.watch import Watch, break_group
from shardpass.errors import CommunicationError, DivergenceError

_EXPLAIN_SECONDS = 5.0  # how long the reason of a closed connection may take around the ring
_ENDED_SECONDS = 1.0  # how long to wait for a failure that explains more than a rank which has ended in peace


class _Transfer:
    """One gloo send or receive."""

    def __init__(self, work: Any, flat: Tensor, slots: SlotTable, place: Place) -> None:
        self._work = work
        self._flat = flat  # kept alive until the transfer is done
        self._slots = slots
        self._place = place

    def wait(self, timeout: float) -> None:
        """See `Pending.wait`. A time-out closes the connections of the group: gloo cannot take a transfer back."""
        with _transport_errors():
            self._work.wait(timedelta(seconds=max(timeout, 0.001)))
        self._slots.release(self._place)


@contextlib.contextmanager
def _transport_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = gloo_words(error)
        if "timed out" in text.lower():
            raise TransportTimeoutError from None
        raise TransportLostError(text) from None


def gloo_words(error: RuntimeError) -> str:
    """The first sentence of an error of gloo, without the place in its source."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\] *", "", str(error).splitlines()[0])
    return re.split(r"\. (?=This is|Check)", text)[0]


class _Job:
    """What the communicators of one job share: its name in the store, the watch, the failure."""

    def __init__(self, members: list[int], rank: int, connect_timeout: float, owns_default: bool, ends: bool) -> None:
        self.members = members
        self.rank = rank
        self.connect_timeout = connect_timeout
        self.owns_default = owns_default
        self.failure = Failure()
        self.notes = _own_store()
        self._store = _own_store()
        name = "world " + "-".join(map(str, members))
        self.name = f"{name} #{self._store.add(f'{name} {rank}', 1)}"  # every rank of the group counts the same
        self.watch: Watch | None = None
        if len(members) > 1:
            self.watch = Watch(self.new_group("watch"), rank, len(members), self.failure, ends)

    def note_end(self) -> None:
        """Tell every rank that still waits for this one that it has ended in peace."""
        if not self.failure.happened:
            with contextlib.suppress(RuntimeError):  # rank 0, which may hold the store, has ended already
                self.notes.set(f"{self.name} ended {self.rank}", "1")

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that have ended in peace, as far as this rank can know."""
        before = (self.rank - 1) % len(self.members)
        found = [before] if self.watch is not None and self.watch.predecessor_ended and before in ranks else []
        with contextlib.suppress(RuntimeError):
            found += [rank for rank in ranks if self.notes.check([f"{self.name} ended {rank}"])]
        return found

    def new_group(self, path: str) -> Any:
        """Collective: a gloo group over the job's ranks.

        It is not made by `torch.distributed.new_group`, whose names depend on how many groups this process has.
        """
        store = dist.PrefixStore(f"{self.name} {path}", self._store)
        limit = timedelta(seconds=self.connect_timeout)
        return dist.ProcessGroupGloo(store, self.rank, len(self.members), limit)  # type: ignore[attr-defined]


def _own_store() -> Any:
    """A connection of our own to the default group's store, since another thread may block in the group's."""
    store: Any = distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        store = store.clone()
    return dist.PrefixStore("shardpass", store)


class TorchCommunicator(BaseCommunicator):
    """One rank of a process group. `from_group` makes it."""

    shares_memory = True

    def __init__(self, job: _Job, device: torch.device, path: str) -> None:
        super().__init__(job.rank, len(job.members), device, Failure(job.failure), path)
        self._job = job
        self._group = job.new_group(path)
        self._slots = SlotTable()
        if job.watch is not None:
            job.watch.register(self)

    @staticmethod
    def from_group(
        group: Any = None,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = 60.0,
        owns_default: bool = False,
        ends_process: bool = False,
    ) -> TorchCommunicator:
        """Collective. The communicator over the ranks of ``group`` (default: all processes).

        Args:
            group: a process group of this process. It is left as it is.
            device: of the tensors.
            timeout: seconds that a wait may take unless the caller says otherwise.
            connect_timeout: seconds that the connections may take to come up.
            owns_default: whether to destroy the default group when the communicator is closed.
            ends_process: whether to end this process if another rank has failed and this one makes no call for a while.
        """
        given = group if group is not None else dist.group.WORLD
        members = dist.get_process_group_ranks(given)
        rank = members.index(dist.get_rank())
        try:
            job = _Job(members, rank, connect_timeout, owns_default, ends_process)
            comm = TorchCommunicator(job, torch.device(device), job.name)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank} could not connect with the other {len(members) - 1} ranks of the group within "
                f"{connect_timeout:.0f} s: {gloo_words(error)}. Set GLOO_SOCKET_IFNAME to the network "
                f"interface that reaches them"
            ) from error
        comm.timeout = timeout
        atexit.register(comm.close)
        if job.watch is not None:
            job.watch.start()
        hosts = comm.all_gather_object(socket.gethostname(), "hosts")
        comm.local_ranks = tuple(r for r, host in enumerate(hosts) if host == hosts[rank])
        return comm

    # ---- raw primitives

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> _Transfer:
        place = self._slots.take(to, True, key)
        with _transport_errors():
            return _Transfer(self._group.send([flat], to, place.slot), flat, self._slots, place)

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> _Transfer:
        place = self._slots.take(source, False, key)
        with _transport_errors():
            return _Transfer(self._group.recv([flat], source, place.slot), flat, self._slots, place)

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        mine = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        blocks = list(torch.zeros(self.size, len(block), dtype=torch.uint8).unbind())
        options = distributed_c10d.AllgatherOptions()
        self._run(options, timeout, lambda: self._group.allgather([blocks], [mine], options))
        return [bytes(row.numpy().tobytes()) for row in blocks]

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))
        self._run(options, timeout, lambda: self._group.allreduce([tensor], options))

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._run(options, timeout, lambda: self._group.broadcast([flat], options))

    def _run(self, options: Any, timeout: float, start: Callable[[], Any]) -> None:
        options.timeout = timedelta(seconds=max(timeout, 0.001))
        with _transport_errors():
            start().wait()

    def _raw_duplicate(self, path: str) -> TorchCommunicator:
        return TorchCommunicator(self._job, self.device, path)

    # ---- failure

    def _spread_divergence(self, text: str) -> None:
        if self._job.watch is not None:
            self._job.watch.tell(text, self.path)
        self.failure.set(DivergenceError, text)

    def _explain_lost(self, peer: int) -> CommunicationError | None:
        peers = range(self.size) if peer < 0 else [peer]
        deadline, ended = monotonic() + _EXPLAIN_SECONDS, list[int]()
        while monotonic() < deadline and not self.failure.happened:
            sleep(0.05)
            if not ended:
                ended = self._job.ended(peers)
                deadline = monotonic() + _ENDED_SECONDS if ended else deadline
        return self.failure.error() or self.ended_error(ended)

    def break_connections(self) -> None:
        """Wake this rank's waits with an error. The watch calls it after it has recorded the reason."""
        break_group(self._group, (self.rank + 1) % self.size)

    def _publish(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0, which may hold the store, has ended already
            self._job.notes.set(f"{self.path} {self.rank}", text)

    def _published(self) -> dict[int, str]:
        keys = {rank: f"{self.path} {rank}" for rank in range(self.size)}
        return {rank: self._job.notes.get(key).decode() for rank, key in keys.items() if self._job.notes.check([key])}

    def announce(self, reason: str) -> None:
        """See `RawCommunicator.announce`."""
        if self._job.watch is None:
            super().announce(reason)
        else:
            self._job.watch.tell(first_failure(self.rank, reason))

    def close(self) -> None:
        """See `Communicator.close`. Closing the first communicator of a job ends its duplicates too."""
        if self._closed:
            return
        super().close()
        if "/" in self.path:
            return
        atexit.unregister(self.close)
        if self._job.watch is not None:
            self._job.note_end()
            self._job.watch.close()
        if self._job.owns_default and dist.is_initialized():
            dist.destroy_process_group()
