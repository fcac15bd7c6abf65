"""Ranks of a torch.distributed process group, over connections of their own.

Whatever backend the given group has, messages and tensors in CPU memory travel over a gloo group that is made here over
the same ranks. Gloo makes progress by itself and keeps tags apart. What all ranks agree about goes by `Blocks`.

[Note: between devices] If every rank has a GPU of its own, tensors on GPUs travel over a group of NCCL that is made
here too, from device to device. NCCL knows no tags and works in the order of its calls, so each header says which
message of its pair comes next. A rank waits for the header, while the GPU waits for the payload: `Work.wait` makes the
current stream wait, not the host. A group may only be used by one thread, so a duplicate has none: its tensors are
staged over the CPU, as are those of ranks that share a GPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shardpass.backends.blocks import LONGEST, Blocks
from shardpass.backends.failure import Failure, TransportLostError, TransportTimeoutError
from shardpass.backends.hosts import chosen_interface, machine
from shardpass.backends.identity import MessageKey, SlotTable, SlotUse, combined
from shardpass.backends.mesh import connect_mesh
from shardpass.backends.primitives import DEFAULT_TIMEOUT, Pending
from shardpass.backends.watch import DEFAULT_HOST_TIMEOUT, WatchedCommunicator
from shardpass.errors import CommunicationError

_BREAK_TAGS = range(1, 5)


class _Transfer:
    """One gloo send or receive."""

    def __init__(self, work: Any, flat: Tensor, slots: SlotTable, place: SlotUse) -> None:
        self._work = work
        self._flat = flat  # kept alive until the transfer is done
        self._slots = slots
        self._place = place

    def wait(self, timeout: float) -> None:
        """See `Pending.wait`. A time-out closes the connections of the group: gloo cannot take a transfer back."""
        with _transport_errors():
            self._work.wait(timedelta(seconds=max(timeout, 0.001)))
        self._slots.release(self._place)


class _Move:
    """A transfer between devices."""

    def __init__(self, work: Any, operations: list[dist.P2POp]) -> None:
        self._work = work
        self._operations = operations  # keeps their tensors alive until the transfer is done

    def wait(self, timeout: float) -> None:
        """See `Pending.wait`. The stream waits, and not the host."""
        with _transport_errors():
            self._work.wait()


@contextlib.contextmanager
def _transport_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise TransportTimeoutError from None
    except OSError as error:
        raise TransportLostError(str(error)) from None
    except RuntimeError as error:
        text = gloo_words(error)
        if "timed out" in text.lower():
            raise TransportTimeoutError from None
        raise TransportLostError(text) from None


def gloo_words(error: RuntimeError) -> str:
    """The first sentence of an error of gloo, without places in its source."""
    text = re.sub(r"\[[^\]]*\.(cc|h):\d+\] *", "", str(error).splitlines()[0])
    return re.split(r"\. (?=This is|Check)", text)[0]


def cannot_connect(error: RuntimeError, rank: int, size: int) -> CommunicationError:
    """What to raise where gloo could not connect the ranks of a group."""
    remedy = "Set GLOO_SOCKET_IFNAME to the network interface that reaches them"
    if chosen_interface():
        remedy = f"Does the network interface {chosen_interface()} (GLOO_SOCKET_IFNAME) reach them? Have they ended?"
    return CommunicationError(
        f"rank {rank} could not connect with the other {size - 1} ranks of the group: {gloo_words(error)}. {remedy}"
    )


def set_timeout(seconds: float) -> None:
    """From now on, so long a collective of the default group may take."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


class _Job:
    """What the communicators of one job share: its ranks, and its name in the store."""

    def __init__(self, members: list[int], rank: int, connect_timeout: float, owns_default: bool) -> None:
        self.members = members
        self.rank = rank
        self.connect_timeout = connect_timeout
        self.owns_default = owns_default
        store: Any = distributed_c10d._get_default_store()  # in which another thread may block: we have a connection
        self._store = dist.PrefixStore("shardpass", store.clone() if hasattr(store, "clone") else store)
        name = "world " + "-".join(map(str, members))
        self.name = f"{name} #{self._store.add(f'{name} {rank}', 1)}"  # every rank of the group counts the same

    def new_group(self, path: str) -> Any:
        """Collective: a gloo group over the job's ranks.

        It is not made by `torch.distributed.new_group`, whose names depend on how many groups this process has.
        """
        store = dist.PrefixStore(f"{self.name} {path}", self._store)
        limit = timedelta(seconds=self.connect_timeout)
        return dist.ProcessGroupGloo(store, self.rank, len(self.members), limit)  # type: ignore[attr-defined]


class TorchCommunicator(WatchedCommunicator):
    """One rank of a process group. `from_group` makes it."""

    shares_memory = True

    def __init__(self, job: _Job, device: torch.device, path: str) -> None:
        super().__init__(job.rank, len(job.members), device, Failure(), path)
        self._job, self.processes = job, tuple(job.members)
        self._group = job.new_group(path)
        self._blocks: Blocks | None = None  # `None` until there are connections for them
        self._direct: Any = None
        self._slots = SlotTable()

    @classmethod
    def from_group(
        cls,
        group: Any = None,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = 60.0,
        owns_default: bool = False,
        host_timeout: float = DEFAULT_HOST_TIMEOUT,
        direct: str | None = None,
    ) -> TorchCommunicator:
        """Collective. The communicator over the ranks of ``group`` (default: all processes), which is left as it is.

        Times are those of `shardpass.connect`.

        Args:
            owns_default: whether to destroy the default group when the communicator is closed.
            direct: the backend of torch.distributed over which tensors on `device` travel. By default NCCL if every
                rank has a GPU of its own, else none: tensors are staged over the CPU.
        """
        given = group if group is not None else dist.group.WORLD
        members = dist.get_process_group_ranks(given)
        rank = members.index(dist.get_rank())
        try:
            job = _Job(members, rank, connect_timeout, owns_default)
            comm = cls(job, torch.device(device), job.name)
        except RuntimeError as error:
            raise cannot_connect(error, rank, len(members)) from error
        comm.timeout = timeout
        comm.watch_over(connect_timeout, host_timeout)
        comm._connect_blocks()
        direct = direct or comm._direct_backend()
        if direct is not None and comm.size > 1:
            comm._connect_devices(direct)
        return comm

    def _connect_blocks(self) -> None:
        """Collective: from now on blocks travel over connections of their own."""
        if self.size > 1:
            connections = connect_mesh(self.all_gather_object, self.rank, self.size, self._job.connect_timeout)
            self._blocks = Blocks(connections, self.rank)

    def _direct_backend(self) -> str | None:
        """Collective: ``"nccl"`` if every rank has a GPU of its own, as NCCL demands."""
        mine = None
        if self.device.type == "cuda" and dist.is_nccl_available():
            mine = [machine(), str(torch.cuda.get_device_properties(self.device).uuid)]
        every = [tuple(gpu) if gpu else None for gpu in self.all_gather_object(mine, "GPUs")]
        return "nccl" if None not in every and len(set(every)) == self.size else None

    def _connect_devices(self, backend: str) -> None:
        """Collective: from now on tensors on `device` travel over a group of this backend."""
        try:
            limit = timedelta(seconds=self.timeout)
            self._direct = dist.new_group(self._job.members, limit, backend, use_local_synchronization=True)
            probe = torch.ones(1, device=self.device)
            self._direct.allreduce([probe]).wait()  # NCCL connects here: later, not all ranks might take part
            problem = None if probe.item() == self.size else f"the sum of {self.size} ones was {probe.item()}"
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        for rank, found in enumerate(self.all_gather_object(problem, "connections between devices")):
            if found is not None:
                raise CommunicationError(f"rank {rank} could not connect its device by {backend}: {found}")
        self.is_direct = True

    # ---- raw primitives

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> _Transfer:
        place = self._slots.take(to, True, key)
        with _transport_errors():
            return _Transfer(self._group.send([flat], to, place.slot), flat, self._slots, place)

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> _Transfer:
        place = self._slots.take(source, False, key)
        with _transport_errors():
            return _Transfer(self._group.recv([flat], source, place.slot), flat, self._slots, place)

    def _raw_move(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Pending]:
        moves = [(dist.irecv, *receive) for receive in receives] + [(dist.isend, *send) for send in sends]
        operations = [dist.P2POp(move, flat, group=self._direct, group_peer=peer) for move, flat, peer in moves]
        with _transport_errors():
            return [_Move(work, operations) for work in dist.batch_isend_irecv(operations)]

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        if self._blocks is not None:
            with _transport_errors():
                return self._blocks.swap([block] * self.size, [len(block)] * self.size, timeout)
        mine = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        blocks = list(torch.zeros(self.size, len(block), dtype=torch.uint8).unbind())
        options = distributed_c10d.AllgatherOptions()
        self._run(options, timeout, lambda: self._group.allgather([blocks], [mine], options))
        return [bytes(row.numpy().tobytes()) for row in blocks]

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        share = -(-tensor.numel() // self.size)
        if self._blocks is not None and tensor.device.type == "cpu" and share * tensor.element_size() <= LONGEST:
            self._reduce_by_blocks(self._blocks, tensor, share, op, timeout)
            return
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))
        self._run(options, timeout, lambda: self._group_of(tensor).allreduce([tensor], options))

    def _reduce_by_blocks(self, blocks: Blocks, tensor: Tensor, share: int, op: str, timeout: float) -> None:
        """Each rank combines a share of the numbers, and gives it to all."""
        shares = [tensor[rank * share : (rank + 1) * share] for rank in range(self.size)]
        mine = shares[self.rank]
        with _transport_errors():
            found = blocks.swap([one.numpy().tobytes() for one in shares], [mine.nbytes] * self.size, timeout)
        if mine.numel():
            mine.copy_(combined([torch.frombuffer(bytearray(one), dtype=mine.dtype) for one in found], op))
        with _transport_errors():
            found = blocks.swap([mine.numpy().tobytes()] * self.size, [one.nbytes for one in shares], timeout)
        tensor.copy_(torch.frombuffer(bytearray(b"".join(found)), dtype=tensor.dtype))

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._run(options, timeout, lambda: self._group_of(flat).broadcast([flat], options))

    def _group_of(self, tensor: Tensor) -> Any:
        return self._direct if self.is_direct and tensor.device == self.device else self._group

    def _run(self, options: Any, timeout: float, start: Callable[[], Any]) -> None:
        options.timeout = timedelta(seconds=max(timeout, 0.001))
        with _transport_errors():
            start().wait()

    def _raw_duplicate(self, path: str) -> TorchCommunicator:
        twin = type(self)(self._job, self.device, path)
        twin.attend(self.watch)
        twin.timeout, twin.calls = self.timeout, self.calls
        twin._connect_blocks()
        return twin

    # ---- failure

    def break_connections(self) -> None:
        """Close all connections, so that every wait on them ends with an error, here and at the peers.

        Those of gloo are closed by a receive that times out. It is the only way that another thread can take.
        """
        if self._blocks is not None:
            self._blocks.end()
        for tag in _BREAK_TAGS:
            with contextlib.suppress(RuntimeError):
                buffer = torch.zeros(1, dtype=torch.uint8)
                self._group.recv([buffer], (self.rank + 1) % self.size, tag).wait(timedelta(milliseconds=1))
        if self._direct is not None and self.device.type == "cuda":
            self._direct.abort()

    def close(self) -> None:
        super().close()
        if self._blocks is not None:
            self._blocks.close()

    def _end_job(self) -> None:
        super()._end_job()
        if self._direct is not None and not self._job.owns_default and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # after a failure
                dist.destroy_process_group(self._direct)
        if self._job.owns_default and dist.is_initialized():
            dist.destroy_process_group()
