"""Factors of dropout in one loop, where torch takes a pass over memory for each step of the hash."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]


@njit(nogil=True, cache=True)
def fill(out: Array, edges: Array, seed: int, least: int, factor: float) -> None:
    """``out[k, h] = factor``, or 0 where the hash of seed, edge and head is below `least`.

    See `shardpass.core.ranks.dropout_factors`, which this must equal to the bit. All integers are unsigned.
    """
    heads, nothing = np.uint64(out.shape[1]), out.dtype.type(0)
    for k in range(out.shape[0]):
        first = np.uint64(edges[k]) * heads
        for h in range(out.shape[1]):
            bits = (first + np.uint64(h)) * np.uint64(0x9E3779B97F4A7C15) + seed
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits = (bits ^ (bits >> np.uint64(31))) & np.uint64((1 << 53) - 1)
            out[k, h] = factor if bits >= least else nothing
