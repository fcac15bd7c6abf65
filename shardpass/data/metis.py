"""METIS partitions through pymetis: few cut edges, balanced work."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from shardpass.data.raw import RawGraph
from shardpass.data.streaming import Adjacency, Budget
from shardpass.errors import require


def metis_parts(graph: RawGraph, parts: int, budget: Budget, seed: int, node_weights: Tensor | None = None) -> Tensor:
    """The part of each node, [num_nodes]; the nodes of all types, one type after the other.

    Collective. METIS runs on rank 0, with all edges in memory. What the other ranks return holds no parts.

    METIS sees one graph without directions and self-loops, in which parallel edges weigh as many.
    """
    unknown = torch.empty(sum(graph.num_nodes.values()), dtype=torch.int32)
    work = partial(_parts, graph, parts, budget.alone, seed, node_weights)
    return budget.team.only_first("METIS", work, unknown)


def _parts(graph: RawGraph, parts: int, budget: Budget, seed: int, node_weights: Tensor | None) -> Tensor:
    instead = "use method='kaminpar', which needs kaminpar"
    pymetis = require("pymetis", "metis", "partitioning with method 'metis'", instead)
    adjacency = Adjacency(graph, budget)
    runs = list(adjacency.runs())
    adjacency.close()
    multiplicity = np.concatenate([run.multiplicity for run in runs])
    wide = hasattr(pymetis, "zero_copy_dtype") and pymetis.zero_copy_dtype().itemsize == 8
    dtype = np.int64 if wide else np.int32
    limit = np.iinfo(dtype).max
    if len(multiplicity) > limit:
        raise ValueError(
            f"this build of METIS counts in 32 bits and the graph has {len(multiplicity)} adjacencies; "
            "use method='kaminpar', or pass an assignment made with another tool"
        )
    degrees = np.concatenate([np.diff(run.starts) for run in runs])
    neighbours = np.concatenate([run.neighbours for run in runs])
    weights = adjacency.weights(parts, node_weights)
    lists = np.cumsum([0, *degrees]), neighbours, weights.numpy(), multiplicity
    xadj, adjncy, vweights, eweights = (numbers.astype(dtype) for numbers in lists)
    if hasattr(pymetis, "CSRAdjacency"):
        given = {"adjacency": pymetis.CSRAdjacency(xadj, adjncy)}
    else:
        given = {"xadj": xadj, "adjncy": adjncy}
    budget.report("assign", 0, 1)
    options = pymetis.Options(seed=seed)
    _, part_of = pymetis.part_graph(parts, **given, vweights=vweights, eweights=eweights, options=options)
    return torch.as_tensor(part_of)
