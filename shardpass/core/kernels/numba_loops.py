"""Loops over edges compiled by numba, for what torch has no fused operator. Imported only where numba is installed.

numba compiles a loop at its first call for each combination of types and keeps it on disk. The loops release the GIL
and know nothing of threads: the caller cuts the rows.

[Note: the layout of edge values]
`indptr` counts all edges of a shard. Every other array with a row per edge holds only the edges of a chunk, so the
values of edge e of the shard are in row ``e - start``. `edges` is ``(indptr, columns, start, stop)``.

[Note: no views of rows]
``a = rows[j]`` counts references, atomically, in every turn of the loop. ``rows[j, h, x]`` does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from shardpass.core.kernels.numba_prefetch import AHEAD, prefetch, prefetch_four

Array = np.ndarray[Any, Any]
Edges = tuple[Array, Array, int, int]
SUMS = {"contract", "reassoc", "nsz"}  # not "nnan" nor "ninf": NaN must spread, and -inf is a score


@njit(nogil=True, cache=True)
def get_ready() -> None:
    """Nothing: with the first call of a loop, numba gets ready for all of them."""


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def add_rows(
    columns: Array, e: int, n: int, rows: Array, weights: Array, at: int, i: int, out: Array, width: int
) -> None:
    """``out[i, h] += weights[h, at + k] * rows[columns[e + k], h]`` for k in ``[0, n)``."""
    k = 0
    while k + 4 <= n:  # four rows at a time: fewer reads and writes of the sum
        prefetch_four(columns, e + k + AHEAD, rows)
        a, b, c, d = columns[e + k], columns[e + k + 1], columns[e + k + 2], columns[e + k + 3]
        for h in range(out.shape[1]):
            u, v, w, z = weights[h, at + k], weights[h, at + k + 1], weights[h, at + k + 2], weights[h, at + k + 3]
            for x in range(width):
                out[i, h, x] += (u * rows[a, h, x] + v * rows[b, h, x]) + (w * rows[c, h, x] + z * rows[d, h, x])
        k += 4
    while k < n:
        a = columns[e + k]
        for h in range(out.shape[1]):
            for x in range(width):
                out[i, h, x] += weights[h, at + k] * rows[a, h, x]
        k += 1


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def add_rows_and_dots(
    columns: Array,
    e: int,
    n: int,
    rows: Array,
    weights: Array,
    own: Array,
    at: int,
    j: int,
    out: Array,
    dots: Array,
    width: int,
) -> None:
    """`add_rows` to row j of `out`, and ``dots[h, at + k] = <rows[columns[e + k], h], own[j, h]>``."""
    k, zero = 0, out.dtype.type(0)
    while k + 4 <= n:  # four rows at a time: fewer reads and writes of the sum
        prefetch_four(columns, e + k + AHEAD, rows)
        a, b, c, d = columns[e + k], columns[e + k + 1], columns[e + k + 2], columns[e + k + 3]
        for h in range(out.shape[1]):
            u, v, w, z = weights[h, at + k], weights[h, at + k + 1], weights[h, at + k + 2], weights[h, at + k + 3]
            p, q, r, s = zero, zero, zero, zero
            for x in range(width):
                y, ya, yb, yc, yd = own[j, h, x], rows[a, h, x], rows[b, h, x], rows[c, h, x], rows[d, h, x]
                out[j, h, x] += (u * ya + v * yb) + (w * yc + z * yd)
                p += ya * y
                q += yb * y
                r += yc * y
                s += yd * y
            dots[h, at + k], dots[h, at + k + 1], dots[h, at + k + 2], dots[h, at + k + 3] = p, q, r, s
        k += 4
    while k < n:
        a = columns[e + k]
        for h in range(out.shape[1]):
            p = zero
            for x in range(width):
                out[j, h, x] += weights[h, at + k] * rows[a, h, x]
                p += rows[a, h, x] * own[j, h, x]
            dots[h, at + k] = p
        k += 1


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def add_copied(indptr: Array, columns: Array, rows: Array, fresh: bool, low: int, high: int, out: Array) -> None:
    """``out[i] += rows[columns[e]]`` over all edges of rows ``[low, high)``, or ``=`` where `fresh`."""
    width, zero = out.shape[1], out.dtype.type(0)
    for i in range(low, high):
        e, stop = indptr[i], indptr[i + 1]
        if fresh:
            for x in range(width):
                out[i, x] = zero
        while e + 4 <= stop:
            prefetch_four(columns, e + AHEAD, rows)
            a, b, c, d = columns[e], columns[e + 1], columns[e + 2], columns[e + 3]
            for x in range(width):
                out[i, x] += (rows[a, x] + rows[b, x]) + (rows[c, x] + rows[d, x])
            e += 4
        while e < stop:
            if e + AHEAD < columns.size:
                prefetch(rows, columns[e + AHEAD])
            a = columns[e]
            for x in range(width):
                out[i, x] += rows[a, x]
            e += 1


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def add_scaled(indptr: Array, columns: Array, rows: Array, weights: Array, low: int, high: int, out: Array) -> None:
    """``out[i, h] += weights[e, h] * rows[columns[e], h]`` over all edges of rows ``[low, high)``."""
    by_head, width = weights.T, out.shape[2]
    for i in range(low, high):
        first = indptr[i]
        add_rows(columns, first, indptr[i + 1] - first, rows, by_head, first, i, out, width)


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def weighted_adjoint(
    edges: Edges,
    low: int,
    high: int,
    values: Array,
    used: Array,
    kept: Array,
    grad: Array,
    delta: Array,
    grad_values: Array,
    relative: Array,
) -> None:
    """The adjoint of a softmax-weighted sum over a chunk of the edges, ordered by source.

    ``grad_values[j] += used * grad[i]``, and `relative`, the gradient of a score divided by its weight, becomes
    ``kept * <grad[i], values[j]> - delta[i]``. Nothing is dropped where `kept` has no rows.
    """
    (indptr, columns, start, stop), width = edges, values.shape[2]
    weights, dots, drops = used.T, relative.T, kept.shape[0] > 0
    for j in range(low, high):
        first, last = max(indptr[j], start) - start, min(indptr[j + 1], stop) - start
        add_rows_and_dots(columns, first, last - first, grad, weights, values, first, j, grad_values, dots, width)
        for k in range(first, last):
            for h in range(values.shape[1]):
                dot = relative[k, h] * kept[k, h] if drops else relative[k, h]
                relative[k, h] = dot - delta[columns[k], h]


@njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMS)
def edge_dots(indptr: Array, src_rows: Array, rows: Array, grad: Array, low: int, high: int, out: Array) -> None:
    """``out[e, h] = <rows[j, h], grad[i, h]>`` of all edges into the destinations ``[low, high)``."""
    heads, width, zero = rows.shape[1], rows.shape[2], out.dtype.type(0)
    for i in range(low, high):
        for e in range(indptr[i], indptr[i + 1]):
            j = src_rows[e]
            if e + AHEAD < src_rows.size:
                prefetch(rows, src_rows[e + AHEAD])
            for h in range(heads):
                dot = zero
                for x in range(width):
                    dot += rows[j, h, x] * grad[i, h, x]
                out[e, h] = dot


@njit(nogil=True, cache=True, error_model="numpy")
def take_row(rows: Array, j: int, is_max: bool, i: int, best: Array, ties: Array) -> None:
    """Take row j into the largest or smallest value so far of row i, and the number of its ties. NaN wins."""
    for x in range(rows.shape[1]):
        value, old, count = rows[j, x], best[i, x], ties[i, x]
        is_nan = value != value
        wins = is_nan or (value > old if is_max else value < old)
        best[i, x] = value if wins else old
        ties[i, x] = (0 if is_nan else 1) if wins else (count + 1 if value == old else count)


@njit(nogil=True, cache=True, error_model="numpy")
def extremum(
    indptr: Array, columns: Array, rows: Array, is_max: bool, low: int, high: int, best: Array, ties: Array
) -> None:
    """Take ``rows[columns]`` into the largest or smallest values of the destinations; see `take_row`."""
    for i in range(low, high):
        for e in range(indptr[i], indptr[i + 1]):
            if e + AHEAD < columns.size:
                prefetch(rows, columns[e + AHEAD])
            take_row(rows, columns[e], is_max, i, best, ties)


@njit(nogil=True, cache=True, error_model="numpy")
def extremum_adjoint(
    indptr: Array, columns: Array, rows: Array, value: Array, share: Array, low: int, high: int, out: Array
) -> None:
    """``out[j] += (rows[j] == value[i]) * share[i]`` over edges ordered by source."""
    one, zero = rows.dtype.type(1), rows.dtype.type(0)
    for j in range(low, high):
        for e in range(indptr[j], indptr[j + 1]):
            i = columns[e]
            if e + AHEAD < columns.size:
                prefetch(value, columns[e + AHEAD])
                prefetch(share, columns[e + AHEAD])
            for x in range(rows.shape[1]):
                out[j, x] += (one if rows[j, x] == value[i, x] else zero) * share[i, x]


@njit(nogil=True, cache=True, error_model="numpy")
def extremum_of_edges(values: Array, index: Array, is_max: bool, best: Array, ties: Array) -> None:
    """Take ``values[e]`` into row ``index[e]``; see `take_row`."""
    for e in range(index.size):
        take_row(values, e, is_max, index[e], best, ties)


@njit(nogil=True, cache=True, error_model="numpy")
def shares_of_edges(values: Array, index: Array, value: Array, share: Array, out: Array) -> None:
    """``out[e] = (values[e] == value[index[e]]) * share[index[e]]``."""
    zero = values.dtype.type(0)
    for e in range(index.size):
        i = index[e]
        for x in range(values.shape[1]):
            out[e, x] = share[i, x] if values[e, x] == value[i, x] else zero


@njit(nogil=True, cache=True, error_model="numpy")
def gather_rows(rows: Array, index: Array, out: Array) -> None:
    """``out[e] = rows[index[e]]``."""
    for e in range(index.size):
        if e + AHEAD < index.size:
            prefetch(rows, index[e + AHEAD])
        j = index[e]
        for x in range(rows.shape[1]):
            out[e, x] = rows[j, x]


@njit(nogil=True, cache=True, error_model="numpy")
def scatter_rows(out: Array, index: Array, rows: Array) -> None:
    """``out[index[e]] += rows[e]``, edge by edge."""
    for e in range(index.size):
        if e + AHEAD < index.size:
            prefetch(out, index[e + AHEAD])
        i = index[e]
        for x in range(rows.shape[1]):
            out[i, x] += rows[e, x]
