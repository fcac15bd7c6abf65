"""Shards: the edges from one block of source rows into this rank's nodes, as CSR by destination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.ranks import ordinary_tensors
from shardpass.core.sharding.host_copies import to_device, to_host
from shardpass.core.sharding.ordering import stable_order

_EDGES_AT_ONCE = 1 << 20


class Block(NamedTuple):
    """Source rows ``[start, stop)`` of one owner, in own-first numbering: the own ones, or those of one round."""

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
    """Chunks of at most `max_edges` of the edges that `indptr` groups; ``low`` and ``high`` are rows of `indptr`.

    A row with more edges is cut as well, since every reduction merges across the cut. One chunk spans all rows, so that
    nothing is read of `indptr`, which may be on a device.
    """
    if num_edges <= max_edges:
        return [Chunk(0, num_edges, 0, indptr.numel() - 1)] if num_edges else []
    starts = torch.arange(0, num_edges, max_edges, dtype=indptr.dtype, device=indptr.device)
    stops = (starts + max_edges).clamp(max=num_edges)
    lows = torch.searchsorted(indptr, starts, right=True, out_int32=indptr.dtype == torch.int32) - 1
    highs = torch.searchsorted(indptr, stops - 1, right=True, out_int32=indptr.dtype == torch.int32)
    return [Chunk(*bounds) for bounds in torch.stack([starts, stops, lows, highs], 1).tolist()]


def smallest_index_dtype(largest: int) -> torch.dtype:
    """int32 if ids up to `largest` fit, else int64."""
    return torch.int32 if largest < 2**31 else torch.int64


def running(chosen: Tensor) -> Tensor:
    """How many are true before each position, ``[n + 1]``."""
    counts = torch.zeros(chosen.numel() + 1, dtype=smallest_index_dtype(chosen.numel()), device=chosen.device)
    torch.cumsum(chosen, 0, dtype=counts.dtype, out=counts[1:])
    return counts


class PlacedRows(NamedTuple):
    """Rows of a block where they lie in a larger table, such as another rank's memory: ``table[places]``.

    Args:
        table: ``[rows, ...]``.
        places: ``[block rows]``.
    """

    table: Tensor
    places: Tensor


class LazyTensor:
    """The owner of a tensor that is made when somebody first reads it, such as numbers with one per edge."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._made: Tensor | Callable[[], Tensor] = make

    def read(self) -> Tensor:
        """The tensor."""
        if not isinstance(self._made, Tensor):
            with ordinary_tensors():
                self._made = self._made()
        return self._made


class SpreadRows(NamedTuple):
    """Places of edges that follow each other from `start` on, but for a few edges that are elsewhere.

    Args:
        positions: of those few among the edges, ascending, ``[few]``.
        places: where they are, ``[few]``.
    """

    start: int
    positions: Tensor
    places: Tensor

    def of(self, edges: slice | Tensor) -> Tensor:
        """The places of the edges at some positions, made anew."""
        dtype, device = self.places.dtype, self.places.device
        if isinstance(edges, Tensor):
            before = torch.searchsorted(self.positions, edges.to(self.positions.dtype))
            found = (edges + self.start - before).to(dtype)
            at = before.clamp(max=self.positions.numel() - 1)
            return torch.where(self.positions[at] == edges, self.places[at], found)
        low, high = torch.searchsorted(self.positions, self.positions.new_tensor([edges.start, edges.stop])).tolist()
        few = self.positions[low:high] - edges.start
        is_elsewhere = torch.zeros(edges.stop - edges.start, dtype=torch.bool, device=device)
        is_elsewhere[few] = True
        first = self.start + edges.start - low
        found = torch.arange(first, first + is_elsewhere.numel(), dtype=dtype, device=device)
        found -= is_elsewhere.cumsum(0, dtype=dtype)
        found[few] = self.places[low:high]
        return found


@dataclass(frozen=True, eq=False)
class Shard:
    """Edges from one block into this rank's destination rows.

    Args:
        block: the source rows; ``src_rows`` count from ``block.start``.
        indptr: ``[num_dst + 1]``, CSR by destination.
        src_rows: ``[num_edges]`` row inside the block.
        rows: what `edge_rows` is, or what makes it.
        home: the shard in CPU memory of which this is a copy, see `streamed_shards.py`. Edge tensors are there as well.
    """

    block: Block
    indptr: Tensor
    src_rows: Tensor
    rows: slice | Tensor | LazyTensor | SpreadRows
    home: Shard | None = field(default=None, repr=False)

    @property
    def edge_rows(self) -> slice | Tensor:
        """Where the shard's edges stand in the edge list that edge tensors follow: a slice, or ``[num_edges]``."""
        if isinstance(self.rows, SpreadRows):
            return self.rows.of(slice(0, self.num_edges))
        return self.rows.read() if isinstance(self.rows, LazyTensor) else self.rows

    @property
    def num_edges(self) -> int:
        return self.src_rows.numel()

    @property
    def num_dst(self) -> int:
        return self.indptr.numel() - 1

    def reading(self, rows: Tensor | PlacedRows) -> tuple[Shard, Tensor]:
        """``(shard, table)``: the same edges by destination, with ``src_rows`` that are rows of `table`."""
        if isinstance(rows, Tensor):
            return self, rows
        return Shard(self.block, self.indptr, rows.places.index_select(0, self.src_rows), self.rows), rows.table

    def degrees(self) -> Tensor:
        """Edges of this shard per destination row, ``[num_dst]``."""
        return self.indptr[1:] - self.indptr[:-1]

    def dst_rows(self, chunk: Chunk | None = None) -> Tensor:
        """Destination row of each edge, int64. Those of a chunk are counted from ``chunk.low``."""
        if chunk is None:
            chunk = Chunk(0, self.num_edges, 0, self.num_dst)
        bounds = self.indptr[chunk.low : chunk.high + 1].to(torch.int64).clamp(chunk.start, chunk.stop)
        rows = torch.arange(chunk.high - chunk.low, device=bounds.device)
        return torch.repeat_interleave(rows, bounds[1:] - bounds[:-1], output_size=chunk.stop - chunk.start)

    def chunks(self, max_edges: int) -> list[Chunk]:
        """Chunks of at most `max_edges` of the shard's edges, in destination order; see `cut`."""
        return cut(self.indptr if self.home is None else self.home.indptr, self.num_edges, max_edges)

    def places(self, positions: slice | Tensor) -> slice | Tensor:
        """Where the edges at `positions` of the shard stand in the edge list that edge tensors follow."""
        if self.home is not None:
            return self.home.places(to_host(positions) if isinstance(positions, Tensor) else positions)
        if isinstance(self.rows, SpreadRows):
            return self.rows.of(positions)
        rows = self.edge_rows
        if isinstance(rows, Tensor):
            return rows[positions]
        if isinstance(positions, slice):
            return slice(rows.start + positions.start, rows.start + positions.stop)
        return positions + rows.start

    def select(self, edge_tensor: Tensor, chunk: Chunk | None = None) -> Tensor:
        """The shard's rows (or a chunk's) of a tensor with one row per edge of the edge list."""
        places = self.places(slice(0, self.num_edges) if chunk is None else slice(chunk.start, chunk.stop))
        found = edge_tensor[places] if isinstance(places, slice) else edge_tensor.index_select(0, places)
        return found if self.home is None else to_device(found, self.indptr.device)

    def put(self, edge_tensor: Tensor, rows: Tensor, chunk: Chunk | None = None) -> None:
        """Write `rows` where `select` reads."""
        rows = rows if self.home is None else to_host(rows)
        edge_tensor[self.places(slice(0, self.num_edges) if chunk is None else slice(chunk.start, chunk.stop))] = rows


@dataclass(frozen=True, eq=False)
class EdgeShards:
    """One edge list, cut by source block. Edge tensors have ``num_edges`` rows in the order of that list.

    Args:
        shards: one per block, in the order of the rounds, after those of the own block. Some may have no edges.
        num_dst: destination rows of this rank.
        num_edges: edges of this rank.
        largest_degree: the largest in-degree of an own node, if the shards leave out some edges; else None.
        num_own: how many shards are of the own block: two where a layer added edges to a list (self-loops).
        is_stored: whether the edges from other ranks are those of a graph, all of them, and not some of one call.
    """

    shards: tuple[Shard, ...]
    num_dst: int
    num_edges: int
    largest_degree: int | None = None
    num_own: int = 1
    is_stored: bool = False

    def numbers(self, position: int) -> range:
        """Which of the shards are of the block at `position`."""
        last = position + self.num_own
        return range(last - 1 if position else 0, last)

    def position(self, number: int) -> int:
        """The position of the block of a shard."""
        return max(0, number - self.num_own + 1)

    def degrees(self) -> Tensor:
        """How many of these edges end in each destination row, ``[num_dst]`` int64, on the device of the shards."""
        total = torch.zeros(self.num_dst, dtype=torch.int64, device=self.shards[0].indptr.device)
        for shard in self.shards:
            total += shard.degrees()
        return total

    def row(self, end: int) -> Tensor:
        """Row 0 (sources, own-first) or row 1 (destinations) of the edge list, ``[num_edges]`` int64, made anew."""
        rows = torch.empty(self.num_edges, dtype=torch.int64, device=self.shards[0].indptr.device)
        for shard in self.shards:
            is_cut = shard.num_edges > _EDGES_AT_ONCE and not rows.is_cuda
            whole = Chunk(0, shard.num_edges, 0, shard.num_dst)
            for chunk in shard.chunks(_EDGES_AT_ONCE) if is_cut else [whole]:
                numbers = shard.src_rows[chunk.start : chunk.stop] if end == 0 else shard.dst_rows(chunk)
                first = shard.block.start if end == 0 else chunk.low
                numbers = numbers.to(rows.dtype)
                rows[shard.places(slice(chunk.start, chunk.stop))] = numbers + first if first else numbers
        return rows


def shard_order(src_rows: Tensor, dst_rows: Tensor, blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """``(order, block_of_edge)``: `order` sorts edges by (block in round order, destination), and is stable."""
    by_start = sorted(range(len(blocks)), key=lambda i: (blocks[i].start, blocks[i].stop))
    starts = torch.tensor([blocks[i].start for i in by_start], device=src_rows.device)
    rank_of = torch.tensor(by_start, device=src_rows.device)
    block_of_edge = rank_of[torch.bucketize(src_rows, starts, right=True) - 1]
    if _ascending(block_of_edge, dst_rows):
        return torch.arange(dst_rows.numel(), device=dst_rows.device), block_of_edge  # sorting takes time and memory
    width = int(dst_rows.max()) + 1
    return stable_order(block_of_edge * width + dst_rows, len(blocks) * width), block_of_edge


def _ascending(first: Tensor, second: Tensor) -> bool:
    """Whether the pairs ``(first[i], second[i])`` ascend."""
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
                rows=span if in_order else order[span].to(smallest_index_dtype(order.numel())),
            )
        )
        first += count
    return EdgeShards(tuple(shards), num_dst, src_rows.numel())
