"""The edges of a graph, given out part by part as a store holds them, after a sort that goes through files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, blocks
from shardpass.data.layout import Layout
from shardpass.data.raw import EdgeType, RawGraph
from shardpass.data.streaming.adjacency import INT32_LIMIT
from shardpass.data.streaming.buckets import Array, Buckets, key_ranges
from shardpass.data.streaming.budget import Budget


class SortedEdges(NamedTuple):
    """The edges of one type into the nodes of a part, by (source part, destination, original id), in files.

    src: new ids, int32 if they fit, else int64. dst: rows of the part, int32. edge_ids: original positions, int64.
    All [num_edges].
    shard_offsets: int64 [num_parts + 1]; the edges from source part q are `[shard_offsets[q], shard_offsets[q + 1])`.
    """

    src: FileRows
    dst: FileRows
    edge_ids: FileRows
    shard_offsets: Tensor


class EdgesByPart:
    """The edges of one type of a graph, in memory or in files. At most a bucket of them is sorted in memory at once.

    counts: the number of edges into the nodes of each part.

    Raises:
        ValueError: when the disk has no room for the temporary files.
    """

    def __init__(self, graph: RawGraph, layout: Layout, edge_type: EdgeType, budget: Budget) -> None:
        self.layout, self.edge_type, self.budget = layout, edge_type, budget
        self._arrays = graph.edges[edge_type]
        self._number = np.dtype(np.int32 if graph.num_nodes[edge_type[0]] <= INT32_LIMIT else np.int64)
        dst_offsets = layout.offsets[edge_type[2]]
        in_degrees = torch.zeros(graph.num_nodes[edge_type[2]], dtype=torch.long)
        for _, ids in blocks(self._arrays.dst, budget.block_edges):
            dst = self._new_ids(ids, 2)
            in_degrees.index_add_(0, dst, torch.ones_like(dst))
        ends = torch.cat([torch.zeros(1, dtype=torch.long), in_degrees.cumsum(0)])
        self.counts: list[int] = ends[dst_offsets].diff().tolist()
        self._buckets = self._spill(key_ranges(in_degrees, budget.bucket_records, dst_offsets))

    def of_part(self, part: int) -> SortedEdges:
        """The edges into the nodes of a part. Ask for each part once, and read it before you ask for the next."""
        first, last = self.layout.span(self.edge_type[2], part)
        buckets = self._buckets.of_range(first, last)
        sizes = np.zeros(self.layout.num_parts, np.int64)
        for bucket in buckets:
            sizes += np.bincount(self._src_parts(self._buckets.read(bucket)), minlength=len(sizes))
        starts = np.concatenate([[0], sizes.cumsum()])
        kinds: dict[str, np.dtype[Any]] = {"src": self._number, "dst": np.dtype(np.int32), "edge": np.dtype(np.int64)}
        paths = {name: self._buckets.folder / name for name in kinds}
        for path in paths.values():
            path.write_bytes(b"")
        reached = starts[:-1].copy()
        for bucket in buckets:
            records, sizes = self._sorted(bucket, first, last)
            for name, kind in kinds.items():
                _place(paths[name], np.ascontiguousarray(records[name], kind), sizes, reached)
            reached += sizes
        src, dst, edge_ids = (FileRows.of_numbers(paths[k], kinds[k], (int(starts[-1]),)) for k in kinds)
        return SortedEdges(src, dst, edge_ids, torch.from_numpy(starts))

    def _sorted(self, bucket: int, first: int, last: int) -> tuple[Array, Array]:
        """The records of a bucket by (source part, row, edge id), and how many there are of each source part."""
        records = self._buckets.read(bucket)
        self._buckets.remove(bucket)
        records["dst"] -= first
        src_parts = self._src_parts(records)
        # the records come in the order of edge ids, and a stable sort keeps this order among equal keys
        keys = torch.from_numpy(src_parts * max(1, last - first) + records["dst"])
        records = records[torch.sort(keys, stable=True).indices.numpy()]
        return records, np.bincount(src_parts, minlength=self.layout.num_parts)

    def _src_parts(self, records: Array) -> Array:
        offsets = self.layout.offsets[self.edge_type[0]].numpy()
        return np.searchsorted(offsets, records["src"], side="right") - 1

    def _spill(self, starts: Array) -> Buckets:
        kind = self._number if starts[-1] <= INT32_LIMIT else np.dtype(np.int64)
        record = np.dtype([("edge", np.int64), ("src", self._number), ("dst", kind)])
        total = len(self._arrays.src)
        self.budget.require_disk(total * (record.itemsize + 16), "sorting the edges by part")
        buckets = Buckets(self.budget.scratch, starts, record)
        for done, src, dst in self._blocks():
            self.budget.report("sort", done, total)
            records = np.empty(len(dst), record)
            records["edge"] = np.arange(done, done + len(dst))
            records["src"], records["dst"] = src.numpy(), dst.numpy()
            buckets.add(dst.numpy(), records)
        self.budget.report("sort", total, total)
        return buckets

    def _blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Blocks of edges: the position of the first one, and the new ids of sources and destinations."""
        pairs = zip(*(blocks(ends, self.budget.block_edges) for ends in (self._arrays.src, self._arrays.dst)))
        for (start, src), (_, dst) in pairs:
            yield start, self._new_ids(src, 0), self._new_ids(dst, 2)

    def _new_ids(self, ids: Tensor, end: int) -> Tensor:
        """The new ids of one end of some edges: 0 is the source type, 2 the destination type."""
        return self.layout.new_ids[self.edge_type[end]][ids.long()]


def _place(path: Path, values: Array, sizes: Array, places: Array) -> None:
    """Write the values of each source part at its place in the file."""
    done = 0
    with open(path, "r+b") as file:
        for part in np.flatnonzero(sizes):
            file.seek(int(places[part]) * values.itemsize)
            file.write(values[done : done + sizes[part]].data)
            done += sizes[part]
