"""Loops over nodes and edges compiled by numba. Imported only where numba is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = Any


@njit(nogil=True, cache=True)
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
    """Give each node of a run its part, one after the other; see `placing.place`."""
    parts = len(loads)
    counts = np.zeros(parts, np.int64)
    for i in range(len(starts) - 1):
        counts[:] = 0
        for e in range(starts[i], starts[i + 1]):
            part = part_of[neighbours[e]]
            if part >= 0:
                counts[part] += 1
        best, best_score = -1, 0.0
        lightest = 0
        for part in range(parts):
            if loads[part] < loads[lightest]:
                lightest = part
            if loads[part] + weights[i] > capacity:
                continue
            if fennel:
                score = counts[part] - scale * weights[i] * np.sqrt(loads[part])
            else:
                score = counts[part] * (1.0 - loads[part] / capacity)
            if best < 0 or score > best_score or (score == best_score and loads[part] < loads[best]):
                best, best_score = part, score
        if best < 0:
            best = lightest
        part_of[first + i] = best
        loads[best] += weights[i]


@njit(nogil=True, cache=True)
def group_by_node(nodes: Array, neighbours: Array, first: int, places: Array, grouped: Array) -> None:
    """Put the neighbours of each node next to each other; `places` is where those of each start, and is used up."""
    for e in range(len(nodes)):
        if nodes[e] != neighbours[e]:
            row = nodes[e] - first
            grouped[places[row]] = neighbours[e]
            places[row] += 1
