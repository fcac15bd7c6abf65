"""Messages without a halo plan: ids sorted by owner; several arrays, or rows of several tensors, as one message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange.packing import Packing
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import Ownership
from shardpass.errors import InternalError

Array = np.ndarray[Any, Any]


class Routed(NamedTuple):
    """Nodes of one type sorted by owner.

    Args:
        order: the stable permutation that sorts them.
        per_rank: how many of them each rank owns.
        rows: the row of each node at its owner, in sorted order.
    """

    order: Array
    per_rank: Array
    rows: Array

    @classmethod
    def of(cls, ids: Array, owned: Ownership) -> Routed:
        """Nodes with these global ids, int64, sorted by owner."""
        offsets = np.array(owned.offsets, dtype=np.int64)
        small = np.int16 if owned.num_ranks < 2**15 else np.int64  # sorted by radix, which is much faster
        owners = np.searchsorted(offsets[1:], ids, side="right").astype(small)
        order = np.argsort(owners, kind="stable")
        per_rank = np.bincount(owners, minlength=owned.num_ranks)
        return cls(order, per_rank, ids[order] - np.repeat(offsets[:-1], per_rank))

    def split(self, values: Array) -> list[Array]:
        """`values` in sorted order, cut into one array per owner."""
        found: list[Array] = np.split(values, np.cumsum(self.per_rank)[:-1])
        return found


def exchange_arrays(
    comm: Ranks, arrays: Sequence[Sequence[Array]], label: str, dtype: Any = np.int64
) -> list[list[Array]]:
    """The arrays that each rank sent to this one, as `dtype`: ``result[r]`` came from rank r. Collective.

    Args:
        arrays: ``arrays[r]`` go to rank r. They are 1-D and hold integers. Every rank sends the same number of arrays
            to every rank, of any lengths.
        dtype: int32 or int64, in which all of them travel. The same on every rank.
    """
    if comm.size == 1:
        return [list(arrays[0])]
    messages = []
    for rank, parts in enumerate(arrays):
        if rank == comm.rank:
            messages.append(torch.from_numpy(np.empty(0, dtype=dtype)).to(comm.device))
            continue
        lengths = np.array([len(part) for part in parts])
        if lengths.max(initial=0) > np.iinfo(dtype).max:
            raise InternalError(f"{label}: {lengths.max()} numbers in one message; use smaller batches")
        flat = np.concatenate([lengths, *parts], dtype=dtype, casting="same_kind")
        messages.append(torch.from_numpy(flat).to(comm.device))
    count = len(arrays[0])
    found = []
    for rank, message in enumerate(comm.all_to_all(messages, label)):
        if rank == comm.rank:
            found.append(list(arrays[rank]))
            continue
        flat = message.cpu().numpy()
        cuts = count + np.concatenate([[0], np.cumsum(flat[:count], dtype=np.int64)])
        found.append([flat[first:last] for first, last in pairwise(cuts)])
    return found


def ask(comm: Ranks, ranks: Array, columns: Sequence[Array], answer: Callable[..., Array], label: str) -> Array:
    """What rank ``ranks[i]`` answers to row i of `columns`, int64 ``[n]``. Collective.

    Args:
        ranks: ``[n]`` int64. Each rank may ask for any number of rows.
        columns: at least one array ``[n]`` of integers.
        answer: is given the columns of the rows that one rank asks for, and returns an integer or a bool for each.
    """
    order = np.argsort(ranks, kind="stable")
    cuts = np.cumsum(np.bincount(ranks, minlength=comm.size))[:-1]
    asked = [list(parts) for parts in zip(*(np.split(column[order], cuts) for column in columns))]
    requests = exchange_arrays(comm, asked, label)
    replies = exchange_arrays(comm, [[answer(*request)] for request in requests], f"{label}: answers")
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.concatenate([reply for (reply,) in replies])
    return found


def exchange_rows(
    comm: Ranks,
    tensors: Sequence[Mapping[str, Tensor]],
    send: Sequence[Sequence[Tensor]],
    counts: Sequence[Sequence[int]],
    wire: torch.dtype | None,
    label: str,
) -> list[list[dict[str, Tensor]]]:
    """The rows that each rank sent to this one: ``result[r][g]`` are those of group g by name. Collective.

    They are on the device of the ranks, wherever `tensors` are.

    Args:
        tensors: for each group, tensors by name with one row per own node or edge. Every rank has the same groups,
            names, widths and dtypes.
        send: ``send[r][g]`` are the rows of group g that go to rank r, int64.
        counts: ``counts[r][g]`` is how many rows of group g come from rank r.
        wire: the dtype in which float32 rows travel. `None` keeps float32.
    """
    names = [sorted(group) for group in tensors]
    groups = [[group[name] for name in named] for group, named in zip(tensors, names)]
    packings = [Packing(group, wire) for group in groups]
    messages = [_packed(comm, groups, packings, rows if rank != comm.rank else ()) for rank, rows in enumerate(send)]
    found = []
    for rank, (message, numbers) in enumerate(zip(comm.all_to_all(messages, label), counts)):
        if rank == comm.rank:
            own = [[_picked(tensor, rows).to(comm.device) for tensor in g] for g, rows in zip(groups, send[rank])]
            found.append([dict(zip(named, rows)) for named, rows in zip(names, own)])
            continue
        parts, at = [], 0
        for packing, named, number in zip(packings, names, numbers):
            size = _aligned(packing.num_bytes(number))
            rows = packing.to_computed(packing.views(message[at : at + size], number))
            parts.append(dict(zip(named, rows)))
            at += size
        found.append(parts)
    return found


def _picked(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_select(0, rows.to(tensor.device))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def _packed(
    comm: Ranks, groups: Sequence[Sequence[Tensor]], packings: Sequence[Packing], rows: Sequence[Tensor]
) -> Tensor:
    sizes = [_aligned(packing.num_bytes(len(chosen))) for packing, chosen in zip(packings, rows)]
    message = torch.zeros(sum(sizes), dtype=torch.uint8, device=comm.device)
    at = 0
    for group, packing, chosen, size in zip(groups, packings, rows, sizes):
        for tensor, view in zip(group, packing.views(message[at : at + size], len(chosen))):
            view.copy_(_picked(tensor, chosen))
        at += size
    return message
