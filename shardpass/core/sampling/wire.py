"""Messages of sampling: several integer arrays, or rows of several tensors, for each rank in one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import Packing
from shardpass.core.ranks import Ranks
from shardpass.errors import InternalError

Array = Any


def exchange_arrays(
    comm: Ranks, arrays: Sequence[Sequence[Array]], label: str, dtype: Any = np.int64
) -> list[list[Array]]:
    """``arrays[r]`` go to rank r; ``result[r]`` came from rank r, as `dtype`. Collective.

    Args:
        arrays: integers, 1-D, the same number of arrays for and on every rank; their lengths are free.
        dtype: int32 or int64, in which all of them travel; the same on every rank.
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


def exchange_rows(
    comm: Ranks,
    tensors: Sequence[Mapping[str, Tensor]],
    send: Sequence[Sequence[Tensor]],
    counts: Sequence[Sequence[int]],
    wire: torch.dtype | None,
    label: str,
) -> list[list[dict[str, Tensor]]]:
    """Rows ``send[r][g]`` of the tensors of group g go to rank r. Collective.

    Args:
        tensors: per group, tensors by name with one row per own node or edge; alike on every rank but for their rows.
        send: per rank and group, which rows, int64 on the device of the tensors.
        counts: per rank and group, how many rows come.
        wire: the dtype in which rows of float32 travel; None: their own.

    Returns:
        per rank and group, the rows by name, ``[counts[r][g], ...]``.
    """
    names = [sorted(group) for group in tensors]
    groups = [[group[name] for name in named] for group, named in zip(tensors, names)]
    packings = [Packing(group, wire) for group in groups]
    messages = [_packed(comm, groups, packings, rows if rank != comm.rank else ()) for rank, rows in enumerate(send)]
    found = []
    for rank, (message, numbers) in enumerate(zip(comm.all_to_all(messages, label), counts)):
        if rank == comm.rank:
            own = [[tensor.index_select(0, rows) for tensor in group] for group, rows in zip(groups, send[rank])]
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
            view.copy_(tensor.index_select(0, chosen))
        at += size
    return message
