"""Shards in order of their source rows, as backward reads them."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardpass.core.sharding.host_copies import to_device
from shardpass.core.sharding.shard import Shard, smallest_index_dtype


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
            found = self._made(shard, with_order) if shard.home is None else self._copied(shard, shard.home, with_order)
            self._kept[shard] = found
        return found

    def _made(self, shard: Shard, with_order: bool) -> BySource:
        small = smallest_index_dtype(max(shard.num_edges, shard.num_dst))
        order = torch.argsort(shard.src_rows, stable=True)
        if with_order:
            order = order.to(small)
        if shard in self._kept:
            return self._kept[shard]._replace(order=order)
        counts = torch.bincount(shard.src_rows, minlength=shard.block.num_rows)
        indptr = torch.zeros(shard.block.num_rows + 1, dtype=torch.int64, device=counts.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        return BySource(indptr.to(small), shard.dst_rows().to(small)[order], order if with_order else None)

    def _copied(self, shard: Shard, home: Shard, with_order: bool) -> BySource:
        indptr, dst_rows, order = self.of(home, with_order)
        device = shard.indptr.device
        order = to_device(order, device) if with_order and order is not None else None
        return BySource(to_device(indptr, device), to_device(dst_rows, device), order)
