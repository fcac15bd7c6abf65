"""Ranks of a torch.distributed process group, over gloo connections of their own.

Whatever backend the given group has, messages between ranks travel over a gloo group that is made here over the same
ranks. Gloo makes progress by itself and keeps tags apart. Tensors on a GPU
are staged over the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shardpass.backends.failure import Failure, TransportLostError, TransportTimeoutError
from shardpass.backends.identity import MessageKey, Place, SlotTable
from shardpass.backends.raw import DEFAULT_TIMEOUT
from shardpass.backends.watch import DEFAULT_HOST_TIMEOUT, WatchedCommunicator
from shardpass.errors import CommunicationError

_BREAK_TAGS = range(1, 5)


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
    """What the communicators of one job share: its ranks, and its name in the store."""

    def __init__(self, members: list[int], rank: int, connect_timeout: float, owns_default: bool) -> None:
        self.members = members
        self.rank = rank
        self.connect_timeout = connect_timeout
        self.owns_default = owns_default
        self._store = _own_store()
        name = "world " + "-".join(map(str, members))
        self.name = f"{name} #{self._store.add(f'{name} {rank}', 1)}"  # every rank of the group counts the same

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


class TorchCommunicator(WatchedCommunicator):
    """One rank of a process group. `from_group` makes it."""

    shares_memory = True

    def __init__(self, job: _Job, device: torch.device, path: str) -> None:
        super().__init__(job.rank, len(job.members), device, Failure(), path)
        self._job = job
        self._group = job.new_group(path)
        self._slots = SlotTable()

    @staticmethod
    def from_group(
        group: Any = None,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = 60.0,
        owns_default: bool = False,
        host_timeout: float = DEFAULT_HOST_TIMEOUT,
    ) -> TorchCommunicator:
        """Collective. The communicator over the ranks of ``group`` (default: all processes).

        Args:
            group: a process group of this process. It is left as it is.
            device: of the tensors.
            timeout: seconds that a wait may take unless the caller says otherwise.
            connect_timeout: seconds that the connections may take to come up.
            owns_default: whether to destroy the default group when the communicator is closed.
            host_timeout: seconds after which a host that does not answer is lost.
        """
        given = group if group is not None else dist.group.WORLD
        members = dist.get_process_group_ranks(given)
        rank = members.index(dist.get_rank())
        try:
            job = _Job(members, rank, connect_timeout, owns_default)
            comm = TorchCommunicator(job, torch.device(device), job.name)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank} could not connect with the other {len(members) - 1} ranks of the group within "
                f"{connect_timeout:.0f} s: {gloo_words(error)}. Set GLOO_SOCKET_IFNAME to the network "
                f"interface that reaches them"
            ) from error
        comm.timeout = timeout
        atexit.register(comm.close)
        comm.watch_over(connect_timeout, host_timeout)
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
        twin = TorchCommunicator(self._job, self.device, path)
        twin.attend(self.watch)
        return twin

    # ---- failure

    def break_connections(self) -> None:
        """Close all connections of the group, so that every wait on it ends with an error, here and at the peers.

        A receive that times out does that. It is the only way that another thread can take.
        """
        for tag in _BREAK_TAGS:
            with contextlib.suppress(RuntimeError):
                buffer = torch.zeros(1, dtype=torch.uint8)
                self._group.recv([buffer], (self.rank + 1) % self.size, tag).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """See `Communicator.close`. Closing the first communicator of a job ends its duplicates too."""
        if self._closed:
            return
        super().close()
        if "/" in self.path:
            return
        atexit.unregister(self.close)
        if self.watch is not None:
            self.watch.close()
        if self._job.owns_default and dist.is_initialized():
            dist.destroy_process_group()
