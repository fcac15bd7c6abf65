"""Neighbours drawn from CSR rows, and ids numbered in order of first appearance: with numba where it is installed.

[Note: draws that depend on nothing but the node]
Draw i of a node is SplitMix64 (Steele, Lea, Flood 2014) of a counter: ``mix(key + (i + 1) * GAMMA)``, where the key is
made of a seed and the node's original id. So it is the same on whichever rank, in whatever order and beside whichever
other nodes it is made; and the loops in numba and those in numpy give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # np.ndarray; its type parameters say nothing here

GAMMA = 0x9E3779B97F4A7C15
ALL = -1


def mix(bits: Array) -> Array:
    """The finaliser of SplitMix64, a bijection of 64 bits; uint64 of any shape."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def keys_of(seed: int, ids: Array) -> Array:
    """A key for each id, uint64: different for different ids under one seed."""
    start = np.array([seed], dtype=np.uint64)
    return mix((ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA) ^ mix(start))


def uniforms(keys: Array, counters: Array) -> Array:
    """Numbers in [0, 1), float64: draw ``counters`` of each key."""
    bits = mix(keys + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA))
    return (bits >> np.uint64(11)).astype(np.int64) * 2.0**-53


def segments(starts: Array, counts: Array) -> Array:
    """``starts[i], starts[i] + 1, ...`` for each i, ``counts[i]`` of them, one after the other; int64."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - counts), counts)


def draw(indptr: Array, rows: Array, keys: Array, fanout: int, replace: bool, loops: Any) -> tuple[Array, Array]:
    """``(counts, places)``: how many entries of each CSR row were drawn, and where they stand, row after row.

    Without replacement every set of `fanout` entries of a row is equally likely (Floyd's algorithm; Bentley, Floyd
    1987), and rows of at most `fanout` entries are taken whole, in order. With replacement each of `fanout` draws takes
    each entry equally likely. Rows without entries give none.

    Args:
        indptr: ``[num_rows + 1]`` int64.
        rows: ``[n]`` int64.
        keys: ``[n]`` uint64, see the note above.
        fanout: at least 0, or `ALL`.
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
    """As `draw`, each entry in proportion to its weight; entries of weight 0 are never drawn.

    Without replacement one entry after the other is drawn, each in proportion to the weights of those that are left:
    the `fanout` smallest of ``-log(u) / weight`` (Efraimidis, Spirakis 2006). With replacement the cumulated weights
    are inverted.

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
    cumulated = np.cumsum(mass / total[owner])  # a row is about 1 wide, however large its weights
    ends = np.cumsum(degrees)
    high = np.concatenate([[0.0], cumulated])[ends]
    low = np.concatenate([[0.0], cumulated])[ends - degrees]
    some = degrees > 0
    targets = low[some, None] + uniforms(keys[some, None], np.arange(fanout)[None, :]) * (high - low)[some, None]
    found = np.searchsorted(cumulated, targets.reshape(-1), side="right")
    last = np.repeat(ends[some] - 1, fanout)  # rounding may lead past the row
    return counts, places[np.minimum(found, last)]


def gather(places: Array, src_ids: Array, edge_ids: Array, dtype: Any, loops: Any) -> tuple[Array, Array]:
    """``src_ids[places]`` and ``edge_ids[places]``, both as `dtype`."""
    if loops is None:
        return src_ids[places].astype(dtype, copy=False), edge_ids[places].astype(dtype, copy=False)
    found = np.empty(len(places), dtype=dtype), np.empty(len(places), dtype=dtype)
    loops.gather(places, src_ids, edge_ids, *found)
    return found


def spread(
    starts: Array, counts: Array, src_ids: Array, edge_ids: Array, into: tuple[Array, Array], loops: Any
) -> None:
    """Write segments that follow each other in `src_ids` and `edge_ids` to where they begin in `into`."""
    if loops is not None:
        return loops.spread(starts, counts, src_ids, edge_ids, *into)
    places = segments(starts, counts)
    into[0][places], into[1][places] = src_ids, edge_ids


class Numbering:
    """Ids numbered 0, 1, ... in the order in which they first appear. Memory is bounded by the ids it has seen.

    Args:
        loops: what `loops_if_installed` returned.
        limit: ids lie in [0, limit).
    """

    def __init__(self, loops: Any, limit: int) -> None:
        self._loops, self._limit = loops, limit
        self._known = np.empty(0, dtype=np.int64)
        self._table = np.empty(0, dtype=np.int32 if limit < 2**31 else np.int64)
        self._count = 0

    @property
    def count(self) -> int:
        """How many different ids it has seen."""
        return self._count

    @property
    def ids(self) -> Array:
        """The ids in the order of their numbers, ``[count]`` int64."""
        return self._known[: self._count]

    def add(self, ids: Array) -> Array:
        """The number of each id, int64; new ones get the next numbers."""
        if self._loops is None:
            return self._add_sorted(ids)
        most = min(self._count + len(ids), self._limit)
        if most > len(self._known):
            self._grow(most)
        numbers = np.empty(len(ids), dtype=np.int64)
        self._count = self._loops.number(ids, self._table, self._known, self._count, numbers)
        return numbers

    def _grow(self, most: int) -> None:
        size = 1 << max(4, (2 * most - 1).bit_length())
        known = np.empty(size // 2, dtype=np.int64)
        known[: self._count] = self.ids
        self._known, self._table = known, np.full(2 * size, -1, dtype=self._table.dtype)
        self._loops.number(known[: self._count].copy(), self._table, known, 0, np.empty(self._count, dtype=np.int64))

    def _add_sorted(self, ids: Array) -> Array:
        both = np.concatenate([self.ids, ids])
        _, first, inverse = np.unique(both, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        number = np.empty(len(order), dtype=np.int64)
        number[order] = np.arange(len(order))
        self._known, start = both[first[order]], self._count
        self._count = len(order)
        return number[inverse.reshape(-1)[start:]]


def loops_if_installed() -> Any:
    """The compiled loops, or None where numba is missing."""
    try:
        from shardpass.core.sampling import drawing_loops as sampling_loops
    except ImportError:
        return None
    return sampling_loops
