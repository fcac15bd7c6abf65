"""Shards of edge lists that a layer derives from a graph's own in forward (self-loops added, edges masked).

Deriving is cheap, sharding the result is not, and layers derive the same list in every forward: so the shards are kept,
shared by all layers, and found again by content. No communication: a derived list uses the same halo.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardpass.core.shard import Block, EdgeShards, build_shards, smallest_index_dtype

_MOST = 4
_COMPARED_EDGES = 1 << 16


class DerivedShards:
    """The last few derived edge lists of one graph, least recently used dropped."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, EdgeShards]] = []

    def find(self, edge_index: Tensor, blocks: Sequence[Block], num_dst: int) -> EdgeShards:
        """The shards of `edge_index` ``[2, num_edges]``, in own-first source rows and own destination rows."""
        for position, (known, shards) in enumerate(self._known):
            if _same(known, edge_index):
                self._known.append(self._known.pop(position))
                return shards
        shards = build_shards(edge_index[0], edge_index[1], blocks, num_dst)
        largest = max([num_dst, *(block.stop for block in blocks)])
        compact = edge_index.to(smallest_index_dtype(largest), copy=True)
        self._known = [*self._known, (compact, shards)][-_MOST:]
        return shards


def _same(known: Tensor, edge_index: Tensor) -> bool:
    if known.shape != edge_index.shape or known.device != edge_index.device:
        return False
    chunks = zip(known.split(_COMPARED_EDGES, dim=1), edge_index.split(_COMPARED_EDGES, dim=1))
    return all(torch.equal(a.to(b.dtype), b) for a, b in chunks)
