"""The rules by which streamed nodes choose their part: LDG and Fennel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardpass.data.streaming.adjacency import Run
from shardpass.data.streaming.buckets import Array

SLACK = 1.05
"""How much heavier than the mean a part may become."""


@dataclass
class Placement:
    """Where the nodes are, while they stream by.

    part_of: int32 [num_nodes], -1 for nodes not seen yet. loads: the weight placed in each part in this pass, int64.
    capacity: the most that a part may hold. fennel: Fennel's rule, else LDG's. scale: of Fennel's penalty.
    """

    part_of: Array
    loads: Array
    capacity: float
    fennel: bool
    scale: float

    def place(self, run: Run, weights: Array, loop: Callable[..., None]) -> None:
        """Give each node of a run its part.

        Args:
            weights: of the run's nodes, int64.
            loop: `place_nodes`, or what `compiled` returned.
        """
        state = (self.part_of, self.loads, self.capacity, self.fennel, self.scale)
        loop(run.first, run.starts, run.neighbours, weights, *state)


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
    """
    counts = np.zeros(len(loads), np.int64)
    for i in range(len(starts) - 1):
        counts[:] = 0
        for e in range(starts[i], starts[i + 1]):
            part = part_of[neighbours[e]]
            if part >= 0:
                counts[part] += 1
        best, best_score, lightest = -1, 0.0, 0
        for part in range(len(loads)):
            if loads[part] < loads[lightest]:
                lightest = part
            if loads[part] + weights[i] > capacity:
                continue
            if fennel:
                score = counts[part] - scale * weights[i] * math.sqrt(loads[part])
            else:
                score = counts[part] * (1.0 - loads[part] / capacity)
            if best < 0 or score > best_score or (score == best_score and loads[part] < loads[best]):
                best, best_score = part, score
        if best < 0:
            best = lightest
        part_of[first + i] = best
        loads[best] += weights[i]
