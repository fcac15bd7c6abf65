"""Shards in order of their source rows, as backward reads them."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardpass.core.sharding.host_copies import to_device
from shardpass.core.sharding.shard import Shard, smallest_index_dtype

_EDGES_AT_ONCE = 1 << 18
"""How many edges are sorted at a time. Sorting takes some 60 bytes for each, where what is kept has 4."""


class BySource(NamedTuple):
    """A shard as CSR by source.

    Args:
        indptr: ``[block rows + 1]``.
        dst_rows: ``[num_edges]``.
        order: where each of these edges stands in the shard, ``[num_edges]``, if it was asked for.
    """

    indptr: Tensor
    dst_rows: Tensor
    order: Tensor | None


class Transposes:
    """The owner of the transposes of a graph's shards. Each is made once, and kept for as long as its shard lives."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Shard, BySource] = WeakKeyDictionary()

    def of(self, shard: Shard, with_order: bool = False) -> BySource:
        """`shard` by source; `order` is there if `with_order` was ever true for this shard."""
        found = self._kept.get(shard)
        if found is None or (with_order and found.order is None):
            if shard.home is not None:
                found = self._copied(shard, shard.home, with_order)
            elif found is None:
                found = transposed(shard, with_order)
            else:
                found = found._replace(order=transposed(shard, with_order).order)
            self._kept[shard] = found
        return found

    def _copied(self, shard: Shard, home: Shard, with_order: bool) -> BySource:
        indptr, dst_rows, order = self.of(home, with_order)
        device = shard.indptr.device
        order = to_device(order, device) if with_order and order is not None else None
        return BySource(to_device(indptr, device), to_device(dst_rows, device), order)


def transposed(shard: Shard, with_order: bool = False) -> BySource:
    """`shard` by source, made anew; edges of the same source stay in order."""
    if shard.block.num_rows == shard.num_dst >= shard.num_edges and bool((shard.src_rows == shard.dst_rows()).all()):
        places = torch.arange(shard.num_edges, dtype=shard.indptr.dtype, device=shard.indptr.device)  # self-loops
        return BySource(shard.indptr, shard.src_rows, places if with_order else None)
    device, small = shard.src_rows.device, smallest_index_dtype(max(shard.num_edges, shard.num_dst))
    indptr = torch.zeros(shard.block.num_rows + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(shard.src_rows, minlength=shard.block.num_rows), 0, out=indptr[1:])
    dst_rows = torch.empty(shard.num_edges, dtype=small, device=device)
    order = torch.empty_like(dst_rows) if with_order else None
    free = indptr[:-1].clone()  # where the next edge of each source goes
    for chunk in shard.chunks(_EDGES_AT_ONCE if device.type == "cpu" else max(1, shard.num_edges)):
        src_rows, positions = torch.sort(shard.src_rows[chunk.start : chunk.stop], stable=True)
        sources, counts = torch.unique_consecutive(src_rows, return_counts=True)
        places = torch.repeat_interleave(free[sources] - counts.cumsum(0) + counts, counts)
        places += torch.arange(src_rows.numel(), device=device)
        dst_rows[places] = (shard.dst_rows(chunk)[positions] + chunk.low).to(small)
        if order is not None:
            order[places] = (positions + chunk.start).to(small)
        free[sources] += counts
    return BySource(indptr.to(small), dst_rows, order)
