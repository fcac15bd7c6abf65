"""The rules by which streamed nodes choose their part: LDG and Fennel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardpass.data.streaming.adjacency import Run, numba_loops_or_none
from shardpass.data.streaming.buckets import Array

SLACK = 1.05
"""How much heavier than the mean a part may become."""
_BATCHES_PER_PART = 64
_LARGEST_BATCH = 2048


@dataclass
class Placement:
    """Where the nodes are, while they stream by.

    part_of: int32 [num_nodes], -1 for nodes not seen yet. loads: weight placed in each part in this pass, int64.
    capacity: the most a part may hold. fennel: Fennel's rule, else LDG's. scale: of Fennel's penalty.
    """

    part_of: Array
    loads: Array
    capacity: float
    fennel: bool
    scale: float

    def scores(self, counts: Array, weights: Array) -> Array:
        """What it is worth to each node to go to each part, given its neighbours there: float64 [nodes, parts]."""
        if self.fennel:
            return counts - self.scale * weights[:, None] * np.sqrt(self.loads)
        return counts * (1.0 - self.loads / self.capacity)


def place(run: Run, weights: Array, to: Placement) -> None:
    """Give each node of a run its part: that of the best score among those with room; of equal ones the lightest.

    Where no part has room, the lightest takes the node. Compiled where numba is installed; else nodes choose in small
    batches by what was known before the batch.

    Args:
        weights: of the run's nodes, int64.
    """
    loops = numba_loops_or_none()
    if loops is not None:
        loops.place_nodes(
            run.first, run.starts, run.neighbours, weights, to.part_of, to.loads, to.capacity, to.fennel, to.scale
        )
        return
    place_in_batches(run, weights, to, batch_size(len(to.part_of), len(to.loads)))


def batch_size(num_nodes: int, parts: int) -> int:
    """Nodes that choose at once: few beside the size of a part."""
    return min(_LARGEST_BATCH, max(1, num_nodes // (parts * _BATCHES_PER_PART)))


def place_in_batches(run: Run, weights: Array, to: Placement, batch: int) -> None:
    """`place` without compiled loops."""
    parts = len(to.loads)
    for start in range(0, len(weights), batch):
        stop = min(start + batch, len(weights))
        found = to.part_of[run.neighbours[run.starts[start] : run.starts[stop]]]
        rows = np.repeat(np.arange(stop - start), np.diff(run.starts[start : stop + 1]))
        keys = (rows * parts + found)[found >= 0]
        counts = np.bincount(keys, minlength=(stop - start) * parts).reshape(-1, parts)
        nodes = slice(run.first + start, run.first + stop)
        to.part_of[nodes] = _choose(counts, weights[start:stop], to)


def _choose(counts: Array, weights: Array, to: Placement) -> Array:
    """The part of each node of a batch; the loads grow with them."""
    order = np.argsort(to.loads, kind="stable")  # of equal scores the lightest part is found first
    scores = np.where(to.loads + weights[:, None] > to.capacity, -np.inf, to.scores(counts, weights))
    chosen = order[np.argmax(scores[:, order], axis=1)].astype(np.int32)
    added = np.zeros((len(weights), len(to.loads)), np.int64)
    added[np.arange(len(weights)), chosen] = weights
    reached = (to.loads + added.cumsum(0))[np.arange(len(weights)), chosen]
    for row in np.flatnonzero(reached > to.capacity):
        added[row, chosen[row]] = 0
        chosen[row] = np.argmin(to.loads + added.sum(0))
        added[row, chosen[row]] = weights[row]
    to.loads += added.sum(0)
    return chosen
