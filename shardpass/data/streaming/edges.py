"""The edges of a graph, given out part by part as a store holds them, after a sort that goes through files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.core.ranks import tells_of_full_disk
from shardpass.data.file_rows import FileRows
from shardpass.data.layout import Layout
from shardpass.data.raw import EdgeType, RawGraph
from shardpass.data.streaming.buckets import Array, Buckets, integers, key_ranges
from shardpass.data.streaming.budget import Budget
from shardpass.data.team import Team


class SortedEdges(NamedTuple):
    """The edges of one type into the nodes of a part, by (source part, destination, original id), as a store has them.

    src_rows: the source of each edge, int32 [num_edges]: a row of this part, or a place among its part's halo rows.
    row_starts: for each source part where the edges of each destination begin, [num_parts * (num_dst + 1)].
    halo_rows: the distinct sources in other parts, as rows of these parts, ascending in each, int32.
    halo_starts: int64 [num_parts + 1]; the halo rows of source part q are `[halo_starts[q], halo_starts[q + 1])`.
    edge_ids: original positions, int32 or int64 [num_edges].
    """

    src_rows: FileRows
    row_starts: FileRows
    halo_rows: Tensor
    halo_starts: Tensor
    edge_ids: FileRows


class EdgesByPart:
    """The edges of one type of a graph, in memory or in files. At most a bucket of them is sorted in memory at once.

    With several ranks, making it is collective: each reads its share of the edges. Then each gives out `parts_of` it.

    counts: the number of edges into the nodes of each part.
    halo_rows, inner: of each part that was given out here, the number of its halo rows, and of the edges within it.
    """

    def __init__(self, graph: RawGraph, layout: Layout, edge_type: EdgeType, budget: Budget) -> None:
        self.layout, self.edge_type, self.budget = layout, edge_type, budget
        self._arrays = graph.edges[edge_type]
        self._number = integers(graph.num_nodes[edge_type[0]])
        dst_offsets = layout.offsets[edge_type[2]]
        in_degrees = torch.zeros(graph.num_nodes[edge_type[2]], dtype=torch.long)
        for _, ids in budget.team.blocks(self._arrays.dst, budget.block_edges):
            dst = self._new_ids(ids, 2)
            in_degrees.index_add_(0, dst, torch.ones_like(dst))
        in_degrees = budget.team.sum("degrees", in_degrees)
        ends = torch.cat([torch.zeros(1, dtype=torch.long), in_degrees.cumsum(0)])
        self.counts: list[int] = ends[dst_offsets].diff().tolist()
        self.halo_rows: dict[int, int] = {}
        self.inner: dict[int, int] = {}
        self._edge = integers(len(self._arrays.src))
        self._buckets = self._spill(key_ranges(in_degrees, budget.bucket_records, dst_offsets))

    def of_part(self, part: int) -> SortedEdges:
        """The edges into a part of this rank. Ask for each part once, and read it before you ask for the next."""
        first, last = self.layout.span(self.edge_type[2], part)
        buckets = self._buckets.of_range(first, last)
        sources = self._sources(part, buckets)
        kinds = np.dtype(np.int32), self._edge, integers(self.counts[part])
        columns = _Columns(self._buckets.folder, kinds, sources.sizes, last - first)
        for bucket in buckets:
            records, sizes = self._sorted(bucket, first, last)
            rows = sources.row_of[torch.from_numpy(records["src"].astype(np.int64))].numpy()
            low, high = self._buckets.starts[bucket : bucket + 2] - first
            columns.add(rows, records["edge"], records["dst"], sizes, range(low, high))
        self.halo_rows[part] = len(sources.halo_rows)
        self.inner[part] = int(sources.sizes[part])
        src_rows, edge_ids, row_starts = columns.finished()
        return SortedEdges(src_rows, row_starts, sources.halo_rows, sources.halo_starts, edge_ids)

    def _sources(self, part: int, buckets: range) -> _Sources:
        offsets, (first, last) = self.layout.offsets[self.edge_type[0]], self.layout.span(self.edge_type[0], part)
        sizes, is_source = np.zeros(self.layout.num_parts, np.int64), torch.zeros(int(offsets[-1]), dtype=torch.bool)
        for bucket in buckets:
            records = self._buckets.read(bucket)
            sizes += np.bincount(self._src_parts(records), minlength=len(sizes))
            is_source[torch.from_numpy(records["src"].astype(np.int64))] = True
        is_source[first:last] = False
        halo = is_source.nonzero().view(-1)
        starts = torch.searchsorted(halo, offsets)
        row_of = torch.empty(is_source.numel(), dtype=torch.int32)
        row_of[first:last] = torch.arange(last - first, dtype=torch.int32)
        row_of[halo] = (torch.arange(len(halo)) - starts[:-1].repeat_interleave(starts.diff())).int()
        return _Sources(sizes, (halo - offsets[:-1].repeat_interleave(starts.diff())).int(), starts, row_of)

    def _sorted(self, bucket: int, first: int, last: int) -> tuple[Array, Array]:
        """The records of a bucket by (source part, row, edge id), and how many there are of each source part."""
        records = self._buckets.read(bucket, remove=True)
        records["dst"] -= first
        src_parts = self._src_parts(records)
        # the records come in the order of edge ids, and a stable sort keeps this order among equal keys
        keys = src_parts * max(1, last - first) + records["dst"]
        narrow = torch.from_numpy(keys.astype(integers(keys.max(initial=0)), copy=False))  # int32 sorts twice as fast
        records = records.take(torch.sort(narrow, stable=True).indices.numpy())
        return records, np.bincount(src_parts, minlength=self.layout.num_parts)

    def _src_parts(self, records: Array) -> Array:
        offsets = self.layout.offsets[self.edge_type[0]].numpy()
        return np.searchsorted(offsets, records["src"], side="right") - 1

    def _spill(self, starts: Array) -> Buckets:
        record = np.dtype([("edge", self._edge), ("src", self._number), ("dst", integers(int(starts[-1])))])
        total, part_bytes = len(self._arrays.src), max(self.counts) * (4 + 2 * self._edge.itemsize)
        self.budget.require_disk(total * record.itemsize + part_bytes, "sorting the edges by part")
        parts = np.searchsorted(self.layout.offsets[self.edge_type[2]].numpy(), starts[:-1], side="right") - 1
        buckets = Buckets(self.budget, starts, parts, record)
        buckets.fill(self._records(record), "sort", total)
        return buckets

    def _records(self, record: np.dtype[Any]) -> Iterator[tuple[Array, Array]]:
        """Blocks of this rank's edges by their destinations. In each round, those of all ranks follow each other."""
        ends = self._arrays.src, self._arrays.dst
        pairs = zip(*(self.budget.team.blocks(ids, self.budget.block_edges) for ids in ends))
        for (done, src), (_, dst) in pairs:
            self.budget.report("sort", done, len(ends[0]))
            records, keys = np.empty(len(dst), record), self._new_ids(dst, 2).numpy()
            records["edge"] = np.arange(done, done + len(dst))
            records["src"], records["dst"] = self._new_ids(src, 0).numpy(), keys
            yield keys, records

    def _new_ids(self, ids: Tensor, end: int) -> Tensor:
        """The new ids of one end of some edges: 0 is the source type, 2 the destination type."""
        return self.layout.new_ids[self.edge_type[end]][ids.long()]


def parts_of(num_parts: int, team: Team) -> range:
    """The parts that this rank gives out."""
    return range(team.rank, num_parts, team.size)


class _Sources(NamedTuple):
    """The sources of a part's edges: how many edges come from each part, the halo, and the row of each source.

    row_of: by new id, int32 [num_nodes]: the row of an own node, the place of another one among the halo of its part.
    """

    sizes: Array
    halo_rows: Tensor
    halo_starts: Tensor
    row_of: Tensor


class _Columns:
    """The columns of a part in files, which are filled some destinations at a time.

    `kinds` are the dtypes of sources, edge ids and row pointers; `sizes` are the numbers of edges from each part.
    """

    def __init__(self, folder: Path, kinds: tuple[np.dtype[Any], ...], sizes: Array, num_dst: int) -> None:
        self._kinds, self._num_dst = kinds, num_dst
        self._paths = [folder / name for name in ("src", "edge", "starts")]
        for path in self._paths:
            path.write_bytes(b"")
        self._first = np.cumsum(sizes) - sizes
        self._before = np.zeros_like(sizes)
        self._total = int(sizes.sum())

    def add(self, src_rows: Array, edge_ids: Array, dst: Array, sizes: Array, rows: range) -> None:
        """Write the edges into the destinations `rows`, of which `sizes` come from each part, one part's first."""
        ends = np.cumsum(sizes)
        src, edge, starts = self._paths
        with open(src, "r+b") as src_file, open(edge, "r+b") as edge_file, open(starts, "r+b") as starts_file:
            for part, (end, size, before) in enumerate(zip(ends, sizes, self._before)):
                mine, place = slice(end - size, end), self._first[part] + before
                _put(src_file, src_rows[mine], self._kinds[0], place)
                _put(edge_file, edge_ids[mine], self._kinds[1], place)
                pointers = before + np.searchsorted(dst[mine], np.arange(rows.start, rows.stop))
                _put(starts_file, pointers, self._kinds[2], part * (self._num_dst + 1) + rows.start)
        self._before = self._before + sizes

    def finished(self) -> Iterator[FileRows]:
        """The three columns, after the last row pointers have been written."""
        none, num_parts = np.empty(0, np.int32), len(self._first)
        self.add(none, none, none, np.zeros_like(self._first), range(self._num_dst, self._num_dst + 1))
        counts = self._total, self._total, num_parts * (self._num_dst + 1)
        return (
            FileRows.of_numbers(*column) for column in zip(self._paths, self._kinds, ((count,) for count in counts))
        )


def _put(file: BinaryIO, values: Array, kind: np.dtype[Any], place: int) -> None:
    """Write numbers where the number `place` of a file is."""
    if len(values):
        start = int(place) * kind.itemsize
        with tells_of_full_disk(file.name, start + len(values) * kind.itemsize):
            file.seek(start)
            file.write(np.ascontiguousarray(values, kind).data)
            file.flush()
