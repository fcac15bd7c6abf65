"""Where each node and edge of a graph goes: new ids that are contiguous per part, and each part's edges in order."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, blocks
from shardpass.data.raw import EdgeType, NodeType, RawGraph

_HASH_BLOCK = 1 << 20  # numbers


@dataclass(frozen=True)
class Layout:
    """New node ids of a partition. The nodes of part p have the new ids `[offsets[p], offsets[p + 1])` of their type.

    part_of: the part of each node by original id, int32 [num_nodes], per node type.
    offsets: int64 [num_parts + 1], per node type.
    node_ids: original ids in the order of the new ids, int64 [num_nodes]; ascending within a part.
    new_ids: new id of each node by original id, int64 [num_nodes].
    """

    num_parts: int
    part_of: dict[NodeType, Tensor]
    offsets: dict[NodeType, Tensor]
    node_ids: dict[NodeType, Tensor]
    new_ids: dict[NodeType, Tensor]

    def own_ids(self, node_type: NodeType, part: int) -> Tensor:
        """Original ids of a part's nodes, in the order of its rows."""
        offsets = self.offsets[node_type]
        return self.node_ids[node_type][int(offsets[part]) : int(offsets[part + 1])]


@dataclass(frozen=True)
class LaidOutEdges:
    """A part's edges of one type (their destinations are in the part), by (source part, destination, original id).

    src: new ids, int64 (int32 where they fit in files). dst: rows of the part, int32. edge_ids: original positions,
    int64. All [num_edges].
    shard_offsets: int64 [num_parts + 1]; the edges from source part q are `[shard_offsets[q], shard_offsets[q + 1])`.
    """

    src: Tensor | FileRows
    dst: Tensor | FileRows
    edge_ids: Tensor | FileRows
    shard_offsets: Tensor


def lay_out(part_of: dict[NodeType, Tensor], num_parts: int) -> Layout:
    """The layout of an assignment of nodes to parts."""
    offsets, node_ids, new_ids = {}, {}, {}
    for node_type, parts in part_of.items():
        order, starts = _group(parts, num_parts)
        offsets[node_type], node_ids[node_type] = starts, order
        new = torch.empty_like(order)
        new[order] = torch.arange(order.numel())
        new_ids[node_type] = new
    return Layout(num_parts, part_of, offsets, node_ids, new_ids)


class EdgesByPart:
    """The edges of one type of a graph, given out part by part."""

    def __init__(self, graph: RawGraph, layout: Layout, edge_type: EdgeType) -> None:
        self.layout, self.edge_type, self.arrays = layout, edge_type, graph.edges[edge_type]
        dst_parts = layout.part_of[edge_type[2]][self.arrays.dst]
        self._order, self._starts = _group(dst_parts, layout.num_parts)

    @property
    def counts(self) -> list[int]:
        """Edges of each part."""
        return self._starts.diff().tolist()

    def of_part(self, part: int) -> LaidOutEdges:
        """The edges whose destination is in a part."""
        layout, (src_type, _, dst_type) = self.layout, self.edge_type
        edge_ids = self._order[int(self._starts[part]) : int(self._starts[part + 1])]
        src, dst = self.arrays.src[edge_ids], self.arrays.dst[edge_ids]
        first, last = (int(layout.offsets[dst_type][p]) for p in (part, part + 1))
        src_parts = layout.part_of[src_type][src].long()
        dst_rows = layout.new_ids[dst_type][dst] - first
        # edge_ids ascend, so a stable sort leaves the original order among equal (source part, destination)
        order = torch.sort(src_parts * max(1, last - first) + dst_rows, stable=True).indices
        sizes = torch.bincount(src_parts, minlength=layout.num_parts)
        return LaidOutEdges(
            src=layout.new_ids[src_type][src[order]],
            dst=dst_rows[order].to(torch.int32),
            edge_ids=edge_ids[order],
            shard_offsets=torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]),
        )


def _group(parts: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Stable order of items by part [n], and where each part starts in it [num_parts + 1]."""
    keys = parts.numpy().astype(np.uint16) if num_parts <= 1 << 16 else parts.numpy()  # 16 bits: a radix sort
    order = torch.from_numpy(np.argsort(keys, kind="stable").astype(np.int64, copy=False))
    sizes = torch.bincount(parts, minlength=num_parts) if parts.numel() else torch.zeros(num_parts, dtype=torch.long)
    return order, torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])


def graph_fingerprint(graph: RawGraph) -> str:
    """A hash of the graph's structure (types, counts, edges in order), the same whatever its partition and fields."""
    digest = hashlib.sha256()
    digest.update(json.dumps(sorted(graph.num_nodes.items())).encode())
    for edge_type in sorted(graph.edges):
        digest.update(json.dumps([edge_type, graph.num_edges[edge_type]]).encode())
        for ends in (graph.edges[edge_type].src, graph.edges[edge_type].dst):
            for _, block in blocks(ends, _HASH_BLOCK):
                digest.update(block.long().numpy().data)
    return digest.hexdigest()


def partition_fingerprint(graph_hash: str, layout: Layout) -> str:
    """A hash of a graph's structure and the part of each node."""
    digest = hashlib.sha256(f"{graph_hash} {layout.num_parts}".encode())
    for node_type in sorted(layout.part_of):
        digest.update(json.dumps(node_type).encode())
        digest.update(layout.part_of[node_type].to(torch.int32).contiguous().numpy().data)
    return digest.hexdigest()
