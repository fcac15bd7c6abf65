"""The neighbours of all nodes, one run of nodes after the other."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows
from shardpass.data.raw import EdgeType, RawGraph
from shardpass.data.rows import Field
from shardpass.data.streaming.buckets import Array, Buckets, integers, key_ranges
from shardpass.data.streaming.budget import Budget
from shardpass.data.team import Team

_MOST_WEIGHT = 2**30
_LARGEST_DEGREE = 2**20
"""That is told apart when edges are sampled, so that a hub does not cost memory."""
EDGE_BYTES, NODE_BYTES = 12, 16
"""What a rank keeps of the structure for training: for each in-edge the source in forward, and the destination and the
place in backward; for each node where its edges begin, in both orders, and its original id."""


class Neighbourhoods(NamedTuple):
    """The neighbours of the nodes first, first + 1, ...: those of the i-th are `neighbours[starts[i] : starts[i + 1]]`.

    They ascend. A node is a neighbour whatever the direction of the edge. Self-loops do not count.

    multiplicity: how many edges each neighbour stands for, int64.
    """

    first: int
    starts: Array
    neighbours: Array
    multiplicity: Array


class Adjacency:
    """The neighbours of a graph's nodes, with the ids of `joined_edges`.

    A graph in memory is a single run. The edges of a graph in files are sorted through further files.

    [Note: a sample of the edges] A partitioner's memory grows with the edges, so it may be given some of them only. An
    edge is kept with probability ``min(1, t / d)``, where d is the smaller of the degrees of its ends: a node with at
    most t edges keeps all of them. What is kept depends on the ids of its ends alone, so that parallel edges and both
    directions stay together.

    most: neighbours that are kept, all nodes together, about; by default all.
    neighbours: as many as there are, with parallel edges and self-loops. kept: about as many as are kept.
    in_degrees: the number of edges into each node, self-loops included, int64 [num_nodes].
    in_bytes: what a rank keeps of these edges, fields included, int64 [num_nodes].
    """

    def __init__(self, graph: RawGraph, budget: Budget, most: int | None = None) -> None:
        self.graph, self.budget = graph, budget
        self.num_nodes = sum(graph.num_nodes.values())
        self.total = sum(graph.num_edges.values())
        self.in_degrees, self.in_bytes, degrees = (torch.zeros(self.num_nodes, dtype=torch.long) for _ in range(3))
        num_bytes = {kind: torch.tensor(EDGE_BYTES + _row_bytes(graph.edge_fields[kind])) for kind in graph.edges}
        for done, kind, src, dst in joined_edges(graph, budget.block_edges, budget.team):
            budget.report("count", done, self.total)
            ones = torch.ones(len(src), dtype=torch.long)
            self.in_degrees.index_add_(0, dst, ones)
            self.in_bytes.index_add_(0, dst, num_bytes[kind].expand(len(dst)))
            degrees.index_add_(0, src, ones)
        self.in_degrees, self.in_bytes, degrees = (
            budget.team.sum("degrees", counts) for counts in (self.in_degrees, self.in_bytes, degrees)
        )
        budget.report("count", self.total, self.total)
        degrees += self.in_degrees
        self._sampled: Tensor | None = None
        self.neighbours = self.kept = int(degrees.sum())
        if most is not None and self.neighbours > most:
            self.kept, self._sampled = self._odds(degrees, most)
        self._buckets: Buckets | None = None
        if budget.team.size > 1 or any(isinstance(arrays.src, FileRows) for arrays in graph.edges.values()):
            # the first rank gets a bucket of each rank at the same time
            self._buckets = self._spill(key_ranges(degrees, max(1, budget.bucket_records // budget.team.size)))
        else:
            ends = [(src, dst) for _, src, dst in self._edges(max(1, self.total))]
            src, dst = (torch.cat(parts) for parts in zip(*ends)) if ends else torch.empty(2, 0, dtype=torch.long)
            self._all = to_run(0, self.num_nodes, torch.cat([src, dst]).numpy(), torch.cat([dst, src]).numpy())

    def runs(self) -> Iterator[Neighbourhoods]:
        """All nodes in ascending order, once, on rank 0. The other ranks help and are given nothing. Collective."""
        team = self.budget.team
        if self._buckets is None:
            yield self._all
            return
        for first in range(0, len(self._buckets), team.size):
            _, *own = team.together("merging edges", partial(_run_of, self._buckets, first + team.rank))
            columns = [team.to_first("merged edges", array) for array in own]
            for bucket, arrays in enumerate(zip(*columns), first):
                if team.rank == 0 and bucket < len(self._buckets):
                    yield Neighbourhoods(int(self._buckets.starts[bucket]), *arrays)

    def weights(self, parts: int, given: Tensor | None = None) -> Tensor:
        """What each node weighs, int64 [num_nodes], so that what ranks hold is balanced: `given`, or bytes.

        The bytes are those of the node's fields and in-edges, and of the structure that a rank keeps for them. All
        weights together are about 2**30 at most, since partitioners add them up in 32 bits. No node weighs more than
        half a part: what is larger than a part cannot be balanced, and partitioners that try leave other parts empty.
        """
        if given is None:
            fields = self.graph.node_fields
            counts = [(NODE_BYTES + _row_bytes(fields[kind]), count) for kind, count in self.graph.num_nodes.items()]
            of_nodes = [torch.full((count,), num_bytes, dtype=torch.float64) for num_bytes, count in counts]
            given = self.in_bytes + torch.cat(of_nodes)
        else:  # in any unit: what is rounded up below must be little
            given = given.double() * (_MOST_WEIGHT / float(given.sum()))
        weights = given.double() * min(1.0, _MOST_WEIGHT / max(1.0, float(given.sum())))
        return weights.clamp(max=max(1.0, float(weights.sum()) / (2 * parts))).ceil().clamp(min=1).long()

    def close(self) -> None:
        """Delete the temporary files."""
        if self._buckets is not None:
            shutil.rmtree(self._buckets.folder)

    def _spill(self, starts: Array) -> Buckets:
        record = np.dtype([(name, integers(self.num_nodes)) for name in ("node", "neighbour")])
        self.budget.require_disk(2 * self.total * record.itemsize, "sorting the edges by node")
        buckets = Buckets(self.budget, starts, np.arange(len(starts) - 1), record)
        buckets.fill(self._records(record), "bucket", self.total)
        return buckets

    def _odds(self, degrees: Tensor, most: int) -> tuple[int, Tensor]:
        """The ``t / d`` of each node, float32 [num_nodes], with the largest t for which at most `most` are kept.

        In front of it, about as many as that keeps. Degrees count as `_LARGEST_DEGREE` where they are larger.
        """
        smaller = torch.zeros(min(int(degrees.max()), _LARGEST_DEGREE) + 1, dtype=torch.long)
        for _, _, src, dst in joined_edges(self.graph, self.budget.block_edges, self.budget.team):
            degree = torch.minimum(degrees[src], degrees[dst]).clamp(max=_LARGEST_DEGREE)
            smaller += torch.bincount(degree, minlength=len(smaller))
        smaller = self.budget.team.sum("smaller degrees", smaller)
        below, edges = torch.arange(1, len(smaller)), smaller[1:].double()
        kept = 2 * (edges.cumsum(0) + below * (edges / below).flip(0).cumsum(0).flip(0) - edges)  # for each t
        limit = max(1, int((kept <= most).sum()))
        return int(kept[limit - 1]), limit / degrees.clamp(1, _LARGEST_DEGREE).float()

    def _edges(self, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """As `joined_edges`, without types, and without those that are left out."""
        for done, _, src, dst in joined_edges(self.graph, count, self.budget.team):
            if self._sampled is None:
                yield done, src, dst
            else:
                keep = _uniform(src, dst) < torch.maximum(self._sampled[src], self._sampled[dst])
                yield done, src[keep], dst[keep]

    def _records(self, record: np.dtype[Any]) -> Iterator[tuple[Array, Array]]:
        for done, src, dst in self._edges(self.budget.block_edges):
            self.budget.report("bucket", done, self.total)
            for nodes, neighbours in ((src, dst), (dst, src)):
                records = np.empty(len(nodes), record)
                records["node"], records["neighbour"] = nodes.numpy(), neighbours.numpy()
                yield nodes.numpy(), records


def _run_of(buckets: Buckets, bucket: int) -> Neighbourhoods:
    """The nodes of a bucket, or none behind the last one."""
    if bucket >= len(buckets):
        return Neighbourhoods(0, *np.empty((3, 0), np.int64))
    first, last = (int(node) for node in buckets.starts[bucket : bucket + 2])
    records = buckets.read(bucket, remove=True)
    return to_run(first, last - first, records["node"], records["neighbour"])


def _uniform(src: Tensor, dst: Tensor) -> Tensor:
    """A number in [0, 1) for each pair of nodes, the same in both directions: the mixer of SplitMix64."""
    mixed = torch.minimum(src, dst) * -0x61C8864680B583EB + torch.maximum(src, dst)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((mixed ^ (mixed >> 31)) & ((1 << 24) - 1)).float() / (1 << 24)


def joined_edges(graph: RawGraph, count: int, team: Team) -> Iterator[tuple[int, EdgeType, Tensor, Tensor]]:
    """This rank's edges of all types, at most `count` at a time: how many are before them, their type, and both ends.

    The ids run on over the node types, in the order of `graph.num_nodes`. Every rank has as many blocks.
    """
    firsts = dict(zip(graph.num_nodes, np.cumsum([0, *graph.num_nodes.values()]).tolist()))
    done = 0
    for kind, arrays in graph.edges.items():
        for (start, src), (_, dst) in zip(team.blocks(arrays.src, count), team.blocks(arrays.dst, count)):
            yield done + start, kind, src.long() + firsts[kind[0]], dst.long() + firsts[kind[2]]
        done += graph.num_edges[kind]


def _row_bytes(fields: Mapping[str, Field]) -> int:
    """The bytes of one row of all fields."""
    return sum(math.prod(field.shape[1:]) * field.dtype.itemsize for field in fields.values())


def to_run(first: int, count: int, nodes: Array, neighbours: Array) -> Neighbourhoods:
    """The run of `count` nodes from pairs (node, neighbour) in any order."""
    keep = nodes != neighbours
    rows, neighbours = nodes[keep].astype(np.int64) - first, neighbours[keep]
    bits = int(neighbours.max(initial=0)).bit_length()
    ascending = torch.sort(torch.from_numpy((rows << bits) | neighbours)).values
    pairs, multiplicity = torch.unique_consecutive(ascending, return_counts=True)
    starts = torch.searchsorted(pairs, torch.arange(count + 1) << bits)
    return Neighbourhoods(first, starts.numpy(), (pairs & ((1 << bits) - 1)).numpy(), multiplicity.numpy())
