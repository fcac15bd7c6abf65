"""METIS partitions through pymetis: few cut edges, balanced work."""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.data.raw import NodeType, RawGraph
from shardpass.errors import require

_INT32_LIMIT = 2**31 - 1


def metis_parts(graph: RawGraph, parts: int, seed: int) -> dict[NodeType, Tensor]:
    """The part of each node, int32 [num_nodes], per node type.

    All node types are one graph to METIS, without directions and self-loops; parallel edges weigh as many. The weight
    of a node is its in-degree plus the mean in-degree, so that both edges and nodes are spread evenly.

    Raises:
        MissingDependencyError: when pymetis is not installed.
        ValueError: when the graph is too large for METIS's 32-bit numbers.
    """
    pymetis = require("pymetis", "metis", "partitioning with method 'metis'")
    sizes = list(graph.num_nodes.values())
    total = sum(sizes)
    if parts == 1 or parts >= total:
        part_of = torch.arange(total) if parts > 1 else torch.zeros(total, dtype=torch.long)
    else:
        src, dst = _joined_edges(graph)
        weights = _node_weights(dst, total)
        starts, neighbours, multiplicity = _adjacency(src, dst, total)
        result = pymetis.part_graph(
            parts,
            xadj=starts.numpy(),
            adjncy=neighbours.numpy(),
            vweights=weights.numpy(),
            eweights=multiplicity.numpy(),
            options=pymetis.Options(seed=seed),
        )
        part_of = torch.as_tensor(result.vertex_part)
    return dict(zip(graph.num_nodes, part_of.int().split(sizes)))


def _joined_edges(graph: RawGraph) -> tuple[Tensor, Tensor]:
    """All edges with node ids that run on over the node types."""
    firsts, first = {}, 0
    for node_type, count in graph.num_nodes.items():
        firsts[node_type] = first
        first += count
    empty = torch.empty(0, dtype=torch.long)
    src = [arrays.src.long() + firsts[kind[0]] for kind, arrays in graph.edges.items()]
    dst = [arrays.dst.long() + firsts[kind[2]] for kind, arrays in graph.edges.items()]
    return torch.cat([empty, *src]), torch.cat([empty, *dst])


def _node_weights(dst: Tensor, num_nodes: int) -> Tensor:
    degrees = torch.bincount(dst, minlength=num_nodes)
    weights = degrees + max(1, dst.numel() // num_nodes)
    scale = int(weights.sum()) // (_INT32_LIMIT // 2) + 1  # METIS adds the weights up in 32 bits
    return torch.div(weights + scale - 1, scale, rounding_mode="floor").int()


def _adjacency(src: Tensor, dst: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """CSR of the undirected graph: row starts, neighbours, and the number of directed edges behind each; int32."""
    loops = src == dst
    src, dst = src[~loops], dst[~loops]
    keys = torch.cat([src * num_nodes + dst, dst * num_nodes + src])
    keys, multiplicity = torch.unique(keys, return_counts=True)
    if keys.numel() > _INT32_LIMIT:
        raise ValueError(
            f"METIS counts in 32 bits and this graph has {keys.numel()} adjacencies; "
            "use method='random', or pass an assignment made with another tool"
        )
    rows = torch.div(keys, num_nodes, rounding_mode="floor")
    starts = torch.zeros(num_nodes + 1, dtype=torch.long)
    starts[1:] = torch.bincount(rows, minlength=num_nodes).cumsum(0)
    return starts.int(), (keys - rows * num_nodes).int(), multiplicity.clamp(max=_INT32_LIMIT).int()
