"""The edges of a graph in files, given out part by part as a store holds them, sorted through files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, blocks
from shardpass.data.layout import LaidOutEdges, Layout
from shardpass.data.raw import EdgeType, RawGraph
from shardpass.data.streaming.adjacency import INT32_LIMIT
from shardpass.data.streaming.buckets import Array, Buckets, key_ranges
from shardpass.data.streaming.budget import Budget


class SpilledEdges:
    """As `EdgesByPart`, of edges in files: at most a bucket of them is in memory at once.

    Raises:
        ValueError: when the disk has no room for the temporary files.
    """

    def __init__(self, graph: RawGraph, layout: Layout, edge_type: EdgeType, budget: Budget) -> None:
        self.layout, self.edge_type, self.budget = layout, edge_type, budget
        self._arrays = graph.edges[edge_type]
        self._dst_offsets = layout.offsets[edge_type[2]]
        self._number = np.dtype(np.int32 if graph.num_nodes[edge_type[0]] <= INT32_LIMIT else np.int64)
        in_degrees = torch.zeros(graph.num_nodes[edge_type[2]], dtype=torch.long)
        for _, _, dst in self._new_ids(sources=False):
            in_degrees.index_add_(0, dst, torch.ones_like(dst))
        ends = torch.cat([torch.zeros(1, dtype=torch.long), in_degrees.cumsum(0)])
        self.counts: list[int] = ends[self._dst_offsets].diff().tolist()
        self._buckets = self._spill(key_ranges(in_degrees, budget.bucket_records, self._dst_offsets))

    def of_part(self, part: int) -> LaidOutEdges:
        """The edges whose destination is in a part. To be asked for once, and read before the next part is."""
        first, last = (int(self._dst_offsets[p]) for p in (part, part + 1))
        buckets = self._buckets.of_range(first, last)
        sizes = np.zeros(self.layout.num_parts, np.int64)
        for bucket in buckets:
            sizes += np.bincount(self._src_parts(self._buckets.read(bucket)), minlength=len(sizes))
        starts = np.concatenate([[0], sizes.cumsum()])
        src, dst, edge_ids = self._sorted(buckets, first, last, starts)
        return LaidOutEdges(src, dst, edge_ids, torch.from_numpy(starts))

    def _sorted(self, buckets: range, first: int, last: int, starts: Array) -> list[FileRows]:
        """Sources, rows and edge ids of a part by (source part, row, edge id), in files."""
        folder, total = self._buckets.folder, int(starts[-1])
        kinds: dict[str, np.dtype[Any]] = {"src": self._number, "dst": np.dtype(np.int32), "edge": np.dtype(np.int64)}
        reached = starts.copy()
        for name in kinds:
            (folder / name).write_bytes(b"")
        for bucket in buckets:
            records = self._buckets.read(bucket)
            self._buckets.remove(bucket)
            src_parts = self._src_parts(records)
            keys = torch.from_numpy(src_parts * max(1, last - first) + (records["dst"] - first))
            # records come in the order of edge ids, and a stable sort leaves it among equal keys
            records = records[torch.sort(keys, stable=True).indices.numpy()]
            records["dst"] -= first
            sizes = np.bincount(src_parts, minlength=self.layout.num_parts)
            for name, kind in kinds.items():
                self._place(folder / name, np.ascontiguousarray(records[name], kind), sizes, reached)
            reached[:-1] += sizes
        return [FileRows(folder / name, kind, (total,)) for name, kind in kinds.items()]

    @staticmethod
    def _place(path: os.PathLike[str], values: Array, sizes: Array, places: Array) -> None:
        """Write the values of each source part at its place in the file."""
        done = 0
        with open(path, "r+b") as file:
            for part in np.flatnonzero(sizes):
                file.seek(int(places[part]) * values.itemsize)
                file.write(values[done : done + sizes[part]].data)
                done += sizes[part]

    def _src_parts(self, records: Array) -> Array:
        offsets = self.layout.offsets[self.edge_type[0]].numpy()
        return np.searchsorted(offsets, records["src"], side="right") - 1

    def _spill(self, starts: Array) -> Buckets:
        kind = self._number if self._dst_offsets[-1] <= INT32_LIMIT else np.dtype(np.int64)
        record = np.dtype([("edge", np.int64), ("src", self._number), ("dst", kind)])
        total = len(self._arrays.src)
        self.budget.require_disk(total * (record.itemsize + 16), "sorting the edges by part")
        buckets = Buckets(self.budget.scratch, starts, record)
        for done, src, dst in self._new_ids(sources=True):
            self.budget.report("sort", done, total)
            records = np.empty(len(dst), record)
            records["edge"] = np.arange(done, done + len(dst))
            records["src"], records["dst"] = src.numpy(), dst.numpy()
            buckets.add(dst.numpy(), records)
        self.budget.report("sort", total, total)
        return buckets

    def _new_ids(self, sources: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Edges in blocks: how many came before, new ids of sources (if wanted) and of destinations."""
        src_type, _, dst_type = self.edge_type
        count = self.budget.block_edges
        for start, dst in blocks(self._arrays.dst, count):
            src = torch.empty(0, dtype=torch.long)
            if sources:
                ids = self._arrays.src
                src = ids.block(start, start + count) if isinstance(ids, FileRows) else ids[start : start + count]
                src = self.layout.new_ids[src_type][src.long()]
            yield start, src, self.layout.new_ids[dst_type][dst.long()]
