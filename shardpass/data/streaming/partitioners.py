"""LDG and Fennel: they look at the nodes one after the other, once or a few times, and put each where it fits best."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shardpass.data.raw import RawGraph
from shardpass.data.streaming.adjacency import Adjacency
from shardpass.data.streaming.buckets import Array
from shardpass.data.streaming.budget import Budget

STREAMING = ("fennel", "ldg")
"""The methods of `streamed_parts`."""
PASSES = 5
SLACK = 1.05
"""How much heavier than the mean a part may become."""
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
    scale = _GAMMA * num_edges / total_weight / mean_load**0.5
    weights = adjacency.in_degrees.numpy() + mean_degree
    part_of, loads = np.full(num_nodes, -1, np.int32), np.zeros(parts, np.int64)
    place = compiled()
    for turn in range(passes):
        loads[:] = 0
        for run in adjacency.runs():
            budget.report("assign", turn * num_nodes + run.first, passes * num_nodes)
            place(*run, weights, part_of, loads, SLACK * mean_load, method == "fennel", scale)
    adjacency.close()
    return torch.from_numpy(part_of)


def compiled() -> Callable[..., None]:
    """`place_nodes`, compiled if numba is installed."""
    try:
        from numba import njit
    except ImportError:
        return place_nodes
    found: Callable[..., None] = njit(nogil=True, cache=True)(place_nodes)
    return found


def place_nodes(
    first: int,
    starts: Array,
    neighbours: Array,
    weights: Array,
    part_of: Array,
    loads: Array,
    capacity: float,
    fennel: bool,
    scale: float,
) -> None:
    """Give each node of a run its part, one after the other. numba can compile this function.

    A node goes to the part of the best score among those that have room for it, and of equal ones to the lightest.
    Where no part has room, the lightest part takes the node.

    Args:
        first, starts, neighbours: a `Run`.
        weights: of all nodes, int64 [num_nodes].
        part_of: the part of each node, int32 [num_nodes]; -1 for nodes not seen yet. Written.
        loads: the weight placed in each part in this pass, int64. Written.
        capacity: the most that a part may hold.
        fennel: whether Fennel's rule decides, or LDG's.
        scale: of Fennel's penalty.
    """
    counts = np.zeros(len(loads), np.int64)
    for i in range(len(starts) - 1):
        counts[:] = 0
        for e in range(starts[i], starts[i + 1]):
            part = part_of[neighbours[e]]
            if part >= 0:
                counts[part] += 1
        weight = weights[first + i]
        best, best_score, lightest = -1, 0.0, 0
        for part in range(len(loads)):
            if loads[part] < loads[lightest]:
                lightest = part
            if loads[part] + weight > capacity:
                continue
            if fennel:
                score = counts[part] - scale * weight * math.sqrt(loads[part])
            else:
                score = counts[part] * (1.0 - loads[part] / capacity)
            if best < 0 or score > best_score or (score == best_score and loads[part] < loads[best]):
                best, best_score = part, score
        if best < 0:
            best = lightest
        part_of[first + i] = best
        loads[best] += weight
