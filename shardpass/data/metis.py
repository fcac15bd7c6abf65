"""METIS partitions through pymetis: few cut edges, balanced work."""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.data.raw import RawGraph
from shardpass.data.streaming import all_edges
from shardpass.errors import require


def metis_parts(graph: RawGraph, parts: int, seed: int) -> Tensor:
    """The part of each node, [num_nodes]; the nodes of all types, one type after the other.

    METIS sees one graph without directions and self-loops, in which parallel edges weigh as many. The weight of a node
    is its in-degree plus the mean in-degree, so that both edges and nodes are spread evenly.

    Raises:
        MissingDependencyError: when pymetis is not installed.
        ValueError: when the graph is too large for a METIS built with 32-bit numbers.
    """
    instead = "use method='fennel', which needs no package"
    pymetis = require("pymetis", "metis", "partitioning with method 'metis', the default,", instead)
    num_nodes = sum(graph.num_nodes.values())
    wide = hasattr(pymetis, "zero_copy_dtype") and pymetis.zero_copy_dtype().itemsize == 8
    dtype = torch.int64 if wide else torch.int32
    limit = torch.iinfo(dtype).max
    src, dst = all_edges(graph)
    starts, neighbours, multiplicity = _adjacency(src, dst, num_nodes)
    if neighbours.numel() > limit:
        raise ValueError(
            f"this build of METIS counts in 32 bits and the graph has {neighbours.numel()} adjacencies; "
            "use method='fennel', or pass an assignment made with another tool"
        )
    weights = _node_weights(dst, num_nodes, limit)
    xadj, adjncy, vweights, eweights = (t.to(dtype).numpy() for t in (starts, neighbours, weights, multiplicity))
    if hasattr(pymetis, "CSRAdjacency"):
        adjacency = {"adjacency": pymetis.CSRAdjacency(xadj, adjncy)}
    else:
        adjacency = {"xadj": xadj, "adjncy": adjncy}
    options = pymetis.Options(seed=seed)
    _, part_of = pymetis.part_graph(parts, **adjacency, vweights=vweights, eweights=eweights, options=options)
    return torch.as_tensor(part_of)


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
