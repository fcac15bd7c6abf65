"""Draws neighbours from CSR rows and numbers ids in order of first appearance, with numba if it is installed.

[Note: draws that depend on nothing but the node]
Draw i of a node is SplitMix64 (Steele, Lea, Flood 2014) of a counter: ``mix(key + (i + 1) * GAMMA)``, where the key is
made of a seed and the node's original id. So a draw does not depend on its rank, on the order of draws, or on
the other nodes of the batch. The loops in numba and those in numpy give the same bits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from shardpass.core.kernels import optional_module

Array = np.ndarray[Any, Any]

GAMMA = 0x9E3779B97F4A7C15
ALL = -1


def mix(bits: Array) -> Array:
    """The finaliser of SplitMix64, a bijection of 64 bits; uint64 of any shape."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def keys_of(seed: int, ids: Array) -> Array:
    """A key for each id, uint64. Under one seed, different ids have different keys."""
    start = np.array([seed], dtype=np.uint64)
    return mix((ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA) ^ mix(start))


def uniforms(keys: Array, counters: Array) -> Array:
    """Draws in ``[0, 1)``, float64: for each key the one that its counter names."""
    bits = mix(keys + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA))
    return (bits >> np.uint64(11)).astype(np.int64) * 2.0**-53


def segments(starts: Array, counts: Array) -> Array:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` numbers for each i, one i after the other, int64."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)


def draw(
    indptr: Array, rows: Array, keys: Array, fanout: int, replace: bool, loops: ModuleType | None
) -> tuple[Array, Array]:
    """``(counts, places)``: how many entries of each CSR row were drawn, and their places in the CSR, row after row.

    Without replacement every set of `fanout` entries of a row is equally likely (Floyd's algorithm; Bentley, Floyd
    1987). Rows of at most `fanout` entries are taken whole, in order. With replacement every entry is equally likely in
    each of `fanout` draws. Nothing is drawn from a row without entries.

    Args:
        indptr: ``[num_rows + 1]`` int64.
        rows: ``[n]`` int64.
        keys: one per row, ``[n]`` uint64; see the note above.
        fanout: 0 or more, or `ALL`.
        loops: what `loops_if_installed` returned.
    """
    starts = indptr[rows]
    degrees = indptr[rows + 1] - starts
    if fanout == ALL or (not replace and not bool((degrees > fanout).any())):
        return degrees, segments(starts, degrees)
    counts = np.where(degrees > 0, fanout, 0) if replace else np.minimum(degrees, fanout)
    if loops is not None:
        places = np.empty(int(counts.sum()), dtype=np.int64)
        loops.draw(starts, degrees, keys, fanout, replace, places)
        return counts, places
    if replace:
        picks = _with_replacement(degrees, keys, fanout)
        return counts, (starts[:, None] + picks)[degrees > 0].reshape(-1)
    places = segments(starts, counts)
    many = degrees > fanout
    picks = _floyd(degrees[many], keys[many], fanout)
    places[np.repeat(many, counts)] = (starts[many][:, None] + picks).reshape(-1)
    return counts, places


def _with_replacement(degrees: Array, keys: Array, fanout: int) -> Array:
    found = uniforms(keys[:, None], np.arange(fanout)[None, :]) * degrees[:, None]
    return np.minimum(found.astype(np.int64), np.maximum(degrees, 1)[:, None] - 1)


def _floyd(degrees: Array, keys: Array, fanout: int) -> Array:
    picks = np.empty((len(degrees), fanout), dtype=np.int64)
    for i in range(fanout):
        last = degrees - fanout + i
        found = np.minimum((uniforms(keys, np.full(1, i)) * (last + 1)).astype(np.int64), last)
        taken = (picks[:, :i] == found[:, None]).any(1)
        picks[:, i] = np.where(taken, last, found)
    return picks


def draw_weighted(
    indptr: Array, rows: Array, keys: Array, weights: Array, fanout: int, replace: bool
) -> tuple[Array, Array]:
    """As `draw`, but with entries drawn in proportion to their weights. Entries of weight 0 are never drawn.

    Without replacement one entry after the other is drawn, in proportion to the weights of those that are left: these
    are the `fanout` smallest of ``-log(u) / weight`` (Efraimidis, Spirakis 2006). With replacement the cumulated
    weights are inverted.

    Args:
        weights: one per entry, float64, not negative.
    """
    starts = indptr[rows]
    degrees = indptr[rows + 1] - starts
    places = segments(starts, degrees)
    owner = np.repeat(np.arange(len(rows)), degrees)
    mass = weights[places]
    positive = mass > 0
    nth = places - np.repeat(starts, degrees)
    places, owner, mass, nth = places[positive], owner[positive], mass[positive], nth[positive]
    degrees = np.bincount(owner, minlength=len(rows))
    if fanout == ALL or (not replace and not bool((degrees > fanout).any())):
        return degrees, places
    if replace:
        return _invert(degrees, places, owner, mass, keys, fanout)
    with np.errstate(divide="ignore"):
        race = -np.log(uniforms(keys[owner], nth)) / mass
    order = np.lexsort((race, owner))
    counts = np.minimum(degrees, fanout)
    return counts, places[order[segments(np.cumsum(degrees) - degrees, counts)]]


def _invert(degrees: Array, places: Array, owner: Array, mass: Array, keys: Array, fanout: int) -> tuple[Array, Array]:
    counts = np.where(degrees > 0, fanout, 0)
    total = np.zeros(len(degrees))
    np.add.at(total, owner, mass)
    cumulated = np.cumsum(mass / total[owner])  # each row adds about 1, however large its weights are
    ends = np.cumsum(degrees)
    high = np.concatenate([[0.0], cumulated])[ends]
    low = np.concatenate([[0.0], cumulated])[ends - degrees]
    some = degrees > 0
    targets = low[some, None] + uniforms(keys[some, None], np.arange(fanout)[None, :]) * (high - low)[some, None]
    found = np.searchsorted(cumulated, targets.reshape(-1), side="right")
    last = np.repeat(ends[some] - 1, fanout)  # rounding may lead past the row
    return counts, places[np.minimum(found, last)]


class Numbering:
    """Numbers ids 0, 1, ... in the order in which they first appear. Its memory is bounded by the ids it has seen.

    Args:
        loops: what `loops_if_installed` returned.
        limit: ids are in ``[0, limit)``.
    """

    def __init__(self, loops: ModuleType | None, limit: int) -> None:
        self._loops, self._limit = loops, limit
        self._known = np.empty(0, dtype=np.int64)
        self._table = np.empty(0, dtype=np.int32 if limit < 2**31 else np.int64)
        self._count = 0

    @property
    def count(self) -> int:
        """How many different ids it has seen so far."""
        return self._count

    @property
    def ids(self) -> Array:
        """The ids in the order of their numbers, ``[count]`` int64."""
        return self._known[: self._count]

    def add(self, ids: Array) -> Array:
        """The number of each id, int64. New ids get the next numbers."""
        if self._loops is None:
            return self._add_sorted(ids)
        most = min(self._count + len(ids), self._limit)
        if most > len(self._known):
            self._grow(most, self._loops)
        numbers = np.empty(len(ids), dtype=np.int64)
        self._count = self._loops.number(ids, self._table, self._known, self._count, numbers)
        return numbers

    def _grow(self, most: int, loops: ModuleType) -> None:
        size = 1 << max(4, (2 * most - 1).bit_length())
        known = np.empty(size // 2, dtype=np.int64)
        known[: self._count] = self.ids
        self._known, self._table = known, np.full(2 * size, -1, dtype=self._table.dtype)
        loops.number(known[: self._count].copy(), self._table, known, 0, np.empty(self._count, dtype=np.int64))

    def _add_sorted(self, ids: Array) -> Array:
        both = np.concatenate([self.ids, ids])
        _, first, inverse = np.unique(both, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        number = np.empty(len(order), dtype=np.int64)
        number[order] = np.arange(len(order))
        self._known, start = both[first[order]], self._count
        self._count = len(order)
        return number[inverse.reshape(-1)[start:]]


def loops_if_installed() -> ModuleType | None:
    """The loops that numba compiles, or `None` if numba is not installed."""
    return optional_module("shardpass.core.sampling.drawing_loops")
