"""Where each node of a graph goes: new ids that are contiguous in each part. And the fingerprints of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardpass.data.file_rows import blocks
from shardpass.data.raw import NodeType, RawGraph

_HASH_BLOCK = 1 << 20  # numbers


@dataclass(frozen=True)
class Layout:
    """New node ids of a partition. The nodes of part p have the new ids `[offsets[p], offsets[p + 1])` of their type.

    Each attribute but `num_parts` has a tensor for each node type:
    part_of: the part of each node by original id, int32 [num_nodes].
    offsets: int64 [num_parts + 1].
    node_ids: original ids in the order of the new ids, int64 [num_nodes]; ascending within a part.
    new_ids: the new id of each node by original id, int64 [num_nodes].
    """

    num_parts: int
    part_of: dict[NodeType, Tensor]
    offsets: dict[NodeType, Tensor]
    node_ids: dict[NodeType, Tensor]
    new_ids: dict[NodeType, Tensor]

    def span(self, node_type: NodeType, part: int) -> tuple[int, int]:
        """The first new id of a part's nodes, and the one after the last."""
        first, stop = self.offsets[node_type][part : part + 2].tolist()
        return first, stop

    def own_ids(self, node_type: NodeType, part: int) -> Tensor:
        """Original ids of a part's nodes, in the order of its rows."""
        return self.node_ids[node_type][slice(*self.span(node_type, part))]


def lay_out(part_of: dict[NodeType, Tensor], num_parts: int) -> Layout:
    """The layout of an assignment of nodes to parts."""
    offsets, node_ids, new_ids = {}, {}, {}
    for node_type, parts in part_of.items():
        sizes = torch.bincount(parts, minlength=num_parts)
        if num_parts and int(sizes.max()) >= 2**31:
            raise ValueError(
                f"a part would have {int(sizes.max())} nodes {node_type!r}; at most {2**31 - 1}: make more parts"
            )
        order = torch.sort(parts, stable=True).indices
        offsets[node_type] = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        node_ids[node_type] = order
        new_ids[node_type] = torch.empty_like(order)
        new_ids[node_type][order] = torch.arange(order.numel())
    return Layout(num_parts, part_of, offsets, node_ids, new_ids)


def graph_fingerprint(graph: RawGraph) -> str:
    """A hash of the graph's types, counts and edges in order. Its partition and fields do not matter."""
    digest = hashlib.sha256()
    digest.update(json.dumps(sorted(graph.num_nodes.items())).encode())
    for edge_type in sorted(graph.edges):
        digest.update(json.dumps([edge_type, graph.num_edges[edge_type]]).encode())
        for ends in (graph.edges[edge_type].src, graph.edges[edge_type].dst):
            for _, block in blocks(ends, _HASH_BLOCK):
                digest.update(block.long().numpy().data)
    return digest.hexdigest()


def partition_fingerprint(graph_hash: str, num_parts: int, part_of: Mapping[NodeType, Tensor]) -> str:
    """A hash of the graph's structure and the part of each node."""
    digest = hashlib.sha256(f"{graph_hash} {num_parts}".encode())
    for node_type in sorted(part_of):
        digest.update(json.dumps(node_type).encode())
        digest.update(part_of[node_type].to(torch.int32).contiguous().numpy().data)
    return digest.hexdigest()
