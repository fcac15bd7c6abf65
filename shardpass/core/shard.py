"""Shards: the edges from one block of source rows into this rank's nodes, as CSR by destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """A run of source rows of one owner, in own-first numbering: what one round brings. Half-open."""

    owner: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


class Chunk(NamedTuple):
    """Edges ``[start, stop)`` of a shard and the destination rows ``[low, high)`` they end in."""

    start: int
    stop: int
    low: int
    high: int


def cut(indptr: Tensor, num_edges: int, max_edges: int) -> list[Chunk]:
    """Edges grouped by `indptr` cut into runs of at most `max_edges`; ``low`` and ``high`` are rows of `indptr`.

    A row with more edges than that is cut as well; every reduction merges across the cut.
    """
    starts = torch.arange(0, num_edges, max_edges)
    stops = (starts + max_edges).clamp(max=num_edges)
    pointers = indptr.to(device="cpu", dtype=torch.int64)
    lows = torch.searchsorted(pointers, starts, right=True) - 1
    highs = torch.searchsorted(pointers, stops - 1, right=True)
    return [Chunk(*bounds) for bounds in torch.stack([starts, stops, lows, highs], 1).tolist()]


def smallest_index_dtype(largest: int) -> torch.dtype:
    """int32 where ids up to `largest` fit, else int64."""
    return torch.int32 if largest < 2**31 else torch.int64


@dataclass
class Shard:
    """Edges from one block into this rank's destination rows.

    Args:
        block: the source rows; ``src_rows`` count from ``block.start``.
        indptr: ``[num_dst + 1]``, CSR by destination.
        src_rows: ``[num_edges]`` row inside the block.
        edge_rows: where the shard's edges stand in the edge list that edge tensors follow: a slice, or ``[num_edges]``.
    """

    block: Block
    indptr: Tensor
    src_rows: Tensor
    edge_rows: slice | Tensor
    _transpose: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)

    @property
    def num_edges(self) -> int:
        return self.src_rows.numel()

    @property
    def num_dst(self) -> int:
        return self.indptr.numel() - 1

    def degrees(self) -> Tensor:
        """Edges of this shard per destination row, ``[num_dst]``."""
        return self.indptr[1:] - self.indptr[:-1]

    def dst_rows(self, chunk: Chunk | None = None) -> Tensor:
        """Destination row of each edge, int64; of a chunk, counted from ``chunk.low``."""
        if chunk is None:
            chunk = Chunk(0, self.num_edges, 0, self.num_dst)
        bounds = self.indptr[chunk.low : chunk.high + 1].to(torch.int64).clamp(chunk.start, chunk.stop)
        rows = torch.arange(chunk.high - chunk.low, device=bounds.device)
        return torch.repeat_interleave(rows, bounds[1:] - bounds[:-1], output_size=chunk.stop - chunk.start)

    def chunks(self, max_edges: int) -> list[Chunk]:
        """The shard's edges cut into runs of at most `max_edges`, in destination order; see `cut`."""
        return cut(self.indptr, self.num_edges, max_edges)

    def places(self, positions: slice | Tensor) -> slice | Tensor:
        """Where the edges at `positions` of the shard stand in the edge list that edge tensors follow."""
        if isinstance(self.edge_rows, slice):
            first = self.edge_rows.start
            if isinstance(positions, slice):
                return slice(first + positions.start, first + positions.stop)
            return positions + first
        return self.edge_rows[positions]

    def select(self, edge_tensor: Tensor, chunk: Chunk | None = None) -> Tensor:
        """The shard's rows (or a chunk's) of a tensor with one row per edge of the edge list."""
        if isinstance(self.edge_rows, slice):
            rows = edge_tensor[self.edge_rows]
            return rows if chunk is None else rows[chunk.start : chunk.stop]
        index = self.edge_rows if chunk is None else self.edge_rows[chunk.start : chunk.stop]
        return edge_tensor.index_select(0, index)

    def put(self, edge_tensor: Tensor, rows: Tensor, chunk: Chunk | None = None) -> None:
        """Write `rows` where `select` reads."""
        start, stop = (0, self.num_edges) if chunk is None else (chunk.start, chunk.stop)
        if isinstance(self.edge_rows, slice):
            first = self.edge_rows.start
            edge_tensor[first + start : first + stop] = rows
        else:
            edge_tensor[self.edge_rows[start:stop]] = rows

    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """CSR by source: ``(indptr [block rows + 1], dst_rows [E], position [E] in this shard)``. Built once."""
        if self._transpose is None:
            order = torch.argsort(self.src_rows, stable=True)
            counts = torch.bincount(self.src_rows, minlength=self.block.num_rows)
            indptr = torch.zeros(self.block.num_rows + 1, dtype=torch.int64, device=counts.device)
            torch.cumsum(counts, 0, out=indptr[1:])
            small = smallest_index_dtype(max(self.num_edges, self.num_dst))
            dst = self.dst_rows().to(small)[order]
            self._transpose = (indptr.to(small), dst, order.to(small))
        return self._transpose


@dataclass
class EdgeShards:
    """One edge list, cut by source block. Edge tensors have ``num_edges`` rows in the order of that list.

    Args:
        shards: one per block, in the order of the rounds, the own block first; some may have no edges.
        num_dst: destination rows of this rank.
        num_edges: edges of this rank.
        largest_degree: of any own node, where some edges are left out of the shards; None: as the shards say.
        out_edges: the same edges as the owners of their sources see them, see `core/out_edges.py`.
    """

    shards: tuple[Shard, ...]
    num_dst: int
    num_edges: int
    largest_degree: int | None = None
    out_edges: Any = field(default=None, compare=False, repr=False)

    def degrees(self) -> Tensor:
        """In-degree of each destination row, ``[num_dst]``, int64."""
        total = torch.zeros(self.num_dst, dtype=torch.int64, device=self.shards[0].indptr.device)
        for shard in self.shards:
            total += shard.degrees()
        return total


def shard_order(src_rows: Tensor, dst_rows: Tensor, blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """``(order, block_of_edge)``: the permutation that sorts edges by (block in round order, destination), stably."""
    by_start = sorted(range(len(blocks)), key=lambda i: (blocks[i].start, blocks[i].stop))
    starts = torch.tensor([blocks[i].start for i in by_start], device=src_rows.device)
    rank_of = torch.tensor(by_start, device=src_rows.device)
    block_of_edge = rank_of[torch.bucketize(src_rows, starts, right=True) - 1]
    if _ascending(block_of_edge, dst_rows):
        return torch.arange(dst_rows.numel(), device=dst_rows.device), block_of_edge  # sorting takes time and memory
    by_dst = torch.argsort(dst_rows, stable=True)
    order = by_dst[torch.argsort(block_of_edge[by_dst], stable=True)]
    return order, block_of_edge


def _ascending(first: Tensor, second: Tensor) -> bool:
    """Whether pairs are in ascending order."""
    larger, same = first[1:] > first[:-1], first[1:] == first[:-1]
    return bool((larger | (same & (second[1:] >= second[:-1]))).all())


def build_shards(src_rows: Tensor, dst_rows: Tensor, blocks: Sequence[Block], num_dst: int) -> EdgeShards:
    """The shards of an edge list in own-first source rows and own destination rows, both ``[E]`` int64."""
    order, block_of_edge = shard_order(src_rows, dst_rows, blocks)
    in_order = bool((order[1:] > order[:-1]).all()) if order.numel() else True
    counts = torch.bincount(block_of_edge, minlength=len(blocks)).tolist()
    shards, first = [], 0
    for block, count in zip(blocks, counts):
        span = slice(first, first + count)
        rows = src_rows[span] if in_order else src_rows[order[span]]
        dst = dst_rows[span] if in_order else dst_rows[order[span]]
        indptr = torch.zeros(num_dst + 1, dtype=torch.int64, device=dst.device)
        torch.cumsum(torch.bincount(dst, minlength=num_dst), 0, out=indptr[1:])
        shards.append(
            Shard(
                block=block,
                indptr=indptr.to(smallest_index_dtype(count)),
                src_rows=(rows - block.start).to(smallest_index_dtype(block.num_rows)),
                edge_rows=span if in_order else order[span],
            )
        )
        first += count
    return EdgeShards(tuple(shards), num_dst, src_rows.numel())
