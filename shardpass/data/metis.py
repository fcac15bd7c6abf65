"""METIS partitions through pymetis: few cut edges, balanced work."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from shardpass.data.file_rows import loaded
from shardpass.data.raw import NodeType, RawGraph
from shardpass.errors import require


def metis_parts(graph: RawGraph, parts: int, seed: int) -> dict[NodeType, Tensor]:
    """The part of each node, int32 [num_nodes], per node type.

    All node types are one graph to METIS, without directions and self-loops; parallel edges weigh as many. The weight
    of a node is its in-degree plus the mean in-degree, so that both edges and nodes are spread evenly.

    Raises:
        MissingDependencyError: when pymetis is not installed.
        ValueError: when the graph is too large for a METIS built with 32-bit numbers.
    """
    instead = "use method='fennel' (--method fennel), which needs no package"
    pymetis = require("pymetis", "metis", "partitioning with method 'metis', the default,", instead)
    sizes = list(graph.num_nodes.values())
    total = sum(sizes)
    if parts == 1 or parts >= total:
        part_of = torch.arange(total) if parts > 1 else torch.zeros(total, dtype=torch.long)
    else:
        part_of = _part_graph(pymetis, graph, parts, total, seed)
    return dict(zip(graph.num_nodes, part_of.int().split(sizes)))


def _part_graph(pymetis: ModuleType, graph: RawGraph, parts: int, num_nodes: int, seed: int) -> Tensor:
    wide = hasattr(pymetis, "zero_copy_dtype") and pymetis.zero_copy_dtype().itemsize == 8
    limit = torch.iinfo(torch.int64 if wide else torch.int32).max
    src, dst = _joined_edges(graph)
    weights = _node_weights(dst, num_nodes, limit)
    starts, neighbours, multiplicity = _adjacency(src, dst, num_nodes)
    if neighbours.numel() > limit:
        raise ValueError(
            f"this build of METIS counts in 32 bits and the graph has {neighbours.numel()} adjacencies; "
            "use method='fennel', or pass an assignment made with another tool"
        )
    dtype = torch.int64 if wide else torch.int32
    xadj, adjncy, vweights, eweights = (t.to(dtype).numpy() for t in (starts, neighbours, weights, multiplicity))
    if hasattr(pymetis, "CSRAdjacency"):
        adjacency = {"adjacency": pymetis.CSRAdjacency(xadj, adjncy)}
    else:
        adjacency = {"xadj": xadj, "adjncy": adjncy}
    options = pymetis.Options(seed=seed)
    _, part_of = pymetis.part_graph(parts, **adjacency, vweights=vweights, eweights=eweights, options=options)
    return torch.as_tensor(part_of)


def _joined_edges(graph: RawGraph) -> tuple[Tensor, Tensor]:
    """All edges with node ids that run on over the node types."""
    firsts, first = {}, 0
    for node_type, count in graph.num_nodes.items():
        firsts[node_type] = first
        first += count
    empty = torch.empty(0, dtype=torch.long)
    src = [loaded(arrays.src).long() + firsts[kind[0]] for kind, arrays in graph.edges.items()]
    dst = [loaded(arrays.dst).long() + firsts[kind[2]] for kind, arrays in graph.edges.items()]
    return torch.cat([empty, *src]), torch.cat([empty, *dst])


def _node_weights(dst: Tensor, num_nodes: int, limit: int) -> Tensor:
    degrees = torch.bincount(dst, minlength=num_nodes)
    weights = degrees + max(1, dst.numel() // num_nodes)
    scale = int(weights.sum()) // (limit // 2) + 1  # METIS adds the weights up
    return torch.div(weights + scale - 1, scale, rounding_mode="floor")


def _adjacency(src: Tensor, dst: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """CSR of the undirected graph: row starts, neighbours, and the number of directed edges behind each."""
    loops = src == dst
    src, dst = src[~loops], dst[~loops]
    keys = torch.cat([src * num_nodes + dst, dst * num_nodes + src])
    keys, multiplicity = torch.unique(keys, return_counts=True)
    rows = torch.div(keys, num_nodes, rounding_mode="floor")
    starts = torch.zeros(num_nodes + 1, dtype=torch.long)
    starts[1:] = torch.bincount(rows, minlength=num_nodes).cumsum(0)
    return starts, keys - rows * num_nodes, multiplicity
