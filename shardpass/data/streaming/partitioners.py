"""LDG and Fennel: they look at the nodes one after the other, once or a few times, and put each where it fits best."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardpass.data.raw import RawGraph
from shardpass.data.streaming.adjacency import Adjacency
from shardpass.data.streaming.budget import Budget
from shardpass.data.streaming.placing import SLACK, Placement, compiled

STREAMING = ("fennel", "ldg")
"""The methods of `streamed_parts`."""
PASSES = 5
_GAMMA = 1.5


def streamed_parts(graph: RawGraph, parts: int, method: str, budget: Budget, passes: int = PASSES) -> Tensor:
    """The part of each node, int32 [num_nodes]; the nodes of all types, one type after the other.

    Nodes come in the order of their ids. The directions of edges do not matter, self-loops are left out, and parallel
    edges count as many. The weight of a node is its in-degree plus the mean in-degree, as for METIS.

    "ldg" is linear deterministic greedy (Stanton and Kliot 2012): it takes the part with the most neighbours times the
    room left. "fennel" takes the part with the most neighbours less ``1.5 (m / n) (weight / mean weight) sqrt(load /
    mean load)``, the marginal cost of Fennel with gamma = 1.5 (Tsourakakis et al. 2014), written for nodes of different
    weights. Both keep every part within 1.05 of the mean, unless a node is heavier than the room left. A pass after the
    first knows where all neighbours went in the pass before (Nishimura and Ugander 2013).

    Raises:
        ValueError: when there are no passes, or no room for the temporary files of a graph in files.
    """
    if passes < 1:
        raise ValueError(f"{passes} passes; expected at least 1")
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
    degrees, loop = adjacency.in_degrees.numpy(), compiled()
    for turn in range(passes):
        to.loads[:] = 0
        for run in adjacency.runs():
            budget.report("assign", turn * num_nodes + run.first, passes * num_nodes)
            last = run.first + len(run.starts) - 1
            to.place(run, degrees[run.first : last] + mean_degree, loop)
    adjacency.close()
    return torch.from_numpy(to.part_of)
