"""The loops of `drawing` compiled by numba. They give the same bits. Imported only where numba is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]


@njit(nogil=True, cache=True)
def _mix(bits: Any) -> Any:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@njit(nogil=True, cache=True)
def _below(key: Any, i: int, bound: int) -> int:
    """Draw i of a key as an integer in ``[0, bound)``."""
    bits = _mix(key + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15))
    found = np.int64(np.float64(np.int64(bits >> np.uint64(11))) * 2.0**-53 * np.float64(bound))
    return min(found, bound - 1)


@njit(nogil=True, cache=True)
def draw(starts: Array, degrees: Array, keys: Array, fanout: int, replace: bool, places: Array) -> None:
    """See `drawing.draw`, which fills `places`."""
    at = 0
    for n in range(len(starts)):
        start, degree = starts[n], degrees[n]
        if replace:
            for i in range(fanout if degree else 0):
                places[at] = start + _below(keys[n], i, degree)
                at += 1
        elif degree <= fanout:
            for i in range(degree):
                places[at + i] = start + i
            at += degree
        else:
            for i in range(fanout):
                last = degree - fanout + i
                found = start + _below(keys[n], i, last + 1)
                for k in range(at, at + i):
                    if places[k] == found:
                        found = start + last
                        break
                places[at + i] = found
            at += fanout


@njit(nogil=True, cache=True)
def number(ids: Array, table: Array, known: Array, count: int, numbers: Array) -> int:
    """See `drawing.Numbering.add`. `table` is a hash table of pairs of id and number; the id is -1 in a free pair."""
    mask = np.uint64(len(table) // 2 - 1)
    for i in range(len(ids)):
        slot = ((np.uint64(ids[i]) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & mask
        while True:
            held = table[2 * slot]
            if held == ids[i]:
                numbers[i] = table[2 * slot + 1]
                break
            if held == -1:
                table[2 * slot], table[2 * slot + 1] = ids[i], count
                known[count] = ids[i]
                numbers[i] = count
                count += 1
                break
            slot = (slot + np.uint64(1)) & mask
    return count
