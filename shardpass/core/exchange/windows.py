"""Rows that ranks of one host read in shared memory: which rows they are, and the memory, which walks use again.

[Note: windows] A window is one piece of memory per rank. That rank writes it, and the others of its host read it. A
walk over the rounds takes a window when it begins and gives it back when it ends. All ranks make the same walks in the
same order and know how many bytes each of them needs, so all choose the same window and make a new one at the same
moment. Forward, the rows of all ranks are read after a collective that every rank enters when it has written its own,
and are written again after a later collective, which every rank enters when it has read. Any collective will do, such
as the agreement of the next call. Backward, each round has a message that rows are there, and one that they were read.
So the transport gives every order of reads and writes that is relied on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardpass.backends.communicator import Handle
from shardpass.core.exchange.packing import MESSAGE_BUFFER
from shardpass.core.exchange.schedule import Schedule
from shardpass.core.ranks import Ranks, torch_private


@dataclass(frozen=True)
class SharedRows:
    """Which rows go through shared memory.

    Args:
        rows: the own rows that this rank publishes, since other ranks of its host need them; ascending, int64.
        places: ``places[q]`` says where the rows that this rank needs lie among those that q publishes, int32.
        published: how many rows each rank publishes.
        returned: the most rows of one round whose gradients each rank returns to a rank of its host.
    """

    rows: Tensor
    places: tuple[Tensor, ...]
    published: tuple[int, ...]
    returned: tuple[int, ...]


def find_shared_rows(comm: Ranks, send_rows: Sequence[Tensor], schedule: Schedule) -> SharedRows | None:
    """The rows of a halo plan that go through shared memory, or `None` if no rank has any. Collective.

    Args:
        send_rows: own rows that each rank needs, ascending.
        schedule: of the plan.
    """
    if not shares_rows(comm):
        return None
    here = [rank in comm.local_ranks and rank != comm.rank for rank in range(comm.size)]
    wanted = [rows if local else rows[:0] for rows, local in zip(send_rows, here)]
    rows = torch.unique(torch.cat(wanted))
    places = comm.all_to_all([torch.searchsorted(rows, w).int() for w in wanted], label="halo plan: shared rows")
    largest = max((t.recv_stop - t.recv_start for t in schedule.transfers(comm.rank) if here[t.source]), default=0)
    sizes = comm.all_gather(torch.tensor([rows.numel(), largest]), label="halo plan: sizes of shared memory")
    published, returned = zip(*(size.tolist() for size in sizes))
    return SharedRows(rows, tuple(places), published, returned) if any(published) else None


@dataclass(eq=False)
class Window:
    """Memory of every rank of this host, by rank.

    Args:
        sizes: bytes of every rank, of other hosts too.
        memory: uint8, ``[sizes[rank]]`` each.
        call: the number of the call that has taken it, or `None` while it is free.
        readers: messages of readers that are done, which are awaited before the own memory is written again, and the
            own messages of that kind to other ranks.
        read_until: how many collectives there had been when this rank gave it back, if others may read it until the
            next one; else -1.
    """

    sizes: tuple[int, ...]
    memory: dict[int, Tensor]
    call: int | None = None
    readers: list[Handle] = field(default_factory=list)
    read_until: int = -1

    def wait_for_readers(self) -> None:
        """Return when every rank that was told to read the own memory has read it."""
        for handle in self.readers:
            handle.wait()
        self.readers.clear()

    def give_back(self, read_until: int = -1) -> None:
        """Mark the window as free on this rank. Others may still read it."""
        self.call, self.read_until = None, read_until


class WindowPool:
    """The windows of a run, kept between calls; the same on every rank.

    Attributes:
        windows: the windows that may be used.
        refused: some rank could not have shared memory, so all rows travel as messages from then on.
    """

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.refused = False


def shares_rows(comm: Ranks) -> bool:
    """Whether rows between ranks of one host go through shared memory; the same on every rank."""
    return comm.shares_memory and not comm.caches.of(WindowPool).refused


def shares_all_rows(comm: Ranks) -> bool:
    """Whether all ranks are on one host and share memory; the same on every rank."""
    return shares_rows(comm) and len(comm.local_ranks) == comm.size


def take_window(comm: Ranks, sizes: Sequence[int], call: int, label: str) -> Window | None:
    """A window of `sizes` bytes per rank for a walk of call number `call`, or `None` if rows go as messages.

    Collective where memory has to be made; every rank must pass the same arguments.
    """
    pool = comm.caches.of(WindowPool)
    if not comm.shares_memory or pool.refused or not any(sizes):
        return None
    # A window that another call left behind by an error is not used again: nobody knows who still reads it.
    pool.windows = [window for window in pool.windows if window.call in (None, call)]
    free = [window for window in pool.windows if window.call is None]
    for window in free:
        window.wait_for_readers()
    fitting = [window for window in free if all(have >= need for have, need in zip(window.sizes, sizes))]
    if fitting:
        window = min(fitting, key=lambda window: sum(window.sizes))
        if window.read_until == comm.collectives:
            comm.barrier(f"{label}: shared memory has been read")
    else:
        if free:
            sizes = [max(pair) for pair in zip(free[0].sizes, sizes)]
            pool.windows.remove(free[0])
            free[0].memory.clear()  # before more is allocated
        made = _make_window(comm, pool, tuple(sizes), label)
        if made is None:
            return None
        window = made
    window.call = call
    return window


def _make_window(comm: Ranks, pool: WindowPool, sizes: tuple[int, ...], label: str) -> Window | None:
    with torch_private.span(MESSAGE_BUFFER):
        memory = comm.share(sizes[comm.rank], label)
    if memory is None:
        pool.windows, pool.refused = [], True
        return None
    pool.windows.append(Window(sizes, memory))
    return pool.windows[-1]
