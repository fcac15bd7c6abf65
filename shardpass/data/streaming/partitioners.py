"""LDG and Fennel: nodes stream by once or a few times, and each goes to the part that suits it best just then."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardpass.data.raw import NodeType, RawGraph
from shardpass.data.streaming.adjacency import Adjacency
from shardpass.data.streaming.budget import Budget
from shardpass.data.streaming.placing import SLACK, Placement, place

STREAMING = ("fennel", "ldg")
"""The methods of `streamed_parts`."""
PASSES = 5
_GAMMA = 1.5


def streamed_parts(
    graph: RawGraph, parts: int, method: str, budget: Budget, passes: int = PASSES
) -> dict[NodeType, Tensor]:
    """The part of each node, int32 [num_nodes], per node type.

    Nodes come in the order of their ids, types one after the other, without directions of edges and self-loops;
    parallel edges count as many. The weight of a node is its in-degree plus the mean in-degree, as for METIS.

    "ldg": linear deterministic greedy (Stanton and Kliot 2012): the part with the most neighbours, times its room.
    "fennel": neighbours less ``1.5 (m / n) (weight / mean weight) sqrt(load / mean load)``, the marginal cost of Fennel
    with gamma = 1.5 (Tsourakakis et al. 2014), written for nodes of different weights. Both keep every part within 1.05
    of the mean, unless a node is heavier than the room left. Passes after the first know where neighbours went in the
    one before (Nishimura and Ugander 2013).

    Raises:
        ValueError: no passes, or no room for the temporary files of a graph in files.
    """
    if passes < 1:
        raise ValueError(f"{passes} passes; expected at least 1")
    sizes = list(graph.num_nodes.values())
    total = sum(sizes)
    if parts == 1 or parts >= total:
        part_of = torch.arange(total) if parts > 1 else torch.zeros(total, dtype=torch.long)
    else:
        part_of = _stream(graph, parts, method, budget, passes)
    return dict(zip(graph.num_nodes, part_of.int().split(sizes)))


def _stream(graph: RawGraph, parts: int, method: str, budget: Budget, passes: int) -> Tensor:
    adjacency = Adjacency(graph, budget)
    num_nodes, num_edges = adjacency.num_nodes, adjacency.total
    mean_degree = max(1, num_edges // num_nodes)
    total_weight = num_edges + mean_degree * num_nodes
    mean_load = total_weight / parts
    to = Placement(
        part_of=np.full(num_nodes, -1, np.int32),
        loads=np.zeros(parts, np.int64),
        capacity=SLACK * mean_load,
        fennel=method == "fennel",
        scale=_GAMMA * num_edges / total_weight / mean_load**0.5,
    )
    degrees = adjacency.in_degrees.numpy()
    for turn in range(passes):
        to.loads[:] = 0
        for run in adjacency.runs():
            budget.report("assign", turn * num_nodes + run.first, passes * num_nodes)
            last = run.first + len(run.starts) - 1
            place(run, degrees[run.first : last] + mean_degree, to)
    adjacency.close()
    return torch.from_numpy(to.part_of)
